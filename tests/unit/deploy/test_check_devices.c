/* Which devices may stand in one deployment. */

#include "deploy/check_devices.h"

#include "tests/unit/kv/cmocka_all.h"

static pd_status check(const char *prefill, const char *decode, char why[256])
{
    pd_deployment deployment = {.prefill.device = prefill, .decode.device = decode};

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pools_of_one_kind_meet),
        cmocka_unit_test(pools_of_two_kinds_are_refused_with_the_reason),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
