#include "decode-worker/draft_model.h"

#include "common/base/log.h"
#include "common/base/mem.h"

struct decode_draft_model {
    const pd_role_options *role;
    const pd_speculation *how;
    pd_block *free; /* [draft_blocks], the top is free[free_count - 1] */
    uint32_t free_count;
    pd_step step;
    pd_step_slice *slices;     /* [max_batch] */
    decode_draft_wish *wishes; /* [max_batch] of the step being prepared */
    uint32_t wishes_count;
    uint32_t turn;      /* who reads first of those that have to catch up */
    pd_row_cost rounds; /* by sequences */
    bool broken;
};

pd_status decode_draft_model_create(const pd_role_options *role, decode_draft_model **model_out)
{
    const pd_speculation *how = &role->speculation;

    if (how->draft_blocks == 0 || how->draft_block_tokens == 0 || how->draft_context == 0 ||
        how->draft_rows < role->max_batch) {
        pd_log_error("msg=\"decode role: a limit of the draft model\" blocks=%u block_tokens=%u "
                     "rows=%u context=%u",
                     how->draft_blocks, how->draft_block_tokens, how->draft_rows,
                     how->draft_context);
        return PD_E_INVALID;
    }
    decode_draft_model *model = pd_calloc(1, sizeof *model);
    if (model == NULL)
        return PD_E_NOMEM;
    *model = (decode_draft_model){.role = role, .how = how, .free_count = how->draft_blocks};
    model->free = pd_calloc(how->draft_blocks, sizeof *model->free);
    model->slices = pd_calloc(role->max_batch, sizeof *model->slices);
    model->wishes = pd_calloc(role->max_batch, sizeof *model->wishes);
    if (model->free == NULL || model->slices == NULL || model->wishes == NULL) {
        decode_draft_model_destroy(model);
        return PD_E_NOMEM;
    }
    for (uint32_t i = 0; i < how->draft_blocks; i++)
        model->free[i] = how->draft_blocks - 1 - i;
    *model_out = model;
    return PD_OK;
}

void decode_draft_model_destroy(decode_draft_model *model)
{
    if (model == NULL)
        return;
    pd_free(model->free);
    pd_free(model->slices);
    pd_free(model->wishes);
    pd_free(model);
}

/* ---- a sequence ---- */

static uint32_t blocks_of(const decode_draft_model *model, uint32_t tokens)
{
    return (tokens + model->how->draft_block_tokens - 1) / model->how->draft_block_tokens;
}

size_t decode_draft_model_bytes(const decode_draft_model *model, uint32_t tokens_max)
{
    return ((size_t)blocks_of(model, tokens_max) * sizeof(pd_block) + 7) / 8 * 8;
}

void decode_draft_model_begin(decode_draft_model *model, decode_sequence *s)
{
    (void)model;
    s->drafting.blocks = s->drafting.state;
}

void decode_draft_model_end(decode_draft_model *model, decode_sequence *s)
{
    decode_drafting *d = &s->drafting;

    while (d->blocks_count > 0)
        model->free[model->free_count++] = d->blocks[--d->blocks_count];
    pd_assert(model->free_count <= model->how->draft_blocks);
    d->kv_tokens = 0;
}

/* Room for the KV of so many tokens. False: none, and nothing was taken. */
static bool grow(decode_draft_model *model, decode_drafting *d, uint32_t tokens)
{
    uint32_t need = blocks_of(model, tokens);

    if (tokens > model->how->draft_context)
        return false;
    if (need > d->blocks_count && need - d->blocks_count > model->free_count)
        return false;
    while (d->blocks_count < need)
        d->blocks[d->blocks_count++] = model->free[--model->free_count];
    return true;
}

/* ---- rounds ---- */

static void add_slice(decode_draft_model *model, decode_sequence *s, uint32_t count, bool want)
{
    model->slices[model->step.slices_count++] = (pd_step_slice){
        .request = s,
        .id = s->id,
        .tokens = s->tokens + s->drafting.kv_tokens,
        .count = count,
        .position = s->drafting.kv_tokens,
        .blocks = s->drafting.blocks,
        .want_token = want,
        .sampling = s->sampling,
    };
}

/* The first round: what the model has not read of the sequences yet, each at least a row. */
static void plan_first(decode_draft_model *model)
{
    uint32_t rows = model->how->draft_rows, count = model->wishes_count;

    model->turn++;
    for (uint32_t i = 0; i < count; i++) {
        decode_draft_wish *wish = &model->wishes[(model->turn + i) % count];
        decode_sequence *s = wish->sequence;
        decode_drafting *d = &s->drafting;
        if (d->kv_tokens >= s->tokens_count) /* of drafts that a failed step took along */
            d->kv_tokens = s->tokens_count - 1;
        uint32_t unread = s->tokens_count - d->kv_tokens, left = rows - (count - 1 - i);
        bool ready = unread <= left;
        uint32_t reads = ready ? unread : left;
        /* the drafts that are read back in have their places from the start */
        uint32_t places = d->kv_tokens + reads + (ready ? wish->most - 1 : 0);
        d->wanted = wish->most;
        if (!grow(model, d, places))
            continue;
        add_slice(model, s, reads, ready);
        rows -= reads;
    }
}

/* Another token of those that want more. */
static void plan_next(decode_draft_model *model)
{
    for (uint32_t i = 0; i < model->wishes_count; i++) {
        decode_sequence *s = model->wishes[i].sequence;
        if (s->drafting.made > 0 && s->drafting.made < s->drafting.wanted)
            add_slice(model, s, 1, true);
    }
}

static bool hand_out(decode_draft_model *model, pd_step **step_out)
{
    if (model->step.slices_count == 0)
        return false;
    model->step.slices = model->slices;
    model->step.number++;
    *step_out = &model->step;
    return true;
}

double decode_draft_model_round_ms(const decode_draft_model *model, uint32_t sequences)
{
    return pd_row_cost_ms(&model->rounds, sequences);
}

bool decode_draft_model_plan(decode_draft_model *model, const decode_draft_wish *wishes,
                             uint32_t count, pd_step **step_out)
{
    pd_assert(count <= model->role->max_batch);
    model->wishes_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        wishes[i].sequence->drafting.made = 0;
        if (wishes[i].most > 0)
            model->wishes[model->wishes_count++] = wishes[i];
    }
    model->step.slices_count = 0;
    if (model->broken)
        return false;
    plan_first(model);
    return hand_out(model, step_out);
}

static void take(decode_draft_model *model, const pd_step_slice *slice)
{
    decode_sequence *s = slice->request;
    decode_drafting *d = &s->drafting;

    d->kv_tokens += slice->count;
    if (!slice->want_token)
        return;
    pd_assert(slice->token_out < model->role->vocab);
    s->tokens[s->tokens_count + d->made++] = slice->token_out;
}

static void observe(decode_draft_model *model, const pd_step *step)
{
    for (uint32_t i = 0; i < step->slices_count; i++)
        if (step->slices[i].count > 2) /* it reads a text */
            return;
    pd_row_cost_observe(&model->rounds, step->slices_count,
                        (double)(step->finished_ns - step->started_ns) / 1e6);
}

bool decode_draft_model_on_step(decode_draft_model *model, const pd_step *step, pd_step **step_out)
{
    pd_assert(step == &model->step);
    if (step->status != PD_OK) {
        pd_log_error("msg=\"the draft model's step failed: no drafts any more\" status=%s",
                     pd_status_name(step->status));
        model->broken = true;
        for (uint32_t i = 0; i < model->wishes_count; i++)
            model->wishes[i].sequence->drafting.made = 0;
        return false;
    }
    observe(model, step);
    for (uint32_t i = 0; i < step->slices_count; i++)
        take(model, &step->slices[i]);
    model->step.slices_count = 0;
    plan_next(model);
    return hand_out(model, step_out);
}

void decode_draft_model_took(decode_sequence *s, const pd_step_slice *slice, uint32_t right)
{
    /* It has read all drafts but the last. What it read of wrong ones is not the sequence's. */
    uint32_t known = slice->position + 1 + right;

    if (s->drafting.kv_tokens > known)
        s->drafting.kv_tokens = known;
}
