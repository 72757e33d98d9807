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
 * the second; an odd last one leaves its partner's out (but for the scales) Rows past the matrix's
 * end have scale 0. Any thread. */

#include "kernels/number.h"
#include "kernels/ops.h"

/* Where block `block` of a panel has its 16 scales, and its quants. */
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
    if (dtype == PD_Q8_0)
        return (size_t)(block / 2) * 1088 + (size_t)(block % 2) * 512 + 64;
    return (size_t)(block / 2) * 576 + (size_t)(block % 2) * 256 + 64;
}

/* A multiple of 64. */
static inline size_t kern_panel_bytes(pd_dtype dtype, uint32_t cols)
{
    return kern_panel_quants_at(dtype, cols / KERN_BLOCK - 1) + (dtype == PD_Q8_0 ? 512 : 256);
}

/* 0 for formats that stay as the file has them (floats). */
size_t kern_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols);
void kern_pack(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out);
