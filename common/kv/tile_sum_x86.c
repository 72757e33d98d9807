#include "common/kv/tile_sum_ways.h"

#include <immintrin.h>

/* (a + 2^32)(b + 2^32) = a b + 2^32 (a + b) mod 2^64: the products are added in 64-bit lanes, a and
 * b in 32-bit lanes that count 2^32 each. Two of each, so that additions do not wait for another.
 */

static uint64_t add_lanes(const uint64_t *products, uint32_t count, const uint32_t *halves)
{
    uint64_t sum = 0;
    uint32_t high = 0;

    for (uint32_t i = 0; i < count; i++) {
        sum += products[i];
        high += halves[2 * i] + halves[2 * i + 1];
    }
    return sum + ((uint64_t)high << 32);
}

static uint64_t rest(const void *bytes, uint32_t done, uint32_t words, const uint64_t *keys)
{
    if (done == words)
        return 0;
    return pd_tile_sum_plain((const unsigned char *)bytes + 8 * (size_t)done, words - done,
                             keys + done);
}

static uint64_t sum_sse2(const void *bytes, uint32_t words, const uint64_t *keys)
{
    const unsigned char *at = bytes;
    __m128i products = _mm_setzero_si128(), halves = _mm_setzero_si128();
    uint64_t product_lanes[2];
    uint32_t half_lanes[4], i = 0;

    for (; i + 2 <= words; i += 2) {
        __m128i x = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(at + 8 * (size_t)i)),
                                  _mm_loadu_si128((const __m128i *)(keys + i)));
        products = _mm_add_epi64(products, _mm_mul_epu32(x, _mm_srli_epi64(x, 32)));
        halves = _mm_add_epi32(halves, x);
    }
    _mm_storeu_si128((__m128i *)product_lanes, products);
    _mm_storeu_si128((__m128i *)half_lanes, halves);
    return add_lanes(product_lanes, 2, half_lanes) + rest(bytes, i, words, keys);
}

__attribute__((target("avx2"))) static uint64_t sum_avx2(const void *bytes, uint32_t words,
                                                         const uint64_t *keys)
{
    const unsigned char *at = bytes;
    __m256i products[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i halves[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    uint64_t product_lanes[4];
    uint32_t half_lanes[8], i = 0;

    for (; i + 8 <= words; i += 8) {
        for (int j = 0; j < 2; j++) {
            size_t word = i + 4 * (size_t)j;
            __m256i x = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(at + 8 * word)),
                                         _mm256_loadu_si256((const __m256i *)(keys + word)));
            products[j] =
                _mm256_add_epi64(products[j], _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
            halves[j] = _mm256_add_epi32(halves[j], x);
        }
    }
    _mm256_storeu_si256((__m256i *)product_lanes, _mm256_add_epi64(products[0], products[1]));
    _mm256_storeu_si256((__m256i *)half_lanes, _mm256_add_epi32(halves[0], halves[1]));
    return add_lanes(product_lanes, 4, half_lanes) + rest(bytes, i, words, keys);
}

__attribute__((target("avx512f"))) static uint64_t sum_avx512(const void *bytes, uint32_t words,
                                                              const uint64_t *keys)
{
    const unsigned char *at = bytes;
    __m512i products[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512i halves[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    uint64_t product_lanes[8];
    uint32_t half_lanes[16], i = 0;

    for (; i + 16 <= words; i += 16) {
        for (int j = 0; j < 2; j++) {
            size_t word = i + 8 * (size_t)j;
            __m512i x = _mm512_xor_si512(_mm512_loadu_si512(at + 8 * word),
                                         _mm512_loadu_si512(keys + word));
            products[j] =
                _mm512_add_epi64(products[j], _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
            halves[j] = _mm512_add_epi32(halves[j], x);
        }
    }
    _mm512_storeu_si512(product_lanes, _mm512_add_epi64(products[0], products[1]));
    _mm512_storeu_si512(half_lanes, _mm512_add_epi32(halves[0], halves[1]));
    return add_lanes(product_lanes, 8, half_lanes) + rest(bytes, i, words, keys);
}

/* What the processor has and the system saves; read from where libgcc keeps it: a load and a test.
 */
pd_tile_sum_fn *pd_tile_sum_best(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return sum_avx512;
    return __builtin_cpu_supports("avx2") ? sum_avx2 : sum_sse2;
}

pd_tile_sum_fn *pd_tile_sum_fast(uint32_t index)
{
    if (index == 0)
        return sum_sse2;
    if (index == 1 && __builtin_cpu_supports("avx2"))
        return sum_avx2;
    return index == 2 && __builtin_cpu_supports("avx512f") ? sum_avx512 : NULL;
}
