/* The whole service with real sockets, in front of workers that answer from a script. Needs the
 * model's tokenizer: skips without. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "router/service.h"
#include "tests/unit/router/client.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { KEYS_MAX = 64 };

static pd_model_file *model;
static pd_tokenizer *tokenizer;
static pd_template *chat;

/* An answer on its way, of a worker pair that shares everything. */
typedef struct script {
    bool binding; /* what was promised is to be bound */
    bool used, prefilled, decoding;
    pd_request_key key;
    uint32_t next, max, prompt_blocks;
    bool ship, end_allowed;
    uint64_t said_ns; /* the latest token */
} script;

/* An answer that long is one that its client leaves: it takes 20 s, however busy the machine is. */
#define LONG_TOKENS 4000
#define LONG_NS     (5 * PD_NS_PER_MS)

typedef struct stage {
    pd_loop *loop;
    service *service;
    uint16_t port;
    bool done, silent, linked;
    pd_token_ids answer; /* what the workers say, then an end token */
    script scripts[KEYS_MAX];
    uint32_t welcomed, cancels, prefills, leases;
    uint64_t beat_ns, total_ns; /* total_ns: a request's deadline */
    void (*client)(struct stage *stage);
    /* the client's */
    char text[1 << 18];
    int status, failures;
    char failed[256];
} stage;

static const char ANSWER[] = "One two three, four five six. STOPPED seven";

static script *find(stage *s, const pd_request_key *key, bool make)
{
    script *room = NULL;
    for (int i = 0; i < KEYS_MAX; i++) {
        script *x = &s->scripts[i];
        if (x->used && x->key.number == key->number && x->key.epoch == key->epoch)
            return x;
        if (!x->used && room == NULL)
            room = x;
    }
    if (make && room != NULL)
        *room = (script){.used = true, .key = *key};
    return make ? room : NULL;
}

/* Only notes down: what a worker says comes on a later turn of the loop. */
static bool on_send(void *ctx, const char *to, const pd_message *message)
{
    stage *s = ctx;
    script *x;
    (void)to;
    switch (message->kind) {
    case PD_MSG_WELCOME: s->welcomed++; break;
    case PD_MSG_LEASE_REQUEST:
        s->leases++;
        x = find(s, &message->lease_request.key, true);
        x->prompt_blocks = (message->lease_request.prompt_tokens + 15) / 16;
        break;
    case PD_MSG_PREFILL_REQUEST:
        s->prefills++;
        x = find(s, &message->prefill_request.key, true);
        x->max = message->prefill_request.max_tokens;
        x->ship = message->prefill_request.ship;
        x->end_allowed = message->prefill_request.end_tokens_count > 0;
        x->prefilled = true;
        break;
    case PD_MSG_BIND:
        x = find(s, &message->bind.key, false);
        if (x != NULL)
            x->binding = true;
        break;
    case PD_MSG_DECODE_START:
        x = find(s, &message->decode_start.key, false);
        if (x != NULL)
            x->decoding = true;
        break;
    case PD_MSG_CANCEL:
        s->cancels++;
        x = find(s, &message->cancel.key, false);
        if (x != NULL)
            x->used = false;
        break;
    default: break;
    }
    return true;
}

static void hear(stage *s, const char *from, const pd_message *message)
{
    service_on_message(s->service, from, message);
}

static void hello(stage *s, const char *name, pd_role role, uint64_t incarnation)
{
    pd_message message = {.kind = PD_MSG_HELLO,
                          .hello = {.wire_version = PD_WIRE_VERSION,
                                    .role = role,
                                    .incarnation = incarnation,
                                    .model = "M",
                                    .model_fingerprint = {1, 2},
                                    .layout_fingerprint = 3,
                                    .block_tokens = 16,
                                    .context_max = 8192,
                                    .max_batch = 8,
                                    .queue_max = 100,
                                    .blocks = 100}};
    strcpy(message.hello.name, name);
    hear(s, name, &message);
}

static void beat(stage *s, const char *name, uint64_t incarnation)
{
    pd_message message = {.kind = PD_MSG_HEARTBEAT,
                          .heartbeat = {.incarnation = incarnation,
                                        .ledger = {.total = 100, .free = 100},
                                        .warm = true}};
    hear(s, name, &message);
}

static void say_token(stage *s, script *x, bool prefill)
{
    uint32_t count = (uint32_t)s->answer.count;
    uint32_t end = pd_tokenizer_end_ids(tokenizer, &(size_t){0})[0];
    pd_step_token token = {.key = x->key, .index = x->next};
    token.token = x->next < count ? s->answer.ids[x->next] : end;
    if (x->next >= count && x->end_allowed)
        token.finish = PD_FINISH_STOP;
    else if (x->next + 1 == x->max)
        token.finish = PD_FINISH_LENGTH;
    pd_message message = {
        .kind = PD_MSG_STEP_TOKENS,
        .step_tokens = {.incarnation = prefill ? 1 : 2, .tokens = &token, .tokens_count = 1}};
    strcpy(message.step_tokens.name, prefill ? "prefill-0" : "decode-0");
    x->next++;
    x->said_ns = pd_clock_now_ns();
    if (token.finish != PD_FINISH_NONE)
        x->used = prefill && x->ship; /* a lease is cancelled by the router */
    hear(s, NULL, &message);
}

static void play(stage *s, script *x)
{
    pd_request_key key = x->key;
    if (x->binding) {
        static pd_block blocks[1024];
        pd_message message = {
            .kind = PD_MSG_LEASE_REPLY,
            .lease_reply = {
                .key = key, .bound = true, .blocks = blocks, .blocks_count = x->prompt_blocks}};
        x->binding = false;
        hear(s, "decode-0", &message);
    } else if (!x->prefilled) {
        pd_message message = {.kind = PD_MSG_LEASE_REPLY, .lease_reply = {.key = key}};
        hear(s, "decode-0", &message);
    } else if (x->next == 0) {
        say_token(s, x, true);
        pd_message message = {.kind = PD_MSG_PREFILL_DONE,
                              .prefill_done = {.key = key, .cached_tokens = 2}};
        hear(s, "prefill-0", &message);
    } else if (x->decoding && (x->max < LONG_TOKENS || pd_clock_now_ns() - x->said_ns >= LONG_NS)) {
        say_token(s, x, false);
    }
}

static bool on_turn(void *ctx)
{
    stage *s = ctx;
    if (__atomic_load_n(&s->done, __ATOMIC_ACQUIRE))
        pd_loop_stop(s->loop);
    uint64_t now_ns = pd_clock_now_ns();
    if (now_ns - s->beat_ns > 50 * PD_NS_PER_MS) {
        s->beat_ns = now_ns;
        beat(s, "prefill-0", 1);
        beat(s, "decode-0", 2);
    }
    bool busy = false;
    for (int i = 0; i < KEYS_MAX && !__atomic_load_n(&s->silent, __ATOMIC_ACQUIRE); i++) {
        if (s->scripts[i].used) {
            play(s, &s->scripts[i]);
            busy = true;
        }
    }
    return busy;
}

static void *run_client(void *ctx)
{
    stage *s = ctx;
    s->client(s);
    __atomic_store_n(&s->done, true, __ATOMIC_RELEASE);
    pd_loop_wake(s->loop);
    return NULL;
}

static void make_service(stage *s)
{
    service_options options = {.incarnation = 7,
                               .seed = 1,
                               .text_threads = 1,
                               .text_queue_max = 4,
                               .send = on_send,
                               .bus_ctx = s};
    options.core = (router_core_config){.model = "M",
                                        .model_fingerprint = {1, 2},
                                        .block_tokens = 16,
                                        .block_bytes = 1000,
                                        .context_max = 8192,
                                        .vocab = pd_tokenizer_vocab(tokenizer),
                                        .requests_max = 64,
                                        .queue_max = 32,
                                        .queue_ns = PD_NS_PER_S,
                                        .lease_ns = 5 * PD_NS_PER_S,
                                        .prefill_ns = 5 * PD_NS_PER_S,
                                        .transfer_ns = 5 * PD_NS_PER_S,
                                        .decode_idle_ns = 5 * PD_NS_PER_S,
                                        .total_ns = s->total_ns,
                                        .heartbeat_ns = PD_NS_PER_S,
                                        .lost_after_ns = 5 * PD_NS_PER_S};
    pd_cost_init(&options.core.cost);
    options.text = (text_context){
        .tokenizer = tokenizer,
        .chat = chat,
        .limits = {.model = "M", .vocab = options.core.vocab, .context_max = 8192, .stops_max = 16},
        .hash_root = pd_prefix_hash_root(options.core.model_fingerprint, 16, NULL, 0),
        .block_tokens = 16,
        .max_tokens_default = 16,
        .chat_tokens_default = 64,
        .rendered_bytes_max = 16 << 20,
    };
    options.http = (http_options){.host = "127.0.0.1",
                                  .connections_max = 64,
                                  .body_bytes_max = 4 << 20,
                                  .header_bytes_max = 16384,
                                  .idle_timeout_s = 30};
    assert_int_equal(service_create(s->loop, &options, &s->service), PD_OK);
    s->port = service_port(s->service);
}

static uint32_t active_at_end;

static void with_service_that_takes(stage *s, uint64_t total_ns, bool workers,
                                    void (*client)(stage *stage))
{
    pthread_t thread;
    memset(s, 0, sizeof *s);
    s->client = client;
    s->total_ns = total_ns;
    assert_int_equal(pd_loop_create(&s->loop), PD_OK);
    make_service(s);
    assert_int_equal(
        pd_tokenizer_encode(tokenizer, ANSWER, sizeof ANSWER - 1, false, 1000, &s->answer), PD_OK);
    if (workers) {
        hello(s, "prefill-0", PD_ROLE_PREFILL, 1);
        hello(s, "decode-0", PD_ROLE_DECODE, 2);
        pd_message up = {.kind = PD_MSG_LINK, .link = {.peer_incarnation = 2, .up = true}};
        strcpy(up.link.peer, "decode-0");
        hear(s, "prefill-0", &up);
        assert_int_equal(pd_loop_add_prepare(s->loop, on_turn, s), PD_OK);
    } else {
        s->silent = true;
        assert_int_equal(pd_loop_add_prepare(s->loop, on_turn, s), PD_OK);
    }
    assert_int_equal(pthread_create(&thread, NULL, run_client, s), 0);
    assert_int_equal(pd_loop_run(s->loop), PD_OK);
    pthread_join(thread, NULL);
    active_at_end = 0;
    for (int i = 0; i < KEYS_MAX; i++)
        active_at_end += s->scripts[i].used;
    service_destroy(s->service);
    pd_token_ids_fini(&s->answer);
    pd_loop_destroy(s->loop);
    if (s->failures > 0)
        fail_msg("%d checks failed, the first: %s", s->failures, s->failed);
}

static void with_service(stage *s, bool workers, void (*client)(stage *stage))
{
    with_service_that_takes(s, 20 * PD_NS_PER_S, workers, client);
}

static int open_model(void **state)
{
    (void)state;
    const char *path = getenv("KVFERRY_MODEL");
    pd_template_error error;
    if (path == NULL || pd_model_file_open(path, &model) != PD_OK)
        return 0;
    const pd_text_tables *tables = pd_model_file_text(model);
    if (pd_tokenizer_create(tables, &tokenizer) != PD_OK)
        return -1;
    return pd_template_compile(tables->chat_template, tables->chat_template_len, "", "", &chat,
                               &error) == PD_OK
               ? 0
               : -1;
}

static int close_model(void **state)
{
    (void)state;
    pd_template_destroy(chat);
    pd_tokenizer_destroy(tokenizer);
    pd_model_file_close(model);
    return 0;
}

#define NEED_MODEL()                                                                               \
    do {                                                                                           \
        if (tokenizer == NULL)                                                                     \
            skip();                                                                                \
    } while (0)

/* A check in the client's thread. */
static void expect(stage *s, bool holds, const char *what)
{
    if (holds)
        return;
    if (s->failures++ == 0)
        snprintf(s->failed, sizeof s->failed, "%s; got %.150s", what, s->text);
}

/* One request on a connection of its own; the answer is in s->text. */
static void post(stage *s, const char *path, const char *body)
{
    char end[16] = "\r\n0\r\n\r\n";
    int fd = client_connect(s->port);
    client_post(fd, path, body, strlen(body));
    size_t len = client_read_until(fd, "\r\n\r\n", s->text, sizeof s->text);
    const char *length = strstr(s->text, "Content-Length: ");
    if (length != NULL) {
        size_t total =
            (size_t)(strstr(s->text, "\r\n\r\n") + 4 - s->text) + strtoul(length + 16, NULL, 10);
        while (len < total && len + 1 < sizeof s->text) {
            ssize_t n = recv(fd, s->text + len, total - len, 0);
            if (n <= 0)
                break;
            len += (size_t)n;
        }
        s->text[len] = '\0';
    } else if (strstr(s->text, end) == NULL) {
        client_read_until(fd, end, s->text + len, sizeof s->text - len);
    }
    s->status = client_status(s->text);
    close(fd);
}

static bool has(const stage *s, const char *text)
{
    return strstr(s->text, text) != NULL;
}

static int count(const stage *s, const char *text)
{
    int n = 0;
    for (const char *at = s->text; (at = strstr(at, text)) != NULL; at++)
        n++;
    return n;
}

static void whole_client(stage *s)
{
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":\"a b c d\",\"max_tokens\":100}");
    expect(s, s->status == 200, "200");
    expect(s, has(s, "\"text\":\"One two three, four five six. STOPPED seven\""), "the text");
    expect(s, has(s, "\"finish_reason\":\"stop\"") && has(s, "\"cached_tokens\":2"),
           "stop, cached");
    post(s, "/v1/chat/completions",
         "{\"model\":\"M\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":3,"
         "\"return_token_ids\":true}");
    expect(s, has(s, "\"role\":\"assistant\",\"content\":\"One two three\""), "three tokens");
    expect(s, has(s, "\"finish_reason\":\"length\""), "length");
    expect(s, has(s, "\"completion_tokens\":3"), "usage");
    expect(s, has(s, "\"token_ids\":[") && has(s, "\"prompt_token_ids\":[1,"), "ids");
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":[[5,6],[7]],\"n\":2,\"max_tokens\":2}");
    expect(s, s->status == 200 && count(s, "\"index\":") == 4, "four choices");
    expect(s, has(s, "\"prompt_tokens\":3,\"completion_tokens\":8"), "a prompt counts once");
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":\"a\",\"stop\":\"e, four\"}");
    expect(s, has(s, "\"text\":\"One two thre\""), "cut before the stop string");
    expect(s, has(s, "\"finish_reason\":\"stop\""), "a stop string is a stop");
}

static void answers_are_whole(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, true, whole_client);
    assert_int_equal(active_at_end, 0);
}

static void stream_client(stage *s)
{
    post(s, "/v1/chat/completions",
         "{\"model\":\"M\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true,"
         "\"stop\":[\" six. STO\"],\"stream_options\":{\"include_usage\":true}}");
    expect(s, s->status == 200 && has(s, "text/event-stream"), "a stream");
    expect(s, count(s, "\"role\":\"assistant\"") == 1, "the role once");
    expect(s, !has(s, "six"), "no part of the stop string");
    expect(s, has(s, "five"), "what stands before it");
    expect(s, count(s, "\"finish_reason\":\"stop\"") == 1, "one end");
    expect(s, count(s, "\"total_tokens\"") == 1 && has(s, "\"choices\":[],\"usage\":{"), "usage");
    expect(s, count(s, "data: [DONE]") == 1, "done");
    expect(s, strstr(s->text, "[DONE]") > strstr(s->text, "total_tokens"), "in this order");
    post(s, "/v1/completions",
         "{\"model\":\"M\",\"prompt\":\"a\",\"stream\":true,\"n\":2,\"max_tokens\":4,"
         "\"stream_options\":{}}");
    expect(s, !has(s, "usage"), "an empty object asks for no usage");
    expect(s, count(s, "\"finish_reason\":\"length\"") == 2, "two ends");
    post(s, "/v1/completions",
         "{\"model\":\"M\",\"prompt\":\"a\",\"ignore_eos\":true,\"max_tokens\":60,"
         "\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    expect(s, has(s, "\"completion_tokens\":60"), "past the end token");
}

static void streams_are_whole(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, true, stream_client);
    assert_int_equal(active_at_end, 0);
}

static void refused_client(stage *s)
{
    static char body[200000];
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":[-1]}");
    expect(s, s->status == 400 && has(s, "\"param\":\"prompt\""), "a bad id");
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":\"a\",\"max_tokens\":8192}");
    expect(s,
           s->status == 400 && has(s, "context_length_exceeded") && has(s, "8192") &&
               has(s, "8193"),
           "both numbers");
    memset(body, 'a', sizeof body);
    memcpy(body, "{\"model\":\"M\",\"prompt\":\"", 23);
    for (size_t i = 30; i < sizeof body - 10; i += 2)
        body[i] = ' ';
    strcpy(body + sizeof body - 10, "\"}");
    post(s, "/v1/completions", body);
    expect(s, s->status == 400 && has(s, "context_length_exceeded"), "a long prompt");
    int n = sprintf(body, "{\"model\":\"M\",\"prompt\":\"a\",\"x\":");
    memset(body + n, '[', 100000);
    body[n + 100000] = '\0';
    uint64_t begin_ns = pd_clock_now_ns();
    post(s, "/v1/completions", body);
    expect(s, s->status == 400 && has(s, "nested"), "a bomb");
    expect(s, pd_clock_now_ns() - begin_ns < 200 * PD_NS_PER_MS, "fast");
    post(s, "/v1/completions", "{\"model\":\"no\\\"} 1\\nforged_total 1\",\"prompt\":\"a\"}");
    expect(s, s->status == 404, "no such model");
    post(s, "/nowhere", "{}");
    expect(s, s->status == 404 && has(s, "\"error\":{"), "no such path");
    post(s, "/metrics", "{}");
    expect(s, s->status == 405 && has(s, "Allow: GET"), "no such method");
}

static void what_is_refused_reaches_no_worker(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, true, refused_client);
    assert_int_equal(s.prefills, 0);
    assert_int_equal(s.leases, 0);
}

static void leaving_client(stage *s)
{
    static const char ONE[] =
        "{\"model\":\"M\",\"prompt\":\"a\",\"stream\":true,\"max_tokens\":50}";
    int fd = client_connect(s->port);
    client_post(fd, "/v1/completions", ONE, sizeof ONE - 1);
    usleep(100000);
    close(fd); /* before the first token: the workers say nothing */
    usleep(150000);
}

static void a_client_that_leaves_is_cancelled_everywhere(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    /* The workers register, then are silent. */
    with_service(&s, false, leaving_client);
    assert_int_equal(s.cancels, 0); /* nobody was asked: there is no worker */
    with_service(&s, true, leaving_client);
    assert_int_equal(active_at_end, 0);
}

static void silent_client(stage *s)
{
    __atomic_store_n(&s->silent, true, __ATOMIC_RELEASE);
    leaving_client(s);
}

static void a_lease_is_cancelled_when_the_client_leaves_first(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, true, silent_client);
    assert_int_equal(s.leases, 1);
    assert_int_equal(s.cancels, 1);
    assert_int_equal(active_at_end, 0);
}

static void no_workers_client(stage *s)
{
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":\"a\",\"stream\":true}");
    expect(s, s->status == 503 && has(s, "Retry-After: ") && has(s, "no_worker"), "503");
    int fd = client_connect(s->port);
    client_get(fd, "/ready");
    client_read_until(fd, "}", s->text, sizeof s->text);
    expect(s, client_status(s->text) == 503 && has(s, "prefill"), "not ready, and why");
    close(fd);
}

static void without_workers_a_stream_gets_a_status_not_a_broken_stream(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, false, no_workers_client);
}

/* A stream that has begun, and an answer whose workers say nothing. */
static void late_client(stage *s)
{
    static const char *const BODIES[] = {
        "{\"model\":\"M\",\"prompt\":\"a\",\"stream\":true,\"max_tokens\":4000,"
        "\"ignore_eos\":true}",
        "{\"model\":\"M\",\"prompt\":\"a\"}"};
    for (int i = 0; i < 2; i++) {
        uint64_t asked_ns = pd_clock_now_ns();
        __atomic_store_n(&s->silent, i > 0, __ATOMIC_RELEASE);
        post(s, "/v1/completions", BODIES[i]);
        uint64_t took_ns = pd_clock_now_ns() - asked_ns;
        expect(s, s->status == (i == 0 ? 200 : 504), "504, where nothing was said yet");
        expect(s, count(s, "\"code\":\"deadline_exceeded\"") == 1, "why");
        expect(s, i > 0 || (has(s, "\"text\":\"One\"") && !has(s, "\"finish_reason\":\"")),
               "in the midst");
        expect(s, took_ns >= s->total_ns && took_ns < s->total_ns + 5 * PD_NS_PER_S, "in time");
    }
    int fd = client_connect(s->port);
    client_get(fd, "/metrics");
    client_read_until(fd, "kvferry_worker_queue_seconds{", s->text, sizeof s->text);
    expect(s, has(s, "finished_reason=\"timeout\"} 2\n"), "two too late");
    close(fd);
}

static void who_takes_longer_than_the_total_deadline_is_told_504(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service_that_takes(&s, 1500 * PD_NS_PER_MS, true, late_client);
    assert_int_equal(active_at_end, 0);
}

/* A32: nobody is counted twice, nobody is left out, and both bills for prompts agree. */
static void counted_client(stage *s)
{
    static const char LONG[] =
        "{\"model\":\"M\",\"prompt\":[1,2,3,4,5,6,7],\"stream\":true,\"n\":2,"
        "\"max_tokens\":4000,\"ignore_eos\":true}";
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":[[5,6],[7]],\"n\":2,\"max_tokens\":2}");
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":[1,2,3,4],\"stop\":\"e, four\"}");
    post(s, "/v1/completions", "{\"model\":\"M\",\"prompt\":[-1]}");
    post(s, "/v1/completions", "{\"model\":\"none\",\"prompt\":[1]}");
    int fd = client_connect(s->port);
    client_post(fd, "/v1/completions", LONG, sizeof LONG - 1);
    client_read_until(fd, "\"index\":1", s->text, sizeof s->text);
    close(fd);
    /* that the client has left is noticed when something is written to it */
    for (int turn = 0; turn < 100; turn++) {
        usleep(100000);
        fd = client_connect(s->port);
        client_get(fd, "/metrics");
        client_read_until(fd, "kvferry_worker_queue_seconds{", s->text, sizeof s->text);
        close(fd);
        if (has(s, "kvferry_requests_active 0\n"))
            break;
    }
    expect(s, has(s, "finished_reason=\"length\"} 4\n"), "four by length");
    expect(s, has(s, "finished_reason=\"stop\"} 1\n"), "one by its stop string");
    expect(s, has(s, "finished_reason=\"abort\"} 2\n"), "both choices of the client that left");
    expect(s, has(s, "finished_reason=\"error\"} 2\n"), "two refused");
    expect(s, has(s, "finished_reason=\"timeout\"} 0\n"), "none too late");
    expect(s, has(s, "vllm:prompt_tokens_total{model_name=\"M\"} 24\n"),
           "2 + 2 + 1 + 1 + 4 + 7 + 7");
    expect(s, has(s, "vllm:request_prompt_tokens_sum{model_name=\"M\"} 24\n"), "the same");
    expect(s, has(s, "vllm:request_prompt_tokens_count{model_name=\"M\"} 7\n"), "seven began");
    expect(s, has(s, "vllm:time_to_first_token_seconds_count{model_name=\"M\"} 7\n"), "as many");
    expect(s, has(s, "{endpoint=\"completions\",status=\"200\"} 3\n"), "three answered");
    expect(s, !has(s, "status=\"499\""), "a stream's 200 is its answer");
    expect(s, has(s, "kvferry_requests_active 0\n"), "nothing is left");
}

static void whoever_ends_a_request_it_is_counted_once(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, true, counted_client);
}

static void text_client(stage *s)
{
    post(s, "/tokenize", "{\"prompt\":\"a<|im_end|>\"}");
    expect(s, has(s, "\"count\":2"), "a control token in a prompt");
    post(s, "/tokenize",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"a<|im_end|>\"}],"
         "\"add_generation_prompt\":false}");
    expect(s, count(s, ",2,") == 2, "none in a turn: only the template's two");
    post(s, "/detokenize", "{\"tokens\":[]}");
    expect(s, has(s, "{\"prompt\":\"\"}"), "nothing");
    int fd = client_connect(s->port);
    client_get(fd, "/metrics");
    client_read_until(fd, "kvferry_worker_queue_seconds{", s->text, sizeof s->text);
    expect(s, has(s, "vllm:num_requests_running{model_name=\"M\"} 0"), "vLLM's names");
    close(fd);
}

static void text_pages(void **state)
{
    (void)state;
    NEED_MODEL();
    static stage s;
    with_service(&s, true, text_client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_whole),
        cmocka_unit_test(streams_are_whole),
        cmocka_unit_test(what_is_refused_reaches_no_worker),
        cmocka_unit_test(a_client_that_leaves_is_cancelled_everywhere),
        cmocka_unit_test(a_lease_is_cancelled_when_the_client_leaves_first),
        cmocka_unit_test(without_workers_a_stream_gets_a_status_not_a_broken_stream),
        cmocka_unit_test(who_takes_longer_than_the_total_deadline_is_told_504),
        cmocka_unit_test(whoever_ends_a_request_it_is_counted_once),
        cmocka_unit_test(text_pages),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, open_model, close_model);
}
