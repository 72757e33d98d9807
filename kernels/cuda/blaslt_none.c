#include "kernels/cuda/blaslt.h"

#include <stdio.h>

/* Where there is no cuBLASLt: the emulated GPU, and a toolkit without its header. */

pd_status blaslt_open(gpu *g, blaslt **blaslt_out, char *reason, size_t reason_size)
{
    (void)g, (void)blaslt_out;
    snprintf(reason, reason_size, "this build has no cuBLASLt");
    return PD_E_UNSUPPORTED;
}

void blaslt_close(blaslt *b)
{
    pd_assert(b == NULL); /* none was ever opened */
}

pd_status blaslt_plan_create(blaslt *b, const blaslt_shape *shape, uint32_t nth,
                             blaslt_plan **plan_out)
{
    (void)b, (void)shape, (void)nth, (void)plan_out;
    return PD_E_UNSUPPORTED;
}

void blaslt_plan_destroy(blaslt_plan *plan)
{
    pd_assert(plan == NULL);
}

pd_status blaslt_matmul(const blaslt_plan *plan, gpu_stream *stream, const void *weights,
                        const uint16_t *acts, float *out)
{
    (void)plan, (void)stream, (void)weights, (void)acts, (void)out;
    return PD_E_UNSUPPORTED;
}
