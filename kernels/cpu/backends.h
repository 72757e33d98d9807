#pragma once

/* kernels/cpu/backends.h - the x86-64 backends, each built with its own instruction set's flags.
 * Nothing but the probe may be called before the probe says yes. */

#include "kernels/backend.h"

extern const kern_backend kern_backend_avx2;
extern const kern_backend kern_backend_avx512;

/* Built for any x86-64, so that asking is always safe. Score, or 0, and the reason. */
int kern_probe_avx2(char *reason, size_t reason_size);
int kern_probe_avx512(char *reason, size_t reason_size);
