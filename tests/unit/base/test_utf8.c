#include "common/base/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* Every scalar value, and none of the surrogates. */
static void every_scalar_value_goes_there_and_back(void **state)
{
    (void)state;
    for (uint32_t c = 0; c <= 0x10ffff; c++) {
        char bytes[4];
        size_t len;
        if (c == 0xd800)
            c = 0xe000;
        size_t n = pd_utf8_encode(c, bytes);
        if (pd_utf8_len(bytes, n) != n || pd_utf8_decode(bytes, n, &len) != c || len != n)
            fail_msg("U+%X", c);
        for (size_t cut = 1; cut < n; cut++) {
            if (pd_utf8_len(bytes, cut) != 0 || !pd_utf8_is_prefix(bytes, cut))
                fail_msg("U+%X cut at %zu", c, cut);
        }
        if (pd_utf8_is_prefix(bytes, n))
            fail_msg("U+%X is whole", c);
    }
}

static void what_unicode_calls_ill_formed_is(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t bad; /* of the first ill-formed part */
    } cases[] = {
        {"\x80", 1},         {"\xbf", 1},         {"\xc0\xaf", 1},     {"\xc1\xbf", 1},
        {"\xe0\x80\xaf", 1}, {"\xe0\x9f\xbf", 1}, {"\xed\xa0\x80", 1}, {"\xed\xbf\xbf", 1},
        {"\xf0\x80\x80", 1}, {"\xf0\x8f\xbf", 1}, {"\xf4\x90\x80", 1}, {"\xf5\x80", 1},
        {"\xff", 1},         {"\xc3x", 1},        {"\xe2\x82x", 2},    {"\xf0\x9f\x99x", 3},
        {"\xf0\x9fx", 2},    {"\xe2\x82", 2},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t len = strlen(cases[i].bytes);
        assert_int_equal(pd_utf8_len(cases[i].bytes, len), 0);
        assert_false(pd_utf8_valid(cases[i].bytes, len));
        assert_int_equal(pd_utf8_bad_len(cases[i].bytes, len), cases[i].bad);
    }
    assert_false(pd_utf8_is_prefix("\xed\xa0", 2)); /* a surrogate can never be completed */
    assert_false(pd_utf8_is_prefix("\xc0", 1));
    assert_false(pd_utf8_is_prefix("", 0));
    assert_false(pd_utf8_is_prefix("a", 1));
}

static void nul_is_a_character_and_nothing_is_valid(void **state)
{
    (void)state;
    assert_int_equal(pd_utf8_len("\0x", 2), 1);
    assert_int_equal(pd_utf8_len("a", 0), 0);
    assert_true(pd_utf8_valid("", 0));
    assert_true(pd_utf8_valid("a\0b", 3));
    assert_false(pd_utf8_valid("a\0\xff", 3));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_scalar_value_goes_there_and_back),
        cmocka_unit_test(what_unicode_calls_ill_formed_is),
        cmocka_unit_test(nul_is_a_character_and_nothing_is_valid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
