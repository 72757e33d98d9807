#pragma once

/* decode-worker/pressure.h - who may have the pool's last blocks.
 *
 * A lease promises the blocks of what lands; a running sequence takes more as it grows. So that the
 * sum of what all may come to need is not set aside for answers that end early, a newcomer is
 * admitted by the predicted peak: all sequences grow by a token a step until their predicted ends,
 * and give back what is theirs alone. Predictions fail; then somebody gives way:
 *
 *   - Sequences are ranked: higher priority first, then the longer admitted.
 *   - Before each step, what all of them need within a horizon is compared with the room there is
 *     and with what those that gave way already will bring back. While it is not enough, the last
 *     in rank gives way; the first never does. So whoever is first gets on, and no two can make
 *     way for each other.
 *   - Who gives way stands still with its blocks. When room comes back before its patience ends it
 *     goes on; nobody was told. Else its router is told, and from then on it waits for the router
 *     alone: to be moved, to be ended with its blocks kept as cache, or to be failed at a deadline.
 *   - The horizon is the time that takes. A sequence that finds no block for its next token stands
 *     still for that step only, whatever its rank.
 *
 * Promised room is never given to growth, so that a bind never fails and no prefill is in vain. A
 * promise ends by itself (bound, cancelled or run out), and what it becomes is ranked like the
 * rest.
 *
 * Pure: numbers in, decisions out. One thread. */

#include "common/base/status.h"

#include <stdint.h>

/* One sequence, as far as room is concerned. */
typedef struct decode_load {
    void *who; /* the caller's */
    int32_t priority;
    uint64_t order;     /* of admission: lower is longer admitted; unique */
    uint32_t tokens;    /* positions that hold KV, or will when it has landed */
    uint32_t blocks;    /* claimed or promised for it */
    uint32_t own;       /* of these, what comes back when it ends: not another's too */
    uint32_t predicted; /* more positions until its predicted end */
    uint32_t possible;  /* more positions until it can only have ended */
    bool standing;      /* gave way: does not grow, its own blocks come back */
    bool gives_way;     /* out: of those that run, it has to stand still */
} decode_load;

/* True when a ranks before b. */
bool decode_ranks_before(const decode_load *a, const decode_load *b);
/* In rank order, first to last. In place, no memory. */
void decode_pressure_rank(decode_load *loads, uint32_t count);

/* The most blocks that are ever claimed at once from now to the predicted end of all: of claimed
 * blocks now (promised ones included, shared ones once) and the growth of each load, if all step
 * together. Those standing keep what they have. Changes the order of loads. */
uint64_t decode_pressure_peak(decode_load *loads, uint32_t count, uint32_t claimed,
                              uint32_t block_tokens);
/* Steps until the predicted peak with a newcomer (the last load) is within limit blocks, when it is
 * not now: 0 when nothing predicted would make it so. Changes the order of loads. */
uint32_t decode_pressure_wait(decode_load *loads, uint32_t count, uint32_t claimed, uint32_t limit,
                              uint32_t block_tokens);

/* Blocks that a load needs beyond its own for `steps` more tokens (or to its end). */
uint32_t decode_pressure_need(const decode_load *load, uint32_t steps, uint32_t block_tokens);
/* The horizon in tokens for steps of that length. */
uint32_t decode_pressure_horizon(double step_ms, uint32_t block_tokens);

/* loads in rank order, those that stand included. Marks gives_way on those that have to stand still
 * so that what is left gets on for `steps` tokens with room blocks; the first that does not stand
 * never does. Returns what the others then need. */
uint32_t decode_pressure_relieve(decode_load *loads, uint32_t count, uint32_t room, uint32_t steps,
                                 uint32_t block_tokens);
/* True when one that stands may go on: what the others need for twice `steps`, and it with them, is
 * there now, without what those that stand may bring back. */
bool decode_pressure_may_go_on(const decode_load *loads, uint32_t count, const decode_load *load,
                               uint32_t room, uint32_t steps, uint32_t block_tokens);
