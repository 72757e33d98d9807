#pragma once

/* common/kv/seal.h - proof that a block's bytes are the ones meant for this place.
 *
 * A seal covers the valid tokens of one block in one layer group, for a range of KV heads: the sum
 * (modulo 2^64) of a hash of every tile of about 1 KiB, each keyed by where the tile belongs. A
 * sum has no order, so that many threads can make it; and the seal of heads a..c is the seal of
 * a..b plus that of b..c, so that a worker with another split checks just its slice. It finds
 * mistakes (late writes, wrong block, wrong request, torn transfers), not attackers.
 *
 * Reads the pool only; any thread, while nobody writes the block. */

#include "common/kv/layout.h"

typedef struct pd_seal_place {
    uint64_t request;
    uint32_t epoch;
    uint32_t group;
    uint32_t block_index;  /* of the request: 0 is its first block */
    uint32_t valid_tokens; /* 1 .. block_tokens: the rest of the block is not covered */
    uint32_t head_first;   /* number in the model of the pool's head 0; 0 without a split */
    uint64_t layout_fingerprint;
} pd_seal_place;

/* The seal of heads [head_from, head_to) of the pool's block. */
uint64_t pd_seal_compute(const pd_kv_layout *layout, const void *pool, pd_block block,
                         const pd_seal_place *place, uint32_t head_from, uint32_t head_to);
/* PD_E_MISMATCH when the bytes are not the sealed ones; not logged, the caller knows the request.
 */
PD_CHECKED pd_status pd_seal_verify(const pd_kv_layout *layout, const void *pool, pd_block block,
                                    const pd_seal_place *place, uint32_t head_from,
                                    uint32_t head_to, uint64_t seal);
