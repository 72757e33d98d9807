/* kernels/cuda/matmul_quant.cu - products with Q4_0, Q4_1 and Q8_0 weights (matmul_tiles.h).
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
        return matmul_launch_many<DTYPE, 1, 8, 4, 1, 3, 2>(stream, job);
    /* a block's tile is 128 weight rows and 64 or 128 rows; Q4_1 has one scale more a row, for
     * which 128 registers are not enough, and gets three blocks of 64 a processor */
    if constexpr (DTYPE == PD_Q4_1)
        return matmul_launch_many<DTYPE, 2, 8, 4, 1, 0, 3>(stream, job);
    else if (job->rows <= 64)
        return matmul_launch_many<DTYPE, 2, 8, 4, 1, 0, 4>(stream, job);
    else
        return matmul_launch_many<DTYPE, 2, 8, 4, 2, 0, 2>(stream, job);
}

pd_status matmul_quant(gpu_stream *stream, pd_dtype dtype, const matmul_job *job)
{
    if (dtype == PD_Q4_0)
        return run<PD_Q4_0>(stream, job);
    if (dtype == PD_Q4_1)
        return run<PD_Q4_1>(stream, job);
    return run<PD_Q8_0>(stream, job);
}
