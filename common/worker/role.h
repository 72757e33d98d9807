#pragma once

/* common/worker/role.h - one interface for the roles a worker can have.
 *
 * A role's core decides; it does no I/O, has no clock and knows no kernels: events and the time
 * come in, actions go out through the sink. So the runtime (common/worker/runtime) drives it with
 * sockets and threads, and the simulator drives the same object with a virtual clock. Each core
 * belongs to one thread. An action may be called from within any event function, and never calls
 * back into the core before it has returned. */

#include "common/base/spec_method.h"
#include "common/cost/cost.h"
#include "common/kv/layout.h"
#include "common/wire/messages.h"
#include "common/wire/notice.h"
#include "common/worker/step.h"

typedef struct pd_role_core pd_role_core;

/* Limits of speculative decoding. A token and its drafts are one tile of query rows at most. */
enum { PD_SPEC_DRAFTS_MOST = 15, PD_SPEC_NGRAM_MOST = 8 };

/* Speculative decoding at a decode worker. */
typedef struct pd_speculation {
    pd_spec_method method;
    uint32_t draft_tokens;         /* of a sequence in a step, at most; 1 .. PD_SPEC_DRAFTS_MOST */
    uint32_t ngram_min, ngram_max; /* 2 .. PD_SPEC_NGRAM_MOST */
    uint32_t window;               /* lookahead's; below draft_tokens */
    bool adaptive;                 /* as many drafts as pay for themselves; else all, always */
    /* draft_model: its own KV, and rows of one of its steps */
    uint32_t draft_blocks, draft_block_tokens, draft_rows, draft_context;
} pd_speculation;

typedef struct pd_role_options {
    const char *name; /* the worker's, "prefill-0"; borrowed */
    uint64_t incarnation;
    pd_kv_layout layout;
    uint32_t vocab;
    uint32_t context_max;   /* positions */
    uint32_t max_batch;     /* sequences in a step */
    uint32_t queue_max;     /* requests beyond those that may wait */
    uint32_t chunk_tokens;  /* rows of a step that are prompt */
    uint32_t peers_max;     /* links at a time */
    bool prefix_cache;      /* finished blocks stay for reuse */
    bool seals;             /* notices carry seals, and they are checked */
    bool ship_whole;        /* a prompt's blocks leave when all of them are computed */
    uint64_t lost_after_ns; /* a router silent for so long is gone, until it says its own value */
    pd_speculation speculation; /* of a decode worker; all 0: off */
} pd_role_options;

/* What a core may ask for. ctx is passed to each. */
typedef struct pd_role_sink {
    void *ctx;
    /* To the router of that incarnation; the message is read before send returns. */
    void (*send)(void *ctx, uint64_t router, const pd_message *message);
    /* Runs the step; on_step_done follows, later. */
    void (*run)(void *ctx, pd_step *step);
    /* Runs a step of the draft model, on its own KV; on_draft_done follows. NULL without one. */
    void (*draft)(void *ctx, pd_step *step);
    /* As pd_transfer_connect and pd_transfer_close (prefill workers). */
    pd_status (*connect)(void *ctx, const void *address, size_t bytes, uint64_t tag,
                         pd_peer *peer_out);
    void (*close)(void *ctx, pd_peer peer);
    /* Posts a notice that carries no blocks (PD_NOTICE_ABORT), after all that was posted to that
     * peer before. Its PD_TRANSFER_SENT has ticket 0. */
    pd_status (*notify)(void *ctx, pd_peer peer, const pd_notice *notice);
    /* Puts the blocks and then says so with notices. What it points to is copied. PD_OK: exactly
     * one PD_TRANSFER_SENT with its ticket follows, when all of it has landed or failed. How many
     * shipments may wait is the carrier's: PD_E_OVERLOAD, try again after the next SENT or tick.
     * PD_E_PEER: that link is closed; PD_E_INVALID: the peer has no such blocks; PD_E_NOMEM.
     * Shipments of several tickets to one peer share it fairly. Tickets are not 0. */
    pd_status (*ship)(void *ctx, const pd_shipment *shipment);
    /* Drops what was not posted yet of that ticket: its PD_TRANSFER_SENT come, PD_E_CANCELLED. */
    void (*unship)(void *ctx, uint64_t ticket);
    /* Compares landed blocks with their seals, on another thread; copies what it points to. PD_OK:
     * on_checked follows. PD_E_OVERLOAD: too many wait, try again after the next on_checked or
     * tick. Until then the blocks must not be written by this worker. */
    pd_status (*verify)(void *ctx, const pd_check *check);
} pd_role_sink;

/* Counted since the start; for metrics and tests. */
typedef struct pd_role_counters {
    uint64_t requests, finished, cancelled, failed, refused;
    uint64_t steps, tokens_computed, tokens_cached;
    uint64_t notices_ignored; /* late, duplicate, of another incarnation or ill-fitting */
    uint64_t blocks_shipped;
    uint64_t bytes_shipped; /* that left, whatever came of their shipment */
    uint64_t routers_lost;
    uint64_t suspended;     /* sequences whose router was told that there is no room for them */
    uint64_t moved;         /* of these, released after their blocks were shipped */
    uint64_t stalled;       /* sequences left out of a step for want of a block, each time */
    uint64_t spec_steps;    /* sequences' steps that brought drafts */
    uint64_t spec_drafted;  /* draft tokens in them, and of these */
    uint64_t spec_accepted; /* those that the model says, too */
} pd_role_counters;

typedef struct pd_role_ops {
    pd_role role;
    /* The core keeps copies of *options and *sink. Errors: PD_E_INVALID (a limit that is 0 or too
     * large, logged), PD_E_NOMEM. */
    pd_status (*create)(const pd_role_options *options, const pd_role_sink *sink,
                        pd_role_core **core_out);
    void (*destroy)(pd_role_core *core);
    /* A message of the router with that incarnation, WELCOME and heartbeats included. Kinds that
     * this role does not handle are ignored. */
    void (*on_message)(pd_role_core *core, uint64_t router, const pd_message *message,
                       uint64_t now_ns);
    /* The KV of the running step is final in every layer of that group: it may be shipped. In
     * order, each group once, before on_step_done. NULL: the role does not care. */
    void (*on_group)(pd_role_core *core, pd_step *step, uint32_t group, uint64_t now_ns);
    /* NULL: the role verifies nothing. */
    void (*on_checked)(pd_role_core *core, const pd_checked *checked, uint64_t now_ns);
    void (*on_step_done)(pd_role_core *core, pd_step *step, uint64_t now_ns);
    /* NULL: the role has no draft model. */
    void (*on_draft_done)(pd_role_core *core, pd_step *step, uint64_t now_ns);
    void (*on_transfer)(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns);
    /* Deadlines, expiries, lost routers, the ledger's check. At least every 100 ms. */
    void (*on_tick)(pd_role_core *core, uint64_t now_ns);
    /* No write of that incarnation can land here any more, whatever routers say: its process is
     * dead, or nobody believes it any more, and what was on its way is fenced off. Told after
     * every notice of it whose bytes landed; once, more often, or not at all. NULL: the role does
     * not care. */
    void (*peer_dead)(pd_role_core *core, uint64_t incarnation, uint64_t now_ns);
    /* The process of that incarnation has ended, as this host knows: nobody waits there for a word
     * of ours. Never told of who was only given up, and may read on one day what was sent to it.
     * NULL: the role does not care. */
    void (*peer_ended)(pd_role_core *core, uint64_t incarnation);
    /* No new requests from here on. */
    void (*drain)(pd_role_core *core);
    /* Cancels everything, as the routers would. */
    void (*cancel_all)(pd_role_core *core, uint64_t now_ns);
    /* True when no request is held in any state (quarantined blocks may remain). */
    bool (*idle)(const pd_role_core *core);
    pd_ledger (*ledger)(const pd_role_core *core);
    /* Fills what the core knows: step, busy, queue_ms, running, waiting, ledger, events_sequence,
     * draining. */
    void (*heartbeat)(const pd_role_core *core, pd_msg_heartbeat *heartbeat);
    pd_role_counters (*counters)(const pd_role_core *core);
    /* What measured steps and transfers are learnt into. */
    const pd_cost *(*cost)(const pd_role_core *core);
    /* How it guesses; NULL: never. */
    pd_spec_method (*speculation)(const pd_role_core *core);
} pd_role_ops;

/* All of a heartbeat that a core knows: what ops->heartbeat fills, and what it has counted. */
void pd_role_heartbeat(const pd_role_ops *ops, const pd_role_core *core,
                       pd_msg_heartbeat *heartbeat);
