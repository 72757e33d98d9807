#pragma once

/* kernels/cuda/devices.h - which device a rank computes on.
 *
 * Rank r of `cuda:N` has device N + r: so many there must be. For tests on a machine with fewer,
 * KVFERRY_SHARE_DEVICE=1 in the environment gives all ranks device N. */

#include "common/base/status.h"

#include <stdint.h>

/* PD_E_UNSUPPORTED, logged: there are too few, or none. backend: for the log. One thread. */
PD_CHECKED pd_status cu_device_of_rank(const char *backend, uint32_t first, uint32_t rank,
                                       uint32_t ranks, uint32_t *device_out);
