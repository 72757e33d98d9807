#include "router/place.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/patience.h"
#include "router/pull.h"

#include <stdio.h>
#include <string.h>

enum { PUMP_TRIES = 32 /* queued requests tried in one turn */, HEARD_WITHIN = 2 /* heartbeats */ };

void router_place_send_prefill(router_requests *t, router_request *r, uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_PREFILL_REQUEST};
    pd_msg_prefill_request *m = &message.prefill_request;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    m->tokens = r->tokens;
    m->tokens_count = router_request_base_tokens(r);
    m->prompt_tokens = r->prompt_tokens;
    m->priority = r->priority;
    m->hashes = r->hashes;
    m->hashes_count = r->hashes_count;
    m->sampling = r->sampling;
    m->end_tokens = r->end_tokens;
    m->end_tokens_count = r->end_tokens_count;
    m->max_tokens = r->max_tokens;
    uint64_t patience_ns = router_patience_prefill_ns(
        t->o.config, r->terms.prefill_queue_ms + router_pull_ms(t->o.config, r),
        r->terms.prefill_ms);
    m->deadline_ms = router_patience_ms(patience_ns);
    m->hold_ms = router_patience_ms(r->total_due_ns > now_ns ? r->total_due_ns - now_ns : 0);
    router_pull_fill(t, r, m);
    if (r->decode != ROUTER_NO_WORKER) {
        const router_worker *decode = router_request_worker(t, r->decode);
        m->ship = true;
        memcpy(m->decode, decode->hello.name, sizeof m->decode);
        m->decode_incarnation = decode->hello.incarnation;
    }
    if (!router_request_send(t, r->prefill, &message)) {
        char why[ROUTER_MESSAGE_BYTES];
        uint32_t slot = r->prefill;
        snprintf(why, sizeof why, "prefill worker %s does not take messages",
                 router_request_worker(t, slot)->hello.name);
        router_request_block_worker(t, slot, ROUTER_BLOCKED_MS_MAX, now_ns);
        const router_failure failure = {.reason = ROUTER_RETRY_UNREACHABLE,
                                        .role = PD_ROLE_PREFILL,
                                        .slot = slot,
                                        .code = "worker_unavailable",
                                        .why = why};
        router_request_retry(t, r, &failure, now_ns);
        return;
    }
    r->prefill_open = true;
    r->prefill_sent_ns = now_ns;
    r->prefill_holds = r->decode != ROUTER_NO_WORKER;
    router_request_set_due(t, r, now_ns + router_patience_behind_ns(t->o.config, patience_ns));
    if (!r->charged_prefill)
        router_request_charge_prefill(t, r);
}

static bool send_lease(router_requests *t, router_request *r)
{
    const router_worker *prefill = router_request_worker(t, r->prefill);
    pd_message message = {.kind = PD_MSG_LEASE_REQUEST};
    pd_msg_lease_request *m = &message.lease_request;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    router_worker_peer(prefill, false, &m->sender);
    m->prompt_tokens = router_request_base_tokens(r);
    m->max_tokens = router_request_left(r);
    m->priority = r->priority;
    m->hashes = r->hashes;
    m->hashes_count = r->hashes_count;
    m->ttl_ms = (uint32_t)(t->o.config->lost_after_ns / PD_NS_PER_MS);
    return router_request_send(t, r->decode, &message);
}

static void log_choice(const router_requests *t, const router_request *r, uint32_t candidates)
{
    if (!pd_log_enabled(PD_LOG_DEBUG))
        return;
    const router_terms *terms = &r->terms;
    const router_worker *workers = t->o.cluster->workers;
    pd_log_req_debug(
        r->id,
        "msg=\"placed\" prefill=%s decode=%s candidates=%u total_ms=%.2f prefill_queue_ms=%.2f "
        "prefill_ms=%.2f ship_ms=%.2f decode_queue_ms=%.2f step_ms=%.2f cached_blocks=%u "
        "held_blocks=%u epoch=%u",
        workers[r->prefill].hello.name,
        r->decode == ROUTER_NO_WORKER ? "-" : workers[r->decode].hello.name, candidates,
        terms->total_ms, terms->prefill_queue_ms, terms->prefill_ms, terms->ship_ms,
        terms->decode_queue_ms, terms->step_ms, terms->prefill_cached_blocks,
        terms->decode_held_blocks, r->key.epoch);
}

uint64_t router_place_turn_ends_ns(const router_requests *t, const router_request *r)
{
    return r->distance == ROUTER_DISTANCE_ALWAYS ? UINT64_MAX
           : r->distance == ROUTER_DISTANCE_TURN ? r->suspect_ns + t->o.config->lost_after_ns
                                                 : r->suspect_ns;
}

typedef struct room {
    bool ready; /* there is a worker of that role */
    bool free;  /* and one without a suspect */
} room;

/* of: [2], of prefill and of decode workers. */
static void look_for_room(const router_requests *t, uint64_t now_ns, room *of)
{
    of[0] = of[1] = (room){false, false};
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (!router_worker_ready(worker))
            continue;
        room *own = &of[worker->hello.role == PD_ROLE_DECODE];
        own->ready = true;
        own->free |= !router_request_suspect_at(t, i, now_ns);
    }
}

bool router_place_waits_its_turn(const router_requests *t, const router_request *r, uint64_t now_ns)
{
    if (now_ns >= router_place_turn_ends_ns(t, r))
        return false;
    room of[2];
    look_for_room(t, now_ns, of);
    bool decodes = router_request_left(r) > 1;
    return r->killed_count > 0 &&
           ((of[0].ready && !of[0].free) || (decodes && of[1].ready && !of[1].free));
}

/* Its process may have ended together with the one that the suspect was at last, which this router
 * has not heard of yet: asked now it would be taken for one more that died of it. */
static bool heard_since(const router_requests *t, const router_request *r, uint32_t slot)
{
    return t->o.cluster->workers[slot].heard_ns > r->suspect_ns;
}

/* A worker without a suspect has not had the time to be heard of since that death. */
static bool room_will_be_heard(const router_requests *t, const router_request *r, uint64_t now_ns)
{
    if (now_ns >= r->suspect_ns + HEARD_WITHIN * t->o.config->heartbeat_ns)
        return false;
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        if (router_worker_ready(&t->o.cluster->workers[i]) && !heard_since(t, r, i) &&
            !router_request_suspect_at(t, i, now_ns))
            return true;
    }
    return false;
}

/* Of a role without a free worker those are left in taken where one stays apart: that both prefill
 * workers have a suspect is no reason to share a decode worker. Both: [ROUTER_SLOT_BITS]. */
static void give_up_distance(const router_requests *t, uint64_t now_ns, const uint64_t *apart,
                             uint64_t *taken)
{
    room of[2];
    look_for_room(t, now_ns, of);
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        if (!of[t->o.cluster->workers[i].hello.role == PD_ROLE_DECODE].free)
            taken[i / 64] &= apart[i / 64] | ~(1ull << i % 64);
    }
}

/* A worker that failed the request is avoided, unless it is the only one there. One that has a
 * suspect gets no second one, and a suspect none that was not heard of since that death. */
static bool choose(router_requests *t, const router_request *r, uint64_t now_ns,
                   router_choice *choice_out)
{
    uint64_t taken[ROUTER_SLOT_BITS] = {0}, unheard[ROUTER_SLOT_BITS] = {0};
    for (uint32_t i = 0; r->killed_count > 0 && i < t->o.cluster->slots_used; i++) {
        unheard[i / 64] |= (uint64_t)!heard_since(t, r, i) << i % 64;
        taken[i / 64] |=
            (uint64_t)router_request_suspect_at(t, i, now_ns) << i % 64 | unheard[i / 64];
    }
    router_policy_input input = {.cluster = t->o.cluster,
                                 .index = t->o.index,
                                 .cost = &t->cost,
                                 .hashes = r->hashes,
                                 .hashes_count = r->hashes_count,
                                 .prompt_tokens = router_request_base_tokens(r),
                                 .max_tokens = router_request_left(r),
                                 .need_decode = router_request_left(r) > 1,
                                 .avoid_prefill = r->avoid_prefill,
                                 .avoid_decode = r->avoid_decode,
                                 .too_small = r->too_small,
                                 .taken = r->killed_count > 0 ? taken : NULL,
                                 .now_ns = now_ns};
    if (router_policy_choose(&t->policy, &input, choice_out))
        return true;
    if (r->killed_count > 0 && now_ns >= router_place_turn_ends_ns(t, r)) {
        uint64_t apart[ROUTER_SLOT_BITS];
        memcpy(apart, unheard, sizeof apart);
        router_request_suspects_apart(t, now_ns, apart);
        give_up_distance(t, now_ns, apart, taken);
        if (router_policy_choose(&t->policy, &input, choice_out))
            return true;
        if (room_will_be_heard(t, r, now_ns))
            return false;
        memcpy(taken, apart, sizeof taken);
        if (router_policy_choose(&t->policy, &input, choice_out))
            return true;
    }
    bool only_prefill = r->avoid_prefill != ROUTER_NO_WORKER &&
                        !router_request_another_ready(t, PD_ROLE_PREFILL, r->avoid_prefill);
    bool only_decode = r->avoid_decode != ROUTER_NO_WORKER &&
                       !router_request_another_ready(t, PD_ROLE_DECODE, r->avoid_decode);
    if (!only_prefill && !only_decode)
        return false;
    if (only_prefill)
        input.avoid_prefill = ROUTER_NO_WORKER;
    if (only_decode)
        input.avoid_decode = ROUTER_NO_WORKER;
    return router_policy_choose(&t->policy, &input, choice_out);
}

/* r is in the queue; true: it is there no more. */
static bool try_place(router_requests *t, router_request *r, uint64_t now_ns)
{
    router_choice choice;
    if (!choose(t, r, now_ns, &choice))
        return false;
    r->prefill = choice.prefill;
    r->decode = choice.decode;
    r->terms = choice.terms;
    log_choice(t, r, choice.candidates);
    router_pull_choose(t, r);
    if (r->decode == ROUTER_NO_WORKER) {
        router_request_dequeue(t, r);
        r->queued_ns += now_ns - r->placed_ns;
        router_request_step(t, r, ROUTER_EVENT_PLACED_ALONE);
        router_place_send_prefill(t, r, now_ns);
        return true;
    }
    if (!send_lease(t, r)) {
        router_request_block_worker(t, r->decode, ROUTER_BLOCKED_MS_MAX, now_ns);
        r->prefill = r->decode = r->pull.slot = ROUTER_NO_WORKER;
        return false;
    }
    router_request_dequeue(t, r);
    r->queued_ns += now_ns - r->placed_ns;
    r->decode_open = true;
    r->lease_sent_ns = now_ns;
    router_request_step(t, r, ROUTER_EVENT_PLACED);
    router_request_charge_prefill(t, r); /* at once: the next request of a burst must see it */
    router_request_charge_decode(t, r);
    router_request_set_due(t, r, now_ns + t->o.config->lease_ns);
    return true;
}

void router_requests_pump(router_requests *t, uint64_t now_ns)
{
    uint32_t slot = t->queue_head;
    t->pumped_ns = now_ns;
    for (uint32_t tries = 0; slot != ROUTER_SLOT_NONE && tries < PUMP_TRIES;) {
        router_request *r = &t->slots[slot];
        uint32_t next = r->queue_next;
        if (now_ns < r->not_before_ns) {
            router_request_wake_at(t, r->not_before_ns);
        } else if (!router_place_waits_its_turn(t, r, now_ns)) {
            try_place(t, r, now_ns);
            tries++;
        }
        if (next != ROUTER_SLOT_NONE && t->slots[next].state != ROUTER_REQUEST_QUEUED)
            break; /* a failure in between changed the queue; the next event goes on */
        slot = next;
    }
}
