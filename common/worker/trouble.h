#pragma once

/* common/worker/trouble.h - steps fail: is it a request's fault, or this worker's?
 *
 * A request that no step can compute fails whatever step it is in, alone too, and costs nobody
 * else. A device that fails without being lost for good fails them all, and a worker that stays up
 * with it would answer every request with an error. Told apart by who was in the steps that failed
 * since the last good one: as long as one request was in all of them, it may be the cause. When it
 * no longer can be, whoever failed last may be the next; PD_TROUBLE_CULPRITS that share no blame,
 * with no good step between, are the device. Out of memory is the worker's at once. Errors that
 * are a request's by their kind (status.h) blame nobody.
 *
 * Bounded by requests_max, taken at start; one thread. */

#include "common/worker/step.h"

#define PD_TROUBLE_CULPRITS 4

typedef struct pd_trouble {
    uint64_t *suspects; /* [suspects_max] requests, in every failed step since the last culprit */
    uint32_t suspects_count, suspects_max;
    uint32_t culprits; /* since the last good step */
    uint32_t failed;   /* steps, likewise */
} pd_trouble;

/* requests_max: of a step. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_trouble_init(pd_trouble *trouble, uint32_t requests_max);
void pd_trouble_fini(pd_trouble *trouble); /* all zero is fine */

/* What came of work for these requests (any number that names each). True: this worker is at
 * fault, and must end. */
bool pd_trouble_take(pd_trouble *trouble, pd_status status, const uint64_t *requests,
                     uint32_t count);
/* The same of a step, whose requests are told by their ids. */
bool pd_trouble_take_step(pd_trouble *trouble, const pd_step *step);
