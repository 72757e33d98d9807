#pragma once

/* kernels/cuda/attention.h - what the attention kernels share: the order of every sum, and the
 * pieces of a warp's work. Included by attention*.cu alone.
 *
 * The order. A row's context is cut at absolute positions, the same for every row, batch and chunk:
 *   chunk     16 positions: the k of one mma, and never across a KV block
 *   run       64 positions: one softmax; its weighted V is one chain of mma over its chunks
 *   split    256 positions (KERN_SPLIT_TOKENS): its runs folded in order
 *   row      its splits folded in order, then divided by the sum
 * What a state (largest score, sum, weighted V) is folded into what came before by, attention_fold,
 * is one formula everywhere (as kernels/ref/ops.c merges splits). Decode gives each run of a split
 * to a warp and each split to a block; prefill walks them with one warp. Neither changes a bit:
 * - a row of an mma's result depends on that row of A alone, and a masked position adds p * v with
 *   p = 0 and v finite: an exact zero (prefill takes care that it is, see attention_prefill.cu);
 * - a run that lies wholly after a row's position folds in as x * 1 + 0 * e;
 * - the sign of zero, which such a sum may lose, is taken off at the end.
 *
 * Numbers. K and V are the pool's f16, exactly. A query head (times scale) is brought to
 * [2^14, 2^15) by a power of two and split into two f16, high + low: 22 bits of each element, or
 * 2^-40 of the largest. Probabilities, at most 1, are scaled by 2^14 and split likewise.
 *
 * Fragments (PTX ISA, mma.m16n8k16), with quad = lane / 4 and pair = lane % 4. The 16 rows of an
 * mma are 8 rows of ours, a group: rows 0 to 7 their high parts, 8 to 15 their low parts. So a lane
 * holds of row quad, columns 2 * pair and + 1, the sums of both parts, and adds them. For up to 8
 * query heads the low parts cost no mma. Columns are positions, then head dimensions; the sums of
 * two neighbouring tiles of scores are, split, the A of the product with V.
 */

#include "kernels/cuda/launch.h"
#include "kernels/cuda/words.h"
#include "kernels/ops.h"

#define ATTENTION_CHUNK      16u
#define ATTENTION_RUN        64u
#define ATTENTION_SPLIT      ((uint32_t)KERN_SPLIT_TOKENS)
#define ATTENTION_RUN_CHUNKS (ATTENTION_RUN / ATTENTION_CHUNK)
#define ATTENTION_SPLIT_RUNS (ATTENTION_SPLIT / ATTENTION_RUN)

/* Everything a kernel is told. Strides in bytes unless said. */
typedef struct attention_args {
    const float *qkv; /* row r at qkv + r * qkv_stride (floats) */
    uint64_t qkv_stride;
    const uint8_t *pool;                            /* K of the layer, block 0, head 0 */
    uint64_t block_stride, head_stride, half_bytes; /* V lies half_bytes on */
    uint32_t block_tokens;
    uint32_t kv_heads;
    uint32_t heads, heads_each; /* of the model (rank), of a KV head */
    uint32_t head_blocks,
        heads_in_block; /* a KV head's heads over blocks; the last may have less */
    const uint32_t *position, *table;
    const pd_block *blocks;
    const uint32_t *tile_row, *tile_rows;
    const uint32_t *item_row, *row_item;
    cu_run run; /* decode: what the launch has to do */
    float scale;
    uint32_t splits; /* prefill: that have room in the scratch */
    /* prefill: a block computes one split (its blockIdx.x), not all in turn, but for a tile that
     * has one split alone */
    bool part_only;
    float *out; /* [row][heads][head_dim] */
    /* A split's weighted V: [place][head_dim], and its largest score and sum: [place][2]. A place
     * is [row][heads][splits] in prefill, [heads][item of the run] in decode: a row's splits are
     * neighbours. */
    float *part, *stats;
    uint32_t *live; /* prefill: [tile][kv_heads] the tile's rows that see numbers alone */
} attention_args;

/* attention_decode.cu, attention_prefill.cu. PD_E_UNSUPPORTED: head_dim has no kernel. */
pd_status attention_decode(gpu_stream *stream, const attention_args *args, uint32_t head_dim,
                           uint32_t kv_heads);
pd_status attention_prefill(gpu_stream *stream, const attention_args *args, uint32_t head_dim,
                            uint32_t kv_heads, uint32_t tiles);
/* Blocks over which a KV head's query heads are spread. */
uint32_t attention_decode_blocks(uint32_t head_dim, uint32_t heads_each);
uint32_t attention_prefill_blocks(uint32_t head_dim, uint32_t heads_each);

/* Chunks lie in shared memory as [16 positions][head_dim] f16, rows an odd number of 16-byte units
 * apart: the 8 rows of a matrix that ldmatrix reads at once are in 8 different bank groups, and
 * unlike with a swizzle every address is a lane's base and a constant. */
template <int D> struct attention_shape {
    static const uint32_t row_bytes = (D / 8 | 1) * 16;
    static const uint32_t chunk_bytes = ATTENTION_CHUNK * row_bytes;
    static const uint32_t units = D / 16; /* copies of a warp (32 x 16 bytes) to a chunk */
    static const uint32_t steps = D / 16; /* mma along head_dim */
    static const uint32_t tiles = D / 8;  /* columns of 8 across head_dim */
};

/* Copies of a chunk by a warp, a unit each: 16 bytes a lane, one after another. Where a row is so
 * many lanes that they divide a warp, a lane's place in a unit is apart from the unit's: then all
 * addresses are a lane's base and a constant. */
template <int D> struct attention_copy {
    static const uint32_t pieces = D / 8; /* 16 bytes each, of a row */
    static const bool apart = 32 % pieces == 0;
    static const uint32_t rows = apart ? 32 / pieces : 1; /* of a unit */
};

/* What a lane adds to a chunk's place in shared memory, once. */
template <int D> CU_DEVICE uint32_t attention_copy_lane(uint32_t lane)
{
    if (!attention_copy<D>::apart)
        return 0;
    return lane / attention_copy<D>::pieces * attention_shape<D>::row_bytes +
           lane % attention_copy<D>::pieces * 16;
}

/* chunk: with attention_copy_lane; global: with 16 * lane. Rows from `valid` on are filled with
 * zeros and not read: they may hold anything, NaN too. */
template <int D>
CU_DEVICE void attention_copy_unit(uint8_t *chunk, const uint8_t *global, uint32_t unit,
                                   uint32_t lane, uint32_t valid)
{
    const uint32_t pieces = attention_copy<D>::pieces, rows = attention_copy<D>::rows;
    const uint32_t row_bytes = attention_shape<D>::row_bytes;
    uint32_t at = unit * 32 + lane;

    if (attention_copy<D>::apart)
        /* wavefronts 2: the padding that ldmatrix needs lies between eight lanes' rows of 64 bytes
         */
        cu_async_16(chunk + unit * rows * row_bytes, global + unit * 512,
                    unit * rows + lane / pieces < valid);
    else
        /* wavefronts 1.6: the same padding, where a row ends among eight lanes */
        cu_async_16(chunk + at / pieces * row_bytes + at % pieces * 16, global + unit * 512,
                    at / pieces < valid);
}

/* high + low = the pair, to 22 bits. */
CU_DEVICE void attention_split_pair(float even, float odd, uint32_t *high, uint32_t *low)
{
    uint32_t pair = cu_pack_f16(even, odd);

    *high = pair;
    *low = cu_pack_f16(even - cu_f16_to_f32((uint16_t)pair),
                       odd - cu_f16_to_f32((uint16_t)(pair >> 16)));
}

CU_DEVICE float attention_quad_max(float value)
{
    value = fmaxf(value, cu_shuffle_xor(CU_ALL, value, 1));
    return fmaxf(value, cu_shuffle_xor(CU_ALL, value, 2));
}

CU_DEVICE float attention_quad_sum(float value)
{
    value = value + cu_shuffle_xor(CU_ALL, value, 1);
    return value + cu_shuffle_xor(CU_ALL, value, 2);
}

/* A lane's pair of a query head, of the i-th 8 columns. NULL: zeros. */
CU_DEVICE float2 attention_query_pair(const float *row, uint32_t i, float scale, uint32_t lane)
{
    float2 pair = {0, 0};

    if (row != NULL)
        pair = cu_load<float2>(row + i * 8 + lane % 4 * 2);
    pair.x *= scale;
    pair.y *= scale;
    return pair;
}

/* What brings a query head to [2^14, 2^15), and (factor) its scores back: both powers of two, both
 * normal numbers. */
template <int D>
CU_DEVICE float attention_query_multiplier(const float *row, float scale, uint32_t lane,
                                           float *factor)
{
    float largest = 0;

#pragma unroll
    for (uint32_t i = 0; i < D / 8; i++) {
        float2 pair = attention_query_pair(row, i, scale, lane);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    uint32_t power = cu_bits(attention_quad_max(largest)) >> 23;
    uint32_t up = 268 - power;
    up = up < 253 ? up : 253;
    *factor = cu_float((254 - up) << 23);
    return cu_float(up << 23);
}

/* A step's A fragment of a group; row, multiplier: of its row quad. */
CU_DEVICE void attention_query_step(const float *row, uint32_t step, float scale, float multiplier,
                                    uint32_t lane, uint32_t a[4])
{
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        float2 pair = attention_query_pair(row, step * 2 + i, scale, lane);
        attention_split_pair(pair.x * multiplier, pair.y * multiplier, &a[i * 2], &a[i * 2 + 1]);
    }
}

/* What ldmatrix reads for two neighbouring tiles of B, from a lane's place in a chunk: of K rows
 * are columns of B, of V they are rows (transposed on the way). */
template <int D> CU_DEVICE uint32_t attention_key_lane(uint32_t lane)
{
    return ((lane & 7) + (lane >> 4) * 8) * attention_shape<D>::row_bytes + (lane >> 3 & 1) * 16;
}

template <int D> CU_DEVICE uint32_t attention_value_lane(uint32_t lane)
{
    return ((lane & 7) + (lane >> 3 & 1) * 8) * attention_shape<D>::row_bytes + (lane >> 4) * 16;
}

/* A lane's scores of a run, of one group, before they are multiplied by the factor. */
#define ATTENTION_RUN_TILES (ATTENTION_RUN / 8)
typedef struct attention_scores {
    float s[ATTENTION_RUN_TILES][2];
} attention_scores;

/* Scores of positions past the row's own become -inf. last: how many positions of the run it sees,
 * less one. */
CU_DEVICE void attention_mask(attention_scores *scores, int32_t last, uint32_t lane)
{
#pragma unroll
    for (uint32_t tile = 0; tile < ATTENTION_RUN_TILES; tile++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            if ((int32_t)(tile * 8 + lane % 4 * 2 + i) > last)
                scores->s[tile][i] = -INFINITY;
}

/* Scores to probabilities times 2^14, as A fragments by chunk; the largest score (of all that are
 * not masked) and the sum of the probabilities. A masked score gives exp's lower bound, 2.6e-34
 * here: nothing in f16, and lost in any sum that matters, since the largest adds 2^14. */
CU_DEVICE void attention_softmax(const attention_scores *scores, float factor,
                                 uint32_t p[ATTENTION_RUN_CHUNKS][4], float *largest_out,
                                 float *sum_out)
{
    float largest = -INFINITY, sum = 0;

#pragma unroll
    for (uint32_t tile = 0; tile < ATTENTION_RUN_TILES; tile++)
        largest = fmaxf(largest, fmaxf(scores->s[tile][0], scores->s[tile][1]));
    largest = attention_quad_max(largest) * factor;
#pragma unroll
    for (uint32_t tile = 0; tile < ATTENTION_RUN_TILES; tile++) {
        uint32_t *at = &p[tile / 2][tile % 2 * 2];
        /* the factor is a power of two: one rounding, as of a difference */
        float even = cu_exp(fmaf(scores->s[tile][0], factor, -largest)) * 16384.0f;
        float odd = cu_exp(fmaf(scores->s[tile][1], factor, -largest)) * 16384.0f;
        sum += even;
        sum += odd;
        attention_split_pair(even, odd, &at[0], &at[1]);
    }
    *largest_out = largest;
    *sum_out = attention_quad_sum(sum);
}

/* (largest, sum) takes in another state's; weighted V is then keep * v + take * other's v. */
CU_DEVICE void attention_fold(float *largest, float *sum, float other_largest, float other_sum,
                              float *keep, float *take)
{
    float both = fmaxf(*largest, other_largest);

    *keep = cu_exp(*largest - both);
    *take = cu_exp(other_largest - both);
    *sum = fmaf(other_sum, *take, *sum * *keep);
    *largest = both;
}

CU_DEVICE float attention_fold_value(float value, float other, float keep, float take)
{
    return fmaf(other, take, value * keep);
}

/* The result of a row's whole state; + 0 makes every zero the same. */
CU_DEVICE float attention_finish(float value, float inverse)
{
    return fmaf(value, inverse, 0.0f);
}

/* Where a chunk's K lies, from its first token. */
CU_DEVICE uint64_t attention_chunk_offset(const attention_args *args, uint32_t table,
                                          uint32_t token, uint32_t token_bytes)
{
    uint32_t block = args->blocks[table + token / args->block_tokens];

    return block * args->block_stride + token % args->block_tokens * (uint64_t)token_bytes;
}
