#include "kernels/model/plan.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/layout.h"

#include <string.h>

typedef struct told_slice {
    uint32_t count, position, logits_from, drafts, tokens_at, blocks_at;
    bool has_logits, want_token;
} told_slice;

struct kern_plan {
    kern_plan_options options;
    kern_comm *comm;
    uint32_t blocks_max;
    kern_job_slice *slices; /* [slices_max]: what await hands out */
    float no_logits;        /* slices that have logits point here */
    /* shared */
    uint32_t *slices_count;
    told_slice *told; /* [slices_max] */
    uint32_t *tokens; /* [rows_max] */
    pd_block *blocks; /* [blocks_max] */
};

/* A slice's table, whatever the block size. */
static uint64_t blocks_of(const kern_plan_options *options)
{
    return (uint64_t)options->slices_max *
           ((options->context_max + PD_KV_TILE_TOKENS - 1) / PD_KV_TILE_TOKENS);
}

uint64_t kern_plan_bytes(const kern_plan_options *options)
{
    return kern_comm_round(sizeof(uint32_t)) +
           kern_comm_round(options->slices_max * sizeof(told_slice)) +
           kern_comm_round(options->rows_max * sizeof(uint32_t)) +
           kern_comm_round(blocks_of(options) * sizeof(pd_block));
}

pd_status kern_plan_create(const kern_plan_options *options, kern_comm *comm, kern_plan **plan_out)
{
    kern_plan *plan = pd_calloc(1, sizeof *plan);

    if (plan == NULL)
        return PD_E_NOMEM;
    plan->slices = pd_calloc(options->slices_max, sizeof *plan->slices);
    if (plan->slices == NULL) {
        pd_free(plan);
        return PD_E_NOMEM;
    }
    plan->options = *options;
    plan->comm = comm;
    plan->blocks_max = (uint32_t)blocks_of(options);
    plan->slices_count = kern_comm_take(comm, sizeof *plan->slices_count);
    plan->told = kern_comm_take(comm, options->slices_max * sizeof *plan->told);
    plan->tokens = kern_comm_take(comm, options->rows_max * sizeof *plan->tokens);
    plan->blocks = kern_comm_take(comm, blocks_of(options) * sizeof *plan->blocks);
    *plan_out = plan;
    return PD_OK;
}

void kern_plan_destroy(kern_plan *plan)
{
    if (plan == NULL)
        return;
    pd_free(plan->slices);
    pd_free(plan);
}

/* False: there is no room. */
static bool write_slice(kern_plan *plan, const kern_job_slice *job, uint32_t block_tokens,
                        told_slice *told, uint32_t *tokens, uint32_t *blocks)
{
    const kern_slice *slice = &job->slice;

    if (slice->count > plan->options.rows_max - *tokens ||
        slice->count > plan->options.context_max ||
        slice->position > plan->options.context_max - slice->count)
        return false;
    uint32_t table = (slice->position + slice->count + block_tokens - 1) / block_tokens;
    if (table > plan->blocks_max - *blocks)
        return false;
    *told = (told_slice){.count = slice->count,
                         .position = slice->position,
                         .logits_from = slice->logits_from,
                         .drafts = job->drafts,
                         .tokens_at = *tokens,
                         .blocks_at = *blocks,
                         .has_logits = slice->logits != NULL,
                         .want_token = job->want_token};
    memcpy(plan->tokens + *tokens, slice->tokens, slice->count * sizeof *slice->tokens);
    memcpy(plan->blocks + *blocks, slice->blocks, table * sizeof *slice->blocks);
    *tokens += slice->count;
    *blocks += table;
    return true;
}

pd_status kern_plan_tell(kern_plan *plan, const kern_backend_step *step, uint32_t block_tokens)
{
    uint32_t tokens = 0, blocks = 0;
    bool fits = step->slices_count <= plan->options.slices_max;

    kern_comm_begin(plan->comm);
    /* A rank may still be at the step before, which ended early here. */
    if (!kern_comm_barrier(plan->comm))
        return PD_E_INTERNAL;
    for (uint32_t i = 0; fits && i < step->slices_count; i++)
        fits = write_slice(plan, &step->slices[i], block_tokens, &plan->told[i], &tokens, &blocks);
    if (!fits) {
        pd_log_error("msg=\"kernels: a step asks for more than its ranks were made for\" slices=%u "
                     "slices_max=%u rows_max=%u context_max=%u",
                     step->slices_count, plan->options.slices_max, plan->options.rows_max,
                     plan->options.context_max);
    }
    *plan->slices_count = fits ? step->slices_count : 0;
    if (!kern_comm_barrier(plan->comm))
        return PD_E_INTERNAL;
    return fits ? PD_OK : PD_E_TOO_LARGE;
}

bool kern_plan_await(kern_plan *plan, kern_backend_step *step_out)
{
    do {
        if (!kern_comm_barrier(plan->comm) || !kern_comm_barrier(plan->comm))
            return false;
    } while (*plan->slices_count == 0); /* a plan that was none */
    pd_assert(*plan->slices_count <= plan->options.slices_max);
    for (uint32_t i = 0; i < *plan->slices_count; i++) {
        const told_slice *told = &plan->told[i];
        plan->slices[i] = (kern_job_slice){
            .slice = {.tokens = plan->tokens + told->tokens_at,
                      .count = told->count,
                      .position = told->position,
                      .blocks = plan->blocks + told->blocks_at,
                      .logits_from = told->logits_from,
                      .logits = told->has_logits ? &plan->no_logits : NULL},
            .want_token = told->want_token,
            .drafts = told->drafts,
        };
    }
    *step_out = (kern_backend_step){.slices = plan->slices, .slices_count = *plan->slices_count};
    return true;
}
