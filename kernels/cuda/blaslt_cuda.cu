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

#define LIBRARY   "libcublasLt.so.13"
#define ALIGNMENT 16
#define LIST_MAX  32 /* algorithms asked for */

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
    void *workspace;
#define DECLARE(name) decltype(&::name) name;
    EACH_FUNCTION(DECLARE)
#undef DECLARE
};

struct blaslt_plan {
    blaslt *b;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t weights, acts, out;
    cublasLtMatmulAlgo_t algorithm;
};

/* --- errors --- */

/* What the library met may be the device's end: gpu.h looks, and marks it. */
static pd_status check(const blaslt *b, cublasStatus_t status, const char *call)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return PD_OK;
    pd_log_error("msg=\"cublaslt: %s failed\" error=%s", call, b->cublasLtGetStatusName(status));
    pd_status met = gpu_met(b->g, 0, call);
    if (met != PD_OK)
        return met;
    return status == CUBLAS_STATUS_ALLOC_FAILED    ? PD_E_NOMEM
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? PD_E_UNSUPPORTED
                                                   : PD_E_INTERNAL;
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
        pd_status met = gpu_met(b->g, 0, "cublasLtCreate");
        return met != PD_OK ? met : PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

pd_status blaslt_open(gpu *g, blaslt **blaslt_out, char *reason, size_t reason_size)
{
    blaslt *b = (blaslt *)pd_calloc(1, sizeof *b);

    snprintf(reason, reason_size, "out of memory");
    if (b == NULL)
        return PD_E_NOMEM;
    b->g = g;
    pd_status status = load(b, reason, reason_size);
    if (status == PD_OK)
        status = gpu_alloc(g, BLASLT_WORKSPACE_BYTES, &b->workspace);
    if (status == PD_OK) {
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
    uint64_t workspace = BLASLT_WORKSPACE_BYTES;
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

/* The nth of the library's list. */
static pd_status choose(blaslt_plan *plan, uint32_t nth)
{
    const blaslt *b = plan->b;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found[LIST_MAX] = {};
    int count = 0;

    if (nth >= LIST_MAX)
        return PD_E_UNSUPPORTED;
    pd_status status =
        check(b, b->cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    if (status != PD_OK)
        return status;
    status = prefer(b, preference);
    if (status == PD_OK) {
        cublasStatus_t asked = b->cublasLtMatmulAlgoGetHeuristic(
            b->handle, plan->product, plan->weights, plan->acts, plan->out, plan->out, preference,
            (int)nth + 1, found, &count);
        status = asked == CUBLAS_STATUS_NOT_SUPPORTED
                     ? PD_E_UNSUPPORTED /* none at all */
                     : check(b, asked, "cublasLtMatmulAlgoGetHeuristic");
    }
    b->cublasLtMatmulPreferenceDestroy(preference);
    if (status == PD_OK && (count <= (int)nth || found[nth].state != CUBLAS_STATUS_SUCCESS))
        status = PD_E_UNSUPPORTED;
    plan->algorithm = found[nth].algo;
    return status;
}

static pd_status describe(blaslt_plan *plan, const blaslt_shape *shape)
{
    const blaslt *b = plan->b;
    cudaDataType_t type = shape->bf16 ? CUDA_R_16BF : CUDA_R_16F;
    cublasOperation_t transposed = CUBLAS_OP_T;

    pd_status status =
        check(b, b->cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              "cublasLtMatmulDescCreate");
    if (status == PD_OK)
        status = check(b,
                       b->cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                         &transposed, sizeof transposed),
                       "cublasLtMatmulDescSetAttribute");
    if (status == PD_OK)
        status = check(b,
                       b->cublasLtMatrixLayoutCreate(&plan->weights, type, shape->cols,
                                                     shape->weight_rows, shape->cols),
                       "cublasLtMatrixLayoutCreate");
    if (status == PD_OK)
        status = check(
            b,
            b->cublasLtMatrixLayoutCreate(&plan->acts, type, shape->cols, shape->rows, shape->cols),
            "cublasLtMatrixLayoutCreate");
    if (status == PD_OK)
        status = check(b,
                       b->cublasLtMatrixLayoutCreate(&plan->out, CUDA_R_32F, shape->weight_rows,
                                                     shape->rows, (int64_t)shape->out_stride),
                       "cublasLtMatrixLayoutCreate");
    return status;
}

pd_status blaslt_plan_create(blaslt *b, const blaslt_shape *shape, uint32_t nth,
                             blaslt_plan **plan_out)
{
    pd_assert(shape->cols > 0 && shape->cols % 8 == 0 && shape->weight_rows > 0);
    pd_assert(shape->rows > 0 && shape->out_stride % 4 == 0);
    pd_assert(shape->out_stride >= shape->weight_rows);
    blaslt_plan *plan = (blaslt_plan *)pd_calloc(1, sizeof *plan);
    if (plan == NULL)
        return PD_E_NOMEM;
    plan->b = b;
    pd_status status = describe(plan, shape);
    if (status == PD_OK)
        status = choose(plan, nth);
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

pd_status blaslt_matmul(const blaslt_plan *plan, gpu_stream *stream, const void *weights,
                        const uint16_t *acts, float *out)
{
    const blaslt *b = plan->b;
    const float one = 1, zero = 0;

    if (gpu_broken(b->g) != NULL)
        return PD_E_INTERNAL;
    return check(b,
                 b->cublasLtMatmul(b->handle, plan->product, &one, weights, plan->weights, acts,
                                   plan->acts, &zero, out, plan->out, out, plan->out,
                                   &plan->algorithm, b->workspace, BLASLT_WORKSPACE_BYTES,
                                   (cudaStream_t)gpu_stream_native(stream)),
                 "cublasLtMatmul");
}
