#pragma once

/* decode-worker/admit.h - who gets blocks: leases.
 *
 * A lease takes, at once, every block its sequence can ever need: for the prompt and for max_tokens
 * of answer (no more than the context allows), less what is cached. So growth never fails, at the
 * price that room is set aside for answers that end early; a router keeps max_tokens sensible.
 * Pure. One thread. */

#include "decode-worker/sequence.h"

typedef struct decode_admit {
    const pd_role_options *options;
    pd_lease_table *leases;
    uint32_t sequences_max;
} decode_admit;

/* Blocks that a request can ever need here, and the tokens that they hold. False: it can never fit
 * (*reason_out says why). */
bool decode_admit_need(const pd_role_options *options, uint32_t prompt_tokens, uint32_t max_tokens,
                       uint32_t *blocks_out, uint32_t *capacity_out, const char **reason_out);

/* Grants and binds a lease. On PD_OK the caller owns *sequence_out (decode_admit_free) and the
 * reply says which blocks are held and which are to be written; its blocks point into the lease.
 * Errors, with *reason_out: PD_E_INVALID, PD_E_TOO_LARGE, PD_E_OVERLOAD, PD_E_NOMEM. */
PD_CHECKED pd_status decode_admit_lease(decode_admit *admit, const pd_msg_lease_request *asked,
                                        uint64_t now_ns, decode_sequence **sequence_out,
                                        pd_msg_lease_reply *reply_out, const char **reason_out);
/* The memory only; the lease has been released. */
void decode_admit_free(decode_sequence *sequence);
