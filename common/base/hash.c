#include "common/base/hash.h"
#include "common/base/status.h"

#include <sys/random.h>
#include <xxhash.h>

uint64_t pd_hash64(const void *bytes, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(bytes, len, seed);
}

pd_hash128 pd_hash128_of(const void *bytes, size_t len, uint64_t seed)
{
    XXH128_hash_t hash = XXH3_128bits_withSeed(bytes, len, seed);
    return (pd_hash128){.lo = hash.low64, .hi = hash.high64};
}

uint64_t pd_mix64(uint64_t value)
{
    value ^= value >> 30;
    value *= 0xbf58476d1ce4e5b9ull;
    value ^= value >> 27;
    value *= 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

uint64_t pd_random_next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15ull;
    return pd_mix64(*state);
}

uint64_t pd_random_id(void)
{
    uint64_t id = 0;

    while (id == 0)
        pd_assert(getrandom(&id, sizeof id, 0) == (ssize_t)sizeof id);
    return id;
}
