#include "kernels/model/forward.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/big_memory.h"
#include "kernels/file_row.h"
#include "kernels/model/exchange.h"
#include "kernels/model/rope.h"
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

/* Attention in parts: for at most so many heads a thread, and from so many splits a token on. */
#define PART_ITEMS      2
#define PART_SPLITS_MIN 2

/* Query tokens that are attended together. */
typedef struct token_group {
    uint32_t slice;
    uint32_t row; /* of the step, the first */
    uint32_t tokens;
} token_group;

/* Consecutive tokens of one slice in one block: placed by one thread, so that the block's tiles of
 * a head have one writer. */
typedef struct place_run {
    uint32_t row; /* of the step, the first */
    uint32_t tokens;
} place_run;

/* What one thread has for itself. */
typedef struct thread_memory {
    kern_acts norm; /* [OWN_ROWS_MAX] */
    void *scratch;  /* attention's */
} thread_memory;

struct kern_model {
    const kern_ops *ops;
    kern_team *team;
    kern_weights weights;
    kern_split split;
    kern_exchange *exchange; /* NULL: one rank */
    uint32_t context_max, rows_max, logits_rows_max;
    kern_memory memory; /* all below but the tables of pointers */
    float *rope;        /* [context_max][rope_dims / 2][2] */
    float *x;           /* [rows][hidden], the residual stream */
    float *qkv;         /* [rows][heads q, kv_heads k, kv_heads v][head_dim], this rank's */
    float *up;          /* [rows][ffn], likewise; so are the next but one and two */
    kern_acts norm;     /* [rows][hidden] */
    kern_acts attended; /* [rows and their residuals][heads][head_dim] */
    kern_acts ffn;      /* [rows][ffn], the gate's product */
    kern_acts last;     /* [logits rows][hidden] */
    thread_memory *threads;
    uint32_t *row_slice, *row_position, *row_token; /* [rows] */
    uint32_t *logits_row;                           /* [logits rows] row of the step */
    token_group *groups;                            /* [rows] */
    place_run *runs;                                /* [rows] */
    float *parts; /* [PART_ITEMS a thread][splits of context_max][kern_attention_part_floats] */
    float **x_rows, **q_rows, **k_rows, **v_rows, **gate_rows, **up_rows, **logits_rows;
    /* the step under way; written by the stepping thread between steps */
    const kern_step *step;
    uint32_t rows, logits_count, groups_count, runs_count;
    bool all_single;                /* every slice is one token */
    bool in_parts;                  /* attends_in_parts */
    uint32_t live_first, live_rows; /* rows that the last layer's output is wanted of */
    atomic_bool broken;             /* a logit is not finite */
    bool alone;                     /* a rank is gone; written between barriers of the team */
};

/* --- memory --- */

typedef struct carver {
    kern_memory *memory; /* NULL: only add up */
    size_t bytes;
} carver;

static void *carve(carver *c, size_t count, size_t size)
{
    c->bytes += kern_memory_round(count * size);
    return c->memory == NULL ? NULL : kern_memory_take(c->memory, count * size);
}

static kern_acts carve_acts(carver *c, size_t rows, uint32_t cols)
{
    kern_acts acts = {.cols = cols};

    acts.values = carve(c, rows * cols, sizeof *acts.values);
    acts.quants = carve(c, rows * cols, sizeof *acts.quants);
    acts.scales = carve(c, rows * cols / KERN_BLOCK, sizeof *acts.scales);
    acts.sums = carve(c, rows * cols / KERN_BLOCK, sizeof *acts.sums);
    acts.quant_sums = carve(c, rows * cols / KERN_BLOCK, sizeof *acts.quant_sums);
    return acts;
}

/* Of all splits of one row and KV head. */
static size_t item_part_floats(const kern_model *model)
{
    const pd_model_shape *shape = model->weights.shape;
    size_t splits = (model->context_max + KERN_SPLIT_TOKENS - 1) / KERN_SPLIT_TOKENS;

    return splits * kern_attention_part_floats(shape->heads / shape->kv_heads, shape->head_dim);
}

static void carve_model(carver *c, kern_model *model)
{
    const pd_model_shape *shape = model->weights.shape;
    const kern_split *own = &model->split;
    size_t rows = model->rows_max, heads = own->heads + 2 * own->kv_heads;

    model->rope = carve(c, (size_t)model->context_max * shape->rope_dims, sizeof(float));
    model->x = carve(c, rows * shape->hidden, sizeof(float));
    model->qkv = carve(c, rows * heads * shape->head_dim, sizeof(float));
    model->up = carve(c, rows * own->ffn, sizeof(float));
    model->norm = carve_acts(c, rows, shape->hidden);
    model->attended = carve_acts(c, 2 * rows, own->heads * shape->head_dim);
    model->ffn = carve_acts(c, rows, own->ffn);
    model->last = carve_acts(c, model->logits_rows_max, shape->hidden);
    model->row_slice = carve(c, rows, sizeof(uint32_t));
    model->row_position = carve(c, rows, sizeof(uint32_t));
    model->row_token = carve(c, rows, sizeof(uint32_t));
    model->logits_row = carve(c, model->logits_rows_max, sizeof(uint32_t));
    model->groups = carve(c, rows, sizeof *model->groups);
    model->runs = carve(c, rows, sizeof *model->runs);
    model->x_rows = carve(c, rows, sizeof(float *));
    model->q_rows = carve(c, rows, sizeof(float *));
    model->k_rows = carve(c, rows, sizeof(float *));
    model->v_rows = carve(c, rows, sizeof(float *));
    model->gate_rows = carve(c, rows, sizeof(float *));
    model->up_rows = carve(c, rows, sizeof(float *));
    model->logits_rows = carve(c, model->logits_rows_max, sizeof(float *));
    uint32_t group = shape->heads / shape->kv_heads;
    model->parts = carve(c, PART_ITEMS * kern_team_threads(model->team) * item_part_floats(model),
                         sizeof(float));
    size_t scratch = model->ops->attention_scratch_bytes(group, shape->head_dim);
    for (uint32_t thread = 0; thread < kern_team_threads(model->team); thread++) {
        thread_memory *memory = &model->threads[thread];
        memory->norm = carve_acts(c, OWN_ROWS_MAX, shape->hidden);
        memory->scratch = carve(c, scratch, 1);
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
    carver sizing = {0}, filling = {.memory = &model->memory};

    model->threads = pd_calloc(kern_team_threads(model->team), sizeof *model->threads);
    if (model->threads == NULL)
        return PD_E_NOMEM;
    carve_model(&sizing, model);
    pd_status status = kern_memory_map(sizing.bytes, &model->memory);
    if (status != PD_OK)
        return status;
    carve_model(&filling, model);
    point_rows(model);
    kern_rope_table(shape->rope_base, shape->rope_dims, model->context_max, model->rope);
    return PD_OK;
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
    return (uint64_t)model->weights.memory.bytes + model->memory.bytes;
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

    for (uint32_t row; (row = kern_team_take(model->team)) < model->rows;)
        kern_row_to_f32(tensor->dtype,
                        (const uint8_t *)tensor->data + model->row_token[row] * row_bytes, hidden,
                        model->x_rows[row]);
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

static pd_block block_of(const kern_model *model, uint32_t row)
{
    const kern_slice *slice = &model->step->slices[model->row_slice[row]];

    return slice->blocks[model->row_position[row] / model->step->layout->block_tokens];
}

/* The number in the model of a KV head of this rank's. */
static uint32_t in_model(const kern_model *model, uint32_t kv_head)
{
    return model->split.rank * model->split.kv_heads + kv_head;
}

/* K's half of the block that a row's token lies in; V's follows. */
static uint8_t *half_of(const kern_model *model, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const pd_kv_layout *layout = model->step->layout;

    return (uint8_t *)model->step->pool +
           pd_kv_layout_k_offset(layout, layer, block_of(model, row), in_model(model, kv_head));
}

/* Rotates one row's query and key heads of a KV head and writes K and V to the pool. */
static void place_head(kern_model *model, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const pd_model_shape *shape = model->weights.shape;
    uint32_t group = shape->heads / shape->kv_heads, dim = shape->head_dim;
    uint32_t pairs = shape->rope_dims / 2;
    const float *table = model->rope + (size_t)model->row_position[row] * shape->rope_dims;
    float *key = model->k_rows[row] + (size_t)kv_head * dim;
    const pd_kv_layout *layout = model->step->layout;
    uint32_t token = model->row_position[row] % layout->block_tokens;
    uint8_t *half = half_of(model, layer, row, kv_head);

    for (uint32_t h = 0; h < group; h++)
        model->ops->rope(model->q_rows[row] + ((size_t)kv_head * group + h) * dim, table, pairs);
    model->ops->rope(key, table, pairs);
    model->ops->store_kv(layout, key, token, half);
    model->ops->store_kv(layout, model->v_rows[row] + (size_t)kv_head * dim, token,
                         half + layout->half_bytes);
}

/* The tiles are hashed while what was written is still in the cache. */
static void place_run_of_head(kern_model *model, uint32_t layer, const place_run *run,
                              uint32_t kv_head)
{
    const kern_step *step = model->step;
    uint32_t from = model->row_position[run->row] % step->layout->block_tokens;

    for (uint32_t t = 0; t < run->tokens; t++)
        place_head(model, layer, run->row + t, kv_head);
    if (step->tiles != NULL)
        pd_seal_tiles_wrote(step->tiles, step->pool, layer, block_of(model, run->row),
                            in_model(model, kv_head), from, from + run->tokens);
}

/* A head's attention for a group of tokens: what a thread takes at once. */
typedef struct attend_item {
    const token_group *group;
    uint32_t kv_head;
} attend_item;

static kern_attention attention_of(const kern_model *model, uint32_t thread, uint32_t layer,
                                   const attend_item *item)
{
    const pd_model_shape *shape = model->weights.shape;
    const token_group *group = item->group;
    uint32_t heads = shape->heads / shape->kv_heads, cols = heads * shape->head_dim;
    const kern_acts *acts = &model->attended;

    return (kern_attention){
        .layout = model->step->layout,
        .pool = model->step->pool,
        .blocks = model->step->slices[group->slice].blocks,
        .layer = layer,
        .kv_head = in_model(model, item->kv_head),
        .heads = heads,
        .tokens = group->tokens,
        .position = model->row_position[group->row],
        .scale = 1.0f / sqrtf((float)shape->head_dim),
        .query = model->q_rows[group->row] + (size_t)item->kv_head * cols,
        .query_stride = (size_t)(model->split.heads + 2 * model->split.kv_heads) * shape->head_dim,
        .out = acts->values + (size_t)group->row * acts->cols + (size_t)item->kv_head * cols,
        .out_stride = acts->cols,
        .scratch = model->threads[thread].scratch,
    };
}

/* A head's attention of some rows goes on as two quantised rows each. */
static void quantize_attended(kern_model *model, const attend_item *item)
{
    const pd_model_shape *shape = model->weights.shape;
    uint32_t cols = shape->heads / shape->kv_heads * shape->head_dim;
    kern_acts *acts = &model->attended;

    for (uint32_t t = 0; t < item->group->tokens; t++) {
        uint32_t row = item->group->row + t, residual_row = model->rows_max + row;
        model->ops->quantize(acts, row, item->kv_head * cols, cols);
        model->ops->residual(acts, row, item->kv_head * cols, cols, residual_row);
        model->ops->quantize(acts, residual_row, item->kv_head * cols, cols);
    }
}

/* next: what this thread attends afterwards; group NULL: nothing. */
static void attend_group(kern_model *model, uint32_t thread, uint32_t layer,
                         const attend_item *item, const attend_item *next)
{
    kern_attention args = attention_of(model, thread, layer, item), next_args;

    if (next->group != NULL) {
        next_args = attention_of(model, thread, layer, next);
        args.next = &next_args;
    }
    model->ops->attention(&args);
    quantize_attended(model, item);
}

static uint32_t splits_of(const kern_model *model, const token_group *group)
{
    return model->row_position[group->row] / KERN_SPLIT_TOKENS + 1;
}

/* Fewer heads of single tokens than threads, or hardly more, and long contexts: their splits are
 * what threads take. */
static bool attends_in_parts(const kern_model *model)
{
    uint32_t threads = kern_team_threads(model->team), splits = 0;
    uint32_t items = model->groups_count * model->split.kv_heads;

    if (!model->all_single || threads == 1 || items > threads * PART_ITEMS)
        return false;
    for (uint32_t g = 0; g < model->groups_count; g++)
        splits += splits_of(model, &model->groups[g]);
    return splits >= PART_SPLITS_MIN * model->groups_count;
}

/* After K and V are placed. */
static void attend_in_parts(kern_model *model, uint32_t thread, uint32_t layer)
{
    uint32_t kv_heads = model->split.kv_heads, items = model->groups_count * kv_heads, all = 0;
    uint32_t group_heads = model->weights.shape->heads / model->weights.shape->kv_heads;
    size_t part = kern_attention_part_floats(group_heads, model->weights.shape->head_dim);

    for (uint32_t g = 0; g < model->groups_count; g++)
        all += splits_of(model, &model->groups[g]) * kv_heads;
    for (uint32_t taken; (taken = kern_team_take(model->team)) < all;) {
        uint32_t item = 0, split = taken;
        for (uint32_t its; split >= (its = splits_of(model, &model->groups[item / kv_heads]));
             item++)
            split -= its;
        attend_item found = {&model->groups[item / kv_heads], item % kv_heads};
        kern_attention args = attention_of(model, thread, layer, &found);
        model->ops->attention_part(&args, split,
                                   model->parts + item * item_part_floats(model) + split * part);
    }
    kern_team_barrier(model->team);
    for (uint32_t item; (item = kern_team_take(model->team)) < items;) {
        attend_item found = {&model->groups[item / kv_heads], item % kv_heads};
        kern_attention args = attention_of(model, thread, layer, &found);
        model->ops->attention_join(&args, splits_of(model, found.group),
                                   model->parts + item * item_part_floats(model));
        quantize_attended(model, &found);
    }
    kern_team_barrier(model->team);
}

/* The next of the items that nobody has; group NULL: none is left. The longest contexts first: they
 * come last in a prompt. */
static attend_item take_item(kern_model *model)
{
    uint32_t kv_heads = model->split.kv_heads, items = model->groups_count * kv_heads;
    uint32_t taken = kern_team_take(model->team);

    if (taken >= items)
        return (attend_item){NULL, 0};
    uint32_t item = items - 1 - taken;
    return (attend_item){&model->groups[item / kv_heads], item % kv_heads};
}

/* Where every slice is one token, whoever attends for a head also places its K and V. */
static void attend_all(kern_model *model, uint32_t thread, uint32_t layer, bool last)
{
    uint32_t kv_heads = model->split.kv_heads;

    if (!model->all_single || model->in_parts) {
        uint32_t placings = model->runs_count * kv_heads;
        for (uint32_t taken; (taken = kern_team_take(model->team)) < placings;)
            place_run_of_head(model, layer, &model->runs[taken / kv_heads], taken % kv_heads);
        kern_team_barrier(model->team);
    }
    if (model->in_parts) {
        attend_in_parts(model, thread, layer);
        return;
    }
    for (attend_item item = take_item(model), next; item.group != NULL; item = next) {
        const token_group *group = item.group;
        next = take_item(model);
        if (model->all_single) /* a group is a run then */
            place_run_of_head(model, layer, &model->runs[group - model->groups], item.kv_head);
        if (last && (group->row + group->tokens <= model->live_first ||
                     group->row >= model->live_first + model->live_rows))
            continue;
        attend_group(model, thread, layer, &item, &next);
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

static void block_qkv(kern_model *model, const kern_layer_weights *layer, uint32_t first,
                      uint32_t rows)
{
    for (uint32_t row = first; row < first + rows; row++)
        normalize_row(model, model->x_rows[row], layer->attention_norm, &model->norm, row);
    multiply_block(model, &layer->query, &model->norm, first, rows, model->q_rows + first, false);
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
        block_qkv(model, &layers[index], first, rows);
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
        attend_all(model, thread, index, last);
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
        model->row_slice[model->rows] = index;
        model->row_position[model->rows] = slice->position + i;
        model->row_token[model->rows] = slice->tokens[i];
        if (i % KERN_ATTENTION_TOKENS_MAX == 0)
            model->groups[model->groups_count++] = (token_group){index, model->rows, 0};
        model->groups[model->groups_count - 1].tokens++;
        if (i == 0 || (slice->position + i) % block_tokens == 0)
            model->runs[model->runs_count++] = (place_run){model->rows, 0};
        model->runs[model->runs_count - 1].tokens++;
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
    model->all_single = model->all_single && slice->count == 1;
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
    model->rows = model->logits_count = model->groups_count = model->runs_count = 0;
    model->all_single = true;
    for (uint32_t i = 0; i < step->slices_count; i++)
        add_slice(model, step, i);
    model->in_parts = attends_in_parts(model);
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
