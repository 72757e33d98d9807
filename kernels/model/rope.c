#include "kernels/model/rope.h"

#include <math.h>

/* pi/2 in two doubles; positions times an angle of at most 1 stay far below 2^40. */
#define HALF_PI_HIGH 0x1.921fb54442d18p+0
#define HALF_PI_LOW  0x1.1a62633145c07p-54
#define LN2_HIGH     0x1.62e42fefa39efp-1
#define SQRT_2       0x1.6a09e667f3bcdp+0

/* value > 0, no subnormal: ln = exponent * ln 2 + 2 atanh((m - 1) / (m + 1)), m in [0.71, 1.41] */
static double natural_log(double value)
{
    int exponent = 0;

    for (; value > SQRT_2; value *= 0.5)
        exponent++;
    for (; value < SQRT_2 / 2; value *= 2)
        exponent--;
    double z = (value - 1) / (value + 1), square = z * z, series = 0;
    for (int k = 29; k >= 1; k -= 2)
        series = fma(series, square, 1.0 / k);
    return fma(exponent, LN2_HIGH, 2 * z * series);
}

static double exponential(double value)
{
    int64_t n = (int64_t)(value / LN2_HIGH);
    double r = fma(-(double)n, LN2_HIGH, value), series = 1;

    for (int k = 22; k >= 1; k--)
        series = fma(series, r / k, 1.0);
    for (; n > 0; n--)
        series *= 2;
    for (; n < 0; n++)
        series *= 0.5;
    return series;
}

static void sine_cosine(double angle, double *sine_out, double *cosine_out)
{
    int64_t quarter = (int64_t)(angle / HALF_PI_HIGH + 0.5);
    double r = fma(-(double)quarter, HALF_PI_HIGH, angle);
    r = fma(-(double)quarter, HALF_PI_LOW, r);
    double square = r * r, sine = 1, cosine = 1;

    for (int k = 20; k >= 2; k -= 2) {
        cosine = fma(cosine, -square / (k * (k - 1)), 1.0);
        sine = fma(sine, -square / (k * (k + 1)), 1.0);
    }
    sine *= r;
    switch (quarter & 3) {
    case 0: *sine_out = sine, *cosine_out = cosine; break;
    case 1: *sine_out = cosine, *cosine_out = -sine; break;
    case 2: *sine_out = -sine, *cosine_out = -cosine; break;
    default: *sine_out = -cosine, *cosine_out = sine; break;
    }
}

void kern_rope_frequencies(double base, uint32_t dims, double *frequencies_out)
{
    double log_base = natural_log(base);

    for (uint32_t i = 0; i < dims / 2; i++)
        frequencies_out[i] = exponential(-2.0 * i / dims * log_base);
}

void kern_rope_rows(const double *frequencies, uint32_t dims, uint32_t first, uint32_t positions,
                    float *rows_out)
{
    for (uint32_t n = 0; n < positions; n++) {
        for (uint32_t i = 0; i < dims / 2; i++) {
            double sine, cosine;
            float *entry = rows_out + ((uint64_t)n * (dims / 2) + i) * 2;
            sine_cosine((first + n) * frequencies[i], &sine, &cosine);
            entry[0] = (float)cosine;
            entry[1] = (float)sine;
        }
    }
}
