#pragma once

/* common/kv/tile_sum_ways.h - the loops behind common/kv/tile_sum. Which file fills the last two is
 * Meson's choice by processor: tile_sum_x86.c, or tile_sum_any.c for machines without one. */

#include "common/kv/tile_sum.h"

#include <string.h>

static inline uint64_t pd_tile_sum_plain(const void *bytes, uint32_t words, const uint64_t *keys)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, (const unsigned char *)bytes + 8 * (size_t)i, sizeof word);
        word ^= keys[i];
        sum += ((1ull << 32) + (uint32_t)word) * ((1ull << 32) + (word >> 32));
    }
    return sum;
}

pd_tile_sum_fn *pd_tile_sum_best(void);
/* The ways beside the plain one that this machine has, by rising speed; NULL past the end. */
pd_tile_sum_fn *pd_tile_sum_fast(uint32_t index);
