#include "kernels/cuda/items.h"

#include "kernels/ops.h"

uint32_t cu_items_of(uint32_t position)
{
    return position == CU_ROW_NONE ? 1 : position / KERN_SPLIT_TOKENS + 1;
}

uint32_t cu_items_padded(uint32_t rows, uint32_t items)
{
    uint32_t unit = 1;

    if (items <= rows)
        return rows;
    while (unit * 16 < items)
        unit *= 2; /* items is 8 to 16 units */
    return (items + unit - 1) / unit * unit;
}

uint32_t cu_items_room(uint32_t rows, uint32_t heads, uint32_t head_dim, uint32_t positions)
{
    uint64_t each = positions == 0 ? 1 : cu_items_of(positions - 1);
    uint64_t room = CU_ATTENTION_SCRATCH / cu_attention_item_bytes(heads, head_dim);

    room = room > each ? room : each;
    return (uint32_t)(room < rows * each ? room : rows * each);
}

uint32_t cu_items_list(const uint32_t *position, uint32_t rows, uint32_t room, uint32_t *item_row,
                       uint32_t *row_item, cu_run *runs_out)
{
    cu_run run = {0};
    uint32_t runs = 0;

    for (uint32_t row = 0; row < rows; row++) {
        uint32_t some = cu_items_of(position[row]), item = run.item + run.items;
        pd_assert(some <= room);
        if (run.items + some > room) {
            runs_out[runs++] = run;
            run = (cu_run){.row = row, .item = item};
        }
        row_item[row] = item;
        for (uint32_t i = 0; i < some; i++)
            item_row[item + i] = row;
        run.rows++;
        run.items += some;
    }
    if (run.rows > 0)
        runs_out[runs++] = run;
    return runs;
}
