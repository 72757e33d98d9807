#pragma once

/* common/worker/prefill_queue.h - prompts waiting for their KV: who gets how many rows of the next
 * step.
 *
 * The oldest prompt is sure of half the budget, so nothing can starve it; the other half goes to
 * the prompts with the fewest tokens left, so a long prompt does not hold up short ones. What one
 * half does not need goes to the other. The items are the caller's, linked in place. Pure: no
 * clock, no I/O. One thread. */

#include "common/base/status.h"
#include "common/cost/cost.h"

#include <stdint.h>

typedef struct pd_prefill_item {
    uint32_t tokens; /* of the prompt */
    uint32_t done;   /* have their KV: computed or taken from the cache */
    bool started;    /* holds its blocks; set by the caller's start function's PD_OK */
    bool parked;     /* waits for something else and keeps its place: passed over. Set by the
                        caller's start function, cleared by the caller */
    uint32_t take;   /* rows in the step just picked */
    /* the queue's */
    struct pd_prefill_item *prev, *next;
    uint64_t order;
    bool queued;
} pd_prefill_item;

typedef struct pd_prefill_queue {
    pd_prefill_item *head, *tail; /* oldest first */
    uint32_t count;
    uint32_t items_max;
    uint64_t order_next;
} pd_prefill_queue;

void pd_prefill_queue_init(pd_prefill_queue *queue, uint32_t items_max);

/* Appends; tokens > done. PD_E_OVERLOAD when items_max wait. */
PD_CHECKED pd_status pd_prefill_queue_push(pd_prefill_queue *queue, pd_prefill_item *item);
/* Takes an item out (done, cancelled, failed); one that is not queued is left alone. */
void pd_prefill_queue_remove(pd_prefill_queue *queue, pd_prefill_item *item);

/* Claims what a prompt needs to start, and may raise item->done by what a cache holds (it stays
 * below tokens). PD_E_OVERLOAD: no room now; it waits. PD_E_AGAIN: it was parked. Must not change
 * the queue. */
typedef pd_status pd_prefill_start_fn(void *ctx, pd_prefill_item *item);

/* Picks the next step: at most items_max items and budget rows (both at least 1), oldest first in
 * items_out, each with take > 0. An item without room is passed over (a few a step), but while the
 * oldest item that is not parked has no room nobody else starts, so that room comes to it. Returns
 * the number of items. */
uint32_t pd_prefill_queue_pick(pd_prefill_queue *queue, uint32_t budget, pd_prefill_start_fn *start,
                               void *ctx, pd_prefill_item **items_out, uint32_t items_max);

/* Predicted milliseconds of what is queued, the rest of started prompts included. */
double pd_prefill_queue_work_ms(const pd_prefill_queue *queue, const pd_cost *cost);
/* Tokens still without KV. */
uint64_t pd_prefill_queue_tokens(const pd_prefill_queue *queue);
