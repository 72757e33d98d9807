/* Every weight format, whole: what its blocks mean, that models in it give the same tokens on every
 * backend and stay near the model they were made of, that no bytes make backends differ, and what
 * is refused. */

#include "kernels/file_row.h"
#include "kernels/model/engine.h"
#include "kernels/model/weights.h"
#include "kernels/number.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/quantise.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define SEQUENCES 3
#define PROMPT    37 /* two tiles of 16 rows and some, with the others' */
#define WANTED    6  /* tokens of each sequence */
#define BLOCKS    16
#define CONTEXT   64

/* Root mean square of what the format loses: of values evenly from -1 to 1 (seen 0.0002, 0.003,
 * 0.067, 0.061, 0.0038, 0.061, 0.0157), and of the logits of a model of two layers (seen 0.0003,
 * 0.0046, 0.098, 0.107, 0.016, 0.101, 0.035), in units of theirs. */
static const struct {
    pd_dtype dtype;
    double weights, logits;
} formats[] = {
    {PD_F16, 0.0003, 0.0006}, {PD_BF16, 0.0035, 0.008}, {PD_Q4_0, 0.07, 0.15},
    {PD_Q4_1, 0.064, 0.15},   {PD_Q8_0, 0.0042, 0.025}, {PD_Q4_K, 0.064, 0.15},
    {PD_Q6_K, 0.0175, 0.05},
};
#define FORMATS (sizeof formats / sizeof *formats)

static double relative_rms(const float *got, const float *wanted, size_t count)
{
    double off = 0, all = 0;

    for (size_t i = 0; i < count; i++) {
        off += ((double)got[i] - wanted[i]) * ((double)got[i] - wanted[i]);
        all += (double)wanted[i] * wanted[i];
    }
    return sqrt(off / all);
}

static void quantised_weights_are_near_what_they_were(void **state)
{
    enum { COUNT = 64 * 256 };
    static float x[COUNT], back[COUNT];
    static uint8_t blocks[COUNT * 4];
    uint64_t seed = 5;

    (void)state;
    for (size_t i = 0; i < COUNT; i++)
        x[i] = (float)(pd_random_next(&seed) >> 40) * 0x1p-23f - 1;
    for (size_t f = 0; f < FORMATS; f++) {
        test_quantise(formats[f].dtype, x, COUNT, blocks);
        kern_row_to_f32(formats[f].dtype, blocks, COUNT, back);
        double off = relative_rms(back, x, COUNT);
        print_message("# %s: weights %.4f\n", pd_dtype_info_of(formats[f].dtype)->name, off);
        assert_true(off < formats[f].weights);
    }
}

/* ---- whole models ---- */

static tiny_shape shape_in(pd_dtype dtype)
{
    tiny_shape shape = tiny_of_format(dtype);

    shape.ffn = 768;
    shape.context = 256;
    return shape;
}

typedef struct answers {
    uint32_t tokens[SEQUENCES][WANTED];
    float logits[SEQUENCES][TINY_VOCAB]; /* after the prompts */
} answers;

static void run_job(kern_engine *engine, kern_job_slice *slices, uint32_t count)
{
    kern_job job = {.slices = slices, .slices_count = count}, *done = NULL;

    assert_int_equal(kern_engine_submit(engine, &job), PD_OK);
    while (kern_engine_poll(engine, &done) == PD_E_AGAIN) {
        struct pollfd ready = {.fd = kern_engine_fd(engine), .events = POLLIN};
        assert_int_equal(poll(&ready, 1, 60000), 1);
    }
    assert_ptr_equal(done, &job);
    assert_int_equal(job.status, PD_OK);
}

/* Prompts of different lengths, in one step or one for each, then a token each a step, greedily. */
static void answer(const pd_model_file *file, const char *device, uint32_t threads, bool together,
                   answers *out)
{
    kern_engine_options options = {.device = device,
                                   .threads = threads,
                                   .context_max = CONTEXT,
                                   .rows_max = SEQUENCES * CONTEXT,
                                   .slices_max = SEQUENCES,
                                   .logits_rows_max = SEQUENCES};
    pd_kv_layout layout = tiny_layout(file, BLOCKS);
    void *pool = pd_malloc(layout.pool_bytes);
    kern_engine *engine = NULL;
    pd_block blocks[SEQUENCES][CONTEXT / 16];
    uint32_t tokens[SEQUENCES][CONTEXT], lengths[SEQUENCES];
    kern_job_slice slices[SEQUENCES];
    uint64_t seed = 3;

    assert_non_null(pool);
    memset(pool, 0xff, layout.pool_bytes);
    assert_int_equal(kern_engine_create(file, &options, &engine), PD_OK);
    assert_int_equal(kern_engine_bind(engine, &layout, pool, false), PD_OK);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        lengths[s] = PROMPT - 9 * s;
        for (uint32_t i = 0; i < CONTEXT / 16; i++)
            blocks[s][i] = (i * SEQUENCES + s) % BLOCKS;
        for (uint32_t i = 0; i < lengths[s]; i++)
            tokens[s][i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
        slices[s] = (kern_job_slice){.slice = {.tokens = tokens[s],
                                               .count = lengths[s],
                                               .blocks = blocks[s],
                                               .logits_from = lengths[s] - 1,
                                               .logits = out->logits[s]},
                                     .want_token = true};
        if (!together)
            run_job(engine, &slices[s], 1);
    }
    if (together)
        run_job(engine, slices, SEQUENCES);
    for (uint32_t n = 0; n < WANTED; n++) {
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            out->tokens[s][n] = tokens[s][lengths[s]] = slices[s].token_out;
            slices[s].slice = (kern_slice){.tokens = &tokens[s][lengths[s]],
                                           .count = 1,
                                           .position = lengths[s],
                                           .blocks = blocks[s],
                                           .logits_from = 1};
            lengths[s]++;
        }
        run_job(engine, slices, SEQUENCES);
    }
    kern_engine_destroy(engine);
    pd_free(pool);
}

static void models_in_every_format_give_the_references_tokens(void **state)
{
    static answers floats, wanted, got;
    tiny_shape shape = shape_in(PD_F32);
    pd_model_file *file = tiny_open_shape(&shape);
    char reason[128];

    (void)state;
    answer(file, "cpu-ref", 1, true, &floats);
    pd_model_file_close(file);
    for (size_t f = 0; f < FORMATS; f++) {
        shape = shape_in(formats[f].dtype);
        file = tiny_open_shape(&shape);
        answer(file, "cpu-ref", 1, true, &wanted);
        for (uint32_t i = 1; kern_ops_at(i) != NULL; i++) {
            for (uint32_t run = 0; kern_ops_at(i)->probe(reason, sizeof reason) > 0 && run < 2;
                 run++) {
                answer(file, kern_ops_at(i)->name, 1 + 2 * run, run == 0, &got);
                assert_memory_equal(&got, &wanted, sizeof got);
            }
        }
        double off = relative_rms(wanted.logits[0], floats.logits[0], SEQUENCES * TINY_VOCAB);
        print_message("# %s: logits %.4f\n", pd_dtype_info_of(shape.query)->name, off);
        assert_true(off < formats[f].logits);
        pd_model_file_close(file);
    }
}

/* ---- any bytes ---- */

/* Scales of any f16 (NaN, infinities, subnormals, zeros), quants of any value; now and then a whole
 * block of zeros. */
static void any_bytes(uint64_t *random, const pd_dtype_info *info, size_t bytes, uint8_t *out)
{
    static const uint16_t rare[] = {0, 0x8000, 1, 0x83ff, 0x7bff, 0x7c00, 0xfc00, 0x7e01, 0x3c00};

    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)pd_random_next(random);
    for (size_t at = 0; at < bytes; at += info->block_bytes) {
        size_t d = info->block_bytes == 210 ? 208 : 0;
        uint64_t kind = pd_random_next(random) % 8;
        if (kind == 0)
            memset(out + at, 0, info->block_bytes);
        if (kind == 1)
            memcpy(out + at + d, &rare[pd_random_next(random) % 9], 2);
        else
            out[at + d + 1] &= 0xbf; /* of a size that sums stay finite with */
    }
}

static bool same(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

typedef struct product {
    kern_matrix matrix;
    kern_acts acts;
    uint32_t acts_rows, row_first;
    float *out[2];
} product;

static void free_product(product *p)
{
    free(p->acts.values);
    free(p->acts.quants);
    free(p->acts.scales);
    free(p->acts.sums);
    free(p->acts.quant_sums);
    free(p->acts.low_sums);
    free(p->out[0]);
    free(p->out[1]);
    free((void *)p->matrix.data);
}

/* Of random shape; memory is just as large as told, for the sanitizers. */
static product any_product(uint64_t *random, pd_dtype dtype)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint32_t step = info->block_weights > 32 ? info->block_weights : 32;
    uint32_t cols = step * (1 + (uint32_t)(pd_random_next(random) % (step == 32 ? 20 : 4)));
    uint32_t rows = 1 + (uint32_t)(pd_random_next(random) % 50);
    uint32_t segments = 1 + (uint32_t)(pd_random_next(random) % (cols / 32));
    product p = {.acts_rows = 1 + (uint32_t)(pd_random_next(random) % 40)};
    size_t bytes = (size_t)rows * (cols / info->block_weights) * info->block_bytes;
    size_t count = (size_t)p.acts_rows * cols;
    void *weights = malloc(bytes);

    while (cols / 32 % segments != 0)
        segments--;
    p.row_first = rows > 16 ? (uint32_t)(pd_random_next(random) % (rows / 16)) * 16 : 0;
    any_bytes(random, info, bytes, weights);
    p.matrix = (kern_matrix){
        .dtype = dtype, .rows = rows, .cols = cols, .segments = segments, .data = weights};
    p.acts = (kern_acts){.cols = cols,
                         .values = malloc(count * 4),
                         .quants = malloc(count),
                         .scales = malloc(count / 8),
                         .sums = malloc(count / 8),
                         .quant_sums = malloc(count / 8),
                         .low_sums = malloc(count / 8)};
    for (size_t i = 0; i < count; i++)
        p.acts.values[i] = i / 32 % 11 == 3 ? 0 : tiny_random(random);
    for (uint32_t i = 0; i < p.acts_rows; i++)
        kern_ops_at(0)->quantize(&p.acts, i, 0, cols);
    for (int i = 0; i < 2; i++)
        p.out[i] = calloc((size_t)p.acts_rows * rows, sizeof(float));
    return p;
}

static void multiply(const kern_ops *ops, const product *p, float *out)
{
    const kern_matrix *m = &p->matrix;
    size_t packed_bytes = ops->pack_bytes(m->dtype, m->rows, m->cols);
    void *packed = packed_bytes > 0 ? aligned_alloc(64, packed_bytes) : NULL;
    kern_matrix matrix = *m;
    float *places[40];

    for (uint32_t n = 0; n < p->acts_rows; n++)
        places[n] = out + (size_t)n * m->rows;
    if (packed != NULL) {
        ops->pack(m->dtype, m->rows, m->cols, m->data, packed);
        matrix.data = packed;
    }
    ops->matmul(&matrix, p->row_first, m->rows - p->row_first, &p->acts, 0, p->acts_rows, places,
                false);
    free(packed);
}

static void no_bytes_make_backends_differ(void **state)
{
    enum { ROUNDS = 12 };
    uint64_t random = 21;
    char reason[128];

    (void)state;
    for (size_t f = 0; f < FORMATS; f++) {
        for (uint32_t round = 0; round < ROUNDS; round++) {
            product p = any_product(&random, formats[f].dtype);
            multiply(kern_ops_at(0), &p, p.out[0]);
            for (uint32_t i = 1; kern_ops_at(i) != NULL; i++) {
                if (kern_ops_at(i)->probe(reason, sizeof reason) == 0)
                    continue;
                memset(p.out[1], 0, (size_t)p.acts_rows * p.matrix.rows * sizeof(float));
                multiply(kern_ops_at(i), &p, p.out[1]);
                for (size_t at = 0; at < (size_t)p.acts_rows * p.matrix.rows; at++)
                    assert_true(same(p.out[0][at], p.out[1][at]));
            }
            free_product(&p);
        }
    }
}

/* ---- refused ---- */

static void rows_of_no_whole_blocks_are_refused(void **state)
{
    tiny_shape shape = shape_in(PD_Q8_0);
    char path[] = "/tmp/kvferry-formats-XXXXXX";
    pd_model_file *file = NULL;
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    shape.ffn = 288; /* 256 and a block of 32 */
    shape.from_floats = false;
    tiny_write(&shape, path);
    assert_int_equal(pd_model_file_open(path, &file), PD_OK);
    pd_model_file_close(file);
    shape.down = PD_Q4_K;
    tiny_write(&shape, path);
    assert_int_equal(pd_model_file_open(path, &file), PD_E_INVALID);
    unlink(path);
}

/* 768 columns among two ranks: 384 end within a block of 256. */
static void ranks_that_cut_blocks_are_refused(void **state)
{
    tiny_shape shape = shape_in(PD_Q8_0);
    kern_split split;
    kern_weights weights;
    char why[128];

    (void)state;
    shape.vocab = 200;
    for (uint32_t k = 0; k < 2; k++) {
        shape.down = k == 0 ? PD_Q8_0 : PD_Q6_K;
        pd_model_file *file = tiny_open_shape(&shape);
        assert_true(kern_split_of(pd_model_file_shape(file), 0, 2, &split, why, sizeof why));
        pd_status status = kern_weights_init(file, kern_ops_at(0), &split, NULL, &weights);
        assert_int_equal(status, k == 0 ? PD_OK : PD_E_UNSUPPORTED);
        if (status == PD_OK)
            kern_weights_fini(&weights);
        pd_model_file_close(file);
    }
}

static int tear_down(void **state)
{
    (void)state;
    return pd_mem_live() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantised_weights_are_near_what_they_were),
        cmocka_unit_test(models_in_every_format_give_the_references_tokens),
        cmocka_unit_test(no_bytes_make_backends_differ),
        cmocka_unit_test(rows_of_no_whole_blocks_are_refused),
        cmocka_unit_test(ranks_that_cut_blocks_are_refused),
    };
    choice_filter();
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
