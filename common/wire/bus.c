#include "common/wire/bus.h"
#include "common/base/buf.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/wire/unpack.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <zmq.h>

enum {
    HWM = 10000, /* messages waiting a peer and socket */
    MESSAGES_PER_TURN = 64,
    HEARTBEAT_MS = 500, /* ZeroMQ's own: notices a cut link; ours notice a stuck loop */
    HEARTBEAT_TIMEOUT_MS = 2000,
    RECONNECT_MS = 50,
    RECONNECT_MAX_MS = 500,
    SPEAKERS_MAX = 1024, /* connections that are known by whose they are */
    MONITOR_HWM = 10000, /* full, ZeroMQ's own thread would wait for us */
};
#define MONITOR "inproc://control-monitor"

typedef struct channel {
    pd_bus *bus;
    void *socket;
    int fd;
} channel;

/* Who spoke last on a connection of the control socket. */
typedef struct speaker {
    int fd;
    char identity[PD_IDENTITY_BYTES];
} speaker;

struct pd_bus {
    pd_loop *loop;
    void *context;
    bool is_router;
    pd_bus_fn *on_message;
    pd_bus_cut_fn *on_cut;
    void *ctx;
    void *monitor; /* tells which connections of the control socket ended; NULL: nobody asks */
    int monitor_fd;
    speaker *speakers; /* [SPEAKERS_MAX] */
    uint32_t speakers_count;
    channel channels[PD_CHANNELS];
    pd_buf packed;
    pd_bus_counters counters;
};

static const char *const channel_names[PD_CHANNELS] = {"control", "tokens", "events"};

static pd_channel channel_of(pd_message_kind kind)
{
    return kind == PD_MSG_STEP_TOKENS ? PD_CHANNEL_TOKENS
           : kind == PD_MSG_KV_EVENTS ? PD_CHANNEL_EVENTS
                                      : PD_CHANNEL_CONTROL;
}

void pd_bus_identity(const char *name, uint64_t incarnation, char *text)
{
    snprintf(text, PD_IDENTITY_BYTES, "%s/%016" PRIx64, name, incarnation);
}

static void deliver(pd_bus *bus, const char *from, void *bytes, size_t len)
{
    pd_message message;
    pd_message_hold *hold;
    const char *reason;

    pd_status status = pd_message_unpack(bytes, len, &message, &hold, &reason);
    if (status != PD_OK) {
        /* once at first, then each time the count doubles: a flood must not flood the log */
        uint64_t malformed = ++bus->counters.malformed;
        if ((malformed & (malformed - 1)) == 0)
            pd_log_warn("msg=\"bus: message dropped: %s\" from=%s bytes=%zu malformed=%" PRIu64,
                        reason, from, len, malformed);
        return;
    }
    bus->counters.received++;
    bus->on_message(bus->ctx, from, &message);
    pd_message_hold_free(hold);
}

/* ---- whose connection ended ---- */

static speaker *find_speaker(pd_bus *bus, int fd)
{
    for (uint32_t i = 0; i < bus->speakers_count; i++) {
        if (bus->speakers[i].fd == fd)
            return &bus->speakers[i];
    }
    return NULL;
}

/* The connection a message came by is known by its descriptor, which is a stranger's after it was
 * closed: whoever speaks on it owns it. More than are remembered only lack the hint. */
static void note_speaker(pd_bus *bus, zmq_msg_t *frame, const char *from)
{
    if (bus->monitor == NULL)
        return;
    int fd = zmq_msg_get(frame, ZMQ_SRCFD);
    speaker *known = fd < 0 ? NULL : find_speaker(bus, fd);
    if (fd < 0 || (known == NULL && bus->speakers_count == SPEAKERS_MAX))
        return;
    if (known == NULL)
        known = &bus->speakers[bus->speakers_count++];
    else if (strcmp(known->identity, from) == 0)
        return;
    known->fd = fd;
    snprintf(known->identity, sizeof known->identity, "%s", from);
}

static void on_end_of(pd_bus *bus, int fd)
{
    speaker *ended = find_speaker(bus, fd);
    if (ended == NULL)
        return; /* it never said anything */
    char identity[PD_IDENTITY_BYTES];
    memcpy(identity, ended->identity, sizeof identity);
    *ended = bus->speakers[--bus->speakers_count];
    bus->counters.cut++;
    for (uint32_t i = 0; i < bus->speakers_count; i++) {
        if (strcmp(bus->speakers[i].identity, identity) == 0)
            return; /* it has another one already */
    }
    bus->on_cut(bus->ctx, identity);
}

/* One event of the monitor: a frame of 16 bits of kind and 32 of value, and one with the endpoint.
 * False: none was waiting. */
static bool take_event(pd_bus *bus)
{
    bool more = true, any = false;

    for (int frames = 0; more; frames++) {
        unsigned char bytes[256];
        uint16_t kind = 0;
        int32_t fd = -1;
        int n = zmq_recv(bus->monitor, bytes, sizeof bytes, ZMQ_DONTWAIT);
        int rest = 0;
        size_t size = sizeof rest;
        if (n < 0)
            return any;
        any = true;
        more = zmq_getsockopt(bus->monitor, ZMQ_RCVMORE, &rest, &size) == 0 && rest != 0;
        if (frames > 0 || n != sizeof kind + sizeof fd)
            continue;
        memcpy(&kind, bytes, sizeof kind);
        memcpy(&fd, bytes + sizeof kind, sizeof fd);
        if (kind == ZMQ_EVENT_DISCONNECTED)
            on_end_of(bus, fd);
    }
    return true;
}

/* ---- messages ---- */

/* One whole message: at a router's control socket an identity frame comes first. Frames beyond what
 * is expected are read and dropped with the message. False: nothing was waiting. */
static bool receive_one(channel *ch)
{
    pd_bus *bus = ch->bus;
    bool has_identity = bus->is_router && ch == &bus->channels[PD_CHANNEL_CONTROL];
    char from[PD_IDENTITY_BYTES] = "";
    zmq_msg_t frame;
    int frames = 0;
    bool more = true, sound = true;

    while (more) {
        zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, ch->socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&frame);
            return false;
        }
        more = zmq_msg_more(&frame) != 0;
        size_t len = zmq_msg_size(&frame);
        if (has_identity && frames == 0) {
            sound = len > 0 && len < sizeof from && memchr(zmq_msg_data(&frame), 0, len) == NULL;
            if (sound)
                memcpy(from, zmq_msg_data(&frame), len);
        } else if (sound && !more && frames == (has_identity ? 1 : 0)) {
            if (has_identity)
                note_speaker(bus, &frame, from);
            deliver(bus, from, zmq_msg_data(&frame), len);
        } else {
            sound = false;
        }
        frames++;
        zmq_msg_close(&frame);
    }
    if (!sound)
        bus->counters.malformed++;
    return true;
}

/* ZeroMQ's descriptor is edge-triggered and silent while messages wait, so its own state is asked
 * each turn, after every send, and the loop polls again while something is left. */
static bool drain(void *ctx)
{
    pd_bus *bus = ctx;
    bool left = false;

    for (int i = 0; i < PD_CHANNELS; i++) {
        channel *ch = &bus->channels[i];
        uint32_t events = 0;
        size_t size = sizeof events;
        int taken = 0;
        while (zmq_getsockopt(ch->socket, ZMQ_EVENTS, &events, &size) == 0 &&
               (events & ZMQ_POLLIN) != 0 && taken < MESSAGES_PER_TURN && receive_one(ch))
            taken++;
        left |= taken == MESSAGES_PER_TURN;
    }
    /* An end is told after what was said before it. */
    for (int taken = 0; bus->monitor != NULL && !left && take_event(bus);)
        left = ++taken == MESSAGES_PER_TURN;
    return left;
}

static void on_readable(void *ctx, uint32_t epoll_events)
{
    (void)ctx;
    (void)epoll_events; /* drain() runs before the loop sleeps again */
}

static void set_int(void *socket, int option, int value)
{
    int rc = zmq_setsockopt(socket, option, &value, sizeof value);
    pd_assert(rc == 0); /* options and values are ours */
}

/* Before the socket is bound, so that no connection is missed. */
static pd_status open_monitor(pd_bus *bus)
{
    void *control = bus->channels[PD_CHANNEL_CONTROL].socket;
    size_t size = sizeof bus->monitor_fd;

    bus->speakers = pd_calloc(SPEAKERS_MAX, sizeof *bus->speakers);
    if (bus->speakers == NULL)
        return PD_E_NOMEM;
    if (zmq_socket_monitor(control, MONITOR, ZMQ_EVENT_DISCONNECTED) == 0)
        bus->monitor = zmq_socket(bus->context, ZMQ_PAIR);
    if (bus->monitor == NULL) {
        pd_log_error("msg=\"bus: connections cannot be watched: %s\"", zmq_strerror(zmq_errno()));
        return PD_E_IO;
    }
    set_int(bus->monitor, ZMQ_LINGER, 0);
    set_int(bus->monitor, ZMQ_RCVHWM, MONITOR_HWM);
    if (zmq_connect(bus->monitor, MONITOR) != 0 ||
        zmq_getsockopt(bus->monitor, ZMQ_FD, &bus->monitor_fd, &size) != 0)
        return PD_E_IO;
    return pd_loop_add_fd(bus->loop, bus->monitor_fd, EPOLLIN, on_readable, bus);
}

static void close_monitor(pd_bus *bus)
{
    if (bus->monitor == NULL)
        return;
    if (bus->monitor_fd >= 0)
        pd_loop_remove_fd(bus->loop, bus->monitor_fd);
    /* Emptied and stopped before its reader goes: ZeroMQ's thread waits for whoever reads. */
    char byte;
    while (zmq_recv(bus->monitor, &byte, sizeof byte, ZMQ_DONTWAIT) >= 0)
        continue;
    zmq_socket_monitor(bus->channels[PD_CHANNEL_CONTROL].socket, NULL, 0);
    zmq_close(bus->monitor);
}

static pd_status open_channel(pd_bus *bus, pd_channel which, int type, const char *identity,
                              const char *endpoint)
{
    channel *ch = &bus->channels[which];
    size_t size = sizeof ch->fd;

    ch->bus = bus;
    ch->socket = zmq_socket(bus->context, type);
    if (ch->socket == NULL) {
        pd_log_error("msg=\"bus: cannot make a socket: %s\" channel=%s", zmq_strerror(zmq_errno()),
                     channel_names[which]);
        return PD_E_IO;
    }
    set_int(ch->socket, ZMQ_LINGER, 0);
    set_int(ch->socket, ZMQ_SNDHWM, HWM);
    set_int(ch->socket, ZMQ_RCVHWM, HWM);
    set_int(ch->socket, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    set_int(ch->socket, ZMQ_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS);
    set_int(ch->socket, ZMQ_RECONNECT_IVL, RECONNECT_MS);
    set_int(ch->socket, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS);
    int64_t bytes_max = PD_MESSAGE_BYTES_MAX;
    zmq_setsockopt(ch->socket, ZMQ_MAXMSGSIZE, &bytes_max, sizeof bytes_max);
    if (type == ZMQ_ROUTER) {
        set_int(ch->socket, ZMQ_ROUTER_MANDATORY, 1);
        set_int(ch->socket, ZMQ_ROUTER_HANDOVER, 1);
    }
    if (!bus->is_router)
        set_int(ch->socket, ZMQ_IMMEDIATE, 1); /* never queue for a router that is not there */
    if (identity != NULL)
        zmq_setsockopt(ch->socket, ZMQ_ROUTING_ID, identity, strlen(identity));
    if (bus->is_router && which == PD_CHANNEL_CONTROL && bus->on_cut != NULL) {
        pd_status status = open_monitor(bus);
        if (status != PD_OK)
            return status;
    }
    int rc = bus->is_router ? zmq_bind(ch->socket, endpoint) : zmq_connect(ch->socket, endpoint);
    if (rc != 0) {
        pd_log_error("msg=\"bus: cannot %s %s: %s\" channel=%s",
                     bus->is_router ? "bind" : "connect", endpoint, zmq_strerror(zmq_errno()),
                     channel_names[which]);
        return PD_E_IO;
    }
    if (zmq_getsockopt(ch->socket, ZMQ_FD, &ch->fd, &size) != 0)
        return PD_E_IO;
    return pd_loop_add_fd(bus->loop, ch->fd, EPOLLIN, on_readable, bus);
}

static pd_status create(pd_loop *loop, const pd_bus_options *options, bool is_router,
                        const char *identity, pd_bus **bus_out)
{
    static const int router_types[PD_CHANNELS] = {ZMQ_ROUTER, ZMQ_PULL, ZMQ_PULL};
    static const int worker_types[PD_CHANNELS] = {ZMQ_DEALER, ZMQ_PUSH, ZMQ_PUSH};
    pd_bus *bus = pd_calloc(1, sizeof *bus);

    if (bus == NULL)
        return PD_E_NOMEM;
    for (int i = 0; i < PD_CHANNELS; i++)
        bus->channels[i].fd = -1;
    bus->monitor_fd = -1;
    pd_buf_init(&bus->packed, PD_MESSAGE_BYTES_MAX);
    bus->loop = loop;
    bus->is_router = is_router;
    bus->on_message = options->on_message;
    bus->on_cut = options->on_cut;
    bus->ctx = options->ctx;
    bus->context = zmq_ctx_new();
    pd_status status = bus->context != NULL ? PD_OK : PD_E_NOMEM;
    for (int i = 0; i < PD_CHANNELS && status == PD_OK; i++)
        status = open_channel(bus, (pd_channel)i, is_router ? router_types[i] : worker_types[i],
                              i == PD_CHANNEL_CONTROL ? identity : NULL, options->endpoints[i]);
    if (status == PD_OK)
        status = pd_loop_add_prepare(loop, drain, bus);
    if (status != PD_OK) {
        pd_bus_destroy(bus);
        return status;
    }
    *bus_out = bus;
    return PD_OK;
}

pd_status pd_bus_create_router(pd_loop *loop, const pd_bus_options *options, pd_bus **bus_out)
{
    return create(loop, options, true, NULL, bus_out);
}

pd_status pd_bus_create_worker(pd_loop *loop, const pd_bus_options *options, const char *name,
                               uint64_t incarnation, pd_bus **bus_out)
{
    char identity[PD_IDENTITY_BYTES];

    pd_bus_identity(name, incarnation, identity);
    return create(loop, options, false, identity, bus_out);
}

void pd_bus_destroy(pd_bus *bus)
{
    if (bus == NULL)
        return;
    close_monitor(bus);
    for (int i = 0; i < PD_CHANNELS; i++) {
        if (bus->channels[i].fd >= 0)
            pd_loop_remove_fd(bus->loop, bus->channels[i].fd);
        if (bus->channels[i].socket != NULL)
            zmq_close(bus->channels[i].socket);
    }
    pd_loop_remove_prepare(bus->loop, drain, bus);
    if (bus->context != NULL)
        zmq_ctx_term(bus->context);
    pd_buf_fini(&bus->packed);
    pd_free(bus->speakers);
    pd_free(bus);
}

pd_status pd_bus_send(pd_bus *bus, const char *to, const pd_message *message)
{
    channel *ch = &bus->channels[channel_of(message->kind)];

    pd_assert((to != NULL) == bus->is_router);
    pd_status status = pd_message_pack(message, &bus->packed);
    if (status != PD_OK)
        return status;
    if (to != NULL && zmq_send(ch->socket, to, strlen(to), ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) {
        bus->counters.send_failed++;
        return zmq_errno() == EAGAIN ? PD_E_OVERLOAD : PD_E_PEER;
    }
    if (zmq_send(ch->socket, bus->packed.bytes, bus->packed.len, ZMQ_DONTWAIT) < 0) {
        bus->counters.send_failed++;
        return zmq_errno() == EAGAIN ? PD_E_OVERLOAD : PD_E_PEER;
    }
    bus->counters.sent++;
    return PD_OK;
}

pd_bus_counters pd_bus_counters_of(const pd_bus *bus)
{
    return bus->counters;
}
