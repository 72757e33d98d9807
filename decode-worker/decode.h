#pragma once

/* decode-worker/decode.h - the decode role's core: leases, landings, and the running batch. See
 * common/worker/role.h for how it is driven.
 *
 * A sequence's way: promised, then bound (admit.h), its blocks landing (common/worker/land);
 * started by pd_msg_decode_start; when both have happened, in the batch (batch.h) until an end
 * token, max_tokens or the context's end. It takes blocks as it grows, and gives way when there are
 * none (room.h, pressure.h): then it stands still, and moves to another worker
 * (common/worker/source), or ends here with its full blocks kept as cache. A sequence that ends
 * while its sender may still write leaves its landing blocks quarantined, until the sender's last
 * word (its final blocks or an abort) or its death. */

#include "common/worker/role.h"

extern const pd_role_ops decode_role;
