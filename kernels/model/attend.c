#include "kernels/model/attend.h"

#include "common/base/mem.h"
#include "kernels/big_memory.h"
#include "kernels/model/rope.h"

#include <math.h>
#include <string.h>

/* Attention in parts: for at most so many heads a thread, and from so many splits a token on. */
#define PART_ITEMS      2
#define PART_SPLITS_MIN 2

/* Query tokens that are attended together. */
typedef struct token_group {
    uint32_t slice;
    uint32_t row; /* of the step, the first */
    uint32_t tokens;
} token_group;

/* Positions whose angles are made at once, when one of them is first reached: a worker is ready
 * before it has angles for a context that nobody may ever fill. */
#define ROPE_ROWS 16

/* Splits that sequences share, K and V of which are read once for several of them: room for their
 * parts, until each sequence goes on with what it has alone. What does not fit is not shared. */
#define SHARED_PARTS_BYTES ((size_t)16 << 20)

/* One split, for groups of tokens whose sequences have it in common. */
typedef struct shared_split {
    uint32_t split;
    uint32_t first, groups; /* of the order */
    uint32_t tokens;        /* of all, KERN_ATTENTION_TOKENS_MAX at most */
} shared_split;

/* Consecutive tokens of one slice in one block: placed by one thread, so that the block's tiles of
 * a head have one writer. */
typedef struct place_run {
    uint32_t row; /* of the step, the first */
    uint32_t tokens;
} place_run;

struct kern_attend {
    kern_attend_options o;
    kern_memory memory;    /* all below */
    double *frequencies;   /* [rope_dims / 2] */
    float *rope;           /* [context_max][rope_dims / 2][2], as far as it was reached */
    bool *rope_made;       /* [context_max / ROPE_ROWS] */
    uint32_t *rope_wanted; /* [rows]: runs of ROPE_ROWS that this step is first to reach */
    uint32_t *row_slice, *row_position; /* [rows] */
    token_group *groups;                /* [rows] */
    place_run *runs;                    /* [rows] */
    float *parts;                       /* [PART_ITEMS a thread][item_part_floats] */
    size_t item_part_floats;            /* of all splits of one row and KV head */
    size_t part_floats;                 /* of one split of one row and KV head */
    uint8_t *scratch; /* [threads][scratch_bytes]: the operations', queries and a part gathered */
    size_t scratch_bytes, ops_scratch_bytes;
    /* Shared splits. By group: how many of its first ones, and where their parts are in units, of
     * all KV heads' parts of a token's split each. */
    uint32_t *shared, *parts_at; /* [rows] */
    float *shared_parts;         /* [units_max][kv_heads][part_floats] */
    uint32_t units_max;
    uint32_t *order,
        *common;        /* [rows] groups by their tables; splits in common with the one before */
    shared_split *sets; /* [units_max] */
    /* the step under way; written by the stepping thread between steps */
    const kern_step *step;
    uint32_t rows, groups_count, runs_count, order_count, sets_count, rope_wanted_count;
    bool all_single; /* every slice is one token */
    bool in_parts;   /* attends_in_parts */
};

/* --- memory --- */

static void carve(kern_carver *c, kern_attend *a)
{
    size_t rows = a->o.rows_max, threads = kern_team_threads(a->o.team);

    a->frequencies = kern_carve(c, a->o.shape->rope_dims / 2, sizeof(double));
    a->rope_made = kern_carve(c, a->o.context_max / ROPE_ROWS + 1, sizeof(bool));
    a->rope_wanted = kern_carve(c, rows, sizeof(uint32_t));
    a->rope = kern_carve(c, (size_t)a->o.context_max * a->o.shape->rope_dims, sizeof(float));
    a->row_slice = kern_carve(c, rows, sizeof(uint32_t));
    a->row_position = kern_carve(c, rows, sizeof(uint32_t));
    a->groups = kern_carve(c, rows, sizeof *a->groups);
    a->runs = kern_carve(c, rows, sizeof *a->runs);
    a->parts = kern_carve(c, PART_ITEMS * threads * a->item_part_floats, sizeof(float));
    a->scratch = kern_carve(c, threads, a->scratch_bytes);
    a->shared = kern_carve(c, rows, sizeof(uint32_t));
    a->parts_at = kern_carve(c, rows, sizeof(uint32_t));
    a->order = kern_carve(c, rows, sizeof(uint32_t));
    a->common = kern_carve(c, rows, sizeof(uint32_t));
    a->sets = kern_carve(c, a->units_max, sizeof *a->sets);
    a->shared_parts =
        kern_carve(c, (size_t)a->units_max * a->o.split->kv_heads, a->part_floats * sizeof(float));
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
    a->part_floats = kern_attention_part_floats(group, shape->head_dim);
    a->item_part_floats = splits * a->part_floats;
    a->ops_scratch_bytes =
        kern_memory_round(options->ops->attention_scratch_bytes(group, shape->head_dim));
    a->scratch_bytes = a->ops_scratch_bytes +
                       kern_memory_round(KERN_ATTENTION_TOKENS_MAX * sizeof(float) *
                                         ((size_t)group * shape->head_dim + a->part_floats));
    size_t units = SHARED_PARTS_BYTES / (options->split->kv_heads * a->part_floats * sizeof(float));
    a->units_max =
        (uint32_t)(units < splits * options->rows_max ? units : splits * options->rows_max);
    carve(&sizing, a);
    pd_status status = kern_memory_map(sizing.bytes, &a->memory);
    if (status != PD_OK) {
        pd_free(a);
        return status;
    }
    carve(&(kern_carver){.memory = &a->memory}, a);
    kern_rope_frequencies(shape->rope_base, shape->rope_dims, a->frequencies);
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

/* K's half of the block that a row's token lies in; V's follows. */
static uint8_t *half_of(const kern_attend *a, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const pd_kv_layout *layout = a->step->layout;

    return (uint8_t *)a->step->pool +
           pd_kv_layout_k_offset(layout, layer, block_of(a, row), in_model(a, kv_head));
}

/* Rotates one row's query and key heads of a KV head and writes K and V to the pool. */
static void place_head(kern_attend *a, uint32_t layer, uint32_t row, uint32_t kv_head)
{
    const pd_model_shape *shape = a->o.shape;
    uint32_t group = shape->heads / shape->kv_heads, dim = shape->head_dim;
    uint32_t pairs = shape->rope_dims / 2;
    const float *table = a->rope + (size_t)a->row_position[row] * shape->rope_dims;
    float *key = row_of(a, a->o.key, row) + (size_t)kv_head * dim;
    const pd_kv_layout *layout = a->step->layout;
    uint32_t token = a->row_position[row] % layout->block_tokens;
    uint8_t *half = half_of(a, layer, row, kv_head);

    for (uint32_t h = 0; h < group; h++)
        a->o.ops->rope(row_of(a, a->o.query, row) + ((size_t)kv_head * group + h) * dim, table,
                       pairs);
    a->o.ops->rope(key, table, pairs);
    a->o.ops->store_kv(layout, key, token, half);
    a->o.ops->store_kv(layout, row_of(a, a->o.value, row) + (size_t)kv_head * dim, token,
                       half + layout->half_bytes);
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

static float *shared_parts_of(const kern_attend *a, uint32_t group, uint32_t kv_head)
{
    size_t at = (size_t)a->parts_at[group] * a->o.split->kv_heads +
                (size_t)kv_head * a->groups[group].tokens * a->shared[group];

    return a->shared_parts + at * a->part_floats;
}

static void add_shared_parts(const kern_attend *a, const attend_item *item, kern_attention *args)
{
    uint32_t group = (uint32_t)(item->group - a->groups);

    args->parts_splits = a->shared[group];
    if (args->parts_splits > 0)
        args->parts = shared_parts_of(a, group, item->kv_head);
}

/* A KV head's part of a shared split: the tokens' queries together, then each group's rows to where
 * it goes on from. */
static void attend_set(kern_attend *a, uint32_t thread, uint32_t layer, const shared_split *set,
                       uint32_t kv_head)
{
    const uint32_t *members = a->order + set->first;
    attend_item item = {&a->groups[members[0]], kv_head};
    kern_attention args = attention_of(a, thread, layer, &item);
    uint32_t dim = a->o.shape->head_dim, rows = set->tokens * args.heads, row = 0;
    size_t cols = (size_t)args.heads * dim;
    float *queries =
        (float *)(void *)(a->scratch + thread * a->scratch_bytes + a->ops_scratch_bytes);
    float *part = queries + KERN_ATTENTION_TOKENS_MAX * cols, *query = queries;

    for (uint32_t m = 0; m < set->groups; m++) {
        const token_group *group = &a->groups[members[m]];
        for (uint32_t t = 0; t < group->tokens; t++, query += cols)
            memcpy(query, row_of(a, a->o.query, group->row + t) + kv_head * cols,
                   cols * sizeof *query);
    }
    args.tokens = set->tokens;
    args.position = (set->split + 1) * KERN_SPLIT_TOKENS - 1;
    args.query = queries;
    args.query_stride = cols;
    a->o.ops->attention_part(&args, set->split, part);
    for (uint32_t m = 0; m < set->groups; m++) {
        uint32_t own = a->groups[members[m]].tokens * args.heads;
        float *to = shared_parts_of(a, members[m], kv_head) +
                    set->split * kern_attention_part_floats(own, dim);
        memcpy(to, part + row, own * sizeof *to);
        memcpy(to + own, part + rows + row, own * sizeof *to);
        memcpy(to + 2 * (size_t)own, part + 2 * (size_t)rows + (size_t)row * dim,
               (size_t)own * dim * sizeof *to);
        row += own;
    }
}

/* After K and V are placed. A split's sets come one after the other, while it is in the cache. */
static void attend_shared(kern_attend *a, uint32_t thread, uint32_t layer)
{
    uint32_t items = a->sets_count * a->o.split->kv_heads;

    for (uint32_t taken; (taken = kern_team_take(a->o.team)) < items;)
        attend_set(a, thread, layer, &a->sets[taken % a->sets_count], taken / a->sets_count);
    kern_team_barrier(a->o.team);
}

/* next: what this thread attends afterwards; group NULL: nothing. */
static void attend_group(kern_attend *a, uint32_t thread, uint32_t layer, const attend_item *item,
                         const attend_item *next)
{
    kern_attention args = attention_of(a, thread, layer, item), next_args;

    if (next->group != NULL) {
        next_args = attention_of(a, thread, layer, next);
        add_shared_parts(a, next, &next_args);
        args.next = &next_args;
    }
    add_shared_parts(a, item, &args);
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

/* Where every slice is one token and nothing is shared, whoever attends for a head also places its
 * K and V. */
void kern_attend_layer(kern_attend *a, uint32_t thread, uint32_t layer, uint32_t live_first,
                       uint32_t live_rows)
{
    uint32_t kv_heads = a->o.split->kv_heads;

    bool placed = !a->all_single || a->in_parts || a->sets_count > 0;

    if (placed) {
        uint32_t placings = a->runs_count * kv_heads;
        for (uint32_t taken; (taken = kern_team_take(a->o.team)) < placings;)
            place_run_of_head(a, layer, &a->runs[taken / kv_heads], taken % kv_heads);
        kern_team_barrier(a->o.team);
    }
    if (a->in_parts) {
        attend_in_parts(a, thread, layer);
        return;
    }
    if (a->sets_count > 0)
        attend_shared(a, thread, layer);
    for (attend_item item = take_item(a), next; item.group != NULL; item = next) {
        const token_group *group = item.group;
        next = take_item(a);
        if (!placed) /* a group is a run then */
            place_run_of_head(a, layer, &a->runs[group - a->groups], item.kv_head);
        if (group->row + group->tokens <= live_first || group->row >= live_first + live_rows)
            continue;
        attend_group(a, thread, layer, &item, &next);
    }
    kern_team_barrier(a->o.team);
}

/* --- angles --- */

static void want_angles(kern_attend *a, uint32_t position)
{
    uint32_t run = position / ROPE_ROWS;

    if (!a->rope_made[run])
        a->rope_wanted[a->rope_wanted_count++] = run;
    a->rope_made[run] = true;
}

uint32_t kern_attend_angles(const kern_attend *a)
{
    return a->rope_wanted_count;
}

void kern_attend_make_angles(kern_attend *a, uint32_t n)
{
    uint32_t first = a->rope_wanted[n] * ROPE_ROWS, left = a->o.context_max - first;
    uint32_t dims = a->o.shape->rope_dims;

    kern_rope_rows(a->frequencies, dims, first, left < ROPE_ROWS ? left : ROPE_ROWS,
                   a->rope + (size_t)first * dims);
}

/* --- what sequences share --- */

/* Splits that lie wholly before a group's tokens. */
static uint32_t whole_splits(const kern_attend *a, uint32_t group)
{
    return a->row_position[a->groups[group].row] / KERN_SPLIT_TOKENS;
}

static const pd_block *table_of(const kern_attend *a, uint32_t group)
{
    return a->step->slices[a->groups[group].slice].blocks;
}

/* How two groups' tables compare over the splits that both have whole, and how many of these are
 * the same memory. */
static int compare_tables(const kern_attend *a, uint32_t left, uint32_t right, uint32_t *splits_out)
{
    uint32_t block_tokens = a->step->layout->block_tokens;
    uint32_t l = whole_splits(a, left), r = whole_splits(a, right), least = l < r ? l : r;
    uint32_t blocks = (least * KERN_SPLIT_TOKENS + block_tokens - 1) / block_tokens, same = 0;
    const pd_block *left_table = table_of(a, left), *right_table = table_of(a, right);

    while (same < blocks && left_table[same] == right_table[same])
        same++;
    if (same == blocks) {
        *splits_out = least;
        return l < r ? -1 : l > r;
    }
    *splits_out = same * block_tokens / KERN_SPLIT_TOKENS;
    return left_table[same] < right_table[same] ? -1 : 1;
}

/* Groups that may share, in the order of their tables: those that have the most in common are
 * neighbours. No heap: an insertion each. */
static void order_groups(kern_attend *a)
{
    uint32_t splits;

    a->order_count = 0;
    for (uint32_t g = 0; g < a->groups_count; g++) {
        uint32_t low = 0, high = a->order_count;
        a->shared[g] = 0;
        if (whole_splits(a, g) == 0 || a->groups[g].tokens > KERN_ATTENTION_TOKENS_MAX / 2)
            continue;
        while (low < high) {
            uint32_t middle = low + (high - low) / 2;
            if (compare_tables(a, a->order[middle], g, &splits) <= 0)
                low = middle + 1;
            else
                high = middle;
        }
        memmove(a->order + low + 1, a->order + low, (a->order_count - low) * sizeof *a->order);
        a->order[low] = g;
        a->order_count++;
    }
}

/* How many splits each group gets from parts, as far as there is room. */
static void give_room(kern_attend *a)
{
    uint32_t units = 0;

    for (uint32_t i = 0; i < a->order_count; i++) {
        uint32_t before = a->common[i], after = i + 1 < a->order_count ? a->common[i + 1] : 0;
        uint32_t group = a->order[i], splits = before > after ? before : after;
        uint32_t wanted = splits * a->groups[group].tokens;
        if (wanted > a->units_max - units)
            continue;
        a->shared[group] = splits;
        a->parts_at[group] = units;
        units += wanted;
    }
}

/* Neighbours first .. end - 1 have the split in common: sets of about equal size. */
static void add_sets(kern_attend *a, uint32_t split, uint32_t first, uint32_t end)
{
    uint32_t tokens = 0;

    for (uint32_t i = first; i < end; i++)
        tokens += a->groups[a->order[i]].tokens;
    uint32_t count = (tokens + KERN_ATTENTION_TOKENS_MAX - 1) / KERN_ATTENTION_TOKENS_MAX;
    uint32_t each = (tokens + count - 1) / count;
    for (uint32_t i = first; i < end;) {
        shared_split set = {.split = split, .first = i};
        do {
            set.tokens += a->groups[a->order[i++]].tokens;
            set.groups++;
        } while (i < end && set.tokens < each &&
                 set.tokens + a->groups[a->order[i]].tokens <= KERN_ATTENTION_TOKENS_MAX);
        pd_assert(a->sets_count < a->units_max); /* each has a unit of its own at least */
        a->sets[a->sets_count++] = set;
    }
}

static void find_shared(kern_attend *a)
{
    uint32_t most = 0;

    a->sets_count = 0;
    order_groups(a);
    for (uint32_t i = 0; i < a->order_count; i++) {
        a->common[i] = 0;
        if (i > 0)
            (void)compare_tables(a, a->order[i - 1], a->order[i], &a->common[i]);
        most = a->common[i] > most ? a->common[i] : most;
    }
    if (most == 0)
        return;
    give_room(a);
    for (uint32_t split = 0; split < most; split++) {
        for (uint32_t i = 0, end; i < a->order_count; i = end) {
            end = i + 1;
            if (a->shared[a->order[i]] <= split)
                continue;
            while (end < a->order_count && a->common[end] > split &&
                   a->shared[a->order[end]] > split)
                end++;
            add_sets(a, split, i, end);
        }
    }
}

uint32_t kern_attend_sets(const kern_attend *a)
{
    return a->sets_count;
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
        want_angles(a, slice->position + i);
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
    a->rows = a->groups_count = a->runs_count = a->rope_wanted_count = 0;
    a->all_single = true;
    for (uint32_t i = 0; i < step->slices_count; i++)
        add_slice(a, i);
    find_shared(a);
    a->in_parts = a->sets_count == 0 && attends_in_parts(a);
}
