/* A token is drawn by its probability, among those kept, from (seed, choice, position) alone. */

#include "kernels/model/sample.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define VOCAB 8
#define DRAWS 20000

static const float logits[VOCAB] = {0.5f, 2.0f, -1.0f, 2.0f, 1.0f, -3.0f, 0.0f, -0.0f};

static void draw_many(const kern_sampling *sampling, uint32_t *counts)
{
    uint64_t scratch[VOCAB];

    memset(counts, 0, VOCAB * sizeof *counts);
    for (uint32_t position = 0; position < DRAWS; position++)
        counts[kern_sample(sampling, logits, VOCAB, position, scratch)]++;
}

static void temperature_zero_takes_the_lowest_of_the_largest(void **state)
{
    kern_sampling sampling = {.temperature = 0, .top_p = 1};
    uint64_t scratch[VOCAB];

    (void)state;
    assert_int_equal(kern_sample(&sampling, logits, VOCAB, 5, scratch), 1);
    sampling = (kern_sampling){.temperature = 5, .top_p = 1, .top_k = 1};
    assert_int_equal(kern_sample(&sampling, logits, VOCAB, 5, scratch), 1);
}

static void draws_follow_the_probabilities(void **state)
{
    static const float temperatures[] = {0.5f, 1, 3};
    uint32_t counts[VOCAB];

    (void)state;
    for (int t = 0; t < 3; t++) {
        kern_sampling sampling = {.temperature = temperatures[t], .top_p = 1, .seed = 42};
        double total = 0;
        draw_many(&sampling, counts);
        for (int i = 0; i < VOCAB; i++)
            total += exp(logits[i] / temperatures[t]);
        for (int i = 0; i < VOCAB; i++) {
            double p = exp(logits[i] / temperatures[t]) / total;
            double spread = sqrt(p * (1 - p) * DRAWS);
            assert_true(fabs(counts[i] - p * DRAWS) < 4.5 * spread + 1);
        }
    }
}

static void top_k_and_top_p_keep_the_likeliest(void **state)
{
    uint32_t counts[VOCAB];

    (void)state;
    draw_many(&(kern_sampling){.temperature = 1, .top_p = 1, .top_k = 3}, counts);
    assert_true(counts[1] > 0 && counts[3] > 0 && counts[4] > 0);
    assert_int_equal(counts[1] + counts[3] + counts[4], DRAWS);
    /* 1 and 3 are 34 % each, 4 another 13 %: 0.68 needs the first two, 0.8 the third as well */
    draw_many(&(kern_sampling){.temperature = 1, .top_p = 0.68f}, counts);
    assert_int_equal(counts[1] + counts[3], DRAWS);
    draw_many(&(kern_sampling){.temperature = 1, .top_p = 0.8f}, counts);
    assert_true(counts[4] > 0);
    assert_int_equal(counts[1] + counts[3] + counts[4], DRAWS);
    /* top_p counts within what top_k kept: half of two equals is one */
    draw_many(&(kern_sampling){.temperature = 1, .top_p = 0.5f, .top_k = 2}, counts);
    assert_int_equal(counts[1], DRAWS);
}

static void a_draw_depends_on_seed_choice_and_position_alone(void **state)
{
    uint64_t scratch[VOCAB];
    uint32_t differ_seed = 0, differ_choice = 0, differ_position = 0;

    (void)state;
    for (uint32_t i = 0; i < 200; i++) {
        kern_sampling a = {.temperature = 2, .top_p = 1, .seed = i, .choice = 1};
        kern_sampling b = a, c = a;
        b.seed += 1000;
        c.choice = 2;
        uint32_t first = kern_sample(&a, logits, VOCAB, 9, scratch);
        assert_int_equal(kern_sample(&a, logits, VOCAB, 9, scratch), first);
        differ_seed += kern_sample(&b, logits, VOCAB, 9, scratch) != first;
        differ_choice += kern_sample(&c, logits, VOCAB, 9, scratch) != first;
        differ_position += kern_sample(&a, logits, VOCAB, 10, scratch) != first;
    }
    assert_true(differ_seed > 50 && differ_choice > 50 && differ_position > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(temperature_zero_takes_the_lowest_of_the_largest),
        cmocka_unit_test(draws_follow_the_probabilities),
        cmocka_unit_test(top_k_and_top_p_keep_the_likeliest),
        cmocka_unit_test(a_draw_depends_on_seed_choice_and_position_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
