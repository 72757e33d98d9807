#pragma once

/* common/wire/messages.h - what services say to each other, as plain C.
 *
 * messages.proto is the contract on the wire (and the fuller description of each message);
 * these structs are what the deciding modules take and give, so that they, and the simulator, need
 * no protobuf. Each kind has one sender and one handler. Pointers in a received message live until
 * its handler returns; in a sent one they are read before pd_bus_send returns.
 *
 * A request is named by (router's incarnation, number, epoch): the number is the router's counter,
 * the epoch counts attempts, so that nothing of an earlier attempt is believed. */

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/kv/layout.h"

#include <stddef.h>
#include <stdint.h>

#define PD_WIRE_VERSION      2
#define PD_NAME_BYTES        64 /* a worker's name, NUL included */
#define PD_REQUEST_ID_BYTES  64 /* "chatcmpl-..." or the client's x-request-id, NUL included */
#define PD_REASON_BYTES      192
#define PD_MESSAGE_BYTES_MAX (16u << 20)

typedef enum pd_role {
    PD_ROLE_PREFILL = 1,
    PD_ROLE_DECODE = 2,
} pd_role;
const char *pd_role_name(pd_role role); /* "prefill", "decode" */

typedef struct pd_request_key {
    uint64_t router; /* incarnation of the router that owns it */
    uint64_t number;
    uint32_t epoch;
} pd_request_key;

/* Who holds the blocks of a pool: total = free + cached + leased + running + quarantined. A shared
 * block counts once, by its strongest claim. */
typedef struct pd_ledger {
    uint32_t total, free, cached, leased, running, quarantined;
} pd_ledger;

/* A process that may write into somebody's pool, or that is to be written to. */
typedef struct pd_msg_peer {
    char name[PD_NAME_BYTES]; /* "": there is none */
    uint64_t incarnation;
    int64_t pid; /* on that host; 0: unknown */
    uint64_t host;
    uint64_t started; /* clock ticks since the host's boot, /proc/PID/stat's; 0: unknown */
    uint32_t session; /* as in pd_msg_hello */
    const void *transfer_address;
    size_t transfer_address_len;
} pd_msg_peer;

typedef struct pd_sampling {
    float temperature, top_p;
    uint32_t top_k; /* 0: off */
    uint64_t seed;
    uint32_t choice;
} pd_sampling;

typedef enum pd_finish {
    PD_FINISH_NONE = 0,
    PD_FINISH_STOP = 1,   /* an end token: it is the token of this entry */
    PD_FINISH_LENGTH = 2, /* max_tokens or the context's end */
} pd_finish;

/* ---- worker to router, control socket ---- */

#define PD_MSG_RANKS_MAX 63 /* of a worker, besides its first */

/* Where in its machine a worker runs: for people to read. */
typedef struct pd_msg_placement {
    char bus[32];      /* of its GPU; "": the host's cores compute */
    int32_t numa_node; /* -1: unknown */
    char nic[72];      /* "mlx5_0 (eth2)"; "": unknown */
    char nic_distance[24];
    char cpus[96];
    bool bound;       /* it runs on these alone */
    uint32_t threads; /* that compute there; 0: its GPU does, or not told */
    char pinned[96];  /* their CPUs, one each; "": they may run on any of cpus */
} pd_msg_placement;

typedef struct pd_msg_hello {
    uint32_t wire_version;
    char name[PD_NAME_BYTES]; /* "decode-0": unique in the cluster */
    pd_role role;
    uint32_t role_epoch;
    uint64_t incarnation;
    char model[PD_NAME_BYTES];
    pd_hash128 model_fingerprint;
    uint64_t layout_fingerprint;
    char layout[128]; /* in words, for the error when it differs */
    uint32_t block_tokens;
    uint32_t dp_rank;
    uint32_t context_max, max_batch, queue_max, blocks;
    char backend[64];  /* "cpu-avx512", "cuda NVIDIA H200" */
    char transfer[32]; /* "ucx/shm" */
    const void *transfer_address;
    size_t transfer_address_len;
    int64_t pid;
    uint64_t host;    /* where pid means something (host and pid namespace); 0: unknown */
    uint64_t started; /* as in pd_msg_peer */
    int64_t rank_pids[PD_MSG_RANKS_MAX]; /* of tensor-parallel ranks 1 .. */
    uint32_t rank_pids_count;
    pd_msg_placement placement;
    const pd_msg_placement *rank_placements; /* [rank_pids_count]; NULL: not told */
    /* Counts how often this incarnation began anew with this router. What it had of an earlier
     * session is dropped: the router ends or retries that at once. */
    uint32_t session;
    uint64_t clock_ns; /* the worker's monotonic clock when it said so; 0: not told */
} pd_msg_hello;

/* What a worker has counted since its incarnation began, for metrics. */
typedef struct pd_worker_counts {
    uint64_t shipped_bytes; /* of KV that it has written to others, for whatever came of it */
    uint64_t suspended;     /* sequences it had no room for, and of these */
    uint64_t moved;         /* those that went on elsewhere with their KV */
    uint64_t stalled;       /* sequences left out of a step for want of a block, each time */
    uint64_t spec_steps;    /* sequences' steps that brought draft tokens */
    uint64_t spec_drafted;  /* draft tokens in them */
    uint64_t spec_accepted; /* of these, those that the model says, too */
    uint32_t spec_method;   /* pd_spec_method */
} pd_worker_counts;

typedef struct pd_msg_heartbeat {
    uint64_t incarnation;
    uint32_t role_epoch;
    uint64_t step;             /* counts finished steps: stands still when the engine hangs */
    bool busy;                 /* a step is running */
    float queue_ms;            /* predicted milliseconds of work queued or running */
    uint32_t running, waiting; /* sequences */
    pd_ledger ledger;
    uint64_t events_sequence; /* of the last KV event sent */
    bool warm;                /* weights loaded, one forward run */
    bool draining;
    pd_worker_counts counts;
    uint64_t clock_ns; /* as in pd_msg_hello */
} pd_msg_heartbeat;

/* A prefill worker's data link to a decode worker came up or went down. */
typedef struct pd_msg_link {
    char peer[PD_NAME_BYTES];
    uint64_t peer_incarnation;
    bool up;
    char lane[64]; /* what carries the bytes, such as "posix+cma" */
    char reason[PD_REASON_BYTES];
} pd_msg_link;

typedef struct pd_msg_lease_reply {
    pd_request_key key;
    pd_status status;       /* PD_OK, PD_E_OVERLOAD, PD_E_TOO_LARGE (never fits) */
    bool bound;             /* false: a count is promised; held_blocks is a guess, no blocks */
    uint32_t held_blocks;   /* first blocks of the prompt that lie here already */
    const pd_block *blocks; /* landing blocks for the rest of the prompt, in order */
    uint32_t blocks_count;
    uint32_t retry_after_ms;
    char reason[PD_REASON_BYTES];
} pd_msg_lease_reply;

typedef struct pd_msg_prefill_done {
    pd_request_key key;
    pd_status status; /* PD_OK: all notices are sent; PD_E_CANCELLED: the last word on its blocks is
                         spoken; PD_E_PEER: the decode worker's link failed; ... */
    uint32_t cached_tokens, computed_tokens;
    float queue_ms, compute_ms;
    float ship_ms; /* on the wire: the sum over all writes, each from its first put to all landed,
                      also where it went on behind computing */
    uint64_t ship_bytes;
    char reason[PD_REASON_BYTES];
    /* It has written, and what it wrote may be on its way still, whatever the status: sent is not
     * landed. Its word on the data plane, which goes behind, ends that. False: it never wrote. */
    bool may_land;
    uint32_t again;         /* how many PD_MSG_SHIP_AGAIN of this key came before this word */
    uint64_t shipped_bytes; /* as in pd_worker_counts: the sum over all keys */
} pd_msg_prefill_done;

/* The first step of a prompt is about to run: its lease is to be bound. Said again until
 * PD_MSG_TARGETS comes. With pull_blocks it also says where pulled blocks are to be written: those
 * are the prompt's blocks pull_first .. */
typedef struct pd_msg_prefill_started {
    pd_request_key key;
    uint32_t pull_first;
    const pd_block *pull_blocks;
    uint32_t pull_blocks_count;
} pd_msg_prefill_started;

/* Everything that was to land is here and matches its seals. Said by whoever received. */
typedef struct pd_msg_landed {
    pd_request_key key;
    bool started; /* PD_MSG_DECODE_START has come */
} pd_msg_landed;

/* Of one key: a router passes on no more. */
#define PD_REFETCHES_MAX 32

/* These blocks of one layer group came wrong, or not at all: fetch them once more. */
typedef struct pd_msg_refetch {
    pd_request_key key;
    uint32_t group, first_block, count;
    char reason[PD_REASON_BYTES];
} pd_msg_refetch;

/* No room for this sequence's next block, and it was its turn to give way: it stands still with its
 * blocks until PD_MSG_SHIP_REQUEST moves it or PD_MSG_CANCEL ends it here. */
typedef struct pd_msg_suspended {
    pd_request_key key;
    uint32_t answered;  /* tokens of the answer, all sent */
    uint32_t kv_tokens; /* positions whose KV is there */
    uint32_t blocks;
} pd_msg_suspended;

/* The last word on a PD_MSG_SHIP_REQUEST; fields as in pd_msg_prefill_done. */
typedef struct pd_msg_ship_done {
    pd_request_key key;
    pd_status status;
    float ship_ms;
    uint64_t ship_bytes;
    char reason[PD_REASON_BYTES];
    bool may_land;
    uint32_t again;
    uint64_t shipped_bytes;
    uint64_t receiver; /* the incarnation that asked, of which alone this is said; 0: of any */
} pd_msg_ship_done;

typedef enum pd_audit_state {
    PD_AUDIT_WAITING = 1,   /* queued for prefill */
    PD_AUDIT_COMPUTING = 2, /* prefill */
    PD_AUDIT_HOLDING = 3,   /* a sender's copy, until PD_MSG_RELEASE */
    PD_AUDIT_PROMISED = 4,  /* a lease not bound yet */
    PD_AUDIT_LANDING = 5,
    PD_AUDIT_LANDED = 6, /* not started */
    PD_AUDIT_RUNNING = 7,
    PD_AUDIT_SUSPENDED = 8,
    PD_AUDIT_QUARANTINED = 9, /* waits for its sender's last word or death */
    PD_AUDIT_AWAITED = 10,    /* landing, and its answer is started */
    PD_AUDIT_STALLED = 11,    /* running, but not in the next step: no block for its next token, or
                                 no place */
} pd_audit_state;

typedef struct pd_audit_entry {
    pd_request_key key;
    pd_audit_state state;
    uint32_t blocks;
} pd_audit_entry;

/* All that a worker holds for the router that asked. */
typedef struct pd_msg_audit_reply {
    uint64_t incarnation;
    uint32_t serial; /* of the question */
    pd_ledger ledger;
    const pd_audit_entry *entries;
    uint32_t entries_count;
    const uint64_t *waits_for; /* incarnations whose end quarantined blocks wait for */
    uint32_t waits_for_count;
} pd_msg_audit_reply;

/* A decode worker cannot go on with a request (a seal did not match, blocks never came). */
typedef struct pd_msg_decode_failed {
    pd_request_key key;
    pd_status status;
    char reason[PD_REASON_BYTES];
} pd_msg_decode_failed;

typedef struct pd_msg_bye {
    uint64_t incarnation; /* leaves on purpose; nothing of it will come any more */
} pd_msg_bye;

/* ---- worker to router, token socket ---- */

typedef struct pd_step_token {
    pd_request_key key;
    uint32_t index; /* in the answer, from 0: tokens of two workers cannot change places */
    uint32_t token;
    pd_finish finish;
} pd_step_token;

/* All tokens of one step for one router. */
typedef struct pd_msg_step_tokens {
    char name[PD_NAME_BYTES];
    uint64_t incarnation;
    uint64_t step;
    float queue_ms;
    float step_ms;
    const pd_step_token *tokens;
    uint32_t tokens_count;
} pd_msg_step_tokens;

/* ---- worker to router, event socket ---- */

typedef enum pd_kv_event_kind {
    PD_KV_STORED = 1,
    PD_KV_REMOVED = 2,
    PD_KV_CLEARED = 3, /* everything is gone */
} pd_kv_event_kind;

typedef struct pd_kv_event {
    pd_kv_event_kind kind;
    pd_hash128 hash; /* of the block's whole prefix */
} pd_kv_event;

/* The events of one step; event i has number first_sequence + i. snapshot: the sender's whole cache
 * in "stored" events, in place of all that was known; the last of its messages has snapshot_last.
 */
typedef struct pd_msg_kv_events {
    char name[PD_NAME_BYTES];
    uint64_t incarnation;
    uint64_t first_sequence;
    const pd_kv_event *events;
    uint32_t events_count;
    bool snapshot_first, snapshot, snapshot_last;
} pd_msg_kv_events;

/* ---- router to worker, control socket ---- */

typedef struct pd_msg_welcome {
    uint64_t router;
    uint32_t heartbeat_ms, lost_after_ms;
    uint32_t session; /* of the hello that this answers: an older one is not believed */
} pd_msg_welcome;

typedef struct pd_msg_refused {
    char reason[PD_REASON_BYTES]; /* names both values; the worker logs it and exits */
    bool anew; /* this incarnation alone is refused: a new start of the worker may be taken */
} pd_msg_refused;

typedef struct pd_msg_router_heartbeat {
    uint64_t router;
} pd_msg_router_heartbeat;

/* To prefill workers: a decode worker to connect to. To decode workers: a prefill worker that may
 * write (no address). */
typedef struct pd_msg_peer_up {
    char name[PD_NAME_BYTES];
    pd_role role;
    uint64_t incarnation;
    const void *transfer_address;
    size_t transfer_address_len;
    int64_t pid; /* on that host; 0: unknown */
    uint64_t host;
    uint64_t started; /* as in pd_msg_peer */
} pd_msg_peer_up;

/* The router has given that incarnation up: silent, or replaced, or it left. It may be a process
 * that stands still and goes on one day: may_write says so. */
typedef struct pd_msg_peer_gone {
    char name[PD_NAME_BYTES];
    uint64_t incarnation;
    /* Not on the wire: the receiver knows that the process is still there, or that bytes of it may
     * still land; a worker's runtime says peer_dead later. */
    bool may_write;
} pd_msg_peer_gone;

typedef struct pd_msg_lease_request {
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    pd_msg_peer sender; /* who will write; no transfer address */
    bool bind;          /* at once: the sender has the KV already */
    int32_t priority;   /* higher is more important; 0 unless the client says */
    /* What lands: the prompt, and the answer so far when it was begun elsewhere. max_tokens: what
     * may still come after that. */
    uint32_t prompt_tokens, max_tokens;
    const pd_hash128 *hashes; /* of the prompt's full blocks */
    uint32_t hashes_count;
    uint32_t ttl_ms; /* the lease ends without renewal after this; every router heartbeat renews */
} pd_msg_lease_request;

typedef struct pd_msg_prefill_request {
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    const uint32_t *tokens;
    uint32_t tokens_count;
    const pd_hash128 *hashes; /* of the full blocks */
    uint32_t hashes_count;
    pd_sampling sampling;
    const uint32_t *end_tokens; /* the first token may end the answer; empty with ignore_eos */
    uint32_t end_tokens_count;
    uint32_t max_tokens;
    bool ship; /* false: max_tokens is 1, nothing leaves */
    char decode[PD_NAME_BYTES];
    uint64_t decode_incarnation;
    uint32_t deadline_ms; /* from receipt; 0: none */
    /* tokens[0 .. prompt_tokens - 1] is the prompt, the rest answer tokens 0 .. that the client has
     * already: the token sampled here is the next one. max_tokens is of the whole answer. */
    uint32_t prompt_tokens;
    int32_t priority;
    pd_msg_peer pull; /* holds pull_blocks leading blocks of tokens; 0: nothing to pull */
    uint32_t pull_blocks, pull_ms;
    uint32_t hold_ms; /* for shipping and holding copies, from its token on; 0: no deadline */
} pd_msg_prefill_request;

/* Binds what was promised; answered with a pd_msg_lease_reply that is bound. Idempotent. */
typedef struct pd_msg_bind {
    pd_request_key key;
} pd_msg_bind;

/* Where a prompt's blocks go. Idempotent. */
typedef struct pd_msg_targets {
    pd_request_key key;
    uint32_t held_blocks; /* leading ones that are there already: not shipped */
    const pd_block *blocks;
    uint32_t blocks_count;
} pd_msg_targets;

/* What this worker shipped has landed and was checked: its copies may go. */
typedef struct pd_msg_release {
    pd_request_key key;
} pd_msg_release;

/* Ship these once more. Always answered with another pd_msg_prefill_done (or pd_msg_ship_done). A
 * PD_MSG_SHIP_REQUEST ends when it is asked for blocks that it does not ship: with a group that
 * there is not, its receiver asks for the last word alone. */
typedef struct pd_msg_ship_again {
    pd_request_key key;
    uint32_t group, first_block, count;
    uint64_t receiver; /* the incarnation that waits for them; 0: not known */
} pd_msg_ship_again;

/* Write KV that this worker holds into another one's leased blocks. */
typedef struct pd_msg_ship_request {
    pd_request_key key; /* the receiver's: in every notice and seal */
    char id[PD_REQUEST_ID_BYTES];
    uint32_t source_epoch; /* the suspended sequence here (same router and number); 0: from the
                              prefix cache, by hashes */
    pd_msg_peer receiver;  /* with its transfer address */
    uint32_t first_block;  /* index in the sequence */
    const pd_block *blocks;
    uint32_t blocks_count;
    const pd_hash128 *hashes; /* [first_block + blocks_count], from the cache */
    uint32_t hashes_count;
    uint32_t kv_tokens; /* positions in all: the last block may be partial */
    uint32_t deadline_ms;
} pd_msg_ship_request;

/* A pull's source has said its last word, and not all has come. */
typedef struct pd_msg_pull_end {
    pd_request_key key;
    bool may_land;
    char reason[PD_REASON_BYTES];
} pd_msg_pull_end;

typedef struct pd_msg_audit {
    uint32_t serial;
} pd_msg_audit;

/* The answer goes on at the decode worker. May come before the last block has landed. */
typedef struct pd_msg_decode_start {
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    const uint32_t *tokens; /* the prompt, then the tokens answered so far (at least one) */
    uint32_t tokens_count;
    uint32_t prompt_tokens; /* of tokens_count; the rest are answer tokens 0 .. */
    pd_sampling sampling;
    const uint32_t *end_tokens; /* empty with ignore_eos */
    uint32_t end_tokens_count;
    uint32_t max_tokens; /* of the whole answer */
    uint32_t landing_ms; /* what has not landed when its sender was silent for so long (to whomever
                            it sends) has failed; 0: no deadline */
} pd_msg_decode_start;

/* To whoever works on the request. Idempotent; an unknown key is no error. A prefill worker always
 * answers with pd_msg_prefill_done if it had the request; a decode worker frees or quarantines. */
typedef struct pd_msg_cancel {
    pd_request_key key;
    /* To a decode worker: nobody writes into what was leased for this key any more. No prefill
     * worker was ever asked for it, or it has answered with pd_msg_prefill_done without may_land:
     * there is no last word to wait for. */
    bool unwritten;
    bool keep; /* its full blocks stay as cache */
    /* Not 0: all that is said is that this incarnation writes nothing for the key. Any router may
     * say so, also of another one's request. */
    uint64_t source;
} pd_msg_cancel;

typedef struct pd_msg_snapshot_request {
    uint64_t router;
} pd_msg_snapshot_request;

typedef enum pd_message_kind {
    PD_MSG_NONE,
    PD_MSG_HELLO,
    PD_MSG_HEARTBEAT,
    PD_MSG_LINK,
    PD_MSG_LEASE_REPLY,
    PD_MSG_PREFILL_DONE,
    PD_MSG_DECODE_FAILED,
    PD_MSG_BYE,
    PD_MSG_STEP_TOKENS,
    PD_MSG_KV_EVENTS,
    PD_MSG_WELCOME,
    PD_MSG_REFUSED,
    PD_MSG_ROUTER_HEARTBEAT,
    PD_MSG_PEER_UP,
    PD_MSG_PEER_GONE,
    PD_MSG_LEASE_REQUEST,
    PD_MSG_PREFILL_REQUEST,
    PD_MSG_DECODE_START,
    PD_MSG_CANCEL,
    PD_MSG_SNAPSHOT_REQUEST,
    PD_MSG_PREFILL_STARTED,
    PD_MSG_LANDED,
    PD_MSG_REFETCH,
    PD_MSG_SUSPENDED,
    PD_MSG_SHIP_DONE,
    PD_MSG_AUDIT_REPLY,
    PD_MSG_BIND,
    PD_MSG_TARGETS,
    PD_MSG_RELEASE,
    PD_MSG_SHIP_AGAIN,
    PD_MSG_SHIP_REQUEST,
    PD_MSG_PULL_END,
    PD_MSG_AUDIT,
    PD_MESSAGE_KINDS,
} pd_message_kind;
const char *pd_message_name(pd_message_kind kind);

typedef struct pd_message {
    pd_message_kind kind;
    union {
        pd_msg_hello hello;
        pd_msg_heartbeat heartbeat;
        pd_msg_link link;
        pd_msg_lease_reply lease_reply;
        pd_msg_prefill_done prefill_done;
        pd_msg_decode_failed decode_failed;
        pd_msg_bye bye;
        pd_msg_step_tokens step_tokens;
        pd_msg_kv_events kv_events;
        pd_msg_welcome welcome;
        pd_msg_refused refused;
        pd_msg_router_heartbeat router_heartbeat;
        pd_msg_peer_up peer_up;
        pd_msg_peer_gone peer_gone;
        pd_msg_lease_request lease_request;
        pd_msg_prefill_request prefill_request;
        pd_msg_decode_start decode_start;
        pd_msg_cancel cancel;
        pd_msg_snapshot_request snapshot_request;
        pd_msg_prefill_started prefill_started;
        pd_msg_landed landed;
        pd_msg_refetch refetch;
        pd_msg_suspended suspended;
        pd_msg_ship_done ship_done;
        pd_msg_audit_reply audit_reply;
        pd_msg_bind bind;
        pd_msg_targets targets;
        pd_msg_release release;
        pd_msg_ship_again ship_again;
        pd_msg_ship_request ship_request;
        pd_msg_pull_end pull_end;
        pd_msg_audit audit;
    };
} pd_message;

/* Packs a message. buf is cleared first. Errors: PD_E_TOO_LARGE, PD_E_NOMEM. */
struct pd_buf;
PD_CHECKED pd_status pd_message_pack(const pd_message *message, struct pd_buf *buf);
