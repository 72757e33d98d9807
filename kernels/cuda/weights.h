#pragma once

/* kernels/cuda/weights.h - a rank's share of a model's matrices, packed, in one piece of device
 * memory.
 *
 * Made once at start and read only afterwards. Rank r of n has neighbouring heads, KV heads and
 * columns of the feed-forward part: rows of the matrices whose products it uses alone, columns of
 * those (attn_output, ffn_down) whose products are sums over all ranks (kernels/sum_tree.h). Norms
 * and the embedding are everyone's; the head is rank 0's alone, which samples. */

#include "common/model_file/model_file.h"
#include "kernels/cuda/launch.h"

/* Forms of activations that a matrix takes; bits. */
enum {
    CU_FORM_QUANTS = 1, /* quants, scales, sums, quant_sums */
    CU_FORM_F16 = 2,
    CU_FORM_BF16 = 4,
    CU_FORM_VALUES = 8, /* f32 */
};

/* Matrices that are multiplied by the same activations, with their results side by side in a row:
 * q, k, v. Those that share a format are one matrix. */
#define CU_GROUP_MAX 3
typedef struct cu_group {
    uint32_t count, forms;
    uint32_t rows; /* of all */
    cu_matrix matrix[CU_GROUP_MAX];
    uint32_t first[CU_GROUP_MAX]; /* where in the result */
} cu_group;

typedef struct cu_layer_weights {
    const float *attention_norm, *ffn_norm; /* [hidden] */
    cu_group qkv, gate_up;
    cu_matrix output, down;
} cu_layer_weights;

typedef struct cu_weights {
    pd_model_shape shape; /* the file's */
    uint32_t rank, ranks;
    uint32_t heads, kv_heads, ffn;       /* the rank's */
    uint32_t leaves_output, leaves_down; /* of all ranks */
    pd_dtype embedding_dtype;
    uint64_t embedding_row_bytes;
    const void *embedding; /* the file's rows */
    const float *output_norm;
    cu_group head;            /* count 0: another rank's */
    cu_layer_weights *layers; /* [shape.layers] */
    gpu *device;
    void *memory;
    uint64_t bytes;
} cu_weights;

/* What a matrix of the format takes. */
uint32_t cu_forms_of(pd_dtype dtype);
/* Leaves of the sum over a row-parallel matrix's columns: one a KV head, where that cuts the
 * columns into whole 32-blocks, else one. */
uint32_t cu_leaves_of(const pd_model_shape *shape, uint32_t cols);

/* Where everything will lie, and how many bytes: touches neither the device nor the weights' bytes.
 * Errors, logged with the tensor's name: PD_E_UNSUPPORTED (a format without kernels, a shape they
 * cannot take, a split that does not divide it), PD_E_INVALID (a tensor missing or not of the
 * model's shape), PD_E_NOMEM. */
PD_CHECKED pd_status cu_weights_plan(const pd_model_file *file, uint32_t rank, uint32_t ranks,
                                     cu_weights *weights_out);
/* Takes the memory and fills it. What was planned is ended by cu_weights_fini, too. */
PD_CHECKED pd_status cu_weights_load(const pd_model_file *file, gpu *g, cu_weights *weights);
void cu_weights_fini(cu_weights *weights);
