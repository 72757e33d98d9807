#pragma once

/* kernels/cuda/room.h - whether a model's device memory fits, said by holder before any is taken.
 *
 * Memory is taken at start, in three steps: weights and what steps work in, the KV pool, then what
 * is made for the pool's layout. Each step asks first, with what later steps will take at most, so
 * that a pool that leaves no room for its own hashes is refused before it is filled. Any thread. */

#include "kernels/cuda/gpu.h"

/* Bytes; 0: none, or not known yet. */
typedef struct cu_room {
    uint64_t weights, steps; /* steps: activations, logits, scratch */
    uint64_t uploads;        /* a step's description */
    uint64_t pool, hashes;   /* hashes: of the pool, for seals */
} cu_room;

/* Hashes of a pool of so many bytes, at most: whatever its blocks are. */
uint64_t cu_room_hashes_most(uint64_t pool_bytes, uint64_t token_bytes);

/* PD_E_NOMEM (logged, with every holder and what is free now) when all of it, less the `held` bytes
 * that are taken already, is more than what is free. */
PD_CHECKED pd_status cu_room_check(gpu *g, const char *backend, const cu_room *room, uint64_t held);
