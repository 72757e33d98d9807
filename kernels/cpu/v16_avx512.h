#pragma once

/* kernels/cpu/v16_avx512.h - sixteen floats at once: one AVX-512 register.
 *
 * The words rows.h, attention.h and gemm_float.h are written in; v16_avx2.h has the same ones. */

#include "kernels/number.h"

#include <immintrin.h>
#include <stdbool.h>

#define V_QK_ROWS    8 /* query rows of a score tile: two chains each, in registers */
#define V_PV_VECTORS 4 /* of 16 dimensions, of a few query rows' value sums */
#define V_PV_ROWS                                                                                  \
    6 /* query rows, where there are many: 4 took 3 % longer, as did 12 by 2 vectors */
#define V_MM_ROWS 4 /* weight rows and activation rows of a float product's tile */
#define V_MM_ACTS 4

#define V_INLINE static inline __attribute__((always_inline))

typedef __m512 v16;
typedef __m512i v16i;

V_INLINE v16 v_zero(void)
{
    return _mm512_setzero_ps();
}
V_INLINE v16 v_set(float x)
{
    return _mm512_set1_ps(x);
}
V_INLINE v16 v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
V_INLINE void v_store(float *p, v16 x)
{
    _mm512_storeu_ps(p, x);
}
V_INLINE __mmask16 v_mask(uint32_t count)
{
    return (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);
}
/* The first count lanes; the others are zero and not read. */
V_INLINE v16 v_load_some(const float *p, uint32_t count)
{
    return _mm512_maskz_loadu_ps(v_mask(count), p);
}
V_INLINE void v_store_some(float *p, uint32_t count, v16 x)
{
    _mm512_mask_storeu_ps(p, v_mask(count), x);
}
/* Lanes from count on become other's. */
V_INLINE v16 v_keep_some(v16 x, uint32_t count, v16 other)
{
    return _mm512_mask_blend_ps(v_mask(count), other, x);
}
V_INLINE v16 v_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
V_INLINE v16 v_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}
V_INLINE v16 v_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}
V_INLINE v16 v_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}
V_INLINE v16 v_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}
/* a > b ? a : b, and a < b ? a : b, also where one is NaN */
V_INLINE v16 v_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}
V_INLINE v16 v_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}
V_INLINE v16 v_abs(v16 a)
{
    return _mm512_abs_ps(a);
}
V_INLINE v16 v_negate(v16 a)
{
    return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}
V_INLINE v16i v_bits(v16 a)
{
    return _mm512_castps_si512(a);
}
V_INLINE v16i v_isub(v16i a, v16i b)
{
    return _mm512_sub_epi32(a, b);
}
/* 2^n as a float, n + 127 given */
V_INLINE v16 v_power(v16i biased)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
V_INLINE v16i v_iset(int32_t x)
{
    return _mm512_set1_epi32(x);
}
V_INLINE v16 v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
V_INLINE void v_store_f16(uint16_t *p, v16 x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
V_INLINE v16 v_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
V_INLINE void v_store_i8(int8_t *p, v16i x)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x));
}
V_INLINE v16 v_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
V_INLINE int32_t v_isum(v16i x)
{
    return _mm512_reduce_add_epi32(x);
}
/* The largest of two vectors of integers that are not negative. */
V_INLINE uint32_t v_imax_of(v16i x, v16i y)
{
    return _mm512_reduce_max_epu32(_mm512_max_epu32(x, y));
}
V_INLINE v16i v_iadd(v16i a, v16i b)
{
    return _mm512_add_epi32(a, b);
}
/* As unsigned. */
V_INLINE v16i v_imax(v16i a, v16i b)
{
    return _mm512_max_epu32(a, b);
}
V_INLINE bool v_iall_within(v16i x, uint32_t low, uint32_t high)
{
    return _mm512_cmp_epu32_mask(x, _mm512_set1_epi32((int)low), _MM_CMPINT_LT) == 0 &&
           _mm512_cmp_epu32_mask(x, _mm512_set1_epi32((int)high), _MM_CMPINT_NLE) == 0;
}
/* Bits as they are, and integers as floats. */
V_INLINE v16 v_as_floats(v16i x)
{
    return _mm512_castsi512_ps(x);
}
V_INLINE v16 v_from_ints(v16i x)
{
    return _mm512_cvtepi32_ps(x);
}
V_INLINE v16i v_meet(v16i a, v16i b, const bool most)
{
    return most ? v_imax(a, b) : v_iadd(a, b);
}
/* Lane r of the result: the sum of x[r]'s lanes, or the largest, r < 16. Two vectors become one of
 * half as many lanes each, four times; x is used up. */
V_INLINE v16i v_each(v16i *x, const bool most)
{
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) { /* rows 0 to 3 and 8 to 11 with those four on: by quarters */
        int a = i / 4 * 8 + i % 4, b = a + 4;
        x[a] = v_meet(_mm512_shuffle_i32x4(x[a], x[b], 0x44),
                      _mm512_shuffle_i32x4(x[a], x[b], 0xee), most);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        x[i] = v_meet(_mm512_shuffle_i32x4(x[i], x[i + 8], 0x88),
                      _mm512_shuffle_i32x4(x[i], x[i + 8], 0xdd), most);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) /* within a quarter */
        x[i] = v_meet(_mm512_unpacklo_epi64(x[i], x[i + 1]), _mm512_unpackhi_epi64(x[i], x[i + 1]),
                      most);
    __m512 low = _mm512_castsi512_ps(x[0]), high = _mm512_castsi512_ps(x[2]);
    return v_meet(_mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88)),
                  _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd)), most);
}
V_INLINE v16i v_isum_each(v16i *x)
{
    return v_each(x, false);
}
V_INLINE v16i v_imax_each(v16i *x)
{
    return v_each(x, true);
}
V_INLINE float v_max_of(v16 x)
{
    return _mm512_reduce_max_ps(x);
}
V_INLINE float v_tree_sum(v16 x)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
/* Pairs (even, odd) rotated by pairs (cos, sin). */
V_INLINE v16 v_rotate(v16 x, v16 table)
{
    v16 product = _mm512_mul_ps(_mm512_permute_ps(x, 0xb1), _mm512_movehdup_ps(table));
    return _mm512_fmaddsub_ps(x, _mm512_moveldup_ps(table), product);
}
/* Two vectors of f16. */
typedef __m512i v16x2;

V_INLINE v16 v_first(v16x2 x)
{
    return _mm512_cvtph_ps(_mm512_castsi512_si256(x));
}
V_INLINE v16 v_second(v16x2 x)
{
    return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
}
/* Neighbouring columns of 16 rows. */
typedef struct v16_pair {
    v16 even, odd;
} v16_pair;

/* 16 rows of (even, odd) bytes, int8 or e4m3 codes. */
V_INLINE v16_pair v_pair_i8(__m256i x)
{
    __m512i wide = _mm512_cvtepi16_epi32(x);
    __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(wide, 24), 24);
    return (v16_pair){_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 8))};
}
/* An e4m3 code's bits are f16's, below the sign that a shift to the right leaves twice. */
V_INLINE v16_pair v_pair_e4m3(__m256i x)
{
    const __m256i bits = _mm256_set1_epi16((int16_t)0xbf80);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 1), odd = _mm256_srai_epi16(x, 1);
    return (v16_pair){_mm512_cvtph_ps(_mm256_and_si256(even, bits)),
                      _mm512_cvtph_ps(_mm256_and_si256(odd, bits))};
}
V_INLINE __m256i v_first_bits(v16x2 x)
{
    return _mm512_castsi512_si256(x);
}
V_INLINE __m256i v_second_bits(v16x2 x)
{
    return _mm512_extracti64x4_epi64(x, 1);
}
V_INLINE v16 v_load_e4m3(const uint8_t *p)
{
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    wide = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbf80));
    return _mm512_cvtph_ps(wide);
}
/* 16 rows of 16 f16, stride apart: columns[i] is column i, then column 8 + i, of all rows. */
V_INLINE void v_turn_f16(const uint16_t *rows, size_t stride, v16x2 *columns)
{
    __m512i a[8], b[8];

#pragma GCC unroll 8
    for (size_t i = 0; i < 8; i++) { /* quarters: rows i, i, 8 + i, 8 + i */
        __m256i low = _mm256_loadu_si256((const __m256i *)(rows + i * stride));
        __m256i high = _mm256_loadu_si256((const __m256i *)(rows + (i + 8) * stride));
        b[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) { /* pairs of rows */
        a[i] = _mm512_unpacklo_epi16(b[i], b[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi16(b[i], b[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) { /* four rows, two columns a quarter */
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi32(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi32(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* eight rows, one column a quarter; then the quarters in order */
        __m512i even = _mm512_unpacklo_epi64(b[i], b[i + 4]);
        __m512i odd = _mm512_unpackhi_epi64(b[i], b[i + 4]);
        columns[2 * i] = _mm512_shuffle_i64x2(even, even, 0xd8);
        columns[2 * i + 1] = _mm512_shuffle_i64x2(odd, odd, 0xd8);
    }
}
