#include "tests/gpu-emu/device.h"

#include "common/base/mem.h"
#include "kernels/cuda/emu/emu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

struct memory {
    struct memory *next;
    void *at;
};

static struct {
    device device;
    struct memory *memory;
    char way[128]; /* in which it runs now */
} here;

static void free_all(device *d)
{
    while (here.memory != NULL) {
        struct memory *m = here.memory;
        here.memory = m->next;
        gpu_free(d->gpu, m->at);
        pd_free(m);
    }
}

/* What is found ends its own test alone. */
static void check(pd_status status, const char *what)
{
    char found[1024];

    if (status == PD_OK && emu_found()[0] == '\0')
        return;
    snprintf(found, sizeof found, "%s", emu_found());
    free_all(&here.device);
    emu_forget();
    fail_msg("%s: %s: %s (%s)", what, pd_status_name(status), found, here.way);
}

int device_setup(void **state)
{
    emu_options options = {.seed = 1};

    emu_configure(&options);
    if (gpu_open(0, &here.device.gpu) != PD_OK)
        return 1;
    gpu_use(here.device.gpu);
    if (gpu_stream_create(here.device.gpu, &here.device.stream) != PD_OK)
        return 1;
    *state = &here.device;
    return 0;
}

int device_teardown(void **state)
{
    device *d = *state;

    free_all(d); /* of a test that failed */
    gpu_stream_destroy(d->stream);
    gpu_close(d->gpu);
    return 0;
}

void *device_space(device *d, size_t bytes)
{
    struct memory *m = pd_malloc(sizeof *m);

    assert_non_null(m);
    pd_status status = gpu_alloc(d->gpu, bytes, &m->at);
    if (status == PD_OK) {
        m->next = here.memory;
        here.memory = m;
    } else
        pd_free(m);
    check(status, "gpu_alloc");
    return here.memory->at;
}

void *device_upload(device *d, const void *host, size_t bytes)
{
    void *memory = device_space(d, bytes);

    check(gpu_copy_in(d->stream, memory, host, bytes), "gpu_copy_in");
    check(gpu_stream_wait(d->stream), "gpu_stream_wait");
    return memory;
}

void device_download(device *d, void *host, const void *memory, size_t bytes)
{
    check(gpu_copy_out(d->stream, host, memory, bytes), "gpu_copy_out");
    device_finish(d);
}

void device_finish(device *d)
{
    check(gpu_stream_wait(d->stream), "gpu_stream_wait");
}

void device_clear(device *d)
{
    device_finish(d);
    free_all(d);
    check(PD_OK, "gpu_free");
}

static void once(device *d, emu_options options, void (*run)(device *d, void *ctx), void *ctx)
{
    static const char *const orders[] = {"forward", "reverse", "random"};

    snprintf(here.way, sizeof here.way, "order %s, copies %s, streams %s, seed %llu",
             orders[options.order], options.late_copies ? "late" : "early",
             options.late_streams ? "late" : "early", (unsigned long long)options.seed);
    emu_configure(&options);
    run(d, ctx);
    device_clear(d);
}

void device_each(device *d, unsigned seeds, void (*run)(device *d, void *ctx), void *ctx)
{
    const char *full = getenv("KVFERRY_FULL"), *seed = getenv("KVFERRY_SEED");
    uint64_t from = seed != NULL ? strtoull(seed, NULL, 10) : 1;

    if (full != NULL && full[0] == '1')
        seeds *= 8;
    once(d, (emu_options){.order = EMU_FORWARD, .seed = from}, run, ctx);
    once(d, (emu_options){.order = EMU_REVERSE, .seed = from, .late_copies = true}, run, ctx);
    for (unsigned i = 0; i < seeds; i++)
        for (int late = 0; late < 2; late++)
            once(d,
                 (emu_options){.order = EMU_RANDOM,
                               .seed = from + i,
                               .late_copies = late == 1,
                               .late_streams = i % 2 == 1},
                 run, ctx);
    here.way[0] = '\0';
}

uint32_t device_random(uint64_t *state)
{
    /* xorshift64* (Vigna 2016); 0 is no state */
    uint64_t x = *state != 0 ? *state : 0x9e3779b97f4a7c15;

    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return (uint32_t)((x * 0x2545f4914f6cdd1d) >> 32);
}

float device_float(uint64_t *state)
{
    float value = (float)(int32_t)device_random(state) * 0x1p-31f;

    return device_random(state) % 61 == 0 ? value * 100 : value;
}
