#include "kernels/packs.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/own_folder.h"
#include "kernels/pack_file.h"
#include "kernels/packs_prune.h"
#include "kernels/packs_seen.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { NAME_BYTES = 80 };
#define WAIT_NS       (30 * PD_NS_PER_S)
#define WAIT_A_GIB_NS (20 * PD_NS_PER_S)
#define WAIT_STEP_NS  (5 * PD_NS_PER_MS)
#define SPARE_BYTES   ((uint64_t)64 << 20) /* a disk is not filled to its last byte */
#define HUGE_SHARE    2                    /* 1 / so much in huge pages is enough */

typedef struct getting {
    const kern_packs_want *want;
    kern_packs_fill *fill;
    void *ctx;
    kern_pack_what what;
    int folder;
    char name[NAME_BYTES], tmp[NAME_BYTES];
    bool bad;         /* there is one, and it cannot be used */
    bool waited;      /* for another process' */
    kern_memory made; /* private, filled; base NULL: not yet */
    const char *from; /* for the log: "kept", "made", "private" */
} getting;

/* ---- one that is there ---- */

/* PD_E_NOT_FOUND: none that can be used; the reason is logged unless there simply is none. */
static pd_status take(getting *g, kern_memory *memory_out)
{
    struct stat info;
    const char *why = "";
    int fd;
    pd_status status = pd_own_folder_open_file(g->folder, g->name, &fd, &info);

    if (status == PD_E_NOT_FOUND)
        return status;
    g->bad = true;
    if (status != PD_OK)
        return PD_E_NOT_FOUND;
    status = kern_pack_file_map(fd, (uint64_t)info.st_size, &g->what, memory_out, &why);
    if (status == PD_OK)
        (void)futimens(fd, NULL); /* used now, for kern_packs_prune */
    close(fd);
    if (status == PD_OK)
        return PD_OK;
    pd_log_warn("msg=\"packed weights are not used: %s\" folder=%s file=%s bytes=%" PRIu64, why,
                g->want->place.folder, g->name, (uint64_t)info.st_size);
    return PD_E_NOT_FOUND;
}

/* ---- making one ---- */

static pd_status fill_private(getting *g)
{
    if (g->made.base != NULL)
        return PD_OK;
    pd_status status = kern_memory_map(g->want->bytes, &g->made);
    if (status == PD_OK)
        status = g->fill(g->ctx, &g->made);
    if (status != PD_OK)
        kern_memory_unmap(&g->made);
    g->made.used = 0;
    return status;
}

static bool has_room(const getting *g)
{
    struct statvfs disk;
    uint64_t bytes = kern_pack_file_bytes(g->want->bytes);

    if (bytes > g->want->place.bytes_max) {
        pd_log_warn("msg=\"packed weights are not kept: they are more than all may have\" "
                    "folder=%s bytes=%" PRIu64 " bytes_max=%" PRIu64,
                    g->want->place.folder, bytes, g->want->place.bytes_max);
        return false;
    }
    struct rlimit limit; /* a write beyond it is a signal that kills */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
        pd_log_warn(
            "msg=\"packed weights are not kept: more than a file of this process may have\" "
            "bytes=%" PRIu64 " limit=%" PRIu64,
            bytes, (uint64_t)limit.rlim_cur);
        return false;
    }
    if (fstatvfs(g->folder, &disk) == 0 &&
        (uint64_t)disk.f_bavail * disk.f_frsize < bytes + SPARE_BYTES) {
        pd_log_warn("msg=\"packed weights are not kept: the disk has no room\" folder=%s "
                    "bytes=%" PRIu64 " free=%" PRIu64,
                    g->want->place.folder, bytes, (uint64_t)disk.f_bavail * disk.f_frsize);
        return false;
    }
    return true;
}

/* The lock is the file's that becomes the pack: it is nobody's by the time that one has been put in
 * its place, and whoever waited for it sees by the name that it is another's. */
static bool is_at(const getting *g, int fd, const char *name)
{
    struct stat ours, there;

    return fstat(fd, &ours) == 0 && fstatat(g->folder, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
}

/* The lock on a file that is at g->tmp. PD_E_TIMEOUT: another one holds it for too long; PD_E_IO.
 * Both are logged. */
static pd_status lock_tmp(getting *g, int *fd_out)
{
    uint64_t until_ns =
        pd_clock_now_ns() + WAIT_NS + (uint64_t)(g->want->bytes >> 30) * WAIT_A_GIB_NS;

    for (;;) {
        int fd =
            openat(g->folder, g->tmp, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) {
            if (is_at(g, fd, g->tmp)) {
                *fd_out = fd;
                return PD_OK;
            }
            close(fd);
            continue;
        }
        int error = errno;
        if (fd >= 0)
            close(fd);
        errno = error;
        if (fd < 0 || error != EWOULDBLOCK) {
            pd_log_warn("msg=\"packed weights are not kept: %m\" folder=%s file=%s",
                        g->want->place.folder, g->tmp);
            return PD_E_IO;
        }
        if (!g->waited)
            pd_log_info("msg=\"another process is packing the weights: waiting\" folder=%s",
                        g->want->place.folder);
        g->waited = true;
        if (pd_clock_now_ns() > until_ns) {
            pd_log_warn("msg=\"packed weights are not shared: another process has been making "
                        "them for too long\" folder=%s file=%s",
                        g->want->place.folder, g->tmp);
            return PD_E_TIMEOUT;
        }
        struct timespec step = {.tv_nsec = WAIT_STEP_NS};
        nanosleep(&step, NULL);
    }
}

/* Fills, writes and puts it in its place. PD_E_IO: it could not be kept (logged); g->made is filled
 * all the same. Else fill's errors, PD_E_NOMEM. */
static pd_status make(getting *g, int fd)
{
    pd_status status = fill_private(g);

    if (status != PD_OK)
        return status;
    if (!pd_model_file_is_unchanged(g->want->file)) {
        pd_log_warn("msg=\"packed weights are not kept: the model file is being changed\" path=%s",
                    pd_model_file_path(g->want->file));
        return PD_E_IO;
    }
    if (!has_room(g))
        return PD_E_IO;
    status = ftruncate(fd, 0) == 0 ? kern_pack_file_write(fd, &g->what, g->made.base) : PD_E_IO;
    if (status == PD_E_NOMEM)
        return status;
    if (status == PD_OK &&
        (fchmod(fd, 0400) != 0 || renameat(g->folder, g->tmp, g->folder, g->name) != 0))
        status = PD_E_IO;
    if (status != PD_OK)
        pd_log_warn("msg=\"packed weights are not kept: they cannot be written: %m\" folder=%s "
                    "file=%s",
                    g->want->place.folder, g->tmp);
    return status;
}

static pd_status take_or_make(getting *g, kern_memory *memory_out)
{
    int fd;
    pd_status status = take(g, memory_out);

    if (status == PD_OK)
        return PD_OK;
    status = lock_tmp(g, &fd);
    if (status != PD_OK)
        return status;
    status = PD_E_NOT_FOUND;
    if (!g->bad || g->waited)
        status = take(g, memory_out); /* made in the meantime */
    if (status != PD_OK) {
        status = make(g, fd);
        if (status == PD_OK) {
            kern_packs_prune(g->folder, g->name, g->want->place.bytes_max);
            status = take(g, memory_out);
            g->from = "made";
        }
    }
    if (is_at(g, fd, g->tmp))
        (void)unlinkat(g->folder, g->tmp, 0);
    close(fd);
    return status;
}

/* ---- the whole ---- */

static pd_status from_folder(getting *g, kern_memory *memory_out)
{
    pd_status status = pd_own_folder_open(g->want->place.folder, &g->folder);

    if (status != PD_OK)
        return status;
    pd_hash128 model = kern_packs_model_hash(g->folder, g->want->file);
    g->what = (kern_pack_what){
        .model = model, .layout = g->want->layout, .bytes = (uint64_t)g->want->bytes};
    snprintf(g->name, sizeof g->name, "%016" PRIx64 "%016" PRIx64 "-%016" PRIx64 ".pack", model.hi,
             model.lo, g->want->layout);
    snprintf(g->tmp, sizeof g->tmp, "%.*s.tmp", (int)(strlen(g->name) - strlen(".pack")), g->name);
    g->from = "kept";
    status = take_or_make(g, memory_out);
    close(g->folder);
    return status;
}

static void tell(const getting *g, const kern_memory *memory, uint64_t began_ns)
{
    size_t huge_bytes = kern_memory_huge_bytes(memory);
    bool shared = g->made.base == NULL;

    if (huge_bytes < g->want->bytes / HUGE_SHARE && kern_memory_collapse(memory))
        huge_bytes = kern_memory_huge_bytes(memory);
    pd_log_info("msg=\"weights\" packed=%s folder=%s bytes=%zu huge_bytes=%zu ms=%.1f", g->from,
                shared ? g->want->place.folder : "none", g->want->bytes, huge_bytes,
                (double)(pd_clock_now_ns() - began_ns) / PD_NS_PER_MS);
    if (huge_bytes >= g->want->bytes / HUGE_SHARE)
        return;
    if (shared)
        pd_log_info("msg=\"weights are read from small pages, up to a third slower: this file "
                    "system has no huge ones for files; model.cache_dir on tmpfs has, and "
                    "model.cache_dir: none is a copy for each worker\" folder=%s",
                    g->want->place.folder);
    else
        pd_log_info("msg=\"weights are read from small pages, up to a third slower: the system "
                    "gave no huge ones (/sys/kernel/mm/transparent_hugepage/enabled)\"");
}

pd_status kern_packs_get(const kern_packs_want *want, kern_packs_fill *fill, void *ctx,
                         kern_memory *memory_out)
{
    uint64_t began_ns = pd_clock_now_ns();
    kern_packs_want own = *want;
    getting g = {.want = &own, .fill = fill, .ctx = ctx};
    kern_memory memory = {0};
    pd_status status = PD_E_UNSUPPORTED;

    pd_assert(want->bytes > 0);
    if (own.place.bytes_max == 0)
        own.place.bytes_max = KERN_PACKS_BYTES_MAX;
    if (own.place.folder != NULL)
        status = from_folder(&g, &memory);
    if (status == PD_OK) {
        kern_memory_unmap(&g.made);
    } else {
        status = fill_private(&g);
        if (status != PD_OK)
            return status;
        g.from = "private";
        memory = g.made;
    }
    tell(&g, &memory, began_ns);
    *memory_out = memory;
    return PD_OK;
}
