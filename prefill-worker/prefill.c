#include "prefill-worker/prefill.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/blocks.h"
#include "common/worker/key_table.h"
#include "common/worker/last_words.h"
#include "common/worker/token_batch.h"
#include "prefill-worker/ship_plan.h"

#include <stdio.h>
#include <string.h>

#define SAY_STARTED_NS (500 * PD_NS_PER_MS)

struct pd_role_core {
    pd_role_options options;
    pd_role_sink sink;
    pd_blocks blocks;
    pd_routers routers;
    pd_links links;
    pd_cost cost;
    pd_prefill_queue queue;
    pd_key_table *by_key;         /* requests */
    pd_key_table *by_ticket;      /* the same, under {0, ticket, 0} */
    prefill_request *head, *tail; /* of all, oldest first */
    uint64_t ticket_next;
    pd_token_batch tokens;
    pd_step step;
    pd_step_slice *slices;    /* [max_batch] */
    pd_prefill_item **picked; /* [max_batch] */
    bool stepping, draining;
    bool ship_waits; /* the carrier had no room for a shipment */
    uint64_t steps_done;
    pd_last_words words;
    pd_role_counters counters;
};

/* ---- making and ending ---- */

static void prefill_destroy(pd_role_core *core);

static pd_status check_options(const pd_role_options *options)
{
    if (options->max_batch == 0 || options->chunk_tokens == 0 || options->context_max == 0 ||
        options->vocab == 0 || options->peers_max == 0 || options->peers_max > 1u << 16 ||
        options->layout.blocks == 0 || options->max_batch > 1u << 20 ||
        options->queue_max > 1u << 20) {
        pd_log_error("msg=\"prefill role: a limit is 0 or too large\" max_batch=%u queue_max=%u "
                     "chunk_tokens=%u context=%u vocab=%u peers=%u blocks=%u",
                     options->max_batch, options->queue_max, options->chunk_tokens,
                     options->context_max, options->vocab, options->peers_max,
                     options->layout.blocks);
        return PD_E_INVALID;
    }
    return PD_OK;
}

static pd_status prefill_create(const pd_role_options *options, const pd_role_sink *sink,
                                pd_role_core **core_out)
{
    pd_status status = check_options(options);
    if (status != PD_OK)
        return status;
    pd_role_core *core = pd_calloc(1, sizeof *core);
    if (core == NULL)
        return PD_E_NOMEM;
    core->options = *options;
    core->sink = *sink;
    core->ticket_next = 1;
    pd_cost_init(&core->cost);
    pd_routers_init(&core->routers, options->lost_after_ns);
    uint32_t waiting_max = options->queue_max + options->max_batch;
    pd_prefill_queue_init(&core->queue, waiting_max);
    /* As many again may be waiting for their blocks to arrive. */
    uint32_t requests_max = waiting_max * 2;
    core->slices = pd_calloc(options->max_batch, sizeof *core->slices);
    core->picked = pd_calloc(options->max_batch, sizeof *core->picked);
    pd_last_words_init(&core->words, &core->options, &core->sink, &core->links);
    status = core->slices == NULL || core->picked == NULL ? PD_E_NOMEM : PD_OK;
    if (status == PD_OK)
        status = pd_blocks_init(&core->blocks, options->layout.blocks, options->prefix_cache);
    if (status == PD_OK)
        status = pd_links_init(&core->links, options->peers_max, &core->sink);
    if (status == PD_OK)
        status = pd_key_table_create(requests_max, &core->by_key);
    if (status == PD_OK)
        status = pd_key_table_create(requests_max, &core->by_ticket);
    if (status == PD_OK)
        status = pd_token_batch_init(&core->tokens, options->max_batch);
    if (status != PD_OK) {
        prefill_destroy(core);
        return status;
    }
    *core_out = core;
    return PD_OK;
}

static void prefill_destroy(pd_role_core *core)
{
    if (core == NULL)
        return;
    while (core->head != NULL) {
        prefill_request *r = core->head;
        core->head = r->next;
        prefill_request_free(r);
    }
    pd_token_batch_fini(&core->tokens);
    pd_key_table_destroy(core->by_key);
    pd_key_table_destroy(core->by_ticket);
    pd_links_fini(&core->links);
    pd_blocks_fini(&core->blocks);
    pd_free(core->slices);
    pd_free(core->picked);
    pd_free(core);
}

/* ---- words to others ---- */

static pd_request_key ticket_key(uint64_t ticket)
{
    return (pd_request_key){.number = ticket};
}

static void say_link(pd_role_core *core, uint64_t router, const pd_link *link, bool up,
                     const char *reason)
{
    pd_message message = {.kind = PD_MSG_LINK};

    snprintf(message.link.peer, sizeof message.link.peer, "%s", link->name);
    message.link.peer_incarnation = link->incarnation;
    message.link.up = up;
    snprintf(message.link.lane, sizeof message.link.lane, "%s", up ? link->lane : "");
    snprintf(message.link.reason, sizeof message.link.reason, "%s", reason);
    core->sink.send(core->sink.ctx, router, &message);
}

static void say_link_to_all(pd_role_core *core, const pd_link *link, bool up, const char *reason)
{
    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        const pd_router_seen *router = &core->routers.entries[i];
        if (router->router != 0 && !router->lost)
            say_link(core, router->router, link, up, reason);
    }
}

static float ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns == 0 || to_ns <= from_ns ? 0 : (float)((double)(to_ns - from_ns) / 1e6);
}

static void say_done(pd_role_core *core, const prefill_request *r)
{
    pd_message message = {.kind = PD_MSG_PREFILL_DONE};
    pd_msg_prefill_done *done = &message.prefill_done;

    done->key = r->key;
    done->status = r->status;
    done->cached_tokens = r->cached;
    done->computed_tokens = r->item.done - r->cached;
    done->queue_ms = ms_between(r->arrived_ns, r->started_ns);
    done->compute_ms = (float)((double)r->compute_ns / 1e6);
    done->ship_ms = (float)((double)r->wire_ns / 1e6);
    done->ship_bytes = r->ship_bytes;
    done->may_land = r->may_land;
    done->again = r->again;
    snprintf(done->reason, sizeof done->reason, "%s", r->reason);
    core->sink.send(core->sink.ctx, r->key.router, &message);
}

static void say_started(pd_role_core *core, prefill_request *r, uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_PREFILL_STARTED};

    message.prefill_started.key = r->key;
    r->said_started_ns = now_ns;
    core->sink.send(core->sink.ctx, r->key.router, &message);
}

static void refuse(pd_role_core *core, const pd_msg_prefill_request *asked, const pd_link *link,
                   pd_status status, const char *reason)
{
    prefill_request r = {.key = asked->key, .status = status, .reason = reason};

    core->counters.refused++;
    pd_log_req_warn(asked->id, "msg=\"prefill refused: %s\" status=%s", reason,
                    pd_status_name(status));
    if (asked->ship && link != NULL)
        pd_last_words_abort(&core->words, link, &asked->key);
    else if (asked->ship)
        pd_last_words_owe(&core->words, asked->decode_incarnation, &asked->key);
    say_done(core, &r);
}

/* ---- the end of a request ---- */

static bool puts_outstanding(pd_role_core *core, const prefill_request *r)
{
    /* A closed link has nothing under way, whatever was reported; and until it is closed, a put
     * that was reported as failed may still be written. */
    bool writing = r->sent < r->posted || (r->status == PD_E_PEER && r->posted > 0);

    return writing && pd_links_by_tag(&core->links, r->link_tag) != NULL;
}

static void say_last_word(pd_role_core *core, prefill_request *r)
{
    const pd_link *link = pd_links_by_tag(&core->links, r->link_tag);

    if (link != NULL && link->state == PD_LINK_UP) {
        pd_last_words_abort(&core->words, link, &r->key);
        return;
    }
    /* The last word goes by the next link. What was on its way by this one may land until then,
     * and, where the link could not be closed, even after. */
    r->may_land = r->posted > 0;
    if (!r->unclosed)
        pd_last_words_owe(&core->words, r->receiver, &r->key);
}

static void forget(pd_role_core *core, prefill_request *r)
{
    pd_request_key ticket = ticket_key(r->ticket);

    pd_key_table_remove(core->by_key, &r->key);
    pd_key_table_remove(core->by_ticket, &ticket);
    if (r->prev != NULL)
        r->prev->next = r->next;
    else
        core->head = r->next;
    if (r->next != NULL)
        r->next->prev = r->prev;
    else
        core->tail = r->prev;
    prefill_request_free(r);
}

static void finish(pd_role_core *core, prefill_request *r)
{
    bool whole = r->status == PD_OK && !r->answer_ended;

    if (r->ship && !whole)
        say_last_word(core, r);
    if (r->item.started)
        pd_prefix_cache_drop(core->blocks.cache, r->blocks, r->blocks_count, PD_CLAIM_RUNNING);
    if (r->status == PD_OK || !r->word_owed)
        core->counters.finished++;
    else if (r->status == PD_E_CANCELLED)
        core->counters.cancelled++;
    else
        core->counters.failed++;
    pd_log_req_debug(r->id, "msg=\"prefill ends\" status=%s reason=\"%s\" cached=%u computed=%u",
                     pd_status_name(r->status), r->reason, r->cached, r->item.done - r->cached);
    if (r->word_owed)
        say_done(core, r);
    forget(core, r);
}

/* Goes on with a request that nothing is under way for: it ends, or its copies are held until the
 * decode worker has checked what it got. r may be gone afterwards. */
static void settle(pd_role_core *core, prefill_request *r)
{
    if (r->in_step || puts_outstanding(core, r))
        return;
    if (r->status != PD_OK || (r->computed && (!r->ship || r->answer_ended))) {
        finish(core, r);
        return;
    }
    if (!r->computed || !prefill_ship_complete(r))
        return;
    if (r->word_owed)
        say_done(core, r);
    r->word_owed = false;
    if (r->released)
        finish(core, r);
}

/* The first reason stands. r may be gone afterwards. */
static void end_early(pd_role_core *core, prefill_request *r, pd_status status, const char *reason,
                      uint64_t now_ns)
{
    if (r->status == PD_OK) {
        r->status = status;
        r->reason = reason;
        r->ended_ns = now_ns;
        pd_prefill_queue_remove(&core->queue, &r->item);
        if (r->sent < r->posted)
            core->sink.unship(core->sink.ctx, r->ticket);
        if (status != PD_E_CANCELLED && r->word_owed)
            pd_log_req_warn(r->id, "msg=\"prefill fails: %s\" status=%s", reason,
                            pd_status_name(status));
    }
    settle(core, r);
}

/* ---- shipping ---- */

/* Posts what can leave. False: the request has failed and may be gone. */
static bool ship_ready(pd_role_core *core, prefill_request *r, uint64_t now_ns)
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
            end_early(core, r, PD_E_PEER, "the link to the decode worker failed", now_ns);
            return false;
        }
        prefill_ship_posted(r, layout, &shipment);
        if (shipment.group_first + shipment.groups == layout->groups)
            core->counters.blocks_shipped += shipment.count;
    }
    return true;
}

/* Oldest first; how several share a link is the carrier's. */
static void ship_what_waited(pd_role_core *core, uint64_t now_ns)
{
    if (!core->ship_waits)
        return;
    core->ship_waits = false;
    for (prefill_request *r = core->head, *next; r != NULL && !core->ship_waits; r = next) {
        next = r->next;
        ship_ready(core, r, now_ns);
    }
}

static void prefill_on_group(pd_role_core *core, pd_step *step, uint32_t group, uint64_t now_ns)
{
    pd_assert(core->stepping && step == &core->step);
    for (uint32_t i = 0; i < step->slices_count; i++) {
        prefill_request *r = step->slices[i].request;
        r->final_groups = group + 1;
        ship_ready(core, r, now_ns); /* in the step: it stays */
    }
}

/* ---- steps ---- */

static pd_status start(void *ctx, pd_prefill_item *item)
{
    pd_role_core *core = ctx;
    prefill_request *r = (prefill_request *)item;
    uint32_t block_tokens = core->options.layout.block_tokens;
    uint32_t usable = (item->tokens - 1) / block_tokens; /* one token is always computed */
    uint32_t held = 0;

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
static uint32_t pick(pd_role_core *core)
{
    for (pd_prefill_item *item = core->queue.head; item != NULL; item = item->next) {
        uint32_t left = item->tokens - item->done;
        if (!((prefill_request *)item)->solo)
            continue;
        item->take = left < core->options.chunk_tokens ? left : core->options.chunk_tokens;
        core->picked[0] = item;
        return 1;
    }
    return pd_prefill_queue_pick(&core->queue, core->options.chunk_tokens, start, core,
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

static void run_step(pd_role_core *core, uint64_t now_ns)
{
    if (core->stepping)
        return;
    uint32_t count = pick(core);
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
            if (r->ship)
                say_started(core, r, now_ns);
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

static void answer_token(pd_role_core *core, prefill_request *r, uint32_t token)
{
    pd_step_token answer = {.key = r->key, .index = r->answered, .token = token};

    answer.finish = pd_token_finish(token, r->answered, r->item.tokens, r->end_tokens,
                                    r->end_tokens_count, r->max_tokens, core->options.context_max);
    r->computed = true;
    r->answer_ended = answer.finish != PD_FINISH_NONE;
    pd_prefill_queue_remove(&core->queue, &r->item);
    pd_token_batch_add(&core->tokens, &answer);
    if (r->answer_ended && r->sent < r->posted)
        core->sink.unship(core->sink.ctx, r->ticket);
}

static void take_slice(pd_role_core *core, const pd_step *step, const pd_step_slice *slice)
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
                       full < r->hashes_count ? full : r->hashes_count);
    if (slice->want_token)
        answer_token(core, r, slice->token_out);
}

/* Nothing of a failed step is believed. Whose KV has left already cannot take it back. */
static void take_failure(pd_role_core *core, const pd_step *step, prefill_request *r,
                         uint64_t now_ns)
{
    if (r->status != PD_OK)
        settle(core, r);
    else if (step->slices_count == 1 || r->step_left)
        end_early(core, r, step->status, "the forward step failed", now_ns);
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

static void prefill_on_step_done(pd_role_core *core, pd_step *step, uint64_t now_ns)
{
    pd_assert(core->stepping && step == &core->step);
    core->stepping = false;
    core->steps_done++;
    core->counters.steps++;
    for (uint32_t i = 0; i < step->slices_count; i++)
        take_slice(core, step, &step->slices[i]);
    if (step->status == PD_OK)
        observe_step(core, step);
    pd_token_batch_send(&core->tokens, &core->options, &core->sink, step,
                        pd_prefill_queue_work_ms(&core->queue, &core->cost));
    for (uint32_t i = 0; i < step->slices_count; i++) {
        prefill_request *r = step->slices[i].request;
        if (step->status != PD_OK)
            take_failure(core, step, r, now_ns);
        else if (ship_ready(core, r, now_ns))
            settle(core, r);
    }
    run_step(core, now_ns);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
}

/* ---- messages ---- */

static void on_prefill_request(pd_role_core *core, const pd_msg_prefill_request *asked,
                               uint64_t now_ns)
{
    pd_status status;

    if (pd_key_table_get(core->by_key, &asked->key) != NULL) {
        pd_log_req_warn(asked->id, "msg=\"a prefill request came twice; the second is ignored\"");
        return;
    }
    core->counters.requests++;
    pd_link *link =
        asked->ship ? pd_links_by_incarnation(&core->links, asked->decode_incarnation) : NULL;
    if (link != NULL && link->state != PD_LINK_UP)
        link = NULL;
    const char *wrong = prefill_request_check(&core->options, asked, &status);
    if (wrong == NULL && core->draining) {
        wrong = "the worker is draining";
        status = PD_E_OVERLOAD;
    }
    if (wrong != NULL) {
        refuse(core, asked, link, status, wrong);
        return;
    }
    if (asked->ship && link == NULL) {
        refuse(core, asked, NULL, PD_E_PEER, "no link to the decode worker");
        return;
    }
    prefill_request *r = prefill_request_new(&core->options, asked);
    if (r == NULL) {
        refuse(core, asked, link, PD_E_NOMEM, "no memory for the request");
        return;
    }
    r->ticket = core->ticket_next++;
    pd_request_key ticket = ticket_key(r->ticket);
    status = pd_prefill_queue_push(&core->queue, &r->item);
    if (status == PD_OK)
        status = pd_key_table_put(core->by_key, &r->key, r);
    if (status == PD_OK) {
        /* It has the same number of places. */
        status = pd_key_table_put(core->by_ticket, &ticket, r);
        pd_assert(status == PD_OK);
    }
    if (status != PD_OK) {
        pd_prefill_queue_remove(&core->queue, &r->item);
        prefill_request_free(r);
        refuse(core, asked, link, PD_E_OVERLOAD, "the prefill queue is full");
        return;
    }
    r->link_tag = link == NULL ? 0 : link->tag;
    r->arrived_ns = now_ns;
    r->deadline_ns =
        asked->deadline_ms == 0 ? UINT64_MAX : now_ns + asked->deadline_ms * PD_NS_PER_MS;
    r->prev = core->tail;
    if (r->prev != NULL)
        r->prev->next = r;
    else
        core->head = r;
    core->tail = r;
    pd_log_req_debug(r->id, "msg=\"prefill queued\" tokens=%u waiting=%u", r->item.tokens,
                     core->queue.count);
    run_step(core, now_ns);
}

static void on_targets(pd_role_core *core, const pd_msg_targets *targets, uint64_t now_ns)
{
    prefill_request *r = pd_key_table_get(core->by_key, &targets->key);

    if (r == NULL || r->status != PD_OK || !r->ship)
        return; /* it has ended, and its last word is on its way */
    if (!prefill_ship_targets(r, targets)) {
        end_early(core, r, PD_E_INVALID, "held and landing blocks are not the prompt's", now_ns);
        return;
    }
    if (ship_ready(core, r, now_ns))
        settle(core, r);
}

static void on_release(pd_role_core *core, const pd_msg_release *release)
{
    prefill_request *r = pd_key_table_get(core->by_key, &release->key);

    if (r == NULL)
        return;
    r->released = true;
    settle(core, r);
}

static void on_ship_again(pd_role_core *core, const pd_msg_ship_again *asked, uint64_t now_ns)
{
    prefill_request *r = pd_key_table_get(core->by_key, &asked->key);
    pd_status status;

    if (r == NULL) {
        prefill_request unknown = {.key = asked->key, .again = 1, .status = PD_E_NOT_FOUND};
        unknown.reason = "its copies are gone";
        say_done(core, &unknown);
        return;
    }
    r->word_owed = true;
    if (!prefill_ship_again(r, asked, &status) && status == PD_OK)
        pd_log_req_warn(r->id,
                        "msg=\"blocks are asked for again that are not its own\" group=%u "
                        "first_block=%u count=%u",
                        asked->group, asked->first_block, asked->count);
    if (status != PD_OK)
        end_early(core, r, status, "no memory to ship again", now_ns);
    else if (ship_ready(core, r, now_ns))
        settle(core, r);
}

static void on_cancel(pd_role_core *core, const pd_msg_cancel *cancel, uint64_t now_ns)
{
    prefill_request *r = pd_key_table_get(core->by_key, &cancel->key);

    if (r != NULL)
        end_early(core, r, PD_E_CANCELLED, "cancelled", now_ns);
    else /* leased for, perhaps, and never asked of us */
        pd_last_words_everywhere(&core->words, &cancel->key);
    run_step(core, now_ns);
}

static void fail_link_requests(pd_role_core *core, uint64_t tag, const char *reason,
                               uint64_t now_ns)
{
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->ship && r->link_tag == tag)
            end_early(core, r, PD_E_PEER, reason, now_ns);
    }
}

static void drop_link(pd_role_core *core, pd_link *link, const char *reason, uint64_t now_ns)
{
    uint64_t tag = link->tag;

    pd_log_info("msg=\"link closed: %s\" peer=%s", reason, link->name);
    pd_links_close(&core->links, link);
    fail_link_requests(core, tag, reason, now_ns);
}

static void connect_link(pd_role_core *core, pd_link *link)
{
    pd_link before = *link;
    pd_status status = pd_links_connect(&core->links, link);

    if (status == PD_OK || status == PD_E_OVERLOAD)
        return;
    pd_log_warn("msg=\"cannot connect to a decode worker\" peer=%s status=%s", before.name,
                pd_status_name(status));
    say_link_to_all(core, &before, false, "its address was refused");
}

static void on_peer_up(pd_role_core *core, uint64_t router, const pd_msg_peer_up *peer,
                       uint64_t now_ns)
{
    if (peer->role != PD_ROLE_DECODE)
        return;
    pd_link *link = pd_links_by_incarnation(&core->links, peer->incarnation);
    if (link != NULL) {
        if (link->state == PD_LINK_UP)
            say_link(core, router, link, true, "");
        return;
    }
    pd_link *older = pd_links_by_name(&core->links, peer->name);
    if (older != NULL)
        drop_link(core, older, "the decode worker was restarted", now_ns);
    link = pd_links_add(&core->links, peer);
    if (link == NULL) {
        pd_log_warn("msg=\"no place for a link\" peer=%s address_bytes=%zu", peer->name,
                    peer->transfer_address_len);
        return;
    }
    connect_link(core, link);
}

static void on_peer_gone(pd_role_core *core, const pd_msg_peer_gone *peer, uint64_t now_ns)
{
    pd_link *link = pd_links_by_incarnation(&core->links, peer->incarnation);

    if (link != NULL)
        drop_link(core, link, "the decode worker is gone", now_ns);
}

static const pd_request_key *key_of(const pd_message *message)
{
    switch (message->kind) {
    case PD_MSG_PREFILL_REQUEST: return &message->prefill_request.key;
    case PD_MSG_TARGETS: return &message->targets.key;
    case PD_MSG_RELEASE: return &message->release.key;
    case PD_MSG_SHIP_AGAIN: return &message->ship_again.key;
    case PD_MSG_CANCEL: return &message->cancel.key;
    default: return NULL;
    }
}

static void prefill_on_message(pd_role_core *core, uint64_t router, const pd_message *message,
                               uint64_t now_ns)
{
    if (!pd_routers_on_message(&core->routers, router, message, now_ns))
        return;
    const pd_request_key *key = key_of(message);
    if (key != NULL && (key->router != router || key->number == 0)) {
        pd_log_warn("msg=\"a router spoke of a request that is not its own\" kind=%s",
                    pd_message_name(message->kind));
        return;
    }
    switch (message->kind) {
    case PD_MSG_PREFILL_REQUEST: on_prefill_request(core, &message->prefill_request, now_ns); break;
    case PD_MSG_TARGETS: on_targets(core, &message->targets, now_ns); break;
    case PD_MSG_RELEASE: on_release(core, &message->release); break;
    case PD_MSG_SHIP_AGAIN: on_ship_again(core, &message->ship_again, now_ns); break;
    case PD_MSG_CANCEL: on_cancel(core, &message->cancel, now_ns); break;
    case PD_MSG_PEER_UP: on_peer_up(core, router, &message->peer_up, now_ns); break;
    case PD_MSG_PEER_GONE: on_peer_gone(core, &message->peer_gone, now_ns); break;
    case PD_MSG_SNAPSHOT_REQUEST:
        pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
        pd_blocks_snapshot(&core->blocks, &core->options, &core->sink, router);
        break;
    default: break;
    }
}

/* ---- the data plane ---- */

static void on_sent(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    pd_request_key ticket = ticket_key(event->ticket);
    prefill_request *r = event->ticket == 0 ? NULL : pd_key_table_get(core->by_ticket, &ticket);

    if (r == NULL)
        return;
    r->sent++;
    /* Dropped because we asked for it, or with its link, whose end is told on its own. */
    if (event->status == PD_E_CANCELLED) {
        settle(core, r);
        return;
    }
    if (event->status != PD_OK) {
        pd_link *link = pd_links_by_tag(&core->links, r->link_tag);
        if (link != NULL && link->state == PD_LINK_UP) {
            say_link_to_all(core, link, false, "a write failed");
            drop_link(core, link, "a write failed", now_ns); /* r with it */
        } else {
            end_early(core, r, PD_E_PEER, "blocks could not be written", now_ns);
        }
        return;
    }
    r->ship_bytes += event->bytes;
    r->wire_ns += event->wire_ns;
    core->counters.bytes_shipped += event->bytes;
    pd_cost_observe_ship(&core->cost, event->bytes, (double)event->wire_ns / 1e6);
    settle(core, r);
}

static void prefill_on_transfer(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    if (event->kind == PD_TRANSFER_SENT) {
        on_sent(core, event, now_ns);
        ship_what_waited(core, now_ns);
        run_step(core, now_ns); /* blocks may have come back */
        return;
    }
    pd_link *link = pd_links_by_tag(&core->links, event->tag);
    if (event->kind == PD_TRANSFER_NOTICE || link == NULL)
        return;
    if (event->kind == PD_TRANSFER_CONNECTED && link->state == PD_LINK_CONNECTING) {
        link->state = PD_LINK_UP;
        snprintf(link->lane, sizeof link->lane, "%s", event->lane);
        pd_log_info("msg=\"link up\" peer=%s lane=%s", link->name, link->lane);
        pd_last_words_pay(&core->words, link);
        say_link_to_all(core, link, true, "");
    } else if (event->kind == PD_TRANSFER_PEER_DOWN && link->state != PD_LINK_CLOSING) {
        say_link_to_all(core, link, false, "the connection failed");
        drop_link(core, link, "the connection failed", now_ns);
    } else if (event->kind == PD_TRANSFER_CLOSED) {
        uint64_t tag = link->tag;
        pd_links_closed(link);
        for (prefill_request *r = core->head, *next; r != NULL; r = next) {
            next = r->next;
            if (!r->ship || r->link_tag != tag)
                continue;
            r->unclosed = event->status != PD_OK && r->posted > 0;
            settle(core, r);
        }
    }
    run_step(core, now_ns);
}

/* ---- time ---- */

static void lose_router(pd_role_core *core, uint64_t router, uint64_t now_ns)
{
    pd_log_warn("msg=\"a router is lost; its requests are cancelled\" router=%016llx",
                (unsigned long long)router);
    core->counters.routers_lost++;
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->key.router == router)
            end_early(core, r, PD_E_CANCELLED, "its router is lost", now_ns);
    }
}

/* A lost router's leases whose prefill never came here must not wait for us either; while some of
 * its requests are still under way here, their own aborts come first. Said a few times over: a
 * decode worker may take a lease request late, after the first word. */
static void say_router_lost(pd_role_core *core, uint64_t now_ns)
{
    enum { TIMES = 10 };

    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        pd_router_seen *router = &core->routers.entries[i];
        bool under_way = false;
        if (router->router == 0 || !router->lost || router->said_count >= TIMES ||
            (router->said_count > 0 && now_ns < router->said_ns + core->options.lost_after_ns))
            continue;
        for (prefill_request *r = core->head; r != NULL; r = r->next)
            under_way = under_way || r->key.router == router->router;
        if (under_way)
            continue;
        router->said_count++;
        router->said_ns = now_ns;
        pd_last_words_everywhere(&core->words, &(pd_request_key){.router = router->router});
    }
}

/* An ending request whose puts do not come back holds its blocks: the link is stuck (a stopped
 * peer shows no error), so it is closed. True when one was: the list of requests has changed. */
static bool close_stuck_link(pd_role_core *core, uint64_t now_ns)
{
    for (prefill_request *r = core->head; r != NULL; r = r->next) {
        if (r->status == PD_OK || r->in_step || now_ns < r->ended_ns + core->options.lost_after_ns)
            continue;
        pd_link *link = pd_links_by_tag(&core->links, r->link_tag);
        if (link == NULL || link->state == PD_LINK_CLOSING)
            continue;
        say_link_to_all(core, link, false, "writes do not complete");
        drop_link(core, link, "writes do not complete", now_ns);
        return true;
    }
    return false;
}

static void prefill_on_tick(pd_role_core *core, uint64_t now_ns)
{
    uint64_t router;

    pd_routers_take_time(&core->routers, now_ns);
    while ((router = pd_routers_next_lost(&core->routers, now_ns)) != 0)
        lose_router(core, router, now_ns);
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->status != PD_OK)
            continue;
        if (now_ns >= r->deadline_ns)
            end_early(core, r, PD_E_TIMEOUT, "the prefill's deadline has passed", now_ns);
        else if (r->said_started_ns != 0 && !r->targets_known && !r->answer_ended &&
                 now_ns >= r->said_started_ns + SAY_STARTED_NS)
            say_started(core, r, now_ns);
    }
    while (close_stuck_link(core, now_ns))
        ;
    ship_what_waited(core, now_ns);
    say_router_lost(core, now_ns);
    for (uint32_t i = 0; i < core->links.count; i++) {
        if (core->links.links[i].state == PD_LINK_WAITING)
            connect_link(core, &core->links.links[i]);
    }
    run_step(core, now_ns);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
    pd_blocks_tick(&core->blocks);
}

static void prefill_drain(pd_role_core *core)
{
    core->draining = true;
}

static void prefill_cancel_all(pd_role_core *core, uint64_t now_ns)
{
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        end_early(core, r, PD_E_CANCELLED, "the worker is leaving", now_ns);
    }
}

/* ---- what others may know ---- */

static bool prefill_idle(const pd_role_core *core)
{
    return core->head == NULL && !core->stepping;
}

static pd_ledger prefill_ledger(const pd_role_core *core)
{
    return pd_blocks_ledger(&core->blocks);
}

static void prefill_heartbeat(const pd_role_core *core, pd_msg_heartbeat *heartbeat)
{
    uint32_t started = 0;

    for (const pd_prefill_item *item = core->queue.head; item != NULL; item = item->next)
        started += item->started;
    heartbeat->step = core->steps_done;
    heartbeat->busy = core->stepping;
    heartbeat->queue_ms = (float)pd_prefill_queue_work_ms(&core->queue, &core->cost);
    heartbeat->running = started;
    heartbeat->waiting = core->queue.count - started;
    heartbeat->ledger = pd_blocks_ledger(&core->blocks);
    heartbeat->events_sequence = pd_prefix_cache_seq(core->blocks.cache);
    heartbeat->draining = core->draining;
}

static pd_role_counters prefill_counters(const pd_role_core *core)
{
    return core->counters;
}

static const pd_cost *prefill_cost(const pd_role_core *core)
{
    return &core->cost;
}

const pd_role_ops prefill_role = {
    .role = PD_ROLE_PREFILL,
    .create = prefill_create,
    .destroy = prefill_destroy,
    .on_message = prefill_on_message,
    .on_group = prefill_on_group,
    .on_step_done = prefill_on_step_done,
    .on_transfer = prefill_on_transfer,
    .on_tick = prefill_on_tick,
    .drain = prefill_drain,
    .cancel_all = prefill_cancel_all,
    .idle = prefill_idle,
    .ledger = prefill_ledger,
    .heartbeat = prefill_heartbeat,
    .counters = prefill_counters,
    .cost = prefill_cost,
};
