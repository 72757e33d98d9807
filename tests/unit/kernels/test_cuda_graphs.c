/* Which recorded steps are kept, and when one is recorded: 32, the one not used for longest goes;
 * the second time it comes; after failures not at once. Graphs are pointers that nobody launches.
 */

#include "kernels/cuda/graphs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

struct gpu_graph {
    uint32_t rows;
    int ended;
};

/* gpu.h's */
void gpu_graph_destroy(gpu_graph *graph)
{
    if (graph != NULL)
        graph->ended++;
}

static gpu_graph recorded[CU_GRAPHS_MAX + 8];

static cu_graph_key key_of(uint32_t rows)
{
    return (cu_graph_key){.rows = rows, .items = rows + 1};
}

/* A step of so many rows, as the model takes it: it comes, and where it is due it is recorded. */
static bool step(cu_graphs *graphs, uint32_t rows)
{
    cu_graph_key key = key_of(rows);

    if (cu_graphs_find(graphs, &key) != NULL)
        return true;
    if (cu_graphs_due(graphs, &key)) {
        recorded[rows] = (gpu_graph){.rows = rows};
        cu_graphs_keep(graphs, &key, &recorded[rows]);
    }
    return false;
}

static void a_step_is_recorded_the_second_time(void **state)
{
    cu_graphs graphs = {0};

    (void)state;
    assert_false(step(&graphs, 3));
    assert_int_equal(cu_graphs_count(&graphs), 0);
    assert_false(step(&graphs, 3));
    assert_int_equal(cu_graphs_count(&graphs), 1);
    assert_true(step(&graphs, 3));
    cu_graph_key other = {.rows = 3, .items = 5}, same = key_of(3);
    assert_null(cu_graphs_find(&graphs, &other));
    assert_ptr_equal(cu_graphs_find(&graphs, &same), &recorded[3]);
    cu_graphs_clear(&graphs);
    assert_int_equal(recorded[3].ended, 1);
    assert_int_equal(cu_graphs_count(&graphs), 0);
}

static void the_one_not_used_for_longest_goes(void **state)
{
    cu_graphs graphs = {0};

    (void)state;
    for (int time = 0; time < 2; time++)
        for (uint32_t rows = 0; rows < CU_GRAPHS_MAX; rows++)
            assert_false(step(&graphs, rows));
    assert_int_equal(cu_graphs_count(&graphs), CU_GRAPHS_MAX);
    assert_true(step(&graphs, 0)); /* so 1 is the oldest */
    assert_false(step(&graphs, CU_GRAPHS_MAX));
    assert_false(step(&graphs, CU_GRAPHS_MAX));
    assert_true(step(&graphs, CU_GRAPHS_MAX));
    for (uint32_t rows = 0; rows < CU_GRAPHS_MAX; rows++) {
        cu_graph_key key = key_of(rows);
        assert_int_equal(recorded[rows].ended, rows == 1);
        assert_true((cu_graphs_find(&graphs, &key) == NULL) == (rows == 1));
    }
    cu_graphs_clear(&graphs);
    for (uint32_t rows = 0; rows <= CU_GRAPHS_MAX; rows++)
        assert_int_equal(recorded[rows].ended, 1);
}

/* How many steps that would be recorded are not, after the next failure. */
static uint64_t pause_after_failure(cu_graphs *graphs, const cu_graph_key *key)
{
    uint64_t said, steps = 0;

    assert_true(cu_graphs_due(graphs, key));
    said = cu_graphs_failed(graphs);
    while (steps < said && !cu_graphs_due(graphs, key))
        steps++;
    assert_int_equal(steps, said);
    return steps;
}

static void after_failures_it_is_not_tried_at_once(void **state)
{
    cu_graphs graphs = {0};
    cu_graph_key key = key_of(5);

    (void)state;
    assert_false(cu_graphs_due(&graphs, &key));
    assert_int_equal(pause_after_failure(&graphs, &key), CU_GRAPHS_PAUSE);
    assert_int_equal(pause_after_failure(&graphs, &key), 4 * CU_GRAPHS_PAUSE);
    assert_true(cu_graphs_due(&graphs, &key)); /* one that succeeds begins anew */
    cu_graphs_keep(&graphs, &key, &recorded[5]);
    key = key_of(6);
    assert_false(cu_graphs_due(&graphs, &key));
    for (uint32_t n = 1; n < CU_GRAPHS_FAILURES_MAX; n++)
        (void)pause_after_failure(&graphs, &key);
    assert_true(cu_graphs_due(&graphs, &key));
    assert_true(cu_graphs_failed(&graphs) == UINT64_MAX);
    for (int n = 0; n < 1000; n++)
        assert_false(cu_graphs_due(&graphs, &key));
    cu_graphs_clear(&graphs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_is_recorded_the_second_time),
        cmocka_unit_test(the_one_not_used_for_longest_goes),
        cmocka_unit_test(after_failures_it_is_not_tried_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
