#pragma once

/* common/worker/faults.h - damage done on purpose, so that tests can watch a whole cluster cope.
 *
 * Off unless the environment has KVFERRY_FAULTS, a list of KIND:N such as "flip:7,lost:20": every
 * Nth chance of that kind is taken and logged. What lands is damaged in the receiver's own pool,
 * when its notice has come and before it is compared with its seals, as if the wire or the sender
 * had done it:
 *
 *   flip     one bit of a landed block is another
 *   foreign  a landed block holds what is in another request's
 *   epoch    the blocks pass for those of the epoch before
 *   hole     a landed block was left out: nothing wrote it
 *   count    the last block is said to hold one valid token more, or fewer
 *   lost     a notice of landed blocks never comes
 *   step     a step with a later chunk of a prompt fails (its first one has been sent)
 *
 * Loop thread only. */

#include "common/kv/layout.h"
#include "common/worker/step.h"

typedef struct pd_faults pd_faults;

/* layout and pool are borrowed. PD_E_INVALID: spec is not such a list (logged); PD_E_NOMEM. */
PD_CHECKED pd_status pd_faults_create(const char *spec, const pd_kv_layout *layout, void *pool,
                                      pd_faults **faults_out);
void pd_faults_destroy(pd_faults *faults); /* NULL is fine */

/* Each takes NULL for "no faults". Before a check is made: changes it, or the pool that it reads.
 */
void pd_faults_on_check(pd_faults *faults, pd_check *check);
/* True: this notice never came. */
bool pd_faults_on_notice(pd_faults *faults, const unsigned char *bytes, size_t len);
/* A step that has ended: its status may become PD_E_INTERNAL. */
void pd_faults_on_step(pd_faults *faults, pd_step *step);
