#include "router/request.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/request_table.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    PUMP_TRIES = 32, /* queued requests tried in one turn */
    RETRIES_MAX = 1, /* failures survived before the first token */
    CLOSING_MS = 250 /* patience for the prefill worker's last word */
};

/* ---- ends ---- */

__attribute__((format(printf, 6, 7))) static void fail(router_requests *t, router_request *r,
                                                       int http, const char *code,
                                                       uint32_t retry_after_s, const char *format,
                                                       ...)
{
    router_error error = {.http_status = http,
                          .type = http == 400   ? "invalid_request_error"
                                  : http == 429 ? "rate_limit_error"
                                                : "server_error",
                          .code = code,
                          .retry_after_s = retry_after_s};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    pd_log_req_warn(r->id, "msg=\"request failed: %s\" status=%d code=%s tokens=%u", error.message,
                    http, code, r->next_index);
    router_handle handle = r->key.number;
    t->o.counters->failed++;
    router_request_release(t, r);
    t->o.sink->error(t->o.sink->ctx, handle, &error);
}

static void finish(router_requests *t, router_request *r, uint64_t now_ns)
{
    router_finish end = {.reason = r->reason,
                         .prompt_tokens = r->prompt_tokens,
                         .completion_tokens = r->next_index,
                         .cached_tokens = r->cached_tokens,
                         .queued_ns = r->queued_ns,
                         .first_ns = r->first_ns - r->arrived_ns,
                         .total_ns = now_ns - r->arrived_ns};
    router_handle handle = r->key.number;
    pd_log_req_debug(r->id, "msg=\"request done\" tokens=%u cached=%u ms=%.1f", r->next_index,
                     r->cached_tokens, (double)end.total_ns / 1e6);
    t->o.counters->finished++;
    router_request_release(t, r);
    t->o.sink->finish(t->o.sink->ctx, handle, &end);
}

/* Back to the queue for another attempt. */
static void requeue(router_requests *t, router_request *r, uint64_t now_ns)
{
    router_request_leave_workers(t, r);
    r->key.epoch++;
    r->early_count = 0;
    r->state = ROUTER_REQUEST_QUEUED;
    r->placed_ns = now_ns;
    router_request_enqueue(t, r);
    router_request_set_due(t, r, r->queue_due_ns);
}

static bool another_ready(const router_requests *t, pd_role role, uint32_t slot)
{
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (i != slot && router_worker_ready(worker) && worker->hello.role == role)
            return true;
    }
    return false;
}

/* A worker failed the request: once more elsewhere, unless the client has seen a token. */
static void retry_or_fail(router_requests *t, router_request *r, pd_role role, uint32_t slot,
                          const char *code, const char *why, uint64_t now_ns)
{
    if (r->next_index == 0 && r->retries < RETRIES_MAX && another_ready(t, role, slot)) {
        pd_log_req_warn(r->id, "msg=\"tried again elsewhere: %s\"", why);
        r->retries++;
        t->o.counters->retried++;
        if (role == PD_ROLE_PREFILL)
            r->avoid_prefill = slot;
        else
            r->avoid_decode = slot;
        if (r->queue_due_ns < now_ns + t->o.config->lease_ns)
            r->queue_due_ns = now_ns + t->o.config->lease_ns;
        requeue(t, r, now_ns);
        return;
    }
    fail(t, r, 503, code, 1, "%s", why);
}

/* ---- forward ---- */

static bool send_to(router_requests *t, uint32_t slot, const pd_message *message)
{
    return t->o.sink->send(t->o.sink->ctx, router_request_worker(t, slot)->identity, message);
}

static void send_prefill(router_requests *t, router_request *r, uint32_t held_blocks,
                         uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_PREFILL_REQUEST};
    pd_msg_prefill_request *m = &message.prefill_request;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    m->tokens = r->tokens;
    m->tokens_count = r->prompt_tokens;
    m->prompt_tokens = r->prompt_tokens;
    m->hashes = r->hashes;
    m->hashes_count = r->hashes_count;
    m->sampling = r->sampling;
    m->end_tokens = r->end_tokens;
    m->end_tokens_count = r->end_tokens_count;
    m->max_tokens = r->max_tokens;
    m->deadline_ms = (uint32_t)(t->o.config->prefill_ns / PD_NS_PER_MS);
    if (r->decode != ROUTER_NO_WORKER) {
        const router_worker *decode = router_request_worker(t, r->decode);
        m->ship = true;
        memcpy(m->decode, decode->hello.name, sizeof m->decode);
        m->decode_incarnation = decode->hello.incarnation;
        m->held_blocks = held_blocks;
    }
    if (!send_to(t, r->prefill, &message)) {
        char why[ROUTER_MESSAGE_BYTES];
        uint32_t slot = r->prefill;
        snprintf(why, sizeof why, "prefill worker %s does not take messages",
                 router_request_worker(t, slot)->hello.name);
        router_request_block_worker(t, slot, ROUTER_BLOCKED_MS_MAX, now_ns);
        retry_or_fail(t, r, PD_ROLE_PREFILL, slot, "worker_unavailable", why, now_ns);
        return;
    }
    r->prefill_open = true;
    r->prefill_holds = r->decode != ROUTER_NO_WORKER;
    r->state = ROUTER_REQUEST_PREFILLING;
    router_request_set_due(t, r, now_ns + t->o.config->prefill_ns);
    if (!r->charged_prefill)
        router_request_charge_prefill(t, r);
}

/* The promise is to be bound: its answer names the blocks. Lost ones are made good by the prefill
 * worker, which says that it has started until it has its targets. */
static void send_bind(router_requests *t, router_request *r)
{
    pd_message message = {.kind = PD_MSG_BIND, .bind = {.key = r->key}};
    r->started = true;
    if (r->decode_open && !send_to(t, r->decode, &message))
        pd_log_req_debug(r->id, "msg=\"bind not taken\" worker=%s",
                         router_request_worker(t, r->decode)->hello.name);
}

/* What it shipped is checked: the prefill worker's copies may go. */
static void release_copies(router_requests *t, router_request *r)
{
    pd_message message = {.kind = PD_MSG_RELEASE, .release = {.key = r->key}};
    r->landed = true;
    if (!r->prefill_holds || r->prefill == ROUTER_NO_WORKER)
        return;
    if (send_to(t, r->prefill, &message))
        r->prefill_holds = false;
}

static bool send_lease(router_requests *t, router_request *r)
{
    const router_worker *prefill = router_request_worker(t, r->prefill);
    pd_message message = {.kind = PD_MSG_LEASE_REQUEST};
    pd_msg_lease_request *m = &message.lease_request;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    memcpy(m->prefill, prefill->hello.name, sizeof m->prefill);
    m->prefill_incarnation = prefill->hello.incarnation;
    router_worker_peer(prefill, false, &m->sender);
    m->prompt_tokens = r->prompt_tokens;
    m->max_tokens = r->max_tokens;
    m->hashes = r->hashes;
    m->hashes_count = r->hashes_count;
    m->ttl_ms = (uint32_t)(t->o.config->lost_after_ns / PD_NS_PER_MS);
    return send_to(t, r->decode, &message);
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

/* r is in the queue; true: it is there no more. */
static bool try_place(router_requests *t, router_request *r, uint64_t now_ns)
{
    router_choice choice;
    router_policy_input input = {.cluster = t->o.cluster,
                                 .index = t->o.index,
                                 .cost = &t->cost,
                                 .hashes = r->hashes,
                                 .hashes_count = r->hashes_count,
                                 .prompt_tokens = r->prompt_tokens,
                                 .max_tokens = r->max_tokens,
                                 .need_decode = r->max_tokens > 1,
                                 .avoid_prefill = r->avoid_prefill,
                                 .avoid_decode = r->avoid_decode,
                                 .too_small = r->too_small,
                                 .now_ns = now_ns};
    if (!router_policy_choose(&t->policy, &input, &choice))
        return false;
    r->prefill = choice.prefill;
    r->decode = choice.decode;
    r->terms = choice.terms;
    log_choice(t, r, choice.candidates);
    if (r->decode == ROUTER_NO_WORKER) {
        router_request_dequeue(t, r);
        r->queued_ns += now_ns - r->placed_ns;
        r->state = ROUTER_REQUEST_PREFILLING;
        send_prefill(t, r, 0, now_ns);
        return true;
    }
    if (!send_lease(t, r)) {
        router_request_block_worker(t, r->decode, ROUTER_BLOCKED_MS_MAX, now_ns);
        r->prefill = r->decode = ROUTER_NO_WORKER;
        return false;
    }
    router_request_dequeue(t, r);
    r->queued_ns += now_ns - r->placed_ns;
    r->decode_open = true;
    r->state = ROUTER_REQUEST_LEASING;
    router_request_charge_prefill(t, r); /* at once: the next request of a burst must see it */
    router_request_charge_decode(t, r);
    router_request_set_due(t, r, now_ns + t->o.config->lease_ns);
    return true;
}

void router_requests_pump(router_requests *t, uint64_t now_ns)
{
    uint32_t slot = t->queue_head;
    for (uint32_t tries = 0; slot != ROUTER_SLOT_NONE && tries < PUMP_TRIES; tries++) {
        uint32_t next = t->slots[slot].queue_next;
        try_place(t, &t->slots[slot], now_ns);
        if (next != ROUTER_SLOT_NONE && t->slots[next].state != ROUTER_REQUEST_QUEUED)
            break; /* a failure in between changed the queue; the next event goes on */
        slot = next;
    }
}

static void refuse(router_error *error, int http, const char *code, uint32_t retry_after_s,
                   const char *text)
{
    *error = (router_error){.http_status = http,
                            .type = http == 400   ? "invalid_request_error"
                                    : http == 429 ? "rate_limit_error"
                                                  : "server_error",
                            .code = code,
                            .retry_after_s = retry_after_s};
    snprintf(error->message, sizeof error->message, "%s", text);
}

static pd_status copy_in(router_request *r, const router_request_in *in)
{
    r->tokens = pd_malloc(((size_t)in->tokens_count + 1) * sizeof *r->tokens);
    r->hashes = pd_malloc(((size_t)in->hashes_count + 1) * sizeof *r->hashes);
    if (r->tokens == NULL || r->hashes == NULL) {
        pd_free(r->tokens);
        pd_free(r->hashes);
        r->tokens = NULL;
        r->hashes = NULL;
        return PD_E_NOMEM;
    }
    memcpy(r->tokens, in->tokens, in->tokens_count * sizeof *r->tokens);
    if (in->hashes_count > 0)
        memcpy(r->hashes, in->hashes, in->hashes_count * sizeof *r->hashes);
    memcpy(r->id, in->id, sizeof r->id);
    r->id[sizeof r->id - 1] = '\0';
    r->prompt_tokens = in->tokens_count;
    r->hashes_count = in->hashes_count;
    r->sampling = in->sampling;
    r->max_tokens = in->max_tokens;
    r->end_tokens_count = in->end_tokens_count;
    if (in->end_tokens_count > 0)
        memcpy(r->end_tokens, in->end_tokens, in->end_tokens_count * sizeof *r->end_tokens);
    return PD_OK;
}

pd_status router_requests_add(router_requests *t, const router_request_in *in, uint64_t now_ns,
                              router_handle *handle_out, router_error *error_out)
{
    const router_core_config *config = t->o.config;
    pd_assert(in->tokens_count > 0 && in->max_tokens > 0);
    pd_assert(in->end_tokens_count <= ROUTER_END_TOKENS_MAX);
    pd_assert(in->hashes_count <= in->tokens_count / config->block_tokens);
    if ((uint64_t)in->tokens_count + in->max_tokens > config->context_max) {
        refuse(error_out, 400, "context_length_exceeded", 0, "");
        snprintf(error_out->message, sizeof error_out->message,
                 "prompt (%u tokens) and answer (%u) together exceed the context of %u tokens",
                 in->tokens_count, in->max_tokens, config->context_max);
        return PD_E_TOO_LARGE;
    }
    if (t->queue_count >= config->queue_max) {
        t->o.counters->refused_overload++;
        refuse(error_out, 429, "queue_full", 1, "the router's queue is full, try again later");
        return PD_E_OVERLOAD;
    }
    router_request *r = router_request_take(t);
    if (r == NULL) {
        t->o.counters->refused_overload++;
        refuse(error_out, 429, "too_many_requests", 1,
               "as many requests as the router takes are in flight, try again later");
        return PD_E_OVERLOAD;
    }
    if (copy_in(r, in) != PD_OK) {
        r->queue_next = t->free_head;
        t->free_head = router_request_slot(t, r);
        refuse(error_out, 503, "out_of_memory", 1, "the router is out of memory");
        return PD_E_NOMEM;
    }
    r->arrived_ns = r->placed_ns = now_ns;
    r->queue_due_ns = now_ns + config->queue_ns;
    r->total_due_ns = now_ns + config->total_ns;
    r->state = ROUTER_REQUEST_QUEUED;
    router_request_enqueue(t, r);
    router_request_set_due(t, r, r->queue_due_ns);
    t->o.counters->accepted++;
    t->o.counters->active++;
    *handle_out = r->key.number;
    router_requests_pump(t, now_ns);
    return PD_OK;
}

void router_requests_cancel(router_requests *t, router_handle handle, uint64_t now_ns)
{
    router_request *r = router_request_find(t, handle);
    if (r == NULL)
        return;
    (void)now_ns;
    pd_log_req_debug(r->id, "msg=\"cancelled\" tokens=%u", r->next_index);
    t->o.counters->cancelled++;
    router_request_release(t, r);
    t->wake_ns = 0; /* room may have come back: the next tick tries the queue */
}

/* ---- messages ---- */

static bool lease_is_sound(const router_requests *t, const router_request *r,
                           const pd_msg_lease_reply *reply)
{
    uint32_t block_tokens = t->o.config->block_tokens;
    uint32_t blocks = (r->prompt_tokens + block_tokens - 1) / block_tokens;
    return reply->held_blocks <= r->hashes_count &&
           (uint64_t)reply->held_blocks + reply->blocks_count == blocks;
}

static bool fits_nowhere(const router_requests *t, const router_request *r)
{
    bool any = false;
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (!worker->used || worker->hello.role != PD_ROLE_DECODE)
            continue;
        any = true;
        if ((r->too_small[i / 64] >> (i % 64) & 1) == 0)
            return false;
    }
    return any;
}

static void lease_refused(router_requests *t, router_request *r, uint32_t slot,
                          const pd_msg_lease_reply *reply, uint64_t now_ns)
{
    t->o.counters->leases_refused++;
    r->decode_open = false; /* it holds nothing of ours */
    if (reply->status == PD_E_TOO_LARGE) {
        r->too_small[slot / 64] |= 1ull << (slot % 64);
        if (fits_nowhere(t, r)) {
            fail(t, r, 400, "context_length_exceeded", 0,
                 "prompt (%u tokens) and answer (%u) need more KV blocks than a worker has: %s",
                 r->prompt_tokens, r->max_tokens, reply->reason);
            return;
        }
        requeue(t, r, now_ns);
    } else if (reply->status == PD_E_OVERLOAD) {
        requeue(t, r, now_ns);
        router_request_block_worker(t, slot, reply->retry_after_ms, now_ns);
    } else if (reply->status == PD_E_PEER) {
        /* It knows of the prefill worker's death, and we do not yet. */
        uint32_t prefill = r->prefill;
        pd_log_req_warn(r->id, "msg=\"decode worker %s refused a lease for prefill worker %s: %s\"",
                        router_request_worker(t, slot)->hello.name,
                        router_request_worker(t, prefill)->hello.name, reply->reason);
        t->o.counters->retried++;
        r->peer_refusals++;
        if (another_ready(t, PD_ROLE_PREFILL, prefill))
            r->avoid_prefill = prefill;
        requeue(t, r, now_ns);
        router_request_block_worker(t, prefill, ROUTER_BLOCKED_MS_MAX, now_ns);
    } else {
        char why[ROUTER_MESSAGE_BYTES];
        snprintf(why, sizeof why, "decode worker %s refused the lease: %s",
                 router_request_worker(t, slot)->hello.name, reply->reason);
        retry_or_fail(t, r, PD_ROLE_DECODE, slot, "worker_failed", why, now_ns);
    }
}

/* The lease is bound: the prefill worker hears where its blocks go. */
static void send_targets(router_requests *t, router_request *r, const pd_msg_lease_reply *lease,
                         uint64_t now_ns)
{
    char why[ROUTER_MESSAGE_BYTES];
    if (!lease_is_sound(t, r, lease)) {
        snprintf(why, sizeof why, "decode worker %s bound %u + %u blocks for %u tokens",
                 router_request_worker(t, r->decode)->hello.name, lease->held_blocks,
                 lease->blocks_count, r->prompt_tokens);
        retry_or_fail(t, r, PD_ROLE_DECODE, r->decode, "worker_failed", why, now_ns);
        return;
    }
    pd_message message = {.kind = PD_MSG_TARGETS,
                          .targets = {.key = r->key,
                                      .held_blocks = lease->held_blocks,
                                      .blocks = lease->blocks,
                                      .blocks_count = lease->blocks_count}};
    if (!send_to(t, r->prefill, &message)) /* it asks again */
        pd_log_req_debug(r->id, "msg=\"targets not taken\" worker=%s",
                         router_request_worker(t, r->prefill)->hello.name);
}

static void on_bound(router_requests *t, router_request *r, const pd_msg_lease_reply *reply,
                     uint64_t now_ns)
{
    bool waits = (r->state == ROUTER_REQUEST_PREFILLING || r->state == ROUTER_REQUEST_LANDING) &&
                 r->prefill_open;
    if (!waits)
        return;
    if (reply->status == PD_OK) {
        send_targets(t, r, reply, now_ns);
    } else if (reply->status != PD_E_OVERLOAD) { /* which is asked again with the next start */
        char why[ROUTER_MESSAGE_BYTES];
        snprintf(why, sizeof why, "decode worker %s could not bind the lease: %s%s%s",
                 router_request_worker(t, r->decode)->hello.name, pd_status_name(reply->status),
                 reply->reason[0] == '\0' ? "" : ": ", reply->reason);
        r->decode_open = false;
        retry_or_fail(t, r, PD_ROLE_DECODE, r->decode, "worker_failed", why, now_ns);
    }
}

void router_requests_on_lease_reply(router_requests *t, uint32_t slot,
                                    const pd_msg_lease_reply *reply, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &reply->key);
    if (r == NULL || r->decode != slot || !r->decode_open)
        return; /* too late: it was cancelled there already */
    if (reply->bound)
        on_bound(t, r, reply, now_ns);
    else if (r->state != ROUTER_REQUEST_LEASING)
        return;
    else if (reply->status != PD_OK)
        lease_refused(t, r, slot, reply, now_ns);
    else
        send_prefill(t, r, reply->held_blocks <= r->hashes_count ? reply->held_blocks : 0, now_ns);
    router_requests_pump(t, now_ns);
}

void router_requests_on_prefill_started(router_requests *t, uint32_t slot,
                                        const pd_msg_prefill_started *started)
{
    router_request *r = router_request_find_key(t, &started->key);
    if (r == NULL || r->prefill != slot || !r->prefill_open)
        return;
    if (r->state == ROUTER_REQUEST_PREFILLING || r->state == ROUTER_REQUEST_LANDING)
        send_bind(t, r);
}

static bool start_decode(router_requests *t, router_request *r, uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_DECODE_START};
    pd_msg_decode_start *m = &message.decode_start;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    m->tokens = r->tokens;
    m->tokens_count = r->prompt_tokens + 1;
    m->prompt_tokens = r->prompt_tokens;
    m->sampling = r->sampling;
    m->end_tokens = r->end_tokens;
    m->end_tokens_count = r->end_tokens_count;
    m->max_tokens = r->max_tokens;
    m->landing_ms = (uint32_t)(t->o.config->transfer_ns / PD_NS_PER_MS);
    if (!r->started) /* the token came before the word that its prompt runs */
        send_bind(t, r);
    if (!send_to(t, r->decode, &message))
        return false;
    r->state = ROUTER_REQUEST_LANDING;
    router_request_set_due(t, r, now_ns + t->o.config->transfer_ns);
    return true;
}

/* The last token is there. What nobody needs any more is cancelled: after an end at the first
 * token that is the lease and what is still being shipped. */
static void close_request(router_requests *t, router_request *r, pd_finish reason, uint64_t now_ns)
{
    r->reason = reason;
    router_request_discharge_prefill(t, r);
    router_request_discharge_decode(t, r);
    if (r->next_index == 1 && r->decode_open)
        router_request_cancel_at_workers(t, r);
    r->decode_open = false;
    r->state = ROUTER_REQUEST_CLOSING;
    if (!r->prefill_open) {
        finish(t, r, now_ns);
        return;
    }
    router_request_set_due(t, r, now_ns + CLOSING_MS * PD_NS_PER_MS);
}

/* False: the request is gone or closing. */
static bool deliver(router_requests *t, router_request *r, uint32_t token, pd_finish end,
                    uint64_t now_ns)
{
    router_handle handle = r->key.number;
    uint32_t index = r->next_index++;
    if (end == PD_FINISH_NONE && r->next_index == r->max_tokens)
        end = PD_FINISH_LENGTH;
    t->o.counters->tokens++;
    if (index == 0) {
        r->tokens[r->prompt_tokens] = token;
        r->first_ns = now_ns;
        router_request_discharge_prefill(t, r);
        pd_log_req_debug(r->id, "msg=\"first token\" ms=%.2f predicted_ms=%.2f",
                         (double)(now_ns - r->arrived_ns) / 1e6,
                         r->terms.prefill_queue_ms + r->terms.prefill_ms);
        if (end == PD_FINISH_NONE && !start_decode(t, r, now_ns)) {
            fail(t, r, 503, "worker_unavailable", 1, "decode worker %s does not take messages",
                 router_request_worker(t, r->decode)->hello.name);
            return false;
        }
    } else {
        if (index == 1) { /* it could not be computed before all had landed */
            release_copies(t, r);
            r->state = ROUTER_REQUEST_DECODING;
        }
        router_request_set_due(t, r, now_ns + t->o.config->decode_idle_ns);
    }
    t->o.sink->token(t->o.sink->ctx, handle, index, token, end);
    r = router_request_find(t, handle); /* the sink may have cancelled it */
    if (r == NULL)
        return false;
    if (end == PD_FINISH_NONE)
        return true;
    close_request(t, r, end, now_ns);
    return false;
}

static void take_early(router_requests *t, router_request *r, uint64_t now_ns)
{
    router_handle handle = r->key.number;
    for (uint32_t i = 0; i < r->early_count;) {
        if (r->early[i].index != r->next_index) {
            i++;
            continue;
        }
        router_early_token next = r->early[i];
        r->early[i] = r->early[--r->early_count];
        if (!deliver(t, r, next.token, next.finish, now_ns))
            return;
        pd_assert(router_request_find(t, handle) == r);
        i = 0;
    }
}

static bool keep_early(router_request *r, const pd_step_token *token)
{
    for (uint32_t i = 0; i < r->early_count; i++) {
        if (r->early[i].index == token->index)
            return true; /* a duplicate */
    }
    if (r->early_count == ROUTER_EARLY_MAX)
        return false;
    r->early[r->early_count++] = (router_early_token){token->index, token->token, token->finish};
    return true;
}

static void on_token(router_requests *t, uint32_t slot, const pd_step_token *token, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &token->key);
    uint32_t sender = r == NULL ? ROUTER_NO_WORKER : token->index == 0 ? r->prefill : r->decode;
    bool open = r != NULL && (token->index == 0 ? r->state == ROUTER_REQUEST_PREFILLING
                                                : r->state == ROUTER_REQUEST_LANDING ||
                                                      r->state == ROUTER_REQUEST_DECODING);
    if (r == NULL || !open || sender != slot || token->index < r->next_index) {
        t->o.counters->tokens_dropped++;
        return;
    }
    if (token->index >= r->max_tokens ||
        (t->o.config->vocab != 0 && token->token >= t->o.config->vocab)) {
        fail(t, r, 503, "worker_failed", 1, "worker %s sent token %u at index %u, which cannot be",
             router_request_worker(t, slot)->hello.name, token->token, token->index);
        return;
    }
    if (token->index > r->next_index) {
        if (!keep_early(r, token))
            fail(t, r, 503, "worker_failed", 1, "worker %s left out token %u",
                 router_request_worker(t, slot)->hello.name, r->next_index);
        return;
    }
    if (deliver(t, r, token->token, token->finish, now_ns))
        take_early(t, r, now_ns);
}

void router_requests_on_tokens(router_requests *t, uint32_t slot, const pd_msg_step_tokens *tokens,
                               uint64_t now_ns)
{
    router_worker *worker = router_request_worker(t, slot);
    uint32_t active = t->o.counters->active;
    if (worker->hello.role == PD_ROLE_DECODE) {
        uint32_t batch = worker->report.running > tokens->tokens_count ? worker->report.running
                                                                       : tokens->tokens_count;
        uint64_t context = (uint64_t)worker->report.ledger.running * t->o.config->block_tokens;
        pd_cost_observe_decode(&t->cost, batch, context, tokens->step_ms);
    } else if (worker->report_ns != 0 && tokens->queue_ms >= 0) {
        worker->report.queue_ms = tokens->queue_ms;
        worker->report_ns = now_ns == 0 ? 1 : now_ns;
        worker->sent_ms = 0;
    }
    for (uint32_t i = 0; i < tokens->tokens_count; i++)
        on_token(t, slot, &tokens->tokens[i], now_ns);
    if (t->o.counters->active < active && t->queue_count > 0)
        router_requests_pump(t, now_ns);
}

void router_requests_on_prefill_done(router_requests *t, uint32_t slot,
                                     const pd_msg_prefill_done *done, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &done->key);
    if (r == NULL || r->prefill != slot || !r->prefill_open)
        return;
    if (done->again != r->again)
        return; /* said before it heard that it is to ship once more */
    r->prefill_open = false;
    r->prefill_holds = r->prefill_holds && done->status == PD_OK;
    r->writer_lost = done->may_land; /* a cut socket's bytes come later than this word */
    t->o.counters->shipped_bytes += done->ship_bytes;
    if (done->cached_tokens < r->prompt_tokens)
        r->cached_tokens = done->cached_tokens;
    if (done->status == PD_OK) {
        if (done->computed_tokens > 0)
            pd_cost_observe_prefill(&t->cost, done->computed_tokens, done->cached_tokens,
                                    done->compute_ms);
        if (done->ship_bytes > 0)
            pd_cost_observe_ship(&t->cost, done->ship_bytes, done->ship_ms);
    }
    if (r->state == ROUTER_REQUEST_CLOSING) {
        finish(t, r, now_ns);
        router_requests_pump(t, now_ns);
        return;
    }
    if (done->status == PD_OK)
        return; /* the first token comes on its own socket, earlier or later */
    char why[ROUTER_MESSAGE_BYTES];
    snprintf(why, sizeof why, "prefill worker %s failed: %s%s%s",
             router_request_worker(t, slot)->hello.name, pd_status_name(done->status),
             done->reason[0] == '\0' ? "" : ": ", done->reason);
    if (done->status == PD_E_OVERLOAD && r->next_index == 0) {
        requeue(t, r, now_ns);
        router_request_block_worker(t, slot, 0, now_ns);
    } else if (done->status == PD_E_TOO_LARGE && r->next_index == 0) {
        fail(t, r, 400, "context_length_exceeded", 0,
             "the prompt (%u tokens) is more than a prefill worker takes: %s", r->prompt_tokens,
             done->reason);
    } else {
        retry_or_fail(t, r, PD_ROLE_PREFILL, slot, "worker_failed", why, now_ns);
    }
    router_requests_pump(t, now_ns);
}

void router_requests_on_decode_failed(router_requests *t, uint32_t slot,
                                      const pd_msg_decode_failed *failed, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &failed->key);
    if (r == NULL || r->decode != slot || !r->decode_open || r->state == ROUTER_REQUEST_CLOSING)
        return;
    char why[ROUTER_MESSAGE_BYTES];
    snprintf(why, sizeof why, "decode worker %s failed: %s%s%s",
             router_request_worker(t, slot)->hello.name, pd_status_name(failed->status),
             failed->reason[0] == '\0' ? "" : ": ", failed->reason);
    r->decode_open = false;
    t->o.counters->seal_failures += r->again > 0;
    retry_or_fail(t, r, PD_ROLE_DECODE, slot, "worker_failed", why, now_ns);
    router_requests_pump(t, now_ns);
}

void router_requests_on_landed(router_requests *t, uint32_t slot, const pd_msg_landed *landed,
                               uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &landed->key);
    if (r == NULL || r->decode != slot || !r->decode_open)
        return;
    release_copies(t, r);
    if (r->state != ROUTER_REQUEST_LANDING)
        return; /* the first token is still on its way here */
    r->state = ROUTER_REQUEST_DECODING;
    router_request_set_due(t, r, now_ns + t->o.config->decode_idle_ns);
}

void router_requests_on_refetch(router_requests *t, uint32_t slot, const pd_msg_refetch *refetch,
                                uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &refetch->key);
    if (r == NULL || r->decode != slot || !r->decode_open || r->landed ||
        (r->state != ROUTER_REQUEST_PREFILLING && r->state != ROUTER_REQUEST_LANDING))
        return;
    const char *sender = r->prefill == ROUTER_NO_WORKER
                             ? "(lost)"
                             : router_request_worker(t, r->prefill)->hello.name;
    const char *receiver = router_request_worker(t, slot)->hello.name;
    pd_log_req_warn(r->id,
                    "msg=\"blocks did not arrive right: %s\" sender=%s receiver=%s group=%u "
                    "first_block=%u count=%u epoch=%u asked_before=%u",
                    refetch->reason, sender, receiver, refetch->group, refetch->first_block,
                    refetch->count, r->key.epoch, r->again);
    if (r->again > 0)
        return; /* once is enough: the receiver's word that it failed comes */
    pd_message message = {.kind = PD_MSG_SHIP_AGAIN,
                          .ship_again = {.key = r->key,
                                         .group = refetch->group,
                                         .first_block = refetch->first_block,
                                         .count = refetch->count}};
    t->o.counters->refetches++;
    if (r->prefill == ROUTER_NO_WORKER || !send_to(t, r->prefill, &message)) {
        char why[ROUTER_MESSAGE_BYTES];
        snprintf(why, sizeof why, "prefill worker %s cannot be asked for blocks again", sender);
        retry_or_fail(t, r, PD_ROLE_PREFILL, r->prefill, "worker_lost", why, now_ns);
        return;
    }
    r->again++;
    r->prefill_open = true; /* until its next last word */
    if (r->state == ROUTER_REQUEST_LANDING)
        router_request_set_due(t, r, now_ns + t->o.config->transfer_ns);
}

static void prefill_gone(router_requests *t, router_request *r, uint32_t slot, const char *why,
                         uint64_t now_ns)
{
    router_request_discharge_prefill(t, r);
    r->writer_lost = r->writer_lost || r->prefill_open;
    r->prefill_open = false;
    r->prefill = ROUTER_NO_WORKER;
    if (r->state == ROUTER_REQUEST_LEASING) {
        requeue(t, r, now_ns); /* nothing was lost yet */
    } else if (r->state == ROUTER_REQUEST_PREFILLING) {
        retry_or_fail(t, r, PD_ROLE_PREFILL, slot, "worker_lost", why, now_ns);
    } else if (r->state == ROUTER_REQUEST_CLOSING) {
        finish(t, r, now_ns);
    }
    /* LANDING, DECODING: the decode worker is told too and knows what has landed. If that is
     * not all it says so; it goes on otherwise. */
}

static void decode_gone(router_requests *t, router_request *r, uint32_t slot, const char *why,
                        uint64_t now_ns)
{
    router_request_discharge_decode(t, r);
    r->decode_open = false;
    r->decode = ROUTER_NO_WORKER;
    if (r->state == ROUTER_REQUEST_LEASING || r->state == ROUTER_REQUEST_PREFILLING ||
        r->state == ROUTER_REQUEST_LANDING || r->state == ROUTER_REQUEST_DECODING)
        retry_or_fail(t, r, PD_ROLE_DECODE, slot, "worker_lost", why, now_ns);
}

void router_requests_on_worker_gone(router_requests *t, uint32_t slot, const char *reason,
                                    uint64_t now_ns)
{
    char why[ROUTER_MESSAGE_BYTES];
    const router_worker *worker = router_request_worker(t, slot);
    snprintf(why, sizeof why, "%s worker %s is gone: %s",
             worker->hello.role == PD_ROLE_PREFILL ? "prefill" : "decode", worker->hello.name,
             reason);
    for (uint32_t i = 0; i < t->slots_used; i++) {
        router_request *r = &t->slots[i];
        if (r->state == ROUTER_REQUEST_FREE)
            continue;
        r->too_small[slot / 64] &= ~(1ull << (slot % 64));
        if (r->prefill == slot)
            prefill_gone(t, r, slot, why, now_ns);
        else if (r->decode == slot)
            decode_gone(t, r, slot, why, now_ns);
        /* The slot may soon be another worker's. */
        if (r->avoid_prefill == slot)
            r->avoid_prefill = ROUTER_NO_WORKER;
        if (r->avoid_decode == slot)
            r->avoid_decode = ROUTER_NO_WORKER;
    }
}

/* ---- deadlines ---- */

static void queue_expired(router_requests *t, router_request *r)
{
    uint32_t ready[2] = {0, 0};
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (router_worker_ready(worker))
            ready[worker->hello.role == PD_ROLE_DECODE]++;
    }
    double waited_s = (double)t->o.config->queue_ns / 1e9;
    if (ready[0] == 0 || (ready[1] == 0 && r->max_tokens > 1))
        fail(t, r, 503, "no_worker", 5, "no %s worker became ready within %.1f s",
             ready[0] == 0 ? "prefill" : "decode", waited_s);
    else if (r->peer_refusals > 0)
        fail(t, r, 503, "worker_unavailable", 2,
             "the decode workers refused the prefill worker %u times within %.1f s",
             r->peer_refusals, waited_s);
    else
        fail(t, r, 503, "overloaded", 2, "no worker had room within %.1f s", waited_s);
}

static void expired(router_requests *t, router_request *r, uint64_t now_ns)
{
    const router_core_config *config = t->o.config;
    char why[ROUTER_MESSAGE_BYTES];

    if (r->state == ROUTER_REQUEST_CLOSING) {
        finish(t, r, now_ns);
    } else if (now_ns >= r->total_due_ns) {
        fail(t, r, 504, "deadline_exceeded", 0, "the request took longer than %.1f s",
             (double)config->total_ns / 1e9);
    } else if (r->state == ROUTER_REQUEST_QUEUED) {
        queue_expired(t, r);
    } else if (r->state == ROUTER_REQUEST_LEASING) {
        uint32_t slot = r->decode;
        snprintf(why, sizeof why, "decode worker %s did not answer a lease within %.1f s",
                 router_request_worker(t, slot)->hello.name, (double)config->lease_ns / 1e9);
        retry_or_fail(t, r, PD_ROLE_DECODE, slot, "worker_timeout", why, now_ns);
    } else if (r->state == ROUTER_REQUEST_PREFILLING) {
        uint32_t slot = r->prefill;
        snprintf(why, sizeof why, "prefill worker %s had no first token within %.1f s",
                 router_request_worker(t, slot)->hello.name, (double)config->prefill_ns / 1e9);
        retry_or_fail(t, r, PD_ROLE_PREFILL, slot, "worker_timeout", why, now_ns);
    } else {
        bool landing = r->state == ROUTER_REQUEST_LANDING;
        fail(t, r, 503, "worker_timeout", 1, "decode worker %s sent no %s token within %.1f s",
             router_request_worker(t, r->decode)->hello.name, landing ? "second" : "further",
             (double)(landing ? config->transfer_ns : config->decode_idle_ns) / 1e9);
    }
}

void router_requests_on_tick(router_requests *t, uint64_t now_ns)
{
    bool pump = false;
    if (now_ns >= t->wake_ns) {
        t->wake_ns = UINT64_MAX;
        for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
            const router_worker *worker = &t->o.cluster->workers[i];
            if (worker->used && worker->blocked_ns > now_ns && worker->blocked_ns < t->wake_ns)
                t->wake_ns = worker->blocked_ns;
        }
        pump = true;
    }
    if (now_ns >= t->due_ns) {
        t->due_ns = UINT64_MAX;
        for (uint32_t i = 0; i < t->slots_used; i++) {
            router_request *r = &t->slots[i];
            if (r->state != ROUTER_REQUEST_FREE && now_ns >= r->due_ns)
                expired(t, r, now_ns);
            if (r->state != ROUTER_REQUEST_FREE && r->due_ns < t->due_ns)
                t->due_ns = r->due_ns;
        }
        pump = true;
    }
    if (pump)
        router_requests_pump(t, now_ns);
}

void router_requests_on_stopping(router_requests *t, bool all)
{
    bool prefill = another_ready(t, PD_ROLE_PREFILL, ROUTER_NO_WORKER);
    bool decode = another_ready(t, PD_ROLE_DECODE, ROUTER_NO_WORKER);
    for (uint32_t i = 0; i < t->slots_used; i++) {
        router_request *r = &t->slots[i];
        if (r->state == ROUTER_REQUEST_CLOSING || r->state == ROUTER_REQUEST_FREE)
            continue;
        if (all ||
            (r->state == ROUTER_REQUEST_QUEUED && (!prefill || (!decode && r->max_tokens > 1))))
            fail(t, r, 503, "shutting_down", 5, "this router is shutting down");
    }
}

uint64_t router_requests_next_due(const router_requests *t)
{
    uint64_t wake_ns = t->queue_count > 0 ? t->wake_ns : UINT64_MAX;
    return t->due_ns < wake_ns ? t->due_ns : wake_ns;
}

uint32_t router_requests_cached_tokens(const router_requests *t, router_handle handle)
{
    const router_request *r = router_request_find(t, handle);
    return r != NULL ? r->cached_tokens : 0;
}

uint32_t router_requests_queued(const router_requests *t)
{
    return t->queue_count;
}
