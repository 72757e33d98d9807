#pragma once

/* router/move.h - a sequence that its decode worker has no room for.
 *
 * The worker waited for room before it said so (Suspended), and waits for the router alone now. So
 * one of two things happens, by predicted cost: the sequence moves with its KV to another decode
 * worker that has room for all of it, or it gives way: its full blocks stay as cache, and it is
 * computed again from its tokens when its turn comes. Giving way needs nobody's help, so there is
 * no deadlock; it is the answer to a move that fails for want of another worker.
 *
 * While a sequence moves it still belongs to the old worker, under its old key; only when the new
 * one has it all (Landed) does it change hands. A failed move costs nothing but time.
 *
 * The inside of router/request.h. One thread. */

#include "router/retry.h"

void router_move_on_suspended(router_requests *t, router_request *r,
                              const pd_msg_suspended *suspended, uint64_t now_ns);
/* A token came, or time passed: decides when all tokens that the worker sent are there. r may be
 * gone afterwards. */
void router_move_decide(router_requests *t, router_request *r, uint64_t now_ns);
/* The deadline of MOVING or SUSPENDED has passed. r may be gone afterwards. */
void router_move_expired(router_requests *t, router_request *r, uint64_t now_ns);

/* Messages whose key is the one where r moves to (router_request_find_moving). */
void router_move_on_lease(router_requests *t, router_request *r, uint32_t slot,
                          const pd_msg_lease_reply *reply, uint64_t now_ns);
void router_move_on_landed(router_requests *t, router_request *r, uint32_t slot, uint64_t now_ns);
void router_move_on_refetch(router_requests *t, router_request *r, uint32_t slot,
                            const pd_msg_refetch *refetch, uint64_t now_ns);
void router_move_on_done(router_requests *t, router_request *r, uint32_t slot,
                         const pd_msg_ship_done *done, uint64_t now_ns);
/* The move is off (its target is gone, failed, or has no room): r stands still as before, and
 * decides anew. r may be gone afterwards. */
void router_move_failed(router_requests *t, router_request *r, const char *why, uint64_t now_ns);
