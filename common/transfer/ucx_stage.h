#pragma once

/* common/transfer/ucx_stage.h - host memory that a put of a GPU's bytes goes through on its way
 * into a message. Inside common/transfer only, for ucx.c.
 *
 * At most PD_UCX_STAGES buffers of the longest put are in use at once. One stays in use while UCX
 * may read it. Transfer thread only. */

#include "common/transfer/carrier.h"

#define PD_UCX_STAGES 16u

typedef struct pd_ucx_stages pd_ucx_stages;

typedef struct pd_ucx_stage {
    struct pd_ucx_stage *next;
    pd_ucx_stages *stages;
    pd_peer peer;
    bool abandoned;
    uint64_t token; /* the put's */
    unsigned char bytes[PD_CARRIER_PUT_BYTES_MAX];
} pd_ucx_stage;

struct pd_ucx_stages {
    pd_ucx_stage *free, *used;
    uint32_t count; /* of both, abandoned ones aside */
};

/* NULL: all are in use, or there is no memory. */
pd_ucx_stage *pd_ucx_stage_take(pd_ucx_stages *stages, pd_peer peer);
void pd_ucx_stage_give(pd_ucx_stage *stage);
/* The peer's connection is closed. What UCX has not completed by then it may never: the buffer is
 * no longer counted, and given back when its completion comes all the same. */
void pd_ucx_stages_abandon(pd_ucx_stages *stages, pd_peer peer);
/* Frees all: UCX has ended. */
void pd_ucx_stages_end(pd_ucx_stages *stages);
