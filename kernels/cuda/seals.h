#pragma once

/* kernels/cuda/seals.h - seals of a pool on the device, made and checked beside the computing.
 *
 * Each sealer has a stream and buffers of its own; a batch is one upload and one read-back, which
 * are waited for. What it reads was written before: a group is sealed after it was announced
 * (kernels/cuda/groups), a landed block checked after the transfer said so, so nothing of another
 * stream is waited for here. Any thread; batches take turns. kernels/cuda/pool.c cuts what a caller
 * has into batches, for one device as for many. */

#include "common/kv/seal.h"
#include "kernels/cuda/launch.h"

#define CU_SEAL_BATCH 1024

typedef struct cu_sealer cu_sealer;

/* kv: copied. Errors (logged): PD_E_NOMEM, PD_E_INTERNAL, PD_E_IO. */
PD_CHECKED pd_status cu_sealer_create(gpu *g, const cu_kv *kv, cu_sealer **sealer_out);
void cu_sealer_destroy(cu_sealer *sealer); /* NULL is fine; nobody calls it any more */

/* A batch in two parts, so that several devices work at once: begin queues it and takes the turn,
 * end waits for it and gives the turn back. end must follow, whatever begin has said; before that
 * the thread begins at other sealers alone, everybody in the same order. from_bytes: as check makes
 * them. count: 1 .. CU_SEAL_BATCH. */
PD_CHECKED pd_status cu_sealer_begin(cu_sealer *sealer, const pd_seal_item *items, uint32_t count,
                                     bool from_bytes);
PD_CHECKED pd_status cu_sealer_end(cu_sealer *sealer, uint64_t *seals_out);
