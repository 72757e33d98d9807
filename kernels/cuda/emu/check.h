#pragma once

/* kernels/cuda/emu/check.h - the checked form: every access of a kernel is seen.
 *
 * Kernel files compiled with -fsanitize=thread (the sanitizer itself is not linked: tsan.cpp has
 * its callbacks) and EMU_CHECKED=1. What is looked for:
 *   - accesses outside shared memory, the device's allocations and the thread's own stack;
 *   - two threads of a block on a byte, one of them writing, with nothing between them that orders
 *     memory: cu_sync for the block, cu_sync_warp for a warp, an mbarrier's phase. Shuffles,
 *     ballots, mma and ldmatrix order none;
 *   - two blocks of a launch on a byte of device memory, one of them writing, unless both are
 *     atomic;
 *   - any touch of a byte whose asynchronous copy is under way.
 * Each byte remembers its last write and two last reads. Happens-before is kept in epochs, and in
 * a vector clock a thread (Mattern 1989) once a block uses what epochs cannot say: mbarriers and
 * partial warps. */

#include "kernels/cuda/emu/run.h"

void emu_check_launch(void); /* starts */
void emu_check_block(unsigned threads);
void emu_check_sync(void); /* all live threads met */
void emu_check_sync_warp(uint32_t mask);
void emu_check_barrier_init(const uint64_t *barrier);
void emu_check_barrier_arrive(const uint64_t *barrier);
void emu_check_barrier_done(const uint64_t *barrier); /* its phase is complete */
void emu_check_barrier_passed(const uint64_t *barrier, unsigned thread);

/* On whose behalf: the running thread's. code: for the report where file is NULL. */
void emu_check_access(const void *at, unsigned bytes, emu_use use, const char *file, int line,
                      const void *code);
/* of another thread of the block (what a warp does together) */
void emu_check_access_of(unsigned thread, const void *at, unsigned bytes, emu_use use,
                         const char *file, int line);
/* An asynchronous copy to [at, at + bytes) begins; ends, seen by thread (cp.async) or by who passes
 * the barrier (bulk copies). */
void emu_check_flight(const void *at, unsigned bytes, const char *file, int line);
void emu_check_landed(const void *at, unsigned bytes, unsigned thread);
void emu_check_bulk_landed(const void *at, unsigned bytes, const uint64_t *barrier);

/* The program was linked with kernels in the checked form. */
extern bool emu_checked;
