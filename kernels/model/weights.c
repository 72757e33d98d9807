#include "kernels/model/weights.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/file_row.h"
#include "kernels/number.h"

#include <stdio.h>
#include <string.h>

/* One pass of build() adds up the arena's bytes, another fills it, unless somebody did, and the
 * last finds its parts. */
typedef struct builder {
    const pd_model_file *file;
    const kern_ops *ops;
    const kern_split *split;
    kern_memory *memory; /* NULL in the first pass */
    bool filled;         /* memory has the weights, and may be read only */
    size_t bytes;
    uint64_t layout;  /* a hash of the parts so far */
    pd_status status; /* the first failure */
} builder;

static void note(builder *b, const void *bytes, size_t len)
{
    b->layout = pd_hash64(bytes, len, b->layout);
}

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
    const uint64_t part[] = {b->bytes, bytes};

    note(b, part, sizeof part);
    b->bytes += kern_memory_round(bytes);
    return b->memory == NULL ? NULL : kern_memory_take(b->memory, bytes);
}

static void add_norm(builder *b, const char *name, uint32_t count, const float **norm_out)
{
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, count, 1) : NULL;

    if (tensor == NULL || !check_format(b, tensor))
        return;
    float *norm = take(b, count * sizeof *norm);
    if (norm != NULL && !b->filled)
        kern_row_to_f32(tensor->dtype, tensor->data, count, norm);
    *norm_out = norm;
}

/* The rows and columns of a file's matrix that this rank has. */
typedef struct part {
    uint32_t row_first, rows, col_first, cols;
} part;

static part rows_of(const builder *b, uint32_t cols, uint32_t rows)
{
    uint32_t own = rows / b->split->ranks;

    return (part){.row_first = b->split->rank * own, .rows = own, .cols = cols};
}

static part cols_of(const builder *b, uint32_t cols, uint32_t rows)
{
    uint32_t own = cols / b->split->ranks;

    return (part){.rows = rows, .col_first = b->split->rank * own, .cols = own};
}

static uint64_t bytes_of(pd_dtype dtype, uint32_t cols)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);

    return (uint64_t)(cols / info->block_weights) * info->block_bytes;
}

static void copy_columns(const pd_tensor *tensor, const part *own, const uint8_t *rows, void *out)
{
    uint64_t file_bytes = bytes_of(tensor->dtype, (uint32_t)tensor->dims[0]);
    uint64_t bytes = bytes_of(tensor->dtype, own->cols);

    rows += bytes_of(tensor->dtype, own->col_first);
    for (uint32_t row = 0; row < own->rows; row++)
        memcpy((uint8_t *)out + row * bytes, rows + row * file_bytes, bytes);
}

/* Where columns are left out the rows are copied: into the arena, or on the way to the packing. */
static const void *place_columns(builder *b, const pd_tensor *tensor, const part *own,
                                 const uint8_t *rows, void *packed)
{
    uint64_t bytes = own->rows * bytes_of(tensor->dtype, own->cols);

    if (packed == NULL) {
        void *copy = take(b, bytes);
        if (copy != NULL && !b->filled)
            copy_columns(tensor, own, rows, copy);
        return copy;
    }
    if (b->filled)
        return packed;
    void *copy = pd_malloc(bytes);
    if (copy == NULL) {
        b->status = PD_E_NOMEM;
        return NULL;
    }
    copy_columns(tensor, own, rows, copy);
    b->ops->pack(tensor->dtype, own->rows, own->cols, copy, packed);
    pd_free(copy);
    return packed;
}

/* segments: of the whole matrix's columns. */
static void add_matrix(builder *b, const char *name, uint32_t cols, uint32_t rows, part own,
                       uint32_t segments, kern_matrix *matrix_out)
{
    const pd_tensor *tensor = b->status == PD_OK ? find(b, name, cols, rows) : NULL;

    if (tensor == NULL)
        return;
    if (!check_format(b, tensor))
        return;
    if (own.cols % pd_dtype_info_of(tensor->dtype)->block_weights != 0) {
        pd_log_error("msg=\"kernels: a rank's columns are not whole blocks of the weight format\" "
                     "path=%s tensor=%s format=%s columns=%u ranks=%u block=%u",
                     pd_model_file_path(b->file), name, pd_dtype_info_of(tensor->dtype)->name,
                     own.cols, b->split->ranks, pd_dtype_info_of(tensor->dtype)->block_weights);
        b->status = PD_E_UNSUPPORTED;
        return;
    }
    const uint64_t is[] = {tensor->dtype, cols,          rows,    own.row_first,
                           own.rows,      own.col_first, own.cols};
    note(b, name, strlen(name));
    note(b, is, sizeof is);
    const uint8_t *first =
        (const uint8_t *)tensor->data + own.row_first * bytes_of(tensor->dtype, cols);
    *matrix_out =
        (kern_matrix){.dtype = tensor->dtype,
                      .rows = own.rows,
                      .cols = own.cols,
                      .segments = own.cols == cols ? segments : segments / b->split->ranks,
                      .data = first};
    size_t packed_bytes = b->ops->pack_bytes(tensor->dtype, own.rows, own.cols);
    void *packed = packed_bytes == 0 ? NULL : take(b, packed_bytes);
    if (own.cols < cols) {
        if (packed != NULL || packed_bytes == 0)
            matrix_out->data = place_columns(b, tensor, &own, first, packed);
    } else if (packed_bytes > 0) {
        if (packed != NULL && !b->filled)
            b->ops->pack(tensor->dtype, own.rows, own.cols, first, packed);
        matrix_out->data = packed;
    }
}

static void add_layer(builder *b, const pd_model_shape *shape, uint32_t index,
                      kern_layer_weights *layer)
{
    uint32_t q = shape->heads * shape->head_dim, kv = shape->kv_heads * shape->head_dim;
    uint32_t ffn = shape->ffn;
    char name[64];
#define NAMED(suffix) (snprintf(name, sizeof name, "blk.%u." suffix ".weight", index), name)

    add_norm(b, NAMED("attn_norm"), shape->hidden, &layer->attention_norm);
    add_matrix(b, NAMED("attn_q"), shape->hidden, q, rows_of(b, shape->hidden, q), 1,
               &layer->query);
    add_matrix(b, NAMED("attn_k"), shape->hidden, kv, rows_of(b, shape->hidden, kv), 1,
               &layer->key);
    add_matrix(b, NAMED("attn_v"), shape->hidden, kv, rows_of(b, shape->hidden, kv), 1,
               &layer->value);
    add_matrix(b, NAMED("attn_output"), q, shape->hidden, cols_of(b, q, shape->hidden),
               kern_split_leaves(shape, q), &layer->output);
    add_norm(b, NAMED("ffn_norm"), shape->hidden, &layer->ffn_norm);
    add_matrix(b, NAMED("ffn_gate"), shape->hidden, ffn, rows_of(b, shape->hidden, ffn), 1,
               &layer->gate);
    add_matrix(b, NAMED("ffn_up"), shape->hidden, ffn, rows_of(b, shape->hidden, ffn), 1,
               &layer->up);
    add_matrix(b, NAMED("ffn_down"), ffn, shape->hidden, cols_of(b, ffn, shape->hidden),
               kern_split_leaves(shape, ffn), &layer->down);
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
    add_matrix(b, head, shape->hidden, shape->vocab, rows_of(b, shape->hidden, shape->vocab), 1,
               &weights->head);
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

/* What the table's pack makes of a few matrices of any bytes: an arena that another version of it
 * has made is then another one. */
static pd_status note_packing(builder *b)
{
    enum { COLS = 1536, ROWS_MAX = 80, BYTES_MAX = COLS * ROWS_MAX * 4 };
    static const uint32_t rows[] = {1, 17, ROWS_MAX};
    uint64_t state = KERN_WEIGHTS_VERSION;
    uint64_t *source = pd_malloc(BYTES_MAX);

    note(b, &state, sizeof state);
    for (size_t i = 0; source != NULL && i < BYTES_MAX / sizeof *source; i++)
        source[i] = pd_random_next(&state);
    for (pd_dtype dtype = 0; source != NULL && dtype < PD_DTYPES; dtype++) {
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            size_t bytes = b->ops->supports(dtype) ? b->ops->pack_bytes(dtype, rows[i], COLS) : 0;
            void *packed = bytes > 0 ? pd_calloc(1, bytes) : NULL;
            if (bytes > 0 && packed == NULL) {
                pd_free(source);
                return PD_E_NOMEM;
            }
            if (bytes > 0)
                b->ops->pack(dtype, rows[i], COLS, source, packed);
            note(b, packed, bytes);
            pd_free(packed);
        }
    }
    pd_free(source);
    return source != NULL ? PD_OK : PD_E_NOMEM;
}

typedef struct filling {
    const builder *sized;
    kern_weights *weights;
} filling;

static pd_status fill(void *ctx, kern_memory *memory)
{
    const filling *f = ctx;
    builder b = {
        .file = f->sized->file, .ops = f->sized->ops, .split = f->sized->split, .memory = memory};

    build(&b, f->weights);
    return b.status;
}

static pd_status fill_arena(builder *sized, const kern_packs_place *place, kern_weights *weights)
{
    filling f = {.sized = sized, .weights = weights};
    kern_packs_want want = {.file = sized->file, .bytes = sized->bytes};

    if (sized->bytes == 0)
        return PD_OK;
    if (place != NULL && sized->bytes >= KERN_WEIGHTS_SHARED_MIN) {
        want.place = *place;
        pd_status status = note_packing(sized);
        if (status != PD_OK)
            return status;
        want.layout = sized->layout;
    }
    return kern_packs_get(&want, fill, &f, &weights->memory);
}

pd_status kern_weights_init(const pd_model_file *file, const kern_ops *ops, const kern_split *split,
                            const kern_packs_place *place, kern_weights *weights_out)
{
    kern_weights weights = {.shape = pd_model_file_shape(file)};
    builder sizing = {.file = file, .ops = ops, .split = split};
    builder finding = {
        .file = file, .ops = ops, .split = split, .memory = &weights.memory, .filled = true};
    pd_status status = check_shape(file, weights.shape);

    if (status != PD_OK)
        return status;
    weights.layers = pd_calloc(weights.shape->layers, sizeof *weights.layers);
    if (weights.layers == NULL)
        return PD_E_NOMEM;
    build(&sizing, &weights);
    status = sizing.status;
    if (status == PD_OK)
        status = fill_arena(&sizing, place, &weights);
    if (status == PD_OK) {
        build(&finding, &weights);
        status = finding.status;
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
