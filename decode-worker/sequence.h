#pragma once

/* decode-worker/sequence.h - one request at a decode worker, from its lease to its last token.
 *
 * One struct for the modules of this room: admit fills the lease's part, common/worker/land the
 * landing's, batch the running part. Once given up while a sender may still write, or a check still
 * reads, what is left of it is the quarantine: the landing's part alone. */

#include "common/kv/lease.h"
#include "common/worker/land.h"
#include "common/worker/role.h"

/* What speculative decoding knows of a sequence (decode-worker/speculate.h). It is made from the
 * tokens alone, so it is nothing that would have to be moved, shipped or kept. */
typedef struct decode_drafting {
    void *state;        /* the method's, in answer_memory; NULL: none */
    float right, tries; /* drafts, the latest count most */
    /* the draft model's */
    pd_block *blocks; /* in answer_memory, of its own pool */
    uint32_t blocks_count;
    uint32_t kv_tokens; /* positions whose KV it has, of these very tokens */
    uint32_t made;      /* drafts of the step being prepared */
    uint32_t wanted;    /* likewise */
} decode_drafting;

typedef struct decode_sequence {
    struct decode_sequence *prev, *next; /* of all */
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];

    /* admit: the lease */
    pd_lease *lease;
    uint64_t ttl_ns;
    uint32_t prompt_tokens; /* have their KV when all has landed; of a request that was begun
                               elsewhere, with the answer so far */
    uint32_t prompt_blocks;
    uint32_t capacity;     /* tokens whose KV has room */
    uint32_t hashes_count; /* of full blocks, known so far; the answer's follow the prompt's */
    pd_hash128 *hashes;    /* [capacity / block_tokens] */
    uint64_t granted_ns;

    /* land: the prompt's blocks from held on */
    uint32_t held;
    pd_landing landing;
    bool bound;
    bool landed;   /* everything is there and good: nobody writes any more */
    bool given_up; /* quarantined, or about to be */

    /* batch: the answer; set by decode_start */
    bool started;
    void *answer_memory;
    uint32_t *tokens; /* [tokens_max] prompt, then answer */
    uint32_t tokens_count, tokens_max;
    uint32_t answer_from; /* tokens[answer_from] is answer token 0 */
    uint32_t *end_tokens;
    uint32_t end_tokens_count;
    uint32_t max_tokens;
    pd_sampling sampling;
    uint32_t kv_tokens; /* positions whose KV is computed or landed */
    uint64_t ready_ns;
    bool in_batch, in_step;
    bool answer_ended; /* by itself, with an end token */
    bool ending;       /* given up as soon as the step under way is over */
    bool solo;         /* was in a failed step: stepped alone, to find who is at fault */
    struct decode_sequence *batch_prev, *batch_next;
    decode_drafting drafting;

    /* room: growth, and giving way to others */
    int32_t priority;
    uint64_t order;      /* of admission */
    uint32_t answer_max; /* tokens that may come after what lands */
    bool stalled;        /* no block for its next token, or no place: not in the next step */
    bool standing;       /* gave way: not in the batch, blocks kept */
    bool told;           /* its router knows, and alone decides what becomes of it */
    bool moving;         /* its blocks are being shipped: no deadline but that one's */
    uint64_t stood_ns;   /* since when it stands */
} decode_sequence;
