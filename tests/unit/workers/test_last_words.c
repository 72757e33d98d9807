/* A sender's last words: said once its link can carry them, never before they are true, and kept.
 */
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/last_words.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { ROUTER = 9, RECEIVER = 88, OTHER = 89 };

typedef struct bench {
    pd_role_options options;
    pd_role_sink sink;
    pd_links links;
    pd_last_words words;
    pd_status notify_status;
    uint32_t said;
    pd_notice last;
} bench;

static pd_status on_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    bench *b = ctx;

    (void)peer;
    assert_int_equal(notice->kind, PD_NOTICE_ABORT);
    if (b->notify_status != PD_OK)
        return b->notify_status;
    b->said++;
    b->last = *notice;
    return PD_OK;
}

static bench *setup(void)
{
    bench *b = pd_calloc(1, sizeof *b);

    assert_non_null(b);
    b->options = (pd_role_options){.incarnation = 77};
    b->sink = (pd_role_sink){.ctx = b, .notify = on_notify};
    assert_int_equal(pd_links_init(&b->links, 2, &b->sink), PD_OK);
    pd_last_words_init(&b->words, &b->options, &b->sink, &b->links);
    return b;
}

static void teardown(bench *b)
{
    pd_links_fini(&b->links);
    pd_free(b);
}

static pd_link *link_up(bench *b, uint64_t receiver)
{
    pd_msg_peer_up peer = {
        .incarnation = receiver, .transfer_address = "address", .transfer_address_len = 7};
    pd_link *link = pd_links_add(&b->links, &peer);

    assert_non_null(link);
    link->state = PD_LINK_UP;
    return link;
}

static pd_request_key key_of(uint64_t number)
{
    return (pd_request_key){.router = ROUTER, .number = number, .epoch = 1};
}

static void what_the_carrier_has_no_room_for_is_said_later(void **state)
{
    (void)state;
    bench *b = setup();
    const pd_link *link = link_up(b, RECEIVER);
    pd_request_key key = key_of(3);

    b->notify_status = PD_E_OVERLOAD;
    pd_last_words_abort(&b->words, link, &key);
    pd_last_words_retry(&b->words);
    assert_int_equal(b->said, 0);
    assert_true(pd_last_words_owes(&b->words, &key, 0));
    b->notify_status = PD_OK;
    pd_last_words_retry(&b->words); /* by the same link: there need not be another one ever */
    assert_int_equal(b->said, 1);
    assert_int_equal(b->last.key.number, 3);
    assert_false(pd_last_words_owes_to(&b->words, RECEIVER));
    pd_last_words_retry(&b->words);
    assert_int_equal(b->said, 1);
    teardown(b);
}

/* Said to all for a key of which nothing was written: whom it does not reach keeps nobody waiting.
 */
static void a_word_on_nothing_is_owed_and_nothing_may_land(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key key = key_of(3);

    link_up(b, RECEIVER);
    pd_link *connecting = link_up(b, OTHER);
    connecting->state = PD_LINK_CONNECTING;
    b->notify_status = PD_E_PEER; /* its end is not known here yet */
    pd_last_words_everywhere(&b->words, &key);
    assert_true(pd_last_words_owes_to(&b->words, RECEIVER));
    assert_true(pd_last_words_owes_to(&b->words, OTHER));
    assert_false(pd_last_words_owes(&b->words, &key, 0));
    pd_last_words_retry(&b->words); /* in vain once more */
    assert_false(pd_last_words_owes(&b->words, &key, 0));
    b->notify_status = PD_OK;
    pd_last_words_retry(&b->words);
    assert_int_equal(b->said, 1);
    assert_false(pd_last_words_owes_to(&b->words, RECEIVER));
    /* who asks may be another one, whom it never reaches */
    assert_false(pd_last_words_say_again(&b->words, &key, 0));
    assert_int_equal(b->said, 1);
    teardown(b);
}

/* Who asks by way of a router is answered by the data plane, behind what is on its way there. */
static void a_word_that_was_said_is_said_again_when_somebody_asks(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key key = key_of(3), other = key_of(4);
    pd_link *link = link_up(b, RECEIVER);

    pd_last_words_abort(&b->words, link, &key);
    assert_int_equal(b->said, 1);
    assert_false(pd_last_words_say_again(&b->words, &other, 0)); /* nothing of it is on its way */
    for (int turn = 0; turn < 2; turn++) {
        assert_true(pd_last_words_say_again(&b->words, &key, 0));
        assert_int_equal(b->said, 2 + turn);
        assert_int_equal(b->last.key.number, 3);
    }
    b->notify_status = PD_E_OVERLOAD;
    assert_true(pd_last_words_say_again(&b->words, &key, 0)); /* owed */
    assert_true(pd_last_words_say_again(&b->words, &key, 0));
    b->notify_status = PD_OK;
    pd_last_words_retry(&b->words);
    assert_int_equal(b->said, 4);
    teardown(b);
}

/* The link broke behind it: it may have been lost with bytes that land all the same. */
static void a_word_that_a_broken_link_took_along_is_owed(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key key = key_of(3);
    pd_link *link = link_up(b, RECEIVER);

    pd_last_words_abort(&b->words, link, &key);
    assert_true(pd_last_words_owes(&b->words, &key, 0)); /* it is behind what may be seconds away */
    pd_links_closed(link);
    assert_true(pd_last_words_owes(&b->words, &key, 0));
    assert_false(pd_last_words_owes_to(&b->words, RECEIVER));
    assert_true(pd_last_words_say_again(&b->words, &key, 0));
    assert_int_equal(b->said, 1);
    assert_true(pd_last_words_owes_to(&b->words, RECEIVER)); /* for it a link is made */
    link = link_up(b, RECEIVER);
    pd_last_words_pay(&b->words, link);
    assert_int_equal(b->said, 2);
    assert_false(pd_last_words_owes_to(&b->words, RECEIVER));
    pd_links_closed(link);
    pd_last_words_dead(&b->words, RECEIVER);
    assert_false(pd_last_words_say_again(&b->words, &key, 0)); /* nothing lands at what has ended */
    teardown(b);
}

static void no_word_is_forgotten_while_there_is_a_place(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key key = key_of(1);

    pd_last_words_owe(&b->words, OTHER, &key, false); /* never comes back */
    for (uint64_t i = 0; i < 4 * PD_LAST_WORDS_OWED_MAX; i++) {
        key = key_of(100 + i);
        pd_last_words_owe(&b->words, RECEIVER, &key, false);
        pd_link *link = link_up(b, RECEIVER);
        pd_last_words_pay(&b->words, link);
        assert_false(pd_last_words_owes_to(&b->words, RECEIVER));
        pd_links_closed(link);
    }
    key = key_of(1);
    assert_true(pd_last_words_owes(&b->words, &key, 0));
    teardown(b);
}

static void what_an_open_link_may_write_for_ever_has_no_last_word(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key key = key_of(5), another = key_of(6), all = {.router = ROUTER};

    pd_last_words_never(&b->words, RECEIVER, &key);
    assert_true(pd_last_words_owes(&b->words, &key, 0));
    assert_false(pd_last_words_owes_to(&b->words, RECEIVER)); /* no link would help */
    const pd_link *link = link_up(b, RECEIVER);
    pd_last_words_pay(&b->words, link);
    pd_last_words_retry(&b->words);
    pd_last_words_everywhere(&b->words, &key);
    pd_last_words_everywhere(&b->words, &all);
    assert_int_equal(b->said, 0);
    pd_last_words_everywhere(&b->words, &another);
    assert_int_equal(b->said, 1);
    link_up(b, OTHER);
    pd_last_words_everywhere(&b->words, &all); /* another one has nothing of it */
    assert_int_equal(b->said, 2);
    assert_int_equal(b->last.receiver, OTHER);
    teardown(b);
}

static void the_latest_ends_are_remembered(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key key = {0};

    for (uint64_t i = 1; i <= 2 * PD_LAST_WORDS_ENDED_MAX; i++) {
        key = key_of(i);
        assert_false(pd_last_words_ended(&b->words, &key));
        pd_last_words_end(&b->words, &key);
        pd_last_words_end(&b->words, &key); /* takes one place */
    }
    for (uint64_t i = 1; i <= 2 * PD_LAST_WORDS_ENDED_MAX; i++) {
        key = key_of(i);
        assert_int_equal(pd_last_words_ended(&b->words, &key), i > PD_LAST_WORDS_ENDED_MAX);
    }
    key.epoch++;
    assert_false(pd_last_words_ended(&b->words, &key));
    teardown(b);
}

/* What was forgotten may land still: no word for all of its router's is said, and nobody is told
 * that nothing lands. Of receivers that have ended nothing is kept. */
static void what_was_forgotten_is_not_taken_for_ended(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key never = key_of(1), whole = {.router = ROUTER, .epoch = 1}, other = key_of(7);

    pd_last_words_never(&b->words, RECEIVER, &never);
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX - 1; i++) {
        pd_request_key key = key_of(100 + i);
        pd_last_words_owe(&b->words, 5000, &key, false);
    }
    assert_false(pd_last_words_owes(&b->words, &other, 0));
    pd_last_words_dead(&b->words, 5000);
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX - 1; i++) {
        pd_request_key key = key_of(1000 + i);
        pd_last_words_owe(&b->words, 6000, &key, false);
    }
    assert_false(pd_last_words_owes(&b->words, &other, 0)); /* there was room for all */
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        pd_request_key key = key_of(2000 + i);
        pd_last_words_owe(&b->words, 6000, &key, false);
    }
    assert_true(pd_last_words_owes(&b->words, &never, 0) &&
                pd_last_words_owes(&b->words, &other, 0));
    const pd_link *link = link_up(b, RECEIVER);
    pd_last_words_abort(&b->words, link, &whole);
    assert_int_equal(b->said, 0);
    pd_last_words_dead(&b->words, 6000);
    pd_last_words_dead(&b->words, RECEIVER);
    assert_false(pd_last_words_owes(&b->words, &never, 0));
    pd_last_words_abort(&b->words, link, &whole);
    assert_int_equal(b->said, 1);
    teardown(b);
}

static void owe_three(bench *b, uint64_t receiver)
{
    for (uint64_t i = 0; i < 3; i++) {
        pd_request_key key = key_of(10 * receiver + i);
        pd_last_words_owe(&b->words, receiver, &key, false);
    }
}

/* Who died on another host is not known to have ended: words to it are owed for ever. However many
 * they are, the living hear what is so, and none of the dead is ever denied what may land there. */
static void the_dead_elsewhere_make_nobody_mute(void **state)
{
    (void)state;
    enum { DEAD = 1200, FIRST = 1000000 };
    bench *b = setup();
    pd_request_key whole = {.router = ROUTER, .epoch = 1}, unknown = key_of(7);
    uint32_t muted = 0, wrong = 0;

    for (uint64_t i = 0; i < DEAD; i++)
        owe_three(b, FIRST + i);
    const pd_link *link = link_up(b, RECEIVER);
    pd_last_words_abort(&b->words, link, &whole); /* "of a lost router I write nothing" */
    assert_int_equal(b->said, 1);
    assert_false(pd_last_words_owes(&b->words, &unknown, RECEIVER));
    assert_true(pd_last_words_owes(&b->words, &unknown, 0)); /* it may be any of the dead */
    for (uint64_t i = 0; i < DEAD; i++) {
        for (uint64_t k = 0; k < 3; k++) { /* by its word, where that has a place still */
            pd_request_key key = key_of(10 * (FIRST + i) + k);
            assert_true(pd_last_words_owes(&b->words, &key, FIRST + i));
        }
        muted += pd_last_words_owes(&b->words, &unknown, FIRST + i);
    }
    assert_in_range(muted, DEAD - PD_LAST_WORDS_OWED_MAX / 3 - 1, DEAD);
    for (uint64_t i = 0; i < 20000; i++)
        wrong += pd_last_words_owes(&b->words, &unknown, 2 * FIRST + i);
    assert_in_range(wrong, 0, 20);           /* of the living, one in a thousand at most */
    const pd_link *back = link_up(b, FIRST); /* it had only stood still */
    pd_last_words_abort(&b->words, back, &whole);
    assert_int_equal(b->said, 1);
    teardown(b);
}

/* Whose link is there, or is being made, keeps its word; those on nothing go first. */
static void the_dead_take_no_place_of_the_living(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key mine = key_of(1), nothing = key_of(2), another = key_of(3), unknown = key_of(7);
    pd_link *link = link_up(b, RECEIVER);

    link->state = PD_LINK_CONNECTING;
    pd_last_words_owe(&b->words, RECEIVER, &mine, false); /* the oldest of all */
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX - 2; i++) {
        pd_request_key key = key_of(100 + i);
        pd_last_words_owe(&b->words, 5000, &key, false);
    }
    pd_last_words_owe(&b->words, 5001, &nothing, true);
    pd_last_words_owe(&b->words, 5002, &another, false);
    assert_false(pd_last_words_owes(&b->words, &unknown, 0)); /* that on nothing made room */
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX - 2; i++) {
        pd_request_key key = key_of(10000 + i);
        pd_last_words_owe(&b->words, 5003, &key, false);
    }
    assert_true(pd_last_words_owes(&b->words, &unknown, 5000));
    for (uint64_t receiver = 5002; receiver <= 5003; receiver++)
        assert_false(pd_last_words_owes(&b->words, &unknown, receiver));
    assert_false(pd_last_words_owes(&b->words, &unknown, RECEIVER));
    link->state = PD_LINK_UP;
    pd_last_words_pay(&b->words, link);
    assert_true(b->said == 1 && b->last.key.number == 1);
    teardown(b);
}

/* Of what an open link may write for ever no word is believed, however many others were owed since.
 * A router asks for the word again and again. */
static void what_may_land_for_ever_is_never_said_to_have_ended(void **state)
{
    (void)state;
    enum { MANY = 3 * PD_LAST_WORDS_OWED_MAX };
    for (uint64_t others = 1; others <= MANY; others += MANY - 1) {
        bench *b = setup();
        pd_request_key never = key_of(1), another = key_of(2);

        pd_last_words_never(&b->words, RECEIVER, &never);
        for (uint64_t i = 0; i < MANY; i++) { /* of one that died elsewhere, or of many */
            pd_request_key key = key_of(100 + i);
            pd_last_words_owe(&b->words, 5000 + i % others, &key, false);
        }
        const pd_link *link = link_up(b, RECEIVER);
        pd_last_words_pay(&b->words, link);
        pd_last_words_everywhere(&b->words, &never);
        pd_last_words_abort(&b->words, link, &never);
        assert_int_equal(b->said, 0);
        pd_last_words_abort(&b->words, link, &another);
        assert_int_equal(b->said, 1);
        teardown(b);
    }
}

/* So it is where even those have no place: then nothing at all is said to their receivers. */
static void more_that_may_land_for_ever_than_there_are_places_are_not_said_either(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key never = key_of(1);

    pd_last_words_never(&b->words, RECEIVER, &never);
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX; i++) {
        pd_request_key key = key_of(100 + i);
        pd_last_words_never(&b->words, 5000, &key);
    }
    link_up(b, RECEIVER);
    pd_last_words_everywhere(&b->words, &never);
    assert_int_equal(b->said, 0);
    const pd_link *other = link_up(b, OTHER);
    pd_last_words_abort(&b->words, other, &never);
    assert_int_equal(b->said, 1);
    teardown(b);
}

/* Whose word was forgotten loses another one before anybody else loses the first, also an older. */
static void who_was_forgotten_is_forgotten_before_others(void **state)
{
    (void)state;
    bench *b = setup();
    pd_request_key first = key_of(1), second = key_of(2), unknown = key_of(7);

    pd_last_words_owe(&b->words, 5000, &first, false);
    pd_last_words_owe(&b->words, 5001, &second, false);
    for (uint64_t i = 0; i < 2 * PD_LAST_WORDS_OWED_MAX; i++) {
        pd_request_key key = key_of(100 + i);
        pd_last_words_owe(&b->words, 5000, &key, false);
    }
    assert_true(pd_last_words_owes(&b->words, &unknown, 5000));
    assert_false(pd_last_words_owes(&b->words, &unknown, 5001));
    teardown(b);
}

/* Those in the list have ended, those in the filter may wait: who does not say who asks may be one
 * of them. */
static void who_asks_without_a_name_may_be_any_that_was_forgotten(void **state)
{
    (void)state;
    enum { DEAD = PD_LAST_WORDS_FORGOTTEN_MAX + 10, FIRST = 1000000 };
    bench *b = setup();
    pd_request_key unknown = key_of(7);

    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX + DEAD; i++) {
        pd_request_key key = key_of(100 + i);
        pd_last_words_owe(&b->words, FIRST + i, &key, false);
    }
    for (uint64_t i = 0; i < PD_LAST_WORDS_FORGOTTEN_MAX; i++)
        pd_last_words_dead(&b->words, FIRST + i);
    assert_false(pd_last_words_owes(&b->words, &unknown, FIRST));
    assert_true(pd_last_words_owes(&b->words, &unknown, FIRST + DEAD - 1));
    assert_true(pd_last_words_owes(&b->words, &unknown, 0));
    teardown(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_was_forgotten_is_forgotten_before_others),
        cmocka_unit_test(who_asks_without_a_name_may_be_any_that_was_forgotten),
        cmocka_unit_test(what_may_land_for_ever_is_never_said_to_have_ended),
        cmocka_unit_test(more_that_may_land_for_ever_than_there_are_places_are_not_said_either),
        cmocka_unit_test(the_dead_elsewhere_make_nobody_mute),
        cmocka_unit_test(the_dead_take_no_place_of_the_living),
        cmocka_unit_test(what_the_carrier_has_no_room_for_is_said_later),
        cmocka_unit_test(a_word_on_nothing_is_owed_and_nothing_may_land),
        cmocka_unit_test(a_word_that_was_said_is_said_again_when_somebody_asks),
        cmocka_unit_test(a_word_that_a_broken_link_took_along_is_owed),
        cmocka_unit_test(no_word_is_forgotten_while_there_is_a_place),
        cmocka_unit_test(what_an_open_link_may_write_for_ever_has_no_last_word),
        cmocka_unit_test(the_latest_ends_are_remembered),
        cmocka_unit_test(what_was_forgotten_is_not_taken_for_ended),
    };

    pd_log_init("test-last-words", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
