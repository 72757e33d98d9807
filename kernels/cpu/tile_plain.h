#pragma once

/* kernels/cpu/tile_plain.h - matrix tiles in plain C: what AMX's int8 instructions do, anywhere.
 *
 * Eight tiles of up to 16 rows of 64 bytes, of the shapes in a configuration, after "Intel AMX
 * instruction set reference" in Intel's Software Developer's Manual, volume 2. What would be an
 * undefined-instruction fault there is a pd_assert here. tile_native.h has the same words as single
 * instructions; a tile's number is a literal in both. One thread a tile_state. */

#include "common/base/status.h"
#include "kernels/cpu/tile.h"

#include <math.h>
#include <string.h>

typedef struct tile_state {
    tile_config config;
    uint8_t tiles[TILE_COUNT][TILE_ROWS][TILE_BYTES];
} tile_state;

static inline void tile_plain_configure(tile_state *state, const tile_config *config)
{
    static const uint8_t zeros[sizeof config->reserved];

    pd_assert(config->palette == 1 && config->start_row == 0);
    pd_assert(memcmp(config->reserved, zeros, sizeof zeros) == 0);
    for (uint32_t i = 0; i < 16; i++) {
        bool used = config->rows[i] != 0;
        pd_assert(used == (config->row_bytes[i] != 0) && (!used || i < TILE_COUNT));
        pd_assert(config->rows[i] <= TILE_ROWS && config->row_bytes[i] <= TILE_BYTES);
    }
    memset(state, 0, sizeof *state);
    state->config = *config;
}

static inline void tile_plain_zero(tile_state *state, uint32_t tile)
{
    pd_assert(tile < TILE_COUNT && state->config.rows[tile] != 0);
    memset(state->tiles[tile], 0, sizeof state->tiles[tile]);
}

/* Rows stride bytes apart. */
static inline void tile_plain_load(tile_state *state, uint32_t tile, const void *base,
                                   size_t stride)
{
    tile_plain_zero(state, tile);
    for (uint32_t row = 0; row < state->config.rows[tile]; row++)
        memcpy(state->tiles[tile][row], (const uint8_t *)base + row * stride,
               state->config.row_bytes[tile]);
}

static inline void tile_plain_store(const tile_state *state, uint32_t tile, void *base,
                                    size_t stride)
{
    pd_assert(tile < TILE_COUNT && state->config.rows[tile] != 0);
    for (uint32_t row = 0; row < state->config.rows[tile]; row++)
        memcpy((uint8_t *)base + row * stride, state->tiles[tile][row],
               state->config.row_bytes[tile]);
}

/* Three different tiles whose shapes fit: a's four bytes meet a row of b. */
static inline void tile_plain_check(const tile_config *c, uint32_t sums, uint32_t a, uint32_t b)
{
    pd_assert(sums < TILE_COUNT && a < TILE_COUNT && b < TILE_COUNT);
    pd_assert(sums != a && sums != b && a != b);
    pd_assert(c->rows[sums] != 0 && c->rows[a] == c->rows[sums]);
    pd_assert(c->row_bytes[b] == c->row_bytes[sums] && c->row_bytes[sums] % 4 == 0);
    pd_assert(c->row_bytes[a] == 4 * c->rows[b]);
}

/* sums += a b, TDPBSSD: a's rows of signed bytes, four of them a row of b's, whose signed bytes are
 * four to a column. */
static inline void tile_plain_dot(tile_state *state, uint32_t sums, uint32_t a, uint32_t b)
{
    const tile_config *c = &state->config;

    tile_plain_check(c, sums, a, b);
    for (uint32_t row = 0; row < c->rows[sums]; row++) {
        const int8_t *x = (const int8_t *)state->tiles[a][row];
        int32_t total[TILE_BYTES / 4];
        memcpy(total, state->tiles[sums][row], sizeof total);
        for (uint32_t k = 0; k < c->rows[b]; k++, x += 4) {
            const int8_t *w = (const int8_t *)state->tiles[b][k]; /* zeros past its row_bytes */
            for (uint32_t col = 0; col < TILE_BYTES / 4; col++, w += 4)
                total[col] += x[0] * w[0] + x[1] * w[1] + x[2] * w[2] + x[3] * w[3];
        }
        memcpy(state->tiles[sums][row], total, sizeof total);
    }
    memset(state->tiles[sums][c->rows[sums]], 0, (TILE_ROWS - (size_t)c->rows[sums]) * TILE_BYTES);
}

static inline float tile_plain_bf16(const uint8_t *at)
{
    uint16_t half;
    uint32_t bits;
    float value;

    memcpy(&half, at, sizeof half);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* sums += a b, TDPBF16PS: floats; pairs of bf16, one of a's and one of b's to a column. Sums of
 * first ones and of second ones apart, rounded after each, then both added to the tile's. Without
 * what the instruction does to denormals: none occur. */
static inline void tile_plain_dot_bf16(tile_state *state, uint32_t sums, uint32_t a, uint32_t b)
{
    const tile_config *c = &state->config;

    tile_plain_check(c, sums, a, b);
    for (uint32_t row = 0; row < c->rows[sums]; row++)
        for (uint32_t col = 0; col < c->row_bytes[sums] / 4u; col++) {
            const uint8_t *x = state->tiles[a][row];
            float parts[2] = {0, 0}, total;
            for (uint32_t k = 0; k < c->rows[b]; k++, x += 4)
                for (uint32_t i = 0; i < 2; i++)
                    parts[i] =
                        fmaf(tile_plain_bf16(x + 2 * i),
                             tile_plain_bf16(state->tiles[b][k] + 4 * col + 2 * i), parts[i]);
            memcpy(&total, state->tiles[sums][row] + 4 * col, sizeof total);
            total += parts[0] + parts[1];
            memcpy(state->tiles[sums][row] + 4 * col, &total, sizeof total);
        }
}

/* The words that gemm_amx.h is written in. */
#define TILE_CONFIGURE(state, config)         tile_plain_configure(state, config)
#define TILE_RELEASE(state)                   memset((state), 0, sizeof *(state))
#define TILE_ZERO(state, tile)                tile_plain_zero(state, tile)
#define TILE_LOAD(state, tile, base, stride)  tile_plain_load(state, tile, base, stride)
#define TILE_STORE(state, tile, base, stride) tile_plain_store(state, tile, base, stride)
#define TILE_DOT(state, sums, a, b)           tile_plain_dot(state, sums, a, b)
#define TILE_DOT_BF16(state, sums, a, b)      tile_plain_dot_bf16(state, sums, a, b)
