/* Blocks that arrive wrong, or not at all, are found before they are used. */
#include "tests/unit/workers/world.h"

#include "common/base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

enum { TRIES = 1000 };

static world_request *ask(world *w, uint32_t count, uint32_t salt)
{
    uint32_t prompt[WORLD_PROMPT_MAX];

    for (uint32_t i = 0; i < count; i++)
        prompt[i] = (uint32_t)(pd_mix64(salt * 10007ull + i) % WORLD_VOCAB);
    return world_ask(w, prompt, count, 8);
}

/* Until all has ended; what never comes is missed when half its time is over. */
static void run_all(world *w)
{
    for (int i = 0; i < 250; i++) {
        assert_true(world_settle(w));
        world_tick(w, 100);
    }
    assert_true(world_settle(w));
    world_check_nothing_held(w);
}

/* Every token is compared with the right one as it comes (world_check_answer). */
static void one_damaged_block(world_damage damage)
{
    uint32_t happened = 0;

    for (uint32_t n = 0; n < TRIES; n++) {
        world *w = world_create(&(world_setup){.seed = n,
                                               .seals = true,
                                               .chunk_tokens = 20 + n % 90,
                                               .prefill_blocks = 20,
                                               .decode_blocks = 24});
        ask(w, 40 + n % 13, n); /* leaves bytes of other requests in both pools */
        run_all(w);
        w->damage = damage;
        w->damage_ship = n % 4;
        world_request *r = ask(w, 50 + n % 70, n + 1000), *other = ask(w, 30, n + 2000);
        run_all(w);
        happened += w->damaged;
        assert_int_equal(w->refetches, w->damaged);
        assert_int_equal(r->agains + other->agains, w->damaged);
        assert_int_equal(r->phase, WORLD_FINISHED);
        assert_int_equal(other->phase, WORLD_FINISHED);
        assert_int_equal(r->answer_count, 8);
        assert_int_equal(w->decode_failures, 0);
        world_destroy(w);
    }
    assert_true(happened > TRIES / 2);
}

static void one_flipped_bit_is_found(void **state)
{
    (void)state;
    one_damaged_block(WORLD_DAMAGE_FLIPPED_BIT);
}

static void another_requests_block_is_found(void **state)
{
    (void)state;
    one_damaged_block(WORLD_DAMAGE_OTHER_BLOCK);
}

static void an_old_epochs_block_is_found(void **state)
{
    (void)state;
    one_damaged_block(WORLD_DAMAGE_OLD_EPOCH);
}

static void a_block_left_out_is_found(void **state)
{
    (void)state;
    one_damaged_block(WORLD_DAMAGE_LEFT_OUT);
}

static void a_partial_block_with_the_wrong_count_is_found(void **state)
{
    (void)state;
    one_damaged_block(WORLD_DAMAGE_COUNT_SEALED);
}

/* Several blocks of several groups are missing then, and asked for run by run. */
static void missing_blocks(world_damage damage)
{
    uint32_t happened = 0;

    for (uint32_t n = 0; n < TRIES; n++) {
        world *w = world_create(
            &(world_setup){.seed = n, .seals = n % 2 == 0, .chunk_tokens = 20 + n % 90});
        w->damage = damage;
        w->damage_ship = n % 4;
        world_request *r = ask(w, 50 + n % 70, n + 1000), *other = ask(w, 30, n + 2000);
        run_all(w);
        happened += w->damaged;
        assert_true((w->refetches > 0) == w->damaged);
        assert_int_equal(r->phase, WORLD_FINISHED);
        assert_int_equal(other->phase, WORLD_FINISHED);
        assert_int_equal(r->answer_count, 8);
        world_destroy(w);
    }
    assert_true(happened > TRIES / 2);
}

static void what_a_notice_says_wrongly_is_missing(void **state)
{
    (void)state;
    missing_blocks(WORLD_DAMAGE_COUNT_SAID);
}

static void what_is_never_announced_is_missing(void **state)
{
    (void)state;
    missing_blocks(WORLD_DAMAGE_NO_NOTICE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_flipped_bit_is_found),
        cmocka_unit_test(another_requests_block_is_found),
        cmocka_unit_test(an_old_epochs_block_is_found),
        cmocka_unit_test(a_block_left_out_is_found),
        cmocka_unit_test(a_partial_block_with_the_wrong_count_is_found),
        cmocka_unit_test(what_a_notice_says_wrongly_is_missing),
        cmocka_unit_test(what_is_never_announced_is_missing),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
