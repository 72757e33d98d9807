#pragma once

/* deploy/report.h - `kvferry status`: what was started, what lives, what the router says. One
 * thread. */

#include "common/config/deployment.h"

/* Writes the cluster's state to stdout, as a table or as JSON. *running_out tells whether its
 * supervisor lives. Errors are told on stderr: PD_E_IO, PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status report_status(const pd_deployment *deployment, bool json, bool *running_out);
