#pragma once

/* kernels/cuda/emu/block.h - one block of threads at a time: who runs, who waits where.
 *
 * Inside the emulator only. One OS thread. Everything is static memory, made for the largest block
 * that a GPU takes; the stacks are mapped once and committed as they are touched. */

#include "kernels/cuda/emu/emu.h"
#include "kernels/cuda/emu/fiber.h"
#include "kernels/cuda/emu/run.h"

#define EMU_THREADS_MAX 1024
#define EMU_LANES       32
#define EMU_WARPS_MAX   (EMU_THREADS_MAX / EMU_LANES)
#define EMU_SHARED_MAX  (227u * 1024) /* of a block, sm_90 */
#define EMU_STACK_BYTES (256u * 1024)
#define EMU_COPIES_MAX  256 /* of a thread, under way */

enum emu_wait : uint8_t { EMU_RUNS, EMU_AT_SYNC, EMU_AT_COLLECTIVE, EMU_AT_BARRIER, EMU_EXITED };

struct emu_copy { /* cp.async that has not landed */
    void *to;
    const void *from; /* NULL: zeros */
    unsigned bytes, group;
    bool landed; /* early, and kept for the checks */
};

struct emu_fiber : emu_thread {
    emu_context context;
    emu_wait wait;
    const char *file; /* of what it waits for, or did last */
    int line;
    emu_op *op;
    uint64_t *barrier;
    uint32_t parity;
    unsigned copies, group, atomics;
    emu_copy copy[EMU_COPIES_MAX];
};

struct emu_block {
    emu_fiber *fibers; /* [EMU_THREADS_MAX] */
    unsigned count, live, warps, at_sync;
    const char *sync_file;
    int sync_line;
    uint32_t ready[EMU_WARPS_MAX], exited[EMU_WARPS_MAX], meeting[EMU_WARPS_MAX];
    uint8_t order[EMU_WARPS_MAX]; /* warps by priority */
    uint64_t random;
    emu_context outside; /* who runs the block */
    const void *outside_bottom;
    size_t outside_bytes;
    emu_options options;
    void (*call)(const void *arguments);
    const void *arguments;
    const char *kernel;
    bool failed;
    char found[1024];
};

extern emu_block emu_here;
extern emu_counts emu_counted;

static inline emu_fiber *emu_fiber_self(void)
{
    return static_cast<emu_fiber *>(emu_self);
}

static inline unsigned emu_warp_of(const emu_fiber *fiber)
{
    return fiber->linear / EMU_LANES;
}

uint32_t emu_random(uint64_t *state);
/* Leaves the calling fiber, which waits, for one that can run. */
void emu_next(void);
void emu_wake(emu_fiber *fiber);

/* Runs every block of a launch; false when something was found (emu_here.found). */
bool emu_run_launch(const char *kernel, const emu_grid *grid, void (*call)(const void *arguments),
                    const void *arguments);
/* A number of the launch, as its name in reports. */
void emu_stacks_end(void);

/* async.cpp: one bulk copy that is under way lands; false: there is none. */
bool emu_bulk_land(void);
void emu_bulk_start(void); /* of a block */
/* warp.cpp: all lanes of mask are here with the same op. */
void emu_collective_compute(emu_op *ops[EMU_LANES]);
/* This thread runs a fiber now. */
extern thread_local bool emu_running;
enum emu_stack { EMU_STACK_NONE, EMU_STACK_OWN, EMU_STACK_OTHER };
extern unsigned char *emu_stacks; /* [EMU_THREADS_MAX][EMU_STACK_BYTES] */
static inline emu_stack emu_stack_of(const void *p)
{
    size_t at = (size_t)(static_cast<const unsigned char *>(p) - emu_stacks);

    if (at >= (size_t)EMU_THREADS_MAX * EMU_STACK_BYTES)
        return EMU_STACK_NONE;
    return at / EMU_STACK_BYTES == emu_self->linear ? EMU_STACK_OWN : EMU_STACK_OTHER;
}
/* What the emulator itself keeps for a kernel: its arguments, threadIdx and the like. */
bool emu_is_runtime(const void *p);
/* Whether [p, p + bytes) is shared memory. */
bool emu_is_shared(const void *p, size_t bytes);
