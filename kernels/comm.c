#include "kernels/comm.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* As kernels/team.c: about 20 microseconds. */
#define SPINS_MAX 2000
/* How soon rank 0 notices that another one is gone while it waits for it. */
#define LOOK_NS (20 * 1000 * 1000)

/* A look that took longer than this was no wait: rank 0 stood still itself. */
#define LOOK_NS_MAX (4 * (uint64_t)LOOK_NS)

/* Where a rank is: the generation that its latest barrier makes, and the latest exchange that is
 * none. In a line of its own. */
typedef struct rank_at {
    atomic_uint generation, exchange;
    char apart[KERN_COMM_ALIGNMENT - 2 * sizeof(atomic_uint)];
} rank_at;

/* The first bytes of the memory; each word that all write to in a cache line of its own. */
typedef struct shared {
    atomic_uint arrived;
    char apart_0[KERN_COMM_ALIGNMENT - sizeof(atomic_uint)];
    atomic_uint generation;
    atomic_uint sleepers;
    atomic_uint ended;
    char apart_1[KERN_COMM_ALIGNMENT - 3 * sizeof(atomic_uint)];
    rank_at at[KERN_RANKS_MAX];
} shared;

struct kern_comm {
    uint32_t rank, ranks;
    unsigned char *memory;
    uint64_t bytes, used;
    shared *shared;
    uint64_t still_ns, begun_cpu_ns, begun_ns;
    /* rank 0 in an exchange that is no barrier: since it came there */
    unsigned exchange;
    uint64_t came_ns, looked_ns, waited_ns;
    bool in_steps;           /* before the first one ranks load, each at its pace */
    atomic_bool stood_still; /* why is written */
    char why[128];
    uint32_t watched;
    struct pollfd pidfds[KERN_RANKS_MAX];
};

uint64_t kern_comm_own_bytes(void)
{
    return kern_comm_round(sizeof(shared));
}

pd_status kern_comm_create(const kern_comm_options *options, kern_comm **comm_out)
{
    pd_assert(options->ranks >= 2 && options->ranks <= KERN_RANKS_MAX);
    pd_assert(options->rank < options->ranks &&
              (uintptr_t)options->memory % KERN_COMM_ALIGNMENT == 0);
    kern_comm *comm = pd_calloc(1, sizeof *comm);

    if (comm == NULL)
        return PD_E_NOMEM;
    comm->rank = options->rank;
    comm->ranks = options->ranks;
    comm->memory = options->memory;
    comm->bytes = options->bytes;
    comm->shared = kern_comm_take(comm, sizeof *comm->shared);
    comm->still_ns = options->still_ns;
    comm->watched = options->pidfds == NULL ? 0 : options->ranks - 1;
    for (uint32_t i = 0; i < comm->watched; i++)
        comm->pidfds[i] = (struct pollfd){.fd = options->pidfds[i], .events = POLLIN};
    *comm_out = comm;
    return PD_OK;
}

void kern_comm_destroy(kern_comm *comm)
{
    pd_free(comm);
}

uint32_t kern_comm_rank(const kern_comm *comm)
{
    return comm->rank;
}

uint32_t kern_comm_ranks(const kern_comm *comm)
{
    return comm->ranks;
}

void *kern_comm_take(kern_comm *comm, uint64_t bytes)
{
    uint64_t rounded = kern_comm_round(bytes);

    pd_assert(rounded >= bytes && rounded <= comm->bytes - comm->used);
    void *taken = comm->memory + comm->used;
    comm->used += rounded;
    return taken;
}

static void wake_all(shared *s)
{
    syscall(SYS_futex, &s->generation, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void kern_comm_end(kern_comm *comm)
{
    shared *s = comm->shared;

    atomic_store(&s->ended, 1);
    /* so that nobody who has just looked falls asleep */
    atomic_fetch_add(&s->generation, 1);
    wake_all(s);
}

static uint64_t cpu_ns(void)
{
    struct timespec now;

    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) != 0)
        return 0;
    return (uint64_t)now.tv_sec * PD_NS_PER_S + (uint64_t)now.tv_nsec;
}

void kern_comm_begin(kern_comm *comm)
{
    comm->in_steps = true;
    if (comm->still_ns == 0)
        return;
    comm->begun_cpu_ns = cpu_ns();
    comm->begun_ns = comm->came_ns = comm->looked_ns = pd_clock_now_ns();
    comm->waited_ns = 0;
}

const char *kern_comm_why(const kern_comm *comm)
{
    return atomic_load(&comm->stood_still) ? comm->why : NULL;
}

/* Whether a rank has not come to the barrier which ends that generation; nobody, when all have. */
static bool misses_barrier(const kern_comm *comm, uint32_t rank, unsigned generation)
{
    return atomic_load(&comm->shared->at[rank].generation) != generation + 1 &&
           atomic_load(&comm->shared->generation) == generation;
}

static bool misses_exchange(const kern_comm *comm, uint32_t rank, unsigned exchange)
{
    return (int)(atomic_load(&comm->shared->at[rank].exchange) - exchange) < 0;
}

/* Kills those that miss it. */
static void kill_the_still(kern_comm *comm,
                           bool (*misses)(const kern_comm *comm, uint32_t rank, unsigned what),
                           unsigned what, uint64_t waited_ns)
{
    for (uint32_t rank = 1; rank < comm->ranks; rank++) {
        if (!misses(comm, rank, what))
            continue;
        if (!atomic_load(&comm->stood_still)) {
            snprintf(comm->why, sizeof comm->why,
                     "tensor-parallel rank %u stood still in a step: waited for it for %.1f s",
                     rank, (double)waited_ns / 1e9);
            atomic_store(&comm->stood_still, true);
        }
        pd_log_error("msg=\"a tensor-parallel rank stands still, and is killed\" rank=%u "
                     "waited_ms=%llu",
                     rank, (unsigned long long)(waited_ns / PD_NS_PER_MS));
        /* fails when it has ended meanwhile, which is as well */
        syscall(SYS_pidfd_send_signal, comm->pidfds[rank - 1].fd, SIGKILL, NULL, 0);
    }
    if (atomic_load(&comm->stood_still))
        kern_comm_end(comm);
}

/* Adds a look's time to *waited_ns, and ends the wait when that is too long. */
static void judge_ranks(kern_comm *comm, unsigned generation, uint64_t look_ns, uint64_t *waited_ns)
{
    if (comm->still_ns == 0 || !comm->in_steps)
        return;
    *waited_ns += look_ns < LOOK_NS_MAX ? look_ns : (uint64_t)LOOK_NS;
    if (*waited_ns < comm->still_ns)
        return;
    uint64_t own_ns = cpu_ns() - comm->begun_cpu_ns;
    if (*waited_ns >= comm->still_ns + KERN_STILL_TIMES * own_ns)
        kill_the_still(comm, misses_barrier, generation, *waited_ns);
}

static void judge_exchange(kern_comm *comm)
{
    uint64_t now_ns = pd_clock_now_ns(), look_ns = now_ns - comm->looked_ns;

    comm->looked_ns = now_ns;
    comm->waited_ns += look_ns < LOOK_NS_MAX ? look_ns : (uint64_t)LOOK_NS;
    if (comm->waited_ns >= comm->still_ns + (comm->came_ns - comm->begun_ns))
        kill_the_still(comm, misses_exchange, comm->exchange, comm->waited_ns);
}

bool kern_comm_come(kern_comm *comm, uint32_t exchange)
{
    bool all = true;

    atomic_store_explicit(&comm->shared->at[comm->rank].exchange, exchange, memory_order_release);
    for (uint32_t rank = 0; rank < comm->ranks; rank++)
        all = all && !misses_exchange(comm, rank, exchange);
    if (comm->exchange != exchange || all) { /* whoever is late from here on is so anew */
        comm->exchange = exchange;
        comm->waited_ns = 0;
        comm->came_ns = comm->looked_ns = comm->still_ns > 0 ? pd_clock_now_ns() : 0;
    } else if (comm->watched > 0 && comm->still_ns > 0 && comm->in_steps)
        judge_exchange(comm);
    return all;
}

static bool is_one_gone(kern_comm *comm)
{
    int count = poll(comm->pidfds, comm->watched, 0); /* a pidfd is readable after its process */

    return count > 0 || (count < 0 && errno != EINTR);
}

bool kern_comm_ended(kern_comm *comm)
{
    if (comm->watched > 0 && is_one_gone(comm))
        kern_comm_end(comm);
    return atomic_load(&comm->shared->ended) != 0;
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void wait_for_change(kern_comm *comm, unsigned generation)
{
    const struct timespec look = {.tv_nsec = LOOK_NS};
    shared *s = comm->shared;
    uint64_t waited_ns = 0;

    for (int spin = 0; spin < SPINS_MAX; spin++) {
        if (atomic_load_explicit(&s->generation, memory_order_acquire) != generation)
            return;
        pause_briefly();
    }
    atomic_fetch_add(&s->sleepers, 1);
    while (atomic_load(&s->generation) == generation) {
        uint64_t looked_ns = comm->still_ns > 0 ? pd_clock_now_ns() : 0;
        long result = syscall(SYS_futex, &s->generation, FUTEX_WAIT, generation,
                              comm->watched > 0 ? &look : NULL, NULL, 0);
        if (comm->watched == 0 || result == 0 || errno != ETIMEDOUT ||
            atomic_load(&s->generation) != generation)
            continue;
        if (is_one_gone(comm)) {
            /* whoever is gone may have been here before: then the barrier is over */
            if (atomic_load(&s->generation) == generation)
                kern_comm_end(comm);
            continue;
        }
        judge_ranks(comm, generation, pd_clock_now_ns() - looked_ns, &waited_ns);
    }
    atomic_fetch_sub(&s->sleepers, 1);
}

/* Then the barrier is over, whatever one of them has done since. */
static bool all_came(const kern_comm *comm, unsigned generation)
{
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        unsigned at =
            atomic_load_explicit(&comm->shared->at[rank].generation, memory_order_acquire);
        if ((int)(at - (generation + 1)) < 0)
            return false;
    }
    return true;
}

bool kern_comm_barrier(kern_comm *comm)
{
    shared *s = comm->shared;
    unsigned generation = atomic_load(&s->generation);

    if (atomic_load(&s->ended) != 0)
        return false;
    atomic_store_explicit(&s->at[comm->rank].generation, generation + 1, memory_order_release);
    if (atomic_fetch_add(&s->arrived, 1) + 1 < comm->ranks) {
        wait_for_change(comm, generation);
        return atomic_load(&s->ended) == 0 || all_came(comm, generation);
    }
    atomic_store_explicit(&s->arrived, 0, memory_order_relaxed);
    /* Sequentially consistent against the sleeper's "count me, then look": one of us sees. */
    atomic_fetch_add(&s->generation, 1);
    if (atomic_load(&s->sleepers) != 0)
        wake_all(s);
    return true;
}

const kern_comm_calls kern_comm_calls_here = {.take = kern_comm_take,
                                              .barrier = kern_comm_barrier,
                                              .end = kern_comm_end,
                                              .ended = kern_comm_ended,
                                              .come = kern_comm_come};
