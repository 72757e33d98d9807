#include "deploy/supervise.h"

#include "common/base/clock.h"
#include "common/base/cpus.h"
#include "common/base/json.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/process.h"
#include "deploy/check_devices.h"
#include "deploy/check_split.h"
#include "deploy/http_get.h"
#include "deploy/hung.h"
#include "deploy/launch.h"
#include "deploy/state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define GRACE_NS         (10 * PD_NS_PER_S) /* SIGTERM to SIGKILL */
#define CRASH_UPTIME_NS  (10 * PD_NS_PER_S) /* a longer run begins a new row of crashes */
#define BACKOFF_FIRST_NS (500 * PD_NS_PER_MS)
#define BACKOFF_MAX_NS   (8 * PD_NS_PER_S)
#define PROGRESS_NS      (2 * PD_NS_PER_S)
#define COMPLETE_NS      (10 * PD_NS_PER_S) /* patience for the last workers of a ready cluster */
#define LOOK_NS          PD_NS_PER_S        /* between two looks at who stands still */
#define LOOK_TIMEOUT_MS  500
#define WORKERS_MAX      (4u << 20) /* bytes of GET /workers */
#define CHOSEN_MAX       6
#define LINE_MAX_BYTES   1024

typedef struct service {
    state_service *state;
    char binary[LAUNCH_PATH_MAX];
    long log_from;
    uint64_t started_ns;
    uint64_t restart_due_ns; /* 0: not waiting to be restarted */
    uint32_t crashes;
    bool running;
    bool hung; /* stood still, and was killed for it */
} service;

typedef struct supervisor {
    const supervise_options *options;
    const pd_deployment *deployment;
    pd_listen listen; /* with its real port */
    state *state;
    service *services; /* [state->services_count] */
    launch_shared shared;
    const char **sets; /* [sets_count]; the operator's, then chosen */
    char chosen[CHOSEN_MAX][1400];
    int lock_fd;
    int report_fd; /* detached and not ready yet: to the process that waits; else -1 */
    bool detached;
    bool stopping, killed;
    uint64_t kill_due_ns;
    uint64_t started_ns;
    hung hung;
    uint64_t look_ns;     /* when to look next for who stands still */
    uint64_t answered_ns; /* since when /ready says 200; 0: it does not */
    pd_status result;
} supervisor;

/* --- what people see --- */

/* kind: 'P' progress, 'E' failure, 'R' ready. In the foreground straight to the terminal; detached
 * through the pipe to the process that waits, and into the log. */
static void say(supervisor *s, char kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void say(supervisor *s, char kind, const char *format, ...)
{
    char line[LINE_MAX_BYTES];
    va_list args;

    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    for (char *at = line; *at != '\0'; at++)
        *at = (unsigned char)*at < 0x20 ? '?' : *at;
    if (!s->detached) {
        fprintf(kind == 'E' ? stderr : stdout, "%s%s\n", kind == 'E' ? "kvferry: " : "", line);
        fflush(stdout);
        return;
    }
    if (kind == 'E')
        pd_log_error("msg=\"%s\"", line);
    else
        pd_log_info("msg=\"%s\"", line);
    if (s->report_fd >= 0 && dprintf(s->report_fd, "%c%s\n", kind, line) < 0)
        pd_log_warn("msg=\"supervise: nobody waits any more: %m\"");
}

/* --- preparation: nothing has been started yet --- */

static void add_service(supervisor *s, const char *role, uint32_t index)
{
    state_service *at = &s->state->services[s->state->services_count];

    if (strcmp(role, "router") == 0)
        snprintf(at->name, sizeof at->name, "router");
    else
        snprintf(at->name, sizeof at->name, "%s-%u", role, index);
    snprintf(at->role, sizeof at->role, "%s", role);
    snprintf(at->phase, sizeof at->phase, "stopped");
    s->services[s->state->services_count++].state = at;
}

static pd_status add_services(supervisor *s)
{
    const pd_deployment *d = s->deployment;
    char why[512];

    add_service(s, "router", 0);
    for (uint32_t i = 0; i < d->prefill.workers; i++)
        add_service(s, "prefill", i);
    for (uint32_t i = 0; i < d->decode.workers; i++)
        add_service(s, "decode", i);
    for (uint32_t i = 0; i < s->state->services_count; i++) {
        service *at = &s->services[i];
        pd_status status = launch_find(at->state->role, at->binary, why);
        if (status != PD_OK) {
            say(s, 'E', "%s", why);
            return status;
        }
    }
    return PD_OK;
}

static pd_status check_model(supervisor *s)
{
    const char *path = s->deployment->model.path;
    char folder[1024];

    if (access(path, R_OK) == 0)
        return PD_OK;
    int error = errno;
    if (path[0] == '/' || getcwd(folder, sizeof folder) == NULL)
        say(s, 'E', "model.path: %s: %s", path, strerror(error));
    else
        say(s, 'E', "model.path: %s: %s (from the working directory %s)", path, strerror(error),
            folder);
    return PD_E_INVALID;
}

static pd_status check_roles(supervisor *s)
{
    char why[512];
    pd_status status = check_devices(s->deployment, why, sizeof why);

    if (status == PD_OK)
        status = check_split(s->deployment, why, sizeof why);
    if (status != PD_OK)
        say(s, 'E', "%s", why);
    return status;
}

/* The pools are touched page by page, as requests come: without this the kernel would promise more
 * than there is, and kill a worker some day. */
static pd_status check_memory(supervisor *s)
{
    const pd_deployment *d = s->deployment;
    uint64_t machine = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint32_t workers = d->prefill.workers + d->decode.workers;
    const double gib = 1ull << 30;

    if (d->kv.memory_bytes <= machine / workers)
        return PD_OK;
    say(s, 'E', "kv.memory: %u workers with %.2f GiB each are more than this machine's %.2f GiB",
        workers, (double)d->kv.memory_bytes / gib, (double)machine / gib);
    return PD_E_INVALID;
}

/* A port nobody has, other than those picked before. */
static pd_status pick_port(const char *host, const uint16_t *taken, size_t taken_count,
                           uint16_t *port_out, char why[128])
{
    for (int attempt = 0; attempt < 16; attempt++) {
        uint16_t port;
        bool fresh = true;
        pd_status status = http_probe_listen(host, 0, &port, why);
        if (status != PD_OK)
            return status;
        for (size_t i = 0; i < taken_count; i++)
            fresh &= taken[i] != port;
        if (fresh) {
            *port_out = port;
            return PD_OK;
        }
    }
    snprintf(why, 128, "no free port");
    return PD_E_IO;
}

static pd_status choose_listen(supervisor *s, uint16_t *port_out)
{
    const pd_listen *listen = &s->deployment->router.listen;
    char why[128];
    pd_status status = http_probe_listen(listen->host, listen->port, port_out, why);

    if (status != PD_OK) {
        say(s, 'E', "router.listen: %s: %s", listen->text, why);
        return status;
    }
    s->listen = *listen;
    s->listen.port = *port_out;
    s->listen.text = s->state->listen;
    snprintf(s->state->listen, sizeof s->state->listen, listen->ipv6 ? "[%s]:%u" : "%s:%u",
             listen->host, *port_out);
    snprintf(s->chosen[0], sizeof s->chosen[0], "router.listen=%s", s->state->listen);
    return PD_OK;
}

/* An endpoint with its real port. "tcp://HOST:0": one is picked. */
static pd_status choose_endpoint(supervisor *s, const char *key, const char *endpoint,
                                 uint16_t *taken, size_t *taken_count, char out[1400])
{
    char host[256], why[128];
    uint16_t port;

    pd_assert(endpoint != NULL);
    size_t len = strlen(endpoint);
    snprintf(out, 1400, "%s=%s", key, endpoint);
    if (strncmp(endpoint, "tcp://", 6) != 0 || strcmp(endpoint + len - 2, ":0") != 0)
        return PD_OK;
    bool brackets = endpoint[6] == '[';
    snprintf(host, sizeof host, "%.*s", (int)(len - 8 - (brackets ? 2 : 0)),
             endpoint + 6 + (brackets ? 1 : 0));
    pd_status status = pick_port(host, taken, *taken_count, &port, why);
    if (status != PD_OK) {
        say(s, 'E', "%s: %s: %s", key, endpoint, why);
        return status;
    }
    taken[(*taken_count)++] = port;
    snprintf(out, 1400, "%s=%.*s:%u", key, (int)(len - 2), endpoint, port);
    return PD_OK;
}

static void choose_threads(supervisor *s)
{
    const pd_deployment *d = s->deployment;
    uint32_t cpus = pd_cpus_usable();

    snprintf(s->chosen[4], sizeof s->chosen[4], "prefill.threads=%u",
             pd_deployment_threads(d, &d->prefill, cpus));
    snprintf(s->chosen[5], sizeof s->chosen[5], "decode.threads=%u",
             pd_deployment_threads(d, &d->decode, cpus));
}

/* What the services must agree on goes to each of them as a --set. */
static pd_status choose(supervisor *s)
{
    const pd_deployment *d = s->deployment;
    uint16_t taken[4];
    size_t taken_count = 1;
    pd_status status = choose_listen(s, &taken[0]);

    if (status == PD_OK)
        status = choose_endpoint(s, "router.control", d->router.control, taken, &taken_count,
                                 s->chosen[1]);
    if (status == PD_OK)
        status = choose_endpoint(s, "router.tokens", d->router.tokens, taken, &taken_count,
                                 s->chosen[2]);
    if (status == PD_OK)
        status = choose_endpoint(s, "router.events", d->router.events, taken, &taken_count,
                                 s->chosen[3]);
    if (status != PD_OK)
        return status;
    choose_threads(s);
    size_t count = s->options->sets_count + CHOSEN_MAX;
    if (count > PD_DEPLOYMENT_SETS_MAX) {
        say(s, 'E', "too many --set options: at most %d", PD_DEPLOYMENT_SETS_MAX - CHOSEN_MAX);
        return PD_E_INVALID;
    }
    s->sets = pd_calloc(count, sizeof *s->sets);
    if (s->sets == NULL) {
        say(s, 'E', "no memory");
        return PD_E_NOMEM;
    }
    for (size_t i = 0; i < count; i++)
        s->sets[i] = i < s->options->sets_count ? s->options->sets[i]
                                                : s->chosen[i - s->options->sets_count];
    s->shared = (launch_shared){
        .file = s->options->file, .state_dir = d->state_dir, .sets = s->sets, .sets_count = count};
    return PD_OK;
}

/* Holds the lock, so whatever an earlier run left has no supervisor: end it. */
static void end_leftovers(supervisor *s)
{
    state *old = pd_calloc(1, sizeof *old);
    char why[256];

    if (old != NULL && state_read(s->deployment->state_dir, old, why) == PD_OK) {
        for (uint32_t i = 0; i < old->services_count; i++) {
            if (!state_process_signal(&old->services[i].process, SIGKILL))
                continue;
            say(s, 'P', "ended %s of an earlier run (pid %d)", old->services[i].name,
                (int)old->services[i].process.pid);
            state_process_wait(&old->services[i].process, 5000);
        }
    }
    pd_free(old);
}

static pd_status take_lock(supervisor *s)
{
    const pd_deployment *d = s->deployment;
    char why[256];
    pd_status status = state_make_dirs(d->state_dir, why);

    if (status == PD_OK)
        status = state_lock(d->state_dir, &s->lock_fd, why);
    if (status == PD_E_OVERLOAD)
        say(s, 'E', "cluster '%s' is already running (state in %s): kvferry down -f %s ends it",
            d->cluster, d->state_dir, s->options->file);
    else if (status != PD_OK)
        say(s, 'E', "state_dir: %s", why);
    return status;
}

static pd_status prepare(supervisor *s)
{
    const pd_deployment *d = s->deployment;
    pd_status status = take_lock(s);

    if (status == PD_OK)
        status = check_model(s);
    if (status == PD_OK)
        status = check_roles(s);
    if (status == PD_OK)
        status = check_memory(s);
    if (status == PD_OK)
        status = add_services(s);
    if (status != PD_OK)
        return status;
    end_leftovers(s);
    snprintf(s->state->cluster, sizeof s->state->cluster, "%s", d->cluster);
    snprintf(s->state->file, sizeof s->state->file, "%s", s->options->file);
    return choose(s);
}

/* --- running --- */

static void set_phase(service *at, const char *phase)
{
    snprintf(at->state->phase, sizeof at->state->phase, "%s", phase);
}

static void write_state(supervisor *s)
{
    pd_status status = state_write(s->deployment->state_dir, s->state);

    if (status != PD_OK && s->result == PD_OK && !s->state->ready)
        s->result = status; /* told; later the cluster is worth more than its note */
}

static void begin_stop(supervisor *s, pd_status result)
{
    if (s->result == PD_OK)
        s->result = result;
    if (s->stopping)
        return;
    s->stopping = true;
    s->kill_due_ns = pd_clock_now_ns() + GRACE_NS;
    for (uint32_t i = 0; i < s->state->services_count; i++) {
        s->services[i].restart_due_ns = 0;
        if (s->services[i].running)
            kill(s->services[i].state->process.pid, SIGTERM); /* our child, not reaped: surely it */
    }
}

static void kill_all(supervisor *s)
{
    s->killed = true;
    for (uint32_t i = 0; i < s->state->services_count; i++) {
        if (s->services[i].running)
            kill(s->services[i].state->process.pid, SIGKILL);
    }
}

static void start_service(supervisor *s, service *at, bool first)
{
    pd_status status = launch_start(&s->shared, at->binary, first, at->state, &at->log_from);

    at->restart_due_ns = 0;
    if (status != PD_OK) {
        set_phase(at, "failed");
        say(s, 'E', "%s cannot be started: see the line above", at->state->name);
        if (!s->state->ready)
            begin_stop(s, status);
        return;
    }
    at->running = true;
    at->started_ns = pd_clock_now_ns();
    at->state->restarts += first ? 0 : 1;
    set_phase(at, s->state->ready ? "running" : "starting");
}

/* A service ended while the cluster runs: restart it with back-off, however often; what brought it
 * down may pass. Only one whose configuration is wrong (status 2) stays down. */
static void plan_restart(supervisor *s, service *at, int wait_status, uint64_t now_ns)
{
    at->crashes = now_ns - at->started_ns > CRASH_UPTIME_NS ? 1 : at->crashes + 1;
    if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 2) {
        set_phase(at, "failed");
        say(s, 'E', "%s %s; not restarted: its configuration is wrong", at->state->name,
            at->state->last_error);
        return;
    }
    uint64_t wait_ns = BACKOFF_FIRST_NS;
    for (uint32_t i = 1; i < at->crashes && wait_ns < BACKOFF_MAX_NS; i++)
        wait_ns *= 2;
    at->restart_due_ns = now_ns + wait_ns;
    set_phase(at, "waiting");
    say(s, 'E', "%s %s; restarted in %llu ms", at->state->name, at->state->last_error,
        (unsigned long long)(wait_ns / PD_NS_PER_MS));
}

static void on_exit_of(supervisor *s, service *at, int wait_status)
{
    at->running = false;
    launch_why(&s->shared, at->state, at->log_from, wait_status, at->state->last_error);
    if (at->hung)
        snprintf(at->state->last_error, sizeof at->state->last_error,
                 "stood still for %llu s and was killed",
                 (unsigned long long)(s->hung.after_ns / PD_NS_PER_S));
    at->hung = false;
    at->state->process = (state_process){0};
    if (s->stopping) {
        set_phase(at, "stopped");
    } else if (!s->state->ready) {
        set_phase(at, "failed");
        say(s, 'E', "%s %s (log: %s/logs/%s.log)", at->state->name, at->state->last_error,
            s->deployment->state_dir, at->state->name);
        begin_stop(s, PD_E_PEER);
    } else {
        plan_restart(s, at, wait_status, pd_clock_now_ns());
    }
}

/* True when a service ended. */
static bool reap(supervisor *s)
{
    bool any = false;
    int wait_status;
    pid_t pid;

    while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
        for (uint32_t i = 0; i < s->state->services_count; i++) {
            if (s->services[i].running && s->services[i].state->process.pid == pid) {
                on_exit_of(s, &s->services[i], wait_status);
                any = true;
            }
        }
    }
    return any;
}

static bool any_running(const supervisor *s)
{
    for (uint32_t i = 0; i < s->state->services_count; i++) {
        if (s->services[i].running)
            return true;
    }
    return false;
}

static void become_ready(supervisor *s, uint64_t now_ns)
{
    s->state->ready = true;
    for (uint32_t i = 0; i < s->state->services_count; i++)
        set_phase(&s->services[i], "running");
    write_state(s);
    say(s, 'R', "ready after %.1f s: http://%s/v1 (%s)",
        (double)(now_ns - s->started_ns) / (double)PD_NS_PER_S, s->state->listen,
        s->detached ? "kvferry down ends it" : "Ctrl-C ends it");
    if (s->report_fd >= 0) {
        close(s->report_fd);
        s->report_fd = -1;
    }
}

/* Whether the answer of /ready counts every worker and every pair of them. One pair is enough to be
 * ready, but whoever starts a cluster wants to see all of it. */
static bool is_complete(const pd_deployment *d, const pd_buf *body)
{
    pd_json *root = NULL;
    pd_json_error error;
    if (pd_json_parse(pd_buf_text(body), body->len, &root, &error) != PD_OK)
        return true; /* it says 200, and nothing that could be counted */
    const pd_json *prefill = pd_json_get(root, "prefill"), *decode = pd_json_get(root, "decode");
    const pd_json *links = pd_json_get(root, "links");
    bool complete = prefill == NULL || decode == NULL || links == NULL ||
                    (pd_json_integer(prefill) >= d->prefill.workers &&
                     pd_json_integer(decode) >= d->decode.workers &&
                     pd_json_integer(links) >= (int64_t)d->prefill.workers * d->decode.workers);
    pd_json_free(root);
    return complete;
}

/* One look at /ready while the cluster starts. */
static void check_ready(supervisor *s, uint64_t *progress_ns)
{
    uint64_t now_ns, late_ns = s->started_ns + s->options->ready_timeout_ns;
    char answer[128] = "nobody answers yet";
    int code = 0;
    bool complete = false;
    pd_buf body;

    pd_buf_init(&body, 65536);
    if (http_get(&s->listen, "/ready", 1000, &code, &body) == PD_OK) {
        snprintf(answer, sizeof answer, "GET /ready: %d %.100s", code, pd_buf_text(&body));
        complete = is_complete(s->deployment, &body);
    }
    pd_buf_fini(&body);
    now_ns = pd_clock_now_ns();
    if (code != 200)
        s->answered_ns = 0;
    else if (s->answered_ns == 0)
        s->answered_ns = now_ns;
    if (reap(s)) {
        write_state(s); /* one ended meanwhile: whatever /ready said is of before */
    } else if (code == 200 && (complete || now_ns - s->answered_ns > COMPLETE_NS)) {
        if (!complete)
            say(s, 'P', "not all workers are there yet: %s", answer);
        become_ready(s, now_ns);
    } else if (now_ns > late_ns) {
        say(s, 'E', "not ready after %llu s: %s (logs: %s/logs)",
            (unsigned long long)(s->options->ready_timeout_ns / PD_NS_PER_S), answer,
            s->deployment->state_dir);
        begin_stop(s, PD_E_TIMEOUT);
    } else if (now_ns - *progress_ns > PROGRESS_NS) {
        *progress_ns = now_ns;
        say(s, 'P', "%.0f s: %s", (double)(now_ns - s->started_ns) / (double)PD_NS_PER_S, answer);
    }
}

/* A stopped or stuck worker holds its place, and others' blocks that it may still write: its death
 * sets both free. What it is worth, a new one is too: it was given up long ago. */
static void end_hung(supervisor *s)
{
    pd_json *root = NULL;
    pd_json_error error;
    const pd_json *workers = NULL;
    int code = 0;
    pd_buf body;

    if (s->hung.after_ns == 0 || pd_clock_now_ns() < s->look_ns)
        return;
    pd_buf_init(&body, WORKERS_MAX);
    if (http_get(&s->listen, "/workers", LOOK_TIMEOUT_MS, &code, &body) == PD_OK && code == 200 &&
        pd_json_parse(pd_buf_text(&body), body.len, &root, &error) == PD_OK)
        workers = pd_json_get(root, "workers");
    if (workers != NULL && pd_json_type_of(workers) != PD_JSON_ARRAY)
        workers = NULL;
    uint64_t now_ns = pd_clock_now_ns();
    s->look_ns = now_ns + LOOK_NS;
    hung_on_answer(&s->hung, s->state, workers, now_ns);
    pd_json_free(root);
    pd_buf_fini(&body);
    for (uint32_t i = 0; i < s->state->services_count; i++) {
        service *at = &s->services[i];
        if (!at->running || at->hung || !hung_is(&s->hung, i, now_ns))
            continue;
        at->hung = true;
        say(s, 'E', "%s stands still: killed (heartbeat.hung_after)", at->state->name);
        kill(at->state->process.pid, SIGKILL); /* our child, not reaped: surely it */
    }
}

/* Detached, not ready yet: the process that asked for the cluster is gone, so is the wish. */
static bool waiter_gone(const supervisor *s)
{
    struct pollfd p = {.fd = s->report_fd};
    return s->report_fd >= 0 && poll(&p, 1, 0) > 0 && (p.revents & (POLLERR | POLLHUP)) != 0;
}

static void on_signal(supervisor *s, int signal)
{
    if (signal == SIGCHLD)
        return;
    if (s->stopping) {
        kill_all(s); /* asked twice: at once */
        return;
    }
    say(s, 'P', "stopping (%s)", strsignal(signal));
    begin_stop(s, s->state->ready ? PD_OK : PD_E_CANCELLED);
}

static void restart_due(supervisor *s)
{
    uint64_t now_ns = pd_clock_now_ns();
    bool any = false;

    for (uint32_t i = 0; i < s->state->services_count; i++) {
        service *at = &s->services[i];
        if (at->restart_due_ns != 0 && now_ns >= at->restart_due_ns) {
            start_service(s, at, false);
            any = true;
        }
    }
    if (any)
        write_state(s);
}

static void start_all(supervisor *s)
{
    const pd_deployment *d = s->deployment;

    s->started_ns = pd_clock_now_ns();
    /* Given up by the router first: then nothing is lost. */
    hung_init(&s->hung, d->heartbeat.hung_after_ns == 0
                            ? 0
                            : d->heartbeat.lost_after_ns + d->heartbeat.hung_after_ns);
    s->state->supervisor.pid = getpid();
    if (pd_process_started(getpid(), &s->state->supervisor.start) != PD_OK)
        s->result = PD_E_INTERNAL;
    say(s, 'P', "starting cluster '%s': 1 router, %u prefill, %u decode (logs: %s/logs)",
        s->deployment->cluster, s->deployment->prefill.workers, s->deployment->decode.workers,
        s->deployment->state_dir);
    write_state(s); /* before the first process, so that `down` always finds the supervisor */
    for (uint32_t i = 0; i < s->state->services_count && !s->stopping; i++)
        start_service(s, &s->services[i], true);
    write_state(s);
    if (s->result != PD_OK)
        begin_stop(s, s->result);
}

static void watch(supervisor *s, const sigset_t *signals)
{
    uint64_t progress_ns = s->started_ns;

    while (!s->stopping || any_running(s)) {
        struct timespec pause = {.tv_nsec = (long)(100 * PD_NS_PER_MS)};
        int signal = sigtimedwait(signals, NULL, &pause);
        if (signal > 0)
            on_signal(s, signal);
        if (reap(s))
            write_state(s);
        if (s->stopping) {
            if (!s->killed && pd_clock_now_ns() > s->kill_due_ns)
                kill_all(s);
        } else if (!s->state->ready) {
            check_ready(s, &progress_ns);
            if (waiter_gone(s))
                begin_stop(s, PD_E_CANCELLED);
        } else {
            restart_due(s);
            end_hung(s);
        }
    }
}

static void clean_up(supervisor *s)
{
    const char *const endpoints[] = {s->deployment->router.control, s->deployment->router.tokens,
                                     s->deployment->router.events};

    for (size_t i = 0; i < 3; i++) {
        if (strncmp(endpoints[i], "ipc://", 6) == 0)
            unlink(endpoints[i] + 6);
    }
    state_remove(s->deployment->state_dir);
}

/* nohup and background jobs of a script start us with signals ignored, and mean it; but a blocked
 * signal is delivered to sigtimedwait even so. */
static void add_unless_ignored(sigset_t *signals, int signal)
{
    struct sigaction action;

    if (sigaction(signal, NULL, &action) != 0 || action.sa_handler != SIG_IGN)
        sigaddset(signals, signal);
}

static pd_status run(supervisor *s)
{
    sigset_t signals;

    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGTERM);
    add_unless_ignored(&signals, SIGINT);
    add_unless_ignored(&signals, SIGHUP);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    start_all(s);
    watch(s, &signals);
    clean_up(s);
    if (s->state->ready)
        say(s, 'P', "cluster '%s' has ended", s->deployment->cluster);
    return s->result;
}

/* --- detached --- */

/* The child: away from the terminal, standard output into the supervisor's own log. */
static bool leave_terminal(const supervisor *s)
{
    char path[LAUNCH_PATH_MAX];
    bool good = false;

    snprintf(path, sizeof path, "%s/logs/supervisor.log", s->deployment->state_dir);
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int log_fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    if (null_fd >= 0 && log_fd >= 0)
        good =
            setsid() >= 0 && dup2(null_fd, 0) >= 0 && dup2(log_fd, 1) >= 0 && dup2(log_fd, 2) >= 0;
    if (null_fd >= 0)
        close(null_fd);
    if (log_fd >= 0)
        close(log_fd);
    return good;
}

static volatile sig_atomic_t relay_pid; /* the supervisor, for the handler */

static void pass_on(int signal)
{
    kill((pid_t)relay_pid, signal);
}

/* Shows what the supervisor reports until it is ready, or gone with everything it started. */
static pd_status relay(int fd, pid_t pid)
{
    FILE *reports = fdopen(fd, "r");
    char line[LINE_MAX_BYTES + 8];
    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART};
    bool ready = false, told = false;

    relay_pid = pid; /* Ctrl-C ends what was started; then this process sees the end */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (reports == NULL) {
        fprintf(stderr, "kvferry: %s\n", strerror(errno));
        close(fd); /* the supervisor sees it and stops */
        return PD_E_IO;
    }
    while (fgets(line, sizeof line, reports) != NULL) {
        if (line[0] == 'E')
            fprintf(stderr, "kvferry: %s", line + 1);
        else
            fputs(line + 1, stdout);
        fflush(stdout);
        ready |= line[0] == 'R';
        told |= line[0] == 'E';
    }
    fclose(reports);
    if (ready)
        return PD_OK;
    waitpid(pid, NULL, 0);
    if (!told)
        fprintf(stderr, "kvferry: the supervisor ended before the cluster was ready\n");
    return PD_E_PEER;
}

static pd_status run_detached(supervisor *s)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) != 0) {
        say(s, 'E', "pipe: %s", strerror(errno));
        return PD_E_IO;
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid < 0) {
        say(s, 'E', "fork: %s", strerror(errno));
        close(ends[0]);
        close(ends[1]);
        return PD_E_IO;
    }
    if (pid > 0) {
        close(ends[1]);
        close(s->lock_fd); /* the lock is held by the child's descriptor of it */
        s->lock_fd = -1;
        return relay(ends[0], pid);
    }
    close(ends[0]);
    s->report_fd = ends[1];
    s->detached = true;
    pd_status status = PD_E_IO;
    if (leave_terminal(s))
        status = run(s);
    else
        say(s, 'E', "cannot detach: %s", strerror(errno));
    _exit(status == PD_OK ? 0 : 1);
}

pd_status supervise_up(const supervise_options *options)
{
    supervisor *s = pd_calloc(1, sizeof *s);
    pd_status status = PD_E_NOMEM;

    if (s != NULL) {
        s->state = pd_calloc(1, sizeof *s->state);
        s->services = pd_calloc(STATE_SERVICES_MAX, sizeof *s->services);
        s->options = options;
        s->deployment = options->deployment;
        s->lock_fd = s->report_fd = -1;
    }
    if (s == NULL || s->state == NULL || s->services == NULL) {
        fprintf(stderr, "kvferry: no memory\n");
        goto out;
    }
    status = prepare(s);
    if (status == PD_OK)
        status = options->detach ? run_detached(s) : run(s);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
out:
    if (s != NULL) {
        pd_free(s->sets);
        pd_free(s->services);
        pd_free(s->state);
    }
    pd_free(s);
    return status;
}

/* --- down --- */

/* Services whose supervisor is gone: normally the kernel has ended them already. */
static pd_status end_services(const state *s)
{
    pd_status status = PD_OK;

    for (uint32_t i = 0; i < s->services_count; i++) {
        const state_process *process = &s->services[i].process;
        if (state_process_wait(process, 500))
            continue;
        state_process_signal(process, SIGKILL);
        if (!state_process_wait(process, 5000)) {
            fprintf(stderr, "kvferry: %s (pid %d) does not end\n", s->services[i].name,
                    (int)process->pid);
            status = PD_E_TIMEOUT;
        }
    }
    return status;
}

pd_status supervise_down(const char *cluster, const char *state_dir, bool *was_running_out)
{
    int grace_ms = (int)(GRACE_NS / PD_NS_PER_MS) + 5000;
    state *s = pd_calloc(1, sizeof *s);
    char why[256] = "no memory";
    pd_status status = s != NULL ? state_read(state_dir, s, why) : PD_E_NOMEM;

    if (status == PD_E_NOT_FOUND) {
        *was_running_out = false;
        status = PD_OK;
        goto out;
    }
    if (status != PD_OK) {
        fprintf(stderr, "kvferry: %s\n", why);
        goto out;
    }
    bool was_running = state_process_signal(&s->supervisor, SIGTERM);
    if (was_running && !state_process_wait(&s->supervisor, grace_ms)) {
        fprintf(stderr, "kvferry: the supervisor of '%s' (pid %d) did not end in order: killed\n",
                cluster, (int)s->supervisor.pid);
        state_process_signal(&s->supervisor, SIGKILL);
        state_process_wait(&s->supervisor, 5000);
    }
    status = end_services(s);
    if (status == PD_OK) {
        state_remove(state_dir);
        *was_running_out = was_running;
    }
out:
    pd_free(s);
    return status;
}
