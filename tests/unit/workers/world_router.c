#include "tests/unit/workers/world_router.h"

#include "common/kv/prefix_hash.h"
#include "common/worker/address.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static world_request *request_of(world *w, const pd_request_key *key)
{
    assert_true(key->router == WORLD_ROUTER);
    assert_true(key->number >= 1 && key->number <= w->requests_count);
    return &w->requests[key->number - 1];
}

static bool ended(const world_request *r)
{
    return r->phase >= WORLD_FINISHED;
}

static bool current(const world_request *r, const pd_request_key *key)
{
    return !ended(r) && r->key.epoch == key->epoch;
}

static void say_cancel(world *w, world_request *r, world_worker *worker)
{
    pd_message message = {.kind = PD_MSG_CANCEL};

    message.cancel.key = r->key;
    world_to(w, worker, &message);
}

void world_cancel(world *w, world_request *r)
{
    if (ended(r))
        return;
    r->phase = WORLD_CANCELLED;
    say_cancel(w, r, &w->prefill);
    say_cancel(w, r, &w->decode);
}

static void begin_attempt(world_request *r)
{
    uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX];

    memcpy(tokens, r->prompt, r->prompt_count * sizeof *tokens);
    memcpy(tokens + r->prompt_count, r->answer, r->answer_count * sizeof *tokens);
    r->phase = WORLD_LEASING;
    r->key.epoch++;
    r->base = r->answer_count;
    r->hashes_count = pd_prefix_hash_fill(
        (pd_hash128){1, 2}, WORLD_BLOCK_TOKENS, tokens, r->prompt_count + r->answer_count,
        r->hashes, (WORLD_PROMPT_MAX + WORLD_ANSWER_MAX) / WORLD_BLOCK_TOKENS);
    r->lease_asked = r->prefill_asked = r->prefill_ended = false;
    r->started_said = r->landed_said = r->agains = 0;
}

void world_fail_request(world *w, world_request *r, pd_status status)
{
    enum { ATTEMPTS = 50 };

    if (ended(r))
        return;
    say_cancel(w, r, &w->prefill);
    say_cancel(w, r, &w->decode);
    r->phase = WORLD_FAILED;
    r->status = status;
    if (w->resume && r->key.epoch < ATTEMPTS && status != PD_E_TOO_LARGE)
        begin_attempt(r);
}

static void send_prefill_request(world *w, world_request *r)
{
    uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX];
    pd_message message = {.kind = PD_MSG_PREFILL_REQUEST};
    pd_msg_prefill_request *asked = &message.prefill_request;

    memcpy(tokens, r->prompt, r->prompt_count * sizeof *tokens);
    memcpy(tokens + r->prompt_count, r->answer, r->answer_count * sizeof *tokens);
    asked->key = r->key;
    snprintf(asked->id, sizeof asked->id, "%s", r->id);
    asked->tokens = tokens;
    asked->tokens_count = r->prompt_count + r->answer_count;
    asked->prompt_tokens = r->prompt_count;
    asked->hashes = r->hashes;
    asked->hashes_count = r->hashes_count;
    asked->end_tokens = &r->end_token;
    asked->end_tokens_count = r->end_token != 0;
    asked->max_tokens = r->max_tokens;
    asked->ship = r->max_tokens - r->answer_count > 1;
    snprintf(asked->decode, sizeof asked->decode, "decode-0");
    asked->decode_incarnation = w->decode.options.incarnation;
    if (w->pull_from != 0 && r->key.number % 2 == 0) {
        snprintf(asked->pull.name, sizeof asked->pull.name, "source");
        asked->pull.incarnation = w->pull_from;
        asked->pull_blocks = asked->tokens_count / WORLD_BLOCK_TOKENS;
        asked->pull_ms = 200;
    }
    r->phase = WORLD_PREFILLING;
    r->prefill_asked = true;
    world_to(w, &w->prefill, &message);
}

static void send_targets(world *w, const pd_msg_lease_reply *reply)
{
    pd_message message = {.kind = PD_MSG_TARGETS};

    message.targets = (pd_msg_targets){.key = reply->key,
                                       .held_blocks = reply->held_blocks,
                                       .blocks = reply->blocks,
                                       .blocks_count = reply->blocks_count};
    world_to(w, &w->prefill, &message);
}

static void on_lease_reply(world *w, const pd_msg_lease_reply *reply)
{
    world_request *r = request_of(w, &reply->key);

    if (!current(r, &reply->key))
        return; /* cancelled meanwhile: the cancel is behind the lease request */
    if (reply->status != PD_OK) {
        w->overloads += reply->status == PD_E_OVERLOAD;
        assert_true(reply->status != PD_E_OVERLOAD || reply->retry_after_ms > 0);
        world_fail_request(w, r, reply->status);
    } else if (reply->bound) {
        send_targets(w, reply);
    } else if (r->phase == WORLD_LEASING) {
        send_prefill_request(w, r);
    }
}

/* The source of a pull is asked once; when it never is, nobody writes. */
static void ask_source(world *w, world_request *r, const pd_msg_prefill_started *started)
{
    pd_message message = {.kind = PD_MSG_PULL_END};

    if (started->pull_blocks_count == 0 || r->pull_epoch == started->key.epoch)
        return;
    if (current(r, &started->key)) {
        r->pull_epoch = r->key.epoch;
        w->on_pull(w, started);
        return;
    }
    message.pull_end.key = started->key;
    world_to(w, &w->prefill, &message);
}

static void on_prefill_started(world *w, const pd_msg_prefill_started *started)
{
    world_request *r = request_of(w, &started->key);
    pd_message message = {.kind = PD_MSG_BIND};

    ask_source(w, r, started);
    if (!current(r, &started->key))
        return;
    r->started_said++;
    if (r->direct || r->max_tokens - r->base == 1)
        return;
    message.bind.key = r->key;
    world_to(w, &w->decode, &message);
}

static void on_refetch(world *w, const world_worker *from, const pd_msg_refetch *refetch)
{
    world_request *r = request_of(w, &refetch->key);
    pd_message message = {.kind = PD_MSG_SHIP_AGAIN};

    w->refetches++;
    assert_true(refetch->reason[0] != 0);
    if (!current(r, &refetch->key) || from == &w->prefill)
        return; /* a pull's source is the test's */
    r->agains++;
    r->prefill_ended = false;
    message.ship_again = (pd_msg_ship_again){.key = r->key,
                                             .group = refetch->group,
                                             .first_block = refetch->first_block,
                                             .count = refetch->count};
    world_to(w, &w->prefill, &message);
}

static void on_landed(world *w, const world_worker *from, const pd_msg_landed *landed)
{
    world_request *r = request_of(w, &landed->key);
    pd_message message = {.kind = PD_MSG_RELEASE};

    w->pulls_landed += from == &w->prefill;
    if (!current(r, &landed->key) || from == &w->prefill)
        return;
    assert_int_equal(r->landed_said, 0);
    r->landed_said++;
    message.release.key = r->key;
    world_to(w, &w->prefill, &message);
}

static void start_decode(world *w, world_request *r)
{
    uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX];
    pd_message message = {.kind = PD_MSG_DECODE_START};
    pd_msg_decode_start *asked = &message.decode_start;

    memcpy(tokens, r->prompt, r->prompt_count * sizeof *tokens);
    memcpy(tokens + r->prompt_count, r->answer, r->answer_count * sizeof *tokens);
    asked->key = r->key;
    snprintf(asked->id, sizeof asked->id, "%s", r->id);
    asked->tokens = tokens;
    asked->tokens_count = r->prompt_count + r->answer_count;
    asked->prompt_tokens = r->prompt_count;
    asked->end_tokens = &r->end_token;
    asked->end_tokens_count = r->end_token != 0;
    asked->max_tokens = r->max_tokens;
    asked->landing_ms = 20000;
    r->phase = WORLD_DECODING;
    world_to(w, &w->decode, &message);
}

static void on_step_tokens(world *w, world_worker *worker, const pd_msg_step_tokens *message)
{
    assert_true(message->tokens_count > 0);
    assert_true(message->incarnation == worker->options.incarnation);
    for (uint32_t i = 0; i < message->tokens_count; i++) {
        const pd_step_token *token = &message->tokens[i];
        world_request *r = request_of(w, &token->key);
        if (!current(r, &token->key))
            continue;
        assert_int_equal(token->index, r->answer_count);
        assert_int_equal(token->index == r->base, worker == &w->prefill);
        r->answer[r->answer_count++] = token->token;
        world_check_answer(r);
        if (token->finish != PD_FINISH_NONE) {
            r->finish = token->finish;
            r->phase = WORLD_FINISHED;
            if (worker == &w->prefill && r->max_tokens > 1)
                say_cancel(w, r, &w->decode);
        } else if (worker == &w->prefill) {
            start_decode(w, r);
        }
    }
}

static void on_events(world *w, world_worker *worker, const pd_msg_kv_events *message)
{
    uint64_t *last = worker == &w->prefill ? &w->prefill_events : &w->decode_events;

    if (message->snapshot)
        return;
    assert_true(message->first_sequence == *last + 1);
    *last += message->events_count;
}

static void on_prefill_done(world *w, const pd_msg_prefill_done *done)
{
    world_request *r = request_of(w, &done->key);

    w->last_done = *done;
    if (r->key.epoch != done->key.epoch)
        return;
    assert_true(done->again <= r->agains || done->status == PD_E_NOT_FOUND);
    if (done->again < r->agains)
        return; /* another word comes */
    assert_false(r->prefill_ended);
    r->prefill_ended = true;
    r->prefill_status = done->status;
    r->cached_tokens = done->cached_tokens;
    if (done->status != PD_OK)
        world_fail_request(w, r, done->status);
}

static void on_audit_reply(world *w, const pd_msg_audit_reply *reply)
{
    assert_true(reply->entries_count <= 64 && reply->waits_for_count <= 16);
    w->last_audit = *reply;
    memcpy(w->audit_entries, reply->entries, reply->entries_count * sizeof *reply->entries);
    memcpy(w->audit_waits, reply->waits_for, reply->waits_for_count * sizeof *reply->waits_for);
}

void world_sink_send(void *ctx, uint64_t router, const pd_message *message)
{
    world_worker *worker = ctx;
    world *w = worker->world;

    assert_true(router == WORLD_ROUTER || message->kind == PD_MSG_AUDIT_REPLY);
    if (message->kind == PD_MSG_KV_EVENTS) {
        on_events(w, worker, &message->kv_events);
        return;
    }
    if (message->kind == PD_MSG_AUDIT_REPLY) {
        on_audit_reply(w, &message->audit_reply);
        return;
    }
    assert_true(w->letters_count < WORLD_LETTERS_MAX);
    world_letter *letter = &w->letters[w->letters_count++];
    letter->message = *message;
    letter->from = worker;
    if (message->kind == PD_MSG_LEASE_REPLY && message->lease_reply.blocks_count > 0) {
        assert_true(message->lease_reply.blocks_count <= 64);
        memcpy(letter->blocks, message->lease_reply.blocks,
               message->lease_reply.blocks_count * sizeof *letter->blocks);
    } else if (message->kind == PD_MSG_PREFILL_STARTED &&
               message->prefill_started.pull_blocks_count > 0) {
        assert_true(message->prefill_started.pull_blocks_count <= 64);
        memcpy(letter->blocks, message->prefill_started.pull_blocks,
               message->prefill_started.pull_blocks_count * sizeof *letter->blocks);
    } else if (message->kind == PD_MSG_STEP_TOKENS) {
        assert_true(message->step_tokens.tokens_count <= 64);
        memcpy(letter->tokens, message->step_tokens.tokens,
               message->step_tokens.tokens_count * sizeof *letter->tokens);
    }
}

bool world_read_letter(world *w)
{
    if (w->letters_count == 0)
        return false;
    world_letter letter = w->letters[0];
    memmove(w->letters, w->letters + 1, --w->letters_count * sizeof *w->letters);
    switch (letter.message.kind) {
    case PD_MSG_LEASE_REPLY:
        letter.message.lease_reply.blocks = letter.blocks;
        on_lease_reply(w, &letter.message.lease_reply);
        break;
    case PD_MSG_STEP_TOKENS:
        letter.message.step_tokens.tokens = letter.tokens;
        on_step_tokens(w, letter.from, &letter.message.step_tokens);
        break;
    case PD_MSG_PREFILL_DONE: on_prefill_done(w, &letter.message.prefill_done); break;
    case PD_MSG_PREFILL_STARTED:
        letter.message.prefill_started.pull_blocks = letter.blocks;
        on_prefill_started(w, &letter.message.prefill_started);
        break;
    case PD_MSG_REFETCH: on_refetch(w, letter.from, &letter.message.refetch); break;
    case PD_MSG_LANDED: on_landed(w, letter.from, &letter.message.landed); break;
    case PD_MSG_DECODE_FAILED: {
        const pd_msg_decode_failed *failed = &letter.message.decode_failed;
        world_request *r = request_of(w, &failed->key);
        w->decode_failures++;
        if (current(r, &failed->key))
            world_fail_request(w, r, failed->status);
        break;
    }
    case PD_MSG_SUSPENDED: { /* it gives way, and goes on from its tokens where a test resumes */
        world_request *r = request_of(w, &letter.message.suspended.key);
        if (current(r, &letter.message.suspended.key))
            world_fail_request(w, r, PD_E_OVERLOAD);
        break;
    }
    case PD_MSG_LINK: w->links_reported++; break;
    default: fail_msg("a core sent %s", pd_message_name(letter.message.kind));
    }
    return true;
}

void world_to(world *w, world_worker *worker, const pd_message *message)
{
    worker->ops->on_message(worker->core, WORLD_ROUTER, message, w->now_ns);
}

void world_welcome(world *w, world_worker *worker)
{
    pd_message message = {.kind = PD_MSG_WELCOME};

    message.welcome =
        (pd_msg_welcome){.router = WORLD_ROUTER, .heartbeat_ms = 100, .lost_after_ms = 1000};
    world_to(w, worker, &message);
}

void world_say_peer_up(world *w)
{
    pd_message message = {.kind = PD_MSG_PEER_UP};
    unsigned char bytes[PD_WORKER_ADDRESS_BYTES_MAX];
    pd_worker_address address = {.blocks = w->decode.options.layout.blocks,
                                 .ranks = 1,
                                 .transfer = &w->decode.options.incarnation,
                                 .transfer_len = 8};

    snprintf(message.peer_up.name, sizeof message.peer_up.name, "decode-0");
    message.peer_up.role = PD_ROLE_DECODE;
    message.peer_up.incarnation = w->decode.options.incarnation;
    message.peer_up.transfer_address = bytes;
    message.peer_up.transfer_address_len = pd_worker_address_pack(&address, bytes);
    world_to(w, &w->prefill, &message);
}

world_request *world_ask(world *w, const uint32_t *prompt, uint32_t count, uint32_t max_tokens)
{
    assert_true(w->requests_count < WORLD_REQUESTS_MAX && count <= WORLD_PROMPT_MAX);
    assert_true(max_tokens <= WORLD_ANSWER_MAX);
    world_request *r = &w->requests[w->requests_count++];
    *r = (world_request){.key = {.router = WORLD_ROUTER, .number = w->requests_count},
                         .prompt_count = count,
                         .max_tokens = max_tokens};
    snprintf(r->id, sizeof r->id, "req-%u", w->requests_count);
    memcpy(r->prompt, prompt, count * sizeof *prompt);
    begin_attempt(r);
    return r;
}

static void send_lease_request(world *w, world_request *r)
{
    if (r->max_tokens - r->answer_count == 1) { /* the answer ends at the prefill worker */
        send_prefill_request(w, r);
        return;
    }
    pd_message message = {.kind = PD_MSG_LEASE_REQUEST};
    message.lease_request = (pd_msg_lease_request){
        .key = r->key,
        .sender = {.name = "prefill-0", .incarnation = w->prefill.options.incarnation},
        .prompt_tokens = r->prompt_count + r->answer_count,
        .max_tokens = r->max_tokens - r->answer_count,
        .hashes = r->hashes,
        .hashes_count = r->hashes_count,
        .ttl_ms = 1500,
    };
    snprintf(message.lease_request.id, sizeof message.lease_request.id, "%s", r->id);
    world_to(w, &w->decode, &message);
}

world_request *world_ask_random(world *w)
{
    uint32_t prompt[WORLD_PROMPT_MAX];
    uint32_t count = 1 + world_random(w, world_random(w, 4) == 0 ? WORLD_PROMPT_MAX : 80);
    uint64_t prefix = world_random(w, 4), own = pd_random_next(&w->seed);
    uint32_t shared = world_random(w, count + 1);

    if (world_random(w, 5) == 0)
        count = (count + 15) / 16 * 16;
    for (uint32_t i = 0; i < count; i++)
        prompt[i] = (uint32_t)(pd_mix64((i < shared ? prefix : own) * 1000 + i) % WORLD_VOCAB);
    return world_ask(w, prompt, count, 1 + world_random(w, 20));
}

void world_check_answer(const world_request *r)
{
    uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX];

    memcpy(tokens, r->prompt, r->prompt_count * sizeof *tokens);
    for (uint32_t i = 0; i < r->answer_count; i++) {
        assert_int_equal(r->answer[i], world_next_token(tokens, r->prompt_count + i));
        tokens[r->prompt_count + i] = r->answer[i];
    }
}

bool world_lease_next(world *w)
{
    for (uint32_t i = 0; i < w->requests_count; i++) {
        world_request *r = &w->requests[i];
        if (r->phase == WORLD_LEASING && !r->lease_asked) {
            r->lease_asked = true;
            send_lease_request(w, r);
            return true;
        }
    }
    return false;
}
