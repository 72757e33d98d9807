/* The metrics page: escaping, bounds, histograms. */

#include "common/base/mem.h"
#include "common/metrics/metrics.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void labels_cannot_break_the_page(void **state)
{
    (void)state;
    pd_metrics *metrics;
    pd_metric *metric;
    pd_buf page;
    const pd_metric_label label = {"model", "a\"} 1\nforged_total{x=\"y\\ \x01 \xff \xc3\xa9"};
    assert_int_equal(pd_metrics_create(&metrics), PD_OK);
    assert_int_equal(
        pd_metrics_series(metrics, PD_METRIC_COUNTER, "t_total", "T.", &label, 1, &metric), PD_OK);
    pd_metric_add(metric, 2);
    pd_buf_init(&page, 1 << 16);
    pd_metrics_write(metrics, &page);
    assert_string_equal(pd_buf_text(&page),
                        "# HELP t_total T.\n# TYPE t_total counter\n"
                        "t_total{model=\"a\\\"} 1\\nforged_total{x=\\\"y\\\\ ? \xef\xbf\xbd "
                        "\xc3\xa9\"} 2\n");
    pd_buf_fini(&page);
    pd_metrics_destroy(metrics);
}

static void series_are_found_again_and_bounded(void **state)
{
    (void)state;
    pd_metrics *metrics;
    pd_metric *first, *again, *other;
    assert_int_equal(pd_metrics_create(&metrics), PD_OK);
    for (int i = 0; i < PD_METRICS_SERIES_MAX; i++) {
        char text[16];
        snprintf(text, sizeof text, "%d", i);
        const pd_metric_label label = {"i", text};
        assert_int_equal(pd_metrics_series(metrics, PD_METRIC_GAUGE, "g", "G.", &label, 1, &other),
                         PD_OK);
        if (i == 0)
            first = other;
    }
    const pd_metric_label zero = {"i", "0"}, more = {"i", "more"};
    assert_int_equal(pd_metrics_series(metrics, PD_METRIC_GAUGE, "g", "G.", &zero, 1, &again),
                     PD_OK);
    assert_ptr_equal(first, again);
    assert_int_equal(pd_metrics_series(metrics, PD_METRIC_GAUGE, "g", "G.", &more, 1, &again),
                     PD_E_OVERLOAD);
    pd_metrics_destroy(metrics);
}

static void histograms_are_cumulative_and_families_stand_together(void **state)
{
    (void)state;
    pd_metrics *metrics;
    pd_metric *h, *c;
    pd_buf page;
    const pd_metric_label label = {"m", "x"};
    assert_int_equal(pd_metrics_create(&metrics), PD_OK);
    assert_int_equal(
        pd_metrics_series(metrics, PD_METRIC_HISTOGRAM, "h_seconds", "H.", &label, 1, &h), PD_OK);
    assert_int_equal(pd_metrics_series(metrics, PD_METRIC_COUNTER, "c_total", "C.", NULL, 0, &c),
                     PD_OK);
    pd_metric_observe(h, 0.0005);
    pd_metric_observe(h, 0.001); /* a bound belongs to its bucket */
    pd_metric_observe(h, 3);
    pd_metric_observe(h, 1e6);
    pd_metric_observe(h, NAN);
    pd_buf_init(&page, 1 << 16);
    pd_metrics_write(metrics, &page);
    const char *text = pd_buf_text(&page);
    assert_non_null(strstr(text, "h_seconds_bucket{m=\"x\",le=\"0.001\"} 2\n"));
    assert_non_null(strstr(text, "h_seconds_bucket{m=\"x\",le=\"2\"} 2\n"));
    assert_non_null(strstr(text, "h_seconds_bucket{m=\"x\",le=\"5\"} 3\n"));
    assert_non_null(strstr(text, "h_seconds_bucket{m=\"x\",le=\"600\"} 3\n"));
    assert_non_null(strstr(text, "h_seconds_bucket{m=\"x\",le=\"+Inf\"} 4\n"));
    assert_non_null(strstr(text, "h_seconds_count{m=\"x\"} 4\n"));
    assert_non_null(strstr(text, "# TYPE c_total counter\nc_total 0\n"));
    pd_buf_fini(&page);
    pd_metrics_destroy(metrics);
}

static void token_counts_have_buckets_of_their_own(void **state)
{
    (void)state;
    pd_metrics *metrics;
    pd_metric *h;
    pd_buf page;
    assert_int_equal(pd_metrics_create(&metrics), PD_OK);
    assert_int_equal(
        pd_metrics_series(metrics, PD_METRIC_HISTOGRAM_TOKENS, "h_tokens", "H.", NULL, 0, &h),
        PD_OK);
    pd_metric_observe(h, 1);
    pd_metric_observe(h, 600);
    pd_metric_observe(h, 2000000);
    pd_buf_init(&page, 1 << 16);
    pd_metrics_write(metrics, &page);
    const char *text = pd_buf_text(&page);
    assert_non_null(strstr(text, "# TYPE h_tokens histogram\n"));
    assert_non_null(strstr(text, "h_tokens_bucket{le=\"1\"} 1\n"));
    assert_non_null(strstr(text, "h_tokens_bucket{le=\"500\"} 1\n"));
    assert_non_null(strstr(text, "h_tokens_bucket{le=\"1000\"} 2\n"));
    assert_non_null(strstr(text, "h_tokens_bucket{le=\"+Inf\"} 3\n"));
    pd_buf_fini(&page);
    pd_metrics_destroy(metrics);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(labels_cannot_break_the_page),
        cmocka_unit_test(series_are_found_again_and_bounded),
        cmocka_unit_test(token_counts_have_buckets_of_their_own),
        cmocka_unit_test(histograms_are_cumulative_and_families_stand_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
