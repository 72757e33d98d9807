#pragma once

/* kernels/cuda/graphs.h - recorded decode steps, by what was decided when they were recorded.
 *
 * A step that is launched as one graph costs the host one call instead of some ten a layer. At most
 * CU_GRAPHS_MAX are kept; the one that was not used for longest goes.
 *
 * A step is recorded the second time it comes: the first time it is queued call by call, which
 * loads the kernels that it launches. The runtime loads a kernel when it is first launched, and
 * what that does to the device is refused while a stream is recorded.
 *
 * A recording that fails (memory that is short for the moment, say) is not tried again at once: the
 * next CU_GRAPHS_PAUSE steps that would be recorded are queued call by call, after a second failure
 * in a row four times as many, and so on; after CU_GRAPHS_FAILURES_MAX in a row none is recorded
 * any more. One thread; a graph is ended only while it does not run. */

#include "kernels/cuda/gpu.h"

#define CU_GRAPHS_MAX          32
#define CU_GRAPHS_PAUSE        64u
#define CU_GRAPHS_FAILURES_MAX 8u

typedef struct cu_graph_key {
    uint32_t rows, items; /* padded; items: of attention */
} cu_graph_key;

typedef struct cu_graphs {
    struct {
        bool taken;
        cu_graph_key key;
        gpu_graph *graph; /* NULL: it has come once and was not recorded yet */
        uint64_t used;    /* the turn it was used last */
    } entries[CU_GRAPHS_MAX];
    uint64_t turn;
    uint32_t failures; /* in a row */
    /* steps that are not to be recorded: left, and after the latest failure; UINT64_MAX: all */
    uint64_t pause, last_pause;
} cu_graphs;

/* NULL: none is kept. */
gpu_graph *cu_graphs_find(cu_graphs *graphs, const cu_graph_key *key);
/* Whether a step that was not found is to be recorded now; else it is queued call by call. */
bool cu_graphs_due(cu_graphs *graphs, const cu_graph_key *key);
/* Takes the graph, for a key that was due. */
void cu_graphs_keep(cu_graphs *graphs, const cu_graph_key *key, gpu_graph *graph);
/* Its recording failed: how many steps are queued call by call now; UINT64_MAX: all from now on. */
uint64_t cu_graphs_failed(cu_graphs *graphs);
/* Recorded ones. */
uint32_t cu_graphs_count(const cu_graphs *graphs);
/* Ends all. */
void cu_graphs_clear(cu_graphs *graphs);
