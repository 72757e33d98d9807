/* Operations of every table, and whole models, against double precision (exact.h), within the
 * tolerances that docs/kernels.md states; and that those are not so wide that a wrong result would
 * pass. What was seen is printed, in parts of the tolerance. */

#include "kernels/file_row.h"
#include "kernels/model/forward.h"
#include "kernels/model/rope.h"
#include "kernels/number.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/exact.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- tolerances, as docs/kernels.md has them ---- */

#define PRODUCT    5e-7   /* of the sum of |w x|, x as quantised */
#define NORM       4e-7   /* of the value */
#define ROPE       1.5e-7 /* of |even| + |odd| */
#define SILU       6e-7   /* of the value, and ... */
#define SILU_LEAST 1e-38  /* ... of |gate up|, where e^-gate is taken as e^88 */
#define ATTENTION  2e-6   /* of the sum of p |v|: so much, and ... */
#define SCORES     5e-7   /* ... so much times the largest sum of |q k| scale */
#define SOFTMAX    2e-6   /* weights' sum from 1 */

/* Root mean square of logits' difference, in units of theirs. */
static const struct {
    pd_dtype dtype;
    double logits[3]; /* with KV in f16, int8, fp8_e4m3 */
} models[] = {
    {PD_F32, {4e-4, 1e-2, 4e-2}},  {PD_F16, {4e-4, 1e-2, 4e-2}},  {PD_BF16, {4e-4, 1e-2, 4e-2}},
    {PD_Q4_0, {4e-2, 4e-2, 6e-2}}, {PD_Q4_1, {4e-2, 4e-2, 6e-2}}, {PD_Q8_0, {4e-2, 4e-2, 6e-2}},
    {PD_Q4_K, {4e-2, 4e-2, 6e-2}}, {PD_Q6_K, {4e-2, 4e-2, 6e-2}},
};
#define MODELS (sizeof models / sizeof *models)

static double worst; /* error in parts of the tolerance */

static void judge(double got, double exact, double tolerance)
{
    double off = fabs(got - exact) / tolerance;

    worst = fmax(worst, off);
    if (!(off <= 1))
        fail_msg("%.9g instead of %.9g: %.2f times the tolerance", got, exact, off);
}

static void each_table(const char *what, void (*test)(const kern_ops *ops))
{
    char reason[128];

    for (uint32_t i = 0; kern_ops_at(i) != NULL; i++) {
        if (kern_ops_at(i)->probe(reason, sizeof reason) == 0)
            continue;
        worst = 0;
        test(kern_ops_at(i));
        print_message("# %s, %s: %.2f of the tolerance at most\n", kern_ops_at(i)->name, what,
                      worst);
        assert_true(worst > 0.01); /* else it could be ten times as strict, and more */
    }
}

static float numbers[3][4096];

static void fill(uint64_t seed)
{
    for (int k = 0; k < 3; k++)
        for (uint32_t i = 0; i < 4096; i++)
            numbers[k][i] = tiny_random(&seed);
}

/* ---- rows ---- */

static void check_norm(const kern_ops *ops)
{
    static const uint32_t counts[] = {1, 15, 17, 96, 576, 900, 4096};
    static float out[4096];
    static double x[4096], exact[4096];

    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        fill(c + 1);
        for (uint32_t i = 0; i < counts[c]; i++)
            x[i] = (double)numbers[0][i];
        ops->rms_norm(numbers[0], numbers[1], counts[c], 1e-5f, out);
        exact_rms_norm(x, numbers[1], counts[c], (double)1e-5f, exact);
        for (uint32_t i = 0; i < counts[c]; i++)
            judge((double)out[i], exact[i], NORM * fabs(exact[i]));
    }
}

static void norms_are_accurate(void **state)
{
    (void)state;
    each_table("rms_norm", check_norm);
}

/* The table of angles and the rotation: every position is turned by its own angle. */
static void check_rope(const kern_ops *ops)
{
    static const uint32_t dims_of[] = {2, 16, 64, 96, 128};
    double frequencies[64], exact[128];
    float table[128], head[128];

    for (size_t c = 0; c < sizeof dims_of / sizeof *dims_of; c++) {
        uint32_t dims = dims_of[c];
        kern_rope_frequencies(10000, dims, frequencies);
        for (uint32_t position = 0; position < 9000; position += 1 + position / 3) {
            fill(position + c);
            kern_rope_rows(frequencies, dims, position, 1, table);
            memcpy(head, numbers[0], dims * sizeof *head);
            for (uint32_t d = 0; d < dims; d++)
                exact[d] = (double)head[d];
            ops->rope(head, table, dims / 2);
            exact_rope(exact, dims, 10000, position);
            for (uint32_t d = 0; d < dims; d++) {
                const float *pair = numbers[0] + d / 2 * 2;
                judge((double)head[d], exact[d],
                      ROPE * ((double)fabsf(pair[0]) + (double)fabsf(pair[1])));
            }
        }
    }
}

static void rotations_are_accurate(void **state)
{
    (void)state;
    each_table("rope", check_rope);
}

static void check_silu(const kern_ops *ops)
{
    static float gate[4096];

    fill(3);
    for (uint32_t i = 0; i < 4096; i++) /* -128 .. 128, and outliers of both */
        gate[i] = ((float)i - 2048) / 16 * (i % 9 == 0 ? fabsf(numbers[0][i]) : 1);
    memcpy(numbers[0], gate, sizeof gate);
    ops->silu_mul(gate, numbers[1], 4093);
    for (uint32_t i = 0; i < 4093; i++) {
        double up = (double)numbers[1][i], exact = exact_silu_mul((double)numbers[0][i], up);
        judge((double)gate[i], exact,
              SILU * fabs(exact) + SILU_LEAST * fabs((double)numbers[0][i] * up) + 1e-300);
    }
}

static void swiglu_is_accurate(void **state)
{
    (void)state;
    each_table("silu_mul", check_silu);
}

/* ---- products ---- */

static void check_product(const kern_ops *ops, pd_dtype dtype, uint32_t rows, uint32_t cols,
                          uint32_t segments)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    size_t row_bytes = cols / info->block_weights * info->block_bytes;
    size_t packed_bytes = ops->pack_bytes(dtype, rows, cols);
    uint8_t *weights = malloc(rows * row_bytes);
    void *packed = packed_bytes > 0 ? aligned_alloc(64, packed_bytes) : NULL;
    static int8_t quants[4096];
    static float scales[128], sums[128], row[4096], out[64];
    static int32_t quant_sums[128], low_sums[128];
    kern_acts acts = {cols, numbers[0], quants, scales, sums, quant_sums, low_sums};
    kern_matrix matrix = {
        .dtype = dtype, .rows = rows, .cols = cols, .segments = segments, .data = weights};
    float *place = out;

    tiny_fill(dtype, cols, rows, cols, weights);
    if (packed != NULL) {
        ops->pack(dtype, rows, cols, weights, packed);
        matrix.data = packed;
    }
    ops->quantize(&acts, 0, 0, cols);
    ops->matmul(&matrix, 0, rows, &acts, 0, 1, &place, false);
    for (uint32_t r = 0; r < rows; r++) {
        double exact = 0, size = 0;
        kern_row_to_f32(dtype, weights + r * row_bytes, cols, row);
        for (uint32_t i = 0; i < cols; i++) {
            double x = info->block_weights == 1 ? (double)numbers[0][i]
                                                : (double)scales[i / 32] * quants[i];
            exact += (double)row[i] * x;
            size += fabs((double)row[i] * x);
        }
        judge((double)out[r], exact, PRODUCT * size);
    }
    free(weights);
    free(packed);
}

static void check_products(const kern_ops *ops)
{
    fill(17);
    for (pd_dtype dtype = PD_F32; dtype <= PD_Q6_K; dtype++) {
        check_product(ops, dtype, 24, 256, 1);
        check_product(ops, dtype, 37, 1536, 3);
        check_product(ops, dtype, 64, 4096, 4);
    }
}

static void products_are_accurate(void **state)
{
    (void)state;
    each_table("matmul", check_products);
}

/* ---- attention ---- */

typedef struct attention {
    pd_kv_layout layout;
    uint8_t *pool;
    pd_block blocks[64];
    double *keys, *values; /* [positions][dim], the numbers that the pool holds */
    uint32_t dim, positions;
} attention;

static attention attention_open(pd_dtype kv, uint32_t dim, uint32_t positions, bool ones)
{
    pd_model_shape shape = {.layers = 1, .kv_heads = 1, .head_dim = dim};
    pd_kv_layout_options options = {
        .dtype = kv, .block_tokens = 16, .memory_bytes = 1 << 28, .blocks_max = 64};
    attention a = {.dim = dim, .positions = positions};
    uint64_t seed = dim + positions;
    float row[128];

    assert_int_equal(pd_kv_layout_make(&shape, &options, &a.layout), PD_OK);
    a.pool = aligned_alloc(64, a.layout.pool_bytes);
    memset(a.pool, 0xff, a.layout.pool_bytes);
    a.keys = calloc(2 * (size_t)positions * dim, sizeof *a.keys);
    a.values = a.keys + (size_t)positions * dim;
    for (uint32_t i = 0; i < 64; i++)
        a.blocks[i] = i * 37 % 64;
    for (uint32_t p = 0; p < 2 * positions; p++) {
        bool value = p >= positions;
        uint32_t at = p % positions, token = at % 16;
        uint8_t *half = a.pool + pd_kv_layout_k_offset(&a.layout, 0, a.blocks[at / 16], 0) +
                        (value ? a.layout.half_bytes : 0);
        for (uint32_t d = 0; d < dim; d++)
            row[d] = value && ones ? 1 : tiny_random(&seed) * (value ? 1 : 0.3f);
        kern_ops_at(0)->store_kv(&a.layout, row, token, half);
        for (uint32_t d = 0; d < dim; d++)
            a.keys[(size_t)p * dim + d] = tiny_kv_value(&a.layout, half, token, d);
    }
    return a;
}

static void attend(const kern_ops *ops, const attention *a, uint32_t heads, uint32_t tokens,
                   const float *query, float *out)
{
    kern_attention args = {.layout = &a->layout,
                           .pool = a->pool,
                           .blocks = a->blocks,
                           .heads = heads,
                           .tokens = tokens,
                           .position = a->positions - tokens,
                           .scale = 1 / sqrtf((float)a->dim),
                           .query = query,
                           .out = out,
                           .query_stride = heads * a->dim,
                           .out_stride = heads * a->dim};
    size_t bytes = ops->attention_scratch_bytes(heads, a->dim);

    args.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    ops->attention(&args);
    free(args.scratch);
}

static void judge_attention(const kern_ops *ops, const attention *a, uint32_t heads,
                            uint32_t tokens)
{
    static float out[4096];
    double query[128], exact[128], *sizes = calloc((size_t)a->positions * a->dim, sizeof *sizes);
    double exact_size[128];

    for (size_t i = 0; i < (size_t)a->positions * a->dim; i++)
        sizes[i] = fabs(a->values[i]);
    attend(ops, a, heads, tokens, numbers[0], out);
    for (uint32_t row = 0; row < tokens * heads; row++) {
        uint32_t seen = a->positions - tokens + row / heads + 1;
        double scale = (double)(1 / sqrtf((float)a->dim));
        for (uint32_t d = 0; d < a->dim; d++)
            query[d] = (double)numbers[0][row * a->dim + d];
        double scores =
            exact_attention(query, a->keys, a->values, seen, a->dim, a->dim, scale, exact);
        exact_attention(query, a->keys, sizes, seen, a->dim, a->dim, scale, exact_size);
        for (uint32_t d = 0; d < a->dim; d++)
            judge((double)out[row * a->dim + d], exact[d],
                  (ATTENTION + SCORES * scores) * exact_size[d]);
    }
    free(sizes);
}

static const pd_dtype kv_formats[] = {PD_F16, PD_INT8, PD_FP8_E4M3};

static void check_attention(const kern_ops *ops)
{
    static const struct {
        uint32_t dim, positions, heads, tokens;
    } shapes[] = {
        {64, 1, 3, 1}, {32, 40, 1, 16}, {128, 256, 4, 1}, {64, 300, 3, 5}, {80, 777, 9, 2}};

    for (size_t f = 0; f < 3; f++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            attention a = attention_open(kv_formats[f], shapes[i].dim, shapes[i].positions, false);
            fill(i);
            judge_attention(ops, &a, shapes[i].heads, shapes[i].tokens);
            free(a.pool);
            free(a.keys);
        }
}

static void attention_is_accurate(void **state)
{
    (void)state;
    each_table("attention", check_attention);
}

/* Over values that are all 1, attention is the sum of softmax's weights. */
static void check_softmax(const kern_ops *ops)
{
    static float out[4096];

    for (uint32_t positions = 1; positions < 1000; positions += 1 + positions / 2) {
        attention a = attention_open(PD_F16, 32, positions, true);
        fill(positions);
        attend(ops, &a, 5, 1, numbers[0], out);
        for (uint32_t i = 0; i < 5 * 32; i++)
            judge((double)out[i], 1, SOFTMAX);
        free(a.pool);
        free(a.keys);
    }
}

static void softmax_weights_add_up_to_one(void **state)
{
    (void)state;
    each_table("softmax", check_softmax);
}

/* ---- whole models ---- */

#define TOKENS 280 /* more than a split */
#define FEW    40

static void run_model(const pd_model_file *file, pd_dtype kv, const uint32_t *tokens,
                      uint32_t count, float *logits)
{
    kern_options options = {.device = "cpu",
                            .threads = 1,
                            .context_max = TOKENS,
                            .rows_max = TOKENS,
                            .logits_rows_max = TOKENS};
    pd_kv_layout layout = tiny_layout_of(file, TOKENS / 16 + 1, kv);
    pd_block blocks[TOKENS / 16 + 1];
    void *pool = pd_malloc(layout.pool_bytes);
    kern_model *model = NULL;
    kern_slice slice = {.tokens = tokens, .count = count, .blocks = blocks, .logits = logits};
    kern_step step = {.layout = &layout, .pool = pool, .slices = &slice, .slices_count = 1};

    for (uint32_t i = 0; i <= TOKENS / 16; i++)
        blocks[i] = i;
    memset(pool, 0xff, layout.pool_bytes);
    assert_int_equal(kern_model_create(file, &options, &model), PD_OK);
    assert_int_equal(kern_model_step(model, &step), PD_OK);
    kern_model_destroy(model);
    pd_free(pool);
}

static double off_by(const float *got, const double *exact, size_t count)
{
    double off = 0, all = 0;

    for (size_t i = 0; i < count; i++) {
        off += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
        all += exact[i] * exact[i];
    }
    return sqrt(off / all);
}

static void models_are_accurate(void **state)
{
    static float logits[TOKENS * TINY_VOCAB];
    static double exact[TOKENS * TINY_VOCAB];
    uint32_t tokens[TOKENS];
    uint64_t seed = 23;

    (void)state;
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(pd_random_next(&seed) % TINY_VOCAB);
    for (size_t m = 0; m < MODELS; m++) {
        tiny_shape shape = tiny_of_format(models[m].dtype);
        pd_model_file *file = tiny_open_shape(&shape);
        uint32_t count = models[m].dtype == PD_F16 ? TOKENS : FEW;
        exact_logits(file, tokens, count, exact);
        for (size_t f = 0; f < 3; f++) {
            run_model(file, kv_formats[f], tokens, count, logits);
            double off = off_by(logits, exact, (size_t)count * TINY_VOCAB);
            print_message("# %s, KV %s: logits %.6f\n", pd_dtype_info_of(models[m].dtype)->name,
                          pd_kv_dtype_name(kv_formats[f]), off);
            assert_true(off <= models[m].logits[f] && off > models[m].logits[f] / 10);
        }
        pd_model_file_close(file);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms_are_accurate),    cmocka_unit_test(rotations_are_accurate),
        cmocka_unit_test(swiglu_is_accurate),    cmocka_unit_test(products_are_accurate),
        cmocka_unit_test(attention_is_accurate), cmocka_unit_test(softmax_weights_add_up_to_one),
        cmocka_unit_test(models_are_accurate),
    };
    choice_filter();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
