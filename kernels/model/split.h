#pragma once

/* kernels/model/split.h - how a llama-shaped model is cut among the ranks of a tensor-parallel
 * worker.
 *
 * A rank has neighbouring heads, rows of gate and up, and rows of the vocabulary: as many as any
 * other rank. Products over what it has (attention output, MLP down) are over a run of the leaves
 * of kernels/sum_tree's tree. Plain values; any thread. */

#include "common/model_file/model_file.h"
#include "kernels/sum_tree.h"

typedef struct kern_split {
    uint32_t rank, ranks;
    uint32_t heads, kv_heads, ffn, vocab; /* that a rank has */
    uint32_t leaves;                      /* of all ranks; 1: the product is not cut */
} kern_split;

/* False: the model cannot be cut so; why says which number does not divide, one line. ranks 1
 * always can. */
bool kern_split_of(const pd_model_shape *shape, uint32_t rank, uint32_t ranks,
                   kern_split *split_out, char *why, size_t why_size);
/* Leaves of a product over so many columns of the whole model. */
uint32_t kern_split_leaves(const pd_model_shape *shape, uint32_t cols);
