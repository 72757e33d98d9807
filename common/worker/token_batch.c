#include "common/worker/token_batch.h"

#include "common/base/mem.h"

#include <stdio.h>

pd_status pd_token_batch_init(pd_token_batch *batch, uint32_t tokens_max)
{
    *batch = (pd_token_batch){.tokens_max = tokens_max};
    batch->tokens = pd_calloc(tokens_max, sizeof *batch->tokens);
    batch->sorted = pd_calloc(tokens_max, sizeof *batch->sorted);
    if (batch->tokens == NULL || batch->sorted == NULL) {
        pd_token_batch_fini(batch);
        return PD_E_NOMEM;
    }
    return PD_OK;
}

void pd_token_batch_fini(pd_token_batch *batch)
{
    pd_free(batch->tokens);
    pd_free(batch->sorted);
    *batch = (pd_token_batch){0};
}

void pd_token_batch_add(pd_token_batch *batch, const pd_step_token *token)
{
    pd_assert(batch->count < batch->tokens_max);
    batch->tokens[batch->count++] = *token;
}

void pd_token_batch_send(pd_token_batch *batch, const pd_role_options *options,
                         const pd_role_sink *sink, const pd_step *step, double queue_ms)
{
    while (batch->count > 0) {
        uint64_t router = batch->tokens[0].key.router;
        uint32_t of_router = 0, others = 0;
        for (uint32_t i = 0; i < batch->count; i++) {
            if (batch->tokens[i].key.router == router)
                batch->sorted[of_router++] = batch->tokens[i];
            else
                batch->tokens[others++] = batch->tokens[i];
        }
        batch->count = others;

        pd_message message = {.kind = PD_MSG_STEP_TOKENS};
        pd_msg_step_tokens *out = &message.step_tokens;
        snprintf(out->name, sizeof out->name, "%s", options->name);
        out->incarnation = options->incarnation;
        out->step = step->number;
        out->queue_ms = (float)queue_ms;
        out->step_ms = (float)((double)(step->finished_ns - step->started_ns) / 1e6);
        out->tokens = batch->sorted;
        out->tokens_count = of_router;
        sink->send(sink->ctx, router, &message);
    }
}

pd_finish pd_token_finish(uint32_t token, uint32_t index, uint32_t position,
                          const uint32_t *end_tokens, uint32_t end_tokens_count,
                          uint32_t max_tokens, uint32_t context_max)
{
    for (uint32_t i = 0; i < end_tokens_count; i++) {
        if (end_tokens[i] == token)
            return PD_FINISH_STOP;
    }
    /* A token at position context_max can be answered but not be read back in. */
    return index + 1 >= max_tokens || position >= context_max ? PD_FINISH_LENGTH : PD_FINISH_NONE;
}
