/* The tree that segments' sums are added over: one order, wherever it is cut. */

#include "kernels/sum_tree.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
/* in this order */
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#define TEXT_BYTES 1024

static void join(const char *left, const char *right, char *out)
{
    int len = snprintf(out, TEXT_BYTES, "(%s+%s)", left, right);

    assert_true(len > 0 && len < TEXT_BYTES);
}

/* The definition, as text: "((0+1)+2)". */
static void spell(uint32_t lo, uint32_t n, char *out)
{
    char left[TEXT_BYTES], right[TEXT_BYTES];

    if (n == 1) {
        snprintf(out, TEXT_BYTES, "%u", lo);
        return;
    }
    spell(lo, kern_tree_left(n), left);
    spell(lo + kern_tree_left(n), n - kern_tree_left(n), right);
    join(left, right, out);
}

static void put_together(char waiting[][TEXT_BYTES], uint32_t *depth, uint32_t adds, char *own)
{
    char sum[TEXT_BYTES];

    for (; adds > 0; adds--) {
        assert_true(*depth > 0);
        (*depth)--;
        join(waiting[*depth], own, sum);
        memcpy(own, sum, sizeof sum);
    }
}

static void three_leaves_are_added_in_order(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    spell(0, 3, text);
    assert_string_equal(text, "((0+1)+2)");
    spell(0, 6, text);
    assert_string_equal(text, "(((0+1)+(2+3))+(4+5))");
}

static void leaf_by_leaf_gives_the_tree(void **state)
{
    static char waiting[KERN_TREE_DEPTH][TEXT_BYTES], own[TEXT_BYTES], whole[TEXT_BYTES];

    (void)state;
    for (uint32_t n = 1; n <= KERN_LEAVES_MAX; n++) {
        uint32_t depth = 0;
        for (uint32_t i = 0; i < n; i++) {
            snprintf(own, sizeof own, "%u", i);
            put_together(waiting, &depth, kern_tree_adds(i, n, depth), own);
            if (i + 1 == n)
                break;
            assert_true(depth < KERN_TREE_DEPTH);
            memcpy(waiting[depth++], own, sizeof own);
        }
        assert_int_equal(depth, 0);
        spell(0, n, whole);
        assert_string_equal(own, whole);
    }
}

/* Every cut into two runs, and every even cut into more. */
static void check_cut(uint32_t leaves, const uint32_t *ends, uint32_t runs)
{
    static char waiting[KERN_LEAVES_MAX][TEXT_BYTES], own[TEXT_BYTES], whole[TEXT_BYTES];
    kern_node nodes[KERN_LEAVES_MAX];
    uint8_t adds[KERN_LEAVES_MAX];
    uint32_t count = 0, depth = 0, at = 0;

    for (uint32_t run = 0; run < runs; run++) {
        kern_nodes cover = kern_nodes_of(leaves, at, ends[run]);
        assert_true(cover.count <= KERN_NODES_MAX);
        for (uint32_t i = 0; i < cover.count; i++) {
            assert_int_equal(cover.node[i].lo, at);
            at += cover.node[i].count;
            nodes[count++] = cover.node[i];
        }
        assert_int_equal(at, ends[run]);
    }
    kern_nodes_adds(leaves, nodes, count, adds);
    for (uint32_t k = 0; k < count; k++) {
        spell(nodes[k].lo, nodes[k].count, own);
        put_together(waiting, &depth, adds[k], own);
        memcpy(waiting[depth++], own, sizeof own);
    }
    assert_int_equal(depth, 1);
    spell(0, leaves, whole);
    assert_string_equal(waiting[0], whole);
}

static void ranks_finish_the_same_tree(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= KERN_LEAVES_MAX; leaves++) {
        for (uint32_t cut = 1; cut < leaves; cut++)
            check_cut(leaves, (const uint32_t[]){cut, leaves}, 2);
        for (uint32_t ranks = 1; ranks <= leaves; ranks++) {
            uint32_t ends[KERN_LEAVES_MAX];
            for (uint32_t rank = 0; rank < ranks; rank++)
                ends[rank] = (rank + 1) * leaves / ranks;
            check_cut(leaves, ends, ranks);
        }
    }
}

/* 8 leaves on 2 or 4 ranks, and the like: one number a row is exchanged. */
static void an_even_power_of_two_is_one_node_a_rank(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= KERN_LEAVES_MAX; leaves *= 2)
        for (uint32_t ranks = 1; ranks <= leaves; ranks *= 2)
            for (uint32_t rank = 0; rank < ranks; rank++)
                assert_int_equal(
                    kern_nodes_of(leaves, rank * leaves / ranks, (rank + 1) * leaves / ranks).count,
                    1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(three_leaves_are_added_in_order),
        cmocka_unit_test(leaf_by_leaf_gives_the_tree),
        cmocka_unit_test(ranks_finish_the_same_tree),
        cmocka_unit_test(an_even_power_of_two_is_one_node_a_rank),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
