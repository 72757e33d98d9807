#pragma once

/* deploy/report_kv.h - `kvferry status --kv`: who holds which KV blocks, and whether it adds up.
 *
 * Workers' ledgers come from GET /workers, the router's view against theirs from GET /audit. What
 * differs is looked at once more after a few seconds, since messages are under way: only what is
 * still so counts as out of balance. One thread; blocks for up to 10 seconds. */

#include "deploy/report.h"

/* Writes the table, or JSON, to stdout. The verdict is of what was read alone: REPORT_WELL, every
 * ledger adds up and the audit finds nothing; REPORT_BAD, the cluster does not run, or something is
 * out of balance; REPORT_UNKNOWN, nothing of the kind, but the router does not answer, or has no
 * worker. Errors are told on stderr: PD_E_IO, PD_E_INVALID, PD_E_NOMEM. */
PD_CHECKED pd_status report_kv(const pd_deployment *deployment, bool json,
                               report_verdict *verdict_out);
