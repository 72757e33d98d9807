#pragma once

/* kernels/ops.h - the table of operations that the forward pass on the host is made of, one table
 * an instruction set, and the choice of one.
 *
 * Each computes what kernels/ref does, bit for bit: an operation's comment there is its meaning.
 * Operations are pure: they read and write the memory they are given, never fail, and may
 * run on any thread at once on different memory. The rules that make results equal are in
 * docs/kernels.md. */

#include "common/kv/layout.h"
#include "common/model_file/model_file.h"
#include "kernels/sum_tree.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KERN_PANEL_ROWS           16  /* a matmul's row range starts at a multiple of it */
#define KERN_SPLIT_TOKENS         256 /* attention's partial sums cover this many positions */
#define KERN_ATTENTION_TOKENS_MAX 16  /* query tokens of one call */

/* A weight matrix, out = W x: rows x cols, columns in blocks along a row. */
typedef struct kern_matrix {
    pd_dtype dtype;
    uint32_t rows, cols;
    /* cols is cut into this many equal runs: the leaves of kernels/sum_tree's tree, or of the part
     * of it that a rank has */
    uint32_t segments;
    /* A product is over these, one node of the tree; a count of 0: over all of them. */
    uint32_t segment_from, segment_count;
    const void *data; /* packed by the table's pack, or the file's rows when it packs nothing */
} kern_matrix;

/* The same matrix, for products over segments [from, from + count). */
static inline kern_matrix kern_matrix_node(const kern_matrix *matrix, uint32_t from, uint32_t count)
{
    kern_matrix node = *matrix;

    node.segment_from = from;
    node.segment_count = count;
    return node;
}

static inline uint32_t kern_matrix_segments(const kern_matrix *matrix)
{
    return matrix->segment_count != 0 ? matrix->segment_count : matrix->segments;
}

/* Rows of activations, as floats and, for quantised weights, as blocks of 32 int8. */
typedef struct kern_acts {
    uint32_t cols;
    float *values;       /* [rows][cols] */
    int8_t *quants;      /* [rows][cols], value ~ scale * quant */
    float *scales;       /* [rows][cols / 32] */
    float *sums;         /* [rows][cols / 32], scale * (sum of the block's quants) */
    int32_t *quant_sums; /* [rows][cols / 32] */
    int32_t *low_sums;   /* [rows][cols / 32], of the first 16 quants; NULL: no product with Q6_K */
} kern_acts;

/* One KV head's attention for consecutive tokens of one sequence; their own K and V are in the
 * pool already, in the layout's format. A format with scales: a score is the product with the codes
 * times K's scale; a weight times V's scale meets V's codes. Query and output rows:
 * [heads][head_dim] of the query heads sharing this KV head.
 */
typedef struct kern_attention {
    /* what this thread will attend next, so that its K and V can be asked for; NULL: unknown */
    const struct kern_attention *next;
    const pd_kv_layout *layout;
    const void *pool;
    const pd_block *blocks;
    uint32_t layer, kv_head;
    uint32_t heads;    /* query heads of this KV head */
    uint32_t tokens;   /* 1 .. KERN_ATTENTION_TOKENS_MAX */
    uint32_t position; /* of the first token */
    float scale;
    const float *query; /* token t's heads at query + t * query_stride */
    float *out;
    size_t query_stride, out_stride; /* floats */
    /* attention only: the first splits, made by attention_part already, one after the other; each
     * of tokens x heads rows */
    const float *parts;
    uint32_t parts_splits;
    void *scratch; /* attention_scratch_bytes, 64-byte aligned, this thread's */
} kern_attention;

/* Of one part, below; rows: tokens x heads. */
static inline size_t kern_attention_part_floats(uint32_t rows, uint32_t head_dim)
{
    return (size_t)rows * (2 + (size_t)head_dim);
}

typedef struct kern_ops {
    const char *name; /* "cpu-avx512" */

    /* How well it runs here; 0: not at all. The reason is written either way. */
    int (*probe)(char *reason, size_t reason_size);

    /* Whether weights of the format can be multiplied. */
    bool (*supports)(pd_dtype dtype);
    /* Bytes of the packed matrix; 0: the file's rows are used as they are. */
    size_t (*pack_bytes)(pd_dtype dtype, uint32_t rows, uint32_t cols);
    void (*pack)(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out);

    /* values[col_first ..] of a row to quants, scales and sums; multiples of 32. */
    void (*quantize)(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols);
    /* What quantize left out, values - scale * quant, as the values of row residual_row. */
    void (*residual)(const kern_acts *acts, uint32_t row, uint32_t col_first, uint32_t cols,
                     uint32_t residual_row);
    /* out[n][r] (+)= sum over the segments' columns, for r in row_first .. row_first + rows - 1 and
     * activation rows n in acts_first .. acts_first + acts_rows - 1; out[n - acts_first] is that
     * row. The segments' sums are added as kernels/sum_tree's T(0, count). */
    void (*matmul)(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                   const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                   float *const *out, bool add);
    void (*rms_norm)(const float *x, const float *weight, uint32_t count, float eps, float *out);
    /* Rotates the pairs (2i, 2i+1), i < pairs; table: [pairs] (cos, sin). */
    void (*rope)(float *head, const float *table, uint32_t pairs);
    void (*store_f16)(const float *x, uint32_t count, uint16_t *out);
    /* One token's K or V of a head, in the layout's format, into a block's half of that layer and
     * head: its row, and its scale where the format has them (kernels/kv_row.h). x: [head_dim] */
    void (*store_kv)(const pd_kv_layout *layout, const float *x, uint32_t token, void *half);
    /* gate = gate / (1 + e^-gate) * up */
    void (*silu_mul)(float *gate, const float *up, uint32_t count);
    size_t (*attention_scratch_bytes)(uint32_t heads, uint32_t head_dim);
    void (*attention)(const kern_attention *args);
    /* The same in parts: a part is one split's largest scores, sums and values, [rows], [rows],
     * [rows][head_dim], of tokens x heads rows. Of one token, or of several that all see the whole
     * split, whatever sequences they are of: then position is the split's last or later. */
    void (*attention_part)(const kern_attention *args, uint32_t split, float *part);
    /* One token's parts, every split up to its position's own, joined in order. */
    void (*attention_join)(const kern_attention *args, uint32_t splits, const float *parts);
} kern_ops;

/* device: "cpu" (the highest score), or a table's name. PD_E_UNSUPPORTED: no such table in this
 * build, or its probe says no (logged with the reason). */
PD_CHECKED pd_status kern_ops_choose(const char *device, const kern_ops **ops_out);
/* The tables of this build, reference first; NULL past the end. For tests and status. */
const kern_ops *kern_ops_at(uint32_t index);
