#pragma once

/* common/transfer/nccl_library.h - NCCL, loaded at run time, with the CUDA driver's calls
 * (cuda_driver.h) beside it. Inside common/transfer only.
 *
 * libnccl.so.2 is found as the dynamic loader finds libraries; nothing links it. Loaded once in a
 * process and kept: NCCL's threads outlive its communicators. */

#include "common/base/status.h"
#include "common/transfer/nccl_abi.h"

typedef struct pd_nccl_library {
#define PD_NCCL_MEMBER(library, name, symbol, result, arguments)                                   \
    result(*library##_##name) arguments;
    PD_NCCL_CALLS(PD_NCCL_MEMBER)
    PD_CUDA_CALLS(PD_NCCL_MEMBER)
#undef PD_NCCL_MEMBER
    int version; /* of NCCL: 22809 is 2.28.9 */
} pd_nccl_library;

/* PD_E_UNSUPPORTED, logged: which library or symbol is missing, or the version is too old. Any
 * thread. */
PD_CHECKED pd_status pd_nccl_library_load(const pd_nccl_library **library_out);
