#pragma once

/* tests/unit/router/fake.h - workers that do no work, on a virtual clock, for a router core.
 *
 * Messages travel packed, with random delays that keep each channel's order (control and tokens may
 * overtake each other, as in the real thing). Token i of an answer is a function of the prompt, so
 * that what arrives can be checked. Everything follows from the seed. */

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/wire/messages.h"
#include "router/core.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define FAKE_WORKERS_MAX 8
#define FAKE_LEASES_MAX  256
#define FAKE_BLOCK       16

typedef struct fake_lease {
    pd_request_key key;
    uint32_t blocks;
    uint32_t prompt_blocks, prompt_tokens;
    bool bound, decoding, landed, suspended;
    bool stalled;       /* no block for its next token */
    uint32_t refetched; /* how often a bad seal was seen */
    uint32_t prompt_first, next, max;
} fake_lease;

/* A prompt at a prefill worker, and then the copies of what it shipped; or what a decode worker
 * ships. */
typedef struct fake_prompt {
    pd_request_key key;
    uint32_t first, index, again; /* index: of the token that it samples */
    uint32_t pull_blocks;         /* that it waits for */
    bool ship, targets, computed, shipped;
    bool source; /* a ShipRequest's */
    uint32_t source_epoch;
} fake_prompt;

typedef struct fake_worker {
    bool alive, mute; /* mute: sends nothing any more (hung) */
    bool hangs;       /* its engine: a step is under way and does not end */
    bool deaf;        /* beats, but does nothing it is asked for */
    char name[PD_NAME_BYTES], identity[96];
    pd_role role;
    uint64_t incarnation;
    uint64_t refuses; /* decode: takes that prefill incarnation for dead; 0: none */
    uint32_t blocks, free;
    uint64_t last_ns[2]; /* per channel: when its newest message arrives */
    uint64_t inbox_ns;
    uint64_t sequence;
    uint32_t session;
    float queue_ms;            /* that its heartbeats tell */
    uint32_t running, waiting; /* so do they */
    pd_ledger ledger;          /* told instead of its own, unless its total is 0 */
    uint32_t prefills;         /* requests here */
    fake_prompt prompts[FAKE_LEASES_MAX];
    fake_lease leases[FAKE_LEASES_MAX];
    uint32_t snapshots, peers_up, peers_gone, welcomed, refused, cancels, unwritten, kept;
    uint32_t pulled, pull_ends;      /* prefill */
    uint64_t unwritten_by;           /* that the last cancel named */
    pd_request_key quarantined;      /* number 0: nothing is */
    uint64_t waits_for;              /* a quarantine waits for that incarnation */
    pd_worker_counts counts;         /* that its heartbeats tell */
    pd_msg_lease_request last_lease; /* what came last; its pointers are gone */
    pd_msg_prefill_request last_prefill;
    pd_msg_decode_start last_start;
    pd_msg_ship_request last_ship;
    pd_msg_ship_again last_again;
    pd_msg_cancel last_cancel;
    pd_msg_pull_end last_pull_end;
    pd_hash128 last_hash;   /* the last one of the prefill request */
    uint32_t started_again; /* starts of a sequence that runs */
    char refusal[PD_REASON_BYTES];
} fake_worker;

typedef struct fake_event {
    uint64_t due_ns, order;
    int kind; /* in fake.c */
    uint32_t worker;
    uint64_t incarnation;
    pd_request_key key;
    char *bytes; /* a packed message */
    size_t len;
} fake_event;

typedef struct fake {
    router_core *core;
    router_core_config config;
    router_sink sink; /* of the test; send is the fake's */
    uint64_t now_ns, random, order;
    uint64_t asleep_until_ns; /* the router stands still; what is sent to it waits */
    fake_event *events;
    uint32_t count, size;
    fake_worker workers[FAKE_WORKERS_MAX];
    uint32_t workers_count;
    uint64_t incarnations;
    /* how things go wrong, of 1000 */
    uint32_t duplicate_tokens, overload_prefill, end_first, seal_failures;
    uint32_t silent_landings;                /* Landed is not said */
    uint32_t suspends;                       /* a running sequence, at each of its steps */
    uint32_t ship_failures;                  /* of ShipRequests */
    pd_status prefill_status, decode_status; /* how they fail what comes next, unless PD_OK */
    uint32_t loss, duplicates, disorder;     /* of messages about requests */
    bool repeated;                           /* some message came twice */
    uint32_t delay_max_us;
    uint32_t lose[PD_MESSAGE_KINDS];   /* how many of the next ones never arrive */
    uint32_t refuse[PD_MESSAGE_KINDS]; /* how many of the router's next ones are not even taken */
    uint32_t sent[PD_MESSAGE_KINDS];
} fake;

void fake_init(fake *f, uint64_t seed, const router_sink *sink);
void fake_init_with(fake *f, uint64_t seed, const router_sink *sink,
                    void (*change)(router_core_config *config));
void fake_fini(fake *f);
/* A worker's clock is not the router's: what it shows at the router's 0. */
#define FAKE_CLOCK_NS (777 * PD_NS_PER_S)
/* A hello waits for its connection: what it says of the clock is older than a heartbeat's. */
#define FAKE_HELLO_NS (10 * PD_NS_PER_S)

void fake_config(router_core_config *config);
/* Starts a worker: it says hello, links and warms up. */
uint32_t fake_add(fake *f, pd_role role, uint32_t blocks);
void fake_kill(fake *f, uint32_t worker); /* the process ends without a word */
/* A prefill worker ends what it has in PD_E_PEER, its link cut; may_land as the message says it. */
void fake_cut(fake *f, uint32_t worker, bool may_land);
void fake_restart(fake *f, uint32_t worker); /* a new incarnation under the same name */
/* It believes that the router was gone: drops what it had of it and says hello again. */
void fake_new_session(fake *f, uint32_t worker);
/* It says that it holds these blocks. */
void fake_store(fake *f, uint32_t worker, const pd_hash128 *hashes, uint32_t count);
void fake_hello(const fake *f, const fake_worker *worker, pd_msg_hello *hello_out);
/* Runs until until_ns, ticking the core when it is due. */
void fake_run(fake *f, uint64_t until_ns);
uint32_t fake_token(uint32_t prompt_first, uint32_t index);
uint32_t fake_below(fake *f, uint32_t bound);
