#include "kernels/cuda/emu/block.h"

#include "kernels/cuda/emu/check.h"
#include "kernels/cuda/emu/symbols.h"
#include "kernels/cuda/emu/traffic.h"

#include "common/base/mem.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

emu_thread *emu_self;
emu_grid emu_grid_here;
emu_block emu_here;
emu_counts emu_counted;
thread_local bool emu_running;

unsigned char *emu_stacks; /* the lowest page of each is unmapped */
alignas(128) static unsigned char dynamic_shared[EMU_SHARED_MAX + 128];

/* splitmix64 (Steele, Lea, Flood 2014) */
uint32_t emu_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (uint32_t)((z ^ (z >> 31)) >> 16);
}

unsigned char *emu_dynamic_shared(void)
{
    return dynamic_shared;
}

bool emu_is_shared(const void *p, size_t bytes)
{
    const unsigned char *at = static_cast<const unsigned char *>(p);
    const emu_variable *v;

    if (at >= dynamic_shared && at < dynamic_shared + sizeof dynamic_shared)
        return at + bytes <= dynamic_shared + emu_grid_here.shared_bytes;
    v = emu_variable_at(p);
    if (v != NULL)
        return at + bytes <= v->at + v->bytes;
    return emu_variable_count == 0 && emu_in_module(p); /* without symbols: perhaps */
}

bool emu_is_runtime(const void *p)
{
    const unsigned char *at = static_cast<const unsigned char *>(p);
    const unsigned char *arguments = static_cast<const unsigned char *>(emu_here.arguments);

    return (at >= arguments && at < arguments + 4096) ||
           (p >= emu_here.fibers && p < emu_here.fibers + EMU_THREADS_MAX);
}

bool emu_is_checked(void)
{
    return emu_checked;
}

void emu_watch(const void *p, unsigned bytes, emu_use use, const char *file, int line)
{
    emu_check_access(p, bytes, use, file, line, NULL);
}

void emu_fence(void)
{
}

void emu_wake(emu_fiber *fiber)
{
    fiber->wait = EMU_RUNS;
    emu_here.ready[emu_warp_of(fiber)] |= 1u << fiber->linear % EMU_LANES;
}

static emu_fiber *choose(void)
{
    emu_block *b = &emu_here;

    if (b->options.order == EMU_RANDOM && b->warps > 1 && emu_random(&b->random) % 64 == 0) {
        unsigned i = emu_random(&b->random) % b->warps, j = emu_random(&b->random) % b->warps;
        uint8_t warp = b->order[i];
        b->order[i] = b->order[j];
        b->order[j] = warp;
    }
    for (unsigned i = 0; i < b->warps; i++) {
        unsigned warp = b->order[i];
        uint32_t ready = b->ready[warp];
        if (ready == 0)
            continue;
        unsigned lane = (unsigned)__builtin_ctz(ready);
        if (b->options.order == EMU_REVERSE)
            lane = 31 - (unsigned)__builtin_clz(ready);
        else if (b->options.order == EMU_RANDOM) {
            unsigned turn = emu_random(&b->random) % EMU_LANES;
            uint32_t turned = turn == 0 ? ready : ready >> turn | ready << (EMU_LANES - turn);
            lane = ((unsigned)__builtin_ctz(turned) + turn) % EMU_LANES;
        }
        return &b->fibers[warp * EMU_LANES + lane];
    }
    return NULL;
}

/* Of AddressSanitizer, where the program has it: it must know whose stack is run on. */
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void **fake, const void *bottom,
                                                          size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void *fake, const void **bottom_out,
                                                           size_t *bytes_out);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void *at, size_t bytes);
}

static void change_stack(emu_context *from, emu_context *to, const void *bottom, size_t bytes,
                         bool ends)
{
    void *fake = NULL;

    if (__sanitizer_start_switch_fiber != NULL)
        __sanitizer_start_switch_fiber(ends ? NULL : &fake, bottom, bytes);
    emu_context_switch(from, to);
    if (__sanitizer_finish_switch_fiber != NULL)
        __sanitizer_finish_switch_fiber(fake, NULL, NULL);
}

static unsigned char *stack_bottom(const emu_fiber *fiber)
{
    return emu_stacks + (size_t)fiber->linear * EMU_STACK_BYTES;
}

static void leave(emu_context *from, emu_fiber *to, bool ends)
{
    emu_counted.switches++;
    emu_here.ready[emu_warp_of(to)] &= ~(1u << to->linear % EMU_LANES);
    emu_self = to;
    change_stack(from, &to->context, stack_bottom(to), EMU_STACK_BYTES, ends);
}

/* The block is over, or given up. */
[[noreturn]] static void leave_block(emu_fiber *self)
{
    change_stack(&self->context, &emu_here.outside, emu_here.outside_bottom, emu_here.outside_bytes,
                 true);
    __builtin_unreachable();
}

/* "12 threads (first: 0) wait at cu_sync rows.cu:41", a line of text a place */
static void describe_waits(char *text, size_t size)
{
    static const char *const names[] = {"can run", "at cu_sync", "in a warp's operation",
                                        "at cu_barrier_wait", "have ended"};
    size_t used = 0;
    bool told[EMU_THREADS_MAX] = {false};
    int places = 0;

    text[0] = '\0';
    for (unsigned i = 0; i < emu_here.count && places < 6; i++) {
        emu_fiber *first = &emu_here.fibers[i];
        unsigned alike = 0;
        if (told[i])
            continue;
        for (unsigned k = i; k < emu_here.count; k++) {
            emu_fiber *other = &emu_here.fibers[k];
            if (other->wait != first->wait)
                continue;
            if (first->wait != EMU_EXITED && other->line != first->line)
                continue;
            told[k] = true;
            alike++;
        }
        places++;
        int wrote =
            snprintf(text + used, size - used, "%s%u thread%s (first: %u) %s",
                     used == 0 ? "" : "; ", alike, alike == 1 ? "" : "s", i, names[first->wait]);
        if (wrote > 0 && used + (size_t)wrote < size)
            used += (size_t)wrote;
        if (first->wait == EMU_EXITED || first->file == NULL)
            continue;
        wrote = snprintf(text + used, size - used, " %s:%d", first->file, first->line);
        if (wrote > 0 && used + (size_t)wrote < size)
            used += (size_t)wrote;
    }
}

void emu_next(void)
{
    emu_fiber *self = emu_fiber_self();
    emu_fiber *to = choose();

    while (to == NULL && emu_bulk_land())
        to = choose();
    if (to == NULL) {
        char waits[700];
        describe_waits(waits, sizeof waits);
        emu_fail(NULL, 0, "deadlock: %s", waits);
    }
    if (to == self)
        emu_here.ready[emu_warp_of(to)] &= ~(1u << to->linear % EMU_LANES);
    else
        leave(&self->context, to, self->wait == EMU_EXITED);
}

void emu_fail(const char *file, int line, const char *format, ...)
{
    emu_fiber *self = emu_fiber_self();
    char what[800], place[300] = "";
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (file != NULL)
        snprintf(place, sizeof place, "%s:%d: ", file, line);
    if (!emu_here.failed)
        snprintf(emu_here.found, sizeof emu_here.found,
                 "%s%s (kernel %s, block %u,%u,%u, thread %u,%u,%u)", place, what, emu_here.kernel,
                 emu_grid_here.block.x, emu_grid_here.block.y, emu_grid_here.block.z,
                 self->thread.x, self->thread.y, self->thread.z);
    emu_here.failed = true;
    leave_block(self);
}

/* Whoever may go on now that one less is waited for. */
static void sync_if_all(void)
{
    emu_block *b = &emu_here;

    if (b->at_sync == 0 || b->at_sync < b->live)
        return;
    for (unsigned i = 0; i < b->count; i++)
        if (b->fibers[i].wait == EMU_AT_SYNC)
            emu_wake(&b->fibers[i]);
    b->at_sync = 0;
    emu_counted.syncs++;
    emu_check_sync();
}

void emu_sync(const char *file, int line)
{
    emu_block *b = &emu_here;
    emu_fiber *self = emu_fiber_self();

    if (b->at_sync > 0 && (b->sync_line != line || strcmp(b->sync_file, file) != 0))
        emu_fail(file, line, "cu_sync: others of the block wait in another, %s:%d", b->sync_file,
                 b->sync_line);
    b->sync_file = self->file = file;
    b->sync_line = self->line = line;
    self->wait = EMU_AT_SYNC;
    b->at_sync++;
    sync_if_all();
    emu_next();
}

static void ended(void)
{
    emu_block *b = &emu_here;
    emu_fiber *self = emu_fiber_self();
    unsigned warp = emu_warp_of(self);
    uint32_t bit = 1u << self->linear % EMU_LANES;

    for (uint32_t left = b->meeting[warp]; left != 0; left &= left - 1) {
        emu_fiber *other = &b->fibers[warp * EMU_LANES + (unsigned)__builtin_ctz(left)];
        if ((other->op->mask & bit) != 0)
            emu_fail(other->file, other->line,
                     "lane %u waits for lane %u, which has ended (mask %08x)",
                     other->linear % EMU_LANES, self->linear % EMU_LANES, other->op->mask);
    }
    self->wait = EMU_EXITED;
    b->exited[warp] |= bit;
    b->live--;
    if (b->live == 0)
        leave_block(self);
    sync_if_all();
    emu_next();
}

static void fiber_main(void *unused)
{
    const void *bottom = NULL;
    size_t bytes = 0;

    (void)unused;
    if (__sanitizer_finish_switch_fiber != NULL)
        __sanitizer_finish_switch_fiber(NULL, &bottom, &bytes);
    if (emu_here.outside_bottom == NULL) { /* the block's first: it was come to from outside */
        emu_here.outside_bottom = bottom;
        emu_here.outside_bytes = bytes;
    }
    emu_here.call(emu_here.arguments);
    ended();
    __builtin_unreachable();
}

static void check_same(const emu_fiber *self, const emu_op *op, const emu_fiber *other)
{
    const emu_op *with = other->op;

    if (with->kind == op->kind && with->mask == op->mask && with->line == op->line &&
        with->file == op->file)
        return;
    emu_fail(op->file, op->line,
             "lanes %u and %u are not in the same operation: mask %08x here, mask %08x at %s:%d",
             self->linear % EMU_LANES, other->linear % EMU_LANES, op->mask, with->mask, with->file,
             with->line);
}

void emu_collective(emu_op *op)
{
    emu_block *b = &emu_here;
    emu_fiber *self = emu_fiber_self();
    unsigned warp = emu_warp_of(self), lane = self->linear % EMU_LANES;
    emu_fiber *fibers = &b->fibers[warp * EMU_LANES];
    unsigned there = b->count - warp * EMU_LANES;
    emu_op *ops[EMU_LANES];

    if ((op->mask >> lane & 1) == 0)
        emu_fail(op->file, op->line, "lane %u is not in its own mask %08x", lane, op->mask);
    if (there < EMU_LANES && op->mask >> there != 0)
        emu_fail(op->file, op->line, "mask %08x names lanes past the warp's %u", op->mask, there);
    if ((op->mask & b->exited[warp]) != 0)
        emu_fail(op->file, op->line, "mask %08x names lanes that have ended (%08x)", op->mask,
                 b->exited[warp]);
    for (uint32_t left = b->meeting[warp]; left != 0; left &= left - 1) {
        unsigned i = (unsigned)__builtin_ctz(left);
        if (((op->mask >> i & 1) != 0) || ((fibers[i].op->mask >> lane & 1) != 0))
            check_same(self, op, &fibers[i]);
    }
    self->op = op;
    self->file = op->file;
    self->line = op->line;
    b->meeting[warp] |= 1u << lane;
    if ((b->meeting[warp] & op->mask) != op->mask) {
        self->wait = EMU_AT_COLLECTIVE;
        emu_next();
        return;
    }
    for (unsigned i = 0; i < EMU_LANES; i++)
        ops[i] = (op->mask >> i & 1) != 0 ? fibers[i].op : NULL;
    emu_collective_compute(ops);
    emu_counted.collectives++;
    b->meeting[warp] &= ~op->mask;
    for (unsigned i = 0; i < EMU_LANES; i++)
        if ((op->mask >> i & 1) != 0 && i != lane)
            emu_wake(&fibers[i]);
    if (b->options.order == EMU_RANDOM && emu_random(&b->random) % 4 == 0) {
        emu_wake(self); /* the last to come is not always the first to go on */
        emu_next();
    }
}

static bool stacks_ready(void)
{
    if (emu_stacks == NULL) {
        void *memory = mmap(NULL, (size_t)EMU_THREADS_MAX * EMU_STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            return false;
        emu_stacks = static_cast<unsigned char *>(memory);
        for (size_t i = 0; i < EMU_THREADS_MAX; i++)
            if (mprotect(emu_stacks + i * EMU_STACK_BYTES, 4096, PROT_NONE) != 0)
                return false;
    }
    if (emu_here.fibers == NULL)
        emu_here.fibers = static_cast<emu_fiber *>(pd_calloc(EMU_THREADS_MAX, sizeof(emu_fiber)));
    return emu_here.fibers != NULL;
}

void emu_stacks_end(void)
{
    if (emu_here.fibers != NULL)
        for (size_t i = 0; i < EMU_THREADS_MAX; i++)
            emu_context_end(&emu_here.fibers[i].context);
    pd_free(emu_here.fibers);
    emu_here.fibers = NULL;
    if (emu_stacks != NULL)
        munmap(emu_stacks, (size_t)EMU_THREADS_MAX * EMU_STACK_BYTES);
    emu_stacks = NULL;
}

static void order_warps(emu_block *b)
{
    for (unsigned i = 0; i < b->warps; i++)
        b->order[i] = (uint8_t)(b->options.order == EMU_REVERSE ? b->warps - 1 - i : i);
    if (b->options.order != EMU_RANDOM)
        return;
    for (unsigned i = b->warps; i > 1; i--) {
        unsigned j = emu_random(&b->random) % i;
        uint8_t warp = b->order[i - 1];
        b->order[i - 1] = b->order[j];
        b->order[j] = warp;
    }
}

static void block_start(const emu_grid *grid, unsigned threads)
{
    emu_block *b = &emu_here;

    b->count = b->live = threads;
    b->warps = (threads + EMU_LANES - 1) / EMU_LANES;
    b->at_sync = 0;
    b->outside_bottom = NULL;
    if (__asan_unpoison_memory_region != NULL) /* what an earlier block left on its stacks */
        __asan_unpoison_memory_region(emu_stacks, (size_t)threads * EMU_STACK_BYTES);
    memset(b->exited, 0, sizeof b->exited);
    memset(b->meeting, 0, sizeof b->meeting);
    memset(b->ready, 0, sizeof b->ready);
    order_warps(b);
    for (unsigned i = 0; i < threads; i++) {
        emu_fiber *fiber = &b->fibers[i];
        fiber->linear = i;
        fiber->thread.x = i % grid->block_dim.x;
        fiber->thread.y = i / grid->block_dim.x % grid->block_dim.y;
        fiber->thread.z = i / grid->block_dim.x / grid->block_dim.y;
        fiber->file = NULL;
        fiber->line = 0;
        fiber->copies = fiber->group = fiber->atomics = 0;
        /* tops a cache line apart: else all emu_stacks would fight for the same sets of the cache
         */
        emu_context_make(&fiber->context, emu_stacks + (size_t)i * EMU_STACK_BYTES,
                         EMU_STACK_BYTES - i % 32 * 64, fiber_main, NULL);
        emu_wake(fiber);
    }
    memset(dynamic_shared, 0xff, grid->shared_bytes); /* every float there is a NaN */
    for (unsigned i = 0; i < emu_variable_count; i++)
        memset(emu_variables[i].at, 0xff, emu_variables[i].bytes);
    emu_bulk_start();
    emu_check_block(threads);
}

/* Stepping by what has no factor in common with the number comes to every block once. */
static uint64_t stride_of(uint64_t blocks, uint64_t *random)
{
    for (;;) {
        uint64_t stride = emu_random(random) % blocks + 1, a = stride, b = blocks;
        while (b != 0) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return stride;
    }
}

bool emu_run_launch(const char *kernel, const emu_grid *grid, void (*call)(const void *arguments),
                    const void *arguments)
{
    emu_block *b = &emu_here;
    unsigned threads = grid->block_dim.x * grid->block_dim.y * grid->block_dim.z;
    uint64_t blocks = (uint64_t)grid->grid_dim.x * grid->grid_dim.y * grid->grid_dim.z;
    uint64_t at = 0, step = 1;

    b->failed = false;
    if (!stacks_ready()) {
        snprintf(b->found, sizeof b->found, "no memory for the emu_stacks of emulated threads");
        return false;
    }
    b->kernel = kernel;
    b->call = call;
    b->arguments = arguments;
    if (b->options.order == EMU_REVERSE) {
        at = blocks - 1;
        step = blocks - 1;
    } else if (b->options.order == EMU_RANDOM) {
        step = stride_of(blocks, &b->random);
        at = emu_random(&b->random) % blocks;
    }
    emu_counted.launches++;
    emu_symbols_load();
    emu_check_launch();
    if (emu_checked)
        emu_traffic_start(kernel, *static_cast<const void *const *>(arguments));
    for (uint64_t i = 0; i < blocks && !b->failed; i++, at = (at + step) % blocks) {
        emu_grid_here = *grid;
        emu_grid_here.block.x = (unsigned)(at % grid->grid_dim.x);
        emu_grid_here.block.y = (unsigned)(at / grid->grid_dim.x % grid->grid_dim.y);
        emu_grid_here.block.z = (unsigned)(at / grid->grid_dim.x / grid->grid_dim.y);
        block_start(grid, threads);
        emu_counted.blocks++;
        emu_counted.threads += threads;
        emu_running = true;
        leave(&b->outside, choose(), false);
        emu_running = false;
        emu_traffic_end();
    }
    return !b->failed;
}
