#pragma once

/* kernels/cuda/blaslt.h - products of 16-bit matrices by NVIDIA's cuBLASLt, where it can be loaded.
 *
 * For f16 or bf16 weights that lie as in the file, rows of columns (cu_pack's order is of our own
 * kernels). The order of its sums is the library's own business: whoever uses it looks first
 * whether it gives our kernel's bits (kernels/cuda/wide.c; docs/decisions/blaslt.md).
 *
 * Two bodies, chosen by Meson: blaslt_cuda.cu opens libcublasLt.so.13 by dlopen; blaslt_none.c says
 * that there is none (the emulated GPU, a toolkit without cublasLt.h). One stream at a time uses a
 * blaslt. Errors are gpu.h's. */

#include "kernels/cuda/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BLASLT_WORKSPACE_BYTES                                                                     \
    (32u << 20) /* device memory of a blaslt: NVIDIA's advice for Hopper */

typedef struct blaslt blaslt;
typedef struct blaslt_plan blaslt_plan;

/* Loads the library. PD_E_UNSUPPORTED: no such library here, or not for this device, with the
 * reason written. */
PD_CHECKED pd_status blaslt_open(gpu *g, blaslt **blaslt_out, char *reason, size_t reason_size);
void blaslt_close(blaslt *b); /* NULL is fine; plans were destroyed before */

typedef struct blaslt_shape {
    bool bf16;
    uint32_t weight_rows, cols; /* cols: a multiple of 8 */
    uint32_t rows;              /* of activations, exactly */
    uint64_t out_stride;        /* floats from row to row of the result, a multiple of 4 */
} blaslt_shape;

/* One algorithm for good: the nth of the library's list for this shape, without split sums.
 * PD_E_UNSUPPORTED: it has no nth (not logged). */
PD_CHECKED pd_status blaslt_plan_create(blaslt *b, const blaslt_shape *shape, uint32_t nth,
                                        blaslt_plan **plan_out);
void blaslt_plan_destroy(blaslt_plan *plan); /* NULL is fine */

/* out[n][r] = weights[r] . acts[n] for n < rows. weights: [weight_rows][cols], acts: [rows][cols],
 * out: [rows][out_stride], device memory, 16-byte aligned. Can be recorded in a graph. */
PD_CHECKED pd_status blaslt_matmul(const blaslt_plan *plan, gpu_stream *stream, const void *weights,
                                   const uint16_t *acts, float *out);

#ifdef __cplusplus
}
#endif
