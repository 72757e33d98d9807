#include "kernels/cpu/pack.h"

static bool is_packed(pd_dtype dtype)
{
    return dtype == PD_Q4_0 || dtype == PD_Q4_1 || dtype == PD_Q8_0;
}

size_t kern_pack_bytes(pd_dtype dtype, uint32_t rows, uint32_t cols)
{
    size_t panels = (rows + KERN_PANEL_ROWS - 1) / KERN_PANEL_ROWS;

    if (!is_packed(dtype))
        return 0;
    return panels * kern_panel_bytes(dtype, cols);
}

/* One block of one row into its places in the panel. */
static void pack_block(pd_dtype dtype, const uint8_t *block, uint32_t lane, uint8_t *quants,
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

void kern_pack(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows, void *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint32_t blocks = cols / KERN_BLOCK;
    size_t row_bytes = (size_t)blocks * info->block_bytes;
    size_t panel_bytes = kern_panel_bytes(dtype, cols);

    memset(out, 0, kern_pack_bytes(dtype, rows, cols));
    for (uint32_t row = 0; row < rows; row++) {
        const uint8_t *block = (const uint8_t *)file_rows + row * row_bytes;
        uint8_t *panel = (uint8_t *)out + row / KERN_PANEL_ROWS * panel_bytes;
        for (uint32_t b = 0; b < blocks; b++, block += info->block_bytes)
            pack_block(dtype, block, row % KERN_PANEL_ROWS, panel + kern_panel_quants_at(dtype, b),
                       panel + kern_panel_scales_at(dtype, b));
    }
}
