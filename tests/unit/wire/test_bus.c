/* The bus over real sockets: both ways, channels apart, unknown peers an error, garbage harmless.
 */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/wire/bus.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct side {
    pd_loop *loop;
    pd_bus *bus;
    unsigned count[PD_MESSAGE_KINDS];
    char from[PD_IDENTITY_BYTES];
    uint32_t last_token;
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

static void setup_pair(pair *p)
{
    memset(p, 0, sizeof *p);
    snprintf(p->dir, sizeof p->dir, "/tmp/kvferry-bus-XXXXXX");
    assert_non_null(mkdtemp(p->dir));
    assert_int_equal(pd_loop_create(&p->loop), PD_OK);
    assert_int_equal(pd_loop_timer_create(p->loop, check, p, &p->timer), PD_OK);
    for (int i = 0; i < PD_CHANNELS; i++)
        snprintf(p->endpoints[i], sizeof p->endpoints[i], "ipc://%s/%d", p->dir, i);
    pd_bus_options options = {.on_message = take, .ctx = &p->router};
    for (int i = 0; i < PD_CHANNELS; i++)
        options.endpoints[i] = p->endpoints[i];
    assert_int_equal(pd_bus_create_router(p->loop, &options, &p->router.bus), PD_OK);
    options.ctx = &p->worker;
    assert_int_equal(pd_bus_create_worker(p->loop, &options, "decode-0", 0xabc, &p->worker.bus),
                     PD_OK);
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
        cmocka_unit_test(an_address_in_use_is_an_error),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
