#include "common/transfer/engine.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum {
    OPS_MAX = 8192,    /* operations that wait, all peers together */
    EVENTS_MAX = 4096, /* in the queue to the loop; more wait in the engine */
    CONTROL_MAX = 1024,
    WINDOW_DEFAULT = 128, /* puts in flight, a peer */
    WINDOW_MAX = 4096,
    /* A notice waits behind what the carrier has queued: on tcp more than this only adds latency */
    BYTES_IN_FLIGHT_MAX = 8 << 20,
    PROGRESS_MAX = 64, /* rounds before the queues are looked at again */
    /* Wake-ups late by seconds have been reported for UCX; never sleep longer than this. */
    SLEEP_MS = 50,
    BACKLOG_SLEEP_MS = 1,
};

#define STALL_MS_DEFAULT 5000
#define CLOSE_NS         (1 * PD_NS_PER_S)
/* A turn that took this long means that we were not running, and the peer may be innocent. */
#define OWN_STALL_NS (500 * PD_NS_PER_MS)

typedef struct op_node {
    struct op_node *next;
    pd_engine_op op;
} op_node;

typedef enum peer_state { PEER_FREE, PEER_OPENING, PEER_UP, PEER_BROKEN, PEER_CLOSING } peer_state;

typedef struct peer_record {
    peer_state state;
    uint32_t generation;
    pd_engine_event *event_up, *event_down, *event_closed; /* NULL once sent */
    bool broken;       /* set by the carrier; acted upon in the next turn */
    bool opened;       /* the same */
    bool send_blocked; /* a notice found no room: it goes before any other put */
    pd_status open_status;
    char lane[64];

    op_node *ops_head, *ops_tail;
    pd_engine_batch *batches_head, *batches_tail; /* flush asked for */
    uint32_t batch_next;
    uint32_t put_next, put_oldest; /* puts in [oldest, next) are not known to be done */
    uint64_t *put_bytes;           /* [window], by put number; 0 when it is done */
    uint64_t bytes_in_flight;

    /* of the batch that is being put together */
    uint64_t bytes, first_put_ns, post_ns;

    uint64_t moved_ns; /* when something last completed, or when it became busy */
    uint64_t close_by_ns;
} peer_record;

struct pd_engine {
    const pd_carrier_ops *ops;
    pd_carrier *carrier;
    uint64_t incarnation;
    pd_engine_up_fn *up;
    void *ctx;
    uint32_t peers_max, window;
    uint64_t stall_ns;

    pd_queue *control, *op_queue, *events;
    peer_record *peers; /* [peers_max] */
    uint64_t *rings;    /* [peers_max][window] */
    op_node *nodes, *nodes_free;
    pd_engine_event *backlog_head, *backlog_tail;
    pd_engine_batch *zombies; /* their message may still be read by the carrier */
    uint64_t now_ns;
    uint64_t rejected; /* messages that were not for us */
    int epoll_fd;
    bool stopping;

    pthread_t thread;
    bool thread_started;
    const pd_transfer_options *options; /* during creation */
    pthread_mutex_t lock;               /* guards the two below, for creation only */
    pthread_cond_t started;
    bool start_done;
    pd_status start_status;
};

/* ---- tokens ---- */

static uint64_t token_of(const pd_engine *engine, pd_peer peer, uint32_t number)
{
    return (uint64_t)peer << 52 | (uint64_t)engine->peers[peer].generation << 32 | number;
}

/* NULL when the token is of an earlier connection. */
static peer_record *token_peer(pd_engine *engine, uint64_t token, pd_peer *peer_out)
{
    *peer_out = (pd_peer)(token >> 52);
    pd_assert(*peer_out < engine->peers_max);
    peer_record *peer = &engine->peers[*peer_out];
    bool current = (token >> 32 & PD_ENGINE_GENERATION_MASK) == peer->generation;
    return current && (peer->state == PEER_UP || peer->state == PEER_BROKEN) ? peer : NULL;
}

/* ---- events out ---- */

static void backlog_flush(pd_engine *engine)
{
    while (engine->backlog_head != NULL) {
        pd_engine_event *event = engine->backlog_head;
        pd_engine_event *next = event->next; /* the event is not ours after the push */
        if (pd_queue_push(engine->events, &event) != PD_OK)
            return;
        engine->backlog_head = next;
        if (next == NULL)
            engine->backlog_tail = NULL;
    }
}

static void emit(pd_engine *engine, pd_engine_event *event)
{
    event->next = NULL;
    if (engine->backlog_tail != NULL)
        engine->backlog_tail->next = event;
    else
        engine->backlog_head = event;
    engine->backlog_tail = event;
}

static void emit_kept(pd_engine *engine, pd_engine_event **event, pd_status status)
{
    pd_assert(*event != NULL);
    (*event)->status = status;
    emit(engine, *event);
    *event = NULL;
}

/* ---- batches and operations ---- */

/* May the carrier still read the batch's message? Then it is kept until the carrier has ended. */
static void batch_free(pd_engine *engine, pd_engine_batch *batch)
{
    if (batch->sending) {
        batch->next = engine->zombies;
        engine->zombies = batch;
        return;
    }
    pd_free(batch);
}

static void batch_end(pd_engine *engine, pd_engine_batch *batch, pd_status status)
{
    emit_kept(engine, &batch->sent, status);
    batch_free(engine, batch);
}

static void node_free(pd_engine *engine, op_node *node)
{
    node->next = engine->nodes_free;
    engine->nodes_free = node;
}

/* Everything the peer has waiting or under way ends in status. */
static void fail_all(pd_engine *engine, peer_record *peer, pd_status status)
{
    while (peer->batches_head != NULL) {
        pd_engine_batch *batch = peer->batches_head;
        peer->batches_head = batch->next;
        batch_end(engine, batch, status);
    }
    peer->batches_tail = NULL;
    while (peer->ops_head != NULL) {
        op_node *node = peer->ops_head;
        peer->ops_head = node->next;
        if (node->op.kind == PD_ENGINE_NOTICE)
            batch_end(engine, node->op.batch, status);
        node_free(engine, node);
    }
    peer->ops_tail = NULL;
}

static void peer_break(pd_engine *engine, pd_peer index, pd_status status)
{
    peer_record *peer = &engine->peers[index];
    pd_assert(peer->state == PEER_OPENING || peer->state == PEER_UP);
    bool was_up = peer->state == PEER_UP;
    peer->state = PEER_BROKEN;
    engine->up(engine->ctx, index, peer->generation, false);
    fail_all(engine, peer, status);
    /* the event for "connected" tells of a failure too, so that both cases have one */
    emit_kept(engine, was_up ? &peer->event_down : &peer->event_up, status);
}

static void put_is_done(pd_engine *engine, peer_record *peer, uint32_t number)
{
    uint64_t *bytes = &peer->put_bytes[number % engine->window];
    peer->bytes_in_flight -= *bytes;
    *bytes = 0;
    while (peer->put_oldest != peer->put_next &&
           peer->put_bytes[peer->put_oldest % engine->window] == 0)
        peer->put_oldest++;
    peer->moved_ns = engine->now_ns;
}

static pd_engine_batch *batch_numbered(peer_record *peer, uint32_t number)
{
    pd_engine_batch *batch = peer->batches_head;
    while (batch != NULL && batch->number != number)
        batch = batch->next;
    return batch;
}

static void on_put_done(void *ctx, uint64_t token, pd_status status)
{
    pd_engine *engine = ctx;
    pd_peer index;
    peer_record *peer = token_peer(engine, token, &index);
    if (peer == NULL)
        return;
    if (status == PD_OK)
        put_is_done(engine, peer, (uint32_t)token);
    else
        peer->broken = true;
}

static void on_flush_done(void *ctx, uint64_t token, pd_status status)
{
    pd_engine *engine = ctx;
    pd_peer index;
    peer_record *peer = token_peer(engine, token, &index);
    if (peer == NULL)
        return;
    pd_engine_batch *batch = batch_numbered(peer, (uint32_t)token);
    if (status != PD_OK)
        peer->broken = true;
    else if (batch != NULL)
        batch->flushed = true;
    peer->moved_ns = engine->now_ns;
}

/* Ends the batches that are through, in their order. */
static void batches_reap(pd_engine *engine, peer_record *peer)
{
    while (peer->batches_head != NULL && peer->batches_head->done) {
        pd_engine_batch *batch = peer->batches_head;
        peer->batches_head = batch->next;
        if (peer->batches_head == NULL)
            peer->batches_tail = NULL;
        batch_end(engine, batch, PD_OK);
    }
}

static void on_send_done(void *ctx, uint64_t token, pd_status status)
{
    pd_engine *engine = ctx;
    pd_peer index;
    peer_record *peer = token_peer(engine, token, &index);
    if (peer == NULL)
        return;
    if (status != PD_OK) {
        peer->broken = true;
        return;
    }
    pd_engine_batch *batch = batch_numbered(peer, (uint32_t)token);
    if (batch == NULL)
        return; /* it failed meanwhile */
    batch->sending = false;
    batch->done = true;
    peer->moved_ns = engine->now_ns;
    batches_reap(engine, peer);
}

static void on_opened(void *ctx, pd_peer index, pd_status status, const char *lane)
{
    pd_engine *engine = ctx;
    peer_record *peer = &engine->peers[index];
    peer->opened = true;
    peer->open_status = status;
    strncpy(peer->lane, lane, sizeof peer->lane - 1);
}

static void on_broken(void *ctx, pd_peer index)
{
    pd_engine *engine = ctx;
    engine->peers[index].broken = true;
}

static void on_received(void *ctx, const void *bytes, size_t len)
{
    pd_engine *engine = ctx;
    pd_engine_message message;
    if (len >= sizeof message)
        memcpy(&message, bytes, sizeof message);
    if (len < sizeof message || message.magic != PD_ENGINE_MESSAGE_MAGIC ||
        message.len != len - sizeof message || message.len > PD_TRANSFER_NOTICE_BYTES_MAX ||
        message.target_incarnation != engine->incarnation) {
        /* the first, then ever fewer: a peer must not fill the log */
        engine->rejected++;
        if ((engine->rejected & (engine->rejected - 1)) == 0)
            pd_log_warn("msg=\"transfer: dropped a notice that is malformed or for an earlier "
                        "incarnation\" bytes=%zu dropped=%llu",
                        len, (unsigned long long)engine->rejected);
        return;
    }
    pd_engine_event *event = pd_calloc(1, sizeof *event + message.len);
    if (event == NULL) {
        pd_log_error("msg=\"transfer: no memory for a notice, dropped\" bytes=%zu", len);
        return;
    }
    event->kind = PD_TRANSFER_NOTICE;
    event->notice_len = message.len;
    memcpy(event->notice, (const unsigned char *)bytes + sizeof message, message.len);
    emit(engine, event);
}

static void peer_closed(pd_engine *engine, pd_peer index, pd_status status)
{
    peer_record *peer = &engine->peers[index];
    pd_free(peer->event_up);
    pd_free(peer->event_down);
    peer->event_up = peer->event_down = NULL;
    peer->state = PEER_FREE;
    emit_kept(engine, &peer->event_closed, status);
}

static void on_closed(void *ctx, pd_peer index)
{
    pd_engine *engine = ctx;
    if (engine->peers[index].state == PEER_CLOSING)
        peer_closed(engine, index, PD_OK);
}

static const pd_carrier_events carrier_events = {
    .put_done = on_put_done,
    .flush_done = on_flush_done,
    .send_done = on_send_done,
    .opened = on_opened,
    .broken = on_broken,
    .closed = on_closed,
    .received = on_received,
};

/* ---- a turn ---- */

static void control_connect(pd_engine *engine, const pd_engine_control *control)
{
    peer_record *peer = &engine->peers[control->peer];
    pd_assert(peer->state == PEER_FREE);
    *peer = (peer_record){
        .state = PEER_OPENING,
        .generation = control->generation,
        .event_up = control->events[0],
        .event_down = control->events[1],
        .event_closed = control->events[2],
        .put_bytes = peer->put_bytes,
        .moved_ns = engine->now_ns,
    };
    pd_status status = engine->ops->open(engine->carrier, control->peer, control->address,
                                         control->address_bytes, control->peer_pool);
    pd_free(control->address);
    if (status != PD_OK)
        peer_break(engine, control->peer, status);
}

static bool drain_ops(pd_engine *engine);

static void control_close(pd_engine *engine, const pd_engine_control *control)
{
    peer_record *peer = &engine->peers[control->peer];
    if (peer->state == PEER_FREE || peer->state == PEER_CLOSING ||
        peer->generation != control->generation)
        return;
    /* what was posted before the close is told before its end */
    drain_ops(engine);
    fail_all(engine, peer, PD_E_CANCELLED);
    peer->state = PEER_CLOSING;
    engine->up(engine->ctx, control->peer, peer->generation, false);
    peer->close_by_ns = engine->now_ns + CLOSE_NS;
    engine->ops->close(engine->carrier, control->peer);
}

/* What arrived before is told before, what comes after it is not written. */
static void control_fence(pd_engine *engine, pd_engine_control *control)
{
    engine->ops->fence(engine->carrier, control->incarnation);
    emit_kept(engine, &control->events[0], PD_OK);
}

static bool drain_control(pd_engine *engine)
{
    pd_engine_control control;
    bool any = false;
    while (pd_queue_pop(engine->control, &control) == PD_OK) {
        any = true;
        switch (control.kind) {
        case PD_ENGINE_CONNECT: control_connect(engine, &control); break;
        case PD_ENGINE_CLOSE: control_close(engine, &control); break;
        case PD_ENGINE_FENCE: control_fence(engine, &control); break;
        case PD_ENGINE_STOP: engine->stopping = true; break;
        }
    }
    return any;
}

/* An operation for a peer that is not (or no longer) up ends here. */
static bool op_refuse(pd_engine *engine, const pd_engine_op *op)
{
    peer_record *peer = &engine->peers[op->peer];
    bool current = peer->generation == op->generation;
    if (current && peer->state == PEER_UP)
        return false;
    if (op->kind == PD_ENGINE_NOTICE)
        batch_end(engine, op->batch,
                  current && peer->state == PEER_BROKEN ? PD_E_PEER : PD_E_CANCELLED);
    return true;
}

static bool is_idle(const peer_record *peer)
{
    return peer->ops_head == NULL && peer->put_oldest == peer->put_next &&
           peer->batches_head == NULL;
}

static bool drain_ops(pd_engine *engine)
{
    bool any = false;
    while (engine->nodes_free != NULL) {
        op_node *node = engine->nodes_free;
        if (pd_queue_pop(engine->op_queue, &node->op) != PD_OK)
            break;
        any = true;
        if (op_refuse(engine, &node->op))
            continue;
        engine->nodes_free = node->next;
        node->next = NULL;
        peer_record *peer = &engine->peers[node->op.peer];
        if (is_idle(peer))
            peer->moved_ns = engine->now_ns;
        if (peer->ops_tail != NULL)
            peer->ops_tail->next = node;
        else
            peer->ops_head = node;
        peer->ops_tail = node;
    }
    return any;
}

/* False: the carrier takes none now. */
static bool start_put(pd_engine *engine, pd_peer index, const pd_engine_op *op)
{
    peer_record *peer = &engine->peers[index];
    uint64_t start_ns = pd_clock_now_ns();
    uint32_t number = peer->put_next;
    pd_status status =
        engine->ops->put(engine->carrier, index, op->source_offset, op->target_offset, op->bytes,
                         token_of(engine, index, number));
    /* a put that is done when its call returns was the copy itself, and not the beginning of one */
    if (status != PD_OK)
        peer->post_ns += pd_clock_now_ns() - start_ns;
    if (status == PD_E_OVERLOAD)
        return false;
    peer->put_next++;
    peer->put_bytes[number % engine->window] = op->bytes;
    peer->bytes_in_flight += op->bytes;
    if (peer->first_put_ns == 0)
        peer->first_put_ns = start_ns;
    peer->bytes += op->bytes;
    if (status == PD_OK)
        put_is_done(engine, peer, number);
    else if (status != PD_E_AGAIN)
        peer->broken = true;
    return true;
}

static void start_batch(pd_engine *engine, pd_peer index, pd_engine_batch *batch)
{
    peer_record *peer = &engine->peers[index];
    batch->next = NULL;
    batch->number = peer->batch_next++;
    batch->puts_until = peer->put_next;
    batch->first_put_ns = peer->first_put_ns;
    batch->sent->bytes = peer->bytes;
    batch->sent->post_ns = peer->post_ns;
    peer->bytes = peer->first_put_ns = peer->post_ns = 0;
    if (peer->batches_tail != NULL)
        peer->batches_tail->next = batch;
    else
        peer->batches_head = batch;
    peer->batches_tail = batch;
    pd_status status =
        engine->ops->flush(engine->carrier, index, token_of(engine, index, batch->number));
    if (status == PD_OK)
        batch->flushed = true;
    else if (status != PD_E_AGAIN)
        peer->broken = true;
}

static bool has_room(const pd_engine *engine, const peer_record *peer, uint64_t bytes)
{
    if (peer->put_next - peer->put_oldest >= engine->window)
        return false;
    return peer->bytes_in_flight == 0 || peer->bytes_in_flight + bytes <= BYTES_IN_FLIGHT_MAX;
}

/* A notice goes out when every put before it reported success and the flush after them is done:
 * either alone has been seen to say so too early. */
static bool pump_batches(pd_engine *engine, pd_peer index)
{
    peer_record *peer = &engine->peers[index];
    bool any = false;
    peer->send_blocked = false;
    /* not one at a time: each message waits behind the puts that the carrier has queued already */
    for (pd_engine_batch *batch = peer->batches_head; batch != NULL; batch = batch->next) {
        if (batch->sending || batch->done)
            continue;
        if (peer->broken || !batch->flushed || (int32_t)(peer->put_oldest - batch->puts_until) < 0)
            break;
        batch->sent->landed_ns = pd_clock_now_ns();
        if (batch->first_put_ns != 0)
            batch->sent->wire_ns = batch->sent->landed_ns - batch->first_put_ns;
        batch->sending = true;
        pd_status status = engine->ops->send(engine->carrier, index, batch->message, batch->len,
                                             token_of(engine, index, batch->number));
        if (status == PD_E_OVERLOAD) {
            batch->sending = false;
            peer->send_blocked = true;
            break;
        }
        any = true;
        if (status == PD_E_AGAIN)
            continue;
        batch->sending = false;
        batch->done = status == PD_OK;
        if (status != PD_OK)
            peer->broken = true;
    }
    batches_reap(engine, peer);
    return any;
}

static uint64_t piece_bytes(const pd_engine_op *put)
{
    return put->bytes < PD_CARRIER_PUT_BYTES_MAX ? put->bytes : PD_CARRIER_PUT_BYTES_MAX;
}

/* A piece of the put, or what is left of it. False: it has to wait. */
static bool pump_put(pd_engine *engine, pd_peer index, pd_engine_op *put)
{
    peer_record *peer = &engine->peers[index];
    pd_engine_op piece = *put;
    piece.bytes = piece_bytes(put);
    if (!has_room(engine, peer, piece.bytes) || !start_put(engine, index, &piece))
        return false;
    put->source_offset += piece.bytes;
    put->target_offset += piece.bytes;
    put->bytes -= piece.bytes;
    return true;
}

static bool pump_ops(pd_engine *engine, pd_peer index)
{
    peer_record *peer = &engine->peers[index];
    bool any = false;
    while (peer->ops_head != NULL && !peer->broken && !peer->send_blocked) {
        op_node *node = peer->ops_head;
        if (node->op.kind == PD_ENGINE_PUT && !pump_put(engine, index, &node->op))
            break;
        any = true;
        if (node->op.kind == PD_ENGINE_PUT && node->op.bytes > 0)
            continue;
        peer->ops_head = node->next;
        if (peer->ops_head == NULL)
            peer->ops_tail = NULL;
        if (node->op.kind == PD_ENGINE_NOTICE) {
            start_batch(engine, index, node->op.batch);
            /* at once, where its puts are done: more of them would fill what carries it */
            pump_batches(engine, index);
        }
        node_free(engine, node);
    }
    return any;
}

static void check_opened(pd_engine *engine, pd_peer index)
{
    peer_record *peer = &engine->peers[index];
    if (peer->open_status != PD_OK) {
        peer_break(engine, index, peer->open_status);
        return;
    }
    peer->state = PEER_UP;
    memcpy(peer->event_up->lane, peer->lane, sizeof peer->lane);
    peer->event_up->kind = PD_TRANSFER_CONNECTED;
    engine->up(engine->ctx, index, peer->generation, true);
    emit_kept(engine, &peer->event_up, PD_OK);
}

static bool pump(pd_engine *engine, pd_peer index)
{
    peer_record *peer = &engine->peers[index];
    bool any = false;
    if (peer->state == PEER_OPENING && peer->opened) {
        check_opened(engine, index);
        any = true;
    }
    if (peer->state == PEER_UP) {
        any |= pump_batches(engine, index);
        any |= pump_ops(engine, index);
    }
    if (peer->state == PEER_OPENING || peer->state == PEER_UP) {
        bool busy = peer->state == PEER_OPENING || !is_idle(peer);
        if (peer->broken) {
            peer_break(engine, index, PD_E_PEER);
        } else if (busy && engine->now_ns > peer->moved_ns &&
                   engine->now_ns - peer->moved_ns > engine->stall_ns) {
            pd_log_warn(
                "msg=\"transfer: nothing moved to a peer, given up\" peer=%u waited_ms=%llu", index,
                (unsigned long long)((engine->now_ns - peer->moved_ns) / PD_NS_PER_MS));
            peer_break(engine, index, PD_E_TIMEOUT);
        }
    }
    if (peer->state == PEER_CLOSING && engine->now_ns > peer->close_by_ns) {
        pd_log_warn("msg=\"transfer: closing a connection does not end, abandoned\" peer=%u",
                    index);
        peer_closed(engine, index, PD_E_TIMEOUT);
    }
    return any;
}

static void take_time(pd_engine *engine)
{
    uint64_t now_ns = pd_clock_now_ns();
    uint64_t gap_ns = now_ns - engine->now_ns;
    if (engine->now_ns != 0 && gap_ns > OWN_STALL_NS) {
        for (pd_peer i = 0; i < engine->peers_max; i++)
            engine->peers[i].moved_ns += gap_ns;
    }
    engine->now_ns = now_ns;
}

/* True: go on at once. */
static bool turn(pd_engine *engine)
{
    take_time(engine);
    pd_queue_drain_fd(engine->control);
    pd_queue_drain_fd(engine->op_queue);
    bool any = drain_control(engine);
    any |= drain_ops(engine);
    for (pd_peer i = 0; i < engine->peers_max; i++) {
        if (engine->peers[i].state != PEER_FREE)
            any |= pump(engine, i);
    }
    backlog_flush(engine);
    /* while nobody takes events, no more are made: what peers send waits with them */
    for (int i = 0; i < PROGRESS_MAX && engine->backlog_head == NULL; i++) {
        if (!engine->ops->progress(engine->carrier))
            break;
        any = true;
        backlog_flush(engine);
    }
    return any;
}

static void run(pd_engine *engine)
{
    while (!engine->stopping) {
        bool backlog = engine->backlog_head != NULL;
        if (turn(engine) && !backlog)
            continue;
        backlog = engine->backlog_head != NULL;
        if (!backlog && !engine->ops->arm(engine->carrier))
            continue;
        struct epoll_event ready[3];
        epoll_wait(engine->epoll_fd, ready, 3, backlog ? BACKLOG_SLEEP_MS : SLEEP_MS);
    }
}

/* ---- start and end ---- */

static bool watch(pd_engine *engine, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    return epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static pd_status start(pd_engine *engine)
{
    pd_status status =
        engine->ops->create(engine->options, &carrier_events, engine, &engine->carrier);
    if (status != PD_OK)
        return status;
    engine->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (engine->epoll_fd < 0 || !watch(engine, engine->ops->fd(engine->carrier)) ||
        !watch(engine, pd_queue_fd(engine->control)) ||
        !watch(engine, pd_queue_fd(engine->op_queue))) {
        pd_log_error("msg=\"transfer: epoll failed: %m\"");
        return PD_E_IO;
    }
    return PD_OK;
}

static bool any_open(const pd_engine *engine)
{
    for (pd_peer i = 0; i < engine->peers_max; i++) {
        if (engine->peers[i].state != PEER_FREE)
            return true;
    }
    return false;
}

/* Closes every peer, for at most as long as closing one may take. */
static void close_all(pd_engine *engine)
{
    take_time(engine);
    for (pd_peer i = 0; i < engine->peers_max; i++) {
        pd_engine_control control = {.peer = i, .generation = engine->peers[i].generation};
        control_close(engine, &control);
    }
    while (any_open(engine)) {
        take_time(engine);
        for (int i = 0; i < PROGRESS_MAX && engine->ops->progress(engine->carrier); i++)
            ;
        for (pd_peer i = 0; i < engine->peers_max; i++) {
            if (engine->peers[i].state == PEER_CLOSING)
                pump(engine, i);
        }
        if (any_open(engine))
            usleep(200);
    }
}

/* Signals are the loop's business; UCX's own thread inherits this. Faults must stay deliverable. */
static void block_signals(void)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&set, faults[i]);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

static void *thread_main(void *ctx)
{
    pd_engine *engine = ctx;
    block_signals();
    pthread_setname_np(pthread_self(), "kv-transfer");
    pd_status status = start(engine);
    pthread_mutex_lock(&engine->lock);
    engine->start_done = true;
    engine->start_status = status;
    pthread_cond_signal(&engine->started);
    pthread_mutex_unlock(&engine->lock);
    if (status == PD_OK) {
        run(engine);
        close_all(engine);
    }
    engine->ops->destroy(engine->carrier);
    engine->carrier = NULL;
    return NULL;
}

static pd_status allocate(pd_engine *engine)
{
    pd_status status = pd_queue_create(sizeof(pd_engine_control), CONTROL_MAX, &engine->control);
    if (status == PD_OK)
        status = pd_queue_create(sizeof(pd_engine_op), OPS_MAX, &engine->op_queue);
    if (status == PD_OK)
        status = pd_queue_create(sizeof(pd_engine_event *), EVENTS_MAX, &engine->events);
    if (status != PD_OK)
        return status;
    engine->peers = pd_calloc(engine->peers_max, sizeof *engine->peers);
    engine->rings = pd_calloc(engine->peers_max, engine->window * sizeof *engine->rings);
    engine->nodes = pd_calloc(OPS_MAX, sizeof *engine->nodes);
    if (engine->peers == NULL || engine->rings == NULL || engine->nodes == NULL)
        return PD_E_NOMEM;
    for (pd_peer i = 0; i < engine->peers_max; i++)
        engine->peers[i].put_bytes = engine->rings + (size_t)i * engine->window;
    for (int i = 0; i < OPS_MAX; i++)
        node_free(engine, &engine->nodes[i]);
    return PD_OK;
}

pd_status pd_engine_create(const pd_engine_options *options, pd_engine **engine_out)
{
    const pd_transfer_options *transfer = options->transfer;
    pd_engine *engine = pd_calloc(1, sizeof *engine);
    if (engine == NULL)
        return PD_E_NOMEM;
    engine->ops = options->carrier;
    engine->incarnation = options->incarnation;
    engine->up = options->up;
    engine->ctx = options->ctx;
    engine->peers_max = transfer->peers_max;
    uint32_t window =
        transfer->puts_in_flight_max != 0 ? transfer->puts_in_flight_max : WINDOW_DEFAULT;
    engine->window = 1; /* a power of two, so that put numbers may wrap */
    while (engine->window < window && engine->window < WINDOW_MAX)
        engine->window *= 2;
    engine->stall_ns =
        (transfer->stall_ms != 0 ? transfer->stall_ms : STALL_MS_DEFAULT) * PD_NS_PER_MS;
    engine->options = transfer;
    engine->epoll_fd = -1;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->started, NULL);
    pd_status status = allocate(engine);
    if (status == PD_OK) {
        int error = pthread_create(&engine->thread, NULL, thread_main, engine);
        if (error != 0) {
            errno = error;
            pd_log_error("msg=\"transfer: no thread: %m\"");
            status = PD_E_IO;
        }
        engine->thread_started = error == 0;
    }
    if (status == PD_OK) {
        pthread_mutex_lock(&engine->lock);
        while (!engine->start_done)
            pthread_cond_wait(&engine->started, &engine->lock);
        status = engine->start_status;
        pthread_mutex_unlock(&engine->lock);
    }
    engine->options = NULL;
    if (status != PD_OK) {
        pd_engine_destroy(engine);
        return status;
    }
    *engine_out = engine;
    return PD_OK;
}

/* What is still in the queues when the thread has ended. */
static void free_leftovers(pd_engine *engine)
{
    pd_engine_op op;
    while (engine->op_queue != NULL && pd_queue_pop(engine->op_queue, &op) == PD_OK) {
        if (op.kind == PD_ENGINE_NOTICE) {
            pd_free(op.batch->sent);
            pd_free(op.batch);
        }
    }
    pd_engine_control control;
    while (engine->control != NULL && pd_queue_pop(engine->control, &control) == PD_OK) {
        pd_free(control.address);
        for (int i = 0; i < 3; i++)
            pd_free(control.events[i]);
    }
    pd_engine_event *event;
    while (engine->events != NULL && pd_queue_pop(engine->events, &event) == PD_OK)
        pd_free(event);
    while (engine->backlog_head != NULL) {
        event = engine->backlog_head;
        engine->backlog_head = event->next;
        pd_free(event);
    }
    while (engine->zombies != NULL) {
        pd_engine_batch *batch = engine->zombies;
        engine->zombies = batch->next;
        pd_free(batch);
    }
}

void pd_engine_destroy(pd_engine *engine)
{
    if (engine == NULL)
        return;
    if (engine->thread_started) {
        pd_engine_control control = {.kind = PD_ENGINE_STOP};
        /* full: the thread is about to take something out */
        while (pd_queue_push(engine->control, &control) != PD_OK)
            usleep(1000);
        pthread_join(engine->thread, NULL);
    }
    free_leftovers(engine);
    if (engine->epoll_fd >= 0)
        close(engine->epoll_fd);
    pd_queue_destroy(engine->control);
    pd_queue_destroy(engine->op_queue);
    pd_queue_destroy(engine->events);
    pthread_cond_destroy(&engine->started);
    pthread_mutex_destroy(&engine->lock);
    pd_free(engine->peers);
    pd_free(engine->rings);
    pd_free(engine->nodes);
    pd_free(engine);
}

void *pd_engine_pool(const pd_engine *engine)
{
    return engine->ops->pool(engine->carrier);
}

bool pd_engine_written_from_afar(const pd_engine *engine)
{
    return engine->ops->written_from_afar != NULL &&
           engine->ops->written_from_afar(engine->carrier);
}

const void *pd_engine_address(const pd_engine *engine, size_t *bytes_out)
{
    return engine->ops->address(engine->carrier, bytes_out);
}

pd_status pd_engine_control_push(pd_engine *engine, const pd_engine_control *control)
{
    return pd_queue_push(engine->control, control);
}

pd_status pd_engine_op_push(pd_engine *engine, const pd_engine_op *op)
{
    return pd_queue_push(engine->op_queue, op);
}

pd_queue *pd_engine_events(const pd_engine *engine)
{
    return engine->events;
}
