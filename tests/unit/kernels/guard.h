#pragma once

/* tests/unit/kernels/guard.h - memory in which a byte too far is seen.
 *
 * A slot is memory between two pages that nobody may touch. What is taken lies against the one or
 * the other, and what is left of the slot beside it holds a pattern. So a read or a write past one
 * end ends in a fault, which guard_run turns into a result, and a write past the other end changes
 * the pattern. One thread. Aborts where the system gives no memory. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GUARD_SLOTS     40
#define GUARD_BYTES_MAX ((size_t)8 << 20) /* of one slot */

/* bytes filled with `fill`, at a multiple of align (a power of two, 64 at most). at_end: against
 * the page that follows, as near as align lets it. */
void *guard_take(size_t bytes, size_t align, bool at_end, uint8_t fill);
/* All that is taken can only be read, until it is given back. */
void guard_freeze(void);
/* Whether the patterns are as they were. */
bool guard_intact(void);
void guard_give_back(void); /* all */

/* False: it touched memory that it may not, and was left there; nothing that it holds may need to
 * be freed. */
bool guard_run(void (*run)(void *ctx), void *ctx);
