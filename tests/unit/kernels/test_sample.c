/* A token is drawn by its probability, among those kept, from (seed, choice, position) alone. */

#include "kernels/model/sample.h"

#include "common/base/hash.h"
#include "kernels/number.h"
#include "kernels/sampling.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
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

static int later_first(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

    return left < right ? 1 : left > right ? -1 : 0;
}

/* kernels/sampling.h's definition, read from top to bottom over a sorted vocabulary. */
static uint32_t by_definition(const kern_sampling *sampling, const float *values, uint32_t vocab,
                              uint32_t position, uint64_t *keys, uint64_t *weights)
{
    uint32_t kept = sampling->top_k == 0 || sampling->top_k > vocab ? vocab : sampling->top_k;
    unsigned __int128 total = 0, sum = 0;
    uint32_t at = 0;

    for (uint32_t id = 0; id < vocab; id++)
        keys[id] = kern_sample_key(values[id], id);
    qsort(keys, vocab, sizeof *keys, later_first);
    float top = values[kern_sample_id(keys[0])];
    for (uint32_t i = 0; i < vocab; i++) {
        float x = (values[kern_sample_id(keys[i])] - top) / sampling->temperature;
        weights[i] = (uint64_t)((double)kern_exp(x) * 0x1p40);
        total += i < kept ? weights[i] : 0;
    }
    if (sampling->top_p < 1) {
        uint64_t p = (uint64_t)((double)sampling->top_p * 0x1p32);
        uint64_t goal = (uint64_t)(total * p >> 32);
        do
            sum += weights[at];
        while (sum < goal && ++at < vocab);
        total = sum;
    }
    uint64_t target =
        (uint64_t)(kern_sample_bits(sampling->seed, sampling->choice, position) * total >> 64);
    for (at = 0, sum = 0; (sum += weights[at]) <= target;)
        at++;
    return kern_sample_id(keys[at]);
}

enum { ODD_VOCAB = 4099, SHAPES = 7 };

static void make_logits(int shape, float *values, uint32_t vocab, uint64_t *state)
{
    for (uint32_t id = 0; id < vocab; id++) {
        float u = (float)(pd_random_next(state) >> 40) * 0x1p-24f;
        switch (shape) {
        case 0: values[id] = 8 * u; break;                               /* flat: many bins */
        case 1: values[id] = 1.25f; break;                               /* all equal */
        case 2: values[id] = (float)(int)(4 * u) - 2; break;             /* runs of equals */
        case 3: values[id] = u < 0.999f ? -30 * u : 3.4e38f * u; break;  /* outliers */
        case 4: values[id] = 30 * logf(u + 1e-7f); break;                /* most without weight */
        case 5: values[id] = (id & 1) != 0 ? 0.0f : -0.0f; break;        /* zeros of both signs */
        default: values[id] = 1000 - 1e-4f * (float)(id % 3) * u; break; /* all in one bin */
        }
    }
}

static void what_is_drawn_is_the_definitions(void **state)
{
    static const uint32_t sizes[] = {1, 2, 31, 32, 33, 1023, 1024, 1025, ODD_VOCAB};
    static const float top_ps[] = {1, 1, 0.9f, 0.5f, 0.05f, 1e-12f};
    static const float temperatures[] = {1, 0.3f, 2.5f, 1e-30f, 1e30f};
    float *values = malloc(ODD_VOCAB * sizeof *values);
    uint64_t *scratch = malloc(3 * ODD_VOCAB * sizeof *scratch);
    uint64_t random = 7;

    (void)state;
    for (uint32_t n = 0; n < 1500; n++) {
        uint32_t vocab = sizes[n % 9];
        make_logits((int)(n / 9 % SHAPES), values, vocab, &random);
        uint64_t word = pd_random_next(&random);
        kern_sampling sampling = {
            .temperature = temperatures[word % 5],
            .top_p = top_ps[word / 8 % 6],
            .top_k = (word & 0x100) != 0 ? (uint32_t)(word >> 32) % (vocab + 2) : 0,
            .seed = word,
            .choice = (uint32_t)word % 3,
        };
        uint32_t token = kern_sample(&sampling, values, vocab, n, scratch);
        assert_int_equal(token, by_definition(&sampling, values, vocab, n, scratch + ODD_VOCAB,
                                              scratch + 2 * ODD_VOCAB));
    }
    free(values);
    free(scratch);
}

static void integers_are_what_they_say(void **state)
{
    uint64_t random = 3;

    (void)state;
    for (int i = 0; i < 10000; i++) {
        uint64_t a = pd_random_next(&random) >> (i % 64),
                 b = pd_random_next(&random) >> (i % 7 * 9);
        assert_true(kern_mul_high(a, b) == (uint64_t)((unsigned __int128)a * b >> 64));
        assert_true(kern_sample_mix(a) == pd_mix64(a));
        float logit = (float)(int64_t)a * 0x1p-20f;
        assert_true(kern_sample_logit(kern_sample_ascending(logit)) == logit);
    }
    /* the largest vocabulary of equals does not overflow; what has no weight is weighed 0 */
    assert_true(KERN_SAMPLE_VOCAB_MAX <=
                UINT64_MAX / (kern_sample_weight(kern_exp(0)) + (1 << 20)));
    assert_true(kern_sample_weight(kern_exp(KERN_SAMPLE_X_MIN)) == 0);
    assert_true(kern_sample_bin(0) == 0 && kern_sample_bin(-0.0f) == 0);
    assert_true(kern_sample_bin(KERN_SAMPLE_X_MIN) < KERN_SAMPLE_BINS);
    assert_true(kern_sample_bin(nextafterf(KERN_SAMPLE_X_MIN, -100)) == KERN_SAMPLE_BINS);
    assert_true(kern_sample_bin(NAN) == KERN_SAMPLE_BINS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(temperature_zero_takes_the_lowest_of_the_largest),
        cmocka_unit_test(draws_follow_the_probabilities),
        cmocka_unit_test(top_k_and_top_p_keep_the_likeliest),
        cmocka_unit_test(a_draw_depends_on_seed_choice_and_position_alone),
        cmocka_unit_test(what_is_drawn_is_the_definitions),
        cmocka_unit_test(integers_are_what_they_say),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
