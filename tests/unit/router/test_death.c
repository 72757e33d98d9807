/* How a worker's end is seen: by proof at once, by a hint soon, by silence later; and what it means
 * that a worker begins anew. On a virtual clock. */

#include "tests/unit/router/fake.h"

#include "common/base/log.h"

#include <stdio.h>

typedef struct world {
    fake fake;
    uint32_t tokens, ends, errors;
} world;

static void on_token(void *ctx, router_handle request, uint32_t index, uint32_t token,
                     pd_finish finish)
{
    world *w = ctx;

    (void)request;
    (void)finish;
    assert_int_equal(index, w->tokens);
    assert_int_equal(token, fake_token(1, index));
    w->tokens++;
}

static void on_finish(void *ctx, router_handle request, const router_finish *finish)
{
    world *w = ctx;

    (void)request;
    (void)finish;
    w->ends++;
}

static void on_error(void *ctx, router_handle request, const router_error *error)
{
    world *w = ctx;

    (void)request;
    (void)error;
    w->errors++;
}

static void wait_ms(world *w, uint64_t ms)
{
    fake_run(&w->fake, w->fake.now_ns + ms * PD_NS_PER_MS);
}

/* One prefill and two decode workers, all ready. */
static world *world_new(void)
{
    world *w = calloc(1, sizeof *w);

    assert_non_null(w);
    const router_sink sink = {w, NULL, on_token, on_finish, on_error};
    fake_init(&w->fake, 7, &sink);
    fake_add(&w->fake, PD_ROLE_PREFILL, 100);
    fake_add(&w->fake, PD_ROLE_DECODE, 100);
    fake_add(&w->fake, PD_ROLE_DECODE, 100);
    wait_ms(w, 500);
    return w;
}

static void world_free(world *w)
{
    fake_fini(&w->fake);
    free(w);
}

static bool has(const world *w, uint32_t worker)
{
    return router_core_has_worker(w->fake.core, w->fake.workers[worker].incarnation);
}

static void ask(world *w, uint32_t max)
{
    static const uint32_t tokens[40] = {1};
    router_request_in in = {.id = "r", .tokens = tokens, .tokens_count = 40, .max_tokens = max};
    router_handle handle;
    router_error error;

    assert_int_equal(router_core_on_request(w->fake.core, &in, w->fake.now_ns, &handle, &error),
                     PD_OK);
}

static void a_proof_of_death_is_believed_at_once(void **state)
{
    (void)state;
    world *w = world_new();

    fake_kill(&w->fake, 1);
    router_core_on_worker_dead(w->fake.core, w->fake.workers[1].incarnation, w->fake.now_ns);
    assert_true(has(w, 1)); /* what it said last may wait in a socket */
    wait_ms(w, 11);
    assert_false(has(w, 1));
    assert_true(has(w, 0) && has(w, 2));
    router_core_on_worker_dead(w->fake.core, 0xdead, w->fake.now_ns); /* nobody's */
    wait_ms(w, 1000);
    assert_true(has(w, 0) && has(w, 2));
    assert_int_equal(router_core_counters_of(w->fake.core).workers_lost, 1);
    world_free(w);
}

static void a_cut_connection_shortens_the_patience_only(void **state)
{
    (void)state;
    world *w = world_new();
    uint64_t beat_ms = w->fake.config.heartbeat_ns / PD_NS_PER_MS;

    /* it lives: it connects again and goes on beating */
    router_core_on_worker_cut(w->fake.core, w->fake.workers[2].identity, w->fake.now_ns);
    wait_ms(w, 2000);
    assert_true(has(w, 2));
    /* dead on another host: silence would take 500 ms */
    fake_kill(&w->fake, 2);
    wait_ms(w, 5); /* its last words arrive */
    router_core_on_worker_cut(w->fake.core, w->fake.workers[2].identity, w->fake.now_ns);
    wait_ms(w, 2 * beat_ms - 10);
    assert_true(has(w, 2));
    wait_ms(w, 20);
    assert_false(has(w, 2));
    router_core_on_worker_cut(w->fake.core, "nobody/1", w->fake.now_ns);
    world_free(w);
}

/* Workers close their connections to a router that does not answer: that says nothing of them. */
static void a_connection_cut_while_the_router_stood_still_is_no_hint(void **state)
{
    (void)state;
    world *w = world_new();
    uint64_t beat_ms = w->fake.config.heartbeat_ns / PD_NS_PER_MS;

    router_core_on_worker_cut(w->fake.core, w->fake.workers[0].identity, w->fake.now_ns);
    w->fake.now_ns += 5000 * PD_NS_PER_MS;
    router_core_on_tick(w->fake.core, w->fake.now_ns);
    fake_kill(&w->fake, 2); /* it takes its time to come back: for ever */
    wait_ms(w, 5);
    router_core_on_worker_cut(w->fake.core, w->fake.workers[2].identity, w->fake.now_ns);
    wait_ms(w, 2 * beat_ms + 20);
    assert_true(has(w, 0) && has(w, 2));
    wait_ms(w, 700); /* silence still counts */
    assert_true(has(w, 0));
    assert_false(has(w, 2));
    world_free(w);
}

static void silence_alone_takes_its_time(void **state)
{
    (void)state;
    world *w = world_new();

    fake_kill(&w->fake, 2);
    wait_ms(w, 300);
    assert_true(has(w, 2));
    wait_ms(w, 400);
    assert_false(has(w, 2));
    world_free(w);
}

/* The router stood still so long that its workers dropped what it had with them. */
static void what_a_worker_dropped_is_tried_again_when_it_begins_anew(void **state)
{
    (void)state;
    world *w = world_new();
    pd_message hello = {.kind = PD_MSG_HELLO};
    fake_worker *prefill = &w->fake.workers[0];

    prefill->deaf = true; /* as if it had dropped it: never an answer */
    ask(w, 4);
    wait_ms(w, 100);
    fake_add(&w->fake, PD_ROLE_PREFILL, 100); /* for who is not asked twice */
    wait_ms(w, 300);
    assert_int_equal(w->tokens, 0);
    prefill->deaf = false;
    uint64_t retried = router_core_counters_of(w->fake.core).retried;
    fake_hello(&w->fake, prefill, &hello.hello);
    router_core_on_message(w->fake.core, prefill->identity, &hello, w->fake.now_ns);
    assert_int_equal(router_core_counters_of(w->fake.core).retried, retried); /* the same session */
    hello.hello.session = 1;
    router_core_on_message(w->fake.core, prefill->identity, &hello, w->fake.now_ns);
    assert_true(has(w, 0));
    wait_ms(w, 400); /* far sooner than the deadline of a prefill */
    assert_int_equal(w->tokens, 4);
    assert_int_equal(w->ends, 1);
    assert_int_equal(w->errors, 0);
    router_core_on_message(w->fake.core, prefill->identity, &hello, w->fake.now_ns);
    wait_ms(w, 2000);
    assert_int_equal(router_core_counters_of(w->fake.core).active, 0);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_proof_of_death_is_believed_at_once),
        cmocka_unit_test(a_cut_connection_shortens_the_patience_only),
        cmocka_unit_test(a_connection_cut_while_the_router_stood_still_is_no_hint),
        cmocka_unit_test(silence_alone_takes_its_time),
        cmocka_unit_test(what_a_worker_dropped_is_tried_again_when_it_begins_anew),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
