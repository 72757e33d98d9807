#pragma once

/* decode-worker/admit.h - who gets blocks: leases.
 *
 * A lease promises a count of blocks, and binds them when the sender begins: every block that the
 * sequence can ever need, for the prompt and for max_tokens of answer (no more than the context
 * allows), less what is cached then. Pure. One thread. */

#include "decode-worker/sequence.h"

typedef struct decode_admit {
    const pd_role_options *options;
    pd_lease_table *leases;
    const pd_lander *lander;
    uint32_t sequences_max;
} decode_admit;

/* Blocks that a request can ever need here, and the tokens that they hold. False: it can never fit
 * (*reason_out says why). */
bool decode_admit_need(const pd_role_options *options, uint32_t prompt_tokens, uint32_t max_tokens,
                       uint32_t *blocks_out, uint32_t *capacity_out, const char **reason_out);

/* Promises a lease. On PD_OK the caller owns *sequence_out (decode_admit_free). Errors, with
 * *reason_out: PD_E_INVALID, PD_E_TOO_LARGE, PD_E_OVERLOAD, PD_E_NOMEM. */
PD_CHECKED pd_status decode_admit_promise(decode_admit *admit, const pd_msg_lease_request *asked,
                                          uint64_t now_ns, decode_sequence **sequence_out,
                                          const char **reason_out);
/* Binds a promise: held blocks are pinned, the rest claimed, and the landing begins. PD_E_OVERLOAD,
 * with *reason_out: no room now, the promise stands. */
PD_CHECKED pd_status decode_admit_bind(decode_admit *admit, decode_sequence *sequence,
                                       const char **reason_out);
/* The memory only; the lease has been released. */
void decode_admit_free(decode_sequence *sequence);
