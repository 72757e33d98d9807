/* Each phase of a request ends at a deadline of its own: a worker that beats but says nothing holds
 * up a request that long and no longer. All that are set apart differ here (the time for a lease is
 * that for a suspended sequence's last tokens, too) and are checked to the millisecond: what is
 * left with the deadline of the phase before is found like what is left with none. Which one it is
 * says the table of docs/lifecycle.md. */

#include "common/base/log.h"
#include "router/lifecycle.h"
#include "tests/unit/router/world.h"

enum {
    QUEUE_MS = 1500,
    LEASE_MS = 300,
    PREFILL_MS = 1000 + LEASE_MS, /* the worker has 1 s, and the router that much more */
    LANDING_MS = 2000 + LEASE_MS,
    IDLE_MS = 3000,
    CLOSING_MS = 250,
    TOTAL_MS = 2000, /* where nothing else ends a request: see only_in_all */
    PATIENT_MS = 10 * TOTAL_MS
};

static void all_different(router_core_config *config)
{
    config->queue_ns = QUEUE_MS * PD_NS_PER_MS;
    config->lease_ns = LEASE_MS * PD_NS_PER_MS;
    config->prefill_ns = (PREFILL_MS - LEASE_MS) * PD_NS_PER_MS;
    config->transfer_ns = (LANDING_MS - LEASE_MS) * PD_NS_PER_MS;
    config->decode_idle_ns = IDLE_MS * PD_NS_PER_MS;
    config->total_ns = 60 * PD_NS_PER_S;
}

/* The deadline that the table has behind that event. */
static uint64_t deadline_ms(router_request_state from, router_event event)
{
    static const struct {
        const char *name;
        uint64_t ms;
    } of[] = {{"queue", QUEUE_MS},
              {"lease", LEASE_MS},
              {"prefill", PREFILL_MS},
              {"landing", LANDING_MS},
              {"idle", IDLE_MS},
              {"suspended", LEASE_MS},
              {"lease, then landing", LEASE_MS},
              {"closing", CLOSING_MS}};
    uint32_t count, row = 0;
    const router_transition *table = router_lifecycle_table(&count);
    while (row < count && (table[row].from != from || table[row].event != event))
        row++;
    assert_true(row < count);
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i++) {
        if (strcmp(of[i].name, table[row].deadline) == 0)
            return of[i].ms;
    }
    fail_msg("no deadline is called %s", table[row].deadline);
    return 0;
}

/* Workers 0 .. prefills - 1 are prefill workers. What an audit would tell of them is not heard. */
static world *world_under(uint64_t seed, uint32_t prefills, uint32_t decodes,
                          void (*deadlines)(router_core_config *config))
{
    world *w = world_with(seed, deadlines);
    w->fake.lose[PD_MSG_AUDIT] = UINT32_MAX;
    for (uint32_t i = 0; i < prefills; i++)
        fake_add(&w->fake, PD_ROLE_PREFILL, 512);
    for (uint32_t i = 0; i < decodes; i++)
        fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    return w;
}

static world *world_of(uint64_t seed, uint32_t prefills, uint32_t decodes)
{
    return world_under(seed, prefills, decodes, all_different);
}

static void step(world *w)
{
    assert_true(w->fake.now_ns < 10 * PD_NS_PER_S); /* what is waited for comes soon, or never */
    fake_run(&w->fake, w->fake.now_ns + 50000);
}

/* The decode worker that has a lease, and the lease. */
static fake_worker *await_holder(world *w, const fake_lease **lease_out)
{
    for (;; step(w)) {
        for (uint32_t i = 0; i < w->fake.workers_count; i++) {
            fake_worker *worker = &w->fake.workers[i];
            for (uint32_t n = 0; n < FAKE_LEASES_MAX; n++) {
                *lease_out = &worker->leases[n];
                if (worker->leases[n].blocks != 0)
                    return worker;
            }
        }
    }
}

static uint64_t given_up(const world *w)
{
    router_core_counters counters = counters_of(w);
    return counters.retries[ROUTER_RETRY_SILENT] + counters.moves_failed;
}

/* So many milliseconds from now. */
static void assert_given_up_after(world *w, uint64_t ms)
{
    wait_ms(w, ms - 1);
    assert_int_equal(given_up(w), 0);
    wait_ms(w, 2);
    assert_int_equal(given_up(w), 1);
}

/* By another worker: each is silent about one thing, once. */
static void assert_goes_on(world *w, const answer *a, uint32_t retried)
{
    w->fake.silent_landings = 0;
    wait_ms(w, 500);
    assert_whole(w, a);
    assert_int_equal(given_up(w), 1);
    assert_int_equal(counters_of(w).retried, retried);
}

static void say(world *w, const fake_worker *from, const pd_message *message)
{
    router_core_on_message(w->fake.core, from->identity, message, w->fake.now_ns);
}

/* ---- forward ---- */

static void assert_queue_ends_after(world *w, const answer *a, uint64_t ms)
{
    wait_ms(w, ms - 1);
    assert_int_equal(a->ends, 0);
    wait_ms(w, 6); /* it may have asked for a lease once more just before */
    assert_int_equal(a->status, 503);
    world_free(w);
}

static void a_queue_is_left_in_time(void **state)
{
    (void)state;
    world *w = world_of(200, 1, 0);
    assert_queue_ends_after(w, ask(w, 40, 100),
                            deadline_ms(ROUTER_REQUEST_NONE, ROUTER_EVENT_ARRIVED));
}

/* Who is refused is not nearer to the end for it, nor further from it. */
static void who_is_refused_waits_no_longer(void **state)
{
    (void)state;
    world *w = world_of(196, 1, 1);
    w->fake.workers[1].free = 0;
    const answer *a = ask(w, 40, 100);
    wait_ms(w, 100);
    assert_true(counters_of(w).leases_refused > 0);
    assert_queue_ends_after(w, a, deadline_ms(ROUTER_REQUEST_LEASING, ROUTER_EVENT_REFUSED) - 100);
}

static void who_is_tried_again_has_all_of_the_queue_again(void **state)
{
    (void)state;
    world *w = world_of(197, 1, 1);
    answer *a = ask(w, 40, 3000);
    wait_ms(w, QUEUE_MS + 500);
    bring_down(w, 1);
    assert_queue_ends_after(w, a, deadline_ms(ROUTER_REQUEST_DECODING, ROUTER_EVENT_RETRIED));
}

static void who_gives_way_has_all_of_the_queue_again(void **state)
{
    (void)state;
    world *w = world_of(195, 1, 1);
    answer *a = ask(w, 40, 3000);
    wait_ms(w, QUEUE_MS);
    bring_down(w, 0); /* nobody computes it again */
    w->fake.suspends = 1000;
    while (counters_of(w).gave_way == 0)
        step(w);
    assert_queue_ends_after(w, a, deadline_ms(ROUTER_REQUEST_SUSPENDED, ROUTER_EVENT_GIVES_WAY));
}

/* One way leads into it, whichever event it was. */
static void whatever_goes_back_to_the_queue_has_its_deadline(void **state)
{
    (void)state;
    uint32_t count;
    const router_transition *table = router_lifecycle_table(&count);
    for (uint32_t i = 0; i < count; i++) {
        if (table[i].to == ROUTER_REQUEST_QUEUED)
            assert_int_equal(deadline_ms(table[i].from, table[i].event), QUEUE_MS);
    }
}

static void a_lease_that_is_not_answered_is_given_up(void **state)
{
    (void)state;
    world *w = world_of(198, 1, 2);
    w->fake.lose[PD_MSG_LEASE_REPLY] = 1;
    answer *a = ask(w, 40, 100);
    assert_given_up_after(w, deadline_ms(ROUTER_REQUEST_QUEUED, ROUTER_EVENT_PLACED));
    assert_goes_on(w, a, 1);
    world_free(w);
}

static void a_prompt_without_a_first_token_is_given_up(void **state)
{
    (void)state;
    for (uint32_t alone = 0; alone < 2; alone++) {
        world *w = world_of(199, 2, 1);
        w->fake.lose[PD_MSG_PREFILL_REQUEST] = 1;
        answer *a = ask(w, 40, alone ? 1 : 100);
        while (w->fake.sent[PD_MSG_PREFILL_REQUEST] == 0)
            step(w);
        assert_given_up_after(w, alone
                                     ? deadline_ms(ROUTER_REQUEST_QUEUED, ROUTER_EVENT_PLACED_ALONE)
                                     : deadline_ms(ROUTER_REQUEST_LEASING, ROUTER_EVENT_PROMISED));
        assert_goes_on(w, a, 1);
        world_free(w);
    }
}

/* Its turn has come, which took a while: what it may take counts from then. */
static void a_prompt_has_all_its_time_from_its_first_step_on(void **state)
{
    (void)state;
    world *w = world_of(201, 2, 1);
    fake *f = &w->fake;
    const fake_lease *lease;
    f->workers[0].deaf = f->workers[1].deaf = true;
    answer *a = ask(w, 40, 100);
    const fake_worker *decode = await_holder(w, &lease);
    bool first = decode->last_lease.sender.incarnation == f->workers[0].incarnation;
    while (f->sent[PD_MSG_PREFILL_REQUEST] == 0)
        step(w);
    wait_ms(w, 900);
    f->workers[first ? 1 : 0].deaf = false;
    const pd_message started = {.kind = PD_MSG_PREFILL_STARTED,
                                .prefill_started = {.key = lease->key}};
    say(w, &f->workers[first ? 0 : 1], &started);
    wait_ms(w, 400);
    say(w, &f->workers[first ? 0 : 1], &started); /* saying it again gains nothing */
    assert_given_up_after(w, PREFILL_MS - 400);
    assert_goes_on(w, a, 1);
    world_free(w);
}

static void a_landing_that_is_not_heard_of_is_given_up(void **state)
{
    (void)state;
    world *w = world_of(202, 1, 2);
    const fake_lease *lease;
    w->fake.silent_landings = 1000;
    answer *a = ask(w, 40, 100);
    await_holder(w, &lease)->deaf = true; /* DecodeStart comes to nothing */
    while (a->next == 0)
        step(w);
    assert_given_up_after(w, deadline_ms(ROUTER_REQUEST_PREFILLING, ROUTER_EVENT_FIRST_TOKEN));
    assert_goes_on(w, a, 1);
    world_free(w);
}

/* What is shipped once more has all the time once more. */
static void a_landing_begins_anew_with_what_is_asked_for_again(void **state)
{
    (void)state;
    world *w = world_of(208, 1, 2);
    const fake_lease *lease;
    w->fake.silent_landings = 1000;
    answer *a = ask(w, 40, 100);
    fake_worker *decode = await_holder(w, &lease);
    decode->deaf = true;
    while (a->next == 0)
        step(w);
    wait_ms(w, 1000);
    const pd_message refetch = {.kind = PD_MSG_REFETCH, .refetch = {.key = lease->key, .count = 1}};
    say(w, decode, &refetch);
    assert_int_equal(w->fake.sent[PD_MSG_SHIP_AGAIN], 1);
    assert_given_up_after(w, LANDING_MS);
    assert_goes_on(w, a, 1);
    world_free(w);
}

/* Its blocks have landed, before the first token is here or after it. */
static void what_has_landed_and_makes_no_token_is_given_up(void **state)
{
    (void)state;
    for (int early = 0; early < 2; early++) {
        world *w = world_of(203, 1, 2);
        fake *f = &w->fake;
        const fake_lease *lease;
        f->silent_landings = 1000;
        answer *a = ask(w, 40, 100);
        fake_worker *decode = await_holder(w, &lease);
        decode->deaf = true;
        while (early ? !f->workers[0].prompts[0].computed : a->next == 0)
            step(w);
        if (!early)
            wait_ms(w, 500);
        assert_int_equal(a->next, !early);
        const pd_message landed = {.kind = PD_MSG_LANDED, .landed = {.key = lease->key}};
        say(w, decode, &landed);
        while (a->next == 0)
            step(w);
        assert_given_up_after(w, deadline_ms(ROUTER_REQUEST_LANDING, ROUTER_EVENT_LANDED));
        assert_goes_on(w, a, 1);
        world_free(w);
    }
}

/* Whatever proved that its blocks had landed: a word, or the token itself. */
static void an_answer_that_stops_is_given_up_an_idle_time_after_its_last_token(void **state)
{
    (void)state;
    for (uint32_t silent = 0; silent <= 1000; silent += 1000) {
        world *w = world_of(209, 1, 2);
        fake *f = &w->fake;
        f->silent_landings = silent;
        answer *a = ask(w, 40, 100);
        wait_for_token(w, a, 30);
        f->lose[PD_MSG_STEP_TOKENS] = UINT32_MAX;
        uint64_t since_ns = f->now_ns;
        for (int i = 0; i < 100; i++) { /* some are on their way */
            uint32_t had = a->next;
            step(w);
            since_ns = a->next > had ? f->now_ns : since_ns;
        }
        assert_given_up_after(w, IDLE_MS - (f->now_ns - since_ns) / PD_NS_PER_MS);
        f->lose[PD_MSG_STEP_TOKENS] = 0;
        assert_goes_on(w, a, 1);
        world_free(w);
    }
}

/* ---- a move ---- */

/* A sequence that is out of room for a while: the last token of before is late. */
static answer *suspend(world *w, const fake_worker **from_out, const fake_lease **lease_out)
{
    fake *f = &w->fake;
    answer *a = ask(w, 40, 100);
    wait_for_token(w, a, 30);
    *from_out = await_holder(w, lease_out);
    f->lose[PD_MSG_STEP_TOKENS] = 1;
    while (f->lose[PD_MSG_STEP_TOKENS] == 1)
        step(w);
    f->suspends = 1000;
    while (counters_of(w).suspended == 0)
        step(w);
    f->suspends = 0;
    assert_int_equal(f->sent[PD_MSG_LEASE_REQUEST], 1);
    return a;
}

/* Its last token comes: it moves. */
static void say_late_token(world *w, const answer *a, const fake_worker *from,
                           const fake_lease *lease)
{
    fake *f = &w->fake;
    uint32_t index = lease->next - 1;
    const pd_step_token late = {
        .key = lease->key, .index = index, .token = fake_token(a->first, index)};
    pd_message message = {
        .kind = PD_MSG_STEP_TOKENS,
        .step_tokens = {
            .incarnation = from->incarnation, .step_ms = 1, .tokens = &late, .tokens_count = 1}};
    memcpy(message.step_tokens.name, from->name, sizeof from->name);
    router_core_on_message(f->core, NULL, &message, f->now_ns);
    assert_int_equal(f->sent[PD_MSG_LEASE_REQUEST], 2);
}

/* So late that the deadline of being suspended is not that of the move. */
static answer *begin_to_move(world *w)
{
    const fake_worker *from;
    const fake_lease *lease;
    answer *a = suspend(w, &from, &lease);
    wait_ms(w, LEASE_MS / 2);
    say_late_token(w, a, from, lease);
    return a;
}

/* To the millisecond, and its answer is whole all the same. */
static void assert_gives_way_in(world *w, const answer *a, uint64_t ms)
{
    wait_ms(w, ms - 1);
    assert_int_equal(counters_of(w).gave_way, 0);
    wait_ms(w, 2);
    assert_int_equal(counters_of(w).gave_way, 1);
    wait_ms(w, 500);
    assert_whole(w, a);
}

static void a_suspended_sequence_gives_way_in_time(void **state)
{
    (void)state;
    world *w = world_of(210, 1, 3);
    const fake_worker *from;
    const fake_lease *lease;
    const answer *a = suspend(w, &from, &lease);
    assert_gives_way_in(w, a, deadline_ms(ROUTER_REQUEST_DECODING, ROUTER_EVENT_SUSPENDED));
    world_free(w);
}

/* It moves to the third worker then. */
static void assert_moves_on(world *w, const answer *a)
{
    assert_goes_on(w, a, 0);
    assert_int_equal(counters_of(w).moves, 1);
    assert_int_equal(counters_of(w).moves_failed, 1);
    assert_int_equal(counters_of(w).gave_way, 0);
    assert_int_equal(w->fake.sent[PD_MSG_LEASE_REQUEST], 3);
}

static void a_move_whose_lease_is_not_answered_is_given_up(void **state)
{
    (void)state;
    world *w = world_of(204, 1, 3);
    answer *a = begin_to_move(w);
    w->fake.lose[PD_MSG_LEASE_REPLY] = 1;
    assert_given_up_after(w, deadline_ms(ROUTER_REQUEST_SUSPENDED, ROUTER_EVENT_MOVES));
    assert_moves_on(w, a);
    world_free(w);
}

static const fake_worker *await_asked_to_take(world *w)
{
    for (;; step(w)) {
        for (uint32_t i = 0; i < w->fake.workers_count; i++) {
            if (w->fake.workers[i].last_lease.bind)
                return &w->fake.workers[i];
        }
    }
}

/* The worker says that it has sent yet another token, and the move fails before that is here: it is
 * waited for as for the first ones, from then. */
static void a_move_that_fails_leaves_the_time_of_a_suspended_sequence(void **state)
{
    (void)state;
    world *w = world_of(211, 1, 3);
    fake *f = &w->fake;
    const fake_worker *from;
    const fake_lease *lease;
    answer *a = suspend(w, &from, &lease);
    f->lose[PD_MSG_LEASE_REPLY] = 1;
    say_late_token(w, a, from, lease);
    const fake_worker *to = await_asked_to_take(w);
    pd_message said = {.kind = PD_MSG_SUSPENDED,
                       .suspended = {.key = lease->key,
                                     .answered = lease->next + 1,
                                     .kv_tokens = lease->prompt_tokens + lease->next,
                                     .blocks = lease->blocks}};
    wait_ms(w, LEASE_MS / 2);
    say(w, from, &said);
    const pd_message refused = {
        .kind = PD_MSG_LEASE_REPLY,
        .lease_reply = {.key = to->last_lease.key, .bound = true, .status = PD_E_OVERLOAD}};
    say(w, to, &refused);
    assert_int_equal(counters_of(w).moves_failed, 1);
    assert_gives_way_in(w, a, deadline_ms(ROUTER_REQUEST_MOVING, ROUTER_EVENT_MOVE_FAILED));
    world_free(w);
}

static void a_move_that_does_not_land_is_given_up(void **state)
{
    (void)state;
    world *w = world_of(205, 1, 3);
    answer *a = begin_to_move(w);
    w->fake.lose[PD_MSG_SHIP_REQUEST] = 1;
    while (w->fake.sent[PD_MSG_SHIP_REQUEST] == 0)
        step(w);
    assert_given_up_after(w, LANDING_MS);
    assert_moves_on(w, a);
    world_free(w);
}

static void what_has_moved_and_makes_no_token_is_given_up(void **state)
{
    (void)state;
    world *w = world_of(206, 1, 3);
    answer *a = begin_to_move(w);
    w->fake.lose[PD_MSG_DECODE_START] = 1;
    while (counters_of(w).moves == 0)
        step(w);
    assert_given_up_after(w, deadline_ms(ROUTER_REQUEST_MOVING, ROUTER_EVENT_MOVED));
    assert_goes_on(w, a, 1);
    world_free(w);
}

/* ---- all of it ---- */

/* Nothing but the deadline of all of it ends a request soon. */
static void only_in_all(router_core_config *config)
{
    config->queue_ns = config->lease_ns = config->prefill_ns = config->transfer_ns =
        config->decode_idle_ns = PATIENT_MS * PD_NS_PER_MS;
    config->total_ns = TOTAL_MS * PD_NS_PER_MS;
}

typedef struct phase {
    router_request_state state;
    uint32_t decodes;
    bool runs;  /* decoding: token after token, not standing still */
    bool again; /* queued: for a second attempt */
} phase;

/* Asks, and sees to it that the request comes to that phase and never leaves it. */
static answer *ask_to_stay_in(world *w, const phase *p)
{
    fake *f = &w->fake;
    const fake_worker *from;
    const fake_lease *lease;
    if (p->state == ROUTER_REQUEST_SUSPENDED)
        return suspend(w, &from, &lease);
    if (p->state == ROUTER_REQUEST_MOVING) {
        f->lose[PD_MSG_SHIP_REQUEST] = UINT32_MAX;
        return begin_to_move(w);
    }
    f->lose[PD_MSG_LEASE_REPLY] = p->state == ROUTER_REQUEST_LEASING;
    f->lose[PD_MSG_PREFILL_REQUEST] = p->state == ROUTER_REQUEST_PREFILLING;
    f->silent_landings = p->state == ROUTER_REQUEST_LANDING ? 1000 : 0;
    f->lose[PD_MSG_DECODE_START] = p->state == ROUTER_REQUEST_LANDING;
    answer *a = ask(w, 40, 3000);
    if (p->state == ROUTER_REQUEST_DECODING || p->again)
        wait_for_token(w, a, 30);
    if (p->state == ROUTER_REQUEST_DECODING && !p->runs)
        f->lose[PD_MSG_STEP_TOKENS] = UINT32_MAX;
    if (p->again)
        bring_down(w, place_of(w, a));
    return a;
}

static uint64_t failed_in(const world *w, router_request_state state)
{
    uint32_t count, row = 0;
    const router_transition *table = router_lifecycle_table(&count);
    while (row < count && (table[row].from != state || table[row].event != ROUTER_EVENT_FAILED))
        row++;
    assert_true(row < count);
    return router_core_transitions(w->fake.core, &count)[row];
}

static void whatever_a_request_waits_for_all_of_it_ends_in_time(void **state)
{
    (void)state;
    static const phase phases[] = {
        {ROUTER_REQUEST_QUEUED, 0, false, false},  {ROUTER_REQUEST_QUEUED, 1, false, true},
        {ROUTER_REQUEST_LEASING, 1, false, false}, {ROUTER_REQUEST_PREFILLING, 1, false, false},
        {ROUTER_REQUEST_LANDING, 1, false, false}, {ROUTER_REQUEST_DECODING, 1, false, false},
        {ROUTER_REQUEST_DECODING, 1, true, false}, {ROUTER_REQUEST_SUSPENDED, 3, false, false},
        {ROUTER_REQUEST_MOVING, 3, false, false}};
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        const phase *p = &phases[i];
        world *w = world_under(212, 1, p->decodes, only_in_all);
        uint64_t due_ns = w->fake.now_ns + TOTAL_MS * PD_NS_PER_MS;
        const answer *a = ask_to_stay_in(w, p);
        fake_run(&w->fake, due_ns - 1);
        assert_int_equal(a->ends, 0);
        assert_true(!p->runs || a->next > TOTAL_MS / 2);
        fake_run(&w->fake, due_ns);
        assert_int_equal(a->ends, 1);
        assert_int_equal(a->status, 504);
        assert_string_equal(a->code, "deadline_exceeded");
        assert_int_equal(failed_in(w, p->state), 1);
        wait_ms(w, 100);
        assert_nothing_left(w);
        assert_int_equal(counters_of(w).retried, p->again);
        assert_int_equal(given_up(w), 0);
        world_free(w);
    }
}

/* ---- the end ---- */

/* All tokens are there, and the prefill worker's last word is not: of an answer that a decode
 * worker made, and of one token. */
static void an_answer_does_not_wait_for_a_last_word(void **state)
{
    (void)state;
    for (uint32_t max = 1; max <= 20; max += 19) {
        world *w = world_of(207, 1, 1);
        w->fake.lose[PD_MSG_PREFILL_DONE] = 1;
        answer *a = ask(w, 40, max);
        while (a->last == PD_FINISH_NONE)
            step(w);
        router_request_state before = max > 1 ? ROUTER_REQUEST_DECODING : ROUTER_REQUEST_PREFILLING;
        wait_ms(w, deadline_ms(before, ROUTER_EVENT_LAST_TOKEN) - 1);
        assert_int_equal(a->ends, 0);
        wait_ms(w, 2);
        assert_int_equal(a->ends, 1);
        wait_ms(w, 20);
        assert_whole(w, a);
        assert_int_equal(counters_of(w).retried, 0);
        world_free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_queue_is_left_in_time),
        cmocka_unit_test(who_is_refused_waits_no_longer),
        cmocka_unit_test(who_is_tried_again_has_all_of_the_queue_again),
        cmocka_unit_test(who_gives_way_has_all_of_the_queue_again),
        cmocka_unit_test(whatever_goes_back_to_the_queue_has_its_deadline),
        cmocka_unit_test(a_lease_that_is_not_answered_is_given_up),
        cmocka_unit_test(a_prompt_without_a_first_token_is_given_up),
        cmocka_unit_test(a_prompt_has_all_its_time_from_its_first_step_on),
        cmocka_unit_test(a_landing_that_is_not_heard_of_is_given_up),
        cmocka_unit_test(a_landing_begins_anew_with_what_is_asked_for_again),
        cmocka_unit_test(what_has_landed_and_makes_no_token_is_given_up),
        cmocka_unit_test(an_answer_that_stops_is_given_up_an_idle_time_after_its_last_token),
        cmocka_unit_test(a_suspended_sequence_gives_way_in_time),
        cmocka_unit_test(a_move_whose_lease_is_not_answered_is_given_up),
        cmocka_unit_test(a_move_that_fails_leaves_the_time_of_a_suspended_sequence),
        cmocka_unit_test(a_move_that_does_not_land_is_given_up),
        cmocka_unit_test(what_has_moved_and_makes_no_token_is_given_up),
        cmocka_unit_test(whatever_a_request_waits_for_all_of_it_ends_in_time),
        cmocka_unit_test(an_answer_does_not_wait_for_a_last_word),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
