#include "kernels/cuda/blaslt.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* cuBLASLt behind dlopen: half a gigabyte that a worker with quantised weights never needs. Only
 * its types come from the header; nothing is linked. cuBLASLt is column-major: our W[r][c] is its c
 * x r matrix, transposed in the product, and out[n][r] its r x n. */

#define LIBRARY         "libcublasLt.so.13"
#define WORKSPACE_BYTES ((uint64_t)32 << 20) /* what NVIDIA advises for Hopper */
#define ALIGNMENT       16

/* The functions used, by their names in the library. */
#define EACH_FUNCTION(X)                                                                           \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtGetStatusName)                                                                       \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmul)

struct blaslt {
    gpu *g;
    void *library;
    cublasLtHandle_t handle;
    uint32_t cols_max;
    uint64_t out_stride_max;
    void *workspace;
    uint16_t *last_acts; /* [BLASLT_ROWS][cols_max] */
    float *last_out;     /* [BLASLT_ROWS][out_stride_max] */
#define DECLARE(name) decltype(&::name) name;
    EACH_FUNCTION(DECLARE)
#undef DECLARE
};

struct blaslt_plan {
    blaslt *b;
    uint32_t weight_rows, cols;
    uint64_t out_stride;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t weights, acts, out;
    cublasLtMatmulAlgo_t algorithm;
};

/* --- errors --- */

static pd_status check(const blaslt *b, cublasStatus_t status, const char *call)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return PD_OK;
    pd_log_error("msg=\"cublaslt: %s failed\" error=%s", call, b->cublasLtGetStatusName(status));
    return status == CUBLAS_STATUS_ALLOC_FAILED    ? PD_E_NOMEM
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? PD_E_UNSUPPORTED
                                                   : PD_E_INTERNAL;
}

static pd_status check_copy(cudaError_t error)
{
    if (error == cudaSuccess)
        return PD_OK;
    pd_log_error("msg=\"cublaslt: the last rows could not be copied\" error=%s",
                 cudaGetErrorName(error));
    return PD_E_INTERNAL;
}

/* --- the library --- */

static pd_status load(blaslt *b, char *reason, size_t reason_size)
{
    const char *missing = NULL;

    b->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (b->library == NULL) {
        snprintf(reason, reason_size, "%s", dlerror());
        return PD_E_UNSUPPORTED;
    }
#define FIND(name)                                                                                 \
    b->name = reinterpret_cast<decltype(&::name)>(dlsym(b->library, #name));                       \
    missing = b->name == NULL ? #name : missing;
    EACH_FUNCTION(FIND)
#undef FIND
    if (missing != NULL) {
        snprintf(reason, reason_size, LIBRARY " has no %s", missing);
        return PD_E_UNSUPPORTED;
    }
    cublasStatus_t status = b->cublasLtCreate(&b->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        b->handle = NULL;
        snprintf(reason, reason_size, "cublasLtCreate: %s", b->cublasLtGetStatusName(status));
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

pd_status blaslt_open(gpu *g, uint32_t cols_max, uint64_t out_stride_max, blaslt **blaslt_out,
                      char *reason, size_t reason_size)
{
    blaslt *b = (blaslt *)pd_calloc(1, sizeof *b);
    void *memory = NULL;

    pd_assert(cols_max > 0 && out_stride_max > 0);
    snprintf(reason, reason_size, "out of memory");
    if (b == NULL)
        return PD_E_NOMEM;
    b->g = g;
    b->cols_max = cols_max;
    b->out_stride_max = out_stride_max;
    pd_status status = load(b, reason, reason_size);
    if (status == PD_OK)
        status = gpu_alloc(g, WORKSPACE_BYTES, &b->workspace);
    if (status == PD_OK)
        status = gpu_alloc(g, (uint64_t)BLASLT_ROWS * cols_max * sizeof *b->last_acts, &memory);
    if (status == PD_OK) {
        b->last_acts = (uint16_t *)memory;
        status = gpu_alloc(g, BLASLT_ROWS * out_stride_max * sizeof *b->last_out, &memory);
    }
    if (status == PD_OK) {
        b->last_out = (float *)memory;
        *blaslt_out = b;
        return PD_OK;
    }
    blaslt_close(b);
    return status;
}

void blaslt_close(blaslt *b)
{
    if (b == NULL)
        return;
    gpu_free(b->g, b->last_out);
    gpu_free(b->g, b->last_acts);
    gpu_free(b->g, b->workspace);
    if (b->handle != NULL)
        b->cublasLtDestroy(b->handle);
    if (b->library != NULL)
        dlclose(b->library);
    pd_free(b);
}

/* --- a plan --- */

/* What the algorithm may be: no split sums, so that every element is one sum over the columns. */
static pd_status prefer(const blaslt *b, cublasLtMatmulPreference_t preference)
{
    uint64_t workspace = WORKSPACE_BYTES;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = ALIGNMENT;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t bytes;
    } wishes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, sizeof alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, sizeof alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment, sizeof alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment, sizeof alignment},
    };
    pd_status status = PD_OK;

    for (size_t i = 0; status == PD_OK && i < sizeof wishes / sizeof *wishes; i++)
        status = check(b,
                       b->cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].name,
                                                               wishes[i].value, wishes[i].bytes),
                       "cublasLtMatmulPreferenceSetAttribute");
    return status;
}

/* The first of the library's list for BLASLT_ROWS rows, whatever the number of rows will be. */
static pd_status choose(blaslt_plan *plan)
{
    const blaslt *b = plan->b;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;

    pd_status status =
        check(b, b->cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    if (status != PD_OK)
        return status;
    status = prefer(b, preference);
    if (status == PD_OK)
        status = check(b,
                       b->cublasLtMatmulAlgoGetHeuristic(b->handle, plan->product, plan->weights,
                                                         plan->acts, plan->out, plan->out,
                                                         preference, 1, &found, &count),
                       "cublasLtMatmulAlgoGetHeuristic");
    b->cublasLtMatmulPreferenceDestroy(preference);
    if (status == PD_OK && (count == 0 || found.state != CUBLAS_STATUS_SUCCESS)) {
        pd_log_error("msg=\"cublaslt: no algorithm\" weight_rows=%u cols=%u", plan->weight_rows,
                     plan->cols);
        status = PD_E_UNSUPPORTED;
    }
    plan->algorithm = found.algo;
    return status;
}

pd_status blaslt_plan_create(blaslt *b, bool bf16, uint32_t weight_rows, uint32_t cols,
                             uint64_t out_stride, blaslt_plan **plan_out)
{
    cudaDataType_t type = bf16 ? CUDA_R_16BF : CUDA_R_16F;
    cublasOperation_t transposed = CUBLAS_OP_T;

    pd_assert(cols > 0 && cols % 8 == 0 && cols <= b->cols_max && weight_rows > 0);
    pd_assert(out_stride % 4 == 0 && out_stride >= weight_rows && out_stride <= b->out_stride_max);
    blaslt_plan *plan = (blaslt_plan *)pd_calloc(1, sizeof *plan);
    if (plan == NULL)
        return PD_E_NOMEM;
    plan->b = b;
    plan->weight_rows = weight_rows;
    plan->cols = cols;
    plan->out_stride = out_stride;
    pd_status status =
        check(b, b->cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescCreate");
    if (status == PD_OK)
        status = check(b,
                       b->cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                         &transposed, sizeof transposed),
                       "cublasLtMatmulDescSetAttribute");
    if (status == PD_OK)
        status =
            check(b, b->cublasLtMatrixLayoutCreate(&plan->weights, type, cols, weight_rows, cols),
                  "cublasLtMatrixLayoutCreate");
    if (status == PD_OK)
        status = check(b, b->cublasLtMatrixLayoutCreate(&plan->acts, type, cols, BLASLT_ROWS, cols),
                       "cublasLtMatrixLayoutCreate");
    if (status == PD_OK)
        status = check(b,
                       b->cublasLtMatrixLayoutCreate(&plan->out, CUDA_R_32F, weight_rows,
                                                     BLASLT_ROWS, (int64_t)out_stride),
                       "cublasLtMatrixLayoutCreate");
    if (status == PD_OK)
        status = choose(plan);
    if (status == PD_OK)
        *plan_out = plan;
    else
        blaslt_plan_destroy(plan);
    return status;
}

void blaslt_plan_destroy(blaslt_plan *plan)
{
    if (plan == NULL)
        return;
    if (plan->out != NULL)
        plan->b->cublasLtMatrixLayoutDestroy(plan->out);
    if (plan->acts != NULL)
        plan->b->cublasLtMatrixLayoutDestroy(plan->acts);
    if (plan->weights != NULL)
        plan->b->cublasLtMatrixLayoutDestroy(plan->weights);
    if (plan->product != NULL)
        plan->b->cublasLtMatmulDescDestroy(plan->product);
    pd_free(plan);
}

/* --- the product --- */

static pd_status multiply(const blaslt_plan *plan, cudaStream_t stream, const void *weights,
                          const uint16_t *acts, float *out)
{
    const blaslt *b = plan->b;
    const float one = 1, zero = 0;

    return check(b,
                 b->cublasLtMatmul(b->handle, plan->product, &one, weights, plan->weights, acts,
                                   plan->acts, &zero, out, plan->out, out, plan->out,
                                   &plan->algorithm, b->workspace, WORKSPACE_BYTES, stream),
                 "cublasLtMatmul");
}

/* Fewer rows than BLASLT_ROWS: what is beside them in the copy is any number and meets none of
 * them.
 */
static pd_status multiply_last(const blaslt_plan *plan, cudaStream_t stream, const void *weights,
                               const uint16_t *acts, uint32_t rows, float *out)
{
    const blaslt *b = plan->b;
    size_t acts_bytes = (size_t)rows * plan->cols * sizeof *acts;
    size_t pitch = plan->out_stride * sizeof *out;

    pd_status status = check_copy(
        cudaMemcpyAsync(b->last_acts, acts, acts_bytes, cudaMemcpyDeviceToDevice, stream));
    if (status == PD_OK)
        status = multiply(plan, stream, weights, b->last_acts, b->last_out);
    if (status == PD_OK)
        status = check_copy(cudaMemcpy2DAsync(out, pitch, b->last_out, pitch,
                                              plan->weight_rows * sizeof *out, rows,
                                              cudaMemcpyDeviceToDevice, stream));
    return status;
}

pd_status blaslt_matmul(blaslt_plan *plan, gpu_stream *stream, const void *weights,
                        const uint16_t *acts, uint32_t rows, float *out)
{
    cudaStream_t native = (cudaStream_t)gpu_stream_native(stream);
    pd_status status = PD_OK;
    uint32_t row = 0;

    for (; status == PD_OK && row + BLASLT_ROWS <= rows; row += BLASLT_ROWS)
        status = multiply(plan, native, weights, acts + (uint64_t)row * plan->cols,
                          out + row * plan->out_stride);
    if (status == PD_OK && row < rows)
        status = multiply_last(plan, native, weights, acts + (uint64_t)row * plan->cols, rows - row,
                               out + row * plan->out_stride);
    return status;
}
