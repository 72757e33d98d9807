/* What a router says of blocks that somebody may still write: whoever keeps them is told that
 * nobody does only when that is so. Else they would be another's when the bytes land. */

#include "common/base/log.h"
#include "tests/unit/router/world.h"

static void say(world *w, uint32_t worker, const pd_message *message)
{
    router_core_on_message(w->fake.core, w->fake.workers[worker].identity, message, w->fake.now_ns);
}

static void until_sent(world *w, pd_message_kind kind)
{
    uint32_t had = w->fake.sent[kind];
    for (int i = 0; i < 40000 && w->fake.sent[kind] == had; i++)
        fake_run(&w->fake, w->fake.now_ns + 10000);
    assert_true(w->fake.sent[kind] > had);
}

static void leave(world *w, answer *a)
{
    a->cancelled = true;
    router_core_cancel(w->fake.core, a->handle, w->fake.now_ns);
}

/* ---- moves ---- */

typedef struct moving {
    world *w;
    answer *a;
    uint32_t from, to;
    pd_request_key key; /* where it moves to */
} moving;

/* A sequence that has just been suspended; the two decode workers are 1 and 2. */
static moving suspended(uint64_t seed, uint32_t kv_tokens_too_few)
{
    moving m = {.w = one_to_one(seed)};
    fake *f = &m.w->fake;
    fake_add(f, PD_ROLE_DECODE, 512);
    wait_ms(m.w, 200);
    m.a = ask(m.w, 400, 100);
    wait_for_token(m.w, m.a, 30);
    m.from = f->workers[1].leases[0].blocks > 0 ? 1 : 2;
    m.to = 3 - m.from;
    fake_lease *lease = &f->workers[m.from].leases[0];
    lease->stalled = true;
    wait_ms(m.w, 5); /* no token of it is under way */
    lease->suspended = true;
    m.key = lease->key;
    m.key.epoch++;
    const pd_message message = {
        .kind = PD_MSG_SUSPENDED,
        .suspended = {.key = lease->key,
                      .answered = lease->next,
                      .kv_tokens = lease->prompt_tokens + lease->next - 1 - kv_tokens_too_few,
                      .blocks = lease->blocks}};
    say(m.w, m.from, &message);
    return m;
}

static void ship_done(const moving *m, pd_status status, bool may_land, uint32_t again)
{
    const pd_message done = {
        .kind = PD_MSG_SHIP_DONE,
        .ship_done = {.key = m->key, .status = status, .may_land = may_land, .again = again}};
    say(m->w, m->from, &done);
}

/* What the receiver of the move was told with its cancel. */
static bool told_unwritten(const moving *m)
{
    wait_ms(m->w, 5);
    const fake_worker *to = &m->w->fake.workers[m->to];
    assert_int_equal(to->last_cancel.key.epoch, m->key.epoch);
    return to->last_cancel.unwritten;
}

static void refetch(const moving *m)
{
    const pd_message message = {.kind = PD_MSG_REFETCH, .refetch = {.key = m->key, .count = 1}};
    uint32_t had = m->w->fake.sent[PD_MSG_SHIP_AGAIN];
    say(m->w, m->to, &message);
    assert_int_equal(m->w->fake.sent[PD_MSG_SHIP_AGAIN], had + 1);
}

static void where_a_move_fails_blocks_are_free_only_if_the_holder_writes_no_more(void **state)
{
    (void)state;
    for (int which = 0; which < 4; which++) {
        moving m = suspended(80 + (uint64_t)which, 0);
        const pd_message failed = {.kind = PD_MSG_DECODE_FAILED,
                                   .decode_failed = {.key = m.key, .status = PD_E_IO}};
        if (which > 0) /* the holder has been asked to ship */
            until_sent(m.w, PD_MSG_SHIP_REQUEST);
        if (which < 2)
            say(m.w, m.to, &failed);
        else
            ship_done(&m, PD_E_PEER, which == 2, 0);
        assert_int_equal(counters_of(m.w).moves_failed, 1);
        assert_int_equal(told_unwritten(&m), which == 0 || which == 3);
        wait_ms(m.w, 2000);
        assert_whole(m.w, m.a);
        world_free(m.w);
    }
}

static void a_cancel_while_it_moves_waits_for_the_holders_last_word(void **state)
{
    (void)state;
    for (int which = 0; which < 6; which++) {
        moving m = suspended(90 + (uint64_t)which, 0);
        bool unwritten = which == 0 || which == 3 || which == 5;
        if (which > 0)
            until_sent(m.w, PD_MSG_SHIP_REQUEST);
        if (which >= 4) /* it is to write a block once more, and may not have heard so */
            refetch(&m);
        if (which > 1)
            ship_done(&m, PD_OK, which == 2, which == 5);
        leave(m.w, m.a);
        assert_int_equal(told_unwritten(&m), unwritten);
        world_free(m.w);
    }
}

/* Positions that are not those of its tokens would go on as another answer. */
static void only_a_sequence_with_all_its_positions_moves(void **state)
{
    (void)state;
    for (uint32_t lacks = 0; lacks < 2; lacks++) {
        moving m = suspended(100, lacks);
        wait_ms(m.w, 100);
        assert_int_equal(counters_of(m.w).moves, 1 - lacks);
        assert_int_equal(counters_of(m.w).gave_way, lacks);
        wait_ms(m.w, 2000);
        if (lacks)
            assert_whole(m.w, m.a);
        world_free(m.w);
    }
}

/* A lease of other blocks than the sequence has: some would stay what they were, or be another's.
 */
static void a_move_goes_only_into_a_lease_that_fits_it(void **state)
{
    (void)state;
    static const struct {
        bool bound;
        uint32_t held, more; /* blocks, beyond those that lack */
        bool fits;
    } replies[] = {{true, 0, 0, true},   {true, 3, 0, true},  {false, 0, 0, false},
                   {true, 0, 1, false},  {true, 3, 1, false}, {true, 0, UINT32_MAX, false},
                   {true, 100, 0, false}};
    for (uint32_t i = 0; i < sizeof replies / sizeof replies[0]; i++) {
        moving m = suspended(101, 0);
        fake *f = &m.w->fake;
        const fake_lease *lease = &f->workers[m.from].leases[0];
        uint32_t blocks = (lease->prompt_tokens + lease->next - 1 + FAKE_BLOCK - 1) / FAKE_BLOCK;
        pd_block list[128] = {0};
        pd_message reply = {.kind = PD_MSG_LEASE_REPLY,
                            .lease_reply = {.key = m.key,
                                            .bound = replies[i].bound,
                                            .held_blocks = replies[i].held,
                                            .blocks = list}};
        reply.lease_reply.blocks_count = blocks - replies[i].held + replies[i].more;
        if (replies[i].held > blocks) /* in all as many as there are */
            reply.lease_reply.blocks_count = 0;
        say(m.w, m.to, &reply);
        assert_int_equal(f->sent[PD_MSG_SHIP_REQUEST], replies[i].fits);
        assert_int_equal(counters_of(m.w).moves_failed, !replies[i].fits);
        world_free(m.w);
    }
}

/* ---- pulls ---- */

/* A prompt of which a decode worker has just been asked for leading blocks; it has begun none. */
static world *pulling(uint64_t seed, answer **a)
{
    world *w = one_to_one(seed);
    fake_add(&w->fake, PD_ROLE_DECODE, 512);
    wait_ms(w, 200);
    store_prompt(w, 1, 1, 20);
    *a = ask(w, 320, 20);
    until_sent(w, PD_MSG_SHIP_REQUEST);
    return w;
}

static void pull_done(world *w, uint32_t by, pd_status status, bool may_land, uint32_t again)
{
    const pd_message done = {.kind = PD_MSG_SHIP_DONE,
                             .ship_done = {.key = w->fake.workers[0].last_prefill.key,
                                           .status = status,
                                           .may_land = may_land,
                                           .again = again}};
    say(w, by, &done);
}

static void a_prompt_whose_source_fails_hears_whether_its_bytes_may_land(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        answer *a;
        world *w = pulling(110, &a);
        fake_worker *prefill = &w->fake.workers[0];
        if (which < 2) {
            pull_done(w, 1, PD_E_PEER, which == 1, 0);
            wait_ms(w, 5);
        } else { /* it is gone: perhaps it only stands still */
            fake_kill(&w->fake, 1);
            router_core_on_worker_dead(w->fake.core, w->fake.workers[1].incarnation,
                                       w->fake.now_ns);
            prefill->prompts[0].pull_blocks = 1000; /* its patience is not what ends it */
            wait_ms(w, 20);
        }
        assert_int_equal(prefill->pull_ends, 1);
        assert_int_equal(prefill->last_pull_end.may_land, which > 0);
        wait_ms(w, 2000);
        assert_true(a->ends == 1 && a->next == a->max); /* all was computed */
        world_free(w);
    }
}

static void a_cancel_while_it_pulls_waits_for_the_sources_last_word(void **state)
{
    (void)state;
    for (int which = 0; which < 5; which++) {
        answer *a;
        world *w = pulling(111, &a);
        fake_worker *prefill = &w->fake.workers[0];
        if (which >= 3) { /* it is to write a block once more, and may not have heard so */
            const pd_message message = {.kind = PD_MSG_REFETCH,
                                        .refetch = {.key = prefill->last_prefill.key, .count = 1}};
            say(w, 0, &message);
            assert_int_equal(w->fake.sent[PD_MSG_SHIP_AGAIN], 1);
        }
        if (which > 0)
            pull_done(w, 1, PD_OK, which == 1, which == 4);
        leave(w, a);
        wait_ms(w, 5);
        assert_int_equal(prefill->last_cancel.unwritten, which == 2 || which == 4);
        world_free(w);
    }
}

/* Another worker has nothing for that key; that says nothing of the one that ships. */
static void only_the_sources_own_word_ends_what_was_pulled_for_a_request_that_left(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(112, &a);
    fake_worker *prefill = &w->fake.workers[0];
    leave(w, a);
    w->fake.workers[1].prefills = 0;
    wait_ms(w, 5);
    prefill->quarantined = prefill->last_prefill.key;
    pull_done(w, 2, PD_E_CANCELLED, false, 0);
    wait_ms(w, 5);
    assert_int_not_equal(prefill->quarantined.number, 0);
    pull_done(w, 1, PD_E_CANCELLED, false, 0);
    wait_ms(w, 5);
    assert_int_equal(prefill->quarantined.number, 0);
    world_free(w);
}

/* It was another worker that asked, and of that one alone it is said that nothing may land. */
static void what_is_said_of_another_one_ends_no_pull(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(119, &a);
    fake_worker *prefill = &w->fake.workers[0];
    pd_message done = {.kind = PD_MSG_SHIP_DONE,
                       .ship_done = {.key = prefill->last_prefill.key,
                                     .status = PD_E_NOT_FOUND,
                                     .again = 1,
                                     .receiver = w->fake.workers[2].incarnation}};
    say(w, 1, &done);
    assert_int_equal(w->fake.sent[PD_MSG_PULL_END], 0);
    leave(w, a);
    w->fake.workers[1].prefills = 0;
    wait_ms(w, 5);
    prefill->quarantined = prefill->last_prefill.key;
    say(w, 1, &done); /* to the request that has left */
    wait_ms(w, 5);
    assert_int_not_equal(prefill->quarantined.number, 0);
    done.ship_done.key.number += 100; /* of which this router knows nothing */
    prefill->quarantined = done.ship_done.key;
    uint32_t cancels = w->fake.workers[2].cancels;
    say(w, 1, &done);
    wait_ms(w, 5);
    assert_int_not_equal(prefill->quarantined.number, 0);
    assert_int_equal(w->fake.workers[2].cancels, cancels + 1);
    done.ship_done.receiver = prefill->incarnation;
    say(w, 1, &done);
    wait_ms(w, 5);
    assert_int_equal(prefill->quarantined.number, 0);
    done.ship_done.key.number -= 100;
    prefill->quarantined = done.ship_done.key;
    say(w, 1, &done);
    wait_ms(w, 5);
    assert_int_equal(prefill->quarantined.number, 0);
    world_free(w);
}

/* A sender that has forgotten words to others answers as to that one. */
static void who_waits_is_named_when_blocks_are_asked_for_again(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(120, &a);
    fake_worker *workers = w->fake.workers;
    pd_message again = {.kind = PD_MSG_REFETCH,
                        .refetch = {.key = workers[0].last_prefill.key, .count = 1}};
    say(w, 0, &again);
    wait_ms(w, 2);
    assert_true(workers[1].last_again.receiver == workers[0].incarnation);
    world_free(w);

    w = one_to_one(121);
    workers = w->fake.workers;
    ask(w, 40, 20);
    until_sent(w, PD_MSG_TARGETS);
    again.refetch.key = workers[0].last_prefill.key;
    say(w, 1, &again);
    wait_ms(w, 2);
    assert_true(workers[0].last_again.receiver == workers[1].incarnation);
    world_free(w);

    moving m = suspended(122, 0);
    workers = m.w->fake.workers;
    until_sent(m.w, PD_MSG_SHIP_REQUEST);
    refetch(&m);
    wait_ms(m.w, 2);
    assert_true(workers[m.from].last_again.receiver == workers[m.to].incarnation);
    world_free(m.w);
}

/* What the holder says to another one that asked is no word on what moves. */
static void what_is_said_of_another_one_ends_no_move(void **state)
{
    (void)state;
    for (int own = 0; own < 2; own++) {
        moving m = suspended(123, 0);
        fake_worker *workers = m.w->fake.workers;
        until_sent(m.w, PD_MSG_SHIP_REQUEST);
        const pd_message done = {.kind = PD_MSG_SHIP_DONE,
                                 .ship_done = {.key = m.key,
                                               .status = PD_E_NOT_FOUND,
                                               .receiver = workers[own ? m.to : 0].incarnation}};
        say(m.w, m.from, &done);
        assert_int_equal(counters_of(m.w).moves_failed, own);
        world_free(m.w);
    }
}

/* It would be written to where nothing was leased for it. */
static void a_source_is_asked_for_no_more_blocks_than_were_offered(void **state)
{
    (void)state;
    world *w = one_to_one(113);
    store_prompt(w, 1, 1, 20);
    w->fake.lose[PD_MSG_PREFILL_STARTED] = 1; /* the one that it says by itself */
    answer *a = ask(w, 320, 20);
    until_sent(w, PD_MSG_PREFILL_REQUEST);
    wait_ms(w, 3);
    const fake_worker *prefill = &w->fake.workers[0];
    pd_block blocks[20] = {0};
    pd_message started = {.kind = PD_MSG_PREFILL_STARTED,
                          .prefill_started = {.key = prefill->last_prefill.key,
                                              .pull_blocks = blocks,
                                              .pull_blocks_count = 20}};
    assert_int_equal(prefill->last_prefill.pull_blocks, 19);
    assert_int_equal(w->fake.sent[PD_MSG_SHIP_REQUEST], 0);
    say(w, 0, &started);
    assert_int_equal(w->fake.sent[PD_MSG_SHIP_REQUEST], 0);
    assert_int_equal(w->fake.sent[PD_MSG_PULL_END], 1);
    leave(w, a);
    world_free(w);
}

/* Its queue is full. Nobody else ends the prompt's waiting, but its patience. */
static void a_source_that_takes_no_question_ends_the_pull(void **state)
{
    (void)state;
    world *w = one_to_one(117);
    store_prompt(w, 1, 1, 20);
    w->fake.refuse[PD_MSG_SHIP_REQUEST] = 1;
    answer *a = ask(w, 320, 20);
    until_sent(w, PD_MSG_PULL_END);
    wait_ms(w, 2);
    const fake_worker *prefill = &w->fake.workers[0];
    assert_int_equal(w->fake.sent[PD_MSG_SHIP_REQUEST], 0);
    assert_int_equal(prefill->pull_ends, 1);
    assert_false(prefill->last_pull_end.may_land); /* nobody was asked */
    assert_int_equal(counters_of(w).pulls, 0);
    wait_ms(w, 500);
    assert_whole(w, a);
    world_free(w);
}

/* What it was asked for at first may still be on its way. */
static void a_source_that_takes_no_second_question_ends_the_pull(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        answer *a;
        world *w = pulling(118, &a);
        fake_worker *prefill = &w->fake.workers[0];
        const pd_message message = {.kind = PD_MSG_REFETCH,
                                    .refetch = {.key = prefill->last_prefill.key, .count = 1}};

        if (which > 0)
            pull_done(w, 1, PD_OK, which == 1, 0);
        w->fake.refuse[PD_MSG_SHIP_AGAIN] = 1;
        say(w, 0, &message);
        wait_ms(w, 5);
        assert_int_equal(w->fake.sent[PD_MSG_SHIP_AGAIN], 0);
        assert_int_equal(prefill->pull_ends, 1);
        assert_int_equal(prefill->last_pull_end.may_land, which < 2);
        wait_ms(w, 1000);
        assert_whole(w, a);
        world_free(w);
    }
}

/* ---- prompts ---- */

/* Blocks beyond the lease, or none for some of the prompt; the last one is partial: nobody can hold
 * it. */
static void targets_are_passed_on_only_of_a_lease_that_fits(void **state)
{
    (void)state;
    static const struct {
        uint32_t held, count;
        bool fits;
    } replies[] = {{0, 26, true},  {5, 21, true},  {25, 1, true},  {0, 25, false},
                   {0, 27, false}, {26, 0, false}, {5, 26, false}, {UINT32_MAX, 27, false}};
    for (uint32_t i = 0; i < sizeof replies / sizeof replies[0]; i++) {
        world *w = one_to_one(114);
        pd_block blocks[32] = {0};
        answer *a = ask(w, 410, 20);
        until_sent(w, PD_MSG_BIND);
        const pd_message reply = {.kind = PD_MSG_LEASE_REPLY,
                                  .lease_reply = {.key = w->fake.workers[0].last_prefill.key,
                                                  .bound = true,
                                                  .held_blocks = replies[i].held,
                                                  .blocks = blocks,
                                                  .blocks_count = replies[i].count}};
        say(w, 1, &reply);
        assert_int_equal(w->fake.sent[PD_MSG_TARGETS], replies[i].fits);
        assert_int_equal(counters_of(w).retried, !replies[i].fits);
        leave(w, a);
        world_free(w);
    }
}

static void a_cancel_while_its_blocks_are_shipped_waits_for_the_last_word(void **state)
{
    (void)state;
    for (int which = 0; which < 4; which++) {
        world *w = one_to_one(115);
        answer *a = ask(w, 40, 20);
        until_sent(w, PD_MSG_TARGETS);
        const pd_request_key key = w->fake.workers[0].last_prefill.key;
        const pd_message again = {.kind = PD_MSG_REFETCH, .refetch = {.key = key, .count = 1}};
        const pd_message done = {.kind = PD_MSG_PREFILL_DONE,
                                 .prefill_done = {.key = key, .again = which == 3}};
        if (which >= 2) { /* it is to write a block once more, and may not have heard so */
            say(w, 1, &again);
            assert_int_equal(w->fake.sent[PD_MSG_SHIP_AGAIN], 1);
        }
        if (which > 0)
            say(w, 0, &done);
        leave(w, a);
        wait_ms(w, 5);
        assert_int_equal(w->fake.workers[1].cancels, 1);
        assert_int_equal(w->fake.workers[1].last_cancel.unwritten, which == 1 || which == 3);
        world_free(w);
    }
}

/* They are what a lost block is fetched from again; over a slow link that is long after the prompt
 * was computed. */
static void copies_are_held_for_as_long_as_the_request_may_take(void **state)
{
    (void)state;
    world *w = one_to_one(116);
    answer *a = ask(w, 40, 20);
    wait_for_token(w, a, 0);
    const pd_msg_prefill_request *asked = &w->fake.workers[0].last_prefill;
    assert_in_range(asked->deadline_ms, 1, 2000);
    assert_in_range(asked->hold_ms, 19000, 20000); /* total_ns */
    wait_ms(w, 500);
    assert_whole(w, a);
    world_free(w);
}

/* All is sent, which is not landed, and a block is found bad twice: the rest may be on its way. */
static void the_end_of_a_pull_that_came_wrong_twice_says_what_may_land(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(113, &a);
    fake_worker *prefill = &w->fake.workers[0];
    const pd_message message = {.kind = PD_MSG_REFETCH,
                                .refetch = {.key = prefill->last_prefill.key, .count = 1}};

    pull_done(w, 1, PD_OK, true, 0);
    prefill->prompts[0].pull_blocks = 1000;
    say(w, 0, &message);
    assert_int_equal(w->fake.sent[PD_MSG_SHIP_AGAIN], 1);
    pull_done(w, 1, PD_OK, true, 1);
    say(w, 0, &message);
    wait_ms(w, 5);
    assert_int_equal(prefill->pull_ends, 1);
    assert_true(prefill->last_pull_end.may_land);
    world_free(w);
}

/* The source has heard of it, and is slow. */
static void never_sent(world *w)
{
    fake_worker *source = &w->fake.workers[1];
    for (int i = 0; i < 10000 && source->prefills == 0; i++)
        fake_run(&w->fake, w->fake.now_ns + 1000);
    assert_int_equal(source->prefills, 1);
    source->prefills = 0;
}

/* The prompt was computed before its source was done, and what the source has sent may be seconds
 * away: it is not told that nobody waits any more, as it would forget the shipment without a last
 * word, and answer that nothing is under way. Its deadline ends it, with that word. */
static void a_source_that_is_done_too_late_is_not_released_before_its_last_word(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(124, &a);
    fake_worker *source = &w->fake.workers[1];

    never_sent(w);
    until_sent(w, PD_MSG_DECODE_START);
    source->prefills = 1;
    pull_done(w, 1, PD_OK, true, 0);
    wait_ms(w, 5);
    assert_int_equal(source->prefills, 1);
    wait_ms(w, 2000);
    assert_true(a->ends == 1 && a->next == a->max);
    world_free(w);
}

/* The prefill worker was cut off and begins anew; what it pulled may still be on its way, and it is
 * not told that nobody writes before the source has said so. */
static void who_begins_anew_waits_for_what_it_pulled(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(125, &a);
    fake_worker *prefill = &w->fake.workers[0];
    const pd_request_key key = prefill->last_prefill.key;
    pd_message done = {.kind = PD_MSG_SHIP_DONE,
                       .ship_done = {.key = key, .status = PD_E_CANCELLED, .may_land = true}};

    never_sent(w);
    fake_new_session(&w->fake, 0);
    prefill->quarantined = key;
    wait_ms(w, 5);
    leave(w, a);
    say(w, 1, &done);
    wait_ms(w, 20000); /* audits */
    assert_int_not_equal(prefill->quarantined.number, 0);
    done.ship_done.status = PD_E_NOT_FOUND;
    done.ship_done.may_land = false;
    say(w, 1, &done);
    wait_ms(w, 5);
    assert_int_equal(prefill->quarantined.number, 0);
    world_free(w);
}

/* More pulls have been left than a router remembers: of a key that it does not know it cannot say
 * that nobody was asked. */
static void of_a_pull_that_was_forgotten_nothing_is_said(void **state)
{
    (void)state;
    for (int many = 0; many < 2; many++) {
        answer *a;
        world *w = pulling(128, &a);
        fake_worker *prefill = &w->fake.workers[0];
        pd_request_key key = prefill->last_prefill.key;

        never_sent(w);
        leave(w, a);
        for (int i = 0; many && i < 260; i++) {
            w->count = 0; /* the same prompt */
            a = ask(w, 320, 20);
            until_sent(w, PD_MSG_SHIP_REQUEST);
            never_sent(w);
            leave(w, a);
            wait_ms(w, 1);
        }
        if (!many)
            key.number += 7; /* nobody was asked for that one */
        prefill->quarantined = key;
        wait_ms(w, 10000); /* audits */
        assert_int_equal(prefill->quarantined.number != 0, many);
        world_free(w);
    }
}

/* A source that was given up may only stand still, and write when it goes on: whoever pulled from
 * it is not told with the cancel that nobody writes. */
static void a_cancel_after_the_sources_loss_does_not_say_that_nobody_writes(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(127, &a);
    fake_worker *prefill = &w->fake.workers[0];

    never_sent(w);
    end_process(w, 1);
    leave(w, a);
    wait_ms(w, 5);
    assert_true(prefill->cancels > 0);
    assert_false(prefill->last_cancel.unwritten);
    world_free(w);
}

/* The prompt was computed before its source was done, and its answer runs when the prefill worker
 * begins anew: who waits there hears of the source's word, and not only when the answer has ended.
 */
static void a_sources_word_is_passed_on_while_the_answer_runs(void **state)
{
    (void)state;
    answer *a;
    world *w = pulling(126, &a);
    fake_worker *prefill = &w->fake.workers[0];
    const pd_request_key key = prefill->last_prefill.key;
    pd_message done = {
        .kind = PD_MSG_SHIP_DONE,
        .ship_done = {
            .key = key, .status = PD_E_NOT_FOUND, .again = 1, .receiver = prefill->incarnation}};

    never_sent(w);
    wait_for_token(w, a, 2);
    stall(w, place_of(w, a), true);
    fake_new_session(&w->fake, 0);
    prefill->quarantined = key;
    wait_ms(w, 5);
    assert_int_equal(counters_of(w).retried, 0);
    done.ship_done.may_land = true;
    say(w, 1, &done);
    wait_ms(w, 5);
    assert_int_not_equal(prefill->quarantined.number, 0);
    done.ship_done.may_land = false;
    say(w, 1, &done);
    wait_ms(w, 5);
    assert_int_equal(a->ends, 0);
    assert_int_equal(prefill->quarantined.number, 0);
    stall(w, place_of(w, a), false);
    wait_ms(w, 100);
    assert_true(a->ends == 1 && a->next == a->max);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_begins_anew_waits_for_what_it_pulled),
        cmocka_unit_test(a_cancel_after_the_sources_loss_does_not_say_that_nobody_writes),
        cmocka_unit_test(of_a_pull_that_was_forgotten_nothing_is_said),
        cmocka_unit_test(a_sources_word_is_passed_on_while_the_answer_runs),
        cmocka_unit_test(a_source_that_is_done_too_late_is_not_released_before_its_last_word),
        cmocka_unit_test(the_end_of_a_pull_that_came_wrong_twice_says_what_may_land),
        cmocka_unit_test(where_a_move_fails_blocks_are_free_only_if_the_holder_writes_no_more),
        cmocka_unit_test(a_cancel_while_it_moves_waits_for_the_holders_last_word),
        cmocka_unit_test(only_a_sequence_with_all_its_positions_moves),
        cmocka_unit_test(a_move_goes_only_into_a_lease_that_fits_it),
        cmocka_unit_test(a_prompt_whose_source_fails_hears_whether_its_bytes_may_land),
        cmocka_unit_test(a_cancel_while_it_pulls_waits_for_the_sources_last_word),
        cmocka_unit_test(only_the_sources_own_word_ends_what_was_pulled_for_a_request_that_left),
        cmocka_unit_test(what_is_said_of_another_one_ends_no_pull),
        cmocka_unit_test(what_is_said_of_another_one_ends_no_move),
        cmocka_unit_test(who_waits_is_named_when_blocks_are_asked_for_again),
        cmocka_unit_test(a_source_is_asked_for_no_more_blocks_than_were_offered),
        cmocka_unit_test(a_source_that_takes_no_question_ends_the_pull),
        cmocka_unit_test(a_source_that_takes_no_second_question_ends_the_pull),
        cmocka_unit_test(targets_are_passed_on_only_of_a_lease_that_fits),
        cmocka_unit_test(a_cancel_while_its_blocks_are_shipped_waits_for_the_last_word),
        cmocka_unit_test(copies_are_held_for_as_long_as_the_request_may_take),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
