#pragma once

/* kernels/cuda/forward.h - a step's kernels through the layers of a llama-shaped model, queued.
 *
 * Owns the device memory that a step works in: activations, the sums of row-parallel products of
 * all ranks, logits, scratch. Nothing waits here: what is queued runs in the stream's order. With
 * the same plan (but for what lies in the upload) it queues the same calls with the same arguments,
 * so that a step can be recorded. One thread; one step at a time. */

#include "kernels/cuda/batch.h"
#include "kernels/cuda/comm.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/weights.h"

typedef struct cu_forward cu_forward;

typedef struct cu_forward_options {
    const cu_weights *weights; /* loaded, outlives this */
    cu_comm *comm;             /* NULL: this rank is alone */
    uint32_t rows_max, logits_max, context_max;
} cu_forward_options;

/* Device bytes that it will take. */
uint64_t cu_forward_bytes(const cu_forward_options *options);
/* Of decode attention that its scratch has room for (kernels/cuda/items.h). */
uint32_t cu_forward_items_room(const cu_forward_options *options);
/* PD_E_NOMEM, PD_E_INTERNAL (logged). */
PD_CHECKED pd_status cu_forward_create(gpu *g, const cu_forward_options *options,
                                       cu_forward **forward_out);
void cu_forward_destroy(cu_forward *forward); /* NULL is fine; the device is done with it */

/* What multiplies 16-bit matrices, beside our kernels, or why nothing else does; "": there are
 * none. */
const char *cu_forward_products(const cu_forward *forward);

/* Embedding to sampled tokens; the step's upload is in the stream before. groups: told of each
 * layer group; NULL while recording. The last layer works on the rows whose logits are wanted. */
PD_CHECKED pd_status cu_forward_queue(cu_forward *forward, gpu_stream *stream, const cu_plan *plan,
                                      const cu_kv *kv, cu_groups *groups);
/* [plan->logits][vocab], the device's, after the step. */
const float *cu_forward_logits(const cu_forward *forward);
