#pragma once

/* kernels/cuda/model.h - a rank of a model on a GPU: kernels/backend.h's calls, but for probe.
 *
 * A step is one upload, some ten kernels a layer and one read-back, queued to the compute stream;
 * decode steps are recorded once for each bucket of rows and positions and launched as a graph.
 * Seals are made and checked on two streams of their own, from any thread, while a step runs.
 *
 * What a lost device does: the call that sees it logs why, cu_model_broken says so from then on,
 * and every later call fails. No token of a step that failed, or whose logits are not numbers, is
 * handed out. A step that fails at one rank while it computes is the end of all ranks: none is left
 * waiting, and cu_model_broken says at each what happened, and where. */

#include "kernels/backend.h"
#include "kernels/cuda/comm.h"

/* Beside what every backend is told. */
typedef struct cu_model_settings {
    const char *backend; /* "cuda": for describe and errors; static */
    bool no_graphs;      /* every step is queued call by call: for tests, and to find a bug */
    uint64_t part_bytes; /* as cu_comm_options': for tests */
} cu_model_settings;

/* As the calls of kernels/backend.h of these names. */
uint64_t cu_model_shared_bytes(const kern_backend_options *options,
                               const cu_model_settings *settings);
PD_CHECKED pd_status cu_model_create(const pd_model_file *file, const kern_backend_options *options,
                                     const cu_model_settings *settings, kern_loaded **model_out);
void cu_model_destroy(kern_loaded *model);
const char *cu_model_describe(const kern_loaded *model);
uint64_t cu_model_bytes(const kern_loaded *model);
const char *cu_model_broken(const kern_loaded *model);
void cu_model_last_error(const kern_loaded *model, char *text, size_t text_size);
PD_CHECKED pd_status cu_model_pool_alloc(kern_loaded *model, uint64_t piece_bytes,
                                         void **pieces_out);
void cu_model_pool_free(kern_loaded *model);
PD_CHECKED pd_status cu_model_bind(kern_loaded *model, const pd_kv_layout *layout, void *pool,
                                   bool seals);
PD_CHECKED pd_status cu_model_step(kern_loaded *model, const kern_backend_step *step);
PD_CHECKED pd_status cu_model_seal(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                                   uint64_t *seals_out);
PD_CHECKED pd_status cu_model_check(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                                    const uint64_t *seals, uint32_t *bad_out);

gpu *cu_model_gpu(kern_loaded *model);              /* for tests: what else works on that device */
uint32_t cu_model_graphs(const kern_loaded *model); /* recorded steps that are kept */
