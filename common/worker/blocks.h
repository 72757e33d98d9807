#pragma once

/* common/worker/blocks.h - a worker's KV blocks (pool and prefix cache), and the word about them
 * to routers: ledger, events, snapshots.
 *
 * Pure; one thread. */

#include "common/kv/prefix_cache.h"
#include "common/worker/role.h"
#include "common/worker/routers.h"

typedef struct pd_blocks {
    pd_kv_pool *pool;
    pd_prefix_cache *cache;
    bool keep;        /* finished blocks stay for reuse */
    uint32_t checked; /* ticks since the slow check */
} pd_blocks;

/* Errors: PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status pd_blocks_init(pd_blocks *blocks, uint32_t count, bool keep);
void pd_blocks_fini(pd_blocks *blocks);

/* The parent of a sequence's first block, as far as a worker's cache is concerned: routers put
 * model and salt into the first block's hash. */
#define PD_BLOCKS_ROOT ((pd_hash128){0, 0})

/* Makes full, computed, claimed blocks known; nothing without keep. spare: as
 * pd_prefix_cache_insert has it; UINT32_MAX where no room is promised. */
void pd_blocks_remember(pd_blocks *blocks, const pd_hash128 *hashes, const pd_block *sequence,
                        uint32_t count, uint32_t spare);
pd_ledger pd_blocks_ledger(const pd_blocks *blocks);
/* The ledger's sum, and now and then every block: a broken one is our own bug (pd_assert). */
void pd_blocks_tick(pd_blocks *blocks);

/* Sends what has changed to every live router. */
void pd_blocks_publish(pd_blocks *blocks, const pd_role_options *options, const pd_role_sink *sink,
                       const pd_routers *routers);
/* Sends the whole cache to one router; its messages carry the number of the last event that it
 * includes in first_sequence. Publish first. */
void pd_blocks_snapshot(pd_blocks *blocks, const pd_role_options *options, const pd_role_sink *sink,
                        uint64_t router);
