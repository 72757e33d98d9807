#include "kernels/team.h"

#include "common/base/clock.h"
#include "common/base/cpus.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* About 20 microseconds: the longest wait between two steps of one token, and short enough that a
 * thread kept from its core by another process is not waited for at full load. */
#define SPINS_MAX 2000

/* Judged over so long: a few runs of decode, one of prefill. */
#define JUDGE_NS (10 * PD_NS_PER_MS)
/* Helpers that were let go are tried again after so many runs, four times as many each time that it
 * was no use. */
#define APART_RUNS_MIN 16
#define APART_RUNS_MAX 1024

/* A number that threads wait to see changed; cache lines of its own. */
typedef struct gate {
    char apart_0[64];
    atomic_uint number;
    atomic_uint sleepers;
    char apart_1[64];
} gate;

struct kern_team {
    uint32_t threads;
    uint32_t started; /* helper threads to join */
    /* those that run: 0 .. active - 1. Written between runs, read within */
    uint32_t active;
    bool stop;        /* written before a gate opens, read after */
    kern_team_fn *fn; /* likewise */
    void *ctx;
    pthread_t handles[KERN_THREADS_MAX];
    gate starts[KERN_THREADS_MAX]; /* of each helper */
    gate barrier;
    char apart_1[64];
    atomic_uint arrived;
    char apart_2[64];
    atomic_uint next;
    char apart_3[64];
    /* Nanoseconds that threads slept at barriers, all together; the owner's judgement. */
    atomic_uint_fast64_t slept_ns;
    uint64_t judged_ns;              /* run since the last judgement */
    uint32_t apart_runs, apart_left; /* with fewer than all threads; and still to go */
    bool pinned;
    bool owner_known;
    pthread_t owner; /* that was pinned last */
    cpu_set_t pins;
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

/* Returns the nanoseconds that it took beyond a short while. */
static uint64_t wait_for_change(gate *g, unsigned number)
{
    for (int spin = 0; spin < SPINS_MAX; spin++) {
        if (atomic_load_explicit(&g->number, memory_order_acquire) != number)
            return 0;
        pause_briefly();
    }
    uint64_t began_ns = pd_clock_now_ns();
    atomic_fetch_add(&g->sleepers, 1);
    while (atomic_load(&g->number) == number)
        syscall(SYS_futex, &g->number, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
    atomic_fetch_sub(&g->sleepers, 1);
    return pd_clock_now_ns() - began_ns;
}

static void open_gate(gate *g, unsigned number)
{
    /* Sequentially consistent against the sleeper's "count me, then look": one of us sees. */
    atomic_store(&g->number, number);
    if (atomic_load(&g->sleepers) != 0)
        syscall(SYS_futex, &g->number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void kern_team_barrier(kern_team *team)
{
    /* Read before arriving: once all have arrived the owner may change it. */
    const uint32_t active = team->active;
    if (active == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    unsigned number = atomic_load_explicit(&team->barrier.number, memory_order_relaxed);
    if (atomic_fetch_add(&team->arrived, 1) + 1 < active) {
        uint64_t slept_ns = wait_for_change(&team->barrier, number);
        if (slept_ns > 0)
            atomic_fetch_add_explicit(&team->slept_ns, slept_ns, memory_order_relaxed);
        return;
    }
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    open_gate(&team->barrier, number + 1);
}

uint32_t kern_team_take(kern_team *team)
{
    if (team->active == 1) {
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
    for (unsigned number = 0;; number++) {
        (void)wait_for_change(&team->starts[thread], number);
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

uint32_t kern_team_active(const kern_team *team)
{
    return team->active;
}

static void start_helpers(kern_team *team, uint32_t end)
{
    for (uint32_t thread = 1; thread < end; thread++) {
        unsigned number = atomic_load_explicit(&team->starts[thread].number, memory_order_relaxed);
        open_gate(&team->starts[thread], number + 1);
    }
}

static void judge_anew(kern_team *team)
{
    team->judged_ns = 0;
    atomic_store_explicit(&team->slept_ns, 0, memory_order_relaxed);
}

/* Where cores are taken by others, whoever is kept from its own holds up all at the next barrier,
 * and many threads can be slower than one. What they did not sleep is how many of them the machine
 * lets work; when that is little more than half, so many go on without the rest. */
static void judge(kern_team *team, uint64_t ns)
{
    if (team->active < team->threads) {
        if (--team->apart_left > 0)
            return;
        team->active = team->threads;
        judge_anew(team);
        return;
    }
    team->judged_ns += ns;
    if (team->judged_ns < JUDGE_NS)
        return;
    uint64_t all_ns = team->judged_ns * team->threads;
    uint64_t slept_ns = atomic_load_explicit(&team->slept_ns, memory_order_relaxed);
    uint64_t worked_ns = all_ns > slept_ns ? all_ns - slept_ns : 0;
    if (worked_ns * 5 < all_ns * 3) {
        uint64_t half = team->judged_ns / 2;
        team->active = (uint32_t)((worked_ns + half) / team->judged_ns);
        team->active = team->active == 0 ? 1 : team->active;
        team->apart_left = team->apart_runs;
        team->apart_runs *= team->apart_runs < APART_RUNS_MAX ? 4 : 1;
    } else {
        team->apart_runs /= team->apart_runs > APART_RUNS_MIN ? 2 : 1;
    }
    judge_anew(team);
}

/* ---- CPUs of their own ---- */

static void pin(const kern_team *team, uint32_t thread, pthread_t handle)
{
    uint32_t skip = thread % (uint32_t)CPU_COUNT(&team->pins);
    cpu_set_t one;
    int cpu = 0;

    for (; !CPU_ISSET(cpu, &team->pins) || skip-- > 0; cpu++)
        pd_assert(cpu < CPU_SETSIZE);
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    int error = pthread_setaffinity_np(handle, sizeof one, &one);
    if (error != 0) {
        errno = error;
        pd_log_warn("msg=\"a compute thread is not pinned: %m\" thread=%u cpu=%d", thread, cpu);
    }
}

void kern_team_pin(kern_team *team, const cpu_set_t *cpus)
{
    if (CPU_COUNT(cpus) == 0)
        return;
    team->pins = *cpus;
    team->pinned = true;
    team->owner_known = false;
    for (uint32_t thread = 1; thread <= team->started; thread++)
        pin(team, thread, team->handles[thread]);
}

/* Whoever runs first is often not who made the team. */
static void pin_owner(kern_team *team)
{
    pthread_t self = pthread_self();

    if (team->owner_known && pthread_equal(team->owner, self))
        return;
    team->owner = self;
    team->owner_known = true;
    pin(team, 0, self);
}

void kern_team_run(kern_team *team, kern_team_fn *fn, void *ctx)
{
    uint64_t began_ns = team->threads > 1 ? pd_clock_now_ns() : 0;

    if (team->pinned)
        pin_owner(team);
    team->fn = fn;
    team->ctx = ctx;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    start_helpers(team, team->active);
    fn(ctx, 0);
    kern_team_barrier(team);
    if (team->threads > 1)
        judge(team, pd_clock_now_ns() - began_ns);
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
    threads = threads == 0 ? pd_cpus_usable() : threads;
    team->threads = threads < KERN_THREADS_MAX ? threads : KERN_THREADS_MAX;
    for (uint32_t thread = 1; thread < team->threads && status == PD_OK; thread++) {
        status = start_helper(team, thread);
        team->started += status == PD_OK;
    }
    team->active = team->threads;
    team->apart_runs = APART_RUNS_MIN;
    if (status != PD_OK) {
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
    start_helpers(team, team->started + 1);
    for (uint32_t thread = 1; thread <= team->started; thread++)
        pthread_join(team->handles[thread], NULL);
    pd_free(team);
}
