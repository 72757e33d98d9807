#include "kernels/cuda/blaslt.h"

#include <stdio.h>

/* Where there is no cuBLASLt: the emulated GPU, and a toolkit without its header. */

pd_status blaslt_open(gpu *g, uint32_t cols_max, uint64_t out_stride_max, blaslt **blaslt_out,
                      char *reason, size_t reason_size)
{
    (void)g, (void)cols_max, (void)out_stride_max, (void)blaslt_out;
    snprintf(reason, reason_size, "this build has no cuBLASLt");
    return PD_E_UNSUPPORTED;
}

void blaslt_close(blaslt *b)
{
    pd_assert(b == NULL); /* none was ever opened */
}

pd_status blaslt_plan_create(blaslt *b, bool bf16, uint32_t weight_rows, uint32_t cols,
                             uint64_t out_stride, blaslt_plan **plan_out)
{
    (void)b, (void)bf16, (void)weight_rows, (void)cols, (void)out_stride, (void)plan_out;
    return PD_E_UNSUPPORTED;
}

void blaslt_plan_destroy(blaslt_plan *plan)
{
    pd_assert(plan == NULL);
}

pd_status blaslt_matmul(blaslt_plan *plan, gpu_stream *stream, const void *weights,
                        const uint16_t *acts, uint32_t rows, float *out)
{
    (void)plan, (void)stream, (void)weights, (void)acts, (void)rows, (void)out;
    return PD_E_UNSUPPORTED;
}
