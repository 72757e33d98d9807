/* How many layer groups make one shipment: a short prompt leaves as a whole, a long one while it is
 * computed. */
#include "common/cost/cost.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { GROUPS = 15, TOKEN_BYTES = 23040 };

static uint32_t groups_of(const pd_cost *cost, uint32_t tokens)
{
    return pd_cost_ship_groups(cost, GROUPS, pd_cost_prefill_ms(cost, tokens, 0),
                               (uint64_t)tokens * TOKEN_BYTES);
}

static void a_free_shipment_is_one_group_and_a_dear_one_all(void **state)
{
    (void)state;
    pd_cost cost;
    pd_cost_init(&cost);

    cost.ship_base_ms = 0;
    assert_true(groups_of(&cost, 16) < GROUPS);
    assert_true(groups_of(&cost, 2000) < GROUPS);
    cost.ship_base_ms = 1e6;
    assert_int_equal(groups_of(&cost, 16), GROUPS);
    assert_int_equal(groups_of(&cost, 2000), GROUPS);
    assert_int_equal(pd_cost_ship_groups(&cost, 1, 10, 1000), 1);
    assert_int_equal(pd_cost_ship_groups(&cost, GROUPS, 10, 0), GROUPS);
}

/* A link as slow as computing: all of a whole shipment comes after the computing, of groups on
 * their own only the last. */
static void what_takes_as_long_as_computing_is_hidden_behind_it(void **state)
{
    (void)state;
    pd_cost cost;
    pd_cost_init(&cost);

    cost.ship_base_ms = 0.01;
    cost.ship_byte_ms = 100.0 / 1e6;
    assert_int_equal(pd_cost_ship_groups(&cost, GROUPS, 100, 1000000), 1);
    /* the fixed cost of a shipment is as long as a third of all: two at most */
    cost.ship_base_ms = 33;
    assert_true(pd_cost_ship_groups(&cost, GROUPS, 100, 1000000) > GROUPS / 3);
}

static void longer_prompts_leave_in_smaller_parts(void **state)
{
    (void)state;
    const double links[] = {1e-7, 1e-6, 1e-5}; /* 10 GB/s, 1 GB/s, 100 MB/s */

    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        pd_cost cost;
        pd_cost_init(&cost);
        cost.ship_byte_ms = links[i];
        uint32_t first = pd_cost_overlap_tokens(&cost, GROUPS, TOKEN_BYTES, 1 << 20);
        print_message("# %4.0f MB/s: overlap from %u tokens; 512 tokens: %u groups a shipment, "
                      "2048: %u\n",
                      1e-3 / links[i], first, groups_of(&cost, 512), groups_of(&cost, 2048));
        assert_true(first > 0);
        for (uint32_t tokens = 1; tokens < 3000; tokens += 7)
            assert_int_equal(groups_of(&cost, tokens) < GROUPS, tokens >= first);
        assert_int_equal(pd_cost_overlap_tokens(&cost, GROUPS, TOKEN_BYTES, first), first);
        assert_int_equal(pd_cost_overlap_tokens(&cost, GROUPS, TOKEN_BYTES, first - 1), 0);
    }
}

/* A link that is much slower, or faster, than was thought: its rate is learnt from big shipments,
 * and its fixed cost does not grow with them; that is learnt from small ones. */
static void a_links_rate_and_its_fixed_cost_are_learnt_apart(void **state)
{
    (void)state;
    static const double times[] = {300, 20, 1, 0.05};

    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        pd_cost cost;
        pd_cost_init(&cost);
        const double byte_ms = times[i] * cost.ship_byte_ms, base_ms = cost.ship_base_ms;
        for (int n = 0; n < 100; n++)
            pd_cost_observe_ship(&cost, 2 << 20, base_ms + 1e-6 * (2 << 20)); /* known long since */
        for (int n = 0; n < 45; n++)                                          /* three prompts */
            pd_cost_observe_ship(&cost, 768 << 10, base_ms + byte_ms * (768 << 10));
        print_message("# base %.3f ms of %.3f, a MB %.2f ms of %.2f\n", cost.ship_base_ms, base_ms,
                      1e6 * cost.ship_byte_ms, 1e6 * byte_ms);
        assert_true(cost.ship_base_ms == base_ms);
        assert_true(cost.ship_byte_ms > 0.9 * byte_ms && cost.ship_byte_ms < 1.1 * byte_ms);
        for (int n = 0; n < 100; n++)
            pd_cost_observe_ship(&cost, 1000, 2 * base_ms + byte_ms * 1000);
        assert_true(cost.ship_base_ms > 1.9 * base_ms && cost.ship_base_ms < 2.1 * base_ms);
        for (int n = 0; n < 100; n++)
            pd_cost_observe_ship(&cost, 1000, 1000);
        assert_true(cost.ship_base_ms <= 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_free_shipment_is_one_group_and_a_dear_one_all),
        cmocka_unit_test(what_takes_as_long_as_computing_is_hidden_behind_it),
        cmocka_unit_test(longer_prompts_leave_in_smaller_parts),
        cmocka_unit_test(a_links_rate_and_its_fixed_cost_are_learnt_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
