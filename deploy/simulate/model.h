#pragma once

/* deploy/simulate/model.h - a pretended model whose right answers are known without running it.
 *
 * A token's "KV" is one number a layer group, made from the token, its position and the KV of the
 * position before as it lies in the pool; an answer's token is made from the KV of all positions
 * before it. So one wrong, stale, misplaced or missing block anywhere in a sequence gives another
 * token, and that is seen where the answer arrives. One thread. */

#include "common/base/status.h"
#include "common/kv/layout.h"
#include "common/worker/step.h"

#include <stdint.h>

#define SIM_VOCAB     1000u
#define SIM_END_TOKEN 0u /* about one token in 40 */

/* A worker's pool: [groups][blocks][block_tokens]. */
typedef struct sim_kv {
    uint32_t groups, blocks, block_tokens;
    uint64_t *values;
} sim_kv;

/* Filled with noise, as memory is. PD_E_NOMEM. */
PD_CHECKED pd_status sim_kv_init(sim_kv *kv, const pd_kv_layout *layout, uint64_t noise);
void sim_kv_fini(sim_kv *kv);
/* The block_tokens numbers of a block in a group. */
uint64_t *sim_kv_block(const sim_kv *kv, uint32_t group, pd_block block);

/* Writes a slice's KV of one group; group 0 comes first. */
void sim_model_write(const sim_kv *kv, uint32_t group, const pd_step_slice *slice);
/* The token after the slice, when all groups are written. */
uint32_t sim_model_token(const sim_kv *kv, const pd_step_slice *slice);
/* A seal over what it covers in the real one. */
uint64_t sim_model_seal(const sim_kv *kv, const pd_request_key *key, uint32_t group, uint32_t index,
                        pd_block block, uint32_t valid_tokens);

/* The right answer to a prompt: at most count tokens, the end token the last if there is one (and
 * not ignored). Returns how many. */
uint32_t sim_model_answer(uint32_t groups, const uint32_t *prompt, uint32_t prompt_count,
                          const pd_sampling *sampling, bool ignore_end, uint32_t count,
                          uint32_t *tokens_out);
