#include "kernels/big_memory.h"

#include "common/base/log.h"

#include <sys/mman.h>

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
