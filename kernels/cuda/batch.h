#pragma once

/* kernels/cuda/batch.h - what a step's kernels must know, in one upload.
 *
 * The slices of a step become rows, query tiles and rows whose logits are wanted; all arrays lie in
 * one run of bytes, the block tables last, so that where the others lie depends on the (padded)
 * counts alone and a recorded graph finds them again. The run starts with the step's results: they
 * are cleared by the upload and read back from the same place.
 *
 * Rows of slices of one token come first, whatever else is in the step: decode attention goes
 * through their contexts split by split (items), as if they were alone; tiles are of chunks alone.
 *
 * Padding: a decode step's rows are filled up to a bucket by rows without a position, whose logits
 * are those of the first row again, and the items of its attention by items of no row. One thread;
 * one step at a time. */

#include "kernels/backend.h"
#include "kernels/cuda/launch.h"

typedef struct cu_batch cu_batch;

typedef struct cu_batch_limits {
    uint32_t rows_max, logits_max; /* of a step; logits_max: sampled rows and the host's */
    uint32_t slices_max;
    uint32_t context_max, vocab;
    uint32_t block_tokens, blocks; /* of the layout */
    uint32_t items_room;           /* of decode attention, at once (kernels/cuda/items.h) */
} cu_batch_limits;

/* A step that is ready to be queued. Pointers are the device's, into the upload. */
typedef struct cu_plan {
    cu_step step;
    uint32_t rows_used;              /* without padding */
    bool decode;                     /* every slice is one token, or one and drafts, all sampled */
    uint32_t positions_max;          /* above every position of a chunk */
    uint32_t items;                  /* of decode attention: a decode step's padded, if one run */
    uint32_t live_first, live_rows;  /* rows from the first to the last whose logits are wanted */
    uint32_t tile_first, tiles_live; /* tiles that hold those */
    uint32_t logits, logits_used;    /* rows, with and without padding */
    const uint32_t *logits_row;      /* [logits] of x */
    const cu_sampling *sampling;     /* [logits] */
    uint32_t *broken;                /* [1] */
    uint32_t *token;                 /* [logits] */
    uint64_t upload_bytes;
} cu_plan;

/* Bytes of host memory, and as many of the device's. */
uint64_t cu_batch_bytes(const cu_batch_limits *limits);
/* PD_E_NOMEM, PD_E_INTERNAL (logged). */
PD_CHECKED pd_status cu_batch_create(gpu *g, const cu_batch_limits *limits, cu_batch **batch_out);
void cu_batch_destroy(cu_batch *batch); /* NULL is fine; the device is done with it */

/* The counts' sum and the slices' own promises are asserted. Errors (logged): PD_E_INVALID (a token
 * id or position out of range), PD_E_TOO_LARGE (more slices or logits than the limits say). */
PD_CHECKED pd_status cu_batch_build(cu_batch *batch, const kern_backend_step *step,
                                    cu_plan *plan_out);
PD_CHECKED pd_status cu_batch_upload(cu_batch *batch, gpu_stream *stream, const cu_plan *plan);
/* Queues the read-back of the results; after the stream has got there they are at... */
PD_CHECKED pd_status cu_batch_read_back(cu_batch *batch, gpu_stream *stream, const cu_plan *plan);
/* ... these two. Token i is that of the i-th row whose logits are wanted, in the slices' order. */
bool cu_batch_was_broken(const cu_batch *batch);
uint32_t cu_batch_token(const cu_batch *batch, uint32_t at);

/* The rows of a slice whose logits are wanted: from the first on, to its end. Those that are
 * sampled are the last of them (kern_sampled_from). */
uint32_t cu_batch_wanted_from(const kern_job_slice *slice);
