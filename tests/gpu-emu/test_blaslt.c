/* cuBLASLt's products, where it is: near the exact ones, for every algorithm of its list. Where it
 * is not, it says why. (Whether its bits are our kernel's is kernels/cuda/wide's to find.) */
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

enum { WEIGHT_ROWS = 200, COLS = 320, ROWS = 512, STRIDE = 208 };

typedef struct inputs {
    uint16_t weights[WEIGHT_ROWS * COLS], acts[ROWS * COLS];
} inputs;

static void check_plan(device *d, const blaslt_plan *plan, const inputs *in)
{
    size_t bytes = sizeof(float) * ROWS * STRIDE;
    float *out = test_malloc(bytes), *result = device_space(d, bytes);
    const void *weights = device_upload(d, in->weights, sizeof in->weights);
    const uint16_t *acts = device_upload(d, in->acts, sizeof in->acts);

    assert_int_equal(blaslt_matmul(plan, d->stream, weights, acts, result), PD_OK);
    device_download(d, out, result, bytes);
    for (uint32_t n = 0; n < ROWS; n += 7)
        for (uint32_t r = 0; r < WEIGHT_ROWS; r += 3) {
            double sum = 0, size = 1e-30;
            for (uint32_t c = 0; c < COLS; c++) {
                double term = (double)kern_bf16_to_f32(in->weights[r * COLS + c]) *
                              (double)kern_bf16_to_f32(in->acts[n * COLS + c]);
                sum += term;
                size += fabs(term);
            }
            assert_true(fabs((double)out[n * STRIDE + r] - sum) <= 1e-5 * size);
        }
    device_clear(d);
    test_free(out);
}

static void check_all(device *d, blaslt *b, const inputs *in)
{
    const blaslt_shape shape = {
        .bf16 = true, .weight_rows = WEIGHT_ROWS, .cols = COLS, .rows = ROWS, .out_stride = STRIDE};
    uint32_t nth = 0;

    for (;; nth++) {
        blaslt_plan *plan = NULL;
        pd_status status = blaslt_plan_create(b, &shape, nth, &plan);
        if (status != PD_OK) {
            assert_int_equal(status, PD_E_UNSUPPORTED);
            break;
        }
        check_plan(d, plan, in);
        blaslt_plan_destroy(plan);
    }
    assert_true(nth > 0);
}

static void products_are_right_or_the_reason_is_named(void **state)
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
    pd_status status = blaslt_open(d->gpu, &b, reason, sizeof reason);
    if (status == PD_OK) {
        check_all(d, b, in);
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
        cmocka_unit_test(products_are_right_or_the_reason_is_named),
    };
    return cmocka_run_group_tests_name("gpu-emu-blaslt", tests, device_setup, device_teardown);
}
