/* The bus over real sockets: both ways, channels apart, unknown peers an error, garbage harmless.
 */
#include "common/base/buf.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/wire/bus.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct side {
    pd_loop *loop;
    pd_bus *bus;
    unsigned count[PD_MESSAGE_KINDS];
    char from[PD_IDENTITY_BYTES];
    uint32_t last_token;
    unsigned cuts;
    char cut[PD_IDENTITY_BYTES];
} side;

typedef struct pair {
    char dir[64];
    char endpoints[PD_CHANNELS][128];
    pd_loop *loop;
    pd_loop_timer *timer;
    side router, worker;
} pair;

static void take(void *ctx, const char *from, const pd_message *message)
{
    side *me = ctx;
    me->count[message->kind]++;
    snprintf(me->from, sizeof me->from, "%s", from);
    if (message->kind == PD_MSG_STEP_TOKENS)
        me->last_token = message->step_tokens.tokens[0].token;
}

static void on_cut(void *ctx, const char *identity)
{
    side *me = ctx;
    me->cuts++;
    snprintf(me->cut, sizeof me->cut, "%s", identity);
}

static void stop(void *ctx)
{
    pd_loop_stop(ctx);
}

/* A turn of the loop for ms; a fresh loop cannot be reused after stop, so the timer polls. */
typedef struct wait_for {
    pair *p;
    const unsigned *counter;
    unsigned want;
    uint64_t until_ns;
} wait_for;

static wait_for waiting;

static void check(void *ctx)
{
    (void)ctx;
    if (*waiting.counter >= waiting.want || pd_clock_now_ns() > waiting.until_ns)
        stop(waiting.p->loop);
    else
        pd_loop_timer_arm(waiting.p->timer, pd_clock_now_ns() + PD_NS_PER_MS);
}

static void endpoints_of(const pair *p, pd_bus_options *options)
{
    for (int i = 0; i < PD_CHANNELS; i++)
        options->endpoints[i] = p->endpoints[i];
}

static void setup_router(pair *p)
{
    pd_bus_options options = {.on_message = take, .on_cut = on_cut, .ctx = &p->router};
    assert_int_equal(pd_loop_create(&p->loop), PD_OK);
    assert_int_equal(pd_loop_timer_create(p->loop, check, p, &p->timer), PD_OK);
    endpoints_of(p, &options);
    assert_int_equal(pd_bus_create_router(p->loop, &options, &p->router.bus), PD_OK);
}

static void setup_worker(pair *p)
{
    pd_bus_options options = {.on_message = take, .ctx = &p->worker};
    endpoints_of(p, &options);
    assert_int_equal(pd_bus_create_worker(p->loop, &options, "decode-0", 0xabc, &p->worker.bus),
                     PD_OK);
}

static void setup_endpoints(pair *p)
{
    memset(p, 0, sizeof *p);
    snprintf(p->dir, sizeof p->dir, "/tmp/kvferry-bus-XXXXXX");
    assert_non_null(mkdtemp(p->dir));
    for (int i = 0; i < PD_CHANNELS; i++)
        snprintf(p->endpoints[i], sizeof p->endpoints[i], "ipc://%s/%d", p->dir, i);
}

static void setup_pair(pair *p)
{
    setup_endpoints(p);
    setup_router(p);
    setup_worker(p);
}

static void teardown_pair(pair *p)
{
    pd_bus_destroy(p->worker.bus);
    pd_bus_destroy(p->router.bus);
    pd_loop_destroy(p->loop);
    for (int i = 0; i < PD_CHANNELS; i++)
        unlink(p->endpoints[i] + strlen("ipc://"));
    rmdir(p->dir);
}

static void run_until(pair *p, const unsigned *counter, unsigned want)
{
    waiting = (wait_for){p, counter, want, pd_clock_now_ns() + 5 * PD_NS_PER_S};
    pd_loop_timer_arm(p->timer, 0);
    assert_int_equal(pd_loop_run(p->loop), PD_OK);
    assert_true(*counter >= want);
}

static void send_when_connected(pair *p, const pd_message *message)
{
    (void)p;
    pd_status status = PD_E_OVERLOAD;
    for (int i = 0; i < 2000 && status != PD_OK; i++) {
        status = pd_bus_send(p->worker.bus, NULL, message);
        if (status != PD_OK)
            usleep(1000);
    }
    assert_int_equal(status, PD_OK);
}

static void messages_go_both_ways_with_the_senders_identity(void **state)
{
    pair p;
    pd_message message = {.kind = PD_MSG_BYE, .bye = {.incarnation = 1}};
    char identity[PD_IDENTITY_BYTES];

    (void)state;
    setup_pair(&p);
    assert_int_equal(pd_bus_send(p.router.bus, "decode-9/0000000000000001", &message), PD_E_PEER);
    send_when_connected(&p, &message);
    run_until(&p, &p.router.count[PD_MSG_BYE], 1);
    pd_bus_identity("decode-0", 0xabc, identity);
    assert_string_equal(p.router.from, identity);
    message = (pd_message){.kind = PD_MSG_ROUTER_HEARTBEAT, .router_heartbeat = {.router = 5}};
    assert_int_equal(pd_bus_send(p.router.bus, identity, &message), PD_OK);
    teardown_pair(&p);
}

static void a_thousand_token_messages_arrive_in_order(void **state)
{
    pair p;
    pd_step_token token = {.key = {1, 2, 3}};
    pd_message message = {
        .kind = PD_MSG_STEP_TOKENS,
        .step_tokens = {.name = "decode-0", .incarnation = 1, .tokens = &token, .tokens_count = 1}};

    (void)state;
    setup_pair(&p);
    for (uint32_t i = 1; i <= 1000; i++) {
        token.token = i;
        send_when_connected(&p, &message);
    }
    run_until(&p, &p.router.count[PD_MSG_STEP_TOKENS], 1000);
    assert_int_equal(p.router.last_token, 1000);
    assert_int_equal(p.router.count[PD_MSG_STEP_TOKENS], 1000);
    teardown_pair(&p);
}

static void run_ms(pair *p, uint64_t ms)
{
    static const unsigned never = 0;
    waiting = (wait_for){p, &never, 1, pd_clock_now_ns() + ms * PD_NS_PER_MS};
    pd_loop_timer_arm(p->timer, 0);
    assert_int_equal(pd_loop_run(p->loop), PD_OK);
}

/* A process that speaks once and then waits for its death. */
static pid_t start_speaker(pair *p)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid != 0)
        return pid;
    pd_message message = {.kind = PD_MSG_BYE, .bye = {.incarnation = 1}};
    if (pd_loop_create(&p->loop) != PD_OK)
        _exit(1);
    setup_worker(p);
    send_when_connected(p, &message);
    for (;;)
        pause();
}

static void free_tcp_ports(pair *p)
{
    for (int i = 0; i < PD_CHANNELS; i++) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
        socklen_t len = sizeof address;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&address, len) == 0 &&
                    getsockname(fd, (struct sockaddr *)&address, &len) == 0);
        close(fd);
        snprintf(p->endpoints[i], sizeof p->endpoints[i], "tcp://127.0.0.1:%u",
                 ntohs(address.sin_port));
    }
}

static void a_killed_processs_connection_is_told_of(bool tcp)
{
    pair p;
    char identity[PD_IDENTITY_BYTES];

    setup_endpoints(&p);
    if (tcp)
        free_tcp_ports(&p);
    pid_t pid = start_speaker(&p); /* ZeroMQ does not survive a fork: no socket is open yet */
    setup_router(&p);
    run_until(&p, &p.router.count[PD_MSG_BYE], 1);
    run_ms(&p, 100);
    assert_int_equal(p.router.cuts, 0);
    kill(pid, SIGSTOP); /* a hung one keeps its connection, for now */
    run_ms(&p, 100);
    assert_int_equal(p.router.cuts, 0);
    uint64_t killed_ns = pd_clock_now_ns();
    kill(pid, SIGKILL);
    run_until(&p, &p.router.cuts, 1);
    uint64_t took_ms = (pd_clock_now_ns() - killed_ns) / PD_NS_PER_MS;
    assert_true(took_ms < 1000); /* ZeroMQ's own patience is 2000 */
    pd_bus_identity("decode-0", 0xabc, identity);
    assert_string_equal(p.router.cut, identity);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(pd_bus_counters_of(p.router.bus).cut, 1);
    teardown_pair(&p);
}

static void a_killed_process_is_seen_by_its_socket(void **state)
{
    (void)state;
    a_killed_processs_connection_is_told_of(false);
}

static void a_killed_process_is_seen_by_its_tcp_connection(void **state)
{
    (void)state;
    a_killed_processs_connection_is_told_of(true);
}

/* Each end is told, once, after the last word; whoever comes back is heard again. */
static void who_comes_and_goes_is_told_of_each_time(void **state)
{
    pair p;
    pd_message message = {.kind = PD_MSG_BYE, .bye = {.incarnation = 1}};

    (void)state;
    setup_endpoints(&p);
    setup_router(&p);
    for (unsigned i = 1; i <= 20; i++) {
        setup_worker(&p);
        send_when_connected(&p, &message);
        run_until(&p, &p.router.count[PD_MSG_BYE], i);
        assert_int_equal(p.router.cuts, i - 1);
        pd_bus_destroy(p.worker.bus);
        p.worker.bus = NULL;
        run_until(&p, &p.router.cuts, i);
    }
    assert_int_equal(pd_bus_counters_of(p.router.bus).malformed, 0);
    teardown_pair(&p);
}

/* ---- strangers: bytes on the control socket that no worker sends ---- */

static int connect_stranger(const pair *p)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s",
             p->endpoints[PD_CHANNEL_CONTROL] + strlen("ipc://"));
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

/* May be cut off: the other side is free to close. */
static bool say(int fd, const void *bytes, size_t len)
{
    return send(fd, bytes, len, MSG_NOSIGNAL) == (ssize_t)len;
}

static void read_all(int fd, void *bytes, size_t len)
{
    assert_int_equal(recv(fd, bytes, len, MSG_WAITALL), len);
}

/* ZMTP 3.0 by hand: a greeting, and READY as a DEALER with that identity; then the other side's:
 * whoever sends sooner breaks the protocol. */
static void shake_hands(int fd, const char *identity)
{
    static const char properties[] = "\x05READY\x0bSocket-Type\0\0\0\x06"
                                     "DEALER\x08Identity\0\0\0";
    unsigned char greeting[64] = {0xff, [9] = 0x7f, [10] = 3};
    unsigned char ready[256] = {4};
    size_t at = 2, len = strlen(identity);
    memcpy(greeting + 12, "NULL", 4);
    memcpy(ready + at, properties, sizeof properties - 1);
    at += sizeof properties - 1;
    ready[at++] = (unsigned char)len;
    memcpy(ready + at, identity, len);
    ready[1] = (unsigned char)(at + len - 2);
    assert_true(say(fd, greeting, sizeof greeting));
    assert_true(say(fd, ready, at + len));
    read_all(fd, greeting, sizeof greeting);
    read_all(fd, ready, 2);
    read_all(fd, ready, ready[1]);
}

static size_t frame_of(const void *bytes, size_t len, unsigned char *out)
{
    out[0] = 0;
    out[1] = (unsigned char)len; /* a short frame: at most 255 */
    memcpy(out + 2, bytes, len);
    return len + 2;
}

static uint64_t draw(uint64_t *random)
{
    *random = *random * 6364136223846793005ull + 1442695040888963407ull;
    return *random >> 33;
}

/* A real message of each kind that a worker may send, with bytes changed. */
static size_t mutilated(uint64_t *random, pd_buf *packed, unsigned char *out)
{
    static const pd_message_kind kinds[] = {
        PD_MSG_BYE,       PD_MSG_HEARTBEAT, PD_MSG_PREFILL_STARTED, PD_MSG_LANDED,
        PD_MSG_SUSPENDED, PD_MSG_SHIP_DONE, PD_MSG_AUDIT_REPLY,     PD_MSG_REFETCH,
    };
    pd_block blocks[] = {1, 2, 3};
    pd_audit_entry entries[] = {{.key = {1, 2, 3}, .state = PD_AUDIT_HOLDING, .blocks = 2}};
    uint64_t waits[] = {7, 8};
    pd_message message = {.kind = kinds[draw(random) % 8]};
    if (message.kind == PD_MSG_PREFILL_STARTED) {
        message.prefill_started.pull_blocks = blocks;
        message.prefill_started.pull_blocks_count = 3;
    } else if (message.kind == PD_MSG_AUDIT_REPLY) {
        message.audit_reply.entries = entries;
        message.audit_reply.entries_count = 1;
        message.audit_reply.waits_for = waits;
        message.audit_reply.waits_for_count = 2;
    }
    assert_int_equal(pd_message_pack(&message, packed), PD_OK);
    size_t len = packed->len < 250 ? packed->len : 250;
    unsigned char bytes[256];
    memcpy(bytes, packed->bytes, len);
    for (uint64_t i = draw(random) % 6; i > 0 && len > 0; i--)
        bytes[draw(random) % len] = (unsigned char)draw(random);
    if (len > 0 && draw(random) % 4 == 0)
        len = draw(random) % len;
    return frame_of(bytes, len, out);
}

static uint64_t taken_by(const pair *p)
{
    pd_bus_counters counters = pd_bus_counters_of(p->router.bus);
    return counters.received + counters.malformed;
}

static void strangers_bytes_do_no_harm(void **state)
{
    enum { ROUNDS = 90, FRAMES = 40 };
    pair p;
    pd_buf packed;
    uint64_t random = 12345;
    unsigned char bytes[600];
    char identity[32];
    pd_message message = {.kind = PD_MSG_BYE, .bye = {.incarnation = 1}};

    (void)state;
    setup_pair(&p);
    pd_buf_init(&packed, 1 << 16);
    for (int round = 0; round < ROUNDS; round++) {
        bool polite = round % 3 != 0; /* the others send noise, which may pass for ZMTP 1.0 */
        uint64_t before = taken_by(&p);
        int fd = connect_stranger(&p);
        snprintf(identity, sizeof identity, round % 3 == 1 ? "decode-7/%d" : "\x01\xff%d\n", round);
        if (polite)
            shake_hands(fd, identity);
        for (int i = 0; i < FRAMES; i++) {
            size_t len = 1 + draw(&random) % 64;
            for (size_t b = 0; b < len; b++)
                bytes[b] = (unsigned char)draw(&random);
            if (polite)
                len = mutilated(&random, &packed, bytes);
            if (!say(fd, bytes, len))
                break;
        }
        for (int i = 0; polite && i < 5000 && taken_by(&p) < before + FRAMES; i++)
            run_ms(&p, 1);
        assert_true(!polite || taken_by(&p) >= before + FRAMES);
        close(fd);
    }
    pd_bus_counters counters = pd_bus_counters_of(p.router.bus);
    assert_true(counters.malformed > ROUNDS * FRAMES / 4);
    assert_true(counters.received > 100); /* what was still a message */
    run_until(&p, &p.router.cuts, ROUNDS / 2);
    unsigned heard = p.router.count[PD_MSG_BYE];
    send_when_connected(&p, &message);
    run_until(&p, &p.router.count[PD_MSG_BYE], heard + 1);
    pd_buf_fini(&packed);
    teardown_pair(&p);
}

/* One that floods is read in turns with the others. */
static void a_flood_delays_nobody_else(void **state)
{
    pair p;
    pd_buf packed;
    unsigned char frame[300];
    pd_message flood = {.kind = PD_MSG_HEARTBEAT, .heartbeat = {.incarnation = 9}};
    pd_message message = {.kind = PD_MSG_BYE, .bye = {.incarnation = 1}};
    enum { FLOOD = 8000 }; /* below the socket's high-water mark: all of it is taken */

    (void)state;
    setup_pair(&p);
    pd_buf_init(&packed, 1 << 16);
    send_when_connected(&p, &message);
    run_until(&p, &p.router.count[PD_MSG_BYE], 1);
    assert_int_equal(pd_message_pack(&flood, &packed), PD_OK);
    size_t len = frame_of(packed.bytes, packed.len, frame);
    int fd = connect_stranger(&p);
    shake_hands(fd, "decode-7/0000000000000001");
    run_ms(&p, 50);
    int sent = 0;
    while (sent < FLOOD && say(fd, frame, len))
        sent++;
    usleep(50000); /* it waits in the router's queue */
    assert_int_equal(pd_bus_send(p.worker.bus, NULL, &message), PD_OK);
    usleep(50000);
    run_until(&p, &p.router.count[PD_MSG_BYE], 2);
    assert_int_equal(sent, FLOOD);
    assert_true(p.router.count[PD_MSG_HEARTBEAT] < (unsigned)sent); /* it did not wait behind */
    close(fd);
    run_until(&p, &p.router.cuts, 1);
    assert_int_equal(p.router.count[PD_MSG_HEARTBEAT], FLOOD); /* its end comes after its words */
    pd_buf_fini(&packed);
    teardown_pair(&p);
}

static void an_address_in_use_is_an_error(void **state)
{
    pair p;
    pd_bus *second = NULL;
    pd_bus_options options = {.endpoints = {"tcp://127.0.0.1:1", "x", "nonsense://"},
                              .on_message = take};

    (void)state;
    setup_pair(&p);
    options.endpoints[0] = "nonsense://a";
    assert_int_equal(pd_bus_create_router(p.loop, &options, &second), PD_E_IO);
    assert_null(second);
    teardown_pair(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_go_both_ways_with_the_senders_identity),
        cmocka_unit_test(a_thousand_token_messages_arrive_in_order),
        cmocka_unit_test(a_killed_process_is_seen_by_its_socket),
        cmocka_unit_test(a_killed_process_is_seen_by_its_tcp_connection),
        cmocka_unit_test(who_comes_and_goes_is_told_of_each_time),
        cmocka_unit_test(strangers_bytes_do_no_harm),
        cmocka_unit_test(a_flood_delays_nobody_else),
        cmocka_unit_test(an_address_in_use_is_an_error),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
