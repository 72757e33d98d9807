#pragma once

/* decode-worker/lengths.h - how long answers are here, from those seen so far.
 *
 * Survival over buckets of length, eight to an octave: of the answers that came as far as a bucket,
 * how many ended in it. An answer cut short (max_tokens, a client that left, a move elsewhere)
 * tells only that it came so far, so that many short limits do not teach that answers are short.
 * What was never seen does not happen: with no answers yet, everybody is taken to use up
 * max_tokens. Old answers are forgotten by halves. Pure. One thread. */

#include "common/base/status.h"

#include <stdint.h>

enum { DECODE_LENGTH_BUCKETS = 176 };

typedef struct decode_lengths {
    float lived[DECODE_LENGTH_BUCKETS]; /* answers that reached the bucket's end, or ended in it */
    float ended[DECODE_LENGTH_BUCKETS];
    uint32_t since; /* answers taken in since the last halving */
} decode_lengths;

void decode_lengths_init(decode_lengths *lengths);
/* An answer of so many tokens (at least 1) is over. ended: by itself. */
void decode_lengths_observe(decode_lengths *lengths, uint32_t tokens, bool ended);
/* The length that three of four answers do not exceed, of those that are longer than answered and
 * may have max_tokens: answered + 1 .. max_tokens, and max_tokens when that is not more than
 * answered. */
uint32_t decode_lengths_predict(const decode_lengths *lengths, uint32_t answered,
                                uint32_t max_tokens);
