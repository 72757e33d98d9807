#pragma once

/* common/kv/prefix_hash.h - token ids to a chain of block hashes.
 *
 * A block's hash covers every token before it and in it, the model, the block size and the caller's
 * cache salt: equal hashes mean equal KV. Where the bytes lie does not take part, so that workers
 * with different layouts share one index. Pure; any thread. */

#include "common/base/hash.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

/* The chain's start, before any token. salt may be NULL when salt_len is 0; no salt and an empty
 * salt are the same. */
pd_hash128 pd_prefix_hash_root(pd_hash128 model_fingerprint, uint32_t block_tokens,
                               const void *salt, size_t salt_len);

/* The hash of the block of count tokens that follows prev. */
pd_hash128 pd_prefix_hash_next(pd_hash128 prev, const uint32_t *tokens, uint32_t count);

/* Hashes of the full blocks among count tokens, in order; at most hashes_max. Returns how many were
 * written. */
uint32_t pd_prefix_hash_fill(pd_hash128 root, uint32_t block_tokens, const uint32_t *tokens,
                             size_t count, pd_hash128 *hashes_out, uint32_t hashes_max);

/* How many leading blocks of a prompt may be taken from a cache: at least one token must be
 * computed, since its logits are the answer's first token. */
static inline uint32_t pd_prefix_hash_usable(size_t prompt_tokens, uint32_t block_tokens)
{
    return prompt_tokens == 0 ? 0 : (uint32_t)((prompt_tokens - 1) / block_tokens);
}

static inline bool pd_hash128_equal(pd_hash128 a, pd_hash128 b)
{
    return a.lo == b.lo && a.hi == b.hi;
}
