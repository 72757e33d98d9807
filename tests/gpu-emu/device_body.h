#pragma once

/* tests/gpu-emu/device_body.h - device.h's two bodies (device_emu.c, ../gpu/device_cuda.c) and what
 * they share (device.c). Of these files alone. */

#include "tests/gpu-emu/device.h"

/* device.c: opens the one device, and ends it with whatever memory a failed test has left. */
device *device_open(void); /* NULL: it failed, logged */
void device_close(device *d);
void device_free_all(device *d);

/* A body's: ends the test where the status, or what the device has found, is bad. */
void device_check(device *d, pd_status status, const char *what);
/* A body's: fresh memory is filled with 0xff, unless the device does so itself. */
void device_poison(device *d, void *memory, size_t bytes);
