/* cuBLASLt's products, where it is: near our own kernel's, and a row's bits do not depend on the
 * number of rows nor on its place among them. Where it is not, it says why. */
#include "common/base/mem.h"
#include "kernels/cuda/blaslt.h"
#include "kernels/cuda/launch.h"
#include "kernels/number.h"
#include "tests/gpu-emu/device.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { WEIGHT_ROWS = 200, COLS = 320, ROWS = 600, STRIDE = 208 };

typedef struct inputs {
    uint16_t weights[WEIGHT_ROWS * COLS], acts[ROWS * COLS];
} inputs;

static void multiply(device *d, blaslt_plan *plan, const inputs *in, uint32_t first, uint32_t rows,
                     float *out)
{
    size_t bytes = (size_t)rows * STRIDE * sizeof *out;
    const void *weights = device_upload(d, in->weights, sizeof in->weights);
    const uint16_t *acts =
        device_upload(d, in->acts + (size_t)first * COLS, (size_t)rows * COLS * 2);
    float *result = device_space(d, bytes);

    assert_int_equal(blaslt_matmul(plan, d->stream, weights, acts, rows, result), PD_OK);
    device_download(d, out, result, bytes);
    device_clear(d);
}

static void check_plan(device *d, blaslt *b, const inputs *in)
{
    static const uint32_t cuts[][2] = {{0, 1}, {1, 1}, {255, 2}, {300, 256}, {599, 1}, {77, 400}};
    float *all = test_malloc(sizeof(float) * ROWS * STRIDE);
    float *some = test_malloc(sizeof(float) * ROWS * STRIDE);
    blaslt_plan *plan = NULL;

    assert_int_equal(blaslt_plan_create(b, true, WEIGHT_ROWS, COLS, STRIDE, &plan), PD_OK);
    multiply(d, plan, in, 0, ROWS, all);
    for (uint32_t n = 0; n < ROWS; n += 7)
        for (uint32_t r = 0; r < WEIGHT_ROWS; r += 3) {
            double sum = 0, size = 1e-30;
            for (uint32_t c = 0; c < COLS; c++) {
                double term = (double)kern_bf16_to_f32(in->weights[r * COLS + c]) *
                              (double)kern_bf16_to_f32(in->acts[n * COLS + c]);
                sum += term;
                size += fabs(term);
            }
            assert_true(fabs((double)all[n * STRIDE + r] - sum) <= 1e-5 * size);
        }
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        multiply(d, plan, in, cuts[i][0], cuts[i][1], some);
        for (uint32_t n = 0; n < cuts[i][1]; n++)
            assert_memory_equal(some + n * STRIDE, all + (cuts[i][0] + n) * STRIDE,
                                WEIGHT_ROWS * sizeof *some);
    }
    blaslt_plan_destroy(plan);
    test_free(all);
    test_free(some);
}

static void a_row_is_the_same_in_any_company_or_the_reason_is_named(void **state)
{
    device *d = *state;
    blaslt *b = NULL;
    char reason[256] = "";
    inputs *in = test_malloc(sizeof *in);
    uint64_t random = 3;

    for (size_t i = 0; i < WEIGHT_ROWS * COLS; i++)
        in->weights[i] = (uint16_t)(kern_bits_of(device_float(&random)) >> 16);
    for (size_t i = 0; i < ROWS * COLS; i++)
        in->acts[i] = (uint16_t)(kern_bits_of(device_float(&random)) >> 16);
    pd_status status = blaslt_open(d->gpu, COLS, STRIDE, &b, reason, sizeof reason);
    if (status == PD_OK) {
        check_plan(d, b, in);
    } else {
        assert_int_equal(status, PD_E_UNSUPPORTED);
        assert_true(reason[0] != '\0' && b == NULL);
        printf("# no cuBLASLt: %s\n", reason);
    }
    blaslt_close(b);
    test_free(in);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_is_the_same_in_any_company_or_the_reason_is_named),
    };
    return cmocka_run_group_tests_name("gpu-emu-blaslt", tests, device_setup, device_teardown);
}
