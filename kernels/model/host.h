#pragma once

/* kernels/model/host.h - the backend "cpu": the forward pass on the host's cores, whatever
 * instruction sets they have.
 *
 * Built in. Its pool may be any host memory. With seals, the threads that write K and V also hash
 * them (pd_seal_tiles, beside the pool in this process, or in the ranks' shared memory). */

#include "kernels/backend.h"

extern const kern_backend kern_backend_host;
