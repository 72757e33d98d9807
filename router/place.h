#pragma once

/* router/place.h - from the queue to the workers: whom the policy chose is asked for a lease, and
 * then given the prompt.
 *
 * The queue is tried from its head (priority, then arrival). One that cannot be placed does not
 * hold up those behind it: they may need less; nor do
 * suspects that wait for their turn: they are not even tried. The inside of router/request.h. One
 * thread. */

#include "router/retry.h"

/* Until then a suspect waits for a worker without another one: by its distance, not at all (it had
 * run in company), for lost_after, or as long as it takes (UINT64_MAX). */
uint64_t router_place_turn_ends_ns(const router_requests *t, const router_request *r);
/* A suspect (router/retry.h), and at every worker that could take it is another one. */
bool router_place_waits_its_turn(const router_requests *t, const router_request *r,
                                 uint64_t now_ns);
/* PrefillRequest to r->prefill, for r in PREFILLING; held_blocks: what the decode worker guesses. r
 * may be gone, or back in the queue, afterwards. */
void router_place_send_prefill(router_requests *t, router_request *r, uint64_t now_ns);
