#include "prefill-worker/ending.h"

#include "common/base/log.h"
#include "prefill-worker/ship_plan.h"

#include <stdio.h>

pd_request_key prefill_ticket_key(uint64_t ticket)
{
    return (pd_request_key){.number = ticket};
}

static float ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns == 0 || to_ns <= from_ns ? 0 : (float)((double)(to_ns - from_ns) / 1e6);
}

void prefill_say_done(pd_role_core *core, const prefill_request *r)
{
    pd_message message = {.kind = PD_MSG_PREFILL_DONE};
    pd_msg_prefill_done *done = &message.prefill_done;

    done->key = r->key;
    done->status = r->status;
    done->cached_tokens = r->cached;
    done->computed_tokens = r->item.done - r->cached;
    done->queue_ms = ms_between(r->arrived_ns, r->started_ns);
    done->compute_ms = (float)((double)r->compute_ns / 1e6);
    done->ship_ms = (float)((double)r->wire_ns / 1e6);
    done->ship_bytes = r->ship_bytes;
    /* what is sent may be on its way still: over tcp the kernel has it, and then a slow link */
    done->may_land = r->may_land || r->posted > 0;
    done->again = r->again;
    done->shipped_bytes = core->counters.bytes_shipped;
    snprintf(done->reason, sizeof done->reason, "%s", r->reason);
    core->sink.send(core->sink.ctx, r->key.router, &message);
}

static bool puts_outstanding(pd_role_core *core, const prefill_request *r)
{
    /* A closed link has nothing under way, whatever was reported; and until it is closed, a put
     * that was reported as failed may still be written. */
    const pd_link *link = pd_links_by_tag(&core->links, r->link_tag);

    if (link == NULL || r->posted == 0)
        return false;
    return r->sent < r->posted || r->status == PD_E_PEER || link->state == PD_LINK_CLOSING;
}

static void say_last_word(pd_role_core *core, prefill_request *r)
{
    const pd_link *link = pd_links_by_tag(&core->links, r->link_tag);

    if (link != NULL && link->state == PD_LINK_UP) {
        pd_last_words_abort(&core->words, link, &r->key);
        return;
    }
    /* The last word goes by the next link. What was on its way by this one may land until then,
     * and, where the link could not be closed, even after. */
    r->may_land = r->posted > 0;
    if (r->unclosed)
        pd_last_words_never(&core->words, r->receiver, &r->key);
    else
        pd_last_words_owe(&core->words, r->receiver, &r->key, r->posted == 0);
}

static void forget(pd_role_core *core, prefill_request *r)
{
    pd_request_key ticket = prefill_ticket_key(r->ticket);

    pd_key_table_remove(core->by_key, &r->key);
    pd_key_table_remove(core->by_ticket, &ticket);
    if (r->prev != NULL)
        r->prev->next = r->next;
    else
        core->head = r->next;
    if (r->next != NULL)
        r->next->prev = r->prev;
    else
        core->tail = r->prev;
    prefill_request_free(r);
}

static void log_end(const pd_role_core *core, const prefill_request *r)
{
    const pd_kv_layout *layout = &core->options.layout;

    if (!pd_log_enabled(PD_LOG_DEBUG))
        return;
    pd_log_req_debug(r->id,
                     "msg=\"prefill ends\" status=%s reason=\"%s\" cached=%u computed=%u "
                     "shipments=%u bytes=%llu held_blocks=%u overlap_from=%u",
                     pd_status_name(r->status), r->reason, r->cached, r->item.done - r->cached,
                     r->posted, (unsigned long long)r->ship_bytes, r->held,
                     pd_cost_overlap_tokens(&core->cost, layout->groups,
                                            layout->block_bytes_all / layout->block_tokens,
                                            core->options.context_max));
}

static void finish(pd_role_core *core, prefill_request *r)
{
    bool whole = r->status == PD_OK && !r->answer_ended;

    if (r->ship && !whole)
        say_last_word(core, r);
    pd_last_words_end(&core->words, &r->key);
    if (r->item.started)
        pd_prefix_cache_drop(core->blocks.cache, r->blocks, r->blocks_count, PD_CLAIM_RUNNING);
    if (r->status == PD_OK || !r->word_owed)
        core->counters.finished++;
    else if (r->status == PD_E_CANCELLED)
        core->counters.cancelled++;
    else
        core->counters.failed++;
    log_end(core, r);
    if (r->word_owed)
        prefill_say_done(core, r);
    forget(core, r);
}

void prefill_settle(pd_role_core *core, prefill_request *r)
{
    if (r->in_step || puts_outstanding(core, r))
        return;
    if (r->status != PD_OK || (r->computed && (!r->ship || r->answer_ended))) {
        finish(core, r);
        return;
    }
    if (!r->computed || !prefill_ship_complete(r))
        return;
    if (r->word_owed && r->posted > 0)
        pd_last_words_written(&core->words, r->link_tag, &r->key, r->again);
    if (r->word_owed)
        prefill_say_done(core, r);
    r->word_owed = false;
    if (r->released)
        finish(core, r);
}

void prefill_end_early(pd_role_core *core, prefill_request *r, pd_status status, const char *reason,
                       uint64_t now_ns)
{
    if (r->status == PD_OK) {
        r->status = status;
        r->reason = reason;
        r->ended_ns = now_ns;
        pd_prefill_queue_remove(&core->queue, &r->item);
        prefill_pull_give_up(&core->pulls, r);
        if (r->sent < r->posted)
            core->sink.unship(core->sink.ctx, r->ticket);
        if (status != PD_E_CANCELLED && r->word_owed)
            pd_log_req_warn(r->id, "msg=\"prefill fails: %s\" status=%s", reason,
                            pd_status_name(status));
    }
    prefill_settle(core, r);
}
