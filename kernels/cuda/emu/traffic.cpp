#include "kernels/cuda/emu/traffic.h"

#include "kernels/cuda/emu/block.h"
#include "kernels/cuda/emu/symbols.h"

#include "common/base/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SITES_MAX    2048u
#define BLOCK_SITES  512u /* of one launch */
#define SLOTS        1024u
#define LOG_MAX      (1u << 20)
#define LAUNCHES_MAX 4u /* logged of one kernel */
#define KERNELS_MAX  128u

struct site {
    const char *kernel, *file;
    int line;
    const void *function, *code;
    bool shared;
    uint64_t groups, actual, ideal;
};

struct entry {
    uint64_t at;
    uint32_t visit;
    uint16_t site, thread;
    uint8_t bytes;
};

static struct {
    bool on;
    const char *kernel;
    const void *function; /* of a template's instances, which */
    site sites[SITES_MAX];
    unsigned count;
    unsigned local[BLOCK_SITES], locals; /* this block's, as indices of sites */
    uint16_t slots[SLOTS];               /* index of local + 1, by hash */
    uint32_t (*visits)[EMU_THREADS_MAX]; /* [BLOCK_SITES] */
    entry *log;
    unsigned logged;
    struct {
        const void *function;
        unsigned launches;
    } kernels[KERNELS_MAX];
    unsigned kernel_count;
} t;

static bool enough_of(const void *function)
{
    for (unsigned i = 0; i < t.kernel_count; i++)
        if (t.kernels[i].function == function)
            return t.kernels[i].launches++ >= LAUNCHES_MAX;
    if (t.kernel_count == KERNELS_MAX)
        return true;
    t.kernels[t.kernel_count].function = function;
    t.kernels[t.kernel_count++].launches = 1;
    return false;
}

static void *map(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    pd_assert(memory != MAP_FAILED);
    return memory;
}

void emu_traffic_start(const char *kernel, const void *function)
{
    t.on = !enough_of(function);
    if (!t.on)
        return;
    if (t.log == NULL) {
        t.log = static_cast<entry *>(map(LOG_MAX * sizeof *t.log));
        t.visits = static_cast<uint32_t(*)[EMU_THREADS_MAX]>(map(BLOCK_SITES * sizeof *t.visits));
    }
    t.kernel = kernel;
    t.function = function;
    t.locals = t.logged = 0;
    memset(t.slots, 0, sizeof t.slots);
}

static bool is_site(unsigned local, const char *file, int line, const void *code, bool shared)
{
    const site *s = &t.sites[t.local[local]];

    return s->line == line && s->code == code && s->shared == shared && s->file == file;
}

/* The site's number in this block; -1: too many. */
static int local_of(const char *file, int line, const void *code, bool shared)
{
    unsigned slot = (unsigned)(((uintptr_t)code + (unsigned)line * 2u + shared) * 0x9e3779b1u >> 7);
    unsigned i = 0;

    slot %= SLOTS;
    for (; t.slots[slot] != 0; slot = (slot + 1) % SLOTS)
        if (is_site(t.slots[slot] - 1u, file, line, code, shared))
            return t.slots[slot] - 1;
    while (i < t.count &&
           !(t.sites[i].function == t.function && t.sites[i].line == line &&
             t.sites[i].code == code && t.sites[i].shared == shared && t.sites[i].file == file))
        i++;
    if (i == SITES_MAX || t.locals == BLOCK_SITES)
        return -1;
    if (i == t.count) {
        site s = {t.kernel, file, line, t.function, code, shared, 0, 0, 0};
        t.sites[t.count++] = s;
    }
    memset(t.visits[t.locals], 0, sizeof t.visits[0]);
    t.local[t.locals++] = i;
    t.slots[slot] = (uint16_t)t.locals;
    return (int)t.locals - 1;
}

void emu_traffic_log(unsigned thread, const void *at, unsigned bytes, bool shared, const char *file,
                     int line, const void *code)
{
    int local;

    if (!t.on || bytes > 16 || t.logged == LOG_MAX)
        return;
    local = local_of(file, line, file != NULL ? NULL : code, shared);
    if (local < 0)
        return;
    entry *e = &t.log[t.logged++];
    e->at = (uintptr_t)at;
    e->visit = t.visits[local][thread]++;
    e->site = (uint16_t)local;
    e->thread = (uint16_t)thread;
    e->bytes = (uint8_t)bytes;
}

static int by_group(const void *left, const void *right)
{
    const entry *a = static_cast<const entry *>(left), *b = static_cast<const entry *>(right);

    if (a->site != b->site)
        return a->site < b->site ? -1 : 1;
    if (a->thread / EMU_LANES != b->thread / EMU_LANES)
        return a->thread / EMU_LANES < b->thread / EMU_LANES ? -1 : 1;
    if (a->visit != b->visit)
        return a->visit < b->visit ? -1 : 1;
    return a->thread < b->thread ? -1 : a->thread > b->thread;
}

/* Distinct numbers among count, which are sorted here. */
static unsigned distinct(uint64_t *numbers, unsigned count)
{
    unsigned different = 0;

    for (unsigned i = 1; i < count; i++) {
        uint64_t number = numbers[i];
        unsigned j = i;
        for (; j > 0 && numbers[j - 1] > number; j--)
            numbers[j] = numbers[j - 1];
        numbers[j] = number;
    }
    for (unsigned i = 0; i < count; i++)
        different += i == 0 || numbers[i] != numbers[i - 1];
    return different;
}

static void count_sectors(site *s, const entry *group, unsigned lanes)
{
    uint64_t sectors[EMU_LANES * 2];
    unsigned count = 0, bytes = 0;
    uint64_t first = group[0].at;

    for (unsigned i = 0; i < lanes; i++) {
        bytes += group[i].bytes;
        first = group[i].at < first ? group[i].at : first;
        sectors[count++] = group[i].at / 32;
        sectors[count++] = (group[i].at + group[i].bytes - 1) / 32;
    }
    s->actual += distinct(sectors, count);
    s->ideal += (first % 32 + bytes + 31) / 32;
}

static void count_wavefronts(site *s, const entry *group, unsigned lanes)
{
    unsigned at_once = group[0].bytes == 16 ? 8 : group[0].bytes == 8 ? 16 : 32;

    for (unsigned from = 0; from < EMU_LANES; from += at_once) {
        uint64_t words[EMU_LANES * 4];
        unsigned count = 0, asked[32] = {0}, most = 0;
        for (unsigned i = 0; i < lanes; i++) {
            unsigned lane = group[i].thread % EMU_LANES;
            if (lane < from || lane >= from + at_once)
                continue;
            for (unsigned b = 0; b < group[i].bytes; b += 4)
                words[count++] = (group[i].at + b) / 4;
        }
        if (count == 0)
            continue;
        distinct(words, count);
        for (unsigned i = 0; i < count; i++)
            if (i == 0 || words[i] != words[i - 1]) {
                unsigned *bank = &asked[words[i] % 32];
                ++*bank;
                most = *bank > most ? *bank : most;
            }
        s->actual += most;
        s->ideal++;
    }
}

void emu_traffic_end(void)
{
    if (!t.on)
        return;
    t.on = false;
    qsort(t.log, t.logged, sizeof *t.log, by_group);
    for (unsigned from = 0, to; from < t.logged; from = to) {
        const entry *e = &t.log[from];
        for (to = from + 1; to < t.logged && to - from < EMU_LANES; to++)
            if (t.log[to].site != e->site || t.log[to].visit != e->visit ||
                t.log[to].thread / EMU_LANES != e->thread / EMU_LANES)
                break;
        site *s = &t.sites[t.local[e->site]];
        s->groups++;
        if (s->shared)
            count_wavefronts(s, e, to - from);
        else
            count_sectors(s, e, to - from);
    }
}

void emu_traffic_each(void (*each)(void *ctx, const emu_traffic *traffic), void *ctx)
{
    for (unsigned i = 0; i < t.count; i++) {
        const site *s = &t.sites[i];
        emu_traffic traffic = {s->kernel, "", s->shared, s->groups, s->actual, s->ideal};
        if (s->groups == 0)
            continue;
        if (s->file != NULL)
            snprintf(traffic.place, sizeof traffic.place, "%s:%d", s->file, s->line);
        else
            emu_source_of(s->code, traffic.place, sizeof traffic.place);
        each(ctx, &traffic);
    }
}

void emu_traffic_clear(void)
{
    t.count = t.locals = t.logged = t.kernel_count = 0;
}
