#include "common/kv/pool.h"
#include "common/base/log.h"
#include "common/base/mem.h"

typedef struct block_record {
    uint32_t claims[PD_CLAIMS];
    bool cached;
} block_record;

struct pd_kv_pool {
    uint32_t blocks;
    uint32_t counts[PD_BLOCK_STATES];
    block_record *records; /* [blocks] */
    uint64_t *free_bits;   /* [(blocks + 63) / 64], 1: free */
};

pd_status pd_kv_pool_create(uint32_t blocks, pd_kv_pool **pool_out)
{
    if (blocks == 0 || blocks == PD_BLOCK_NONE)
        return PD_E_INVALID;
    pd_kv_pool *pool = pd_calloc(1, sizeof *pool);
    if (pool == NULL)
        return PD_E_NOMEM;
    pool->blocks = blocks;
    pool->counts[PD_BLOCK_FREE] = blocks;
    pool->records = pd_calloc(blocks, sizeof *pool->records);
    pool->free_bits = pd_calloc(((size_t)blocks + 63) / 64, sizeof *pool->free_bits);
    if (pool->records == NULL || pool->free_bits == NULL) {
        pd_kv_pool_destroy(pool);
        return PD_E_NOMEM;
    }
    for (uint32_t block = 0; block < blocks; block++)
        pool->free_bits[block / 64] |= 1ull << (block % 64);
    *pool_out = pool;
    return PD_OK;
}

void pd_kv_pool_destroy(pd_kv_pool *pool)
{
    if (pool == NULL)
        return;
    pd_free(pool->records);
    pd_free(pool->free_bits);
    pd_free(pool);
}

uint32_t pd_kv_pool_blocks(const pd_kv_pool *pool)
{
    return pool->blocks;
}

static pd_block_state state_of(const block_record *record)
{
    if (record->claims[PD_CLAIM_QUARANTINED] != 0)
        return PD_BLOCK_QUARANTINED;
    if (record->claims[PD_CLAIM_RUNNING] != 0)
        return PD_BLOCK_RUNNING;
    if (record->claims[PD_CLAIM_LEASED] != 0)
        return PD_BLOCK_LEASED;
    return record->cached ? PD_BLOCK_CACHED : PD_BLOCK_FREE;
}

pd_block_state pd_kv_pool_state(const pd_kv_pool *pool, pd_block block)
{
    pd_assert(block < pool->blocks);
    return state_of(&pool->records[block]);
}

uint32_t pd_kv_pool_claims(const pd_kv_pool *pool, pd_block block)
{
    pd_assert(block < pool->blocks);
    uint32_t sum = 0;
    for (int claim = 0; claim < PD_CLAIMS; claim++)
        sum += pool->records[block].claims[claim];
    return sum;
}

bool pd_kv_pool_is_cached(const pd_kv_pool *pool, pd_block block)
{
    pd_assert(block < pool->blocks);
    return pool->records[block].cached;
}

pd_kv_ledger pd_kv_pool_ledger(const pd_kv_pool *pool)
{
    return (pd_kv_ledger){
        .total = pool->blocks,
        .free = pool->counts[PD_BLOCK_FREE],
        .cached = pool->counts[PD_BLOCK_CACHED],
        .leased = pool->counts[PD_BLOCK_LEASED],
        .running = pool->counts[PD_BLOCK_RUNNING],
        .quarantined = pool->counts[PD_BLOCK_QUARANTINED],
    };
}

static bool is_free_bit(const pd_kv_pool *pool, pd_block block)
{
    return (pool->free_bits[block / 64] >> (block % 64) & 1) != 0;
}

pd_status pd_kv_pool_check(const pd_kv_pool *pool)
{
    uint32_t counts[PD_BLOCK_STATES] = {0};
    uint32_t bits = 0, sum = 0;
    for (pd_block block = 0; block < pool->blocks; block++) {
        counts[state_of(&pool->records[block])]++;
        bits += is_free_bit(pool, block);
    }
    bool same = bits == counts[PD_BLOCK_FREE];
    for (int state = 0; state < PD_BLOCK_STATES; state++) {
        same = same && counts[state] == pool->counts[state];
        sum += pool->counts[state];
    }
    if (same && sum == pool->blocks)
        return PD_OK;
    pd_log_error("msg=\"kv pool: the ledger does not add up\" total=%u "
                 "free=%u/%u/%u cached=%u/%u leased=%u/%u running=%u/%u quarantined=%u/%u",
                 pool->blocks, pool->counts[PD_BLOCK_FREE], counts[PD_BLOCK_FREE], bits,
                 pool->counts[PD_BLOCK_CACHED], counts[PD_BLOCK_CACHED],
                 pool->counts[PD_BLOCK_LEASED], counts[PD_BLOCK_LEASED],
                 pool->counts[PD_BLOCK_RUNNING], counts[PD_BLOCK_RUNNING],
                 pool->counts[PD_BLOCK_QUARANTINED], counts[PD_BLOCK_QUARANTINED]);
    return PD_E_INTERNAL;
}

/* The first block from `from` on whose free bit is `wanted`; pool->blocks when there is none. */
static uint32_t find_bit(const pd_kv_pool *pool, uint32_t from, bool wanted)
{
    uint32_t words = (pool->blocks + 63) / 64;
    for (uint32_t word = from / 64; word < words; word++) {
        uint64_t bits = wanted ? pool->free_bits[word] : ~pool->free_bits[word];
        if (word == from / 64)
            bits &= ~0ull << (from % 64);
        if (bits != 0) {
            uint32_t found = word * 64 + (uint32_t)__builtin_ctzll(bits);
            return found < pool->blocks ? found : pool->blocks;
        }
    }
    return pool->blocks;
}

/* After every change of a record: moves the block between counts and keeps its free bit. */
static void recount(pd_kv_pool *pool, pd_block block, pd_block_state before)
{
    pd_block_state after = state_of(&pool->records[block]);
    pool->counts[before]--;
    pool->counts[after]++;
    uint64_t bit = 1ull << (block % 64);
    if (after == PD_BLOCK_FREE)
        pool->free_bits[block / 64] |= bit;
    else
        pool->free_bits[block / 64] &= ~bit;
}

static void take_run(pd_kv_pool *pool, pd_block first, uint32_t count, pd_claim claim,
                     pd_block *blocks_out)
{
    for (uint32_t i = 0; i < count; i++) {
        pd_block block = first + i;
        pd_assert(state_of(&pool->records[block]) == PD_BLOCK_FREE);
        pool->records[block].claims[claim] = 1;
        recount(pool, block, PD_BLOCK_FREE);
        blocks_out[i] = block;
    }
}

/* Takes up to count blocks from runs of at least run_min; returns how many. */
static uint32_t take_runs(pd_kv_pool *pool, uint32_t count, uint32_t run_min, pd_claim claim,
                          pd_block *blocks_out)
{
    uint32_t taken = 0;
    uint32_t start = find_bit(pool, 0, true);
    while (taken < count && start < pool->blocks) {
        uint32_t end = find_bit(pool, start, false);
        if (end - start >= run_min) {
            uint32_t length = end - start < count - taken ? end - start : count - taken;
            take_run(pool, start, length, claim, blocks_out + taken);
            taken += length;
        }
        start = find_bit(pool, end, true);
    }
    return taken;
}

/* The shortest free run of at least count, so that long ones stay; else the longest. There is one.
 */
static pd_block best_run(const pd_kv_pool *pool, uint32_t count, uint32_t *length_out)
{
    uint32_t best = 0, best_length = 0;
    uint32_t start = find_bit(pool, 0, true);

    while (start < pool->blocks && best_length != count) {
        uint32_t end = find_bit(pool, start, false), length = end - start;
        if (best_length < count ? length > best_length : length >= count && length < best_length) {
            best = start;
            best_length = length;
        }
        start = find_bit(pool, end, true);
    }
    pd_assert(best_length > 0);
    *length_out = best_length;
    return best;
}

pd_status pd_kv_pool_take(pd_kv_pool *pool, uint32_t count, pd_claim claim, pd_block near,
                          pd_block *blocks_out)
{
    if (count > pool->counts[PD_BLOCK_FREE])
        return PD_E_OVERLOAD;
    uint32_t taken = 0;
    if (count != 0 && near < pool->blocks - 1 && is_free_bit(pool, near + 1)) {
        uint32_t end = find_bit(pool, near + 1, false);
        taken = end - near - 1 < count ? end - near - 1 : count;
        take_run(pool, near + 1, taken, claim, blocks_out);
    }
    for (int pass = 0; pass < 16 && taken < count; pass++) {
        uint32_t length, first = best_run(pool, count - taken, &length);
        length = length < count - taken ? length : count - taken;
        take_run(pool, first, length, claim, blocks_out + taken);
        taken += length;
    }
    /* What is left of a large one in a scattered pool: ever shorter runs, at most 33 passes more.
     */
    uint32_t run_min = count - taken;
    while (taken < count) {
        taken += take_runs(pool, count - taken, run_min, claim, blocks_out + taken);
        run_min = (run_min + 1) / 2;
    }
    return PD_OK;
}

void pd_kv_pool_claim(pd_kv_pool *pool, pd_block block, pd_claim claim)
{
    pd_assert(block < pool->blocks);
    block_record *record = &pool->records[block];
    pd_block_state before = state_of(record);
    pd_assert(before != PD_BLOCK_FREE);
    pd_assert(record->claims[claim] != UINT32_MAX);
    /* what may still be written into must not be anybody's known content */
    pd_assert(claim != PD_CLAIM_QUARANTINED || !record->cached);
    record->claims[claim]++;
    recount(pool, block, before);
}

void pd_kv_pool_unclaim(pd_kv_pool *pool, pd_block block, pd_claim claim)
{
    pd_assert(block < pool->blocks);
    block_record *record = &pool->records[block];
    pd_block_state before = state_of(record);
    pd_assert(record->claims[claim] != 0);
    record->claims[claim]--;
    recount(pool, block, before);
}

void pd_kv_pool_set_cached(pd_kv_pool *pool, pd_block block, bool cached)
{
    pd_assert(block < pool->blocks);
    block_record *record = &pool->records[block];
    pd_block_state before = state_of(record);
    pd_assert(record->cached != cached);
    pd_assert(!cached || before == PD_BLOCK_LEASED || before == PD_BLOCK_RUNNING);
    record->cached = cached;
    recount(pool, block, before);
}
