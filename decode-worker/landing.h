#pragma once

/* decode-worker/landing.h - the prompt's blocks on their way here: what comes by the data plane,
 * what does not come, and senders that end. Moves a sequence from bound to landed, or to its end. s
 * may be gone after each call. One thread. */

#include "decode-worker/core.h"

/* Everything is there and good: the router hears it, and a started one joins the batch. */
void decode_landing_all_here(pd_role_core *core, decode_sequence *s, uint64_t now_ns);
/* The sender's last word: it writes no more. Who waits for what has not come hears of it; what has
 * come is checked to the end. */
void decode_landing_sender_done(pd_role_core *core, decode_sequence *s, const char *reason);
/* Asks for what is lost, and fails what waits in vain. At each tick, of a sequence that lives. */
void decode_landing_tick(pd_role_core *core, decode_sequence *s, uint64_t now_ns);

/* As pd_role_ops has them. */
void decode_landing_on_checked(pd_role_core *core, const pd_checked *checked, uint64_t now_ns);
void decode_landing_on_transfer(pd_role_core *core, const pd_transfer_event *event,
                                uint64_t now_ns);
void decode_landing_peer_dead(pd_role_core *core, uint64_t incarnation, uint64_t now_ns);
void decode_landing_peer_gone(pd_role_core *core, const pd_msg_peer_gone *peer, uint64_t now_ns);
