#include "kernels/model/exchange.h"

#include "common/base/mem.h"

#include <stdatomic.h>
#include <string.h>

/* Columns that a thread adds at once; the sums that wait for their neighbours lie on its stack. */
#define PIECE         256
#define WAITING_DEPTH (KERN_TREE_DEPTH + 1)

struct kern_exchange {
    kern_comm *comm;
    uint32_t hidden, vocab, rows_max;
    kern_node nodes[KERN_LEAVES_MAX]; /* of all ranks, by lo */
    uint8_t adds[KERN_LEAVES_MAX];
    uint32_t nodes_count, own_first, own_count;
    uint32_t leaf_first; /* of this rank */
    /* shared */
    float *parts[KERN_EXCHANGES]; /* [node][KERN_TERMS][rows_max][hidden] */
    float *logits;                /* [logits_rows_max][vocab] */
    atomic_uint *broken;
    /* [node of this rank][KERN_TERMS][rows_max], rows of parts */
    float **rows[KERN_EXCHANGES];
};

static void find_nodes(const kern_split *split, kern_exchange *out)
{
    out->nodes_count = 0;
    for (uint32_t rank = 0; rank < split->ranks; rank++) {
        uint32_t each = split->leaves / split->ranks;
        kern_nodes own = kern_nodes_of(split->leaves, rank * each, (rank + 1) * each);
        if (rank == split->rank) {
            out->own_first = out->nodes_count;
            out->own_count = own.count;
            out->leaf_first = rank * each;
        }
        memcpy(out->nodes + out->nodes_count, own.node, own.count * sizeof *out->nodes);
        out->nodes_count += own.count;
    }
    kern_nodes_adds(split->leaves, out->nodes, out->nodes_count, out->adds);
}

static uint64_t parts_bytes(const kern_exchange_options *options, uint32_t nodes)
{
    return (uint64_t)nodes * KERN_TERMS * options->rows_max * options->hidden * sizeof(float);
}

static uint64_t logits_bytes(const kern_exchange_options *options)
{
    return (uint64_t)options->logits_rows_max * options->vocab * sizeof(float);
}

uint64_t kern_exchange_bytes(const kern_exchange_options *options)
{
    kern_exchange found;

    find_nodes(&options->split, &found);
    return KERN_EXCHANGES * kern_comm_round(parts_bytes(options, found.nodes_count)) +
           kern_comm_round(logits_bytes(options)) + kern_comm_round(sizeof(atomic_uint));
}

static void point_rows(kern_exchange *e, kern_exchange_of which)
{
    size_t lines = (size_t)KERN_TERMS * e->rows_max;
    float *own = e->parts[which] + e->own_first * lines * e->hidden;

    for (size_t line = 0; line < e->own_count * lines; line++)
        e->rows[which][line] = own + line * e->hidden;
}

pd_status kern_exchange_create(const kern_exchange_options *options, kern_comm *comm,
                               kern_exchange **exchange_out)
{
    kern_exchange *e = pd_calloc(1, sizeof *e);

    if (e == NULL)
        return PD_E_NOMEM;
    e->comm = comm;
    e->hidden = options->hidden;
    e->vocab = options->vocab;
    e->rows_max = options->rows_max;
    find_nodes(&options->split, e);
    for (uint32_t which = 0; which < KERN_EXCHANGES; which++) {
        e->parts[which] = kern_comm_take(comm, parts_bytes(options, e->nodes_count));
        e->rows[which] =
            pd_calloc((size_t)e->own_count * KERN_TERMS * e->rows_max, sizeof *e->rows[which]);
        if (e->rows[which] == NULL) {
            kern_exchange_destroy(e);
            return PD_E_NOMEM;
        }
        point_rows(e, which);
    }
    e->logits = kern_comm_take(comm, logits_bytes(options));
    e->broken = kern_comm_take(comm, sizeof *e->broken);
    *exchange_out = e;
    return PD_OK;
}

void kern_exchange_destroy(kern_exchange *e)
{
    if (e == NULL)
        return;
    for (uint32_t which = 0; which < KERN_EXCHANGES; which++)
        pd_free(e->rows[which]);
    pd_free(e);
}

bool kern_exchange_meet(kern_exchange *e)
{
    return kern_comm_barrier(e->comm);
}

void kern_exchange_multiply(kern_exchange *e, const kern_ops *ops, kern_exchange_of which,
                            const kern_matrix *matrix, uint32_t row_first, uint32_t count,
                            const kern_term terms[KERN_TERMS], uint32_t rows)
{
    for (uint32_t k = 0; k < e->own_count; k++) {
        const kern_node *node = &e->nodes[e->own_first + k];
        kern_matrix part = kern_matrix_node(matrix, node->lo - e->leaf_first, node->count);
        for (uint32_t t = 0; t < KERN_TERMS; t++) {
            float **out = e->rows[which] + ((size_t)k * KERN_TERMS + t) * e->rows_max;
            if (terms[t].acts != NULL)
                ops->matmul(&part, row_first, count, terms[t].acts, terms[t].first, rows, out,
                            false);
        }
    }
}

uint32_t kern_exchange_pieces(const kern_exchange *e)
{
    return (e->hidden + PIECE - 1) / PIECE;
}

void kern_exchange_add(const kern_exchange *e, kern_exchange_of which, uint32_t terms, uint32_t row,
                       uint32_t piece, float *x)
{
    uint32_t col = piece * PIECE, cols = e->hidden - col < PIECE ? e->hidden - col : PIECE;
    float waiting[WAITING_DEPTH][PIECE];

    for (uint32_t t = 0; t < terms; t++) {
        uint32_t depth = 0;
        for (uint32_t k = 0; k < e->nodes_count; k++) {
            size_t line = ((size_t)k * KERN_TERMS + t) * e->rows_max + row;
            pd_assert(depth < WAITING_DEPTH);
            memcpy(waiting[depth++], e->parts[which] + line * e->hidden + col,
                   cols * sizeof(float));
            for (uint32_t adds = e->adds[k]; adds > 0; adds--) {
                depth--;
                for (uint32_t c = 0; c < cols; c++)
                    waiting[depth - 1][c] += waiting[depth][c];
            }
        }
        pd_assert(depth == 1);
        for (uint32_t c = 0; c < cols; c++)
            x[col + c] += waiting[0][c];
    }
}

float *kern_exchange_logits(const kern_exchange *e, uint32_t n)
{
    return e->logits + (size_t)n * e->vocab;
}

void kern_exchange_begin(kern_exchange *e)
{
    atomic_store(e->broken, 0);
}

void kern_exchange_say_broken(kern_exchange *e)
{
    atomic_store(e->broken, 1);
}

bool kern_exchange_is_broken(const kern_exchange *e)
{
    return atomic_load(e->broken) != 0;
}
