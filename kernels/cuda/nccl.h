#pragma once

/* kernels/cuda/nccl.h - all-gathers between a worker's ranks by NCCL, loaded at run time.
 *
 * libnccl.so.2 is found as the dynamic loader finds libraries; nothing links it. Communicators do
 * not block: what is begun is looked after by cu_nccl_look. A rank that is gone leaves the others'
 * kernels waiting on their devices, until the communicator is aborted.
 *
 * Failures are logged where they are seen. One thread a communicator. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define CU_NCCL_ID_BYTES 128

typedef struct cu_nccl cu_nccl;

/* PD_E_UNSUPPORTED: it cannot be had; why is written, one line, and not logged. */
PD_CHECKED pd_status cu_nccl_load(char *reason, size_t reason_size);
/* The calls below: after that one. Rank 0 makes the id, which all ranks take. PD_E_INTERNAL. */
PD_CHECKED pd_status cu_nccl_id(unsigned char id_out[CU_NCCL_ID_BYTES]);
/* Begins to make the communicator, of the calling thread's device. PD_E_NOMEM, PD_E_INTERNAL. */
PD_CHECKED pd_status cu_nccl_create(const unsigned char id[CU_NCCL_ID_BYTES], uint32_t rank,
                                    uint32_t ranks, cu_nccl **nccl_out);
/* PD_OK: what was begun is made, or queued. PD_E_AGAIN: not yet; nothing else may be begun.
 * PD_E_INTERNAL: something failed, also of what the devices do. */
PD_CHECKED pd_status cu_nccl_look(cu_nccl *nccl);
/* Queues to the stream (a cudaStream_t): bytes at own go to own's place in all [ranks][bytes] of
 * every rank. own may lie at its place in all. As cu_nccl_look. */
PD_CHECKED pd_status cu_nccl_gather(cu_nccl *nccl, void *stream, const void *own, void *all,
                                    uint64_t bytes);
/* Aborts what is under way, and ends it. NULL is fine. */
void cu_nccl_destroy(cu_nccl *nccl);
