#pragma once

/* decode-worker/batch.h - continuous batching, a token at a time: who steps now.
 *
 * Ready sequences run in the order they became ready, at most max_batch at a time; one that ends
 * makes place for the next at the very next step. A sequence that was in a failed step is stepped
 * alone, so that only the one at fault fails. Pure. One thread. */

#include "decode-worker/sequence.h"

typedef struct decode_batch {
    decode_sequence *head, *tail; /* ready, oldest first */
    uint32_t count;
    uint32_t running_max; /* the first so many of the list run */
    uint32_t rows_max;    /* tokens a step */
} decode_batch;

void decode_batch_init(decode_batch *batch, uint32_t running_max, uint32_t rows_max);
void decode_batch_add(decode_batch *batch, decode_sequence *sequence);
/* One that is not in the batch is left alone. */
void decode_batch_remove(decode_batch *batch, decode_sequence *sequence);

/* Fills slices [running_max] with the next step, without drafts, marks its sequences in_step;
 * returns the count. Those stalled are left out: 0 when all are. */
uint32_t decode_batch_plan(decode_batch *batch, pd_step_slice *slices);
/* Positions that the running sequences look back on, for the time model. */
uint64_t decode_batch_context(const decode_batch *batch);
/* Predicted milliseconds until a newcomer steps: the step under way, and whole answers when the
 * batch is full. tokens_a_step: that a sequence gets, on average. */
double decode_batch_queue_ms(const decode_batch *batch, const pd_cost *cost, bool stepping,
                             double tokens_a_step);

/* A step took the slice in: its KV is there, but for that of drafts that were wrong. Appends what
 * the model says: a token for each draft that was right, and one more. Returns how many; the first
 * has *index_out, *finish_out is the last one's. An answer ends where it would have without drafts.
 * 0: not its turn yet. */
uint32_t decode_batch_take(decode_sequence *sequence, const pd_step_slice *slice,
                           uint32_t context_max, uint32_t *index_out, pd_finish *finish_out);
