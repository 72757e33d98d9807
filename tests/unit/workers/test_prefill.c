/* What a prefill worker does when things around it fail. */
#include "tests/unit/workers/world_router.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/key_table.h"
#include "prefill-worker/core.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* A prefill request as a router would send it, without the router's bookkeeping. */
typedef struct direct {
    pd_message message, targets;
    uint32_t tokens[WORLD_PROMPT_MAX];
    pd_block blocks[WORLD_PROMPT_MAX / WORLD_BLOCK_TOKENS + 1];
} direct;

static void make_direct(world *w, direct *d, uint32_t count, uint32_t max_tokens)
{
    pd_msg_prefill_request *asked = &d->message.prefill_request;

    /* the world knows it as a request, so that answers find their place */
    memset(d, 0, sizeof *d);
    for (uint32_t i = 0; i < count; i++)
        d->tokens[i] = i % WORLD_VOCAB;
    world_request *r = world_ask(w, d->tokens, count, max_tokens);
    r->lease_asked = true;
    r->phase = WORLD_PREFILLING;
    r->direct = true;
    d->message.kind = PD_MSG_PREFILL_REQUEST;
    asked->key = r->key;
    snprintf(asked->id, sizeof asked->id, "%s", r->id);
    asked->tokens = d->tokens;
    asked->tokens_count = count;
    asked->max_tokens = max_tokens;
    asked->ship = max_tokens > 1;
    asked->decode_incarnation = w->decode.options.incarnation;
    asked->prompt_tokens = count;
    d->targets.kind = PD_MSG_TARGETS;
    d->targets.targets.key = r->key;
    d->targets.targets.blocks = d->blocks;
    d->targets.targets.blocks_count = (count + WORLD_BLOCK_TOKENS - 1) / WORLD_BLOCK_TOKENS;
    for (uint32_t i = 0; i < d->targets.targets.blocks_count; i++)
        d->blocks[i] = i;
}

static void send_direct(world *w, const direct *d)
{
    world_to(w, &w->prefill, &d->message);
    world_to(w, &w->prefill, &d->targets);
}

static void release(world *w, const direct *d)
{
    pd_message message = {.kind = PD_MSG_RELEASE};

    message.release.key = d->message.prefill_request.key;
    world_to(w, &w->prefill, &message);
}

static void read_letters(world *w)
{
    while (world_read_letter(w)) {
    }
}

static pd_status refusal(world *w, direct *d)
{
    w->last_done = (pd_msg_prefill_done){0};
    world_to(w, &w->prefill, &d->message);
    read_letters(w);
    assert_int_equal(w->last_done.key.number, d->message.prefill_request.key.number);
    return w->last_done.status;
}

static void what_cannot_be_meant_is_refused(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .prefill_blocks = 8});
    direct d;

    make_direct(w, &d, 20, 5);
    d.message.prefill_request.tokens_count = 0;
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 20, 5);
    d.message.prefill_request.max_tokens = 0;
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 20, 5);
    d.tokens[3] = WORLD_VOCAB;
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 20, 5);
    d.message.prefill_request.prompt_tokens = 21;
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 20, 5);
    d.message.prefill_request.prompt_tokens = 15; /* the answer is whole */
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 20, 5);
    d.message.prefill_request.hashes_count = 2;
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 20, 5);
    d.message.prefill_request.ship = false;
    assert_int_equal(refusal(w, &d), PD_E_INVALID);
    make_direct(w, &d, 129, 5); /* 9 blocks, of 8 */
    assert_int_equal(refusal(w, &d), PD_E_TOO_LARGE);
    make_direct(w, &d, 20, 5);
    d.message.prefill_request.decode_incarnation++;
    assert_int_equal(refusal(w, &d), PD_E_PEER);
    w->prefill.ops->drain(w->prefill.core);
    make_direct(w, &d, 20, 5);
    assert_int_equal(refusal(w, &d), PD_E_OVERLOAD);
    assert_int_equal(w->prefill.ops->counters(w->prefill.core).refused, 10);
    world_settle(w);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void a_full_queue_refuses(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .max_batch = 1, .queue_max = 2});
    direct d;

    for (int i = 0; i < 3; i++) {
        make_direct(w, &d, 100, 1);
        world_to(w, &w->prefill, &d.message);
    }
    make_direct(w, &d, 100, 1);
    assert_int_equal(refusal(w, &d), PD_E_OVERLOAD);
    assert_true(world_settle(w));
    assert_int_equal(w->prefill.ops->counters(w->prefill.core).finished, 3);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void a_request_that_comes_twice_is_one_request(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    make_direct(w, &d, 100, 1);
    world_to(w, &w->prefill, &d.message);
    world_to(w, &w->prefill, &d.message);
    assert_true(world_settle(w)); /* two last words would fail in there */
    assert_int_equal(w->prefill.ops->counters(w->prefill.core).requests, 1);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void a_deadline_ends_a_request_queued_or_running(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .max_batch = 1});
    direct running, queued;

    make_direct(w, &running, 100, 1);
    running.message.prefill_request.deadline_ms = 50;
    world_to(w, &w->prefill, &running.message);
    make_direct(w, &queued, 100, 1);
    queued.message.prefill_request.deadline_ms = 50;
    world_to(w, &w->prefill, &queued.message);
    world_tick(w, 49);
    read_letters(w);
    assert_false(w->requests[0].prefill_ended || w->requests[1].prefill_ended);
    world_tick(w, 1);
    read_letters(w);
    assert_false(w->requests[0].prefill_ended); /* its step is under way */
    assert_true(w->requests[1].prefill_ended);
    assert_int_equal(w->requests[1].prefill_status, PD_E_TIMEOUT);
    world_end_step(w, &w->prefill);
    read_letters(w);
    assert_true(w->requests[0].prefill_ended);
    assert_int_equal(w->requests[0].prefill_status, PD_E_TIMEOUT);
    world_check_nothing_held(w);
    world_destroy(w);
}

/* Copies that wait for a slow link hold the pool: who waits for their room has not failed. */
static void a_prompt_without_room_in_time_is_refused(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .prefill_blocks = 8});
    direct holds, waits;

    make_direct(w, &holds, 100, 5); /* 7 blocks, held until its release */
    send_direct(w, &holds);
    while (world_end_step(w, &w->prefill))
        read_letters(w);
    make_direct(w, &waits, 100, 5);
    waits.message.prefill_request.deadline_ms = 100;
    send_direct(w, &waits);
    assert_null(w->prefill.running);
    world_tick(w, 99);
    read_letters(w);
    assert_false(w->requests[1].prefill_ended);
    world_tick(w, 1);
    read_letters(w);
    assert_true(w->requests[1].prefill_ended);
    assert_int_equal(w->requests[1].prefill_status, PD_E_OVERLOAD);
    release(w, &holds);
    assert_true(world_settle(w));
    world_check_nothing_held(w);
    world_destroy(w);
}

static void a_stuck_link_is_closed_so_that_a_cancel_can_end(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    make_direct(w, &d, 40, 5);
    send_direct(w, &d);
    assert_true(world_end_step(w, &w->prefill)); /* all is posted, nothing arrives */
    assert_true(w->wire_count > 0);
    world_cancel(w, &w->requests[0]);
    world_tick(w, 500);
    read_letters(w);
    assert_false(w->requests[0].prefill_ended);
    assert_true(w->prefill.ops->ledger(w->prefill.core).running > 0);
    world_tick(w, 600);
    assert_true(w->link_closing);
    assert_true(world_deliver(w)); /* closed */
    read_letters(w);
    assert_true(w->requests[0].prefill_ended);
    assert_int_equal(w->requests[0].prefill_status, PD_E_CANCELLED);
    world_check_nothing_held(w);
    world_destroy(w);
}

/* A request's blocks are on their way, a write fails, and the link is being closed. */
static void fail_a_write(world *w, direct *d)
{
    make_direct(w, d, 40, 5);
    send_direct(w, d);
    assert_true(world_end_step(w, &w->prefill));
    for (uint32_t i = 0; i < w->wire_count; i++)
        w->wire[i].receiver = 1; /* somebody else's memory by now */
    while (!w->link_closing)
        assert_true(world_deliver(w));
}

static void a_failed_write_ends_its_request_after_the_link(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    fail_a_write(w, &d);
    read_letters(w);
    assert_false(w->requests[0].prefill_ended);
    assert_true(world_deliver(w)); /* closed */
    read_letters(w);
    assert_int_equal(w->requests[0].prefill_status, PD_E_PEER);
    /* What left is told, in this word and in every heartbeat, whatever came of it. */
    pd_msg_heartbeat beat = {0};
    pd_role_heartbeat(w->prefill.ops, w->prefill.core, &beat);
    assert_true(beat.counts.shipped_bytes >= 250);
    assert_int_equal(w->last_done.shipped_bytes, beat.counts.shipped_bytes);
    assert_int_equal(w->last_done.ship_bytes, 0);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void blocks_a_decode_worker_holds_are_not_shipped(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    make_direct(w, &d, 100, 5); /* 7 blocks */
    d.targets.targets.held_blocks = 6;
    d.targets.targets.blocks_count = 1;
    send_direct(w, &d);
    while (w->prefill.running != NULL)
        world_end_step(w, &w->prefill);
    assert_int_equal(w->prefill.ops->counters(w->prefill.core).blocks_shipped, 1);
    while (world_deliver(w)) {
    }
    assert_int_equal(w->prefill.ops->ledger(w->prefill.core).running, 7); /* held */
    release(w, &d);
    world_check_nothing_held(w);

    make_direct(w, &d, 96, 5); /* 6 blocks, all held */
    d.targets.targets.held_blocks = 6;
    d.targets.targets.blocks_count = 0;
    send_direct(w, &d);
    while (w->prefill.running != NULL)
        world_end_step(w, &w->prefill);
    assert_int_equal(w->wire_count, 0); /* it is done without a word on the data plane */
    read_letters(w);
    assert_true(w->requests[1].prefill_ended);
    release(w, &d);
    world_check_nothing_held(w);
    world_destroy(w);
}

/* What a router learns the price of shipping from: not only what was left after computing. */
static void the_time_on_the_wire_of_every_write_is_reported(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .chunk_tokens = 32});
    uint32_t prompt[100] = {7};

    world_ask(w, prompt, 100, 4);
    assert_true(world_settle(w));
    read_letters(w);
    assert_int_equal(w->last_done.status, PD_OK);
    uint64_t writes = w->last_done.ship_bytes / 1000; /* the world's writes: 1000 B in 1000 ns */
    assert_true(writes > 1);
    assert_true(w->last_done.ship_ms > 0.99 * (double)writes / 1000 &&
                w->last_done.ship_ms < 1.01 * (double)writes / 1000);
    world_destroy(w);
}

static uint32_t letters_of(const world *w, pd_message_kind kind)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < w->letters_count; i++)
        count += w->letters[i].message.kind == kind;
    return count;
}

static void finish_steps(world *w)
{
    while (w->prefill.running != NULL)
        world_end_step(w, &w->prefill);
}

static void it_says_that_it_has_started_until_it_knows_the_targets(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    make_direct(w, &d, 40, 5);
    world_to(w, &w->prefill, &d.message);
    assert_int_equal(letters_of(w, PD_MSG_PREFILL_STARTED), 1); /* before its step is done */
    finish_steps(w);
    for (int i = 0; i < 12; i++)
        world_tick(w, 100);
    assert_int_equal(letters_of(w, PD_MSG_PREFILL_STARTED), 3);
    assert_int_equal(w->wire_count, 0);
    world_to(w, &w->prefill, &d.targets);
    /* all of it is final by now: one shipment */
    assert_int_equal(w->shipments, 1);
    world_to(w, &w->prefill, &d.targets); /* again changes nothing */
    for (int i = 0; i < 12; i++)
        world_tick(w, 100);
    assert_int_equal(letters_of(w, PD_MSG_PREFILL_STARTED), 3);
    assert_int_equal(w->shipments, 1);
    while (world_deliver(w)) {
    }
    assert_int_equal(letters_of(w, PD_MSG_PREFILL_DONE), 1);
    release(w, &d);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void groups_leave_while_later_ones_are_computed(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .chunk_tokens = 400, .token_bytes = 1 << 20});
    direct d;

    make_direct(w, &d, 400, 5);
    send_direct(w, &d);
    assert_int_equal(w->shipments, 0);
    world_step_group(w, &w->prefill);
    world_step_group(w, &w->prefill);
    assert_true(w->shipments > 0);
    uint32_t early = w->shipments;
    world_step_group(w, &w->prefill);
    assert_non_null(w->prefill.running);
    finish_steps(w);
    assert_true(w->shipments > early);
    while (world_deliver(w)) {
    }
    release(w, &d);
    world_check_nothing_held(w);
    world_destroy(w);
}

static void what_the_carrier_has_no_room_for_leaves_later(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .ships_max = 1});
    direct d[3];

    for (int i = 0; i < 3; i++) {
        make_direct(w, &d[i], 100, 5);
        send_direct(w, &d[i]);
    }
    finish_steps(w);
    while (world_deliver(w)) {
    }
    read_letters(w);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(w->requests[i].prefill_status, PD_OK);
        assert_true(w->requests[i].prefill_ended);
        release(w, &d[i]);
    }
    world_check_nothing_held(w);
    world_destroy(w);
}

/* The token says that the answer is over: nobody needs the rest. */
static void an_end_token_first_stops_the_shipping(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .chunk_tokens = 32, .ships_max = 1});
    direct d;

    make_direct(w, &d, 100, 5);
    uint32_t end = world_next_token(d.tokens, 100);
    d.message.prefill_request.end_tokens = &end;
    d.message.prefill_request.end_tokens_count = 1;
    send_direct(w, &d);
    finish_steps(w);
    uint32_t before = w->shipments;
    assert_int_equal(letters_of(w, PD_MSG_PREFILL_DONE), 0); /* what has left comes back first */
    while (world_deliver(w)) {
    }
    assert_int_equal(w->shipments, before);
    assert_int_equal(letters_of(w, PD_MSG_PREFILL_DONE), 1);
    read_letters(w);
    assert_int_equal(w->last_done.status, PD_OK);
    world_check_nothing_held(w); /* without a release */
    world_destroy(w);
}

static void ship_again(world *w, const direct *d, uint32_t group, uint32_t first, uint32_t count)
{
    pd_message message = {.kind = PD_MSG_SHIP_AGAIN};

    message.ship_again = (pd_msg_ship_again){.key = d->message.prefill_request.key,
                                             .group = group,
                                             .first_block = first,
                                             .count = count};
    world_to(w, &w->prefill, &message);
}

static const pd_msg_prefill_done *last_done(const world *w)
{
    const world_letter *last = &w->letters[w->letters_count - 1];

    assert_true(w->letters_count > 0);
    assert_int_equal(last->message.kind, PD_MSG_PREFILL_DONE);
    return &last->message.prefill_done;
}

/* Delivers all that is on the wire, and counts how often the notices named each block of each
 * group: *first for the first time, *again because it was asked for again. */
static void count_writings(world *w, uint32_t first[WORLD_GROUPS][8],
                           uint32_t again[WORLD_GROUPS][8])
{
    uint64_t seals[PD_NOTICE_SEALS_MAX];
    pd_notice notice;

    for (bool more = true; more; more = world_deliver(w)) {
        const world_packet *packet = &w->wire[0];
        if (w->wire_count == 0 || !packet->notice)
            continue;
        pd_status status = pd_notice_unpack(packet->bytes, packet->bytes_len, seals, &notice);
        assert_int_equal(status, PD_OK);
        for (uint32_t g = notice.group; g < notice.group + notice.groups; g++) {
            for (uint32_t i = notice.first_block; i < notice.first_block + notice.count; i++)
                (notice.again > 0 ? again : first)[g][i]++;
        }
    }
}

/* Delivers all that is on the wire. Of notices of that kind: how many there were, the last one, and
 * that nothing came behind it but its like. */
static uint32_t deliver_and_count(world *w, pd_notice_kind kind, pd_notice *last_out)
{
    uint64_t seals[PD_NOTICE_SEALS_MAX];
    uint32_t count = 0;

    for (bool more = true; more; more = world_deliver(w)) {
        const world_packet *packet = &w->wire[0];
        pd_notice notice;
        if (w->wire_count == 0)
            continue;
        bool is = packet->notice &&
                  pd_notice_unpack(packet->bytes, packet->bytes_len, seals, &notice) == PD_OK &&
                  notice.kind == kind;
        assert_true(is || count == 0);
        count += is;
        if (is)
            *last_out = notice;
    }
    return count;
}

/* Of receivers that died elsewhere words were forgotten; another one's question is answered. */
static void who_asks_is_told_apart_from_the_dead(void **state)
{
    (void)state;
    enum { DEAD = 500 };
    world *w = world_create(&(world_setup){.seed = 1});
    pd_role_core *core = w->prefill.core;
    pd_message message = {.kind = PD_MSG_SHIP_AGAIN,
                          .ship_again = {.key = {WORLD_ROUTER, 7, 1}, .count = 1}};

    for (uint64_t i = 0; i <= PD_LAST_WORDS_OWED_MAX; i++)
        pd_last_words_owe(&core->words, DEAD, &(pd_request_key){WORLD_ROUTER, 1000 + i, 1}, false);
    for (int who = 0; who < 3; who++) {
        const uint64_t receivers[] = {w->decode.options.incarnation, DEAD, 0};
        message.ship_again.receiver = receivers[who];
        world_to(w, &w->prefill, &message);
        assert_int_equal(last_done(w)->status, PD_E_NOT_FOUND);
        assert_int_equal(last_done(w)->may_land, who > 0);
    }
    w->letters_count = 0;
    world_destroy(w);
}

/* A link that is being closed, as the engine tells it: first all that was under way has failed. */
static void fail_all_under_way(world *w)
{
    static pd_transfer_event event;

    while (w->wire_count > 0) {
        world_packet packet = w->wire[--w->wire_count];
        if (!packet.last)
            continue;
        w->under_way--;
        event = (pd_transfer_event){.kind = PD_TRANSFER_SENT,
                                    .peer = packet.peer,
                                    .ticket = packet.ticket,
                                    .tag = w->link_tag,
                                    .status = PD_E_CANCELLED};
        w->prefill.ops->on_transfer(w->prefill.core, &event, w->now_ns);
    }
}

/* How many aborts a new link to the decode worker says. */
static uint32_t words_of_the_next_link(world *w)
{
    pd_notice notice;

    world_say_peer_up(w);
    world_tick(w, 10);
    assert_true(world_deliver(w)); /* connected */
    assert_true(w->link_up);
    uint32_t count = deliver_and_count(w, PD_NOTICE_ABORT, &notice);
    w->letters_count = 0;
    return count;
}

/* Cancelled first, and then its link is closed: until that is done its blocks may be written, and
 * if it cannot be done, for ever; no later link's word may end that. */
static void a_cancelled_shipment_waits_for_its_closing_link(void **state)
{
    (void)state;
    for (int abandoned = 0; abandoned < 2; abandoned++) {
        world *w = world_create(&(world_setup){.seed = 1});
        static pd_transfer_event closed;
        direct d;

        make_direct(w, &d, 40, 5);
        send_direct(w, &d);
        assert_true(world_end_step(w, &w->prefill));
        world_cancel(w, &w->requests[0]);
        world_tick(w, 500);
        world_tick(w, 600); /* it is stuck */
        assert_true(w->link_closing && w->wire_count > 0);
        fail_all_under_way(w);
        read_letters(w);
        assert_false(w->requests[0].prefill_ended);
        assert_true(w->prefill.ops->ledger(w->prefill.core).running > 0);
        closed = (pd_transfer_event){.kind = PD_TRANSFER_CLOSED,
                                     .peer = 3,
                                     .tag = w->link_tag,
                                     .status = abandoned ? PD_E_TIMEOUT : PD_OK};
        w->link_closing = false;
        w->link_tag = 0;
        w->prefill.ops->on_transfer(w->prefill.core, &closed, w->now_ns);
        read_letters(w);
        assert_true(w->requests[0].prefill_ended && w->last_done.may_land);
        world_check_nothing_held(w);
        assert_int_equal(words_of_the_next_link(w), !abandoned);
        world_destroy(w);
    }
}

/* Its link is lost before anything leaves: nobody is told to wait for what cannot come. */
static void a_link_lost_before_the_first_block_leaves_nothing_to_land(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    static pd_transfer_event event;
    direct d;

    make_direct(w, &d, 40, 5);
    send_direct(w, &d);
    event = (pd_transfer_event){.kind = PD_TRANSFER_PEER_DOWN, .peer = 3, .tag = w->link_tag};
    w->prefill.ops->on_transfer(w->prefill.core, &event, w->now_ns);
    assert_true(w->link_closing);
    while (w->prefill.running != NULL)
        world_end_step(w, &w->prefill);
    assert_int_equal(w->wire_count, 0);
    assert_false(last_done(w)->may_land);
    assert_int_equal(last_done(w)->status, PD_E_PEER);
    ship_again(w, &d, 0, 0, 1); /* its receiver asks, by its router */
    assert_int_equal(last_done(w)->status, PD_E_NOT_FOUND);
    assert_false(last_done(w)->may_land);
    assert_true(world_deliver(w)); /* closed */
    w->letters_count = 0;
    world_check_nothing_held(w);
    assert_int_equal(words_of_the_next_link(w), 1); /* and the next link says so */
    world_destroy(w);
}

/* What is lost is asked for at once then: without that word it is only late. */
static void that_all_is_written_is_said_behind_the_last_block(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    pd_notice notice;
    direct d;

    make_direct(w, &d, 100, 5);
    send_direct(w, &d);
    finish_steps(w);
    assert_int_equal(deliver_and_count(w, PD_NOTICE_WRITTEN, &notice), 1);
    assert_true(pd_request_key_equal(&notice.key, &d.message.prefill_request.key));
    assert_true(notice.receiver == w->decode.options.incarnation && notice.again == 0);
    ship_again(w, &d, 1, 2, 3);
    assert_int_equal(deliver_and_count(w, PD_NOTICE_WRITTEN, &notice), 1);
    assert_int_equal(notice.again, 1);
    release(w, &d);
    world_check_nothing_held(w);
    w->letters_count = 0;
    world_destroy(w);
}

/* "Of all that was leased for it I write nothing", while blocks of it are still on their way: they
 * would land in what is another's by then. */
static void the_last_word_on_a_lost_router_comes_behind_its_blocks(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    pd_notice notice = {.kind = PD_NOTICE_BLOCKS};
    direct d;

    make_direct(w, &d, 100, 5);
    send_direct(w, &d);
    finish_steps(w);
    assert_true(w->wire_count > 0);
    w->router_silent = true;
    for (int i = 0; i < 14; i++) /* lost after 1 s; its link is stuck a second later */
        world_tick(w, 100);
    assert_int_equal(w->prefill.ops->counters(w->prefill.core).routers_lost, 1);
    assert_true(w->wire_count > 0);
    assert_int_equal(deliver_and_count(w, PD_NOTICE_ABORT, &notice), 1);
    assert_true(notice.key.number == d.message.prefill_request.key.number);
    world_tick(w, 100);
    assert_int_equal(deliver_and_count(w, PD_NOTICE_ABORT, &notice), 1);
    assert_true(notice.key.number == 0 && notice.key.router == WORLD_ROUTER);
    w->letters_count = 0;
    world_check_nothing_held(w);
    world_destroy(w);
}

/* Its router gave the receiver up, which only stands still: what was sent lands when it goes on,
 * and another router may be waiting for it there. */
static void what_was_sent_to_a_receiver_that_was_given_up_may_land_until_it_has_ended(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    uint64_t receiver = w->decode.options.incarnation;
    pd_message gone = {.kind = PD_MSG_PEER_GONE};
    direct d;

    make_direct(w, &d, 100, 5);
    send_direct(w, &d);
    finish_steps(w);
    while (world_deliver(w)) {
    }
    assert_true(last_done(w)->may_land);
    gone.peer_gone.incarnation = receiver;
    gone.peer_gone.may_write = true;
    world_to(w, &w->prefill, &gone);
    while (world_deliver(w)) {
    }
    assert_false(w->link_up);
    w->prefill.ops->peer_dead(w->prefill.core, receiver, w->now_ns); /* it writes here no more */
    ship_again(w, &d, 0, 0, 1);
    assert_int_equal(last_done(w)->status, PD_E_NOT_FOUND);
    assert_true(last_done(w)->may_land);
    w->prefill.ops->peer_ended(w->prefill.core, receiver);
    ship_again(w, &d, 0, 0, 1);
    assert_false(last_done(w)->may_land);
    world_destroy(w);
}

/* A router that is late believes in an older process of the same name, or has given up one that
 * another router has still: that one must hear that its link is gone, to offer it again. */
static void a_link_that_one_router_ends_is_told_to_all(void **state)
{
    (void)state;
    for (int replaced = 0; replaced < 2; replaced++) {
        world *w = world_create(&(world_setup){.seed = 1});
        uint64_t receiver = w->decode.options.incarnation;
        pd_message message = {.kind = PD_MSG_PEER_GONE};

        w->letters_count = 0;
        message.peer_gone.incarnation = receiver;
        message.peer_gone.may_write = true;
        if (replaced) {
            w->decode.options.incarnation = receiver + 1; /* whom the router names now */
            world_say_peer_up(w);
            w->decode.options.incarnation = receiver;
        } else {
            world_to(w, &w->prefill, &message);
        }
        assert_true(w->letters_count > 0);
        const pd_msg_link *link = &w->letters[0].message.link;
        assert_int_equal(w->letters[0].message.kind, PD_MSG_LINK);
        assert_string_equal(link->peer, "decode-0");
        assert_int_equal(link->peer_incarnation, receiver);
        assert_false(link->up);
        w->letters_count = 0;
        world_destroy(w);
    }
}

/* Whoever has a notice that says "again" takes it for the last writing. */
static void the_first_writing_never_says_that_it_is_the_second(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    uint32_t first[WORLD_GROUPS][8] = {0}, again[WORLD_GROUPS][8] = {0};
    direct d;

    make_direct(w, &d, 100, 5);
    send_direct(w, &d);
    assert_true(world_end_step(w, &w->prefill)); /* a chunk: some blocks have left */
    ship_again(w, &d, 0, 0, 1);
    ship_again(w, &d, 1, 0, 7); /* those that have not left among them */
    count_writings(w, first, again);
    finish_steps(w);
    count_writings(w, first, again);
    for (uint32_t g = 0; g < WORLD_GROUPS; g++) {
        for (uint32_t i = 0; i < 7; i++) {
            assert_int_equal(first[g][i], 1);
            assert_int_equal(again[g][i], g == 1 || (g == 0 && i == 0));
        }
    }
    assert_int_equal(last_done(w)->again, 2);
    release(w, &d);
    world_check_nothing_held(w);
    w->letters_count = 0;
    world_destroy(w);
}

/* Who asks after the link broke hears that what it carried may land still, and a request that
 * comes once more is not computed, and above all not written, once more. */
static void what_has_ended_stays_ended(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    fail_a_write(w, &d);
    assert_true(world_deliver(w)); /* closed */
    assert_true(last_done(w)->may_land);
    ship_again(w, &d, 0, 0, 1);
    assert_int_equal(last_done(w)->status, PD_E_NOT_FOUND);
    assert_true(last_done(w)->may_land);
    send_direct(w, &d);
    assert_null(w->prefill.running);
    assert_int_equal(last_done(w)->status, PD_E_CANCELLED);
    assert_true(last_done(w)->may_land);
    w->letters_count = 0;
    world_check_nothing_held(w);
    world_destroy(w);
}

static void blocks_are_shipped_again_once(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    make_direct(w, &d, 100, 5);
    send_direct(w, &d);
    finish_steps(w);
    ship_again(w, &d, 1, 2, 3); /* while the first writing is under way */
    while (world_deliver(w)) {
    }
    assert_int_equal(last_done(w)->again, 1);
    assert_int_equal(last_done(w)->status, PD_OK);
    uint32_t before = w->shipments;
    ship_again(w, &d, 1, 3, 1); /* the same word, twice on its way */
    assert_int_equal(w->shipments, before);
    assert_int_equal(last_done(w)->again, 1);
    ship_again(w, &d, 2, 6, 1); /* the partial block */
    assert_int_equal(w->shipments, before + 1);
    while (world_deliver(w)) {
    }
    assert_int_equal(last_done(w)->again, 2);
    ship_again(w, &d, WORLD_GROUPS, 0, 1); /* no such group: answered, and nothing leaves */
    assert_int_equal(w->shipments, before + 1);
    assert_int_equal(last_done(w)->again, 3);
    release(w, &d);
    ship_again(w, &d, 2, 6, 1); /* too late */
    assert_int_equal(last_done(w)->status, PD_E_NOT_FOUND);
    assert_int_equal(last_done(w)->again, 1);
    world_check_nothing_held(w);
    w->letters_count = 0;
    world_destroy(w);
}

static void copies_are_held_until_somebody_ends_that(void **state)
{
    (void)state;
    enum { RELEASE, EARLY_RELEASE, CANCEL, DEADLINE, ROUTER, CASES };
    for (int how = 0; how < CASES; how++) {
        world *w = world_create(&(world_setup){.seed = 1});
        direct d;
        make_direct(w, &d, 100, 5);
        d.message.prefill_request.hold_ms = 500; /* the deadline of computing is not theirs */
        d.message.prefill_request.deadline_ms = 100;
        send_direct(w, &d);
        finish_steps(w);
        if (how == EARLY_RELEASE)
            release(w, &d);
        assert_int_equal(w->prefill.ops->ledger(w->prefill.core).running, 7);
        while (world_deliver(w)) {
        }
        assert_int_equal(letters_of(w, PD_MSG_PREFILL_DONE), 1);
        if (how != EARLY_RELEASE)
            assert_int_equal(w->prefill.ops->ledger(w->prefill.core).running, 7);
        if (how == RELEASE) {
            release(w, &d);
        } else if (how == CANCEL) {
            pd_message message = {.kind = PD_MSG_CANCEL};
            message.cancel.key = d.message.prefill_request.key;
            world_to(w, &w->prefill, &message);
        } else if (how == DEADLINE) {
            for (int i = 0; i < 6; i++)
                world_tick(w, 100);
        } else if (how == ROUTER) {
            w->router_silent = true;
            for (int i = 0; i < 11; i++)
                world_tick(w, 100);
        }
        world_check_nothing_held(w);
        /* its last word is said already */
        assert_int_equal(letters_of(w, PD_MSG_PREFILL_DONE), 1);
        world_destroy(w);
    }
}

static void leaving_cancels_everything(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});

    for (int i = 0; i < 12; i++)
        world_ask_random(w);
    for (int i = 0; i < 60; i++)
        world_turn(w);
    w->prefill.ops->drain(w->prefill.core);
    w->decode.ops->drain(w->decode.core);
    w->prefill.ops->cancel_all(w->prefill.core, w->now_ns);
    w->decode.ops->cancel_all(w->decode.core, w->now_ns);
    assert_true(world_settle(w));
    world_check_nothing_held(w);
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_be_meant_is_refused),
        cmocka_unit_test(a_full_queue_refuses),
        cmocka_unit_test(a_request_that_comes_twice_is_one_request),
        cmocka_unit_test(a_deadline_ends_a_request_queued_or_running),
        cmocka_unit_test(a_prompt_without_room_in_time_is_refused),
        cmocka_unit_test(a_stuck_link_is_closed_so_that_a_cancel_can_end),
        cmocka_unit_test(a_failed_write_ends_its_request_after_the_link),
        cmocka_unit_test(who_asks_is_told_apart_from_the_dead),
        cmocka_unit_test(a_cancelled_shipment_waits_for_its_closing_link),
        cmocka_unit_test(a_link_that_one_router_ends_is_told_to_all),
        cmocka_unit_test(a_link_lost_before_the_first_block_leaves_nothing_to_land),
        cmocka_unit_test(blocks_a_decode_worker_holds_are_not_shipped),
        cmocka_unit_test(the_time_on_the_wire_of_every_write_is_reported),
        cmocka_unit_test(it_says_that_it_has_started_until_it_knows_the_targets),
        cmocka_unit_test(groups_leave_while_later_ones_are_computed),
        cmocka_unit_test(what_the_carrier_has_no_room_for_leaves_later),
        cmocka_unit_test(an_end_token_first_stops_the_shipping),
        cmocka_unit_test(what_was_sent_to_a_receiver_that_was_given_up_may_land_until_it_has_ended),
        cmocka_unit_test(the_first_writing_never_says_that_it_is_the_second),
        cmocka_unit_test(what_has_ended_stays_ended),
        cmocka_unit_test(blocks_are_shipped_again_once),
        cmocka_unit_test(copies_are_held_until_somebody_ends_that),
        cmocka_unit_test(leaving_cancels_everything),
        cmocka_unit_test(that_all_is_written_is_said_behind_the_last_block),
        cmocka_unit_test(the_last_word_on_a_lost_router_comes_behind_its_blocks),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
