#pragma once

/* router/policy.h - which prefill worker and which decode worker will serve a request soonest.
 *
 * Every pair is priced in predicted milliseconds to its second token:
 *
 *   prefill queue + prefill of what is not cached + what of the shipping does not hide behind it
 *   + decode queue + first decode step
 *
 * Load, cached prefixes and transfers are one unit, so no weights are tuned. What was just sent is
 * charged at once (the worker's next report is too late for a burst), and equal prices are broken
 * at random (many idle workers must not all get the first request). Pure, one thread. */

#include "router/cluster.h"
#include "router/index.h"

typedef struct router_terms {
    double prefill_queue_ms, prefill_ms, ship_ms, decode_queue_ms, step_ms, total_ms;
    uint32_t prefill_cached_blocks, decode_held_blocks;
} router_terms;

typedef struct router_choice {
    uint32_t prefill;
    uint32_t decode; /* ROUTER_NO_WORKER: the answer is one token, nothing is shipped */
    router_terms terms;
    uint32_t candidates; /* pairs that were priced */
} router_choice;

typedef struct router_policy_input {
    const router_cluster *cluster;
    const router_index *index;
    const pd_cost *cost;
    const pd_hash128 *hashes;
    uint32_t hashes_count;
    uint32_t prompt_tokens, max_tokens;
    bool need_decode;
    /* Slots not to be used again by this request; ROUTER_NO_WORKER when there are none. */
    uint32_t avoid_prefill, avoid_decode;
    const uint64_t *too_small; /* [ROUTER_WORKERS_MAX / 64] bits: decode workers it never fits */
    const uint64_t *taken;     /* the same, of both roles: not now; NULL: none */
    uint64_t now_ns;
} router_policy_input;

typedef struct router_policy_state {
    pd_router_policy policy;
    uint64_t random;
    uint64_t turn; /* round robin */
} router_policy_state;

/* False when no pair can take the request now. */
bool router_policy_choose(router_policy_state *state, const router_policy_input *input,
                          router_choice *choice_out);

/* The work a worker has before it, milliseconds from now: its report less the time since, plus
 * what was sent since, at least what this router has in flight there. */
double router_policy_queue_ms(const router_worker *worker, uint64_t now_ns);
