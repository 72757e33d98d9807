#pragma once

/* kernels/cuda/plugin.h - what the two plugins share; each fills its table from here.
 *
 * plugin_cuda.c is kv_cuda.so's, plugin_emu.c kv_cuda_emu.so's: the same model on another body of
 * gpu.h. The calls are kernels/backend.h's. */

#include "common/base/log.h"
#include "kernels/cuda/model.h"

/* Whether the device can be had, and its name; the score is `score` then. */
int cu_plugin_probe(uint32_t device, int score, char *reason, size_t reason_size);
uint64_t cu_plugin_shared_bytes(const char *backend, const kern_backend_options *options);
PD_CHECKED pd_status cu_plugin_locate(const kern_backend_options *options,
                                      pd_device_place *place_out);
PD_CHECKED pd_status cu_plugin_create(const char *backend, const pd_model_file *file,
                                      const kern_backend_options *options, kern_loaded **model_out);

/* The table but for what a plugin has of its own: name, pool_kind, probe, shared_bytes and create.
 */
#define CU_PLUGIN_TABLE                                                                            \
    .abi = KERN_BACKEND_ABI, .struct_bytes = sizeof(kern_backend), .pool_own = true,               \
    .attach = pd_log_init, .locate = cu_plugin_locate, .destroy = cu_model_destroy,                \
    .describe = cu_model_describe, .bytes = cu_model_bytes, .broken = cu_model_broken,             \
    .last_error = cu_model_last_error, .pool_alloc = cu_model_pool_alloc,                          \
    .pool_free = cu_model_pool_free, .bind = cu_model_bind, .step = cu_model_step,                 \
    .seal = cu_model_seal, .check = cu_model_check
