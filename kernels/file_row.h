#pragma once

/* kernels/file_row.h - a row of a matrix as a model file holds it, as floats.
 *
 * The meaning of every number format, and how the embedding and the norms are read, whatever
 * computes afterwards. Any thread. */

#include "common/model_file/model_file.h"

/* out: [cols], cols in whole blocks of the format. */
void kern_row_to_f32(pd_dtype dtype, const void *row, uint32_t cols, float *out);
