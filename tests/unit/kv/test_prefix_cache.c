#include "common/kv/prefix_cache.h"
#include "common/kv/prefix_hash.h"
#include "tests/unit/kv/cmocka_all.h"

#include "common/base/mem.h"

enum { TOKENS = 16, EVENTS = 4096 };

static const pd_hash128 model = {.lo = 1, .hi = 2};

typedef struct world {
    pd_kv_pool *pool;
    pd_prefix_cache *cache;
} world;

static world make(uint32_t blocks, uint32_t events)
{
    world w;
    assert_int_equal(pd_kv_pool_create(blocks, &w.pool), PD_OK);
    assert_int_equal(pd_prefix_cache_create(w.pool, events, &w.cache), PD_OK);
    return w;
}

static void unmake(world *w)
{
    assert_int_equal(pd_prefix_cache_check(w->cache), PD_OK);
    pd_prefix_cache_destroy(w->cache);
    pd_kv_pool_destroy(w->pool);
}

/* Hashes of a made-up prompt: each text has its own tokens from block `fork` on. */
static pd_hash128 chain(uint32_t text, uint32_t fork, pd_hash128 *hashes, uint32_t count)
{
    pd_hash128 root = pd_prefix_hash_root(model, TOKENS, NULL, 0);
    uint32_t tokens[16 * TOKENS];
    assert_true(count <= 16);
    for (uint32_t i = 0; i < count * TOKENS; i++)
        tokens[i] = i / TOKENS < fork ? 7 : 1000 * (text + 1) + i;
    assert_int_equal(pd_prefix_hash_fill(root, TOKENS, tokens, count * TOKENS, hashes, count),
                     count);
    return root;
}

static void store(world *w, uint32_t text, uint32_t fork, uint32_t count)
{
    pd_hash128 hashes[16];
    pd_block blocks[16];
    uint32_t held;
    pd_hash128 root = chain(text, fork, hashes, count);
    assert_int_equal(
        pd_prefix_cache_acquire(w->cache, hashes, count, count, PD_CLAIM_RUNNING, blocks, &held),
        PD_OK);
    pd_prefix_cache_insert(w->cache, root, hashes, blocks, count, UINT32_MAX);
    pd_prefix_cache_drop(w->cache, blocks, count, PD_CLAIM_RUNNING);
}

static uint32_t cached_of(world *w, uint32_t text, uint32_t fork, uint32_t count)
{
    pd_hash128 hashes[16];
    chain(text, fork, hashes, count);
    return pd_prefix_cache_peek(w->cache, hashes, count);
}

static void create_survives_every_failed_allocation(void **state)
{
    (void)state;
    pd_kv_pool *pool;
    pd_prefix_cache *cache = NULL;
    assert_int_equal(pd_kv_pool_create(4, &pool), PD_OK);
    for (long n = 0; cache == NULL; n++) {
        assert_true(n < 100);
        pd_mem_fail_at(n);
        pd_status status = pd_prefix_cache_create(pool, 8, &cache);
        pd_mem_fail_at(-1);
        assert_int_equal(status, cache == NULL ? PD_E_NOMEM : PD_OK);
    }
    pd_prefix_cache_destroy(cache);
    pd_kv_pool_destroy(pool);
    assert_int_equal(pd_mem_live(), 0);
}

static void hashes_tell_model_block_size_salt_and_every_earlier_token_apart(void **state)
{
    (void)state;
    pd_hash128 seen[16];
    uint32_t count = 0;
    uint32_t tokens[TOKENS] = {1, 2, 3};
    seen[count++] = pd_prefix_hash_root(model, 16, NULL, 0);
    seen[count++] = pd_prefix_hash_root(model, 32, NULL, 0);
    seen[count++] = pd_prefix_hash_root((pd_hash128){.lo = 1, .hi = 3}, 16, NULL, 0);
    seen[count++] = pd_prefix_hash_root(model, 16, "a", 1);
    seen[count++] = pd_prefix_hash_root(model, 16, "a\0", 2);
    seen[count++] = pd_prefix_hash_root(model, 16, "\0", 1);
    seen[count++] = pd_prefix_hash_next(seen[0], tokens, TOKENS);
    seen[count++] = pd_prefix_hash_next(seen[3], tokens, TOKENS);
    seen[count++] = pd_prefix_hash_next(seen[0], tokens, TOKENS - 1);
    seen[count++] = pd_prefix_hash_next(seen[6], tokens, TOKENS);
    tokens[TOKENS - 1] = 1;
    seen[count++] = pd_prefix_hash_next(seen[0], tokens, TOKENS);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t j = 0; j < i; j++)
            assert_false(pd_hash128_equal(seen[i], seen[j]));
    }
    assert_true(pd_hash128_equal(seen[0], pd_prefix_hash_root(model, 16, "", 0)));
    assert_true(pd_hash128_equal(seen[3], pd_prefix_hash_root(model, 16, "a", 1)));
}

static void at_least_one_token_is_left_to_compute(void **state)
{
    (void)state;
    assert_int_equal(pd_prefix_hash_usable(0, 16), 0);
    assert_int_equal(pd_prefix_hash_usable(15, 16), 0);
    assert_int_equal(pd_prefix_hash_usable(16, 16), 0);
    assert_int_equal(pd_prefix_hash_usable(17, 16), 1);
    assert_int_equal(pd_prefix_hash_usable(64, 16), 3);
    assert_int_equal(pd_prefix_hash_usable(65, 16), 4);
}

static void what_was_stored_is_found_and_shared(void **state)
{
    (void)state;
    world w = make(16, EVENTS);
    store(&w, 1, 2, 4);
    assert_int_equal(cached_of(&w, 1, 2, 4), 4);
    assert_int_equal(cached_of(&w, 2, 2, 4), 2); /* two blocks in common */
    assert_int_equal(cached_of(&w, 3, 0, 4), 0);
    pd_hash128 hashes[16];
    pd_block a[4], b[4];
    chain(1, 2, hashes, 4);
    assert_int_equal(pd_prefix_cache_pin(w.cache, hashes, 4, PD_CLAIM_LEASED, a), 4);
    assert_int_equal(pd_prefix_cache_pin(w.cache, hashes, 4, PD_CLAIM_RUNNING, b), 4);
    assert_memory_equal(a, b, sizeof a);
    assert_int_equal(pd_kv_pool_ledger(w.pool).running, 4);
    pd_prefix_cache_drop(w.cache, b, 4, PD_CLAIM_RUNNING);
    assert_int_equal(pd_kv_pool_ledger(w.pool).leased, 4);
    pd_prefix_cache_drop(w.cache, a, 4, PD_CLAIM_LEASED);
    assert_int_equal(pd_kv_pool_ledger(w.pool).cached, 4);
    unmake(&w);
}

/* Room that somebody counts on does not go away when something becomes known. */
static void what_is_known_binds_no_more_than_can_be_spared(void **state)
{
    (void)state;
    for (uint32_t spare = 0; spare <= 2; spare++) {
        world w = make(8, EVENTS);
        pd_hash128 hashes[3];
        pd_block a[2], b[3];
        pd_hash128 root = chain(1, 16, hashes, 3);
        assert_int_equal(pd_prefix_cache_alloc(w.cache, 2, PD_CLAIM_RUNNING, PD_BLOCK_NONE, a),
                         PD_OK);
        assert_int_equal(pd_prefix_cache_alloc(w.cache, 3, PD_CLAIM_RUNNING, PD_BLOCK_NONE, b),
                         PD_OK);
        pd_prefix_cache_insert(w.cache, root, hashes, a, 2,
                               0); /* its own claims: nothing is bound */
        assert_int_equal(pd_prefix_cache_seq(w.cache), 2);
        pd_prefix_cache_drop(w.cache, a, 2, PD_CLAIM_RUNNING);
        assert_int_equal(pd_prefix_cache_room(w.cache), 5);
        pd_prefix_cache_insert(w.cache, root, hashes, b, 3, spare);
        assert_int_equal(pd_prefix_cache_room(w.cache), spare == 2 ? 3 : 5);
        assert_int_equal(pd_prefix_cache_seq(w.cache), spare == 2 ? 3 : 2);
        assert_int_equal(pd_prefix_cache_check(w.cache), PD_OK);
        pd_prefix_cache_drop(w.cache, b, 3, PD_CLAIM_RUNNING);
        assert_int_equal(pd_prefix_cache_room(w.cache), 8);
        unmake(&w);
    }
}

static void the_second_copy_of_a_block_stays_unknown_and_becomes_free(void **state)
{
    (void)state;
    world w = make(8, EVENTS);
    pd_hash128 hashes[2], more[3];
    pd_block a[2], b[3];
    pd_hash128 root = chain(1, 16, hashes, 2);
    chain(1, 16, more, 3);
    /* two requests for one prompt at once: neither finds anything */
    assert_int_equal(pd_prefix_cache_alloc(w.cache, 2, PD_CLAIM_RUNNING, PD_BLOCK_NONE, a), PD_OK);
    assert_int_equal(pd_prefix_cache_alloc(w.cache, 3, PD_CLAIM_RUNNING, PD_BLOCK_NONE, b), PD_OK);
    pd_prefix_cache_insert(w.cache, root, hashes, a, 2, UINT32_MAX);
    pd_prefix_cache_drop(w.cache, a, 2, PD_CLAIM_RUNNING);
    /* the other's third block hangs below the first's second, though its own copy differs */
    pd_prefix_cache_insert(w.cache, root, more, b, 3, UINT32_MAX);
    assert_int_equal(pd_prefix_cache_seq(w.cache), 3);
    assert_int_equal(pd_prefix_cache_check(w.cache), PD_OK);
    /* and keeps it there: only the 3 free ones can be had, not the cached two above it */
    assert_int_equal(pd_prefix_cache_room(w.cache), 3);
    pd_block got[8];
    assert_int_equal(pd_prefix_cache_alloc(w.cache, 4, PD_CLAIM_RUNNING, PD_BLOCK_NONE, got),
                     PD_E_OVERLOAD);
    pd_prefix_cache_drop(w.cache, b, 3, PD_CLAIM_RUNNING);
    pd_kv_ledger ledger = pd_kv_pool_ledger(w.pool);
    assert_int_equal(ledger.cached, 3);
    assert_int_equal(ledger.free, 5);
    assert_int_equal(pd_prefix_cache_room(w.cache), 8);
    unmake(&w);
}

static void eviction_takes_leaves_least_recently_used_first(void **state)
{
    (void)state;
    world w = make(8, EVENTS);
    store(&w, 1, 1, 3); /* common, 1b, 1c */
    store(&w, 2, 1, 3); /* common, 2b, 2c */
    store(&w, 3, 0, 3); /* three of its own */
    assert_int_equal(pd_kv_pool_ledger(w.pool).free, 0);
    pd_block got[8];
    /* use text 1 again: now 2 is the oldest, then 3, then 1, whose common block goes last */
    pd_hash128 hashes[3];
    chain(1, 1, hashes, 3);
    assert_int_equal(pd_prefix_cache_pin(w.cache, hashes, 3, PD_CLAIM_RUNNING, got), 3);
    pd_prefix_cache_drop(w.cache, got, 3, PD_CLAIM_RUNNING);

    static const uint32_t left[8][3] = {{3, 2, 3}, {3, 1, 3}, {3, 1, 2}, {3, 1, 1},
                                        {3, 1, 0}, {2, 1, 0}, {1, 1, 0}, {0, 0, 0}};
    for (int i = 0; i < 8; i++) {
        assert_int_equal(
            pd_prefix_cache_alloc(w.cache, 1, PD_CLAIM_RUNNING, PD_BLOCK_NONE, got + i), PD_OK);
        assert_int_equal(cached_of(&w, 1, 1, 3), left[i][0]);
        assert_int_equal(cached_of(&w, 2, 1, 3), left[i][1]);
        assert_int_equal(cached_of(&w, 3, 0, 3), left[i][2]);
        assert_int_equal(pd_prefix_cache_check(w.cache), PD_OK);
    }
    unmake(&w);
}

/* The case of a block that is found by one and taken by another in the same step, both orders. */
static void a_matched_block_is_pinned_in_the_same_step(void **state)
{
    (void)state;
    for (int b_first = 0; b_first < 2; b_first++) {
        world w = make(8, EVENTS);
        store(&w, 1, 0, 1);
        pd_hash128 a_hashes[2], b_hashes[8];
        pd_block a[2], b[8];
        uint32_t a_held = 0, b_held = 0;
        chain(1, 0, a_hashes, 2);
        chain(2, 0, b_hashes, 8);
        pd_status a_status = PD_E_AGAIN, b_status = PD_E_AGAIN;
        for (int turn = 0; turn < 2; turn++) {
            if (turn == b_first)
                a_status =
                    pd_prefix_cache_acquire(w.cache, a_hashes, 2, 2, PD_CLAIM_LEASED, a, &a_held);
            else
                b_status =
                    pd_prefix_cache_acquire(w.cache, b_hashes, 8, 8, PD_CLAIM_LEASED, b, &b_held);
        }
        assert_int_equal(a_status, b_first ? PD_E_OVERLOAD : PD_OK);
        assert_int_equal(b_status, b_first ? PD_OK : PD_E_OVERLOAD);
        if (!b_first)
            assert_int_equal(a_held, 1);
        else
            assert_int_equal(pd_prefix_cache_peek(w.cache, a_hashes, 1), 0);
        unmake(&w);
    }
}

/* A request of the random history: its text and what it holds. */
typedef struct holder {
    bool used;
    uint32_t text, count;
    pd_block blocks[8];
} holder;

/* 64 requests over few blocks; each block carries the text and position it was written with, as
 * the real pool carries KV, and whoever pins it checks. */
static void no_block_ever_has_two_owners_of_different_content(void **state)
{
    (void)state;
    enum { BLOCKS = 40, HOLDERS = 64, TEXTS = 24 };
    world w = make(BLOCKS, 64);
    holder holders[HOLDERS] = {{0}};
    pd_hash128 written[BLOCKS] = {{0}};
    uint64_t random = 20;
    uint64_t hits = 0, refused = 0;
    for (int step = 0; step < 10000; step++) {
        holder *h = &holders[pd_random_next(&random) % HOLDERS];
        pd_hash128 hashes[8];
        if (h->used) {
            chain(h->text, h->text % 4, hashes, h->count);
            for (uint32_t i = 0; i < h->count; i++)
                assert_true(pd_hash128_equal(written[h->blocks[i]], hashes[i]));
            pd_prefix_cache_drop(w.cache, h->blocks, h->count, PD_CLAIM_RUNNING);
            h->used = false;
        } else {
            h->text = (uint32_t)(pd_random_next(&random) % TEXTS);
            h->count = 1 + (uint32_t)(pd_random_next(&random) % 8);
            uint32_t held = 0;
            pd_hash128 root = chain(h->text, h->text % 4, hashes, h->count);
            if (pd_prefix_cache_acquire(w.cache, hashes, h->count, h->count, PD_CLAIM_RUNNING,
                                        h->blocks, &held) != PD_OK) {
                refused++;
                continue;
            }
            h->used = true;
            hits += held;
            for (uint32_t i = 0; i < h->count; i++) {
                if (i < held)
                    assert_true(pd_hash128_equal(written[h->blocks[i]], hashes[i]));
                written[h->blocks[i]] = hashes[i];
            }
            pd_prefix_cache_insert(w.cache, root, hashes, h->blocks, h->count, UINT32_MAX);
        }
        if (step % 16 == 0)
            assert_int_equal(pd_prefix_cache_check(w.cache), PD_OK);
    }
    assert_true(hits > 1000); /* else nothing was tried */
    assert_true(refused > 1000);
    unmake(&w);
}

/* An index kept from events alone equals the cache, until events were left out. */
static void events_tell_the_whole_story(void **state)
{
    (void)state;
    enum { BLOCKS = 20, INDEX = 4096 };
    world w = make(BLOCKS, 64);
    pd_hash128 index[INDEX];
    uint32_t index_len = 0;
    uint64_t random = 3, next_seq = 1;
    for (int step = 0; step < 2000; step++) {
        store(&w, (uint32_t)(pd_random_next(&random) % 16), 2,
              1 + (uint32_t)(pd_random_next(&random) % 8));
        pd_cache_event events[64];
        uint32_t count = pd_prefix_cache_drain(w.cache, events, 64);
        for (uint32_t i = 0; i < count; i++) {
            assert_int_equal(events[i].seq, next_seq++);
            uint32_t at = 0;
            while (at < index_len && !pd_hash128_equal(index[at], events[i].hash))
                at++;
            if (events[i].kind == PD_CACHE_STORED) {
                assert_int_equal(at, index_len);
                index[index_len++] = events[i].hash;
            } else if (events[i].kind == PD_CACHE_REMOVED) {
                assert_true(at < index_len);
                index[at] = index[--index_len];
            }
        }
        uint32_t cursor = 0, snapshot = 0;
        for (pd_cache_event e; pd_prefix_cache_next(w.cache, &cursor, &e); snapshot++) {
            uint32_t at = 0;
            while (at < index_len && !pd_hash128_equal(index[at], e.hash))
                at++;
            assert_true(at < index_len);
        }
        assert_int_equal(snapshot, index_len);
        assert_int_equal(pd_prefix_cache_seq(w.cache), next_seq - 1);
    }
    unmake(&w);
}

static void events_left_out_show_as_a_gap(void **state)
{
    (void)state;
    world w = make(16, 4);
    store(&w, 1, 0, 8);
    pd_cache_event events[8];
    assert_int_equal(pd_prefix_cache_drain(w.cache, events, 8), 4);
    assert_int_equal(events[3].seq, 4);
    store(&w, 2, 0, 1);
    assert_int_equal(pd_prefix_cache_drain(w.cache, events, 8), 1);
    assert_int_equal(events[0].seq, 9);
    unmake(&w);
}

static uint32_t runs_in(const pd_block *blocks, uint32_t count)
{
    uint32_t runs = count > 0;

    for (uint32_t i = 1; i < count; i++)
        runs += blocks[i] != blocks[i - 1] + 1;
    return runs;
}

/* A decode worker's life with a full cache: prompts come, answers grow side by side, all stays as
 * cache. A run of a prompt is one put. */
static void prompts_lie_in_few_runs_however_long_the_pool_was_used(void **state)
{
    (void)state;
    enum { BLOCKS = 2048, SEQUENCES = 32, LONGEST = 128, STEPS = 6000, GROW = 4 };
    static struct {
        pd_block blocks[LONGEST];
        uint32_t count, wanted;
    } sequences[SEQUENCES];
    world w = make(BLOCKS, BLOCKS * 2);
    pd_hash128 hashes[LONGEST];
    uint64_t random = 5, content = 1, blocks = 0, runs = 0, prompts = 0;

    for (int step = 0; step < STEPS; step++) {
        for (uint32_t i = 0; i < SEQUENCES; i++) {
            pd_block *own = sequences[i].blocks;
            uint32_t *count = &sequences[i].count, want = sequences[i].wanted;
            if (*count > 0 && *count >= want) {
                for (uint32_t k = 0; k < *count; k++)
                    hashes[k] = (pd_hash128){pd_mix64(content), content}, content++;
                pd_prefix_cache_insert(w.cache, (pd_hash128){0, 0}, hashes, own, *count,
                                       UINT32_MAX);
                pd_prefix_cache_drop(w.cache, own, *count, PD_CLAIM_RUNNING);
                *count = 0;
            } else if (*count > 0 && pd_random_next(&random) % 16 == 0) {
                uint32_t more = want - *count < GROW ? want - *count : GROW;
                assert_int_equal(pd_prefix_cache_alloc(w.cache, more, PD_CLAIM_RUNNING,
                                                       own[*count - 1], own + *count),
                                 PD_OK);
                *count += more;
            } else if (*count == 0 && pd_random_next(&random) % 8 == 0) {
                *count = 4 + (uint32_t)(pd_random_next(&random) % 40);
                sequences[i].wanted = *count + 1 + (uint32_t)(pd_random_next(&random) % 20);
                assert_int_equal(
                    pd_prefix_cache_alloc(w.cache, *count, PD_CLAIM_RUNNING, PD_BLOCK_NONE, own),
                    PD_OK);
                if (step < STEPS / 4)
                    continue;
                prompts++;
                blocks += *count;
                runs += runs_in(own, *count);
            }
        }
        pd_cache_event events[64];
        while (pd_prefix_cache_drain(w.cache, events, 64) > 0) {
        }
    }
    print_message("# %.1f blocks and %.2f runs a prompt, mean run %.1f\n",
                  (double)blocks / (double)prompts, (double)runs / (double)prompts,
                  (double)blocks / (double)runs);
    assert_true(blocks > 4 * runs);
    unmake(&w);
}

/* The caller of one claim may end while the other goes on. */
static void shared_blocks_stay_until_the_last_claim_ends(void **state)
{
    (void)state;
    world w = make(8, EVENTS);
    store(&w, 1, 0, 3);
    pd_hash128 hashes[3];
    pd_block mine[4];
    chain(1, 0, hashes, 3);
    assert_int_equal(pd_prefix_cache_pin(w.cache, hashes, 3, PD_CLAIM_RUNNING, mine), 3);
    assert_int_equal(pd_prefix_cache_alloc(w.cache, 1, PD_CLAIM_RUNNING, mine[2], mine + 3), PD_OK);
    pd_prefix_cache_share(w.cache, mine, 4, PD_CLAIM_RUNNING);
    pd_prefix_cache_drop(w.cache, mine, 4, PD_CLAIM_RUNNING);
    assert_int_equal(pd_kv_pool_ledger(w.pool).running, 4);
    assert_int_equal(pd_prefix_cache_room(w.cache), 4);
    pd_prefix_cache_drop(w.cache, mine, 4, PD_CLAIM_RUNNING);
    assert_int_equal(pd_kv_pool_ledger(w.pool).cached, 3);
    assert_int_equal(pd_prefix_cache_room(w.cache), 8);
    unmake(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_survives_every_failed_allocation),
        cmocka_unit_test(hashes_tell_model_block_size_salt_and_every_earlier_token_apart),
        cmocka_unit_test(at_least_one_token_is_left_to_compute),
        cmocka_unit_test(what_was_stored_is_found_and_shared),
        cmocka_unit_test(what_is_known_binds_no_more_than_can_be_spared),
        cmocka_unit_test(the_second_copy_of_a_block_stays_unknown_and_becomes_free),
        cmocka_unit_test(eviction_takes_leaves_least_recently_used_first),
        cmocka_unit_test(a_matched_block_is_pinned_in_the_same_step),
        cmocka_unit_test(no_block_ever_has_two_owners_of_different_content),
        cmocka_unit_test(events_tell_the_whole_story),
        cmocka_unit_test(events_left_out_show_as_a_gap),
        cmocka_unit_test(prompts_lie_in_few_runs_however_long_the_pool_was_used),
        cmocka_unit_test(shared_blocks_stay_until_the_last_claim_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
