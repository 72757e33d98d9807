#pragma once

/* decode-worker/admit.h - who gets blocks: leases.
 *
 * A lease promises a count of blocks, and binds them when the sender begins: those of what lands,
 * less what is cached then. The answer's come as it grows; whether there will be room for them is
 * predicted when the lease is asked for (decode-worker/pressure). What could never fit, with all of
 * max_tokens and nobody else there, is refused for good. Pure. One thread. */

#include "decode-worker/room.h"

typedef struct decode_admit {
    const pd_role_options *options;
    pd_lease_table *leases;
    const pd_lander *lander;
    decode_room *room;
    uint32_t sequences_max;
} decode_admit;

/* Blocks that a request can ever need here, and the tokens that they hold. False: it can never fit
 * (*reason_out says why). */
bool decode_admit_need(const pd_role_options *options, uint32_t prompt_tokens, uint32_t max_tokens,
                       uint32_t *blocks_out, uint32_t *capacity_out, const char **reason_out);

/* What a refusal says. */
typedef struct decode_refusal {
    const char *reason;  /* a literal */
    uint32_t wait_steps; /* overload: it may fit after so many; 0: unknown */
} decode_refusal;

/* Promises a lease beside those of all. On PD_OK the caller owns *sequence_out (decode_admit_free).
 * Errors, with *refusal_out: PD_E_INVALID, PD_E_TOO_LARGE, PD_E_OVERLOAD, PD_E_NOMEM. */
PD_CHECKED pd_status decode_admit_promise(decode_admit *admit, const pd_msg_lease_request *asked,
                                          const decode_sequence *all, double step_ms,
                                          uint64_t now_ns, decode_sequence **sequence_out,
                                          decode_refusal *refusal_out);
/* What a promise that was broken says: by a fault of ours alone, and the simulator looks for it. */
#define DECODE_ROOM_GONE "the room went to others meanwhile"
/* Binds a promise: held blocks are pinned, the rest claimed, and the landing begins. PD_E_OVERLOAD,
 * with *reason_out: no room now, the promise stands. */
PD_CHECKED pd_status decode_admit_bind(decode_admit *admit, decode_sequence *sequence,
                                       const char **reason_out);
/* The memory only; the lease has been released. */
void decode_admit_free(decode_sequence *sequence);
