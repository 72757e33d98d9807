#include "common/kv/prefix_hash.h"

#include <string.h>

/* Hashed as it lies in memory: all fields are 64-bit, so there is no padding, and every machine we
 * run on is little-endian. */
typedef struct root_bytes {
    uint64_t kind;
    uint64_t fingerprint_len, fingerprint_lo, fingerprint_hi;
    uint64_t block_tokens_len, block_tokens;
    uint64_t salt_len, salt_lo, salt_hi;
} root_bytes;

typedef struct link_bytes {
    uint64_t kind;
    uint64_t prev_len, prev_lo, prev_hi;
    uint64_t tokens_len, tokens_lo, tokens_hi;
} link_bytes;

_Static_assert(sizeof(root_bytes) == 9 * sizeof(uint64_t), "no padding may be hashed");
_Static_assert(sizeof(link_bytes) == 7 * sizeof(uint64_t), "no padding may be hashed");

/* Keeps the two kinds of input apart. */
enum { KIND_ROOT = 1, KIND_LINK = 2 };

pd_hash128 pd_prefix_hash_root(pd_hash128 model_fingerprint, uint32_t block_tokens,
                               const void *salt, size_t salt_len)
{
    pd_hash128 salt_hash = pd_hash128_of(salt_len == 0 ? "" : salt, salt_len, KIND_ROOT);
    root_bytes bytes = {
        .kind = KIND_ROOT,
        .fingerprint_len = sizeof model_fingerprint,
        .fingerprint_lo = model_fingerprint.lo,
        .fingerprint_hi = model_fingerprint.hi,
        .block_tokens_len = sizeof block_tokens,
        .block_tokens = block_tokens,
        .salt_len = salt_len,
        .salt_lo = salt_hash.lo,
        .salt_hi = salt_hash.hi,
    };
    return pd_hash128_of(&bytes, sizeof bytes, 0);
}

pd_hash128 pd_prefix_hash_next(pd_hash128 prev, const uint32_t *tokens, uint32_t count)
{
    uint64_t tokens_len = (uint64_t)count * sizeof *tokens;
    pd_hash128 tokens_hash = pd_hash128_of(tokens, tokens_len, KIND_LINK);
    link_bytes bytes = {
        .kind = KIND_LINK,
        .prev_len = sizeof prev,
        .prev_lo = prev.lo,
        .prev_hi = prev.hi,
        .tokens_len = tokens_len,
        .tokens_lo = tokens_hash.lo,
        .tokens_hi = tokens_hash.hi,
    };
    return pd_hash128_of(&bytes, sizeof bytes, 0);
}

uint32_t pd_prefix_hash_fill(pd_hash128 root, uint32_t block_tokens, const uint32_t *tokens,
                             size_t count, pd_hash128 *hashes_out, uint32_t hashes_max)
{
    pd_assert(block_tokens > 0);
    size_t full = count / block_tokens;
    uint32_t hashes_count = full < hashes_max ? (uint32_t)full : hashes_max;
    pd_hash128 prev = root;
    for (uint32_t i = 0; i < hashes_count; i++) {
        prev = pd_prefix_hash_next(prev, tokens + (size_t)i * block_tokens, block_tokens);
        hashes_out[i] = prev;
    }
    return hashes_count;
}
