#include "common/base/json.h"
#include "common/base/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static pd_status parse(const char *text, size_t len, pd_json_error *error)
{
    pd_json *root = NULL;
    pd_status status = pd_json_parse(text, len, &root, error);
    if (status == PD_OK)
        pd_json_free(root);
    return status;
}

static void what_is_no_strict_json_is_refused(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "",
        "{",
        "[1,]",
        "{\"a\":1,}",
        "{\"a\":1,\"a\":2}",
        "nul",
        "NaN",
        "[Infinity]",
        "[1] x",
        "'a'",
        "\"\\ud800\"",
        "\"\\udc00\"",
        "\"\\ud800x\"",
        "\"\xff\"",
        "\"\xed\xa0\x80\"",
        "[01]",
        "[1.]",
        "[.5]",
        "\"a\nb\"",
        "\"\\x41\"",
        "{a:1}",
        "[1 2]",
        "\"\xc0\xaf\"",
        "{\"a\" 1}",
        "/**/1",
        "]",
        "{\"a\\u0000\":1}",
    };
    pd_json_error error;

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (parse(texts[i], strlen(texts[i]), &error) != PD_E_INVALID)
            fail_msg("taken: %s", texts[i]);
        assert_true(error.message[0] != '\0');
        assert_false(error.number_range);
    }
}

static void numbers_out_of_range_are_told_apart(void **state)
{
    (void)state;
    pd_json_error error;

    assert_int_equal(parse("[1e999]", 7, &error), PD_E_INVALID);
    assert_true(error.number_range);
    assert_int_equal(parse("9223372036854775808", 19, &error), PD_E_INVALID);
    assert_true(error.number_range);
    assert_int_equal(parse("9223372036854775807", 19, &error), PD_OK);
    assert_int_equal(parse("-9223372036854775808", 20, &error), PD_OK);
}

static void depth_is_bounded_and_brackets_in_strings_do_not_count(void **state)
{
    (void)state;
    char text[4096];
    pd_json_error error;

    memset(text, '[', 64);
    memset(text + 64, ']', 64);
    assert_int_equal(parse(text, 128, &error), PD_OK);
    memset(text, '[', 65);
    memset(text + 65, ']', 65);
    assert_int_equal(parse(text, 130, &error), PD_E_INVALID);
    assert_int_equal(error.offset, 64);
    assert_non_null(strstr(error.message, "64"));
    text[0] = '"';
    memset(text + 1, '[', 1000);
    memcpy(text + 1001, "\\\"[[\"", 5);
    assert_int_equal(parse(text, 1006, &error), PD_OK);
}

static void values_are_read_and_dumped_as_they_stood(void **state)
{
    (void)state;
    static const char text[] = "{\"z\":[1,-2.5,true,null,\"a\\u0000\\ud83d\\ude42\"],\"a\":{}}";
    pd_json *root = NULL;
    pd_json_error error;
    pd_buf buf;
    size_t len = 0;

    assert_int_equal(pd_json_parse(text, sizeof text - 1, &root, &error), PD_OK);
    const pd_json *list = pd_json_get(root, "z");
    assert_int_equal(pd_json_count(list), 5);
    assert_int_equal(pd_json_integer(pd_json_at(list, 0)), 1);
    assert_true(pd_json_number(pd_json_at(list, 1)) == -2.5);
    assert_true(pd_json_bool(pd_json_at(list, 2)));
    assert_int_equal(pd_json_type_of(pd_json_at(list, 3)), PD_JSON_NULL);
    assert_memory_equal(pd_json_string(pd_json_at(list, 4), &len), "a\0\xf0\x9f\x99\x82", 6);
    assert_int_equal(len, 6);
    assert_null(pd_json_at(list, 5));
    assert_null(pd_json_get(root, "q"));
    assert_null(pd_json_get(list, "q"));
    assert_null(pd_json_string(list, NULL));
    void *iter = NULL;
    const char *key;
    pd_json *value;
    assert_true(pd_json_next(root, &iter, &key, &value));
    assert_string_equal(key, "z");
    assert_true(pd_json_next(root, &iter, &key, &value));
    assert_string_equal(key, "a");
    assert_int_equal(pd_json_type_of(value), PD_JSON_OBJECT);
    assert_false(pd_json_next(root, &iter, &key, &value));
    pd_buf_init(&buf, 1000);
    pd_json_dump(root, &buf);
    assert_string_equal(pd_buf_text(&buf),
                        "{\"z\":[1,-2.5,true,null,\"a\\u0000\xf0\x9f\x99\x82\"],\"a\":{}}");
    pd_buf_fini(&buf);
    pd_buf_init(&buf, 10);
    pd_json_dump(root, &buf);
    assert_int_equal(pd_buf_status(&buf), PD_E_TOO_LARGE);
    pd_buf_fini(&buf);
    pd_json_free(root);
}

/* Any bytes give a string that a strict reader takes, the same when they were UTF-8. */
static void written_strings_can_always_be_read(void **state)
{
    (void)state;
    uint64_t seed = 42;

    for (int round = 0; round < 20000; round++) {
        char bytes[24];
        size_t len, n = (size_t)(seed >> 59) % sizeof bytes;
        pd_json *root = NULL;
        pd_json_error error;
        pd_buf buf;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            static const unsigned char often[] = {'"', '\\', '\n', 0, 0x7f, 0xe2, 0x82, 0xac};
            unsigned char byte = (unsigned char)(seed >> 40);
            bytes[i] = (char)((seed >> 60) < 8 ? often[byte % 8] : byte);
        }
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        pd_buf_init(&buf, 1000);
        pd_json_write_string(&buf, bytes, n);
        assert_int_equal(pd_json_parse(pd_buf_text(&buf), buf.len, &root, &error), PD_OK);
        const char *text = pd_json_string(root, &len);
        assert_true(pd_utf8_valid(text, len));
        if (pd_utf8_valid(bytes, n)) {
            assert_int_equal(len, n);
            assert_memory_equal(text, bytes, n);
        } else {
            assert_non_null(memmem(text, len, PD_UTF8_REPLACEMENT, 3));
        }
        pd_json_free(root);
        pd_buf_fini(&buf);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_no_strict_json_is_refused),
        cmocka_unit_test(numbers_out_of_range_are_told_apart),
        cmocka_unit_test(depth_is_bounded_and_brackets_in_strings_do_not_count),
        cmocka_unit_test(values_are_read_and_dumped_as_they_stood),
        cmocka_unit_test(written_strings_can_always_be_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
