#include "common/kv/lease.h"
#include "common/kv/prefix_hash.h"
#include "tests/unit/kv/cmocka_all.h"

#include "common/base/mem.h"

enum { BLOCKS = 16, LEASES = 4, BLOCKS_MAX = 12 };

typedef struct world {
    pd_kv_pool *pool;
    pd_prefix_cache *cache;
    pd_lease_table *table;
} world;

static world make(void)
{
    world w;
    assert_int_equal(pd_kv_pool_create(BLOCKS, &w.pool), PD_OK);
    assert_int_equal(pd_prefix_cache_create(w.pool, 64, &w.cache), PD_OK);
    assert_int_equal(pd_lease_table_create(w.cache, LEASES, BLOCKS_MAX, &w.table), PD_OK);
    return w;
}

static void unmake(world *w)
{
    assert_int_equal(pd_prefix_cache_check(w->cache), PD_OK);
    pd_lease_table_destroy(w->table);
    pd_prefix_cache_destroy(w->cache);
    pd_kv_pool_destroy(w->pool);
}

static pd_lease *grant(world *w, uint64_t request, uint64_t prefill, uint32_t blocks)
{
    pd_lease *lease = NULL;
    pd_lease_grant_args args = {.request = request,
                                .epoch = 1,
                                .owner = 9,
                                .prefill = prefill,
                                .blocks = blocks,
                                .expiry_ns = 100 * request};
    assert_int_equal(pd_lease_grant(w->table, &args, &lease), PD_OK);
    return lease;
}

static pd_status try_grant(world *w, uint64_t request, uint32_t epoch, uint32_t blocks)
{
    pd_lease *lease;
    pd_lease_grant_args args = {.request = request, .epoch = epoch, .blocks = blocks};
    return pd_lease_grant(w->table, &args, &lease);
}

static uint32_t count(const world *w)
{
    uint32_t cursor = 0, leases = 0;

    while (pd_lease_next(w->table, &cursor) != NULL)
        leases++;
    return leases;
}

/* Ends the quarantines that wait for that sender; returns how many. */
static uint32_t sender_ends(world *w, uint64_t prefill)
{
    uint32_t cursor = 0, ended = 0;

    for (pd_lease *lease; (lease = pd_lease_next(w->table, &cursor)) != NULL;) {
        if (lease->prefill == prefill)
            ended += pd_lease_sender_acked(w->table, lease->request, lease->epoch);
    }
    return ended;
}

static void create_survives_every_failed_allocation(void **state)
{
    (void)state;
    pd_kv_pool *pool;
    pd_prefix_cache *cache;
    pd_lease_table *table = NULL;
    assert_int_equal(pd_kv_pool_create(4, &pool), PD_OK);
    assert_int_equal(pd_prefix_cache_create(pool, 8, &cache), PD_OK);
    for (long n = 0; table == NULL; n++) {
        assert_true(n < 100);
        pd_mem_fail_at(n);
        pd_status status = pd_lease_table_create(cache, 3, 4, &table);
        pd_mem_fail_at(-1);
        assert_int_equal(status, table == NULL ? PD_E_NOMEM : PD_OK);
    }
    pd_lease_table_destroy(table);
    pd_prefix_cache_destroy(cache);
    pd_kv_pool_destroy(pool);
    assert_int_equal(pd_mem_live(), 0);
}

static void more_than_there_is_room_for_is_never_promised(void **state)
{
    (void)state;
    world w = make();
    pd_lease *a = grant(&w, 1, 5, 10);
    assert_int_equal(pd_lease_room(w.table), 6);
    assert_int_equal(try_grant(&w, 2, 1, 7), PD_E_OVERLOAD);
    assert_int_equal(try_grant(&w, 2, 1, 13), PD_E_TOO_LARGE);
    assert_int_equal(try_grant(&w, 2, 1, 0), PD_E_INVALID);
    assert_int_equal(try_grant(&w, 1, 1, 1), PD_E_INVALID); /* there is one of that name */
    assert_int_equal(try_grant(&w, 1, 2, 1), PD_OK);        /* another epoch is another lease */
    assert_int_equal(pd_lease_bind(w.table, a, NULL, 0), PD_OK);
    assert_int_equal(pd_lease_room(w.table), 5);
    assert_int_equal(try_grant(&w, 3, 1, 1), PD_OK);
    assert_int_equal(try_grant(&w, 4, 1, 1), PD_OK);
    assert_int_equal(try_grant(&w, 5, 1, 1), PD_E_OVERLOAD); /* four leases at most */
    assert_false(pd_lease_release(w.table, pd_lease_find(w.table, 4, 1)));
    assert_null(pd_lease_find(w.table, 4, 1));
    assert_int_equal(try_grant(&w, 5, 1, 1), PD_OK);
    unmake(&w);
}

static void a_lease_lands_runs_grows_and_leaves_its_prefix_cached(void **state)
{
    (void)state;
    world w = make();
    uint32_t tokens[5 * 16];
    for (uint32_t i = 0; i < 5 * 16; i++)
        tokens[i] = i;
    pd_hash128 hashes[5];
    pd_hash128 root = pd_prefix_hash_root((pd_hash128){1, 1}, 16, NULL, 0);
    pd_prefix_hash_fill(root, 16, tokens, 5 * 16, hashes, 5);

    pd_lease *a = grant(&w, 1, 5, 4);
    assert_int_equal(pd_lease_bind(w.table, a, hashes, 3), PD_OK);
    assert_int_equal(a->state, PD_LEASE_LANDING);
    assert_int_equal(a->held, 0);
    assert_int_equal(pd_kv_pool_ledger(w.pool).leased, 4);
    pd_lease_landed(w.table, a);
    pd_prefix_cache_insert(w.cache, root, hashes, a->blocks, 3, UINT32_MAX);
    pd_lease_run(w.table, a);
    assert_int_equal(pd_kv_pool_ledger(w.pool).running, 4);
    assert_int_equal(pd_lease_grow(w.table, a, 1), PD_OK);
    assert_int_equal(a->blocks_count, 5);
    assert_int_equal(pd_lease_grow(w.table, a, 8), PD_E_TOO_LARGE);
    pd_prefix_cache_insert(w.cache, root, hashes, a->blocks, 5, UINT32_MAX);

    /* a second one with the same prefix, while the first runs: held, and counted once */
    pd_lease *b = grant(&w, 2, 0, 6);
    assert_int_equal(pd_lease_bind(w.table, b, hashes, 4), PD_OK);
    assert_int_equal(b->state, PD_LEASE_LANDED); /* nobody was to send */
    assert_int_equal(b->held, 4);
    assert_memory_equal(b->blocks, a->blocks, 4 * sizeof *a->blocks);
    assert_int_equal(pd_kv_pool_ledger(w.pool).running, 5);
    assert_int_equal(pd_kv_pool_ledger(w.pool).leased, 2);
    assert_false(pd_lease_release(w.table, a));
    assert_false(pd_lease_release(w.table, b));
    pd_kv_ledger ledger = pd_kv_pool_ledger(w.pool);
    assert_int_equal(ledger.cached, 5);
    assert_int_equal(ledger.free, BLOCKS - 5);
    assert_int_equal(count(&w), 0);
    unmake(&w);
}

static void blocks_a_sender_may_still_write_come_back_only_when_it_cannot(void **state)
{
    (void)state;
    world w = make();
    uint32_t tokens[16] = {1};
    pd_hash128 hash;
    pd_hash128 root = pd_prefix_hash_root((pd_hash128){1, 1}, 16, NULL, 0);
    pd_prefix_hash_fill(root, 16, tokens, 16, &hash, 1);
    pd_lease *first = grant(&w, 1, 0, 1);
    assert_int_equal(pd_lease_bind(w.table, first, &hash, 1), PD_OK);
    pd_prefix_cache_insert(w.cache, root, &hash, first->blocks, 1, UINT32_MAX);
    assert_false(pd_lease_release(w.table, first));

    pd_lease *a = grant(&w, 2, 5, 4), *b = grant(&w, 3, 5, 2), *c = grant(&w, 4, 6, 2);
    assert_int_equal(pd_lease_bind(w.table, a, &hash, 1), PD_OK);
    assert_int_equal(pd_lease_bind(w.table, b, NULL, 0), PD_OK);
    assert_int_equal(pd_lease_bind(w.table, c, NULL, 0), PD_OK);
    assert_int_equal(a->held, 1);
    assert_true(pd_lease_release(w.table, a));
    assert_true(pd_lease_release(w.table, b));
    assert_true(pd_lease_release(w.table, c));
    assert_true(pd_lease_release(w.table, c)); /* again changes nothing */
    pd_kv_ledger ledger = pd_kv_pool_ledger(w.pool);
    assert_int_equal(ledger.quarantined, 3 + 2 + 2);
    assert_int_equal(ledger.cached, 1); /* the held one is nobody's to write */

    assert_false(pd_lease_sender_acked(w.table, 77, 1));
    assert_false(pd_lease_sender_acked(w.table, 2, 2));
    assert_true(pd_lease_sender_acked(w.table, 2, 1));
    assert_false(pd_lease_sender_acked(w.table, 2, 1));
    assert_int_equal(pd_kv_pool_ledger(w.pool).quarantined, 4);
    assert_int_equal(sender_ends(&w, 5), 1);
    assert_int_equal(pd_kv_pool_ledger(w.pool).quarantined, 2);
    assert_int_equal(sender_ends(&w, 6), 1);
    assert_int_equal(pd_kv_pool_ledger(w.pool).quarantined, 0);
    assert_int_equal(count(&w), 0);
    unmake(&w);
}

static void a_lease_is_renewed_forwards_only(void **state)
{
    (void)state;
    world w = make();
    pd_lease *a = grant(&w, 1, 5, 2); /* until 100 */
    pd_lease_renew(a, 50);
    assert_int_equal(a->expiry_ns, 100);
    pd_lease_renew(a, 150);
    assert_int_equal(a->expiry_ns, 150);
    assert_false(pd_lease_release(w.table, a));
    assert_int_equal(pd_lease_room(w.table), BLOCKS);
    unmake(&w);
}

/* However much the others grow: a bind finds what was promised. */
static void growth_leaves_promised_room_alone(void **state)
{
    (void)state;
    world w = make();
    pd_lease *a = grant(&w, 1, 0, 1);
    assert_int_equal(pd_lease_bind(w.table, a, NULL, 0), PD_OK);
    pd_lease_run(w.table, a);
    uint32_t more = pd_lease_room(w.table) - 2;
    pd_lease *b = grant(&w, 2, 5, more < 6 ? more : 6);
    while (pd_lease_grow(w.table, a, 1) == PD_OK) {
    }
    assert_int_equal(pd_lease_bind(w.table, b, NULL, 0), PD_OK);
    unmake(&w);
}

/* Any order of events: the ledger adds up each step, and all blocks come back at the end. */
static void nothing_leaks_whatever_happens(void **state)
{
    (void)state;
    world w = make();
    uint64_t random = 11;
    uint64_t request = 1;
    for (int step = 0; step < 20000; step++) {
        uint32_t cursor = (uint32_t)(pd_random_next(&random) % LEASES);
        pd_lease *lease = pd_lease_next(w.table, &cursor);
        uint64_t what = pd_random_next(&random) % 6;
        uint64_t prefill = pd_random_next(&random) % 3;
        if (lease == NULL || what == 0) {
            pd_lease_grant_args args = {.request = request++,
                                        .prefill = prefill,
                                        .blocks = 1 + (uint32_t)(pd_random_next(&random) % 8)};
            pd_status status = pd_lease_grant(w.table, &args, &lease);
            assert_true(status == PD_OK || status == PD_E_OVERLOAD);
        } else if (what == 1) {
            pd_lease_release(w.table, lease);
        } else if (what == 2) {
            sender_ends(&w, prefill);
        } else if (lease->state == PD_LEASE_GRANTED) {
            assert_int_equal(pd_lease_bind(w.table, lease, NULL, 0), PD_OK);
        } else if (lease->state == PD_LEASE_LANDING) {
            pd_lease_landed(w.table, lease);
        } else if (lease->state == PD_LEASE_LANDED) {
            pd_lease_run(w.table, lease);
        } else if (lease->state == PD_LEASE_RUNNING) {
            pd_status status = pd_lease_grow(w.table, lease, 1);
            assert_true(status == PD_OK || status == PD_E_OVERLOAD || status == PD_E_TOO_LARGE);
        } else {
            pd_lease_sender_acked(w.table, lease->request, lease->epoch);
        }
        assert_int_equal(pd_prefix_cache_check(w.cache), PD_OK);
    }
    uint32_t cursor = 0;
    for (pd_lease *lease; (lease = pd_lease_next(w.table, &cursor)) != NULL;)
        pd_lease_release(w.table, lease);
    for (uint64_t prefill = 0; prefill < 3; prefill++)
        sender_ends(&w, prefill);
    assert_int_equal(pd_kv_pool_ledger(w.pool).free, BLOCKS);
    assert_int_equal(pd_lease_room(w.table), BLOCKS);
    unmake(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_survives_every_failed_allocation),
        cmocka_unit_test(more_than_there_is_room_for_is_never_promised),
        cmocka_unit_test(a_lease_lands_runs_grows_and_leaves_its_prefix_cached),
        cmocka_unit_test(blocks_a_sender_may_still_write_come_back_only_when_it_cannot),
        cmocka_unit_test(a_lease_is_renewed_forwards_only),
        cmocka_unit_test(growth_leaves_promised_room_alone),
        cmocka_unit_test(nothing_leaks_whatever_happens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
