#include "common/base/buf.h"
#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void text_is_whole_and_terminated_at_every_length(void **state)
{
    (void)state;
    pd_buf buf;

    pd_buf_init(&buf, 5000);
    assert_string_equal(pd_buf_text(&buf), "");
    for (size_t i = 0; i < 5000; i++) {
        char c = (char)('a' + i % 26);
        pd_buf_append(&buf, &c, 1);
        assert_int_equal(buf.len, i + 1);
        assert_int_equal(buf.bytes[i], c);
        assert_int_equal(buf.bytes[i + 1], '\0');
    }
    assert_int_equal(pd_buf_status(&buf), PD_OK);
    pd_buf_consume(&buf, 26);
    assert_int_equal(buf.len, 4974);
    assert_int_equal(buf.bytes[0], 'a');
    pd_buf_consume(&buf, buf.len);
    assert_string_equal(pd_buf_text(&buf), "");
    pd_buf_fini(&buf);
}

static void a_failed_append_stays_failed_and_writes_nothing(void **state)
{
    (void)state;
    pd_buf buf;

    pd_buf_init(&buf, 4);
    pd_buf_puts(&buf, "abc");
    pd_buf_puts(&buf, "de");
    pd_buf_puts(&buf, "f"); /* would fit, but the text would have a hole */
    pd_buf_printf(&buf, "%d", 1);
    assert_int_equal(pd_buf_status(&buf), PD_E_TOO_LARGE);
    assert_string_equal(pd_buf_text(&buf), "abc");
    pd_buf_clear(&buf);
    assert_int_equal(pd_buf_status(&buf), PD_OK);
    pd_buf_printf(&buf, "%s-%d", "x", 12);
    assert_string_equal(pd_buf_text(&buf), "x-12");
    pd_buf_printf(&buf, "y");
    assert_int_equal(pd_buf_status(&buf), PD_E_TOO_LARGE);
    pd_buf_fini(&buf);
}

static void sizes_do_not_wrap(void **state)
{
    (void)state;
    pd_buf buf;

    pd_buf_init(&buf, SIZE_MAX);
    pd_buf_puts(&buf, "abc");
    pd_buf_append(&buf, "x", SIZE_MAX - 3); /* len + more + 1 is 1 */
    assert_int_equal(pd_buf_status(&buf), PD_E_NOMEM);
    pd_buf_clear(&buf);
    pd_buf_append(&buf, "x", SIZE_MAX / 2 + 1); /* no power of two is above it */
    assert_int_equal(pd_buf_status(&buf), PD_E_NOMEM);
    pd_buf_fini(&buf);
}

static void memory_that_is_out_shows_in_the_status(void **state)
{
    (void)state;
    pd_buf buf;
    long live = pd_mem_live();

    pd_buf_init(&buf, 100);
    pd_mem_fail_at(0);
    pd_buf_puts(&buf, "abc");
    pd_mem_fail_at(-1);
    assert_int_equal(pd_buf_status(&buf), PD_E_NOMEM);
    assert_string_equal(pd_buf_text(&buf), "");
    pd_buf_fini(&buf);
    assert_int_equal(pd_mem_live(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_whole_and_terminated_at_every_length),
        cmocka_unit_test(a_failed_append_stays_failed_and_writes_nothing),
        cmocka_unit_test(sizes_do_not_wrap),
        cmocka_unit_test(memory_that_is_out_shows_in_the_status),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
