#include "tests/unit/kernels/guard.h"

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE    4096
#define BESIDE  512 /* bytes of pattern that are looked at */
#define PATTERN 0xa5

typedef struct slot {
    uint8_t *start; /* GUARD_BYTES_MAX bytes that can be touched */
    uint8_t *bytes; /* what is taken */
    size_t count;
    bool frozen;
} slot;

static slot slots[GUARD_SLOTS];
static uint32_t taken;
static sigjmp_buf back;

static uint8_t *map_slot(void)
{
    uint8_t *all = mmap(NULL, GUARD_BYTES_MAX + (size_t)2 * PAGE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (all == MAP_FAILED || mprotect(all + PAGE, GUARD_BYTES_MAX, PROT_READ | PROT_WRITE) != 0)
        abort();
    return all + PAGE;
}

/* The pattern's part before what is taken, or after it, within the slot. */
static size_t beside(const slot *s, bool after, uint8_t **from_out)
{
    uint8_t *end = s->bytes + s->count;
    size_t room =
        after ? (size_t)(s->start + GUARD_BYTES_MAX - end) : (size_t)(s->bytes - s->start);
    size_t count = room < BESIDE ? room : BESIDE;

    *from_out = after ? end : s->bytes - count;
    return count;
}

void *guard_take(size_t bytes, size_t align, bool at_end, uint8_t fill)
{
    slot *s = &slots[taken++];
    uint8_t *from;

    if (taken > GUARD_SLOTS || bytes > GUARD_BYTES_MAX)
        abort();
    if (s->start == NULL)
        s->start = map_slot();
    s->count = bytes;
    s->bytes = at_end ? s->start + (GUARD_BYTES_MAX - bytes) / align * align : s->start;
    for (int after = 0; after < 2; after++) {
        size_t count = beside(s, after == 1, &from);
        memset(from, PATTERN, count);
    }
    memset(s->bytes, fill, bytes);
    return s->bytes;
}

static void protect(slot *s, int how)
{
    uint8_t *end = s->bytes + s->count;
    uintptr_t first = (uintptr_t)s->bytes / PAGE * PAGE;
    uintptr_t last = ((uintptr_t)end + PAGE - 1) / PAGE * PAGE;

    if (s->count > 0 && mprotect((void *)first, last - first, how) != 0)
        abort();
    s->frozen = how == PROT_READ;
}

void guard_freeze(void)
{
    for (uint32_t i = 0; i < taken; i++)
        if (!slots[i].frozen)
            protect(&slots[i], PROT_READ);
}

bool guard_intact(void)
{
    bool intact = true;
    uint8_t *from;

    for (uint32_t i = 0; i < taken; i++)
        for (int after = 0; after < 2; after++) {
            size_t count = beside(&slots[i], after == 1, &from);
            for (size_t b = 0; b < count; b++)
                intact = intact && from[b] == PATTERN;
        }
    return intact;
}

void guard_give_back(void)
{
    for (uint32_t i = 0; i < taken; i++)
        if (slots[i].frozen)
            protect(&slots[i], PROT_READ | PROT_WRITE);
    taken = 0;
}

static void on_fault(int number)
{
    (void)number;
    siglongjmp(back, 1);
}

bool guard_run(void (*run)(void *ctx), void *ctx)
{
    struct sigaction catch = {.sa_handler = on_fault}, before[2];
    volatile bool whole = false;

    if (sigaction(SIGSEGV, &catch, &before[0]) != 0 || sigaction(SIGBUS, &catch, &before[1]) != 0)
        abort();
    if (sigsetjmp(back, 1) == 0) {
        run(ctx);
        whole = true;
    }
    if (sigaction(SIGSEGV, &before[0], NULL) != 0 || sigaction(SIGBUS, &before[1], NULL) != 0)
        abort();
    return whole;
}
