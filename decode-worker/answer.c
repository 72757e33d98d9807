#include "decode-worker/answer.h"

#include "common/base/mem.h"

#include <string.h>

const char *decode_answer_check(const pd_role_options *options, const decode_sequence *s,
                                const pd_msg_decode_start *asked)
{
    uint64_t capacity = (uint64_t)asked->prompt_tokens + asked->max_tokens - 1;

    if (capacity > options->context_max)
        capacity = options->context_max;
    if (asked->max_tokens == 0 || asked->prompt_tokens == 0 ||
        asked->tokens_count <= asked->prompt_tokens)
        return "an answer goes on from its first token";
    if (asked->tokens_count <= s->prompt_tokens)
        return "fewer tokens than have landed";
    if (asked->tokens_count > s->capacity || capacity > s->capacity)
        return "the answer is longer than was leased for";
    if (asked->tokens_count - asked->prompt_tokens >= asked->max_tokens)
        return "the answer is complete already";
    for (uint32_t i = 0; i < asked->tokens_count; i++) {
        if (asked->tokens[i] >= options->vocab)
            return "a token id is not in the vocabulary";
    }
    return NULL;
}

pd_status decode_answer_begin(decode_sequence *s, const pd_msg_decode_start *asked,
                              size_t drafting_bytes)
{
    /* One more than has room in the KV: the last token is answered, never read back in. */
    s->tokens_max = s->capacity + 1;
    s->answer_memory = pd_malloc(
        drafting_bytes + ((size_t)s->tokens_max + asked->end_tokens_count) * sizeof(uint32_t));
    if (s->answer_memory == NULL)
        return PD_E_NOMEM;
    s->drafting.state = drafting_bytes == 0 ? NULL : s->answer_memory;
    s->tokens = (uint32_t *)((char *)s->answer_memory + drafting_bytes);
    s->end_tokens = s->tokens + s->tokens_max;
    memcpy(s->tokens, asked->tokens, asked->tokens_count * sizeof *s->tokens);
    if (asked->end_tokens_count > 0)
        memcpy(s->end_tokens, asked->end_tokens, asked->end_tokens_count * sizeof *s->end_tokens);
    s->tokens_count = asked->tokens_count;
    s->end_tokens_count = asked->end_tokens_count;
    s->answer_from = asked->prompt_tokens;
    s->max_tokens = asked->max_tokens;
    s->sampling = asked->sampling;
    return PD_OK;
}
