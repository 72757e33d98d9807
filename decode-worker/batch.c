#include "decode-worker/batch.h"

#include "common/worker/token_batch.h"

void decode_batch_init(decode_batch *batch, uint32_t running_max, uint32_t rows_max)
{
    pd_assert(rows_max >= running_max);
    *batch = (decode_batch){.running_max = running_max, .rows_max = rows_max};
}

void decode_batch_add(decode_batch *batch, decode_sequence *sequence)
{
    pd_assert(!sequence->in_batch);
    sequence->in_batch = true;
    sequence->batch_next = NULL;
    sequence->batch_prev = batch->tail;
    if (batch->tail != NULL)
        batch->tail->batch_next = sequence;
    else
        batch->head = sequence;
    batch->tail = sequence;
    batch->count++;
}

void decode_batch_remove(decode_batch *batch, decode_sequence *sequence)
{
    if (!sequence->in_batch)
        return;
    if (sequence->batch_prev != NULL)
        sequence->batch_prev->batch_next = sequence->batch_next;
    else
        batch->head = sequence->batch_next;
    if (sequence->batch_next != NULL)
        sequence->batch_next->batch_prev = sequence->batch_prev;
    else
        batch->tail = sequence->batch_prev;
    sequence->in_batch = false;
    batch->count--;
}

static void plan_slice(decode_sequence *sequence, uint32_t rows, pd_step_slice *slice)
{
    uint32_t count = sequence->tokens_count - sequence->kv_tokens;
    bool last = count <= rows;

    pd_assert(count > 0 && sequence->lease != NULL && sequence->tokens_count <= sequence->capacity);
    if (!last)
        count = rows;
    *slice = (pd_step_slice){
        .request = sequence,
        .id = sequence->id,
        .tokens = sequence->tokens + sequence->kv_tokens,
        .count = count,
        .position = sequence->kv_tokens,
        .blocks = sequence->lease->blocks,
        .want_token = last,
        .sampling = sequence->sampling,
    };
    sequence->in_step = true;
}

uint32_t decode_batch_plan(decode_batch *batch, pd_step_slice *slices)
{
    uint32_t rows = batch->rows_max, count = 0, place = 0, others = 0;

    for (decode_sequence *s = batch->head; s != NULL && place < batch->running_max;
         s = s->batch_next, place++) {
        if (s->stalled)
            continue;
        if (s->solo) {
            plan_slice(s, batch->rows_max, &slices[0]);
            return 1;
        }
        others++;
    }
    place = 0;
    for (decode_sequence *s = batch->head; s != NULL && place < batch->running_max;
         s = s->batch_next, place++) {
        if (s->stalled)
            continue;
        /* A row for each that comes after: nobody waits for one with many tokens to catch up. */
        plan_slice(s, rows - --others, &slices[count]);
        rows -= slices[count++].count;
    }
    return count;
}

uint64_t decode_batch_context(const decode_batch *batch)
{
    uint64_t context = 0;
    uint32_t place = 0;

    for (const decode_sequence *s = batch->head; s != NULL && place < batch->running_max;
         s = s->batch_next, place++)
        context += s->kv_tokens;
    return context;
}

double decode_batch_queue_ms(const decode_batch *batch, const pd_cost *cost, bool stepping,
                             double tokens_a_step)
{
    uint32_t running = batch->count < batch->running_max ? batch->count : batch->running_max;
    uint64_t left = 0;
    uint32_t place = 0;

    if (running == 0)
        return 0;
    double step_ms = pd_cost_decode_step_ms(cost, running, decode_batch_context(batch));
    double ms = stepping ? step_ms : 0;
    if (batch->count < batch->running_max)
        return ms;
    for (const decode_sequence *s = batch->head; s != NULL; s = s->batch_next, place++) {
        uint32_t answered = s->tokens_count - s->answer_from;
        left += s->max_tokens > answered ? s->max_tokens - answered : 0;
    }
    /* Each of running_max places gives left / running_max steps before it is free for one more. */
    return ms + step_ms * (double)left / tokens_a_step / batch->running_max;
}

uint32_t decode_batch_take(decode_sequence *sequence, const pd_step_slice *slice,
                           uint32_t context_max, uint32_t *index_out, pd_finish *finish_out)
{
    uint32_t sure = slice->count - slice->drafts;

    sequence->kv_tokens += sure;
    if (!slice->want_token)
        return 0;
    *index_out = sequence->tokens_count - sequence->answer_from;
    for (uint32_t i = 0;; i++) {
        pd_assert(sequence->tokens_count < sequence->tokens_max);
        bool is_draft = i < slice->drafts;
        uint32_t draft = is_draft ? slice->tokens[sure + i] : 0; /* may lie where the token goes */
        uint32_t token = is_draft ? slice->drafts_out[i] : slice->token_out;
        uint32_t position = sequence->tokens_count;
        sequence->tokens[sequence->tokens_count++] = token;
        *finish_out =
            pd_token_finish(token, position - sequence->answer_from, position, sequence->end_tokens,
                            sequence->end_tokens_count, sequence->max_tokens, context_max);
        if (*finish_out != PD_FINISH_NONE || !is_draft || token != draft)
            return i + 1;
        sequence->kv_tokens++; /* the draft's row was the token's */
    }
}
