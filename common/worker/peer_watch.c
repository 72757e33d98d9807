#include "common/worker/peer_watch.h"

#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/pidfd.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WATCHES_MAX = 256 };

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

uint64_t pd_peer_watch_host(void)
{
    struct {
        char boot[64];
        uint64_t namespace;
    } place;
    struct stat info;

    memset(&place, 0, sizeof place);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t len = fd < 0 ? -1 : read(fd, place.boot, sizeof place.boot);
    if (fd >= 0)
        close(fd);
    if (len <= 0 || stat("/proc/self/ns/pid", &info) != 0) {
        pd_log_warn(
            "msg=\"which host this is cannot be told: a peer given up counts as dead: %m\"");
        return 0;
    }
    place.namespace = info.st_ino;
    return pd_hash64(&place, sizeof place, 0);
}

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

void pd_peer_watch_add(pd_peer_watch *watch, uint64_t incarnation, int64_t pid)
{
    watch_entry *entry = find(watch, 0);

    if (incarnation == 0 || pid <= 0 || pid > INT32_MAX || find(watch, incarnation) != NULL)
        return;
    if (entry == NULL) {
        pd_log_warn("msg=\"more peers than can be watched: one given up counts as dead\" pid=%lld",
                    (long long)pid);
        return;
    }
    int fd = pidfd_open((pid_t)pid, 0);
    if (fd < 0 && errno == ESRCH) {
        watch->fn(watch->ctx, incarnation);
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
