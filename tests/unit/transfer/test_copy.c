/* A copy past the caches is a copy: every way, from and to every alignment, and not a byte more. */
#include "common/base/hash.h"
#include "common/transfer/copy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { BYTES = 70000, GUARD = 128 };

static unsigned char source[BYTES + 2 * GUARD], target[BYTES + 2 * GUARD];

static void try(pd_copy_way way, size_t from, size_t to, size_t bytes)
{
    memset(target, 0xa5, sizeof target);
    pd_copy_by(way, target + GUARD + to, source + from, bytes);
    assert_memory_equal(target + GUARD + to, source + from, bytes);
    for (size_t i = 0; i < GUARD + to; i++)
        assert_int_equal(target[i], 0xa5);
    for (size_t i = GUARD + to + bytes; i < sizeof target; i++)
        assert_int_equal(target[i], 0xa5);
}

static void every_way_copies_just_what_it_should(void **state)
{
    (void)state;
    static const size_t sizes[] = {0,    1,    63,   64,    255,   4095, 4096,
                                   4097, 4159, 4351, 24576, 65536, 69999};
    uint64_t random = 7;

    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (unsigned char)pd_random_next(&random);
    for (int way = PD_COPY_PLAIN; way <= (int)pd_copy_best(); way++) {
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            for (size_t shift = 0; shift < 64; shift += 21) {
                try((pd_copy_way)way, shift, 0, sizes[i]);
                try((pd_copy_way)way, 0, shift, sizes[i]);
                try((pd_copy_way)way, 64 - shift, shift + 1, sizes[i]);
            }
        }
    }
    memset(target, 0, sizeof target);
    pd_copy_out(target, source, BYTES);
    assert_memory_equal(target, source, BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_way_copies_just_what_it_should),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
