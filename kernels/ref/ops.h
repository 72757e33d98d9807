#pragma once

/* kernels/ref/ops.h - the reference backend: what every operation means. */

#include "kernels/backend.h"

extern const kern_backend kern_backend_ref;
