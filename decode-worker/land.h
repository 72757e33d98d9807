#pragma once

/* decode-worker/land.h - what arrives: is it ours, does it fit, is it whole?
 *
 * A notice is believed when its request, epoch, sender and receiver are those of the lease, its
 * group and blocks are among those to be written, its valid tokens are what the prompt leaves in
 * the last block, and the seals match the bytes that lie there. What does not fit changes nothing.
 * Pure (the seals are computed by the sink). One thread. */

#include "decode-worker/sequence.h"

typedef enum decode_landing {
    DECODE_LAND_IGNORED, /* late, duplicate or ill-fitting */
    DECODE_LAND_PART,    /* something new is there */
    DECODE_LAND_DONE,    /* with this, everything is there */
    DECODE_LAND_BROKEN,  /* a seal does not match: the bytes are not the request's */
} decode_landing;

/* A PD_NOTICE_BLOCKS for a sequence that was found by its key. A given-up sequence's blocks are
 * counted too, but not checked: only the sender's last word matters then. */
decode_landing decode_land_on_blocks(decode_sequence *sequence, const pd_notice *notice,
                                     const pd_role_options *options, const pd_role_sink *sink);
