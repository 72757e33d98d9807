/* tests/bench/put_bench.c - the scattered put that common/transfer is measured against: UCX alone,
 * none of our code. Blocks of 64 KiB from scattered places to scattered places of another process'
 * pool by ucp_put_nbx, a flush, an active message, and the receiver's answer through a pipe. Both
 * sides poll without pause.
 *
 *   put_bench BLOCKS     settings by UCX_TLS and its other variables; prints "GB/s microseconds" */

#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { BLOCK_BYTES = 64 << 10, BLOCKS = 4096, ROUNDS_BLOCKS = 16384, IN_FLIGHT_BLOCKS = 256 };

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_mem_h memory;
static unsigned char *pool;
static int ack_fd;

static void check(ucs_status_t status, const char *what)
{
    if (status == UCS_OK)
        return;
    fprintf(stderr, "put_bench: %s: %s\n", what, ucs_status_string(status));
    exit(1);
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static uint64_t scattered(uint64_t i)
{
    return i * 1667 % BLOCKS * BLOCK_BYTES;
}

static void init(void)
{
    ucp_config_t *config;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_RMA | UCP_FEATURE_AM};
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                         .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_mem_map_params_t map = {.field_mask =
                                    UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                                .length = (size_t)BLOCKS * BLOCK_BYTES,
                                .flags = UCP_MEM_MAP_ALLOCATE};
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    check(ucp_config_read(NULL, NULL, &config), "config");
    check(ucp_init(&params, config, &context), "init");
    ucp_config_release(config);
    check(ucp_worker_create(context, &worker_params, &worker), "worker");
    check(ucp_mem_map(context, &map, &memory), "pool");
    check(ucp_mem_query(memory, &attr), "pool");
    pool = attr.address;
    memset(pool, 7, (size_t)BLOCKS * BLOCK_BYTES);
}

static ucs_status_t on_notice(void *arg, const void *header, size_t header_len, void *data,
                              size_t len, const ucp_am_recv_param_t *param)
{
    (void)arg, (void)header, (void)header_len, (void)param;
    if (len == sizeof(uint32_t) && write(ack_fd, data, len) != (ssize_t)len)
        _exit(1);
    return UCS_OK;
}

static void write_part(int fd, const void *bytes, size_t len)
{
    if (write(fd, &len, sizeof len) < 0 || write(fd, bytes, len) < 0)
        _exit(1);
}

static int receiver_main(int in, int out)
{
    ucp_address_t *address;
    size_t len, rkey_len;
    void *rkey;
    uint64_t base;
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                    UCP_AM_HANDLER_PARAM_FIELD_CB,
                                      .id = 1,
                                      .cb = on_notice};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    init();
    ack_fd = out;
    base = (uintptr_t)pool;
    check(ucp_worker_set_am_recv_handler(worker, &handler), "handler");
    check(ucp_worker_get_address(worker, &address, &len), "address");
    check(ucp_rkey_pack(context, memory, &rkey, &rkey_len), "key");
    write_part(out, address, len);
    write_part(out, rkey, rkey_len);
    write_part(out, &base, sizeof base);
    struct pollfd fd = {.fd = in, .events = POLLIN};
    while (poll(&fd, 1, 0) == 0) {
        for (int i = 0; i < 1000; i++)
            ucp_worker_progress(worker);
    }
    _exit(0);
}

static void read_all(int fd, void *bytes, size_t len)
{
    for (size_t got = 0; got < len;) {
        ssize_t n = read(fd, (char *)bytes + got, len - got);
        if (n <= 0)
            exit(1);
        got += (size_t)n;
    }
}

static void *read_part(int fd)
{
    size_t len;
    read_all(fd, &len, sizeof len);
    void *bytes = malloc(len);
    if (bytes == NULL)
        exit(1);
    read_all(fd, bytes, len);
    return bytes;
}

static void finish(void *request)
{
    if (request == NULL)
        return;
    if (UCS_PTR_IS_ERR(request))
        check(UCS_PTR_STATUS(request), "operation");
    while (ucp_request_check_status(request) == UCS_INPROGRESS)
        ucp_worker_progress(worker);
    check(ucp_request_check_status(request), "operation");
    ucp_request_free(request);
}

static void put_batch(ucp_ep_h ep, ucp_rkey_h rkey, uint64_t base, uint64_t from, uint32_t blocks)
{
    static void *requests[ROUNDS_BLOCKS];
    ucp_request_param_t memh = {.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH, .memh = memory};
    ucp_request_param_t none = {0};
    for (uint32_t i = 0; i < blocks; i++)
        requests[i] = ucp_put_nbx(ep, pool + scattered(from + i), BLOCK_BYTES,
                                  base + scattered(from + i + 777), rkey, &memh);
    for (uint32_t i = 0; i < blocks; i++)
        finish(requests[i]);
    finish(ucp_ep_flush_nbx(ep, &none));
    finish(ucp_am_send_nbx(ep, 1, NULL, 0, &blocks, sizeof blocks, &none));
}

static uint64_t take_acks(int fd, int wait)
{
    uint64_t acked = 0;
    uint32_t count;
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    while (poll(&ready, 1, 0) > 0 || (wait && acked == 0)) {
        ucp_worker_progress(worker);
        if (ready.revents == 0)
            continue;
        read_all(fd, &count, sizeof count);
        acked += count;
    }
    return acked;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void measure(int acks, uint32_t blocks)
{
    static double us[ROUNDS_BLOCKS];
    void *address = read_part(acks), *packed = read_part(acks), *base = read_part(acks);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = address};
    ucp_ep_h ep;
    ucp_rkey_h rkey;
    uint64_t target, asked = 0, acked = 0, in_flight = 2 * blocks;
    uint32_t batches = ROUNDS_BLOCKS / blocks;
    memcpy(&target, base, sizeof target);
    check(ucp_ep_create(worker, &params, &ep), "endpoint");
    check(ucp_ep_rkey_unpack(ep, packed, &rkey), "key");
    for (uint32_t i = 0; i < batches; i++, asked += blocks) {
        double start = now_ns();
        put_batch(ep, rkey, target, asked, blocks);
        while (acked < asked + blocks)
            acked += take_acks(acks, 1);
        us[i] = (now_ns() - start) / 1e3;
    }
    if (in_flight < IN_FLIGHT_BLOCKS)
        in_flight = IN_FLIGHT_BLOCKS;
    double start = now_ns();
    uint64_t until = asked + (uint64_t)batches * blocks;
    while (acked < until) {
        if (asked < until && asked - acked < in_flight) {
            put_batch(ep, rkey, target, asked, blocks);
            asked += blocks;
        }
        acked += take_acks(acks, asked == until || asked - acked >= in_flight);
    }
    double ns = now_ns() - start;
    qsort(us, batches, sizeof *us, compare);
    printf("%.3f %.1f\n", (double)batches * blocks * BLOCK_BYTES / ns, us[batches / 2]);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    int down[2], up[2];
    if (argc == 3)
        return receiver_main((int)strtol(argv[1], NULL, 10), (int)strtol(argv[2], NULL, 10));
    uint32_t blocks = argc == 2 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0;
    if (blocks == 0 || blocks > ROUNDS_BLOCKS || pipe(down) != 0 || pipe(up) != 0)
        return 2;
    pid_t pid = fork();
    if (pid == 0) {
        char in[16], out[16];
        close(down[1]);
        snprintf(in, sizeof in, "%d", down[0]);
        snprintf(out, sizeof out, "%d", up[1]);
        execl("/proc/self/exe", "receiver", in, out, (char *)NULL);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    init();
    measure(up[0], blocks);
    kill(pid, SIGKILL); /* it has nothing to say any more */
    waitpid(pid, NULL, 0);
    return 0;
}
