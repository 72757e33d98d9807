/* What a sequence without room does is chosen by predicted cost: whether it moves, and where to. */

#include "common/base/log.h"
#include "tests/unit/router/world.h"

static world *world_of(uint64_t seed, uint32_t decodes, void (*change)(router_core_config *config))
{
    world *w = world_with(seed, change);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    for (uint32_t i = 0; i < decodes; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    return w;
}

/* What runs now finds no room for its next block. */
static void suspend(world *w)
{
    w->fake.suspends = 1000;
    for (int i = 0; i < 400 && counters_of(w).suspended == 0; i++)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    w->fake.suspends = 0;
    assert_int_equal(counters_of(w).suspended, 1);
}

static void dear_links(router_core_config *config)
{
    config->cost.ship_byte_ms = 1; /* computing is cheaper */
}

static void a_dear_move_gives_way_though_there_is_room(void **state)
{
    (void)state;
    for (uint32_t dear = 0; dear < 2; dear++) {
        world *w = world_of(63, 2, dear ? dear_links : NULL);
        answer *a = ask(w, 40, 100);
        wait_for_token(w, a, 30);
        suspend(w);
        wait_ms(w, 600);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).moves + counters_of(w).moves_failed, 1 - dear);
        assert_int_equal(counters_of(w).gave_way, dear);
        world_free(w);
    }
}

static void middling_links(router_core_config *config)
{
    config->cost.ship_byte_ms = 2e-5;
}

/* The link and what is leased are the same: what to compute again grows with the answer. */
static void a_short_answer_is_computed_again_where_a_long_one_moves(void **state)
{
    (void)state;
    for (uint32_t far = 0; far < 2; far++) {
        world *w = world_of(65, 2, middling_links);
        answer *a = ask(w, 40, 400);
        wait_for_token(w, a, far ? 300 : 5);
        suspend(w);
        wait_ms(w, 900);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).moves, far);
        assert_int_equal(counters_of(w).gave_way, 1 - far);
        assert_int_equal(counters_of(w).moves_failed, 0);
        world_free(w);
    }
}

/* 40 tokens and 200 to come are 16 blocks at most, the one that is begun next among them. */
static void who_has_no_room_is_not_asked_to_take_a_sequence(void **state)
{
    (void)state;
    for (uint32_t room = 15; room <= 16; room++) {
        world *w = world_of(66, 2, NULL);
        answer *a = ask(w, 40, 200);
        wait_for_token(w, a, 5);
        fake_worker *other = &w->fake.workers[place_of(w, a) == 1 ? 2 : 1];
        other->ledger =
            (pd_ledger){.total = 512, .free = 4, .cached = room - 4, .leased = 512 - room};
        wait_ms(w, 110); /* and the router has been told */
        suspend(w);
        wait_ms(w, 600);
        assert_whole(w, a);
        assert_int_equal(other->last_lease.key.number != 0, room == 16);
        assert_int_equal(counters_of(w).moves, room == 16);
        assert_int_equal(counters_of(w).gave_way, room == 15);
        world_free(w);
    }
}

typedef struct load {
    uint32_t running, context_blocks;
} load;

/* Both have room. which: of the two others, the one with more to do. */
static void move_past(uint32_t which, load more, load less)
{
    world *w = world_of(64, 3, NULL);
    answer *a = ask(w, 40, 400);
    wait_for_token(w, a, 30);
    uint32_t from = place_of(w, a), others[2], count = 0;
    for (uint32_t i = 1; i < w->fake.workers_count; i++) {
        if (i != from)
            others[count++] = i;
    }
    for (uint32_t i = 0; i < 2; i++) {
        fake_worker *other = &w->fake.workers[others[i]];
        load of = i == which ? more : less;
        other->running = of.running;
        other->ledger = (pd_ledger){
            .total = 512, .free = 512 - of.context_blocks, .running = of.context_blocks};
    }
    w->fake.workers[from].running = 40; /* computed again it would be elsewhere too */
    wait_ms(w, 150);                    /* and the router has been told */
    suspend(w);
    wait_ms(w, 20);
    assert_int_equal(counters_of(w).moves, 1);
    assert_int_equal(place_of(w, a), others[1 - which]);
    wait_ms(w, 600);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).moves_failed + counters_of(w).gave_way, 0);
    world_free(w);
}

static void a_sequence_moves_to_the_cheaper_of_two(void **state)
{
    (void)state;
    for (uint32_t which = 0; which < 2; which++) {
        move_past(which, (load){8, 0}, (load){0, 0});     /* steps of more sequences are longer */
        move_past(which, (load){8, 200}, (load){8, 100}); /* so are those over more context */
        move_past(which, (load){17, 0}, (load){16, 0});   /* a full batch: steps until a place */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_dear_move_gives_way_though_there_is_room),
        cmocka_unit_test(a_short_answer_is_computed_again_where_a_long_one_moves),
        cmocka_unit_test(who_has_no_room_is_not_asked_to_take_a_sequence),
        cmocka_unit_test(a_sequence_moves_to_the_cheaper_of_two),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
