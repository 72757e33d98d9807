#pragma once

/* tests/unit/workers/world.h - both roles' cores, a router and the data plane between them, with a
 * virtual clock and a seed that decides what happens next.
 *
 * Pools hold, for every layer group, block and slot, the token whose KV would lie there; a step
 * checks that everything it looks back on is there, and draws its token from what it reads. So an
 * answer is right only if every block of every group held the right content when it was read. */

#include "common/worker/role.h"
#include "decode-worker/decode.h"
#include "prefill-worker/prefill.h"

enum {
    WORLD_BLOCK_TOKENS = 16,
    WORLD_GROUPS = 3,
    WORLD_VOCAB = 1000,
    WORLD_REQUESTS_MAX = 512,
    WORLD_PROMPT_MAX = 400,
    WORLD_ANSWER_MAX = 64,
    WORLD_WIRE_MAX = 1024,
    WORLD_LETTERS_MAX = 512,
};

#define WORLD_ROUTER UINT64_C(0x7007)

typedef enum world_phase {
    WORLD_NONE,
    WORLD_LEASING,
    WORLD_PREFILLING, /* sent to the prefill worker, no first token yet */
    WORLD_DECODING,   /* started at the decode worker */
    WORLD_FINISHED,
    WORLD_CANCELLED,
    WORLD_FAILED,
} world_phase;

typedef struct world_request {
    world_phase phase;
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    uint32_t prompt[WORLD_PROMPT_MAX];
    uint32_t prompt_count;
    uint32_t answer[WORLD_ANSWER_MAX];
    uint32_t answer_count, max_tokens;
    uint32_t end_token; /* 0: none */
    pd_hash128 hashes[(WORLD_PROMPT_MAX + WORLD_ANSWER_MAX) / WORLD_BLOCK_TOKENS + 1];
    uint32_t hashes_count;
    uint32_t cached_tokens;
    uint32_t base; /* tokens of the answer when this attempt began: its first is number base */
    bool lease_asked, prefill_asked, prefill_ended;
    bool direct; /* no decode worker knows it: the test says its targets */
    uint32_t started_said, landed_said, agains;
    uint32_t pull_epoch; /* the latest for which a source was asked */
    pd_status prefill_status;
    pd_status status; /* of what ended it */
    pd_finish finish;
} world_request;

/* What can go wrong with a block on its way. */
typedef enum world_damage {
    WORLD_DAMAGE_NONE,
    WORLD_DAMAGE_FLIPPED_BIT,
    WORLD_DAMAGE_OTHER_BLOCK,  /* another block's bytes in its place */
    WORLD_DAMAGE_OLD_EPOCH,    /* sealed for the attempt before */
    WORLD_DAMAGE_LEFT_OUT,     /* announced, never written */
    WORLD_DAMAGE_COUNT_SEALED, /* sealed for another number of valid tokens */
    WORLD_DAMAGE_COUNT_SAID,   /* the notice says another number */
    WORLD_DAMAGE_NO_NOTICE,    /* written, never announced */
    WORLD_DAMAGES,
} world_damage;

/* One put or notice under way. A put's bytes are read as it is delivered. */
typedef struct world_packet {
    bool notice;
    bool first, last; /* of a shipment: with the last comes its PD_TRANSFER_SENT */
    bool dropped;     /* unshipped: nothing but that */
    uint64_t sender;  /* prefill's incarnation when posted */
    uint64_t receiver;
    pd_peer peer;
    uint64_t ticket;
    uint32_t group, groups, count;
    world_damage damage;
    uint32_t damaged;                  /* which of groups * count */
    pd_block sources[32], targets[32]; /* [count] in each of the groups */
    size_t bytes_len;
    unsigned char bytes[512]; /* a notice of at most 32 seals */
} world_packet;

/* Landed blocks that wait to be checked. */
typedef struct world_check {
    pd_check check;
    pd_block blocks[32];
    uint64_t seals[32];
} world_check;

/* A message on its way to the router; what it points to lies beside it. */
typedef struct world_letter {
    pd_message message;
    struct world_worker *from;
    union {
        pd_block blocks[64];
        pd_step_token tokens[64];
    };
} world_letter;

typedef struct world_worker {
    const pd_role_ops *ops;
    pd_role_core *core;
    pd_role_options options;
    pd_step *running;
    pd_step *drafting;     /* a step of the draft model */
    uint32_t *draft_pool;  /* [draft_blocks][block_tokens] token + 1; NULL: no draft model */
    uint32_t groups_done;  /* of the running step */
    world_check checks[4]; /* in order */
    uint32_t checks_count;
    uint32_t *pool; /* [groups][blocks][block_tokens] token + 1, 0: nothing */
    struct world *world;
} world_worker;

typedef struct world {
    uint64_t now_ns;
    uint64_t seed;
    world_worker prefill, decode;
    bool link_up;
    uint64_t link_tag;
    uint64_t link_receiver;
    bool link_closing;
    world_packet *wire; /* [WORLD_WIRE_MAX] in order */
    uint32_t wire_count;
    world_letter *letters; /* [WORLD_LETTERS_MAX] in order */
    uint32_t letters_count;
    world_request *requests; /* [WORLD_REQUESTS_MAX] */
    uint32_t requests_count;
    uint32_t overloads, decode_failures, links_reported, refetches, pulls_landed;
    uint32_t shipments; /* posted so far */
    uint32_t ships_max; /* under way at a time */
    uint32_t under_way; /* shipments */
    bool hold_checks;   /* the verifier stands still */
    bool resume;
    uint64_t prefill_events, decode_events; /* numbers of the last KV event heard of each */
    uint64_t incarnation_next;
    bool router_silent;
    bool fail_next_step;     /* the next one to end fails before its first group */
    bool fail_next_draft;    /* likewise of the draft model */
    uint32_t draft_wrong;    /* of so many of its tokens one is not the model's; 0: none */
    uint32_t corrupt_notice; /* the n-th notice from now has a wrong seal; 0: none */
    bool corrupt_again;      /* and those of all that is shipped again */
    world_damage damage;     /* of a block in damage_ship shipments */
    uint32_t damage_ship;
    bool damaged; /* it has happened */
    pd_msg_prefill_done last_done;
    pd_msg_audit_reply last_audit; /* entries and waits_for lie beside it */
    pd_audit_entry audit_entries[64];
    uint64_t audit_waits[16];
    /* A worker that has leading blocks of every other prompt; who writes them is the test's. */
    uint64_t pull_from;
    void (*on_pull)(struct world *w, const pd_msg_prefill_started *started);
    void *on_pull_ctx;
} world;

typedef struct world_setup {
    uint64_t seed;
    uint32_t prefill_blocks, decode_blocks;
    uint32_t chunk_tokens, max_batch, queue_max;
    uint32_t context_max; /* 0: WORLD_PROMPT_MAX + WORLD_ANSWER_MAX */
    uint32_t ships_max;   /* shipments under way at a time; 0: 64 */
    uint32_t token_bytes; /* of a layer group, as the cost model sees it; 0: 4 */
    bool seals, no_cache;
    pd_speculation speculation; /* of the decode worker */
    bool resume; /* a failed attempt is followed by another one, from prompt and answer so far */
} world_setup;

world *world_create(const world_setup *setup);
void world_destroy(world *w);
uint32_t world_random(world *w, uint32_t below);

/* Makes a request of the tokens and asks for its lease; returns it. */
world_request *world_ask(world *w, const uint32_t *prompt, uint32_t count, uint32_t max_tokens);
/* Random prompt with prefixes that are often shared. */
world_request *world_ask_random(world *w);
void world_cancel(world *w, world_request *r);

/* One thing that can happen next, chosen by the seed: a step ends, a packet arrives. False when
 * nothing is under way. */
bool world_turn(world *w);
bool world_step_group(world *w, world_worker *worker); /* one more, or the step's end */
bool world_end_step(world *w, world_worker *worker);
bool world_end_draft(world *w); /* the decode worker's draft model ends its step */
bool world_end_check(world *w, world_worker *worker);
bool world_deliver(world *w);
bool world_read_letter(world *w); /* the router takes its next message */
bool world_lease_next(world *w);  /* the router asks for the next lease */
void world_tick(world *w, uint64_t ms);
/* Until nothing is under way and all requests have ended (or turns run out: false). */
bool world_settle(world *w);

void world_to(world *w, world_worker *worker, const pd_message *message);
void world_kill_prefill(world *w);
void world_restart_decode(world *w);

/* KV of these tokens lies in the worker's block now, as far as that group is concerned. */
void world_put(world_worker *worker, uint32_t group, pd_block block, const uint32_t *tokens,
               uint32_t count);
/* The seal of what lies there. */
uint64_t world_seal(const world_worker *worker, const pd_request_key *key, uint32_t group,
                    uint32_t index, pd_block block, uint32_t valid);

/* Most tokens repeat the one so many places before; 0: none does. Of all worlds. */
void world_repeat(uint32_t period);
/* The right token after these. */
uint32_t world_next_token(const uint32_t *tokens, uint32_t count);
/* Asserts that the request's answer so far is right. */
void world_check_answer(const world_request *r);
/* Asserts that all blocks of both workers are free or cached. */
void world_check_nothing_held(world *w);
