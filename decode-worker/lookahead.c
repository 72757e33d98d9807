#include "decode-worker/lookahead.h"

#include "common/base/hash.h"

#include <string.h>

enum {
    NGRAM_MOST = PD_SPEC_NGRAM_MOST,
    WINDOW_MOST = PD_SPEC_DRAFTS_MOST,
    SETS = 256,
    WAYS = 4,
    STEPS = NGRAM_MOST - 1, /* of windows that are remembered */
};

typedef struct gram {
    uint32_t tokens[NGRAM_MOST]; /* the first is what it is found by */
    uint32_t count;              /* 0: none */
    uint32_t turn;               /* when it was put in or found right last */
} gram;

/* Tokens in place of those at positions from .. from + count - 1. */
typedef struct window {
    uint32_t from, count;
    uint32_t tokens[WINDOW_MOST];
} window;

typedef struct lookahead {
    uint32_t ngram, width;
    uint32_t turn;
    uint32_t seen;        /* tokens of the answer whose n-grams are in the pool */
    uint32_t drafts_from; /* of the latest proposal: how many came from the pool */
    window past[STEPS];   /* the latest first */
    window next;          /* what was said after the latest */
    gram pool[SETS][WAYS];
} lookahead;

static size_t lookahead_bytes(const pd_speculation *how, uint32_t tokens_max)
{
    (void)how;
    (void)tokens_max;
    return (sizeof(lookahead) + 7) / 8 * 8;
}

static void lookahead_init(void *state, const pd_speculation *how, uint32_t tokens_max)
{
    lookahead *l = state;

    (void)tokens_max;
    memset(l, 0, sizeof *l);
    l->ngram = how->ngram_max;
    l->width = how->window;
    l->seen = UINT32_MAX;
}

/* ---- the pool ---- */

static gram *set_of(lookahead *l, uint32_t token)
{
    return l->pool[pd_mix64(token) % SETS];
}

/* In place of the one with the same first two tokens, else of the oldest. */
static void keep(lookahead *l, const uint32_t *tokens, uint32_t count)
{
    gram *set = set_of(l, tokens[0]), *place = &set[0];

    if (count < 2)
        return;
    for (uint32_t way = 0; way < WAYS; way++) {
        gram *g = &set[way];
        if (g->count > 0 && g->tokens[0] == tokens[0] && g->tokens[1] == tokens[1]) {
            place = g;
            break;
        }
        if (g->turn < place->turn)
            place = g;
    }
    place->turn = l->turn;
    if (place->count > count && memcmp(place->tokens, tokens, count * sizeof *tokens) == 0)
        return; /* it says more of the same */
    memcpy(place->tokens, tokens, count * sizeof *tokens);
    place->count = count;
}

/* The latest that begins with the token; NULL: none. */
static const gram *find(lookahead *l, uint32_t token)
{
    gram *set = set_of(l, token), *best = NULL;

    for (uint32_t way = 0; way < WAYS; way++) {
        gram *g = &set[way];
        if (g->count > 0 && g->tokens[0] == token && (best == NULL || g->turn > best->turn))
            best = g;
    }
    return best;
}

/* The answer's own n-grams, as they come to be. */
static void keep_text(lookahead *l, const uint32_t *tokens, uint32_t count)
{
    if (l->seen == UINT32_MAX)
        l->seen = count; /* the prompt's are the business of prompt lookup */
    for (; l->seen < count; l->seen++) {
        uint32_t take = l->ngram < l->seen + 1 ? l->ngram : l->seen + 1;
        keep(l, tokens + l->seen + 1 - take, take);
    }
}

/* ---- proposing ---- */

static bool window_at(const window *w, uint32_t position, uint32_t *token_out)
{
    if (position < w->from || position - w->from >= w->count)
        return false;
    *token_out = w->tokens[position - w->from];
    return true;
}

static uint32_t lookahead_propose(void *state, const uint32_t *tokens, uint32_t count,
                                  uint32_t most, uint32_t *out)
{
    lookahead *l = state;
    uint32_t made = 0;

    l->turn++;
    keep_text(l, tokens, count);
    const gram *g = find(l, tokens[count - 1]);
    for (uint32_t i = 1; g != NULL && i < g->count && made < most; i++)
        out[made++] = g->tokens[i];
    l->drafts_from = made;
    for (uint32_t i = 0; i < l->width && made < most; i++, made++) {
        /* where the iteration has not been yet, any token of the text begins it */
        if (!window_at(&l->next, count + made, &out[made]))
            out[made] = tokens[pd_mix64(count + made) % count];
    }
    return made;
}

/* ---- learning ---- */

/* The diagonal that ends in what was said after the window's token at `position`. */
static void keep_diagonal(lookahead *l, uint32_t position, uint32_t said)
{
    uint32_t tokens[NGRAM_MOST], first = l->ngram - 1;

    tokens[first] = said;
    for (uint32_t back = 0; first > 0 && back < STEPS; back++) {
        if (position < back || !window_at(&l->past[back], position - back, &tokens[first - 1]))
            break;
        first--;
    }
    keep(l, tokens + first, l->ngram - first);
}

static void lookahead_learn(void *state, uint32_t position, const uint32_t *drafts,
                            uint32_t drafts_count, const uint32_t *said)
{
    lookahead *l = state;
    uint32_t from = l->drafts_from < drafts_count ? l->drafts_from : drafts_count;
    window now = {.from = position + 1 + from, .count = drafts_count - from};

    memcpy(now.tokens, drafts + from, now.count * sizeof *drafts);
    memmove(&l->past[1], &l->past[0], (STEPS - 1) * sizeof l->past[0]);
    l->past[0] = now;
    l->next = (window){.from = now.from + 1, .count = now.count};
    memcpy(l->next.tokens, said + from + 1, now.count * sizeof *said);
    for (uint32_t i = 0; i < now.count; i++)
        keep_diagonal(l, now.from + i, said[from + 1 + i]);
}

const decode_guess_ops decode_lookahead = {.bytes = lookahead_bytes,
                                           .init = lookahead_init,
                                           .propose = lookahead_propose,
                                           .learn = lookahead_learn};
