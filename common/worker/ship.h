#pragma once

/* common/worker/ship.h - layer groups leave as they are done.
 *
 * Carries out the ship plans of a step: when a layer group is finished, its blocks are put, one put
 * for each run of blocks that are neighbours in both pools, and then their notice with the seals.
 * Runs on the compute thread, in the pause between two groups; what it posts travels while the next
 * group is computed. When the transfer's queue is full it waits: the compute thread must not run
 * ahead of the link without bound, and the transfer fails a link that stands still.
 *
 * Aborts come from the loop thread; a lock keeps the two apart, since the transfer takes puts from
 * one thread at a time. */

#include "common/worker/shipper.h"

extern const pd_shipper_ops pd_worker_shipper;
