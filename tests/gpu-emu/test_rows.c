/* Rows on the GPU are the reference's, bit for bit: sums of parts, RMSNorm, SwiGLU, the embedding,
 * and every form of activations. */
#include "common/base/hash.h"
#include "common/base/mem.h"
#include "kernels/cuda/launch.h"
#include "kernels/file_row.h"
#include "kernels/number.h"
#include "kernels/ref/ops.h"
#include "tests/gpu-emu/device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* --- numbers --- */

/* Equal bits; a NaN's payload is the machine's own business. */
static void check_floats(const float *got, const float *want, size_t count, const char *what)
{
    for (size_t i = 0; i < count; i++)
        if (kern_bits_of(got[i]) != kern_bits_of(want[i]) && !(isnan(got[i]) && isnan(want[i])))
            fail_msg("%s[%zu] is %a, not %a", what, i, (double)got[i], (double)want[i]);
}

static void check_ints(const int32_t *got, const int32_t *want, size_t count, const char *what)
{
    for (size_t i = 0; i < count; i++)
        if (got[i] != want[i])
            fail_msg("%s[%zu] is %d, not %d", what, i, got[i], want[i]);
}

static float *random_floats(size_t count, uint64_t *random)
{
    float *values = test_malloc(count * sizeof *values);

    for (size_t i = 0; i < count; i++)
        values[i] = device_float(random);
    return values;
}

/* Blocks of 32 that quantisation treats each in its way. */
static void make_hard(float *row, uint32_t cols)
{
    static const float hard[] = {0, -0.0f, 1e-36f, 1e-30f, 3.2e38f, INFINITY, -INFINITY, NAN};

    for (uint32_t block = 0; block + 1 < cols / KERN_BLOCK; block++) {
        float value = hard[block % 8];
        for (uint32_t i = 0; i < KERN_BLOCK; i++)
            if (block % 8 < 4 || i == block % KERN_BLOCK)
                row[block * KERN_BLOCK + i] = value;
    }
}

/* --- activations in every form --- */

typedef struct forms {
    uint32_t rows, cols;
    bool bf16;
    cu_acts acts; /* device */
} forms;

enum { VALUES = 1, QUANTS = 2, SCALES = 4, SUMS = 8, QUANT_SUMS = 16, HALVES = 32, ALL = 63 };

static forms make_forms(device *d, uint32_t rows, uint32_t cols, unsigned which, bool bf16)
{
    forms f = {rows, cols, bf16, {.cols = cols, .halves_are_bf16 = bf16}};
    size_t count = (size_t)rows * cols, blocks = count / KERN_BLOCK;

    if (which & VALUES)
        f.acts.values = device_space(d, count * sizeof(float));
    if (which & QUANTS)
        f.acts.quants = device_space(d, count);
    if (which & SCALES)
        f.acts.scales = device_space(d, blocks * sizeof(float));
    if (which & SUMS)
        f.acts.sums = device_space(d, blocks * sizeof(float));
    if (which & QUANT_SUMS)
        f.acts.quant_sums = device_space(d, blocks * sizeof(int32_t));
    if (which & HALVES)
        f.acts.halves = device_space(d, count * sizeof(uint16_t));
    return f;
}

static kern_acts host_acts(uint32_t rows, uint32_t cols, const float *values)
{
    size_t count = (size_t)rows * cols, blocks = count / KERN_BLOCK;
    kern_acts acts = {.cols = cols};

    acts.values = test_malloc(count * sizeof(float));
    acts.quants = test_malloc(count);
    acts.scales = test_malloc(blocks * sizeof(float));
    acts.sums = test_malloc(blocks * sizeof(float));
    acts.quant_sums = test_malloc(blocks * sizeof(int32_t));
    memcpy(acts.values, values, count * sizeof(float));
    return acts;
}

static void free_acts(kern_acts *acts)
{
    test_free(acts->values);
    test_free(acts->quants);
    test_free(acts->scales);
    test_free(acts->sums);
    test_free(acts->quant_sums);
}

static void check_halves(device *d, const forms *f, uint32_t row, const float *want)
{
    uint16_t *halves = test_malloc(f->cols * sizeof *halves);

    device_download(d, halves, f->acts.halves + (size_t)row * f->cols, f->cols * sizeof *halves);
    for (uint32_t i = 0; i < f->cols; i++) {
        uint32_t bits = kern_bits_of(want[i]);
        uint16_t expected = kern_f32_to_f16(want[i]);
        if (f->bf16) /* nearest even */
            expected = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        if (halves[i] != expected && !isnan(want[i]))
            fail_msg("half %u of row %u is %04x, not %04x (%a)", i, row, halves[i], expected,
                     (double)want[i]);
        if (isnan(want[i]))
            assert_true(isnan(f->bf16 ? kern_bf16_to_f32(halves[i]) : kern_f16_to_f32(halves[i])));
    }
    test_free(halves);
}

static void *download(device *d, const void *memory, size_t bytes)
{
    void *host = test_malloc(bytes);

    device_download(d, host, memory, bytes);
    return host;
}

/* Row `row` of f has every form of want[cols]. */
static void check_row(device *d, const forms *f, uint32_t row, const float *want)
{
    kern_acts acts = host_acts(1, f->cols, want);
    size_t at = (size_t)row * f->cols, blocks = f->cols / KERN_BLOCK;
    void *got;

    kern_ops_ref.quantize(&acts, 0, 0, f->cols);
    if (f->acts.values != NULL) {
        got = download(d, f->acts.values + at, f->cols * sizeof(float));
        check_floats(got, want, f->cols, "values");
        test_free(got);
    }
    if (f->acts.quants != NULL) {
        got = download(d, f->acts.quants + at, f->cols);
        assert_memory_equal(got, acts.quants, f->cols);
        test_free(got);
    }
    if (f->acts.scales != NULL) {
        got = download(d, f->acts.scales + at / KERN_BLOCK, blocks * sizeof(float));
        check_floats(got, acts.scales, blocks, "scales");
        test_free(got);
    }
    if (f->acts.sums != NULL) {
        got = download(d, f->acts.sums + at / KERN_BLOCK, blocks * sizeof(float));
        check_floats(got, acts.sums, blocks, "sums");
        test_free(got);
    }
    if (f->acts.quant_sums != NULL) {
        got = download(d, f->acts.quant_sums + at / KERN_BLOCK, blocks * sizeof(int32_t));
        check_ints(got, acts.quant_sums, blocks, "quant_sums");
        test_free(got);
    }
    if (f->acts.halves != NULL)
        check_halves(d, f, row, want);
    free_acts(&acts);
}

/* --- quantisation --- */

typedef struct shape {
    uint32_t rows, cols;
} shape;

static void quantize_once(device *d, void *ctx)
{
    const shape *s = ctx;
    uint64_t random = s->cols;
    float *values = random_floats((size_t)s->rows * s->cols, &random);
    size_t bytes = (size_t)s->rows * s->cols * sizeof(float);

    make_hard(values + (size_t)(s->rows - 1) * s->cols, s->cols);
    forms out = make_forms(d, s->rows, s->cols, ALL & ~VALUES, true);
    forms rest = make_forms(d, s->rows, s->cols, ALL, false);
    out.acts.values = device_upload(d, values, bytes);
    assert_int_equal(cu_quantize(d->stream, s->rows, &out.acts, &rest.acts), PD_OK);
    kern_acts acts = host_acts(2, s->cols, values), *two = &acts;
    for (uint32_t row = 0; row < s->rows; row++) {
        const float *x = values + (size_t)row * s->cols;
        check_row(d, &out, row, x);
        memcpy(two->values, x, s->cols * sizeof *x);
        kern_ops_ref.quantize(two, 0, 0, s->cols);
        kern_ops_ref.residual(two, 0, 0, s->cols, 1);
        check_row(d, &rest, row, two->values + s->cols);
    }
    free_acts(&acts);
    test_free(values);
}

static void quantised_rows_and_what_rounding_left(void **state)
{
    static shape shapes[] = {{2, 32}, {2, 320}, {3, 1024}, {2, 1056}};

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        device_each(*state, 1, quantize_once, &shapes[i]);
}

/* --- SwiGLU --- */

static void silu_once(device *d, void *ctx)
{
    const shape *s = ctx;
    uint64_t random = 3 + s->cols;
    float *gate_up = random_floats(2 * (size_t)s->rows * s->cols, &random);
    size_t bytes = 2 * (size_t)s->rows * s->cols * sizeof(float);

    gate_up[0] = NAN;
    gate_up[s->cols] = INFINITY;
    gate_up[1] = -INFINITY;
    forms out = make_forms(d, s->rows, s->cols, ALL, true);
    const float *in = device_upload(d, gate_up, bytes);
    assert_int_equal(cu_silu_mul(d->stream, s->rows, s->cols, in, &out.acts), PD_OK);
    for (uint32_t row = 0; row < s->rows; row++) {
        float *gate = gate_up + 2 * (size_t)row * s->cols;
        kern_ops_ref.silu_mul(gate, gate + s->cols, s->cols);
        check_row(d, &out, row, gate);
    }
    test_free(gate_up);
}

static void gates_times_up(void **state)
{
    static shape shapes[] = {{1, 32}, {3, 192}, {2, 1056}};

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        device_each(*state, 1, silu_once, &shapes[i]);
}

/* Nobody asks for quants: no lane waits for another, and nothing but the halves is written. */
static void halves_alone(device *d, void *ctx)
{
    uint64_t random = 8;
    float *gate_up = random_floats((size_t)2 * 2 * 96, &random);
    forms out = make_forms(d, 2, 96, HALVES, ctx != NULL);
    const float *in = device_upload(d, gate_up, (size_t)2 * 2 * 96 * sizeof(float));

    assert_int_equal(cu_silu_mul(d->stream, 2, 96, in, &out.acts), PD_OK);
    for (uint32_t row = 0; row < 2; row++) {
        float *gate = gate_up + 2 * row * 96;
        kern_ops_ref.silu_mul(gate, gate + 96, 96);
        check_row(d, &out, row, gate);
    }
    test_free(gate_up);
}

static void forms_that_nobody_asks_for_are_not_made(void **state)
{
    device_each(*state, 1, halves_alone, NULL);
    device_each(*state, 1, halves_alone, "bf16");
}

/* --- the embedding --- */

typedef struct embed_case {
    pd_dtype dtype;
    uint32_t hidden;
} embed_case;

static void make_table(pd_dtype dtype, uint8_t *bytes, size_t count, uint64_t *random)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);

    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)device_random(random);
    for (size_t at = 0; at + info->block_bytes <= count; at += info->block_bytes) {
        float value = device_float(random);
        uint16_t half = kern_f32_to_f16(value);
        if (dtype == PD_F32)
            memcpy(bytes + at, &value, sizeof value);
        else if (dtype != PD_BF16)
            memcpy(bytes + at, &half, sizeof half);
        if (dtype == PD_Q4_1)
            memcpy(bytes + at + 2, &half, sizeof half);
    }
}

static void embed_once(device *d, void *ctx)
{
    enum { VOCAB = 7, ROWS = 5 };
    static const uint32_t tokens[ROWS] = {6, 0, 3, 3, 5};
    static const uint32_t positions[ROWS] = {0, 100, CU_ROW_NONE, 7, 1};
    const embed_case *c = ctx;
    const pd_dtype_info *info = pd_dtype_info_of(c->dtype);
    size_t row_bytes = (size_t)(c->hidden / info->block_weights) * info->block_bytes;
    uint64_t random = 17;
    uint8_t *table = test_malloc(VOCAB * row_bytes);
    float *want = test_malloc(c->hidden * sizeof *want);

    make_table(c->dtype, table, VOCAB * row_bytes, &random);
    cu_step step = {.rows = ROWS};
    step.token = device_upload(d, tokens, sizeof tokens);
    step.position = device_upload(d, positions, sizeof positions);
    const void *on_device = device_upload(d, table, VOCAB * row_bytes);
    float *x = device_space(d, (size_t)ROWS * c->hidden * sizeof *x);
    assert_int_equal(cu_embed(d->stream, &step, c->dtype, on_device, c->hidden, row_bytes, x),
                     PD_OK);
    for (uint32_t row = 0; row < ROWS; row++) {
        float *got = download(d, x + (size_t)row * c->hidden, c->hidden * sizeof *got);
        kern_row_to_f32(c->dtype, table + tokens[row] * row_bytes, c->hidden, want);
        if (positions[row] == CU_ROW_NONE)
            memset(want, 0, c->hidden * sizeof *want);
        check_floats(got, want, c->hidden, "x");
        test_free(got);
    }
    test_free(want);
    test_free(table);
}

static void embeddings_of_every_format(void **state)
{
    for (pd_dtype dtype = 0; dtype <= PD_Q8_0; dtype++) {
        embed_case small = {dtype, 96}, large = {dtype, 1056};
        device_each(*state, 1, embed_once, &small);
        device_each(*state, 1, embed_once, &large);
    }
}

/* --- residual and norm --- */

typedef struct norm_case {
    uint32_t rows, hidden, ranks, terms, leaves;
    bool normalise, hard;
} norm_case;

/* The sum of leaves [lo, lo + n) at one element; leaf i's value at leaf[i * stride]. */
static float tree(const float *leaf, size_t stride, uint32_t lo, uint32_t n)
{
    uint32_t left = 1;

    if (n == 1)
        return leaf[lo * stride];
    while (2 * left < n)
        left *= 2;
    return tree(leaf, stride, lo, left) + tree(leaf, stride, lo + left, n - left);
}

/* parts[rank][term][node][row][hidden] of leaves[term][leaf][row][hidden], as ranks gather them;
 * what a rank does not fill is NaN. */
static float *make_parts(const norm_case *c, const float *leaves, size_t *bytes_out)
{
    size_t slab = (size_t)c->rows * c->hidden, most = kern_nodes_most(c->leaves, c->ranks);
    size_t count = c->ranks * c->terms * most * slab;
    float *parts = test_malloc(count * sizeof *parts);

    memset(parts, 0xff, count * sizeof *parts);
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        kern_nodes nodes = kern_nodes_of(c->leaves, rank * c->leaves / c->ranks,
                                         (rank + 1) * c->leaves / c->ranks);
        for (uint32_t term = 0; term < c->terms; term++)
            for (uint32_t i = 0; i < nodes.count; i++)
                for (size_t e = 0; e < slab; e++)
                    parts[((rank * c->terms + term) * most + i) * slab + e] =
                        tree(leaves + term * c->leaves * slab + e, slab, nodes.node[i].lo,
                             nodes.node[i].count);
    }
    *bytes_out = count * sizeof *parts;
    return parts;
}

static void residual_once(device *d, void *ctx)
{
    const norm_case *c = ctx;
    size_t slab = (size_t)c->rows * c->hidden, leaves_bytes;
    uint64_t random = 5; /* the same leaves for every number of ranks */
    float *x = random_floats(slab, &random), *weight = random_floats(c->hidden, &random);
    float *leaves = random_floats(slab * c->terms * c->leaves + 1, &random);
    float *normed = test_malloc(c->hidden * sizeof *normed);
    cu_residual add = {NULL, c->ranks, c->terms, c->leaves};

    if (c->hard)
        make_hard(x, c->hidden);
    float *device_x = device_upload(d, x, slab * sizeof *x);
    const float *device_weight = device_upload(d, weight, c->hidden * sizeof *weight);
    forms out = make_forms(d, c->rows, c->hidden, ALL, false);
    if (c->ranks > 0) {
        float *parts = make_parts(c, leaves, &leaves_bytes);
        add.parts = device_upload(d, parts, leaves_bytes);
        test_free(parts);
    }
    assert_int_equal(cu_residual_norm(d->stream, c->rows, c->hidden, device_x, &add,
                                      c->normalise ? device_weight : NULL, 1e-5f, &out.acts),
                     PD_OK);
    for (size_t e = 0; e < slab && c->ranks > 0; e++)
        for (uint32_t term = 0; term < c->terms; term++)
            x[e] += tree(leaves + term * c->leaves * slab + e, slab, 0, c->leaves);
    float *got = download(d, device_x, slab * sizeof *x);
    check_floats(got, x, slab, "x");
    for (uint32_t row = 0; row < c->rows && c->normalise; row++) {
        kern_ops_ref.rms_norm(x + (size_t)row * c->hidden, weight, c->hidden, 1e-5f, normed);
        check_row(d, &out, row, normed);
    }
    test_free(got);
    test_free(normed);
    test_free(leaves);
    test_free(weight);
    test_free(x);
}

static void norms_of_all_sizes(void **state)
{
    static const uint32_t sizes[] = {32, 64, 96, 128, 160, 576, 1056, 4128};

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        norm_case c = {.rows = 2, .hidden = sizes[i], .normalise = true, .terms = 1, .leaves = 1};
        device_each(*state, 1, residual_once, &c);
        c.hard = true;
        device_each(*state, 1, residual_once, &c);
    }
}

static void the_largest_row(void **state)
{
    norm_case c = {1, CU_HIDDEN_MAX, 1, 2, 2, true, false};

    device_each(*state, 1, residual_once, &c);
}

/* More rows than the device has processors: fewer threads a row. */
static void many_rows_are_the_same_rows(void **state)
{
    uint32_t rows = gpu_info_of(((device *)*state)->gpu)->processors + 1;
    norm_case c = {rows, 96, 1, 1, 1, true, false};

    device_each(*state, 1, residual_once, &c);
    c.hidden = 2080;
    c.ranks = c.leaves = 2;
    residual_once(*state, &c);
    device_clear(*state);
}

static void sums_are_equal_at_every_number_of_ranks(void **state)
{
    static const uint32_t splits[][2] = {/* ranks, leaves */
                                         {1, 1},  {1, 3},  {3, 3}, {1, 8},  {2, 8},
                                         {4, 8},  {8, 8},  {2, 6}, {1, 20}, {4, 20},
                                         {2, 24}, {4, 24}, {4, 5}, {7, 64}, {32, 64}};

    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        for (uint32_t terms = 1; terms <= 2; terms++) {
            norm_case c = {2, 96, splits[i][0], terms, splits[i][1], true, false};
            device_each(*state, 1, residual_once, &c);
        }
    }
}

static void a_sum_without_a_norm(void **state)
{
    norm_case c = {3, 160, 2, 2, 4, false, false};

    device_each(*state, 1, residual_once, &c);
}

static void chosen_rows_once(device *d, void *ctx)
{
    enum { ROWS = 6, COUNT = 4, HIDDEN = 576 };
    static const uint32_t chosen[COUNT] = {5, 0, CU_ROW_NONE, 5};
    static const unsigned char untouched[HIDDEN * sizeof(float)] = {0};
    uint64_t random = 23;
    float *x = random_floats((size_t)ROWS * HIDDEN, &random);
    float *weight = random_floats(HIDDEN, &random), normed[HIDDEN];

    (void)ctx;
    forms out = make_forms(d, COUNT, HIDDEN, ALL, true);
    assert_int_equal(gpu_fill(d->stream, out.acts.values, 0, sizeof untouched * COUNT), PD_OK);
    const float *device_x = device_upload(d, x, (size_t)ROWS * HIDDEN * sizeof *x);
    const float *device_weight = device_upload(d, weight, HIDDEN * sizeof *weight);
    const uint32_t *rows = device_upload(d, chosen, sizeof chosen);
    assert_int_equal(
        cu_norm_rows(d->stream, rows, COUNT, HIDDEN, device_x, device_weight, 1e-6f, &out.acts),
        PD_OK);
    for (uint32_t i = 0; i < COUNT; i++) {
        if (chosen[i] == CU_ROW_NONE) {
            float *got = download(d, out.acts.values + i * HIDDEN, sizeof untouched);
            assert_memory_equal(got, untouched, sizeof untouched);
            test_free(got);
            continue;
        }
        kern_ops_ref.rms_norm(x + (size_t)chosen[i] * HIDDEN, weight, HIDDEN, 1e-6f, normed);
        check_row(d, &out, i, normed);
    }
    test_free(weight);
    test_free(x);
}

static void norms_of_chosen_rows(void **state)
{
    device_each(*state, 2, chosen_rows_once, NULL);
}

/* Every access in as few sectors as hold its bytes, no bank asked twice. (The three numbers of a
 * block of 32 are 16 bytes a warp, half a sector each: 3 of 13 sectors at the worst, where quants
 * are all that is wanted, and the next warp's half finds the sector in L2.) */
static void accesses_fall_together(void **state)
{
    device *d = *state;
    norm_case c = {2, 1024, 2, 2, 2, true, false};
    shape s = {2, 1024};

    device_traffic_clear(d);
    residual_once(d, &c);
    quantize_once(d, &s);
    silu_once(d, &s);
    chosen_rows_once(d, NULL);
    static const char *const kernels[] = {"residual_norm<0>", "residual_norm<2>", "quantize_rows",
                                          "silu_mul"};
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        device_traffic t = device_traffic_of(d, kernels[i]);
        assert_true(t.sectors <= t.sectors_ideal);
        assert_true(t.wavefronts <= t.wavefronts_ideal);
    }
    device_clear(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantised_rows_and_what_rounding_left),
        cmocka_unit_test(gates_times_up),
        cmocka_unit_test(forms_that_nobody_asks_for_are_not_made),
        cmocka_unit_test(embeddings_of_every_format),
        cmocka_unit_test(norms_of_all_sizes),
        cmocka_unit_test(the_largest_row),
        cmocka_unit_test(many_rows_are_the_same_rows),
        cmocka_unit_test(sums_are_equal_at_every_number_of_ranks),
        cmocka_unit_test(a_sum_without_a_norm),
        cmocka_unit_test(norms_of_chosen_rows),
        cmocka_unit_test(accesses_fall_together),
    };
    return cmocka_run_group_tests_name("gpu-emu-rows", tests, device_setup, device_teardown);
}
