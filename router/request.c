#include "router/request.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/move.h"
#include "router/patience.h"
#include "router/place.h"
#include "router/pull.h"
#include "router/retry.h"

#include <stdio.h>
#include <string.h>

enum {
    REFUSED_MS = 5,  /* the first pause after a refusal */
    CLOSING_MS = 250 /* patience for the prefill worker's last word */
};

static const char *name_of(router_requests *t, uint32_t slot)
{
    return slot == ROUTER_NO_WORKER ? "(lost)" : router_request_worker(t, slot)->hello.name;
}

/* A worker that is still there failed the request. */
static void retry(router_requests *t, router_request *r, router_retry_reason reason, pd_role role,
                  uint32_t slot, const char *code, const char *why, uint64_t now_ns)
{
    const router_failure failure = {
        .reason = reason, .role = role, .slot = slot, .code = code, .why = why};
    router_request_retry(t, r, &failure, now_ns);
}

/* ---- forward ---- */

/* The promise is to be bound: its answer names the blocks. Lost ones are made good by the prefill
 * worker, which says that it has started until it has its targets. */
static void send_bind(router_requests *t, router_request *r)
{
    pd_message message = {.kind = PD_MSG_BIND, .bind = {.key = r->key}};
    r->started = true;
    if (r->decode_open && !router_request_send(t, r->decode, &message))
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
    if (router_request_send(t, r->prefill, &message))
        r->prefill_holds = false;
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
    if (router_request_copy_in(r, in) != PD_OK) {
        router_request_put_back(t, r);
        refuse(error_out, 503, "out_of_memory", 1, "the router is out of memory");
        return PD_E_NOMEM;
    }
    r->arrived_ns = r->placed_ns = now_ns;
    r->queue_due_ns = now_ns + config->queue_ns;
    r->total_due_ns = now_ns + config->total_ns;
    router_request_step(t, r, ROUTER_EVENT_ARRIVED);
    router_request_enqueue(t, r);
    router_request_set_due(t, r, r->queue_due_ns);
    router_retry_accepted(t);
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
    router_request_release(t, r, ROUTER_EVENT_CANCELLED);
    t->wake_ns = 0; /* room may have come back: the next tick tries the queue */
}

/* ---- messages ---- */

static bool lease_is_sound(const router_requests *t, const router_request *r,
                           const pd_msg_lease_reply *reply)
{
    uint32_t block_tokens = t->o.config->block_tokens;
    uint32_t blocks = (router_request_base_tokens(r) + block_tokens - 1) / block_tokens;
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
    char why[ROUTER_MESSAGE_BYTES];
    t->o.counters->leases_refused++;
    r->decode_open = false; /* it holds nothing of ours */
    switch (reply->status) {
    case PD_E_TOO_LARGE:
        r->too_small[slot / 64] |= 1ull << (slot % 64);
        if (fits_nowhere(t, r))
            router_request_fail(
                t, r, 400, "context_length_exceeded", 0,
                "prompt (%u tokens) and answer (%u) need more KV blocks than a worker has: %s",
                r->prompt_tokens, r->max_tokens, reply->reason);
        else
            router_request_requeue(t, r, ROUTER_EVENT_REFUSED, now_ns);
        break;
    case PD_E_OVERLOAD:
        router_request_requeue(t, r, ROUTER_EVENT_REFUSED, now_ns);
        router_request_block_worker(t, slot, reply->retry_after_ms, now_ns);
        break;
    case PD_E_PEER: { /* it knows of the prefill worker's death, and we do not yet */
        uint32_t prefill = r->prefill;
        pd_log_req_warn(r->id, "msg=\"decode worker %s refused a lease for prefill worker %s: %s\"",
                        name_of(t, slot), name_of(t, prefill), reply->reason);
        t->o.counters->retried++;
        t->o.counters->retries[ROUTER_RETRY_PEER]++;
        r->peer_refusals++;
        if (router_request_another_ready(t, PD_ROLE_PREFILL, prefill))
            r->avoid_prefill = prefill;
        router_request_requeue(t, r, ROUTER_EVENT_REFUSED, now_ns);
        router_request_block_worker(t, prefill, ROUTER_BLOCKED_MS_MAX, now_ns);
        break;
    }
    default:
        if (router_request_clients_error(t, r, reply->status, name_of(t, slot), reply->reason))
            break;
        snprintf(why, sizeof why, "decode worker %s refused the lease: %s%s%s", name_of(t, slot),
                 pd_status_name(reply->status), reply->reason[0] == '\0' ? "" : ": ",
                 reply->reason);
        retry(t, r, ROUTER_RETRY_FAILED, PD_ROLE_DECODE, slot, "worker_failed", why, now_ns);
        break;
    }
}

/* The lease is bound: the prefill worker hears where its blocks go. */
static void send_targets(router_requests *t, router_request *r, const pd_msg_lease_reply *lease,
                         uint64_t now_ns)
{
    char why[ROUTER_MESSAGE_BYTES];
    if (!lease_is_sound(t, r, lease)) {
        snprintf(why, sizeof why, "decode worker %s bound %u + %u blocks for %u tokens",
                 name_of(t, r->decode), lease->held_blocks, lease->blocks_count,
                 router_request_base_tokens(r));
        retry(t, r, ROUTER_RETRY_FAILED, PD_ROLE_DECODE, r->decode, "worker_failed", why, now_ns);
        return;
    }
    r->terms.decode_held_blocks = lease->held_blocks; /* what was a guess */
    pd_message message = {.kind = PD_MSG_TARGETS,
                          .targets = {.key = r->key,
                                      .held_blocks = lease->held_blocks,
                                      .blocks = lease->blocks,
                                      .blocks_count = lease->blocks_count}};
    if (!router_request_send(t, r->prefill, &message)) /* it asks again */
        pd_log_req_debug(r->id, "msg=\"targets not taken\" worker=%s", name_of(t, r->prefill));
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
        uint32_t slot = r->decode;
        snprintf(why, sizeof why, "decode worker %s could not bind the lease: %s%s%s",
                 name_of(t, slot), pd_status_name(reply->status),
                 reply->reason[0] == '\0' ? "" : ": ", reply->reason);
        r->decode_open = false;
        retry(t, r, ROUTER_RETRY_FAILED, PD_ROLE_DECODE, slot, "worker_failed", why, now_ns);
    }
}

void router_requests_on_lease_reply(router_requests *t, uint32_t slot,
                                    const pd_msg_lease_reply *reply, uint64_t now_ns)
{
    router_request *moving = router_request_find_moving(t, &reply->key);
    if (moving != NULL) {
        router_move_on_lease(t, moving, slot, reply, now_ns);
        return;
    }
    router_request *r = router_request_find_key(t, &reply->key);
    if (r == NULL || r->decode != slot || !r->decode_open)
        return; /* too late: it was cancelled there already */
    if (reply->bound) {
        on_bound(t, r, reply, now_ns);
    } else if (r->state != ROUTER_REQUEST_LEASING) {
        return;
    } else if (reply->status != PD_OK) {
        lease_refused(t, r, slot, reply, now_ns);
    } else {
        router_request_step(t, r, ROUTER_EVENT_PROMISED);
        router_place_send_prefill(t, r, now_ns);
    }
    router_requests_pump(t, now_ns);
}

void router_requests_on_prefill_started(router_requests *t, uint32_t slot,
                                        const pd_msg_prefill_started *started, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &started->key);
    if (r == NULL || r->prefill != slot || !r->prefill_open)
        return;
    uint64_t due_ns =
        now_ns +
        router_patience_behind_ns(
            t->o.config, router_patience_prefill_ns(t->o.config, router_pull_ms(t->o.config, r),
                                                    r->terms.prefill_ms));
    /* The queue is behind it; never sooner, since behind a pull a queue may be before it again. */
    if (r->state == ROUTER_REQUEST_PREFILLING && !r->started && due_ns > r->due_ns)
        router_request_set_due(t, r, due_ns);
    if (r->state == ROUTER_REQUEST_PREFILLING || r->state == ROUTER_REQUEST_LANDING)
        send_bind(t, r);
    r->refusals = 0;
    router_pull_on_started(t, r, started);
}

/* The first token of this attempt is there: the answer goes on at the decode worker. */
static bool start_decode(router_requests *t, router_request *r, uint64_t now_ns)
{
    const router_core_config *config = t->o.config;
    uint32_t blocks = router_request_base_tokens(r) / config->block_tokens + 1;
    uint32_t held = r->terms.decode_held_blocks < blocks ? r->terms.decode_held_blocks : blocks;
    uint64_t landing_ns = router_patience_landing_ns(
        config, &t->cost, (uint64_t)(blocks - held) * config->block_bytes, r->failures);
    if (!r->started) /* the token came before the word that its prompt runs */
        send_bind(t, r);
    if (!router_request_send_start(t, r, landing_ns, now_ns))
        return false;
    r->landing_ns = landing_ns;
    router_request_step(t, r, ROUTER_EVENT_FIRST_TOKEN);
    router_request_set_due(t, r, now_ns + router_patience_behind_ns(config, landing_ns));
    if (r->landed) { /* its word came first */
        router_request_step(t, r, ROUTER_EVENT_LANDED);
        router_request_set_due(t, r, now_ns + config->decode_idle_ns);
    }
    return true;
}

/* The last token is there. What nobody needs any more is cancelled: after an end at the first
 * token that is the lease and what is still being shipped. */
static void close_request(router_requests *t, router_request *r, pd_finish reason, uint64_t now_ns)
{
    bool lands = r->state == ROUTER_REQUEST_PREFILLING && r->decode_open;
    r->reason = reason;
    router_request_discharge_prefill(t, r);
    router_request_discharge_decode(t, r);
    if (lands)
        router_request_cancel_at_workers(t, r, false);
    r->decode_open = r->prefill_holds = false;
    router_request_step(t, r, ROUTER_EVENT_LAST_TOKEN);
    if (!r->prefill_open) {
        router_request_finish(t, r, now_ns);
        return;
    }
    router_request_set_due(t, r, now_ns + CLOSING_MS * PD_NS_PER_MS);
}

/* The request's side of a token: false when it is gone. */
static bool take_token(router_requests *t, router_request *r, uint32_t token, pd_finish end,
                       uint64_t now_ns)
{
    uint32_t index = r->next_index;
    if (router_request_keep_token(r, token) != PD_OK) {
        router_request_fail(t, r, 503, "out_of_memory", 1, "the router is out of memory");
        return false;
    }
    r->next_index++;
    if (index > r->base_index) /* its prompt has landed: more than every attempt comes to */
        r->failures_in_row = 0;
    if (r->next_index - r->base_index >= ROUTER_ABSOLVED_TOKENS)
        router_request_set_killed(t, r, 0); /* it ran here and nobody died of it */
    t->o.counters->tokens++;
    if (index == 0)
        r->first_ns = now_ns;
    if (index > r->base_index) {
        if (r->state == ROUTER_REQUEST_LANDING) { /* it could not be computed before all landed */
            release_copies(t, r);
            router_request_step(t, r, ROUTER_EVENT_LANDED);
        }
        if (r->state == ROUTER_REQUEST_DECODING)
            router_request_set_due(t, r, now_ns + t->o.config->decode_idle_ns);
        return true;
    }
    router_request_discharge_prefill(t, r);
    pd_log_req_debug(r->id, "msg=\"first token\" index=%u ms=%.2f predicted_ms=%.2f", index,
                     (double)(now_ns - r->arrived_ns) / 1e6,
                     r->terms.prefill_queue_ms + r->terms.prefill_ms);
    return end != PD_FINISH_NONE || start_decode(t, r, now_ns);
}

/* False: the request is gone, closing, or in the queue. */
static bool deliver(router_requests *t, router_request *r, uint32_t token, pd_finish end,
                    uint64_t now_ns)
{
    router_handle handle = r->key.number;
    uint32_t index = r->next_index;
    if (end == PD_FINISH_NONE && index + 1 == r->max_tokens)
        end = PD_FINISH_LENGTH;
    bool goes_on = take_token(t, r, token, end, now_ns);
    r = router_request_find(t, handle);
    if (r == NULL)
        return false;
    t->o.sink->token(t->o.sink->ctx, handle, index, token, end);
    r = router_request_find(t, handle); /* the sink may have cancelled it */
    if (r == NULL)
        return false;
    if (!goes_on) {
        char why[ROUTER_MESSAGE_BYTES];
        uint32_t slot = r->decode;
        snprintf(why, sizeof why, "decode worker %s does not take messages", name_of(t, slot));
        retry(t, r, ROUTER_RETRY_UNREACHABLE, PD_ROLE_DECODE, slot, "worker_unavailable", why,
              now_ns);
        return false;
    }
    if (end != PD_FINISH_NONE) {
        close_request(t, r, end, now_ns);
        return false;
    }
    if (r->state != ROUTER_REQUEST_SUSPENDED)
        return true;
    router_move_decide(t, r, now_ns);
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

static bool takes_tokens_of(const router_request *r, uint32_t index, uint32_t slot)
{
    if (index < r->next_index)
        return false;
    if (index == r->base_index)
        return r->state == ROUTER_REQUEST_PREFILLING && r->prefill == slot;
    bool decodes = r->state == ROUTER_REQUEST_LANDING || r->state == ROUTER_REQUEST_DECODING ||
                   (r->state == ROUTER_REQUEST_SUSPENDED && index < r->suspended.answered);
    return decodes && r->decode == slot;
}

static void on_token(router_requests *t, uint32_t slot, const pd_step_token *token, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &token->key);
    char why[ROUTER_MESSAGE_BYTES];
    if (r == NULL || !takes_tokens_of(r, token->index, slot)) {
        t->o.counters->tokens_dropped++;
        return;
    }
    pd_role role = token->index == r->base_index ? PD_ROLE_PREFILL : PD_ROLE_DECODE;
    if (token->index >= r->max_tokens ||
        (t->o.config->vocab != 0 && token->token >= t->o.config->vocab)) {
        snprintf(why, sizeof why, "worker %s sent token %u at index %u, which cannot be",
                 name_of(t, slot), token->token, token->index);
        retry(t, r, ROUTER_RETRY_FAILED, role, slot, "worker_failed", why, now_ns);
        return;
    }
    if (token->index > r->next_index) {
        if (keep_early(r, token))
            return;
        snprintf(why, sizeof why, "worker %s left out token %u", name_of(t, slot), r->next_index);
        retry(t, r, ROUTER_RETRY_FAILED, role, slot, "worker_failed", why, now_ns);
        return;
    }
    if (deliver(t, r, token->token, token->finish, now_ns))
        take_early(t, r, now_ns);
}

/* A step may bring several tokens of a sequence; they stand together. */
static uint32_t sequences_of(const pd_msg_step_tokens *tokens)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < tokens->tokens_count; i++)
        count += i == 0 || tokens->tokens[i].key.number != tokens->tokens[i - 1].key.number;
    return count;
}

void router_requests_on_tokens(router_requests *t, uint32_t slot, const pd_msg_step_tokens *tokens,
                               uint64_t now_ns)
{
    router_worker *worker = router_request_worker(t, slot);
    uint32_t active = t->o.counters->active;
    if (worker->hello.role == PD_ROLE_DECODE) {
        uint32_t sequences = sequences_of(tokens);
        uint32_t batch = worker->report.running > sequences ? worker->report.running : sequences;
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
    if (r == NULL)
        router_request_left_well(t, slot, &done->key);
    if (r == NULL || r->prefill != slot || !r->prefill_open)
        return;
    if (done->status == PD_OK && done->again != r->again.count)
        return; /* said before it heard that it is to ship once more */
    r->prefill_open = false;
    r->prefill_holds = r->prefill_holds && done->status == PD_OK;
    r->writer_lost = done->may_land; /* a cut socket's bytes come later than this word */
    if (!r->cached_known && r->base_index == 0 && done->cached_tokens < r->prompt_tokens) {
        r->cached_known = done->status == PD_OK;
        r->cached_tokens = done->cached_tokens;
    }
    if (done->status == PD_OK) {
        if (done->computed_tokens > 0)
            pd_cost_observe_prefill(&t->cost, done->computed_tokens, done->cached_tokens,
                                    done->compute_ms);
        if (done->ship_bytes > 0)
            pd_cost_observe_ship(&t->cost, done->ship_bytes, done->ship_ms);
    }
    if (r->state == ROUTER_REQUEST_CLOSING) {
        router_request_finish(t, r, now_ns);
        router_requests_pump(t, now_ns);
        return;
    }
    bool matters = r->state == ROUTER_REQUEST_PREFILLING || r->state == ROUTER_REQUEST_LANDING;
    if (done->status == PD_OK || !matters)
        return; /* the first token comes on its own socket, earlier or later */
    if (done->status == PD_E_PEER && r->decode != ROUTER_NO_WORKER)
        router_cluster_doubt_link(t->o.cluster, slot, r->decode, now_ns); /* it may know better */
    if (done->status == PD_E_OVERLOAD && r->state == ROUTER_REQUEST_PREFILLING) {
        /* Where all are full, who is refused again and again must not keep them all busy. */
        r->not_before_ns = now_ns + router_request_backoff_ns(t, REFUSED_MS, ++r->refusals);
        router_request_requeue(t, r, ROUTER_EVENT_REFUSED, now_ns);
        router_request_block_worker(t, slot, 0, now_ns);
    } else if (!router_request_clients_error(t, r, done->status, name_of(t, slot), done->reason)) {
        char why[ROUTER_MESSAGE_BYTES];
        snprintf(why, sizeof why, "prefill worker %s failed: %s%s%s", name_of(t, slot),
                 pd_status_name(done->status), done->reason[0] == '\0' ? "" : ": ", done->reason);
        retry(t, r, ROUTER_RETRY_FAILED, PD_ROLE_PREFILL, slot, "worker_failed", why, now_ns);
    }
    router_requests_pump(t, now_ns);
}

void router_requests_on_decode_failed(router_requests *t, uint32_t slot,
                                      const pd_msg_decode_failed *failed, uint64_t now_ns)
{
    char why[ROUTER_MESSAGE_BYTES];
    router_request *r = router_request_find_moving(t, &failed->key);
    if (r != NULL) {
        if (r->move.slot == slot)
            router_move_failed(t, r, failed->reason, now_ns);
        return;
    }
    r = router_request_find_key(t, &failed->key);
    if (r == NULL || r->decode != slot || !r->decode_open || r->state == ROUTER_REQUEST_CLOSING)
        return;
    r->decode_open = false;
    if (router_request_clients_error(t, r, failed->status, name_of(t, slot), failed->reason)) {
        router_requests_pump(t, now_ns);
        return;
    }
    bool seal = failed->status == PD_E_MISMATCH && !r->landed;
    bool late = failed->status == PD_E_TIMEOUT && !r->landed;
    snprintf(why, sizeof why, "decode worker %s failed: %s%s%.140s%s%s", name_of(t, slot),
             pd_status_name(failed->status), failed->reason[0] == '\0' ? "" : ": ", failed->reason,
             seal ? ", sent by " : "", seal ? name_of(t, r->prefill) : "");
    if (seal) { /* wrong twice: which end is to blame nobody knows, so another pair */
        t->o.counters->seal_failures++;
        r->avoid_decode = slot;
        retry(t, r, ROUTER_RETRY_SEAL, PD_ROLE_PREFILL, r->prefill, "worker_failed", why, now_ns);
    } else {
        retry(t, r, late ? ROUTER_RETRY_SILENT : ROUTER_RETRY_FAILED, PD_ROLE_DECODE, slot,
              late ? "worker_timeout" : "worker_failed", why, now_ns);
    }
    router_requests_pump(t, now_ns);
}

void router_requests_on_landed(router_requests *t, uint32_t slot, const pd_msg_landed *landed,
                               uint64_t now_ns)
{
    router_request *r = router_request_find_moving(t, &landed->key);
    if (r != NULL) {
        router_move_on_landed(t, r, slot, now_ns);
        return;
    }
    r = router_request_find_key(t, &landed->key);
    if (r == NULL)
        return;
    if (r->prefill == slot && r->prefill_open) {
        router_pull_on_landed(t, r);
        return;
    }
    if (r->decode != slot || !r->decode_open || r->landed)
        return;
    release_copies(t, r);
    if (r->state != ROUTER_REQUEST_LANDING)
        return; /* the first token is still on its way here */
    router_request_step(t, r, ROUTER_EVENT_LANDED);
    router_request_set_due(t, r, now_ns + t->o.config->decode_idle_ns);
}

static void ship_again(router_requests *t, router_request *r, const pd_msg_refetch *refetch,
                       uint64_t now_ns)
{
    pd_log_req_warn(r->id,
                    "msg=\"blocks did not arrive right: %s\" sender=%s receiver=%s group=%u "
                    "first_block=%u count=%u epoch=%u asked_before=%u",
                    refetch->reason, name_of(t, r->prefill), name_of(t, r->decode), refetch->group,
                    refetch->first_block, refetch->count, r->key.epoch, r->again.count);
    if (!router_again_may(&r->again, refetch))
        return;
    pd_message message = {
        .kind = PD_MSG_SHIP_AGAIN,
        .ship_again = {.key = r->key,
                       .group = refetch->group,
                       .first_block = refetch->first_block,
                       .count = refetch->count,
                       .receiver = router_request_worker(t, r->decode)->hello.incarnation}};
    t->o.counters->refetches++;
    if (r->prefill == ROUTER_NO_WORKER || !router_request_send(t, r->prefill, &message)) {
        char why[ROUTER_MESSAGE_BYTES];
        snprintf(why, sizeof why, "prefill worker %s cannot be asked for blocks again",
                 name_of(t, r->prefill));
        retry(t, r, ROUTER_RETRY_UNREACHABLE, PD_ROLE_PREFILL, r->prefill, "worker_lost", why,
              now_ns);
        return;
    }
    router_again_sent(&r->again, refetch);
    r->prefill_open = true; /* until its next last word */
    if (r->state == ROUTER_REQUEST_LANDING)
        router_request_set_due(t, r,
                               now_ns + router_patience_behind_ns(t->o.config, r->landing_ns));
}

void router_requests_on_refetch(router_requests *t, uint32_t slot, const pd_msg_refetch *refetch,
                                uint64_t now_ns)
{
    router_request *r = router_request_find_moving(t, &refetch->key);
    if (r != NULL) {
        router_move_on_refetch(t, r, slot, refetch, now_ns);
        return;
    }
    r = router_request_find_key(t, &refetch->key);
    if (r == NULL)
        return;
    if (r->state == ROUTER_REQUEST_PREFILLING && r->prefill == slot)
        router_pull_on_refetch(t, r, refetch);
    else if (r->decode == slot && r->decode_open && !r->landed &&
             (r->state == ROUTER_REQUEST_PREFILLING || r->state == ROUTER_REQUEST_LANDING))
        ship_again(t, r, refetch, now_ns);
}

void router_requests_on_suspended(router_requests *t, uint32_t slot,
                                  const pd_msg_suspended *suspended, uint64_t now_ns)
{
    router_request *r = router_request_find_key(t, &suspended->key);
    if (r == NULL || r->decode != slot || !r->decode_open)
        return;
    if (r->state == ROUTER_REQUEST_LANDING) { /* it ran: all has landed, whatever was lost */
        release_copies(t, r);
        router_request_step(t, r, ROUTER_EVENT_LANDED);
    }
    if (r->state == ROUTER_REQUEST_DECODING || r->state == ROUTER_REQUEST_SUSPENDED ||
        r->state == ROUTER_REQUEST_MOVING)
        router_move_on_suspended(t, r, suspended, now_ns);
    router_requests_pump(t, now_ns);
}

void router_requests_on_ship_done(router_requests *t, uint32_t slot, const pd_msg_ship_done *done,
                                  uint64_t now_ns)
{
    router_request *moving = router_request_find_moving(t, &done->key);
    if (moving != NULL)
        router_move_on_done(t, moving, slot, done, now_ns);
    else
        router_pull_on_done(t, slot, done);
}

/* ---- workers that go ---- */

typedef struct loss {
    uint32_t slot;
    router_gone how;
    const char *name, *why;
    /* Requests that were there: computed, perhaps computed, and suspects of those that count. */
    uint32_t computed, perhaps, suspects;
} loss;

static void retry_lost(router_requests *t, router_request *r, const loss *lost, uint64_t now_ns)
{
    const router_failure failure = {
        .reason = lost->how == ROUTER_GONE_SESSION ? ROUTER_RETRY_SESSION : ROUTER_RETRY_LOST,
        .slot = ROUTER_NO_WORKER,
        .code = "worker_lost",
        .why = lost->why};
    router_request_retry(t, r, &failure, now_ns);
}

static void prefill_gone(router_requests *t, router_request *r, const loss *lost, uint64_t now_ns)
{
    router_request_discharge_prefill(t, r);
    router_pull_left(t, r); /* it may be heard again, and still wait for what it pulled */
    r->writer_lost = r->writer_lost || r->prefill_open;
    r->prefill_open = r->prefill_holds = false;
    r->prefill = ROUTER_NO_WORKER;
    if (r->state == ROUTER_REQUEST_LEASING)
        router_request_requeue(t, r, ROUTER_EVENT_REFUSED, now_ns); /* nothing was lost yet */
    else if (r->state == ROUTER_REQUEST_PREFILLING)
        retry_lost(t, r, lost, now_ns);
    else if (r->state == ROUTER_REQUEST_CLOSING)
        router_request_finish(t, r, now_ns);
    else if (r->state == ROUTER_REQUEST_LANDING && lost->how == ROUTER_GONE_SESSION)
        retry_lost(t, r, lost, now_ns); /* nobody else hears of it */
    /* LANDING, DECODING: the decode worker is told too and knows what has landed. If that is not
     * all it says so; it goes on otherwise. */
}

static void decode_gone(router_requests *t, router_request *r, const loss *lost, uint64_t now_ns)
{
    router_request_discharge_decode(t, r);
    r->decode_open = false;
    r->decode = ROUTER_NO_WORKER;
    if (r->state != ROUTER_REQUEST_CLOSING)
        retry_lost(t, r, lost, now_ns);
}

/* Whether the request was being computed there when it died: now, or, left for another's fault a
 * short while ago, when it was dead already, perhaps. */
static router_presence presence(const router_requests *t, const router_request *r, uint32_t slot,
                                uint64_t now_ns)
{
    if (r->state == ROUTER_REQUEST_CLOSING || r->state == ROUTER_REQUEST_NONE)
        return ROUTER_ABSENT;
    uint64_t incarnation = t->o.cluster->workers[slot].hello.incarnation;
    router_presence now = router_request_presence(r, slot, now_ns);
    router_presence left = router_request_was_left(t, r, incarnation, now_ns);
    return now > left ? now : left;
}

/* Where one is known to have been computed nobody else is thought of. */
static bool counts(const loss *lost, router_presence presence)
{
    return presence == ROUTER_COMPUTES || (presence == ROUTER_MAY_COMPUTE && lost->computed == 0);
}

static void count_present(const router_requests *t, loss *lost, uint64_t now_ns)
{
    for (uint32_t i = 0; i < t->slots_used; i++) {
        router_presence there = presence(t, &t->slots[i], lost->slot, now_ns);
        lost->computed += there == ROUTER_COMPUTES;
        lost->perhaps += there == ROUTER_MAY_COMPUTE;
    }
    for (uint32_t i = 0; i < t->slots_used; i++)
        lost->suspects += t->slots[i].killed_count > 0 &&
                          counts(lost, presence(t, &t->slots[i], lost->slot, now_ns));
}

/* A worker has died. True: the request has ended for it. */
static bool blame(router_requests *t, router_request *r, const loss *lost, uint64_t now_ns)
{
    router_presence there = presence(t, r, lost->slot, now_ns);
    if (lost->how != ROUTER_GONE_DIED || !counts(lost, there))
        return false;
    bool alone = (lost->computed > 0 ? lost->computed : lost->perhaps) == 1;
    uint64_t incarnation = router_request_worker(t, lost->slot)->hello.incarnation;
    const router_death death = {.worker = lost->name,
                                .incarnation = incarnation,
                                .alone = alone,
                                .explained = router_request_is_explained(t, incarnation, now_ns),
                                .only_suspect =
                                    lost->suspects == 1 && (there == ROUTER_COMPUTES || alone)};
    return router_request_blame(t, r, &death, now_ns);
}

void router_requests_on_worker_gone(router_requests *t, uint32_t slot, router_gone how,
                                    const char *reason, uint64_t now_ns)
{
    char why[ROUTER_MESSAGE_BYTES];
    const router_worker *worker = router_request_worker(t, slot);
    snprintf(why, sizeof why, "%s worker %s is gone: %s", router_role_name(worker->hello.role),
             worker->hello.name, reason);
    if (how != ROUTER_GONE_SESSION)
        t->suspect_until_ns[slot] = t->apart_until_ns[slot] = 0;
    loss lost = {.slot = slot, .how = how, .name = worker->hello.name, .why = why};
    count_present(t, &lost, now_ns);
    for (uint32_t i = 0; i < t->slots_used; i++) {
        router_request *r = &t->slots[i];
        if (r->state == ROUTER_REQUEST_NONE)
            continue;
        if (how != ROUTER_GONE_SESSION) { /* the slot may soon be another worker's */
            r->too_small[slot / 64] &= ~(1ull << (slot % 64));
            r->move.tried[slot / 64] &= ~(1ull << (slot % 64));
            if (r->avoid_prefill == slot)
                r->avoid_prefill = ROUTER_NO_WORKER;
            if (r->avoid_decode == slot)
                r->avoid_decode = ROUTER_NO_WORKER;
        }
        if (blame(t, r, &lost, now_ns))
            continue;
        if (r->pull.slot == slot)
            router_pull_on_gone(t, r, why);
        if (r->prefill == slot)
            prefill_gone(t, r, &lost, now_ns);
        else if (r->decode == slot)
            decode_gone(t, r, &lost, now_ns);
        else if (r->move.slot == slot)
            router_move_failed(t, r, why, now_ns);
    }
}

/* ---- deadlines ---- */

static void queue_expired(router_requests *t, router_request *r, uint64_t now_ns)
{
    uint32_t ready[2] = {0, 0};
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (router_worker_ready(worker))
            ready[worker->hello.role == PD_ROLE_DECODE]++;
    }
    double waited_s = (double)t->o.config->queue_ns / 1e9;
    if (ready[0] == 0 || (ready[1] == 0 && r->max_tokens > 1))
        router_request_fail(t, r, 503, "no_worker", 5, "no %s worker became ready within %.1f s",
                            ready[0] == 0 ? "prefill" : "decode", waited_s);
    else if (router_place_waits_its_turn(t, r, now_ns))
        router_request_fail(t, r, 503, "overloaded", 2,
                            "it was being computed at %s when that died, and no worker was without "
                            "another such request within %.1f s",
                            r->killed[1], waited_s);
    else if (r->peer_refusals > 0)
        router_request_fail(t, r, 503, "worker_unavailable", 2,
                            "the decode workers refused the prefill worker %u times within %.1f s",
                            r->peer_refusals, waited_s);
    else
        router_request_fail(t, r, 503, "overloaded", 2, "no worker had room within %.1f s",
                            waited_s);
}

static void expired(router_requests *t, router_request *r, uint64_t now_ns)
{
    const router_core_config *config = t->o.config;
    char why[ROUTER_MESSAGE_BYTES];
    uint32_t slot;

    if (r->state == ROUTER_REQUEST_CLOSING) {
        router_request_finish(t, r, now_ns);
        return;
    }
    if (now_ns >= r->total_due_ns) {
        router_request_fail(t, r, 504, "deadline_exceeded", 0,
                            "the request took longer than %.1f s", (double)config->total_ns / 1e9);
        return;
    }
    switch (r->state) {
    case ROUTER_REQUEST_QUEUED: queue_expired(t, r, now_ns); break;
    case ROUTER_REQUEST_LEASING:
        slot = r->decode;
        snprintf(why, sizeof why, "decode worker %s did not answer a lease within %.1f s",
                 name_of(t, slot), (double)config->lease_ns / 1e9);
        retry(t, r, ROUTER_RETRY_SILENT, PD_ROLE_DECODE, slot, "worker_timeout", why, now_ns);
        break;
    case ROUTER_REQUEST_PREFILLING:
        slot = r->prefill;
        snprintf(why, sizeof why,
                 "prefill worker %s had no first token in time (predicted %.0f ms)",
                 name_of(t, slot), r->terms.prefill_queue_ms + r->terms.prefill_ms);
        retry(t, r, ROUTER_RETRY_SILENT, PD_ROLE_PREFILL, slot, "worker_timeout", why, now_ns);
        break;
    case ROUTER_REQUEST_SUSPENDED:
    case ROUTER_REQUEST_MOVING: router_move_expired(t, r, now_ns); break;
    default: {
        bool landing = r->state == ROUTER_REQUEST_LANDING;
        slot = r->decode;
        snprintf(why, sizeof why, "decode worker %s sent no %s token in time", name_of(t, slot),
                 landing ? "second" : "further");
        retry(t, r, ROUTER_RETRY_SILENT, PD_ROLE_DECODE, slot, "worker_timeout", why, now_ns);
        break;
    }
    }
}

static void wake(router_requests *t, uint64_t now_ns)
{
    t->wake_ns = UINT64_MAX;
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (worker->used && worker->blocked_ns > now_ns)
            router_request_wake_at(t, worker->blocked_ns);
        if (t->suspect_until_ns[i] > now_ns)
            router_request_wake_at(t, t->suspect_until_ns[i]);
    }
    for (uint32_t i = t->queue_head; i != ROUTER_SLOT_NONE; i = t->slots[i].queue_next) {
        if (t->slots[i].not_before_ns > now_ns)
            router_request_wake_at(t, t->slots[i].not_before_ns);
    }
}

void router_requests_on_tick(router_requests *t, uint64_t now_ns)
{
    bool pump = false;
    if (now_ns >= t->due_ns) {
        t->due_ns = UINT64_MAX;
        for (uint32_t i = 0; i < t->slots_used; i++) {
            router_request *r = &t->slots[i];
            if (r->state != ROUTER_REQUEST_NONE && now_ns >= r->due_ns)
                expired(t, r, now_ns);
            if (r->state != ROUTER_REQUEST_NONE && r->due_ns < t->due_ns)
                t->due_ns = r->due_ns;
        }
        pump = true;
    }
    if (now_ns >= t->wake_ns) { /* what has ended just now may be what another one waits for */
        wake(t, now_ns);
        pump = true;
    }
    if (pump)
        router_requests_pump(t, now_ns);
}

void router_requests_on_stopping(router_requests *t, bool all)
{
    bool prefill = router_request_another_ready(t, PD_ROLE_PREFILL, ROUTER_NO_WORKER);
    bool decode = router_request_another_ready(t, PD_ROLE_DECODE, ROUTER_NO_WORKER);
    for (uint32_t i = 0; i < t->slots_used; i++) {
        router_request *r = &t->slots[i];
        if (r->state == ROUTER_REQUEST_CLOSING || r->state == ROUTER_REQUEST_NONE)
            continue;
        if (all ||
            (r->state == ROUTER_REQUEST_QUEUED && (!prefill || (!decode && r->max_tokens > 1))))
            router_request_fail(t, r, 503, "shutting_down", 5, "this router is shutting down");
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

const uint64_t *router_requests_transitions(const router_requests *t)
{
    return t->transitions;
}
