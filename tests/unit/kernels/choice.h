#pragma once

/* tests/unit/kernels/choice.h - which of a program's tests run, and how many cases they take.
 *
 * TEST_FILTER=PATTERN in the environment runs those whose name matches (* and ?), for runs that are
 * slow, as under valgrind. KVFERRY_SEED=N and KVFERRY_FULL=1 are as tests/run sets them. In front
 * of cmocka_run_group_tests. */

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static inline void choice_filter(void)
{
    if (getenv("TEST_FILTER") != NULL)
        cmocka_set_test_filter(getenv("TEST_FILTER"));
}

static inline bool choice_full(void)
{
    const char *text = getenv("KVFERRY_FULL");

    return text != NULL && strcmp(text, "1") == 0;
}

/* Printed, so that the run can be repeated. */
static inline uint64_t choice_seed(void)
{
    const char *text = getenv("KVFERRY_SEED");
    uint64_t seed = text != NULL ? strtoull(text, NULL, 10) : 1;

    print_message("# KVFERRY_SEED=%" PRIu64 "\n", seed);
    return seed;
}
