/* Of requests that were being computed at a worker when it died one may be what it died of: how
 * that one is found, and the others are not taken for it. */

#include "common/base/log.h"
#include "common/wire/bus.h"
#include "tests/unit/router/world.h"

#include <inttypes.h>
#include <stdio.h>

static void who_was_in_one_death_with_another_is_not_taken_for_it(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        answer *a, *b;
        world *w = world_of_two_suspects(seed, &a, &b);
        for (int i = 0; i < 3; i++)
            fake_add(&w->fake, PD_ROLE_DECODE, 512);
        begin_to_run(w, a);
        uint32_t place = place_of(w, a);
        assert_int_not_equal(place, place_of(w, b));
        bring_down(w, place);
        assert_int_equal(a->status, 500);
        assert_string_equal(a->code, "request_suspect");
        wait_ms(w, 5000);
        assert_int_equal(counters_of(w).suspects, 1);
        assert_whole(w, b);
        world_free(w);
    }
}

static void suspects_wait_for_their_turn(void **state)
{
    (void)state;
    answer *a, *b;
    world *w = world_of_two_suspects(11, &a, &b);
    uint32_t had_a = a->next, had_b = b->next;
    fake_restart(&w->fake, 1);
    for (int i = 0; i < 40000 && (a->next == had_a || b->next == had_b); i++)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    const answer *first = a->next > had_a + 1 ? a : b;
    assert_true(first->next >=
                (first == a ? had_a : had_b) + 8); /* before the other had its turn */
    wait_ms(w, 18000);
    assert_int_equal(a->ends + b->ends, 2);
    assert_int_equal(a->next, a->max);
    assert_int_equal(b->next, b->max);
    assert_int_equal(counters_of(w).suspects, 0);
    world_free(w);
}

static void a_newcomer_is_not_held_up_by_suspects(void **state)
{
    (void)state;
    answer *a, *b;
    world *w = world_of_two_suspects(12, &a, &b);
    fake_restart(&w->fake, 1);
    while (place_of(w, a) == UINT32_MAX && place_of(w, b) == UINT32_MAX)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    answer *c = ask(w, 40, 3000); /* one of the two waits, and this one does not */
    assert_int_equal(counters_of(w).queued, 1);
    wait_ms(w, 1000);
    assert_int_equal(counters_of(w).queued, 0);
    assert_true(c->next > 0);
    world_free(w);
}

/* Its turn does not come: a worker's death must not hold up what it had for longer than this. */
static void who_waits_in_vain_goes_on_beside_another(void **state)
{
    (void)state;
    answer *a, *b;
    world *w = world_of_two_suspects(13, &a, &b);
    fake_restart(&w->fake, 1);
    while (place_of(w, a) == UINT32_MAX && place_of(w, b) == UINT32_MAX)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    w->fake.workers[1].deaf = true; /* the first one's turn takes for ever */
    assert_int_equal(counters_of(w).queued, 1);
    wait_ms(w, 600); /* lost_after, from the death on */
    assert_int_equal(counters_of(w).queued, 0);
    world_free(w);
}

/* One worker, started anew after its first death: that it died is seen when its time is over, or
 * when the new one comes before that. */
static void a_worker_that_died_twice_is_named_as_one(void **state)
{
    (void)state;
    for (int soon = 0; soon < 2; soon++) {
        world *w = one_to_one(14);
        answer *a = ask(w, 40, 3000);
        char text[ROUTER_MESSAGE_BYTES];
        for (int i = 0; i < 2; i++) {
            begin_to_run(w, a);
            fake_kill(&w->fake, 1);
            wait_ms(w, soon ? 20 : 700);
            if (i == 0 || soon)
                fake_restart(&w->fake, 1);
        }
        wait_ms(w, 20);
        assert_int_equal(a->status, 500);
        const char *name = w->fake.workers[1].name;
        snprintf(text, sizeof text,
                 "request r1 was being computed at %s, and at %s again (started anew), when it "
                 "died or fell silent: it is not given a third worker",
                 name, name);
        assert_string_equal(a->message, text);
        world_free(w);
    }
}

/* Each worker dies when it has made so many tokens there; those that died. */
static uint32_t deaths_at_token(world *w, const answer *a, uint32_t tokens)
{
    uint32_t deaths = 0;
    while (a->ends == 0 && deaths < 10) {
        uint32_t had = a->next;
        for (int i = 0; i < 200000 && a->next < had + tokens && a->ends == 0; i++)
            fake_run(&w->fake, w->fake.now_ns + 50000);
        uint32_t place = place_of(w, a);
        if (a->ends > 0 || place == UINT32_MAX)
            break;
        bring_down(w, place);
        fake_restart(&w->fake, place);
        deaths++;
    }
    return deaths;
}

static void who_kills_at_a_later_token_gets_no_third(void **state)
{
    (void)state;
    for (uint32_t tokens = 2; tokens <= 40; tokens += tokens < 10 ? 1 : 6) {
        answer *a;
        world *w = world_of_one(20 + tokens, 1, 4, &a);
        assert_int_equal(deaths_at_token(w, a, tokens), 2);
        assert_string_equal(a->code, "request_suspect");
        world_free(w);
    }
}

/* Two deaths with hundreds of tokens in between are chance; a fourth with nobody else is not. */
static void who_kills_alone_is_found_out_however_long_it_runs(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(70, 1, 4, &a);
    assert_int_equal(deaths_at_token(w, a, 300), 4);
    assert_string_equal(a->code, "request_suspect");
    world_free(w);
}

/* It had just begun where the first died, and ran for long at the second: that is cleared of the
 * first death, and a suspect for the second alone. */
static void who_ran_for_long_in_between_goes_on(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(15, 1, 4, &a);
    begin_to_run(w, a);
    for (int i = 0; i < 2; i++) {
        bring_down(w, place_of(w, a));
        wait_for_token(w, a, a->next + 200);
    }
    bring_down(w, place_of(w, a));
    wait_ms(w, 15000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).suspects, 0);
    world_free(w);
}

/* The word that all has landed dies with the worker that computes behind it. */
static void a_decode_worker_that_dies_with_its_word_counts(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(16, 1, 4, &a);
    w->fake.lose[PD_MSG_LANDED] = 100;
    uint32_t deaths = 0;
    for (; a->ends == 0 && deaths < 10; deaths++) {
        uint32_t place = UINT32_MAX, had = a->next;
        for (int i = 0; i < 40000 && a->ends == 0 && place == UINT32_MAX; i++) {
            fake_run(&w->fake, w->fake.now_ns + 20000);
            if (a->next > had) /* the first token is the prefill worker's */
                place = place_of(w, a);
        }
        if (place == UINT32_MAX)
            break;
        bring_down(w, place);
        fake_restart(&w->fake, place);
    }
    assert_int_equal(deaths, 2);
    assert_string_equal(a->code, "request_suspect");
    world_free(w);
}

/* The worker, of the first ones, that has shipped nothing yet of what it computed. */
static uint32_t who_ships(const world *w, uint32_t workers)
{
    for (uint32_t i = 0; i < workers; i++) {
        const fake_worker *worker = &w->fake.workers[i];
        for (uint32_t k = 0; worker->alive && k < worker->prefills; k++) {
            if (worker->prompts[k].computed && !worker->prompts[k].shipped)
                return i;
        }
    }
    return UINT32_MAX;
}

static void a_prefill_worker_that_dies_while_it_ships_counts(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(17, 4, 1, &a);
    uint32_t deaths = 0;
    while (a->ends == 0 && deaths < 10) {
        uint32_t place = UINT32_MAX;
        for (int i = 0; i < 400000 && a->ends == 0 && place == UINT32_MAX; i++) {
            fake_run(&w->fake, w->fake.now_ns + 50000);
            place = who_ships(w, 4);
        }
        if (place == UINT32_MAX)
            break;
        bring_down(w, place);
        deaths++;
        wait_ms(w, 10);
    }
    assert_in_range(deaths, 2, 2);
    assert_string_equal(a->code, "request_suspect");
    world_free(w);
}

/* That its first step runs is said in a message that dies with the worker. */
static void a_prefill_worker_that_dies_unheard_counts(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(18, 4, 1, &a);
    w->fake.lose[PD_MSG_PREFILL_STARTED] = 100;
    uint32_t deaths = 0;
    while (a->ends == 0 && deaths < 10) {
        uint32_t place = UINT32_MAX;
        for (int i = 0; i < 40000 && a->ends == 0 && place == UINT32_MAX; i++) {
            fake_run(&w->fake, w->fake.now_ns + 20000);
            for (uint32_t k = 0; k < 4; k++) {
                if (w->fake.workers[k].alive && w->fake.workers[k].prefills > 0)
                    place = k;
            }
        }
        if (place == UINT32_MAX)
            break;
        bring_down(w, place);
        deaths++;
    }
    assert_int_equal(deaths, 2);
    assert_string_equal(a->code, "request_suspect");
    world_free(w);
}

/* One that was convicted had left it alive: what it dies of long afterwards is another matter. */
static void a_conviction_excuses_no_later_death(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(3, 1, 1, &a);
    begin_to_run(w, a);
    uint32_t left = place_of(w, a);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 1);
    w->fake.decode_status = PD_E_IO; /* it fails it by a message, and is well */
    while (place_of(w, a) == left)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    w->fake.decode_status = PD_OK;
    for (int i = 0; i < 2; i++) {
        begin_to_run(w, a);
        assert_int_not_equal(place_of(w, a), left);
        bring_down(w, place_of(w, a));
    }
    assert_string_equal(a->code, "request_suspect");
    wait_ms(w, 10000);
    answer *b = ask(w, 40, 3000);
    begin_to_run(w, b);
    assert_int_equal(place_of(w, b), left); /* there is no other */
    bring_down(w, left);
    fake_restart(&w->fake, left);
    begin_to_run(w, b);
    bring_down(w, left);
    assert_string_equal(b->code, "request_suspect");
    world_free(w);
}

/* What runs at a worker that an operator kills does not wait for a turn, however many they are. */
static void who_had_run_in_company_does_not_wait(void **state)
{
    (void)state;
    world *w = one_to_one(19);
    answer *all[6];
    for (uint32_t i = 0; i < 6; i++)
        all[i] = ask(w, 40, 1000);
    for (uint32_t i = 0; i < 6; i++)
        wait_for_token(w, all[i], 20);
    bring_down(w, 1);
    fake_restart(&w->fake, 1);
    uint32_t had[6];
    for (uint32_t i = 0; i < 6; i++)
        had[i] = all[i]->next;
    wait_ms(w, 300); /* less than lost_after */
    for (uint32_t i = 0; i < 6; i++)
        assert_true(all[i]->next > had[i]);
    assert_int_equal(counters_of(w).queued, 0);
    world_free(w);
}

/* Its decode worker fails it by a message, and is well. */
static void fail_there(world *w, const answer *a)
{
    uint32_t place = place_of(w, a);
    w->fake.decode_status = PD_E_IO;
    for (int i = 0; i < 40000 && place_of(w, a) == place; i++)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    w->fake.decode_status = PD_OK;
    assert_int_not_equal(place_of(w, a), place);
}

/* A worker that failed it a moment before it became a suspect may be dying of it: it is no place
 * for another suspect until that is known. */
static void whom_a_suspect_left_before_it_was_one_stays_free_of_others(void **state)
{
    (void)state;
    world *w = one_to_one(31);
    answer *a = ask(w, 40, 3000);
    begin_to_run(w, a);
    uint32_t second = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 5);
    fail_there(w, a);
    uint64_t left_ns = w->fake.now_ns;
    begin_to_run(w, a);
    w->fake.workers[1].free = 0; /* so that the next one goes to the second, too */
    answer *b = ask(w, 40, 300);
    begin_to_run(w, b);
    assert_int_equal(place_of(w, a), second);
    assert_int_equal(place_of(w, b), second);
    stall(w, second, true); /* it has only begun, and so it waits for its turn */
    w->fake.workers[1].free = 512;
    uint32_t third = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 5);
    end_process(w, second);
    begin_to_run(w, a);
    assert_int_equal(place_of(w, a), third);
    stall(w, third, true); /* it stays a suspect */
    fake_run(&w->fake, left_ns + 450 * PD_NS_PER_MS);
    assert_int_equal(place_of(w, b), UINT32_MAX);
    assert_int_equal(counters_of(w).queued, 1);
    begin_to_run(w, b); /* it has outlived that */
    assert_int_equal(place_of(w, b), 1);
    stall(w, third, false);
    wait_ms(w, 5000);
    assert_int_equal(counters_of(w).suspects, 0);
    assert_whole(w, b);
    world_free(w);
}

/* Its client left while it was computed: its worker may die of it yet. Where it does, that is over
 * for the one that comes next. */
static void where_a_suspect_ended_early_stays_free_of_others(void **state)
{
    (void)state;
    for (int dies = 0; dies < 2; dies++) {
        answer *a, *b;
        world *w = world_of_two_suspects(32, &a, &b);
        uint32_t had_a = a->next, had_b = b->next;
        fake_restart(&w->fake, 1);
        for (int i = 0; i < 40000 && a->next < had_a + 2 && b->next < had_b + 2; i++)
            fake_run(&w->fake, w->fake.now_ns + 50000);
        answer *first = a->next > had_a ? a : b, *other = first == a ? b : a;
        first->cancelled = true;
        router_core_cancel(w->fake.core, first->handle, w->fake.now_ns);
        wait_ms(w, dies ? 20 : 300);
        assert_int_equal(place_of(w, other), UINT32_MAX);
        assert_int_equal(counters_of(w).queued, 1);
        if (dies) {
            end_process(w, 1);
            fake_restart(&w->fake, 1);
        }
        wait_ms(w, dies ? 100 : 300); /* else it has waited for lost_after */
        assert_int_equal(place_of(w, other), 1);
        wait_ms(w, 5000);
        assert_whole(w, other);
        world_free(w);
    }
}

/* A worker that it left a moment before its second death dies in turn: nobody else is to be taken
 * for the cause. */
static void a_conviction_explains_the_death_of_whom_it_had_just_left(void **state)
{
    (void)state;
    world *w = one_to_one(33);
    answer *a = ask(w, 40, 3000);
    begin_to_run(w, a);
    end_process(w, 1);
    fake_restart(&w->fake, 1);
    begin_to_run(w, a);
    uint32_t last = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 5);
    fail_there(w, a);
    begin_to_run(w, a);
    assert_int_equal(place_of(w, a), last);
    end_process(w, last);
    assert_string_equal(a->code, "request_suspect");
    answer *b = ask(w, 40, 3000);
    begin_to_run(w, b);
    assert_int_equal(place_of(w, b), 1);
    end_process(w, 1); /* as the other one left it */
    fake_restart(&w->fake, 1);
    begin_to_run(w, b);
    end_process(w, 1); /* its first */
    fake_restart(&w->fake, 1);
    wait_ms(w, 5000);
    assert_int_equal(counters_of(w).suspects, 1);
    assert_whole(w, b);
    world_free(w);
}

/* A prefill worker that was told to let it go, and has said that it did, dies of something else. */
static void who_let_it_go_and_said_so_did_not_die_of_it(void **state)
{
    (void)state;
    for (int heard = 0; heard < 2; heard++) {
        answer *a;
        world *w = world_of_one(34, 1, 1, &a);
        w->fake.lose[PD_MSG_TARGETS] = 1; /* its prompt is computed, and what it ships waits */
        wait_for_token(w, a, 0);
        fake_add(&w->fake, PD_ROLE_PREFILL, 512);
        w->fake.workers[0].queue_ms = 10000;
        wait_ms(w, 150);
        w->fake.lose[PD_MSG_PREFILL_DONE] = heard == 0;
        fake_new_session(&w->fake, 1);
        wait_ms(w, 20);
        assert_int_equal(counters_of(w).retried, 1);
        end_process(w, 0);
        begin_to_run(w, a);
        end_process(w, 1);
        fake_restart(&w->fake, 1);
        wait_ms(w, 6000);
        if (heard) {
            assert_int_equal(counters_of(w).suspects, 0);
            assert_whole(w, a);
        } else { /* it may have died before it could say so */
            assert_string_equal(a->code, "request_suspect");
        }
        world_free(w);
    }
}

/* It stands still for want of room: no token of it is under way any more. */
static void suspend(world *w, uint32_t worker, const answer *a)
{
    fake_worker *place = &w->fake.workers[worker];
    stall(w, worker, true);
    wait_ms(w, 5);
    for (uint32_t n = 0; n < FAKE_LEASES_MAX; n++) {
        fake_lease *lease = &place->leases[n];
        if (lease->blocks == 0 || lease->prompt_first != a->first)
            continue;
        lease->suspended = true;
        pd_message message = {.kind = PD_MSG_SUSPENDED,
                              .suspended = {.key = lease->key,
                                            .answered = lease->next,
                                            .kv_tokens = lease->prompt_tokens + lease->next - 1,
                                            .blocks = lease->blocks}};
        router_core_on_message(w->fake.core, place->identity, &message, w->fake.now_ns);
    }
    stall(w, worker, false);
}

/* Beside the other one it could not be told from it at the next death. */
static void a_suspended_suspect_does_not_move(void **state)
{
    (void)state;
    for (int suspects = 0; suspects < 2; suspects++) {
        answer *a, *b;
        world *w = world_of_two_with(35, 400, &a, &b); /* not cheap to compute again */
        fake_restart(&w->fake, 1);
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
        begin_to_run(w, a);
        if (suspects == 0) /* nobody died of it here: it is none any more */
            wait_for_token(w, a, a->next + 80);
        uint32_t place = place_of(w, a);
        uint32_t had = w->fake.sent[PD_MSG_SHIP_REQUEST];
        suspend(w, place, a);
        wait_ms(w, 10);
        assert_int_equal(counters_of(w).suspended, 1);
        assert_int_equal(counters_of(w).gave_way, suspects);
        assert_int_equal(counters_of(w).moves, 1 - suspects);
        assert_int_equal(w->fake.sent[PD_MSG_SHIP_REQUEST], had + 1 - suspects);
        wait_ms(w, 6000);
        assert_int_equal(counters_of(w).suspects, 0);
        assert_whole(w, a);
        world_free(w);
    }
}

/* Where one is known to have been computed, what was still on its way in did not kill. */
static void who_waited_for_its_blocks_beside_one_that_ran_is_not_blamed(void **state)
{
    (void)state;
    world *w = one_to_one(36);
    answer *a = ask(w, 40, 3000);
    begin_to_run(w, a);
    w->fake.lose[PD_MSG_TARGETS] = 1;
    answer *b = ask(w, 40, 3000);
    wait_for_token(w, b, 0);
    end_process(w, 1);
    assert_int_equal(counters_of(w).retried, 2);
    a->cancelled = true;
    router_core_cancel(w->fake.core, a->handle, w->fake.now_ns);
    for (int i = 0; i < 2; i++) { /* then its own first death */
        fake_restart(&w->fake, 1);
        begin_to_run(w, b);
        if (i == 0)
            end_process(w, 1);
    }
    wait_ms(w, 6000);
    assert_int_equal(counters_of(w).suspects, 0);
    assert_whole(w, b);
    world_free(w);
}

/* A worker that it left dies: what it may have died of when that was a moment ago, and not when it
 * had lived on for longer than lost_after. */
static void whom_it_left_long_ago_did_not_die_of_it(void **state)
{
    (void)state;
    for (int long_ago = 0; long_ago < 2; long_ago++) {
        answer *a;
        world *w = world_of_one(160, 1, 1, &a);
        begin_to_run(w, a);
        uint32_t left = place_of(w, a), second = fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 5);
        fail_there(w, a);
        for (int i = 0; i < 40000 && place_of(w, a) != second; i++)
            fake_run(&w->fake, w->fake.now_ns + 50000);
        begin_to_run(w, a);
        stall(w, second, true); /* nor has it made so many tokens that it is cleared */
        wait_ms(w, long_ago ? 600 : 5);
        stall(w, second, false);
        end_process(w, left);
        begin_to_run(w, a);
        assert_int_equal(place_of(w, a), second);
        end_process(w, second);
        fake_restart(&w->fake, second);
        wait_ms(w, 15000);
        assert_int_equal(counters_of(w).suspects, !long_ago);
        if (long_ago)
            assert_whole(w, a);
        world_free(w);
    }
}

/* All was shipped, and only the word that it landed is missing: that counts as computed, beside one
 * that ran. */
static void whose_blocks_were_all_shipped_is_blamed_beside_one_that_ran(void **state)
{
    (void)state;
    world *w = one_to_one(39);
    answer *a = ask(w, 40, 3000);
    begin_to_run(w, a);
    w->fake.lose[PD_MSG_LANDED] = 1;
    answer *b = ask(w, 40, 3000);
    wait_for_token(w, b, 0);
    for (int i = 0; i < 20; i++) { /* of both: no token may say so */
        stall(w, 1, true);
        wait_ms(w, 1);
    }
    assert_int_equal(b->next, 1);
    end_process(w, 1);
    assert_int_equal(counters_of(w).retried, 2);
    a->cancelled = true;
    router_core_cancel(w->fake.core, a->handle, w->fake.now_ns);
    fake_restart(&w->fake, 1);
    begin_to_run(w, b);
    end_process(w, 1);
    assert_string_equal(b->code, "request_suspect");
    world_free(w);
}

/* Nobody else was there: however long it had run, it is the first to be suspected. */
static void who_was_alone_waits_for_its_turn(void **state)
{
    (void)state;
    world *w = one_to_one(38);
    uint32_t second = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    answer *b = ask(w, 40, 1000);
    begin_to_run(w, b);
    assert_int_equal(place_of(w, b), 1);
    wait_ms(w, 5);
    w->fake.workers[1].free = 0; /* so that the next one is alone elsewhere */
    answer *a = ask(w, 40, 1000);
    wait_for_token(w, a, 20);
    assert_int_equal(place_of(w, a), second);
    end_process(w, second);
    end_process(w, 1);
    w->fake.workers[1].free = 512;
    fake_restart(&w->fake, 1);
    begin_to_run(w, b);
    stall(w, 1, true); /* it stays a suspect */
    wait_ms(w, 300);   /* less than lost_after */
    assert_int_equal(place_of(w, a), UINT32_MAX);
    assert_int_equal(counters_of(w).queued, 1);
    stall(w, 1, false);
    wait_ms(w, 5000);
    assert_whole(w, a);
    world_free(w);
}

/* A third one, whose turn has ended: of the two that met twice none comes beside it. */
static void whose_turn_has_ended_does_not_come_beside_one_that_stays_apart(void **state)
{
    (void)state;
    world *w = one_to_one(37);
    answer *c = ask(w, 40, 1000); /* it has run in company, and does not wait */
    wait_for_token(w, c, 12);
    answer *a = ask_with(w, 40, 1000, 1), *b = ask_with(w, 40, 1000, 1);
    begin_to_run(w, a);
    if (b->next < 2)
        begin_to_run(w, b);
    end_process(w, 1);
    fake_restart(&w->fake, 1);
    /* All three meet again: c at once, the second of the others when its turn has ended. */
    for (int i = 0; i < 800; i++) {
        stall(w, 1, true);
        wait_ms(w, 1);
    }
    assert_int_equal(counters_of(w).queued, 0);
    stall(w, 1, false);
    wait_ms(w, 5);
    end_process(w, 1);
    assert_int_equal(counters_of(w).suspects, 0);
    fake_restart(&w->fake, 1);
    for (int i = 0; i < 800; i++) { /* the first one that keeps its distance for ever is there */
        stall(w, 1, true);
        wait_ms(w, 1);
    }
    assert_int_equal(place_of(w, a) == 1 || place_of(w, b) == 1, 1);
    assert_int_equal(place_of(w, c), UINT32_MAX);
    assert_int_equal(counters_of(w).queued, 2);
    stall(w, 1, false);
    wait_ms(w, 8000);
    assert_int_equal(counters_of(w).suspects, 0);
    assert_whole(w, c);
    world_free(w);
}

/* There is one prefill worker, so that the second finds it taken; of decode workers there is room
 * beside others that are no suspects, if not the cheapest. */
static void who_shares_a_prefill_worker_still_goes_apart_to_decode(void **state)
{
    (void)state;
    for (uint64_t seed = 80; seed < 90; seed++) {
        world *w = one_to_one(seed);
        answer *all[5];
        for (uint32_t i = 0; i < 5; i++) {
            if (i == 3)
                fake_add(&w->fake, PD_ROLE_DECODE, 512);
            wait_ms(w, i == 3 ? 100 : 0);
            all[i] = ask(w, 40, 1000);
            wait_for_token(w, all[i], 20);
        }
        uint32_t busy = place_of(w, all[0]), dies = place_of(w, all[3]);
        assert_int_not_equal(busy, dies);
        assert_int_equal(place_of(w, all[4]), dies);
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 100);
        bring_down(w, dies);
        wait_for_token(w, all[3], all[3]->next + 3);
        wait_for_token(w, all[4], all[4]->next + 3);
        assert_int_not_equal(place_of(w, all[3]), place_of(w, all[4]));
        world_free(w);
    }
}

/* A host is lost: its workers' deaths are heard of one by one, and whoever was at the first must
 * not be given to the others meanwhile, to be taken for what they died of. */
static void who_is_at_one_of_several_that_die_together_is_not_blamed_for_all(void **state)
{
    (void)state;
    for (uint64_t seed = 100; seed < 120; seed++) {
        answer *a;
        world *w = world_of_one(seed, 2, 2, &a);
        begin_to_run(w, a);
        uint32_t place = place_of(w, a);
        fake_kill(&w->fake, place);
        wait_ms(w, 5 * (seed - 100)); /* they were heard of last one after the other */
        for (uint32_t i = 0; i < 2; i++)
            fake_kill(&w->fake, i); /* the prefill workers; another decode worker lives */
        wait_ms(w, 1000);
        assert_int_equal(counters_of(w).workers_lost, 3);
        for (uint32_t i = 0; i < 2; i++)
            fake_restart(&w->fake, i);
        wait_ms(w, 15000);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).suspects, 0);
        world_free(w);
    }
}

/* Two that need not wait, a worker that has said nothing since, and one that has: they share that
 * one, sooner than that one of them is given to a worker that may have died with the first. */
static void who_need_not_wait_shares_rather_than_to_go_to_one_unheard(void **state)
{
    (void)state;
    for (uint64_t seed = 150; seed < 156; seed++) {
        world *w = one_to_one(seed);
        answer *a = ask(w, 40, 1000), *b = ask(w, 40, 1000);
        wait_for_token(w, a, 12);
        wait_for_token(w, b, 12);
        uint32_t second = fake_add(&w->fake, PD_ROLE_DECODE, 512);
        uint32_t third = fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 110);
        fake_kill(&w->fake, second);
        end_process(w, 1);
        for (int i = 0; i < 300; i++) { /* less than lost_after; they stay suspects */
            stall(w, third, true);
            wait_ms(w, 1);
        }
        assert_true(has_lease(&w->fake.workers[third], a));
        assert_true(has_lease(&w->fake.workers[third], b));
        assert_int_equal(counters_of(w).retried, 2);
        world_free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_was_in_one_death_with_another_is_not_taken_for_it),
        cmocka_unit_test(suspects_wait_for_their_turn),
        cmocka_unit_test(a_newcomer_is_not_held_up_by_suspects),
        cmocka_unit_test(who_waits_in_vain_goes_on_beside_another),
        cmocka_unit_test(a_worker_that_died_twice_is_named_as_one),
        cmocka_unit_test(who_kills_at_a_later_token_gets_no_third),
        cmocka_unit_test(who_kills_alone_is_found_out_however_long_it_runs),
        cmocka_unit_test(who_ran_for_long_in_between_goes_on),
        cmocka_unit_test(a_decode_worker_that_dies_with_its_word_counts),
        cmocka_unit_test(a_prefill_worker_that_dies_while_it_ships_counts),
        cmocka_unit_test(a_prefill_worker_that_dies_unheard_counts),
        cmocka_unit_test(a_conviction_excuses_no_later_death),
        cmocka_unit_test(who_had_run_in_company_does_not_wait),
        cmocka_unit_test(whom_a_suspect_left_before_it_was_one_stays_free_of_others),
        cmocka_unit_test(where_a_suspect_ended_early_stays_free_of_others),
        cmocka_unit_test(a_conviction_explains_the_death_of_whom_it_had_just_left),
        cmocka_unit_test(who_let_it_go_and_said_so_did_not_die_of_it),
        cmocka_unit_test(a_suspended_suspect_does_not_move),
        cmocka_unit_test(who_waited_for_its_blocks_beside_one_that_ran_is_not_blamed),
        cmocka_unit_test(whose_blocks_were_all_shipped_is_blamed_beside_one_that_ran),
        cmocka_unit_test(whom_it_left_long_ago_did_not_die_of_it),
        cmocka_unit_test(who_was_alone_waits_for_its_turn),
        cmocka_unit_test(whose_turn_has_ended_does_not_come_beside_one_that_stays_apart),
        cmocka_unit_test(who_shares_a_prefill_worker_still_goes_apart_to_decode),
        cmocka_unit_test(who_is_at_one_of_several_that_die_together_is_not_blamed_for_all),
        cmocka_unit_test(who_need_not_wait_shares_rather_than_to_go_to_one_unheard),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
