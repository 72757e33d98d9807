#include "router/audit_page.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/metrics/metrics.h"

#include <inttypes.h>
#include <string.h>

enum { UNKNOWN_SHOWN_MAX = 32 };

static const char *const STATES[ROUTER_AUDIT_STATES] = {
    [PD_AUDIT_WAITING] = "waiting",         [PD_AUDIT_COMPUTING] = "computing",
    [PD_AUDIT_HOLDING] = "holding",         [PD_AUDIT_PROMISED] = "promised",
    [PD_AUDIT_LANDING] = "landing",         [PD_AUDIT_LANDED] = "landed",
    [PD_AUDIT_RUNNING] = "running",         [PD_AUDIT_SUSPENDED] = "suspended",
    [PD_AUDIT_QUARANTINED] = "quarantined", [PD_AUDIT_AWAITED] = "awaited",
    [PD_AUDIT_STALLED] = "stalled",
};

typedef struct page {
    pd_buf *out;
    uint32_t count, differences, not_reported;
} page;

static const char *state_name(uint32_t state)
{
    return state < ROUTER_AUDIT_STATES && STATES[state] != NULL ? STATES[state] : "?";
}

static void write_wait(pd_buf *out, const router_audit_wait *wait, bool first)
{
    static const char *const states[] = {[ROUTER_WAIT_LIVES] = "lives",
                                         [ROUTER_WAIT_GONE] = "gone",
                                         [ROUTER_WAIT_UNKNOWN] = "unknown"};
    pd_buf_printf(out, "%s{\"incarnation\":\"%016" PRIx64 "\",\"state\":\"%s\",\"name\":",
                  first ? "" : ",", wait->incarnation, states[wait->state]);
    if (wait->name != NULL)
        pd_json_write_string(out, wait->name, strlen(wait->name));
    else
        pd_buf_puts(out, "null");
    pd_buf_puts(out, "}");
}

static void write_differences(pd_buf *out, const router_audit_view *view)
{
    uint32_t shown =
        view->unknown_count < UNKNOWN_SHOWN_MAX ? view->unknown_count : UNKNOWN_SHOWN_MAX;
    pd_buf_printf(out, ",\"unknown_count\":%u,\"unknown\":[", view->unknown_count);
    for (uint32_t i = 0; i < shown; i++)
        pd_buf_printf(out, "%s{\"number\":%" PRIu64 ",\"epoch\":%u,\"state\":\"%s\",\"blocks\":%u}",
                      i > 0 ? "," : "", view->unknown[i].key.number, view->unknown[i].key.epoch,
                      state_name(view->unknown[i].state), view->unknown[i].blocks);
    shown = view->missing_count < ROUTER_AUDIT_MISSING_MAX ? view->missing_count
                                                           : ROUTER_AUDIT_MISSING_MAX;
    pd_buf_printf(out, "],\"missing_count\":%u,\"missing\":[", view->missing_count);
    for (uint32_t i = 0; i < shown; i++)
        pd_buf_printf(out, "%s%" PRIu64, i > 0 ? "," : "", view->missing[i]);
    pd_buf_puts(out, "],\"waits_for\":[");
    for (uint32_t i = 0; i < view->waits_count; i++)
        write_wait(out, &view->waits[i], i == 0);
    pd_buf_puts(out, "]");
}

static void write_worker(void *ctx, const router_audit_view *view)
{
    page *p = ctx;
    pd_buf *out = p->out;
    const pd_ledger *l = &view->ledger;
    bool first = true;
    p->differences += view->unknown_count + view->missing_count + view->gone_count;
    pd_buf_puts(out, p->count++ > 0 ? ",{\"name\":" : "{\"name\":");
    pd_json_write_string(out, view->name, strlen(view->name));
    pd_buf_printf(out, ",\"role\":\"%s\",\"incarnation\":\"%016" PRIx64 "\",\"reported\":%s",
                  view->role == PD_ROLE_PREFILL ? "prefill" : "decode", view->incarnation,
                  view->answered ? "true" : "false");
    if (!view->answered) {
        p->not_reported++;
        pd_buf_puts(out, ",\"note\":\"no report yet\"}");
        return;
    }
    pd_buf_printf(out,
                  ",\"age_ms\":%" PRIu64
                  ",\"ledger\":{\"total\":%u,\"free\":%u,\"cached\":%u,\"leased\":%u,"
                  "\"running\":%u,\"quarantined\":%u},\"holds\":{",
                  (uint64_t)(view->age_ns / PD_NS_PER_MS), l->total, l->free, l->cached, l->leased,
                  l->running, l->quarantined);
    for (uint32_t i = 0; i < ROUTER_AUDIT_STATES; i++) {
        if (STATES[i] == NULL)
            continue;
        pd_buf_printf(out, "%s\"%s\":%u", first ? "" : ",", STATES[i], view->states[i]);
        first = false;
    }
    pd_buf_printf(out, "},\"expected\":{\"prefill\":%u,\"decode\":%u}", view->expected_prefill,
                  view->expected_decode);
    write_differences(out, view);
    pd_buf_puts(out, "}");
}

void audit_page(const router_core *core, uint64_t now_ns, pd_buf *out)
{
    page p = {.out = out};
    pd_buf_puts(out, "{\"workers\":[");
    router_core_each_audit(core, now_ns, write_worker, &p);
    const char *agree = p.differences > 0                    ? "false"
                        : p.not_reported > 0 || p.count == 0 ? "null"
                                                             : "true";
    pd_buf_printf(out, "],\"not_reported\":%u,\"agree\":%s}", p.not_reported, agree);
}

void audit_page_metrics(const router_core_counters *c, pd_buf *out)
{
    const struct {
        const char *name, *help;
        uint64_t value;
    } plain[] = {
        {"kvferry_requests_resumed_total", "Answers that went on elsewhere in their middle.",
         c->resumed},
        {"kvferry_retry_budget_exhausted_total", "Requests not tried again: too many were lately.",
         c->budget_exhausted},
        {"kvferry_requests_suspect_total",
         "Requests not tried again: two workers died computing them.", c->suspects},
        {"kvferry_refetches_total",
         "Shipped blocks that came wrong or not at all, asked for again.", c->refetches},
        {"kvferry_seal_failures_total", "Shipments that were wrong the second time too.",
         c->seal_failures},
        {"kvferry_sequences_suspended_total", "Sequences their decode worker had no room for.",
         c->suspended},
        {"kvferry_sequences_gave_way_total", "Of these, computed again later.", c->gave_way},
        {"kvferry_moves_total", "Of these, moved with their KV to another decode worker.",
         c->moves},
        {"kvferry_moves_failed_total", "Moves that failed.", c->moves_failed},
        {"kvferry_pulls_total", "Prompts whose leading blocks were fetched instead of computed.",
         c->pulls},
        {"kvferry_pulls_failed_total", "Of these, computed after all.", c->pulls_failed},
    };
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        pd_metrics_write_head(out, PD_METRIC_COUNTER, plain[i].name, plain[i].help);
        pd_metrics_write_sample(out, plain[i].name, NULL, 0, (double)plain[i].value);
    }
    pd_metrics_write_head(out, PD_METRIC_COUNTER, "kvferry_retries_total",
                          "Attempts made again elsewhere, by reason.");
    for (int i = 0; i < ROUTER_RETRY_REASONS; i++) {
        pd_metric_label label = {"reason", router_retry_reason_name((router_retry_reason)i)};
        pd_metrics_write_sample(out, "kvferry_retries_total", &label, 1, (double)c->retries[i]);
    }
    const struct {
        const char *kind;
        uint64_t value;
    } kinds[] = {{"unknown", c->audit_unknown},
                 {"missing", c->audit_missing},
                 {"unstarted", c->audit_unstarted},
                 {"waits", c->audit_waits},
                 {"quarantined", c->audit_quarantined}};
    pd_metrics_write_head(out, PD_METRIC_COUNTER, "kvferry_audit_differences_total",
                          "Differences between the router's view and a worker's, made good.");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        pd_metric_label label = {"kind", kinds[i].kind};
        pd_metrics_write_sample(out, "kvferry_audit_differences_total", &label, 1,
                                (double)kinds[i].value);
    }
}
