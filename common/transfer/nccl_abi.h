#pragma once

/* common/transfer/nccl_abi.h - what is used of NCCL's binary interface, in names of our own, so
 * that its header is not needed. Inside common/transfer only, and for kernels/cuda/nccl.c, whose
 * gathers are between the ranks of one worker.
 *
 * Source: nccl.h of NCCL 2.28.9 (ncclUniqueId, ncclConfig_v22800, ncclResult_t). It is kept
 * compatible by its makers within libnccl.so.2; a test compares this with the header where it finds
 * it. */

#include "common/transfer/cuda_abi.h"

#include <stddef.h>
#include <stdint.h>

typedef void *pd_nccl_comm; /* ncclComm_t */

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

/* A communicator whose calls return at once, with NCCL's defaults for all else. */
static inline pd_nccl_config pd_nccl_config_non_blocking(void)
{
    const int undefined = PD_NCCL_CONFIG_UNDEFINED;

    return (pd_nccl_config){
        .size = sizeof(pd_nccl_config),
        .magic = PD_NCCL_CONFIG_MAGIC,
        .version = PD_NCCL_CONFIG_VERSION,
        .blocking = 0,
        .cga_cluster_size = undefined,
        .min_ctas = undefined,
        .max_ctas = undefined,
        .split_share = undefined,
        .traffic_class = undefined,
        .collnet_enable = undefined,
        .cta_policy = undefined,
        .shrink_share = undefined,
        .nvls_ctas = undefined,
        .channels_per_net_peer = undefined,
        .nvlink_centric_sched = undefined,
    };
}

/* Every call that is used; types as in nccl.h, enumerations as int. */
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
    CALL(nccl, error_text, "ncclGetErrorString", const char *, (int result))
