#pragma once

/* common/kv/tile_sum.h - the hash of about 1 KiB of a KV block's content, as a sum.
 *
 * Word j of a tile (64 bits, little-endian) with key j adds
 *
 *     (a + 2^32) * (b + 2^32) mod 2^64,   a, b: the low and high 32 bits of word ^ key
 *
 * Because it is a plain sum, its parts can be made by any number of threads in any order, and a
 * token that is appended adds its words to what is there: nothing is read again. One 32-bit
 * multiply-add and two additions for 8 bytes, no chain from one word to the next, so a GPU makes it
 * at memory speed (a warp's shuffles add it up); on a CPU it vectorises without any tail form.
 * XXH3, whose inner loop is alike, has five forms by length and a last step over the whole, so
 * that a partial tile would have to be hashed anew for every token.
 *
 * What it finds: whatever changes within one 32-bit half of one word is always found, as the other
 * factor is from 2^32 up to 2^33 and so no change below 2^32 makes a multiple of 2^64; of other
 * changes one in 2^32 at the very worst (differences chosen for the keys), one in 2^64 of those
 * that mistakes make. It is no defence against an attacker: the keys are public.
 *
 * Any thread. */

#include <stddef.h>
#include <stdint.h>

#define PD_TILE_WORDS 128 /* keys; a longer run is the caller's to cut */

/* Key j is number j of a splitmix64 generator (common/base/hash) whose seed is 0x5ea1. */
extern const uint64_t pd_tile_keys[PD_TILE_WORDS];

/* The sum of words [first, first + words) of a tile, which lie at bytes (any alignment);
 * first + words <= PD_TILE_WORDS. */
uint64_t pd_tile_sum(const void *bytes, uint32_t words, uint32_t first);

/* The ways to make it that this machine has, the plain one first, the fastest last; NULL past the
 * end. keys: of the first word. For tests and benchmarks. */
typedef uint64_t pd_tile_sum_fn(const void *bytes, uint32_t words, const uint64_t *keys);
pd_tile_sum_fn *pd_tile_sum_at(uint32_t index);
