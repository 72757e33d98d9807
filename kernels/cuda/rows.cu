/* kernels/cuda/rows.cu - what works on whole rows of activations: the embedding, residual sum and
 * RMSNorm, SwiGLU, and the quantisation that each of them ends with.
 *
 * All results are kernels/ref/ops.c's, bit for bit.
 *
 * RMSNorm has an order: 16 lanes, lane l a chain of fma over columns l, l + 16, ..., then halves
 * onto halves (kernels/number.h). A chain cannot be cut, so a row takes at least hidden / 16
 * dependent fma of 4 cycles: 0.5 us at 4,096 columns and 2 GHz, whatever is done. What can be had
 * is that nothing else waits for it.
 *
 * Ladder of residual_norm
 *   1  (not built) a thread a lane of a row, from memory: 64 bytes a load, every column of the
 *      chain waits for memory
 *   2  a block a row. All threads add the parts and lay the row into shared memory, 16 bytes a
 *      thread; then one warp runs the 16 chains over it (in SASS, loads of later columns lie
 *      between the fma of earlier ones); then all threads scale, quantise and write from
 *      shared memory. Every byte moves once: x in and out, the parts in, the results out. In
 *      prefill several blocks an SM cover one another's chains (a row of 4,096 columns with two
 *      terms moves 72 KiB, which takes an SM 2.2 us of its share of 4.3 TB/s: four chains' time),
 *      so the bound is bytes; in decode it is the latency of one load of everything (the parts of
 *      all ranks and terms are asked for together) and the chain.
 * Lane l's columns lie 16 floats apart: lanes read 16 neighbouring banks, the warp's other half the
 * same words, one wavefront a load. Rows are filled up with zeros to whole turns of the loop:
 * fma(0, 0, sum) is sum.
 *
 * A block of 32 activations is 8 neighbouring lanes with 4 columns each, so that every global
 * access of a warp is a run of 512 bytes (values), 256 (halves) or 128 (quants). */

#include "kernels/cuda/launch.h"
#include "kernels/cuda/words.h"

#define BLOCK        32 /* columns that share an activation scale */
#define MAGIC        12582912.0f
#define CHAIN_AHEAD  8                  /* columns of a lane that are asked for together */
#define CHAIN_COLS   (16 * CHAIN_AHEAD) /* of a row, in one turn of the chains' loop */
#define THREADS_MAX  1024
#define COLS_THREADS 256 /* of kernels that go by column; 4 columns each */
#define COLS_CHUNK   (4 * COLS_THREADS)

/* --- quantisation --- */

/* What one lane has of a block of 32: its 4 quants, low byte first, and the block's rest. */
struct quantised {
    uint32_t quants;
    int32_t sum;
    float scale;
};

CU_DEVICE uint32_t magnitude(float value)
{
    return cu_bits(value) & 0x7fffffff;
}

CU_DEVICE uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

CU_DEVICE uint32_t quant_of(float value, float inverse, bool plain)
{
    float shifted = plain ? value * inverse + MAGIC : MAGIC; /* half to even */

    return (cu_bits(shifted) - cu_bits(MAGIC)) & 0xff;
}

/* All lanes of a warp; 8 neighbours hold a block. As ref_quantize: the largest is found among bit
 * patterns, where a NaN is above everything. */
CU_DEVICE quantised quantize(float4 v)
{
    quantised q;
    uint32_t amax_bits =
        larger(larger(magnitude(v.x), magnitude(v.y)), larger(magnitude(v.z), magnitude(v.w)));

    for (uint32_t bits = 1; bits < 8; bits *= 2)
        amax_bits = larger(amax_bits, cu_shuffle_xor(CU_ALL, amax_bits, bits));
    float amax = cu_float(amax_bits);
    bool plain = amax >= 1e-35f && amax <= 3e38f;
    float inverse = plain ? 127.0f / amax : 0;
    q.quants = quant_of(v.x, inverse, plain) | quant_of(v.y, inverse, plain) << 8 |
               quant_of(v.z, inverse, plain) << 16 | quant_of(v.w, inverse, plain) << 24;
    q.sum = cu_dp4a(q.quants, 0x01010101, 0);
    for (uint32_t bits = 1; bits < 8; bits *= 2)
        q.sum += cu_shuffle_xor(CU_ALL, q.sum, bits);
    q.scale = plain ? amax / 127.0f : amax < 1 ? 0 : amax;
    return q;
}

CU_DEVICE bool wants_quants(const cu_acts &out)
{
    return out.quants != NULL || out.scales != NULL || out.sums != NULL || out.quant_sums != NULL;
}

/* The first three lanes of a block write its three numbers. */
CU_DEVICE void put_quants(const cu_acts &out, uint64_t at, quantised q)
{
    uint32_t part = threadIdx.x % 8;
    uint64_t block = at / BLOCK;

    if (out.quants != NULL)
        cu_store<uint32_t>(out.quants + at, q.quants);
    if (part == 0 && out.scales != NULL)
        cu_store<float>(out.scales + block, q.scale);
    if (part == 1 && out.sums != NULL)
        cu_store<float>(out.sums + block, q.scale * (float)q.sum);
    if (part == 2 && out.quant_sums != NULL)
        cu_store<int32_t>(out.quant_sums + block, q.sum);
}

CU_DEVICE uint32_t half_of(float value, bool bf16)
{
    return bf16 ? cu_f32_to_bf16(value) : cu_f32_to_f16(value);
}

CU_DEVICE void put_halves(const cu_acts &out, uint64_t at, float4 v)
{
    bool bf16 = out.halves_are_bf16;
    uint2 halves;

    halves.x = half_of(v.x, bf16) | half_of(v.y, bf16) << 16;
    halves.y = half_of(v.z, bf16) | half_of(v.w, bf16) << 16;
    cu_store<uint2>(out.halves + at, halves);
}

/* All lanes of a warp. Four columns of a row in every form that is asked for; at: their place in
 * [rows][cols]. Lanes outside the row write nothing, by whole blocks. */
CU_DEVICE quantised put(const cu_acts &out, uint64_t at, float4 v, bool inside)
{
    quantised q = {0, 0, 0};

    if (inside && out.values != NULL)
        cu_store<float4>(out.values + at, v);
    if (inside && out.halves != NULL)
        put_halves(out, at, v);
    if (!wants_quants(out))
        return q;
    q = quantize(v);
    if (inside)
        put_quants(out, at, q);
    return q;
}

CU_DEVICE int32_t quant_at(uint32_t quants, uint32_t index)
{
    return (int8_t)(quants >> (8 * index));
}

/* What q leaves out of v, as ref_residual. */
CU_DEVICE float4 rounded_off(float4 v, quantised q)
{
    float4 rest;

    rest.x = fmaf(-q.scale, (float)quant_at(q.quants, 0), v.x);
    rest.y = fmaf(-q.scale, (float)quant_at(q.quants, 1), v.y);
    rest.z = fmaf(-q.scale, (float)quant_at(q.quants, 2), v.z);
    rest.w = fmaf(-q.scale, (float)quant_at(q.quants, 3), v.w);
    return rest;
}

/* Kernels by column: block (row, chunk), 4 columns a thread. */
CU_DEVICE uint32_t col_of_thread()
{
    return blockIdx.y * COLS_CHUNK + 4 * threadIdx.x;
}

static dim3 grid_by_cols(uint32_t rows, uint32_t cols)
{
    return dim3(rows, (cols + COLS_CHUNK - 1) / COLS_CHUNK, 1);
}

CU_KERNEL(COLS_THREADS, 4) quantize_rows(const float *values, cu_acts out, cu_acts residual)
{
    uint32_t col = col_of_thread();
    uint64_t at = (uint64_t)blockIdx.x * out.cols + col;
    bool inside = col < out.cols;
    float4 v = make_float4(0, 0, 0, 0);

    if (inside)
        v = cu_load_once<float4>(values + at);
    quantised q = put(out, at, v, inside);
    if (residual.cols == 0)
        return;
    put(residual, at, rounded_off(v, q), inside);
}

pd_status cu_quantize(gpu_stream *stream, uint32_t rows, const cu_acts *acts,
                      const cu_acts *residual)
{
    cu_acts out = *acts, rest = {};

    pd_assert(acts->cols % BLOCK == 0 && acts->values != NULL);
    out.values = NULL;
    if (residual != NULL) {
        pd_assert(residual->cols == acts->cols && acts->quants != NULL);
        rest = *residual;
    }
    if (rows == 0)
        return PD_OK;
    return CU_LAUNCH(quantize_rows, grid_by_cols(rows, acts->cols), dim3(COLS_THREADS, 1, 1), 0,
                     stream, acts->values, out, rest);
}

/* --- SwiGLU --- */

CU_DEVICE float silu_times(float gate, float up)
{
    return gate / (1.0f + cu_exp(-gate)) * up;
}

CU_KERNEL(COLS_THREADS, 4) silu_mul(const float *gate_up, cu_acts out)
{
    uint32_t col = col_of_thread();
    uint64_t row = blockIdx.x;
    bool inside = col < out.cols;
    float4 v = make_float4(0, 0, 0, 0);

    if (inside) {
        const float *gate_at = gate_up + row * 2 * out.cols + col;
        float4 gate = cu_load_once<float4>(gate_at);
        float4 up = cu_load_once<float4>(gate_at + out.cols);
        v = make_float4(silu_times(gate.x, up.x), silu_times(gate.y, up.y),
                        silu_times(gate.z, up.z), silu_times(gate.w, up.w));
    }
    put(out, row * out.cols + col, v, inside);
}

pd_status cu_silu_mul(gpu_stream *stream, uint32_t rows, uint32_t ffn, const float *gate_up,
                      const cu_acts *out)
{
    pd_assert(ffn % BLOCK == 0 && out->cols == ffn);
    if (rows == 0)
        return PD_OK;
    return CU_LAUNCH(silu_mul, grid_by_cols(rows, ffn), dim3(COLS_THREADS, 1, 1), 0, stream,
                     gate_up, *out);
}

/* --- the embedding --- */

/* Blocks of 32 in the file are 2-byte aligned. */
CU_DEVICE uint32_t load_pair(const uint8_t *bytes)
{
    return cu_load<uint16_t>(bytes) | (uint32_t)cu_load<uint16_t>(bytes + 2) << 16;
}

CU_DEVICE float4 embed_q8(const uint8_t *row, uint32_t col)
{
    const uint8_t *block = row + (uint64_t)(col / BLOCK) * 34;
    uint32_t quants = load_pair(block + 2 + col % BLOCK);
    float d = cu_f16_to_f32(cu_load<uint16_t>(block));

    return make_float4((float)quant_at(quants, 0) * d, (float)quant_at(quants, 1) * d,
                       (float)quant_at(quants, 2) * d, (float)quant_at(quants, 3) * d);
}

/* Columns i and i + 16 of a block share a byte. */
CU_DEVICE float4 embed_q4(const uint8_t *row, uint32_t col, bool has_min)
{
    const uint8_t *block = row + (uint64_t)(col / BLOCK) * (has_min ? 20 : 18);
    uint32_t i = col % BLOCK;
    uint32_t nibbles = load_pair(block + (has_min ? 4 : 2) + i % 16) >> (i < 16 ? 0 : 4);
    float d = cu_f16_to_f32(cu_load<uint16_t>(block)), v[4];

    for (uint32_t k = 0; k < 4; k++) {
        int32_t nibble = (int32_t)(nibbles >> (8 * k) & 15);
        if (has_min)
            v[k] = (float)nibble * d + cu_f16_to_f32(cu_load<uint16_t>(block + 2));
        else
            v[k] = (float)(nibble - 8) * d;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

CU_DEVICE float4 embed_half(const uint8_t *row, uint32_t col, bool bf16)
{
    uint2 halves = cu_load<uint2>(row + 2 * (uint64_t)col);
    uint16_t h[4] = {(uint16_t)halves.x, (uint16_t)(halves.x >> 16), (uint16_t)halves.y,
                     (uint16_t)(halves.y >> 16)};

    if (bf16)
        return make_float4(cu_bf16_to_f32(h[0]), cu_bf16_to_f32(h[1]), cu_bf16_to_f32(h[2]),
                           cu_bf16_to_f32(h[3]));
    return make_float4(cu_f16_to_f32(h[0]), cu_f16_to_f32(h[1]), cu_f16_to_f32(h[2]),
                       cu_f16_to_f32(h[3]));
}

/* kern_row_to_f32 of four columns. */
CU_DEVICE float4 embedding(pd_dtype dtype, const uint8_t *row, uint32_t col)
{
    switch (dtype) {
    case PD_F32: return cu_load<float4>(row + 4 * (uint64_t)col);
    case PD_F16: return embed_half(row, col, false);
    case PD_BF16: return embed_half(row, col, true);
    case PD_Q8_0: return embed_q8(row, col);
    default: return embed_q4(row, col, dtype == PD_Q4_1);
    }
}

CU_KERNEL(COLS_THREADS, 4)
embed(const uint32_t *tokens, const uint32_t *positions, pd_dtype dtype, const uint8_t *table,
      uint32_t hidden, uint64_t row_bytes, float *x)
{
    uint32_t row = blockIdx.x, col = col_of_thread();
    float4 v = make_float4(0, 0, 0, 0);

    if (col >= hidden)
        return;
    if (positions[row] != CU_ROW_NONE)
        v = embedding(dtype, table + tokens[row] * row_bytes, col);
    cu_store<float4>(x + (uint64_t)row * hidden + col, v);
}

pd_status cu_embed(gpu_stream *stream, const cu_step *step, pd_dtype dtype, const void *table,
                   uint32_t hidden, uint64_t row_bytes, float *x)
{
    pd_assert(hidden % BLOCK == 0 && dtype <= PD_Q8_0);
    /* accesses are as wide as four columns of the format, two bytes in blocks */
    pd_assert(row_bytes % (dtype == PD_F32                       ? 16
                           : dtype == PD_F16 || dtype == PD_BF16 ? 8
                                                                 : 2) ==
              0);
    if (step->rows == 0)
        return PD_OK;
    return CU_LAUNCH(embed, grid_by_cols(step->rows, hidden), dim3(COLS_THREADS, 1, 1), 0, stream,
                     step->token, step->position, dtype, (const uint8_t *)table, hidden, row_bytes,
                     x);
}

/* --- the sum of parts --- */

#define SUM_ITEMS_MAX 128
#define SUM_AHEAD     4 /* parts that are asked for together */

/* The trees as steps, worked out by the launcher: load a part and put it on a stack; add the top
 * two `merges` times (the left one is the lower); where the term ends, add the top to x. */
struct sum_item {
    uint16_t slab; /* which [row][hidden] of the parts */
    uint8_t merges, ends;
};
struct sum_program {
    uint32_t count, depth;
    sum_item items[SUM_ITEMS_MAX];
};

CU_DEVICE float4 add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* The stack lies in registers: its top is stack[0], and it is moved on, never indexed. */
template <int DEPTH>
CU_DEVICE float4 add_parts(const sum_program &program, const float *parts, uint64_t slab_floats,
                           float4 x)
{
    float4 stack[DEPTH], ahead[SUM_AHEAD];

    for (int i = 0; i < DEPTH; i++)
        stack[i] = make_float4(0, 0, 0, 0);
    for (uint32_t first = 0; first < program.count; first += SUM_AHEAD) {
#pragma unroll
        for (uint32_t k = 0; k < SUM_AHEAD; k++)
            if (first + k < program.count)
                ahead[k] =
                    cu_load_once<float4>(parts + program.items[first + k].slab * slab_floats);
#pragma unroll
        for (uint32_t k = 0; k < SUM_AHEAD; k++) {
            if (first + k >= program.count)
                break;
            sum_item item = program.items[first + k];
#pragma unroll
            for (int i = DEPTH - 1; i > 0; i--)
                stack[i] = stack[i - 1];
            stack[0] = ahead[k];
            for (uint32_t m = 0; DEPTH > 1 && m < item.merges; m++) {
                stack[0] = add4(stack[DEPTH > 1 ? 1 : 0], stack[0]);
#pragma unroll
                for (int i = 1; i + 1 < DEPTH; i++)
                    stack[i] = stack[i + 1];
            }
            if (item.ends)
                x = add4(x, stack[0]);
        }
    }
    return x;
}

struct sum_slabs { /* by first leaf: which slab of a term's first, and how many leaves (0: none) */
    uint16_t slab[KERN_LEAVES_MAX];
    uint8_t leaves[KERN_LEAVES_MAX];
};

/* Appends the steps of T(lo, n); depth: what lies on the stack before. */
static void plan_tree(sum_program *program, const sum_slabs *slabs, uint32_t term_slab, uint32_t lo,
                      uint32_t n, uint32_t depth)
{
    if (slabs->leaves[lo] == n) {
        pd_assert(program->count < SUM_ITEMS_MAX);
        program->items[program->count++] =
            sum_item{(uint16_t)(term_slab + slabs->slab[lo]), 0, false};
        program->depth = depth + 1 > program->depth ? depth + 1 : program->depth;
        return;
    }
    pd_assert(n > 1);
    uint32_t left = kern_tree_left(n);
    plan_tree(program, slabs, term_slab, lo, left, depth);
    plan_tree(program, slabs, term_slab, lo + left, n - left, depth + 1);
    program->items[program->count - 1].merges++;
}

static sum_program plan_sum(const cu_residual *add)
{
    sum_program program = {};
    sum_slabs slabs = {};
    uint32_t leaves = add->leaves_all, most = kern_nodes_most(leaves, add->ranks);

    pd_assert(add->ranks <= leaves && leaves <= KERN_LEAVES_MAX);
    pd_assert((uint64_t)add->ranks * add->terms * most <= UINT16_MAX);
    for (uint32_t rank = 0; rank < add->ranks; rank++) {
        kern_nodes nodes =
            kern_nodes_of(leaves, rank * leaves / add->ranks, (rank + 1) * leaves / add->ranks);
        for (uint32_t i = 0; i < nodes.count; i++) {
            slabs.slab[nodes.node[i].lo] = (uint16_t)(rank * add->terms * most + i);
            slabs.leaves[nodes.node[i].lo] = nodes.node[i].count;
        }
    }
    for (uint32_t term = 0; term < add->terms; term++) {
        plan_tree(&program, &slabs, term * most, 0, leaves, 0);
        program.items[program.count - 1].ends = true;
    }
    return program;
}

/* --- residual and RMSNorm --- */

struct norm_job {
    uint32_t hidden;
    const uint32_t *select; /* rows of x; NULL: all, in order */
    float *x;
    const float *parts;
    uint64_t slab_floats;
    const float *weight; /* NULL: only the sum */
    float eps;
    cu_acts out;
};

/* The row with its parts: to x, and to shared memory where it will be normalised. */
template <int DEPTH>
CU_DEVICE void gather_row(const norm_job &job, const sum_program &program, uint64_t x_row,
                          float *row)
{
    uint32_t padded = (job.hidden + CHAIN_COLS - 1) / CHAIN_COLS * CHAIN_COLS;

    for (uint32_t col = 4 * threadIdx.x; col < job.hidden; col += 4 * blockDim.x) {
        uint64_t at = x_row * job.hidden + col;
        float4 v = cu_load<float4>(job.x + at);
        if (DEPTH > 0) {
            v = add_parts<(DEPTH > 0 ? DEPTH : 1)>(program, job.parts + at, job.slab_floats, v);
            cu_store<float4>(job.x + at, v);
        }
        if (job.weight != NULL)
            cu_store<float4>(row + col, v);
    }
    for (uint32_t col = job.hidden + 4 * threadIdx.x; job.weight != NULL && col < padded;
         col += 4 * blockDim.x)
        cu_store<float4>(row + col, make_float4(0, 0, 0, 0));
}

/* One warp: the sum of squares in the 16-lane order, in every lane. */
CU_DEVICE float sum_squares(const float *row, uint32_t hidden, uint32_t lane)
{
    float sum = 0;

    row += lane % 16;
    for (uint32_t col = 0; col < hidden; col += CHAIN_COLS) {
#pragma unroll
        for (uint32_t k = 0; k < CHAIN_AHEAD; k++) {
            float x = row[col + 16 * k];
            sum = fmaf(x, x, sum);
        }
    }
    for (uint32_t half = 8; half > 0; half /= 2) /* halves onto halves; + commutes */
        sum += cu_shuffle_xor(CU_ALL, sum, half);
    return sum;
}

CU_DEVICE void put_row(const norm_job &job, const float *row, float scale, uint64_t out_row)
{
    uint32_t turns = (job.hidden + 4 * blockDim.x - 1) / (4 * blockDim.x);

    for (uint32_t turn = 0; turn < turns; turn++) {
        uint32_t col = 4 * (turn * blockDim.x + threadIdx.x);
        bool inside = col < job.hidden;
        float4 v = make_float4(0, 0, 0, 0);
        if (inside) {
            float4 x = cu_load<float4>(row + col), w = cu_load<float4>(job.weight + col);
            v = make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z,
                            x.w * scale * w.w);
        }
        put(job.out, out_row * job.hidden + col, v, inside);
    }
}

/* A block a row. DEPTH 0: nothing is added. A deep stack takes more than the 64 registers that
 * 1,024 threads can have. */
#define NORM_THREADS_MAX(depth) ((depth) > 4 ? THREADS_MAX / 2 : THREADS_MAX)
template <int DEPTH>
CU_KERNEL(NORM_THREADS_MAX(DEPTH), 1)
residual_norm(norm_job job, sum_program program)
{
    CU_SHARED_DYNAMIC(shared);
    CU_SHARED float scale_shared;
    float *row = (float *)shared;
    uint64_t x_row = blockIdx.x;

    if (job.select != NULL) {
        x_row = job.select[blockIdx.x];
        if (x_row == CU_ROW_NONE)
            return;
    }
    gather_row<DEPTH>(job, program, x_row, row);
    if (job.weight == NULL)
        return;
    cu_sync();
    if (threadIdx.x < 32) {
        float sum = sum_squares(row, job.hidden, threadIdx.x);
        if (threadIdx.x == 0)
            scale_shared = 1.0f / sqrtf(sum / (float)job.hidden + job.eps);
    }
    cu_sync();
    put_row(job, row, scale_shared, blockIdx.x);
}

/* About four float4 a thread; where every row has an SM to itself, as many threads as help it. */
static uint32_t norm_threads(gpu_stream *stream, uint32_t rows, uint32_t hidden, uint32_t depth)
{
    uint32_t most = NORM_THREADS_MAX(depth);
    uint32_t wanted = (hidden / 4 + 31) / 32 * 32;

    if (rows > gpu_info_of(gpu_stream_gpu(stream))->processors) {
        wanted = (hidden / 16 + 31) / 32 * 32;
        wanted = wanted < 128 ? 128 : wanted > 512 ? 512 : wanted;
    }
    return wanted < most ? wanted : most;
}

static pd_status launch_norm(gpu_stream *stream, uint32_t rows, const norm_job *job,
                             const sum_program *program)
{
    dim3 grid(rows, 1, 1), block(norm_threads(stream, rows, job->hidden, program->depth), 1, 1);
    uint64_t shared = (job->hidden + CHAIN_COLS - 1) / CHAIN_COLS * CHAIN_COLS * sizeof(float);

    pd_assert(job->hidden % BLOCK == 0 && job->hidden <= CU_HIDDEN_MAX);
    if (job->weight == NULL)
        shared = 0;
    if (rows == 0)
        return PD_OK;
    if (program->depth == 0)
        return CU_LAUNCH((residual_norm<0>), grid, block, shared, stream, *job, *program);
    if (program->depth == 1)
        return CU_LAUNCH((residual_norm<1>), grid, block, shared, stream, *job, *program);
    if (program->depth == 2)
        return CU_LAUNCH((residual_norm<2>), grid, block, shared, stream, *job, *program);
    if (program->depth <= 4)
        return CU_LAUNCH((residual_norm<4>), grid, block, shared, stream, *job, *program);
    return CU_LAUNCH((residual_norm<7>), grid, block, shared, stream, *job, *program);
}

pd_status cu_residual_norm(gpu_stream *stream, uint32_t rows, uint32_t hidden, float *x,
                           const cu_residual *add, const float *norm_weight, float eps,
                           const cu_acts *out)
{
    norm_job job = {};
    sum_program program = {};

    job.hidden = hidden;
    job.x = x;
    if (add->ranks > 0) {
        job.parts = add->parts;
        job.slab_floats = (uint64_t)rows * hidden;
        program = plan_sum(add);
    }
    if (norm_weight != NULL) {
        pd_assert(out->cols == hidden);
        job.weight = norm_weight;
        job.eps = eps;
        job.out = *out;
    }
    return launch_norm(stream, rows, &job, &program);
}

pd_status cu_norm_rows(gpu_stream *stream, const uint32_t *logits_row, uint32_t count,
                       uint32_t hidden, const float *x, const float *norm_weight, float eps,
                       const cu_acts *out)
{
    norm_job job = {};
    sum_program program = {};

    pd_assert(out->cols == hidden);
    job.hidden = hidden;
    job.select = logits_row;
    job.x = (float *)x; /* depth 0: only read */
    job.weight = norm_weight;
    job.eps = eps;
    job.out = *out;
    return launch_norm(stream, count, &job, &program);
}
