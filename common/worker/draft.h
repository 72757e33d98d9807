#pragma once

/* common/worker/draft.h - the draft model of a decode worker: file, engine and KV memory of its
 * own.
 *
 * It computes where its worker does, on the worker's device and with as many threads, and steps
 * between the model's steps. One thread. */

#include "common/config/deployment.h"
#include "common/model_file/model_file.h"
#include "common/worker/engine.h"

typedef struct pd_draft {
    const pd_worker_engine_ops *ops;
    pd_model_file *file;
    pd_worker_engine *engine;
    pd_kv_layout layout;
    void *memory; /* of the KV, where the engine has none of its own */
    uint32_t context, rows;
} pd_draft;

/* NULL, or in what way the drafts of one would not be tokens of the other, in words, written to
 * why. Any thread. */
const char *pd_draft_differs(const pd_model_file *model, const pd_model_file *draft, char *why,
                             size_t size);

/* engine: the worker's own options; rank 0's. context: the worker's. Errors are logged:
 * PD_E_MISMATCH (another vocabulary), PD_E_INVALID, PD_E_IO, PD_E_UNSUPPORTED, PD_E_NOMEM. Closed
 * whatever comes of it. */
PD_CHECKED pd_status pd_draft_open(const pd_deployment *deployment, const pd_model_file *model,
                                   const pd_worker_engine_ops *ops,
                                   const pd_worker_engine_options *engine, pd_draft *draft);
void pd_draft_close(pd_draft *draft);
