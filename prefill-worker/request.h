#pragma once

/* prefill-worker/request.h - one prompt at a prefill worker, from its request to the release of its
 * copies. */

#include "common/worker/prefill_queue.h"
#include "common/worker/role.h"

typedef struct prefill_request {
    pd_prefill_item item; /* first: an item is its request */
    struct prefill_request *prev, *next;
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    /* what is asked; the arrays lie in one piece of memory behind memory */
    void *memory;
    uint32_t *tokens; /* [item.tokens] */
    pd_hash128 *hashes;
    uint32_t *end_tokens;
    pd_block *blocks;  /* [blocks_count], in the own pool, once item.started */
    pd_block *targets; /* [blocks_count - held], in the decode worker's pool, once targets_known */
    uint32_t hashes_count, end_tokens_count, blocks_count;
    uint32_t answered; /* index in the answer of the token that is sampled here */
    pd_sampling sampling;
    uint32_t max_tokens; /* of the whole answer */
    bool ship;
    uint64_t receiver; /* the decode worker's incarnation */
    uint64_t link_tag;
    uint64_t ticket;
    uint64_t deadline_ns;  /* UINT64_MAX: none. Of computing, then of shipping and holding */
    uint64_t hold_ns;      /* for the latter, from its token on; 0: none */
    pd_msg_peer pull_from; /* no transfer address */
    uint32_t pull_blocks;  /* leading ones that it has; 0: nothing to pull (any more) */
    uint64_t pull_ns;
    /* how it stands */
    struct prefill_pull *pull; /* under way: the prompt stands aside */
    bool in_step;
    bool solo;         /* was in a failed step: stepped alone, to find who is at fault */
    bool computed;     /* its token is out */
    bool answer_ended; /* with that token: nothing has to leave any more */
    bool word_owed;    /* a PD_MSG_PREFILL_DONE: at first, and after each PD_MSG_SHIP_AGAIN */
    bool released;
    pd_status status;   /* not PD_OK: it is ending */
    const char *reason; /* a literal */
    uint32_t cached;    /* tokens */
    uint64_t arrived_ns, started_ns, said_started_ns, ended_ns;
    /* shipping; ship_plan's */
    bool whole; /* nothing leaves before all of it is computed */
    bool targets_known;
    uint32_t held;          /* leading blocks that are there already */
    uint32_t groups;        /* of the layout */
    uint32_t *shipped;      /* [groups] blocks before this one have left or are held there */
    uint32_t final_groups;  /* in_step: leading groups of which the step's KV is final */
    uint32_t batch_groups;  /* in_step: so many groups make a shipment */
    bool step_left;         /* some of the step's own blocks have left before its end */
    uint32_t again;         /* PD_MSG_SHIP_AGAIN that asked for something new */
    uint64_t *asked, *want; /* bits [groups][blocks_count]; NULL until the first */
    /* the data plane */
    uint32_t posted, sent; /* shipments */
    uint64_t wire_ns;      /* of all writes that landed, hidden behind computing or not */
    uint64_t compute_ns;
    uint64_t ship_bytes;
    bool may_land; /* as pd_msg_prefill_done says it */
    bool unclosed; /* its link's close was given up: puts may be under way for ever */
} prefill_request;

/* NULL, or what is wrong with it (a literal), and the status that says so. */
const char *prefill_request_check(const pd_role_options *options,
                                  const pd_msg_prefill_request *asked, pd_status *status_out);
/* A copy of a checked one; NULL: no memory. */
prefill_request *prefill_request_new(const pd_role_options *options,
                                     const pd_msg_prefill_request *asked);
void prefill_request_free(prefill_request *request);
