#include "router/session.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    KEEPALIVE_S = 15,
    ANSWER_MAX = 64 << 20, /* bytes of one choice's text not sent yet */
    PULL_BYTES = 64 << 10, /* enough for one pull; the next choice waits for the next one */
};

struct session_choice {
    session *session;
    router_handle handle; /* 0: the core has no such request (any more) */
    uint32_t index;
    const text_prompt *prompt;
    stream_text text;
    bool text_ready; /* text is initialised */
    pd_buf shown;    /* text not sent yet */
    uint32_t *ids;   /* token ids not sent yet, when asked for */
    uint32_t ids_count, ids_size;
    const char *finish; /* NULL: goes on */
    uint32_t completion_tokens, cached_tokens;
    bool begun;      /* a first token came */
    bool first_sent; /* the chunk that names the role */
    bool finish_sent;
};

struct session {
    session_env *env;
    session *prev, *next;
    http_exchange *exchange;
    char id[SESSION_ID_BYTES];
    char answer_id[SESSION_ID_BYTES + 16];
    stream_head head;
    text_job *job;     /* owned once started */
    text_job *pending; /* not ours yet: in the text pool */
    session_choice *choices;
    uint32_t choices_count, ended_count;
    bool starting, streaming, failed, keepalive;
    api_error error;
    uint64_t arrived_ns, token_ns, sent_ns;
};

static const char *endpoint_name(api_endpoint endpoint)
{
    return endpoint == API_CHAT ? "chat" : "completions";
}

void session_count(session_env *env, const char *endpoint, int status)
{
    char text[16];
    snprintf(text, sizeof text, "%d", status);
    const pd_metric_label labels[] = {{"endpoint", endpoint}, {"status", text}};
    pd_metric *metric;
    if (pd_metrics_series(env->metrics, PD_METRIC_COUNTER, "kvferry_http_requests_total",
                          "HTTP requests by what was answered.", labels, 2, &metric) == PD_OK)
        pd_metric_add(metric, 1);
}

void session_headers(const char *request_id, const char *content_type, uint32_t retry_after_s,
                     char *text, http_headers *headers_out)
{
    *headers_out = (http_headers){
        .name = {"Content-Type", "x-request-id"}, .value = {content_type, request_id}, .count = 2};
    if (retry_after_s > 0) {
        snprintf(text, 16, "%u", retry_after_s);
        headers_out->name[headers_out->count] = "Retry-After";
        headers_out->value[headers_out->count++] = text;
    }
}

/* ---- how answers end: each is counted once ---- */

static void count_end(const session_env *env, const session_choice *choice, pd_metric *reason)
{
    pd_metric_add(reason, 1);
    if (!choice->begun)
        return;
    pd_metric_observe(env->prompt, (double)choice->prompt->ids.count);
    pd_metric_observe(env->generation, choice->completion_tokens);
}

/* The choices that have not ended by themselves; the request, where none was begun. */
static void count_rest(const session *s, pd_metric *reason)
{
    if (s->choices_count == 0)
        pd_metric_add(reason, 1);
    for (uint32_t i = 0; i < s->choices_count; i++) {
        if (s->choices[i].finish == NULL)
            count_end(s->env, &s->choices[i], reason);
    }
}

static pd_metric *reason_of(const session_env *env, const api_error *error)
{
    static const char *const TIMEOUTS[] = {"deadline_exceeded", "worker_timeout", "overloaded",
                                           "no_worker"};
    for (size_t i = 0; i < sizeof TIMEOUTS / sizeof TIMEOUTS[0]; i++) {
        if (error->code != NULL && strcmp(error->code, TIMEOUTS[i]) == 0)
            return env->success_timeout;
    }
    return env->success_error;
}

/* ---- birth and death ---- */

session *session_create(session_env *env, http_exchange *exchange, api_endpoint endpoint,
                        const char *request_id, uint64_t now_ns)
{
    session *s = pd_calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->env = env;
    s->exchange = exchange;
    s->arrived_ns = s->sent_ns = now_ns;
    snprintf(s->id, sizeof s->id, "%s", request_id);
    snprintf(s->answer_id, sizeof s->answer_id, "%s-%s", endpoint == API_CHAT ? "chatcmpl" : "cmpl",
             s->id);
    s->head = (stream_head){.endpoint = endpoint,
                            .id = s->answer_id,
                            .model = env->model,
                            .created = pd_clock_unix_ms() / 1000};
    s->next = env->first;
    if (s->next != NULL)
        s->next->prev = s;
    env->first = s;
    env->count++;
    http_set_user(exchange, s);
    return s;
}

void session_set_pending(session *s, text_job *job)
{
    s->pending = job;
}

static void forget(session *s, session_choice *choice)
{
    if (choice->handle == 0)
        return;
    s->env->by_slot[choice->handle & ((1u << ROUTER_HANDLE_SLOT_BITS) - 1)] = NULL;
    choice->handle = 0;
}

static void cancel_all(session *s, uint64_t now_ns)
{
    for (uint32_t i = 0; i < s->choices_count; i++) {
        router_handle handle = s->choices[i].handle;
        if (handle == 0)
            continue;
        forget(s, &s->choices[i]);
        router_core_cancel(s->env->core, handle, now_ns);
    }
}

static void destroy(session *s)
{
    session_env *env = s->env;
    for (uint32_t i = 0; i < s->choices_count; i++) {
        session_choice *choice = &s->choices[i];
        pd_assert(choice->handle == 0);
        if (choice->text_ready)
            stream_text_fini(&choice->text);
        pd_buf_fini(&choice->shown);
        pd_free(choice->ids);
    }
    pd_free(s->choices);
    text_job_destroy(s->job);
    if (s->pending != NULL)
        s->pending->user = NULL; /* it is dropped when it comes */
    if (s->prev != NULL)
        s->prev->next = s->next;
    else
        env->first = s->next;
    if (s->next != NULL)
        s->next->prev = s->prev;
    env->count--;
    pd_free(s);
}

static void respond(session *s, int status, uint32_t retry_after_s, const pd_buf *body)
{
    http_headers headers;
    char retry[16];
    session_headers(s->id, "application/json", retry_after_s, retry, &headers);
    session_count(s->env, endpoint_name(s->head.endpoint), status);
    http_respond(s->exchange, status, &headers, pd_buf_text(body), body->len);
}

void session_refuse(session *s, const api_error *error)
{
    pd_buf body;
    if (!s->failed)
        count_rest(s, reason_of(s->env, error));
    pd_buf_init(&body, 1 << 16);
    api_error_write(error, &body);
    pd_log_req_debug(s->id, "msg=\"request refused\" status=%d param=%s code=%s",
                     error->http_status, error->param, error->code == NULL ? "-" : error->code);
    respond(s, error->http_status, error->retry_after_s, &body);
    pd_buf_fini(&body);
    destroy(s);
}

void session_gone(session *s, uint64_t now_ns)
{
    pd_log_req_info(s->id, "msg=\"client gone\" after_ms=%.1f",
                    (double)(now_ns - s->arrived_ns) / 1e6);
    if (!s->failed)
        count_rest(s, s->env->success_abort);
    if (!s->streaming) /* a stream's 200 has been counted */
        session_count(s->env, endpoint_name(s->head.endpoint), 499);
    cancel_all(s, now_ns);
    destroy(s);
}

/* ---- ends ---- */

static void respond_whole(session *s)
{
    pd_buf body;
    stream_part parts[API_CHOICES_MAX];
    stream_usage usage = {0};
    const api_request *request = s->job->request;

    for (uint32_t i = 0; i < s->choices_count; i++) {
        const session_choice *choice = &s->choices[i];
        parts[i] = (stream_part){.index = i,
                                 .text = {pd_buf_text(&choice->shown), choice->shown.len},
                                 .finish = choice->finish};
        if (request->return_token_ids) {
            static const uint32_t none;
            parts[i].token_ids = choice->ids_count == 0 ? &none : choice->ids;
            parts[i].token_ids_count = choice->ids_count;
            parts[i].prompt_token_ids = choice->prompt->ids.ids;
            parts[i].prompt_token_ids_count = (uint32_t)choice->prompt->ids.count;
        }
        usage.completion_tokens += choice->completion_tokens;
        if (i % request->n == 0) { /* a prompt counts once, whatever n */
            usage.prompt_tokens += (uint32_t)choice->prompt->ids.count;
            usage.cached_tokens += choice->cached_tokens;
        }
    }
    pd_buf_init(&body, (size_t)ANSWER_MAX * 8);
    stream_write_answer(&s->head, parts, s->choices_count, &usage, &body);
    if (pd_buf_status(&body) != PD_OK) {
        api_error error;
        api_error_set(&error, 503, "out_of_memory", NULL, "the router is out of memory");
        session_refuse(s, &error);
    } else {
        respond(s, 200, 0, &body);
        destroy(s);
    }
    pd_buf_fini(&body);
}

static void begin_stream(session *s)
{
    if (s->streaming)
        return;
    http_headers headers;
    session_headers(s->id, "text/event-stream", 0, NULL, &headers);
    headers.name[headers.count] = "Cache-Control";
    headers.value[headers.count++] = "no-cache";
    session_count(s->env, endpoint_name(s->head.endpoint), 200);
    s->streaming = true;
    http_stream_begin(s->exchange, 200, &headers);
}

/* The whole request has failed. May destroy the session (not while it is starting). */
static void fail(session *s, const api_error *error, uint64_t now_ns)
{
    if (s->failed)
        return;
    s->failed = true;
    s->error = *error;
    count_rest(s, reason_of(s->env, error));
    cancel_all(s, now_ns);
    if (s->starting)
        return;
    if (s->streaming)
        http_wake(s->exchange);
    else
        session_refuse(s, error);
}

/* May destroy the session. */
static void end_choice(session *s, session_choice *choice, const char *finish)
{
    choice->finish = finish;
    forget(s, choice);
    s->ended_count++;
    count_end(s->env, choice,
              strcmp(finish, "stop") == 0 ? s->env->success_stop : s->env->success_length);
    if (s->ended_count == s->choices_count)
        pd_metric_observe(s->env->e2e, (double)(pd_clock_now_ns() - s->arrived_ns) / 1e9);
    if (s->job->request->stream) {
        begin_stream(s);
        http_wake(s->exchange);
    } else if (s->ended_count == s->choices_count) {
        respond_whole(s);
    }
}

/* ---- start ---- */

static void start_choice(session *s, session_choice *choice, const api_request *request,
                         uint64_t now_ns)
{
    session_env *env = s->env;
    size_t end_count = 0;
    const uint32_t *end_ids = pd_tokenizer_end_ids(env->text->tokenizer, &end_count);
    router_request_in in = {
        .tokens = choice->prompt->ids.ids,
        .tokens_count = (uint32_t)choice->prompt->ids.count,
        .hashes = choice->prompt->hashes,
        .hashes_count = choice->prompt->hashes_count,
        .sampling = {.temperature = request->temperature,
                     .top_p = request->top_p,
                     .top_k = request->top_k,
                     .seed = request->seed,
                     .choice = choice->index % request->n},
        .end_tokens = end_ids,
        .end_tokens_count = request->ignore_eos ? 0 : (uint32_t)end_count,
        .max_tokens = choice->prompt->max_tokens,
        .hash_root = env->text->hash_root,
        .priority = request->priority,
    };
    if (in.end_tokens_count > ROUTER_END_TOKENS_MAX)
        in.end_tokens_count = ROUTER_END_TOKENS_MAX;
    if (choice->index == 0)
        snprintf(in.id, sizeof in.id, "%s", s->id);
    else
        snprintf(in.id, sizeof in.id, "%s-%u", s->id, choice->index);
    router_error cause;
    router_handle handle = 0;
    env->starting = choice;
    pd_status status = router_core_on_request(env->core, &in, now_ns, &choice->handle, &cause);
    handle = choice->handle;
    env->starting = NULL;
    if (status != PD_OK) {
        api_error error;
        choice->handle = 0;
        api_error_set(&error, cause.http_status, cause.code, NULL, "%s", cause.message);
        error.type = cause.type;
        error.retry_after_s = cause.retry_after_s;
        fail(s, &error, now_ns);
    } else if (handle != 0) {
        env->by_slot[handle & ((1u << ROUTER_HANDLE_SLOT_BITS) - 1)] = choice;
    }
}

static bool make_choices(session *s, const text_job *job)
{
    const api_request *request = job->request;
    uint32_t count = request->prompts_count * request->n;
    s->choices = pd_calloc(count, sizeof *s->choices);
    if (s->choices == NULL)
        return false;
    s->choices_count = count;
    for (uint32_t i = 0; i < count; i++) {
        session_choice *choice = &s->choices[i];
        choice->session = s;
        choice->index = i;
        choice->prompt = &job->prompts[i / request->n];
        pd_buf_init(&choice->shown, ANSWER_MAX);
        stream_text_init(&choice->text, s->env->text->tokenizer, request->stops,
                         request->stops_count, !request->skip_special_tokens);
        choice->text_ready = true;
    }
    return true;
}

void session_start(session *s, text_job *job, uint64_t now_ns)
{
    s->pending = NULL;
    s->job = job;
    if (job->failed) {
        session_refuse(s, &job->error);
        return;
    }
    s->head.include_usage = job->request->include_usage;
    if (!job->request->has_seed)
        job->request->seed = pd_random_next(&s->env->random);
    if (!make_choices(s, job)) {
        api_error error;
        api_error_set(&error, 503, "out_of_memory", NULL, "the router is out of memory");
        session_refuse(s, &error);
        return;
    }
    pd_log_req_debug(s->id, "msg=\"request\" endpoint=%s choices=%u prompt_tokens=%zu stream=%d",
                     endpoint_name(s->head.endpoint), s->choices_count, job->prompts[0].ids.count,
                     job->request->stream);
    s->starting = true;
    for (uint32_t i = 0; i < s->choices_count && !s->failed; i++)
        start_choice(s, &s->choices[i], job->request, now_ns);
    s->starting = false;
    if (s->failed)
        session_refuse(s, &s->error);
}

/* ---- from the core ---- */

static session_choice *find(session_env *env, router_handle handle)
{
    session_choice *choice = env->by_slot[handle & ((1u << ROUTER_HANDLE_SLOT_BITS) - 1)];
    if (choice != NULL && choice->handle == handle)
        return choice;
    choice = env->starting;
    return choice != NULL && choice->handle == handle ? choice : NULL;
}

static bool keep_id(session_choice *choice, uint32_t token)
{
    if (choice->ids_count == choice->ids_size) {
        uint32_t size = choice->ids_size == 0 ? 32 : choice->ids_size * 2;
        uint32_t *ids = pd_realloc(choice->ids, size * sizeof *ids);
        if (ids == NULL)
            return false;
        choice->ids = ids;
        choice->ids_size = size;
    }
    choice->ids[choice->ids_count++] = token;
    return true;
}

static void measure(session *s, session_choice *choice, uint64_t now_ns)
{
    if (!choice->begun) {
        choice->begun = true;
        pd_metric_observe(s->env->ttft, (double)(now_ns - s->arrived_ns) / 1e9);
    } else if (s->choices_count == 1) {
        pd_metric_observe(s->env->itl, (double)(now_ns - s->token_ns) / 1e9);
    }
    s->token_ns = now_ns;
}

void session_on_token(session_env *env, router_handle handle, uint32_t index, uint32_t token,
                      pd_finish finish, uint64_t now_ns)
{
    session_choice *choice = find(env, handle);
    if (choice == NULL)
        return;
    session *s = choice->session;
    measure(s, choice, now_ns);
    choice->completion_tokens = index + 1;
    pd_status status = PD_OK;
    if (s->job->request->return_token_ids && !keep_id(choice, token))
        status = PD_E_NOMEM;
    if (status == PD_OK && finish != PD_FINISH_STOP) /* an end token is no text */
        status = stream_text_push(&choice->text, token, &choice->shown);
    if (status == PD_OK && finish != PD_FINISH_NONE)
        status = stream_text_finish(&choice->text, &choice->shown);
    if (status != PD_OK) {
        api_error error;
        api_error_set(&error, 503, "out_of_memory", NULL, "the answer's text cannot be held: %s",
                      pd_status_name(status));
        fail(s, &error, now_ns);
        return;
    }
    if (choice->text.stopped) {
        choice->cached_tokens = router_core_cached_tokens(env->core, handle);
        router_core_cancel(env->core, handle, now_ns);
        end_choice(s, choice, "stop");
        return;
    }
    if (s->job->request->stream) {
        begin_stream(s);
        http_wake(s->exchange);
    }
}

void session_on_finish(session_env *env, router_handle handle, const router_finish *finish)
{
    session_choice *choice = find(env, handle);
    if (choice == NULL)
        return;
    session *s = choice->session;
    choice->cached_tokens = finish->cached_tokens;
    pd_metric_observe(env->queue, (double)finish->queued_ns / 1e9);
    end_choice(s, choice, finish->reason == PD_FINISH_STOP ? "stop" : "length");
}

void session_on_error(session_env *env, router_handle handle, const router_error *cause)
{
    session_choice *choice = find(env, handle);
    if (choice == NULL)
        return;
    session *s = choice->session;
    forget(s, choice);
    api_error error;
    api_error_set(&error, cause->http_status, cause->code, NULL, "%s", cause->message);
    error.type = cause->type;
    error.retry_after_s = cause->retry_after_s;
    fail(s, &error, pd_clock_now_ns());
}

/* ---- to the client ---- */

static void write_choice(session *s, session_choice *choice, pd_buf *out)
{
    const api_request *request = s->job->request;
    bool chat = s->head.endpoint == API_CHAT;
    stream_part part = {.index = choice->index, .text = {"", 0}};

    bool last = choice->finish != NULL && !choice->finish_sent;
    bool content = choice->shown.len > 0 || choice->ids_count > 0 || last;
    bool first = !choice->first_sent && (content || (chat && (choice->begun || s->keepalive)));
    if (first && request->return_token_ids) {
        part.prompt_token_ids = choice->prompt->ids.ids;
        part.prompt_token_ids_count = (uint32_t)choice->prompt->ids.count;
    }
    if (first && chat) { /* the role comes in a chunk of its own */
        part.first = true;
        stream_write_chunk(&s->head, &part, out);
        part.first = false;
        part.prompt_token_ids = NULL;
    }
    choice->first_sent |= first;
    if (!content)
        return;
    part.text = (api_text){pd_buf_text(&choice->shown), choice->shown.len};
    if (request->return_token_ids && choice->ids_count > 0) {
        part.token_ids = choice->ids;
        part.token_ids_count = choice->ids_count;
    }
    if (chat && last && (part.text.len > 0 || part.token_ids != NULL)) {
        stream_write_chunk(&s->head, &part, out); /* the end comes in a chunk of its own */
        part.text = (api_text){"", 0};
        part.token_ids = NULL;
    }
    if (last)
        part.finish = choice->finish;
    if (last || part.text.len > 0 || part.token_ids != NULL)
        stream_write_chunk(&s->head, &part, out);
    choice->finish_sent = choice->finish != NULL;
    pd_buf_clear(&choice->shown);
    choice->ids_count = 0;
}

static void write_end(session *s, pd_buf *out)
{
    const api_request *request = s->job->request;
    stream_usage usage = {0};
    for (uint32_t i = 0; i < s->choices_count; i++) {
        const session_choice *choice = &s->choices[i];
        usage.completion_tokens += choice->completion_tokens;
        if (i % request->n == 0) {
            usage.prompt_tokens += (uint32_t)choice->prompt->ids.count;
            usage.cached_tokens += choice->cached_tokens;
        }
    }
    if (request->include_usage)
        stream_write_usage(&s->head, &usage, out);
    stream_write_done(out);
}

http_pull session_pull(session *s, pd_buf *out)
{
    uint32_t written = 0;
    for (uint32_t i = 0; i < s->choices_count && out->len < PULL_BYTES; i++) {
        write_choice(s, &s->choices[i], out);
        written++;
    }
    if (s->failed && written == s->choices_count) {
        stream_write_error(&s->error, out);
        destroy(s);
        return HTTP_PULL_END;
    }
    if (s->ended_count == s->choices_count && written == s->choices_count) {
        write_end(s, out);
        destroy(s);
        return HTTP_PULL_END;
    }
    if (out->len == 0 && s->keepalive)
        stream_write_keepalive(out);
    s->keepalive = false;
    if (out->len == 0)
        return HTTP_PULL_WAIT;
    s->sent_ns = pd_clock_now_ns();
    return HTTP_PULL_MORE;
}

void session_tick_all(session_env *env, uint64_t now_ns)
{
    for (session *s = env->first; s != NULL; s = s->next) {
        if (s->choices == NULL || s->failed || !s->job->request->stream || s->keepalive ||
            now_ns - s->sent_ns < KEEPALIVE_S * PD_NS_PER_S)
            continue;
        s->keepalive = true;
        begin_stream(s);
        http_wake(s->exchange);
    }
}
