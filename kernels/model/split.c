#include "kernels/model/split.h"

#include "kernels/comm.h"
#include "kernels/number.h"

#include <stdio.h>

/* A row-parallel matrix is summed in as many runs of columns as it could have ranks, so that every
 * split gives the same sum. */
uint32_t kern_split_leaves(const pd_model_shape *shape, uint32_t cols)
{
    return shape->kv_heads <= KERN_LEAVES_MAX && cols % (shape->kv_heads * KERN_BLOCK) == 0
               ? shape->kv_heads
               : 1;
}

static bool divides(uint32_t ranks, uint32_t count, const char *what, char *why, size_t why_size)
{
    if (count % ranks == 0)
        return true;
    snprintf(why, why_size, "%u %s do not divide among %u ranks", count, what, ranks);
    return false;
}

bool kern_split_of(const pd_model_shape *shape, uint32_t rank, uint32_t ranks,
                   kern_split *split_out, char *why, size_t why_size)
{
    uint32_t q = shape->heads * shape->head_dim;

    pd_assert(rank < ranks);
    if (ranks > KERN_RANKS_MAX) {
        snprintf(why, why_size, "%u ranks are more than %d", ranks, KERN_RANKS_MAX);
        return false;
    }
    if (!divides(ranks, shape->heads, "heads", why, why_size) ||
        !divides(ranks, shape->kv_heads, "KV heads", why, why_size) ||
        !divides(ranks, shape->ffn, "rows of the feed-forward layer", why, why_size) ||
        !divides(ranks, shape->vocab, "tokens of the vocabulary", why, why_size))
        return false;
    if (ranks > 1 &&
        (kern_split_leaves(shape, q) == 1 || kern_split_leaves(shape, shape->ffn) == 1)) {
        snprintf(
            why, why_size,
            "%u columns of attention output or %u of the feed-forward layer cannot be cut into "
            "%u runs (one a KV head) of a multiple of %d",
            q, shape->ffn, shape->kv_heads, KERN_BLOCK);
        return false;
    }
    *split_out = (kern_split){
        .rank = rank,
        .ranks = ranks,
        .heads = shape->heads / ranks,
        .kv_heads = shape->kv_heads / ranks,
        .ffn = shape->ffn / ranks,
        .vocab = shape->vocab / ranks,
        .leaves = shape->kv_heads,
    };
    return true;
}
