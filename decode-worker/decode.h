#pragma once

/* decode-worker/decode.h - the decode role's core: leases, landings, and the running batch. See
 * common/worker/role.h for how it is driven.
 *
 * A sequence's way: leased (admit.h), its blocks landing (land.h); started by pd_msg_decode_start;
 * when both have happened, in the batch (batch.h) until an end token, max_tokens or the context's
 * end. A lease takes all blocks its sequence can ever need, so a running sequence never lacks one
 * and is never preempted. A sequence that ends while its sender may still write leaves its landing
 * blocks quarantined, until the sender's last word (its final blocks or an abort) or its death. */

#include "common/worker/role.h"

extern const pd_role_ops decode_role;
