#pragma once

/* kernels/cpu/table.h - one instruction set's table, from the functions in the headers included
 * before it. Last in the source file of an instruction set, which defines the name, the probe and
 * the table.
 */

static bool fast_supports(pd_dtype dtype)
{
    return dtype <= PD_Q6_K;
}

static void fast_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                        const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                        float *const *out, bool add)
{
    switch (matrix->dtype) {
    case PD_F32:
        float_product(matrix, PD_F32, row_first, rows, acts, acts_first, acts_rows, out, add);
        break;
    case PD_F16:
        float_product(matrix, PD_F16, row_first, rows, acts, acts_first, acts_rows, out, add);
        break;
    case PD_BF16:
        float_product(matrix, PD_BF16, row_first, rows, acts, acts_first, acts_rows, out, add);
        break;
#define FAST_PRODUCT(dtype)                                                                        \
    case dtype:                                                                                    \
        q_product(matrix, dtype, row_first, rows, acts, acts_first, acts_rows, out, add);          \
        break
        FAST_PRODUCT(PD_Q4_0);
        FAST_PRODUCT(PD_Q4_1);
        FAST_PRODUCT(PD_Q8_0);
        FAST_PRODUCT(PD_Q4_K);
        FAST_PRODUCT(PD_Q6_K);
#undef FAST_PRODUCT
    default: pd_assert(fast_supports(matrix->dtype)); break;
    }
}

#define KERN_FAST_TABLE(table_name, table_probe, table_matmul)                                     \
    {                                                                                              \
        .name = (table_name), .probe = (table_probe), .supports = fast_supports,                   \
        .pack_bytes = kern_pack_bytes, .pack = kern_pack, .quantize = fast_quantize,               \
        .residual = fast_residual, .matmul = (table_matmul), .rms_norm = fast_rms_norm,            \
        .rope = fast_rope, .store_f16 = fast_store_f16, .store_kv = fast_store_kv,                 \
        .silu_mul = fast_silu_mul, .attention_scratch_bytes = fast_attention_scratch_bytes,        \
        .attention = fast_attention, .attention_part = fast_attention_part,                        \
        .attention_join = fast_attention_join,                                                     \
    }
