#pragma once

/* kernels/cuda/comm.h - what the ranks of one model exchange on their devices.
 *
 * Every rank calls the same gathers in the same order, each on its compute stream, from the thread
 * that steps. After it, in stream order, all of every rank holds [rank][bytes]. A failure (a rank
 * is gone, a deadline has passed) ends the step of each rank that is left; it is logged where it is
 * seen. */

#include "kernels/cuda/gpu.h"

typedef struct cu_comm {
    uint32_t rank, ranks;
    void *ctx;
    /* own: bytes bytes of the device, outside all or rank's place in it. all: ranks * bytes. */
    pd_status (*gather)(void *ctx, gpu_stream *stream, const void *own, void *all, uint64_t bytes);
} cu_comm;
