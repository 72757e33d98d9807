#include "common/transfer/shared_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* The mapping that holds all of the memory, if it is a shared one of a file. */
static bool find_mapping(uintptr_t memory, uint64_t bytes, pd_shared_file *file)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    bool found = false;

    if (maps == NULL)
        return false;
    while (!found && fgets(line, sizeof line, maps) != NULL) {
        unsigned long long start, end, offset, inode;
        unsigned major_number, minor_number;
        char mode[5];
        if (sscanf(line, "%llx-%llx %4s %llx %x:%x %llu", &start, &end, mode, &offset,
                   &major_number, &minor_number, &inode) != 7 ||
            memory < start || memory >= end)
            continue;
        found = mode[3] == 's' && inode != 0 && bytes <= end - memory;
        file->device = makedev(major_number, minor_number);
        file->inode = inode;
        file->offset = offset + (memory - start);
        break;
    }
    fclose(maps);
    return found;
}

static bool is_file(int fd, const pd_shared_file *file, uint64_t bytes)
{
    struct stat st;

    return fstat(fd, &st) == 0 && st.st_ino == file->inode && st.st_dev == file->device &&
           (uint64_t)st.st_size >= bytes && (uint64_t)st.st_size - bytes >= file->offset;
}

static bool find_descriptor(uint64_t bytes, pd_shared_file *file)
{
    DIR *folder = opendir("/proc/self/fd");
    bool found = false;

    if (folder == NULL)
        return false;
    for (struct dirent *entry; !found && (entry = readdir(folder)) != NULL;) {
        char *end = NULL;
        long fd = strtol(entry->d_name, &end, 10);
        if (end == entry->d_name || *end != '\0' || fd == dirfd(folder))
            continue;
        int flags = fcntl((int)fd, F_GETFL);
        found = is_file((int)fd, file, bytes) && flags >= 0 && (flags & O_ACCMODE) == O_RDWR;
        file->fd = (uint32_t)fd;
    }
    closedir(folder);
    return found;
}

pd_status pd_shared_file_of(const void *memory, uint64_t bytes, pd_shared_file *file_out)
{
    pd_shared_file file = {.pid = (uint32_t)getpid()};

    if (!find_mapping((uintptr_t)memory, bytes, &file) || !find_descriptor(bytes, &file))
        return PD_E_NOT_FOUND;
    *file_out = file;
    return PD_OK;
}

pd_status pd_shared_file_map(const pd_shared_file *file, uint64_t bytes, void **memory_out)
{
    char path[64];
    void *memory = MAP_FAILED;

    snprintf(path, sizeof path, "/proc/%u/fd/%u", file->pid, file->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return PD_E_NOT_FOUND;
    if (bytes > 0 && bytes <= SIZE_MAX && file->offset <= INT64_MAX && is_file(fd, file, bytes))
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)file->offset);
    close(fd);
    if (memory == MAP_FAILED)
        return PD_E_NOT_FOUND;
    *memory_out = memory;
    return PD_OK;
}
