#include "common/base/loop.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum { EVENTS_PER_TURN = 64, PREPARE_MAX = 8, SIGNALS_MAX = 8, SLEEP_MAX_MS = 1000 };

typedef struct watch {
    struct watch *next;
    int fd;
    bool dead; /* removed inside this turn: freed after it */
    pd_loop_fd_fn *fn;
    void *ctx;
} watch;

struct pd_loop_timer {
    pd_loop_timer *next;
    uint64_t due_ns;
    pd_loop_fn *fn;
    void *ctx;
};

typedef struct signal_watch {
    int fd;
    pd_loop_fn *fn;
    void *ctx;
} signal_watch;

struct pd_loop {
    int epoll_fd, wake_fd;
    bool stopping;
    watch *watches;
    pd_loop_timer *timers; /* unsorted: a service has a handful */
    uint32_t prepare_count, signals_count;
    struct {
        pd_loop_prepare_fn *fn;
        void *ctx;
    } prepare[PREPARE_MAX];
    signal_watch signals[SIGNALS_MAX];
};

static void on_wake(void *ctx, uint32_t epoll_events)
{
    pd_loop *loop = ctx;
    uint64_t count;

    (void)epoll_events;
    while (read(loop->wake_fd, &count, sizeof count) == sizeof count)
        ;
}

pd_status pd_loop_create(pd_loop **loop_out)
{
    pd_loop *loop = pd_calloc(1, sizeof *loop);
    if (loop == NULL)
        return PD_E_NOMEM;
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    loop->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pd_status status = PD_E_IO;
    if (loop->epoll_fd >= 0 && loop->wake_fd >= 0)
        status = pd_loop_add_fd(loop, loop->wake_fd, EPOLLIN, on_wake, loop);
    else
        pd_log_error("msg=\"loop: epoll or eventfd failed: %m\"");
    if (status != PD_OK) {
        pd_loop_destroy(loop);
        return status;
    }
    *loop_out = loop;
    return PD_OK;
}

static void sweep(pd_loop *loop, bool all)
{
    for (watch **link = &loop->watches; *link != NULL;) {
        watch *entry = *link;
        if (all || entry->dead) {
            *link = entry->next;
            pd_free(entry);
        } else {
            link = &entry->next;
        }
    }
}

void pd_loop_destroy(pd_loop *loop)
{
    if (loop == NULL)
        return;
    sweep(loop, true);
    while (loop->timers != NULL) {
        pd_loop_timer *next = loop->timers->next;
        pd_free(loop->timers);
        loop->timers = next;
    }
    for (uint32_t i = 0; i < loop->signals_count; i++)
        close(loop->signals[i].fd);
    if (loop->wake_fd >= 0)
        close(loop->wake_fd);
    if (loop->epoll_fd >= 0)
        close(loop->epoll_fd);
    pd_free(loop);
}

pd_status pd_loop_add_fd(pd_loop *loop, int fd, uint32_t epoll_events, pd_loop_fd_fn *fn, void *ctx)
{
    watch *entry = pd_calloc(1, sizeof *entry);
    if (entry == NULL)
        return PD_E_NOMEM;
    *entry = (watch){.next = loop->watches, .fd = fd, .fn = fn, .ctx = ctx};
    struct epoll_event event = {.events = epoll_events, .data.ptr = entry};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        pd_log_error("msg=\"loop: cannot watch a descriptor: %m\" fd=%d", fd);
        pd_free(entry);
        return PD_E_IO;
    }
    loop->watches = entry;
    return PD_OK;
}

void pd_loop_remove_fd(pd_loop *loop, int fd)
{
    for (watch *entry = loop->watches; entry != NULL; entry = entry->next) {
        if (entry->fd == fd && !entry->dead) {
            epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
            entry->dead = true;
            return;
        }
    }
}

pd_status pd_loop_add_prepare(pd_loop *loop, pd_loop_prepare_fn *fn, void *ctx)
{
    if (loop->prepare_count == PREPARE_MAX)
        return PD_E_TOO_LARGE;
    loop->prepare[loop->prepare_count].fn = fn;
    loop->prepare[loop->prepare_count++].ctx = ctx;
    return PD_OK;
}

void pd_loop_remove_prepare(pd_loop *loop, pd_loop_prepare_fn *fn, void *ctx)
{
    for (uint32_t i = 0; i < loop->prepare_count; i++) {
        if (loop->prepare[i].fn == fn && loop->prepare[i].ctx == ctx) {
            loop->prepare[i] = loop->prepare[--loop->prepare_count];
            return;
        }
    }
}

pd_status pd_loop_timer_create(pd_loop *loop, pd_loop_fn *fn, void *ctx, pd_loop_timer **timer_out)
{
    pd_loop_timer *timer = pd_calloc(1, sizeof *timer);
    if (timer == NULL)
        return PD_E_NOMEM;
    *timer = (pd_loop_timer){.next = loop->timers, .due_ns = UINT64_MAX, .fn = fn, .ctx = ctx};
    loop->timers = timer;
    *timer_out = timer;
    return PD_OK;
}

void pd_loop_timer_arm(pd_loop_timer *timer, uint64_t due_ns)
{
    timer->due_ns = due_ns;
}

static void on_signal(void *ctx, uint32_t epoll_events)
{
    signal_watch *entry = ctx;
    struct signalfd_siginfo info;

    (void)epoll_events;
    while (read(entry->fd, &info, sizeof info) == (ssize_t)sizeof info)
        entry->fn(entry->ctx);
}

pd_status pd_loop_add_signal(pd_loop *loop, int signal, pd_loop_fn *fn, void *ctx)
{
    if (loop->signals_count == SIGNALS_MAX)
        return PD_E_TOO_LARGE;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal);
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0)
        return PD_E_IO;
    signal_watch *entry = &loop->signals[loop->signals_count];
    *entry =
        (signal_watch){.fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC), .fn = fn, .ctx = ctx};
    if (entry->fd < 0) {
        pd_log_error("msg=\"loop: signalfd failed: %m\"");
        return PD_E_IO;
    }
    loop->signals_count++;
    return pd_loop_add_fd(loop, entry->fd, EPOLLIN, on_signal, entry);
}

static int sleep_ms(const pd_loop *loop)
{
    uint64_t due_ns = UINT64_MAX;
    for (const pd_loop_timer *timer = loop->timers; timer != NULL; timer = timer->next)
        due_ns = timer->due_ns < due_ns ? timer->due_ns : due_ns;
    uint64_t now_ns = pd_clock_now_ns();
    if (due_ns <= now_ns)
        return 0;
    uint64_t wait_ms = (due_ns - now_ns + PD_NS_PER_MS - 1) / PD_NS_PER_MS;
    return wait_ms > SLEEP_MAX_MS ? SLEEP_MAX_MS : (int)wait_ms;
}

static void fire_timers(pd_loop *loop)
{
    uint64_t now_ns = pd_clock_now_ns();
    for (pd_loop_timer *timer = loop->timers; timer != NULL; timer = timer->next) {
        if (timer->due_ns <= now_ns) {
            timer->due_ns = UINT64_MAX;
            timer->fn(timer->ctx);
        }
    }
}

pd_status pd_loop_run(pd_loop *loop)
{
    struct epoll_event events[EVENTS_PER_TURN];

    while (!loop->stopping) {
        bool busy = false;
        for (uint32_t i = 0; i < loop->prepare_count; i++)
            busy |= loop->prepare[i].fn(loop->prepare[i].ctx);
        if (loop->stopping)
            break;
        int n = epoll_wait(loop->epoll_fd, events, EVENTS_PER_TURN, busy ? 0 : sleep_ms(loop));
        if (n < 0 && errno != EINTR) {
            pd_log_error("msg=\"loop: epoll_wait failed: %m\"");
            return PD_E_IO;
        }
        for (int i = 0; i < n; i++) {
            watch *entry = events[i].data.ptr;
            if (!entry->dead)
                entry->fn(entry->ctx, events[i].events);
        }
        fire_timers(loop);
        sweep(loop, false);
    }
    loop->stopping = false; /* for the next run */
    return PD_OK;
}

void pd_loop_stop(pd_loop *loop)
{
    loop->stopping = true;
}

void pd_loop_wake(pd_loop *loop)
{
    uint64_t one = 1;
    ssize_t written = write(loop->wake_fd, &one, sizeof one);
    (void)written; /* full means a wake-up is pending already */
}
