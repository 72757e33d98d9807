#include "deploy/simulate/plan.h"

#include "common/base/clock.h"
#include "common/base/hash.h"

#include <stdio.h>

static uint32_t among(uint64_t *random, const uint32_t *values, uint32_t count)
{
    return values[pd_random_next(random) % count];
}
#define AMONG(random, ...)                                                                         \
    among((random), (const uint32_t[]){__VA_ARGS__},                                               \
          sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

#define HARMLESS (1u << SIM_FAULT_HANG_UP | 1u << SIM_FAULT_SHORT)

bool sim_plan_is_calm(const sim_plan *plan)
{
    return (plan->allowed & ~HARMLESS) == 0;
}

bool sim_plan_is_only_slow(const sim_plan *plan)
{
    return (plan->allowed & ~HARMLESS) == 1u << SIM_FAULT_SLOW_LINK;
}

/* One run in five, or each in which nothing else goes wrong. Half of them are slow for good, the
 * others become slow, and may become fast again, while requests are under way. */
static void draw_slow_links(uint64_t *random, sim_plan *plan)
{
    uint32_t factor = AMONG(random, 50, 200, 1000, 2000, 3000);
    bool some = AMONG(random, 1, 0, 0, 0, 0) != 0, for_good = AMONG(random, 0, 1) != 0;
    bool between = AMONG(random, 0, 0, 1) != 0;
    uint64_t from_ns = AMONG(random, 100, 500, 1000, 2000) * PD_NS_PER_MS;
    uint64_t for_ns = AMONG(random, 500, 2000, 10000, 600000) * PD_NS_PER_MS;

    if ((plan->allowed >> SIM_FAULT_SLOW_LINK & 1) == 0 || (!some && !sim_plan_is_only_slow(plan)))
        return;
    plan->slow_factor = factor;
    plan->slow_between_hosts = between && plan->two_hosts;
    plan->slow_from_ns = for_good ? 0 : from_ns;
    plan->slow_for_ns = for_good ? UINT64_MAX / 2 : for_ns;
}

void sim_plan_draw(uint64_t seed, uint32_t allowed, sim_plan *plan_out)
{
    uint64_t random = pd_mix64(seed);
    pd_model_shape shape = {.layers = 4, .kv_heads = 2, .head_dim = 8};

    sim_plan plan = {
        .seed = seed,
        .routers = AMONG(&random, 2, 2, 2, 3),
        .prefill = AMONG(&random, 2, 2, 2, 3),
        .decode = AMONG(&random, 2, 2, 2, 3),
        .requests = AMONG(&random, 30, 30, 40, 60),
        .chunk_tokens = AMONG(&random, 16, 64, 100, 256),
        .max_batch = AMONG(&random, 1, 2, 8, 16),
        .queue_max = AMONG(&random, 4, 16, 64),
        .context_max = 400,
        .prefix_cache = AMONG(&random, 0, 1, 1, 1) != 0,
        .seals = AMONG(&random, 0, 1, 1, 1) != 0,
        .gap_ms = AMONG(&random, 5, 30, 60, 120),
        .late = AMONG(&random, 0, 1, 20) / 100.0,
        .lose = AMONG(&random, 0, 0, 1, 10) / 1000.0,
        .duplicate = AMONG(&random, 0, 0, 1, 10) / 1000.0,
        .reorder = AMONG(&random, 0, 0, 1, 10) / 1000.0,
        .policy = (pd_router_policy)AMONG(&random, PD_POLICY_KV_AWARE, PD_POLICY_KV_AWARE,
                                          PD_POLICY_LEAST_LOADED, PD_POLICY_ROUND_ROBIN,
                                          PD_POLICY_RANDOM),
        .allowed = allowed,
        .faults = AMONG(&random, 12, 14, 18, 24),
        .two_hosts = AMONG(&random, 0, 1) != 0,
        .tokens_late_ns = AMONG(&random, 0, 0, 40, 400) * PD_NS_PER_MS,
        .total_ns = AMONG(&random, 60, 60, 60, 60, 3) * PD_NS_PER_S,
    };
    /* Two workers of a role can be all that is needed: one alone shows another side. */
    if (AMONG(&random, 0, 0, 1) != 0) {
        plan.prefill = AMONG(&random, 1, 3);
        plan.decode = 4 - plan.prefill;
    }
    plan.lose *= allowed >> SIM_FAULT_LOSE & 1;
    plan.duplicate *= allowed >> SIM_FAULT_DUPLICATE & 1;
    plan.reorder *= allowed >> SIM_FAULT_REORDER & 1;
    pd_kv_layout_options options = {
        .dtype = PD_F16,
        .block_tokens = AMONG(&random, 16, 16, 32),
        .group_layers = AMONG(&random, 1, 2, 3, 4),
        .memory_bytes = 1u << 30,
        .blocks_max = AMONG(&random, 26, 40, 80, 300),
    };
    pd_status status = pd_kv_layout_make(&shape, &options, &plan.layout);
    pd_assert(status == PD_OK);
    draw_slow_links(&random, &plan);
    plan.links = (sim_links)AMONG(&random, SIM_LINKS_MEMORY, SIM_LINKS_MIXED, SIM_LINKS_MIXED,
                                  SIM_LINKS_MESSAGES, SIM_LINKS_MESSAGES);
    plan.socket_bytes = AMONG(&random, 8, 64, 512) << 10;
    plan.speculates = AMONG(&random, 0, 0, 1) != 0;
    *plan_out = plan;
}

void sim_plan_describe(const sim_plan *plan, char *text, size_t size)
{
    int used = snprintf(
        text, size,
        "%u routers, %u:%u workers on %u hosts, %u blocks of %u in %u groups, chunks %u, "
        "batch %u, queue %u, %s, cache %s, seals %s, %u requests every %.0f ms, %.0f %% late, "
        "lose %.1f double %.1f reorder %.1f %%, %u faults, tokens %.0f ms "
        "behind, %.0f s for a request",
        plan->routers, plan->prefill, plan->decode, plan->two_hosts ? 2 : 1, plan->layout.blocks,
        plan->layout.block_tokens, plan->layout.groups, plan->chunk_tokens, plan->max_batch,
        plan->queue_max, pd_router_policy_name(plan->policy), plan->prefix_cache ? "on" : "off",
        plan->seals ? "on" : "off", plan->requests, plan->gap_ms, plan->late * 100,
        plan->lose * 100, plan->duplicate * 100, plan->reorder * 100, plan->faults,
        (double)plan->tokens_late_ns / PD_NS_PER_MS, (double)plan->total_ns / PD_NS_PER_S);
    if (plan->links != SIM_LINKS_MEMORY && used > 0 && (size_t)used < size)
        used += snprintf(text + used, size - (size_t)used, ", messages%s by sockets of %llu KiB",
                         plan->links == SIM_LINKS_MIXED ? " between hosts" : "",
                         (unsigned long long)plan->socket_bytes >> 10);
    if (plan->speculates && used > 0 && (size_t)used < size)
        used += snprintf(text + used, size - (size_t)used, ", drafts");
    if (plan->slow_factor > 0 && used > 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used,
                 ", links%s %u times as slow from %.1f s for %.1f s",
                 plan->slow_between_hosts ? " between hosts" : "", plan->slow_factor,
                 (double)plan->slow_from_ns / PD_NS_PER_S, (double)plan->slow_for_ns / PD_NS_PER_S);
}
