#pragma once

/* common/base/hash.h - XXH3 behind one door (libxxhash), and random bits.
 * Values are the same on every machine. Any thread. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pd_hash128 {
    uint64_t lo, hi;
} pd_hash128;

uint64_t pd_hash64(const void *bytes, size_t len, uint64_t seed);
pd_hash128 pd_hash128_of(const void *bytes, size_t len, uint64_t seed);

/* A well mixed function of its argument (splitmix64's finaliser); for tables and test seeds. */
uint64_t pd_mix64(uint64_t value);
/* The next number of a splitmix64 generator; *state is any seed. */
uint64_t pd_random_next(uint64_t *state);
/* 64 bits from the kernel, never 0: incarnations and ids. */
uint64_t pd_random_id(void);

#ifdef __cplusplus
}
#endif
