#include "common/cost/row_cost.h"

#include "common/base/status.h"

#include <math.h>
#include <stdbool.h>

enum { EACH = 16, FORGOTTEN_AFTER = 2048 };

/* Of a new measurement; and a single one changes what is known by this factor at most: another
 * process may have had the core. */
static const double WEIGHT = 0.15, CHANGE_MOST = 2;
/* Of a step's time, for one more row where nothing is known: low, so that it is tried. */
static const double ROW_SHARE_UNKNOWN = 1.0 / 32;

static uint32_t range_of(uint32_t rows)
{
    if (rows <= EACH)
        return rows - 1;
    uint32_t above = rows - 1, octave = 31 - (uint32_t)__builtin_clz(above);
    uint32_t range = EACH + 2 * (octave - 4) + (above >> (octave - 1) & 1);

    return range < PD_ROW_COST_RANGES ? range : PD_ROW_COST_RANGES - 1;
}

/* The most rows of a range. */
static double rows_of(uint32_t range)
{
    if (range < EACH)
        return range + 1;
    double octave = ldexp(EACH, (int)(range - EACH) / 2);

    return (range - EACH) % 2 == 0 ? octave * 1.5 : octave * 2;
}

static bool is_known(const pd_row_cost *cost, uint32_t range)
{
    return cost->ranges[range].step != 0 &&
           cost->steps - cost->ranges[range].step < FORGOTTEN_AFTER;
}

void pd_row_cost_observe(pd_row_cost *cost, uint32_t rows, double ms)
{
    pd_assert(rows > 0);
    if (!isfinite(ms) || ms <= 0)
        return;
    uint32_t range = range_of(rows);
    double was = cost->ranges[range].ms;
    bool known = is_known(cost, range);

    cost->steps++;
    cost->ranges[range].step = cost->steps;
    if (known)
        ms = was + WEIGHT * (fmin(fmax(ms, was / CHANGE_MOST), was * CHANGE_MOST) - was);
    cost->ranges[range].ms = ms;
}

double pd_row_cost_ms(const pd_row_cost *cost, uint32_t rows)
{
    pd_assert(rows > 0);
    uint32_t at = range_of(rows), below = at, above = at;

    while (below > 0 && !is_known(cost, below))
        below--;
    while (above + 1 < PD_ROW_COST_RANGES && !is_known(cost, above))
        above++;
    bool has_below = is_known(cost, below), has_above = is_known(cost, above);
    if (has_below && below == at)
        return cost->ranges[at].ms;
    if (has_below && has_above) {
        double part = (rows - rows_of(below)) / (rows_of(above) - rows_of(below));
        return cost->ranges[below].ms +
               fmax(part, 0) * (cost->ranges[above].ms - cost->ranges[below].ms);
    }
    if (has_below)
        return cost->ranges[below].ms * (1 + fmax(rows - rows_of(below), 0) * ROW_SHARE_UNKNOWN);
    return has_above ? cost->ranges[above].ms : 0;
}

uint64_t pd_row_cost_age(const pd_row_cost *cost, uint32_t rows)
{
    uint32_t range = range_of(rows);

    return is_known(cost, range) ? cost->steps - cost->ranges[range].step : UINT64_MAX;
}
