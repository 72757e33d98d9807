#include "common/kv/seal.h"

/* Large enough for XXH3's fast path, small enough that a GPU has many in flight. */
#define TILE_BYTES 1024

static uint64_t place_key(const pd_seal_place *place)
{
    const uint64_t fields[] = {
        place->request,     place->epoch,        place->group,
        place->block_index, place->valid_tokens, place->layout_fingerprint,
    };
    return pd_hash64(fields, sizeof fields, 0x5ea1);
}

/* One half (k or v) of one layer of one head: [valid tokens][head_dim], contiguous. */
static uint64_t seal_half(const unsigned char *bytes, uint64_t len, uint64_t key)
{
    uint64_t sum = 0;
    for (uint64_t at = 0; at < len; at += TILE_BYTES) {
        uint64_t tile_len = len - at < TILE_BYTES ? len - at : TILE_BYTES;
        /* the key goes in after the hash: a seeded XXH3 would make a new secret for each tile.
         * Mixed once more, so that equal tiles at two places do not cancel out in differences. */
        sum += pd_mix64(pd_hash64(bytes + at, tile_len, 0) ^ pd_mix64(key + at));
    }
    return sum;
}

uint64_t pd_seal_compute(const pd_kv_layout *layout, const void *pool, pd_block block,
                         const pd_seal_place *place, uint32_t head_from, uint32_t head_to)
{
    pd_assert(head_from <= head_to && head_to <= layout->kv_heads);
    pd_assert(place->valid_tokens > 0 && place->valid_tokens <= layout->block_tokens);
    uint64_t key = place_key(place);
    uint64_t valid_bytes = place->valid_tokens * layout->token_bytes;
    uint32_t layer_first = place->group * layout->group_layers;
    uint32_t layers = pd_kv_layout_group_layers(layout, place->group);
    uint64_t sum = 0;
    for (uint32_t head = head_from; head < head_to; head++) {
        for (uint32_t layer = 0; layer < layers; layer++) {
            const unsigned char *k =
                (const unsigned char *)pool +
                pd_kv_layout_k_offset(layout, layer_first + layer, block, head);
            uint64_t number = ((uint64_t)(place->head_first + head) << 32) + 2 * layer;
            sum += seal_half(k, valid_bytes, key ^ pd_mix64(number));
            sum += seal_half(k + layout->half_bytes, valid_bytes, key ^ pd_mix64(number + 1));
        }
    }
    return sum;
}

pd_status pd_seal_verify(const pd_kv_layout *layout, const void *pool, pd_block block,
                         const pd_seal_place *place, uint32_t head_from, uint32_t head_to,
                         uint64_t seal)
{
    return pd_seal_compute(layout, pool, block, place, head_from, head_to) == seal ? PD_OK
                                                                                   : PD_E_MISMATCH;
}
