#include "kernels/model/engine.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#define WAITING_MAX 8
/* Jobs submitted and not yet polled: what the queue of finished ones can hold, so that handing one
 * back never fails. */
#define UNPOLLED_MAX 64

struct kern_engine {
    kern_model *model;
    const pd_kv_layout *layout; /* own copy below */
    pd_kv_layout layout_copy;
    void *pool;
    pd_seal_tiles *tiles;
    uint32_t vocab, rows_max, logits_rows_max;
    pd_queue *waiting, *finished; /* kern_job *; a NULL job ends the thread */
    uint32_t unpolled;            /* loop thread */
    atomic_uint waiting_count;
    atomic_bool stop; /* what waits is not begun any more */
    pthread_t thread;
    bool thread_started;
    /* compute thread */
    kern_slice *slices;   /* [rows_max] */
    float *logits;        /* [logits_rows_max][vocab] */
    uint64_t *sort_space; /* [vocab] */
};

/* The job's slices as the model takes them; rows to sample from get room in the engine's logits. */
static pd_status prepare(kern_engine *engine, kern_job *job)
{
    uint32_t own_rows = 0;

    if (job->slices_count > engine->rows_max)
        return PD_E_TOO_LARGE;
    for (uint32_t i = 0; i < job->slices_count; i++) {
        kern_slice *slice = &job->slices[i].slice;
        if (job->slices[i].want_token && slice->logits == NULL) {
            if (own_rows == engine->logits_rows_max)
                return PD_E_TOO_LARGE;
            slice->logits_from = slice->count - 1;
            engine->slices[i] = *slice;
            engine->slices[i].logits = engine->logits + (size_t)own_rows++ * engine->vocab;
            continue;
        }
        engine->slices[i] = *slice;
    }
    return PD_OK;
}

static void sample(kern_engine *engine, kern_job *job)
{
    for (uint32_t i = 0; i < job->slices_count; i++) {
        const kern_slice *slice = &engine->slices[i];
        if (!job->slices[i].want_token)
            continue;
        const float *logits =
            slice->logits + (size_t)(slice->count - 1 - slice->logits_from) * engine->vocab;
        job->slices[i].token_out = kern_sample(&job->slices[i].sampling, logits, engine->vocab,
                                               slice->position + slice->count, engine->sort_space);
    }
}

static void run_job(kern_engine *engine, kern_job *job)
{
    kern_step step = {
        .layout = engine->layout,
        .pool = engine->pool,
        .tiles = engine->tiles,
        .slices = engine->slices,
        .slices_count = job->slices_count,
        .group_done = job->group_done,
        .group_done_ctx = job->group_done_ctx,
    };

    job->started_ns = pd_clock_now_ns();
    job->status = prepare(engine, job);
    if (job->status == PD_OK)
        job->status = kern_model_step(engine->model, &step);
    else
        pd_log_error("msg=\"engine: job has more rows than the engine was made for\" slices=%u",
                     job->slices_count);
    if (job->status == PD_OK)
        sample(engine, job);
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

static pd_status allocate(kern_engine *engine, const pd_model_file *file,
                          const kern_options *options)
{
    pd_status status = kern_model_create(file, options, &engine->model);

    if (status != PD_OK)
        return status;
    engine->slices = pd_calloc(engine->rows_max, sizeof *engine->slices);
    engine->logits =
        pd_calloc(engine->logits_rows_max, (size_t)engine->vocab * sizeof *engine->logits);
    engine->sort_space = pd_calloc(engine->vocab, sizeof *engine->sort_space);
    if (engine->slices == NULL || engine->logits == NULL || engine->sort_space == NULL)
        return PD_E_NOMEM;
    status = pd_queue_create(sizeof(kern_job *), WAITING_MAX + 2, &engine->waiting);
    if (status == PD_OK)
        status = pd_queue_create(sizeof(kern_job *), UNPOLLED_MAX + 1, &engine->finished);
    return status;
}

pd_status kern_engine_create(const pd_model_file *file, const kern_options *options,
                             const pd_kv_layout *layout, void *pool, pd_seal_tiles *tiles,
                             kern_engine **engine_out)
{
    kern_engine *engine = pd_calloc(1, sizeof *engine);

    if (engine == NULL)
        return PD_E_NOMEM;
    engine->layout_copy = *layout;
    engine->layout = &engine->layout_copy;
    engine->pool = pool;
    engine->tiles = tiles;
    engine->vocab = pd_model_file_shape(file)->vocab;
    engine->rows_max = options->rows_max;
    engine->logits_rows_max = options->logits_rows_max;
    pd_status status = allocate(engine, file, options);
    if (status == PD_OK) {
        int error = pthread_create(&engine->thread, NULL, engine_main, engine);
        if (error != 0) {
            errno = error;
            pd_log_error("msg=\"engine: cannot start the compute thread: %m\"");
            status = PD_E_IO;
        }
        engine->thread_started = error == 0;
    }
    if (status != PD_OK) {
        kern_engine_destroy(engine);
        return status;
    }
    *engine_out = engine;
    return PD_OK;
}

void kern_engine_destroy(kern_engine *engine)
{
    kern_job *last = NULL;

    if (engine == NULL)
        return;
    if (engine->thread_started) {
        atomic_store(&engine->stop, true);
        pd_status status = pd_queue_push(engine->waiting, &last);
        pd_assert(status == PD_OK); /* the queue has room for one more than may wait */
        pthread_join(engine->thread, NULL);
    }
    pd_queue_destroy(engine->waiting);
    pd_queue_destroy(engine->finished);
    pd_free(engine->slices);
    pd_free(engine->logits);
    pd_free(engine->sort_space);
    kern_model_destroy(engine->model);
    pd_free(engine);
}

pd_status kern_engine_submit(kern_engine *engine, kern_job *job)
{
    pd_assert(job != NULL);
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

const char *kern_engine_backend(const kern_engine *engine)
{
    return kern_model_backend(engine->model);
}

uint64_t kern_engine_bytes(const kern_engine *engine)
{
    return kern_model_bytes(engine->model) +
           (uint64_t)engine->logits_rows_max * engine->vocab * sizeof(float);
}
