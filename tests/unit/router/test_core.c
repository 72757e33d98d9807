/* The router's deciding part against workers that do no work, on a virtual clock: what must hold
 * however messages, failures and clients fall. */

#include "tests/unit/router/world.h"

#include "common/base/log.h"

#include <stdio.h>

enum { SETTLE_S = 30 };

/* ---- one at a time ---- */

static void a_lease_is_a_promise_until_the_prompt_starts(void **state)
{
    (void)state;
    world *w = one_to_one(31);
    const uint32_t *sent = w->fake.sent;
    const fake_worker *decode = &w->fake.workers[1];
    answer *a = ask(w, 40, 20);
    assert_int_equal(sent[PD_MSG_LEASE_REQUEST], 1);
    while (sent[PD_MSG_PREFILL_REQUEST] == 0)
        wait_ms(w, 1);
    assert_int_equal(sent[PD_MSG_BIND], 0);
    assert_false(decode->leases[0].bound);
    wait_ms(w, 500);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->status, 0);
    assert_in_range(sent[PD_MSG_BIND], 1, 2); /* the token may come before the word of the start */
    assert_in_range(sent[PD_MSG_TARGETS], 1, 2);
    assert_int_equal(sent[PD_MSG_DECODE_START], 1);
    assert_int_equal(sent[PD_MSG_RELEASE], 1);
    assert_int_equal(sent[PD_MSG_CANCEL], 0);
    assert_nothing_left(w);
    world_free(w);
}

/* Whichever word of a start is lost, the prefill worker says it again until it has its targets. */
static void a_lost_word_about_a_start_is_made_good(void **state)
{
    (void)state;
    const pd_message_kind kinds[] = {PD_MSG_PREFILL_STARTED, PD_MSG_BIND, PD_MSG_TARGETS};
    for (int i = 0; i < 3; i++) {
        world *w = one_to_one(32);
        w->fake.lose[kinds[i]] = 1;
        answer *a = ask(w, 40, 20);
        wait_ms(w, 900);
        assert_int_equal(w->fake.lose[kinds[i]], 0);
        assert_int_equal(a->ends, 1);
        assert_int_equal(a->status, 0);
        assert_nothing_left(w);
        world_free(w);
    }
}

static void copies_are_released_by_a_token_that_proves_the_landing(void **state)
{
    (void)state;
    world *w = one_to_one(33);
    w->fake.silent_landings = 1000;
    answer *a = ask(w, 40, 20);
    wait_ms(w, 500);
    assert_int_equal(a->status, 0);
    assert_int_equal(w->fake.sent[PD_MSG_RELEASE], 1);
    assert_nothing_left(w);
    world_free(w);
}

static void blocks_that_came_wrong_are_shipped_again_once(void **state)
{
    (void)state;
    for (uint32_t failures = 1; failures <= 2; failures++) {
        world *w = one_to_one(34);
        w->fake.seal_failures = 1000;
        answer *a = ask(w, 40, 20);
        while (w->fake.workers[1].leases[0].refetched < failures)
            wait_ms(w, 1);
        w->fake.seal_failures = 0;
        wait_ms(w, 900);
        assert_int_equal(a->ends, 1);
        assert_int_equal(w->fake.sent[PD_MSG_SHIP_AGAIN], 1);
        router_core_counters counters = router_core_counters_of(w->fake.core);
        assert_int_equal(counters.refetches, 1);
        assert_int_equal(counters.seal_failures, failures - 1);
        assert_nothing_left(w);
        world_free(w);
    }
}

static void a_request_gets_every_token_once_and_in_order(void **state)
{
    (void)state;
    world *w = world_new(1);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 20);
    wait_ms(w, 500);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->status, 0);
    assert_int_equal(a->finish.prompt_tokens, 40);
    assert_int_equal(a->finish.cached_tokens, 3);
    assert_nothing_left(w);
    world_free(w);
}

static void one_token_needs_no_lease(void **state)
{
    (void)state;
    world *w = world_new(2);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 1);
    wait_ms(w, 500);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->last, PD_FINISH_LENGTH);
    assert_int_equal(w->fake.sent[PD_MSG_LEASE_REQUEST], 0);
    assert_int_equal(w->fake.sent[PD_MSG_DECODE_START], 0);
    assert_int_equal(w->fake.sent[PD_MSG_CANCEL], 0);
    assert_nothing_left(w);
    world_free(w);
}

static void an_end_at_the_first_token_gives_the_lease_back(void **state)
{
    (void)state;
    world *w = world_new(3);
    w->fake.end_first = 1000;
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 20);
    wait_ms(w, 500);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->last, PD_FINISH_STOP);
    assert_int_equal(w->fake.sent[PD_MSG_DECODE_START], 0);
    assert_nothing_left(w);
    world_free(w);
}

static void without_workers_a_request_ends_with_503_that_names_what_is_missing(void **state)
{
    (void)state;
    world *w = world_new(4);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    answer *a = ask(w, 40, 20);
    wait_ms(w, 3000);
    assert_int_equal(a->status, 503);
    assert_non_null(strstr(a->message, "decode"));
    assert_nothing_left(w);
    world_free(w);
}

static void a_prompt_that_never_fits_is_the_clients_error(void **state)
{
    (void)state;
    world *w = world_new(5);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 8);
    fake_add(&w->fake, PD_ROLE_DECODE, 9);
    wait_ms(w, 200);
    answer *a = ask(w, 400, 20);
    wait_ms(w, 500);
    assert_int_equal(a->status, 400);
    assert_string_equal(a->code, "context_length_exceeded");
    a = ask(w, 4000, 2000);
    assert_int_equal(a->status, 400);
    assert_nothing_left(w);
    world_free(w);
}

static void a_full_decode_worker_makes_requests_wait_not_fail(void **state)
{
    (void)state;
    world *w = world_new(6);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 8);
    wait_ms(w, 200);
    for (int i = 0; i < 20; i++)
        ask(w, 40, 20);
    wait_ms(w, 2500);
    for (uint32_t i = 0; i < w->count; i++)
        assert_int_equal(w->answers[i].status, 0);
    assert_true(router_core_counters_of(w->fake.core).leases_refused > 0);
    assert_nothing_left(w);
    world_free(w);
}

static void a_full_queue_is_429(void **state)
{
    (void)state;
    world *w = world_new(7);
    for (uint32_t i = 0; i < w->fake.config.queue_max; i++)
        assert_int_not_equal(ask(w, 40, 20)->handle, 0);
    const answer *a = ask(w, 40, 20);
    assert_int_equal(a->handle, 0);
    assert_int_equal(a->status, 429);
    wait_ms(w, 3000);
    assert_nothing_left(w);
    world_free(w);
}

static void a_lost_prefill_worker_is_survived_before_the_first_token(void **state)
{
    (void)state;
    world *w = world_new(8);
    uint32_t victim = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 20);
    fake_kill(&w->fake, victim);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    wait_ms(w, 3000);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->status, 0);
    assert_int_equal(router_core_counters_of(w->fake.core).workers_lost, 1);
    assert_true(w->fake.workers[1].peers_gone > 0);
    assert_nothing_left(w);
    world_free(w);
}

/* It may only stand still: that nobody writes any more is not the router's to say. */
static void a_lost_writer_is_not_called_silent(void **state)
{
    (void)state;
    world *w = world_new(18);
    uint32_t victim = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 20);
    for (int i = 0; i < 100 && w->fake.workers[victim].prefills == 0; i++)
        wait_ms(w, 1);
    assert_int_equal(w->fake.workers[victim].prefills, 1);
    fake_kill(&w->fake, victim);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    wait_ms(w, 3000);
    assert_int_equal(a->ends, 1);
    assert_int_equal(w->fake.workers[decode].cancels, 1);
    assert_int_equal(w->fake.workers[decode].unwritten, 0);
    assert_nothing_left(w);
    world_free(w);
}

/* Its link was cut in the middle: it is done, and its bytes may be on their way. */
static void a_cut_writers_last_word_frees_nothing(void **state)
{
    (void)state;
    for (int may_land = 0; may_land < 2; may_land++) {
        world *w = world_new(19);
        uint32_t prefill = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
        uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 200);
        answer *a = ask(w, 40, 20);
        for (int i = 0; i < 100 && w->fake.workers[prefill].prefills == 0; i++)
            wait_ms(w, 1);
        assert_int_equal(w->fake.workers[prefill].prefills, 1);
        fake_cut(&w->fake, prefill, may_land != 0);
        wait_ms(w, 3000);
        assert_int_equal(a->ends, 1);
        assert_int_equal(w->fake.workers[decode].cancels, 1);
        assert_int_equal(w->fake.workers[decode].unwritten, !may_land);
        assert_nothing_left(w);
        world_free(w);
    }
}

/* A worker says one token of it. */
static void say_token(world *w, uint32_t worker, const pd_request_key *key, uint32_t index,
                      uint32_t token)
{
    const fake_worker *from = &w->fake.workers[worker];
    const pd_step_token one = {.key = *key, .index = index, .token = token};
    pd_message message = {
        .kind = PD_MSG_STEP_TOKENS,
        .step_tokens = {
            .incarnation = from->incarnation, .step_ms = 1, .tokens = &one, .tokens_count = 1}};
    memcpy(message.step_tokens.name, from->name, sizeof from->name);
    router_core_on_message(w->fake.core, NULL, &message, w->fake.now_ns);
}

/* The answer is that of one attempt at a time, from the worker that has it. */
static void a_token_of_another_worker_or_attempt_is_none(void **state)
{
    (void)state;
    world *w = one_to_one(21);
    fake_lease *lease = &w->fake.workers[1].leases[0];
    answer *a = ask(w, 40, 100);
    wait_for_token(w, a, 20);
    lease->stalled = true;
    wait_ms(w, 5); /* no token of it is under way */
    const pd_request_key key = lease->key;
    uint64_t dropped = counters_of(w).tokens_dropped;
    uint32_t had = a->next, wrong = 950;
    say_token(w, 0, &key, had, wrong); /* the prefill worker, which made the first one */
    assert_int_equal(counters_of(w).tokens_dropped, dropped + 1);
    assert_int_equal(a->next, had);
    say_token(w, 1, &key, had + 2, wrong); /* it waits for the two before */
    assert_int_equal(counters_of(w).tokens_dropped, dropped + 1);
    w->fake.decode_status = PD_E_IO;
    lease->stalled = false;
    while (counters_of(w).retried == 0)
        fake_run(&w->fake, w->fake.now_ns + 50000);
    w->fake.decode_status = PD_OK;
    say_token(w, 1, &key, had, wrong);
    assert_int_equal(counters_of(w).tokens_dropped, dropped + 2);
    wait_ms(w, 500); /* every token is compared as it comes */
    assert_whole(w, a);
    world_free(w);
}

/* While the router stops: what waits for workers that all leave ends at once, the rest when told.
 */
static void a_stop_ends_what_waits_for_workers_that_leave(void **state)
{
    (void)state;
    world *w = world_new(19);
    uint32_t prefill = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 4); /* room for one */
    wait_ms(w, 200);
    answer *first = ask(w, 40, 20), *second = ask(w, 40, 20);
    wait_ms(w, 10); /* the second was refused its lease */
    router_core_stop(w->fake.core);
    assert_int_equal(second->ends, 0); /* the workers are there: room may come */
    fake_kill(&w->fake, prefill);
    fake_kill(&w->fake, decode);
    wait_ms(w, 3000);
    assert_int_equal(first->ends, 1);
    assert_int_equal(second->ends, 1);
    assert_int_equal(second->status, 503);
    assert_string_equal(second->code, "shutting_down");
    world_free(w);

    w = world_new(20);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    first = ask(w, 40, 200);
    router_core_stop(w->fake.core);
    wait_ms(w, 20);
    assert_int_equal(first->ends, 0);
    router_core_end_all(w->fake.core);
    assert_int_equal(first->ends, 1);
    assert_string_equal(first->code, "shutting_down");
    wait_ms(w, 500);
    assert_nothing_left(w);
    world_free(w);
}

static void a_prefill_worker_that_decode_takes_for_dead_is_avoided(void **state)
{
    (void)state;
    world *w = world_new(21);
    uint32_t prefill = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    w->fake.workers[decode].refuses = w->fake.workers[prefill].incarnation;
    answer *alone = ask(w, 40, 20);
    wait_ms(w, 2500);
    assert_int_equal(alone->status, 503); /* and says why */
    assert_non_null(strstr(alone->message, "refused"));
    assert_true(router_core_counters_of(w->fake.core).retried > 0);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    wait_ms(w, 1000);
    for (int i = 0; i < 8; i++) {
        uint32_t asked = w->fake.sent[PD_MSG_LEASE_REQUEST];
        const answer *a = ask(w, 40, 20);
        wait_ms(w, 700);
        assert_int_equal(a->ends, 1);
        assert_int_equal(a->status, 0);
        assert_true(w->fake.sent[PD_MSG_LEASE_REQUEST] - asked <= 2);
    }
    assert_nothing_left(w);
    world_free(w);
}

static void cancel_in_every_state_frees_everything(void **state)
{
    (void)state;
    for (uint64_t at_us = 0; at_us < 20000; at_us += 250) {
        world *w = world_new(100 + at_us);
        fake_add(&w->fake, PD_ROLE_PREFILL, 512);
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 200);
        answer *a = ask(w, 40, 10);
        fake_run(&w->fake, w->fake.now_ns + at_us * 1000);
        if (a->ends == 0)
            a->cancelled = true;
        router_core_cancel(w->fake.core, a->handle, w->fake.now_ns);
        router_core_cancel(w->fake.core, a->handle, w->fake.now_ns); /* idempotent */
        wait_ms(w, 500);
        assert_nothing_left(w);
        world_free(w);
    }
}

static void deaf(pd_role role, const char *code)
{
    world *w = world_new(20 + role);
    uint32_t prefill = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    fake_worker *worker = &w->fake.workers[role == PD_ROLE_PREFILL ? prefill : decode];
    worker->deaf = true;
    answer *a = ask(w, 40, 20);
    wait_ms(w, 1800);
    assert_int_equal(a->ends, 0); /* it is the only one, and tried again */
    assert_true(counters_of(w).retries[ROUTER_RETRY_SILENT] > 0);
    wait_ms(w, 9000);
    assert_int_equal(a->status, 503);
    assert_string_equal(a->code, code);
    assert_non_null(strstr(a->message, worker->name));
    assert_true(worker->cancels > 0);
    assert_int_equal(counters_of(w).retries[ROUTER_RETRY_SILENT], 3);
    assert_nothing_left(w);
    /* With another one there it goes there. */
    fake_add(&w->fake, role, 512);
    wait_ms(w, 200);
    for (int i = 0; i < 8; i++)
        ask(w, 40, 20);
    wait_ms(w, 3000);
    for (uint32_t i = 1; i < w->count; i++)
        assert_int_equal(w->answers[i].status, 0);
    assert_nothing_left(w);
    world_free(w);
}

static void a_worker_that_does_not_answer_is_a_deadline_and_a_second_try(void **state)
{
    (void)state;
    deaf(PD_ROLE_DECODE, "worker_timeout");
    deaf(PD_ROLE_PREFILL, "worker_timeout");
}

static void an_answer_that_stalls_goes_on(void **state)
{
    (void)state;
    world *w = world_new(23);
    fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    answer *a = ask(w, 40, 1000);
    wait_ms(w, 100);
    assert_true(a->next > 2);
    /* The lease is lost at the worker, as by a bug: it beats on but sends no token. */
    memset(w->fake.workers[decode].leases, 0, sizeof w->fake.workers[decode].leases);
    w->fake.workers[decode].free = w->fake.workers[decode].blocks;
    wait_ms(w, 4000);
    assert_int_equal(a->ends, 1);
    assert_int_equal(a->status, 0);
    assert_int_equal(counters_of(w).retries[ROUTER_RETRY_SILENT], 1);
    assert_int_equal(counters_of(w).resumed, 1);
    assert_nothing_left(w);
    world_free(w);
}

/* ---- registration ---- */

static void refuse(void (*spoil)(pd_msg_hello *hello), const char *one, const char *other)
{
    world *w = world_new(10);
    uint32_t good = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    wait_ms(w, 200);
    assert_int_equal(w->fake.workers[good].welcomed, 1);
    /* A second worker that says something else. */
    fake_worker *bad = &w->fake.workers[w->fake.workers_count++];
    *bad = (fake_worker){.alive = true, .role = PD_ROLE_DECODE, .incarnation = 99, .blocks = 8};
    snprintf(bad->name, sizeof bad->name, "decode-9");
    snprintf(bad->identity, sizeof bad->identity, "decode-9/%016x", 99);
    pd_message message = {.kind = PD_MSG_HELLO};
    fake_hello(&w->fake, bad, &message.hello);
    spoil(&message.hello);
    router_core_on_message(w->fake.core, bad->identity, &message, w->fake.now_ns);
    wait_ms(w, 100);
    assert_int_equal(bad->refused, 1);
    assert_int_equal(bad->welcomed, 0);
    if (strstr(bad->refusal, one) == NULL || strstr(bad->refusal, other) == NULL)
        fail_msg("'%s' names not both of %s and %s", bad->refusal, one, other);
    assert_int_equal(router_core_ready(w->fake.core).decode, 0);
    world_free(w);
}

static void other_version(pd_msg_hello *hello)
{
    hello->wire_version = 7;
}

static void other_model(pd_msg_hello *hello)
{
    hello->model_fingerprint.lo = 0xabcd;
}

static void other_name(pd_msg_hello *hello)
{
    snprintf(hello->model, sizeof hello->model, "another");
}

static void other_layout(pd_msg_hello *hello)
{
    hello->layout_fingerprint = 6;
    snprintf(hello->layout, sizeof hello->layout, "f16 other");
}

static void other_blocks(pd_msg_hello *hello)
{
    hello->block_tokens = 32;
}

static void smaller_context(pd_msg_hello *hello)
{
    hello->context_max = 512;
}

static void a_worker_that_differs_is_refused_and_both_values_are_named(void **state)
{
    (void)state;
    refuse(other_version, "7", "router 2");
    refuse(other_model, "000000000000abcd", "0000000000000001");
    refuse(other_name, "'another'", "'fake'");
    refuse(other_layout, "f16 other", "f16 fake");
    refuse(other_blocks, "32", "16");
    refuse(smaller_context, "512", "4096");
}

static void look_at_ranks(void *ctx, const router_worker_view *view)
{
    uint32_t *seen = ctx;

    *seen += 1;
    if (view->role == PD_ROLE_DECODE) {
        assert_null(view->rank_placements);
        return;
    }
    assert_int_equal(view->rank_pids_count, 2);
    assert_string_equal(view->rank_placements[0].bus, "0000:1b:00.0");
    assert_string_equal(view->rank_placements[1].bus, "0000:3d:00.0");
    assert_int_equal(view->rank_placements[1].numa_node, 1);
}

static void where_a_workers_ranks_are_is_kept(void **state)
{
    pd_msg_placement places[2] = {{.bus = "0000:1b:00.0"}, {.bus = "0000:3d:00.0", .numa_node = 1}};
    pd_message message = {.kind = PD_MSG_HELLO};
    uint32_t seen = 0;

    (void)state;
    world *w = world_new(12);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    const fake_worker with_ranks = {
        .role = PD_ROLE_PREFILL, .incarnation = 99, .blocks = 8, .name = "prefill-9"};
    fake_hello(&w->fake, &with_ranks, &message.hello);
    message.hello.rank_pids_count = 2;
    message.hello.rank_placements = places;
    router_core_on_message(w->fake.core, "prefill-9/0", &message, w->fake.now_ns);
    memset(places, 0x55, sizeof places); /* what was unpacked is gone */
    router_core_each_worker(w->fake.core, w->fake.now_ns, look_at_ranks, &seen);
    assert_int_equal(seen, 2);
    world_free(w);
}

static void a_dead_incarnation_is_never_believed_again(void **state)
{
    (void)state;
    world *w = world_new(11);
    uint32_t i = fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    fake_worker *worker = &w->fake.workers[i];
    worker->mute = true; /* hangs */
    wait_ms(w, 1000);
    assert_int_equal(router_core_ready(w->fake.core).prefill, 0);
    worker->mute = false; /* comes back to life */
    pd_message message = {.kind = PD_MSG_HELLO};
    fake_hello(&w->fake, worker, &message.hello);
    router_core_on_message(w->fake.core, worker->identity, &message, w->fake.now_ns);
    wait_ms(w, 300);
    assert_true(worker->refused > 0);
    assert_int_equal(router_core_ready(w->fake.core).prefill, 0);
    fake_restart(&w->fake, i);
    wait_ms(w, 300);
    assert_int_equal(router_core_ready(w->fake.core).prefill, 1);
    assert_int_equal(router_core_ready(w->fake.core).links, 1);
    world_free(w);
}

static void nobody_is_judged_by_the_routers_own_absence(void **state)
{
    (void)state;
    world *w = world_new(22);
    for (int i = 0; i < 4; i++)
        fake_add(&w->fake, i % 2 == 0 ? PD_ROLE_PREFILL : PD_ROLE_DECODE, 512);
    wait_ms(w, 270);
    w->fake.asleep_until_ns = w->fake.now_ns + 3 * PD_NS_PER_S;
    wait_ms(w, 2000);
    fake_kill(&w->fake, 0);
    wait_ms(w, 1200);
    assert_int_equal(router_core_counters_of(w->fake.core).workers_lost, 0);
    answer *a = ask(w, 40, 1);
    wait_ms(w, 2000);
    assert_int_equal(a->ends, 1);
    assert_int_equal(router_core_counters_of(w->fake.core).workers_lost, 1); /* who really died */
    assert_int_equal(router_core_ready(w->fake.core).links, 2);
    a = ask(w, 40, 20);
    wait_ms(w, 500);
    assert_int_equal(a->status, 0);
    assert_nothing_left(w);
    world_free(w);
}

static void a_lost_word_about_a_link_is_made_good(void **state)
{
    (void)state;
    const pd_message_kind kinds[] = {PD_MSG_PEER_UP, PD_MSG_LINK};
    for (int i = 0; i < 2; i++) {
        world *w = world_new(23);
        w->fake.lose[kinds[i]] = kinds[i] == PD_MSG_PEER_UP ? 2 : 1;
        fake_add(&w->fake, PD_ROLE_PREFILL, 512);
        uint32_t decode = fake_add(&w->fake, PD_ROLE_DECODE, 512);
        wait_ms(w, 500);
        assert_int_equal(router_core_ready(w->fake.core).links, 0);
        wait_ms(w, 1500);
        assert_int_equal(router_core_ready(w->fake.core).links, 1);
        assert_true(w->fake.workers[decode].peers_up > 0);
        uint32_t sent = w->fake.sent[PD_MSG_PEER_UP];
        assert_int_equal(sent, 4);
        wait_ms(w, 3000); /* and then there is no more to say */
        assert_int_equal(w->fake.sent[PD_MSG_PEER_UP], sent);
        world_free(w);
    }
}

static void a_router_that_restarts_finds_its_workers(void **state)
{
    (void)state;
    world *w = world_new(12);
    pd_message message = {.kind = PD_MSG_HEARTBEAT, .heartbeat = {.incarnation = 5}};
    fake_worker *worker = &w->fake.workers[w->fake.workers_count++];
    *worker = (fake_worker){.alive = true, .role = PD_ROLE_DECODE};
    snprintf(worker->identity, sizeof worker->identity, "decode-0/0000000000000005");
    router_core_on_message(w->fake.core, worker->identity, &message, w->fake.now_ns);
    /* Hearing another incarnation of a router, the worker says hello again. */
    assert_int_equal(w->fake.sent[PD_MSG_ROUTER_HEARTBEAT], 1);
    world_free(w);
}

/* ---- whatever happens ---- */

static void chaos(uint64_t seed)
{
    world *w = world_new(seed);
    fake *f = &w->fake;
    f->duplicate_tokens = 50;
    f->overload_prefill = seed % 3 == 0 ? 100 : 0;
    f->end_first = 50;
    f->seal_failures = seed % 4 == 0 ? 3 : 0;
    f->delay_max_us = seed % 5 == 0 ? 50000 : 2000;
    uint32_t prefills = 1 + fake_below(f, 3), decodes = 1 + fake_below(f, 3);
    for (uint32_t i = 0; i < prefills; i++)
        fake_add(f, PD_ROLE_PREFILL, 256);
    for (uint32_t i = 0; i < decodes; i++)
        fake_add(f, PD_ROLE_DECODE, 16 + fake_below(f, 100));
    for (int step = 0; step < 400; step++) {
        uint32_t what = fake_below(f, 100);
        if (what < 60 && w->count < WORLD_REQUESTS_MAX) {
            answer *a = ask(w, 1 + fake_below(f, 200), 1 + fake_below(f, 40));
            if (a->handle != 0 && fake_below(f, 5) == 0)
                a->cancel_at = fake_below(f, 20);
        } else if (what < 70 && w->count > 0) {
            answer *a = &w->answers[fake_below(f, w->count)];
            if (a->ends == 0 && !a->cancelled) {
                a->cancelled = true;
                router_core_cancel(f->core, a->handle, f->now_ns);
            }
        } else if (what < 73) {
            uint32_t i = fake_below(f, f->workers_count);
            if (f->workers[i].alive && fake_below(f, 2) == 0)
                fake_kill(f, i);
            else if (!f->workers[i].alive)
                fake_restart(f, i);
            else
                f->workers[i].mute = true;
        } else if (what < 78) {
            uint32_t i = fake_below(f, f->workers_count);
            if (f->workers[i].mute)
                fake_restart(f, i);
        }
        fake_run(f, f->now_ns + fake_below(f, 20000) * 1000ull);
    }
    for (uint32_t i = 0; i < f->workers_count; i++) {
        if (!f->workers[i].alive || f->workers[i].mute)
            fake_restart(f, i);
    }
    wait_ms(w, SETTLE_S * 1000);
    assert_nothing_left(w);
    router_core_counters counters = router_core_counters_of(f->core);
    assert_int_equal(counters.accepted, counters.finished + counters.failed + counters.cancelled);
    world_free(w);
}

static void every_request_ends_once_and_nothing_stays_behind(void **state)
{
    (void)state;
    const char *text = getenv("KVFERRY_SEEDS"); /* how many */
    const char *from = getenv("KVFERRY_SEED");  /* the first: another one each run of CI */
    uint64_t seeds = text == NULL ? 40 : strtoull(text, NULL, 10);
    uint64_t first = from == NULL ? 1 : strtoull(from, NULL, 10);
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        print_message("# seed %llu\n", (unsigned long long)seed);
        chaos(seed);
    }
}

static void the_same_seed_gives_the_same_run(void **state)
{
    (void)state;
    uint32_t sent[2][PD_MESSAGE_KINDS];
    for (int run = 0; run < 2; run++) {
        world *w = world_new(77);
        for (int i = 0; i < 2; i++)
            fake_add(&w->fake, PD_ROLE_PREFILL, 64);
        for (int i = 0; i < 2; i++)
            fake_add(&w->fake, PD_ROLE_DECODE, 64);
        for (int i = 0; i < 60; i++) {
            ask(w, 1 + fake_below(&w->fake, 100), 1 + fake_below(&w->fake, 40));
            wait_ms(w, 2);
        }
        wait_ms(w, 5000);
        memcpy(sent[run], w->fake.sent, sizeof sent[run]);
        world_free(w);
    }
    assert_memory_equal(sent[0], sent[1], sizeof sent[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_gets_every_token_once_and_in_order),
        cmocka_unit_test(a_lease_is_a_promise_until_the_prompt_starts),
        cmocka_unit_test(a_lost_word_about_a_start_is_made_good),
        cmocka_unit_test(copies_are_released_by_a_token_that_proves_the_landing),
        cmocka_unit_test(blocks_that_came_wrong_are_shipped_again_once),
        cmocka_unit_test(one_token_needs_no_lease),
        cmocka_unit_test(an_end_at_the_first_token_gives_the_lease_back),
        cmocka_unit_test(without_workers_a_request_ends_with_503_that_names_what_is_missing),
        cmocka_unit_test(a_prompt_that_never_fits_is_the_clients_error),
        cmocka_unit_test(a_full_decode_worker_makes_requests_wait_not_fail),
        cmocka_unit_test(a_full_queue_is_429),
        cmocka_unit_test(a_lost_prefill_worker_is_survived_before_the_first_token),
        cmocka_unit_test(a_lost_writer_is_not_called_silent),
        cmocka_unit_test(a_cut_writers_last_word_frees_nothing),
        cmocka_unit_test(a_token_of_another_worker_or_attempt_is_none),
        cmocka_unit_test(a_stop_ends_what_waits_for_workers_that_leave),
        cmocka_unit_test(a_prefill_worker_that_decode_takes_for_dead_is_avoided),
        cmocka_unit_test(cancel_in_every_state_frees_everything),
        cmocka_unit_test(a_worker_that_does_not_answer_is_a_deadline_and_a_second_try),
        cmocka_unit_test(an_answer_that_stalls_goes_on),
        cmocka_unit_test(a_worker_that_differs_is_refused_and_both_values_are_named),
        cmocka_unit_test(where_a_workers_ranks_are_is_kept),
        cmocka_unit_test(a_dead_incarnation_is_never_believed_again),
        cmocka_unit_test(nobody_is_judged_by_the_routers_own_absence),
        cmocka_unit_test(a_lost_word_about_a_link_is_made_good),
        cmocka_unit_test(a_router_that_restarts_finds_its_workers),
        cmocka_unit_test(every_request_ends_once_and_nothing_stays_behind),
        cmocka_unit_test(the_same_seed_gives_the_same_run),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
