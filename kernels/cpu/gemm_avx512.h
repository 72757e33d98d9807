#pragma once

/* kernels/cpu/gemm_avx512.h - products with packed 4- and 8-bit matrices, AVX-512 VNNI.
 *
 * A tile is a panel (16 weight rows, one vector lane each) by up to 8 activation rows (16 of Q6_K).
 * A block's weights are unpacked once into eight registers; an activation row then costs eight
 * 4-way dot products against broadcasts from memory, and one or two fused multiply-adds. No
 * horizontal sums. One activation row (decode) runs at the speed weights can be read.
 *
 * The bound is the multipliers: of Q4_1, 8 dot products, 1 product and 2 fused multiply-adds a
 * block and row, so 8 / 11 of the dot products' peak: 172 G MAC/s on a Zen 4 core of 235.
 *
 * The ladder (Q4_1, G MAC/s, Zen 4):
 *   117  16 activation rows: addresses and sums spill
 *   160  8 rows
 *   160  the dot products' own broadcasts: a third fewer instructions, so these are not the bound
 *   161  integers to floats by an addition (Q8_0: 170, Q4_0: 174, Q4_K: 155, Q6_K: 135)
 *   167  rows two by two, in one piece of assembly: less waits for its own last result, and the
 *        compiler spills no addresses (Q8_0: 172, Q4_0: 178, Q4_K: 158, Q6_K: 139)
 *   163  rows two by two, 16 to a tile, addresses counted up; but Q6_K, which unpacks most: 144
 *   163  rows four by four
 * 3, 5, 6 and 7 rows have tiles of their own: as 2 + 1, 4 + 1 ... they gave 132, 147, 161, 150. */

/* Ahead of the block under way: 1.5 KiB and 8 KiB gave 227 and 231 tokens/s where 4 gave 243. */
#define PREFETCH_BYTES 4096
#define Q_ROWS_MAX     16 /* activation rows of a tile */
#define Q_PAIRS_FROM   8  /* so many go two by two; fewer lose by it (3: 159 to 155) */

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

/* The same of two rows, stride bytes apart, in turns: less waits for its own last result. */
V_INLINE void q_dot_pair(const int32_t excess, const __m512i *weights, const int count,
                         const int8_t *x, size_t stride, int32_t sum_0, int32_t sum_1, __m512 *out)
{
    const __m512 magic = _mm512_set1_ps(KERN_EXP_MAGIC);
    __m512i dot_0 = _mm512_set1_epi32(KERN_EXP_MAGIC_BITS - (excess == 0 ? 0 : excess * sum_0));
    __m512i dot_1 = _mm512_set1_epi32(KERN_EXP_MAGIC_BITS - (excess == 0 ? 0 : excess * sum_1));

#define Q_PAIR(at, weight)                                                                         \
    "vpdpbusd " at "(%[x])%{1to16%}, %[" weight "], %[dot_0]\n\t"                                  \
    "vpdpbusd " at "(%[x],%[stride])%{1to16%}, %[" weight "], %[dot_1]\n\t"
    __asm__(Q_PAIR("0", "w0") Q_PAIR("4", "w1") Q_PAIR("8", "w2") Q_PAIR("12", "w3")
            : [dot_0] "+&v"(dot_0), [dot_1] "+&v"(dot_1)
            : [w0] "v"(weights[0]), [w1] "v"(weights[1]), [w2] "v"(weights[2]),
              [w3] "v"(weights[3]), [x] "r"(x), [stride] "r"(stride), "m"(*(const int8_t(*)[16])x),
              "m"(*(const int8_t(*)[16])(x + stride)));
    if (count > 4)
        __asm__(Q_PAIR("16", "w4") Q_PAIR("20", "w5") Q_PAIR("24", "w6") Q_PAIR("28", "w7")
                : [dot_0] "+&v"(dot_0), [dot_1] "+&v"(dot_1)
                : [w4] "v"(weights[4]), [w5] "v"(weights[5]), [w6] "v"(weights[6]),
                  [w7] "v"(weights[7]), [x] "r"(x), [stride] "r"(stride),
                  "m"(*(const int8_t(*)[16])(x + 16)),
                  "m"(*(const int8_t(*)[16])(x + stride + 16)));
#undef Q_PAIR
    out[0] = _mm512_sub_ps(_mm512_castsi512_ps(dot_0), magic);
    out[1] = _mm512_sub_ps(_mm512_castsi512_ps(dot_1), magic);
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

V_INLINE void q_block_dot_pair(const pd_dtype dtype, const __m512i *weights, const q_factors *f,
                               const kern_acts *acts, size_t at, size_t blocks, __m512 *dots)
{
    const int32_t excess = dtype == PD_Q8_0 ? 128 : dtype == PD_Q4_0 ? 8 : 0;
    const int8_t *x = acts->quants + at * KERN_BLOCK;
    size_t stride = blocks * KERN_BLOCK;

    if (dtype == PD_Q6_K) {
        int32_t low_0 = acts->low_sums[at], low_1 = acts->low_sums[at + blocks];
        __m512 low[2];
        q_dot_pair(32, weights, 4, x, stride, low_0, low_1, low);
        q_dot_pair(32, weights + 4, 4, x + 16, stride, acts->quant_sums[at] - low_0,
                   acts->quant_sums[at + blocks] - low_1, dots);
        dots[0] = _mm512_fmadd_ps(f->high, dots[0], _mm512_mul_ps(f->low, low[0]));
        dots[1] = _mm512_fmadd_ps(f->high, dots[1], _mm512_mul_ps(f->low, low[1]));
        return;
    }
    q_dot_pair(excess, weights, 8, x, stride, excess == 0 ? 0 : acts->quant_sums[at],
               excess == 0 ? 0 : acts->quant_sums[at + blocks], dots);
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
    const uint32_t together = acts_rows >= Q_PAIRS_FROM ? 2 : 1;
    __m512i weights[8];
    const uint8_t *quants = panel + kern_panel_quants_at(dtype, block);

    q_prefetch(dtype, quants);
    q_unpack(dtype, quants, weights);
    q_factors f = q_factors_of(dtype, panel, block, shared);
#pragma GCC unroll 8
    for (uint32_t n = 0; n < acts_rows; n += together, at += together * blocks) {
        __m512 dots[2];
        if (together == 2) {
            q_block_dot_pair(dtype, weights, &f, acts, at, blocks, dots);
            sums[n + 1] = q_update(dtype, sums[n + 1], dots[1], &f, acts, at + blocks);
        } else {
            dots[0] = q_block_dot(dtype, weights, &f, acts, at);
        }
        sums[n] = q_update(dtype, sums[n], dots[0], &f, acts, at);
        if (acts_rows > 8) /* counted up, or the addresses of all rows are kept and spill */
            __asm__("" : "+r"(at));
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
    __m512 waiting[KERN_TREE_DEPTH][Q_ROWS_MAX], sums[Q_ROWS_MAX];
    q_shared shared;

    do {
#pragma GCC unroll 16
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
#pragma GCC unroll 16
            for (uint32_t n = 0; n < acts_rows; n++)
                sums[n] = _mm512_add_ps(waiting[depth][n], sums[n]);
        }
        if (segment + 1 < segments) {
#pragma GCC unroll 16
            for (uint32_t n = 0; n < acts_rows; n++)
                waiting[depth][n] = sums[n];
            depth++;
        }
        first += segment_blocks;
    } while (++segment < segments);
#pragma GCC unroll 16
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
        for (; dtype == PD_Q6_K && n + Q_ROWS_MAX <= acts_rows; n += Q_ROWS_MAX)
            q_tile(matrix, dtype, panel, acts, acts_first + n, Q_ROWS_MAX, out + n, row, mask, add);
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
