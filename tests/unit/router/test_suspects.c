/* Of requests that were being computed at a worker when it died one may be what it died of: how
 * that one is found, and the others are not taken for it. */

#include "common/base/log.h"
#include "tests/unit/router/world.h"

#include <stdio.h>

static bool has(const fake_worker *w, const answer *a)
{
    for (uint32_t n = 0; w->alive && n < FAKE_LEASES_MAX; n++) {
        if (w->leases[n].blocks != 0 && w->leases[n].prompt_first == a->first)
            return true;
    }
    return false;
}

/* The decode worker that has a lease of it; UINT32_MAX: none has. */
static uint32_t place_of(const world *w, const answer *a)
{
    for (uint32_t i = 0; i < w->fake.workers_count; i++) {
        if (w->fake.workers[i].role == PD_ROLE_DECODE && has(&w->fake.workers[i], a))
            return i;
    }
    return UINT32_MAX;
}

/* Until it has more tokens than before, from its decode worker too: it is being computed there, and
 * not for long. */
static void begin_to_run(world *w, const answer *a)
{
    uint32_t had = a->next;
    for (int i = 0; i < 40000 && a->next <= had + 1; i++)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    assert_in_range(a->next, had + 2, had + 6);
}

/* It dies, and the router knows. */
static void bring_down(world *w, uint32_t worker)
{
    uint64_t lost = counters_of(w).workers_lost;
    fake_kill(&w->fake, worker);
    while (counters_of(w).workers_lost == lost)
        fake_run(&w->fake, w->fake.now_ns + 50000);
}

/* A world with one decode worker that dies with both. */
static world *world_of_two_suspects(uint64_t seed, answer **a, answer **b)
{
    world *w = one_to_one(seed);
    *a = ask(w, 40, 3000);
    *b = ask(w, 40, 300);
    begin_to_run(w, *a);
    if ((*b)->next < 2)
        begin_to_run(w, *b);
    assert_in_range((*a)->next, 2, 7);
    assert_in_range((*b)->next, 2, 7);
    bring_down(w, 1);
    return w;
}

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

/* One worker, started anew after its first death. */
static void a_worker_that_died_twice_is_named_as_one(void **state)
{
    (void)state;
    world *w = one_to_one(14);
    answer *a = ask(w, 40, 3000);
    char text[ROUTER_MESSAGE_BYTES];
    for (int i = 0; i < 2; i++) {
        begin_to_run(w, a);
        fake_kill(&w->fake, 1);
        wait_ms(w, 700);
        if (i == 0)
            fake_restart(&w->fake, 1);
    }
    assert_int_equal(a->status, 500);
    const char *name = w->fake.workers[1].name;
    snprintf(
        text, sizeof text,
        "request r1 was being computed at %s, and at %s again (started anew), when it died: it "
        "is not given a third worker",
        name, name);
    assert_string_equal(a->message, text);
    world_free(w);
}

/* It ran for a while at the first: that one did not die of it, and does not count. */
static void a_worker_where_it_ran_for_a_while_does_not_count(void **state)
{
    (void)state;
    world *w = one_to_one(15);
    for (int i = 0; i < 3; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 1000);
    wait_for_token(w, a, 20);
    for (int i = 0; i < 2; i++) { /* the second time it has just begun */
        bring_down(w, place_of(w, a));
        if (i == 0)
            begin_to_run(w, a);
    }
    wait_ms(w, 15000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).suspects, 0);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_was_in_one_death_with_another_is_not_taken_for_it),
        cmocka_unit_test(suspects_wait_for_their_turn),
        cmocka_unit_test(a_newcomer_is_not_held_up_by_suspects),
        cmocka_unit_test(who_waits_in_vain_goes_on_beside_another),
        cmocka_unit_test(a_worker_that_died_twice_is_named_as_one),
        cmocka_unit_test(a_worker_where_it_ran_for_a_while_does_not_count),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
