/* Packed weights are kept where the deployment says, else where the environment does. */

#include "common/worker/weights_folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const char *choose(const char *cache_dir, const char *xdg, const char *home)
{
    static char out[PD_WEIGHTS_FOLDER_BYTES];

    pd_weights_folder_choose(cache_dir, xdg, home, out);
    return out;
}

static void a_folder_that_is_named_is_taken(void **state)
{
    (void)state;
    assert_string_equal(choose("/a/b", "/x", "/h"), "/a/b");
    assert_string_equal(choose("here", NULL, NULL), "here");
    assert_string_equal(choose("none", "/x", "/h"), "");
}

static void auto_is_the_environments_cache(void **state)
{
    (void)state;
    assert_string_equal(choose("auto", "/x", "/h"), "/x/kvferry/weights");
    assert_string_equal(choose("auto", NULL, "/h"), "/h/.cache/kvferry/weights");
    assert_string_equal(choose("auto", "relative", "/h"), "/h/.cache/kvferry/weights");
    assert_string_equal(choose("auto", "", "/h"), "/h/.cache/kvferry/weights");
    assert_string_equal(choose("auto", NULL, NULL), "");
    assert_string_equal(choose("auto", NULL, "relative"), "");
}

static void a_name_that_is_too_long_is_no_folder(void **state)
{
    (void)state;
    char home[PD_WEIGHTS_FOLDER_BYTES];

    memset(home, 'h', sizeof home - 1);
    home[0] = '/';
    home[sizeof home - 1] = '\0';
    assert_string_equal(choose("auto", NULL, home), "");
    assert_string_equal(choose(home, NULL, NULL), home);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_folder_that_is_named_is_taken),
        cmocka_unit_test(auto_is_the_environments_cache),
        cmocka_unit_test(a_name_that_is_too_long_is_no_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
