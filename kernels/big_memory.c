#include "kernels/big_memory.h"

#include "common/base/log.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

#define HUGE_PAGE ((size_t)2 << 20)
#define ALIGNMENT ((size_t)64)

size_t kern_memory_round(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

pd_status kern_memory_map(size_t bytes, kern_memory *memory_out)
{
    size_t rounded = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;

    if (bytes == 0) {
        *memory_out = (kern_memory){0};
        return PD_OK;
    }
    if (rounded < bytes)
        return PD_E_NOMEM;
    void *base = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        pd_log_error("msg=\"kernels: no memory: %m\" bytes=%zu", rounded);
        return PD_E_NOMEM;
    }
    (void)madvise(base, rounded, MADV_HUGEPAGE); /* slower without, but right */
    *memory_out = (kern_memory){.base = base, .bytes = rounded};
    return PD_OK;
}

/* A huge page of a file is mapped as one only where its place in memory and in the file are the
 * same part of a huge page: the file's start goes to a multiple of one. */
pd_status kern_memory_map_file(int fd, size_t bytes, kern_memory *memory_out)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), rounded = (bytes + page - 1) / page * page;

    pd_assert(bytes > 0);
    if (rounded < bytes || rounded + HUGE_PAGE < rounded)
        return PD_E_NOMEM;
    uint8_t *room = mmap(NULL, rounded + HUGE_PAGE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        pd_log_error("msg=\"kernels: no addresses: %m\" bytes=%zu", rounded);
        return PD_E_NOMEM;
    }
    size_t before = (HUGE_PAGE - (uintptr_t)room % HUGE_PAGE) % HUGE_PAGE;
    uint8_t *base = room + before;
    if (before > 0)
        munmap(room, before);
    munmap(base + rounded, HUGE_PAGE - before);
    if (mmap(base, rounded, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        pd_log_error("msg=\"kernels: a file cannot be mapped: %m\" bytes=%zu", bytes);
        munmap(base, rounded);
        return PD_E_NOMEM;
    }
    (void)madvise(base, rounded, MADV_HUGEPAGE); /* file systems with large folios read into them */
    *memory_out = (kern_memory){.base = base, .bytes = rounded};
    return PD_OK;
}

size_t kern_memory_huge_bytes(const kern_memory *memory)
{
    static const char *const kinds[] = {"AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"};
    FILE *maps = fopen("/proc/self/smaps", "re");
    size_t huge_bytes = 0;
    char line[512];
    bool within = false;

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long first, end;
        unsigned long long kib;
        char kind[32];
        if (sscanf(line, "%lx-%lx ", &first, &end) == 2)
            within =
                first >= (uintptr_t)memory->base && end <= (uintptr_t)memory->base + memory->bytes;
        if (!within || sscanf(line, "%31s %llu kB", kind, &kib) != 2)
            continue;
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
            huge_bytes += strcmp(kind, kinds[i]) == 0 ? kib << 10 : 0;
    }
    if (maps != NULL)
        fclose(maps);
    return huge_bytes;
}

bool kern_memory_collapse(const kern_memory *memory)
{
    return memory->base != NULL && madvise(memory->base, memory->bytes, MADV_COLLAPSE) == 0;
}

void kern_memory_unmap(kern_memory *memory)
{
    if (memory->base != NULL)
        munmap(memory->base, memory->bytes);
    *memory = (kern_memory){0};
}

void *kern_memory_take(kern_memory *memory, size_t bytes)
{
    size_t rounded = kern_memory_round(bytes);

    pd_assert(rounded <= memory->bytes - memory->used);
    void *taken = memory->base + memory->used;
    memory->used += rounded;
    return taken;
}
