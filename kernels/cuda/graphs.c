#include "kernels/cuda/graphs.h"

#include <string.h>

/* CU_GRAPHS_MAX: it is not there. */
static uint32_t place_of(const cu_graphs *graphs, const cu_graph_key *key)
{
    uint32_t at = 0;

    while (at < CU_GRAPHS_MAX &&
           (!graphs->entries[at].taken || memcmp(&graphs->entries[at].key, key, sizeof *key) != 0))
        at++;
    return at;
}

/* A place for the key: a free one, or that of what was not used for longest. */
static uint32_t make_place(cu_graphs *graphs, const cu_graph_key *key)
{
    uint32_t at = 0;

    for (uint32_t i = 1; i < CU_GRAPHS_MAX && graphs->entries[at].taken; i++)
        if (!graphs->entries[i].taken || graphs->entries[i].used < graphs->entries[at].used)
            at = i;
    gpu_graph_destroy(graphs->entries[at].graph);
    graphs->entries[at].taken = true;
    graphs->entries[at].key = *key;
    graphs->entries[at].graph = NULL;
    return at;
}

gpu_graph *cu_graphs_find(cu_graphs *graphs, const cu_graph_key *key)
{
    uint32_t at = place_of(graphs, key);

    if (at == CU_GRAPHS_MAX)
        return NULL;
    graphs->entries[at].used = ++graphs->turn;
    return graphs->entries[at].graph;
}

bool cu_graphs_due(cu_graphs *graphs, const cu_graph_key *key)
{
    uint32_t at = place_of(graphs, key);

    if (at == CU_GRAPHS_MAX) {
        at = make_place(graphs, key);
        graphs->entries[at].used = ++graphs->turn;
        return false;
    }
    if (graphs->pause == UINT64_MAX)
        return false;
    if (graphs->pause > 0) {
        graphs->pause--;
        return false;
    }
    return true;
}

void cu_graphs_keep(cu_graphs *graphs, const cu_graph_key *key, gpu_graph *graph)
{
    uint32_t at = place_of(graphs, key);

    pd_assert(at < CU_GRAPHS_MAX && graphs->entries[at].graph == NULL);
    graphs->entries[at].graph = graph;
    graphs->entries[at].used = ++graphs->turn;
    graphs->failures = 0;
}

uint64_t cu_graphs_failed(cu_graphs *graphs)
{
    graphs->pause = graphs->failures == 0 ? CU_GRAPHS_PAUSE : 4 * graphs->last_pause;
    graphs->last_pause = graphs->pause;
    if (++graphs->failures == CU_GRAPHS_FAILURES_MAX)
        graphs->pause = UINT64_MAX;
    return graphs->pause;
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
        gpu_graph_destroy(graphs->entries[i].graph);
        graphs->entries[i].graph = NULL;
        graphs->entries[i].taken = false;
    }
}
