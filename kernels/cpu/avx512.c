/* The AVX-512 VNNI backend: the headers below are its functions. With AMX only products differ. */

#include "kernels/cpu/ops_list.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/v16_avx512.h"

#include "kernels/cpu/rows.h"

#include "kernels/cpu/attention.h"
#include "kernels/cpu/gemm_avx512.h"
#include "kernels/cpu/gemm_float.h"

#include "kernels/cpu/table.h"

const kern_ops kern_ops_avx512 = KERN_FAST_TABLE("cpu-avx512", kern_probe_avx512, fast_matmul);
const kern_ops kern_ops_amx = KERN_FAST_TABLE("cpu-amx", kern_probe_amx, kern_amx_matmul);
const kern_ops kern_ops_amx_plain =
    KERN_FAST_TABLE("cpu-amx-plain", kern_probe_amx_plain, kern_amx_plain_matmul);
