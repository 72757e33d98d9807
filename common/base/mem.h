#pragma once

/* common/base/mem.h - the door to the heap: counted, and failing on demand in tests.
 *
 * Every allocation of the project goes through here, so that a test can fail the n-th one and
 * check that nothing was lost. Any thread. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PD_MALLOC __attribute__((malloc, warn_unused_result))

PD_MALLOC void *pd_malloc(size_t bytes);
PD_MALLOC void *pd_calloc(size_t count, size_t bytes); /* zeroed; NULL when the product overflows */
__attribute__((warn_unused_result)) void *pd_realloc(void *memory, size_t bytes);
PD_MALLOC char *pd_strdup(const char *text);
PD_MALLOC char *pd_strndup(const char *text, size_t bytes); /* copies exactly bytes, adds a NUL */
void pd_free(void *memory);                                 /* NULL is fine */

/* malloc'ed "printf"; NULL when memory is out. The caller frees with pd_free. */
char *pd_asprintf(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Tests: the allocation numbered n from now (0 is the next) and all after it fail; -1 ends it. */
void pd_mem_fail_at(long n);
/* Allocations made and not yet freed. */
long pd_mem_live(void);

/* An arena: many small things with one end. Memory is zeroed. */
typedef struct pd_arena pd_arena;
/* bytes_max bounds what the arena will ever hand out. */
PD_CHECKED pd_status pd_arena_create(size_t bytes_max, pd_arena **arena_out);
/* NULL when bytes_max or the heap is exhausted. 16-byte aligned. */
void *pd_arena_alloc(pd_arena *arena, size_t bytes);
char *pd_arena_strndup(pd_arena *arena, const char *text, size_t bytes);
void pd_arena_destroy(pd_arena *arena);

#ifdef __cplusplus
}
#endif
