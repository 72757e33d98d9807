/* Workers that were taken for dead and are heard again, or not: what that means for the requests
 * that were computed there. */

#include "common/base/log.h"
#include "common/wire/bus.h"
#include "tests/unit/router/world.h"

#include <inttypes.h>
#include <stdio.h>

/* Cut off for longer than lost_after, and heard again: nobody brought it down. */
static void who_was_at_a_worker_that_was_only_silent_is_no_suspect(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(140, 1, 6, &a);
    begin_to_run(w, a);
    for (int times = 0; times < 3; times++) { /* one after the other, a few tokens in between */
        fake_worker *silent = &w->fake.workers[place_of(w, a)];
        uint64_t lost = counters_of(w).workers_lost;
        silent->mute = true;
        for (int i = 0; i < 100 && counters_of(w).workers_lost == lost; i++)
            wait_ms(w, 20);
        assert_int_equal(counters_of(w).workers_lost, lost + 1);
        begin_to_run(w, a);
        silent->mute = false; /* it goes on, is heard, and told to come anew */
    }
    wait_ms(w, 20000);
    assert_int_equal(counters_of(w).suspects, 0);
    assert_whole(w, a);
    world_free(w);
}

static uint32_t fresh_place(world *w, const answer *a, uint32_t been)
{
    for (int n = 0; n < 4000; n++) {
        for (uint32_t i = 0; i < w->fake.workers_count; i++) {
            if (w->fake.workers[i].role == PD_ROLE_DECODE && has_lease(&w->fake.workers[i], a) &&
                !(been >> i & 1))
                return i;
        }
        fake_run(&w->fake, w->fake.now_ns + 50000);
    }
    fail();
    return 0;
}

static void fall_silent(world *w, uint32_t at)
{
    uint64_t lost = counters_of(w).workers_lost;
    w->fake.workers[at].mute = true;
    for (int i = 0; i < 400 && counters_of(w).workers_lost == lost; i++)
        wait_ms(w, 5);
    assert_int_equal(counters_of(w).workers_lost, lost + 1);
}

/* Each is heard again, but only when the request has made 64 tokens elsewhere. */
static void four_silences_that_are_taken_back_late_convict_nobody(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(141, 1, 6, &a);
    uint32_t been = 0;
    begin_to_run(w, a);
    for (int times = 0; times < 4; times++) {
        uint32_t at = fresh_place(w, a, been);
        been |= 1u << at;
        fall_silent(w, at);
        if (a->ends)
            fail_msg("silence %d: %d %s: %s", times + 1, a->status, a->code, a->message);
        wait_for_token(w, a, a->next + 70);
        w->fake.workers[at].mute = false;
        wait_ms(w, 110);
    }
    world_free(w);
}

/* Where it was not before, and has begun. been: a bit a worker. */
static uint32_t run_elsewhere(world *w, const answer *a, uint32_t *been)
{
    uint32_t at = fresh_place(w, a, *been);
    begin_to_run(w, a);
    *been |= 1u << at;
    return at;
}

/* cut off both ways it has lost its router: what is heard first is its hello. */
static void who_comes_back_with_a_hello_was_not_dead(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(142, 1, 6, &a);
    uint32_t been = 0;
    for (int times = 0; times < 2; times++) {
        uint32_t at = run_elsewhere(w, a, &been);
        fall_silent(w, at);
        if (a->ends)
            fail_msg("silence %d: %d %s: %s", times + 1, a->status, a->code, a->message);
        fresh_place(w, a, been);
        begin_to_run(w, a);
        char from[96];
        pd_message hello = {.kind = PD_MSG_HELLO};
        w->fake.workers[at].session++;
        fake_hello(&w->fake, &w->fake.workers[at], &hello.hello);
        hello.hello.clock_ns = FAKE_CLOCK_NS + w->fake.now_ns;
        pd_bus_identity(w->fake.workers[at].name, w->fake.workers[at].incarnation, from);
        router_core_on_message(w->fake.core, from, &hello, w->fake.now_ns);
    }
    world_free(w);
}

/* What a worker had said before it was given up arrives after: a cut connection delivers late. */
static void a_late_word_of_the_dead_does_not_bring_it_back(void **state)
{
    (void)state;
    enum { BEFORE, AFTER, AFTER_ITS_END_WAS_SEEN, WAYS };
    for (int way = BEFORE; way < WAYS; way++) {
        answer *a;
        world *w = world_of_one(143, 1, 6, &a);
        uint32_t been = 0;
        for (int times = 0; times < 2 && a->ends == 0; times++) {
            uint32_t at = run_elsewhere(w, a, &been);
            fake_worker *silent = &w->fake.workers[at];
            pd_message late = {.kind = PD_MSG_HEARTBEAT,
                               .heartbeat = {.incarnation = silent->incarnation,
                                             .clock_ns = FAKE_CLOCK_NS + w->fake.now_ns}};
            fall_silent(w, at);
            if (a->ends > 0)
                break;
            if (way != BEFORE)
                late.heartbeat.clock_ns = FAKE_CLOCK_NS + w->fake.now_ns + 1;
            if (way == AFTER_ITS_END_WAS_SEEN)
                router_core_on_worker_dead(w->fake.core, silent->incarnation, w->fake.now_ns);
            router_core_on_message(w->fake.core, silent->identity, &late, w->fake.now_ns);
        }
        if (counters_of(w).suspects != (way != AFTER))
            fail_msg("way %d: %" PRIu64 " convicted", way, counters_of(w).suspects);
        world_free(w);
    }
}

/* Refused at once it would end without a word that proves that it had not died. */
static void who_lives_is_refused_when_it_has_said_so(void **state)
{
    (void)state;
    for (int hello = 0; hello < 2; hello++) {
        answer *a;
        world *w = world_of_one(146, 1, 6, &a);
        uint32_t been = 0;
        for (int times = 0; times < 2; times++) {
            uint32_t at = run_elsewhere(w, a, &been);
            fake_worker *silent = &w->fake.workers[at];
            pd_message word = {.kind = PD_MSG_HEARTBEAT, .heartbeat = {silent->incarnation}};
            uint64_t *clock_ns = &word.heartbeat.clock_ns;
            if (hello) {
                word = (pd_message){.kind = PD_MSG_HELLO};
                fake_hello(&w->fake, silent, &word.hello);
                clock_ns = &word.hello.clock_ns;
            }
            fall_silent(w, at);
            assert_int_equal(a->ends, 0);
            for (int after = 0; after < 2; after++) {
                *clock_ns = FAKE_CLOCK_NS + w->fake.now_ns - (after ? 0 : 200 * PD_NS_PER_MS);
                router_core_on_message(w->fake.core, silent->identity, &word, w->fake.now_ns);
                wait_ms(w, 5);
                assert_int_equal(silent->refused, after);
            }
        }
        assert_int_equal(counters_of(w).suspects, 0);
        world_free(w);
    }
}

/* Its process was restarted meanwhile, and the new one's connection is the faster. */
static void a_late_hello_of_the_dead_does_not_end_who_came_after_it(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(145, 1, 1, &a);
    char from[96];
    pd_message late = {.kind = PD_MSG_HELLO};
    fake_hello(&w->fake, &w->fake.workers[1], &late.hello);
    pd_bus_identity(w->fake.workers[1].name, w->fake.workers[1].incarnation, from);
    bring_down(w, 1);
    fake_restart(&w->fake, 1);
    begin_to_run(w, a);
    uint64_t lost = counters_of(w).workers_lost;
    router_core_on_message(w->fake.core, from, &late, w->fake.now_ns);
    assert_int_equal(counters_of(w).workers_lost, lost);
    assert_true(router_core_has_worker(w->fake.core, w->fake.workers[1].incarnation));
    wait_ms(w, 15000);
    assert_whole(w, a);
    world_free(w);
}

/* Its process has ended, and that is why it was given up. */
static void a_late_word_of_who_has_ended_does_not_bring_it_back(void **state)
{
    (void)state;
    answer *a;
    world *w = world_of_one(144, 1, 6, &a);
    uint32_t been = 0;
    for (int times = 0; times < 2; times++) {
        uint32_t at = run_elsewhere(w, a, &been);
        fake_worker *dead = &w->fake.workers[at];
        uint64_t lost = counters_of(w).workers_lost;
        dead->mute = true;
        router_core_on_worker_dead(w->fake.core, dead->incarnation, w->fake.now_ns);
        wait_ms(w, 20);
        assert_int_equal(counters_of(w).workers_lost, lost + 1);
        pd_message late = {.kind = PD_MSG_HEARTBEAT,
                           .heartbeat = {.incarnation = dead->incarnation,
                                         .clock_ns = FAKE_CLOCK_NS + w->fake.now_ns + 1}};
        router_core_on_message(w->fake.core, dead->identity, &late, w->fake.now_ns);
    }
    assert_int_equal(counters_of(w).suspects, 1);
    world_free(w);
}

/* Heard again, the second was none of those that died: the third is, and the first still. */
static void what_is_taken_back_makes_no_death_before_it_forgotten(void **state)
{
    (void)state;
    answer *a, *b;
    world *w = world_of_two_suspects(147, &a, &b);
    char text[ROUTER_MESSAGE_BYTES], first[PD_NAME_BYTES];
    memcpy(first, w->fake.workers[1].name, sizeof first);
    uint32_t second = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    for (int i = 0; i < 800; i++) { /* both are there, and stay suspects */
        stall(w, second, true);
        wait_ms(w, 1);
    }
    assert_int_equal(counters_of(w).queued, 0);
    stall(w, second, false);
    wait_ms(w, 5);
    fall_silent(w, second);
    uint32_t third = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    w->fake.workers[second].mute = false;
    for (int i = 0; i < 150;
         i++) { /* until it is heard, one of them stays a suspect at the third */
        stall(w, third, true);
        wait_ms(w, 1);
    }
    const answer *at = has_lease(&w->fake.workers[third], a) ? a : b;
    stall(w, third, false);
    begin_to_run(w, at);
    end_process(w, third);
    assert_string_equal(at->code, "request_suspect");
    snprintf(text, sizeof text, "was being computed at %s, and at %s when they died", first,
             w->fake.workers[third].name);
    if (strstr(at->message, text) == NULL)
        fail_msg("\"%s\" is not in: %s", text, at->message);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_was_at_a_worker_that_was_only_silent_is_no_suspect),
        cmocka_unit_test(four_silences_that_are_taken_back_late_convict_nobody),
        cmocka_unit_test(who_comes_back_with_a_hello_was_not_dead),
        cmocka_unit_test(a_late_word_of_the_dead_does_not_bring_it_back),
        cmocka_unit_test(who_lives_is_refused_when_it_has_said_so),
        cmocka_unit_test(a_late_hello_of_the_dead_does_not_end_who_came_after_it),
        cmocka_unit_test(a_late_word_of_who_has_ended_does_not_bring_it_back),
        cmocka_unit_test(what_is_taken_back_makes_no_death_before_it_forgotten),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
