/* tests/gpu-emu/device.h on a real GPU, where nobody counts sectors. Where there is none the test
 * ends with 77: skipped. */

#include "tests/gpu-emu/device.h"

#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define SKIPPED 77

struct memory {
    struct memory *next;
    void *at;
};

static struct {
    device device;
    struct memory *memory;
} here;

static void check(pd_status status, const char *what)
{
    const char *broken = gpu_broken(here.device.gpu);

    if (broken != NULL) { /* nothing after it can be told */
        fprintf(stderr, "%s: the device is lost: %s\n", what, broken);
        exit(1);
    }
    if (status != PD_OK)
        fail_msg("%s: %s", what, pd_status_name(status));
}

int device_setup(void **state)
{
    char reason[256];

    if (gpu_count(reason, sizeof reason) == 0) {
        fprintf(stderr, "skipped: %s\n", reason);
        exit(SKIPPED);
    }
    if (gpu_open(0, &here.device.gpu) != PD_OK)
        return 1;
    gpu_use(here.device.gpu);
    if (gpu_stream_create(here.device.gpu, &here.device.stream) != PD_OK)
        return 1;
    *state = &here.device;
    return 0;
}

static void free_all(device *d)
{
    while (here.memory != NULL) {
        struct memory *m = here.memory;
        here.memory = m->next;
        gpu_free(d->gpu, m->at);
        pd_free(m);
    }
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
    if (status != PD_OK)
        pd_free(m);
    check(status, "gpu_alloc");
    m->next = here.memory;
    here.memory = m;
    check(gpu_fill(d->stream, m->at, 0xff, bytes), "gpu_fill");
    return m->at;
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
}

void device_each(device *d, unsigned seeds, void (*run)(device *d, void *ctx), void *ctx)
{
    (void)seeds; /* the order is the hardware's */
    run(d, ctx);
    device_clear(d);
}

void device_traffic_clear(device *d)
{
    (void)d;
}

device_traffic device_traffic_of(device *d, const char *kernel)
{
    (void)d, (void)kernel;
    return (device_traffic){0};
}
