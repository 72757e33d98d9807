#pragma once

/* kernels/model/rope.h - the table of rotary position angles.
 *
 * Sine and cosine are computed here in double precision from their series, not by the C library, so
 * that two machines with different libraries rotate alike. Any thread. */

#include <stdint.h>

/* frequencies_out: [dims / 2], base^(-2i / dims). */
void kern_rope_frequencies(double base, uint32_t dims, double *frequencies_out);
/* rows_out: [positions][dims / 2][cos, sin], the angle being position * frequency, of positions
 * from first on. About 2 us a position of 64 dims: 17 ms for all of a context of 8,192. */
void kern_rope_rows(const double *frequencies, uint32_t dims, uint32_t first, uint32_t positions,
                    float *rows_out);
