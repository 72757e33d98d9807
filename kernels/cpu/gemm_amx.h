#pragma once

/* kernels/cpu/gemm_amx.h - products with packed matrices on matrix tiles, AMX int8; in the words of
 * tile_native.h or tile_plain.h, and of gemm_avx512.h, included before.
 *
 * 16 activation rows by a panel (16 weight rows): a block's 32 columns are one tile product, whose
 * 16 x 16 exact integers are scaled and added in AVX-512 as gemm_avx512.h adds them, so that the
 * sums are the same bits. What few rows are left over, long rows and matrices of floats go to the
 * AVX-512 table.
 *
 * The bound is not the tiles. Beside them, and for some 300 cycles after any instruction on them,
 * the processor makes products, multiply-adds and conversions of 512 bits one a cycle, not two;
 * additions still two. So a block of 16 x 16 of Q4_1 (8,192 MAC) costs 48 cycles: a product and two
 * multiply-adds a row. All else has to hide behind them:
 *   - no conversion: a tile of sums begins at the bits of 1.5 * 2^23, so that taking that off is an
 *     addition, as in gemm_avx512.h. One product of bf16 tiles writes it, 4096 * 3072: loading it
 *     instead took 14 % of the time, an integer addition in each row 6 %
 *   - a tile is stored one product later (the store waits for it) and added up after that: products
 *     run two blocks ahead, over the ends of rows and panels
 *   - weights are expanded to bytes once for up to 64 activation rows, each block of the next panel
 *     in the place of one just used for the last time. A load of a tile that was just written waits
 *     until it is in the cache: expanding before each product was slower than no tiles at all
 *   - a load waits for a store under way to the same place in any 4 KiB page, so blocks lie 1 KiB
 *     apart and what is stored all the time, the dots, has columns of its own in that
 *
 *   - what comes next in memory is asked for meanwhile, and the lines that the sums go to: stores
 * of tiles wait behind a store to a line that is not there
 *
 * The ladder (Q4_1 576 x 576, 64 rows, TSC ticks of 2.6 GHz for 8,192 MAC; AVX-512 VNNI: 113):
 *   135  weights expanded, multiplied, stored and added up block by block, TDPBSUD
 *    82  weights expanded once for 64 rows; signed bytes, nothing to take off the dots
 *    75 to 104, by where things lay: stored one product later, the sums' beginning by bf16
 *    72  activations copied to places of their own, dots in columns; 16 rows: 84
 *    70  products run ahead over ends; the next panel expanded beside this one, in a place of its
 *        own: 16 rows: 97, the first-level cache is too small for both
 *    62  expanded into the places of what was used for the last time; 16 rows: 72
 * A loop of the same instructions on the same few lines takes 53 to 60. Tried and left: tiles of 8
 * rows (a store takes as long as of 16), factors broadcast by shuffles (84 cycles where loads take
 * 70: stores of tiles need that port, too), stores two and three products later (the same). */

#define AMX_ROWS     16  /* activation rows of a tile */
#define AMX_FEW      8   /* so many or fewer of a group's last tile: less is added up */
#define AMX_ROWS_MIN 12  /* of a product: below, AVX-512 is faster */
#define AMX_REST_MIN 5   /* and of what 16 leave over */
#define AMX_GROUP    4   /* tiles of activations that expanded weights serve */
#define AMX_BLOCKS   48  /* of a panel, expanded at once */
#define AMX_LEAST    4   /* of a row: so many are always ahead */
#define AMX_ACTS     512 /* blocks of all tiles of a group: the longest row */

typedef struct amx_acts {
    int8_t quants[AMX_ROWS][KERN_BLOCK];
    float scales[AMX_ROWS], sums[AMX_ROWS];
    uint8_t apart[384];
} amx_acts;

/* Block n's dots are those of activation row n of the block under way, in turns; Q6_K's second
 * halves in the latter two. */
typedef struct amx_weights {
    int8_t quants[8][64];
    float d[16], m[16], high[16]; /* m: of Q6_K low */
    uint8_t apart[64];
    int32_t dots[4][16];
} amx_weights;
_Static_assert(sizeof(amx_acts) == 1024 && sizeof(amx_weights) == 1024, "the same places in pages");

/* A tile's sums between two parts of a panel. */
typedef struct amx_kept {
    float sums[AMX_ROWS][16];
    float waiting[KERN_TREE_DEPTH][AMX_ROWS][16];
} amx_kept;

typedef struct amx_space {
    tile_state state;
    amx_weights weights[AMX_BLOCKS] __attribute__((aligned(1024)));
    amx_acts acts[AMX_ACTS] __attribute__((aligned(1024))); /* [tile][block] */
    amx_kept kept[AMX_GROUP] __attribute__((aligned(64)));
    q_shared shared; /* of the block expanded last */
} amx_space;

/* A product with a group of activation rows. Its units are parts of panels, which come after one
 * another; blocks are counted from the product's first. */
typedef struct amx_run {
    const kern_matrix *matrix;
    uint32_t segment_blocks, segments, blocks, blocks_from;
    uint32_t row_first, rows;
    uint32_t parts, part_blocks, units;
    uint32_t tiles, acts_rows;
    uint32_t lines; /* of the next unit, asked for with a block of this one */
    float *const *out;
    bool add;
    amx_space *space;
} amx_run;

typedef struct amx_unit {
    const uint8_t *panel;
    uint32_t row, first, count; /* blocks first .. first + count - 1 */
    uint32_t expanded;          /* of them, so far */
    const char *soon;           /* of what comes after it in memory: to be asked for next */
} amx_unit;

/* The next block to be multiplied. */
typedef struct amx_ahead {
    const amx_weights *weights;
    const amx_acts *acts;
    uint32_t left, tile, unit; /* left: of the unit's blocks, this one too */
} amx_ahead;

/* Tiles 0 and 1: sums; 2 and 3: activations; 4 and 5: weights; the second ones are Q6_K's, which
 * has two scales a block. 6 and 7: what sums begin with. */
V_INLINE void amx_configure(const pd_dtype dtype, amx_space *space)
{
    const uint16_t cols = dtype == PD_Q6_K ? 16 : 32;
    const uint8_t runs = (uint8_t)(cols / 4);
    const tile_config config __attribute__((aligned(64))) = {
        .palette = 1,
        .row_bytes = {64, 64, cols, cols, 64, 64, 4, 64},
        .rows = {AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS, runs, runs, AMX_ROWS, 1},
    };
    uint16_t left[AMX_ROWS][2] = {{0}}, right[16][2] = {{0}}; /* bf16 */

    _Static_assert((int)KERN_EXP_MAGIC == 4096 * 3072, "as below");
    for (int i = 0; i < 16; i++) {
        left[i][0] = 0x4580;
        right[i][0] = 0x4540;
    }
    TILE_CONFIGURE(&space->state, &config);
    TILE_LOAD(&space->state, 6, left, 4);
    TILE_LOAD(&space->state, 7, right, 64);
}

/* Of a panel's first blocks, about. */
V_INLINE size_t amx_bytes(const pd_dtype dtype, const amx_run *run, uint32_t blocks)
{
    uint32_t cols = run->matrix->cols;

    return kern_panel_bytes(dtype, cols) * blocks / (cols / KERN_BLOCK);
}

V_INLINE amx_unit amx_unit_at(const pd_dtype dtype, const amx_run *run, uint32_t index)
{
    uint32_t row = run->row_first + index / run->parts * KERN_PANEL_ROWS;
    uint32_t first = index % run->parts * run->part_blocks, left = run->blocks - first;
    uint32_t count = left < run->part_blocks ? left : run->part_blocks;
    size_t panel_bytes = kern_panel_bytes(dtype, run->matrix->cols);
    const uint8_t *panel = (const uint8_t *)run->matrix->data + row / KERN_PANEL_ROWS * panel_bytes;

    return (amx_unit){.panel = panel,
                      .row = row,
                      .first = first,
                      .count = count,
                      .soon = (const char *)panel +
                              amx_bytes(dtype, run, run->blocks_from + first + count)};
}

/* A unit's next block, signed, to its place. */
V_INLINE void amx_expand(const pd_dtype dtype, const amx_run *run, amx_unit *unit)
{
    const __m512i excess = _mm512_set1_epi8(dtype == PD_Q4_0 ? 8 : 32);
    uint32_t block = run->blocks_from + unit->first + unit->expanded;
    const uint8_t *quants = unit->panel + kern_panel_quants_at(dtype, block);
    q_shared *shared = &run->space->shared;
    amx_weights *to = &run->space->weights[unit->expanded];
    __m512i expanded[8];

    q_prefetch(dtype, quants);
    if ((dtype == PD_Q4_K || dtype == PD_Q6_K) && (unit->expanded == 0 || block % KERN_K_RUNS == 0))
        q_share(dtype, unit->panel, block, shared);
    q_unpack(dtype, quants, expanded);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (dtype == PD_Q4_0 || dtype == PD_Q6_K)
            expanded[i] = _mm512_sub_epi8(expanded[i], excess);
        if (dtype == PD_Q8_0)
            expanded[i] = _mm512_xor_si512(expanded[i], _mm512_set1_epi8(-128));
        _mm512_store_si512(to->quants[i], expanded[i]);
    }
    q_factors f = q_factors_of(dtype, unit->panel, block, shared);
    _mm512_store_ps(to->d, f.d);
    _mm512_store_ps(to->m, dtype == PD_Q6_K ? f.low : f.m);
    if (dtype == PD_Q6_K)
        _mm512_store_ps(to->high, f.high);
    unit->expanded++;
}

#define AMX_DOTS(sums, a, b, x, w)                                                                 \
    do {                                                                                           \
        TILE_LOAD(&space->state, a, x, KERN_BLOCK);                                                \
        TILE_LOAD(&space->state, b, w, 64);                                                        \
        TILE_ZERO(&space->state, sums);                                                            \
        TILE_DOT_BF16(&space->state, sums, 6, 7);                                                  \
        TILE_DOT(&space->state, sums, a, b);                                                       \
    } while (0)

V_INLINE void amx_multiply(const pd_dtype dtype, const amx_weights *weights, const amx_acts *acts,
                           amx_space *space)
{
    AMX_DOTS(0, 2, 4, acts->quants[0], weights->quants[0]);
    if (dtype == PD_Q6_K)
        AMX_DOTS(1, 3, 5, acts->quants[0] + 16, weights->quants[4]);
}

V_INLINE void amx_store(const pd_dtype dtype, uint32_t turn, amx_space *space)
{
    TILE_STORE(&space->state, 0, space->weights[0].dots[turn % 2], sizeof(amx_weights));
    if (dtype == PD_Q6_K)
        TILE_STORE(&space->state, 1, space->weights[0].dots[2 + turn % 2], sizeof(amx_weights));
}

V_INLINE void amx_ahead_at(const pd_dtype dtype, const amx_run *run, amx_ahead *ahead)
{
    amx_unit unit = amx_unit_at(dtype, run, ahead->unit);

    ahead->weights = run->space->weights;
    ahead->acts = run->space->acts + (size_t)ahead->tile * run->blocks + unit.first;
    ahead->left = unit.count;
}

/* After the last block of all it begins again, for nothing. */
V_INLINE void amx_multiply_ahead(const pd_dtype dtype, const amx_run *run, amx_ahead *ahead)
{
    amx_multiply(dtype, ahead->weights++, ahead->acts++, run->space);
    if (--ahead->left > 0)
        return;
    if (++ahead->tile == run->tiles) {
        ahead->tile = 0;
        ahead->unit = ahead->unit + 1 < run->units ? ahead->unit + 1 : 0;
    }
    amx_ahead_at(dtype, run, ahead);
}

V_INLINE __m512 amx_dot(const int32_t *dots)
{
    return _mm512_sub_ps(_mm512_castsi512_ps(_mm512_load_si512(dots)),
                         _mm512_set1_ps(KERN_EXP_MAGIC));
}

/* A block's dots onto the sums; gemm_avx512.h's q_update. */
V_INLINE void amx_update(const pd_dtype dtype, const uint32_t rows, uint32_t turn,
                         const amx_weights *weights, const amx_acts *acts, const amx_space *space,
                         __m512 *sums)
{
    __m512 d = _mm512_load_ps(weights->d), m = _mm512_load_ps(weights->m);
    __m512 high = dtype == PD_Q6_K ? _mm512_load_ps(weights->high) : m;

#pragma GCC unroll 16
    for (uint32_t n = 0; n < rows; n++) {
        __m512 dot = amx_dot(space->weights[n].dots[turn % 2]);
        if (dtype == PD_Q6_K)
            dot = _mm512_fmadd_ps(high, amx_dot(space->weights[n].dots[2 + turn % 2]),
                                  _mm512_mul_ps(m, dot));
        sums[n] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(acts->scales[n])), dot, sums[n]);
        if (dtype == PD_Q4_1 || dtype == PD_Q4_K)
            sums[n] = _mm512_fmadd_ps(m, _mm512_set1_ps(acts->sums[n]), sums[n]);
    }
}

/* The end of a segment: its sums onto those that waited for it, and what comes of it waits. */
V_INLINE uint32_t amx_join(const uint32_t rows, const amx_run *run, uint32_t segment,
                           uint32_t depth, amx_kept *kept, __m512 *sums)
{
    for (uint32_t adds = kern_tree_adds(segment, run->segments, depth); adds > 0; adds--) {
        depth--;
#pragma GCC unroll 16
        for (uint32_t n = 0; n < rows; n++)
            sums[n] = _mm512_add_ps(_mm512_load_ps(kept->waiting[depth][n]), sums[n]);
    }
    if (segment + 1 == run->segments)
        return depth;
#pragma GCC unroll 16
    for (uint32_t n = 0; n < rows; n++) {
        _mm512_store_ps(kept->waiting[depth][n], sums[n]);
        sums[n] = _mm512_setzero_ps();
    }
    return depth + 1;
}

V_INLINE void amx_write(const uint32_t rows, const amx_run *run, const amx_unit *unit,
                        uint32_t tile, const __m512 *sums)
{
    __mmask16 mask = v_mask(run->row_first + run->rows - unit->row);

#pragma GCC unroll 16
    for (uint32_t n = 0; n < rows; n++) {
        if (tile * AMX_ROWS + n >= run->acts_rows)
            break;
        float *place = run->out[tile * AMX_ROWS + n] + unit->row;
        __m512 total = sums[n];
        if (run->add)
            total = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, place), total);
        _mm512_mask_storeu_ps(place, mask, total);
    }
}

/* A unit's blocks onto the sums of a tile of activations, while those after them are multiplied;
 * next, unless NULL, is expanded into the places of those that nothing needs any more. turn: of
 * the unit's first block. */
V_INLINE void amx_tile(const pd_dtype dtype, const uint32_t rows, const amx_run *run,
                       amx_unit *unit, uint32_t tile, uint32_t turn, amx_ahead *ahead,
                       amx_unit *next)
{
    amx_space *space = run->space;
    amx_kept *kept = &space->kept[tile];
    const amx_acts *acts = space->acts + (size_t)tile * run->blocks + unit->first;
    uint32_t segment = unit->first / run->segment_blocks, depth = 0;
    uint32_t left = (segment + 1) * run->segment_blocks - unit->first;
    bool fresh = left == run->segment_blocks;
    __m512 sums[AMX_ROWS];

    if (unit->first + unit->count == run->blocks)
        for (uint32_t n = 0; n < rows && tile * AMX_ROWS + n < run->acts_rows; n++)
            _mm_prefetch((const char *)(run->out[tile * AMX_ROWS + n] + unit->row), _MM_HINT_T0);
    for (uint32_t i = 0; i < segment; i++)
        depth += 1 - kern_tree_adds(i, run->segments, depth);
#pragma GCC unroll 16
    for (uint32_t n = 0; n < rows; n++)
        sums[n] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(kept->sums[n]);
    for (uint32_t block = 0; block < unit->count; block++, acts++, turn++) {
        amx_store(dtype, turn + 1, space);
        amx_multiply_ahead(dtype, run, ahead);
        amx_update(dtype, rows, turn, &space->weights[block], acts, space, sums);
        if (next == NULL)
            for (uint32_t line = 0; line < run->lines; line++, unit->soon += 64)
                _mm_prefetch(unit->soon, _MM_HINT_T1);
        if (next != NULL && block < next->count)
            amx_expand(dtype, run, next);
        if (--left == 0) {
            depth = amx_join(rows, run, segment++, depth, kept, sums);
            left = run->segment_blocks;
        }
    }
    if (unit->first + unit->count == run->blocks) {
        amx_write(rows, run, unit, tile, sums);
        return;
    }
#pragma GCC unroll 16
    for (uint32_t n = 0; n < rows; n++)
        _mm512_store_ps(kept->sums[n], sums[n]);
}

V_INLINE void amx_group(const pd_dtype dtype, const amx_run *run)
{
    amx_ahead ahead = {.unit = 0};
    amx_unit unit = amx_unit_at(dtype, run, 0);
    uint32_t turn = 0;

    while (unit.expanded < unit.count)
        amx_expand(dtype, run, &unit);
    amx_ahead_at(dtype, run, &ahead);
    amx_multiply_ahead(dtype, run, &ahead);
    amx_store(dtype, turn, run->space);
    amx_multiply_ahead(dtype, run, &ahead);
    for (uint32_t index = 0; index < run->units; index++) {
        amx_unit next = amx_unit_at(dtype, run, index + 1 < run->units ? index + 1 : 0);
        for (uint32_t tile = 0; tile < run->tiles; tile++, turn += unit.count) {
            amx_unit *expand = tile + 1 == run->tiles && index + 1 < run->units ? &next : NULL;
            if (run->acts_rows - tile * AMX_ROWS > AMX_FEW)
                amx_tile(dtype, AMX_ROWS, run, &unit, tile, turn, &ahead, expand);
            else
                amx_tile(dtype, AMX_FEW, run, &unit, tile, turn, &ahead, expand);
        }
        while (index + 1 < run->units && next.expanded < next.count)
            amx_expand(dtype, run, &next);
        unit = next;
    }
}

/* A tile's activations to the places where they are read from, zeros in rows that it lacks. */
V_INLINE void amx_place(const kern_acts *acts, uint32_t row, uint32_t rows, uint32_t block_first,
                        uint32_t blocks, amx_acts *to)
{
    size_t row_blocks = acts->cols / KERN_BLOCK;

    for (uint32_t block = block_first; block < block_first + blocks; block++, to++) {
        size_t at = row * row_blocks + block;
        for (uint32_t n = 0; n < rows; n++, at += row_blocks) {
            memcpy(to->quants[n], acts->quants + at * KERN_BLOCK, KERN_BLOCK);
            to->scales[n] = acts->scales[at];
            to->sums[n] = acts->sums[at];
        }
        for (uint32_t n = rows; n < AMX_ROWS; n++) {
            memset(to->quants[n], 0, KERN_BLOCK);
            to->scales[n] = to->sums[n] = 0;
        }
    }
}

/* For the first unit, before anything else is done. */
V_INLINE void amx_ask(const pd_dtype dtype, const amx_run *run)
{
    amx_unit unit = amx_unit_at(dtype, run, 0);
    const char *end = unit.soon;

    for (const char *line = end - amx_bytes(dtype, run, unit.count); line < end; line += 64)
        _mm_prefetch(line, _MM_HINT_T1);
}

V_INLINE void amx_product(const kern_matrix *matrix, const pd_dtype dtype, uint32_t row_first,
                          uint32_t rows, const kern_acts *acts, uint32_t acts_first,
                          uint32_t acts_rows, float *const *out, bool add)
{
    amx_space space;
    amx_run run = {.matrix = matrix,
                   .segment_blocks = matrix->cols / KERN_BLOCK / matrix->segments,
                   .segments = kern_matrix_segments(matrix),
                   .row_first = row_first,
                   .rows = rows,
                   .add = add,
                   .space = &space};

    run.blocks = run.segments * run.segment_blocks;
    run.blocks_from = matrix->segment_from * run.segment_blocks;
    run.parts = (run.blocks + AMX_BLOCKS - 1) / AMX_BLOCKS;
    run.part_blocks = (run.blocks + run.parts - 1) / run.parts;
    run.units = (rows + KERN_PANEL_ROWS - 1) / KERN_PANEL_ROWS * run.parts;
    uint32_t tiles_max = AMX_ACTS / run.blocks < AMX_GROUP ? AMX_ACTS / run.blocks : AMX_GROUP;

    amx_configure(dtype, &space);
    for (uint32_t n = 0; n < acts_rows; n += run.acts_rows) {
        uint32_t left = acts_rows - n;
        run.acts_rows = left < tiles_max * AMX_ROWS ? left : tiles_max * AMX_ROWS;
        run.tiles = (run.acts_rows + AMX_ROWS - 1) / AMX_ROWS;
        run.out = out + n;
        run.lines = run.tiles < 2
                        ? 0
                        : (uint32_t)(amx_bytes(dtype, &run, 1) + 63) / 64 / (run.tiles - 1) + 1;
        amx_ask(dtype, &run);
        for (uint32_t tile = 0; tile < run.tiles; tile++) {
            uint32_t row = tile * AMX_ROWS, here = run.acts_rows - row;
            amx_place(acts, acts_first + n + row, here < AMX_ROWS ? here : AMX_ROWS,
                      run.blocks_from, run.blocks, space.acts + (size_t)tile * run.blocks);
        }
        amx_group(dtype, &run);
    }
    TILE_RELEASE(&space.state);
}

/* How many activation rows go by tiles. */
V_INLINE uint32_t amx_rows(const kern_matrix *matrix, uint32_t acts_rows)
{
    uint32_t segment_blocks = matrix->cols / KERN_BLOCK / matrix->segments;
    uint32_t blocks = kern_matrix_segments(matrix) * segment_blocks, rest = acts_rows % AMX_ROWS;

    if (acts_rows < AMX_ROWS_MIN || blocks < AMX_LEAST || blocks > AMX_ACTS)
        return 0;
    return rest < AMX_REST_MIN ? acts_rows - rest : acts_rows;
}

V_INLINE void amx_matmul(const kern_matrix *matrix, uint32_t row_first, uint32_t rows,
                         const kern_acts *acts, uint32_t acts_first, uint32_t acts_rows,
                         float *const *out, bool add)
{
    uint32_t n = amx_rows(matrix, acts_rows);

    switch (n == 0 ? PD_F32 : matrix->dtype) {
#define AMX_PRODUCT(dtype)                                                                         \
    case dtype: amx_product(matrix, dtype, row_first, rows, acts, acts_first, n, out, add); break
        AMX_PRODUCT(PD_Q4_0);
        AMX_PRODUCT(PD_Q4_1);
        AMX_PRODUCT(PD_Q8_0);
        AMX_PRODUCT(PD_Q4_K);
        AMX_PRODUCT(PD_Q6_K);
#undef AMX_PRODUCT
    default: n = 0; break;
    }
    if (n < acts_rows)
        kern_ops_avx512.matmul(matrix, row_first, rows, acts, acts_first + n, acts_rows - n,
                               out + n, add);
}
