#include "prefill-worker/prefill.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/blocks.h"
#include "common/worker/key_table.h"
#include "common/worker/links.h"
#include "common/worker/prefill_queue.h"
#include "common/worker/token_batch.h"

#include <stdio.h>
#include <string.h>

typedef struct request {
    pd_prefill_item item; /* first: an item is its request */
    struct request *prev, *next;
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    /* what is asked; the arrays lie in one piece of memory behind memory */
    void *memory;
    uint32_t *tokens; /* [item.tokens] */
    pd_hash128 *hashes;
    uint32_t *end_tokens;
    pd_block *targets; /* [blocks_count - held], in the decode worker's pool */
    pd_block *blocks;  /* [blocks_count], in the own pool, once item.started */
    uint32_t hashes_count, end_tokens_count, blocks_count, held;
    pd_sampling sampling;
    uint32_t max_tokens;
    bool ship;
    uint64_t receiver; /* the decode worker's incarnation */
    uint64_t link_tag;
    uint64_t ticket;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    /* how it stands */
    bool in_step;
    bool computed;         /* the first token is out */
    pd_status status;      /* not PD_OK: it is ending */
    const char *reason;    /* a literal */
    uint32_t shipped;      /* blocks before this one have left or are held there */
    uint32_t posted, sent; /* notices */
    uint32_t cached;       /* tokens */
    uint64_t arrived_ns, started_ns, ended_ns;
    uint64_t wire_ns; /* of all writes that landed, hidden behind computing or not */
    uint64_t compute_ns;
    uint64_t ship_bytes;
    bool may_land; /* as pd_msg_prefill_done says it */
    bool unclosed; /* its link's close was given up: puts may be under way for ever */
} request;

/* An abort for a decode worker whose link is not up. Words of a newer link end what an older one
 * may still carry (common/transfer), so one owed since a link broke may be paid by the next. */
typedef struct owed_abort {
    uint64_t receiver; /* 0: unused */
    pd_request_key key;
} owed_abort;

enum { OWED_MAX = 256 };

struct pd_role_core {
    pd_role_options options;
    pd_role_sink sink;
    pd_blocks blocks;
    pd_routers routers;
    pd_links links;
    pd_cost cost;
    pd_prefill_queue queue;
    pd_key_table *by_key;    /* requests */
    pd_key_table *by_ticket; /* the same, under {0, ticket, 0} */
    request *requests;       /* list of all */
    uint64_t ticket_next;
    pd_token_batch tokens;
    pd_step step;
    pd_step_slice *slices;    /* [max_batch] */
    pd_prefill_item **picked; /* [max_batch] */
    bool stepping, draining;
    uint64_t steps_done;
    owed_abort owed[OWED_MAX];
    uint32_t owed_next;
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

static void request_free(request *r)
{
    pd_free(r->memory);
    pd_free(r);
}

static void prefill_destroy(pd_role_core *core)
{
    if (core == NULL)
        return;
    while (core->requests != NULL) {
        request *r = core->requests;
        core->requests = r->next;
        request_free(r);
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

static void abort_at(pd_role_core *core, const pd_link *link, const pd_request_key *key)
{
    pd_notice notice = {
        .kind = PD_NOTICE_ABORT,
        .key = *key,
        .sender = core->options.incarnation,
        .receiver = link->incarnation,
    };

    if (core->sink.notify(core->sink.ctx, link->peer, &notice) != PD_OK)
        pd_log_warn("msg=\"an abort could not be posted; the link's end will tell\" peer=%s "
                    "number=%llu epoch=%u",
                    link->name, (unsigned long long)key->number, key->epoch);
}

static void owe_abort(pd_role_core *core, uint64_t receiver, const pd_request_key *key)
{
    if (core->owed[core->owed_next].receiver != 0)
        pd_log_warn("msg=\"too many last words are owed: one is forgotten, its blocks stay "
                    "quarantined until this worker ends\" receiver=%016llx",
                    (unsigned long long)core->owed[core->owed_next].receiver);
    core->owed[core->owed_next] = (owed_abort){.receiver = receiver, .key = *key};
    core->owed_next = (core->owed_next + 1) % OWED_MAX;
}

static void pay_aborts(pd_role_core *core, const pd_link *link)
{
    for (uint32_t i = 0; i < OWED_MAX; i++) {
        owed_abort *owed = &core->owed[i];
        if (owed->receiver != link->incarnation || owed->receiver == 0)
            continue;
        owed->receiver = 0;
        abort_at(core, link, &owed->key);
    }
}

static void abort_everywhere(pd_role_core *core, const pd_request_key *key)
{
    for (uint32_t i = 0; i < core->links.count; i++) {
        const pd_link *link = &core->links.links[i];
        if (link->state == PD_LINK_UP)
            abort_at(core, link, key);
        else if (link->state == PD_LINK_WAITING || link->state == PD_LINK_CONNECTING)
            owe_abort(core, link->incarnation, key);
    }
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

static void say_done(pd_role_core *core, const request *r)
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
    snprintf(done->reason, sizeof done->reason, "%s", r->reason);
    core->sink.send(core->sink.ctx, r->key.router, &message);
}

static void refuse(pd_role_core *core, const pd_msg_prefill_request *asked, const pd_link *link,
                   pd_status status, const char *reason)
{
    request r = {.key = asked->key, .status = status, .reason = reason};

    core->counters.refused++;
    pd_log_req_warn(asked->id, "msg=\"prefill refused: %s\" status=%s", reason,
                    pd_status_name(status));
    if (asked->ship && link != NULL)
        abort_at(core, link, &asked->key);
    else if (asked->ship)
        owe_abort(core, asked->decode_incarnation, &asked->key);
    say_done(core, &r);
}

/* ---- the end of a request ---- */

static bool puts_outstanding(pd_role_core *core, const request *r)
{
    /* A closed link has nothing under way, whatever was reported; and until it is closed, a put
     * that was reported as failed may still be written. */
    bool writing = r->sent < r->posted || (r->status == PD_E_PEER && r->posted > 0);

    return writing && pd_links_by_tag(&core->links, r->link_tag) != NULL;
}

static void finish(pd_role_core *core, request *r)
{
    pd_link *link = pd_links_by_tag(&core->links, r->link_tag);

    if (r->status != PD_OK && r->ship && link != NULL && link->state == PD_LINK_UP) {
        abort_at(core, link, &r->key);
    } else if (r->status != PD_OK && r->ship) {
        /* The last word goes by the next link. What was on its way by this one may land until then,
         * and, where the link could not be closed, even after. */
        r->may_land = r->item.started;
        if (!r->unclosed)
            owe_abort(core, r->receiver, &r->key);
    }
    if (r->item.started)
        pd_prefix_cache_drop(core->blocks.cache, r->blocks, r->blocks_count, PD_CLAIM_RUNNING);
    if (r->status == PD_OK)
        core->counters.finished++;
    else if (r->status == PD_E_CANCELLED)
        core->counters.cancelled++;
    else
        core->counters.failed++;
    pd_log_req_debug(r->id, "msg=\"prefill ends\" status=%s reason=\"%s\" cached=%u computed=%u",
                     pd_status_name(r->status), r->reason, r->cached, r->item.done - r->cached);
    say_done(core, r);

    pd_request_key ticket = ticket_key(r->ticket);
    pd_key_table_remove(core->by_key, &r->key);
    pd_key_table_remove(core->by_ticket, &ticket);
    if (r->prev != NULL)
        r->prev->next = r->next;
    else
        core->requests = r->next;
    if (r->next != NULL)
        r->next->prev = r->prev;
    request_free(r);
}

/* Ends the request if nothing is under way for it any more; r may be gone afterwards. */
static void settle(pd_role_core *core, request *r)
{
    if (r->in_step || puts_outstanding(core, r))
        return;
    if (r->status == PD_OK && !r->computed)
        return;
    finish(core, r);
}

/* The first reason stands. r may be gone afterwards. */
static void end_early(pd_role_core *core, request *r, pd_status status, const char *reason,
                      uint64_t now_ns)
{
    if (r->status == PD_OK) {
        r->status = status;
        r->reason = reason;
        r->ended_ns = now_ns;
        pd_prefill_queue_remove(&core->queue, &r->item);
        if (status != PD_E_CANCELLED)
            pd_log_req_warn(r->id, "msg=\"prefill fails: %s\" status=%s", reason,
                            pd_status_name(status));
    }
    settle(core, r);
}

/* ---- steps ---- */

static pd_status start(void *ctx, pd_prefill_item *item)
{
    pd_role_core *core = ctx;
    request *r = (request *)item;
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

static uint32_t valid_tokens(const pd_role_core *core, const request *r, uint32_t block)
{
    uint32_t block_tokens = core->options.layout.block_tokens;
    uint32_t rest = r->item.tokens - block * block_tokens;

    return rest < block_tokens ? rest : block_tokens;
}

static void plan_ship(const pd_role_core *core, const request *r, uint32_t done_then,
                      pd_ship *ship_out)
{
    const pd_link *link = pd_links_by_tag((pd_links *)&core->links, r->link_tag);
    uint32_t block_tokens = core->options.layout.block_tokens;
    /* The partial block at the prompt's end leaves with the last chunk only. */
    uint32_t complete = done_then == r->item.tokens ? r->blocks_count : done_then / block_tokens;

    *ship_out = (pd_ship){0};
    if (!r->ship || complete <= r->shipped || link == NULL || link->state != PD_LINK_UP)
        return;
    *ship_out = (pd_ship){
        .peer = link->peer,
        .ticket = r->ticket,
        .key = r->key,
        .receiver = r->receiver,
        .first = r->shipped,
        .count = complete - r->shipped,
        .sources = r->blocks + r->shipped,
        .targets = r->targets + (r->shipped - r->held),
        .valid_tokens = valid_tokens(core, r, complete - 1),
    };
}

static void run_step(pd_role_core *core, uint64_t now_ns)
{
    if (core->stepping)
        return;
    uint32_t count = pd_prefill_queue_pick(&core->queue, core->options.chunk_tokens, start, core,
                                           core->picked, core->options.max_batch);
    if (count == 0)
        return;
    for (uint32_t i = 0; i < count; i++) {
        request *r = (request *)core->picked[i];
        uint32_t then = r->item.done + r->item.take;
        core->slices[i] = (pd_step_slice){
            .request = r,
            .id = r->id,
            .tokens = r->tokens + r->item.done,
            .count = r->item.take,
            .position = r->item.done,
            .blocks = r->blocks,
            .want_token = then == r->item.tokens,
            .sampling = r->sampling,
        };
        plan_ship(core, r, then, &core->slices[i].ship);
        r->in_step = true;
        if (r->started_ns == 0)
            r->started_ns = now_ns;
    }
    core->stepping = true;
    core->step = (pd_step){
        .number = core->steps_done + 1,
        .slices = core->slices,
        .slices_count = count,
    };
    pd_links_hold(&core->links);
    core->sink.run(core->sink.ctx, &core->step);
}

static void answer_first_token(pd_role_core *core, request *r, uint32_t token)
{
    r->computed = true;
    pd_prefill_queue_remove(&core->queue, &r->item);
    pd_token_batch_add(
        &core->tokens,
        &(pd_step_token){
            .key = r->key,
            .index = 0,
            .token = token,
            .finish = pd_token_finish(token, 0, r->item.tokens, r->end_tokens, r->end_tokens_count,
                                      r->max_tokens, core->options.context_max),
        });
}

static void take_slice(pd_role_core *core, const pd_step *step, const pd_step_slice *slice)
{
    request *r = slice->request;

    r->in_step = false;
    r->posted += slice->notices_posted;
    r->compute_ns += step->finished_ns - step->started_ns;
    if (r->status != PD_OK || step->status != PD_OK)
        return;
    r->item.done += slice->count;
    r->item.take = 0;
    core->counters.tokens_computed += slice->count;
    uint32_t full = r->item.done / core->options.layout.block_tokens;
    pd_blocks_remember(&core->blocks, r->hashes, r->blocks,
                       full < r->hashes_count ? full : r->hashes_count);
    if (slice->ship.count > 0 && slice->ship_status == PD_OK) {
        r->shipped = slice->ship.first + slice->ship.count;
        core->counters.blocks_shipped += slice->ship.count;
    }
    if (slice->want_token)
        answer_first_token(core, r, slice->token_out);
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
    pd_links_let_go(&core->links);
    core->steps_done++;
    core->counters.steps++;
    for (uint32_t i = 0; i < step->slices_count; i++)
        take_slice(core, step, &step->slices[i]);
    if (step->status == PD_OK)
        observe_step(core, step);
    pd_token_batch_send(&core->tokens, &core->options, &core->sink, step,
                        pd_prefill_queue_work_ms(&core->queue, &core->cost));
    for (uint32_t i = 0; i < step->slices_count; i++) {
        request *r = step->slices[i].request;
        if (step->status != PD_OK)
            end_early(core, r, step->status, "the forward step failed", now_ns);
        else if (step->slices[i].ship_status != PD_OK)
            end_early(core, r, PD_E_PEER, "the link to the decode worker failed", now_ns);
        else if (r->ship && r->computed && r->shipped < r->blocks_count)
            end_early(core, r, PD_E_PEER, "the link to the decode worker is gone", now_ns);
        else
            settle(core, r);
    }
    run_step(core, now_ns);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
}

/* ---- messages ---- */

static const char *check_request(const pd_role_core *core, const pd_msg_prefill_request *asked,
                                 pd_status *status_out)
{
    uint32_t block_tokens = core->options.layout.block_tokens;
    uint64_t blocks = ((uint64_t)asked->tokens_count + block_tokens - 1) / block_tokens;

    *status_out = PD_E_TOO_LARGE;
    if (asked->tokens_count > core->options.context_max)
        return "the prompt is longer than the context";
    if (blocks > core->options.layout.blocks)
        return "the prompt needs more KV blocks than there are";
    *status_out = PD_E_INVALID;
    if (asked->tokens_count == 0)
        return "the prompt is empty";
    if (asked->max_tokens == 0)
        return "max_tokens is 0";
    if (asked->hashes_count > asked->tokens_count / block_tokens)
        return "more hashes than full blocks";
    if (!asked->ship && asked->max_tokens > 1)
        return "an answer of several tokens needs a decode worker";
    if (asked->ship && (uint64_t)asked->held_blocks + asked->blocks_count != blocks)
        return "held and landing blocks are not the prompt's";
    for (uint32_t i = 0; i < asked->tokens_count; i++) {
        if (asked->tokens[i] >= core->options.vocab)
            return "a token id is not in the vocabulary";
    }
    *status_out = PD_E_OVERLOAD;
    if (core->draining)
        return "the worker is draining";
    *status_out = PD_OK;
    return NULL;
}

static void *carve(unsigned char **at, const void *source, size_t bytes)
{
    void *place = *at;

    if (bytes > 0 && source != NULL)
        memcpy(place, source, bytes);
    *at += (bytes + 15) / 16 * 16;
    return place;
}

static request *request_copy(const pd_role_core *core, const pd_msg_prefill_request *asked)
{
    uint32_t block_tokens = core->options.layout.block_tokens;
    uint32_t blocks = (asked->tokens_count + block_tokens - 1) / block_tokens;
    size_t hashes_bytes = asked->hashes_count * sizeof *asked->hashes;
    size_t tokens_bytes = asked->tokens_count * sizeof *asked->tokens;
    size_t ends_bytes = asked->end_tokens_count * sizeof *asked->end_tokens;
    size_t targets_bytes = asked->ship ? asked->blocks_count * sizeof *asked->blocks : 0;
    size_t blocks_bytes = blocks * sizeof(pd_block);
    request *r = pd_calloc(1, sizeof *r);
    unsigned char *at = r == NULL ? NULL
                                  : pd_malloc(hashes_bytes + tokens_bytes + ends_bytes +
                                              targets_bytes + blocks_bytes + (size_t)5 * 16);

    if (at == NULL) {
        pd_free(r);
        return NULL;
    }
    r->memory = at;
    r->hashes = carve(&at, asked->hashes, hashes_bytes);
    r->tokens = carve(&at, asked->tokens, tokens_bytes);
    r->end_tokens = carve(&at, asked->end_tokens, ends_bytes);
    r->targets = carve(&at, asked->blocks, targets_bytes);
    r->blocks = carve(&at, NULL, blocks_bytes);
    r->item.tokens = asked->tokens_count;
    r->hashes_count = asked->hashes_count;
    r->end_tokens_count = asked->end_tokens_count;
    r->blocks_count = blocks;
    r->held = r->shipped = asked->ship ? asked->held_blocks : 0;
    r->key = asked->key;
    memcpy(r->id, asked->id, sizeof r->id);
    r->sampling = asked->sampling;
    r->max_tokens = asked->max_tokens;
    r->reason = "";
    return r;
}

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
    const char *wrong = check_request(core, asked, &status);
    if (wrong != NULL) {
        refuse(core, asked, link, status, wrong);
        return;
    }
    if (asked->ship && link == NULL) {
        refuse(core, asked, NULL, PD_E_PEER, "no link to the decode worker");
        return;
    }
    request *r = request_copy(core, asked);
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
        request_free(r);
        refuse(core, asked, link, PD_E_OVERLOAD, "the prefill queue is full");
        return;
    }
    /* The answer's only token is made here: nothing has to leave. */
    r->ship = asked->ship && asked->max_tokens > 1;
    r->receiver = asked->decode_incarnation;
    r->link_tag = link == NULL ? 0 : link->tag;
    r->arrived_ns = now_ns;
    r->deadline_ns =
        asked->deadline_ms == 0 ? UINT64_MAX : now_ns + asked->deadline_ms * PD_NS_PER_MS;
    r->next = core->requests;
    if (r->next != NULL)
        r->next->prev = r;
    core->requests = r;
    pd_log_req_debug(r->id, "msg=\"prefill queued\" tokens=%u held_blocks=%u waiting=%u",
                     r->item.tokens, r->held, core->queue.count);
    run_step(core, now_ns);
}

static void on_cancel(pd_role_core *core, const pd_msg_cancel *cancel, uint64_t now_ns)
{
    request *r = pd_key_table_get(core->by_key, &cancel->key);

    if (r != NULL)
        end_early(core, r, PD_E_CANCELLED, "cancelled", now_ns);
    else
        abort_everywhere(core, &cancel->key); /* leased for, perhaps, and never asked of us */
    run_step(core, now_ns);
}

static void fail_link_requests(pd_role_core *core, uint64_t tag, const char *reason,
                               uint64_t now_ns)
{
    for (request *r = core->requests, *next; r != NULL; r = next) {
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

static void prefill_on_message(pd_role_core *core, uint64_t router, const pd_message *message,
                               uint64_t now_ns)
{
    const pd_request_key *key = NULL;

    if (!pd_routers_on_message(&core->routers, router, message, now_ns))
        return;
    if (message->kind == PD_MSG_PREFILL_REQUEST)
        key = &message->prefill_request.key;
    if (message->kind == PD_MSG_CANCEL)
        key = &message->cancel.key;
    if (key != NULL && (key->router != router || key->number == 0)) {
        pd_log_warn("msg=\"a router spoke of a request that is not its own\" kind=%s",
                    pd_message_name(message->kind));
        return;
    }
    switch (message->kind) {
    case PD_MSG_PREFILL_REQUEST: on_prefill_request(core, &message->prefill_request, now_ns); break;
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
    request *r = event->ticket == 0 ? NULL : pd_key_table_get(core->by_ticket, &ticket);

    if (r == NULL)
        return;
    r->sent++;
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
        pay_aborts(core, link);
        say_link_to_all(core, link, true, "");
    } else if (event->kind == PD_TRANSFER_PEER_DOWN && link->state != PD_LINK_CLOSING) {
        say_link_to_all(core, link, false, "the connection failed");
        drop_link(core, link, "the connection failed", now_ns);
    } else if (event->kind == PD_TRANSFER_CLOSED) {
        uint64_t tag = link->tag;
        pd_links_closed(link);
        for (request *r = core->requests, *next; r != NULL; r = next) {
            next = r->next;
            if (!r->ship || r->link_tag != tag)
                continue;
            r->unclosed = event->status != PD_OK && r->item.started;
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
    for (request *r = core->requests, *next; r != NULL; r = next) {
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
        for (request *r = core->requests; r != NULL; r = r->next)
            under_way = under_way || r->key.router == router->router;
        if (under_way)
            continue;
        router->said_count++;
        router->said_ns = now_ns;
        abort_everywhere(core, &(pd_request_key){.router = router->router});
    }
}

/* An ending request whose puts do not come back holds its blocks: the link is stuck (a stopped
 * peer shows no error), so it is closed. True when one was: the list of requests has changed. */
static bool close_stuck_link(pd_role_core *core, uint64_t now_ns)
{
    for (request *r = core->requests; r != NULL; r = r->next) {
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
    for (request *r = core->requests, *next; r != NULL; r = next) {
        next = r->next;
        if (r->status == PD_OK && now_ns >= r->deadline_ns)
            end_early(core, r, PD_E_TIMEOUT, "the prefill's deadline has passed", now_ns);
    }
    while (close_stuck_link(core, now_ns))
        ;
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
    for (request *r = core->requests, *next; r != NULL; r = next) {
        next = r->next;
        end_early(core, r, PD_E_CANCELLED, "the worker is leaving", now_ns);
    }
}

/* ---- what others may know ---- */

static bool prefill_idle(const pd_role_core *core)
{
    return core->requests == NULL && !core->stepping;
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
