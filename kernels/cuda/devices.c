#include "kernels/cuda/devices.h"

#include "common/base/log.h"
#include "kernels/cuda/gpu.h"

#include <stdlib.h>
#include <string.h>

static bool may_share(void)
{
    const char *text = getenv("KVFERRY_SHARE_DEVICE");

    return text != NULL && strcmp(text, "1") == 0;
}

pd_status cu_device_of_rank(const char *backend, uint32_t first, uint32_t rank, uint32_t ranks,
                            uint32_t *device_out)
{
    char reason[256];
    uint32_t count = gpu_count(reason, sizeof reason);

    if (count == 0) {
        pd_log_error("msg=\"%s: no device: %s\"", backend, reason);
        return PD_E_UNSUPPORTED;
    }
    if (first >= count) {
        pd_log_error("msg=\"%s: there is no such device\" device=%u devices=%u", backend, first,
                     count);
        return PD_E_UNSUPPORTED;
    }
    if (ranks > 1 && may_share()) {
        *device_out = first;
        return PD_OK;
    }
    if (ranks > count - first) {
        pd_log_error("msg=\"%s: %u ranks need a device each, from %u on, and there are %u\" "
                     "device=%u ranks=%u devices=%u",
                     backend, ranks, first, count, first, ranks, count);
        return PD_E_UNSUPPORTED;
    }
    *device_out = first + rank;
    return PD_OK;
}
