#include "common/base/cpus.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_BYTES = 8192, UNIT = 1000 };

/* One of the two kinds of hierarchy, as it is mounted here. */
typedef struct hierarchy {
    bool unified;         /* version 2 */
    char group[PATH_MAX]; /* this process' in it: "/user.slice"; "": it has none */
    char top[PATH_MAX];   /* the group that is at the mount point */
    char mount[PATH_MAX]; /* "": it is mounted nowhere */
} hierarchy;

/* True when the comma-separated list has the word. */
static bool has_word(const char *list, const char *word)
{
    size_t len = strlen(word);

    for (const char *at = list; *at != '\0'; at += *at == ',') {
        size_t part = strcspn(at, ",");
        if (part == len && memcmp(at, word, len) == 0)
            return true;
        at += part;
    }
    return false;
}

static void copy_text(char out[PATH_MAX], const char *text)
{
    size_t len = strlen(text);

    if (len >= PATH_MAX)
        len = 0; /* cannot be opened anyway */
    memcpy(out, text, len);
    out[len] = '\0';
}

static FILE *open_file(const char *root, const char *path)
{
    char full[PATH_MAX];

    if ((size_t)snprintf(full, sizeof full, "%s%s", root, path) >= sizeof full)
        return NULL;
    return fopen(full, "re");
}

/* "0::/a" is version 2's line, "4:cpu,cpuacct:/a" one of version 1 (cgroups(7)). */
static void read_groups(const char *root, hierarchy *one, hierarchy *two)
{
    char line[LINE_BYTES];
    FILE *file = open_file(root, "/proc/self/cgroup");

    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = '\0';
        *controllers++ = '\0';
        if (strcmp(line, "0") == 0 && controllers[0] == '\0')
            copy_text(two->group, path);
        else if (has_word(controllers, "cpu"))
            copy_text(one->group, path);
    }
    if (file != NULL)
        fclose(file);
}

/* mountinfo writes space, tab, newline and backslash as \ooo (proc(5)). */
static void unescape(char *text)
{
    char *to = text;

    for (const char *at = text; *at != '\0'; to++) {
        unsigned value;
        if (at[0] == '\\' && sscanf(at + 1, "%3o", &value) == 1 && value < 256) {
            *to = (char)value;
            at += 4;
        } else {
            *to = *at++;
        }
    }
    *to = '\0';
}

/* The first mount of each: "36 35 98:0 ROOT MOUNT OPTIONS [FIELDS] - TYPE SOURCE OPTIONS". */
static void read_mounts(const char *root, hierarchy *one, hierarchy *two)
{
    char line[LINE_BYTES];
    FILE *file = open_file(root, "/proc/self/mountinfo");

    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char top[LINE_BYTES], mount[LINE_BYTES], type[32], options[LINE_BYTES];
        const char *tail = strstr(line, " - ");
        if (tail == NULL || sscanf(line, "%*s %*s %*s %s %s", top, mount) != 2 ||
            sscanf(tail, " - %31s %*s %s", type, options) != 2)
            continue;
        hierarchy *h = strcmp(type, "cgroup2") == 0                              ? two
                       : strcmp(type, "cgroup") == 0 && has_word(options, "cpu") ? one
                                                                                 : NULL;
        if (h == NULL || h->mount[0] != '\0')
            continue;
        unescape(top);
        unescape(mount);
        copy_text(h->top, top);
        copy_text(h->mount, mount);
    }
    if (file != NULL)
        fclose(file);
}

/* The first line of folder/name in which so many numbers are. "max" is -1. False: no such file. */
static bool read_numbers(const char *folder, const char *name, long long *numbers, int count)
{
    char path[PATH_MAX], line[128] = "";

    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        return false;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return false;
    const char *at = fgets(line, sizeof line, file);
    fclose(file);
    for (int i = 0; i < count && at != NULL; i++) {
        char *end;
        at += strspn(at, " ");
        numbers[i] = strtoll(at, &end, 10);
        if (strncmp(at, "max", 3) == 0) {
            numbers[i] = -1;
            end = (char *)(uintptr_t)at + 3;
        }
        at = end == at ? NULL : end;
    }
    return at != NULL;
}

/* Of one group. */
static uint64_t quota_of(const char *folder, bool unified)
{
    long long numbers[2]; /* microseconds: the quota, and the period that it is for */
    bool read = unified ? read_numbers(folder, "cpu.max", numbers, 2)
                        : read_numbers(folder, "cpu.cfs_quota_us", &numbers[0], 1) &&
                              read_numbers(folder, "cpu.cfs_period_us", &numbers[1], 1);

    if (!read || numbers[0] <= 0 || numbers[1] <= 0 || numbers[0] > LLONG_MAX / UNIT)
        return 0;
    uint64_t quota = (uint64_t)numbers[0] * UNIT / (uint64_t)numbers[1];
    return quota > 0 ? quota : 1;
}

/* The group's way from the mount point: "/a/b"; "" where it is not below what is mounted (a
 * container that sees the host's names), since then the mount point is all that is known. */
static const char *below_mount(const hierarchy *h)
{
    size_t len = strcmp(h->top, "/") == 0 ? 0 : strlen(h->top);

    if (strstr(h->group, "/..") != NULL || strncmp(h->group, h->top, len) != 0 ||
        h->group[len] != '/')
        return "";
    return h->group + len;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static uint64_t quota_in(const char *root, const hierarchy *h)
{
    char folder[PATH_MAX];
    uint64_t quota = 0;

    if (h->group[0] == '\0' || h->mount[0] == '\0')
        return 0;
    size_t top = (size_t)snprintf(folder, sizeof folder, "%s%s", root, h->mount);
    if (top >= sizeof folder || (size_t)snprintf(folder + top, sizeof folder - top, "%s",
                                                 below_mount(h)) >= sizeof folder - top)
        return 0;
    for (;;) {
        quota = smaller(quota, quota_of(folder, h->unified));
        char *last = strrchr(folder + top, '/');
        if (last == NULL)
            return quota;
        *last = '\0';
    }
}

uint64_t pd_cpus_quota(const char *root)
{
    hierarchy one = {.unified = false}, two = {.unified = true};

    read_groups(root, &one, &two);
    read_mounts(root, &one, &two);
    return smaller(quota_in(root, &one), quota_in(root, &two));
}

uint32_t pd_cpus_within(uint32_t cpus, uint64_t quota)
{
    if (quota != 0 && quota / UNIT < cpus)
        cpus = (uint32_t)(quota / UNIT);
    return cpus > 0 ? cpus : 1;
}

uint32_t pd_cpus_usable(void)
{
    cpu_set_t cpus;

    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0)
        return 1; /* more than cpu_set_t holds */
    return pd_cpus_within((uint32_t)CPU_COUNT(&cpus), pd_cpus_quota(""));
}
