#include "deploy/report_kv.h"

#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/config/value.h"
#include "deploy/http_get.h"
#include "deploy/state.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define ASK_TIMEOUT_MS 2000
#define ANSWER_MAX     (4u << 20)
#define LOOK_AGAIN_MS  2500 /* the router audits each worker every 2 s */
#define LOOKS_MAX      3
#define FAULTS_MAX     64
#define FAULT_BYTES    256

enum { FREE, CACHED, LEASED, RUNNING, QUARANTINED, PARTS };
static const char *const part_names[PARTS] = {"free", "cached", "leased", "running", "quarantined"};

/* What one look found. */
typedef struct look {
    pd_json *workers_answer, *audit_answer; /* or NULL */
    const pd_json *workers, *audits;        /* the lists inside */
    uint32_t faults_count;
    char faults[FAULTS_MAX][FAULT_BYTES]; /* one line each, the same line at the next look */
} look;

typedef struct kv_row {
    const char *name, *role;
    int64_t total, parts[PARTS], promised, suspended;
} kv_row;

/* ---- asking ---- */

static const pd_json *ask(const pd_listen *listen, const char *path, const char *member,
                          pd_json **answer_out)
{
    pd_json_error error;
    const pd_json *list = NULL;
    int code = 0;
    pd_buf body;

    pd_buf_init(&body, ANSWER_MAX);
    if (http_get(listen, path, ASK_TIMEOUT_MS, &code, &body) == PD_OK && code == 200 &&
        pd_json_parse(pd_buf_text(&body), body.len, answer_out, &error) == PD_OK)
        list = pd_json_get(*answer_out, member);
    pd_buf_fini(&body);
    return list != NULL && pd_json_type_of(list) == PD_JSON_ARRAY ? list : NULL;
}

static const char *text_of(const pd_json *object, const char *name)
{
    const pd_json *value = object != NULL ? pd_json_get(object, name) : NULL;
    size_t len;

    return value != NULL && pd_json_type_of(value) == PD_JSON_STRING ? pd_json_string(value, &len)
                                                                     : "";
}

static int64_t number_of(const pd_json *object, const char *name)
{
    const pd_json *value = object != NULL ? pd_json_get(object, name) : NULL;

    return value != NULL && pd_json_type_of(value) == PD_JSON_INTEGER ? pd_json_integer(value) : 0;
}

static size_t count_of(const pd_json *list)
{
    return list != NULL && pd_json_type_of(list) == PD_JSON_ARRAY ? pd_json_count(list) : 0;
}

static const pd_json *named(const pd_json *list, const char *name)
{
    for (size_t i = 0; i < count_of(list); i++) {
        if (strcmp(text_of(pd_json_at(list, i), "name"), name) == 0)
            return pd_json_at(list, i);
    }
    return NULL;
}

static kv_row row_of(const look *l, const pd_json *worker)
{
    const pd_json *ledger = pd_json_get(worker, "ledger");
    const pd_json *audit = named(l->audits, text_of(worker, "name"));
    const pd_json *holds = audit != NULL ? pd_json_get(audit, "holds") : NULL;
    kv_row row = {.name = text_of(worker, "name"),
                  .role = text_of(worker, "role"),
                  .total = number_of(ledger, "total"),
                  .promised = number_of(holds, "promised"),
                  .suspended = number_of(holds, "suspended")};

    for (int i = 0; i < PARTS; i++)
        row.parts[i] = number_of(ledger, part_names[i]);
    return row;
}

static int64_t sum_of(const kv_row *row)
{
    int64_t sum = 0;

    for (int i = 0; i < PARTS; i++)
        sum += row->parts[i];
    return sum;
}

/* ---- what is wrong ---- */

static void fault(look *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void fault(look *l, const char *format, ...)
{
    va_list args;

    if (l->faults_count == FAULTS_MAX)
        return;
    char *line = l->faults[l->faults_count++];
    va_start(args, format);
    vsnprintf(line, FAULT_BYTES, format, args);
    va_end(args);
    for (; *line != '\0'; line++)
        *line = (unsigned char)*line < 0x20 ? '?' : *line;
}

static void judge_worker(look *l, const pd_json *worker)
{
    kv_row row = row_of(l, worker);
    int64_t sum = sum_of(&row), held = sum - row.parts[FREE] - row.parts[CACHED];
    bool idle = number_of(worker, "running") == 0 && number_of(worker, "waiting") == 0 &&
                number_of(worker, "inflight") == 0;

    if (sum != row.total)
        fault(l, "%s: the ledger does not add up: %lld blocks in all, %lld by who holds them",
              row.name, (long long)row.total, (long long)sum);
    if (idle && held > row.parts[QUARANTINED])
        fault(l, "%s: it has no request, and holds blocks for one", row.name);
    const pd_json *audit = named(l->audits, row.name);
    if (audit == NULL)
        return;
    const pd_json *unknown = pd_json_get(audit, "unknown"), *missing;
    for (size_t i = 0; i < count_of(unknown); i++) {
        const pd_json *entry = pd_json_at(unknown, i);
        fault(l,
              "%s: holds request %lld epoch %lld (%s, %lld blocks), which the router does not know",
              row.name, (long long)number_of(entry, "number"), (long long)number_of(entry, "epoch"),
              text_of(entry, "state"), (long long)number_of(entry, "blocks"));
    }
    missing = pd_json_get(audit, "missing");
    for (size_t i = 0; i < count_of(missing); i++) {
        const pd_json *number = pd_json_at(missing, i);
        if (pd_json_type_of(number) == PD_JSON_INTEGER)
            fault(l, "%s: does not have request %lld, on which the router counts", row.name,
                  (long long)pd_json_integer(number));
    }
}

static void take_look(look *l, const pd_listen *listen)
{
    l->workers = ask(listen, "/workers", "workers", &l->workers_answer);
    l->audits = ask(listen, "/audit", "workers", &l->audit_answer);
    if (l->workers == NULL)
        fault(l, "the router does not answer GET /workers");
    for (size_t i = 0; i < count_of(l->workers); i++)
        judge_worker(l, pd_json_at(l->workers, i));
}

static void drop_look(look *l)
{
    pd_json_free(l->workers_answer);
    pd_json_free(l->audit_answer);
    *l = (look){0};
}

/* Keeps those faults that the look before had too. */
static void keep_lasting(look *l, const look *before)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < l->faults_count; i++) {
        for (uint32_t k = 0; k < before->faults_count; k++) {
            if (strcmp(l->faults[i], before->faults[k]) != 0)
                continue;
            if (kept != i)
                memcpy(l->faults[kept], l->faults[i], FAULT_BYTES);
            kept++;
            break;
        }
    }
    l->faults_count = kept;
}

/* Looks until nothing is wrong, or the same is for LOOKS_MAX looks. */
static void look_well(look *l, look *before, const pd_listen *listen)
{
    take_look(l, listen);
    for (int i = 1; i < LOOKS_MAX && l->faults_count > 0 && l->workers != NULL; i++) {
        struct timespec pause = {.tv_sec = LOOK_AGAIN_MS / 1000,
                                 .tv_nsec = LOOK_AGAIN_MS % 1000 * 1000000L};
        nanosleep(&pause, NULL);
        drop_look(before);
        memcpy(before, l, sizeof *l);
        *l = (look){0};
        take_look(l, listen);
        keep_lasting(l, before);
    }
}

/* ---- telling ---- */

/* Incarnations by their workers' names where they have one. */
static void write_waits(const look *l, const char *name, char *out, size_t size)
{
    const pd_json *audit = named(l->audits, name);
    const pd_json *waits = audit != NULL ? pd_json_get(audit, "waits_for") : NULL;
    size_t used = 0;

    snprintf(out, size, "-");
    for (size_t i = 0; i < count_of(waits) && used + 1 < size; i++) {
        const pd_json *value = pd_json_at(waits, i);
        size_t len;
        const char *who =
            pd_json_type_of(value) == PD_JSON_STRING ? pd_json_string(value, &len) : "";
        for (size_t k = 0; k < count_of(l->workers); k++) {
            const pd_json *worker = pd_json_at(l->workers, k);
            if (strcmp(text_of(worker, "incarnation"), who) == 0)
                who = text_of(worker, "name");
        }
        int n = snprintf(out + used, size - used, "%s%s", used > 0 ? "," : "", who);
        used += n > 0 ? (size_t)n : 0;
    }
}

static void print_row(const kv_row *row, const char *promised, const char *suspended,
                      const char *waits)
{
    printf("%-12s %-8s %7lld %7lld %7lld %7lld %7lld %11lld %8s %9s  %s\n", row->name, row->role,
           (long long)row->total, (long long)row->parts[FREE], (long long)row->parts[CACHED],
           (long long)row->parts[LEASED], (long long)row->parts[RUNNING],
           (long long)row->parts[QUARANTINED], promised, suspended, waits);
}

static void print_workers(const look *l)
{
    kv_row all = {.name = "sum", .role = ""};
    char promised[24] = "-", suspended[24] = "-", waits[256];

    printf("%-12s %-8s %7s %7s %7s %7s %7s %11s %8s %9s  %s\n", "NAME", "ROLE", "TOTAL", "FREE",
           "CACHED", "LEASED", "RUNNING", "QUARANTINED", "PROMISED", "SUSPENDED", "WAITS FOR");
    for (size_t i = 0; i < count_of(l->workers); i++) {
        kv_row row = row_of(l, pd_json_at(l->workers, i));
        all.total += row.total;
        all.promised += row.promised;
        all.suspended += row.suspended;
        for (int part = 0; part < PARTS; part++)
            all.parts[part] += row.parts[part];
        if (l->audits != NULL) {
            snprintf(promised, sizeof promised, "%lld", (long long)row.promised);
            snprintf(suspended, sizeof suspended, "%lld", (long long)row.suspended);
        }
        write_waits(l, row.name, waits, sizeof waits);
        print_row(&row, promised, suspended, waits);
    }
    if (l->audits != NULL) {
        snprintf(promised, sizeof promised, "%lld", (long long)all.promised);
        snprintf(suspended, sizeof suspended, "%lld", (long long)all.suspended);
    }
    print_row(&all, promised, suspended, "");
}

static void print_table(const state *s, const look *l)
{
    int64_t oldest_ms = 0;

    printf("cluster %s, KV blocks:\n", s->cluster);
    if (l->workers != NULL)
        print_workers(l);
    for (size_t i = 0; i < count_of(l->audits); i++) {
        int64_t age_ms = number_of(pd_json_at(l->audits, i), "age_ms");
        oldest_ms = age_ms > oldest_ms ? age_ms : oldest_ms;
    }
    for (uint32_t i = 0; i < l->faults_count; i++)
        printf("out of balance: %s\n", l->faults[i]);
    if (l->faults_count == 0 && count_of(l->audits) > 0)
        printf("in balance; router and workers agree (%zu asked, the oldest answer %.1f s ago)\n",
               count_of(l->audits), (double)oldest_ms / 1000);
    else if (l->faults_count == 0)
        printf("in balance; no worker has been audited yet\n");
}

static void write_json(const state *s, const look *l, pd_buf *buf)
{
    pd_buf_puts(buf, "{\"cluster\": ");
    pd_json_write_string(buf, s->cluster, strlen(s->cluster));
    pd_buf_printf(buf, ", \"running\": true, \"balanced\": %s, \"faults\": [",
                  l->faults_count == 0 ? "true" : "false");
    for (uint32_t i = 0; i < l->faults_count; i++) {
        pd_buf_puts(buf, i > 0 ? ", " : "");
        pd_json_write_string(buf, l->faults[i], strlen(l->faults[i]));
    }
    pd_buf_puts(buf, "], \"workers\": ");
    if (l->workers != NULL)
        pd_json_dump(l->workers, buf);
    else
        pd_buf_puts(buf, "null");
    pd_buf_puts(buf, ", \"audit\": ");
    if (l->audits != NULL)
        pd_json_dump(l->audits, buf);
    else
        pd_buf_puts(buf, "null");
    pd_buf_puts(buf, "}\n");
}

static pd_status print_json(const state *s, const look *l)
{
    pd_buf buf;

    pd_buf_init(&buf, 4 * ANSWER_MAX);
    write_json(s, l, &buf);
    pd_status status = pd_buf_status(&buf);
    if (status == PD_OK)
        fputs(pd_buf_text(&buf), stdout);
    else
        fprintf(stderr, "kvferry: no memory\n");
    pd_buf_fini(&buf);
    return status;
}

static pd_status tell(const state *s, bool json, bool *balanced_out)
{
    char host[256];
    pd_listen listen = {.text = s->listen, .host = host};
    pd_scalar_why why;
    look *looks = pd_calloc(2, sizeof *looks);

    if (looks == NULL) {
        fprintf(stderr, "kvferry: no memory\n");
        return PD_E_NOMEM;
    }
    pd_status status = pd_scalar_listen(s->listen, host, &listen.port, &listen.ipv6, &why);
    if (status != PD_OK) {
        fprintf(stderr, "kvferry: state.json: listen: %s\n", why.text);
        pd_free(looks);
        return status;
    }
    look_well(&looks[0], &looks[1], &listen);
    *balanced_out = looks[0].faults_count == 0;
    if (json)
        status = print_json(s, &looks[0]);
    else
        print_table(s, &looks[0]);
    drop_look(&looks[0]);
    drop_look(&looks[1]);
    pd_free(looks);
    return status;
}

pd_status report_kv(const pd_deployment *deployment, bool json, bool *balanced_out)
{
    state *s = pd_calloc(1, sizeof *s);
    char why[256] = "no memory";
    pd_status status = s != NULL ? state_read(deployment->state_dir, s, why) : PD_E_NOMEM;

    *balanced_out = false;
    if (status == PD_E_NOT_FOUND || (status == PD_OK && !state_process_alive(&s->supervisor))) {
        if (json)
            printf("{\"cluster\": \"%s\", \"running\": false, \"balanced\": false, \"faults\": [], "
                   "\"workers\": null, \"audit\": null}\n",
                   deployment->cluster); /* a label: needs no escapes */
        else
            printf("cluster %s: not running\n", deployment->cluster);
        status = PD_OK;
    } else if (status == PD_OK) {
        status = tell(s, json, balanced_out);
    } else {
        fprintf(stderr, "kvferry: %s\n", why);
    }
    pd_free(s);
    return status;
}
