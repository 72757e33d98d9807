/* kernels/cuda/kv.cu - seals of many blocks in one launch, and blocks to and from runs of bytes.
 *
 * Seals are pd_seal_compute's (common/kv/seal.h has the formula). Sums modulo 2^64 have no order,
 * so that any number of warps can make a seal and add to it.
 *
 * Ladder of seal_bytes, whose bound is the bytes: one read of K and V, 32 bytes a lane a KiB. An
 * H200's memory brings a KiB every 250 warp instructions (1.05e12 a second against 4.3 TB/s).
 *   1  a warp a tile, the next one asked for before one is hashed: 236 instructions a KiB (SASS
 *      of sm_90), most of them to find the tile and to mix its hash
 *   2  a warp a half, two tiles at a time, whose sums share their shuffles; places are found
 *      once a half, and the mixing is done for all its tiles at once, a lane a tile: 110 a KiB
 *      with 4 tiles a half, 150 with 2. 2 KiB a warp are under way, 48 KiB an SM.
 *
 * seal_tiles reads the tables' 8 bytes a KiB, a lane a tile. Gather and scatter move every byte
 * once in and once out, four 16-byte loads a thread under way. */

#include "kernels/cuda/kv_device.h"

#define SEAL_THREADS    256
#define SEAL_WARPS      (SEAL_THREADS / 32)
#define SEAL_BLOCKS_AIM 6 /* blocks of threads an SM that keep the memory busy: two full rounds */

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

/* What an item covers: halves numbered [head][layer in group][k, v], each with so many tiles that
 * hold valid tokens. */
struct seal_range {
    uint64_t unit_first; /* of the block's group */
    uint32_t layers, tiles, halves;
};

struct seal_half {
    uint64_t unit;
    uint32_t half;
    uint64_t key; /* the item's and the half's */
};

CU_DEVICE seal_range range_of(const seal_job &job, const cu_seal_item &item)
{
    seal_range range;

    range.unit_first = cu_kv_block_unit(job.kv, item.group, item.block);
    range.layers = cu_kv_layers_of(job.kv, item.group);
    range.tiles = (item.valid_tokens + job.tiling.tokens - 1) / job.tiling.tokens;
    range.halves = 2 * (item.head_to - item.head_from) * range.layers;
    return range;
}

CU_DEVICE seal_half half_of(const cu_seal_item &item, const seal_range &range, uint32_t index)
{
    uint32_t units = index / 2, heads = units / range.layers, layer = units - heads * range.layers;
    uint32_t head = item.head_from + heads;
    uint64_t number = ((uint64_t)(item.head_first + head) << 32) + 2 * layer + index % 2;

    return seal_half{range.unit_first + head * range.layers + layer, index % 2,
                     item.key ^ cu_mix64(number)};
}

/* What a tile adds to its seal. */
CU_DEVICE uint64_t sealed(const seal_half &half, uint32_t tile, uint64_t content)
{
    return cu_mix64(content ^ cu_mix64(half.key + tile));
}

CU_DEVICE uint64_t *sums_of(const seal_job &job, const seal_half &half)
{
    return job.kv.tile_sums + (2 * half.unit + half.half) * job.tiling.tiles;
}

/* Valid tokens of a tile; blocks end where their last tile does, or before. */
CU_DEVICE uint32_t tokens_of(const seal_job &job, const cu_seal_item &item, uint32_t tile)
{
    uint32_t start = tile * job.tiling.tokens;
    uint32_t left = start < item.valid_tokens ? item.valid_tokens - start : 0;

    return left < job.tiling.tokens ? left : job.tiling.tokens;
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

/* A lane's words of a tile, where there are any. */
struct lane_words {
    uint4 first, second;
    bool has_first, has_second;
};

CU_DEVICE lane_words load_tile(const seal_job &job, const seal_half &half, uint32_t tile,
                               uint32_t tokens, uint32_t lane)
{
    const unsigned char *bytes = (const unsigned char *)job.kv.pool +
                                 half.unit * job.kv.layer_bytes + half.half * job.kv.half_bytes +
                                 (uint64_t)tile * job.tiling.tokens * job.kv.token_bytes;
    uint32_t words = tokens * job.tiling.row_words; /* an even number, at most 128 */
    lane_words loaded;

    loaded.has_first = 2 * lane < words;
    loaded.has_second = 64 + 2 * lane < words;
    if (loaded.has_first)
        loaded.first = cu_load_once<uint4>(bytes + 16 * lane);
    if (loaded.has_second)
        loaded.second = cu_load_once<uint4>(bytes + 512 + 16 * lane);
    return loaded;
}

CU_DEVICE void hash_words(cu_tile_hash *hash, uint4 words, uint4 keys)
{
    cu_hash_word(hash, make_uint2(words.x, words.y), make_uint2(keys.x, keys.y));
    cu_hash_word(hash, make_uint2(words.z, words.w), make_uint2(keys.z, keys.w));
}

/* One lane's part of the hash of a tile. */
CU_DEVICE uint64_t hash_lane(const lane_words &words, const lane_keys &keys)
{
    cu_tile_hash hash = {0, 0};

    if (words.has_first)
        hash_words(&hash, words.first, keys.first);
    if (words.has_second)
        hash_words(&hash, words.second, keys.second);
    return cu_hash_value(&hash);
}

/* All lanes: adds what they have of a seal. */
CU_DEVICE void add_seal(const seal_job &job, uint64_t seal, uint32_t lane)
{
    seal = cu_sum_lanes(seal);
    if (lane == 0 && seal != 0)
        cu_atomic_add(&job.seals[blockIdx.x], seal);
}

/* A warp a half; grid (items, slices of each). Where there are tables they learn what was hashed,
 * and no two warps have the same half. Tiles are hashed two at a time; lane l keeps the hash of
 * tile 2 (l mod 16) + l / 16, so that the mixing is done for 32 tiles at once. */
CU_KERNEL(SEAL_THREADS, 3) seal_bytes(seal_job job)
{
    uint32_t lane = threadIdx.x % 32, warp = blockIdx.y * SEAL_WARPS + threadIdx.x / 32;
    cu_seal_item item = job.items[blockIdx.x];
    seal_range range = range_of(job, item);
    lane_keys keys = keys_of(job, lane);
    bool learns = job.kv.tile_sums != NULL;
    uint64_t seal = 0;

    for (uint32_t index = warp; index < range.halves; index += gridDim.y * SEAL_WARPS) {
        seal_half half = half_of(item, range, index);
        for (uint32_t first = 0; first < range.tiles; first += 32) {
            uint32_t mine = first + 2 * (lane % 16) + lane / 16;
            uint64_t content = 0;
            for (uint32_t pair = 0; pair < 16 && first + 2 * pair < range.tiles; pair++) {
                uint32_t tile = first + 2 * pair;
                lane_words even = load_tile(job, half, tile, tokens_of(job, item, tile), lane);
                lane_words odd =
                    load_tile(job, half, tile + 1, tokens_of(job, item, tile + 1), lane);
                uint64_t hashes =
                    cu_sum_lanes_two(hash_lane(even, keys), hash_lane(odd, keys), lane);
                content = lane % 16 == pair ? hashes : content;
            }
            seal += mine < range.tiles ? sealed(half, mine, content) : 0;
            if (learns && mine < range.tiles)
                sums_of(job, half)[mine] = content;
        }
        if (learns && lane == 0 && half.half == 0)
            job.kv.covered[half.unit] = (uint16_t)item.valid_tokens;
    }
    add_seal(job, seal, lane);
}

/* The table's hash of a tile is over exactly its valid tokens. */
CU_DEVICE bool is_known(const seal_job &job, const seal_half &half, uint32_t tile, uint32_t tokens)
{
    uint32_t covered = job.kv.covered[half.unit], start = tile * job.tiling.tokens;
    uint32_t left = job.kv.block_tokens - start;
    uint32_t whole = left < job.tiling.tokens ? left : job.tiling.tokens;

    return covered > start && (covered - start < whole ? covered - start : whole) == tokens;
}

/* All lanes: the hash of one tile that is in no table, in every lane. */
CU_DEVICE uint64_t hash_unknown(const seal_job &job, const cu_seal_item &item,
                                const seal_range &range, uint32_t index, uint32_t lane)
{
    uint32_t tile = index % range.tiles;
    seal_half half = half_of(item, range, index / range.tiles);
    lane_words words = load_tile(job, half, tile, tokens_of(job, item, tile), lane);

    return cu_sum_lanes(hash_lane(words, keys_of(job, lane)));
}

/* A lane a tile; what the tables do not have, the warp hashes tile by tile. */
CU_KERNEL(SEAL_THREADS, 4) seal_tiles(seal_job job)
{
    uint32_t lane = threadIdx.x % 32, warp = blockIdx.y * SEAL_WARPS + threadIdx.x / 32;
    cu_seal_item item = job.items[blockIdx.x];
    seal_range range = range_of(job, item);
    uint32_t count = range.halves * range.tiles;
    uint64_t seal = 0;

    for (uint32_t first = 32 * warp; first < count; first += 32 * gridDim.y * SEAL_WARPS) {
        bool inside = first + lane < count;
        uint32_t index = inside ? first + lane : first, tile = index % range.tiles;
        seal_half half = half_of(item, range, index / range.tiles);
        bool known = inside && is_known(job, half, tile, tokens_of(job, item, tile));
        uint64_t content = known ? sums_of(job, half)[tile] : 0;
        uint32_t unknown = cu_ballot(CU_ALL, inside && !known);
        for (uint32_t other = 0; other < 32; other++) {
            if ((unknown >> other & 1) == 0)
                continue;
            uint64_t hashed = hash_unknown(job, item, range, first + other, lane);
            content = lane == other ? hashed : content;
        }
        seal += inside ? sealed(half, tile, content) : 0;
    }
    add_seal(job, seal, lane);
}

pd_status cu_seal(gpu_stream *stream, const cu_kv *kv, uint32_t count, const cu_seal_item *items,
                  bool from_bytes, uint64_t *seals)
{
    seal_job job = {*kv, cu_tiling_of(kv), items, seals};
    bool by_tile = !from_bytes && kv->tile_sums != NULL;
    uint64_t halves = 2 * (uint64_t)kv->kv_heads * kv->group_layers;
    uint64_t warps = by_tile ? (halves * job.tiling.tiles + 31) / 32 : halves; /* that help */
    uint64_t slices_max = (warps + SEAL_WARPS - 1) / SEAL_WARPS;

    if (count == 0)
        return PD_OK;
    uint64_t aim = SEAL_BLOCKS_AIM * (uint64_t)gpu_info_of(gpu_stream_gpu(stream))->processors;
    uint64_t slices = (aim + count - 1) / count;
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
