/* kernels/cuda/attention.cu - paged attention: the launcher, and the merge of splits.
 *
 * Ladder. Instructions are SASS of sm_90, of a warp and a run of 64 positions (decode: of the whole
 * kernel, both ways of every branch included), heads of 128 and up to 8 query heads a KV head; mma
 * are among them. K and V of a run are 32 KiB. No GPU has timed this; an H200 can issue 1.05e12
 * warp instructions a second (132 SMs x 4 x 1.98 GHz), 240 for each KiB at 4.3 TB/s.
 *
 * decode                                                    instructions  mma   registers
 *   1 query and probabilities as two f16, an mma each;              3792  256   155
 *     a warp a run, cp.async without block barriers
 *   2 a lane's place and the unit's apart: all addresses            2472  256   143
 *     are a base and a constant
 *   3 high and low parts are the rows of one mma: the low           1912  128   128
 *     parts cost no mma, and no moves of zeros in between
 *   Version 3 issues 60 instructions a KiB, a quarter of the slots at 4.3 TB/s; heads of 64: 1592,
 *   100 a KiB, 42 %. The low parts still cost 5 instructions a pair (of query or probabilities) to
 *   make, about 160 in all, and an add a score and column. Shared memory 68 KiB a block, 3 blocks
 *   an SM: up to 192 KiB under way, where 4.3 TB/s at 1 us need 33.
 *   9 to 16 query heads: two groups, 2808 instructions, 256 mma, 210 registers.
 *   4 also beside a chunk: a row of 32,768 positions was 8 blocks (one a KV head) that went through
 *     512 runs each, one after another; now 1,024 blocks, 2.6 waves of an H200
 * prefill (16 rows of the mma to a warp, K and V of a run shared by up to 4 warps)
 *   1 two f16 parts, an mma each; a split's state in registers      1650  256   239
 *   2 the parts are rows of one mma, sums apart (as decode);        1700  256   255
 *     what is asked for once a split lies in shared memory
 *   Of the 1700, 640 are the exponentials of 16 rows.
 * No spills on sm_80, sm_90, sm_100; heads of 256 keep a split's state in shared memory in prefill.
 */

#include "kernels/cuda/attention.h"

#include "common/base/log.h"

#define MERGE_WARPS 4u

/* A split's state as its place in a row's fold: value = keep * value + take * part. */
typedef struct merge_term {
    float keep, take, sum;
} merge_term;

/* The terms of 32 splits, one a lane; largest: of all before them, then with them. Folding by
 * attention_fold one by one needs the largest score so far before each: a prefix maximum. */
CU_DEVICE merge_term find_term(const float *stats, uint32_t split, uint32_t splits, uint32_t lane,
                               float *largest)
{
    float2 state = {-INFINITY, 0};

    if (split < splits)
        state = cu_load_once<float2>(stats + 2 * (uint64_t)split);
    float until = state.x;
    for (uint32_t by = 1; by < 32; by *= 2) {
        float other = cu_shuffle_up(CU_ALL, until, by);
        until = lane >= by ? fmaxf(until, other) : until;
    }
    until = fmaxf(until, *largest);
    float before = cu_shuffle_up(CU_ALL, until, 1);
    before = lane == 0 ? *largest : before;
    *largest = cu_shuffle(CU_ALL, until, 31);
    merge_term term = {cu_exp(before - until), cu_exp(state.x - until), state.y};
    if (split == 0) { /* taken as it is */
        term.keep = 0;
        term.take = 1;
    }
    return term;
}

/* A warp's row; CU_ROW_NONE: none. Decode: of the run; prefill: of a tile that has splits. */
CU_DEVICE uint32_t find_row(const attention_args *args, uint32_t head)
{
    if (!args->part_only)
        return args->run.row + blockIdx.y;
    uint32_t rows = args->live[blockIdx.z * args->kv_heads + head / args->heads_each];
    uint32_t row = args->tile_row[blockIdx.z];
    if (blockIdx.y >= rows || args->position[row] + rows <= ATTENTION_SPLIT)
        return CU_ROW_NONE;
    return row + blockIdx.y;
}

/* A warp is one row and head: its splits folded in order, a lane to four columns. decode: a row of
 * one split is written already, and padding, too. */
template <int D> CU_KERNEL(MERGE_WARPS * 32, 4) attention_merge_kernel(const attention_args args)
{
    const uint32_t vectors = (D + 127) / 128;
    uint32_t lane = threadIdx.x % 32;
    uint32_t head = blockIdx.x * MERGE_WARPS + threadIdx.x / 32;
    float largest = -INFINITY, sum = 0;
    float4 value[vectors];

    if (head >= args.heads)
        return;
    uint32_t row = find_row(&args, head);
    if (row == CU_ROW_NONE)
        return;
    uint32_t position = args.position[row];
    uint32_t splits = position == CU_ROW_NONE ? 0 : position / ATTENTION_SPLIT + 1;
    if (splits <= 1 && !args.part_only)
        return;
    uint64_t out = (uint64_t)row * args.heads + head;
    uint64_t place = args.part_only
                         ? out * args.splits
                         : (uint64_t)head * args.run.items + (args.row_item[row] - args.run.item);
    const float *parts = args.part + place * D;
    const float *stats = args.stats + place * 2;
#pragma unroll
    for (uint32_t v = 0; v < vectors; v++)
        value[v] = {0, 0, 0, 0};
    for (uint32_t base = 0; base < splits; base += 32) {
        merge_term mine = find_term(stats, base + lane, splits, lane, &largest);
        uint32_t count = splits - base < 32 ? splits - base : 32;
#pragma unroll 4
        for (uint32_t i = 0; i < count; i++) {
            merge_term term = {cu_shuffle(CU_ALL, mine.keep, i), cu_shuffle(CU_ALL, mine.take, i),
                               cu_shuffle(CU_ALL, mine.sum, i)};
            sum = fmaf(term.sum, term.take, sum * term.keep);
#pragma unroll
            for (uint32_t v = 0; v < vectors; v++) {
                uint32_t column = (v * 32 + lane) * 4;
                if (column >= D)
                    continue;
                float4 part = cu_load_once<float4>(parts + (uint64_t)(base + i) * D + column);
                value[v].x = attention_fold_value(value[v].x, part.x, term.keep, term.take);
                value[v].y = attention_fold_value(value[v].y, part.y, term.keep, term.take);
                value[v].z = attention_fold_value(value[v].z, part.z, term.keep, term.take);
                value[v].w = attention_fold_value(value[v].w, part.w, term.keep, term.take);
            }
        }
    }
    float inverse = 1.0f / sum;
#pragma unroll
    for (uint32_t v = 0; v < vectors; v++) {
        uint32_t column = (v * 32 + lane) * 4;
        if (column >= D)
            continue;
        value[v].x = attention_finish(value[v].x, inverse);
        value[v].y = attention_finish(value[v].y, inverse);
        value[v].z = attention_finish(value[v].z, inverse);
        value[v].w = attention_finish(value[v].w, inverse);
        cu_store<float4>(args.out + out * D + column, value[v]);
    }
}

bool cu_attention_supports(uint32_t head_dim)
{
    return head_dim == 32 || head_dim == 64 || head_dim == 80 || head_dim == 96 ||
           head_dim == 128 || head_dim == 256;
}

/* Decode: the run's rows; prefill: a tile's rows, and tiles. */
static pd_status merge(gpu_stream *stream, const attention_args *args, uint32_t head_dim,
                       uint32_t rows, uint32_t tiles)
{
    dim3 grid((args->heads + MERGE_WARPS - 1) / MERGE_WARPS, rows, tiles), block(MERGE_WARPS * 32);

    switch (head_dim) {
    case 32: return CU_LAUNCH((attention_merge_kernel<32>), grid, block, 0, stream, *args);
    case 64: return CU_LAUNCH((attention_merge_kernel<64>), grid, block, 0, stream, *args);
    case 80: return CU_LAUNCH((attention_merge_kernel<80>), grid, block, 0, stream, *args);
    case 96: return CU_LAUNCH((attention_merge_kernel<96>), grid, block, 0, stream, *args);
    case 128: return CU_LAUNCH((attention_merge_kernel<128>), grid, block, 0, stream, *args);
    case 256: return CU_LAUNCH((attention_merge_kernel<256>), grid, block, 0, stream, *args);
    }
    return PD_E_UNSUPPORTED;
}

static uint32_t splits_of(uint32_t positions_max)
{
    return (positions_max + ATTENTION_SPLIT - 1) / ATTENTION_SPLIT;
}

uint64_t cu_attention_item_bytes(uint32_t heads, uint32_t head_dim)
{
    return (uint64_t)heads * (head_dim + 2) * sizeof(float);
}

static uint64_t part_bytes(uint32_t rows, uint32_t heads, uint32_t head_dim, uint32_t splits)
{
    return (uint64_t)rows * splits * cu_attention_item_bytes(heads, head_dim);
}

/* A word a tile and KV head, of which there are no more than rows and heads. */
static uint64_t live_bytes(uint32_t rows, uint32_t heads)
{
    return ((uint64_t)rows * heads * sizeof(uint32_t) + 255) / 256 * 256;
}

uint64_t cu_attention_scratch_bytes(uint32_t rows, uint32_t heads, uint32_t head_dim,
                                    uint32_t positions_max)
{
    uint32_t splits = splits_of(positions_max);
    uint64_t bytes = splits > 1 ? part_bytes(rows, heads, head_dim, splits) : 0;

    return live_bytes(rows, heads) + (bytes < CU_ATTENTION_SCRATCH ? bytes : CU_ATTENTION_SCRATCH);
}

/* Tiles that fill a GPU by themselves go through their contexts split by split, which costs no
 * traffic; fewer are split over blocks, while their parts have room. */
#define PREFILL_BLOCKS_ENOUGH 128

static bool prefill_splits(const cu_step *step, const cu_kv *kv, uint32_t heads,
                           const attention_args *args)
{
    uint64_t blocks = (uint64_t)step->tiles * kv->kv_heads * args->head_blocks;

    return args->splits > 1 && blocks < PREFILL_BLOCKS_ENOUGH &&
           part_bytes(step->rows, heads, kv->head_dim, args->splits) <= CU_ATTENTION_SCRATCH;
}

/* Where K of the layer, block 0 and head 0 lies, and the strides (common/kv/layout.h). */
static void find_layer(const cu_kv *kv, uint32_t layer, attention_args *args)
{
    uint32_t group = layer / kv->group_layers, before = group * kv->group_layers;
    uint32_t left = kv->layers - before;
    uint32_t layers = left < kv->group_layers ? left : kv->group_layers;

    args->head_stride = layers * kv->layer_bytes;
    args->block_stride = kv->kv_heads * args->head_stride;
    args->half_bytes = kv->half_bytes;
    args->block_tokens = kv->block_tokens;
    args->pool = (const uint8_t *)kv->pool +
                 (uint64_t)before * kv->kv_heads * kv->layer_bytes * kv->blocks +
                 (layer - before) * kv->layer_bytes;
}

static void spread_heads(uint32_t blocks, attention_args *args)
{
    args->head_blocks = blocks;
    args->heads_in_block = (args->heads_each + blocks - 1) / blocks;
}

static pd_status attend_runs(gpu_stream *stream, const cu_step *step, const cu_kv *kv,
                             void *scratch, attention_args *args)
{
    pd_status status = PD_OK;

    spread_heads(attention_decode_blocks(kv->head_dim, args->heads_each), args);
    args->part = (float *)scratch;
    args->part_only = false;
    for (uint32_t i = 0; status == PD_OK && i < step->runs; i++) {
        args->run = step->run[i];
        args->stats = args->part + (uint64_t)args->heads * args->run.items * kv->head_dim;
        status = attention_decode(stream, args, kv->head_dim, kv->kv_heads);
        if (status == PD_OK && args->run.items > args->run.rows)
            status = merge(stream, args, kv->head_dim, args->run.rows, 1);
    }
    return status;
}

static pd_status attend_tiles(gpu_stream *stream, const cu_step *step, const cu_kv *kv,
                              uint32_t positions_max, void *scratch, attention_args *args)
{
    pd_assert(step->tiles <= step->rows);
    spread_heads(attention_prefill_blocks(kv->head_dim, args->heads_each), args);
    args->splits = splits_of(positions_max);
    args->part_only = prefill_splits(step, kv, args->heads, args);
    args->live = (uint32_t *)scratch;
    args->part = (float *)((uint8_t *)scratch + live_bytes(step->rows, args->heads));
    args->stats = args->part + (uint64_t)step->rows * args->heads * args->splits * kv->head_dim;
    pd_status status = attention_prefill(stream, args, kv->head_dim, kv->kv_heads, step->tiles);
    if (status == PD_OK && args->part_only)
        status = merge(stream, args, kv->head_dim, CU_TILE_ROWS, step->tiles);
    return status;
}

/* Tiles take the scratch when the runs are through with it: all are of one stream. */
pd_status cu_attention(gpu_stream *stream, const cu_step *step, const cu_kv *kv, uint32_t layer,
                       uint32_t heads, uint32_t positions_max, float scale, const float *qkv,
                       float *out, void *scratch)
{
    uint32_t head_dim = kv->head_dim;
    attention_args args = {};

    pd_assert(heads % kv->kv_heads == 0 && kv->token_bytes == 2 * (uint64_t)head_dim);
    find_layer(kv, layer, &args);
    args.qkv = qkv;
    args.qkv_stride = (heads + 2 * (uint64_t)kv->kv_heads) * head_dim;
    args.kv_heads = kv->kv_heads;
    args.heads = heads;
    args.heads_each = heads / kv->kv_heads;
    args.position = step->position;
    args.table = step->table;
    args.blocks = step->blocks;
    args.tile_row = step->tile_row;
    args.tile_rows = step->tile_rows;
    args.scale = scale;
    args.item_row = step->item_row;
    args.row_item = step->row_item;
    args.out = out;
    pd_status status = attend_runs(stream, step, kv, scratch, &args);
    if (status == PD_OK && step->tiles > 0)
        status = attend_tiles(stream, step, kv, positions_max, scratch, &args);
    if (status == PD_E_UNSUPPORTED)
        pd_log_error("msg=\"attention: no CUDA kernel for heads of this size\" head_dim=%u",
                     head_dim);
    return status;
}
