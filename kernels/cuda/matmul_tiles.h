#pragma once

/* kernels/cuda/matmul_tiles.h - the two matmul kernels, written once for every format.
 *
 * Included by matmul.cu, matmul_quant.cu and matmul_half.cu alone. Weights are the A operand of
 * mma (16 rows a panel), activations the B operand (8 rows a tile), so that one activation row
 * costs a padded tile of 8 and reads every weight once.
 *
 * Packed weights, as cu_pack writes them:
 *
 *     [panel of 16 rows][block of columns][fragments, scales]
 *
 * A block is 32 columns (quantised) or 16 (f16, bf16): one mma deep. Fragments are in the order of
 * the instruction's A operand, lane by lane (g = lane / 4, t = lane % 4):
 *     Q8_0      512 bytes: lane's 16 are row g columns 4t.., row g + 8 the same, row g columns
 *               16 + 4t.., row g + 8 the same
 *     Q4_0/1    256 bytes: lane's 8 are two words, rows g and g + 8; byte j of a word holds column
 *               4t + j in its low nibble, 16 + 4t + j in its high one. Q4_0's are q - 8 in two's
 *               complement
 *     f16/bf16  512 bytes: lane's 16 are row g columns 2t, 2t + 1, row g + 8 the same, then columns
 *               8 + 2t, 9 + 2t of both
 * Scales follow: for g = 0 .. 7, d of rows g and g + 8 (f16); Q4_1: d, m of row g, d, m of g + 8.
 * Every run of blocks of a panel is one run of bytes, in multiples of 16: a warp's copy is 16 bytes
 * a lane, neighbours side by side, each weight once.
 *
 * Bits. An output is a chain over its leaf's blocks in order. Quantised: one exact integer dot a
 * block, turned into a float by adding it to the mantissa of a constant (exact), then one fmaf (two
 * for Q4_1), as kernels/ref/ops.c. 16-bit: one mma a block into the same accumulator. Neither
 * depends on the tile, so few and many rows give the same bits. Leaves are then added as
 * kernels/sum_tree.h says.
 *
 * The ladder (SASS of sm_90; no GPU yet, so instructions and bytes instead of times; an H200 issues
 * 1.05e12 warp instructions a second and copies 4.3 TB/s)
 *   1  Copies counted out chunk by chunk, a stage's tail as zeros, k unrolled: 30 instructions a
 *      16 x 8 x 32 tile of Q4_1 with many rows, 81 with few; the work alone is 17 and 35.
 *   2  Offsets that only grow (matmul_source), whole stages without a test, k not unrolled where a
 *      block has sixteen tiles anyway: 23 and 46.
 *   3  A stage of 8 blocks instead of 4 with few rows. This is what is here:
 *
 *                        instructions     bound                         registers  stages
 *      few   Q4_1 8 rows  46 / 320 bytes  59 % of the issue slots        78        4 x 5.25 KiB
 *            Q4_0         39 / 288        56 %       at 4.3 TB/s         78        4 x 4.6
 *            Q8_0         35 / 544        26 %                           80        4 x 6.6
 *            f16, bf16    16 / 512        13 %                           48        4 x 6.0
 *      many  Q4_1         23 / tile       375 TOP/s by issue            168        4 x 10.25
 *            Q4_0         18              470                           128        4 x 13.6
 *            Q8_0         18              480                           128        4 x 17.6
 *            of a tree    26 (Q4_1)       330                           214        4 x 7.75
 *            f16, bf16     3 / 16x8x16    the tensor cores              189        4 x 16.0
 *      Of a Q4_1 tile's 23, 17 are the update itself (4 of FADD, FMUL and 2 x 4 FFMA, IMMA): the
 *      order of the sums leaves no fewer. So int8's rate is out of reach by design, see
 *      docs/kernels.md, "Same bits".
 *   What would be next: few rows and one leaf (q, k, v at 4096 columns: 3 warps a processor, each a
 *   chain of 128 blocks) want the blocks of a chain spread over warps that hand the sum on; wgmma
 *   for 16-bit weights on sm_90a.
 * Sectors and wavefronts are ideal in the emulator's counts, but for the scales of activations (4
 * bytes a row and block: with many rows a stage has 8 bytes of a sector, L1 the rest; d and sum of
 * Q4_1 are written 8 bytes apart) and stores to rows that do not begin at a multiple of 32 bytes.
 */

#include "kernels/cuda/launch.h"
#include "kernels/cuda/words.h"

#define MATMUL_PANEL CU_PACK_ROWS /* weight rows, an A operand's */

/* What both kernels are told. A node's lo counts from the rank's first leaf. */
typedef struct matmul_job {
    const unsigned char *weights;
    const unsigned char *acts;  /* [rows][blocks][32 bytes]: int8, f16 or bf16 */
    const float *scales, *sums; /* [rows][blocks]; NULL for 16-bit formats */
    float *out;                 /* [node][rows][out_stride] */
    uint64_t out_stride, node_stride;
    uint32_t matrix_rows, rows, panels, blocks, leaf_blocks, nodes;
    kern_node node[KERN_NODES_MAX];
} matmul_job;

/* Queues the product in the kernel that suits the number of rows; matmul_quant.cu: Q4_0, Q4_1,
 * Q8_0; matmul_half.cu: F16, BF16. */
PD_CHECKED pd_status matmul_quant(gpu_stream *stream, pd_dtype dtype, const matmul_job *job);
PD_CHECKED pd_status matmul_half(gpu_stream *stream, pd_dtype dtype, const matmul_job *job);

/* node[index], without an address: arguments that are indexed are copied to local memory. */
CU_DEVICE kern_node matmul_node(const kern_node node[KERN_NODES_MAX], uint32_t index)
{
    kern_node found = node[0];

#pragma unroll
    for (uint32_t i = 1; i < KERN_NODES_MAX; i++)
        if (i == index)
            found = node[i];
    return found;
}

/* Adds up the leaves of one output in tree order: neighbours, then neighbouring pairs, ...; an odd
 * one at the end waits for its turn, which is what T(lo, n) says. */
CU_DEVICE float matmul_leaves_sum(float *leaf, uint32_t count, uint32_t pitch)
{
    for (uint32_t step = 1; step < count; step *= 2)
        for (uint32_t i = 0; i + step < count; i += 2 * step)
            leaf[i * pitch] += leaf[(i + step) * pitch];
    return leaf[0];
}

/* --- formats --- */

template <int DTYPE> struct matmul_format {
    static constexpr bool half = DTYPE == PD_F16 || DTYPE == PD_BF16;
    static constexpr bool q4 = DTYPE == PD_Q4_0 || DTYPE == PD_Q4_1;
    static constexpr bool has_min = DTYPE == PD_Q4_1;
    static constexpr int fragment_bytes = q4 ? 256 : 512;
    static constexpr int block_bytes = fragment_bytes + (half ? 0 : has_min ? 64 : 32);
    /* a row and block of activations brings its scale along, for Q4_1 its sum, too */
    static constexpr int float_bytes = half ? 0 : has_min ? 8 : 4;
};

/* A stage: some blocks of some panels and of some activation rows, in shared memory:
 * [panel][block] weights, [block][row] quants or halves, [block][row] scales (and sums). Scales are
 * copied by lanes of `blocks` neighbouring blocks of 32 / blocks rows: between the blocks lie as
 * many rows of nothing, so that no two lanes write to one bank. */
template <int DTYPE, int BLOCKS, int PANELS, int ROWS> struct matmul_stage {
    typedef matmul_format<DTYPE> format;
    static constexpr int dtype = DTYPE, blocks = BLOCKS, panels = PANELS, rows = ROWS;
    static constexpr int acts_at = PANELS * BLOCKS * format::block_bytes;
    static constexpr int floats_at = acts_at + BLOCKS * ROWS * 32;
    static constexpr int floats_pitch = ROWS + 32 / BLOCKS; /* rows, from block to block */
    static constexpr int bytes = floats_at + BLOCKS * floats_pitch * format::float_bytes;
};

/* Where a 16-byte half of a block of an activation row lies in a stage, [block][row][half]: every
 * other four rows have their halves exchanged, so that the eight rows of an ldmatrix lie in eight
 * different groups of four banks. */
CU_DEVICE uint32_t matmul_act_at(uint32_t row, uint32_t half)
{
    return row * 32 + ((half ^ (row >> 2 & 1)) << 4);
}

/* Where a thread's copies come from, as offsets that grow from stage to stage. A warp copies whole
 * panels; activations and their scales are dealt out thread by thread. Panels and rows past the
 * matrix' end are read as the last one: what is computed of them is not stored. */
template <typename STAGE, int THREADS> struct matmul_source {
    static constexpr int panels = STAGE::panels * 32 / THREADS;                    /* of a warp */
    static constexpr int chunks = STAGE::blocks * STAGE::format::block_bytes / 16; /* of a panel */
    /* halves of rows: act_rows a thread, or act_step blocks at once */
    static constexpr int act_rows = STAGE::rows * 2 > THREADS ? STAGE::rows * 2 / THREADS : 1;
    static constexpr int act_step = STAGE::rows * 2 > THREADS ? 1 : THREADS / (STAGE::rows * 2);
    static constexpr int items = STAGE::blocks * STAGE::rows; /* scales */
    static constexpr int item_rows = items > THREADS ? items / THREADS : 1;
    static_assert(panels * THREADS == STAGE::panels * 32, "each warp has as many panels");
    static_assert(act_step <= STAGE::blocks, "every thread copies activations");

    uint32_t weights[panels];     /* in 16 bytes */
    uint32_t acts[act_rows];      /* in 16 bytes */
    uint32_t items_at[item_rows]; /* in 4 bytes */
};

CU_DEVICE uint32_t matmul_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

template <typename STAGE, int THREADS>
CU_DEVICE void matmul_source_init(matmul_source<STAGE, THREADS> *source, const matmul_job &job,
                                  uint32_t panel, uint32_t row, uint32_t block, uint32_t thread)
{
    typedef matmul_source<STAGE, THREADS> self;

#pragma unroll
    for (uint32_t i = 0; i < self::panels; i++) {
        uint32_t p = matmul_least(panel + thread / 32 + i * (THREADS / 32), job.panels - 1);
        source->weights[i] =
            (p * job.blocks + block) * (STAGE::format::block_bytes / 16) + thread % 32;
    }
#pragma unroll
    for (uint32_t i = 0; i < self::act_rows; i++) {
        uint32_t chunk = thread + i * THREADS; /* [block][row][half] */
        uint32_t r = matmul_least(row + chunk / 2 % STAGE::rows, job.rows - 1);
        uint32_t k = chunk / (2 * STAGE::rows);
        source->acts[i] = (r * job.blocks + block + k) * 2 + chunk % 2;
    }
#pragma unroll
    for (uint32_t i = 0; i < self::item_rows; i++) {
        uint32_t item = thread + i * THREADS; /* [row][block] */
        uint32_t r = matmul_least(row + item / STAGE::blocks, job.rows - 1);
        source->items_at[i] = r * job.blocks + block + item % STAGE::blocks;
    }
}

/* Begins the copies of the next stage's count blocks. FULL: as many as it holds. */
template <typename STAGE, int THREADS, bool FULL>
CU_DEVICE void matmul_stage_copy(unsigned char *stage, const matmul_job &job,
                                 const matmul_source<STAGE, THREADS> *source, uint32_t count,
                                 uint32_t thread)
{
    typedef matmul_source<STAGE, THREADS> self;
    typedef typename STAGE::format format;
    uint32_t warp = thread / 32, lane = thread % 32;

#pragma unroll
    for (uint32_t i = 0; i < self::panels; i++) {
        unsigned char *to = stage + ((warp + i * (THREADS / 32)) * self::chunks + lane) * 16;
        const unsigned char *from = job.weights + (uint64_t)source->weights[i] * 16;
#pragma unroll
        for (uint32_t c = 0; c < self::chunks; c += 32)
            if ((FULL && c + 32 <= self::chunks) ||
                c + lane < count * (uint32_t)(format::block_bytes / 16))
                cu_async_16(to + c * 16, from + c * 16, true);
    }
#pragma unroll
    for (uint32_t i = 0; i < self::act_rows; i++) {
        uint32_t chunk = thread + i * THREADS, r = chunk / 2 % STAGE::rows;
        uint32_t k = chunk / (2 * STAGE::rows);
        unsigned char *to =
            stage + STAGE::acts_at + k * (STAGE::rows * 32) + matmul_act_at(r, chunk % 2);
        const unsigned char *from = job.acts + (uint64_t)source->acts[i] * 16;
#pragma unroll
        for (uint32_t j = 0; j < STAGE::blocks; j += self::act_step)
            if (FULL || k + j < count)
                cu_async_16(to + j * (STAGE::rows * 32), from + j * 32, true);
    }
    if constexpr (!format::half) {
#pragma unroll
        for (uint32_t i = 0; i < self::item_rows; i++) {
            uint32_t item = thread + i * THREADS, r = item / STAGE::blocks;
            uint32_t k = item % STAGE::blocks;
            unsigned char *to =
                stage + STAGE::floats_at + (k * STAGE::floats_pitch + r) * format::float_bytes;
            if ((self::items >= THREADS || item < self::items) && (FULL || k < count)) {
                /* sectors 4: `blocks` of a row's scales, the rest of the sector is L1's for the
                 * next stages. wavefronts 2: Q4_1's d and sum side by side, read as one float4 */
                cu_async_4(to, job.scales + source->items_at[i], true);
                if constexpr (format::has_min) /* sectors 4, wavefronts 2: the same */
                    cu_async_4(to + 4, job.sums + source->items_at[i], true);
            }
        }
    }
}

/* The next stage, as one group of copies: of the `left` blocks not yet used `ahead` are on their
 * way, and where there are more, it has some. */
template <typename STAGE, int THREADS>
CU_DEVICE void matmul_stage_load(unsigned char *stage, const matmul_job &job,
                                 matmul_source<STAGE, THREADS> *source, uint32_t left,
                                 uint32_t ahead, uint32_t thread)
{
    typedef matmul_source<STAGE, THREADS> self;

    if (left >= ahead + STAGE::blocks) {
        matmul_stage_copy<STAGE, THREADS, true>(stage, job, source, STAGE::blocks, thread);
#pragma unroll
        for (int i = 0; i < self::panels; i++)
            source->weights[i] += self::chunks;
#pragma unroll
        for (int i = 0; i < self::act_rows; i++)
            source->acts[i] += STAGE::blocks * 2;
#pragma unroll
        for (int i = 0; i < self::item_rows; i++)
            source->items_at[i] += STAGE::blocks;
    } else if (left > ahead) {
        matmul_stage_copy<STAGE, THREADS, false>(stage, job, source, left - ahead, thread);
    }
    cu_async_commit();
}

/* --- one block --- */

/* The A operand of a panel's block, and its rows' scales (0: row g, 1: row g + 8). */
template <int DTYPE>
CU_DEVICE void matmul_weights(const unsigned char *block, uint32_t lane, uint32_t a[4], float d[2],
                              float m[2])
{
    const unsigned char *scales = block + matmul_format<DTYPE>::fragment_bytes;

    if constexpr (matmul_format<DTYPE>::q4) {
        uint2 w = cu_load<uint2>(block + lane * 8);
        /* Q4_0: sixteen times the weight, which the constant of the conversion takes out again */
        uint32_t mask = DTYPE == PD_Q4_0 ? 0xf0f0f0f0 : 0x0f0f0f0f;
        a[0] = (DTYPE == PD_Q4_0 ? w.x << 4 : w.x) & mask;
        a[1] = (DTYPE == PD_Q4_0 ? w.y << 4 : w.y) & mask;
        a[2] = (DTYPE == PD_Q4_0 ? w.x : w.x >> 4) & mask;
        a[3] = (DTYPE == PD_Q4_0 ? w.y : w.y >> 4) & mask;
    } else {
        uint4 w = cu_load<uint4>(block + lane * 16);
        a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
    }
    if constexpr (DTYPE == PD_Q4_1) {
        uint2 s = cu_load<uint2>(scales + lane / 4 * 8);
        d[0] = cu_f16_to_f32((uint16_t)s.x), m[0] = cu_f16_to_f32((uint16_t)(s.x >> 16));
        d[1] = cu_f16_to_f32((uint16_t)s.y), m[1] = cu_f16_to_f32((uint16_t)(s.y >> 16));
    } else if constexpr (!matmul_format<DTYPE>::half) {
        uint32_t s = cu_load<uint32_t>(scales + lane / 4 * 4);
        d[0] = cu_f16_to_f32((uint16_t)s), d[1] = cu_f16_to_f32((uint16_t)(s >> 16));
    }
}

/* Scales of activation rows 2t, 2t + 1 of a tile. */
template <int DTYPE>
CU_DEVICE void matmul_act_scales(const unsigned char *floats, float d[2], float sum[2])
{
    if constexpr (DTYPE == PD_Q4_1) {
        float4 s = cu_load<float4>(floats);
        d[0] = s.x, sum[0] = s.y, d[1] = s.z, sum[1] = s.w;
    } else if constexpr (!matmul_format<DTYPE>::half) {
        float2 s = cu_load<float2>(floats);
        d[0] = s.x, d[1] = s.y;
    }
}

/* acc += one block's product of 16 weight rows and 8 activation rows. */
template <int DTYPE>
CU_DEVICE void matmul_tile(float acc[4], const uint32_t a[4], const uint32_t b[2],
                           const float d_w[2], const float m_w[2], const float d_x[2],
                           const float s_x[2])
{
    if constexpr (DTYPE == PD_F16) {
        cu_mma_f16(acc, a, b);
    } else if constexpr (DTYPE == PD_BF16) {
        cu_mma_bf16(acc, a, b);
    } else {
        /* 1.5 * 2^23 + dot as a bit pattern, by integer addition; the same less 1.5 * 2^23 is the
         * dot as a float: |dot| < 2^20. Q4_0: 16 dot at 1.5 * 2^19. One addition, where a
         * conversion takes the pipe for as long as four. */
        const uint32_t magic = DTYPE == PD_Q4_0 ? 0x49400000 : 0x4b400000;
        int32_t c[4] = {(int32_t)magic, (int32_t)magic, (int32_t)magic, (int32_t)magic};

        cu_mma_s8(c, a, b);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float dot = cu_float((uint32_t)c[i]) - cu_float(magic);
            acc[i] = fmaf(d_w[i / 2] * d_x[i % 2], dot, acc[i]);
            if constexpr (DTYPE == PD_Q4_1)
                acc[i] = fmaf(m_w[i / 2], s_x[i % 2], acc[i]);
        }
    }
}

/* Block k of the stage: the warp's MT panels from `panel` on with its NT tiles of activation rows
 * from `row` on, both of the stage. */
template <typename STAGE, int MT, int NT>
CU_DEVICE void matmul_block(float acc[MT][NT][4], const unsigned char *stage, uint32_t k,
                            uint32_t panel, uint32_t row, uint32_t lane)
{
    typedef typename STAGE::format format;
    const unsigned char *weights = stage + (panel * STAGE::blocks + k) * format::block_bytes;
    const unsigned char *acts = stage + STAGE::acts_at + (k * STAGE::rows + row) * 32;
    const unsigned char *floats =
        stage + STAGE::floats_at + (k * STAGE::floats_pitch + row) * format::float_bytes;
    uint32_t a[MT][4];
    float d_w[MT][2] = {}, m_w[MT][2] = {};

#pragma unroll
    for (int i = 0; i < MT; i++)
        matmul_weights<STAGE::dtype>(weights + i * (STAGE::blocks * format::block_bytes), lane,
                                     a[i], d_w[i], m_w[i]);
#pragma unroll
    for (int pair = 0; pair < NT; pair += 2) {
        uint32_t b[4];
        const unsigned char *half = acts + pair * 256 + matmul_act_at(lane % 8, lane / 8 % 2);
        if constexpr (NT == 1)
            cu_ldmatrix_x2(b, half);
        else
            cu_ldmatrix_x4(b, half + lane / 16 * 256);
#pragma unroll
        for (int j = pair; j < pair + 2 && j < NT; j++) {
            float d_x[2] = {}, s_x[2] = {};
            matmul_act_scales<STAGE::dtype>(floats + (j * 8 + lane % 4 * 2) * format::float_bytes,
                                            d_x, s_x);
#pragma unroll
            for (int i = 0; i < MT; i++)
                matmul_tile<STAGE::dtype>(acc[i][j], a[i], b + 2 * (j - pair), d_w[i], m_w[i], d_x,
                                          s_x);
        }
    }
}

/* Blocks [k, end) of a stage, UNROLL at a time: one warp's few tiles of a block are too little work
 * to hide their latencies. */
template <typename STAGE, int MT, int NT, int UNROLL>
CU_DEVICE void matmul_blocks(float acc[MT][NT][4], const unsigned char *stage, uint32_t k,
                             uint32_t end, uint32_t panel, uint32_t row, uint32_t lane)
{
    if constexpr (UNROLL > 1) {
#pragma unroll 1
        for (; k + UNROLL <= end; k += UNROLL)
#pragma unroll
            for (uint32_t i = 0; i < UNROLL; i++)
                matmul_block<STAGE, MT, NT>(acc, stage, k + i, panel, row, lane);
    }
#pragma unroll 1
    for (; k < end; k++)
        matmul_block<STAGE, MT, NT>(acc, stage, k, panel, row, lane);
}

/* --- few rows: a warp has a panel's leaves, or some of them, and a ring of stages of its own ---
 */

#define MATMUL_FEW_WARPS 4 /* at most, of a block: they share a panel's leaves */
#define MATMUL_FEW_PITCH                                                                           \
    20 /* floats from row to row of a leaf's sums: no two lanes in one bank                        \
        */

template <int DTYPE, int NT> struct matmul_few_shape {
    typedef matmul_stage<DTYPE, NT == 1 ? 8 : 4, 1, NT * 8> stage;
    static constexpr int stages = 4, unroll = NT == 1 ? 4 : 2;
    static constexpr int ring_bytes = stages * stage::bytes;
    static constexpr int leaf_floats = NT * 8 * MATMUL_FEW_PITCH;
};

/* A finished leaf's sums to shared memory, [row][weight row]. */
template <int NT> CU_DEVICE void matmul_leaf_put(float acc[1][NT][4], float *sums, uint32_t lane)
{
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        uint32_t n = i / 4 * 8 + lane % 4 * 2 + i % 2, r = lane / 4 + i % 4 / 2 * 8;
        cu_store(sums + n * MATMUL_FEW_PITCH + r, acc[0][i / 4][i % 4]);
        acc[0][i / 4][i % 4] = 0;
    }
}

/* Neighbouring leaves of one panel, from block `block` on, each to its place in sums. */
template <int DTYPE, int NT>
CU_DEVICE void matmul_few_leaves(const matmul_job &job, uint32_t panel, uint32_t row,
                                 uint32_t block, uint32_t leaves, unsigned char *ring, float *sums,
                                 uint32_t lane)
{
    typedef matmul_few_shape<DTYPE, NT> shape;
    typedef typename shape::stage stage;
    uint32_t left = leaves * job.leaf_blocks, leaf_left = job.leaf_blocks;
    uint32_t slot = 0;
    float acc[1][NT][4] = {};
    matmul_source<stage, 32> source;

    matmul_source_init(&source, job, panel, row, block, lane);
#pragma unroll 1
    for (uint32_t i = 0; i < shape::stages - 1; i++)
        matmul_stage_load(ring + i * stage::bytes, job, &source, left, i * stage::blocks, lane);
    while (left > 0) {
        cu_async_wait<shape::stages - 2>();
        cu_sync_warp(CU_ALL); /* every lane's copies are here; nobody reads the slot filled next */
        matmul_stage_load(ring + (slot == 0 ? shape::stages - 1 : slot - 1) * stage::bytes, job,
                          &source, left, (shape::stages - 1) * stage::blocks, lane);
        uint32_t count = matmul_least(left, stage::blocks), k = 0;
        left -= count;
        while (k < count) {
            uint32_t end = k + matmul_least(leaf_left, count - k);
            matmul_blocks<stage, 1, NT, shape::unroll>(acc, ring + slot * stage::bytes, k, end, 0,
                                                       0, lane);
            leaf_left -= end - k;
            k = end;
            if (leaf_left == 0) {
                matmul_leaf_put<NT>(acc, sums, lane);
                sums += shape::leaf_floats;
                leaf_left = job.leaf_blocks;
            }
        }
        slot = slot + 1 == shape::stages ? 0 : slot + 1;
    }
}

template <int DTYPE, int NT> CU_KERNEL(32 * MATMUL_FEW_WARPS, 1) matmul_few(matmul_job job)
{
    typedef matmul_few_shape<DTYPE, NT> shape;
    CU_SHARED_DYNAMIC(shared);
    uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
    uint32_t panel = blockIdx.x, row = blockIdx.y * (NT * 8);
    kern_node node = matmul_node(job.node, blockIdx.z);
    float *sums = (float *)(shared + warps * shape::ring_bytes);
    uint32_t from = warp * node.count / warps, to = (warp + 1) * node.count / warps;

    matmul_few_leaves<DTYPE, NT>(job, panel, row, (node.lo + from) * job.leaf_blocks, to - from,
                                 shared + warp * shape::ring_bytes,
                                 sums + from * shape::leaf_floats, threadIdx.x % 32);
    cu_sync();
    for (uint32_t i = threadIdx.x; i < MATMUL_PANEL * NT * 8; i += blockDim.x) {
        /* half a warp a row: rows n and n + 4, whose sums lie 16 banks apart */
        uint32_t m = i / MATMUL_PANEL, n = m / 8 * 8 + m % 2 * 4 + m / 2 % 4;
        uint32_t r = i % MATMUL_PANEL, weight_row = panel * MATMUL_PANEL + r;
        if (row + n < job.rows && weight_row < job.matrix_rows)
            /* sectors 1.5: 64 bytes of a row that may begin anywhere */
            cu_store(
                job.out + blockIdx.z * job.node_stride + (row + n) * job.out_stride + weight_row,
                matmul_leaves_sum(sums + n * MATMUL_FEW_PITCH + r, node.count, shape::leaf_floats));
    }
}

/* --- many rows: a block has a tile of panels and rows, and one ring for all its warps --- */

/* A warp has MT panels and NT tiles of 8 rows; WM x WN warps a block. */
template <int DTYPE, int MT, int NT, int WM, int WN> struct matmul_many_shape {
    typedef matmul_stage<DTYPE, 2, WM * MT, WN * NT * 8> stage;
    static constexpr int threads = 32 * WM * WN;
    static constexpr int stages = 4;
};

/* Takes a leaf's sum into the tree: leaf number `leaf` of the node, of which bit l says that a sum
 * of 2^l leaves waits on the left. The last one gathers whatever waits. acc is 0 afterwards, but
 * after the last: there it is the node's sum. */
template <int LEVELS, int MT, int NT>
CU_DEVICE void matmul_leaf_done(float acc[MT][NT][4], float waiting[LEVELS][MT][NT][4],
                                uint32_t leaf, bool last)
{
    bool carry = true;

#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        bool add = carry && (leaf >> level & 1), put = carry && !add && !last;
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
            float *sum = &acc[i / (NT * 4)][i / 4 % NT][i % 4];
            float *wait = &waiting[level][i / (NT * 4)][i / 4 % NT][i % 4];
            if (add)
                *sum = *wait + *sum;
            if (put) {
                *wait = *sum;
                *sum = 0;
            }
        }
        carry = carry && !put;
    }
}

/* LEVELS: the node's tree has at most 2^LEVELS leaves; BLOCKS_MIN a processor, which bounds
 * registers. */
template <int DTYPE, int MT, int NT, int WM, int WN, int LEVELS, int BLOCKS_MIN>
CU_KERNEL((32 * WM * WN), BLOCKS_MIN)
matmul_many(matmul_job job)
{
    typedef matmul_many_shape<DTYPE, MT, NT, WM, WN> shape;
    typedef typename shape::stage stage;
    CU_SHARED_DYNAMIC(shared);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t panel = blockIdx.x * stage::panels, row = blockIdx.y * stage::rows;
    uint32_t warp_panel = warp % WM * MT, warp_row = warp / WM * (NT * 8);
    kern_node node = matmul_node(job.node, blockIdx.z);
    uint32_t left = node.count * job.leaf_blocks, leaf_left = job.leaf_blocks, leaf = 0;
    uint32_t slot = 0;
    float acc[MT][NT][4] = {}, waiting[LEVELS + 1][MT][NT][4];
    matmul_source<stage, shape::threads> source;

    matmul_source_init(&source, job, panel, row, node.lo * job.leaf_blocks, threadIdx.x);
#pragma unroll 1
    for (uint32_t i = 0; i < shape::stages - 1; i++)
        matmul_stage_load(shared + i * stage::bytes, job, &source, left, i * stage::blocks,
                          threadIdx.x);
    while (left > 0) {
        cu_async_wait<shape::stages - 2>();
        cu_sync(); /* every thread's copies are here; nobody reads the slot filled next */
        matmul_stage_load(shared + (slot == 0 ? shape::stages - 1 : slot - 1) * stage::bytes, job,
                          &source, left, (shape::stages - 1) * stage::blocks, threadIdx.x);
        const unsigned char *here = shared + slot * stage::bytes;
        uint32_t count = matmul_least(left, stage::blocks), k = 0;
        left -= count;
        if constexpr (LEVELS == 0) {
            matmul_blocks<stage, MT, NT, 1>(acc, here, 0, count, warp_panel, warp_row, lane);
        } else {
            while (k < count) {
                uint32_t end = k + matmul_least(leaf_left, count - k);
                matmul_blocks<stage, MT, NT, 1>(acc, here, k, end, warp_panel, warp_row, lane);
                leaf_left -= end - k;
                k = end;
                if (leaf_left == 0) {
                    matmul_leaf_done<LEVELS, MT, NT>(acc, waiting, leaf++, left == 0 && k == count);
                    leaf_left = job.leaf_blocks;
                }
            }
        }
        slot = slot + 1 == shape::stages ? 0 : slot + 1;
    }
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        uint32_t n = row + warp_row + i / 4 % NT * 8 + lane % 4 * 2 + i % 2;
        uint32_t r = (panel + warp_panel + i / (4 * NT)) * MATMUL_PANEL + lane / 4 + i % 4 / 2 * 8;
        if (n < job.rows && r < job.matrix_rows)
            /* sectors 2: 32 bytes of each of four rows that may begin anywhere */
            cu_store(job.out + blockIdx.z * job.node_stride + n * job.out_stride + r,
                     acc[i / (4 * NT)][i / 4 % NT][i % 4]);
    }
}

/* --- launching --- */

template <int DTYPE, int NT>
static pd_status matmul_launch_few(gpu_stream *stream, const matmul_job *job, uint32_t leaves)
{
    typedef matmul_few_shape<DTYPE, NT> shape;
    uint32_t warps = leaves < MATMUL_FEW_WARPS ? leaves : MATMUL_FEW_WARPS;
    uint64_t bytes =
        (uint64_t)warps * shape::ring_bytes + (uint64_t)leaves * shape::leaf_floats * sizeof(float);
    dim3 grid(job->panels, (job->rows + NT * 8 - 1) / (NT * 8), job->nodes);

    return CU_LAUNCH((matmul_few<DTYPE, NT>), grid, dim3(32 * warps), bytes, stream, *job);
}

template <int DTYPE, int MT, int NT, int WM, int WN, int LEVELS, int BLOCKS_MIN>
static pd_status matmul_launch_many(gpu_stream *stream, const matmul_job *job)
{
    typedef matmul_many_shape<DTYPE, MT, NT, WM, WN> shape;
    dim3 grid((job->panels + shape::stage::panels - 1) / shape::stage::panels,
              (job->rows + shape::stage::rows - 1) / shape::stage::rows, job->nodes);

    return CU_LAUNCH((matmul_many<DTYPE, MT, NT, WM, WN, LEVELS, BLOCKS_MIN>), grid,
                     dim3(shape::threads), (uint64_t)shape::stages * shape::stage::bytes, stream,
                     *job);
}

/* The most leaves that one node has. */
static inline uint32_t matmul_leaves_max(const matmul_job *job)
{
    uint32_t most = 1;

    for (uint32_t i = 0; i < job->nodes; i++)
        most = job->node[i].count > most ? job->node[i].count : most;
    return most;
}

#define MATMUL_FEW_ROWS   32 /* from here on, many */
#define MATMUL_FEW_LEAVES 16 /* of a wide tile: their sums fit beside the rings */

/* rows <= MATMUL_FEW_ROWS */
template <int DTYPE> static pd_status matmul_run_few(gpu_stream *stream, const matmul_job *job)
{
    uint32_t leaves = matmul_leaves_max(job);

    if (job->rows <= 8 || leaves > MATMUL_FEW_LEAVES)
        return matmul_launch_few<DTYPE, 1>(stream, job, leaves);
    return matmul_launch_few<DTYPE, 4>(stream, job, leaves);
}
