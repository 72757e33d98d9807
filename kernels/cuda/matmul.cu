/* kernels/cuda/matmul.cu - products of weights and activations: packing, f32 weights, and the
 * choice of a kernel; the kernels of the other formats are in matmul_tiles.h.
 */

#include "kernels/cuda/matmul_tiles.h"

#include <string.h>

/* --- packing (host) --- */

bool cu_supports(pd_dtype dtype)
{
    return dtype <= PD_Q8_0;
}

static bool is_half(pd_dtype dtype)
{
    return dtype == PD_F16 || dtype == PD_BF16;
}

static uint32_t block_cols(pd_dtype dtype)
{
    return is_half(dtype) ? 16 : 32;
}

static uint32_t fragment_bytes(pd_dtype dtype)
{
    return dtype == PD_Q4_0 || dtype == PD_Q4_1 ? 256 : 512;
}

static uint32_t block_bytes(pd_dtype dtype)
{
    return fragment_bytes(dtype) + (is_half(dtype) ? 0 : dtype == PD_Q4_1 ? 64 : 32);
}

uint64_t cu_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    if (dtype == PD_F32)
        return (uint64_t)rows * cols * sizeof(float);
    pd_assert(cols % block_cols(dtype) == 0);
    uint64_t panels = (rows + MATMUL_PANEL - 1) / MATMUL_PANEL;
    return panels * (cols / block_cols(dtype)) * block_bytes(dtype);
}

/* One row of one block, to its places in the panel's block: 4-byte words of lanes 4 (row % 8) to
 * 4 (row % 8) + 3, the upper eight rows in every other word. */
static void pack_block(pd_dtype dtype, const unsigned char *from, uint32_t row, unsigned char *to)
{
    uint32_t g = row % 8, upper = row / 8;
    uint32_t head = is_half(dtype) ? 0 : dtype == PD_Q4_1 ? 4 : 2;
    uint32_t runs = fragment_bytes(dtype) / 64; /* of 4 bytes: 4 runs of nibbles, 8 of the rest */
    uint32_t lane_bytes = fragment_bytes(dtype) / 32;

    for (uint32_t run = 0; run < runs; run++) {
        unsigned char *word = to + (g * 4 + run % 4) * lane_bytes + (run / 4 * 2 + upper) * 4;
        memcpy(word, from + head + run * 4, 4);
        if (dtype == PD_Q4_0)
            for (uint32_t i = 0; i < 4; i++)
                word[i] ^= 0x88; /* q - 8 */
    }
    memcpy(to + fragment_bytes(dtype) + (g * 2 + upper) * head, from, head);
}

void cu_pack(pd_dtype dtype, uint32_t rows, uint32_t file_cols, uint32_t col_from, uint32_t col_to,
             const void *file_rows, void *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint64_t row_bytes = (uint64_t)file_cols / info->block_weights * info->block_bytes;
    uint64_t from_bytes = (uint64_t)col_from / info->block_weights * info->block_bytes;
    uint32_t cols = col_to - col_from;

    pd_assert(cu_supports(dtype) && col_from <= col_to && col_to <= file_cols);
    memset(out, 0, cu_pack_bytes(dtype, rows, cols));
    for (uint32_t row = 0; row < rows; row++) {
        const unsigned char *from = (const unsigned char *)file_rows + row * row_bytes + from_bytes;
        if (dtype == PD_F32) {
            memcpy((float *)out + (uint64_t)row * cols, from, (uint64_t)cols * sizeof(float));
            continue;
        }
        uint32_t blocks = cols / block_cols(dtype);
        uint32_t file_bytes = is_half(dtype) ? 32 : info->block_bytes;
        pd_assert(col_from % block_cols(dtype) == 0);
        unsigned char *panel =
            (unsigned char *)out + (uint64_t)(row / MATMUL_PANEL) * blocks * block_bytes(dtype);
        for (uint32_t block = 0; block < blocks; block++)
            pack_block(dtype, from + (uint64_t)block * file_bytes, row % MATMUL_PANEL,
                       panel + (uint64_t)block * block_bytes(dtype));
    }
}

/* --- f32 weights: as the reference, 16 lanes a product --- */

#define F32_WARPS 4 /* a block; half a warp a weight row */
#define F32_ROWS  4 /* activation rows that a warp takes at once */

typedef struct f32_job {
    const float *weights, *acts;
    float *out;
    uint64_t out_stride, node_stride;
    uint32_t matrix_rows, rows, cols, leaf_cols, nodes;
    kern_node node[KERN_NODES_MAX];
} f32_job;

/* Lane l takes columns l, l + 16, ... of each leaf; then halves are added onto halves. Columns up
 * to the next multiple of 16 count as zeros, since -0 + 0 is 0. */
CU_KERNEL(32 * F32_WARPS, 1) matmul_f32(f32_job job)
{
    /* one more, so that the two halves of a warp do not meet in one bank */
    CU_SHARED float sums[2 * F32_WARPS][F32_ROWS][KERN_LEAVES_MAX + 1];
    uint32_t half = threadIdx.x / 16, lane = threadIdx.x % 16;
    uint32_t r = blockIdx.x * (2 * F32_WARPS) + half, n = blockIdx.y * F32_ROWS;
    kern_node node = matmul_node(job.node, blockIdx.z);
    uint32_t padded = (job.leaf_cols + 15) / 16 * 16;

    for (uint32_t leaf = 0; leaf < node.count; leaf++) {
        uint64_t first = (uint64_t)(node.lo + leaf) * job.leaf_cols;
        float lanes[F32_ROWS] = {};
        for (uint32_t c = lane; c < padded; c += 16) {
            bool inside = c < job.leaf_cols && r < job.matrix_rows;
            float w = inside ? job.weights[(uint64_t)r * job.cols + first + c] : 0;
#pragma unroll
            for (uint32_t i = 0; i < F32_ROWS; i++) {
                float x = inside && n + i < job.rows
                              ? job.acts[(uint64_t)(n + i) * job.cols + first + c]
                              : 0;
                lanes[i] = fmaf(w, x, lanes[i]);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < F32_ROWS; i++) {
#pragma unroll
            for (uint32_t by = 8; by > 0; by /= 2)
                lanes[i] += cu_shuffle_down(CU_ALL, lanes[i], by);
            if (lane == 0)
                sums[half][i][leaf] = lanes[i];
        }
    }
    if (lane == 0 && r < job.matrix_rows)
        for (uint32_t i = 0; i < F32_ROWS && n + i < job.rows; i++)
            job.out[blockIdx.z * job.node_stride + (n + i) * job.out_stride + r] =
                matmul_leaves_sum(sums[half][i], node.count, 1);
}

/* --- the launchers --- */

static pd_status run_f32(gpu_stream *stream, const cu_matrix *matrix, const cu_acts *acts,
                         const matmul_job *job)
{
    f32_job f32 = {};
    dim3 grid((job->matrix_rows + 2 * F32_WARPS - 1) / (2 * F32_WARPS),
              (job->rows + F32_ROWS - 1) / F32_ROWS, job->nodes);

    f32.weights = (const float *)matrix->data;
    f32.acts = acts->values;
    f32.out = job->out;
    f32.out_stride = job->out_stride;
    f32.node_stride = job->node_stride;
    f32.matrix_rows = job->matrix_rows;
    f32.rows = job->rows;
    f32.cols = matrix->cols;
    f32.leaf_cols = matrix->cols / matrix->leaves;
    f32.nodes = job->nodes;
    memcpy(f32.node, job->node, sizeof f32.node);
    return CU_LAUNCH(matmul_f32, grid, dim3(32 * F32_WARPS), 0, stream, f32);
}

static pd_status run(gpu_stream *stream, const cu_matrix *matrix, const cu_acts *acts,
                     matmul_job *job)
{
    pd_assert(cu_supports(matrix->dtype) && acts->cols == matrix->cols);
    pd_assert(matrix->leaves > 0 && matrix->cols % matrix->leaves == 0);
    if (job->rows == 0 || job->matrix_rows == 0)
        return PD_OK;
    if (matrix->dtype == PD_F32)
        return run_f32(stream, matrix, acts, job);
    uint32_t cols = block_cols(matrix->dtype), leaf_cols = matrix->cols / matrix->leaves;
    pd_assert(leaf_cols % cols == 0);
    job->weights = (const unsigned char *)matrix->data;
    job->panels = (matrix->rows + MATMUL_PANEL - 1) / MATMUL_PANEL;
    job->blocks = matrix->cols / cols;
    job->leaf_blocks = leaf_cols / cols;
    /* offsets are 32 bits wide, in 16 bytes */
    pd_assert((uint64_t)job->panels * job->blocks * block_bytes(matrix->dtype) / 16 < UINT32_MAX);
    pd_assert((uint64_t)job->rows * job->blocks * 2 < UINT32_MAX);
    if (is_half(matrix->dtype)) {
        pd_assert(acts->halves_are_bf16 == (matrix->dtype == PD_BF16));
        job->acts = (const unsigned char *)acts->halves;
        return matmul_half(stream, matrix->dtype, job);
    }
    job->acts = (const unsigned char *)acts->quants;
    job->scales = acts->scales;
    job->sums = acts->sums;
    return matmul_quant(stream, matrix->dtype, job);
}

pd_status cu_matmul(gpu_stream *stream, const cu_matrix *matrix, const cu_acts *acts, uint32_t rows,
                    float *out, uint64_t out_stride)
{
    matmul_job job = {};

    pd_assert(matrix->leaves == 1);
    job.matrix_rows = matrix->rows;
    job.rows = rows;
    job.out = out;
    job.out_stride = out_stride;
    job.nodes = 1;
    job.node[0].count = 1;
    return run(stream, matrix, acts, &job);
}

pd_status cu_matmul_nodes(gpu_stream *stream, const cu_matrix *matrix, const cu_acts *acts,
                          uint32_t rows, float *out)
{
    kern_nodes nodes =
        kern_nodes_of(matrix->leaves_all, matrix->leaf_first, matrix->leaf_first + matrix->leaves);
    matmul_job job = {};

    job.matrix_rows = matrix->rows;
    job.rows = rows;
    job.out = out;
    job.out_stride = matrix->rows;
    job.node_stride = (uint64_t)rows * matrix->rows;
    job.nodes = nodes.count;
    for (uint32_t i = 0; i < nodes.count; i++) {
        job.node[i].lo = (uint8_t)(nodes.node[i].lo - matrix->leaf_first);
        job.node[i].count = nodes.node[i].count;
    }
    return run(stream, matrix, acts, &job);
}
