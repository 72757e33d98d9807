#include "common/kv/tile_sum.h"
#include "common/base/status.h"
#include "common/kv/tile_sum_ways.h"

/* splitmix64 as constant expressions */
#define MIX_1(x)   (((x) ^ (x) >> 30) * 0xbf58476d1ce4e5b9ull)
#define MIX_2(x)   (((x) ^ (x) >> 27) * 0x94d049bb133111ebull)
#define MIX_3(x)   ((x) ^ (x) >> 31)
#define KEY(n)     MIX_3(MIX_2(MIX_1(0x5ea1 + ((n) + 1ull) * 0x9e3779b97f4a7c15ull)))
#define KEYS_4(n)  KEY(n), KEY(n + 1), KEY(n + 2), KEY(n + 3)
#define KEYS_16(n) KEYS_4(n), KEYS_4(n + 4), KEYS_4(n + 8), KEYS_4(n + 12)
#define KEYS_64(n) KEYS_16(n), KEYS_16(n + 16), KEYS_16(n + 32), KEYS_16(n + 48)

const uint64_t pd_tile_keys[PD_TILE_WORDS] = {KEYS_64(0), KEYS_64(64)};

uint64_t pd_tile_sum(const void *bytes, uint32_t words, uint32_t first)
{
    pd_assert(first <= PD_TILE_WORDS && words <= PD_TILE_WORDS - first);
    return pd_tile_sum_best()(bytes, words, pd_tile_keys + first);
}

pd_tile_sum_fn *pd_tile_sum_at(uint32_t index)
{
    return index == 0 ? pd_tile_sum_plain : pd_tile_sum_fast(index - 1);
}
