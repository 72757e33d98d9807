#pragma once

/* decode-worker/moves.h - what a decode worker says about its sequences: one that gave way, one
 * that moves, and all of them, for an audit. Pure. One thread. */

#include "common/worker/audit.h"
#include "common/worker/source.h"
#include "decode-worker/sequence.h"

/* PD_MSG_SUSPENDED. */
void decode_moves_say_suspended(const pd_role_sink *sink, const decode_sequence *sequence);
/* PD_MSG_SHIP_REQUEST. sequence: the one with its source_epoch, NULL when there is none, or when it
 * comes from the cache. One that stands still waits for its router from here on, and moves. */
void decode_moves_request(pd_source *source, const pd_msg_ship_request *asked,
                          decode_sequence *sequence, uint64_t now_ns);
/* Adds all sequences, and whom the quarantined ones wait for. */
void decode_moves_audit(const decode_sequence *all, const pd_routers *routers, pd_audit *audit);
