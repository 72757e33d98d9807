#pragma once

/* common/worker/engine.h - what runs steps, as the runtime sees it. kernels/model/runner fills it;
 * common itself knows no kernels. */

#include "common/kv/seal.h"
#include "common/model_file/model_file.h"
#include "common/worker/step.h"

typedef struct pd_worker_engine pd_worker_engine;

typedef struct pd_worker_engine_options {
    const char *device;   /* "cpu", "cpu-ref", ... */
    uint32_t threads;     /* 0: one a usable core */
    uint32_t context_max; /* positions */
    uint32_t rows_max;    /* tokens of a step */
    uint32_t slices_max;  /* of a step */
    pd_seal_tiles *tiles; /* of the pool, filled in as its blocks are written; NULL: nobody seals */
} pd_worker_engine_options;

/* Called on the compute thread when the KV of the step in every layer of the group is final. */
typedef void pd_step_group_fn(void *ctx, pd_step *step, uint32_t group);

typedef struct pd_worker_engine_ops {
    /* file, layout and pool must outlive the engine. Errors are logged. */
    pd_status (*create)(const pd_model_file *file, const pd_worker_engine_options *options,
                        const pd_kv_layout *layout, void *pool, pd_worker_engine **engine_out);
    void (*destroy)(pd_worker_engine *engine);
    /* Starts a step; at most two are under way. PD_E_OVERLOAD: more. group_done may be NULL. */
    pd_status (*run)(pd_worker_engine *engine, pd_step *step, pd_step_group_fn *group_done,
                     void *ctx);
    int (*fd)(const pd_worker_engine *engine); /* readable when poll has something */
    /* A finished step with its results filled in. PD_E_AGAIN: none. */
    pd_status (*poll)(pd_worker_engine *engine, pd_step **step_out);
    const char *(*backend)(const pd_worker_engine *engine); /* "cpu-avx512" */
    uint64_t (*bytes)(const pd_worker_engine *engine);      /* memory held */
} pd_worker_engine_ops;
