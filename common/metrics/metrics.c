#include "common/metrics/metrics.h"
#include "common/base/mem.h"
#include "common/base/utf8.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double BOUNDS[] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1,
                                2,     5,     10,    20,   50,   100,  200, 400, 600};
enum { BOUNDS_COUNT = sizeof BOUNDS / sizeof BOUNDS[0] };
static const double TOKENS[] = {1,     2,      5,      10,     20,     50,    100,
                                200,   500,    1000,   2000,   5000,   10000, 20000,
                                50000, 100000, 200000, 500000, 1000000};
_Static_assert(sizeof TOKENS == sizeof BOUNDS, "both kinds of histogram have as many buckets");

static bool is_histogram(pd_metric_kind kind)
{
    return kind == PD_METRIC_HISTOGRAM || kind == PD_METRIC_HISTOGRAM_TOKENS;
}

static const double *bounds_of(pd_metric_kind kind)
{
    return kind == PD_METRIC_HISTOGRAM_TOKENS ? TOKENS : BOUNDS;
}

struct pd_metric {
    pd_metric *next;
    pd_metric_kind kind;
    const char *name, *help;
    char *labels; /* as written between the braces; "" when there are none */
    double value; /* of a histogram: the sum */
    uint64_t count;
    uint64_t buckets[BOUNDS_COUNT]; /* not cumulative; what is over the last is in count alone */
};

struct pd_metrics {
    pd_metric *first, *last;
    size_t count;
};

pd_status pd_metrics_create(pd_metrics **metrics_out)
{
    pd_metrics *metrics = pd_calloc(1, sizeof *metrics);
    if (metrics == NULL)
        return PD_E_NOMEM;
    *metrics_out = metrics;
    return PD_OK;
}

void pd_metrics_destroy(pd_metrics *metrics)
{
    if (metrics == NULL)
        return;
    while (metrics->first != NULL) {
        pd_metric *next = metrics->first->next;
        pd_free(metrics->first->labels);
        pd_free(metrics->first);
        metrics->first = next;
    }
    pd_free(metrics);
}

/* Backslash, quote and line feed are what the format escapes; bytes that are no UTF-8, and other
 * control characters, would make a scraper refuse the whole page. */
static void write_value(pd_buf *page, const char *text)
{
    size_t len = strlen(text);
    for (size_t i = 0; i < len;) {
        size_t bytes = pd_utf8_len(text + i, len - i);
        if (bytes == 0) {
            pd_buf_puts(page, PD_UTF8_REPLACEMENT);
            i += pd_utf8_bad_len(text + i, len - i);
            continue;
        }
        unsigned char c = (unsigned char)text[i];
        if (c == '\\' || c == '"')
            pd_buf_printf(page, "\\%c", c);
        else if (c == '\n')
            pd_buf_puts(page, "\\n");
        else if (c < 0x20 || c == 0x7f)
            pd_buf_puts(page, "?");
        else
            pd_buf_append(page, text + i, bytes);
        i += bytes;
    }
}

static void write_labels(pd_buf *page, const pd_metric_label *labels, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        pd_buf_printf(page, "%s%s=\"", i > 0 ? "," : "", labels[i].name);
        write_value(page, labels[i].value);
        pd_buf_puts(page, "\"");
    }
}

pd_status pd_metrics_series(pd_metrics *metrics, pd_metric_kind kind, const char *name,
                            const char *help, const pd_metric_label *labels, size_t labels_count,
                            pd_metric **metric_out)
{
    pd_buf text;
    pd_assert(labels_count <= PD_METRICS_LABELS_MAX);
    pd_buf_init(&text, 4096);
    write_labels(&text, labels, labels_count);
    pd_status status = pd_buf_status(&text);
    pd_metric *metric = NULL;
    if (status != PD_OK)
        goto out;
    for (pd_metric *other = metrics->first; other != NULL; other = other->next) {
        if (strcmp(other->name, name) == 0 && strcmp(other->labels, pd_buf_text(&text)) == 0) {
            pd_assert(other->kind == kind);
            *metric_out = other;
            goto out;
        }
    }
    status = PD_E_OVERLOAD;
    if (metrics->count == PD_METRICS_SERIES_MAX)
        goto out;
    status = PD_E_NOMEM;
    metric = pd_calloc(1, sizeof *metric);
    if (metric == NULL)
        goto out;
    *metric = (pd_metric){.kind = kind, .name = name, .help = help};
    metric->labels = pd_strdup(pd_buf_text(&text));
    if (metric->labels == NULL) {
        pd_free(metric);
        goto out;
    }
    if (metrics->last == NULL)
        metrics->first = metric;
    else
        metrics->last->next = metric;
    metrics->last = metric;
    metrics->count++;
    *metric_out = metric;
    status = PD_OK;
out:
    pd_buf_fini(&text);
    return status;
}

void pd_metric_add(pd_metric *counter, double amount)
{
    pd_assert(counter->kind == PD_METRIC_COUNTER && amount >= 0);
    counter->value += amount;
}

void pd_metric_set(pd_metric *gauge, double value)
{
    pd_assert(gauge->kind == PD_METRIC_GAUGE);
    gauge->value = value;
}

void pd_metric_observe(pd_metric *histogram, double value)
{
    const double *bounds = bounds_of(histogram->kind);
    pd_assert(is_histogram(histogram->kind));
    if (!isfinite(value))
        return;
    histogram->value += value;
    histogram->count++;
    for (size_t i = 0; i < BOUNDS_COUNT; i++) {
        if (value <= bounds[i]) {
            histogram->buckets[i]++;
            return;
        }
    }
}

static void write_number(pd_buf *page, double value)
{
    if (isnan(value))
        pd_buf_puts(page, "NaN\n");
    else if (isinf(value))
        pd_buf_puts(page, value > 0 ? "+Inf\n" : "-Inf\n");
    else if (value == floor(value) && fabs(value) < 1e15)
        pd_buf_printf(page, "%.0f\n", value);
    else
        pd_buf_printf(page, "%.9g\n", value);
}

static void write_line(pd_buf *page, const char *name, const char *suffix, const char *labels,
                       const char *le, double value)
{
    pd_buf_printf(page, "%s%s", name, suffix);
    if (labels[0] != '\0' || le != NULL) {
        pd_buf_printf(page, "{%s", labels);
        if (le != NULL)
            pd_buf_printf(page, "%sle=\"%s\"", labels[0] != '\0' ? "," : "", le);
        pd_buf_puts(page, "}");
    }
    pd_buf_puts(page, " ");
    write_number(page, value);
}

static void write_histogram(pd_buf *page, const pd_metric *metric)
{
    uint64_t cumulative = 0;
    for (size_t i = 0; i < BOUNDS_COUNT; i++) {
        char le[32];
        snprintf(le, sizeof le, "%g", bounds_of(metric->kind)[i]);
        cumulative += metric->buckets[i];
        write_line(page, metric->name, "_bucket", metric->labels, le, (double)cumulative);
    }
    write_line(page, metric->name, "_bucket", metric->labels, "+Inf", (double)metric->count);
    write_line(page, metric->name, "_sum", metric->labels, NULL, metric->value);
    write_line(page, metric->name, "_count", metric->labels, NULL, (double)metric->count);
}

void pd_metrics_write_head(pd_buf *page, pd_metric_kind kind, const char *name, const char *help)
{
    static const char *const KINDS[] = {"counter", "gauge", "histogram", "histogram"};
    pd_buf_printf(page, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, KINDS[kind]);
}

void pd_metrics_write_sample(pd_buf *page, const char *name, const pd_metric_label *labels,
                             size_t labels_count, double value)
{
    pd_buf_puts(page, name);
    if (labels_count > 0) {
        pd_buf_puts(page, "{");
        write_labels(page, labels, labels_count);
        pd_buf_puts(page, "}");
    }
    pd_buf_puts(page, " ");
    write_number(page, value);
}

void pd_metrics_write(const pd_metrics *metrics, pd_buf *page)
{
    for (const pd_metric *head = metrics->first; head != NULL; head = head->next) {
        bool written = false; /* a family stands together, where its first series was made */
        for (const pd_metric *m = metrics->first; m != head && !written; m = m->next)
            written = strcmp(m->name, head->name) == 0;
        if (written)
            continue;
        pd_metrics_write_head(page, head->kind, head->name, head->help);
        for (const pd_metric *m = head; m != NULL; m = m->next) {
            if (strcmp(m->name, head->name) != 0)
                continue;
            if (is_histogram(m->kind))
                write_histogram(page, m);
            else
                write_line(page, m->name, "", m->labels, NULL, m->value);
        }
    }
}
