#include "kernels/comm.h"

#include "common/base/mem.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* As kernels/team.c: about 20 microseconds. */
#define SPINS_MAX 2000
/* How soon rank 0 notices that another one is gone while it waits for it. */
#define LOOK_NS (20 * 1000 * 1000)

/* The first bytes of the memory; each word that all write to in a cache line of its own. */
typedef struct shared {
    atomic_uint arrived;
    char apart_0[KERN_COMM_ALIGNMENT - sizeof(atomic_uint)];
    atomic_uint generation;
    atomic_uint sleepers;
    atomic_uint ended;
    char apart_1[KERN_COMM_ALIGNMENT - 3 * sizeof(atomic_uint)];
} shared;

struct kern_comm {
    uint32_t rank, ranks;
    unsigned char *memory;
    uint64_t bytes, used;
    shared *shared;
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

    for (int spin = 0; spin < SPINS_MAX; spin++) {
        if (atomic_load_explicit(&s->generation, memory_order_acquire) != generation)
            return;
        pause_briefly();
    }
    atomic_fetch_add(&s->sleepers, 1);
    while (atomic_load(&s->generation) == generation) {
        long result = syscall(SYS_futex, &s->generation, FUTEX_WAIT, generation,
                              comm->watched > 0 ? &look : NULL, NULL, 0);
        /* whoever is gone may have been here before: then the barrier is over */
        if (comm->watched > 0 && result != 0 && errno == ETIMEDOUT && is_one_gone(comm) &&
            atomic_load(&s->generation) == generation)
            kern_comm_end(comm);
    }
    atomic_fetch_sub(&s->sleepers, 1);
}

bool kern_comm_barrier(kern_comm *comm)
{
    shared *s = comm->shared;
    unsigned generation = atomic_load(&s->generation);

    if (atomic_load(&s->ended) != 0)
        return false;
    if (atomic_fetch_add(&s->arrived, 1) + 1 < comm->ranks) {
        wait_for_change(comm, generation);
        return atomic_load(&s->ended) == 0;
    }
    atomic_store_explicit(&s->arrived, 0, memory_order_relaxed);
    /* Sequentially consistent against the sleeper's "count me, then look": one of us sees. */
    atomic_fetch_add(&s->generation, 1);
    if (atomic_load(&s->sleepers) != 0)
        wake_all(s);
    return atomic_load(&s->ended) == 0;
}

const kern_comm_calls kern_comm_calls_here = {.take = kern_comm_take,
                                              .barrier = kern_comm_barrier,
                                              .end = kern_comm_end,
                                              .ended = kern_comm_ended};
