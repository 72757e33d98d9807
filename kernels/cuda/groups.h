#pragma once

/* kernels/cuda/groups.h - tells when the layer groups of a step are final, in order, never early.
 *
 * The stepping thread records an event behind the last write of each group and, while it queues on
 * and afterwards, announces those that the device has passed. One thread. */

#include "kernels/backend.h"
#include "kernels/cuda/gpu.h"

typedef struct cu_groups cu_groups;

PD_CHECKED pd_status cu_groups_create(gpu *g, uint32_t groups, cu_groups **groups_out);
void cu_groups_destroy(cu_groups *groups); /* NULL is fine */

/* A step begins. done may be NULL: nobody is told, and nothing is recorded. */
void cu_groups_begin(cu_groups *groups, kern_group_done_fn *done, void *ctx);
/* What was queued to the stream so far makes the next group final, or all that are left. */
PD_CHECKED pd_status cu_groups_record(cu_groups *groups, gpu_stream *stream);
PD_CHECKED pd_status cu_groups_record_rest(cu_groups *groups, gpu_stream *stream);
/* Announces what is final by now, without waiting; and what is recorded, waiting for it. */
PD_CHECKED pd_status cu_groups_poll(cu_groups *groups);
PD_CHECKED pd_status cu_groups_wait(cu_groups *groups);
