#pragma once

/* prefill-worker/prefill.h - the prefill role's core: prompts in, first tokens and shipped blocks
 * out. See common/worker/role.h for how it is driven.
 *
 * A request's way: queued; running, chunk by chunk, its finished blocks leaving with each step;
 * shipping, until every notice is sent; answered with pd_msg_prefill_done and forgotten. Its own
 * blocks are pinned until then and cached after. A request that ends early (cancel, deadline, lost
 * router, failed link, failed step) first waits for the step and the puts that are under way; then,
 * if it was to ship and not all of it was sent, PD_NOTICE_ABORT is the last word to the decode
 * worker; then its blocks return.
 *
 * A cancel for a request that never came here is answered with an ABORT to every connected decode
 * worker, so that blocks leased for it need not wait for ever. A router that is lost is announced
 * to them with number 0 ("everything of that router"), and nothing of it is taken until it has
 * welcomed this worker anew. */

#include "common/worker/role.h"

extern const pd_role_ops prefill_role;
