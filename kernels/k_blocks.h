#pragma once

/* kernels/k_blocks.h - what is where in the 256-weight blocks of Q4_K and Q6_K, as GGUF has them.
 *
 *   Q4_K, 144 bytes: f16 d, f16 dmin, 12 bytes of scales, 128 bytes of nibbles.
 *     Eight runs of 32 weights have a scale s and a minimum m of 6 bits each,
 *     w = (d * s) * q - dmin * m. Of bytes b[0 .. 11], runs 0 to 3 have the low 6 bits of b[run]
 *     and b[run + 4]; runs 4 to 7 a nibble of b[run + 4] (scales the low one, minima the high one)
 *     below the top 2 bits of b[run - 4] and b[run]. Two runs share 32 bytes: nibbles low, then
 *     high.
 *   Q6_K, 210 bytes: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, f16 d.
 *     w = d * (s * (q - 32)), a scale a run of 16. Each half of 128 weights has 64 and 32 bytes of
 *     its own: weight 32 t + i, t < 4, has nibble t / 2 of byte i + 32 (t % 2), pair t of byte i.
 *
 * Every product of a scale and a block's d is exact in f32 (11 bits by 6 or 8). Any thread. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KERN_K_WEIGHTS 256
#define KERN_K_RUNS    8 /* of 32 weights: a KERN_BLOCK each */

enum {
    KERN_Q4K_SCALES_AT = 4,
    KERN_Q4K_SCALES_BYTES = 12,
    KERN_Q4K_QUANTS_AT = 16,
    KERN_Q6K_HIGH_AT = 128,
    KERN_Q6K_SCALES_AT = 192,
    KERN_Q6K_D_AT = 208,
};

/* scales: the 12 bytes. */
static inline uint32_t kern_q4k_scale(const uint8_t *scales, uint32_t run)
{
    if (run < 4)
        return scales[run] & 63;
    return (uint32_t)(scales[run + 4] & 15) | (uint32_t)(scales[run - 4] >> 6) << 4;
}

static inline uint32_t kern_q4k_minimum(const uint8_t *scales, uint32_t run)
{
    if (run < 4)
        return scales[run + 4] & 63;
    return (uint32_t)(scales[run + 4] >> 4) | (uint32_t)(scales[run] >> 6) << 4;
}

/* 0 to 15, of weight i < 32 of a run. */
static inline uint32_t kern_q4k_quant(const uint8_t *block, uint32_t run, uint32_t i)
{
    return block[KERN_Q4K_QUANTS_AT + run / 2 * 32 + i] >> (run % 2 * 4) & 15;
}

/* 0 to 63, stands for -32 to 31; of weight i < 32 of a run. */
static inline uint32_t kern_q6k_quant(const uint8_t *block, uint32_t run, uint32_t i)
{
    uint32_t half = run / 4, part = run % 4;
    uint32_t low = block[half * 64 + part % 2 * 32 + i] >> (part / 2 * 4) & 15;
    uint32_t high = block[KERN_Q6K_HIGH_AT + half * 32 + i] >> (part * 2) & 3;

    return low | high << 4;
}

/* Of weights 0 to 15 (half 0) or 16 to 31 of a run. */
static inline int32_t kern_q6k_scale(const uint8_t *block, uint32_t run, uint32_t half)
{
    return (int8_t)block[KERN_Q6K_SCALES_AT + run * 2 + half];
}
