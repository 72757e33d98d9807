#pragma once

/* deploy/check_devices.h - whether what computes in a deployment can exchange KV blocks, before any
 * worker is started. By the words of `device:` alone: no device is asked. */

#include "common/config/deployment.h"

/* PD_E_INVALID: one line in why. Pools in a GPU's memory and in the host's do not meet: UCX is
 * opened for one kind. `auto` may be either, and is told by the workers when they meet. Nor can nccl
 * carry a pool in the host's memory, or one on several GPUs (docs/decisions/nccl.md). */
PD_CHECKED pd_status check_devices(const pd_deployment *deployment, char *why, size_t why_size);
