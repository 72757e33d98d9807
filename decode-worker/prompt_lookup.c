#include "decode-worker/prompt_lookup.h"

#include "common/base/hash.h"

#include <string.h>

enum { CHAIN_MOST = 16 }; /* occurrences that are looked at */

/* A position stands for the n-gram that ends there; 0 is none, for n-grams have two tokens. */
typedef struct lookup {
    uint32_t least, most; /* tokens of an n-gram */
    uint32_t chains;      /* a power of two */
    uint32_t indexed;     /* positions below are in their chains */
    uint32_t *latest;     /* [chains] */
    uint32_t *before;     /* [tokens_max] the one before in the same chain */
} lookup;

static uint32_t chains_of(uint32_t tokens_max)
{
    uint32_t chains = 64;

    while (chains < tokens_max)
        chains *= 2;
    return chains;
}

static size_t lookup_bytes(const pd_speculation *how, uint32_t tokens_max)
{
    (void)how;
    size_t words = (size_t)chains_of(tokens_max) + tokens_max;
    return sizeof(lookup) + (words * sizeof(uint32_t) + 7) / 8 * 8;
}

static void lookup_init(void *state, const pd_speculation *how, uint32_t tokens_max)
{
    lookup *l = state;

    *l = (lookup){.least = how->ngram_min,
                  .most = how->ngram_max,
                  .chains = chains_of(tokens_max),
                  .indexed = how->ngram_min - 1,
                  .latest = (uint32_t *)(l + 1)};
    l->before = l->latest + l->chains;
    memset(l->latest, 0, l->chains * sizeof *l->latest);
}

static uint32_t *chain_of(const lookup *l, const uint32_t *tokens, uint32_t end)
{
    uint64_t hash = pd_hash64(tokens + end + 1 - l->least, l->least * sizeof *tokens, 0);

    return &l->latest[hash & (l->chains - 1)];
}

/* How many tokens up to a and up to b are the same; a < b. */
static uint32_t agree(const lookup *l, const uint32_t *tokens, uint32_t a, uint32_t b)
{
    uint32_t count = 0;

    while (count < l->most && count <= a && tokens[a - count] == tokens[b - count])
        count++;
    return count;
}

static uint32_t lookup_propose(void *state, const uint32_t *tokens, uint32_t count, uint32_t most,
                               uint32_t *out)
{
    lookup *l = state;
    uint32_t last = count - 1, best = 0, best_tokens = 0;

    for (; l->indexed < last; l->indexed++) {
        uint32_t *chain = chain_of(l, tokens, l->indexed);
        l->before[l->indexed] = *chain;
        *chain = l->indexed;
    }
    if (count <= l->least)
        return 0;
    uint32_t at = *chain_of(l, tokens, last);
    for (uint32_t i = 0; at != 0 && i < CHAIN_MOST && best_tokens < l->most; i++) {
        uint32_t tokens_alike = agree(l, tokens, at, last);
        if (tokens_alike >= l->least && tokens_alike > best_tokens) {
            best = at;
            best_tokens = tokens_alike;
        }
        at = l->before[at];
    }
    if (best_tokens == 0)
        return 0;
    /* past the text's end it repeats itself */
    for (uint32_t i = 0; i < most; i++)
        out[i] = best + 1 + i < count ? tokens[best + 1 + i] : out[best + 1 + i - count];
    return most;
}

const decode_guess_ops decode_prompt_lookup = {
    .bytes = lookup_bytes, .init = lookup_init, .propose = lookup_propose};
