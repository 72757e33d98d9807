#pragma once

/* decode-worker/answer.h - the part of a sequence that PD_MSG_DECODE_START brings: tokens,
 * sampling, and where the answer ends. Pure. One thread. */

#include "decode-worker/sequence.h"

/* NULL, or what is wrong with it for this lease (a literal). */
const char *decode_answer_check(const pd_role_options *options, const decode_sequence *sequence,
                                const pd_msg_decode_start *asked);
/* Copies a checked one. drafting_bytes: for its drafting.state, a multiple of 8; 0: none. Errors:
 * PD_E_NOMEM. */
PD_CHECKED pd_status decode_answer_begin(decode_sequence *sequence,
                                         const pd_msg_decode_start *asked, size_t drafting_bytes);
