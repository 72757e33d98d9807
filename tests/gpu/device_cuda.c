/* tests/gpu-emu/device.h on a real GPU, where nobody counts sectors. Where there is none the test
 * ends with 77: skipped. */

#include "tests/gpu-emu/device_body.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define SKIPPED 77

void device_check(device *d, pd_status status, const char *what)
{
    const char *broken = gpu_broken(d->gpu);

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
    *state = device_open();
    return *state == NULL ? 1 : 0;
}

int device_teardown(void **state)
{
    device_close(*state);
    return 0;
}

void device_poison(device *d, void *memory, size_t bytes)
{
    device_check(d, gpu_fill(d->stream, memory, 0xff, bytes), "gpu_fill");
}

void device_each(device *d, unsigned seeds, void (*run)(device *d, void *ctx), void *ctx)
{
    (void)seeds; /* the order is the hardware's */
    run(d, ctx);
    device_clear(d);
}

void device_run_late(bool late)
{
    (void)late;
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
