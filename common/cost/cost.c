#include "common/cost/cost.h"

#include <math.h>

/* Weight of a new observation against all before it; the first ones count more, so that a cold
 * model is right after a few requests. */
static double weight(uint64_t seen)
{
    double fresh = 1.0 / (double)(seen + 1);
    return fresh > 0.05 ? fresh : 0.05;
}

void pd_cost_init(pd_cost *cost)
{
    /* a small model on one CPU core: right within a factor of a few until measured */
    *cost = (pd_cost){
        .prefill_base_ms = 2.0,
        .prefill_token_ms = 1.0,
        .prefill_token_context_ms = 1e-4,
        .decode_base_ms = 4.0,
        .decode_sequence_ms = 0.5,
        .decode_context_ms = 5e-4,
        .ship_base_ms = 0.3,
        .ship_byte_ms = 1e-6, /* 1 GB/s */
    };
}

double pd_cost_prefill_ms(const pd_cost *cost, uint32_t new_tokens, uint32_t cached_tokens)
{
    double new_count = new_tokens;
    if (new_tokens == 0)
        return 0;
    return cost->prefill_base_ms + new_count * cost->prefill_token_ms +
           new_count * (cached_tokens + new_count / 2) * cost->prefill_token_context_ms;
}

double pd_cost_decode_step_ms(const pd_cost *cost, uint32_t batch, uint64_t context_tokens)
{
    if (batch == 0)
        return 0;
    return cost->decode_base_ms + batch * cost->decode_sequence_ms +
           (double)context_tokens * cost->decode_context_ms;
}

double pd_cost_ship_ms(const pd_cost *cost, uint64_t bytes)
{
    return bytes == 0 ? 0 : cost->ship_base_ms + (double)bytes * cost->ship_byte_ms;
}

/* A step that long does not notice what its shipments cost: leaving early is then worth it even if
 * the link turns out to be much slower than it was thought to be. */
static const double FIXED_SHARE_FREE = 0.01;

/* When the last block has landed, from the step's beginning: shipment after shipment on one link,
 * none before its groups are computed. With it the fixed cost of each shipment. */
static double ship_price_ms(const pd_cost *cost, uint32_t groups, double compute_ms, uint64_t bytes,
                            uint32_t batch)
{
    double group_compute_ms = compute_ms / groups;
    double group_wire_ms = (double)bytes / groups * cost->ship_byte_ms;
    double link_ms = 0, fixed_ms = 0;

    for (uint32_t from = 0; from < groups; from += batch) {
        uint32_t end = groups - from < batch ? groups : from + batch;
        double ready_ms = end * group_compute_ms;
        link_ms = (link_ms > ready_ms ? link_ms : ready_ms) + cost->ship_base_ms +
                  (end - from) * group_wire_ms;
        fixed_ms += cost->ship_base_ms;
    }
    return link_ms + fixed_ms;
}

/* As many shipments as the step does not notice. */
static uint32_t free_batch(const pd_cost *cost, uint32_t groups, double compute_ms)
{
    double shipments = compute_ms * FIXED_SHARE_FREE / cost->ship_base_ms;

    if (!(shipments < groups)) /* not even when the fixed cost is 0 */
        return 1;
    return shipments < 1 ? groups : (groups + (uint32_t)shipments - 1) / (uint32_t)shipments;
}

uint32_t pd_cost_ship_groups(const pd_cost *cost, uint32_t groups, double compute_ms,
                             uint64_t bytes)
{
    uint32_t best = groups;

    if (groups <= 1 || bytes == 0)
        return groups;
    double best_ms = ship_price_ms(cost, groups, compute_ms, bytes, groups);
    for (uint32_t batch = groups - 1; batch > 0; batch--) {
        double ms = ship_price_ms(cost, groups, compute_ms, bytes, batch);
        if (ms < best_ms) {
            best = batch;
            best_ms = ms;
        }
    }
    uint32_t unnoticed = free_batch(cost, groups, compute_ms);
    return unnoticed < best ? unnoticed : best;
}

uint32_t pd_cost_overlap_tokens(const pd_cost *cost, uint32_t groups, uint64_t token_bytes,
                                uint32_t tokens_max)
{
    uint32_t low = 1, high = tokens_max + 1;

    /* Longer prompts gain more: the first that gains is found by halving. */
    while (low < high) {
        uint32_t tokens = low + (high - low) / 2;
        if (pd_cost_ship_groups(cost, groups, pd_cost_prefill_ms(cost, tokens, 0),
                                tokens * token_bytes) < groups)
            high = tokens;
        else
            low = tokens + 1;
    }
    return low > tokens_max ? 0 : low;
}

/* The factor by which coefficients move: a part of the way to measured / predicted, which counts
 * as at most times and at least 1 / times. */
static double correction(double predicted_ms, double ms, double part, double times)
{
    if (!isfinite(ms) || ms <= 0 || predicted_ms <= 0)
        return 1;
    double ratio = ms / predicted_ms;
    ratio = ratio < 1 / times ? 1 / times : ratio > times ? times : ratio;
    return 1 + part * (ratio - 1);
}

void pd_cost_observe_prefill(pd_cost *cost, uint32_t new_tokens, uint32_t cached_tokens, double ms)
{
    double predicted_ms = pd_cost_prefill_ms(cost, new_tokens, cached_tokens);
    double factor = correction(predicted_ms, ms, weight(cost->prefill_seen++), 4);
    cost->prefill_base_ms *= factor;
    cost->prefill_token_ms *= factor;
    cost->prefill_token_context_ms *= factor;
}

void pd_cost_observe_decode(pd_cost *cost, uint32_t batch, uint64_t context_tokens, double ms)
{
    double predicted_ms = pd_cost_decode_step_ms(cost, batch, context_tokens);
    double factor = correction(predicted_ms, ms, weight(cost->decode_seen++), 4);
    cost->decode_base_ms *= factor;
    cost->decode_sequence_ms *= factor;
    cost->decode_context_ms *= factor;
}

/* A link's rate changes at once, by a lot, and there are few shipments to learn it from. */
static const double SHIP_WEIGHT_LEAST = 0.15;
/* From so many bytes on what takes long is the link's rate, below it is the fixed cost: that is
 * posting, a notice and a check, much the same everywhere, and grows with no link. */
static const uint64_t SHIP_RATE_BYTES = 128 << 10;
static const double SHIP_BASE_MS_MOST = 1;

void pd_cost_observe_ship(pd_cost *cost, uint64_t bytes, double ms)
{
    double base_ms = cost->ship_base_ms, rest_ms = (double)bytes * cost->ship_byte_ms;
    double part = fmax(weight(cost->ship_seen++), SHIP_WEIGHT_LEAST);

    if (!isfinite(ms) || ms <= 0 || bytes == 0)
        return;
    if (bytes >= SHIP_RATE_BYTES) {
        cost->ship_byte_ms *= correction(rest_ms, fmax(ms - base_ms, rest_ms / 8), part, 8);
        return;
    }
    base_ms *= correction(base_ms, fmax(ms - rest_ms, base_ms / 8), part, 8);
    cost->ship_base_ms = fmin(base_ms, SHIP_BASE_MS_MOST);
}
