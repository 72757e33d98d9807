/* Predicted lengths, the predicted peak, and who gives way when the pool runs out. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "decode-worker/room.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BLOCK_TOKENS = 16 };

static uint64_t seed;

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(pd_random_next(&seed) % limit);
}

/* ---- lengths ---- */

static void without_answers_everybody_uses_up_max_tokens(void **state)
{
    (void)state;
    decode_lengths lengths;

    decode_lengths_init(&lengths);
    for (uint32_t max = 1; max < 100000; max = max * 3 + 1) {
        assert_int_equal(decode_lengths_predict(&lengths, 0, max), max);
        assert_int_equal(decode_lengths_predict(&lengths, max, max), max);
        assert_int_equal(decode_lengths_predict(&lengths, max + 5, max), max);
    }
}

static void three_of_four_answers_are_within_the_prediction(void **state)
{
    (void)state;
    decode_lengths lengths;
    uint32_t within = 0, asked = 0;
    uint64_t predicted_sum = 0, sum = 0;

    seed = 3;
    decode_lengths_init(&lengths);
    for (uint32_t i = 0; i < 20000; i++) {
        /* many short ones, some long: as answers are */
        uint32_t length = 1 + below(below(4) == 0 ? 2000 : 200);
        uint32_t answered = below(4) == 0 ? length / 2 : 0;
        if (i > 500) {
            uint32_t predicted = decode_lengths_predict(&lengths, answered, 4000);
            assert_true(predicted > answered && predicted <= 4000);
            within += length <= predicted;
            predicted_sum += predicted;
            sum += length;
            asked++;
        }
        decode_lengths_observe(&lengths, length, true);
    }
    print_message("# within the prediction: %.3f; predicted %.0f tokens, were %.0f\n",
                  (double)within / asked, (double)predicted_sum / asked, (double)sum / asked);
    assert_true(within > asked * 0.72 && within < asked * 0.84);
}

static void a_longer_answer_so_far_predicts_a_longer_one(void **state)
{
    (void)state;
    decode_lengths lengths;
    uint32_t last = 0;

    decode_lengths_init(&lengths);
    for (uint32_t i = 1; i <= 1000; i++)
        decode_lengths_observe(&lengths, i % 10 == 0 ? 3000 : 20, true);
    for (uint32_t answered = 0; answered < 2900; answered += 50) {
        uint32_t predicted = decode_lengths_predict(&lengths, answered, 10000);
        assert_true(predicted >= last && predicted > answered);
        last = predicted;
    }
    assert_in_range(decode_lengths_predict(&lengths, 0, 10000), 20, 21);
    assert_in_range(decode_lengths_predict(&lengths, 100, 10000), 3000, 3300);
    assert_int_equal(decode_lengths_predict(&lengths, 100, 500), 500);
}

/* A thousand answers cut off at 8 tokens say nothing about how long one may get. */
static void answers_cut_short_teach_nothing_beyond(void **state)
{
    (void)state;
    decode_lengths lengths;

    decode_lengths_init(&lengths);
    for (uint32_t i = 0; i < 1000; i++)
        decode_lengths_observe(&lengths, 8, false);
    assert_int_equal(decode_lengths_predict(&lengths, 0, 5000), 5000);
}

static void what_answers_were_long_ago_is_forgotten(void **state)
{
    (void)state;
    decode_lengths lengths;

    decode_lengths_init(&lengths);
    for (uint32_t i = 0; i < 5000; i++)
        decode_lengths_observe(&lengths, 30, true);
    assert_in_range(decode_lengths_predict(&lengths, 0, 9999), 30, 31);
    for (uint32_t i = 0; i < 5000; i++)
        decode_lengths_observe(&lengths, 800, true);
    assert_in_range(decode_lengths_predict(&lengths, 0, 9999), 800, 900);
}

/* ---- the peak ---- */

/* Step by step. */
static uint64_t simulated_peak(const decode_load *loads, uint32_t count, uint32_t claimed)
{
    uint64_t peak = claimed;
    uint32_t last = 0;

    for (uint32_t i = 0; i < count; i++)
        last = loads[i].predicted > last ? loads[i].predicted : last;
    for (uint32_t step = 0; step <= last; step++) {
        int64_t sum = claimed;
        for (uint32_t i = 0; i < count; i++) {
            const decode_load *load = &loads[i];
            uint32_t need = (load->tokens + step + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
            if (load->standing)
                continue;
            if (step <= load->predicted)
                sum += need > load->blocks ? need - load->blocks : 0;
            else
                sum -= load->own;
        }
        peak = sum > (int64_t)peak ? (uint64_t)sum : peak;
    }
    return peak;
}

static uint32_t random_loads(decode_load *loads, uint32_t count)
{
    uint32_t claimed = below(20);

    for (uint32_t i = 0; i < count; i++) {
        uint32_t tokens = 1 + below(300);
        uint32_t blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        uint32_t held = below(2) == 0 ? 0 : below(blocks + 1);
        uint32_t predicted = below(below(2) == 0 ? 10 : 400);
        loads[i] = (decode_load){.priority = (int32_t)below(3) - 1,
                                 .order = i,
                                 .tokens = tokens,
                                 .blocks = blocks,
                                 .own = blocks - held,
                                 .predicted = predicted,
                                 .possible = predicted + below(100),
                                 .standing = below(8) == 0};
        claimed += blocks - held;
    }
    return claimed;
}

static void the_predicted_peak_is_that_of_stepping_all_of_them(void **state)
{
    (void)state;
    decode_load loads[200];
    double most = 0;

    seed = 11;
    for (uint32_t round = 0; round < 3000; round++) {
        uint32_t count = 1 + below(round % 4 == 0 ? 200 : 32);
        uint32_t claimed = random_loads(loads, count);
        uint64_t exact = simulated_peak(loads, count, claimed);
        uint64_t peak = decode_pressure_peak(loads, count, claimed, BLOCK_TOKENS);
        if (count <= 32)
            assert_int_equal(peak, exact);
        assert_true(peak >= exact);
        double over = (double)peak / (double)exact;
        most = over > most ? over : most;
    }
    print_message("# with up to 200 loads the peak is over by a factor of at most %.3f\n", most);
    assert_true(most < 1.1);
}

static void a_wait_is_until_enough_has_ended(void **state)
{
    (void)state;
    decode_load loads[3] = {
        {.order = 1, .tokens = 160, .blocks = 10, .own = 10, .predicted = 40, .possible = 40},
        {.order = 2, .tokens = 160, .blocks = 10, .own = 10, .predicted = 90, .possible = 90},
        {.order = 3, .tokens = 160, .blocks = 10, .own = 10, .predicted = 16, .possible = 16},
    };

    assert_int_equal(decode_pressure_wait(loads, 3, 30, 60, BLOCK_TOKENS), 0); /* fits now */
    loads[2] = (decode_load){.order = 3, .tokens = 160, .blocks = 10, .own = 10, .predicted = 16};
    loads[0] = (decode_load){.order = 1, .tokens = 160, .blocks = 10, .own = 10, .predicted = 40};
    loads[1] = (decode_load){.order = 2, .tokens = 160, .blocks = 10, .own = 10, .predicted = 90};
    assert_int_equal(decode_pressure_wait(loads, 3, 30, 22, BLOCK_TOKENS), 40);
}

/* ---- who gives way ---- */

static void the_last_in_rank_gives_way_and_never_the_first(void **state)
{
    (void)state;
    decode_load loads[64];

    seed = 5;
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t count = 1 + below(64), room = below(40), steps = 1 + below(64);
        random_loads(loads, count);
        decode_pressure_rank(loads, count);
        uint32_t need = decode_pressure_relieve(loads, count, room, steps, BLOCK_TOKENS);
        uint64_t there = room, sum = 0;
        bool given = false, runs = false;
        for (uint32_t i = 0; i < count; i++) {
            assert_true(i == 0 || decode_ranks_before(&loads[i - 1], &loads[i]));
            if (loads[i].standing) {
                assert_false(loads[i].gives_way);
                there += loads[i].own;
                continue;
            }
            assert_false(given && !loads[i].gives_way); /* nobody ranks behind who goes on */
            assert_true(runs || !loads[i].gives_way);   /* the first goes on */
            runs = true;
            given = given || loads[i].gives_way;
            if (loads[i].gives_way)
                there += loads[i].own;
            else
                sum += decode_pressure_need(&loads[i], steps, BLOCK_TOKENS);
        }
        assert_int_equal(need, sum);
        uint32_t running = 0;
        for (uint32_t i = 0; i < count; i++)
            running += !loads[i].standing && !loads[i].gives_way;
        assert_true(need <= there || running <= 1);
    }
}

static void who_goes_on_is_not_at_once_in_want_again(void **state)
{
    (void)state;
    decode_load loads[32];
    uint32_t went_on = 0;

    seed = 6;
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t count = 2 + below(30), room = below(300), steps = 1 + below(64);
        random_loads(loads, count);
        decode_pressure_rank(loads, count);
        for (uint32_t i = 0; i < count; i++) {
            if (!loads[i].standing ||
                !decode_pressure_may_go_on(loads, count, &loads[i], room, steps, BLOCK_TOKENS))
                continue;
            loads[i].standing = false;
            went_on++;
            decode_pressure_relieve(loads, count, room, steps, BLOCK_TOKENS);
            for (uint32_t k = 0; k < count; k++)
                assert_false(loads[k].gives_way);
        }
    }
    assert_true(went_on > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_answers_everybody_uses_up_max_tokens),
        cmocka_unit_test(three_of_four_answers_are_within_the_prediction),
        cmocka_unit_test(a_longer_answer_so_far_predicts_a_longer_one),
        cmocka_unit_test(answers_cut_short_teach_nothing_beyond),
        cmocka_unit_test(what_answers_were_long_ago_is_forgotten),
        cmocka_unit_test(the_predicted_peak_is_that_of_stepping_all_of_them),
        cmocka_unit_test(a_wait_is_until_enough_has_ended),
        cmocka_unit_test(the_last_in_rank_gives_way_and_never_the_first),
        cmocka_unit_test(who_goes_on_is_not_at_once_in_want_again),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
