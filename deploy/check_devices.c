#include "deploy/check_devices.h"

#include "common/base/memory_kind.h"

#include <stdio.h>
#include <string.h>

/* False: it is known when the worker runs. */
static bool pool_kind(const char *device, pd_memory_kind *kind_out)
{
    if (strcmp(device, "auto") == 0)
        return false;
    /* an emulated GPU's memory is the host's */
    *kind_out = strcmp(device, "cuda") == 0 || strncmp(device, "cuda:", 5) == 0 ? PD_MEMORY_CUDA
                                                                                : PD_MEMORY_HOST;
    return true;
}

static pd_status check_pools_meet(const pd_deployment *d, char *why, size_t why_size)
{
    pd_memory_kind prefill, decode;

    if (!pool_kind(d->prefill.device, &prefill) || !pool_kind(d->decode.device, &decode) ||
        prefill == decode)
        return PD_OK;
    snprintf(why, why_size,
             "decode.device: %s keeps KV in %s memory, and prefill.device: %s in %s: workers "
             "exchange blocks only between pools of one kind",
             d->decode.device, decode == PD_MEMORY_CUDA ? "a GPU's" : "the host's",
             d->prefill.device, prefill == PD_MEMORY_CUDA ? "a GPU's" : "the host's");
    return PD_E_INVALID;
}

/* What its carrier refuses at a worker's start (common/transfer/nccl.c). */
static pd_status check_nccl(const char *role, const pd_deployment_pool *pool, char *why,
                            size_t why_size)
{
    pd_memory_kind kind;

    if (pool_kind(pool->device, &kind) && kind != PD_MEMORY_CUDA) {
        snprintf(why, why_size,
                 "transfer.backend: nccl carries KV between GPUs alone, and %s.device: %s keeps it "
                 "in the host's memory; ucx carries it",
                 role, pool->device);
        return PD_E_INVALID;
    }
    if (pool->tensor_parallel == 1)
        return PD_OK;
    snprintf(why, why_size,
             "transfer.backend: nccl carries the KV of one GPU a worker, and with "
             "%s.tensor_parallel: %u it lies on %u; ucx carries it",
             role, pool->tensor_parallel, pool->tensor_parallel);
    return PD_E_INVALID;
}

pd_status check_devices(const pd_deployment *d, char *why, size_t why_size)
{
    pd_status status = check_pools_meet(d, why, why_size);

    if (status != PD_OK || strcmp(d->transfer.backend, "nccl") != 0)
        return status;
    status = check_nccl("prefill", &d->prefill, why, why_size);
    return status == PD_OK ? check_nccl("decode", &d->decode, why, why_size) : status;
}
