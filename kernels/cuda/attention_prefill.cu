/* kernels/cuda/attention_prefill.cu - attention of tiles: up to 16 consecutive rows of a sequence.
 *
 * A tile's rows times the query heads of a KV head are the rows of the mma, 16 to a warp (two
 * groups of 8), up to four warps to a block (of as many as there are heads: 16 tokens each), which
 * share K and V in shared memory: one run of each. While scores are computed V arrives, while V is
 * added the next K. A warp keeps a split's state in registers and folds each run's into it, eight
 * columns of V at a time; the state of all splits so far lies in shared memory, where only its own
 * lane comes by. Where there are few tiles, a block computes one split instead and leaves it to
 * attention_merge.
 *
 * A tile's rows share V, and for a row's sum the tokens behind it count zero times, which is zero
 * only for numbers. So a small kernel looks through V of the tile's own tokens first (the large one
 * has no registers for it): where one has no numbers, the tile ends before it, for that KV head,
 * and the rows that see it get no numbers.
 *
 * Ladder: see attention.cu. */

#include "kernels/cuda/attention.h"

#define LIVE_WARPS 4u

template <int D> struct prefill_shape {
    static const uint32_t warps_max = D <= 128 ? 4 : 2; /* sm_80 has 163 KiB for a block */
    static const uint32_t run_bytes = ATTENTION_RUN_CHUNKS * attention_shape<D>::chunk_bytes;
    static const uint32_t query_bytes = 2 * attention_shape<D>::steps * 32 * 16; /* of a warp */
    static const uint32_t state_bytes = 16 * D * 4;                              /* likewise */
    /* the state of the split in the making is in registers where there are enough */
    static const bool in_registers = D <= 128;
    static const uint32_t rest_bytes = 32 * 32; /* prefill_state.rest */
    static const uint32_t warp_bytes =
        query_bytes + (in_registers ? 1 : 2) * state_bytes + rest_bytes;
    static uint32_t shared_bytes(uint32_t warps)
    {
        return 2 * run_bytes + warps * warp_bytes;
    }
};

/* What a block, then what a warp works on. */
typedef struct prefill_place {
    uint32_t row, rows;        /* of the tile */
    uint32_t position;         /* of its first row */
    uint32_t last;             /* of its last row */
    uint32_t kv_head, table;   /* table: where the block table starts */
    uint32_t run_from, run_to; /* runs of the sequence that the block goes through */
} prefill_place;

/* A lane's row of one of its warp's two groups. */
typedef struct prefill_row {
    uint32_t row, head; /* of all */
    int32_t position;   /* -1: there is none */
} prefill_row;

/* A split in the making, and what is known of all splits before it. Weighted V in shared memory is
 * [tile][group][lane] pairs, a lane's own. */
template <int D> struct prefill_state {
    float largest[2], sum[2];
    float o[prefill_shape<D>::in_registers ? D / 8 : 1][4]; /* [tile][group, column] */
    float2 *all, *o_shared;
    /* a lane's, by group: largest score and sum of all splits before, then (uint2) the row and
     * head; registers are too few for what is asked for once a split */
    float2 *rest;
};

template <int D>
CU_DEVICE float2 get_value(const prefill_state<D> *state, uint32_t tile, uint32_t group,
                           uint32_t lane)
{
    if (!prefill_shape<D>::in_registers)
        return cu_load<float2>(state->o_shared + (tile * 2 + group) * 32 + lane);
    float2 pair = {state->o[tile][group * 2], state->o[tile][group * 2 + 1]};
    return pair;
}

template <int D>
CU_DEVICE void set_value(prefill_state<D> *state, uint32_t tile, uint32_t group, uint32_t lane,
                         float2 pair)
{
    if (!prefill_shape<D>::in_registers) {
        cu_store<float2>(state->o_shared + (tile * 2 + group) * 32 + lane, pair);
        return;
    }
    state->o[tile][group * 2] = pair.x;
    state->o[tile][group * 2 + 1] = pair.y;
}

CU_DEVICE bool find_place(const attention_args *args, prefill_place *place)
{
    uint32_t runs;

    place->kv_head = blockIdx.y / args->head_blocks;
    place->rows = args->live[blockIdx.z * args->kv_heads + place->kv_head];
    if (place->rows == 0)
        return false;
    place->row = args->tile_row[blockIdx.z];
    place->position = args->position[place->row];
    place->last = place->position + place->rows - 1;
    place->table = args->table[place->row];
    runs = place->last / ATTENTION_RUN + 1;
    place->run_from = 0;
    place->run_to = runs;
    if (args->part_only) {
        place->run_from = blockIdx.x * ATTENTION_SPLIT_RUNS;
        place->run_to = place->run_from + ATTENTION_SPLIT_RUNS;
        place->run_to = place->run_to < runs ? place->run_to : runs;
    }
    return place->run_from < place->run_to;
}

/* Its splits are parts, for the merge. */
CU_DEVICE bool is_part(const attention_args *args, const prefill_place *place)
{
    return args->part_only && place->last >= ATTENTION_SPLIT;
}

CU_DEVICE void find_rows(const attention_args *args, const prefill_place *place, uint32_t lane,
                         prefill_row rows[2])
{
    uint32_t first = (blockIdx.y % args->head_blocks * (blockDim.x / 32) + threadIdx.x / 32) * 16;

#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        uint32_t at = first + group * 8 + lane / 4;
        uint32_t row = at / args->heads_each;
        rows[group].row = place->row + row;
        rows[group].head = place->kv_head * args->heads_each + at % args->heads_each;
        rows[group].position = row < place->rows ? (int32_t)(place->position + row) : -1;
    }
}

/* The block's copy of a run's K, or V (on: args->half_bytes); nothing past the tile's last row. */
template <int D>
CU_DEVICE void load_run(const attention_args *args, const prefill_place *place, uint32_t run,
                        uint64_t on, uint8_t *shared)
{
    uint32_t lane = threadIdx.x % 32;
    uint32_t first = run * ATTENTION_RUN, count = place->last + 1 - first;
    uint64_t offset = 0;

    if (lane < ATTENTION_RUN_CHUNKS && lane * ATTENTION_CHUNK < count)
        offset = attention_chunk_offset(args, place->table, first + lane * ATTENTION_CHUNK, D * 2);
    offset += place->kv_head * args->head_stride + on;
    for (uint32_t unit = threadIdx.x / 32; unit < ATTENTION_RUN_CHUNKS * attention_shape<D>::units;
         unit += blockDim.x / 32) {
        uint32_t chunk = unit / attention_shape<D>::units;
        uint32_t before = chunk * ATTENTION_CHUNK;
        attention_copy_unit<D>(
            shared + attention_copy_lane<D>(lane) + chunk * attention_shape<D>::chunk_bytes,
            args->pool + lane * 16 + cu_shuffle(CU_ALL, offset, chunk),
            unit % attention_shape<D>::units, lane, count > before ? count - before : 0);
    }
}

/* A fragments of the query to shared memory, a lane's own: [step][group][lane] uint4. The query is
 * read twice, for there are no registers to keep it in. */
template <int D>
CU_DEVICE void store_query(const attention_args *args, const prefill_row rows[2], uint32_t lane,
                           uint8_t *shared, float factor[2])
{
    const float *from[2];
    float multiplier[2];

#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        from[group] = rows[group].position >= 0 ? args->qkv + rows[group].row * args->qkv_stride +
                                                      (uint64_t)rows[group].head * D
                                                : NULL;
        multiplier[group] =
            attention_query_multiplier<D>(from[group], args->scale, lane, &factor[group]);
    }
    cu_sync_warp(CU_ALL); /* the compiler reads again, too */
#pragma unroll
    for (uint32_t i = 0; i < 2 * attention_shape<D>::steps; i++) {
        uint32_t a[4];
        attention_query_step(from[i % 2], i / 2, args->scale, multiplier[i % 2], lane, a);
        uint4 fragment = {a[0], a[1], a[2], a[3]};
        cu_store<uint4>(shared + (i * 32 + lane) * 16, fragment);
    }
}

/* Scores of two chunks, high and low parts added; half: the first two or the last. */
template <int D>
CU_DEVICE void score_half(const uint8_t *query, const uint8_t *mine, uint32_t half, uint32_t lane,
                          attention_scores scores[2])
{
    float c[2][4][4];

#pragma unroll
    for (uint32_t i = 0; i < 32; i++)
        c[i / 16][i / 4 % 4][i % 4] = 0;
#pragma unroll
    for (uint32_t step = 0; step < attention_shape<D>::steps; step++) {
        uint32_t b[2][4];

#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            cu_ldmatrix_x4(b[i],
                           mine + (half * 2 + i) * attention_shape<D>::chunk_bytes + step * 32);
#pragma unroll
        for (uint32_t group = 0; group < 2; group++) {
            uint4 fragment = cu_load<uint4>(query + ((step * 2 + group) * 32 + lane) * 16);
            uint32_t a[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
#pragma unroll
            for (uint32_t tile = 0; tile < 4; tile++)
                cu_mma_f16(c[group][tile], a, b[tile / 2] + tile % 2 * 2);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) {
        const float *sums = c[i / 8][i / 2 % 4];
        scores[i / 8].s[half * 4 + i / 2 % 4][i % 2] = sums[i % 2] + sums[i % 2 + 2];
    }
}

/* Where a lane's row of a group lies in what is [row][heads]. */
template <int D>
CU_DEVICE uint64_t row_place(const attention_args *args, const prefill_state<D> *state,
                             uint32_t group, uint32_t lane)
{
    uint2 row = cu_load<uint2>(state->rest + (2 + group) * 32 + lane);

    return (uint64_t)row.x * args->heads + row.y;
}

/* The split's state is complete: out as a part. */
template <int D>
CU_DEVICE void write_part(const attention_args *args, const int32_t position[2], uint32_t lane,
                          uint32_t split, const prefill_state<D> *state)
{
#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        if (position[group] < (int32_t)(split * ATTENTION_SPLIT))
            continue;
        uint64_t part = row_place<D>(args, state, group, lane) * args->splits + split;
#pragma unroll
        for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile++)
            cu_store<float2>(args->part + part * D + tile * 8 + lane % 4 * 2,
                             get_value<D>(state, tile, group, lane));
        float2 pair = {state->largest[group], state->sum[group]};
        if (lane % 4 == 0) /* sectors 2: each row's pair is a place of its own */
            cu_store<float2>(args->stats + part * 2, pair);
    }
}

/* Or into the state of all. */
template <int D>
CU_DEVICE void fold_split(uint32_t lane, uint32_t split, const prefill_state<D> *state)
{
#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        float2 *rest = state->rest + group * 32 + lane;
        float2 before = {state->largest[group], state->sum[group]};
        float keep = 0, take = 0;

        if (split != 0) {
            before = cu_load<float2>(rest);
            attention_fold(&before.x, &before.y, state->largest[group], state->sum[group], &keep,
                           &take);
        }
        cu_store<float2>(rest, before);
#pragma unroll
        for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile++) {
            float2 *at = state->all + (tile * 2 + group) * 32 + lane;
            float2 pair = get_value<D>(state, tile, group, lane);
            if (split != 0) {
                float2 value = cu_load<float2>(at);
                pair.x = attention_fold_value(value.x, pair.x, keep, take);
                pair.y = attention_fold_value(value.y, pair.y, keep, take);
            }
            cu_store<float2>(at, pair);
        }
    }
}

template <int D>
CU_DEVICE void write_rows(const attention_args *args, const int32_t position[2], uint32_t lane,
                          const prefill_state<D> *state)
{
#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        if (position[group] < 0)
            continue;
        float inverse = 1.0f / cu_load<float2>(state->rest + group * 32 + lane).y;
        float *out = args->out + row_place<D>(args, state, group, lane) * D;
#pragma unroll
        for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile++) {
            float2 pair = cu_load<float2>(state->all + (tile * 2 + group) * 32 + lane);
            pair.x = attention_finish(pair.x, inverse);
            pair.y = attention_finish(pair.y, inverse);
            cu_store<float2>(out + tile * 8 + lane % 4 * 2, pair);
        }
    }
}

/* A warp's probabilities of a run, and how the run folds into its split. */
typedef struct prefill_weights {
    uint32_t p[2][ATTENTION_RUN_CHUNKS][4];
    float keep[2], take[2];
} prefill_weights;

template <int D>
CU_DEVICE void weigh_run(attention_scores scores[2], const int32_t position[2], uint32_t run,
                         uint32_t lane, const float factor[2], prefill_state<D> *state,
                         prefill_weights *weights)
{
    int32_t first = (int32_t)(run * ATTENTION_RUN);
    int32_t last[2] = {position[0] - first, position[1] - first};
    bool whole = last[0] >= (int32_t)ATTENTION_RUN - 1 && last[1] >= (int32_t)ATTENTION_RUN - 1;
    bool mask = !cu_all(CU_ALL, whole);

#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        float largest, sum;

        if (mask)
            attention_mask(&scores[group], last[group], lane);
        attention_softmax(&scores[group], factor[group], weights->p[group], &largest, &sum);
        weights->keep[group] = weights->take[group] = 0;
        if (run % ATTENTION_SPLIT_RUNS == 0) {
            state->largest[group] = largest;
            state->sum[group] = sum;
        } else {
            attention_fold(&state->largest[group], &state->sum[group], largest, sum,
                           &weights->keep[group], &weights->take[group]);
        }
    }
}

/* Adds a run's weighted V to the split's, tile by tile. first: the split begins with it. */
template <int D>
CU_DEVICE void add_values(const uint8_t *values, uint32_t lane, const prefill_weights *weights,
                          bool first, prefill_state<D> *state)
{
    const uint8_t *mine = values + attention_value_lane<D>(lane);

#pragma unroll
    for (uint32_t tile = 0; tile < attention_shape<D>::tiles; tile += 2) {
        float c[2][2][4];

#pragma unroll
        for (uint32_t i = 0; i < 16; i++)
            c[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
        for (uint32_t chunk = 0; chunk < ATTENTION_RUN_CHUNKS; chunk++) {
            uint32_t b[4];
            cu_ldmatrix_x4_trans(b, mine + chunk * attention_shape<D>::chunk_bytes + tile * 16);
#pragma unroll
            for (uint32_t group = 0; group < 2; group++) {
                cu_mma_f16(c[group][0], weights->p[group][chunk], b);
                cu_mma_f16(c[group][1], weights->p[group][chunk], b + 2);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const float *sums = c[i % 2][i / 2];
            float2 pair = {sums[0] + sums[2], sums[1] + sums[3]};
            if (!first) {
                float2 before = get_value<D>(state, tile + i / 2, i % 2, lane);
                pair.x = attention_fold_value(before.x, pair.x, weights->keep[i % 2],
                                              weights->take[i % 2]);
                pair.y = attention_fold_value(before.y, pair.y, weights->keep[i % 2],
                                              weights->take[i % 2]);
            }
            set_value<D>(state, tile + i / 2, i % 2, lane, pair);
        }
    }
}

/* The lane's rows: their queries to shared memory, where they go, how far they see. */
template <int D>
CU_DEVICE void start_rows(const attention_args *args, const prefill_place *place, uint32_t lane,
                          uint8_t *query, const prefill_state<D> *state, int32_t position[2],
                          float factor[2])
{
    prefill_row rows[2];

    find_rows(args, place, lane, rows);
    store_query<D>(args, rows, lane, query, factor);
#pragma unroll
    for (uint32_t group = 0; group < 2; group++) {
        uint2 row = {rows[group].row, rows[group].head};
        cu_store<uint2>(state->rest + (2 + group) * 32 + lane, row);
        position[group] = rows[group].position;
    }
}

CU_DEVICE bool is_number(uint32_t halves)
{
    return (halves & 0x7c00) != 0x7c00 && (halves & 0x7c000000) != 0x7c000000;
}

/* A warp is a tile and KV head: how many of the tile's rows see numbers alone, the others' results.
 * The tile's first token is not looked at: all its rows see it. */
CU_KERNEL(LIVE_WARPS * 32, 1) attention_live_kernel(const attention_args args, uint32_t dim)
{
    uint32_t tile = blockIdx.x, lane = threadIdx.x % 32;
    uint32_t kv_head = blockIdx.y * LIVE_WARPS + threadIdx.x / 32;
    uint32_t rows = args.tile_rows[tile], pieces = dim / 8, live = rows;

    if (kv_head >= args.kv_heads)
        return;
    uint32_t row = args.tile_row[tile], first = rows > 0 ? args.position[row] : 0;
    const uint8_t *values = args.pool + kv_head * args.head_stride + args.half_bytes;
    for (uint32_t i = pieces + lane; i < rows * pieces; i += 32) {
        uint32_t at = i / pieces;
        uint4 v = cu_load<uint4>(
            values + attention_chunk_offset(&args, args.table[row], first + at, dim * 2) +
            i % pieces * 16);
        if (!is_number(v.x) || !is_number(v.y) || !is_number(v.z) || !is_number(v.w))
            live = at < live ? at : live;
    }
    for (uint32_t by = 16; by > 0; by /= 2) {
        uint32_t other = cu_shuffle_xor(CU_ALL, live, by);
        live = other < live ? other : live;
    }
    if (lane == 0)
        args.live[tile * args.kv_heads + kv_head] = live;
    for (uint32_t at = live; at < rows; at++)
        for (uint32_t i = lane; i < args.heads_each * dim; i += 32)
            args.out[((uint64_t)(row + at) * args.heads + kv_head * args.heads_each) * dim + i] =
                NAN;
}

template <int D>
CU_KERNEL(prefill_shape<D>::warps_max * 32, D <= 128 ? 2 : 1)
attention_prefill_kernel(const attention_args args)
{
    CU_SHARED_DYNAMIC(shared);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *keys = shared, *values = shared + prefill_shape<D>::run_bytes;
    uint8_t *own = shared + 2 * prefill_shape<D>::run_bytes + warp * prefill_shape<D>::warp_bytes;
    prefill_place place;
    prefill_state<D> state;
    int32_t position[2];
    float factor[2];

    if (!find_place(&args, &place))
        return;
    load_run<D>(&args, &place, place.run_from, 0, keys);
    cu_async_commit();
    load_run<D>(&args, &place, place.run_from, args.half_bytes, values);
    cu_async_commit();
    state.all = (float2 *)(own + prefill_shape<D>::query_bytes);
    state.o_shared = state.all + prefill_shape<D>::state_bytes / sizeof(float2);
    state.rest = (float2 *)(own + prefill_shape<D>::warp_bytes - prefill_shape<D>::rest_bytes);
    start_rows<D>(&args, &place, lane, own, &state, position, factor);
    for (uint32_t run = place.run_from; run < place.run_to; run++) {
        attention_scores scores[2];
        prefill_weights weights;
        uint32_t next = run + 1;

        cu_async_wait<1>();
        cu_sync(); /* K is there, everyone's part of it */
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) { /* all at once has no registers */
            cu_sync_warp(CU_ALL);                   /* the compiler keeps them apart, too */
            score_half<D>(own, keys + attention_key_lane<D>(lane), half, lane, scores);
        }
        cu_sync(); /* K is used up */
        if (next < place.run_to)
            load_run<D>(&args, &place, next, 0, keys);
        cu_async_commit();
        weigh_run<D>(scores, position, run, lane, factor, &state, &weights);
        cu_async_wait<1>();
        cu_sync(); /* V is there */
        add_values<D>(values, lane, &weights, run % ATTENTION_SPLIT_RUNS == 0, &state);
        cu_sync(); /* V is used up */
        if (next < place.run_to)
            load_run<D>(&args, &place, next, args.half_bytes, values);
        cu_async_commit();
        uint32_t split = run / ATTENTION_SPLIT_RUNS;
        if (next % ATTENTION_SPLIT_RUNS != 0 && next != place.run_to)
            continue;
        if (is_part(&args, &place))
            write_part<D>(&args, position, lane, split, &state);
        else
            fold_split<D>(lane, split, &state);
    }
    if (!is_part(&args, &place))
        write_rows<D>(&args, position, lane, &state);
}

uint32_t attention_prefill_blocks(uint32_t head_dim, uint32_t heads_each)
{
    uint32_t warps_max = head_dim <= 128 ? 4 : 2;

    return (heads_each + warps_max - 1) / warps_max;
}

template <int D>
static pd_status launch(gpu_stream *stream, const attention_args *args, uint32_t kv_heads,
                        uint32_t tiles)
{
    /* the rows of the mma are 16 tokens times heads_each: one warp a head, evenly spread */
    uint32_t warps = (args->heads_each + args->head_blocks - 1) / args->head_blocks;
    dim3 grid(args->part_only ? args->splits : 1, kv_heads * args->head_blocks, tiles);

    static_assert(prefill_shape<D>::warps_max == (D <= 128 ? 4 : 2), "as attention_prefill_blocks");
    return CU_LAUNCH((attention_prefill_kernel<D>), grid, dim3(warps * 32),
                     prefill_shape<D>::shared_bytes(warps), stream, *args);
}

pd_status attention_prefill(gpu_stream *stream, const attention_args *args, uint32_t head_dim,
                            uint32_t kv_heads, uint32_t tiles)
{
    dim3 grid(tiles, (kv_heads + LIVE_WARPS - 1) / LIVE_WARPS);

    if (!cu_attention_supports(head_dim))
        return PD_E_UNSUPPORTED;
    pd_status status =
        CU_LAUNCH(attention_live_kernel, grid, dim3(LIVE_WARPS * 32), 0, stream, *args, head_dim);
    if (status != PD_OK)
        return status;
    switch (head_dim) {
    case 32: return launch<32>(stream, args, kv_heads, tiles);
    case 64: return launch<64>(stream, args, kv_heads, tiles);
    case 80: return launch<80>(stream, args, kv_heads, tiles);
    case 96: return launch<96>(stream, args, kv_heads, tiles);
    case 128: return launch<128>(stream, args, kv_heads, tiles);
    case 256: return launch<256>(stream, args, kv_heads, tiles);
    }
    return PD_E_UNSUPPORTED;
}
