#pragma once

/* common/transfer/copy.h - copies KV blocks into another process's pool.
 *
 * Who copies does not read the target again, and it is more than a cache holds: with AVX-512 or
 * AVX2 the bytes go past the caches (non-temporal stores), which saves reading each target line
 * before it is written: Intel 64 and IA-32 Architectures Optimization Reference Manual,
 * "Non-temporal stores". What is below a few KiB is copied as usual. Any thread. */

#include <stddef.h>

/* from and to do not overlap. All is written, and seen by whoever hears of it afterwards by any
 * means, when it returns. */
void pd_copy_out(void *to, const void *from, size_t bytes);
/* The widest way that this processor has, or none of them (memcpy), for tests. */
typedef enum pd_copy_way { PD_COPY_PLAIN, PD_COPY_AVX2, PD_COPY_AVX512 } pd_copy_way;
pd_copy_way pd_copy_best(void);
/* way is not wider than pd_copy_best. */
void pd_copy_by(pd_copy_way way, void *to, const void *from, size_t bytes);
