#pragma once

/* kernels/model/plan.h - a step's slices, told to the ranks of a tensor-parallel worker.
 *
 * Rank 0 meets the others, who have done with the step before, writes the plan into the comm's
 * memory and meets them again; all then run the step. One thread. */

#include "kernels/backend.h"
#include "kernels/comm.h"

typedef struct kern_plan kern_plan;

typedef struct kern_plan_options {
    uint32_t slices_max, rows_max, context_max;
} kern_plan_options;

/* What it takes of the comm's memory. */
uint64_t kern_plan_bytes(const kern_plan_options *options);
/* comm is borrowed. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status kern_plan_create(const kern_plan_options *options, kern_comm *comm,
                                      kern_plan **plan_out);
void kern_plan_destroy(kern_plan *plan); /* NULL is fine */

/* Rank 0: every rank has the step, which has slices. block_tokens: of the pool's layout.
 * PD_E_TOO_LARGE: more slices, rows or positions than the options say (logged; nobody runs it).
 * PD_E_INTERNAL: a rank is gone. */
PD_CHECKED pd_status kern_plan_tell(kern_plan *plan, const kern_backend_step *step,
                                    uint32_t block_tokens);
/* The others: waits for the next step. Its slices point into the plan; where one has logits, they
 * are not NULL, and are not to be written. False: there is no further step. */
bool kern_plan_await(kern_plan *plan, kern_backend_step *step_out);
