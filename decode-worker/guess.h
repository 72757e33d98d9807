#pragma once

/* decode-worker/guess.h - how a method of speculative decoding guesses from a sequence's own
 * tokens: one interface for the methods that need no model. Pure. One thread. */

#include "common/worker/role.h"

typedef struct decode_guess_ops {
    /* Of a sequence's state, for at most tokens_max tokens; a multiple of 8. */
    size_t (*bytes)(const pd_speculation *how, uint32_t tokens_max);
    /* state: that many bytes, 8-byte aligned, the caller's. */
    void (*init)(void *state, const pd_speculation *how, uint32_t tokens_max);
    /* Up to most guesses at what follows tokens[0 .. count - 1], in order; returns how many. Of one
     * sequence only more tokens come from call to call, and those before do not change. out may lie
     * right behind the tokens. */
    uint32_t (*propose)(void *state, const uint32_t *tokens, uint32_t count, uint32_t most,
                        uint32_t *out);
    /* What the model said: after the token at position, said[0]; after draft i, said[i + 1]. NULL:
     * the method does not learn from it. */
    void (*learn)(void *state, uint32_t position, const uint32_t *drafts, uint32_t drafts_count,
                  const uint32_t *said);
} decode_guess_ops;
