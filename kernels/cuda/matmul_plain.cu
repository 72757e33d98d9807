/* kernels/cuda/matmul_plain.cu - 16-bit weights from cu_pack's order (matmul_tiles.h) back to rows
 * of columns, for a library that wants them so; and whether two results are the same.
 *
 * Memory-bound: a warp reads a block of a panel (16 rows x 16 columns, 512 bytes) as it lies, 16
 * bytes a lane, turns it in shared memory, and writes 32 bytes to each of the rows; the next
 * blocks' bytes go beside them, so that L2 has whole lines. A bf16 gate and up of an 8B model: 470
 * MB, 109 us at 4.3 TB/s.
 */

#include "kernels/cuda/launch.h"
#include "kernels/cuda/words.h"

#define PLAIN_WARPS  4u
#define PLAIN_BLOCKS 8u /* of a panel, that a warp turns: 256 bytes a row */
#define PLAIN_BYTES                                                                                \
    576 /* a block's, padded by 16 bytes after eight lanes: no two words in one bank */

CU_KERNEL(PLAIN_WARPS * 32, 8)
matmul_plain(const uint8_t *packed, uint32_t rows, uint32_t blocks, uint8_t *out)
{
    CU_SHARED uint8_t turned[PLAIN_WARPS][PLAIN_BYTES];
    uint32_t lane = threadIdx.x % 32, panel = blockIdx.y, row = lane / 2;
    uint32_t first = (blockIdx.x * PLAIN_WARPS + threadIdx.x / 32) * PLAIN_BLOCKS;
    uint8_t *mine = turned[threadIdx.x / 32];

    for (uint32_t block = first; block < first + PLAIN_BLOCKS && block < blocks; block++) {
        uint64_t at = ((uint64_t)panel * blocks + block) * 512;
        cu_store<uint4>(mine + (lane + lane / 8) * 16,
                        cu_load_once<uint4>(packed + at + lane * 16));
        cu_sync_warp(CU_ALL);
        uint32_t word[4];
#pragma unroll
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t from =
                row % 8 * 4 + t; /* the lane that has it; its word: columns, then rows */
            word[t] =
                cu_load<uint32_t>(mine + (from + from / 8) * 16 + (lane % 2 * 2 + row / 8) * 4);
        }
        if (panel * 16 + row < rows) {
            uint4 v = {word[0], word[1], word[2], word[3]};
            cu_store<uint4>(
                out + ((uint64_t)(panel * 16 + row) * blocks + block) * 32 + lane % 2 * 16, v);
        }
        cu_sync_warp(CU_ALL); /* all have read */
    }
}

pd_status cu_unpack(gpu_stream *stream, uint32_t rows, uint32_t cols, const void *packed, void *out)
{
    uint32_t blocks = cols / 16, each = PLAIN_WARPS * PLAIN_BLOCKS;

    pd_assert(cols % 16 == 0);
    if (rows == 0 || cols == 0)
        return PD_OK;
    return CU_LAUNCH(matmul_plain, dim3((blocks + each - 1) / each, (rows + 15) / 16),
                     dim3(PLAIN_WARPS * 32), 0, stream, (const uint8_t *)packed, rows, blocks,
                     (uint8_t *)out);
}

#define COMPARE_THREADS 256u
#define COMPARE_BLOCKS  1024u

CU_KERNEL(COMPARE_THREADS, 4)
compare_words(const uint32_t *a, const uint32_t *b, uint64_t count, uint32_t *differ)
{
    uint64_t stride = (uint64_t)gridDim.x * COMPARE_THREADS;
    bool same = true;

    for (uint64_t i = blockIdx.x * (uint64_t)COMPARE_THREADS + threadIdx.x; i < count; i += stride)
        same = same && a[i] == b[i];
    if (!same)
        cu_atomic_max(differ, 1u);
}

pd_status cu_compare(gpu_stream *stream, const void *a, const void *b, uint64_t words,
                     uint32_t *differ)
{
    uint64_t blocks = (words + COMPARE_THREADS - 1) / COMPARE_THREADS;

    if (words == 0)
        return PD_OK;
    return CU_LAUNCH(
        compare_words, dim3((uint32_t)(blocks < COMPARE_BLOCKS ? blocks : COMPARE_BLOCKS)),
        dim3(COMPARE_THREADS), 0, stream, (const uint32_t *)a, (const uint32_t *)b, words, differ);
}
