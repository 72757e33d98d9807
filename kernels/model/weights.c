#include "kernels/model/weights.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/number.h"

#include <stdio.h>

/* One pass of build() adds up the arena's bytes, the next fills it. */
typedef struct builder {
    const pd_model_file *file;
    const kern_ops *ops;
    kern_memory *memory; /* NULL in the first pass */
    size_t bytes;
    pd_status status; /* the first failure */
} builder;

static const pd_tensor *find(builder *b, const char *name, uint64_t cols, uint64_t rows)
{
    const pd_tensor *tensor = pd_model_file_tensor(b->file, name);

    if (tensor == NULL || tensor->dims[0] != cols || tensor->dims[1] != rows) {
        pd_log_error("msg=\"kernels: tensor %s\" path=%s tensor=%s cols=%llu rows=%llu",
                     tensor == NULL ? "missing" : "not of the model's shape",
                     pd_model_file_path(b->file), name, (unsigned long long)cols,
                     (unsigned long long)rows);
        b->status = PD_E_INVALID;
        return NULL;
    }
    return tensor;
}

static bool check_format(builder *b, const pd_tensor *tensor)
{
    if (b->ops->supports(tensor->dtype))
        return true;
    pd_log_error("msg=\"kernels: no kernels for the weight format\" path=%s tensor=%s format=%s "
                 "backend=%s",
                 pd_model_file_path(b->file), tensor->name, pd_dtype_info_of(tensor->dtype)->name,
                 b->ops->name);
    b->status = PD_E_UNSUPPORTED;
    return false;
}

static void *take(builder *b, size_t bytes)
{
    b->bytes += kern_memory_round(bytes);
    return b->memory == NULL ? NULL : kern_memory_take(b->memory, bytes);
}

static void add_norm(builder *b, const char *name, uint32_t count, const float **norm_out)
{
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, count, 1) : NULL;

    if (tensor == NULL || !check_format(b, tensor))
        return;
    float *norm = take(b, count * sizeof *norm);
    if (norm != NULL)
        kern_row_to_f32(tensor->dtype, tensor->data, count, norm);
    *norm_out = norm;
}

static void add_matrix(builder *b, const char *name, uint32_t cols, uint32_t rows,
                       uint32_t segments, kern_matrix *matrix_out)
{
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, cols, rows) : NULL;

    if (tensor == NULL)
        return;
    if (!check_format(b, tensor))
        return;
    *matrix_out = (kern_matrix){.dtype = tensor->dtype,
                                .rows = rows,
                                .cols = cols,
                                .segments = segments,
                                .data = tensor->data};
    size_t packed_bytes = b->ops->pack_bytes(tensor->dtype, rows, cols);
    if (packed_bytes == 0)
        return;
    void *packed = take(b, packed_bytes);
    if (packed != NULL)
        b->ops->pack(tensor->dtype, rows, cols, tensor->data, packed);
    matrix_out->data = packed;
}

/* A row-parallel matrix is summed in as many runs of columns as it could have ranks, so that every
 * split gives the same sum. */
static uint32_t segments_of(const pd_model_shape *shape, uint32_t cols)
{
    return shape->kv_heads <= KERN_LEAVES_MAX && cols % (shape->kv_heads * KERN_BLOCK) == 0
               ? shape->kv_heads
               : 1;
}

static void add_layer(builder *b, const pd_model_shape *shape, uint32_t index,
                      kern_layer_weights *layer)
{
    uint32_t q = shape->heads * shape->head_dim, kv = shape->kv_heads * shape->head_dim;
    char name[64];
#define NAMED(suffix) (snprintf(name, sizeof name, "blk.%u." suffix ".weight", index), name)

    add_norm(b, NAMED("attn_norm"), shape->hidden, &layer->attention_norm);
    add_matrix(b, NAMED("attn_q"), shape->hidden, q, 1, &layer->query);
    add_matrix(b, NAMED("attn_k"), shape->hidden, kv, 1, &layer->key);
    add_matrix(b, NAMED("attn_v"), shape->hidden, kv, 1, &layer->value);
    add_matrix(b, NAMED("attn_output"), q, shape->hidden, segments_of(shape, q), &layer->output);
    add_norm(b, NAMED("ffn_norm"), shape->hidden, &layer->ffn_norm);
    add_matrix(b, NAMED("ffn_gate"), shape->hidden, shape->ffn, 1, &layer->gate);
    add_matrix(b, NAMED("ffn_up"), shape->hidden, shape->ffn, 1, &layer->up);
    add_matrix(b, NAMED("ffn_down"), shape->ffn, shape->hidden, segments_of(shape, shape->ffn),
               &layer->down);
#undef NAMED
}

static void build(builder *b, kern_weights *weights)
{
    const pd_model_shape *shape = weights->shape;
    const char *head = shape->tied_embeddings ? "token_embd.weight" : "output.weight";

    weights->embedding = find(b, "token_embd.weight", shape->hidden, shape->vocab);
    if (weights->embedding == NULL || !check_format(b, weights->embedding))
        return;
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        add_layer(b, shape, layer, &weights->layers[layer]);
    add_norm(b, "output_norm.weight", shape->hidden, &weights->output_norm);
    add_matrix(b, head, shape->hidden, shape->vocab, 1, &weights->head);
}

static pd_status check_shape(const pd_model_file *file, const pd_model_shape *shape)
{
    uint32_t group_dims = shape->heads / shape->kv_heads * shape->head_dim;

    if (shape->head_dim % 16 == 0 && group_dims % KERN_BLOCK == 0 &&
        shape->hidden % KERN_BLOCK == 0 && shape->ffn % KERN_BLOCK == 0 &&
        shape->rope_dims % 2 == 0 && shape->rope_dims <= shape->head_dim)
        return PD_OK;
    pd_log_error("msg=\"kernels: a shape the kernels cannot take: head_dim must be a multiple of "
                 "16, hidden, ffn and a KV head's query dimensions multiples of 32\" path=%s "
                 "hidden=%u ffn=%u head_dim=%u heads=%u kv_heads=%u rope_dims=%u",
                 pd_model_file_path(file), shape->hidden, shape->ffn, shape->head_dim, shape->heads,
                 shape->kv_heads, shape->rope_dims);
    return PD_E_UNSUPPORTED;
}

pd_status kern_weights_init(const pd_model_file *file, const kern_ops *ops,
                            kern_weights *weights_out)
{
    kern_weights weights = {.shape = pd_model_file_shape(file)};
    builder sizing = {.file = file, .ops = ops};
    builder filling = {.file = file, .ops = ops, .memory = &weights.memory};
    pd_status status = check_shape(file, weights.shape);

    if (status != PD_OK)
        return status;
    weights.layers = pd_calloc(weights.shape->layers, sizeof *weights.layers);
    if (weights.layers == NULL)
        return PD_E_NOMEM;
    build(&sizing, &weights);
    status = sizing.status;
    if (status == PD_OK)
        status = kern_memory_map(sizing.bytes, &weights.memory);
    if (status == PD_OK) {
        build(&filling, &weights);
        status = filling.status;
    }
    if (status != PD_OK) {
        kern_weights_fini(&weights);
        return status;
    }
    *weights_out = weights;
    return PD_OK;
}

void kern_weights_fini(kern_weights *weights)
{
    kern_memory_unmap(&weights->memory);
    pd_free(weights->layers);
    *weights = (kern_weights){0};
}
