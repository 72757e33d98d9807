#include "common/kv/tile_sum_ways.h"

pd_tile_sum_fn *pd_tile_sum_best(void)
{
    return pd_tile_sum_plain;
}

pd_tile_sum_fn *pd_tile_sum_fast(uint32_t index)
{
    (void)index;
    return NULL;
}
