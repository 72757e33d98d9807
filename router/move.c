#include "router/move.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/patience.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MOVES_MAX = 2, /* failed ones of one suspension; then it gives way */
    GIVE_WAY_MS = 10
};
/* Asking for the lease and for the shipping, beside the bytes. */
static const double MOVE_BASE_MS = 2;
static const double PLACE_STEPS = 32; /* as router/policy: steps until a place in a full batch */

static const char *name_of(router_requests *t, uint32_t slot)
{
    return slot == ROUTER_NO_WORKER ? "(lost)" : router_request_worker(t, slot)->hello.name;
}

void router_move_on_suspended(router_requests *t, router_request *r,
                              const pd_msg_suspended *suspended, uint64_t now_ns)
{
    r->suspended = *suspended;
    if (r->state == ROUTER_REQUEST_SUSPENDED || r->state == ROUTER_REQUEST_MOVING)
        return; /* said again */
    router_request_step(t, r, ROUTER_EVENT_SUSPENDED);
    t->o.counters->suspended++;
    r->suspended_ns = now_ns;
    r->move = (router_move){.slot = ROUTER_NO_WORKER};
    router_request_set_due(t, r, now_ns + t->o.config->lease_ns);
    pd_log_req_info(r->id,
                    "msg=\"no room for its next block\" worker=%s answered=%u kv_tokens=%u "
                    "blocks=%u",
                    name_of(t, r->decode), suspended->answered, suspended->kv_tokens,
                    suspended->blocks);
    router_move_decide(t, r, now_ns);
}

/* ---- where to ---- */

/* Milliseconds until its next token there; INFINITY: it has no room, or cannot take it. */
static double price(const router_requests *t, const router_request *r, uint32_t slot)
{
    const router_core_config *config = t->o.config;
    const router_worker *worker = &t->o.cluster->workers[slot];
    const pd_ledger *ledger = &worker->report.ledger;
    uint64_t needed = ((uint64_t)r->prompt_tokens + r->max_tokens) / config->block_tokens + 1;

    if (slot == r->decode || !router_worker_ready(worker) || worker->hello.role != PD_ROLE_DECODE ||
        worker->hello.transfer_address_len == 0 || (r->too_small[slot / 64] >> slot % 64 & 1) ||
        (r->move.tried[slot / 64] >> slot % 64 & 1) ||
        needed > (uint64_t)ledger->free + ledger->cached)
        return INFINITY;
    uint32_t running = worker->report.running + worker->report.waiting;
    if (worker->inflight_decode > running)
        running = worker->inflight_decode;
    uint32_t batch = running + 1, most = worker->hello.max_batch;
    if (most != 0 && batch > most)
        batch = most;
    double step = pd_cost_decode_step_ms(
        &t->cost, batch, (uint64_t)ledger->running * config->block_tokens + r->suspended.kv_tokens);
    uint64_t bytes = (uint64_t)r->suspended.blocks * config->block_bytes;
    return MOVE_BASE_MS + pd_cost_ship_ms(&t->cost, bytes) +
           (running + 1 - batch) * PLACE_STEPS * step + step;
}

/* Milliseconds until its next token when it is computed again; INFINITY: nobody could now. */
static double price_again(router_requests *t, const router_request *r, uint64_t now_ns)
{
    router_choice choice;
    router_policy_state policy = t->policy; /* a question changes nothing */
    router_policy_input input = {.cluster = t->o.cluster,
                                 .index = t->o.index,
                                 .cost = &t->cost,
                                 .hashes = r->hashes,
                                 .hashes_count = r->hashes_count,
                                 .prompt_tokens = r->prompt_tokens + r->next_index,
                                 .max_tokens = r->max_tokens - r->next_index,
                                 .need_decode = r->max_tokens - r->next_index > 1,
                                 .avoid_prefill = r->avoid_prefill,
                                 .avoid_decode = r->avoid_decode,
                                 .too_small = r->too_small,
                                 .now_ns = now_ns};
    return router_policy_choose(&policy, &input, &choice) ? choice.terms.total_ms : INFINITY;
}

static bool can_move(const router_requests *t, const router_request *r)
{
    uint32_t block_tokens = t->o.config->block_tokens, kv = r->suspended.kv_tokens;
    /* The last token's KV comes of the step that uses it. */
    /* A suspect does not come to where another one may be: it gives way. */
    return r->move.failed < MOVES_MAX && r->next_index > 0 && r->killed_count == 0 &&
           kv + 1 == r->prompt_tokens + r->next_index &&
           r->suspended.blocks >= (kv + block_tokens - 1) / block_tokens;
}

static void give_way(router_requests *t, router_request *r, uint64_t now_ns)
{
    t->o.counters->gave_way++;
    r->gave_way++;
    r->not_before_ns = now_ns + router_request_backoff_ns(t, GIVE_WAY_MS, r->gave_way);
    if (r->queue_due_ns < now_ns + t->o.config->queue_ns)
        r->queue_due_ns = now_ns + t->o.config->queue_ns;
    pd_log_req_info(r->id, "msg=\"gives way: to be computed again\" worker=%s tokens=%u times=%u",
                    name_of(t, r->decode), r->next_index, r->gave_way);
    router_request_requeue(t, r, ROUTER_EVENT_GIVES_WAY, now_ns);
}

static bool start_move(router_requests *t, router_request *r, uint32_t slot, uint64_t now_ns)
{
    uint32_t kv = r->suspended.kv_tokens;
    pd_message message = {.kind = PD_MSG_LEASE_REQUEST};
    pd_msg_lease_request *m = &message.lease_request;
    if (router_request_extend_hashes(t, r, kv) != PD_OK)
        return false;
    m->key = r->key;
    m->key.epoch = r->epoch_last + 1;
    memcpy(m->id, r->id, sizeof m->id);
    router_worker_peer(router_request_worker(t, r->decode), false, &m->sender);
    m->bind = true;
    m->priority = r->priority;
    m->prompt_tokens = kv;
    m->max_tokens = r->prompt_tokens + r->max_tokens - kv;
    m->hashes = r->hashes;
    m->hashes_count = kv / t->o.config->block_tokens;
    m->ttl_ms = (uint32_t)(t->o.config->lost_after_ns / PD_NS_PER_MS);
    if (!router_request_send(t, slot, &message))
        return false;
    r->epoch_last++;
    r->move.slot = slot;
    r->move.epoch = r->epoch_last;
    r->move.sent_ns = now_ns;
    r->move.asked = r->move.open = r->move.may_land = false;
    r->move.again.count = 0;
    router_request_step(t, r, ROUTER_EVENT_MOVES);
    router_request_set_due(t, r, now_ns + t->o.config->lease_ns);
    return true;
}

void router_move_decide(router_requests *t, router_request *r, uint64_t now_ns)
{
    pd_assert(r->state == ROUTER_REQUEST_SUSPENDED);
    if (r->next_index < r->suspended.answered)
        return; /* its tokens come on another socket */
    double best = INFINITY;
    uint32_t slot = ROUTER_NO_WORKER;
    for (uint32_t i = 0; i < t->o.cluster->slots_used && can_move(t, r); i++) {
        double ms = price(t, r, i);
        if (ms < best) {
            best = ms;
            slot = i;
        }
    }
    bool move = slot != ROUTER_NO_WORKER && best <= price_again(t, r, now_ns);
    if (!move || !start_move(t, r, slot, now_ns))
        give_way(t, r, now_ns);
}

/* ---- on its way ---- */

void router_move_failed(router_requests *t, router_request *r, const char *why, uint64_t now_ns)
{
    pd_msg_cancel cancel = {.key = r->key,
                            .unwritten = !(r->move.asked && (r->move.open || r->move.may_land))};
    cancel.key.epoch = r->move.epoch;
    uint32_t slot = r->move.slot;
    pd_log_req_warn(r->id, "msg=\"move failed: %s\" from=%s to=%s", why, name_of(t, r->decode),
                    name_of(t, slot));
    t->o.counters->moves_failed++;
    router_cluster_cancel(t->o.cluster, slot, &cancel);
    if (r->move.asked)
        router_cluster_cancel(t->o.cluster, r->decode, &cancel);
    r->move.tried[slot / 64] |= 1ull << (slot % 64);
    r->move.slot = ROUTER_NO_WORKER;
    r->move.failed++;
    r->missed_move = 0;
    router_request_step(t, r, ROUTER_EVENT_MOVE_FAILED);
    router_request_set_due(t, r, now_ns + t->o.config->lease_ns);
    router_move_decide(t, r, now_ns);
}

static bool ask_to_ship(router_requests *t, router_request *r, const pd_msg_lease_reply *reply,
                        uint64_t now_ns)
{
    uint64_t bytes = (uint64_t)reply->blocks_count * t->o.config->block_bytes;
    uint64_t landing_ns = router_patience_landing_ns(t->o.config, &t->cost, bytes, r->failures);
    pd_message message = {.kind = PD_MSG_SHIP_REQUEST};
    pd_msg_ship_request *m = &message.ship_request;
    m->key = reply->key;
    memcpy(m->id, r->id, sizeof m->id);
    m->source_epoch = r->key.epoch;
    router_worker_peer(router_request_worker(t, r->move.slot), true, &m->receiver);
    m->first_block = reply->held_blocks;
    m->blocks = reply->blocks;
    m->blocks_count = reply->blocks_count;
    m->kv_tokens = r->suspended.kv_tokens;
    m->deadline_ms = router_patience_ms(landing_ns);
    if (!router_request_send(t, r->decode, &message))
        return false;
    r->move.asked = r->move.open = true;
    router_request_set_due(t, r, now_ns + router_patience_behind_ns(t->o.config, landing_ns));
    return true;
}

void router_move_on_lease(router_requests *t, router_request *r, uint32_t slot,
                          const pd_msg_lease_reply *reply, uint64_t now_ns)
{
    uint32_t block_tokens = t->o.config->block_tokens;
    uint32_t blocks = (r->suspended.kv_tokens + block_tokens - 1) / block_tokens;
    if (r->move.slot != slot || r->move.asked)
        return;
    if (reply->status != PD_OK)
        router_move_failed(
            t, r, reply->reason[0] == '\0' ? pd_status_name(reply->status) : reply->reason, now_ns);
    else if (!reply->bound || reply->held_blocks > r->suspended.kv_tokens / block_tokens ||
             (uint64_t)reply->held_blocks + reply->blocks_count != blocks)
        router_move_failed(t, r, "the lease does not fit the sequence", now_ns);
    else if (reply->blocks_count == 0) /* its cache has them all: there is nothing to ship */
        router_move_on_landed(t, r, slot, now_ns);
    else if (!ask_to_ship(t, r, reply, now_ns))
        router_move_failed(t, r, "the holder does not take messages", now_ns);
}

/* It has changed hands: the new worker goes on, the old one keeps what it has as cache. */
void router_move_on_landed(router_requests *t, router_request *r, uint32_t slot, uint64_t now_ns)
{
    if (r->move.slot != slot)
        return;
    pd_msg_cancel cancel = {.key = r->key, .unwritten = true, .keep = true};
    pd_message release = {.kind = PD_MSG_RELEASE, .release = {.key = r->key}};
    release.release.key.epoch = r->move.epoch;
    if (!router_request_send(t, r->decode, &release))
        pd_log_req_debug(r->id, "msg=\"release not taken\" worker=%s", name_of(t, r->decode));
    router_cluster_cancel(t->o.cluster, r->decode, &cancel);
    pd_log_req_info(r->id, "msg=\"moved\" from=%s to=%s blocks=%u ms=%.1f", name_of(t, r->decode),
                    name_of(t, slot), r->suspended.blocks,
                    (double)(now_ns - r->suspended_ns) / 1e6);
    t->o.counters->moves++;
    router_request_discharge_decode(t, r);
    r->decode = slot;
    r->key.epoch = r->move.epoch;
    r->move = (router_move){.slot = ROUTER_NO_WORKER};
    r->early_count = 0;
    r->base_index = r->next_index - 1; /* nobody samples that one again */
    r->landed = r->decode_open = true;
    r->lease_sent_ns = now_ns;
    r->missed_decode = r->missed_move = 0;
    router_request_charge_decode(t, r);
    router_request_step(t, r, ROUTER_EVENT_MOVED);
    router_request_set_due(t, r, now_ns + t->o.config->decode_idle_ns);
    r->landing_ns = t->o.config->lease_ns;
    if (!router_request_send_start(t, r, r->landing_ns, now_ns)) {
        char why[ROUTER_MESSAGE_BYTES];
        snprintf(why, sizeof why, "decode worker %s does not take messages", name_of(t, slot));
        const router_failure failure = {.reason = ROUTER_RETRY_UNREACHABLE,
                                        .role = PD_ROLE_DECODE,
                                        .slot = slot,
                                        .code = "worker_unavailable",
                                        .why = why};
        router_request_retry(t, r, &failure, now_ns);
    }
}

void router_move_on_refetch(router_requests *t, router_request *r, uint32_t slot,
                            const pd_msg_refetch *refetch, uint64_t now_ns)
{
    if (r->move.slot != slot || !r->move.asked)
        return;
    pd_log_req_warn(r->id,
                    "msg=\"moved blocks did not arrive right: %s\" sender=%s receiver=%s group=%u "
                    "first_block=%u count=%u asked_before=%u",
                    refetch->reason, name_of(t, r->decode), name_of(t, slot), refetch->group,
                    refetch->first_block, refetch->count, r->move.again.count);
    if (!router_again_may(&r->move.again, refetch))
        return;
    pd_message message = {
        .kind = PD_MSG_SHIP_AGAIN,
        .ship_again = {.key = refetch->key,
                       .group = refetch->group,
                       .first_block = refetch->first_block,
                       .count = refetch->count,
                       .receiver = router_request_worker(t, slot)->hello.incarnation}};
    t->o.counters->refetches++;
    if (!router_request_send(t, r->decode, &message)) {
        router_move_failed(t, r, "the holder does not take messages", now_ns);
        return;
    }
    router_again_sent(&r->move.again, refetch);
    r->move.open = true;
}

void router_move_on_done(router_requests *t, router_request *r, uint32_t slot,
                         const pd_msg_ship_done *done, uint64_t now_ns)
{
    if (r->decode != slot || !r->move.asked || !r->move.open ||
        (done->status == PD_OK && done->again != r->move.again.count))
        return;
    if (done->receiver != 0 && r->move.slot != ROUTER_NO_WORKER &&
        done->receiver != router_request_worker(t, r->move.slot)->hello.incarnation)
        return; /* said of another one, which asked */
    r->move.open = false;
    r->move.may_land = done->may_land;
    if (done->status != PD_OK)
        router_move_failed(
            t, r, done->reason[0] == '\0' ? pd_status_name(done->status) : done->reason, now_ns);
    else if (done->ship_bytes > 0)
        pd_cost_observe_ship(&t->cost, done->ship_bytes, done->ship_ms);
}

void router_move_expired(router_requests *t, router_request *r, uint64_t now_ns)
{
    if (r->state == ROUTER_REQUEST_SUSPENDED) {
        give_way(t, r, now_ns); /* tokens that it sent were lost: they are computed again */
        return;
    }
    router_move_failed(t, r, r->move.asked ? "it took too long" : "the lease was not answered",
                       now_ns);
}
