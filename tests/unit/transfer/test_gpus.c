/* The GPUs that a pool lies on, with the stand-in for the driver (tests/nccl-stand-in). */

#include "common/transfer/gpus.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/log.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECES = 4, BYTES = 1 << 16 };

static unsigned char memory[PIECES][BYTES];
static void *pieces[PIECES];

static pd_transfer_options options_for_gpus(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int (*place)(void *at, size_t bytes, int device);
    void *found = driver == NULL ? NULL : dlsym(driver, "stand_in_place");
    assert_non_null(found);
    memcpy(&place, &found, sizeof found);
    for (int i = 0; i < PIECES; i++) {
        pieces[i] = memory[i];
        assert_int_equal(place(memory[i], BYTES, PIECES - 1 - i), 0);
    }
    return (pd_transfer_options){
        .pool_kind = PD_MEMORY_CUDA, .pieces = PIECES, .piece_memory = pieces};
}

static void each_piece_is_copied_on_its_own_device(void **state)
{
    pd_transfer_options options = options_for_gpus();
    unsigned char host[BYTES], back[BYTES];
    pd_gpus gpus;
    (void)state;
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_int_equal(gpus.count, PIECES);
    for (int round = 0; round < 20; round++) {
        uint32_t piece = (uint32_t)(round * 7) % PIECES;
        assert_int_equal(gpus.piece[piece].device, PIECES - 1 - piece);
        memset(host, round + 1, sizeof host);
        assert_int_equal(pd_gpus_copy_in(&gpus, piece, memory[piece], host, BYTES), PD_OK);
        assert_memory_equal(memory[piece], host, BYTES); /* there when it returned */
        assert_int_equal(pd_gpus_copy_out(&gpus, piece, back, memory[piece], BYTES), PD_OK);
        assert_memory_equal(back, host, BYTES);
    }
    /* the driver takes no copy of a device whose context is not current */
    assert_int_equal(pd_gpus_copy_in(&gpus, 0, memory[1], host, BYTES), PD_E_INTERNAL);
    pd_gpus_close(&gpus);
}

static void what_nics_wrote_is_waited_for_where_the_platform_does_not(void **state)
{
    pd_transfer_options options = options_for_gpus();
    pd_gpus gpus;
    (void)state;
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_false(gpus.flush); /* a platform that has no such call */
    assert_int_equal(pd_gpus_see_writes(&gpus), PD_OK);
    pd_gpus_close(&gpus);
    setenv("CUDA_STAND_IN_FLUSH", "1", 1);
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_true(gpus.flush);
    assert_int_equal(pd_gpus_see_writes(&gpus), PD_OK);
    assert_ptr_equal(gpus.current, gpus.piece[PIECES - 1].context); /* each device was asked */
    pd_gpus_close(&gpus);
    unsetenv("CUDA_STAND_IN_FLUSH");
}

static void nics_reach_gpus_by_a_module_or_by_dma_buf(void **state)
{
    static const char *const folders[] = {"", "/sys", "/sys/module", "/sys/module/nvidia_peermem"};
    pd_transfer_options options = options_for_gpus();
    char root[] = "/tmp/kvferry-gpus-XXXXXX", path[128];
    pd_gpus gpus;
    (void)state;
    assert_non_null(mkdtemp(root));
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_false(pd_gpus_rdma(&gpus, root));
    setenv("CUDA_STAND_IN_DMA_BUF", "1", 1);
    assert_true(pd_gpus_rdma(&gpus, root));
    unsetenv("CUDA_STAND_IN_DMA_BUF");
    for (size_t i = 1; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s%s", root, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    snprintf(path, sizeof path, "%s/sys/module/nvidia_peermem/version", root);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
    assert_true(pd_gpus_rdma(&gpus, root));
    pd_gpus_close(&gpus);
    unlink(path);
    for (size_t i = sizeof folders / sizeof *folders; i-- > 0;) {
        snprintf(path, sizeof path, "%s%s", root, folders[i]);
        assert_int_equal(rmdir(path), 0);
    }
}

static void memory_that_other_hosts_reach_is_told_from_plain(void **state)
{
    pd_transfer_options options = options_for_gpus();
    pd_gpus gpus;
    (void)state;
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_false(gpus.fabric);
    pd_gpus_close(&gpus);
    setenv("CUDA_STAND_IN_FABRIC", "1", 1);
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_true(gpus.fabric);
    pd_gpus_close(&gpus);
    unsetenv("CUDA_STAND_IN_FABRIC");
}

static void host_memory_has_none(void **state)
{
    pd_transfer_options options = {.pool_kind = PD_MEMORY_HOST, .pieces = 1};
    pd_gpus gpus;
    (void)state;
    assert_int_equal(pd_gpus_open(&gpus, &options), PD_OK);
    assert_int_equal(pd_gpus_use(&gpus, 0), PD_OK);
    assert_int_equal(pd_gpus_see_writes(&gpus), PD_OK);
    assert_null(gpus.driver);
    pd_gpus_close(&gpus);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_piece_is_copied_on_its_own_device),
        cmocka_unit_test(what_nics_wrote_is_waited_for_where_the_platform_does_not),
        cmocka_unit_test(nics_reach_gpus_by_a_module_or_by_dma_buf),
        cmocka_unit_test(memory_that_other_hosts_reach_is_told_from_plain),
        cmocka_unit_test(host_memory_has_none),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
