/* Both workers as processes, with a router of this test's own: real model, real blocks over the
 * data plane. What disaggregated decoding answers is compared with what one prefill after another
 * computes. Arguments: prefill-worker, decode-worker, model file. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/kv/prefix_hash.h"
#include "common/wire/bus.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PREFILL, DECODE, BLOCK = 16, PROMPT_MAX = 400, ANSWER_MAX = 64, REQUESTS = 256 };

typedef struct process {
    pid_t pid;
    char identity[PD_IDENTITY_BYTES]; /* "" until its HELLO */
    pd_msg_hello hello;
    unsigned char address[8192];
    pd_msg_heartbeat beat;
    uint64_t beats;
    bool said_bye;
} process;

typedef struct asked {
    pd_request_key key;
    uint32_t tokens[PROMPT_MAX + ANSWER_MAX];
    uint32_t prompt_count, count; /* of tokens */
    uint32_t max_tokens, end_token;
    pd_hash128 hashes[PROMPT_MAX / BLOCK];
    uint32_t hashes_count;
    pd_sampling sampling;
    bool bound, started, prefill_done, hold_start;
    pd_msg_lease_reply lease;
    pd_msg_prefill_done done;
    pd_status failed;
    pd_finish finish;
    uint32_t messages; /* that brought tokens */
} asked;

static const char *binaries[2], *model_path;
static char dir[] = "/tmp/kvferry-workers-XXXXXX";

static struct {
    pd_loop *loop;
    pd_bus *bus;
    pd_loop_timer *timer;
    uint64_t router, due_ns;
    bool (*until)(void);
    process workers[2];
    bool linked, refuse, silent;
    asked requests[REQUESTS];
    uint32_t requests_count;
    uint32_t events[2];
} t;

static process *sender(const char *identity)
{
    return strncmp(identity, "prefill", 7) == 0 ? &t.workers[PREFILL] : &t.workers[DECODE];
}

static void to_worker(int which, const pd_message *message)
{
    assert_int_equal(pd_bus_send(t.bus, t.workers[which].identity, message), PD_OK);
}

static void introduce(void)
{
    pd_message message = {.kind = PD_MSG_PEER_UP};
    process *decode = &t.workers[DECODE];

    if (t.workers[PREFILL].identity[0] == '\0' || decode->identity[0] == '\0')
        return;
    memcpy(message.peer_up.name, decode->hello.name, PD_NAME_BYTES);
    message.peer_up.role = PD_ROLE_DECODE;
    message.peer_up.incarnation = decode->hello.incarnation;
    message.peer_up.transfer_address = decode->address;
    message.peer_up.transfer_address_len = decode->hello.transfer_address_len;
    to_worker(PREFILL, &message);
}

static void on_hello(const char *from, const pd_msg_hello *hello)
{
    process *worker = sender(from);
    pd_message message = {.kind = PD_MSG_WELCOME};

    assert_false(worker->said_bye && hello->incarnation == worker->hello.incarnation);
    snprintf(worker->identity, sizeof worker->identity, "%s", from);
    if (t.refuse) {
        message.kind = PD_MSG_REFUSED;
        snprintf(message.refused.reason, PD_REASON_BYTES, "model: a here, b there");
        to_worker((int)(worker - t.workers), &message);
        return;
    }
    worker->hello = *hello;
    memcpy(worker->address, hello->transfer_address, hello->transfer_address_len);
    message.welcome = (pd_msg_welcome){t.router, 100, 1000, hello->session};
    to_worker((int)(worker - t.workers), &message);
    introduce();
}

/* It has left for this router; another one's first heartbeat, and its welcome, may still come. */
static void on_bye(const char *from)
{
    pd_message welcome = {.kind = PD_MSG_WELCOME};
    pd_message beat = {.kind = PD_MSG_ROUTER_HEARTBEAT, .router_heartbeat.router = t.router + 1};

    sender(from)->said_bye = true;
    welcome.welcome = (pd_msg_welcome){t.router, 100, 1000, sender(from)->hello.session};
    if (pd_bus_send(t.bus, from, &welcome) != PD_OK || pd_bus_send(t.bus, from, &beat) != PD_OK)
        pd_log_debug("msg=\"it has gone already\" from=%s", from);
}

static asked *asked_of(const pd_request_key *key)
{
    return key->router == t.router && key->number >= 1 && key->number <= t.requests_count
               ? &t.requests[key->number - 1]
               : NULL;
}

static void send_prefill(asked *a)
{
    pd_message message = {.kind = PD_MSG_PREFILL_REQUEST};
    pd_msg_prefill_request *out = &message.prefill_request;

    out->key = a->key;
    snprintf(out->id, sizeof out->id, "t-%llu", (unsigned long long)a->key.number);
    out->tokens = a->tokens;
    out->tokens_count = out->prompt_tokens = a->prompt_count;
    out->hashes = a->hashes;
    out->hashes_count = a->hashes_count;
    out->sampling = a->sampling;
    out->end_tokens = &a->end_token;
    out->end_tokens_count = a->end_token != 0;
    out->max_tokens = a->max_tokens;
    out->ship = a->max_tokens > 1;
    snprintf(out->decode, sizeof out->decode, "decode-0");
    out->decode_incarnation = t.workers[DECODE].hello.incarnation;
    out->deadline_ms = 60000;
    to_worker(PREFILL, &message);
}

static void send_key(int which, pd_message_kind kind, const asked *a)
{
    pd_message message = {.kind = kind};

    if (kind == PD_MSG_BIND)
        message.bind.key = a->key;
    else
        message.release.key = a->key;
    to_worker(which, &message);
}

static void on_lease_reply(asked *a, const pd_msg_lease_reply *reply)
{
    pd_message message = {.kind = PD_MSG_TARGETS};

    a->lease = *reply;
    if (reply->status != PD_OK)
        return;
    if (!reply->bound) {
        send_prefill(a);
        return;
    }
    a->bound = true;
    message.targets = (pd_msg_targets){.key = a->key,
                                       .held_blocks = reply->held_blocks,
                                       .blocks = reply->blocks,
                                       .blocks_count = reply->blocks_count};
    to_worker(PREFILL, &message);
}

static void send_start(asked *a)
{
    pd_message message = {.kind = PD_MSG_DECODE_START};
    pd_msg_decode_start *out = &message.decode_start;

    out->key = a->key;
    snprintf(out->id, sizeof out->id, "t-%llu", (unsigned long long)a->key.number);
    out->tokens = a->tokens;
    out->tokens_count = a->count;
    out->prompt_tokens = a->prompt_count;
    out->sampling = a->sampling;
    out->end_tokens = &a->end_token;
    out->end_tokens_count = a->end_token != 0;
    out->max_tokens = a->max_tokens;
    out->landing_ms = 20000;
    a->started = true;
    to_worker(DECODE, &message);
}

static void send_cancel(asked *a)
{
    pd_message message = {.kind = PD_MSG_CANCEL, .cancel = {.key = a->key}};

    to_worker(PREFILL, &message);
    to_worker(DECODE, &message);
}

static void on_tokens(const char *from, const pd_msg_step_tokens *in)
{
    (void)from;
    for (uint32_t i = 0; i < in->tokens_count; i++) {
        asked *a = asked_of(&in->tokens[i].key);
        if (a == NULL)
            continue;
        assert_int_equal(in->tokens[i].index, a->count - a->prompt_count);
        a->tokens[a->count++] = in->tokens[i].token;
        a->finish = in->tokens[i].finish;
        a->messages++;
        if (in->tokens[i].index == 0 && a->finish == PD_FINISH_NONE && !a->hold_start)
            send_start(a);
    }
}

static void on_message(void *ctx, const char *from, const pd_message *message)
{
    asked *a;

    (void)ctx;
    switch (message->kind) {
    case PD_MSG_HELLO: on_hello(from, &message->hello); break;
    case PD_MSG_HEARTBEAT:
        if (sender(from)->identity[0] == '\0') { /* it spoke to the router before this one */
            pd_message beat = {.kind = PD_MSG_ROUTER_HEARTBEAT};
            beat.router_heartbeat.router = t.router;
            assert_int_equal(pd_bus_send(t.bus, from, &beat), PD_OK);
            break;
        }
        assert_false(sender(from)->said_bye); /* its last word */
        sender(from)->beat = message->heartbeat;
        sender(from)->beats++;
        break;
    case PD_MSG_LINK: t.linked = message->link.up; break;
    case PD_MSG_LEASE_REPLY:
        a = asked_of(&message->lease_reply.key);
        assert_non_null(a);
        on_lease_reply(a, &message->lease_reply);
        break;
    case PD_MSG_PREFILL_STARTED:
        a = asked_of(&message->prefill_started.key);
        if (a != NULL)
            send_key(DECODE, PD_MSG_BIND, a);
        break;
    case PD_MSG_LANDED:
        a = asked_of(&message->landed.key);
        if (a != NULL)
            send_key(PREFILL, PD_MSG_RELEASE, a);
        break;
    case PD_MSG_PREFILL_DONE:
        a = asked_of(&message->prefill_done.key);
        if (a != NULL) {
            a->prefill_done = true;
            a->done = message->prefill_done;
        }
        break;
    case PD_MSG_DECODE_FAILED:
        a = asked_of(&message->decode_failed.key);
        if (a != NULL)
            a->failed = message->decode_failed.status;
        break;
    case PD_MSG_STEP_TOKENS: on_tokens(from, &message->step_tokens); break;
    case PD_MSG_KV_EVENTS:
        t.events[strncmp(message->kv_events.name, "decode", 6) == 0] +=
            message->kv_events.events_count;
        break;
    case PD_MSG_BYE: on_bye(from); break;
    default: fail_msg("a worker sent %s", pd_message_name(message->kind));
    }
}

static void on_timer(void *ctx)
{
    static uint64_t beat_ns;
    uint64_t now_ns = pd_clock_now_ns();

    (void)ctx;
    if (now_ns >= beat_ns && !t.silent) {
        pd_message message = {.kind = PD_MSG_ROUTER_HEARTBEAT};
        message.router_heartbeat.router = t.router;
        for (int i = 0; i < 2; i++) {
            if (t.workers[i].identity[0] != '\0' &&
                pd_bus_send(t.bus, t.workers[i].identity, &message) != PD_OK) {
                /* dead, and found out by somebody else */
            }
        }
        beat_ns = now_ns + 100 * PD_NS_PER_MS;
    }
    if (t.until() || now_ns >= t.due_ns)
        pd_loop_stop(t.loop);
    else
        pd_loop_timer_arm(t.timer, now_ns + PD_NS_PER_MS);
}

static bool wait_until(bool (*until)(void), uint64_t ms)
{
    t.until = until;
    t.due_ns = pd_clock_now_ns() + ms * PD_NS_PER_MS;
    pd_loop_timer_arm(t.timer, pd_clock_now_ns());
    assert_int_equal(pd_loop_run(t.loop), PD_OK);
    return until();
}

/* ---- processes ---- */

static void write_deployment(const char *transport, const char *more)
{
    char path[128];

    snprintf(path, sizeof path, "%s/d.yaml", dir);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file,
            "cluster: t\nstate_dir: %s\n"
            "model: { name: m, path: \"%s\", context: 512 }\n"
            "workers: 2\nratio: \"1:1\"\n"
            "router: { control: \"ipc://%s/c\", tokens: \"ipc://%s/t\", events: \"ipc://%s/e\" }\n"
            "prefill: { threads: 1, chunk_tokens: 64 }\n"
            "decode: { threads: 1, max_batch: 8 }\n"
            "kv: { memory: 48MiB }\n"
            "heartbeat: { interval: 10ms, lost_after: 1s }\n" /* below a tick */
            "transfer: { transport: %s }\n%s",
            dir, model_path, dir, dir, dir, transport, more);
    fclose(file);
}

static void start(int which)
{
    char file[128], log[128];
    const char *name = which == PREFILL ? "prefill-0" : "decode-0";

    snprintf(file, sizeof file, "%s/d.yaml", dir);
    snprintf(log, sizeof log, "%s/%s.log", dir, name);
    t.workers[which] = (process){0};
    t.workers[which].pid = fork();
    assert_true(t.workers[which].pid >= 0);
    if (t.workers[which].pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fd, 2);
        execl(binaries[which], binaries[which], "-f", file, "--name", name, (char *)NULL);
        _exit(127);
    }
}

static int end_status(int which)
{
    int status;

    assert_int_equal(waitpid(t.workers[which].pid, &status, 0), t.workers[which].pid);
    t.workers[which].pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static bool both_warm(void)
{
    return t.linked && t.workers[0].beat.warm && t.workers[1].beat.warm;
}

static void open_router(void)
{
    char endpoints[3][64];
    pd_bus_options options = {.on_message = on_message};

    memset(&t, 0, sizeof t);
    t.router = pd_random_id();
    snprintf(endpoints[0], 64, "ipc://%s/c", dir);
    snprintf(endpoints[1], 64, "ipc://%s/t", dir);
    snprintf(endpoints[2], 64, "ipc://%s/e", dir);
    for (int i = 0; i < PD_CHANNELS; i++)
        options.endpoints[i] = endpoints[i];
    assert_int_equal(pd_loop_create(&t.loop), PD_OK);
    assert_int_equal(pd_loop_timer_create(t.loop, on_timer, NULL, &t.timer), PD_OK);
    assert_int_equal(pd_bus_create_router(t.loop, &options, &t.bus), PD_OK);
}

static void close_router(void)
{
    pd_bus_destroy(t.bus);
    pd_loop_destroy(t.loop);
}

static void start_cluster(const char *transport, const char *more)
{
    write_deployment(transport, more);
    open_router();
    start(PREFILL);
    start(DECODE);
    assert_true(wait_until(both_warm, 60000));
}

static bool both_said_bye(void)
{
    return t.workers[0].said_bye && t.workers[1].said_bye;
}

static void end_cluster(void)
{
    for (int i = 0; i < 2; i++) {
        kill(t.workers[i].pid, SIGTERM);
        assert_int_equal(end_status(i), 0);
    }
    assert_true(wait_until(both_said_bye, 1000));
    close_router();
}

/* As if the router had been restarted: the workers have to find out. */
static void become_another_router(void)
{
    t.router++;
    t.requests_count = 0;
    t.linked = false;
    for (int i = 0; i < 2; i++) {
        t.workers[i].identity[0] = '\0';
        memset(&t.workers[i].beat, 0, sizeof t.workers[i].beat);
    }
    assert_true(wait_until(both_warm, 60000));
}

/* ---- requests ---- */

static asked *ask(const uint32_t *prompt, uint32_t count, uint32_t max_tokens)
{
    assert_true(t.requests_count < REQUESTS);
    asked *a = &t.requests[t.requests_count++];
    *a = (asked){.key = {t.router, t.requests_count, 1},
                 .prompt_count = count,
                 .count = count,
                 .max_tokens = max_tokens,
                 .sampling = {.top_p = 1}};
    memcpy(a->tokens, prompt, count * sizeof *prompt);
    a->hashes_count = pd_prefix_hash_fill((pd_hash128){5, 5}, BLOCK, prompt, count, a->hashes,
                                          PROMPT_MAX / BLOCK);
    if (max_tokens == 1) {
        send_prefill(a);
        return a;
    }
    pd_message message = {.kind = PD_MSG_LEASE_REQUEST};
    message.lease_request = (pd_msg_lease_request){
        .key = a->key,
        .sender = {.name = "prefill-0", .incarnation = t.workers[PREFILL].hello.incarnation},
        .prompt_tokens = count,
        .max_tokens = max_tokens,
        .hashes = a->hashes,
        .hashes_count = a->hashes_count,
        .ttl_ms = 3000,
    };
    snprintf(message.lease_request.id, PD_REQUEST_ID_BYTES, "t-%u", t.requests_count);
    to_worker(DECODE, &message);
    return a;
}

static bool all_ended(void)
{
    for (uint32_t i = 0; i < t.requests_count; i++) {
        const asked *a = &t.requests[i];
        if (a->failed == PD_OK && (a->finish == PD_FINISH_NONE || !a->prefill_done))
            return false;
    }
    return true;
}

static bool nothing_held(void)
{
    for (int i = 0; i < 2; i++) {
        const pd_ledger *ledger = &t.workers[i].beat.ledger;
        if (ledger->total == 0 || ledger->free + ledger->cached != ledger->total)
            return false;
    }
    return true;
}

static void fill_prompt(uint32_t *prompt, uint32_t count, uint64_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        prompt[i] = 100 + (uint32_t)(pd_random_next(&seed) % 40000);
}

static void answers_equal(const char *transport, const char *more)
{
    const uint32_t lengths[] = {1, 15, 16, 17, 64, 100, 250};
    enum { N = sizeof lengths / sizeof *lengths, ANSWER = 6 };
    uint32_t prompts[N][PROMPT_MAX];
    asked *a[N];

    start_cluster(transport, more);
    /* all at once: batched, chunked, shipped; then once more with warm caches */
    for (uint32_t round = 0; round < 2; round++) {
        uint32_t from = t.requests_count;
        for (uint32_t i = 0; i < N; i++) {
            fill_prompt(prompts[i], lengths[i], i + 1);
            a[i] = ask(prompts[i], lengths[i], ANSWER);
        }
        assert_true(wait_until(all_ended, 120000));
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(a[i]->failed, PD_OK);
            assert_int_equal(a[i]->count, lengths[i] + ANSWER);
            assert_int_equal(a[i]->done.status, PD_OK);
            assert_memory_equal(a[i]->tokens, t.requests[i].tokens, a[i]->count * sizeof(uint32_t));
            if (round == 1 && lengths[i] > BLOCK)
                assert_true(a[i]->done.cached_tokens > 0);
        }
        assert_true(from == 0 || t.requests_count == 2 * N);
    }
    assert_true(wait_until(nothing_held, 5000));
    assert_true(t.events[0] > 0 && t.events[1] > 0);
    for (uint32_t i = 0; i < N; i++) {
        /* one prefill a token, by the same worker; keys go on counting */
        uint32_t tokens[PROMPT_MAX];
        asked first = t.requests[i];
        memcpy(tokens, first.tokens, lengths[i] * sizeof *tokens);
        for (uint32_t k = 0; k < ANSWER; k++) {
            asked *one = ask(tokens, lengths[i] + k, 1);
            assert_true(wait_until(all_ended, 60000));
            assert_int_equal(one->tokens[lengths[i] + k], first.tokens[lengths[i] + k]);
            tokens[lengths[i] + k] = first.tokens[lengths[i] + k];
        }
    }
    assert_true(wait_until(nothing_held, 5000));
    end_cluster();
}

static void shipped_and_decoded_equals_computed_anew_shm(void **state)
{
    (void)state;
    answers_equal("shm", "");
}

static void shipped_and_decoded_equals_computed_anew_tcp(void **state)
{
    (void)state;
    answers_equal("tcp", "");
}

static bool second_token(void)
{
    return t.requests[0].count > t.requests[0].prompt_count + 1;
}

static bool first_token(void)
{
    return t.requests[0].count > t.requests[0].prompt_count;
}

static bool is_bound(void)
{
    return t.requests[0].bound;
}

static bool prefill_said_done(void)
{
    return t.requests[0].prefill_done;
}

static void a_cancel_gives_everything_back(void **state)
{
    (void)state;
    uint32_t prompt[PROMPT_MAX];
    bool (*const moments[])(void) = {is_bound, first_token, second_token};

    start_cluster("auto", "");
    for (int i = 0; i < 3; i++) {
        become_another_router();
        fill_prompt(prompt, 300, (uint64_t)i + 10);
        asked *a = ask(prompt, 300, 60);
        assert_true(wait_until(moments[i], 20000));
        send_cancel(a);
        assert_true(wait_until(prefill_said_done, 10000));
        assert_true(a->done.status == PD_E_CANCELLED || a->done.status == PD_OK);
        t.workers[0].beat.ledger.total = t.workers[1].beat.ledger.total = 0;
        assert_true(wait_until(nothing_held, 5000));
    }
    end_cluster();
}

static bool decode_quarantined(void)
{
    return t.workers[DECODE].beat.ledger.quarantined > 0;
}

static void a_killed_prefill_worker_is_replaced(void **state)
{
    (void)state;
    uint32_t prompt[PROMPT_MAX];
    pd_message message = {.kind = PD_MSG_PEER_GONE};

    start_cluster("shm", "");
    fill_prompt(prompt, 400, 77);
    asked *a = ask(prompt, 400, 20);
    assert_true(wait_until(is_bound, 10000));
    kill(t.workers[PREFILL].pid, SIGKILL);
    assert_int_equal(end_status(PREFILL), 1000 + SIGKILL);
    if (a->finish == PD_FINISH_NONE) {
        message.kind = PD_MSG_CANCEL;
        message.cancel.key = a->key;
        to_worker(DECODE, &message);
        assert_true(wait_until(decode_quarantined, 5000));
    }
    message = (pd_message){.kind = PD_MSG_PEER_GONE};
    message.peer_gone.incarnation = t.workers[PREFILL].hello.incarnation;
    snprintf(message.peer_gone.name, PD_NAME_BYTES, "prefill-0");
    to_worker(DECODE, &message);
    start(PREFILL);
    become_another_router();
    assert_true(wait_until(nothing_held, 5000));
    a = ask(prompt, 400, 5);
    assert_true(wait_until(all_ended, 30000));
    assert_int_equal(a->failed, PD_OK);
    assert_int_equal(a->count, 405);
    end_cluster();
}

static bool is_draining(void)
{
    return t.workers[DECODE].beat.draining;
}

static void sigterm_lets_what_runs_finish(void **state)
{
    (void)state;
    uint32_t prompt[PROMPT_MAX];

    start_cluster("shm", "");
    fill_prompt(prompt, 20, 3);
    asked *a = ask(prompt, 20, 64);
    assert_true(wait_until(second_token, 20000));
    kill(t.workers[DECODE].pid, SIGTERM);
    assert_true(wait_until(is_draining, 2000));
    asked *late = ask(prompt, 20, 2);
    assert_true(wait_until(all_ended, 20000) || late->lease.status == PD_E_OVERLOAD);
    assert_int_equal(late->lease.status, PD_E_OVERLOAD);
    late->failed = PD_E_OVERLOAD;
    assert_true(wait_until(all_ended, 20000));
    assert_int_equal(a->count, 84);
    assert_int_equal(end_status(DECODE), 0);
    kill(t.workers[PREFILL].pid, SIGTERM);
    assert_int_equal(end_status(PREFILL), 0);
    close_router();
}

static void a_refused_worker_ends_with_status_2(void **state)
{
    (void)state;
    write_deployment("shm", "");
    open_router();
    t.refuse = true;
    start(DECODE);
    int status = -1;
    for (int i = 0; i < 300 && waitpid(t.workers[DECODE].pid, &status, WNOHANG) == 0; i++)
        wait_until(first_token, 100);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 2);
    close_router();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_and_decoded_equals_computed_anew_shm),
        cmocka_unit_test(shipped_and_decoded_equals_computed_anew_tcp),
        cmocka_unit_test(a_cancel_gives_everything_back),
        cmocka_unit_test(a_killed_prefill_worker_is_replaced),
        cmocka_unit_test(sigterm_lets_what_runs_finish),
        cmocka_unit_test(a_refused_worker_ends_with_status_2),
    };

    if (argc < 4 || access(argv[3], R_OK) != 0 || mkdtemp(dir) == NULL) {
        printf("1..0 # SKIP no model file\n");
        return 0;
    }
    binaries[PREFILL] = argv[1];
    binaries[DECODE] = argv[2];
    model_path = argv[3];
    if (argc > 4)
        cmocka_set_test_filter(argv[4]);
    pd_log_init("test", PD_LOG_WARN);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (failed == 0) {
        char command[128];
        snprintf(command, sizeof command, "rm -r %s", dir);
        failed = system(command) != 0;
    } else {
        printf("# logs are in %s\n", dir);
    }
    return failed;
}
