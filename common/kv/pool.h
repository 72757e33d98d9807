#pragma once

/* common/kv/pool.h - the blocks of a KV pool: who claims each, and the ledger of them all.
 *
 * A block may be claimed several times (a shared prefix), by leases, by running sequences, or by a
 * quarantine: a sender that was cut off may still write into it. It may also be known to the prefix
 * cache. It counts once in the ledger, by its strongest claim:
 *
 *   quarantined > running > leased > cached (no claim, its content is known) > free
 *
 * Most users want common/kv/prefix_cache.h, which keeps cache and claims in step. All memory is
 * taken at creation. Pure: no I/O, no clock. One thread at a time. */

#include "common/kv/layout.h"

typedef struct pd_kv_pool pd_kv_pool;

/* In order of strength. */
typedef enum pd_claim {
    PD_CLAIM_LEASED,
    PD_CLAIM_RUNNING,
    PD_CLAIM_QUARANTINED,
    PD_CLAIMS,
} pd_claim;

typedef enum pd_block_state {
    PD_BLOCK_FREE,
    PD_BLOCK_CACHED,
    PD_BLOCK_LEASED,
    PD_BLOCK_RUNNING,
    PD_BLOCK_QUARANTINED,
    PD_BLOCK_STATES,
} pd_block_state;

/* Blocks in each state; total is the sum of the others, always. */
typedef struct pd_kv_ledger {
    uint32_t total;
    uint32_t free, cached, leased, running, quarantined;
} pd_kv_ledger;

/* Errors: PD_E_INVALID (blocks is 0 or PD_BLOCK_NONE), PD_E_NOMEM. */
PD_CHECKED pd_status pd_kv_pool_create(uint32_t blocks, pd_kv_pool **pool_out);
void pd_kv_pool_destroy(pd_kv_pool *pool);

uint32_t pd_kv_pool_blocks(const pd_kv_pool *pool);
pd_block_state pd_kv_pool_state(const pd_kv_pool *pool, pd_block block);
/* Claims of all kinds on the block. */
uint32_t pd_kv_pool_claims(const pd_kv_pool *pool, pd_block block);
pd_kv_ledger pd_kv_pool_ledger(const pd_kv_pool *pool);
/* Counts every block anew and compares with the running counts. PD_E_INTERNAL, logged with both
 * sides, when they differ. */
PD_CHECKED pd_status pd_kv_pool_check(const pd_kv_pool *pool);

/* Claims count free blocks, in runs of neighbours where the pool has them; near (or PD_BLOCK_NONE)
 * is a block whose successor is preferred as the first. PD_E_OVERLOAD: fewer are free; nothing was
 * claimed. */
PD_CHECKED pd_status pd_kv_pool_take(pd_kv_pool *pool, uint32_t count, pd_claim claim,
                                     pd_block near, pd_block *blocks_out);
/* Adds a claim to a block that is not free. */
void pd_kv_pool_claim(pd_kv_pool *pool, pd_block block, pd_claim claim);
/* Ends a claim. The block is free again when it was the last one and the cache does not know the
 * block. */
void pd_kv_pool_unclaim(pd_kv_pool *pool, pd_block block, pd_claim claim);
/* The prefix cache knows (or forgets) the content of a block. Only a claimed block becomes known.
 */
void pd_kv_pool_set_cached(pd_kv_pool *pool, pd_block block, bool cached);
bool pd_kv_pool_is_cached(const pd_kv_pool *pool, pd_block block);
