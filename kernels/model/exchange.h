#pragma once

/* kernels/model/exchange.h - what ranks tell each other within a step: sums over the columns that
 * each has, and the logits of the tokens that each has.
 *
 * A row-parallel product of a rank is the sums of the fewest nodes of kernels/sum_tree's tree that
 * cover its leaves. All ranks write theirs to shared memory, meet, and each finishes the tree for
 * all rows, so that residual streams are equal everywhere, to the last bit, and equal to those of
 * one rank. Two areas take turns: whoever writes one has met the others after they read it.
 *
 * Threads: kern_exchange_multiply, _add and _logits on any of a team's threads, for different rows
 * or columns; the rest on its first. */

#include "kernels/comm.h"
#include "kernels/model/split.h"
#include "kernels/ops.h"

typedef struct kern_exchange kern_exchange;

typedef struct kern_exchange_options {
    uint32_t hidden, vocab; /* of the model */
    uint32_t rows_max, logits_rows_max;
    kern_split split;
} kern_exchange_options;

/* What it takes of the comm's memory. */
uint64_t kern_exchange_bytes(const kern_exchange_options *options);
/* comm is borrowed. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status kern_exchange_create(const kern_exchange_options *options, kern_comm *comm,
                                          kern_exchange **exchange_out);
void kern_exchange_destroy(kern_exchange *exchange); /* NULL is fine */

/* All ranks are here; what they wrote is seen. False: one is gone. */
bool kern_exchange_meet(kern_exchange *exchange);

/* Which product: they take turns. */
typedef enum kern_exchange_of {
    KERN_EXCHANGE_ATTENDED,
    KERN_EXCHANGE_DOWN,
    KERN_EXCHANGES,
} kern_exchange_of;

/* Rows first .. of acts; what a matrix is multiplied by is the sum of its terms. */
typedef struct kern_term {
    const kern_acts *acts; /* NULL: no such term */
    uint32_t first;
} kern_term;
#define KERN_TERMS 2

/* The sums of this rank's nodes, for matrix rows row_first .. row_first + count - 1 and as many
 * rows of each term. */
void kern_exchange_multiply(kern_exchange *exchange, const kern_ops *ops, kern_exchange_of which,
                            const kern_matrix *matrix, uint32_t row_first, uint32_t count,
                            const kern_term terms[KERN_TERMS], uint32_t rows);
/* After the ranks have met: x += the tree's sum of all ranks, term by term, for row `row` of the
 * products and one piece of its columns. */
void kern_exchange_add(const kern_exchange *exchange, kern_exchange_of which, uint32_t terms,
                       uint32_t row, uint32_t piece, float *x);
uint32_t kern_exchange_pieces(const kern_exchange *exchange);

/* [vocab] of the n-th row that has logits; rank r writes [r * split.vocab ..]. */
float *kern_exchange_logits(const kern_exchange *exchange, uint32_t n);

/* A word for all ranks, cleared by rank 0 at the beginning of a step. */
void kern_exchange_begin(kern_exchange *exchange);
void kern_exchange_say_broken(kern_exchange *exchange);
bool kern_exchange_is_broken(const kern_exchange *exchange);
