#include "router/pages.h"
#include "common/base/clock.h"
#include "common/base/json.h"

#include "router/audit_page.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

static void write_text(pd_buf *out, const char *text)
{
    pd_json_write_string(out, text, strlen(text));
}

bool pages_ready(const router_core *core, bool stopping, pd_buf *out)
{
    router_ready ready = router_core_ready(core);
    const char *missing = stopping             ? "the router is shutting down"
                          : ready.prefill == 0 ? "no prefill worker is warm"
                          : ready.decode == 0  ? "no decode worker is warm"
                          : ready.links == 0   ? "no prefill worker is linked to a decode worker"
                                               : NULL;
    pd_buf_printf(out, "{\"ready\":%s,\"prefill\":%u,\"decode\":%u,\"links\":%u,\"missing\":",
                  missing == NULL ? "true" : "false", ready.prefill, ready.decode, ready.links);
    if (missing == NULL)
        pd_buf_puts(out, "null}");
    else {
        write_text(out, missing);
        pd_buf_puts(out, "}");
    }
    return missing == NULL;
}

/* ---- workers ---- */

typedef struct workers_page {
    pd_buf *out;
    uint32_t count;
} workers_page;

/* What is not known is null. */
static void write_placement(pd_buf *out, const pd_msg_placement *placement)
{
    const struct {
        const char *name, *text;
    } texts[] = {{"gpu", placement->bus},
                 {"nic", placement->nic},
                 {"nic_distance", placement->nic_distance},
                 {"cpus", placement->cpus},
                 {"pinned", placement->pinned}};

    pd_buf_puts(out, "{");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        pd_buf_printf(out, "\"%s\":", texts[i].name);
        if (texts[i].text[0] == '\0')
            pd_buf_puts(out, "null");
        else
            write_text(out, texts[i].text);
        pd_buf_puts(out, ",");
    }
    if (placement->numa_node < 0)
        pd_buf_puts(out, "\"numa_node\":null");
    else
        pd_buf_printf(out, "\"numa_node\":%" PRId32, placement->numa_node);
    pd_buf_printf(out, ",\"bound\":%s,\"threads\":", placement->bound ? "true" : "false");
    if (placement->threads == 0)
        pd_buf_puts(out, "null}");
    else
        pd_buf_printf(out, "%" PRIu32 "}", placement->threads);
}

static void write_worker(void *ctx, const router_worker_view *view)
{
    workers_page *page = ctx;
    pd_buf *out = page->out;
    pd_buf_puts(out, page->count++ > 0 ? ",{\"name\":" : "{\"name\":");
    write_text(out, view->name);
    pd_buf_printf(out, ",\"role\":\"%s\",\"state\":\"%s\",\"incarnation\":\"%016" PRIx64 "\"",
                  view->role == PD_ROLE_PREFILL ? "prefill" : "decode", view->state,
                  view->incarnation);
    pd_buf_puts(out, ",\"backend\":");
    write_text(out, view->backend);
    pd_buf_printf(out, ",\"tensor_parallel\":%u,\"rank_pids\":[", view->rank_pids_count + 1);
    for (uint32_t i = 0; i < view->rank_pids_count; i++)
        pd_buf_printf(out, "%s%" PRId64, i > 0 ? "," : "", view->rank_pids[i]);
    pd_buf_puts(out, "]");
    pd_buf_puts(out, ",\"placement\":");
    write_placement(out, view->placement);
    pd_buf_puts(out, ",\"rank_placements\":[");
    for (uint32_t i = 0; view->rank_placements != NULL && i < view->rank_pids_count; i++) {
        pd_buf_puts(out, i > 0 ? "," : "");
        write_placement(out, &view->rank_placements[i]);
    }
    pd_buf_puts(out, "]");
    pd_buf_puts(out, ",\"transfer\":");
    write_text(out, view->transfer);
    pd_buf_puts(out, ",\"lanes\":");
    write_text(out, view->lanes);
    pd_buf_printf(out,
                  ",\"ledger\":{\"total\":%u,\"free\":%u,\"cached\":%u,\"leased\":%u,"
                  "\"running\":%u,\"quarantined\":%u}",
                  view->ledger.total, view->ledger.free, view->ledger.cached, view->ledger.leased,
                  view->ledger.running, view->ledger.quarantined);
    pd_buf_printf(
        out,
        ",\"queue_ms\":%.3f,\"running\":%u,\"waiting\":%u,\"inflight\":%u,"
        "\"index_blocks\":%u,\"index_synced\":%s,\"pid\":%" PRId64 ",\"heartbeat_age_ms\":%" PRIu64
        ",\"shipped_bytes\":%" PRIu64 ",\"suspended\":%" PRIu64 ",\"moved\":%" PRIu64
        ",\"stalled\":%" PRIu64 ",\"speculative\":{\"method\":\"%s\",\"steps\":%" PRIu64
        ",\"draft_tokens\":%" PRIu64 ",\"accepted_tokens\":%" PRIu64 "}}",
        isfinite(view->queue_ms) ? (double)view->queue_ms : 0, view->running, view->waiting,
        view->inflight, view->index_blocks, view->index_synced ? "true" : "false", view->pid,
        (uint64_t)(view->heartbeat_age_ns / PD_NS_PER_MS), view->counts.shipped_bytes,
        view->counts.suspended, view->counts.moved, view->counts.stalled,
        pd_spec_method_name(view->counts.spec_method), view->counts.spec_steps,
        view->counts.spec_drafted, view->counts.spec_accepted);
}

void pages_workers(const router_core *core, uint64_t now_ns, pd_buf *out)
{
    workers_page page = {.out = out};
    pd_buf_puts(out, "{\"workers\":[");
    router_core_each_worker(core, now_ns, write_worker, &page);
    pd_buf_puts(out, "]}");
}

/* ---- metrics ---- */

typedef struct worker_sums {
    pd_buf *out;
    uint64_t running, waiting, used, total;
} worker_sums;

static void sum_worker(void *ctx, const router_worker_view *view)
{
    worker_sums *sums = ctx;
    if (view->role == PD_ROLE_DECODE)
        sums->running += view->running;
    sums->waiting += view->waiting;
    sums->total += view->ledger.total;
    sums->used += view->ledger.leased + view->ledger.running + view->ledger.quarantined;
}

static void write_ledger(void *ctx, const router_worker_view *view)
{
    worker_sums *sums = ctx;
    const struct {
        const char *state;
        uint32_t blocks;
    } parts[] = {{"free", view->ledger.free},
                 {"cached", view->ledger.cached},
                 {"leased", view->ledger.leased},
                 {"running", view->ledger.running},
                 {"quarantined", view->ledger.quarantined}};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        pd_metric_label labels[] = {{"worker", view->name}, {"state", parts[i].state}};
        pd_metrics_write_sample(sums->out, "kvferry_kv_blocks", labels, 2, parts[i].blocks);
    }
}

/* Each worker checks its own ledger on every tick, and ends when it is broken; here it is told by
 * what it says. */
static void write_imbalance(void *ctx, const router_worker_view *view)
{
    worker_sums *sums = ctx;
    const pd_ledger *l = &view->ledger;
    pd_metric_label label = {"worker", view->name};
    pd_metrics_write_sample(sums->out, "kvferry_kv_ledger_imbalance", &label, 1,
                            (double)l->total - l->free - l->cached - l->leased - l->running -
                                l->quarantined);
}

/* The parts of a ledger always sum up: a block that was lost shows as one that is held for nobody.
 */
static void write_held_idle(void *ctx, const router_worker_view *view)
{
    worker_sums *sums = ctx;
    const pd_ledger *l = &view->ledger;
    pd_metric_label label = {"worker", view->name};
    bool idle = view->running == 0 && view->waiting == 0 && view->inflight == 0;
    pd_metrics_write_sample(sums->out, "kvferry_kv_blocks_held_idle", &label, 1,
                            idle ? (double)l->leased + l->running + l->quarantined : 0);
}

static void write_queue(void *ctx, const router_worker_view *view)
{
    worker_sums *sums = ctx;
    pd_metric_label labels[] = {{"worker", view->name},
                                {"role", view->role == PD_ROLE_PREFILL ? "prefill" : "decode"}};
    pd_metrics_write_sample(sums->out, "kvferry_worker_queue_seconds", labels, 2,
                            (double)view->queue_ms / 1000);
}

/* A worker's own counters, since it was started. Only a decode worker has sequences. */
typedef struct worker_counter {
    const char *name, *help;
    size_t at; /* in pd_worker_counts */
    bool decode_only, by_method;
} worker_counter;

static const worker_counter worker_counters[] = {
    {"kvferry_worker_shipped_bytes_total", "KV bytes that a worker wrote to others.",
     offsetof(pd_worker_counts, shipped_bytes), false, false},
    {"kvferry_worker_suspended_total", "Sequences that a decode worker had no room for.",
     offsetof(pd_worker_counts, suspended), true, false},
    {"kvferry_worker_moved_total", "Of these, moved with their KV to another decode worker.",
     offsetof(pd_worker_counts, moved), true, false},
    {"kvferry_worker_stalled_total",
     "Sequences that a decode worker left out of a step for want of a block, each time.",
     offsetof(pd_worker_counts, stalled), true, false},
    {"kvferry_spec_steps_total", "Steps of sequences that brought draft tokens to be verified.",
     offsetof(pd_worker_counts, spec_steps), true, true},
    {"kvferry_spec_draft_tokens_total", "Draft tokens that were proposed.",
     offsetof(pd_worker_counts, spec_drafted), true, true},
    {"kvferry_spec_accepted_tokens_total", "Of these, accepted: the model says the same.",
     offsetof(pd_worker_counts, spec_accepted), true, true},
};

typedef struct counter_page {
    pd_buf *out;
    const worker_counter *counter;
} counter_page;

static void write_worker_counter(void *ctx, const router_worker_view *view)
{
    const counter_page *page = ctx;
    pd_metric_label labels[] = {{"worker", view->name},
                                {"method", pd_spec_method_name(view->counts.spec_method)}};
    uint64_t value;
    memcpy(&value, (const char *)&view->counts + page->counter->at, sizeof value);
    bool off = page->counter->by_method && view->counts.spec_method == PD_SPEC_OFF;
    if ((view->role == PD_ROLE_DECODE || !page->counter->decode_only) && !off)
        pd_metrics_write_sample(page->out, page->counter->name, labels,
                                page->counter->by_method ? 2 : 1, (double)value);
}

static void write_worker_counters(const router_core *core, uint64_t now_ns, pd_buf *out)
{
    for (size_t i = 0; i < sizeof worker_counters / sizeof worker_counters[0]; i++) {
        counter_page page = {.out = out, .counter = &worker_counters[i]};
        pd_metrics_write_head(out, PD_METRIC_COUNTER, page.counter->name, page.counter->help);
        router_core_each_worker(core, now_ns, write_worker_counter, &page);
    }
}

static void gauge(pd_buf *out, const char *name, const char *help, const pd_metric_label *label,
                  double value)
{
    pd_metrics_write_head(out, PD_METRIC_GAUGE, name, help);
    pd_metrics_write_sample(out, name, label, label == NULL ? 0 : 1, value);
}

static void counter(pd_buf *out, const char *name, const char *help, const pd_metric_label *label,
                    uint64_t value)
{
    pd_metrics_write_head(out, PD_METRIC_COUNTER, name, help);
    pd_metrics_write_sample(out, name, label, label == NULL ? 0 : 1, (double)value);
}

static void write_core(const router_core_counters *c, pd_buf *out)
{
    counter(out, "kvferry_requests_accepted_total", "Answers begun (a choice is one).", NULL,
            c->accepted);
    counter(out, "kvferry_requests_finished_total", "Answers that ended by themselves.", NULL,
            c->finished);
    counter(out, "kvferry_requests_failed_total", "Answers that ended with an error.", NULL,
            c->failed);
    counter(out, "kvferry_requests_cancelled_total",
            "Answers ended by their client or a stop string.", NULL, c->cancelled);
    counter(out, "kvferry_requests_retried_total", "Attempts made again elsewhere.", NULL,
            c->retried);
    audit_page_metrics(c, out);
    counter(out, "kvferry_requests_refused_total", "Requests refused for overload.", NULL,
            c->refused_overload);
    counter(out, "kvferry_leases_refused_total", "Leases a decode worker had no room for.", NULL,
            c->leases_refused);
    counter(out, "kvferry_workers_registered_total", "Workers accepted.", NULL,
            c->workers_registered);
    counter(out, "kvferry_workers_refused_total", "Workers refused at registration.", NULL,
            c->workers_refused);
    counter(out, "kvferry_workers_lost_total", "Workers given up.", NULL, c->workers_lost);
    counter(out, "kvferry_tokens_dropped_total",
            "Tokens of earlier attempts or incarnations, and duplicates.", NULL, c->tokens_dropped);
    counter(out, "kvferry_shipped_bytes_total",
            "KV bytes that workers wrote to others, for whatever came of it.", NULL,
            c->shipped_bytes);
    counter(out, "kvferry_index_gaps_total", "Gaps in workers' KV events.", NULL, c->index_gaps);
    gauge(out, "kvferry_requests_queued", "Requests waiting in the router.", NULL, c->queued);
    gauge(out, "kvferry_requests_active", "Requests in flight, queued ones included.", NULL,
          c->active);
}

void pages_metrics(const router_core *core, const char *model, uint32_t connections,
                   uint64_t now_ns, pd_buf *out)
{
    router_core_counters counters = router_core_counters_of(core);
    pd_metric_label label = {"model_name", model};
    worker_sums sums = {.out = out};

    write_core(&counters, out);
    gauge(out, "kvferry_http_connections", "Open HTTP connections.", NULL, connections);
    router_core_each_worker(core, now_ns, sum_worker, &sums);
    gauge(out, "vllm:num_requests_running", "Sequences that decode workers run.", &label,
          (double)sums.running);
    gauge(out, "vllm:num_requests_waiting", "Requests queued in the router or in workers.", &label,
          (double)sums.waiting + counters.queued);
    gauge(out, "vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", &label,
          sums.total == 0 ? 0 : (double)sums.used / (double)sums.total);
    counter(out, "vllm:prompt_tokens_total", "Prompt tokens of answers that began and have ended.",
            &label, counters.prompt_tokens);
    counter(out, "vllm:generation_tokens_total", "Tokens answered.", &label, counters.tokens);
    counter(out, "vllm:prefix_cache_queries_total", "Prompt tokens looked up in prefix caches.",
            &label, counters.prompt_tokens);
    counter(out, "vllm:prefix_cache_hits_total", "Prompt tokens found there.", &label,
            counters.cached_tokens);
    pd_metrics_write_head(out, PD_METRIC_GAUGE, "kvferry_kv_blocks",
                          "KV blocks of a worker by who holds them.");
    router_core_each_worker(core, now_ns, write_ledger, &sums);
    pd_metrics_write_head(out, PD_METRIC_GAUGE, "kvferry_kv_ledger_imbalance",
                          "KV blocks of a worker less those that somebody holds: 0, or a bug.");
    router_core_each_worker(core, now_ns, write_imbalance, &sums);
    pd_metrics_write_head(
        out, PD_METRIC_GAUGE, "kvferry_kv_blocks_held_idle",
        "KV blocks neither free nor cached at a worker that has no request: a leak "
        "where it stays above 0.");
    router_core_each_worker(core, now_ns, write_held_idle, &sums);
    pd_metrics_write_head(out, PD_METRIC_GAUGE, "kvferry_worker_queue_seconds",
                          "Predicted time of the work before a worker.");
    router_core_each_worker(core, now_ns, write_queue, &sums);
    write_worker_counters(core, now_ns, out);
}

void pages_bus(const pd_bus_counters *counters, pd_buf *out)
{
    counter(out, "kvferry_bus_received_total", "Messages of workers.", NULL, counters->received);
    counter(out, "kvferry_bus_sent_total", "Messages to workers.", NULL, counters->sent);
    counter(out, "kvferry_bus_malformed_total",
            "Messages dropped because they could not be unpacked: somebody else speaks here.", NULL,
            counters->malformed);
    counter(out, "kvferry_bus_send_failed_total",
            "Messages that were not taken: the worker is gone, or reads nothing.", NULL,
            counters->send_failed);
    counter(out, "kvferry_bus_cut_total", "Connections of workers that ended.", NULL,
            counters->cut);
}

/* ---- models ---- */

void pages_model(const char *name, uint32_t context_max, int64_t created, pd_buf *out)
{
    pd_buf_puts(out, "{\"id\":");
    write_text(out, name);
    pd_buf_printf(out,
                  ",\"object\":\"model\",\"created\":%" PRId64
                  ",\"owned_by\":\"kvferry\",\"max_model_len\":%u}",
                  created, context_max);
}

void pages_models(const char *model, const char *const *aliases, uint32_t aliases_count,
                  uint32_t context_max, int64_t created, pd_buf *out)
{
    pd_buf_puts(out, "{\"object\":\"list\",\"data\":[");
    pages_model(model, context_max, created, out);
    for (uint32_t i = 0; i < aliases_count; i++) {
        pd_buf_puts(out, ",");
        pages_model(aliases[i], context_max, created, out);
    }
    pd_buf_puts(out, "]}");
}
