#pragma once

/* kernels/cpu/gemm_amx.h - products with packed matrices on matrix tiles, AMX int8; in the words of
 * tile_native.h or tile_plain.h, and of gemm_avx512.h, included before.
 *
 * 16 activation rows by a panel (16 weight rows): a block's 32 columns are one tile product, whose
 * 16 x 16 exact integers are scaled and added in AVX-512 as gemm_avx512.h adds them, so that the
 * sums are the same bits. A panel's runs of 64 bytes are a tile's rows as they lie: Q8_0 is loaded
 * from the panel, nibbles are expanded into 512 bytes first. Q6_K has two scales a block and takes
 * two products of 16 columns. Fewer than 16 rows, what 16 leave over, and matrices of floats go to
 * the AVX-512 table: a tile product takes as long for one row as for 16 of them.
 *
 * By instructions for 16 x 16 x 32 (Q4_1): 16 cycles of the tile unit, beside it 16 times a
 * conversion, a product and two fused multiply-adds, 32 cycles on two ports; as dot products they
 * are 128 and 48, 88 cycles. Not measured: no processor at hand has AMX. */

#define AMX_ROWS 16

typedef struct amx_space {
    tile_state state;
    uint8_t weights[8][64] __attribute__((aligned(64)));
    int32_t dots[2][AMX_ROWS][16] __attribute__((aligned(64)));
} amx_space;

/* Tiles 0 and 1: sums; 2 and 3: activations; 4 and 5: weights; the second ones are Q6_K's. */
V_INLINE void amx_configure(const pd_dtype dtype, amx_space *space)
{
    const uint16_t cols = dtype == PD_Q6_K ? 16 : 32;
    const uint8_t runs = (uint8_t)(cols / 4);
    const tile_config config __attribute__((aligned(64))) = {
        .palette = 1,
        .row_bytes = {64, 64, cols, cols, 64, 64},
        .rows = {AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS, runs, runs},
    };

    TILE_CONFIGURE(&space->state, &config);
}

/* The block's dots as they come of unsigned weights, into space. */
V_INLINE void amx_dots(const pd_dtype dtype, const uint8_t *quants, const int8_t *x, size_t stride,
                       amx_space *space)
{
    const uint8_t *weights = quants;

    if (dtype != PD_Q8_0) {
        __m512i expanded[8];
        q_unpack(dtype, quants, expanded);
#pragma GCC unroll 8
        for (int run = 0; run < 8; run++)
            _mm512_store_si512(space->weights[run], expanded[run]);
        weights = space->weights[0];
    }
    TILE_ZERO(&space->state, 0);
    TILE_LOAD(&space->state, 4, weights, 64);
    TILE_LOAD(&space->state, 2, x, stride);
    TILE_DOT(&space->state, 0, 2, 4);
    if (dtype == PD_Q6_K) {
        TILE_ZERO(&space->state, 1);
        TILE_LOAD(&space->state, 5, weights + 256, 64);
        TILE_LOAD(&space->state, 3, x + 16, stride);
        TILE_DOT(&space->state, 1, 3, 5);
        TILE_STORE(&space->state, 1, space->dots[1], 64);
    }
    TILE_STORE(&space->state, 0, space->dots[0], 64);
}

/* A row's exact dot, what unsigned weights are too large by taken off. */
V_INLINE __m512 amx_dot(const int32_t excess, const int32_t *dots, int32_t sum)
{
    __m512i dot = _mm512_load_si512(dots);

    if (excess != 0)
        dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(excess * sum));
    return _mm512_cvtepi32_ps(dot);
}

V_INLINE void amx_block(const pd_dtype dtype, const uint8_t *panel, uint32_t block,
                        const q_shared *shared, const kern_acts *acts, size_t at, size_t blocks,
                        amx_space *space, __m512 *sums)
{
    const int32_t excess = dtype == PD_Q8_0 ? 128 : dtype == PD_Q4_0 ? 8 : 0;
    const uint8_t *quants = panel + kern_panel_quants_at(dtype, block);

    q_prefetch(dtype, quants);
    amx_dots(dtype, quants, acts->quants + at * KERN_BLOCK, blocks * KERN_BLOCK, space);
    q_factors f = q_factors_of(dtype, panel, block, shared);
#pragma GCC unroll 16
    for (int n = 0; n < AMX_ROWS; n++, at += blocks) {
        __m512 dot;
        if (dtype == PD_Q6_K) {
            int32_t low_sum = acts->low_sums[at];
            __m512 low = amx_dot(32, space->dots[0][n], low_sum);
            __m512 high = amx_dot(32, space->dots[1][n], acts->quant_sums[at] - low_sum);
            dot = _mm512_fmadd_ps(f.high, high, _mm512_mul_ps(f.low, low));
        } else {
            dot = amx_dot(excess, space->dots[0][n], excess == 0 ? 0 : acts->quant_sums[at]);
        }
        sums[n] = q_update(dtype, sums[n], dot, &f, acts, at);
    }
}

/* The sums of one segment, over blocks [first, end). */
V_INLINE void amx_segment(const pd_dtype dtype, const uint8_t *panel, uint32_t first, uint32_t end,
                          const kern_acts *acts, size_t at_first, size_t blocks, amx_space *space,
                          __m512 *sums)
{
    q_shared shared;

#pragma GCC unroll 16
    for (int n = 0; n < AMX_ROWS; n++)
        sums[n] = _mm512_setzero_ps();
    for (uint32_t block = first; block < end;) {
        uint32_t stop = end;
        if (dtype == PD_Q4_K || dtype == PD_Q6_K) {
            uint32_t next = (block / KERN_K_RUNS + 1) * KERN_K_RUNS;
            stop = next < end ? next : end;
            q_share(dtype, panel, block, &shared);
        }
        for (; block < stop; block++)
            amx_block(dtype, panel, block, &shared, acts, at_first + block, blocks, space, sums);
    }
}

V_INLINE void amx_tile(const kern_matrix *matrix, const pd_dtype dtype, const uint8_t *panel,
                       const kern_acts *acts, uint32_t acts_row, float *const *out, uint32_t row,
                       __mmask16 mask, bool add, amx_space *space)
{
    uint32_t blocks = matrix->cols / KERN_BLOCK, segment_blocks = blocks / matrix->segments;
    uint32_t segments = kern_matrix_segments(matrix), depth = 0, segment = 0;
    uint32_t first = matrix->segment_from * segment_blocks;
    __m512 waiting[KERN_TREE_DEPTH][AMX_ROWS], sums[AMX_ROWS];

    do {
        amx_segment(dtype, panel, first, first + segment_blocks, acts, (size_t)acts_row * blocks,
                    blocks, space, sums);
        for (uint32_t adds = kern_tree_adds(segment, segments, depth); adds > 0; adds--) {
            depth--;
#pragma GCC unroll 16
            for (int n = 0; n < AMX_ROWS; n++)
                sums[n] = _mm512_add_ps(waiting[depth][n], sums[n]);
        }
        if (segment + 1 < segments) {
#pragma GCC unroll 16
            for (int n = 0; n < AMX_ROWS; n++)
                waiting[depth][n] = sums[n];
            depth++;
        }
        first += segment_blocks;
    } while (++segment < segments);
#pragma GCC unroll 16
    for (int n = 0; n < AMX_ROWS; n++) {
        float *place = out[n] + row;
        __m512 total = sums[n];
        if (add)
            total = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, place), total);
        _mm512_mask_storeu_ps(place, mask, total);
    }
}

/* Activation rows in whole tiles; returns how many that were. */
V_INLINE uint32_t amx_product(const kern_matrix *matrix, const pd_dtype dtype, uint32_t row_first,
                              uint32_t rows, const kern_acts *acts, uint32_t acts_first,
                              uint32_t acts_rows, float *const *out, bool add)
{
    size_t panel_bytes = kern_panel_bytes(dtype, matrix->cols);
    uint32_t whole = acts_rows / AMX_ROWS * AMX_ROWS;
    amx_space space;

    if (whole == 0)
        return 0;
    amx_configure(dtype, &space);
    for (uint32_t row = row_first; row < row_first + rows; row += KERN_PANEL_ROWS) {
        const uint8_t *panel = (const uint8_t *)matrix->data + row / KERN_PANEL_ROWS * panel_bytes;
        __mmask16 mask = v_mask(row_first + rows - row);
        for (uint32_t n = 0; n < whole; n += AMX_ROWS)
            amx_tile(matrix, dtype, panel, acts, acts_first + n, out + n, row, mask, add, &space);
    }
    TILE_RELEASE(&space.state);
    return whole;
}

V_INLINE void amx_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                         const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                         float *const *out, bool add)
{
    uint32_t n = 0;

    switch (matrix->dtype) {
#define AMX_PRODUCT(dtype)                                                                         \
    case dtype:                                                                                    \
        n = amx_product(matrix, dtype, row_first, rows, acts, acts_first, acts_rows, out, add);    \
        break
        AMX_PRODUCT(PD_Q4_0);
        AMX_PRODUCT(PD_Q4_1);
        AMX_PRODUCT(PD_Q8_0);
        AMX_PRODUCT(PD_Q4_K);
        AMX_PRODUCT(PD_Q6_K);
#undef AMX_PRODUCT
    default: break;
    }
    if (n < acts_rows)
        kern_ops_avx512.matmul(matrix, row_first, rows, acts, acts_first + n, acts_rows - n,
                               out + n, add);
}
