#pragma once

/* common/transfer/lanes.h - what carries a connection, out of the text in which UCX tells it, and
 * what that means for a pool. Inside common/transfer only. Pure. */

#include "common/base/status.h"

#include <stdbool.h>
#include <stddef.h>

/* Collects "sysv+posix" from lines such as
 *   #   lane[0]:  1:sysv/memory.0 md[1]  -> md[1]/sysv/sysdev[255] am am_bw#0 keepalive
 * PD_E_INTERNAL when the text is not as known. */
PD_CHECKED pd_status pd_lanes_read(const char *text, char *lane, size_t size);

/* Is a transport of that name, as UCX spells it, among the lanes? */
bool pd_lanes_have(const char *lane, const char *name);
/* A NIC's, that puts into memory over there: rc, dc, and what the vendors have like it. */
bool pd_lanes_have_rdma(const char *lane);

/* Are they what transport ("shm", "tcp", "rdma", "auto") asks for, a pool in a GPU's memory aside?
 */
bool pd_lanes_fit(const char *lane, const char *transport);

/* What carries bytes from one GPU's memory to another's. */
typedef enum pd_lanes_way {
    PD_LANES_STAGED,   /* nothing does: they go through host memory */
    PD_LANES_CUDA_IPC, /* the GPUs themselves, within a host or an NVLink fabric */
    PD_LANES_RDMA,     /* NICs that read and write GPU memory */
} pd_lanes_way;

/* nics: they may read and write GPU memory here (pd_gpus_rdma). */
pd_lanes_way pd_lanes_gpu_way(const char *lane, bool nics);
const char *pd_lanes_way_name(pd_lanes_way way);
