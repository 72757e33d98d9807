/* kernels/cuda/append.cu - RoPE, and K and V into the pool's blocks with the hashes for seals.
 *
 * What is written is kern_ops.rope's and store_f16's result, bit for bit; the hashes and covered
 * counts are those of common/kv/seal's pd_seal_tiles_wrote, called for each run of rows of one
 * sequence in one block.
 *
 * The grid is (rows, kv heads), whatever the rows are, so that a graph can be replayed with others.
 * A block's first warp has the K and V of its head and row, the other warps rotate the queries that
 * share the head. Lanes have four dimensions each, a 64-bit word of the tile's hash: a warp reads
 * runs of 512 bytes of floats and writes runs of 256 bytes of f16, and the words are hashed in the
 * registers that they are written from, so that a seal costs the tables' 18 bytes a KiB of K and V
 * and no reading of the pool.
 *
 * One writer a tile: the warp whose row is the first of its run in the tile has all its tokens; the
 * K/V warps of the other rows have nothing to do. In prefill these are 7 of 8 (head_dim 64) or 3 of
 * 4 (128), whose blocks still have queries to rotate: a grid of tiles would need the host to know
 * where they begin.
 *
 * One writer and reader a covered count: the warp of the run's first row. Only that row's tile can
 * have tokens before the run, so that only there the count decides: equal to the run's first token,
 * the tile's hash grows by the new words; larger (the block has been used before), the tile is
 * hashed anew from its start; smaller, nothing is known and nothing changes. A later tile of the
 * run is new from its start in every case; in the third its hash is written though the count says
 * that it is not to be read. */

#include "kernels/cuda/kv_device.h"

#define THREADS 128

struct append_job {
    cu_kv kv;
    cu_tiling tiling;
    const uint32_t *position, *table; /* [rows] */
    const pd_block *blocks;
    uint32_t rows, layer, heads, rope_dims;
    const float *rope;
    float *qkv;
};

/* Rows of one sequence from one row on, a tile's tokens [first, first + tokens). */
struct tile_piece {
    uint32_t token; /* of the block, the first */
    uint32_t first, tokens;
    bool starts_run; /* of rows of one sequence in one block */
    uint32_t run_to; /* token of the block; where starts_run */
};

/* --- rotation --- */

/* Pairs (2i, 2i + 1): as ref_rope. */
CU_DEVICE void rotate_pair(float *even, float *odd, float2 cos_sin)
{
    float e = *even, o = *odd;

    *even = fmaf(e, cos_sin.x, -(o * cos_sin.y));
    *odd = fmaf(o, cos_sin.x, e * cos_sin.y);
}

/* Dimensions dim .. dim + 3 of a head at a position; dim < rope_dims. */
CU_DEVICE float4 rotate(const append_job &job, uint32_t position, uint32_t dim, float4 v)
{
    const float *at = job.rope + (uint64_t)position * job.rope_dims + dim;
    float2 first, second;

    if (job.rope_dims % 4 == 0) { /* the usual case: every row of the table is 16-byte aligned */
        float4 both = cu_load<float4>(at);
        first = make_float2(both.x, both.y);
        second = make_float2(both.z, both.w);
    } else {
        first = cu_load<float2>(at);
        if (dim + 2 < job.rope_dims)
            second = cu_load<float2>(at + 2);
    }
    rotate_pair(&v.x, &v.y, first);
    if (dim + 2 < job.rope_dims)
        rotate_pair(&v.z, &v.w, second);
    return v;
}

/* The query heads that share KV head blockIdx.y, by all warps but the first. */
CU_DEVICE void rotate_queries(const append_job &job, uint32_t row, uint32_t position)
{
    uint32_t group = job.heads / job.kv.kv_heads, dim = job.kv.head_dim;
    uint32_t quads = (job.rope_dims + 3) / 4;
    uint64_t stride = (uint64_t)(job.heads + 2 * job.kv.kv_heads) * dim;
    float *query = job.qkv + row * stride + (uint64_t)blockIdx.y * group * dim;

    for (uint32_t i = threadIdx.x - 32; i < group * quads; i += THREADS - 32) {
        uint32_t head = i / quads, d = 4 * (i - head * quads);
        float *at = query + head * dim + d;
        cu_store<float4>(at, rotate(job, position, d, cu_load<float4>(at)));
    }
}

/* --- which tokens --- */

/* All lanes: how many rows from row on are the tokens from position on of the table's sequence, at
 * most 32. */
CU_DEVICE uint32_t count_rows(const append_job &job, uint32_t row, uint32_t table,
                              uint32_t position, uint32_t lane)
{
    bool same = row + lane < job.rows && job.table[row + lane] == table &&
                job.position[row + lane] == position + lane;
    uint32_t other = ~cu_ballot(CU_ALL, same), count = 0;

    for (uint32_t bits = 16; other != 0 && bits > 0; bits /= 2) {
        if ((other & ((1u << bits) - 1)) == 0) {
            other >>= bits;
            count += bits;
        }
    }
    return other == 0 ? 32 : count;
}

/* All lanes of a warp. False: another row's warp has this row's tokens. */
CU_DEVICE bool find_piece(const append_job &job, uint32_t row, uint32_t position, uint32_t lane,
                          tile_piece *piece)
{
    uint32_t block_tokens = job.kv.block_tokens, token = position % block_tokens;
    uint32_t table = job.table[row], start = token / job.tiling.tokens * job.tiling.tokens;
    uint32_t end = start + job.tiling.tokens;
    bool goes_on = row > 0 && token > 0 && job.table[row - 1] == table &&
                   job.position[row - 1] == position - 1;

    if (goes_on && token > start)
        return false;
    end = end < block_tokens ? end : block_tokens;
    uint32_t count = count_rows(job, row, table, position, lane), to = token + count;
    piece->token = token;
    piece->first = token - start;
    piece->tokens = (to < end ? to : end) - token;
    piece->starts_run = !goes_on;
    while (!goes_on && count == 32 && to < block_tokens) {
        count = count_rows(job, row + (to - token), table, position + (to - token), lane);
        to += count;
    }
    piece->run_to = to < block_tokens ? to : block_tokens;
    return true;
}

/* --- K and V --- */

CU_DEVICE uint2 to_halves(float4 v)
{
    uint2 word;

    word.x = cu_f32_to_f16(v.x) | (uint32_t)cu_f32_to_f16(v.y) << 16;
    word.y = cu_f32_to_f16(v.z) | (uint32_t)cu_f32_to_f16(v.w) << 16;
    return word;
}

/* The tile that a piece belongs to. */
struct tile_bytes {
    const float *key, *value; /* qkv's, of the piece's first row */
    uint64_t stride;          /* floats from row to row */
    unsigned char *k, *v;     /* in the pool */
    uint32_t position;        /* of the tile's first token */
};

/* Four dimensions of a token, on their way. */
struct lane_word {
    float4 key, value;
};

CU_DEVICE lane_word load_word(const append_job &job, const tile_piece &piece,
                              const tile_bytes &bytes, uint32_t word)
{
    uint32_t token = word / job.tiling.row_words;
    uint32_t dim = 4 * (word - token * job.tiling.row_words);
    uint64_t at = (token - piece.first) * bytes.stride + dim;
    lane_word loaded;

    loaded.key = cu_load_once<float4>(bytes.key + at);
    loaded.value = cu_load_once<float4>(bytes.value + at);
    if (dim < job.rope_dims)
        loaded.key = rotate(job, bytes.position + token, dim, loaded.key);
    return loaded;
}

CU_DEVICE void hash_both(const append_job &job, uint32_t word, uint2 k, uint2 v,
                         cu_tile_hash hash[2])
{
    if (job.kv.tile_sums == NULL)
        return;
    uint2 key = cu_load<uint2>(job.kv.tile_keys + word);
    cu_hash_word(&hash[0], k, key);
    cu_hash_word(&hash[1], v, key);
}

enum tile_change { TILE_NEW, TILE_GROWS, TILE_UNKNOWN };

/* What pd_seal_tiles_wrote does with the piece's tile. */
CU_DEVICE tile_change change_of(const tile_piece &piece, uint32_t covered)
{
    if (!piece.starts_run)
        return TILE_NEW;
    if (piece.token > covered)
        return TILE_UNKNOWN;
    return piece.first > 0 && piece.token == covered ? TILE_GROWS : TILE_NEW;
}

/* All lanes of a warp: the hashes and the count, as wanted by change. */
CU_DEVICE void note_tile(const append_job &job, const tile_piece &piece, tile_change change,
                         uint64_t unit, uint32_t lane, const cu_tile_hash hash[2])
{
    uint64_t sum_k = cu_sum_lanes(cu_hash_value(&hash[0]));
    uint64_t sum_v = cu_sum_lanes(cu_hash_value(&hash[1]));
    uint32_t tile = piece.token / job.tiling.tokens;
    uint64_t *sums = job.kv.tile_sums + 2 * unit * job.tiling.tiles + tile;

    cu_sync_warp(CU_ALL); /* all lanes have read the count that lane 0 writes */
    if (lane != 0 || change == TILE_UNKNOWN)
        return;
    sums[0] = change == TILE_GROWS ? sums[0] + sum_k : sum_k;
    sums += job.tiling.tiles;
    sums[0] = change == TILE_GROWS ? sums[0] + sum_v : sum_v;
    if (piece.starts_run)
        job.kv.covered[unit] = (uint16_t)piece.run_to;
}

/* All lanes of a warp: K and V of one row's piece, if it has one, of KV head `head`. What does not
 * need the block's number is asked for before it is there. */
CU_DEVICE void append_head(const append_job &job, uint32_t row, uint32_t position, uint32_t head,
                           uint32_t lane)
{
    const cu_kv &kv = job.kv;
    cu_tile_hash hash[2] = {{0, 0}, {0, 0}};
    lane_word ahead = {};
    tile_piece piece;
    tile_bytes bytes;

    if (!find_piece(job, row, position, lane, &piece))
        return;
    uint32_t first_word = piece.first * job.tiling.row_words, word = first_word + lane;
    uint32_t end_word = (piece.first + piece.tokens) * job.tiling.row_words;
    bytes.stride = (uint64_t)(job.heads + 2 * kv.kv_heads) * kv.head_dim;
    bytes.key = job.qkv + row * bytes.stride + (uint64_t)(job.heads + head) * kv.head_dim;
    bytes.value = bytes.key + (uint64_t)kv.kv_heads * kv.head_dim;
    bytes.position = position - piece.first;
    if (word < end_word)
        ahead = load_word(job, piece, bytes, word);
    pd_block block = job.blocks[job.table[row] + position / kv.block_tokens];
    uint64_t unit = cu_kv_unit(kv, job.layer, block, head);
    bytes.k = (unsigned char *)kv.pool + unit * kv.layer_bytes +
              (piece.token - piece.first) * kv.token_bytes;
    bytes.v = bytes.k + kv.half_bytes;
    tile_change change = TILE_UNKNOWN;
    if (kv.tile_sums != NULL)
        change = change_of(piece, piece.starts_run ? kv.covered[unit] : 0);

    for (; word < end_word; word += 32) {
        uint2 k = to_halves(ahead.key), v = to_halves(ahead.value);
        if (word + 32 < end_word)
            ahead = load_word(job, piece, bytes, word + 32);
        cu_store<uint2>(bytes.k + 8 * word, k);
        cu_store<uint2>(bytes.v + 8 * word, v);
        hash_both(job, word, k, v, hash);
    }
    if (change == TILE_NEW) /* tokens of earlier steps, if there are any */
        for (word = lane; word < first_word; word += 32)
            hash_both(job, word, cu_load<uint2>(bytes.k + 8 * word),
                      cu_load<uint2>(bytes.v + 8 * word), hash);
    if (kv.tile_sums != NULL)
        note_tile(job, piece, change, unit, lane, hash);
}

CU_KERNEL(THREADS, 8) append(append_job job)
{
    uint32_t row = blockIdx.x, position = job.position[row];

    if (position == CU_ROW_NONE)
        return;
    if (threadIdx.x < 32)
        append_head(job, row, position, blockIdx.y, threadIdx.x);
    else
        rotate_queries(job, row, position);
}

pd_status cu_append(gpu_stream *stream, const cu_step *step, const cu_kv *kv, uint32_t layer,
                    uint32_t heads, uint32_t rope_dims, const float *rope, float *qkv)
{
    append_job job = {};

    pd_assert(heads % kv->kv_heads == 0 && layer < kv->layers);
    pd_assert(rope_dims % 2 == 0 && rope_dims <= kv->head_dim);
    job.kv = *kv;
    job.tiling = cu_tiling_of(kv);
    job.position = step->position;
    job.table = step->table;
    job.blocks = step->blocks;
    job.rows = step->rows;
    job.layer = layer;
    job.heads = heads;
    job.rope_dims = rope_dims;
    job.rope = rope;
    job.qkv = qkv;
    pd_assert(job.tiling.tokens <= CU_KV_TILE_TOKENS_MAX);
    if (step->rows == 0)
        return PD_OK;
    return CU_LAUNCH(append, dim3(step->rows, kv->kv_heads, 1), dim3(THREADS, 1, 1), 0, stream,
                     job);
}
