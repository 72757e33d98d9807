/* Two real processes: this one sends, and starts itself again as the receiver, which checks what
 * lies in its pool at the moment a notice arrives. With TEST_CARRIER=nccl: the same over NCCL. */

#include "tests/unit/transfer/two_processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/ucx_context.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void all_bytes_are_there_when_the_notice_arrives(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    if (strcmp(transport_of(state), "tcp") == 0 || strcmp(transport_of(state), "gpu:1") == 0)
        assert_string_equal(event.lane, "tcp");
    else if (strncmp(transport_of(state), "nccl", 4) == 0)
        assert_string_equal(event.lane, "nccl");
    else
        assert_true(strstr(event.lane, "posix") != NULL && strstr(event.lane, "tcp") == NULL);
    uint64_t random = 1;
    for (int i = 0; i < 100; i++)
        round_trip(transfer, peer, &r, &random, (uint32_t)(pd_random_next(&random) % 64));
    /* a second connection beside the first, and the first goes on when it is closed */
    pd_peer second = connect_to(transfer, &r, 6);
    assert_int_not_equal(second, peer);
    round_trip(transfer, second, &r, &random, 10);
    close_peer(transfer, second);
    assert_int_equal(pd_transfer_notice(transfer, second, 1, NULL, 0), PD_E_PEER);
    round_trip(transfer, peer, &r, &random, 10);
    pd_transfer_destroy(transfer); /* with the connection open */
    receiver_end(&r);
}

/* The pool of either side, or both, is memory that the transfer did not make. */
static void outside_host_memory_carries_as_well(void **state)
{
    static const struct {
        const char *receiver;
        bool outside; /* the sender's */
    } pairs[] = {{"receiver", true}, {"outside", false}, {"outside", true}};

    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        receiver r = receiver_start_as(pairs[i].receiver, transport_of(state));
        pd_transfer_options options = {.backend = "ucx",
                                       .transport = transport_of(state),
                                       .pool_bytes = POOL_BYTES,
                                       .pool = pairs[i].outside ? outside_memory(false) : NULL,
                                       .peers_max = 3};
        pd_transfer *transfer = NULL;
        assert_int_equal(pd_transfer_create(&options, &transfer), PD_OK);
        if (pairs[i].outside)
            assert_ptr_equal(pd_transfer_pool(transfer), options.pool);
        pd_peer peer = connect_to(transfer, &r, 5);
        uint64_t random = i;
        for (int n = 0; n < 30; n++)
            round_trip(transfer, peer, &r, &random, (uint32_t)(pd_random_next(&random) % 64));
        pd_transfer_destroy(transfer);
        receiver_end(&r);
        if (pairs[i].outside) /* and it is still the caller's */
            assert_int_equal(munmap(options.pool, pd_transfer_pool_room(POOL_BYTES)), 0);
    }
}

/* Host memory that is called a GPU's: no UCX can register it as such, whatever it supports. */
static void memory_of_a_gpu_is_refused_where_it_cannot_be_carried(void **state)
{
    pd_transfer_options options = {.backend = "ucx",
                                   .transport = "tcp",
                                   .pool_bytes = POOL_BYTES,
                                   .pool = outside_memory(false),
                                   .pool_kind = PD_MEMORY_CUDA,
                                   .peers_max = 3};
    pd_transfer *transfer = NULL;

    (void)state;
    /* over tcp in any case, and that is said without looking at the memory */
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_E_UNSUPPORTED);
    options.transport = "auto";
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_E_UNSUPPORTED);
    options.pool = (char *)options.pool + 8;
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_E_INVALID);
    options.pool = (char *)options.pool - 8;
    assert_int_equal(munmap(options.pool, pd_transfer_pool_room(POOL_BYTES)), 0);
    options.pool = NULL;
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_E_INVALID);
    assert_null(transfer);
}

static void notices_of_any_length_arrive_in_order(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    static claim claims[PD_TRANSFER_NOTICE_BYTES_MAX / sizeof(claim)];
    const uint32_t max = PD_TRANSFER_NOTICE_BYTES_MAX / sizeof(claim);
    for (uint32_t i = 0; i < max; i++)
        claims[i] = (claim){.bytes = 8, .hash = pd_hash64("\0\0\0\0\0\0\0\0", 8, 0)};
    for (uint32_t count = 0; count <= max; count += 20)
        assert_int_equal(pd_transfer_notice(transfer, peer, count, claims, count * sizeof(claim)),
                         PD_OK);
    for (uint32_t count = 0; count <= max; count += 20) {
        answer a;
        read_all(r.in, &a, sizeof a);
        assert_int_equal(a.claims, count);
        assert_int_equal(a.wrong, 0);
        expect(transfer, PD_TRANSFER_SENT, PD_OK);
        assert_int_equal(event.ticket, count);
    }
    assert_int_equal(
        pd_transfer_notice(transfer, peer, 1, claims, PD_TRANSFER_NOTICE_BYTES_MAX + 1),
        PD_E_TOO_LARGE);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

static void a_connection_works_after_idling(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    uint64_t random = 2;
    round_trip(transfer, peer, &r, &random, 3);
    assert_false(next_event(transfer, 2500)); /* two keepalives and a half */
    round_trip(transfer, peer, &r, &random, 3);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

/* Everything posted ends in a SENT, and the connection in a PEER_DOWN, within the time given. */
static void drain_until_down(pd_transfer *transfer, uint32_t outstanding, int wait_ms)
{
    uint64_t end_ns = pd_clock_now_ns() + (uint64_t)wait_ms * PD_NS_PER_MS;
    bool down = false;
    while (!down || outstanding > 0) {
        int left_ms = (int)(((int64_t)end_ns - (int64_t)pd_clock_now_ns()) / (int64_t)PD_NS_PER_MS);
        assert_true(left_ms > 0 && next_event(transfer, left_ms));
        if (event.kind == PD_TRANSFER_PEER_DOWN) {
            assert_false(down);
            assert_int_equal(event.status, PD_E_PEER);
            down = true;
        } else {
            assert_int_equal(event.kind, PD_TRANSFER_SENT);
            outstanding--;
        }
    }
}

static void a_killed_peer_is_noticed_and_its_successor_works(void **state)
{
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    uint64_t random = 3;
    for (int with_traffic = 0; with_traffic < 2; with_traffic++) {
        receiver r = receiver_start(transport_of(state));
        pd_peer peer = connect_to(transfer, &r, 5);
        round_trip(transfer, peer, &r, &random, 20);
        uint32_t posted = 0;
        if (with_traffic) {
            for (uint32_t i = 0; i < 200; i++) {
                if (i == 20)
                    kill(r.pid, SIGKILL);
                pd_status status = pd_transfer_put(transfer, peer, i, 0, (i % 8) << 20, 1 << 20);
                if (status == PD_OK)
                    status = pd_transfer_notice(transfer, peer, i, NULL, 0);
                assert_true(status == PD_OK || status == PD_E_PEER);
                if (status != PD_OK)
                    break;
                posted++;
                usleep(1000);
            }
        }
        receiver_kill(&r);
        drain_until_down(transfer, posted, 10000);
        assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, 8), PD_E_PEER);
        close_peer(transfer, peer);

        receiver next = receiver_start(transport_of(state));
        pd_peer again = connect_to(transfer, &next, 6);
        round_trip(transfer, again, &next, &random, 20);
        close_peer(transfer, again);
        receiver_end(&next);
    }
    pd_transfer_destroy(transfer);
}

static void a_receiver_outlives_its_senders(void **state)
{
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    for (int i = 0; i < 3; i++) {
        receiver sender = process_start("sender", transport_of(state));
        assert_int_equal(write(sender.out, address, bytes), bytes);
        uint32_t expected = 0, number;
        for (int n = 0; n < 50; n++) {
            expect(transfer, PD_TRANSFER_NOTICE, PD_OK);
            assert_int_equal(event.notice_len, sizeof number);
            memcpy(&number, event.notice, sizeof number);
            assert_true(n == 0 || number > expected); /* in order */
            expected = number;
        }
        receiver_kill(&sender); /* in the middle of writing */
        while (next_event(transfer, 300))
            assert_int_equal(event.kind, PD_TRANSFER_NOTICE);
    }
    pd_transfer_destroy(transfer);
}

/* Senders killed at any moment, from their first word on, many of them: the receiver lives, and the
 * next one is heard. */
static void no_death_of_a_sender_hurts_its_receiver(void **state)
{
    int rounds =
        getenv("KVFERRY_FULL") != NULL && strcmp(getenv("KVFERRY_FULL"), "1") == 0 ? 3000 : 60;
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    const char *seed = getenv("KVFERRY_SEED");
    uint64_t random = seed == NULL ? 1 : strtoull(seed, NULL, 10), heard = 0;
    for (int i = 0; i < rounds; i++) {
        receiver sender = process_start("sender", transport_of(state));
        assert_int_equal(write(sender.out, address, bytes), bytes);
        if (i % 4 != 3) { /* in the middle of writing */
            while (next_event(transfer, 20000) && event.kind != PD_TRANSFER_NOTICE)
                ;
            assert_int_equal(event.kind, PD_TRANSFER_NOTICE);
            heard++;
            uint64_t until_ns = pd_clock_now_ns() + pd_random_next(&random) % (4 * PD_NS_PER_MS);
            while (pd_clock_now_ns() < until_ns)
                next_event(transfer, 0);
        } else { /* while it connects, or before */
            usleep((unsigned)(pd_random_next(&random) % 30000));
        }
        receiver_kill(&sender);
    }
    assert_true(heard > (uint64_t)rounds / 2);
    pd_transfer_destroy(transfer);
}

/* The dead senders' sockets are still full, and their blocks somebody else's. Nobody takes events
 * at first, so that the transfer thread reads no socket dry. */
static void a_fenced_sender_changes_no_byte_any_more(void **state)
{
    enum { ROUNDS = 6, SENDERS = 3 };
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    unsigned char *pool = pd_transfer_pool(transfer);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    for (int round = 0; round < ROUNDS; round++) {
        receiver senders[SENDERS];
        char ready;
        for (int i = 0; i < SENDERS; i++) {
            senders[i] = process_start("filler", transport_of(state));
            assert_int_equal(write(senders[i].out, address, bytes), bytes);
        }
        /* UCX 1.13 aborts a process that still owes a dead one the answer to its connecting */
        for (int i = 0; i < SENDERS; i++)
            read_all(senders[i].in, &ready, 1);
        for (int i = 0; i < SENDERS; i++)
            assert_int_equal(write(senders[i].out, "", 1), 1);
        for (int i = 0; i < SENDERS; i++)
            read_all(senders[i].in, &ready, 1);
        usleep(100000);
        for (int i = 0; i < SENDERS; i++)
            receiver_kill(&senders[i]);
        fence_all(transfer, senders, SENDERS);
        memset(pool, 0xa5, POOL_BYTES);
        uint64_t end_ns = pd_clock_now_ns() + 300 * PD_NS_PER_MS;
        while (pd_clock_now_ns() < end_ns)
            next_event(transfer, 10);
        size_t wrong = 0;
        for (size_t i = 0; i < POOL_BYTES; i++)
            wrong += pool[i] != 0xa5;
        assert_int_equal(wrong, 0);
    }
    pd_transfer_destroy(transfer);
}

/* Takes events for so long; how many of them were notices. */
static uint32_t notices_within(pd_transfer *transfer, uint64_t ms)
{
    uint64_t end_ns = pd_clock_now_ns() + ms * PD_NS_PER_MS;
    uint32_t count = 0;

    while (pd_clock_now_ns() < end_ns)
        count += next_event(transfer, 10) && event.kind == PD_TRANSFER_NOTICE;
    return count;
}

/* Its blocks are somebody else's from then on: who believed that they are there would read what
 * another has written. It lives, and says so all the time; another one is heard all the same. */
static void a_fenced_sender_is_heard_no_more(void **state)
{
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    receiver fenced = process_start("sender", transport_of(state));

    assert_int_equal(write(fenced.out, address, bytes), bytes);
    for (int n = 0; n < 20; n++)
        expect(transfer, PD_TRANSFER_NOTICE, PD_OK);
    fence_all(transfer, &fenced, 1);
    assert_int_equal(notices_within(transfer, 300), 0);
    receiver other = process_start("sender", transport_of(state));
    assert_int_equal(write(other.out, address, bytes), bytes);
    expect(transfer, PD_TRANSFER_NOTICE, PD_OK);
    receiver_kill(&other);
    notices_within(transfer, 300); /* what the other one has left */
    assert_int_equal(notices_within(transfer, 100), 0);
    receiver_kill(&fenced);
    assert_int_equal(notices_within(transfer, 100), 0);
    pd_transfer_destroy(transfer);
}

static void connecting_to_a_dead_peer_fails_in_time(void **state)
{
    pd_transfer *transfer = sender_create(transport_of(state), 1500);
    receiver r = receiver_start(transport_of(state));
    receiver_kill(&r);
    pd_peer peer;
    assert_int_equal(pd_transfer_connect(transfer, r.address, r.address_bytes, 9, &peer), PD_OK);
    assert_true(next_event(transfer, 5000));
    assert_int_equal(event.kind, PD_TRANSFER_PEER_DOWN);
    assert_int_not_equal(event.status, PD_OK);
    assert_int_equal(event.tag, 9);
    close_peer(transfer, peer);
    pd_transfer_destroy(transfer);
}

/* The peer is stopped, not dead: no error will come by itself. */
static void closing_fails_everything_under_way_at_once(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 60000);
    pd_peer peer = connect_to(transfer, &r, 5);
    kill(r.pid, SIGSTOP);
    uint32_t posted = 0;
    for (; posted < 50; posted++) {
        assert_int_equal(pd_transfer_put(transfer, peer, posted, 0, 0, 1 << 20), PD_OK);
        assert_int_equal(pd_transfer_notice(transfer, peer, posted, NULL, 0), PD_OK);
    }
    uint64_t start_ns = pd_clock_now_ns();
    pd_transfer_close(transfer, peer);
    uint32_t sent = 0, cancelled = 0;
    do {
        assert_true(next_event(transfer, 3000));
        sent += event.kind == PD_TRANSFER_SENT;
        cancelled += event.kind == PD_TRANSFER_SENT && event.status == PD_E_CANCELLED;
        assert_int_not_equal(event.kind, PD_TRANSFER_PEER_DOWN);
    } while (event.kind != PD_TRANSFER_CLOSED);
    assert_int_equal(sent, posted);
    assert_true(strcmp(transport_of(state), "tcp") != 0 || cancelled > 0);
    assert_true(pd_clock_now_ns() - start_ns < 3 * PD_NS_PER_S);
    kill(r.pid, SIGCONT);
    receiver_kill(&r);
    receiver next = receiver_start(transport_of(state));
    peer = connect_to(transfer, &next, 6);
    uint64_t random = 4;
    round_trip(transfer, peer, &next, &random, 20);
    pd_transfer_destroy(transfer);
    receiver_end(&next);
}

static void a_peer_that_hangs_is_given_up_in_time(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 700);
    pd_peer peer = connect_to(transfer, &r, 5);
    kill(r.pid, SIGSTOP);
    for (uint32_t i = 0; i < 50; i++) {
        assert_int_equal(pd_transfer_put(transfer, peer, i, 0, 0, 1 << 20), PD_OK);
        assert_int_equal(pd_transfer_notice(transfer, peer, i, NULL, 0), PD_OK);
    }
    uint32_t sent = 0;
    bool down = false;
    while (!down || sent < 50) {
        assert_true(next_event(transfer, 5000));
        sent += event.kind == PD_TRANSFER_SENT;
        down = down || event.kind == PD_TRANSFER_PEER_DOWN;
        if (event.kind == PD_TRANSFER_PEER_DOWN)
            assert_int_equal(event.status, PD_E_TIMEOUT);
    }
    close_peer(transfer, peer);
    kill(r.pid, SIGCONT);
    receiver_kill(&r);
    pd_transfer_destroy(transfer);
}

static void no_put_leaves_the_pools(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    static const uint64_t bad[][3] = {
        {0, 0, 0},
        {0, 0, POOL_BYTES + 1},
        {1, 0, POOL_BYTES},
        {0, 1, POOL_BYTES},
        {POOL_BYTES, 0, 1},
        {0, POOL_BYTES, 1},
        {UINT64_MAX, 0, 2},
        {0, UINT64_MAX, 2},
        {0, UINT64_MAX - 7, 8},
        {8, 8, UINT64_MAX - 4},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(pd_transfer_put(transfer, peer, 1, bad[i][0], bad[i][1], bad[i][2]),
                         PD_E_INVALID);
    assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, POOL_BYTES), PD_OK);
    uint64_t random = 5;
    assert_int_equal(pd_transfer_notice(transfer, peer, 1, NULL, 0), PD_OK);
    expect(transfer, PD_TRANSFER_SENT, PD_OK);
    answer a;
    read_all(r.in, &a, sizeof a);
    round_trip(transfer, peer, &r, &random, 3);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

static void addresses_that_are_none_are_refused(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer;
    unsigned char bad[PD_TRANSFER_ADDRESS_BYTES_MAX + 8] = {0};
    for (size_t len = 0; len < r.address_bytes; len++)
        assert_int_equal(pd_transfer_connect(transfer, r.address, len, 0, &peer), PD_E_INVALID);
    memcpy(bad, r.address, r.address_bytes);
    for (size_t at = 0; at < r.address_bytes; at++) {
        bad[at] ^= 0x40;
        assert_int_equal(pd_transfer_connect(transfer, bad, r.address_bytes, 0, &peer),
                         PD_E_INVALID);
        bad[at] ^= 0x40;
    }
    assert_int_equal(pd_transfer_connect(transfer, bad, r.address_bytes + 1, 0, &peer),
                     PD_E_INVALID);
    assert_int_equal(pd_transfer_connect(transfer, bad, sizeof bad, 0, &peer), PD_E_INVALID);
    assert_int_equal(pd_transfer_connect(transfer, NULL, 0, 0, &peer), PD_E_INVALID);
    /* the good one works as often as there are places */
    pd_peer peers[3];
    for (int i = 0; i < 3; i++)
        peers[i] = connect_to(transfer, &r, 1);
    assert_int_equal(pd_transfer_connect(transfer, bad, r.address_bytes, 0, &peer), PD_E_OVERLOAD);
    close_peer(transfer, peers[1]);
    assert_int_equal(connect_to(transfer, &r, 1), peers[1]);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

static void a_peer_on_another_transport_is_told_apart(void **state)
{
    const char *other = strcmp(transport_of(state), "tcp") == 0 ? "shm" : "tcp";
    receiver r = receiver_start(other);
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer;
    assert_int_equal(pd_transfer_connect(transfer, r.address, r.address_bytes, 1, &peer), PD_OK);
    expect(transfer, PD_TRANSFER_PEER_DOWN, PD_E_MISMATCH);
    close_peer(transfer, peer);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

static void what_cannot_be_made_is_refused_without_a_trace(void **state)
{
    (void)state;
    long live = pd_mem_live();
    pd_transfer *transfer = NULL;
    const pd_transfer_options good = {
        .backend = "ucx", .transport = "tcp", .pool_bytes = 1 << 20, .peers_max = 2};
    pd_transfer_options o = good;
    o.backend = "nothing";
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_INVALID);
    o = good;
    o.transport = "pigeon";
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_INVALID);
    o = good;
    o.peers_max = 5000;
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_INVALID);
    o = good;
    o.device = "nosuch0";
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_UNSUPPORTED);
    o = good;
    o.pool_bytes = 1ull << 50;
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_NOMEM);
    o.pool_bytes = UINT64_MAX;
    assert_int_equal(pd_transfer_create(&o, &transfer), PD_E_NOMEM);
    for (long n = 0; transfer == NULL; n++) {
        assert_true(n < 100);
        pd_mem_fail_at(n);
        pd_status status = pd_transfer_create(&good, &transfer);
        pd_mem_fail_at(-1);
        assert_int_equal(status, transfer == NULL ? PD_E_NOMEM : PD_OK);
    }
    pd_transfer_destroy(transfer);
    assert_int_equal(pd_mem_live(), live);
}

/* rdma is of no help here, where there are no NICs, and of no harm: two on one host share memory.
 */
static void who_may_write_from_afar_is_known(void **state)
{
    static const struct {
        const char *transport;
        bool afar;
    } known[] = {{"auto", false}, {"shm", false}, {"tcp", false}, {"rdma", true}};
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        pd_transfer *transfer = sender_create(known[i].transport, 0);
        assert_true(pd_transfer_written_from_afar(transfer) == known[i].afar);
        pd_transfer_destroy(transfer);
    }
}

/* UCX's own minor version decides; in both it was tested with the answer is known. */
static void memory_for_a_fabric_is_asked_for_where_it_is_of_use(void **state)
{
    static const char *const transports[] = {"auto", "shm", "tcp", "rdma"};
    pd_memory_reach reach;
    unsigned major, minor, release;
    (void)state;
    ucp_get_version(&major, &minor, &release);
    for (size_t i = 0; i < sizeof transports / sizeof *transports; i++) {
        const char *t = transports[i];
        bool carried = minor >= 18 && strcmp(t, "tcp") != 0, far = strcmp(t, "shm") != 0;
        assert_int_equal(pd_transfer_reach("ucx", t, PD_REACH_AUTO, &reach), PD_OK);
        assert_int_equal(reach, carried && far ? PD_REACH_AUTO : PD_REACH_HOST);
        assert_int_equal(pd_transfer_reach("ucx", t, PD_REACH_HOST, &reach), PD_OK);
        assert_int_equal(reach, PD_REACH_HOST);
        assert_int_equal(pd_transfer_reach("ucx", t, PD_REACH_FABRIC, &reach),
                         carried ? PD_OK : PD_E_UNSUPPORTED);
        assert_int_equal(pd_transfer_reach("nccl", t, PD_REACH_AUTO, &reach), PD_OK);
        assert_int_equal(reach, PD_REACH_HOST);
        assert_int_equal(pd_transfer_reach("nccl", t, PD_REACH_FABRIC, &reach), PD_E_UNSUPPORTED);
    }
}

static int nothing_is_left(void **state)
{
    (void)state;
    assert_int_equal(pd_mem_live(), 0);
    return 0;
}

#define BOTH(test)                                                                                 \
    {#test "/shm", test, NULL, NULL, "shm"},                                                       \
    {                                                                                              \
#test "/tcp", test, NULL, NULL, "tcp"                                                      \
    }

/* and between pools that were given and can be mapped */
#define ALL(test)                                                                                  \
    BOTH(test),                                                                                    \
    {                                                                                              \
#test "/shared", test, NULL, NULL, "shared"                                                \
    }

#define NCCL(test)                                                                                 \
    {#test "/nccl", test, NULL, NULL, "nccl"},                                                     \
    {                                                                                              \
#test "/nccl-tcp", test, NULL, NULL, "nccl-tcp"                                            \
    }

/* In a process that finds the stand-in for NCCL. */
static int nccl_main(void)
{
    const struct CMUnitTest tests[] = {
        NCCL(all_bytes_are_there_when_the_notice_arrives),
        NCCL(notices_of_any_length_arrive_in_order),
        NCCL(a_connection_works_after_idling),
        NCCL(a_killed_peer_is_noticed_and_its_successor_works),
        NCCL(a_receiver_outlives_its_senders),
        NCCL(no_death_of_a_sender_hurts_its_receiver),
        NCCL(a_fenced_sender_changes_no_byte_any_more),
        NCCL(connecting_to_a_dead_peer_fails_in_time),
        NCCL(closing_fails_everything_under_way_at_once),
        NCCL(no_put_leaves_the_pools),
        {"addresses_that_are_none_are_refused/nccl", addresses_that_are_none_are_refused, NULL,
         NULL, "nccl"},
    };
    return cmocka_run_group_tests(tests, NULL, nothing_is_left);
}

#define GPU(test)                                                                                  \
    {                                                                                              \
#test "/gpu", test, NULL, NULL, "gpu:1"                                                    \
    }

/* In a process that finds the stand-in for the driver: over tcp, through host memory. */
static int gpu_main(void)
{
    const struct CMUnitTest tests[] = {
        GPU(all_bytes_are_there_when_the_notice_arrives),
        GPU(notices_of_any_length_arrive_in_order),
        GPU(a_connection_works_after_idling),
        GPU(a_killed_peer_is_noticed_and_its_successor_works),
        GPU(a_receiver_outlives_its_senders),
        GPU(a_fenced_sender_changes_no_byte_any_more),
        GPU(a_fenced_sender_is_heard_no_more),
        GPU(connecting_to_a_dead_peer_fails_in_time),
        GPU(closing_fails_everything_under_way_at_once),
        GPU(a_peer_that_hangs_is_given_up_in_time),
        GPU(no_put_leaves_the_pools),
        GPU(addresses_that_are_none_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, nothing_is_left);
}

int main(int argc, char **argv)
{
    int role = process_role(argc, argv);
    if (role >= 0)
        return role;
    pd_log_init("test", getenv("TEST_LOG") != NULL ? PD_LOG_DEBUG : PD_LOG_ERROR);
    signal(SIGPIPE, SIG_IGN);
    cmocka_set_test_filter(getenv("TEST_FILTER")); /* NULL: all */
    if (getenv("TEST_CARRIER") != NULL && strcmp(getenv("TEST_CARRIER"), "nccl") == 0)
        return nccl_main();
    if (getenv("TEST_CARRIER") != NULL && strcmp(getenv("TEST_CARRIER"), "gpu") == 0)
        return gpu_main();
    const struct CMUnitTest tests[] = {
        ALL(all_bytes_are_there_when_the_notice_arrives),
        {"all_bytes_are_there_when_the_notice_arrives/auto",
         all_bytes_are_there_when_the_notice_arrives, NULL, NULL, "auto"},
        BOTH(outside_host_memory_carries_as_well),
        cmocka_unit_test(memory_of_a_gpu_is_refused_where_it_cannot_be_carried),
        BOTH(notices_of_any_length_arrive_in_order),
        ALL(a_connection_works_after_idling),
        ALL(a_killed_peer_is_noticed_and_its_successor_works),
        ALL(a_receiver_outlives_its_senders),
        ALL(no_death_of_a_sender_hurts_its_receiver),
        {"a_fenced_sender_changes_no_byte_any_more/tcp", a_fenced_sender_changes_no_byte_any_more,
         NULL, NULL, "tcp"},
        ALL(a_fenced_sender_is_heard_no_more),
        ALL(connecting_to_a_dead_peer_fails_in_time),
        ALL(closing_fails_everything_under_way_at_once),
        {"a_peer_that_hangs_is_given_up_in_time/tcp", a_peer_that_hangs_is_given_up_in_time, NULL,
         NULL, "tcp"},
        ALL(no_put_leaves_the_pools),
        BOTH(addresses_that_are_none_are_refused),
        BOTH(a_peer_on_another_transport_is_told_apart),
        cmocka_unit_test(what_cannot_be_made_is_refused_without_a_trace),
        {"all_bytes_are_there_when_the_notice_arrives/rdma",
         all_bytes_are_there_when_the_notice_arrives, NULL, NULL, "rdma"},
        cmocka_unit_test(who_may_write_from_afar_is_known),
        cmocka_unit_test(memory_for_a_fabric_is_asked_for_where_it_is_of_use),
    };
    return cmocka_run_group_tests(tests, NULL, nothing_is_left);
}
