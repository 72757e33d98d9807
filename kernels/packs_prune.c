#include "kernels/packs_prune.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PACKS_MAX = 4096, NAME_BYTES = 128, MODEL_CHARS = 32 };
#define DAY_S        (24 * 3600)
#define UNUSED_S     (30 * DAY_S)
#define LAYOUT_S     (7 * DAY_S) /* another layout of the model that was packed just now */
#define UNFINISHED_S (1 * DAY_S)

typedef struct pack {
    char name[NAME_BYTES];
    uint64_t bytes;
    time_t used;
} pack;

static bool ends_with(const char *name, const char *ending)
{
    size_t len = strlen(name), end = strlen(ending);

    return len > end && strcmp(name + len - end, ending) == 0;
}

static void drop(int folder, const char *name, const char *why)
{
    if (unlinkat(folder, name, 0) == 0)
        pd_log_info("msg=\"packed weights removed: %s\" file=%s", why, name);
}

/* By age alone. True: it stays, and is a pack. */
static bool stays(int folder, const char *name, const char *keep, const struct stat *info,
                  time_t now)
{
    time_t age = now - info->st_mtime;
    bool is_pack = ends_with(name, ".pack");

    if (strcmp(name, keep) == 0 || !S_ISREG(info->st_mode))
        return false;
    if (ends_with(name, ".tmp") && age > UNFINISHED_S)
        drop(folder, name, "left unfinished");
    else if ((is_pack || ends_with(name, ".seen")) && age > UNUSED_S)
        drop(folder, name, "not used for 30 days");
    else if (is_pack && age > LAYOUT_S && strncmp(name, keep, MODEL_CHARS) == 0)
        drop(folder, name, "another layout, not used for 7 days");
    else
        return is_pack;
    return false;
}

static int by_use(const void *a, const void *b)
{
    const pack *left = a, *right = b;

    return (left->used > right->used) - (left->used < right->used);
}

void kern_packs_prune(int folder, const char *keep, uint64_t bytes_max)
{
    struct stat info;
    uint64_t bytes =
        fstatat(folder, keep, &info, AT_SYMLINK_NOFOLLOW) == 0 ? (uint64_t)info.st_size : 0;
    time_t now = time(NULL);
    size_t count = 0;
    pack *packs = pd_calloc(PACKS_MAX, sizeof *packs);
    int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = again < 0 ? NULL : fdopendir(again);

    if (dir == NULL && again >= 0)
        close(again);
    for (struct dirent *entry; dir != NULL && packs != NULL && (entry = readdir(dir)) != NULL;) {
        if (strlen(entry->d_name) >= NAME_BYTES || count == PACKS_MAX ||
            fstatat(folder, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
            !stays(folder, entry->d_name, keep, &info, now))
            continue;
        pack *at = &packs[count++];
        memcpy(at->name, entry->d_name, strlen(entry->d_name) + 1);
        at->bytes = (uint64_t)info.st_size;
        at->used = info.st_mtime;
        bytes += at->bytes;
    }
    if (dir != NULL)
        closedir(dir);
    if (count > 0)
        qsort(packs, count, sizeof *packs, by_use);
    for (size_t i = 0; i < count && bytes > bytes_max; i++) {
        bytes -= packs[i].bytes;
        drop(folder, packs[i].name, "the least recently used, and all are too many bytes");
    }
    pd_free(packs);
}
