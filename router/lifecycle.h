#pragma once

/* router/lifecycle.h - the states of a request, what moves it from one to the next, and nothing
 * else: the table of docs/lifecycle.md as data.
 *
 * A pair (state, event) that is not in the table cannot happen: whoever meets it has a bug, and the
 * process says so. Every transition taken is counted, so that a simulation can print which rows it
 * has never seen. Pure; any thread, the counts belong to whoever passes them. */

#include <stdint.h>

typedef enum router_request_state {
    ROUTER_REQUEST_NONE, /* not there yet, or ended */
    ROUTER_REQUEST_QUEUED,
    ROUTER_REQUEST_LEASING,
    ROUTER_REQUEST_PREFILLING,
    ROUTER_REQUEST_LANDING,
    ROUTER_REQUEST_DECODING,
    ROUTER_REQUEST_SUSPENDED,
    ROUTER_REQUEST_MOVING,
    ROUTER_REQUEST_CLOSING,
    ROUTER_REQUEST_STATES,
} router_request_state;

typedef enum router_event {
    ROUTER_EVENT_ARRIVED,
    ROUTER_EVENT_PLACED,       /* a prefill and a decode worker are chosen */
    ROUTER_EVENT_PLACED_ALONE, /* one token is left to answer: no decode worker is needed */
    ROUTER_EVENT_PROMISED,     /* the decode worker has promised its blocks */
    ROUTER_EVENT_REFUSED,      /* a worker has no room now */
    ROUTER_EVENT_FIRST_TOKEN,  /* the prefill worker's */
    ROUTER_EVENT_LANDED,       /* said, or proved by a token of the decode worker */
    ROUTER_EVENT_SUSPENDED,    /* the decode worker has no room for its next block */
    ROUTER_EVENT_MOVES,        /* with its KV, to another decode worker */
    ROUTER_EVENT_MOVE_FAILED,
    ROUTER_EVENT_MOVED,
    ROUTER_EVENT_GIVES_WAY, /* computed again later, elsewhere or here */
    ROUTER_EVENT_LAST_TOKEN,
    ROUTER_EVENT_RETRIED, /* a worker was lost, failed or was silent: another attempt */
    ROUTER_EVENT_FINISHED,
    ROUTER_EVENT_FAILED,
    ROUTER_EVENT_CANCELLED, /* by the client, or by a stop string */
    ROUTER_EVENTS,
} router_event;

typedef struct router_transition {
    router_request_state from;
    router_event event;
    router_request_state to;
    const char *action;   /* what is done, as the document says it */
    const char *deadline; /* of the next state */
} router_transition;

/* More than there are rows. */
#define ROUTER_TRANSITIONS_MAX 64

const char *router_request_state_name(router_request_state state);
const char *router_event_name(router_event event);
/* The table; rows in the document's order. */
const router_transition *router_lifecycle_table(uint32_t *count_out);
/* The state after event, counted in counts[its row]. Asserts that there is such a row. */
router_request_state router_lifecycle_next(uint64_t *counts, router_request_state state,
                                           router_event event);
