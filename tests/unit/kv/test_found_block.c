/* Between finding a cached block and holding it, it is a hint: somebody else may have taken it. */
#include "common/kv/lease.h"
#include "common/kv/prefix_hash.h"
#include "tests/unit/kv/cmocka_all.h"

#include <string.h>

enum { BLOCK_TOKENS = 4, POOL_MAX = 40, PROMPT_BLOCKS_MAX = 8, PAIRS = 64, STEPS = 10000 };

/* What lies in each block is the test's own book: the token ids whose KV it would be. */
typedef struct world {
    uint32_t blocks;
    pd_kv_pool *pool;
    pd_prefix_cache *cache;
    pd_lease_table *table;
    uint32_t stored[POOL_MAX][BLOCK_TOKENS];
} world;

typedef struct request {
    uint64_t number;
    uint32_t blocks;
    uint32_t tokens[PROMPT_BLOCKS_MAX][BLOCK_TOKENS];
    pd_hash128 hashes[PROMPT_BLOCKS_MAX];
    uint32_t hint; /* leading blocks that were found, before anything was held */
    uint32_t filled;
    pd_lease *lease;
} request;

static const pd_hash128 root = {5, 6};

static void make(world *w, uint32_t blocks)
{
    *w = (world){.blocks = blocks};
    assert_int_equal(pd_kv_pool_create(blocks, &w->pool), PD_OK);
    assert_int_equal(pd_prefix_cache_create(w->pool, 64, &w->cache), PD_OK);
    assert_int_equal(pd_lease_table_create(w->cache, 2 * PAIRS, PROMPT_BLOCKS_MAX, &w->table),
                     PD_OK);
}

static void unmake(world *w)
{
    assert_int_equal(pd_prefix_cache_check(w->cache), PD_OK);
    pd_lease_table_destroy(w->table);
    pd_prefix_cache_destroy(w->cache);
    pd_kv_pool_destroy(w->pool);
}

/* text: the first shared blocks are alike for all requests of one text. */
static request request_of(uint64_t number, uint64_t text, uint32_t shared, uint32_t blocks)
{
    request r = {.number = number, .blocks = blocks};

    for (uint32_t b = 0; b < blocks; b++) {
        for (uint32_t t = 0; t < BLOCK_TOKENS; t++)
            r.tokens[b][t] =
                (uint32_t)pd_mix64((b < shared ? text : number + 1000000) * 1000 + b * 10 + t);
    }
    pd_prefix_hash_fill(root, BLOCK_TOKENS, r.tokens[0], blocks * BLOCK_TOKENS, r.hashes, blocks);
    return r;
}

static void look(const world *w, request *r)
{
    r->hint = pd_prefix_cache_peek(w->cache, r->hashes, r->blocks);
}

static bool promise(world *w, request *r)
{
    pd_lease_grant_args args = {
        .request = r->number, .prefill = 9, .blocks = r->blocks, .expiry_ns = UINT64_MAX};
    pd_status status = pd_lease_grant(w->table, &args, &r->lease);

    assert_true(status == PD_OK || status == PD_E_OVERLOAD);
    return status == PD_OK;
}

static bool bind(world *w, request *r)
{
    pd_status status = pd_lease_bind(w->table, r->lease, r->hashes, r->blocks);

    assert_true(status == PD_OK || status == PD_E_OVERLOAD);
    r->filled = r->lease->held;
    return status == PD_OK;
}

static void fill(world *w, request *r)
{
    memcpy(w->stored[r->lease->blocks[r->filled]], r->tokens[r->filled], sizeof r->tokens[0]);
    if (++r->filled < r->blocks)
        return;
    pd_lease_landed(w->table, r->lease);
    pd_prefix_cache_insert(w->cache, root, r->hashes, r->lease->blocks, r->blocks, UINT32_MAX);
}

static void release(world *w, request *r)
{
    if (pd_lease_release(w->table, r->lease))
        assert_true(pd_lease_sender_acked(w->table, r->number, 0));
    r->lease = NULL;
    r->filled = 0;
}

/* Each block of the request that is said to hold its tokens' KV does. */
static void check(const world *w, const request *r)
{
    for (uint32_t i = 0; r->lease != NULL && i < r->filled; i++)
        assert_memory_equal(w->stored[r->lease->blocks[i]], r->tokens[i], sizeof r->tokens[i]);
}

static void run(world *w, request *r)
{
    assert_true(promise(w, r));
    assert_true(bind(w, r));
    while (r->filled < r->blocks) {
        fill(w, r);
        check(w, r);
    }
}

static void one_of_two_gets_it_and_the_other_waits(void **state)
{
    (void)state;
    for (int order = 0; order < 2; order++) {
        world w;
        make(&w, 8);
        request first = request_of(1, 7, 1, 1);
        run(&w, &first);
        release(&w, &first);
        assert_int_equal(pd_kv_pool_ledger(w.pool).cached, 1); /* X */

        request a = request_of(2, 7, 1, 2), b = request_of(3, 8, 0, 8);
        look(&w, &a);
        look(&w, &b);
        assert_int_equal(a.hint, 1);
        assert_int_equal(b.hint, 0);
        if (order == 0) {
            assert_true(promise(&w, &a));
            assert_false(promise(&w, &b)); /* b waits */
            assert_true(bind(&w, &a));
            assert_int_equal(a.lease->held, 1);
            check(&w, &a);
            fill(&w, &a);
            release(&w, &a);
            run(&w, &b);
            check(&w, &b);
        } else {
            run(&w, &b);
            assert_false(promise(&w, &a)); /* what it found is gone, and it waits */
            release(&w, &b);
            run(&w, &a); /* recomputes */
            check(&w, &a);
        }
        release(&w, order == 0 ? &b : &a);
        unmake(&w);
    }
}

static void a_promise_holds_though_what_was_found_is_taken(void **state)
{
    (void)state;
    world w;
    make(&w, 8);
    request first = request_of(1, 7, 2, 6);
    run(&w, &first);
    release(&w, &first);
    request a = request_of(2, 7, 2, 4), b = request_of(3, 8, 0, 4);
    look(&w, &a);
    assert_int_equal(a.hint, 2);
    assert_true(promise(&w, &a));
    run(&w, &b); /* two free ones, and two that were cached */
    assert_true(bind(&w, &a));
    check(&w, &a);
    while (a.filled < a.blocks)
        fill(&w, &a);
    check(&w, &a);
    check(&w, &b);
    release(&w, &a);
    release(&w, &b);
    unmake(&w);
}

static void no_block_ever_has_two_owners_of_different_content(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        static request requests[2 * PAIRS];
        uint64_t random = seed, found = 0, lost = 0;
        world w;
        make(&w, 8 + (uint32_t)(seed - 1) * 10);
        for (uint32_t i = 0; i < PAIRS; i++) {
            uint32_t shared = 1 + i % 3;
            requests[2 * i] = request_of(2 * i + 1, i % 8, shared, shared + 1);
            requests[2 * i + 1] = request_of(2 * i + 2, 100 + i, 0, 8);
        }
        for (uint32_t step = 0; step < STEPS; step++) {
            request *r = &requests[pd_random_next(&random) % (2 * PAIRS)];
            uint64_t what = pd_random_next(&random) % 8;
            if (r->lease == NULL && r->hint == 0 && what < 4)
                look(&w, r);
            else if (r->lease == NULL)
                promise(&w, r);
            else if (what == 0)
                release(&w, r); /* in whatever state */
            else if (r->lease->state == PD_LEASE_GRANTED && bind(&w, r)) {
                found += r->lease->held >= r->hint && r->hint > 0;
                lost += r->lease->held < r->hint;
                r->hint = 0;
                if (r->filled == r->blocks)
                    pd_lease_landed(w.table, r->lease);
            } else if (r->lease->state == PD_LEASE_LANDING)
                fill(&w, r);
            else if (r->lease->state == PD_LEASE_LANDED)
                pd_lease_run(w.table, r->lease);
            else if (r->lease->state == PD_LEASE_RUNNING)
                release(&w, r);
            for (uint32_t i = 0; i < 2 * PAIRS; i++)
                check(&w, &requests[i]);
            assert_int_equal(pd_kv_pool_check(w.pool), PD_OK);
        }
        assert_true(found > 0 && lost > 0); /* both happened */
        for (uint32_t i = 0; i < 2 * PAIRS; i++) {
            if (requests[i].lease != NULL)
                release(&w, &requests[i]);
        }
        pd_kv_ledger ledger = pd_kv_pool_ledger(w.pool);
        assert_int_equal(ledger.free + ledger.cached, w.blocks);
        unmake(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_of_two_gets_it_and_the_other_waits),
        cmocka_unit_test(a_promise_holds_though_what_was_found_is_taken),
        cmocka_unit_test(no_block_ever_has_two_owners_of_different_content),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
