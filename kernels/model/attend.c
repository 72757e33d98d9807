#include "kernels/model/attend.h"

#include "common/base/mem.h"
#include "kernels/big_memory.h"
#include "kernels/model/rope.h"

#include <math.h>

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

struct kern_attend {
    kern_attend_options o;
    kern_memory memory;                 /* all below */
    float *rope;                        /* [context_max][rope_dims / 2][2] */
    uint32_t *row_slice, *row_position; /* [rows] */
    token_group *groups;                /* [rows] */
    place_run *runs;                    /* [rows] */
    float *parts;                       /* [PART_ITEMS a thread][item_part_floats] */
    size_t item_part_floats;            /* of all splits of one row and KV head */
    uint8_t *scratch;                   /* [threads][scratch_bytes], the operations' */
    size_t scratch_bytes;
    /* the step under way; written by the stepping thread between steps */
    const kern_step *step;
    uint32_t rows, groups_count, runs_count;
    bool all_single; /* every slice is one token */
    bool in_parts;   /* attends_in_parts */
};

/* --- memory --- */

static void carve(kern_carver *c, kern_attend *a)
{
    size_t rows = a->o.rows_max, threads = kern_team_threads(a->o.team);

    a->rope = kern_carve(c, (size_t)a->o.context_max * a->o.shape->rope_dims, sizeof(float));
    a->row_slice = kern_carve(c, rows, sizeof(uint32_t));
    a->row_position = kern_carve(c, rows, sizeof(uint32_t));
    a->groups = kern_carve(c, rows, sizeof *a->groups);
    a->runs = kern_carve(c, rows, sizeof *a->runs);
    a->parts = kern_carve(c, PART_ITEMS * threads * a->item_part_floats, sizeof(float));
    a->scratch = kern_carve(c, threads, a->scratch_bytes);
}

pd_status kern_attend_create(const kern_attend_options *options, kern_attend **attend_out)
{
    const pd_model_shape *shape = options->shape;
    uint32_t group = shape->heads / shape->kv_heads;
    size_t splits = (options->context_max + KERN_SPLIT_TOKENS - 1) / KERN_SPLIT_TOKENS;
    kern_attend *a = pd_calloc(1, sizeof *a);
    kern_carver sizing = {0};

    if (a == NULL)
        return PD_E_NOMEM;
    a->o = *options;
    a->item_part_floats = splits * kern_attention_part_floats(group, shape->head_dim);
    a->scratch_bytes =
        kern_memory_round(options->ops->attention_scratch_bytes(group, shape->head_dim));
    carve(&sizing, a);
    pd_status status = kern_memory_map(sizing.bytes, &a->memory);
    if (status != PD_OK) {
        pd_free(a);
        return status;
    }
    carve(&(kern_carver){.memory = &a->memory}, a);
    kern_rope_table(shape->rope_base, shape->rope_dims, options->context_max, a->rope);
    *attend_out = a;
    return PD_OK;
}

void kern_attend_destroy(kern_attend *a)
{
    if (a == NULL)
        return;
    kern_memory_unmap(&a->memory);
    pd_free(a);
}

uint64_t kern_attend_bytes(const kern_attend *a)
{
    return a->memory.bytes;
}

/* --- K and V --- */

static float *row_of(const kern_attend *a, float *first, uint32_t row)
{
    return first + row * a->o.row_stride;
}

static pd_block block_of(const kern_attend *a, uint32_t row)
{
    const kern_slice *slice = &a->step->slices[a->row_slice[row]];

    return slice->blocks[a->row_position[row] / a->step->layout->block_tokens];
}

/* The number in the model of a KV head of this rank's. */
static uint32_t in_model(const kern_attend *a, uint32_t kv_head)
{
    return a->o.split->rank * a->o.split->kv_heads + kv_head;
}

static void *key_address(const kern_attend *a, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const pd_kv_layout *layout = a->step->layout;

    return (uint8_t *)a->step->pool +
           pd_kv_layout_k_offset(layout, layer, block_of(a, row), in_model(a, kv_head)) +
           (a->row_position[row] % layout->block_tokens) * layout->token_bytes;
}

/* Rotates one row's query and key heads of a KV head and writes K and V to the pool. */
static void place_head(kern_attend *a, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const pd_model_shape *shape = a->o.shape;
    uint32_t group = shape->heads / shape->kv_heads, dim = shape->head_dim;
    uint32_t pairs = shape->rope_dims / 2;
    const float *table = a->rope + (size_t)a->row_position[row] * shape->rope_dims;
    float *key = row_of(a, a->o.key, row) + (size_t)kv_head * dim;
    uint8_t *place = key_address(a, layer, row, kv_head);

    for (uint32_t h = 0; h < group; h++)
        a->o.ops->rope(row_of(a, a->o.query, row) + ((size_t)kv_head * group + h) * dim, table,
                       pairs);
    a->o.ops->rope(key, table, pairs);
    a->o.ops->store_f16(key, dim, (uint16_t *)place);
    a->o.ops->store_f16(row_of(a, a->o.value, row) + (size_t)kv_head * dim, dim,
                        (uint16_t *)(place + a->step->layout->half_bytes));
}

/* The tiles are hashed while what was written is still in the cache. */
static void place_run_of_head(kern_attend *a, uint32_t layer, const place_run *run,
                              uint32_t kv_head)
{
    const kern_step *step = a->step;
    uint32_t from = a->row_position[run->row] % step->layout->block_tokens;

    for (uint32_t t = 0; t < run->tokens; t++)
        place_head(a, layer, run->row + t, kv_head);
    if (step->tiles != NULL)
        pd_seal_tiles_wrote(step->tiles, step->pool, layer, block_of(a, run->row),
                            in_model(a, kv_head), from, from + run->tokens);
}

/* --- attention --- */

/* A head's attention for a group of tokens: what a thread takes at once. */
typedef struct attend_item {
    const token_group *group;
    uint32_t kv_head;
} attend_item;

static kern_attention attention_of(const kern_attend *a, uint32_t thread, uint32_t layer,
                                   const attend_item *item)
{
    const pd_model_shape *shape = a->o.shape;
    const token_group *group = item->group;
    uint32_t heads = shape->heads / shape->kv_heads, cols = heads * shape->head_dim;
    const kern_acts *acts = &a->o.attended;

    return (kern_attention){
        .layout = a->step->layout,
        .pool = a->step->pool,
        .blocks = a->step->slices[group->slice].blocks,
        .layer = layer,
        .kv_head = in_model(a, item->kv_head),
        .heads = heads,
        .tokens = group->tokens,
        .position = a->row_position[group->row],
        .scale = 1.0f / sqrtf((float)shape->head_dim),
        .query = row_of(a, a->o.query, group->row) + (size_t)item->kv_head * cols,
        .query_stride = a->o.row_stride,
        .out = acts->values + (size_t)group->row * acts->cols + (size_t)item->kv_head * cols,
        .out_stride = acts->cols,
        .scratch = a->scratch + thread * a->scratch_bytes,
    };
}

/* A head's attention of some rows goes on as two quantised rows each. */
static void quantize_attended(kern_attend *a, const attend_item *item)
{
    const pd_model_shape *shape = a->o.shape;
    uint32_t cols = shape->heads / shape->kv_heads * shape->head_dim;
    kern_acts *acts = &a->o.attended;

    for (uint32_t t = 0; t < item->group->tokens; t++) {
        uint32_t row = item->group->row + t, residual_row = a->o.rows_max + row;
        a->o.ops->quantize(acts, row, item->kv_head * cols, cols);
        a->o.ops->residual(acts, row, item->kv_head * cols, cols, residual_row);
        a->o.ops->quantize(acts, residual_row, item->kv_head * cols, cols);
    }
}

/* next: what this thread attends afterwards; group NULL: nothing. */
static void attend_group(kern_attend *a, uint32_t thread, uint32_t layer, const attend_item *item,
                         const attend_item *next)
{
    kern_attention args = attention_of(a, thread, layer, item), next_args;

    if (next->group != NULL) {
        next_args = attention_of(a, thread, layer, next);
        args.next = &next_args;
    }
    a->o.ops->attention(&args);
    quantize_attended(a, item);
}

static uint32_t splits_of(const kern_attend *a, const token_group *group)
{
    return a->row_position[group->row] / KERN_SPLIT_TOKENS + 1;
}

/* Fewer heads of single tokens than threads, or hardly more, and long contexts: their splits are
 * what threads take. */
static bool attends_in_parts(const kern_attend *a)
{
    uint32_t threads = kern_team_threads(a->o.team), splits = 0;
    uint32_t items = a->groups_count * a->o.split->kv_heads;

    if (!a->all_single || threads == 1 || items > threads * PART_ITEMS)
        return false;
    for (uint32_t g = 0; g < a->groups_count; g++)
        splits += splits_of(a, &a->groups[g]);
    return splits >= PART_SPLITS_MIN * a->groups_count;
}

/* After K and V are placed. */
static void attend_in_parts(kern_attend *a, uint32_t thread, uint32_t layer)
{
    uint32_t kv_heads = a->o.split->kv_heads, items = a->groups_count * kv_heads, all = 0;
    uint32_t group_heads = a->o.shape->heads / a->o.shape->kv_heads;
    size_t part = kern_attention_part_floats(group_heads, a->o.shape->head_dim);

    for (uint32_t g = 0; g < a->groups_count; g++)
        all += splits_of(a, &a->groups[g]) * kv_heads;
    for (uint32_t taken; (taken = kern_team_take(a->o.team)) < all;) {
        uint32_t item = 0, split = taken;
        for (uint32_t its; split >= (its = splits_of(a, &a->groups[item / kv_heads])); item++)
            split -= its;
        attend_item found = {&a->groups[item / kv_heads], item % kv_heads};
        kern_attention args = attention_of(a, thread, layer, &found);
        a->o.ops->attention_part(&args, split,
                                 a->parts + item * a->item_part_floats + split * part);
    }
    kern_team_barrier(a->o.team);
    for (uint32_t item; (item = kern_team_take(a->o.team)) < items;) {
        attend_item found = {&a->groups[item / kv_heads], item % kv_heads};
        kern_attention args = attention_of(a, thread, layer, &found);
        a->o.ops->attention_join(&args, splits_of(a, found.group),
                                 a->parts + item * a->item_part_floats);
        quantize_attended(a, &found);
    }
    kern_team_barrier(a->o.team);
}

/* The next of the items that nobody has; group NULL: none is left. The longest contexts first: they
 * come last in a prompt. */
static attend_item take_item(kern_attend *a)
{
    uint32_t kv_heads = a->o.split->kv_heads, items = a->groups_count * kv_heads;
    uint32_t taken = kern_team_take(a->o.team);

    if (taken >= items)
        return (attend_item){NULL, 0};
    uint32_t item = items - 1 - taken;
    return (attend_item){&a->groups[item / kv_heads], item % kv_heads};
}

/* Where every slice is one token, whoever attends for a head also places its K and V. */
void kern_attend_layer(kern_attend *a, uint32_t thread, uint32_t layer, uint32_t live_first,
                       uint32_t live_rows)
{
    uint32_t kv_heads = a->o.split->kv_heads;

    if (!a->all_single || a->in_parts) {
        uint32_t placings = a->runs_count * kv_heads;
        for (uint32_t taken; (taken = kern_team_take(a->o.team)) < placings;)
            place_run_of_head(a, layer, &a->runs[taken / kv_heads], taken % kv_heads);
        kern_team_barrier(a->o.team);
    }
    if (a->in_parts) {
        attend_in_parts(a, thread, layer);
        return;
    }
    for (attend_item item = take_item(a), next; item.group != NULL; item = next) {
        const token_group *group = item.group;
        next = take_item(a);
        if (a->all_single) /* a group is a run then */
            place_run_of_head(a, layer, &a->runs[group - a->groups], item.kv_head);
        if (group->row + group->tokens <= live_first || group->row >= live_first + live_rows)
            continue;
        attend_group(a, thread, layer, &item, &next);
    }
    kern_team_barrier(a->o.team);
}

/* --- the step --- */

static void add_slice(kern_attend *a, uint32_t index)
{
    const kern_slice *slice = &a->step->slices[index];
    uint32_t block_tokens = a->step->layout->block_tokens;

    pd_assert(slice->count <= a->o.rows_max - a->rows);
    for (uint32_t i = 0; i < slice->count; i++, a->rows++) {
        a->row_slice[a->rows] = index;
        a->row_position[a->rows] = slice->position + i;
        if (i % KERN_ATTENTION_TOKENS_MAX == 0)
            a->groups[a->groups_count++] = (token_group){index, a->rows, 0};
        a->groups[a->groups_count - 1].tokens++;
        if (i == 0 || (slice->position + i) % block_tokens == 0)
            a->runs[a->runs_count++] = (place_run){a->rows, 0};
        a->runs[a->runs_count - 1].tokens++;
    }
    a->all_single = a->all_single && slice->count == 1;
}

void kern_attend_begin(kern_attend *a, const kern_step *step)
{
    a->step = step;
    a->rows = a->groups_count = a->runs_count = 0;
    a->all_single = true;
    for (uint32_t i = 0; i < step->slices_count; i++)
        add_slice(a, i);
    a->in_parts = attends_in_parts(a);
}
