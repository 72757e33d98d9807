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
#include "common/transfer/nccl_link.h"

#include <dirent.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* Where somebody hangs: long enough for a connection to be made on a machine whose cores are busy
 * with other things (over tcp that was more than a second with UCX 1.22), for that is given up
 * alike.
 */
#define STALL_MS 3000

/* By what words go: "nccl" or "nccl-tcp"; the state of the test that runs. */
static const char *messages;

static int choose_messages(void **state)
{
    messages = *state;
    return 0;
}

static uint32_t comms_made(const char *path)
{
    struct stat file;
    return stat(path, &file) == 0 ? (uint32_t)file.st_size : 0;
}

static pd_status try_to_make(pd_transfer_options options, pd_transfer **transfer_out)
{
    options.transport = messages;
    options.pool_bytes = POOL_BYTES;
    options.peers_max = options.peers_max == 0 ? 4 : options.peers_max;
    read_transport(&options);
    return pd_transfer_create(&options, transfer_out);
}

static pd_transfer *nccl_make(pd_transfer_options options)
{
    pd_transfer *transfer = NULL;
    assert_int_equal(try_to_make(options, &transfer), PD_OK);
    return transfer;
}

static pd_transfer *nccl_create(uint32_t stall_ms, uint32_t comms_max)
{
    return nccl_make((pd_transfer_options){.stall_ms = stall_ms, .comms_max = comms_max});
}

/* Of the stand-in, in this process and in those that it starts from here on. */
static void set_faults(const char *faults)
{
    setenv("NCCL_STAND_IN", faults, 1);
}

/* Where this carrier's part of an address begins. */
static size_t place_in(const unsigned char *address, size_t bytes, nccl_address *found)
{
    for (size_t at = 0; at + sizeof *found <= bytes; at++) {
        memcpy(found, address + at, sizeof *found);
        if (found->version == PD_NCCL_CONFIG_VERSION &&
            found->base_bytes == bytes - at - sizeof *found)
            return at;
    }
    fail_msg("not an address of this carrier");
    return 0;
}

/* By which processes are ordered. */
static uint64_t id_of(const unsigned char *address, size_t bytes)
{
    nccl_address found;

    (void)place_in(address, bytes, &found);
    return found.id;
}

static uint64_t id_of_transfer(const pd_transfer *transfer)
{
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    return id_of(address, bytes);
}

/* One whose id lies between. */
static pd_transfer *create_between(uint64_t more_than, uint64_t less_than, uint32_t stall_ms,
                                   uint32_t comms_max)
{
    for (;;) {
        pd_transfer *transfer = nccl_create(stall_ms, comms_max);
        uint64_t id = id_of_transfer(transfer);
        if (id > more_than && id < less_than)
            return transfer;
        pd_transfer_destroy(transfer);
    }
}

static pd_peer connect_both(pd_transfer *from, const pd_transfer *to, uint64_t tag)
{
    receiver r = {0};
    const void *address = pd_transfer_address(to, &r.address_bytes);
    memcpy(r.address, address, r.address_bytes);
    return connect_to(from, &r, tag);
}

/* From its return on it does nothing more, until it is told to go on. */
static void stop_process(const receiver *r)
{
    int status;
    kill(r->pid, SIGSTOP);
    assert_int_equal(waitpid(r->pid, &status, WUNTRACED), r->pid);
    assert_true(WIFSTOPPED(status));
}

static void await_down(pd_transfer *transfer)
{
    do
        assert_true(next_event(transfer, 20000));
    while (event.kind != PD_TRANSFER_PEER_DOWN);
}

static pd_status closed_status(pd_transfer *transfer, pd_peer peer)
{
    pd_transfer_close(transfer, peer);
    do
        assert_true(next_event(transfer, 20000));
    while (event.kind != PD_TRANSFER_CLOSED);
    return event.status;
}

/* The pool is used for something else from here on. */
static void no_byte_changes(const pd_transfer *transfer, uint64_t for_ms)
{
    unsigned char *pool = pd_transfer_pool(transfer);
    size_t wrong = 0;
    memset(pool, 0xa5, POOL_BYTES);
    usleep((unsigned)for_ms * 1000);
    for (size_t i = 0; i < POOL_BYTES; i++)
        wrong += pool[i] != 0xa5;
    assert_int_equal(wrong, 0);
}

/* The first test: what was loaded once is not looked at again. */
static void an_old_nccl_is_refused(void **state)
{
    pd_transfer *transfer = NULL;
    (void)state;
    set_faults("old");
    assert_int_equal(try_to_make((pd_transfer_options){0}, &transfer), PD_E_UNSUPPORTED);
    assert_null(transfer);
    set_faults("");
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
        r[i] = receiver_start(messages);
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
    static const char *const faults[] = {"init-hangs",   "init-fails",  "async-error",
                                         "stream-hangs", "stream-half", "calls-hang"};
    pd_transfer *transfer = nccl_create(STALL_MS, 0);
    uint64_t random = 12;
    (void)state;
    for (size_t i = 0; i < 2 * (sizeof faults / sizeof *faults); i++) {
        bool theirs = i % 2 != 0; /* the receiver's NCCL fails, else ours; theirs waits 2.5 s */
        set_faults(faults[i / 2]);
        receiver r = receiver_start(messages);
        if (theirs)
            set_faults("");
        pd_peer peer = connect_to(transfer, &r, i);
        uint32_t posted = 0;
        while (posted < 3 && /* it may be down by then */
               pd_transfer_put(transfer, peer, posted, 0, posted << 20, 1 << 20) == PD_OK &&
               pd_transfer_notice(transfer, peer, posted, NULL, 0) == PD_OK)
            posted++;
        assert_true(posted > 0);
        uint64_t start_ns = pd_clock_now_ns();
        bool down = false;
        uint32_t failed = 0;
        while (!down || failed < posted) {
            assert_true(next_event(transfer, 10000));
            if (event.kind == PD_TRANSFER_PEER_DOWN) {
                assert_int_equal(event.status, PD_E_PEER); /* ended by us, not by the engine */
                down = true;
            } else
                failed += event.kind == PD_TRANSFER_SENT && event.status != PD_OK;
        }
        assert_true(pd_clock_now_ns() - start_ns < 8 * PD_NS_PER_S);
        assert_int_equal(closed_status(transfer, peer), PD_OK); /* the receiver lives and says so */
        receiver_kill(&r);
        set_faults("");
        r = receiver_start(messages);
        peer = connect_to(transfer, &r, i);
        round_trip(transfer, peer, &r, &random, 5);
        close_peer(transfer, peer);
        receiver_end(&r);
    }
    pd_transfer_destroy(transfer);
}

/* NCCL may take its time for each call, and refuses the next one until then. */
static void calls_that_are_under_way_are_waited_for(void **state)
{
    uint64_t random = 14;
    (void)state;
    set_faults("slow-calls");
    receiver r = receiver_start(messages);
    pd_transfer *transfer = nccl_create(0, 0);
    pd_peer peer = connect_to(transfer, &r, 1);
    for (uint32_t n = 1; n < 8; n++)
        round_trip(transfer, peer, &r, &random, n);
    set_faults("");
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

enum { CROWD = 4, CROWD_ROUNDS = 20, CROWD_BYTES = 40 << 10 };

typedef struct crowd {
    pd_transfer *members[CROWD];
    pd_peer peers[CROWD][CROWD];
    uint32_t posted[CROWD][CROWD], sent[CROWD], heard[CROWD], open;
} crowd;

/* What a member sends lies in one half of its pool, what it gets in the other. */
static uint64_t crowd_place(uint32_t member, uint32_t n)
{
    return (uint64_t)(member * CROWD_ROUNDS + n) * CROWD_BYTES;
}

static bool crowd_post(crowd *c, uint32_t from, uint32_t to, uint64_t *random)
{
    uint32_t n = c->posted[from][to];
    uint64_t source = crowd_place(to, n);
    unsigned char *pool = pd_transfer_pool(c->members[from]);
    claim said = {.offset = POOL_BYTES / 2 + crowd_place(from, n), .bytes = CROWD_BYTES};

    for (uint64_t b = 0; b < CROWD_BYTES; b += 8) {
        uint64_t bits = pd_random_next(random);
        memcpy(pool + source + b, &bits, 8);
    }
    said.hash = pd_hash64(pool + source, CROWD_BYTES, 0);
    pd_peer peer = c->peers[from][to];
    return pd_transfer_put(c->members[from], peer, n, source, said.offset, CROWD_BYTES) == PD_OK &&
           pd_transfer_notice(c->members[from], peer, n, &said, sizeof said) == PD_OK;
}

static void crowd_listen(crowd *c, uint32_t i)
{
    const unsigned char *pool = pd_transfer_pool(c->members[i]);
    while (next_event(c->members[i], 0)) {
        assert_int_equal(event.status, PD_OK);
        c->open += event.kind == PD_TRANSFER_CONNECTED;
        c->sent[i] += event.kind == PD_TRANSFER_SENT;
        if (event.kind != PD_TRANSFER_NOTICE)
            continue;
        claim said;
        assert_int_equal(event.notice_len, sizeof said);
        memcpy(&said, event.notice, sizeof said);
        assert_true(pd_hash64(pool + said.offset, said.bytes, 0) == said.hash);
        c->heard[i]++;
    }
}

/* Each of them writes to each of the others, all at once, in its own order: any that waited for
 * another in a ring would wait for ever. */
static void crowd_run(uint32_t comms_max, uint64_t incarnation)
{
    crowd c = {0};
    const uint32_t all = CROWD_ROUNDS * (CROWD - 1), links = CROWD * (CROWD - 1);
    uint64_t random = comms_max, end_ns = pd_clock_now_ns() + 90 * PD_NS_PER_S;
    for (uint32_t i = 0; i < CROWD; i++)
        c.members[i] =
            nccl_make((pd_transfer_options){.stall_ms = 30000,
                                            .comms_max = comms_max,
                                            .incarnation = incarnation == 0 ? 0 : incarnation + i});
    for (uint32_t i = 0; i < CROWD; i++) {
        for (uint32_t to = 0; to < CROWD; to++) {
            size_t bytes;
            const void *address = pd_transfer_address(c.members[to], &bytes);
            if (to != i)
                assert_int_equal(
                    pd_transfer_connect(c.members[i], address, bytes, 1, &c.peers[i][to]), PD_OK);
        }
    }
    for (bool done = false; !done;) {
        assert_true(pd_clock_now_ns() < end_ns);
        done = c.open == links;
        for (uint32_t i = 0; i < CROWD; i++) {
            crowd_listen(&c, i);
            for (uint32_t n = 1; n < CROWD && c.open == links; n++) {
                uint32_t to = (i + n) % CROWD;
                if (c.posted[i][to] < CROWD_ROUNDS && crowd_post(&c, i, to, &random))
                    c.posted[i][to]++;
            }
            done = done && c.sent[i] == all && c.heard[i] == all;
        }
        if (!done)
            usleep(1000);
    }
    for (uint32_t i = 0; i < CROWD; i++)
        pd_transfer_destroy(c.members[i]);
}

static void everybody_to_everybody_ends(void **state)
{
    (void)state;
    crowd_run(0, 0);
}

static void a_crowd_shares_two_communicators(void **state)
{
    (void)state;
    crowd_run(2, 0);
    crowd_run(1, 0);
}

/* Two that write to each other have a link each, and a way back each for the other's: the words of
 * all four are believed. */
static void both_ways_are_believed_at_once(void **state)
{
    (void)state;
    crowd_run(0, 1000);
}

/* What the sender has announced a batch for is still there when the receiver comes to it. */
static void an_announced_communicator_is_kept(void **state)
{
    receiver r[3];
    pd_peer peers[3];
    uint64_t random = 15;
    int low = 0; /* the receiver of the smallest id is taken before the sender is */
    (void)state;
    for (int i = 0; i < 3; i++) {
        r[i] = receiver_start(messages);
        low = id_of(r[i].address, r[i].address_bytes) < id_of(r[low].address, r[low].address_bytes)
                  ? i
                  : low;
    }
    pd_transfer *transfer =
        create_between(id_of(r[low].address, r[low].address_bytes), UINT64_MAX, 30000, 2);
    for (int i = 0; i < 3; i++)
        peers[i] = connect_to(transfer, &r[i], (uint64_t)i);
    round_trip(transfer, peers[low], &r[low], &random, 5);
    stop_process(&r[low]);
    assert_int_equal(pd_transfer_put(transfer, peers[low], 9, 0, 0, 100 << 10), PD_OK);
    assert_int_equal(pd_transfer_notice(transfer, peers[low], 9, NULL, 0), PD_OK);
    for (int n = 0; n < 2; n++) {
        for (int i = 0; i < 3; i++) {
            if (i != low)
                round_trip(transfer, peers[i], &r[i], &random, 5);
        }
    }
    kill(r[low].pid, SIGCONT);
    expect(transfer, PD_TRANSFER_SENT, PD_OK);
    assert_int_equal(event.ticket, 9);
    answer a;
    read_all(r[low].in, &a, sizeof a);
    round_trip(transfer, peers[low], &r[low], &random, 5);
    pd_transfer_destroy(transfer);
    for (int i = 2; i >= 0; i--)
        receiver_end(&r[i]);
}

/* The sender is held by another batch, and the receiver of the next one, which is taken already,
 * waits for longer than it would for one that is silent. */
static void a_busy_sender_is_waited_for(void **state)
{
    enum { LOW_STALL_MS = 800 };
    pd_transfer *low = create_between(0, UINT64_MAX / 4, LOW_STALL_MS, 0);
    pd_transfer *sender = create_between(UINT64_MAX / 4, UINT64_MAX / 4 * 3, 30000, 0);
    receiver high = receiver_start(messages);
    answer a;
    (void)state;
    while (id_of(high.address, high.address_bytes) < UINT64_MAX / 4 * 3) {
        receiver_kill(&high);
        high = receiver_start(messages);
    }
    pd_peer to_high = connect_to(sender, &high, 1), to_low = connect_both(sender, low, 2);
    stop_process(&high);
    assert_int_equal(pd_transfer_put(sender, to_high, 1, 0, 0, 100 << 10), PD_OK);
    assert_int_equal(pd_transfer_notice(sender, to_high, 1, NULL, 0), PD_OK);
    usleep(100000);
    assert_int_equal(pd_transfer_put(sender, to_low, 2, 0, 0, 100 << 10), PD_OK);
    assert_int_equal(pd_transfer_notice(sender, to_low, 2, NULL, 0), PD_OK);
    assert_false(next_event(sender, 2 * LOW_STALL_MS));
    kill(high.pid, SIGCONT);
    for (int n = 0; n < 2; n++)
        expect(sender, PD_TRANSFER_SENT, PD_OK);
    expect(low, PD_TRANSFER_NOTICE, PD_OK);
    read_all(high.in, &a, sizeof a);
    pd_transfer_destroy(sender);
    pd_transfer_destroy(low);
    receiver_end(&high);
}

static void put_one(pd_transfer *transfer, pd_peer peer)
{
    assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, 100 << 10), PD_OK);
    assert_int_equal(pd_transfer_notice(transfer, peer, 1, NULL, 0), PD_OK);
}

/* The sender gives up while the receiver has not come to it, or has half of it. */
static void what_is_closed_is_written_no_more(void **state)
{
    static const char *const faults[] = {"0:error-after,1:stream-late", "0:stream-half",
                                         "0:stream-hangs,1:stream-late", "0:calls-hang"};
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        pd_transfer *from = nccl_create(STALL_MS, 0), *to = nccl_create(20000, 0);
        set_faults(faults[i]);
        pd_peer peer = connect_both(from, to, 1);
        put_one(from, peer);
        await_down(from);
        assert_int_equal(closed_status(from, peer), PD_OK);
        set_faults("");
        no_byte_changes(to, 1000);
        pd_transfer_destroy(from);
        pd_transfer_destroy(to);
    }
}

/* It still holds receives, and cannot be asked: until it is dead nobody knows. */
static void a_receiver_that_may_still_write_is_not_closed(void **state)
{
    uint64_t random = 16;
    (void)state;
    pd_transfer *transfer = nccl_create(STALL_MS, 0);
    for (int killed = 0; killed < 2; killed++) {
        set_faults("0:error-after,1:stream-hangs");
        receiver r = receiver_start(messages);
        pd_peer peer = connect_to(transfer, &r, 1);
        put_one(transfer, peer);
        await_down(transfer);
        if (killed)
            receiver_kill(&r);
        else
            stop_process(&r);
        assert_int_equal(closed_status(transfer, peer), killed ? PD_OK : PD_E_TIMEOUT);
        set_faults("");
        receiver next = receiver_start(messages); /* in the same place */
        peer = connect_to(transfer, &next, 2);
        round_trip(transfer, peer, &next, &random, 5);
        close_peer(transfer, peer);
        receiver_end(&next);
        if (!killed)
            receiver_kill(&r);
    }
    pd_transfer_destroy(transfer);
}

/* A process that has ended may leave its number to another one. */
static int64_t reused_pid;

pd_status __real_pd_process_started(int64_t pid, uint64_t *started_out);
pd_status __wrap_pd_process_started(int64_t pid, uint64_t *started_out);

pd_status __wrap_pd_process_started(int64_t pid, uint64_t *started_out)
{
    pd_status status = __real_pd_process_started(pid, started_out);
    if (status == PD_OK && pid == reused_pid)
        ++*started_out;
    return status;
}

static void a_receiver_whose_number_is_anothers_is_dead(void **state)
{
    (void)state;
    set_faults("0:error-after,1:stream-hangs");
    pd_transfer *transfer = nccl_create(STALL_MS, 0);
    receiver r = receiver_start(messages);
    pd_peer peer = connect_to(transfer, &r, 1);
    put_one(transfer, peer);
    await_down(transfer);
    stop_process(&r);
    reused_pid = r.pid;
    assert_int_equal(closed_status(transfer, peer), PD_OK);
    reused_pid = 0;
    set_faults("");
    pd_transfer_destroy(transfer);
    receiver_kill(&r);
}

/* It was not late who came while nobody looked: the receiver stands still in the middle of a batch,
 * for longer than it would wait for its sender, and then goes on with it. */
static void who_stood_still_blames_nobody(void **state)
{
    pd_transfer *transfer = nccl_create(30000, 0);
    answer a;
    (void)state;
    set_faults("1:stream-late");
    receiver r = receiver_start(messages); /* waits for half of 5 s */
    pd_peer peer = connect_to(transfer, &r, 1);
    for (int n = 0; n < 2; n++) {
        assert_int_equal(pd_transfer_put(transfer, peer, 1, 0, 0, POOL_BYTES), PD_OK);
        assert_int_equal(pd_transfer_notice(transfer, peer, 1, NULL, 0), PD_OK);
        usleep(300000);
        stop_process(&r);
        usleep(3000000);
        kill(r.pid, SIGCONT);
        expect(transfer, PD_TRANSFER_SENT, PD_OK);
        read_all(r.in, &a, sizeof a);
    }
    set_faults("");
    close_peer(transfer, peer);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

/* The same, where the carrier's patience ends before the engine's. */
static void the_end_of_patience_proves_nothing(void **state)
{
    pd_transfer *transfer = nccl_create(900, 0);
    pd_peer peer;
    (void)state;
    set_faults("0:error-after,1:stream-hangs");
    receiver r = receiver_start(messages);
    for (int tries = 0;; tries++) { /* a machine may be busy for so long */
        assert_true(tries < 20);
        assert_int_equal(pd_transfer_connect(transfer, r.address, r.address_bytes, 1, &peer),
                         PD_OK);
        assert_true(next_event(transfer, 20000));
        if (event.kind == PD_TRANSFER_CONNECTED)
            break;
        assert_int_equal(event.kind, PD_TRANSFER_PEER_DOWN);
        (void)closed_status(transfer, peer);
    }
    put_one(transfer, peer);
    await_down(transfer);
    stop_process(&r);
    assert_int_equal(closed_status(transfer, peer), PD_E_TIMEOUT);
    set_faults("");
    pd_transfer_destroy(transfer);
    receiver_kill(&r);
}

/* An address whose carrier's part, at `at`, is another: what the transfer checks lies before it. */
static void write_head(receiver *r, size_t at, const nccl_address *head)
{
    uint64_t check = 0;
    uint32_t magic;

    memcpy(r->address + at, head, sizeof *head);
    memcpy(r->address + at - sizeof check, &check, sizeof check);
    memcpy(&magic, r->address, sizeof magic);
    check = pd_hash64(r->address, r->address_bytes, magic);
    memcpy(r->address + at - sizeof check, &check, sizeof check);
}

/* Its kernels and ours would not understand each other. */
static void another_version_of_nccl_is_refused(void **state)
{
    pd_transfer *transfer = nccl_create(0, 0);
    receiver r = receiver_start(messages);
    nccl_address head = {0};
    pd_peer peer;
    (void)state;
    size_t at = place_in(r.address, r.address_bytes, &head);
    head.version++;
    write_head(&r, at, &head);
    assert_int_equal(pd_transfer_connect(transfer, r.address, r.address_bytes, 1, &peer), PD_OK);
    expect(transfer, PD_TRANSFER_PEER_DOWN, PD_E_MISMATCH);
    close_peer(transfer, peer);
    head.version--;
    write_head(&r, at, &head);
    close_peer(transfer, connect_to(transfer, &r, 2));
    pd_transfer_destroy(transfer);
    receiver_end(&r);
}

/* Cuts our connections to the notice sockets that are named in that transfer's address. */
static void cut_connections_to(const pd_transfer *to)
{
    size_t bytes;
    const void *address = pd_transfer_address(to, &bytes);
    DIR *open_files = opendir("/proc/self/fd");
    int cut = 0;
    assert_non_null(open_files);
    for (struct dirent *entry; (entry = readdir(open_files)) != NULL;) {
        struct sockaddr_un peer;
        socklen_t len = sizeof peer;
        int fd = atoi(entry->d_name);
        if (getpeername(fd, (struct sockaddr *)&peer, &len) != 0 || peer.sun_family != AF_UNIX ||
            len <= offsetof(struct sockaddr_un, sun_path) + 1)
            continue;
        size_t name_bytes = len - offsetof(struct sockaddr_un, sun_path) - 1;
        if (memmem(address, bytes, peer.sun_path + 1, name_bytes) != NULL)
            cut += shutdown(fd, SHUT_RDWR) == 0;
    }
    closedir(open_files);
    assert_int_equal(cut, 1);
}

/* Only the sender's connection breaks, in the middle of a batch; the receiver hears nothing of it.
 */
static void a_goodbye_finds_another_way(void **state)
{
    (void)state;
    pd_transfer *from = nccl_create(20000, 0), *to = nccl_create(20000, 0);
    pd_peer peer = connect_both(from, to, 1);
    uint32_t closed = 0;
    for (int n = 0; n < 4; n++) {
        set_faults("1:stream-late");
        put_one(from, peer);
        usleep(150000);
        cut_connections_to(to);
        await_down(from);
        pd_status status = closed_status(from, peer);
        set_faults("");
        if (status == PD_OK) {
            no_byte_changes(to, 900);
            closed++;
        } else { /* the machine was busy for a second */
            assert_int_equal(status, PD_E_TIMEOUT);
        }
        peer = connect_both(from, to, 1);
    }
    assert_true(closed > 0);
    put_one(from, peer);
    expect(from, PD_TRANSFER_SENT, PD_OK);
    pd_transfer_destroy(from);
    pd_transfer_destroy(to);
}

/* Of a receiver all of whose places are taken: the one that stands idle longest is told. */
static void a_hello_is_said_until_there_is_a_place(void **state)
{
    enum { PLACES = 1 + SENDERS_MORE };
    pd_transfer *from =
        nccl_make((pd_transfer_options){.stall_ms = 10000, .peers_max = PLACES + 1});
    pd_transfer *to = nccl_make((pd_transfer_options){.peers_max = 1});
    pd_peer peers[PLACES + 1];
    size_t bytes;
    const void *address = pd_transfer_address(to, &bytes);
    (void)state;
    for (uint64_t i = 0; i < PLACES; i++)
        peers[i] = connect_both(from, to, i);
    assert_int_equal(pd_transfer_connect(from, address, bytes, PLACES, &peers[PLACES]), PD_OK);
    for (bool down = false, up = false; !down || !up;) {
        assert_true(next_event(from, 10000));
        if (event.kind == PD_TRANSFER_PEER_DOWN) {
            assert_true(!down && event.tag != PLACES);
            pd_transfer_close(from, event.peer);
            down = true;
        } else if (event.kind == PD_TRANSFER_CONNECTED) {
            assert_int_equal(event.tag, PLACES);
            up = true;
        } else {
            assert_int_equal(event.kind, PD_TRANSFER_CLOSED);
            assert_int_equal(event.status, PD_OK);
        }
    }
    put_one(from, peers[PLACES]);
    do
        assert_true(next_event(from, 10000));
    while (event.kind != PD_TRANSFER_SENT);
    assert_int_equal(event.status, PD_OK);
    pd_transfer_destroy(from);
    pd_transfer_destroy(to);
}

/* Either end is killed while both make a communicator, which then never comes about. */
static void a_death_in_the_making_of_a_communicator_is_seen(void **state)
{
    pd_transfer *transfer = nccl_create(20000, 0);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    uint64_t random = 17;
    (void)state;
    set_faults("1:init-hangs");
    receiver r = receiver_start(messages);
    pd_peer peer = connect_to(transfer, &r, 1);
    put_one(transfer, peer);
    usleep(200000);
    uint64_t start_ns = pd_clock_now_ns();
    receiver_kill(&r);
    await_down(transfer);
    assert_true(pd_clock_now_ns() - start_ns < 5 * PD_NS_PER_S);
    assert_int_equal(closed_status(transfer, peer), PD_OK);

    set_faults("0:init-hangs");
    receiver sender = process_start("sender", messages);
    assert_int_equal(write(sender.out, address, bytes), bytes);
    usleep(400000);
    receiver_kill(&sender);
    set_faults("");
    sender = process_start("sender", messages);
    assert_int_equal(write(sender.out, address, bytes), bytes);
    start_ns = pd_clock_now_ns();
    expect(transfer, PD_TRANSFER_NOTICE, PD_OK);
    assert_true(pd_clock_now_ns() - start_ns < 5 * PD_NS_PER_S);
    receiver_kill(&sender);
    while (next_event(transfer, 300))
        ;
    r = receiver_start(messages);
    peer = connect_to(transfer, &r, 1);
    round_trip(transfer, peer, &r, &random, 5);
    pd_transfer_destroy(transfer);
    receiver_end(&r);
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
        receiver sender = process_start("sender", messages);
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

/* An abort takes its time, and until then what was under way may land: the fence is told of when
 * that is over. The stream moves its bytes while the abort takes its time. */
static void a_fence_waits_for_the_abort(void **state)
{
    pd_transfer *transfer = nccl_create(20000, 0);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    (void)state;
    for (unsigned at_ms = 400; at_ms <= 600; at_ms += 100) {
        set_faults("1:stream-late,1:abort-late");
        receiver sender = process_start("sender", messages);
        assert_int_equal(write(sender.out, address, bytes), bytes);
        expect(transfer, PD_TRANSFER_NOTICE, PD_OK);
        usleep(at_ms * 1000); /* the next batch is under way */
        fence_all(transfer, &sender, 1);
        no_byte_changes(transfer, 800);
        set_faults("");
        receiver_kill(&sender);
        while (next_event(transfer, 300))
            ;
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

#define ONE(test)                                                                                  \
    {                                                                                              \
#test, test, choose_messages, NULL, "nccl"                                                 \
    }
#define BOTH(test)                                                                                 \
    ONE(test),                                                                                     \
    {                                                                                              \
#test "/tcp", test, choose_messages, NULL, "nccl-tcp"                                      \
    }

int main(int argc, char **argv)
{
    int role = process_role(argc, argv);
    if (role >= 0)
        return role;
    pd_log_init("test", getenv("TEST_LOG") != NULL ? PD_LOG_DEBUG : PD_LOG_ERROR);
    signal(SIGPIPE, SIG_IGN);
    set_faults(""); /* it is there before any thread reads it, and only its value changes */
    cmocka_set_test_filter(getenv("TEST_FILTER")); /* NULL: all */
    const struct CMUnitTest tests[] = {
        ONE(an_old_nccl_is_refused),
        ONE(communicators_are_made_when_needed_and_bounded),
        ONE(a_fault_of_nccl_brings_the_peer_down_in_time),
        ONE(calls_that_are_under_way_are_waited_for),
        BOTH(everybody_to_everybody_ends),
        ONE(a_crowd_shares_two_communicators),
        BOTH(both_ways_are_believed_at_once),
        ONE(an_announced_communicator_is_kept),
        ONE(a_busy_sender_is_waited_for),
        BOTH(what_is_closed_is_written_no_more),
        BOTH(a_receiver_that_may_still_write_is_not_closed),
        ONE(a_receiver_whose_number_is_anothers_is_dead),
        ONE(the_end_of_patience_proves_nothing),
        ONE(who_stood_still_blames_nobody),
        ONE(another_version_of_nccl_is_refused),
        ONE(a_goodbye_finds_another_way),
        BOTH(a_hello_is_said_until_there_is_a_place),
        BOTH(a_death_in_the_making_of_a_communicator_is_seen),
        ONE(a_living_sender_that_is_fenced_changes_no_byte),
        ONE(a_fence_waits_for_the_abort),
        ONE(memory_of_the_host_is_not_nccls_to_carry),
    };
    return cmocka_run_group_tests(tests, NULL, nothing_is_left);
}
