#include "kernels/cuda/graphs.h"

#include <string.h>

gpu_graph *cu_graphs_find(cu_graphs *graphs, const cu_graph_key *key)
{
    for (uint32_t i = 0; i < CU_GRAPHS_MAX; i++) {
        if (graphs->entries[i].graph == NULL ||
            memcmp(&graphs->entries[i].key, key, sizeof *key) != 0)
            continue;
        graphs->entries[i].used = ++graphs->turn;
        return graphs->entries[i].graph;
    }
    return NULL;
}

void cu_graphs_keep(cu_graphs *graphs, const cu_graph_key *key, gpu_graph *graph)
{
    uint32_t at = 0;

    for (uint32_t i = 1; i < CU_GRAPHS_MAX && graphs->entries[at].graph != NULL; i++)
        if (graphs->entries[i].graph == NULL || graphs->entries[i].used < graphs->entries[at].used)
            at = i;
    if (graphs->entries[at].graph != NULL)
        gpu_graph_destroy(graphs->entries[at].graph);
    graphs->entries[at].key = *key;
    graphs->entries[at].graph = graph;
    graphs->entries[at].used = ++graphs->turn;
}

uint32_t cu_graphs_count(const cu_graphs *graphs)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < CU_GRAPHS_MAX; i++)
        count += graphs->entries[i].graph != NULL;
    return count;
}

void cu_graphs_clear(cu_graphs *graphs)
{
    for (uint32_t i = 0; i < CU_GRAPHS_MAX; i++) {
        if (graphs->entries[i].graph != NULL)
            gpu_graph_destroy(graphs->entries[i].graph);
        graphs->entries[i].graph = NULL;
    }
}
