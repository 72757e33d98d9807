#pragma once

/* common/base/clock.h - the time. Deciding modules never call this: time is an argument there.
 * Any thread. */

#include <stdint.h>

#define PD_NS_PER_MS 1000000ull
#define PD_NS_PER_S  1000000000ull

#ifdef __cplusplus
extern "C" {
#endif

uint64_t pd_clock_now_ns(void); /* monotonic; for intervals and deadlines */
int64_t pd_clock_unix_ms(void); /* wall clock; for people only */

#ifdef __cplusplus
}
#endif
