#pragma once

/* kernels/model/rope.h - the table of rotary position angles.
 *
 * Sine and cosine are computed here in double precision from their series, not by the C library, so
 * that two machines with different libraries rotate alike. Any thread. */

#include <stdint.h>

/* table_out: [positions][dims / 2][cos, sin] with angle position * base^(-2i / dims). */
void kern_rope_table(double base, uint32_t dims, uint32_t positions, float *table_out);
