/* What is asked for again of a landing, what is not, and how long it is waited for. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/worker/land.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { BLOCK_TOKENS = 16, BLOCKS = 3, SENDER = 5, RECEIVER = 6 };

typedef struct bench {
    pd_role_options options;
    pd_role_sink sink;
    pd_lander lander;
    pd_landing landing;
    pd_block blocks[BLOCKS];
    uint32_t refetches;
    uint64_t ticket; /* of the latest check */
    uint64_t now_ns;
} bench;

static void on_send(void *ctx, uint64_t router, const pd_message *message)
{
    bench *b = ctx;

    (void)router;
    assert_int_equal(message->kind, PD_MSG_REFETCH);
    b->refetches++;
}

static void begin(bench *b, uint32_t groups)
{
    *b = (bench){.options = {.name = "decode-0", .incarnation = RECEIVER}};
    b->options.layout = (pd_kv_layout){.block_tokens = BLOCK_TOKENS,
                                       .groups = groups,
                                       .blocks = 8,
                                       .kv_heads = 1,
                                       .ranks = 1,
                                       .rank_heads = 1};
    b->sink = (pd_role_sink){.ctx = b, .send = on_send};
    pd_lander_init(&b->lander, &b->options, &b->sink);
    const pd_msg_peer sender = {.name = "prefill-0", .incarnation = SENDER};
    const pd_request_key key = {1, 2, 3};
    assert_int_equal(pd_landing_init(&b->landing, &b->lander, &key, "r", &sender, BLOCKS), PD_OK);
    pd_landing_begin(&b->landing, 0, BLOCKS, BLOCKS * BLOCK_TOKENS, b->blocks);
}

static pd_land_result arrive(bench *b, uint32_t group, uint32_t again)
{
    const uint64_t seals[BLOCKS] = {0};
    const pd_notice notice = {.kind = PD_NOTICE_BLOCKS,
                              .key = {1, 2, 3},
                              .sender = SENDER,
                              .receiver = RECEIVER,
                              .group = group,
                              .groups = 1,
                              .slices = 1,
                              .count = BLOCKS,
                              .valid_tokens = BLOCK_TOKENS,
                              .again = again,
                              .seals = b->options.seals ? seals : NULL};

    return pd_land_on_notice(&b->lander, &b->landing, &notice, b->now_ns);
}

static void end(bench *b)
{
    pd_landing_fini(&b->landing);
    pd_lander_fini(&b->lander);
}

static pd_status on_verify(void *ctx, const pd_check *check)
{
    bench *b = ctx;

    b->ticket = check->ticket;
    return PD_OK;
}

/* The same answer of a device that fails and of one that finds other bytes, but for the reason. */
static pd_land_result checked(bench *b, pd_status unchecked)
{
    const pd_checked answer = {
        .ticket = b->ticket, .unchecked = unchecked, .bad_block = BLOCKS - 1};
    pd_landing *landing;

    return pd_land_on_checked(&b->lander, &answer, &landing);
}

static void what_cannot_be_compared_here_is_not_asked_for_again(void **state)
{
    (void)state;
    bench b;

    begin(&b, 1);
    b.options.seals = true;
    b.sink.verify = on_verify;
    assert_int_equal(arrive(&b, 0, 0), PD_LAND_PART);
    assert_int_equal(checked(&b, PD_E_INTERNAL), PD_LAND_UNCHECKED);
    assert_int_equal(b.refetches, 0);
    end(&b);
    begin(&b, 1);
    b.options.seals = true;
    b.sink.verify = on_verify;
    assert_int_equal(arrive(&b, 0, 0), PD_LAND_PART);
    assert_int_equal(checked(&b, PD_OK), PD_LAND_PART);
    assert_int_equal(b.refetches, 1); /* where bytes are wrong they are */
    end(&b);
}

static void what_is_missing_is_asked_for_once(void **state)
{
    (void)state;
    bench b;

    begin(&b, PD_REFETCHES_MAX);
    assert_true(pd_land_ask_missing(&b.lander, &b.landing));
    assert_true(pd_land_ask_missing(&b.lander, &b.landing));
    assert_int_equal(b.refetches, PD_REFETCHES_MAX);
    for (uint32_t g = 0; g < PD_REFETCHES_MAX; g++) {
        assert_int_equal(arrive(&b, g, 0), PD_LAND_IGNORED); /* another writing is to come */
        assert_int_equal(arrive(&b, g, 1), g + 1 == PD_REFETCHES_MAX ? PD_LAND_DONE : PD_LAND_PART);
    }
    end(&b);
}

/* Of a model with many layer groups: what nobody would pass on is awaited, not asked for. */
static void more_than_can_be_asked_for_may_still_come(void **state)
{
    (void)state;
    enum { GROUPS = PD_REFETCHES_MAX + 1 };
    bench b;

    begin(&b, GROUPS);
    assert_false(pd_land_ask_missing(&b.lander, &b.landing));
    assert_int_equal(b.refetches, 0);
    for (uint32_t g = 0; g < GROUPS; g++)
        assert_int_equal(arrive(&b, g, 0), g + 1 == GROUPS ? PD_LAND_DONE : PD_LAND_PART);
    end(&b);
}

static bool written(bench *b, uint32_t again)
{
    const pd_notice notice = {.kind = PD_NOTICE_WRITTEN,
                              .key = {1, 2, 3},
                              .sender = SENDER,
                              .receiver = RECEIVER,
                              .again = again};

    return pd_land_on_written(&b->lander, &b->landing, &notice, b->now_ns);
}

static pd_land_result after(bench *b, uint64_t ms)
{
    b->now_ns += ms * PD_NS_PER_MS;
    return pd_land_tick(&b->lander, &b->landing, b->now_ns);
}

/* The word goes behind the blocks: nobody waits for a deadline to ask for what is lost. */
static void what_was_written_and_did_not_come_is_asked_for_at_once(void **state)
{
    (void)state;
    bench b;

    begin(&b, 3);
    assert_int_equal(arrive(&b, 0, 0), PD_LAND_PART);
    assert_true(written(&b, 0));
    assert_int_equal(after(&b, 1), PD_LAND_PART);
    assert_int_equal(arrive(&b, 2, 0), PD_LAND_PART); /* notices may overtake each other a little */
    assert_int_equal(after(&b, 100), PD_LAND_PART);
    assert_int_equal(b.refetches, 1);
    assert_true(written(&b, 0)); /* said before it heard of that */
    assert_int_equal(after(&b, 100), PD_LAND_PART);
    assert_int_equal(b.refetches, 1);
    assert_int_equal(arrive(&b, 1, 1), PD_LAND_DONE);
    end(&b);
}

static void what_is_lost_twice_is_broken(void **state)
{
    (void)state;
    bench b;

    begin(&b, 3);
    assert_int_equal(arrive(&b, 0, 0), PD_LAND_PART);
    written(&b, 0);
    assert_int_equal(after(&b, 100), PD_LAND_PART);
    assert_int_equal(b.refetches, 2);
    assert_int_equal(arrive(&b, 1, 1), PD_LAND_PART);
    written(&b, 1); /* one of the two */
    assert_int_equal(after(&b, 100), PD_LAND_PART);
    written(&b, 2);
    assert_int_equal(after(&b, 100), PD_LAND_BROKEN);
    end(&b);
}

static void more_lost_than_can_be_asked_for_is_broken(void **state)
{
    (void)state;
    bench b;

    begin(&b, PD_REFETCHES_MAX + 1);
    written(&b, 0);
    assert_int_equal(after(&b, 100), PD_LAND_BROKEN);
    assert_int_equal(b.refetches, 0);
    end(&b);
}

static void another_ones_word_is_nothing_here(void **state)
{
    (void)state;
    bench b;

    begin(&b, 3);
    b.landing.sender = SENDER + 1;
    assert_false(written(&b, 0));
    b.landing.sender = SENDER;
    b.options.incarnation = RECEIVER + 1;
    assert_false(written(&b, 0));
    assert_int_equal(after(&b, 1000), PD_LAND_PART);
    assert_int_equal(b.refetches, 0);
    end(&b);
}

/* A crowd on a slow link: its turn comes. */
static void it_waits_while_its_sender_writes_to_others(void **state)
{
    (void)state;
    bench b;

    begin(&b, 3);
    pd_land_await(&b.landing, PD_NS_PER_S, b.now_ns);
    for (uint32_t i = 0; i < 79; i++) {
        assert_int_equal(after(&b, 400), PD_LAND_PART);
        pd_land_heard(&b.lander, SENDER, b.now_ns);
    }
    assert_int_equal(b.refetches, 0);
    assert_int_equal(arrive(&b, 0, 0), PD_LAND_PART); /* as long again from here */
    for (uint32_t i = 0; i < 79; i++) {
        assert_int_equal(after(&b, 400), PD_LAND_PART);
        pd_land_heard(&b.lander, SENDER, b.now_ns);
    }
    assert_int_equal(after(&b, 400), PD_LAND_LATE); /* 32 s: it has been forgotten there */
    end(&b);
}

static void a_silent_sender_is_late(void **state)
{
    (void)state;
    bench b;

    begin(&b, 3);
    pd_land_await(&b.landing, PD_NS_PER_S, b.now_ns);
    pd_land_heard(&b.lander, SENDER + 1, b.now_ns + 400 * PD_NS_PER_MS);
    assert_int_equal(after(&b, 499), PD_LAND_PART);
    assert_int_equal(b.refetches, 0);
    assert_int_equal(after(&b, 1), PD_LAND_PART);
    assert_int_equal(b.refetches, 3); /* the word may be what was lost */
    assert_int_equal(after(&b, 499), PD_LAND_PART);
    assert_int_equal(after(&b, 1), PD_LAND_LATE);
    assert_int_equal(b.refetches, 3);
    end(&b);
}

/* Those that wrote last are remembered, not those that came first; and a landing knows of its own
 * blocks whoever else writes. */
static void among_many_senders_none_that_writes_is_silent(void **state)
{
    (void)state;
    bench b;

    begin(&b, 3);
    pd_land_await(&b.landing, PD_NS_PER_S, b.now_ns);
    for (uint64_t turn = 0; turn < 8; turn++) {
        pd_land_heard(&b.lander, SENDER, b.now_ns);
        for (uint64_t i = 0; i < PD_LAND_SENDERS_MAX - 1; i++)
            pd_land_heard(&b.lander, 1000 * (turn + 1) + i, b.now_ns + i + 1);
        assert_int_equal(after(&b, 400), PD_LAND_PART);
        pd_land_heard(&b.lander, SENDER, b.now_ns);
    }
    assert_int_equal(arrive(&b, 0, 0), PD_LAND_PART);
    for (uint64_t i = 0; i < 2 * PD_LAND_SENDERS_MAX; i++)
        pd_land_heard(&b.lander, 100000 + i, b.now_ns + i + 1);
    assert_int_equal(after(&b, 600), PD_LAND_PART); /* its own block was there 600 ms ago */
    assert_int_equal(after(&b, 600), PD_LAND_LATE);
    end(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_missing_is_asked_for_once),
        cmocka_unit_test(what_cannot_be_compared_here_is_not_asked_for_again),
        cmocka_unit_test(more_than_can_be_asked_for_may_still_come),
        cmocka_unit_test(what_was_written_and_did_not_come_is_asked_for_at_once),
        cmocka_unit_test(what_is_lost_twice_is_broken),
        cmocka_unit_test(more_lost_than_can_be_asked_for_is_broken),
        cmocka_unit_test(another_ones_word_is_nothing_here),
        cmocka_unit_test(it_waits_while_its_sender_writes_to_others),
        cmocka_unit_test(a_silent_sender_is_late),
        cmocka_unit_test(among_many_senders_none_that_writes_is_silent),
    };

    pd_log_init("test-land", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
