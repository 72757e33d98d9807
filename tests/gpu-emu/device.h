#pragma once

/* tests/gpu-emu/device.h - a GPU for a kernel's test, and every way in which it may run.
 *
 * A test file's kernels are the backend's own; the device is the emulated one here, and the real
 * one in tests/gpu (the same test files). Failures end the test through cmocka. One thread. */

#include "kernels/cuda/gpu.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct device {
    gpu *gpu;
    gpu_stream *stream;
} device;

/* cmocka's group setup and teardown: *state is the device *. */
int device_setup(void **state);
int device_teardown(void **state);

/* Device memory, freed by device_clear at the latest. device_space: what is in it is not to be
 * counted on (the emulated one fills it with 0xff: NaN). */
void *device_space(device *d, size_t bytes);
void *device_upload(device *d, const void *host, size_t bytes);
/* Waits for all that was queued, then copies. */
void device_download(device *d, void *host, const void *memory, size_t bytes);
/* Waits; nothing that was queued did what it must not. */
void device_finish(device *d);
void device_clear(device *d); /* waits, frees all memory of the two above */

/* run(d, ctx) in ways in which the emulated device may run: warps forward and copies early, warps
 * in reverse and copies late, then for each seed warps in random order with copies early and late
 * (and with every second seed streams late). Between two runs memory is cleared. What fails names
 * its way. seeds: 1 or more; KVFERRY_FULL=1 in the environment: eight times as many. The real
 * device: once. */
void device_each(device *d, unsigned seeds, void (*run)(device *d, void *ctx), void *ctx);

/* For what a device does from now on without device_each: streams run late, or early. The real
 * device: nothing. */
void device_run_late(bool late);

/* What the accesses of kernels cost, of the first block of the first launches since the last clear:
 * sectors of 32 bytes of device memory, wavefronts of shared memory, and the fewest that would do.
 * All 0 where nobody counts (but the checked emulation). kernel: what the launch calls it, or a
 * part of that. With KVFERRY_TRAFFIC=1 in the environment every place is shown. */
typedef struct device_traffic {
    uint64_t sectors, sectors_ideal, wavefronts, wavefronts_ideal;
} device_traffic;
void device_traffic_clear(device *d);
device_traffic device_traffic_of(device *d, const char *kernel);

/* Of what the test may use: the same numbers in each run of a test. 32 random bits; a float around
 * 0 whose every 61st is an outlier, 100 times as large. */
uint32_t device_random(uint64_t *state);
float device_float(uint64_t *state);
