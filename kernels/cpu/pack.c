#include "kernels/cpu/pack.h"

static bool is_packed(pd_dtype dtype)
{
    return dtype >= PD_Q4_0 && dtype <= PD_Q6_K;
}

size_t kern_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    size_t panels = (rows + KERN_PANEL_ROWS - 1) / KERN_PANEL_ROWS;

    if (!is_packed(dtype))
        return 0;
    return panels * kern_panel_bytes(dtype, cols);
}

/* One block of 32 of one row into its places in the panel. */
static void pack_block_32(pd_dtype dtype, const uint8_t *block, uint32_t lane, uint8_t *quants,
                          uint8_t *scales)
{
    uint32_t head = dtype == PD_Q4_1 ? 4 : 2;
    uint32_t runs = dtype == PD_Q8_0 ? 8 : 4;
    uint8_t flip = dtype == PD_Q8_0 ? 0x80 : 0;

    memcpy(scales + (size_t)2 * lane, block, 2);
    if (dtype == PD_Q4_1)
        memcpy(scales + 32 + (size_t)2 * lane, block + 2, 2);
    for (uint32_t run = 0; run < runs; run++)
        for (uint32_t i = 0; i < 4; i++)
            quants[run * 64 + lane * 4 + i] = block[head + run * 4 + i] ^ flip;
}

/* The same of 256 columns, whose first block of 32 is `first`. */
static void pack_block_q4k(const uint8_t *block, uint32_t lane, uint32_t first, uint8_t *panel)
{
    uint8_t *d = panel + kern_panel_d_at(PD_Q4_K, first);
    uint8_t *scales = panel + kern_panel_run_scales_at(PD_Q4_K, first);

    memcpy(d + (size_t)2 * lane, block, 2);
    memcpy(d + 32 + (size_t)2 * lane, block + 2, 2);
    for (uint32_t i = 0; i < KERN_Q4K_SCALES_BYTES; i++)
        scales[i * 16 + lane] = block[KERN_Q4K_SCALES_AT + i];
    for (uint32_t run = 0; run < KERN_K_RUNS; run++) {
        uint8_t *quants = panel + kern_panel_quants_at(PD_Q4_K, first + run);
        for (uint32_t i = 0; i < 16; i++)
            quants[i / 4 * 64 + lane * 4 + i % 4] =
                (uint8_t)(kern_q4k_quant(block, run, i) | kern_q4k_quant(block, run, i + 16) << 4);
    }
}

static void pack_block_q6k(const uint8_t *block, uint32_t lane, uint32_t first, uint8_t *panel)
{
    uint8_t *scales = panel + kern_panel_run_scales_at(PD_Q6_K, first);

    memcpy(panel + kern_panel_d_at(PD_Q6_K, first) + (size_t)2 * lane, block + KERN_Q6K_D_AT, 2);
    for (uint32_t run = 0; run < KERN_K_RUNS; run++) {
        uint8_t *quants = panel + kern_panel_quants_at(PD_Q6_K, first + run);
        for (uint32_t half = 0; half < 2; half++)
            scales[run * 32 + half * 16 + lane] = (uint8_t)kern_q6k_scale(block, run, half);
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t low = kern_q6k_quant(block, run, i), high = kern_q6k_quant(block, run, i + 16);
            size_t byte = lane * 4 + i % 4;
            quants[i / 4 * 64 + byte] = (uint8_t)((low & 15) | (high & 15) << 4);
            quants[256 + byte] |= (uint8_t)(low >> 4 << (i / 4 * 2));
            quants[320 + byte] |= (uint8_t)(high >> 4 << (i / 4 * 2));
        }
    }
}

static void pack_block(pd_dtype dtype, const uint8_t *block, uint32_t lane, uint32_t first,
                       uint8_t *panel)
{
    switch (dtype) {
    case PD_Q4_K: pack_block_q4k(block, lane, first, panel); break;
    case PD_Q6_K: pack_block_q6k(block, lane, first, panel); break;
    default:
        pack_block_32(dtype, block, lane, panel + kern_panel_quants_at(dtype, first),
                      panel + kern_panel_scales_at(dtype, first));
        break;
    }
}

void kern_pack(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint32_t blocks = cols / info->block_weights, step = info->block_weights / KERN_BLOCK;
    size_t row_bytes = (size_t)blocks * info->block_bytes;
    size_t panel_bytes = kern_panel_bytes(dtype, cols);

    memset(out, 0, kern_pack_bytes(dtype, rows, cols));
    for (uint32_t row = 0; row < rows; row++) {
        const uint8_t *block = (const uint8_t *)file_rows + row * row_bytes;
        uint8_t *panel = (uint8_t *)out + row / KERN_PANEL_ROWS * panel_bytes;
        for (uint32_t b = 0; b < blocks; b++, block += info->block_bytes)
            pack_block(dtype, block, row % KERN_PANEL_ROWS, b * step, panel);
    }
}
