/* A backend whose probe says no, with the word of a machine without a GPU. */

#include "kernels/backend.h"

#include <stdio.h>

static int probe(uint32_t device, char *reason, size_t reason_size)
{
    snprintf(reason, reason_size, "device %u: CUDA driver version is insufficient", device);
    return 0;
}

const kern_backend kern_backend_plugin = {
    .abi = KERN_BACKEND_ABI,
    .struct_bytes = sizeof(kern_backend),
    .name = "cuda",
    .probe = probe,
};
