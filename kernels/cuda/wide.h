#pragma once

/* kernels/cuda/wide.h - products of 16-bit matrices with many rows, by cuBLASLt where its bits are
 * our kernel's.
 *
 * At creation each shape that a model has is multiplied by both, with the model's own weights and
 * rows of numbers of all sizes; an algorithm of the library is kept where all results are equal,
 * bit for bit. A sum in another order would differ in most of them. So which of the two computes a
 * row is decided by speed alone and can be seen nowhere: not in a chunk, not in a batch, not by
 * another worker that has no such library (docs/decisions/blaslt.md).
 *
 * Only for products that are used as they are (q, k, v; gate and up): sums over tree nodes
 * (attention's output, down) are ours. One thread and stream at a time. */

#include "kernels/cuda/weights.h"

/* Fewer rows are not worth bringing the weights into the library's order. */
#define CU_WIDE_ROWS_MIN 1024

typedef struct cu_wide cu_wide;

/* Device bytes that it holds, at most; 0: it would have nothing to do. */
uint64_t cu_wide_bytes(const cu_weights *weights, uint32_t rows_max);
/* *wide_out NULL: our kernels do it all; text_out says why then, or what the library does, for logs
 * ("": there are no such products). weights: loaded. Errors are the device's: PD_E_INTERNAL,
 * PD_E_NOMEM; that there is no library, or no room to look, is none. */
PD_CHECKED pd_status cu_wide_create(gpu *g, const cu_weights *weights, uint32_t rows_max,
                                    cu_wide **wide_out, char *text_out, size_t text_size);
void cu_wide_destroy(cu_wide *wide); /* NULL is fine */

/* As cu_matmul, and the same bits. wide NULL: cu_matmul. */
PD_CHECKED pd_status cu_wide_matmul(const cu_wide *wide, gpu_stream *stream,
                                    const cu_matrix *matrix, const cu_acts *acts, uint32_t rows,
                                    float *out, uint64_t out_stride);
