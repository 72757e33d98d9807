#pragma once

/* common/kv/layout.h - where a head's bytes lie in a worker's KV pool.
 *
 *   [rank][layer group][block][kv head of the rank][layer in group][k, v][token][head_dim]
 *
 * With a format of one byte a value, each half (K or V of one layer and head of a block) ends with
 * its tokens' scales: [token][head_dim] codes, then [token] f32. So a scale travels, and is sealed,
 * with what it belongs to; the 16 tokens of a tile have theirs in one run of 64 bytes, on a
 * multiple of 64; and no token's scale depends on another token. kernels/kv_row.h has the numbers.
 *
 * A rank of a tensor-parallel worker has kv_heads / ranks neighbouring heads, and its part of the
 * pool is one run. A layer group is the unit of shipping and sealing. Within a rank and a group a
 * block is one contiguous run, neighbouring blocks are one longer run, and a KV head's slice of a
 * block is contiguous whatever the split. Readers use the strides below and assume nothing. The
 * last group may have fewer layers. Heads are numbered as in the model, whoever has them.
 * Immutable values; any thread. */

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/model_file/model_file.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint32_t pd_block; /* index into a pool, 0 .. blocks - 1 */
#define PD_BLOCK_NONE UINT32_MAX

/* Block sizes are multiples of this: attention works in tiles of 16 tokens at absolute
 * positions, and a tile never crosses a block. */
#define PD_KV_TILE_TOKENS 16

typedef struct pd_kv_layout {
    pd_dtype dtype; /* PD_F16, PD_INT8, PD_FP8_E4M3 */
    uint32_t layers, kv_heads, head_dim;
    uint32_t ranks, rank_heads; /* rank_heads: kv_heads / ranks, exactly */
    uint32_t block_tokens;
    uint32_t group_layers; /* layers a group; the last may have fewer */
    uint32_t groups;
    uint32_t blocks; /* of the pool */
    uint32_t element_bytes;
    uint32_t scale_bytes; /* of a token in a half; 0: the format has no scales */
    /* strides, bytes */
    uint64_t token_bytes; /* head_dim * element_bytes */
    uint64_t scales_at;   /* a half's scales, from its start: block_tokens * token_bytes */
    uint64_t half_bytes;  /* k to v: scales_at + block_tokens * scale_bytes */
    uint64_t layer_bytes; /* k and v of one layer and head */
    uint64_t rank_bytes;  /* a rank's part of the pool */
    uint64_t pool_bytes;
    uint64_t block_bytes_all; /* a block over all groups and ranks */
} pd_kv_layout;

typedef struct pd_kv_layout_options {
    pd_dtype dtype;
    uint32_t block_tokens;
    uint32_t group_layers; /* 0: 12 groups or more, a group's block at most about 64 KiB */
    uint64_t memory_bytes; /* of the pool; as many blocks as fit */
    uint32_t blocks_max;   /* 0: no other limit than memory */
    uint32_t ranks;        /* 0: 1 */
} pd_kv_layout_options;

/* "f16", "int8", "fp8_e4m3", as kv.dtype names them. False: no format of KV. */
bool pd_kv_dtype_of(const char *name, pd_dtype *dtype_out);
const char *pd_kv_dtype_name(pd_dtype dtype); /* of one that layouts have (pd_assert) */

/* Errors: PD_E_INVALID (block_tokens no multiple of 16, 0 or over 256; ranks that do not divide
 * kv_heads), PD_E_UNSUPPORTED (dtype), PD_E_TOO_LARGE (memory holds no block). */
PD_CHECKED pd_status pd_kv_layout_make(const pd_model_shape *shape,
                                       const pd_kv_layout_options *options,
                                       pd_kv_layout *layout_out);

uint32_t pd_kv_layout_group_layers(const pd_kv_layout *layout, uint32_t group); /* layers in it */
static inline uint32_t pd_kv_layout_group_of(const pd_kv_layout *layout, uint32_t layer)
{
    return layer / layout->group_layers;
}
/* Bytes of one block in one group, over all ranks. */
uint64_t pd_kv_layout_block_bytes(const pd_kv_layout *layout, uint32_t group);
/* Bytes of one head's slice of a block in one group. */
uint64_t pd_kv_layout_head_bytes(const pd_kv_layout *layout, uint32_t group);
/* Offset into the pool of a head's slice of (group, block): head_bytes(group) contiguous bytes; the
 * slices of the same rank's later heads follow, then its next block. */
uint64_t pd_kv_layout_head_offset(const pd_kv_layout *layout, uint32_t group, pd_block block,
                                  uint32_t kv_head);
/* The same of head 0, where all heads are one rank's (pd_assert): block_bytes(group) contiguous
 * bytes. */
uint64_t pd_kv_layout_block_offset(const pd_kv_layout *layout, uint32_t group, pd_block block);
/* Offset into the pool of K of (layer, block, head): a half as above; V's lies half_bytes on. */
uint64_t pd_kv_layout_k_offset(const pd_kv_layout *layout, uint32_t layer, pd_block block,
                               uint32_t kv_head);
/* Everything two workers must agree on to exchange blocks (not the number of blocks, nor that of
 * ranks). */
uint64_t pd_kv_layout_fingerprint(const pd_kv_layout *layout);
/* The layout of a pool with so many blocks and ranks that has the same fingerprint. kv_heads is a
 * multiple of ranks (pd_assert). */
pd_kv_layout pd_kv_layout_of_peer(const pd_kv_layout *layout, uint32_t blocks, uint32_t ranks);
/* "f16 30x3x64 blocks of 16 tokens, groups of 5 layers": for errors and status. */
void pd_kv_layout_describe(const pd_kv_layout *layout, char *text, size_t size);

#ifdef __cplusplus
}
#endif
