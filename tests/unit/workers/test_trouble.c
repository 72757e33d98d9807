/* Steps that fail are a request's fault as long as one request may be the cause; else the device's.
 */
#include "common/worker/trouble.h"

#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { SLICES = 8 };

static pd_trouble trouble;

static int set_up(void **state)
{
    (void)state;
    assert_int_equal(pd_trouble_init(&trouble, SLICES), PD_OK);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    pd_trouble_fini(&trouble);
    return pd_mem_live() == 0 ? 0 : -1;
}

/* A step for requests that are called by letters. */
static bool step(const char *letters, pd_status status)
{
    pd_step_slice slices[SLICES] = {0};
    char ids[SLICES][8];
    pd_step s = {.slices = slices, .slices_count = (uint32_t)strlen(letters), .status = status};

    assert_in_range(s.slices_count, 1, SLICES);
    for (uint32_t i = 0; i < s.slices_count; i++) {
        snprintf(ids[i], sizeof ids[i], "req-%c", letters[i]);
        slices[i].id = ids[i];
    }
    return pd_trouble_take_step(&trouble, &s);
}

static void one_request_that_no_step_can_compute_ends_nobody(void **state)
{
    (void)state;
    for (int again = 0; again < 3; again++) {
        assert_false(step("abXcd", PD_E_INTERNAL)); /* then each alone */
        assert_false(step("a", PD_OK));
        assert_false(step("X", PD_E_INTERNAL));
        assert_false(step("bcd", PD_OK));
    }
    for (int tries = 0; tries < 100; tries++) /* by itself, however often it is tried */
        assert_false(step("X", PD_E_INTERNAL));
    for (int tries = 0; tries < 100; tries++) /* whoever is beside it */
        assert_false(step(tries % 2 == 0 ? "aXb" : "cX", PD_E_INTERNAL));
}

static void a_device_that_fails_everybody_ends_its_worker(void **state)
{
    (void)state;
    assert_false(step("abcd", PD_E_INTERNAL)); /* then each alone: the fourth proves it */
    assert_false(step("a", PD_E_INTERNAL));
    assert_false(step("b", PD_E_INTERNAL));
    assert_false(step("c", PD_E_INTERNAL));
    assert_true(step("d", PD_E_INTERNAL));
    assert_int_equal(trouble.failed, 5);
}

static void requests_that_come_one_by_one_prove_it_too(void **state)
{
    (void)state;
    assert_int_equal(PD_TROUBLE_CULPRITS, 4);
    for (const char *letter = "abc"; *letter != '\0'; letter++) {
        char one[2] = {*letter};
        assert_false(step(one, PD_E_IO));
        assert_false(step(one, PD_E_IO)); /* tried again elsewhere, and here */
    }
    assert_true(step("d", PD_E_IO));
}

static void batches_that_never_come_alone_prove_it_too(void **state)
{
    (void)state;
    assert_false(step("ab", PD_E_INTERNAL));
    assert_false(step("cd", PD_E_INTERNAL));
    assert_false(step("de", PD_E_INTERNAL)); /* d may be the second */
    assert_false(step("efgh", PD_E_INTERNAL));
    assert_true(step("a", PD_E_INTERNAL));
}

static void a_good_step_begins_the_count_anew(void **state)
{
    (void)state;
    for (int round = 0; round < 5; round++) {
        assert_false(step("a", PD_E_INTERNAL));
        assert_false(step("b", PD_E_INTERNAL));
        assert_false(step("c", PD_E_INTERNAL));
        assert_false(step("d", PD_OK));
    }
}

static void out_of_memory_is_the_workers_at_once(void **state)
{
    (void)state;
    assert_true(step("a", PD_E_NOMEM));
}

static void what_is_wrong_with_a_request_blames_nobody(void **state)
{
    (void)state;
    for (char letter = 'a'; letter <= 'z'; letter++) {
        char one[2] = {letter};
        assert_false(step(one, PD_E_INVALID));
        assert_false(step(one, PD_E_TOO_LARGE));
        assert_false(step(one, PD_E_MISMATCH));
    }
    assert_false(step("a", PD_E_INTERNAL)); /* and ends no row of failures either */
    assert_false(step("b", PD_E_INTERNAL));
    assert_false(step("c", PD_E_INTERNAL));
    assert_false(step("x", PD_E_INVALID));
    assert_true(step("d", PD_E_INTERNAL));
}

static void requests_may_be_told_by_number(void **state)
{
    (void)state;
    for (uint64_t request = 0; request + 1 < PD_TROUBLE_CULPRITS; request++) {
        assert_false(pd_trouble_take(&trouble, PD_E_INTERNAL, &request, 1));
        assert_false(pd_trouble_take(&trouble, PD_E_INTERNAL, &request, 1));
    }
    assert_true(pd_trouble_take(&trouble, PD_E_INTERNAL, &(uint64_t){77}, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_request_that_no_step_can_compute_ends_nobody, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_device_that_fails_everybody_ends_its_worker, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(requests_that_come_one_by_one_prove_it_too, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(batches_that_never_come_alone_prove_it_too, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_good_step_begins_the_count_anew, set_up, tear_down),
        cmocka_unit_test_setup_teardown(out_of_memory_is_the_workers_at_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_wrong_with_a_request_blames_nobody, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(requests_may_be_told_by_number, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
