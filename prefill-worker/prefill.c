#include "prefill-worker/prefill.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "prefill-worker/ending.h"
#include "prefill-worker/peers.h"
#include "prefill-worker/ship_plan.h"
#include "prefill-worker/steps.h"

#define SAY_STARTED_NS (500 * PD_NS_PER_MS)

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

/* As a sender of what it holds already; and what it can say of all that it holds. */
static pd_status make_source(pd_role_core *core, uint32_t requests_max)
{
    pd_source_init(&core->source, &(pd_source_options){.role = &core->options,
                                                       .sink = &core->sink,
                                                       .blocks = &core->blocks,
                                                       .links = &core->links,
                                                       .words = &core->words,
                                                       .cost = &core->cost,
                                                       .counters = &core->counters,
                                                       .ships_max = requests_max,
                                                       .drop_link = prefill_peers_drop,
                                                       .ctx = core});
    return pd_audit_init(&core->audit, requests_max * 2 + PREFILL_PULLS_MAX, PREFILL_PULLS_MAX);
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
        status = prefill_pulls_init(&core->pulls, &core->options, &core->sink, &core->blocks,
                                    &core->counters);
    if (status == PD_OK)
        status = pd_links_init(&core->links, options->peers_max, &core->sink);
    if (status == PD_OK)
        status = pd_key_table_create(requests_max, &core->by_key);
    if (status == PD_OK)
        status = pd_key_table_create(requests_max, &core->by_ticket);
    if (status == PD_OK)
        status = pd_token_batch_init(&core->tokens, options->max_batch);
    if (status == PD_OK)
        status = make_source(core, requests_max);
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
    pd_source_fini(&core->source);
    pd_audit_fini(&core->audit);
    pd_key_table_destroy(core->by_key);
    pd_key_table_destroy(core->by_ticket);
    pd_links_fini(&core->links);
    prefill_pulls_fini(&core->pulls);
    pd_blocks_fini(&core->blocks);
    pd_free(core->slices);
    pd_free(core->picked);
    pd_free(core);
}

/* ---- messages ---- */

static void refuse(pd_role_core *core, const pd_msg_prefill_request *asked, const pd_link *link,
                   pd_status status, const char *reason)
{
    prefill_request r = {
        .key = asked->key,
        .status = status,
        .reason = reason,
        .may_land = pd_last_words_owes(&core->words, &asked->key, asked->decode_incarnation)};

    core->counters.refused++;
    pd_last_words_end(&core->words, &asked->key);
    pd_log_req_warn(asked->id, "msg=\"prefill refused: %s\" status=%s", reason,
                    pd_status_name(status));
    if (asked->ship && link != NULL)
        pd_last_words_abort(&core->words, link, &asked->key);
    else if (asked->ship)
        pd_last_words_owe(&core->words, asked->decode_incarnation, &asked->key, true);
    prefill_say_done(core, &r);
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
    const char *wrong = prefill_request_check(&core->options, asked, &status);
    if (wrong == NULL && core->draining) {
        wrong = "the worker is draining";
        status = PD_E_OVERLOAD;
    }
    if (pd_last_words_ended(&core->words, &asked->key)) {
        wrong = "it has ended here";
        status = PD_E_CANCELLED;
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
    pd_request_key ticket = prefill_ticket_key(r->ticket);
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
}

static void on_targets(pd_role_core *core, const pd_msg_targets *targets, uint64_t now_ns)
{
    prefill_request *r = pd_key_table_get(core->by_key, &targets->key);

    if (r == NULL || r->status != PD_OK || !r->ship)
        return; /* it has ended, and its last word is on its way */
    if (!prefill_ship_targets(r, targets)) {
        prefill_end_early(core, r, PD_E_INVALID, "held and landing blocks are not the prompt's",
                          now_ns);
        return;
    }
    if (prefill_ship_ready(core, r, now_ns))
        prefill_settle(core, r);
}

static void on_release(pd_role_core *core, const pd_msg_release *release)
{
    prefill_request *r = pd_key_table_get(core->by_key, &release->key);
    uint32_t source_epoch;

    if (r == NULL) {
        pd_source_release(&core->source, &release->key, &source_epoch);
        return;
    }
    r->released = true;
    prefill_settle(core, r);
}

static void on_ship_again(pd_role_core *core, const pd_msg_ship_again *asked, uint64_t now_ns)
{
    prefill_request *r = pd_key_table_get(core->by_key, &asked->key);
    pd_status status;

    if (r == NULL && pd_source_again(&core->source, asked, now_ns))
        return;
    if (r == NULL) {
        prefill_request unknown = {.key = asked->key, .again = 1, .status = PD_E_NOT_FOUND};
        unknown.reason = "its copies are gone";
        unknown.may_land = pd_last_words_say_again(&core->words, &asked->key, asked->receiver);
        pd_last_words_end(&core->words, &asked->key);
        prefill_say_done(core, &unknown);
        return;
    }
    r->word_owed = true;
    if (!prefill_ship_again(r, asked, &status) && status == PD_OK)
        pd_log_req_warn(r->id,
                        "msg=\"blocks are asked for again that are not its own\" group=%u "
                        "first_block=%u count=%u",
                        asked->group, asked->first_block, asked->count);
    if (status != PD_OK)
        prefill_end_early(core, r, status, "no memory to ship again", now_ns);
    else if (prefill_ship_ready(core, r, now_ns))
        prefill_settle(core, r);
}

static void on_cancel(pd_role_core *core, const pd_msg_cancel *cancel, uint64_t now_ns)
{
    prefill_request *r = pd_key_table_get(core->by_key, &cancel->key);

    if (r != NULL) {
        prefill_end_early(core, r, PD_E_CANCELLED, "cancelled", now_ns);
    } else if (!pd_source_cancel(&core->source, &cancel->key, now_ns)) {
        /* leased for, perhaps, and never asked of us */
        pd_last_words_end(&core->words, &cancel->key);
        pd_last_words_everywhere(&core->words, &cancel->key);
    }
    if (cancel->unwritten)
        prefill_pull_unwritten(&core->pulls, &cancel->key, 0);
}

static void on_ship_request(pd_role_core *core, const pd_msg_ship_request *asked, uint64_t now_ns)
{
    if (asked->source_epoch == 0)
        pd_source_request(&core->source, asked, NULL, now_ns);
    else
        pd_source_refuse(&core->source, asked, PD_E_NOT_FOUND, "no sequence runs here");
}

static void on_audit(pd_role_core *core, uint64_t router, const pd_msg_audit *asked)
{
    pd_audit_begin(&core->audit, router);
    for (const prefill_request *r = core->head; r != NULL; r = r->next) {
        pd_audit_state state = r->computed       ? PD_AUDIT_HOLDING
                               : r->item.started ? PD_AUDIT_COMPUTING
                                                 : PD_AUDIT_WAITING;
        pd_audit_add(&core->audit, &r->key, state, r->item.started ? r->blocks_count : 0);
    }
    prefill_pulls_audit(&core->pulls, &core->audit);
    pd_source_audit(&core->source, &core->audit);
    pd_audit_send(&core->audit, &core->options, &core->sink, asked->serial,
                  pd_blocks_ledger(&core->blocks));
}

static const pd_request_key *key_of(const pd_message *message)
{
    switch (message->kind) {
    case PD_MSG_PREFILL_REQUEST: return &message->prefill_request.key;
    case PD_MSG_TARGETS: return &message->targets.key;
    case PD_MSG_RELEASE: return &message->release.key;
    case PD_MSG_SHIP_AGAIN: return &message->ship_again.key;
    case PD_MSG_CANCEL: return &message->cancel.key;
    case PD_MSG_PULL_END: return &message->pull_end.key;
    case PD_MSG_SHIP_REQUEST: return &message->ship_request.key;
    default: return NULL;
    }
}

static void prefill_on_message(pd_role_core *core, uint64_t router, const pd_message *message,
                               uint64_t now_ns)
{
    if (!pd_routers_on_message(&core->routers, router, message, now_ns))
        return;
    const pd_request_key *key = key_of(message);
    /* A source's word may come by any router: that of the request can be lost. */
    if (message->kind == PD_MSG_CANCEL && message->cancel.source != 0) {
        prefill_pull_unwritten(&core->pulls, key, message->cancel.source);
        return;
    }
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
    case PD_MSG_PULL_END: prefill_pull_ended(&core->pulls, &message->pull_end); break;
    case PD_MSG_SHIP_REQUEST: on_ship_request(core, &message->ship_request, now_ns); break;
    case PD_MSG_AUDIT: on_audit(core, router, &message->audit); break;
    case PD_MSG_PEER_UP: prefill_peers_up(core, router, &message->peer_up, now_ns); break;
    case PD_MSG_PEER_GONE: prefill_peers_gone(core, &message->peer_gone, now_ns); break;
    case PD_MSG_SNAPSHOT_REQUEST:
        pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
        pd_blocks_snapshot(&core->blocks, &core->options, &core->sink, router);
        break;
    default: break;
    }
    prefill_run_step(core, now_ns); /* somebody new, or blocks have come back */
}

static void on_notice(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    uint64_t seals[PD_NOTICE_SEALS_MAX];
    pd_notice notice;

    if (pd_notice_unpack(event->notice, event->notice_len, seals, &notice) == PD_OK) {
        prefill_pull_on_notice(&core->pulls, &notice, now_ns);
        return;
    }
    core->counters.notices_ignored++;
    pd_log_warn("msg=\"bytes that are no notice came on the data plane\" bytes=%zu",
                event->notice_len);
}

static void prefill_on_checked(pd_role_core *core, const pd_checked *checked, uint64_t now_ns)
{
    prefill_pull_on_checked(&core->pulls, checked);
    prefill_run_step(core, now_ns);
}

static void prefill_peer_dead(pd_role_core *core, uint64_t incarnation, uint64_t now_ns)
{
    prefill_pull_source_gone(&core->pulls, incarnation, true);
    prefill_run_step(core, now_ns);
}

static void prefill_peer_ended(pd_role_core *core, uint64_t incarnation)
{
    pd_last_words_dead(&core->words, incarnation);
}

static void prefill_on_transfer(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    if (event->kind == PD_TRANSFER_SENT) {
        if (!pd_source_on_sent(&core->source, event, now_ns))
            prefill_peers_sent(core, event, now_ns);
        prefill_ship_what_waited(core, now_ns);
    } else if (event->kind == PD_TRANSFER_NOTICE) {
        on_notice(core, event, now_ns);
    } else {
        prefill_peers_on_link(core, event, now_ns);
    }
    prefill_run_step(core, now_ns); /* blocks may have come back */
}

/* ---- time ---- */

static void lose_router(pd_role_core *core, uint64_t router, uint64_t now_ns)
{
    pd_log_warn("msg=\"a router is lost; its requests are cancelled\" router=%016llx",
                (unsigned long long)router);
    core->counters.routers_lost++;
    pd_source_end_all(&core->source, router, "its router is lost", now_ns);
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        if (r->key.router == router)
            prefill_end_early(core, r, PD_E_CANCELLED, "its router is lost", now_ns);
    }
}

/* Some of that router's requests are still under way here: their own aborts come first. */
static bool has_of(const void *ctx, uint64_t router)
{
    const pd_role_core *core = ctx;

    for (const prefill_request *r = core->head; r != NULL; r = r->next) {
        if (r->key.router == router)
            return true;
    }
    return false;
}

/* Its deadline has passed before its turn came. A pool that is full of what waits for a slow link
 * is no failure: somebody else may have room. */
static bool wants_room(const pd_role_core *core, const prefill_request *r)
{
    pd_ledger held = pd_blocks_ledger(&core->blocks);

    return r->started_ns == 0 && r->pull == NULL &&
           (!core->stepping || held.free + held.cached < r->blocks_count);
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
        if (now_ns >= r->deadline_ns && wants_room(core, r))
            prefill_end_early(core, r, PD_E_OVERLOAD, "no room for its blocks in time", now_ns);
        else if (now_ns >= r->deadline_ns)
            prefill_end_early(core, r, PD_E_TIMEOUT, "the prefill's deadline has passed", now_ns);
        else if (r->said_started_ns != 0 && !r->answer_ended &&
                 ((r->ship && !r->targets_known) || r->pull != NULL) &&
                 now_ns >= r->said_started_ns + SAY_STARTED_NS)
            prefill_say_started(core, r, now_ns);
    }
    prefill_peers_tick(core, now_ns);
    prefill_pulls_tick(&core->pulls, now_ns);
    prefill_pulls_ask(&core->pulls, &core->links, now_ns);
    pd_source_tick(&core->source, now_ns);
    prefill_ship_what_waited(core, now_ns);
    pd_source_tell_lost(&core->source, &core->routers, has_of, core, now_ns);
    prefill_run_step(core, now_ns);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
    pd_blocks_tick(&core->blocks);
}

static void prefill_drain(pd_role_core *core)
{
    core->draining = true;
}

static void prefill_cancel_all(pd_role_core *core, uint64_t now_ns)
{
    pd_source_end_all(&core->source, 0, "the worker is leaving", now_ns);
    for (prefill_request *r = core->head, *next; r != NULL; r = next) {
        next = r->next;
        prefill_end_early(core, r, PD_E_CANCELLED, "the worker is leaving", now_ns);
    }
}

/* ---- what others may know ---- */

static bool prefill_idle(const pd_role_core *core)
{
    return core->head == NULL && !core->stepping && pd_source_idle(&core->source);
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
    .on_checked = prefill_on_checked,
    .on_step_done = prefill_on_step_done,
    .on_transfer = prefill_on_transfer,
    .on_tick = prefill_on_tick,
    .peer_dead = prefill_peer_dead,
    .peer_ended = prefill_peer_ended,
    .drain = prefill_drain,
    .cancel_all = prefill_cancel_all,
    .idle = prefill_idle,
    .ledger = prefill_ledger,
    .heartbeat = prefill_heartbeat,
    .counters = prefill_counters,
    .cost = prefill_cost,
};
