#pragma once

/* common/wire/bus.h - the control plane: messages over ZeroMQ.
 *
 * A router binds three sockets: control (ROUTER), tokens (PULL) and events (PULL). A worker
 * connects three to each router: control (DEALER, its identity "name/incarnation" in hex), tokens
 * (PUSH) and events (PUSH). So a flood of events never delays a token, nor tokens a lease.
 * High-water marks bound every queue; nothing lingers. Loop thread only.
 *
 * Accepted by pd_bus_send is not delivered: heartbeats tell who lives, and every exchange has a
 * deadline. */

#include "common/base/loop.h"
#include "common/wire/messages.h"

typedef struct pd_bus pd_bus;

typedef enum pd_channel {
    PD_CHANNEL_CONTROL,
    PD_CHANNEL_TOKENS,
    PD_CHANNEL_EVENTS,
    PD_CHANNELS,
} pd_channel;

/* A message came. At a router, control messages carry the sender's identity; from is borrowed. */
typedef void pd_bus_fn(void *ctx, const char *from, const pd_message *message);

/* Router: the connection that this identity last spoke on has ended: its process is dead, or the
 * link is. What it said before was delivered first. It may be back by another connection. */
typedef void pd_bus_cut_fn(void *ctx, const char *identity);

typedef struct pd_bus_options {
    const char *endpoints[PD_CHANNELS]; /* "ipc://..." or "tcp://127.0.0.1:5555" */
    pd_bus_fn *on_message;
    pd_bus_cut_fn *on_cut; /* a router's; may be NULL */
    void *ctx;
} pd_bus_options;

/* Binds. Errors: PD_E_IO (an address in use, an endpoint that cannot be bound: logged with it). */
PD_CHECKED pd_status pd_bus_create_router(pd_loop *loop, const pd_bus_options *options,
                                          pd_bus **bus_out);
/* Connects (to a router that may come later). */
PD_CHECKED pd_status pd_bus_create_worker(pd_loop *loop, const pd_bus_options *options,
                                          const char *name, uint64_t incarnation, pd_bus **bus_out);
void pd_bus_destroy(pd_bus *bus);

/* Router: to is an identity that a message came from. Worker: to is NULL, the channel is the
 * kind's. Errors: PD_E_PEER (unknown or gone), PD_E_OVERLOAD (its queue is full), PD_E_TOO_LARGE.
 */
PD_CHECKED pd_status pd_bus_send(pd_bus *bus, const char *to, const pd_message *message);

/* The identity a worker uses; text must hold PD_IDENTITY_BYTES. */
#define PD_IDENTITY_BYTES (PD_NAME_BYTES + 17)
void pd_bus_identity(const char *name, uint64_t incarnation, char *text);

/* Counted since the start. malformed: dropped, since they could not be unpacked; cut: connections
 * of peers that had spoken, which ended. */
typedef struct pd_bus_counters {
    uint64_t received, sent, malformed, send_failed, cut;
} pd_bus_counters;
pd_bus_counters pd_bus_counters_of(const pd_bus *bus);
