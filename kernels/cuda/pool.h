#pragma once

/* kernels/cuda/pool.h - a model's KV pool and its seals' hashes, a piece on each rank's device.
 *
 * Rank 0 allocates every piece, in memory of that rank's device, and hands handles of it to the
 * others, who import theirs: so one process owns all that others write to, whoever computes. It
 * also makes and checks all seals, on the device that the heads lie on. A rank above 0 has its
 * piece to compute with, and nothing else.
 *
 * The calls in order: create - alloc (rank 0) - bind - seal, check - free, when nobody uses it any
 * more, the other ranks' processes too - destroy. One thread, but for seal, check and broken. */

#include "common/kv/seal.h"
#include "kernels/cuda/comm.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/room.h"

typedef struct cu_pool cu_pool;

typedef struct cu_pool_options {
    const char *backend;   /* for logs; static */
    gpu *device;           /* this rank's; outlives the pool */
    uint32_t device_first; /* the number of rank 0's */
    cu_comm *comm;         /* NULL: alone; outlives the pool */
    pd_memory_reach reach; /* of the pieces' memory */
} cu_pool_options;

/* PD_E_NOMEM. */
PD_CHECKED pd_status cu_pool_create(const cu_pool_options *options, cu_pool **pool_out);
/* Also what alloc made, and imports. NULL is fine. */
void cu_pool_destroy(cu_pool *pool);

/* As kern_backend's. room: of each device, with a piece and its hashes; each is asked whether it
 * has that before any piece is made. Errors (logged): PD_E_NOMEM, PD_E_UNSUPPORTED (too few
 * devices), PD_E_INTERNAL. */
PD_CHECKED pd_status cu_pool_alloc(cu_pool *pool, uint64_t piece_bytes, const cu_room *room,
                                   void **pieces_out);
void cu_pool_free(cu_pool *pool);

/* What kernels need of this rank's piece: *kv_out. memory: where it lies, for rank 0. With ranks,
 * all meet here. Errors (logged): PD_E_NOMEM, PD_E_PEER and PD_E_INVALID (a handle that cannot be
 * used), PD_E_INTERNAL (also: a rank is gone), PD_E_IO. */
PD_CHECKED pd_status cu_pool_bind(cu_pool *pool, const pd_kv_layout *layout, void *memory,
                                  bool seals, cu_kv *kv_out);

/* As kern_backend's; rank 0's. Heads are the whole pool's. */
PD_CHECKED pd_status cu_pool_seal(cu_pool *pool, const pd_seal_item *items, uint32_t count,
                                  uint64_t *seals_out);
PD_CHECKED pd_status cu_pool_check(cu_pool *pool, const pd_seal_item *items, uint32_t count,
                                   const uint64_t *seals, uint32_t *bad_out);

/* Hashes that this process holds. */
uint64_t cu_pool_bytes(const cu_pool *pool);
/* What broke one of the devices for good; NULL: nothing. Any thread. */
const char *cu_pool_broken(const cu_pool *pool);
