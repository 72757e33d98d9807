#pragma once

/* router/pages.h - what the router says about itself: /ready, /workers, /metrics, /v1/models.
 * Writes text from what the core tells; keeps nothing. Loop thread only. */

#include "common/base/buf.h"
#include "common/metrics/metrics.h"
#include "common/wire/bus.h"
#include "router/core.h"

/* True when a request can be served now; the JSON says what is missing. */
bool pages_ready(const router_core *core, bool stopping, pd_buf *out);
void pages_workers(const router_core *core, uint64_t now_ns, pd_buf *out);
/* Gauges and counters that are read when the page is asked for. */
void pages_metrics(const router_core *core, const char *model, uint32_t connections,
                   uint64_t now_ns, pd_buf *out);
/* The control plane's, on the same page. */
void pages_bus(const pd_bus_counters *counters, pd_buf *out);
void pages_models(const char *model, const char *const *aliases, uint32_t aliases_count,
                  uint32_t context_max, int64_t created, pd_buf *out);
void pages_model(const char *name, uint32_t context_max, int64_t created, pd_buf *out);
