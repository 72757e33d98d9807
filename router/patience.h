#pragma once

/* router/patience.h - how long a phase of a request may take.
 *
 * From what the cost model predicts for this very request, so that a short prompt fails fast and
 * one of 128K tokens is waited for:
 *
 *   what is configured, or floor + 8 * predicted where that is less; at least 4 * predicted
 *
 * 8 and the floors: the model is fitted to what it has seen, and is wrong by a factor of a few for
 * what it has not (a machine just started, a step shared with others). What is configured is what
 * an operator's patience ends at, unless the work itself cannot be done in that time. Pure. */

#include "router/core.h"

/* A prompt in a worker's queue (queue_ms before it), until its first token. */
uint64_t router_patience_prefill_ns(const router_core_config *config, double queue_ms,
                                    double prefill_ms);
/* So many bytes over a link, for a request of which failures attempts have failed: each doubles it
 * (32 times at most), since a link that became slow teaches no rate by what never landed. */
uint64_t router_patience_landing_ns(const router_core_config *config, const pd_cost *cost,
                                    uint64_t bytes, uint32_t failures);
/* The router's own patience with a worker that has so much: it shall speak first. */
uint64_t router_patience_behind_ns(const router_core_config *config, uint64_t patience_ns);
/* For a message's field: at least 1. */
uint32_t router_patience_ms(uint64_t ns);
