#pragma once

/* kernels/cuda/emu/emu.h - how the emulated GPU runs: what tests choose, and what they ask.
 *
 * Kernels run on fibers, one block at a time (docs/decisions/emulation.md). What a GPU leaves open
 * is chosen here: which warp runs first, when an asynchronous copy lands, which stream goes on.
 * Whatever a kernel does that a GPU would not forgive ends its launch and is a sticky error of the
 * device (gpu_broken), with the place in the kernel. One device's calls at a time. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum emu_order {
    EMU_FORWARD, /* the lowest warp and lane that can run; blocks from the first */
    EMU_REVERSE,
    EMU_RANDOM, /* a priority a warp, redrawn now and then: one may run far ahead of the others */
} emu_order;

typedef struct emu_options {
    uint64_t seed;
    emu_order order;
    /* cp.async and bulk copies land only when they are waited for; else when they are issued */
    bool late_copies;
    /* What is queued runs only when somebody waits, streams in any legal order. */
    bool late_streams;
} emu_options;

/* For launches from now on, on every emulated device of this process. Streams are empty. */
void emu_configure(const emu_options *options);
/* What was found first since the last emu_forget: one line, "" when nothing was. Borrowed until
 * the next call. */
const char *emu_found(void);
/* The devices are whole again: tests of the emulator go on after what they planted. */
void emu_forget(void);

typedef struct emu_counts {
    uint64_t launches, blocks, threads, switches, syncs, collectives, async_copies;
} emu_counts;
void emu_counts_get(emu_counts *counts_out); /* since the process began */

/* What a warp's accesses cost at a place of a kernel, of the checked form (traffic.h). */
typedef struct emu_traffic {
    const char *kernel;
    char place[256]; /* file:line */
    bool shared;     /* wavefronts; else sectors */
    uint64_t groups; /* of a warp's lanes at once */
    uint64_t actual, ideal;
} emu_traffic;
void emu_traffic_each(void (*each)(void *ctx, const emu_traffic *traffic), void *ctx);
void emu_traffic_clear(void); /* counts from 0 again, the first launches of each kernel */
bool emu_is_checked(void);

#ifdef __cplusplus
}
#endif
