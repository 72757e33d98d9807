/* Who stands still is told from the router's silence about him, never from the router's own. */
#include "deploy/hung.h"

#include "common/base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define S PD_NS_PER_S

enum { ROUTER, PREFILL, DECODE };

static state cluster;
static hung watch;

static int setup(void **test)
{
    (void)test;
    static const char *const names[] = {"router", "prefill-0", "decode-0"};
    cluster = (state){.services_count = 3};
    for (int i = 0; i < 3; i++) {
        state_service *at = &cluster.services[i];
        snprintf(at->name, sizeof at->name, "%s", names[i]);
        snprintf(at->role, sizeof at->role, "%.*s", (int)strcspn(names[i], "-"), names[i]);
        at->process.pid = 100 + i;
    }
    hung_init(&watch, 10 * S);
    return 0;
}

static void tell(const char *text, uint64_t now_ns)
{
    pd_json *root = NULL;
    pd_json_error error;
    if (text != NULL)
        assert_int_equal(pd_json_parse(text, strlen(text), &root, &error), PD_OK);
    hung_on_answer(&watch, &cluster, root, now_ns);
    pd_json_free(root);
}

static const char BOTH[] = "[{\"name\":\"prefill-0\",\"pid\":101,\"heartbeat_age_ms\":100},"
                           "{\"name\":\"decode-0\",\"pid\":102,\"heartbeat_age_ms\":50}]";
static const char PREFILL_ONLY[] =
    "[{\"name\":\"prefill-0\",\"pid\":101,\"heartbeat_age_ms\":100}]";

static void tell_each_second(const char *text, uint64_t from, uint64_t to)
{
    for (uint64_t t = from; t <= to; t++)
        tell(text, t * S);
}

static void a_registered_worker_that_is_heard_of_no_more_is_hung(void **test)
{
    (void)test;
    tell_each_second(BOTH, 1, 20);
    assert_false(hung_is(&watch, DECODE, 20 * S));
    tell_each_second(PREFILL_ONLY, 21, 29);
    assert_false(hung_is(&watch, DECODE, 29 * S));
    tell_each_second(PREFILL_ONLY, 30, 31);
    assert_true(hung_is(&watch, DECODE, 31 * S));
    assert_false(hung_is(&watch, PREFILL, 31 * S));
    assert_false(hung_is(&watch, ROUTER, 31 * S));
    cluster.services[DECODE].process.pid = 200; /* started anew: it is loading */
    tell_each_second(PREFILL_ONLY, 32, 100);
    assert_false(hung_is(&watch, DECODE, 100 * S));
}

static void a_silent_heartbeat_counts_and_a_stranger_of_that_name_does_not(void **test)
{
    (void)test;
    tell_each_second(BOTH, 1, 2);
    tell_each_second("[{\"name\":\"decode-0\",\"pid\":999,\"heartbeat_age_ms\":0},"
                     "{\"name\":\"prefill-0\",\"pid\":101,\"heartbeat_age_ms\":11000}]",
                     3, 13);
    assert_true(hung_is(&watch, DECODE, 13 * S));
    assert_true(hung_is(&watch, PREFILL, 13 * S));
}

static void nobody_is_judged_by_a_router_that_says_nothing(void **test)
{
    (void)test;
    tell_each_second(BOTH, 1, 5);
    tell_each_second(NULL, 6, 60);
    assert_false(hung_is(&watch, DECODE, 60 * S));
    cluster.services[ROUTER].process.pid = 300; /* a new one knows nobody yet */
    tell_each_second("[]", 61, 69);
    assert_false(hung_is(&watch, DECODE, 69 * S));
    tell_each_second("[]", 70, 72);
    assert_true(hung_is(&watch, DECODE, 72 * S));
}

static void our_own_absence_is_nobodys_silence(void **test)
{
    (void)test;
    tell_each_second(BOTH, 1, 5);
    tell("[]", 1000 * S);
    assert_false(hung_is(&watch, DECODE, 1000 * S));
}

static void with_no_patience_set_nobody_is_hung(void **test)
{
    (void)test;
    hung_init(&watch, 0);
    tell_each_second(BOTH, 1, 5);
    tell_each_second("[]", 6, 1000);
    assert_false(hung_is(&watch, DECODE, 1000 * S));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_registered_worker_that_is_heard_of_no_more_is_hung, setup),
        cmocka_unit_test_setup(a_silent_heartbeat_counts_and_a_stranger_of_that_name_does_not,
                               setup),
        cmocka_unit_test_setup(nobody_is_judged_by_a_router_that_says_nothing, setup),
        cmocka_unit_test_setup(our_own_absence_is_nobodys_silence, setup),
        cmocka_unit_test_setup(with_no_patience_set_nobody_is_hung, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
