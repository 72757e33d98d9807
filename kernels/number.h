#pragma once

/* kernels/number.h - numbers as every backend must see them: 16-bit floats, exp, the lane tree.
 *
 * Plain C that defines results bit for bit; the fast backends do the same operations in the same
 * order on vectors. Nothing here depends on the C library's mathematics but fmaf, which is exact
 * everywhere. Any thread. */

#include "common/base/status.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define KERN_LANES 16 /* of a lane tree, whatever the machine's vectors hold */
#define KERN_BLOCK 32 /* columns that share an activation scale */

static inline uint32_t kern_bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float kern_float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float kern_bf16_to_f32(uint16_t half)
{
    return kern_float_of((uint32_t)half << 16);
}

/* Exact, subnormals included. */
static inline float kern_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = (half >> 10) & 0x1f;
    uint32_t fraction = half & 0x3ff;

    if (exponent == 0x1f) /* a NaN comes out quiet, as the hardware's conversion makes it */
        return kern_float_of(sign | 0x7f800000 | (fraction << 13) | (fraction != 0 ? 0x400000 : 0));
    if (exponent == 0) { /* fraction * 2^-24 is exact in f32 */
        float magnitude = (float)fraction * 0x1p-24f;
        return kern_float_of(sign | kern_bits_of(magnitude));
    }
    return kern_float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
}

/* Rounds to nearest even. What is too large becomes the largest finite number (65504), so that one
 * outlier cannot make a whole context infinite; NaN stays NaN. */
static inline uint16_t kern_f32_to_f16(float value)
{
    uint32_t bits = kern_bits_of(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    uint32_t magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477fe000) /* 65504 */
        return (uint16_t)(sign | 0x7bff);
    if (magnitude < 0x38800000) { /* below 2^-14: adding 0.5 leaves multiples of 2^-24 */
        float shifted = kern_float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (kern_bits_of(shifted) - 0x3f000000));
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

#define KERN_EXP_MIN        -87.0f /* below, exp is taken as exp(-87), 1.6e-38 */
#define KERN_EXP_MAX        88.0f
#define KERN_EXP_LOG2E      0x1.715476p+0f
#define KERN_EXP_MAGIC      12582912.0f /* 1.5 * 2^23: adding it rounds to an integer */
#define KERN_EXP_MAGIC_BITS 0x4b400000
#define KERN_LN2_HIGH       0x1.62e4p-1f
#define KERN_LN2_LOW        0x1.7f7d1cp-20f

/* e^value: Taylor's series to the 7th power around the nearest multiple of ln 2; relative error
 * about 1e-7. The order of operations is the definition. */
static inline float kern_exp(float value)
{
    float x = value > KERN_EXP_MIN ? value : KERN_EXP_MIN;
    x = x < KERN_EXP_MAX ? x : KERN_EXP_MAX;
    float shifted = fmaf(x, KERN_EXP_LOG2E, KERN_EXP_MAGIC);
    float n = shifted - KERN_EXP_MAGIC;
    float r = fmaf(n, -KERN_LN2_HIGH, x);
    r = fmaf(n, -KERN_LN2_LOW, r);
    float p = 1.0f / 5040;
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t power = kern_bits_of(shifted) - kern_bits_of(KERN_EXP_MAGIC) + 127;
    return p * kern_float_of(power << 23);
}

/* Adds 16 lanes: halves onto halves. */
static inline float kern_tree_sum(float *lanes)
{
    for (int half = KERN_LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}
