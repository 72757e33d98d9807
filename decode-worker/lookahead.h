#pragma once

/* decode-worker/lookahead.h - guesses by n-grams that the model itself says beside the text.
 *
 * After Fu et al. 2024 (lookahead decoding, arXiv 2402.02057). Behind the drafts of a step stand
 * `window` guesses at the tokens further on; what the model says after each of them is the guess
 * for the next place in the next step (a Jacobi iteration: Santilli et al. 2023, arXiv 2305.10427).
 * The diagonals of these windows - a guess, what was said after it, what was said after that a step
 * later - are n-grams of `ngram_max` tokens at most, kept in a pool of constant size, with those of
 * the answer. The verification branch is one n-gram of the pool that begins with the last token;
 * where it is right all along, the window's guesses are verified with it.
 *
 * What differs from the paper: a step's tokens are one causal line, for attention here knows
 * no trees. A window's rows therefore see each other in place of their diagonals, one n-gram is
 * verified and not several. The price is what it says: `window` more rows in each step. */

#include "decode-worker/guess.h"

extern const decode_guess_ops decode_lookahead;
