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

pd_status check_devices(const pd_deployment *d, char *why, size_t why_size)
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
