#pragma once

/* prefill-worker/ship_plan.h - which blocks of a prompt leave next.
 *
 * A layer group of a block leaves once its KV is final and the decode worker has said where it
 * goes. While a step runs its groups become final one after the other; as many as the cost model
 * says make one shipment, and at the step's end everything that is final leaves. Blocks that are
 * asked for again leave again, once, in shipments of their own: only their notices say that they
 * are written again, so that whoever has such a notice knows that no other writing of these blocks
 * is to come. Pure. One thread. */

#include "prefill-worker/request.h"

/* False: ill-fitting. Once known they stay. */
bool prefill_ship_targets(prefill_request *request, const pd_msg_targets *targets);
/* A step with item.take tokens of it begins. */
void prefill_ship_step(prefill_request *request, const pd_kv_layout *layout, const pd_cost *cost,
                       double step_ms);
/* Counts the word, and notes what is to be shipped again. One that names nothing new came twice on
 * its way: it is not counted, nor is anything shipped a third time. False: ill-fitting (counted, so
 * that its answer is known as such), or *status_out is PD_E_NOMEM. */
bool prefill_ship_again(prefill_request *request, const pd_msg_ship_again *asked,
                        pd_status *status_out);

/* The next shipment without its peer; false: nothing can leave now. */
bool prefill_ship_next(const prefill_request *request, const pd_kv_layout *layout,
                       pd_shipment *shipment_out);
/* That shipment was taken by the carrier. */
void prefill_ship_posted(prefill_request *request, const pd_kv_layout *layout,
                         const pd_shipment *shipment);
/* Everything has been posted that ever has to be. */
bool prefill_ship_complete(const prefill_request *request);
