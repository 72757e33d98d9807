/* kernels/cuda/kv.cu - seals of many blocks in one launch, and blocks to and from runs of bytes.
 *
 * Seals are pd_seal_compute's (common/kv/seal.h has the formula). Sums modulo 2^64 have no order,
 * so that any number of warps can make a seal and add to it.
 *
 * Bounds: from the bytes, the bytes. A warp takes a tile: two 16-byte loads a lane, the keys stay
 * in registers; about 110 instructions a KiB where the memory of an H200 leaves time for 250. From
 * the tiles' hashes, 8 bytes a KiB: a lane a tile. Gather and scatter move every byte once in and
 * once out, four 16-byte loads a thread under way. */

#include "kernels/cuda/kv_device.h"

#define SEAL_THREADS 256
#define SEAL_WARPS   (SEAL_THREADS / 32)
/* About so many blocks of threads keep the memory of any of these GPUs busy. */
#define SEAL_BLOCKS_AIM 1024

#define COPY_THREADS 256
#define COPY_AHEAD   4
#define COPY_CHUNK   (16 * COPY_THREADS * COPY_AHEAD) /* bytes that one block of threads copies */

/* --- seals --- */

struct seal_job {
    cu_kv kv;
    cu_tiling tiling;
    const cu_seal_item *items;
    uint64_t *seals;
};

/* One item's tiles, numbered [head][layer in group][k, v][tile that holds valid tokens]. */
struct seal_range {
    uint64_t unit_first; /* of the block's group */
    uint32_t layers, tiles, head_from, count;
};

struct seal_tile {
    uint64_t unit;
    uint32_t head, layer, half, tile, tokens; /* valid ones of the tile */
};

CU_DEVICE seal_range range_of(const seal_job &job, const cu_seal_item &item)
{
    seal_range range;

    range.unit_first = cu_kv_block_unit(job.kv, item.group, item.block);
    range.layers = cu_kv_layers_of(job.kv, item.group);
    range.tiles = (item.valid_tokens + job.tiling.tokens - 1) / job.tiling.tokens;
    range.head_from = item.head_from;
    range.count = (item.head_to - item.head_from) * range.layers * 2 * range.tiles;
    return range;
}

CU_DEVICE seal_tile tile_of(const seal_job &job, const seal_range &range, uint32_t index,
                            uint32_t valid_tokens)
{
    seal_tile at;
    uint32_t halves = index / range.tiles, units = halves / 2, start;

    at.tile = index - halves * range.tiles;
    at.half = halves % 2;
    at.head = range.head_from + units / range.layers;
    at.layer = units % range.layers;
    at.unit = range.unit_first + at.head * range.layers + at.layer;
    start = at.tile * job.tiling.tokens;
    /* blocks end where their last tile does, or before */
    at.tokens = valid_tokens - start < job.tiling.tokens ? valid_tokens - start : job.tiling.tokens;
    return at;
}

/* What a tile adds to its seal. */
CU_DEVICE uint64_t sealed(const cu_seal_item &item, const seal_tile &at, uint64_t content)
{
    uint64_t number = ((uint64_t)(item.head_first + at.head) << 32) + 2 * at.layer + at.half;
    uint64_t key = item.key ^ cu_mix64(number);

    return cu_mix64(content ^ cu_mix64(key + at.tile));
}

CU_DEVICE uint64_t *sum_of(const seal_job &job, const seal_tile &at)
{
    return job.kv.tile_sums + (2 * at.unit + at.half) * job.tiling.tiles + at.tile;
}

/* A lane's keys: of words 2 lane, 2 lane + 1, and 64 further. */
struct lane_keys {
    uint4 first, second;
};

CU_DEVICE lane_keys keys_of(const seal_job &job, uint32_t lane)
{
    lane_keys keys;

    keys.first = cu_load<uint4>(job.kv.tile_keys + 2 * lane);
    keys.second = cu_load<uint4>(job.kv.tile_keys + 64 + 2 * lane);
    return keys;
}

CU_DEVICE void hash_words(cu_tile_hash *hash, uint4 words, uint4 keys)
{
    cu_hash_word(hash, make_uint2(words.x, words.y), make_uint2(keys.x, keys.y));
    cu_hash_word(hash, make_uint2(words.z, words.w), make_uint2(keys.z, keys.w));
}

/* A lane's part of a tile: word pairs lane and lane + 32, zeros past its end. */
struct lane_words {
    uint4 first, second;
    bool has_first, has_second;
};

CU_DEVICE lane_words load_tile(const seal_job &job, const seal_tile &at, uint32_t lane)
{
    const unsigned char *bytes = (const unsigned char *)job.kv.pool + at.unit * job.kv.layer_bytes +
                                 at.half * job.kv.half_bytes +
                                 (uint64_t)at.tile * job.tiling.tokens * job.kv.token_bytes;
    uint32_t words = at.tokens * job.tiling.row_words; /* an even number, at most 128 */
    lane_words loaded;

    loaded.has_first = 2 * lane < words;
    loaded.has_second = 64 + 2 * lane < words;
    if (loaded.has_first)
        loaded.first = cu_load_once<uint4>(bytes + 16 * lane);
    if (loaded.has_second)
        loaded.second = cu_load_once<uint4>(bytes + 512 + 16 * lane);
    return loaded;
}

/* All lanes: the hash of a tile, in every lane. */
CU_DEVICE uint64_t hash_tile(const lane_words &words, const lane_keys &keys)
{
    cu_tile_hash hash = {0, 0};

    if (words.has_first)
        hash_words(&hash, words.first, keys.first);
    if (words.has_second)
        hash_words(&hash, words.second, keys.second);
    return cu_hash_sum(&hash);
}

CU_DEVICE void learn(const seal_job &job, const cu_seal_item &item, const seal_tile &at,
                     uint64_t content)
{
    *sum_of(job, at) = content;
    if (at.half == 0 && at.tile == 0)
        job.kv.covered[at.unit] = (uint16_t)item.valid_tokens;
}

/* A warp a tile, the next one's words on their way while one is hashed; grid (items, slices of
 * each). Where there are tables, they learn what was hashed; no two warps have the same tile, nor
 * the same unit's first. */
CU_KERNEL(SEAL_THREADS, 4) seal_bytes(seal_job job)
{
    uint32_t lane = threadIdx.x % 32, step = gridDim.y * SEAL_WARPS;
    uint32_t index = blockIdx.y * SEAL_WARPS + threadIdx.x / 32;
    cu_seal_item item = job.items[blockIdx.x];
    seal_range range = range_of(job, item);
    lane_keys keys = keys_of(job, lane);
    seal_tile ahead = {};
    lane_words ahead_words = {};
    uint64_t seal = 0;

    if (index < range.count) {
        ahead = tile_of(job, range, index, item.valid_tokens);
        ahead_words = load_tile(job, ahead, lane);
    }
    for (; index < range.count; index += step) {
        seal_tile at = ahead;
        lane_words words = ahead_words;
        if (index + step < range.count) {
            ahead = tile_of(job, range, index + step, item.valid_tokens);
            ahead_words = load_tile(job, ahead, lane);
        }
        uint64_t content = hash_tile(words, keys);
        seal += sealed(item, at, content);
        if (lane == 0 && job.kv.tile_sums != NULL)
            learn(job, item, at, content);
    }
    if (lane == 0 && seal != 0)
        cu_atomic_add(&job.seals[blockIdx.x], seal);
}

/* The table's hash of a tile is over exactly its valid tokens. */
CU_DEVICE bool is_known(const seal_job &job, const seal_tile &at)
{
    uint32_t covered = job.kv.covered[at.unit], start = at.tile * job.tiling.tokens;
    uint32_t left = job.kv.block_tokens - start;
    uint32_t whole = left < job.tiling.tokens ? left : job.tiling.tokens;

    return covered > start && (covered - start < whole ? covered - start : whole) == at.tokens;
}

/* A lane a tile; what the tables do not have, the warp hashes tile by tile. */
CU_KERNEL(SEAL_THREADS, 4) seal_tiles(seal_job job)
{
    uint32_t lane = threadIdx.x % 32, warp = blockIdx.y * SEAL_WARPS + threadIdx.x / 32;
    cu_seal_item item = job.items[blockIdx.x];
    seal_range range = range_of(job, item);
    uint64_t seal = 0;

    for (uint32_t first = 32 * warp; first < range.count; first += 32 * gridDim.y * SEAL_WARPS) {
        bool inside = first + lane < range.count;
        seal_tile at = tile_of(job, range, inside ? first + lane : first, item.valid_tokens);
        bool known = inside && is_known(job, at);
        uint64_t content = known ? *sum_of(job, at) : 0;
        uint32_t unknown = cu_ballot(CU_ALL, inside && !known);
        for (uint32_t other = 0; unknown >> other != 0; other++) {
            if ((unknown >> other & 1) == 0)
                continue;
            seal_tile its = tile_of(job, range, first + other, item.valid_tokens);
            uint64_t hashed = hash_tile(load_tile(job, its, lane), keys_of(job, lane));
            content = lane == other ? hashed : content;
        }
        seal += inside ? sealed(item, at, content) : 0;
    }
    for (uint32_t bits = 16; bits > 0; bits /= 2)
        seal += cu_shuffle_xor(CU_ALL, seal, bits);
    if (lane == 0 && seal != 0)
        cu_atomic_add(&job.seals[blockIdx.x], seal);
}

pd_status cu_seal(gpu_stream *stream, const cu_kv *kv, uint32_t count, const cu_seal_item *items,
                  bool from_bytes, uint64_t *seals)
{
    seal_job job = {*kv, cu_tiling_of(kv), items, seals};
    uint64_t tiles = (uint64_t)kv->kv_heads * kv->group_layers * 2 * job.tiling.tiles;
    bool by_tile = !from_bytes && kv->tile_sums != NULL;
    uint64_t slices_max = (tiles + SEAL_WARPS - 1) / SEAL_WARPS / (by_tile ? 32 : 1) + 1;

    if (count == 0)
        return PD_OK;
    uint64_t slices = (SEAL_BLOCKS_AIM + count - 1) / count;
    slices = slices < slices_max ? slices : slices_max;
    pd_status status = gpu_fill(stream, seals, 0, count * sizeof *seals);
    if (status != PD_OK)
        return status;
    dim3 grid(count, (uint32_t)slices, 1), block(SEAL_THREADS, 1, 1);
    if (by_tile)
        return CU_LAUNCH(seal_tiles, grid, block, 0, stream, job);
    return CU_LAUNCH(seal_bytes, grid, block, 0, stream, job);
}

/* --- blocks to and from a run of bytes --- */

struct copy_job {
    cu_kv kv;
    uint32_t group, head_from, heads;
    const pd_block *blocks;
    unsigned char *run;
    uint64_t bytes; /* of one block's heads: contiguous on both sides */
};

CU_DEVICE unsigned char *pool_of(const copy_job &job, pd_block block)
{
    uint64_t unit = cu_kv_block_unit(job.kv, job.group, block) +
                    job.head_from * cu_kv_layers_of(job.kv, job.group);

    return (unsigned char *)job.kv.pool + unit * job.kv.layer_bytes;
}

CU_DEVICE void copy_chunk(unsigned char *to, const unsigned char *from, uint64_t bytes)
{
    uint64_t at = (uint64_t)blockIdx.y * COPY_CHUNK + 16 * threadIdx.x;
    uint4 ahead[COPY_AHEAD];

#pragma unroll
    for (uint32_t k = 0; k < COPY_AHEAD; k++)
        if (at + 16 * COPY_THREADS * k < bytes)
            ahead[k] = cu_load_once<uint4>(from + at + 16 * COPY_THREADS * k);
#pragma unroll
    for (uint32_t k = 0; k < COPY_AHEAD; k++)
        if (at + 16 * COPY_THREADS * k < bytes)
            cu_store<uint4>(to + at + 16 * COPY_THREADS * k, ahead[k]);
}

CU_KERNEL(COPY_THREADS, 4) gather(copy_job job)
{
    copy_chunk(job.run + blockIdx.x * job.bytes, pool_of(job, job.blocks[blockIdx.x]), job.bytes);
}

CU_KERNEL(COPY_THREADS, 4) scatter(copy_job job)
{
    pd_block block = job.blocks[blockIdx.x];
    uint32_t layers = cu_kv_layers_of(job.kv, job.group);
    uint16_t *covered = job.kv.covered;

    copy_chunk(pool_of(job, block), job.run + blockIdx.x * job.bytes, job.bytes);
    if (covered == NULL || blockIdx.y > 0)
        return;
    covered += cu_kv_block_unit(job.kv, job.group, block) + job.head_from * layers;
    for (uint32_t unit = threadIdx.x; unit < job.heads * layers; unit += COPY_THREADS)
        covered[unit] = 0;
}

static pd_status launch_copy(gpu_stream *stream, const cu_kv *kv, uint32_t group, uint32_t count,
                             const pd_block *blocks, uint32_t head_from, uint32_t head_to,
                             void *run, bool into_pool)
{
    copy_job job = {*kv, group, head_from, head_to - head_from, blocks, (unsigned char *)run, 0};
    uint32_t left = kv->layers - group * kv->group_layers;
    uint32_t layers = left < kv->group_layers ? left : kv->group_layers;

    pd_assert(group * kv->group_layers < kv->layers);
    pd_assert(head_from <= head_to && head_to <= kv->kv_heads);
    pd_assert(kv->token_bytes % 16 == 0);
    job.bytes = (uint64_t)job.heads * layers * kv->layer_bytes;
    if (count == 0 || job.bytes == 0)
        return PD_OK;
    dim3 grid(count, (uint32_t)((job.bytes + COPY_CHUNK - 1) / COPY_CHUNK), 1);
    dim3 block(COPY_THREADS, 1, 1);
    if (into_pool)
        return CU_LAUNCH(scatter, grid, block, 0, stream, job);
    return CU_LAUNCH(gather, grid, block, 0, stream, job);
}

pd_status cu_kv_gather(gpu_stream *stream, const cu_kv *kv, uint32_t group, uint32_t count,
                       const pd_block *blocks, uint32_t head_from, uint32_t head_to, void *out)
{
    return launch_copy(stream, kv, group, count, blocks, head_from, head_to, out, false);
}

pd_status cu_kv_scatter(gpu_stream *stream, const cu_kv *kv, uint32_t group, uint32_t count,
                        const pd_block *blocks, uint32_t head_from, uint32_t head_to,
                        const void *in)
{
    return launch_copy(stream, kv, group, count, blocks, head_from, head_to, (void *)in, true);
}
