#pragma once

/* kernels/cpu/tile.h - the shapes of matrix tiles, as AMX has them.
 *
 * What a source file then includes says what the words on tiles do: tile_native.h, instructions;
 * tile_plain.h, C that runs anywhere. Words: TILE_CONFIGURE, TILE_RELEASE, TILE_ZERO, TILE_LOAD,
 * TILE_STORE, TILE_DOT, TILE_DOT_BF16; a tile's number in them is a literal. */

#include <stddef.h>
#include <stdint.h>

#define TILE_COUNT 8
#define TILE_ROWS  16
#define TILE_BYTES 64 /* of a row */

/* As LDTILECFG reads it. */
typedef struct tile_config {
    uint8_t palette; /* 1 */
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "the processor reads 64 bytes");
