#include "router/request_table.h"
#include "common/base/clock.h"
#include "common/base/mem.h"

enum { SLOT_BITS = ROUTER_HANDLE_SLOT_BITS };

pd_status router_requests_create(const router_requests_options *options,
                                 router_requests **requests_out)
{
    uint32_t max = options->config->requests_max;
    router_requests *requests = pd_calloc(1, sizeof *requests + max * sizeof(router_request));
    if (requests == NULL)
        return PD_E_NOMEM;
    requests->o = *options;
    requests->policy =
        (router_policy_state){.policy = options->config->policy, .random = options->seed};
    requests->cost = options->config->cost;
    requests->queue_head = requests->queue_tail = ROUTER_SLOT_NONE;
    requests->free_head = ROUTER_SLOT_NONE;
    requests->due_ns = requests->wake_ns = UINT64_MAX;
    *requests_out = requests;
    return PD_OK;
}

void router_requests_destroy(router_requests *requests)
{
    if (requests == NULL)
        return;
    for (uint32_t i = 0; i < requests->slots_used; i++) {
        pd_free(requests->slots[i].tokens);
        pd_free(requests->slots[i].hashes);
    }
    pd_free(requests);
}

uint32_t router_request_slot(const router_requests *t, const router_request *r)
{
    return (uint32_t)(r - t->slots);
}

router_request *router_request_find(const router_requests *t, router_handle handle)
{
    uint32_t slot = (uint32_t)(handle & ((1u << SLOT_BITS) - 1));
    if (slot >= t->slots_used)
        return NULL;
    const router_request *r = &t->slots[slot];
    bool named = r->state != ROUTER_REQUEST_FREE && r->key.number == handle;
    return named ? (router_request *)(uintptr_t)r : NULL;
}

router_request *router_request_find_key(router_requests *t, const pd_request_key *key)
{
    router_request *r = key->router == t->o.router ? router_request_find(t, key->number) : NULL;
    return r != NULL && r->key.epoch == key->epoch ? r : NULL;
}

router_request *router_request_take(router_requests *t)
{
    uint32_t slot = t->free_head;
    if (slot != ROUTER_SLOT_NONE)
        t->free_head = t->slots[slot].queue_next;
    else if (t->slots_used < t->o.config->requests_max)
        slot = t->slots_used++;
    else
        return NULL;
    router_request *r = &t->slots[slot];
    *r = (router_request){.queue_prev = ROUTER_SLOT_NONE, .queue_next = ROUTER_SLOT_NONE};
    r->key.router = t->o.router;
    r->key.epoch = 1;
    r->key.number = ++t->counter << SLOT_BITS | slot;
    r->prefill = r->decode = r->avoid_prefill = r->avoid_decode = ROUTER_NO_WORKER;
    return r;
}

void router_request_enqueue(router_requests *t, router_request *r)
{
    /* By arrival: one that was placed and refused goes back to where it was. */
    uint32_t slot = router_request_slot(t, r), after = t->queue_tail;
    while (after != ROUTER_SLOT_NONE &&
           t->slots[after].key.number >> SLOT_BITS > r->key.number >> SLOT_BITS)
        after = t->slots[after].queue_prev;
    r->queue_prev = after;
    r->queue_next = after == ROUTER_SLOT_NONE ? t->queue_head : t->slots[after].queue_next;
    if (r->queue_prev == ROUTER_SLOT_NONE)
        t->queue_head = slot;
    else
        t->slots[r->queue_prev].queue_next = slot;
    if (r->queue_next == ROUTER_SLOT_NONE)
        t->queue_tail = slot;
    else
        t->slots[r->queue_next].queue_prev = slot;
    t->queue_count++;
}

void router_request_dequeue(router_requests *t, router_request *r)
{
    if (r->queue_prev == ROUTER_SLOT_NONE)
        t->queue_head = r->queue_next;
    else
        t->slots[r->queue_prev].queue_next = r->queue_next;
    if (r->queue_next == ROUTER_SLOT_NONE)
        t->queue_tail = r->queue_prev;
    else
        t->slots[r->queue_next].queue_prev = r->queue_prev;
    r->queue_prev = r->queue_next = ROUTER_SLOT_NONE;
    t->queue_count--;
}

void router_request_set_due(router_requests *t, router_request *r, uint64_t due_ns)
{
    r->due_ns = due_ns < r->total_due_ns ? due_ns : r->total_due_ns;
    if (r->due_ns < t->due_ns)
        t->due_ns = r->due_ns;
}

/* ---- what workers are charged with ---- */

router_worker *router_request_worker(router_requests *t, uint32_t slot)
{
    return &t->o.cluster->workers[slot];
}

void router_request_charge_prefill(router_requests *t, router_request *r)
{
    router_worker *worker = router_request_worker(t, r->prefill);
    r->charged_prefill = true;
    r->charged_ms = r->terms.prefill_ms;
    worker->inflight_prefill++;
    worker->inflight_prefill_ms += r->charged_ms;
    worker->sent_ms += r->charged_ms;
}

void router_request_discharge_prefill(router_requests *t, router_request *r)
{
    if (!r->charged_prefill)
        return;
    router_worker *worker = router_request_worker(t, r->prefill);
    r->charged_prefill = false;
    worker->inflight_prefill--;
    worker->inflight_prefill_ms -= r->charged_ms;
    if (worker->inflight_prefill == 0)
        worker->inflight_prefill_ms = 0; /* no rounding stays behind */
}

void router_request_charge_decode(router_requests *t, router_request *r)
{
    router_worker *worker = router_request_worker(t, r->decode);
    r->charged_decode = true;
    worker->inflight_decode++;
    worker->inflight_context += r->prompt_tokens;
}

void router_request_discharge_decode(router_requests *t, router_request *r)
{
    if (!r->charged_decode)
        return;
    router_worker *worker = router_request_worker(t, r->decode);
    r->charged_decode = false;
    worker->inflight_decode--;
    worker->inflight_context -= r->prompt_tokens;
    worker->blocked_ns = 0; /* room comes back */
}

void router_request_cancel_at_workers(router_requests *t, const router_request *r)
{
    bool writes = r->prefill_open && r->prefill != ROUTER_NO_WORKER;
    pd_msg_cancel cancel = {.key = r->key, .unwritten = !writes && !r->writer_lost};

    if (writes || (r->prefill_holds && r->prefill != ROUTER_NO_WORKER))
        router_cluster_cancel(t->o.cluster, r->prefill, &cancel);
    if (r->decode_open && r->decode != ROUTER_NO_WORKER)
        router_cluster_cancel(t->o.cluster, r->decode, &cancel);
}

void router_request_leave_workers(router_requests *t, router_request *r)
{
    router_request_discharge_prefill(t, r);
    router_request_discharge_decode(t, r);
    router_request_cancel_at_workers(t, r);
    r->prefill_open = r->prefill_holds = r->decode_open = r->writer_lost = false;
    r->started = r->landed = false;
    r->again = 0;
    r->prefill = r->decode = ROUTER_NO_WORKER;
}

void router_request_block_worker(router_requests *t, uint32_t slot, uint64_t ms, uint64_t now_ns)
{
    if (ms < ROUTER_BLOCKED_MS_MIN)
        ms = ROUTER_BLOCKED_MS_MIN;
    if (ms > ROUTER_BLOCKED_MS_MAX)
        ms = ROUTER_BLOCKED_MS_MAX;
    router_request_worker(t, slot)->blocked_ns = now_ns + ms * PD_NS_PER_MS;
    if (router_request_worker(t, slot)->blocked_ns < t->wake_ns)
        t->wake_ns = router_request_worker(t, slot)->blocked_ns;
}

void router_request_release(router_requests *t, router_request *r)
{
    if (r->next_index > 0) { /* its prompt was worked through, whoever ended it */
        t->o.counters->prompt_tokens += r->prompt_tokens;
        t->o.counters->cached_tokens += r->cached_tokens;
    }
    if (r->state == ROUTER_REQUEST_QUEUED)
        router_request_dequeue(t, r);
    router_request_leave_workers(t, r);
    pd_free(r->tokens);
    pd_free(r->hashes);
    r->tokens = NULL;
    r->hashes = NULL;
    r->state = ROUTER_REQUEST_FREE;
    r->queue_next = t->free_head;
    t->free_head = router_request_slot(t, r);
    t->o.counters->active--;
}
