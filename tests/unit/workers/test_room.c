/* Thousands of random loads on a pool that is too small for them: nobody waits for ever. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "decode-worker/room.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { BLOCK_TOKENS = 16, SEQUENCES_MAX = 48, STEP_MS = 20 };

typedef enum phase { WAITING, PROMISED, LANDING, RUNNING, QUARANTINED, ENDED } phase;

typedef struct job {
    phase phase;
    int32_t priority;
    uint32_t prompt, answer_max, length; /* tokens; length is what the answer comes to */
    uint32_t answered;                   /* over all attempts */
    uint32_t attempts, told, failed;
    uint64_t due_ns; /* of what happens to it next */
    pd_hash128 hashes[64];
    uint32_t tokens[1200];
    decode_sequence s;
} job;

typedef struct load {
    uint64_t seed, now_ns;
    pd_role_options options;
    pd_blocks blocks;
    pd_lease_table *leases;
    decode_room room;
    decode_batch batch;
    pd_step_slice slices[SEQUENCES_MAX];
    decode_sequence *all;
    job *jobs;
    uint32_t jobs_count;
    bool deaf; /* the router answers nothing */
    uint64_t used_sum, steps, stalls;
} load;

static uint32_t below(load *l, uint32_t limit)
{
    return (uint32_t)(pd_random_next(&l->seed) % limit);
}

static void load_init(load *l, uint64_t seed, uint32_t blocks, uint32_t batch, uint32_t jobs)
{
    *l = (load){.seed = seed, .now_ns = PD_NS_PER_S, .jobs_count = jobs};
    l->options.layout = (pd_kv_layout){.block_tokens = BLOCK_TOKENS, .groups = 1, .blocks = blocks};
    l->options.context_max = 1024;
    assert_int_equal(pd_blocks_init(&l->blocks, blocks, true), PD_OK);
    assert_int_equal(pd_lease_table_create(l->blocks.cache, SEQUENCES_MAX * 2, 64, &l->leases),
                     PD_OK);
    assert_int_equal(decode_room_init(&l->room, &l->options, &l->blocks, l->leases, SEQUENCES_MAX),
                     PD_OK);
    decode_batch_init(&l->batch, batch, batch + 32);
    l->jobs = pd_calloc(jobs, sizeof *l->jobs);
    assert_non_null(l->jobs);
    for (uint32_t i = 0; i < jobs; i++) {
        job *j = &l->jobs[i];
        uint32_t most = blocks * BLOCK_TOKENS;
        most = most < 1000 ? most : 1000;
        j->prompt = 1 + below(l, most / 3);
        j->answer_max = 1 + below(l, most - j->prompt);
        j->length = 1 + below(l, below(l, 3) == 0 ? j->answer_max : (j->answer_max + 3) / 4);
        j->priority = below(l, 4) == 0 ? (int32_t)below(l, 5) - 2 : 0;
        uint64_t kind = below(l, 3) == 0 ? below(l, 3) : 100 + i;
        for (uint32_t h = 0; h < 64; h++)
            j->hashes[h] = (pd_hash128){pd_mix64(kind * 1000 + h), kind};
    }
}

/* Too short: so that more is admitted than there will be room for. */
static void expect_short_answers(load *l)
{
    for (uint32_t i = 0; i < 300; i++)
        decode_lengths_observe(&l->room.lengths, 1 + i % 10, true);
}

static void load_fini(load *l)
{
    decode_room_fini(&l->room);
    pd_lease_table_destroy(l->leases);
    pd_blocks_fini(&l->blocks);
    pd_free(l->jobs);
}

static uint32_t leases(const load *l)
{
    uint32_t cursor = 0, count = 0;

    while (pd_lease_next(l->leases, &cursor) != NULL)
        count++;
    return count;
}

static bool ask(load *l, job *j)
{
    decode_sequence *s = &j->s;
    uint32_t lands = j->prompt + j->answered, wait;
    const char *reason = NULL;
    pd_lease *lease;
    decode_newcomer newcomer = {.priority = j->priority,
                                .tokens = lands,
                                .blocks = (lands + BLOCK_TOKENS - 1) / BLOCK_TOKENS,
                                .answer_max = j->answer_max - j->answered};

    if (leases(l) >= SEQUENCES_MAX)
        return false;
    if (decode_room_admit(&l->room, l->all, &newcomer, STEP_MS, &wait, &reason) != PD_OK) {
        assert_non_null(reason);
        return false;
    }
    *s = (decode_sequence){.key = {.router = 1, .number = (uint64_t)(j - l->jobs) + 1},
                           .priority = j->priority,
                           .prompt_tokens = lands,
                           .capacity = j->prompt + j->answer_max - 1,
                           .answer_max = newcomer.answer_max};
    if (s->capacity < lands)
        s->capacity = lands;
    s->order = decode_room_order(&l->room);
    pd_lease_grant_args args = {.request = s->key.number,
                                .epoch = ++j->attempts,
                                .owner = 1,
                                .prefill = 7,
                                .blocks = newcomer.blocks,
                                .expiry_ns = UINT64_MAX};
    assert_int_equal(pd_lease_grant(l->leases, &args, &lease), PD_OK);
    lease->user = s;
    s->lease = lease;
    s->next = l->all;
    if (s->next != NULL)
        s->next->prev = s;
    l->all = s;
    j->phase = PROMISED;
    j->due_ns = l->now_ns + below(l, 400) * PD_NS_PER_MS;
    return true;
}

/* The sequence is over here; what the answer came to stays with the job. */
static void leave(load *l, job *j, phase then)
{
    decode_sequence *s = &j->s;

    decode_batch_remove(&l->batch, s);
    decode_room_leave(&l->room, s);
    if (s->prev != NULL)
        s->prev->next = s->next;
    else
        l->all = s->next;
    if (s->next != NULL)
        s->next->prev = s->prev;
    if (s->lease->state == PD_LEASE_RUNNING)
        pd_blocks_remember(&l->blocks, j->hashes, s->lease->blocks, s->prompt_tokens / BLOCK_TOKENS,
                           UINT32_MAX);
    bool quarantined = pd_lease_release(l->leases, s->lease);
    j->phase = quarantined ? QUARANTINED : then;
    j->due_ns = l->now_ns + below(l, 2000) * PD_NS_PER_MS;
}

static void start(load *l, job *j)
{
    decode_sequence *s = &j->s;

    pd_lease_landed(l->leases, s->lease);
    pd_lease_run(l->leases, s->lease);
    s->tokens = j->tokens;
    s->tokens_max = 1200;
    s->tokens_count = s->prompt_tokens + 1;
    s->kv_tokens = s->prompt_tokens;
    s->answer_from = j->prompt;
    s->max_tokens = j->answer_max;
    s->started = s->landed = true;
    if (s->tokens_count - s->answer_from >= j->length) {
        leave(l, j, ENDED);
        return;
    }
    decode_batch_add(&l->batch, s);
    j->phase = RUNNING;
}

static void advance(load *l, job *j)
{
    if (l->now_ns < j->due_ns)
        return;
    switch (j->phase) {
    case WAITING:
        if (!ask(l, j))
            j->due_ns = l->now_ns + 50 * PD_NS_PER_MS;
        break;
    case PROMISED:
        if (below(l, 40) == 0) {
            leave(l, j, WAITING); /* cancelled before it was bound */
            break;
        }
        assert_int_equal(
            pd_lease_bind(l->leases, j->s.lease, j->hashes, j->s.prompt_tokens / BLOCK_TOKENS),
            PD_OK);
        j->phase = LANDING;
        j->due_ns = l->now_ns + below(l, 400) * PD_NS_PER_MS;
        break;
    case LANDING:
        if (below(l, 40) == 0)
            leave(l, j, WAITING);
        else
            start(l, j);
        break;
    case QUARANTINED:
        assert_true(pd_lease_sender_acked(l->leases, j->s.key.number, j->attempts));
        j->phase = WAITING;
        break;
    case RUNNING: /* told: the router ends it here, and it begins again somewhere or here */
        if (!j->s.told || l->deaf)
            break;
        leave(l, j, WAITING);
        break;
    case ENDED: break;
    }
}

static void step(load *l)
{
    decode_sequence *s;
    uint64_t number = 0;

    decode_room_prepare(&l->room, &l->batch, l->all, STEP_MS, l->now_ns);
    uint32_t count = decode_batch_plan(&l->batch, l->slices);
    uint32_t standing = 0;
    for (s = l->all; s != NULL; s = s->next) {
        standing += s->standing;
        l->stalls += s->in_batch && s->stalled;
    }
    assert_int_equal(standing, l->room.standing);
    for (uint32_t i = 0; i < count; i++) {
        s = l->slices[i].request;
        job *j = &l->jobs[s->key.number - 1];
        uint32_t index;
        pd_finish finish;
        assert_true((uint64_t)s->lease->blocks_count * BLOCK_TOKENS >=
                    l->slices[i].position + l->slices[i].count);
        s->in_step = false;
        l->slices[i].token_out = 1;
        if (decode_batch_take(s, &l->slices[i], 100000, &index, &finish) == 0)
            continue;
        j->answered = index + 1;
        if (j->answered < j->length)
            continue;
        decode_lengths_observe(&l->room.lengths, j->answered, j->length < j->answer_max);
        leave(l, j, ENDED);
    }
    while ((s = decode_room_next_told(l->all, l->now_ns)) != NULL) {
        job *j = &l->jobs[s->key.number - 1];
        j->told++;
        j->due_ns = l->now_ns + below(l, 1000) * PD_NS_PER_MS;
        number++;
    }
    while ((s = decode_room_next_overdue(l->all, l->now_ns)) != NULL) {
        job *j = &l->jobs[s->key.number - 1];
        j->failed++;
        leave(l, j, WAITING);
    }
    l->steps++;
    pd_ledger ledger = pd_blocks_ledger(&l->blocks);
    l->used_sum += ledger.running + ledger.leased;
    pd_blocks_tick(&l->blocks);
}

/* Until all have ended; false when they do not within so many steps. */
static bool run(load *l, uint64_t steps_max)
{
    for (uint64_t i = 0; i < steps_max; i++) {
        bool left = false;
        for (uint32_t k = 0; k < l->jobs_count; k++) {
            advance(l, &l->jobs[k]);
            left = left || l->jobs[k].phase != ENDED;
        }
        if (!left)
            return true;
        step(l);
        l->now_ns += STEP_MS * PD_NS_PER_MS;
    }
    return false;
}

static void everybody_ends_whatever_the_load(void **state)
{
    (void)state;
    static load l;
    uint64_t told = 0, failed = 0, jobs = 0, again = 0;

    for (uint64_t seed = 1; seed <= 3000; seed++) {
        l.seed = seed;
        uint32_t blocks = 8 + below(&l, 120), batch = 1 + below(&l, 12);
        load_init(&l, seed, blocks, batch, 1 + (uint32_t)(seed % 24));
        l.deaf = seed % 5 == 0;
        if (seed % 2 == 0)
            expect_short_answers(&l);
        if (!run(&l, 200000))
            fail_msg("seed %llu: some do not end", (unsigned long long)seed);
        for (uint32_t i = 0; i < l.jobs_count; i++) {
            told += l.jobs[i].told;
            failed += l.jobs[i].failed;
            again += l.jobs[i].attempts - 1;
            jobs++;
        }
        assert_int_equal(leases(&l), 0);
        pd_ledger ledger = pd_blocks_ledger(&l.blocks);
        assert_int_equal(ledger.free + ledger.cached, ledger.total);
        load_fini(&l);
    }
    print_message("# %llu requests: %llu suspended, %llu overdue, %llu further attempts\n",
                  (unsigned long long)jobs, (unsigned long long)told, (unsigned long long)failed,
                  (unsigned long long)again);
    assert_true(told > 100 && failed > 10);
}

/* One that is alone and fits is never told to go. */
static void who_is_alone_gets_on(void **state)
{
    (void)state;
    static load l;

    for (uint64_t seed = 1; seed <= 300; seed++) {
        load_init(&l, seed, 8 + (uint32_t)seed % 50, 4, 1);
        assert_true(run(&l, 100000));
        assert_int_equal(l.jobs[0].told, 0);
        load_fini(&l);
    }
}

/* The first in rank is not moved away for others. */
static void a_higher_priority_is_not_suspended_for_a_lower_one(void **state)
{
    (void)state;
    static load l;
    uint64_t low = 0;

    for (uint64_t seed = 1; seed <= 300; seed++) {
        load_init(&l, seed, 90, 8, 16);
        expect_short_answers(&l);
        for (uint32_t i = 0; i < l.jobs_count; i++)
            l.jobs[i].priority = i == 3 ? 9 : 0;
        assert_true(run(&l, 200000));
        assert_int_equal(l.jobs[3].told, 0);
        for (uint32_t i = 0; i < l.jobs_count; i++)
            low += l.jobs[i].told;
        load_fini(&l);
    }
    assert_true(low > 10);
}

/* What the prediction is for: limits far above what answers come to. */
static void memory_is_used_for_answers_and_not_for_their_limits(void **state)
{
    (void)state;
    static load l;
    uint64_t told = 0;

    load_init(&l, 77, 256, 32, 800);
    for (uint32_t i = 0; i < l.jobs_count; i++) {
        job *j = &l.jobs[i];
        j->prompt = 50 + below(&l, 200);
        j->answer_max = 700;
        j->length = 20 + below(&l, below(&l, 4) == 0 ? 300 : 80);
        j->priority = 0;
    }
    assert_true(run(&l, 200000));
    for (uint32_t i = 0; i < l.jobs_count; i++)
        told += l.jobs[i].told;
    print_message("# %u requests in %llu steps, %.0f of 256 blocks in use, %llu suspended, %llu "
                  "stalls\n",
                  l.jobs_count, (unsigned long long)l.steps, (double)l.used_sum / (double)l.steps,
                  (unsigned long long)told, (unsigned long long)l.stalls);
    /* With all of max_tokens set aside 5 would be there at a time, for some 85 steps each. */
    assert_true(l.steps < 800 * 85 / 5 / 2);
    assert_true(told < l.jobs_count / 10);
    load_fini(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everybody_ends_whatever_the_load),
        cmocka_unit_test(who_is_alone_gets_on),
        cmocka_unit_test(a_higher_priority_is_not_suspended_for_a_lower_one),
        cmocka_unit_test(memory_is_used_for_answers_and_not_for_their_limits),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
