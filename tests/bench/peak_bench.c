/* tests/bench/peak_bench.c - the most arithmetic that this machine's threads do.
 *
 *   peak_bench THREADS
 *
 * Dot products of bytes (u8 x s8, 32-bit sums) and fused multiply-adds of floats, from registers
 * alone, on all threads at once, with the widest instructions that the engine has kernels for
 * without AMX: vpdpbusd of AVX-512 VNNI; where the processor lacks it, AVX2's vpmaddubsw with
 * vpmaddwd and an addition, as the AVX2 kernels take them. One JSON object on stdout, the best of
 * PASSES passes: 10^9 multiply-accumulates (a pair of bytes) and fused multiply-adds a second. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "kernels/team.h"

#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PASSES 7
#define CHAINS 12 /* independent sums: more than latency times units, fewer than registers */
#define ROUNDS 4000000u

typedef struct arithmetic {
    const char *name;
    void (*dots)(void), (*products)(void);
    double dots_each, products_each; /* of one instruction group */
} arithmetic;

static volatile int sink; /* so that the sums are wanted */

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void dots_avx512(void)
{
    __m512i sums[CHAINS], total = _mm512_setzero_si512(), one = _mm512_set1_epi8(1);

    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm512_set1_epi32(c);
    for (uint32_t i = 0; i < ROUNDS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sums[c] = _mm512_dpbusd_epi32(sums[c], one, one);
        __asm__ volatile("" : "+v"(one)); /* nothing may be foreseen */
    }
    for (int c = 0; c < CHAINS; c++)
        total = _mm512_add_epi32(total, sums[c]);
    sink = _mm512_reduce_add_epi32(total);
}

__attribute__((target("avx512f"))) static void products_avx512(void)
{
    __m512 sums[CHAINS], total = _mm512_setzero_ps(), half = _mm512_set1_ps(0.5f);

    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm512_set1_ps((float)c);
    for (uint32_t i = 0; i < ROUNDS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sums[c] = _mm512_fmadd_ps(sums[c], half, half);
        __asm__ volatile("" : "+v"(half));
    }
    for (int c = 0; c < CHAINS; c++)
        total = _mm512_add_ps(total, sums[c]);
    sink = (int)_mm512_reduce_add_ps(total);
}

__attribute__((target("avx2"))) static void dots_avx2(void)
{
    __m256i sums[CHAINS], total = _mm256_setzero_si256();
    __m256i bytes = _mm256_set1_epi8(1), words = _mm256_set1_epi16(1);

    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm256_set1_epi32(c);
    for (uint32_t i = 0; i < ROUNDS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            __asm__ volatile("" : "+x"(bytes)); /* a product of its own for each sum */
            __m256i pairs = _mm256_maddubs_epi16(bytes, bytes);
            sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(pairs, words));
        }
    }
    for (int c = 0; c < CHAINS; c++)
        total = _mm256_add_epi32(total, sums[c]);
    sink = _mm256_extract_epi32(total, 0);
}

__attribute__((target("avx2,fma"))) static void products_avx2(void)
{
    __m256 sums[CHAINS], total = _mm256_setzero_ps(), half = _mm256_set1_ps(0.5f);

    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm256_set1_ps((float)c);
    for (uint32_t i = 0; i < ROUNDS; i++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sums[c] = _mm256_fmadd_ps(sums[c], half, half);
        __asm__ volatile("" : "+x"(half));
    }
    for (int c = 0; c < CHAINS; c++)
        total = _mm256_add_ps(total, sums[c]);
    sink = (int)_mm_cvtss_f32(_mm256_castps256_ps128(total));
}

static const arithmetic avx512 = {"AVX-512 VNNI", dots_avx512, products_avx512, 64, 16};
static const arithmetic avx2 = {"AVX2", dots_avx2, products_avx2, 32, 8};

static void run_dots(void *ctx, uint32_t thread)
{
    (void)thread;
    ((const arithmetic *)ctx)->dots();
}

static void run_products(void *ctx, uint32_t thread)
{
    (void)thread;
    ((const arithmetic *)ctx)->products();
}

/* 10^9 a second on all threads of the team; a run that another process disturbed counts less. */
static double best(kern_team *team, kern_team_fn *fn, const arithmetic *which, double each)
{
    arithmetic copy = *which;
    double most = 0;

    for (int pass = 0; pass < PASSES; pass++) {
        uint32_t threads = kern_team_active(team);
        uint64_t begin = pd_clock_now_ns();
        kern_team_run(team, fn, &copy);
        double rate = each * CHAINS * ROUNDS * threads / (double)(pd_clock_now_ns() - begin);
        most = rate > most ? rate : most;
    }
    return most;
}

int main(int argc, char **argv)
{
    char *end = NULL;
    unsigned long threads = argc == 2 ? strtoul(argv[1], &end, 10) : 0;
    kern_team *team;

    pd_log_init("peak_bench", PD_LOG_WARN);
    if (threads == 0 || *end != '\0' || threads > KERN_THREADS_MAX) {
        fprintf(stderr, "usage: peak_bench THREADS (1 to %d)\n", KERN_THREADS_MAX);
        return 2;
    }
    bool vnni = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
    if (!vnni && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
        fprintf(stderr, "peak_bench: the processor has no AVX2 with FMA\n");
        return 1;
    }
    if (kern_team_create((uint32_t)threads, &team) != PD_OK)
        return 1;
    const arithmetic *which = vnni ? &avx512 : &avx2;
    printf("{\"instructions\": \"%s\", \"threads\": %lu, \"dot_g_s\": %.1f, \"fma_g_s\": %.1f}\n",
           which->name, threads, best(team, run_dots, which, which->dots_each),
           best(team, run_products, which, which->products_each));
    kern_team_destroy(team);
    return 0;
}
