/* Products on the GPU: with quantised and f32 weights the reference's bits, with 16-bit weights
 * double precision's sum within f32's rounding; and the same bits at every number of rows and every
 * split of the leaves over ranks. */
#include "common/base/mem.h"
#include "kernels/cuda/launch.h"
#include "kernels/number.h"
#include "kernels/ref/ops.h"
#include "tests/gpu-emu/device.h"
#include "tests/unit/kernels/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define REF kern_ops_ref

/* --- a product to be computed --- */

typedef struct product {
    pd_dtype dtype;
    uint32_t weight_rows, cols, rows, leaves;
    uint64_t row_bytes;
    unsigned char *weights; /* as in a file */
    kern_acts acts;         /* [rows] */
    uint16_t *halves;       /* [rows][cols] */
} product;

static bool is_half(pd_dtype dtype)
{
    return dtype == PD_F16 || dtype == PD_BF16;
}

static uint16_t to_half(pd_dtype dtype, float value)
{
    if (dtype == PD_F16)
        return kern_f32_to_f16(value);
    uint32_t bits = kern_bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float of_half(pd_dtype dtype, uint16_t half)
{
    return dtype == PD_F16 ? kern_f16_to_f32(half) : kern_bf16_to_f32(half);
}

static product make(pd_dtype dtype, uint32_t weight_rows, uint32_t cols, uint32_t rows,
                    uint32_t leaves)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    product p = {dtype, weight_rows, cols, rows, leaves};
    size_t count = (size_t)rows * cols;
    uint64_t random = 5;

    p.row_bytes = (uint64_t)cols / info->block_weights * info->block_bytes;
    p.weights = test_malloc(weight_rows * p.row_bytes);
    tiny_fill(dtype, 3, weight_rows, cols, p.weights);
    p.acts = (kern_acts){.cols = cols,
                         .values = test_malloc(count * sizeof(float)),
                         .quants = test_malloc(count),
                         .scales = test_malloc((count / 32 + 1) * sizeof(float)),
                         .sums = test_malloc((count / 32 + 1) * sizeof(float)),
                         .quant_sums = test_malloc((count / 32 + 1) * sizeof(int32_t))};
    p.halves = test_malloc(count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) {
        p.acts.values[i] = device_float(&random);
        p.halves[i] = to_half(dtype, p.acts.values[i]);
    }
    return p;
}

/* After what was changed in the values. */
static void quantize(product *p)
{
    if (p->cols % 32 == 0)
        for (uint32_t row = 0; row < p->rows; row++)
            REF.quantize(&p->acts, row, 0, p->cols);
}

static void unmake(product *p)
{
    test_free(p->weights);
    test_free(p->acts.values);
    test_free(p->acts.quants);
    test_free(p->acts.scales);
    test_free(p->acts.sums);
    test_free(p->acts.quant_sums);
    test_free(p->halves);
}

/* --- what it must be --- */

static double half_sum(const product *p, uint32_t n, uint32_t r, uint32_t from, uint32_t to,
                       double *size)
{
    double sum = 0;

    for (uint32_t c = from; c < to; c++) {
        uint16_t w;
        memcpy(&w, p->weights + r * p->row_bytes + 2 * (size_t)c, sizeof w);
        double term = (double)of_half(p->dtype, w) *
                      (double)of_half(p->dtype, p->halves[(size_t)n * p->cols + c]);
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

/* out[rows][weight_rows]: one leaf, as a product of its own. */
static void leaf_sum(const product *p, uint32_t leaf, float *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(p->dtype);
    uint32_t cols = p->cols / p->leaves, from = leaf * cols;
    uint64_t bytes = (uint64_t)cols / info->block_weights * info->block_bytes;
    product part = make(p->dtype, p->weight_rows, cols, p->rows, 1);
    float **rows = test_malloc(p->rows * sizeof *rows);

    for (uint32_t r = 0; r < p->weight_rows; r++)
        memcpy(part.weights + r * bytes, p->weights + r * p->row_bytes + leaf * bytes, bytes);
    for (uint32_t n = 0; n < p->rows; n++) {
        size_t at = (size_t)n * p->cols + from, to = (size_t)n * cols;
        rows[n] = out + (size_t)n * p->weight_rows;
        memcpy(part.acts.values + to, p->acts.values + at, cols * sizeof(float));
        if (info->block_weights > 1) {
            memcpy(part.acts.quants + to, p->acts.quants + at, cols);
            memcpy(part.acts.scales + to / 32, p->acts.scales + at / 32, cols / 32 * 4);
            memcpy(part.acts.sums + to / 32, p->acts.sums + at / 32, cols / 32 * 4);
            memcpy(part.acts.quant_sums + to / 32, p->acts.quant_sums + at / 32, cols / 32 * 4);
        }
    }
    kern_matrix matrix = {.dtype = part.dtype,
                          .rows = part.weight_rows,
                          .cols = cols,
                          .segments = 1,
                          .data = part.weights};
    REF.matmul(&matrix, 0, p->weight_rows, &part.acts, 0, p->rows, rows, false);
    test_free(rows);
    unmake(&part);
}

/* The sum of leaves lo .. lo + count - 1 as kernels/sum_tree.h says it. */
static void tree_sum(const product *p, uint32_t lo, uint32_t count, float *out)
{
    size_t values = (size_t)p->rows * p->weight_rows;

    if (count == 1) {
        leaf_sum(p, lo, out);
        return;
    }
    uint32_t left = kern_tree_left(count);
    float *right = test_malloc(values * sizeof *right);
    tree_sum(p, lo, left, out);
    tree_sum(p, lo + left, count - left, right);
    for (size_t i = 0; i < values; i++)
        out[i] += right[i];
    test_free(right);
}

/* --- the device's product --- */

/* Leaves [from, to) of p on a rank; out[node][rows][weight_rows]. rows of the product's, the first
 * of which is row_first. plain: by cu_matmul, which adds no leaves, with a stride of its own. */
static void compute(device *d, const product *p, uint32_t from, uint32_t to, uint32_t row_first,
                    uint32_t rows, bool plain, float *out)
{
    uint32_t leaf_cols = p->cols / p->leaves, cols = (to - from) * leaf_cols;
    size_t skip = plain ? 3 : 0, stride = p->weight_rows + skip;
    uint64_t bytes = cu_pack_bytes(p->dtype, p->weight_rows, cols);
    unsigned char *packed = test_malloc(bytes);
    kern_nodes nodes = kern_nodes_of(p->leaves, from, to);
    cu_acts acts = {.cols = cols, .halves_are_bf16 = p->dtype == PD_BF16};

    cu_pack(p->dtype, p->weight_rows, p->cols, from * leaf_cols, to * leaf_cols, p->weights,
            packed);
    cu_matrix matrix = {p->dtype, p->weight_rows, cols, to - from, from, p->leaves};
    matrix.data = device_upload(d, packed, bytes);
    size_t count = (size_t)rows * cols, blocks = count / 32;
    float *values = test_malloc(count * 4), *scales = test_malloc(blocks * 4 + 4);
    float *sums = test_malloc(blocks * 4 + 4);
    int8_t *quants = test_malloc(count);
    uint16_t *halves = test_malloc(count * 2);
    for (uint32_t n = 0; n < rows; n++) {
        size_t at = (size_t)(row_first + n) * p->cols + from * leaf_cols, in = (size_t)n * cols;
        memcpy(values + in, p->acts.values + at, cols * 4);
        memcpy(halves + in, p->halves + at, cols * 2);
        if (pd_dtype_info_of(p->dtype)->block_weights > 1) {
            memcpy(quants + in, p->acts.quants + at, cols);
            memcpy(scales + in / 32, p->acts.scales + at / 32, cols / 32 * 4);
            memcpy(sums + in / 32, p->acts.sums + at / 32, cols / 32 * 4);
        }
    }
    if (p->dtype == PD_F32) {
        acts.values = device_upload(d, values, count * 4);
    } else if (is_half(p->dtype)) {
        acts.halves = device_upload(d, halves, count * 2);
    } else { /* what a format does not need is not there */
        acts.quants = device_upload(d, quants, count);
        acts.scales = device_upload(d, scales, blocks * 4);
        if (p->dtype == PD_Q4_1)
            acts.sums = device_upload(d, sums, blocks * 4);
    }
    size_t floats = (size_t)nodes.count * rows * stride;
    float *result = device_space(d, floats * 4), *got = test_malloc(floats * 4);
    memset(got, 0x7e, floats * 4);
    assert_int_equal(gpu_copy_in(d->stream, result, got, floats * 4), PD_OK);
    if (plain) {
        assert_int_equal(cu_matmul(d->stream, &matrix, &acts, rows, result, stride), PD_OK);
    } else {
        assert_int_equal(cu_matmul_nodes(d->stream, &matrix, &acts, rows, result), PD_OK);
    }
    device_download(d, got, result, floats * 4);
    for (size_t row = 0; row < (size_t)nodes.count * rows; row++) {
        memcpy(out + row * p->weight_rows, got + row * stride, p->weight_rows * 4);
        for (size_t i = 0; i < skip; i++) /* between the rows nothing is written */
            assert_true(kern_bits_of(got[row * stride + p->weight_rows + i]) == 0x7e7e7e7e);
    }
    test_free(packed), test_free(values), test_free(scales), test_free(sums);
    test_free(quants), test_free(halves), test_free(got);
}

static void check_equal(const product *p, const float *got, const float *want, const char *what)
{
    for (size_t i = 0; i < (size_t)p->rows * p->weight_rows; i++)
        if (kern_bits_of(got[i]) != kern_bits_of(want[i]) && !(isnan(got[i]) && isnan(want[i])))
            fail_msg("%s: %s %u x %u, %u rows: [%zu][%zu] is %a, not %a", what,
                     pd_dtype_info_of(p->dtype)->name, p->weight_rows, p->cols, p->rows,
                     i / p->weight_rows, i % p->weight_rows, (double)got[i], (double)want[i]);
}

/* --- one leaf --- */

static void check_product(device *d, pd_dtype dtype, uint32_t weight_rows, uint32_t cols,
                          uint32_t rows)
{
    product p = make(dtype, weight_rows, cols, rows, 1);
    size_t values = (size_t)rows * weight_rows;
    float *got = test_malloc(values * 4), *want = test_malloc(values * 4);

    quantize(&p);
    compute(d, &p, 0, 1, 0, rows, true, got);
    leaf_sum(&p, 0, want);
    check_equal(&p, got, want, "product");
    test_free(got), test_free(want);
    unmake(&p);
}

static const pd_dtype exact[] = {PD_Q4_0, PD_Q4_1, PD_Q8_0, PD_F32};

static void every_size_right(device *d, void *ctx)
{
    static const uint32_t rows[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12,  13,
                                    14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    static const uint32_t weight_rows[] = {17, 1, 33, 15, 16, 130};
    static const uint32_t cols[] = {96, 32, 288, 64, 320, 160, 256};

    (void)ctx;
    for (size_t f = 0; f < 4; f++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            check_product(d, exact[f], weight_rows[(i + f) % 6], cols[(i + f) % 7], rows[i]);
            device_clear(d);
        }
}

static void exact_products_are_the_references_at_every_size(void **state)
{
    every_size_right(*state, NULL);
}

static void in_every_way_right(device *d, void *ctx)
{
    (void)ctx;
    check_product(d, PD_Q4_1, 33, 352, 3);
    check_product(d, PD_Q8_0, 17, 160, 20);
    check_product(d, PD_Q4_0, 130, 160, 65);
    check_product(d, PD_Q4_1, 17, 160, 40);
    check_product(d, PD_F32, 17, 50, 5);
}

static void exact_products_are_the_references_in_every_order(void **state)
{
    device_each(*state, 2, in_every_way_right, NULL);
}

/* --- numbers at the edges --- */

static void set_scale(product *p, uint32_t r, uint32_t block, uint32_t which, uint16_t half)
{
    const pd_dtype_info *info = pd_dtype_info_of(p->dtype);

    memcpy(p->weights + r * p->row_bytes + (size_t)block * info->block_bytes + 2 * (size_t)which,
           &half, sizeof half);
}

static void edges_right(device *d, void *ctx)
{
    static const uint16_t scales[] = {0, 0x8000, 0x7bff, 0xfbff, 1, 0x7c00, 0x7e01};
    static const uint32_t rows[] = {9, 40};

    (void)ctx;
    for (size_t f = 0; f < 3; f++)
        for (size_t i = 0; i < 2; i++) {
            product p = make(exact[f], 20, 128, rows[i], 1);
            size_t values = (size_t)p.rows * p.weight_rows;
            float *got = test_malloc(values * 4), *want = test_malloc(values * 4);
            for (uint32_t r = 0; r < 14; r++)
                set_scale(&p, r, r % 4, p.dtype == PD_Q4_1 ? r / 7 : 0, scales[r % 7]);
            p.acts.values[0 * 128 + 70] = NAN;
            p.acts.values[1 * 128 + 5] = INFINITY;
            p.acts.values[2 * 128 + 100] = 3e38f;
            p.acts.values[2 * 128 + 101] = -3.3e38f;
            memset(p.acts.values + (size_t)3 * 128, 0, 128 * 4);
            for (uint32_t c = 0; c < 128; c++) { /* the largest and the smallest dots there are */
                p.acts.values[4 * 128 + c] = c / 32 % 2 == 0 ? 7 : -7;
                p.acts.values[5 * 128 + c] = 1e-33f * (float)c;
            }
            for (uint32_t block = 0; block < 4; block++) {
                unsigned char *at = p.weights + 15 * p.row_bytes;
                uint32_t size = pd_dtype_info_of(p.dtype)->block_bytes;
                memset(at + (size_t)block * size + (p.dtype == PD_Q4_1 ? 4 : 2),
                       p.dtype == PD_Q8_0 ? 0x80
                       : block < 2        ? 0x00
                                          : 0xff,
                       p.dtype == PD_Q8_0 ? 32 : 16);
            }
            quantize(&p);
            compute(d, &p, 0, 1, 0, p.rows, true, got);
            leaf_sum(&p, 0, want);
            check_equal(&p, got, want, "edges");
            for (uint32_t r = 14; r < 20; r++) /* nothing hides that an input was no number */
                assert_true(isnan(got[r]) && isnan(got[p.weight_rows + r]));
            for (uint32_t r = 14; r < 20; r++)
                assert_true(got[3 * p.weight_rows + r] == 0 &&
                            isfinite(got[8 * p.weight_rows + r]));
            test_free(got), test_free(want);
            unmake(&p);
            device_clear(d);
        }
}

static void zeros_outliers_and_what_is_no_number_come_out_as_the_references(void **state)
{
    edges_right(*state, NULL);
}

/* --- leaves and ranks --- */

/* Every rank's nodes, at every split of p's leaves into `ranks` runs, are the tree's. */
static void check_split(device *d, const product *p, uint32_t from, uint32_t to, float *const *tree)
{
    kern_nodes nodes = kern_nodes_of(p->leaves, from, to);
    size_t values = (size_t)p->rows * p->weight_rows;
    float *got = test_malloc(nodes.count * values * 4);

    compute(d, p, from, to, 0, p->rows, false, got);
    for (uint32_t i = 0; i < nodes.count; i++) {
        const float *want = tree[nodes.node[i].lo * (p->leaves + 1) + nodes.node[i].count];
        float *own = NULL;
        if (want == NULL) {
            own = test_malloc(values * 4);
            tree_sum(p, nodes.node[i].lo, nodes.node[i].count, own);
            want = own;
        }
        check_equal(p, got + i * values, want, "node");
        test_free(own);
    }
    test_free(got);
    device_clear(d);
}

static void check_leaves(device *d, pd_dtype dtype, uint32_t leaves, uint32_t leaf_cols,
                         uint32_t rows, uint32_t step)
{
    product p = make(dtype, 19, leaves * leaf_cols, rows, leaves);
    float **none = test_calloc((size_t)(leaves + 1) * (leaves + 1), sizeof *none);

    quantize(&p);
    check_split(d, &p, 0, leaves, none);
    for (uint32_t from = 0; from < leaves; from += step)
        check_split(d, &p, from, from + step < leaves ? from + step : leaves, none);
    if (leaves > 2) /* a run that starts and ends anywhere */
        check_split(d, &p, 1, leaves - 1, none);
    test_free(none);
    unmake(&p);
}

static void splits_right(device *d, void *ctx)
{
    (void)ctx;
    for (size_t f = 0; f < 4; f++) {
        pd_dtype dtype = exact[f];
        check_leaves(d, dtype, 3, 64, 2, 1);
        check_leaves(d, dtype, 8, 32, 9, 4);
        check_leaves(d, dtype, 8, 32, 33, 2);
        check_leaves(d, dtype, 5, 96, 34, 2);
        check_leaves(d, dtype, 18, 32, 10, 9);
        check_leaves(d, dtype, 12, 32, 33, 6);
    }
    check_leaves(d, PD_Q4_1, 64, 32, 1, 32);
    check_leaves(d, PD_Q4_1, 7, 288, 33, 4);
    check_leaves(d, PD_F32, 3, 50, 3, 1);
}

static void nodes_are_the_trees_at_every_split_of_leaves_over_ranks(void **state)
{
    splits_right(*state, NULL);
}

static void leaves_in_every_way_right(device *d, void *ctx)
{
    (void)ctx;
    check_leaves(d, PD_Q8_0, 3, 96, 3, 3);
    check_leaves(d, PD_Q4_0, 5, 96, 40, 5);
    check_leaves(d, PD_Q4_1, 9, 32, 12, 9);
}

static void nodes_are_the_trees_in_every_order(void **state)
{
    device_each(*state, 2, leaves_in_every_way_right, NULL);
}

/* --- 16-bit weights --- */

static void check_near(const product *p, const float *got)
{
    for (uint32_t n = 0; n < p->rows; n++)
        for (uint32_t r = 0; r < p->weight_rows; r++) {
            double size = 1e-30, want = half_sum(p, n, r, 0, p->cols, &size);
            double value = (double)got[(size_t)n * p->weight_rows + r];
            if (!(fabs(value - want) <= 1e-5 * size))
                fail_msg("%s %u x %u, %u rows: [%u][%u] is %g, not %g",
                         pd_dtype_info_of(p->dtype)->name, p->weight_rows, p->cols, p->rows, n, r,
                         value, want);
        }
}

/* The whole product, then pieces of it: other numbers of rows, other kernels, the same bits. */
static void check_half(device *d, pd_dtype dtype, uint32_t weight_rows, uint32_t cols,
                       uint32_t rows, uint32_t piece)
{
    product p = make(dtype, weight_rows, cols, rows, 1);
    size_t values = (size_t)rows * weight_rows;
    float *whole = test_malloc(values * 4), *part = test_malloc(values * 4);

    compute(d, &p, 0, 1, 0, rows, true, whole);
    check_near(&p, whole);
    for (uint32_t n = 0; n < rows; n += piece) {
        uint32_t count = n + piece < rows ? piece : rows - n;
        compute(d, &p, 0, 1, n, count, true, part + (size_t)n * weight_rows);
        device_clear(d);
    }
    check_equal(&p, part, whole, "piece");
    test_free(whole), test_free(part);
    unmake(&p);
}

static void half_leaves_right(device *d, pd_dtype dtype, uint32_t leaves, uint32_t rows)
{
    product p = make(dtype, 19, leaves * 48, rows, leaves);
    size_t values = (size_t)rows * 19;
    float *all = test_malloc(values * 4), *two = test_malloc(KERN_NODES_MAX * values * 4);
    float *one = test_malloc(values * 4);
    uint32_t left = kern_tree_left(leaves);
    kern_nodes right = kern_nodes_of(leaves, left, leaves);

    compute(d, &p, 0, leaves, 0, rows, false, all);
    check_near(&p, all);
    compute(d, &p, 0, left, 0, rows, false, one);
    compute(d, &p, left, leaves, 0, rows, false, two);
    assert_int_equal(right.count, 1);
    for (size_t i = 0; i < values; i++)
        one[i] += two[i];
    check_equal(&p, one, all, "halves of the tree");
    for (uint32_t n = 0; n < rows; n += 7)
        compute(d, &p, 0, leaves, n, rows - n < 7 ? rows - n : 7, false, one + (size_t)n * 19);
    check_equal(&p, one, all, "leaves of pieces");
    test_free(all), test_free(two), test_free(one);
    unmake(&p);
    device_clear(d);
}

static void halves_right(device *d, void *ctx)
{
    (void)ctx;
    for (int i = 0; i < 2; i++) {
        pd_dtype dtype = i == 0 ? PD_F16 : PD_BF16;
        check_half(d, dtype, 17, 48, 9, 1);
        check_half(d, dtype, 33, 144, 40, 8);
        check_half(d, dtype, 130, 80, 65, 31);
        check_half(d, dtype, 16, 16, 129, 64);
        half_leaves_right(d, dtype, 3, 5);
        half_leaves_right(d, dtype, 8, 33);
        half_leaves_right(d, dtype, 9, 34);
    }
}

static void products_of_halves_are_near_and_do_not_depend_on_their_company(void **state)
{
    halves_right(*state, NULL);
}

static void halves_in_every_way_right(device *d, void *ctx)
{
    (void)ctx;
    check_half(d, PD_F16, 17, 144, 10, 3);
    check_half(d, PD_BF16, 130, 48, 66, 66);
    half_leaves_right(d, PD_BF16, 3, 40);
}

static void products_of_halves_are_right_in_every_order(void **state)
{
    device_each(*state, 2, halves_in_every_way_right, NULL);
}

/* --- plain copies --- */

static void unpack_and_compare(device *d, void *ctx)
{
    static const uint32_t sizes[][2] = {{1, 16}, {16, 32}, {17, 496}, {40, 1040}, {33, 128}};
    uint64_t seed = 9;

    (void)ctx;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint32_t rows = sizes[i][0], cols = sizes[i][1];
        size_t bytes = 2 * (size_t)rows * cols;
        size_t packed_bytes = (size_t)cu_pack_bytes(PD_BF16, rows, cols);
        uint16_t *plain = test_malloc(bytes), *back = test_malloc(bytes);
        unsigned char *packed = test_malloc(packed_bytes);
        for (size_t at = 0; at < (size_t)rows * cols; at++)
            plain[at] = (uint16_t)device_random(&seed);
        cu_pack(PD_BF16, rows, cols, 0, cols, plain, packed);
        unsigned char *out = device_space(d, bytes);
        assert_int_equal(
            cu_unpack(d->stream, rows, cols, device_upload(d, packed, packed_bytes), out), PD_OK);
        device_download(d, back, out, bytes);
        assert_memory_equal(back, plain, bytes);

        uint32_t zero = 0, found = 0;
        uint32_t *differ = device_upload(d, &zero, sizeof zero);
        for (uint32_t turn = 0; turn < 2; turn++) { /* the same, then one bit of the last word */
            const void *b = device_upload(d, plain, bytes);
            assert_int_equal(cu_compare(d->stream, out, b, bytes / 4, differ), PD_OK);
            device_download(d, &found, differ, sizeof found);
            assert_int_equal(found, turn);
            plain[(size_t)rows * cols - 1] ^= 1;
        }
        device_clear(d);
        test_free(plain);
        test_free(back);
        test_free(packed);
    }
}

static void what_is_unpacked_is_what_was_packed(void **state)
{
    device_each(*state, 1, unpack_and_compare, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_unpacked_is_what_was_packed),
        cmocka_unit_test(exact_products_are_the_references_at_every_size),
        cmocka_unit_test(exact_products_are_the_references_in_every_order),
        cmocka_unit_test(zeros_outliers_and_what_is_no_number_come_out_as_the_references),
        cmocka_unit_test(nodes_are_the_trees_at_every_split_of_leaves_over_ranks),
        cmocka_unit_test(nodes_are_the_trees_in_every_order),
        cmocka_unit_test(products_of_halves_are_near_and_do_not_depend_on_their_company),
        cmocka_unit_test(products_of_halves_are_right_in_every_order),
    };
    return cmocka_run_group_tests_name("gpu-emu-matmul", tests, device_setup, device_teardown);
}
