/* Both cores together: every answer right, nothing leaks, whatever happens in whatever order. */
#include "tests/unit/workers/world.h"

#include "common/base/clock.h"
#include "common/base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void fill_prompt(uint32_t *prompt, uint32_t count, uint32_t salt)
{
    for (uint32_t i = 0; i < count; i++)
        prompt[i] = (uint32_t)(pd_mix64(salt * 10007ull + i) % WORLD_VOCAB);
}

static world_request *ask(world *w, uint32_t count, uint32_t max_tokens, uint32_t salt)
{
    uint32_t prompt[WORLD_PROMPT_MAX];

    fill_prompt(prompt, count, salt);
    return world_ask(w, prompt, count, max_tokens);
}

static void run_all(world *w)
{
    assert_true(world_settle(w));
    world_check_nothing_held(w);
}

static void answers_are_right_at_every_length(void **state)
{
    (void)state;
    for (uint32_t seals = 0; seals < 2; seals++) {
        for (uint32_t count = 1; count <= 70; count++) {
            world *w = world_create(&(world_setup){.seed = count, .seals = seals != 0});
            world_request *r = ask(w, count, 20, 1);
            run_all(w);
            assert_int_equal(r->phase, WORLD_FINISHED);
            assert_int_equal(r->finish, PD_FINISH_LENGTH);
            assert_int_equal(r->answer_count, 20);
            assert_int_equal(r->prefill_status, PD_OK);
            world_destroy(w);
        }
    }
}

static void a_warm_cache_changes_nothing_but_the_work(void **state)
{
    (void)state;
    const uint32_t lengths[] = {15, 16, 17, 31, 32, 33, 64, 100};

    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        world *w = world_create(&(world_setup){.seed = i, .seals = true});
        for (int again = 0; again < 4; again++) {
            world_request *r = ask(w, lengths[i], 9, 3);
            run_all(w);
            assert_int_equal(r->phase, WORLD_FINISHED);
            assert_int_equal(r->answer_count, 9);
            /* one token at least is computed */
            assert_int_equal(r->cached_tokens, again == 0 ? 0 : (lengths[i] - 1) / 16 * 16);
        }
        /* the last full block is known too: a longer prompt finds it */
        uint32_t prompt[WORLD_PROMPT_MAX];
        fill_prompt(prompt, lengths[i], 3);
        prompt[lengths[i]] = 5;
        world_request *r = world_ask(w, prompt, lengths[i] + 1, 3);
        run_all(w);
        assert_int_equal(r->cached_tokens, lengths[i] / 16 * 16);
        world_destroy(w);
    }
}

static void an_answers_blocks_are_found_by_the_next_turn(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5, .seals = true});
    world_request *first = ask(w, 40, 40, 3);
    uint32_t prompt[WORLD_PROMPT_MAX];
    pd_role_counters before;

    run_all(w);
    memcpy(prompt, first->prompt, 40 * sizeof *prompt);
    memcpy(prompt + 40, first->answer, 40 * sizeof *prompt);
    before = w->decode.ops->counters(w->decode.core);
    world_ask(w, prompt, 80, 2);
    run_all(w);
    /* KV of 79 tokens was there: 4 full blocks */
    assert_int_equal(w->decode.ops->counters(w->decode.core).tokens_cached - before.tokens_cached,
                     64);
    world_destroy(w);
}

static void without_a_cache_everything_is_free_at_the_end(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5, .no_cache = true});

    ask(w, 64, 4, 3);
    run_all(w);
    world_request *r = ask(w, 64, 4, 3);
    run_all(w);
    assert_int_equal(r->cached_tokens, 0);
    assert_int_equal(w->prefill.ops->ledger(w->prefill.core).cached, 0);
    assert_int_equal(w->decode.ops->ledger(w->decode.core).cached, 0);
    world_destroy(w);
}

static void max_tokens_1_never_ships(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5});
    world_request *r = ask(w, 50, 1, 3);

    run_all(w);
    assert_int_equal(r->phase, WORLD_FINISHED);
    assert_int_equal(r->finish, PD_FINISH_LENGTH);
    assert_int_equal(r->answer_count, 1);
    assert_int_equal(r->prefill_status, PD_OK);
    assert_int_equal(w->prefill.ops->counters(w->prefill.core).blocks_shipped, 0);
    assert_int_equal(w->decode.ops->counters(w->decode.core).steps, 0);
    world_destroy(w);
}

static void an_end_token_first_needs_no_decode_step(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5});
    world_request *r = ask(w, 50, 10, 3);

    r->end_token = world_next_token(r->prompt, 50);
    run_all(w);
    assert_int_equal(r->phase, WORLD_FINISHED);
    assert_int_equal(r->finish, PD_FINISH_STOP);
    assert_int_equal(r->answer_count, 1);
    assert_int_equal(w->decode.ops->counters(w->decode.core).steps, 0);
    world_destroy(w);
}

static void an_end_token_later_ends_the_answer(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5});
    world_request *first = ask(w, 50, 10, 3);

    run_all(w);
    world_request *r = ask(w, 50, 10, 3);
    r->end_token = first->answer[4];
    run_all(w);
    assert_int_equal(r->finish, PD_FINISH_STOP);
    assert_int_equal(r->answer_count, 5);
    world_destroy(w);
}

static void the_contexts_end_ends_the_answer(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5, .context_max = 40});
    world_request *r = ask(w, 30, 40, 3);
    world_request *full = ask(w, 40, 5, 4);
    world_request *over = ask(w, 41, 5, 4);

    run_all(w);
    assert_int_equal(r->finish, PD_FINISH_LENGTH);
    assert_int_equal(r->answer_count, 11); /* positions 30 .. 40; the last is not read back */
    assert_int_equal(full->finish, PD_FINISH_LENGTH);
    assert_int_equal(full->answer_count, 1);
    assert_int_equal(over->status, PD_E_TOO_LARGE);
    world_destroy(w);
}

static void what_never_fits_is_refused_at_once(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5, .decode_blocks = 4, .prefill_blocks = 4});
    world_request *r = ask(w, 60, 10, 3);
    world_request *alone = ask(w, 65, 1, 3);

    run_all(w);
    assert_int_equal(r->phase, WORLD_FAILED);
    assert_int_equal(r->status, PD_E_TOO_LARGE);
    assert_int_equal(alone->prefill_status, PD_E_TOO_LARGE);
    world_destroy(w);
}

static void no_room_now_is_an_overload_that_passes(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 5, .decode_blocks = 6});
    world_request *a = ask(w, 60, 20, 3);
    world_request *b = ask(w, 60, 20, 4);

    run_all(w);
    assert_int_equal(a->phase, WORLD_FINISHED);
    assert_int_equal(b->status, PD_E_OVERLOAD);
    world_request *again = ask(w, 60, 20, 4);
    run_all(w);
    assert_int_equal(again->phase, WORLD_FINISHED);
    world_destroy(w);
}

/* Cancels a request after n turns, for every n until it would have ended by itself. */
static void a_cancel_at_any_moment_leaves_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        bool ended = false;
        for (uint32_t n = 0; !ended; n++) {
            world *w = world_create(&(world_setup){.seed = seed, .seals = true});
            world_request *r = ask(w, 100, 6, 3);
            world_request *other = ask(w, 80, 6, 3);
            for (uint32_t i = 0; i < n; i++)
                world_turn(w);
            ended = r->phase == WORLD_FINISHED;
            world_cancel(w, r);
            world_cancel(w, r); /* idempotent */
            run_all(w);
            assert_int_equal(other->phase, WORLD_FINISHED);
            if (r->prefill_asked)
                assert_true(r->prefill_ended);
            assert_true(n < 1000);
            world_destroy(w);
        }
    }
}

static void the_router_may_die_at_any_moment(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 60; n++) {
        world *w = world_create(&(world_setup){.seed = n});
        ask(w, 100, 6, 3);
        ask(w, 20, 6, 4);
        for (uint32_t i = 0; i < n; i++)
            world_turn(w);
        for (uint32_t i = 0; i < w->requests_count; i++)
            w->requests[i].phase = WORLD_CANCELLED; /* nobody answers any more */
        w->router_silent = true;
        w->letters_count = 0;
        for (int i = 0; i < 20; i++) {
            world_tick(w, 100);
            while (world_turn(w)) {
            }
        }
        world_tick(w, 100);
        while (world_turn(w)) {
        }
        world_check_nothing_held(w);
        assert_int_equal(w->decode.ops->counters(w->decode.core).routers_lost, 1);
        world_destroy(w);
    }
}

static void a_lost_router_is_not_believed_until_it_welcomes_again(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1});

    w->router_silent = true;
    for (int i = 0; i < 20; i++)
        world_tick(w, 100);
    ask(w, 40, 3, 1);
    while (world_turn(w)) {
    }
    assert_int_equal(w->decode.ops->counters(w->decode.core).requests, 0);
    pd_message message = {.kind = PD_MSG_WELCOME};
    message.welcome = (pd_msg_welcome){.router = WORLD_ROUTER, .lost_after_ms = 1000};
    world_to(w, &w->prefill, &message); /* a late one, of the session that was lost */
    world_to(w, &w->decode, &message);
    world_request *early = ask(w, 40, 3, 1);
    while (world_turn(w)) {
    }
    assert_int_equal(early->phase, WORLD_LEASING);
    assert_int_equal(w->decode.ops->counters(w->decode.core).requests, 0);
    message.welcome.session = 1;
    world_to(w, &w->prefill, &message);
    world_to(w, &w->decode, &message);
    w->router_silent = false;
    world_request *r = ask(w, 40, 3, 1);
    run_all(w);
    assert_int_equal(r->phase, WORLD_FINISHED);
    world_destroy(w);
}

static void a_worker_that_stood_still_does_not_blame_its_router(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 40; n++) {
        world *w = world_create(&(world_setup){.seed = n});
        world_tick(w, 100);
        world_request *r = ask(w, 100, 20, 3);
        for (uint32_t i = 0; i < n; i++)
            world_turn(w);
        w->router_silent = true; /* its heartbeats wait to be read */
        world_tick(w, 3000);
        w->router_silent = false;
        world_tick(w, 20);
        run_all(w);
        assert_int_equal(r->phase, WORLD_FINISHED);
        assert_int_equal(w->decode.ops->counters(w->decode.core).routers_lost, 0);
        world_destroy(w);
    }
}

static void prefill_may_die_at_any_moment(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 60; n++) {
        world *w = world_create(&(world_setup){.seed = n});
        ask(w, 100, 6, 3);
        ask(w, 20, 6, 4);
        for (uint32_t i = 0; i < n; i++)
            world_turn(w);
        world_kill_prefill(w);
        run_all(w);
        world_request *r = ask(w, 100, 6, 3);
        run_all(w);
        assert_int_equal(r->phase, WORLD_FINISHED);
        world_destroy(w);
    }
}

static void decode_may_restart_at_any_moment(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 60; n++) {
        world *w = world_create(&(world_setup){.seed = n});
        ask(w, 100, 6, 3);
        ask(w, 20, 6, 4);
        for (uint32_t i = 0; i < n; i++)
            world_turn(w);
        world_restart_decode(w);
        run_all(w);
        world_request *r = ask(w, 100, 6, 3);
        run_all(w);
        assert_int_equal(r->phase, WORLD_FINISHED);
        world_destroy(w);
    }
}

static void a_wrong_seal_is_fetched_again(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 12; n++) {
        world *w = world_create(&(world_setup){.seed = n, .seals = true});
        world_request *bad = ask(w, 100, 6, 3);
        w->corrupt_notice = 1 + n % 3;
        world_request *good = ask(w, 100, 6, 4);
        run_all(w);
        assert_int_equal(w->corrupt_notice, 0);
        assert_int_equal(w->refetches, 1);
        assert_int_equal(bad->agains + good->agains, 1);
        assert_int_equal(bad->phase, WORLD_FINISHED);
        assert_int_equal(good->phase, WORLD_FINISHED);
        world_destroy(w);
    }
}

static void a_seal_that_is_wrong_twice_fails_its_request_only(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 12; n++) {
        world *w = world_create(&(world_setup){.seed = n, .seals = true});
        world_request *bad = ask(w, 100, 6, 3);
        w->corrupt_notice = 1 + n % 3;
        w->corrupt_again = true;
        while (w->refetches == 0)
            assert_true(world_turn(w));
        world_request *good = ask(w, 100, 6, 4);
        run_all(w);
        assert_int_equal(bad->phase, WORLD_FAILED);
        assert_int_equal(bad->status, PD_E_MISMATCH);
        assert_int_equal(good->phase, WORLD_FINISHED);
        world_destroy(w);
    }
}

/* A request that goes on elsewhere has its answer so far read in as if it were prompt. */
static void an_answer_goes_on_from_where_it_was(void **state)
{
    (void)state;
    for (uint32_t n = 0; n < 150; n++) {
        world *w = world_create(&(world_setup){.seed = n, .seals = n % 2 == 0, .resume = true});
        world_request *r = ask(w, 60 + n % 20, 40, 3), *other = ask(w, 20, 40, 4);
        for (uint32_t i = 0; i < n * 2; i++)
            world_turn(w);
        if (n % 3 == 0)
            world_kill_prefill(w);
        else
            world_restart_decode(w);
        run_all(w);
        assert_int_equal(r->phase, WORLD_FINISHED);
        assert_int_equal(r->answer_count, 40);
        assert_int_equal(r->finish, PD_FINISH_LENGTH);
        assert_int_equal(other->answer_count, 40);
        world_destroy(w);
    }
}

/* The decode worker's blocks are bound when the prefill begins, and not before. */
static void a_lease_binds_when_its_prefill_begins(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 3, .max_batch = 1});
    world_request *r = ask(w, 100, 5, 3);

    assert_true(world_lease_next(w));
    assert_int_equal(w->decode.ops->ledger(w->decode.core).leased, 0);
    assert_false(w->letters[0].message.lease_reply.bound);
    assert_true(world_read_letter(w)); /* the prefill begins */
    assert_int_equal(w->letters[0].message.kind, PD_MSG_PREFILL_STARTED);
    assert_true(world_read_letter(w));
    assert_int_equal(w->decode.ops->ledger(w->decode.core).leased, 7);
    assert_true(w->letters[0].message.lease_reply.bound);
    assert_int_equal(w->letters[0].message.lease_reply.blocks_count, 7);
    run_all(w);
    assert_int_equal(r->phase, WORLD_FINISHED);
    world_destroy(w);
}

static void a_failed_step_fails_who_is_at_fault(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 3});
    world_request *a = ask(w, 30, 20, 3), *b = ask(w, 30, 20, 4);

    while (w->decode.running == NULL || w->decode.running->slices_count < 2)
        assert_true(world_turn(w));
    w->fail_next_step = true; /* of the two together: each is tried alone and both are fine */
    world_end_step(w, &w->decode);
    run_all(w);
    assert_int_equal(a->phase, WORLD_FINISHED);
    assert_int_equal(b->phase, WORLD_FINISHED);

    world_request *c = ask(w, 30, 20, 5);
    while (w->decode.running == NULL)
        assert_true(world_turn(w));
    w->fail_next_step = true; /* alone: it is the one */
    world_end_step(w, &w->decode);
    run_all(w);
    assert_int_equal(c->status, PD_E_INTERNAL);

    world_request *d = ask(w, 30, 20, 6);
    while (w->prefill.running == NULL)
        assert_true(world_turn(w));
    w->fail_next_step = true;
    world_end_step(w, &w->prefill);
    run_all(w);
    assert_int_equal(d->prefill_status, PD_E_INTERNAL);

    ask(w, 30, 20, 7); /* runs alone; the next two wait for it */
    while (w->prefill.running == NULL)
        assert_true(world_turn(w));
    world_request *e = ask(w, 20, 20, 8), *f = ask(w, 20, 20, 9);
    while (e->phase == WORLD_LEASING || f->phase == WORLD_LEASING) {
        world_lease_next(w);
        world_read_letter(w);
    }
    while (w->prefill.running->slices_count < 2)
        world_end_step(w, &w->prefill);
    w->fail_next_step = true;
    world_end_step(w, &w->prefill);
    assert_int_equal(w->prefill.running->slices_count, 1);
    run_all(w);
    assert_int_equal(e->phase, WORLD_FINISHED);
    assert_int_equal(f->phase, WORLD_FINISHED);
    world_destroy(w);
}

/* A17: small pools, shared prefixes, many at once: a block is never two requests' with different
 * content. The pools' contents are checked at every step, so a mistake fails inside. */
static void random_company_random_order(void **state)
{
    (void)state;
    const char *fixed = getenv("KVFERRY_TEST_SEED");
    uint64_t from = fixed != NULL ? strtoull(fixed, NULL, 0) : 1;
    uint64_t to = fixed != NULL ? from : 150;

    for (uint64_t seed = from; seed <= to; seed++) {
        print_message("# seed %llu\n", (unsigned long long)seed);
        uint64_t random = seed;
        world *w = world_create(&(world_setup){
            .seed = seed,
            .prefill_blocks = 26 + (uint32_t)(pd_random_next(&random) % 40),
            .decode_blocks = 28 + (uint32_t)(pd_random_next(&random) % 60),
            .chunk_tokens = 1 + (uint32_t)(pd_random_next(&random) % 100),
            .max_batch = 1 + (uint32_t)(pd_random_next(&random) % 6),
            .queue_max = 8,
            .ships_max = 1 + (uint32_t)(pd_random_next(&random) % 8),
            .token_bytes = 1u << pd_random_next(&random) % 20,
            .seals = seed % 2 == 0,
            .no_cache = seed % 7 == 0,
            .resume = seed % 4 == 0,
        });
        uint32_t finished = 0;
        for (uint32_t turn = 0; turn < 3000; turn++) {
            uint32_t what = world_random(w, 1000);
            if (what < 40 && w->requests_count < WORLD_REQUESTS_MAX)
                world_ask_random(w);
            else if (what < 50 && w->requests_count > 0)
                world_cancel(w, &w->requests[world_random(w, w->requests_count)]);
            else if (what < 52 && seed % 3 == 0)
                world_kill_prefill(w);
            else if (what < 53 && seed % 5 == 0)
                world_restart_decode(w);
            else if (what < 54)
                w->corrupt_notice = 1;
            else if (what < 55)
                w->fail_next_step = true;
            else if (what < 100)
                world_tick(w, 1 + world_random(w, 20));
            else
                world_turn(w);
        }
        assert_true(world_settle(w));
        world_check_nothing_held(w);
        for (uint32_t i = 0; i < w->requests_count; i++) {
            assert_true(w->requests[i].phase >= WORLD_FINISHED);
            finished += w->requests[i].phase == WORLD_FINISHED;
        }
        assert_true(finished > 0);
        world_destroy(w);
    }
}

/* A17 as stated: one prompt finds a cached block, the other needs every block there is. */
static void a_found_block_is_held_or_gone(void **state)
{
    (void)state;
    for (int order = 0; order < 2; order++) {
        world *w = world_create(
            &(world_setup){.seed = 9, .prefill_blocks = 8, .decode_blocks = 64, .max_batch = 8});
        ask(w, 17, 1, 1); /* leaves one cached block */
        run_all(w);
        world_request *a, *b;
        if (order == 0) {
            a = ask(w, 32, 1, 1);
            b = ask(w, 128, 1, 2);
        } else {
            b = ask(w, 128, 1, 2);
            a = ask(w, 32, 1, 1);
        }
        while (world_lease_next(w)) {
        }
        run_all(w);
        assert_int_equal(a->phase, WORLD_FINISHED);
        assert_int_equal(b->phase, WORLD_FINISHED);
        assert_int_equal(a->cached_tokens, order == 0 ? 16 : 0);
        world_destroy(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_right_at_every_length),
        cmocka_unit_test(a_warm_cache_changes_nothing_but_the_work),
        cmocka_unit_test(an_answers_blocks_are_found_by_the_next_turn),
        cmocka_unit_test(without_a_cache_everything_is_free_at_the_end),
        cmocka_unit_test(max_tokens_1_never_ships),
        cmocka_unit_test(an_end_token_first_needs_no_decode_step),
        cmocka_unit_test(an_end_token_later_ends_the_answer),
        cmocka_unit_test(the_contexts_end_ends_the_answer),
        cmocka_unit_test(what_never_fits_is_refused_at_once),
        cmocka_unit_test(no_room_now_is_an_overload_that_passes),
        cmocka_unit_test(a_cancel_at_any_moment_leaves_nothing),
        cmocka_unit_test(the_router_may_die_at_any_moment),
        cmocka_unit_test(a_lost_router_is_not_believed_until_it_welcomes_again),
        cmocka_unit_test(a_worker_that_stood_still_does_not_blame_its_router),
        cmocka_unit_test(prefill_may_die_at_any_moment),
        cmocka_unit_test(decode_may_restart_at_any_moment),
        cmocka_unit_test(a_wrong_seal_is_fetched_again),
        cmocka_unit_test(a_seal_that_is_wrong_twice_fails_its_request_only),
        cmocka_unit_test(an_answer_goes_on_from_where_it_was),
        cmocka_unit_test(a_lease_binds_when_its_prefill_begins),
        cmocka_unit_test(a_failed_step_fails_who_is_at_fault),
        cmocka_unit_test(a_found_block_is_held_or_gone),
        cmocka_unit_test(random_company_random_order),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
