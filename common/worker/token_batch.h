#pragma once

/* common/worker/token_batch.h - the tokens of one step, sent as one message a router. Pure. One
 * thread. */

#include "common/worker/role.h"

typedef struct pd_token_batch {
    pd_step_token *tokens, *sorted; /* [tokens_max] each */
    uint32_t count, tokens_max;
} pd_token_batch;

/* Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_token_batch_init(pd_token_batch *batch, uint32_t tokens_max);
void pd_token_batch_fini(pd_token_batch *batch);

void pd_token_batch_add(pd_token_batch *batch, const pd_step_token *token);
/* Sends and empties it. */
void pd_token_batch_send(pd_token_batch *batch, const pd_role_options *options,
                         const pd_role_sink *sink, const pd_step *step, double queue_ms);

/* How an answer stands with its token number index (from 0) at a position: PD_FINISH_STOP when it
 * is an end token; PD_FINISH_LENGTH when it is the last that max_tokens or the context allow. */
pd_finish pd_token_finish(uint32_t token, uint32_t index, uint32_t position,
                          const uint32_t *end_tokens, uint32_t end_tokens_count,
                          uint32_t max_tokens, uint32_t context_max);
