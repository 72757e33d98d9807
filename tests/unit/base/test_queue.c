#include "common/base/mem.h"
#include "common/base/queue.h"

#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void items_come_out_in_order_and_no_more_than_the_maximum_go_in(void **state)
{
    (void)state;
    static const uint32_t maxima[] = {1, 2, 3, 7, 8};

    for (size_t m = 0; m < sizeof maxima / sizeof maxima[0]; m++) {
        pd_queue *queue = NULL;
        uint64_t out = 0;
        assert_int_equal(pd_queue_create(sizeof(uint64_t), maxima[m], &queue), PD_OK);
        for (uint64_t round = 0; round < 20; round++) {
            for (uint64_t i = 0; i < maxima[m]; i++) {
                uint64_t item = round * 100 + i;
                assert_int_equal(pd_queue_push(queue, &item), PD_OK);
            }
            assert_int_equal(pd_queue_push(queue, &round), PD_E_OVERLOAD);
            for (uint64_t i = 0; i < maxima[m]; i++) {
                assert_int_equal(pd_queue_pop(queue, &out), PD_OK);
                assert_int_equal(out, round * 100 + i);
            }
            assert_int_equal(pd_queue_pop(queue, &out), PD_E_AGAIN);
        }
        pd_queue_destroy(queue);
    }
}

static bool readable(const pd_queue *queue)
{
    struct pollfd fd = {.fd = pd_queue_fd(queue), .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

static void the_fd_is_readable_while_items_may_wait(void **state)
{
    (void)state;
    pd_queue *queue = NULL;
    char item = 'x';

    assert_int_equal(pd_queue_create(1, 4, &queue), PD_OK);
    assert_false(readable(queue));
    assert_int_equal(pd_queue_push(queue, &item), PD_OK);
    assert_int_equal(pd_queue_push(queue, &item), PD_OK);
    assert_true(readable(queue));
    pd_queue_wait(queue, -1); /* returns at once */
    assert_false(readable(queue));
    pd_queue_wait(queue, 1);
    pd_queue_drain_fd(queue); /* nothing there: does not block */
    pd_queue_destroy(queue);
}

static void sizes_of_nonsense_are_refused_and_nothing_is_lost(void **state)
{
    (void)state;
    pd_queue *queue = NULL;
    long live = pd_mem_live();

    assert_int_equal(pd_queue_create(0, 1, &queue), PD_E_INVALID);
    assert_int_equal(pd_queue_create(1, 0, &queue), PD_E_INVALID);
    assert_int_equal(pd_queue_create(1, UINT32_MAX, &queue), PD_E_INVALID);
    for (long n = 0; queue == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = pd_queue_create(8, 8, &queue);
        pd_mem_fail_at(-1);
        assert_int_equal(status, queue == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 10);
    }
    pd_queue_destroy(queue);
    pd_queue_destroy(NULL);
    assert_int_equal(pd_mem_live(), live);
}

enum { MANY = 200000 };

static void *produce(void *ctx)
{
    pd_queue *queue = ctx;
    for (uint64_t i = 0; i < MANY;) {
        uint64_t item[2] = {i, ~i};
        if (pd_queue_push(queue, item) == PD_OK)
            i++;
        else
            sched_yield();
    }
    return NULL;
}

static void two_threads_lose_and_tear_nothing(void **state)
{
    (void)state;
    pd_queue *queue = NULL;
    pthread_t thread;

    assert_int_equal(pd_queue_create(2 * sizeof(uint64_t), 50, &queue), PD_OK);
    assert_int_equal(pthread_create(&thread, NULL, produce, queue), 0);
    for (uint64_t want = 0; want < MANY;) {
        uint64_t item[2];
        if (pd_queue_pop(queue, item) != PD_OK) {
            pd_queue_wait(queue, 1000);
            continue;
        }
        if (item[0] != want || item[1] != ~want)
            fail_msg("item %llu", (unsigned long long)want);
        want++;
    }
    pthread_join(thread, NULL);
    pd_queue_destroy(queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_come_out_in_order_and_no_more_than_the_maximum_go_in),
        cmocka_unit_test(the_fd_is_readable_while_items_may_wait),
        cmocka_unit_test(sizes_of_nonsense_are_refused_and_nothing_is_lost),
        cmocka_unit_test(two_threads_lose_and_tear_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
