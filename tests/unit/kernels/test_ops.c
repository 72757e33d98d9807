/* Each operation of each backend equals the reference bit for bit, at odd sizes and with outliers;
 * and the reference is accurate against double precision. */

#include "kernels/file_row.h"
#include "kernels/model/rope.h"
#include "kernels/number.h"
#include "kernels/ops.h"
#include "kernels/team.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/mem.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

static const kern_ops *ref;

/* Calls test for every backend of this build that runs on this machine, but the reference. */
static void each_backend(void (*test)(const kern_ops *fast))
{
    char reason[128];

    for (uint32_t i = 1; kern_ops_at(i) != NULL; i++)
        if (kern_ops_at(i)->probe(reason, sizeof reason) > 0)
            test(kern_ops_at(i));
}

static float *random_floats(size_t count, uint64_t seed)
{
    float *values = malloc((count + 16) * sizeof *values);

    for (size_t i = 0; i < count; i++)
        values[i] = tiny_random(&seed);
    return values;
}

static kern_acts make_acts(uint32_t rows, uint32_t cols, uint64_t seed)
{
    size_t count = (size_t)rows * cols;

    return (kern_acts){.cols = cols,
                       .values = random_floats(count, seed),
                       .quants = calloc(count + 64, 1),
                       .scales = calloc(count / 32 + 1, sizeof(float)),
                       .sums = calloc(count / 32 + 1, sizeof(float)),
                       .quant_sums = calloc(count / 32 + 1, sizeof(int32_t)),
                       .low_sums = calloc(count / 32 + 1, sizeof(int32_t))};
}

static void free_acts(kern_acts *acts)
{
    free(acts->values);
    free(acts->quants);
    free(acts->scales);
    free(acts->sums);
    free(acts->quant_sums);
    free(acts->low_sums);
}

static void half_floats_convert_exactly(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 65536; half++) {
        float value = kern_f16_to_f32((uint16_t)half);
        if ((half & 0x7fff) < 0x7c00) { /* finite: there and back */
            assert_int_equal(kern_f32_to_f16(value), half);
            /* half way to the next goes to the even one, a bit more goes up */
            float next = (half & 0x7fff) == 0x7bff ? value : kern_f16_to_f32((uint16_t)(half + 1));
            float middle = value + (next - value) / 2;
            if (middle != value) {
                assert_int_equal(kern_f32_to_f16(middle), half + (half & 1));
                assert_int_equal(kern_f32_to_f16(nextafterf(middle, next)), half + 1);
            }
        }
    }
    assert_int_equal(kern_f32_to_f16(1e9f), 0x7bff);
    assert_int_equal(kern_f32_to_f16(-INFINITY), 0xfbff);
    assert_true(isnan(kern_f16_to_f32(kern_f32_to_f16(NAN))));
}

static void exp_is_accurate(void **state)
{
    (void)state;
    for (double x = -87; x <= 88; x += 0.00317) {
        double exact = exp((double)(float)x);
        assert_true(fabs(kern_exp((float)x) - exact) <= 2.5e-7 * exact);
    }
    assert_true(kern_exp(-1e30f) > 0 && kern_exp(-1e30f) < 2e-38f);
    assert_true(kern_exp(1e30f) > 1e38f && kern_exp(1e30f) < INFINITY);
}

static void rope_table_is_accurate(void **state)
{
    enum { DIMS = 64, POSITIONS = 8192 };
    float *table = malloc(sizeof(float) * DIMS * POSITIONS);
    double frequencies[DIMS / 2];

    (void)state;
    kern_rope_frequencies(100000, DIMS, frequencies);
    /* in pieces, as positions are reached */
    for (uint32_t first = 0; first < POSITIONS; first += 700)
        kern_rope_rows(frequencies, DIMS, first, POSITIONS - first < 700 ? POSITIONS - first : 700,
                       table + (size_t)first * DIMS);
    for (uint32_t position = 0; position < POSITIONS; position += 7) {
        for (uint32_t i = 0; i < DIMS / 2; i++) {
            double angle = position * pow(100000, -2.0 * i / DIMS);
            const float *entry = table + (position * (DIMS / 2) + i) * 2;
            assert_true(fabs(entry[0] - cos(angle)) < 1e-7 && fabs(entry[1] - sin(angle)) < 1e-7);
        }
    }
    free(table);
}

static void check_quantize(const kern_ops *fast)
{
    enum { ROWS = 3, COLS = 224 };
    kern_acts a = make_acts(ROWS * 2, COLS, 11), b = make_acts(ROWS * 2, COLS, 11);

    for (uint32_t i = 0; i < COLS; i++) {
        a.values[COLS + i] = b.values[COLS + i] = i < 32 ? 0 : i < 64 ? 1e-38f : (float)i - 100.5f;
        if (i >= 192)
            a.values[i] = b.values[i] = i == 200 ? INFINITY : 1;
    }
    for (uint32_t row = 0; row < ROWS; row++) {
        ref->quantize(&a, row, row * 32, COLS - row * 32);
        fast->quantize(&b, row, row * 32, COLS - row * 32);
        ref->residual(&a, row, row * 32, 160 - row * 32, ROWS + row);
        fast->residual(&b, row, row * 32, 160 - row * 32, ROWS + row);
    }
    assert_memory_equal(a.quants, b.quants, ROWS * COLS);
    assert_memory_equal(a.scales, b.scales, ROWS * COLS / 32 * sizeof(float));
    assert_memory_equal(a.quant_sums, b.quant_sums, ROWS * COLS / 32 * sizeof(int32_t));
    assert_memory_equal(a.low_sums, b.low_sums, ROWS * COLS / 32 * sizeof(int32_t));
    for (uint32_t i = 0; i < ROWS * COLS / 32; i++) /* inf * 0 is some NaN */
        assert_true(memcmp(&a.sums[i], &b.sums[i], sizeof(float)) == 0 ||
                    (isnan(a.sums[i]) && isnan(b.sums[i])));
    assert_memory_equal(a.values, b.values, 2 * ROWS * COLS * sizeof(float));
    assert_false(isfinite(a.scales[200 / 32])); /* an infinity is not hidden */
    free_acts(&a);
    free_acts(&b);
}

static void quantize_is_equal(void **state)
{
    (void)state;
    each_backend(check_quantize);
}

static void quantize_is_within_half_a_step(void **state)
{
    enum { COLS = 3200 };
    kern_acts acts = make_acts(1, COLS, 5);

    (void)state;
    ref->quantize(&acts, 0, 0, COLS);
    for (uint32_t i = 0; i < COLS; i++) {
        float step = acts.scales[i / 32];
        assert_true(fabsf(acts.values[i] - step * acts.quants[i]) <= step * 0.5001f);
    }
    free_acts(&acts);
}

static bool is_k(pd_dtype dtype)
{
    return pd_dtype_info_of(dtype)->block_weights == 256;
}

static void one_product(const kern_ops *fast, pd_dtype dtype, uint32_t rows, uint32_t cols,
                        uint32_t segments, uint32_t acts_rows)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint8_t *weights = malloc((size_t)rows * (cols / info->block_weights) * info->block_bytes);
    kern_acts acts = make_acts(acts_rows + 1, cols, rows * 31 + cols);
    size_t packed_bytes = fast->pack_bytes(dtype, rows, cols);
    void *packed = packed_bytes == 0 ? NULL : aligned_alloc(64, (packed_bytes + 63) / 64 * 64);
    float *out[2] = {random_floats((size_t)rows * acts_rows, 3),
                     random_floats((size_t)rows * acts_rows, 3)};
    float **rows_of[2] = {malloc(sizeof(float *) * acts_rows), malloc(sizeof(float *) * acts_rows)};

    tiny_fill(dtype, rows + cols, rows, cols, weights);
    for (uint32_t row = 0; cols % 32 == 0 && row < acts_rows + 1; row++)
        ref->quantize(&acts, row, 0, cols);
    if (packed != NULL)
        fast->pack(dtype, rows, cols, weights, packed);
    for (uint32_t n = 0; n < acts_rows; n++) {
        rows_of[0][n] = out[0] + (size_t)n * rows;
        rows_of[1][n] = out[1] + (size_t)n * rows;
    }
    kern_matrix plain = {
        .dtype = dtype, .rows = rows, .cols = cols, .segments = segments, .data = weights};
    kern_matrix fast_matrix = plain;
    fast_matrix.data = packed != NULL ? packed : weights;
    for (int add = 0; add < 2; add++) { /* the second from a row range that is not the whole */
        uint32_t first = add == 1 && rows > 16 ? 16 : 0;
        ref->matmul(&plain, first, rows - first, &acts, 1, acts_rows, rows_of[0], add == 1);
        fast->matmul(&fast_matrix, first, rows - first, &acts, 1, acts_rows, rows_of[1], add == 1);
        assert_memory_equal(out[0], out[1], (size_t)rows * acts_rows * sizeof(float));
    }
    if (segments > 1) { /* a node of the tree: the right half of it all */
        uint32_t left = kern_tree_left(segments);
        plain = kern_matrix_node(&plain, left, segments - left);
        fast_matrix = kern_matrix_node(&fast_matrix, left, segments - left);
        ref->matmul(&plain, 0, rows, &acts, 1, acts_rows, rows_of[0], false);
        fast->matmul(&fast_matrix, 0, rows, &acts, 1, acts_rows, rows_of[1], false);
        assert_memory_equal(out[0], out[1], (size_t)rows * acts_rows * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        free(out[i]);
        free(rows_of[i]);
    }
    free(weights);
    free(packed);
    free_acts(&acts);
}

static void check_products(const kern_ops *fast)
{
    static const uint32_t acts_rows[] = {1, 2, 3, 7, 15, 16, 17, 41};

    for (pd_dtype dtype = PD_F32; dtype <= PD_Q6_K; dtype++) {
        for (size_t i = 0; i < sizeof acts_rows / sizeof *acts_rows; i++) {
            if (is_k(dtype)) { /* whole blocks of 256; segments end within them */
                one_product(fast, dtype, 1, 256, 1, acts_rows[i]);
                one_product(fast, dtype, 15, 512, 2, acts_rows[i]);
                one_product(fast, dtype, 37, 768, 8, acts_rows[i]);
                one_product(fast, dtype, 64, 1280, 5, acts_rows[i]);
                continue;
            }
            one_product(fast, dtype, 1, 32, 1, acts_rows[i]);
            one_product(fast, dtype, 15, 64, 2, acts_rows[i]);
            one_product(fast, dtype, 37, 288, 3, acts_rows[i]);
            one_product(fast, dtype, 64, 576, 3, acts_rows[i]);
        }
        for (uint32_t segments = 4; segments <= KERN_LEAVES_MAX; segments += 1 + segments / 4)
            one_product(fast, dtype, 17, (is_k(dtype) ? 256 : 32) * segments, segments, 9);
        for (uint32_t segments = 8; is_k(dtype) && segments <= 64; segments *= 2)
            one_product(fast, dtype, 17, 32 * segments, segments, 9);
        if (pd_dtype_info_of(dtype)->block_weights == 1) {
            one_product(fast, dtype, 5, 7, 1, 3);
            one_product(fast, dtype, 9, 50, 1, 5);
        }
    }
}

static void products_are_equal(void **state)
{
    (void)state;
    each_backend(check_products);
}

/* Against double, with the activations as they were quantised: only the sums' rounding is left. */
static void products_are_accurate(void **state)
{
    enum { ROWS = 24, COLS = 768 };

    (void)state;
    for (pd_dtype dtype = PD_F32; dtype <= PD_Q6_K; dtype++) {
        const pd_dtype_info *info = pd_dtype_info_of(dtype);
        size_t row_bytes = COLS / info->block_weights * info->block_bytes;
        uint8_t *weights = malloc(ROWS * row_bytes);
        kern_acts acts = make_acts(1, COLS, 99);
        float out[ROWS], row[COLS], *place = out;
        kern_matrix matrix = {
            .dtype = dtype, .rows = ROWS, .cols = COLS, .segments = 3, .data = weights};
        tiny_fill(dtype, 17, ROWS, COLS, weights);
        ref->quantize(&acts, 0, 0, COLS);
        ref->matmul(&matrix, 0, ROWS, &acts, 0, 1, &place, false);
        for (uint32_t r = 0; r < ROWS; r++) {
            double exact = 0, size = 0;
            kern_row_to_f32(dtype, weights + r * row_bytes, COLS, row);
            for (uint32_t i = 0; i < COLS; i++) {
                double x = info->block_weights == 1 ? acts.values[i]
                                                    : (double)acts.scales[i / 32] * acts.quants[i];
                exact += row[i] * x;
                size += fabs(row[i] * x);
            }
            assert_true(fabs(out[r] - exact) <= 2e-6 * size);
        }
        free(weights);
        free_acts(&acts);
    }
}

/* Whatever run of segments a rank has: its nodes' sums, finished over the tree, are the whole. */
static void a_split_product_is_the_whole_one(void **state)
{
    enum { ROWS = 5, SEGMENTS_MAX = 24, COLS = 32 * SEGMENTS_MAX };
    static uint8_t weights[ROWS * COLS * 2];
    kern_acts acts = make_acts(1, COLS, 41);

    (void)state;
    tiny_fill(PD_Q8_0, 7, ROWS, COLS, weights);
    ref->quantize(&acts, 0, 0, COLS);
    for (uint32_t segments = 1; segments <= SEGMENTS_MAX; segments++) {
        kern_matrix matrix = {.dtype = PD_Q8_0,
                              .rows = ROWS,
                              .segments = segments,
                              .cols = 32 * segments,
                              .data = weights};
        float whole[ROWS], part[ROWS], waiting[KERN_LEAVES_MAX][ROWS], *place = whole;
        acts.cols = matrix.cols;
        ref->matmul(&matrix, 0, ROWS, &acts, 0, 1, &place, false);
        place = part;
        for (uint32_t ranks = 1; ranks <= segments; ranks++) {
            kern_node nodes[KERN_LEAVES_MAX];
            uint8_t adds[KERN_LEAVES_MAX];
            uint32_t count = 0, depth = 0;
            for (uint32_t rank = 0; rank < ranks; rank++) {
                kern_nodes own =
                    kern_nodes_of(segments, rank * segments / ranks, (rank + 1) * segments / ranks);
                memcpy(nodes + count, own.node, own.count * sizeof *nodes);
                count += own.count;
            }
            kern_nodes_adds(segments, nodes, count, adds);
            for (uint32_t k = 0; k < count; k++) {
                kern_matrix node = kern_matrix_node(&matrix, nodes[k].lo, nodes[k].count);
                ref->matmul(&node, 0, ROWS, &acts, 0, 1, &place, false);
                for (; adds[k] > 0; adds[k]--, depth--)
                    for (uint32_t r = 0; r < ROWS; r++)
                        part[r] = waiting[depth - 1][r] + part[r];
                memcpy(waiting[depth++], part, sizeof part);
            }
            assert_int_equal(depth, 1);
            assert_memory_equal(waiting[0], whole, sizeof whole);
        }
    }
    free_acts(&acts);
}

static void check_row_operations(const kern_ops *fast)
{
    static const uint32_t counts[] = {1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 100, 576};

    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        uint32_t count = counts[c];
        float *a = random_floats(count, c), *b = random_floats(count, c);
        float *x = random_floats(count, c + 100), *w = random_floats(count, c + 200);
        uint16_t half_a[600], half_b[600];
        ref->rms_norm(x, w, count, 1e-5f, a);
        fast->rms_norm(x, w, count, 1e-5f, b);
        assert_memory_equal(a, b, count * sizeof(float));
        ref->silu_mul(a, x, count);
        fast->silu_mul(b, x, count);
        assert_memory_equal(a, b, count * sizeof(float));
        ref->rope(a, w, count / 2);
        fast->rope(b, w, count / 2);
        assert_memory_equal(a, b, count * sizeof(float));
        x[0] = 1e7f;
        x[count / 2] = -65510;
        x[count - 1] = 1e-7f;
        ref->store_f16(x, count, half_a);
        fast->store_f16(x, count, half_b);
        assert_memory_equal(half_a, half_b, count * sizeof(uint16_t));
        free(a);
        free(b);
        free(x);
        free(w);
    }
}

static void row_operations_are_equal(void **state)
{
    (void)state;
    each_backend(check_row_operations);
}

typedef struct attention_case {
    uint32_t heads, head_dim, position, tokens, block_tokens;
} attention_case;

static const attention_case attention_cases[] = {
    {3, 64, 0, 1, 16},    {3, 64, 0, 16, 16},   {3, 64, 15, 1, 16},    {3, 64, 16, 2, 32},
    {1, 32, 250, 16, 16}, {4, 128, 255, 1, 16}, {3, 64, 256, 1, 32},   {3, 64, 500, 16, 16},
    {3, 64, 511, 13, 16}, {8, 96, 300, 5, 48},  {5, 16, 1023, 16, 16}, {9, 80, 700, 16, 16},
    {2, 64, 777, 1, 16},  {3, 64, 241, 16, 16}, {3, 64, 1023, 1, 16},  {8, 80, 640, 1, 16},
};

typedef struct attention_rig {
    pd_kv_layout layout;
    uint8_t *pool;
    pd_block blocks[128];
    float *query;
    kern_attention args;
} attention_rig;

/* K and V of the positions the last query sees; NaN everywhere else. */
static void attention_set_up(attention_rig *r, const attention_case *c)
{
    pd_model_shape shape = {.layers = 2, .kv_heads = 2, .head_dim = c->head_dim};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = c->block_tokens,
                                    .memory_bytes = 1 << 28,
                                    .blocks_max = 128};
    uint64_t seed = c->position + 1;
    size_t stride = (size_t)c->heads * c->head_dim;

    assert_int_equal(pd_kv_layout_make(&shape, &options, &r->layout), PD_OK);
    r->pool = malloc(r->layout.pool_bytes);
    memset(r->pool, 0xff, r->layout.pool_bytes);
    for (uint32_t i = 0; i < 128; i++)
        r->blocks[i] = i * 37 % 128;
    for (uint32_t p = 0; p < c->position + c->tokens; p++) {
        uint64_t at = pd_kv_layout_k_offset(&r->layout, 1, r->blocks[p / c->block_tokens], 1) +
                      p % c->block_tokens * r->layout.token_bytes;
        for (uint32_t d = 0; d < c->head_dim; d++) {
            uint16_t key = kern_f32_to_f16(tiny_random(&seed) * 0.3f);
            uint16_t value = kern_f32_to_f16(tiny_random(&seed));
            memcpy(r->pool + at + 2 * d, &key, 2);
            memcpy(r->pool + at + r->layout.half_bytes + 2 * d, &value, 2);
        }
    }
    r->query = random_floats(c->tokens * stride, 3);
    r->args = (kern_attention){.layout = &r->layout,
                               .pool = r->pool,
                               .blocks = r->blocks,
                               .layer = 1,
                               .kv_head = 1,
                               .heads = c->heads,
                               .tokens = c->tokens,
                               .position = c->position,
                               .scale = 1 / sqrtf((float)c->head_dim),
                               .query = r->query,
                               .query_stride = stride,
                               .out_stride = stride + 3};
}

static float *attend(attention_rig *r, const kern_ops *backend)
{
    size_t count = r->args.tokens * r->args.out_stride;
    size_t bytes = backend->attention_scratch_bytes(r->args.heads, r->layout.head_dim);

    r->args.out = calloc(count, sizeof(float));
    r->args.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(r->args.scratch, 0xff, bytes);
    backend->attention(&r->args);
    free(r->args.scratch);
    return r->args.out;
}

/* One token's attention by parts, made last to first, equals the whole. */
static void check_parts(const attention_rig *r, const kern_ops *backend, const float *whole)
{
    uint32_t splits = r->args.position / KERN_SPLIT_TOKENS + 1;
    size_t floats = kern_attention_part_floats(r->args.heads, r->layout.head_dim);
    size_t bytes = backend->attention_scratch_bytes(r->args.heads, r->layout.head_dim);
    float *parts = random_floats(splits * floats, 5);
    kern_attention args = r->args;

    args.out = calloc(args.out_stride, sizeof(float));
    args.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    for (uint32_t split = splits; split-- > 0;) {
        memset(args.scratch, 0xff, bytes);
        backend->attention_part(&args, split, parts + split * floats);
    }
    backend->attention_join(&args, splits, parts);
    assert_memory_equal(args.out, whole, args.out_stride * sizeof(float));
    free(args.out);
    free(args.scratch);
    free(parts);
}

/* Attention that begins with the parts of splits that every token sees whole equals the whole. */
static void check_goes_on_from_parts(const attention_rig *r, const kern_ops *backend,
                                     const float *whole)
{
    uint32_t most = (r->args.position + 1) / KERN_SPLIT_TOKENS;
    size_t rows_floats =
        kern_attention_part_floats(r->args.tokens * r->args.heads, r->layout.head_dim);
    size_t bytes = backend->attention_scratch_bytes(r->args.heads, r->layout.head_dim);
    float *parts = random_floats(most * rows_floats + 1, 5);
    kern_attention made = r->args, args = r->args;

    args.out = calloc(args.tokens * args.out_stride, sizeof(float));
    made.scratch = args.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    for (uint32_t splits = 1; splits <= most; splits++) {
        memset(args.scratch, 0xff, bytes);
        made.position = splits * KERN_SPLIT_TOKENS - 1; /* the last that is seen of it */
        backend->attention_part(&made, splits - 1, parts + (splits - 1) * rows_floats);
        args.parts = parts;
        args.parts_splits = splits;
        backend->attention(&args);
        assert_memory_equal(args.out, whole, args.tokens * args.out_stride * sizeof(float));
    }
    free(args.out);
    free(args.scratch);
    free(parts);
}

static void check_attention(const kern_ops *fast)
{
    for (size_t i = 0; i < sizeof attention_cases / sizeof *attention_cases; i++) {
        attention_rig r;
        attention_set_up(&r, &attention_cases[i]);
        float *a = attend(&r, ref), *b = attend(&r, fast);
        assert_memory_equal(a, b, r.args.tokens * r.args.out_stride * sizeof(float));
        check_goes_on_from_parts(&r, ref, a);
        check_goes_on_from_parts(&r, fast, a);
        if (r.args.tokens == 1) {
            check_parts(&r, ref, a);
            check_parts(&r, fast, a);
        }
        free(a);
        free(b);
        free(r.query);
        free(r.pool);
    }
}

static void attention_is_equal(void **state)
{
    (void)state;
    each_backend(check_attention);
}

static double half_at(const attention_rig *r, uint32_t position, uint32_t d, bool value)
{
    uint32_t block_tokens = r->layout.block_tokens;
    uint64_t at = pd_kv_layout_k_offset(&r->layout, 1, r->blocks[position / block_tokens], 1) +
                  position % block_tokens * r->layout.token_bytes +
                  (value ? r->layout.half_bytes : 0) + 2 * d;
    uint16_t half;

    memcpy(&half, r->pool + at, 2);
    return kern_f16_to_f32(half);
}

/* One head at one position, in double. */
static void attend_exactly(const attention_rig *r, const float *query, uint32_t position,
                           double *out)
{
    static double p[2048];
    double largest = -1e300, sum = 0;

    for (uint32_t j = 0; j <= position; j++) {
        p[j] = 0;
        for (uint32_t d = 0; d < r->layout.head_dim; d++)
            p[j] += (double)query[d] * half_at(r, j, d, false);
        p[j] *= r->args.scale;
        largest = p[j] > largest ? p[j] : largest;
    }
    for (uint32_t j = 0; j <= position; j++)
        sum += p[j] = exp(p[j] - largest);
    for (uint32_t d = 0; d < r->layout.head_dim; d++) {
        out[d] = 0;
        for (uint32_t j = 0; j <= position; j++)
            out[d] += p[j] / sum * half_at(r, j, d, true);
    }
}

static void attention_is_accurate(void **state)
{
    double exact[128];

    (void)state;
    for (size_t i = 0; i < sizeof attention_cases / sizeof *attention_cases; i++) {
        attention_rig r;
        attention_set_up(&r, &attention_cases[i]);
        float *out = attend(&r, ref);
        for (uint32_t row = 0; row < r.args.tokens * r.args.heads; row++) {
            uint32_t token = row / r.args.heads, head = row % r.args.heads;
            size_t in_row = (size_t)head * r.layout.head_dim;
            attend_exactly(&r, r.query + token * r.args.query_stride + in_row,
                           r.args.position + token, exact);
            for (uint32_t d = 0; d < r.layout.head_dim; d++)
                /* V is up to 40, and scores of a hundred are 1e-5 off */
                assert_true(fabs(out[token * r.args.out_stride + in_row + d] - exact[d]) < 5e-4);
        }
        free(out);
        free(r.query);
        free(r.pool);
    }
}

typedef struct team_count {
    kern_team *team;
    uint32_t rounds;
    uint32_t sums[8][16]; /* [thread]: what each took */
} team_count;

static void count_rounds(void *ctx, uint32_t thread)
{
    team_count *count = ctx;

    for (uint32_t round = 0; round < count->rounds; round++) {
        for (uint32_t taken; (taken = kern_team_take(count->team)) < 10;)
            count->sums[thread][0] += taken + 1;
        kern_team_barrier(count->team);
    }
}

static void a_team_does_each_item_once(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 8; threads++) {
        team_count count = {.rounds = 200};
        uint32_t total = 0;
        assert_int_equal(kern_team_create(threads, &count.team), PD_OK);
        for (int run = 0; run < 3; run++)
            kern_team_run(count.team, count_rounds, &count);
        for (uint32_t thread = 0; thread < 8; thread++)
            total += count.sums[thread][0];
        assert_int_equal(total, 3 * 200 * 55);
        kern_team_destroy(count.team);
    }
}

static int set_up(void **state)
{
    (void)state;
    ref = kern_ops_at(0);
    return 0;
}

typedef struct team_late {
    kern_team *team;
    atomic_uint helped;
    bool late;
} team_late;

static void be_late(void *ctx, uint32_t thread)
{
    team_late *late = ctx;

    if (thread == 0)
        return;
    atomic_fetch_add(&late->helped, 1);
    if (late->late)
        nanosleep(&(struct timespec){.tv_nsec = 6000000}, NULL);
}

/* A thread that others wait for, run after run, is left out; and tried again, now and then. */
static void a_team_goes_on_without_who_is_held_up(void **state)
{
    team_late late = {.late = true};

    (void)state;
    assert_int_equal(kern_team_create(2, &late.team), PD_OK);
    for (int i = 0; i < 6; i++)
        kern_team_run(late.team, be_late, &late);
    assert_int_equal(kern_team_active(late.team), 1);
    uint32_t helped = atomic_load(&late.helped);
    for (int i = 0; i < 14; i++)
        kern_team_run(late.team, be_late, &late);
    assert_true(atomic_load(&late.helped) <= helped + 2);
    late.late = false;
    for (int i = 0; i < 2048 && kern_team_active(late.team) == 1; i++)
        kern_team_run(late.team, be_late, &late);
    assert_int_equal(kern_team_active(late.team), 2);
    assert_int_equal(kern_team_threads(late.team), 2);
    kern_team_destroy(late.team);
}

typedef struct team_places {
    kern_team *team;
    cpu_set_t found[3]; /* [thread] */
} team_places;

static void look_where(void *ctx, uint32_t thread)
{
    team_places *places = ctx;

    assert_int_equal(sched_getaffinity(0, sizeof places->found[0], &places->found[thread]), 0);
}

static void *run_team(void *ctx)
{
    team_places *places = ctx;

    kern_team_run(places->team, look_where, places);
    return NULL;
}

static int nth_of(const cpu_set_t *cpus, int n)
{
    int cpu = 0;

    for (n %= CPU_COUNT(cpus); !CPU_ISSET(cpu, cpus) || n-- > 0;)
        cpu++;
    return cpu;
}

static void assert_each_on_its_own(const team_places *places, const cpu_set_t *cpus)
{
    for (int thread = 0; thread < 3; thread++) {
        assert_int_equal(CPU_COUNT(&places->found[thread]), 1);
        assert_true(CPU_ISSET(nth_of(cpus, thread), &places->found[thread]));
    }
}

/* Whoever runs it is its first thread, and stays where it is put; the others were there before. */
static void a_pinned_teams_threads_have_a_cpu_each(void **state)
{
    team_places places = {0};
    cpu_set_t before, none;
    pthread_t other;

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    assert_int_equal(kern_team_create(3, &places.team), PD_OK);
    CPU_ZERO(&none);
    kern_team_pin(places.team, &none);
    kern_team_run(places.team, look_where, &places);
    for (int thread = 0; thread < 3; thread++)
        assert_true(CPU_EQUAL(&places.found[thread], &before));
    kern_team_pin(places.team, &before);
    kern_team_run(places.team, look_where, &places);
    assert_each_on_its_own(&places, &before);
    places.found[0] = none;
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    assert_int_equal(pthread_create(&other, NULL, run_team, &places), 0);
    assert_int_equal(pthread_join(other, NULL), 0);
    assert_each_on_its_own(&places, &before);
    kern_team_destroy(places.team);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_floats_convert_exactly),
        cmocka_unit_test(exp_is_accurate),
        cmocka_unit_test(rope_table_is_accurate),
        cmocka_unit_test(quantize_is_equal),
        cmocka_unit_test(quantize_is_within_half_a_step),
        cmocka_unit_test(products_are_equal),
        cmocka_unit_test(products_are_accurate),
        cmocka_unit_test(a_split_product_is_the_whole_one),
        cmocka_unit_test(row_operations_are_equal),
        cmocka_unit_test(attention_is_equal),
        cmocka_unit_test(attention_is_accurate),
        cmocka_unit_test(a_team_does_each_item_once),
        cmocka_unit_test(a_team_goes_on_without_who_is_held_up),
        cmocka_unit_test(a_pinned_teams_threads_have_a_cpu_each),
    };
    choice_filter();
    return cmocka_run_group_tests(tests, set_up, NULL);
}
