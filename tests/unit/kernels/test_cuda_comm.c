/* What ranks on GPUs exchange, over NCCL: on a stand-in for it, whose streams are this test's body
 * of gpu.h. Gathers are in order and whole, by NCCL and through shared memory; where no
 * communicator can be made, whatever the reason, all ranks take the other way; a rank that is gone
 * is no reason to wait; and one that stands still is named and killed. */

#include "kernels/cuda/comm.h"
#include "tests/unit/kernels/rank_processes.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 2, PART_BYTES = 4096, GATHER_BYTES = 10000, GATHERS = 20, WAIT_MS = 300 };
#define SOON_NS (5 * PD_NS_PER_S)

/* ---- gpu.h: as much as exchanges need ---- */

struct gpu {
    gpu_info info;
};

struct gpu_stream {
    void *native;
};

static struct {
    int (*create)(void **stream_out, unsigned flags);
    int (*query)(void *stream);
    int (*launch)(void *stream, void (*run)(void *ctx), void *ctx);
} driver;

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    const struct {
        const char *name;
        void *pointer;
    } calls[] = {{"cuStreamCreate", &driver.create},
                 {"cuStreamQuery", &driver.query},
                 {"cuLaunchHostFunc", &driver.launch}};

    NEED(library != NULL);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *found = dlsym(library, calls[i].name);
        NEED(found != NULL);
        memcpy(calls[i].pointer, &found, sizeof found);
    }
}

const gpu_info *gpu_info_of(const gpu *g)
{
    return &g->info;
}

void *gpu_stream_native(gpu_stream *stream)
{
    return stream->native;
}

pd_status gpu_stream_wait(gpu_stream *stream)
{
    while (driver.query(stream->native) != 0)
        usleep(100);
    return PD_OK;
}

/* Records that the stream has not come to. */
struct gpu_event {
    atomic_int ahead;
};

static void reach(void *ctx)
{
    atomic_fetch_sub((atomic_int *)ctx, 1);
}

pd_status gpu_event_create(gpu *g, gpu_event **event_out)
{
    (void)g;
    *event_out = pd_calloc(1, sizeof **event_out);
    return *event_out == NULL ? PD_E_NOMEM : PD_OK;
}

void gpu_event_destroy(gpu_event *event)
{
    pd_free(event);
}

pd_status gpu_event_record(gpu_event *event, gpu_stream *stream)
{
    atomic_fetch_add(&event->ahead, 1);
    return driver.launch(stream->native, reach, &event->ahead) == 0 ? PD_OK : PD_E_INTERNAL;
}

pd_status gpu_event_poll(gpu_event *event)
{
    return atomic_load(&event->ahead) == 0 ? PD_OK : PD_E_AGAIN;
}

typedef struct copy {
    void *to;
    const void *from;
    uint64_t bytes;
} copy;

static void run_copy(void *ctx)
{
    copy *c = ctx;

    memcpy(c->to, c->from, c->bytes);
    pd_free(c);
}

static pd_status queue_copy(gpu_stream *stream, void *to, const void *from, uint64_t bytes)
{
    copy *c = pd_malloc(sizeof *c);

    NEED(c != NULL);
    *c = (copy){to, from, bytes};
    return driver.launch(stream->native, run_copy, c) == 0 ? PD_OK : PD_E_INTERNAL;
}

pd_status gpu_copy_in(gpu_stream *stream, void *device, const void *host, uint64_t bytes)
{
    return queue_copy(stream, device, host, bytes);
}

pd_status gpu_copy_out(gpu_stream *stream, void *host, const void *device, uint64_t bytes)
{
    return queue_copy(stream, host, device, bytes);
}

/* ---- a rank ---- */

typedef struct member {
    cu_comm *comm;
    gpu gpu;
    gpu_stream stream;
    unsigned char *all; /* [RANKS][GATHER_BYTES] */
} member;

static member join(const rank_process *process, const char *fault)
{
    const cu_comm_options options = {.backend = "test",
                                     .rank = process->rank,
                                     .ranks = process->ranks,
                                     .comm = process->comm,
                                     .calls = &kern_comm_calls_here,
                                     .part_bytes = PART_BYTES,
                                     .wait_ms = WAIT_MS};
    member m = {0};

    if (fault != NULL)
        setenv("NCCL_STAND_IN", fault, 1);
    load_driver();
    NEED(driver.create(&m.stream.native, 0) == 0);
    m.all = pd_calloc(RANKS, GATHER_BYTES);
    NEED(m.all != NULL);
    NEED(cu_comm_create(&options, &m.comm) == PD_OK);
    NEED(cu_comm_connect(m.comm, &m.gpu) == PD_OK);
    return m;
}

static unsigned char byte_of(uint32_t rank, uint32_t turn, uint32_t at)
{
    return (unsigned char)(rank * 131 + turn * 17 + at * 7 + at / 256);
}

/* Many, one behind the other, each checked on the stream before the next overwrites it. */
static void gather_many(const rank_process *process, member *m)
{
    uint64_t bytes[] = {1, 64, PART_BYTES, PART_BYTES + 1, GATHER_BYTES};

    for (uint32_t turn = 0; turn < GATHERS; turn++) {
        uint64_t some = bytes[turn % 5];
        unsigned char *own = m->all + process->rank * some;
        memset(m->all, 0xee, RANKS * GATHER_BYTES);
        for (uint32_t i = 0; i < some; i++)
            own[i] = byte_of(process->rank, turn, i);
        NEED(cu_comm_gather(m->comm, &m->stream, own, m->all, some) == PD_OK);
        NEED(gpu_stream_wait(&m->stream) == PD_OK);
        NEED(cu_comm_look(m->comm) == PD_OK);
        for (uint32_t rank = 0; rank < RANKS; rank++)
            for (uint32_t i = 0; i < some; i++)
                NEED(m->all[rank * some + i] == byte_of(rank, turn, i));
        NEED(RANKS * some == RANKS * GATHER_BYTES || m->all[RANKS * some] == 0xee);
    }
    NEED(cu_comm_meet(m->comm) == PD_OK); /* nobody ends while another still looks */
}

static void leave(const rank_process *process, member *m)
{
    cu_comm_destroy(m->comm);
    pd_free(m->all);
    rank_processes_await(process);
}

static void run(const char *name, rank_process_body *body, const char *fault)
{
    rank_processes_run(name, RANKS, kern_comm_own_bytes() + cu_comm_bytes(RANKS, PART_BYTES), body,
                       fault);
}

/* ---- ways ---- */

static void by_nccl(rank_process *process)
{
    member m = join(process, NULL);

    NEED(cu_comm_is_queued(m.comm));
    gather_many(process, &m);
    leave(process, &m);
}

static void through_memory(rank_process *process)
{
    member m = join(process, process->ctx);

    NEED(!cu_comm_is_queued(m.comm));
    gather_many(process, &m);
    leave(process, &m);
}

/* One rank has trouble, the other none: both take the same way. */
static void through_memory_for_one(rank_process *process)
{
    member m = join(process, process->rank == 1 ? process->ctx : NULL);

    NEED(!cu_comm_is_queued(m.comm));
    gather_many(process, &m);
    leave(process, &m);
}

static void gathers_go_by_nccl_where_it_is(void **state)
{
    (void)state;
    run("nccl", by_nccl, NULL);
}

static void ranks_that_cannot_have_it_all_take_memory(void **state)
{
    (void)state;
    run("too old", through_memory, "old");
    run("too old at one", through_memory_for_one, "old");
    run("init fails", through_memory, "init-fails");
    run("init hangs", through_memory, "init-hangs");
    run("init fails at one", through_memory_for_one, "init-fails");
    run("init hangs at one", through_memory_for_one, "init-hangs");
}

/* ---- ends ---- */

static bool ends_soon(member *m)
{
    uint64_t start_ns = pd_clock_now_ns();

    while (cu_comm_look(m->comm) == PD_OK)
        if (pd_clock_now_ns() - start_ns > SOON_NS)
            return false;
    return true;
}

/* Rank 1 ends when rank 0 has a gather on its stream, which nobody will answer; not sooner, for a
 * barrier that an end follows at once may fail. */
static void wait_or_gather(const rank_process *process, member *m)
{
    uint64_t *is_waiting = &cu_comm_piece_of(m->comm, 0)->pool_at;

    while (process->rank == 1 && __atomic_load_n(is_waiting, __ATOMIC_ACQUIRE) == 0)
        usleep(100);
    if (process->rank == 1)
        return;
    NEED(cu_comm_gather(m->comm, &m->stream, m->all, m->all, GATHER_BYTES) == PD_OK);
    __atomic_store_n(is_waiting, 1, __ATOMIC_RELEASE);
}

static void one_dies(rank_process *process)
{
    member m = join(process, NULL);

    NEED(cu_comm_is_queued(m.comm));
    gather_many(process, &m);
    wait_or_gather(process, &m);
    if (process->rank == 1)
        raise(SIGKILL);
    NEED(ends_soon(&m));
    cu_comm_fail(m.comm, "a step failed");
    NEED(gpu_stream_wait(&m.stream) == PD_OK); /* aborted, it runs dry */
    NEED(cu_comm_broken(m.comm) == NULL);      /* the other one's end tells */
    NEED(cu_comm_meet(m.comm) != PD_OK);
    cu_comm_destroy(m.comm);
    pd_free(m.all);
    rank_processes_await(process);
}

static void one_fails(rank_process *process)
{
    member m = join(process, NULL);

    gather_many(process, &m);
    wait_or_gather(process, &m);
    if (process->rank == 1)
        cu_comm_fail(m.comm, "out of luck");
    else {
        NEED(ends_soon(&m));
        cu_comm_fail(m.comm, "because of the other");
    }
    NEED(gpu_stream_wait(&m.stream) == PD_OK);
    NEED(strcmp(cu_comm_broken(m.comm), "rank 1: out of luck") == 0);
    cu_comm_destroy(m.comm);
    pd_free(m.all);
    rank_processes_await(process);
}

/* NCCL finds that something is wrong while a gather is on the stream. */
static void nccl_fails(rank_process *process)
{
    member m = join(process, NULL);

    NEED(cu_comm_is_queued(m.comm));
    pd_status met = cu_comm_meet(m.comm); /* both are connected, also when one has failed by now */
    (void)met;
    setenv("NCCL_STAND_IN", process->ctx, 1);
    pd_status status = cu_comm_gather(m.comm, &m.stream, m.all + process->rank * GATHER_BYTES,
                                      m.all, GATHER_BYTES);
    NEED(status != PD_OK || ends_soon(&m));
    cu_comm_fail(m.comm, "a step failed");
    NEED(gpu_stream_wait(&m.stream) == PD_OK);
    NEED(cu_comm_broken(m.comm) != NULL);
    cu_comm_destroy(m.comm);
    pd_free(m.all);
    rank_processes_await(process);
}

static void nobody_waits_for_a_rank_that_is_gone(void **state)
{
    (void)state;
    run("one dies", one_dies, NULL);
    run("one fails", one_fails, NULL);
    run("nccl fails", nccl_fails, "async-error");
}

/* ---- standing still ---- */

enum { STILL_MS = 500 };

static void run_judged(const char *name, rank_process_body *body, uint64_t still_ms)
{
    rank_processes_run_judged(name, RANKS, kern_comm_own_bytes() + cu_comm_bytes(RANKS, PART_BYTES),
                              still_ms * PD_NS_PER_MS, body, NULL);
}

static void end(const rank_process *process, member *m)
{
    cu_comm_fail(m->comm, "a step failed");
    NEED(gpu_stream_wait(&m->stream) == PD_OK);
    cu_comm_destroy(m->comm);
    pd_free(m->all);
    rank_processes_await(process);
}

/* Rank 0's look at a gather that rank 1 does not come to: it fails, not sooner than it may. */
static void named_in_time(const rank_process *process, member *m)
{
    uint64_t start_ns = pd_clock_now_ns();

    kern_comm_begin(process->comm);
    wait_or_gather(process, m);
    NEED(kern_comm_why(process->comm) == NULL && ends_soon(m));
    NEED(pd_clock_now_ns() - start_ns >= STILL_MS * PD_NS_PER_MS);
    const char *why = kern_comm_why(process->comm);
    NEED(why != NULL && strstr(why, "rank 1 stood still in a step") != NULL);
}

/* Its process is stopped before it queues the gather. */
static void one_is_stopped(rank_process *process)
{
    member m = join(process, NULL);

    NEED(cu_comm_is_queued(m.comm));
    gather_many(process, &m);
    if (process->rank == 1) {
        raise(SIGSTOP);
        NEED(false); /* it is killed as it stands */
    }
    named_in_time(process, &m);
    end(process, &m);
}

static void never_end(void *ctx)
{
    (void)ctx;
    for (;;)
        pause();
}

/* Its process queues two gathers and looks, but its device comes to the first alone. */
static void ones_device_stands(rank_process *process)
{
    member m = join(process, NULL);

    gather_many(process, &m);
    NEED(cu_comm_gather(m.comm, &m.stream, m.all + process->rank * GATHER_BYTES, m.all,
                        GATHER_BYTES) == PD_OK);
    if (process->rank == 1) {
        NEED(driver.launch(m.stream.native, never_end, NULL) == 0);
        NEED(cu_comm_gather(m.comm, &m.stream, m.all + GATHER_BYTES, m.all, GATHER_BYTES) == PD_OK);
        for (;;) {
            pd_status status = cu_comm_look(m.comm); /* it may hear of the end before it dies */
            (void)status;
            usleep(100);
        }
    }
    named_in_time(process, &m);
    end(process, &m);
}

/* Through memory, at a barrier. */
static void one_is_stopped_without_nccl(rank_process *process)
{
    member m = join(process, "init-fails");

    NEED(!cu_comm_is_queued(m.comm));
    gather_many(process, &m);
    if (process->rank == 1) {
        raise(SIGSTOP);
        NEED(false);
    }
    kern_comm_begin(process->comm);
    NEED(cu_comm_gather(m.comm, &m.stream, m.all, m.all, GATHER_BYTES) != PD_OK);
    const char *why = kern_comm_why(process->comm);
    NEED(why != NULL && strstr(why, "rank 1 stood still in a step") != NULL);
    end(process, &m);
}

static void a_rank_that_stands_still_in_a_gather_is_named_and_killed(void **state)
{
    (void)state;
    run_judged("one is stopped", one_is_stopped, STILL_MS);
    run_judged("one's device stands", ones_device_stands, STILL_MS);
    run_judged("one is stopped, without nccl", one_is_stopped_without_nccl, STILL_MS);
}

/* Both have come, so nobody is to blame: the gather has its own deadline, at every rank. */
static void both_hang(rank_process *process)
{
    member m = join(process, NULL);

    gather_many(process, &m);
    setenv("NCCL_STAND_IN", "stream-hangs", 1);
    kern_comm_begin(process->comm);
    uint64_t start_ns = pd_clock_now_ns();
    NEED(cu_comm_gather(m.comm, &m.stream, m.all + process->rank * GATHER_BYTES, m.all,
                        GATHER_BYTES) == PD_OK);
    NEED(ends_soon(&m));
    /* what the other one's end has told may come first */
    NEED(process->rank == 1 || pd_clock_now_ns() - start_ns >= WAIT_MS / 2 * PD_NS_PER_MS);
    NEED(kern_comm_why(process->comm) == NULL);
    end(process, &m);
}

/* Where nobody is judged, or all is slow for rank 0 too, a rank that is late has its time. */
static void one_is_late(rank_process *process)
{
    member m = join(process, NULL);

    gather_many(process, &m);
    kern_comm_begin(process->comm);
    if (process->rank == 1)
        usleep(2 * WAIT_MS * 1000);
    NEED(cu_comm_gather(m.comm, &m.stream, m.all + process->rank * GATHER_BYTES, m.all,
                        GATHER_BYTES) == PD_OK);
    while (driver.query(m.stream.native) != 0) {
        NEED(cu_comm_look(m.comm) == PD_OK);
        usleep(100);
    }
    NEED(cu_comm_look(m.comm) == PD_OK);
    NEED(cu_comm_meet(m.comm) == PD_OK);
    leave(process, &m);
}

static void a_gather_that_all_have_come_to_has_to_end(void **state)
{
    (void)state;
    run_judged("both hang", both_hang, 0);
    run_judged("both hang, and would be judged", both_hang, 20000);
}

static void a_rank_that_is_late_has_its_time(void **state)
{
    (void)state;
    run_judged("nobody is judged", one_is_late, 0);
    run_judged("judged later", one_is_late, 20000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathers_go_by_nccl_where_it_is),
        cmocka_unit_test(ranks_that_cannot_have_it_all_take_memory),
        cmocka_unit_test(nobody_waits_for_a_rank_that_is_gone),
        cmocka_unit_test(a_rank_that_stands_still_in_a_gather_is_named_and_killed),
        cmocka_unit_test(a_gather_that_all_have_come_to_has_to_end),
        cmocka_unit_test(a_rank_that_is_late_has_its_time),
    };
    pd_log_init("test", PD_LOG_INFO);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
