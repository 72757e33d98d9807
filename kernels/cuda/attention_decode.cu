/* kernels/cuda/attention_decode.cu - attention of rows that are each a sequence of their own.
 *
 * A block is one split of one row and KV head; its four warps are the split's runs, each on its own
 * until they are folded: no barrier between loading and using. The query heads of the KV head (16
 * at most a block) are the rows of the mma, so K and V are read once. A warp asks for its whole K
 * at once, chunk by chunk, and for a chunk of V as soon as that chunk of K is used up, into its
 * place.
 *
 * The grid is made for positions_max; a split past its row's position leaves at once.
 *
 * Ladder: see attention.cu. */

#include "kernels/cuda/attention.h"

#define WARPS ATTENTION_SPLIT_RUNS

/* A warp's part of the shared memory: four chunks, later its weighted V: [heads][D + 8] f32, so
 * that 4 rows of pairs fill all banks. */
template <int D> struct decode_shape {
    static const uint32_t warp_bytes = ATTENTION_RUN_CHUNKS * attention_shape<D>::chunk_bytes;
    static const uint32_t value_stride = D + 8;
    static_assert(16 * (D + 8) * 4 <= warp_bytes, "weighted V takes the chunks' place");
};

typedef struct decode_place {
    uint32_t row, split, kv_head, head, heads; /* head: first of this block's, of all */
    uint32_t count;                            /* positions of the split that the row sees */
    uint32_t splits;                           /* of the row */
} decode_place;

/* A warp's chunks: where each one's K lies, and how many of its positions are there. */
typedef struct decode_run {
    const uint8_t *keys[ATTENTION_RUN_CHUNKS];
    uint32_t count, chunks;
} decode_run;

template <int D>
CU_DEVICE void load_chunk(uint8_t *chunk, const uint8_t *global, uint32_t lane, uint32_t valid)
{
    if (valid >= ATTENTION_CHUNK) {
#pragma unroll
        for (uint32_t unit = 0; unit < attention_shape<D>::units; unit++)
            attention_load_unit<D>(chunk, global, unit, lane, ATTENTION_CHUNK);
    } else {
#pragma unroll
        for (uint32_t unit = 0; unit < attention_shape<D>::units; unit++)
            attention_load_unit<D>(chunk, global, unit, lane, valid);
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
    const uint8_t *base = args->pool + place->kv_head * args->head_stride;
#pragma unroll
    for (uint32_t chunk = 0; chunk < ATTENTION_RUN_CHUNKS; chunk++)
        run->keys[chunk] = base + cu_shuffle(CU_ALL, offset, chunk);
}

template <int D> struct decode_query {
    uint32_t high[D / 16][4], low[D / 16][4]; /* A fragments, by step */
    float factor[2];                          /* of scores, rows quad and quad + 8 */
};

/* The heads are the first rows of the mma, the others zeros. */
template <int D, bool UPPER>
CU_DEVICE void load_query(const attention_args *args, const decode_place *place, uint32_t lane,
                          decode_query<D> *query)
{
    const float *heads = args->qkv + place->row * args->qkv_stride + (uint64_t)place->head * D;
    uint32_t quad = lane / 4;
    const float *const rows[2] = {quad < place->heads ? heads + quad * D : NULL,
                                  UPPER && quad + 8 < place->heads ? heads + (quad + 8) * D : NULL};
    float multiplier[2] = {0, 0};

    query->factor[1] = 1;
#pragma unroll
    for (uint32_t half = 0; half < (UPPER ? 2 : 1); half++)
        multiplier[half] =
            attention_query_multiplier<D>(rows[half], args->scale, lane, &query->factor[half]);
#pragma unroll
    for (uint32_t step = 0; step < attention_shape<D>::steps; step++)
        attention_query_step(rows, step, args->scale, multiplier, lane, query->high[step],
                             query->low[step]);
}

/* Scores of chunk by chunk; each chunk of V is asked for when its K is used up. */
template <int D, bool UPPER>
CU_DEVICE void score_run(const attention_args *args, const decode_run *run, uint8_t *chunks,
                         uint32_t lane, const decode_query<D> *query,
                         float s[ATTENTION_RUN_TILES][4])
{
#pragma unroll
    for (uint32_t i = 0; i < ATTENTION_RUN_CHUNKS; i++) {
        uint8_t *chunk = chunks + i * attention_shape<D>::chunk_bytes;
        const uint8_t *mine = chunk + attention_key_lane<D>(lane);

#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            s[2 * i][j] = s[2 * i + 1][j] = 0;
        cu_async_wait<ATTENTION_RUN_CHUNKS - 1>();
        cu_sync_warp(CU_ALL);
        if (i < run->chunks) {
#pragma unroll
            for (uint32_t step = 0; step < attention_shape<D>::steps; step++) {
                uint32_t b[4];
                cu_ldmatrix_x4(b, mine + step * 32);
                cu_mma_f16(s[2 * i], query->high[step], b);
                cu_mma_f16(s[2 * i + 1], query->high[step], b + 2);
                cu_mma_f16(s[2 * i], query->low[step], b);
                cu_mma_f16(s[2 * i + 1], query->low[step], b + 2);
            }
            cu_sync_warp(CU_ALL); /* all lanes have read K */
            load_chunk<D>(chunk, run->keys[i] + args->half_bytes, lane,
                          run->count - i * ATTENTION_CHUNK);
        }
        cu_async_commit();
    }
    if (run->count < ATTENTION_RUN) {
        int32_t last[2] = {(int32_t)run->count - 1, (int32_t)run->count - 1};
        attention_mask<UPPER>(s, last, lane);
    }
}

template <int D>
CU_DEVICE void add_values(const decode_run *run, const uint8_t *chunks, uint32_t lane,
                          const uint32_t high[ATTENTION_RUN_CHUNKS][4],
                          const uint32_t low[ATTENTION_RUN_CHUNKS][4], float o[D / 8][4])
{
#pragma unroll
    for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile++)
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            o[tile][j] = 0;
#pragma unroll
    for (uint32_t i = 0; i < ATTENTION_RUN_CHUNKS; i++) {
        const uint8_t *mine =
            chunks + i * attention_shape<D>::chunk_bytes + attention_value_lane<D>(lane);

        if (i == 0)
            cu_async_wait<3>();
        else if (i == 1)
            cu_async_wait<2>();
        else if (i == 2)
            cu_async_wait<1>();
        else
            cu_async_wait<0>();
        cu_sync_warp(CU_ALL);
        if (i >= run->chunks)
            break;
#pragma unroll
        for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile += 2) {
            uint32_t b[4];
            cu_ldmatrix_x4_trans(b, mine + tile * 16);
            cu_mma_f16(o[tile], high[i], b);
            cu_mma_f16(o[tile + 1], high[i], b + 2);
            cu_mma_f16(o[tile], low[i], b);
            cu_mma_f16(o[tile + 1], low[i], b + 2);
        }
    }
}

/* A run's state to shared memory, for the rows that are heads. */
template <int D, bool UPPER>
CU_DEVICE void store_state(uint32_t heads, uint32_t lane, const float largest[2],
                           const float sum[2], const float o[D / 8][4], float *value, float2 *stats)
{
    cu_sync_warp(CU_ALL); /* all lanes have read the last chunk of V */
#pragma unroll
    for (uint32_t half = 0; half < (UPPER ? 2 : 1); half++) {
        uint32_t row = lane / 4 + half * 8;
        if (row >= heads)
            continue;
        if (lane % 4 == 0) {
            float2 pair = {largest[half], sum[half]};
            cu_store<float2>(stats + row, pair);
        }
#pragma unroll
        for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile++) {
            float2 pair = {o[tile][half * 2], o[tile][half * 2 + 1]};
            cu_store<float2>(value + row * decode_shape<D>::value_stride + tile * 8 + lane % 4 * 2,
                             pair);
        }
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
        uint64_t part = out * args->splits + place->split;
        cu_store<float4>(args->part + part * D + column, value);
        if (column == 0)
            cu_store<float2>(args->stats + part * 2, state);
    }
}

/* False: nothing to do here, for the whole block. */
CU_DEVICE bool find_place(const attention_args *args, decode_place *place)
{
    uint32_t head = blockIdx.y % args->head_blocks * args->heads_in_block;
    uint32_t left = args->heads_each > head ? args->heads_each - head : 0;

    place->row = blockIdx.z;
    place->split = blockIdx.x;
    place->kv_head = blockIdx.y / args->head_blocks;
    place->head = place->kv_head * args->heads_each + head;
    place->heads = left < args->heads_in_block ? left : args->heads_in_block;
    uint32_t position = args->position[place->row];
    uint32_t first = place->split * ATTENTION_SPLIT;
    if (position == CU_ROW_NONE || first > position)
        return false;
    place->splits = position / ATTENTION_SPLIT + 1;
    place->count = position + 1 - first;
    place->count = place->count < ATTENTION_SPLIT ? place->count : ATTENTION_SPLIT;
    return true;
}

template <int D, bool UPPER>
CU_KERNEL(WARPS * 32, D <= 64    ? 4
                      : D <= 128 ? 3
                                 : 1)
attention_decode_kernel(const attention_args args)
{
    CU_SHARED_DYNAMIC(shared);
    CU_SHARED float2 stats[WARPS][16];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *chunks = shared + warp * decode_shape<D>::warp_bytes;
    decode_place place;
    decode_run run;

    if (!find_place(&args, &place))
        return;
    find_chunks(&args, &place, warp, lane, D * 2, &run);
    if (run.chunks > 0) {
        decode_query<D> query;
        float s[ATTENTION_RUN_TILES][4], o[D / 8][4], largest[2], sum[2];
        uint32_t high[ATTENTION_RUN_CHUNKS][4], low[ATTENTION_RUN_CHUNKS][4];

#pragma unroll
        for (uint32_t i = 0; i < ATTENTION_RUN_CHUNKS; i++) {
            if (i < run.chunks)
                load_chunk<D>(chunks + i * attention_shape<D>::chunk_bytes, run.keys[i], lane,
                              run.count - i * ATTENTION_CHUNK);
            cu_async_commit();
        }
        load_query<D, UPPER>(&args, &place, lane, &query);
        score_run<D, UPPER>(&args, &run, chunks, lane, &query, s);
        attention_softmax<UPPER>(s, query.factor, high, low, largest, sum);
        add_values<D>(&run, chunks, lane, high, low, o);
        store_state<D, UPPER>(place.heads, lane, largest, sum, o, (float *)chunks, stats[warp]);
    }
    cu_sync();
    fold_runs<D>(&args, &place, shared, stats);
}

template <int D>
static pd_status launch(gpu_stream *stream, const attention_args *args, uint32_t kv_heads,
                        uint32_t rows)
{
    dim3 grid(args->splits, kv_heads * args->head_blocks, rows);

    /* at 256 the registers are full either way, and half the rows save nothing */
    if (D <= 128 && args->heads_in_block <= 8)
        return CU_LAUNCH((attention_decode_kernel<D, (D > 128)>), grid, dim3(WARPS * 32),
                         WARPS * decode_shape<D>::warp_bytes, stream, *args);
    return CU_LAUNCH((attention_decode_kernel<D, true>), grid, dim3(WARPS * 32),
                     WARPS * decode_shape<D>::warp_bytes, stream, *args);
}

pd_status attention_decode(gpu_stream *stream, const attention_args *args, uint32_t head_dim,
                           uint32_t kv_heads, uint32_t rows)
{
    switch (head_dim) {
    case 32: return launch<32>(stream, args, kv_heads, rows);
    case 64: return launch<64>(stream, args, kv_heads, rows);
    case 80: return launch<80>(stream, args, kv_heads, rows);
    case 96: return launch<96>(stream, args, kv_heads, rows);
    case 128: return launch<128>(stream, args, kv_heads, rows);
    case 256: return launch<256>(stream, args, kv_heads, rows);
    }
    return PD_E_UNSUPPORTED;
}
