#include "kernels/cuda/weights.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/cuda/stage.h"
#include "kernels/file_row.h"

#include <stdio.h>
#include <string.h>

#define ALIGNMENT   256
#define PIECE_BYTES (16u << 20)

/* One pass of build() says where things lie, the next fills them. */
typedef struct builder {
    const pd_model_file *file;
    cu_weights *weights;
    cu_stage *stage; /* NULL in the first pass */
    uint64_t bytes;
    pd_status status; /* the first failure */
} builder;

/* A tensor's rows [row_first, row_first + rows) and columns [col_first, col_first + cols). */
typedef struct part {
    const pd_tensor *tensor;
    uint32_t row_first, rows, col_first, cols;
} part;

uint32_t cu_forms_of(pd_dtype dtype)
{
    switch (dtype) {
    case PD_F32: return CU_FORM_VALUES;
    case PD_F16: return CU_FORM_F16;
    case PD_BF16: return CU_FORM_BF16;
    default: return CU_FORM_QUANTS;
    }
}

uint32_t cu_leaves_of(const pd_model_shape *shape, uint32_t cols)
{
    return shape->kv_heads <= KERN_LEAVES_MAX && cols % (shape->kv_heads * 32) == 0
               ? shape->kv_heads
               : 1;
}

static const pd_tensor *find(builder *b, const char *name, uint64_t cols, uint64_t rows)
{
    const pd_tensor *tensor = pd_model_file_tensor(b->file, name);

    if (tensor == NULL || tensor->dims[0] != cols || tensor->dims[1] != rows) {
        pd_log_error("msg=\"cuda: tensor %s\" path=%s tensor=%s cols=%llu rows=%llu",
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
    if (cu_supports(tensor->dtype))
        return true;
    pd_log_error("msg=\"cuda: no kernels for the weight format\" path=%s tensor=%s format=%s",
                 pd_model_file_path(b->file), tensor->name, pd_dtype_info_of(tensor->dtype)->name);
    b->status = PD_E_UNSUPPORTED;
    return false;
}

/* The place of the next bytes: an address only where there is memory already. */
static void *take(builder *b, uint64_t bytes)
{
    uint64_t at = b->bytes;

    b->bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return b->stage == NULL ? NULL : (uint8_t *)b->weights->memory + at;
}

static uint64_t row_bytes_of(const pd_tensor *tensor)
{
    return tensor->bytes / tensor->dims[1];
}

/* ---- what is copied as it is ---- */

static void add_norm(builder *b, const char *name, uint32_t count, const float **norm_out)
{
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, count, 1) : NULL;
    void *piece;

    if (tensor == NULL)
        return;
    float *norm = take(b, count * sizeof *norm);
    *norm_out = norm;
    if (b->stage == NULL)
        return;
    b->status = cu_stage_next(b->stage, &piece);
    if (b->status != PD_OK)
        return;
    kern_row_to_f32(tensor->dtype, tensor->data, count, piece);
    b->status = cu_stage_send(b->stage, norm, count * sizeof *norm);
}

static void add_embedding(builder *b)
{
    cu_weights *w = b->weights;
    const pd_tensor *tensor = find(b, "token_embd.weight", w->shape.hidden, w->shape.vocab);

    if (tensor == NULL || !check_format(b, tensor))
        return;
    void *rows = take(b, tensor->bytes);
    w->embedding_dtype = tensor->dtype;
    w->embedding_row_bytes = row_bytes_of(tensor);
    w->embedding = rows;
    if (b->stage != NULL)
        b->status = cu_stage_copy(b->stage, rows, tensor->data, tensor->bytes);
}

/* ---- matrices ---- */

/* Packs the part piece by piece right into the pinned memory that is sent. */
static pd_status send_part(cu_stage *stage, const part *p, uint8_t *device)
{
    uint64_t unit_bytes = cu_pack_bytes(p->tensor->dtype, CU_PACK_ROWS, p->cols);
    uint64_t file_row_bytes = row_bytes_of(p->tensor);
    uint32_t piece_rows = (uint32_t)(cu_stage_piece_bytes(stage) / unit_bytes) * CU_PACK_ROWS;
    pd_status status = PD_OK;

    pd_assert(piece_rows > 0);
    for (uint32_t row = 0; status == PD_OK && row < p->rows; row += piece_rows) {
        uint32_t rows = p->rows - row < piece_rows ? p->rows - row : piece_rows;
        uint64_t bytes = cu_pack_bytes(p->tensor->dtype, rows, p->cols);
        void *piece;
        status = cu_stage_next(stage, &piece);
        if (status != PD_OK)
            break;
        cu_pack(p->tensor->dtype, rows, (uint32_t)p->tensor->dims[0], p->col_first,
                p->col_first + p->cols,
                (const uint8_t *)p->tensor->data + (p->row_first + row) * file_row_bytes, piece);
        status = cu_stage_send(stage, device, bytes);
        device += bytes;
    }
    return status;
}

/* Neighbouring parts of one format as one matrix: what is packed in pieces of CU_PACK_ROWS rows can
 * be put together. */
static void add_parts(builder *b, const part *parts, uint32_t count, cu_matrix *matrix_out)
{
    uint64_t bytes[CU_GROUP_MAX], bytes_all = 0;
    uint32_t rows = 0;

    for (uint32_t i = 0; i < count; i++) {
        bytes[i] = cu_pack_bytes(parts[i].tensor->dtype, parts[i].rows, parts[i].cols);
        bytes_all += bytes[i];
        rows += parts[i].rows;
    }
    uint8_t *device = take(b, bytes_all);
    *matrix_out = (cu_matrix){.dtype = parts[0].tensor->dtype,
                              .rows = rows,
                              .cols = parts[0].cols,
                              .leaves = 1,
                              .leaves_all = 1,
                              .data = device};
    for (uint32_t i = 0; b->stage != NULL && b->status == PD_OK && i < count; i++) {
        b->status = send_part(b->stage, &parts[i], device);
        device += bytes[i];
    }
}

static void add_group(builder *b, const part *parts, uint32_t count, cu_group *group)
{
    cu_group made = {0};

    for (uint32_t i = 0, some; i < count; i += some) {
        for (some = 1; i + some < count; some++)
            if (parts[i + some].tensor->dtype != parts[i].tensor->dtype ||
                parts[i + some - 1].rows % CU_PACK_ROWS != 0)
                break;
        made.first[made.count] = made.rows;
        add_parts(b, &parts[i], some, &made.matrix[made.count]);
        made.rows += made.matrix[made.count].rows;
        made.forms |= cu_forms_of(parts[i].tensor->dtype);
        made.count++;
    }
    *group = made;
}

/* Rank r's rows of a matrix with rows rows in all; false after a failure. */
static bool find_rows(builder *b, const char *name, uint32_t rows, part *part_out)
{
    const cu_weights *w = b->weights;
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, w->shape.hidden, rows) : NULL;

    if (tensor == NULL || !check_format(b, tensor))
        return false;
    *part_out = (part){.tensor = tensor,
                       .row_first = w->rank * (rows / w->ranks),
                       .rows = rows / w->ranks,
                       .cols = w->shape.hidden};
    return true;
}

/* Its columns of a matrix with cols columns in all, which are leaves of the sum. */
static void add_columns(builder *b, const char *name, uint32_t cols, uint32_t leaves_all,
                        cu_matrix *matrix_out)
{
    const cu_weights *w = b->weights;
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, cols, w->shape.hidden) : NULL;

    if (tensor == NULL || !check_format(b, tensor))
        return;
    if (cols / leaves_all % pd_dtype_info_of(tensor->dtype)->block_weights != 0 ||
        (tensor->dtype != PD_F32 && cols / leaves_all % CU_PACK_COLS != 0)) {
        pd_log_error("msg=\"cuda: a tensor's columns are not cut into whole blocks\" path=%s "
                     "tensor=%s cols=%u leaves=%u",
                     pd_model_file_path(b->file), name, cols, leaves_all);
        b->status = PD_E_UNSUPPORTED;
        return;
    }
    part p = {.tensor = tensor,
              .rows = w->shape.hidden,
              .col_first = w->rank * (cols / w->ranks),
              .cols = cols / w->ranks};
    add_parts(b, &p, 1, matrix_out);
    matrix_out->leaves = leaves_all / w->ranks;
    matrix_out->leaf_first = w->rank * matrix_out->leaves;
    matrix_out->leaves_all = leaves_all;
}

static void add_layer(builder *b, uint32_t index, cu_layer_weights *layer)
{
    const pd_model_shape *shape = &b->weights->shape;
    uint32_t q = shape->heads * shape->head_dim, kv = shape->kv_heads * shape->head_dim;
    part parts[3];
    char name[64];
#define NAMED(suffix) (snprintf(name, sizeof name, "blk.%u." suffix ".weight", index), name)

    add_norm(b, NAMED("attn_norm"), shape->hidden, &layer->attention_norm);
    if (find_rows(b, NAMED("attn_q"), q, &parts[0]) &&
        find_rows(b, NAMED("attn_k"), kv, &parts[1]) &&
        find_rows(b, NAMED("attn_v"), kv, &parts[2]))
        add_group(b, parts, 3, &layer->qkv);
    add_columns(b, NAMED("attn_output"), q, b->weights->leaves_output, &layer->output);
    add_norm(b, NAMED("ffn_norm"), shape->hidden, &layer->ffn_norm);
    if (find_rows(b, NAMED("ffn_gate"), shape->ffn, &parts[0]) &&
        find_rows(b, NAMED("ffn_up"), shape->ffn, &parts[1]))
        add_group(b, parts, 2, &layer->gate_up);
    add_columns(b, NAMED("ffn_down"), shape->ffn, b->weights->leaves_down, &layer->down);
#undef NAMED
}

static void build(builder *b)
{
    cu_weights *w = b->weights;
    part head = {.rows = w->shape.vocab, .cols = w->shape.hidden};

    add_embedding(b);
    for (uint32_t layer = 0; layer < w->shape.layers; layer++)
        add_layer(b, layer, &w->layers[layer]);
    add_norm(b, "output_norm.weight", w->shape.hidden, &w->output_norm);
    if (b->status != PD_OK || w->rank != 0)
        return;
    head.tensor = find(b, w->shape.tied_embeddings ? "token_embd.weight" : "output.weight",
                       w->shape.hidden, w->shape.vocab);
    if (head.tensor != NULL && check_format(b, head.tensor))
        add_group(b, &head, 1, &w->head);
}

/* ---- planning ---- */

static pd_status check_shape(const pd_model_file *file, const pd_model_shape *shape)
{
    uint32_t group_dims = shape->heads / shape->kv_heads * shape->head_dim;

    if (group_dims % 32 == 0 && shape->hidden % 32 == 0 && shape->ffn % 32 == 0 &&
        shape->rope_dims % 2 == 0 && shape->rope_dims <= shape->head_dim &&
        shape->kv_heads <= KERN_LEAVES_MAX && shape->hidden <= CU_HIDDEN_MAX &&
        cu_attention_supports(shape->head_dim))
        return PD_OK;
    pd_log_error(
        "msg=\"cuda: a shape the kernels cannot take: head_dim must be 32, 64, 80, 96, 128 "
        "or 256, hidden (at most %d), ffn and a KV head's query dimensions "
        "multiples of 32, KV heads at most %d\" path=%s hidden=%u ffn=%u head_dim=%u "
        "heads=%u kv_heads=%u rope_dims=%u",
        CU_HIDDEN_MAX, KERN_LEAVES_MAX, pd_model_file_path(file), shape->hidden, shape->ffn,
        shape->head_dim, shape->heads, shape->kv_heads, shape->rope_dims);
    return PD_E_UNSUPPORTED;
}

static pd_status split(const pd_model_file *file, cu_weights *w)
{
    const pd_model_shape *shape = &w->shape;

    w->leaves_output = cu_leaves_of(shape, shape->heads * shape->head_dim);
    w->leaves_down = cu_leaves_of(shape, shape->ffn);
    if (shape->kv_heads % w->ranks != 0 || w->leaves_output % w->ranks != 0 ||
        w->leaves_down % w->ranks != 0) {
        pd_log_error("msg=\"cuda: the model cannot be split over so many ranks: they must divide "
                     "the KV heads, and ffn into multiples of 32 a KV head\" path=%s ranks=%u "
                     "kv_heads=%u ffn=%u",
                     pd_model_file_path(file), w->ranks, shape->kv_heads, shape->ffn);
        return PD_E_UNSUPPORTED;
    }
    w->heads = shape->heads / w->ranks;
    w->kv_heads = shape->kv_heads / w->ranks;
    w->ffn = shape->ffn / w->ranks;
    return PD_OK;
}

pd_status cu_weights_plan(const pd_model_file *file, uint32_t rank, uint32_t ranks,
                          cu_weights *weights_out)
{
    cu_weights w = {.shape = *pd_model_file_shape(file), .rank = rank, .ranks = ranks};
    builder planning = {.file = file, .weights = &w};

    pd_assert(ranks > 0 && rank < ranks);
    pd_status status = check_shape(file, &w.shape);
    if (status == PD_OK)
        status = split(file, &w);
    if (status != PD_OK)
        return status;
    w.layers = pd_calloc(w.shape.layers, sizeof *w.layers);
    if (w.layers == NULL)
        return PD_E_NOMEM;
    build(&planning);
    if (planning.status != PD_OK) {
        cu_weights_fini(&w);
        return planning.status;
    }
    w.bytes = planning.bytes;
    *weights_out = w;
    return PD_OK;
}

/* ---- loading ---- */

/* A piece holds the rows that are packed together of the widest matrix, and a norm. */
static uint64_t piece_bytes_of(const cu_weights *w)
{
    const pd_dtype dtypes[] = {PD_F32, PD_F16, PD_BF16, PD_Q4_0, PD_Q4_1, PD_Q8_0};
    uint32_t cols = w->shape.hidden;
    uint64_t bytes = PIECE_BYTES;

    cols = w->shape.heads * w->shape.head_dim > cols ? w->shape.heads * w->shape.head_dim : cols;
    cols = w->shape.ffn > cols ? w->shape.ffn : cols;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        uint64_t unit = cu_supports(dtypes[i]) ? cu_pack_bytes(dtypes[i], CU_PACK_ROWS, cols) : 0;
        bytes = unit > bytes ? unit : bytes;
    }
    return bytes;
}

pd_status cu_weights_load(const pd_model_file *file, gpu *g, cu_weights *weights)
{
    builder filling = {.file = file, .weights = weights};

    pd_status status = cu_stage_create(g, piece_bytes_of(weights), &filling.stage);
    if (status != PD_OK)
        return status;
    weights->device = g;
    status = gpu_alloc(g, weights->bytes, &weights->memory);
    if (status == PD_OK) {
        build(&filling);
        status = filling.status;
    }
    if (status == PD_OK) {
        pd_assert(filling.bytes == weights->bytes);
        status = cu_stage_finish(filling.stage);
    }
    cu_stage_destroy(filling.stage);
    return status;
}

void cu_weights_fini(cu_weights *weights)
{
    if (weights->memory != NULL)
        gpu_free(weights->device, weights->memory);
    pd_free(weights->layers);
    *weights = (cu_weights){0};
}
