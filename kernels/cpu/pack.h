#pragma once

/* kernels/cpu/pack.h - quantised matrices as the CPU kernels read them.
 *
 * Sixteen rows are a panel: all its quants, then all its scales. A 32-column block of a panel is
 *   Q4_0, Q4_1: 4 runs of 64 bytes; byte 4 r + i of run k holds columns 4 k + i (low nibble) and
 *               16 + 4 k + i (high nibble) of row r
 *   Q8_0:       8 runs of 64 bytes; byte 4 r + i of run k is column 4 k + i of row r, plus 128
 * and 16 f16 scales, for Q4_1 then 16 f16 minima. So one 64-byte load is four columns of 16 rows,
 * as 4-way integer dot products take them. Rows past the matrix's end have scale 0. Any thread. */

#include "kernels/ops.h"

/* Bytes of a panel's quants and scales; each a multiple of 64. */
size_t kern_panel_quant_bytes(pd_dtype dtype, uint32_t cols);
size_t kern_panel_scale_bytes(pd_dtype dtype, uint32_t cols);
/* 0 for formats that stay as the file has them (floats). */
size_t kern_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols);
void kern_pack(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out);
