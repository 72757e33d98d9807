#pragma once

/* kernels/model/forward.h - a batch of tokens through the layers of a llama-shaped model, on the
 * host.
 *
 * One model a stepping thread. The KV pool is memory laid out by common/kv/layout and owned by the
 * caller. A step takes rows (tokens) of several sequences: prefill chunks and decode steps are the
 * same thing with other counts. A row's result is bit for bit the same whatever shares its step,
 * however the prompt was cut into chunks, with any number of threads and any instruction set, and
 * at any number of ranks.
 *
 * Ranks: each has a model of its own part of the weights and steps with the same slices at the same
 * time. Layouts are of the whole pool, and heads numbered as in the whole model; a rank writes and
 * reads its own heads. */

#include "kernels/backend.h"
#include "kernels/comm.h"
#include "kernels/packs.h"

typedef struct kern_model kern_model;

typedef struct kern_options {
    const char *device;    /* "cpu": the fastest here; "cpu-ref": the scalar reference; "cpu-avx2",
                              "cpu-avx512", "cpu-amx": that one or PD_E_UNSUPPORTED */
    uint32_t threads;      /* compute threads, the caller's included; 0: one a usable core */
    const cpu_set_t *pins; /* their CPUs, in turn; NULL: any */
    uint32_t context_max;  /* positions 0 .. context_max - 1 */
    uint32_t rows_max;     /* tokens a step */
    uint32_t logits_rows_max; /* rows of a step whose logits are wanted */
    kern_comm *comm;          /* of the ranks; NULL: there is one. Outlives the model */
    kern_packs_place packs;   /* of the packed weights; all 0: private memory */
} kern_options;

/* Weights are repacked for the backend. file must outlive the model. Errors: PD_E_UNSUPPORTED (a
 * device this machine or build lacks, with the probe's reason logged; a weight format without
 * kernels), PD_E_NOMEM. */
PD_CHECKED pd_status kern_model_create(const pd_model_file *file, const kern_options *options,
                                       kern_model **model_out);
void kern_model_destroy(kern_model *model);
const char *kern_model_backend(const kern_model *model); /* "cpu-avx512", ... */
uint64_t kern_model_bytes(const kern_model *model);      /* memory held */
/* What a model takes of its comm's memory. */
uint64_t kern_model_shared_bytes(const pd_model_shape *shape, const kern_options *options,
                                 uint32_t ranks);
/* With ranks: where the logits of the n-th row that gets some are in any case, and are wanted best;
 * NULL with one rank. */
float *kern_model_logits(const kern_model *model, uint32_t n);

typedef struct kern_step {
    const pd_kv_layout *layout;
    void *pool;           /* layout->pool_bytes */
    pd_seal_tiles *tiles; /* of the pool: hashed as K and V are written; NULL: nobody seals */
    const kern_slice *slices;
    uint32_t slices_count;
    kern_group_done_fn *group_done; /* on the stepping thread; may be NULL */
    void *group_done_ctx;
} kern_step;

/* Runs the step; the caller's thread computes too. Sum of counts <= rows_max (pd_assert).
 * Errors: PD_E_INVALID (a token id or position out of range), PD_E_INTERNAL (logits not finite, or
 * a rank is gone: not logged). Ranks above 0 write no logits of their slices, and have no
 * group_done.
 */
PD_CHECKED pd_status kern_model_step(kern_model *model, const kern_step *step);
