/* What comes over the data plane is believed only when it fits. */
#include "tests/unit/workers/world.h"

#include "common/base/log.h"
#include "decode-worker/core.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const pd_request_key the_key = {WORLD_ROUTER, 1, 1};

static void to_decode(world *w, const pd_notice *notice)
{
    static pd_transfer_event event;

    event = (pd_transfer_event){.kind = PD_TRANSFER_NOTICE};
    event.notice_len = pd_notice_pack(notice, event.notice);
    w->decode.ops->on_transfer(w->decode.core, &event, w->now_ns);
}

static uint64_t ignored(world *w)
{
    return w->decode.ops->counters(w->decode.core).notices_ignored;
}

static pd_ledger ledger(world *w)
{
    return w->decode.ops->ledger(w->decode.core);
}

/* A lease of 40 tokens (3 blocks, the last of 8) that nobody has written to yet. */
static world *leased(void)
{
    world *w = world_create(&(world_setup){.seed = 1});
    uint32_t prompt[40];

    for (uint32_t i = 0; i < 40; i++)
        prompt[i] = i;
    world_ask(w, prompt, 40, 10);
    assert_true(world_lease_next(w));
    assert_int_equal(ledger(w).leased, 0);
    pd_message message = {.kind = PD_MSG_BIND};
    message.bind.key = the_key;
    world_to(w, &w->decode, &message);
    assert_int_equal(ledger(w).leased, 3); /* what lands */
    w->letters_count = 0;                  /* the replies are lost: the prefill never begins */
    return w;
}

static pd_notice fitting(const world *w, uint32_t group)
{
    return (pd_notice){.kind = PD_NOTICE_BLOCKS,
                       .groups = 1,
                       .slices = 1,
                       .key = the_key,
                       .sender = w->prefill.options.incarnation,
                       .receiver = w->decode.options.incarnation,
                       .group = group,
                       .first_block = 0,
                       .count = 3,
                       .valid_tokens = 8};
}

static void cancel(world *w)
{
    pd_message message = {.kind = PD_MSG_CANCEL};

    message.cancel.key = the_key;
    world_to(w, &w->decode, &message);
}

static void done(world *w)
{
    assert_int_equal(ledger(w).free + ledger(w).cached, ledger(w).total);
    world_destroy(w);
}

static void what_does_not_fit_is_ignored_and_counted(void **state)
{
    (void)state;
    world *w = leased();
    pd_notice wrong[12];
    uint32_t n = 0;

    for (uint32_t i = 0; i < 12; i++)
        wrong[i] = fitting(w, 0);
    wrong[n++].sender++;
    wrong[n++].receiver++;
    wrong[n++].key.epoch++;
    wrong[n++].key.number++;
    wrong[n++].key.router++;
    wrong[n++].group = WORLD_GROUPS;
    wrong[n++].first_block = 1; /* ends behind the prompt */
    wrong[n++].count = 4;
    wrong[n++].valid_tokens = 16; /* more than the prompt leaves there */
    wrong[n++].valid_tokens = 7;
    wrong[n].count = 2; /* a full block said to be partial */
    wrong[n++].valid_tokens = 8;
    uint64_t seals[3] = {0};
    wrong[n++].seals = seals; /* sealed, where nobody seals */
    for (uint32_t i = 0; i < n; i++) {
        to_decode(w, &wrong[i]);
        assert_int_equal(ignored(w), i + 1);
    }
    for (uint32_t group = 0; group < WORLD_GROUPS; group++) {
        pd_notice notice = fitting(w, group);
        to_decode(w, &notice);
        assert_int_equal(ignored(w), n);
        to_decode(w, &notice); /* twice */
        assert_int_equal(ignored(w), ++n);
    }
    cancel(w); /* everything has landed: nothing is quarantined */
    assert_int_equal(ledger(w).quarantined, 0);
    assert_int_equal(ledger(w).cached, 2);
    done(w);
}

static void bytes_that_are_no_notice_do_no_harm(void **state)
{
    (void)state;
    world *w = leased();
    static pd_transfer_event event;
    uint64_t random = 1;
    pd_notice notice = fitting(w, 0);

    for (uint32_t i = 0; i < 2000; i++) {
        event = (pd_transfer_event){.kind = PD_TRANSFER_NOTICE};
        event.notice_len = pd_notice_pack(&notice, event.notice);
        if (i % 2 == 0)
            event.notice_len = pd_random_next(&random) % (event.notice_len * 2);
        event.notice[pd_random_next(&random) % 12] ^= 1 << pd_random_next(&random) % 8;
        w->decode.ops->on_transfer(w->decode.core, &event, w->now_ns);
    }
    world_tick(w, 1);
    cancel(w);
    notice.kind = PD_NOTICE_ABORT;
    to_decode(w, &notice);
    done(w);
}

static void a_cancelled_landing_waits_for_the_senders_last_word(void **state)
{
    (void)state;
    world *w = leased();
    pd_notice notice = fitting(w, 1);

    to_decode(w, &notice);
    cancel(w);
    assert_int_equal(ledger(w).quarantined, 3);
    world_tick(w, 500); /* time takes nothing back */
    assert_int_equal(ledger(w).quarantined, 3);
    notice = fitting(w, 0);
    to_decode(w, &notice);
    assert_int_equal(ledger(w).quarantined, 3);
    notice = fitting(w, 2); /* the last of it */
    to_decode(w, &notice);
    assert_int_equal(ledger(w).quarantined, 0);
    assert_int_equal(ledger(w).cached, 0); /* unchecked: not believed either */
    done(w);
}

static void an_abort_ends_a_quarantine(void **state)
{
    (void)state;
    world *w = leased();
    pd_notice notice = fitting(w, 0);

    notice.kind = PD_NOTICE_ABORT;
    cancel(w);
    assert_int_equal(ledger(w).quarantined, 3);
    pd_notice others[5] = {notice, notice, notice, notice, notice};
    others[0].sender++; /* not of who may write */
    others[1].receiver++;
    others[2].key.epoch--; /* of an attempt before, late: the same sender may write for this one */
    others[3].key.number++;
    others[4].key.router++;
    for (uint32_t i = 0; i < 5; i++) {
        to_decode(w, &others[i]);
        assert_int_equal(ledger(w).quarantined, 3);
    }
    to_decode(w, &notice);
    assert_int_equal(ledger(w).quarantined, 0);
    to_decode(w, &notice); /* late */
    assert_int_equal(ignored(w), 6);
    done(w);
}

static void an_abort_of_everything_of_a_router_ends_its_landings(void **state)
{
    (void)state;
    world *w = leased();
    pd_notice notice = fitting(w, 0);

    notice.kind = PD_NOTICE_ABORT;
    notice.key = (pd_request_key){.router = WORLD_ROUTER + 1};
    to_decode(w, &notice);
    assert_int_equal(ledger(w).leased, 3);
    notice.key.router = WORLD_ROUTER; /* before its first session with it: late, or nonsense */
    to_decode(w, &notice);
    assert_int_equal(ledger(w).leased, 3);
    notice.key.epoch = 1;
    to_decode(w, &notice);
    done(w);
}

static void a_dead_sender_ends_a_quarantine_and_gets_no_lease(void **state)
{
    (void)state;
    world *w = leased();
    pd_message message = {.kind = PD_MSG_PEER_GONE};

    cancel(w);
    message.peer_gone.incarnation = w->prefill.options.incarnation + 100;
    world_to(w, &w->decode, &message);
    assert_int_equal(ledger(w).quarantined, 3);
    message.peer_gone.incarnation = w->prefill.options.incarnation;
    world_to(w, &w->decode, &message);
    assert_int_equal(ledger(w).quarantined, 0);
    uint32_t prompt[20] = {1};
    world_request *r = world_ask(w, prompt, 20, 10);
    world_lease_next(w);
    world_read_letter(w);
    assert_int_equal(r->status, PD_E_PEER);
    done(w);
}

/* The router gave it up, and yet it is a process: stopped, perhaps, in the middle of a write. */
static void what_a_stopped_sender_may_write_into_stays_taken_until_it_is_dead(void **state)
{
    (void)state;
    for (int started = 0; started < 2; started++) {
        world *w = leased();
        uint32_t tokens[41] = {0};
        uint64_t sender = w->prefill.options.incarnation;
        pd_message message = {.kind = PD_MSG_DECODE_START};

        message.decode_start = (pd_msg_decode_start){.key = the_key,
                                                     .id = "r",
                                                     .tokens = tokens,
                                                     .tokens_count = 41,
                                                     .prompt_tokens = 40,
                                                     .max_tokens = 10};
        if (started)
            world_to(w, &w->decode, &message);
        message = (pd_message){.kind = PD_MSG_PEER_GONE};
        message.peer_gone.incarnation = sender;
        message.peer_gone.may_write = true;
        world_to(w, &w->decode, &message);
        assert_int_equal(ledger(w).quarantined, 3);
        assert_int_equal(w->letters_count, started); /* who waits for it hears at once */
        if (started)
            assert_int_equal(w->letters[0].message.decode_failed.status, PD_E_PEER);
        pd_notice notice = fitting(w, 0); /* it goes on, late */
        to_decode(w, &notice);
        message.peer_gone.may_write = true;
        world_to(w, &w->decode, &message);
        assert_int_equal(ledger(w).quarantined, 3);
        w->decode.ops->peer_dead(w->decode.core, sender, w->now_ns);
        assert_int_equal(ledger(w).quarantined, 0);
        w->letters_count = 0;
        done(w);
    }
}

static pd_status lease_status(world *w)
{
    uint32_t prompt[20] = {1};
    const world_request *r = world_ask(w, prompt, 20, 10);

    w->letters_count = 0;
    world_lease_next(w);
    world_read_letter(w);
    return r->status;
}

/* A router gave it up and died; to the next one it is well. What it was writing stays taken. */
static void a_sender_that_is_announced_again_gets_leases_unless_its_process_has_ended(void **state)
{
    (void)state;
    for (int may_write = 0; may_write < 2; may_write++) {
        world *w = leased();
        uint64_t sender = w->prefill.options.incarnation;
        pd_message gone = {.kind = PD_MSG_PEER_GONE}, up = {.kind = PD_MSG_PEER_UP};

        gone.peer_gone.incarnation = sender;
        gone.peer_gone.may_write = may_write;
        up.peer_up.role = PD_ROLE_PREFILL;
        world_to(w, &w->decode, &gone);
        assert_int_equal(lease_status(w), PD_E_PEER);
        up.peer_up.incarnation = sender + 100;
        world_to(w, &w->decode, &up);
        assert_int_equal(lease_status(w), PD_E_PEER);
        up.peer_up.incarnation = sender;
        world_to(w, &w->decode, &up);
        assert_int_equal(ledger(w).quarantined, may_write ? 3 : 0);
        assert_int_equal(lease_status(w), PD_OK);
        w->decode.ops->peer_dead(w->decode.core, sender, w->now_ns);
        world_to(w, &w->decode, &up);
        assert_int_equal(lease_status(w), PD_E_PEER);
        w->letters_count = 0;
        done(w);
    }
}

static void a_lease_that_is_not_renewed_runs_out(void **state)
{
    (void)state;
    world *w = leased();

    for (int i = 0; i < 10; i++)
        world_tick(w, 400); /* with heartbeats */
    assert_int_equal(ledger(w).leased, 3);
    w->router_silent = true;
    world_tick(w, 400);
    world_tick(w, 400);
    world_tick(w, 400);
    assert_int_equal(ledger(w).leased, 0);
    /* the prefill worker has lost the router too, and says so */
    while (world_turn(w)) {
    }
    done(w);
}

static void another_router_hears_of_what_was_left_by_one_that_is_lost(void **state)
{
    (void)state;
    world *w = leased();
    pd_message audit = {.kind = PD_MSG_AUDIT, .audit = {.serial = 7}};
    pd_message message = {.kind = PD_MSG_CANCEL};

    w->decode.ops->on_message(w->decode.core, WORLD_ROUTER + 1, &audit, w->now_ns);
    assert_int_equal(w->last_audit.serial, 7);
    assert_int_equal(w->last_audit.entries_count, 0);
    w->router_silent = true;
    for (int i = 0; i < 3; i++)
        world_tick(w, 400);
    assert_int_equal(ledger(w).quarantined, 3);
    w->decode.ops->on_message(w->decode.core, WORLD_ROUTER + 2, &audit, w->now_ns);
    assert_int_equal(w->last_audit.entries_count, 1);
    assert_true(w->audit_entries[0].key.router == WORLD_ROUTER);
    assert_int_equal(w->audit_entries[0].state, PD_AUDIT_QUARANTINED);
    message.cancel = (pd_msg_cancel){
        .key = the_key, .unwritten = true, .source = w->prefill.options.incarnation};
    w->decode.ops->on_message(w->decode.core, WORLD_ROUTER + 2, &message, w->now_ns);
    assert_int_equal(ledger(w).quarantined, 0);
    while (world_turn(w)) {
    }
    done(w);
}

static void a_cancel_of_what_never_came_frees_what_was_leased_for_it(void **state)
{
    (void)state;
    world *w = leased();
    pd_message message = {.kind = PD_MSG_CANCEL};

    cancel(w);
    assert_int_equal(ledger(w).quarantined, 3);
    message.cancel.key = the_key;
    world_to(w, &w->prefill, &message); /* it never had the request */
    while (world_turn(w)) {
    }
    done(w);
}

static void what_nobody_was_asked_to_write_is_free_at_once(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        world *w = leased();
        pd_message message = {.kind = PD_MSG_CANCEL};

        if (late)
            cancel(w);
        message.cancel.key = the_key;
        message.cancel.unwritten = true;
        world_to(w, &w->decode, &message);
        done(w);
    }
}

static void a_routers_word_on_a_sender_ends_what_waits_for_that_one(void **state)
{
    (void)state;
    world *w = leased();
    pd_message message = {.kind = PD_MSG_CANCEL};

    message.cancel = (pd_msg_cancel){
        .key = the_key, .unwritten = true, .source = w->prefill.options.incarnation};
    world_to(w, &w->decode, &message);
    assert_int_equal(ledger(w).leased, 3); /* nobody has given it up: nothing is cancelled */
    cancel(w);
    message.cancel.source++;
    world_to(w, &w->decode, &message);
    assert_int_equal(ledger(w).quarantined, 3); /* another one's word */
    message.cancel.source--;
    world_to(w, &w->decode, &message);
    done(w);
}

static void a_start_without_a_lease_is_answered(void **state)
{
    (void)state;
    world *w = leased();
    uint32_t tokens[41] = {0};
    pd_message message = {.kind = PD_MSG_DECODE_START};
    pd_msg_decode_start *start = &message.decode_start;

    *start = (pd_msg_decode_start){.key = the_key,
                                   .id = "r",
                                   .tokens = tokens,
                                   .tokens_count = 41,
                                   .prompt_tokens = 40,
                                   .max_tokens = 10};
    start->key.epoch = 2;
    world_to(w, &w->decode, &message);
    assert_int_equal(w->letters_count, 1);
    assert_int_equal(w->letters[0].message.decode_failed.status, PD_E_NOT_FOUND);
    start->key.epoch = 1;
    start->max_tokens = 40; /* more than was leased for */
    world_to(w, &w->decode, &message);
    assert_int_equal(w->letters_count, 2);
    assert_int_equal(w->letters[1].message.decode_failed.status, PD_E_INVALID);
    assert_int_equal(ledger(w).quarantined, 3);
    pd_notice notice = fitting(w, 0);
    notice.kind = PD_NOTICE_ABORT;
    to_decode(w, &notice);
    done(w);
}

static void blocks_that_never_come_fail_the_request(void **state)
{
    (void)state;
    world *w = leased();
    uint32_t tokens[41] = {0};
    pd_message message = {.kind = PD_MSG_DECODE_START};

    message.decode_start = (pd_msg_decode_start){.key = the_key,
                                                 .id = "r",
                                                 .tokens = tokens,
                                                 .tokens_count = 41,
                                                 .prompt_tokens = 40,
                                                 .max_tokens = 10,
                                                 .landing_ms = 300};
    world_to(w, &w->decode, &message);
    world_tick(w, 149);
    assert_int_equal(w->letters_count, 0);
    world_tick(w, 1);
    assert_int_equal(w->letters_count, WORLD_GROUPS); /* what is missing, once */
    for (uint32_t g = 0; g < WORLD_GROUPS; g++) {
        assert_int_equal(w->letters[g].message.kind, PD_MSG_REFETCH);
        assert_int_equal(w->letters[g].message.refetch.group, g);
        assert_int_equal(w->letters[g].message.refetch.first_block, 0);
        assert_int_equal(w->letters[g].message.refetch.count, 3);
    }
    pd_notice notice = fitting(w, 0);
    to_decode(w, &notice); /* the first writing, late: it is not what was asked for again */
    assert_int_equal(ignored(w), 1);
    notice.again = 1;
    to_decode(w, &notice);
    assert_int_equal(ignored(w), 1);
    world_tick(w, 299); /* as long as ever, from the last that came */
    assert_int_equal(w->letters_count, WORLD_GROUPS);
    world_tick(w, 1);
    assert_int_equal(w->letters_count, WORLD_GROUPS + 1);
    assert_int_equal(w->letters[WORLD_GROUPS].message.decode_failed.status, PD_E_TIMEOUT);
    assert_int_equal(ledger(w).quarantined, 3);
    notice.kind = PD_NOTICE_ABORT;
    to_decode(w, &notice);
    done(w);
}

/* One block is asked for, and yet all before it in its prefix can be evicted no more. */
static void a_pin_for_a_pull_leaves_promised_room(void **state)
{
    (void)state;
    world *w = world_create(&(world_setup){.seed = 1, .decode_blocks = 10});
    uint32_t tokens[129];

    for (uint32_t i = 0; i < 129; i++)
        tokens[i] = i % WORLD_VOCAB;
    world_request *r = world_ask(w, tokens, 129, 4);
    assert_true(world_lease_next(w));
    assert_true(world_settle(w));
    assert_int_equal(r->phase, WORLD_FINISHED);
    assert_int_equal(ledger(w).cached, 8);
    tokens[0]++;
    const world_request *other = world_ask(w, tokens, 40, 4); /* 3 blocks; 2 are free */
    assert_true(world_lease_next(w));
    const world_letter *letter = &w->letters[w->letters_count - 1];
    assert_int_equal(letter->message.kind, PD_MSG_LEASE_REPLY);
    assert_int_equal(letter->message.lease_reply.status, PD_OK);
    const pd_block target = 3;
    pd_message message = {.kind = PD_MSG_SHIP_REQUEST};
    message.ship_request = (pd_msg_ship_request){
        .key = {WORLD_ROUTER, 77, 1},
        .id = "pull",
        .receiver = {.name = "prefill-9",
                     .incarnation = 999,
                     .transfer_address = "address",
                     .transfer_address_len = 7},
        .first_block = 7,
        .blocks = &target,
        .blocks_count = 1,
        .hashes = r->hashes,
        .hashes_count = 8,
        .kv_tokens = 128,
    };
    world_to(w, &w->decode, &message);
    assert_int_equal(w->letters[w->letters_count - 1].message.kind, PD_MSG_SHIP_DONE);
    assert_int_equal(w->letters[w->letters_count - 1].message.ship_done.status, PD_E_OVERLOAD);
    pd_message bind = {.kind = PD_MSG_BIND, .bind.key = other->key};
    world_to(w, &w->decode, &bind);
    assert_int_equal(w->letters[w->letters_count - 1].message.kind, PD_MSG_LEASE_REPLY);
    assert_int_equal(w->letters[w->letters_count - 1].message.lease_reply.status, PD_OK);
    assert_int_equal(ledger(w).leased, 3);
    w->letters_count = 0;
    world_destroy(w);
}

static void a_foreign_key_is_not_believed(void **state)
{
    (void)state;
    world *w = leased();
    pd_message message = {.kind = PD_MSG_CANCEL};

    message.cancel.key = the_key;
    w->decode.ops->on_message(w->decode.core, WORLD_ROUTER + 1, &message, w->now_ns);
    assert_int_equal(ledger(w).leased, 3);
    cancel(w);
    pd_notice notice = fitting(w, 0);
    notice.kind = PD_NOTICE_ABORT;
    to_decode(w, &notice);
    done(w);
}

/* Of one receiver a word was forgotten: to it nothing may be denied. Another one's question is
 * answered all the same: from the data plane it is known whose it is. */
static void who_asks_is_told_apart_from_whom_a_word_was_forgotten_of(void **state)
{
    (void)state;
    enum { MUTED = 500, ASKS = 600 };
    world *w = world_create(&(world_setup){.seed = 1});
    pd_role_core *core = w->decode.core;

    for (uint64_t i = 0; i <= PD_LAST_WORDS_OWED_MAX; i++)
        pd_last_words_owe(&core->words, MUTED, &(pd_request_key){WORLD_ROUTER, 1000 + i, 1}, false);
    pd_notice ask = {.kind = PD_NOTICE_ASK,
                     .key = {WORLD_ROUTER, 7, 1},
                     .sender = MUTED,
                     .receiver = w->decode.options.incarnation};
    w->letters_count = 0;
    to_decode(w, &ask);
    assert_int_equal(w->letters_count, 0);
    ask.sender = ASKS;
    ask.key.number++;
    to_decode(w, &ask);
    assert_int_equal(w->letters_count, 1);
    const pd_message *answer = &w->letters[0].message;
    assert_int_equal(answer->kind, PD_MSG_SHIP_DONE);
    assert_int_equal(answer->ship_done.status, PD_E_NOT_FOUND);
    assert_true(answer->ship_done.key.number == 8 && !answer->ship_done.may_land);
    for (int lost = 0; lost < 2; lost++) { /* the same by way of a router, its own or another */
        for (uint64_t who = MUTED; who <= ASKS; who += ASKS - MUTED) {
            pd_message again = {.kind = PD_MSG_SHIP_AGAIN,
                                .ship_again = {.key = {WORLD_ROUTER + 9 * (uint64_t)lost, 9, 1},
                                               .group = UINT32_MAX,
                                               .count = 1,
                                               .receiver = who}};
            w->letters_count = 0;
            world_to(w, &w->decode, &again);
            assert_int_equal(w->letters_count, lost && who == MUTED ? 0 : 1);
            if (w->letters_count == 0)
                continue;
            assert_int_equal(answer->kind, PD_MSG_SHIP_DONE);
            assert_int_equal(answer->ship_done.may_land, who == MUTED);
            assert_int_equal(answer->ship_done.receiver, who);
        }
    }
    w->letters_count = 0;
    world_destroy(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_does_not_fit_is_ignored_and_counted),
        cmocka_unit_test(bytes_that_are_no_notice_do_no_harm),
        cmocka_unit_test(a_cancelled_landing_waits_for_the_senders_last_word),
        cmocka_unit_test(an_abort_ends_a_quarantine),
        cmocka_unit_test(an_abort_of_everything_of_a_router_ends_its_landings),
        cmocka_unit_test(a_dead_sender_ends_a_quarantine_and_gets_no_lease),
        cmocka_unit_test(what_a_stopped_sender_may_write_into_stays_taken_until_it_is_dead),
        cmocka_unit_test(a_sender_that_is_announced_again_gets_leases_unless_its_process_has_ended),
        cmocka_unit_test(a_lease_that_is_not_renewed_runs_out),
        cmocka_unit_test(another_router_hears_of_what_was_left_by_one_that_is_lost),
        cmocka_unit_test(a_cancel_of_what_never_came_frees_what_was_leased_for_it),
        cmocka_unit_test(what_nobody_was_asked_to_write_is_free_at_once),
        cmocka_unit_test(a_routers_word_on_a_sender_ends_what_waits_for_that_one),
        cmocka_unit_test(a_start_without_a_lease_is_answered),
        cmocka_unit_test(blocks_that_never_come_fail_the_request),
        cmocka_unit_test(a_pin_for_a_pull_leaves_promised_room),
        cmocka_unit_test(a_foreign_key_is_not_believed),
        cmocka_unit_test(who_asks_is_told_apart_from_whom_a_word_was_forgotten_of),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
