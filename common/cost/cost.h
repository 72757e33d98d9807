#pragma once

/* common/cost/cost.h - how many milliseconds a prefill, a decode step and a transfer take.
 *
 * Linear models with measured coefficients, refitted from what the workers report:
 *   prefill(new, context) = base + new * per_token + new * (context + new / 2) * per_token_context
 *   decode step(batch, context) = base + batch * per_sequence + context_total * per_context_token
 *   shipping(bytes) = base + bytes * per_byte
 * Pure: no clock, no I/O. */

#include <stdint.h>

typedef struct pd_cost {
    double prefill_base_ms, prefill_token_ms, prefill_token_context_ms;
    double decode_base_ms, decode_sequence_ms, decode_context_ms;
    double ship_base_ms, ship_byte_ms;
    uint64_t prefill_seen, decode_seen, ship_seen; /* measurements taken in */
} pd_cost;

/* Starting values for a CPU worker; replaced by what is measured. */
void pd_cost_init(pd_cost *cost);

double pd_cost_prefill_ms(const pd_cost *cost, uint32_t new_tokens, uint32_t cached_tokens);
double pd_cost_decode_step_ms(const pd_cost *cost, uint32_t batch, uint64_t context_tokens);
double pd_cost_ship_ms(const pd_cost *cost, uint64_t bytes);
/* How many layer groups make one shipment, 1 .. groups, for bytes in all that a step of compute_ms
 * fills group by group: the number with which the last of them lands first, ship_base_ms added for
 * each shipment, since it is spent by somebody even where it is hidden behind computing. So a short
 * prompt leaves as a whole. Of equally good numbers the largest; but never so large that there are
 * fewer shipments than cost a hundredth of the computing together: the link may be slower than it
 * was thought to be. */
uint32_t pd_cost_ship_groups(const pd_cost *cost, uint32_t groups, double compute_ms,
                             uint64_t bytes);
/* The shortest uncached prompt, up to tokens_max, whose groups leave while later ones are computed:
 * below it a prompt leaves as a whole. 0: none does. */
uint32_t pd_cost_overlap_tokens(const pd_cost *cost, uint32_t groups, uint64_t token_bytes,
                                uint32_t tokens_max);

/* A measured time; bad values (negative, not finite) are ignored. Each observation scales the
 * model's coefficients a little towards it (exponentially weighted ratio of measured to predicted);
 * of shipping's, the fixed cost by what is small and the rate by what is not. */
void pd_cost_observe_prefill(pd_cost *cost, uint32_t new_tokens, uint32_t cached_tokens, double ms);
void pd_cost_observe_decode(pd_cost *cost, uint32_t batch, uint64_t context_tokens, double ms);
void pd_cost_observe_ship(pd_cost *cost, uint64_t bytes, double ms);
