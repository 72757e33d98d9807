/* A worker's clock as its router knows it: which word it said after it was given up. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/cluster.h"
#include "tests/unit/router/fake.h"

#include <stdio.h>

enum { INCARNATION = 7 };
#define AHEAD_NS (777 * PD_NS_PER_S) /* the worker's clock at the router's 0 */

static bool send(void *ctx, const char *to, const pd_message *message)
{
    (void)ctx;
    (void)to;
    (void)message;
    return true;
}

typedef struct test {
    router_core_config config;
    router_sink sink;
    router_cluster *cluster;
    uint32_t slot;
} test;

/* Its hello came at `now_ns`, when its clock showed clock_ns. */
static void begin(test *t, uint64_t clock_ns, uint64_t now_ns)
{
    *t = (test){.sink = {.send = send}};
    fake_config(&t->config);
    assert_int_equal(router_cluster_create(&t->config, 1, &t->sink, 0, &t->cluster), PD_OK);
    pd_msg_hello hello = {.wire_version = PD_WIRE_VERSION,
                          .name = "decode-0",
                          .role = PD_ROLE_DECODE,
                          .incarnation = INCARNATION,
                          .model_fingerprint = t->config.model_fingerprint,
                          .block_tokens = t->config.block_tokens,
                          .context_max = t->config.context_max,
                          .blocks = 1,
                          .clock_ns = clock_ns};
    snprintf(hello.model, sizeof hello.model, "%s", t->config.model);
    uint32_t replaced;
    assert_int_equal(
        router_cluster_hello(t->cluster, "decode-0/7", &hello, now_ns, &t->slot, &replaced), PD_OK);
}

static void beat(test *t, uint64_t clock_ns, uint64_t now_ns)
{
    pd_msg_heartbeat heartbeat = {.incarnation = INCARNATION, .clock_ns = clock_ns};
    router_cluster_report(t->cluster, t->slot, &heartbeat, now_ns);
}

/* Given up at now_ns: words that its clock calls so are told apart. */
static void assert_parted_at(test *t, uint64_t now_ns, uint64_t clock_ns)
{
    router_cluster_remove(t->cluster, t->slot, now_ns);
    for (int after = 0; after < 2; after++) {
        uint64_t said_ns = clock_ns + (after ? 1 : -1) * 5 * PD_NS_PER_MS;
        assert_int_equal(router_cluster_outlived(t->cluster, INCARNATION, said_ns), after);
        assert_int_equal(router_cluster_is_late(t->cluster, INCARNATION, said_ns), !after);
    }
    router_cluster_destroy(t->cluster);
}

/* The last one waited in a socket: what it says of the clock is old. */
static void a_slow_word_does_not_put_the_clock_back(void **state)
{
    (void)state;
    for (int slow = 0; slow < 3; slow++) {
        test t;
        uint64_t now_ns = 10 * PD_NS_PER_S, took_ns = 300 * PD_NS_PER_MS;
        begin(&t, AHEAD_NS + now_ns - (slow == 0 ? took_ns : 0), now_ns);
        now_ns += 100 * PD_NS_PER_MS;
        beat(&t, AHEAD_NS + now_ns - (slow == 1 ? took_ns : 0), now_ns);
        now_ns += 100 * PD_NS_PER_MS;
        beat(&t, AHEAD_NS + now_ns - (slow == 2 ? took_ns : 0), now_ns);
        now_ns += 500 * PD_NS_PER_MS;
        assert_parted_at(&t, now_ns, AHEAD_NS + now_ns);
    }
}

/* Of two clocks one runs a little faster: an hour later what they showed at first is worth nothing.
 */
static void a_clock_that_drifts_is_followed(void **state)
{
    (void)state;
    for (int faster = -1; faster <= 1; faster++) {
        test t;
        uint64_t now_ns = 10 * PD_NS_PER_S, clock_ns = AHEAD_NS;
        begin(&t, clock_ns, now_ns);
        for (uint32_t i = 0; i < 7200; i++) {
            now_ns += 500 * PD_NS_PER_MS;
            clock_ns += 500 * PD_NS_PER_MS + faster * 250000; /* 500 ppm: the most that NTP bends */
            beat(&t, clock_ns, now_ns);
        }
        assert_parted_at(&t, now_ns, clock_ns);
    }
}

/* It is repeated until a welcome is heard, and the later ones come faster. */
static void a_repeated_hello_tells_the_clock_too(void **state)
{
    (void)state;
    test t;
    uint64_t now_ns = 10 * PD_NS_PER_S;
    begin(&t, AHEAD_NS, now_ns);
    pd_msg_hello again = t.cluster->workers[t.slot].hello;
    uint32_t replaced;
    again.clock_ns = AHEAD_NS + now_ns;
    assert_int_equal(
        router_cluster_hello(t.cluster, "decode-0/7", &again, now_ns, &t.slot, &replaced), PD_OK);
    assert_parted_at(&t, now_ns + PD_NS_PER_S, AHEAD_NS + now_ns + PD_NS_PER_S);
}

/* Nothing can be said of a worker that does not tell its clock, nor of one that was never here. */
static void without_a_clock_nothing_is_late_and_nothing_proves_life(void **state)
{
    (void)state;
    test t;
    begin(&t, 0, 10 * PD_NS_PER_S);
    beat(&t, 0, 11 * PD_NS_PER_S);
    router_cluster_remove(t.cluster, t.slot, 12 * PD_NS_PER_S);
    for (uint64_t clock_ns = 0; clock_ns < 3; clock_ns++) {
        for (uint64_t of = INCARNATION; of < INCARNATION + 2; of++) {
            assert_false(router_cluster_outlived(t.cluster, of, clock_ns));
            assert_false(router_cluster_is_late(t.cluster, of, clock_ns));
        }
    }
    assert_true(router_cluster_gave_up(t.cluster, INCARNATION));
    router_cluster_destroy(t.cluster);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slow_word_does_not_put_the_clock_back),
        cmocka_unit_test(a_clock_that_drifts_is_followed),
        cmocka_unit_test(a_repeated_hello_tells_the_clock_too),
        cmocka_unit_test(without_a_clock_nothing_is_late_and_nothing_proves_life),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
