#pragma once

/* kernels/cpu/attention.h - paged attention over 16-token tiles, in the words of a v16 header.
 *
 * The rows of one call (tokens x query heads of the KV head) share each tile: K is turned once so
 * that a vector holds one dimension of 16 tokens, and every row's 16 scores are then two chains of
 * fused multiply-adds, as the reference has them. What lies past a row's own position is never
 * added, whatever it is: a tile is read whole.
 *
 * One token's few rows (decode) need no copies of K and V: K's columns go into the chains as they
 * are turned, V's rows as they are read, and what is read from memory is asked for two tiles ahead;
 * the first tiles of the next call during this one.
 *
 * K and V of one byte a value are read as they lie: 32 dimensions turn as 16 of two bytes, and the
 * scales of a tile's 16 tokens are one vector, which meets the finished scores, and the weights
 * before they meet V. What depends on the format takes it as a constant, kv. */

#define ATT_ROWS 4 /* of one token, at most, without copies */
#define ATT_ROWS_MAX                                                                               \
    (V_PV_ROWS > ATT_ROWS ? V_PV_ROWS : ATT_ROWS) /* whose values are summed together */
#define ATT_AHEAD       192                       /* positions */
#define ATT_NEXT_TOKENS 64                        /* of the next call, asked for before it */

/* Where a call's tiles lie. */
typedef struct att_tiles {
    const uint8_t *block_0; /* where block 0 of the pool has this layer's K of the head */
    uint64_t block_bytes;   /* from one block to the next */
    const pd_block *blocks;
    uint32_t block_tokens, token_bytes;
    size_t half, scales; /* from K to V, and from a half's start to its scales, in bytes */
} att_tiles;

typedef struct att_work {
    const kern_attention *args;
    att_tiles tiles;
    uint32_t dim, rows;
    float *queries;                    /* [rows][dim], scaled */
    float *scores;                     /* [rows][KERN_SPLIT_TOKENS] */
    float *keys;                       /* [dim][16] */
    float *part;                       /* [rows][dim] */
    float *result;                     /* [rows][dim] */
    float *largest, *sums;             /* [rows], of the splits so far */
    float *split_largest, *split_sums; /* [rows], of the split under way */
} att_work;

static size_t fast_attention_scratch_bytes(uint32_t heads, uint32_t head_dim)
{
    size_t rows = (size_t)KERN_ATTENTION_TOKENS_MAX * heads;
    return (rows * (3 * (size_t)head_dim + KERN_SPLIT_TOKENS + 32) + 16 * (size_t)head_dim) *
           sizeof(float);
}

static att_tiles att_tiles_of(const kern_attention *args)
{
    const pd_kv_layout *layout = args->layout;
    uint64_t first = pd_kv_layout_k_offset(layout, args->layer, 0, args->kv_head);
    uint64_t second =
        layout->blocks > 1 ? pd_kv_layout_k_offset(layout, args->layer, 1, args->kv_head) : first;

    return (att_tiles){.block_0 = (const uint8_t *)args->pool + first,
                       .block_bytes = second - first,
                       .blocks = args->blocks,
                       .block_tokens = layout->block_tokens,
                       .token_bytes = (uint32_t)layout->token_bytes,
                       .half = layout->half_bytes,
                       .scales = layout->scales_at};
}

/* K of the tile that holds the position's token and the 15 after it. */
V_INLINE const uint8_t *att_tile(const att_tiles *tiles, uint32_t position)
{
    uint32_t block = position / tiles->block_tokens, token = position % tiles->block_tokens;

    return tiles->block_0 + tiles->blocks[block] * tiles->block_bytes +
           (size_t)token * tiles->token_bytes;
}

/* The scales of the tile's tokens in K; V's lie half on. */
V_INLINE const float *att_scales(const att_tiles *tiles, uint32_t position)
{
    uint32_t block = position / tiles->block_tokens, token = position % tiles->block_tokens;

    return (const float *)(tiles->block_0 + tiles->blocks[block] * tiles->block_bytes +
                           tiles->scales) +
           token;
}

/* The tile's K (half 0) or V (tiles->half). */
V_INLINE void att_ask(const att_tiles *tiles, uint32_t position, size_t half)
{
    const uint8_t *tile = att_tile(tiles, position) + half;

    for (uint32_t i = 0; i < 16 * tiles->token_bytes; i += 64)
        __builtin_prefetch(tile + i, 0, 2);
    if (tiles->half != tiles->scales)
        __builtin_prefetch((const uint8_t *)att_scales(tiles, position) + half, 0, 2);
}

static void att_init(att_work *w, const kern_attention *args)
{
    float *space = args->scratch;
    size_t rows = (size_t)args->tokens * args->heads;

    w->args = args;
    w->tiles = att_tiles_of(args);
    w->dim = args->layout->head_dim;
    w->rows = (uint32_t)rows;
    w->keys = space, space += (size_t)w->dim * 16;
    w->queries = space, space += rows * w->dim;
    w->scores = space, space += rows * KERN_SPLIT_TOKENS;
    w->part = space, space += rows * w->dim;
    w->result = space, space += rows * w->dim;
    w->largest = space, space += rows;
    w->sums = space, space += rows;
    w->split_largest = space, space += rows;
    w->split_sums = space;
    for (uint32_t row = 0; row < rows; row++) {
        const float *query = args->query + row / args->heads * args->query_stride +
                             (size_t)(row % args->heads) * w->dim;
        for (uint32_t d = 0; d < w->dim; d += 16)
            v_store(w->queries + (size_t)row * w->dim + d,
                    v_mul(v_load(query + d), v_set(args->scale)));
    }
}

static uint32_t att_position(const att_work *w, uint32_t row)
{
    return w->args->position + row / w->args->heads;
}

/* Two neighbouring dimensions of a tile's tokens, turned. */
V_INLINE v16_pair att_pair(__m256i bits, const pd_dtype kv)
{
    return kv == PD_INT8 ? v_pair_i8(bits) : v_pair_e4m3(bits);
}

/* K of the tile, turned: one byte a value. */
V_INLINE void att_load_codes(const att_work *w, const uint8_t *tile, const pd_dtype kv)
{
    for (uint32_t d = 0; d < w->dim; d += 32) {
        float *keys = w->keys + (size_t)d * 16;
        v16x2 columns[8]; /* where 16 dimensions are left, the second half is what follows */
        v_turn_f16((const uint16_t *)(tile + d), w->dim / 2, columns);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++) {
            v16_pair pair = att_pair(v_first_bits(columns[i]), kv);
            v_store(keys + (size_t)i * 32, pair.even);
            v_store(keys + (size_t)i * 32 + 16, pair.odd);
        }
        if (d + 16 == w->dim)
            return;
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++) {
            v16_pair pair = att_pair(v_second_bits(columns[i]), kv);
            v_store(keys + (size_t)(i + 8) * 32, pair.even);
            v_store(keys + (size_t)(i + 8) * 32 + 16, pair.odd);
        }
    }
}

/* K of the tile, turned. */
V_INLINE void att_load_keys(const att_work *w, const uint8_t *tile, const pd_dtype kv)
{
    if (kv != PD_F16) {
        att_load_codes(w, tile, kv);
        return;
    }
    for (uint32_t d = 0; d < w->dim; d += 16) {
        v16x2 columns[8];
        v_turn_f16((const uint16_t *)tile + d, w->dim, columns);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++) {
            v_store(w->keys + (size_t)(d + i) * 16, v_first(columns[i]));
            v_store(w->keys + (size_t)(d + 8 + i) * 16, v_second(columns[i]));
        }
    }
}

V_INLINE v16 att_scaled(v16 scores, const float *scales)
{
    return scales != NULL ? v_mul(scores, v_load(scales)) : scores;
}

/* scales: of the tile's K; NULL where the format has none. */
V_INLINE void att_score_rows(const att_work *w, uint32_t row, const uint32_t count, uint32_t tile,
                             const float *scales)
{
    const float *query = w->queries + (size_t)row * w->dim;
    v16 even[V_QK_ROWS], odd[V_QK_ROWS];

#pragma GCC unroll 8
    for (uint32_t i = 0; i < count; i++)
        even[i] = odd[i] = v_zero();
    for (uint32_t d = 0; d < w->dim; d += 2) {
        v16 key_even = v_load(w->keys + (size_t)d * 16);
        v16 key_odd = v_load(w->keys + (size_t)d * 16 + 16);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < count; i++) {
            even[i] = v_fma(v_set(query[i * w->dim + d]), key_even, even[i]);
            odd[i] = v_fma(v_set(query[i * w->dim + d + 1]), key_odd, odd[i]);
        }
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < count; i++)
        v_store(w->scores + (size_t)(row + i) * KERN_SPLIT_TOKENS + (size_t)tile * 16,
                att_scaled(v_add(even[i], odd[i]), scales));
}

static void att_score(const att_work *w, uint32_t row, uint32_t tile, const float *scales)
{
    for (; V_QK_ROWS >= 8 && row + 8 <= w->rows; row += 8)
        att_score_rows(w, row, V_QK_ROWS, tile, scales);
    for (; V_QK_ROWS >= 8 && row + 3 <= w->rows; row += 3)
        att_score_rows(w, row, V_QK_ROWS < 3 ? V_QK_ROWS : 3, tile, scales);
    for (; row + 2 <= w->rows; row += 2)
        att_score_rows(w, row, 2, tile, scales);
    for (; row < w->rows; row++)
        att_score_rows(w, row, 1, tile, scales);
}

/* A row's scores to exponentials; positions from count on become 0. */
static void att_softmax(const att_work *w, uint32_t row, uint32_t count, float *largest_out,
                        float *sum_out)
{
    float *scores = w->scores + (size_t)row * KERN_SPLIT_TOKENS;
    v16 most = v_set(-INFINITY), lanes = v_zero();
    uint32_t whole = count / 16 * 16;

    for (uint32_t j = 0; j < whole; j += 16)
        most = v_max(v_load(scores + j), most);
    if (whole < count)
        most = v_max(v_keep_some(v_load(scores + whole), count - whole, most), most);
    float largest = v_max_of(most);
    for (uint32_t j = 0; j < whole; j += 16) {
        v16 p = v_exp(v_sub(v_load(scores + j), v_set(largest)));
        v_store(scores + j, p);
        lanes = v_add(lanes, p);
    }
    if (whole < count) {
        v16 p = v_exp(v_sub(v_load(scores + whole), v_set(largest)));
        p = v_keep_some(p, count - whole, v_zero());
        v_store(scores + whole, p);
        lanes = v_add(lanes, p); /* none is -0: adding 0 changes nothing */
    }
    *largest_out = largest;
    *sum_out = v_tree_sum(lanes);
}

/* Positions of the split at first that a row sees. */
static uint32_t att_seen(const att_work *w, uint32_t row, uint32_t first)
{
    uint32_t count = att_position(w, row) + 1 - first;
    return count < KERN_SPLIT_TOKENS ? count : KERN_SPLIT_TOKENS;
}

/* Softmax's weights of a row meet V's scales; past its last position lies what is not used. */
V_INLINE void att_weigh(const att_work *w, uint32_t row, uint32_t first, const pd_dtype kv)
{
    float *p = w->scores + (size_t)row * KERN_SPLIT_TOKENS;
    uint32_t seen = kv != PD_F16 ? att_seen(w, row, first) : 0;

    for (uint32_t j = 0; j < seen; j += 16) {
        const float *scales = att_scales(&w->tiles, first + j) + w->tiles.half / sizeof *scales;
        v_store(p + j, v_mul(v_load(p + j), v_load(scales)));
    }
}

/* 16 dimensions of V, vector v from value on. */
V_INLINE v16 att_value(const uint8_t *value, uint32_t v, const pd_dtype kv)
{
    return kv == PD_F16    ? v_load_f16((const uint16_t *)value + v * 16)
           : kv == PD_INT8 ? v_load_i8((const int8_t *)value + v * 16)
                           : v_load_e4m3(value + v * 16);
}

/* sums += p * V of one position, for a row or for several. */
V_INLINE void att_add_value(const float *p, const uint32_t rows, const uint8_t *value,
                            const uint32_t vectors, v16 (*sums)[V_PV_VECTORS], const pd_dtype kv)
{
    v16 values[V_PV_VECTORS];

#pragma GCC unroll 4
    for (uint32_t v = 0; v < vectors; v++)
        values[v] = att_value(value, v, kv);
#pragma GCC unroll 16
    for (uint32_t r = 0; r < rows; r++) {
        v16 weight = v_set(p[r * KERN_SPLIT_TOKENS]);
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++)
            sums[r][v] = v_fma(weight, values[v], sums[r][v]);
    }
}

/* part = p * V over the split's positions, for consecutive groups of 16 dimensions. Rows see more
 * and more of it: first what all see, then what each sees beyond. */
V_INLINE void att_value_rows(const att_work *w, uint32_t row, const uint32_t rows, uint32_t first,
                             uint32_t dim_first, const uint32_t vectors, const bool ask,
                             const pd_dtype kv)
{
    const size_t from = w->tiles.half + dim_first * (kv == PD_F16 ? sizeof(uint16_t) : 1);
    const float *p = w->scores + (size_t)row * KERN_SPLIT_TOKENS;
    uint32_t common = att_seen(w, row, first), last = w->args->position;
    v16 sums[ATT_ROWS_MAX][V_PV_VECTORS];

#pragma GCC unroll 16
    for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++)
            sums[r][v] = v_zero();
    for (uint32_t j = 0; j < common; j += 16) {
        const uint8_t *value = att_tile(&w->tiles, first + j) + from;
        uint32_t tokens = common - j < 16 ? common - j : 16;
        if (ask && dim_first == 0 && first + j + ATT_AHEAD <= last)
            att_ask(&w->tiles, first + j + ATT_AHEAD, w->tiles.half);
        for (uint32_t t = 0; t < tokens; t++)
            att_add_value(p + j + t, rows, value + (size_t)t * w->tiles.token_bytes, vectors, sums,
                          kv);
    }
#pragma GCC unroll 16
    for (uint32_t r = 1; r < rows; r++) {
        uint32_t seen = att_seen(w, row + r, first);
        for (uint32_t j = common; j < seen; j++)
            att_add_value(p + r * KERN_SPLIT_TOKENS + j, 1, att_tile(&w->tiles, first + j) + from,
                          vectors, sums + r, kv);
    }
#pragma GCC unroll 16
    for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (uint32_t v = 0; v < vectors; v++)
            v_store(w->part + (size_t)(row + r) * w->dim + dim_first + v * 16, sums[r][v]);
}

V_INLINE void att_values(const att_work *w, uint32_t row, const uint32_t rows, uint32_t first,
                         const bool ask, const pd_dtype kv)
{
    uint32_t d = 0;

    for (; d + 16 * V_PV_VECTORS <= w->dim; d += 16 * V_PV_VECTORS)
        att_value_rows(w, row, rows, first, d, V_PV_VECTORS, ask, kv);
    for (; d < w->dim; d += 16)
        att_value_rows(w, row, rows, first, d, 1, ask, kv);
}

V_INLINE void att_values_of_all(const att_work *w, uint32_t row, uint32_t first, const pd_dtype kv)
{
    for (; row + V_PV_ROWS <= w->rows; row += V_PV_ROWS)
        att_values(w, row, V_PV_ROWS, first, false, kv);
    for (; row < w->rows; row++)
        att_values(w, row, 1, first, false, kv);
}

/* Folds a row's split into its result. */
static void att_merge(const att_work *w, uint32_t row, bool first)
{
    float largest = w->split_largest[row], sum = w->split_sums[row];
    float *result = w->result + (size_t)row * w->dim;
    const float *part = w->part + (size_t)row * w->dim;

    if (first) {
        for (uint32_t d = 0; d < w->dim; d += 16)
            v_store(result + d, v_load(part + d));
        w->largest[row] = largest;
        w->sums[row] = sum;
        return;
    }
    float both = largest > w->largest[row] ? largest : w->largest[row];
    float keep = kern_exp(w->largest[row] - both), take = kern_exp(largest - both);
    w->sums[row] = fmaf(sum, take, w->sums[row] * keep);
    for (uint32_t d = 0; d < w->dim; d += 16)
        v_store(result + d,
                v_fma(v_load(part + d), v_set(take), v_mul(v_load(result + d), v_set(keep))));
    w->largest[row] = both;
}

/* A split's scores and values, of the rows that see some of it: the first one is returned. */
V_INLINE uint32_t att_split(const att_work *w, uint32_t first, const pd_dtype kv)
{
    uint32_t last = att_position(w, w->rows - 1);
    uint32_t end = last + 1 - first < KERN_SPLIT_TOKENS ? last + 1 : first + KERN_SPLIT_TOKENS;
    uint32_t row_first = 0;

    while (att_position(w, row_first) < first)
        row_first += w->args->heads;
    for (uint32_t at = first; at < end; at += 16) {
        uint32_t row = row_first;
        while (att_position(w, row) < at)
            row += w->args->heads;
        att_load_keys(w, att_tile(&w->tiles, at), kv);
        att_score(w, row, (at - first) / 16, kv != PD_F16 ? att_scales(&w->tiles, at) : NULL);
    }
    for (uint32_t row = row_first; row < w->rows; row++) {
        att_softmax(w, row, att_seen(w, row, first), &w->split_largest[row], &w->split_sums[row]);
        att_weigh(w, row, first, kv);
    }
    att_values_of_all(w, row_first, first, kv);
    return row_first;
}

/* --- few rows of one token --- */

/* Eight pairs of dimensions go into the chains of even and of odd ones. */
V_INLINE void att_few_pairs(const att_work *w, const uint32_t rows, const v16_pair *pairs,
                            const float *query, v16 (*chains)[2])
{
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8; i++) {
#pragma GCC unroll 4
        for (uint32_t r = 0; r < rows; r++) {
            chains[r][0] = v_fma(v_set(query[r * w->dim + 2 * i]), pairs[i].even, chains[r][0]);
            chains[r][1] = v_fma(v_set(query[r * w->dim + 2 * i + 1]), pairs[i].odd, chains[r][1]);
        }
    }
}

V_INLINE void att_few_codes(const att_work *w, const uint32_t rows, const uint8_t *tile,
                            v16 (*chains)[2], const pd_dtype kv)
{
    for (uint32_t d = 0; d < w->dim; d += 32) {
        v16x2 columns[8]; /* as in att_load_codes */
        v16_pair pairs[8];
        v_turn_f16((const uint16_t *)(tile + d), w->dim / 2, columns);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++)
            pairs[i] = att_pair(v_first_bits(columns[i]), kv);
        att_few_pairs(w, rows, pairs, w->queries + d, chains);
        if (d + 16 == w->dim)
            return;
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++)
            pairs[i] = att_pair(v_second_bits(columns[i]), kv);
        att_few_pairs(w, rows, pairs, w->queries + d + 16, chains);
    }
}

V_INLINE void att_few_scores(const att_work *w, const uint32_t rows, uint32_t position,
                             float *scores, const pd_dtype kv)
{
    const uint8_t *tile = att_tile(&w->tiles, position);
    v16 chains[ATT_ROWS][2];

#pragma GCC unroll 4
    for (uint32_t r = 0; r < rows; r++)
        chains[r][0] = chains[r][1] = v_zero();
    if (kv != PD_F16)
        att_few_codes(w, rows, tile, chains, kv);
    for (uint32_t d = 0; kv == PD_F16 && d < w->dim; d += 16) {
        const float *query = w->queries + d;
        v16x2 columns[8];
        v_turn_f16((const uint16_t *)tile + d, w->dim, columns);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++) {
            v16 key = v_first(columns[i]);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < rows; r++)
                chains[r][i % 2] = v_fma(v_set(query[r * w->dim + i]), key, chains[r][i % 2]);
        }
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++) {
            v16 key = v_second(columns[i]);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < rows; r++)
                chains[r][i % 2] = v_fma(v_set(query[r * w->dim + 8 + i]), key, chains[r][i % 2]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < rows; r++)
        v_store(scores + (size_t)r * KERN_SPLIT_TOKENS,
                att_scaled(v_add(chains[r][0], chains[r][1]),
                           kv != PD_F16 ? att_scales(&w->tiles, position) : NULL));
}

V_INLINE void att_few_split(const att_work *w, const uint32_t rows, uint32_t first,
                            const pd_dtype kv)
{
    uint32_t last = w->args->position, count = att_seen(w, 0, first);

    for (uint32_t j = 0; j < count; j += 16) {
        if (j < ATT_AHEAD) /* the others are asked for among the values */
            att_ask(&w->tiles, first + j, w->tiles.half);
        if (first + j + ATT_AHEAD <= last)
            att_ask(&w->tiles, first + j + ATT_AHEAD, 0);
        att_few_scores(w, rows, first + j, w->scores + j, kv);
    }
    for (uint32_t r = 0; r < rows; r++) {
        att_softmax(w, r, count, &w->split_largest[r], &w->split_sums[r]);
        att_weigh(w, r, first, kv);
    }
    att_values(w, 0, rows, first, true, kv);
}

V_INLINE void att_few(const att_work *w, uint32_t first, const pd_dtype kv)
{
    switch (w->rows) {
    case 1: att_few_split(w, 1, first, kv); break;
    case 2: att_few_split(w, 2, first, kv); break;
    case 3: att_few_split(w, 3, first, kv); break;
    default: att_few_split(w, 4, first, kv); break;
    }
}

static void att_ask_next(const kern_attention *next)
{
    att_tiles tiles = att_tiles_of(next);
    uint32_t first = next->parts_splits * KERN_SPLIT_TOKENS, end = first + ATT_NEXT_TOKENS;

    end = next->position < end ? next->position + 1 : end;
    for (uint32_t at = first; at < end; at += 16) {
        att_ask(&tiles, at, 0);
        att_ask(&tiles, at, tiles.half);
    }
}

V_INLINE uint32_t att_part_of(const att_work *w, uint32_t first, const pd_dtype kv)
{
    if (w->args->tokens > 1 || w->rows > ATT_ROWS)
        return att_split(w, first, kv);
    att_few(w, first, kv);
    return 0;
}

/* The part of all rows, or of those from the returned one on. */
static uint32_t att_part(const att_work *w, uint32_t first)
{
    switch (w->args->layout->dtype) {
    case PD_F16: return att_part_of(w, first, PD_F16);
    case PD_INT8: return att_part_of(w, first, PD_INT8);
    default: return att_part_of(w, first, PD_FP8_E4M3);
    }
}

static void att_finish(const att_work *w)
{
    const kern_attention *args = w->args;

    for (uint32_t row = 0; row < w->rows; row++) {
        float *out =
            args->out + row / args->heads * args->out_stride + (size_t)(row % args->heads) * w->dim;
        v16 inverse = v_set(1.0f / w->sums[row]);
        for (uint32_t d = 0; d < w->dim; d += 16)
            v_store(out + d, v_mul(v_load(w->result + (size_t)row * w->dim + d), inverse));
    }
}

/* Where a part lies; const where it is only read. */
static void att_point_to_part(att_work *w, float *part)
{
    w->split_largest = part;
    w->split_sums = part + w->rows;
    w->part = part + 2 * (size_t)w->rows;
}

/* The splits that were made before. */
static void att_merge_parts(const att_work *w)
{
    att_work made = *w;

    for (uint32_t split = 0; split < w->args->parts_splits; split++) {
        att_point_to_part(&made, (float *)(uintptr_t)w->args->parts +
                                     split * kern_attention_part_floats(w->rows, w->dim));
        for (uint32_t row = 0; row < w->rows; row++)
            att_merge(&made, row, split == 0);
    }
}

static void fast_attention(const kern_attention *args)
{
    att_work work;

    att_init(&work, args);
    if (args->next != NULL)
        att_ask_next(args->next);
    att_merge_parts(&work);
    for (uint32_t first = args->parts_splits * KERN_SPLIT_TOKENS;
         first < args->position + args->tokens; first += KERN_SPLIT_TOKENS)
        for (uint32_t row = att_part(&work, first); row < work.rows; row++)
            att_merge(&work, row, first == 0);
    att_finish(&work);
}

static void fast_attention_part(const kern_attention *args, uint32_t split, float *part)
{
    att_work work;

    att_init(&work, args);
    att_point_to_part(&work, part);
    (void)att_part(&work, split * KERN_SPLIT_TOKENS);
}

static void fast_attention_join(const kern_attention *args, uint32_t splits, const float *parts)
{
    att_work work;

    att_init(&work, args);
    for (uint32_t split = 0; split < splits; split++) {
        att_point_to_part(&work, (float *)(uintptr_t)parts +
                                     split * kern_attention_part_floats(args->heads, work.dim));
        for (uint32_t row = 0; row < work.rows; row++)
            att_merge(&work, row, split == 0);
    }
    att_finish(&work);
}
