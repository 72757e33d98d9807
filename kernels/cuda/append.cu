/* kernels/cuda/append.cu - RoPE, and K and V into the pool's blocks with the hashes for seals.
 *
 * What is written is kern_ops.rope's and store_f16's result, bit for bit; the hashes and covered
 * counts are those of common/kv/seal's pd_seal_tiles_wrote, called for each run of rows of one
 * sequence in one block.
 *
 * Decode waits for loads that need one another's results (a row's place, its block, the count, the
 * tile's sum) and for one warp's instructions; prefill moves 92 MB at 2,048 rows of an 8B model, 21
 * us at 4.3 TB/s.
 *
 * Ladder
 *   1  (not built) one kernel writes, a second reads the pool again and hashes
 *   2  hashed in the registers that K and V are written from: about 630 instructions of SASS
 *      (sm_90) in a decode row's way, six divisions among them
 *   3  divisions by what the launcher knows are multiplications, lists of rows are read at
 *      once, K and V are asked for before the block's number is there, both halves share their
 *      shuffles: about 430
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
    cu_divider block_tokens, tile_tokens, row_words, quads; /* quads: of four rotated dimensions */
    uint64_t unit_first, unit_block;                        /* a block's unit: first + block * .. */
    uint32_t unit_head;                                     /* .. + head * .. */
    const uint32_t *position, *table;                       /* [rows] */
    const pd_block *blocks;
    uint32_t rows, group, rope_dims; /* group: query heads of a KV head */
    uint32_t group_quads;
    uint64_t row_floats; /* of qkv */
    const float *rope;
    float *qkv;
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
CU_DEVICE void rotate_queries(const append_job &job, uint32_t row)
{
    uint32_t dim = job.kv.head_dim, position = job.position[row];
    float *query = job.qkv + row * job.row_floats + (uint64_t)blockIdx.y * job.group * dim;

    if (position == CU_ROW_NONE)
        return;
    for (uint32_t i = threadIdx.x - 32; i < job.group_quads; i += THREADS - 32) {
        uint32_t head = cu_divide(i, job.quads), d = 4 * (i - head * job.quads.by);
        float *at = query + head * dim + d;
        cu_store<float4>(at, rotate(job, position, d, cu_load<float4>(at)));
    }
}

/* --- which tokens --- */

/* Rows of one sequence from one row on: a tile's tokens [first, first + tokens). */
struct tile_piece {
    uint32_t table, position; /* of the row */
    uint32_t token;           /* of the block, the first */
    uint32_t tile, first, tokens;
    bool starts_run; /* of rows of one sequence in one block */
    uint32_t run_to; /* token of the block; where starts_run */
};

/* The lowest bit of mask that is 0; 32: none. */
CU_DEVICE uint32_t first_zero(uint32_t mask)
{
    uint32_t zeros = ~mask, at = 0;

    for (uint32_t bits = 16; bits > 0; bits /= 2) {
        if ((zeros & ((1u << bits) - 1)) == 0) {
            zeros >>= bits;
            at += bits;
        }
    }
    return mask == 0xffffffff ? 32 : at;
}

/* All lanes: how many rows from row on are the tokens from position on of the piece's sequence, at
 * most 32. */
CU_DEVICE uint32_t count_rows(const append_job &job, const tile_piece &piece, uint32_t row,
                              uint32_t position, uint32_t lane)
{
    uint32_t at = row + lane < job.rows ? row + lane : job.rows - 1;
    uint32_t its_table = job.table[at], its_position = job.position[at];

    return first_zero(cu_ballot(CU_ALL, row + lane < job.rows && its_table == piece.table &&
                                            its_position == position + lane));
}

/* All lanes of a warp. False: padding, or another row's warp has this row's tokens. */
CU_DEVICE bool find_piece(const append_job &job, uint32_t row, uint32_t lane, tile_piece *piece)
{
    uint32_t before = row > 0 ? row - 1 : 0, block_tokens = job.kv.block_tokens;
    uint32_t table_before = job.table[before], position_before = job.position[before];

    piece->table = job.table[row];
    piece->position = job.position[row];
    uint32_t count = count_rows(job, *piece, row, piece->position, lane);
    if (piece->position == CU_ROW_NONE)
        return false;
    uint32_t block = cu_divide(piece->position, job.block_tokens);
    uint32_t token = piece->position - block * block_tokens, to = token + count;
    bool goes_on = row > 0 && token > 0 && table_before == piece->table &&
                   position_before == piece->position - 1;
    piece->token = token;
    piece->tile = cu_divide(token, job.tile_tokens);
    piece->first = token - piece->tile * job.tiling.tokens;
    if (goes_on && piece->first > 0)
        return false;
    uint32_t end = (piece->tile + 1) * job.tiling.tokens;
    end = end < block_tokens ? end : block_tokens;
    piece->tokens = (to < end ? to : end) - token;
    piece->starts_run = !goes_on;
    while (!goes_on && count == 32 && to < block_tokens) {
        uint32_t further = to - token;
        count = count_rows(job, *piece, row + further, piece->position + further, lane);
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

/* Four dimensions of a token, on their way. */
struct lane_word {
    float4 key, value;
};

/* Word `word` of the piece's tile, a new one; kv_floats: qkv's, where the row's K of the head is.
 */
CU_DEVICE lane_word load_word(const append_job &job, const tile_piece &piece,
                              const float *kv_floats, uint32_t word)
{
    uint32_t token = cu_divide(word, job.row_words), further = token - piece.first;
    uint32_t dim = 4 * (word - token * job.tiling.row_words);
    const float *at = kv_floats + further * job.row_floats + dim;
    lane_word loaded;

    loaded.key = cu_load_once<float4>(at);
    loaded.value = cu_load_once<float4>(at + job.kv.kv_heads * job.kv.head_dim);
    if (dim < job.rope_dims)
        loaded.key = rotate(job, piece.position + further, dim, loaded.key);
    return loaded;
}

/* K's hash and V's. */
struct tile_hashes {
    cu_tile_hash k, v;
};

CU_DEVICE void hash_both(const append_job &job, uint32_t word, uint2 k, uint2 v,
                         tile_hashes *hashes)
{
    if (job.kv.tile_sums == NULL)
        return;
    uint2 key = cu_load<uint2>(job.kv.tile_keys + word);
    cu_hash_word(&hashes->k, k, key);
    cu_hash_word(&hashes->v, v, key);
}

enum tile_change { TILE_NEW, TILE_GROWS, TILE_UNKNOWN };

/* What pd_seal_tiles_wrote does with the piece's tile. */
CU_DEVICE tile_change change_of(const append_job &job, const tile_piece &piece, uint64_t unit)
{
    if (job.kv.tile_sums == NULL)
        return TILE_UNKNOWN;
    uint32_t covered = piece.starts_run ? job.kv.covered[unit] : piece.token;
    if (piece.token > covered)
        return TILE_UNKNOWN;
    return piece.first > 0 && piece.token == covered ? TILE_GROWS : TILE_NEW;
}

/* All lanes of a warp: the hashes and the count. Lane 0 has K's, lane 16 V's. */
CU_DEVICE void note_tile(const append_job &job, const tile_piece &piece, tile_change change,
                         uint64_t unit, uint32_t lane, const tile_hashes &hashes)
{
    uint64_t *sum = job.kv.tile_sums + (2 * unit + lane / 16) * job.tiling.tiles + piece.tile;
    uint64_t old = change == TILE_GROWS && lane % 16 == 0 ? *sum : 0;
    uint64_t added = cu_sum_lanes_two(cu_hash_value(&hashes.k), cu_hash_value(&hashes.v), lane);

    cu_sync_warp(CU_ALL); /* all lanes have read the count that lane 0 writes */
    if (lane % 16 != 0 || change == TILE_UNKNOWN)
        return;
    *sum = old + added;
    if (lane == 0 && piece.starts_run)
        job.kv.covered[unit] = (uint16_t)piece.run_to;
}

/* All lanes of a warp: K and V of one row's piece, if it has one, of KV head `head`. What does not
 * need the block's number is asked for before it is there. */
CU_DEVICE void append_head(const append_job &job, uint32_t row, uint32_t head, uint32_t lane)
{
    const cu_kv &kv = job.kv;
    tile_hashes hashes = {{0, 0}, {0, 0}};
    lane_word ahead = {};
    tile_piece piece;

    if (!find_piece(job, row, lane, &piece))
        return;
    uint32_t first_word = piece.first * job.tiling.row_words, word = first_word + lane;
    uint32_t end_word = (piece.first + piece.tokens) * job.tiling.row_words;
    const float *kv_floats =
        job.qkv + row * job.row_floats + (job.group * kv.kv_heads + head) * kv.head_dim;
    if (word < end_word)
        ahead = load_word(job, piece, kv_floats, word);
    pd_block block = job.blocks[piece.table + cu_divide(piece.position, job.block_tokens)];
    uint64_t unit = job.unit_first + block * job.unit_block + head * job.unit_head;
    unsigned char *k_bytes = (unsigned char *)kv.pool + unit * kv.layer_bytes +
                             (piece.token - piece.first) * kv.token_bytes;
    unsigned char *v_bytes = k_bytes + kv.half_bytes;
    tile_change change = change_of(job, piece, unit);

    for (; word < end_word; word += 32) {
        uint2 k = to_halves(ahead.key), v = to_halves(ahead.value);
        if (word + 32 < end_word)
            ahead = load_word(job, piece, kv_floats, word + 32);
        cu_store<uint2>(k_bytes + 8 * word, k);
        cu_store<uint2>(v_bytes + 8 * word, v);
        hash_both(job, word, k, v, &hashes);
    }
    if (change == TILE_NEW) /* tokens of earlier steps, if there are any */
#pragma unroll 1
        for (word = lane; word < first_word; word += 32)
            hash_both(job, word, cu_load<uint2>(k_bytes + 8 * word),
                      cu_load<uint2>(v_bytes + 8 * word), &hashes);
    if (kv.tile_sums != NULL)
        note_tile(job, piece, change, unit, lane, hashes);
}

CU_KERNEL(THREADS, 8) append(append_job job)
{
    if (threadIdx.x < 32)
        append_head(job, blockIdx.x, blockIdx.y, threadIdx.x);
    else
        rotate_queries(job, blockIdx.x);
}

/* Where the layer's units are, as common/kv/layout.h has it. */
static void find_units(append_job *job, uint32_t layer)
{
    const cu_kv *kv = &job->kv;
    uint32_t before = layer / kv->group_layers * kv->group_layers, left = kv->layers - before;

    job->unit_head = left < kv->group_layers ? left : kv->group_layers;
    job->unit_block = (uint64_t)kv->kv_heads * job->unit_head;
    job->unit_first = (uint64_t)before * kv->kv_heads * kv->blocks + (layer - before);
}

pd_status cu_append(gpu_stream *stream, const cu_step *step, const cu_kv *kv, uint32_t layer,
                    uint32_t heads, uint32_t rope_dims, const float *rope, float *qkv)
{
    append_job job = {};

    pd_assert(heads % kv->kv_heads == 0 && layer < kv->layers);
    pd_assert(rope_dims % 2 == 0 && rope_dims <= kv->head_dim);
    job.kv = *kv;
    job.tiling = cu_tiling_of(kv);
    job.block_tokens = cu_divider_of(kv->block_tokens);
    job.tile_tokens = cu_divider_of(job.tiling.tokens);
    job.row_words = cu_divider_of(job.tiling.row_words);
    job.quads = cu_divider_of(rope_dims > 0 ? (rope_dims + 3) / 4 : 1);
    find_units(&job, layer);
    job.position = step->position;
    job.table = step->table;
    job.blocks = step->blocks;
    job.rows = step->rows;
    job.group = heads / kv->kv_heads;
    job.rope_dims = rope_dims;
    job.group_quads = job.group * ((rope_dims + 3) / 4);
    job.row_floats = (uint64_t)(heads + 2 * kv->kv_heads) * kv->head_dim;
    job.rope = rope;
    job.qkv = qkv;
    pd_assert(job.tiling.tokens <= CU_KV_TILE_TOKENS_MAX);
    if (step->rows == 0)
        return PD_OK;
    return CU_LAUNCH(append, dim3(step->rows, kv->kv_heads, 1), dim3(THREADS, 1, 1), 0, stream,
                     job);
}
