#pragma once

/* kernels/cuda/gpu_fabric.h - GPU memory that has a fabric handle: GPUs of other hosts reach it
 * where one NVLink fabric joins them, and other processes of this host do, too. For gpu_cuda.cu
 * alone.
 *
 * Such memory is made of the driver's virtual memory calls (cuda.h, "Virtual Memory Management" and
 * CU_MEM_HANDLE_TYPE_FABRIC); the legacy IPC handles of cudaMalloc's memory do not exist for it. It
 * needs a device, a driver and a running IMEX service that give out such handles. Nothing is logged
 * here: reason says which call failed, and how. Any thread that has the device current. */

#include "common/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GPU_FABRIC_HANDLE_BYTES 64

/* At least bytes, not cleared. PD_E_UNSUPPORTED: this device or driver gives no fabric handles;
 * PD_E_NOMEM; PD_E_INTERNAL: the driver failed in another way. */
PD_CHECKED pd_status gpu_fabric_alloc(int device, uint64_t bytes, void **memory_out, char *reason,
                                      size_t reason_size);
/* Is that the start of memory that was made or imported here? */
bool gpu_fabric_has(const void *memory);
/* Of memory that gpu_fabric_has. False: the driver would not. */
bool gpu_fabric_free(void *memory, char *reason, size_t reason_size);
PD_CHECKED pd_status gpu_fabric_export(void *memory,
                                       unsigned char handle_out[GPU_FABRIC_HANDLE_BYTES],
                                       char *reason, size_t reason_size);
/* bytes: as they were asked for where it was made. */
PD_CHECKED pd_status gpu_fabric_import(int device,
                                       const unsigned char handle[GPU_FABRIC_HANDLE_BYTES],
                                       uint64_t bytes, void **memory_out, char *reason,
                                       size_t reason_size);
