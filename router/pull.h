#pragma once

/* router/pull.h - leading blocks of a prompt that a decode worker holds and the prefill worker
 * lacks: fetched instead of computed, where that is predicted to be cheaper.
 *
 * The usual case is the next turn of a conversation: the answer's blocks lie where it was decoded.
 * The prefill worker is told whom to expect (PrefillRequest.pull), says in PrefillStarted where the
 * blocks go, and the source gets a ShipRequest. Whatever fails, the prefill worker computes.
 *
 * The inside of router/request.h. One thread. */

#include "router/request_table.h"

/* r has just been placed: sets r->pull, or not. */
void router_pull_choose(const router_requests *t, router_request *r);
/* For its prefill request. */
void router_pull_fill(router_requests *t, const router_request *r, pd_msg_prefill_request *m);
/* Predicted and allowed time, 0 without a pull. */
double router_pull_ms(const router_core_config *config, const router_request *r);
void router_pull_on_started(router_requests *t, router_request *r,
                            const pd_msg_prefill_started *started);
/* True: the message was about a pull of the request. */
bool router_pull_on_done(router_requests *t, uint32_t slot, const pd_msg_ship_done *done);
void router_pull_on_landed(router_requests *t, router_request *r);
void router_pull_on_refetch(router_requests *t, router_request *r, const pd_msg_refetch *refetch);
/* Nobody works on r any more: a last word that still comes is passed on. */
void router_pull_left(router_requests *t, const router_request *r);
/* The worker in slot has blocks in quarantine for a pull that is over: its source is asked for its
 * last word again; where none is owed, the worker is told that nobody writes. */
void router_pull_ask_again(router_requests *t, uint32_t slot, const pd_request_key *key);
/* The worker in r->pull.slot is gone. */
void router_pull_on_gone(router_requests *t, router_request *r, const char *why);
