#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void allocations_are_counted_and_fail_when_told(void **state)
{
    (void)state;
    long live = pd_mem_live();

    pd_mem_fail_at(1);
    void *first = pd_malloc(10);
    void *second = pd_malloc(10);
    void *third = pd_calloc(1, 10);
    pd_mem_fail_at(-1);
    assert_non_null(first);
    assert_null(second);
    assert_null(third);
    assert_int_equal(pd_mem_live(), live + 1);
    void *grown = pd_realloc(first, 1000);
    assert_non_null(grown);
    assert_int_equal(pd_mem_live(), live + 1);
    char *text = pd_asprintf("%d %s", 7, "x");
    assert_string_equal(text, "7 x");
    char *part = pd_strndup("ab\0cd", 5);
    assert_memory_equal(part, "ab\0cd", 6);
    assert_int_equal(pd_mem_live(), live + 3);
    pd_free(grown);
    pd_free(text);
    pd_free(part);
    pd_free(NULL);
    assert_int_equal(pd_mem_live(), live);
    assert_null(pd_calloc(SIZE_MAX / 2, 3));
    assert_int_equal(pd_mem_live(), live);
}

static void an_arena_hands_out_zeroed_aligned_memory_that_does_not_overlap(void **state)
{
    (void)state;
    enum { COUNT = 500 };
    static unsigned char *parts[COUNT];
    pd_arena *arena = NULL;
    long live = pd_mem_live();

    assert_int_equal(pd_arena_create(64 << 20, &arena), PD_OK);
    for (size_t i = 0; i < COUNT; i++) {
        size_t bytes = i * 37 % 9000 + 1;
        parts[i] = pd_arena_alloc(arena, bytes);
        assert_non_null(parts[i]);
        assert_int_equal((uintptr_t)parts[i] % 16, 0);
        for (size_t k = 0; k < bytes; k++)
            assert_int_equal(parts[i][k], 0);
        memset(parts[i], (int)(i % 255) + 1, bytes);
    }
    for (size_t i = 0; i < COUNT; i++) {
        size_t bytes = i * 37 % 9000 + 1;
        for (size_t k = 0; k < bytes; k++)
            assert_int_equal(parts[i][k], i % 255 + 1);
    }
    assert_string_equal(pd_arena_strndup(arena, "hello", 4), "hell");
    pd_arena_destroy(arena);
    assert_int_equal(pd_mem_live(), live);
}

static void an_arena_ends_at_its_maximum(void **state)
{
    (void)state;
    pd_arena *arena = NULL;

    assert_int_equal(pd_arena_create(100, &arena), PD_OK);
    assert_non_null(pd_arena_alloc(arena, 60));
    assert_null(pd_arena_alloc(arena, 41));
    assert_non_null(pd_arena_alloc(arena, 40));
    assert_null(pd_arena_alloc(arena, 1));
    pd_arena_destroy(arena);
    assert_int_equal(pd_arena_create(SIZE_MAX, &arena), PD_OK);
    assert_null(pd_arena_alloc(arena, SIZE_MAX));      /* rounding up must not wrap to 0 */
    assert_null(pd_arena_alloc(arena, SIZE_MAX - 20)); /* nor adding the chunk's head */
    assert_null(pd_arena_strndup(arena, "x", SIZE_MAX));
    assert_non_null(pd_arena_alloc(arena, 8));
    pd_arena_destroy(arena);
    pd_arena_destroy(NULL);
}

static void an_arena_survives_every_failed_allocation(void **state)
{
    (void)state;
    long live = pd_mem_live();

    for (long n = 0; n < 4; n++) {
        pd_arena *arena = NULL;
        pd_mem_fail_at(n);
        pd_status status = pd_arena_create(1 << 20, &arena);
        void *small = status == PD_OK ? pd_arena_alloc(arena, 8) : NULL;
        void *large = status == PD_OK ? pd_arena_alloc(arena, 100000) : NULL;
        pd_mem_fail_at(-1);
        assert_int_equal(status, n == 0 ? PD_E_NOMEM : PD_OK);
        assert_true((small != NULL) == (n > 1));
        assert_true((large != NULL) == (n > 2));
        pd_arena_destroy(arena);
        assert_int_equal(pd_mem_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(allocations_are_counted_and_fail_when_told),
        cmocka_unit_test(an_arena_hands_out_zeroed_aligned_memory_that_does_not_overlap),
        cmocka_unit_test(an_arena_ends_at_its_maximum),
        cmocka_unit_test(an_arena_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
