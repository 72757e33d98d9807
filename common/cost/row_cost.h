#pragma once

/* common/cost/row_cost.h - what so many rows of a decode step cost, as measured here.
 *
 * A straight line will not do where one more row is asked for: a step of few rows is bound by the
 * reading of weights, and its kernels change with the number of rows. So the latest steps' times
 * are kept by rows: each number up to 16, two ranges an octave above. What was not seen for long
 * is forgotten, and what is not known is taken to be cheap, so that it is tried and then known.
 * Pure: no clock, no I/O. */

#include <stdint.h>

enum { PD_ROW_COST_RANGES = 40 };

typedef struct pd_row_cost {
    struct {
        double ms;
        uint64_t step; /* of the latest measurement; 0: none */
    } ranges[PD_ROW_COST_RANGES];
    uint64_t steps; /* measurements taken in */
} pd_row_cost;

/* A step of so many rows (at least 1); bad times (not finite, not positive) are ignored. */
void pd_row_cost_observe(pd_row_cost *cost, uint32_t rows, double ms);
/* Milliseconds of a step of so many rows; 0: nothing is known at all. */
double pd_row_cost_ms(const pd_row_cost *cost, uint32_t rows);
/* Measurements since that of so many rows; UINT64_MAX: it is not known. */
uint64_t pd_row_cost_age(const pd_row_cost *cost, uint32_t rows);
