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

#define PD_WIRE_VERSION      1
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
    char backend[32];  /* "cpu-avx512" */
    char transfer[32]; /* "ucx/shm" */
    const void *transfer_address;
    size_t transfer_address_len;
    int64_t pid;
    uint64_t host; /* where pid means something (host and pid namespace); 0: unknown */
} pd_msg_hello;

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
    /* Its link was cut after it had begun to write: what a socket holds may still land, and the
     * decode worker has had no last word. False with every other end, whatever its status. */
    bool may_land;
} pd_msg_prefill_done;

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
    char prefill[PD_NAME_BYTES]; /* who will write */
    uint64_t prefill_incarnation;
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
    uint32_t held_blocks;   /* of the prompt, at the decode worker: not shipped */
    const pd_block *blocks; /* where blocks held_blocks .. go, in the decode worker's pool */
    uint32_t blocks_count;
    uint32_t deadline_ms; /* from receipt; 0: none */
} pd_msg_prefill_request;

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
    uint32_t landing_ms; /* blocks not landed by then: failed */
} pd_msg_decode_start;

/* To whoever works on the request. Idempotent; an unknown key is no error. A prefill worker always
 * answers with pd_msg_prefill_done if it had the request; a decode worker frees or quarantines. */
typedef struct pd_msg_cancel {
    pd_request_key key;
    /* To a decode worker: nobody writes into what was leased for this key any more. No prefill
     * worker was ever asked for it, or it has answered with pd_msg_prefill_done without may_land:
     * there is no last word to wait for. */
    bool unwritten;
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
    };
} pd_message;

/* Packs a message. buf is cleared first. Errors: PD_E_TOO_LARGE, PD_E_NOMEM. */
struct pd_buf;
PD_CHECKED pd_status pd_message_pack(const pd_message *message, struct pd_buf *buf);

/* Unpacks and checks outside bytes: version, kinds, lengths, enums, names (printable, not empty),
 * finite numbers. On PD_OK *message_out points into *hold_out, freed by pd_message_hold_free.
 * Errors: PD_E_INVALID (reason in *reason_out, a literal), PD_E_NOMEM. */
typedef struct pd_message_hold pd_message_hold;
PD_CHECKED pd_status pd_message_unpack(const void *bytes, size_t len, pd_message *message_out,
                                       pd_message_hold **hold_out, const char **reason_out);
void pd_message_hold_free(pd_message_hold *hold);
