/* What UCX says of a connection, as both versions print it, and what is made of it. The lines of
 * shared memory and tcp were printed by UCX 1.13.1 and 1.22.0; those of GPUs and NICs, which are
 * not there where this was written, have the form that ucp_ep_config_lane_info_str of the same two
 * versions gives them, with the names that their transports have. */

#include "common/transfer/lanes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <string.h>

#define HEAD "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n"

/* Of 1.13, what comes after the lanes. */
#define TAIL_113                                                                                   \
    "#\n#                 am_send: 0..<egr/short>..93..<egr/bcopy>..8256..<rndv>..(inf)\n"         \
    "#                  put[0]: 0..<short>..4294967296..<bcopy>..(inf)\n#\n"                       \
    "#                  rma_bw: mds rndv_rkey_size 9\n#\n"

/* Of 1.22: tables that name transports, and none of them is a lane. */
#define TAIL_122                                                                                   \
    "#\n# +--------------+--------------------+------------------------------+\n"                  \
    "# | ucp_context_0 intra-node cfg#0                                   |\n"                     \
    "# | active message by ucp_am_send*(fast-completion) from host memory |\n"                     \
    "# |    Range     |    Description     |            Config            |\n"                     \
    "# |   0..1048568 | short              | tcp/lo                       |\n"                     \
    "# +--------------+--------------------+------------------------------+\n"

static const struct {
    const char *text, *lane;
    bool shm, tcp, rdma; /* fits that transport */
    pd_lanes_way way;    /* of GPUs' bytes, where NICs reach GPUs */
} known[] = {
    {HEAD
     "#                 lane[0]:  1:sysv/memory.0 md[1]           -> md[1]/sysv/sysdev[255] am "
     "am_bw#0 keepalive\n"
     "#                 lane[1]:  2:posix/memory.0 md[2]          -> "
     "md[2]/posix/sysdev[255]\n" TAIL_113,
     "sysv+posix", true, false, true, PD_LANES_STAGED},
    {HEAD "#                 lane[0]:  0:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] am "
          "am_bw#0 "
          "keepalive wireup\n" TAIL_113,
     "tcp", false, true, false, PD_LANES_STAGED},
    {HEAD
     "#                 lane[0]:  2:sysv/memory.0 md[2]           -> md[2]/sysv/sysdev[255] seg "
     "4294967295 am keepalive\n"
     "#                 lane[1]:  3:posix/memory.0 md[3]          -> md[3]/posix/sysdev[255] seg "
     "4294967295\n"
     "#                 lane[2]:  4:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] seg "
     "4294967295 rma_bw#0\n" TAIL_122,
     "sysv+posix+cma", true, false, true, PD_LANES_STAGED},
    {HEAD
     "#                 lane[0]:  0:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] seg "
     "4294967295 rma_bw#0 am keepalive wireup\n" TAIL_122,
     "tcp", false, true, false, PD_LANES_STAGED},
    /* GPUs within a host */
    {HEAD
     "#                 lane[0]:  2:posix/memory.0 md[2]          -> md[2]/posix/sysdev[255] am "
     "am_bw#0 keepalive\n"
     "#                 lane[1]:  5:cuda_ipc/cuda.0 md[5]         -> md[5]/cuda_ipc/sysdev[255] "
     "rma_bw#0\n" TAIL_113,
     "posix+cuda_ipc", true, false, true, PD_LANES_CUDA_IPC},
    {HEAD
     "#                 lane[0]:  2:posix/memory.0 md[2]          -> md[2]/posix/sysdev[255] seg "
     "4294967295 am keepalive\n"
     "#                 lane[1]: 11:cuda_ipc/cuda.0 md[10]        -> md[10]/cuda_ipc/sysdev[1] seg "
     "0 "
     "rma_bw#0\n" TAIL_122,
     "posix+cuda_ipc", true, false, true, PD_LANES_CUDA_IPC},
    /* on two hosts that an NVLink fabric joins */
    {HEAD "#                 lane[0]:  0:tcp/eth0.0 md[0]              -> md[0]/tcp/sysdev[255] "
          "seg 8192 am "
          "keepalive wireup\n"
          "#                 lane[1]: 11:cuda_ipc/cuda.0 md[10]        -> "
          "md[10]/cuda_ipc/sysdev[1] seg 0 "
          "rma_bw#0\n" TAIL_122,
     "tcp+cuda_ipc", false, false, false, PD_LANES_CUDA_IPC},
    /* by NICs, one lane a path */
    {HEAD "#                 lane[0]:  7:rc_mlx5/mlx5_0:1.0 md[4]      -> md[4]/ib/sysdev[3] "
          "rma_bw#0 am "
          "am_bw#0 wireup\n"
          "#                 lane[1]:  7:rc_mlx5/mlx5_0:1.1 md[4]      -> md[4]/ib/sysdev[3] "
          "rma_bw#1\n" TAIL_113,
     "rc_mlx5", false, false, true, PD_LANES_RDMA},
    {HEAD
     "#                 lane[0]:  9:dc_mlx5/mlx5_1:1.0 md[4]      -> md[4]/ib/sysdev[3] seg 8256 "
     "rma_bw#0 am keepalive\n"
     "#                 lane[1]: 12:gdr_copy/cuda.0 md[11]        -> md[11]/gdr_copy/sysdev[1] seg "
     "0\n" TAIL_122,
     "dc_mlx5+gdr_copy", false, false, true, PD_LANES_RDMA},
    /* for wireup and small messages alone: no put into memory */
    {HEAD
     "#                 lane[0]:  8:ud_verbs/mlx5_0:1.0 md[4]     -> md[4]/ib/sysdev[3] am am_bw#0 "
     "keepalive wireup\n" TAIL_113,
     "ud_verbs", true, false, true, PD_LANES_STAGED},
};

static void lanes_are_read_as_both_versions_print_them(void **state)
{
    char lane[64];
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_int_equal(pd_lanes_read(known[i].text, lane, sizeof lane), PD_OK);
        assert_string_equal(lane, known[i].lane);
    }
    assert_int_equal(pd_lanes_read("", lane, sizeof lane), PD_E_INTERNAL);
    assert_int_equal(pd_lanes_read(HEAD TAIL_113, lane, sizeof lane), PD_E_INTERNAL);
    assert_int_equal(pd_lanes_read("lane[0]: without a name", lane, sizeof lane), PD_E_INTERNAL);
    /* what does not fit is left out whole */
    char small[8];
    assert_int_equal(pd_lanes_read(known[2].text, small, sizeof small), PD_OK);
    assert_string_equal(small, "sysv");
}

static void other_lanes_than_asked_for_are_told_apart(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        assert_true(pd_lanes_fit(known[i].lane, "shm") == known[i].shm);
        assert_true(pd_lanes_fit(known[i].lane, "tcp") == known[i].tcp);
        assert_true(pd_lanes_fit(known[i].lane, "rdma") == known[i].rdma);
        assert_true(pd_lanes_fit(known[i].lane, "auto"));
    }
}

static void what_reaches_no_gpu_is_told_apart(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        pd_lanes_way blind = known[i].way == PD_LANES_RDMA ? PD_LANES_STAGED : known[i].way;
        assert_int_equal(pd_lanes_gpu_way(known[i].lane, true), known[i].way);
        assert_int_equal(pd_lanes_gpu_way(known[i].lane, false), blind);
    }
    /* a copy engine beside a lane is no way to another process */
    assert_int_equal(pd_lanes_gpu_way("posix+cuda_copy+gdr_copy", true), PD_LANES_STAGED);
}

static void a_name_is_a_whole_one(void **state)
{
    (void)state;
    assert_true(pd_lanes_have("tcp", "tcp"));
    assert_true(pd_lanes_have("posix+tcp", "tcp"));
    assert_true(pd_lanes_have("tcp+posix", "tcp"));
    assert_false(pd_lanes_have("tcpx+posix", "tcp"));
    assert_false(pd_lanes_have("xtcp", "tcp"));
    assert_false(pd_lanes_have("cuda_ipc_2", "cuda_ipc"));
    assert_false(pd_lanes_have("", "tcp"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lanes_are_read_as_both_versions_print_them),
        cmocka_unit_test(other_lanes_than_asked_for_are_told_apart),
        cmocka_unit_test(what_reaches_no_gpu_is_told_apart),
        cmocka_unit_test(a_name_is_a_whole_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
