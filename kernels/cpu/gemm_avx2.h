#pragma once

/* kernels/cpu/gemm_avx2.h - products with packed 4- and 8-bit matrices, AVX2.
 *
 * As gemm_avx512.h, with half a panel (8 weight rows) by up to 4 activation rows. The 4-way dot
 * product is two steps here, the first into 16 bits: eight sums of two 4-bit products are at most
 * 8 * 2 * 15 * 127 = 30480 and fit; two 8-bit products are at most 2 * 128 * 127 = 32512, so those
 * are widened one by one, as |w| times x with w's sign. */

V_INLINE __m256i q_broadcast(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

V_INLINE void q4_dots(const uint8_t *quants, const int8_t *x, size_t stride,
                      const uint32_t acts_rows, __m256i *dots)
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);

#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++)
        dots[n] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int run = 0; run < 4; run++) {
        __m256i pair = _mm256_loadu_si256((const __m256i *)(quants + 64 * run));
        __m256i first = _mm256_and_si256(pair, low);
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low);
#pragma GCC unroll 4
        for (uint32_t n = 0; n < acts_rows; n++) {
            const int8_t *four = x + n * stride + 4 * run;
            __m256i a = _mm256_maddubs_epi16(first, q_broadcast(four));
            __m256i b = _mm256_maddubs_epi16(second, q_broadcast(four + 16));
            dots[n] = _mm256_add_epi16(dots[n], _mm256_add_epi16(a, b));
        }
    }
#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++)
        dots[n] = _mm256_madd_epi16(dots[n], ones);
}

V_INLINE void q8_dots(const uint8_t *quants, const int8_t *x, size_t stride,
                      const uint32_t acts_rows, __m256i *dots)
{
    const __m256i flip = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi16(1);

#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++)
        dots[n] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int run = 0; run < 8; run++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(quants + 64 * run));
        w = _mm256_xor_si256(w, flip);
        __m256i size = _mm256_abs_epi8(w);
#pragma GCC unroll 4
        for (uint32_t n = 0; n < acts_rows; n++) {
            __m256i signed_x = _mm256_sign_epi8(q_broadcast(x + n * stride + 4 * run), w);
            __m256i product = _mm256_maddubs_epi16(size, signed_x);
            dots[n] = _mm256_add_epi32(dots[n], _mm256_madd_epi16(product, ones));
        }
    }
}

/* One block of half a panel onto the sums of some activation rows. */
V_INLINE void q_block(const pd_dtype dtype, const uint8_t *quants, const uint8_t *scale,
                      const kern_acts *acts, size_t at, size_t blocks, const uint32_t acts_rows,
                      __m256 *sums)
{
    __m256i dots[4];
    __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scale)), m = d;

    if (dtype == PD_Q8_0)
        q8_dots(quants, acts->quants + at * KERN_BLOCK, blocks * KERN_BLOCK, acts_rows, dots);
    else
        q4_dots(quants, acts->quants + at * KERN_BLOCK, blocks * KERN_BLOCK, acts_rows, dots);
    if (dtype == PD_Q4_1)
        m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scale + 32)));
#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++, at += blocks) {
        __m256i dot = dots[n];
        if (dtype == PD_Q4_0)
            dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(8 * acts->quant_sums[at]));
        __m256 both = _mm256_mul_ps(d, _mm256_set1_ps(acts->scales[at]));
        sums[n] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot), sums[n]);
        if (dtype == PD_Q4_1)
            sums[n] = _mm256_fmadd_ps(m, _mm256_set1_ps(acts->sums[at]), sums[n]);
    }
}

/* panel points at the half's first row; rows: how many of its 8 to write. */
V_INLINE void q_half_tile(const kern_matrix *matrix, const pd_dtype dtype, const uint8_t *panel,
                          uint32_t half, const kern_acts *acts, uint32_t acts_row,
                          const uint32_t acts_rows, float *const *out, uint32_t row, uint32_t rows,
                          bool add)
{
    uint32_t blocks = matrix->cols / KERN_BLOCK, segment_blocks = blocks / matrix->segments;
    size_t at_first = (size_t)acts_row * blocks;
    __m256i mask = v_mask(rows).a;
    uint32_t segments = kern_matrix_segments(matrix), depth = 0, segment = 0;
    uint32_t first = matrix->segment_from * segment_blocks;
    __m256 waiting[KERN_TREE_DEPTH][4], sums[4];

    do {
#pragma GCC unroll 4
        for (uint32_t n = 0; n < acts_rows; n++)
            sums[n] = _mm256_setzero_ps();
        for (uint32_t block = first; block < first + segment_blocks; block++)
            q_block(dtype, panel + kern_panel_quants_at(dtype, block) + (size_t)half * 32,
                    panel + kern_panel_scales_at(dtype, block) + (size_t)half * 16, acts,
                    at_first + block, blocks, acts_rows, sums);
        for (uint32_t adds = kern_tree_adds(segment, segments, depth); adds > 0; adds--) {
            depth--;
#pragma GCC unroll 4
            for (uint32_t n = 0; n < acts_rows; n++)
                sums[n] = _mm256_add_ps(waiting[depth][n], sums[n]);
        }
        if (segment + 1 < segments) {
#pragma GCC unroll 4
            for (uint32_t n = 0; n < acts_rows; n++)
                waiting[depth][n] = sums[n];
            depth++;
        }
        first += segment_blocks;
    } while (++segment < segments);
#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++) {
        float *place = out[n] + row;
        __m256 total = sums[n];
        if (add)
            total = _mm256_add_ps(_mm256_maskload_ps(place, mask), total);
        _mm256_maskstore_ps(place, mask, total);
    }
}

V_INLINE void q_product(const kern_matrix *matrix, const pd_dtype dtype, uint32_t row_first,
                        uint32_t rows, const kern_acts *acts, uint32_t acts_first,
                        uint32_t acts_rows, float *const *out, bool add)
{
    size_t panel_bytes = kern_panel_bytes(dtype, matrix->cols);

    for (uint32_t row = row_first; row < row_first + rows; row += 8) {
        const uint8_t *panel = (const uint8_t *)matrix->data + row / KERN_PANEL_ROWS * panel_bytes;
        uint32_t half = row / 8 % 2, left = row_first + rows - row, n = 0;
        for (; n + 4 <= acts_rows; n += 4)
            q_half_tile(matrix, dtype, panel, half, acts, acts_first + n, 4, out + n, row, left,
                        add);
        for (; n < acts_rows; n++)
            q_half_tile(matrix, dtype, panel, half, acts, acts_first + n, 1, out + n, row, left,
                        add);
    }
}
