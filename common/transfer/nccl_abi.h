#pragma once

/* common/transfer/nccl_abi.h - what is used of NCCL's and the CUDA driver's binary interfaces, in
 * names of our own, so that neither's headers are needed. Inside common/transfer only.
 *
 * Sources: nccl.h of NCCL 2.28.9 (ncclUniqueId, ncclConfig_v22800, ncclResult_t), cuda.h of CUDA
 * 13.0. Both are kept compatible by their makers within libnccl.so.2 and libcuda.so.1; a test
 * compares this with their headers where it finds them. */

#include <stddef.h>
#include <stdint.h>

typedef void *pd_nccl_comm; /* ncclComm_t */
typedef void *pd_cu_stream; /* CUstream, which is cudaStream_t */
typedef void *pd_cu_context;

#define PD_NCCL_ID_BYTES 128

typedef struct pd_nccl_id {
    char bytes[PD_NCCL_ID_BYTES];
} pd_nccl_id;

/* ncclResult_t */
enum {
    PD_NCCL_SUCCESS = 0,
    PD_NCCL_SYSTEM_ERROR = 2,
    PD_NCCL_INVALID_ARGUMENT = 4,
    PD_NCCL_REMOTE_ERROR = 6,
    PD_NCCL_IN_PROGRESS = 7,
    PD_NCCL_INT8 = 0, /* ncclDataType_t */
};

#define PD_NCCL_CONFIG_MAGIC     0xcafebeefu
#define PD_NCCL_CONFIG_VERSION   22809u
#define PD_NCCL_CONFIG_UNDEFINED INT32_MIN

typedef struct pd_nccl_config { /* ncclConfig_v22800 */
    size_t size;
    unsigned magic, version;
    int blocking;
    int cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
    int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer;
    int nvlink_centric_sched;
} pd_nccl_config;

/* CUresult and attributes */
enum {
    PD_CU_SUCCESS = 0,
    PD_CU_NOT_READY = 600,
    PD_CU_POINTER_DEVICE_ORDINAL = 9,
    PD_CU_STREAM_NON_BLOCKING = 1,
};

/* Every call that is used; types as in nccl.h and cuda.h, enumerations as int. */
#define PD_NCCL_CALLS(CALL)                                                                        \
    CALL(nccl, get_version, "ncclGetVersion", int, (int *version))                                 \
    CALL(nccl, get_unique_id, "ncclGetUniqueId", int, (pd_nccl_id * id))                           \
    CALL(nccl, comm_init, "ncclCommInitRankConfig", int,                                           \
         (pd_nccl_comm * comm, int ranks, pd_nccl_id id, int rank, pd_nccl_config *config))        \
    CALL(nccl, comm_error, "ncclCommGetAsyncError", int, (pd_nccl_comm comm, int *error))          \
    CALL(nccl, comm_abort, "ncclCommAbort", int, (pd_nccl_comm comm))                              \
    CALL(nccl, group_start, "ncclGroupStart", int, (void))                                         \
    CALL(nccl, group_end, "ncclGroupEnd", int, (void))                                             \
    CALL(nccl, send, "ncclSend", int,                                                              \
         (const void *bytes, size_t count, int type, int peer, pd_nccl_comm comm,                  \
          pd_cu_stream stream))                                                                    \
    CALL(nccl, recv, "ncclRecv", int,                                                              \
         (void *bytes, size_t count, int type, int peer, pd_nccl_comm comm, pd_cu_stream stream))  \
    CALL(nccl, error_text, "ncclGetErrorString", const char *, (int result))                       \
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
