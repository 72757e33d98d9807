#pragma once

/* common/kv/prefix_cache.h - which blocks hold a known prefix; who may have a block next.
 *
 * Over a pd_kv_pool: block hashes (common/kv/prefix_hash.h) to blocks, a tree by parent hash. A
 * cached block's ancestors are always cached too, so that the longest prefix is a plain walk.
 * Looking up and claiming are one step: a block that was found cannot be taken by somebody else
 * before it is held.
 *
 * Blocks nobody claims stay cached until room is needed; then leaves of the tree go first, the one
 * least recently claimed first. A claimed block, and every ancestor of one, stays.
 *
 * Both workers use it so: acquire (held prefix and new blocks, all or nothing), grow, insert as
 * blocks become full, move claims as a lease becomes a running sequence, drop at the end.
 *
 * Changes are events, numbered without gaps, for those who index this cache elsewhere. All memory
 * is taken at creation. Pure: no I/O, no clock. One thread at a time. */

#include "common/kv/pool.h"

typedef struct pd_prefix_cache pd_prefix_cache;

/* events_max: changes kept for the next drain (at least 1). The pool is borrowed and must live
 * longer; from here on claims on it go through the cache.
 * Errors: PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status pd_prefix_cache_create(pd_kv_pool *pool, uint32_t events_max,
                                            pd_prefix_cache **cache_out);
void pd_prefix_cache_destroy(pd_prefix_cache *cache);

/* How many of the leading hashes are cached. A hint: nothing is claimed. */
uint32_t pd_prefix_cache_peek(const pd_prefix_cache *cache, const pd_hash128 *hashes,
                              uint32_t count);
/* Blocks that could be claimed now: free, or cached with nobody needing them. */
uint32_t pd_prefix_cache_room(const pd_prefix_cache *cache);

/* Claims the cached blocks of the leading hashes, as many as there are; returns how many. */
uint32_t pd_prefix_cache_pin(pd_prefix_cache *cache, const pd_hash128 *hashes, uint32_t count,
                             pd_claim claim, pd_block *blocks_out);
/* Claims count blocks with no content, evicting as needed (and up to a sixteenth of the pool more,
 * so that there are runs to choose from); in runs of neighbours where possible,
 * the first preferably right after near (or PD_BLOCK_NONE). PD_E_OVERLOAD: less room than that;
 * nothing was changed. */
PD_CHECKED pd_status pd_prefix_cache_alloc(pd_prefix_cache *cache, uint32_t count, pd_claim claim,
                                           pd_block near, pd_block *blocks_out);
/* Pins what is cached of hashes[hashes_count] and allocates the rest of blocks_count blocks
 * (hashes_count <= blocks_count). blocks_out[0 .. *held_out - 1] hold content. PD_E_OVERLOAD: not
 * enough room; nothing was changed. */
PD_CHECKED pd_status pd_prefix_cache_acquire(pd_prefix_cache *cache, const pd_hash128 *hashes,
                                             uint32_t hashes_count, uint32_t blocks_count,
                                             pd_claim claim, pd_block *blocks_out,
                                             uint32_t *held_out);
/* Claims blocks that the caller has a claim on once more, so that they stay when that one ends. */
void pd_prefix_cache_share(pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
                           pd_claim claim);
/* Changes claims of the caller's from one kind to another. No cached block may be quarantined. */
void pd_prefix_cache_move(pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
                          pd_claim from, pd_claim to);
/* Ends claims of the caller's. */
void pd_prefix_cache_drop(pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
                          pd_claim claim);

/* Makes known the content of the first count blocks of a sequence, all full and computed and
 * claimed by the caller (leased or running); root is the parent of the first. A hash that is
 * cached already keeps its block, and the caller's copy stays unknown. Calling again with more
 * blocks costs only the new ones. spare: what hangs from somebody else's copy that nobody claims
 * keeps that from being evicted, and its ancestors with it; where these are more than spare blocks
 * of pd_prefix_cache_room, the rest stays unknown. */
void pd_prefix_cache_insert(pd_prefix_cache *cache, pd_hash128 root, const pd_hash128 *hashes,
                            const pd_block *blocks, uint32_t count, uint32_t spare);

typedef enum pd_cache_event_kind {
    PD_CACHE_STORED,  /* hash, parent, position */
    PD_CACHE_REMOVED, /* hash */
} pd_cache_event_kind;

typedef struct pd_cache_event {
    pd_cache_event_kind kind;
    uint64_t seq; /* 1, 2, ... */
    pd_hash128 hash;
    pd_hash128 parent; /* the chain's root at position 0 */
    uint32_t position; /* in blocks from the start */
} pd_cache_event;

/* Takes up to count of the oldest events; returns how many. When more than events_max waited, the
 * newest were left out: the reader sees a gap in seq and asks for a snapshot. */
uint32_t pd_prefix_cache_drain(pd_prefix_cache *cache, pd_cache_event *events_out, uint32_t count);
/* Of the last event, drained or not; 0 when there was none. A snapshot without changes in between
 * is the state after it. */
uint64_t pd_prefix_cache_seq(const pd_prefix_cache *cache);

/* Walks all cached blocks, in no particular order: *cursor starts at 0; false at the end. The
 * event is the PD_CACHE_STORED it would be, with seq 0. No other call may come between. */
bool pd_prefix_cache_next(const pd_prefix_cache *cache, uint32_t *cursor,
                          pd_cache_event *event_out);

/* Walks everything and compares. PD_E_INTERNAL, logged, when a promise above is broken. For tests
 * and the slow tick. */
PD_CHECKED pd_status pd_prefix_cache_check(const pd_prefix_cache *cache);
