/* The model on a GPU: the reference's logits, the same bits whatever the company, the chunks and
 * the graphs; seals of what lies in the pool; groups announced when they are final; and a device
 * that fails never gives a token. */

#include "kernels/cuda/batch.h"
#include "kernels/cuda/model.h"
#include "kernels/cuda/stage.h"
#include "kernels/cuda/weights.h"
#include "kernels/model/host.h"
#include "kernels/model/sample.h"
#include "tests/gpu-emu/device.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TOKENS 40  /* two blocks and a half; no whole tile of query rows */
#define LONG   290 /* more than a split of 256 */
#define BLOCKS 96
#define EACH   20 /* blocks of a sequence */
#define VOCAB  151

typedef struct given {
    const char *name;
    double tolerance; /* of logits, in units of their root mean square */
    tiny_shape shape;
} given;

/* Where the reference takes activations as f32, matrices of 16 bits take them rounded to their own
 * format: f16 keeps 11 bits, bf16 8, and ten times the distance is what comes of it. Quantised
 * matrices give the reference's bits; what differs then is attention (f32 queries as two f16 parts,
 * f16 probabilities), and now and then a value that is rounded to its other neighbour among 8
 * bits. Weights have outliers forty times as large as the rest. */
static const given models[] = {
    {"every format",
     0.6,
     {.hidden = 96,
      .heads = 6,
      .kv_heads = 2,
      .head_dim = 32,
      .ffn = 192,
      .layers = 3,
      .vocab = VOCAB,
      .context = 512,
      .embedding = PD_Q8_0,
      .query = PD_Q4_1,
      .key = PD_Q8_0,
      .value = PD_F16,
      .output = PD_Q4_0,
      .gate = PD_Q4_1,
      .up = PD_BF16,
      .down = PD_Q8_0,
      .head = PD_F16}},
    {"tied, one KV head",
     0.03,
     {.hidden = 64,
      .heads = 2,
      .kv_heads = 1,
      .head_dim = 64,
      .ffn = 128,
      .layers = 2,
      .vocab = VOCAB,
      .context = 512,
      .tied = true,
      .embedding = PD_Q8_0,
      .query = PD_Q4_1,
      .key = PD_Q4_1,
      .value = PD_Q4_1,
      .output = PD_Q4_1,
      .gate = PD_Q4_1,
      .up = PD_Q4_1,
      .down = PD_Q4_1}},
    {"f32",
     0.01,
     {.hidden = 64,
      .heads = 2,
      .kv_heads = 2,
      .head_dim = 32,
      .ffn = 128,
      .layers = 2,
      .vocab = VOCAB,
      .context = 512,
      .embedding = PD_F32,
      .query = PD_F32,
      .key = PD_F32,
      .value = PD_F32,
      .output = PD_F32,
      .gate = PD_F32,
      .up = PD_F32,
      .down = PD_F32,
      .head = PD_F32}},
    {"f16",
     0.06,
     {.hidden = 128,
      .heads = 4,
      .kv_heads = 4,
      .head_dim = 32,
      .ffn = 256,
      .layers = 2,
      .vocab = VOCAB,
      .context = 512,
      .embedding = PD_F16,
      .query = PD_F16,
      .key = PD_F16,
      .value = PD_F16,
      .output = PD_F16,
      .gate = PD_F16,
      .up = PD_F16,
      .down = PD_F16,
      .head = PD_F16}},
};
static uint32_t tokens[LONG];

typedef struct rig {
    device *device;
    pd_model_file *file;
    kern_loaded *model;
    pd_kv_layout layout;
    void *pool;
    pd_block blocks[BLOCKS];
} rig;

static kern_backend_options options_of(uint32_t rows_max)
{
    return (kern_backend_options){.context_max = 512,
                                  .rows_max = rows_max,
                                  .slices_max = 8,
                                  .sampled_rows_max = 16,
                                  .logits_rows_max = rows_max};
}

static pd_kv_layout layout_of(const pd_model_file *file)
{
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = (uint64_t)1 << 30,
                                    .blocks_max = BLOCKS};
    pd_kv_layout layout;

    assert_int_equal(pd_kv_layout_make(pd_model_file_shape(file), &options, &layout), PD_OK);
    return layout;
}

/* The pool begins as NaN: what was not written must not be read. */
static rig rig_of(device *d, pd_model_file *file, bool no_graphs)
{
    const kern_backend_options options = options_of(LONG);
    const cu_model_settings settings = {.backend = "test", .no_graphs = no_graphs};
    rig r = {.device = d, .file = file};

    assert_int_equal(cu_model_create(file, &options, &settings, &r.model), PD_OK);
    r.layout = layout_of(file);
    assert_int_equal(cu_model_pool_alloc(r.model, r.layout.pool_bytes, &r.pool), PD_OK);
    if (d != NULL) {
        assert_int_equal(gpu_fill(d->stream, r.pool, 0xff, r.layout.pool_bytes), PD_OK);
        device_finish(d);
    }
    assert_int_equal(cu_model_bind(r.model, &r.layout, r.pool, true), PD_OK);
    for (uint32_t i = 0; i < BLOCKS; i++)
        r.blocks[i] = i * 35 % BLOCKS;
    return r;
}

static void rig_end(rig *r)
{
    cu_model_pool_free(r->model);
    cu_model_destroy(r->model);
}

static void run(const rig *r, kern_job_slice *slices, uint32_t count)
{
    kern_backend_step step = {.slices = slices, .slices_count = count};

    assert_int_equal(cu_model_step(r->model, &step), PD_OK);
}

static kern_job_slice slice_of(const rig *r, uint32_t sequence, uint32_t position, uint32_t count,
                               float *logits)
{
    return (kern_job_slice){.slice = {.tokens = tokens + position,
                                      .count = count,
                                      .position = position,
                                      .blocks = r->blocks + EACH * sequence,
                                      .logits_from = logits != NULL ? 0 : count,
                                      .logits = logits}};
}

/* All logits of the first `count` tokens, in chunks; a chunk of one draws a token as well. */
static void run_text(const rig *r, uint32_t sequence, uint32_t count, uint32_t chunk, float *logits)
{
    for (uint32_t first = 0; first < count; first += chunk) {
        uint32_t some = count - first < chunk ? count - first : chunk;
        kern_job_slice slice = slice_of(r, sequence, first, some, logits + (size_t)first * VOCAB);
        slice.want_token = some == 1;
        run(r, &slice, 1);
        if (some == 1) {
            kern_sampling greedy = {.temperature = 0};
            assert_int_equal(slice.token_out,
                             kern_sample(&greedy, slice.slice.logits, VOCAB, first + 1, NULL));
        }
    }
}

/* The same of the host's reference. */
static void run_reference(const pd_model_file *file, uint32_t count, float *logits)
{
    kern_backend_options options = options_of(LONG);
    pd_kv_layout layout = layout_of(file);
    void *pool = pd_calloc(1, layout.pool_bytes);
    kern_loaded *model = NULL;
    pd_block blocks[EACH];

    options.variant = "cpu-ref";
    options.threads = 1;
    assert_int_equal(kern_backend_host.create(file, &options, &model), PD_OK);
    assert_int_equal(kern_backend_host.bind(model, &layout, pool, false), PD_OK);
    for (uint32_t i = 0; i < EACH; i++)
        blocks[i] = i;
    kern_job_slice slice = {
        .slice = {.tokens = tokens, .count = count, .blocks = blocks, .logits = logits}};
    kern_backend_step step = {.slices = &slice, .slices_count = 1};
    assert_int_equal(kern_backend_host.step(model, &step), PD_OK);
    kern_backend_host.destroy(model);
    pd_free(pool);
}

static float *logits_space(uint32_t rows)
{
    float *logits = pd_calloc((size_t)rows * VOCAB, sizeof *logits);

    assert_non_null(logits);
    return logits;
}

/* The largest difference, in units of the reference's root mean square. */
static double distance(const float *logits, const float *reference, uint32_t rows)
{
    double square = 0, most = 0;

    for (size_t i = 0; i < (size_t)rows * VOCAB; i++) {
        double off = fabs((double)logits[i] - (double)reference[i]);
        square += (double)reference[i] * (double)reference[i];
        most = off > most || isnan(off) ? off : most;
    }
    return most / sqrt(square / rows / VOCAB);
}

/* ---- what is computed ---- */

static void compare_text(device *d, void *ctx)
{
    const given *model = ctx;
    pd_model_file *file = tiny_open_shape(&model->shape);
    uint32_t count = model->shape.kv_heads == 1 ? LONG : TOKENS;
    float *expected = logits_space(count), *logits = logits_space(count);
    rig r = rig_of(d, file, false);

    run_reference(file, count, expected);
    run_text(&r, 0, count, count, logits);
    double off = distance(logits, expected, count);
    if (!(off < model->tolerance))
        fail_msg("%s: logits are off by %g of their size", model->name, off);
    print_message("# %s: off by %.2g of the logits' size\n", model->name, off);
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(expected);
    pd_free(logits);
}

static void logits_are_the_references(void **state)
{
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        given model = models[i];
        compare_text(*state, &model);
    }
}

/* Chunks of several sizes, one token at a time with graphs and without. */
static void compare_chunks(device *d, void *ctx)
{
    static const uint32_t chunks[] = {17, 1};
    const given *model = ctx;
    pd_model_file *file = tiny_open_shape(&model->shape);
    float *expected = logits_space(TOKENS), *logits = logits_space(TOKENS);

    for (uint32_t no_graphs = 0; no_graphs < 2; no_graphs++) {
        rig r = rig_of(d, file, no_graphs == 1);
        run_text(&r, 0, TOKENS, TOKENS, no_graphs == 0 ? expected : logits);
        for (uint32_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            memset(logits, 0, sizeof *logits * TOKENS * VOCAB);
            run_text(&r, c + 1, TOKENS, chunks[c], logits);
            assert_memory_equal(logits, expected, sizeof *logits * TOKENS * VOCAB);
        }
        assert_int_equal(cu_model_graphs(r.model), no_graphs == 1 ? 0 : 1);
        rig_end(&r);
    }
    pd_model_file_close(file);
    pd_free(expected);
    pd_free(logits);
}

/* The first model in every way in which the device may run, the others in one: what differs between
 * them are kernels, which have tests of their own. */
static void each_model(device *d, void (*how)(device *d, void *ctx))
{
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        given model = models[i];
        if (i == 0)
            device_each(d, 1, how, &model);
        else
            how(d, &model);
    }
}

static void chunks_and_graphs_change_no_bit(void **state)
{
    each_model(*state, compare_chunks);
}

/* Sequences of different lengths take the next token together: decode alone, in which rows are
 * padded, and with one of them taking a chunk. */
static void compare_batches(device *d, void *ctx)
{
    enum { SEQUENCES = 3 };
    const given *model = ctx;
    pd_model_file *file = tiny_open_shape(&model->shape);
    float *expected = logits_space(TOKENS), *logits = logits_space(SEQUENCES);
    rig r = rig_of(d, file, false);
    kern_job_slice slices[SEQUENCES];

    run_text(&r, SEQUENCES, TOKENS, TOKENS, expected);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        slices[s] = slice_of(&r, s, 0, 11 * s + 1, NULL);
    run(&r, slices, SEQUENCES);
    for (uint32_t mixed = 0; mixed < 2; mixed++) {
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            uint32_t count = mixed == 1 && s == 1 ? 7 : 1;
            slices[s] = slice_of(&r, s, 11 * s + 1, count, logits + (size_t)s * VOCAB);
            slices[s].slice.logits_from = count - 1;
            slices[s].want_token = true;
            slices[s].sampling = (kern_sampling){.temperature = 0.8f, .top_p = 0.9f, .seed = s};
        }
        run(&r, slices, SEQUENCES);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            static uint64_t sort_space[VOCAB];
            uint32_t last = 11 * s + slices[s].slice.count;
            assert_memory_equal(logits + (size_t)s * VOCAB, expected + (size_t)last * VOCAB,
                                sizeof *logits * VOCAB);
            assert_int_equal(slices[s].token_out,
                             kern_sample(&slices[s].sampling, logits + (size_t)s * VOCAB, VOCAB,
                                         last + 1, sort_space));
        }
    }
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(expected);
    pd_free(logits);
}

static void a_row_is_the_same_alone_and_in_a_batch(void **state)
{
    each_model(*state, compare_batches);
}

/* A row with more than a split of context, its slice before a chunk and behind it. */
static void compare_long_row(device *d, void *ctx)
{
    enum { CHUNK = 19 };
    const given *model = ctx;
    pd_model_file *file = tiny_open_shape(&model->shape);
    float *expected = logits_space(CHUNK + 1), *logits = logits_space(CHUNK + 1);
    rig r = rig_of(d, file, false);

    for (uint32_t way = 0; way < 3; way++) { /* alone, then in company */
        float *out = way == 0 ? expected : logits;
        kern_job_slice one = slice_of(&r, way, 0, LONG - 1, NULL);
        run(&r, &one, 1);
        one = slice_of(&r, way, LONG - 1, 1, out + (size_t)CHUNK * VOCAB);
        one.want_token = true;
        kern_job_slice chunk = slice_of(&r, 3, 0, CHUNK, out);
        kern_job_slice both[2] = {way == 1 ? one : chunk, way == 1 ? chunk : one};
        if (way == 0) {
            run(&r, &one, 1);
            run(&r, &chunk, 1);
            continue;
        }
        run(&r, both, 2);
        assert_int_equal(both[way == 1 ? 0 : 1].token_out,
                         kern_sample(&(kern_sampling){.temperature = 0},
                                     expected + (size_t)CHUNK * VOCAB, VOCAB, LONG, NULL));
        assert_memory_equal(logits, expected, sizeof *logits * (CHUNK + 1) * VOCAB);
        memset(logits, 0, sizeof *logits * (CHUNK + 1) * VOCAB);
    }
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(expected);
    pd_free(logits);
}

/* Drafts are verified beside another's single token, three times alike: called, recorded and
 * launched; and once more with logits asked for, which is no decode step. The last draft is written
 * again by what follows, and the hashes are those of the bytes. */
static void compare_drafts(device *d, void *ctx)
{
    enum { DRAFTS = 4, AT = 29, ALL = AT + 1 + DRAFTS };
    const given *model = ctx;
    static uint64_t sort_space[VOCAB];
    pd_model_file *file = tiny_open_shape(&model->shape);
    float *expected = logits_space(ALL), *logits = logits_space(1 + DRAFTS);
    rig r = rig_of(d, file, false);
    uint32_t out[DRAFTS];

    run_text(&r, 2, ALL, ALL, expected);
    for (uint32_t turn = 0; turn < 4; turn++) {
        kern_job_slice slices[2] = {slice_of(&r, 0, 0, AT, NULL), slice_of(&r, 1, 0, AT, NULL)};
        run(&r, slices, 2);
        slices[0] = slice_of(&r, 0, AT, 1 + DRAFTS, turn == 3 ? logits : NULL);
        slices[1] = slice_of(&r, 1, AT, 1, NULL);
        for (uint32_t s = 0; s < 2; s++) {
            slices[s].want_token = true;
            slices[s].sampling = (kern_sampling){.temperature = 0.9f, .top_p = 0.95f, .seed = 3};
        }
        slices[0].drafts = DRAFTS;
        slices[0].drafts_out = out;
        run(&r, slices, 2);
        for (uint32_t row = 0; row <= DRAFTS; row++)
            assert_int_equal(row == DRAFTS ? slices[0].token_out : out[row],
                             kern_sample(&slices[0].sampling, expected + (size_t)(AT + row) * VOCAB,
                                         VOCAB, AT + row + 1, sort_space));
        assert_int_equal(slices[1].token_out, out[0]);
    }
    assert_memory_equal(logits, expected + (size_t)AT * VOCAB,
                        sizeof *logits * VOCAB * (1 + DRAFTS));
    kern_job_slice again = slice_of(&r, 0, AT + 2, 2, NULL);
    run(&r, &again, 1);
    for (uint32_t group = 0; group < r.layout.groups; group++) {
        pd_seal_item items[2];
        uint64_t seals[2];
        for (uint32_t s = 0; s < 2; s++)
            items[s] = (pd_seal_item){.block = r.blocks[EACH * (s == 0 ? 0 : 2) + 1],
                                      .head_to = r.layout.kv_heads,
                                      .place = {.group = group, .valid_tokens = 16}};
        assert_int_equal(cu_model_seal(r.model, items, 2, seals), PD_OK);
        assert_true(seals[0] == seals[1]); /* the same tokens, wherever they lie */
    }
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(expected);
    pd_free(logits);
}

static void drafts_are_sampled_row_by_row(void **state)
{
    each_model(*state, compare_drafts);
}

static void a_long_row_is_the_same_beside_a_chunk(void **state)
{
    given model = models[1];

    compare_long_row(*state, &model); /* orders are tried on the kernels: test_attention */
}

/* What a mixed step's kernels are told: the rows of one token first and by items, split by split;
 * the chunks by tiles; logits in the slices' order. */
static void rows_of_one_token_come_by_items_in_any_step(void **state)
{
    device *d = *state;
    const cu_batch_limits limits = {.rows_max = 64,
                                    .logits_max = 16,
                                    .slices_max = 4,
                                    .context_max = 1024,
                                    .vocab = VOCAB,
                                    .block_tokens = 16,
                                    .blocks = BLOCKS,
                                    .items_room = 16};
    static pd_block blocks[4][64];
    static const uint32_t position[] = {3, 700, 0, 255}, count[] = {17, 1, 3, 1};
    static const uint32_t first_row[] = {2, 0, 19, 1}, items[] = {0, 0, 0, 1};
    kern_job_slice slices[4];
    kern_backend_step step = {.slices = slices, .slices_count = 4};
    uint32_t rows[22], tables[22], item_row[4], logits_row[4];
    cu_batch *batch = NULL;
    cu_plan plan;

    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t b = 0; b < 64; b++)
            blocks[i][b] = i * 7 + b % 7;
        slices[i] = (kern_job_slice){.want_token = i != 2,
                                     .slice = {.tokens = tokens,
                                               .count = count[i],
                                               .position = position[i],
                                               .blocks = blocks[i],
                                               .logits_from = count[i]}};
    }
    assert_int_equal(cu_batch_create(d->gpu, &limits, &batch), PD_OK);
    assert_int_equal(cu_batch_build(batch, &step, &plan), PD_OK);
    assert_int_equal(cu_batch_upload(batch, d->stream, &plan), PD_OK);
    assert_true(!plan.decode && plan.step.rows == 22 && plan.step.tiles == 3);
    assert_true(plan.step.runs == 1 && plan.step.run[0].row == 0 && plan.step.run[0].rows == 2);
    assert_true(plan.items == 4 && plan.step.run[0].items == 4);
    assert_int_equal(plan.positions_max, 20);
    assert_true(plan.live_first == 0 && plan.live_rows == 19);
    assert_true(plan.tile_first == 0 && plan.tiles_live == 2);
    device_download(d, rows, plan.step.position, sizeof rows);
    device_download(d, tables, plan.step.table, sizeof tables);
    device_download(d, item_row, plan.step.item_row, sizeof item_row);
    device_download(d, logits_row, plan.logits_row, 3 * sizeof *logits_row);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(item_row[i], items[i]);
        for (uint32_t n = 0; n < count[i]; n++) {
            uint32_t row = first_row[i] + n, last = (position[i] + count[i] - 1) / 16;
            pd_block there[64];
            assert_int_equal(rows[row], position[i] + n);
            device_download(d, there, plan.step.blocks + tables[row], (last + 1) * sizeof *there);
            assert_memory_equal(there, blocks[i], (last + 1) * sizeof *there);
        }
    }
    assert_true(logits_row[0] == 18 && logits_row[1] == 0 && logits_row[2] == 1);
    cu_batch_destroy(batch);
}

/* The last positions of a context whose length is no round number, as a chunk, then one by one:
 * called, recorded and launched again. What was before them is zeros, to the reference as well. K
 * of the first layer is rotated by their angles alone, and is the reference's bits. */
static void compare_far(device *d, void *ctx)
{
    enum { CONTEXT = 509, FAR = 20, CHUNK = FAR - 4 };
    const given *given_model = ctx;
    const cu_model_settings settings = {.backend = "test"};
    kern_backend_options options = options_of(LONG);
    pd_model_file *file = tiny_open_shape(&given_model->shape);
    float *expected = logits_space(FAR), *logits = logits_space(FAR);
    pd_kv_layout layout = layout_of(file);
    unsigned char *host = pd_calloc(2, layout.pool_bytes), *far = host + layout.pool_bytes;
    kern_loaded *reference = NULL;
    rig r = {.device = d, .file = file, .layout = layout};
    void *pool = NULL;

    options.context_max = CONTEXT;
    assert_int_equal(cu_model_create(file, &options, &settings, &r.model), PD_OK);
    assert_int_equal(cu_model_pool_alloc(r.model, layout.pool_bytes, &pool), PD_OK);
    assert_int_equal(cu_model_bind(r.model, &layout, pool, true), PD_OK);
    options.variant = "cpu-ref";
    options.threads = 1;
    assert_int_equal(kern_backend_host.create(file, &options, &reference), PD_OK);
    assert_int_equal(kern_backend_host.bind(reference, &layout, host, false), PD_OK);
    for (uint32_t i = 0; i < BLOCKS; i++)
        r.blocks[i] = i * 35 % BLOCKS;
    for (uint32_t at = 0, count = CHUNK; at < FAR; at += count, count = 1) {
        kern_job_slice slice = slice_of(&r, 0, 0, count, logits + (size_t)at * VOCAB);
        slice.slice.tokens = tokens + at;
        slice.slice.position = CONTEXT - FAR + at;
        run(&r, &slice, 1);
        slice.slice.logits = expected + (size_t)at * VOCAB;
        kern_backend_step step = {.slices = &slice, .slices_count = 1};
        assert_int_equal(kern_backend_host.step(reference, &step), PD_OK);
    }
    assert_int_equal(cu_model_graphs(r.model), 1);
    assert_true(distance(logits, expected, FAR) < given_model->tolerance);
    device_download(d, far, pool, layout.pool_bytes);
    for (uint32_t position = CONTEXT - FAR; position < CONTEXT; position++) {
        for (uint32_t head = 0; head < layout.kv_heads; head++) {
            uint64_t at = pd_kv_layout_k_offset(&layout, 0, r.blocks[position / 16], head) +
                          position % 16 * layout.token_bytes;
            assert_memory_equal(far + at, host + at, layout.token_bytes);
        }
    }
    kern_backend_host.destroy(reference);
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(host);
    pd_free(expected);
    pd_free(logits);
}

static void the_last_positions_have_the_references_angles(void **state)
{
    given model = models[1]; /* quantised: products have the reference's bits */

    compare_far(*state, &model);
}

/* ---- the pool ---- */

static pd_seal_item item_of(const rig *r, uint32_t group, uint32_t index, uint32_t valid)
{
    return (pd_seal_item){.block = r->blocks[index],
                          .head_to = r->layout.kv_heads,
                          .place = {.request = 5,
                                    .group = group,
                                    .block_index = index,
                                    .valid_tokens = valid,
                                    .layout_fingerprint = 3}};
}

/* Items of all groups of the first `length` tokens, and the seals of the pool's bytes. */
static uint32_t seals_of_bytes(const rig *r, const void *bytes, uint32_t length,
                               pd_seal_item *items, uint64_t *seals)
{
    uint32_t count = 0, block_tokens = r->layout.block_tokens;

    for (uint32_t group = 0; group < r->layout.groups; group++) {
        for (uint32_t index = 0; index * block_tokens < length; index++) {
            uint32_t left = length - index * block_tokens;
            items[count] = item_of(r, group, index, left < block_tokens ? left : block_tokens);
            seals[count] = pd_seal_compute(&r->layout, bytes, items[count].block,
                                           &items[count].place, 0, r->layout.kv_heads);
            count++;
        }
    }
    return count;
}

static void compare_seals(device *d, void *ctx)
{
    const given *model = ctx;
    pd_model_file *file = tiny_open_shape(&model->shape);
    float *logits = logits_space(TOKENS);
    rig r = rig_of(d, file, false);
    unsigned char *bytes = pd_malloc(r.layout.pool_bytes);
    pd_seal_item items[64];
    uint64_t seals[64], made[64];
    uint32_t bad = 77;

    run_text(&r, 0, TOKENS - 5, 13, logits);
    for (uint32_t at = TOKENS - 5; at < TOKENS; at++) { /* as decode appends */
        kern_job_slice slice = slice_of(&r, 0, at, 1, NULL);
        slice.want_token = true;
        run(&r, &slice, 1);
    }
    device_download(d, bytes, r.pool, r.layout.pool_bytes);
    uint32_t count = seals_of_bytes(&r, bytes, TOKENS, items, seals);
    assert_int_equal(cu_model_seal(r.model, items, count, made), PD_OK);
    assert_memory_equal(made, seals, count * sizeof *seals);
    assert_int_equal(cu_model_check(r.model, items, count, seals, &bad), PD_OK);
    assert_int_equal(bad, 77);
    /* one bit of the last item's last valid token */
    const pd_seal_item *last = &items[count - 1];
    uint64_t at = pd_kv_layout_k_offset(&r.layout, last->place.group * r.layout.group_layers,
                                        last->block, 0) +
                  (last->place.valid_tokens - 1) * r.layout.token_bytes;
    bytes[at] ^= 4;
    assert_int_equal(gpu_copy_in(d->stream, (unsigned char *)r.pool + at, bytes + at, 1), PD_OK);
    device_finish(d);
    assert_int_equal(cu_model_check(r.model, items, count, seals, &bad), PD_E_MISMATCH);
    assert_int_equal(bad, count - 1);
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(logits);
    pd_free(bytes);
}

static void seals_are_those_of_the_pools_bytes(void **state)
{
    each_model(*state, compare_seals);
}

/* More than a batch of the device's: the number is the caller's. */
static void the_bad_one_of_many_is_named(void **state)
{
    enum { MANY = 1100 };
    pd_model_file *file = tiny_open_shape(&models[1].shape);
    const kern_backend_options options = options_of(LONG);
    const cu_model_settings settings = {.backend = "test"};
    rig r = {.device = *state, .file = file, .layout = tiny_layout(file, MANY)};
    pd_seal_item *items = pd_calloc(MANY, sizeof *items);
    uint64_t *seals = pd_calloc(MANY, sizeof *seals);
    void *bytes = pd_calloc(1, r.layout.pool_bytes), *pool = NULL;
    uint32_t bad = 0;

    assert_int_equal(cu_model_create(file, &options, &settings, &r.model), PD_OK);
    assert_int_equal(cu_model_pool_alloc(r.model, r.layout.pool_bytes, &pool), PD_OK);
    assert_int_equal(cu_model_bind(r.model, &r.layout, pool, true), PD_OK);
    for (uint32_t i = 0; i < MANY; i++) {
        items[i] = item_of(&r, 0, 0, r.layout.block_tokens);
        items[i].block = items[i].place.block_index = i;
    }
    assert_int_equal(cu_model_seal(r.model, items, MANY, seals), PD_OK);
    for (uint32_t i = 0; i < MANY; i += 99) /* what is new is cleared */
        assert_true(seals[i] ==
                    pd_seal_compute(&r.layout, bytes, i, &items[i].place, 0, r.layout.kv_heads));
    assert_int_equal(cu_model_check(r.model, items, MANY, seals, &bad), PD_OK);
    seals[MANY - 7] ^= 1;
    assert_int_equal(cu_model_check(r.model, items, MANY, seals, &bad), PD_E_MISMATCH);
    assert_int_equal(bad, MANY - 7);
    seals[7] ^= 1; /* the first */
    assert_int_equal(cu_model_check(r.model, items, MANY, seals, &bad), PD_E_MISMATCH);
    assert_int_equal(bad, 7);
    cu_model_pool_free(r.model);
    cu_model_destroy(r.model);
    pd_model_file_close(file);
    pd_free(items);
    pd_free(seals);
    pd_free(bytes);
}

/* ---- groups ---- */

typedef struct watch {
    rig *rig;
    unsigned char *seen; /* the pool when a group was announced: that group's part of it */
    uint32_t groups;
} watch;

static void look(void *ctx, uint32_t group)
{
    watch *w = ctx;
    const pd_kv_layout *layout = &w->rig->layout;
    uint64_t from = pd_kv_layout_block_offset(layout, group, 0);
    uint64_t bytes = pd_kv_layout_block_bytes(layout, group) * layout->blocks;

    assert_int_equal(group, w->groups++);
    device_download(w->rig->device, w->seen + from, (unsigned char *)w->rig->pool + from, bytes);
}

/* Whoever copies a group out when it is announced, on a stream of his own, has all of it. */
static void compare_groups(device *d, void *ctx)
{
    const given *model = ctx;
    pd_model_file *file = tiny_open_shape(&model->shape);
    float *logits = logits_space(1);
    rig r = rig_of(d, file, false);
    unsigned char *after = pd_malloc(r.layout.pool_bytes);
    watch w = {.rig = &r, .seen = pd_calloc(1, r.layout.pool_bytes)};
    static const uint32_t counts[] = {TOKENS - 1, 1};
    uint32_t position = 0;

    for (uint32_t i = 0; i < 2; position += counts[i++]) {
        kern_job_slice slice = slice_of(&r, 0, position, counts[i], i == 1 ? logits : NULL);
        kern_backend_step step = {
            .slices = &slice, .slices_count = 1, .group_done = look, .group_done_ctx = &w};
        w.groups = 0;
        assert_int_equal(cu_model_step(r.model, &step), PD_OK);
        assert_int_equal(w.groups, r.layout.groups);
        device_download(d, after, r.pool, r.layout.pool_bytes);
        assert_memory_equal(w.seen, after, r.layout.pool_bytes);
    }
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(logits);
    pd_free(after);
    pd_free(w.seen);
}

static void groups_are_announced_in_order_when_they_are_final(void **state)
{
    given model = models[0];

    device_each(*state, 2, compare_groups, &model);
}

/* ---- what fails ---- */

static void what_is_out_of_range_is_refused(void **state)
{
    pd_model_file *file = tiny_open_shape(&models[1].shape);
    rig r = rig_of(*state, file, false);
    uint32_t bad_token = VOCAB;
    kern_job_slice slices[9];

    slices[0] = slice_of(&r, 0, 0, 1, NULL);
    slices[0].slice.tokens = &bad_token;
    kern_backend_step step = {.slices = slices, .slices_count = 1};
    assert_int_equal(cu_model_step(r.model, &step), PD_E_INVALID);
    slices[0] = slice_of(&r, 0, 0, 10, NULL);
    slices[0].slice.position = 503;
    assert_int_equal(cu_model_step(r.model, &step), PD_E_INVALID);
    for (uint32_t i = 0; i < 9; i++)
        slices[i] = slice_of(&r, i % 4, 0, 1, NULL);
    step.slices_count = 9;
    assert_int_equal(cu_model_step(r.model, &step), PD_E_TOO_LARGE);
    assert_null(cu_model_broken(r.model));
    rig_end(&r);
    pd_model_file_close(file);
}

static void broken_numbers_are_an_error_not_an_answer(void **state)
{
    pd_model_file *file = tiny_open_shape(&models[1].shape);
    rig r = rig_of(*state, file, false);
    kern_job_slice slice = slice_of(&r, 0, 16, 1, NULL); /* positions before it hold NaN */
    kern_backend_step step = {.slices = &slice, .slices_count = 1};

    slice.want_token = true;
    slice.token_out = 99;
    assert_int_equal(cu_model_step(r.model, &step), PD_E_INTERNAL);
    assert_int_equal(slice.token_out, 99);
    assert_null(cu_model_broken(r.model));
    rig_end(&r);
    pd_model_file_close(file);
}

/* Rows enough for cuBLASLt, where there is one, and 16-bit weights: what multiplies is told. */
static void what_multiplies_is_in_the_description(void **state)
{
    const kern_backend_options options = {
        .context_max = 64, .rows_max = 1024, .slices_max = 8, .logits_rows_max = 8};
    const cu_model_settings settings = {.backend = "test"};

    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        pd_model_file *file = tiny_open_shape(&models[i].shape);
        kern_loaded *model = NULL;
        assert_int_equal(cu_model_create(file, &options, &settings, &model), PD_OK);
        bool told = strstr(cu_model_describe(model), "cuBLASLt") != NULL;
        bool halves = models[i].shape.value == PD_F16 || models[i].shape.up == PD_BF16;
        assert_true(told == halves);
        cu_model_destroy(model);
        pd_model_file_close(file);
    }
}

/* Each leaf of a sum is whole blocks of every format: 32 columns, 16 of 16-bit ones. */
static void leaves_are_whole_blocks_of_every_format(void **state)
{
    (void)state;
    for (uint32_t kv_heads = 1; kv_heads <= 80; kv_heads++)
        for (uint32_t cols = 32; cols < 4000; cols += 32) {
            const pd_model_shape shape = {.kv_heads = kv_heads};
            uint32_t leaves = cu_leaves_of(&shape, cols);
            assert_true(leaves > 0 && cols % leaves == 0 && cols / leaves % 32 == 0);
        }
}

/* More than its two pieces, and another stream looks: what is sent to the device at start is there
 * when it is said to be. */
static void what_was_staged_has_arrived(void **state)
{
    enum { BYTES = 5000 };
    static uint8_t sent[BYTES], back[BYTES];
    device *d = *state;

    for (uint32_t turn = 0; turn < 16; turn++) {
        uint8_t *memory = device_space(d, BYTES);
        cu_stage *stage = NULL;
        device_run_late(true);
        for (uint32_t i = 0; i < BYTES; i++)
            sent[i] = (uint8_t)(i * 7 + turn);
        assert_int_equal(cu_stage_create(d->gpu, 1024, &stage), PD_OK);
        assert_int_equal(cu_stage_copy(stage, memory, sent, BYTES), PD_OK);
        assert_int_equal(cu_stage_finish(stage), PD_OK);
        device_download(d, back, memory, BYTES);
        assert_memory_equal(back, sent, BYTES);
        cu_stage_destroy(stage);
        device_clear(d);
    }
    device_run_late(false);
}

/* Each allocation of a step that would be recorded fails in turn. The step is run call by call
 * then, or fails as a whole; in either case a later one is recorded, after a pause that grows. */
static void a_recording_that_fails_is_tried_again_later(void **state)
{
    pd_model_file *file = tiny_open_shape(&models[1].shape);
    float *expected = logits_space(1), *logits = logits_space(1);
    rig r = rig_of(*state, file, false);
    kern_job_slice slice = slice_of(&r, 0, 0, 1, expected);
    kern_backend_step step = {.slices = &slice, .slices_count = 1};
    uint32_t failed = 0, pause = 0;

    slice.want_token = true;
    run(&r, &slice, 1);
    assert_int_equal(cu_model_graphs(r.model), 0); /* the first time is never recorded */
    slice.slice.logits = logits;
    for (long n = 0; cu_model_graphs(r.model) == 0; n++) {
        pd_mem_fail_at(n);
        pd_status status = cu_model_step(r.model, &step);
        pd_mem_fail_at(-1);
        if (status != PD_OK || cu_model_graphs(r.model) != 0)
            continue;
        assert_memory_equal(logits, expected, sizeof *logits * VOCAB);
        for (pause = 0; failed == 0 && cu_model_graphs(r.model) == 0; pause++) {
            run(&r, &slice, 1);
            assert_memory_equal(logits, expected, sizeof *logits * VOCAB);
            assert_true(pause < 100);
        }
        failed++;
    }
    assert_true(failed > 0);
    rig_end(&r);
    pd_model_file_close(file);
    pd_free(expected);
    pd_free(logits);
}

/* A pool at an odd place: the kernels that read it fault, on a GPU as in the emulator. The device
 * is lost for the process, so this is the last test. */
static void what_failed_last_is_remembered_and_breaks_nothing(void **state)
{
    device *d = *state;
    void *memory = NULL;
    char last[GPU_ERROR_BYTES];

    assert_int_equal(gpu_alloc(d->gpu, (uint64_t)1 << 50, &memory), PD_E_NOMEM);
    gpu_last_error(d->gpu, last, sizeof last);
    assert_non_null(strstr(last, "out of memory"));
    assert_null(gpu_broken(d->gpu));
    gpu_last_error(d->gpu, last, 4); /* cut, and ended */
    assert_int_equal(strlen(last), 3);
    device_clear(d);
}

static void a_lost_device_gives_no_token(void **state)
{
    pd_model_file *file = tiny_open_shape(&models[1].shape);
    const kern_backend_options options = options_of(LONG);
    const cu_model_settings settings = {.backend = "test"};
    device *d = *state;
    rig r = {.device = d, .file = file, .layout = layout_of(file)};
    uint64_t seal = 0;

    assert_int_equal(cu_model_create(file, &options, &settings, &r.model), PD_OK);
    unsigned char *pool = device_space(d, r.layout.pool_bytes + 2);
    assert_int_equal(cu_model_bind(r.model, &r.layout, pool + 2, true), PD_OK);
    assert_null(cu_model_broken(r.model));
    kern_job_slice slice = slice_of(&r, 0, 0, 20, NULL);
    kern_backend_step step = {.slices = &slice, .slices_count = 1};
    slice.want_token = true;
    slice.token_out = 99;
    for (uint32_t turn = 0; turn < 2; turn++) {
        assert_int_equal(cu_model_step(r.model, &step), PD_E_INTERNAL);
        assert_int_equal(slice.token_out, 99);
        assert_non_null(cu_model_broken(r.model));
    }
    pd_seal_item item = item_of(&r, 0, 0, 16);
    assert_int_not_equal(cu_model_seal(r.model, &item, 1, &seal), PD_OK);
    cu_model_destroy(r.model);
    pd_model_file_close(file);
}

static int set_up(void **state)
{
    uint64_t seed = 7;

    for (uint32_t i = 0; i < LONG; i++)
        tokens[i] = device_random(&seed) % VOCAB;
    return device_setup(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_the_references),
        cmocka_unit_test(chunks_and_graphs_change_no_bit),
        cmocka_unit_test(a_row_is_the_same_alone_and_in_a_batch),
        cmocka_unit_test(a_long_row_is_the_same_beside_a_chunk),
        cmocka_unit_test(rows_of_one_token_come_by_items_in_any_step),
        cmocka_unit_test(drafts_are_sampled_row_by_row),
        cmocka_unit_test(the_last_positions_have_the_references_angles),
        cmocka_unit_test(seals_are_those_of_the_pools_bytes),
        cmocka_unit_test(the_bad_one_of_many_is_named),
        cmocka_unit_test(groups_are_announced_in_order_when_they_are_final),
        cmocka_unit_test(what_is_out_of_range_is_refused),
        cmocka_unit_test(broken_numbers_are_an_error_not_an_answer),
        cmocka_unit_test(what_multiplies_is_in_the_description),
        cmocka_unit_test(leaves_are_whole_blocks_of_every_format),
        cmocka_unit_test(what_was_staged_has_arrived),
        cmocka_unit_test(a_recording_that_fails_is_tried_again_later),
        cmocka_unit_test(what_failed_last_is_remembered_and_breaks_nothing),
        cmocka_unit_test(a_lost_device_gives_no_token),
    };
    /* patterns; left out: under a tool that finds what they do on purpose */
    const char *chosen = getenv("KVFERRY_TESTS"), *left_out = getenv("KVFERRY_SKIP_TESTS");
    if (chosen != NULL && chosen[0] != '\0')
        cmocka_set_test_filter(chosen);
    if (left_out != NULL && left_out[0] != '\0')
        cmocka_set_skip_filter(left_out);
    return cmocka_run_group_tests(tests, set_up, device_teardown);
}
