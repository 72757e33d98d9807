#include "router/request_table.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "router/patience.h"
#include "router/pull.h"

#include <string.h>

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
    requests->random = pd_mix64(options->seed);
    requests->budget = max;
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
    bool named = r->state != ROUTER_REQUEST_NONE && r->key.number == handle;
    return named ? (router_request *)(uintptr_t)r : NULL;
}

router_request *router_request_find_key(router_requests *t, const pd_request_key *key)
{
    router_request *r = key->router == t->o.router ? router_request_find(t, key->number) : NULL;
    return r != NULL && r->key.epoch == key->epoch ? r : NULL;
}

router_request *router_request_find_moving(router_requests *t, const pd_request_key *key)
{
    router_request *r = key->router == t->o.router ? router_request_find(t, key->number) : NULL;
    bool moves = r != NULL && r->state == ROUTER_REQUEST_MOVING && r->move.epoch == key->epoch;
    return moves ? r : NULL;
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
    r->key.epoch = r->epoch_last = 1;
    r->key.number = ++t->counter << SLOT_BITS | slot;
    r->prefill = r->decode = r->avoid_prefill = r->avoid_decode = ROUTER_NO_WORKER;
    r->pull.slot = r->move.slot = ROUTER_NO_WORKER;
    return r;
}

void router_request_put_back(router_requests *t, router_request *r)
{
    pd_assert(r->state == ROUTER_REQUEST_NONE);
    pd_free(r->tokens);
    pd_free(r->hashes);
    r->tokens = NULL;
    r->hashes = NULL;
    r->queue_next = t->free_head;
    t->free_head = router_request_slot(t, r);
}

void router_request_step(router_requests *t, router_request *r, router_event event)
{
    r->state = router_lifecycle_next(t->transitions, r->state, event);
}

/* Whether a waits behind b. */
static bool behind(const router_request *a, const router_request *b)
{
    if (a->priority != b->priority)
        return a->priority < b->priority;
    return a->key.number >> SLOT_BITS > b->key.number >> SLOT_BITS;
}

void router_request_enqueue(router_requests *t, router_request *r)
{
    uint32_t slot = router_request_slot(t, r), after = t->queue_tail;
    while (after != ROUTER_SLOT_NONE && behind(&t->slots[after], r))
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

void router_request_wake_at(router_requests *t, uint64_t when_ns)
{
    if (when_ns < t->wake_ns)
        t->wake_ns = when_ns;
}

/* ---- tokens ---- */

bool router_again_may(const router_again *again, const pd_msg_refetch *refetch)
{
    uint64_t end = (uint64_t)refetch->first_block + refetch->count;
    for (uint32_t i = 0; i < again->count; i++) {
        if (again->asked[i].group == refetch->group && again->asked[i].first < end &&
            (uint64_t)again->asked[i].first + again->asked[i].count > refetch->first_block)
            return false;
    }
    return again->count < ROUTER_AGAIN_MAX;
}

void router_again_sent(router_again *again, const pd_msg_refetch *refetch)
{
    uint32_t i = again->count++;
    again->asked[i].group = refetch->group;
    again->asked[i].first = refetch->first_block;
    again->asked[i].count = refetch->count;
}

uint32_t router_request_base_tokens(const router_request *r)
{
    return r->prompt_tokens + r->base_index;
}

uint32_t router_request_left(const router_request *r)
{
    return r->max_tokens - r->base_index;
}

pd_status router_request_copy_in(router_request *r, const router_request_in *in)
{
    r->tokens_size = in->tokens_count + 1;
    r->hashes_size = in->hashes_count + 1;
    r->tokens = pd_malloc((size_t)r->tokens_size * sizeof *r->tokens);
    r->hashes = pd_malloc((size_t)r->hashes_size * sizeof *r->hashes);
    if (r->tokens == NULL || r->hashes == NULL)
        return PD_E_NOMEM;
    memcpy(r->tokens, in->tokens, in->tokens_count * sizeof *r->tokens);
    if (in->hashes_count > 0)
        memcpy(r->hashes, in->hashes, in->hashes_count * sizeof *r->hashes);
    memcpy(r->id, in->id, sizeof r->id);
    r->id[sizeof r->id - 1] = '\0';
    r->prompt_tokens = in->tokens_count;
    r->hashes_count = in->hashes_count;
    r->hash_root = in->hash_root;
    r->priority = in->priority;
    r->sampling = in->sampling;
    r->max_tokens = in->max_tokens;
    r->end_tokens_count = in->end_tokens_count;
    if (in->end_tokens_count > 0)
        memcpy(r->end_tokens, in->end_tokens, in->end_tokens_count * sizeof *r->end_tokens);
    return PD_OK;
}

pd_status router_request_keep_token(router_request *r, uint32_t token)
{
    uint32_t count = r->prompt_tokens + r->next_index;
    if (count == r->tokens_size) {
        uint32_t most = r->prompt_tokens + r->max_tokens;
        uint32_t size = count + 64 + r->next_index;
        size = size < most ? size : most;
        uint32_t *tokens = pd_realloc(r->tokens, (size_t)size * sizeof *tokens);
        if (tokens == NULL)
            return PD_E_NOMEM;
        r->tokens = tokens;
        r->tokens_size = size;
    }
    r->tokens[count] = token;
    return PD_OK;
}

pd_status router_request_extend_hashes(const router_requests *t, router_request *r, uint32_t count)
{
    uint32_t block_tokens = t->o.config->block_tokens;
    uint32_t full = count / block_tokens;
    pd_assert(count <= r->prompt_tokens + r->next_index);
    if (full > r->hashes_size) {
        pd_hash128 *hashes = pd_realloc(r->hashes, (size_t)full * sizeof *hashes);
        if (hashes == NULL)
            return PD_E_NOMEM;
        r->hashes = hashes;
        r->hashes_size = full;
    }
    while (r->hashes_count < full) {
        uint32_t i = r->hashes_count++;
        pd_hash128 before = i == 0 ? r->hash_root : r->hashes[i - 1];
        r->hashes[i] =
            pd_prefix_hash_next(before, r->tokens + (size_t)i * block_tokens, block_tokens);
    }
    return PD_OK;
}

/* ---- workers ---- */

bool router_request_send(router_requests *t, uint32_t slot, const pd_message *message)
{
    return t->o.sink->send(t->o.sink->ctx, router_request_worker(t, slot)->identity, message);
}

bool router_request_send_start(router_requests *t, router_request *r, uint64_t landing_ns,
                               uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_DECODE_START};
    pd_msg_decode_start *m = &message.decode_start;
    m->key = r->key;
    memcpy(m->id, r->id, sizeof m->id);
    m->tokens = r->tokens;
    m->tokens_count = r->prompt_tokens + r->next_index;
    m->prompt_tokens = r->prompt_tokens;
    m->sampling = r->sampling;
    m->end_tokens = r->end_tokens;
    m->end_tokens_count = r->end_tokens_count;
    m->max_tokens = r->max_tokens;
    m->landing_ms = router_patience_ms(landing_ns);
    r->start_sent_ns = now_ns;
    return router_request_send(t, r->decode, &message);
}

bool router_request_another_ready(const router_requests *t, pd_role role, uint32_t slot)
{
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        const router_worker *worker = &t->o.cluster->workers[i];
        if (i != slot && router_worker_ready(worker) && worker->hello.role == role)
            return true;
    }
    return false;
}

router_worker *router_request_worker(router_requests *t, uint32_t slot)
{
    return &t->o.cluster->workers[slot];
}

/* A suspect comes to the worker, or leaves it. */
static void suspect_comes(router_requests *t, uint32_t slot)
{
    t->suspects_at[slot]++;
}

static void suspect_leaves(router_requests *t, uint32_t slot)
{
    pd_assert(t->suspects_at[slot] > 0);
    if (--t->suspects_at[slot] == 0)
        router_request_wake_at(t, t->pumped_ns + 1); /* another one may wait for its turn there */
}

void router_request_set_killed(router_requests *t, router_request *r, uint32_t count)
{
    bool was = r->killed_count > 0, is = count > 0;
    void (*tell)(router_requests *, uint32_t) = is ? suspect_comes : suspect_leaves;
    r->killed_count = count;
    if (!is) {
        r->distance = ROUTER_DISTANCE_IF_ROOM;
        memset(r->killed_at, 0, sizeof r->killed_at);
    }
    if (was != is && r->charged_prefill)
        tell(t, r->prefill);
    if (was != is && r->charged_decode)
        tell(t, r->decode);
}

bool router_request_suspect_at(const router_requests *t, uint32_t slot, uint64_t now_ns)
{
    return t->suspects_at[slot] > 0 || t->suspect_until_ns[slot] > now_ns;
}

static void take(uint64_t *taken, uint32_t slot)
{
    taken[slot / 64] |= 1ull << slot % 64;
}

void router_request_suspects_apart(const router_requests *t, uint64_t now_ns, uint64_t *taken)
{
    for (uint32_t i = 0; i < t->o.cluster->slots_used; i++) {
        if (t->apart_until_ns[i] > now_ns)
            take(taken, i);
    }
    for (uint32_t i = 0; i < t->slots_used; i++) {
        const router_request *r = &t->slots[i];
        if (r->state == ROUTER_REQUEST_NONE || r->distance != ROUTER_DISTANCE_ALWAYS)
            continue;
        if (r->charged_prefill)
            take(taken, r->prefill);
        if (r->charged_decode)
            take(taken, r->decode);
    }
}

void router_request_leave_suspect(router_requests *t, const router_request *r, uint32_t slot,
                                  uint64_t until_ns)
{
    if (t->suspect_until_ns[slot] < until_ns)
        t->suspect_until_ns[slot] = until_ns;
    if (r->distance == ROUTER_DISTANCE_ALWAYS && t->apart_until_ns[slot] < until_ns)
        t->apart_until_ns[slot] = until_ns;
    router_request_wake_at(t, until_ns);
}

void router_request_charge_prefill(router_requests *t, router_request *r)
{
    router_worker *worker = router_request_worker(t, r->prefill);
    if (r->killed_count > 0)
        suspect_comes(t, r->prefill);
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
    if (r->killed_count > 0)
        suspect_leaves(t, r->prefill);
    worker->inflight_prefill--;
    worker->inflight_prefill_ms -= r->charged_ms;
    if (worker->inflight_prefill == 0)
        worker->inflight_prefill_ms = 0; /* no rounding stays behind */
}

void router_request_charge_decode(router_requests *t, router_request *r)
{
    router_worker *worker = router_request_worker(t, r->decode);
    if (r->killed_count > 0)
        suspect_comes(t, r->decode);
    r->charged_decode = true;
    worker->inflight_decode++;
    worker->inflight_context += r->prompt_tokens;
}

void router_request_discharge_decode(router_requests *t, router_request *r)
{
    if (!r->charged_decode)
        return;
    router_worker *worker = router_request_worker(t, r->decode);
    if (r->killed_count > 0)
        suspect_leaves(t, r->decode);
    r->charged_decode = false;
    worker->inflight_decode--;
    worker->inflight_context -= r->prompt_tokens;
    worker->blocked_ns = 0; /* room comes back */
}

static void cancel_move(router_requests *t, const router_request *r)
{
    const router_move *move = &r->move;
    pd_msg_cancel cancel = {.key = r->key,
                            .unwritten = !(move->asked && (move->open || move->may_land))};
    cancel.key.epoch = move->epoch;
    router_cluster_cancel(t->o.cluster, move->slot, &cancel);
    if (move->asked && r->decode != ROUTER_NO_WORKER)
        router_cluster_cancel(t->o.cluster, r->decode, &cancel);
}

static router_presence presence_at_prefill(const router_request *r, uint64_t now_ns)
{
    double queue_ns = r->terms.prefill_queue_ms * (double)PD_NS_PER_MS;
    if (!r->prefill_open)
        return ROUTER_ABSENT;
    if (r->state == ROUTER_REQUEST_LANDING)
        return ROUTER_MAY_COMPUTE;
    if (r->state != ROUTER_REQUEST_PREFILLING)
        return ROUTER_ABSENT;
    if (r->started)
        return ROUTER_COMPUTES;
    return (double)(now_ns - r->prefill_sent_ns) >= queue_ns ? ROUTER_MAY_COMPUTE : ROUTER_ABSENT;
}

static router_presence presence_at_decode(const router_request *r)
{
    if (r->state == ROUTER_REQUEST_DECODING)
        return ROUTER_COMPUTES;
    if (r->state != ROUTER_REQUEST_LANDING)
        return ROUTER_ABSENT;
    bool shipped = !r->prefill_open && r->prefill != ROUTER_NO_WORKER;
    return shipped ? ROUTER_COMPUTES : ROUTER_MAY_COMPUTE;
}

router_presence router_request_presence(const router_request *r, uint32_t slot, uint64_t now_ns)
{
    if (slot == ROUTER_NO_WORKER)
        return ROUTER_ABSENT;
    return r->prefill == slot  ? presence_at_prefill(r, now_ns)
           : r->decode == slot ? presence_at_decode(r)
                               : ROUTER_ABSENT;
}

void router_request_cancel_at_workers(router_requests *t, const router_request *r, bool keep)
{
    bool writes = r->prefill_open && r->prefill != ROUTER_NO_WORKER;
    bool holds = r->prefill_holds && r->prefill != ROUTER_NO_WORKER;
    bool decodes = r->decode_open && r->decode != ROUTER_NO_WORKER;
    pd_msg_cancel cancel = {.key = r->key, .unwritten = !writes && !r->writer_lost, .keep = keep};

    if (r->move.slot != ROUTER_NO_WORKER)
        cancel_move(t, r);
    if (writes || holds) { /* to a prefill worker writes who it pulls from */
        pd_msg_cancel ends = cancel;
        ends.unwritten = !r->pull.open && !r->pull.may_land;
        router_cluster_cancel(t->o.cluster, r->prefill, &ends);
    }
    if (decodes)
        router_cluster_cancel(t->o.cluster, r->decode, &cancel);
    /* One that is the decode worker too has heard it. */
    if (r->pull.slot != ROUTER_NO_WORKER && (r->pull.open || r->pull.holds) &&
        !(decodes && r->pull.slot == r->decode))
        router_cluster_cancel(t->o.cluster, r->pull.slot, &cancel);
}

/* What a suspect leaves before its end may die of it yet, and take the next suspect for the cause.
 */
static void keep_free_of_suspects(router_requests *t, const router_request *r)
{
    uint32_t slot = r->charged_prefill && r->prefill_open ? r->prefill
                    : r->charged_decode && presence_at_decode(r) == ROUTER_COMPUTES
                        ? r->decode
                        : ROUTER_NO_WORKER;
    if (r->killed_count == 0 || slot == ROUTER_NO_WORKER)
        return;
    router_request_leave_suspect(t, r, slot, t->pumped_ns + t->o.config->lost_after_ns);
}

void router_request_leave_workers(router_requests *t, router_request *r, bool keep)
{
    keep_free_of_suspects(t, r);
    router_request_discharge_prefill(t, r);
    router_request_discharge_decode(t, r);
    router_request_cancel_at_workers(t, r, keep);
    router_pull_left(t, r);
    r->prefill_open = r->prefill_holds = r->decode_open = r->writer_lost = false;
    r->started = r->landed = false;
    r->again.count = 0;
    r->prefill = r->decode = ROUTER_NO_WORKER;
    r->pull = (router_pull){.slot = ROUTER_NO_WORKER};
    r->move = (router_move){.slot = ROUTER_NO_WORKER};
    r->missed_prefill = r->missed_decode = r->missed_move = r->unstarted = 0;
}

void router_request_block_worker(router_requests *t, uint32_t slot, uint64_t ms, uint64_t now_ns)
{
    if (ms < ROUTER_BLOCKED_MS_MIN)
        ms = ROUTER_BLOCKED_MS_MIN;
    if (ms > ROUTER_BLOCKED_MS_MAX)
        ms = ROUTER_BLOCKED_MS_MAX;
    router_request_worker(t, slot)->blocked_ns = now_ns + ms * PD_NS_PER_MS;
    router_request_wake_at(t, router_request_worker(t, slot)->blocked_ns);
}

void router_request_release(router_requests *t, router_request *r, router_event event)
{
    if (r->next_index > 0) { /* its prompt was worked through, whoever ended it */
        t->o.counters->prompt_tokens += r->prompt_tokens;
        t->o.counters->cached_tokens += r->cached_tokens;
    }
    if (r->state == ROUTER_REQUEST_QUEUED)
        router_request_dequeue(t, r);
    router_request_leave_workers(t, r, false);
    router_request_step(t, r, event);
    router_request_put_back(t, r);
    t->o.counters->active--;
}
