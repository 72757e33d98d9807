#pragma once

/* kernels/model/attend.h - what attention does in a layer: K and V placed in the pool, and its work
 * shared out among the threads of a team.
 *
 * The forward pass (kernels/model/forward) makes one for a model, begins it with each step and
 * calls kern_attend_layer on every thread once a layer, between two barriers. Queries and keys are
 * rotated here, the output is quantised here.
 *
 * Sequences whose tables begin with the same blocks (a prefix that the cache shares) have those in
 * common by whole splits (KERN_SPLIT_TOKENS positions): K and V of such a split are read once for
 * up to KERN_ATTENTION_TOKENS_MAX of their tokens, and each goes on with its own from there. Splits
 * are made and joined as ever, so the bits are the same. */

#include "kernels/model/forward.h"
#include "kernels/model/split.h"
#include "kernels/ops.h"
#include "kernels/team.h"

typedef struct kern_attend kern_attend;

typedef struct kern_attend_options {
    const kern_ops *ops;
    kern_team *team;
    const pd_model_shape *shape;
    const kern_split *split; /* of this rank */
    uint32_t context_max, rows_max;
    /* of a row: this rank's [heads][head_dim] and [kv_heads][head_dim]; those of the next one lie
     * row_stride floats further on */
    float *query, *key, *value;
    size_t row_stride;
    kern_acts
        attended; /* [2 * rows_max][heads][head_dim]: a row, and rows_max further its residual */
} kern_attend_options;

/* What the options point to outlives it. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status kern_attend_create(const kern_attend_options *options,
                                        kern_attend **attend_out);
void kern_attend_destroy(kern_attend *attend);         /* NULL is fine */
uint64_t kern_attend_bytes(const kern_attend *attend); /* memory held */

/* The stepping thread's, before the threads run: rows are those of the step's slices in order, as
 * many as rows_max at most. step outlives the step. */
void kern_attend_begin(kern_attend *attend, const kern_step *step);
/* Runs of positions that this step is the first to reach; each, 0 .. count - 1, is to be made by
 * one of the threads before the first layer. */
uint32_t kern_attend_angles(const kern_attend *attend);
void kern_attend_make_angles(kern_attend *attend, uint32_t n);
/* Of the step begun: how many times, a layer and KV head, a split is read for several sequences (or
 * for what is left of them). */
uint32_t kern_attend_sets(const kern_attend *attend);
/* On every thread; begins after a barrier and ends with one. Output is wanted of rows live_first
 * .. + live_rows - 1 only, K and V are placed of all. */
void kern_attend_layer(kern_attend *attend, uint32_t thread, uint32_t layer, uint32_t live_first,
                       uint32_t live_rows);
