#include "deploy/report_kv.h"

#include "common/base/json.h"
#include "common/base/mem.h"
#include "deploy/ask_router.h"
#include "deploy/state.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define JSON_MAX      (16u << 20)
#define LOOK_AGAIN_MS 2500 /* the router audits each worker every 2 s */
#define LOOKS_MAX     3
#define FAULTS_MAX    64
#define FAULT_BYTES   256

enum { FREE, CACHED, LEASED, RUNNING, QUARANTINED, PARTS };
static const char *const part_names[PARTS] = {"free", "cached", "leased", "running", "quarantined"};

/* What one look found. */
typedef struct look {
    router_page workers_page, audits_page;
    const pd_json *workers, *audits; /* their lists, or NULL */
    char why[ASK_ROUTER_WHY_BYTES];  /* what the router does not say; "": it says all */
    uint32_t faults_count;
    char faults[FAULTS_MAX][FAULT_BYTES]; /* one line each, the same line at the next look */
} look;

typedef struct kv_row {
    const char *name, *role;
    int64_t total, parts[PARTS], promised, suspended;
} kv_row;

/* ---- reading ---- */

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

/* That worker has told the router what it holds; only then do they differ, or agree. */
static bool reported(const pd_json *audit)
{
    const pd_json *value = audit != NULL ? pd_json_get(audit, "reported") : NULL;

    return value != NULL && pd_json_type_of(value) == PD_JSON_BOOL && pd_json_bool(value);
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

/* A terminal is not to obey what came over a network. */
static void replace_controls(char *text)
{
    for (; *text != '\0'; text++)
        *text = (unsigned char)*text < 0x20 ? '?' : *text;
}

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
    replace_controls(line);
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
    if (!reported(audit))
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

static void take_look(look *l, const state *s)
{
    l->workers_page = ask_router(s, "/workers", "workers", l->why);
    l->workers = l->workers_page.list;
    if (l->workers == NULL)
        return;
    l->audits_page = ask_router(s, "/audit", "workers", l->why);
    l->audits = l->audits_page.list;
    for (size_t i = 0; i < count_of(l->workers); i++)
        judge_worker(l, pd_json_at(l->workers, i));
}

static void drop_look(look *l)
{
    router_page_drop(&l->workers_page);
    router_page_drop(&l->audits_page);
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
static void look_well(look *l, look *before, const state *s)
{
    take_look(l, s);
    for (int i = 1; i < LOOKS_MAX && l->faults_count > 0 && l->workers != NULL; i++) {
        struct timespec pause = {.tv_sec = LOOK_AGAIN_MS / 1000,
                                 .tv_nsec = LOOK_AGAIN_MS % 1000 * 1000000L};
        nanosleep(&pause, NULL);
        drop_look(before);
        memcpy(before, l, sizeof *l);
        *l = (look){0};
        take_look(l, s);
        keep_lasting(l, before);
    }
}

/* ---- telling ---- */

/* By what was read: the rest is no fault, and no balance either. */
static report_verdict verdict_of(const look *l)
{
    return l->faults_count > 0                              ? REPORT_BAD
           : l->why[0] != '\0' || count_of(l->workers) == 0 ? REPORT_UNKNOWN
                                                            : REPORT_WELL;
}

/* Whom that worker's quarantined blocks wait for, by name. */
static void write_waits(const look *l, const char *name, char *out, size_t size)
{
    const pd_json *audit = named(l->audits, name);
    const pd_json *waits = audit != NULL ? pd_json_get(audit, "waits_for") : NULL;
    size_t used = 0;

    snprintf(out, size, "-");
    for (size_t i = 0; i < count_of(waits) && used + 1 < size; i++) {
        const pd_json *wait = pd_json_at(waits, i);
        const char *who = text_of(wait, "name");
        bool lives = strcmp(text_of(wait, "state"), "lives") == 0;
        int n = snprintf(out + used, size - used, "%s%s%s", used > 0 ? ", " : "",
                         who[0] != '\0' ? who : "gone (name unknown)",
                         lives || who[0] == '\0' ? "" : " (gone)");
        used += n > 0 ? (size_t)n : 0;
    }
    replace_controls(out);
}

static void print_row(const kv_row *row, const char *promised, const char *suspended,
                      const char *waits)
{
    printf("%-12s %-8s %7lld %7lld %7lld %7lld %7lld %11lld %8s %9s  %s\n", row->name, row->role,
           (long long)row->total, (long long)row->parts[FREE], (long long)row->parts[CACHED],
           (long long)row->parts[LEASED], (long long)row->parts[RUNNING],
           (long long)row->parts[QUARANTINED], promised, suspended, waits);
}

static void write_number(char *out, size_t size, int64_t value, bool known)
{
    snprintf(out, size, "-");
    if (known)
        snprintf(out, size, "%lld", (long long)value);
}

static void print_workers(const look *l)
{
    kv_row all = {.name = "sum", .role = ""};
    char promised[24], suspended[24], waits[256];

    printf("%-12s %-8s %7s %7s %7s %7s %7s %11s %8s %9s  %s\n", "NAME", "ROLE", "TOTAL", "FREE",
           "CACHED", "LEASED", "RUNNING", "QUARANTINED", "PROMISED", "SUSPENDED", "WAITS FOR");
    for (size_t i = 0; i < count_of(l->workers); i++) {
        kv_row row = row_of(l, pd_json_at(l->workers, i));
        all.total += row.total;
        all.promised += row.promised;
        all.suspended += row.suspended;
        for (int part = 0; part < PARTS; part++)
            all.parts[part] += row.parts[part];
        bool known = reported(named(l->audits, row.name));
        write_number(promised, sizeof promised, row.promised, known);
        write_number(suspended, sizeof suspended, row.suspended, known);
        write_waits(l, row.name, waits, sizeof waits);
        print_row(&row, promised, suspended, waits);
    }
    write_number(promised, sizeof promised, all.promised, l->audits != NULL);
    write_number(suspended, sizeof suspended, all.suspended, l->audits != NULL);
    print_row(&all, promised, suspended, "");
}

/* The names of those who have not reported, and of how many; "" and 0: all have. */
static uint32_t write_silent(const look *l, char *out, size_t size)
{
    uint32_t count = 0;
    size_t used = 0;

    out[0] = '\0';
    for (size_t i = 0; i < count_of(l->workers); i++) {
        const char *name = text_of(pd_json_at(l->workers, i), "name");
        if (reported(named(l->audits, name)))
            continue;
        count++;
        if (used + 1 >= size)
            continue;
        int n = snprintf(out + used, size - used, "%s%s", used > 0 ? ", " : "", name);
        used += n > 0 ? (size_t)n : 0;
    }
    replace_controls(out);
    return count;
}

static void print_agreement(const look *l)
{
    char silent[256];
    int64_t oldest_ms = 0;
    uint32_t silent_count = write_silent(l, silent, sizeof silent);

    for (size_t i = 0; i < count_of(l->audits); i++) {
        int64_t age_ms = number_of(pd_json_at(l->audits, i), "age_ms");
        oldest_ms = age_ms > oldest_ms ? age_ms : oldest_ms;
    }
    size_t asked = count_of(l->workers) - silent_count;
    if (asked > 0)
        printf("in balance; router and workers agree (%zu asked, the oldest answer %.1f s ago)\n",
               asked, (double)oldest_ms / 1000);
    else
        printf("in balance, by the workers' ledgers alone\n");
    if (silent_count > 0)
        printf("no report yet to compare with the router's view: %s\n", silent);
}

static void print_table(const state *s, const look *l)
{
    printf("cluster %s, KV blocks:\n", s->cluster);
    if (l->workers != NULL)
        print_workers(l);
    for (uint32_t i = 0; i < l->faults_count; i++)
        printf("out of balance: %s\n", l->faults[i]);
    if (l->why[0] != '\0')
        printf("not known: %s\n", l->why);
    else if (count_of(l->workers) == 0)
        printf("not known: no worker is registered with the router\n");
    else if (l->faults_count == 0)
        print_agreement(l);
}

static void write_list(pd_buf *buf, const char *name, const pd_json *list)
{
    pd_buf_printf(buf, ", \"%s\": ", name);
    if (list != NULL)
        pd_json_dump(list, buf);
    else
        pd_buf_puts(buf, "null");
}

static void write_json(const state *s, const look *l, pd_buf *buf)
{
    static const char *const balanced[] = {
        [REPORT_WELL] = "true", [REPORT_BAD] = "false", [REPORT_UNKNOWN] = "null"};

    pd_buf_puts(buf, "{\"cluster\": ");
    pd_json_write_string(buf, s->cluster, strlen(s->cluster));
    pd_buf_printf(
        buf, ", \"running\": true, \"balanced\": %s, \"router_silent\": ", balanced[verdict_of(l)]);
    if (l->why[0] != '\0')
        pd_json_write_string(buf, l->why, strlen(l->why));
    else
        pd_buf_puts(buf, "null");
    pd_buf_puts(buf, ", \"faults\": [");
    for (uint32_t i = 0; i < l->faults_count; i++) {
        pd_buf_puts(buf, i > 0 ? ", " : "");
        pd_json_write_string(buf, l->faults[i], strlen(l->faults[i]));
    }
    pd_buf_puts(buf, "]");
    write_list(buf, "workers", l->workers);
    write_list(buf, "audit", l->audits);
    pd_buf_puts(buf, "}\n");
}

static pd_status print_json(const state *s, const look *l)
{
    pd_buf buf;

    pd_buf_init(&buf, JSON_MAX);
    write_json(s, l, &buf);
    pd_status status = pd_buf_status(&buf);
    if (status == PD_OK)
        fputs(pd_buf_text(&buf), stdout);
    else
        fprintf(stderr, "kvferry: no memory\n");
    pd_buf_fini(&buf);
    return status;
}

static pd_status tell(const state *s, bool json, report_verdict *verdict_out)
{
    pd_status status = PD_OK;
    look *looks = pd_calloc(2, sizeof *looks);

    if (looks == NULL) {
        fprintf(stderr, "kvferry: no memory\n");
        return PD_E_NOMEM;
    }
    look_well(&looks[0], &looks[1], s);
    *verdict_out = verdict_of(&looks[0]);
    if (json)
        status = print_json(s, &looks[0]);
    else
        print_table(s, &looks[0]);
    drop_look(&looks[0]);
    drop_look(&looks[1]);
    pd_free(looks);
    return status;
}

pd_status report_kv(const pd_deployment *deployment, bool json, report_verdict *verdict_out)
{
    state *s = pd_calloc(1, sizeof *s);
    char why[256] = "no memory";
    pd_status status = s != NULL ? state_read(deployment->state_dir, s, why) : PD_E_NOMEM;

    *verdict_out = REPORT_BAD;
    if (status == PD_E_NOT_FOUND || (status == PD_OK && !state_process_alive(&s->supervisor))) {
        if (json)
            printf("{\"cluster\": \"%s\", \"running\": false, \"balanced\": null, "
                   "\"router_silent\": null, \"faults\": [], \"workers\": null, "
                   "\"audit\": null}\n",
                   deployment->cluster); /* a label: needs no escapes */
        else
            printf("cluster %s: not running\n", deployment->cluster);
        status = PD_OK;
    } else if (status == PD_OK) {
        status = tell(s, json, verdict_out);
    } else {
        fprintf(stderr, "kvferry: %s\n", why);
    }
    pd_free(s);
    return status;
}
