#include "kernels/cuda/emu/check.h"

#include "kernels/cuda/emu/block.h"
#include "kernels/cuda/emu/memory.h"
#include "kernels/cuda/emu/symbols.h"
#include "kernels/cuda/emu/traffic.h"

#include "common/base/mem.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define CLOCKS       (EMU_THREADS_MAX + 1) /* one more for bulk copies */
#define BULK_THREAD  EMU_THREADS_MAX
#define BARRIERS_MAX 64
#define PAGE_BYTES   4096u
#define PAGES_MAX    2048u /* of device memory that a launch touched; more is not watched */
#define STATIC_MAX   (256u * 1024)

struct mark { /* one access; epoch 0: none */
    uint32_t epoch;
    uint32_t clock : 20, thread : 11, atomic : 1;
};

struct shadow { /* of a byte */
    mark write, read, read_before;
    uint32_t flight; /* the block's number while a copy to it is under way */
};

struct barrier_clock {
    const uint64_t *barrier;
    uint32_t arriving[CLOCKS], done[CLOCKS];
};

struct page {
    uintptr_t number; /* 0: free */
    shadow bytes[PAGE_BYTES];
};

bool emu_checked;

static struct {
    uint32_t epoch, launch_epoch, block_epoch; /* epochs from here on are of this launch, block */
    uint32_t warp_clock[EMU_WARPS_MAX + 1];
    bool vectors; /* else epochs say all */
    uint32_t own[CLOCKS], joined[CLOCKS];
    unsigned barriers;
    shadow *shared; /* [EMU_SHARED_MAX + STATIC_MAX] */
    uint32_t (*known)[CLOCKS];
    barrier_clock *barrier;
    page *pages; /* [PAGES_MAX], open addressing */
    unsigned pages_used;
} c;

static void *map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    pd_assert(memory != MAP_FAILED);
    return memory;
}

void emu_check_launch(void)
{
    if (!emu_checked)
        return;
    if (c.shared == NULL) {
        c.shared = static_cast<shadow *>(map((EMU_SHARED_MAX + STATIC_MAX) * sizeof(shadow)));
        c.known = static_cast<uint32_t(*)[CLOCKS]>(map(sizeof *c.known * CLOCKS));
        c.barrier = static_cast<barrier_clock *>(map(BARRIERS_MAX * sizeof *c.barrier));
        c.pages = static_cast<page *>(map(PAGES_MAX * sizeof *c.pages));
    }
    if (c.epoch > UINT32_MAX / 2) { /* far off: begin again with nothing remembered */
        memset(c.shared, 0, (EMU_SHARED_MAX + STATIC_MAX) * sizeof(shadow));
        c.epoch = 0;
    }
    if (c.pages_used > 0)
        madvise(c.pages, PAGES_MAX * sizeof *c.pages, MADV_DONTNEED);
    c.pages_used = 0;
    c.launch_epoch = c.epoch + 1;
}

static void new_epoch(void)
{
    c.epoch++;
    memset(c.warp_clock, 0, sizeof c.warp_clock);
    /* what was before is ordered by its epoch; what comes is known to nobody yet */
    for (unsigned t = 0; c.vectors && t < emu_here.count; t++)
        c.own[t]++;
}

void emu_check_block(unsigned threads)
{
    (void)threads;
    if (!emu_checked)
        return;
    c.vectors = false;
    c.barriers = 0;
    c.own[BULK_THREAD] = 1;
    new_epoch();
    c.block_epoch = c.epoch;
}

/* From here on a clock a thread: each knows of its warp what the warp's epochs say. */
static void use_vectors(void)
{
    if (c.vectors)
        return;
    c.vectors = true;
    for (unsigned t = 0; t < emu_here.count; t++) {
        uint32_t past = c.warp_clock[t / EMU_LANES];
        memset(c.known[t], 0, sizeof c.known[t]);
        for (unsigned u = t / EMU_LANES * EMU_LANES;
             u < emu_here.count && u / EMU_LANES == t / EMU_LANES; u++)
            c.known[t][u] = past == 0 ? 0 : past; /* clocks below past + 1 */
        c.own[t] = past + 1;
    }
}

void emu_check_sync(void)
{
    if (emu_checked)
        new_epoch();
}

static void join(uint32_t *into, const uint32_t *from)
{
    for (unsigned u = 0; u < emu_here.count; u++)
        into[u] = into[u] > from[u] ? into[u] : from[u];
    into[BULK_THREAD] =
        into[BULK_THREAD] > from[BULK_THREAD] ? into[BULK_THREAD] : from[BULK_THREAD];
}

void emu_check_sync_warp(uint32_t mask)
{
    unsigned first = emu_self->linear / EMU_LANES * EMU_LANES;
    unsigned lanes = emu_here.count - first < EMU_LANES ? emu_here.count - first : EMU_LANES;
    uint32_t live =
        (lanes == EMU_LANES ? UINT32_MAX : (1u << lanes) - 1) & ~emu_here.exited[first / EMU_LANES];
    uint32_t *all = c.joined;

    if (!emu_checked)
        return;
    if (!c.vectors && mask == live) {
        c.warp_clock[first / EMU_LANES]++;
        return;
    }
    use_vectors();
    memset(all, 0, sizeof c.joined);
    for (unsigned i = 0; i < lanes; i++)
        if ((mask >> i & 1) != 0) {
            join(all, c.known[first + i]);
            all[first + i] = c.own[first + i];
        }
    for (unsigned i = 0; i < lanes; i++)
        if ((mask >> i & 1) != 0) {
            memcpy(c.known[first + i], all, sizeof c.joined);
            c.own[first + i]++;
        }
}

/* --- mbarriers --- */

static barrier_clock *clock_of(const uint64_t *barrier)
{
    for (unsigned i = 0; i < c.barriers; i++)
        if (c.barrier[i].barrier == barrier)
            return &c.barrier[i];
    return NULL;
}

void emu_check_barrier_init(const uint64_t *barrier)
{
    if (!emu_checked)
        return;
    use_vectors();
    barrier_clock *b = clock_of(barrier);
    if (b == NULL) {
        if (c.barriers == BARRIERS_MAX)
            emu_fail(NULL, 0, "more than %d barriers in a block", BARRIERS_MAX);
        b = &c.barrier[c.barriers++];
    }
    memset(b, 0, sizeof *b);
    b->barrier = barrier;
}

void emu_check_barrier_arrive(const uint64_t *barrier)
{
    unsigned t = emu_self->linear;
    barrier_clock *b = emu_checked ? clock_of(barrier) : NULL;

    if (b == NULL)
        return;
    join(b->arriving, c.known[t]);
    b->arriving[t] = c.own[t]++;
}

void emu_check_barrier_done(const uint64_t *barrier)
{
    barrier_clock *b = emu_checked ? clock_of(barrier) : NULL;

    if (b != NULL)
        memcpy(b->done, b->arriving, sizeof b->done);
}

void emu_check_barrier_passed(const uint64_t *barrier, unsigned thread)
{
    barrier_clock *b = emu_checked ? clock_of(barrier) : NULL;

    if (b != NULL)
        join(c.known[thread], b->done);
}

/* --- where a byte's marks are --- */

enum where { OWN, SHARED, DEVICE };

static shadow *shared_shadow(const void *at)
{
    const unsigned char *p = static_cast<const unsigned char *>(at);
    const unsigned char *dynamic = emu_dynamic_shared();

    if (p >= dynamic && p < dynamic + EMU_SHARED_MAX)
        return &c.shared[p - dynamic];
    const emu_variable *v = emu_variable_at(at);
    if (v == NULL || v->offset + v->bytes > STATIC_MAX)
        return NULL;
    return &c.shared[EMU_SHARED_MAX + v->offset + (size_t)(p - v->at)];
}

static shadow *device_shadow(uintptr_t at)
{
    uintptr_t number = at / PAGE_BYTES;
    unsigned i = (unsigned)(number * 0x9e3779b97f4a7c15 >> 40) % PAGES_MAX;

    while (c.pages[i].number != number) {
        if (c.pages[i].number == 0) {
            if (c.pages_used >= PAGES_MAX * 3 / 4)
                return NULL;
            c.pages_used++;
            c.pages[i].number = number;
            break;
        }
        i = (i + 1) % PAGES_MAX;
    }
    return &c.pages[i].bytes[at % PAGE_BYTES];
}

/* --- races --- */

static mark mark_of(unsigned thread, bool atomic)
{
    mark m;

    m.epoch = c.epoch;
    m.clock = (c.vectors ? c.own[thread] : c.warp_clock[thread / EMU_LANES] + 1) & 0xfffff;
    m.thread = thread & 0x7ff;
    m.atomic = atomic;
    return m;
}

static bool ordered(mark before, unsigned thread, bool shared)
{
    if (shared && before.epoch < c.block_epoch)
        return true; /* another block's memory */
    if (before.epoch < c.launch_epoch || before.thread == thread)
        return before.epoch < c.launch_epoch || before.epoch >= c.block_epoch;
    if (before.epoch < c.block_epoch)
        return false; /* another block of this launch */
    if (before.epoch != c.epoch)
        return true;
    if (c.vectors)
        return c.known[thread][before.thread] >= before.clock;
    return before.thread / EMU_LANES == thread / EMU_LANES &&
           before.clock <= c.warp_clock[thread / EMU_LANES];
}

struct access {
    unsigned thread;
    const void *at;
    emu_use use;
    const char *file;
    int line;
    const void *code;
    bool shared;
};

[[noreturn]] static void report(const access *a, const char *what)
{
    char place[400];

    if (a->file != NULL)
        emu_fail(a->file, a->line, "%s", what);
    emu_source_of(a->code, place, sizeof place);
    emu_fail(NULL, 0, "%s: %s", place, what);
}

[[noreturn]] static void race(const access *a, mark before, bool before_wrote)
{
    char what[300], where[64] = "device memory";
    const emu_variable *v = emu_variable_at(a->at);
    const unsigned char *dynamic = emu_dynamic_shared();
    const unsigned char *p = static_cast<const unsigned char *>(a->at);

    if (v != NULL)
        snprintf(where, sizeof where, "%s, byte %u", v->name, (unsigned)(p - v->at));
    else if (p >= dynamic && p < dynamic + EMU_SHARED_MAX)
        snprintf(where, sizeof where, "dynamic shared memory, byte %u", (unsigned)(p - dynamic));
    snprintf(what, sizeof what, "a race: thread %u %s what %s %u%s %s with nothing between (%s)",
             a->thread, a->use == EMU_READ ? "reads" : "writes",
             before.thread == BULK_THREAD ? "a bulk copy, as thread" : "thread", before.thread,
             before.epoch < c.block_epoch ? " of another block" : "",
             before_wrote ? "wrote" : "read", where);
    report(a, what);
}

static void touch(shadow *s, const access *a)
{
    if (s->flight != 0 && s->flight == c.block_epoch)
        report(a, "touches bytes whose asynchronous copy is under way");
    if (s->write.epoch != 0 && !ordered(s->write, a->thread, a->shared) &&
        !(a->use == EMU_ATOMIC && s->write.atomic))
        race(a, s->write, true);
    if (a->use == EMU_READ) {
        if (s->read.epoch != c.epoch || s->read.thread != a->thread)
            s->read_before = s->read;
        s->read = mark_of(a->thread, false);
        return;
    }
    if (s->read.epoch != 0 && !ordered(s->read, a->thread, a->shared))
        race(a, s->read, false);
    if (s->read_before.epoch != 0 && !ordered(s->read_before, a->thread, a->shared))
        race(a, s->read_before, false);
    s->write = mark_of(a->thread, a->use == EMU_ATOMIC);
}

/* Neighbours that were alike stay alike: most accesses are of values, not of bytes. */
static void touch_all(shadow *s, unsigned bytes, access *a)
{
    const unsigned char *p = static_cast<const unsigned char *>(a->at);
    shadow before = s[0];

    touch(&s[0], a);
    for (unsigned i = 1; i < bytes; i++) {
        if (memcmp(&s[i], &before, sizeof before) == 0) {
            s[i] = s[0];
            continue;
        }
        a->at = p + i;
        touch(&s[i], a);
    }
}

static void check(access *a, unsigned bytes)
{
    const unsigned char *p = static_cast<const unsigned char *>(a->at);
    shadow *s = shared_shadow(p);

    a->shared = s != NULL;
    if (s != NULL) {
        if (!emu_is_shared(p, bytes))
            report(a, "past the end of shared memory");
        touch_all(s, bytes, a);
        emu_traffic_log(a->thread, p, bytes, true, a->file, a->line, a->code);
        return;
    }
    emu_place place = emu_memory_place(p, bytes);
    if (place == EMU_NOWHERE) {
        /* constants, arguments and what a thread sees of itself; the runtime's own */
        if (a->file == NULL && (emu_in_module(p) || emu_is_runtime(p)))
            return;
        report(a, "touches what is neither device memory nor shared memory, or past its end");
    }
    for (unsigned done = 0, part; done < bytes; done += part) {
        unsigned page_left = PAGE_BYTES - (unsigned)((uintptr_t)(p + done) % PAGE_BYTES);
        part = bytes - done < page_left ? bytes - done : page_left;
        a->at = p + done;
        s = device_shadow((uintptr_t)a->at);
        if (s != NULL)
            touch_all(s, part, a);
    }
    emu_traffic_log(a->thread, p, bytes, false, a->file, a->line, a->code);
}

void emu_check_access(const void *at, unsigned bytes, emu_use use, const char *file, int line,
                      const void *code)
{
    emu_stack stack = emu_stack_of(at);
    if (stack == EMU_STACK_OWN)
        return;
    access a = {emu_self->linear, at, use, file, line, code, false};
    if (stack == EMU_STACK_OTHER)
        report(&a, "touches another thread's own variables");
    check(&a, bytes);
}

void emu_check_access_of(unsigned thread, const void *at, unsigned bytes, emu_use use,
                         const char *file, int line)
{
    access a = {thread, at, use, file, line, NULL, false};

    if (emu_checked)
        check(&a, bytes);
}

/* --- copies --- */

void emu_check_flight(const void *at, unsigned bytes, const char *file, int line)
{
    access a = {emu_self->linear, at, EMU_WRITE, file, line, NULL, false};
    shadow *s;

    if (!emu_checked)
        return;
    check(&a, bytes);
    s = shared_shadow(at);
    for (unsigned i = 0; i < bytes; i++)
        s[i].flight = c.block_epoch;
}

static void landed(const void *at, unsigned bytes, unsigned thread)
{
    shadow *s = shared_shadow(at);

    for (unsigned i = 0; i < bytes; i++) {
        s[i].flight = 0;
        s[i].write = mark_of(thread, false);
    }
}

void emu_check_landed(const void *at, unsigned bytes, unsigned thread)
{
    if (emu_checked)
        landed(at, bytes, thread);
}

void emu_check_bulk_landed(const void *at, unsigned bytes, const uint64_t *barrier)
{
    barrier_clock *b = emu_checked ? clock_of(barrier) : NULL;

    if (b == NULL)
        return;
    landed(at, bytes, BULK_THREAD);
    b->arriving[BULK_THREAD] = c.own[BULK_THREAD]++;
}
