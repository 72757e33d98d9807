#include "kernels/cuda/model.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/cuda/devices.h"
#include "kernels/cuda/forward.h"
#include "kernels/cuda/graphs.h"
#include "kernels/cuda/pool.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Between two looks at a step that may wait for other ranks. */
#define LOOK_US 20

struct kern_loaded {
    kern_backend_options options;
    cu_model_settings settings;
    uint32_t ranks;
    uint32_t device_number;
    gpu *device;
    cu_comm *comm; /* NULL: there are no other ranks */
    cu_pool *pool;
    cu_weights weights;
    cu_forward *forward;
    gpu_stream *stream; /* steps */
    gpu_event *done;    /* the step's last */
    cu_graphs graphs;
    char name[256];
    /* from bind on */
    bool bound;
    cu_kv kv;
    cu_batch_limits limits;
    cu_batch *batch;
    cu_groups *groups;
};

/* ---- creation ---- */

static uint32_t logits_max_of(const kern_backend_options *o)
{
    uint32_t sampled = o->sampled_rows_max > o->slices_max ? o->sampled_rows_max : o->slices_max;

    return sampled + o->logits_rows_max;
}

static cu_forward_options forward_options_of(const kern_loaded *model)
{
    const kern_backend_options *o = &model->options;

    return (cu_forward_options){.weights = &model->weights,
                                .comm = model->comm,
                                .rows_max = o->rows_max,
                                .logits_max = logits_max_of(o),
                                .context_max = o->context_max};
}

static cu_batch_limits limits_of(const kern_loaded *model, uint32_t block_tokens, uint32_t blocks)
{
    const kern_backend_options *o = &model->options;
    const cu_forward_options forward = forward_options_of(model);

    return (cu_batch_limits){.rows_max = o->rows_max,
                             .logits_max = logits_max_of(o),
                             .slices_max = o->slices_max,
                             .context_max = o->context_max,
                             .vocab = model->weights.shape.vocab,
                             .block_tokens = block_tokens,
                             .blocks = blocks,
                             .items_room = cu_forward_items_room(&forward)};
}

/* Device memory by holder, on a rank's device; what the pool's layout decides at its most. */
static cu_room room_of(const kern_loaded *model, uint64_t pool_bytes)
{
    const cu_forward_options forward = forward_options_of(model);
    const cu_batch_limits most = limits_of(model, PD_KV_TILE_TOKENS, 0);
    uint32_t token_bytes = 2 * model->weights.shape.head_dim;

    return (cu_room){.weights = model->weights.bytes,
                     .steps = cu_forward_bytes(&forward),
                     .uploads = cu_batch_bytes(&most),
                     .pool = pool_bytes,
                     .hashes = cu_room_hashes_most(pool_bytes, token_bytes)};
}

static pd_status check_memory(const kern_loaded *model)
{
    const cu_room room = room_of(model, 0);

    return cu_room_check(model->device, model->settings.backend, &room, 0);
}

static pd_status open_device(kern_loaded *model)
{
    pd_status status = cu_device_of_rank(model->settings.backend, model->options.device,
                                         model->options.rank, model->ranks, &model->device_number);

    if (status == PD_OK)
        status = gpu_open(model->device_number, &model->device);
    if (status != PD_OK)
        return status;
    gpu_use(model->device);
    snprintf(model->name, sizeof model->name, "%s %s", model->settings.backend,
             gpu_info_of(model->device)->name);
    return PD_OK;
}

/* In the order in which every rank takes its parts of what they share. */
static pd_status join(kern_loaded *model)
{
    const kern_backend_options *o = &model->options;
    cu_comm_options comm = {.backend = model->settings.backend,
                            .rank = o->rank,
                            .ranks = model->ranks,
                            .comm = o->comm,
                            .calls = o->comm_calls,
                            .part_bytes = model->settings.part_bytes};
    cu_pool_options pool = {.backend = model->settings.backend,
                            .device = model->device,
                            .device_first = o->device,
                            .reach = o->pool_reach};
    pd_status status = PD_OK;

    pd_assert((model->ranks > 1) == (o->comm != NULL));
    if (model->ranks > 1)
        status = cu_comm_create(&comm, &model->comm);
    pool.comm = model->comm;
    return status == PD_OK ? cu_pool_create(&pool, &model->pool) : status;
}

/* What multiplies goes into the description. */
static void add_products(kern_loaded *model)
{
    const char *products = cu_forward_products(model->forward);
    size_t used = strlen(model->name);

    if (products[0] == '\0')
        return;
    snprintf(model->name + used, sizeof model->name - used, ", %s", products);
    pd_log_info("msg=\"%s: %s\" device=%u", model->settings.backend, products,
                model->device_number);
}

static pd_status load(kern_loaded *model, const pd_model_file *file)
{
    pd_status status = cu_weights_plan(file, model->options.rank, model->ranks, &model->weights);
    if (status == PD_OK)
        status = check_memory(model);
    if (status == PD_OK)
        status = cu_weights_load(file, model->device, &model->weights);
    if (status != PD_OK)
        return status;
    cu_forward_options forward = forward_options_of(model);
    status = cu_forward_create(model->device, &forward, &model->forward);
    if (status == PD_OK)
        add_products(model);
    if (status == PD_OK)
        status = gpu_stream_create(model->device, &model->stream);
    if (status == PD_OK)
        status = gpu_event_create(model->device, &model->done);
    return status;
}

uint64_t cu_model_shared_bytes(const kern_backend_options *options,
                               const cu_model_settings *settings)
{
    uint32_t device;
    pd_status status =
        cu_device_of_rank(settings->backend, options->device, 0, options->ranks, &device);

    return status == PD_OK ? cu_comm_bytes(options->ranks, settings->part_bytes) : 0;
}

pd_status cu_model_create(const pd_model_file *file, const kern_backend_options *options,
                          const cu_model_settings *settings, kern_loaded **model_out)
{
    kern_loaded *model = pd_calloc(1, sizeof *model);

    if (model == NULL)
        return PD_E_NOMEM;
    pd_assert(options->rows_max > 0 && options->context_max > 0 && options->slices_max > 0);
    model->options = *options;
    model->settings = *settings;
    model->ranks = options->ranks == 0 ? 1 : options->ranks;
    pd_status status = open_device(model);
    if (status == PD_OK)
        status = join(model);
    if (status == PD_OK)
        status = load(model, file);
    if (status != PD_OK) {
        cu_model_destroy(model);
        return status;
    }
    *model_out = model;
    return PD_OK;
}

void cu_model_destroy(kern_loaded *model)
{
    if (model == NULL)
        return;
    if (model->device != NULL)
        gpu_use(model->device);
    cu_comm_destroy(model->comm); /* nothing waits for others any more */
    cu_graphs_clear(&model->graphs);
    cu_groups_destroy(model->groups);
    cu_batch_destroy(model->batch);
    cu_forward_destroy(model->forward);
    cu_weights_fini(&model->weights);
    cu_pool_destroy(model->pool);
    if (model->done != NULL)
        gpu_event_destroy(model->done);
    if (model->stream != NULL)
        gpu_stream_destroy(model->stream);
    gpu_close(model->device);
    pd_free(model);
}

const char *cu_model_describe(const kern_loaded *model)
{
    return model->name;
}

uint64_t cu_model_bytes(const kern_loaded *model)
{
    const cu_forward_options forward = forward_options_of(model);
    uint64_t uploads = model->bound ? cu_batch_bytes(&model->limits) : 0;

    return model->weights.bytes + cu_forward_bytes(&forward) + uploads + cu_pool_bytes(model->pool);
}

const char *cu_model_broken(const kern_loaded *model)
{
    const char *why = model->comm == NULL ? NULL : cu_comm_broken(model->comm);

    return why != NULL ? why : cu_pool_broken(model->pool);
}

void cu_model_last_error(const kern_loaded *model, char *text, size_t text_size)
{
    gpu_last_error(model->device, text, text_size);
}

gpu *cu_model_gpu(kern_loaded *model)
{
    return model->device;
}

uint32_t cu_model_graphs(const kern_loaded *model)
{
    return cu_graphs_count(&model->graphs);
}

/* ---- the pool ---- */

pd_status cu_model_pool_alloc(kern_loaded *model, uint64_t piece_bytes, void **pieces_out)
{
    const cu_room room = room_of(model, piece_bytes);

    return cu_pool_alloc(model->pool, piece_bytes, &room, pieces_out);
}

void cu_model_pool_free(kern_loaded *model)
{
    cu_pool_free(model->pool);
}

static pd_status check_layout(const kern_loaded *model, const pd_kv_layout *layout)
{
    const cu_weights *w = &model->weights;

    if (layout->dtype != PD_F16) {
        pd_log_error("msg=\"kernels: KV in this format is computed by CPUs alone so far; f16 would "
                     "do\" backend=%s kv.dtype=%s",
                     model->settings.backend, pd_kv_dtype_name(layout->dtype));
        return PD_E_UNSUPPORTED;
    }
    pd_assert(layout->layers == w->shape.layers);
    pd_assert(layout->rank_heads == w->kv_heads && layout->head_dim == w->shape.head_dim);
    pd_assert(layout->block_tokens % PD_KV_TILE_TOKENS == 0 && layout->ranks == model->ranks);
    return PD_OK;
}

pd_status cu_model_bind(kern_loaded *model, const pd_kv_layout *layout, void *pool, bool seals)
{
    pd_assert(!model->bound);
    pd_status status = check_layout(model, layout);
    if (status != PD_OK)
        return status;
    gpu_use(model->device);
    model->bound = true;
    model->limits = limits_of(model, layout->block_tokens, layout->blocks);
    status = cu_pool_bind(model->pool, layout, pool, seals, &model->kv);
    if (status == PD_OK && model->comm != NULL)
        status = cu_comm_connect(model->comm, model->device);
    if (status == PD_OK)
        status = cu_batch_create(model->device, &model->limits, &model->batch);
    if (status == PD_OK)
        status = cu_groups_create(model->device, layout->groups, &model->groups);
    return status;
}

/* ---- the step ---- */

/* Recording and what comes of it. Where the device lives on, a step can do without. */
static pd_status record(kern_loaded *model, const cu_plan *plan, gpu_graph **graph_out)
{
    gpu_graph *graph = NULL;

    pd_status status = gpu_graph_begin(model->stream);
    if (status != PD_OK)
        return status;
    status = cu_forward_queue(model->forward, model->stream, plan, &model->kv, NULL);
    pd_status ended = gpu_graph_end(model->stream, &graph); /* also after a failure */
    if (status == PD_OK && ended == PD_OK) {
        *graph_out = graph;
        return PD_OK;
    }
    if (ended == PD_OK)
        gpu_graph_destroy(graph);
    return status != PD_OK ? status : ended;
}

static void log_unrecorded(const kern_loaded *model, const cu_graph_key *key, pd_status status,
                           uint64_t pause)
{
    char until[48] = "from now on";

    if (pause != UINT64_MAX)
        snprintf(until, sizeof until, "for %llu steps", (unsigned long long)pause);
    pd_log_warn("msg=\"%s: a step could not be recorded: they are queued call by call %s\" rows=%u "
                "items=%u status=%s",
                model->settings.backend, until, key->rows, key->items, pd_status_name(status));
}

static pd_status launch_recorded(kern_loaded *model, const cu_plan *plan, bool *launched_out)
{
    const cu_graph_key key = {.rows = plan->step.rows, .items = plan->items};
    gpu_graph *graph = cu_graphs_find(&model->graphs, &key);

    *launched_out = false;
    if (graph == NULL) {
        if (!cu_graphs_due(&model->graphs, &key))
            return PD_OK;
        pd_status status = record(model, plan, &graph);
        if (status != PD_OK && gpu_broken(model->device) == NULL) {
            log_unrecorded(model, &key, status, cu_graphs_failed(&model->graphs));
            return PD_OK;
        }
        if (status != PD_OK)
            return status;
        cu_graphs_keep(&model->graphs, &key, graph);
    }
    *launched_out = true;
    pd_status status = gpu_graph_launch(graph, model->stream);
    return status == PD_OK ? cu_groups_record_rest(model->groups, model->stream) : status;
}

/* A group of ranks is not recorded: what it exchanges may need the host. Nor is a step whose
 * attention is several runs, which are cut where its rows end. */
static bool may_be_recorded(const kern_loaded *model, const cu_plan *plan)
{
    return plan->decode && plan->step.runs == 1 && !model->settings.no_graphs &&
           model->comm == NULL;
}

static pd_status queue_step(kern_loaded *model, const cu_plan *plan)
{
    bool launched = false;

    pd_status status = cu_batch_upload(model->batch, model->stream, plan);
    if (status == PD_OK && may_be_recorded(model, plan))
        status = launch_recorded(model, plan, &launched);
    if (status == PD_OK && !launched)
        status = cu_forward_queue(model->forward, model->stream, plan, &model->kv, model->groups);
    if (status == PD_OK && model->weights.rank == 0)
        status = cu_batch_read_back(model->batch, model->stream, plan);
    return status;
}

/* Rows of logits that slices asked for, straight to their memory: they are rare and large. */
static pd_status copy_logits(kern_loaded *model, const kern_backend_step *step)
{
    uint64_t vocab = model->weights.shape.vocab;
    const float *logits = cu_forward_logits(model->forward);
    pd_status status = PD_OK;
    uint32_t at = 0;

    for (uint32_t i = 0; status == PD_OK && i < step->slices_count; i++) {
        const kern_slice *slice = &step->slices[i].slice;
        uint32_t asked = slice->logits == NULL ? 0 : slice->count - slice->logits_from;
        if (asked > 0)
            status = gpu_copy_out(model->stream, slice->logits, logits + at * vocab,
                                  asked * vocab * sizeof *logits);
        at += slice->count - cu_batch_wanted_from(&step->slices[i]);
    }
    return status;
}

static void hand_out(const kern_loaded *model, const kern_backend_step *step)
{
    uint32_t end = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        kern_job_slice *job = &step->slices[i];
        end += job->slice.count - cu_batch_wanted_from(job);
        for (uint32_t draft = 0; draft < job->drafts; draft++)
            job->drafts_out[draft] = cu_batch_token(model->batch, end - 1 - job->drafts + draft);
        if (job->want_token)
            job->token_out = cu_batch_token(model->batch, end - 1);
    }
}

/* What is queued may wait for a rank that will never come, and nobody waits for that. */
static pd_status await_ranks(kern_loaded *model)
{
    pd_status status = gpu_event_record(model->done, model->stream);

    while (status == PD_OK) {
        status = cu_comm_look(model->comm);
        if (status == PD_OK)
            status = cu_groups_poll(model->groups);
        if (status == PD_OK)
            status = gpu_event_poll(model->done);
        if (status != PD_E_AGAIN)
            break;
        usleep(LOOK_US);
        status = PD_OK;
    }
    /* the others hear that this rank has come to its end */
    return status == PD_OK ? cu_comm_look(model->comm) : status;
}

static pd_status run_step(kern_loaded *model, const kern_backend_step *step, const cu_plan *plan)
{
    pd_status status = queue_step(model, plan);

    if (status == PD_OK && model->comm != NULL && cu_comm_is_queued(model->comm))
        status = await_ranks(model);
    if (status == PD_OK) /* before what may wait for the whole step: copies to pageable memory */
        status = cu_groups_wait(model->groups);
    if (status == PD_OK && model->weights.rank == 0)
        status = copy_logits(model, step);
    if (status == PD_OK)
        status = gpu_event_record(model->done, model->stream);
    return status == PD_OK ? gpu_event_wait(model->done) : status;
}

/* The step has ended early, at this rank perhaps alone. */
static void fail_step(kern_loaded *model)
{
    char why[GPU_ERROR_BYTES];

    gpu_last_error(model->device, why, sizeof why);
    if (model->comm != NULL)
        cu_comm_fail(model->comm, why[0] != '\0' ? why : "a step failed, and its log says why");
    /* The next step's upload must not meet this one's kernels. */
    pd_status settled = gpu_stream_wait(model->stream); /* after a failure */
    (void)settled;                                      /* failed is failed */
}

pd_status cu_model_step(kern_loaded *model, const kern_backend_step *step)
{
    cu_plan plan;

    pd_assert(model->bound);
    if (step->slices_count == 0)
        return PD_OK;
    gpu_use(model->device);
    if (gpu_broken(model->device) != NULL) {
        fail_step(model);
        return PD_E_INTERNAL;
    }
    pd_status status = cu_batch_build(model->batch, step, &plan);
    if (status != PD_OK)
        return status;
    cu_groups_begin(model->groups, step->group_done, step->group_done_ctx);
    status = run_step(model, step, &plan);
    if (status != PD_OK) {
        fail_step(model);
        return status;
    }
    if (model->weights.rank != 0)
        return PD_OK;
    if (plan.logits > 0 && cu_batch_was_broken(model->batch)) {
        pd_log_error("msg=\"%s: logits are not finite\" rows=%u", model->settings.backend,
                     plan.rows_used);
        return PD_E_INTERNAL;
    }
    hand_out(model, step);
    return PD_OK;
}

/* ---- seals ---- */

pd_status cu_model_seal(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                        uint64_t *seals_out)
{
    return cu_pool_seal(model->pool, items, count, seals_out);
}

pd_status cu_model_check(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                         const uint64_t *seals, uint32_t *bad_out)
{
    return cu_pool_check(model->pool, items, count, seals, bad_out);
}
