#pragma once

/* router/request_table.h - the requests of a router: their table, the queue of those that wait, and
 * what their workers are charged with.
 *
 * The inside of router/request.h: only that file, which moves requests from state to state, and
 * this one see it. Bounded by requests_max, allocated once. One thread. */

#include "router/request.h"

enum {
    ROUTER_EARLY_MAX = 32,      /* tokens that may wait for one before them */
    ROUTER_BLOCKED_MS_MIN = 5,  /* a worker that refused is left alone for this long at least, */
    ROUTER_BLOCKED_MS_MAX = 500 /* and this long at most, whatever it says */
};
#define ROUTER_SLOT_NONE UINT32_MAX

typedef enum router_request_state {
    ROUTER_REQUEST_FREE,
    ROUTER_REQUEST_QUEUED,
    ROUTER_REQUEST_LEASING,
    ROUTER_REQUEST_PREFILLING,
    ROUTER_REQUEST_LANDING,
    ROUTER_REQUEST_DECODING,
    ROUTER_REQUEST_CLOSING,
} router_request_state;

typedef struct router_early_token {
    uint32_t index, token;
    pd_finish finish;
} router_early_token;

typedef struct router_request {
    router_request_state state;
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    uint32_t *tokens; /* [prompt_tokens + 1]: the prompt, then the first token of the answer */
    pd_hash128 *hashes;
    uint32_t prompt_tokens, hashes_count, max_tokens;
    pd_sampling sampling;
    uint32_t end_tokens[ROUTER_END_TOKENS_MAX];
    uint32_t end_tokens_count;

    uint32_t prefill, decode; /* slots, ROUTER_NO_WORKER when there is none */
    bool prefill_open;        /* it has the request and has not said its last word */
    bool prefill_holds;       /* copies of what it ships, until it is told to let them go */
    bool started;             /* its first step runs, or has run */
    bool landed;              /* the decode worker has all of it */
    uint32_t again;           /* ShipAgain sent in this attempt */
    bool decode_open;         /* it has a lease or a sequence of ours */
    bool writer_lost;         /* nobody says that the prefill worker's writes have ended */
    double charged_ms;        /* on the prefill worker's queue; 0 when taken off */
    bool charged_prefill, charged_decode;
    router_terms terms; /* of the last choice */

    uint32_t next_index; /* of the answer */
    uint32_t early_count;
    router_early_token early[ROUTER_EARLY_MAX];
    pd_finish reason;
    uint32_t cached_tokens;

    uint32_t retries;
    uint32_t peer_refusals; /* leases refused because the prefill worker is gone */
    uint32_t avoid_prefill, avoid_decode;
    uint64_t too_small[ROUTER_WORKERS_MAX / 64];

    uint64_t arrived_ns, placed_ns, first_ns, queue_due_ns, due_ns, total_due_ns;
    uint64_t queued_ns;
    uint32_t queue_prev, queue_next; /* slots; ROUTER_SLOT_NONE at the ends */
} router_request;

struct router_requests {
    router_requests_options o;
    router_policy_state policy;
    pd_cost cost;
    uint64_t counter;
    uint32_t queue_head, queue_tail, queue_count;
    uint32_t free_head; /* through queue_next */
    uint32_t slots_used;
    uint64_t due_ns;  /* no deadline is earlier; may itself be too early */
    uint64_t wake_ns; /* a blocked worker may be asked again */
    router_request slots[];
};

/* Its index in the table. */
uint32_t router_request_slot(const router_requests *t, const router_request *r);
/* NULL when the handle names nothing any more. */
router_request *router_request_find(const router_requests *t, router_handle handle);
/* The request a worker's message is about, if it is about the current attempt; else NULL. */
router_request *router_request_find_key(router_requests *t, const pd_request_key *key);
/* A fresh request with a key and epoch 1, not queued; NULL when the table is full. */
router_request *router_request_take(router_requests *t);
/* Into the queue by arrival: one that was placed and refused goes back to where it was. */
void router_request_enqueue(router_requests *t, router_request *r);
/* Out of the queue, in which it is. */
void router_request_dequeue(router_requests *t, router_request *r);
/* Its next deadline: due_ns, or the one of the whole if that is earlier. */
void router_request_set_due(router_requests *t, router_request *r, uint64_t due_ns);
/* The worker in that slot of the cluster. */
router_worker *router_request_worker(router_requests *t, uint32_t slot);
/* Work just sent counts at once, on the worker it was sent to, and is taken off once. */
void router_request_charge_prefill(router_requests *t, router_request *r);
void router_request_discharge_prefill(router_requests *t, router_request *r);
void router_request_charge_decode(router_requests *t, router_request *r);
void router_request_discharge_decode(router_requests *t, router_request *r);
/* Cancels at the workers that have it. A prefill worker that was never asked, or has said its last
 * word, writes nothing more: the decode worker is told, since no abort will come to it. One that
 * was lost may only stand still, and write on later: whether it is dead the decode worker finds
 * out. */
void router_request_cancel_at_workers(router_requests *t, const router_request *r);
/* Nobody works on the request afterwards. */
void router_request_leave_workers(router_requests *t, router_request *r);
/* A worker that refused is left alone for about ms. */
void router_request_block_worker(router_requests *t, uint32_t slot, uint64_t ms, uint64_t now_ns);
/* The slot is free: out of the queue, cancelled everywhere, its memory given back. */
void router_request_release(router_requests *t, router_request *r);
