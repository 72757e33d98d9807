#include "common/worker/draft.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <stdio.h>
#include <string.h>

const char *pd_draft_differs(const pd_model_file *model, const pd_model_file *draft, char *why,
                             size_t size)
{
    const pd_text_tables *ours = pd_model_file_text(model), *theirs = pd_model_file_text(draft);
    uint32_t vocab = pd_model_file_shape(model)->vocab;

    if (pd_model_file_shape(draft)->vocab != vocab || ours->tokens_count != theirs->tokens_count) {
        snprintf(why, size, "the model has %u tokens, the draft model %u", vocab,
                 pd_model_file_shape(draft)->vocab);
        return why;
    }
    for (uint32_t id = 0; id < ours->tokens_count; id++) {
        if (ours->tokens_len[id] == theirs->tokens_len[id] &&
            memcmp(ours->tokens[id], theirs->tokens[id], ours->tokens_len[id]) == 0)
            continue;
        snprintf(why, size, "token %u is '%.40s' in the model and '%.40s' in the draft model", id,
                 ours->tokens[id], theirs->tokens[id]);
        return why;
    }
    return NULL;
}

static pd_status check_vocabulary(const pd_deployment *d, const pd_model_file *model,
                                  const pd_draft *draft)
{
    char why[192];

    if (pd_draft_differs(model, draft->file, why, sizeof why) == NULL)
        return PD_OK;
    for (char *at = why; *at != '\0'; at++) /* a token may be any bytes */
        if ((unsigned char)*at < ' ' || *at == '"')
            *at = '?';
    pd_log_error("msg=\"decode.speculative.draft_model has another vocabulary: %s\" path=%s "
                 "model=%s",
                 why, d->speculative.draft_model, d->model.path);
    return PD_E_MISMATCH;
}

static pd_status make_layout(const pd_deployment *d, pd_draft *draft)
{
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = d->kv.block_tokens,
                                    .memory_bytes = d->speculative.draft_memory_bytes,
                                    .ranks = 1};
    pd_status status =
        pd_kv_layout_make(pd_model_file_shape(draft->file), &options, &draft->layout);

    if (status != PD_OK)
        pd_log_error("msg=\"no KV of the draft model fits into decode.speculative.draft_memory\" "
                     "status=%s memory_bytes=%llu",
                     pd_status_name(status), (unsigned long long)options.memory_bytes);
    return status;
}

static pd_status bind(pd_draft *draft)
{
    pd_worker_pool pool;
    pd_status status = draft->ops->pool(draft->engine, draft->layout.pool_bytes, &pool);

    if (status != PD_OK)
        return status;
    if (pool.pieces == 0) {
        draft->memory = pd_calloc(1, draft->layout.pool_bytes);
        if (draft->memory == NULL) {
            pd_log_error("msg=\"no memory for the draft model's KV\" bytes=%llu",
                         (unsigned long long)draft->layout.pool_bytes);
            return PD_E_NOMEM;
        }
    }
    return draft->ops->bind(draft->engine, &draft->layout,
                            pool.pieces == 0 ? draft->memory : pool.memory[0], false);
}

pd_status pd_draft_open(const pd_deployment *d, const pd_model_file *model,
                        const pd_worker_engine_ops *ops, const pd_worker_engine_options *engine,
                        pd_draft *draft)
{
    pd_worker_engine_options options = *engine;

    *draft = (pd_draft){.ops = ops, .rows = engine->rows_max};
    pd_status status = pd_model_file_open(d->speculative.draft_model, &draft->file);
    if (status == PD_OK)
        status = check_vocabulary(d, model, draft);
    if (status == PD_OK)
        status = make_layout(d, draft);
    if (status != PD_OK)
        return status;
    draft->context = pd_model_file_shape(draft->file)->context;
    if (draft->context > engine->context_max)
        draft->context = engine->context_max;
    options.context_max = draft->context;
    options.sampled_rows_max = 0;
    options.ranks = 1;
    options.place = NULL;
    options.pool_reach = PD_REACH_HOST;
    status = ops->create(draft->file, &options, &draft->engine);
    if (status == PD_E_NOMEM)
        pd_log_error("msg=\"no memory for the draft model's engine\" device=%s", options.device);
    if (status == PD_OK)
        status = bind(draft);
    if (status == PD_OK)
        pd_log_info("msg=\"draft model loaded\" path=%s layers=%u backend=\"%s\" blocks=%u "
                    "pool_bytes=%llu engine_bytes=%llu",
                    d->speculative.draft_model, pd_model_file_shape(draft->file)->layers,
                    ops->backend(draft->engine), draft->layout.blocks,
                    (unsigned long long)draft->layout.pool_bytes,
                    (unsigned long long)ops->bytes(draft->engine));
    return status;
}

void pd_draft_close(pd_draft *draft)
{
    if (draft->engine != NULL) {
        draft->ops->stop(draft->engine);
        draft->ops->destroy(draft->engine);
    }
    pd_free(draft->memory);
    if (draft->file != NULL)
        pd_model_file_close(draft->file);
    *draft = (pd_draft){0};
}
