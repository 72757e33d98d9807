#include "tests/unit/workers/world.h"

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/worker/address.h"
#include "tests/unit/workers/world_router.h"

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

static uint32_t repeat_period;

void world_repeat(uint32_t period)
{
    repeat_period = period;
}

uint32_t world_next_token(const uint32_t *tokens, uint32_t count)
{
    if (repeat_period != 0 && count > repeat_period &&
        pd_hash64(tokens, count * sizeof *tokens, 9) % 8 != 0)
        return tokens[count - repeat_period];
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

static void sink_draft(void *ctx, pd_step *step)
{
    world_worker *worker = ctx;

    assert_null(worker->running);
    assert_null(worker->drafting);
    assert_true(step->slices_count > 0);
    worker->drafting = step;
    step->started_ns = worker->world->now_ns;
}

/* ---- steps ---- */

/* The draft model says what the model would, most of the time, by what its own KV tells it of the
 * text; so it is told of every place that holds something else. */
static void draft_slice(world *w, world_worker *worker, pd_step_slice *slice)
{
    const pd_speculation *how = &worker->options.speculation;
    uint32_t tokens[WORLD_PROMPT_MAX + WORLD_ANSWER_MAX], end = slice->position + slice->count;

    assert_true(end <= how->draft_context && slice->drafts == 0);
    for (uint32_t position = 0; position < end; position++) {
        pd_block block = slice->blocks[position / how->draft_block_tokens];
        assert_true(block < how->draft_blocks);
        uint32_t *at =
            &worker
                 ->draft_pool[block * how->draft_block_tokens + position % how->draft_block_tokens];
        if (position >= slice->position)
            *at = slice->tokens[position - slice->position] + 1;
        assert_int_not_equal(*at, 0);
        tokens[position] = *at - 1;
    }
    slice->token_out = world_next_token(tokens, end);
    if (slice->want_token && w->draft_wrong != 0 && world_random(w, w->draft_wrong) == 0)
        slice->token_out = (slice->token_out + 1) % WORLD_VOCAB;
}

bool world_end_draft(world *w)
{
    world_worker *worker = &w->decode;
    pd_step *step = worker->drafting;

    if (step == NULL)
        return false;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < step->slices_count; i++) {
        rows += step->slices[i].count;
        draft_slice(w, worker, &step->slices[i]);
    }
    assert_true(rows <= worker->options.speculation.draft_rows);
    step->status = w->fail_next_draft ? PD_E_INTERNAL : PD_OK;
    w->fail_next_draft = false;
    w->now_ns += PD_NS_PER_MS / 8;
    step->finished_ns = w->now_ns;
    worker->drafting = NULL;
    worker->ops->on_draft_done(worker->core, step, w->now_ns);
    return true;
}

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
        uint32_t end = slice->position + slice->count;
        for (uint32_t draft = 0; draft < slice->drafts; draft++)
            slice->drafts_out[draft] = world_next_token(tokens, end - slice->drafts + draft);
        if (slice->want_token)
            slice->token_out = world_next_token(tokens, end);
    }
    w->now_ns += PD_NS_PER_MS;
    step->finished_ns = w->now_ns;
    worker->running = worker->drafting = NULL;
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
                                .bytes = status == PD_OK ? 1000 : 250, /* a part landed */
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

/* ---- the whole ---- */

static void make_worker(world *w, world_worker *worker, const pd_role_ops *ops, const char *name,
                        const world_setup *setup, uint32_t blocks)
{
    pd_role_sink sink = {.ctx = worker,
                         .send = world_sink_send,
                         .run = sink_run,
                         .draft = sink_draft,
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
        if (ops->role == PD_ROLE_DECODE)
            worker->options.speculation = setup->speculation;
        worker->options.layout = (pd_kv_layout){.layers = 3,
                                                .kv_heads = 1,
                                                .ranks = 1,
                                                .rank_heads = 1,
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
    pd_free(worker->draft_pool);
    worker->draft_pool = pd_calloc((size_t)worker->options.speculation.draft_blocks + 1,
                                   WORLD_BLOCK_TOKENS * sizeof(uint32_t));
    assert_non_null(worker->draft_pool);
    assert_int_equal(ops->create(&worker->options, &sink, &worker->core), PD_OK);
    world_welcome(w, worker);
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
    world_say_peer_up(w);
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
    pd_free(w->prefill.draft_pool);
    pd_free(w->decode.draft_pool);
    pd_free(w->wire);
    pd_free(w->requests);
    pd_free(w->letters);
    pd_free(w);
}

bool world_turn(world *w)
{
    enum { KINDS = 7 };
    uint32_t first = world_random(w, KINDS);

    for (uint32_t i = 0; i < KINDS; i++) {
        bool done = false;
        switch ((first + i) % KINDS) {
        case 0: done = world_step_group(w, &w->prefill); break;
        case 1: done = world_end_step(w, &w->decode) || world_end_draft(w); break;
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
    enum { PATIENCE_MS = 400 }; /* who stands still for want of room says so after 250 */
    uint32_t idle_ms = 0;

    for (uint32_t turn = 0; turn < 200000; turn++) {
        if (turn % 16 == 0)
            world_tick(w, 1);
        if (world_turn(w)) {
            idle_ms = 0;
            continue;
        }
        bool waits = !w->decode.ops->idle(w->decode.core) || !w->prefill.ops->idle(w->prefill.core);
        if (idle_ms++ == (waits ? PATIENCE_MS : 1))
            return true;
        world_tick(w, 1);
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
            world_fail_request(w, r, PD_E_PEER);
    }
    world_say_peer_up(w);
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
            world_fail_request(w, r, PD_E_PEER);
    }
    world_say_peer_up(w);
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
