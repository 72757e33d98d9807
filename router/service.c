#include "router/service.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/audit_page.h"
#include "router/pages.h"
#include "router/session.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define LAST_WORDS_NS (500 * PD_NS_PER_MS) /* for errors to reach their clients at the end */

enum { PAGE_MAX = 16 << 20 };

struct service {
    pd_loop *loop;
    service_options options;
    router_core *core;
    http_server *http;
    text_pool *pool;
    session_env env;
    pd_loop_timer *core_timer, *second_timer;
    int64_t created; /* unix seconds, of the models */
    bool stopping;
    bool ended; /* the grace is over and every answer was told so */
    uint64_t stop_ns;
    pd_loop_fn *stopped;
    void *stopped_ctx;
};

/* ---- plain answers ---- */

static void answer(service *s, http_exchange *x, const char *endpoint, const char *id, int status,
                   const char *type, const pd_buf *body)
{
    http_headers headers;
    char retry[16];
    if (pd_buf_status(body) != PD_OK) {
        static const char text[] =
            "{\"error\":{\"message\":\"the router is out of memory\",\"type\":"
            "\"server_error\",\"param\":null,\"code\":\"out_of_memory\"}}";
        session_headers(id, "application/json", 1, retry, &headers);
        session_count(&s->env, endpoint, 503);
        http_respond(x, 503, &headers, text, sizeof text - 1);
        return;
    }
    session_headers(id, type, status == 503 ? 1 : 0, retry, &headers);
    session_count(&s->env, endpoint, status);
    http_respond(x, status, &headers, pd_buf_text(body), body->len);
}

static void answer_error(service *s, http_exchange *x, const char *endpoint, const char *id,
                         const api_error *error)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    api_error_write(error, &body);
    answer(s, x, endpoint, id, error->http_status, "application/json", &body);
    pd_buf_fini(&body);
}

/* The client's x-request-id, with what could break a line or a header replaced; or one of ours. */
static void read_id(http_exchange *x, char id[SESSION_ID_BYTES])
{
    const char *given = http_header(x, "x-request-id");
    size_t len = 0;
    for (; given != NULL && given[len] != '\0' && len < SESSION_ID_BYTES - 1; len++) {
        unsigned char c = (unsigned char)given[len];
        id[len] = isalnum(c) || strchr("-_.:", c) != NULL ? (char)c : '_';
    }
    id[len] = '\0';
    if (len == 0)
        snprintf(id, SESSION_ID_BYTES, "%016" PRIx64, pd_random_id());
}

/* ---- answers that need the model's text ---- */

static void answer_tokenize(service *s, http_exchange *x, const char *id, const text_job *job)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    const pd_token_ids *ids = &job->prompts[0].ids;
    pd_buf_printf(&body, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", ids->count,
                  s->options.text.limits.context_max);
    for (size_t i = 0; i < ids->count; i++)
        pd_buf_printf(&body, "%s%u", i > 0 ? "," : "", ids->ids[i]);
    pd_buf_puts(&body, "]}");
    answer(s, x, "tokenize", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

static void answer_detokenize(service *s, http_exchange *x, const char *id, const text_job *job)
{
    pd_buf body;
    pd_buf_init(&body, (size_t)PAGE_MAX * 8);
    pd_buf_puts(&body, "{\"prompt\":");
    pd_json_write_string(&body, pd_buf_text(&job->text), job->text.len);
    pd_buf_puts(&body, "}");
    answer(s, x, "detokenize", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

/* A tokenize or detokenize request that waits for its job. */
typedef struct waiting {
    http_exchange *exchange;
    text_job *pending;
    char id[SESSION_ID_BYTES];
} waiting;

static bool is_generation(api_endpoint endpoint)
{
    return endpoint == API_CHAT || endpoint == API_COMPLETIONS;
}

static void on_plain_job(service *s, waiting *w, text_job *job)
{
    const char *endpoint = job->endpoint == API_TOKENIZE ? "tokenize" : "detokenize";
    if (job->failed)
        answer_error(s, w->exchange, endpoint, w->id, &job->error);
    else if (job->endpoint == API_TOKENIZE)
        answer_tokenize(s, w->exchange, w->id, job);
    else
        answer_detokenize(s, w->exchange, w->id, job);
    text_job_destroy(job);
    pd_free(w);
}

static void on_job(void *ctx, text_job *job)
{
    service *s = ctx;
    if (job->user == NULL) /* the client went away meanwhile */
        text_job_destroy(job);
    else if (is_generation(job->endpoint))
        session_start(job->user, job, pd_clock_now_ns());
    else
        on_plain_job(s, job->user, job);
}

/* What an exchange's user pointer is: told apart by a tag in front would cost a cast everywhere;
 * only two kinds exist and the path says which. */
static bool path_generates(const http_exchange *x)
{
    return strncmp(http_path(x), "/v1/", 4) == 0;
}

static void refuse_busy(service *s, http_exchange *x, const char *id, const char *endpoint,
                        session *session_or_null, bool memory)
{
    api_error error;
    if (memory)
        api_error_set(&error, 503, "out_of_memory", NULL, "the router is out of memory");
    else
        api_error_set(&error, 429, "queue_full", NULL,
                      "too many prompts wait to be tokenized, try again later");
    error.retry_after_s = 1;
    if (session_or_null != NULL)
        session_refuse(session_or_null, &error);
    else
        answer_error(s, x, endpoint, id, &error);
}

static void submit(service *s, http_exchange *x, api_endpoint endpoint, const char *id)
{
    size_t len;
    const char *body = http_body(x, &len);
    const char *name = endpoint == API_TOKENIZE ? "tokenize" : "detokenize";
    text_job *job = NULL;
    session *generation = NULL;
    waiting *plain = NULL;

    if (is_generation(endpoint)) {
        name = endpoint == API_CHAT ? "chat" : "completions";
        generation = session_create(&s->env, x, endpoint, id, pd_clock_now_ns());
    } else {
        plain = pd_calloc(1, sizeof *plain);
        if (plain != NULL) {
            plain->exchange = x;
            snprintf(plain->id, sizeof plain->id, "%s", id);
        }
    }
    void *user = generation != NULL ? (void *)generation : (void *)plain;
    if (user == NULL || text_job_create(endpoint, body, len, user, &job) != PD_OK) {
        pd_free(plain);
        refuse_busy(s, x, id, name, generation, true);
        return;
    }
    http_drop_body(x);
    if (len <= TEXT_INLINE_BYTES) {
        text_job_run(&s->options.text, job);
        on_job(s, job);
        return;
    }
    if (text_pool_submit(s->pool, job) != PD_OK) {
        text_job_destroy(job);
        pd_free(plain);
        refuse_busy(s, x, id, name, generation, false);
        return;
    }
    if (generation != NULL) {
        session_set_pending(generation, job);
    } else {
        plain->pending = job;
        http_set_user(x, plain);
    }
}

/* ---- routes ---- */

static void get_health(service *s, http_exchange *x, const char *id)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    pd_buf_puts(&body, "{\"status\":\"ok\"}");
    answer(s, x, "health", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

static void get_ready(service *s, http_exchange *x, const char *id)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    bool ready = pages_ready(s->core, s->stopping, &body);
    answer(s, x, "ready", id, ready ? 200 : 503, "application/json", &body);
    pd_buf_fini(&body);
}

static void get_workers(service *s, http_exchange *x, const char *id)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    pages_workers(s->core, pd_clock_now_ns(), &body);
    answer(s, x, "workers", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

static void get_audit(service *s, http_exchange *x, const char *id)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    audit_page(s->core, pd_clock_now_ns(), &body);
    answer(s, x, "audit", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

static void get_metrics(service *s, http_exchange *x, const char *id)
{
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    pd_metrics_write(s->env.metrics, &body);
    pages_metrics(s->core, s->env.model, http_server_connections(s->http), pd_clock_now_ns(),
                  &body);
    if (s->options.bus_counters != NULL) {
        pd_bus_counters counters = s->options.bus_counters(s->options.bus_ctx);
        pages_bus(&counters, &body);
    }
    answer(s, x, "metrics", id, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
    pd_buf_fini(&body);
}

static void get_models(service *s, http_exchange *x, const char *id)
{
    const api_limits *limits = &s->options.text.limits;
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    pages_models(limits->model, limits->aliases, limits->aliases_count, limits->context_max,
                 s->created, &body);
    answer(s, x, "models", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

static void get_model(service *s, http_exchange *x, const char *id, const char *name)
{
    const api_limits *limits = &s->options.text.limits;
    const char *found = strcmp(name, limits->model) == 0 ? limits->model : NULL;
    for (uint32_t i = 0; i < limits->aliases_count; i++) {
        if (strcmp(name, limits->aliases[i]) == 0)
            found = limits->aliases[i];
    }
    if (found == NULL) {
        api_error error;
        api_error_set(&error, 404, "model_not_found", "model",
                      "the model '%.100s' does not exist here; this router serves '%s'", name,
                      limits->model);
        answer_error(s, x, "models", id, &error);
        return;
    }
    pd_buf body;
    pd_buf_init(&body, PAGE_MAX);
    pages_model(found, limits->context_max, s->created, &body);
    answer(s, x, "models", id, 200, "application/json", &body);
    pd_buf_fini(&body);
}

static void post_chat(service *s, http_exchange *x, const char *id)
{
    submit(s, x, API_CHAT, id);
}

static void post_completions(service *s, http_exchange *x, const char *id)
{
    submit(s, x, API_COMPLETIONS, id);
}

static void post_tokenize(service *s, http_exchange *x, const char *id)
{
    submit(s, x, API_TOKENIZE, id);
}

static void post_detokenize(service *s, http_exchange *x, const char *id)
{
    submit(s, x, API_DETOKENIZE, id);
}

static const struct {
    const char *path;
    bool post;
    void (*fn)(service *service, http_exchange *exchange, const char *id);
} ROUTES[] = {
    {"/v1/chat/completions", true, post_chat},
    {"/v1/completions", true, post_completions},
    {"/tokenize", true, post_tokenize},
    {"/detokenize", true, post_detokenize},
    {"/v1/models", false, get_models},
    {"/health", false, get_health},
    {"/ready", false, get_ready},
    {"/metrics", false, get_metrics},
    {"/workers", false, get_workers},
    {"/audit", false, get_audit},
};

static void wrong_method(service *s, http_exchange *x, const char *id, bool post)
{
    api_error error;
    pd_buf body;
    http_headers headers;
    api_error_set(&error, 405, "method_not_allowed", NULL, "%s takes %s, not %.20s", http_path(x),
                  post ? "POST" : "GET", http_method(x));
    pd_buf_init(&body, PAGE_MAX);
    api_error_write(&error, &body);
    session_headers(id, "application/json", 0, NULL, &headers);
    headers.name[headers.count] = "Allow";
    headers.value[headers.count++] = post ? "POST" : "GET, HEAD";
    session_count(&s->env, "other", 405);
    http_respond(x, 405, &headers, pd_buf_text(&body), body.len);
    pd_buf_fini(&body);
}

static void on_request(void *ctx, http_exchange *x)
{
    static const char MODELS[] = "/v1/models/";
    service *s = ctx;
    char id[SESSION_ID_BYTES];
    read_id(x, id);
    const char *method = http_method(x);
    bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    bool post = strcmp(method, "POST") == 0;
    for (size_t i = 0; i < sizeof ROUTES / sizeof ROUTES[0]; i++) {
        if (strcmp(http_path(x), ROUTES[i].path) != 0)
            continue;
        if (ROUTES[i].post ? post : get)
            ROUTES[i].fn(s, x, id);
        else
            wrong_method(s, x, id, ROUTES[i].post);
        return;
    }
    if (strncmp(http_path(x), MODELS, sizeof MODELS - 1) == 0) {
        if (get)
            get_model(s, x, id, http_path(x) + sizeof MODELS - 1);
        else
            wrong_method(s, x, id, false);
        return;
    }
    api_error error;
    api_error_set(&error, 404, "not_found", NULL, "there is no %.200s here", http_path(x));
    answer_error(s, x, "other", id, &error);
}

static http_pull on_pull(void *ctx, http_exchange *x, pd_buf *out)
{
    (void)ctx;
    return session_pull(http_user(x), out);
}

static void on_gone(void *ctx, http_exchange *x)
{
    (void)ctx;
    if (http_user(x) == NULL)
        return;
    if (path_generates(x)) {
        session_gone(http_user(x), pd_clock_now_ns());
    } else {
        waiting *plain = http_user(x);
        plain->pending->user = NULL;
        pd_free(plain);
    }
}

static void on_refused(void *ctx, int status)
{
    service *s = ctx;
    session_count(&s->env, "other", status);
}

/* ---- the core's sink ---- */

static bool sink_send(void *ctx, const char *to, const pd_message *message)
{
    service *s = ctx;
    return s->options.send(s->options.bus_ctx, to, message);
}

static void sink_token(void *ctx, router_handle request, uint32_t index, uint32_t token,
                       pd_finish finish)
{
    service *s = ctx;
    session_on_token(&s->env, request, index, token, finish, pd_clock_now_ns());
}

static void sink_finish(void *ctx, router_handle request, const router_finish *finish)
{
    service *s = ctx;
    session_on_finish(&s->env, request, finish);
}

static void sink_error(void *ctx, router_handle request, const router_error *error)
{
    service *s = ctx;
    session_on_error(&s->env, request, error);
}

void service_on_message(service *s, const char *from, const pd_message *message)
{
    router_core_on_message(s->core, from, message, pd_clock_now_ns());
}

void service_on_worker_dead(service *s, uint64_t incarnation)
{
    router_core_on_worker_dead(s->core, incarnation, pd_clock_now_ns());
}

void service_on_worker_cut(service *s, const char *from)
{
    router_core_on_worker_cut(s->core, from, pd_clock_now_ns());
}

bool service_has_worker(const service *s, uint64_t incarnation)
{
    return router_core_has_worker(s->core, incarnation);
}

/* ---- time ---- */

static bool on_prepare(void *ctx)
{
    service *s = ctx;
    pd_loop_timer_arm(s->core_timer, router_core_next_due(s->core));
    return false;
}

static void on_core_timer(void *ctx)
{
    service *s = ctx;
    router_core_on_tick(s->core, pd_clock_now_ns());
}

/* Nothing is left, not even bytes on their way to a client; or the grace is over. */
static bool service_over(service *s, uint64_t now_ns)
{
    if (s->env.count == 0 && !http_server_busy(s->http))
        return true;
    if (now_ns < s->stop_ns)
        return false;
    if (s->ended)
        return true;
    pd_log_warn("msg=\"the grace is over: answers end with an error\" answers=%u", s->env.count);
    s->ended = true;
    s->stop_ns = now_ns + LAST_WORDS_NS;
    router_core_end_all(s->core);
    return false;
}

static void on_second(void *ctx)
{
    service *s = ctx;
    uint64_t now_ns = pd_clock_now_ns();
    session_tick_all(&s->env, now_ns);
    if (s->stopping && service_over(s, now_ns)) {
        s->stopped(s->stopped_ctx);
        return;
    }
    uint64_t period_ns = s->stopping ? 20 * PD_NS_PER_MS : PD_NS_PER_S;
    pd_loop_timer_arm(s->second_timer, now_ns + period_ns);
}

void service_stop(service *s, uint64_t grace_ns, pd_loop_fn *done, void *ctx)
{
    if (s->stopping)
        return;
    uint64_t now_ns = pd_clock_now_ns();
    s->stopping = true;
    s->stop_ns = now_ns + grace_ns;
    s->stopped = done;
    s->stopped_ctx = ctx;
    router_core_stop(s->core);
    http_server_stop_accepting(s->http);
    pd_loop_timer_arm(s->second_timer, now_ns);
}

/* ---- start ---- */

static pd_status make_metrics(service *s)
{
    session_env *env = &s->env;
    const pd_metric_label model[] = {{"model_name", env->model}};
    const struct {
        const char *name, *help;
        pd_metric **metric;
        pd_metric_kind kind;
    } histograms[] = {
        {"vllm:time_to_first_token_seconds", "Arrival to first token.", &env->ttft,
         PD_METRIC_HISTOGRAM},
        {"vllm:inter_token_latency_seconds", "Between two tokens of an answer.", &env->itl,
         PD_METRIC_HISTOGRAM},
        {"vllm:e2e_request_latency_seconds", "Arrival to the end of the answer.", &env->e2e,
         PD_METRIC_HISTOGRAM},
        {"vllm:request_queue_time_seconds", "Waiting in the router.", &env->queue,
         PD_METRIC_HISTOGRAM},
        {"vllm:request_prompt_tokens", "Prompt tokens of an answer that began.", &env->prompt,
         PD_METRIC_HISTOGRAM_TOKENS},
        {"vllm:request_generation_tokens", "Tokens of an answer that began.", &env->generation,
         PD_METRIC_HISTOGRAM_TOKENS},
    };
    const struct {
        const char *reason;
        pd_metric **metric;
    } reasons[] = {{"stop", &env->success_stop},
                   {"length", &env->success_length},
                   {"abort", &env->success_abort},
                   {"error", &env->success_error},
                   {"timeout", &env->success_timeout}};
    pd_status status = pd_metrics_create(&env->metrics);
    for (size_t i = 0; i < sizeof histograms / sizeof histograms[0] && status == PD_OK; i++)
        status = pd_metrics_series(env->metrics, histograms[i].kind, histograms[i].name,
                                   histograms[i].help, model, 1, histograms[i].metric);
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0] && status == PD_OK; i++) {
        const pd_metric_label labels[] = {model[0], {"finished_reason", reasons[i].reason}};
        status = pd_metrics_series(env->metrics, PD_METRIC_COUNTER, "vllm:request_success_total",
                                   "Answers, and requests refused, by how they ended.", labels, 2,
                                   reasons[i].metric);
    }
    if (status != PD_OK)
        return status;
    char block[16];
    pd_metric *info;
    snprintf(block, sizeof block, "%u", s->options.core.block_tokens);
    const pd_metric_label labels[] = {{"block_size", block}};
    status = pd_metrics_series(env->metrics, PD_METRIC_GAUGE, "vllm:cache_config_info",
                               "What the KV cache is made of.", labels, 1, &info);
    if (status == PD_OK)
        pd_metric_set(info, 1);
    return status;
}

static pd_status make_env(service *s)
{
    session_env *env = &s->env;
    env->core = s->core;
    env->text = &s->options.text;
    env->model = s->options.text.limits.model;
    env->random = s->options.seed;
    env->by_slot = pd_calloc(s->options.core.requests_max, sizeof *env->by_slot);
    return env->by_slot == NULL ? PD_E_NOMEM : make_metrics(s);
}

pd_status service_create(pd_loop *loop, const service_options *options, service **service_out)
{
    service *s = pd_calloc(1, sizeof *s);
    if (s == NULL)
        return PD_E_NOMEM;
    s->loop = loop;
    s->options = *options;
    s->created = pd_clock_unix_ms() / 1000;
    router_sink sink = {.ctx = s,
                        .send = sink_send,
                        .token = sink_token,
                        .finish = sink_finish,
                        .error = sink_error};
    http_options http = options->http;
    http.handler = (http_handler){.ctx = s,
                                  .on_request = on_request,
                                  .on_pull = on_pull,
                                  .on_gone = on_gone,
                                  .on_refused = on_refused};
    pd_status status = router_core_create(&options->core, options->incarnation, options->seed,
                                          &sink, pd_clock_now_ns(), &s->core);
    if (status == PD_OK)
        status = make_env(s);
    if (status == PD_OK)
        status = text_pool_create(loop, &options->text, options->text_threads,
                                  options->text_queue_max, on_job, s, &s->pool);
    if (status == PD_OK)
        status = pd_loop_timer_create(loop, on_core_timer, s, &s->core_timer);
    if (status == PD_OK)
        status = pd_loop_timer_create(loop, on_second, s, &s->second_timer);
    if (status == PD_OK)
        status = pd_loop_add_prepare(loop, on_prepare, s);
    if (status == PD_OK)
        status = http_server_create(loop, &http, &s->http);
    if (status != PD_OK) {
        service_destroy(s);
        return status;
    }
    pd_loop_timer_arm(s->second_timer, pd_clock_now_ns() + PD_NS_PER_S);
    *service_out = s;
    return PD_OK;
}

void service_destroy(service *s)
{
    if (s == NULL)
        return;
    pd_loop_remove_prepare(s->loop, on_prepare, s);
    if (s->core_timer != NULL)
        pd_loop_timer_arm(s->core_timer, UINT64_MAX);
    if (s->second_timer != NULL)
        pd_loop_timer_arm(s->second_timer, UINT64_MAX);
    http_server_destroy(s->http); /* every open answer ends here */
    text_pool_destroy(s->pool);
    router_core_destroy(s->core);
    pd_metrics_destroy(s->env.metrics);
    pd_free(s->env.by_slot);
    pd_free(s);
}

uint16_t service_port(const service *s)
{
    return http_server_port(s->http);
}
