#include "common/kv/seal.h"
#include "common/base/mem.h"
#include "common/kv/tile_sum.h"

#include <string.h>

/* Large enough that the keyed part weighs little, small enough that a GPU has many in flight. */
#define TILE_BYTES 1024
_Static_assert(TILE_BYTES == 8 * PD_TILE_WORDS, "a tile of whole tokens has a key for every word");

/* A unit is one layer and head of a block: the pool is an array of them, and so are the tables. */
struct pd_seal_tiles {
    pd_kv_layout layout;
    pd_seal_tiling tiling;
    uint64_t units;
    uint64_t *sums;    /* [units][k, v][tiling.tiles], each over the covered tokens of its tile */
    uint16_t *covered; /* [units] tokens; behind the sums */
    void *own;         /* NULL: the memory of both is the caller's */
};

pd_seal_tiling pd_seal_tiling_of(uint64_t token_bytes, uint32_t block_tokens)
{
    pd_seal_tiling t = {.row_words = (uint32_t)((token_bytes + 7) / 8)};

    t.tokens = PD_TILE_WORDS / t.row_words;
    t.tokens = t.tokens < 1 ? 1 : t.tokens > block_tokens ? block_tokens : t.tokens;
    t.tiles = (block_tokens + t.tokens - 1) / t.tokens;
    return t;
}

static uint32_t min_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- a tile's content ---- */

/* A token of more than 1 KiB: its parts of 1 KiB count 1, 3, 5, ... times. */
static uint64_t sum_long_row(const unsigned char *row, uint64_t words)
{
    uint64_t sum = 0, factor = 1;

    for (uint64_t at = 0; at < words; at += PD_TILE_WORDS, factor += 2) {
        uint64_t some = words - at < PD_TILE_WORDS ? words - at : PD_TILE_WORDS;
        sum += factor * pd_tile_sum(row + 8 * at, (uint32_t)some, 0);
    }
    return sum;
}

/* The last word of a token, when a word is more than what is left. */
static uint64_t sum_odd_end(const unsigned char *end, uint64_t bytes, uint64_t word)
{
    uint64_t last = 0;

    memcpy(&last, end, bytes);
    return (2 * (word / PD_TILE_WORDS) + 1) * pd_tile_sum(&last, 1, word % PD_TILE_WORDS);
}

/* Tokens [row, row + rows) of a tile, which lie at bytes. */
static uint64_t sum_rows(const pd_kv_layout *layout, const pd_seal_tiling *t,
                         const unsigned char *bytes, uint32_t row, uint32_t rows)
{
    uint64_t sum = 0, whole = layout->token_bytes / 8, odd = layout->token_bytes % 8;

    if (odd == 0 && t->row_words <= PD_TILE_WORDS)
        return pd_tile_sum(bytes, rows * t->row_words, row * t->row_words);
    for (uint32_t end = row + rows; row < end; row++, bytes += layout->token_bytes) {
        if (t->row_words > PD_TILE_WORDS)
            sum += sum_long_row(bytes, whole);
        else
            sum += pd_tile_sum(bytes, (uint32_t)whole, row * t->row_words);
        if (odd != 0)
            sum += sum_odd_end(bytes + 8 * whole, odd, (uint64_t)row * t->row_words + whole);
    }
    return sum;
}

/* The scales of tokens [row, row + rows) of a tile, each a word: one more part of it, counted as
 * those of a long token are. */
static uint64_t sum_scales(const pd_kv_layout *layout, const pd_seal_tiling *t,
                           const unsigned char *scales, uint32_t row, uint32_t rows)
{
    uint64_t words[PD_TILE_WORDS];
    uint64_t parts = (t->row_words + PD_TILE_WORDS - 1) / PD_TILE_WORDS;

    pd_assert(layout->scale_bytes <= sizeof *words && rows <= PD_TILE_WORDS);
    for (uint32_t i = 0; i < rows; i++) {
        words[i] = 0;
        memcpy(&words[i], scales + (uint64_t)i * layout->scale_bytes, layout->scale_bytes);
    }
    return (2 * parts + 1) * pd_tile_sum(words, rows, row);
}

/* Tokens [row, row + rows) of a tile of the half. */
static uint64_t sum_some(const pd_kv_layout *layout, const pd_seal_tiling *t,
                         const unsigned char *half, uint32_t tile, uint32_t row, uint32_t rows)
{
    uint64_t token = (uint64_t)tile * t->tokens + row;
    uint64_t sum = sum_rows(layout, t, half + token * layout->token_bytes, row, rows);

    if (layout->scale_bytes != 0)
        sum += sum_scales(layout, t, half + layout->scales_at + token * layout->scale_bytes, row,
                          rows);
    return sum;
}

static uint64_t sum_tile(const pd_kv_layout *layout, const pd_seal_tiling *t,
                         const unsigned char *half, uint32_t tile, uint32_t rows)
{
    return sum_some(layout, t, half, tile, 0, rows);
}

/* ---- the table ---- */

static uint64_t units_of(const pd_kv_layout *layout)
{
    return layout->pool_bytes / layout->layer_bytes;
}

uint64_t pd_seal_tiles_room(const pd_kv_layout *layout)
{
    return units_of(layout) *
           (sizeof(uint16_t) +
            2 * (uint64_t)pd_seal_tiling_of(layout->token_bytes, layout->block_tokens).tiles *
                sizeof(uint64_t));
}

pd_status pd_seal_tiles_create_over(const pd_kv_layout *layout, void *memory,
                                    pd_seal_tiles **tiles_out)
{
    pd_seal_tiles *tiles = pd_calloc(1, sizeof *tiles);

    if (tiles == NULL)
        return PD_E_NOMEM;
    tiles->layout = *layout;
    tiles->tiling = pd_seal_tiling_of(layout->token_bytes, layout->block_tokens);
    tiles->units = units_of(layout);
    tiles->sums = memory;
    tiles->covered = (uint16_t *)(tiles->sums + tiles->units * 2 * tiles->tiling.tiles);
    *tiles_out = tiles;
    return PD_OK;
}

pd_status pd_seal_tiles_create(const pd_kv_layout *layout, pd_seal_tiles **tiles_out)
{
    void *memory = pd_calloc(1, pd_seal_tiles_room(layout));

    if (memory == NULL)
        return PD_E_NOMEM;
    pd_status status = pd_seal_tiles_create_over(layout, memory, tiles_out);
    if (status != PD_OK)
        pd_free(memory);
    else
        (*tiles_out)->own = memory;
    return status;
}

void pd_seal_tiles_destroy(pd_seal_tiles *tiles)
{
    if (tiles == NULL)
        return;
    pd_free(tiles->own);
    pd_free(tiles);
}

uint64_t pd_seal_tiles_bytes(const pd_seal_tiles *tiles)
{
    return pd_seal_tiles_room(&tiles->layout);
}

static uint64_t *sums_of(const pd_seal_tiles *tiles, uint64_t unit, uint32_t half)
{
    return tiles->sums + (2 * unit + half) * tiles->tiling.tiles;
}

uint32_t pd_seal_tiles_covered(const pd_seal_tiles *tiles, uint32_t layer, pd_block block,
                               uint32_t head)
{
    uint64_t offset = pd_kv_layout_k_offset(&tiles->layout, layer, block, head);

    return tiles->covered[offset / tiles->layout.layer_bytes];
}

void pd_seal_tiles_wrote(pd_seal_tiles *tiles, const void *pool, uint32_t layer, pd_block block,
                         uint32_t head, uint32_t from, uint32_t to)
{
    const pd_kv_layout *layout = &tiles->layout;
    const pd_seal_tiling *t = &tiles->tiling;
    uint64_t offset = pd_kv_layout_k_offset(layout, layer, block, head);
    uint64_t unit = offset / layout->layer_bytes;
    uint32_t covered = tiles->covered[unit];

    pd_assert(from < to && to <= layout->block_tokens);
    if (from > covered)
        return;
    for (uint32_t half = 0; half < 2; half++) {
        const unsigned char *bytes =
            (const unsigned char *)pool + offset + half * layout->half_bytes;
        uint64_t *sums = sums_of(tiles, unit, half);
        for (uint32_t tile = from / t->tokens; tile * t->tokens < to; tile++) {
            uint32_t start = tile * t->tokens, rows = min_of(t->tokens, to - start);
            if (from > start && from == covered)
                sums[tile] += sum_some(layout, t, bytes, tile, from - start, start + rows - from);
            else
                sums[tile] = sum_tile(layout, t, bytes, tile, rows);
        }
    }
    tiles->covered[unit] = (uint16_t)to;
}

/* ---- seals ---- */

uint64_t pd_seal_place_key(const pd_seal_place *place)
{
    const uint64_t fields[] = {
        place->request,     place->epoch,        place->group,
        place->block_index, place->valid_tokens, place->layout_fingerprint,
    };
    return pd_hash64(fields, sizeof fields, 0x5ea1);
}

/* What a walk over the tiles of a head range has, whatever it does with them. */
typedef struct walk {
    const pd_kv_layout *layout;
    pd_seal_tiling tiling;
    const unsigned char *pool;
    uint32_t group;
    pd_block block;
    uint32_t layers, valid_tokens, head_first;
    uint64_t key;
    const pd_seal_tiles *known; /* NULL: nothing is */
    pd_seal_tiles *learn;       /* NULL: hashes are not kept */
} walk;

static walk walk_of(const pd_kv_layout *layout, const void *pool, pd_block block,
                    const pd_seal_place *place)
{
    pd_assert(place->valid_tokens > 0 && place->valid_tokens <= layout->block_tokens);
    return (walk){
        .layout = layout,
        .tiling = pd_seal_tiling_of(layout->token_bytes, layout->block_tokens),
        .pool = pool,
        .group = place->group,
        .block = block,
        .layers = pd_kv_layout_group_layers(layout, place->group),
        .valid_tokens = place->valid_tokens,
        .head_first = place->head_first,
        .key = pd_seal_place_key(place),
    };
}

/* The head's first unit in the pool; those of the group's later layers follow. */
static uint64_t unit_of(const walk *w, uint32_t head)
{
    return pd_kv_layout_head_offset(w->layout, w->group, w->block, head) / w->layout->layer_bytes;
}

static uint64_t seal_half(const walk *w, uint64_t at, uint32_t half, uint64_t key)
{
    const pd_kv_layout *layout = w->layout;
    const pd_seal_tiling *t = &w->tiling;
    const unsigned char *bytes = w->pool + at * layout->layer_bytes + half * layout->half_bytes;
    uint64_t sum = 0;
    uint32_t covered = w->known == NULL ? 0 : w->known->covered[at];

    for (uint32_t tile = 0; tile * t->tokens < w->valid_tokens; tile++) {
        uint32_t start = tile * t->tokens, whole = min_of(t->tokens, layout->block_tokens - start);
        uint32_t rows = min_of(whole, w->valid_tokens - start);
        bool is_known = covered > start && min_of(whole, covered - start) == rows;
        uint64_t content =
            is_known ? sums_of(w->known, at, half)[tile] : sum_tile(layout, t, bytes, tile, rows);
        if (w->learn != NULL)
            sums_of(w->learn, at, half)[tile] = content;
        /* Mixed, so that equal differences of two tiles do not cancel out. */
        sum += pd_mix64(content ^ pd_mix64(key + tile));
    }
    return sum;
}

static uint64_t seal_heads(const walk *w, uint32_t head_from, uint32_t head_to)
{
    uint64_t sum = 0;

    for (uint32_t head = head_from; head < head_to; head++) {
        uint64_t unit = unit_of(w, head);
        for (uint32_t layer = 0; layer < w->layers; layer++) {
            uint64_t number = ((uint64_t)(w->head_first + head) << 32) + 2 * layer;
            sum += seal_half(w, unit + layer, 0, w->key ^ pd_mix64(number));
            sum += seal_half(w, unit + layer, 1, w->key ^ pd_mix64(number + 1));
        }
    }
    return sum;
}

static uint32_t slice_start(const pd_kv_layout *layout, uint32_t slice, uint32_t slices)
{
    return (uint32_t)((uint64_t)slice * layout->kv_heads / slices);
}

uint64_t pd_seal_compute(const pd_kv_layout *layout, const void *pool, pd_block block,
                         const pd_seal_place *place, uint32_t head_from, uint32_t head_to)
{
    walk w = walk_of(layout, pool, block, place);

    pd_assert(head_from <= head_to && head_to <= layout->kv_heads);
    return seal_heads(&w, head_from, head_to);
}

void pd_seal_of(const pd_kv_layout *layout, const void *pool, const pd_seal_tiles *tiles,
                pd_block block, const pd_seal_place *place, uint32_t slices, uint64_t *seals_out)
{
    walk w = walk_of(layout, pool, block, place);

    pd_assert(slices > 0);
    w.known = tiles;
    for (uint32_t slice = 0; slice < slices; slice++)
        seals_out[slice] = seal_heads(&w, slice_start(layout, slice, slices),
                                      slice_start(layout, slice + 1, slices));
}

pd_status pd_seal_verify(const pd_kv_layout *layout, const void *pool, pd_block block,
                         const pd_seal_place *place, uint32_t head_from, uint32_t head_to,
                         uint64_t seal)
{
    return pd_seal_compute(layout, pool, block, place, head_from, head_to) == seal ? PD_OK
                                                                                   : PD_E_MISMATCH;
}

void pd_seal_items(const pd_kv_layout *layout, const void *pool, const pd_seal_tiles *tiles,
                   const pd_seal_item *items, uint32_t count, uint64_t *seals_out)
{
    for (uint32_t i = 0; i < count; i++) {
        walk w = walk_of(layout, pool, items[i].block, &items[i].place);
        pd_assert(items[i].head_from <= items[i].head_to && items[i].head_to <= layout->kv_heads);
        w.known = tiles;
        seals_out[i] = seal_heads(&w, items[i].head_from, items[i].head_to);
    }
}

/* ---- checking ---- */

static void cover(const walk *w, uint32_t head_from, uint32_t head_to, uint32_t tokens)
{
    for (uint32_t head = head_from; w->learn != NULL && head < head_to; head++) {
        uint64_t unit = unit_of(w, head);
        for (uint32_t layer = 0; layer < w->layers; layer++)
            w->learn->covered[unit + layer] = (uint16_t)tokens;
    }
}

static pd_status check_heads(const walk *w, uint32_t head_from, uint32_t head_to, uint64_t seal)
{
    cover(w, head_from, head_to, 0);
    if (seal_heads(w, head_from, head_to) != seal)
        return PD_E_MISMATCH;
    cover(w, head_from, head_to, w->valid_tokens);
    return PD_OK;
}

pd_status pd_seal_check_items(const pd_kv_layout *layout, const void *pool, pd_seal_tiles *tiles,
                              const pd_seal_item *items, uint32_t count, const uint64_t *seals,
                              uint32_t *bad_out)
{
    for (uint32_t i = 0; i < count; i++) {
        walk w = walk_of(layout, pool, items[i].block, &items[i].place);
        pd_assert(items[i].head_from <= items[i].head_to && items[i].head_to <= layout->kv_heads);
        w.learn = tiles;
        if (check_heads(&w, items[i].head_from, items[i].head_to, seals[i]) != PD_OK) {
            *bad_out = i;
            return PD_E_MISMATCH;
        }
    }
    return PD_OK;
}

pd_status pd_seal_check(const pd_kv_layout *layout, const void *pool, pd_seal_tiles *tiles,
                        pd_block block, const pd_seal_place *place, uint32_t slices,
                        const uint64_t *seals)
{
    walk w = walk_of(layout, pool, block, place);

    pd_assert(slices > 0);
    w.learn = tiles;
    cover(&w, 0, layout->kv_heads, 0);
    for (uint32_t slice = 0; slice < slices; slice++) {
        pd_status status = check_heads(&w, slice_start(layout, slice, slices),
                                       slice_start(layout, slice + 1, slices), seals[slice]);
        if (status != PD_OK)
            return status;
    }
    return PD_OK;
}

/* ---- a sealer of host memory ---- */

static pd_status host_seal(void *ctx, const pd_seal_item *items, uint32_t count,
                           uint64_t *seals_out)
{
    const pd_host_pool *host = ctx;

    pd_seal_items(host->layout, host->pool, host->tiles, items, count, seals_out);
    return PD_OK;
}

static pd_status host_check(void *ctx, const pd_seal_item *items, uint32_t count,
                            const uint64_t *seals, uint32_t *bad_out)
{
    const pd_host_pool *host = ctx;

    return pd_seal_check_items(host->layout, host->pool, host->tiles, items, count, seals, bad_out);
}

pd_sealer pd_host_sealer(pd_host_pool *pool)
{
    return (pd_sealer){.ctx = pool, .seal = host_seal, .check = host_check};
}
