#include "tests/unit/transfer/two_processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

pd_transfer_event event;

/* Of this process' pool in pieces; count 0: there is none. */
static struct {
    uint32_t count;
    void *memory[PD_TRANSFER_PIECES_MAX];
} given;

unsigned char *pool_at(const pd_transfer *transfer, uint64_t offset)
{
    uint64_t piece_bytes = POOL_BYTES / (given.count == 0 ? 1 : given.count);
    if (given.count == 0)
        return (unsigned char *)pd_transfer_pool(transfer) + offset;
    return (unsigned char *)given.memory[offset / piece_bytes] + offset % piece_bytes;
}

static answer check_claims(const pd_transfer *transfer)
{
    answer a = {0};
    for (size_t at = 0; at + sizeof(claim) <= event.notice_len; at += sizeof(claim)) {
        claim c;
        memcpy(&c, event.notice + at, sizeof c);
        a.claims++;
        a.wrong += pd_hash64(pool_at(transfer, c.offset), c.bytes, 0) != c.hash;
    }
    return a;
}

/* at: NULL, or where, over what is mapped there. */
static void *outside_bytes(void *at, size_t bytes, bool shared)
{
    int fd = shared ? memfd_create("pool", MFD_CLOEXEC) : -1;
    int how = (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | (at == NULL ? 0 : MAP_FIXED);
    if (shared && (fd < 0 || ftruncate(fd, (off_t)bytes) != 0))
        return NULL;
    void *memory = mmap(at, bytes, PROT_READ | PROT_WRITE, how, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void *outside_memory(bool shared)
{
    return outside_bytes(NULL, pd_transfer_pool_room(POOL_BYTES), shared);
}

/* A page that nothing may touch lies around each. */
static void give_pieces(pd_transfer_options *options, uint32_t count, bool shared)
{
    size_t bytes = pd_transfer_pool_room(POOL_BYTES / count), page = 4096;
    given.count = count;
    for (uint32_t i = 0; i < count; i++) {
        unsigned char *around =
            mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        given.memory[i] = around == MAP_FAILED ? NULL : outside_bytes(around + page, bytes, shared);
    }
    options->pieces = count;
    options->piece_memory = given.memory;
}

/* Tells the stand-in for the driver which device has which piece. */
static void place_pieces(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int (*place)(void *memory, size_t bytes, int device);
    void *found = driver == NULL ? NULL : dlsym(driver, "stand_in_place");
    if (found == NULL)
        abort();
    memcpy(&place, &found, sizeof found);
    for (uint32_t i = 0; i < given.count; i++) {
        /* not in the order of the pieces */
        if (place(given.memory[i], pd_transfer_pool_room(POOL_BYTES / given.count),
                  (int)((i + 3) % 4)) != 0)
            abort();
    }
}

void read_transport(pd_transfer_options *options)
{
    const char *colon = strchr(options->transport, ':');
    given.count = 0;
    if (colon != NULL) {
        give_pieces(options, (uint32_t)atoi(colon + 1),
                    options->transport[1] == 'h' && options->transport[2] == 'a');
        bool gpu = options->transport[0] == 'g';
        if (gpu) {
            place_pieces();
            options->pool_kind = PD_MEMORY_CUDA;
        }
        options->transport = gpu || options->transport[0] == 't' ? "tcp" : "shm";
        return;
    }
    if (strncmp(options->transport, "nccl", 4) == 0) {
        options->backend = "nccl";
        options->transport = strcmp(options->transport, "nccl") == 0 ? "auto" : "tcp";
        options->pool = outside_memory(false);
        options->pool_kind = PD_MEMORY_CUDA;
    }
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
    for (size_t i = 0; i < POOL_BYTES; i++) {
        if (*pool_at(transfer, i) != 0)
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
            answer a = check_claims(transfer);
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

void read_all(int fd, void *bytes, size_t len)
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
receiver process_start(const char *role, const char *transport)
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

receiver receiver_start_as(const char *role, const char *transport)
{
    receiver r = process_start(role, transport);
    const char *colon = strchr(transport, ':');
    r.pool_pieces = colon == NULL ? 0 : (uint32_t)atoi(colon + 1);
    read_all(r.in, &r.address_bytes, sizeof r.address_bytes);
    assert_true(r.address_bytes <= sizeof r.address);
    read_all(r.in, r.address, r.address_bytes);
    return r;
}

receiver receiver_start(const char *transport)
{
    return receiver_start_as("receiver", transport);
}

void receiver_end(receiver *r)
{
    int status;
    close(r->out);
    assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(r->in);
}

void receiver_kill(receiver *r)
{
    kill(r->pid, SIGKILL);
    assert_int_equal(waitpid(r->pid, NULL, 0), r->pid);
    close(r->out);
    close(r->in);
}

/* ---- the sender ---- */

const char *transport_of(void **state)
{
    return *state;
}

pd_transfer *sender_create(const char *transport, uint32_t stall_ms)
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
bool next_event(pd_transfer *transfer, int wait_ms)
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

void expect(pd_transfer *transfer, pd_transfer_event_kind kind, pd_status status)
{
    assert_true(next_event(transfer, 20000));
    assert_int_equal(event.kind, kind);
    assert_int_equal(event.status, status);
}

pd_peer connect_to(pd_transfer *transfer, const receiver *r, uint64_t tag)
{
    pd_peer peer;
    assert_int_equal(pd_transfer_connect(transfer, r->address, r->address_bytes, tag, &peer),
                     PD_OK);
    expect(transfer, PD_TRANSFER_CONNECTED, PD_OK);
    assert_int_equal(event.peer, peer);
    assert_int_equal(event.tag, tag);
    return peer;
}

void close_peer(pd_transfer *transfer, pd_peer peer)
{
    pd_transfer_close(transfer, peer);
    expect(transfer, PD_TRANSFER_CLOSED, PD_OK);
    assert_int_equal(event.peer, peer);
}

/* Puts pieces of fresh content to places of our choosing and says so; the receiver must agree. */
void round_trip(pd_transfer *transfer, pd_peer peer, receiver *r, uint64_t *random, uint32_t pieces)
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

/* Fences the senders off; notices of theirs may come before. */
void fence_all(pd_transfer *transfer, const receiver *senders, uint32_t count)
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

int process_role(int argc, char **argv)
{
    if (argc != 4)
        return -1;
    const char *role = argv[0], *transport = argv[1];
    int in = atoi(argv[2]), out = atoi(argv[3]);
    if (strcmp(role, "receiver") == 0 || strcmp(role, "outside") == 0)
        return receiver_main(transport, in, out, strcmp(role, "outside") == 0);
    return sender_main(transport, in, out, strcmp(role, "filler") == 0 ? EVENTS_KEPT : 0);
}
