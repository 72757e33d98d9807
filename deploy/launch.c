#include "deploy/launch.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define TAIL_BYTES 16384 /* of a log, searched for the last error */

static const char *binary_name(const char *role)
{
    if (strcmp(role, "router") == 0)
        return "router";
    return strcmp(role, "prefill") == 0 ? "prefill-worker" : "decode-worker";
}

static bool is_executable(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && access(path, X_OK) == 0;
}

pd_status launch_find(const char *role, char path_out[LAUNCH_PATH_MAX], char why[512])
{
    const char *name = binary_name(role), *given = getenv("KVFERRY_BIN_DIR");
    char self[LAUNCH_PATH_MAX - 64];
    int n;

    if (given != NULL && given[0] != '\0') {
        n = snprintf(path_out, LAUNCH_PATH_MAX, "%s/%s", given, name);
        if (n < LAUNCH_PATH_MAX && is_executable(path_out))
            return PD_OK;
        snprintf(why, 512, "no executable '%s' in %.200s (KVFERRY_BIN_DIR)", name, given);
        return PD_E_NOT_FOUND;
    }
    ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    if (len <= 0) {
        snprintf(why, 512, "/proc/self/exe: %s", strerror(errno));
        return PD_E_NOT_FOUND;
    }
    self[len] = '\0';
    const char *folder = dirname(self);
    static const char *const places[] = {"", "/../router", "/../deploy"};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        n = snprintf(path_out, LAUNCH_PATH_MAX, "%s%s/%s", folder, places[i], name);
        if (n < LAUNCH_PATH_MAX && is_executable(path_out))
            return PD_OK;
    }
    snprintf(why, 512, "no executable '%s' beside %.300s/kvferry: build it first", name, folder);
    return PD_E_NOT_FOUND;
}

static const char **make_arguments(const launch_shared *shared, const char *binary,
                                   const state_service *service)
{
    const char **argv = pd_calloc(8 + 2 * shared->sets_count, sizeof *argv);
    size_t n = 0;

    if (argv == NULL)
        return NULL;
    argv[n++] = binary;
    argv[n++] = "-f";
    argv[n++] = shared->file;
    if (strcmp(service->role, "router") != 0) {
        argv[n++] = "--name";
        argv[n++] = service->name;
    }
    for (size_t i = 0; i < shared->sets_count; i++) {
        argv[n++] = "--set";
        argv[n++] = shared->sets[i];
    }
    return argv;
}

/* The child between fork and exec. */
static _Noreturn void become(const char **argv, pid_t supervisor, int log_fd)
{
    sigset_t none;
    int null_fd = open("/dev/null", O_RDONLY);

    /* whoever starts a cluster owns it: no service outlives its supervisor, however that ends */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != supervisor)
        _exit(1);
    setpgid(0, 0); /* Ctrl-C is for the supervisor, which then stops all in order */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (null_fd < 0 || dup2(null_fd, 0) < 0 || dup2(log_fd, 1) < 0 || dup2(log_fd, 2) < 0)
        _exit(127);
    if (close_range(3, ~0u, 0) != 0)
        _exit(127);
    execv(argv[0], (char *const *)argv);
    dprintf(2, "level=error svc=kvferry msg=\"%s cannot be executed: %s\"\n", argv[0],
            strerror(errno));
    _exit(127);
}

static void log_path(const launch_shared *shared, const state_service *service,
                     char out[LAUNCH_PATH_MAX])
{
    snprintf(out, LAUNCH_PATH_MAX, "%s/logs/%s.log", shared->state_dir, service->name);
}

pd_status launch_start(const launch_shared *shared, const char *binary, bool truncate,
                       state_service *service, long *log_from_out)
{
    const char **argv = make_arguments(shared, binary, service);
    pd_status status = PD_E_IO;
    pid_t supervisor = getpid();
    char path[LAUNCH_PATH_MAX];

    log_path(shared, service, path);
    int log_fd =
        open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (truncate ? O_TRUNC : 0), 0666);
    if (argv == NULL) {
        status = PD_E_NOMEM;
        goto out;
    }
    if (log_fd < 0) {
        pd_log_error("msg=\"supervise: log cannot be opened: %m\" path=%s", path);
        goto out;
    }
    *log_from_out = (long)lseek(log_fd, 0, SEEK_END);
    pid_t pid = fork();
    if (pid == 0)
        become(argv, supervisor, log_fd);
    if (pid < 0) {
        pd_log_error("msg=\"supervise: fork failed: %m\" service=%s", service->name);
        goto out;
    }
    service->process.pid = pid;
    service->started_unix_ms = pd_clock_unix_ms();
    /* our child: not reaped yet, so the entry in /proc is its own, even when it is a zombie */
    if (pd_process_started(pid, &service->process.start) != PD_OK)
        service->process.start = 0;
    status = PD_OK;
out:
    if (log_fd >= 0)
        close(log_fd);
    pd_free(argv);
    return status;
}

/* What the log says about the end: its last level=error line; where there is none and the service
 * ended by itself, the last line of all; else "". */
static const char *telling_line(char *text, bool by_itself)
{
    const char *last = "", *last_error = NULL;
    char *rest = NULL;

    for (char *line = strtok_r(text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        last = line;
        if (strstr(line, "level=error") != NULL)
            last_error = line;
    }
    const char *line = last_error != NULL ? last_error : (by_itself ? last : "");
    const char *message = strstr(line, "msg=");
    return message != NULL ? message + 4 : line;
}

void launch_why(const launch_shared *shared, const state_service *service, long log_from,
                int wait_status, char out[STATE_LAST_ERROR_MAX])
{
    char path[LAUNCH_PATH_MAX], tail[TAIL_BYTES + 1];
    size_t len = 0;
    int n;

    if (WIFSIGNALED(wait_status))
        n = snprintf(out, STATE_LAST_ERROR_MAX, "was killed by signal %d (%s)",
                     WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)));
    else
        n = snprintf(out, STATE_LAST_ERROR_MAX, "ended with status %d", WEXITSTATUS(wait_status));
    log_path(shared, service, path);
    FILE *file = fopen(path, "rbe");
    if (file == NULL)
        return;
    if (fseek(file, 0, SEEK_END) == 0) {
        long end = ftell(file);
        long from = end - log_from > TAIL_BYTES ? end - TAIL_BYTES : log_from;
        if (from >= 0 && fseek(file, from, SEEK_SET) == 0)
            len = fread(tail, 1, TAIL_BYTES, file);
    }
    fclose(file);
    tail[len] = '\0';
    const char *line = telling_line(tail, WIFEXITED(wait_status) && WEXITSTATUS(wait_status) != 0);
    if (line[0] == '\0')
        return;
    n += snprintf(out + n, (size_t)(STATE_LAST_ERROR_MAX - n), ": ");
    for (; line[0] != '\0' && n < STATE_LAST_ERROR_MAX - 1; line++) {
        if (line[0] != '"')
            out[n++] = (unsigned char)line[0] < 0x20 ? '?' : line[0];
    }
    out[n] = '\0';
}
