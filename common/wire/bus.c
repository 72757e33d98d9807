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
};

typedef struct channel {
    pd_bus *bus;
    void *socket;
    int fd;
} channel;

struct pd_bus {
    pd_loop *loop;
    void *context;
    bool is_router;
    pd_bus_fn *on_message;
    void *ctx;
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
    pd_buf_init(&bus->packed, PD_MESSAGE_BYTES_MAX);
    bus->loop = loop;
    bus->is_router = is_router;
    bus->on_message = options->on_message;
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
