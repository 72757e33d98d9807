#include "prefill-worker/request.h"

#include "common/base/clock.h"
#include "common/base/mem.h"

#include <string.h>

const char *prefill_request_check(const pd_role_options *options,
                                  const pd_msg_prefill_request *asked, pd_status *status_out)
{
    uint32_t block_tokens = options->layout.block_tokens;
    uint64_t blocks = ((uint64_t)asked->tokens_count + block_tokens - 1) / block_tokens;

    *status_out = PD_E_TOO_LARGE;
    if (asked->tokens_count > options->context_max)
        return "the prompt is longer than the context";
    if (blocks > options->layout.blocks)
        return "the prompt needs more KV blocks than there are";
    *status_out = PD_E_INVALID;
    if (asked->tokens_count == 0)
        return "the prompt is empty";
    if (asked->prompt_tokens == 0 || asked->prompt_tokens > asked->tokens_count)
        return "the prompt is not a part of the tokens";
    uint32_t answered = asked->tokens_count - asked->prompt_tokens;
    if (asked->max_tokens == 0)
        return "max_tokens is 0";
    if (answered >= asked->max_tokens)
        return "the answer is complete already";
    if (asked->hashes_count > asked->tokens_count / block_tokens)
        return "more hashes than full blocks";
    if (!asked->ship && asked->max_tokens - answered > 1)
        return "an answer of several tokens needs a decode worker";
    for (uint32_t i = 0; i < asked->tokens_count; i++) {
        if (asked->tokens[i] >= options->vocab)
            return "a token id is not in the vocabulary";
    }
    *status_out = PD_OK;
    return NULL;
}

static void *carve(unsigned char **at, const void *source, size_t bytes)
{
    void *place = *at;

    if (bytes > 0 && source != NULL)
        memcpy(place, source, bytes);
    *at += (bytes + 15) / 16 * 16;
    return place;
}

prefill_request *prefill_request_new(const pd_role_options *options,
                                     const pd_msg_prefill_request *asked)
{
    uint32_t block_tokens = options->layout.block_tokens;
    uint32_t blocks = (asked->tokens_count + block_tokens - 1) / block_tokens;
    size_t hashes_bytes = asked->hashes_count * sizeof *asked->hashes;
    size_t tokens_bytes = asked->tokens_count * sizeof *asked->tokens;
    size_t ends_bytes = asked->end_tokens_count * sizeof *asked->end_tokens;
    size_t blocks_bytes = blocks * sizeof(pd_block);
    size_t shipped_bytes = options->layout.groups * sizeof(uint32_t);
    prefill_request *r = pd_calloc(1, sizeof *r);
    unsigned char *at = r == NULL
                            ? NULL
                            : pd_calloc(1, hashes_bytes + tokens_bytes + ends_bytes +
                                               2 * blocks_bytes + shipped_bytes + (size_t)6 * 16);

    if (at == NULL) {
        pd_free(r);
        return NULL;
    }
    r->memory = at;
    r->hashes = carve(&at, asked->hashes, hashes_bytes);
    r->tokens = carve(&at, asked->tokens, tokens_bytes);
    r->end_tokens = carve(&at, asked->end_tokens, ends_bytes);
    r->blocks = carve(&at, NULL, blocks_bytes);
    r->targets = carve(&at, NULL, blocks_bytes);
    r->shipped = carve(&at, NULL, shipped_bytes);
    r->groups = options->layout.groups;
    r->item.tokens = asked->tokens_count;
    r->hashes_count = asked->hashes_count;
    r->end_tokens_count = asked->end_tokens_count;
    r->blocks_count = blocks;
    r->answered = asked->tokens_count - asked->prompt_tokens;
    r->key = asked->key;
    memcpy(r->id, asked->id, sizeof r->id);
    r->sampling = asked->sampling;
    r->max_tokens = asked->max_tokens;
    /* The answer's only token is made here: nothing has to leave. */
    r->ship = asked->ship && asked->max_tokens - r->answered > 1;
    r->whole = options->ship_whole;
    r->receiver = asked->decode_incarnation;
    r->pull_from = asked->pull;
    r->pull_from.transfer_address = NULL;
    r->pull_from.transfer_address_len = 0;
    r->pull_blocks = asked->pull_blocks;
    r->hold_ns = asked->hold_ms * PD_NS_PER_MS;
    r->pull_ns = asked->pull_ms * PD_NS_PER_MS;
    r->word_owed = true;
    r->reason = "";
    return r;
}

void prefill_request_free(prefill_request *request)
{
    if (request == NULL)
        return;
    pd_free(request->asked);
    pd_free(request->memory);
    pd_free(request);
}
