#include "kernels/model/engine.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/queue.h"
#include "kernels/model/plan.h"
#include "kernels/plugins.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#define WAITING_MAX 8
/* Jobs submitted and not yet polled: what the queue of finished ones can hold, so that handing one
 * back never fails. */
#define UNPOLLED_MAX 64

struct kern_engine {
    const kern_backend *backend;
    kern_loaded *model;
    kern_plan *plan; /* NULL: one rank */
    kern_comm *comm; /* likewise */
    uint32_t block_tokens;
    uint32_t rank, ranks;
    void *pool; /* the backend's, from pool_alloc: the first piece */
    bool bound;
    pd_queue *waiting, *finished; /* kern_job *; a NULL job ends the thread */
    uint32_t unpolled;            /* loop thread */
    atomic_uint waiting_count;
    atomic_bool stop; /* what waits is not begun any more */
    pthread_t thread;
    bool thread_started;
};

static void run_job(kern_engine *engine, kern_job *job)
{
    kern_backend_step step = {
        .slices = job->slices,
        .slices_count = job->slices_count,
        .group_done = job->group_done,
        .group_done_ctx = job->group_done_ctx,
    };

    job->started_ns = pd_clock_now_ns();
    job->status =
        engine->plan == NULL ? PD_OK : kern_plan_tell(engine->plan, &step, engine->block_tokens);
    if (job->status == PD_OK)
        job->status = engine->backend->step(engine->model, &step);
    job->finished_ns = pd_clock_now_ns();
}

static void *engine_main(void *arg)
{
    kern_engine *engine = arg;

    for (;;) {
        kern_job *job = NULL;
        pd_queue_drain_fd(engine->waiting);
        while (pd_queue_pop(engine->waiting, &job) == PD_OK) {
            if (job == NULL || atomic_load(&engine->stop))
                return NULL;
            atomic_fetch_sub(&engine->waiting_count, 1);
            run_job(engine, job);
            pd_status status = pd_queue_push(engine->finished, &job);
            pd_assert(status == PD_OK);
        }
        pd_queue_wait(engine->waiting, -1);
    }
}

static kern_plan_options plan_options(const kern_engine_options *options)
{
    return (kern_plan_options){.slices_max = options->slices_max,
                               .rows_max = options->rows_max,
                               .context_max = options->context_max};
}

static pd_status load(kern_engine *engine, const pd_model_file *file,
                      const kern_engine_options *options)
{
    kern_choice choice;
    pd_status status = kern_backend_choose(options->device, &choice);

    if (status != PD_OK)
        return status;
    kern_backend_options backend = {
        .device = choice.device,
        .variant = choice.variant,
        .threads = options->threads,
        .pins = options->pins,
        .context_max = options->context_max,
        .rows_max = options->rows_max,
        .slices_max = options->slices_max,
        .sampled_rows_max = options->sampled_rows_max,
        .logits_rows_max = options->logits_rows_max,
        .rank = options->rank,
        .ranks = options->ranks,
        .comm = options->comm,
        .comm_calls = &kern_comm_calls_here,
        .pool_reach = options->pool_reach,
        .packs = options->packs,
    };
    engine->backend = choice.backend;
    engine->rank = options->rank;
    engine->ranks = options->ranks == 0 ? 1 : options->ranks;
    engine->comm = options->comm;
    if (options->comm != NULL) {
        kern_plan_options plan = plan_options(options);
        status = kern_plan_create(&plan, options->comm, &engine->plan);
    }
    return status == PD_OK ? engine->backend->create(file, &backend, &engine->model) : status;
}

pd_status kern_engine_locate(const kern_engine_options *options, pd_device_place *place_out)
{
    kern_choice choice;
    pd_status status = kern_backend_choose(options->device, &choice);

    if (status != PD_OK)
        return status;
    if (choice.backend->locate == NULL)
        return PD_E_NOT_FOUND;
    const kern_backend_options backend = {
        .device = choice.device, .rank = options->rank, .ranks = options->ranks};
    return choice.backend->locate(&backend, place_out);
}

uint64_t kern_engine_shared_bytes(const pd_model_file *file, const kern_engine_options *options,
                                  const pd_kv_layout *layout, bool seals, bool *pool_own_out)
{
    kern_plan_options plan = plan_options(options);
    kern_choice choice;

    if (kern_backend_choose(options->device, &choice) != PD_OK)
        return 0;
    kern_backend_options backend = {
        .device = choice.device,
        .context_max = options->context_max,
        .rows_max = options->rows_max,
        .slices_max = options->slices_max,
        .sampled_rows_max = options->sampled_rows_max,
        .logits_rows_max = options->logits_rows_max,
        .ranks = options->ranks,
    };
    uint64_t bytes =
        choice.backend->shared_bytes(pd_model_file_shape(file), &backend, layout, seals);
    *pool_own_out = choice.backend->pool_own;
    return bytes == 0 ? 0 : kern_comm_own_bytes() + kern_plan_bytes(&plan) + bytes;
}

static pd_status start(kern_engine *engine)
{
    pd_status status = pd_queue_create(sizeof(kern_job *), WAITING_MAX + 2, &engine->waiting);

    if (status == PD_OK)
        status = pd_queue_create(sizeof(kern_job *), UNPOLLED_MAX + 1, &engine->finished);
    if (status != PD_OK)
        return status;
    int error = pthread_create(&engine->thread, NULL, engine_main, engine);
    if (error != 0) {
        errno = error;
        pd_log_error("msg=\"engine: cannot start the compute thread: %m\"");
        return PD_E_IO;
    }
    engine->thread_started = true;
    return PD_OK;
}

pd_status kern_engine_create(const pd_model_file *file, const kern_engine_options *options,
                             kern_engine **engine_out)
{
    kern_engine *engine = pd_calloc(1, sizeof *engine);

    if (engine == NULL)
        return PD_E_NOMEM;
    pd_status status = load(engine, file, options);
    if (status == PD_OK)
        status = start(engine);
    if (status != PD_OK) {
        kern_engine_destroy(engine);
        return status;
    }
    *engine_out = engine;
    return PD_OK;
}

void kern_engine_stop(kern_engine *engine)
{
    kern_job *last = NULL;

    if (!engine->thread_started)
        return;
    atomic_store(&engine->stop, true);
    pd_status status = pd_queue_push(engine->waiting, &last);
    pd_assert(status == PD_OK); /* the queue has room for one more than may wait */
    pthread_join(engine->thread, NULL);
    engine->thread_started = false;
}

void kern_engine_destroy(kern_engine *engine)
{
    if (engine == NULL)
        return;
    kern_engine_stop(engine);
    pd_queue_destroy(engine->waiting);
    pd_queue_destroy(engine->finished);
    if (engine->pool != NULL)
        engine->backend->pool_free(engine->model);
    if (engine->backend != NULL)
        engine->backend->destroy(engine->model);
    kern_plan_destroy(engine->plan);
    pd_free(engine);
}

/* --- the pool --- */

pd_memory_kind kern_engine_pool_kind(const kern_engine *engine)
{
    return engine->backend->pool_kind;
}

pd_status kern_engine_pool_alloc(kern_engine *engine, uint64_t piece_bytes, void **pieces_out,
                                 uint32_t *pieces_count_out)
{
    pd_assert(engine->pool == NULL && engine->rank == 0);
    *pieces_count_out = 0;
    if (!engine->backend->pool_own)
        return PD_OK;
    pd_status status = engine->backend->pool_alloc(engine->model, piece_bytes, pieces_out);
    if (status != PD_OK)
        return status;
    engine->pool = pieces_out[0];
    *pieces_count_out = engine->ranks;
    return PD_OK;
}

pd_status kern_engine_bind(kern_engine *engine, const pd_kv_layout *layout, void *pool, bool seals)
{
    pd_assert(!engine->bound && (engine->pool == NULL || engine->pool == pool));
    pd_assert(engine->pool != NULL || engine->rank > 0 || !engine->backend->pool_own);
    pd_status status = engine->backend->bind(engine->model, layout, pool, seals);
    engine->bound = status == PD_OK;
    engine->block_tokens = layout->block_tokens;
    return status;
}

void kern_engine_serve(kern_engine *engine)
{
    kern_backend_step step;

    pd_assert(engine->bound && engine->plan != NULL);
    while (kern_plan_await(engine->plan, &step)) {
        /* What a step says of itself, it says to all ranks alike, and rank 0 acts on it. */
        pd_status status = engine->backend->step(engine->model, &step);
        if (status != PD_OK)
            pd_log_debug("msg=\"a step failed\" status=%s", pd_status_name(status));
    }
}

/* --- the loop's side --- */

pd_status kern_engine_submit(kern_engine *engine, kern_job *job)
{
    pd_assert(job != NULL && engine->bound && engine->thread_started);
    if (atomic_load(&engine->waiting_count) >= WAITING_MAX || engine->unpolled >= UNPOLLED_MAX)
        return PD_E_OVERLOAD;
    atomic_fetch_add(&engine->waiting_count, 1);
    pd_status status = pd_queue_push(engine->waiting, &job);
    if (status != PD_OK) {
        atomic_fetch_sub(&engine->waiting_count, 1);
        return status;
    }
    engine->unpolled++;
    return PD_OK;
}

int kern_engine_fd(const kern_engine *engine)
{
    return pd_queue_fd(engine->finished);
}

pd_status kern_engine_poll(kern_engine *engine, kern_job **job_out)
{
    kern_job *job = NULL;
    pd_status status = pd_queue_pop(engine->finished, &job);

    if (status != PD_OK) {
        /* Empty: quiet the descriptor, then look again, for one may have come in between. */
        pd_queue_drain_fd(engine->finished);
        status = pd_queue_pop(engine->finished, &job);
        if (status != PD_OK)
            return status;
    }
    engine->unpolled--;
    *job_out = job;
    return PD_OK;
}

/* --- seals --- */

static pd_status engine_seal(void *ctx, const pd_seal_item *items, uint32_t count,
                             uint64_t *seals_out)
{
    const kern_engine *engine = ctx;

    return engine->backend->seal(engine->model, items, count, seals_out);
}

static pd_status engine_check(void *ctx, const pd_seal_item *items, uint32_t count,
                              const uint64_t *seals, uint32_t *bad_out)
{
    const kern_engine *engine = ctx;

    return engine->backend->check(engine->model, items, count, seals, bad_out);
}

pd_sealer kern_engine_sealer(kern_engine *engine)
{
    pd_assert(engine->bound);
    return (pd_sealer){.ctx = engine, .seal = engine_seal, .check = engine_check};
}

/* --- what it is --- */

const char *kern_engine_backend(const kern_engine *engine)
{
    return engine->backend->describe(engine->model);
}

uint64_t kern_engine_bytes(const kern_engine *engine)
{
    return engine->backend->bytes(engine->model);
}

const char *kern_engine_broken(const kern_engine *engine)
{
    const char *why = engine->comm != NULL ? kern_comm_why(engine->comm) : NULL;

    return why != NULL ? why : engine->backend->broken(engine->model);
}

void kern_engine_last_error(const kern_engine *engine, char *text, size_t text_size)
{
    engine->backend->last_error(engine->model, text, text_size);
}
