/* What a request survives, and how: each rule of docs/lifecycle.md by itself, then all of them in a
 * storm. */

#include "common/base/log.h"
#include "common/kv/prefix_hash.h"
#include "router/lifecycle.h"
#include "router/patience.h"
#include "tests/unit/router/world.h"

#include <stdio.h>

static uint64_t taken[ROUTER_TRANSITIONS_MAX]; /* by all tests of this file */

static void end_world(world *w)
{
    uint32_t count;
    const uint64_t *counts = router_core_transitions(w->fake.core, &count);
    for (uint32_t i = 0; i < count; i++)
        taken[i] += counts[i];
    world_free(w);
}

static uint32_t busy_decode(const fake *f)
{
    for (uint32_t i = 0; i < f->workers_count; i++) {
        const fake_worker *w = &f->workers[i];
        for (uint32_t n = 0; w->alive && w->role == PD_ROLE_DECODE && n < FAKE_LEASES_MAX; n++) {
            if (w->leases[n].blocks != 0)
                return i;
        }
    }
    fail_msg("no decode worker is busy");
    return 0;
}

/* ---- the table ---- */

static char *cell(char **at)
{
    char *start = *at, *end = strstr(start, " |");
    assert_non_null(end);
    *end = '\0';
    *at = end + 2;
    while (*start == ' ')
        start++;
    if (**at == ' ')
        (*at)++;
    return start;
}

static void the_documents_table_is_the_codes(void **state)
{
    (void)state;
    char path[512], line[1024];
    uint32_t count, row = 0;
    const router_transition *table = router_lifecycle_table(&count);
    const char *root = getenv("KVFERRY_TESTS");
    snprintf(path, sizeof path, "%s/../docs/lifecycle.md", root != NULL ? root : "tests");
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    bool inside = false;
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "| state | event |", 17) == 0) {
            inside = true;
            assert_non_null(fgets(line, sizeof line, file)); /* the rule under the head */
            continue;
        }
        inside = inside && line[0] == '|';
        if (!inside)
            continue;
        char *at = line + 1;
        assert_true(row < count);
        assert_string_equal(cell(&at), router_request_state_name(table[row].from));
        assert_string_equal(cell(&at), router_event_name(table[row].event));
        assert_string_equal(cell(&at), router_request_state_name(table[row].to));
        assert_string_equal(cell(&at), table[row].action);
        assert_string_equal(cell(&at), table[row].deadline);
        row++;
    }
    fclose(file);
    assert_int_equal(row, count);
    for (uint32_t i = 0; i < count; i++) { /* an event has one outcome */
        for (uint32_t k = 0; k < i; k++)
            assert_false(table[i].from == table[k].from && table[i].event == table[k].event);
    }
}

/* ---- patience ---- */

static void patience_follows_the_work(void **state)
{
    (void)state;
    router_core_config config;
    pd_cost cost;
    fake_config(&config);
    pd_cost_init(&cost);
    config.prefill_ns = 120 * PD_NS_PER_S;
    config.transfer_ns = 30 * PD_NS_PER_S;
    /* 100 ms: 10 s and 8 times that; 131072 tokens at 2 ms each: four times, whatever is set. */
    assert_int_equal(router_patience_prefill_ns(&config, 20, 80), 10800 * PD_NS_PER_MS);
    assert_int_equal(router_patience_prefill_ns(&config, 0, 131072 * 2), 1048576 * PD_NS_PER_MS);
    /* between the two it is what is configured */
    assert_int_equal(router_patience_prefill_ns(&config, 0, 20000), 120 * PD_NS_PER_S);
    cost.ship_base_ms = 0;
    cost.ship_byte_ms = 1e-6;
    assert_int_equal(router_patience_landing_ns(&config, &cost, 1000000, 0), 5008 * PD_NS_PER_MS);
    assert_int_equal(router_patience_landing_ns(&config, &cost, 20000000000, 0), 80 * PD_NS_PER_S);
    /* a link that has become slow is given twice as long by each attempt that it failed */
    assert_int_equal(router_patience_landing_ns(&config, &cost, 1000000, 1), 10016 * PD_NS_PER_MS);
    assert_int_equal(router_patience_landing_ns(&config, &cost, 1000000, 99),
                     32 * 5008 * PD_NS_PER_MS);
    assert_true(router_patience_behind_ns(&config, PD_NS_PER_S) > PD_NS_PER_S);
    assert_int_equal(router_patience_ms(1), 1);
}

/* ---- resume ---- */

static void a_lost_decode_worker_costs_no_token(void **state)
{
    (void)state;
    world *w = world_new(9);
    fake *f = &w->fake;
    fake_add(f, PD_ROLE_PREFILL, 512);
    fake_add(f, PD_ROLE_DECODE, 512);
    fake_add(f, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 900);
    wait_for_token(w, a, 100);
    uint32_t victim = busy_decode(f);
    fake_kill(f, victim);
    const pd_msg_prefill_request *again = &f->workers[0].last_prefill;
    while (again->key.epoch < 2)
        wait_ms(w, 1);
    uint32_t had = again->tokens_count - 40;
    assert_in_range(had, 101, 105); /* what the client has: nothing twice, nothing left out */
    assert_int_equal(again->prompt_tokens, 40);
    assert_int_equal(again->max_tokens, 900);
    assert_int_equal(again->hashes_count, (40 + had) / FAKE_BLOCK);
    wait_ms(w, 2000);
    const fake_worker *other = &f->workers[3 - victim];
    assert_int_equal(other->last_lease.prompt_tokens, 40 + had);
    assert_int_equal(other->last_lease.max_tokens, 900 - had);
    assert_int_equal(other->last_start.prompt_tokens, 40);
    assert_int_equal(other->last_start.tokens_count, 40 + had + 1);
    assert_whole(w, a);
    assert_int_equal(a->finish.cached_tokens, 3); /* the first prefill's */
    assert_int_equal(a->finish.prompt_tokens, 40);
    assert_int_equal(counters_of(w).resumed, 1);
    assert_int_equal(counters_of(w).retries[ROUTER_RETRY_LOST], 1);
    end_world(w);
}

/* So that what lies in caches of the answer's blocks is found. */
static void the_hash_chain_goes_on_over_the_answer(void **state)
{
    (void)state;
    world *w = one_to_one(41);
    fake *f = &w->fake;
    f->config.decode_idle_ns = PD_NS_PER_S;
    answer *a = ask(w, 32, 200); /* first is 1: hashes {1, 1}, {1, 2} */
    wait_for_token(w, a, 70);
    f->decode_status = PD_E_INTERNAL;
    while (f->workers[0].last_prefill.key.epoch < 2)
        wait_ms(w, 1);
    f->decode_status = PD_OK;
    uint32_t count = f->workers[0].last_prefill.tokens_count;
    pd_hash128 hash = {1, 2};
    for (uint32_t block = 2; block < count / FAKE_BLOCK; block++) {
        uint32_t tokens[FAKE_BLOCK];
        for (uint32_t i = 0; i < FAKE_BLOCK; i++)
            tokens[i] = fake_token(a->first, (block - 2) * FAKE_BLOCK + i);
        hash = pd_prefix_hash_next(hash, tokens, FAKE_BLOCK);
    }
    assert_true(count / FAKE_BLOCK > 4);
    assert_true(pd_hash128_equal(hash, f->workers[0].last_hash));
    wait_ms(w, 1000);
    assert_whole(w, a);
    end_world(w);
}

static void whatever_fails_after_the_first_token_goes_on(void **state)
{
    (void)state;
    world *w = one_to_one(42);
    answer *a = ask(w, 40, 200);
    wait_for_token(w, a, 20);
    w->fake.decode_status = PD_E_INTERNAL; /* it says so */
    wait_ms(w, 3);
    w->fake.decode_status = PD_OK;
    wait_for_token(w, a, 50);
    w->fake.lose[PD_MSG_STEP_TOKENS] = 40; /* more than can wait for the one before */
    wait_ms(w, 1500);
    wait_ms(w, 4000);
    assert_whole(w, a);
    router_core_counters counters = counters_of(w);
    assert_true(counters.retries[ROUTER_RETRY_FAILED] >= 2);
    assert_int_equal(counters.retried, counters.resumed);
    end_world(w);
}

static void the_last_token_alone_needs_no_decode_worker(void **state)
{
    (void)state;
    world *w = one_to_one(43);
    answer *a = ask(w, 40, 30);
    wait_for_token(w, a, 10);
    w->fake.lose[PD_MSG_STEP_TOKENS] = 100;
    while (w->fake.workers[1].leases[0].next < 29)
        wait_ms(w, 1);
    w->fake.lose[PD_MSG_STEP_TOKENS] = 0;
    wait_ms(w, 3000);
    assert_whole(w, a);
    end_world(w);
}

static void a_pool_that_comes_back_is_waited_for(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        world *w = one_to_one(44);
        answer *a = ask(w, 40, 300);
        wait_for_token(w, a, 20);
        for (uint32_t i = 0; i < 2; i++) {
            if (which == 2 || which == (int)i)
                fake_kill(&w->fake, i);
        }
        wait_ms(w, 1500);
        for (uint32_t i = 0; i < 2; i++) {
            if (!w->fake.workers[i].alive)
                fake_restart(&w->fake, i);
        }
        wait_ms(w, 3000);
        assert_whole(w, a);
        end_world(w);
    }
}

static void a_pool_that_stays_away_is_a_503_with_retry_after(void **state)
{
    (void)state;
    world *w = one_to_one(45);
    answer *a = ask(w, 40, 300);
    wait_for_token(w, a, 20);
    fake_kill(&w->fake, 1);
    wait_ms(w, 4000);
    assert_int_equal(a->status, 503);
    assert_string_equal(a->code, "no_worker");
    assert_true(a->retry_after > 0);
    assert_nothing_left(w);
    end_world(w);
}

static void a_new_session_is_a_retry_at_once(void **state)
{
    (void)state;
    for (uint32_t which = 0; which < 3; which++) {
        world *w = one_to_one(46);
        answer *a = ask(w, 40, 100);
        if (which == 0) {
            while (w->fake.workers[0].prefills == 0)
                fake_run(&w->fake, w->fake.now_ns + 100000);
        } else if (which == 1) {
            wait_for_token(w, a, 20);
        } else { /* it has made the first token, and its blocks are still to be shipped */
            w->fake.lose[PD_MSG_TARGETS] = 1;
            wait_for_token(w, a, 0);
        }
        fake_new_session(&w->fake, which % 2);
        wait_ms(w, 400); /* its next heartbeat, and the rest of the answer */
        assert_whole(w, a);
        assert_int_equal(counters_of(w).retries[ROUTER_RETRY_SESSION], 1);
        assert_int_equal(counters_of(w).workers_lost, 0);
        end_world(w);
    }
}

/* ---- bounds ---- */

static void a_clients_error_is_never_tried_again(void **state)
{
    (void)state;
    const pd_status errors[] = {PD_E_TOO_LARGE, PD_E_INVALID};
    for (int i = 0; i < 4; i++) {
        world *w = one_to_one(47);
        fake_add(&w->fake, PD_ROLE_PREFILL, 512);
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 200);
        if (i < 2)
            w->fake.prefill_status = errors[i];
        else
            w->fake.decode_status = errors[i - 2];
        answer *a = ask(w, 40, 20);
        wait_ms(w, 500);
        assert_int_equal(a->status, 400);
        assert_int_equal(w->fake.sent[PD_MSG_PREFILL_REQUEST], 1);
        assert_int_equal(counters_of(w).retried, 0);
        assert_nothing_left(w);
        end_world(w);
    }
}

static void attempts_are_bounded_and_back_off(void **state)
{
    (void)state;
    world *w = one_to_one(48);
    w->fake.prefill_status = PD_E_INTERNAL;
    answer *a = ask(w, 40, 20);
    uint64_t began_ns = w->fake.now_ns;
    while (a->ends == 0)
        wait_ms(w, 1);
    /* the second at once, the third after 25 to 75 ms, the fourth after 50 to 150 */
    assert_in_range(w->fake.now_ns - began_ns, 75 * PD_NS_PER_MS, 275 * PD_NS_PER_MS);
    assert_int_equal(a->status, 503);
    assert_string_equal(a->code, "worker_failed");
    assert_int_equal(w->fake.sent[PD_MSG_PREFILL_REQUEST], 4);
    assert_int_equal(counters_of(w).retries[ROUTER_RETRY_FAILED], 3);
    wait_ms(w, 100);
    assert_nothing_left(w);
    end_world(w);
}

/* Each makes tokens, and fails then: it is never the fourth in a row, but the 17th in all. */
static void attempts_are_bounded_however_far_each_comes(void **state)
{
    (void)state;
    world *w = one_to_one(70);
    answer *a = ask(w, 40, 3000);
    for (uint32_t attempt = 1; attempt <= 17; attempt++) {
        begin_to_run(w, a);
        assert_int_equal(counters_of(w).retried, attempt - 1);
        w->fake.decode_status = PD_E_INTERNAL;
        while (a->ends == 0 && counters_of(w).retried < attempt)
            fake_run(&w->fake, w->fake.now_ns + 50000);
        w->fake.decode_status = PD_OK;
        assert_int_equal(a->ends, attempt == 17);
    }
    assert_int_equal(a->status, 503);
    assert_string_equal(a->code, "worker_failed");
    assert_int_equal(w->fake.sent[PD_MSG_PREFILL_REQUEST], 17);
    wait_ms(w, 100);
    assert_nothing_left(w);
    end_world(w);
}

static void few_requests(router_core_config *config)
{
    config->requests_max = 6;
}

static void there_is_never_a_storm_of_retries(void **state)
{
    (void)state;
    world *w = world_with(49, few_requests);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    w->fake.prefill_status = PD_E_INTERNAL;
    for (int i = 0; i < 100; i++) {
        ask(w, 40, 20);
        wait_ms(w, 100);
    }
    /* a bucket of 6, 10 seconds of 6 a minute, and a tenth of 100 */
    router_core_counters counters = counters_of(w);
    assert_in_range(counters.retried, 15, 6 + 1 + 10);
    assert_true(counters.budget_exhausted > 50);
    bool told = false;
    for (uint32_t i = 0; i < w->count; i++)
        told |= strcmp(w->answers[i].code, "retry_budget") == 0 && w->answers[i].retry_after > 0;
    assert_true(told);
    w->fake.prefill_status = PD_OK;
    wait_ms(w, 1000);
    assert_nothing_left(w);
    end_world(w);
}

static void who_brings_down_two_workers_gets_no_third(void **state)
{
    (void)state;
    world *w = world_new(50);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    for (int i = 0; i < 3; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 3000);
    uint32_t victims[2];
    for (int i = 0; i < 2; i++) {
        uint32_t had = a->next;
        while (a->next <= had + 1) /* before it has made many there */
            fake_run(&w->fake, w->fake.now_ns + 50000);
        victims[i] = busy_decode(&w->fake);
        fake_kill(&w->fake, victims[i]);
    }
    wait_ms(w, 700);
    assert_int_equal(a->status, 500);
    assert_string_equal(a->code, "request_suspect");
    assert_non_null(strstr(a->message, "r1"));
    assert_non_null(strstr(a->message, w->fake.workers[victims[0]].name));
    assert_non_null(strstr(a->message, w->fake.workers[victims[1]].name));
    assert_int_equal(counters_of(w).suspects, 1);
    wait_ms(w, 500);
    assert_nothing_left(w);
    end_world(w);
}

/* It ran for a while at each: whatever killed them, it was not this. */
static void who_ran_for_a_while_where_workers_died_goes_on(void **state)
{
    (void)state;
    world *w = world_new(53);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    for (int i = 0; i < 4; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 3000);
    for (int i = 0; i < 3; i++) {
        wait_for_token(w, a, a->next + 20);
        fake_kill(&w->fake, busy_decode(&w->fake));
        wait_ms(w, 700);
    }
    wait_ms(w, 60000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).suspects, 0);
    end_world(w);
}

/* One that only waits in a worker's queue, or lands there, is no suspect. */
static void who_only_waited_at_a_dead_worker_is_no_suspect(void **state)
{
    (void)state;
    world *w = one_to_one(51);
    w->fake.lose[PD_MSG_PREFILL_STARTED] = 100;
    w->fake.workers[0].deaf = true;
    w->fake.workers[0].queue_ms = 5000; /* a queue before it */
    wait_ms(w, 200);
    answer *a = ask(w, 40, 20);
    for (int i = 0; i < 3; i++) {
        wait_ms(w, 100);
        fake_kill(&w->fake, 0);
        wait_ms(w, 600);
        fake_restart(&w->fake, 0);
        w->fake.workers[0].deaf = i < 2;
        w->fake.workers[0].queue_ms = i < 2 ? 5000 : 0;
        wait_ms(w, 200);
    }
    w->fake.lose[PD_MSG_PREFILL_STARTED] = 0;
    wait_ms(w, 2000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).suspects, 0);
    end_world(w);
}

static void what_was_wrong_twice_is_done_by_another_pair(void **state)
{
    (void)state;
    world *w = world_new(52);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    w->fake.seal_failures = 1000;
    answer *a = ask(w, 40, 20);
    uint32_t bad = w->fake.workers[0].prefills > 0 ? 0 : 1;
    while (counters_of(w).seal_failures == 0) {
        wait_ms(w, 1);
        if (w->fake.workers[0].prefills + w->fake.workers[1].prefills > 0)
            bad = w->fake.workers[0].prefills > 0 ? 0 : 1;
    }
    w->fake.seal_failures = 0;
    wait_ms(w, 1000);
    assert_whole(w, a);
    assert_int_equal(counters_of(w).refetches, 1);
    assert_int_equal(counters_of(w).retries[ROUTER_RETRY_SEAL], 1);
    assert_int_equal(w->fake.workers[1 - bad].last_prefill.key.epoch, 2);
    /* either end may have been to blame: one decode worker had the first attempt, one the second */
    assert_int_equal(
        w->fake.workers[2].last_lease.key.epoch + w->fake.workers[3].last_lease.key.epoch, 1 + 2);
    end_world(w);
}

static void each_block_is_asked_for_again_once(void **state)
{
    (void)state;
    world *w = one_to_one(66);
    fake *f = &w->fake;
    answer *a = ask(w, 40, 20);
    while (!f->workers[1].leases[0].bound)
        fake_run(f, f->now_ns + 100000);
    const uint32_t asked[][3] = {{0, 0, 1}, {1, 0, 2}, {0, 2, 1}, {0, 0, 1}, {1, 1, 1}};
    for (int i = 0; i < 5; i++) {
        pd_message message = {.kind = PD_MSG_REFETCH,
                              .refetch = {.key = f->workers[1].leases[0].key,
                                          .group = asked[i][0],
                                          .first_block = asked[i][1],
                                          .count = asked[i][2]}};
        router_core_on_message(f->core, f->workers[1].identity, &message, f->now_ns);
    }
    assert_int_equal(f->sent[PD_MSG_SHIP_AGAIN], 3); /* the last two were asked for before */
    assert_int_equal(counters_of(w).refetches, 3);
    wait_ms(w, 500);
    assert_whole(w, a);
    end_world(w);
}

/* ---- out of room ---- */

static world *suspended_world(uint64_t seed, uint32_t decodes)
{
    world *w = world_new(seed);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    for (uint32_t i = 0; i < decodes; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    return w;
}

static answer *suspend_one(world *w, uint32_t tokens)
{
    answer *a = ask(w, 40, 100);
    wait_for_token(w, a, tokens);
    w->fake.suspends = 1000;
    while (w->fake.workers[busy_decode(&w->fake)].leases[0].suspended == false)
        fake_run(&w->fake, w->fake.now_ns + 200000);
    w->fake.suspends = 0;
    return a;
}

static void a_sequence_without_room_moves_with_its_kv(void **state)
{
    (void)state;
    world *w = suspended_world(53, 2);
    fake *f = &w->fake;
    answer *a = suspend_one(w, 30);
    uint32_t from = busy_decode(f);
    uint32_t had = f->workers[from].leases[0].next;
    wait_ms(w, 300);
    const fake_worker *old = &f->workers[from], *new = &f->workers[3 - from];
    assert_whole(w, a);
    assert_int_equal(counters_of(w).moves, 1);
    assert_int_equal(counters_of(w).gave_way, 0);
    assert_int_equal(f->sent[PD_MSG_PREFILL_REQUEST], 1); /* nothing was computed again */
    assert_true(new->last_lease.bind);
    assert_string_equal(new->last_lease.sender.name, old->name);
    assert_int_equal(new->last_lease.prompt_tokens, 40 + had - 1);
    assert_int_equal(new->last_lease.max_tokens, 100 - had + 1);
    assert_int_equal(old->last_ship.source_epoch, 1);
    assert_int_equal(old->last_ship.key.epoch, 2);
    assert_string_equal(old->last_ship.receiver.name, new->name);
    assert_int_equal(old->last_ship.kv_tokens, 40 + had - 1);
    assert_int_equal(old->last_ship.blocks_count, (40 + had - 1 + 15) / 16);
    assert_int_equal(new->last_start.tokens_count, 40 + had);
    assert_int_equal(old->kept, 1);
    end_world(w);
}

static void a_sequence_that_cannot_move_gives_way(void **state)
{
    (void)state;
    for (uint32_t failures = 0; failures <= 1000; failures += 1000) {
        world *w = suspended_world(54, failures == 0 ? 1 : 2); /* none to go to, or a bad link */
        w->fake.ship_failures = failures;
        answer *a = suspend_one(w, 30);
        uint32_t from = busy_decode(&w->fake);
        wait_ms(w, 600);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).gave_way, 1);
        assert_int_equal(counters_of(w).moves, 0);
        assert_int_equal(counters_of(w).moves_failed, failures / 1000);
        assert_int_equal(counters_of(w).retried, 0);
        assert_int_equal(w->fake.workers[from].kept, 1);
        assert_int_equal(w->fake.sent[PD_MSG_PREFILL_REQUEST], 2);
        end_world(w);
    }
}

/* Its last token may be a long time on the way: nothing is decided before it is here. */
static void await_tokens(bool ends)
{
    world *w = suspended_world(55, 2);
    fake *f = &w->fake;
    answer *a = ask(w, 40, 100);
    wait_for_token(w, a, 30);
    uint32_t from = busy_decode(f);
    while (f->workers[from].leases[0].next <= 40)
        fake_run(f, f->now_ns + 100000);
    f->lose[PD_MSG_STEP_TOKENS] = 1;
    while (f->lose[PD_MSG_STEP_TOKENS] == 1)
        fake_run(f, f->now_ns + 100000);
    f->suspends = 1000;
    wait_ms(w, 20);
    f->suspends = 0;
    assert_int_equal(counters_of(w).suspended, 1);
    assert_int_equal(counters_of(w).moves + counters_of(w).gave_way, 0);
    if (ends) {
        router_core_end_all(f->core);
        wait_ms(w, 100);
        assert_int_equal(a->status, 503);
        assert_nothing_left(w);
    } else {
        wait_ms(w, 1500); /* it never comes */
        assert_whole(w, a);
        assert_int_equal(counters_of(w).gave_way, 1);
    }
    end_world(w);
}

static void a_suspended_sequences_tokens_are_awaited(void **state)
{
    (void)state;
    for (int ends = 0; ends < 2; ends++)
        await_tokens(ends != 0);
}
static void a_worker_lost_while_a_sequence_moves_costs_no_token(void **state)
{
    (void)state;
    for (uint64_t at_us = 0; at_us < 8000; at_us += 500) {
        for (int which = 0; which < 2; which++) {
            world *w = suspended_world(56 + at_us, 2);
            answer *a = suspend_one(w, 30);
            uint32_t from = busy_decode(&w->fake);
            fake_run(&w->fake, w->fake.now_ns + at_us * 1000);
            fake_kill(&w->fake, which == 0 ? from : 3 - from);
            wait_ms(w, 2500);
            assert_whole(w, a);
            end_world(w);
        }
    }
}

/* ---- pulls ---- */

static void blocks_that_a_decode_worker_holds_are_fetched(void **state)
{
    (void)state;
    for (int fails = 0; fails < 2; fails++) {
        world *w = one_to_one(57);
        fake *f = &w->fake;
        f->ship_failures = fails != 0 ? 1000 : 0;
        store_prompt(w, 1, 1, 20);
        answer *a = ask(w, 320, 20); /* 20 blocks: the last token is computed in any case */
        wait_ms(w, 500);
        const fake_worker *prefill = &f->workers[0], *decode = &f->workers[1];
        assert_whole(w, a);
        assert_string_equal(prefill->last_prefill.pull.name, "decode-1");
        assert_int_equal(prefill->last_prefill.pull_blocks, 19);
        /* on a busy host either end gets its turn late: what beats is waited for; and a link may
         * be slower than it was */
        double ship_ms = pd_cost_ship_ms(&f->config.cost, 19 * f->config.block_bytes);
        double patience_ms = (double)f->config.heartbeat_ns / PD_NS_PER_MS * 2 + 4 * ship_ms;
        assert_true(4 * ship_ms > 5);
        assert_int_equal(prefill->last_prefill.pull_ms, 1 + (uint32_t)patience_ms);
        /* for as long its source ships; then its last word comes */
        assert_int_equal(decode->last_ship.deadline_ms, prefill->last_prefill.pull_ms);
        assert_int_equal(decode->last_ship.source_epoch, 0);
        assert_int_equal(decode->last_ship.hashes_count, 19);
        assert_int_equal(decode->last_ship.blocks_count, 19);
        assert_int_equal(decode->last_ship.kv_tokens, 19 * 16);
        assert_string_equal(decode->last_ship.receiver.name, "prefill-0");
        assert_int_equal(prefill->pulled, !fails);
        assert_int_equal(prefill->pull_ends, fails);
        assert_int_equal(counters_of(w).pulls, 1);
        assert_int_equal(counters_of(w).pulls_failed, fails);
        end_world(w);
    }
}

static void dear_links(router_core_config *config)
{
    config->cost.ship_byte_ms = 1; /* computing is cheaper */
}

static void blocks_that_are_cheaper_computed_are_not_fetched(void **state)
{
    (void)state;
    world *w = world_with(58, dear_links);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    store_prompt(w, 1, 1, 20);
    answer *a = ask(w, 320, 2);
    wait_ms(w, 500);
    assert_int_equal(w->fake.workers[0].last_prefill.pull_blocks, 0);
    assert_int_equal(a->status, 0);
    end_world(w);
}

static void slow_heartbeats(router_core_config *config)
{
    config->heartbeat_ns = 5 * PD_NS_PER_S;
    config->lost_after_ns = 60 * PD_NS_PER_S;
}

/* A pull has two heartbeats of patience: computing takes a small part of that. */
static void a_prompt_has_the_time_of_its_pull_on_top(void **state)
{
    (void)state;
    world *w = world_with(60, slow_heartbeats);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    store_prompt(w, 1, 1, 20);
    const answer *a = ask(w, 320, 2);
    wait_ms(w, 2000);
    const pd_msg_prefill_request *asked = &w->fake.workers[0].last_prefill;
    assert_whole(w, a);
    assert_in_range(asked->pull_ms, 10000, 11000);
    uint64_t pull_ns = router_patience_prefill_ns(&w->fake.config, asked->pull_ms - 1, 0);
    assert_true(asked->deadline_ms >= router_patience_ms(pull_ns));
    end_world(w);
}

static void a_lost_source_does_not_hold_up_a_prompt(void **state)
{
    (void)state;
    world *w = world_new(59);
    fake *f = &w->fake;
    fake_add(f, PD_ROLE_PREFILL, 512);
    fake_add(f, PD_ROLE_DECODE, 2); /* room for nothing, but it holds the blocks */
    fake_add(f, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    store_prompt(w, 1, 1, 20);
    answer *a = ask(w, 320, 20);
    while (f->sent[PD_MSG_PREFILL_REQUEST] == 0)
        fake_run(f, f->now_ns + 100000);
    fake_kill(f, 1);
    f->workers[0].last_prefill.pull_ms = 0;
    wait_ms(w, 3000);
    assert_whole(w, a);
    end_world(w);
}

/* Of a request that has left, whose pull the prefill worker gave up: the source's last word is
 * counted, and a question for it has nothing written again, which nobody could tell from the first
 * writing. */
static void a_last_word_is_asked_for_without_a_writing(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++) {
        world *w = one_to_one(57);
        fake *f = &w->fake;
        fake_worker *prefill = &f->workers[0], *decode = &f->workers[1];
        store_prompt(w, 1, 1, 20);
        const answer *a = ask(w, 320, 20);
        while (f->sent[PD_MSG_SHIP_REQUEST] == 0)
            fake_run(f, f->now_ns + 100000);
        pd_request_key key = prefill->last_prefill.key;
        pd_message refetch = {.kind = PD_MSG_REFETCH, .refetch = {.key = key, .count = 1}};
        pd_message done = {.kind = PD_MSG_SHIP_DONE, .ship_done = {.key = key}};
        if (which == 1)
            router_core_on_message(f->core, prefill->identity, &refetch, f->now_ns);
        router_core_cancel(f->core, a->handle, f->now_ns);
        prefill->quarantined = key;
        if (which == 1) { /* said before it heard that one is to be written again */
            decode->prefills = 0;
            router_core_on_message(f->core, decode->identity, &done, f->now_ns);
            fake_run(f, f->now_ns + 10 * PD_NS_PER_MS);
            assert_int_equal(prefill->quarantined.number, key.number);
            done.ship_done.again = 1;
            router_core_on_message(f->core, decode->identity, &done, f->now_ns);
            fake_run(f, f->now_ns + 10 * PD_NS_PER_MS);
        } else {
            decode->prefills = 0; /* what it said was lost */
            wait_ms(w, 7000);
            assert_int_equal(decode->last_again.group, UINT32_MAX);
            done.ship_done.status = PD_E_NOT_FOUND;
            router_core_on_message(f->core, decode->identity, &done, f->now_ns);
            fake_run(f, f->now_ns + 10 * PD_NS_PER_MS);
        }
        assert_int_equal(prefill->quarantined.number, 0);
        end_world(w);
    }
}

/* ---- priority ---- */

static void who_is_more_important_goes_first(void **state)
{
    (void)state;
    world *w = world_new(60);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 4); /* room for one */
    wait_ms(w, 200);
    ask(w, 40, 20);
    wait_ms(w, 2);
    const answer *low = ask_with(w, 40, 20, -3), *plain = ask(w, 40, 20),
                 *high = ask_with(w, 40, 20, 7), *later = ask_with(w, 40, 20, 7);
    wait_for_token(w, high, 0);
    assert_int_equal(w->fake.workers[0].last_prefill.priority, 7);
    assert_int_equal(plain->next + later->next, 0);
    wait_for_token(w, later, 0);
    assert_int_equal(plain->next + low->next, 0);
    wait_for_token(w, plain, 0);
    assert_int_equal(low->next, 0);
    wait_ms(w, 1000);
    assert_int_equal(w->fake.workers[1].last_lease.priority, -3);
    assert_nothing_left(w);
    end_world(w);
}

/* ---- cancel, and all of it ---- */

static void cancel_while_out_of_room_frees_everything(void **state)
{
    (void)state;
    for (uint64_t at_us = 0; at_us < 16000; at_us += 250) {
        world *w = suspended_world(100 + at_us, 2);
        w->fake.ship_failures = 300;
        answer *a = suspend_one(w, 10);
        fake_run(&w->fake, w->fake.now_ns + at_us * 1000);
        if (a->ends == 0)
            a->cancelled = true;
        router_core_cancel(w->fake.core, a->handle, w->fake.now_ns);
        router_core_cancel(w->fake.core, a->handle, w->fake.now_ns); /* idempotent */
        wait_ms(w, 500);
        assert_nothing_left(w);
        end_world(w);
    }
}

/* Whichever state it is in when the router's patience ends. */
static void an_end_of_all_ends_everything(void **state)
{
    (void)state;
    for (uint64_t at_us = 0; at_us < 60000; at_us += 500) {
        world *w = suspended_world(500 + at_us, 2);
        w->fake.suspends = 100;
        ask(w, 40, 100);
        ask(w, 40, 1);
        fake_run(&w->fake, w->fake.now_ns + at_us * 1000);
        router_core_end_all(w->fake.core);
        w->fake.suspends = 0;
        wait_ms(w, 500);
        assert_nothing_left(w);
        end_world(w);
    }
}

static void upset(world *w, uint32_t what)
{
    fake *f = &w->fake;
    if (what < 60) {
        answer *a =
            ask_with(w, 1 + fake_below(f, 200), 1 + fake_below(f, 60), (int32_t)fake_below(f, 3));
        if (a->handle != 0 && fake_below(f, 5) == 0)
            a->cancel_at = fake_below(f, 20);
    } else if (what < 66 && w->count > 0) {
        answer *a = &w->answers[fake_below(f, w->count)];
        if (a->ends == 0 && !a->cancelled) {
            a->cancelled = true;
            router_core_cancel(f->core, a->handle, f->now_ns);
        }
    } else if (what < 68) {
        uint32_t i = fake_below(f, f->workers_count);
        if (!f->workers[i].alive || f->workers[i].mute)
            fake_restart(f, i);
        else if (fake_below(f, 2) == 0)
            fake_kill(f, i);
        else
            f->workers[i].mute = true;
    } else if (what < 70) {
        uint32_t i = fake_below(f, f->workers_count);
        if (f->workers[i].alive && !f->workers[i].mute)
            fake_new_session(f, i);
    } else if (what < 80) {
        uint32_t i = fake_below(f, f->workers_count);
        if (!f->workers[i].alive || f->workers[i].mute)
            fake_restart(f, i);
    }
}

static void storm(uint64_t seed)
{
    world *w = world_new(seed);
    fake *f = &w->fake;
    f->loss = seed % 4 == 0 ? 0 : 5 + fake_below(f, 20);
    f->duplicates = seed % 3 == 0 ? 0 : 30;
    f->disorder = seed % 3 == 1 ? 0 : 100;
    f->overload_prefill = seed % 5 == 0 ? 100 : 0;
    f->end_first = 50;
    f->seal_failures = seed % 2 == 0 ? 50 : 0;
    f->suspends = seed % 3 == 0 ? 0 : 10;
    f->ship_failures = 200;
    f->delay_max_us = seed % 7 == 0 ? 50000 : 2000;
    uint32_t prefills = 1 + fake_below(f, 3), decodes = 1 + fake_below(f, 3);
    for (uint32_t i = 0; i < prefills; i++)
        fake_add(f, PD_ROLE_PREFILL, 256);
    for (uint32_t i = 0; i < decodes; i++)
        fake_add(f, PD_ROLE_DECODE, 16 + fake_below(f, 100));
    for (int step = 0; step < 400; step++) {
        upset(w, fake_below(f, 100));
        fake_run(f, f->now_ns + fake_below(f, 20000) * 1000ull);
    }
    f->loss = f->duplicates = f->disorder = f->suspends = 0;
    for (uint32_t i = 0; i < f->workers_count; i++) {
        if (!f->workers[i].alive || f->workers[i].mute)
            fake_restart(f, i);
    }
    wait_ms(w, 40000);
    assert_nothing_left(w);
    router_core_counters counters = counters_of(w);
    assert_int_equal(counters.accepted, counters.finished + counters.failed + counters.cancelled);
    end_world(w);
}

static void a_storm_leaves_nothing_behind(void **state)
{
    (void)state;
    const char *text = getenv("KVFERRY_SEEDS");
    const char *from = getenv("KVFERRY_SEED");
    uint64_t seeds = text == NULL ? 40 : strtoull(text, NULL, 10);
    uint64_t first = from == NULL ? 1 : strtoull(from, NULL, 10);
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        print_message("# seed %llu\n", (unsigned long long)seed);
        storm(seed);
    }
}

static uint32_t rows_missing(bool tell)
{
    uint32_t count, missing = 0;
    const router_transition *table = router_lifecycle_table(&count);
    for (uint32_t i = 0; i < count; i++) {
        if (taken[i] > 0)
            continue;
        missing++;
        if (tell)
            print_message("# never: %s, %s\n", router_request_state_name(table[i].from),
                          router_event_name(table[i].event));
    }
    return missing;
}

/* Forty storms of a seed that is drawn anew may miss a rare row: those of the first seeds, which
 * are the same in every run, are there for it. */
static void every_row_of_the_table_was_taken(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 40 && rows_missing(false) > 0; seed++)
        storm(seed);
    assert_int_equal(rows_missing(true), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_documents_table_is_the_codes),
        cmocka_unit_test(patience_follows_the_work),
        cmocka_unit_test(a_lost_decode_worker_costs_no_token),
        cmocka_unit_test(the_hash_chain_goes_on_over_the_answer),
        cmocka_unit_test(whatever_fails_after_the_first_token_goes_on),
        cmocka_unit_test(the_last_token_alone_needs_no_decode_worker),
        cmocka_unit_test(a_pool_that_comes_back_is_waited_for),
        cmocka_unit_test(a_pool_that_stays_away_is_a_503_with_retry_after),
        cmocka_unit_test(a_new_session_is_a_retry_at_once),
        cmocka_unit_test(a_clients_error_is_never_tried_again),
        cmocka_unit_test(attempts_are_bounded_and_back_off),
        cmocka_unit_test(attempts_are_bounded_however_far_each_comes),
        cmocka_unit_test(there_is_never_a_storm_of_retries),
        cmocka_unit_test(who_brings_down_two_workers_gets_no_third),
        cmocka_unit_test(who_ran_for_a_while_where_workers_died_goes_on),
        cmocka_unit_test(who_only_waited_at_a_dead_worker_is_no_suspect),
        cmocka_unit_test(what_was_wrong_twice_is_done_by_another_pair),
        cmocka_unit_test(each_block_is_asked_for_again_once),
        cmocka_unit_test(a_sequence_without_room_moves_with_its_kv),
        cmocka_unit_test(a_sequence_that_cannot_move_gives_way),
        cmocka_unit_test(a_suspended_sequences_tokens_are_awaited),
        cmocka_unit_test(a_worker_lost_while_a_sequence_moves_costs_no_token),
        cmocka_unit_test(blocks_that_a_decode_worker_holds_are_fetched),
        cmocka_unit_test(blocks_that_are_cheaper_computed_are_not_fetched),
        cmocka_unit_test(a_prompt_has_the_time_of_its_pull_on_top),
        cmocka_unit_test(a_lost_source_does_not_hold_up_a_prompt),
        cmocka_unit_test(a_last_word_is_asked_for_without_a_writing),
        cmocka_unit_test(who_is_more_important_goes_first),
        cmocka_unit_test(cancel_while_out_of_room_frees_everything),
        cmocka_unit_test(an_end_of_all_ends_everything),
        cmocka_unit_test(a_storm_leaves_nothing_behind),
        cmocka_unit_test(every_row_of_the_table_was_taken),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
