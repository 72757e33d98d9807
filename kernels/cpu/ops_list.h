#pragma once

/* kernels/cpu/ops_list.h - the x86-64 tables, each built with its own instruction set's flags.
 * Nothing but the probe may be called before the probe says yes. */

#include "kernels/ops.h"

extern const kern_ops kern_ops_avx2;
extern const kern_ops kern_ops_avx512;

/* Built for any x86-64, so that asking is always safe. Score, or 0, and the reason. */
int kern_probe_avx2(char *reason, size_t reason_size);
int kern_probe_avx512(char *reason, size_t reason_size);
