/* Which pair of workers the policy picks, and why. */

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "router/policy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

enum { P0 = 0, P1 = 1, D0 = 2, D1 = 3, WORKERS = 4 };

typedef struct setup {
    router_core_config config;
    router_cluster *cluster;
    router_index *index;
    pd_cost cost;
    uint64_t none[ROUTER_WORKERS_MAX / 64];
    pd_hash128 hashes[64];
    router_policy_state state;
    router_policy_input input;
} setup;

static bool no_send(void *ctx, const char *to, const pd_message *message)
{
    (void)ctx;
    (void)to;
    (void)message;
    return true;
}

static void init(setup *s, pd_router_policy policy)
{
    static const router_sink sink = {.send = no_send};
    *s = (setup){.config = {.block_tokens = 16, .block_bytes = 1 << 20, .heartbeat_ns = 1}};
    pd_cost_init(&s->cost);
    assert_int_equal(router_cluster_create(&s->config, 1, &sink, 0, &s->cluster), PD_OK);
    assert_int_equal(router_index_create(ROUTER_WORKERS_MAX, &s->index), PD_OK);
    for (uint32_t i = 0; i < WORKERS; i++) {
        router_worker *worker = &s->cluster->workers[i];
        worker->used = true;
        worker->hello.role = i < D0 ? PD_ROLE_PREFILL : PD_ROLE_DECODE;
        worker->hello.incarnation = i + 1;
        worker->hello.max_batch = 8;
        worker->hello.queue_max = 10;
        worker->report_ns = 1;
        worker->report.warm = true;
        worker->report.ledger = (pd_ledger){.total = 1000, .free = 1000};
        router_index_open(s->index, i, i + 1, 1000);
    }
    for (uint32_t p = P0; p <= P1; p++) {
        s->cluster->workers[p].links = pd_calloc(ROUTER_WORKERS_MAX, sizeof(router_link));
        for (uint32_t d = D0; d <= D1; d++)
            s->cluster->workers[p].links[d] = (router_link){.up = true, .peer_incarnation = d + 1};
    }
    s->cluster->slots_used = s->cluster->count = WORKERS;
    for (uint32_t i = 0; i < 64; i++)
        s->hashes[i] = (pd_hash128){i + 1, 1};
    s->state = (router_policy_state){.policy = policy, .random = 42};
    s->input = (router_policy_input){.cluster = s->cluster,
                                     .index = s->index,
                                     .cost = &s->cost,
                                     .hashes = s->hashes,
                                     .hashes_count = 64,
                                     .prompt_tokens = 1030,
                                     .max_tokens = 10,
                                     .need_decode = true,
                                     .avoid_prefill = ROUTER_NO_WORKER,
                                     .avoid_decode = ROUTER_NO_WORKER,
                                     .too_small = s->none,
                                     .now_ns = 1};
}

static void fini(setup *s)
{
    router_index_destroy(s->index);
    router_cluster_destroy(s->cluster);
}

static void hold(setup *s, uint32_t slot, uint32_t blocks)
{
    pd_kv_event events[64];
    for (uint32_t i = 0; i < blocks; i++)
        events[i] = (pd_kv_event){PD_KV_STORED, s->hashes[i]};
    pd_msg_kv_events message = {.incarnation = slot + 1,
                                .events = events,
                                .events_count = blocks,
                                .snapshot_first = true,
                                .snapshot = true,
                                .snapshot_last = true};
    router_index_apply(s->index, slot, &message);
}

static router_choice choose(setup *s)
{
    router_choice choice = {0};
    assert_true(router_policy_choose(&s->state, &s->input, &choice));
    return choice;
}

static void a_cached_prefix_draws_the_request(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    hold(&s, P1, 60);
    hold(&s, D0, 60);
    for (int i = 0; i < 10; i++) {
        router_choice choice = choose(&s);
        assert_int_equal(choice.prefill, P1);
        assert_int_equal(choice.terms.prefill_cached_blocks, 60);
    }
    fini(&s);
}

static void a_long_queue_outweighs_a_cached_prefix(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    hold(&s, P1, 60);
    double saved = pd_cost_prefill_ms(&s.cost, 1030, 0) - pd_cost_prefill_ms(&s.cost, 70, 960);
    s.cluster->workers[P1].report.queue_ms = (float)(saved * 0.5);
    assert_int_equal(choose(&s).prefill, P1);
    s.cluster->workers[P1].report.queue_ms = (float)(saved * 1.5);
    assert_int_equal(choose(&s).prefill, P0);
    fini(&s);
}

static void what_was_just_sent_is_charged_at_once(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    uint32_t got[2] = {0, 0};
    for (int i = 0; i < 16; i++) { /* a burst between two reports */
        router_choice choice = choose(&s);
        router_worker *worker = &s.cluster->workers[choice.prefill];
        worker->sent_ms += choice.terms.prefill_ms;
        worker->inflight_prefill_ms += choice.terms.prefill_ms;
        got[choice.prefill]++;
    }
    assert_int_equal(got[0], 8);
    assert_int_equal(got[1], 8);
    fini(&s);
}

static void idle_workers_share_at_random(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    uint32_t got[WORKERS] = {0};
    for (int i = 0; i < 400; i++) {
        router_choice choice = choose(&s);
        assert_int_equal(choice.candidates, 4);
        got[choice.prefill]++;
        got[choice.decode]++;
    }
    for (uint32_t i = 0; i < WORKERS; i++)
        assert_in_range(got[i], 150, 250);
    fini(&s);
}

static void a_full_or_roomless_decode_worker_costs_more(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    s.cluster->workers[D0].report.ledger.free = 10;
    for (int i = 0; i < 10; i++)
        assert_int_equal(choose(&s).decode, D1);
    s.cluster->workers[D0].report.ledger.free = 1000;
    s.cluster->workers[D1].report.running = 8; /* its batch */
    for (int i = 0; i < 10; i++)
        assert_int_equal(choose(&s).decode, D0);
    fini(&s);
}

static void only_linked_ready_workers_are_candidates(void **state)
{
    (void)state;
    router_choice choice;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    s.cluster->workers[P0].links[D0].up = false;
    s.cluster->workers[P0].links[D1].up = false;
    s.cluster->workers[D1].report.draining = true;
    for (int i = 0; i < 10; i++) {
        choice = choose(&s);
        assert_int_equal(choice.prefill, P1);
        assert_int_equal(choice.decode, D0);
        assert_int_equal(choice.candidates, 1);
    }
    s.input.avoid_prefill = P1;
    assert_false(router_policy_choose(&s.state, &s.input, &choice));
    s.input.need_decode = false; /* one token needs no link */
    assert_true(router_policy_choose(&s.state, &s.input, &choice));
    assert_int_equal(choice.prefill, P0);
    assert_int_equal(choice.decode, ROUTER_NO_WORKER);
    fini(&s);
}

static void round_robin_takes_turns_and_random_takes_all(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_ROUND_ROBIN);
    hold(&s, P1, 60); /* is not looked at */
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(choose(&s).prefill, i % 2);
    s.state.policy = PD_POLICY_RANDOM;
    uint32_t got[WORKERS] = {0};
    for (int i = 0; i < 400; i++)
        got[choose(&s).prefill]++;
    assert_in_range(got[0], 150, 250);
    s.state.policy = PD_POLICY_LEAST_LOADED;
    s.cluster->workers[P1].report.queue_ms = 5;
    for (int i = 0; i < 10; i++)
        assert_int_equal(choose(&s).prefill, P0);
    fini(&s);
}

static void the_terms_add_up(void **state)
{
    (void)state;
    setup s;
    init(&s, PD_POLICY_KV_AWARE);
    s.cluster->workers[P0].report.queue_ms = 3;
    s.cluster->workers[P1].report.queue_ms = 3;
    router_terms t = choose(&s).terms;
    double sum = t.prefill_queue_ms + t.prefill_ms + t.ship_ms + t.decode_queue_ms + t.step_ms;
    assert_true(sum - t.total_ms < 1e-9 && t.total_ms - sum < 1e-9);
    assert_true(t.prefill_queue_ms == 3 && t.prefill_ms > 0 && t.step_ms > 0 && t.ship_ms > 0);
    fini(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cached_prefix_draws_the_request),
        cmocka_unit_test(a_long_queue_outweighs_a_cached_prefix),
        cmocka_unit_test(what_was_just_sent_is_charged_at_once),
        cmocka_unit_test(idle_workers_share_at_random),
        cmocka_unit_test(a_full_or_roomless_decode_worker_costs_more),
        cmocka_unit_test(only_linked_ready_workers_are_candidates),
        cmocka_unit_test(round_robin_takes_turns_and_random_takes_all),
        cmocka_unit_test(the_terms_add_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
