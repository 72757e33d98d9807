#include "deploy/simulate/coverage.h"

#include <inttypes.h>

static const char *const fault_names[SIM_FAULTS] = {
    [SIM_FAULT_CRASH] = "crash",
    [SIM_FAULT_FREEZE] = "freeze",
    [SIM_FAULT_POOL] = "pool",
    [SIM_FAULT_CUT] = "cut",
    [SIM_FAULT_PARTITION] = "partition",
    [SIM_FAULT_ROUTER_CRASH] = "router-crash",
    [SIM_FAULT_ROUTER_FREEZE] = "router-freeze",
    [SIM_FAULT_ROUTER_LEAVE] = "router-leave",
    [SIM_FAULT_HANG_UP] = "hang-up",
    [SIM_FAULT_SLOW] = "slow",
    [SIM_FAULT_CORRUPT] = "corrupt",
    [SIM_FAULT_SHORT] = "short",
    [SIM_FAULT_POISON] = "poison",
    [SIM_FAULT_LOSE] = "lose",
    [SIM_FAULT_DUPLICATE] = "duplicate",
    [SIM_FAULT_REORDER] = "reorder",
    [SIM_FAULT_SLOW_LINK] = "slow-link",
};

static const char *const audit_names[SIM_AUDIT_STATES] = {
    "none",   "waiting", "computing", "holding",     "promised", "landing",
    "landed", "running", "suspended", "quarantined", "awaited",  "stalled",
};

const char *sim_fault_name(sim_fault fault)
{
    return fault_names[fault];
}

void sim_coverage_add(sim_coverage *sum, const sim_coverage *run)
{
    sum->runs += run->runs;
    for (uint32_t i = 0; i < SIM_FAULTS; i++)
        sum->faults[i] += run->faults[i];
    for (uint32_t i = 0; i < PD_MESSAGE_KINDS; i++)
        sum->messages[i] += run->messages[i];
    for (uint32_t i = 0; i < SIM_AUDIT_STATES; i++)
        sum->audit_states[i] += run->audit_states[i];
    for (uint32_t i = 0; i < ROUTER_TRANSITIONS_MAX; i++)
        sum->transitions[i] += run->transitions[i];
    for (uint32_t i = 0; i < ROUTER_RETRY_REASONS; i++)
        sum->retries[i] += run->retries[i];
    sum->resumed += run->resumed;
    sum->moves += run->moves;
    sum->moves_failed += run->moves_failed;
    sum->gave_way += run->gave_way;
    sum->pulls += run->pulls;
    sum->pulls_failed += run->pulls_failed;
    sum->suspects += run->suspects;
    sum->innocents += run->innocents;
    sum->harmless += run->harmless;
    sum->silent += run->silent;
    sum->killers += run->killers;
    sum->thirds += run->thirds;
    sum->no_budget += run->no_budget;
    sum->refetches += run->refetches;
    sum->seal_failures += run->seal_failures;
    sum->messages_sent += run->messages_sent;
    sum->messages_left += run->messages_left;
    sum->messages_old += run->messages_old;
    if (run->attempts_max > sum->attempts_max)
        sum->attempts_max = run->attempts_max;
}

void sim_coverage_add_router(sim_coverage *sum, const router_core *core)
{
    router_core_counters counters = router_core_counters_of(core);
    uint32_t count = 0;
    const uint64_t *transitions = router_core_transitions(core, &count);

    for (uint32_t i = 0; i < count; i++)
        sum->transitions[i] += transitions[i];
    for (uint32_t i = 0; i < ROUTER_RETRY_REASONS; i++)
        sum->retries[i] += counters.retries[i];
    sum->resumed += counters.resumed;
    sum->moves += counters.moves;
    sum->moves_failed += counters.moves_failed;
    sum->gave_way += counters.gave_way;
    sum->pulls += counters.pulls;
    sum->pulls_failed += counters.pulls_failed;
    sum->suspects += counters.suspects;
    sum->no_budget += counters.budget_exhausted;
    sum->refetches += counters.refetches;
    sum->seal_failures += counters.seal_failures;
}

uint64_t sim_coverage_faults(const sim_coverage *coverage)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < SIM_FAULTS_SINGLE; i++)
        sum += coverage->faults[i];
    return sum;
}

void sim_coverage_print(const sim_coverage *coverage, FILE *out)
{
    fprintf(out, "faults:");
    for (uint32_t i = 0; i < SIM_FAULTS; i++)
        fprintf(out, " %s %" PRIu64, fault_names[i], coverage->faults[i]);
    fprintf(out, "\nmessages:");
    for (uint32_t i = PD_MSG_NONE + 1; i < PD_MESSAGE_KINDS; i++)
        fprintf(out, " %s %" PRIu64, pd_message_name((pd_message_kind)i), coverage->messages[i]);
    fprintf(out, "\naudited:");
    for (uint32_t i = 1; i < SIM_AUDIT_STATES; i++)
        fprintf(out, " %s %" PRIu64, audit_names[i], coverage->audit_states[i]);
    uint32_t rows = 0;
    const router_transition *table = router_lifecycle_table(&rows);
    fprintf(out, "\nlifecycle:");
    for (uint32_t i = 0; i < rows; i++)
        fprintf(out, " %s+%s>%s %" PRIu64, router_request_state_name(table[i].from),
                router_event_name(table[i].event), router_request_state_name(table[i].to),
                coverage->transitions[i]);
    fprintf(out, "\nretries:");
    for (uint32_t i = 0; i < ROUTER_RETRY_REASONS; i++)
        fprintf(out, " %s %" PRIu64, router_retry_reason_name((router_retry_reason)i),
                coverage->retries[i]);
    fprintf(out,
            "; resumed %" PRIu64 " moves %" PRIu64 " (failed %" PRIu64 ") gave way %" PRIu64
            " pulls %" PRIu64 " (failed %" PRIu64 ") suspects %" PRIu64 " (innocent %" PRIu64
            "; harmless %" PRIu64 ", at silent workers %" PRIu64 "; third workers %" PRIu64
            " of %" PRIu64 " killers) no budget %" PRIu64 " fetched again %" PRIu64
            " (wrong again %" PRIu64 ")"
            "; sent as messages %" PRIu64 " (landed after their link's end %" PRIu64
            ", dropped behind a newer one's %" PRIu64 "); attempts of one request: at most %" PRIu64
            "\n",
            coverage->resumed, coverage->moves, coverage->moves_failed, coverage->gave_way,
            coverage->pulls, coverage->pulls_failed, coverage->suspects, coverage->innocents,
            coverage->harmless, coverage->silent, coverage->thirds, coverage->killers,
            coverage->no_budget, coverage->refetches, coverage->seal_failures,
            coverage->messages_sent, coverage->messages_left, coverage->messages_old,
            coverage->attempts_max);
}

uint32_t sim_coverage_holes(const sim_coverage *coverage, FILE *out)
{
    uint32_t holes = 0;

    for (uint32_t i = 0; i < SIM_FAULTS; i++) {
        if (coverage->faults[i] != 0)
            continue;
        fprintf(out, "never happened: fault %s\n", fault_names[i]);
        holes++;
    }
    uint32_t rows = 0;
    const router_transition *table = router_lifecycle_table(&rows);
    for (uint32_t i = 0; i < rows; i++) {
        if (coverage->transitions[i] != 0)
            continue;
        fprintf(out, "never happened: %s in state %s\n", router_event_name(table[i].event),
                router_request_state_name(table[i].from));
        holes++;
    }
    for (uint32_t i = 1; i < SIM_AUDIT_STATES; i++) {
        if (coverage->audit_states[i] != 0)
            continue;
        fprintf(out, "never happened: an audit that finds %s\n", audit_names[i]);
        holes++;
    }
    if (coverage->messages_left == 0 || coverage->messages_old == 0) {
        fprintf(out, "never happened: a message that comes after its link's end, and is %s\n",
                coverage->messages_left == 0 ? "taken" : "dropped");
        holes++;
    }
    return holes;
}
