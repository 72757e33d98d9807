#include "common/worker/ship_puts.h"

#include <string.h>

uint32_t pd_ship_slices(const pd_kv_layout *ours, const pd_kv_layout *theirs)
{
    uint32_t a = ours->ranks, b = theirs->ranks;

    while (b != 0) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    uint64_t slices = (uint64_t)ours->ranks / a * theirs->ranks;
    return slices > PD_SHIP_SLICES_MAX || ours->kv_heads % slices != 0 ? 0 : (uint32_t)slices;
}

/* Heads [from, to) of blocks; neither pool has a rank's border among them. */
typedef struct cut {
    uint32_t from, to;
    bool whole; /* all of a rank's heads, in both pools: neighbouring blocks are one run */
} cut;

static uint32_t rank_end(const pd_kv_layout *layout, uint32_t head)
{
    return (head / layout->rank_heads + 1) * layout->rank_heads;
}

static cut cut_at(const pd_ship_pools *pools, uint32_t head)
{
    uint32_t ours = rank_end(pools->ours, head), theirs = rank_end(pools->theirs, head);

    return (cut){
        .from = head,
        .to = ours < theirs ? ours : theirs,
        .whole = pools->ours->ranks == pools->theirs->ranks,
    };
}

/* How many blocks from block `from` of the shipment on are neighbours in both pools. */
static uint32_t run_length(const pd_shipment *what, uint32_t from, uint32_t end)
{
    const pd_block *sources = what->sources, *targets = what->targets;
    uint32_t count = 1;

    while (from + count < end && sources[from + count] == sources[from] + count &&
           targets[from + count] == targets[from] + count)
        count++;
    return count;
}

/* Where posting stands, as places in the pools. */
typedef struct place {
    const pd_ship_pools *pools;
    pd_peer peer;
    uint64_t ticket;
    uint32_t group; /* of the layout */
    pd_block source, target;
} place;

static pd_status put(pd_ship_puts *p, const place *at, pd_block source, uint32_t head_from,
                     uint32_t head_to, uint32_t blocks)
{
    const pd_kv_layout *ours = at->pools->ours;

    if (head_from == head_to)
        return PD_OK;
    pd_status status = pd_transfer_put(
        at->pools->transfer, at->peer, at->ticket,
        pd_kv_layout_head_offset(ours, at->group, source, head_from),
        pd_kv_layout_head_offset(at->pools->theirs, at->group, at->target, head_from),
        (uint64_t)blocks * (head_to - head_from) * pd_kv_layout_head_bytes(ours, at->group));
    p->puts += status == PD_OK;
    return status;
}

/* ---- faults on purpose ---- */

static bool writes_wrongly(pd_ship_fault fault)
{
    return fault == PD_SHIP_FAULT_BIT || fault == PD_SHIP_FAULT_OTHER ||
           fault == PD_SHIP_FAULT_MISSING;
}

/* The heads of the slice that a fault is for. */
static cut fault_heads(const pd_ship_puts *p, const pd_ship_pools *pools)
{
    uint32_t heads = pools->ours->kv_heads / pools->slices;

    return (cut){.from = p->fault_slice * heads, .to = (p->fault_slice + 1) * heads};
}

/* How many of the run's blocks go as usual; 0: its first block is the one that a fault is for. */
static uint32_t run_before_fault(const pd_ship_puts *p, const pd_ship_pools *pools,
                                 const cut *heads, uint32_t count)
{
    uint32_t head = fault_heads(p, pools).from;

    if (!writes_wrongly(p->fault) || p->at_group != p->fault_group || head < heads->from ||
        head >= heads->to || p->fault_block < p->at_block || p->fault_block >= p->at_block + count)
        return count;
    return p->fault_block - p->at_block;
}

/* A block of the pool with other bytes there than that one, or that one if there is none. */
static pd_block another_block(const place *at, uint32_t head)
{
    const pd_kv_layout *layout = at->pools->ours;
    const unsigned char *pool = pd_transfer_pool(at->pools->transfer);
    const unsigned char *own = pool + pd_kv_layout_head_offset(layout, at->group, at->source, head);

    for (uint32_t i = 1; i < layout->blocks; i++) {
        pd_block other = (at->source + i) % layout->blocks;
        const unsigned char *bytes =
            pool + pd_kv_layout_head_offset(layout, at->group, other, head);
        /* the first token's key is valid whatever the count */
        if (memcmp(own, bytes, layout->token_bytes) != 0)
            return other;
    }
    return at->source;
}

/* Writes over one byte of the target's slice, within the first token, with a byte of this pool that
 * differs in one bit. */
static pd_status put_flipped(pd_ship_puts *p, const place *at, const cut *slice)
{
    const pd_kv_layout *ours = at->pools->ours;
    const unsigned char *pool = pd_transfer_pool(at->pools->transfer);
    uint64_t source = pd_kv_layout_head_offset(ours, at->group, at->source, slice->from);
    uint64_t target =
        pd_kv_layout_head_offset(at->pools->theirs, at->group, at->target, slice->from);
    uint64_t bytes = (slice->to - slice->from) * pd_kv_layout_head_bytes(ours, at->group);
    const unsigned char *own = pool + source;

    for (uint64_t byte = 0; byte < ours->token_bytes; byte++) {
        for (uint64_t i = 0; i < bytes; i++) {
            unsigned differs = own[byte] ^ own[i];
            if (differs == 0 || (differs & (differs - 1)) != 0)
                continue;
            pd_status status = pd_transfer_put(at->pools->transfer, at->peer, at->ticket,
                                               source + i, target + byte, 1);
            p->puts += status == PD_OK;
            return status;
        }
    }
    return PD_OK; /* all bytes alike: nothing to flip with */
}

/* The cut of one block, with its one slice that goes wrong. After an error all of it is put anew.
 */
static pd_status put_faulty(pd_ship_puts *p, const place *at, const cut *heads)
{
    cut slice = fault_heads(p, at->pools);
    pd_block wrong = p->fault == PD_SHIP_FAULT_OTHER ? another_block(at, slice.from) : at->source;
    pd_status status = put(p, at, at->source, heads->from, slice.from, 1);

    if (status == PD_OK && p->fault != PD_SHIP_FAULT_MISSING)
        status = put(p, at, wrong, slice.from, slice.to, 1);
    if (status == PD_OK && p->fault == PD_SHIP_FAULT_BIT)
        status = put_flipped(p, at, &slice);
    if (status == PD_OK)
        status = put(p, at, at->source, slice.to, heads->to, 1);
    return status;
}

/* ---- posting ---- */

/* The blocks of one cut of one group, from where it stopped. */
static pd_status post_cut(pd_ship_puts *p, place *at, const cut *heads)
{
    const pd_shipment *what = p->what;

    while (p->at_block < p->blocks) {
        uint32_t from = p->block + p->at_block;
        uint32_t count = heads->whole ? run_length(what, from, p->block + p->blocks) : 1;
        count = run_before_fault(p, at->pools, heads, count);
        at->source = what->sources[from];
        at->target = what->targets[from];
        pd_status status = count == 0 ? put_faulty(p, at, heads)
                                      : put(p, at, at->source, heads->from, heads->to, count);
        if (status != PD_OK)
            return status;
        p->at_block += count == 0 ? 1 : count;
    }
    p->at_block = 0;
    return PD_OK;
}

pd_status pd_ship_puts_post(pd_ship_puts *p, const pd_ship_pools *pools, pd_peer peer,
                            uint64_t ticket)
{
    place at = {.pools = pools, .peer = peer, .ticket = ticket};

    for (; p->at_group < p->groups; p->at_group++, p->at_head = 0) {
        at.group = p->what->group_first + p->group + p->at_group;
        while (p->at_head < pools->ours->kv_heads) {
            cut heads = cut_at(pools, p->at_head);
            pd_status status = post_cut(p, &at, &heads);
            if (status != PD_OK)
                return status;
            p->at_head = heads.to;
        }
    }
    return PD_OK;
}
