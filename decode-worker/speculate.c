#include "decode-worker/speculate.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "decode-worker/lookahead.h"
#include "decode-worker/prompt_lookup.h"

#include <string.h>

/* What one draft more or less is forgotten to. */
static const float REMEMBER = 0.94f, REMEMBER_IDLE = 0.995f;
static const float PRIOR_WEIGHT = 2, PRIOR_LEAST = 0.3f, PRIOR_MOST = 0.9f;
/* Tokens a millisecond have to grow by this much: what is measured is noisy, and a draft that
 * brings nothing costs. */
static const double GAIN_LEAST = 1.03;

enum {
    BASE_AGE_MOST = 96, /* steps with drafts until one without is measured again */
    JUDGED_LEAST = 24,
    REST = 384,
};

/* ---- making ---- */

static const decode_guess_ops *guess_of(pd_spec_method method)
{
    return method == PD_SPEC_PROMPT_LOOKUP ? &decode_prompt_lookup
           : method == PD_SPEC_LOOKAHEAD   ? &decode_lookahead
                                           : NULL;
}

static bool is_sound(const pd_speculation *how)
{
    return how->method == PD_SPEC_OFF ||
           (how->method < PD_SPEC_METHODS && how->draft_tokens > 0 &&
            how->draft_tokens <= PD_SPEC_DRAFTS_MOST && how->ngram_min >= 2 &&
            how->ngram_min <= how->ngram_max && how->ngram_max <= PD_SPEC_NGRAM_MOST &&
            (how->method != PD_SPEC_LOOKAHEAD ||
             (how->window > 0 && how->window < how->draft_tokens)));
}

pd_status decode_spec_init(decode_spec *spec, const pd_role_options *role, uint32_t rows_max)
{
    const pd_speculation *how = &role->speculation;
    pd_status status = PD_OK;

    *spec = (decode_spec){.role = role,
                          .how = *how,
                          .guess = guess_of(how->method),
                          .rows_max = rows_max,
                          .tokens_a_step = 1};
    if (!is_sound(how)) {
        pd_log_error("msg=\"decode role: a limit of speculation\" draft_tokens=%u ngram_min=%u "
                     "ngram_max=%u window=%u",
                     how->draft_tokens, how->ngram_min, how->ngram_max, how->window);
        return PD_E_INVALID;
    }
    if (how->method == PD_SPEC_OFF)
        return PD_OK;
    spec->out = pd_calloc((size_t)role->max_batch * how->draft_tokens, sizeof *spec->out);
    spec->wishes = pd_calloc(role->max_batch, sizeof *spec->wishes);
    spec->asked = pd_calloc(role->max_batch, sizeof *spec->asked);
    spec->picked = pd_calloc(rows_max, sizeof *spec->picked);
    if (spec->out == NULL || spec->wishes == NULL || spec->asked == NULL || spec->picked == NULL)
        status = PD_E_NOMEM;
    if (status == PD_OK && how->method == PD_SPEC_DRAFT_MODEL)
        status = decode_draft_model_create(role, &spec->model);
    if (status != PD_OK)
        decode_spec_fini(spec);
    return status;
}

void decode_spec_fini(decode_spec *spec)
{
    decode_draft_model_destroy(spec->model);
    pd_free(spec->out);
    pd_free(spec->wishes);
    pd_free(spec->asked);
    pd_free(spec->picked);
    *spec = (decode_spec){0};
}

size_t decode_spec_bytes(const decode_spec *spec, uint32_t tokens_max)
{
    if (spec->guess != NULL)
        return spec->guess->bytes(&spec->how, tokens_max);
    return spec->model != NULL ? decode_draft_model_bytes(spec->model, tokens_max) : 0;
}

void decode_spec_begin(decode_spec *spec, decode_sequence *s)
{
    if (spec->guess != NULL)
        spec->guess->init(s->drafting.state, &spec->how, s->tokens_max);
    else if (spec->model != NULL)
        decode_draft_model_begin(spec->model, s);
}

void decode_spec_end(decode_spec *spec, decode_sequence *s)
{
    if (spec->model != NULL)
        decode_draft_model_end(spec->model, s);
}

/* ---- how many ---- */

static float share(float right, float tries, float prior)
{
    return (right + PRIOR_WEIGHT * prior) / (tries + PRIOR_WEIGHT);
}

static float accept_of(const decode_spec *spec, const decode_sequence *s)
{
    float all = share(spec->right, spec->tries, 0.6f);

    all = all < PRIOR_LEAST ? PRIOR_LEAST : all > PRIOR_MOST ? PRIOR_MOST : all;
    return share(s->drafting.right, s->drafting.tries, all);
}

/* What the sequence may take: each draft is a row whose KV has room, and a token that may be
 * answered. */
static uint32_t room_of(const decode_spec *spec, const decode_sequence *s)
{
    uint32_t bound = s->lease->blocks_count * spec->role->layout.block_tokens;
    uint32_t capacity = bound < s->capacity ? bound : s->capacity;
    uint32_t left = s->max_tokens - (s->tokens_count - s->answer_from); /* at least 1 */
    uint32_t most = spec->how.draft_tokens;

    if (capacity - s->tokens_count < most)
        most = capacity - s->tokens_count;
    return left - 1 < most ? left - 1 : most;
}

/* Sequences of the step that draw a token, as wishes; none while one of them catches up or is
 * stepped alone for a fault. */
static uint32_t collect(decode_spec *spec, const pd_step_slice *slices, uint32_t count)
{
    uint32_t wishes = 0;

    for (uint32_t i = 0; i < count; i++) {
        const decode_sequence *s = slices[i].request;
        if (slices[i].count != 1 || !slices[i].want_token || s->solo)
            return 0;
        if (s->drafting.state == NULL)
            continue;
        spec->wishes[wishes++] =
            (decode_wish){.slice = i, .accept = accept_of(spec, s), .most = room_of(spec, s)};
    }
    return wishes;
}

static double power(double base, uint32_t exponent)
{
    double result = 1;

    while (exponent-- > 0)
        result *= base;
    return result;
}

/* The wish whose next draft brings most; count: none has one. */
static uint32_t best_of(const decode_wish *wishes, uint32_t count, double *gain_out)
{
    uint32_t best = count;

    *gain_out = 0;
    for (uint32_t i = 0; i < count; i++) {
        double gain =
            wishes[i].take < wishes[i].most ? power(wishes[i].accept, wishes[i].take + 1) : 0;
        if (gain > *gain_out) {
            *gain_out = gain;
            best = i;
        }
    }
    return best;
}

/* Sets `take` of all: as many drafts as make the most of a millisecond. */
static void choose(decode_spec *spec, uint32_t wishes, uint32_t sequences, uint32_t spare)
{
    double base_ms = pd_row_cost_ms(&spec->rows, sequences), tokens = sequences, gain;
    double least = base_ms > 0 ? sequences / base_ms * GAIN_LEAST : 0, best = least, ms = base_ms;
    uint32_t picked = 0, keep = 0;

    for (uint32_t at; picked < spare; picked++) {
        at = best_of(spec->wishes, wishes, &gain);
        if (at == wishes)
            break;
        spec->wishes[at].take++;
        spec->picked[picked] = at;
        tokens += gain;
        double rows_ms = pd_row_cost_ms(&spec->rows, sequences + picked + 1);
        ms = rows_ms > ms ? rows_ms : ms; /* more rows are never less work */
        if (base_ms <= 0 || tokens / ms > best) {
            best = base_ms > 0 ? tokens / ms : best;
            keep = picked + 1;
        }
    }
    while (picked > keep)
        spec->wishes[spec->picked[--picked]].take--;
}

/* Likewise for the draft model, whose rounds are everybody's: the same depth for all. */
static void choose_depth(decode_spec *spec, uint32_t wishes, uint32_t sequences, uint32_t spare)
{
    double base_ms = pd_row_cost_ms(&spec->rows, sequences), tokens = sequences, ms = base_ms;
    double round_ms = decode_draft_model_round_ms(spec->model, wishes);
    double best = base_ms > 0 ? sequences / base_ms * GAIN_LEAST : 0;
    uint32_t depth = base_ms > 0 && round_ms > 0 ? 0 : spec->how.draft_tokens, rows = 0;

    for (uint32_t n = 1; base_ms > 0 && round_ms > 0 && n <= spec->how.draft_tokens; n++) {
        for (uint32_t i = 0; i < wishes; i++) {
            if (spec->wishes[i].most < n)
                continue;
            tokens += power(spec->wishes[i].accept, n);
            rows++;
        }
        if (rows > spare)
            break;
        double rows_ms = pd_row_cost_ms(&spec->rows, sequences + rows);
        ms = rows_ms > ms ? rows_ms : ms;
        if (tokens / (ms + n * round_ms) > best) {
            best = tokens / (ms + n * round_ms);
            depth = n;
        }
    }
    for (uint32_t i = 0; i < wishes; i++) {
        decode_wish *wish = &spec->wishes[i];
        wish->take = wish->most < depth ? wish->most : depth;
        wish->take = wish->take < spare ? wish->take : spare;
        spare -= wish->take;
    }
}

static void take_all(decode_spec *spec, uint32_t wishes, uint32_t spare)
{
    for (uint32_t i = 0; i < wishes; i++) {
        decode_wish *wish = &spec->wishes[i];
        wish->take = wish->most < spare ? wish->most : spare;
        spare -= wish->take;
    }
}

/* Whether lookahead has earned what its rows cost. */
static bool has_earned(decode_spec *spec, uint32_t sequences, uint32_t rows)
{
    if (spec->rest > 0) {
        spec->rest--;
        spec->judged = 0;
        return false;
    }
    double without = pd_row_cost_ms(&spec->rows, sequences);
    double with = pd_row_cost_ms(&spec->rows, rows);
    if (spec->judged < JUDGED_LEAST || without <= 0 || spec->yield * without > with * GAIN_LEAST)
        return true;
    spec->rest = REST;
    return false;
}

/* ---- the plan ---- */

static void add_drafts(decode_spec *spec, pd_step_slice *slice, uint32_t index, uint32_t drafts)
{
    slice->count += drafts;
    slice->drafts = drafts;
    slice->drafts_out = spec->out + (size_t)index * spec->how.draft_tokens;
}

/* Behind the sequence's tokens, where the slice goes on. */
static void guess_all(decode_spec *spec, const pd_step_slice *slices, uint32_t wishes)
{
    for (uint32_t i = 0; i < wishes; i++) {
        decode_wish *wish = &spec->wishes[i];
        decode_sequence *s = slices[wish->slice].request;
        wish->most = spec->guess->propose(s->drafting.state, s->tokens, s->tokens_count, wish->most,
                                          s->tokens + s->tokens_count);
    }
}

static uint32_t wished(const decode_spec *spec, uint32_t wishes)
{
    uint32_t drafts = 0;

    for (uint32_t i = 0; i < wishes; i++)
        drafts += spec->wishes[i].most;
    return drafts;
}

static bool ask_model(decode_spec *spec, const pd_step_slice *slices, uint32_t wishes,
                      pd_step **draft_out)
{
    for (uint32_t i = 0; i < wishes; i++)
        spec->asked[i] = (decode_draft_wish){.sequence = slices[spec->wishes[i].slice].request,
                                             .most = spec->wishes[i].take};
    return decode_draft_model_plan(spec->model, spec->asked, wishes, draft_out);
}

/* Who takes no draft is forgotten slowly, so that it is tried again; and what all sequences did,
 * while none takes any: the texts that are asked for now may be others. */
static void forget(decode_spec *spec, const pd_step_slice *slices, uint32_t wishes)
{
    bool idle = false, drafts = false;

    for (uint32_t i = 0; i < wishes; i++) {
        decode_sequence *s = slices[spec->wishes[i].slice].request;
        drafts = drafts || spec->wishes[i].take > 0;
        if (spec->wishes[i].take > 0 || spec->wishes[i].most == 0)
            continue;
        idle = true;
        s->drafting.right *= REMEMBER_IDLE;
        s->drafting.tries *= REMEMBER_IDLE;
    }
    if (idle && !drafts) {
        spec->right *= REMEMBER_IDLE;
        spec->tries *= REMEMBER_IDLE;
    }
}

bool decode_spec_plan(decode_spec *spec, pd_step_slice *slices, uint32_t count, pd_step **draft_out)
{
    uint32_t spare = spec->rows_max > count ? spec->rows_max - count : 0;
    uint32_t wishes = spec->how.method == PD_SPEC_OFF ? 0 : collect(spec, slices, count);
    bool measure = spec->how.adaptive && pd_row_cost_age(&spec->rows, count) > BASE_AGE_MOST;

    if (wishes == 0 || spare == 0 || measure)
        return false;
    if (spec->guess != NULL)
        guess_all(spec, slices, wishes);
    uint32_t all = wished(spec, wishes);
    if (spec->how.adaptive && spec->how.method == PD_SPEC_LOOKAHEAD) {
        if (has_earned(spec, count, count + (all < spare ? all : spare)))
            take_all(spec, wishes, spare);
    } else if (spec->how.adaptive && spec->model != NULL) {
        choose_depth(spec, wishes, count, spare);
    } else if (spec->how.adaptive) {
        choose(spec, wishes, count, spare);
    } else {
        take_all(spec, wishes, spare);
    }
    forget(spec, slices, wishes);
    if (spec->model != NULL)
        return ask_model(spec, slices, wishes, draft_out);
    for (uint32_t i = 0; i < wishes; i++) {
        if (spec->wishes[i].take > 0)
            add_drafts(spec, &slices[spec->wishes[i].slice], spec->wishes[i].slice,
                       spec->wishes[i].take);
    }
    return false;
}

bool decode_spec_on_draft(decode_spec *spec, pd_step *step, pd_step_slice *slices, uint32_t count,
                          pd_step **draft_out)
{
    if (decode_draft_model_on_step(spec->model, step, draft_out))
        return true;
    for (uint32_t i = 0; i < count; i++) {
        const decode_sequence *s = slices[i].request;
        if (s->drafting.made > 0)
            add_drafts(spec, &slices[i], i, s->drafting.made);
    }
    return false;
}

/* ---- what came of it ---- */

void decode_spec_observe(decode_spec *spec, const pd_step *step)
{
    uint32_t rows = 0;

    for (uint32_t i = 0; i < step->slices_count; i++) {
        const pd_step_slice *slice = &step->slices[i];
        if (slice->count != 1 + slice->drafts)
            return; /* catching up: no measure of a decode step */
        rows += slice->count;
    }
    pd_row_cost_observe(&spec->rows, rows, (double)(step->finished_ns - step->started_ns) / 1e6);
}

static void remember(float *right, float *tries, uint32_t hits, uint32_t misses)
{
    for (uint32_t i = 0; i < hits + misses; i++) {
        *right = *right * REMEMBER + (i < hits ? 1 : 0);
        *tries = *tries * REMEMBER + 1;
    }
}

void decode_spec_took(decode_spec *spec, decode_sequence *s, const pd_step_slice *slice,
                      pd_role_counters *counters)
{
    const uint32_t *drafts = slice->tokens + slice->count - slice->drafts;
    uint32_t right = 0, said[PD_SPEC_DRAFTS_MOST + 1];

    while (right < slice->drafts && drafts[right] == slice->drafts_out[right])
        right++;
    spec->tokens_a_step += 0.02 * (1.0 + right - spec->tokens_a_step);
    if (slice->drafts == 0)
        return;
    counters->spec_steps++;
    counters->spec_drafted += slice->drafts;
    counters->spec_accepted += right;
    remember(&s->drafting.right, &s->drafting.tries, right, right < slice->drafts);
    remember(&spec->right, &spec->tries, right, right < slice->drafts);
    spec->yield += (spec->judged < JUDGED_LEAST ? 0.2 : 0.05) * (1.0 + right - spec->yield);
    spec->judged++;
    if (spec->model != NULL)
        decode_draft_model_took(s, slice, right);
    if (spec->guess == NULL || spec->guess->learn == NULL)
        return;
    memcpy(said, slice->drafts_out, slice->drafts * sizeof *said);
    said[slice->drafts] = slice->token_out;
    spec->guess->learn(s->drafting.state, slice->position, drafts, slice->drafts, said);
}
