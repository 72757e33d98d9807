#pragma once

/* decode-worker/speculate.h - speculative decoding: which drafts a step takes along, and what came
 * of them. docs/decisions/speculation.md has the reasons.
 *
 * A draft is accepted exactly while it is what the model itself draws at that place, with that
 * place's random number. So an answer is the same, token for token, with and without; what changes
 * is how many steps it takes. Drafts use rows that the step has to spare and KV room that is bound
 * to their sequence already; nobody is promised less for their sake.
 *
 * How many (Leviathan et al. 2023, arXiv 2211.17192, section 3, for a batch): of a sequence whose
 * drafts are right with probability a, the n-th brings a^n tokens. Those that bring most are taken
 * first, as long as tokens a millisecond grow, by what so many rows were measured to cost here
 * (common/cost/row_cost): at a large batch that is none. Lookahead, whose window pays later, is
 * judged by what it has brought, and tried again from time to time. Pure. One thread. */

#include "common/cost/row_cost.h"
#include "decode-worker/draft_model.h"
#include "decode-worker/guess.h"
#include "decode-worker/sequence.h"

/* A sequence of the step that may take drafts. */
typedef struct decode_wish {
    uint32_t slice; /* of the step */
    float accept;   /* estimate of a */
    uint32_t most;  /* drafts that there are, or may be */
    uint32_t take;
} decode_wish;

typedef struct decode_spec {
    const pd_role_options *role;
    pd_speculation how;
    const decode_guess_ops *guess; /* NULL: no method that guesses from tokens */
    decode_draft_model *model;     /* NULL: there is none */
    pd_row_cost rows;
    uint32_t rows_max;
    uint32_t *out;            /* [max_batch][draft_tokens] pd_step_slice.drafts_out */
    decode_wish *wishes;      /* [max_batch] */
    decode_draft_wish *asked; /* [max_batch] of the draft model */
    uint32_t *picked;     /* [rows_max] wishes, in the order in which a draft of theirs was taken */
    float right, tries;   /* of all sequences, the latest count most */
    double tokens_a_step; /* that a sequence gets, lately */
    /* lookahead, on trial */
    double yield;    /* tokens that a sequence gets in a step with drafts */
    uint32_t judged; /* such steps */
    uint32_t rest;   /* steps without, until it is tried again */
} decode_spec;

/* how.method may be PD_SPEC_OFF. sampled_rows_max of the engine is at least rows_max, or max_batch
 * times a token and its drafts. Errors: PD_E_INVALID (a limit, logged), PD_E_NOMEM. */
PD_CHECKED pd_status decode_spec_init(decode_spec *spec, const pd_role_options *role,
                                      uint32_t rows_max);
void decode_spec_fini(decode_spec *spec);
/* Of a sequence's answer memory. */
size_t decode_spec_bytes(const decode_spec *spec, uint32_t tokens_max);
/* Its tokens are there. */
void decode_spec_begin(decode_spec *spec, decode_sequence *sequence);
/* It leaves: what is the draft model's comes back. */
void decode_spec_end(decode_spec *spec, decode_sequence *sequence);

/* Adds drafts to the slices of a planned step. True: the draft model has to guess first, by
 * *draft_out; then decode_spec_on_draft, until it is false. */
bool decode_spec_plan(decode_spec *spec, pd_step_slice *slices, uint32_t count,
                      pd_step **draft_out);
/* A step of the draft model is over; true: *draft_out is another. */
bool decode_spec_on_draft(decode_spec *spec, pd_step *step, pd_step_slice *slices, uint32_t count,
                          pd_step **draft_out);
/* A whole step took so long. */
void decode_spec_observe(decode_spec *spec, const pd_step *step);
/* Of one slice of it that drew a token; before decode_batch_take, which writes over the drafts. */
void decode_spec_took(decode_spec *spec, decode_sequence *sequence, const pd_step_slice *slice,
                      pd_role_counters *counters);
