#pragma once

/* kernels/cuda/launch.h - the operations of the CUDA backend, each queued to a stream.
 *
 * Every pointer below is device memory unless it says host. A launcher checks nothing that the
 * model (kernels/cuda/model.c) promises by pd_assert, queues its kernels and returns; errors are
 * gpu.h's. It allocates nothing and decides by its arguments alone, so that it can be recorded in a
 * graph; what changes from step to step in a graph (positions, block tables, tokens) lies in device
 * memory. Whatever a launcher chooses by the number of rows (tiles, splits of work), a row's result
 * is bit for bit the same.
 *
 * Rows. A step has `rows` rows (tokens), padded to what the graph was made for: a row whose
 * position is CU_ROW_NONE is skipped by whatever writes KV, and what is computed for it is never
 * read. Shapes are [outermost] .. [innermost]. f32 unless said. */

#include "common/kv/layout.h"
#include "kernels/cuda/gpu.h"
#include "kernels/sum_tree.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CU_ROW_NONE UINT32_MAX

/* A weight matrix, out = W x. data is packed by cu_pack. */
typedef struct cu_matrix {
    pd_dtype dtype;
    uint32_t rows, cols;
    uint32_t leaves; /* segments of cols that this rank has: 1 for column-parallel matrices */
    uint32_t leaf_first, leaves_all; /* their place in the tree of all ranks (kernels/sum_tree.h) */
    const void *data;
} cu_matrix;

/* Rows of activations. What a matrix needs of them depends on its format: quantised weights take
 * blocks of 32 int8 (as kernels/ops.h's kern_acts, the same bits), 16-bit weights take values
 * rounded to their own format. A producer writes what is not NULL. */
typedef struct cu_acts {
    uint32_t cols;
    float *values;       /* [rows][cols] */
    int8_t *quants;      /* [rows][cols] */
    float *scales;       /* [rows][cols / 32] */
    float *sums;         /* [rows][cols / 32]: scale * (sum of the block's quants) */
    int32_t *quant_sums; /* [rows][cols / 32] */
    uint16_t *halves;    /* [rows][cols], f16 or bf16 */
    bool halves_are_bf16;
} cu_acts;

/* Rows [row, row + rows) of decode attention, whose items are [item, item + items). */
typedef struct cu_run {
    uint32_t row, rows, item, items;
} cu_run;

/* One step's rows, all in one upload. */
typedef struct cu_step {
    uint32_t rows;            /* padded */
    const uint32_t *token;    /* [rows] */
    const uint32_t *position; /* [rows], CU_ROW_NONE: padding */
    const uint32_t *table;    /* [rows] where the row's block table starts in blocks */
    const pd_block *blocks;   /* block tables, each from position 0 */
    /* Query tiles of prefill attention: consecutive rows of one sequence, at most
     * CU_TILE_ROWS each. */
    uint32_t tiles;            /* padded; a tile of 0 rows is skipped */
    const uint32_t *tile_row;  /* [tiles] first row */
    const uint32_t *tile_rows; /* [tiles] rows */
    /* Decode attention's list (kernels/cuda/items.h), of rows that are in no tile; a decode step's
     * is padded by items of no row. A run's items are as many as its rows only where no row has
     * more than one. */
    const uint32_t *item_row; /* [items] CU_ROW_NONE: nothing to do */
    const uint32_t *row_item; /* [rows] the row's first item */
    uint32_t runs;            /* each is a launch; a row that has items is in one */
    const cu_run *run;        /* host, [runs] */
} cu_step;
#define CU_TILE_ROWS 16

/* The pool, this rank's part of it: KV heads are the rank's own, numbered from 0. */
typedef struct cu_kv {
    void *pool;
    uint32_t layers, kv_heads, head_dim, block_tokens, group_layers, blocks;
    uint64_t token_bytes, half_bytes, layer_bytes; /* as pd_kv_layout */
    /* Hashes for seals (common/kv/seal: pd_seal_tiles, same numbers); NULL: nobody seals.
     * A unit is one layer and head of a block, in the pool's order. */
    uint16_t *covered;         /* [units] tokens */
    uint64_t *tile_sums;       /* [units][k, v][tiles of a half] */
    const uint64_t *tile_keys; /* [PD_TILE_WORDS] */
} cu_kv;

/* --- weights (host functions; matmul.cu) --- */

bool cu_supports(pd_dtype dtype);
/* Packed bytes of `rows` rows and the columns [col_from, col_to) of a matrix with `cols` columns,
 * and the packing, from the file's rows (host) to host memory. Columns are multiples of 32 for
 * quantised formats, of 16 for f16 and bf16, and so are a leaf's. What is packed in pieces, all but
 * the last of a multiple of CU_PACK_ROWS rows, is one behind the other what is packed at once. */
#define CU_PACK_ROWS 16
#define CU_PACK_COLS 16 /* of 16-bit formats */
uint64_t cu_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols);
void cu_pack(pd_dtype dtype, uint32_t rows, uint32_t file_cols, uint32_t col_from, uint32_t col_to,
             const void *file_rows, void *out);

/* --- matmul.cu --- */

/* out[n][r] = W[r] . acts[n] for n < rows; out_stride floats from row to row. matrix->leaves is 1.
 */
PD_CHECKED pd_status cu_matmul(gpu_stream *stream, const cu_matrix *matrix, const cu_acts *acts,
                               uint32_t rows, float *out, uint64_t out_stride);
/* The sums of the fewest tree nodes that cover the rank's leaves (kern_nodes_of):
 * out[node][n][r]; bit-equal at every split of the leaves. */
PD_CHECKED pd_status cu_matmul_nodes(gpu_stream *stream, const cu_matrix *matrix,
                                     const cu_acts *acts, uint32_t rows, float *out);

/* --- matmul_plain.cu --- */

/* A packed f16 or bf16 matrix as rows of columns: out[rows][cols]; cols is a multiple of 16. */
PD_CHECKED pd_status cu_unpack(gpu_stream *stream, uint32_t rows, uint32_t cols, const void *packed,
                               void *out);
/* differ[0] becomes 1 where words of a and b are not the same, else it stays. */
PD_CHECKED pd_status cu_compare(gpu_stream *stream, const void *a, const void *b, uint64_t words,
                                uint32_t *differ);

/* --- rows.cu: what works on whole rows --- */

/* x[row] = the embedding of token[row], zeros for padding; table: the file's rows (device), dtype's
 * format. */
PD_CHECKED pd_status cu_embed(gpu_stream *stream, const cu_step *step, pd_dtype dtype,
                              const void *table, uint32_t hidden, uint64_t row_bytes, float *x);

/* x[row] += each term's tree sum, term by term; a term is all ranks' nodes:
 * parts[rank][term][node][row][hidden], with room for kern_nodes_most nodes a rank and term. ranks
 * 0: nothing is added. Then, where norm_weight is not NULL, out = rms_norm(x) * norm_weight,
 * written in every form that out asks for. The 16-lane order of kernels/number.h. hidden: a
 * multiple of 32, at most CU_HIDDEN_MAX. */
#define CU_HIDDEN_MAX 16384
typedef struct cu_residual {
    const float *parts;
    uint32_t ranks, terms, leaves_all;
} cu_residual;
PD_CHECKED pd_status cu_residual_norm(gpu_stream *stream, uint32_t rows, uint32_t hidden, float *x,
                                      const cu_residual *add, const float *norm_weight, float eps,
                                      const cu_acts *out);
/* The same norm of selected rows: out row i is of x row logits_row[i]; CU_ROW_NONE: padding, its
 * row is not written. */
PD_CHECKED pd_status cu_norm_rows(gpu_stream *stream, const uint32_t *logits_row, uint32_t count,
                                  uint32_t hidden, const float *x, const float *norm_weight,
                                  float eps, const cu_acts *out);
/* values to every other form that is not NULL. residual: acts for the rounding residuals (values -
 * scale * quant, quantised in turn), as kern_ops.residual; NULL: none. */
PD_CHECKED pd_status cu_quantize(gpu_stream *stream, uint32_t rows, const cu_acts *acts,
                                 const cu_acts *residual);
/* gate_up[row]: [gate: ffn][up: ffn]; out = silu(gate) * up in every form that out asks for. */
PD_CHECKED pd_status cu_silu_mul(gpu_stream *stream, uint32_t rows, uint32_t ffn,
                                 const float *gate_up, const cu_acts *out);

/* --- append.cu --- */

/* qkv[row]: [heads q][kv_heads k][kv_heads v][head_dim]. Rotates q (in place) and k by
 * rope[position][rope_dims / 2] (cos, sin), writes K and V to the pool as f16, and brings the
 * tiles' hashes and covered counts up to date, as pd_seal_tiles_wrote for each run of rows of one
 * sequence in one block (where that changes nothing, since what is before was not covered, hashes
 * of later tiles may be written: nothing reads a hash that is not covered). Rows of one sequence
 * have the same table, other sequences others; a sequence's rows are neighbours by rising position,
 * and a block that is written belongs to one sequence. head_dim: a multiple of 16, at most
 * CU_HEAD_DIM_MAX. */
#define CU_HEAD_DIM_MAX 512
PD_CHECKED pd_status cu_append(gpu_stream *stream, const cu_step *step, const cu_kv *kv,
                               uint32_t layer, uint32_t heads, uint32_t rope_dims,
                               const float *rope, float *qkv);

/* --- attention.cu --- */

/* Query rows of qkv (rotated) against the pool, causal; out[row][heads][head_dim]. Partial sums
 * cover KERN_SPLIT_TOKENS (256) positions at absolute places and are merged in order. A row comes
 * by the step's items, a sequence of its own each (decode), or by its tiles (chunks), whose
 * positions positions_max bounds; how, and beside what, changes no bit. Padding that has an item
 * becomes zeros; what is in neither is not computed. A token's K and V that are no numbers reach
 * its own row and later ones alone: some element of theirs is no number, too. head_dim: 32, 64, 80,
 * 96, 128, 256, others are PD_E_UNSUPPORTED. scratch: cu_attention_item_bytes for each item of the
 * largest run, and where there are tiles cu_attention_scratch_bytes, if that is more: at most
 * CU_ATTENTION_SCRATCH, and a word a row and head. */
bool cu_attention_supports(uint32_t head_dim);
#define CU_ATTENTION_SCRATCH (64u << 20)
uint64_t cu_attention_item_bytes(uint32_t heads, uint32_t head_dim);
uint64_t cu_attention_scratch_bytes(uint32_t rows, uint32_t heads, uint32_t head_dim,
                                    uint32_t positions_max);
PD_CHECKED pd_status cu_attention(gpu_stream *stream, const cu_step *step, const cu_kv *kv,
                                  uint32_t layer, uint32_t heads, uint32_t positions_max,
                                  float scale, const float *qkv, float *out, void *scratch);

/* --- sample.cu --- */

typedef struct cu_sampling { /* as kern_sampling, and where in the answer */
    float temperature, top_p;
    uint32_t top_k, choice;
    uint64_t seed;
    uint32_t position, pad;
} cu_sampling;
/* token[i] = kern_sample(logits[i]), bit for bit. broken[0] is set to 1 when a logit is not finite.
 * scratch: cu_sample_scratch_bytes. */
uint64_t cu_sample_scratch_bytes(uint32_t count, uint32_t vocab);
PD_CHECKED pd_status cu_sample(gpu_stream *stream, uint32_t count, uint32_t vocab,
                               const float *logits, const cu_sampling *sampling, uint32_t *token,
                               uint32_t *broken, void *scratch);

/* --- kv.cu --- */

/* One seal each: of heads [head_from, head_to) of a block in a group; as pd_seal_compute. */
typedef struct cu_seal_item {
    uint64_t key; /* pd_seal_place_key of the place */
    pd_block block;
    uint32_t group, valid_tokens, head_from, head_to;
    uint32_t head_first; /* number in the model of the pool's head 0 */
} cu_seal_item;
/* seals[i] of items[i]. from_bytes: the content is hashed (a receiver's check), and what was hashed
 * becomes what the tiles say; else the tiles' sums are used where they cover the block. Items of
 * one launch that are hashed name each layer and head of a block once. */
PD_CHECKED pd_status cu_seal(gpu_stream *stream, const cu_kv *kv, uint32_t count,
                             const cu_seal_item *items, bool from_bytes, uint64_t *seals);
/* Blocks of a group, heads [head_from, head_to), to or from one run of bytes
 * [block][head][layer in group][k, v][token][head_dim]. What tiles said of blocks that are
 * scattered to is forgotten. */
PD_CHECKED pd_status cu_kv_gather(gpu_stream *stream, const cu_kv *kv, uint32_t group,
                                  uint32_t count, const pd_block *blocks, uint32_t head_from,
                                  uint32_t head_to, void *out);
PD_CHECKED pd_status cu_kv_scatter(gpu_stream *stream, const cu_kv *kv, uint32_t group,
                                   uint32_t count, const pd_block *blocks, uint32_t head_from,
                                   uint32_t head_to, const void *in);

#ifdef __cplusplus
}
#endif
