#pragma once

/* kernels/cuda/comm.h - what the ranks of one model exchange: their products, on their devices; the
 * pool's pieces, which rank 0 made; and whether one of them has failed.
 *
 * Every rank makes the same calls in the same order, on the thread that steps. Two ways for the
 * products, chosen by cu_comm_connect: NCCL, on the compute stream; or, where that cannot be had,
 * and on emulated devices, through the ranks' shared memory (kernels/comm.h), in parts: the stream
 * is waited for, a part is copied out, the ranks meet, the others' parts are queued to be copied
 * in.
 *
 * A rank that fails where the others do not says so (cu_comm_fail), and no exchange succeeds any
 * more, at any rank: those that wait return. So does what waits when a rank has ended.
 *
 * A rank that stands still is judged at rank 0 (kernels/comm.h): through memory at the barriers of
 * a gather; by NCCL an event before each gather tells how far a rank's stream has come, and the
 * ranks tell each other as they look. Who is not where the others wait is killed, and named. */

#include "kernels/comm.h"
#include "kernels/cuda/gpu.h"

typedef struct cu_comm cu_comm;

typedef struct cu_comm_options {
    const char *backend; /* for logs; static */
    uint32_t rank, ranks;
    kern_comm *comm; /* outlives this */
    const kern_comm_calls *calls;
    uint64_t part_bytes; /* a multiple of 64; 0: 4 MiB */
    /* for NCCL to make a communicator, to queue a gather, and to end one that all ranks have come
     * to; 0: 60,000 */
    uint32_t wait_ms;
} cu_comm_options;

/* What it takes of the comm's memory. */
uint64_t cu_comm_bytes(uint32_t ranks, uint64_t part_bytes);
/* PD_E_NOMEM. */
PD_CHECKED pd_status cu_comm_create(const cu_comm_options *options, cu_comm **comm_out);
/* Aborts what is under way. NULL is fine. */
void cu_comm_destroy(cu_comm *comm);

uint32_t cu_comm_rank(const cu_comm *comm);
uint32_t cu_comm_ranks(const cu_comm *comm);

/* A rank's part of the pool, and of the seals' hashes, in memory of rank 0's. */
typedef struct cu_comm_piece {
    unsigned char pool[GPU_HANDLE_BYTES], hashes[GPU_HANDLE_BYTES];
    uint64_t allocation_bytes, pool_at; /* of the pool's allocation; where in it the pool begins */
    uint64_t hashes_bytes;              /* 0: there are none */
} cu_comm_piece;
/* Shared: rank 0 writes, then all meet, then the others read. */
cu_comm_piece *cu_comm_piece_of(cu_comm *comm, uint32_t rank);

/* PD_OK: all ranks are here, and what each wrote to shared memory is seen. PD_E_INTERNAL: one is
 * gone, or has failed. */
PD_CHECKED pd_status cu_comm_meet(cu_comm *comm);
/* Once, before the first gather: how the products go. g is this rank's device. */
PD_CHECKED pd_status cu_comm_connect(cu_comm *comm, gpu *g);

/* After it, in stream order, all of every rank holds [rank][bytes]. own: bytes bytes of the device,
 * at rank's place in all. */
PD_CHECKED pd_status cu_comm_gather(cu_comm *comm, gpu_stream *stream, const void *own, void *all,
                                    uint64_t bytes);
/* True: what the stream does may wait for other ranks, so who waits for it must look, every
 * millisecond or so and once more when it is done, and say that it has failed when that does.
 * PD_E_INTERNAL: a rank is gone, has failed or stood still, or NCCL has failed. PD_E_TIMEOUT
 * (logged): a gather does not end. */
bool cu_comm_is_queued(const cu_comm *comm);
PD_CHECKED pd_status cu_comm_look(cu_comm *comm);

/* This rank cannot go on. When no other has ended before, it has failed: why, in a line without
 * quotes, for whoever asks. Ends every exchange; gathers that are queued here are aborted. */
void cu_comm_fail(cu_comm *comm, const char *why);
/* "rank 1: an illegal memory access ...", by any rank; NULL: none has failed. Any thread. */
const char *cu_comm_broken(const cu_comm *comm);
