#include "decode-worker/decode.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "decode-worker/answer.h"
#include "decode-worker/core.h"
#include "decode-worker/landing.h"
#include "decode-worker/moves.h"

#include <stdio.h>
#include <string.h>

enum { WAITS_MAX = 256 }; /* senders that quarantines wait for, in an audit */

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

/* As a sender of blocks that it holds; and what it can say of them. */
static pd_status make_source(pd_role_core *core, uint32_t sequences_max)
{
    pd_status status = pd_links_init(&core->links, core->options.peers_max, &core->sink);

    if (status == PD_OK) /* quarantined ones, and a shipment for each */
        status = pd_audit_init(&core->audit, sequences_max * 3, WAITS_MAX);
    if (status != PD_OK)
        return status;
    pd_last_words_init(&core->words, &core->options, &core->sink, &core->links);
    pd_source_init(&core->source, &(pd_source_options){.role = &core->options,
                                                       .sink = &core->sink,
                                                       .blocks = &core->blocks,
                                                       .links = &core->links,
                                                       .words = &core->words,
                                                       .cost = &core->cost,
                                                       .counters = &core->counters,
                                                       .ships_max = sequences_max});
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
    pd_lander_init(&core->lander, &core->options, &core->sink);
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
        status = decode_spec_init(&core->spec, &core->options, rows);
    if (status == PD_OK) /* each row of a step may bring one */
        status = pd_token_batch_init(&core->tokens, rows);
    if (status == PD_OK)
        status = decode_room_init(&core->room, &core->options, &core->blocks, core->leases,
                                  sequences_max);
    if (status == PD_OK)
        status = make_source(core, sequences_max);
    if (status != PD_OK) {
        decode_destroy(core);
        return status;
    }
    core->admit = (decode_admit){.options = &core->options,
                                 .leases = core->leases,
                                 .lander = &core->lander,
                                 .room = &core->room,
                                 .sequences_max = sequences_max};
    *core_out = core;
    return PD_OK;
}

static void decode_destroy(pd_role_core *core)
{
    if (core == NULL)
        return;
    pd_lander_fini(&core->lander);
    while (core->sequences != NULL) {
        decode_sequence *s = core->sequences;
        core->sequences = s->next;
        decode_admit_free(s);
    }
    decode_spec_fini(&core->spec);
    pd_token_batch_fini(&core->tokens);
    pd_source_fini(&core->source);
    pd_audit_fini(&core->audit);
    pd_links_fini(&core->links);
    decode_room_fini(&core->room);
    pd_lease_table_destroy(core->leases);
    pd_blocks_fini(&core->blocks);
    pd_free(core->slices);
    pd_free(core);
}

decode_sequence *decode_find(const pd_role_core *core, const pd_request_key *key)
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

/* A quarantine ends when nobody writes and nobody reads. s may be gone afterwards. */
void decode_settle(pd_role_core *core, decode_sequence *s)
{
    if (!s->given_up || !pd_landing_over(&s->landing))
        return;
    bool acked = pd_lease_sender_acked(core->leases, pd_ship_seal_request(&s->key), s->key.epoch);
    pd_assert(acked);
    forget(core, s);
}

/* Gives all back that can be. What a sender may still write into stays, quarantined, and s with
 * it; else s is gone. */
static void release(pd_role_core *core, decode_sequence *s)
{
    pd_assert(!s->in_step && !s->in_batch && !s->given_up);
    if (s->landed) {
        extend_hashes(core, s);
        uint32_t full = s->kv_tokens / core->options.layout.block_tokens;
        /* Its claims end right here, but for those of a shipment. */
        uint32_t spare = s->standing ? pd_lease_room(core->leases) : UINT32_MAX;
        pd_blocks_remember(&core->blocks, s->hashes, s->lease->blocks,
                           full < s->hashes_count ? full : s->hashes_count, spare);
    }
    if (s->started)
        decode_lengths_observe(&core->room.lengths, s->tokens_count - s->answer_from,
                               s->answer_ended);
    decode_spec_end(&core->spec, s);
    core->live--;
    s->given_up = true;
    pd_land_give_up(&core->lander, &s->landing);
    if (!pd_lease_release(core->leases, s->lease)) {
        forget(core, s);
        return;
    }
    pd_log_req_debug(s->id, "msg=\"blocks quarantined until the sender's last word\" blocks=%u",
                     s->lease->blocks_count);
    decode_settle(core, s);
}

/* No further steps; released now, or when the step under way is over. */
void decode_give_up(pd_role_core *core, decode_sequence *s)
{
    decode_batch_remove(&core->batch, s);
    decode_room_leave(&core->room, s);
    if (s->in_step)
        s->ending = true;
    else
        release(core, s);
}

void decode_say_failed(pd_role_core *core, const pd_request_key *key, const char *id,
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

void decode_fail(pd_role_core *core, decode_sequence *s, pd_status status, const char *reason)
{
    decode_say_failed(core, &s->key, s->id, status, reason);
    decode_give_up(core, s);
}

bool decode_alive(const decode_sequence *s)
{
    return !s->given_up && !s->ending;
}

/* ---- steps ---- */

static double step_ms(const pd_role_core *core)
{
    uint32_t running =
        core->batch.count < core->batch.running_max ? core->batch.count : core->batch.running_max;

    return pd_cost_decode_step_ms(&core->cost, running, decode_batch_context(&core->batch));
}

/* Of a step, for each token that its sequences get: what lies ahead is counted in tokens. */
static double token_ms(const pd_role_core *core)
{
    return step_ms(core) / core->spec.tokens_a_step;
}

/* Nothing runs when nobody of the batch has a block for its next token: the next tick tries again,
 * and so does whatever gives blocks back. */
void decode_run_step(pd_role_core *core, uint64_t now_ns)
{
    if (core->stepping || (core->batch.count == 0 && core->room.standing == 0))
        return;
    decode_room_prepare(&core->room, &core->batch, core->sequences, token_ms(core), now_ns);
    uint32_t count = decode_batch_plan(&core->batch, core->slices);
    if (count == 0)
        return;
    core->stepping = true;
    core->step = (pd_step){
        .number = core->steps_done + 1,
        .slices = core->slices,
        .slices_count = count,
    };
    pd_step *draft;
    if (decode_spec_plan(&core->spec, core->slices, count, &draft))
        core->sink.draft(core->sink.ctx, draft);
    else
        core->sink.run(core->sink.ctx, &core->step);
}

static void decode_on_draft_done(pd_role_core *core, pd_step *step, uint64_t now_ns)
{
    pd_assert(core->stepping);
    (void)now_ns;
    if (core->drafted_ns == 0)
        core->drafted_ns = step->started_ns;
    if (decode_spec_on_draft(&core->spec, step, core->slices, core->step.slices_count, &step))
        core->sink.draft(core->sink.ctx, step);
    else
        core->sink.run(core->sink.ctx, &core->step);
}

void decode_join(pd_role_core *core, decode_sequence *s, uint64_t now_ns)
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
    uint32_t index = 0;
    pd_finish finish = PD_FINISH_NONE;

    s->in_step = false;
    s->solo = false;
    core->counters.tokens_computed += slice->count;
    if (slice->want_token)
        decode_spec_took(&core->spec, s, slice, &core->counters);
    uint32_t tokens = decode_batch_take(s, slice, core->options.context_max, &index, &finish);
    if (s->ending) {
        release(core, s);
        return;
    }
    for (uint32_t i = 0; i < tokens; i++)
        pd_token_batch_add(&core->tokens,
                           &(pd_step_token){.key = s->key,
                                            .index = index + i,
                                            .token = s->tokens[s->tokens_count - tokens + i],
                                            .finish = i + 1 == tokens ? finish : PD_FINISH_NONE});
    if (finish != PD_FINISH_NONE) {
        s->answer_ended = finish == PD_FINISH_STOP;
        core->counters.finished++;
        pd_log_req_debug(s->id, "msg=\"decode ends\" tokens=%u finish=%d", index + tokens, finish);
        decode_give_up(core, s);
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
            decode_fail(core, s, step->status, "the forward step failed");
        else
            s->solo = true;
    }
}

static double queue_ms(const pd_role_core *core)
{
    return decode_batch_queue_ms(&core->batch, &core->cost, core->stepping,
                                 core->spec.tokens_a_step);
}

static void decode_on_step_done(pd_role_core *core, pd_step *step, uint64_t now_ns)
{
    pd_assert(core->stepping && step == &core->step);
    core->stepping = false;
    core->steps_done++;
    core->counters.steps++;
    if (step->status == PD_OK)
        decode_spec_observe(&core->spec, step);
    if (core->drafted_ns != 0) /* guessing is part of the step for everybody else */
        step->started_ns = core->drafted_ns;
    core->drafted_ns = 0;
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
    decode_run_step(core, now_ns);
    pd_token_batch_send(&core->tokens, &core->options, &core->sink, &over, queue_ms(core));
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
}

/* ---- messages ---- */

/* When it may fit, by the predicted ends of those that are here. */
static uint32_t retry_after_ms(const pd_role_core *core, uint32_t wait_steps)
{
    const double least_ms = 50, most_ms = 10000, unknown_ms = 250;
    double ms = wait_steps == 0 ? unknown_ms : wait_steps * token_ms(core);

    return (uint32_t)(ms < least_ms ? least_ms : ms > most_ms ? most_ms : ms);
}

/* The same question is answered alike however often it comes. */
static void say_lease(pd_role_core *core, const decode_sequence *s)
{
    pd_message message = {.kind = PD_MSG_LEASE_REPLY};
    pd_msg_lease_reply *reply = &message.lease_reply;

    reply->key = s->key;
    reply->bound = s->bound;
    if (s->bound) {
        reply->held_blocks = s->held;
        reply->blocks = s->lease->blocks + s->held;
        reply->blocks_count = s->prompt_blocks - s->held;
    } else if (core->options.prefix_cache) {
        reply->held_blocks = pd_prefix_cache_peek(core->blocks.cache, s->hashes, s->hashes_count);
    }
    core->sink.send(core->sink.ctx, s->key.router, &message);
}

static void say_no_lease(pd_role_core *core, const pd_request_key *key, const char *id,
                         pd_status status, const decode_refusal *refusal)
{
    pd_message message = {.kind = PD_MSG_LEASE_REPLY};
    pd_msg_lease_reply *reply = &message.lease_reply;

    reply->key = *key;
    reply->status = status;
    if (status == PD_E_OVERLOAD)
        reply->retry_after_ms = retry_after_ms(core, refusal->wait_steps);
    snprintf(reply->reason, sizeof reply->reason, "%s", refusal->reason);
    pd_log_req_debug(id, "msg=\"lease refused: %s\" status=%s", refusal->reason,
                     pd_status_name(status));
    core->sink.send(core->sink.ctx, key->router, &message);
}

/* PD_E_OVERLOAD, with *reason_out: the promise stands. */
static pd_status bind(pd_role_core *core, decode_sequence *s, const char **reason_out)
{
    pd_status status = decode_admit_bind(&core->admit, s, reason_out);

    if (status != PD_OK)
        return status;
    core->counters.tokens_cached += (uint64_t)s->held * core->options.layout.block_tokens;
    pd_log_req_debug(s->id, "msg=\"bound\" blocks=%u held_blocks=%u", s->lease->blocks_count,
                     s->held);
    return PD_OK;
}

static void say_bound(pd_role_core *core, decode_sequence *s, uint64_t now_ns)
{
    say_lease(core, s);
    if (pd_landing_landed(&s->landing)) /* all of it was held */
        decode_landing_all_here(core, s, now_ns);
}

static pd_status lease(pd_role_core *core, const pd_msg_lease_request *asked, uint64_t now_ns,
                       decode_sequence **sequence_out, decode_refusal *refusal_out)
{
    if (core->draining) {
        refusal_out->reason = "the worker is draining";
        return PD_E_OVERLOAD;
    }
    if (pd_writers_is_dead(&core->writers, asked->sender.incarnation)) {
        /* the router believes in a peer that is gone */
        pd_log_req_warn(asked->id, "msg=\"lease refused: its sender is gone\" sender=%s",
                        asked->sender.name);
        refusal_out->reason = "the sender is gone";
        return PD_E_PEER;
    }
    if (core->live >= core->admit.sequences_max) {
        refusal_out->reason = "as many sequences as may wait here are waiting";
        return PD_E_OVERLOAD;
    }
    return decode_admit_promise(&core->admit, asked, core->sequences, token_ms(core), now_ns,
                                sequence_out, refusal_out);
}

static void on_lease_request(pd_role_core *core, const pd_msg_lease_request *asked, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &asked->key);
    decode_refusal refusal = {.reason = "it was given up"};

    if (s != NULL && decode_alive(s)) {
        say_lease(core, s);
        return;
    }
    core->counters.requests++;
    pd_status status = PD_E_NOT_FOUND;
    if (s == NULL)
        status = lease(core, asked, now_ns, &s, &refusal);
    if (status != PD_OK) {
        core->counters.refused++;
        say_no_lease(core, &asked->key, asked->id, status, &refusal);
        if (status == PD_E_PEER)
            pd_writers_say_fenced(&core->writers, &core->sink, asked->key.router,
                                  asked->sender.name, asked->sender.incarnation);
        return;
    }
    if (s->ttl_ns == 0)
        s->ttl_ns = core->options.lost_after_ns;
    pd_lease_renew(s->lease, now_ns + s->ttl_ns);
    s->next = core->sequences;
    if (s->next != NULL)
        s->next->prev = s;
    core->sequences = s;
    core->live++;
    pd_log_req_debug(s->id, "msg=\"leased\" blocks=%u", s->lease->promised);
    status = asked->bind ? bind(core, s, &refusal.reason) : PD_OK;
    if (status != PD_OK) {
        core->counters.refused++;
        say_no_lease(core, &s->key, s->id, status, &refusal);
        release(core, s);
    } else if (asked->bind) {
        say_bound(core, s, now_ns);
    } else {
        say_lease(core, s);
    }
}

static void on_bind(pd_role_core *core, const pd_msg_bind *asked, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &asked->key);
    decode_refusal refusal = {.reason = "there is no lease for it"};

    if (s == NULL || !decode_alive(s)) {
        say_no_lease(core, &asked->key, "", PD_E_NOT_FOUND, &refusal);
        return;
    }
    if (s->bound) {
        say_lease(core, s);
        return;
    }
    pd_status status = bind(core, s, &refusal.reason);
    if (status == PD_OK)
        say_bound(core, s, now_ns);
    else
        say_no_lease(core, &s->key, s->id, status, &refusal);
}

static void on_decode_start(pd_role_core *core, const pd_msg_decode_start *asked, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &asked->key);

    if (s == NULL || s->given_up) {
        decode_say_failed(core, &asked->key, asked->id, PD_E_NOT_FOUND, "there is no lease for it");
        return;
    }
    if (s->started || s->ending) {
        pd_log_req_warn(asked->id, "msg=\"a decode was started twice; the second is ignored\"");
        return;
    }
    const char *wrong = decode_answer_check(&core->options, s, asked);
    if (wrong != NULL) {
        decode_fail(core, s, PD_E_INVALID, wrong);
        return;
    }
    if (decode_answer_begin(s, asked, decode_spec_bytes(&core->spec, s->capacity + 1)) != PD_OK) {
        decode_fail(core, s, PD_E_NOMEM, "no memory for the answer");
        return;
    }
    decode_spec_begin(&core->spec, s);
    s->started = true;
    pd_land_await(&s->landing, asked->landing_ms * PD_NS_PER_MS, now_ns);
    if (s->landed) {
        decode_join(core, s, now_ns);
        decode_run_step(core, now_ns);
    }
}

static void on_cancel(pd_role_core *core, const pd_msg_cancel *cancel, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &cancel->key);

    bool ships = pd_source_cancel(&core->source, &cancel->key, now_ns);
    if (s == NULL && !ships) {
        /* it was to be shipped from here, perhaps, and we never heard of it */
        pd_last_words_end(&core->words, &cancel->key);
        pd_last_words_everywhere(&core->words, &cancel->key);
    }
    if (s == NULL)
        return;
    if (decode_alive(s)) {
        core->counters.cancelled++;
        pd_log_req_debug(s->id, "msg=\"cancelled\" started=%d landed=%d", s->started, s->landed);
        decode_give_up(core, s);
        s = decode_find(core, &cancel->key);
    }
    if (s != NULL && cancel->unwritten)
        decode_landing_sender_done(core, s, "");
    decode_run_step(core, now_ns); /* room may have come back */
}

/* A sender's last word, by way of a router: perhaps it never heard of the shipment. */
static void on_unwritten(pd_role_core *core, const pd_msg_cancel *said, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &said->key);

    if (s != NULL && s->given_up && s->lease->prefill == said->source)
        decode_landing_sender_done(core, s, "");
    decode_run_step(core, now_ns);
}

static void on_ship_request(pd_role_core *core, const pd_msg_ship_request *asked, uint64_t now_ns)
{
    pd_request_key key = asked->key;

    key.epoch = asked->source_epoch;
    decode_sequence *s = asked->source_epoch == 0 ? NULL : decode_find(core, &key);
    /* What is pinned, and its whole prefix, can be evicted no more: promised room stays. */
    if (asked->source_epoch == 0 && asked->hashes_count > pd_lease_room(core->leases))
        pd_source_refuse(&core->source, asked, PD_E_OVERLOAD, "no room to hold the blocks");
    else
        decode_moves_request(&core->source, asked, s != NULL && decode_alive(s) ? s : NULL, now_ns);
}

static void on_release(pd_role_core *core, const pd_msg_release *release, uint64_t now_ns)
{
    pd_request_key key = release->key;

    if (!pd_source_release(&core->source, &key, &key.epoch) || key.epoch == 0)
        return;
    decode_sequence *s = decode_find(core, &key);
    if (s == NULL || !s->standing)
        return;
    core->counters.moved++;
    pd_log_req_debug(s->id, "msg=\"has moved\" kv_tokens=%u", s->kv_tokens);
    decode_give_up(core, s);
    decode_run_step(core, now_ns);
}

static void on_audit(pd_role_core *core, uint64_t router, const pd_msg_audit *asked)
{
    pd_audit_begin(&core->audit, router);
    decode_moves_audit(core->sequences, &core->routers, &core->audit);
    pd_source_audit(&core->source, &core->audit);
    pd_audit_send(&core->audit, &core->options, &core->sink, asked->serial,
                  pd_blocks_ledger(&core->blocks));
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
    case PD_MSG_BIND: return &message->bind.key;
    case PD_MSG_DECODE_START: return &message->decode_start.key;
    case PD_MSG_CANCEL: return &message->cancel.key;
    case PD_MSG_SHIP_REQUEST: return &message->ship_request.key;
    case PD_MSG_SHIP_AGAIN: return &message->ship_again.key;
    case PD_MSG_RELEASE: return &message->release.key;
    default: return NULL;
    }
}

static void decode_on_message(pd_role_core *core, uint64_t router, const pd_message *message,
                              uint64_t now_ns)
{
    if (!pd_routers_on_message(&core->routers, router, message, now_ns))
        return;
    const pd_request_key *key = key_of(message);
    if (message->kind == PD_MSG_CANCEL && message->cancel.source != 0) {
        on_unwritten(core, &message->cancel, now_ns);
        return;
    }
    if (message->kind == PD_MSG_SHIP_AGAIN && !pd_routers_live(&core->routers, key->router)) {
        /* for one that is lost */
        pd_source_asked(&core->source, key, message->ship_again.receiver, &core->routers, now_ns);
        return;
    }
    if (key != NULL && (key->router != router || key->number == 0)) {
        pd_log_warn("msg=\"a router spoke of a request that is not its own\" kind=%s",
                    pd_message_name(message->kind));
        return;
    }
    switch (message->kind) {
    case PD_MSG_LEASE_REQUEST: on_lease_request(core, &message->lease_request, now_ns); break;
    case PD_MSG_BIND: on_bind(core, &message->bind, now_ns); break;
    case PD_MSG_DECODE_START: on_decode_start(core, &message->decode_start, now_ns); break;
    case PD_MSG_CANCEL: on_cancel(core, &message->cancel, now_ns); break;
    case PD_MSG_SHIP_REQUEST: on_ship_request(core, &message->ship_request, now_ns); break;
    case PD_MSG_SHIP_AGAIN:
        if (!pd_source_again(&core->source, &message->ship_again, now_ns))
            pd_source_unknown(&core->source, &message->ship_again);
        break;
    case PD_MSG_RELEASE: on_release(core, &message->release, now_ns); break;
    case PD_MSG_AUDIT: on_audit(core, router, &message->audit); break;
    case PD_MSG_PEER_UP:
        pd_writers_welcome(&core->writers, &message->peer_up);
        pd_writers_say_fenced(&core->writers, &core->sink, router, message->peer_up.name,
                              message->peer_up.incarnation);
        break;
    case PD_MSG_PEER_GONE: decode_landing_peer_gone(core, &message->peer_gone, now_ns); break;
    case PD_MSG_WELCOME:
    case PD_MSG_ROUTER_HEARTBEAT: on_heartbeat(core, router, now_ns); break;
    case PD_MSG_SNAPSHOT_REQUEST:
        pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
        pd_blocks_snapshot(&core->blocks, &core->options, &core->sink, router);
        break;
    default: break;
    }
}

/* ---- time ---- */

/* Those that stand: the word to their routers, and the end of one that nobody decides on. */
static void tend_standing(pd_role_core *core, uint64_t now_ns)
{
    decode_sequence *s;

    for (s = core->sequences; core->room.standing > 0 && s != NULL; s = s->next) {
        if (!s->moving || pd_source_moves(&core->source, &s->key))
            continue;
        s->moving = false; /* it was not to be: its router has as long again */
        s->stood_ns = now_ns;
    }
    while ((s = decode_room_next_told(core->sequences, now_ns)) != NULL) {
        core->counters.suspended++;
        pd_log_req_info(s->id, "msg=\"suspended for want of KV blocks\" blocks=%u room=%u",
                        s->lease->blocks_count, pd_lease_room(core->leases));
        decode_moves_say_suspended(&core->sink, s);
    }
    while ((s = decode_room_next_overdue(core->sequences, now_ns)) != NULL)
        decode_fail(core, s, PD_E_OVERLOAD, "no room for its KV blocks, and it was not moved");
}

static void decode_on_tick(pd_role_core *core, uint64_t now_ns)
{
    uint64_t router;

    uint64_t pause_ns = pd_routers_take_time(&core->routers, now_ns);
    for (decode_sequence *s = core->sequences; pause_ns > 0 && s != NULL; s = s->next) {
        if (decode_alive(s)) /* what renews it waits to be read */
            pd_lease_renew(s->lease, s->lease->expiry_ns + pause_ns);
    }
    while ((router = pd_routers_next_lost(&core->routers, now_ns)) != 0) {
        pd_log_warn("msg=\"a router is lost; its sequences are dropped\" router=%016llx",
                    (unsigned long long)router);
        core->counters.routers_lost++;
        pd_source_end_all(&core->source, router, "its router is lost", now_ns);
        for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
            next = s->next;
            if (s->key.router == router && decode_alive(s)) {
                core->counters.cancelled++;
                decode_give_up(core, s);
            }
        }
    }
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (!decode_alive(s))
            continue;
        if (now_ns >= s->lease->expiry_ns) {
            core->counters.cancelled++;
            pd_log_req_warn(s->id, "msg=\"the lease has run out\"");
            decode_give_up(core, s);
        } else {
            decode_landing_tick(core, s, now_ns);
        }
    }
    pd_land_retry(&core->lander);
    tend_standing(core, now_ns);
    pd_source_tell_lost(&core->source, &core->routers, NULL, NULL, now_ns);
    pd_source_tick(&core->source, now_ns);
    decode_run_step(core, now_ns);
    pd_blocks_publish(&core->blocks, &core->options, &core->sink, &core->routers);
    pd_blocks_tick(&core->blocks);
}

static void decode_drain(pd_role_core *core)
{
    core->draining = true;
}

static void decode_cancel_all(pd_role_core *core, uint64_t now_ns)
{
    pd_source_end_all(&core->source, 0, "the worker is leaving", now_ns);
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (decode_alive(s))
            decode_fail(core, s, PD_E_CANCELLED, "the worker is leaving");
    }
}

static void decode_peer_ended(pd_role_core *core, uint64_t incarnation)
{
    pd_last_words_dead(&core->words, incarnation);
}

/* ---- what others may know ---- */

static bool decode_idle(const pd_role_core *core)
{
    return core->live == 0 && !core->stepping && pd_source_idle(&core->source);
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
    pd_role_counters counters = core->counters;

    counters.stalled = core->room.stalled;
    return counters;
}

static pd_spec_method decode_speculation(const pd_role_core *core)
{
    return core->spec.how.method;
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
    .on_checked = decode_landing_on_checked,
    .on_step_done = decode_on_step_done,
    .on_draft_done = decode_on_draft_done,
    .on_transfer = decode_landing_on_transfer,
    .on_tick = decode_on_tick,
    .peer_dead = decode_landing_peer_dead,
    .peer_ended = decode_peer_ended,
    .drain = decode_drain,
    .cancel_all = decode_cancel_all,
    .idle = decode_idle,
    .ledger = decode_ledger,
    .heartbeat = decode_heartbeat,
    .counters = decode_counters,
    .cost = decode_cost,
    .speculation = decode_speculation,
};
