#pragma once

/* kernels/cuda/emu/queue.h - what was queued to emulated streams, and who runs it.
 *
 * One thread runs kernels, copies and fills, a second one the calls of gpu_call; both live while a
 * device is open. Early: the oldest item that may run, at once. Late (emu_options.late_streams):
 * nothing until somebody waits; then items of any stream in a random legal order, until what was
 * waited for is reached. Inside the emulator only; any thread. */

#include "kernels/cuda/emu/memory.h"
#include "kernels/cuda/gpu.h"

struct gpu {
    gpu_info info;
    emu_memory *memory;
    uint32_t streams;
    bool broken;
    char why[1024];
    char last[GPU_ERROR_BYTES]; /* under the queue's lock, as broken and why */
};

/* The first device needs the threads, the last one ends them. */
PD_CHECKED pd_status emu_queue_open(void);
void emu_queue_close(void);

/* Held around what changes or reads a device's memory: no kernel runs meanwhile. */
void emu_memory_lock(void);
void emu_memory_unlock(void);

/* Waits until nothing of g is queued or runs. */
void emu_queue_drain(gpu *g);
/* For gpu_last_error. */
void emu_remember(gpu *g, const char *text);
/* The device is broken for good, logged once. Returns PD_E_INTERNAL. */
pd_status emu_break(gpu *g, const char *format, ...) __attribute__((format(printf, 2, 3)));
