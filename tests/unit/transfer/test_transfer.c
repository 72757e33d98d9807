/* Two real processes: this one sends, and starts itself again as the receiver, which checks what
 * lies in its pool at the moment a notice arrives. */

#include "common/transfer/transfer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    POOL_BYTES = 8 << 20,
    PIECE_BYTES = 60 << 10,
    PIECES = POOL_BYTES / PIECE_BYTES,
    EVENTS_KEPT = 5000, /* more than wait for a loop that takes none */
};

/* What a notice says: these pieces of your pool have these hashes now. */
typedef struct claim {
    uint64_t offset, bytes, hash;
} claim;

/* The receiver's answer to a notice. */
typedef struct answer {
    uint32_t claims, wrong;
} answer;

/* ---- the receiver ---- */

static pd_transfer_event event; /* large: not for the stack */

static answer check_claims(const unsigned char *pool)
{
    answer a = {0};
    for (size_t at = 0; at + sizeof(claim) <= event.notice_len; at += sizeof(claim)) {
        claim c;
        memcpy(&c, event.notice + at, sizeof c);
        a.claims++;
        a.wrong += pd_hash64(pool + c.offset, c.bytes, 0) != c.hash;
    }
    return a;
}

/* Memory for a pool that no transfer made; shared: that peers can map. */
static void *outside_memory(bool shared)
{
    size_t bytes = pd_transfer_pool_room(POOL_BYTES);
    int fd = shared ? memfd_create("pool", MFD_CLOEXEC) : -1;
    if (shared && (fd < 0 || ftruncate(fd, (off_t)bytes) != 0))
        return NULL;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* "shared" is shm between pools that their owners gave. */
static void read_transport(pd_transfer_options *options)
{
    if (strcmp(options->transport, "shared") != 0)
        return;
    options->transport = "shm";
    options->pool = outside_memory(true);
}

static int receiver_main(const char *transport, int in, int out, bool outside)
{
    pd_log_init("receiver", PD_LOG_ERROR);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pd_transfer_options options = {
        .backend = "ucx", .transport = transport, .pool_bytes = POOL_BYTES, .peers_max = 2};
    read_transport(&options);
    if (outside)
        options.pool = outside_memory(false);
    pd_transfer *transfer = NULL;
    if (pd_transfer_create(&options, &transfer) != PD_OK)
        return 2;
    const unsigned char *pool = pd_transfer_pool(transfer);
    for (size_t i = 0; i < POOL_BYTES; i++) {
        if (pool[i] != 0)
            return 3;
    }
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    if (write(out, &bytes, sizeof bytes) < 0 || write(out, address, bytes) < 0)
        return 4;
    struct pollfd fds[2] = {{.fd = in, .events = POLLIN},
                            {.fd = pd_transfer_fd(transfer), .events = POLLIN}};
    for (;;) {
        poll(fds, 2, -1);
        while (pd_transfer_poll(transfer, &event) == PD_OK) {
            if (event.kind != PD_TRANSFER_NOTICE)
                continue;
            answer a = check_claims(pool);
            if (write(out, &a, sizeof a) < 0)
                return 5;
        }
        if ((fds[0].revents & (POLLIN | POLLHUP)) != 0)
            break; /* the sender closed its end */
    }
    pd_transfer_destroy(transfer);
    return 0;
}

/* The other way round: writes to the address it reads from in, for ever; first, without bytes, as
 * many notices as are asked for, when it is connected and told to begin. */
static int sender_main(const char *transport, int in, int out, uint32_t empty)
{
    pd_log_init("sender", PD_LOG_ERROR);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pd_transfer_options options = {.backend = "ucx",
                                   .transport = transport,
                                   .pool_bytes = POOL_BYTES,
                                   .peers_max = 2,
                                   .incarnation = (uint64_t)getpid()};
    pd_transfer *transfer = NULL;
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
    ssize_t bytes = read(in, address, sizeof address);
    read_transport(&options);
    pd_peer peer;
    if (bytes <= 0 || pd_transfer_create(&options, &transfer) != PD_OK ||
        pd_transfer_connect(transfer, address, (size_t)bytes, 0, &peer) != PD_OK)
        return 2;
    char word;
    while (empty != 0 &&
           (pd_transfer_poll(transfer, &event) != PD_OK || event.kind != PD_TRANSFER_CONNECTED))
        usleep(1000);
    if (empty != 0 && (write(out, "", 1) != 1 || read(in, &word, 1) != 1))
        return 4;
    for (uint32_t i = 0;; i++) {
        while (pd_transfer_poll(transfer, &event) == PD_OK)
            ;
        if ((i >= empty &&
             pd_transfer_put(transfer, peer, i, 0, (i % 8) << 20, 1 << 20) != PD_OK) ||
            pd_transfer_notice(transfer, peer, i, &i, sizeof i) != PD_OK)
            usleep(1000);
        if (i == empty + 50 && write(out, "", 1) != 1)
            return 3;
    }
}

typedef struct receiver {
    pid_t pid;
    int in, out; /* ours: what we read, what we write */
    size_t address_bytes;
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
} receiver;

static void read_all(int fd, void *bytes, size_t len)
{
    for (size_t got = 0; got < len;) {
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&poll_fd, 1, 20000), 1);
        ssize_t n = read(fd, (char *)bytes + got, len - got);
        assert_true(n > 0);
        got += (size_t)n;
    }
}

/* Starts this program again in a role: "receiver", "outside" (a receiver whose pool is outside
 * memory), "sender" or "filler". */
static receiver process_start(const char *role, const char *transport)
{
    int down[2], up[2];
    receiver r = {0};
    assert_int_equal(pipe(down) | pipe(up), 0);
    r.pid = fork();
    assert_true(r.pid >= 0);
    if (r.pid == 0) {
        char in[16], out[16];
        close(down[1]);
        close(up[0]);
        snprintf(in, sizeof in, "%d", down[0]);
        snprintf(out, sizeof out, "%d", up[1]);
        execl("/proc/self/exe", role, transport, in, out, (char *)NULL);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    r.in = up[0];
    r.out = down[1];
    return r;
}

static receiver receiver_start_as(const char *role, const char *transport)
{
    receiver r = process_start(role, transport);
    read_all(r.in, &r.address_bytes, sizeof r.address_bytes);
    assert_true(r.address_bytes <= sizeof r.address);
    read_all(r.in, r.address, r.address_bytes);
    return r;
}

static receiver receiver_start(const char *transport)
{
    return receiver_start_as("receiver", transport);
}

static void receiver_end(receiver *r)
{
    int status;
    close(r->out);
    assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(r->in);
}

static void receiver_kill(receiver *r)
{
    kill(r->pid, SIGKILL);
    assert_int_equal(waitpid(r->pid, NULL, 0), r->pid);
    close(r->out);
    close(r->in);
}

/* ---- the sender ---- */

static const char *transport_of(void **state)
{
    return *state;
}

static pd_transfer *sender_create(const char *transport, uint32_t stall_ms)
{
    pd_transfer_options options = {.backend = "ucx",
                                   .transport = transport,
                                   .pool_bytes = POOL_BYTES,
                                   .peers_max = 3,
                                   .stall_ms = stall_ms};
    pd_transfer *transfer = NULL;
    read_transport(&options);
    assert_int_equal(pd_transfer_create(&options, &transfer), PD_OK);
    return transfer;
}

/* The next event, or false after wait_ms. */
static bool next_event(pd_transfer *transfer, int wait_ms)
{
    uint64_t end_ns = pd_clock_now_ns() + (uint64_t)wait_ms * PD_NS_PER_MS;
    while (pd_transfer_poll(transfer, &event) != PD_OK) {
        struct pollfd poll_fd = {.fd = pd_transfer_fd(transfer), .events = POLLIN};
        uint64_t now_ns = pd_clock_now_ns();
        if (now_ns >= end_ns)
            return false;
        poll(&poll_fd, 1, (int)((end_ns - now_ns) / PD_NS_PER_MS) + 1);
    }
    return true;
}

static void expect(pd_transfer *transfer, pd_transfer_event_kind kind, pd_status status)
{
    assert_true(next_event(transfer, 20000));
    assert_int_equal(event.kind, kind);
    assert_int_equal(event.status, status);
}

static pd_peer connect_to(pd_transfer *transfer, const receiver *r, uint64_t tag)
{
    pd_peer peer;
    assert_int_equal(pd_transfer_connect(transfer, r->address, r->address_bytes, tag, &peer),
                     PD_OK);
    expect(transfer, PD_TRANSFER_CONNECTED, PD_OK);
    assert_int_equal(event.peer, peer);
    assert_int_equal(event.tag, tag);
    return peer;
}

static void close_peer(pd_transfer *transfer, pd_peer peer)
{
    pd_transfer_close(transfer, peer);
    expect(transfer, PD_TRANSFER_CLOSED, PD_OK);
    assert_int_equal(event.peer, peer);
}

/* Puts pieces of fresh content to places of our choosing and says so; the receiver must agree. */
static void round_trip(pd_transfer *transfer, pd_peer peer, receiver *r, uint64_t *random,
                       uint32_t pieces)
{
    unsigned char *pool = pd_transfer_pool(transfer);
    claim claims[64];
    uint64_t bytes = 0;
    uint64_t first = pd_random_next(random) % (PIECES - pieces);
    bool run = pd_random_next(random) % 2 == 0; /* neighbours, or in reverse order */
    assert_true(pieces <= 64);
    for (uint32_t i = 0; i < pieces; i++) {
        uint64_t source = (first + i) * PIECE_BYTES;
        claim c = {.offset = (run ? first + i : first + pieces - i) * PIECE_BYTES,
                   .bytes = 1 + pd_random_next(random) % PIECE_BYTES};
        if (run)
            c.bytes = PIECE_BYTES;
        for (uint64_t b = 0; b + 8 <= PIECE_BYTES; b += 8) {
            uint64_t word = pd_random_next(random);
            memcpy(pool + source + b, &word, 8);
        }
        c.hash = pd_hash64(pool + source, c.bytes, 0);
        claims[i] = c;
        bytes += c.bytes;
        assert_int_equal(pd_transfer_put(transfer, peer, 77, source, c.offset, c.bytes), PD_OK);
    }
    assert_int_equal(pd_transfer_notice(transfer, peer, 77, claims, pieces * sizeof *claims),
                     PD_OK);
    expect(transfer, PD_TRANSFER_SENT, PD_OK);
    assert_int_equal(event.ticket, 77);
    assert_int_equal(event.bytes, bytes);
    assert_true(pieces == 0 || event.wire_ns > 0);
    answer a;
    read_all(r->in, &a, sizeof a);
    assert_int_equal(a.claims, pieces);
    assert_int_equal(a.wrong, 0);
}

static void all_bytes_are_there_when_the_notice_arrives(void **state)
{
    receiver r = receiver_start(transport_of(state));
    pd_transfer *transfer = sender_create(transport_of(state), 0);
    pd_peer peer = connect_to(transfer, &r, 5);
    bool shm = strcmp(transport_of(state), "tcp") != 0;
    assert_true(shm ? strstr(event.lane, "posix") != NULL && strstr(event.lane, "tcp") == NULL
                    : strcmp(event.lane, "tcp") == 0);
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

/* Fences the senders off; notices of theirs may come before. */
static void fence_all(pd_transfer *transfer, const receiver *senders, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(pd_transfer_fence(transfer, (uint64_t)senders[i].pid), PD_OK);
    for (uint32_t i = 0; i < count;) {
        assert_true(next_event(transfer, 20000));
        if (event.kind == PD_TRANSFER_NOTICE)
            continue;
        assert_int_equal(event.kind, PD_TRANSFER_FENCED);
        assert_int_equal(event.tag, senders[i++].pid);
    }
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

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[0], "receiver") == 0)
        return receiver_main(argv[1], atoi(argv[2]), atoi(argv[3]), false);
    if (argc == 4 && strcmp(argv[0], "outside") == 0)
        return receiver_main(argv[1], atoi(argv[2]), atoi(argv[3]), true);
    if (argc == 4)
        return sender_main(argv[1], atoi(argv[2]), atoi(argv[3]),
                           strcmp(argv[0], "filler") == 0 ? EVENTS_KEPT : 0);
    pd_log_init("test", getenv("TEST_LOG") != NULL ? PD_LOG_DEBUG : PD_LOG_ERROR);
    signal(SIGPIPE, SIG_IGN);
    cmocka_set_test_filter(getenv("TEST_FILTER")); /* NULL: all */
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
        ALL(connecting_to_a_dead_peer_fails_in_time),
        ALL(closing_fails_everything_under_way_at_once),
        {"a_peer_that_hangs_is_given_up_in_time/tcp", a_peer_that_hangs_is_given_up_in_time, NULL,
         NULL, "tcp"},
        ALL(no_put_leaves_the_pools),
        BOTH(addresses_that_are_none_are_refused),
        BOTH(a_peer_on_another_transport_is_told_apart),
        cmocka_unit_test(what_cannot_be_made_is_refused_without_a_trace),
    };
    return cmocka_run_group_tests(tests, NULL, nothing_is_left);
}
