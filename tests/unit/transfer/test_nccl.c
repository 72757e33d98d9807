/* What is NCCL's alone, and how it fails, on the stand-in for it (tests/nccl-stand-in). */

#include "tests/unit/transfer/two_processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uint32_t comms_made(const char *path)
{
    struct stat file;
    return stat(path, &file) == 0 ? (uint32_t)file.st_size : 0;
}

static pd_transfer *nccl_create(uint32_t stall_ms, uint32_t comms_max)
{
    pd_transfer_options options = {.transport = "nccl",
                                   .pool_bytes = POOL_BYTES,
                                   .peers_max = 4,
                                   .stall_ms = stall_ms,
                                   .comms_max = comms_max};
    pd_transfer *transfer = NULL;
    read_transport(&options);
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_OK);
    return transfer;
}

/* One at a time: each end of a pair makes one when it is first needed, and again when it was put
 * out for another pair's; a pair that stays in use keeps its. */
static void communicators_are_made_when_needed_and_bounded(void **state)
{
    char path[] = "/tmp/kvferry-comms-XXXXXX";
    int fd = mkstemp(path);
    (void)state;
    assert_true(fd >= 0);
    setenv("NCCL_STAND_IN_COUNT", path, 1);
    receiver r[3];
    for (int i = 0; i < 3; i++)
        r[i] = receiver_start("nccl");
    pd_transfer *transfer = nccl_create(0, 2);
    pd_peer peers[3];
    uint64_t random = 11;
    for (int i = 0; i < 3; i++)
        peers[i] = connect_to(transfer, &r[i], (uint64_t)i);
    assert_int_equal(comms_made(path), 0);
    for (int n = 0; n < 5; n++) {
        for (int i = 0; i < 2; i++)
            round_trip(transfer, peers[i], &r[i], &random, 5);
    }
    assert_int_equal(comms_made(path), 4);
    round_trip(transfer, peers[2], &r[2], &random, 5); /* puts out that of 0 */
    round_trip(transfer, peers[1], &r[1], &random, 5);
    assert_int_equal(comms_made(path), 6);
    round_trip(transfer, peers[0], &r[0], &random, 5); /* puts out that of 2 */
    round_trip(transfer, peers[1], &r[1], &random, 5);
    assert_int_equal(comms_made(path), 8);
    pd_transfer_destroy(transfer);
    for (int i = 2; i >= 0; i--) /* a later one has inherited the pipes of those before */
        receiver_end(&r[i]);
    unsetenv("NCCL_STAND_IN_COUNT");
    close(fd);
    unlink(path);
}

/* Whatever NCCL does not do ends in time, as a peer that is down, and the next one works. */
static void a_fault_of_nccl_brings_the_peer_down_in_time(void **state)
{
    static const char *const faults[] = {"init-hangs", "init-fails", "async-error", "stream-hangs"};
    pd_transfer *transfer = nccl_create(1000, 0);
    uint64_t random = 12;
    (void)state;
    for (size_t i = 0; i < 2 * (sizeof faults / sizeof *faults); i++) {
        bool theirs = i % 2 != 0; /* the receiver's NCCL fails, else ours; theirs waits 2.5 s */
        setenv("NCCL_STAND_IN", faults[i / 2], 1);
        receiver r = receiver_start("nccl");
        if (theirs)
            unsetenv("NCCL_STAND_IN");
        pd_peer peer = connect_to(transfer, &r, i);
        for (uint32_t n = 0; n < 3; n++) {
            assert_int_equal(pd_transfer_put(transfer, peer, n, 0, n << 20, 1 << 20), PD_OK);
            assert_int_equal(pd_transfer_notice(transfer, peer, n, NULL, 0), PD_OK);
        }
        uint64_t start_ns = pd_clock_now_ns();
        bool down = false;
        uint32_t failed = 0;
        while (!down || failed < 3) {
            assert_true(next_event(transfer, 10000));
            if (event.kind == PD_TRANSFER_PEER_DOWN) {
                assert_int_equal(event.status, PD_E_PEER); /* ended by us, not by the engine */
                down = true;
            } else
                failed += event.kind == PD_TRANSFER_SENT && event.status != PD_OK;
        }
        assert_true(pd_clock_now_ns() - start_ns < 8 * PD_NS_PER_S);
        pd_transfer_close(transfer, peer);
        do
            assert_true(next_event(transfer, 10000));
        while (event.kind != PD_TRANSFER_CLOSED);
        receiver_kill(&r);
        unsetenv("NCCL_STAND_IN");
        r = receiver_start("nccl");
        peer = connect_to(transfer, &r, i);
        round_trip(transfer, peer, &r, &random, 5);
        close_peer(transfer, peer);
        receiver_end(&r);
    }
    pd_transfer_destroy(transfer);
}

enum { CROWD = 4, CROWD_ROUNDS = 60 };

/* Each of them writes to each of the others, all at once, in its own order: any that waited for
 * another in a ring would wait for ever. */
static void everybody_to_everybody_ends(void **state)
{
    pd_transfer *crowd[CROWD];
    pd_peer peers[CROWD][CROWD];
    uint32_t posted[CROWD][CROWD] = {{0}}, sent[CROWD] = {0}, heard[CROWD] = {0}, open = 0;
    (void)state;
    for (int i = 0; i < CROWD; i++)
        crowd[i] = nccl_create(20000, 0);
    for (int i = 0; i < CROWD; i++) {
        for (int to = 0; to < CROWD; to++) {
            size_t bytes;
            const void *address = pd_transfer_address(crowd[to], &bytes);
            if (to != i)
                assert_int_equal(pd_transfer_connect(crowd[i], address, bytes, 1, &peers[i][to]),
                                 PD_OK);
        }
    }
    const uint32_t all = CROWD_ROUNDS * (CROWD - 1);
    uint64_t end_ns = pd_clock_now_ns() + 60 * PD_NS_PER_S;
    for (bool done = false; !done;) {
        assert_true(pd_clock_now_ns() < end_ns);
        done = open == CROWD * (CROWD - 1);
        for (int i = 0; i < CROWD; i++) {
            while (next_event(crowd[i], 0)) {
                assert_int_equal(event.status, PD_OK);
                open += event.kind == PD_TRANSFER_CONNECTED;
                sent[i] += event.kind == PD_TRANSFER_SENT;
                heard[i] += event.kind == PD_TRANSFER_NOTICE;
            }
            for (int n = 1; n < CROWD && open == CROWD * (CROWD - 1); n++) {
                int to = (i + n) % CROWD;
                uint32_t at = posted[i][to];
                if (at < CROWD_ROUNDS &&
                    pd_transfer_put(crowd[i], peers[i][to], at, 0, 4096, 100 << 10) == PD_OK &&
                    pd_transfer_notice(crowd[i], peers[i][to], at, &at, sizeof at) == PD_OK)
                    posted[i][to]++;
            }
            done = done && sent[i] == all && heard[i] == all;
        }
        if (!done)
            usleep(1000);
    }
    for (int i = 0; i < CROWD; i++)
        pd_transfer_destroy(crowd[i]);
}

/* The sender stands still in the middle of a batch and goes on later: from the moment at which it
 * is fenced off nothing of what was under way changes the pool. */
static void a_living_sender_that_is_fenced_changes_no_byte(void **state)
{
    pd_transfer *transfer = nccl_create(20000, 0);
    unsigned char *pool = pd_transfer_pool(transfer);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    uint64_t random = 13;
    (void)state;
    for (int round = 0; round < 8; round++) {
        receiver sender = process_start("sender", "nccl");
        assert_int_equal(write(sender.out, address, bytes), bytes);
        expect(transfer, PD_TRANSFER_NOTICE, PD_OK);
        usleep((unsigned)(pd_random_next(&random) % 3000));
        kill(sender.pid, SIGSTOP);
        fence_all(transfer, &sender, 1);
        memset(pool, 0xa5, POOL_BYTES);
        kill(sender.pid, SIGCONT);
        uint64_t end_ns = pd_clock_now_ns() + 200 * PD_NS_PER_MS;
        while (pd_clock_now_ns() < end_ns)
            next_event(transfer, 10);
        size_t wrong = 0;
        for (size_t i = 0; i < POOL_BYTES; i++)
            wrong += pool[i] != 0xa5;
        assert_int_equal(wrong, 0);
        receiver_kill(&sender);
    }
    pd_transfer_destroy(transfer);
}

static void memory_of_the_host_is_not_nccls_to_carry(void **state)
{
    pd_transfer_options options = {
        .backend = "nccl", .transport = "auto", .pool_bytes = POOL_BYTES, .peers_max = 2};
    pd_transfer *transfer = NULL;
    (void)state;
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_E_UNSUPPORTED);
    assert_null(transfer);
}

static int nothing_is_left(void **state)
{
    (void)state;
    assert_int_equal(pd_mem_live(), 0);
    return 0;
}

int main(int argc, char **argv)
{
    int role = process_role(argc, argv);
    if (role >= 0)
        return role;
    pd_log_init("test", getenv("TEST_LOG") != NULL ? PD_LOG_DEBUG : PD_LOG_ERROR);
    signal(SIGPIPE, SIG_IGN);
    cmocka_set_test_filter(getenv("TEST_FILTER")); /* NULL: all */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(communicators_are_made_when_needed_and_bounded),
        cmocka_unit_test(a_fault_of_nccl_brings_the_peer_down_in_time),
        cmocka_unit_test(everybody_to_everybody_ends),
        cmocka_unit_test(a_living_sender_that_is_fenced_changes_no_byte),
        cmocka_unit_test(memory_of_the_host_is_not_nccls_to_carry),
    };
    return cmocka_run_group_tests(tests, NULL, nothing_is_left);
}
