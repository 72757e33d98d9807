#include "kernels/model/forward.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/big_memory.h"
#include "kernels/file_row.h"
#include "kernels/model/attend.h"
#include "kernels/model/exchange.h"
#include "kernels/model/weights.h"
#include "kernels/number.h"
#include "kernels/ops.h"
#include "kernels/team.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define CHUNK_ROWS 32 /* weight rows a thread takes at least: a block of the next activations */
/* Steps of many rows: rows that one thread takes through everything between two attentions, so that
 * what they become stays in its second-level cache. */
#define BLOCK_ROWS_MIN 16
#define BLOCK_ROWS_MAX 64
#define BLOCK_FFN_COLS 256 /* of gate and up at once, likewise */
/* Up to so many rows every thread normalises all of them for itself: cheaper than a barrier. */
#define OWN_ROWS_MAX 4

/* What one thread has for itself. */
typedef struct thread_memory {
    kern_acts norm; /* [OWN_ROWS_MAX] */
} thread_memory;

struct kern_model {
    const kern_ops *ops;
    kern_team *team;
    kern_weights weights;
    kern_split split;
    kern_exchange *exchange; /* NULL: one rank */
    uint32_t context_max, rows_max, logits_rows_max;
    kern_attend *attend;
    kern_memory memory; /* all below but the tables of pointers */
    float *x;           /* [rows][hidden], the residual stream */
    float *qkv;         /* [rows][heads q, kv_heads k, kv_heads v][head_dim], this rank's */
    float *up;          /* [rows][ffn], likewise; so are the next but one and two */
    kern_acts norm;     /* [rows][hidden] */
    kern_acts attended; /* [rows and their residuals][heads][head_dim] */
    kern_acts ffn;      /* [rows][ffn], the gate's product */
    kern_acts last;     /* [logits rows][hidden] */
    thread_memory *threads;
    uint32_t *row_token;  /* [rows] */
    uint32_t *logits_row; /* [logits rows] row of the step */
    float **x_rows, **q_rows, **k_rows, **v_rows, **gate_rows, **up_rows, **logits_rows;
    /* the step under way; written by the stepping thread between steps */
    const kern_step *step;
    uint32_t rows, logits_count;
    uint32_t live_first, live_rows; /* rows that the last layer's output is wanted of */
    atomic_bool broken;             /* a logit is not finite */
    bool alone;                     /* a rank is gone; written between barriers of the team */
};

/* --- memory --- */

static kern_acts carve_acts(kern_carver *c, size_t rows, uint32_t cols)
{
    kern_acts acts = {.cols = cols};

    acts.values = kern_carve(c, rows * cols, sizeof *acts.values);
    acts.quants = kern_carve(c, rows * cols, sizeof *acts.quants);
    acts.scales = kern_carve(c, rows * cols / KERN_BLOCK, sizeof *acts.scales);
    acts.sums = kern_carve(c, rows * cols / KERN_BLOCK, sizeof *acts.sums);
    acts.quant_sums = kern_carve(c, rows * cols / KERN_BLOCK, sizeof *acts.quant_sums);
    acts.low_sums = kern_carve(c, rows * cols / KERN_BLOCK, sizeof *acts.low_sums);
    return acts;
}

static void carve_model(kern_carver *c, kern_model *model)
{
    const pd_model_shape *shape = model->weights.shape;
    const kern_split *own = &model->split;
    size_t rows = model->rows_max, heads = own->heads + 2 * own->kv_heads;

    model->x = kern_carve(c, rows * shape->hidden, sizeof(float));
    model->qkv = kern_carve(c, rows * heads * shape->head_dim, sizeof(float));
    model->up = kern_carve(c, rows * own->ffn, sizeof(float));
    model->norm = carve_acts(c, rows, shape->hidden);
    model->attended = carve_acts(c, 2 * rows, own->heads * shape->head_dim);
    model->ffn = carve_acts(c, rows, own->ffn);
    model->last = carve_acts(c, model->logits_rows_max, shape->hidden);
    model->row_token = kern_carve(c, rows, sizeof(uint32_t));
    model->logits_row = kern_carve(c, model->logits_rows_max, sizeof(uint32_t));
    model->x_rows = kern_carve(c, rows, sizeof(float *));
    model->q_rows = kern_carve(c, rows, sizeof(float *));
    model->k_rows = kern_carve(c, rows, sizeof(float *));
    model->v_rows = kern_carve(c, rows, sizeof(float *));
    model->gate_rows = kern_carve(c, rows, sizeof(float *));
    model->up_rows = kern_carve(c, rows, sizeof(float *));
    model->logits_rows = kern_carve(c, model->logits_rows_max, sizeof(float *));
    for (uint32_t thread = 0; thread < kern_team_threads(model->team); thread++) {
        thread_memory *memory = &model->threads[thread];
        memory->norm = carve_acts(c, OWN_ROWS_MAX, shape->hidden);
    }
}

static void point_rows(kern_model *model)
{
    const pd_model_shape *shape = model->weights.shape;
    size_t q = (size_t)model->split.heads * shape->head_dim;
    size_t kv = (size_t)model->split.kv_heads * shape->head_dim, ffn = model->split.ffn;

    for (size_t row = 0; row < model->rows_max; row++) {
        model->x_rows[row] = model->x + row * shape->hidden;
        model->q_rows[row] = model->qkv + row * (q + 2 * kv);
        model->k_rows[row] = model->q_rows[row] + q;
        model->v_rows[row] = model->k_rows[row] + kv;
        model->gate_rows[row] = model->ffn.values + row * ffn;
        model->up_rows[row] = model->up + row * ffn;
    }
}

static pd_status allocate(kern_model *model)
{
    const pd_model_shape *shape = model->weights.shape;
    kern_carver sizing = {0}, filling = {.memory = &model->memory};

    model->threads = pd_calloc(kern_team_threads(model->team), sizeof *model->threads);
    if (model->threads == NULL)
        return PD_E_NOMEM;
    carve_model(&sizing, model);
    pd_status status = kern_memory_map(sizing.bytes, &model->memory);
    if (status != PD_OK)
        return status;
    carve_model(&filling, model);
    point_rows(model);
    kern_attend_options attend = {
        .ops = model->ops,
        .team = model->team,
        .shape = shape,
        .split = &model->split,
        .context_max = model->context_max,
        .rows_max = model->rows_max,
        .query = model->q_rows[0],
        .key = model->k_rows[0],
        .value = model->v_rows[0],
        .row_stride = (size_t)(model->split.heads + 2 * model->split.kv_heads) * shape->head_dim,
        .attended = model->attended,
    };
    return kern_attend_create(&attend, &model->attend);
}

static kern_exchange_options exchange_options(const pd_model_shape *shape,
                                              const kern_options *options, const kern_split *split)
{
    return (kern_exchange_options){.hidden = shape->hidden,
                                   .vocab = shape->vocab,
                                   .rows_max = options->rows_max,
                                   .logits_rows_max = options->logits_rows_max,
                                   .split = *split};
}

uint64_t kern_model_shared_bytes(const pd_model_shape *shape, const kern_options *options,
                                 uint32_t ranks)
{
    kern_split split;
    char why[256];

    if (ranks == 1 || !kern_split_of(shape, 0, ranks, &split, why, sizeof why))
        return 0; /* no such model is made */
    kern_exchange_options exchange = exchange_options(shape, options, &split);
    return kern_exchange_bytes(&exchange);
}

/* This rank's part of the model. */
static pd_status split_up(kern_model *model, const pd_model_file *file, const kern_options *options)
{
    const pd_model_shape *shape = pd_model_file_shape(file);
    uint32_t rank = options->comm == NULL ? 0 : kern_comm_rank(options->comm);
    uint32_t ranks = options->comm == NULL ? 1 : kern_comm_ranks(options->comm);
    char why[256];

    if (!kern_split_of(shape, rank, ranks, &model->split, why, sizeof why)) {
        pd_log_error(
            "msg=\"kernels: no tensor parallelism of %u ranks with this model: %s\" path=%s", ranks,
            why, pd_model_file_path(file));
        return PD_E_UNSUPPORTED;
    }
    if (ranks == 1)
        return PD_OK;
    kern_exchange_options exchange = exchange_options(shape, options, &model->split);
    return kern_exchange_create(&exchange, options->comm, &model->exchange);
}

pd_status kern_model_create(const pd_model_file *file, const kern_options *options,
                            kern_model **model_out)
{
    kern_model *model = pd_calloc(1, sizeof *model);
    pd_status status = PD_E_NOMEM;

    if (model == NULL)
        return PD_E_NOMEM;
    pd_assert(options->rows_max > 0 && options->context_max > 0 && options->logits_rows_max > 0);
    model->context_max = options->context_max;
    model->rows_max = options->rows_max;
    model->logits_rows_max = options->logits_rows_max;
    status = kern_ops_choose(options->device, &model->ops);
    if (status == PD_OK)
        status = split_up(model, file, options);
    if (status == PD_OK)
        status =
            kern_weights_init(file, model->ops, &model->split, &options->packs, &model->weights);
    if (status == PD_OK)
        status = kern_team_create(options->threads, &model->team);
    if (status == PD_OK && options->pins != NULL)
        kern_team_pin(model->team, options->pins);
    if (status == PD_OK)
        status = allocate(model);
    if (status != PD_OK) {
        kern_model_destroy(model);
        return status;
    }
    *model_out = model;
    return PD_OK;
}

void kern_model_destroy(kern_model *model)
{
    if (model == NULL)
        return;
    kern_team_destroy(model->team);
    kern_weights_fini(&model->weights);
    kern_exchange_destroy(model->exchange);
    kern_attend_destroy(model->attend);
    kern_memory_unmap(&model->memory);
    pd_free(model->threads);
    pd_free(model);
}

const char *kern_model_backend(const kern_model *model)
{
    return model->ops->name;
}

uint64_t kern_model_bytes(const kern_model *model)
{
    return (uint64_t)model->weights.memory.bytes + model->memory.bytes +
           kern_attend_bytes(model->attend);
}

float *kern_model_logits(const kern_model *model, uint32_t n)
{
    return model->exchange == NULL ? NULL : kern_exchange_logits(model->exchange, n);
}

/* --- phases of a step; each runs on every thread of the team --- */

/* Weight rows a thread takes at once: about four turns a thread, so that one that is held up does
 * not hold up the rest. */
static uint32_t chunk_rows(const kern_model *model, uint32_t rows)
{
    uint32_t threads = kern_team_threads(model->team);
    uint32_t turns = threads == 1 ? 1 : threads * 4;
    uint32_t units = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;

    return (units + turns - 1) / turns * CHUNK_ROWS;
}

static uint32_t chunks_of(const kern_matrix *matrix, uint32_t chunk)
{
    return (matrix->rows + chunk - 1) / chunk;
}

static void multiply_chunk(const kern_model *model, const kern_matrix *matrix, uint32_t first,
                           uint32_t chunk, const kern_acts *acts, uint32_t acts_first,
                           uint32_t acts_rows, float *const *out, bool add)
{
    uint32_t rows = matrix->rows - first < chunk ? matrix->rows - first : chunk;

    model->ops->matmul(matrix, first, rows, acts, acts_first, acts_rows, out, add);
}

static void embed(kern_model *model)
{
    const pd_tensor *tensor = model->weights.embedding;
    uint32_t hidden = model->weights.shape->hidden;
    uint64_t row_bytes = tensor->bytes / tensor->dims[1];

    uint32_t items = model->rows + kern_attend_angles(model->attend);

    for (uint32_t row; (row = kern_team_take(model->team)) < items;) {
        if (row >= model->rows) {
            kern_attend_make_angles(model->attend, row - model->rows);
            continue;
        }
        kern_row_to_f32(tensor->dtype,
                        (const uint8_t *)tensor->data + model->row_token[row] * row_bytes, hidden,
                        model->x_rows[row]);
    }
    kern_team_barrier(model->team);
}

static void normalize_row(const kern_model *model, const float *x, const float *weight,
                          const kern_acts *acts, uint32_t row)
{
    model->ops->rms_norm(x, weight, acts->cols, model->weights.shape->rms_eps,
                         acts->values + (size_t)row * acts->cols);
    model->ops->quantize(acts, row, 0, acts->cols);
}

/* The live rows of x, normalised and quantised. *first_out is the first one's row in the result. */
static const kern_acts *normalize(kern_model *model, uint32_t thread, const float *weight,
                                  uint32_t first, uint32_t rows, uint32_t *first_out)
{
    if (rows <= OWN_ROWS_MAX) {
        const kern_acts *own = &model->threads[thread].norm;
        for (uint32_t row = 0; row < rows; row++)
            normalize_row(model, model->x_rows[first + row], weight, own, row);
        *first_out = 0;
        return own;
    }
    for (uint32_t row; (row = kern_team_take(model->team)) < rows;)
        normalize_row(model, model->x_rows[first + row], weight, &model->norm, first + row);
    kern_team_barrier(model->team);
    *first_out = first;
    return &model->norm;
}

static void project_qkv(kern_model *model, uint32_t thread, const kern_layer_weights *layer)
{
    const kern_matrix *matrices[3] = {&layer->query, &layer->key, &layer->value};
    float **outs[3] = {model->q_rows, model->k_rows, model->v_rows};
    uint32_t total = layer->query.rows + layer->key.rows + layer->value.rows;
    uint32_t chunk = chunk_rows(model, total), acts_first;
    const kern_acts *acts =
        normalize(model, thread, layer->attention_norm, 0, model->rows, &acts_first);

    for (uint32_t taken; (taken = kern_team_take(model->team)) < total;) {
        uint32_t which = 0;
        while (which < 3 && taken >= chunks_of(matrices[which], chunk))
            taken -= chunks_of(matrices[which++], chunk);
        if (which == 3)
            break;
        multiply_chunk(model, matrices[which], taken * chunk, chunk, acts, acts_first, model->rows,
                       outs[which], false);
    }
    kern_team_barrier(model->team);
}

/* Waits for the other ranks, with all that this one's threads wrote. False, on every thread: a rank
 * is gone. */
static bool meet_ranks(kern_model *model, uint32_t thread)
{
    kern_team_barrier(model->team);
    if (thread == 0)
        model->alone = !kern_exchange_meet(model->exchange);
    kern_team_barrier(model->team);
    return !model->alone;
}

/* x += matrix times acts, term by term: the sums of what this rank has of the columns go to all,
 * and every rank adds those of all. False: a rank is gone. */
static bool exchange_product(kern_model *model, uint32_t thread, kern_exchange_of which,
                             const kern_matrix *matrix, const kern_term *terms, uint32_t first,
                             uint32_t rows)
{
    uint32_t chunk = chunk_rows(model, matrix->rows);
    uint32_t pieces = rows * kern_exchange_pieces(model->exchange);

    for (uint32_t taken; (taken = kern_team_take(model->team)) < chunks_of(matrix, chunk);) {
        uint32_t row = taken * chunk;
        uint32_t count = matrix->rows - row < chunk ? matrix->rows - row : chunk;
        kern_exchange_multiply(model->exchange, model->ops, which, matrix, row, count, terms, rows);
    }
    if (!meet_ranks(model, thread))
        return false;
    for (uint32_t taken; (taken = kern_team_take(model->team)) < pieces;) {
        uint32_t row = taken % rows;
        kern_exchange_add(model->exchange, which, terms[1].acts != NULL ? 2 : 1, row, taken / rows,
                          model->x_rows[first + row]);
    }
    kern_team_barrier(model->team);
    return true;
}

/* Attention's output goes on as two quantised rows, itself and what rounding left out: it is the
 * matrix where 8 bits cost the most accuracy for its size (a tenth of a layer's products). */
static bool add_attended(kern_model *model, uint32_t thread, const kern_matrix *matrix,
                         uint32_t first, uint32_t rows)
{
    uint32_t chunk = chunk_rows(model, matrix->rows);
    bool quantised = pd_dtype_info_of(matrix->dtype)->block_weights > 1;

    if (model->exchange != NULL) {
        const kern_term terms[2] = {{&model->attended, first},
                                    {quantised ? &model->attended : NULL, model->rows_max + first}};
        return exchange_product(model, thread, KERN_EXCHANGE_ATTENDED, matrix, terms, first, rows);
    }
    for (uint32_t taken; (taken = kern_team_take(model->team)) < chunks_of(matrix, chunk);) {
        multiply_chunk(model, matrix, taken * chunk, chunk, &model->attended, first, rows,
                       model->x_rows + first, true);
        if (quantised)
            multiply_chunk(model, matrix, taken * chunk, chunk, &model->attended,
                           model->rows_max + first, rows, model->x_rows + first, true);
    }
    kern_team_barrier(model->team);
    return true;
}

static bool add_product(kern_model *model, uint32_t thread, const kern_matrix *matrix,
                        const kern_acts *acts, uint32_t first, uint32_t rows)
{
    uint32_t chunk = chunk_rows(model, matrix->rows);

    if (model->exchange != NULL) {
        const kern_term terms[2] = {{acts, first}, {NULL, 0}};
        return exchange_product(model, thread, KERN_EXCHANGE_DOWN, matrix, terms, first, rows);
    }
    for (uint32_t taken; (taken = kern_team_take(model->team)) < chunks_of(matrix, chunk);)
        multiply_chunk(model, matrix, taken * chunk, chunk, acts, first, rows,
                       model->x_rows + first, true);
    kern_team_barrier(model->team);
    return true;
}

/* Some columns of gate and up, and what comes of them: rows first .. of the step, whose acts start
 * at acts_first. */
static void feed_columns(kern_model *model, const kern_layer_weights *layer, uint32_t col,
                         uint32_t cols, const kern_acts *acts, uint32_t acts_first, uint32_t first,
                         uint32_t rows)
{
    multiply_chunk(model, &layer->gate, col, cols, acts, acts_first, rows, model->gate_rows + first,
                   false);
    multiply_chunk(model, &layer->up, col, cols, acts, acts_first, rows, model->up_rows + first,
                   false);
    for (uint32_t row = first; row < first + rows; row++) {
        model->ops->silu_mul(model->gate_rows[row] + col, model->up_rows[row] + col, cols);
        model->ops->quantize(&model->ffn, row, col, cols);
    }
}

static bool feed_forward(kern_model *model, uint32_t thread, const kern_layer_weights *layer,
                         uint32_t first, uint32_t rows)
{
    uint32_t ffn = model->split.ffn, chunk = chunk_rows(model, ffn), acts_first;
    const kern_acts *acts = normalize(model, thread, layer->ffn_norm, first, rows, &acts_first);

    for (uint32_t taken; (taken = kern_team_take(model->team)) < chunks_of(&layer->gate, chunk);) {
        uint32_t col = taken * chunk, cols = ffn - col < chunk ? ffn - col : chunk;
        feed_columns(model, layer, col, cols, acts, acts_first, first, rows);
    }
    kern_team_barrier(model->team);
    return add_product(model, thread, &layer->down, &model->ffn, first, rows);
}

/* --- steps of many rows: each thread takes blocks of them from one attention to the next --- */

/* 0: there are too few rows for the threads, or other ranks to meet: all work on all rows. */
static uint32_t block_rows(const kern_model *model)
{
    uint32_t threads = kern_team_threads(model->team), turns = threads == 1 ? 1 : 4 * threads;
    uint32_t block = (model->rows / turns + 7) / 8 * 8;

    if (model->exchange != NULL || model->rows < BLOCK_ROWS_MIN * threads)
        return 0;
    return block < BLOCK_ROWS_MIN   ? BLOCK_ROWS_MIN
           : block > BLOCK_ROWS_MAX ? BLOCK_ROWS_MAX
                                    : block;
}

static void multiply_block(const kern_model *model, const kern_matrix *matrix,
                           const kern_acts *acts, uint32_t acts_first, uint32_t rows,
                           float *const *out, bool add)
{
    model->ops->matmul(matrix, 0, matrix->rows, acts, acts_first, rows, out, add);
}

/* The last layer has queries only of the live rows' blocks. */
static void block_qkv(kern_model *model, uint32_t index, uint32_t first, uint32_t rows)
{
    const kern_layer_weights *layer = &model->weights.layers[index];
    bool last = index + 1 == model->weights.shape->layers;
    bool live = first < model->live_first + model->live_rows && model->live_first < first + rows;

    for (uint32_t row = first; row < first + rows; row++)
        normalize_row(model, model->x_rows[row], layer->attention_norm, &model->norm, row);
    if (live || !last)
        multiply_block(model, &layer->query, &model->norm, first, rows, model->q_rows + first,
                       false);
    multiply_block(model, &layer->key, &model->norm, first, rows, model->k_rows + first, false);
    multiply_block(model, &layer->value, &model->norm, first, rows, model->v_rows + first, false);
}

static void block_rest(kern_model *model, const kern_layer_weights *layer, uint32_t first,
                       uint32_t rows)
{
    float *const *x = model->x_rows + first;

    multiply_block(model, &layer->output, &model->attended, first, rows, x, true);
    if (pd_dtype_info_of(layer->output.dtype)->block_weights > 1)
        multiply_block(model, &layer->output, &model->attended, model->rows_max + first, rows, x,
                       true);
    for (uint32_t row = first; row < first + rows; row++)
        normalize_row(model, model->x_rows[row], layer->ffn_norm, &model->norm, row);
    for (uint32_t col = 0; col < model->split.ffn; col += BLOCK_FFN_COLS) {
        uint32_t left = model->split.ffn - col;
        feed_columns(model, layer, col, left < BLOCK_FFN_COLS ? left : BLOCK_FFN_COLS, &model->norm,
                     first, first, rows);
    }
    multiply_block(model, &layer->down, &model->ffn, first, rows, x, true);
}

/* What lies between the attention of layer index - 1 and that of layer index. */
static void run_blocks(kern_model *model, uint32_t index, uint32_t block)
{
    const kern_layer_weights *layers = model->weights.layers;
    uint32_t blocks = (model->rows + block - 1) / block;

    for (uint32_t taken; (taken = kern_team_take(model->team)) < blocks;) {
        uint32_t first = taken * block;
        uint32_t rows = model->rows - first < block ? model->rows - first : block;
        if (index > 0)
            block_rest(model, &layers[index - 1], first, rows);
        block_qkv(model, index, first, rows);
    }
    kern_team_barrier(model->team);
}

static bool all_finite(const float *values, uint32_t count)
{
    uint32_t bad = 0;

    for (uint32_t i = 0; i < count; i++) {
        union {
            float value;
            uint32_t bits;
        } word = {.value = values[i]};
        bad |= (word.bits & 0x7f800000) == 0x7f800000;
    }
    return bad == 0;
}

static void write_logits(kern_model *model)
{
    const kern_matrix *head = &model->weights.head;
    uint32_t chunk = chunk_rows(model, head->rows);

    /* small enough that a chunk's weights stay in the cache for all rows, and far more turns than
       threads: this is the longest matrix of a decode step */
    chunk = chunk < 512 ? chunk : 512;
    for (uint32_t row; (row = kern_team_take(model->team)) < model->logits_count;)
        normalize_row(model, model->x_rows[model->logits_row[row]], model->weights.output_norm,
                      &model->last, row);
    kern_team_barrier(model->team);
    for (uint32_t taken; (taken = kern_team_take(model->team)) < chunks_of(head, chunk);) {
        uint32_t first = taken * chunk;
        uint32_t rows = head->rows - first < chunk ? head->rows - first : chunk;
        model->ops->matmul(head, first, rows, &model->last, 0, model->logits_count,
                           model->logits_rows, false);
        for (uint32_t row = 0; row < model->logits_count; row++)
            if (!all_finite(model->logits_rows[row] + first, rows))
                atomic_store_explicit(&model->broken, true, memory_order_relaxed);
    }
}

static void report_group(const kern_model *model, uint32_t thread, uint32_t layer)
{
    const kern_step *step = model->step;
    uint32_t group = pd_kv_layout_group_of(step->layout, layer);
    bool ends = layer + 1 == model->weights.shape->layers ||
                pd_kv_layout_group_of(step->layout, layer + 1) != group;

    if (thread == 0 && ends && step->group_done != NULL)
        step->group_done(step->group_done_ctx, group);
}

static void run_layers(void *ctx, uint32_t thread)
{
    kern_model *model = ctx;
    uint32_t layers = model->weights.shape->layers, block = block_rows(model);

    embed(model);
    for (uint32_t index = 0; index < layers; index++) {
        const kern_layer_weights *layer = &model->weights.layers[index];
        bool last = index + 1 == layers;
        uint32_t first = last ? model->live_first : 0;
        uint32_t rows = last ? model->live_rows : model->rows;
        if (block != 0)
            run_blocks(model, index, block);
        else
            project_qkv(model, thread, layer);
        kern_attend_layer(model->attend, thread, index, first, rows);
        if (model->exchange == NULL)
            report_group(model, thread, index);
        if (rows == 0) {
            if (model->exchange != NULL && meet_ranks(model, thread))
                report_group(model, thread, index);
            return;
        }
        if (block != 0 && !last)
            continue; /* with what comes before the next attention */
        if (!add_attended(model, thread, &layer->output, first, rows))
            return;
        if (model->exchange != NULL) /* by then every rank has written its heads */
            report_group(model, thread, index);
        if (!feed_forward(model, thread, layer, first, rows))
            return;
    }
    write_logits(model);
}

/* --- the step --- */

static pd_status check_slice(const kern_model *model, const kern_slice *slice)
{
    if (slice->count > model->context_max || slice->position > model->context_max - slice->count) {
        pd_log_error("msg=\"kernels: position out of range\" position=%u count=%u context_max=%u",
                     slice->position, slice->count, model->context_max);
        return PD_E_INVALID;
    }
    for (uint32_t i = 0; i < slice->count; i++) {
        if (slice->tokens[i] >= model->weights.shape->vocab) {
            pd_log_error("msg=\"kernels: token id out of range\" token=%u vocab=%u position=%u",
                         slice->tokens[i], model->weights.shape->vocab, slice->position + i);
            return PD_E_INVALID;
        }
    }
    return PD_OK;
}

static void add_slice(kern_model *model, const kern_step *step, uint32_t index)
{
    const kern_slice *slice = &step->slices[index];
    uint32_t block_tokens = step->layout->block_tokens;

    pd_assert(slice->count <= model->rows_max - model->rows);
    pd_assert(slice->count > 0 && slice->logits_from <= slice->count);
    pd_assert((slice->logits != NULL) == (slice->logits_from < slice->count));
    for (uint32_t i = 0; i <= (slice->position + slice->count - 1) / block_tokens; i++)
        pd_assert(slice->blocks[i] < step->layout->blocks);
    for (uint32_t i = 0; i < slice->count; i++, model->rows++) {
        model->row_token[model->rows] = slice->tokens[i];
        if (i < slice->logits_from)
            continue;
        pd_assert(model->logits_count < model->logits_rows_max);
        model->logits_row[model->logits_count] = model->rows;
        model->logits_rows[model->logits_count] =
            model->exchange != NULL
                ? kern_exchange_logits(model->exchange, model->logits_count) +
                      (size_t)model->split.rank * model->split.vocab
                : slice->logits + (size_t)(i - slice->logits_from) * model->weights.shape->vocab;
        model->logits_count++;
    }
}

static void check_layout(const kern_model *model, const pd_kv_layout *layout)
{
    const pd_model_shape *shape = model->weights.shape;

    pd_assert(layout->layers == shape->layers && layout->kv_heads == shape->kv_heads &&
              layout->head_dim == shape->head_dim);
    pd_assert(layout->block_tokens % PD_KV_TILE_TOKENS == 0);
}

/* Rank 0 gives the logits to who asked for them elsewhere than where all ranks write them. */
static void hand_out_logits(const kern_model *model, const kern_step *step)
{
    size_t vocab = model->weights.shape->vocab;
    uint32_t n = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        const kern_slice *slice = &step->slices[i];
        for (uint32_t row = slice->logits_from; row < slice->count; row++, n++) {
            const float *from = kern_exchange_logits(model->exchange, n);
            float *to = slice->logits + (row - slice->logits_from) * vocab;
            if (to != from)
                memcpy(to, from, vocab * sizeof *to);
        }
    }
}

/* The end of a step of several ranks: what one of them found holds for all. */
static void end_with_ranks(kern_model *model, const kern_step *step)
{
    if (atomic_load(&model->broken))
        kern_exchange_say_broken(model->exchange);
    model->alone = model->alone || !kern_exchange_meet(model->exchange);
    if (kern_exchange_is_broken(model->exchange))
        atomic_store(&model->broken, true);
    if (model->split.rank == 0 && !model->alone)
        hand_out_logits(model, step);
}

pd_status kern_model_step(kern_model *model, const kern_step *step)
{
    check_layout(model, step->layout);
    for (uint32_t i = 0; i < step->slices_count; i++) {
        pd_status status = check_slice(model, &step->slices[i]);
        if (status != PD_OK)
            return status;
    }
    model->step = step;
    model->rows = model->logits_count = 0;
    for (uint32_t i = 0; i < step->slices_count; i++)
        add_slice(model, step, i);
    kern_attend_begin(model->attend, step);
    model->live_first = model->live_rows = 0;
    if (model->logits_count > 0) {
        model->live_first = model->logits_row[0];
        model->live_rows = model->logits_row[model->logits_count - 1] + 1 - model->live_first;
    }
    atomic_store(&model->broken, false);
    model->alone = false;
    if (model->exchange != NULL && model->split.rank == 0)
        kern_exchange_begin(model->exchange);
    if (model->rows > 0)
        kern_team_run(model->team, run_layers, model);
    if (model->exchange != NULL)
        end_with_ranks(model, step);
    model->step = NULL;
    if (model->alone)
        return PD_E_INTERNAL;
    if (atomic_load(&model->broken)) {
        pd_log_error("msg=\"kernels: logits are not finite\" rows=%u", model->rows);
        return PD_E_INTERNAL;
    }
    return PD_OK;
}
