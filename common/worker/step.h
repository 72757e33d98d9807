#pragma once

/* common/worker/step.h - the plan of one forward step, and what came of it.
 *
 * A role's deciding part (its core) fills a plan; what runs it (the engine in production, the time
 * model in the simulator) fills in the results and hands it back. A worker has one step under way
 * at a time: the plan and all it points to stay untouched from run to on_step_done. Immutable in
 * between, so the compute thread may read it. */

#include "common/transfer/transfer.h"
#include "common/wire/notice.h"

/* Tokens of one sequence. Attention sees all positions before, through the block table. */
typedef struct pd_step_slice {
    void *request;          /* the core's own */
    const char *id;         /* of the request, for logs */
    const uint32_t *tokens; /* [count] */
    uint32_t count;
    uint32_t position;      /* of tokens[0] */
    const pd_block *blocks; /* table from position 0, covers position + count */
    bool want_token;        /* sample after the last token */
    uint32_t drafts;        /* with want_token: of the tokens, the last so many are guesses */
    pd_sampling sampling;
    /* results */
    uint32_t token_out;   /* want_token: the sampled token */
    uint32_t *drafts_out; /* [drafts] the tokens that belong where the drafts stand: the first that
                             differs from its draft ends what is true of the slice */
} pd_step_slice;

typedef struct pd_step {
    uint64_t number; /* from 1 */
    pd_step_slice *slices;
    uint32_t slices_count;
    /* results */
    pd_status status; /* not PD_OK: no slice of the step can be trusted */
    uint64_t started_ns, finished_ns;
} pd_step;

/* Blocks to put into another worker's pool, for pd_role_sink.ship: for each group of
 * [group_first, group_first + groups) blocks first .. first + count - 1 of a request. */
typedef struct pd_shipment {
    pd_peer peer;
    uint64_t ticket; /* comes back in the one PD_TRANSFER_SENT of this shipment */
    pd_request_key key;
    uint64_t receiver; /* incarnation */
    uint32_t group_first, groups;
    uint32_t first, count;   /* blocks of the request; at least 1 */
    const pd_block *sources; /* [count] in the own pool */
    const pd_block *targets; /* [count] in the receiver's pool */
    uint32_t valid_tokens;   /* of the last block: fewer than a block's at a sequence's end */
    uint32_t again;          /* for its notices: pd_notice.again */
} pd_shipment;

/* Blocks that have landed, for pd_role_sink.verify: the same range as a notice names. */
typedef struct pd_check {
    uint64_t ticket; /* the core's own name for it */
    pd_request_key key;
    uint32_t group_first, groups;
    uint32_t first, count;
    const pd_block *blocks; /* [count] in the own pool */
    uint32_t valid_tokens;
    uint32_t slices;       /* seals of a block of a group: one a slice of its KV heads */
    const uint64_t *seals; /* [groups][count][slices] */
} pd_check;

typedef struct pd_checked {
    uint64_t ticket;
    uint64_t request; /* pd_ship_seal_request of the check's key */
    bool good;
    /* Not good: PD_OK, and the bytes do not match (bad_*), or why nobody can tell: they could not
     * be read, or not be hashed. That says nothing of what has landed. */
    pd_status unchecked;
    uint32_t bad_group, bad_block; /* the first that does not match; block as in the request */
    uint32_t bad_slice;            /* of its seals, the first that does not */
} pd_checked;

/* The request's part of a seal's place (common/kv/seal): of all routers, one number. */
uint64_t pd_ship_seal_request(const pd_request_key *key);
