#pragma once

/* kernels/cuda/graphs.h - recorded decode steps, by what was decided when they were recorded.
 *
 * A step that is launched as one graph costs the host one call instead of some ten a layer. At most
 * CU_GRAPHS_MAX are kept; the one that was not used for longest goes. One thread; a graph is ended
 * only while it does not run. */

#include "kernels/cuda/gpu.h"

#define CU_GRAPHS_MAX 32

typedef struct cu_graph_key {
    uint32_t rows, positions_max; /* padded */
} cu_graph_key;

typedef struct cu_graphs {
    struct {
        cu_graph_key key;
        gpu_graph *graph; /* NULL: free */
        uint64_t used;    /* the turn it was used last */
    } entries[CU_GRAPHS_MAX];
    uint64_t turn;
} cu_graphs;

/* NULL: none is kept. */
gpu_graph *cu_graphs_find(cu_graphs *graphs, const cu_graph_key *key);
/* Takes the graph, for a key that was not found. */
void cu_graphs_keep(cu_graphs *graphs, const cu_graph_key *key, gpu_graph *graph);
uint32_t cu_graphs_count(const cu_graphs *graphs);
/* Ends all. */
void cu_graphs_clear(cu_graphs *graphs);
