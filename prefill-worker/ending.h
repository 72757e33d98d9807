#pragma once

/* prefill-worker/ending.h - a request's last words and its end.
 *
 * Nobody is told that blocks are not written any more before that is true: what waits to be
 * shipped is dropped, what is under way comes back, then the abort goes out, and then
 * PD_MSG_PREFILL_DONE. One thread. */

#include "prefill-worker/core.h"

/* The key under which by_ticket knows a request. */
pd_request_key prefill_ticket_key(uint64_t ticket);
void prefill_say_done(pd_role_core *core, const prefill_request *request);
/* Goes on with a request that nothing is under way for: it ends, or its copies are held until the
 * decode worker has checked what it got. The request may be gone afterwards. */
void prefill_settle(pd_role_core *core, prefill_request *request);
/* reason: a literal; the first one stands. The request may be gone afterwards. */
void prefill_end_early(pd_role_core *core, prefill_request *request, pd_status status,
                       const char *reason, uint64_t now_ns);
