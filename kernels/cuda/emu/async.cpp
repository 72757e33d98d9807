/* Copies into shared memory that go on by themselves: cp.async in groups a thread, and bulk copies
 * that complete on an mbarrier (PTX ISA, "Asynchronous copy" and "mbarrier"). */

#include "kernels/cuda/emu/block.h"
#include "kernels/cuda/emu/check.h"

#include <string.h>

/* --- cp.async --- */

static void land(const emu_copy *copy)
{
    if (copy->from != NULL)
        memcpy(copy->to, copy->from, copy->bytes);
    else
        memset(copy->to, 0, copy->bytes);
}

void emu_async(void *shared, const void *global, unsigned bytes, bool valid, const char *file,
               int line)
{
    emu_fiber *self = emu_fiber_self();
    emu_copy copy = {shared, valid ? global : NULL, bytes, self->group, false};

    if (((uintptr_t)shared & (bytes - 1)) != 0 || ((uintptr_t)copy.from & (bytes - 1)) != 0)
        emu_fail(file, line, "cu_async: %u bytes at an address that is no multiple of it", bytes);
    if (!emu_is_shared(shared, bytes))
        emu_fail(file, line, "cu_async: to what is not shared memory");
    emu_counted.async_copies++;
    if (valid)
        emu_check_access_of(self->linear, global, bytes, EMU_READ, file, line);
    emu_check_flight(shared, bytes, file, line);
    if (!emu_here.options.late_copies) {
        land(&copy);
        copy.landed = true;
        if (!emu_checked)
            return;
    }
    if (self->copies == EMU_COPIES_MAX)
        emu_fail(file, line, "cu_async: more than %d copies of a thread under way", EMU_COPIES_MAX);
    self->copy[self->copies++] = copy;
}

void emu_async_commit(void)
{
    emu_fiber_self()->group++;
}

void emu_async_wait(unsigned groups)
{
    emu_fiber *self = emu_fiber_self();
    unsigned kept = 0;

    for (unsigned i = 0; i < self->copies; i++) {
        const emu_copy *copy = &self->copy[i];
        /* what is not committed yet belongs to no group */
        if (copy->group >= self->group || self->group - copy->group <= groups) {
            self->copy[kept++] = *copy;
            continue;
        }
        if (!copy->landed)
            land(copy);
        emu_check_landed(copy->to, copy->bytes, self->linear);
    }
    self->copies = kept;
}

/* --- mbarrier: 8 bytes of shared memory --- */

struct barrier_state {
    uint64_t phase : 1, count : 12, pending : 12; /* arrivals */
    int64_t bytes : 23;                           /* still to come in this phase */
    uint64_t mark : 16;
};
#define BARRIER_MARK 0xba55u

static barrier_state barrier_load(const uint64_t *barrier, const char *file, int line)
{
    barrier_state state;

    if (((uintptr_t)barrier & 7) != 0 || !emu_is_shared(barrier, 8))
        emu_fail(file, line, "a barrier is 8 aligned bytes of shared memory");
    memcpy(&state, barrier, sizeof state);
    if (state.mark != BARRIER_MARK)
        emu_fail(file, line, "a barrier that was not initialised, or was written over");
    return state;
}

static void barrier_store(uint64_t *barrier, barrier_state state)
{
    memcpy(barrier, &state, sizeof state);
}

void emu_barrier_init(uint64_t *barrier, uint32_t count, const char *file, int line)
{
    barrier_state state = {};

    if (((uintptr_t)barrier & 7) != 0 || !emu_is_shared(barrier, 8))
        emu_fail(file, line, "a barrier is 8 aligned bytes of shared memory");
    if (count == 0 || count > EMU_THREADS_MAX)
        emu_fail(file, line, "a barrier of %u arrivals", count);
    state.count = state.pending = count & 0xfff;
    state.mark = BARRIER_MARK;
    barrier_store(barrier, state);
    emu_check_barrier_init(barrier);
}

void emu_fence_barrier(void)
{
}

static void wake_waiting(const uint64_t *barrier, barrier_state state)
{
    for (unsigned i = 0; i < emu_here.count; i++) {
        emu_fiber *fiber = &emu_here.fibers[i];
        if (fiber->wait == EMU_AT_BARRIER && fiber->barrier == barrier &&
            fiber->parity != state.phase) {
            emu_check_barrier_passed(barrier, fiber->linear);
            emu_wake(fiber);
        }
    }
}

static void phase_if_done(uint64_t *barrier, barrier_state state)
{
    bool done = state.pending == 0 && state.bytes == 0;

    if (done) {
        state.phase ^= 1;
        state.pending = state.count;
        emu_check_barrier_done(barrier);
    }
    barrier_store(barrier, state);
    if (done)
        wake_waiting(barrier, state);
}

void emu_barrier_arrive(uint64_t *barrier, uint32_t bytes, const char *file, int line)
{
    barrier_state state = barrier_load(barrier, file, line);

    if (state.pending == 0)
        emu_fail(file, line, "more arrivals than the barrier's %u in one phase",
                 (unsigned)state.count);
    if (bytes > (1u << 20) - 1)
        emu_fail(file, line, "a barrier expects 2^20 - 1 bytes at most");
    state.pending--;
    state.bytes += bytes;
    emu_check_barrier_arrive(barrier);
    phase_if_done(barrier, state);
}

void emu_barrier_wait(uint64_t *barrier, uint32_t parity, const char *file, int line)
{
    emu_fiber *self = emu_fiber_self();
    barrier_state state = barrier_load(barrier, file, line);

    if (parity > 1)
        emu_fail(file, line, "a parity of %u", parity);
    if (state.phase != parity) {
        emu_check_barrier_passed(barrier, self->linear);
        return;
    }
    self->barrier = barrier;
    self->parity = parity;
    self->file = file;
    self->line = line;
    self->wait = EMU_AT_BARRIER;
    emu_next();
}

/* --- bulk copies --- */

struct bulk_copy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint64_t *barrier;
    const char *file;
    int line;
};

#define BULK_MAX 4096 /* of a block, under way */
static bulk_copy bulk[BULK_MAX];
static unsigned bulk_count;

void emu_bulk_start(void)
{
    bulk_count = 0;
}

static void bulk_do(const bulk_copy *copy)
{
    barrier_state state = barrier_load(copy->barrier, copy->file, copy->line);

    memcpy(copy->to, copy->from, copy->bytes);
    emu_check_bulk_landed(copy->to, copy->bytes, copy->barrier);
    state.bytes -= copy->bytes;
    phase_if_done(copy->barrier, state);
}

bool emu_bulk_land(void)
{
    if (bulk_count == 0)
        return false;
    unsigned i = emu_random(&emu_here.random) % bulk_count;
    bulk_copy copy = bulk[i];
    bulk[i] = bulk[--bulk_count];
    bulk_do(&copy);
    return true;
}

void emu_bulk_copy(void *shared, const void *global, uint32_t bytes, uint64_t *barrier,
                   const char *file, int line)
{
    bulk_copy copy = {shared, global, bytes, barrier, file, line};

    barrier_load(barrier, file, line);
    if ((((uintptr_t)shared | (uintptr_t)global | bytes) & 15) != 0 || bytes == 0)
        emu_fail(file, line, "cu_bulk_copy: addresses and bytes are multiples of 16");
    if (!emu_is_shared(shared, bytes))
        emu_fail(file, line, "cu_bulk_copy: to what is not shared memory");
    emu_counted.async_copies++;
    emu_check_access_of(emu_self->linear, global, bytes, EMU_READ, file, line);
    emu_check_flight(shared, bytes, file, line);
    if (!emu_here.options.late_copies) {
        bulk_do(&copy);
        return;
    }
    if (bulk_count == BULK_MAX)
        emu_fail(file, line, "cu_bulk_copy: more than %d under way", BULK_MAX);
    bulk[bulk_count++] = copy;
}
