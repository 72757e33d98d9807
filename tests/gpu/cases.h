#pragma once

/* tests/gpu/cases.h - every operation of kernels/cuda/launch.h at the shapes of an 8B llama (one
 * GPU, no split): what the benchmark times and the ladder counts. One thread. */

#include "kernels/cuda/roofline.h"

#define CASE_DECODE_ROWS  32
#define CASE_CONTEXT      4096 /* tokens of each sequence that decodes */
#define CASE_PREFILL_ROWS 2048 /* a prompt from its start */

/* Where cases get device memory from: a copy of host's bytes, or, where host is NULL, memory whose
 * content does not matter (but is zeros, so that floats are numbers). Never NULL. */
typedef struct case_memory {
    void *(*get)(void *ctx, const void *host, uint64_t bytes);
    void *ctx;
    /* Of the device's second-level cache: each launch of a product takes other weights, until they
     * are twice that. 0: the content of weights does not matter, and they are always the same. */
    uint64_t l2_bytes;
} case_memory;

typedef struct gpu_case gpu_case;
struct gpu_case {
    const char *name; /* "decode: attention" */
    cu_work work;
    pd_dtype dtype; /* of the weights, where it is a product */
    pd_status (*queue)(gpu_stream *stream, const gpu_case *c);
    uint32_t rows;
};

/* The product of CASE_PREFILL_ROWS rows by a bf16 gate and up, for who multiplies by other means.
 */
typedef struct case_product {
    cu_matrix matrix;
    cu_acts acts;
    float *out; /* [CASE_PREFILL_ROWS][matrix.rows] */
} case_product;
case_product cases_wide(void);

/* Takes all memory that the cases work in. The table is static: one set of cases a process. */
const gpu_case *cases_make(const case_memory *memory, uint32_t *count_out);
