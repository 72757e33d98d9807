#include "common/transfer/copy.h"

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, STRIDE = 4 * LINE, STREAMED_LEAST = 4096 };

/* bytes is a multiple of STRIDE, to of LINE. */
__attribute__((target("avx512f"))) static void stream_512(unsigned char *to,
                                                          const unsigned char *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += STRIDE) {
        __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + LINE);
        __m512i c = _mm512_loadu_si512(from + i + 2 * LINE);
        __m512i d = _mm512_loadu_si512(from + i + 3 * LINE);
        _mm512_stream_si512((__m512i *)(to + i), a);
        _mm512_stream_si512((__m512i *)(to + i + LINE), b);
        _mm512_stream_si512((__m512i *)(to + i + 2 * LINE), c);
        _mm512_stream_si512((__m512i *)(to + i + 3 * LINE), d);
    }
    _mm_sfence(); /* these stores are ordered with nothing else */
}

__attribute__((target("avx2"))) static void stream_256(unsigned char *to, const unsigned char *from,
                                                       size_t bytes)
{
    for (size_t i = 0; i < bytes; i += LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + LINE / 2));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + LINE / 2), b);
    }
    _mm_sfence();
}

pd_copy_way pd_copy_best(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return PD_COPY_AVX512;
    return __builtin_cpu_supports("avx2") ? PD_COPY_AVX2 : PD_COPY_PLAIN;
}

void pd_copy_by(pd_copy_way way, void *to, const void *from, size_t bytes)
{
    unsigned char *at = to;
    const unsigned char *source = from;

    if (way == PD_COPY_PLAIN || bytes < STREAMED_LEAST) {
        memcpy(at, source, bytes);
        return;
    }
    size_t before = (LINE - (uintptr_t)at % LINE) % LINE;
    memcpy(at, source, before);
    size_t streamed = (bytes - before) / STRIDE * STRIDE, done = before + streamed;
    if (way == PD_COPY_AVX512)
        stream_512(at + before, source + before, streamed);
    else
        stream_256(at + before, source + before, streamed);
    memcpy(at + done, source + done, bytes - done);
}

void pd_copy_out(void *to, const void *from, size_t bytes)
{
    pd_copy_by(pd_copy_best(), to, from, bytes);
}
