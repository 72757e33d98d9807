/* kernels/cuda/attention_decode.cu - attention of rows that are each a sequence of their own.
 *
 * A block is one split of one row and KV head; its four warps are the split's runs, each on its own
 * until they are folded: no barrier between loading and using. The query heads of the KV head are
 * the rows of the mma (a group of 8, or two; with heads of 256 one), so K and V are read once. A
 * warp asks for its whole K at once, chunk by chunk, and for a chunk of V as soon as that chunk of
 * K is used up, into its place.
 *
 * A grid's blocks are the items of a run (kernels/cuda/items.h): what there is, and an eighth more
 * at most in a recorded launch, which leaves at once.
 *
 * Ladder: see attention.cu. */

#include "kernels/cuda/attention.h"

#define WARPS ATTENTION_SPLIT_RUNS

/* A warp's part of the shared memory: four chunks, later its weighted V: [heads][D + 8] f32, so
 * that 4 rows of pairs fill all banks. It takes no room of the last chunk's: of that one alone a
 * lane may still read when another has begun to store (attend_run). */
template <int D> struct decode_shape {
    static const uint32_t warp_bytes = ATTENTION_RUN_CHUNKS * attention_shape<D>::chunk_bytes;
    static const uint32_t value_stride = D + 8;
    static_assert(16 * (D + 8) * 4 <= warp_bytes - attention_shape<D>::chunk_bytes,
                  "weighted V takes the place of all chunks but the last");
};

typedef struct decode_place {
    uint32_t row, split, kv_head, head, heads; /* head: first of this block's, of all */
    uint32_t count;                            /* positions of the split that the row sees */
    uint32_t splits;                           /* of the row; 0: padding */
    uint32_t part;                             /* of the run's items */
} decode_place;

/* A warp's chunks: where each one's K lies (16 * lane on), how many positions and chunks there are.
 */
typedef struct decode_run {
    const uint8_t *keys[ATTENTION_RUN_CHUNKS];
    uint32_t count, chunks;
} decode_run;

/* chunk, global: as attention_copy_unit's. */
template <int D>
CU_DEVICE void load_chunk(uint8_t *chunk, const uint8_t *global, uint32_t lane, uint32_t valid)
{
    if (valid >= ATTENTION_CHUNK) {
#pragma unroll
        for (uint32_t unit = 0; unit < attention_shape<D>::units; unit++)
            attention_copy_unit<D>(chunk, global, unit, lane, ATTENTION_CHUNK);
    } else { /* once a row at most */
#pragma unroll 1
        for (uint32_t unit = 0; unit < attention_shape<D>::units; unit++)
            attention_copy_unit<D>(chunk, global, unit, lane, valid);
    }
}

CU_DEVICE void find_chunks(const attention_args *args, const decode_place *place, uint32_t warp,
                           uint32_t lane, uint32_t token_bytes, decode_run *run)
{
    uint32_t first = warp * ATTENTION_RUN;
    uint64_t offset = 0;

    run->count = place->count > first ? place->count - first : 0;
    run->count = run->count < ATTENTION_RUN ? run->count : ATTENTION_RUN;
    run->chunks = (run->count + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK;
    if (lane < run->chunks)
        offset = attention_chunk_offset(
            args, args->table[place->row],
            place->split * ATTENTION_SPLIT + first + lane * ATTENTION_CHUNK, token_bytes);
    const uint8_t *base = args->pool + place->kv_head * args->head_stride + lane * 16;
#pragma unroll
    for (uint32_t chunk = 0; chunk < ATTENTION_RUN_CHUNKS; chunk++)
        run->keys[chunk] = base + cu_shuffle(CU_ALL, offset, chunk);
}

/* A fragments by group and step, and the scores' factors. The heads come first; behind them zeros.
 */
template <int D, int GROUPS> struct decode_query {
    uint32_t a[GROUPS][D / 16][4];
    float factor[GROUPS];
};

template <int D, int GROUPS>
CU_DEVICE void load_query(const attention_args *args, const decode_place *place, uint32_t lane,
                          decode_query<D, GROUPS> *query)
{
    const float *heads = args->qkv + place->row * args->qkv_stride + (uint64_t)place->head * D;

#pragma unroll
    for (uint32_t group = 0; group < GROUPS; group++) {
        uint32_t head = group * 8 + lane / 4;
        const float *row = head < place->heads ? heads + head * D : NULL;
        float multiplier =
            attention_query_multiplier<D>(row, args->scale, lane, &query->factor[group]);
#pragma unroll
        for (uint32_t step = 0; step < attention_shape<D>::steps; step++)
            attention_query_step(row, step, args->scale, multiplier, lane, query->a[group][step]);
    }
}

/* A chunk's scores, high and low parts added. */
template <int D, int GROUPS>
CU_DEVICE void score_chunk(const uint8_t *mine, const decode_query<D, GROUPS> *query, uint32_t i,
                           attention_scores scores[GROUPS])
{
    float c[GROUPS][2][4];

#pragma unroll
    for (uint32_t group = 0; group < GROUPS; group++)
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            c[group][j / 4][j % 4] = 0;
#pragma unroll
    for (uint32_t step = 0; step < attention_shape<D>::steps; step++) {
        uint32_t b[4];
        cu_ldmatrix_x4(b, mine + step * 32);
#pragma unroll
        for (uint32_t group = 0; group < GROUPS; group++) {
            cu_mma_f16(c[group][0], query->a[group][step], b);
            cu_mma_f16(c[group][1], query->a[group][step], b + 2);
        }
    }
#pragma unroll
    for (uint32_t group = 0; group < GROUPS; group++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            scores[group].s[2 * i + j / 2][j % 2] =
                c[group][j / 2][j % 2] + c[group][j / 2][j % 2 + 2];
}

/* Chunk by chunk; each chunk of V is asked for when its K is used up. */
template <int D, int GROUPS>
CU_DEVICE void score_run(const attention_args *args, const decode_run *run, uint8_t *chunks,
                         uint32_t lane, const decode_query<D, GROUPS> *query,
                         attention_scores scores[GROUPS])
{
    const uint8_t *keys = chunks + attention_key_lane<D>(lane);
    uint8_t *copy = chunks + attention_copy_lane<D>(lane);

#pragma unroll
    for (uint32_t i = 0; i < ATTENTION_RUN_CHUNKS; i++) {
#pragma unroll
        for (uint32_t j = 0; j < GROUPS * 4; j++)
            scores[j / 4].s[2 * i + j % 4 / 2][j % 2] = 0;
        cu_async_wait<ATTENTION_RUN_CHUNKS - 1>();
        cu_sync_warp(CU_ALL);
        if (i < run->chunks) {
            score_chunk<D, GROUPS>(keys + i * attention_shape<D>::chunk_bytes, query, i, scores);
            cu_sync_warp(CU_ALL); /* all lanes have read K */
            load_chunk<D>(copy + i * attention_shape<D>::chunk_bytes,
                          run->keys[i] + args->half_bytes, lane, run->count - i * ATTENTION_CHUNK);
        }
        cu_async_commit();
    }
    if (run->count < ATTENTION_RUN)
        for (uint32_t group = 0; group < GROUPS; group++)
            attention_mask(&scores[group], (int32_t)run->count - 1, lane);
}

/* A chunk of V has landed when so many later ones are under way. */
CU_DEVICE void wait_value(uint32_t chunk)
{
    switch (chunk) {
    case 0: cu_async_wait<3>(); break;
    case 1: cu_async_wait<2>(); break;
    case 2: cu_async_wait<1>(); break;
    default: cu_async_wait<0>(); break;
    }
    cu_sync_warp(CU_ALL);
}

template <int D, int GROUPS>
CU_DEVICE void add_values(const decode_run *run, const uint8_t *chunks, uint32_t lane,
                          const uint32_t p[GROUPS][ATTENTION_RUN_CHUNKS][4],
                          float o[GROUPS][D / 8][4])
{
    const uint8_t *values = chunks + attention_value_lane<D>(lane);

    static_assert(ATTENTION_RUN_CHUNKS == 4, "wait_value");
#pragma unroll
    for (uint32_t j = 0; j < GROUPS * attention_shape<D>::tiles * 4; j++)
        o[j / (D / 2)][j % (D / 2) / 4][j % 4] = 0;
#pragma unroll
    for (uint32_t i = 0; i < ATTENTION_RUN_CHUNKS; i++) {
        wait_value(i);
        if (i >= run->chunks)
            break;
#pragma unroll
        for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile += 2) {
            uint32_t b[4];
            cu_ldmatrix_x4_trans(b, values + i * attention_shape<D>::chunk_bytes + tile * 16);
#pragma unroll
            for (uint32_t group = 0; group < GROUPS; group++) {
                cu_mma_f16(o[group][tile], p[group][i], b);
                cu_mma_f16(o[group][tile + 1], p[group][i], b + 2);
            }
        }
    }
}

/* A run's state to shared memory, for the rows that are heads. */
template <int D>
CU_DEVICE void store_state(uint32_t head, uint32_t heads, uint32_t lane, float largest, float sum,
                           const float o[D / 8][4], float *value, float2 *stats)
{
    if (head >= heads)
        return;
    if (lane % 4 == 0) {
        float2 state = {largest, sum};
        cu_store<float2>(stats + head, state);
    }
#pragma unroll
    for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile++) {
        float2 pair = {o[tile][0] + o[tile][2], o[tile][1] + o[tile][3]};
        cu_store<float2>(value + head * decode_shape<D>::value_stride + tile * 8 + lane % 4 * 2,
                         pair);
    }
}

/* Folds the runs' states in order; the row's result where this is its only split, else a part. */
template <int D>
CU_DEVICE void fold_runs(const attention_args *args, const decode_place *place,
                         const uint8_t *shared, const float2 (*stats)[16])
{
    uint32_t runs = (place->count + ATTENTION_RUN - 1) / ATTENTION_RUN;

    for (uint32_t at = threadIdx.x; at < place->heads * (D / 4); at += WARPS * 32) {
        uint32_t head = at / (D / 4), column = at % (D / 4) * 4;
        const uint8_t *values = shared + (head * decode_shape<D>::value_stride + column) * 4;
        /* wavefronts 1.2: where a head ends among eight lanes, padding comes before the next */
        float4 value = cu_load<float4>(values);
        float2 state = cu_load<float2>(&stats[0][head]);

        for (uint32_t run = 1; run < runs; run++) {
            float4 other = cu_load<float4>(values + run * decode_shape<D>::warp_bytes);
            float2 other_state = cu_load<float2>(&stats[run][head]);
            float keep, take;
            attention_fold(&state.x, &state.y, other_state.x, other_state.y, &keep, &take);
            value.x = attention_fold_value(value.x, other.x, keep, take);
            value.y = attention_fold_value(value.y, other.y, keep, take);
            value.z = attention_fold_value(value.z, other.z, keep, take);
            value.w = attention_fold_value(value.w, other.w, keep, take);
        }
        uint64_t out = (uint64_t)place->row * args->heads + place->head + head;
        if (place->splits == 1) {
            float inverse = 1.0f / state.y;
            value.x = attention_finish(value.x, inverse);
            value.y = attention_finish(value.y, inverse);
            value.z = attention_finish(value.z, inverse);
            value.w = attention_finish(value.w, inverse);
            cu_store<float4>(args->out + out * D + column, value);
            continue;
        }
        uint64_t part = (uint64_t)(place->head + head) * args->run.items + place->part;
        cu_store<float4>(args->part + part * D + column, value);
        if (column == 0) /* sectors 2: heads are a run of parts apart */
            cu_store<float2>(args->stats + part * 2, state);
    }
}

/* What nobody attends for must be numbers all the same: it is quantised and multiplied. */
template <int D> CU_DEVICE void write_zeros(const attention_args *args, const decode_place *place)
{
    float4 zeros = {0, 0, 0, 0};

    for (uint32_t at = threadIdx.x; at < place->heads * (D / 4); at += WARPS * 32)
        cu_store<float4>(
            args->out + ((uint64_t)place->row * args->heads + place->head) * D + at * 4, zeros);
}

/* False: nothing to do here, for the whole block. */
CU_DEVICE bool find_place(const attention_args *args, decode_place *place)
{
    uint32_t item = args->run.item + blockIdx.x;
    uint32_t head = blockIdx.y % args->head_blocks * args->heads_in_block;
    uint32_t left = args->heads_each > head ? args->heads_each - head : 0;

    place->row = args->item_row[item];
    if (place->row == CU_ROW_NONE)
        return false;
    place->split = item - args->row_item[place->row];
    place->part = blockIdx.x;
    place->kv_head = blockIdx.y / args->head_blocks;
    place->head = place->kv_head * args->heads_each + head;
    place->heads = left < args->heads_in_block ? left : args->heads_in_block;
    uint32_t position = args->position[place->row];
    place->splits = position == CU_ROW_NONE ? 0 : position / ATTENTION_SPLIT + 1;
    place->count = position + 1 - place->split * ATTENTION_SPLIT;
    place->count = place->count < ATTENTION_SPLIT ? place->count : ATTENTION_SPLIT;
    return true;
}

/* A warp's run: its state in place of its chunks. */
template <int D, int GROUPS>
CU_DEVICE void attend_run(const attention_args *args, const decode_place *place,
                          const decode_run *run, uint8_t *chunks, uint32_t lane, float2 *stats)
{
    decode_query<D, GROUPS> query;
    attention_scores scores[GROUPS];
    uint32_t p[GROUPS][ATTENTION_RUN_CHUNKS][4];
    float o[GROUPS][D / 8][4], largest[GROUPS], sum[GROUPS];

#pragma unroll
    for (uint32_t i = 0; i < ATTENTION_RUN_CHUNKS; i++) {
        if (i < run->chunks)
            load_chunk<D>(chunks + attention_copy_lane<D>(lane) +
                              i * attention_shape<D>::chunk_bytes,
                          run->keys[i], lane, run->count - i * ATTENTION_CHUNK);
        cu_async_commit();
    }
    load_query<D, GROUPS>(args, place, lane, &query);
    score_run<D, GROUPS>(args, run, chunks, lane, &query, scores);
#pragma unroll
    for (uint32_t group = 0; group < GROUPS; group++)
        attention_softmax(&scores[group], query.factor[group], p[group], &largest[group],
                          &sum[group]);
    add_values<D, GROUPS>(run, chunks, lane, p, o);
    /* No barrier: a chunk of V that is not the fourth is followed by wait_value's, and the fourth
     * lies behind what is stored (decode_shape). */
#pragma unroll
    for (uint32_t group = 0; group < GROUPS; group++)
        store_state<D>(group * 8 + lane / 4, place->heads, lane, largest[group], sum[group],
                       o[group], (float *)chunks, stats);
}

template <int D, int GROUPS>
CU_KERNEL(WARPS * 32, GROUPS *D <= 64     ? 5
                      : GROUPS * D <= 128 ? 3
                                          : 2)
attention_decode_kernel(const attention_args args)
{
    CU_SHARED_DYNAMIC(shared);
    CU_SHARED float2 stats[WARPS][16];
    /* from one lane: the compiler sees that a warp is of one mind about what depends on it */
    uint32_t warp = cu_shuffle(CU_ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    decode_place place;
    decode_run run;

    if (!find_place(&args, &place))
        return;
    if (place.splits == 0) {
        write_zeros<D>(&args, &place);
        return;
    }
    find_chunks(&args, &place, warp, lane, D * 2, &run);
    if (run.chunks > 0)
        attend_run<D, GROUPS>(&args, &place, &run, shared + warp * decode_shape<D>::warp_bytes,
                              lane, stats[warp]);
    cu_sync();
    fold_runs<D>(&args, &place, shared, stats);
}

uint32_t attention_decode_blocks(uint32_t head_dim, uint32_t heads_each)
{
    uint32_t heads_max = head_dim <= 128 ? 16 : 8;

    return (heads_each + heads_max - 1) / heads_max;
}

template <int D>
static pd_status launch(gpu_stream *stream, const attention_args *args, uint32_t kv_heads)
{
    dim3 grid(args->run.items, kv_heads * args->head_blocks), block(WARPS * 32);
    const uint32_t shared_bytes = WARPS * decode_shape<D>::warp_bytes;

    if (args->heads_in_block <= 8)
        return CU_LAUNCH((attention_decode_kernel<D, 1>), grid, block, shared_bytes, stream, *args);
    if constexpr (D <= 128) /* more has no registers for two groups */
        return CU_LAUNCH((attention_decode_kernel<D, 2>), grid, block, shared_bytes, stream, *args);
    return PD_E_INTERNAL;
}

pd_status attention_decode(gpu_stream *stream, const attention_args *args, uint32_t head_dim,
                           uint32_t kv_heads)
{
    switch (head_dim) {
    case 32: return launch<32>(stream, args, kv_heads);
    case 64: return launch<64>(stream, args, kv_heads);
    case 80: return launch<80>(stream, args, kv_heads);
    case 96: return launch<96>(stream, args, kv_heads);
    case 128: return launch<128>(stream, args, kv_heads);
    case 256: return launch<256>(stream, args, kv_heads);
    }
    return PD_E_UNSUPPORTED;
}
