/* The emulator: right kernels are right in every order, and what is planted is found. */
#include "kernels/cuda/emu/emu.h"
#include "kernels/number.h"
#include "tests/gpu-emu/device.h"
#include "tests/gpu-emu/planted.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

static void reverse_right(device *d, void *ctx)
{
    float in[384], out[384];

    (void)ctx;
    for (int i = 0; i < 384; i++)
        in[i] = (float)i;
    const float *from = device_upload(d, in, sizeof in);
    float *to = device_space(d, sizeof out);
    assert_int_equal(planted_reverse(d->stream, 0, 384, from, to), PD_OK);
    device_download(d, out, to, sizeof out);
    for (int i = 0; i < 384; i++)
        assert_true(out[i] == in[i / 128 * 128 + 127 - i % 128]);
}

static void a_block_meets_at_its_barrier(void **state)
{
    device_each(*state, 4, reverse_right, NULL);
}

static void gemm_right(device *d, void *ctx)
{
    static uint16_t a[64 * 64], b[64 * 64];
    static float c[64 * 64];
    uint64_t random = 7;

    (void)ctx;
    for (int i = 0; i < 64 * 64; i++) {
        a[i] = kern_f32_to_f16(device_float(&random));
        b[i] = kern_f32_to_f16(device_float(&random));
    }
    const uint16_t *da = device_upload(d, a, sizeof a), *db = device_upload(d, b, sizeof b);
    float *dc = device_space(d, sizeof c);
    assert_int_equal(planted_gemm(d->stream, 0, da, db, dc), PD_OK);
    device_download(d, c, dc, sizeof c);
    for (int row = 0; row < 64; row++)
        for (int n = 0; n < 64; n++) {
            double sum = 0, size = 0;
            for (int k = 0; k < 64; k++) {
                double term = (double)kern_f16_to_f32(a[row * 64 + k]) *
                              (double)kern_f16_to_f32(b[n * 64 + k]);
                sum += term;
                size += term < 0 ? -term : term;
            }
            double off = (double)c[row * 64 + n] - sum;
            if (!(off < 1e-6 * size && -off < 1e-6 * size))
                fail_msg("c[%d][%d] is %g, not %g", row, n, (double)c[row * 64 + n], sum);
        }
}

static void fragments_lie_as_the_isa_says(void **state)
{
    device_each(*state, 4, gemm_right, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_meets_at_its_barrier),
        cmocka_unit_test(fragments_lie_as_the_isa_says),
    };
    return cmocka_run_group_tests_name("gpu-emu-emu", tests, device_setup, device_teardown);
}
