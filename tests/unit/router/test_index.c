/* The prefix index: longest prefixes, gaps, snapshots, bounds. */

#include "router/index.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static pd_hash128 block(uint32_t chain, uint32_t i)
{
    return (pd_hash128){pd_mix64(chain * 7919ull + i + 1), chain + 1};
}

static void apply(router_index *index, uint64_t incarnation, uint64_t first, pd_kv_event_kind kind,
                  uint32_t chain, uint32_t from, uint32_t count)
{
    pd_kv_event events[512];
    for (uint32_t i = 0; i < count; i++)
        events[i] = (pd_kv_event){kind, block(chain, from + i)};
    pd_msg_kv_events message = {.incarnation = incarnation,
                                .first_sequence = first,
                                .events = events,
                                .events_count = count};
    router_index_apply(index, 0, &message);
}

static void snapshot(router_index *index, uint64_t last, uint32_t chain, uint32_t count)
{
    pd_kv_event events[512];
    for (uint32_t i = 0; i < count; i++)
        events[i] = (pd_kv_event){PD_KV_STORED, block(chain, i)};
    pd_msg_kv_events message = {.incarnation = 9,
                                .first_sequence = last,
                                .events = events,
                                .events_count = count,
                                .snapshot_first = true,
                                .snapshot = true,
                                .snapshot_last = true};
    router_index_apply(index, 0, &message);
}

static router_index *opened(uint32_t blocks_max)
{
    router_index *index;
    assert_int_equal(router_index_create(2, &index), PD_OK);
    router_index_open(index, 0, 9, blocks_max);
    assert_true(router_index_wants_snapshot(index, 0, 100, 1000));
    assert_false(router_index_wants_snapshot(index, 0, 500, 1000)); /* asked already */
    snapshot(index, 10, 0, 0);
    assert_true(router_index_synced(index, 0));
    return index;
}

static uint32_t prefix(const router_index *index, uint32_t chain, uint32_t count)
{
    pd_hash128 hashes[512];
    for (uint32_t i = 0; i < count; i++)
        hashes[i] = block(chain, i);
    return router_index_prefix(index, 0, hashes, count);
}

static void the_longest_prefix_is_found_for_every_length(void **state)
{
    (void)state;
    for (uint32_t held = 0; held < 70; held++) {
        router_index *index = opened(1000);
        apply(index, 9, 11, PD_KV_STORED, 3, 0, held);
        for (uint32_t count = 0; count < 80; count++)
            assert_int_equal(prefix(index, 3, count), held < count ? held : count);
        assert_int_equal(prefix(index, 4, 10), 0);
        router_index_destroy(index);
    }
}

static void a_gap_forgets_and_asks_for_a_snapshot(void **state)
{
    (void)state;
    router_index *index = opened(1000);
    apply(index, 9, 11, PD_KV_STORED, 1, 0, 20);
    assert_int_equal(prefix(index, 1, 30), 20);
    apply(index, 9, 32, PD_KV_STORED, 1, 20, 5); /* event 31 is missing */
    assert_false(router_index_synced(index, 0));
    assert_int_equal(prefix(index, 1, 30), 0);
    assert_int_equal(router_index_counters_of(index).gaps, 1);
    assert_true(router_index_wants_snapshot(index, 0, 5000, 1000));
    apply(index, 9, 37, PD_KV_STORED, 1, 25, 1); /* covered by the snapshot that comes */
    snapshot(index, 37, 1, 26);
    assert_int_equal(prefix(index, 1, 30), 26);
    apply(index, 9, 38, PD_KV_STORED, 1, 26, 2);
    assert_int_equal(prefix(index, 1, 30), 28);
    router_index_destroy(index);
}

static void events_that_never_come_are_noticed_by_the_heartbeat(void **state)
{
    (void)state;
    router_index *index = opened(1000);
    router_index_check(index, 0, 10);
    router_index_check(index, 0, 11); /* may still be on their way */
    assert_true(router_index_synced(index, 0));
    apply(index, 9, 11, PD_KV_STORED, 1, 0, 1);
    router_index_check(index, 0, 12);
    assert_true(router_index_synced(index, 0));
    router_index_check(index, 0, 12);
    assert_false(router_index_synced(index, 0));
    router_index_destroy(index);
}

static void duplicates_and_other_incarnations_change_nothing(void **state)
{
    (void)state;
    router_index *index = opened(1000);
    apply(index, 9, 11, PD_KV_STORED, 1, 0, 5);
    apply(index, 9, 16, PD_KV_REMOVED, 1, 4, 1);
    apply(index, 9, 11, PD_KV_STORED, 1, 0, 5); /* again: block 4 stays removed */
    assert_int_equal(prefix(index, 1, 5), 4);
    apply(index, 8, 17, PD_KV_CLEARED, 1, 0, 1);
    assert_int_equal(prefix(index, 1, 5), 4);
    apply(index, 9, 17, PD_KV_CLEARED, 1, 0, 1);
    assert_int_equal(prefix(index, 1, 5), 0);
    router_index_destroy(index);
}

static void memory_is_bounded_by_what_the_worker_declared(void **state)
{
    (void)state;
    router_index *index = opened(100);
    for (uint32_t chain = 1; chain < 50; chain++)
        apply(index, 9, 11 + (chain - 1) * 100, PD_KV_STORED, chain, 0, 100);
    assert_int_equal(router_index_blocks(index, 0), 100);
    assert_int_equal(router_index_counters_of(index).dropped, 48 * 100);
    router_index_destroy(index);
}

/* Random stores and removals against a plain array. */
static void it_equals_a_plain_set(void **state)
{
    (void)state;
    enum { N = 400 };
    uint64_t random = 5;
    bool held[N] = {0};
    uint32_t count = 0;
    router_index *index = opened(N);
    for (uint64_t step = 0; step < 20000; step++) {
        uint32_t i = (uint32_t)(pd_random_next(&random) % N);
        bool store = pd_random_next(&random) % 2 == 0;
        apply(index, 9, 11 + step, store ? PD_KV_STORED : PD_KV_REMOVED, 2, i, 1);
        count += (uint32_t)(store && !held[i]);
        count -= (uint32_t)(!store && held[i]);
        held[i] = store;
        assert_int_equal(router_index_blocks(index, 0), count);
        uint32_t probe = (uint32_t)(pd_random_next(&random) % N);
        pd_hash128 hash = block(2, probe);
        assert_int_equal(router_index_prefix(index, 0, &hash, 1), held[probe]);
    }
    router_index_destroy(index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_longest_prefix_is_found_for_every_length),
        cmocka_unit_test(a_gap_forgets_and_asks_for_a_snapshot),
        cmocka_unit_test(events_that_never_come_are_noticed_by_the_heartbeat),
        cmocka_unit_test(duplicates_and_other_incarnations_change_nothing),
        cmocka_unit_test(memory_is_bounded_by_what_the_worker_declared),
        cmocka_unit_test(it_equals_a_plain_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
