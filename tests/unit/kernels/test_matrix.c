/* The whole forward pass against the scalar reference, bit for bit: every format of weights with
 * every format of KV, on every table, with 1, 2 and 3 threads, in chunks of 1, 7, 16, 100 and 512,
 * in batches of 1, 2, 3, 8, 17 and 64.
 *
 * A run takes every value of each, in pairs drawn by KVFERRY_SEED; KVFERRY_FULL=1 takes the whole
 * product. */

#include "kernels/model/forward.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TOKENS     531 /* more than two splits of 256, and no whole tile */
#define BLOCK      16
#define ROWS_MAX   600
#define BATCH_MAX  64
#define LONG       514 /* context of a batch's first sequence */
#define LONG_TABLE (TOKENS / BLOCK + 1)
#define BLOCKS     (LONG_TABLE + 2 * BATCH_MAX)
#define TABLES_MAX 8

/* Values that are taken in turn, in an order of the seed's. */
typedef struct wheel {
    uint32_t values[TABLES_MAX];
    uint32_t count, next;
} wheel;

static const pd_dtype formats[] = {PD_Q4_0, PD_Q4_1, PD_Q8_0, PD_Q4_K, PD_Q6_K, PD_F16, PD_BF16};
#define FORMATS (sizeof formats / sizeof *formats)
static const pd_dtype kv_formats[] = {PD_F16, PD_INT8, PD_FP8_E4M3};
#define KV_FORMATS (sizeof kv_formats / sizeof *kv_formats)
static wheel kvs = {{0, 1, 2}, KV_FORMATS, 0};
static wheel chunks = {{1, 7, 16, 100, 512}, 5, 0};
static wheel batches = {{1, 2, 3, 8, 17, BATCH_MAX}, 6, 0};

static uint64_t seed;
static bool full;
static uint32_t tokens[TOKENS];
static float expected[TOKENS][TINY_VOCAB], logits[TOKENS][TINY_VOCAB];

static uint32_t turn(wheel *w)
{
    return w->values[w->next++ % w->count];
}

static void shuffle(wheel *w)
{
    for (uint32_t i = w->count; i > 1; i--) {
        uint32_t other = (uint32_t)(pd_random_next(&seed) % i), value = w->values[i - 1];
        w->values[i - 1] = w->values[other];
        w->values[other] = value;
    }
}

/* What is compared: the model, the pool, and words for both. */
typedef struct cell {
    const pd_model_file *file;
    const kern_ops *ops;
    pd_dtype format, kv;
    uint32_t threads;
    pd_kv_layout layout;
    kern_model *model;
    void *pool;
    pd_block blocks[BLOCKS];
} cell;

static void cell_open(cell *c)
{
    kern_options options = {.device = c->ops->name,
                            .threads = c->threads,
                            .context_max = 1024,
                            .rows_max = ROWS_MAX,
                            .logits_rows_max = ROWS_MAX};

    assert_int_equal(kern_model_create(c->file, &options, &c->model), PD_OK);
    c->layout = tiny_layout_of(c->file, BLOCKS, c->kv);
    c->pool = pd_malloc(c->layout.pool_bytes);
    memset(c->pool, 0xff, c->layout.pool_bytes); /* NaN: what was not written must not be read */
    for (uint32_t i = 0; i < BLOCKS; i++)
        c->blocks[i] = i * 101 % BLOCKS;
}

static void cell_close(cell *c)
{
    kern_model_destroy(c->model);
    pd_free(c->pool);
}

static void step(const cell *c, const kern_slice *slices, uint32_t count)
{
    kern_step run = {
        .layout = &c->layout, .pool = c->pool, .slices = slices, .slices_count = count};

    assert_int_equal(kern_model_step(c->model, &run), PD_OK);
}

static void same(const cell *c, const float *got, uint32_t position, const char *what,
                 uint32_t size)
{
    if (memcmp(got, expected[position], sizeof expected[position]) != 0)
        fail_msg("%s weights, %s KV, %s, %u threads, %s %u: position %u differs from the reference",
                 pd_dtype_info_of(c->format)->name, pd_kv_dtype_name(c->kv), c->ops->name,
                 c->threads, what, size, position);
}

static void run_text(const cell *c, uint32_t chunk, float (*out)[TINY_VOCAB])
{
    for (uint32_t first = 0; first < TOKENS; first += chunk) {
        kern_slice slice = {.tokens = tokens + first,
                            .count = TOKENS - first < chunk ? TOKENS - first : chunk,
                            .position = first,
                            .blocks = c->blocks,
                            .logits = out[first]};
        step(c, &slice, 1);
    }
}

static void check_chunk(const cell *c, uint32_t chunk)
{
    memset(c->pool, 0xff, c->layout.pool_bytes);
    memset(logits, 0, sizeof logits);
    run_text(c, chunk, logits);
    for (uint32_t position = 0; position < TOKENS; position++)
        same(c, logits[position], position, "chunk", chunk);
}

/* Sequence s of a batch has the text's first tokens, so many, in blocks of its own. */
static uint32_t context_of(uint32_t s)
{
    return s == 0 ? LONG : 7 * s % 29 + 1;
}

static kern_slice slice_of(const cell *c, uint32_t s, uint32_t first, uint32_t count)
{
    return (kern_slice){.tokens = tokens + first,
                        .count = count,
                        .position = first,
                        .blocks = c->blocks + (s == 0 ? 0 : LONG_TABLE + 2 * s),
                        .logits_from = count};
}

/* The contexts, as many sequences a step as fit. */
static void fill_contexts(const cell *c)
{
    kern_slice slices[BATCH_MAX];
    uint32_t count = 0, rows = 0;

    for (uint32_t s = 0; s < BATCH_MAX; s++) {
        if (rows + context_of(s) > ROWS_MAX) {
            step(c, slices, count);
            count = rows = 0;
        }
        slices[count++] = slice_of(c, s, 0, context_of(s));
        rows += context_of(s);
    }
    step(c, slices, count);
}

/* A token each; then once more, the first sequence with all that is left of the text. */
static void check_batch(const cell *c, uint32_t batch)
{
    kern_slice slices[BATCH_MAX];

    for (uint32_t mixed = 0; mixed < 2; mixed++) {
        memset(logits, 0, sizeof logits);
        for (uint32_t s = 0; s < batch; s++) {
            uint32_t count = mixed == 1 && s == 0 ? TOKENS - LONG : 1;
            slices[s] = slice_of(c, s, context_of(s), count);
            slices[s].logits_from = count - 1;
            slices[s].logits = logits[s];
        }
        step(c, slices, batch);
        for (uint32_t s = 0; s < batch; s++)
            same(c, logits[s], context_of(s) + slices[s].count - 1,
                 mixed == 1 ? "batch with a chunk," : "batch", batch);
    }
}

static void check_threads(cell *c, uint32_t threads)
{
    c->threads = threads;
    cell_open(c);
    for (uint32_t i = 0; i < (full ? chunks.count : 2); i++)
        check_chunk(c, turn(&chunks));
    fill_contexts(c);
    for (uint32_t i = 0; i < (full ? batches.count : 3); i++)
        check_batch(c, turn(&batches));
    cell_close(c);
}

/* turns: of the threads' number, another for each format and table */
static void check_formats(const pd_model_file *file, pd_dtype format, pd_dtype kv, uint32_t turns)
{
    cell c = {.file = file, .ops = kern_ops_at(0), .format = format, .kv = kv, .threads = 1};
    char reason[128];

    cell_open(&c);
    run_text(&c, TOKENS, expected);
    cell_close(&c);
    for (uint32_t i = 1; kern_ops_at(i) != NULL; i++) {
        c.ops = kern_ops_at(i);
        for (uint32_t n = 0; c.ops->probe(reason, sizeof reason) > 0 && n < (full ? 3 : 1); n++)
            check_threads(&c, 1 + (turns + i + n) % 3);
    }
    if (full) /* the reference is slow, and the same code whatever is asked of it */
        check_threads(&(cell){file, kern_ops_at(0), format, kv, .threads = 1}, 2);
}

static void every_cell_is_the_reference(void **state)
{
    uint32_t first = (uint32_t)(pd_random_next(&seed) % 3);

    (void)state;
    for (size_t f = 0; f < FORMATS; f++) {
        tiny_shape shape = tiny_of_format(formats[f]);
        pd_model_file *file = tiny_open_shape(&shape);
        for (uint32_t k = 0; k < (full ? KV_FORMATS : 1); k++)
            check_formats(file, formats[f], kv_formats[turn(&kvs)], first + (uint32_t)f);
        pd_model_file_close(file);
    }
}

static int set_up(void **state)
{
    (void)state;
    seed = choice_seed();
    full = choice_full();
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
    shuffle(&kvs);
    shuffle(&chunks);
    shuffle(&batches);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return pd_mem_live() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_cell_is_the_reference)};

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
