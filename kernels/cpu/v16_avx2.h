#pragma once

/* kernels/cpu/v16_avx2.h - sixteen floats at once: two AVX registers. See v16_avx512.h. */

#include "kernels/number.h"

#include <immintrin.h>
#include <stdbool.h>

#define V_QK_ROWS    2
#define V_PV_VECTORS 1
#define V_PV_ROWS    4
#define V_MM_ROWS    2
#define V_MM_ACTS    2

#define V_INLINE static inline __attribute__((always_inline))

typedef struct v16 {
    __m256 a, b;
} v16;
typedef struct v16i {
    __m256i a, b;
} v16i;

V_INLINE v16 v_zero(void)
{
    return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
V_INLINE v16 v_set(float x)
{
    return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
V_INLINE v16 v_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
V_INLINE void v_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
V_INLINE v16i v_mask(uint32_t count)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (v16i){_mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lanes),
                  _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count - 8), lanes)};
}
V_INLINE v16 v_load_some(const float *p, uint32_t count)
{
    v16i mask = v_mask(count);
    return (v16){_mm256_maskload_ps(p, mask.a), _mm256_maskload_ps(p + 8, mask.b)};
}
V_INLINE void v_store_some(float *p, uint32_t count, v16 x)
{
    v16i mask = v_mask(count);
    _mm256_maskstore_ps(p, mask.a, x.a);
    _mm256_maskstore_ps(p + 8, mask.b, x.b);
}
V_INLINE v16 v_keep_some(v16 x, uint32_t count, v16 other)
{
    v16i mask = v_mask(count);
    return (v16){_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(mask.a)),
                 _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(mask.b))};
}
V_INLINE v16 v_fma(v16 x, v16 y, v16 z)
{
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
V_INLINE v16 v_add(v16 x, v16 y)
{
    return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
V_INLINE v16 v_sub(v16 x, v16 y)
{
    return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
V_INLINE v16 v_mul(v16 x, v16 y)
{
    return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
V_INLINE v16 v_div(v16 x, v16 y)
{
    return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
V_INLINE v16 v_max(v16 x, v16 y)
{
    return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
V_INLINE v16 v_min(v16 x, v16 y)
{
    return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
V_INLINE v16 v_abs(v16 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
V_INLINE v16 v_negate(v16 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){_mm256_xor_ps(sign, x.a), _mm256_xor_ps(sign, x.b)};
}
V_INLINE v16i v_bits(v16 x)
{
    return (v16i){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
V_INLINE v16i v_isub(v16i x, v16i y)
{
    return (v16i){_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
V_INLINE v16 v_power(v16i x)
{
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 23)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 23))};
}
V_INLINE v16i v_iset(int32_t x)
{
    return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
V_INLINE v16 v_load_f16(const uint16_t *p)
{
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
V_INLINE void v_store_f16(uint16_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
V_INLINE v16 v_load_bf16(const uint16_t *p)
{
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (v16){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
/* Lanes are within an int8 (saturating packs are exact). */
V_INLINE void v_store_i8(int8_t *p, v16i x)
{
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
V_INLINE v16 v_load_i8(const int8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
V_INLINE int32_t v_isum(v16i x)
{
    __m256i a = _mm256_add_epi32(x.a, x.b);
    __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
V_INLINE uint32_t v_imax_of(v16i x, v16i y)
{
    __m256i a = _mm256_max_epu32(_mm256_max_epu32(x.a, x.b), _mm256_max_epu32(y.a, y.b));
    __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1)));
}
V_INLINE v16i v_iadd(v16i x, v16i y)
{
    return (v16i){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
V_INLINE v16i v_imax(v16i x, v16i y)
{
    return (v16i){_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)};
}
V_INLINE bool v_iall_within(v16i x, uint32_t low, uint32_t high)
{
    const __m256i least = _mm256_set1_epi32((int)low), most = _mm256_set1_epi32((int)high);
    __m256i a = _mm256_min_epu32(_mm256_max_epu32(x.a, least), most);
    __m256i b = _mm256_min_epu32(_mm256_max_epu32(x.b, least), most);
    a = _mm256_and_si256(_mm256_cmpeq_epi32(a, x.a), _mm256_cmpeq_epi32(b, x.b));
    return _mm256_movemask_epi8(a) == -1;
}
V_INLINE v16 v_as_floats(v16i x)
{
    return (v16){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
V_INLINE v16 v_from_ints(v16i x)
{
    return (v16){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
/* Rows 0 to 7 or 8 to 15 of v16_avx512.h's v_each. */
V_INLINE __m256i v_meet(__m256i a, __m256i b, const bool most)
{
    return most ? _mm256_max_epu32(a, b) : _mm256_add_epi32(a, b);
}
V_INLINE __m256i v_half_each(const v16i *x, const bool most)
{
    __m256i h[8];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        h[i] = v_meet(x[i].a, x[i].b, most);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* halves: row i, row i + 4 */
        h[i] = v_meet(_mm256_permute2x128_si256(h[i], h[i + 4], 0x20),
                      _mm256_permute2x128_si256(h[i], h[i + 4], 0x31), most);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2)
        h[i] = v_meet(_mm256_unpacklo_epi64(h[i], h[i + 1]), _mm256_unpackhi_epi64(h[i], h[i + 1]),
                      most);
    __m256 low = _mm256_castsi256_ps(h[0]), high = _mm256_castsi256_ps(h[2]);
    return v_meet(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)),
                  _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), most);
}
V_INLINE v16i v_isum_each(v16i *x)
{
    return (v16i){v_half_each(x, false), v_half_each(x + 8, false)};
}
V_INLINE v16i v_imax_each(v16i *x)
{
    return (v16i){v_half_each(x, true), v_half_each(x + 8, true)};
}
V_INLINE float v_max_of(v16 x)
{
    __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
V_INLINE float v_tree_sum(v16 x)
{
    __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
V_INLINE __m256 v_rotate_half(__m256 x, __m256 table)
{
    __m256 product = _mm256_mul_ps(_mm256_permute_ps(x, 0xb1), _mm256_movehdup_ps(table));
    return _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(table), product);
}
V_INLINE v16 v_rotate(v16 x, v16 table)
{
    return (v16){v_rotate_half(x.a, table.a), v_rotate_half(x.b, table.b)};
}
typedef struct v16x2 {
    __m256i a, b;
} v16x2;

V_INLINE v16 v_from_f16(__m256i x)
{
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                 _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
V_INLINE v16 v_first(v16x2 x)
{
    return v_from_f16(x.a);
}
V_INLINE v16 v_second(v16x2 x)
{
    return v_from_f16(x.b);
}
typedef struct v16_pair {
    v16 even, odd;
} v16_pair;

V_INLINE v16_pair v_pair_i8(__m256i x)
{
    __m256i a = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(x));
    __m256i b = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(x, 1));
    return (v16_pair){
        .even = {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24), 24)),
                 _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(b, 24), 24))},
        .odd = {_mm256_cvtepi32_ps(_mm256_srai_epi32(a, 8)),
                _mm256_cvtepi32_ps(_mm256_srai_epi32(b, 8))},
    };
}
V_INLINE v16_pair v_pair_e4m3(__m256i x)
{
    const __m256i bits = _mm256_set1_epi16((int16_t)0xbf80);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 1), odd = _mm256_srai_epi16(x, 1);
    return (v16_pair){v_from_f16(_mm256_and_si256(even, bits)),
                      v_from_f16(_mm256_and_si256(odd, bits))};
}
V_INLINE __m256i v_first_bits(v16x2 x)
{
    return x.a;
}
V_INLINE __m256i v_second_bits(v16x2 x)
{
    return x.b;
}
V_INLINE v16 v_load_e4m3(const uint8_t *p)
{
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    wide = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbf80));
    return v_from_f16(wide);
}
/* Eight rows: columns[i] is column i, then column 8 + i. */
V_INLINE void v_turn_8(const uint16_t *rows, size_t stride, __m256i *columns)
{
    __m256i a[8], b[8];

#pragma GCC unroll 8
    for (size_t i = 0; i < 8; i++)
        b[i] = _mm256_loadu_si256((const __m256i *)(rows + i * stride));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi16(b[i], b[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi16(b[i], b[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi32(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi32(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        columns[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
        columns[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
    }
}
V_INLINE void v_turn_f16(const uint16_t *rows, size_t stride, v16x2 *columns)
{
    __m256i low[8], high[8];

    v_turn_8(rows, stride, low);
    v_turn_8(rows + 8 * stride, stride, high);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        columns[i].a = _mm256_permute2x128_si256(low[i], high[i], 0x20);
        columns[i].b = _mm256_permute2x128_si256(low[i], high[i], 0x31);
    }
}
