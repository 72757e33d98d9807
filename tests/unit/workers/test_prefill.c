/* What a prefill worker does when things around it fail. */
#include "tests/unit/workers/world.h"

#include "common/base/clock.h"
#include "common/base/log.h"

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

static void a_failed_write_ends_its_request_after_the_link(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});
    direct d;

    make_direct(w, &d, 40, 5);
    send_direct(w, &d);
    assert_true(world_end_step(w, &w->prefill));
    for (uint32_t i = 0; i < w->wire_count; i++)
        w->wire[i].receiver = 1; /* somebody else's memory by now */
    while (!w->link_closing)
        assert_true(world_deliver(w));
    read_letters(w);
    assert_false(w->requests[0].prefill_ended);
    assert_true(world_deliver(w)); /* closed */
    read_letters(w);
    assert_int_equal(w->requests[0].prefill_status, PD_E_PEER);
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
        cmocka_unit_test(a_stuck_link_is_closed_so_that_a_cancel_can_end),
        cmocka_unit_test(a_failed_write_ends_its_request_after_the_link),
        cmocka_unit_test(blocks_a_decode_worker_holds_are_not_shipped),
        cmocka_unit_test(the_time_on_the_wire_of_every_write_is_reported),
        cmocka_unit_test(leaving_cancels_everything),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
