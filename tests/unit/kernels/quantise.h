#pragma once

/* tests/unit/kernels/quantise.h - floats as blocks of a weight format, plainly: the smallest scale
 * that covers a block's values, and each value's nearest step. */

#include "common/model_file/model_file.h"

/* x: [count], whole blocks; out: count / block_weights blocks. */
void test_quantise(pd_dtype dtype, const float *x, size_t count, void *out);
