#pragma once

/* kernels/model/engine.h - a model on a compute thread of its own.
 *
 * The loop thread submits jobs (one step each) and polls for finished ones; jobs run in the order
 * submitted. A job and everything it points to is the engine's from submit until poll hands it
 * back. */

#include "kernels/model/forward.h"
#include "kernels/model/sample.h"

typedef struct kern_engine kern_engine;

typedef struct kern_job_slice {
    kern_slice slice; /* logits may be NULL: the engine has its own for sampling */
    bool want_token;  /* sample after the slice's last row */
    kern_sampling sampling;
    uint32_t token_out; /* the token at position slice.position + slice.count */
} kern_job_slice;

typedef struct kern_job {
    kern_job_slice *slices; /* [slices_count]; slice.logits_from is set by the engine when
                               want_token and logits is NULL */
    uint32_t slices_count;
    kern_group_done_fn *group_done; /* on the compute thread */
    void *group_done_ctx;
    void *user; /* the submitter's */
    /* results */
    pd_status status;
    uint64_t started_ns, finished_ns;
} kern_job;

/* The model is loaded on the calling thread (file must outlive the engine); pool is laid out by
 * layout, and tiles (may be NULL) are its hashes, see kern_step. Errors as kern_model_create,
 * PD_E_IO (no thread). */
PD_CHECKED pd_status kern_engine_create(const pd_model_file *file, const kern_options *options,
                                        const pd_kv_layout *layout, void *pool,
                                        pd_seal_tiles *tiles, kern_engine **engine_out);
/* Waits for the job that is running; jobs not yet polled are forgotten, not freed. */
void kern_engine_destroy(kern_engine *engine);

/* PD_E_OVERLOAD when 8 jobs wait already. */
PD_CHECKED pd_status kern_engine_submit(kern_engine *engine, kern_job *job);
int kern_engine_fd(const kern_engine *engine);
/* PD_E_AGAIN: none has finished. */
PD_CHECKED pd_status kern_engine_poll(kern_engine *engine, kern_job **job_out);
const char *kern_engine_backend(const kern_engine *engine);
uint64_t kern_engine_bytes(const kern_engine *engine);
