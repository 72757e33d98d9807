#include "kernels/cuda/plugin.h"

#include "common/base/log.h"

/* Never better than anything. Its pool is host memory, but the emulator's own: between guard zones.
 */
#define SCORE 1

static int probe(uint32_t device, char *reason, size_t reason_size)
{
    return cu_plugin_probe(device, SCORE, reason, reason_size);
}

static pd_status create(const pd_model_file *file, const kern_backend_options *options,
                        kern_loaded **model_out)
{
    return cu_plugin_create("cuda-emu", file, options, model_out);
}

const kern_backend kern_backend_plugin = {
    .abi = KERN_BACKEND_ABI,
    .struct_bytes = sizeof(kern_backend),
    .name = "cuda-emu",
    .pool_kind = PD_MEMORY_HOST,
    .pool_own = true,
    .probe = probe,
    .attach = pd_log_init,
    .create = create,
    .destroy = cu_model_destroy,
    .describe = cu_model_describe,
    .bytes = cu_model_bytes,
    .broken = cu_model_broken,
    .pool_alloc = cu_model_pool_alloc,
    .pool_free = cu_model_pool_free,
    .bind = cu_model_bind,
    .step = cu_model_step,
    .seal = cu_model_seal,
    .check = cu_model_check,
};
