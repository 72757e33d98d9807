#pragma once

/* decode-worker/prompt_lookup.h - guesses by what followed the same tokens earlier: answers quote
 * their prompts, and themselves.
 *
 * "Inference with reference" (Yang et al. 2023, arXiv 2304.04487); known as prompt lookup or n-gram
 * speculation. The last ngram_min tokens are looked up among those before, the latest occurrences
 * first; the one that agrees furthest back (ngram_max at most) is continued. An index of chains by
 * a hash of ngram_min tokens: constant time a token, 4 bytes a token and 4 a chain. */

#include "decode-worker/guess.h"

extern const decode_guess_ops decode_prompt_lookup;
