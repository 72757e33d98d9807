#pragma once

/* kernels/cpu/ops_list.h - the x86-64 tables, each built with its own instruction set's flags.
 * Nothing but the probe may be called before the probe says yes. */

#include "kernels/ops.h"

extern const kern_ops kern_ops_avx2;
extern const kern_ops kern_ops_avx512;
extern const kern_ops kern_ops_amx;
extern const kern_ops kern_ops_amx_plain;

/* Built for any x86-64, so that asking is always safe. Score, or 0, and the reason. */
int kern_probe_avx2(char *reason, size_t reason_size);
int kern_probe_avx512(char *reason, size_t reason_size);
/* Asks the system for the tiles' registers, for this process from then on. */
int kern_probe_amx(char *reason, size_t reason_size);
int kern_probe_amx_plain(char *reason, size_t reason_size);

/* kern_ops' matmul on AMX's tiles, by the processor or in plain C; the other operations of both
 * tables are AVX-512's. */
void kern_amx_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                     const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                     float *const *out, bool add);
void kern_amx_plain_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                           const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                           float *const *out, bool add);
