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

/* Run t of eight with 6-bit weights: the nibbles below two bits of each byte of pairs. */
V_INLINE __m512i q_six_bits(__m512i nibbles, __m512i pairs, const int t)
{
    __m512i up = t < 2 ? _mm512_slli_epi16(pairs, 4 - 2 * t) : _mm512_srli_epi16(pairs, 2 * t - 4);

    up = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), nibbles, up, 0xca); /* 1 ? 2 : 3 */
    return _mm512_and_si512(up, _mm512_set1_epi8(63));
}

V_INLINE void q_unpack(const pd_dtype dtype, const uint8_t *quants, __m512i *weights)
{
    const __m512i low = _mm512_set1_epi8(15);

    if (dtype == PD_Q6_K) {
        __m512i pairs = _mm512_loadu_si512(quants + 256);
        __m512i more_pairs = _mm512_loadu_si512(quants + 320);
#pragma GCC unroll 4
        for (int run = 0; run < 4; run++) {
            __m512i both = _mm512_loadu_si512(quants + 64 * run);
            weights[run] = q_six_bits(both, pairs, run);
            weights[run + 4] = q_six_bits(_mm512_srli_epi16(both, 4), more_pairs, run);
        }
        return;
    }
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
    if (dtype == PD_Q6_K)
        _mm_prefetch((const char *)quants + PREFETCH_BYTES + 320, _MM_HINT_T0);
    if (dtype != PD_Q8_0)
        return;
#pragma GCC unroll 4
    for (int line = 5; line < 9; line++)
        _mm_prefetch((const char *)quants + PREFETCH_BYTES + 64 * line, _MM_HINT_T0);
}

/* Of 256 columns of a K format: as floats, 16 rows each, what all runs share, and as bytes what
 * each run has, 32 a run: Q4_K scales and minima, Q6_K the scales of its halves. */
typedef struct q_shared {
    __m512 d, least;
    const uint8_t *runs;
    uint8_t unpacked[KERN_K_RUNS * 32] __attribute__((aligned(64)));
} q_shared;

/* Four runs' scales and four runs' minima, 16 bytes each, to the place of the first. */
V_INLINE void q_place(__m512i scales, __m512i minima, uint8_t *out)
{
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);

    _mm512_store_si512(out, _mm512_permutex2var_epi64(scales, first, minima));
    _mm512_store_si512(out + 64, _mm512_permutex2var_epi64(scales, second, minima));
}

V_INLINE void q_share(const pd_dtype dtype, const uint8_t *panel, uint32_t block, q_shared *shared)
{
    const __m256i *d = (const __m256i *)(panel + kern_panel_d_at(dtype, block));
    const uint8_t *scales = panel + kern_panel_run_scales_at(dtype, block);

    shared->d = _mm512_cvtph_ps(_mm256_loadu_si256(d));
    shared->runs = scales;
#pragma GCC unroll 4
    for (int line = 0; line < 4; line++)
        _mm_prefetch((const char *)scales + PREFETCH_BYTES + 64 * line, _MM_HINT_T0);
    if (dtype == PD_Q6_K)
        return;
    shared->least = v_negate(_mm512_cvtph_ps(_mm256_loadu_si256(d + 1)));
    const __m512i low = _mm512_set1_epi8(15), six = _mm512_set1_epi8(63);
    const __m512i top = _mm512_set1_epi8(0x30);
    __m512i a = _mm512_loadu_si512(scales), b = _mm512_loadu_si512(scales + 64);
    __m512i c = _mm512_loadu_si512(scales + 128);
    q_place(_mm512_and_si512(a, six), _mm512_and_si512(b, six), shared->unpacked);
    a = _mm512_and_si512(_mm512_srli_epi16(a, 2), top);
    b = _mm512_and_si512(_mm512_srli_epi16(b, 2), top);
    a = _mm512_or_si512(a, _mm512_and_si512(c, low));
    b = _mm512_or_si512(b, _mm512_and_si512(_mm512_srli_epi16(c, 4), low));
    q_place(a, b, shared->unpacked + 128);
    shared->runs = shared->unpacked;
}

/* A block's factors, 16 rows each: d of its dot, m of the activations' sum; Q6_K: low and high of
 * its halves. */
typedef struct q_factors {
    __m512 d, m, low, high;
} q_factors;

V_INLINE q_factors q_factors_of(const pd_dtype dtype, const uint8_t *panel, uint32_t block,
                                const q_shared *shared)
{
    q_factors f = {0};

    if (dtype == PD_Q4_K || dtype == PD_Q6_K) {
        const __m128i *run = (const __m128i *)(shared->runs + (size_t)(block % KERN_K_RUNS) * 32);
        __m128i one = _mm_loadu_si128(run), two = _mm_loadu_si128(run + 1);
        f.d = shared->d;
        f.low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(one));
        f.high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(two));
        if (dtype == PD_Q6_K)
            return f;
        f.d = _mm512_mul_ps(shared->d, f.low);
        f.m = _mm512_mul_ps(shared->least, f.high);
        return f;
    }
    const __m256i *scale = (const __m256i *)(panel + kern_panel_scales_at(dtype, block));
    f.d = _mm512_cvtph_ps(_mm256_loadu_si256(scale));
    if (dtype == PD_Q4_1)
        f.m = _mm512_cvtph_ps(_mm256_loadu_si256(scale + 1));
    return f;
}

/* dot + weights times x's four bytes in every lane; the broadcast is the instruction's own, which
 * the compiler would make another. */
V_INLINE __m512i q_dot_4(__m512i dot, __m512i weights, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dot) : "v"(weights), "m"(*(const int8_t(*)[4])x));
    return dot;
}

/* A part's dot product, exact: count runs of four columns. The sum starts at the bits of 1.5 *
 * 2^23, so that as a float it is that much too large: taking it off is an addition, where a
 * conversion would take a multiplier's place on some processors. |sum| <= 32 * 255 * 127 < 2^22.
 * Weights are unsigned: what they are too large by, times the activations' sum, is taken off, too.
 */
V_INLINE __m512 q_dot(const int32_t excess, const __m512i *weights, const int count,
                      const int8_t *x, int32_t sum)
{
    __m512i dot = _mm512_set1_epi32(KERN_EXP_MAGIC_BITS - (excess == 0 ? 0 : excess * sum));

#pragma GCC unroll 8
    for (int run = 0; run < count; run++)
        dot = q_dot_4(dot, weights[run], x + 4 * run);
    return _mm512_sub_ps(_mm512_castsi512_ps(dot), _mm512_set1_ps(KERN_EXP_MAGIC));
}

/* Of a block and the activations' block `at`. Q6_K: below 2^24, so what floats do is exact. */
V_INLINE __m512 q_block_dot(const pd_dtype dtype, const __m512i *weights, const q_factors *f,
                            const kern_acts *acts, size_t at)
{
    const int32_t excess = dtype == PD_Q8_0 ? 128 : dtype == PD_Q4_0 ? 8 : 0;
    const int8_t *x = acts->quants + at * KERN_BLOCK;

    if (dtype == PD_Q6_K) {
        int32_t low_sum = acts->low_sums[at];
        __m512 low = q_dot(32, weights, 4, x, low_sum);
        __m512 high = q_dot(32, weights + 4, 4, x + 16, acts->quant_sums[at] - low_sum);
        return _mm512_fmadd_ps(f->high, high, _mm512_mul_ps(f->low, low));
    }
    return q_dot(excess, weights, 8, x, excess == 0 ? 0 : acts->quant_sums[at]);
}

/* A block's dot onto a row's sum. */
V_INLINE __m512 q_update(const pd_dtype dtype, __m512 sum, __m512 dot, const q_factors *f,
                         const kern_acts *acts, size_t at)
{
    sum = _mm512_fmadd_ps(_mm512_mul_ps(f->d, _mm512_set1_ps(acts->scales[at])), dot, sum);
    if (dtype == PD_Q4_1 || dtype == PD_Q4_K)
        sum = _mm512_fmadd_ps(f->m, _mm512_set1_ps(acts->sums[at]), sum);
    return sum;
}

/* One block of a panel onto the sums of some activation rows. */
V_INLINE void q_block(const pd_dtype dtype, const uint8_t *panel, uint32_t block,
                      const q_shared *shared, const kern_acts *acts, size_t at, size_t blocks,
                      const uint32_t acts_rows, __m512 *sums)
{
    __m512i weights[8];
    const uint8_t *quants = panel + kern_panel_quants_at(dtype, block);

    q_prefetch(dtype, quants);
    q_unpack(dtype, quants, weights);
    q_factors f = q_factors_of(dtype, panel, block, shared);
#pragma GCC unroll 8
    for (uint32_t n = 0; n < acts_rows; n++, at += blocks) {
        __m512 dot = q_block_dot(dtype, weights, &f, acts, at);
        sums[n] = q_update(dtype, sums[n], dot, &f, acts, at);
    }
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
    q_shared shared;

    do {
#pragma GCC unroll 8
        for (uint32_t n = 0; n < acts_rows; n++)
            sums[n] = _mm512_setzero_ps();
        for (uint32_t block = first, end = first + segment_blocks; block < end;) {
            uint32_t stop = end;
            if (dtype == PD_Q4_K || dtype == PD_Q6_K) {
                uint32_t next = (block / KERN_K_RUNS + 1) * KERN_K_RUNS;
                stop = next < end ? next : end;
                q_share(dtype, panel, block, &shared);
            }
            for (; block < stop; block++)
                q_block(dtype, panel, block, &shared, acts, at_first + block, blocks, acts_rows,
                        sums);
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
