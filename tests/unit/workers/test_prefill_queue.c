#include "common/worker/prefill_queue.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static uint32_t rooms;  /* how many more may start */
static uint32_t starts; /* how often was asked */

static pd_status start(void *ctx, pd_prefill_item *item)
{
    (void)ctx;
    (void)item;
    starts++;
    if (rooms == 0)
        return PD_E_OVERLOAD;
    rooms--;
    return PD_OK;
}

static void push(pd_prefill_queue *queue, pd_prefill_item *item, uint32_t tokens)
{
    *item = (pd_prefill_item){.tokens = tokens};
    assert_int_equal(pd_prefill_queue_push(queue, item), PD_OK);
}

/* Picks and "computes"; returns the rows of the step. */
static uint32_t step(pd_prefill_queue *queue, uint32_t budget, uint32_t items_max)
{
    pd_prefill_item *items[16];
    uint32_t rows = 0;
    uint32_t count = pd_prefill_queue_pick(queue, budget, start, NULL, items, items_max);

    assert_true(count <= items_max);
    for (uint32_t i = 0; i < count; i++) {
        assert_true(items[i]->take > 0 && items[i]->started);
        assert_true(i == 0 || items[i - 1]->order < items[i]->order);
        rows += items[i]->take;
        items[i]->done += items[i]->take;
        if (items[i]->done == items[i]->tokens)
            pd_prefill_queue_remove(queue, items[i]);
    }
    assert_true(rows <= budget);
    return rows;
}

static void one_prompt_gets_the_whole_budget(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item a;

    rooms = 16;
    pd_prefill_queue_init(&queue, 4);
    push(&queue, &a, 1000);
    assert_int_equal(step(&queue, 512, 8), 512);
    assert_int_equal(step(&queue, 512, 8), 488);
    assert_int_equal(queue.count, 0);
    assert_int_equal(step(&queue, 512, 8), 0);
}

static void short_prompts_pass_a_long_one(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item big, a, b;

    rooms = 16;
    pd_prefill_queue_init(&queue, 4);
    push(&queue, &big, 10000);
    push(&queue, &a, 100);
    push(&queue, &b, 60);
    assert_int_equal(step(&queue, 512, 8), 512);
    assert_int_equal(a.done, 100);
    assert_int_equal(b.done, 60);
    assert_int_equal(big.done, 352);
}

static void the_oldest_is_sure_of_half(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item big, small[200];
    uint32_t steps = 0, used = 0;

    rooms = 1000;
    pd_prefill_queue_init(&queue, 300);
    push(&queue, &big, 2048);
    while (big.done < big.tokens) {
        /* a flood: every step brings more short prompts than there is budget for */
        for (int i = 0; i < 9 && used < 200; i++)
            push(&queue, &small[used++], 100);
        step(&queue, 512, 16);
        steps++;
        assert_true(steps <= 8);
    }
    assert_int_equal(steps, 8);
}

static void without_room_for_the_oldest_nobody_else_starts(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item running, old, young;

    rooms = 1;
    pd_prefill_queue_init(&queue, 4);
    push(&queue, &running, 100);
    assert_int_equal(step(&queue, 64, 8), 64);
    push(&queue, &old, 100);
    push(&queue, &young, 10);
    assert_int_equal(step(&queue, 64, 8), 36); /* what has begun goes on; no room for others */
    rooms = 0;
    assert_int_equal(step(&queue, 64, 8), 0);
    assert_false(young.started);
    rooms = 1; /* one place: it is the oldest's, though the young one is shorter */
    assert_int_equal(step(&queue, 64, 8), 64);
    assert_true(old.started);
    assert_false(young.started);
}

/* A queue that cannot start is looked through once, and tried a few times, at each step. */
static void a_long_queue_without_room_costs_little(void **state)
{
    (void)state;
    enum { COUNT = 30000 };
    pd_prefill_queue queue;
    pd_prefill_item *items = pd_calloc(COUNT, sizeof *items);

    assert_non_null(items);
    pd_prefill_queue_init(&queue, COUNT);
    for (uint32_t i = 0; i < COUNT; i++)
        push(&queue, &items[i], 100 + i);
    for (uint32_t room = 0; room < 2; room++) { /* for nobody, then for the oldest */
        clock_t before = clock();
        rooms = room;
        starts = 0;
        assert_int_equal(step(&queue, 64, 8), room * 64);
        assert_true(starts <= 20);
        /* a look at each for each other one would be a second and more */
        assert_true(clock() - before < CLOCKS_PER_SEC / 4);
    }
    pd_free(items);
}

static void a_step_has_no_more_items_than_allowed(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item items[10];

    rooms = 16;
    pd_prefill_queue_init(&queue, 10);
    for (int i = 0; i < 10; i++)
        push(&queue, &items[i], 10);
    assert_int_equal(step(&queue, 512, 3), 30);
    assert_int_equal(queue.count, 7);
    assert_int_equal(step(&queue, 1, 1), 1);
}

static void a_full_queue_takes_no_more(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item a, b = {.tokens = 5};

    pd_prefill_queue_init(&queue, 1);
    push(&queue, &a, 5);
    assert_int_equal(pd_prefill_queue_push(&queue, &b), PD_E_OVERLOAD);
    pd_prefill_queue_remove(&queue, &b); /* never queued: left alone */
    assert_int_equal(queue.count, 1);
    pd_prefill_queue_remove(&queue, &a);
    assert_int_equal(pd_prefill_queue_push(&queue, &b), PD_OK);
}

static void queued_work_is_the_cost_models_sum(void **state)
{
    (void)state;
    pd_prefill_queue queue;
    pd_prefill_item a, b;
    pd_cost cost;

    pd_cost_init(&cost);
    pd_prefill_queue_init(&queue, 4);
    assert_true(pd_prefill_queue_work_ms(&queue, &cost) == 0);
    push(&queue, &a, 100);
    push(&queue, &b, 50);
    a.done = 40;
    double sum = pd_cost_prefill_ms(&cost, 60, 40) + pd_cost_prefill_ms(&cost, 50, 0);
    assert_true(pd_prefill_queue_work_ms(&queue, &cost) == sum);
    assert_int_equal(pd_prefill_queue_tokens(&queue), 110);
}

/* Whatever comes: every prompt is computed exactly once, no step is idle while somebody can run,
 * and the oldest ends within twice its own steps. */
static void nobody_starves_at_random(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        pd_prefill_queue queue;
        pd_prefill_item items[40];
        uint64_t random = seed;
        uint32_t pushed = 0, budget = 1 + (uint32_t)(pd_random_next(&random) % 100);

        rooms = 1000;
        pd_prefill_queue_init(&queue, 40);
        while (pushed < 40 || queue.count > 0) {
            while (pushed < 40 && pd_random_next(&random) % 3 != 0)
                push(&queue, &items[pushed++], 1 + (uint32_t)(pd_random_next(&random) % 300));
            const pd_prefill_item *oldest = queue.head;
            uint32_t before = oldest == NULL ? 0 : oldest->done;
            uint64_t waiting = pd_prefill_queue_tokens(&queue);
            uint32_t rows = step(&queue, budget, 8);
            if (oldest == NULL)
                continue;
            uint32_t fair = (budget + 1) / 2;
            uint32_t needs = oldest->tokens - before;
            assert_true(oldest->done - before >= (needs < fair ? needs : fair));
            assert_true(rows > 0 && (rows == budget || rows == waiting || queue.count > 0));
        }
        for (uint32_t i = 0; i < 40; i++)
            assert_int_equal(items[i].done, items[i].tokens);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_prompt_gets_the_whole_budget),
        cmocka_unit_test(short_prompts_pass_a_long_one),
        cmocka_unit_test(the_oldest_is_sure_of_half),
        cmocka_unit_test(without_room_for_the_oldest_nobody_else_starts),
        cmocka_unit_test(a_long_queue_without_room_costs_little),
        cmocka_unit_test(a_step_has_no_more_items_than_allowed),
        cmocka_unit_test(a_full_queue_takes_no_more),
        cmocka_unit_test(queued_work_is_the_cost_models_sum),
        cmocka_unit_test(nobody_starves_at_random),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
