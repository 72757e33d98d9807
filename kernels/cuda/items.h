#pragma once

/* kernels/cuda/items.h - what decode attention has to do, as a list.
 *
 * An item is one split (KERN_SPLIT_TOKENS positions at an absolute place) of one row's context;
 * a padding row has one, too, which writes zeros. A row's items are neighbours, rows come in
 * order. So a launch has as many blocks as there are splits, whatever the longest row is, and the
 * splits' results as many places: of a run, rows in order whose items fit into the scratch at
 * once. Host functions; any thread. */

#include "kernels/cuda/launch.h"

/* Items of a row at this position (CU_ROW_NONE: padding). */
uint32_t cu_items_of(uint32_t position);
/* What a recorded launch of so many items is made for: an eighth more at most. Equal to rows only
 * where items is: then no row has more than one, and there is nothing to merge. */
uint32_t cu_items_padded(uint32_t rows, uint32_t items);
/* Items that fit into decode attention's scratch at once, where rows have up to `positions`
 * positions: one row's at least, all that there can be at most. */
uint32_t cu_items_room(uint32_t rows, uint32_t heads, uint32_t head_dim, uint32_t positions);
/* item_row[sum of the rows' items], row_item[rows], runs_out[up to rows] of at most `room` items
 * each; the number of runs. No row has more than `room` items. */
uint32_t cu_items_list(const uint32_t *position, uint32_t rows, uint32_t room, uint32_t *item_row,
                       uint32_t *row_item, cu_run *runs_out);
