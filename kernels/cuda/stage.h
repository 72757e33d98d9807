#pragma once

/* kernels/cuda/stage.h - host bytes to the device at start, through pinned memory.
 *
 * Two pieces of pinned host memory: while one is on its way, the other is filled (by a copy, or by
 * whoever packs weights right into it), so that loading runs at the speed of the slower of the two.
 * One thread; for start only. */

#include "kernels/cuda/gpu.h"

typedef struct cu_stage cu_stage;

/* piece_bytes: the most that is sent at once. PD_E_NOMEM (logged by gpu.h), PD_E_INTERNAL. */
PD_CHECKED pd_status cu_stage_create(gpu *g, uint64_t piece_bytes, cu_stage **stage_out);
void cu_stage_destroy(cu_stage *stage); /* NULL is fine; waits for what is under way */

uint64_t cu_stage_piece_bytes(const cu_stage *stage);
/* A piece to fill, piece_bytes long. It waits until its last sending is over. */
PD_CHECKED pd_status cu_stage_next(cu_stage *stage, void **piece_out);
/* Sends the first bytes of the piece that cu_stage_next gave last. */
PD_CHECKED pd_status cu_stage_send(cu_stage *stage, void *device, uint64_t bytes);
/* Both, for bytes that lie somewhere, as many as there are. */
PD_CHECKED pd_status cu_stage_copy(cu_stage *stage, void *device, const void *host, uint64_t bytes);
/* All that was sent has arrived. */
PD_CHECKED pd_status cu_stage_finish(cu_stage *stage);
