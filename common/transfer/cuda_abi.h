#pragma once

/* common/transfer/cuda_abi.h - what is used of the CUDA driver's binary interface, in names of our
 * own, so that its header is not needed. Inside common/transfer only.
 *
 * Source: cuda.h of CUDA 13.0, kept compatible by its makers within libcuda.so.1; a test compares
 * this with the header where it finds it. */

#include <stddef.h>
#include <stdint.h>

typedef void *pd_cu_stream; /* CUstream, which is cudaStream_t */
typedef void *pd_cu_context;

/* CUresult and attributes */
enum {
    PD_CU_SUCCESS = 0,
    PD_CU_NOT_READY = 600,
    PD_CU_POINTER_DEVICE_ORDINAL = 9,
    PD_CU_POINTER_LEGACY_IPC = 10,
    PD_CU_STREAM_NON_BLOCKING = 1,
    PD_CU_DEVICE_RDMA_FLUSH = 117,    /* bit 0: the host may flush (see gpus.h) */
    PD_CU_DEVICE_RDMA_ORDERING = 118, /* 100 and more: what a NIC wrote is seen without that */
    PD_CU_DEVICE_DMA_BUF = 124,
    PD_CU_RDMA_ORDERING_OWNER = 100,
    PD_CU_FLUSH_CURRENT_CONTEXT = 0,
    PD_CU_FLUSH_TO_OWNER = 100,
};

/* Every call that is used; types as in cuda.h, enumerations as int. */
#define PD_CUDA_CALLS(CALL)                                                                        \
    CALL(cuda, device_attribute, "cuDeviceGetAttribute", int,                                      \
         (int *value, int attribute, int device))                                                  \
    CALL(cuda, copy_in, "cuMemcpyHtoDAsync_v2", int,                                               \
         (uintptr_t to, const void *from, size_t bytes, pd_cu_stream stream))                      \
    CALL(cuda, copy_out, "cuMemcpyDtoHAsync_v2", int,                                              \
         (void *to, uintptr_t from, size_t bytes, pd_cu_stream stream))                            \
    CALL(cuda, stream_wait, "cuStreamSynchronize", int, (pd_cu_stream stream))                     \
    CALL(cuda, flush_writes, "cuFlushGPUDirectRDMAWrites", int, (int target, int scope))           \
    CALL(cuda, init, "cuInit", int, (unsigned flags))                                              \
    CALL(cuda, pointer_attribute, "cuPointerGetAttribute", int,                                    \
         (void *value, int attribute, uintptr_t pointer))                                          \
    CALL(cuda, context_retain, "cuDevicePrimaryCtxRetain", int,                                    \
         (pd_cu_context * context, int device))                                                    \
    CALL(cuda, context_release, "cuDevicePrimaryCtxRelease_v2", int, (int device))                 \
    CALL(cuda, context_set, "cuCtxSetCurrent", int, (pd_cu_context context))                       \
    CALL(cuda, stream_create, "cuStreamCreate", int, (pd_cu_stream * stream, unsigned flags))      \
    CALL(cuda, stream_query, "cuStreamQuery", int, (pd_cu_stream stream))                          \
    CALL(cuda, stream_destroy, "cuStreamDestroy_v2", int, (pd_cu_stream stream))
