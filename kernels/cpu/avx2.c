/* The AVX2 backend: the headers below are its functions. */

#include "kernels/cpu/ops_list.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/v16_avx2.h"

#include "kernels/cpu/rows.h"

#include "kernels/cpu/attention.h"
#include "kernels/cpu/gemm_avx2.h"
#include "kernels/cpu/gemm_float.h"

#include "kernels/cpu/table.h"

const kern_ops kern_ops_avx2 = KERN_FAST_TABLE("cpu-avx2", kern_probe_avx2, fast_matmul);
