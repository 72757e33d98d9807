#include "router/text_pool.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/queue.h"
#include "common/kv/prefix_hash.h"
#include "common/text/detokenizer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>

enum { THREADS_MAX = 8 };

typedef struct text_thread {
    text_pool *pool;
    pthread_t thread;
    bool running;
    pd_queue *in, *out; /* of text_job *; NULL in `in` ends the thread */
    uint32_t waiting;   /* loop thread's count of jobs inside */
} text_thread;

struct text_pool {
    pd_loop *loop;
    text_context context;
    text_pool_fn *fn;
    void *ctx;
    uint32_t threads_count, queue_max;
    atomic_bool stopping; /* what still waits is not worth doing */
    text_thread threads[THREADS_MAX];
};

/* ---- the work ---- */

static void fail_memory(text_job *job)
{
    api_error_set(&job->error, 503, "out_of_memory", NULL, "the router is out of memory");
    job->failed = true;
}

/* One id over the context is enough to know; nobody needs more of a prompt that cannot run. */
static size_t ids_max(const text_context *context, const text_job *job)
{
    return job->endpoint == API_TOKENIZE ? api_count_max(&context->limits)
                                         : (size_t)context->limits.context_max + 1;
}

static void fail_encode(const text_context *context, text_job *job, const char *param,
                        pd_status status)
{
    job->failed = true;
    if (status == PD_E_TOO_LARGE && job->endpoint == API_TOKENIZE)
        api_error_set(&job->error, 400, "context_length_exceeded", param,
                      "%s: more than %u tokens are not counted", param,
                      api_count_max(&context->limits));
    else if (status == PD_E_TOO_LARGE)
        api_error_set(&job->error, 400, "context_length_exceeded", param,
                      "this model's context is %u tokens, the prompt has more",
                      context->limits.context_max);
    else if (status == PD_E_INVALID)
        api_error_set(&job->error, 400, NULL, param, "%s is no valid UTF-8", param);
    else
        fail_memory(job);
}

static pd_status render(const text_context *context, text_job *job, pd_token_ids *ids)
{
    pd_buf text;
    pd_template_spans spans = {0};
    pd_template_error cause = {0};
    pd_buf_init(&text, context->rendered_bytes_max);
    pd_status status = PD_E_UNSUPPORTED;
    if (context->chat == NULL) {
        api_error_set(&job->error, 400, "unsupported", "messages",
                      "this model has no chat template; use /v1/completions");
        job->failed = true;
        goto out;
    }
    status = pd_template_render(context->chat, job->request->messages, NULL, NULL,
                                job->request->add_generation_prompt, &text, &spans, &cause);
    if (status == PD_E_INVALID) {
        api_error_set(&job->error, 400, NULL, "messages", "messages: %s", cause.message);
        job->failed = true;
        goto out;
    }
    if (status == PD_OK)
        status = pd_template_encode(context->tokenizer, pd_buf_text(&text), text.len, &spans,
                                    ids_max(context, job), ids);
    if (status != PD_OK)
        fail_encode(context, job, "messages", status);
out:
    pd_template_spans_fini(&spans);
    pd_buf_fini(&text);
    return status;
}

static pd_status push_id(pd_token_ids *ids, uint32_t id)
{
    if (ids->count == ids->size) {
        size_t size = ids->size == 0 ? 16 : ids->size * 2;
        uint32_t *grown = pd_realloc(ids->ids, size * sizeof *grown);
        if (grown == NULL)
            return PD_E_NOMEM;
        ids->ids = grown;
        ids->size = size;
    }
    ids->ids[ids->count++] = id;
    return PD_OK;
}

/* Control tokens written in a completion's prompt are control tokens: the caller owns the whole
 * text there, unlike a turn of a conversation. */
static pd_status encode_prompt(const text_context *context, text_job *job, const api_prompt *prompt,
                               pd_token_ids *ids)
{
    pd_status status = PD_OK;
    if (prompt->text.bytes == NULL) {
        for (uint32_t i = 0; i < prompt->ids_count && status == PD_OK; i++)
            status = push_id(ids, prompt->ids[i]);
    } else {
        int64_t bos = pd_tokenizer_added_bos(context->tokenizer);
        if (bos >= 0 && job->request->add_special_tokens)
            status = push_id(ids, (uint32_t)bos);
        if (status == PD_OK)
            status = pd_tokenizer_encode(context->tokenizer, prompt->text.bytes, prompt->text.len,
                                         true, ids_max(context, job), ids);
    }
    if (status != PD_OK)
        fail_encode(context, job, "prompt", status);
    return status;
}

/* How long the answer may be, and whether prompt and answer fit the context. */
static pd_status fit(const text_context *context, text_job *job, text_prompt *prompt)
{
    const api_request *request = job->request;
    uint32_t context_max = context->limits.context_max;
    const char *param = request->endpoint == API_CHAT ? "messages" : "prompt";
    size_t count = prompt->ids.count;
    if (count == 0) {
        api_error_set(&job->error, 400, NULL, param, "%s: no token comes of it", param);
    } else if (count + 1 > context_max) {
        api_error_set(&job->error, 400, "context_length_exceeded", param,
                      "this model's context is %u tokens, the prompt has %s%zu", context_max,
                      count > context_max ? "at least " : "", count);
    } else if (request->has_max_tokens && request->max_tokens > context_max - count) {
        api_error_set(
            &job->error, 400, "context_length_exceeded", param,
            "this model's context is %u tokens, but %zu were asked for: %zu in the prompt "
            "and %u for the answer",
            context_max, count + request->max_tokens, count, request->max_tokens);
    } else {
        uint32_t room = context_max - (uint32_t)count;
        /* Not all that the context has room for: KV blocks are set aside for every token that an
         * answer may have, so a few such answers would fill a decode worker. */
        uint32_t unasked = request->endpoint == API_CHAT ? context->chat_tokens_default
                                                         : context->max_tokens_default;
        prompt->max_tokens = request->has_max_tokens ? request->max_tokens
                             : unasked < room        ? unasked
                                                     : room;
        return PD_OK;
    }
    job->failed = true;
    return PD_E_INVALID;
}

static pd_status hash(const text_context *context, text_job *job, text_prompt *prompt)
{
    uint32_t blocks = (uint32_t)(prompt->ids.count / context->block_tokens);
    prompt->hashes = pd_malloc((blocks + 1) * sizeof *prompt->hashes);
    if (prompt->hashes == NULL) {
        fail_memory(job);
        return PD_E_NOMEM;
    }
    prompt->hashes_count =
        pd_prefix_hash_fill(context->hash_root, context->block_tokens, prompt->ids.ids,
                            prompt->ids.count, prompt->hashes, blocks);
    return PD_OK;
}

static void detokenize(const text_context *context, text_job *job)
{
    pd_detokenizer detokenizer;
    const api_prompt *prompt = job->request->prompts;
    /* Every token is shown: what /tokenize took apart comes back whole. */
    pd_detokenizer_init(&detokenizer, context->tokenizer, true);
    for (uint32_t i = 0; i < prompt->ids_count; i++)
        pd_detokenizer_push(&detokenizer, prompt->ids[i], &job->text);
    pd_detokenizer_finish(&detokenizer, &job->text);
    if (pd_buf_status(&job->text) != PD_OK)
        fail_memory(job);
}

void text_job_run(const text_context *context, text_job *job)
{
    if (api_parse(job->endpoint, job->body, job->body_len, &context->limits, &job->request,
                  &job->error) != PD_OK) {
        job->failed = true;
        return;
    }
    /* The document owns copies of all strings. */
    pd_free(job->body);
    job->body = NULL;
    if (job->endpoint == API_DETOKENIZE) {
        detokenize(context, job);
        return;
    }
    uint32_t count = job->request->prompts_count;
    job->prompts = pd_calloc(count, sizeof *job->prompts);
    if (job->prompts == NULL) {
        fail_memory(job);
        return;
    }
    for (uint32_t i = 0; i < count && !job->failed; i++) {
        text_prompt *prompt = &job->prompts[i];
        pd_status status =
            job->request->messages != NULL
                ? render(context, job, &prompt->ids)
                : encode_prompt(context, job, &job->request->prompts[i], &prompt->ids);
        if (status == PD_OK && job->endpoint != API_TOKENIZE)
            status = fit(context, job, prompt);
        if (status == PD_OK && job->endpoint != API_TOKENIZE)
            status = hash(context, job, prompt);
        pd_assert((status != PD_OK) == job->failed);
    }
}

pd_status text_job_create(api_endpoint endpoint, const char *body, size_t len, void *user,
                          text_job **job_out)
{
    text_job *job = pd_calloc(1, sizeof *job);
    if (job == NULL)
        return PD_E_NOMEM;
    *job = (text_job){.endpoint = endpoint, .body_len = len, .user = user};
    pd_buf_init(&job->text, 64u << 20);
    job->body = pd_strndup(body == NULL ? "" : body, len);
    if (job->body == NULL) {
        pd_free(job);
        return PD_E_NOMEM;
    }
    *job_out = job;
    return PD_OK;
}

void text_job_destroy(text_job *job)
{
    if (job == NULL)
        return;
    if (job->prompts != NULL) {
        for (uint32_t i = 0; i < job->request->prompts_count; i++) {
            pd_token_ids_fini(&job->prompts[i].ids);
            pd_free(job->prompts[i].hashes);
        }
        pd_free(job->prompts);
    }
    api_request_destroy(job->request);
    pd_buf_fini(&job->text);
    pd_free(job->body);
    pd_free(job);
}

/* ---- threads ---- */

static void *work(void *ctx)
{
    text_thread *thread = ctx;
    for (;;) {
        text_job *job = NULL;
        pd_queue_drain_fd(thread->in);
        if (pd_queue_pop(thread->in, &job) != PD_OK) {
            pd_queue_wait(thread->in, -1);
            continue;
        }
        if (job == NULL)
            return NULL;
        if (!atomic_load_explicit(&thread->pool->stopping, memory_order_relaxed))
            text_job_run(&thread->pool->context, job);
        /* No more jobs are inside than the queue holds, so there is room. */
        pd_status status = pd_queue_push(thread->out, &job);
        pd_assert(status == PD_OK);
    }
}

static void on_done(void *ctx, uint32_t epoll_events)
{
    text_thread *thread = ctx;
    text_job *job;
    (void)epoll_events;
    pd_queue_drain_fd(thread->out);
    while (pd_queue_pop(thread->out, &job) == PD_OK) {
        thread->waiting--;
        thread->pool->fn(thread->pool->ctx, job);
    }
}

static pd_status start(text_pool *pool, text_thread *thread)
{
    thread->pool = pool;
    /* One place more for the word that ends the thread. */
    pd_status status = pd_queue_create(sizeof(text_job *), pool->queue_max + 1, &thread->in);
    if (status == PD_OK)
        status = pd_queue_create(sizeof(text_job *), pool->queue_max + 1, &thread->out);
    if (status == PD_OK)
        status = pd_loop_add_fd(pool->loop, pd_queue_fd(thread->out), EPOLLIN, on_done, thread);
    if (status != PD_OK)
        return status;
    if (pthread_create(&thread->thread, NULL, work, thread) != 0) {
        pd_log_error("msg=\"text pool: cannot start a thread: %m\"");
        pd_loop_remove_fd(pool->loop, pd_queue_fd(thread->out));
        return PD_E_IO;
    }
    thread->running = true;
    return PD_OK;
}

pd_status text_pool_create(pd_loop *loop, const text_context *context, uint32_t threads,
                           uint32_t queue_max, text_pool_fn *fn, void *ctx, text_pool **pool_out)
{
    pd_assert(threads >= 1 && threads <= THREADS_MAX && queue_max >= 1);
    text_pool *pool = pd_calloc(1, sizeof *pool);
    if (pool == NULL)
        return PD_E_NOMEM;
    pool->loop = loop;
    pool->context = *context;
    pool->fn = fn;
    pool->ctx = ctx;
    pool->queue_max = queue_max;
    pd_status status = PD_OK;
    for (uint32_t i = 0; i < threads && status == PD_OK; i++) {
        pool->threads_count++;
        status = start(pool, &pool->threads[i]);
    }
    if (status != PD_OK) {
        text_pool_destroy(pool);
        return status;
    }
    *pool_out = pool;
    return PD_OK;
}

static void stop(text_thread *thread)
{
    text_job *job = NULL;
    if (thread->running) {
        pd_status status = pd_queue_push(thread->in, &job);
        pd_assert(status == PD_OK);
        pthread_join(thread->thread, NULL);
        pd_loop_remove_fd(thread->pool->loop, pd_queue_fd(thread->out));
        while (pd_queue_pop(thread->out, &job) == PD_OK)
            text_job_destroy(job);
    }
    if (thread->in != NULL)
        pd_queue_destroy(thread->in);
    if (thread->out != NULL)
        pd_queue_destroy(thread->out);
}

void text_pool_destroy(text_pool *pool)
{
    if (pool == NULL)
        return;
    atomic_store_explicit(&pool->stopping, true, memory_order_relaxed);
    for (uint32_t i = 0; i < pool->threads_count; i++)
        stop(&pool->threads[i]);
    pd_free(pool);
}

pd_status text_pool_submit(text_pool *pool, text_job *job)
{
    text_thread *best = &pool->threads[0];
    for (uint32_t i = 1; i < pool->threads_count; i++) {
        if (pool->threads[i].waiting < best->waiting)
            best = &pool->threads[i];
    }
    if (best->waiting >= pool->queue_max)
        return PD_E_OVERLOAD;
    pd_status status = pd_queue_push(best->in, &job);
    if (status == PD_OK)
        best->waiting++;
    return status;
}
