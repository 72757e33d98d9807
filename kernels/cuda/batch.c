#include "kernels/cuda/batch.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/cuda/items.h"

#include <string.h>

#define ALIGNMENT 64
/* Offsets in the upload, from the counts. */
typedef struct places {
    uint64_t broken, token_out, token, position, table, tile_row, tile_rows, logits_row, sampling;
    uint64_t item_row, row_item;
    uint64_t blocks; /* the last: its end depends on the step */
} places;

struct cu_batch {
    cu_batch_limits limits;
    gpu *device;
    uint8_t *host;   /* pinned */
    uint8_t *memory; /* the device's */
    uint64_t bytes;
    /* the step that is being built */
    uint32_t rows, ones, tiles, logits, blocks; /* ones: rows that go by items, the first */
    /* gathered before the counts, and so the places, are known */
    uint32_t *token, *position, *table; /* [rows_max] */
    uint32_t *tile_row, *tile_rows;     /* [rows_max] */
    uint32_t *logits_row;               /* [logits_max] */
    cu_sampling *sampling;              /* [logits_max] */
    cu_run *runs;                       /* [decode_rows_max] */
    uint32_t *order;                    /* [slices_max] slices, as their rows come */
};

static uint64_t place(uint64_t *at, uint64_t bytes)
{
    uint64_t here = *at;

    *at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return here;
}

/* items: 0 where no slice is one token. */
static places places_of(uint32_t rows, uint32_t tiles, uint32_t logits, uint32_t items)
{
    places p;
    uint64_t at = 0;

    p.broken = place(&at, sizeof(uint32_t));
    p.token_out = place(&at, (uint64_t)logits * sizeof(uint32_t));
    p.token = place(&at, (uint64_t)rows * sizeof(uint32_t));
    p.position = place(&at, (uint64_t)rows * sizeof(uint32_t));
    p.table = place(&at, (uint64_t)rows * sizeof(uint32_t));
    p.tile_row = place(&at, (uint64_t)tiles * sizeof(uint32_t));
    p.tile_rows = place(&at, (uint64_t)tiles * sizeof(uint32_t));
    p.logits_row = place(&at, (uint64_t)logits * sizeof(uint32_t));
    p.sampling = place(&at, (uint64_t)logits * sizeof(cu_sampling));
    p.item_row = place(&at, (uint64_t)items * sizeof(uint32_t));
    p.row_item = place(&at, items > 0 ? (uint64_t)rows * sizeof(uint32_t) : 0);
    p.blocks = at;
    return p;
}

static uint32_t decode_rows_max(const cu_batch_limits *limits)
{
    return limits->rows_max < limits->logits_max ? limits->rows_max : limits->logits_max;
}

/* A decode step's rows: one matmul tile is eight, and beyond a few tiles half a tile more or less
 * is little. */
static uint32_t padded(const cu_batch_limits *limits, uint32_t rows)
{
    uint32_t unit = rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : rows <= 64 ? 8 : 32;
    uint32_t up = (rows + unit - 1) / unit * unit, most = decode_rows_max(limits);

    return up < most ? up : most;
}

static uint32_t blocks_max(const cu_batch_limits *limits)
{
    uint32_t each = (limits->context_max + limits->block_tokens - 1) / limits->block_tokens;

    return limits->slices_max * each;
}

uint64_t cu_batch_bytes(const cu_batch_limits *limits)
{
    /* padding adds nothing: it ends where the room does, or there are several runs and none */
    uint32_t items = decode_rows_max(limits) * cu_items_of(limits->context_max - 1);
    places p = places_of(limits->rows_max, limits->rows_max, limits->logits_max, items);

    return p.blocks + (uint64_t)blocks_max(limits) * sizeof(pd_block);
}

static pd_status allocate(cu_batch *batch)
{
    uint32_t rows = batch->limits.rows_max, logits = batch->limits.logits_max;

    batch->token = pd_calloc(rows, sizeof *batch->token);
    batch->position = pd_calloc(rows, sizeof *batch->position);
    batch->table = pd_calloc(rows, sizeof *batch->table);
    batch->tile_row = pd_calloc(rows, sizeof *batch->tile_row);
    batch->tile_rows = pd_calloc(rows, sizeof *batch->tile_rows);
    batch->logits_row = pd_calloc(logits, sizeof *batch->logits_row);
    batch->sampling = pd_calloc(logits, sizeof *batch->sampling);
    batch->runs = pd_calloc(decode_rows_max(&batch->limits), sizeof *batch->runs);
    batch->order = pd_calloc(batch->limits.slices_max, sizeof *batch->order);
    if (batch->token == NULL || batch->position == NULL || batch->table == NULL ||
        batch->tile_row == NULL || batch->tile_rows == NULL || batch->logits_row == NULL ||
        batch->sampling == NULL || batch->runs == NULL || batch->order == NULL)
        return PD_E_NOMEM;
    pd_status status = gpu_host_alloc(batch->device, batch->bytes, (void **)&batch->host);
    if (status == PD_OK)
        status = gpu_alloc(batch->device, batch->bytes, (void **)&batch->memory);
    return status;
}

pd_status cu_batch_create(gpu *g, const cu_batch_limits *limits, cu_batch **batch_out)
{
    cu_batch *batch = pd_calloc(1, sizeof *batch);

    /* as many rows may have items: a draw may be wanted of every slice */
    pd_assert(limits->slices_max <= limits->logits_max);
    if (batch == NULL)
        return PD_E_NOMEM;
    batch->limits = *limits;
    batch->device = g;
    batch->bytes = cu_batch_bytes(limits);
    pd_status status = allocate(batch);
    if (status != PD_OK) {
        cu_batch_destroy(batch);
        return status;
    }
    *batch_out = batch;
    return PD_OK;
}

void cu_batch_destroy(cu_batch *batch)
{
    if (batch == NULL)
        return;
    if (batch->host != NULL)
        gpu_host_free(batch->device, batch->host);
    if (batch->memory != NULL)
        gpu_free(batch->device, batch->memory);
    pd_free(batch->token);
    pd_free(batch->position);
    pd_free(batch->table);
    pd_free(batch->tile_row);
    pd_free(batch->tile_rows);
    pd_free(batch->logits_row);
    pd_free(batch->sampling);
    pd_free(batch->runs);
    pd_free(batch->order);
    pd_free(batch);
}

/* ---- slices to rows ---- */

uint32_t cu_batch_wanted_from(const kern_job_slice *slice)
{
    uint32_t from = slice->slice.logits != NULL ? slice->slice.logits_from : slice->slice.count;

    return slice->want_token && from == slice->slice.count ? kern_sampled_from(slice) : from;
}

static pd_status check_slice(const cu_batch_limits *limits, const kern_slice *slice)
{
    if (slice->count > limits->context_max ||
        slice->position > limits->context_max - slice->count) {
        pd_log_error("msg=\"cuda: position out of range\" position=%u count=%u context_max=%u",
                     slice->position, slice->count, limits->context_max);
        return PD_E_INVALID;
    }
    for (uint32_t i = 0; i < slice->count; i++) {
        if (slice->tokens[i] >= limits->vocab) {
            pd_log_error("msg=\"cuda: token id out of range\" token=%u vocab=%u position=%u",
                         slice->tokens[i], limits->vocab, slice->position + i);
            return PD_E_INVALID;
        }
    }
    return PD_OK;
}

static pd_status check_step(const cu_batch_limits *limits, const kern_backend_step *step)
{
    uint32_t logits = 0;
    pd_status status = PD_OK;

    if (step->slices_count > limits->slices_max) {
        pd_log_error("msg=\"cuda: more slices than the model was made for\" slices=%u "
                     "slices_max=%u",
                     step->slices_count, limits->slices_max);
        return PD_E_TOO_LARGE;
    }
    for (uint32_t i = 0; status == PD_OK && i < step->slices_count; i++) {
        status = check_slice(limits, &step->slices[i].slice);
        logits += step->slices[i].slice.count - cu_batch_wanted_from(&step->slices[i]);
    }
    if (status == PD_OK && logits > limits->logits_max) {
        pd_log_error("msg=\"cuda: more rows with logits than the model was made for\" rows=%u "
                     "logits_max=%u",
                     logits, limits->logits_max);
        return PD_E_TOO_LARGE;
    }
    return status;
}

static void assert_slice(const cu_batch *batch, const kern_job_slice *job)
{
    const kern_slice *slice = &job->slice;
    const cu_batch_limits *limits = &batch->limits;

    pd_assert(slice->count > 0 && slice->count <= limits->rows_max - batch->rows);
    pd_assert(slice->logits_from <= slice->count);
    pd_assert((slice->logits != NULL) == (slice->logits_from < slice->count));
    pd_assert(cu_batch_wanted_from(job) <= kern_sampled_from(job));
    for (uint32_t i = 0; i <= (slice->position + slice->count - 1) / limits->block_tokens; i++)
        pd_assert(slice->blocks[i] < limits->blocks);
}

/* In the places of rows that are sampled a token is drawn; the others are looked at for numbers
 * that are none. */
static void add_logits(cu_batch *batch, const kern_job_slice *job, uint32_t row_first)
{
    const kern_slice *slice = &job->slice;

    for (uint32_t i = cu_batch_wanted_from(job); i < slice->count; i++) {
        cu_sampling sampling = {.top_p = 1, .position = slice->position + i + 1};
        if (i >= kern_sampled_from(job)) {
            sampling.temperature = job->sampling.temperature;
            sampling.top_p = job->sampling.top_p;
            sampling.top_k = job->sampling.top_k;
            sampling.choice = job->sampling.choice;
            sampling.seed = job->sampling.seed;
        }
        batch->logits_row[batch->logits] = row_first + i;
        batch->sampling[batch->logits++] = sampling;
    }
}

/* One token is attended for by items, and so are one and its drafts, a row each: where a step has
 * nothing else it is recorded. drafts: these too. */
static bool by_items(const kern_job_slice *job, bool drafts)
{
    return job->slice.count == 1 ||
           (drafts && job->slice.count <= CU_TILE_ROWS && kern_sampled_from(job) == 0);
}

static uint32_t rows_by_items(const kern_backend_step *step, bool drafts)
{
    uint32_t rows = 0;

    for (uint32_t i = 0; i < step->slices_count; i++)
        rows += by_items(&step->slices[i], drafts) ? step->slices[i].slice.count : 0;
    return rows;
}

/* A chunk is attended for by tiles. */
static void add_slice(cu_batch *batch, const kern_job_slice *job, bool items)
{
    const kern_slice *slice = &job->slice;

    assert_slice(batch, job);
    for (uint32_t i = 0; i < slice->count; i++, batch->rows++) {
        batch->token[batch->rows] = slice->tokens[i];
        batch->position[batch->rows] = slice->position + i;
        batch->table[batch->rows] = batch->blocks;
        if (items)
            continue;
        if (i % CU_TILE_ROWS == 0) {
            batch->tile_row[batch->tiles] = batch->rows;
            batch->tile_rows[batch->tiles++] = 0;
        }
        batch->tile_rows[batch->tiles - 1]++;
    }
    batch->blocks += (slice->position + slice->count - 1) / batch->limits.block_tokens + 1;
}

/* Slices by items first, so that a launch for them is one for neighbours; logits come in the
 * slices' order. */
static void add_slices(cu_batch *batch, const kern_backend_step *step)
{
    bool drafts = rows_by_items(step, true) <= decode_rows_max(&batch->limits);
    uint32_t count = step->slices_count, place = 0, one = 0;
    uint32_t ones = rows_by_items(step, drafts);

    batch->rows = batch->tiles = batch->logits = batch->blocks = 0;
    for (int items = 1; items >= 0; items--)
        for (uint32_t i = 0; i < count; i++)
            if (by_items(&step->slices[i], drafts) == (items == 1))
                batch->order[place++] = i;
    for (uint32_t i = 0; i < count; i++) {
        const kern_job_slice *job = &step->slices[batch->order[i]];
        add_slice(batch, job, by_items(job, drafts));
    }
    batch->ones = ones;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t *row = by_items(&step->slices[i], drafts) ? &one : &ones;
        add_logits(batch, &step->slices[i], *row);
        *row += step->slices[i].slice.count;
    }
}

/* ---- rows to the upload ---- */

static void put(cu_batch *batch, uint64_t at, const void *from, uint64_t bytes)
{
    memcpy(batch->host + at, from, bytes);
}

static void write_padding(cu_batch *batch, const places *p, const cu_plan *plan)
{
    uint32_t *token = (uint32_t *)(batch->host + p->token);
    uint32_t *position = (uint32_t *)(batch->host + p->position);
    uint32_t *table = (uint32_t *)(batch->host + p->table);
    uint32_t *logits_row = (uint32_t *)(batch->host + p->logits_row);
    cu_sampling *sampling = (cu_sampling *)(batch->host + p->sampling);

    for (uint32_t row = plan->rows_used; row < plan->step.rows; row++) {
        token[row] = 0;
        position[row] = CU_ROW_NONE;
        table[row] = 0;
    }
    for (uint32_t i = plan->logits_used; i < plan->logits; i++) {
        logits_row[i] = batch->logits_row[0];
        sampling[i] = (cu_sampling){.top_p = 1};
    }
}

static void write_upload(cu_batch *batch, const kern_backend_step *step, const places *p,
                         const cu_plan *plan)
{
    uint64_t rows = (uint64_t)batch->rows * sizeof(uint32_t), at = p->blocks;

    memset(batch->host + p->broken, 0, sizeof(uint32_t));
    memset(batch->host + p->token_out, 0, (uint64_t)plan->logits * sizeof(uint32_t));
    put(batch, p->token, batch->token, rows);
    put(batch, p->position, batch->position, rows);
    put(batch, p->table, batch->table, rows);
    put(batch, p->tile_row, batch->tile_row, (uint64_t)batch->tiles * sizeof(uint32_t));
    put(batch, p->tile_rows, batch->tile_rows, (uint64_t)batch->tiles * sizeof(uint32_t));
    put(batch, p->logits_row, batch->logits_row, (uint64_t)batch->logits * sizeof(uint32_t));
    put(batch, p->sampling, batch->sampling, (uint64_t)batch->logits * sizeof(cu_sampling));
    write_padding(batch, p, plan);
    for (uint32_t i = 0; i < step->slices_count; i++) {
        const kern_slice *slice = &step->slices[batch->order[i]].slice;
        uint64_t bytes = ((slice->position + slice->count - 1) / batch->limits.block_tokens + 1) *
                         sizeof(pd_block);
        put(batch, at, slice->blocks, bytes);
        at += bytes;
    }
    pd_assert(at <= batch->bytes && at == plan->upload_bytes);
}

/* The rows' positions lie in the upload already, padding among them. */
static void write_items(cu_batch *batch, const places *p, cu_plan *plan)
{
    const uint32_t *position = (const uint32_t *)(batch->host + p->position);
    uint32_t *item_row = (uint32_t *)(batch->host + p->item_row);
    uint32_t *row_item = (uint32_t *)(batch->host + p->row_item);

    plan->step.run = batch->runs;
    plan->step.runs = cu_items_list(position, plan->decode ? plan->step.rows : batch->ones,
                                    batch->limits.items_room, item_row, row_item, batch->runs);
    cu_run *last = &batch->runs[plan->step.runs - 1];
    for (uint32_t item = last->item + last->items; item < plan->items; item++) {
        item_row[item] = CU_ROW_NONE;
        last->items++;
    }
}

/* Rows from the first to the last whose logits are wanted, and the tiles they are in. */
static void find_live(const cu_batch *batch, cu_plan *plan)
{
    uint32_t first = batch->rows, end = 0, tile = 0;

    if (batch->logits == 0)
        return;
    if (plan->decode) { /* all of them, and padding is a row like others */
        plan->live_rows = plan->step.rows;
        return;
    }
    for (uint32_t i = 0; i < batch->logits; i++) {
        uint32_t row = batch->logits_row[i];
        first = row < first ? row : first;
        end = row >= end ? row + 1 : end;
    }
    plan->live_first = first;
    plan->live_rows = end - first;
    while (tile < batch->tiles && batch->tile_row[tile] + batch->tile_rows[tile] <= first)
        tile++;
    plan->tile_first = tile;
    while (tile < batch->tiles && batch->tile_row[tile] < end)
        tile++;
    plan->tiles_live = tile - plan->tile_first;
}

/* Above those of chunks. */
static uint32_t positions_of(const cu_batch *batch)
{
    uint32_t above = 0;

    for (uint32_t row = batch->ones; row < batch->rows; row++)
        above = batch->position[row] >= above ? batch->position[row] + 1 : above;
    return above;
}

/* Items of one-token slices; of a decode step with those of padding, and padded themselves, where
 * they fit into the room at once. */
static uint32_t items_of(const cu_batch *batch, const cu_plan *plan)
{
    uint32_t items = plan->decode ? plan->step.rows - batch->rows : 0;
    uint32_t room = batch->limits.items_room;

    for (uint32_t row = 0; row < batch->ones; row++)
        items += cu_items_of(batch->position[row]);
    if (!plan->decode || items > room)
        return items;
    uint32_t up = cu_items_padded(plan->step.rows, items);
    return up < room ? up : room;
}

pd_status cu_batch_build(cu_batch *batch, const kern_backend_step *step, cu_plan *plan_out)
{
    cu_plan plan = {0};

    pd_status status = check_step(&batch->limits, step);
    if (status != PD_OK)
        return status;
    add_slices(batch, step);
    plan.decode = batch->tiles == 0 && batch->rows == batch->logits;
    plan.rows_used = batch->rows;
    plan.logits_used = batch->logits;
    plan.step.rows = plan.decode ? padded(&batch->limits, batch->rows) : batch->rows;
    plan.logits = plan.decode ? plan.step.rows : batch->logits;
    plan.step.tiles = batch->tiles;
    plan.positions_max = positions_of(batch);
    plan.items = items_of(batch, &plan);
    find_live(batch, &plan);
    places p = places_of(plan.step.rows, plan.step.tiles, plan.logits, plan.items);
    uint8_t *memory = batch->memory;
    plan.step.token = (const uint32_t *)(memory + p.token);
    plan.step.position = (const uint32_t *)(memory + p.position);
    plan.step.table = (const uint32_t *)(memory + p.table);
    plan.step.blocks = (const pd_block *)(memory + p.blocks);
    plan.step.tile_row = (const uint32_t *)(memory + p.tile_row);
    plan.step.tile_rows = (const uint32_t *)(memory + p.tile_rows);
    plan.step.item_row = (const uint32_t *)(memory + p.item_row);
    plan.step.row_item = (const uint32_t *)(memory + p.row_item);
    plan.logits_row = (const uint32_t *)(memory + p.logits_row);
    plan.sampling = (const cu_sampling *)(memory + p.sampling);
    plan.broken = (uint32_t *)(memory + p.broken);
    plan.token = (uint32_t *)(memory + p.token_out);
    plan.upload_bytes = p.blocks + (uint64_t)batch->blocks * sizeof(pd_block);
    write_upload(batch, step, &p, &plan);
    if (plan.items > 0)
        write_items(batch, &p, &plan);
    *plan_out = plan;
    return PD_OK;
}

pd_status cu_batch_upload(cu_batch *batch, gpu_stream *stream, const cu_plan *plan)
{
    return gpu_copy_in(stream, batch->memory, batch->host, plan->upload_bytes);
}

/* ---- results ---- */

pd_status cu_batch_read_back(cu_batch *batch, gpu_stream *stream, const cu_plan *plan)
{
    /* they are the upload's first bytes, and their places on the host likewise */
    uint64_t bytes = ALIGNMENT + (uint64_t)plan->logits * sizeof(uint32_t);

    return gpu_copy_out(stream, batch->host, batch->memory, bytes);
}

static uint32_t word_at(const cu_batch *batch, uint64_t at)
{
    uint32_t word;

    memcpy(&word, batch->host + at, sizeof word);
    return word;
}

bool cu_batch_was_broken(const cu_batch *batch)
{
    return word_at(batch, 0) != 0;
}

uint32_t cu_batch_token(const cu_batch *batch, uint32_t at)
{
    return word_at(batch, ALIGNMENT + (uint64_t)at * sizeof(uint32_t));
}
