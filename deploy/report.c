#include "deploy/report.h"

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "deploy/ask_router.h"
#include "deploy/state.h"

#include <stdio.h>
#include <string.h>

#define JSON_MAX (8u << 20)

typedef struct report {
    state s;
    bool running;           /* the supervisor lives */
    bool ready;             /* GET /ready is 200, now */
    router_page page;       /* GET /workers */
    const pd_json *workers; /* its list, or NULL */
    char why[ASK_ROUTER_WHY_BYTES];
} report;

static void ask(report *r)
{
    r->ready = r->s.ready && ask_router_is_ok(&r->s, "/ready");
    r->page = ask_router(&r->s, "/workers", "workers", r->why);
    r->workers = r->page.list;
}

static const pd_json *worker_of(const report *r, const char *name)
{
    size_t count = r->workers != NULL ? pd_json_count(r->workers) : 0;

    for (size_t i = 0; i < count; i++) {
        const pd_json *worker = pd_json_at(r->workers, i), *value = pd_json_get(worker, "name");
        size_t len;
        const char *text = value != NULL ? pd_json_string(value, &len) : NULL;
        if (text != NULL && strcmp(text, name) == 0)
            return worker;
    }
    return NULL;
}

static const char *phase_of(const state_service *service)
{
    if (service->process.pid != 0 && !state_process_alive(&service->process))
        return "dead";
    return service->phase;
}

static void write_uptime(const state_service *service, char out[32])
{
    int64_t seconds = (pd_clock_unix_ms() - service->started_unix_ms) / 1000;

    if (service->process.pid == 0 || !state_process_alive(&service->process))
        snprintf(out, 32, "-");
    else if (seconds < 120)
        snprintf(out, 32, "%llds", (long long)seconds);
    else if (seconds < 7200)
        snprintf(out, 32, "%lldm%llds", (long long)seconds / 60, (long long)seconds % 60);
    else
        snprintf(out, 32, "%lldh%lldm", (long long)seconds / 3600, (long long)seconds / 60 % 60);
}

static void write_member(const pd_json *object, const char *name, char *out, size_t size)
{
    const pd_json *value = object != NULL ? pd_json_get(object, name) : NULL;
    size_t len;

    snprintf(out, size, "-");
    if (value == NULL)
        return;
    switch (pd_json_type_of(value)) {
    case PD_JSON_STRING: snprintf(out, size, "%s", pd_json_string(value, &len)); break;
    case PD_JSON_INTEGER: snprintf(out, size, "%lld", (long long)pd_json_integer(value)); break;
    case PD_JSON_REAL: snprintf(out, size, "%.1f", pd_json_number(value)); break;
    default: break;
    }
    for (char *at = out; *at != '\0'; at++)
        *at = (unsigned char)*at < 0x20 ? '?' : *at;
}

static void print_service(const report *r, const state_service *service)
{
    const pd_json *worker = worker_of(r, service->name);
    const pd_json *kv = worker != NULL ? pd_json_get(worker, "ledger") : NULL;
    char uptime[32], pid[16], phase[32], kv_text[64] = "-", free_text[24], total[24], queue[24];
    char backend[64], lanes[64], ranks[24];

    write_uptime(service, uptime);
    snprintf(pid, sizeof pid, "%d", (int)service->process.pid);
    write_member(worker, "state", phase, sizeof phase);
    write_member(worker, "backend", backend, sizeof backend);
    write_member(worker, "queue_ms", queue, sizeof queue);
    write_member(kv, "free", free_text, sizeof free_text);
    write_member(kv, "total", total, sizeof total);
    if (kv != NULL)
        snprintf(kv_text, sizeof kv_text, "%s/%s", free_text, total);
    write_member(worker, "lanes", lanes, sizeof lanes);
    write_member(worker, "tensor_parallel", ranks, sizeof ranks);
    printf("%-12s %-8s %-8s %-9s %-9s %-8s %-8u %-18s %-3s %-13s %-8s %s\n", service->name,
           service->role, service->process.pid != 0 ? pid : "-", phase_of(service), phase, uptime,
           service->restarts, backend, ranks, kv_text, queue, lanes);
}

/* "decode-0: ranks 1 to 3 are pids 17, 18, 19" */
static void print_ranks(const report *r, const state_service *service)
{
    const pd_json *worker = worker_of(r, service->name);
    const pd_json *pids = worker != NULL ? pd_json_get(worker, "rank_pids") : NULL;
    size_t count = pids != NULL ? pd_json_count(pids) : 0;

    if (count == 0)
        return;
    printf("%s: rank%s 1", service->name, count > 1 ? "s" : "");
    if (count > 1)
        printf(" to %zu", count);
    printf(" %s", count > 1 ? "are pids" : "is pid");
    for (size_t i = 0; i < count; i++)
        printf("%s %lld", i > 0 ? "," : "", (long long)pd_json_integer(pd_json_at(pids, i)));
    printf("\n");
}

/* "decode-0: GPU 0000:1b:00.0, NUMA node 0, NIC mlx5_0 (eth2) behind one bridge, CPUs 0-31"; on the
 * host's cores with ", 2 threads" or ", 2 threads pinned to 0-1" behind that */
static void print_placement(const char *name, const pd_json *placement)
{
    char gpu[32], node[24], nic[72], distance[32], cpus[96], pinned[96];

    write_member(placement, "gpu", gpu, sizeof gpu);
    write_member(placement, "numa_node", node, sizeof node);
    write_member(placement, "nic", nic, sizeof nic);
    write_member(placement, "nic_distance", distance, sizeof distance);
    write_member(placement, "cpus", cpus, sizeof cpus);
    write_member(placement, "pinned", pinned, sizeof pinned);
    const pd_json *bound = pd_json_get(placement, "bound");
    const pd_json *threads = pd_json_get(placement, "threads");
    bool has_nic = strcmp(nic, "-") != 0;
    printf("%s: %s%s, NUMA node %s, NIC %s%s%s, CPUs %s%s", name,
           strcmp(gpu, "-") == 0 ? "host's cores" : "GPU ", strcmp(gpu, "-") == 0 ? "" : gpu,
           strcmp(node, "-") == 0 ? "unknown" : node, has_nic ? nic : "unknown", has_nic ? " " : "",
           has_nic ? distance : "", strcmp(cpus, "-") == 0 ? "unknown" : cpus,
           bound != NULL && pd_json_bool(bound) ? "" : " (not bound)");
    long long count = threads != NULL ? (long long)pd_json_integer(threads) : 0;
    if (count > 0)
        printf(", %lld thread%s%s%s", count, count > 1 ? "s" : "",
               strcmp(pinned, "-") == 0 ? "" : " pinned to ",
               strcmp(pinned, "-") == 0 ? "" : pinned);
    printf("\n");
}

/* A line each; ranks 1 .. as "decode-0/1", which is their name in logs. */
static void print_placements(const report *r, const state_service *service)
{
    const pd_json *worker = worker_of(r, service->name);
    const pd_json *own = worker != NULL ? pd_json_get(worker, "placement") : NULL;
    const pd_json *others = worker != NULL ? pd_json_get(worker, "rank_placements") : NULL;
    size_t count = others != NULL ? pd_json_count(others) : 0;

    if (own != NULL)
        print_placement(service->name, own);
    for (size_t i = 0; i < count; i++) {
        char name[sizeof service->name + 24];
        snprintf(name, sizeof name, "%s/%zu", service->name, i + 1);
        print_placement(name, pd_json_at(others, i));
    }
}

static void print_table(const report *r)
{
    printf("cluster %s: %s, http://%s, supervisor pid %d\n", r->s.cluster,
           r->ready ? "ready" : "not ready", r->s.listen, (int)r->s.supervisor.pid);
    if (r->workers == NULL)
        printf("%s\n", r->why);
    printf("%-12s %-8s %-8s %-9s %-9s %-8s %-8s %-18s %-3s %-13s %-8s %s\n", "NAME", "ROLE", "PID",
           "PROCESS", "STATE", "UPTIME", "RESTARTS", "BACKEND", "TP", "KV FREE/TOTAL", "QUEUE MS",
           "LANES");
    for (uint32_t i = 0; i < r->s.services_count; i++)
        print_service(r, &r->s.services[i]);
    for (uint32_t i = 0; i < r->s.services_count; i++)
        print_ranks(r, &r->s.services[i]);
    for (uint32_t i = 0; i < r->s.services_count; i++)
        print_placements(r, &r->s.services[i]);
    for (uint32_t i = 0; i < r->s.services_count; i++) {
        if (r->s.services[i].last_error[0] != '\0')
            printf("%s: its last run %s\n", r->s.services[i].name, r->s.services[i].last_error);
    }
}

static void write_string(pd_buf *buf, const char *name, const char *text)
{
    pd_buf_printf(buf, "\"%s\": ", name);
    pd_json_write_string(buf, text, strlen(text));
    pd_buf_puts(buf, ", ");
}

static pd_status print_json(const report *r)
{
    pd_status status;
    pd_buf buf;

    pd_buf_init(&buf, JSON_MAX);
    pd_buf_puts(&buf, "{");
    write_string(&buf, "cluster", r->s.cluster);
    write_string(&buf, "file", r->s.file);
    write_string(&buf, "listen", r->s.listen);
    if (r->workers == NULL)
        write_string(&buf, "router_silent", r->why);
    else
        pd_buf_puts(&buf, "\"router_silent\": null, ");
    pd_buf_printf(&buf, "\"running\": %s, \"ready\": %s, \"supervisor_pid\": %d, \"services\": [",
                  r->running ? "true" : "false", r->ready ? "true" : "false",
                  (int)r->s.supervisor.pid);
    for (uint32_t i = 0; i < r->s.services_count; i++) {
        const state_service *service = &r->s.services[i];
        bool alive = state_process_alive(&service->process);
        pd_buf_puts(&buf, i == 0 ? "{" : ", {");
        write_string(&buf, "name", service->name);
        write_string(&buf, "role", service->role);
        write_string(&buf, "process", phase_of(service));
        write_string(&buf, "last_error", service->last_error);
        pd_buf_printf(&buf, "\"pid\": %d, \"restarts\": %u, \"uptime_s\": %.3f}",
                      (int)service->process.pid, service->restarts,
                      alive ? (double)(pd_clock_unix_ms() - service->started_unix_ms) / 1000 : 0.0);
    }
    pd_buf_puts(&buf, "], \"workers\": ");
    if (r->workers != NULL)
        pd_json_dump(r->workers, &buf);
    else
        pd_buf_puts(&buf, "null");
    pd_buf_puts(&buf, "}\n");
    status = pd_buf_status(&buf);
    if (status == PD_OK)
        fputs(pd_buf_text(&buf), stdout);
    else
        fprintf(stderr, "kvferry: no memory\n");
    pd_buf_fini(&buf);
    return status;
}

static void print_stopped(const pd_deployment *deployment, bool json)
{
    if (json)
        printf("{\"cluster\": \"%s\", \"running\": false, \"ready\": false, \"services\": [], "
               "\"workers\": null}\n",
               deployment->cluster); /* a label: needs no escapes */
    else
        printf("cluster %s: not running\n", deployment->cluster);
}

pd_status report_status(const pd_deployment *deployment, bool json, report_verdict *verdict_out)
{
    report *r = pd_calloc(1, sizeof *r);
    char why[256] = "no memory";
    pd_status status = r != NULL ? state_read(deployment->state_dir, &r->s, why) : PD_E_NOMEM;

    if (status == PD_OK)
        r->running = state_process_alive(&r->s.supervisor);
    if (status == PD_E_NOT_FOUND || (status == PD_OK && !r->running)) {
        print_stopped(deployment, json); /* a file without its supervisor is what a crash left */
        *verdict_out = REPORT_BAD;
        status = PD_OK;
    } else if (status == PD_OK) {
        ask(r);
        *verdict_out = r->workers != NULL ? REPORT_WELL : REPORT_UNKNOWN;
        if (json)
            status = print_json(r);
        else
            print_table(r);
    } else {
        fprintf(stderr, "kvferry: %s\n", why);
    }
    if (r != NULL)
        router_page_drop(&r->page);
    pd_free(r);
    return status;
}
