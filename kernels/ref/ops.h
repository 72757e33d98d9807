#pragma once

/* kernels/ref/ops.h - the reference backend: what every operation means. */

#include "kernels/ops.h"

extern const kern_ops kern_ops_ref;
