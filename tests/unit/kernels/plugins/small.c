/* A backend whose table has another size than ours. */

#include "kernels/backend.h"

const kern_backend kern_backend_plugin = {
    .abi = KERN_BACKEND_ABI,
    .struct_bytes = sizeof(kern_backend) - 8,
    .name = "cuda",
};
