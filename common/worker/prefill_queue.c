#include "common/worker/prefill_queue.h"

#include <stddef.h>

enum { TRIES_IN_VAIN = 16 }; /* longer prompts have no more room than those before them */

void pd_prefill_queue_init(pd_prefill_queue *queue, uint32_t items_max)
{
    *queue = (pd_prefill_queue){.items_max = items_max};
}

pd_status pd_prefill_queue_push(pd_prefill_queue *queue, pd_prefill_item *item)
{
    pd_assert(!item->queued && item->done < item->tokens);
    if (queue->count >= queue->items_max)
        return PD_E_OVERLOAD;
    item->queued = true;
    item->take = 0;
    item->order = queue->order_next++;
    item->next = NULL;
    item->prev = queue->tail;
    if (queue->tail != NULL)
        queue->tail->next = item;
    else
        queue->head = item;
    queue->tail = item;
    queue->count++;
    return PD_OK;
}

void pd_prefill_queue_remove(pd_prefill_queue *queue, pd_prefill_item *item)
{
    if (!item->queued)
        return;
    if (item->prev != NULL)
        item->prev->next = item->next;
    else
        queue->head = item->next;
    if (item->next != NULL)
        item->next->prev = item->prev;
    else
        queue->tail = item->prev;
    item->prev = item->next = NULL;
    item->queued = false;
    queue->count--;
}

static uint32_t left(const pd_prefill_item *item)
{
    return item->tokens - item->done;
}

/* Not yet picked, and after (tokens left, order) of the last one tried: the next in ascending
 * order; those not started only if they may be. A scan an item: a step picks few, and few are tried
 * in vain. */
static pd_prefill_item *next_shortest(const pd_prefill_queue *queue, const pd_prefill_item *oldest,
                                      bool may_start, uint32_t last_left, uint64_t last_order)
{
    pd_prefill_item *best = NULL;

    for (pd_prefill_item *item = queue->head; item != NULL; item = item->next) {
        if (item == oldest || item->take > 0 || item->parked || (!item->started && !may_start))
            continue;
        if (left(item) < last_left || (left(item) == last_left && item->order <= last_order))
            continue;
        if (best == NULL || left(item) < left(best))
            best = item; /* the scan is in order: the older of equals stays */
    }
    return best;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool can_start(pd_prefill_item *item, pd_prefill_start_fn *start, void *ctx)
{
    if (item->started)
        return true;
    if (start(ctx, item) != PD_OK)
        return false;
    pd_assert(item->done < item->tokens);
    item->started = true;
    return true;
}

uint32_t pd_prefill_queue_pick(pd_prefill_queue *queue, uint32_t budget, pd_prefill_start_fn *start,
                               void *ctx, pd_prefill_item **items_out, uint32_t items_max)
{
    pd_prefill_item *oldest = queue->head;
    uint32_t picked = 0;
    bool may_start = false;

    pd_assert(budget > 0 && items_max > 0);
    for (pd_prefill_item *item = queue->head; item != NULL; item = item->next)
        item->take = 0;
    for (; oldest != NULL; oldest = oldest->next) {
        may_start = !oldest->parked && can_start(oldest, start, ctx);
        if (may_start || !oldest->parked)
            break;
    }
    if (oldest == NULL)
        return 0;
    if (may_start) {
        oldest->take = min_u32(left(oldest), (budget + 1) / 2);
        picked = 1;
    }
    uint32_t rows = budget - oldest->take;
    uint32_t last_left = 0;
    uint64_t last_order = 0;
    uint32_t in_vain = 0;
    while (rows > 0 && picked < items_max) {
        pd_prefill_item *item = next_shortest(queue, oldest, may_start, last_left, last_order);
        if (item == NULL)
            break;
        last_left = left(item);
        last_order = item->order;
        if (!can_start(item, start, ctx)) {
            /* the cache cannot have shortened it: nothing was claimed */
            may_start = ++in_vain < TRIES_IN_VAIN;
            continue;
        }
        item->take = min_u32(left(item), rows);
        rows -= item->take;
        picked++;
    }
    if (oldest->take > 0)
        oldest->take += min_u32(rows, left(oldest) - oldest->take);

    uint32_t count = 0;
    for (pd_prefill_item *item = queue->head; item != NULL && count < picked; item = item->next) {
        if (item->take > 0)
            items_out[count++] = item;
    }
    pd_assert(count == picked);
    return count;
}

double pd_prefill_queue_work_ms(const pd_prefill_queue *queue, const pd_cost *cost)
{
    double ms = 0;

    for (const pd_prefill_item *item = queue->head; item != NULL; item = item->next)
        ms += pd_cost_prefill_ms(cost, left(item), item->done);
    return ms;
}

uint64_t pd_prefill_queue_tokens(const pd_prefill_queue *queue)
{
    uint64_t tokens = 0;

    for (const pd_prefill_item *item = queue->head; item != NULL; item = item->next)
        tokens += left(item);
    return tokens;
}
