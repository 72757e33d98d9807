/* Products by cuBLASLt are used where they are our kernel's bit for bit, and nowhere else: with a
 * body of blaslt.h of this file's, whose algorithms are right or wrong in one word. The emulator's
 * streams run late. (Of the library itself: test_blaslt.c.) */
#include "kernels/cuda/blaslt.h"
#include "kernels/cuda/wide.h"
#include "tests/gpu-emu/device.h"

#include "common/base/mem.h"
#include "kernels/number.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum {
    WEIGHT_ROWS = 36,
    COLS = 32,
    STRIDE = 40, /* 4 of another matrix's before, none after */
    FIRST = 4,
    ROWS_MAX = 1024,
    ROWS = 1024 + 512 + 7,
    ALGORITHMS = 3
};

struct blaslt {
    gpu *device;
};

struct blaslt_plan {
    blaslt_shape shape;
    uint32_t nth;
};

/* What the library is, and what was asked of it. */
static struct {
    bool missing;
    uint32_t right_from; /* rows of products whose second algorithm is right */
    uint32_t open, plans;
    uint32_t multiplied; /* rows */
    const void *weights;
    const cu_matrix *matrix;
} library;

pd_status blaslt_open(gpu *g, blaslt **blaslt_out, char *reason, size_t reason_size)
{
    static blaslt one;

    snprintf(reason, reason_size, "%s", library.missing ? "it is not there" : "");
    if (library.missing)
        return PD_E_UNSUPPORTED;
    library.open++;
    one.device = g;
    *blaslt_out = &one;
    return PD_OK;
}

void blaslt_close(blaslt *b)
{
    library.open -= b != NULL;
}

pd_status blaslt_plan_create(blaslt *b, const blaslt_shape *shape, uint32_t nth,
                             blaslt_plan **plan_out)
{
    assert_non_null(b);
    assert_int_equal(shape->weight_rows, WEIGHT_ROWS);
    assert_int_equal(shape->cols, COLS);
    assert_int_equal(shape->out_stride, STRIDE);
    assert_false(shape->bf16);
    if (nth == ALGORITHMS)
        return PD_E_UNSUPPORTED;
    blaslt_plan *plan = test_malloc(sizeof *plan);
    *plan = (blaslt_plan){*shape, nth};
    library.plans++;
    *plan_out = plan;
    return PD_OK;
}

void blaslt_plan_destroy(blaslt_plan *plan)
{
    library.plans -= plan != NULL;
    test_free(plan);
}

/* Our kernel's bits; but for the second algorithm, where that is right, the last word is another.
 */
pd_status blaslt_matmul(const blaslt_plan *plan, gpu_stream *stream, const void *weights,
                        const uint16_t *acts, float *out)
{
    const cu_acts rows = {.cols = COLS, .halves = (uint16_t *)(uintptr_t)acts};
    float *last = out + (plan->shape.rows - 1) * plan->shape.out_stride + WEIGHT_ROWS - 1;

    library.multiplied += plan->shape.rows;
    library.weights = weights;
    pd_status status =
        cu_matmul(stream, library.matrix, &rows, plan->shape.rows, out, plan->shape.out_stride);
    if (status == PD_OK && (plan->nth != 1 || plan->shape.rows < library.right_from))
        status = gpu_fill(stream, last, 0x11, 1);
    return status;
}

/* A model's only layer, of one matrix and four rows before it. */
typedef struct model {
    uint16_t rows[WEIGHT_ROWS * COLS];
    cu_layer_weights layer;
    cu_weights weights;
} model;

static model *model_make(device *d)
{
    model *m = test_calloc(1, sizeof *m);
    uint64_t random = 5, bytes = cu_pack_bytes(PD_F16, WEIGHT_ROWS, COLS);
    void *packed = test_malloc(bytes);

    for (uint32_t i = 0; i < WEIGHT_ROWS * COLS; i++)
        m->rows[i] = kern_f32_to_f16(device_float(&random));
    cu_pack(PD_F16, WEIGHT_ROWS, COLS, 0, COLS, m->rows, packed);
    m->layer.qkv = (cu_group){.count = 1, .rows = STRIDE, .first = {FIRST}};
    m->layer.qkv.matrix[0] = (cu_matrix){.dtype = PD_F16,
                                         .rows = WEIGHT_ROWS,
                                         .cols = COLS,
                                         .leaves = 1,
                                         .leaves_all = 1,
                                         .data = device_upload(d, packed, bytes)};
    m->weights = (cu_weights){.layers = &m->layer, .device = d->gpu};
    m->weights.shape.layers = 1;
    library.matrix = &m->layer.qkv.matrix[0];
    test_free(packed);
    return m;
}

static float *product(device *d, const cu_wide *wide, const uint16_t *acts)
{
    const cu_acts rows = {.cols = COLS, .halves = (uint16_t *)(uintptr_t)acts};
    size_t bytes = sizeof(float) * ROWS * STRIDE;
    float *out = test_malloc(bytes), *result = device_space(d, bytes);

    assert_int_equal(
        cu_wide_matmul(wide, d->stream, library.matrix, &rows, ROWS, result + FIRST, STRIDE),
        PD_OK);
    device_download(d, out, result, bytes);
    return out;
}

static void compare_with_ours(device *d, const model *m, const cu_wide *wide)
{
    uint16_t *acts = test_malloc(sizeof *acts * ROWS * COLS), plain[WEIGHT_ROWS * COLS];
    uint64_t random = 9;

    for (uint32_t i = 0; i < ROWS * COLS; i++)
        acts[i] = kern_f32_to_f16(device_float(&random));
    const uint16_t *memory = device_upload(d, acts, sizeof *acts * ROWS * COLS);
    float *ours = product(d, NULL, memory), *its = product(d, wide, memory);
    assert_memory_equal(its, ours, sizeof(float) * ROWS * STRIDE);
    if (library.multiplied > 0) {
        device_download(d, plain, library.weights, sizeof plain);
        assert_memory_equal(plain, m->rows, sizeof plain);
    }
    test_free(ours);
    test_free(its);
    test_free(acts);
}

/* right_from: see library. multiplied: rows of ROWS that the library does. */
static void check(device *d, uint32_t right_from, const char *says, uint32_t multiplied)
{
    model *m = model_make(d);
    cu_wide *wide = NULL;
    char text[256];

    library.right_from = right_from;
    assert_int_equal(cu_wide_create(d->gpu, &m->weights, ROWS_MAX, &wide, text, sizeof text),
                     PD_OK);
    assert_string_equal(text, says);
    library.multiplied = 0;
    compare_with_ours(d, m, wide);
    assert_int_equal(library.multiplied, multiplied);
    cu_wide_destroy(wide);
    assert_int_equal(library.open, 0);
    assert_int_equal(library.plans, 0);
    device_clear(d);
    test_free(m);
}

static void an_algorithm_is_used_where_its_bits_are_ours(void **state)
{
    device_run_late(true);
    check(*state, 0, "2 of 3 products of 16 bits by cuBLASLt", 1024 + 512);
    check(*state, 1024, "1 of 3 products of 16 bits by cuBLASLt", 1024);
    check(*state, ROWS_MAX + 1, "no cuBLASLt: none of its algorithms gives our kernel's bits", 0);
    device_run_late(false);
}

static void without_the_library_our_kernels_do_it(void **state)
{
    library.missing = true;
    check(*state, 0, "no cuBLASLt: it is not there", 0);
    library.missing = false;
}

static void few_rows_and_other_formats_are_not_looked_at(void **state)
{
    device *d = *state;
    model *m = model_make(d);
    cu_wide *wide = NULL;
    char text[256];

    assert_true(cu_wide_bytes(&m->weights, ROWS_MAX) > 0);
    assert_int_equal(cu_wide_bytes(&m->weights, CU_WIDE_ROWS_MIN - 1), 0);
    m->layer.qkv.matrix[0].dtype = PD_Q8_0;
    assert_int_equal(cu_wide_bytes(&m->weights, ROWS_MAX), 0);
    assert_int_equal(cu_wide_create(d->gpu, &m->weights, ROWS_MAX, &wide, text, sizeof text),
                     PD_OK);
    assert_null(wide);
    assert_string_equal(text, "");
    device_clear(d);
    test_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_algorithm_is_used_where_its_bits_are_ours),
        cmocka_unit_test(without_the_library_our_kernels_do_it),
        cmocka_unit_test(few_rows_and_other_formats_are_not_looked_at),
    };
    return cmocka_run_group_tests_name("gpu-emu-wide", tests, device_setup, device_teardown);
}
