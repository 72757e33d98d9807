/* A backend of another ABI. */

#include "kernels/backend.h"

const kern_backend kern_backend_plugin = {
    .abi = KERN_BACKEND_ABI + 1,
    .struct_bytes = sizeof(kern_backend),
    .name = "cuda",
};
