/* tests/bench/transfer_bench.c - scattered KV blocks of 64 KiB from one process' pool into
 * another's, by the way that workers take (common/worker/ship over common/transfer), and what the
 * machine can do without us. One run, one line: "GB/s microseconds".
 *
 *   transfer_bench ship TRANSPORT BLOCKS SEALS(0, 1)   batches of BLOCKS, as shipments
 *   transfer_bench copy BLOCKS                         memcpy of the same blocks, one thread
 *   transfer_bench socket                              bytes over one tcp socket on lo
 *
 * The rate has several batches under way, the time is one batch's, from asking to acknowledged:
 * bytes count when the receiver has answered the notice that speaks of them. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/ship.h"

#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    BLOCK_BYTES = 64 << 10,
    BLOCKS = 4096, /* of a pool */
    BATCH_BLOCKS_MAX = 1024,
    ROUNDS_BLOCKS = 16384, /* moved by one measurement */
    IN_FLIGHT_BLOCKS = 256,
};

static pd_transfer_event event;
static uint64_t seals[PD_NOTICE_SEALS_MAX];

static void die(const char *what)
{
    fprintf(stderr, "transfer_bench: %s failed: %m\n", what);
    exit(1);
}

static void report(double gbs, double us)
{
    printf("%.3f %.1f\n", gbs, us);
}

/* A permutation of blocks without neighbours in order: nothing merges. */
static uint32_t scattered(uint64_t i)
{
    return (uint32_t)(i * 1667 % BLOCKS); /* 1667 is odd, BLOCKS a power of two */
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

/* One group whose block is 64 KiB. */
static pd_kv_layout make_layout(void)
{
    pd_model_shape shape = {.layers = 4, .kv_heads = 4, .head_dim = 64};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 4,
                                    .memory_bytes = (uint64_t)BLOCKS * BLOCK_BYTES};
    pd_kv_layout layout;
    if (pd_kv_layout_make(&shape, &options, &layout) != PD_OK || layout.blocks != BLOCKS ||
        pd_kv_layout_block_bytes(&layout, 0) != BLOCK_BYTES)
        die("pd_kv_layout_make");
    return layout;
}

static pd_transfer *create(const char *transport)
{
    pd_transfer_options options = {.backend = "ucx",
                                   .transport = transport,
                                   .pool_bytes = (uint64_t)BLOCKS * BLOCK_BYTES,
                                   .peers_max = 1};
    pd_transfer *transfer = NULL;
    if (pd_transfer_create(&options, &transfer) != PD_OK)
        die("pd_transfer_create");
    memset(pd_transfer_pool(transfer), 7, options.pool_bytes);
    return transfer;
}

/* Answers each notice with its number of blocks. */
static int receiver_main(const char *transport, int in, int out)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pd_transfer *transfer = create(transport);
    pd_notice notice;
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    if (write(out, &bytes, sizeof bytes) < 0 || write(out, address, bytes) < 0)
        return 1;
    struct pollfd fds[2] = {{.fd = in, .events = POLLIN},
                            {.fd = pd_transfer_fd(transfer), .events = POLLIN}};
    while (poll(fds, 2, -1) > 0 && fds[0].revents == 0) {
        while (pd_transfer_poll(transfer, &event) == PD_OK) {
            if (event.kind != PD_TRANSFER_NOTICE)
                continue;
            if (pd_notice_unpack(event.notice, event.notice_len, seals, &notice) != PD_OK ||
                write(out, &notice.count, sizeof notice.count) < 0)
                return 1;
        }
    }
    pd_transfer_destroy(transfer);
    return 0;
}

static void read_all(int fd, void *bytes, size_t len)
{
    for (size_t got = 0; got < len;) {
        ssize_t n = read(fd, (char *)bytes + got, len - got);
        if (n <= 0)
            die("the receiver");
        got += (size_t)n;
    }
}

typedef struct sender {
    pd_kv_layout layout;
    pd_transfer *transfer;
    pd_host_pool pool;
    pd_shipper *shipper;
    pd_peer peer;
    int acks;
    uint64_t asked, acked; /* blocks */
} sender;

static void ask_batch(sender *s, uint32_t blocks)
{
    static pd_block sources[BATCH_BLOCKS_MAX], targets[BATCH_BLOCKS_MAX];
    for (uint32_t i = 0; i < blocks; i++) {
        sources[i] = scattered(s->asked + i);
        targets[i] = scattered(s->asked + i + 777);
    }
    pd_shipment shipment = {.peer = s->peer,
                            .ticket = 1 + s->asked / blocks,
                            .key = {1, 1, 1},
                            .groups = 1,
                            .count = blocks,
                            .sources = sources,
                            .targets = targets,
                            .valid_tokens = 16};
    if (pd_ship_post(s->shipper, &shipment) != PD_OK)
        die("pd_ship_post");
    s->asked += blocks;
}

/* What a worker's loop does in a turn; sleeps when there is nothing. */
static void turn(sender *s)
{
    bool more = pd_ship_pump(s->shipper);
    struct pollfd fds[2] = {{.fd = s->acks, .events = POLLIN},
                            {.fd = pd_transfer_fd(s->transfer), .events = POLLIN}};
    if (poll(fds, 2, more ? 0 : 1000) < 0)
        die("poll");
    if (fds[1].revents != 0) {
        while (pd_transfer_poll(s->transfer, &event) == PD_OK) {
            if (event.kind != PD_TRANSFER_SENT || event.status != PD_OK ||
                !pd_ship_sent(s->shipper, &event))
                die("shipping");
        }
        while (pd_ship_poll(s->shipper, &event) == PD_OK)
            ;
    }
    if (fds[0].revents != 0) {
        uint32_t count;
        read_all(s->acks, &count, sizeof count);
        s->acked += count;
    }
}

static void connect_sender(sender *s, const char *transport, bool sealed, int acks)
{
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
    size_t bytes;
    *s = (sender){.layout = make_layout(), .transfer = create(transport), .acks = acks};
    read_all(acks, &bytes, sizeof bytes);
    read_all(acks, address, bytes);
    s->pool = (pd_host_pool){.layout = &s->layout, .pool = pd_transfer_pool(s->transfer)};
    pd_shipper_options options = {.transfer = s->transfer, .layout = &s->layout, .peers_max = 1};
    if (sealed)
        options.sealer = pd_host_sealer(&s->pool);
    if (pd_ship_create(&options, &s->shipper) != PD_OK ||
        pd_transfer_connect(s->transfer, address, bytes, 0, &s->peer) != PD_OK)
        die("connecting");
    pd_ship_open(s->shipper, s->peer, &s->layout, 0);
    while (pd_transfer_poll(s->transfer, &event) != PD_OK)
        usleep(100);
    if (event.kind != PD_TRANSFER_CONNECTED)
        die("connecting");
}

static void measure(sender *s, uint32_t blocks)
{
    static double us[ROUNDS_BLOCKS];
    uint32_t batches = ROUNDS_BLOCKS / blocks;
    uint64_t in_flight = IN_FLIGHT_BLOCKS > 2 * blocks ? IN_FLIGHT_BLOCKS : 2 * blocks;
    for (uint32_t i = 0; i < batches; i++) {
        uint64_t start_ns = pd_clock_now_ns();
        ask_batch(s, blocks);
        while (s->acked < s->asked)
            turn(s);
        us[i] = (double)(pd_clock_now_ns() - start_ns) / 1e3;
    }
    uint64_t start_ns = pd_clock_now_ns(), until = s->acked + (uint64_t)batches * blocks;
    while (s->acked < until) {
        while (s->asked < until && s->asked - s->acked < in_flight)
            ask_batch(s, blocks);
        turn(s);
    }
    double ns = (double)(pd_clock_now_ns() - start_ns);
    pd_ship_stats stats = pd_ship_read_stats(s->shipper);
    fprintf(stderr, "transfer_bench: post_share=%.3f seal_share=%.3f\n",
            (double)stats.post_ns / (double)stats.wire_ns,
            (double)stats.seal_ns / (double)stats.wire_ns);
    report((double)batches * blocks * BLOCK_BYTES / ns, median(us, batches));
}

static int run_ship(const char *transport, uint32_t blocks, bool sealed)
{
    int down[2], up[2];
    sender s;
    if (pipe(down) != 0 || pipe(up) != 0)
        die("pipe");
    pid_t pid = fork();
    if (pid == 0) {
        char in[16], out[16];
        close(down[1]);
        snprintf(in, sizeof in, "%d", down[0]);
        snprintf(out, sizeof out, "%d", up[1]);
        execl("/proc/self/exe", "receiver", transport, in, out, (char *)NULL);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    connect_sender(&s, transport, sealed, up[0]);
    measure(&s, blocks);
    pd_ship_destroy(s.shipper);
    pd_transfer_destroy(s.transfer);
    close(down[1]);
    close(up[0]);
    waitpid(pid, NULL, 0);
    return 0;
}

static int run_copy(uint32_t blocks)
{
    unsigned char *from = pd_malloc((uint64_t)BLOCKS * BLOCK_BYTES);
    unsigned char *to = pd_malloc((uint64_t)BLOCKS * BLOCK_BYTES);
    static double ns[ROUNDS_BLOCKS];
    uint32_t batches = ROUNDS_BLOCKS / blocks;
    if (from == NULL || to == NULL)
        die("memory");
    memset(from, 1, (uint64_t)BLOCKS * BLOCK_BYTES);
    memset(to, 2, (uint64_t)BLOCKS * BLOCK_BYTES);
    for (uint64_t batch = 0; batch < batches; batch++) {
        uint64_t start_ns = pd_clock_now_ns();
        for (uint64_t i = 0; i < blocks; i++) {
            uint64_t n = batch * blocks + i;
            memcpy(to + (uint64_t)scattered(n + 777) * BLOCK_BYTES,
                   from + (uint64_t)scattered(n) * BLOCK_BYTES, BLOCK_BYTES);
        }
        ns[batch] = (double)(pd_clock_now_ns() - start_ns);
    }
    double middle = median(ns, batches);
    report((double)blocks * BLOCK_BYTES / middle, middle / 1e3);
    pd_free(from);
    pd_free(to);
    return 0;
}

static int run_socket(void)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, len) != 0 ||
        listen(listener, 1) != 0 || getsockname(listener, (struct sockaddr *)&address, &len) != 0)
        die("listening");
    size_t chunk = 1 << 20;
    unsigned char *bytes = pd_calloc(1, chunk);
    if (bytes == NULL)
        die("memory");
    pid_t pid = fork();
    if (pid == 0) {
        int fd = accept(listener, NULL, NULL);
        while (read(fd, bytes, chunk) > 0)
            ;
        _exit(0);
    }
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, len) != 0)
        die("connecting");
    uint64_t start_ns = pd_clock_now_ns();
    double total = 0;
    while (pd_clock_now_ns() - start_ns < PD_NS_PER_S) {
        ssize_t n = write(fd, bytes, chunk);
        if (n <= 0)
            die("writing");
        total += (double)n;
    }
    shutdown(fd, SHUT_WR);
    waitpid(pid, NULL, 0); /* until all was read */
    report(total / (double)(pd_clock_now_ns() - start_ns), 0);
    close(fd);
    close(listener);
    pd_free(bytes);
    return 0;
}

int main(int argc, char **argv)
{
    pd_log_init("transfer_bench", PD_LOG_WARN);
    if (argc == 4 && strcmp(argv[0], "receiver") == 0)
        return receiver_main(argv[1], (int)strtol(argv[2], NULL, 10),
                             (int)strtol(argv[3], NULL, 10)); /* from our own execl */
    uint32_t blocks = argc > 2 ? (uint32_t)strtoul(argv[argc == 5 ? 3 : 2], NULL, 10) : 0;
    bool fits = blocks > 0 && blocks <= BATCH_BLOCKS_MAX;
    if (argc == 5 && strcmp(argv[1], "ship") == 0 && fits)
        return run_ship(argv[2], blocks, strcmp(argv[4], "1") == 0);
    if (argc == 3 && strcmp(argv[1], "copy") == 0 && fits)
        return run_copy(blocks);
    if (argc == 2 && strcmp(argv[1], "socket") == 0)
        return run_socket();
    fprintf(stderr, "usage: transfer_bench ship TRANSPORT BLOCKS SEALS | copy BLOCKS | socket\n");
    return 2;
}
