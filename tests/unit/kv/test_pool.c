#include "common/kv/pool.h"
#include "tests/unit/kv/cmocka_all.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

static pd_kv_pool *make(uint32_t blocks)
{
    pd_kv_pool *pool = NULL;
    assert_int_equal(pd_kv_pool_create(blocks, &pool), PD_OK);
    return pool;
}

static void create_survives_every_failed_allocation(void **state)
{
    (void)state;
    pd_kv_pool *pool = NULL;
    long live = pd_mem_live();
    for (long n = 0; pool == NULL; n++) {
        assert_true(n < 100);
        assert_int_equal(pd_mem_live(), live);
        pd_mem_fail_at(n);
        pd_status status = pd_kv_pool_create(4, &pool);
        pd_mem_fail_at(-1);
        assert_int_equal(status, pool == NULL ? PD_E_NOMEM : PD_OK);
    }
    pd_kv_pool_destroy(pool);
    assert_int_equal(pd_mem_live(), live);
    assert_int_equal(pd_kv_pool_create(0, &pool), PD_E_INVALID);
}

static void a_shared_block_counts_once_by_its_strongest_claim(void **state)
{
    (void)state;
    pd_kv_pool *pool = make(3);
    pd_block b;
    assert_int_equal(pd_kv_pool_take(pool, 1, PD_CLAIM_LEASED, PD_BLOCK_NONE, &b), PD_OK);
    assert_int_equal(pd_kv_pool_state(pool, b), PD_BLOCK_LEASED);
    pd_kv_pool_claim(pool, b, PD_CLAIM_RUNNING);
    pd_kv_pool_claim(pool, b, PD_CLAIM_RUNNING);
    pd_kv_pool_claim(pool, b, PD_CLAIM_LEASED);
    pd_kv_ledger ledger = pd_kv_pool_ledger(pool);
    assert_int_equal(ledger.running, 1);
    assert_int_equal(ledger.leased, 0);
    assert_int_equal(ledger.free, 2);
    assert_int_equal(pd_kv_pool_claims(pool, b), 4);
    pd_kv_pool_claim(pool, b, PD_CLAIM_QUARANTINED);
    assert_int_equal(pd_kv_pool_state(pool, b), PD_BLOCK_QUARANTINED);
    pd_kv_pool_unclaim(pool, b, PD_CLAIM_QUARANTINED);
    pd_kv_pool_unclaim(pool, b, PD_CLAIM_RUNNING);
    pd_kv_pool_unclaim(pool, b, PD_CLAIM_RUNNING);
    assert_int_equal(pd_kv_pool_state(pool, b), PD_BLOCK_LEASED);
    pd_kv_pool_set_cached(pool, b, true);
    pd_kv_pool_unclaim(pool, b, PD_CLAIM_LEASED);
    pd_kv_pool_unclaim(pool, b, PD_CLAIM_LEASED);
    assert_int_equal(pd_kv_pool_state(pool, b), PD_BLOCK_CACHED);
    pd_kv_pool_set_cached(pool, b, false);
    assert_int_equal(pd_kv_pool_state(pool, b), PD_BLOCK_FREE);
    assert_int_equal(pd_kv_pool_check(pool), PD_OK);
    pd_kv_pool_destroy(pool);
}

static void blocks_come_in_runs_where_there_are_runs(void **state)
{
    (void)state;
    pd_kv_pool *pool = make(200);
    pd_block all[200], got[64];
    assert_int_equal(pd_kv_pool_take(pool, 200, PD_CLAIM_RUNNING, PD_BLOCK_NONE, all), PD_OK);
    assert_int_equal(pd_kv_pool_take(pool, 1, PD_CLAIM_RUNNING, PD_BLOCK_NONE, got), PD_E_OVERLOAD);
    /* free: single blocks at 0, 2, 4 .. 20, a run of 10 at 60, one of 30 at 120 */
    for (pd_block b = 0; b <= 20; b += 2)
        pd_kv_pool_unclaim(pool, b, PD_CLAIM_RUNNING);
    for (pd_block b = 60; b < 70; b++)
        pd_kv_pool_unclaim(pool, b, PD_CLAIM_RUNNING);
    for (pd_block b = 120; b < 150; b++)
        pd_kv_pool_unclaim(pool, b, PD_CLAIM_RUNNING);
    assert_int_equal(pd_kv_pool_take(pool, 8, PD_CLAIM_LEASED, PD_BLOCK_NONE, got), PD_OK);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(got[i], 60 + i);
    /* after the block before, where that is free */
    assert_int_equal(pd_kv_pool_take(pool, 1, PD_CLAIM_LEASED, 67, got), PD_OK);
    assert_int_equal(got[0], 68);
    /* the rest is 30 + 1 + 11: 33 do not fit a run, so the long one goes first */
    assert_int_equal(pd_kv_pool_take(pool, 33, PD_CLAIM_LEASED, PD_BLOCK_NONE, got), PD_OK);
    for (uint32_t i = 0; i < 30; i++)
        assert_int_equal(got[i], 120 + i);
    assert_int_equal(pd_kv_pool_check(pool), PD_OK);
    pd_kv_pool_destroy(pool);
}

static void the_ledger_adds_up_after_any_history(void **state)
{
    (void)state;
    enum { BLOCKS = 130 };
    pd_kv_pool *pool = make(BLOCKS);
    uint32_t claims[BLOCKS][PD_CLAIMS] = {{0}};
    uint64_t random = 7;
    for (int step = 0; step < 20000; step++) {
        pd_block b = (pd_block)(pd_random_next(&random) % BLOCKS);
        pd_claim claim = (pd_claim)(pd_random_next(&random) % PD_CLAIMS);
        if (claims[b][claim] > 0 && pd_random_next(&random) % 2 == 0) {
            pd_kv_pool_unclaim(pool, b, claim);
            claims[b][claim]--;
        } else if (pd_kv_pool_state(pool, b) != PD_BLOCK_FREE) {
            pd_kv_pool_claim(pool, b, claim);
            claims[b][claim]++;
        } else {
            pd_block got[7];
            uint32_t count = 1 + (uint32_t)(pd_random_next(&random) % 7);
            pd_status status = pd_kv_pool_take(pool, count, claim, b, got);
            assert_true(status == PD_OK || pd_kv_pool_ledger(pool).free < count);
            for (uint32_t i = 0; status == PD_OK && i < count; i++) {
                for (int c = 0; c < PD_CLAIMS; c++)
                    assert_int_equal(claims[got[i]][c], 0);
                claims[got[i]][claim] = 1;
            }
        }
        pd_kv_ledger l = pd_kv_pool_ledger(pool);
        assert_int_equal(l.total, l.free + l.cached + l.leased + l.running + l.quarantined);
    }
    assert_int_equal(pd_kv_pool_check(pool), PD_OK);
    pd_kv_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_survives_every_failed_allocation),
        cmocka_unit_test(a_shared_block_counts_once_by_its_strongest_claim),
        cmocka_unit_test(blocks_come_in_runs_where_there_are_runs),
        cmocka_unit_test(the_ledger_adds_up_after_any_history),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
