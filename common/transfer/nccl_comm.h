#pragma once

/* common/transfer/nccl_comm.h - a link's communicator and the work on it. Inside common/transfer
 * only, for nccl*.c. Engine's thread. Failures are logged where they are found. */

#include "common/transfer/nccl_link.h"

/* Aborts it, if there is one. From its return on nothing of its work touches any memory: NCCL ends
 * its kernels when asked to abort, and the stream runs dry. Where it does not, this does not
 * return, and so nobody is told that blocks are free again. */
void pd_nccl_comm_end(pd_carrier *carrier, nccl_link *link);
/* Begins to make one, in place of the link's; the one used longest ago goes when there are as many
 * as may be. The link must be the active one. */
bool pd_nccl_comm_make(pd_carrier *carrier, nccl_link *link, pd_nccl_id id, uint64_t epoch);
/* False: NCCL says that something is wrong. *done_out: nothing is under way at NCCL. */
bool pd_nccl_comm_look(pd_carrier *carrier, const nccl_link *link, bool *done_out);
/* Posts the batch: one group of a send or receive a run, in their order. */
bool pd_nccl_comm_launch(pd_carrier *carrier, nccl_link *link);
