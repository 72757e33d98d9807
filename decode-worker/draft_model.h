#pragma once

/* decode-worker/draft_model.h - guesses by a smaller model with the same vocabulary.
 *
 * It has KV of its own, in blocks of its own: made here from the sequence's tokens, wherever the
 * sequence was before, so that nothing of it is shipped, and nothing is lost when a sequence moves
 * or is resumed. What it has not seen yet it reads in pieces of at most draft_rows tokens, all
 * sequences together, beside the steps of the model; until then a sequence is not drafted for. Nor
 * is one for which there is no block: blocks are nobody's promise, and come back at a sequence's
 * end.
 *
 * Before a step it guesses for all sequences at once, a token a round, each drawn as the model
 * draws (the same temperature, seed and place): so the two agree most often. What it costs is not
 * rows but rounds: all sequences get the same number, the one that makes the most of a millisecond.
 * Pure. One thread. */

#include "common/cost/row_cost.h"
#include "decode-worker/sequence.h"

typedef struct decode_draft_model decode_draft_model;

/* Errors: PD_E_INVALID (no block, no row; logged), PD_E_NOMEM. */
PD_CHECKED pd_status decode_draft_model_create(const pd_role_options *role,
                                               decode_draft_model **model_out);
void decode_draft_model_destroy(decode_draft_model *model); /* NULL is fine */

size_t decode_draft_model_bytes(const decode_draft_model *model, uint32_t tokens_max);
void decode_draft_model_begin(decode_draft_model *model, decode_sequence *sequence);
void decode_draft_model_end(decode_draft_model *model, decode_sequence *sequence);

/* A sequence of the step that is being prepared, and how many drafts it may have. */
typedef struct decode_draft_wish {
    decode_sequence *sequence;
    uint32_t most;
} decode_draft_wish;

/* What a round takes, where known; 0 where not. */
double decode_draft_model_round_ms(const decode_draft_model *model, uint32_t sequences);
/* Begins a step's guesses. False: there is nothing to run, no sequence has drafts. */
bool decode_draft_model_plan(decode_draft_model *model, const decode_draft_wish *wishes,
                             uint32_t count, pd_step **step_out);
/* A step of it is over. True: *step_out is the next. Else sequences have drafting.made drafts,
 * behind their tokens. */
bool decode_draft_model_on_step(decode_draft_model *model, const pd_step *step, pd_step **step_out);
/* Of a sequence's drafts so many were right. */
void decode_draft_model_took(decode_sequence *sequence, const pd_step_slice *slice, uint32_t right);
