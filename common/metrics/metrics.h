#pragma once

/* common/metrics/metrics.h - counters, gauges and histograms, in Prometheus' text format.
 *
 * Series are made at start-up (or rarely) and kept; their number is bounded, so that no value from
 * outside can grow a page without limit. Times are in seconds. What is known only when a page is
 * asked for is written with the two writing functions. Loop thread only. */

#include "common/base/buf.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define PD_METRICS_SERIES_MAX 1024
#define PD_METRICS_LABELS_MAX 4

typedef struct pd_metrics pd_metrics;
typedef struct pd_metric pd_metric;

typedef enum pd_metric_kind {
    PD_METRIC_COUNTER,
    PD_METRIC_GAUGE,
    PD_METRIC_HISTOGRAM,        /* seconds: buckets from 1 ms to 600 s */
    PD_METRIC_HISTOGRAM_TOKENS, /* buckets from 1 to 1,000,000 */
} pd_metric_kind;

typedef struct pd_metric_label {
    const char *name;  /* [a-zA-Z_][a-zA-Z0-9_]* */
    const char *value; /* any bytes; escaped, and made valid UTF-8, when written */
} pd_metric_label;

PD_CHECKED pd_status pd_metrics_create(pd_metrics **metrics_out);
void pd_metrics_destroy(pd_metrics *metrics);

/* A series; the same name and labels give the same series. name and help are borrowed (literals);
 * labels are copied. Errors: PD_E_OVERLOAD (PD_METRICS_SERIES_MAX), PD_E_NOMEM. */
PD_CHECKED pd_status pd_metrics_series(pd_metrics *metrics, pd_metric_kind kind, const char *name,
                                       const char *help, const pd_metric_label *labels,
                                       size_t labels_count, pd_metric **metric_out);

void pd_metric_add(pd_metric *counter, double amount); /* amount >= 0 */
void pd_metric_set(pd_metric *gauge, double value);
void pd_metric_observe(pd_metric *histogram, double value); /* not finite: ignored */

/* Appends every series, families in the order of their making. */
void pd_metrics_write(const pd_metrics *metrics, pd_buf *page);

/* A family's head and its samples, for values made up when the page is written. */
void pd_metrics_write_head(pd_buf *page, pd_metric_kind kind, const char *name, const char *help);
void pd_metrics_write_sample(pd_buf *page, const char *name, const pd_metric_label *labels,
                             size_t labels_count, double value);
