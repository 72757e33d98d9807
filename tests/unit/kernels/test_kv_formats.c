/* K and V of one byte a value: what is written is what kernels/kv_row.h says, whichever backend
 * writes it, within half a step of what it stands for; and attention over it equals the reference
 * bit for bit, as the reference equals double precision over the numbers that the pool holds. */

#include "kernels/kv_row.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/choice.h"
#include "tests/unit/kernels/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define BLOCKS 128
#define HEAD   1 /* of two */
#define LAYER  1 /* of two */

static const pd_dtype formats[] = {PD_F16, PD_INT8, PD_FP8_E4M3};
#define FORMATS (sizeof formats / sizeof *formats)

/* Calls test for every backend that runs here, the reference first. */
static void each_backend(void (*test)(const kern_ops *ops, pd_dtype dtype))
{
    char reason[128];

    for (uint32_t i = 0; kern_ops_at(i) != NULL; i++)
        for (size_t f = 0; f < FORMATS; f++)
            if (kern_ops_at(i)->probe(reason, sizeof reason) > 0)
                test(kern_ops_at(i), formats[f]);
}

static pd_kv_layout layout_of(pd_dtype dtype, uint32_t head_dim, uint32_t block_tokens)
{
    pd_model_shape shape = {.layers = 2, .kv_heads = 2, .head_dim = head_dim};
    pd_kv_layout_options options = {.dtype = dtype,
                                    .block_tokens = block_tokens,
                                    .memory_bytes = 1 << 28,
                                    .blocks_max = BLOCKS};
    pd_kv_layout layout;

    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    return layout;
}

static void e4m3_codes_are_the_nearest(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 256; code++) {
        float value = kern_e4m3_to_f32((uint8_t)code);
        if ((code & 0x7f) == 0x7f)
            continue;
        assert_int_equal(kern_f32_to_e4m3(value), code);
        if ((code & 0x7f) == 0x7e) {
            assert_int_equal(kern_f32_to_e4m3(value * 1.01f), code);
            assert_true(fabsf(value) == KERN_E4M3_LARGEST);
            continue;
        }
        /* half way to the next goes to the even one, a bit more goes up */
        float next = kern_e4m3_to_f32((uint8_t)(code + 1)), middle = value + (next - value) / 2;
        assert_true(fabsf(next) > fabsf(value));
        assert_int_equal(kern_f32_to_e4m3(middle), code + (code & 1));
        assert_int_equal(kern_f32_to_e4m3(nextafterf(middle, next)), code + 1);
        assert_int_equal(kern_f32_to_e4m3(nextafterf(middle, value)), code);
    }
}

/* Rows as they come, with outliers, tiny, huge, and none. */
static void make_row(uint32_t kind, uint32_t count, float *x)
{
    static const float scales[] = {1, 1e-20f, 1e-33f, 3e3f, 1e30f};
    uint64_t seed = kind + 77;

    for (uint32_t d = 0; d < count; d++)
        x[d] = tiny_random(&seed) * scales[kind % 5];
    if (kind == 5)
        x[count / 2] = 1e9f;
    if (kind == 6)
        x[count - 1] = -INFINITY;
    if (kind == 7)
        memset(x, 0, count * sizeof *x);
    if (kind == 8)
        for (uint32_t d = 0; d < count; d++)
            x[d] = d % 2 == 0 ? -1e-36f : 1e-40f;
    if (kind == 9)
        x[0] = NAN;
}
#define KINDS 10

static double clamped(float x)
{
    return x > 65504 ? 65504 : x < -65504 ? -65504 : (double)x;
}

/* Half a step of what x became, at most. */
static double step_of(pd_dtype dtype, double x, double largest)
{
    if (dtype == PD_INT8)
        return largest / 254;
    if (dtype == PD_FP8_E4M3)
        return fmax(fabs(x) / 16, largest / 448 / 1024); /* smallest step: 2^-9 */
    return fmax(fabs(x) / 2048, 0x1p-25);
}

static void check_row(const pd_kv_layout *layout, const uint8_t *half, uint32_t token,
                      const float *x, uint32_t kind)
{
    double largest = 0;

    for (uint32_t d = 0; d < layout->head_dim; d++)
        largest = fmax(largest, fabs(clamped(x[d])));
    for (uint32_t d = 0; d < layout->head_dim; d++) {
        double value = tiny_kv_value(layout, half, token, d);
        if (kind == 9 && (layout->dtype != PD_F16 || isnan(x[d])))
            assert_true(isnan(value));
        else if (kind == 7 || (kind == 8 && layout->dtype != PD_F16))
            assert_true(value == 0);
        else
            assert_true(fabs(value - clamped(x[d])) <=
                        step_of(layout->dtype, clamped(x[d]), largest) * (1 + 1e-5));
    }
}

static void check_store(const kern_ops *ops, pd_dtype dtype)
{
    static const uint32_t dims[] = {16, 48, 64, 80, 128};
    float x[128];

    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        pd_kv_layout layout = layout_of(dtype, dims[i], 32);
        uint8_t *half = aligned_alloc(64, layout.half_bytes), *want = malloc(layout.half_bytes);
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            uint32_t token = kind == 0 ? 31 : kind;
            memset(half, 0x55, layout.half_bytes);
            memset(want, 0x55, layout.half_bytes);
            make_row(kind, dims[i], x);
            ops->store_kv(&layout, x, token, half);
            check_row(&layout, half, token, x, kind);
            /* the reference's bytes, and no other */
            kern_ops_at(0)->store_kv(&layout, x, token, want);
            assert_memory_equal(half, want, layout.half_bytes);
            memset(want + token * layout.token_bytes, 0x55, layout.token_bytes);
            memset(want + layout.scales_at + token * (size_t)layout.scale_bytes, 0x55,
                   layout.scale_bytes);
            for (uint64_t byte = 0; byte < layout.half_bytes; byte++)
                assert_int_equal(want[byte], 0x55);
        }
        free(half);
        free(want);
    }
}

static void rows_are_stored_within_half_a_step(void **state)
{
    (void)state;
    each_backend(check_store);
}

typedef struct attention_case {
    uint32_t heads, head_dim, position, tokens, block_tokens;
} attention_case;

static const attention_case attention_cases[] = {
    {3, 64, 0, 1, 16},     {3, 64, 0, 16, 16},   {3, 64, 15, 1, 16},  {3, 64, 16, 2, 32},
    {1, 32, 250, 16, 16},  {4, 128, 255, 1, 16}, {3, 64, 256, 1, 32}, {8, 96, 300, 5, 48},
    {5, 16, 1023, 16, 16}, {9, 80, 700, 16, 16}, {2, 48, 777, 1, 16}, {3, 64, 1023, 1, 16},
    {8, 80, 640, 1, 16},   {1, 16, 31, 1, 16},
};

typedef struct attention_rig {
    pd_kv_layout layout;
    uint8_t *pool;
    pd_block blocks[BLOCKS];
    float *query;
    kern_attention args;
} attention_rig;

static uint8_t *half_of(const attention_rig *r, uint32_t position, uint32_t half)
{
    return r->pool + half * r->layout.half_bytes +
           pd_kv_layout_k_offset(&r->layout, LAYER, r->blocks[position / r->layout.block_tokens],
                                 HEAD);
}

/* K and V of the positions that the last query sees, one in ten of them zeros; NaN (codes, scales,
 * f16) everywhere else. */
static void attention_set_up(attention_rig *r, const attention_case *c, pd_dtype dtype)
{
    size_t stride = (size_t)c->heads * c->head_dim;
    uint64_t seed = c->position + 1;
    float row[128];

    r->layout = layout_of(dtype, c->head_dim, c->block_tokens);
    r->pool = aligned_alloc(64, r->layout.pool_bytes);
    memset(r->pool, 0xff, r->layout.pool_bytes);
    for (uint32_t i = 0; i < BLOCKS; i++)
        r->blocks[i] = i * 37 % BLOCKS;
    for (uint32_t p = 0; p < c->position + c->tokens; p++)
        for (uint32_t half = 0; half < 2; half++) {
            for (uint32_t d = 0; d < c->head_dim; d++)
                row[d] = p % 10 == 7 ? 0 : tiny_random(&seed) * (half == 0 ? 0.3f : 1);
            kern_ops_at(0)->store_kv(&r->layout, row, p % c->block_tokens, half_of(r, p, half));
        }
    r->query = malloc(c->tokens * stride * sizeof(float));
    for (size_t i = 0; i < c->tokens * stride; i++)
        r->query[i] = tiny_random(&seed);
    r->args = (kern_attention){.layout = &r->layout,
                               .pool = r->pool,
                               .blocks = r->blocks,
                               .layer = LAYER,
                               .kv_head = HEAD,
                               .heads = c->heads,
                               .tokens = c->tokens,
                               .position = c->position,
                               .scale = 1 / sqrtf((float)c->head_dim),
                               .query = r->query,
                               .query_stride = stride,
                               .out_stride = stride + 3};
}

static float *attend(const attention_rig *r, const kern_ops *ops, bool in_parts)
{
    size_t bytes = ops->attention_scratch_bytes(r->args.heads, r->layout.head_dim);
    uint32_t splits = r->args.position / KERN_SPLIT_TOKENS + 1;
    size_t floats = kern_attention_part_floats(r->args.heads, r->layout.head_dim);
    float *parts = malloc(splits * floats * sizeof *parts);
    kern_attention args = r->args;

    args.out = calloc(args.tokens * args.out_stride, sizeof(float));
    args.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(args.scratch, 0xff, bytes);
    if (!in_parts)
        ops->attention(&args);
    for (uint32_t split = splits; in_parts && split-- > 0;)
        ops->attention_part(&args, split, parts + split * floats);
    if (in_parts)
        ops->attention_join(&args, splits, parts);
    free(args.scratch);
    free(parts);
    return args.out;
}

/* One head at one position, in double. */
static void attend_exactly(const attention_rig *r, const float *query, uint32_t position,
                           double *out)
{
    static double p[2048];
    uint32_t dim = r->layout.head_dim, block_tokens = r->layout.block_tokens;
    double largest = -1e300, sum = 0;

    for (uint32_t j = 0; j <= position; j++) {
        p[j] = 0;
        for (uint32_t d = 0; d < dim; d++)
            p[j] += (double)query[d] *
                    tiny_kv_value(&r->layout, half_of(r, j, 0), j % block_tokens, d) *
                    (double)r->args.scale;
        largest = fmax(largest, p[j]);
    }
    memset(out, 0, dim * sizeof *out);
    for (uint32_t j = 0; j <= position; j++)
        sum += p[j] = exp(p[j] - largest);
    for (uint32_t j = 0; j <= position; j++)
        for (uint32_t d = 0; d < dim; d++)
            out[d] += p[j] / sum * tiny_kv_value(&r->layout, half_of(r, j, 1), j % block_tokens, d);
}

static void check_against_double(const attention_rig *r, const float *out)
{
    double exact[128];

    for (uint32_t row = 0; row < r->args.tokens * r->args.heads; row++) {
        uint32_t token = row / r->args.heads;
        size_t in_row = (size_t)(row % r->args.heads) * r->layout.head_dim;
        attend_exactly(r, r->query + token * r->args.query_stride + in_row,
                       r->args.position + token, exact);
        for (uint32_t d = 0; d < r->layout.head_dim; d++)
            /* V is up to 40, and scores of a hundred are 1e-5 off */
            assert_true(fabs((double)out[token * r->args.out_stride + in_row + d] - exact[d]) <
                        5e-4);
    }
}

static void check_attention(const kern_ops *ops, pd_dtype dtype)
{
    for (size_t i = 0; i < sizeof attention_cases / sizeof *attention_cases; i++) {
        attention_rig r;
        attention_set_up(&r, &attention_cases[i], dtype);
        size_t bytes = r.args.tokens * r.args.out_stride * sizeof(float);
        float *want = attend(&r, kern_ops_at(0), false), *got = attend(&r, ops, false);
        if (ops == kern_ops_at(0))
            check_against_double(&r, got);
        assert_memory_equal(got, want, bytes);
        free(got);
        if (r.args.tokens == 1) {
            got = attend(&r, ops, true);
            assert_memory_equal(got, want, bytes);
            free(got);
        }
        free(want);
        free(r.query);
        free(r.pool);
    }
}

static void attention_is_the_references(void **state)
{
    (void)state;
    each_backend(check_attention);
}

/* A token whose V is no number is seen by those who see the token, and by nobody before it. */
static void check_nan(const kern_ops *ops, pd_dtype dtype)
{
    attention_case c = {3, 64, 30, 3, 16};
    float row[64] = {[5] = NAN};
    attention_rig r;

    attention_set_up(&r, &c, dtype);
    ops->store_kv(&r.layout, row, 31 % 16, half_of(&r, 31, 1));
    float *out = attend(&r, ops, false);
    for (uint32_t token = 0; token < 3; token++)
        assert_true(isnan(out[token * r.args.out_stride + 5]) == (token >= 1));
    free(out);
    free(r.query);
    free(r.pool);
}

static void a_nan_is_seen_from_its_token_on(void **state)
{
    (void)state;
    each_backend(check_nan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_codes_are_the_nearest),
        cmocka_unit_test(rows_are_stored_within_half_a_step),
        cmocka_unit_test(attention_is_the_references),
        cmocka_unit_test(a_nan_is_seen_from_its_token_on),
    };
    choice_filter();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
