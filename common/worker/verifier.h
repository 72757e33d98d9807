#pragma once

/* common/worker/verifier.h - compares landed blocks with their seals, on a thread of its own.
 *
 * The loop thread submits checks and polls for what came of them, in the order submitted. All
 * memory is taken at creation: PD_VERIFIER_CHECKS_MAX checks may be between submit and poll. The
 * thread has the pool read at memory speed, and the loop never waits for it; whoever submits
 * keeps the blocks from being written until it has polled the answer. */

#include "common/kv/seal.h"
#include "common/worker/step.h"

#define PD_VERIFIER_CHECKS_MAX 256

typedef struct pd_verifier pd_verifier;

typedef struct pd_verifier_options {
    const pd_kv_layout *layout; /* copied */
    pd_sealer sealer;           /* of the pool; what it stands for outlives the verifier */
} pd_verifier_options;

/* Errors: PD_E_NOMEM, PD_E_IO (no thread, no eventfd; logged). */
PD_CHECKED pd_status pd_verifier_create(const pd_verifier_options *options,
                                        pd_verifier **verifier_out);
/* Ends the thread after the check it looks at; what was not polled is forgotten. NULL is fine. */
void pd_verifier_destroy(pd_verifier *verifier);

/* What check points to is copied. Slice s of check->slices covers the KV heads
 * [s * kv_heads / slices, (s + 1) * kv_heads / slices). Its numbers are the caller's promise
 * (pd_assert): blocks and groups of the layout, valid tokens of a block, no more seals than a
 * notice carries. PD_E_OVERLOAD: too many wait; nothing was taken. */
PD_CHECKED pd_status pd_verifier_submit(pd_verifier *verifier, const pd_check *check);
/* Readable when poll may have something. */
int pd_verifier_fd(const pd_verifier *verifier);
/* PD_E_AGAIN: nothing is ready. The first mismatch is the one of the lowest group, and in it of the
 * lowest block; a check that could not be made is answered as such (pd_checked.unchecked). */
PD_CHECKED pd_status pd_verifier_poll(pd_verifier *verifier, pd_checked *checked_out);
