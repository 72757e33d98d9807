/* Paged attention: near a double-precision softmax whatever the numbers, blind past a row's
 * position, and bit-equal whether a row comes alone, in a batch, in a prompt's chunk or in a
 * graph's bucket. */
#include "common/base/mem.h"
#include "kernels/backend.h"
#include "kernels/cuda/items.h"
#include "kernels/number.h"
#include "tests/gpu-emu/device.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define SEQUENCES_MAX 4
#define ROWS_MAX      1024
#define TILES_MAX     160
#define ITEMS_MAX     4096
#define LAYERS        3
#define F16_NAN       0x7e00

/* A pool with some sequences in it. Whatever is no token of theirs is NaN. */
typedef struct context {
    pd_kv_layout layout;
    uint32_t heads, sequences, length[SEQUENCES_MAX];
    uint32_t table[SEQUENCES_MAX]; /* where its block table starts */
    uint32_t tables_len;
    pd_block *tables;
    uint8_t *pool;
    float *query[SEQUENCES_MAX]; /* [position][heads][head_dim] */
    float scale;
} context;

typedef struct context_options {
    uint32_t heads, kv_heads, head_dim, block_tokens;
    uint32_t lengths[SEQUENCES_MAX]; /* 0: no more */
} context_options;

/* Values by layer, sequence, position and head: f is asked for each. */
typedef float (*value_fn)(uint64_t *random, uint32_t position, uint32_t column);

static float plain(uint64_t *random, uint32_t position, uint32_t column)
{
    (void)position, (void)column;
    return device_float(random);
}

static uint16_t *kv_at(const context *c, uint32_t layer, uint32_t sequence, uint32_t head,
                       uint32_t position, bool value)
{
    const pd_kv_layout *l = &c->layout;
    pd_block block = c->tables[c->table[sequence] + position / l->block_tokens];
    uint64_t at = pd_kv_layout_k_offset(l, layer, block, head) +
                  position % l->block_tokens * l->token_bytes + (value ? l->half_bytes : 0);

    return (uint16_t *)(void *)(c->pool + at);
}

static void fill(context *c, value_fn query, value_fn key, value_fn value)
{
    uint32_t dim = c->layout.head_dim;
    uint64_t random = 5;

    for (uint32_t s = 0; s < c->sequences; s++)
        for (uint32_t p = 0; p < c->length[s]; p++) {
            for (uint32_t i = 0; i < c->heads * dim; i++)
                c->query[s][(size_t)p * c->heads * dim + i] = query(&random, p, i % dim);
            for (uint32_t layer = 0; layer < LAYERS; layer++)
                for (uint32_t head = 0; head < c->layout.kv_heads; head++)
                    for (uint32_t i = 0; i < dim; i++) {
                        kv_at(c, layer, s, head, p, false)[i] = kern_f32_to_f16(key(&random, p, i));
                        kv_at(c, layer, s, head, p, true)[i] =
                            kern_f32_to_f16(value(&random, p, i));
                    }
        }
}

static void context_make(context *c, const context_options *o)
{
    pd_model_shape shape = {
        .layers = LAYERS, .kv_heads = o->kv_heads, .heads = o->heads, .head_dim = o->head_dim};
    uint32_t blocks = 1; /* one is nobody's */

    *c = (context){.heads = o->heads, .scale = 1.0f / sqrtf((float)o->head_dim)};
    for (; c->sequences < SEQUENCES_MAX && o->lengths[c->sequences] != 0; c->sequences++) {
        uint32_t s = c->sequences, own = (o->lengths[s] + o->block_tokens - 1) / o->block_tokens;
        c->length[s] = o->lengths[s];
        c->table[s] = c->tables_len;
        c->tables_len += own;
        blocks += own;
        c->query[s] = pd_calloc((size_t)o->lengths[s] * o->heads * o->head_dim, sizeof(float));
        assert_non_null(c->query[s]);
    }
    pd_kv_layout_options layout = {.dtype = PD_F16,
                                   .block_tokens = o->block_tokens,
                                   .group_layers = 2, /* the last group has one layer */
                                   .memory_bytes = UINT64_MAX / 2,
                                   .blocks_max = blocks};
    assert_int_equal(pd_kv_layout_make(&shape, &layout, &c->layout), PD_OK);
    c->tables = pd_calloc(blocks, sizeof *c->tables);
    c->pool = pd_malloc(c->layout.pool_bytes);
    assert_true(c->tables != NULL && c->pool != NULL);
    /* neighbours in a sequence are none in the pool */
    for (uint32_t i = 0; i < c->tables_len; i++)
        c->tables[i] = i % 2 == 0 ? blocks - 1 - i / 2 : i / 2;
    for (uint64_t i = 0; i < c->layout.pool_bytes / 2; i++)
        ((uint16_t *)(void *)c->pool)[i] = F16_NAN;
    fill(c, plain, plain, plain);
}

static void context_free(context *c)
{
    for (uint32_t s = 0; s < c->sequences; s++)
        pd_free(c->query[s]);
    pd_free(c->tables);
    pd_free(c->pool);
}

/* --- steps --- */

typedef struct step_row {
    uint32_t sequence, position;
} step_row;

/* What a launch is given; rows with position CU_ROW_NONE are padding. */
typedef struct step_plan {
    const context *context;
    uint32_t layer, positions_max;
    bool decode;
    uint32_t ones; /* else: the first rows, that come by items beside the tiles */
    uint32_t room,
        more_items; /* decode: of a run, 0: all in one; items of no row, in the last run */
    uint32_t rows, tiles;
    step_row row[ROWS_MAX];
    uint32_t tile_row[TILES_MAX], tile_rows[TILES_MAX];
} step_plan;

static void add_row(step_plan *plan, uint32_t sequence, uint32_t position)
{
    assert_true(plan->rows < ROWS_MAX);
    plan->row[plan->rows++] = (step_row){sequence, position};
}

/* Rows from .. to - 1 of a sequence in tiles, as a prompt's chunk comes. */
static void add_chunk(step_plan *plan, uint32_t sequence, uint32_t from, uint32_t to)
{
    while (from < to) {
        uint32_t rows = to - from < CU_TILE_ROWS ? to - from : CU_TILE_ROWS;
        assert_true(plan->tiles < TILES_MAX);
        plan->tile_row[plan->tiles] = plan->rows;
        plan->tile_rows[plan->tiles++] = rows;
        for (uint32_t i = 0; i < rows; i++)
            add_row(plan, sequence, from + i);
        from += rows;
    }
}

/* A step has no more tiles than rows. */
static void add_empty_tiles(step_plan *plan, uint32_t tiles)
{
    plan->tiles += tiles;
    while (plan->rows < plan->tiles)
        add_row(plan, 0, CU_ROW_NONE);
}

static cu_kv kv_of(const pd_kv_layout *l, void *pool)
{
    return (cu_kv){.pool = pool,
                   .layers = l->layers,
                   .kv_heads = l->kv_heads,
                   .head_dim = l->head_dim,
                   .block_tokens = l->block_tokens,
                   .group_layers = l->group_layers,
                   .blocks = l->blocks,
                   .token_bytes = l->token_bytes,
                   .half_bytes = l->half_bytes,
                   .layer_bytes = l->layer_bytes};
}

/* The list of what comes by items, uploaded; the scratch that it needs. */
static uint64_t add_items(device *d, const step_plan *plan, const uint32_t *position, cu_step *step)
{
    uint32_t rows = plan->decode ? plan->rows : plan->ones;
    static uint32_t item_row[ITEMS_MAX], row_item[ROWS_MAX];
    static cu_run runs[ROWS_MAX];
    uint32_t items = 0, most = 0;

    if (rows == 0)
        return 0;
    for (uint32_t r = 0; r < rows; r++)
        items += cu_items_of(position[r]);
    assert_true(items + plan->more_items <= ITEMS_MAX);
    step->run = runs;
    step->runs = cu_items_list(position, rows, plan->room != 0 ? plan->room : items, item_row,
                               row_item, runs);
    for (uint32_t i = 0; i < plan->more_items; i++)
        item_row[items++] = CU_ROW_NONE;
    runs[step->runs - 1].items += plan->more_items;
    for (uint32_t i = 0; i < step->runs; i++)
        most = runs[i].items > most ? runs[i].items : most;
    step->item_row = device_upload(d, item_row, items * sizeof *item_row);
    step->row_item = device_upload(d, row_item, rows * sizeof *row_item);
    return most * cu_attention_item_bytes(plan->context->heads, plan->context->layout.head_dim);
}

/* out: [rows][heads][head_dim]; what the device does not write stays NaN. */
static void attend(device *d, const step_plan *plan, float *out)
{
    const context *c = plan->context;
    uint32_t dim = c->layout.head_dim, rows = plan->rows;
    size_t stride = (size_t)(c->heads + 2 * c->layout.kv_heads) * dim;
    size_t out_bytes = (size_t)rows * c->heads * dim * sizeof(float);
    uint32_t position[ROWS_MAX], table[ROWS_MAX];
    float *qkv = pd_malloc(rows * stride * sizeof(float));

    assert_non_null(qkv);
    for (size_t i = 0; i < rows * stride; i++)
        qkv[i] = NAN;
    for (uint32_t r = 0; r < rows; r++) {
        const step_row *row = &plan->row[r];
        position[r] = row->position;
        table[r] = row->position == CU_ROW_NONE ? UINT32_MAX : c->table[row->sequence];
        if (row->position != CU_ROW_NONE)
            memcpy(qkv + r * stride,
                   c->query[row->sequence] + (size_t)row->position * c->heads * dim,
                   (size_t)c->heads * dim * sizeof(float));
    }
    cu_step step = {
        .rows = rows,
        .position = device_upload(d, position, rows * sizeof *position),
        .table = device_upload(d, table, rows * sizeof *table),
        .blocks = device_upload(d, c->tables, c->tables_len * sizeof *c->tables),
        .tiles = plan->tiles,
        .tile_row = device_upload(d, plan->tile_row, (plan->tiles + 1) * sizeof(uint32_t)),
        .tile_rows = device_upload(d, plan->tile_rows, (plan->tiles + 1) * sizeof(uint32_t))};
    cu_kv kv = kv_of(&c->layout, device_upload(d, c->pool, c->layout.pool_bytes));
    uint64_t scratch = add_items(d, plan, position, &step);
    if (!plan->decode) {
        uint64_t tiles = cu_attention_scratch_bytes(rows, c->heads, dim, plan->positions_max);
        scratch = tiles > scratch ? tiles : scratch;
    }
    const float *device_qkv = device_upload(d, qkv, rows * stride * sizeof(float));
    for (size_t i = 0; i < out_bytes / sizeof(float); i++)
        out[i] = NAN;
    float *device_out = device_upload(d, out, out_bytes);
    assert_int_equal(cu_attention(d->stream, &step, &kv, plan->layer, c->heads, plan->positions_max,
                                  c->scale, device_qkv, device_out,
                                  device_space(d, scratch != 0 ? scratch : sizeof(float))),
                     PD_OK);
    device_download(d, out, device_out, out_bytes);
    pd_free(qkv);
}

static float *out_make(const step_plan *plan)
{
    float *out = pd_malloc((size_t)plan->rows * plan->context->heads *
                           plan->context->layout.head_dim * sizeof(float));

    assert_non_null(out);
    return out;
}

static uint32_t positions_of(const step_plan *plan)
{
    uint32_t most = 0;

    for (uint32_t r = 0; r < plan->rows; r++)
        if (plan->row[r].position != CU_ROW_NONE && plan->row[r].position >= most)
            most = plan->row[r].position + 1;
    return most;
}

/* --- the reference, in double precision --- */

/* Of one query head: result, and how far off f32 sums may be. A score's error is 2^-19 of the sum
 * of its terms' sizes (22 bits of the query, at most 32 f32 sums, truncated by some tensor cores);
 * an element of the result sees each probability's relative error, and 2^-20 of its own size. */
static void reference(const context *c, uint32_t layer, const step_row *row, uint32_t head,
                      double *out, double *bound)
{
    uint32_t dim = c->layout.head_dim, count = row->position + 1;
    uint32_t kv_head = head / (c->heads / c->layout.kv_heads);
    const float *q = c->query[row->sequence] + ((size_t)row->position * c->heads + head) * dim;
    double *score = pd_calloc(2 * (size_t)count, sizeof *score), *off = score + count;
    double largest = -INFINITY, sum = 0, sum_off = 0;

    assert_non_null(score);
    for (uint32_t j = 0; j < count; j++) {
        const uint16_t *k = kv_at(c, layer, row->sequence, kv_head, j, false);
        for (uint32_t i = 0; i < dim; i++) {
            double term = (double)(q[i] * c->scale) * (double)kern_f16_to_f32(k[i]);
            score[j] += term;
            off[j] += fabs(term) * 0x1p-19;
        }
        largest = score[j] > largest ? score[j] : largest;
    }
    for (uint32_t i = 0; i < dim; i++)
        out[i] = bound[i] = 0;
    for (uint32_t j = 0; j < count; j++) {
        double p = exp(score[j] - largest);
        const uint16_t *v = kv_at(c, layer, row->sequence, kv_head, j, true);
        sum += p;
        sum_off += p * off[j];
        for (uint32_t i = 0; i < dim; i++) {
            double value = (double)kern_f16_to_f32(v[i]);
            out[i] += p * value;
            bound[i] += p * fabs(value) * (off[j] + 0x1p-20);
        }
    }
    for (uint32_t i = 0; i < dim; i++) {
        out[i] /= sum;
        bound[i] = bound[i] / sum + fabs(out[i]) * sum_off / sum + 1e-30;
    }
    pd_free(score);
}

/* The largest error of all, in units of its bound. */
static double compare(const step_plan *plan, const float *out)
{
    const context *c = plan->context;
    uint32_t dim = c->layout.head_dim;
    double expected[256], bound[256], worst = 0;

    for (uint32_t r = 0; r < plan->rows; r++)
        for (uint32_t head = 0; head < c->heads; head++) {
            const float *got = out + ((size_t)r * c->heads + head) * dim;
            if (plan->row[r].position == CU_ROW_NONE) {
                for (uint32_t i = 0; i < dim; i++) /* decode: zeros; else not written */
                    assert_true(plan->decode ? kern_bits_of(got[i]) == 0 : isnan(got[i]));
                continue;
            }
            reference(c, plan->layer, &plan->row[r], head, expected, bound);
            for (uint32_t i = 0; i < dim; i++) {
                double off = fabs((double)got[i] - expected[i]) / bound[i];
                if (!(off <= 1))
                    fail_msg("position %u head %u column %u: %.9g, not %.9g within %.3g",
                             plan->row[r].position, head, i, (double)got[i], expected[i], bound[i]);
                worst = off > worst ? off : worst;
            }
        }
    return worst;
}

static void attend_and_compare(device *d, void *ctx)
{
    const step_plan *plan = ctx;
    float *out = out_make(plan);

    attend(d, plan, out);
    double worst = compare(plan, out);
    if (getenv("ATTENTION_SHOW") != NULL)
        print_message("# %s head_dim %u, %u of %u heads: error %.3f of the bound\n",
                      plan->decode ? "decode" : "prefill", plan->context->layout.head_dim,
                      plan->context->heads, plan->context->layout.kv_heads, worst);
    pd_free(out);
}

/* --- what is promised --- */

static const uint32_t edges[] = {0, 1, 15, 16, 17, 62, 63, 64, 65, 255, 256, 257, 319, 320};
#define EDGES (sizeof edges / sizeof *edges)

static void plan_edges(step_plan *plan, const context *c, bool decode)
{
    *plan = (step_plan){.context = c, .layer = 1, .decode = decode};
    if (decode) {
        for (uint32_t i = 0; i < EDGES; i++)
            if (edges[i] < c->length[0])
                add_row(plan, 0, edges[i]);
        add_row(plan, 0, CU_ROW_NONE);
        add_row(plan, 1, c->length[1] - 1);
    } else {
        add_chunk(plan, 0, 0, c->length[0] < 19 ? c->length[0] : 19);
        add_chunk(plan, 1, c->length[1] - 1, c->length[1]);
        if (c->length[0] > 250)
            add_chunk(plan, 0, 250, c->length[0] < 260 ? c->length[0] : 260);
        plan->tiles++; /* of 0 rows */
        add_row(plan, 0, CU_ROW_NONE);
    }
    plan->positions_max = positions_of(plan);
}

static const context_options shapes[] = {
    {3, 1, 64, 16, {321, 40}},  {4, 1, 128, 16, {66, 258}}, {16, 1, 64, 48, {66, 257}},
    {3, 3, 256, 16, {65, 20}},  {9, 3, 64, 32, {258, 5}},   {8, 1, 128, 256, {260, 33}},
    {17, 1, 32, 16, {70, 257}}, {5, 5, 80, 16, {66, 258}},  {10, 2, 96, 16, {64, 256}},
    {20, 1, 64, 16, {20, 64}},  {12, 1, 256, 16, {260, 1}}, {1, 1, 32, 16, {1, 2}},
    {12, 1, 128, 16, {70, 30}},
};

/* The first shapes in every way a device may run, the others once. */
#define SHAPES_EACH 2

static void every_shape(device *d, bool decode)
{
    static step_plan plan;

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        context c;
        context_make(&c, &shapes[i]);
        plan_edges(&plan, &c, decode);
        plan.layer = (uint32_t)i % LAYERS;
        if (i < SHAPES_EACH)
            device_each(d, 1, attend_and_compare, &plan);
        else
            attend_and_compare(d, &plan);
        device_clear(d);
        context_free(&c);
    }
}

static void decode_is_a_softmax_at_every_shape(void **state)
{
    every_shape(*state, true);
}

static void prefill_is_a_softmax_at_every_shape(void **state)
{
    every_shape(*state, false);
}

static float zero(uint64_t *random, uint32_t position, uint32_t column)
{
    (void)random, (void)position, (void)column;
    return 0;
}

static float large(uint64_t *random, uint32_t position, uint32_t column)
{
    return plain(random, position, column) * 600;
}

static float tiny(uint64_t *random, uint32_t position, uint32_t column)
{
    return plain(random, position, column) * 1e-30f;
}

/* Keys all point away, the further on the more: scores of -100 to -4000, none near 0. */
static float away(uint64_t *random, uint32_t position, uint32_t column)
{
    (void)random, (void)column;
    return -(float)(position + 10);
}

static float one(uint64_t *random, uint32_t position, uint32_t column)
{
    (void)random, (void)position, (void)column;
    return 1;
}

static float largest_f16(uint64_t *random, uint32_t position, uint32_t column)
{
    (void)position, (void)column;
    return device_random(random) % 2 == 0 ? 65504 : -65504;
}

static void any_numbers(void **state)
{
    static const struct {
        value_fn query, key, value;
    } kinds[] = {
        {zero, plain, plain},  /* all scores equal */
        {large, plain, plain}, /* one position takes all */
        {plain, large, plain},      {one, away, plain},          {tiny, plain, plain},
        {tiny, largest_f16, plain}, {large, largest_f16, plain}, {plain, plain, largest_f16},
        {plain, zero, zero},
    };
    static const context_options sizes[] = {{4, 1, 128, 16, {300, 40}}, {3, 1, 64, 16, {70, 17}}};
    static step_plan plan;

    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (size_t size = i < 2 ? 0 : 1; size < 2; size++) /* the long one: past a split */
            for (int decode = 0; decode < 2; decode++) {
                context c;
                context_make(&c, &sizes[size]);
                fill(&c, kinds[i].query, kinds[i].key, kinds[i].value);
                plan_edges(&plan, &c, decode == 1);
                attend_and_compare(*state, &plan);
                device_clear(*state);
                context_free(&c);
            }
}

/* Keys that point away, the further on the less: a split's largest score is its last, and the last
 * split's the largest of all. */
static float coming(uint64_t *random, uint32_t position, uint32_t column)
{
    (void)random, (void)column;
    return (float)position - 20000;
}

/* The merge takes 32 splits at a time: contexts of one less, exactly so many, one more, and twice
 * as many and some. Where all scores are alike each split counts; with `away` the first one's is so
 * much larger that nothing may be scaled by what comes 32 later, with `coming` the last one's. */
static void rows_of_more_splits_than_a_merge_takes_at_once(void **state)
{
    static const uint32_t positions[] = {7935, 7936, 8191, 8192, 8447, 16383, 16384, 16999};
    static const value_fn queries[] = {tiny, one, one}, keys[] = {plain, away, coming};
    static step_plan plan;
    context c;

    context_make(&c, &(context_options){2, 1, 32, 64, {17000}});
    for (size_t kind = 0; kind < sizeof keys / sizeof *keys; kind++) {
        fill(&c, queries[kind], keys[kind], plain);
        for (int decode = 0; decode < 2; decode++) {
            plan = (step_plan){.context = &c, .layer = 1, .decode = decode == 1};
            for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
                if (decode == 1)
                    add_row(&plan, 0, positions[i]);
                else if (i % 3 == 0) /* 7935, 8192 and 16384, the last with the row before it */
                    add_chunk(&plan, 0, positions[i] - (i == 6), positions[i] + 1);
            }
            plan.positions_max = positions_of(&plan);
            attend_and_compare(*state, &plan);
            device_clear(*state);
        }
    }
    context_free(&c);
}

/* What every row of a sequence is when it is decoded, and what it must be however it comes. */
typedef struct twins {
    step_plan plan; /* of the way it comes */
    const float *expected;
    uint32_t broken; /* a position; numbers_that_are_none.. alone */
} twins;

static void attend_and_equal(device *d, void *ctx)
{
    const twins *t = ctx;
    const context *c = t->plan.context;
    size_t row_floats = (size_t)c->heads * c->layout.head_dim;
    float *out = out_make(&t->plan);

    attend(d, &t->plan, out);
    for (uint32_t r = 0; r < t->plan.rows; r++) {
        const step_row *row = &t->plan.row[r];
        if (row->position == CU_ROW_NONE)
            continue;
        assert_int_equal(row->sequence, 0);
        const float *expected = t->expected + row->position * row_floats;
        for (size_t i = 0; i < row_floats; i++)
            if (kern_bits_of(out[r * row_floats + i]) != kern_bits_of(expected[i]))
                fail_msg("position %u, element %zu: %.9g, decoded %.9g", row->position, i,
                         (double)out[r * row_floats + i], (double)expected[i]);
    }
    pd_free(out);
}

static float *expected_make(const context *c)
{
    float *all = pd_calloc(c->length[0], (size_t)c->heads * c->layout.head_dim * sizeof(float));

    assert_non_null(all);
    return all;
}

/* Positions from .. to - 1 of sequence 0, each decoded, 64 rows a step. */
static void decode_rows(device *d, const context *c, uint32_t from, uint32_t to, float *expected)
{
    static step_plan plan;
    size_t row_floats = (size_t)c->heads * c->layout.head_dim;

    for (; from < to; from += 64) {
        plan = (step_plan){.context = c, .layer = 1, .decode = true};
        for (uint32_t p = from; p < to && p < from + 64; p++)
            add_row(&plan, 0, p);
        plan.positions_max = positions_of(&plan);
        attend(d, &plan, expected + from * row_floats);
        device_clear(d);
    }
}

static void chunk_plan(step_plan *plan, const context *c, uint32_t from, uint32_t size)
{
    *plan = (step_plan){.context = c, .layer = 1};
    if (from > 0)
        add_chunk(plan, 0, 0, from);
    for (; from < c->length[0]; from += size)
        add_chunk(plan, 0, from, from + size < c->length[0] ? from + size : c->length[0]);
    plan->positions_max = positions_of(plan);
}

/* Tiny V in front of a row, the largest behind it: what the row must not see would drown it. */
static float rising(uint64_t *random, uint32_t position, uint32_t column)
{
    float value = plain(random, position, column);

    return position % 16 < 9 ? value * 1e-4f : value * 60000;
}

static void prefill_is_decode_in_every_chunking(void **state)
{
    static const context_options sizes[] = {{3, 1, 64, 16, {290}},
                                            {4, 1, 128, 32, {140}},
                                            {6, 1, 80, 16, {90}},
                                            {16, 1, 32, 16, {100}}};
    static const uint32_t offsets[] = {0, 1, 7, 16}, chunks[] = {1, 5, 16, 17, 64, 300};
    static twins t;

    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++)
        for (int kind = 0; kind < 2; kind++) {
            context c;
            context_make(&c, &sizes[size]);
            if (kind == 1)
                fill(&c, plain, large, rising);
            float *expected = expected_make(&c);
            decode_rows(*state, &c, 0, c.length[0], expected);
            t.expected = expected;
            for (size_t chunk = 0; chunk < sizeof chunks / sizeof *chunks; chunk++) {
                uint32_t offset = offsets[(chunk + size) % 4];
                if ((chunk + size) % 2 != (size_t)kind) /* each size of chunk with both kinds */
                    continue;
                /* a chunk of one row each is a tile each: not all rows */
                chunk_plan(&t.plan, &c, chunks[chunk] > 1 ? offset : c.length[0] - 60 + offset,
                           chunks[chunk]);
                attend_and_equal(*state, &t);
                device_clear(*state);
            }
            pd_free(expected);
            context_free(&c);
        }
}

/* Position `broken` of sequence 0 has K and V (one element of it, or all) that are no numbers. */
static void break_position(const context *c, uint32_t broken, bool all)
{
    for (uint32_t head = 0; head < c->layout.kv_heads; head++)
        for (uint32_t i = 0; i < c->layout.head_dim; i++) {
            if (!all && i != broken % c->layout.head_dim)
                continue;
            kv_at(c, 1, 0, head, broken, true)[i] = i % 2 == 0 ? F16_NAN : 0xfc00;
            if (all)
                kv_at(c, 1, 0, head, broken, false)[i] = F16_NAN;
        }
}

/* Rows before `broken` as ever, later ones no numbers in every head. */
static void attend_broken(device *d, void *ctx)
{
    const twins *t = ctx;
    const context *c = t->plan.context;
    size_t row_floats = (size_t)c->heads * c->layout.head_dim;
    float *out = out_make(&t->plan);

    attend(d, &t->plan, out);
    for (uint32_t r = 0; r < t->plan.rows; r++) {
        uint32_t position = t->plan.row[r].position;
        const float *got = out + r * row_floats;
        if (position == CU_ROW_NONE)
            continue;
        if (position < t->broken) {
            assert_memory_equal(got, t->expected + position * row_floats,
                                row_floats * sizeof(float));
            continue;
        }
        for (uint32_t head = 0; head < c->heads; head++) {
            bool found = false;
            for (uint32_t i = 0; i < c->layout.head_dim; i++)
                found = found || !isfinite(got[head * c->layout.head_dim + i]);
            if (!found)
                fail_msg("position %u, head %u: numbers, though it sees %u", position, head,
                         t->broken);
        }
    }
    pd_free(out);
}

static void numbers_that_are_none_reach_no_earlier_row(void **state)
{
    static const context_options sizes[] = {{3, 1, 64, 16, {290}}, {12, 1, 256, 16, {80}}};
    static const uint32_t broken[] = {263, 70}, from[] = {246, 52};
    static twins t;

    for (size_t size = 0; size < 2; size++)
        for (int all = 0; all < 2; all++) {
            context c;
            context_make(&c, &sizes[size]);
            float *expected = expected_make(&c);
            decode_rows(*state, &c, from[size], broken[size], expected);
            break_position(&c, broken[size], all == 1);
            t = (twins){.expected = expected, .broken = broken[size]};
            for (uint32_t tiles = 0; tiles < 100; tiles += 99) { /* in parts, and not */
                t.plan = (step_plan){.context = &c, .layer = 1};
                add_chunk(&t.plan, 0, from[size], from[size] + 24);
                t.plan.positions_max = positions_of(&t.plan);
                add_empty_tiles(&t.plan, tiles);
                if (size == 0 && all == 0)
                    device_each(*state, 1, attend_broken, &t);
                else
                    attend_broken(*state, &t);
                device_clear(*state);
            }
            pd_free(expected);
            context_free(&c);
        }
}

/* Few tiles are split over blocks, many go through their contexts: here the same ones, padded. */
static void few_tiles_or_many_are_the_same(void **state)
{
    static twins t;
    context c;

    context_make(&c, &(context_options){4, 2, 64, 16, {600}});
    float *expected = expected_make(&c);
    decode_rows(*state, &c, 246, 270, expected);
    decode_rows(*state, &c, 510, 530, expected);
    decode_rows(*state, &c, 598, 600, expected);
    t.expected = expected;
    for (uint32_t tiles = 0; tiles < 100; tiles += 99) {
        t.plan = (step_plan){.context = &c, .layer = 1, .positions_max = 600};
        add_chunk(&t.plan, 0, 246, 270);
        add_chunk(&t.plan, 0, 510, 530);
        add_chunk(&t.plan, 0, 598, 600);
        add_empty_tiles(&t.plan, tiles);
        device_each(*state, 1, attend_and_equal, &t);
    }
    pd_free(expected);
    context_free(&c);
}

static void a_row_is_itself_in_any_batch_and_run(void **state)
{
    static const struct {
        uint32_t room, more_items, rows; /* rows: of others */
        bool padding;
    } ways[] = {{0, 0, 0, false}, {0, 5, 3, true}, {3, 0, 3, false}, {4, 1, 3, false}};
    static twins t;
    context c;

    context_make(&c, &(context_options){8, 2, 128, 16, {513}});
    float *expected = expected_make(&c);
    static const uint32_t positions[] = {0, 100, 200, 255, 512};
    for (size_t i = 0; i < sizeof positions / sizeof *positions; i++)
        decode_rows(*state, &c, positions[i], positions[i] + 1, expected);
    t.expected = expected;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        t.plan = (step_plan){.context = &c,
                             .layer = 1,
                             .decode = true,
                             .room = ways[i].room,
                             .more_items = ways[i].more_items};
        for (uint32_t p = 0; p < ways[i].rows; p++)
            add_row(&t.plan, 0, ways[i].padding ? CU_ROW_NONE : 100 * p);
        add_row(&t.plan, 0, 512);
        add_row(&t.plan, 0, 255);
        device_each(*state, 1, attend_and_equal, &t);
    }
    pd_free(expected);
    context_free(&c);
}

/* A long row and short ones beside a chunk: by items, in one run or more, and the chunk by tiles,
 * split over blocks or not, in the same scratch. */
static void a_row_is_itself_beside_a_chunk(void **state)
{
    static const context_options options[] = {{4, 2, 64, 16, {770}}, {3, 1, 80, 32, {770}}};
    static const uint32_t ones[] = {769, 255, 0, 256, 511};
    static twins t;

    for (size_t o = 0; o < sizeof options / sizeof *options; o++) {
        context c;
        context_make(&c, &options[o]);
        float *expected = expected_make(&c);
        for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
            decode_rows(*state, &c, ones[i], ones[i] + 1, expected);
        decode_rows(*state, &c, 250, 267, expected);
        decode_rows(*state, &c, 300, 303, expected);
        t.expected = expected;
        for (uint32_t way = 0; way < 3; way++) {
            t.plan = (step_plan){.context = &c, .layer = 1, .positions_max = 303};
            t.plan.ones = sizeof ones / sizeof *ones - (way == 2);
            t.plan.room = way == 0 ? 0 : 4;
            for (uint32_t i = 0; i < t.plan.ones; i++)
                add_row(&t.plan, 0, ones[i]);
            add_chunk(&t.plan, 0, 250, 267);
            add_chunk(&t.plan, 0, 300, 303);
            add_empty_tiles(&t.plan, way == 1 ? 99 : 0);
            device_each(*state, 1, attend_and_equal, &t);
        }
        pd_free(expected);
        context_free(&c);
    }
}

/* --- the list --- */

static void a_list_has_each_split_of_each_row_once(void **state)
{
    static const uint32_t position[] = {0, 255, 256, CU_ROW_NONE, 131071, 5, 1023, 1024};
    enum { ROWS = sizeof position / sizeof *position, ITEMS = 1 + 1 + 2 + 1 + 512 + 1 + 4 + 5 };
    static const uint32_t rooms[] = {512, 513, 516, 517, 526, 527, 10000};
    uint32_t item_row[ITEMS + 1], row_item[ROWS];
    cu_run runs[ROWS + 1];

    (void)state;
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        item_row[ITEMS] = 77;
        memset(runs, 0xff, sizeof runs);
        uint32_t count = cu_items_list(position, ROWS, rooms[i], item_row, row_item, runs);
        uint32_t row = 0, item = 0;
        for (uint32_t r = 0; r < count; r++) {
            assert_true(runs[r].row == row && runs[r].item == item && runs[r].rows > 0);
            assert_true(runs[r].items <= rooms[i]);
            for (; row < runs[r].row + runs[r].rows; row++) {
                assert_int_equal(row_item[row], item);
                for (uint32_t n = 0; n < cu_items_of(position[row]); n++)
                    assert_int_equal(item_row[item++], row);
            }
            assert_int_equal(item, runs[r].item + runs[r].items);
        }
        assert_true(row == ROWS && item == ITEMS);
        assert_true((rooms[i] >= ITEMS) == (count == 1));
        assert_int_equal(item_row[ITEMS], 77);
        assert_int_equal(runs[count].row, UINT32_MAX);
    }
}

/* One long row among many costs its own splits, and scratch has a bound whatever rows and context.
 */
static void work_and_scratch_grow_with_what_there_is(void **state)
{
    (void)state;
    assert_int_equal(cu_items_of(131071), 512);
    for (uint32_t rows = 1; rows < 2000; rows += 7)
        for (uint32_t items = rows; items < 20000; items += items / 9 + 1) {
            uint32_t padded = cu_items_padded(rows, items);
            assert_true(padded >= items && padded <= items + items / 8 + 1);
            assert_true((padded > rows) == (items > rows));
        }
    uint64_t item = cu_attention_item_bytes(32, 128);
    assert_int_equal(item, 32 * 130 * 4);
    assert_true(cu_items_room(1024, 32, 128, 131072) * item <= CU_ATTENTION_SCRATCH);
    assert_true(cu_items_room(1024, 32, 128, 131072) > 4000);
    assert_int_equal(cu_items_room(1, 64, 256, 4u << 20), 16384); /* one row, whatever it takes */
    assert_int_equal(cu_items_room(3, 32, 128, 257), 6);
}

static void other_head_sizes_are_refused(void **state)
{
    device *d = *state;
    static const uint32_t none[1];
    const cu_run run = {.rows = 1, .items = 1};
    const cu_step steps[] = {{.rows = 1, .position = none, .runs = 1, .run = &run},
                             {.rows = 1, .position = none, .tiles = 1}};
    cu_kv kv = {.layers = 1,
                .kv_heads = 1,
                .head_dim = 48,
                .block_tokens = 16,
                .group_layers = 1,
                .blocks = 1,
                .token_bytes = 96,
                .half_bytes = 1536,
                .layer_bytes = 3072};

    assert_true(cu_attention_supports(64) && !cu_attention_supports(48));
    for (int i = 0; i < 2; i++)
        assert_int_equal(cu_attention(d->stream, &steps[i], &kv, 0, 1, 16, 1, NULL, NULL, NULL),
                         PD_E_UNSUPPORTED);
}

static void prefill_scratch_is_bounded(void **state)
{
    (void)state;
    assert_int_equal(cu_attention_scratch_bytes(512, 32, 128, 131072),
                     512 * 32 * 4 + CU_ATTENTION_SCRATCH);
    assert_int_equal(cu_attention_scratch_bytes(512, 32, 128, 256), 512 * 32 * 4);
    assert_int_equal(cu_attention_scratch_bytes(2, 32, 128, 257),
                     2 * 32 * 4 + 2 * 32 * 2 * 130 * 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_is_a_softmax_at_every_shape),
        cmocka_unit_test(prefill_is_a_softmax_at_every_shape),
        cmocka_unit_test(rows_of_more_splits_than_a_merge_takes_at_once),
        cmocka_unit_test(any_numbers),
        cmocka_unit_test(prefill_is_decode_in_every_chunking),
        cmocka_unit_test(few_tiles_or_many_are_the_same),
        cmocka_unit_test(a_row_is_itself_in_any_batch_and_run),
        cmocka_unit_test(a_row_is_itself_beside_a_chunk),
        cmocka_unit_test(a_list_has_each_split_of_each_row_once),
        cmocka_unit_test(work_and_scratch_grow_with_what_there_is),
        cmocka_unit_test(numbers_that_are_none_reach_no_earlier_row),
        cmocka_unit_test(other_head_sizes_are_refused),
        cmocka_unit_test(prefill_scratch_is_bounded),
    };
    return cmocka_run_group_tests_name("gpu-emu-attention", tests, device_setup, device_teardown);
}
