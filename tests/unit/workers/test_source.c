/* A worker ships KV that it holds already: moves and pulls, with their last words. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/source.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { BLOCK_TOKENS = 16, GROUPS = 3, BLOCKS = 32, POSTED_MAX = 64 };

#define ROUTER UINT64_C(9)

typedef struct bench {
    uint64_t now_ns;
    pd_role_options options;
    pd_role_sink sink;
    pd_blocks blocks;
    pd_links links;
    pd_last_words words;
    pd_cost cost;
    pd_role_counters counters;
    pd_source source;
    pd_status ship_status, connect_status;
    pd_shipment posted[POSTED_MAX];
    uint32_t written, written_again; /* words that all is */
    uint32_t posted_count, aborts, closes, unships, connects;
    pd_request_key aborted; /* the last one */
    pd_msg_ship_done done[16];
    uint32_t done_count;
    pd_block own[8]; /* a sequence's */
    pd_hash128 hashes[8];
} bench;

static void on_send(void *ctx, uint64_t router, const pd_message *message)
{
    bench *b = ctx;

    assert_true(router == ROUTER);
    assert_int_equal(message->kind, PD_MSG_SHIP_DONE);
    assert_true(b->done_count < 16);
    b->done[b->done_count++] = message->ship_done;
}

static pd_status on_connect(void *ctx, const void *address, size_t bytes, uint64_t tag,
                            pd_peer *peer_out)
{
    bench *b = ctx;

    (void)address;
    (void)bytes;
    (void)tag;
    b->connects++;
    *peer_out = b->connects;
    return b->connect_status;
}

static void on_close(void *ctx, pd_peer peer)
{
    (void)peer;
    ((bench *)ctx)->closes++;
}

static pd_status on_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    bench *b = ctx;

    (void)peer;
    if (notice->kind == PD_NOTICE_WRITTEN) {
        b->written++;
        b->written_again = notice->again;
        return PD_OK;
    }
    assert_int_equal(notice->kind, PD_NOTICE_ABORT);
    b->aborts++;
    b->aborted = notice->key;
    return PD_OK;
}

static pd_status on_ship(void *ctx, const pd_shipment *shipment)
{
    bench *b = ctx;

    if (b->ship_status == PD_OK) {
        assert_true(b->posted_count < POSTED_MAX);
        b->posted[b->posted_count++] = *shipment;
    }
    return b->ship_status;
}

static void on_unship(void *ctx, uint64_t ticket)
{
    assert_true((ticket & PD_SOURCE_TICKET) != 0);
    ((bench *)ctx)->unships++;
}

static bench *setup(void)
{
    bench *b = pd_calloc(1, sizeof *b);

    assert_non_null(b);
    b->now_ns = PD_NS_PER_S;
    b->options = (pd_role_options){.incarnation = 77, .lost_after_ns = PD_NS_PER_S};
    b->options.layout =
        (pd_kv_layout){.block_tokens = BLOCK_TOKENS, .groups = GROUPS, .blocks = BLOCKS};
    b->sink = (pd_role_sink){.ctx = b,
                             .send = on_send,
                             .connect = on_connect,
                             .close = on_close,
                             .notify = on_notify,
                             .ship = on_ship,
                             .unship = on_unship};
    pd_cost_init(&b->cost);
    assert_int_equal(pd_blocks_init(&b->blocks, BLOCKS, true), PD_OK);
    assert_int_equal(pd_links_init(&b->links, 2, &b->sink), PD_OK);
    pd_last_words_init(&b->words, &b->options, &b->sink, &b->links);
    pd_source_init(&b->source, &(pd_source_options){.role = &b->options,
                                                    .sink = &b->sink,
                                                    .blocks = &b->blocks,
                                                    .links = &b->links,
                                                    .words = &b->words,
                                                    .cost = &b->cost,
                                                    .counters = &b->counters,
                                                    .ships_max = 3});
    for (uint32_t i = 0; i < 8; i++)
        b->hashes[i] = (pd_hash128){i + 1, 5};
    assert_int_equal(
        pd_prefix_cache_alloc(b->blocks.cache, 8, PD_CLAIM_RUNNING, PD_BLOCK_NONE, b->own), PD_OK);
    return b;
}

/* All that was claimed has come back. */
static void teardown(bench *b)
{
    assert_true(pd_source_idle(&b->source));
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 0);
    assert_int_equal(pd_prefix_cache_check(b->blocks.cache), PD_OK);
    pd_source_fini(&b->source);
    pd_links_fini(&b->links);
    pd_blocks_fini(&b->blocks);
    pd_free(b);
}

/* The router lives, and is lost a second after it was heard last. */
static void know_router(const bench *b, pd_routers *routers)
{
    const pd_message beat = {.kind = PD_MSG_ROUTER_HEARTBEAT};

    pd_routers_init(routers, PD_NS_PER_S);
    assert_true(pd_routers_on_message(routers, ROUTER, &beat, b->now_ns));
}

static void drop_own(bench *b)
{
    pd_prefix_cache_drop(b->blocks.cache, b->own, 8, PD_CLAIM_RUNNING);
}

/* Its full blocks become cache. */
static void keep_own(bench *b, uint32_t full)
{
    pd_blocks_remember(&b->blocks, b->hashes, b->own, full, UINT32_MAX);
    drop_own(b);
}

static const pd_block targets[8] = {20, 21, 22, 23, 24, 25, 26, 27};

static pd_msg_ship_request asks(uint64_t number, uint64_t receiver)
{
    pd_msg_ship_request asked = {.key = {.router = ROUTER, .number = number, .epoch = 2},
                                 .source_epoch = 1,
                                 .receiver = {.name = "decode-1", .incarnation = receiver},
                                 .first_block = 2,
                                 .blocks = targets,
                                 .blocks_count = 6,
                                 .kv_tokens = 7 * BLOCK_TOKENS + 5,
                                 .deadline_ms = 10000};

    asked.receiver.transfer_address = "address";
    asked.receiver.transfer_address_len = 7;
    return asked;
}

static void ask_move(bench *b, const pd_msg_ship_request *asked)
{
    pd_source_sequence sequence = {.blocks = b->own, .kv_tokens = 7 * BLOCK_TOKENS + 5};

    pd_source_request(&b->source, asked, &sequence, b->now_ns);
}

static void link_event(bench *b, uint64_t tag, pd_transfer_event_kind kind, pd_status status)
{
    pd_transfer_event event = {.kind = kind, .tag = tag, .status = status};

    pd_source_on_link(&b->source, &event, b->now_ns);
}

static void sent(bench *b, uint64_t ticket, pd_status status)
{
    pd_transfer_event event = {.kind = PD_TRANSFER_SENT,
                               .ticket = ticket,
                               .status = status,
                               .bytes = 1000,
                               .wire_ns = 1000000};

    assert_true(pd_source_on_sent(&b->source, &event, b->now_ns));
}

static void pass(bench *b, uint64_t ms)
{
    b->now_ns += ms * PD_NS_PER_MS;
    pd_source_tick(&b->source, b->now_ns);
}

static void a_suspended_sequence_is_shipped_and_held_until_its_release(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    uint32_t epoch = 0;

    ask_move(b, &asked);
    assert_int_equal(b->posted_count, 0); /* no link yet */
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    assert_int_equal(b->posted_count, 1);
    const pd_shipment *s = &b->posted[0];
    assert_true(s->groups == GROUPS && s->group_first == 0 && s->first == 2 && s->count == 6);
    assert_int_equal(s->valid_tokens, 5);
    assert_true(s->key.epoch == 2 && s->receiver == 88);
    drop_own(b); /* the sequence ends: what is shipped stays */
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 6);
    assert_int_equal(b->done_count, 0);
    sent(b, s->ticket, PD_OK);
    assert_int_equal(b->done_count, 1);
    assert_true(b->done[0].status == PD_OK && b->done[0].again == 0);
    assert_true(b->done[0].may_land); /* sent is not landed */
    assert_true(b->done[0].ship_bytes == 1000 && b->done[0].ship_ms > 0.9f);
    assert_true(pd_source_moves(&b->source, &(pd_request_key){ROUTER, 4, 1}));
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 6);
    assert_true(pd_source_release(&b->source, &asked.key, &epoch));
    assert_int_equal(epoch, 1);
    assert_int_equal(b->done_count, 1);
    assert_int_equal(b->aborts, 0);
    teardown(b);
}

static void cached_blocks_are_shipped_by_their_hashes(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    uint32_t epoch = 7;

    keep_own(b, 5);
    asked.source_epoch = 0;
    asked.hashes = b->hashes;
    asked.hashes_count = 5;
    asked.blocks_count = 3;
    asked.kv_tokens = 5 * BLOCK_TOKENS;
    pd_source_request(&b->source, &asked, NULL, b->now_ns);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    assert_int_equal(b->posted[0].valid_tokens, BLOCK_TOKENS);
    assert_memory_equal(b->posted[0].sources, b->own + 2, 3 * sizeof(pd_block));
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 3);
    sent(b, b->posted[0].ticket, PD_OK);
    assert_true(pd_source_release(&b->source, &asked.key, &epoch));
    assert_int_equal(epoch, 0);
    assert_int_equal(pd_blocks_ledger(&b->blocks).cached, 5);

    asked.key.number++;
    asked.hashes_count = 6; /* one that is not there */
    asked.blocks_count = 4;
    pd_source_request(&b->source, &asked, NULL, b->now_ns);
    assert_int_equal(b->done_count, 2);
    assert_int_equal(b->done[1].status, PD_E_NOT_FOUND);
    assert_false(b->done[1].may_land);
    assert_int_equal(b->posted_count, 1); /* nothing was written */
    teardown(b);
}

static void what_cannot_be_meant_is_refused(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked;

    asked = asks(1, 88), asked.blocks_count = 0, ask_move(b, &asked);
    asked = asks(2, 77), ask_move(b, &asked); /* to itself */
    asked = asks(3, 88), asked.receiver.transfer_address_len = 0, ask_move(b, &asked);
    asked = asks(4, 88), asked.kv_tokens++, ask_move(b, &asked);
    asked = asks(5, 88), asked.kv_tokens = 7 * BLOCK_TOKENS, ask_move(b, &asked);
    asked = asks(6, 88), asked.first_block = UINT32_MAX, ask_move(b, &asked);
    asked = asks(7, 88), asked.source_epoch = 0;
    pd_source_request(&b->source, &asked, NULL, b->now_ns); /* no hashes */
    assert_int_equal(b->done_count, 7);
    for (uint32_t i = 0; i < 7; i++)
        assert_true(b->done[i].status == PD_E_INVALID && b->done[i].key.number == i + 1);
    assert_int_equal(b->connects, 0);
    drop_own(b);
    teardown(b);
}

static void blocks_asked_for_again_go_again_and_are_answered_again(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    pd_msg_ship_again again = {.key = asked.key, .group = 1, .first_block = 6, .count = 2};
    uint32_t epoch;

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    uint64_t ticket = b->posted[0].ticket;
    assert_int_equal(b->written, 0);
    sent(b, ticket, PD_OK);
    assert_true(b->written == 1 && b->written_again == 0);
    assert_true(pd_source_again(&b->source, &again, b->now_ns));
    assert_int_equal(b->posted_count, 2);
    const pd_shipment *s = &b->posted[1];
    assert_true(s->group_first == 1 && s->groups == 1 && s->first == 6 && s->count == 2);
    assert_int_equal(s->valid_tokens, 5);
    assert_int_equal(s->again, 1);
    assert_int_equal(b->done_count, 1);
    sent(b, ticket, PD_OK);
    assert_int_equal(b->done_count, 2);
    assert_true(b->done[1].status == PD_OK && b->done[1].again == 1);
    assert_true(b->written == 2 && b->written_again == 1); /* the receiver hears it, too */
    /* the same word once more is answered, and nothing is written */
    assert_true(pd_source_again(&b->source, &again, b->now_ns));
    assert_int_equal(b->posted_count, 2);
    assert_true(b->done_count == 3 && b->done[2].again == 1);
    again.first_block = 1; /* was never shipped */
    assert_true(pd_source_again(&b->source, &again, b->now_ns));
    assert_int_equal(b->done[3].status, PD_E_INVALID);
    assert_false(pd_source_again(&b->source, &again, b->now_ns));
    pd_source_unknown(&b->source, &again);
    assert_true(b->done[4].status == PD_E_NOT_FOUND && b->done[4].again == 1);
    assert_false(pd_source_release(&b->source, &asked.key, &epoch));
    drop_own(b);
    teardown(b);
}

static void the_first_writing_never_says_that_it_is_the_second(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    pd_msg_ship_again again = {.key = asked.key, .group = 1, .first_block = 6, .count = 2};
    uint32_t epoch;

    ask_move(b, &asked);
    assert_true(pd_source_again(&b->source, &again, b->now_ns)); /* there is no link yet */
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    assert_int_equal(b->posted_count, 2);
    assert_int_equal(b->posted[0].again, 0);
    assert_int_equal(b->posted[0].count, 6);
    assert_int_equal(b->posted[1].again, 1);
    assert_int_equal(b->posted[1].count, 2);
    sent(b, b->posted[0].ticket, PD_OK);
    sent(b, b->posted[0].ticket, PD_OK);
    assert_true(b->done_count == 1 && b->done[0].again == 1);
    assert_true(pd_source_release(&b->source, &asked.key, &epoch));
    drop_own(b);
    teardown(b);
}

/* A request that was late, or came twice, after nobody waits for its blocks. */
static void what_has_ended_is_not_begun_again(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    uint32_t epoch;

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    sent(b, b->posted[0].ticket, PD_OK);
    assert_true(pd_source_release(&b->source, &asked.key, &epoch));
    ask_move(b, &asked);
    assert_int_equal(b->posted_count, 1);
    assert_true(b->done_count == 2 && b->done[1].status == PD_E_CANCELLED);
    asked = asks(5, 88), asked.kv_tokens++, ask_move(b, &asked); /* refused */
    asked.kv_tokens--, ask_move(b, &asked);                      /* "nothing is written", it said */
    assert_int_equal(b->posted_count, 1);
    assert_true(b->done_count == 4 && b->done[3].status == PD_E_CANCELLED);
    drop_own(b);
    teardown(b);
}

/* A request that comes twice after its link broke: what that one has may land all the same. */
static void a_refusal_does_not_hide_that_a_word_is_owed(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    link_event(b, 1, PD_TRANSFER_PEER_DOWN, PD_E_PEER);
    sent(b, b->posted[0].ticket, PD_E_CANCELLED);
    link_event(b, 1, PD_TRANSFER_CLOSED, PD_OK);
    assert_true(b->done_count == 1 && b->done[0].may_land);
    ask_move(b, &asked);
    assert_true(b->done_count == 2 && b->done[1].may_land);
    drop_own(b);
    teardown(b);
}

static void a_cancel_waits_for_what_is_on_its_way(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    drop_own(b);
    assert_true(pd_source_cancel(&b->source, &asked.key, b->now_ns));
    assert_int_equal(b->unships, 1);
    assert_int_equal(b->done_count, 0);
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 6);
    sent(b, b->posted[0].ticket, PD_E_CANCELLED);
    assert_int_equal(b->done_count, 1);
    assert_true(b->done[0].status == PD_E_CANCELLED);
    assert_true(b->done[0].may_land); /* the abort goes behind it; this word need not */
    assert_int_equal(b->done[0].shipped_bytes, 1000); /* of it had left */
    assert_int_equal(b->aborts, 1);
    teardown(b);
}

static void a_link_that_fails_leaves_its_last_word_to_the_next(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    drop_own(b);
    link_event(b, 1, PD_TRANSFER_PEER_DOWN, PD_E_PEER);
    assert_int_equal(b->closes, 1);
    assert_int_equal(b->done_count, 0); /* until it is closed a put may still land */
    link_event(b, 1, PD_TRANSFER_CLOSED, PD_OK);
    assert_true(b->done_count == 1 && b->done[0].status == PD_E_PEER && b->done[0].may_land);
    assert_int_equal(b->aborts, 0);
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 0);

    assert_int_equal(
        pd_prefix_cache_alloc(b->blocks.cache, 8, PD_CLAIM_RUNNING, PD_BLOCK_NONE, b->own), PD_OK);
    asked = asks(5, 88);
    ask_move(b, &asked);
    link_event(b, 2, PD_TRANSFER_CONNECTED, PD_OK);
    assert_int_equal(b->aborts, 1); /* of number 4 */
    sent(b, b->posted[1].ticket, PD_OK);
    drop_own(b);
    pd_source_end_all(&b->source, ROUTER, "its router is lost", b->now_ns);
    teardown(b);
}

static void a_failed_write_ends_with_its_link(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    drop_own(b);
    sent(b, b->posted[0].ticket, PD_E_PEER);
    assert_int_equal(b->closes, 1);
    assert_int_equal(b->done_count, 0);
    link_event(b, 1, PD_TRANSFER_CLOSED, PD_OK);
    assert_true(b->done_count == 1 && b->done[0].may_land);
    teardown(b);
}

static void deadlines_and_stuck_links_end_a_shipment(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked); /* the link never comes up */
    drop_own(b);
    pass(b, 9999);
    assert_int_equal(b->done_count, 0);
    pass(b, 1);
    assert_true(b->done_count == 1 && b->done[0].status == PD_E_TIMEOUT && !b->done[0].may_land);

    assert_int_equal(
        pd_prefix_cache_alloc(b->blocks.cache, 8, PD_CLAIM_RUNNING, PD_BLOCK_NONE, b->own), PD_OK);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    asked = asks(5, 88);
    ask_move(b, &asked);
    drop_own(b);
    pass(b, 10000); /* nothing comes back of what was posted */
    pass(b, 999);
    assert_int_equal(b->closes, 0);
    pass(b, 1);
    assert_int_equal(b->closes, 1);
    link_event(b, 1, PD_TRANSFER_CLOSED, PD_OK);
    assert_true(b->done_count == 2 && b->done[1].status == PD_E_TIMEOUT && b->done[1].may_land);
    teardown(b);
}

static void what_the_carrier_has_no_room_for_is_tried_again(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    b->ship_status = PD_E_OVERLOAD;
    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    pass(b, 10);
    assert_int_equal(b->posted_count, 0);
    b->ship_status = PD_OK;
    pass(b, 10);
    assert_int_equal(b->posted_count, 1);
    sent(b, b->posted[0].ticket, PD_OK);
    pd_source_end_all(&b->source, 0, "the worker is leaving", b->now_ns);
    drop_own(b);
    teardown(b);
}

static void links_are_kept_while_used_and_closed_when_idle(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked;
    uint32_t epoch;

    for (uint64_t receiver = 101; receiver <= 104; receiver++) { /* as many as have places */
        asked = asks(receiver, receiver);
        asked.receiver.name[7] = (char)('0' + receiver - 100);
        ask_move(b, &asked);
        link_event(b, receiver - 100, PD_TRANSFER_CONNECTED, PD_OK);
        sent(b, b->posted[receiver - 101].ticket, PD_OK);
        if (receiver > 101)
            assert_true(pd_source_release(&b->source, &asked.key, &epoch));
        b->now_ns += PD_NS_PER_MS;
    }
    asked = asks(105, 102); /* by the link that is there */
    ask_move(b, &asked);
    assert_int_equal(b->connects, 4);
    assert_true(pd_source_cancel(&b->source, &asked.key, b->now_ns));
    sent(b, b->posted[4].ticket, PD_E_CANCELLED);
    asked = asks(106, 109); /* the one idle for the longest goes for it: not 101, still in use */
    asked.receiver.name[7] = '9';
    ask_move(b, &asked);
    assert_int_equal(b->done[b->done_count - 1].status, PD_E_PEER);
    assert_int_equal(b->closes, 1);
    assert_null(pd_links_by_incarnation(&b->links, 103));
    link_event(b, 3, PD_TRANSFER_CLOSED, PD_OK);
    asked.key.number = 107;
    ask_move(b, &asked);
    assert_int_equal(b->connects, 5);
    link_event(b, 5, PD_TRANSFER_CONNECTED, PD_OK);
    sent(b, b->posted[5].ticket, PD_OK);
    assert_true(pd_source_release(&b->source, &asked.key, &epoch));
    asked = asks(101, 101);
    assert_true(pd_source_release(&b->source, &asked.key, &epoch));
    pass(b, 61000);
    assert_int_equal(b->closes, 5);
    drop_own(b);
    teardown(b);
}

static void an_audit_names_every_shipment(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    pd_audit audit;

    ask_move(b, &asked);
    assert_int_equal(pd_audit_init(&audit, 4, 4), PD_OK);
    pd_audit_begin(&audit, ROUTER);
    pd_source_audit(&b->source, &audit);
    assert_true(audit.entries_count == 1 && audit.entries[0].blocks == 6);
    assert_int_equal(audit.entries[0].state, PD_AUDIT_HOLDING);
    pd_audit_begin(&audit, ROUTER + 1);
    pd_source_audit(&b->source, &audit);
    assert_int_equal(audit.entries_count, 0);
    pd_audit_fini(&audit);
    pd_source_end_all(&b->source, 0, "", b->now_ns);
    drop_own(b);
    teardown(b);
}

static bool yes(const void *ctx, uint64_t router)
{
    (void)ctx;
    return router == ROUTER;
}

/* It ends every lease of that router at its receivers: while something may still be written for one
 * of them it would free blocks under a put. */
static void the_last_word_on_a_lost_router_comes_behind_all_that_is_written_for_it(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);
    pd_routers routers;

    know_router(b, &routers);
    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    pd_source_tell_lost(&b->source, &routers, NULL, NULL, b->now_ns);
    assert_int_equal(b->aborts, 0); /* it lives */
    b->now_ns += 2 * PD_NS_PER_S;
    assert_true(pd_routers_next_lost(&routers, b->now_ns) == ROUTER);
    pd_source_tell_lost(&b->source, &routers, NULL, NULL, b->now_ns);
    assert_int_equal(b->aborts, 0); /* a shipment runs */
    pd_source_end_all(&b->source, ROUTER, "its router is lost", b->now_ns);
    pd_source_tell_lost(&b->source, &routers, NULL, NULL, b->now_ns);
    assert_int_equal(b->aborts, 0); /* and is not over yet */
    sent(b, b->posted[0].ticket, PD_E_CANCELLED);
    assert_true(b->aborts == 1 && b->aborted.number == 4);
    pd_source_tell_lost(&b->source, &routers, yes, NULL, b->now_ns);
    assert_int_equal(b->aborts, 1); /* the role itself has something under way */
    pd_source_tell_lost(&b->source, &routers, NULL, NULL, b->now_ns);
    assert_true(b->aborts == 2 && b->aborted.number == 0 && b->aborted.router == ROUTER);
    assert_int_equal(b->aborted.epoch, 1); /* of the session before this one */
    drop_own(b);
    teardown(b);
}

/* ---- what may land still ---- */

/* Cancelled first, and then its link is closed: until that is done it may be written. */
static void what_a_closing_link_carries_holds_its_blocks(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    drop_own(b);
    assert_true(pd_source_cancel(&b->source, &asked.key, b->now_ns));
    pass(b, 999);
    pass(b, 1);
    assert_int_equal(b->closes, 1);               /* it was stuck */
    sent(b, b->posted[0].ticket, PD_E_CANCELLED); /* the engine fails all before it closes */
    assert_int_equal(b->done_count, 0);
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 6);
    link_event(b, 1, PD_TRANSFER_CLOSED, PD_E_TIMEOUT); /* abandoned: it may land for ever */
    assert_true(b->done_count == 1 && b->done[0].may_land);
    assert_int_equal(b->aborts, 0);
    assert_int_equal(pd_blocks_ledger(&b->blocks).running, 0);
    teardown(b);
}

/* Who died on another host is not known to have ended, and words to it are owed for ever: others
 * are answered all the same. */
static void words_owed_to_the_dead_elsewhere_make_nobody_mute(void **state)
{
    (void)state;
    bench *b = setup();
    pd_routers routers;
    pd_msg_ship_request asked = asks(4, 88);

    know_router(b, &routers);
    for (uint64_t i = 0; i < PD_LAST_WORDS_OWED_MAX + 1; i++)
        pd_last_words_owe(&b->words, 1000 + i % 9, &(pd_request_key){ROUTER, 100 + i, 1}, false);
    asked.source_epoch = 0;
    asked.hashes = b->hashes;
    asked.hashes_count = 8;
    pd_source_request(&b->source, &asked, NULL, b->now_ns); /* not in the cache any more */
    assert_true(b->done_count == 1 && !b->done[0].may_land);
    pd_source_asked(&b->source, &asked.key, 88, &routers, b->now_ns);
    assert_true(b->done_count == 2 && !b->done[1].may_land);
    assert_true(b->done[1].receiver == 88); /* of that one alone it is said */
    /* and by way of a router, that names who asks; else it may be one of the dead */
    pd_source_unknown(&b->source, &(pd_msg_ship_again){.key = asked.key, .receiver = 88});
    assert_true(b->done_count == 3 && !b->done[2].may_land && b->done[2].receiver == 88);
    pd_source_unknown(&b->source, &(pd_msg_ship_again){.key = asked.key, .receiver = 1000});
    assert_true(b->done_count == 4 && b->done[3].may_land);
    pd_source_unknown(&b->source, &(pd_msg_ship_again){.key = asked.key});
    assert_true(b->done_count == 5 && b->done[4].may_land && b->done[4].receiver == 0);
    drop_own(b);
    teardown(b);
}

static void a_request_that_comes_twice_does_not_deny_what_is_on_its_way(void **state)
{
    (void)state;
    bench *b = setup();
    pd_msg_ship_request asked = asks(4, 88);

    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    assert_true(pd_source_cancel(&b->source, &asked.key, b->now_ns));
    sent(b, b->posted[0].ticket, PD_OK); /* the kernel has it: seconds on a slow link */
    assert_true(b->done_count == 1 && b->done[0].may_land && b->aborts == 1);
    ask_move(b, &asked);
    assert_true(b->done_count == 2 && b->done[1].may_land);
    drop_own(b);
    teardown(b);
}

/* No link came up: nothing was written, and who asks is told so at once. There need never be a link
 * whose word it could wait for. */
static void what_never_left_keeps_nobody_waiting(void **state)
{
    (void)state;
    bench *b = setup();
    pd_routers routers;
    pd_msg_ship_request asked = asks(4, 88);

    know_router(b, &routers);
    ask_move(b, &asked);
    drop_own(b);
    assert_true(pd_source_cancel(&b->source, &asked.key, b->now_ns));
    assert_true(b->done_count == 1 && !b->done[0].may_land);
    pd_source_asked(&b->source, &asked.key, 88, &routers, b->now_ns);
    assert_true(b->done_count == 2 && b->done[1].status == PD_E_NOT_FOUND && !b->done[1].may_land);
    pd_source_unknown(&b->source, &(pd_msg_ship_again){.key = asked.key});
    assert_true(b->done_count == 3 && !b->done[2].may_land);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK); /* all the same it is said */
    assert_true(b->aborts == 1 && b->aborted.number == 4);
    teardown(b);
}

static void words_on_nothing_take_no_place_of_words_on_what_was_sent(void **state)
{
    (void)state;
    bench *b = setup();
    pd_routers routers;
    pd_msg_ship_request asked = asks(4, 88);

    know_router(b, &routers);
    ask_move(b, &asked);
    link_event(b, 1, PD_TRANSFER_CONNECTED, PD_OK);
    drop_own(b);
    assert_true(pd_source_cancel(&b->source, &asked.key, b->now_ns));
    sent(b, b->posted[0].ticket, PD_OK); /* the kernel has it: seconds on a slow link */
    assert_true(b->done_count == 1 && b->aborts == 1);
    for (uint64_t i = 0; i < PD_LAST_WORDS_SAID_MAX; i++) /* cancels of what never came */
        pd_last_words_everywhere(&b->words, &(pd_request_key){ROUTER, 100 + i, 1});
    pd_source_asked(&b->source, &asked.key, 88, &routers, b->now_ns);
    assert_int_equal(b->done_count, 1); /* its abort is on its way, said once more */
    teardown(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_closing_link_carries_holds_its_blocks),
        cmocka_unit_test(words_owed_to_the_dead_elsewhere_make_nobody_mute),
        cmocka_unit_test(a_request_that_comes_twice_does_not_deny_what_is_on_its_way),
        cmocka_unit_test(what_never_left_keeps_nobody_waiting),
        cmocka_unit_test(words_on_nothing_take_no_place_of_words_on_what_was_sent),
        cmocka_unit_test(a_suspended_sequence_is_shipped_and_held_until_its_release),
        cmocka_unit_test(cached_blocks_are_shipped_by_their_hashes),
        cmocka_unit_test(what_cannot_be_meant_is_refused),
        cmocka_unit_test(blocks_asked_for_again_go_again_and_are_answered_again),
        cmocka_unit_test(the_first_writing_never_says_that_it_is_the_second),
        cmocka_unit_test(what_has_ended_is_not_begun_again),
        cmocka_unit_test(a_refusal_does_not_hide_that_a_word_is_owed),
        cmocka_unit_test(a_cancel_waits_for_what_is_on_its_way),
        cmocka_unit_test(a_link_that_fails_leaves_its_last_word_to_the_next),
        cmocka_unit_test(a_failed_write_ends_with_its_link),
        cmocka_unit_test(deadlines_and_stuck_links_end_a_shipment),
        cmocka_unit_test(what_the_carrier_has_no_room_for_is_tried_again),
        cmocka_unit_test(links_are_kept_while_used_and_closed_when_idle),
        cmocka_unit_test(an_audit_names_every_shipment),
        cmocka_unit_test(the_last_word_on_a_lost_router_comes_behind_all_that_is_written_for_it),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
