/* The emulator: right kernels are right in every order, and what is planted is found: in the plain
 * form in some order, in the checked form in the first. */
#include "kernels/cuda/emu/emu.h"
#include "kernels/number.h"
#include "tests/gpu-emu/device.h"
#include "tests/gpu-emu/planted.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define PAGES 11
#define COUNT 600

/* False: what was queued before it failed, or the copy did. */
static bool read_back(device *d, void *host, const void *memory, size_t bytes)
{
    return gpu_copy_out(d->stream, host, memory, bytes) == PD_OK &&
           gpu_stream_wait(d->stream) == PD_OK;
}

/* Each runs a plant once and tells whether the numbers are right; what the emulator found is
 * emu_found(). */
static bool run_reverse(device *d, int plant)
{
    float in[384], out[384];
    bool right = true;

    for (int i = 0; i < 384; i++)
        in[i] = (float)i;
    const float *from = device_upload(d, in, sizeof in);
    float *to = device_space(d, sizeof out);
    if (planted_reverse(d->stream, plant, 384, from, to) != PD_OK ||
        !read_back(d, out, to, sizeof out))
        return false;
    for (int i = 0; i < 384; i++)
        right = right && out[i] == in[i / 128 * 128 + 127 - i % 128];
    return right;
}

static bool run_gemm(device *d, int plant)
{
    static uint16_t a[64 * 64], b[64 * 64];
    static float c[64 * 64];
    uint64_t random = 7;

    for (int i = 0; i < 64 * 64; i++) {
        a[i] = kern_f32_to_f16(device_float(&random));
        b[i] = kern_f32_to_f16(device_float(&random));
    }
    const uint16_t *da = device_upload(d, a, sizeof a), *db = device_upload(d, b, sizeof b);
    float *dc = device_space(d, sizeof c);
    if (planted_gemm(d->stream, plant, da, db, dc) != PD_OK || !read_back(d, c, dc, sizeof c))
        return false;
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
                return false;
        }
    return true;
}

static bool run_warps(device *d, int plant)
{
    float in[128], out[4];
    bool right = true;

    for (int i = 0; i < 128; i++)
        in[i] = (float)(i * i);
    const float *from = device_upload(d, in, sizeof in);
    float *to = device_space(d, sizeof out);
    if (planted_warps(d->stream, plant, from, to) != PD_OK || !read_back(d, out, to, sizeof out))
        return false;
    for (int warp = 0; warp < 4; warp++) {
        float sum = 0;
        for (int i = 0; i < 32; i++)
            sum += in[warp * 32 + i];
        right = right && out[warp] == sum;
    }
    return right;
}

static bool run_ring(device *d, int plant)
{
    static float in[PAGES * 256];
    float out[256];
    bool right = true;

    for (int i = 0; i < PAGES * 256; i++)
        in[i] = (float)(i * 7 % 1001);
    const float *from = device_upload(d, in, sizeof in);
    float *to = device_space(d, sizeof out);
    if (planted_ring(d->stream, plant, PAGES, from, to) != PD_OK ||
        !read_back(d, out, to, sizeof out))
        return false;
    for (int i = 0; i < 256; i++) {
        float sum = 0;
        for (int page = 0; page < PAGES; page++)
            sum += in[page * 256 + i];
        right = right && out[i] == sum;
    }
    return right;
}

static bool run_total(device *d, int plant)
{
    uint32_t in[COUNT], total = 0, sum = 0;

    for (uint32_t i = 0; i < COUNT; i++)
        sum += in[i] = i * 3;
    const uint32_t *from = device_upload(d, in, sizeof in);
    uint32_t *to = device_upload(d, &total, sizeof total);
    return planted_total(d->stream, plant, COUNT, from, to) == PD_OK &&
           read_back(d, &total, to, sizeof total) && total == sum;
}

static const struct kind {
    const char *name;
    bool (*run)(device *d, int plant);
    int plants;
    unsigned unseen; /* bits: plants that no order shows in wrong numbers, so only the checks see */
    const char *says[PLANTED_WARPS + 1]; /* that in each form a check has to find, and its words */
} kinds[] = {
    {"reverse", run_reverse, PLANTED_REVERSE, 0, {[3] = "others of the block wait in another"}},
    {"gemm",
     run_gemm,
     PLANTED_GEMM,
     0,
     {[4] = "is not 16-byte aligned", [5] = "is not in shared memory"}},
    {"warps",
     run_warps,
     PLANTED_WARPS,
     1u << 1,
     {[3] = "is not in its own mask",
      [4] = "are not in the same operation",
      [5] = "which has ended",
      [6] = "are not in the same operation",
      [7] = "leaves out",
      [8] = "deadlock",
      [9] = "no multiple of it"}},
    {"ring", run_ring, PLANTED_RING, 0, {NULL}},
    {"total", run_total, PLANTED_TOTAL, 1u << 2 | 1u << 5, {NULL}},
};
#define KINDS (int)(sizeof kinds / sizeof kinds[0])

static void right_once(device *d, void *ctx)
{
    const struct kind *kind = ctx;
    bool right = kind->run(d, 0);

    if (!right && emu_found()[0] == '\0')
        fail_msg("%s: wrong numbers", kind->name);
}

static void what_is_right_is_right_in_every_order(void **state)
{
    for (int i = 0; i < KINDS; i++)
        device_each(*state, 6, right_once, (void *)&kinds[i]);
}

/* Whether it was found in this run. */
static bool found_once(device *d, const struct kind *kind, int plant, emu_options options)
{
    emu_configure(&options);
    bool right = kind->run(d, plant);
    bool found = emu_found()[0] != '\0';
    if (kind->says[plant] != NULL && strstr(emu_found(), kind->says[plant]) == NULL)
        fail_msg("%s: plant %d: \"%s\" does not say: %s", kind->name, plant, emu_found(),
                 kind->says[plant]);
    if (found)
        print_message("# %s %d: %s\n", kind->name, plant, emu_found());
    emu_forget();
    device_clear(d);
    emu_forget(); /* what is seen as memory is freed */
    return found || !right;
}

static void what_is_planted_is_found(void **state)
{
    for (int k = 0; k < KINDS; k++)
        for (int plant = 1; plant <= kinds[k].plants; plant++) {
            bool found = found_once(*state, &kinds[k], plant, (emu_options){.order = EMU_FORWARD});
            if (emu_is_checked() && !found)
                fail_msg("%s: plant %d is not found at once", kinds[k].name, plant);
            for (uint64_t seed = 0; seed < 8 && !found; seed++)
                found = found_once(*state, &kinds[k], plant,
                                   (emu_options){.order = seed == 0 ? EMU_REVERSE : EMU_RANDOM,
                                                 .seed = seed,
                                                 .late_copies = seed % 2 == 1});
            if (!found && (emu_is_checked() || (kinds[k].unseen >> plant & 1) == 0))
                fail_msg("%s: plant %d is not found", kinds[k].name, plant);
        }
}

/* What a kernel has not written must not pass for a number: of much memory the edges at least. */
static void fresh_memory_is_no_number(void **state)
{
    static const size_t sizes[] = {16, 4096, 100 << 20};
    device *d = *state;
    unsigned char bytes[16];

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const unsigned char *at = device_space(d, sizes[i]);
        for (int end = 0; end < 2; end++) {
            device_download(d, bytes, at + end * (sizes[i] - sizeof bytes), sizeof bytes);
            for (size_t b = 0; b < sizeof bytes; b++)
                assert_int_equal(bytes[b], 0xff);
        }
        device_clear(d);
    }
}

static void conflict(void *ctx, const emu_traffic *t)
{
    double *ratios = ctx; /* of the fill, of both ldmatrix */
    double ratio = (double)t->actual / (double)t->ideal;

    if (strcmp(t->kernel, "gemm_kernel<0>") != 0 || !t->shared || t->groups == 0)
        return;
    if (ratio > 1.5)
        ratios[0] = ratio;
    else
        ratios[1] = ratio > ratios[1] ? ratio : ratios[1];
}

static void bank_conflicts_are_counted(void **state)
{
    double ratios[2] = {0, 0};

    device_each(*state, 1, right_once, (void *)&kinds[1]);
    if (!emu_is_checked()) {
        puts("# accesses are counted in the checked form alone");
        return;
    }
    emu_traffic_each(conflict, ratios);
    assert_true(ratios[0] > 1.99 && ratios[0] < 2.01);
    assert_true(ratios[1] == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_right_is_right_in_every_order),
        cmocka_unit_test(what_is_planted_is_found),
        cmocka_unit_test(fresh_memory_is_no_number),
        cmocka_unit_test(bank_conflicts_are_counted),
    };
    return cmocka_run_group_tests_name("gpu-emu-emu", tests, device_setup, device_teardown);
}
