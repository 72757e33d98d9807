#pragma once

/* kernels/cpu/pack.h - quantised matrices as the CPU kernels read them.
 *
 * Sixteen rows are a panel, and a panel is read from its first byte to its last, so that a product
 * with one activation row is one stream through memory. A 32-column block of a panel has quants,
 *   Q4_0, Q4_1: 4 runs of 64 bytes; byte 4 r + i of run k holds columns 4 k + i (low nibble) and
 *               16 + 4 k + i (high nibble) of row r
 *   Q8_0:       8 runs of 64 bytes; byte 4 r + i of run k is column 4 k + i of row r, plus 128
 * so that one 64-byte load is four columns of 16 rows, as 4-way integer dot products take them, and
 * scales, f16. Every load lies within a cache line:
 *   Q4_1:       a block is 16 scales, 16 minima, its quants
 *   Q4_0, Q8_0: two blocks are 16 scales of the first, 16 of the second, quants of the first, of
 * the second; an odd last one leaves its partner's out (but for the scales)
 *
 * Q4_K and Q6_K have as many bytes as in the file, in their blocks of 256 columns:
 *   Q4_K: 16 scales d, 16 dmin, f16; the file's 12 bytes of runs' scales and minima, each as 16
 *         bytes, one a row, in the order 0 .. 11; then for each of the 8 runs its quants, as Q4_1
 *   Q6_K: two blocks are 16 scales d of the first, 16 of the second, f16; then of the first, and
 *         after it of the second: 8 runs of 16 int8 scales of the first half and 16 of the second;
 *         for each of the 8 runs its quants, low nibbles as Q4_1, then 2 times 64 bytes of high
 *         pairs: bits 2 t, 2 t + 1 of byte 4 r + i are of column 4 t + i, or 16 + 4 t + i, of row r
 * Rows past the matrix's end have scale 0. Any thread. */

#include "kernels/k_blocks.h"
#include "kernels/number.h"
#include "kernels/ops.h"

#define KERN_PANEL_Q4K       2304 /* bytes of 256 columns */
#define KERN_PANEL_Q4K_RUNS  256  /* where in them the runs are */
#define KERN_PANEL_Q6K       3328 /* without d */
#define KERN_PANEL_Q6K_SCALE 256  /* bytes of runs' scales before the runs */
#define KERN_PANEL_Q6K_RUN   384

/* Where the 256 columns with block `block` (of 32) have their 16 d, in the K formats. */
static inline size_t kern_panel_d_at(pd_dtype dtype, uint32_t block)
{
    size_t k = block / KERN_K_RUNS;

    if (dtype == PD_Q4_K)
        return k * KERN_PANEL_Q4K;
    return k / 2 * (2 * KERN_PANEL_Q6K + 64) + k % 2 * 32;
}

/* Where they have the scales of their runs: Q4_K 192 bytes, Q6_K 256. */
static inline size_t kern_panel_run_scales_at(pd_dtype dtype, uint32_t block)
{
    size_t k = block / KERN_K_RUNS;

    if (dtype == PD_Q4_K)
        return k * KERN_PANEL_Q4K + 64;
    return k / 2 * (2 * KERN_PANEL_Q6K + 64) + k % 2 * KERN_PANEL_Q6K + 64;
}

/* Where block `block` of a panel has its 16 scales (not of K formats), and its quants. */
static inline size_t kern_panel_scales_at(pd_dtype dtype, uint32_t block)
{
    if (dtype == PD_Q4_1)
        return (size_t)block * 320;
    return (size_t)(block / 2) * (dtype == PD_Q8_0 ? 1088 : 576) + (size_t)(block % 2) * 32;
}

static inline size_t kern_panel_quants_at(pd_dtype dtype, uint32_t block)
{
    if (dtype == PD_Q4_1)
        return (size_t)block * 320 + 64;
    if (dtype == PD_Q4_K)
        return (size_t)(block / KERN_K_RUNS) * KERN_PANEL_Q4K + KERN_PANEL_Q4K_RUNS +
               (size_t)(block % KERN_K_RUNS) * 256;
    if (dtype == PD_Q6_K)
        return kern_panel_run_scales_at(dtype, block) + KERN_PANEL_Q6K_SCALE +
               (size_t)(block % KERN_K_RUNS) * KERN_PANEL_Q6K_RUN;
    if (dtype == PD_Q8_0)
        return (size_t)(block / 2) * 1088 + (size_t)(block % 2) * 512 + 64;
    return (size_t)(block / 2) * 576 + (size_t)(block % 2) * 256 + 64;
}

/* A multiple of 64. */
static inline size_t kern_panel_bytes(pd_dtype dtype, uint32_t cols)
{
    uint32_t last = dtype == PD_Q8_0 ? 512 : dtype == PD_Q6_K ? KERN_PANEL_Q6K_RUN : 256;

    return kern_panel_quants_at(dtype, cols / KERN_BLOCK - 1) + last;
}

/* 0 for formats that stay as the file has them (floats). */
size_t kern_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols);
void kern_pack(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out);
