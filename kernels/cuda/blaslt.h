#pragma once

/* kernels/cuda/blaslt.h - products of 16-bit matrices by NVIDIA's cuBLASLt, where it can be loaded.
 *
 * An option for long prompts with f16 or bf16 weights that lie as in the file, rows of columns
 * (cu_pack's order is of our own kernels). Not used by default: its sums are in an order of its
 * own, so a row that cuBLASLt computed must never be computed by matmul.cu elsewhere, and the other
 * way round. What holds for the results, and what is only likely, is in docs/decisions/blaslt.md.
 *
 * Two bodies, chosen by Meson: blaslt_cuda.cu opens libcublasLt.so.13 by dlopen; blaslt_none.c says
 * that there is none (the emulated GPU, a toolkit without cublasLt.h). One stream at a time uses a
 * blaslt. Errors are gpu.h's. */

#include "kernels/cuda/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BLASLT_ROWS 256 /* of every product: more rows are cut, fewer are filled up */

typedef struct blaslt blaslt;
typedef struct blaslt_plan blaslt_plan;

/* Loads the library and takes device memory for the last rows: acts of up to cols_max columns, out
 * of up to out_stride_max floats a row. PD_E_UNSUPPORTED: no such library here, or not for this
 * device, with the reason written. */
PD_CHECKED pd_status blaslt_open(gpu *g, uint32_t cols_max, uint64_t out_stride_max,
                                 blaslt **blaslt_out, char *reason, size_t reason_size);
void blaslt_close(blaslt *b); /* NULL is fine; plans were destroyed before */

/* One algorithm for good, for weights of weight_rows x cols (a multiple of 8) and results
 * out_stride floats apart (a multiple of 4). */
PD_CHECKED pd_status blaslt_plan_create(blaslt *b, bool bf16, uint32_t weight_rows, uint32_t cols,
                                        uint64_t out_stride, blaslt_plan **plan_out);
void blaslt_plan_destroy(blaslt_plan *plan);

/* out[n][r] = weights[r] . acts[n] for n < rows. weights: [weight_rows][cols], acts: [rows][cols],
 * out: [rows][out_stride], device memory, 16-byte aligned. Can be recorded in a graph. */
PD_CHECKED pd_status blaslt_matmul(blaslt_plan *plan, gpu_stream *stream, const void *weights,
                                   const uint16_t *acts, uint32_t rows, float *out);

#ifdef __cplusplus
}
#endif
