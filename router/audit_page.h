#pragma once

/* router/audit_page.h - GET /audit, and the metrics of what went wrong and was made good: retries,
 * refetches, moves, pulls, audit differences. Writes text from what the core tells; keeps nothing.
 * Loop thread only. */

#include "common/base/buf.h"
#include "router/core.h"

/* {"workers":[{name, role, incarnation, reported: true, age_ms, ledger, holds: {state: count},
 * expected: {prefill, decode}, unknown: [...], missing: [...], waits_for: [{incarnation, name,
 * state: "lives" | "gone" | "unknown"}]}, {name, role, incarnation, reported: false, note}],
 * "not_reported": count, "agree": true | false | null}
 *
 * A worker that has not answered this router yet says nothing, and neither does a page of such:
 * agree is false as soon as one differs, null while somebody is to report or there is nobody. */
void audit_page(const router_core *core, uint64_t now_ns, pd_buf *out);
void audit_page_metrics(const router_core_counters *counters, pd_buf *out);
