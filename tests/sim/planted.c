/* simulate-planted --plant NAME [options of simulate] - the simulator with one fault put into the
 * deciding parts, to show that it would be found.
 *
 * The product's objects are linked as they are; the linker (--wrap) leads calls between them to the
 * variants here, and each but the chosen one goes on to the real function. */

#include "common/base/hash.h"
#include "common/kv/lease.h"
#include "common/worker/land.h"
#include "deploy/simulate/command.h"
#include "router/cluster.h"
#include "router/request.h"
#include "router/request_table.h"
#include "router/retry.h"

#include <stdio.h>
#include <string.h>

typedef enum plant {
    PLANT_NONE,
    PLANT_LEASE_NOT_RENEWED,
    PLANT_CANCEL_LOST,
    PLANT_LEASED_EVICTED,
    PLANT_STALE_INCARNATION,
    PLANT_NO_BUDGET,
    PLANT_NO_QUARANTINE,
    PLANT_SEAL_UNCHECKED,
    PLANT_UNWRITTEN,
    PLANT_BLOCKS_KEPT,
    PLANT_NO_DEADLINE,
    PLANT_DEADLINE_LATE,
    PLANT_DEADLINE_UNCUT,
    PLANT_NO_SHARED_BUDGET,
    PLANT_PRIORITY_REVERSED,
    PLANT_NO_SUSPECTS,
    PLANT_PROGRESS_UNHEARD,
    PLANT_LATE_IS_LOST,
    PLANT_ANY_SESSION,
    PLANT_SENT_IS_LANDED,
    PLANTS,
} plant;

static const char *const names[PLANTS] = {
    [PLANT_NONE] = "none",
    [PLANT_LEASE_NOT_RENEWED] = "lease-not-renewed",
    [PLANT_CANCEL_LOST] = "cancel-lost",
    [PLANT_LEASED_EVICTED] = "leased-evicted",
    [PLANT_STALE_INCARNATION] = "stale-incarnation",
    [PLANT_NO_BUDGET] = "no-budget",
    [PLANT_NO_QUARANTINE] = "no-quarantine",
    [PLANT_SEAL_UNCHECKED] = "seal-unchecked",
    [PLANT_UNWRITTEN] = "unwritten-believed",
    [PLANT_BLOCKS_KEPT] = "blocks-kept",
    [PLANT_NO_DEADLINE] = "no-deadline",
    [PLANT_DEADLINE_LATE] = "deadline-late",
    [PLANT_DEADLINE_UNCUT] = "deadline-uncut",
    [PLANT_NO_SHARED_BUDGET] = "no-shared-budget",
    [PLANT_PRIORITY_REVERSED] = "priority-reversed",
    [PLANT_NO_SUSPECTS] = "no-suspects",
    [PLANT_PROGRESS_UNHEARD] = "progress-unheard",
    [PLANT_LATE_IS_LOST] = "late-is-lost",
    [PLANT_ANY_SESSION] = "any-session",
    [PLANT_SENT_IS_LANDED] = "sent-is-landed",
};

static plant planted;

/* The prototypes of what the linker makes of FUNCTION. */
#define WRAPPED(type, function, ...)                                                               \
    type __real_##function(__VA_ARGS__);                                                           \
    type __wrap_##function(__VA_ARGS__);                                                           \
    type __wrap_##function(__VA_ARGS__)

WRAPPED(void, pd_lease_renew, pd_lease *lease, uint64_t expiry_ns)
{
    if (planted != PLANT_LEASE_NOT_RENEWED || lease->state == PD_LEASE_GRANTED)
        __real_pd_lease_renew(lease, expiry_ns);
}

WRAPPED(void, router_cluster_cancel, router_cluster *cluster, uint32_t slot,
        const pd_msg_cancel *cancel)
{
    pd_msg_cancel said = *cancel;

    said.unwritten = said.unwritten || planted == PLANT_UNWRITTEN;
    if (planted != PLANT_CANCEL_LOST)
        __real_router_cluster_cancel(cluster, slot, &said);
}

/* Hands out a block that somebody has leased. */
static void evict_leased(pd_kv_pool *pool, pd_claim claim, pd_block *block)
{
    for (pd_block other = 0; other < pd_kv_pool_blocks(pool); other++) {
        if (other == *block || pd_kv_pool_state(pool, other) != PD_BLOCK_LEASED)
            continue;
        pd_kv_pool_unclaim(pool, *block, claim);
        pd_kv_pool_claim(pool, other, claim);
        *block = other;
        return;
    }
}

WRAPPED(pd_status, pd_kv_pool_take, pd_kv_pool *pool, uint32_t count, pd_claim claim, pd_block near,
        pd_block *blocks_out)
{
    pd_status status = __real_pd_kv_pool_take(pool, count, claim, near, blocks_out);

    if (planted == PLANT_LEASED_EVICTED && status == PD_OK && count > 0)
        evict_leased(pool, claim, &blocks_out[0]);
    return status;
}

WRAPPED(bool, router_cluster_gave_up, const router_cluster *cluster, uint64_t incarnation)
{
    return planted != PLANT_STALE_INCARNATION &&
           __real_router_cluster_gave_up(cluster, incarnation);
}

WRAPPED(void, router_request_retry, router_requests *t, router_request *r,
        const router_failure *failure, uint64_t now_ns)
{
    if (planted == PLANT_NO_BUDGET)
        r->failures = r->failures_in_row = 0;
    if (planted == PLANT_NO_BUDGET || planted == PLANT_NO_SUSPECTS)
        router_request_set_killed(t, r, 0);
    if (planted == PLANT_NO_SHARED_BUDGET)
        t->budget = t->o.config->requests_max;
    __real_router_request_retry(t, r, failure, now_ns);
}

WRAPPED(void, router_request_enqueue, router_requests *t, router_request *r)
{
    if (planted == PLANT_PRIORITY_REVERSED && r->epoch_last == r->key.epoch && r->failures == 0)
        r->priority = -r->priority;
    __real_router_request_enqueue(t, r);
}

/* What was given up goes back at once, though its sender may still write. */
WRAPPED(bool, pd_landing_over, const pd_landing *landing)
{
    bool read = landing->checks > 0;

    return (planted == PLANT_NO_QUARANTINE && !read) || __real_pd_landing_over(landing);
}

/* A landing's deadline counts its own blocks alone, not what comes from its sender for others. */
WRAPPED(void, pd_land_heard, pd_lander *lander, uint64_t sender, uint64_t now_ns)
{
    if (planted != PLANT_PROGRESS_UNHEARD)
        __real_pd_land_heard(lander, sender, now_ns);
}

/* What has not come within half of the patience is asked for again, whatever comes. */
WRAPPED(pd_land_result, pd_land_tick, pd_lander *lander, pd_landing *landing, uint64_t now_ns)
{
    pd_land_result result = __real_pd_land_tick(lander, landing, now_ns);

    if (planted == PLANT_LATE_IS_LOST && result == PD_LAND_PART && landing->to_land > 0 &&
        landing->patience_ns > 0 && now_ns >= landing->awaited_ns + landing->patience_ns / 2 &&
        !landing->given_up && !pd_land_ask_missing(lander, landing))
        return PD_LAND_BROKEN;
    return result;
}

/* The word on a lost router ends what that has leased anew, too. */
WRAPPED(bool, pd_landing_is_aborted, const pd_landing *landing, const pd_role_options *options,
        const pd_notice *abort)
{
    pd_notice believed = *abort;

    if (planted == PLANT_ANY_SESSION && abort->key.number == 0)
        believed.key.epoch = UINT32_MAX;
    return __real_pd_landing_is_aborted(landing, options, &believed);
}

WRAPPED(pd_land_result, pd_land_on_checked, pd_lander *lander, const pd_checked *checked,
        pd_landing **landing_out)
{
    pd_checked believed = *checked;

    believed.good = believed.good || planted == PLANT_SEAL_UNCHECKED;
    return __real_pd_land_on_checked(lander, &believed, landing_out);
}

/* Now and then a block's claim is forgotten: of those same blocks always, so that a run does not
 * depend on the runs before it. */
WRAPPED(void, pd_prefix_cache_drop, pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
        pd_claim claim)
{
    if (planted == PLANT_BLOCKS_KEPT && count > 0 &&
        pd_hash64(blocks, count * sizeof *blocks, 0) % 16 == 0)
        count--;
    __real_pd_prefix_cache_drop(cache, blocks, count, claim);
}

/* A prefill worker's word that all is sent is taken for its last, though it goes by the control
 * plane, and may overtake what a socket holds. */
WRAPPED(void, router_requests_on_prefill_done, router_requests *t, uint32_t slot,
        const pd_msg_prefill_done *done, uint64_t now_ns)
{
    pd_msg_prefill_done believed = *done;

    if (planted == PLANT_SENT_IS_LANDED && done->status == PD_OK)
        believed.may_land = false;
    __real_router_requests_on_prefill_done(t, slot, &believed, now_ns);
}

WRAPPED(void, router_requests_on_tick, router_requests *t, uint64_t now_ns)
{
    if (planted != PLANT_NO_DEADLINE)
        __real_router_requests_on_tick(t, now_ns);
}

/* A request has three times as long as it should; or a phase's deadline is not cut to what is left
 * of all of it. */
WRAPPED(void, router_request_set_due, router_requests *t, router_request *r, uint64_t due_ns)
{
    uint64_t total_due_ns = r->total_due_ns;

    if (planted == PLANT_DEADLINE_LATE)
        r->total_due_ns = total_due_ns = r->arrived_ns + 3 * t->o.config->total_ns;
    if (planted == PLANT_DEADLINE_UNCUT)
        r->total_due_ns = UINT64_MAX;
    __real_router_request_set_due(t, r, due_ns);
    r->total_due_ns = total_due_ns;
}

int main(int argc, char **argv)
{
    if (argc < 3 || strcmp(argv[1], "--plant") != 0) {
        fprintf(stderr, "usage: simulate-planted --plant NAME [options of simulate]; there are:");
        for (uint32_t i = 0; i < PLANTS; i++)
            fprintf(stderr, " %s", names[i]);
        fprintf(stderr, "\n");
        return 2;
    }
    for (planted = PLANT_NONE; planted < PLANTS && strcmp(argv[2], names[planted]) != 0;)
        planted++;
    if (planted == PLANTS) {
        fprintf(stderr, "simulate-planted: there is no plant %s\n", argv[2]);
        return 2;
    }
    return sim_command(argc - 2, argv + 2);
}
