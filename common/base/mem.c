#include "common/base/mem.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_long fail_at = -1;
static atomic_long live;

static bool must_fail(void)
{
    long left = atomic_load_explicit(&fail_at, memory_order_relaxed);
    if (left < 0)
        return false;
    if (left == 0)
        return true;
    atomic_fetch_sub(&fail_at, 1);
    return false;
}

void *pd_malloc(size_t bytes)
{
    if (must_fail())
        return NULL;
    void *memory = malloc(bytes != 0 ? bytes : 1);
    if (memory != NULL)
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return memory;
}

void *pd_calloc(size_t count, size_t bytes)
{
    size_t total;
    if (must_fail() || __builtin_mul_overflow(count, bytes, &total))
        return NULL;
    void *memory = calloc(count != 0 ? count : 1, bytes != 0 ? bytes : 1);
    if (memory != NULL)
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return memory;
}

void *pd_realloc(void *memory, size_t bytes)
{
    if (must_fail())
        return NULL;
    void *grown = realloc(memory, bytes != 0 ? bytes : 1);
    if (grown != NULL && memory == NULL)
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return grown;
}

char *pd_strndup(const char *text, size_t bytes)
{
    char *copy = pd_malloc(bytes + 1);
    if (copy == NULL)
        return NULL;
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    return copy;
}

char *pd_strdup(const char *text)
{
    return pd_strndup(text, strlen(text));
}

void pd_free(void *memory)
{
    if (memory == NULL)
        return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(memory);
}

char *pd_asprintf(const char *format, ...)
{
    va_list args, again;

    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *text = n < 0 ? NULL : pd_malloc((size_t)n + 1);
    if (text != NULL)
        vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    return text;
}

void pd_mem_fail_at(long n)
{
    atomic_store(&fail_at, n);
}

long pd_mem_live(void)
{
    return atomic_load(&live);
}

enum { CHUNK_BYTES = 16 * 1024, ALIGN = 16 };

typedef struct chunk {
    struct chunk *next;
    size_t used, size;
    _Alignas(ALIGN) unsigned char bytes[];
} chunk;

struct pd_arena {
    chunk *chunks;
    size_t left; /* of bytes_max */
};

pd_status pd_arena_create(size_t bytes_max, pd_arena **arena_out)
{
    pd_arena *arena = pd_calloc(1, sizeof *arena);
    if (arena == NULL)
        return PD_E_NOMEM;
    arena->left = bytes_max;
    *arena_out = arena;
    return PD_OK;
}

static chunk *add_chunk(pd_arena *arena, size_t size, bool on_top)
{
    if (size > SIZE_MAX - sizeof(chunk))
        return NULL;
    chunk *made = pd_calloc(1, sizeof *made + size);
    if (made == NULL)
        return NULL;
    made->size = size;
    if (on_top || arena->chunks == NULL) {
        made->next = arena->chunks;
        arena->chunks = made;
    } else {
        made->next = arena->chunks->next;
        arena->chunks->next = made;
    }
    return made;
}

void *pd_arena_alloc(pd_arena *arena, size_t bytes)
{
    if (bytes > arena->left || bytes > SIZE_MAX - ALIGN)
        return NULL;
    size_t rounded = (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    chunk *from = arena->chunks;
    /* what is large gets a chunk of its own, behind the one whose room is still used */
    if (rounded > CHUNK_BYTES / 4)
        from = add_chunk(arena, rounded, false);
    else if (from == NULL || from->size - from->used < rounded)
        from = add_chunk(arena, CHUNK_BYTES, true);
    if (from == NULL)
        return NULL;
    void *memory = from->bytes + from->used;
    from->used += rounded;
    arena->left -= bytes;
    return memory;
}

char *pd_arena_strndup(pd_arena *arena, const char *text, size_t bytes)
{
    char *copy = bytes < SIZE_MAX ? pd_arena_alloc(arena, bytes + 1) : NULL;
    if (copy != NULL)
        memcpy(copy, text, bytes);
    return copy;
}

void pd_arena_destroy(pd_arena *arena)
{
    if (arena == NULL)
        return;
    while (arena->chunks != NULL) {
        chunk *next = arena->chunks->next;
        pd_free(arena->chunks);
        arena->chunks = next;
    }
    pd_free(arena);
}
