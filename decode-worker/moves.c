#include "decode-worker/moves.h"

void decode_moves_say_suspended(const pd_role_sink *sink, const decode_sequence *s)
{
    pd_message message = {.kind = PD_MSG_SUSPENDED};

    message.suspended = (pd_msg_suspended){
        .key = s->key,
        .answered = s->tokens_count - s->answer_from,
        .kv_tokens = s->kv_tokens,
        .blocks = s->lease->blocks_count,
    };
    sink->send(sink->ctx, s->key.router, &message);
}

void decode_moves_request(pd_source *source, const pd_msg_ship_request *asked,
                          decode_sequence *sequence, uint64_t now_ns)
{
    if (asked->source_epoch == 0) {
        pd_source_request(source, asked, NULL, now_ns);
        return;
    }
    if (sequence == NULL) {
        pd_source_refuse(source, asked, PD_E_NOT_FOUND, "there is no such sequence any more");
        return;
    }
    if (!sequence->standing) {
        pd_source_refuse(source, asked, PD_E_INVALID, "the sequence is not suspended");
        return;
    }
    sequence->told = true;
    sequence->moving = true;
    pd_source_sequence of = {.blocks = sequence->lease->blocks, .kv_tokens = sequence->kv_tokens};
    pd_source_request(source, asked, &of, now_ns);
}

static pd_audit_state state_of(const decode_sequence *s)
{
    if (s->given_up)
        return PD_AUDIT_QUARANTINED;
    if (!s->bound)
        return PD_AUDIT_PROMISED;
    if (!s->landed)
        return s->started ? PD_AUDIT_AWAITED : PD_AUDIT_LANDING;
    if (!s->started)
        return PD_AUDIT_LANDED;
    if (s->told)
        return PD_AUDIT_SUSPENDED;
    return s->stalled ? PD_AUDIT_STALLED : PD_AUDIT_RUNNING;
}

void decode_moves_audit(const decode_sequence *all, const pd_routers *routers, pd_audit *audit)
{
    for (const decode_sequence *s = all; s != NULL; s = s->next) {
        uint32_t blocks = s->lease->blocks_count + s->lease->promised;
        if (s->given_up && !pd_routers_live(routers, s->key.router))
            pd_audit_add_left(audit, &s->key, blocks);
        else
            pd_audit_add(audit, &s->key, state_of(s), blocks);
        if (s->given_up)
            pd_audit_wait_for(audit, s->lease->prefill);
    }
}
