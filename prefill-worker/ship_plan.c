#include "prefill-worker/ship_plan.h"

#include "common/base/mem.h"

#include <string.h>

bool prefill_ship_targets(prefill_request *r, const pd_msg_targets *targets)
{
    if (r->targets_known)
        return true;
    if ((uint64_t)targets->held_blocks + targets->blocks_count != r->blocks_count)
        return false;
    r->targets_known = true;
    r->held = targets->held_blocks;
    if (targets->blocks_count > 0)
        memcpy(r->targets, targets->blocks, targets->blocks_count * sizeof *r->targets);
    for (uint32_t g = 0; g < r->groups; g++)
        r->shipped[g] = r->held;
    return true;
}

/* The partial block at the prompt's end leaves with the last tokens only. */
static uint32_t blocks_of(const prefill_request *r, const pd_kv_layout *layout, uint32_t tokens)
{
    return tokens == r->item.tokens ? r->blocks_count : tokens / layout->block_tokens;
}

static uint32_t final_blocks(const prefill_request *r, const pd_kv_layout *layout, uint32_t group)
{
    uint32_t tokens = r->item.done;

    if (r->whole)
        return tokens == r->item.tokens ? r->blocks_count : 0;
    if (r->in_step && group < r->final_groups)
        tokens += r->item.take;
    return blocks_of(r, layout, tokens);
}

void prefill_ship_step(prefill_request *r, const pd_kv_layout *layout, const pd_cost *cost,
                       double step_ms)
{
    uint32_t then = blocks_of(r, layout, r->item.done + r->item.take);
    uint32_t from = r->targets_known ? r->shipped[0] : blocks_of(r, layout, r->item.done);
    uint64_t bytes = 0;

    for (uint32_t g = 0; then > from && g < r->groups; g++)
        bytes += (then - from) * pd_kv_layout_block_bytes(layout, g);
    r->final_groups = 0;
    r->step_left = false;
    r->batch_groups = pd_cost_ship_groups(cost, r->groups, step_ms, bytes);
}

static uint64_t bit_of(const prefill_request *r, uint32_t group, uint32_t block)
{
    return (uint64_t)group * r->blocks_count + block;
}

bool prefill_ship_again(prefill_request *r, const pd_msg_ship_again *asked, pd_status *status_out)
{
    uint64_t end = (uint64_t)asked->first_block + asked->count;
    bool fresh = false;

    *status_out = PD_OK;
    if (!r->targets_known || asked->group >= r->groups || asked->count == 0 ||
        asked->first_block < r->held || end > r->blocks_count) {
        r->again++;
        return false;
    }
    if (r->asked == NULL) {
        size_t words = ((size_t)r->groups * r->blocks_count + 63) / 64;
        r->asked = pd_calloc(2 * words, sizeof *r->asked);
        if (r->asked == NULL) {
            *status_out = PD_E_NOMEM;
            return false;
        }
        r->want = r->asked + words;
    }
    for (uint32_t block = asked->first_block; block < end; block++) {
        uint64_t bit = bit_of(r, asked->group, block), mask = (uint64_t)1 << (bit % 64);
        if ((r->asked[bit / 64] & mask) != 0)
            continue;
        fresh = true;
        r->asked[bit / 64] |= mask;
        r->want[bit / 64] |= mask; /* what has not left yet leaves, and then once more */
    }
    r->again += fresh;
    return true;
}

static bool wanted(const prefill_request *r, uint32_t group, uint32_t block)
{
    uint64_t bit = bit_of(r, group, block);

    return block < r->shipped[group] && (r->want[bit / 64] >> (bit % 64) & 1) != 0;
}

/* The first run of blocks of one group that are to leave again. */
static bool next_wanted(const prefill_request *r, pd_shipment *out)
{
    if (r->want == NULL)
        return false;
    for (uint32_t g = 0; g < r->groups; g++) {
        for (uint32_t block = r->held; block < r->blocks_count; block++) {
            if (!wanted(r, g, block))
                continue;
            uint32_t end = block + 1;
            while (end < r->blocks_count && wanted(r, g, end))
                end++;
            *out = (pd_shipment){.group_first = g,
                                 .groups = 1,
                                 .first = block,
                                 .count = end - block,
                                 .again = r->again};
            return true;
        }
    }
    return false;
}

/* Groups one after the other of which the same blocks may leave. */
static bool next_final(const prefill_request *r, const pd_kv_layout *layout, pd_shipment *out)
{
    for (uint32_t g = 0, end; g < r->groups; g = end) {
        uint32_t from = r->shipped[g], to = final_blocks(r, layout, g);
        for (end = g + 1; end < r->groups && r->shipped[end] == from; end++) {
            if (final_blocks(r, layout, end) != to)
                break;
        }
        /* More of its kind will be final soon. */
        bool wait =
            r->in_step && end == r->final_groups && end < r->groups && end - g < r->batch_groups;
        if (to <= from || wait)
            continue;
        *out =
            (pd_shipment){.group_first = g, .groups = end - g, .first = from, .count = to - from};
        return true;
    }
    return false;
}

bool prefill_ship_next(const prefill_request *r, const pd_kv_layout *layout, pd_shipment *out)
{
    if (!r->ship || !r->targets_known || !r->item.started)
        return false;
    if (!next_wanted(r, out) && !next_final(r, layout, out))
        return false;
    uint32_t last = out->first + out->count - 1;
    uint32_t rest = r->item.tokens - last * layout->block_tokens;
    out->ticket = r->ticket;
    out->key = r->key;
    out->receiver = r->receiver;
    out->sources = r->blocks + out->first;
    out->targets = r->targets + (out->first - r->held);
    out->valid_tokens = rest < layout->block_tokens ? rest : layout->block_tokens;
    return true;
}

void prefill_ship_posted(prefill_request *r, const pd_kv_layout *layout, const pd_shipment *s)
{
    uint32_t end = s->first + s->count;

    r->posted++;
    for (uint32_t g = s->group_first; g < s->group_first + s->groups; g++) {
        for (uint32_t block = s->first; s->again > 0 && block < end; block++) {
            uint64_t bit = bit_of(r, g, block);
            r->want[bit / 64] &= ~((uint64_t)1 << (bit % 64));
        }
        if (r->in_step && end > blocks_of(r, layout, r->item.done))
            r->step_left = true;
        if (end > r->shipped[g])
            r->shipped[g] = end;
    }
}

bool prefill_ship_complete(const prefill_request *r)
{
    pd_shipment wanted_again;

    for (uint32_t g = 0; g < r->groups; g++) {
        if (!r->targets_known || r->shipped[g] < r->blocks_count)
            return false;
    }
    return !next_wanted(r, &wanted_again);
}
