#include "common/base/peer_watch.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/process.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/pidfd.h>
#include <unistd.h>

enum { WATCHES_MAX = 1024 };

typedef struct watch_entry {
    uint64_t incarnation; /* 0: unused */
    int fd;
    pd_peer_watch *watch;
} watch_entry;

struct pd_peer_watch {
    pd_loop *loop;
    pd_peer_dead_fn *fn;
    void *ctx;
    watch_entry entries[WATCHES_MAX];
};

pd_status pd_peer_watch_create(pd_loop *loop, pd_peer_dead_fn *fn, void *ctx,
                               pd_peer_watch **watch_out)
{
    pd_peer_watch *watch = pd_calloc(1, sizeof *watch);

    if (watch == NULL)
        return PD_E_NOMEM;
    watch->loop = loop;
    watch->fn = fn;
    watch->ctx = ctx;
    *watch_out = watch;
    return PD_OK;
}

static void forget(watch_entry *entry)
{
    pd_loop_remove_fd(entry->watch->loop, entry->fd);
    close(entry->fd);
    entry->incarnation = 0;
}

void pd_peer_watch_destroy(pd_peer_watch *watch)
{
    for (uint32_t i = 0; watch != NULL && i < WATCHES_MAX; i++) {
        if (watch->entries[i].incarnation != 0)
            forget(&watch->entries[i]);
    }
    pd_free(watch);
}

static void on_end(void *ctx, uint32_t epoll_events)
{
    watch_entry *entry = ctx;
    pd_peer_watch *watch = entry->watch;
    uint64_t incarnation = entry->incarnation;

    (void)epoll_events;
    forget(entry);
    watch->fn(watch->ctx, incarnation);
}

static watch_entry *find(const pd_peer_watch *watch, uint64_t incarnation)
{
    for (uint32_t i = 0; i < WATCHES_MAX; i++) {
        if (watch->entries[i].incarnation == incarnation)
            return (watch_entry *)&watch->entries[i];
    }
    return NULL;
}

/* Whether another process has this pid by now. Asked after the pidfd is open, so that nobody can
 * take the pid between the two. */
static bool is_another(int64_t pid, uint64_t started)
{
    uint64_t now_there;

    return started != 0 && pd_process_started(pid, &now_there) == PD_OK && now_there != started;
}

void pd_peer_watch_add(pd_peer_watch *watch, uint64_t incarnation, int64_t pid, uint64_t started)
{
    watch_entry *entry = find(watch, 0);

    if (incarnation == 0 || pid <= 0 || pid > INT32_MAX || find(watch, incarnation) != NULL)
        return;
    int fd = pidfd_open((pid_t)pid, 0);
    if ((fd < 0 && errno == ESRCH) || (fd >= 0 && is_another(pid, started))) {
        if (fd >= 0)
            close(fd);
        watch->fn(watch->ctx, incarnation);
        return;
    }
    if (entry == NULL) {
        pd_log_warn("msg=\"more peers than can be watched: one given up counts as dead\" pid=%lld",
                    (long long)pid);
        if (fd >= 0)
            close(fd);
        return;
    }
    *entry = (watch_entry){.incarnation = incarnation, .fd = fd, .watch = watch};
    if (fd >= 0 && pd_loop_add_fd(watch->loop, fd, EPOLLIN, on_end, entry) == PD_OK)
        return;
    pd_log_warn("msg=\"a peer cannot be watched: given up it counts as dead: %m\" pid=%lld",
                (long long)pid);
    entry->incarnation = 0;
    if (fd >= 0)
        close(fd);
}

bool pd_peer_watch_alive(const pd_peer_watch *watch, uint64_t incarnation)
{
    return incarnation != 0 && find(watch, incarnation) != NULL;
}
