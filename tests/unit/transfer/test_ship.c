/* Shipments over a real link within this process: the sender's pool and the receiver's are two
 * transfers, and everything lies where it should when its notice comes. */

#include "common/worker/ship.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/seal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THEIR_BLOCKS_MORE = 5, SENDER = 0x5e4d, RECEIVER = 0x4ecc };

typedef struct pair {
    pd_kv_layout ours, theirs;
    pd_transfer *from, *to;
    pd_host_pool pool; /* of from */
    pd_shipper *shipper;
    pd_peer peer;
    uint64_t notices, aborts, sent; /* seen so far */
    uint64_t behind[2];             /* notices when the last abort of router 1 and 2 came */
    pd_transfer_event last_sent;
} pair;

static pd_transfer_event event;
static uint64_t seals[PD_NOTICE_SEALS_MAX];

static pd_transfer *transfer_make(const char *transport, uint64_t pool_bytes)
{
    pd_transfer_options options = {
        .backend = "ucx", .transport = transport, .pool_bytes = pool_bytes, .peers_max = 2};
    pd_transfer *transfer = NULL;

    assert_int_equal(pd_transfer_create(&options, &transfer), PD_OK);
    return transfer;
}

/* How a model of so many KV heads is split at either end. */
typedef struct splits {
    uint32_t kv_heads, ours, theirs;
} splits;

static pair *pair_make_with(const char *transport, const pd_shipper_options *limits,
                            const splits *of, bool sealed)
{
    pd_model_shape shape = {.layers = 5, .kv_heads = of->kv_heads, .head_dim = 64};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = 24 << 20,
                                    .ranks = of->ours};
    pair *p = pd_calloc(1, sizeof *p);
    size_t bytes;

    assert_non_null(p);
    assert_int_equal(pd_kv_layout_make(&shape, &options, &p->ours), PD_OK);
    options.ranks = of->theirs;
    options.memory_bytes += THEIR_BLOCKS_MORE * p->ours.block_bytes_all;
    assert_int_equal(pd_kv_layout_make(&shape, &options, &p->theirs), PD_OK);
    assert_int_equal(p->theirs.blocks, p->ours.blocks + THEIR_BLOCKS_MORE);
    p->from = transfer_make(transport, p->ours.pool_bytes);
    p->to = transfer_make(transport, p->theirs.pool_bytes);
    uint64_t random = 7, *words = pd_transfer_pool(p->from);
    for (uint64_t i = 0; i < p->ours.pool_bytes / 8; i++)
        words[i] = pd_random_next(&random);
    pd_shipper_options ship = *limits;
    ship.transfer = p->from;
    ship.layout = &p->ours;
    ship.incarnation = SENDER;
    ship.peers_max = 2;
    p->pool = (pd_host_pool){.layout = &p->ours, .pool = pd_transfer_pool(p->from)};
    if (sealed)
        ship.sealer = pd_host_sealer(&p->pool);
    assert_int_equal(pd_ship_create(&ship, &p->shipper), PD_OK);
    const void *address = pd_transfer_address(p->to, &bytes);
    assert_int_equal(pd_transfer_connect(p->from, address, bytes, 99, &p->peer), PD_OK);
    pd_kv_layout theirs = pd_kv_layout_of_peer(&p->ours, p->theirs.blocks, of->theirs);
    assert_int_equal(theirs.pool_bytes, p->theirs.pool_bytes);
    assert_int_equal(theirs.rank_bytes, p->theirs.rank_bytes);
    assert_int_equal(theirs.rank_heads, p->theirs.rank_heads);
    pd_ship_open(p->shipper, p->peer, &theirs, 99);
    for (int i = 0; i < 10000 && pd_transfer_poll(p->from, &event) != PD_OK; i++)
        usleep(1000);
    assert_int_equal(event.kind, PD_TRANSFER_CONNECTED);
    return p;
}

static pair *pair_make(const char *transport, const pd_shipper_options *limits)
{
    return pair_make_with(transport, limits, &(splits){2, 1, 1}, false);
}

static pair *pair_make_split(const char *transport, const pd_shipper_options *limits,
                             const splits *of)
{
    return pair_make_with(transport, limits, of, true);
}

static pair *pair_make_sealed(const char *transport, const pd_shipper_options *limits)
{
    return pair_make_split(transport, limits, &(splits){2, 1, 1});
}

static void pair_end(pair *p)
{
    pd_ship_destroy(p->shipper);
    pd_transfer_destroy(p->from);
    pd_transfer_destroy(p->to);
    pd_free(p);
    assert_int_equal(pd_mem_live(), 0);
}

/* What lies in the receiver's pool at source's target is what the notice says, each slice of it;
 * how many are not. targets: of the whole request. */
static uint32_t wrong_blocks(pair *p, const pd_notice *notice, const pd_block *targets)
{
    uint32_t wrong = 0;

    for (uint32_t g = 0; g < notice->groups; g++) {
        for (uint32_t i = 0; i < notice->count; i++) {
            uint32_t index = notice->first_block + i;
            pd_seal_place place = {
                .request = pd_ship_seal_request(&notice->key),
                .epoch = notice->key.epoch,
                .group = notice->group + g,
                .block_index = index,
                .valid_tokens = i + 1 == notice->count ? notice->valid_tokens : 16,
                .layout_fingerprint = pd_kv_layout_fingerprint(&p->theirs),
            };
            uint32_t heads = p->theirs.kv_heads / notice->slices;
            for (uint32_t slice = 0; slice < notice->slices; slice++)
                wrong +=
                    pd_seal_verify(
                        &p->theirs, pd_transfer_pool(p->to), targets[index], &place, slice * heads,
                        (slice + 1) * heads,
                        notice->seals[(g * notice->count + i) * notice->slices + slice]) != PD_OK;
        }
    }
    return wrong;
}

/* A turn of both loops. */
static void turn(pair *p, const pd_block *targets)
{
    pd_notice notice;

    pd_ship_pump(p->shipper);
    while (pd_transfer_poll(p->from, &event) == PD_OK) {
        if (event.kind == PD_TRANSFER_SENT && !pd_ship_sent(p->shipper, &event)) {
            p->sent++;
            p->last_sent = event;
        }
    }
    while (pd_ship_poll(p->shipper, &event) == PD_OK) {
        p->sent++;
        p->last_sent = event;
    }
    while (pd_transfer_poll(p->to, &event) == PD_OK) {
        assert_int_equal(event.kind, PD_TRANSFER_NOTICE);
        assert_int_equal(pd_notice_unpack(event.notice, event.notice_len, seals, &notice), PD_OK);
        assert_int_equal(notice.sender, SENDER);
        assert_int_equal(notice.receiver, RECEIVER);
        p->notices++;
        p->aborts += notice.kind == PD_NOTICE_ABORT;
        if (notice.kind == PD_NOTICE_ABORT && (notice.key.router == 1 || notice.key.router == 2))
            p->behind[notice.key.router - 1] = p->notices;
        if (targets != NULL && notice.kind == PD_NOTICE_BLOCKS)
            assert_int_equal(wrong_blocks(p, &notice, targets), 0);
    }
}

/* The same for the sender alone. */
static void until_ended(pair *p, uint64_t count)
{
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;

    while (p->sent < count && pd_clock_now_ns() < end_ns) {
        pd_ship_pump(p->shipper);
        while (pd_transfer_poll(p->from, &event) == PD_OK)
            assert_true(pd_ship_sent(p->shipper, &event));
        while (pd_ship_poll(p->shipper, &event) == PD_OK) {
            p->sent++;
            p->last_sent = event;
        }
    }
    assert_int_equal(p->sent, count);
}

static void until_sent(pair *p, uint64_t count, const pd_block *targets)
{
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;

    /* and until every notice of what landed has come */
    while ((p->sent < count || p->notices - p->aborts < pd_ship_read_stats(p->shipper).parts) &&
           pd_clock_now_ns() < end_ns) {
        turn(p, targets);
        usleep(100);
    }
    assert_int_equal(p->sent, count);
    /* notices of parts whose end was not seen yet may have come too */
    assert_true(p->notices - p->aborts >= pd_ship_read_stats(p->shipper).parts);
}

static pd_shipment shipment_of(const pair *p, uint64_t ticket, const pd_block *sources,
                               const pd_block *targets, uint32_t count)
{
    return (pd_shipment){.peer = p->peer,
                         .ticket = ticket,
                         .key = {.router = 1, .number = ticket, .epoch = 3},
                         .receiver = RECEIVER,
                         .groups = p->ours.groups,
                         .count = count,
                         .sources = sources,
                         .targets = targets,
                         .valid_tokens = 9};
}

/* Runs, single blocks, several groups a notice or several notices a group: all of it arrives, and
 * one event says so. */
static void every_block_lies_where_its_notice_says(void **state)
{
    static const uint64_t quanta[] = {1, 40 << 10, 1 << 20};
    static pd_block sources[600], targets[600];

    for (size_t q = 0; q < sizeof quanta / sizeof *quanta; q++) {
        pair *p = pair_make_sealed(*state, &(pd_shipper_options){.quantum_bytes = quanta[q]});
        static const uint32_t counts[] = {1, 2, 7, 33, 100};
        uint64_t random = q + 1;
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            uint64_t bytes = 0;
            for (uint32_t i = 0; i < counts[n]; i++) {
                bool run = i > 0 && pd_random_next(&random) % 3 != 0;
                sources[i] = run ? (sources[i - 1] + 1) % p->ours.blocks
                                 : (pd_block)(pd_random_next(&random) % p->ours.blocks);
                /* all different, in runs with gaps and the last of the pool among them */
                targets[i] = p->theirs.blocks - counts[n] + i;
            }
            for (uint32_t g = 0; g < p->ours.groups; g++)
                bytes += counts[n] * pd_kv_layout_block_bytes(&p->ours, g);
            pd_shipment s = shipment_of(p, 40 + n, sources, targets, counts[n]);
            assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
            until_sent(p, n + 1, targets);
            assert_int_equal(p->last_sent.status, PD_OK);
            assert_int_equal(p->last_sent.ticket, 40 + n);
            assert_int_equal(p->last_sent.tag, 99);
            assert_int_equal(p->last_sent.bytes, bytes);
            assert_true(p->last_sent.wire_ns > 0);
        }
        pair_end(p);
    }
}

/* Between pools of any two splits, in parts of any size. */
static void blocks_arrive_whatever_the_splits(void **state)
{
    static const splits of[] = {{8, 2, 1}, {8, 1, 8}, {8, 4, 4}, {6, 2, 3}, {12, 4, 6}};
    static const uint64_t quanta[] = {1, 100 << 10, 1 << 20};
    static pd_block sources[100], targets[100];

    for (size_t n = 0; n < sizeof of / sizeof *of; n++) {
        pair *p =
            pair_make_split(*state, &(pd_shipper_options){.quantum_bytes = quanta[n % 3]}, &of[n]);
        uint32_t count = n % 3 == 0 ? 7 : 100;
        for (uint32_t i = 0; i < count; i++) {
            sources[i] = i % 10 != 0 ? sources[i - 1] + 1 : 11 * i % p->ours.blocks / 2;
            targets[i] = p->theirs.blocks - count + i;
        }
        pd_shipment s = shipment_of(p, 40, sources, targets, count);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
        until_sent(p, 1, targets);
        assert_int_equal(p->last_sent.status, PD_OK);
        assert_int_equal(p->last_sent.bytes, count * p->ours.block_bytes_all);
        for (uint32_t i = 0; i < count; i++)
            for (uint32_t g = 0; g < p->ours.groups; g++)
                for (uint32_t head = 0; head < of[n].kv_heads; head++)
                    assert_memory_equal(
                        (char *)pd_transfer_pool(p->to) +
                            pd_kv_layout_head_offset(&p->theirs, g, targets[i], head),
                        (char *)pd_transfer_pool(p->from) +
                            pd_kv_layout_head_offset(&p->ours, g, sources[i], head),
                        pd_kv_layout_head_bytes(&p->ours, g));
        pair_end(p);
    }
}

/* A put for each run of blocks and each rank where the splits are the same; else one for each block
 * and each run of heads that neither split cuts. */
static void runs_are_merged_where_the_splits_agree(void **state)
{
    static const struct {
        splits of;
        uint32_t slices, puts; /* a group's: runs of 3 and 1 blocks */
    } cases[] = {
        {{8, 1, 1}, 1, 2},  {{8, 4, 4}, 4, 8},  {{8, 2, 4}, 4, 16},
        {{8, 4, 1}, 4, 16}, {{6, 2, 3}, 6, 16}, {{8, 1, 2}, 2, 8},
    };
    pd_block sources[] = {4, 5, 6, 11}, targets[] = {1, 2, 3, 9};

    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        pair *p = pair_make_split(*state, &(pd_shipper_options){0}, &cases[n].of);
        pd_shipment s = shipment_of(p, 5, sources, targets, 4);
        assert_int_equal(pd_ship_slices(&p->ours, &p->theirs), cases[n].slices);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
        until_sent(p, 1, targets);
        assert_int_equal(pd_ship_read_stats(p->shipper).puts, cases[n].puts * p->ours.groups);
        pair_end(p);
    }
}

static void splits_that_cut_a_head_are_none(void **state)
{
    pd_kv_layout ours = {.kv_heads = 12, .ranks = 4}, theirs = {.kv_heads = 12, .ranks = 6};

    (void)state;
    assert_int_equal(pd_ship_slices(&ours, &theirs), 12);
    ours.ranks = theirs.ranks = 4;
    assert_int_equal(pd_ship_slices(&ours, &theirs), 4);
    theirs.ranks = 8; /* whatever its address says */
    assert_int_equal(pd_ship_slices(&ours, &theirs), 0);
    ours = (pd_kv_layout){.kv_heads = 63 * 64, .ranks = 64};
    theirs = (pd_kv_layout){.kv_heads = 63 * 64, .ranks = 63};
    assert_int_equal(pd_ship_slices(&ours, &theirs), 0);
}

static void a_small_shipment_has_one_notice(void **state)
{
    pair *p = pair_make_sealed(*state, &(pd_shipper_options){0});
    pd_block sources[] = {4, 5, 6, 11}, targets[] = {1, 2, 3, 9};
    pd_shipment s = shipment_of(p, 5, sources, targets, 4);

    assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    until_sent(p, 1, targets);
    for (int i = 0; i < 100 && p->notices == 0; i++, usleep(1000))
        turn(p, targets);
    assert_int_equal(p->notices, 1);
    assert_int_equal(pd_ship_read_stats(p->shipper).puts, 2 * p->ours.groups);
    pair_end(p);
}

/* A long prompt first, then a short one: the short one's end is seen long before the long one's. */
static void a_long_shipment_does_not_hold_up_a_short_one(void **state)
{
    pair *p = pair_make(*state, &(pd_shipper_options){.quantum_bytes = 64 << 10,
                                                      .quantum_bytes_alone = 64 << 10,
                                                      .credit_bytes = 256 << 10});
    static pd_block blocks[1000];
    uint32_t count = p->ours.blocks < 1000 ? p->ours.blocks : 1000;

    for (uint32_t i = 0; i < count; i++)
        blocks[i] = i;
    for (uint64_t i = 0; i < 3; i++) { /* three shipments of one ticket are one turn */
        pd_shipment s = shipment_of(p, 1, blocks, blocks, count);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    }
    pd_ship_pump(p->shipper);
    pd_shipment s = shipment_of(p, 2, blocks, blocks, 2);
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    until_sent(p, 1, NULL);
    assert_int_equal(p->last_sent.ticket, 2);
    uint64_t then = pd_ship_read_stats(p->shipper).parts;
    until_sent(p, 4, NULL);
    assert_int_equal(p->last_sent.ticket, 1);
    assert_true(then < pd_ship_read_stats(p->shipper).parts / 2);
    pair_end(p);
}

/* Until a shipment of that ticket has ended: how many bytes landed meanwhile, those that are seen
 * after it not counted. longs counts the ends of ticket 1. */
static uint64_t landed_before(pair *p, uint64_t ticket, uint32_t *longs)
{
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;
    uint64_t from = pd_ship_read_stats(p->shipper).bytes;

    while (pd_clock_now_ns() < end_ns) {
        pd_ship_pump(p->shipper);
        while (pd_transfer_poll(p->from, &event) == PD_OK) {
            assert_true(pd_ship_sent(p->shipper, &event));
            uint64_t landed = pd_ship_read_stats(p->shipper).bytes - from;
            while (pd_ship_poll(p->shipper, &event) == PD_OK) {
                if (event.ticket == ticket)
                    return landed;
                *longs += 1;
            }
        }
        while (pd_transfer_poll(p->to, &event) == PD_OK)
            ;
    }
    return UINT64_MAX;
}

/* While a long prompt's blocks leave, short prompts come: each has landed when no more than what
 * had been posted before it, and a quantum, has. */
static void a_short_shipment_waits_for_the_credit_at_most(void **state)
{
    enum { QUANTUM = 256 << 10, CREDIT = 2 << 20, LONGS = 40, SHORTS = 10, SHORT_BLOCKS = 2 };
    pair *p = pair_make(*state, &(pd_shipper_options){.quantum_bytes = QUANTUM,
                                                      .quantum_bytes_alone = 2 * QUANTUM,
                                                      .credit_bytes = CREDIT});
    static pd_block blocks[1000];
    uint32_t count = p->ours.blocks < 1000 ? p->ours.blocks : 1000, longs = 0;
    uint64_t own_bytes = SHORT_BLOCKS * p->ours.block_bytes_all, most = 0;

    for (uint32_t i = 0; i < count; i++)
        blocks[i] = i;
    for (uint32_t i = 0; i < LONGS; i++) {
        pd_shipment s = shipment_of(p, 1, blocks, blocks, count);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    }
    for (uint32_t i = 0; i < SHORTS; i++) {
        pd_ship_pump(p->shipper);
        pd_shipment s = shipment_of(p, 2 + i, blocks, blocks, SHORT_BLOCKS);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
        uint64_t waited = landed_before(p, 2 + i, &longs) - own_bytes;
        most = waited > most ? waited : most;
    }
    print_message("# %.1f quanta of a long prompt landed before a short one at most, %.1f were "
                  "posted before it\n",
                  (double)most / QUANTUM, (double)CREDIT / QUANTUM);
    /* one quantum of the long one may go first: as big as it was when nobody else waited */
    assert_true(most <= CREDIT + 2 * QUANTUM);
    assert_true(longs < LONGS); /* it was under way all the time */
    pd_ship_drop(p->shipper, 1);
    pair_end(p);
}

static void an_abort_comes_after_what_was_asked_for_before(void **state)
{
    pair *p = pair_make_sealed(
        *state, &(pd_shipper_options){.quantum_bytes = 64 << 10, .credit_bytes = 64 << 10});
    static pd_block blocks[100];

    for (uint32_t i = 0; i < 100; i++)
        blocks[i] = i;
    pd_shipment s = shipment_of(p, 3, blocks, blocks, 100);
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    pd_notice abort = {
        .kind = PD_NOTICE_ABORT, .key = s.key, .sender = SENDER, .receiver = RECEIVER};
    assert_int_equal(pd_ship_notify(p->shipper, p->peer, &abort), PD_OK);
    /* of another request: it need not wait */
    abort.key.number = 77;
    assert_int_equal(pd_ship_notify(p->shipper, p->peer, &abort), PD_OK);
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;
    while (p->aborts < 2 && pd_clock_now_ns() < end_ns)
        turn(p, blocks);
    uint64_t notices = p->notices;
    assert_true(notices > 50);
    until_sent(p, 3, blocks);
    assert_int_equal(p->notices, notices); /* none came after the last abort */
    pair_end(p);
}

typedef struct late_sealer {
    pd_sealer sealer;
    bool waits;
} late_sealer;

static pd_status seal_late(void *ctx, const pd_seal_item *items, uint32_t count, uint64_t *out)
{
    const late_sealer *late = ctx;

    return late->waits ? PD_E_OVERLOAD : late->sealer.seal(late->sealer.ctx, items, count, out);
}

/* Its puts have left already, and its notice has not: that nothing is written any more is not so.
 */
static void an_abort_comes_after_the_part_that_is_being_posted(void **state)
{
    late_sealer late = {.waits = true};
    pair *p = pair_make(*state, &(pd_shipper_options){.sealer = {.ctx = &late, .seal = seal_late}});
    static pd_block blocks[4] = {0, 1, 2, 3};

    late.sealer = pd_host_sealer(&p->pool);
    pd_shipment s = shipment_of(p, 3, blocks, blocks, 4);
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    turn(p, blocks);
    for (uint64_t number = 0; number < 4; number += 3) { /* of its router, and of itself */
        const pd_notice abort = {.kind = PD_NOTICE_ABORT,
                                 .key = {.router = 1, .number = number, .epoch = 3},
                                 .sender = SENDER,
                                 .receiver = RECEIVER};
        assert_int_equal(pd_ship_notify(p->shipper, p->peer, &abort), PD_OK);
    }
    for (int i = 0; i < 20; i++, usleep(1000))
        turn(p, blocks);
    assert_true(p->notices == 0 && p->sent == 0);
    late.waits = false;
    until_sent(p, 3, blocks);
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;
    while (p->aborts < 2 && pd_clock_now_ns() < end_ns)
        turn(p, blocks);
    assert_true(p->aborts == 2 && p->behind[0] == p->notices);
    pair_end(p);
}

/* Its receivers take all that they leased for that router back: no block of any request of it may
 * come behind. */
static void a_word_on_a_router_comes_after_all_requests_of_it(void **state)
{
    pair *p = pair_make_sealed(
        *state, &(pd_shipper_options){.quantum_bytes = 64 << 10, .credit_bytes = 64 << 10});
    static pd_block blocks[100];

    for (uint32_t i = 0; i < 100; i++)
        blocks[i] = i;
    for (uint64_t i = 3; i < 5; i++) {
        pd_shipment s = shipment_of(p, i, blocks, blocks, 100);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    }
    for (uint64_t router = 1; router <= 2; router++) { /* nothing is shipped for the second */
        const pd_notice abort = {.kind = PD_NOTICE_ABORT,
                                 .key = {.router = router, .epoch = 1},
                                 .sender = SENDER,
                                 .receiver = RECEIVER};
        assert_int_equal(pd_ship_notify(p->shipper, p->peer, &abort), PD_OK);
    }
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;
    while (p->aborts < 2 && pd_clock_now_ns() < end_ns)
        turn(p, blocks);
    until_sent(p, 4, blocks);
    assert_true(p->behind[0] > 100);
    assert_true(p->notices - p->behind[0] <= 1); /* none but the other router's word */
    pair_end(p);
}

static void what_is_dropped_ends_and_nothing_more_of_it_comes(void **state)
{
    pair *p = pair_make(*state,
                        &(pd_shipper_options){.quantum_bytes = 64 << 10, .credit_bytes = 64 << 10});
    static pd_block blocks[300];

    for (uint32_t i = 0; i < 300; i++)
        blocks[i] = i;
    for (uint64_t i = 0; i < 3; i++) {
        pd_shipment s = shipment_of(p, 6, blocks, blocks, 300);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    }
    pd_ship_pump(p->shipper);
    pd_ship_drop(p->shipper, 6);
    pd_ship_drop(p->shipper, 12345); /* nobody's */
    until_sent(p, 3, NULL);
    assert_int_equal(p->last_sent.status, PD_E_CANCELLED);
    assert_int_equal(p->last_sent.ticket, 6);
    uint64_t parts = pd_ship_read_stats(p->shipper).parts;
    assert_true(parts >= 1 && parts < 10);
    for (int i = 0; i < 20; i++, usleep(1000))
        turn(p, NULL);
    assert_int_equal(p->sent, 3);
    assert_int_equal(pd_ship_read_stats(p->shipper).parts, parts);
    pair_end(p);
}

static void closing_a_link_ends_what_waits_before_it_is_closed(void **state)
{
    pair *p = pair_make(
        *state, &(pd_shipper_options){.quantum_bytes = 64 << 10, .credit_bytes = 128 << 10});
    static pd_block blocks[300];

    for (uint32_t i = 0; i < 300; i++)
        blocks[i] = i;
    for (uint64_t i = 0; i < 5; i++) {
        pd_shipment s = shipment_of(p, 10 + i, blocks, blocks, 300);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    }
    pd_notice abort = {.kind = PD_NOTICE_ABORT, .key = {.router = 1}};
    assert_int_equal(pd_ship_notify(p->shipper, p->peer, &abort), PD_OK);
    pd_ship_pump(p->shipper);
    pd_ship_close(p->shipper, p->peer);
    pd_transfer_close(p->from, p->peer);
    pd_shipment late = shipment_of(p, 20, blocks, blocks, 1);
    assert_int_equal(pd_ship_post(p->shipper, &late), PD_E_PEER);
    assert_int_equal(pd_ship_notify(p->shipper, p->peer, &abort), PD_E_PEER);
    bool closed = false;
    uint64_t end_ns = pd_clock_now_ns() + 20 * PD_NS_PER_S;
    while (!closed && pd_clock_now_ns() < end_ns) {
        pd_ship_pump(p->shipper);
        while (pd_ship_poll(p->shipper, &event) == PD_OK) {
            assert_int_not_equal(event.status, PD_OK);
            p->sent++;
        }
        if (pd_transfer_poll(p->from, &event) != PD_OK)
            continue;
        closed = event.kind == PD_TRANSFER_CLOSED;
        if (event.kind == PD_TRANSFER_SENT)
            assert_true(pd_ship_sent(p->shipper, &event));
        while (!closed && pd_ship_poll(p->shipper, &event) == PD_OK)
            p->sent++;
    }
    assert_true(closed);
    assert_int_equal(p->sent, 6);
    /* its place can be taken anew */
    pd_ship_open(p->shipper, p->peer, &p->theirs, 100);
    pair_end(p);
}

static void what_cannot_be_carried_is_refused(void **state)
{
    pair *p = pair_make(*state, &(pd_shipper_options){.shipments_max = 2});
    pd_block sources[] = {0, 1}, targets[] = {3, p->theirs.blocks};
    pd_shipment s = shipment_of(p, 1, sources, targets, 2);

    assert_int_equal(pd_ship_post(p->shipper, &s), PD_E_INVALID);
    targets[1] = p->theirs.blocks - 1;
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_E_OVERLOAD);
    sources[0] = targets[0] = 12; /* the caller's lists are the caller's again */
    until_sent(p, 2, NULL);
    assert_int_equal(p->last_sent.status, PD_OK);
    assert_memory_equal(
        (char *)pd_transfer_pool(p->to) + pd_kv_layout_block_offset(&p->theirs, 0, 3),
        (char *)pd_transfer_pool(p->from) + pd_kv_layout_block_offset(&p->ours, 0, 0),
        pd_kv_layout_block_bytes(&p->ours, 0));
    s.peer = 1 - p->peer;
    assert_int_equal(pd_ship_post(p->shipper, &s), PD_E_PEER);
    s.peer = p->peer;
    for (long n = 0; n < 3; n++) {
        pd_mem_fail_at(n);
        pd_status status = pd_ship_post(p->shipper, &s);
        pd_mem_fail_at(-1);
        assert_int_equal(status, n < 2 ? PD_E_NOMEM : PD_OK);
    }
    pair_end(p);
}

/* Each fault is what a receiver can find, and only in the slice of the block that was logged. */
static void check_faults(const char *transport, const splits *of)
{
    static const char *const texts[] = {"bit:1",     "other:1", "epoch:1",
                                        "missing:1", "count:1", "notice:1"};
    pd_block sources[] = {4, 5, 6, 11}, targets[] = {1, 2, 3, 9};

    for (uint32_t kind = 1; kind < PD_SHIP_FAULTS; kind++) {
        pd_shipper_options options = {0};
        assert_int_equal(pd_ship_faults_parse(texts[kind - 1], &options.faults), PD_OK);
        pair *p = pair_make_split(transport, &options, of);
        pd_shipment s = shipment_of(p, 5, sources, targets, 4);
        assert_int_equal(pd_ship_post(p->shipper, &s), PD_OK);
        pd_ship_pump(p->shipper);
        for (int i = 0; i < 5000 && pd_transfer_poll(p->to, &event) != PD_OK; i++)
            usleep(1000);
        assert_int_equal(event.kind, PD_TRANSFER_NOTICE);
        pd_notice notice;
        uint32_t wrong = 0;
        if (kind == PD_SHIP_FAULT_NOTICE) {
            assert_int_equal(event.notice_len, 0);
        } else {
            assert_int_equal(pd_notice_unpack(event.notice, event.notice_len, seals, &notice),
                             PD_OK);
            assert_int_equal(notice.valid_tokens, kind == PD_SHIP_FAULT_COUNT ? 8 : 9);
            notice.valid_tokens = 9;
            wrong = wrong_blocks(p, &notice, targets);
        }
        assert_int_equal(wrong,
                         kind != PD_SHIP_FAULT_COUNT && kind != PD_SHIP_FAULT_NOTICE ? 1 : 0);
        until_ended(p, 1);
        assert_int_equal(p->last_sent.status, PD_OK);
        pair_end(p);
    }
}

static void faults_on_purpose_can_be_found(void **state)
{
    static const splits of[] = {{2, 1, 1}, {8, 2, 4}, {6, 3, 1}};

    for (size_t n = 0; n < sizeof of / sizeof *of; n++)
        check_faults(*state, &of[n]);
    pd_ship_faults faults;
    assert_int_equal(pd_ship_faults_parse("bit", &faults), PD_E_INVALID);
    assert_int_equal(pd_ship_faults_parse("bit:0", &faults), PD_E_INVALID);
    assert_int_equal(pd_ship_faults_parse("bit:2x", &faults), PD_E_INVALID);
    assert_int_equal(pd_ship_faults_parse("pigeon:2", &faults), PD_E_INVALID);
    assert_int_equal(pd_ship_faults_parse("bit:2,notice:3", &faults), PD_OK);
    assert_int_equal(pd_ship_faults_next(&faults), PD_SHIP_FAULT_NONE);
    assert_int_equal(pd_ship_faults_next(&faults), PD_SHIP_FAULT_BIT);
    assert_int_equal(pd_ship_faults_next(&faults), PD_SHIP_FAULT_NOTICE);
    assert_int_equal(pd_ship_faults_parse(NULL, &faults), PD_OK);
    assert_int_equal(pd_ship_faults_next(&faults), PD_SHIP_FAULT_NONE);
}

#define BOTH(test)                                                                                 \
    {#test "/shm", test, NULL, NULL, "shm"},                                                       \
    {                                                                                              \
#test "/tcp", test, NULL, NULL, "tcp"                                                      \
    }

int main(void)
{
    pd_log_init("test", getenv("TEST_LOG") != NULL ? PD_LOG_DEBUG : PD_LOG_ERROR);
    signal(SIGPIPE, SIG_IGN);
    cmocka_set_test_filter(getenv("TEST_FILTER")); /* NULL: all */
    const struct CMUnitTest tests[] = {
        BOTH(every_block_lies_where_its_notice_says),
        BOTH(blocks_arrive_whatever_the_splits),
        BOTH(runs_are_merged_where_the_splits_agree),
        BOTH(a_small_shipment_has_one_notice),
        BOTH(a_long_shipment_does_not_hold_up_a_short_one),
        BOTH(a_short_shipment_waits_for_the_credit_at_most),
        BOTH(an_abort_comes_after_what_was_asked_for_before),
        BOTH(an_abort_comes_after_the_part_that_is_being_posted),
        BOTH(a_word_on_a_router_comes_after_all_requests_of_it),
        BOTH(what_is_dropped_ends_and_nothing_more_of_it_comes),
        BOTH(closing_a_link_ends_what_waits_before_it_is_closed),
        BOTH(what_cannot_be_carried_is_refused),
        BOTH(faults_on_purpose_can_be_found),
        cmocka_unit_test(splits_that_cut_a_head_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
