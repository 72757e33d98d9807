/* Pools that are given in pieces, in any numbers on either side: what is put lands where its offset
 * says, and nothing leaves a piece. The receiver is a process of its own. */

#include "tests/unit/transfer/two_processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_pool.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A test's state: two names of transports. */
typedef struct sides {
    const char *sender, *receiver;
} sides;

static uint32_t pieces_of(const char *transport)
{
    const char *colon = strchr(transport, ':');
    return colon == NULL ? 1 : (uint32_t)atoi(colon + 1);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Bytes from an offset on to the next end of a piece on either side. */
static uint64_t room_at(const sides *s, uint64_t source, uint64_t target)
{
    uint64_t here = POOL_BYTES / pieces_of(s->sender), there = POOL_BYTES / pieces_of(s->receiver);
    return least(here - source % here, there - target % there);
}

static void fill(pd_transfer *transfer, uint64_t *random)
{
    for (uint64_t at = 0; at < POOL_BYTES; at += 8) {
        uint64_t word = pd_random_next(random);
        memcpy(pool_at(transfer, at), &word, 8);
    }
}

static claim claim_of(pd_transfer *transfer, uint64_t source, uint64_t target, uint64_t bytes)
{
    return (claim){
        .offset = target, .bytes = bytes, .hash = pd_hash64(pool_at(transfer, source), bytes, 0)};
}

static void notify(pd_transfer *transfer, pd_peer peer, const receiver *r, const claim *claims,
                   uint32_t count)
{
    answer a;
    assert_int_equal(pd_transfer_notice(transfer, peer, 1, claims, count * sizeof *claims), PD_OK);
    expect(transfer, PD_TRANSFER_SENT, PD_OK);
    read_all(r->in, &a, sizeof a);
    assert_int_equal(a.claims, count);
    assert_int_equal(a.wrong, 0);
}

/* Anywhere, of any length that both pieces have; and the whole pool in the longest puts there are,
 * one after the other, so that each goes on where the last one ended, across every end of a piece.
 */
static void what_is_put_lies_where_its_offset_says(void **state)
{
    const sides *s = *state;
    receiver r = receiver_start(s->receiver);
    pd_transfer *transfer = sender_create(s->sender, 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    uint64_t random = 7;
    claim claims[64];
    for (int round = 0; round < 4; round++) {
        fill(transfer, &random);
        for (uint32_t i = 0; i < 60; i++) {
            uint64_t target = (i + 0ull) * (POOL_BYTES / 60 / 8 * 8);
            uint64_t source = pd_random_next(&random) % (POOL_BYTES / 8) * 8;
            uint64_t bytes =
                least(room_at(s, source, target), 1 + pd_random_next(&random) % (POOL_BYTES / 60));
            claims[i] = claim_of(transfer, source, target, bytes);
            assert_int_equal(pd_transfer_put(transfer, peer, 1, source, target, bytes), PD_OK);
        }
        notify(transfer, peer, &r, claims, 60);
    }
    fill(transfer, &random);
    uint32_t count = 0;
    for (uint64_t at = 0; at < POOL_BYTES; at += claims[count++].bytes) {
        /* some end at a piece's end, some are not whole pages */
        uint64_t bytes = least(room_at(s, at, at), 300000);
        claims[count] = claim_of(transfer, at, at, bytes);
        assert_int_equal(pd_transfer_put(transfer, peer, 1, at, at, bytes), PD_OK);
    }
    notify(transfer, peer, &r, claims, count);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

static void no_put_crosses_a_piece(void **state)
{
    const sides *s = *state;
    receiver r = receiver_start(s->receiver);
    pd_transfer *transfer = sender_create(s->sender, 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    uint64_t here = POOL_BYTES / pieces_of(s->sender), there = POOL_BYTES / pieces_of(s->receiver);
    uint64_t random = 9;
    fill(transfer, &random);
    for (uint64_t end = here; end <= POOL_BYTES; end += here) {
        assert_int_equal(pd_transfer_put(transfer, peer, 1, end - 8, 0, 9), PD_E_INVALID);
        assert_int_equal(pd_transfer_put(transfer, peer, 1, end - 8, 0, 8), PD_OK);
    }
    for (uint64_t end = there; end <= POOL_BYTES; end += there) {
        assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, end - 8, 9), PD_E_INVALID);
        assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, end - 8, 8), PD_OK);
    }
    assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, least(here, there) + 1),
                     PD_E_INVALID);
    assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, least(here, there)), PD_OK);
    assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, UINT64_MAX - 3, 8), PD_E_INVALID);
    assert_int_equal(pd_transfer_put(transfer, peer, 1, UINT64_MAX - 3, 0, 8), PD_E_INVALID);
    claim whole = claim_of(transfer, 0, 0, least(here, there));
    notify(transfer, peer, &r, &whole, 1);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

static void pieces_that_are_none_are_refused(void **state)
{
    void *memory = outside_memory(false);
    char *inside = memory;
    void *pieces[PD_TRANSFER_PIECES_MAX + 1] = {memory};
    const pd_transfer_options good = {.backend = "ucx",
                                      .transport = "tcp",
                                      .pool_bytes = 1 << 20,
                                      .pieces = 2,
                                      .piece_memory = pieces,
                                      .peers_max = 2};
    pd_transfer *transfer = NULL;
    (void)state;
    for (uint32_t i = 0; i <= PD_TRANSFER_PIECES_MAX; i++)
        pieces[i] = inside + i * pd_transfer_pool_room(1 << 19);
    pd_transfer_options o = good;
    o.pool_bytes++; /* not in two */
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_INVALID);
    o = good;
    o.pieces = PD_TRANSFER_PIECES_MAX + 1;
    o.pool_bytes = o.pieces << 12;
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_INVALID);
    o = good;
    o.piece_memory = NULL; /* a transfer makes a pool of one */
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_INVALID);
    pieces[1] = inside + 8;
    assert_int_equal(pd_transfer_create(&good, &transfer), PD_E_INVALID);
    pieces[1] = NULL;
    assert_int_equal(pd_transfer_create(&good, &transfer), PD_E_INVALID);
    pieces[1] = inside + pd_transfer_pool_room(1 << 19);
    assert_int_equal(pd_transfer_create(&good, &transfer), PD_OK);
    assert_ptr_equal(pd_transfer_pool(transfer), memory);
    pd_transfer_destroy(transfer);
}

static void nothing_is_left_of_a_peer_that_is_killed(void **state)
{
    const sides *s = *state;
    pd_transfer *transfer = sender_create(s->sender, 1500);
    for (int i = 0; i < 3; i++) {
        receiver r = receiver_start(s->receiver);
        pd_peer peer = connect_to(transfer, &r, 5);
        assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, 4096), PD_OK);
        receiver_kill(&r);
        pd_transfer_close(transfer, peer);
        while (next_event(transfer, 5000) && event.kind != PD_TRANSFER_CLOSED)
            ;
        assert_int_equal(event.kind, PD_TRANSFER_CLOSED);
    }
    pd_transfer_destroy(transfer);
}

/* What an address says of a pool whose check sum is right is still another process' word. */
static void the_pool_part_of_an_address_is_taken_only_whole(void **state)
{
    enum { KEY = 10, COUNT = 3 };
    unsigned char bytes[COUNT * (sizeof(pd_ucx_piece_address) + KEY) + 1] = {0};
    const size_t len = sizeof bytes - 1;
    const pd_carrier_pool shape = {.bytes = COUNT * 4096, .pieces = COUNT};
    pd_ucx_piece_address head = {.base = 4096, .key_bytes = KEY};
    (void)state;
    for (int i = 0; i < COUNT; i++)
        memcpy(bytes + i * sizeof head, &head, sizeof head);
    assert_true(pd_ucx_target_fits(bytes, len, shape));
    for (size_t shorter = 0; shorter < len; shorter++)
        assert_false(pd_ucx_target_fits(bytes, shorter, shape));
    assert_false(pd_ucx_target_fits(bytes, len + 1, shape));
    for (uint32_t pieces = 1; pieces <= PD_TRANSFER_PIECES_MAX; pieces++) {
        pd_carrier_pool other = {.bytes = pieces * 4096, .pieces = pieces};
        assert_true(pd_ucx_target_fits(bytes, len, other) == (pieces == COUNT));
    }
    const uint32_t lengths[] = {0, KEY - 1, KEY + 1, 3 * KEY, UINT32_MAX};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        head.key_bytes = lengths[i];
        memcpy(bytes + sizeof head, &head, sizeof head);
        assert_false(pd_ucx_target_fits(bytes, len, shape));
    }
}

/* A peer's message says where its bytes belong: behind a piece lies something else. */
static void what_comes_by_messages_stays_in_a_piece(void **state)
{
    const pd_ucx_pool pool = {.bytes = 4 * 4096, .piece_bytes = 4096, .pieces = 4};
    (void)state;
    for (uint64_t piece = 0; piece < pool.pieces; piece++) {
        uint64_t at = piece * pool.piece_bytes;
        assert_true(pd_ucx_pool_holds(&pool, at, 4096));
        assert_false(pd_ucx_pool_holds(&pool, at, 4097));
        assert_true(pd_ucx_pool_holds(&pool, at + 4000, 96));
        assert_false(pd_ucx_pool_holds(&pool, at + 4000, 97));
        assert_false(pd_ucx_pool_holds(&pool, at + 1, UINT64_MAX));
    }
    assert_false(pd_ucx_pool_holds(&pool, pool.bytes, 0));
    assert_false(pd_ucx_pool_holds(&pool, UINT64_MAX - 7, 8));
}

static int no_memory_is_left(void **state)
{
    (void)state;
    assert_int_equal(pd_mem_live(), 0);
    return 0;
}

#define PAIR(test, sender, receiver)                                                               \
    {                                                                                              \
#test "/" sender "-" receiver, test, NULL, NULL, &(sides)                                  \
        {                                                                                          \
            sender, receiver                                                                       \
        }                                                                                          \
    }

#define PAIRS(test, transport)                                                                     \
    PAIR(test, transport ":1", transport ":4"), PAIR(test, transport ":4", transport ":1"),        \
        PAIR(test, transport ":2", transport ":4"), PAIR(test, transport ":4", transport ":4"),    \
        PAIR(test, transport ":2", transport ":2")

/* In a process that finds the stand-in for the driver: each piece on a device of its own, whose
 * context must be current for a copy. */
static int gpu_main(void)
{
    const struct CMUnitTest tests[] = {
        PAIRS(what_is_put_lies_where_its_offset_says, "gpu"),
        PAIR(no_put_crosses_a_piece, "gpu:4", "gpu:2"),
        PAIR(nothing_is_left_of_a_peer_that_is_killed, "gpu:2", "gpu:4"),
    };
    return cmocka_run_group_tests(tests, NULL, no_memory_is_left);
}

int main(int argc, char **argv)
{
    int role = process_role(argc, argv);
    if (role >= 0)
        return role;
    pd_log_init("test", getenv("TEST_LOG") != NULL ? PD_LOG_DEBUG : PD_LOG_ERROR);
    signal(SIGPIPE, SIG_IGN);
    cmocka_set_test_filter(getenv("TEST_FILTER")); /* NULL: all */
    if (getenv("TEST_CARRIER") != NULL && strcmp(getenv("TEST_CARRIER"), "gpu") == 0)
        return gpu_main();
    const struct CMUnitTest tests[] = {
        PAIRS(what_is_put_lies_where_its_offset_says, "shared"),
        PAIRS(what_is_put_lies_where_its_offset_says, "shm"),
        PAIRS(what_is_put_lies_where_its_offset_says, "tcp"),
        PAIR(what_is_put_lies_where_its_offset_says, "shm", "shared:4"),
        PAIR(what_is_put_lies_where_its_offset_says, "shared:4", "shm"),
        PAIR(what_is_put_lies_where_its_offset_says, "tcp", "tcp:4"),
        PAIR(no_put_crosses_a_piece, "shared:1", "shared:4"),
        PAIR(no_put_crosses_a_piece, "shared:4", "shared:2"),
        PAIR(no_put_crosses_a_piece, "tcp:4", "tcp:1"),
        PAIR(no_put_crosses_a_piece, "tcp", "tcp"),
        PAIR(nothing_is_left_of_a_peer_that_is_killed, "shared:2", "shared:4"),
        PAIR(nothing_is_left_of_a_peer_that_is_killed, "tcp:2", "tcp:4"),
        cmocka_unit_test(pieces_that_are_none_are_refused),
        cmocka_unit_test(the_pool_part_of_an_address_is_taken_only_whole),
        cmocka_unit_test(what_comes_by_messages_stays_in_a_piece),
    };
    return cmocka_run_group_tests(tests, NULL, no_memory_is_left);
}
