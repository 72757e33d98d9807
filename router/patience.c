#include "router/patience.h"
#include "common/base/clock.h"

static const double PREFILL_FLOOR_MS = 10000;
static const double LANDING_FLOOR_MS = 5000;
static const double USUAL_TIMES = 8;
static const double LEAST_TIMES = 4;
enum { DOUBLED_MAX = 5 };

static uint64_t patience(uint64_t configured_ns, double floor_ms, double predicted_ms)
{
    double configured_ms = (double)configured_ns / (double)PD_NS_PER_MS;
    double ms = floor_ms + USUAL_TIMES * predicted_ms;
    if (ms > configured_ms)
        ms = configured_ms;
    if (ms < LEAST_TIMES * predicted_ms)
        ms = LEAST_TIMES * predicted_ms;
    double most_ms = (double)(UINT32_MAX / 2);
    return (uint64_t)((ms < most_ms ? ms : most_ms) * (double)PD_NS_PER_MS);
}

uint64_t router_patience_prefill_ns(const router_core_config *config, double queue_ms,
                                    double prefill_ms)
{
    return patience(config->prefill_ns, PREFILL_FLOOR_MS, queue_ms + prefill_ms);
}

uint64_t router_patience_landing_ns(const router_core_config *config, const pd_cost *cost,
                                    uint64_t bytes, uint32_t failures)
{
    uint32_t doubled = failures < DOUBLED_MAX ? failures : DOUBLED_MAX;
    return patience(config->transfer_ns, LANDING_FLOOR_MS, pd_cost_ship_ms(cost, bytes)) << doubled;
}

uint64_t router_patience_behind_ns(const router_core_config *config, uint64_t patience_ns)
{
    return patience_ns + config->lease_ns; /* as long as it may take to answer anything */
}

uint32_t router_patience_ms(uint64_t ns)
{
    uint64_t ms = ns / PD_NS_PER_MS;
    return ms == 0 ? 1 : ms > UINT32_MAX ? UINT32_MAX : (uint32_t)ms;
}
