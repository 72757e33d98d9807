#include "kernels/cuda/plugin.h"

/* Never better than anything. Its pool is host memory, but the emulator's own: between guard zones.
 */
#define SCORE 1

static int probe(uint32_t device, char *reason, size_t reason_size)
{
    return cu_plugin_probe(device, SCORE, reason, reason_size);
}

static uint64_t shared_bytes(const pd_model_shape *shape, const kern_backend_options *options,
                             const pd_kv_layout *layout, bool seals)
{
    (void)shape;
    (void)layout;
    (void)seals;
    return cu_plugin_shared_bytes("cuda-emu", options);
}

static pd_status create(const pd_model_file *file, const kern_backend_options *options,
                        kern_loaded **model_out)
{
    return cu_plugin_create("cuda-emu", file, options, model_out);
}

const kern_backend kern_backend_plugin = {
    CU_PLUGIN_TABLE, .name = "cuda-emu",           .pool_kind = PD_MEMORY_HOST,
    .probe = probe,  .shared_bytes = shared_bytes, .create = create,
};
