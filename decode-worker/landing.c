#include "decode-worker/landing.h"

#include "common/base/log.h"

#include <stddef.h>
#include <stdio.h>

void decode_landing_all_here(pd_role_core *core, decode_sequence *s, uint64_t now_ns)
{
    pd_message message = {.kind = PD_MSG_LANDED};

    s->landed = true;
    s->kv_tokens = s->prompt_tokens;
    pd_lease_landed(core->leases, s->lease);
    pd_blocks_remember(&core->blocks, s->hashes, s->lease->blocks, s->hashes_count,
                       pd_lease_room(core->leases)); /* what is promised stays */
    message.landed.key = s->key;
    message.landed.started = s->started;
    core->sink.send(core->sink.ctx, s->key.router, &message);
    if (s->started) {
        decode_join(core, s, now_ns);
        decode_run_step(core, now_ns);
    }
}

/* The sender's last word: it writes no more. Who waits for what has not come hears of it; what has
 * come is checked to the end. s may be gone afterwards. */
void decode_landing_sender_done(pd_role_core *core, decode_sequence *s, const char *reason)
{
    bool lacks = !s->bound || !pd_landing_written(&s->landing);

    s->landing.closed = true;
    if (s->given_up) {
        decode_settle(core, s);
    } else if (lacks) {
        if (s->started)
            decode_say_failed(core, &s->key, s->id, PD_E_PEER, reason);
        core->counters.cancelled += !s->started;
        decode_give_up(core, s);
    }
}

/* ---- what comes ---- */

static void take_landing(pd_role_core *core, decode_sequence *s, pd_land_result result,
                         uint64_t now_ns)
{
    if (s->given_up)
        decode_settle(core, s);
    else if (result == PD_LAND_DONE)
        decode_landing_all_here(core, s, now_ns);
    else if (result == PD_LAND_BROKEN)
        decode_fail(core, s, PD_E_MISMATCH, "a block's seal does not match its bytes");
    else if (result == PD_LAND_UNCHECKED)
        decode_fail(core, s, PD_E_INTERNAL, "it cannot read landed blocks on its device");
}

static void on_blocks(pd_role_core *core, const pd_notice *notice, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &notice->key);
    pd_land_result result = PD_LAND_IGNORED;

    if (notice->receiver == core->options.incarnation)
        pd_land_heard(&core->lander, notice->sender, now_ns);
    if (s != NULL && s->bound)
        result = pd_land_on_notice(&core->lander, &s->landing, notice, now_ns);
    if (result == PD_LAND_IGNORED)
        core->counters.notices_ignored++;
    else
        take_landing(core, s, result, now_ns);
}

static void on_written(pd_role_core *core, const pd_notice *notice, uint64_t now_ns)
{
    decode_sequence *s = decode_find(core, &notice->key);

    if (s == NULL || !s->bound || !pd_land_on_written(&core->lander, &s->landing, notice, now_ns))
        core->counters.notices_ignored++;
}

static decode_sequence *sequence_of(pd_landing *landing)
{
    return (decode_sequence *)((unsigned char *)landing - offsetof(decode_sequence, landing));
}

void decode_landing_on_checked(pd_role_core *core, const pd_checked *checked, uint64_t now_ns)
{
    pd_landing *landing;
    pd_land_result result = pd_land_on_checked(&core->lander, checked, &landing);

    if (landing != NULL)
        take_landing(core, sequence_of(landing), result, now_ns);
}

static void on_abort(pd_role_core *core, const pd_notice *notice)
{
    bool any = false;

    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (s->landed || !pd_landing_is_aborted(&s->landing, &core->options, notice))
            continue;
        decode_landing_sender_done(core, s, "the sender gave up");
        any = true;
    }
    core->counters.notices_ignored += !any;
}

void decode_landing_on_transfer(pd_role_core *core, const pd_transfer_event *event, uint64_t now_ns)
{
    uint64_t seals[PD_NOTICE_BLOCKS_MAX];
    pd_notice notice;

    if (event->kind == PD_TRANSFER_SENT) {
        pd_source_on_sent(&core->source, event, now_ns);
        decode_run_step(core, now_ns); /* room may have come back */
        return;
    }
    if (event->kind != PD_TRANSFER_NOTICE) {
        pd_source_on_link(&core->source, event, now_ns);
        return;
    }
    if (pd_notice_unpack(event->notice, event->notice_len, seals, &notice) != PD_OK) {
        core->counters.notices_ignored++;
        pd_log_warn("msg=\"bytes that are no notice came on the data plane\" bytes=%zu",
                    event->notice_len);
        return;
    }
    if (notice.kind == PD_NOTICE_ABORT)
        on_abort(core, &notice);
    else if (notice.kind == PD_NOTICE_ASK)
        pd_source_asked(&core->source, &notice.key, notice.sender, &core->routers, now_ns);
    else if (notice.kind == PD_NOTICE_WRITTEN)
        on_written(core, &notice, now_ns);
    else
        on_blocks(core, &notice, now_ns);
}

/* ---- time ---- */

void decode_landing_tick(pd_role_core *core, decode_sequence *s, uint64_t now_ns)
{
    char reason[PD_REASON_BYTES];

    if (s->landed)
        return;
    switch (pd_land_tick(&core->lander, &s->landing, now_ns)) {
    case PD_LAND_LATE:
        snprintf(reason, sizeof reason, "none of its blocks came from %s for %.1f s",
                 s->landing.sender_name, (double)pd_landing_silence_ns(&s->landing, now_ns) / 1e9);
        decode_fail(core, s, PD_E_TIMEOUT, reason);
        break;
    case PD_LAND_BROKEN:
        decode_fail(core, s, PD_E_MISMATCH, "blocks that its sender has written did not come");
        break;
    default: break;
    }
}

/* ---- senders that go ---- */

/* No write of that incarnation can land any more. What it wrote in full goes on. */
static void sender_dead(pd_role_core *core, uint64_t incarnation)
{
    if (incarnation == 0)
        return;
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (s->lease->prefill == incarnation && !s->landed)
            decode_landing_sender_done(core, s, "its sender is gone");
    }
}

/* It writes here no more: no router can bring it back. */
void decode_landing_peer_dead(pd_role_core *core, uint64_t incarnation, uint64_t now_ns)
{
    (void)now_ns;
    pd_writers_refuse(&core->writers, incarnation, true);
    sender_dead(core, incarnation);
}

void decode_landing_peer_gone(pd_role_core *core, const pd_msg_peer_gone *peer, uint64_t now_ns)
{
    pd_source_peer_gone(&core->source, peer->incarnation, now_ns);
    pd_writers_refuse(&core->writers, peer->incarnation, false);
    if (!peer->may_write) {
        sender_dead(core, peer->incarnation);
        return;
    }
    /* Given up, and yet a process: it stands still, or is on its way out. Nobody waits for it any
     * more; its blocks stay taken until it is dead. */
    for (decode_sequence *s = core->sequences, *next; s != NULL; s = next) {
        next = s->next;
        if (s->lease->prefill != peer->incarnation || s->landed || !decode_alive(s) ||
            (s->bound && pd_landing_written(&s->landing)))
            continue;
        if (s->started)
            decode_say_failed(core, &s->key, s->id, PD_E_PEER, "the sender was given up");
        core->counters.cancelled += !s->started;
        decode_give_up(core, s);
    }
}
