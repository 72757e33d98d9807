#pragma once

/* common/transfer/cuda_driver.h - the CUDA driver, loaded at run time by whoever carries a pool in
 * a GPU's memory. Inside common/transfer only.
 *
 * libcuda.so.1 is found as the dynamic loader finds libraries; nothing links it. Loaded once in a
 * process and kept. */

#include "common/base/status.h"
#include "common/transfer/cuda_abi.h"

typedef struct pd_cuda_driver {
#define PD_CUDA_MEMBER(library, name, symbol, result, arguments)                                   \
    result(*library##_##name) arguments;
    PD_CUDA_CALLS(PD_CUDA_MEMBER)
#undef PD_CUDA_MEMBER
} pd_cuda_driver;

/* PD_E_UNSUPPORTED, logged: the library or which symbol is missing. Any thread. */
PD_CHECKED pd_status pd_cuda_driver_load(const pd_cuda_driver **driver_out);
