#include "tests/unit/workers/world.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "common/worker/address.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

uint32_t world_random(world *w, uint32_t below)
{
    return (uint32_t)(pd_random_next(&w->seed) % below);
}

static uint32_t *slot(const world_worker *worker, uint32_t group, pd_block block, uint32_t at)
{
    assert_true(block < worker->options.layout.blocks);
    return worker->pool +
           ((size_t)group * worker->options.layout.blocks + block) * WORLD_BLOCK_TOKENS + at;
}

uint32_t world_next_token(const uint32_t *tokens, uint32_t count)
{
    return 1 + (uint32_t)(pd_hash64(tokens, count * sizeof *tokens, 7) % (WORLD_VOCAB - 1));
}

uint64_t world_seal(const world_worker *worker, const pd_request_key *key, uint32_t group,
                    uint32_t index, pd_block block, uint32_t valid)
{
    uint64_t content =
        pd_hash64(slot(worker, group, block, 0), valid * sizeof(uint32_t), group * 1000 + index);

    return content ^ pd_mix64(pd_ship_seal_request(key) + key->epoch + valid);
}

void world_put(world_worker *worker, uint32_t group, pd_block block, const uint32_t *tokens,
               uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        *slot(worker, group, block, i) = tokens[i] + 1;
}

/* ---- the sinks ---- */

static void post(world *w, const world_packet *packet)
{
    assert_true(w->wire_count < WORLD_WIRE_MAX);
    w->wire[w->wire_count++] = *packet;
}

static pd_status sink_connect(void *ctx, const void *address, size_t bytes, uint64_t tag,
                              pd_peer *peer_out)
{
    world_worker *worker = ctx;
    pd_worker_address parsed;

    assert_int_equal(pd_worker_address_unpack(address, bytes, &parsed), PD_OK);
    if (worker->world->link_tag != 0)
        return PD_E_OVERLOAD; /* the old one is not closed yet */
    worker->world->link_tag = tag;
    memcpy(&worker->world->link_receiver, parsed.transfer, 8);
    *peer_out = 3;
    return PD_OK;
}

static void sink_close(void *ctx, pd_peer peer)
{
    world_worker *worker = ctx;

    assert_int_equal(peer, 3);
    worker->world->link_up = false;
    worker->world->link_closing = true;
}

static pd_status sink_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    world_worker *worker = ctx;
    world *w = worker->world;
    world_packet packet = {.notice = true,
                           .sender = worker->options.incarnation,
                           .receiver = w->link_receiver,
                           .peer = peer};

    if (!w->link_up)
        return PD_E_PEER;
    packet.bytes_len = pd_notice_pack(notice, packet.bytes);
    post(w, &packet);
    return PD_OK;
}

static bool damage_now(world *w)
{
    if (w->damage == WORLD_DAMAGE_NONE || w->damaged || w->damage_ship-- > 0)
        return false;
    w->damaged = true;
    return true;
}

/* Parts of at most 32 blocks of groups; with the last notice the shipment is over. */
static pd_status sink_ship(void *ctx, const pd_shipment *ship)
{
    world_worker *worker = ctx;
    world *w = worker->world;

    assert_true(ship->count > 0 && ship->groups > 0 && ship->groups <= WORLD_GROUPS);
    if (!w->link_up)
        return PD_E_PEER;
    if (w->under_way >= w->ships_max)
        return PD_E_OVERLOAD;
    w->under_way++;
    w->shipments++;
    world_damage damage = damage_now(w) ? w->damage : WORLD_DAMAGE_NONE;
    for (uint32_t from = 0, count; from < ship->count; from += count) {
        uint32_t most = 32 / ship->groups;
        uint64_t seals[32];
        count = ship->count - from < most ? ship->count - from : most;
        bool last = from + count == ship->count;
        uint32_t hit = last ? world_random(w, ship->groups * count) : 0;
        world_packet packet = {.sender = worker->options.incarnation,
                               .first = from == 0,
                               .receiver = ship->receiver,
                               .peer = ship->peer,
                               .ticket = ship->ticket,
                               .group = ship->group_first,
                               .groups = ship->groups,
                               .count = count};
        memcpy(packet.sources, ship->sources + from, count * sizeof *packet.sources);
        memcpy(packet.targets, ship->targets + from, count * sizeof *packet.targets);
        packet.damage = last ? damage : WORLD_DAMAGE_NONE;
        packet.damaged = hit;
        post(w, &packet);
        uint32_t valid = last ? ship->valid_tokens : WORLD_BLOCK_TOKENS;
        for (uint32_t g = 0; g < ship->groups; g++) {
            for (uint32_t i = 0; i < count; i++) {
                pd_request_key key = ship->key;
                uint32_t sealed = i + 1 == count ? valid : WORLD_BLOCK_TOKENS;
                bool here = last && g * count + i == hit;
                key.epoch -= here && damage == WORLD_DAMAGE_OLD_EPOCH;
                if (here && damage == WORLD_DAMAGE_COUNT_SEALED)
                    sealed = sealed == 1 ? 2 : sealed - 1;
                seals[g * count + i] =
                    world_seal(worker, &key, ship->group_first + g, ship->first + from + i,
                               packet.sources[i], sealed);
            }
        }
        if ((w->corrupt_notice > 0 && --w->corrupt_notice == 0) ||
            (w->corrupt_again && ship->again > 0))
            seals[ship->groups * count - 1] ^= 1;
        packet.first = false;
        packet.notice = true;
        packet.last = last;
        if (last && damage == WORLD_DAMAGE_COUNT_SAID)
            valid = valid == 1 ? 2 : valid - 1;
        packet.bytes_len =
            pd_notice_pack(&(pd_notice){.kind = PD_NOTICE_BLOCKS,
                                        .key = ship->key,
                                        .sender = packet.sender,
                                        .receiver = packet.receiver,
                                        .group = ship->group_first,
                                        .groups = ship->groups,
                                        .first_block = ship->first + from,
                                        .count = count,
                                        .valid_tokens = valid,
                                        .slices = 1,
                                        .again = ship->again,
                                        .seals = worker->options.seals ? seals : NULL},
                           packet.bytes);
        post(w, &packet);
    }
    return PD_OK;
}

/* Shipments that have not begun are dropped; their word comes in its turn. */
static void sink_unship(void *ctx, uint64_t ticket)
{
    world_worker *worker = ctx;
    world *w = worker->world;
    uint32_t kept = 0;
    bool dropping = false;

    for (uint32_t i = 0; i < w->wire_count; i++) {
        world_packet *packet = &w->wire[i];
        if (packet->ticket == ticket && packet->first)
            dropping = true;
        bool drop = dropping && packet->ticket == ticket;
        if (drop && packet->last) {
            packet->dropped = true;
            dropping = false;
        }
        if (!drop || packet->last)
            w->wire[kept++] = *packet;
    }
    w->wire_count = kept;
}

static pd_status sink_verify(void *ctx, const pd_check *check)
{
    world_worker *worker = ctx;

    if (worker->checks_count == sizeof worker->checks / sizeof *worker->checks)
        return PD_E_OVERLOAD;
    uint32_t seals = check->groups * check->count * check->slices;
    assert_true(seals <= 32 && check->slices == 1);
    world_check *copy = &worker->checks[worker->checks_count++];
    copy->check = *check;
    memcpy(copy->blocks, check->blocks, check->count * sizeof *copy->blocks);
    memcpy(copy->seals, check->seals, seals * sizeof *copy->seals);
    return PD_OK;
}

bool world_end_check(world *w, world_worker *worker)
{
    if (worker->checks_count == 0 || w->hold_checks)
        return false;
    world_check c = worker->checks[0];
    memmove(worker->checks, worker->checks + 1, --worker->checks_count * sizeof c);
    pd_checked checked = {.ticket = c.check.ticket, .good = true};
    for (uint32_t g = 0; g < c.check.groups; g++) {
        for (uint32_t i = 0; checked.good && i < c.check.count; i++) {
            uint32_t valid = i + 1 == c.check.count ? c.check.valid_tokens : WORLD_BLOCK_TOKENS;
            uint64_t seal = world_seal(worker, &c.check.key, c.check.group_first + g,
                                       c.check.first + i, c.blocks[i], valid);
            if (seal == c.seals[g * c.check.count + i])
                continue;
            checked.good = false;
            checked.bad_group = c.check.group_first + g;
            checked.bad_block = c.check.first + i;
        }
    }
    worker->ops->on_checked(worker->core, &checked, w->now_ns);
    return true;
}

static void sink_run(void *ctx, pd_step *step)
{
    world_worker *worker = ctx;

    assert_null(worker->running);
    assert_true(step->slices_count > 0);
    worker->running = step;
    worker->groups_done = 0;
    step->started_ns = worker->world->now_ns;
}

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

static void fail_request(world *w, world_request *r, pd_status status)
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
        fail_request(w, r, reply->status);
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
        fail_request(w, r, done->status);
}

static void on_audit_reply(world *w, const pd_msg_audit_reply *reply)
{
    assert_true(reply->entries_count <= 64 && reply->waits_for_count <= 16);
    w->last_audit = *reply;
    memcpy(w->audit_entries, reply->entries, reply->entries_count * sizeof *reply->entries);
    memcpy(w->audit_waits, reply->waits_for, reply->waits_for_count * sizeof *reply->waits_for);
}

static void sink_send(void *ctx, uint64_t router, const pd_message *message)
{
    world_worker *worker = ctx;
    world *w = worker->world;

    assert_true(router == WORLD_ROUTER);
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
            fail_request(w, r, failed->status);
        break;
    }
    case PD_MSG_LINK: w->links_reported++; break;
    default: fail_msg("a core sent %s", pd_message_name(letter.message.kind));
    }
    return true;
}

/* ---- steps ---- */

/* Reads what the slice looks back on, from each group; all must say the same. */
static void read_back(const world_worker *worker, const pd_step_slice *slice, uint32_t *tokens)
{
    for (uint32_t position = 0; position < slice->position; position++) {
        pd_block block = slice->blocks[position / WORLD_BLOCK_TOKENS];
        for (uint32_t group = 0; group < WORLD_GROUPS; group++) {
            uint32_t value = *slot(worker, group, block, position % WORLD_BLOCK_TOKENS);
            assert_int_not_equal(value, 0);
            if (group == 0)
                tokens[position] = value - 1;
            assert_int_equal(tokens[position], value - 1);
        }
    }
}

static void compute_group(const world_worker *worker, const pd_step_slice *slice, uint32_t group)
{
    for (uint32_t t = 0; t < slice->count; t++) {
        uint32_t position = slice->position + t;
        *slot(worker, group, slice->blocks[position / WORLD_BLOCK_TOKENS],
              position % WORLD_BLOCK_TOKENS) = slice->tokens[t] + 1;
    }
}

static void end_step(world *w, world_worker *worker)
{
    pd_step *step = worker->running;

    for (uint32_t i = 0; step->status == PD_OK && i < step->slices_count; i++) {
        pd_step_slice *slice = &step->slices[i];
        uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX];
        read_back(worker, slice, tokens);
        memcpy(tokens + slice->position, slice->tokens, slice->count * sizeof *tokens);
        if (slice->want_token)
            slice->token_out = world_next_token(tokens, slice->position + slice->count);
    }
    w->now_ns += PD_NS_PER_MS;
    step->finished_ns = w->now_ns;
    worker->running = NULL;
    worker->ops->on_step_done(worker->core, step, w->now_ns);
}

bool world_step_group(world *w, world_worker *worker)
{
    pd_step *step = worker->running;

    if (step == NULL)
        return false;
    if (w->fail_next_step) {
        w->fail_next_step = false;
        step->status = PD_E_INTERNAL;
        worker->groups_done = WORLD_GROUPS;
    }
    if (worker->groups_done == WORLD_GROUPS) {
        end_step(w, worker);
        return true;
    }
    uint32_t group = worker->groups_done++;
    for (uint32_t i = 0; i < step->slices_count; i++)
        compute_group(worker, &step->slices[i], group);
    if (worker->ops->on_group != NULL)
        worker->ops->on_group(worker->core, step, group, w->now_ns);
    return true;
}

bool world_end_step(world *w, world_worker *worker)
{
    const pd_step *step = worker->running;
    uint64_t number = step == NULL ? 0 : step->number;

    if (step == NULL)
        return false;
    while (worker->running != NULL && worker->running->number == number)
        world_step_group(w, worker);
    return true;
}

/* ---- the data plane ---- */

static void sent(world *w, const world_packet *packet, pd_status status)
{
    static pd_transfer_event event;

    w->under_way -= packet->last;
    event = (pd_transfer_event){.kind = PD_TRANSFER_SENT,
                                .peer = packet->peer,
                                .ticket = packet->ticket,
                                .tag = w->link_tag,
                                .status = status,
                                .bytes = status == PD_OK ? 1000 : 0,
                                .wire_ns = 1000};
    if (w->prefill.core != NULL && packet->sender == w->prefill.options.incarnation)
        w->prefill.ops->on_transfer(w->prefill.core, &event, w->now_ns);
}

static void link_event(world *w, pd_transfer_event_kind kind)
{
    static pd_transfer_event event;

    event = (pd_transfer_event){.kind = kind, .peer = 3, .tag = w->link_tag};
    snprintf(event.lane, sizeof event.lane, "test");
    w->prefill.ops->on_transfer(w->prefill.core, &event, w->now_ns);
}

/* One block of one group is written. */
static void put(world *w, const world_packet *packet, uint32_t i)
{
    uint32_t group = packet->group + i / packet->count;
    pd_block source = packet->sources[i % packet->count];
    uint32_t *target = slot(&w->decode, group, packet->targets[i % packet->count], 0);
    world_damage damage = i == packet->damaged ? packet->damage : WORLD_DAMAGE_NONE;

    if (damage == WORLD_DAMAGE_LEFT_OUT)
        return;
    if (damage == WORLD_DAMAGE_OTHER_BLOCK)
        source = (source + 1) % w->prefill.options.layout.blocks;
    memcpy(target, slot(&w->prefill, group, source, 0), WORLD_BLOCK_TOKENS * sizeof *target);
    if (damage == WORLD_DAMAGE_FLIPPED_BIT)
        target[0] ^= UINT32_C(1) << world_random(w, 32);
}

bool world_deliver(world *w)
{
    static pd_transfer_event event;

    if (w->link_closing) {
        /* A forced close cancels what is under way. */
        while (w->wire_count > 0) {
            world_packet packet = w->wire[--w->wire_count];
            if (packet.last)
                sent(w, &packet, PD_E_CANCELLED);
        }
        w->link_closing = false;
        pd_transfer_event closed = {.kind = PD_TRANSFER_CLOSED, .peer = 3, .tag = w->link_tag};
        w->link_tag = 0;
        w->prefill.ops->on_transfer(w->prefill.core, &closed, w->now_ns);
        return true;
    }
    if (w->link_tag != 0 && !w->link_up) {
        w->link_up = w->link_receiver == w->decode.options.incarnation;
        link_event(w, w->link_up ? PD_TRANSFER_CONNECTED : PD_TRANSFER_PEER_DOWN);
        return true;
    }
    if (w->wire_count == 0)
        return false;
    world_packet packet = w->wire[0];
    memmove(w->wire, w->wire + 1, --w->wire_count * sizeof *w->wire);
    bool there = packet.receiver == w->decode.options.incarnation;
    if (packet.dropped) {
        sent(w, &packet, PD_E_CANCELLED);
        return true;
    }
    if (!packet.notice) {
        for (uint32_t i = 0; there && i < packet.groups * packet.count; i++)
            put(w, &packet, i);
        return true;
    }
    if (there && packet.damage != WORLD_DAMAGE_NO_NOTICE) {
        event = (pd_transfer_event){.kind = PD_TRANSFER_NOTICE, .notice_len = packet.bytes_len};
        memcpy(event.notice, packet.bytes, packet.bytes_len);
        w->decode.ops->on_transfer(w->decode.core, &event, w->now_ns);
    }
    if (packet.last || packet.ticket == 0)
        sent(w, &packet, there ? PD_OK : PD_E_PEER);
    return true;
}

/* ---- the router's part ---- */

void world_to(world *w, world_worker *worker, const pd_message *message)
{
    worker->ops->on_message(worker->core, WORLD_ROUTER, message, w->now_ns);
}

static void welcome(world *w, world_worker *worker)
{
    pd_message message = {.kind = PD_MSG_WELCOME};

    message.welcome =
        (pd_msg_welcome){.router = WORLD_ROUTER, .heartbeat_ms = 100, .lost_after_ms = 1000};
    world_to(w, worker, &message);
}

static void say_peer_up(world *w)
{
    pd_message message = {.kind = PD_MSG_PEER_UP};
    unsigned char bytes[PD_WORKER_ADDRESS_BYTES_MAX];
    pd_worker_address address = {.blocks = w->decode.options.layout.blocks,
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

/* ---- the whole ---- */

static void make_worker(world *w, world_worker *worker, const pd_role_ops *ops, const char *name,
                        const world_setup *setup, uint32_t blocks)
{
    pd_role_sink sink = {.ctx = worker,
                         .send = sink_send,
                         .run = sink_run,
                         .connect = sink_connect,
                         .close = sink_close,
                         .notify = sink_notify,
                         .ship = sink_ship,
                         .unship = sink_unship,
                         .verify = sink_verify};

    if (setup != NULL) {
        worker->options = (pd_role_options){
            .name = name,
            .vocab = WORLD_VOCAB,
            .context_max =
                setup->context_max != 0 ? setup->context_max : WORLD_PROMPT_MAX + WORLD_ANSWER_MAX,
            .max_batch = setup->max_batch != 0 ? setup->max_batch : 4,
            .queue_max = setup->queue_max != 0 ? setup->queue_max : 32,
            .chunk_tokens = setup->chunk_tokens != 0 ? setup->chunk_tokens : 48,
            .peers_max = 2,
            .prefix_cache = !setup->no_cache,
            .seals = setup->seals,
            .lost_after_ns = PD_NS_PER_S,
        };
        worker->options.layout = (pd_kv_layout){.layers = 3,
                                                .kv_heads = 1,
                                                .head_dim = 1,
                                                .block_tokens = WORLD_BLOCK_TOKENS,
                                                .group_layers = 1,
                                                .groups = WORLD_GROUPS,
                                                .blocks = blocks};
        worker->options.layout.layer_bytes =
            WORLD_BLOCK_TOKENS * (setup->token_bytes != 0 ? setup->token_bytes : 4);
    }
    worker->world = w;
    worker->ops = ops;
    worker->running = NULL;
    worker->checks_count = 0;
    worker->options.incarnation = w->incarnation_next++;
    pd_free(worker->pool);
    worker->pool = pd_calloc((size_t)WORLD_GROUPS * worker->options.layout.blocks,
                             WORLD_BLOCK_TOKENS * sizeof(uint32_t));
    assert_non_null(worker->pool);
    assert_int_equal(ops->create(&worker->options, &sink, &worker->core), PD_OK);
    welcome(w, worker);
}

world *world_create(const world_setup *setup)
{
    world *w = pd_calloc(1, sizeof *w);

    assert_non_null(w);
    w->seed = setup->seed;
    w->now_ns = 10 * PD_NS_PER_S;
    w->incarnation_next = 100;
    w->ships_max = setup->ships_max != 0 ? setup->ships_max : 64;
    w->resume = setup->resume;
    w->wire = pd_calloc(WORLD_WIRE_MAX, sizeof *w->wire);
    w->requests = pd_calloc(WORLD_REQUESTS_MAX, sizeof *w->requests);
    assert_non_null(w->wire);
    assert_non_null(w->requests);
    w->letters = pd_calloc(WORLD_LETTERS_MAX, sizeof *w->letters);
    assert_non_null(w->letters);
    make_worker(w, &w->prefill, &prefill_role, "prefill-0", setup,
                setup->prefill_blocks != 0 ? setup->prefill_blocks : 64);
    make_worker(w, &w->decode, &decode_role, "decode-0", setup,
                setup->decode_blocks != 0 ? setup->decode_blocks : 64);
    say_peer_up(w);
    assert_true(world_deliver(w)); /* connected */
    assert_true(world_read_letter(w));
    assert_int_equal(w->links_reported, 1);
    return w;
}

void world_destroy(world *w)
{
    w->prefill.ops->destroy(w->prefill.core);
    w->decode.ops->destroy(w->decode.core);
    pd_free(w->prefill.pool);
    pd_free(w->decode.pool);
    pd_free(w->wire);
    pd_free(w->requests);
    pd_free(w->letters);
    pd_free(w);
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

bool world_turn(world *w)
{
    enum { KINDS = 7 };
    uint32_t first = world_random(w, KINDS);

    for (uint32_t i = 0; i < KINDS; i++) {
        bool done = false;
        switch ((first + i) % KINDS) {
        case 0: done = world_step_group(w, &w->prefill); break;
        case 1: done = world_end_step(w, &w->decode); break;
        case 2: done = world_deliver(w); break;
        case 3: done = world_read_letter(w); break;
        case 4: done = world_end_check(w, &w->decode); break;
        case 5: done = world_end_check(w, &w->prefill); break;
        default: done = world_lease_next(w);
        }
        if (done)
            return true;
    }
    return false;
}

void world_tick(world *w, uint64_t ms)
{
    w->now_ns += ms * PD_NS_PER_MS;
    if (!w->router_silent) {
        pd_message message = {.kind = PD_MSG_ROUTER_HEARTBEAT};
        message.router_heartbeat.router = WORLD_ROUTER;
        world_to(w, &w->prefill, &message);
        world_to(w, &w->decode, &message);
    }
    w->prefill.ops->on_tick(w->prefill.core, w->now_ns);
    w->decode.ops->on_tick(w->decode.core, w->now_ns);
}

bool world_settle(world *w)
{
    for (uint32_t turn = 0; turn < 200000; turn++) {
        if (turn % 16 == 0)
            world_tick(w, 1);
        if (!world_turn(w)) {
            world_tick(w, 1);
            if (!world_turn(w))
                return true;
        }
    }
    return false;
}

/* The router knows which process a message came from: what a dead one has sent is dropped. */
static void drop_letters(world *w, const world_worker *from)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < w->letters_count; i++) {
        if (w->letters[i].from != from)
            w->letters[kept++] = w->letters[i];
    }
    w->letters_count = kept;
}

static void say_gone(world *w, world_worker *to, const char *name, uint64_t incarnation)
{
    pd_message message = {.kind = PD_MSG_PEER_GONE};

    snprintf(message.peer_gone.name, sizeof message.peer_gone.name, "%s", name);
    message.peer_gone.incarnation = incarnation;
    world_to(w, to, &message);
}

void world_kill_prefill(world *w)
{
    uint64_t old = w->prefill.options.incarnation;

    w->prefill.ops->destroy(w->prefill.core);
    w->prefill.core = NULL;
    w->link_up = w->link_closing = false;
    w->link_tag = 0;
    w->wire_count = w->under_way = 0; /* cut off: what was on its way never comes */
    w->prefill_events = 0;
    drop_letters(w, &w->prefill);
    make_worker(w, &w->prefill, &prefill_role, "prefill-0", NULL, 0);
    say_gone(w, &w->decode, "prefill-0", old);
    for (uint32_t i = 0; i < w->requests_count; i++) {
        world_request *r = &w->requests[i];
        /* A lease names who will write: it is of no use to another process. */
        if ((r->phase == WORLD_LEASING && r->lease_asked) || r->phase == WORLD_PREFILLING ||
            (r->phase == WORLD_DECODING && !r->prefill_ended))
            fail_request(w, r, PD_E_PEER);
    }
    say_peer_up(w);
}

void world_restart_decode(world *w)
{
    uint64_t old = w->decode.options.incarnation;

    w->decode.ops->destroy(w->decode.core);
    w->decode_events = 0;
    drop_letters(w, &w->decode);
    make_worker(w, &w->decode, &decode_role, "decode-0", NULL, 0);
    say_gone(w, &w->prefill, "decode-0", old);
    for (uint32_t i = 0; i < w->requests_count; i++) {
        world_request *r = &w->requests[i];
        if (r->max_tokens > 1 && (r->phase != WORLD_LEASING || r->lease_asked))
            fail_request(w, r, PD_E_PEER);
    }
    say_peer_up(w);
}

void world_check_nothing_held(world *w)
{
    world_worker *workers[] = {&w->prefill, &w->decode};

    for (int i = 0; i < 2; i++) {
        pd_ledger ledger = workers[i]->ops->ledger(workers[i]->core);
        assert_int_equal(ledger.leased, 0);
        assert_int_equal(ledger.running, 0);
        assert_int_equal(ledger.quarantined, 0);
        assert_int_equal(ledger.free + ledger.cached, ledger.total);
        assert_true(workers[i]->ops->idle(workers[i]->core));
    }
}
