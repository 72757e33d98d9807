#include "kernels/model/host.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/model/forward.h"

#include <stdio.h>

#define PROBE_SCORE 10 /* any GPU is better, no emulation is */

struct kern_loaded {
    kern_model *model;
    kern_comm *comm; /* NULL: there are no other ranks */
    pd_kv_layout layout;
    void *pool;           /* NULL: not bound yet */
    pd_seal_tiles *tiles; /* NULL: nobody seals */
    uint32_t vocab, slices_max, sampled_rows_max, logits_rows_max;
    /* the stepping thread's */
    kern_slice *slices;   /* [slices_max] */
    float *logits;        /* [sampled_rows_max][vocab], of slices that want a token and no logits;
                             NULL with ranks: they have room in their comm */
    uint64_t *sort_space; /* [vocab] */
};

static int host_probe(uint32_t device, char *reason, size_t reason_size)
{
    bool one = device == 0;

    snprintf(reason, reason_size, "%s", one ? "the host's cores" : "the host is one device, 0");
    return one ? PROBE_SCORE : 0;
}

/* --- life --- */

static void host_destroy(kern_loaded *host)
{
    if (host == NULL)
        return;
    kern_model_destroy(host->model);
    pd_seal_tiles_destroy(host->tiles);
    pd_free(host->slices);
    pd_free(host->logits);
    pd_free(host->sort_space);
    pd_free(host);
}

static uint32_t sampled_rows_max(const kern_backend_options *options)
{
    return options->sampled_rows_max > options->slices_max ? options->sampled_rows_max
                                                           : options->slices_max;
}

static kern_options forward_options(const kern_backend_options *options)
{
    return (kern_options){
        .device = options->variant != NULL ? options->variant : "cpu",
        .threads = options->threads,
        .pins = options->pins,
        .context_max = options->context_max,
        .rows_max = options->rows_max,
        .logits_rows_max = sampled_rows_max(options) + options->logits_rows_max,
        .comm = options->comm,
        .packs = options->packs,
    };
}

static uint64_t host_shared_bytes(const pd_model_shape *shape, const kern_backend_options *options,
                                  const pd_kv_layout *layout, bool seals)
{
    kern_options forward = forward_options(options);

    return kern_model_shared_bytes(shape, &forward, options->ranks) +
           (seals ? kern_comm_round(pd_seal_tiles_room(layout)) : 0);
}

static pd_status host_create(const pd_model_file *file, const kern_backend_options *options,
                             kern_loaded **model_out)
{
    kern_loaded *host = pd_calloc(1, sizeof *host);
    kern_options forward = forward_options(options);

    if (host == NULL)
        return PD_E_NOMEM;
    pd_assert(options->slices_max > 0 && options->device == 0);
    host->comm = options->comm;
    host->vocab = pd_model_file_shape(file)->vocab;
    host->slices_max = options->slices_max;
    host->sampled_rows_max = sampled_rows_max(options);
    host->logits_rows_max = options->logits_rows_max;
    pd_status status = kern_model_create(file, &forward, &host->model);
    if (status == PD_OK) {
        host->slices = pd_calloc(host->slices_max, sizeof *host->slices);
        if (host->comm == NULL)
            host->logits =
                pd_calloc(host->sampled_rows_max, (size_t)host->vocab * sizeof *host->logits);
        host->sort_space = pd_calloc(host->vocab, sizeof *host->sort_space);
        if (host->slices == NULL || (host->comm == NULL && host->logits == NULL) ||
            host->sort_space == NULL)
            status = PD_E_NOMEM;
    }
    if (status != PD_OK) {
        host_destroy(host);
        return status;
    }
    *model_out = host;
    return PD_OK;
}

static const char *host_describe(const kern_loaded *host)
{
    return kern_model_backend(host->model);
}

static uint64_t host_bytes(const kern_loaded *host)
{
    uint64_t logits_bytes =
        host->logits == NULL ? 0 : (uint64_t)host->sampled_rows_max * host->vocab * sizeof(float);

    return kern_model_bytes(host->model) + logits_bytes +
           (host->tiles == NULL ? 0 : pd_seal_tiles_bytes(host->tiles));
}

static void host_last_error(const kern_loaded *host, char *text, size_t text_size)
{
    (void)host; /* there is no device */
    if (text_size > 0)
        text[0] = '\0';
}

static const char *host_broken(const kern_loaded *host)
{
    (void)host;
    return NULL; /* what fails on the host ends the process */
}

static pd_status host_bind(kern_loaded *host, const pd_kv_layout *layout, void *pool, bool seals)
{
    pd_assert(host->pool == NULL && pool != NULL);
    pd_status status = PD_OK;
    if (seals && host->comm != NULL)
        status = pd_seal_tiles_create_over(
            layout, kern_comm_take(host->comm, pd_seal_tiles_room(layout)), &host->tiles);
    else if (seals)
        status = pd_seal_tiles_create(layout, &host->tiles);
    if (status != PD_OK) {
        pd_log_error("msg=\"no memory for the seals' hashes\" pool_bytes=%llu",
                     (unsigned long long)layout->pool_bytes);
        return status;
    }
    host->layout = *layout;
    host->pool = pool;
    return PD_OK;
}

/* --- steps --- */

/* The slices as the forward pass takes them; rows to sample from get room in our logits. */
static pd_status prepare(kern_loaded *host, const kern_backend_step *step)
{
    uint32_t asked = 0, sampled = 0, logits_rows = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        const kern_job_slice *job = &step->slices[i];
        asked += job->slice.logits == NULL ? 0 : job->slice.count - job->slice.logits_from;
        sampled += job->slice.count - kern_sampled_from(job);
    }
    if (step->slices_count > host->slices_max || sampled > host->sampled_rows_max ||
        asked > host->logits_rows_max) {
        pd_log_error("msg=\"kernels: a step asks for more than the model was made for\" slices=%u "
                     "slices_max=%u sampled_rows=%u sampled_rows_max=%u logits_rows=%u "
                     "logits_rows_max=%u",
                     step->slices_count, host->slices_max, sampled, host->sampled_rows_max, asked,
                     host->logits_rows_max);
        return PD_E_TOO_LARGE;
    }
    sampled = 0;
    for (uint32_t i = 0; i < step->slices_count; i++) {
        kern_slice *slice = &host->slices[i];
        *slice = step->slices[i].slice;
        if (i > 0)
            logits_rows += host->slices[i - 1].count - host->slices[i - 1].logits_from;
        if (!step->slices[i].want_token || slice->logits != NULL)
            continue;
        slice->logits_from = kern_sampled_from(&step->slices[i]);
        slice->logits = host->comm != NULL ? kern_model_logits(host->model, logits_rows)
                                           : host->logits + (size_t)sampled * host->vocab;
        sampled += slice->count - slice->logits_from;
    }
    return PD_OK;
}

/* Each row that is sampled, with the draw of the position that follows it. */
static void sample_slice(kern_loaded *host, kern_job_slice *job, const kern_slice *slice)
{
    for (uint32_t row = kern_sampled_from(job); row < slice->count; row++) {
        const float *logits = slice->logits + (size_t)(row - slice->logits_from) * host->vocab;
        uint32_t token = kern_sample(&job->sampling, logits, host->vocab, slice->position + row + 1,
                                     host->sort_space);
        if (row + 1 == slice->count)
            job->token_out = token;
        else
            job->drafts_out[row - kern_sampled_from(job)] = token;
    }
}

static pd_status host_step(kern_loaded *host, const kern_backend_step *step)
{
    kern_step forward = {
        .layout = &host->layout,
        .pool = host->pool,
        .tiles = host->tiles,
        .slices = host->slices,
        .slices_count = step->slices_count,
        .group_done = step->group_done,
        .group_done_ctx = step->group_done_ctx,
    };

    pd_assert(host->pool != NULL);
    pd_status status = prepare(host, step);
    if (status == PD_OK)
        status = kern_model_step(host->model, &forward);
    if (status != PD_OK || (host->comm != NULL && kern_comm_rank(host->comm) > 0))
        return status;
    for (uint32_t i = 0; i < step->slices_count; i++)
        sample_slice(host, &step->slices[i], &host->slices[i]);
    return PD_OK;
}

/* --- seals --- */

static pd_status host_seal(kern_loaded *host, const pd_seal_item *items, uint32_t count,
                           uint64_t *seals_out)
{
    pd_assert(host->pool != NULL);
    pd_seal_items(&host->layout, host->pool, host->tiles, items, count, seals_out);
    return PD_OK;
}

static pd_status host_check(kern_loaded *host, const pd_seal_item *items, uint32_t count,
                            const uint64_t *seals, uint32_t *bad_out)
{
    pd_assert(host->pool != NULL);
    return pd_seal_check_items(&host->layout, host->pool, host->tiles, items, count, seals,
                               bad_out);
}

const kern_backend kern_backend_host = {
    .abi = KERN_BACKEND_ABI,
    .struct_bytes = sizeof(kern_backend),
    .name = "cpu",
    .pool_kind = PD_MEMORY_HOST,
    .probe = host_probe,
    .shared_bytes = host_shared_bytes,
    .create = host_create,
    .destroy = host_destroy,
    .describe = host_describe,
    .bytes = host_bytes,
    .broken = host_broken,
    .last_error = host_last_error,
    .bind = host_bind,
    .step = host_step,
    .seal = host_seal,
    .check = host_check,
};
