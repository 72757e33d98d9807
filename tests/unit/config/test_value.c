/* Scalars by type: what is read, what is refused, and which hint is given. */

#include "common/config/value.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void integers_are_plain_decimal(void **state)
{
    (void)state;
    static const struct {
        const char *text, *hint;
    } bad[] = {
        {"08080", "write 8080"},
        {"0123", "write 123"},
        {"09", "write 9"},
        {"00", "write 0"},
        {"0o2", "plain decimal"},
        {"0x10", "plain decimal"},
        {"0b1", "plain decimal"},
        {"1_0", "write 10"},
        {"1.5", "no whole number"},
        {"1e3", "no exponent"},
        {"+5", "without a sign"},
        {"-1", "must be 0 to 100"},
        {"101", "must be 0 to"},
        {"", "empty"},
        {" 1", "whole number"},
        {"1 ", "whole number"},
        {"ten", "whole number"},
        {"1\n", "whole number"},
        {"18446744073709551616", "must be 0 to 100"},
        {"99999999999999999999999999999999999", "must be 0 to 100"},
    };
    pd_scalar_why why;
    uint64_t value = 7;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(pd_scalar_integer(bad[i].text, 0, 100, &value, &why), PD_E_INVALID);
        assert_non_null(strstr(why.text, bad[i].hint));
        assert_int_equal(value, 7);
    }
    assert_int_equal(pd_scalar_integer("0", 0, 100, &value, &why), PD_OK);
    assert_int_equal(value, 0);
    assert_int_equal(pd_scalar_integer("18446744073709551615", 0, UINT64_MAX, &value, &why), PD_OK);
    assert_true(value == UINT64_MAX);
}

static void durations_need_a_unit(void **state)
{
    (void)state;
    static const char *const bad[] = {"200", "1.5s", "s",     "",    "2sec",
                                      "2 s", "-1s",  "1h30m", "02s", "99999999999999999999h",
                                      "9ms", "1d"};
    pd_scalar_why why;
    uint64_t ns = 7;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(pd_scalar_duration(bad[i], 10000000, UINT64_MAX, &ns, &why), PD_E_INVALID);
    assert_int_equal(ns, 7);
    assert_int_equal(pd_scalar_duration("200ms", 0, UINT64_MAX, &ns, &why), PD_OK);
    assert_int_equal(ns, 200000000);
    assert_int_equal(pd_scalar_duration("1m", 0, UINT64_MAX, &ns, &why), PD_OK);
    assert_true(ns == 60000000000ull);
}

static void sizes_are_powers_of_1024(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "2GB", "2G", "1.5GiB", "GiB", "", "2 GiB", "02GiB", "99999999999999TiB", "2gib", "2Gi"};
    pd_scalar_why why;
    uint64_t bytes = 7;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(pd_scalar_size(bad[i], 0, UINT64_MAX, &bytes, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_size("2GB", 0, UINT64_MAX, &bytes, &why), PD_E_INVALID);
    assert_non_null(strstr(why.text, "write 2GiB"));
    assert_int_equal(bytes, 7);
    assert_int_equal(pd_scalar_size("512KiB", 0, UINT64_MAX, &bytes, &why), PD_OK);
    assert_int_equal(bytes, 524288);
    assert_int_equal(pd_scalar_size("4096", 0, UINT64_MAX, &bytes, &why), PD_OK);
    assert_int_equal(bytes, 4096);
}

static void what_is_written_is_read_back(void **state)
{
    (void)state;
    static const uint64_t ms[] = {1, 200, 1000, 1500, 60000, 90000, 3600000, 86400000};
    pd_scalar_why why;
    uint64_t back;
    char text[32];

    for (size_t i = 0; i < sizeof ms / sizeof ms[0]; i++) {
        pd_scalar_write_duration(ms[i] * 1000000, text);
        assert_int_equal(pd_scalar_duration(text, 0, UINT64_MAX, &back, &why), PD_OK);
        assert_int_equal(back, ms[i] * 1000000);
    }
    for (uint64_t bytes = 0; bytes < (1ull << 45); bytes = bytes * 3 + 1024) {
        pd_scalar_write_size(bytes, text);
        assert_int_equal(pd_scalar_size(text, 0, UINT64_MAX, &back, &why), PD_OK);
        assert_true(back == bytes);
    }
}

static void addresses_are_host_and_port(void **state)
{
    (void)state;
    static const struct {
        const char *text, *host;
        uint16_t port;
        bool ipv6;
    } good[] = {
        {"127.0.0.1:8080", "127.0.0.1", 8080, false},
        {"[::1]:0", "::1", 0, true},
        {"localhost:65535", "localhost", 65535, false},
        {"22:22", "22", 22, false},
        {"gpu-7.rack_2.example:1", "gpu-7.rack_2.example", 1, false},
    };
    static const char *const bad[] = {
        "127.0.0.1",
        "8080",
        ":8080",
        "127.0.0.1:",
        "127.0.0.1:65536",
        "::1:8080",
        "[::1]8080",
        "[::1:8080",
        "[]:1",
        "[1.2.3.4]:80",
        "127.0.0.256:80",
        "1.2.3:80",
        "127.0.0.1:08",
        "a b:80",
        "-a:80",
        "",
        ":",
        "[:80",
        "a:80:80",
        "host:-1",
        "host:1e3",
        "[fe80::%lo]:1",
    };
    char host[256];
    pd_scalar_why why;
    uint16_t port;
    bool ipv6;

    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_int_equal(pd_scalar_listen(good[i].text, host, &port, &ipv6, &why), PD_OK);
        assert_string_equal(host, good[i].host);
        assert_int_equal(port, good[i].port);
        assert_int_equal(ipv6, good[i].ipv6);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(pd_scalar_listen(bad[i], host, &port, &ipv6, &why), PD_E_INVALID);
}

static void endpoints_fit_a_socket(void **state)
{
    (void)state;
    pd_scalar_why why;
    char text[128] = "ipc://";

    assert_int_equal(pd_scalar_endpoint("tcp://127.0.0.1:0", &why), PD_OK);
    assert_int_equal(pd_scalar_endpoint("tcp://127.0.0.1", &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_endpoint("udp://127.0.0.1:1", &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_endpoint("ipc://", &why), PD_E_INVALID);
    memset(text + 6, 'a', 100);
    assert_int_equal(pd_scalar_endpoint(text, &why), PD_OK);
    text[106] = 'a';
    assert_int_equal(pd_scalar_endpoint(text, &why), PD_E_INVALID);
}

static void ratios_and_words(void **state)
{
    (void)state;
    static const char *const bad[] = {"2",    "2:",    ":1",  "0:1",  "1:0",
                                      "02:1", "2:1:1", "2-1", "300:1"};
    pd_scalar_why why;
    uint32_t left, right, index;
    bool yes;

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(pd_scalar_ratio(bad[i], 256, &left, &right, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_ratio("12:3", 256, &left, &right, &why), PD_OK);
    assert_int_equal(left, 12);
    assert_int_equal(right, 3);
    assert_int_equal(pd_scalar_bool("yes", &yes, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_bool("True", &yes, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_bool("false", &yes, &why), PD_OK);
    assert_false(yes);
    assert_int_equal(pd_scalar_choice("b", "a|b|c", &index, &why), PD_OK);
    assert_int_equal(index, 1);
    assert_int_equal(pd_scalar_choice("", "a|b|c", &index, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_choice("a|b", "a|b|c", &index, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_choice("cuda:0", "cuda|cuda:N", &index, &why), PD_OK);
    assert_int_equal(index, 1);
    assert_int_equal(pd_scalar_choice("cuda:999", "cuda|cuda:N", &index, &why), PD_OK);
    static const char *const no_devices[] = {"cuda:",   "cuda:N",  "cuda:01", "cuda:1000",
                                             "cuda:1x", "cuda:-1", "cuda 1",  "cudo:1"};
    for (size_t i = 0; i < sizeof no_devices / sizeof *no_devices; i++)
        assert_int_equal(pd_scalar_choice(no_devices[i], "cuda|cuda:N", &index, &why),
                         PD_E_INVALID);
    assert_int_equal(pd_scalar_label("Local", &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_label("-a", &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_label("../x", &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_label("no", &why), PD_OK);
    assert_int_equal(pd_scalar_string("a\x1b[2J", 10, &why), PD_E_INVALID);
    assert_int_equal(pd_scalar_string("\xff", 10, &why), PD_E_INVALID);
}

static void distance_counts_edits(void **state)
{
    (void)state;
    assert_int_equal(pd_scalar_distance("prefill", "prefil"), 1);
    assert_int_equal(pd_scalar_distance("workers", "wrokers"), 1);
    assert_int_equal(pd_scalar_distance("", "abc"), 3);
    assert_int_equal(pd_scalar_distance("abc", ""), 3);
    assert_int_equal(pd_scalar_distance("decode", "router"), 6);
    assert_int_equal(pd_scalar_distance("same", "same"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integers_are_plain_decimal),
        cmocka_unit_test(durations_need_a_unit),
        cmocka_unit_test(sizes_are_powers_of_1024),
        cmocka_unit_test(what_is_written_is_read_back),
        cmocka_unit_test(addresses_are_host_and_port),
        cmocka_unit_test(endpoints_fit_a_socket),
        cmocka_unit_test(ratios_and_words),
        cmocka_unit_test(distance_counts_edits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
