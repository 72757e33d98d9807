/* The engine over a carrier that does what a test says, among it what a real one does only when a
 * peer dies at the right moment. */

#include "common/transfer/engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { OPS_KEPT = 256 };

typedef struct kept_op {
    char kind; /* 'p'ut, 'f'lush, 's'end */
    pd_peer peer;
    uint64_t token;
    pd_status status;
    bool ripe; /* the test wants it completed */
} kept_op;

/* The script and the record of one carrier; the test's thread and the engine's share it. */
struct pd_carrier {
    const pd_carrier_events *events;
    void *engine;
    int fd;
};

static struct {
    pthread_mutex_t lock;
    pd_status put_now, flush_now, send_now; /* returned; PD_E_AGAIN keeps the operation */
    bool never_closes;
    bool break_peer; /* in the next progress */
    unsigned char receive[64];
    size_t receive_len; /* SIZE_MAX: nothing */
    kept_op ops[OPS_KEPT];
    uint32_t ops_count;
    uint32_t puts, flushes, sends;
    uint64_t fenced;
    pd_carrier *carrier;
} script = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pd_status scripted_create(const pd_transfer_options *options,
                                 const pd_carrier_events *events, void *engine,
                                 pd_carrier **carrier_out)
{
    (void)options;
    pd_carrier *carrier = pd_calloc(1, sizeof *carrier);
    assert_non_null(carrier);
    *carrier = (pd_carrier){.events = events, .engine = engine, .fd = eventfd(0, EFD_NONBLOCK)};
    script.carrier = carrier;
    *carrier_out = carrier;
    return PD_OK;
}

static void scripted_destroy(pd_carrier *carrier)
{
    close(carrier->fd);
    pd_free(carrier);
}

static void *scripted_pool(const pd_carrier *carrier)
{
    (void)carrier;
    return NULL;
}

static const void *scripted_address(const pd_carrier *carrier, size_t *bytes_out)
{
    (void)carrier;
    *bytes_out = 0;
    return "";
}

static void scripted_fence(pd_carrier *carrier, uint64_t incarnation)
{
    (void)carrier;
    script.fenced = incarnation;
}

static int scripted_fd(const pd_carrier *carrier)
{
    return carrier->fd;
}

static bool take_ripe(kept_op *op_out)
{
    bool found = false;
    pthread_mutex_lock(&script.lock);
    for (uint32_t i = 0; i < script.ops_count && !found; i++) {
        if (script.ops[i].ripe) {
            *op_out = script.ops[i];
            script.ops[i] = script.ops[--script.ops_count];
            found = true;
        }
    }
    pthread_mutex_unlock(&script.lock);
    return found;
}

static bool scripted_progress(pd_carrier *carrier)
{
    uint64_t count;
    ssize_t got = read(carrier->fd, &count, sizeof count);
    (void)got;
    kept_op op;
    if (take_ripe(&op)) {
        if (op.kind == 'p')
            carrier->events->put_done(carrier->engine, op.token, op.status);
        else if (op.kind == 'f')
            carrier->events->flush_done(carrier->engine, op.token, op.status);
        else
            carrier->events->send_done(carrier->engine, op.token, op.status);
        return true;
    }
    pthread_mutex_lock(&script.lock);
    bool broken = script.break_peer;
    unsigned char receive[sizeof script.receive];
    size_t receive_len = script.receive_len;
    memcpy(receive, script.receive, sizeof receive);
    script.break_peer = false;
    script.receive_len = SIZE_MAX;
    pthread_mutex_unlock(&script.lock);
    if (broken)
        carrier->events->broken(carrier->engine, 0);
    if (receive_len != SIZE_MAX)
        carrier->events->received(carrier->engine, receive, receive_len);
    return broken || receive_len != SIZE_MAX;
}

static bool scripted_arm(pd_carrier *carrier)
{
    (void)carrier;
    return true;
}

static pd_status scripted_open(pd_carrier *carrier, pd_peer peer, const void *address, size_t bytes,
                               pd_carrier_pool peer_pool)
{
    (void)address;
    (void)bytes;
    (void)peer_pool;
    carrier->events->opened(carrier->engine, peer, PD_OK, "script");
    return PD_OK;
}

static void scripted_close(pd_carrier *carrier, pd_peer peer)
{
    if (!script.never_closes)
        carrier->events->closed(carrier->engine, peer);
}

static pd_status keep(char kind, pd_peer peer, uint64_t token, pd_status status, uint32_t *counter)
{
    pthread_mutex_lock(&script.lock);
    (*counter)++;
    if (status == PD_E_AGAIN) {
        assert_true(script.ops_count < OPS_KEPT);
        script.ops[script.ops_count++] = (kept_op){.kind = kind, .peer = peer, .token = token};
    }
    pthread_mutex_unlock(&script.lock);
    return status;
}

static pd_status scripted_put(pd_carrier *carrier, pd_peer peer, uint64_t source_offset,
                              uint64_t target_offset, uint64_t bytes, uint64_t token)
{
    (void)carrier;
    (void)source_offset;
    (void)target_offset;
    (void)bytes;
    return keep('p', peer, token, script.put_now, &script.puts);
}

static pd_status scripted_flush(pd_carrier *carrier, pd_peer peer, uint64_t token)
{
    (void)carrier;
    return keep('f', peer, token, script.flush_now, &script.flushes);
}

static pd_status scripted_send(pd_carrier *carrier, pd_peer peer, const void *bytes, size_t len,
                               uint64_t token)
{
    (void)carrier;
    (void)bytes;
    (void)len;
    return keep('s', peer, token, script.send_now, &script.sends);
}

static const pd_carrier_ops scripted = {
    .name = "script",
    .create = scripted_create,
    .destroy = scripted_destroy,
    .pool = scripted_pool,
    .address = scripted_address,
    .fd = scripted_fd,
    .progress = scripted_progress,
    .arm = scripted_arm,
    .open = scripted_open,
    .close = scripted_close,
    .put = scripted_put,
    .flush = scripted_flush,
    .send = scripted_send,
    .fence = scripted_fence,
};

/* ---- the test's side ---- */

/* Completes the n-th kept operation of a kind; false when there is none. */
static bool complete(char kind, uint32_t nth, pd_status status)
{
    bool found = false;
    pthread_mutex_lock(&script.lock);
    for (uint32_t i = 0; i < script.ops_count && !found; i++) {
        kept_op *op = &script.ops[i];
        if (op->kind == kind && !op->ripe && nth-- == 0) {
            op->ripe = found = true;
            op->status = status;
        }
    }
    pthread_mutex_unlock(&script.lock);
    uint64_t one = 1;
    assert_int_equal(write(script.carrier->fd, &one, sizeof one), sizeof one);
    return found;
}

static void wait_for(const uint32_t *counter, uint32_t value)
{
    for (int i = 0; i < 5000; i++) {
        pthread_mutex_lock(&script.lock);
        bool there = *counter >= value;
        pthread_mutex_unlock(&script.lock);
        if (there)
            return;
        usleep(1000);
    }
    fail_msg("the carrier was not asked %u times", value);
}

static void on_up(void *ctx, pd_peer peer, uint32_t generation, bool up)
{
    (void)ctx;
    (void)peer;
    (void)generation;
    (void)up;
}

static pd_engine *engine_create(uint32_t window, uint32_t stall_ms)
{
    pthread_mutex_lock(&script.lock);
    script.put_now = script.flush_now = script.send_now = PD_E_AGAIN;
    script.never_closes = script.break_peer = false;
    script.receive_len = SIZE_MAX;
    script.ops_count = script.puts = script.flushes = script.sends = 0;
    pthread_mutex_unlock(&script.lock);
    pd_transfer_options transfer = {
        .peers_max = 2, .puts_in_flight_max = window, .stall_ms = stall_ms};
    pd_engine_options options = {
        .carrier = &scripted, .transfer = &transfer, .incarnation = 42, .up = on_up};
    pd_engine *engine = NULL;
    assert_int_equal(pd_engine_create(&options, &engine), PD_OK);
    return engine;
}

static pd_engine_event *next_event(pd_engine *engine, int wait_ms)
{
    pd_engine_event *event = NULL;
    for (int i = 0; i <= wait_ms; i++) {
        if (pd_queue_pop(pd_engine_events(engine), &event) == PD_OK)
            return event;
        usleep(1000);
    }
    return NULL;
}

static void expect(pd_engine *engine, pd_transfer_event_kind kind, pd_status status,
                   uint64_t ticket)
{
    pd_engine_event *event = next_event(engine, 5000);
    assert_non_null(event);
    assert_int_equal(event->kind, kind);
    assert_int_equal(event->status, status);
    assert_int_equal(event->ticket, ticket);
    pd_free(event);
}

static void expect_silence(pd_engine *engine)
{
    pd_engine_event *event = next_event(engine, 60);
    assert_null(event);
}

static void connect_peer(pd_engine *engine, uint32_t generation)
{
    pd_engine_control control = {.kind = PD_ENGINE_CONNECT, .generation = generation};
    for (int i = 0; i < 3; i++) {
        control.events[i] = pd_calloc(1, sizeof *control.events[i]);
        assert_non_null(control.events[i]);
        control.events[i]->kind = i == 2 ? PD_TRANSFER_CLOSED : PD_TRANSFER_PEER_DOWN;
    }
    assert_int_equal(pd_engine_control_push(engine, &control), PD_OK);
    expect(engine, PD_TRANSFER_CONNECTED, PD_OK, 0);
}

static void close_peer(pd_engine *engine, uint32_t generation)
{
    pd_engine_control control = {.kind = PD_ENGINE_CLOSE, .generation = generation};
    assert_int_equal(pd_engine_control_push(engine, &control), PD_OK);
}

static void put(pd_engine *engine, uint32_t generation)
{
    pd_engine_op op = {.kind = PD_ENGINE_PUT, .generation = generation, .bytes = 100};
    assert_int_equal(pd_engine_op_push(engine, &op), PD_OK);
}

static void notice(pd_engine *engine, uint32_t generation, uint64_t ticket)
{
    pd_engine_op op = {.kind = PD_ENGINE_NOTICE, .generation = generation};
    op.batch = pd_calloc(1, sizeof *op.batch + 16);
    assert_non_null(op.batch);
    op.batch->sent = pd_calloc(1, sizeof *op.batch->sent);
    assert_non_null(op.batch->sent);
    op.batch->sent->kind = PD_TRANSFER_SENT;
    op.batch->sent->ticket = ticket;
    assert_int_equal(pd_engine_op_push(engine, &op), PD_OK);
}

static uint32_t sends(void)
{
    pthread_mutex_lock(&script.lock);
    uint32_t count = script.sends;
    pthread_mutex_unlock(&script.lock);
    return count;
}

static void a_notice_waits_for_the_flush_and_for_every_put(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    connect_peer(engine, 1);
    put(engine, 1);
    put(engine, 1);
    notice(engine, 1, 7);
    wait_for(&script.flushes, 1);
    assert_true(complete('f', 0, PD_OK)); /* the flush says "done" before the puts do */
    expect_silence(engine);
    assert_true(complete('p', 1, PD_OK)); /* the second put before the first */
    expect_silence(engine);
    assert_int_equal(sends(), 0);
    assert_true(complete('p', 0, PD_OK));
    wait_for(&script.sends, 1);
    expect_silence(engine);
    assert_true(complete('s', 0, PD_OK));
    expect(engine, PD_TRANSFER_SENT, PD_OK, 7);
    pd_engine_destroy(engine);
}

static void a_failed_put_stops_the_notice_though_the_flush_says_ok(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    connect_peer(engine, 1);
    pthread_mutex_lock(&script.lock);
    script.flush_now = PD_OK;
    pthread_mutex_unlock(&script.lock);
    put(engine, 1);
    put(engine, 1);
    notice(engine, 1, 8);
    wait_for(&script.flushes, 1);
    assert_true(complete('p', 0, PD_E_PEER));
    expect(engine, PD_TRANSFER_SENT, PD_E_PEER, 8);
    expect(engine, PD_TRANSFER_PEER_DOWN, PD_E_PEER, 0);
    notice(engine, 1, 9); /* what still comes is refused, not sent */
    expect(engine, PD_TRANSFER_SENT, PD_E_PEER, 9);
    assert_int_equal(sends(), 0);
    close_peer(engine, 1);
    expect(engine, PD_TRANSFER_CLOSED, PD_OK, 0);
    pd_engine_destroy(engine);
}

static void requests_that_never_complete_hold_nothing_up(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    connect_peer(engine, 1);
    put(engine, 1);
    notice(engine, 1, 1);
    wait_for(&script.flushes, 1);
    assert_true(complete('p', 0, PD_OK) && complete('f', 0, PD_OK));
    wait_for(&script.sends, 1); /* a message that the carrier keeps for ever */
    put(engine, 1);
    notice(engine, 1, 2);
    close_peer(engine, 1);
    expect(engine, PD_TRANSFER_SENT, PD_E_CANCELLED, 1);
    expect(engine, PD_TRANSFER_SENT, PD_E_CANCELLED, 2);
    expect(engine, PD_TRANSFER_CLOSED, PD_OK, 0);
    pd_engine_destroy(engine);
}

static void late_completions_do_not_touch_the_next_connection(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    connect_peer(engine, 1);
    put(engine, 1);
    wait_for(&script.puts, 1);
    close_peer(engine, 1);
    expect(engine, PD_TRANSFER_CLOSED, PD_OK, 0);
    connect_peer(engine, 2);
    put(engine, 2);
    notice(engine, 2, 4);
    wait_for(&script.flushes, 1);
    assert_true(complete('f', 0, PD_OK));
    assert_true(complete('p', 0, PD_E_PEER)); /* the first connection's, with the same number */
    expect_silence(engine);
    assert_int_equal(sends(), 0);
    assert_true(complete('p', 0, PD_OK));
    wait_for(&script.sends, 1);
    assert_true(complete('s', 0, PD_OK));
    expect(engine, PD_TRANSFER_SENT, PD_OK, 4);
    pd_engine_destroy(engine);
}

static void a_close_that_never_ends_is_abandoned(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    connect_peer(engine, 1);
    script.never_closes = true;
    put(engine, 1);
    notice(engine, 1, 5);
    uint64_t start_ns = pd_clock_now_ns();
    close_peer(engine, 1);
    expect(engine, PD_TRANSFER_SENT, PD_E_CANCELLED, 5);
    assert_true(pd_clock_now_ns() - start_ns < PD_NS_PER_S / 2); /* not after the close */
    expect(engine, PD_TRANSFER_CLOSED, PD_E_TIMEOUT, 0);
    connect_peer(engine, 2);
    pd_engine_destroy(engine); /* the same again, without end otherwise */
}

static void a_peer_is_given_up_when_nothing_moves_and_only_then(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 300);
    connect_peer(engine, 1);
    usleep(500000); /* idle: nothing is due */
    expect_silence(engine);
    for (int i = 0; i < 5; i++)
        put(engine, 1);
    notice(engine, 1, 6);
    wait_for(&script.flushes, 1);
    for (int i = 0; i < 4; i++) { /* slow, but it moves */
        usleep(150000);
        assert_true(complete('p', 0, PD_OK));
    }
    expect_silence(engine);
    expect(engine, PD_TRANSFER_SENT, PD_E_TIMEOUT, 6);
    expect(engine, PD_TRANSFER_PEER_DOWN, PD_E_TIMEOUT, 0);
    pd_engine_destroy(engine);
}

static void no_more_than_the_window_is_in_flight(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(8, 60000);
    connect_peer(engine, 1);
    for (int i = 0; i < 20; i++)
        put(engine, 1);
    notice(engine, 1, 1);
    wait_for(&script.puts, 8);
    expect_silence(engine);
    assert_int_equal(script.puts, 8);
    assert_true(complete('p', 0, PD_OK));
    wait_for(&script.puts, 9);
    expect_silence(engine);
    assert_int_equal(script.puts, 9);
    pd_engine_destroy(engine);
}

static void a_broken_connection_is_told_once(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    connect_peer(engine, 1);
    for (int i = 0; i < 2; i++) {
        pthread_mutex_lock(&script.lock);
        script.break_peer = true;
        pthread_mutex_unlock(&script.lock);
        complete('p', 0, PD_OK); /* wakes the engine */
        if (i == 0)
            expect(engine, PD_TRANSFER_PEER_DOWN, PD_E_PEER, 0);
        else
            expect_silence(engine);
    }
    close_peer(engine, 1);
    expect(engine, PD_TRANSFER_CLOSED, PD_OK, 0);
    pd_engine_destroy(engine);
}

static void receive(const void *bytes, size_t len)
{
    pthread_mutex_lock(&script.lock);
    assert_true(len <= sizeof script.receive);
    memcpy(script.receive, bytes, len);
    script.receive_len = len;
    pthread_mutex_unlock(&script.lock);
    complete('p', 0, PD_OK); /* wakes the engine */
}

static void only_sound_messages_for_this_incarnation_are_delivered(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(0, 60000);
    struct {
        pd_engine_message head;
        char text[8];
    } good = {{PD_ENGINE_MESSAGE_MAGIC, 8, 42}, "notice"}, bad;
    receive(&good, sizeof good);
    pd_engine_event *event = next_event(engine, 5000);
    assert_non_null(event);
    assert_int_equal(event->kind, PD_TRANSFER_NOTICE);
    assert_int_equal(event->notice_len, 8);
    assert_string_equal((char *)event->notice, "notice");
    pd_free(event);
    bad = good;
    bad.head.target_incarnation = 41;
    receive(&bad, sizeof bad);
    expect_silence(engine);
    bad = good;
    bad.head.magic++;
    receive(&bad, sizeof bad);
    expect_silence(engine);
    bad = good;
    bad.head.len = 9;
    receive(&bad, sizeof bad);
    expect_silence(engine);
    for (size_t len = 0; len < sizeof good; len += 5) {
        receive(&good, len);
        expect_silence(engine);
    }
    pd_engine_destroy(engine);
}

static int nothing_is_left(void **state)
{
    (void)state;
    assert_int_equal(pd_mem_live(), 0);
    return 0;
}

static void a_fence_is_confirmed_when_the_carrier_has_it(void **state)
{
    (void)state;
    pd_engine *engine = engine_create(4, 0);
    pd_engine_control control = {.kind = PD_ENGINE_FENCE, .incarnation = 7};
    control.events[0] = pd_calloc(1, sizeof *control.events[0]);
    assert_non_null(control.events[0]);
    control.events[0]->kind = PD_TRANSFER_FENCED;
    script.fenced = 0;
    assert_int_equal(pd_engine_control_push(engine, &control), PD_OK);
    expect(engine, PD_TRANSFER_FENCED, PD_OK, 0);
    assert_int_equal(script.fenced, 7);
    pd_engine_destroy(engine);
}

int main(void)
{
    pd_log_init("test", PD_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_fence_is_confirmed_when_the_carrier_has_it, nothing_is_left),
        cmocka_unit_test_teardown(a_notice_waits_for_the_flush_and_for_every_put, nothing_is_left),
        cmocka_unit_test_teardown(a_failed_put_stops_the_notice_though_the_flush_says_ok,
                                  nothing_is_left),
        cmocka_unit_test_teardown(requests_that_never_complete_hold_nothing_up, nothing_is_left),
        cmocka_unit_test_teardown(late_completions_do_not_touch_the_next_connection,
                                  nothing_is_left),
        cmocka_unit_test_teardown(a_close_that_never_ends_is_abandoned, nothing_is_left),
        cmocka_unit_test_teardown(a_peer_is_given_up_when_nothing_moves_and_only_then,
                                  nothing_is_left),
        cmocka_unit_test_teardown(no_more_than_the_window_is_in_flight, nothing_is_left),
        cmocka_unit_test_teardown(a_broken_connection_is_told_once, nothing_is_left),
        cmocka_unit_test_teardown(only_sound_messages_for_this_incarnation_are_delivered,
                                  nothing_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
