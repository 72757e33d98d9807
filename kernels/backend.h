#pragma once

/* kernels/backend.h - the table of a backend: a whole model on some processor.
 *
 * The host's backend ("cpu") is built in (kernels/model/host); those for GPUs are plugins
 * (kernels/plugins) that bring their own copies of common's modules, so what a table is given and
 * gives back is plain data, const objects of common/model_file and common/kv, and memory of its
 * own.
 *
 * The calls in order: probe (and attach, for a plugin) - create - pool_alloc where pool_own - bind,
 * once - step, seal and check - the pool goes (pool_free) when nobody steps, seals or checks any
 * more - destroy. With ranks (one process each, kernels/comm.h): shared_bytes first; every rank
 * creates, binds and steps the same; rank 0 alone has pools, seals and tokens, and its pool goes
 * when the other ranks have ended. Threads: everything from create to bind on one thread; then step
 * on one thread, and seal and check on any others, at the same time as step and each other, for
 * blocks whose KV in that layer group nobody writes meanwhile (other blocks are being written).
 * describe, bytes, broken and last_error on any thread.
 *
 * Errors are logged once, by the backend. PD_E_NOMEM, PD_E_UNSUPPORTED: at start; PD_E_INTERNAL:
 * the step or the seals cannot be trusted, and when `broken` says something, nothing after them
 * will be. PD_E_NOMEM of a step: the device or the host has no memory left for it; the worker
 * ends. */

#include "common/base/device_place.h"
#include "common/base/log.h"
#include "common/base/memory_kind.h"
#include "common/kv/seal.h"
#include "common/model_file/model_file.h"
#include "kernels/model/sample.h"
#include "kernels/packs.h"

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KERN_BACKEND_ABI 5
/* The one symbol that a plugin shows, declared below. */
#define KERN_BACKEND_SYMBOL "kern_backend_plugin"

typedef struct kern_loaded kern_loaded; /* a model on a backend; each backend has its own */
struct kern_comm;                       /* tensor-parallel ranks (kernels/comm.h) */
struct kern_comm_calls;

typedef struct kern_backend_options {
    uint32_t device;           /* the n-th of the backend's devices; of ranks, rank 0's */
    const char *variant;       /* "cpu-avx2": one of the host's instruction sets; NULL: the best */
    uint32_t threads;          /* host threads that compute; 0: one a usable core */
    const cpu_set_t *pins;     /* their CPUs, in turn; NULL: any */
    uint32_t context_max;      /* positions 0 .. context_max - 1 */
    uint32_t rows_max;         /* tokens of a step */
    uint32_t slices_max;       /* of a step; each may sample a token */
    uint32_t sampled_rows_max; /* rows of a step that are sampled; 0: slices_max */
    uint32_t logits_rows_max;  /* rows of a step whose logits go to the host, beside sampling; 0: no
                                  slice asks */
    uint32_t rank, ranks;      /* of a tensor-parallel group; ranks 0 is 1 */
    struct kern_comm *comm;    /* NULL when alone; outlives the model */
    const struct kern_comm_calls *comm_calls; /* how a plugin calls it */
    pd_memory_reach pool_reach;               /* of pool_alloc's memory, where that is a GPU's */
    kern_packs_place packs;                   /* the host's: where packed weights are kept */
} kern_backend_options;

/* A part of one sequence: tokens at positions position .. position + count - 1. The KV of all
 * positions before is in the pool; this step's is written to it. */
typedef struct kern_slice {
    const uint32_t *tokens; /* [count] */
    uint32_t count;
    uint32_t position;      /* of tokens[0] */
    const pd_block *blocks; /* block table from position 0; covers position + count tokens */
    uint32_t logits_from; /* rows logits_from .. count - 1 of this slice get logits (count: none) */
    float *logits;        /* host, [count - logits_from][vocab], written; NULL when none */
} kern_slice;

/* A slice, and what is to come of it.
 *
 * Its last tokens may be drafts: guesses at what the model says, taken along to be verified. Then
 * the row before each of them is sampled as well, each with the draw of its own position, so that
 * drafts_out[i] is the token that belongs where the i-th draft stands: the first drafts that are
 * equal to theirs are what the model says, and so is the first that differs, or token_out when none
 * does. K and V of drafts that are not stay in the pool until a later step writes their positions
 * again. */
typedef struct kern_job_slice {
    kern_slice slice;
    bool want_token; /* sample after the slice's last row, whether or not it asks for logits */
    /* Of the slice's tokens, the last so many: fewer than slice.count; 0 without want_token. With
     * logits, these are asked for from the first row that is sampled, or before. */
    uint32_t drafts;
    kern_sampling sampling;
    uint32_t token_out;   /* written: the token at position slice.position + slice.count */
    uint32_t *drafts_out; /* [drafts], written likewise: at those of the drafts */
} kern_job_slice;

/* The first row of a slice that is sampled; slice.count: none is. */
static inline uint32_t kern_sampled_from(const kern_job_slice *job)
{
    return job->want_token ? job->slice.count - 1 - job->drafts : job->slice.count;
}

/* Every layer of the group is done for all rows of the step: its KV in the pool is final, for
 * whoever reads the pool (other devices and processes too). */
typedef void kern_group_done_fn(void *ctx, uint32_t group);

typedef struct kern_backend_step {
    kern_job_slice *slices;
    uint32_t slices_count; /* <= slices_max; the counts' sum <= rows_max */
    /* May be NULL. On the stepping thread or one of the backend's own, groups in order, each once,
     * the last before step returns PD_OK. It must not call the backend. */
    kern_group_done_fn *group_done;
    void *group_done_ctx;
} kern_backend_step;

typedef struct kern_backend {
    uint32_t abi;          /* KERN_BACKEND_ABI */
    uint32_t struct_bytes; /* sizeof(kern_backend) where it was built */
    const char *name;      /* "cpu", "cuda", "cuda-emu" */
    pd_memory_kind pool_kind;
    bool pool_own; /* the KV pool must be pool_alloc's; else any host memory will do */

    /* How well it runs here on that device; 0: not at all. The reason is written either way, one
     * line without quotes. 10 and more: the host's; 100 and more: a GPU; 1: an emulation, never
     * better than anything. */
    int (*probe)(uint32_t device, char *reason, size_t reason_size);
    /* For a plugin's own copy of common/base/log: as pd_log_init. NULL: nothing to do. */
    void (*attach)(const char *service, pd_log_level level);
    /* Where the device of options' rank sits, before anything is made on it. NULL: nowhere but on
     * the host's cores. Of options: device, rank, ranks. Errors: as create's. */
    pd_status (*locate)(const kern_backend_options *options, pd_device_place *place_out);

    /* What so many ranks need of their comm's memory, all of their life; 0: there cannot be so many
     * here (logged). layout: of the pool that they will be bound to. */
    uint64_t (*shared_bytes)(const pd_model_shape *shape, const kern_backend_options *options,
                             const pd_kv_layout *layout, bool seals);
    /* file outlives the model. Errors: PD_E_UNSUPPORTED (the device, the model's shape or a weight
     * format), PD_E_INVALID (a tensor missing), PD_E_NOMEM, PD_E_IO (threads). */
    pd_status (*create)(const pd_model_file *file, const kern_backend_options *options,
                        kern_loaded **model_out);
    void (*destroy)(kern_loaded *model); /* NULL is fine */
    /* "cpu-avx512", "cuda NVIDIA H200"; the model's until it ends. */
    const char *(*describe)(const kern_loaded *model);
    uint64_t (*bytes)(const kern_loaded *model); /* memory held, without the pool */
    /* NULL: fine; else what broke it for good: every later step fails, the worker must end. */
    const char *(*broken)(const kern_loaded *model);
    /* What went wrong last on its device, for good or not, as it was logged: the reason of a worker
     * that ends because its steps keep failing. "": nothing did. */
    void (*last_error)(const kern_loaded *model, char *text, size_t text_size);

    /* Only where pool_own, rank 0's. A piece for each rank, where that one can work on it:
     * pieces_out[rank]. Zeroed; each aligned to a page, one allocation that a transfer can
     * register. PD_E_UNSUPPORTED: pool_reach cannot be had (logged). */
    pd_status (*pool_alloc)(kern_loaded *model, uint64_t piece_bytes, void **pieces_out);
    void (*pool_free)(kern_loaded *model);
    /* The pool that steps work on; layout is copied. pool: all of it, where it is any host memory;
     * where pool_own, rank 0's piece, and NULL at the others, who get theirs from rank 0. seals:
     * hashes for seals are made while K and V are written; else seal and check are made from the
     * bytes. PD_E_NOMEM, PD_E_UNSUPPORTED (a format of KV that the backend does not read). */
    pd_status (*bind)(kern_loaded *model, const pd_kv_layout *layout, void *pool, bool seals);

    /* Runs the step to its end. A row's result is bit for bit the same whatever shares its step,
     * however the prompt was cut into chunks. Errors: PD_E_INVALID (a token id or position out of
     * range), PD_E_TOO_LARGE (more slices or logits than the options said), PD_E_INTERNAL (logits
     * not finite, the device failed). */
    pd_status (*step)(kern_loaded *model, const kern_backend_step *step);

    /* seals[i] of items[i], by the hashes where they cover the block. One read-back a call: ask for
     * many at once. */
    pd_status (*seal)(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                      uint64_t *seals_out);
    /* Compares what others wrote with its seals, by the bytes, and keeps the hashes of what matches
     * (pd_seal_check_items). PD_E_MISMATCH: *bad_out is the first item that does not match, later
     * ones may not have been looked at. */
    pd_status (*check)(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                       const uint64_t *seals, uint32_t *bad_out);
} kern_backend;

/* Defined by each plugin for itself; found by name. */
extern __attribute__((visibility("default"))) const kern_backend kern_backend_plugin;
