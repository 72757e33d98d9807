#pragma once

/* kernels/model/engine.h - a model on a backend, on a compute thread of its own.
 *
 * The loop thread submits jobs (one step each) and polls for finished ones; jobs run in the order
 * submitted. A job and everything it points to is the engine's from submit until poll hands it
 * back.
 *
 * Its life: create - pool_alloc where the backend wants a pool of its own - bind - jobs, seals and
 * checks - stop - whoever used the pool ends - destroy. */

#include "kernels/backend.h"

typedef struct kern_engine kern_engine;

/* With ranks: rank 0 submits jobs, and each is told to the others, who serve (kern_engine_serve).
 * Every rank's engine is created and bound with the same options but for the rank. */
typedef struct kern_engine_options {
    const char *device; /* as in kernels/plugins.h */
    /* as the backend's */
    uint32_t threads, context_max, rows_max, slices_max, sampled_rows_max, logits_rows_max;
    const cpu_set_t *pins;
    uint32_t rank, ranks;
    struct kern_comm *comm; /* NULL: one rank */
    pd_memory_reach pool_reach;
    kern_packs_place packs;
} kern_engine_options;

/* Where the device of options' rank sits. PD_E_NOT_FOUND (not logged): it is the host's cores. */
PD_CHECKED pd_status kern_engine_locate(const kern_engine_options *options,
                                        pd_device_place *place_out);

/* What engines of so many ranks need of their comm's memory, the comm's own included; 0: the device
 * has not so many here (logged). layout: of the pool that they will be bound to. *pool_own_out:
 * rank 0's engine has the pool (kern_engine_pool_alloc), it need not be shared. */
uint64_t kern_engine_shared_bytes(const pd_model_file *file, const kern_engine_options *options,
                                  const pd_kv_layout *layout, bool seals, bool *pool_own_out);

typedef struct kern_job {
    kern_job_slice *slices; /* [slices_count] */
    uint32_t slices_count;
    kern_group_done_fn *group_done; /* on the compute thread or one of the backend's, in order */
    void *group_done_ctx;
    void *user; /* the submitter's */
    /* results */
    pd_status status;
    uint64_t started_ns, finished_ns;
} kern_job;

/* The model is loaded on the calling thread (file must outlive the engine). Errors as
 * kern_backend_choose and the backend's create, PD_E_IO (no thread). */
PD_CHECKED pd_status kern_engine_create(const pd_model_file *file,
                                        const kern_engine_options *options,
                                        kern_engine **engine_out);
/* Waits for the job that is running; none is begun any more. Jobs not yet polled are forgotten, not
 * freed. Seals and checks may still be asked for. */
void kern_engine_stop(kern_engine *engine);
/* Stops it; frees its pool. NULL is fine. */
void kern_engine_destroy(kern_engine *engine);

/* Of the pool that the backend wants. */
pd_memory_kind kern_engine_pool_kind(const kern_engine *engine);
/* A pool in memory of the backend's, the engine's until destroy: a piece a rank, pieces_out[ranks],
 * each of piece_bytes; *pieces_count_out is 0 where any host memory will do. Rank 0's, once at
 * most. */
PD_CHECKED pd_status kern_engine_pool_alloc(kern_engine *engine, uint64_t piece_bytes,
                                            void **pieces_out, uint32_t *pieces_count_out);
/* Before the first job, seal or check; once. As the backend's bind. With a pool of the backend's
 * the ranks meet here. */
PD_CHECKED pd_status kern_engine_bind(kern_engine *engine, const pd_kv_layout *layout, void *pool,
                                      bool seals);

/* Ranks above 0, instead of jobs: takes part in rank 0's steps until there are no more. */
void kern_engine_serve(kern_engine *engine);

/* PD_E_OVERLOAD when 8 jobs wait already. */
PD_CHECKED pd_status kern_engine_submit(kern_engine *engine, kern_job *job);
int kern_engine_fd(const kern_engine *engine);
/* PD_E_AGAIN: none has finished. */
PD_CHECKED pd_status kern_engine_poll(kern_engine *engine, kern_job **job_out);

/* Makes and checks seals of the bound pool, on any thread, while steps run. */
pd_sealer kern_engine_sealer(kern_engine *engine);

/* As the backend's describe, bytes, broken and last_error. */
const char *kern_engine_backend(const kern_engine *engine);
uint64_t kern_engine_bytes(const kern_engine *engine);
const char *kern_engine_broken(const kern_engine *engine);
void kern_engine_last_error(const kern_engine *engine, char *text, size_t text_size);
