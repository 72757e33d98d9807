#include "router/policy.h"
#include "common/base/clock.h"

#include <math.h>

/* A decode pool without room refuses the lease or evicts; its price says so without excluding it,
 * since the report is older than the lease reply would be. */
static const double NO_ROOM_MS = 1000;
/* Waiting for a place in a full batch: tokens until one of its sequences ends, roughly. */
static const double PLACE_STEPS = 32;
/* Prices this close are equal: smaller differences are the model's noise. */
static const double EQUAL_MS = 0.05;

typedef struct side {
    uint32_t slot;
    uint32_t blocks; /* of the prompt that lie there */
    double queue_ms, own_ms;
} side;

typedef struct sides {
    side at[ROUTER_WORKERS_MAX];
    uint32_t count;
} sides;

double router_policy_queue_ms(const router_worker *worker, uint64_t now_ns)
{
    double since_ms = (double)(now_ns - worker->report_ns) / (double)PD_NS_PER_MS;
    double reported = worker->report.queue_ms - since_ms;
    double queue = (reported > 0 ? reported : 0) + worker->sent_ms;
    return queue > worker->inflight_prefill_ms ? queue : worker->inflight_prefill_ms;
}

static bool is_taken(const router_policy_input *in, uint32_t slot)
{
    return in->taken != NULL && (in->taken[slot / 64] >> (slot % 64) & 1) != 0;
}

static bool prefill_usable(const router_policy_input *in, uint32_t slot)
{
    const router_worker *worker = &in->cluster->workers[slot];
    return router_worker_ready(worker) && worker->hello.role == PD_ROLE_PREFILL &&
           slot != in->avoid_prefill && worker->blocked_ns <= in->now_ns && !is_taken(in, slot) &&
           (worker->hello.queue_max == 0 || worker->inflight_prefill < worker->hello.queue_max);
}

static bool decode_usable(const router_policy_input *in, uint32_t slot)
{
    const router_worker *worker = &in->cluster->workers[slot];
    return router_worker_ready(worker) && worker->hello.role == PD_ROLE_DECODE &&
           slot != in->avoid_decode && worker->blocked_ns <= in->now_ns && !is_taken(in, slot) &&
           (in->too_small[slot / 64] >> (slot % 64) & 1) == 0;
}

static void price_prefill(const router_policy_input *in, side *s)
{
    const router_worker *worker = &in->cluster->workers[s->slot];
    uint32_t block_tokens = in->cluster->config->block_tokens;
    s->blocks = router_index_prefix(in->index, s->slot, in->hashes, in->hashes_count);
    uint32_t cached = s->blocks * block_tokens;
    if (cached >= in->prompt_tokens) /* the last token is always computed: it gives the logits */
        cached = in->prompt_tokens - 1;
    s->queue_ms = router_policy_queue_ms(worker, in->now_ns);
    s->own_ms = pd_cost_prefill_ms(in->cost, in->prompt_tokens - cached, cached);
}

static void price_decode(const router_policy_input *in, side *s)
{
    const router_worker *worker = &in->cluster->workers[s->slot];
    const pd_ledger *ledger = &worker->report.ledger;
    uint32_t block_tokens = in->cluster->config->block_tokens;
    s->blocks = router_index_prefix(in->index, s->slot, in->hashes, in->hashes_count);

    uint32_t running = worker->report.running + worker->report.waiting;
    if (worker->inflight_decode > running)
        running = worker->inflight_decode;
    uint64_t context = (uint64_t)ledger->running * block_tokens;
    if (worker->inflight_context > context)
        context = worker->inflight_context;
    uint32_t batch = running + 1;
    if (worker->hello.max_batch != 0 && batch > worker->hello.max_batch)
        batch = worker->hello.max_batch;
    s->own_ms = pd_cost_decode_step_ms(in->cost, batch, context + in->prompt_tokens);
    s->queue_ms = (running + 1 - batch) * PLACE_STEPS * s->own_ms;

    uint64_t needed = (in->prompt_tokens + (uint64_t)in->max_tokens) / block_tokens + 1 - s->blocks;
    if (needed > (uint64_t)ledger->free + ledger->cached)
        s->queue_ms += NO_ROOM_MS;
}

static void collect(const router_policy_input *in, sides *prefills, sides *decodes)
{
    prefills->count = decodes->count = 0;
    for (uint32_t i = 0; i < in->cluster->slots_used; i++) {
        if (prefill_usable(in, i)) {
            side *s = &prefills->at[prefills->count++];
            s->slot = i;
            price_prefill(in, s);
        } else if (in->need_decode && decode_usable(in, i)) {
            side *s = &decodes->at[decodes->count++];
            s->slot = i;
            price_decode(in, s);
        }
    }
}

static router_terms price_pair(const router_policy_input *in, const side *prefill,
                               const side *decode)
{
    router_terms terms = {.prefill_queue_ms = prefill->queue_ms,
                          .prefill_ms = prefill->own_ms,
                          .prefill_cached_blocks = prefill->blocks};
    if (decode != NULL) {
        uint32_t block_tokens = in->cluster->config->block_tokens;
        uint32_t blocks = (in->prompt_tokens + block_tokens - 1) / block_tokens;
        uint64_t lacking = blocks > decode->blocks ? blocks - decode->blocks : 0;
        double ship = pd_cost_ship_ms(in->cost, lacking * in->cluster->config->block_bytes);
        double least =
            pd_cost_ship_ms(in->cost, 1); /* the last layers have nothing to hide behind */
        terms.ship_ms = fmax(ship - prefill->own_ms, fmin(ship, least));
        terms.decode_queue_ms = decode->queue_ms;
        terms.step_ms = decode->own_ms;
        terms.decode_held_blocks = decode->blocks;
    }
    terms.total_ms = terms.prefill_queue_ms + terms.prefill_ms + terms.ship_ms +
                     terms.decode_queue_ms + terms.step_ms;
    return terms;
}

/* How a pair ranks, lower is better; kv-aware is the price itself. */
static double rank(router_policy_state *state, const router_policy_input *in, const side *prefill,
                   const side *decode, const router_terms *terms, uint32_t number)
{
    const router_worker *workers = in->cluster->workers;
    switch (state->policy) {
    case PD_POLICY_LEAST_LOADED: {
        double load = terms->prefill_queue_ms + terms->decode_queue_ms;
        load += workers[prefill->slot].inflight_prefill;
        if (decode != NULL)
            load += workers[decode->slot].inflight_decode;
        return load;
    }
    case PD_POLICY_ROUND_ROBIN: return number; /* the caller starts at the turn's pair */
    case PD_POLICY_RANDOM: return (double)(pd_random_next(&state->random) >> 11);
    case PD_POLICY_KV_AWARE: break;
    }
    return terms->total_ms;
}

bool router_policy_choose(router_policy_state *state, const router_policy_input *in,
                          router_choice *choice_out)
{
    sides prefills, decodes;
    double best = INFINITY;
    uint32_t equal = 0;
    router_choice choice = {.prefill = ROUTER_NO_WORKER, .decode = ROUTER_NO_WORKER};

    collect(in, &prefills, &decodes);
    uint32_t decodes_count = in->need_decode ? decodes.count : 1;
    uint64_t pairs = (uint64_t)prefills.count * decodes_count;
    for (uint64_t n = 0; n < pairs; n++) {
        /* A turn moves on to the next prefill worker and the next decode worker at once. */
        uint64_t p = (state->turn + n / decodes_count) % prefills.count;
        uint64_t d = (state->turn + n) % decodes_count;
        const side *prefill = &prefills.at[p];
        const side *decode = in->need_decode ? &decodes.at[d] : NULL;
        if (decode != NULL && !router_cluster_linked(in->cluster, prefill->slot, decode->slot))
            continue;
        router_terms terms = price_pair(in, prefill, decode);
        double r = rank(state, in, prefill, decode, &terms, choice.candidates);
        choice.candidates++;
        equal = r < best - EQUAL_MS ? 1 : r <= best + EQUAL_MS ? equal + 1 : equal;
        if (r < best - EQUAL_MS ||
            (r <= best + EQUAL_MS && pd_random_next(&state->random) % equal == 0)) {
            best = r < best ? r : best;
            choice.prefill = prefill->slot;
            choice.decode = decode == NULL ? ROUTER_NO_WORKER : decode->slot;
            choice.terms = terms;
        }
    }
    if (choice.prefill == ROUTER_NO_WORKER)
        return false;
    state->turn++;
    *choice_out = choice;
    return true;
}
