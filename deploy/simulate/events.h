#pragma once

/* deploy/simulate/events.h - what is going to happen, ordered by virtual time.
 *
 * Events of the same time come out in the order in which they were due at first, then in which they
 * were put in: so an event that is put in again for later is not overtaken by those behind it, and
 * a run depends on its seed alone. One thread. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum sim_kind {
    /* for a router: subject is its index, incarnation 0 (whoever lives at its address) */
    SIM_ARRIVAL = 1, /* a client asks: a is the request */
    SIM_HANG_UP,     /* a client leaves: a is the request */
    SIM_TO_ROUTER,   /* bytes: a packed message; a: channel and worker << 8, b: its incarnation */
    SIM_WORKER_GONE, /* a: worker and, << 8, whether its death is certain; b: its incarnation */
    SIM_ROUTER_TICK, /* incarnation is the router's */
    /* for a worker: subject is its index */
    SIM_TO_WORKER,  /* bytes: a packed message; a: router's index, b: its incarnation */
    SIM_BEAT,       /* heartbeat and tick */
    SIM_GROUP_DONE, /* a is the layer group, b the step's number */
    SIM_STEP_DONE,  /* b is the step's number */
    SIM_CHECKED,    /* a: index of the check */
    SIM_TRANSFER,   /* bytes: a pd_transfer_event, cut after its notice */
    SIM_PEER_DEAD,  /* a: incarnation of a peer: none of its bytes land here any more */
    SIM_WORKER_LAST = SIM_PEER_DEAD,
    /* the world's own */
    SIM_LANDED, /* bytes: a parcel, puts and their notice at the receiver */
    SIM_START,  /* a worker has loaded its model */
    SIM_ROUTER_START,
    SIM_ROUTER_LEAVE, /* a: 0 the grace is over, 1 the process ends */
    SIM_FAULT_EVENT,  /* a: sim_fault; b: 0, or 1 + the request, worker or router that it is for */
} sim_kind;

typedef struct sim_event {
    uint64_t at_ns;
    uint64_t first_ns, order; /* 0: set when it is put in */
    sim_kind kind;
    uint32_t subject;     /* worker or router */
    uint64_t incarnation; /* of whom it is for: nothing happens when that has died */
    uint64_t a, b;
    void *bytes; /* pd_malloc'ed, the event's */
    size_t bytes_len;
} sim_event;

typedef struct sim_events {
    sim_event *heap;
    size_t count, size;
    uint64_t order_next;
} sim_events;

/* Takes event->bytes in any case. PD_E_NOMEM, PD_E_OVERLOAD (SIM_EVENTS_MAX wait). */
#define SIM_EVENTS_MAX (1u << 20)
PD_CHECKED pd_status sim_events_push(sim_events *events, sim_event event);
/* The next one, its bytes now the caller's. False when there is none. */
bool sim_events_pop(sim_events *events, sim_event *event_out);
void sim_events_fini(sim_events *events);
