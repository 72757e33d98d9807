#pragma once

/* common/kv/seal.h - proof that a block's bytes are the ones meant for this place.
 *
 * A seal covers the valid tokens of one block in one layer group, for a range of KV heads: the sum
 * (modulo 2^64) over tiles of a mix of the tile's content hash with a key of where the tile
 * belongs. A sum has no order, so that many threads can make it; and the seal of heads a..c is the
 * seal of a..b plus that of b..c, so that a worker with another split checks just its slice. It
 * finds mistakes (late writes, wrong block, wrong request, torn transfers), not attackers.
 *
 * A tile is as many tokens of one layer, head and half (K or V) as fit into 1 KiB, at least one;
 * its content hash is common/kv/tile_sum over the tokens that are valid, with their scales where
 * the layout has them, and knows no key. So the
 * expensive part can be made once, where K and V are written and their bytes lie in the cache: a
 * pd_seal_tiles keeps those hashes beside the pool (8 bytes a KiB), and a seal is then a keyed sum
 * over 8 bytes in 1,024. Such a seal also vouches for what was computed, where one made from the
 * bytes vouches for whatever lies in the pool by then.
 *
 * Reads the pool only. Any thread, while nobody writes the block's layer group, in the pool or in
 * the tiles; what hands a block from thread to thread (a group that is announced, a check that is
 * answered) also orders its tiles. */

#include "common/kv/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pd_seal_place {
    uint64_t request;
    uint32_t epoch;
    uint32_t group;
    uint32_t block_index;  /* of the request: 0 is its first block */
    uint32_t valid_tokens; /* 1 .. block_tokens: the rest of the block is not covered */
    uint32_t head_first;   /* number in the model of the pool's head 0; 0 without a split */
    uint64_t layout_fingerprint;
} pd_seal_place;

/* Where a seal belongs, as one number. A seal is the sum (modulo 2^64) over heads h (numbered in
 * the model), layers l of the group, halves (K 0, V 1) and the tiles i of a half that hold valid
 * tokens of
 *
 *     mix(content ^ mix((key ^ mix(h * 2^32 + 2 l + half)) + i))
 *
 * where mix is pd_mix64; what cannot call this file (a GPU) makes it from the key alone. */
uint64_t pd_seal_place_key(const pd_seal_place *place);

/* How a half (K or V of one layer and head of a block) is cut into tiles. */
typedef struct pd_seal_tiling {
    uint32_t tokens;    /* of a tile */
    uint32_t tiles;     /* of a half; the last may have fewer tokens */
    uint32_t row_words; /* 64-bit, of a token; the last may be part of one, then zeros fill it */
} pd_seal_tiling;

pd_seal_tiling pd_seal_tiling_of(uint64_t token_bytes, uint32_t block_tokens);

/* Content hashes of a pool's tiles: for each layer and head of each block how many tokens from its
 * start they cover, and the hashes. */
typedef struct pd_seal_tiles pd_seal_tiles;

/* Nothing is covered. layout is copied. PD_E_NOMEM. */
PD_CHECKED pd_status pd_seal_tiles_create(const pd_kv_layout *layout, pd_seal_tiles **tiles_out);
/* The same in memory of the caller's, 8-byte aligned, which outlives it: for processes that share a
 * pool, each with a table over the same memory. Zeroed before the first of them. */
PD_CHECKED pd_status pd_seal_tiles_create_over(const pd_kv_layout *layout, void *memory,
                                               pd_seal_tiles **tiles_out);
uint64_t pd_seal_tiles_room(const pd_kv_layout *layout); /* bytes of that memory */
void pd_seal_tiles_destroy(pd_seal_tiles *tiles);        /* NULL is fine */
uint64_t pd_seal_tiles_bytes(const pd_seal_tiles *tiles);

/* K and V of tokens [from, to) of the block have just been written to the pool, for one layer and
 * head: their hashes are added. From then on to tokens are covered; when from lies past what was
 * covered (others wrote what is between), nothing changes, and that part is hashed when it is asked
 * for. Threads may do it at once for different blocks, layers or heads. */
void pd_seal_tiles_wrote(pd_seal_tiles *tiles, const void *pool, uint32_t layer, pd_block block,
                         uint32_t head, uint32_t from, uint32_t to);
/* Tokens that are covered. */
uint32_t pd_seal_tiles_covered(const pd_seal_tiles *tiles, uint32_t layer, pd_block block,
                               uint32_t head);

/* The seal of heads [head_from, head_to) of the pool's block, from the bytes. */
uint64_t pd_seal_compute(const pd_kv_layout *layout, const void *pool, pd_block block,
                         const pd_seal_place *place, uint32_t head_from, uint32_t head_to);
/* One seal for each of slices slices of the pool's heads: slice s covers heads
 * [s * kv_heads / slices, (s + 1) * kv_heads / slices). tiles: used where they cover the block, the
 * rest comes from the bytes; NULL: all of it. */
void pd_seal_of(const pd_kv_layout *layout, const void *pool, const pd_seal_tiles *tiles,
                pd_block block, const pd_seal_place *place, uint32_t slices, uint64_t *seals_out);
/* PD_E_MISMATCH when the bytes are not the sealed ones; not logged, the caller knows the request.
 */
PD_CHECKED pd_status pd_seal_verify(const pd_kv_layout *layout, const void *pool, pd_block block,
                                    const pd_seal_place *place, uint32_t head_from,
                                    uint32_t head_to, uint64_t seal);
/* One seal of many: of heads [head_from, head_to) of the pool's block. */
typedef struct pd_seal_item {
    pd_block block;
    uint32_t head_from, head_to;
    pd_seal_place place;
} pd_seal_item;

/* seals_out[i] of items[i]; tiles as in pd_seal_of. */
void pd_seal_items(const pd_kv_layout *layout, const void *pool, const pd_seal_tiles *tiles,
                   const pd_seal_item *items, uint32_t count, uint64_t *seals_out);
/* Compares heads that somebody else wrote with their seals, always by their bytes. Whatever tiles
 * (may be NULL) said of them is forgotten; the valid tokens of those that match are covered.
 * PD_E_MISMATCH: *bad_out is the first item that does not match, where it ends. */
PD_CHECKED pd_status pd_seal_check_items(const pd_kv_layout *layout, const void *pool,
                                         pd_seal_tiles *tiles, const pd_seal_item *items,
                                         uint32_t count, const uint64_t *seals, uint32_t *bad_out);

/* Who makes and checks the seals of a pool, wherever it lies: functions as above, from any thread.
 * Errors besides PD_E_MISMATCH: the seals cannot be had (logged). */
typedef struct pd_sealer {
    void *ctx;
    pd_status (*seal)(void *ctx, const pd_seal_item *items, uint32_t count, uint64_t *seals_out);
    pd_status (*check)(void *ctx, const pd_seal_item *items, uint32_t count, const uint64_t *seals,
                       uint32_t *bad_out);
} pd_sealer;

/* The sealer of a pool in host memory; pool and what it points to must outlive it. */
typedef struct pd_host_pool {
    const pd_kv_layout *layout;
    const void *pool;
    pd_seal_tiles *tiles; /* may be NULL */
} pd_host_pool;
pd_sealer pd_host_sealer(pd_host_pool *pool);

/* Compares a block that somebody else wrote with its seals, always by its bytes. Whatever tiles
 * (may be NULL) said of it is forgotten; the valid tokens of slices that match are covered.
 * PD_E_MISMATCH as above, at the first slice that does not match. */
PD_CHECKED pd_status pd_seal_check(const pd_kv_layout *layout, const void *pool,
                                   pd_seal_tiles *tiles, pd_block block, const pd_seal_place *place,
                                   uint32_t slices, const uint64_t *seals);

#ifdef __cplusplus
}
#endif
