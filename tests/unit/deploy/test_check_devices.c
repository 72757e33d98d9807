/* Which devices may stand in one deployment. */

#include "deploy/check_devices.h"

#include "tests/unit/kv/cmocka_all.h"

static pd_status check(const char *prefill, const char *decode, char why[256])
{
    pd_deployment deployment = {
        .prefill.device = prefill, .decode.device = decode, .transfer.backend = "ucx"};

    why[0] = '\0';
    return check_devices(&deployment, why, 256);
}

static void pools_of_one_kind_meet(void **state)
{
    static const char *const pairs[][2] = {
        {"cpu", "cpu-ref"}, {"cuda", "cuda:1"}, {"cuda-emu", "cpu"}, {"cpu-avx2", "cuda-emu:1"},
        {"auto", "cuda"},   {"cpu", "auto"},    {"auto", "auto"},
    };
    char why[256];

    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        assert_int_equal(check(pairs[i][0], pairs[i][1], why), PD_OK);
}

static void pools_of_two_kinds_are_refused_with_the_reason(void **state)
{
    static const char *const pairs[][2] = {
        {"cpu", "cuda"}, {"cuda:3", "cpu-ref"}, {"cuda-emu", "cuda"}, {"cuda", "cuda-emu:0"}};
    char why[256];

    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        assert_int_equal(check(pairs[i][0], pairs[i][1], why), PD_E_INVALID);
    assert_int_equal(check("cpu", "cuda:1", why), PD_E_INVALID);
    assert_string_equal(why, "decode.device: cuda:1 keeps KV in a GPU's memory, and "
                             "prefill.device: cpu in the host's: workers exchange blocks only "
                             "between pools of one kind");
}

static void nccl_carries_one_gpu_a_worker(void **state)
{
    static const struct {
        const char *device, *backend;
        uint32_t prefill, decode;
        const char *why; /* NULL: it can be */
    } cases[] = {
        {"cuda", "nccl", 1, 1, NULL},
        {"auto", "nccl", 1, 1, NULL},
        {"cuda", "ucx", 2, 4, NULL},
        {"cpu", "ucx", 1, 2, NULL},
        {"cuda", "nccl", 2, 1,
         "transfer.backend: nccl carries the KV of one GPU a worker, and with "
         "prefill.tensor_parallel: 2 it lies on 2; ucx carries it"},
        {"auto", "nccl", 1, 4,
         "transfer.backend: nccl carries the KV of one GPU a worker, and with "
         "decode.tensor_parallel: 4 it lies on 4; ucx carries it"},
        {"cuda-emu", "nccl", 1, 1,
         "transfer.backend: nccl carries KV between GPUs alone, and prefill.device: cuda-emu keeps "
         "it in the host's memory; ucx carries it"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char why[256] = "";
        pd_deployment d = {.prefill.device = cases[i].device,
                           .prefill.tensor_parallel = cases[i].prefill,
                           .decode.device = cases[i].device,
                           .decode.tensor_parallel = cases[i].decode,
                           .transfer.backend = cases[i].backend};
        assert_int_equal(check_devices(&d, why, sizeof why),
                         cases[i].why == NULL ? PD_OK : PD_E_INVALID);
        assert_string_equal(why, cases[i].why == NULL ? "" : cases[i].why);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pools_of_one_kind_meet),
        cmocka_unit_test(pools_of_two_kinds_are_refused_with_the_reason),
        cmocka_unit_test(nccl_carries_one_gpu_a_worker),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
