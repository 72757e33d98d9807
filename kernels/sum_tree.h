#pragma once

/* kernels/sum_tree.h - the order in which a row-parallel product's segments are added.
 *
 * The columns of such a matrix are cut into `leaves` equal runs (segments); each run's sum is a
 * leaf of a binary tree that is the same at every tensor-parallel size:
 *
 *     T(lo, 1) = leaf lo
 *     T(lo, n) = T(lo, m) + T(lo + m, n - m),   m: the largest power of two below n
 *
 * A rank has a run of neighbouring leaves. It adds what lies whole within it, the fewest nodes that
 * cover its leaves, and the ranks exchange these: every rank then finishes the same tree, so that
 * the sum is the same to the last bit at 1, 2, 4 ... ranks. Plain C that device code includes too:
 * integers only. */

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__ /* device code calls these, too */
#define KERN_TREE_FUNCTION static __host__ __device__ inline
#else
#define KERN_TREE_FUNCTION static inline
#endif

#define KERN_LEAVES_MAX 64
#define KERN_NODES_MAX  12 /* that cover a run of leaves: 2 (log2(64) - 1) is the worst case */
#define KERN_TREE_DEPTH 6  /* sums that wait for a right neighbour, leaf by leaf: log2(64) */

typedef struct kern_node {
    uint8_t lo, count; /* leaves lo .. lo + count - 1 */
} kern_node;

typedef struct kern_nodes {
    uint32_t count;
    kern_node node[KERN_NODES_MAX]; /* by lo */
} kern_nodes;

/* The left child's leaves of a node of n >= 2 leaves. */
KERN_TREE_FUNCTION uint32_t kern_tree_left(uint32_t n)
{
    uint32_t m = 1;

    while (2 * m < n)
        m *= 2;
    return m;
}

KERN_TREE_FUNCTION void kern_nodes_add(kern_nodes *nodes, uint32_t lo, uint32_t n, uint32_t from,
                                       uint32_t to)
{
    /* depth-first without recursion, for device code: at most one pending right child a level */
    uint32_t stack_lo[8], stack_n[8], depth = 0;

    stack_lo[depth] = lo;
    stack_n[depth++] = n;
    while (depth > 0) {
        lo = stack_lo[--depth];
        n = stack_n[depth];
        if (lo + n <= from || lo >= to)
            continue;
        if (lo >= from && lo + n <= to) {
            nodes->node[nodes->count].lo = (uint8_t)lo;
            nodes->node[nodes->count++].count = (uint8_t)n;
            continue;
        }
        uint32_t left = kern_tree_left(n);
        stack_lo[depth] = lo + left;
        stack_n[depth++] = n - left;
        stack_lo[depth] = lo;
        stack_n[depth++] = left;
    }
}

/* The fewest nodes of the tree over `leaves` leaves that cover leaves [from, to). */
KERN_TREE_FUNCTION kern_nodes kern_nodes_of(uint32_t leaves, uint32_t from, uint32_t to)
{
    kern_nodes nodes;

    nodes.count = 0;
    kern_nodes_add(&nodes, 0, leaves, from, to);
    return nodes;
}

/* How many waiting sums are added to leaf i's own, the latest first, when the n leaves of a node
 * come in order and every sum waits until its right neighbour is there: each as (waiting + own).
 * What is left then waits in turn; after the last leaf nothing does. waiting: how many there are.
 */
KERN_TREE_FUNCTION uint32_t kern_tree_adds(uint32_t i, uint32_t n, uint32_t waiting)
{
    uint32_t adds = 0;

    if (i + 1 == n)
        return waiting;
    for (; (i & 1) != 0; i >>= 1)
        adds++;
    return adds;
}

/* The same for the nodes that cover all leaves, in order: adds[k] for node k. */
KERN_TREE_FUNCTION void kern_nodes_adds(uint32_t leaves, const kern_node *nodes, uint32_t count,
                                        uint8_t *adds)
{
    kern_node waiting[KERN_LEAVES_MAX];
    uint32_t depth = 0;

    for (uint32_t k = 0; k < count; k++) {
        kern_node own = nodes[k];
        adds[k] = 0;
        while (depth > 0 &&
               waiting[depth - 1].count ==
                   kern_tree_left(waiting[depth - 1].count + (uint32_t)own.count) &&
               kern_nodes_of(leaves, waiting[depth - 1].lo, (uint32_t)own.lo + own.count).count ==
                   1) {
            depth--;
            own.lo = waiting[depth].lo;
            own.count = (uint8_t)(own.count + waiting[depth].count);
            adds[k]++;
        }
        waiting[depth++] = own;
    }
}

/* The most nodes that any of `ranks` equal shares of the leaves has: what ranks gather has room for
 * so many of each. Rank r's share is leaves [r * leaves / ranks, (r + 1) * leaves / ranks). */
KERN_TREE_FUNCTION uint32_t kern_nodes_most(uint32_t leaves, uint32_t ranks)
{
    uint32_t most = 0;

    for (uint32_t r = 0; r < ranks; r++) {
        uint32_t count = kern_nodes_of(leaves, r * leaves / ranks, (r + 1) * leaves / ranks).count;
        most = count > most ? count : most;
    }
    return most;
}
