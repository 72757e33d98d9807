#pragma once

/* kernels/cpu/gemm_avx512.h - products with packed 4- and 8-bit matrices, AVX-512 VNNI.
 *
 * A tile is a panel (16 weight rows, one vector lane each) by up to 8 activation rows. A block's
 * weights are unpacked once into eight registers; an activation row then costs eight 4-way dot
 * products against broadcasts from memory, and one or two fused multiply-adds. No horizontal sums.
 * One activation row (decode) runs at the speed weights can be read.
 *
 * The bound is the multipliers: of Q4_1, 8 dot products, 1 product and 2 fused multiply-adds a
 * block and row, so 8 / 11 of the dot products' peak: 172 G MAC/s on a Zen 4 core of 235.
 *
 * The ladder (Q4_1, G MAC/s, Zen 4):
 *   117  16 activation rows: addresses and sums spill
 *   160  8 rows
 *   160  the dot products' own broadcasts: a third fewer instructions, so these are not the bound
 *   163  integers to floats by an addition (Q8_0: 172 to 178, Q4_0: 170 to 177)
 * 3, 5, 6 and 7 rows have tiles of their own: as 2 + 1, 4 + 1 ... they gave 132, 147, 161, 150. */

/* Ahead of the block under way: 1.5 KiB and 8 KiB gave 227 and 231 tokens/s where 4 gave 243. */
#define PREFETCH_BYTES 4096

V_INLINE void q_unpack(const pd_dtype dtype, const uint8_t *quants, __m512i *weights)
{
    const __m512i low = _mm512_set1_epi8(15);

    if (dtype == PD_Q8_0) {
#pragma GCC unroll 8
        for (int run = 0; run < 8; run++)
            weights[run] = _mm512_loadu_si512(quants + 64 * run);
        return;
    }
#pragma GCC unroll 4
    for (int run = 0; run < 4; run++) {
        __m512i pair = _mm512_loadu_si512(quants + 64 * run);
        weights[run] = _mm512_and_si512(pair, low);
        weights[run + 4] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
    }
}

/* Weights that come from memory: asked for some blocks ahead, into the next panel and matrix. */
V_INLINE void q_prefetch(const pd_dtype dtype, const uint8_t *quants)
{
#pragma GCC unroll 5
    for (int line = 0; line < 5; line++)
        _mm_prefetch((const char *)quants + PREFETCH_BYTES + 64 * line, _MM_HINT_T0);
    if (dtype != PD_Q8_0)
        return;
#pragma GCC unroll 4
    for (int line = 5; line < 9; line++)
        _mm_prefetch((const char *)quants + PREFETCH_BYTES + 64 * line, _MM_HINT_T0);
}

/* dot + weights times x's four bytes in every lane; the broadcast is the instruction's own, which
 * the compiler would make another. */
V_INLINE __m512i q_dot_4(__m512i dot, __m512i weights, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dot) : "v"(weights), "m"(*(const int8_t(*)[4])x));
    return dot;
}

/* A block's dot product, exact. The sum starts at the bits of 1.5 * 2^23, so that as a float it is
 * that much too large: taking it off is an addition, where a conversion would take a multiplier's
 * place on some processors. |sum| <= 32 * 255 * 127 < 2^22. Weights are unsigned: what they are too
 * large by, times the activations' sum, is taken off, too. */
V_INLINE __m512 q_dot(const pd_dtype dtype, const __m512i *weights, const int8_t *x, int32_t sum)
{
    const int32_t excess = dtype == PD_Q8_0 ? 128 : dtype == PD_Q4_0 ? 8 : 0;
    __m512i dot = _mm512_set1_epi32(KERN_EXP_MAGIC_BITS - (excess == 0 ? 0 : excess * sum));

#pragma GCC unroll 8
    for (int run = 0; run < 8; run++)
        dot = q_dot_4(dot, weights[run], x + 4 * run);
    return _mm512_sub_ps(_mm512_castsi512_ps(dot), _mm512_set1_ps(KERN_EXP_MAGIC));
}

V_INLINE void q_tile(const kern_matrix *matrix, const pd_dtype dtype, const uint8_t *panel,
                     const kern_acts *acts, uint32_t acts_row, const uint32_t acts_rows,
                     float *const *out, uint32_t row, __mmask16 mask, bool add)
{
    uint32_t blocks = matrix->cols / KERN_BLOCK, segment_blocks = blocks / matrix->segments;
    size_t at_first = (size_t)acts_row * blocks;
    uint32_t segments = kern_matrix_segments(matrix), depth = 0, segment = 0;
    uint32_t first = matrix->segment_from * segment_blocks;
    __m512 waiting[KERN_TREE_DEPTH][8], sums[8];

    do {
#pragma GCC unroll 8
        for (uint32_t n = 0; n < acts_rows; n++)
            sums[n] = _mm512_setzero_ps();
        for (uint32_t block = first; block < first + segment_blocks; block++) {
            __m512i weights[8];
            const uint8_t *quants = panel + kern_panel_quants_at(dtype, block);
            const __m256i *scale = (const __m256i *)(panel + kern_panel_scales_at(dtype, block));
            q_prefetch(dtype, quants);
            q_unpack(dtype, quants, weights);
            __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(scale)), m = d;
            if (dtype == PD_Q4_1)
                m = _mm512_cvtph_ps(_mm256_loadu_si256(scale + 1));
            size_t at = at_first + block;
#pragma GCC unroll 8
            for (uint32_t n = 0; n < acts_rows; n++, at += blocks) {
                __m512 dot = q_dot(dtype, weights, acts->quants + at * KERN_BLOCK,
                                   dtype == PD_Q4_1 ? 0 : acts->quant_sums[at]);
                __m512 both = _mm512_mul_ps(d, _mm512_set1_ps(acts->scales[at]));
                sums[n] = _mm512_fmadd_ps(both, dot, sums[n]);
                if (dtype == PD_Q4_1)
                    sums[n] = _mm512_fmadd_ps(m, _mm512_set1_ps(acts->sums[at]), sums[n]);
            }
        }
        for (uint32_t adds = kern_tree_adds(segment, segments, depth); adds > 0; adds--) {
            depth--;
#pragma GCC unroll 8
            for (uint32_t n = 0; n < acts_rows; n++)
                sums[n] = _mm512_add_ps(waiting[depth][n], sums[n]);
        }
        if (segment + 1 < segments) {
#pragma GCC unroll 8
            for (uint32_t n = 0; n < acts_rows; n++)
                waiting[depth][n] = sums[n];
            depth++;
        }
        first += segment_blocks;
    } while (++segment < segments);
#pragma GCC unroll 8
    for (uint32_t n = 0; n < acts_rows; n++) {
        float *place = out[n] + row;
        __m512 total = sums[n];
        if (add)
            total = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, place), total);
        _mm512_mask_storeu_ps(place, mask, total);
    }
}

V_INLINE void q_product(const kern_matrix *matrix, const pd_dtype dtype, uint32_t row_first,
                        uint32_t rows, const kern_acts *acts, uint32_t acts_first,
                        uint32_t acts_rows, float *const *out, bool add)
{
    size_t panel_bytes = kern_panel_bytes(dtype, matrix->cols);

    for (uint32_t row = row_first; row < row_first + rows; row += KERN_PANEL_ROWS) {
        const uint8_t *panel = (const uint8_t *)matrix->data + row / KERN_PANEL_ROWS * panel_bytes;
        __mmask16 mask = v_mask(row_first + rows - row);
        uint32_t n = 0;
        for (; n + 8 <= acts_rows; n += 8)
            q_tile(matrix, dtype, panel, acts, acts_first + n, 8, out + n, row, mask, add);
        float *const *rest = out + n;
        switch (acts_rows - n) {
#define Q_REST(count)                                                                              \
    case count:                                                                                    \
        q_tile(matrix, dtype, panel, acts, acts_first + n, count, rest, row, mask, add);           \
        break
            Q_REST(1);
            Q_REST(2);
            Q_REST(3);
            Q_REST(4);
            Q_REST(5);
            Q_REST(6);
            Q_REST(7);
#undef Q_REST
        default: break;
        }
    }
}
