#include "kernels/backends.h"

#include "kernels/ref/ops.h"

const kern_backend *const kern_backends[] = {&kern_backend_ref, NULL};
