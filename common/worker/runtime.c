#include "common/worker/runtime.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/loop.h"
#include "common/base/mem.h"
#include "common/base/peer_watch.h"
#include "common/base/process.h"
#include "common/base/queue.h"
#include "common/wire/bus.h"
#include "common/worker/address.h"
#include "common/worker/routers.h"
#include "common/worker/trouble.h"
#include "common/worker/verifier.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define TICK_NS         (20 * PD_NS_PER_MS)
#define HELLO_NS        (300 * PD_NS_PER_MS)
#define GRACE_NS        (7 * PD_NS_PER_S) /* a supervisor waits 10 seconds in all */
#define CANCEL_NS       PD_NS_PER_S       /* for what was cancelled to come to rest */
#define SHIPPING_LOG_NS (60 * PD_NS_PER_S)

enum { WARM_TOKENS = 16, EVENTS_A_TURN = 256, UNFENCED_MAX = 1024 };

typedef struct worker {
    pd_worker_setup setup;
    const pd_role_ops *ops;
    pd_role_core *core;
    pd_loop *loop;
    pd_bus *bus;
    pd_peer_watch *peers;            /* of whom it matters whether they are dead */
    pd_verifier *verifier;           /* NULL: this role checks no seals */
    uint64_t unfenced[UNFENCED_MAX]; /* dead, and the transfer was not told yet: it was busy */
    uint32_t unfenced_count;
    uint64_t host, started; /* of this process */
    uint32_t session;       /* how often what a router had here was dropped */
    pd_loop_timer *tick_timer, *beat_timer;
    pd_queue *groups; /* group_done, from the compute thread */
    uint64_t layout_fingerprint;
    unsigned char address[PD_WORKER_ADDRESS_BYTES_MAX];
    size_t address_len;
    uint64_t router; /* that welcomed us; 0: none */
    uint64_t router_heard_ns, hello_ns;
    bool hello_failed; /* the last one found no router to go to */
    uint64_t beat_ns, lost_after_ns;
    uint64_t sends_failed;
    /* the warm-up */
    uint32_t warm_tokens[WARM_TOKENS];
    pd_block warm_block;
    pd_step_slice warm_slice;
    pd_step warm_step;
    bool warm;
    uint64_t ticked_ns;
    pd_trouble step_trouble, check_trouble;
    /* the end */
    uint64_t drain_until_ns; /* 0: not draining */
    bool cancelled;
    bool leaving; /* BYE is said */
    bool ranks_watched;
    int exit_status;
    pd_ship_stats shipping_logged;
    uint64_t shipping_log_ns; /* when it is due again */
    pd_transfer_event event;
} worker;

/* ---- the core's actions ---- */

static void send_to_router(worker *w, const pd_message *message)
{
    pd_status status = pd_bus_send(w->bus, NULL, message);

    if (status == PD_OK)
        return;
    /* Once at first, then whenever the count doubles. A heartbeat tells how things stand. */
    w->sends_failed++;
    if ((w->sends_failed & (w->sends_failed - 1)) == 0)
        pd_log_warn("msg=\"a message to the router was not taken\" kind=%s status=%s failed=%llu",
                    pd_message_name(message->kind), pd_status_name(status),
                    (unsigned long long)w->sends_failed);
}

static void act_send(void *ctx, uint64_t router, const pd_message *message)
{
    worker *w = ctx;

    if (router == w->router) /* another one's process is gone, and its requests with it */
        send_to_router(w, message);
}

/* A layer group of a step is final. The compute thread says so and goes on. */
typedef struct group_done {
    pd_step *step;
    uint32_t group;
} group_done;

static void announce_group(void *ctx, pd_step *step, uint32_t group)
{
    worker *w = ctx;
    group_done done = {.step = step, .group = group};
    pd_status status = pd_queue_push(w->groups, &done);

    pd_assert(status == PD_OK); /* one step of the core at a time, each group once */
}

static void act_run(void *ctx, pd_step *step)
{
    worker *w = ctx;
    const pd_worker_options *options = w->setup.options;
    pd_status status = options->engine->run(w->setup.engine, step, announce_group, w);

    pd_assert(status == PD_OK); /* one step of the core and one warm-up at most */
}

static void act_draft(void *ctx, pd_step *step)
{
    worker *w = ctx;
    pd_status status = w->setup.draft.ops->run(w->setup.draft.engine, step, NULL, NULL);

    pd_assert(status == PD_OK); /* one of them at a time */
}

/* The layout of a peer's pool, by its address. */
static pd_status layout_of(const worker *w, const pd_worker_address *address,
                           pd_kv_layout *layout_out)
{
    const pd_kv_layout *ours = &w->setup.layout;

    if (address->layout_fingerprint != w->layout_fingerprint) {
        pd_log_error("msg=\"a peer has another KV layout\" ours=%016llx theirs=%016llx",
                     (unsigned long long)w->layout_fingerprint,
                     (unsigned long long)address->layout_fingerprint);
        return PD_E_MISMATCH;
    }
    if (ours->kv_heads % address->ranks == 0) {
        *layout_out = pd_kv_layout_of_peer(ours, address->blocks, address->ranks);
        if (pd_ship_slices(ours, layout_out) != 0)
            return PD_OK;
    }
    pd_log_error("msg=\"a peer's tensor-parallel split cannot be: KV heads are not cut\" "
                 "kv_heads=%u our_ranks=%u their_ranks=%u",
                 ours->kv_heads, ours->ranks, address->ranks);
    return PD_E_MISMATCH;
}

static pd_status act_connect(void *ctx, const void *address, size_t bytes, uint64_t tag,
                             pd_peer *peer_out)
{
    worker *w = ctx;
    pd_worker_address parsed;
    pd_kv_layout layout;
    pd_status status = pd_worker_address_unpack(address, bytes, &parsed);

    if (status == PD_OK)
        status = layout_of(w, &parsed, &layout);
    if (status == PD_OK)
        status = pd_transfer_connect(w->setup.transfer, parsed.transfer, parsed.transfer_len, tag,
                                     peer_out);
    if (status == PD_OK)
        pd_ship_open(w->setup.shipper, *peer_out, &layout, tag);
    return status;
}

static void act_close(void *ctx, pd_peer peer)
{
    worker *w = ctx;

    pd_ship_close(w->setup.shipper, peer);
    pd_transfer_close(w->setup.transfer, peer);
}

static pd_status act_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    worker *w = ctx;

    return pd_ship_notify(w->setup.shipper, peer, notice);
}

static pd_status act_ship(void *ctx, const pd_shipment *shipment)
{
    worker *w = ctx;

    return pd_ship_post(w->setup.shipper, shipment);
}

static void act_unship(void *ctx, uint64_t ticket)
{
    worker *w = ctx;

    pd_ship_drop(w->setup.shipper, ticket);
}

static pd_status act_verify(void *ctx, const pd_check *check)
{
    worker *w = ctx;

    return pd_verifier_submit(w->verifier, check);
}

/* ---- words to the router ---- */

static void tell_placement(const pd_placement *from, pd_msg_placement *to)
{
    *to = (pd_msg_placement){0};
    snprintf(to->bus, sizeof to->bus, "%s", from->bus);
    to->numa_node = from->numa_node;
    if (from->rdma[0] != '\0' || from->net[0] != '\0') {
        pd_placement_nic(from, to->nic);
        snprintf(to->nic_distance, sizeof to->nic_distance, "%s",
                 pd_pci_distance_name(from->nic_distance));
    }
    pd_placement_cpus(from, to->cpus);
    to->bound = from->bound;
    to->threads = from->threads;
    pd_placement_pins(from, to->pinned);
}

static void say_hello(worker *w)
{
    const pd_worker_setup *s = &w->setup;
    pd_message message = {.kind = PD_MSG_HELLO};
    pd_msg_hello *hello = &message.hello;
    pd_msg_placement others[PD_RANKS_MAX]; /* ranks 1 .. */

    if (w->leaving)
        return; /* BYE is the last word: who has left would be refused */
    hello->wire_version = PD_WIRE_VERSION;
    snprintf(hello->name, sizeof hello->name, "%s", s->options->name);
    hello->role = w->ops->role;
    hello->role_epoch = 1;
    hello->incarnation = s->incarnation;
    snprintf(hello->model, sizeof hello->model, "%s", s->deployment.model.name);
    hello->model_fingerprint = pd_model_file_fingerprint(s->model);
    hello->layout_fingerprint = w->layout_fingerprint;
    pd_kv_layout_describe(&s->layout, hello->layout, sizeof hello->layout);
    hello->block_tokens = s->layout.block_tokens;
    hello->context_max = s->context;
    hello->max_batch = s->pool->max_batch;
    hello->queue_max = s->pool->queue_max;
    hello->blocks = s->layout.blocks;
    snprintf(hello->backend, sizeof hello->backend, "%s", s->options->engine->backend(s->engine));
    snprintf(hello->transfer, sizeof hello->transfer, "%s/%s", s->deployment.transfer.backend,
             s->deployment.transfer.transport);
    hello->transfer_address = w->address;
    hello->transfer_address_len = w->address_len;
    hello->pid = getpid();
    for (uint32_t rank = 1; s->ranks != NULL && rank < pd_ranks_count(s->ranks); rank++) {
        tell_placement(pd_ranks_placement(s->ranks, rank), &others[hello->rank_pids_count]);
        hello->rank_pids[hello->rank_pids_count++] = pd_ranks_pid(s->ranks, rank);
    }
    hello->rank_placements = others;
    tell_placement(&s->placement, &hello->placement);
    hello->host = w->host;
    hello->started = w->started;
    hello->session = w->session;
    hello->clock_ns = w->hello_ns = pd_clock_now_ns();
    /* Not there yet is how every cluster starts: no warning. So is a connection that takes a
     * moment: the first hello comes too early, and the next tick's is the one that counts. */
    bool failed = pd_bus_send(w->bus, NULL, &message) != PD_OK;
    if (failed && !w->hello_failed)
        pd_log_debug("msg=\"no router yet\"");
    w->hello_failed = failed;
}

static void say_heartbeat(worker *w)
{
    pd_message message = {.kind = PD_MSG_HEARTBEAT};

    if (w->leaving)
        return; /* as in say_hello */
    pd_role_heartbeat(w->ops, w->core, &message.heartbeat);
    message.heartbeat.incarnation = w->setup.incarnation;
    message.heartbeat.role_epoch = 1;
    message.heartbeat.warm = w->warm;
    message.heartbeat.clock_ns = pd_clock_now_ns();
    send_to_router(w, &message);
}

/* ---- what comes in ---- */

static void stop(worker *w, int exit_status)
{
    w->exit_status = exit_status;
    pd_loop_stop(w->loop);
}

static void on_welcome(worker *w, const pd_msg_welcome *welcome)
{
    if (welcome->session != w->session)
        return; /* late: what that session had was dropped */
    if (welcome->heartbeat_ms > 0)
        w->beat_ns = welcome->heartbeat_ms * PD_NS_PER_MS;
    if (welcome->lost_after_ms > 0)
        w->lost_after_ns = welcome->lost_after_ms * PD_NS_PER_MS;
    if (w->router != welcome->router)
        pd_log_info("msg=\"welcomed\" router=%016llx heartbeat_ms=%u lost_after_ms=%u",
                    (unsigned long long)welcome->router, welcome->heartbeat_ms,
                    welcome->lost_after_ms);
    w->router = welcome->router;
    say_heartbeat(w);
    pd_loop_timer_arm(w->beat_timer, pd_clock_now_ns() + w->beat_ns);
}

/* ---- the dead ---- */

static void keep_unfenced(worker *w, uint64_t incarnation)
{
    for (uint32_t i = 0; i < w->unfenced_count; i++) {
        if (w->unfenced[i] == incarnation)
            return;
    }
    if (w->unfenced_count == UNFENCED_MAX) {
        pd_log_error("msg=\"the transfer takes no word of the dead; blocks stay quarantined\" "
                     "incarnation=%016llx",
                     (unsigned long long)incarnation);
        return;
    }
    w->unfenced[w->unfenced_count++] = incarnation;
}

/* That process is dead, and yet its bytes may wait in a socket: the core hears of it when the
 * transfer thread has said that it writes none of them any more. */
static void fence_off(worker *w, uint64_t incarnation)
{
    if (incarnation != 0 && pd_transfer_fence(w->setup.transfer, incarnation) != PD_OK)
        keep_unfenced(w, incarnation);
}

static void fence_again(worker *w)
{
    while (w->unfenced_count > 0 &&
           pd_transfer_fence(w->setup.transfer, w->unfenced[w->unfenced_count - 1]) == PD_OK)
        w->unfenced_count--;
}

/* Its router gave it up. Of what is watched here the end itself is heard, and over messages nothing
 * more comes; but a NIC or a fabric writes as long as somebody over there is alive. */
static void on_given_up(worker *w, uint64_t incarnation)
{
    if (pd_peer_watch_alive(w->peers, incarnation))
        return;
    if (!pd_transfer_written_from_afar(w->setup.transfer)) {
        fence_off(w, incarnation);
        return;
    }
    pd_log_info("msg=\"a peer was given up that may write from afar: unless it has ended on this "
                "host, what it may still write stays quarantined until its last word\" "
                "incarnation=%016llx",
                (unsigned long long)incarnation);
}

static void on_peer_dead(void *ctx, uint64_t incarnation)
{
    worker *w = ctx;

    if (w->ops->peer_ended != NULL)
        w->ops->peer_ended(w->core, incarnation);
    fence_off(w, incarnation);
}

static void watch_peer(worker *w, uint64_t incarnation, uint64_t host, int64_t pid,
                       uint64_t started)
{
    if (w->ops->peer_dead != NULL && host == w->host && host != 0)
        pd_peer_watch_add(w->peers, incarnation, pid, started);
}

/* Whoever may write here is watched before the core hears of it. Each message that names one says
 * who it is, so none of them may be lost. */
static void watch_writers(worker *w, const pd_message *message)
{
    const pd_msg_peer *peer;

    if (message->kind == PD_MSG_PEER_UP) {
        const pd_msg_peer_up *up = &message->peer_up;
        watch_peer(w, up->incarnation, up->host, up->pid, up->started);
        return;
    }
    if (message->kind == PD_MSG_LEASE_REQUEST)
        peer = &message->lease_request.sender;
    else if (message->kind == PD_MSG_PREFILL_REQUEST)
        peer = &message->prefill_request.pull;
    else
        return;
    watch_peer(w, peer->incarnation, peer->host, peer->pid, peer->started);
}

static void on_message(void *ctx, const char *from, const pd_message *message)
{
    worker *w = ctx;
    uint64_t now_ns = pd_clock_now_ns();

    (void)from;
    if (message->kind == PD_MSG_REFUSED) {
        pd_log_error("msg=\"the router refuses this worker: %s\"", message->refused.reason);
        /* 2 is a matter of configuration: nobody starts us again. */
        stop(w, message->refused.anew ? 1 : 2);
        return;
    }
    if (message->kind == PD_MSG_WELCOME)
        on_welcome(w, &message->welcome);
    if (message->kind == PD_MSG_ROUTER_HEARTBEAT && message->router_heartbeat.router != w->router) {
        /* Another process answers at this address, and it does not know us. */
        w->router = 0;
        if (now_ns >= w->hello_ns + HELLO_NS)
            say_hello(w);
        return;
    }
    if (w->router == 0)
        return;
    w->router_heard_ns = now_ns;
    pd_message gone;
    watch_writers(w, message);
    if (message->kind == PD_MSG_PEER_GONE && w->ops->peer_dead != NULL) {
        gone = *message;
        gone.peer_gone.may_write = true; /* until it is fenced off */
        message = &gone;
        on_given_up(w, gone.peer_gone.incarnation);
    }
    w->ops->on_message(w->core, w->router, message, now_ns);
}

static void take_groups(worker *w)
{
    group_done done;

    while (pd_queue_pop(w->groups, &done) == PD_OK) {
        if (w->ops->on_group != NULL)
            w->ops->on_group(w->core, done.step, done.group, pd_clock_now_ns());
    }
}

static void on_groups(void *ctx, uint32_t epoll_events)
{
    worker *w = ctx;

    (void)epoll_events;
    pd_queue_drain_fd(w->groups);
    take_groups(w);
}

/* A device that has failed for good computes nothing more, and tells no truth about its memory;
 * with a rank that stood still there is nobody to compute with. */
static bool is_broken(worker *w)
{
    const char *why = w->setup.options->engine->broken(w->setup.engine);

    if (why == NULL)
        return false;
    pd_log_error("msg=\"what computes has failed: this worker ends\" backend=\"%s\" reason=\"%s\"",
                 w->setup.options->engine->backend(w->setup.engine), why);
    stop(w, 1);
    return true;
}

/* Its device fails again and again, and is not lost: nobody hears it from the device. What the
 * requests that are left need is computed elsewhere, as after any worker's end. */
static void end_in_trouble(worker *w, const char *what, pd_status status, uint32_t failed)
{
    const pd_worker_engine_ops *engine = w->setup.options->engine;
    char last[256];

    engine->last_error(w->setup.engine, last, sizeof last);
    pd_log_error("msg=\"what computes keeps failing: this worker ends\" backend=\"%s\" reason=\"%u "
                 "%s in a row failed, the last with %s%s%s\"",
                 engine->backend(w->setup.engine), failed, what, pd_status_name(status),
                 last[0] == '\0' ? "" : "; the device's last error: ", last);
    stop(w, 1);
}

static void on_engine(void *ctx, uint32_t epoll_events)
{
    worker *w = ctx;
    pd_step *step;

    (void)epoll_events;
    while (w->setup.options->engine->poll(w->setup.engine, &step) == PD_OK) {
        /* Its groups were announced before it was done, and are heard of before. */
        take_groups(w);
        if (step != &w->warm_step) {
            pd_status status = step->status;
            bool ends = pd_trouble_take_step(&w->step_trouble, step);
            w->ops->on_step_done(w->core, step, pd_clock_now_ns());
            if (ends && !is_broken(w)) {
                end_in_trouble(w, "steps", status, w->step_trouble.failed);
                return;
            }
            continue;
        }
        if (step->status != PD_OK) {
            pd_log_error("msg=\"the warm-up step failed\" status=%s", pd_status_name(step->status));
            stop(w, 1);
            return;
        }
        w->warm = true;
        pd_log_info("msg=\"warm\" first_step_ms=%.1f",
                    (double)(step->finished_ns - step->started_ns) / 1e6);
        if (w->router != 0)
            say_heartbeat(w);
    }
}

static void on_draft(void *ctx, uint32_t epoll_events)
{
    worker *w = ctx;
    pd_step *step;

    (void)epoll_events; /* level-triggered */
    if (w->setup.draft.ops->poll(w->setup.draft.engine, &step) == PD_OK)
        w->ops->on_draft_done(w->core, step, pd_clock_now_ns());
}

static void tell_shipped(worker *w)
{
    while (pd_ship_poll(w->setup.shipper, &w->event) == PD_OK)
        w->ops->on_transfer(w->core, &w->event, pd_clock_now_ns());
}

static void on_transfer(void *ctx, uint32_t epoll_events)
{
    worker *w = ctx;

    (void)epoll_events; /* level-triggered: what is left comes next turn */
    for (int i = 0; i < EVENTS_A_TURN; i++) {
        if (pd_transfer_poll(w->setup.transfer, &w->event) != PD_OK)
            return;
        if (w->event.kind == PD_TRANSFER_SENT && pd_ship_sent(w->setup.shipper, &w->event))
            tell_shipped(w); /* at once: before its peer is said to be closed */
        else if (w->event.kind == PD_TRANSFER_FENCED)
            w->ops->peer_dead(w->core, w->event.tag, pd_clock_now_ns());
        else
            w->ops->on_transfer(w->core, &w->event, pd_clock_now_ns());
    }
}

static void on_verifier(void *ctx, uint32_t epoll_events)
{
    worker *w = ctx;
    pd_checked checked;

    (void)epoll_events; /* level-triggered: what is left comes next turn */
    for (int i = 0; i < EVENTS_A_TURN; i++) {
        if (pd_verifier_poll(w->verifier, &checked) != PD_OK)
            return;
        if (checked.unchecked != PD_OK)
            pd_log_error("msg=\"the device cannot read what has landed\" backend=\"%s\" status=%s",
                         w->setup.options->engine->backend(w->setup.engine),
                         pd_status_name(checked.unchecked));
        bool ends = pd_trouble_take(&w->check_trouble, checked.unchecked, &checked.request, 1);
        w->ops->on_checked(w->core, &checked, pd_clock_now_ns());
        if (ends && !is_broken(w)) {
            end_in_trouble(w, "checks of landed blocks", checked.unchecked,
                           w->check_trouble.failed);
            return;
        }
    }
}

/* Whatever happened in this turn: what may leave now, leaves now. */
static bool on_turn(void *ctx)
{
    worker *w = ctx;
    bool more = pd_ship_pump(w->setup.shipper);

    tell_shipped(w);
    return more;
}

static void log_shipping(worker *w, uint64_t now_ns)
{
    pd_ship_stats s = pd_ship_read_stats(w->setup.shipper);
    const pd_ship_stats *before = &w->shipping_logged;

    w->shipping_log_ns = now_ns + SHIPPING_LOG_NS;
    if (s.parts == before->parts)
        return;
    double wire_ms = (double)(s.wire_ns - before->wire_ns) / 1e6;
    double post_ms = (double)(s.post_ns - before->post_ns) / 1e6;
    pd_log_info("msg=\"shipped\" shipments=%llu bytes=%llu puts=%llu wire_ms=%.1f post_ms=%.2f "
                "post_share=%.3f seal_ms=%.2f",
                (unsigned long long)(s.shipments - before->shipments),
                (unsigned long long)(s.bytes - before->bytes),
                (unsigned long long)(s.puts - before->puts), wire_ms, post_ms,
                wire_ms > 0 ? post_ms / wire_ms : 0, (double)(s.seal_ns - before->seal_ns) / 1e6);
    w->shipping_logged = s;
}

/* ---- time ---- */

static void leave(worker *w)
{
    pd_message message = {.kind = PD_MSG_BYE, .bye = {.incarnation = w->setup.incarnation}};

    /* A router that has left before us needs no word. */
    if (w->router != 0 && pd_bus_send(w->bus, NULL, &message) != PD_OK)
        pd_log_debug("msg=\"the router has left already\"");
    log_shipping(w, pd_clock_now_ns());
    pd_log_info("msg=\"leaves\"");
    w->leaving = true;
}

static void go_on_draining(worker *w, uint64_t now_ns)
{
    if (w->leaving) {
        stop(w, 0); /* a tick later: a closed bus drops what it has not written yet */
    } else if (w->ops->idle(w->core)) {
        leave(w);
    } else if (now_ns >= w->drain_until_ns && !w->cancelled) {
        pd_log_warn("msg=\"the grace is over; what is left is cancelled\"");
        w->cancelled = true;
        w->drain_until_ns = now_ns + CANCEL_NS;
        w->ops->cancel_all(w->core, now_ns);
    } else if (now_ns >= w->drain_until_ns) {
        leave(w);
    }
}

/* Seals are made of what a step has written: no request is to blame for one that cannot be. */
static bool cannot_seal(worker *w)
{
    pd_ship_stats s = pd_ship_read_stats(w->setup.shipper);

    if (s.seals_failed < PD_TROUBLE_CULPRITS && s.seal_status != PD_E_NOMEM)
        return false;
    end_in_trouble(w, "seals of blocks that leave", s.seal_status, s.seals_failed);
    return true;
}

static void on_tick(void *ctx)
{
    worker *w = ctx;
    uint64_t now_ns = pd_clock_now_ns();

    if (is_broken(w) || cannot_seal(w))
        return;
    fence_again(w);
    w->ops->on_tick(w->core, now_ns);
    uint64_t heard_ns = w->router_heard_ns + pd_own_pause_ns(&w->ticked_ns, now_ns);
    w->router_heard_ns = heard_ns < now_ns ? heard_ns : now_ns;
    if (w->router != 0 && now_ns > w->router_heard_ns + w->lost_after_ns) {
        /* The core has just done the same sum, and dropped what that router had here. */
        w->session++;
        pd_log_warn("msg=\"the router is silent\" router=%016llx session=%u",
                    (unsigned long long)w->router, w->session);
        w->router = 0;
    }
    if (w->router == 0 && w->drain_until_ns == 0 &&
        (w->hello_failed || now_ns >= w->hello_ns + HELLO_NS))
        say_hello(w);
    if (w->drain_until_ns != 0)
        go_on_draining(w, now_ns);
    if (now_ns >= w->shipping_log_ns)
        log_shipping(w, now_ns);
    pd_loop_timer_arm(w->tick_timer, now_ns + TICK_NS);
}

static void on_beat(void *ctx)
{
    worker *w = ctx;

    if (w->router != 0)
        say_heartbeat(w);
    pd_loop_timer_arm(w->beat_timer, pd_clock_now_ns() + w->beat_ns);
}

static void on_terminate(void *ctx)
{
    worker *w = ctx;
    uint64_t now_ns = pd_clock_now_ns();

    if (w->drain_until_ns != 0) {
        if (!w->cancelled)
            w->drain_until_ns = now_ns;
        return;
    }
    pd_log_info("msg=\"draining\" grace_ms=%u", (unsigned)(GRACE_NS / PD_NS_PER_MS));
    w->drain_until_ns = now_ns + GRACE_NS;
    w->ops->drain(w->core);
    if (w->router != 0)
        say_heartbeat(w);
}

/* ---- making ---- */

static pd_speculation speculation_of(const pd_worker_setup *s, pd_role role)
{
    const pd_deployment *d = &s->deployment;

    if (role != PD_ROLE_DECODE || d->speculative.method == PD_SPEC_OFF)
        return (pd_speculation){0};
    return (pd_speculation){.method = d->speculative.method,
                            .draft_tokens = d->speculative.draft_tokens,
                            .ngram_min = d->speculative.ngram_min,
                            .ngram_max = d->speculative.ngram_max,
                            .window = d->speculative.window,
                            .adaptive = d->speculative.adaptive,
                            .draft_blocks = s->draft.layout.blocks,
                            .draft_block_tokens = s->draft.layout.block_tokens,
                            .draft_rows = s->draft.rows,
                            .draft_context = s->draft.context};
}

static pd_status make_core(worker *w)
{
    const pd_worker_setup *s = &w->setup;
    pd_role_options options = {
        .name = s->options->name,
        .incarnation = s->incarnation,
        .layout = s->layout,
        .vocab = pd_model_file_shape(s->model)->vocab,
        .context_max = s->context,
        .max_batch = s->pool->max_batch,
        .queue_max = s->pool->queue_max,
        .chunk_tokens = s->pool->chunk_tokens,
        .peers_max = PD_WORKER_PEERS_MAX,
        .prefix_cache = s->deployment.kv.prefix_cache,
        .seals = s->deployment.transfer.seals,
        .ship_whole = !s->deployment.transfer.overlap,
        .lost_after_ns = w->lost_after_ns,
        .speculation = speculation_of(s, w->ops->role),
    };
    pd_role_sink sink = {
        .ctx = w,
        .send = act_send,
        .run = act_run,
        .draft = act_draft,
        .connect = act_connect,
        .close = act_close,
        .notify = act_notify,
        .verify = act_verify,
        .ship = act_ship,
        .unship = act_unship,
    };
    pd_status status = w->ops->create(&options, &sink, &w->core);

    if (status != PD_OK)
        pd_log_error("msg=\"the role cannot start\" status=%s", pd_status_name(status));
    return status;
}

static pd_status make_bus(worker *w)
{
    const pd_deployment *d = &w->setup.deployment;
    pd_bus_options options = {
        .endpoints = {[PD_CHANNEL_CONTROL] = d->router.control,
                      [PD_CHANNEL_TOKENS] = d->router.tokens,
                      [PD_CHANNEL_EVENTS] = d->router.events},
        .on_message = on_message,
        .ctx = w,
    };

    return pd_bus_create_worker(w->loop, &options, w->setup.options->name, w->setup.incarnation,
                                &w->bus);
}

static pd_status make_verifier(worker *w)
{
    pd_verifier_options options = {
        .layout = &w->setup.layout,
        .sealer = w->setup.sealer,
    };

    if (w->ops->on_checked == NULL || !w->setup.deployment.transfer.seals)
        return PD_OK;
    pd_status status = pd_verifier_create(&options, &w->verifier);
    if (status != PD_OK)
        return status;
    return pd_loop_add_fd(w->loop, pd_verifier_fd(w->verifier), EPOLLIN, on_verifier, w);
}

static void pack_address(worker *w)
{
    pd_worker_address address = {
        .blocks = w->setup.layout.blocks,
        .ranks = w->setup.layout.ranks,
        .layout_fingerprint = w->layout_fingerprint,
    };

    address.transfer = pd_transfer_address(w->setup.transfer, &address.transfer_len);
    w->address_len = pd_worker_address_pack(&address, w->address);
}

/* One forward run before anybody waits for it: pages are touched, caches and clocks come up. It
 * writes a block that nobody holds yet; the engine runs steps in order. */
static pd_status start_warm_up(worker *w)
{
    uint32_t count = w->setup.context < WARM_TOKENS ? w->setup.context : WARM_TOKENS;

    if (count > w->setup.pool->chunk_tokens)
        count = w->setup.pool->chunk_tokens;
    w->warm_block = w->setup.layout.blocks - 1;
    w->warm_slice = (pd_step_slice){
        .id = "warm-up",
        .tokens = w->warm_tokens,
        .count = count,
        .blocks = &w->warm_block,
        .want_token = true,
        .sampling = {.top_p = 1},
    };
    w->warm_step = (pd_step){.slices = &w->warm_slice, .slices_count = 1};
    return w->setup.options->engine->run(w->setup.engine, &w->warm_step, NULL, NULL);
}

/* One of this worker's other ranks has ended: nothing can be computed any more. */
static void on_rank_ended(void *ctx, uint32_t epoll_events)
{
    worker *w = ctx;

    (void)epoll_events;
    if (!pd_ranks_ended(w->setup.ranks))
        return;
    stop(w, 1);
    (void)is_broken(w); /* that one was killed for standing still: said last, it is the cause */
}

static pd_status watch_ranks(worker *w)
{
    pd_ranks *ranks = w->setup.ranks;
    pd_status status = PD_OK;

    for (uint32_t rank = 1; ranks != NULL && status == PD_OK && rank < pd_ranks_count(ranks);
         rank++)
        status = pd_loop_add_fd(w->loop, pd_ranks_pidfd(ranks, rank), EPOLLIN, on_rank_ended, w);
    w->ranks_watched = status == PD_OK && ranks != NULL;
    return status;
}

static pd_status prepare(worker *w)
{
    /* Signals are blocked before any thread starts, so that the loop alone sees them. */
    pd_status status = pd_loop_create(&w->loop);
    if (status == PD_OK)
        status = pd_loop_add_signal(w->loop, SIGTERM, on_terminate, w);
    if (status == PD_OK)
        status = pd_loop_add_signal(w->loop, SIGINT, on_terminate, w);
    if (status == PD_OK)
        status = pd_worker_setup_open(&w->setup);
    if (status != PD_OK)
        return status;
    status = watch_ranks(w);
    if (status != PD_OK)
        return status;
    w->layout_fingerprint = pd_kv_layout_fingerprint(&w->setup.layout);
    w->host = pd_process_host();
    if (pd_process_started(getpid(), &w->started) != PD_OK)
        pd_log_warn("msg=\"this process' start cannot be told: /proc is hidden\"");
    w->beat_ns = w->setup.deployment.heartbeat.interval_ns;
    w->lost_after_ns = w->setup.deployment.heartbeat.lost_after_ns;
    pack_address(w);
    /* Two steps' worth, with as much room again. */
    status = pd_queue_create(sizeof(group_done), 4 * w->setup.layout.groups, &w->groups);
    if (status == PD_OK)
        status = pd_trouble_init(&w->step_trouble, w->setup.pool->max_batch);
    if (status == PD_OK)
        status = pd_trouble_init(&w->check_trouble, 1);
    if (status == PD_OK)
        status = make_core(w);
    if (status == PD_OK)
        status = make_verifier(w);
    if (status == PD_OK)
        status = pd_peer_watch_create(w->loop, on_peer_dead, w, &w->peers);
    if (status == PD_OK)
        status = pd_loop_timer_create(w->loop, on_tick, w, &w->tick_timer);
    if (status == PD_OK)
        status = pd_loop_timer_create(w->loop, on_beat, w, &w->beat_timer);
    if (status == PD_OK)
        status = pd_loop_add_fd(w->loop, w->setup.options->engine->fd(w->setup.engine), EPOLLIN,
                                on_engine, w);
    if (status == PD_OK && w->setup.draft.engine != NULL)
        status = pd_loop_add_fd(w->loop, w->setup.draft.ops->fd(w->setup.draft.engine), EPOLLIN,
                                on_draft, w);
    if (status == PD_OK)
        status =
            pd_loop_add_fd(w->loop, pd_transfer_fd(w->setup.transfer), EPOLLIN, on_transfer, w);
    if (status == PD_OK)
        status = pd_loop_add_fd(w->loop, pd_queue_fd(w->groups), EPOLLIN, on_groups, w);
    if (status == PD_OK)
        status = pd_loop_add_prepare(w->loop, on_turn, w);
    if (status == PD_OK)
        status = start_warm_up(w);
    if (status == PD_OK)
        status = make_bus(w);
    if (status == PD_OK) {
        say_hello(w);
        pd_loop_timer_arm(w->tick_timer, pd_clock_now_ns() + TICK_NS);
    }
    return status;
}

static void dismantle(worker *w)
{
    if (w->bus != NULL)
        pd_bus_destroy(w->bus);
    if (w->setup.engine != NULL)
        pd_loop_remove_fd(w->loop, w->setup.options->engine->fd(w->setup.engine));
    if (w->setup.draft.engine != NULL)
        pd_loop_remove_fd(w->loop, w->setup.draft.ops->fd(w->setup.draft.engine));
    if (w->setup.transfer != NULL)
        pd_loop_remove_fd(w->loop, pd_transfer_fd(w->setup.transfer));
    if (w->verifier != NULL)
        pd_loop_remove_fd(w->loop, pd_verifier_fd(w->verifier));
    pd_verifier_destroy(w->verifier); /* it reads the pool, which goes with the setup */
    if (w->groups != NULL)
        pd_loop_remove_fd(w->loop, pd_queue_fd(w->groups));
    for (uint32_t rank = 1; w->ranks_watched && rank < pd_ranks_count(w->setup.ranks); rank++)
        pd_loop_remove_fd(w->loop, pd_ranks_pidfd(w->setup.ranks, rank));
    pd_peer_watch_destroy(w->peers);
    /* The engine's thread reads the core's plan: it ends first. */
    const pd_role_ops *ops = w->ops;
    pd_worker_setup_close(&w->setup);
    ops->destroy(w->core);
    pd_trouble_fini(&w->step_trouble);
    pd_trouble_fini(&w->check_trouble);
    pd_queue_destroy(w->groups);
    pd_loop_destroy(w->loop);
}

int pd_worker_run(const pd_worker_options *options)
{
    worker *w = pd_calloc(1, sizeof *w);

    if (w == NULL)
        return 1;
    w->ops = options->role;
    w->exit_status = 2;
    if (pd_worker_setup_read(options, &w->setup) == PD_OK) {
        w->exit_status = 1;
        if (prepare(w) == PD_OK && pd_loop_run(w->loop) != PD_OK)
            w->exit_status = 1;
    }
    int exit_status = w->exit_status;
    dismantle(w);
    pd_free(w);
    return exit_status;
}
