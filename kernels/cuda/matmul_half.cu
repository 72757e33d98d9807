/* kernels/cuda/matmul_half.cu - products with f16 and bf16 weights (matmul_tiles.h).
 */

#include "kernels/cuda/matmul_tiles.h"

template <int DTYPE> static pd_status run(gpu_stream *stream, const matmul_job *job)
{
    uint32_t leaves = matmul_leaves_max(job);

    if (job->rows <= MATMUL_FEW_ROWS)
        return matmul_run_few<DTYPE>(stream, job);
    if (leaves > 8)
        return matmul_launch_many<DTYPE, 1, 4, 4, 1, 6, 2>(stream, job);
    if (leaves > 1)
        return matmul_launch_many<DTYPE, 2, 4, 2, 2, 3, 2>(stream, job);
    return matmul_launch_many<DTYPE, 4, 8, 2, 2, 0, 2>(stream, job);
}

pd_status matmul_half(gpu_stream *stream, pd_dtype dtype, const matmul_job *job)
{
    if (dtype == PD_F16)
        return run<PD_F16>(stream, job);
    return run<PD_BF16>(stream, job);
}
