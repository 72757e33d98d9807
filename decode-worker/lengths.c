#include "decode-worker/lengths.h"

/* What an unseen answer weighs, one that does not end: few answers are not believed at once. */
static const float doubt = 4;
static const float beyond = 0.25f; /* of answers may be longer than predicted */

enum { HALVE_AFTER = 1024 };

void decode_lengths_init(decode_lengths *lengths)
{
    *lengths = (decode_lengths){0};
}

/* 1 .. 15 have buckets of their own; then eight an octave, up to 2^24. */
static uint32_t bucket_of(uint32_t tokens)
{
    if (tokens < 16)
        return tokens;
    uint32_t octave = 31 - (uint32_t)__builtin_clz(tokens);
    uint32_t bucket = 16 + (octave - 4) * 8 + (tokens >> (octave - 3) & 7);
    return bucket < DECODE_LENGTH_BUCKETS ? bucket : DECODE_LENGTH_BUCKETS - 1;
}

/* The longest length of a bucket. */
static uint32_t end_of(uint32_t bucket)
{
    if (bucket < 16)
        return bucket;
    uint32_t octave = 4 + (bucket - 16) / 8, eighth = (bucket - 16) % 8;
    return ((9 + eighth) << (octave - 3)) - 1;
}

void decode_lengths_observe(decode_lengths *lengths, uint32_t tokens, bool ended)
{
    uint32_t bucket = bucket_of(tokens);

    for (uint32_t i = 0; i < bucket; i++)
        lengths->lived[i] += 1;
    if (ended) {
        lengths->lived[bucket] += 1;
        lengths->ended[bucket] += 1;
    }
    if (++lengths->since < HALVE_AFTER)
        return;
    lengths->since = 0;
    for (uint32_t i = 0; i < DECODE_LENGTH_BUCKETS; i++) {
        lengths->lived[i] /= 2;
        lengths->ended[i] /= 2;
    }
}

uint32_t decode_lengths_predict(const decode_lengths *lengths, uint32_t answered,
                                uint32_t max_tokens)
{
    float living = 1;

    if (max_tokens <= answered)
        return max_tokens;
    for (uint32_t bucket = bucket_of(answered + 1); bucket < DECODE_LENGTH_BUCKETS; bucket++) {
        living *= 1 - lengths->ended[bucket] / (lengths->lived[bucket] + doubt);
        if (living > beyond)
            continue;
        uint32_t end = end_of(bucket);
        return end < max_tokens ? end : max_tokens;
    }
    return max_tokens;
}
