#pragma once

/* kernels/kv_row.h - the numbers of KV with one byte a value: what a token's K or V of one head
 * becomes, and what is read from it.
 *
 * Plain C that defines the bytes; loops that compilers vectorise, so that each instruction set
 * builds its own from here. count is any; a row has one scale, over its values alone.
 *
 *   int8       code in -127 .. 127, value = scale * code; scale = max|x| / 127
 *   fp8_e4m3   sign, 4 bits of exponent, 3 of fraction, as in the OCP 8-bit floating point
 *              specification (OFP8 1.0), without its infinity-free NaN (0x7f), which is never
 *              written. Read with f16's bias of 15 rather than 7, so that a code is f16 bits
 *              shifted by 7: at most 1.75, which stands for 448; value = scale * code read so, and
 *              scale = max|x| / 1.75
 *
 * Codes are rounded to nearest even. As with f16, what is above 65504 counts as 65504. A row whose
 * largest value is below 1e-35 is zeros, its scale 0. A NaN makes its row's scale NaN (0x7fc00000)
 * and all its codes 0: the row reads as NaN. */

#include "kernels/number.h"

#define KERN_KV_MAX       65504.0f
#define KERN_E4M3_LARGEST 1.75f
#define KERN_E4M3_CODES   0x7f /* codes of one sign, without 0x7f: it would be 1.875 */

static inline float kern_e4m3_to_f32(uint8_t code)
{
    return kern_f16_to_f32((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7));
}

/* |value| <= 1.75; what is more counts as that. */
static inline uint8_t kern_f32_to_e4m3(float value)
{
    uint32_t bits = kern_bits_of(value), magnitude = bits & 0x7fffffff;
    /* below 2^-14: adding 64 leaves multiples of 2^-17 */
    uint32_t small =
        kern_bits_of(kern_float_of(magnitude < 0x38800000 ? magnitude : 0) + 64.0f) - 0x42800000;
    uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    uint32_t code = magnitude < 0x38800000 ? small : (rounded - 0x38000000) >> 20;

    code = code < KERN_E4M3_CODES ? code : KERN_E4M3_CODES - 1;
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

/* The largest magnitude, at most 65504; a NaN if there is one. */
static inline float kern_kv_largest(const float *x, uint32_t count)
{
    uint32_t largest = 0; /* ordered as |x| is, and a NaN is above everything */

    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = kern_bits_of(x[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest > 0x7f800000)
        return kern_float_of(0x7fc00000);
    return kern_float_of(largest) < KERN_KV_MAX ? kern_float_of(largest) : KERN_KV_MAX;
}

/* Rows that are all zeros, or all NaN: true, and written. */
static inline bool kern_kv_row_is_flat(float largest, uint32_t count, void *codes, float *scale)
{
    if (largest >= 1e-35f)
        return false;
    memset(codes, 0, count);
    *scale = largest == largest ? 0 : largest;
    return true;
}

static inline void kern_kv_row_int8(const float *x, uint32_t count, int8_t *codes, float *scale)
{
    float largest = kern_kv_largest(x, count), inverse = 127.0f / largest;

    if (kern_kv_row_is_flat(largest, count, codes, scale))
        return;
    for (uint32_t i = 0; i < count; i++) {
        float code = x[i] * inverse;
        code = code < 127.0f ? code : 127.0f;
        code = code > -127.0f ? code : -127.0f;
        codes[i] = (int8_t)(int32_t)(kern_bits_of(code + KERN_EXP_MAGIC) - KERN_EXP_MAGIC_BITS);
    }
    *scale = largest / 127.0f;
}

static inline void kern_kv_row_e4m3(const float *x, uint32_t count, uint8_t *codes, float *scale)
{
    float largest = kern_kv_largest(x, count), inverse = KERN_E4M3_LARGEST / largest;

    if (kern_kv_row_is_flat(largest, count, codes, scale))
        return;
    for (uint32_t i = 0; i < count; i++)
        codes[i] = kern_f32_to_e4m3(x[i] * inverse);
    *scale = largest / KERN_E4M3_LARGEST;
}
