/* libnccl.so.2 for tests without GPUs: communicators of two ranks over shared memory, with NCCL's
 * binary interface and its manners: two-sided, in order on a stream, one group one kernel; a rank
 * whose peer is missing or dead waits for ever, until it is aborted.
 *
 * A communicator's id names a memfd of the process that made it (/proc/PID/fd/N), so nothing is
 * left behind by whoever is killed. Each way is a ring; every operation writes its length first,
 * and a receive of another length fails its communicator.
 *
 * NCCL_STAND_IN, read at each call, is a list by commas of init-hangs, init-fails, async-error,
 * stream-hangs, stream-half (then it hangs), stream-late (begins after LATE_MS), error-after (all
 * is moved, then it fails), slow-calls (each call is under way for a while), calls-hang, abort-late
 * (it begins after ABORT_LATE_MS), old (its version). "0:" before one: of senders alone; "1:": of
 * receivers. It counts communicators made in the file that NCCL_STAND_IN_COUNT names, if any. */

#include "common/transfer/nccl_abi.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    RING_BYTES = 1 << 18,
    GROUP_MAX = 4096,
    INVALID_USAGE = 5,
    INTERNAL_ERROR = 3,
    LATE_MS = 700,
    ABORT_LATE_MS = 400,
    SLOW_CALL_MS = 2,
    HALF_STEP = 1000,
};

typedef struct ring {
    _Atomic uint64_t head, tail; /* read, written */
    unsigned char bytes[RING_BYTES];
} ring;

typedef struct segment {
    uint64_t nonce;
    _Atomic uint32_t present[2];
    ring rings[2]; /* by the rank that writes */
} segment;

typedef struct stand_in_id {
    uint64_t nonce;
    int pid, fd;
} stand_in_id;

typedef struct comm {
    segment *shared;
    int rank;
    int fd; /* of its id, where it was made here; else -1 */
    _Atomic int error;
    _Atomic bool aborted;
    _Atomic int jobs;
    _Atomic uint64_t busy_until_ms; /* with a call */
} comm;

typedef struct operation {
    comm *owner;
    unsigned char *bytes;
    uint64_t count, done; /* of 8 bytes of length, then the bytes */
    bool send;
} operation;

typedef struct group_job {
    comm *owner;
    uint32_t count;
    uint64_t bytes;
    operation operations[];
} group_job;

static _Thread_local operation group[GROUP_MAX];
static _Thread_local uint32_t group_count;
static _Thread_local int group_depth;
static _Thread_local pd_cu_stream group_stream;

int ncclGetVersion(int *version);
int ncclGetUniqueId(pd_nccl_id *id);
int ncclCommInitRankConfig(pd_nccl_comm *comm_out, int ranks, pd_nccl_id id, int rank,
                           pd_nccl_config *config);
int ncclCommGetAsyncError(pd_nccl_comm handle, int *error);
int ncclCommAbort(pd_nccl_comm handle);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclSend(const void *bytes, size_t count, int type, int peer, pd_nccl_comm handle,
             pd_cu_stream stream);
int ncclRecv(void *bytes, size_t count, int type, int peer, pd_nccl_comm handle,
             pd_cu_stream stream);
int ncclAllGather(const void *own, void *all, size_t count, int type, pd_nccl_comm handle,
                  pd_cu_stream stream);
const char *ncclGetErrorString(int result);

/* The test sets the variable while streams run: its strings are never freed, and either will do. */
__attribute__((no_sanitize_thread)) static bool fault(const char *name, int rank)
{
    const char *set = getenv("NCCL_STAND_IN");
    size_t len = strlen(name);

    while (set != NULL && *set != '\0') {
        const char *end = set; /* by hand: the sanitizer sees what the C library reads */
        while (*end != ',' && *end != '\0')
            end++;
        bool ours = true;
        if (end - set > 2 && set[1] == ':') {
            ours = set[0] == '0' + rank;
            set += 2;
        }
        size_t same = 0;
        while (same < len && set[same] == name[same])
            same++;
        if (ours && same == len && (size_t)(end - set) == len)
            return true;
        set = *end == ',' ? end + 1 : end;
    }
    return false;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* What a call on it returns: that it is under way, with the faults that are about that. */
static int call_result(comm *c)
{
    bool hangs = fault("calls-hang", c->rank);

    if (!hangs && !fault("slow-calls", c->rank))
        return PD_NCCL_SUCCESS;
    atomic_store(&c->busy_until_ms, hangs ? UINT64_MAX : now_ms() + SLOW_CALL_MS);
    return PD_NCCL_IN_PROGRESS;
}

static bool is_busy(comm *c)
{
    return now_ms() < atomic_load(&c->busy_until_ms);
}

EXPORT int ncclGetVersion(int *version)
{
    *version = fault("old", -1) ? 21799 : PD_NCCL_CONFIG_VERSION;
    return PD_NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(int result)
{
    return result == PD_NCCL_SUCCESS        ? "no error"
           : result == PD_NCCL_REMOTE_ERROR ? "remote process exited or there was a network error"
           : result == PD_NCCL_SYSTEM_ERROR ? "unhandled system error"
           : result == INVALID_USAGE        ? "invalid usage"
                                            : "internal error";
}

/* The file stays open until the communicator ends, as NCCL's root listens (rank 1 is the root
 * here). */
EXPORT int ncclGetUniqueId(pd_nccl_id *id)
{
    stand_in_id own = {.pid = getpid()};
    own.fd = memfd_create("nccl-stand-in", MFD_CLOEXEC);
    if (own.fd < 0 || ftruncate(own.fd, sizeof(segment)) != 0 ||
        getentropy(&own.nonce, sizeof own.nonce) != 0 ||
        pwrite(own.fd, &own.nonce, sizeof own.nonce, 0) != sizeof own.nonce)
        return PD_NCCL_SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    memcpy(id->bytes, &own, sizeof own);
    return PD_NCCL_SUCCESS;
}

static segment *attach(const stand_in_id *id)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", id->pid, id->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    segment *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == MAP_FAILED)
        return NULL;
    if (shared->nonce == id->nonce)
        return shared;
    munmap(shared, sizeof *shared);
    return NULL;
}

static void count_one(void)
{
    const char *path = getenv("NCCL_STAND_IN_COUNT");
    int fd = path == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        if (write(fd, "+", 1) != 1)
            abort();
        close(fd);
    }
}

EXPORT int ncclCommInitRankConfig(pd_nccl_comm *comm_out, int ranks, pd_nccl_id id, int rank,
                                  pd_nccl_config *config)
{
    stand_in_id own;
    memcpy(&own, id.bytes, sizeof own);
    *comm_out = NULL;
    if (ranks != 2 || rank < 0 || rank > 1 || config->magic != PD_NCCL_CONFIG_MAGIC ||
        config->size != sizeof *config || config->blocking != 0)
        return PD_NCCL_INVALID_ARGUMENT;
    if (fault("init-fails", rank))
        return INVALID_USAGE;
    comm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return PD_NCCL_SYSTEM_ERROR;
    c->rank = rank;
    c->shared = attach(&own);
    c->fd = own.pid == getpid() && rank == 1 ? own.fd : -1;
    if (own.pid != getpid() && c->shared == NULL) { /* its root is gone: nobody will answer */
        *comm_out = c;
        return PD_NCCL_IN_PROGRESS;
    }
    if (c->shared == NULL) {
        free(c);
        return PD_NCCL_SYSTEM_ERROR;
    }
    if (!fault("init-hangs", rank))
        atomic_store(&c->shared->present[rank], 1);
    count_one();
    *comm_out = c;
    return PD_NCCL_IN_PROGRESS;
}

EXPORT int ncclCommGetAsyncError(pd_nccl_comm handle, int *error)
{
    comm *c = handle;
    *error = atomic_load(&c->error);
    if (*error == PD_NCCL_SUCCESS &&
        (c->shared == NULL || is_busy(c) || atomic_load(&c->shared->present[0]) == 0 ||
         atomic_load(&c->shared->present[1]) == 0))
        *error = PD_NCCL_IN_PROGRESS;
    return PD_NCCL_SUCCESS;
}

EXPORT int ncclCommAbort(pd_nccl_comm handle)
{
    comm *c = handle;
    if (c == NULL)
        return PD_NCCL_SUCCESS;
    if (fault("abort-late", c->rank))
        usleep(ABORT_LATE_MS * 1000);
    atomic_store(&c->aborted, true);
    while (atomic_load(&c->jobs) != 0)
        sched_yield();
    if (c->shared != NULL)
        munmap(c->shared, sizeof *c->shared);
    if (c->fd >= 0)
        close(c->fd);
    free(c);
    return PD_NCCL_SUCCESS;
}

/* ---- moving bytes ---- */

/* A device's copy, out of the thread sanitizer's sight: it cannot see that another process' words
 * put these bytes in order. */
__attribute__((no_sanitize_thread)) static void copy(void *to, const void *from, size_t len)
{
    volatile unsigned char *out = to;
    const volatile unsigned char *in = from;

    for (size_t i = 0; i < len; i++)
        out[i] = in[i];
}

static size_t ring_write(ring *r, const void *bytes, size_t len)
{
    uint64_t tail = atomic_load(&r->tail), room = RING_BYTES - (tail - atomic_load(&r->head));
    size_t at = tail % RING_BYTES, n = len < room ? len : room;
    n = n < RING_BYTES - at ? n : RING_BYTES - at;
    copy(r->bytes + at, bytes, n);
    atomic_store(&r->tail, tail + n);
    return n;
}

static size_t ring_read(ring *r, void *bytes, size_t len)
{
    uint64_t head = atomic_load(&r->head), have = atomic_load(&r->tail) - head;
    size_t at = head % RING_BYTES, n = len < have ? len : have;
    n = n < RING_BYTES - at ? n : RING_BYTES - at;
    copy(bytes, r->bytes + at, n);
    atomic_store(&r->head, head + n);
    return n;
}

/* At most so many bytes. True: something moved. */
static bool step(operation *o, size_t most)
{
    comm *c = o->owner;
    uint64_t length = o->count;
    ring *r = &c->shared->rings[o->send ? c->rank : 1 - c->rank];
    if (o->done < sizeof length) {
        if (o->send &&
            RING_BYTES - (atomic_load(&r->tail) - atomic_load(&r->head)) < 2 * sizeof length)
            return false;
        if (!o->send && atomic_load(&r->tail) - atomic_load(&r->head) < sizeof length)
            return false;
        unsigned char head[sizeof length];
        memcpy(head, &length, sizeof head);
        for (size_t i = 0; i < sizeof head;)
            i += o->send ? ring_write(r, head + i, sizeof head - i)
                         : ring_read(r, head + i, sizeof head - i);
        memcpy(&length, head, sizeof head);
        if (length != o->count)
            atomic_store(&c->error, INTERNAL_ERROR);
        o->done = sizeof length;
        return true;
    }
    uint64_t at = o->done - sizeof length;
    size_t len = o->count - at < most ? o->count - at : most;
    size_t n = o->send ? ring_write(r, o->bytes + at, len) : ring_read(r, o->bytes + at, len);
    o->done += n;
    return n != 0;
}

/* All sends in their order, all receives in theirs, both at once. */
static void run_group(void *ctx)
{
    group_job *job = ctx;
    comm *c = job->owner;
    uint32_t at[2] = {0, 0};
    bool hangs = fault("stream-hangs", c->rank), half = fault("stream-half", c->rank);
    bool fails = fault("error-after", c->rank);
    uint64_t start_ms = now_ms() + (fault("stream-late", c->rank) ? LATE_MS : 0), moved_bytes = 0;
    if (fault("async-error", c->rank))
        atomic_store(&c->error, PD_NCCL_REMOTE_ERROR);
    while (!atomic_load(&c->aborted)) {
        bool moved = false, left = false;
        for (int send = 0; send < 2; send++) {
            while (at[send] < job->count &&
                   (job->operations[at[send]].send != (send != 0) ||
                    job->operations[at[send]].done ==
                        job->operations[at[send]].count + sizeof(uint64_t)))
                at[send]++;
            left |= at[send] < job->count;
            bool stands = hangs || now_ms() < start_ms || (half && moved_bytes >= job->bytes / 2);
            if (at[send] < job->count && !stands && atomic_load(&c->error) == PD_NCCL_SUCCESS) {
                uint64_t before = job->operations[at[send]].done;
                moved |= step(&job->operations[at[send]], half ? HALF_STEP : SIZE_MAX);
                moved_bytes += job->operations[at[send]].done - before;
            }
        }
        if (!left)
            break;
        if (!moved)
            usleep(50);
    }
    if (fails)
        atomic_store(&c->error, PD_NCCL_REMOTE_ERROR);
    free(job);
    atomic_fetch_sub(&c->jobs, 1);
}

static int group_add(const operation *o, int type, int peer, pd_cu_stream stream)
{
    if (o->owner == NULL || o->owner->shared == NULL || type != PD_NCCL_INT8 ||
        peer != 1 - o->owner->rank || group_depth == 0 || group_count == GROUP_MAX)
        return PD_NCCL_INVALID_ARGUMENT;
    if (group_count != 0 && group[0].owner != o->owner)
        return INVALID_USAGE; /* NCCL can; nobody here asks for it */
    if (is_busy(o->owner))    /* "before the previous operation returned ncclSuccess" */
        return PD_NCCL_INVALID_ARGUMENT;
    group[group_count++] = *o;
    group_stream = stream;
    return call_result(o->owner);
}

EXPORT int ncclSend(const void *bytes, size_t count, int type, int peer, pd_nccl_comm handle,
                    pd_cu_stream stream)
{
    operation o = {.owner = handle, .bytes = (unsigned char *)bytes, .count = count, .send = true};
    return group_add(&o, type, peer, stream);
}

EXPORT int ncclRecv(void *bytes, size_t count, int type, int peer, pd_nccl_comm handle,
                    pd_cu_stream stream)
{
    operation o = {.owner = handle, .bytes = bytes, .count = count};
    return group_add(&o, type, peer, stream);
}

EXPORT int ncclGroupStart(void)
{
    group_depth++;
    return PD_NCCL_SUCCESS;
}

EXPORT int ncclGroupEnd(void)
{
    group_depth--;
    if (group_depth != 0 || group_count == 0)
        return PD_NCCL_SUCCESS;
    uint32_t count = group_count;
    group_count = 0;
    static int (*launch)(void *, void (*)(void *), void *);
    if (launch == NULL) {
        void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchHostFunc");
        memcpy(&launch, &found, sizeof found);
    }
    group_job *job = calloc(1, sizeof *job + count * sizeof *group);
    if (job == NULL || launch == NULL)
        return PD_NCCL_SYSTEM_ERROR;
    job->owner = group[0].owner;
    job->count = count;
    memcpy(job->operations, group, count * sizeof *group);
    for (uint32_t i = 0; i < count; i++)
        job->bytes += group[i].count;
    int result = call_result(job->owner);
    atomic_fetch_add(&job->owner->jobs, 1);
    launch(group_stream, run_group, job);
    return result;
}

/* In place alone: of two ranks it is a send and a receive. */
EXPORT int ncclAllGather(const void *own, void *all, size_t count, int type, pd_nccl_comm handle,
                         pd_cu_stream stream)
{
    comm *c = handle;
    if (c == NULL || own != (unsigned char *)all + (size_t)c->rank * count)
        return PD_NCCL_INVALID_ARGUMENT;
    int result = ncclGroupStart();
    if (result == PD_NCCL_SUCCESS)
        result = ncclSend(own, count, type, 1 - c->rank, handle, stream);
    if (result == PD_NCCL_SUCCESS)
        result = ncclRecv((unsigned char *)all + (size_t)(1 - c->rank) * count, count, type,
                          1 - c->rank, handle, stream);
    int end = ncclGroupEnd();
    return result == PD_NCCL_SUCCESS ? end : result;
}
