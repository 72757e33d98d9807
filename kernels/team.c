#include "kernels/team.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* About 20 microseconds: the longest wait between two steps of one token, and short enough that a
 * thread kept from its core by another process is not waited for at full load. */
#define SPINS_MAX 2000

struct kern_team {
    atomic_uint threads; /* changes only when a start fails half way */
    uint32_t started;    /* helper threads to join */
    bool stop;           /* written before a barrier, read after */
    kern_team_fn *fn;    /* likewise */
    void *ctx;
    pthread_t handles[KERN_THREADS_MAX];
    /* a cache line apart: every thread writes the first two, and all watch the third */
    char apart_0[64];
    atomic_uint arrived;
    char apart_1[64];
    atomic_uint next;
    char apart_2[64];
    atomic_uint generation;
    atomic_uint sleepers;
    char apart_3[64];
};

typedef struct helper_start {
    kern_team *team;
    uint32_t thread;
} helper_start;

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void wait_for_change(kern_team *team, unsigned generation)
{
    for (int spin = 0; spin < SPINS_MAX; spin++) {
        if (atomic_load_explicit(&team->generation, memory_order_acquire) != generation)
            return;
        pause_briefly();
    }
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(&team->generation) == generation)
        syscall(SYS_futex, &team->generation, FUTEX_WAIT_PRIVATE, generation, NULL, NULL, 0);
    atomic_fetch_sub(&team->sleepers, 1);
}

void kern_team_barrier(kern_team *team)
{
    if (team->threads == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    unsigned generation = atomic_load_explicit(&team->generation, memory_order_relaxed);
    if (atomic_fetch_add(&team->arrived, 1) + 1 < team->threads) {
        wait_for_change(team, generation);
        return;
    }
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    /* Sequentially consistent against the sleeper's "count me, then look": one of us sees. */
    atomic_store(&team->generation, generation + 1);
    if (atomic_load(&team->sleepers) != 0)
        syscall(SYS_futex, &team->generation, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

uint32_t kern_team_take(kern_team *team)
{
    if (team->threads == 1) {
        uint32_t taken = atomic_load_explicit(&team->next, memory_order_relaxed);
        atomic_store_explicit(&team->next, taken + 1, memory_order_relaxed);
        return taken;
    }
    return atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
}

static void *helper_main(void *arg)
{
    helper_start *start = arg;
    kern_team *team = start->team;
    uint32_t thread = start->thread;

    pd_free(start);
    for (;;) {
        kern_team_barrier(team); /* until run or destroy */
        if (team->stop)
            return NULL;
        team->fn(team->ctx, thread);
        kern_team_barrier(team);
    }
}

uint32_t kern_team_threads(const kern_team *team)
{
    return team->threads;
}

void kern_team_run(kern_team *team, kern_team_fn *fn, void *ctx)
{
    team->fn = fn;
    team->ctx = ctx;
    kern_team_barrier(team);
    fn(ctx, 0);
    kern_team_barrier(team);
}

static uint32_t usable_cores(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count > KERN_THREADS_MAX ? KERN_THREADS_MAX : (uint32_t)count;
}

static pd_status start_helper(kern_team *team, uint32_t thread)
{
    helper_start *start = pd_malloc(sizeof *start);

    if (start == NULL)
        return PD_E_NOMEM;
    *start = (helper_start){team, thread};
    int error = pthread_create(&team->handles[thread], NULL, helper_main, start);
    if (error != 0) {
        errno = error;
        pd_log_error("msg=\"kernels: cannot start a compute thread: %m\" thread=%u", thread);
        pd_free(start);
        return PD_E_IO;
    }
    return PD_OK;
}

pd_status kern_team_create(uint32_t threads, kern_team **team_out)
{
    kern_team *team = pd_calloc(1, sizeof *team);
    pd_status status = PD_OK;

    if (team == NULL)
        return PD_E_NOMEM;
    threads = threads == 0 ? usable_cores() : threads;
    team->threads = threads < KERN_THREADS_MAX ? threads : KERN_THREADS_MAX;
    for (uint32_t thread = 1; thread < team->threads && status == PD_OK; thread++) {
        status = start_helper(team, thread);
        team->started += status == PD_OK;
    }
    if (status != PD_OK) {
        team->threads = team->started + 1;
        kern_team_destroy(team);
        return status;
    }
    *team_out = team;
    return PD_OK;
}

void kern_team_destroy(kern_team *team)
{
    if (team == NULL)
        return;
    team->stop = true;
    kern_team_barrier(team);
    for (uint32_t thread = 1; thread <= team->started; thread++)
        pthread_join(team->handles[thread], NULL);
    pd_free(team);
}
