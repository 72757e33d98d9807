#include "router/core.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/audit.h"
#include "router/cluster.h"
#include "router/index.h"
#include "router/lifecycle.h"
#include "router/request.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SNAPSHOT_AGAIN_MS = 1000 };

struct router_core {
    router_core_config config;
    router_sink sink;
    uint64_t router;
    bool stopping;
    router_core_counters counters;
    router_cluster *cluster;
    router_index *index;
    router_requests *requests;
    router_audit *audit;
};

void router_core_config_of(const pd_deployment *deployment, router_core_config *config_out)
{
    *config_out = (router_core_config){
        .model = deployment->model.name,
        .block_tokens = deployment->kv.block_tokens,
        .context_max = deployment->model.context,
        .policy = deployment->router.policy,
        .requests_max = deployment->router.limits.requests,
        .queue_max = deployment->router.limits.queue,
        .queue_ns = deployment->router.deadlines.queue_ns,
        .lease_ns = deployment->router.deadlines.lease_ns,
        .prefill_ns = deployment->router.deadlines.prefill_ns,
        .transfer_ns = deployment->router.deadlines.transfer_ns,
        .decode_idle_ns = deployment->router.deadlines.decode_idle_ns,
        .total_ns = deployment->router.deadlines.total_ns,
        .heartbeat_ns = deployment->heartbeat.interval_ns,
        .lost_after_ns = deployment->heartbeat.lost_after_ns,
    };
    pd_cost_init(&config_out->cost);
}

static bool config_is_sound(const router_core_config *config)
{
    const uint64_t times[] = {config->queue_ns,     config->lease_ns,       config->prefill_ns,
                              config->transfer_ns,  config->decode_idle_ns, config->total_ns,
                              config->heartbeat_ns, config->lost_after_ns};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
        if (times[i] == 0 || times[i] > UINT64_MAX / 4)
            return false;
    }
    return config->model != NULL && config->block_tokens > 0 && config->context_max > 0 &&
           config->requests_max > 0 && config->requests_max <= 65535 && config->queue_max > 0 &&
           config->lost_after_ns > config->heartbeat_ns;
}

pd_status router_core_create(const router_core_config *config, uint64_t incarnation, uint64_t seed,
                             const router_sink *sink, uint64_t now_ns, router_core **core_out)
{
    if (!config_is_sound(config)) {
        pd_log_error("msg=\"router: a limit or deadline is 0 or too large\"");
        return PD_E_INVALID;
    }
    router_core *core = pd_calloc(1, sizeof *core);
    if (core == NULL)
        return PD_E_NOMEM;
    core->config = *config;
    core->sink = *sink;
    core->router = incarnation;
    pd_status status =
        router_cluster_create(&core->config, incarnation, &core->sink, now_ns, &core->cluster);
    if (status == PD_OK)
        status = router_index_create(ROUTER_WORKERS_MAX, &core->index);
    if (status == PD_OK) {
        router_requests_options options = {.config = &core->config,
                                           .router = incarnation,
                                           .seed = seed,
                                           .sink = &core->sink,
                                           .cluster = core->cluster,
                                           .index = core->index,
                                           .counters = &core->counters};
        status = router_requests_create(&options, &core->requests);
    }
    if (status == PD_OK) {
        router_audit_options options = {.cluster = core->cluster,
                                        .requests = core->requests,
                                        .sink = &core->sink,
                                        .counters = &core->counters,
                                        .router = incarnation};
        status = router_audit_create(&options, &core->audit);
    }
    if (status != PD_OK) {
        router_core_destroy(core);
        return status;
    }
    *core_out = core;
    return PD_OK;
}

void router_core_destroy(router_core *core)
{
    if (core == NULL)
        return;
    router_audit_destroy(core->audit);
    router_requests_destroy(core->requests);
    router_index_destroy(core->index);
    router_cluster_destroy(core->cluster);
    pd_free(core);
}

pd_status router_core_on_request(router_core *core, const router_request_in *request,
                                 uint64_t now_ns, router_handle *handle_out,
                                 router_error *error_out)
{
    if (core->stopping) {
        *error_out = (router_error){.http_status = 503,
                                    .type = "server_error",
                                    .code = "shutting_down",
                                    .retry_after_s = 5};
        snprintf(error_out->message, sizeof error_out->message,
                 "this router is shutting down and takes no new work");
        return PD_E_OVERLOAD;
    }
    return router_requests_add(core->requests, request, now_ns, handle_out, error_out);
}

void router_core_cancel(router_core *core, router_handle request, uint64_t now_ns)
{
    router_requests_cancel(core->requests, request, now_ns);
}

/* ---- workers come and go ---- */

static void ask_snapshot(router_core *core, uint32_t slot, uint64_t now_ns)
{
    if (!router_index_wants_snapshot(core->index, slot, now_ns, SNAPSHOT_AGAIN_MS * PD_NS_PER_MS))
        return;
    pd_message message = {.kind = PD_MSG_SNAPSHOT_REQUEST,
                          .snapshot_request = {.router = core->router}};
    const router_worker *worker = &core->cluster->workers[slot];
    if (!core->sink.send(core->sink.ctx, worker->identity, &message))
        pd_log_debug("msg=\"snapshot request not taken\" worker=%s", worker->hello.name);
}

static void remove_worker(router_core *core, uint32_t slot, router_gone how, const char *why,
                          uint64_t now_ns)
{
    router_requests_on_worker_gone(core->requests, slot, how, why, now_ns);
    router_audit_reset(core->audit, slot, now_ns);
    router_index_close(core->index, slot);
    router_cluster_remove(core->cluster, slot, now_ns);
    router_requests_pump(core->requests, now_ns);
}

static void on_hello(router_core *core, const char *from, const pd_msg_hello *hello,
                     uint64_t now_ns)
{
    if (router_cluster_is_late(core->cluster, hello->incarnation, hello->clock_ns))
        return;
    if (router_cluster_outlived(core->cluster, hello->incarnation, hello->clock_ns))
        router_requests_not_dead(core->requests, hello->incarnation);
    uint32_t slot, replaced;
    pd_status status = router_cluster_hello(core->cluster, from, hello, now_ns, &slot, &replaced);
    if (status == PD_E_AGAIN) {
        pd_log_warn("msg=\"worker came anew: the old one is given up\" worker=%s", hello->name);
        core->cluster->lost++;
        remove_worker(core, replaced, ROUTER_GONE_DIED, "its name came back with a new incarnation",
                      now_ns);
        status = router_cluster_hello(core->cluster, from, hello, now_ns, &slot, &replaced);
    }
    if (status == PD_E_NOMEM)
        pd_log_error("msg=\"worker not registered: out of memory\" worker=%s", hello->name);
    if (status != PD_OK)
        return;
    router_worker *worker = &core->cluster->workers[slot];
    if (worker->hello.session != hello->session) { /* it took this router for dead */
        pd_log_warn("msg=\"a worker begins anew: what it had is tried again\" worker=%s session=%u",
                    hello->name, hello->session);
        worker->hello.session = hello->session;
        /* Not before its next heartbeat has it heard the welcome; until then it believes nothing.
         */
        worker->report_ns = 0;
        router_requests_on_worker_gone(core->requests, slot, ROUTER_GONE_SESSION,
                                       "it lost sight of this router", now_ns);
        router_requests_pump(core->requests, now_ns);
    }
    if (worker->report_ns == 0) { /* new or anew, not a repeated hello */
        router_audit_reset(core->audit, slot, now_ns);
        router_index_open(core->index, slot, hello->incarnation, hello->blocks);
        ask_snapshot(core, slot, now_ns);
    }
}

static void on_heartbeat(router_core *core, uint32_t slot, const pd_msg_heartbeat *heartbeat,
                         uint64_t now_ns)
{
    if (heartbeat->incarnation != core->cluster->workers[slot].hello.incarnation)
        return;
    router_cluster_report(core->cluster, slot, heartbeat, now_ns);
    router_index_check(core->index, slot, heartbeat->events_sequence);
    ask_snapshot(core, slot, now_ns);
    router_requests_pump(core->requests, now_ns);
}

/* A worker that this router does not know hears of it, and says hello. One that it gave up (it was
 * silent for too long and goes on now) is refused: a heartbeat would tell it that all is well. */
static void answer_stranger(router_core *core, const char *from, const pd_message *message)
{
    if (message->kind != PD_MSG_HEARTBEAT)
        return;
    pd_message beat = {.kind = PD_MSG_ROUTER_HEARTBEAT,
                       .router_heartbeat = {.router = core->router}};
    if (router_cluster_is_late(core->cluster, message->heartbeat.incarnation,
                               message->heartbeat.clock_ns))
        return;
    if (router_cluster_gave_up(core->cluster, message->heartbeat.incarnation)) {
        if (router_cluster_outlived(core->cluster, message->heartbeat.incarnation,
                                    message->heartbeat.clock_ns))
            router_requests_not_dead(core->requests, message->heartbeat.incarnation);
        beat = (pd_message){.kind = PD_MSG_REFUSED, .refused.anew = true};
        snprintf(beat.refused.reason, sizeof beat.refused.reason,
                 "incarnation %016" PRIx64 " was given up: start the worker anew",
                 message->heartbeat.incarnation);
    }
    if (!core->sink.send(core->sink.ctx, from, &beat))
        pd_log_debug("msg=\"a stranger could not be answered\" from=%s", from);
}

static void on_control(router_core *core, const char *from, const pd_message *message,
                       uint64_t now_ns)
{
    uint32_t slot = router_cluster_by_identity(core->cluster, from);
    if (slot == ROUTER_NO_WORKER) {
        answer_stranger(core, from, message);
        return;
    }
    core->cluster->workers[slot].heard_ns = now_ns;
    switch (message->kind) {
    case PD_MSG_HEARTBEAT: on_heartbeat(core, slot, &message->heartbeat, now_ns); break;
    case PD_MSG_LINK:
        router_cluster_on_link(core->cluster, slot, &message->link, now_ns);
        router_requests_pump(core->requests, now_ns);
        break;
    case PD_MSG_LEASE_REPLY:
        router_requests_on_lease_reply(core->requests, slot, &message->lease_reply, now_ns);
        break;
    case PD_MSG_PREFILL_DONE:
        router_cluster_shipped(core->cluster, slot, message->prefill_done.shipped_bytes);
        router_requests_on_prefill_done(core->requests, slot, &message->prefill_done, now_ns);
        break;
    case PD_MSG_PREFILL_STARTED:
        router_requests_on_prefill_started(core->requests, slot, &message->prefill_started, now_ns);
        break;
    case PD_MSG_LANDED:
        router_requests_on_landed(core->requests, slot, &message->landed, now_ns);
        break;
    case PD_MSG_REFETCH:
        router_requests_on_refetch(core->requests, slot, &message->refetch, now_ns);
        break;
    case PD_MSG_SUSPENDED:
        router_requests_on_suspended(core->requests, slot, &message->suspended, now_ns);
        break;
    case PD_MSG_SHIP_DONE:
        router_cluster_shipped(core->cluster, slot, message->ship_done.shipped_bytes);
        router_requests_on_ship_done(core->requests, slot, &message->ship_done, now_ns);
        break;
    case PD_MSG_AUDIT_REPLY:
        router_audit_on_reply(core->audit, slot, &message->audit_reply, now_ns);
        router_requests_pump(core->requests, now_ns);
        break;
    case PD_MSG_DECODE_FAILED:
        router_requests_on_decode_failed(core->requests, slot, &message->decode_failed, now_ns);
        break;
    case PD_MSG_BYE:
        if (message->bye.incarnation != core->cluster->workers[slot].hello.incarnation)
            break;
        pd_log_info("msg=\"worker left\" worker=%s", core->cluster->workers[slot].hello.name);
        remove_worker(core, slot, ROUTER_GONE_LEFT, "it left", now_ns);
        break;
    default:
        pd_log_warn("msg=\"a message that no worker sends\" kind=%d from=%s", (int)message->kind,
                    from);
        break;
    }
}

void router_core_on_message(router_core *core, const char *from, const pd_message *message,
                            uint64_t now_ns)
{
    if (message->kind == PD_MSG_STEP_TOKENS) {
        const pd_msg_step_tokens *m = &message->step_tokens;
        uint32_t slot = router_cluster_by_name(core->cluster, m->name, m->incarnation);
        if (slot == ROUTER_NO_WORKER) {
            core->counters.tokens_dropped += m->tokens_count;
            return;
        }
        core->cluster->workers[slot].heard_ns = now_ns;
        router_requests_on_tokens(core->requests, slot, m, now_ns);
    } else if (message->kind == PD_MSG_KV_EVENTS) {
        const pd_msg_kv_events *m = &message->kv_events;
        uint32_t slot = router_cluster_by_name(core->cluster, m->name, m->incarnation);
        if (slot == ROUTER_NO_WORKER)
            return;
        core->cluster->workers[slot].heard_ns = now_ns;
        router_index_apply(core->index, slot, m);
        ask_snapshot(core, slot, now_ns);
    } else if (from == NULL) {
        pd_log_warn("msg=\"a control message came on another channel\" kind=%d",
                    (int)message->kind);
    } else if (message->kind == PD_MSG_HELLO) {
        on_hello(core, from, &message->hello, now_ns);
    } else {
        on_control(core, from, message, now_ns);
    }
}

void router_core_on_worker_dead(router_core *core, uint64_t incarnation, uint64_t now_ns)
{
    router_cluster_on_dead(core->cluster, incarnation, now_ns);
}

void router_core_on_worker_cut(router_core *core, const char *from, uint64_t now_ns)
{
    router_cluster_on_cut(core->cluster, from, now_ns);
}

bool router_core_has_worker(const router_core *core, uint64_t incarnation)
{
    return router_cluster_by_incarnation(core->cluster, incarnation) != ROUTER_NO_WORKER;
}

void router_core_on_tick(router_core *core, uint64_t now_ns)
{
    router_cluster_take_time(core->cluster, now_ns);
    char why[ROUTER_WHY_BYTES];
    for (uint32_t slot;
         (slot = router_cluster_lost(core->cluster, now_ns, why)) != ROUTER_NO_WORKER;) {
        const router_worker *worker = &core->cluster->workers[slot];
        pd_log_error("msg=\"worker lost: %s\" worker=%s incarnation=%016" PRIx64, why,
                     worker->hello.name, worker->hello.incarnation);
        core->cluster->lost++;
        remove_worker(core, slot, ROUTER_GONE_DIED, why, now_ns);
    }
    router_cluster_on_tick(core->cluster, now_ns);
    router_requests_on_tick(core->requests, now_ns);
    router_audit_on_tick(core->audit, now_ns);
    if (core->stopping)
        router_requests_on_stopping(core->requests, false);
}

uint64_t router_core_next_due(const router_core *core)
{
    uint64_t cluster_ns = router_cluster_next_due(core->cluster);
    uint64_t requests_ns = router_requests_next_due(core->requests);
    uint64_t audit_ns = router_audit_next_due(core->audit);
    uint64_t due_ns = cluster_ns < requests_ns ? cluster_ns : requests_ns;
    return audit_ns < due_ns ? audit_ns : due_ns;
}

void router_core_stop(router_core *core)
{
    core->stopping = true;
}

void router_core_end_all(router_core *core)
{
    router_requests_on_stopping(core->requests, true);
}

/* ---- looking in ---- */

router_ready router_core_ready(const router_core *core)
{
    const router_cluster *cluster = core->cluster;
    router_ready ready = {0};
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        const router_worker *worker = &cluster->workers[i];
        if (!router_worker_ready(worker))
            continue;
        if (worker->hello.role == PD_ROLE_DECODE) {
            ready.decode++;
            continue;
        }
        ready.prefill++;
        for (uint32_t d = 0; d < cluster->slots_used; d++)
            ready.links +=
                router_worker_ready(&cluster->workers[d]) && router_cluster_linked(cluster, i, d);
    }
    return ready;
}

static int by_name(const void *a, const void *b)
{
    const router_worker *const *left = a, *const *right = b;
    return strcmp((*left)->hello.name, (*right)->hello.name);
}

static void describe_lanes(const router_cluster *cluster, uint32_t slot, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < cluster->slots_used && used < size; i++) {
        const router_worker *peer = &cluster->workers[i];
        if (!peer->used || !router_cluster_linked(cluster, slot, i))
            continue;
        int n = snprintf(text + used, size - used, "%s%s=%s", used > 0 ? " " : "", peer->hello.name,
                         cluster->workers[slot].links[i].lane);
        used += n > 0 ? (size_t)n : 0;
    }
}

static uint32_t sort_workers(const router_cluster *cluster,
                             const router_worker *sorted_out[ROUTER_WORKERS_MAX])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        if (cluster->workers[i].used)
            sorted_out[count++] = &cluster->workers[i];
    }
    qsort(sorted_out, count, sizeof sorted_out[0], by_name);
    return count;
}

void router_core_each_audit(const router_core *core, uint64_t now_ns,
                            void (*fn)(void *ctx, const router_audit_view *view), void *ctx)
{
    const router_worker *sorted[ROUTER_WORKERS_MAX];
    uint32_t count = sort_workers(core->cluster, sorted);
    for (uint32_t i = 0; i < count; i++) {
        router_audit_view view;
        uint32_t slot = (uint32_t)(sorted[i] - core->cluster->workers);
        router_audit_view_of(core->audit, slot, now_ns, &view);
        fn(ctx, &view);
    }
}

const uint64_t *router_core_transitions(const router_core *core, uint32_t *count_out)
{
    router_lifecycle_table(count_out);
    return router_requests_transitions(core->requests);
}

void router_core_each_worker(const router_core *core, uint64_t now_ns,
                             void (*fn)(void *ctx, const router_worker_view *view), void *ctx)
{
    const router_cluster *cluster = core->cluster;
    const router_worker *sorted[ROUTER_WORKERS_MAX];
    uint32_t count = sort_workers(cluster, sorted);
    for (uint32_t i = 0; i < count; i++) {
        const router_worker *worker = sorted[i];
        uint32_t slot = (uint32_t)(worker - cluster->workers);
        uint64_t heard_ns = worker->report_ns == 0 ? worker->heard_ns : worker->report_ns;
        router_worker_view view = {
            .name = worker->hello.name,
            .backend = worker->hello.backend,
            .transfer = worker->hello.transfer,
            .role = worker->hello.role,
            .state = worker->report_ns != 0 && worker->report.draining ? "draining"
                     : router_worker_ready(worker)                     ? "ready"
                                                                       : "starting",
            .incarnation = worker->hello.incarnation,
            .pid = worker->hello.pid,
            .rank_pids = worker->hello.rank_pids,
            .rank_pids_count = worker->hello.rank_pids_count,
            .placement = &worker->hello.placement,
            .rank_placements = worker->hello.rank_placements,
            .ledger = worker->report.ledger,
            .queue_ms = worker->report_ns == 0 ? 0 : (float)router_policy_queue_ms(worker, now_ns),
            .running = worker->report.running,
            .waiting = worker->report.waiting,
            .inflight = worker->inflight_prefill + worker->inflight_decode,
            .index_blocks = router_index_blocks(core->index, slot),
            .index_synced = router_index_synced(core->index, slot),
            .heartbeat_age_ns = now_ns - heard_ns,
            .counts = worker->report.counts,
        };
        describe_lanes(cluster, slot, view.lanes, sizeof view.lanes);
        fn(ctx, &view);
    }
}

router_core_counters router_core_counters_of(const router_core *core)
{
    router_core_counters counters = core->counters;
    counters.workers_registered = core->cluster->registered;
    counters.workers_refused = core->cluster->refused;
    counters.workers_lost = core->cluster->lost;
    counters.shipped_bytes = core->cluster->shipped_bytes;
    counters.index_gaps = router_index_counters_of(core->index).gaps;
    counters.queued = router_requests_queued(core->requests);
    return counters;
}

uint32_t router_core_cached_tokens(const router_core *core, router_handle request)
{
    return router_requests_cached_tokens(core->requests, request);
}
