#pragma once

/* kernels/sampling.h - what a draw from logits is, in numbers that can be added in any order.
 *
 * A candidate's weight is an integer, floor(2^40 e^((logit - largest) / temperature)), e as
 * kern_exp: a sum of weights is the same however many threads add it and in whatever order. A
 * candidate of less than 2^-40 of the likeliest one is never drawn. Candidates are ordered by key
 * (larger logits first, lower ids first among equals), and with F(t) the first candidate up to
 * which the weights sum to more than t:
 *
 *     kept = the top_k first (all: 0)                    total = the sum of their weights
 *     top_p < 1:  total = the sum of weights up to F(max(1, floor(total p)) - 1),
 *                 p = floor(2^32 top_p) / 2^32
 *     token = F(floor(total u)), u = (64 bits of seed, choice and position) / 2^64
 *
 * Temperature 0 (or none that is above it), top_p 0 and top_k 1 take the first candidate. Nothing
 * needs a sorted vocabulary: F is found by sums over parts of the order, first over
 * KERN_SAMPLE_BINS intervals of (logit - largest) / temperature, then within one of them. Plain C
 * that device code includes, too. */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define KERN_SAMPLING_FUNCTION static __host__ __device__ inline
#else
#define KERN_SAMPLING_FUNCTION static inline
#endif

#define KERN_SAMPLE_VOCAB_MAX (1u << 22) /* 2^22 weights of 2^40 and a bit more fit 64 bits */
#define KERN_SAMPLE_BINS      1024
#define KERN_SAMPLE_X_MIN     -28.0f /* e^-28 is below 2^-40 */

/* Comparing keys compares logits and, between equal ones, puts the lower id first: the logit's
 * bits made ascending (-0 is 0), then the id's complement. */
KERN_SAMPLING_FUNCTION uint32_t kern_sample_ascending(float logit)
{
    uint32_t bits;

    logit = logit == 0 ? 0 : logit;
    memcpy(&bits, &logit, sizeof bits);
    return (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;
}

KERN_SAMPLING_FUNCTION float kern_sample_logit(uint32_t ascending)
{
    uint32_t bits = (ascending & 0x80000000) != 0 ? ascending & 0x7fffffff : ~ascending;
    float logit;

    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

KERN_SAMPLING_FUNCTION uint64_t kern_sample_key(float logit, uint32_t id)
{
    return (uint64_t)kern_sample_ascending(logit) << 32 | (uint32_t)~id;
}

KERN_SAMPLING_FUNCTION uint32_t kern_sample_id(uint64_t key)
{
    return ~(uint32_t)key;
}

/* At most 0; what is below KERN_SAMPLE_X_MIN (or not a number) has no weight. */
KERN_SAMPLING_FUNCTION float kern_sample_x(float logit, float largest, float temperature)
{
    return (logit - largest) / temperature;
}

/* e: kern_exp(x) */
KERN_SAMPLING_FUNCTION uint64_t kern_sample_weight(float e)
{
    return (uint64_t)(e * 0x1p40f);
}

/* Bins in the candidates' order, as every step of it is monotone. KERN_SAMPLE_BINS: no weight. */
KERN_SAMPLING_FUNCTION uint32_t kern_sample_bin(float x)
{
    return x >= KERN_SAMPLE_X_MIN ? (uint32_t)(x * -36.5f) : KERN_SAMPLE_BINS;
}

/* The smallest ascending number, up to that of the largest logit, whose bin is `bin` or an earlier
 * one. */
KERN_SAMPLING_FUNCTION uint32_t kern_sample_bin_from(uint32_t bin, float largest, float temperature)
{
    uint32_t from = 0x00800000; /* the lowest finite number */
    uint32_t to = kern_sample_ascending(largest);

    while (from < to) {
        uint32_t middle = from + (to - from) / 2;
        float x = kern_sample_x(kern_sample_logit(middle), largest, temperature);
        if (kern_sample_bin(x) <= bin)
            to = middle;
        else
            from = middle + 1;
    }
    return to;
}

/* floor(a b / 2^64) */
KERN_SAMPLING_FUNCTION uint64_t kern_mul_high(uint64_t a, uint64_t b)
{
    uint64_t a_lo = (uint32_t)a, a_hi = a >> 32, b_lo = (uint32_t)b, b_hi = b >> 32;
    uint64_t lo = a_lo * b_lo, ab = a_lo * b_hi, ba = a_hi * b_lo;
    uint64_t middle = (lo >> 32) + (uint32_t)ab + (uint32_t)ba;

    return a_hi * b_hi + (ab >> 32) + (ba >> 32) + (middle >> 32);
}

/* The t of F(t) that top_p (above 0, below 1) asks for. */
KERN_SAMPLING_FUNCTION uint64_t kern_sample_top_p_target(uint64_t total, float top_p)
{
    uint64_t p = (uint64_t)(top_p * 0x1p32f);
    uint64_t goal = (total >> 32) * p + ((total & 0xffffffff) * p >> 32);

    return goal > 0 ? goal - 1 : 0;
}

/* Finalises splitmix64 (as pd_mix64, which device code cannot call). */
KERN_SAMPLING_FUNCTION uint64_t kern_sample_mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

/* 64 random bits, from (seed, choice, position) alone. */
KERN_SAMPLING_FUNCTION uint64_t kern_sample_bits(uint64_t seed, uint32_t choice, uint32_t position)
{
    uint64_t word = kern_sample_mix(seed + 0x632be59bd9b4e019);

    word = kern_sample_mix(word ^ ((uint64_t)choice << 32 | position));
    return kern_sample_mix(word + 0x9e3779b97f4a7c15);
}
