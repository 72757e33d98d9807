#pragma once

/* prefill-worker/peers.h - links to decode workers, and what comes back by them. Those made on
 * demand (common/worker/source) are nobody's business but this worker's. One thread. */

#include "prefill-worker/core.h"

/* PD_MSG_PEER_UP, PD_MSG_PEER_GONE. */
void prefill_peers_up(pd_role_core *core, uint64_t router, const pd_msg_peer_up *peer,
                      uint64_t now_ns);
void prefill_peers_gone(pd_role_core *core, const pd_msg_peer_gone *peer, uint64_t now_ns);
/* PD_TRANSFER_SENT. */
void prefill_peers_sent(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns);
/* A link came up, broke or was closed. */
void prefill_peers_on_link(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns);
/* As pd_source_options.drop_link; ctx: the core. */
void prefill_peers_drop(void *ctx, pd_link *link, const char *reason, uint64_t now_ns);
/* Stuck links are closed, waiting ones tried again. */
void prefill_peers_tick(pd_role_core *core, uint64_t now_ns);
