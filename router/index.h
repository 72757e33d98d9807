#pragma once

/* router/index.h - which worker holds which KV blocks, as far as their events tell.
 *
 * A set of block hashes a worker (a hash covers a block's whole prefix). Events carry sequence
 * numbers; a gap makes the set stale: it answers "nothing" until a snapshot has replaced it. What
 * the index says is a hint for pricing; the truth is what a worker's lease reply says.
 *
 * Memory: at most blocks_max entries a worker, as declared when it registered. Pure, one thread.
 *
 * Chosen: a set a worker, instead of one table from hash to workers. Forgetting a worker is then
 * freeing its set, memory is bounded by the pools that exist, and a lookup costs a hash probe for
 * each worker that holds nothing of the prompt, about log2(blocks) for one that does. */

#include "common/wire/messages.h"

typedef struct router_index router_index;

typedef struct router_index_counters {
    uint64_t events, gaps, snapshots, dropped; /* dropped: over a worker's blocks_max */
} router_index_counters;

/* Slots 0 .. slots_max - 1 name the workers. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status router_index_create(uint32_t slots_max, router_index **index_out);
void router_index_destroy(router_index *index);

/* A worker begins: nothing known, stale until its first snapshot. */
void router_index_open(router_index *index, uint32_t slot, uint64_t incarnation,
                       uint32_t blocks_max);
void router_index_close(router_index *index, uint32_t slot);

/* Takes events in. A snapshot's first_sequence is the number of the last event that it includes.
 * Of another incarnation: ignored. Memory that runs out makes the set stale. */
void router_index_apply(router_index *index, uint32_t slot, const pd_msg_kv_events *events);

/* The worker says that the last event it sent has this number. Two calls in a row without the
 * events having come in between are a gap. */
void router_index_check(router_index *index, uint32_t slot, uint64_t last_sequence);

/* True when a snapshot should be asked for now; not again before again_ns have passed. */
bool router_index_wants_snapshot(router_index *index, uint32_t slot, uint64_t now_ns,
                                 uint64_t again_ns);

/* How many of the first blocks the worker holds: a binary search, since a worker evicts leaves
 * first, so whoever holds block i holds all before it. */
uint32_t router_index_prefix(const router_index *index, uint32_t slot, const pd_hash128 *hashes,
                             uint32_t count);

uint32_t router_index_blocks(const router_index *index, uint32_t slot);
bool router_index_synced(const router_index *index, uint32_t slot);
router_index_counters router_index_counters_of(const router_index *index);
