#include "prefill-worker/steps.h"

#include "prefill-worker/ending.h"
#include "prefill-worker/ship_plan.h"

void prefill_say_started(pd_role_core *core, prefill_request *r, uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_PREFILL_STARTED};

    message.prefill_started.key = r->key;
    prefill_pull_describe(r, &message.prefill_started);
    r->said_started_ns = now_ns;
    core->sink.send(core->sink.ctx, r->key.router, &message);
}

/* ---- shipping ---- */

bool prefill_ship_ready(pd_role_core *core, prefill_request *r, uint64_t now_ns)
{
    const pd_kv_layout *layout = &core->options.layout;
    pd_shipment shipment;

    while (r->status == PD_OK && !r->answer_ended && prefill_ship_next(r, layout, &shipment)) {
        const pd_link *link = pd_links_by_tag(&core->links, r->link_tag);
        pd_status status = PD_E_PEER;
        if (link != NULL && link->state == PD_LINK_UP) {
            shipment.peer = link->peer;
            status = core->sink.ship(core->sink.ctx, &shipment);
        }
        if (status == PD_E_OVERLOAD) {
            core->ship_waits = true;
            return true;
        }
        if (status != PD_OK) {
            prefill_end_early(core, r, PD_E_PEER, "the link to the decode worker failed", now_ns);
            return false;
        }
        prefill_ship_posted(r, layout, &shipment);
        if (shipment.group_first + shipment.groups == layout->groups)
            core->counters.blocks_shipped += shipment.count;
    }
    return true;
}

/* Oldest first; how several share a link is the carrier's. */
void prefill_ship_what_waited(pd_role_core *core, uint64_t now_ns)
{
    if (!core->ship_waits)
        return;
    core->ship_waits = false;
    for (prefill_request *r = core->head, *next; r != NULL && !core->ship_waits; r = next) {
        next = r->next;
        prefill_ship_ready(core, r, now_ns);
    }
}

void prefill_on_group(pd_role_core *core, pd_step *step, uint32_t group, uint64_t now_ns)
{
    pd_assert(core->stepping && step == &core->step);
    for (uint32_t i = 0; i < step->slices_count; i++) {
        prefill_request *r = step->slices[i].request;
        r->final_groups = group + 1;
        prefill_ship_ready(core, r, now_ns); /* in the step: it stays */
    }
}

/* ---- steps ---- */

typedef struct turn {
    pd_role_core *core;
    uint64_t now_ns;
} turn;

static pd_status start(void *ctx, pd_prefill_item *item)
{
    const turn *now = ctx;
    pd_role_core *core = now->core;
    prefill_request *r = (prefill_request *)item;
    uint32_t block_tokens = core->options.layout.block_tokens;
    uint32_t usable = (item->tokens - 1) / block_tokens; /* one token is always computed */
    uint32_t held = 0;

    if (prefill_pull_begin(&core->pulls, r, now->now_ns)) {
        prefill_say_started(core, r, now->now_ns);
        return PD_E_AGAIN;
    }
    if (usable > r->hashes_count)
        usable = r->hashes_count;
    if (!core->options.prefix_cache)
        usable = 0;
    pd_status status = pd_prefix_cache_acquire(core->blocks.cache, r->hashes, usable,
                                               r->blocks_count, PD_CLAIM_RUNNING, r->blocks, &held);
    if (status != PD_OK)
        return status;
    r->cached = held * block_tokens;
    item->done = r->cached;
    core->counters.tokens_cached += r->cached;
    return PD_OK;
}

/* Those of a failed step are stepped alone, so that only who is at fault fails. */
static uint32_t pick(pd_role_core *core, uint64_t now_ns)
{
    for (pd_prefill_item *item = core->queue.head; item != NULL; item = item->next) {
        uint32_t left = item->tokens - item->done;
        if (!((prefill_request *)item)->solo)
            continue;
        item->take = left < core->options.chunk_tokens ? left : core->options.chunk_tokens;
        core->picked[0] = item;
        return 1;
    }
    turn now = {.core = core, .now_ns = now_ns};
    return pd_prefill_queue_pick(&core->queue, core->options.chunk_tokens, start, &now,
                                 core->picked, core->options.max_batch);
}

static double step_ms(const pd_role_core *core, uint32_t count)
{
    uint64_t tokens = 0, context = 0;

    for (uint32_t i = 0; i < count; i++) {
        tokens += core->picked[i]->take;
        context += (uint64_t)core->picked[i]->take * core->picked[i]->done;
    }
    return pd_cost_prefill_ms(&core->cost, (uint32_t)tokens, (uint32_t)(context / tokens));
}

void prefill_run_step(pd_role_core *core, uint64_t now_ns)
{
    if (core->stepping)
        return;
    uint32_t count = pick(core, now_ns);
    if (count == 0)
        return;
    double ms = step_ms(core, count);
    for (uint32_t i = 0; i < count; i++) {
        prefill_request *r = (prefill_request *)core->picked[i];
        core->slices[i] = (pd_step_slice){
            .request = r,
            .id = r->id,
            .tokens = r->tokens + r->item.done,
            .count = r->item.take,
            .position = r->item.done,
            .blocks = r->blocks,
            .want_token = r->item.done + r->item.take == r->item.tokens,
            .sampling = r->sampling,
        };
        prefill_ship_step(r, &core->options.layout, &core->cost, ms);
        r->in_step = true;
        if (r->started_ns == 0) {
            r->started_ns = now_ns;
            if (r->deadline_ns !=
                UINT64_MAX) /* as its router's: anew when the queue is behind it */
                r->deadline_ns += now_ns - r->arrived_ns;
            if (r->said_started_ns ==
                0) /* also without a lease to bind: it is known who computes */
                prefill_say_started(core, r, now_ns);
        }
    }
    core->stepping = true;
    core->step = (pd_step){
        .number = core->steps_done + 1,
        .slices = core->slices,
        .slices_count = count,
    };
    core->sink.run(core->sink.ctx, &core->step);
}

static void answer_token(pd_role_core *core, prefill_request *r, uint32_t token, uint64_t now_ns)
{
    pd_step_token answer = {.key = r->key, .index = r->answered, .token = token};

    answer.finish = pd_token_finish(token, r->answered, r->item.tokens, r->end_tokens,
                                    r->end_tokens_count, r->max_tokens, core->options.context_max);
    r->computed = true;
    r->deadline_ns =
        r->hold_ns == 0 ? UINT64_MAX : now_ns + r->hold_ns; /* a slow link is no fault */
    r->answer_ended = answer.finish != PD_FINISH_NONE;
    pd_prefill_queue_remove(&core->queue, &r->item);
    pd_token_batch_add(&core->tokens, &answer);
    if (r->answer_ended && r->sent < r->posted)
        core->sink.unship(core->sink.ctx, r->ticket);
}

static void take_slice(pd_role_core *core, const pd_step *step, const pd_step_slice *slice,
                       uint64_t now_ns)
{
    prefill_request *r = slice->request;

    r->in_step = false;
    r->compute_ns += step->finished_ns - step->started_ns;
    if (r->status != PD_OK || step->status != PD_OK)
        return;
    r->solo = false;
    r->item.done += slice->count;
    r->item.take = 0;
    core->counters.tokens_computed += slice->count;
    uint32_t full = r->item.done / core->options.layout.block_tokens;
    pd_blocks_remember(&core->blocks, r->hashes, r->blocks,
                       full < r->hashes_count ? full : r->hashes_count, UINT32_MAX);
    if (slice->want_token)
        answer_token(core, r, slice->token_out, now_ns);
}

/* Nothing of a failed step is believed. Whose KV has left already cannot take it back. */
static void take_failure(pd_role_core *core, const pd_step *step, prefill_request *r,
                         uint64_t now_ns)
{
    if (r->status != PD_OK)
        prefill_settle(core, r);
    else if (step->slices_count == 1 || r->step_left)
        prefill_end_early(core, r, step->status, "the forward step failed", now_ns);
    else
        r->solo = true;
}

static void observe_step(pd_role_core *core, const pd_step *step)
{
    uint64_t tokens = 0, context = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        tokens += step->slices[i].count;
        context += (uint64_t)step->slices[i].count * step->slices[i].position;
    }
    pd_cost_observe_prefill(&core->cost, (uint32_t)tokens, (uint32_t)(context / tokens),
                            (double)(step->finished_ns - step->started_ns) / 1e6);
}

void prefill_on_step_done(pd_role_core *core, pd_step *step, uint64_t now_ns)
{
    pd_assert(core->stepping && step == &core->step);
    core->stepping = false;
    core->steps_done++;
    core->counters.steps++;
    for (uint32_t i = 0; i < step->slices_count; i++)
        take_slice(core, step, &step->slices[i], now_ns);
    if (step->status == PD_OK)
        observe_step(core, step);
    pd_token_batch_send(&core->tokens, &core->options, &core->sink, step,
                        pd_prefill_queue_work_ms(&core->queue, &core->cost));
    for (uint32_t i = 0; i < step->slices_count; i++) {
        prefill_request *r = step->slices[i].request;
        if (step->status != PD_OK)
            take_failure(core, step, r, now_ns);
        else if (prefill_ship_ready(core, r, now_ns))
            prefill_settle(core, r);
    }
    prefill_run_step(core, now_ns);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
}
