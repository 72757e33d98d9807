#include "deploy/simulate/plan.h"

#include "common/base/hash.h"

#include <stdio.h>

static uint32_t among(uint64_t *random, const uint32_t *values, uint32_t count)
{
    return values[pd_random_next(random) % count];
}
#define AMONG(random, ...)                                                                         \
    among((random), (const uint32_t[]){__VA_ARGS__},                                               \
          sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

void sim_plan_draw(uint64_t seed, const sim_faults *allowed, sim_plan *plan_out)
{
    uint64_t random = pd_mix64(seed);
    uint64_t faults = pd_random_next(&random);
    pd_model_shape shape = {.layers = 4, .kv_heads = 2, .head_dim = 8};

    if (pd_random_next(&random) % 4 == 0)
        faults = 0; /* a quarter of the runs is calm: there nothing may fail */
    sim_plan plan = {
        .seed = seed,
        .prefill = AMONG(&random, 1, 1, 2, 3),
        .decode = AMONG(&random, 1, 1, 2, 3),
        .requests = AMONG(&random, 20, 40, 80),
        .chunk_tokens = AMONG(&random, 16, 64, 100, 256),
        .max_batch = AMONG(&random, 1, 2, 8, 16),
        .queue_max = AMONG(&random, 4, 16, 64),
        .context_max = 400,
        .prefix_cache = AMONG(&random, 0, 1, 1, 1) != 0,
        .seals = AMONG(&random, 0, 1, 1) != 0,
        .gap_ms = AMONG(&random, 5, 30, 100, 300),
        .late = AMONG(&random, 0, 1, 20) / 100.0,
        .policy = (pd_router_policy)AMONG(&random, PD_POLICY_KV_AWARE, PD_POLICY_KV_AWARE,
                                          PD_POLICY_LEAST_LOADED, PD_POLICY_ROUND_ROBIN,
                                          PD_POLICY_RANDOM),
        .faults = {.crash = allowed->crash && (faults & 1) != 0,
                   .hang_up = allowed->hang_up && (faults & 2) != 0,
                   .slow = allowed->slow && (faults & 4) != 0,
                   .freeze = allowed->freeze && (faults & 8) != 0,
                   .corrupt = allowed->corrupt && (faults & 16) != 0},
    };
    pd_kv_layout_options options = {
        .dtype = PD_F16,
        .block_tokens = AMONG(&random, 16, 16, 32),
        .group_layers = AMONG(&random, 1, 2, 3, 4),
        .memory_bytes = 1u << 30,
        .blocks_max = AMONG(&random, 26, 40, 80, 300),
    };
    pd_status status = pd_kv_layout_make(&shape, &options, &plan.layout);
    pd_assert(status == PD_OK);
    *plan_out = plan;
}

void sim_plan_describe(const sim_plan *plan, char *text, size_t size)
{
    snprintf(text, size,
             "%u:%u, %u blocks of %u in %u groups, chunks %u, batch %u, queue %u, %s, cache %s, "
             "seals %s, %u requests every %.0f ms, %.0f %% late, faults:%s%s%s%s%s%s",
             plan->prefill, plan->decode, plan->layout.blocks, plan->layout.block_tokens,
             plan->layout.groups, plan->chunk_tokens, plan->max_batch, plan->queue_max,
             pd_router_policy_name(plan->policy), plan->prefix_cache ? "on" : "off",
             plan->seals ? "on" : "off", plan->requests, plan->gap_ms, plan->late * 100,
             plan->faults.crash ? " crash" : "", plan->faults.hang_up ? " hang-up" : "",
             plan->faults.slow ? " slow" : "", plan->faults.freeze ? " freeze" : "",
             plan->faults.corrupt ? " corrupt" : "",
             plan->faults.crash || plan->faults.hang_up || plan->faults.slow ||
                     plan->faults.freeze || plan->faults.corrupt
                 ? ""
                 : " none");
}
