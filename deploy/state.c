#include "deploy/state.h"

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STATE_BYTES_MAX (2u << 20)
#define PATH_BYTES      1280

static void path_of(const char *state_dir, const char *name, char out[PATH_BYTES])
{
    int n = snprintf(out, PATH_BYTES, "%s/%s", state_dir, name);
    pd_assert(n > 0 && n < PATH_BYTES); /* state_dir is at most 1024 bytes */
}

/* --- processes --- */

bool state_process_alive(const state_process *process)
{
    uint64_t start;

    return process->pid > 0 && pd_process_started(process->pid, &start) == PD_OK &&
           start == process->start;
}

/* A descriptor that stands for this very process; -1 when it is gone. */
static int open_process(const state_process *process)
{
    if (process->pid <= 0)
        return -1;
    int fd = (int)syscall(SYS_pidfd_open, process->pid, 0);
    if (fd >= 0 && !state_process_alive(process)) { /* checked after opening: no gap between */
        close(fd);
        return -1;
    }
    return fd;
}

bool state_process_signal(const state_process *process, int signal)
{
    int fd = open_process(process);

    if (fd < 0)
        return false;
    bool sent = syscall(SYS_pidfd_send_signal, fd, signal, NULL, 0) == 0;
    close(fd);
    return sent;
}

bool state_process_wait(const state_process *process, int timeout_ms)
{
    uint64_t due_ns = pd_clock_now_ns() + (uint64_t)timeout_ms * PD_NS_PER_MS;
    int fd = open_process(process);
    bool gone = fd < 0;

    while (!gone) {
        uint64_t now = pd_clock_now_ns();
        if (now >= due_ns)
            break;
        struct pollfd p = {.fd = fd, .events = POLLIN};
        gone = poll(&p, 1, (int)((due_ns - now) / PD_NS_PER_MS) + 1) > 0;
    }
    if (fd >= 0)
        close(fd);
    return gone;
}

/* --- the file --- */

static void write_text(pd_buf *buf, const char *name, const char *text)
{
    pd_buf_printf(buf, "\"%s\": ", name);
    pd_json_write_string(buf, text, strlen(text));
    pd_buf_puts(buf, ", ");
}

static void write_process(pd_buf *buf, const state_process *process)
{
    pd_buf_printf(buf, "\"pid\": %d, \"start\": %llu", (int)process->pid,
                  (unsigned long long)process->start);
}

static void write_state(const state *s, pd_buf *buf)
{
    pd_buf_puts(buf, "{\"version\": 1, ");
    write_text(buf, "cluster", s->cluster);
    write_text(buf, "file", s->file);
    write_text(buf, "listen", s->listen);
    pd_buf_printf(buf, "\"ready\": %s,\n \"supervisor\": {", s->ready ? "true" : "false");
    write_process(buf, &s->supervisor);
    pd_buf_puts(buf, "},\n \"services\": [");
    for (uint32_t i = 0; i < s->services_count; i++) {
        const state_service *service = &s->services[i];
        pd_buf_puts(buf, i == 0 ? "\n  {" : ",\n  {");
        write_text(buf, "name", service->name);
        write_text(buf, "role", service->role);
        write_text(buf, "phase", service->phase);
        write_text(buf, "last_error", service->last_error);
        pd_buf_printf(buf, "\"restarts\": %u, \"started_unix_ms\": %lld, ", service->restarts,
                      (long long)service->started_unix_ms);
        write_process(buf, &service->process);
        pd_buf_puts(buf, "}");
    }
    pd_buf_puts(buf, "\n ]}\n");
}

pd_status state_write(const char *state_dir, const state *s)
{
    char path[PATH_BYTES], tmp_path[PATH_BYTES];
    pd_status status;
    FILE *file = NULL;
    pd_buf buf;

    path_of(state_dir, "state.json", path);
    path_of(state_dir, "state.json.tmp", tmp_path);
    pd_buf_init(&buf, STATE_BYTES_MAX);
    write_state(s, &buf);
    status = pd_buf_status(&buf);
    if (status != PD_OK) {
        pd_log_error("msg=\"state: no memory to write it\" path=%s", path);
        goto out;
    }
    status = PD_E_IO;
    file = fopen(tmp_path, "wbe");
    if (file == NULL) {
        pd_log_error("msg=\"state: open failed: %m\" path=%s", tmp_path);
        goto out;
    }
    if (fwrite(buf.bytes, 1, buf.len, file) != buf.len || fflush(file) != 0 ||
        rename(tmp_path, path) != 0) {
        pd_log_error("msg=\"state: write failed: %m\" path=%s", path);
        goto out;
    }
    status = PD_OK;
out:
    if (file != NULL)
        fclose(file);
    if (status != PD_OK)
        unlink(tmp_path);
    pd_buf_fini(&buf);
    return status;
}

static void read_text(const pd_json *object, const char *name, char *out, size_t size)
{
    size_t len;
    const char *text = pd_json_string(pd_json_get(object, name), &len);

    snprintf(out, size, "%s", text != NULL ? text : "");
}

static state_process read_process(const pd_json *object)
{
    int64_t pid = pd_json_integer(pd_json_get(object, "pid"));
    int64_t start = pd_json_integer(pd_json_get(object, "start"));

    if (pid <= 1 || pid > INT32_MAX || start <= 0)
        return (state_process){0};
    return (state_process){.pid = (pid_t)pid, .start = (uint64_t)start};
}

static pd_status read_state(const pd_json *root, state *s)
{
    const pd_json *services = pd_json_get(root, "services");

    if (pd_json_integer(pd_json_get(root, "version")) != 1 || services == NULL ||
        pd_json_type_of(services) != PD_JSON_ARRAY || pd_json_count(services) > STATE_SERVICES_MAX)
        return PD_E_INVALID;
    memset(s, 0, sizeof *s);
    read_text(root, "cluster", s->cluster, sizeof s->cluster);
    read_text(root, "file", s->file, sizeof s->file);
    read_text(root, "listen", s->listen, sizeof s->listen);
    const pd_json *ready = pd_json_get(root, "ready");
    s->ready = ready != NULL && pd_json_bool(ready);
    const pd_json *supervisor = pd_json_get(root, "supervisor");
    s->supervisor = supervisor != NULL ? read_process(supervisor) : (state_process){0};
    s->services_count = (uint32_t)pd_json_count(services);
    for (uint32_t i = 0; i < s->services_count; i++) {
        const pd_json *from = pd_json_at(services, i);
        state_service *service = &s->services[i];
        read_text(from, "name", service->name, sizeof service->name);
        read_text(from, "role", service->role, sizeof service->role);
        read_text(from, "phase", service->phase, sizeof service->phase);
        read_text(from, "last_error", service->last_error, sizeof service->last_error);
        service->process = read_process(from);
        service->restarts = (uint32_t)pd_json_integer(pd_json_get(from, "restarts"));
        service->started_unix_ms = pd_json_integer(pd_json_get(from, "started_unix_ms"));
    }
    return PD_OK;
}

pd_status state_read(const char *state_dir, state *s_out, char why[256])
{
    char path[PATH_BYTES], part[4096];
    pd_json *root = NULL;
    pd_json_error error;
    pd_status status = PD_E_IO;
    pd_buf text;
    size_t n;

    path_of(state_dir, "state.json", path);
    FILE *file = fopen(path, "rbe");
    if (file == NULL && (errno == ENOENT || errno == ENOTDIR))
        return PD_E_NOT_FOUND;
    if (file == NULL) {
        snprintf(why, 256, "%.180s: %s", path, strerror(errno));
        return PD_E_IO;
    }
    pd_buf_init(&text, STATE_BYTES_MAX);
    while ((n = fread(part, 1, sizeof part, file)) > 0)
        pd_buf_append(&text, part, n);
    if (ferror(file)) {
        snprintf(why, 256, "%.180s: cannot be read", path);
        goto out;
    }
    status = pd_buf_status(&text);
    if (status == PD_OK)
        status = pd_json_parse(pd_buf_text(&text), text.len, &root, &error);
    if (status == PD_OK)
        status = read_state(root, s_out);
    if (status != PD_OK)
        snprintf(why, 256, "%.180s: is no state file of kvferry", path);
out:
    fclose(file);
    pd_json_free(root);
    pd_buf_fini(&text);
    return status;
}

void state_remove(const char *state_dir)
{
    char path[PATH_BYTES];

    path_of(state_dir, "state.json", path);
    unlink(path);
}

static pd_status make_dir(char *path, char why[256])
{
    for (char *at = path + 1;; at++) {
        if (*at != '/' && *at != '\0')
            continue;
        char was = *at;
        *at = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST) {
            snprintf(why, 256, "%.180s: cannot be made: %s", path, strerror(errno));
            return PD_E_IO;
        }
        *at = was;
        if (was == '\0')
            return PD_OK;
    }
}

pd_status state_make_dirs(const char *state_dir, char why[256])
{
    char path[PATH_BYTES];

    path_of(state_dir, "logs", path);
    return make_dir(path, why);
}

pd_status state_lock(const char *state_dir, int *fd_out, char why[256])
{
    char path[PATH_BYTES];

    path_of(state_dir, "lock", path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        snprintf(why, 256, "%.180s: %s", path, strerror(errno));
        return PD_E_IO;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        pd_status status = errno == EWOULDBLOCK ? PD_E_OVERLOAD : PD_E_IO;
        snprintf(why, 256, "%.180s: %s", path, strerror(errno));
        close(fd);
        return status;
    }
    *fd_out = fd;
    return PD_OK;
}
