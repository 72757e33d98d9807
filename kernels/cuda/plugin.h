#pragma once

/* kernels/cuda/plugin.h - what the two plugins share; each fills its table from here.
 *
 * plugin_cuda.c is kv_cuda.so's, plugin_emu.c kv_cuda_emu.so's: the same model on another body of
 * gpu.h. The calls are kernels/backend.h's. */

#include "kernels/cuda/model.h"

/* Whether the device can be had, and its name; the score is `score` then. */
int cu_plugin_probe(uint32_t device, int score, char *reason, size_t reason_size);
PD_CHECKED pd_status cu_plugin_create(const char *backend, const pd_model_file *file,
                                      const kern_backend_options *options, kern_loaded **model_out);
