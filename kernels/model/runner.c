#include "kernels/model/runner.h"

#include "common/base/mem.h"
#include "kernels/comm.h"
#include "kernels/model/engine.h"

enum { JOBS = 2 };

typedef struct runner_job {
    kern_job job; /* job.user: this */
    bool busy;
    pd_step *step;
    pd_step_group_fn *group_done;
    void *ctx;
} runner_job;

struct pd_worker_engine {
    kern_engine *engine;
    kern_comm *comm; /* NULL: one rank */
    uint32_t slices_max;
    kern_job_slice *slices; /* [JOBS][slices_max] */
    runner_job jobs[JOBS];
};

static void runner_destroy(pd_worker_engine *engine)
{
    if (engine == NULL)
        return;
    kern_engine_destroy(engine->engine);
    kern_comm_destroy(engine->comm);
    pd_free(engine->slices);
    pd_free(engine);
}

static kern_engine_options engine_options(const pd_worker_engine_options *options)
{
    return (kern_engine_options){
        .device = options->device,
        .threads = options->threads,
        .pins = options->pins,
        .context_max = options->context_max,
        .rows_max = options->rows_max,
        .slices_max = options->slices_max,
        .sampled_rows_max = options->sampled_rows_max,
        .ranks = options->ranks,
        .pool_reach = options->pool_reach,
        .packs = {.folder = options->weights_folder, .bytes_max = options->weights_bytes_max},
    };
}

static pd_status runner_locate(const pd_worker_engine_options *options, pd_device_place *place_out)
{
    kern_engine_options kernel = engine_options(options);

    kernel.rank = options->place != NULL ? options->place->rank : 0;
    return kern_engine_locate(&kernel, place_out);
}

static uint64_t runner_shared_bytes(const pd_model_file *file,
                                    const pd_worker_engine_options *options,
                                    const pd_kv_layout *layout, bool seals, bool *pool_own_out)
{
    kern_engine_options kernel = engine_options(options);

    return kern_engine_shared_bytes(file, &kernel, layout, seals, pool_own_out);
}

static pd_status make_comm(pd_worker_engine *engine, const pd_worker_engine_options *engine_options)
{
    const pd_rank_place *place = engine_options->place;
    kern_comm_options options = {.rank = place->rank,
                                 .ranks = place->ranks,
                                 .memory = place->shared,
                                 .bytes = place->shared_bytes,
                                 .pidfds = place->pidfds,
                                 .still_ns = engine_options->rank_still_ns};

    return kern_comm_create(&options, &engine->comm);
}

static pd_status runner_create(const pd_model_file *file, const pd_worker_engine_options *options,
                               pd_worker_engine **engine_out)
{
    pd_worker_engine *engine = pd_calloc(1, sizeof *engine);
    kern_engine_options kernel = engine_options(options);

    if (engine == NULL)
        return PD_E_NOMEM;
    engine->slices_max = options->slices_max;
    engine->slices = pd_calloc((size_t)JOBS * options->slices_max, sizeof *engine->slices);
    pd_status status = engine->slices == NULL ? PD_E_NOMEM : PD_OK;
    if (status == PD_OK && options->place != NULL) {
        status = make_comm(engine, options);
        kernel.rank = options->place->rank;
        kernel.comm = engine->comm;
    }
    if (status == PD_OK)
        status = kern_engine_create(file, &kernel, &engine->engine);
    if (status != PD_OK) {
        runner_destroy(engine);
        return status;
    }
    *engine_out = engine;
    return PD_OK;
}

static void runner_stop(pd_worker_engine *engine)
{
    /* first, so that a step which waits for a rank that stands still does not hold up the end: what
     * comes of a step is not wanted any more */
    if (engine->comm != NULL)
        kern_comm_end(engine->comm);
    kern_engine_stop(engine->engine);
}

static void runner_serve(pd_worker_engine *engine)
{
    kern_engine_serve(engine->engine);
}

static pd_status runner_pool(pd_worker_engine *engine, uint64_t piece_bytes,
                             pd_worker_pool *pool_out)
{
    pd_worker_pool pool = {.kind = kern_engine_pool_kind(engine->engine)};
    pd_status status =
        kern_engine_pool_alloc(engine->engine, piece_bytes, pool.memory, &pool.pieces);

    if (status == PD_OK)
        *pool_out = pool;
    return status;
}

static pd_status runner_bind(pd_worker_engine *engine, const pd_kv_layout *layout, void *pool,
                             bool seals)
{
    return kern_engine_bind(engine->engine, layout, pool, seals);
}

static pd_sealer runner_sealer(pd_worker_engine *engine)
{
    return kern_engine_sealer(engine->engine);
}

static void on_group(void *ctx, uint32_t group)
{
    runner_job *job = ctx;

    job->group_done(job->ctx, job->step, group);
}

static kern_job_slice slice_of(const pd_step_slice *slice)
{
    return (kern_job_slice){
        .slice = {.tokens = slice->tokens,
                  .count = slice->count,
                  .position = slice->position,
                  .blocks = slice->blocks,
                  .logits_from = slice->count},
        .want_token = slice->want_token,
        .drafts = slice->drafts,
        .drafts_out =
            slice->drafts_out, /* as large as it has to be, and nobody reads it meanwhile */
        .sampling = {.temperature = slice->sampling.temperature,
                     .top_p = slice->sampling.top_p,
                     .top_k = slice->sampling.top_k,
                     .seed = slice->sampling.seed,
                     .choice = slice->sampling.choice},
    };
}

static pd_status runner_run(pd_worker_engine *engine, pd_step *step, pd_step_group_fn *group_done,
                            void *ctx)
{
    runner_job *job = NULL;
    uint32_t at = 0;

    pd_assert(step->slices_count > 0 && step->slices_count <= engine->slices_max);
    for (uint32_t i = 0; i < JOBS && job == NULL; i++) {
        job = engine->jobs[i].busy ? NULL : &engine->jobs[i];
        at = i;
    }
    if (job == NULL)
        return PD_E_OVERLOAD;
    kern_job_slice *slices = engine->slices + (size_t)at * engine->slices_max;
    for (uint32_t i = 0; i < step->slices_count; i++)
        slices[i] = slice_of(&step->slices[i]);
    *job = (runner_job){.busy = true, .step = step, .group_done = group_done, .ctx = ctx};
    job->job = (kern_job){
        .slices = slices,
        .slices_count = step->slices_count,
        .group_done = group_done == NULL ? NULL : on_group,
        .group_done_ctx = job,
        .user = job,
    };
    pd_status status = kern_engine_submit(engine->engine, &job->job);
    job->busy = status == PD_OK;
    return status;
}

static int runner_fd(const pd_worker_engine *engine)
{
    return kern_engine_fd(engine->engine);
}

static pd_status runner_poll(pd_worker_engine *engine, pd_step **step_out)
{
    kern_job *done;
    pd_status status = kern_engine_poll(engine->engine, &done);

    if (status != PD_OK)
        return status;
    runner_job *job = done->user;
    pd_step *step = job->step;
    for (uint32_t i = 0; i < step->slices_count; i++)
        step->slices[i].token_out = done->slices[i].token_out;
    step->status = done->status;
    step->started_ns = done->started_ns;
    step->finished_ns = done->finished_ns;
    job->busy = false;
    *step_out = step;
    return PD_OK;
}

static const char *runner_backend(const pd_worker_engine *engine)
{
    return kern_engine_backend(engine->engine);
}

static uint64_t runner_bytes(const pd_worker_engine *engine)
{
    return kern_engine_bytes(engine->engine);
}

static const char *runner_broken(const pd_worker_engine *engine)
{
    return kern_engine_broken(engine->engine);
}

static void runner_last_error(const pd_worker_engine *engine, char *text, size_t text_size)
{
    kern_engine_last_error(engine->engine, text, text_size);
}

const pd_worker_engine_ops kern_runner = {
    .shared_bytes = runner_shared_bytes,
    .locate = runner_locate,
    .create = runner_create,
    .pool = runner_pool,
    .bind = runner_bind,
    .serve = runner_serve,
    .stop = runner_stop,
    .destroy = runner_destroy,
    .run = runner_run,
    .fd = runner_fd,
    .poll = runner_poll,
    .backend = runner_backend,
    .bytes = runner_bytes,
    .broken = runner_broken,
    .last_error = runner_last_error,
    .sealer = runner_sealer,
};
