/* A library that needs a function which nobody has. */

#include "kernels/backend.h"

int kern_nobody_has_this(uint32_t device, char *reason, size_t reason_size);

const kern_backend kern_backend_plugin = {
    .abi = KERN_BACKEND_ABI,
    .struct_bytes = sizeof(kern_backend),
    .name = "cuda",
    .probe = kern_nobody_has_this,
};
