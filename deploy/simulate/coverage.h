#pragma once

/* deploy/simulate/coverage.h - what has happened in the runs, counted: faults, messages, audit
 * states and the router's lifecycle table. Summed over runs it says what they have shown.
 * Plain values; whoever owns one adds to it. */

#include "common/wire/messages.h"
#include "router/core.h"
#include "router/lifecycle.h"

#include <stdio.h>

typedef enum sim_fault {
    SIM_FAULT_CRASH,         /* a worker killed, started again under the same name */
    SIM_FAULT_FREEZE,        /* a worker stopped for a while */
    SIM_FAULT_POOL,          /* all workers of a role killed, away for seconds */
    SIM_FAULT_CUT,           /* a data link breaks, both ends alive */
    SIM_FAULT_PARTITION,     /* a router and a worker do not reach each other for a while */
    SIM_FAULT_ROUTER_CRASH,  /* a router killed, started again at the same address */
    SIM_FAULT_ROUTER_FREEZE, /* a router stopped for a while */
    SIM_FAULT_ROUTER_LEAVE,  /* a router ends as SIGTERM ends it, and starts again */
    SIM_FAULT_HANG_UP,       /* a client leaves */
    SIM_FAULT_SLOW,          /* a step takes 50 times as long */
    SIM_FAULT_CORRUPT,       /* blocks land wrong, or their word is wrong or lost */
    SIM_FAULT_SHORT,         /* a crowd of long requests asks at once: memory is short */
    SIM_FAULT_POISON,        /* a request brings down whoever computes it */
    /* by share of the messages */
    SIM_FAULT_LOSE,
    SIM_FAULT_DUPLICATE,
    SIM_FAULT_REORDER,
    SIM_FAULT_SLOW_LINK, /* links that carry a fraction of what they did; counted by pieces */
    SIM_FAULTS,
} sim_fault;
#define SIM_FAULTS_SINGLE SIM_FAULT_LOSE /* those before it happen one by one */
#define SIM_ALLOW_ALL     ((1u << SIM_FAULTS) - 1)

const char *sim_fault_name(sim_fault fault); /* "router-crash" */

#define SIM_AUDIT_STATES 12

typedef struct sim_coverage {
    uint64_t runs;
    uint64_t faults[SIM_FAULTS];
    uint64_t messages[PD_MESSAGE_KINDS]; /* delivered */
    uint64_t audit_states[SIM_AUDIT_STATES];
    uint64_t transitions[ROUTER_TRANSITIONS_MAX]; /* by row of the lifecycle table */
    uint64_t retries[ROUTER_RETRY_REASONS];
    uint64_t resumed, moves, moves_failed, gave_way, pulls, pulls_failed, suspects, no_budget;
    uint64_t innocents; /* of the suspects: blamed for two deaths that another one caused */
    uint64_t harmless;  /* ended as suspects that kill nobody, the innocent among them */
    uint64_t silent;    /* of these: a worker said to have died had only been silent for too long */
    uint64_t killers;   /* requests that brought down a worker */
    uint64_t thirds;    /* and more than two */
    uint64_t refetches, seal_failures;
    uint64_t attempts_max; /* of one request */
    /* On links of messages: parcels that left, that landed after their link's or sender's end, and
     * that were dropped because a newer link's had come. */
    uint64_t messages_sent, messages_left, messages_old;
} sim_coverage;

void sim_coverage_add(sim_coverage *sum, const sim_coverage *run);
/* A router's counts, when it ends. */
void sim_coverage_add_router(sim_coverage *sum, const router_core *core);
uint64_t sim_coverage_faults(const sim_coverage *coverage); /* single ones */
void sim_coverage_print(const sim_coverage *coverage, FILE *out);
/* How many of what must happen has not; each is printed. */
uint32_t sim_coverage_holes(const sim_coverage *coverage, FILE *out);
