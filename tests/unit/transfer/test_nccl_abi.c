/* What common/transfer/nccl_abi.h and cuda_abi.h declare is what nccl.h and cuda.h say. */

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
