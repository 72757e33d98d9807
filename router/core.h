#pragma once

/* router/core.h - everything the router decides, without I/O and without a clock.
 *
 * The core owns the cluster as this router sees it, the prefix index, the policy and every
 * request's state machine. Events come in with the time (nanoseconds of any monotonic clock);
 * what is to be done goes out through the sink, during the call. The same object is driven by
 * router/main.c and by the simulator: same seed and same events give the same actions.
 *
 * A request ends exactly once: by sink->finish, by sink->error, or by the caller's
 * router_core_cancel, after which the sink hears no more of it. All memory is bounded by the
 * limits in the configuration. One thread. */

#include "common/config/deployment.h"
#include "common/cost/cost.h"
#include "common/wire/messages.h"

typedef struct router_core router_core;
/* A request: the number in its key; never 0. The low ROUTER_HANDLE_SLOT_BITS bits are unique among
 * the requests in flight and below requests_max, for tables beside the core's own. */
typedef uint64_t router_handle;
#define ROUTER_HANDLE_SLOT_BITS 16

#define ROUTER_WORKERS_MAX   512 /* registered at once */
#define ROUTER_MESSAGE_BYTES 320

typedef struct router_core_config {
    /* What a worker must match. The layout fingerprint may be 0: the first worker accepted sets
     * it. Strings are borrowed and must outlive the core. */
    const char *model;
    pd_hash128 model_fingerprint;
    uint64_t layout_fingerprint;
    const char *layout; /* in words, for the error when it differs; NULL with fingerprint 0 */
    uint32_t block_tokens;
    uint64_t block_bytes; /* of KV a block over all layers: the price of shipping */
    uint32_t context_max; /* prompt and answer together, tokens */
    uint32_t vocab;       /* a token of a worker at or over it is a failure; 0: unchecked */

    pd_router_policy policy;
    pd_cost cost; /* where the time model starts; refitted from what workers report */

    uint32_t requests_max; /* in flight, queued ones included; at most 65535 */
    uint32_t queue_max;    /* waiting for a worker */

    uint64_t queue_ns, lease_ns, prefill_ns, transfer_ns, decode_idle_ns, total_ns;
    uint64_t heartbeat_ns, lost_after_ns;
} router_core_config;

/* The same from a checked deployment; model, fingerprints and block_bytes are the caller's. */
void router_core_config_of(const pd_deployment *deployment, router_core_config *config_out);

/* A checked request. Everything is copied. */
typedef struct router_request_in {
    char id[PD_REQUEST_ID_BYTES];
    const uint32_t *tokens;   /* the prompt */
    uint32_t tokens_count;    /* at least 1; tokens_count + max_tokens <= context_max */
    const pd_hash128 *hashes; /* of the prompt's full blocks */
    uint32_t hashes_count;
    pd_sampling sampling;
    const uint32_t *end_tokens; /* empty with ignore_eos; at most ROUTER_END_TOKENS_MAX */
    uint32_t end_tokens_count;
    uint32_t max_tokens;  /* at least 1 */
    pd_hash128 hash_root; /* of the hashes' chain, which goes on over the answer */
    int32_t priority;     /* higher goes first */
} router_request_in;
#define ROUTER_END_TOKENS_MAX 32

typedef struct router_finish {
    pd_finish reason; /* PD_FINISH_STOP: the last token was an end token */
    uint32_t prompt_tokens, completion_tokens;
    uint32_t cached_tokens; /* of the prompt, not computed again */
    uint64_t queued_ns;     /* arrival to lease asked, the sum over attempts */
    uint64_t first_ns;      /* arrival to the first token */
    uint64_t total_ns;
} router_finish;

typedef struct router_error {
    int http_status;        /* 400, 429, 503, 504 */
    const char *type;       /* OpenAI's: "invalid_request_error", "server_error", ... (literals) */
    const char *code;       /* "overloaded", "worker_lost", ... */
    uint32_t retry_after_s; /* 0: no Retry-After */
    char message[ROUTER_MESSAGE_BYTES];
} router_error;

/* Actions. The pointers live for the call only. A sink function must not call back into the core,
 * except that router_core_cancel may be called for any request (also the one it is told about). */
typedef struct router_sink {
    void *ctx;
    /* To a worker's identity, as a message came from it. False: not taken (its queue is full or
     * it is gone); the core repeats what must not be lost, deadlines catch the rest. */
    bool (*send)(void *ctx, const char *to, const pd_message *message);
    /* Tokens of an answer, each index once, in order from 0. finish is set at the last one, which
     * router->finish follows. An end token is delivered too (finish PD_FINISH_STOP). */
    void (*token)(void *ctx, router_handle request, uint32_t index, uint32_t token,
                  pd_finish finish);
    void (*finish)(void *ctx, router_handle request, const router_finish *finish);
    void (*error)(void *ctx, router_handle request, const router_error *error);
} router_sink;

/* incarnation: this router's, in every key; seed: of the policy's random choices.
 * Errors: PD_E_INVALID (a limit is 0 or too large), PD_E_NOMEM. */
PD_CHECKED pd_status router_core_create(const router_core_config *config, uint64_t incarnation,
                                        uint64_t seed, const router_sink *sink, uint64_t now_ns,
                                        router_core **core_out);
void router_core_destroy(router_core *core); /* requests in it end without a word */

/* Takes a request in; PD_OK: *handle_out names it from now on and the sink hears its end. Its
 * first actions come from here, after *handle_out was written. Otherwise *error_out says what to
 * answer. Errors: PD_E_OVERLOAD (queue or table full), PD_E_TOO_LARGE (context), PD_E_NOMEM. */
PD_CHECKED pd_status router_core_on_request(router_core *core, const router_request_in *request,
                                            uint64_t now_ns, router_handle *handle_out,
                                            router_error *error_out);

/* The caller is done with a request: its client went away, or a stop string ended the answer.
 * Cancelled at every worker that knows it. Unknown handles are fine. */
void router_core_cancel(router_core *core, router_handle request, uint64_t now_ns);

/* A message from a worker. from: the identity it came from; NULL on the token and event channels,
 * whose messages name their sender. */
void router_core_on_message(router_core *core, const char *from, const pd_message *message,
                            uint64_t now_ns);

/* The process of that incarnation has ended, for certain: it is given up as soon as what it said
 * last can have been read (10 ms). Unknown ones are fine. */
void router_core_on_worker_dead(router_core *core, uint64_t incarnation, uint64_t now_ns);
/* The connection of that identity has ended, which is how a death on another host shows first, but
 * a link that flaps too: without a heartbeat within two intervals it is given up. A hint: it proves
 * nothing about what may still be written. */
void router_core_on_worker_cut(router_core *core, const char *from, uint64_t now_ns);

/* Deadlines, heartbeats, lost workers. Call at router_core_next_due, or later. */
void router_core_on_tick(router_core *core, uint64_t now_ns);
uint64_t router_core_next_due(const router_core *core); /* never UINT64_MAX */

/* No new work is taken: every router_core_on_request is refused with 503, and what waits for a
 * worker ends so when all of them are leaving too. */
void router_core_stop(router_core *core);
/* The grace is over: whatever is left ends with an error. */
void router_core_end_all(router_core *core);

/* ---- looking in: for /ready, /workers, /metrics and tests ---- */

/* That incarnation is registered. */
bool router_core_has_worker(const router_core *core, uint64_t incarnation);

typedef struct router_ready {
    uint32_t prefill, decode; /* warm and not draining */
    uint32_t links;           /* usable (prefill, decode) pairs */
} router_ready;
router_ready router_core_ready(const router_core *core);

typedef struct router_worker_view {
    const char *name, *backend, *transfer;
    pd_role role;
    const char *state; /* "starting", "ready", "draining" */
    uint64_t incarnation;
    int64_t pid;
    const int64_t *rank_pids; /* [rank_pids_count], of tensor-parallel ranks 1 .. */
    uint32_t rank_pids_count;
    const pd_msg_placement *placement;
    const pd_msg_placement *rank_placements; /* [rank_pids_count]; NULL: not told */
    pd_ledger ledger;
    float queue_ms;
    uint32_t running, waiting, inflight; /* inflight: of this router */
    uint32_t index_blocks;               /* that the index knows there */
    bool index_synced;
    uint64_t heartbeat_age_ns;
    pd_worker_counts counts; /* its own, since its incarnation began */
    char lanes[128];         /* "decode-0=posix+cma decode-1=tcp" */
} router_worker_view;
/* Calls fn for every registered worker, ordered by name. */
void router_core_each_worker(const router_core *core, uint64_t now_ns,
                             void (*fn)(void *ctx, const router_worker_view *view), void *ctx);

/* Why an attempt was made again elsewhere. */
typedef enum router_retry_reason {
    ROUTER_RETRY_LOST,        /* the worker is gone */
    ROUTER_RETRY_FAILED,      /* it said that it failed */
    ROUTER_RETRY_SILENT,      /* a deadline passed */
    ROUTER_RETRY_UNREACHABLE, /* it takes no messages */
    ROUTER_RETRY_SEAL,        /* blocks were wrong twice */
    ROUTER_RETRY_SESSION,     /* it began anew with this router */
    ROUTER_RETRY_MISSING,     /* an audit found it gone */
    ROUTER_RETRY_PEER,        /* a decode worker takes the prefill worker for dead */
    ROUTER_RETRY_REASONS,
} router_retry_reason;
const char *router_retry_reason_name(router_retry_reason reason); /* "lost", ... */

typedef struct router_core_counters {
    uint64_t accepted, finished, failed, cancelled, refused_overload;
    uint64_t retried, retries[ROUTER_RETRY_REASONS]; /* the sum, and by reason */
    uint64_t resumed;                                /* retries of answers that had begun */
    uint64_t budget_exhausted;                       /* not tried again: too many were lately */
    uint64_t suspects; /* not tried again: two workers died computing it */
    uint64_t suspended, gave_way, moves, moves_failed;
    uint64_t pulls, pulls_failed;
    /* differences that two audits in a row agreed on */
    uint64_t audit_unknown, audit_missing, audit_unstarted, audit_waits, audit_quarantined;
    uint64_t leases_refused, workers_registered, workers_refused, workers_lost;
    uint64_t tokens, tokens_dropped; /* dropped: duplicates, old epochs, other incarnations */
    uint64_t prompt_tokens, cached_tokens;
    uint64_t shipped_bytes; /* KV that workers wrote to others while they were registered here */
    uint64_t refetches;     /* blocks that came wrong or not at all, asked for again */
    uint64_t seal_failures; /* and were not right then either */
    uint64_t index_gaps;
    uint32_t queued, active; /* now */
} router_core_counters;
router_core_counters router_core_counters_of(const router_core *core);

/* How often each row of router/lifecycle.h's table was taken, in its order. */
const uint64_t *router_core_transitions(const router_core *core, uint32_t *count_out);

/* Whom quarantined blocks wait for: it may still write into them. */
typedef enum router_wait_state {
    ROUTER_WAIT_LIVES,   /* registered here: its last word, or its end, is to come */
    ROUTER_WAIT_GONE,    /* given up here; it may stand still and go on one day */
    ROUTER_WAIT_UNKNOWN, /* never registered here, or so long ago that it is forgotten */
} router_wait_state;
typedef struct router_audit_wait {
    uint64_t incarnation;
    router_wait_state state;
    const char *name; /* NULL: unknown */
} router_audit_wait;

/* What a worker said last that it holds for this router, beside what the router counts on. */
#define ROUTER_AUDIT_STATES      12 /* by pd_audit_state */
#define ROUTER_AUDIT_MISSING_MAX 32
#define ROUTER_AUDIT_WAITS_MAX   32
typedef struct router_audit_view {
    const char *name;
    pd_role role;
    uint64_t incarnation;
    bool answered; /* in its present session; false: all below is empty, and says nothing */
    uint64_t age_ns;
    pd_ledger ledger;
    uint32_t states[ROUTER_AUDIT_STATES];
    uint32_t expected_prefill, expected_decode; /* requests that were there when it was asked */
    const pd_audit_entry *unknown;              /* held there, unknown here */
    uint32_t unknown_count;
    uint64_t missing[ROUTER_AUDIT_MISSING_MAX]; /* numbers of requests counted on, not there */
    uint32_t missing_count;
    router_audit_wait waits[ROUTER_AUDIT_WAITS_MAX]; /* those who do not live first */
    uint32_t waits_count;                            /* in waits */
    uint32_t gone_count;                             /* of these, not ROUTER_WAIT_LIVES */
} router_audit_view;
/* Calls fn for every registered worker, ordered by name. */
void router_core_each_audit(const router_core *core, uint64_t now_ns,
                            void (*fn)(void *ctx, const router_audit_view *view), void *ctx);
/* How many cached prompt tokens a running request has, as far as known; for usage when a stop
 * string ends it. 0 for unknown handles. */
uint32_t router_core_cached_tokens(const router_core *core, router_handle request);
