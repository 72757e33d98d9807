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

V_INLINE __m256i q_six_bits(__m256i nibbles, __m256i pairs, const int t)
{
    const __m256i low = _mm256_set1_epi8(15), top = _mm256_set1_epi8(0x30);
    __m256i up = t < 2 ? _mm256_slli_epi16(pairs, 4 - 2 * t) : _mm256_srli_epi16(pairs, 2 * t - 4);

    return _mm256_or_si256(_mm256_and_si256(nibbles, low), _mm256_and_si256(up, top));
}

/* The halves' scales in both words of a lane take the place of the ones that other formats' sums
 * are added up with: dots[n] is their sum times the scales. Weights are unsigned here, so two runs
 * of products fit 16 bits (2 * 2 * 63 * 127 = 32004), and 32 times the scaled sums goes off. */
V_INLINE void q6_dots(const uint8_t *quants, const __m256i *scales, const kern_acts *acts,
                      size_t at, size_t blocks, const uint32_t acts_rows, __m256i *dots)
{
    __m256i both_scales = _mm256_blend_epi16(scales[0], scales[1], 0xaa);

#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++) {
        int32_t low = acts->low_sums[at + n * blocks];
        int32_t high = acts->quant_sums[at + n * blocks] - low;
        __m256i sums =
            _mm256_set1_epi32((int)((uint32_t)low & 0xffff) | (int)((uint32_t)high << 16));
        sums = _mm256_slli_epi32(_mm256_madd_epi16(both_scales, sums), 5);
        dots[n] = _mm256_sub_epi32(_mm256_setzero_si256(), sums);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i pairs = _mm256_loadu_si256((const __m256i *)(quants + 256 + 64 * half));
#pragma GCC unroll 2
        for (int run = 0; run < 4; run += 2) {
            __m256i first = _mm256_loadu_si256((const __m256i *)(quants + 64 * run));
            __m256i second = _mm256_loadu_si256((const __m256i *)(quants + 64 * run + 64));
            first = q_six_bits(half == 0 ? first : _mm256_srli_epi16(first, 4), pairs, run);
            second = q_six_bits(half == 0 ? second : _mm256_srli_epi16(second, 4), pairs, run + 1);
#pragma GCC unroll 4
            for (uint32_t n = 0; n < acts_rows; n++) {
                const int8_t *x =
                    acts->quants + (at + n * blocks) * KERN_BLOCK + 16 * half + 4 * run;
                __m256i a = _mm256_maddubs_epi16(first, q_broadcast(x));
                __m256i b = _mm256_maddubs_epi16(second, q_broadcast(x + 4));
                a = _mm256_madd_epi16(_mm256_add_epi16(a, b), scales[half]);
                dots[n] = _mm256_add_epi32(dots[n], a);
            }
        }
    }
}

/* As in gemm_avx512.h, of half a panel's rows; runs: 32 bytes each, of all 16 rows. */
typedef struct q_shared {
    __m256 d, least;
    const uint8_t *runs;
    uint8_t unpacked[KERN_K_RUNS * 32] __attribute__((aligned(32)));
} q_shared;

/* Two runs' scales and two runs' minima, 16 bytes each, to the place of the first. */
V_INLINE void q_place(__m256i scales, __m256i minima, uint8_t *out)
{
    _mm256_store_si256((__m256i *)out, _mm256_permute2x128_si256(scales, minima, 0x20));
    _mm256_store_si256((__m256i *)(out + 32), _mm256_permute2x128_si256(scales, minima, 0x31));
}

V_INLINE void q_share(const pd_dtype dtype, const uint8_t *panel, uint32_t half, uint32_t block,
                      q_shared *shared)
{
    const __m256i low = _mm256_set1_epi8(15), six = _mm256_set1_epi8(63);
    const __m256i top = _mm256_set1_epi8(0x30);
    const uint8_t *d = panel + kern_panel_d_at(dtype, block) + (size_t)half * 16;
    const uint8_t *scales = panel + kern_panel_run_scales_at(dtype, block);

    shared->d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)d));
    shared->runs = scales;
    if (dtype == PD_Q6_K)
        return;
    shared->least = _mm256_xor_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(d + 32))),
                                  _mm256_set1_ps(-0.0f));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(scales + 32 * i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(scales + 64 + 32 * i));
        __m256i c = _mm256_loadu_si256((const __m256i *)(scales + 128 + 32 * i));
        q_place(_mm256_and_si256(a, six), _mm256_and_si256(b, six), shared->unpacked + 64 * i);
        a = _mm256_and_si256(_mm256_srli_epi16(a, 2), top);
        b = _mm256_and_si256(_mm256_srli_epi16(b, 2), top);
        a = _mm256_or_si256(a, _mm256_and_si256(c, low));
        b = _mm256_or_si256(b, _mm256_and_si256(_mm256_srli_epi16(c, 4), low));
        q_place(a, b, shared->unpacked + 128 + 64 * i);
    }
    shared->runs = shared->unpacked;
}

/* One block of half a panel onto the sums of some activation rows. */
V_INLINE void q_block(const pd_dtype dtype, const uint8_t *panel, uint32_t half, uint32_t block,
                      const q_shared *shared, const kern_acts *acts, size_t at, size_t blocks,
                      const uint32_t acts_rows, __m256 *sums)
{
    const uint8_t *quants = panel + kern_panel_quants_at(dtype, block) + (size_t)half * 32;
    const int8_t *x = acts->quants + at * KERN_BLOCK;
    __m256i dots[4];
    __m256 d, m = _mm256_setzero_ps();

    if (dtype == PD_Q4_K || dtype == PD_Q6_K) {
        const uint8_t *run = shared->runs + (size_t)(block % KERN_K_RUNS) * 32 + (size_t)half * 8;
        __m256i scales[2] = {
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)run)),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(run + 16))),
        };
        d = shared->d;
        if (dtype == PD_Q4_K) {
            d = _mm256_mul_ps(d, _mm256_cvtepi32_ps(scales[0]));
            m = _mm256_mul_ps(shared->least, _mm256_cvtepi32_ps(scales[1]));
            q4_dots(quants, x, blocks * KERN_BLOCK, acts_rows, dots);
        } else {
            for (int i = 0; i < 2; i++) /* the same word twice */
                scales[i] = _mm256_blend_epi16(scales[i], _mm256_slli_epi32(scales[i], 16), 0xaa);
            q6_dots(quants, scales, acts, at, blocks, acts_rows, dots);
        }
    } else {
        const uint8_t *scale = panel + kern_panel_scales_at(dtype, block) + (size_t)half * 16;
        d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scale));
        if (dtype == PD_Q4_1)
            m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scale + 32)));
        if (dtype == PD_Q8_0)
            q8_dots(quants, x, blocks * KERN_BLOCK, acts_rows, dots);
        else
            q4_dots(quants, x, blocks * KERN_BLOCK, acts_rows, dots);
    }
#pragma GCC unroll 4
    for (uint32_t n = 0; n < acts_rows; n++, at += blocks) {
        __m256i dot = dots[n];
        if (dtype == PD_Q4_0)
            dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(8 * acts->quant_sums[at]));
        __m256 both = _mm256_mul_ps(d, _mm256_set1_ps(acts->scales[at]));
        sums[n] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot), sums[n]);
        if (dtype == PD_Q4_1 || dtype == PD_Q4_K)
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
    q_shared shared;

    do {
#pragma GCC unroll 4
        for (uint32_t n = 0; n < acts_rows; n++)
            sums[n] = _mm256_setzero_ps();
        for (uint32_t block = first, end = first + segment_blocks; block < end;) {
            uint32_t stop = end;
            if (dtype == PD_Q4_K || dtype == PD_Q6_K) {
                uint32_t next = (block / KERN_K_RUNS + 1) * KERN_K_RUNS;
                stop = next < end ? next : end;
                q_share(dtype, panel, half, block, &shared);
            }
            for (; block < stop; block++)
                q_block(dtype, panel, half, block, &shared, acts, at_first + block, blocks,
                        acts_rows, sums);
        }
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
