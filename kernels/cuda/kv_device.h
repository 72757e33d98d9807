#pragma once

/* kernels/cuda/kv_device.h - where a KV head's bytes lie, and the seal's arithmetic, for kernels.
 *
 * The device's side of common/kv/layout.h, common/kv/tile_sum.h and common/kv/seal.h: the same
 * places and the same numbers. A *unit* is one layer and head of a block, in the pool's order; the
 * pool, the covered counts and the tiles' hashes are arrays of units. */

#include "common/kv/seal.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/words.h"

/* A head of 512 dimensions fills a tile of 1 KiB with one token; rows of 16 dimensions are 32
 * bytes, so that every token's row is whole words and whole sectors. */
#define CU_KV_DIM_STEP 16
/* In one tile: 1 KiB of rows of 32 bytes. */
#define CU_KV_TILE_TOKENS_MAX 32

/* What kernels need beside cu_kv. */
typedef struct cu_tiling {
    uint32_t tokens, tiles; /* of a tile; of a half */
    uint32_t row_words;     /* of a token, 64-bit */
} cu_tiling;

static inline cu_tiling cu_tiling_of(const cu_kv *kv)
{
    pd_seal_tiling t = pd_seal_tiling_of(kv->token_bytes, kv->block_tokens);

    pd_assert(kv->head_dim % CU_KV_DIM_STEP == 0 && kv->head_dim <= CU_HEAD_DIM_MAX);
    pd_assert(kv->token_bytes == 2 * (uint64_t)kv->head_dim);
    pd_assert((kv->covered == NULL) == (kv->tile_sums == NULL));
    return cu_tiling{t.tokens, t.tiles, t.row_words};
}

/* Layers of a group; the last may have fewer. */
CU_DEVICE uint32_t cu_kv_layers_of(const cu_kv &kv, uint32_t group)
{
    uint32_t left = kv.layers - group * kv.group_layers;

    return left < kv.group_layers ? left : kv.group_layers;
}

/* The first unit of a block in a group; head h, layer l of the group: h * layers + l further. */
CU_DEVICE uint64_t cu_kv_block_unit(const cu_kv &kv, uint32_t group, pd_block block)
{
    uint64_t before = (uint64_t)group * kv.group_layers * kv.kv_heads * kv.blocks;

    return before + (uint64_t)block * kv.kv_heads * cu_kv_layers_of(kv, group);
}

/* Division by a number that the launcher knows, as a multiplication: n / by = n * m >> 32 where m
 * is 2^32 / by rounded up, for n * by < 2^32 (Granlund and Montgomery, "Division by Invariant
 * Integers using Multiplication", 1994). The hardware has no integer division: nvcc's takes some 20
 * steps, one after the other. */
typedef struct cu_divider {
    uint32_t by;
    uint64_t m;
} cu_divider;

static inline cu_divider cu_divider_of(uint32_t by)
{
    pd_assert(by > 0);
    return cu_divider{by, ((1ull << 32) + by - 1) / by};
}

CU_DEVICE uint32_t cu_divide(uint32_t n, const cu_divider &divider)
{
    return (uint32_t)(n * divider.m >> 32);
}

/* pd_mix64 */
CU_DEVICE uint64_t cu_mix64(uint64_t value)
{
    value ^= value >> 30;
    value *= 0xbf58476d1ce4e5b9ull;
    value ^= value >> 27;
    value *= 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

/* The sum of pd_tile_sum: (a + 2^32) (b + 2^32) = a b + 2^32 (a + b) modulo 2^64, so that a word
 * costs one 32-bit multiply-add and one addition beside the two xors. */
typedef struct cu_tile_hash {
    uint64_t products;
    uint32_t high;
} cu_tile_hash;

/* word, key: the low 32 bits first. */
CU_DEVICE void cu_hash_word(cu_tile_hash *hash, uint2 word, uint2 key)
{
    uint32_t a = word.x ^ key.x, b = word.y ^ key.y;

    hash->products += (uint64_t)a * b;
    hash->high += a + b;
}

CU_DEVICE uint64_t cu_hash_value(const cu_tile_hash *hash)
{
    return hash->products + ((uint64_t)hash->high << 32);
}

/* All lanes of a warp: the sum of their values, in every lane. */
CU_DEVICE uint64_t cu_sum_lanes(uint64_t value)
{
    for (uint32_t bits = 16; bits > 0; bits /= 2)
        value += cu_shuffle_xor(CU_ALL, value, bits);
    return value;
}

/* All lanes of a warp: the sum of their a in the lower 16 lanes, of their b in the upper ones. */
CU_DEVICE uint64_t cu_sum_lanes_two(uint64_t a, uint64_t b, uint32_t lane)
{
    uint64_t sum = lane < 16 ? a : b;

    sum += cu_shuffle_xor(CU_ALL, lane < 16 ? b : a, 16);
    for (uint32_t bits = 8; bits > 0; bits /= 2)
        sum += cu_shuffle_xor(CU_ALL, sum, bits);
    return sum;
}
