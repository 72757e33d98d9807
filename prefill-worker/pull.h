#pragma once

/* prefill-worker/pull.h - leading blocks that another worker has are written here by it, in place
 * of being computed.
 *
 * As a prompt's turn comes, blocks are claimed for what its own cache lacks of what the other
 * worker has (a lease, as a decode worker's), and the prompt stands aside until they have landed
 * and were checked; they go into the prefix cache, where the prompt then finds them. When they do
 * not come, or come wrong twice, the prompt computes everything itself, into other blocks, and the
 * landing ones stay quarantined until the source's last word or death. One thread. */

#include "common/kv/lease.h"
#include "common/worker/audit.h"
#include "common/worker/blocks.h"
#include "common/worker/land.h"
#include "common/worker/links.h"
#include "common/worker/writers.h"
#include "prefill-worker/request.h"

/* Pulls under way and quarantined: with more a prompt is computed. */
enum { PREFILL_PULLS_MAX = 64 };

typedef struct prefill_pull prefill_pull;

typedef struct prefill_pulls {
    const pd_role_options *options;
    const pd_role_sink *sink;
    pd_blocks *blocks;
    pd_role_counters *counters;
    pd_lease_table *leases;
    pd_lander lander;
    pd_writers writers; /* whose writes are fenced off: nothing is pulled from them */
    prefill_pull *head; /* of all, quarantined ones included */
} prefill_pulls;

/* All is borrowed; blocks must be there already. Errors: PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status prefill_pulls_init(prefill_pulls *pulls, const pd_role_options *options,
                                        const pd_role_sink *sink, pd_blocks *blocks,
                                        pd_role_counters *counters);
void prefill_pulls_fini(prefill_pulls *pulls);

/* True: the request has blocks to wait for now (request->pull), and its item is parked; the router
 * is to hear of them. False: nothing to pull, or no room to pull it into. */
bool prefill_pull_begin(prefill_pulls *pulls, prefill_request *request, uint64_t now_ns);
/* The request waits no more, for whatever reason. */
void prefill_pull_give_up(prefill_pulls *pulls, prefill_request *request);
/* Fills pull_first and pull_blocks. */
void prefill_pull_describe(const prefill_request *request, pd_msg_prefill_started *started);

/* The source has said its last word to the router. */
void prefill_pull_ended(prefill_pulls *pulls, const pd_msg_pull_end *ended);
/* A cancel that says that nobody writes. */
void prefill_pull_unwritten(prefill_pulls *pulls, const pd_request_key *key, uint64_t source);
/* A notice of a source. */
void prefill_pull_on_notice(prefill_pulls *pulls, const pd_notice *notice, uint64_t now_ns);
void prefill_pull_on_checked(prefill_pulls *pulls, const pd_checked *checked);
/* dead: no write of that incarnation can land any more; else it was given up and may go on. */
void prefill_pull_source_gone(prefill_pulls *pulls, uint64_t incarnation, bool dead);
/* Adds those that land, or are quarantined, and whom these wait for. */
void prefill_pulls_audit(const prefill_pulls *pulls, pd_audit *audit);
/* What waits for a source's last word asks for it, by the link to that worker. */
void prefill_pulls_ask(prefill_pulls *pulls, pd_links *links, uint64_t now_ns);
void prefill_pulls_tick(prefill_pulls *pulls, uint64_t now_ns);
