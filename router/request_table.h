#pragma once

/* router/request_table.h - the requests of a router: their table, the queue of those that wait,
 * their tokens, and what their workers are charged with.
 *
 * The inside of router/request.h: only the files that move requests from state to state (request,
 * retry, move, pull, audit) and this one see it. Bounded by requests_max, allocated once; tokens
 * and hashes by the context. One thread. */

#include "router/lifecycle.h"
#include "router/request.h"

enum {
    ROUTER_EARLY_MAX = 32,       /* tokens that may wait for one before them */
    ROUTER_BEGUN_TOKENS = 8,     /* of an attempt: with fewer it had only begun */
    ROUTER_ABSOLVED_TOKENS = 64, /* of an attempt: of an earlier death its request is cleared */
    ROUTER_BLOCKED_MS_MIN = 5,   /* a worker that refused is left alone for this long at least, */
    ROUTER_BLOCKED_MS_MAX = 500, /* and this long at most, whatever it says */
    ROUTER_AGAIN_MAX = 32,       /* ranges of blocks asked for again of one shipment */
    ROUTER_LEFT_PULLS_MAX = 256,
    ROUTER_DEATHS_MAX = 2,       /* workers that a request may bring down */
    ROUTER_ALONE_DEATHS_MAX = 4, /* in all its life, whatever it made in between */
    ROUTER_EXPLAINED_MAX = 64,
    ROUTER_LEFT_MAX = 4, /* workers left of late that are remembered */
};
#define ROUTER_SLOT_NONE UINT32_MAX
#define ROUTER_SLOT_BITS (ROUTER_WORKERS_MAX / 64)

typedef struct router_early_token {
    uint32_t index, token;
    pd_finish finish;
} router_early_token;

/* What was asked for again of one shipment: each block once, and not without end. */
typedef struct router_again {
    uint32_t count; /* ShipAgain sent */
    struct {
        uint32_t group, first, count;
    } asked[ROUTER_AGAIN_MAX];
} router_again;

/* Leading blocks that the prefill worker fetches from a worker that holds them. */
typedef struct router_pull {
    uint32_t slot; /* who holds them; ROUTER_NO_WORKER: there is no pull */
    uint32_t blocks;
    double ms;     /* predicted, in place of computing them */
    bool asked;    /* ShipRequest is sent */
    bool open;     /* its last word has not come */
    bool holds;    /* copies there, until Release */
    bool may_land; /* its last word has come, and bytes may still land */
    router_again again;
} router_pull;

/* A pull whose request went on or ended before the source's last word: whom that word is for. */
typedef struct router_left_pull {
    pd_request_key key;        /* number 0: unused */
    uint64_t source, receiver; /* incarnations */
    bool may_land;             /* the last word did not say that nothing lands any more */
    uint32_t again;            /* ShipAgain sent: a last word has seen them all */
} router_left_pull;

/* To another decode worker, with the KV: request.decode and key stay the old ones until the new
 * one has it all. */
typedef struct router_move {
    uint32_t slot;  /* where to; ROUTER_NO_WORKER: there is none */
    uint32_t epoch; /* of the key there */
    uint64_t sent_ns;
    bool asked;    /* ShipRequest is sent: it writes until its last word */
    bool open;     /* the last word has not come */
    bool may_land; /* it has, and bytes may still land */
    router_again again;
    uint32_t failed; /* moves of this suspension */
    uint64_t tried[ROUTER_SLOT_BITS];
} router_move;

/* Whether a worker that dies may have died of a request. */
typedef enum router_presence {
    ROUTER_ABSENT,
    ROUTER_MAY_COMPUTE, /* it was there, and that its step had begun nobody has said */
    ROUTER_COMPUTES,
} router_presence;

/* How long one that may bring workers down waits for a worker without another such one. */
typedef enum router_distance {
    ROUTER_DISTANCE_IF_ROOM, /* not at all */
    ROUTER_DISTANCE_TURN,    /* lost_after */
    ROUTER_DISTANCE_ALWAYS,  /* as long as it takes */
} router_distance;

/* A worker that computed a request until it was given up there. */
typedef struct router_left {
    uint64_t incarnation; /* 0: none */
    uint64_t left_ns;
    uint32_t epoch;
    router_presence presence;
} router_left;

/* An incarnation whose death, until then, is that of a request that was convicted. */
typedef struct router_explained {
    uint64_t incarnation, until_ns;
} router_explained;

typedef struct router_request {
    router_request_state state;
    pd_request_key key;
    uint32_t epoch_last; /* given out */
    char id[PD_REQUEST_ID_BYTES];
    uint32_t *tokens; /* [tokens_size]: the prompt, then the answer so far */
    uint32_t tokens_size;
    pd_hash128 *hashes; /* [hashes_count] of the full blocks; the chain goes on over the answer */
    uint32_t hashes_count, hashes_size;
    pd_hash128 hash_root;
    uint32_t prompt_tokens, max_tokens;
    int32_t priority;
    pd_sampling sampling;
    uint32_t end_tokens[ROUTER_END_TOKENS_MAX];
    uint32_t end_tokens_count;

    uint32_t prefill, decode; /* slots, ROUTER_NO_WORKER when there is none */
    bool prefill_open;        /* it has the request and has not said its last word */
    bool prefill_holds;       /* copies of what it ships, until it is told to let them go */
    bool started;             /* its first step runs, or has run */
    bool landed;              /* the decode worker has all of it */
    uint64_t landing_ns;      /* patience with its sender's silence, as the decode worker has it */
    router_again again;       /* of this attempt */
    bool decode_open;         /* it has a lease or a sequence of ours */
    bool writer_lost;         /* no word of the control plane ends the prefill worker's writes */
    uint64_t lease_sent_ns, prefill_sent_ns, start_sent_ns;
    double charged_ms; /* on the prefill worker's queue; 0 when taken off */
    bool charged_prefill, charged_decode;
    router_terms terms; /* of the last choice */
    router_pull pull;
    router_move move;
    pd_msg_suspended suspended;
    uint64_t suspended_ns;

    uint32_t next_index; /* of the answer */
    uint32_t base_index; /* what the prefill worker of this attempt samples; the decode worker's
                            come after it */
    uint32_t early_count;
    router_early_token early[ROUTER_EARLY_MAX];
    pd_finish reason;
    uint32_t cached_tokens;
    bool cached_known;

    uint32_t failures, failures_in_row; /* attempts that failed; without a new token in between */
    uint32_t gave_way;
    uint32_t refusals;                             /* of prefill workers without room, in a row */
    char killed[ROUTER_DEATHS_MAX][PD_NAME_BYTES]; /* workers that died computing it */
    uint64_t killed_at[ROUTER_DEATHS_MAX]; /* their incarnations; 0: that one lives after all */
    uint32_t killed_count;                 /* one: it is a suspect; see router_request_set_killed */
    uint64_t suspect_ns;                   /* since when it is a suspect, or a worker died again */
    router_distance distance;              /* that it keeps as a suspect */
    uint32_t deaths_alone;                 /* of workers with nobody else, in all its life */
    uint64_t alone_at[ROUTER_ALONE_DEATHS_MAX]; /* their incarnations; 0: none, or it lives */
    /* Who computed it when it was tried again for another's fault: they may be dead already, which
     * is heard of later. A ring. */
    router_left left[ROUTER_LEFT_MAX];
    uint32_t left_count;    /* ever */
    uint32_t peer_refusals; /* leases refused because the prefill worker is gone */
    uint32_t avoid_prefill, avoid_decode;
    uint64_t too_small[ROUTER_SLOT_BITS];

    uint64_t arrived_ns, placed_ns, first_ns, queue_due_ns, due_ns, total_due_ns;
    uint64_t not_before_ns; /* queued: backing off */
    uint64_t queued_ns;
    uint32_t queue_prev, queue_next; /* slots; ROUTER_SLOT_NONE at the ends */

    /* the audit's: what was seen in the report being read, and how often in a row it was not */
    uint32_t audit_seen;
    uint8_t missed_prefill, missed_decode, missed_move, unstarted;
} router_request;

struct router_requests {
    router_requests_options o;
    router_policy_state policy;
    pd_cost cost;
    uint64_t counter;
    uint64_t random; /* of backoffs */
    uint64_t transitions[ROUTER_TRANSITIONS_MAX];
    double budget; /* retries that may be made now */
    uint64_t budget_ns;
    router_left_pull left_pulls[ROUTER_LEFT_PULLS_MAX]; /* a ring */
    uint64_t left_pulls_count;                          /* ever */
    uint32_t suspects_at[ROUTER_WORKERS_MAX]; /* suspects that are, or are about to be, there */
    uint64_t pumped_ns; /* when the queue was tried last: now, within a heartbeat */
    uint64_t suspect_until_ns[ROUTER_WORKERS_MAX];    /* one may have left it dying, until then */
    uint64_t apart_until_ns[ROUTER_WORKERS_MAX];      /* the same of those that stay apart always */
    router_explained explained[ROUTER_EXPLAINED_MAX]; /* workers that convicted ones left: a ring */
    uint32_t explained_next;
    uint32_t queue_head, queue_tail, queue_count;
    uint32_t free_head; /* through queue_next */
    uint32_t slots_used;
    uint64_t due_ns;  /* no deadline is earlier; may itself be too early */
    uint64_t wake_ns; /* a blocked worker, or a request that backs off, may be tried again */
    router_request slots[];
};

/* Its index in the table. */
uint32_t router_request_slot(const router_requests *t, const router_request *r);
/* NULL when the handle names nothing any more. */
router_request *router_request_find(const router_requests *t, router_handle handle);
/* The request a worker's message is about, if it is about the current attempt; else NULL. */
router_request *router_request_find_key(router_requests *t, const pd_request_key *key);
/* The request of which this is the key where it moves to; else NULL. */
router_request *router_request_find_moving(router_requests *t, const pd_request_key *key);
/* A fresh request with a key and epoch 1, in state NONE; NULL when the table is full. */
router_request *router_request_take(router_requests *t);
/* Back to the table, never begun. */
void router_request_put_back(router_requests *t, router_request *r);
/* To the state that the table names. */
void router_request_step(router_requests *t, router_request *r, router_event event);
/* Into the queue by priority, then arrival: one that was placed and refused goes back to where it
 * was. */
void router_request_enqueue(router_requests *t, router_request *r);
/* Out of the queue, in which it is. */
void router_request_dequeue(router_requests *t, router_request *r);
/* Its next deadline: due_ns, or the one of the whole if that is earlier. */
void router_request_set_due(router_requests *t, router_request *r, uint64_t due_ns);
/* The table's wake_ns is not later than this. */
void router_request_wake_at(router_requests *t, uint64_t when_ns);

/* ---- tokens ---- */

/* False: a Refetch is not to be passed on, since some of it was asked for before or too much was;
 * the receiver will say that it failed. */
bool router_again_may(const router_again *again, const pd_msg_refetch *refetch);
/* It was passed on. */
void router_again_sent(router_again *again, const pd_msg_refetch *refetch);

/* What the prefill worker of this attempt is given: the prompt and the answer so far. */
uint32_t router_request_base_tokens(const router_request *r);
/* Tokens of the answer that may still come after those. */
uint32_t router_request_left(const router_request *r);
/* Copies what the request is made of. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status router_request_copy_in(router_request *r, const router_request_in *in);
/* Appends the answer's next token. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status router_request_keep_token(router_request *r, uint32_t token);
/* The hash chain covers the full blocks of the first count tokens. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status router_request_extend_hashes(const router_requests *t, router_request *r,
                                                  uint32_t count);

/* ---- workers ---- */

/* The worker in that slot of the cluster. */
router_worker *router_request_worker(router_requests *t, uint32_t slot);
bool router_request_send(router_requests *t, uint32_t slot, const pd_message *message);
/* A worker of that role, other than the one in slot, takes new work. */
bool router_request_another_ready(const router_requests *t, pd_role role, uint32_t slot);
/* Work just sent counts at once, on the worker it was sent to, and is taken off once. */
void router_request_charge_prefill(router_requests *t, router_request *r);
void router_request_discharge_prefill(router_requests *t, router_request *r);
void router_request_charge_decode(router_requests *t, router_request *r);
void router_request_discharge_decode(router_requests *t, router_request *r);
/* So many workers have died computing it: with one it is a suspect, and is counted as one at the
 * workers that it is charged to. */
void router_request_set_killed(router_requests *t, router_request *r, uint32_t count);
/* A suspect is there, or was a moment ago: it is no place for another one. */
bool router_request_suspect_at(const router_requests *t, uint32_t slot, uint64_t now_ns);
/* The suspect left that worker, which may die of it yet: it is no place for another one until then.
 */
void router_request_leave_suspect(router_requests *t, const router_request *r, uint32_t slot,
                                  uint64_t until_ns);
/* Sets the bits of the workers where one is, or was a moment ago, that keeps its distance for as
 * long as it takes: no place for another one even when its turn has ended. taken:
 * [ROUTER_SLOT_BITS], zeroed. */
void router_request_suspects_apart(const router_requests *t, uint64_t now_ns, uint64_t *taken);
/* Whether the worker in that slot computes it. Certainly: it has said so, or may have begun the
 * step behind all that was shipped. Perhaps: the word may have died with the worker, since the
 * prompt's turn had come as far as is known, its blocks are on their way, or it is the one that
 * ships them. What is known to wait in a queue, or to stand still, is absent. */
router_presence router_request_presence(const router_request *r, uint32_t slot, uint64_t now_ns);
/* Cancels at the workers that have it. A prefill worker that was never asked, or has ended before
 * it wrote, writes nothing: the decode worker is told, since no abort need come to it. What was
 * written ends with an abort on the data plane (docs/lifecycle.md). A worker that
 * was lost may only stand still, and write on later: whether it is dead the decode worker finds
 * out. keep: the decode worker's full blocks stay as cache. */
void router_request_cancel_at_workers(router_requests *t, const router_request *r, bool keep);
/* Nobody works on the request afterwards. */
void router_request_leave_workers(router_requests *t, router_request *r, bool keep);
/* DecodeStart to its decode worker; false: not taken. */
bool router_request_send_start(router_requests *t, router_request *r, uint64_t landing_ns,
                               uint64_t now_ns);
/* A worker that refused is left alone for about ms. */
void router_request_block_worker(router_requests *t, uint32_t slot, uint64_t ms, uint64_t now_ns);
/* The slot is free: out of the queue, cancelled everywhere, its memory given back. event: what ends
 * it. */
void router_request_release(router_requests *t, router_request *r, router_event event);
