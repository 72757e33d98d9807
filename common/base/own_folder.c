#include "common/base/own_folder.h"

#include "common/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool is_ours(const struct stat *info)
{
    return info->st_uid == geteuid() && (info->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/* Every component that is missing. */
static pd_status make(const char *path)
{
    char part[PATH_MAX];
    size_t len = strlen(path);

    if (len == 0 || len >= sizeof part) {
        pd_log_warn("msg=\"a folder's name has to have 1 to %zu bytes\" bytes=%zu", sizeof part - 1,
                    len);
        return PD_E_IO;
    }
    memcpy(part, path, len + 1);
    for (char *at = part + 1; at <= part + len; at++) {
        if (*at != '/' && *at != '\0')
            continue;
        char end = *at;
        *at = '\0';
        if (mkdir(part, 0700) != 0 && errno != EEXIST) {
            pd_log_warn("msg=\"the folder cannot be made: %m\" folder=%s at=%s", path, part);
            return PD_E_IO;
        }
        *at = end;
    }
    return PD_OK;
}

pd_status pd_own_folder_open(const char *path, int *folder_out)
{
    struct stat info;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (folder < 0 && errno == ENOENT) {
        pd_status status = make(path);
        if (status != PD_OK)
            return status;
        folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    if (folder < 0 || fstat(folder, &info) != 0) {
        bool other = errno == ENOTDIR;
        pd_log_warn("msg=\"the folder cannot be opened: %m\" folder=%s", path);
        if (folder >= 0)
            close(folder);
        return other ? PD_E_INVALID : PD_E_IO;
    }
    if (!is_ours(&info)) {
        pd_log_warn("msg=\"the folder is another user's, or others may write to it\" folder=%s "
                    "uid=%u mode=%04o",
                    path, (unsigned)info.st_uid, (unsigned)info.st_mode & 07777);
        close(folder);
        return PD_E_INVALID;
    }
    *folder_out = folder;
    return PD_OK;
}

pd_status pd_own_folder_open_file(int folder, const char *name, int *fd_out, struct stat *info_out)
{
    pd_assert(strchr(name, '/') == NULL);
    /* not blocking: what is a FIFO would wait for a writer */
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

    if (fd < 0 && errno == ENOENT)
        return PD_E_NOT_FOUND;
    if (fd < 0) {
        bool link = errno == ELOOP;
        pd_log_warn("msg=\"a file of the folder cannot be opened: %m\" file=%s", name);
        return link ? PD_E_INVALID : PD_E_IO;
    }
    if (fstat(fd, info_out) != 0) {
        pd_log_warn("msg=\"a file of the folder cannot be looked at: %m\" file=%s", name);
        close(fd);
        return PD_E_IO;
    }
    if (!S_ISREG(info_out->st_mode) || !is_ours(info_out)) {
        pd_log_warn("msg=\"a file of the folder is no regular one, another user's, or others may "
                    "write to it\" file=%s uid=%u mode=%06o",
                    name, (unsigned)info_out->st_uid, (unsigned)info_out->st_mode);
        close(fd);
        return PD_E_INVALID;
    }
    *fd_out = fd;
    return PD_OK;
}
