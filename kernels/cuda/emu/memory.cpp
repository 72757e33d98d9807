#include "kernels/cuda/emu/memory.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALIGN       256u
#define GUARD_BYTES 256u
#define GUARD_WORD  0xffc0deadu /* a NaN */
#define RANGES_MAX  16384u
#define DEVICES_MAX 64
/* Of a large allocation only both ends are filled, so that a pool of gigabytes stays sparse. */
#define FILL_MAX  (256ull << 20)
#define FILL_EDGE (32ull << 20)

struct range {
    unsigned char *at;
    uint64_t bytes;
    emu_place place;
    void *mapping; /* imported: what to unmap; NULL: an allocation */
    size_t mapping_bytes;
};

struct emu_memory {
    unsigned char *base;
    uint64_t bytes, used;
    int fd;
    ino_t inode;
    range *ranges; /* by address */
    unsigned count;
};

static emu_memory *devices[DEVICES_MAX];
static range last; /* that was asked for */

pd_status emu_memory_create(uint64_t bytes, emu_memory **memory_out)
{
    emu_memory *m = static_cast<emu_memory *>(pd_calloc(1, sizeof *m));
    struct stat info;
    void *base;
    unsigned slot = 0;

    while (slot < DEVICES_MAX && devices[slot] != NULL)
        slot++;
    if (m == NULL || slot == DEVICES_MAX) {
        pd_free(m);
        return PD_E_NOMEM;
    }
    m->bytes = bytes;
    m->ranges = static_cast<range *>(pd_malloc(RANGES_MAX * sizeof *m->ranges));
    m->fd = memfd_create("kvferry-emulated-gpu", MFD_CLOEXEC);
    if (m->ranges == NULL || m->fd < 0 || ftruncate(m->fd, (off_t)bytes) != 0 ||
        fstat(m->fd, &info) != 0)
        goto failed;
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m->fd, 0);
    if (base == MAP_FAILED)
        goto failed;
    m->base = static_cast<unsigned char *>(base);
    m->inode = info.st_ino;
    devices[slot] = m;
    *memory_out = m;
    return PD_OK;
failed:
    pd_log_error("msg=\"emulated gpu: no memory file: %m\" bytes=%llu", (unsigned long long)bytes);
    if (m->fd >= 0)
        close(m->fd);
    pd_free(m->ranges);
    pd_free(m);
    return PD_E_NOMEM;
}

void emu_memory_destroy(emu_memory *memory)
{
    if (memory == NULL)
        return;
    pd_assert(memory->count == 0);
    for (unsigned i = 0; i < DEVICES_MAX; i++)
        if (devices[i] == memory)
            devices[i] = NULL;
    munmap(memory->base, memory->bytes);
    close(memory->fd);
    pd_free(memory->ranges);
    pd_free(memory);
}

uint64_t emu_memory_free_bytes(const emu_memory *memory)
{
    return memory->bytes - memory->used;
}

/* The pattern lies at whole words of the memory: the zones of two neighbours overlap. */
static unsigned char guard_byte(const unsigned char *at)
{
    return (unsigned char)(GUARD_WORD >> ((uintptr_t)at & 3) * 8);
}

static void guard_fill(unsigned char *at)
{
    for (unsigned i = 0; i < GUARD_BYTES; i++)
        at[i] = guard_byte(at + i);
}

static bool guard_whole(const unsigned char *at)
{
    unsigned i = 0;
    uint32_t word;

    for (; ((uintptr_t)(at + i) & 3) != 0; i++)
        if (at[i] != guard_byte(at + i))
            return false;
    for (; i + 4 <= GUARD_BYTES; i += 4) {
        memcpy(&word, at + i, sizeof word);
        if (word != GUARD_WORD)
            return false;
    }
    for (; i < GUARD_BYTES; i++)
        if (at[i] != guard_byte(at + i))
            return false;
    return true;
}

/* The first range that ends behind at. */
static unsigned range_after(const emu_memory *m, const unsigned char *at)
{
    unsigned lo = 0, hi = m->count;

    while (lo < hi) {
        unsigned middle = (lo + hi) / 2;
        if (m->ranges[middle].at + m->ranges[middle].bytes <= at)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

static void range_insert(emu_memory *m, unsigned i, range r)
{
    memmove(&m->ranges[i + 1], &m->ranges[i], (m->count - i) * sizeof *m->ranges);
    m->ranges[i] = r;
    m->count++;
}

static uint64_t room_of(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN + GUARD_BYTES;
}

static void fill(unsigned char *at, uint64_t bytes)
{
    if (bytes <= FILL_MAX) {
        memset(at, 0xff, bytes);
        return;
    }
    memset(at, 0xff, FILL_EDGE);
    memset(at + bytes - FILL_EDGE, 0xff, FILL_EDGE);
}

void *emu_memory_alloc(emu_memory *memory, uint64_t bytes, bool host)
{
    unsigned char *at = memory->base + GUARD_BYTES;
    unsigned i = 0;

    if (memory->count == RANGES_MAX || bytes > memory->bytes)
        return NULL;
    bytes += bytes == 0;
    for (; i < memory->count; i++) { /* the first gap that takes it */
        const range *r = &memory->ranges[i];
        if (r->mapping != NULL)
            continue;
        if (at + room_of(bytes) <= r->at)
            break;
        at = r->at + room_of(r->bytes);
    }
    if (at + room_of(bytes) > memory->base + memory->bytes)
        return NULL;
    guard_fill(at - GUARD_BYTES);
    fill(at, bytes);
    guard_fill(at + bytes);
    range r = {at, bytes, host ? EMU_PINNED : EMU_DEVICE, NULL, 0};
    range_insert(memory, range_after(memory, at), r);
    memory->used += room_of(bytes);
    return at;
}

static range *range_at(emu_memory *m, const void *at)
{
    unsigned i = range_after(m, static_cast<const unsigned char *>(at));

    return i < m->count && m->ranges[i].at == at ? &m->ranges[i] : NULL;
}

static void range_remove(emu_memory *m, range *r)
{
    memset(&last, 0, sizeof last);
    m->count--;
    memmove(r, r + 1, (size_t)(m->ranges + m->count - r) * sizeof *r);
}

bool emu_memory_free(emu_memory *memory, void *at)
{
    range *r = range_at(memory, at);

    if (r == NULL || r->mapping != NULL)
        return false;
    memory->used -= room_of(r->bytes);
    /* whole pages go back; what still reads there reads zeros, and the checks see it */
    uint64_t from = ((uint64_t)(r->at - memory->base) + 4095) / 4096 * 4096;
    uint64_t to = (uint64_t)(r->at - memory->base + r->bytes) / 4096 * 4096;
    memset(r->at, 0xff, r->bytes < 4096 ? r->bytes : 4096);
    if (to > from)
        (void)!fallocate(memory->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                         (off_t)(to - from));
    range_remove(memory, r);
    return true;
}

void emu_memory_check(const emu_memory *memory, char *text, size_t size)
{
    text[0] = '\0';
    for (unsigned i = 0; i < memory->count; i++) {
        const range *r = &memory->ranges[i];
        if (r->mapping != NULL)
            continue;
        bool before = guard_whole(r->at - GUARD_BYTES);
        if (before && guard_whole(r->at + r->bytes))
            continue;
        snprintf(text, size, "wrote %s an allocation of %llu bytes",
                 before ? "behind" : "in front of", (unsigned long long)r->bytes);
        guard_fill(r->at - GUARD_BYTES);
        guard_fill(r->at + r->bytes);
        return;
    }
}

emu_place emu_memory_place(const void *at, uint64_t bytes)
{
    const unsigned char *from = static_cast<const unsigned char *>(at);

    if (from >= last.at && from + bytes <= last.at + last.bytes)
        return last.place;
    for (const emu_memory *m : devices) {
        if (m == NULL)
            continue;
        unsigned i = range_after(m, from);
        if (i < m->count && from >= m->ranges[i].at &&
            from + bytes <= m->ranges[i].at + m->ranges[i].bytes) {
            last = m->ranges[i];
            return last.place;
        }
    }
    return EMU_NOWHERE;
}

/* --- another process's --- */

struct handle {
    char magic[8];
    int32_t pid, fd;
    uint64_t inode, offset, bytes;
};
static_assert(sizeof(handle) <= EMU_HANDLE_BYTES, "a handle's bytes");
static const char handle_magic[8] = {'k', 'v', 'e', 'm', 'u', 'g', 'p', '1'};

pd_status emu_memory_export(const emu_memory *memory, const void *at,
                            unsigned char handle_out[EMU_HANDLE_BYTES])
{
    const range *r = range_at(const_cast<emu_memory *>(memory), at);
    handle h;

    if (r == NULL || r->mapping != NULL || r->place != EMU_DEVICE) {
        pd_log_error("msg=\"emulated gpu: what is exported is no allocation of it\"");
        return PD_E_INVALID;
    }
    memset(&h, 0, sizeof h);
    memcpy(h.magic, handle_magic, sizeof h.magic);
    h.pid = (int32_t)getpid();
    h.fd = memory->fd;
    h.inode = memory->inode;
    h.offset = (uint64_t)(r->at - memory->base);
    h.bytes = r->bytes;
    memset(handle_out, 0, EMU_HANDLE_BYTES);
    memcpy(handle_out, &h, sizeof h);
    return PD_OK;
}

pd_status emu_memory_import(emu_memory *memory, const unsigned char bytes_of[EMU_HANDLE_BYTES],
                            uint64_t bytes, void **at_out)
{
    char path[64];
    handle h;
    struct stat info;
    void *mapping = MAP_FAILED;
    int fd;

    memcpy(&h, bytes_of, sizeof h);
    if (memcmp(h.magic, handle_magic, sizeof h.magic) != 0 || bytes > h.bytes || bytes == 0 ||
        h.pid == (int32_t)getpid()) {
        pd_log_error("msg=\"emulated gpu: a handle of other memory, or of this process\"");
        return PD_E_INVALID;
    }
    if (memory->count == RANGES_MAX)
        return PD_E_NOMEM;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h.pid, (int)h.fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) {
        pd_log_error("msg=\"emulated gpu: the exporting process's memory: %m\" path=%s", path);
        if (fd >= 0)
            close(fd);
        return PD_E_PEER;
    }
    uint64_t from = h.offset / 4096 * 4096, length = h.offset - from + bytes;
    if (info.st_ino == h.inode && (uint64_t)info.st_size >= h.offset + bytes)
        mapping = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)from);
    close(fd);
    if (mapping == MAP_FAILED) {
        pd_log_error("msg=\"emulated gpu: the exporting process has no such memory\"");
        return PD_E_PEER;
    }
    range r = {static_cast<unsigned char *>(mapping) + (h.offset - from), bytes, EMU_DEVICE,
               mapping, length};
    range_insert(memory, range_after(memory, r.at), r);
    *at_out = r.at;
    return PD_OK;
}

bool emu_memory_unimport(emu_memory *memory, void *at)
{
    range *r = range_at(memory, at);

    if (r == NULL || r->mapping == NULL)
        return false;
    munmap(r->mapping, r->mapping_bytes);
    range_remove(memory, r);
    return true;
}
