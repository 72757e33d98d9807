/* Speculative decoding: the same answers with every method, whatever happens; and how many drafts
 * are worth it. */
#include "tests/unit/workers/world.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/cost/row_cost.h"
#include "decode-worker/lookahead.h"
#include "decode-worker/prompt_lookup.h"
#include "decode-worker/speculate.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static pd_speculation speculation(pd_spec_method method, bool adaptive)
{
    return (pd_speculation){.method = method,
                            .draft_tokens = 7,
                            .ngram_min = 2,
                            .ngram_max = 4,
                            .window = 3,
                            .adaptive = adaptive,
                            .draft_blocks = 40,
                            .draft_block_tokens = 8,
                            .draft_rows = 24,
                            .draft_context = 300};
}

/* ---- whole workers ---- */

static void check_all(const world *w)
{
    for (uint32_t i = 0; i < w->requests_count; i++) {
        world_check_answer(&w->requests[i]);
        if (w->requests[i].phase == WORLD_FINISHED && w->requests[i].finish == PD_FINISH_LENGTH)
            assert_int_equal(w->requests[i].answer_count, w->requests[i].max_tokens);
    }
}

/* Each answer is the model's to the token (world_check_answer), with room for all and for too few,
 * with end tokens inside drafts, cancelled requests, failed steps and a worker that is killed. */
static void answers_are_the_same_with_every_method(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        pd_spec_method method = 1 + seed % 3;
        pd_role_counters sum = {0};
        world_repeat(1 + (uint32_t)seed % 9);
        world *w = world_create(&(world_setup){.seed = seed,
                                               .seals = seed % 2 == 0,
                                               .resume = true,
                                               .decode_blocks = seed % 5 == 0 ? 30 : 64,
                                               .max_batch = 1 + seed % 4,
                                               .speculation = speculation(method, seed % 4 == 3)});
        w->draft_wrong = seed % 4 * 3;
        for (uint32_t round = 0; round < 25; round++) {
            world_request *r = world_ask_random(w);
            if (world_random(w, 4) == 0)
                r->end_token = world_next_token(r->prompt, r->prompt_count);
            for (uint32_t turns = world_random(w, 120); turns > 0; turns--)
                world_turn(w);
            if (world_random(w, 6) == 0)
                world_cancel(w, r);
            if (world_random(w, 15) == 0)
                w->fail_next_step = true;
            if (round == 12 && seed % 3 == 0) {
                sum = w->decode.ops->counters(w->decode.core);
                world_restart_decode(w);
            }
        }
        assert_true(world_settle(w));
        check_all(w);
        world_check_nothing_held(w);
        pd_role_counters counters = w->decode.ops->counters(w->decode.core);
        assert_true(counters.spec_drafted + sum.spec_drafted > 0);
        assert_true(counters.spec_accepted <= counters.spec_drafted);
        world_destroy(w);
    }
    world_repeat(0);
}

static uint32_t steps_of(pd_spec_method method, uint32_t wrong, pd_role_counters *counters_out)
{
    uint32_t prompt[30];
    world *w = world_create(&(world_setup){.seed = 3, .speculation = speculation(method, false)});

    w->draft_wrong = wrong;
    for (uint32_t i = 0; i < 30; i++)
        prompt[i] = i % 6;
    world_request *r = world_ask(w, prompt, 30, 60);
    assert_true(world_settle(w));
    assert_int_equal(r->phase, WORLD_FINISHED);
    assert_int_equal(r->answer_count, 60);
    *counters_out = w->decode.ops->counters(w->decode.core);
    world_destroy(w);
    return (uint32_t)counters_out->steps;
}

static void right_drafts_save_steps(void **state)
{
    pd_role_counters counters;

    (void)state;
    world_repeat(6);
    assert_int_equal(steps_of(PD_SPEC_OFF, 0, &counters), 59);
    assert_int_equal(counters.spec_steps, 0);
    /* the same model guesses: every draft is right, eight tokens a step, but for one in which it
     * still reads, and where a block ends */
    assert_int_equal(steps_of(PD_SPEC_DRAFT_MODEL, 0, &counters), 10);
    assert_int_equal(counters.spec_accepted, counters.spec_drafted);
    assert_true(steps_of(PD_SPEC_DRAFT_MODEL, 4, &counters) < 40);
    assert_true(counters.spec_accepted < counters.spec_drafted);
    assert_true(steps_of(PD_SPEC_PROMPT_LOOKUP, 0, &counters) < 40);
    assert_true(steps_of(PD_SPEC_LOOKAHEAD, 0, &counters) < 55);
    world_repeat(0);
}

/* A draft model whose KV is full, or whose context ends, or whose step fails, guesses no more; the
 * answer goes on. */
static void without_drafts_an_answer_goes_on(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < 3; kind++) {
        uint32_t prompt[60];
        pd_speculation how = speculation(PD_SPEC_DRAFT_MODEL, false);
        if (kind == 0)
            how.draft_blocks = 9; /* 72 tokens */
        if (kind == 1)
            how.draft_context = 72;
        world *w = world_create(&(world_setup){.seed = 3, .speculation = how});
        for (uint32_t i = 0; i < 60; i++)
            prompt[i] = i;
        world_request *r = world_ask(w, prompt, 60, 50);
        for (uint32_t turn = 0; kind == 2 && turn < 200000 && r->answer_count < 12; turn++)
            world_turn(w);
        w->fail_next_draft = kind == 2;
        assert_true(world_settle(w));
        assert_int_equal(r->answer_count, 50);
        world_check_answer(r);
        pd_role_counters counters = w->decode.ops->counters(w->decode.core);
        assert_true(counters.spec_drafted > 0 && counters.spec_drafted < 25);
        world_destroy(w);
    }
}

/* ---- guesses ---- */

static uint32_t guess(const decode_guess_ops *ops, const pd_speculation *how,
                      const uint32_t *tokens, uint32_t count, uint32_t most, uint32_t *out)
{
    void *state = pd_calloc(1, ops->bytes(how, 256));

    assert_non_null(state);
    ops->init(state, how, 256);
    uint32_t made = ops->propose(state, tokens, count, most, out);
    pd_free(state);
    return made;
}

static void prompt_lookup_takes_the_longest_agreement(void **state)
{
    const pd_speculation how = {.draft_tokens = 4, .ngram_min = 2, .ngram_max = 4};
    /* "2 3" is followed by 9 lately, but "1 2 3" by 7 */
    const uint32_t text[] = {5, 1, 2, 3, 7, 8, 4, 2, 3, 9, 1, 2, 3};
    const uint32_t period[] = {4, 6, 4, 6, 4, 6};
    uint32_t out[15];

    (void)state;
    assert_int_equal(guess(&decode_prompt_lookup, &how, text, 13, 3, out), 3);
    assert_memory_equal(out, ((uint32_t[]){7, 8, 4}), 3 * sizeof *out);
    assert_int_equal(guess(&decode_prompt_lookup, &how, text, 9, 2, out), 2);
    assert_memory_equal(out, ((uint32_t[]){7, 8}), 2 * sizeof *out);
    assert_int_equal(guess(&decode_prompt_lookup, &how, text, 10, 4, out), 0);
    for (uint32_t count = 0; count < 3; count++)
        assert_int_equal(guess(&decode_prompt_lookup, &how, text, count + 1, 4, out), 0);
    /* past its end a text repeats itself */
    assert_int_equal(guess(&decode_prompt_lookup, &how, period, 6, 5, out), 5);
    assert_memory_equal(out, ((uint32_t[]){4, 6, 4, 6, 4}), 5 * sizeof *out);
}

/* Against the plain search, token by token, with few letters so that chains are long. */
static void prompt_lookup_finds_what_there_is(void **state)
{
    enum { TOKENS = 250 };
    const pd_speculation how = {.draft_tokens = 4, .ngram_min = 3, .ngram_max = 3};
    uint32_t tokens[TOKENS + 4];
    uint64_t seed = 11;
    void *lookup = pd_calloc(1, decode_prompt_lookup.bytes(&how, TOKENS));

    (void)state;
    assert_non_null(lookup);
    decode_prompt_lookup.init(lookup, &how, TOKENS);
    for (uint32_t count = 1; count < TOKENS; count++) {
        uint32_t latest = 0;
        tokens[count - 1] = (uint32_t)(pd_random_next(&seed) % 4);
        for (uint32_t end = 2; end + 1 < count; end++)
            if (memcmp(&tokens[end - 2], &tokens[count - 3], 3 * sizeof *tokens) == 0)
                latest = end;
        uint32_t made = decode_prompt_lookup.propose(lookup, tokens, count, 2, tokens + count);
        assert_int_equal(made, latest == 0 ? 0 : 2);
        if (latest != 0)
            assert_int_equal(tokens[count], tokens[latest + 1]);
    }
    pd_free(lookup);
}

/* A model that says token + 1 whatever came before: the window finds what is always right,
 * and the pool says it. */
static void lookahead_learns_what_the_model_says(void **state)
{
    const pd_speculation how = {.draft_tokens = 8, .ngram_max = 4, .window = 4};
    uint32_t tokens[200] = {5}, count = 1, right = 0, steps = 0;
    void *lookahead = pd_calloc(1, decode_lookahead.bytes(&how, 200));

    (void)state;
    assert_non_null(lookahead);
    decode_lookahead.init(lookahead, &how, 200);
    while (count < 150) {
        uint32_t said[16], hits = 0;
        uint32_t made = decode_lookahead.propose(lookahead, tokens, count, 8, tokens + count);
        assert_true(made >= how.window && made <= 8);
        for (uint32_t i = 0; i <= made; i++)
            said[i] = (tokens[count - 1 + i] + 1) % 20;
        while (hits < made && tokens[count + hits] == said[hits])
            hits++;
        decode_lookahead.learn(lookahead, count - 1, tokens + count, made, said);
        memcpy(tokens + count, said, (hits + 1) * sizeof *said);
        count += hits + 1;
        right += count > 60 ? hits : 0;
        steps += count > 60;
    }
    assert_true(right >= 3 * steps); /* an n-gram's, whole, each time */
    pd_free(lookahead);
}

/* ---- how many ---- */

static void what_rows_cost_is_what_was_measured(void **state)
{
    pd_row_cost cost = {0};

    (void)state;
    assert_true(pd_row_cost_ms(&cost, 3) == 0);
    pd_row_cost_observe(&cost, 1, NAN);
    pd_row_cost_observe(&cost, 1, -1);
    assert_true(pd_row_cost_age(&cost, 1) == UINT64_MAX);
    pd_row_cost_observe(&cost, 1, 4);
    pd_row_cost_observe(&cost, 5, 8);
    assert_true(pd_row_cost_ms(&cost, 1) == 4);
    assert_true(pd_row_cost_ms(&cost, 3) == 6); /* between what is known */
    double unknown = pd_row_cost_ms(&cost, 40);
    assert_true(unknown > 8 && unknown < 20); /* cheap, so that it is tried */
    pd_row_cost_observe(&cost, 40, 100);
    assert_true(pd_row_cost_ms(&cost, 48) == 100);
    for (uint32_t i = 0; i < 60; i++)
        pd_row_cost_observe(&cost, 1, 2);
    assert_true(fabs(pd_row_cost_ms(&cost, 1) - 2) < 0.01);
    pd_row_cost_observe(&cost, 1, 1000); /* once: another process had the core */
    assert_true(pd_row_cost_ms(&cost, 1) < 2.5);
    for (uint32_t i = 0; i < 3000; i++)
        pd_row_cost_observe(&cost, 1, 2);
    assert_true(pd_row_cost_age(&cost, 40) == UINT64_MAX); /* forgotten */
}

typedef struct plan_rig {
    pd_role_options role;
    decode_spec spec;
    decode_sequence s[8];
    pd_lease lease[8];
    uint32_t tokens[8][128];
    pd_step_slice slices[8];
} plan_rig;

static void rig_init(plan_rig *r, uint32_t blocks)
{
    memset(r, 0, sizeof *r);
    r->role = (pd_role_options){.max_batch = 8,
                                .context_max = 128,
                                .vocab = 100,
                                .layout = {.block_tokens = 16},
                                .speculation = speculation(PD_SPEC_PROMPT_LOOKUP, true)};
    assert_int_equal(decode_spec_init(&r->spec, &r->role, 32), PD_OK);
    for (uint32_t i = 0; i < 8; i++) {
        decode_sequence *s = &r->s[i];
        r->lease[i].blocks_count = blocks;
        s->lease = &r->lease[i];
        s->tokens = r->tokens[i];
        s->capacity = 100;
        s->tokens_max = 101;
        s->tokens_count = 40;
        s->answer_from = 30;
        s->max_tokens = 60;
        for (uint32_t t = 0; t < 40; t++)
            s->tokens[t] = t % 10; /* there is always a draft */
        s->drafting.state = pd_calloc(1, decode_spec_bytes(&r->spec, s->tokens_max));
        assert_non_null(s->drafting.state);
        decode_spec_begin(&r->spec, s);
    }
}

static void rig_fini(plan_rig *r)
{
    for (uint32_t i = 0; i < 8; i++)
        pd_free(r->s[i].drafting.state);
    decode_spec_fini(&r->spec);
}

static uint32_t plan(plan_rig *r, uint32_t count)
{
    uint32_t drafts = 0;
    pd_step *draft;

    for (uint32_t i = 0; i < count; i++)
        r->slices[i] =
            (pd_step_slice){.request = &r->s[i], .count = 1, .position = 39, .want_token = true};
    assert_false(decode_spec_plan(&r->spec, r->slices, count, &draft));
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(r->slices[i].count, 1 + r->slices[i].drafts);
        drafts += r->slices[i].drafts;
    }
    return drafts;
}

static void observe(plan_rig *r, uint32_t from, uint32_t to, double ms, double row_ms)
{
    for (uint32_t rows = from; rows <= to; rows++)
        pd_row_cost_observe(&r->spec.rows, rows, ms + rows * row_ms);
}

static void as_many_drafts_as_pay_for_themselves(void **state)
{
    plan_rig r;

    (void)state;
    rig_init(&r, 6);
    observe(&r, 1, 32, 10, 0.01); /* rows are nearly free */
    assert_int_equal(plan(&r, 1), 7);
    for (uint32_t i = 0; i < 4; i++) /* no more than the step has rows for */
        assert_true(plan(&r, 8) > 8 && plan(&r, 8) <= 24);
    rig_fini(&r);
    rig_init(&r, 6);
    observe(&r, 1, 32, 0.5, 10); /* a row costs as much as a step */
    assert_int_equal(plan(&r, 1), 0);
    assert_int_equal(plan(&r, 8), 0);
    r.spec.how.adaptive = false;
    assert_int_equal(plan(&r, 1), 7);
    rig_fini(&r);
    rig_init(&r, 6);
    observe(&r, 1, 32, 10, 1.5);
    uint32_t unknown = plan(&r, 2);
    r.s[0].drafting.right = r.s[0].drafting.tries = 15; /* always right */
    r.s[1].drafting.tries = 15;                         /* never */
    plan(&r, 2);
    assert_true(r.slices[0].drafts > unknown / 2 && r.slices[0].drafts > 3);
    assert_int_equal(r.slices[1].drafts, 0);
    rig_fini(&r);
}

/* Drafts that were hardly ever right are made no more, and yet not for good: answers that come
 * later, of which nothing is known, may be of another kind. */
static void what_did_not_pay_is_tried_again(void **state)
{
    plan_rig r;
    uint32_t idle = 0;

    (void)state;
    rig_init(&r, 6);
    observe(&r, 1, 32, 6, 4); /* a draft has to be right every third time at least */
    assert_true(plan(&r, 1) > 0);
    r.spec.tries = 16;
    for (; idle < 4000; idle++) {
        r.s[0].drafting.right = r.s[0].drafting.tries = 0; /* a new answer each time */
        if (plan(&r, 1) > 0)
            break;
    }
    assert_true(idle > 50 && idle < 1500);
    rig_fini(&r);
}

static void drafts_take_only_what_room_there_is(void **state)
{
    plan_rig r;

    (void)state;
    rig_init(&r, 3); /* 48 places, and 40 tokens: the last of them has one already */
    r.spec.how.adaptive = false;
    assert_int_equal(plan(&r, 1), 7);
    r.s[0].tokens_count = 45;
    assert_int_equal(plan(&r, 1), 3);
    r.s[0].tokens_count = 48;
    assert_int_equal(plan(&r, 1), 0);
    r.s[1].max_tokens = 12; /* two more may be answered: one draft */
    r.s[2].max_tokens = 11;
    r.s[3].capacity = 42;
    plan(&r, 4);
    assert_int_equal(r.slices[1].drafts, 1);
    assert_int_equal(r.slices[2].drafts, 0);
    assert_int_equal(r.slices[3].drafts, 2);
    r.slices[0].count = 1;
    r.s[1].solo = true; /* stepped alone, to find who is at fault */
    assert_int_equal(plan(&r, 4), 0);
    rig_fini(&r);
}

static void limits_that_cannot_be_are_refused(void **state)
{
    pd_role_options role = {.max_batch = 4};
    decode_spec spec;

    (void)state;
    for (uint32_t kind = 0; kind < 6; kind++) {
        role.speculation = speculation(PD_SPEC_LOOKAHEAD, true);
        switch (kind) {
        case 0: role.speculation.draft_tokens = 16; break;
        case 1: role.speculation.ngram_min = 1; break;
        case 2: role.speculation.ngram_max = 9; break;
        case 3: role.speculation.window = 7; break;
        case 4: role.speculation.ngram_min = 5; break;
        default: role.speculation.method = PD_SPEC_DRAFT_MODEL; role.speculation.draft_rows = 3;
        }
        assert_int_equal(decode_spec_init(&spec, &role, 32), PD_E_INVALID);
    }
    for (uint32_t method = 1; method < PD_SPEC_METHODS; method++) {
        role.speculation = speculation(method, true);
        for (long n = 0;; n++) {
            pd_mem_fail_at(n);
            pd_status status = decode_spec_init(&spec, &role, 32);
            pd_mem_fail_at(-1);
            assert_true(status == PD_OK || status == PD_E_NOMEM);
            if (status == PD_OK)
                break;
        }
        decode_spec_fini(&spec);
    }
}

static int nothing_is_held(void **state)
{
    (void)state;
    return pd_mem_live() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_the_same_with_every_method),
        cmocka_unit_test(right_drafts_save_steps),
        cmocka_unit_test(without_drafts_an_answer_goes_on),
        cmocka_unit_test(prompt_lookup_takes_the_longest_agreement),
        cmocka_unit_test(prompt_lookup_finds_what_there_is),
        cmocka_unit_test(lookahead_learns_what_the_model_says),
        cmocka_unit_test(what_rows_cost_is_what_was_measured),
        cmocka_unit_test(as_many_drafts_as_pay_for_themselves),
        cmocka_unit_test(what_did_not_pay_is_tried_again),
        cmocka_unit_test(drafts_take_only_what_room_there_is),
        cmocka_unit_test(limits_that_cannot_be_are_refused),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, nothing_is_held);
}
