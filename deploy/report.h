#pragma once

/* deploy/report.h - `kvferry status`: what was started, what lives, what the router says. One
 * thread. */

#include "common/config/deployment.h"

/* What a report found: the command's exit status. */
typedef enum report_verdict {
    REPORT_WELL = 0,
    REPORT_BAD = 1,     /* it does not run; with --kv, or something is out of balance */
    REPORT_UNKNOWN = 3, /* it runs, and its router does not say how it is */
} report_verdict;

/* Writes the cluster's state to stdout, as a table or as JSON. Errors are told on stderr: PD_E_IO,
 * PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status report_status(const pd_deployment *deployment, bool json,
                                   report_verdict *verdict_out);
