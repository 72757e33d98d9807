#include "deploy/simulate/events.h"

#include "common/base/mem.h"

static bool before(const sim_event *left, const sim_event *right)
{
    if (left->at_ns != right->at_ns)
        return left->at_ns < right->at_ns;
    if (left->first_ns != right->first_ns)
        return left->first_ns < right->first_ns;
    return left->order < right->order;
}

static void swap(sim_event *left, sim_event *right)
{
    sim_event held = *left;
    *left = *right;
    *right = held;
}

pd_status sim_events_push(sim_events *events, sim_event event)
{
    if (events->count == events->size) {
        size_t size = events->size == 0 ? 256 : events->size * 2;
        sim_event *heap = NULL;
        if (size > SIM_EVENTS_MAX) {
            pd_free(event.bytes);
            return PD_E_OVERLOAD;
        }
        heap = pd_realloc(events->heap, size * sizeof(*heap));
        if (heap == NULL) {
            pd_free(event.bytes);
            return PD_E_NOMEM;
        }
        events->heap = heap;
        events->size = size;
    }
    if (event.order == 0) {
        event.first_ns = event.at_ns;
        event.order = ++events->order_next;
    }
    size_t at = events->count++;
    events->heap[at] = event;
    while (at > 0 && before(&events->heap[at], &events->heap[(at - 1) / 2])) {
        swap(&events->heap[at], &events->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    return PD_OK;
}

bool sim_events_pop(sim_events *events, sim_event *event_out)
{
    if (events->count == 0)
        return false;
    *event_out = events->heap[0];
    events->heap[0] = events->heap[--events->count];
    for (size_t at = 0;;) {
        size_t least = at;
        for (size_t child = 2 * at + 1; child <= 2 * at + 2; child++)
            if (child < events->count && before(&events->heap[child], &events->heap[least]))
                least = child;
        if (least == at)
            return true;
        swap(&events->heap[at], &events->heap[least]);
        at = least;
    }
}

void sim_events_fini(sim_events *events)
{
    for (size_t i = 0; i < events->count; i++)
        pd_free(events->heap[i].bytes);
    pd_free(events->heap);
    *events = (sim_events){0};
}
