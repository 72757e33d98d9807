/* tests/bench/transfer_bench.c - KV blocks from one process' pool into another's, beside what the
 * machine can do without us: memcpy of the same blocks, and one tcp socket over loopback. Also the
 * seals' rate. One JSON object a line to stdout; times are medians.
 *
 * A batch is 64 blocks of 64 KiB from scattered places to scattered places and a notice; it counts
 * as done when the receiver's answer to the notice is back. Four batches are under way when the
 * rate is taken, one when the latency is. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/seal.h"
#include "common/transfer/transfer.h"

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    POOL_BYTES = 256 << 20,
    BLOCK_BYTES = 64 << 10,
    BLOCKS = POOL_BYTES / BLOCK_BYTES,
    BATCH_BLOCKS = 64,
    BATCHES = 400,
    WINDOW = 4,
};
#define BATCH_BYTES ((double)BATCH_BLOCKS * BLOCK_BYTES)

static pd_transfer_event event;
static char machine[128] = "unknown";

static void die(const char *what)
{
    fprintf(stderr, "transfer_bench: %s failed: %m\n", what);
    exit(1);
}

static void read_machine(void)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *name = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && name != NULL) {
            name[strcspn(name, "\n")] = '\0';
            snprintf(machine, sizeof machine, "%.90s, %ld cores", name + 2,
                     sysconf(_SC_NPROCESSORS_ONLN));
            break;
        }
    }
    if (file != NULL)
        fclose(file);
}

/* goal: the ratio to reach; 0: none. A latency's ratio is the peer's time over ours, so that more
 * is always better. */
static void report(const char *figure, double value, const char *unit, const char *peer,
                   double peer_value, double goal)
{
    bool latency = strcmp(unit, "us") == 0;
    double ratio = latency ? peer_value / value : value / peer_value;
    printf("{\"figure\": \"%s\", \"value\": %.3f, \"unit\": \"%s\", \"peer\": \"%s\", "
           "\"peer_value\": %.3f, \"ratio\": %.3f, \"goal\": %.2f, \"met\": %s, "
           "\"machine\": \"%s\"}\n",
           figure, value, unit, peer, peer_value, ratio, goal, ratio >= goal ? "true" : "false",
           machine);
    fflush(stdout);
}

/* A permutation of blocks without neighbours in order: nothing merges. */
static uint64_t scattered(uint64_t i)
{
    return i * 1667 % BLOCKS * BLOCK_BYTES; /* 1667 is odd, BLOCKS a power of two */
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

static pd_transfer *create(const char *transport)
{
    pd_transfer_options options = {
        .backend = "ucx", .transport = transport, .pool_bytes = POOL_BYTES, .peers_max = 1};
    pd_transfer *transfer = NULL;
    if (pd_transfer_create(&options, &transfer) != PD_OK)
        die("pd_transfer_create");
    return transfer;
}

static int receiver_main(const char *transport, int in, int out)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pd_transfer *transfer = create(transport);
    size_t bytes;
    const void *address = pd_transfer_address(transfer, &bytes);
    if (write(out, &bytes, sizeof bytes) < 0 || write(out, address, bytes) < 0)
        return 1;
    struct pollfd fds[2] = {{.fd = in, .events = POLLIN},
                            {.fd = pd_transfer_fd(transfer), .events = POLLIN}};
    while (poll(fds, 2, -1) > 0 && fds[0].revents == 0) {
        while (pd_transfer_poll(transfer, &event) == PD_OK) {
            if (event.kind == PD_TRANSFER_NOTICE && write(out, "", 1) != 1)
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

static void start_batch(pd_transfer *transfer, pd_peer peer, uint64_t batch)
{
    for (uint64_t i = 0; i < BATCH_BLOCKS; i++) {
        uint64_t n = batch * BATCH_BLOCKS + i;
        while (pd_transfer_put(transfer, peer, batch, scattered(n), scattered(n + 777),
                               BLOCK_BYTES) != PD_OK)
            usleep(10);
    }
    if (pd_transfer_notice(transfer, peer, batch, NULL, 0) != PD_OK)
        die("pd_transfer_notice");
}

static void run_transport(const char *transport, const char *peer_name, double peer_gbs)
{
    int down[2], up[2];
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
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
    size_t bytes;
    read_all(up[0], &bytes, sizeof bytes);
    read_all(up[0], address, bytes);
    pd_transfer *transfer = create(transport);
    memset(pd_transfer_pool(transfer), 7, POOL_BYTES);
    pd_peer peer;
    if (pd_transfer_connect(transfer, address, bytes, 0, &peer) != PD_OK)
        die("pd_transfer_connect");
    while (pd_transfer_poll(transfer, &event) != PD_OK)
        usleep(100);
    if (event.kind != PD_TRANSFER_CONNECTED)
        die("connecting");

    static double us[BATCHES];
    char ack;
    for (uint64_t batch = 0; batch < BATCHES; batch++) {
        uint64_t start_ns = pd_clock_now_ns();
        start_batch(transfer, peer, batch);
        read_all(up[0], &ack, 1);
        us[batch] = (double)(pd_clock_now_ns() - start_ns) / 1e3;
        while (pd_transfer_poll(transfer, &event) == PD_OK)
            ;
    }
    uint64_t start_ns = pd_clock_now_ns();
    for (uint64_t batch = 0; batch < BATCHES + WINDOW; batch++) {
        if (batch < BATCHES)
            start_batch(transfer, peer, batch);
        if (batch >= WINDOW)
            read_all(up[0], &ack, 1);
        while (pd_transfer_poll(transfer, &event) == PD_OK)
            ;
    }
    double gbs = BATCHES * BATCH_BYTES / (double)(pd_clock_now_ns() - start_ns);
    char figure[64];
    snprintf(figure, sizeof figure, "transfer %s 64 blocks of 64 KiB, rate", transport);
    report(figure, gbs, "GB/s", peer_name, peer_gbs, 0.5);
    snprintf(figure, sizeof figure, "transfer %s 64 blocks of 64 KiB, answered", transport);
    report(figure, median(us, BATCHES), "us", peer_name, BATCH_BYTES / peer_gbs / 1e3, 0.5);
    pd_transfer_destroy(transfer);
    close(down[1]);
    close(up[0]);
    waitpid(pid, NULL, 0);
}

static double memcpy_gbs(void)
{
    unsigned char *from = pd_malloc(POOL_BYTES), *to = pd_malloc(POOL_BYTES);
    if (from == NULL || to == NULL)
        die("memory");
    memset(from, 1, POOL_BYTES);
    memset(to, 2, POOL_BYTES);
    static double ns[BATCHES];
    for (uint64_t batch = 0; batch < BATCHES; batch++) {
        uint64_t start_ns = pd_clock_now_ns();
        for (uint64_t i = 0; i < BATCH_BLOCKS; i++) {
            uint64_t n = batch * BATCH_BLOCKS + i;
            memcpy(to + scattered(n + 777), from + scattered(n), BLOCK_BYTES);
        }
        ns[batch] = (double)(pd_clock_now_ns() - start_ns);
    }
    pd_free(from);
    pd_free(to);
    return BATCH_BYTES / median(ns, BATCHES);
}

static double socket_gbs(void)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, len) != 0 ||
        listen(listener, 1) != 0 || getsockname(listener, (struct sockaddr *)&address, &len) != 0)
        die("listening");
    size_t chunk = 1 << 20;
    unsigned char *bytes = pd_calloc(1, chunk);
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
    double gbs = total / (double)(pd_clock_now_ns() - start_ns);
    close(fd);
    close(listener);
    pd_free(bytes);
    return gbs;
}

static void run_seal(double peer_gbs)
{
    pd_model_shape shape = {.layers = 30, .kv_heads = 3, .head_dim = 64};
    pd_kv_layout_options options = {
        .dtype = PD_F16, .block_tokens = 16, .memory_bytes = POOL_BYTES};
    pd_kv_layout layout;
    if (pd_kv_layout_make(&shape, &options, &layout) != PD_OK)
        die("pd_kv_layout_make");
    unsigned char *pool = pd_malloc(layout.pool_bytes);
    if (pool == NULL)
        die("memory");
    memset(pool, 3, layout.pool_bytes);
    pd_seal_place place = {.request = 1, .valid_tokens = 16, .layout_fingerprint = 9};
    uint64_t sum = 0;
    uint64_t start_ns = pd_clock_now_ns();
    for (uint32_t group = 0; group < layout.groups; group++) {
        place.group = group;
        for (pd_block block = 0; block < layout.blocks; block++)
            sum += pd_seal_compute(&layout, pool, block, &place, 0, layout.kv_heads);
    }
    double gbs = (double)layout.pool_bytes / (double)(pd_clock_now_ns() - start_ns);
    volatile uint64_t sink = sum;
    (void)sink;
    /* a seal may cost as much as the copy it guards, not more */
    report("seal of cold blocks of 60 KiB", gbs, "GB/s", "memcpy", peer_gbs, 0.5);
    pd_free(pool);
}

int main(int argc, char **argv)
{
    pd_log_init("transfer_bench", PD_LOG_WARN);
    if (argc == 4)
        return receiver_main(argv[1], (int)strtol(argv[2], NULL, 10),
                             (int)strtol(argv[3], NULL, 10)); /* from our own execl */
    read_machine();
    double copy_gbs = memcpy_gbs();
    run_transport("shm", "memcpy of the same blocks", copy_gbs);
    run_transport("tcp", "one tcp socket over lo", socket_gbs());
    run_seal(copy_gbs);
    return 0;
}
