/* What common/transfer/nccl_abi.h and cuda_abi.h declare is what nccl.h and cuda.h say: structures,
 * numbers, and the functions' types. */

#include "common/transfer/nccl_abi.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <cuda.h>
#include <nccl.h>

#define SAME(ours, theirs)                                                                         \
    _Static_assert(offsetof(pd_nccl_config, ours) == offsetof(ncclConfig_t, theirs) &&             \
                       sizeof(((pd_nccl_config *)0)->ours) == sizeof(((ncclConfig_t *)0)->theirs), \
                   #ours)

_Static_assert(sizeof(pd_nccl_id) == sizeof(ncclUniqueId), "id");
_Static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int) &&
                   sizeof(CUresult) == sizeof(int) && sizeof(CUpointer_attribute) == sizeof(int),
               "enumerations");
_Static_assert(sizeof(CUdeviceptr) == sizeof(uintptr_t) && sizeof(CUdevice) == sizeof(int),
               "the driver's");
SAME(size, size);
SAME(magic, magic);
SAME(version, version);
SAME(blocking, blocking);
SAME(cga_cluster_size, cgaClusterSize);
SAME(min_ctas, minCTAs);
SAME(max_ctas, maxCTAs);
SAME(net_name, netName);
SAME(split_share, splitShare);
#if NCCL_VERSION_CODE >= 22800
SAME(traffic_class, trafficClass);
SAME(comm_name, commName);
SAME(collnet_enable, collnetEnable);
SAME(cta_policy, CTAPolicy);
SAME(shrink_share, shrinkShare);
SAME(nvls_ctas, nvlsCTAs);
SAME(channels_per_net_peer, nChannelsPerNetPeer);
SAME(nvlink_centric_sched, nvlinkCentricSched);
#endif

/* Every function that is called, in the headers' own types: T(...) around those that have other
 * names here. Read twice: as it stands it is the header's declaration, with T mapped it is ours. */
#define SIGNATURES(CALL, T)                                                                        \
    CALL(nccl_get_version, ncclGetVersion, T(ncclResult_t), (int *))                               \
    CALL(nccl_get_unique_id, ncclGetUniqueId, T(ncclResult_t), (T(ncclUniqueId) *))                \
    CALL(nccl_comm_init, ncclCommInitRankConfig, T(ncclResult_t),                                  \
         (T(ncclComm_t) *, int, T(ncclUniqueId), int, T(ncclConfig_t) *))                          \
    CALL(nccl_comm_error, ncclCommGetAsyncError, T(ncclResult_t),                                  \
         (T(ncclComm_t), T(ncclResult_t) *))                                                       \
    CALL(nccl_comm_abort, ncclCommAbort, T(ncclResult_t), (T(ncclComm_t)))                         \
    CALL(nccl_group_start, ncclGroupStart, T(ncclResult_t), (void))                                \
    CALL(nccl_group_end, ncclGroupEnd, T(ncclResult_t), (void))                                    \
    CALL(nccl_send, ncclSend, T(ncclResult_t),                                                     \
         (const void *, size_t, T(ncclDataType_t), int, T(ncclComm_t), T(CUstream)))               \
    CALL(nccl_recv, ncclRecv, T(ncclResult_t),                                                     \
         (void *, size_t, T(ncclDataType_t), int, T(ncclComm_t), T(CUstream)))                     \
    CALL(nccl_error_text, ncclGetErrorString, const char *, (T(ncclResult_t)))                     \
    CALL(cuda_device_attribute, cuDeviceGetAttribute, T(CUresult),                                 \
         (int *, T(CUdevice_attribute), T(CUdevice)))                                              \
    CALL(cuda_copy_in, cuMemcpyHtoDAsync_v2, T(CUresult),                                          \
         (T(CUdeviceptr), const void *, size_t, T(CUstream)))                                      \
    CALL(cuda_copy_out, cuMemcpyDtoHAsync_v2, T(CUresult),                                         \
         (void *, T(CUdeviceptr), size_t, T(CUstream)))                                            \
    CALL(cuda_stream_wait, cuStreamSynchronize, T(CUresult), (T(CUstream)))                        \
    CALL(cuda_flush_writes, cuFlushGPUDirectRDMAWrites, T(CUresult),                               \
         (T(CUflushGPUDirectRDMAWritesTarget), T(CUflushGPUDirectRDMAWritesScope)))                \
    CALL(cuda_init, cuInit, T(CUresult), (unsigned))                                               \
    CALL(cuda_pointer_attribute, cuPointerGetAttribute, T(CUresult),                               \
         (void *, T(CUpointer_attribute), T(CUdeviceptr)))                                         \
    CALL(cuda_context_retain, cuDevicePrimaryCtxRetain, T(CUresult),                               \
         (T(CUcontext) *, T(CUdevice)))                                                            \
    CALL(cuda_context_release, cuDevicePrimaryCtxRelease_v2, T(CUresult), (T(CUdevice)))           \
    CALL(cuda_context_set, cuCtxSetCurrent, T(CUresult), (T(CUcontext)))                           \
    CALL(cuda_stream_create, cuStreamCreate, T(CUresult), (T(CUstream) *, unsigned))               \
    CALL(cuda_stream_query, cuStreamQuery, T(CUresult), (T(CUstream)))                             \
    CALL(cuda_stream_destroy, cuStreamDestroy_v2, T(CUresult), (T(CUstream)))

/* What each of the headers' types is here. */
typedef int our_ncclResult_t, our_ncclDataType_t, our_CUresult, our_CUdevice_attribute,
    our_CUdevice, our_CUflushGPUDirectRDMAWritesTarget, our_CUflushGPUDirectRDMAWritesScope,
    our_CUpointer_attribute;
typedef pd_nccl_id our_ncclUniqueId;
typedef pd_nccl_config our_ncclConfig_t;
typedef pd_nccl_comm our_ncclComm_t;
typedef pd_cu_stream our_CUstream;
typedef pd_cu_context our_CUcontext;
typedef uintptr_t our_CUdeviceptr;

typedef struct declared_here {
#define MEMBER(library, name, symbol, result, arguments) result(*library##_##name) arguments;
    PD_NCCL_CALLS(MEMBER)
    PD_CUDA_CALLS(MEMBER)
#undef MEMBER
} declared_here;

#define THEIRS(type) type
#define OURS(type)   our_##type
#define AS_THE_HEADER_HAS_IT(name, symbol, result, arguments)                                      \
    _Static_assert(__builtin_types_compatible_p(__typeof__(symbol), result arguments), #symbol);
#define AS_IT_IS_HERE(name, symbol, result, arguments)                                             \
    _Static_assert(                                                                                \
        __builtin_types_compatible_p(__typeof__(*((declared_here *)0)->name), result arguments),   \
        #symbol);
#define ONE(...) +1
SIGNATURES(AS_THE_HEADER_HAS_IT, THEIRS)
SIGNATURES(AS_IT_IS_HERE, OURS)
_Static_assert(0 SIGNATURES(ONE, THEIRS) == 0 PD_NCCL_CALLS(ONE) PD_CUDA_CALLS(ONE), "all of them");

static void values_are_those_of_the_headers(void **state)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    (void)state;
    assert_int_equal(config.magic, PD_NCCL_CONFIG_MAGIC);
    assert_int_equal(config.blocking, PD_NCCL_CONFIG_UNDEFINED);
    assert_int_equal(config.maxCTAs, PD_NCCL_CONFIG_UNDEFINED);
    assert_null(config.netName); /* as an absent one is */
    assert_int_equal(ncclSuccess, PD_NCCL_SUCCESS);
    assert_int_equal(ncclSystemError, PD_NCCL_SYSTEM_ERROR);
    assert_int_equal(ncclInvalidArgument, PD_NCCL_INVALID_ARGUMENT);
    assert_int_equal(ncclRemoteError, PD_NCCL_REMOTE_ERROR);
    assert_int_equal(ncclInProgress, PD_NCCL_IN_PROGRESS);
    assert_int_equal(ncclInt8, PD_NCCL_INT8);
    assert_int_equal(CUDA_SUCCESS, PD_CU_SUCCESS);
    assert_int_equal(CUDA_ERROR_NOT_READY, PD_CU_NOT_READY);
    assert_int_equal(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, PD_CU_POINTER_DEVICE_ORDINAL);
    assert_int_equal(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, PD_CU_POINTER_LEGACY_IPC);
    assert_int_equal(CU_STREAM_NON_BLOCKING, PD_CU_STREAM_NON_BLOCKING);
    assert_int_equal(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
                     PD_CU_DEVICE_RDMA_FLUSH);
    assert_int_equal(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, 1);
    assert_int_equal(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
                     PD_CU_DEVICE_RDMA_ORDERING);
    assert_int_equal(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, PD_CU_RDMA_ORDERING_OWNER);
    assert_int_equal(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, PD_CU_DEVICE_DMA_BUF);
    assert_int_equal(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                     PD_CU_FLUSH_CURRENT_CONTEXT);
    assert_int_equal(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER, PD_CU_FLUSH_TO_OWNER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(values_are_those_of_the_headers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
