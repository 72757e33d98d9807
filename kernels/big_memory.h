#pragma once

/* kernels/big_memory.h - large memory straight from the system, in huge pages where it has them.
 *
 * For weights and activations, reserved once at start: reading weights from 4 KiB pages costs about
 * 30 % of the bandwidth. Zeroed, page aligned. Any thread. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct kern_memory {
    uint8_t *base;
    size_t bytes;
    size_t used;
} kern_memory;

/* PD_E_NOMEM (logged). bytes 0 is fine. */
PD_CHECKED pd_status kern_memory_map(size_t bytes, kern_memory *memory_out);
/* The first bytes of a file, read-only and shared with everyone who maps it; none of it is read
 * yet. PD_E_NOMEM (logged). */
PD_CHECKED pd_status kern_memory_map_file(int fd, size_t bytes, kern_memory *memory_out);
/* Bytes of it that are mapped in huge pages by now. 0 also where /proc does not tell. */
size_t kern_memory_huge_bytes(const kern_memory *memory);
/* Asks the system to put what is not in huge pages there, now. True: it did. */
bool kern_memory_collapse(const kern_memory *memory);
void kern_memory_unmap(kern_memory *memory);
/* The next bytes, 64-byte aligned; the sum must fit (pd_assert). */
void *kern_memory_take(kern_memory *memory, size_t bytes);
/* What a take of bytes uses up. */
size_t kern_memory_round(size_t bytes);

/* Parts of one memory, added up first and taken then, by the same function. */
typedef struct kern_carver {
    kern_memory *memory; /* NULL: only add up */
    size_t bytes;
} kern_carver;

/* [count], of size bytes each; NULL while it only adds up. */
static inline void *kern_carve(kern_carver *c, size_t count, size_t size)
{
    c->bytes += kern_memory_round(count * size);
    return c->memory == NULL ? NULL : kern_memory_take(c->memory, count * size);
}
