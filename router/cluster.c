#include "router/cluster.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { OWED_MAX = 4096, OFFER_AGAIN_MS = 1000 };

/* A process is seen to be dead before the last it wrote is read. */
#define LAST_WORDS_NS (10 * PD_NS_PER_MS)
/* A worker that lives connects again within 100 ms, and its next heartbeat is on its way. */
#define CUT_HEARTBEATS 2
/* Of what has passed: two clocks drift apart by that much at most, each bent by NTP. */
#define CLOCKS_DRIFT 1000

pd_status router_cluster_create(const router_core_config *config, uint64_t router,
                                const router_sink *sink, uint64_t now_ns,
                                router_cluster **cluster_out)
{
    router_cluster *cluster = pd_calloc(1, sizeof *cluster);
    if (cluster == NULL)
        return PD_E_NOMEM;
    cluster->config = config;
    cluster->router = router;
    cluster->sink = sink;
    cluster->layout_fingerprint = config->layout_fingerprint;
    if (config->layout != NULL)
        snprintf(cluster->layout, sizeof cluster->layout, "%s", config->layout);
    cluster->beat_ns = now_ns + config->heartbeat_ns;
    *cluster_out = cluster;
    return PD_OK;
}

static void free_worker(router_worker *worker)
{
    pd_free(worker->address);
    pd_free(worker->rank_placements);
    pd_free(worker->links);
    pd_free(worker->owed);
    *worker = (router_worker){0};
}

void router_cluster_destroy(router_cluster *cluster)
{
    if (cluster == NULL)
        return;
    for (uint32_t i = 0; i < cluster->slots_used; i++)
        free_worker(&cluster->workers[i]);
    pd_free(cluster);
}

static bool send(router_cluster *cluster, const char *to, const pd_message *message)
{
    return cluster->sink->send(cluster->sink->ctx, to, message);
}

/* ---- registration ---- */

static bool hash_differs(pd_hash128 a, pd_hash128 b)
{
    return a.lo != b.lo || a.hi != b.hi;
}

/* True when the worker fits; otherwise reason names both values. */
static bool fits(const router_cluster *cluster, const pd_msg_hello *hello, char *reason)
{
    const router_core_config *config = cluster->config;
    size_t size = PD_REASON_BYTES;

    if (hello->wire_version != PD_WIRE_VERSION)
        snprintf(reason, size, "wire version: the worker speaks %u, the router %u",
                 hello->wire_version, PD_WIRE_VERSION);
    else if (hello->role != PD_ROLE_PREFILL && hello->role != PD_ROLE_DECODE)
        snprintf(reason, size, "role: the worker says %d, the router knows 1 (prefill), 2 (decode)",
                 (int)hello->role);
    else if (hash_differs(hello->model_fingerprint, config->model_fingerprint))
        snprintf(reason, size,
                 "model: the worker has %.24s (%016" PRIx64 "%016" PRIx64
                 "), the router %.24s (%016" PRIx64 "%016" PRIx64 ")",
                 hello->model, hello->model_fingerprint.hi, hello->model_fingerprint.lo,
                 config->model, config->model_fingerprint.hi, config->model_fingerprint.lo);
    else if (strcmp(hello->model, config->model) != 0)
        snprintf(reason, size, "model.name: the worker has '%.60s', the router '%.60s'",
                 hello->model, config->model);
    else if (hello->block_tokens != config->block_tokens)
        snprintf(reason, size, "kv.block_tokens: the worker has %u, the router %u",
                 hello->block_tokens, config->block_tokens);
    else if (cluster->layout_fingerprint != 0 &&
             hello->layout_fingerprint != cluster->layout_fingerprint)
        snprintf(reason, size, "KV layout: the worker has %.70s, the cluster %.70s", hello->layout,
                 cluster->layout);
    else if (hello->context_max < config->context_max)
        snprintf(reason, size, "model.context: the worker has %u, the router %u",
                 hello->context_max, config->context_max);
    else if (hello->blocks == 0)
        snprintf(reason, size, "KV blocks: the worker has 0, at least 1 is needed");
    else
        return true;
    return false;
}

/* ROUTER_DEAD_MAX: none of them. */
static uint32_t find_ended(const router_cluster *cluster, uint64_t incarnation)
{
    uint32_t i = 0;
    while (i < ROUTER_DEAD_MAX && cluster->ended[i].incarnation != incarnation)
        i++;
    return i;
}

bool router_cluster_gave_up(const router_cluster *cluster, uint64_t incarnation)
{
    return find_ended(cluster, incarnation) < ROUTER_DEAD_MAX;
}

bool router_cluster_outlived(const router_cluster *cluster, uint64_t incarnation, uint64_t clock_ns)
{
    uint32_t i = find_ended(cluster, incarnation);
    const router_ended *of = &cluster->ended[i % ROUTER_DEAD_MAX];
    return i < ROUTER_DEAD_MAX && !of->certain && of->clock_ns != 0 && clock_ns > of->clock_ns;
}

bool router_cluster_is_late(const router_cluster *cluster, uint64_t incarnation, uint64_t clock_ns)
{
    uint32_t i = find_ended(cluster, incarnation);
    const router_ended *of = &cluster->ended[i % ROUTER_DEAD_MAX];
    return i < ROUTER_DEAD_MAX && !of->certain && clock_ns != 0 && clock_ns <= of->clock_ns;
}

/* A message that took longer than another does not say what the worker's clock shows. */
static void read_clock(router_worker *worker, uint64_t clock_ns, uint64_t now_ns)
{
    if (clock_ns == 0)
        return;
    uint64_t offset_ns = now_ns - clock_ns;
    if (worker->clock_read_ns != 0) {
        uint64_t before_ns =
            worker->clock_offset_ns + (now_ns - worker->clock_read_ns) / CLOCKS_DRIFT;
        if ((int64_t)(offset_ns - before_ns) > 0)
            offset_ns = before_ns;
    }
    worker->clock_offset_ns = offset_ns;
    worker->clock_read_ns = now_ns;
}

static pd_status refuse(router_cluster *cluster, const char *from, const pd_msg_hello *hello,
                        const char *reason, bool anew)
{
    pd_message message = {.kind = PD_MSG_REFUSED, .refused.anew = anew};
    snprintf(message.refused.reason, sizeof message.refused.reason, "%s", reason);
    pd_log_error("msg=\"worker refused: %s\" worker=%s", reason, hello->name);
    cluster->refused++;
    if (!send(cluster, from, &message))
        pd_log_warn("msg=\"the refusal could not be sent\" worker=%s", hello->name);
    return PD_E_MISMATCH;
}

static uint32_t free_slot(router_cluster *cluster)
{
    for (uint32_t i = 0; i < ROUTER_WORKERS_MAX; i++) {
        if (!cluster->workers[i].used)
            return i;
    }
    return ROUTER_NO_WORKER;
}

/* Tells `to` of `peer`: prefill workers get addresses of decode workers to connect to, decode
 * workers the names of those who may write. */
static void tell_peer(router_cluster *cluster, const router_worker *to, router_worker *peer)
{
    if (to->hello.role == peer->hello.role)
        return;
    pd_message message = {.kind = PD_MSG_PEER_UP};
    pd_msg_peer_up *up = &message.peer_up;
    snprintf(up->name, sizeof up->name, "%s", peer->hello.name);
    up->role = peer->hello.role;
    up->incarnation = peer->hello.incarnation;
    up->pid = peer->hello.pid;
    up->host = peer->hello.host;
    up->started = peer->hello.started;
    if (to->hello.role == PD_ROLE_PREFILL) {
        up->transfer_address = peer->address;
        up->transfer_address_len = peer->hello.transfer_address_len;
    }
    bool sent = send(cluster, to->identity, &message);
    if (to->hello.role == PD_ROLE_DECODE)
        peer->links[to - cluster->workers].told = sent;
    if (!sent)
        pd_log_warn("msg=\"a peer could not be announced\" worker=%s peer=%s", to->hello.name,
                    peer->hello.name);
}

static void welcome(router_cluster *cluster, uint32_t slot, uint32_t session, bool both_ways)
{
    router_worker *worker = &cluster->workers[slot];
    pd_message message = {
        .kind = PD_MSG_WELCOME,
        .welcome = {.router = cluster->router,
                    .heartbeat_ms = (uint32_t)(cluster->config->heartbeat_ns / PD_NS_PER_MS),
                    .lost_after_ms = (uint32_t)(cluster->config->lost_after_ns / PD_NS_PER_MS),
                    .session = session}};
    if (!send(cluster, worker->identity, &message))
        pd_log_warn("msg=\"the welcome could not be sent\" worker=%s", worker->hello.name);
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        if (i == slot || !cluster->workers[i].used)
            continue;
        /* Whoever may be written to hears of the writer before the writer hears of it. */
        bool first = worker->hello.role == PD_ROLE_DECODE;
        if (first)
            tell_peer(cluster, worker, &cluster->workers[i]);
        if (both_ways)
            tell_peer(cluster, &cluster->workers[i], worker);
        if (!first)
            tell_peer(cluster, worker, &cluster->workers[i]);
    }
}

static pd_status fill(router_worker *worker, const char *from, const pd_msg_hello *hello,
                      uint64_t now_ns)
{
    size_t len = hello->transfer_address_len;
    uint32_t ranks = hello->rank_placements == NULL ? 0 : hello->rank_pids_count;
    worker->address = pd_malloc(len == 0 ? 1 : len);
    if (ranks > 0)
        worker->rank_placements = pd_calloc(ranks, sizeof *worker->rank_placements);
    if (hello->role == PD_ROLE_PREFILL)
        worker->links = pd_calloc(ROUTER_WORKERS_MAX, sizeof *worker->links);
    if (worker->address == NULL || (ranks > 0 && worker->rank_placements == NULL) ||
        (hello->role == PD_ROLE_PREFILL && worker->links == NULL)) {
        free_worker(worker);
        return PD_E_NOMEM;
    }
    if (len > 0)
        memcpy(worker->address, hello->transfer_address, len);
    if (ranks > 0)
        memcpy(worker->rank_placements, hello->rank_placements,
               ranks * sizeof *worker->rank_placements);
    snprintf(worker->identity, sizeof worker->identity, "%s", from);
    worker->hello = *hello;
    worker->hello.transfer_address = worker->address;
    worker->hello.rank_placements = worker->rank_placements;
    worker->heard_ns = now_ns;
    worker->used = true;
    read_clock(worker, hello->clock_ns, now_ns);
    return PD_OK;
}

static void expect_layout(router_cluster *cluster, const pd_msg_hello *hello)
{
    if (cluster->layout_fingerprint != 0)
        return;
    cluster->layout_fingerprint = hello->layout_fingerprint;
    memcpy(cluster->layout, hello->layout, sizeof cluster->layout);
}

pd_status router_cluster_hello(router_cluster *cluster, const char *from, const pd_msg_hello *hello,
                               uint64_t now_ns, uint32_t *slot_out, uint32_t *replaced_out)
{
    char reason[PD_REASON_BYTES];

    *replaced_out = ROUTER_NO_WORKER;
    if (!fits(cluster, hello, reason))
        return refuse(cluster, from, hello, reason, false);
    /* First, as its name may be another one's by now, which it does not end. */
    if (hello->incarnation == 0 || router_cluster_gave_up(cluster, hello->incarnation)) {
        snprintf(reason, sizeof reason,
                 "incarnation %016" PRIx64 " was given up (silent for over %" PRIu64
                 " ms, or it said goodbye): start the worker anew",
                 hello->incarnation, (uint64_t)(cluster->config->lost_after_ns / PD_NS_PER_MS));
        return refuse(cluster, from, hello, reason, true);
    }
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        router_worker *other = &cluster->workers[i];
        if (!other->used || strcmp(other->hello.name, hello->name) != 0)
            continue;
        if (other->hello.incarnation == hello->incarnation &&
            other->hello.role == hello->role) { /* it did not hear the welcome */
            other->heard_ns = now_ns;
            read_clock(other, hello->clock_ns, now_ns);
            welcome(cluster, i, hello->session, false);
            *slot_out = i;
            return PD_OK;
        }
        *replaced_out = i;
        return PD_E_AGAIN;
    }
    uint32_t slot = free_slot(cluster);
    if (slot == ROUTER_NO_WORKER) {
        snprintf(reason, sizeof reason, "the router holds %d workers, this would be one more",
                 ROUTER_WORKERS_MAX);
        return refuse(cluster, from, hello, reason, false);
    }
    pd_status status = fill(&cluster->workers[slot], from, hello, now_ns);
    if (status != PD_OK)
        return status;
    expect_layout(cluster, hello);
    if (slot >= cluster->slots_used)
        cluster->slots_used = slot + 1;
    cluster->count++;
    cluster->registered++;
    welcome(cluster, slot, hello->session, true);
    pd_log_info("msg=\"worker registered\" worker=%s role=%s incarnation=%016" PRIx64
                " pid=%" PRId64 " backend=\"%s\" transfer=%s blocks=%u",
                hello->name, hello->role == PD_ROLE_PREFILL ? "prefill" : "decode",
                hello->incarnation, hello->pid, hello->backend, hello->transfer, hello->blocks);
    *slot_out = slot;
    return PD_OK;
}

void router_cluster_remove(router_cluster *cluster, uint32_t slot, uint64_t now_ns)
{
    router_worker *worker = &cluster->workers[slot];
    pd_assert(worker->used);
    pd_message message = {.kind = PD_MSG_PEER_GONE};
    snprintf(message.peer_gone.name, sizeof message.peer_gone.name, "%s", worker->hello.name);
    message.peer_gone.incarnation = worker->hello.incarnation;
    router_ended *of = &cluster->ended[cluster->ended_next++ % ROUTER_DEAD_MAX];
    *of = (router_ended){.incarnation = worker->hello.incarnation,
                         .certain = worker->dead_ns != 0,
                         .clock_ns =
                             worker->clock_read_ns == 0 ? 0 : now_ns - worker->clock_offset_ns};
    memcpy(of->name, worker->hello.name, sizeof of->name);
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        router_worker *other = &cluster->workers[i];
        if (i == slot || !other->used)
            continue;
        if (other->links != NULL)
            other->links[slot] = (router_link){0};
        if (!send(cluster, other->identity, &message))
            pd_log_warn("msg=\"a peer's end could not be announced\" worker=%s peer=%s",
                        other->hello.name, worker->hello.name);
    }
    free_worker(worker);
    cluster->count--;
}

const char *router_cluster_name_of(const router_cluster *cluster, uint64_t incarnation,
                                   bool *registered_out)
{
    uint32_t slot = router_cluster_by_incarnation(cluster, incarnation);
    *registered_out = slot != ROUTER_NO_WORKER;
    if (*registered_out)
        return cluster->workers[slot].hello.name;
    uint32_t i = find_ended(cluster, incarnation);
    return i < ROUTER_DEAD_MAX && cluster->ended[i].name[0] != '\0' ? cluster->ended[i].name : NULL;
}

void router_cluster_tell_gone(router_cluster *cluster, uint32_t slot, uint64_t incarnation)
{
    bool registered;
    const char *name = router_cluster_name_of(cluster, incarnation, &registered);
    const router_worker *worker = &cluster->workers[slot];
    pd_message message = {.kind = PD_MSG_PEER_GONE, .peer_gone = {.incarnation = incarnation}};
    snprintf(message.peer_gone.name, sizeof message.peer_gone.name, "%s",
             name != NULL ? name : "unknown");
    if (!send(cluster, worker->identity, &message))
        pd_log_debug("msg=\"a peer's end could not be announced\" worker=%s", worker->hello.name);
}

/* ---- finding ---- */

uint32_t router_cluster_by_identity(const router_cluster *cluster, const char *identity)
{
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        if (cluster->workers[i].used && strcmp(cluster->workers[i].identity, identity) == 0)
            return i;
    }
    return ROUTER_NO_WORKER;
}

uint32_t router_cluster_by_incarnation(const router_cluster *cluster, uint64_t incarnation)
{
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        if (cluster->workers[i].used && cluster->workers[i].hello.incarnation == incarnation)
            return i;
    }
    return ROUTER_NO_WORKER;
}

uint32_t router_cluster_by_name(const router_cluster *cluster, const char *name,
                                uint64_t incarnation)
{
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        const router_worker *worker = &cluster->workers[i];
        if (worker->used && worker->hello.incarnation == incarnation &&
            strcmp(worker->hello.name, name) == 0)
            return i;
    }
    return ROUTER_NO_WORKER;
}

const char *router_role_name(pd_role role)
{
    return role == PD_ROLE_PREFILL ? "prefill" : "decode";
}

bool router_worker_ready(const router_worker *worker)
{
    return worker->used && worker->report_ns != 0 && worker->report.warm &&
           !worker->report.draining;
}

void router_worker_peer(const router_worker *worker, bool address, pd_msg_peer *peer_out)
{
    *peer_out = (pd_msg_peer){.incarnation = worker->hello.incarnation,
                              .pid = worker->hello.pid,
                              .host = worker->hello.host,
                              .started = worker->hello.started,
                              .session = worker->hello.session};
    memcpy(peer_out->name, worker->hello.name, sizeof peer_out->name);
    if (address) {
        peer_out->transfer_address = worker->address;
        peer_out->transfer_address_len = worker->hello.transfer_address_len;
    }
}

bool router_cluster_linked(const router_cluster *cluster, uint32_t prefill, uint32_t decode)
{
    const router_worker *from = &cluster->workers[prefill];
    const router_worker *to = &cluster->workers[decode];
    return from->links != NULL && from->links[decode].up &&
           from->links[decode].peer_incarnation == to->hello.incarnation;
}

/* ---- reports ---- */

void router_cluster_report(router_cluster *cluster, uint32_t slot,
                           const pd_msg_heartbeat *heartbeat, uint64_t now_ns)
{
    router_worker *worker = &cluster->workers[slot];
    pd_assert(worker->used);
    if (heartbeat->incarnation != worker->hello.incarnation)
        return;
    bool was_ready = router_worker_ready(worker);
    uint64_t shipped_bytes = worker->report.counts.shipped_bytes;
    worker->report = *heartbeat;
    if (worker->counts_known) {
        worker->report.counts.shipped_bytes = shipped_bytes;
        router_cluster_shipped(cluster, slot, heartbeat->counts.shipped_bytes);
    }
    worker->counts_known = true; /* before the first, it shipped for a router before this one */
    if (!isfinite(worker->report.queue_ms) || worker->report.queue_ms < 0)
        worker->report.queue_ms = 0;
    worker->report_ns = now_ns == 0 ? 1 : now_ns;
    read_clock(worker, heartbeat->clock_ns, now_ns);
    worker->sent_ms = 0; /* it knows of these by now; inflight_prefill_ms covers the flight */
    if (router_worker_ready(worker) != was_ready)
        pd_log_info("msg=\"worker %s\" worker=%s", was_ready ? "takes no new work" : "is ready",
                    worker->hello.name);
}

void router_cluster_shipped(router_cluster *cluster, uint32_t slot, uint64_t bytes)
{
    uint64_t *known = &cluster->workers[slot].report.counts.shipped_bytes;
    if (!cluster->workers[slot].counts_known || bytes <= *known)
        return;
    cluster->shipped_bytes += bytes - *known;
    *known = bytes;
}

static void refuse_fenced(router_cluster *cluster, const router_worker *peer,
                          const router_worker *by, const char *reason)
{
    pd_message message = {.kind = PD_MSG_REFUSED, .refused.anew = true};
    snprintf(message.refused.reason, sizeof message.refused.reason,
             "worker %s takes nothing of incarnation %016" PRIx64 " any more: %s", by->hello.name,
             peer->hello.incarnation, reason);
    pd_log_warn("msg=\"a worker has to come anew: %s\" worker=%s", message.refused.reason,
                peer->hello.name);
    if (!send(cluster, peer->identity, &message))
        pd_log_debug("msg=\"the refusal could not be sent\" worker=%s", peer->hello.name);
}

void router_cluster_on_link(router_cluster *cluster, uint32_t slot, const pd_msg_link *link,
                            uint64_t now_ns)
{
    router_worker *worker = &cluster->workers[slot];
    uint32_t peer = router_cluster_by_name(cluster, link->peer, link->peer_incarnation);
    if (worker->links == NULL) {
        if (!link->up && peer != ROUTER_NO_WORKER)
            refuse_fenced(cluster, &cluster->workers[peer], worker, link->reason);
        return;
    }
    if (peer == ROUTER_NO_WORKER || cluster->workers[peer].hello.role != PD_ROLE_DECODE)
        return; /* an old one's */
    router_link *entry = &worker->links[peer];
    *entry = (router_link){.up = link->up,
                           .told = entry->told,
                           .peer_incarnation = link->peer_incarnation,
                           .offer_ns = now_ns + OFFER_AGAIN_MS * PD_NS_PER_MS};
    memcpy(entry->lane, link->lane, sizeof entry->lane);
    if (link->up)
        pd_log_info("msg=\"link up\" prefill=%s decode=%s lane=%s", worker->hello.name, link->peer,
                    link->lane);
    else
        pd_log_warn("msg=\"link down: %s\" prefill=%s decode=%s", link->reason, worker->hello.name,
                    link->peer);
}

void router_cluster_doubt_link(router_cluster *cluster, uint32_t prefill, uint32_t decode,
                               uint64_t now_ns)
{
    router_worker *worker = &cluster->workers[prefill];
    if (worker->links == NULL)
        return;
    worker->links[decode].up = false;
    worker->links[decode].offer_ns = now_ns == 0 ? 1 : now_ns;
}

static bool pay_owed(router_cluster *cluster, router_worker *worker)
{
    uint32_t paid = 0;
    while (paid < worker->owed_count) {
        pd_message message = {.kind = PD_MSG_CANCEL, .cancel = worker->owed[paid]};
        if (!send(cluster, worker->identity, &message))
            break;
        paid++;
    }
    if (paid > 0) {
        worker->owed_count -= paid;
        memmove(worker->owed, worker->owed + paid, worker->owed_count * sizeof *worker->owed);
    }
    return worker->owed_count == 0;
}

void router_cluster_cancel(router_cluster *cluster, uint32_t slot, const pd_msg_cancel *cancel)
{
    router_worker *worker = &cluster->workers[slot];
    pd_message message = {.kind = PD_MSG_CANCEL, .cancel = *cancel};
    if (pay_owed(cluster, worker) && send(cluster, worker->identity, &message))
        return;
    if (worker->owed_count == worker->owed_size && worker->owed_size < OWED_MAX) {
        uint32_t size = worker->owed_size == 0 ? 64 : worker->owed_size * 2;
        pd_msg_cancel *owed = pd_realloc(worker->owed, size * sizeof *owed);
        if (owed != NULL) {
            worker->owed = owed;
            worker->owed_size = size;
        }
    }
    if (worker->owed_count == worker->owed_size) {
        pd_log_error("msg=\"cancel lost: the worker reads nothing\" worker=%s", worker->hello.name);
        return;
    }
    worker->owed[worker->owed_count++] = *cancel;
}

/* A link that failed, or that is not heard of: a message that told of it may be lost. */
static void offer_links(router_cluster *cluster, router_worker *worker, uint64_t now_ns)
{
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        router_link *link = &worker->links[i];
        router_worker *peer = &cluster->workers[i];
        if (!peer->used || peer->hello.role != PD_ROLE_DECODE || now_ns < link->offer_ns ||
            (link->up && link->told))
            continue;
        bool first = link->offer_ns == 0; /* they have just heard of each other */
        link->offer_ns = now_ns + OFFER_AGAIN_MS * PD_NS_PER_MS;
        if (first)
            continue;
        tell_peer(cluster, peer, worker);
        tell_peer(cluster, worker, peer);
    }
}

void router_cluster_on_tick(router_cluster *cluster, uint64_t now_ns)
{
    if (now_ns < cluster->beat_ns)
        return;
    cluster->beat_ns = now_ns + cluster->config->heartbeat_ns;
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        router_worker *worker = &cluster->workers[i];
        if (!worker->used)
            continue;
        pd_message message = {.kind = PD_MSG_ROUTER_HEARTBEAT,
                              .router_heartbeat = {.router = cluster->router}};
        if (!send(cluster, worker->identity, &message))
            pd_log_debug("msg=\"heartbeat not taken\" worker=%s", worker->hello.name);
        pay_owed(cluster, worker);
        if (worker->links != NULL)
            offer_links(cluster, worker, now_ns);
    }
}

void router_cluster_take_time(router_cluster *cluster, uint64_t now_ns)
{
    uint64_t due_ns = router_cluster_next_due(cluster);
    if (now_ns <= due_ns + cluster->config->heartbeat_ns)
        return;
    uint64_t late_ns = now_ns - due_ns;
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        router_worker *worker = &cluster->workers[i];
        worker->heard_ns =
            worker->heard_ns + late_ns < now_ns ? worker->heard_ns + late_ns : now_ns;
        worker->cut_ns = 0;
    }
    /* Workers whose router does not answer close their connections to it, and need a moment to make
     * others. */
    cluster->absent_ns = now_ns + cluster->config->lost_after_ns;
    pd_log_warn("msg=\"this router stood still\" late_ms=%" PRIu64,
                (uint64_t)(late_ns / PD_NS_PER_MS));
}

void router_cluster_on_dead(router_cluster *cluster, uint64_t incarnation, uint64_t now_ns)
{
    uint32_t slot = router_cluster_by_incarnation(cluster, incarnation);
    if (slot != ROUTER_NO_WORKER && cluster->workers[slot].dead_ns == 0)
        cluster->workers[slot].dead_ns = now_ns + LAST_WORDS_NS;
    uint32_t before = find_ended(cluster, incarnation);
    if (before < ROUTER_DEAD_MAX)
        cluster->ended[before].certain = true;
}

void router_cluster_on_cut(router_cluster *cluster, const char *identity, uint64_t now_ns)
{
    uint32_t slot = router_cluster_by_identity(cluster, identity);
    if (slot == ROUTER_NO_WORKER)
        return;
    if (now_ns >= cluster->absent_ns)
        cluster->workers[slot].cut_ns = now_ns == 0 ? 1 : now_ns;
    pd_log_info("msg=\"a worker's connection ended\" worker=%s", cluster->workers[slot].hello.name);
}

static bool is_cut(const router_worker *worker)
{
    return worker->cut_ns != 0 && worker->report_ns <= worker->cut_ns;
}

/* When a worker is given up, if nothing comes of it until then. */
static uint64_t lost_ns(const router_cluster *cluster, const router_worker *worker)
{
    uint64_t lost = worker->heard_ns + cluster->config->lost_after_ns + 1;
    uint64_t cut = worker->cut_ns + CUT_HEARTBEATS * cluster->config->heartbeat_ns;
    if (is_cut(worker) && cut < lost)
        lost = cut;
    if (worker->dead_ns != 0 && worker->dead_ns < lost)
        lost = worker->dead_ns;
    return lost;
}

uint32_t router_cluster_lost(const router_cluster *cluster, uint64_t now_ns,
                             char why_out[ROUTER_WHY_BYTES])
{
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        const router_worker *worker = &cluster->workers[i];
        if (!worker->used || now_ns < lost_ns(cluster, worker))
            continue;
        double silent_s = now_ns < worker->heard_ns ? 0 : (double)(now_ns - worker->heard_ns) / 1e9;
        if (worker->dead_ns != 0)
            snprintf(why_out, ROUTER_WHY_BYTES, "its process has ended");
        else
            snprintf(why_out, ROUTER_WHY_BYTES, "%ssilent for %.1f s",
                     is_cut(worker) ? "its connection ended, and it is " : "", silent_s);
        return i;
    }
    return ROUTER_NO_WORKER;
}

uint64_t router_cluster_next_due(const router_cluster *cluster)
{
    uint64_t due = cluster->beat_ns;
    for (uint32_t i = 0; i < cluster->slots_used; i++) {
        const router_worker *worker = &cluster->workers[i];
        if (worker->used && lost_ns(cluster, worker) < due)
            due = lost_ns(cluster, worker);
    }
    return due;
}
