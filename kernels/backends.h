#pragma once

/* kernels/backends.h - which backends this build holds: the list is another file a platform, chosen
 * by meson (kernels/cpu/backends.c on x86-64, kernels/ref/backends.c elsewhere). */

#include "kernels/backend.h"

extern const kern_backend *const kern_backends[]; /* reference first, NULL last */
