/* Products as by AMX, its tiles in plain C: the headers below are the functions. */

#include "kernels/cpu/ops_list.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/v16_avx512.h"

#include "kernels/cpu/gemm_avx512.h"
#include "kernels/cpu/tile_plain.h"

#include "kernels/cpu/gemm_amx.h"

void kern_amx_plain_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                           const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                           float *const *out, bool add)
{
    amx_matmul(matrix, row_first, rows, acts, acts_first, acts_rows, out, add);
}
