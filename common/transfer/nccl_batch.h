#pragma once

/* common/transfer/nccl_batch.h - batches of the NCCL carrier, and their order. Inside
 * common/transfer only, for nccl*.c. Engine's thread.
 *
 * The sender announces runs of bytes; the receiver posts the receives and says GO, with what a new
 * communicator needs if there is none; the sender says LAUNCH and posts the same runs in the same
 * order; the receiver says LANDED when its stream has ended, and only that ends the puts.
 *
 * A process runs one batch at a time, in or out, so that its device never holds kernels of two
 * communicators, of which each could wait for the other one's place. A batch needs both processes.
 * They are taken in the order of their ids, the smaller first, each in the order of asking: whoever
 * waits holds smaller ids than the one waited for, so no ring of waiting can close.
 *
 * From LAUNCH on a batch has half of the stall time, a communicator's making included. Before it,
 * who holds its process for the other end waits as long as that says WAITS, which it does while the
 * batch waits for its turn there: being busy is no fault, silence is. */

#include "common/transfer/nccl_link.h"

/* Words that came; from within the base. */
void pd_nccl_take_announce(pd_carrier *carrier, nccl_link *link, const void *bytes, size_t len);
void pd_nccl_take_go(pd_carrier *carrier, nccl_link *link, const void *bytes, size_t len);
void pd_nccl_take_launch(nccl_link *link);
void pd_nccl_take_waits(nccl_link *link);
void pd_nccl_take_landed(pd_carrier *carrier, nccl_link *link);

/* Goes on with the batch that this process is taken for, or takes it for the next one. */
bool pd_nccl_active_progress(pd_carrier *carrier);
/* Of a link that is up: makes a batch of what waits, and says that one waits here. */
bool pd_nccl_batch_progress(pd_carrier *carrier, nccl_link *link);
