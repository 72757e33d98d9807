#pragma once

/* common/worker/engine.h - what runs steps, as the runtime sees it. kernels/model/runner fills it;
 * common itself knows no kernels. */

#include "common/base/device_place.h"
#include "common/base/memory_kind.h"
#include "common/kv/seal.h"
#include "common/model_file/model_file.h"
#include "common/worker/ranks.h"
#include "common/worker/step.h"

#include <sched.h>

typedef struct pd_worker_engine pd_worker_engine;

typedef struct pd_worker_engine_options {
    const char *device;         /* "cpu", "cpu-ref", "cuda:1", "auto", ... */
    uint32_t threads;           /* 0: one a usable core */
    const cpu_set_t *pins;      /* CPUs of the threads, in turn; NULL: any */
    uint32_t context_max;       /* positions */
    uint32_t rows_max;          /* tokens of a step */
    uint32_t slices_max;        /* of a step */
    uint32_t sampled_rows_max;  /* of a step; 0: slices_max */
    uint32_t ranks;             /* tensor-parallel; 0: 1 */
    pd_memory_reach pool_reach; /* of a GPU's pool */
    /* Rank 0: a rank for which it waits so much longer than for itself is killed, and the engine
     * broken. 0: never. */
    uint64_t rank_still_ns;
    /* Where packed weights are kept for all workers and the next start; NULL: nowhere. */
    const char *weights_folder;
    uint64_t weights_bytes_max; /* of all that are there */
    const pd_rank_place *place; /* NULL: ranks is 1. What it points to outlives the engine */
} pd_worker_engine_options;

/* Where an engine's KV pool must lie. */
typedef struct pd_worker_pool {
    pd_memory_kind kind;
    uint32_t pieces;            /* of the engine's own, one a rank; 0: any host memory will do */
    void *memory[PD_RANKS_MAX]; /* [pieces] */
} pd_worker_pool;

/* Called on a thread of the engine's, groups in order, when the KV of the step in every layer of
 * the group is final. */
typedef void pd_step_group_fn(void *ctx, pd_step *step, uint32_t group);

/* In the order of an engine's life; errors are logged. */
typedef struct pd_worker_engine_ops {
    /* With ranks: bytes that their engines share (pd_ranks_memory). 0: this device has not so many
     * (logged). layout: of the pool. *pool_own_out: the pool is rank 0's engine's own. */
    uint64_t (*shared_bytes)(const pd_model_file *file, const pd_worker_engine_options *options,
                             const pd_kv_layout *layout, bool seals, bool *pool_own_out);
    /* Where the device sits that this rank would compute on. PD_E_NOT_FOUND (not logged): it is the
     * host's cores. */
    pd_status (*locate)(const pd_worker_engine_options *options, pd_device_place *place_out);
    /* file must outlive the engine. */
    pd_status (*create)(const pd_model_file *file, const pd_worker_engine_options *options,
                        pd_worker_engine **engine_out);
    /* Memory for the pool, if it must be the engine's own; rank 0's, once. */
    pd_status (*pool)(pd_worker_engine *engine, uint64_t piece_bytes, pd_worker_pool *pool_out);
    /* The pool that steps work on, before the first; layout is copied. pool: the first piece; NULL
     * at ranks above 0 where it is the engine's own. Then the ranks meet here. seals: hashes are
     * made for them as blocks are written. */
    pd_status (*bind)(pd_worker_engine *engine, const pd_kv_layout *layout, void *pool, bool seals);
    /* Ranks above 0, once bound: takes part in rank 0's steps, until that one's engine stops. */
    void (*serve)(pd_worker_engine *engine);
    /* Starts a step; at most two are under way. PD_E_OVERLOAD: more. group_done may be NULL. */
    pd_status (*run)(pd_worker_engine *engine, pd_step *step, pd_step_group_fn *group_done,
                     void *ctx);
    int (*fd)(const pd_worker_engine *engine); /* readable when poll has something */
    /* A finished step with its results filled in. PD_E_AGAIN: none. */
    pd_status (*poll)(pd_worker_engine *engine, pd_step **step_out);
    /* Of the bound pool, on any thread, while steps run; until destroy. */
    pd_sealer (*sealer)(pd_worker_engine *engine);
    const char *(*backend)(const pd_worker_engine *engine); /* "cpu-avx512", "cuda NVIDIA H200" */
    uint64_t (*bytes)(const pd_worker_engine *engine);      /* memory held, without the pool */
    /* NULL: fine; else what broke its device, or which rank, for good: the worker must end. */
    const char *(*broken)(const pd_worker_engine *engine);
    /* What went wrong on its device last, the latest of what its log says; "": nothing did. */
    void (*last_error)(const pd_worker_engine *engine, char *text, size_t text_size);
    /* No step runs any more, and none begins; the ranks above 0 are released. */
    void (*stop)(pd_worker_engine *engine);
    /* Its pool goes too: whoever used it has ended. */
    void (*destroy)(pd_worker_engine *engine);
} pd_worker_engine_ops;
