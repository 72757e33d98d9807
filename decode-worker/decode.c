#include "decode-worker/decode.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "common/worker/blocks.h"
#include "common/worker/token_batch.h"
#include "decode-worker/admit.h"
#include "decode-worker/batch.h"
#include "decode-worker/land.h"

#include <stdio.h>
#include <string.h>

enum { DEAD_SENDERS = 64 };

struct pd_role_core {
    pd_role_options options;
    pd_role_sink sink;
    pd_blocks blocks;
    pd_routers routers;
    pd_cost cost;
    pd_lease_table *leases;
    decode_admit admit;
    decode_batch batch;
    decode_sequence *sequences;          /* list of all, quarantined ones included */
    uint32_t live;                       /* of them, not given up */
    uint64_t dead_senders[DEAD_SENDERS]; /* the latest; nothing is leased for them */
    bool ended_senders[DEAD_SENDERS];    /* of these, no process any more; else only given up */
    uint32_t dead_senders_next;
    pd_token_batch tokens;
    pd_step step;
    pd_step_slice *slices; /* [max_batch] */
    bool stepping, draining;
    uint64_t steps_done;
    pd_role_counters counters;
};

/* ---- making and ending ---- */

static void decode_destroy(pd_role_core *core);

static pd_status check_options(const pd_role_options *options)
{
    if (options->max_batch == 0 || options->context_max == 0 || options->vocab == 0 ||
        options->layout.blocks == 0 || options->max_batch > 1u << 20 ||
        options->queue_max > 1u << 20) {
        pd_log_error("msg=\"decode role: a limit is 0 or too large\" max_batch=%u queue_max=%u "
                     "context=%u vocab=%u blocks=%u",
                     options->max_batch, options->queue_max, options->context_max, options->vocab,
                     options->layout.blocks);
        return PD_E_INVALID;
    }
    return PD_OK;
}

static pd_status decode_create(const pd_role_options *options, const pd_role_sink *sink,
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
    pd_cost_init(&core->cost);
    pd_routers_init(&core->routers, options->lost_after_ns);
    uint32_t rows =
        options->chunk_tokens > options->max_batch ? options->chunk_tokens : options->max_batch;
    decode_batch_init(&core->batch, options->max_batch, rows);
    uint32_t sequences_max = options->max_batch + options->queue_max;
    uint32_t block_tokens = options->layout.block_tokens;
    uint32_t blocks_max = (options->context_max + block_tokens - 1) / block_tokens;
    core->slices = pd_calloc(options->max_batch, sizeof *core->slices);
    status = core->slices == NULL ? PD_E_NOMEM : PD_OK;
    if (status == PD_OK)
        status = pd_blocks_init(&core->blocks, options->layout.blocks, options->prefix_cache);
    if (status == PD_OK) /* quarantined ones have places of their own */
        status =
            pd_lease_table_create(core->blocks.cache, sequences_max * 2, blocks_max, &core->leases);
    if (status == PD_OK)
        status = pd_token_batch_init(&core->tokens, options->max_batch);
    if (status != PD_OK) {
        decode_destroy(core);
        return status;
    }
    core->admit = (decode_admit){
        .options = &core->options, .leases = core->leases, .sequences_max = sequences_max};
    *core_out = core;
    return PD_OK;
}

static void decode_destroy(pd_role_core *core)
{
    if (core == NULL)
        return;
    while (core->sequences != NULL) {
        decode_sequence *s = core->sequences;
        core->sequences = s->next;
        decode_admit_free(s);
    }
    pd_token_batch_fini(&core->tokens);
    pd_lease_table_destroy(core->leases);
    pd_blocks_fini(&core->blocks);
    pd_free(core->slices);
    pd_free(core);
}

static decode_sequence *find(const pd_role_core *core, const pd_request_key *key)
{
    pd_lease *lease = pd_lease_find(core->leases, pd_ship_seal_request(key), key->epoch);
    decode_sequence *s = lease == NULL ? NULL : lease->user;

    return s != NULL && s->key.router == key->router && s->key.number == key->number ? s : NULL;
}

static void forget(pd_role_core *core, decode_sequence *s)
{
    if (s->prev != NULL)
        s->prev->next = s->next;
    else
        core->sequences = s->next;
    if (s->next != NULL)
        s->next->prev = s->prev;
    decode_admit_free(s);
}

/* ---- the end of a sequence ---- */

/* The chain goes on over the answer where the whole prompt's is known; a prompt without one full
 * block has no hash to go on from (its salt is the router's), so its answer stays unknown. */
static void extend_hashes(pd_role_core *core, decode_sequence *s)
{
    uint32_t block_tokens = core->options.layout.block_tokens;
    uint32_t full = s->kv_tokens / block_tokens;

    if (!s->started || s->hashes_count == 0 || s->hashes_count < s->prompt_tokens / block_tokens)
        return;
    for (uint32_t i = s->hashes_count; i < full; i++)
        s->hashes[i] = pd_prefix_hash_next(s->hashes[i - 1], s->tokens + (size_t)i * block_tokens,
                                           block_tokens);
    if (full > s->hashes_count)
        s->hashes_count = full;
}

/* Gives all back that can be. What a sender may still write into stays, quarantined, and s with
 * it; else s is gone. */
static void release(pd_role_core *core, decode_sequence *s)
{
    pd_assert(!s->in_step && !s->in_batch);
    if (s->landed && !s->given_up) {
        extend_hashes(core, s);
        uint32_t full = s->kv_tokens / core->options.layout.block_tokens;
        pd_blocks_remember(&core->blocks, s->hashes, s->lease->blocks,
                           full < s->hashes_count ? full : s->hashes_count);
    }
    if (!s->given_up)
        core->live--;
    s->given_up = true;
    if (!pd_lease_release(core->leases, s->lease)) {
        forget(core, s);
        return;
    }
    pd_log_req_debug(s->id, "msg=\"blocks quarantined until the sender's last word\" blocks=%u",
                     s->lease->blocks_count);
}

/* No further steps; released now, or when the step under way is over. */
static void give_up(pd_role_core *core, decode_sequence *s)
{
    decode_batch_remove(&core->batch, s);
    if (s->in_step)
        s->ending = true;
    else
        release(core, s);
}

static void say_failed(pd_role_core *core, const pd_request_key *key, const char *id,
                       pd_status status, const char *reason)
{
    pd_message message = {.kind = PD_MSG_DECODE_FAILED};

    message.decode_failed.key = *key;
    message.decode_failed.status = status;
    snprintf(message.decode_failed.reason, sizeof message.decode_failed.reason, "%s", reason);
    core->counters.failed++;
    pd_log_req_warn(id, "msg=\"decode fails: %s\" status=%s", reason, pd_status_name(status));
    core->sink.send(core->sink.ctx, key->router, &message);
}

static void fail(pd_role_core *core, decode_sequence *s, pd_status status, const char *reason)
{
    say_failed(core, &s->key, s->id, status, reason);
    give_up(core, s);
}

static bool alive(const decode_sequence *s)
{
    return !s->given_up && !s->ending;
}

/* The sender's last word on an unfinished transfer: its blocks are free to go. */
static void sender_done(pd_role_core *core, decode_sequence *s)
{
    if (!s->given_up) {
        if (s->started)
            say_failed(core, &s->key, s->id, PD_E_PEER, "the prefill worker gave up");
        core->counters.cancelled += !s->started;
        release(core, s); /* still landing: quarantined */
    }
    bool acked = pd_lease_sender_acked(core->leases, pd_ship_seal_request(&s->key), s->key.epoch);
    pd_assert(acked);
    forget(core, s);
}

/* ---- steps ---- */

static void run_step(pd_role_core *core)
{
    if (core->stepping || core->batch.count == 0)
        return;
    core->stepping = true;
    core->step = (pd_step){
        .number = core->steps_done + 1,
        .slices = core->slices,
        .slices_count = decode_batch_plan(&core->batch, core->slices),
    };
    core->sink.run(core->sink.ctx, &core->step);
}

static void join(pd_role_core *core, decode_sequence *s, uint64_t now_ns)
{
    pd_lease_run(core->leases, s->lease);
    s->ready_ns = now_ns;
    decode_batch_add(&core->batch, s);
    pd_log_req_debug(s->id, "msg=\"joins the batch\" kv_tokens=%u batch=%u", s->kv_tokens,
                     core->batch.count);
}

static void take_slice(pd_role_core *core, const pd_step_slice *slice)
{
    decode_sequence *s = slice->request;
    uint32_t index;
    pd_finish finish;

    s->in_step = false;
    s->solo = false;
    core->counters.tokens_computed += slice->count;
    bool answered = decode_batch_take(s, slice, core->options.context_max, &index, &finish);
    if (s->ending) {
        release(core, s);
        return;
    }
    if (!answered)
        return;
    pd_token_batch_add(&core->tokens, &(pd_step_token){.key = s->key,
                                                       .index = index,
                                                       .token = slice->token_out,
                                                       .finish = finish});
    if (finish != PD_FINISH_NONE) {
        core->counters.finished++;
        pd_log_req_debug(s->id, "msg=\"decode ends\" tokens=%u finish=%d", index + 1, finish);
        give_up(core, s);
    }
}

/* Nothing of a failed step is believed. Who is at fault is found by stepping its sequences alone;
 * the one that fails alone is failed. */
static void take_failed_step(pd_role_core *core, const pd_step *step)
{
    for (uint32_t i = 0; i < step->slices_count; i++) {
        decode_sequence *s = step->slices[i].request;
        s->in_step = false;
        if (s->ending)
            release(core, s);
        else if (step->slices_count == 1)
            fail(core, s, step->status, "the forward step failed");
        else
            s->solo = true;
    }
}

static double queue_ms(const pd_role_core *core)
{
    return decode_batch_queue_ms(&core->batch, &core->cost, core->stepping);
}

static void decode_on_step_done(pd_role_core *core, pd_step *step, uint64_t now_ns)
{
    (void)now_ns;
    pd_assert(core->stepping && step == &core->step);
    core->stepping = false;
    core->steps_done++;
    core->counters.steps++;
    if (step->status == PD_OK) {
        uint64_t context = 0;
        for (uint32_t i = 0; i < step->slices_count; i++)
            context += step->slices[i].position + step->slices[i].count;
        pd_cost_observe_decode(&core->cost, step->slices_count, context,
                               (double)(step->finished_ns - step->started_ns) / 1e6);
        for (uint32_t i = 0; i < step->slices_count; i++)
            take_slice(core, &step->slices[i]);
    } else {
        take_failed_step(core, step);
    }
    /* The plan is free again only now: the message tells of the step that is over. */
    pd_step over = *step;
    run_step(core);
    pd_token_batch_send(&core->tokens, &core->options, &core->sink, &over, queue_ms(core));
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
}

/* ---- messages ---- */

static bool sender_is_dead(const pd_role_core *core, uint64_t incarnation)
{
    for (uint32_t i = 0; i < DEAD_SENDERS; i++) {
        if (incarnation != 0 && core->dead_senders[i] == incarnation)
            return true;
    }
    return false;
}

/* When the running sequence that is nearest to its end will be there. */
static uint32_t retry_after_ms(const pd_role_core *core)
{
    const double least_ms = 50, most_ms = 10000;
    uint32_t left_min = UINT32_MAX;

    for (const decode_sequence *s = core->batch.head; s != NULL; s = s->batch_next) {
        uint32_t answered = s->tokens_count - s->answer_from;
        uint32_t left = s->max_tokens > answered ? s->max_tokens - answered : 1;
        left_min = left < left_min ? left : left_min;
    }
    if (left_min == UINT32_MAX)
        return (uint32_t)least_ms * 2;
    double ms = left_min * pd_cost_decode_step_ms(&core->cost, core->batch.count,
                                                  decode_batch_context(&core->batch));
    return (uint32_t)(ms < least_ms ? least_ms : ms > most_ms ? most_ms : ms);
}

static void on_lease_request(pd_role_core *core, const pd_msg_lease_request *asked, uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_LEASE_REPLY};
    pd_msg_lease_reply *reply = &message.lease_reply;
    decode_sequence *s = NULL;
    const char *reason = "";

    if (find(core, &asked->key) != NULL) {
        pd_log_req_warn(asked->id, "msg=\"a lease was asked for twice; the second is ignored\"");
        return;
    }
    core->counters.requests++;
    reply->key = asked->key;
    if (core->draining) {
        reason = "the worker is draining";
        reply->status = PD_E_OVERLOAD;
    } else if (sender_is_dead(core, asked->prefill_incarnation)) {
        reason = "the prefill worker is gone";
        reply->status = PD_E_PEER;
    } else if (core->live >= core->admit.sequences_max) {
        reason = "as many sequences as may wait here are waiting";
        reply->status = PD_E_OVERLOAD;
    } else {
        reply->status = decode_admit_lease(&core->admit, asked, now_ns, &s, reply, &reason);
    }
    if (reply->status == PD_OK) {
        if (s->ttl_ns == 0)
            s->ttl_ns = core->options.lost_after_ns;
        pd_lease_renew(s->lease, now_ns + s->ttl_ns);
        s->next = core->sequences;
        if (s->next != NULL)
            s->next->prev = s;
        core->sequences = s;
        core->live++;
        uint32_t block_tokens = core->options.layout.block_tokens;
        core->counters.tokens_cached += (uint64_t)s->held * block_tokens;
        if (s->landed)
            s->kv_tokens = s->prompt_tokens;
        pd_log_req_debug(s->id, "msg=\"leased\" blocks=%u held_blocks=%u", s->lease->blocks_count,
                         s->held);
    } else {
        core->counters.refused++;
        if (reply->status == PD_E_OVERLOAD)
            reply->retry_after_ms = retry_after_ms(core);
        if (reply->status == PD_E_PEER) /* the router believes in a peer that is gone */
            pd_log_req_warn(asked->id, "msg=\"lease refused: %s\" prefill=%s", reason,
                            asked->prefill);
        else
            pd_log_req_debug(asked->id, "msg=\"lease refused: %s\" status=%s", reason,
                             pd_status_name(reply->status));
    }
    snprintf(reply->reason, sizeof reply->reason, "%s", reason);
    core->sink.send(core->sink.ctx, asked->key.router, &message);
}

static const char *check_start(const pd_role_core *core, const decode_sequence *s,
                               const pd_msg_decode_start *asked)
{
    uint64_t capacity = (uint64_t)asked->prompt_tokens + asked->max_tokens - 1;

    if (capacity > core->options.context_max)
        capacity = core->options.context_max;
    if (asked->max_tokens == 0 || asked->prompt_tokens == 0 ||
        asked->tokens_count <= asked->prompt_tokens)
        return "an answer goes on from its first token";
    if (asked->tokens_count <= s->prompt_tokens)
        return "fewer tokens than have landed";
    if (asked->tokens_count > s->capacity || capacity > s->capacity)
        return "the answer is longer than was leased for";
    if (asked->tokens_count - asked->prompt_tokens >= asked->max_tokens)
        return "the answer is complete already";
    for (uint32_t i = 0; i < asked->tokens_count; i++) {
        if (asked->tokens[i] >= core->options.vocab)
            return "a token id is not in the vocabulary";
    }
    return NULL;
}

static pd_status copy_answer(decode_sequence *s, const pd_msg_decode_start *asked)
{
    /* One more than has room in the KV: the last token is answered, never read back in. */
    s->tokens_max = s->capacity + 1;
    s->answer_memory = pd_malloc((s->tokens_max + asked->end_tokens_count) * sizeof(uint32_t));
    if (s->answer_memory == NULL)
        return PD_E_NOMEM;
    s->tokens = s->answer_memory;
    s->end_tokens = s->tokens + s->tokens_max;
    memcpy(s->tokens, asked->tokens, asked->tokens_count * sizeof *s->tokens);
    if (asked->end_tokens_count > 0)
        memcpy(s->end_tokens, asked->end_tokens, asked->end_tokens_count * sizeof *s->end_tokens);
    s->tokens_count = asked->tokens_count;
    s->end_tokens_count = asked->end_tokens_count;
    s->answer_from = asked->prompt_tokens;
    s->max_tokens = asked->max_tokens;
    s->sampling = asked->sampling;
    return PD_OK;
}

static void on_decode_start(pd_role_core *core, const pd_msg_decode_start *asked, uint64_t now_ns)
{
    decode_sequence *s = find(core, &asked->key);

    if (s == NULL || s->given_up) {
        say_failed(core, &asked->key, asked->id, PD_E_NOT_FOUND, "there is no lease for it");
        return;
    }
    if (s->started || s->ending) {
        pd_log_req_warn(asked->id, "msg=\"a decode was started twice; the second is ignored\"");
        return;
    }
    const char *wrong = check_start(core, s, asked);
    if (wrong != NULL) {
        fail(core, s, PD_E_INVALID, wrong);
        return;
    }
    if (copy_answer(s, asked) != PD_OK) {
        fail(core, s, PD_E_NOMEM, "no memory for the answer");
        return;
    }
    s->started = true;
    s->landing_deadline_ns =
        asked->landing_ms == 0 ? UINT64_MAX : now_ns + asked->landing_ms * PD_NS_PER_MS;
    if (s->landed) {
        join(core, s, now_ns);
        run_step(core);
    }
}

static void on_cancel(pd_role_core *core, const pd_msg_cancel *cancel)
{
    decode_sequence *s = find(core, &cancel->key);

    if (s == NULL)
        return;
    if (alive(s)) {
        core->counters.cancelled++;
        pd_log_req_debug(s->id, "msg=\"cancelled\" started=%d landed=%d", s->started, s->landed);
        give_up(core, s);
        s = find(core, &cancel->key);
    }
    if (s != NULL && s->given_up && cancel->unwritten)
        sender_done(core, s);
}

static void refuse_sender(pd_role_core *core, uint64_t incarnation)
{
    if (sender_is_dead(core, incarnation))
        return;
    core->dead_senders[core->dead_senders_next] = incarnation;
    core->ended_senders[core->dead_senders_next] = false;
    core->dead_senders_next = (core->dead_senders_next + 1) % DEAD_SENDERS;
}

/* No write of that incarnation can land any more. What it wrote in full goes on. */
static void decode_peer_dead(pd_role_core *core, uint64_t incarnation, uint64_t now_ns)
{
    (void)now_ns;
    if (incarnation == 0)
        return;
    refuse_sender(core, incarnation);
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (s->lease->prefill == incarnation && !s->landed)
            sender_done(core, s);
    }
    uint32_t left = pd_lease_sender_dead(core->leases, incarnation);
    pd_assert(left == 0);
}

/* Its process has ended: no router can bring it back. */
static void decode_peer_ended(pd_role_core *core, uint64_t incarnation, uint64_t now_ns)
{
    decode_peer_dead(core, incarnation, now_ns);
    for (uint32_t i = 0; i < DEAD_SENDERS; i++)
        core->ended_senders[i] |= incarnation != 0 && core->dead_senders[i] == incarnation;
}

/* A router gave it up and another one, or the same anew, counts on it: it may write again. What is
 * quarantined stays so until its last word. */
static void on_peer_up(pd_role_core *core, const pd_msg_peer_up *peer)
{
    for (uint32_t i = 0; i < DEAD_SENDERS; i++) {
        if (peer->incarnation == 0 || core->dead_senders[i] != peer->incarnation)
            continue;
        if (core->ended_senders[i]) {
            pd_log_warn("msg=\"a peer is announced whose process has ended\" peer=%s", peer->name);
            continue;
        }
        core->dead_senders[i] = 0;
        pd_log_info("msg=\"a peer that was given up is back\" peer=%s", peer->name);
    }
}

static void on_peer_gone(pd_role_core *core, const pd_msg_peer_gone *peer, uint64_t now_ns)
{
    if (!peer->may_write) {
        decode_peer_dead(core, peer->incarnation, now_ns);
        return;
    }
    /* Given up, and yet a process: it stands still, or is on its way out. Nobody waits for it any
     * more; its blocks stay taken until it is dead. */
    refuse_sender(core, peer->incarnation);
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (s->lease->prefill != peer->incarnation || s->landed || s->given_up)
            continue;
        if (s->started)
            say_failed(core, &s->key, s->id, PD_E_PEER, "the prefill worker was given up");
        core->counters.cancelled += !s->started;
        release(core, s);
    }
}

static void on_heartbeat(pd_role_core *core, uint64_t router, uint64_t now_ns)
{
    for (decode_sequence *s = core->sequences; s != NULL; s = s->next) {
        if (s->key.router == router && !s->given_up)
            pd_lease_renew(s->lease, now_ns + s->ttl_ns);
    }
}

static const pd_request_key *key_of(const pd_message *message)
{
    switch (message->kind) {
    case PD_MSG_LEASE_REQUEST: return &message->lease_request.key;
    case PD_MSG_DECODE_START: return &message->decode_start.key;
    case PD_MSG_CANCEL: return &message->cancel.key;
    default: return NULL;
    }
}

static void decode_on_message(pd_role_core *core, uint64_t router, const pd_message *message,
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
    case PD_MSG_LEASE_REQUEST: on_lease_request(core, &message->lease_request, now_ns); break;
    case PD_MSG_DECODE_START: on_decode_start(core, &message->decode_start, now_ns); break;
    case PD_MSG_CANCEL: on_cancel(core, &message->cancel); break;
    case PD_MSG_PEER_UP: on_peer_up(core, &message->peer_up); break;
    case PD_MSG_PEER_GONE: on_peer_gone(core, &message->peer_gone, now_ns); break;
    case PD_MSG_WELCOME:
    case PD_MSG_ROUTER_HEARTBEAT: on_heartbeat(core, router, now_ns); break;
    case PD_MSG_SNAPSHOT_REQUEST:
        pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
        pd_blocks_snapshot(&core->blocks, &core->options, &core->sink, router);
        break;
    default: break;
    }
}

/* ---- the data plane ---- */

static void on_all_landed(pd_role_core *core, decode_sequence *s, uint64_t now_ns)
{
    if (s->given_up) {
        bool acked =
            pd_lease_sender_acked(core->leases, pd_ship_seal_request(&s->key), s->key.epoch);
        pd_assert(acked);
        forget(core, s);
        return;
    }
    pd_lease_landed(core->leases, s->lease);
    s->kv_tokens = s->prompt_tokens;
    pd_blocks_remember(&core->blocks, s->hashes, s->lease->blocks, s->hashes_count);
    if (s->started) {
        join(core, s, now_ns);
        run_step(core);
    }
}

static void on_blocks(pd_role_core *core, const pd_notice *notice, uint64_t now_ns)
{
    decode_sequence *s = find(core, &notice->key);

    if (s == NULL) {
        core->counters.notices_ignored++;
        return;
    }
    decode_landing landing = decode_land_on_blocks(s, notice, &core->options, &core->sink);
    if (landing == DECODE_LAND_BROKEN) {
        fail(core, s, PD_E_MISMATCH, "a block's seal does not match its bytes");
        /* The blocks are the sender's until its last word, and this notice is a part of it. */
        landing = decode_land_on_blocks(s, notice, &core->options, &core->sink);
    }
    if (landing == DECODE_LAND_IGNORED)
        core->counters.notices_ignored++;
    else if (landing == DECODE_LAND_DONE)
        on_all_landed(core, s, now_ns);
}

static void on_abort(pd_role_core *core, const pd_notice *notice)
{
    bool any = false;

    if (notice->receiver == core->options.incarnation) {
        for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
            next = s->next;
            bool named = s->key.router == notice->key.router &&
                         (notice->key.number == 0 || (s->key.number == notice->key.number &&
                                                      s->key.epoch == notice->key.epoch));
            if (named && !s->landed && s->lease->prefill == notice->sender) {
                sender_done(core, s);
                any = true;
            }
        }
    }
    core->counters.notices_ignored += !any;
}

static void decode_on_transfer(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    uint64_t seals[PD_NOTICE_BLOCKS_MAX];
    pd_notice notice;

    if (event->kind != PD_TRANSFER_NOTICE)
        return;
    if (pd_notice_unpack(event->notice, event->notice_len, seals, &notice) != PD_OK) {
        core->counters.notices_ignored++;
        pd_log_warn("msg=\"bytes that are no notice came on the data plane\" bytes=%zu",
                    event->notice_len);
        return;
    }
    if (notice.kind == PD_NOTICE_ABORT)
        on_abort(core, &notice);
    else
        on_blocks(core, &notice, now_ns);
}

/* ---- time ---- */

static void decode_on_tick(pd_role_core *core, uint64_t now_ns)
{
    uint64_t router;

    uint64_t pause_ns = pd_routers_take_time(&core->routers, now_ns);
    for (decode_sequence *s = core->sequences; pause_ns > 0 && s != NULL; s = s->next) {
        if (alive(s)) /* what renews it waits to be read */
            pd_lease_renew(s->lease, s->lease->expiry_ns + pause_ns);
    }
    while ((router = pd_routers_next_lost(&core->routers, now_ns)) != 0) {
        pd_log_warn("msg=\"a router is lost; its sequences are dropped\" router=%016llx",
                    (unsigned long long)router);
        core->counters.routers_lost++;
        for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
            next = s->next;
            if (s->key.router == router && alive(s)) {
                core->counters.cancelled++;
                give_up(core, s);
            }
        }
    }
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (!alive(s))
            continue;
        if (now_ns >= s->lease->expiry_ns) {
            core->counters.cancelled++;
            pd_log_req_warn(s->id, "msg=\"the lease has run out\"");
            give_up(core, s);
        } else if (s->started && !s->landed && now_ns >= s->landing_deadline_ns) {
            fail(core, s, PD_E_TIMEOUT, "the prompt's blocks did not come in time");
        }
    }
    run_step(core);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
    pd_blocks_tick(&core->blocks);
}

static void decode_drain(pd_role_core *core)
{
    core->draining = true;
}

static void decode_cancel_all(pd_role_core *core, uint64_t now_ns)
{
    (void)now_ns;
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (alive(s))
            fail(core, s, PD_E_CANCELLED, "the worker is leaving");
    }
}

/* ---- what others may know ---- */

static bool decode_idle(const pd_role_core *core)
{
    return core->live == 0 && !core->stepping;
}

static pd_ledger decode_ledger(const pd_role_core *core)
{
    return pd_blocks_ledger(&core->blocks);
}

static void decode_heartbeat(const pd_role_core *core, pd_msg_heartbeat *heartbeat)
{
    uint32_t running =
        core->batch.count < core->batch.running_max ? core->batch.count : core->batch.running_max;

    heartbeat->step = core->steps_done;
    heartbeat->busy = core->stepping;
    heartbeat->queue_ms = (float)queue_ms(core);
    heartbeat->running = running;
    heartbeat->waiting = core->live > running ? core->live - running : 0;
    heartbeat->ledger = pd_blocks_ledger(&core->blocks);
    heartbeat->events_sequence = pd_prefix_cache_seq(core->blocks.cache);
    heartbeat->draining = core->draining;
}

static pd_role_counters decode_counters(const pd_role_core *core)
{
    return core->counters;
}

static const pd_cost *decode_cost(const pd_role_core *core)
{
    return &core->cost;
}

const pd_role_ops decode_role = {
    .role = PD_ROLE_DECODE,
    .create = decode_create,
    .destroy = decode_destroy,
    .on_message = decode_on_message,
    .on_step_done = decode_on_step_done,
    .on_transfer = decode_on_transfer,
    .on_tick = decode_on_tick,
    .peer_dead = decode_peer_ended,
    .drain = decode_drain,
    .cancel_all = decode_cancel_all,
    .idle = decode_idle,
    .ledger = decode_ledger,
    .heartbeat = decode_heartbeat,
    .counters = decode_counters,
    .cost = decode_cost,
};
