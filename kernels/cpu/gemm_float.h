#pragma once

/* kernels/cpu/gemm_float.h - products with F32, F16 and BF16 matrices, in the words of a v16
 * header.
 *
 * Each sum is one vector of 16 lanes along the columns, then the lane tree, as in the reference; a
 * tile of weight rows by activation rows keeps several going and reuses both in registers. */

V_INLINE v16 float_weights(const pd_dtype dtype, const uint8_t *row, size_t col)
{
    if (dtype == PD_F16)
        return v_load_f16((const uint16_t *)row + col);
    if (dtype == PD_BF16)
        return v_load_bf16((const uint16_t *)row + col);
    return v_load((const float *)row + col);
}

/* The last columns of a segment, fewer than 16, as 16 with zeros. */
V_INLINE v16 float_weights_some(const pd_dtype dtype, const uint8_t *row, size_t col,
                                uint32_t count)
{
    size_t size = dtype == PD_F32 ? 4 : 2;
    uint8_t padded[64] = {0};

    memcpy(padded, row + col * size, count * size);
    return float_weights(dtype, padded, 0);
}

/* A tile's rows lie one after the other, and the next tile's after them: those are asked for in
 * their order in memory, as many bytes as this tile takes of its rows in the meantime. One
 * activation row then reads 24 GB/s of F16 from memory, where it read 11 left to the processor, and
 * 12 with each of the four rows asked for 1 KiB ahead. */
V_INLINE void float_prefetch(const uint8_t *weights, size_t row_bytes, size_t at,
                             const uint32_t rows)
{
    const char *next = (const char *)weights + rows * (row_bytes + at);

#pragma GCC unroll 4
    for (uint32_t line = 0; line < rows; line++)
        _mm_prefetch(next + (size_t)64 * line, _MM_HINT_T0);
}

V_INLINE void float_tile(const kern_matrix *matrix, const pd_dtype dtype, uint32_t row,
                         const uint32_t rows, const kern_acts *acts, uint32_t acts_row,
                         const uint32_t acts_rows, float *const *out, bool add, bool from_memory)
{
    size_t row_bytes = (size_t)matrix->cols * (dtype == PD_F32 ? 4 : 2);
    const uint8_t *weights = (const uint8_t *)matrix->data + row * row_bytes;
    const float *values = acts->values + (size_t)acts_row * acts->cols;
    uint32_t cols = matrix->cols / matrix->segments, whole = cols / 16 * 16;
    uint32_t segments = kern_matrix_segments(matrix), segment = 0, depth = 0;
    float waiting[KERN_TREE_DEPTH][V_MM_ROWS][V_MM_ACTS], totals[V_MM_ROWS][V_MM_ACTS];

    do {
        size_t first = (size_t)(matrix->segment_from + segment) * cols;
        uint32_t adds = kern_tree_adds(segment, segments, depth);
        size_t first_at = first * (dtype == PD_F32 ? 4 : 2);
        v16 sums[V_MM_ROWS][V_MM_ACTS];
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t n = 0; n < acts_rows; n++)
                sums[r][n] = v_zero();
        for (size_t col = first; col < first + whole; col += 16) {
            v16 x[V_MM_ACTS];
            size_t at = col * (dtype == PD_F32 ? 4 : 2);
            if (from_memory && (dtype == PD_F32 || at % 64 == first_at % 64))
                float_prefetch(weights, row_bytes, at, rows);
#pragma GCC unroll 4
            for (uint32_t n = 0; n < acts_rows; n++)
                x[n] = v_load(values + (size_t)n * acts->cols + col);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < rows; r++) {
                v16 w = float_weights(dtype, weights + r * row_bytes, col);
#pragma GCC unroll 4
                for (uint32_t n = 0; n < acts_rows; n++)
                    sums[r][n] = v_fma(w, x[n], sums[r][n]);
            }
        }
        for (uint32_t r = 0; r < rows; r++) {
            for (uint32_t n = 0; n < acts_rows; n++) {
                if (whole < cols)
                    sums[r][n] = v_fma(
                        float_weights_some(dtype, weights + r * row_bytes, first + whole,
                                           cols - whole),
                        v_load_some(values + (size_t)n * acts->cols + first + whole, cols - whole),
                        sums[r][n]);
                float sum = v_tree_sum(sums[r][n]);
                for (uint32_t i = 1; i <= adds; i++)
                    sum = waiting[depth - i][r][n] + sum;
                waiting[depth - adds][r][n] = totals[r][n] = sum;
            }
        }
        depth += 1 - adds;
    } while (++segment < segments);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t n = 0; n < acts_rows; n++)
            out[n][row + r] = add ? out[n][row + r] + totals[r][n] : totals[r][n];
}

V_INLINE void float_product(const kern_matrix *matrix, const pd_dtype dtype, uint32_t row_first,
                            uint32_t rows, const kern_acts *acts, uint32_t acts_first,
                            uint32_t acts_rows, float *const *out, bool add)
{
    uint32_t end = row_first + rows, row = row_first, n = 0;

    for (; row + V_MM_ROWS <= end; row += V_MM_ROWS) {
        for (n = 0; n + V_MM_ACTS <= acts_rows; n += V_MM_ACTS)
            float_tile(matrix, dtype, row, V_MM_ROWS, acts, acts_first + n, V_MM_ACTS, out + n, add,
                       n == 0);
        for (; n < acts_rows; n++)
            float_tile(matrix, dtype, row, V_MM_ROWS, acts, acts_first + n, 1, out + n, add,
                       n == 0);
    }
    for (; row < end; row++)
        for (n = 0; n < acts_rows; n++)
            float_tile(matrix, dtype, row, 1, acts, acts_first + n, 1, out + n, add, n == 0);
}
