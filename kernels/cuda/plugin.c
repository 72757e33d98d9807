#include "kernels/cuda/plugin.h"

#include "common/base/log.h"
#include "kernels/cuda/devices.h"

#include <stdio.h>

int cu_plugin_probe(uint32_t device, int score, char *reason, size_t reason_size)
{
    uint32_t count = gpu_count(reason, reason_size);
    gpu_info info;

    if (count == 0)
        return 0;
    if (device >= count) {
        snprintf(reason, reason_size, "there is no device %u: this machine has %u", device, count);
        return 0;
    }
    pd_status status = gpu_look(device, &info);
    if (status != PD_OK) {
        snprintf(reason, reason_size, "device %u cannot be used (%s; the log says why)", device,
                 pd_status_name(status));
        return 0;
    }
    snprintf(reason, reason_size, "%s, %llu MiB", info.name,
             (unsigned long long)(info.memory_bytes >> 20));
    return score;
}

uint64_t cu_plugin_shared_bytes(const char *backend, const kern_backend_options *options)
{
    const cu_model_settings settings = {.backend = backend};

    return cu_model_shared_bytes(options, &settings);
}

pd_status cu_plugin_locate(const kern_backend_options *options, pd_device_place *place_out)
{
    uint32_t device, ranks = options->ranks > 0 ? options->ranks : 1;
    gpu_info info;
    pd_status status =
        cu_device_of_rank("placement", options->device, options->rank, ranks, &device);

    if (status == PD_OK)
        status = gpu_look(device, &info);
    if (status != PD_OK)
        return status;
    *place_out = (pd_device_place){.numa_node = info.numa_node};
    snprintf(place_out->bus, sizeof place_out->bus, "%s", info.bus);
    return PD_OK;
}

pd_status cu_plugin_create(const char *backend, const pd_model_file *file,
                           const kern_backend_options *options, kern_loaded **model_out)
{
    const cu_model_settings settings = {.backend = backend};

    return cu_model_create(file, options, &settings, model_out);
}
