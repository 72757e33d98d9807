#include "decode-worker/room.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

static const uint64_t patience_ns = 250 * PD_NS_PER_MS; /* short answers end meanwhile */
/* From the word to the router. It moves the sequence or ends it here; neither takes so long. */
static const uint64_t overdue_ns = 5 * PD_NS_PER_S;

enum { GROW_RUN = 4 }; /* blocks taken at once where there is plenty: neighbours stay neighbours */

pd_status decode_room_init(decode_room *room, const pd_role_options *options,
                           const pd_blocks *blocks, pd_lease_table *leases, uint32_t loads_max)
{
    *room = (decode_room){
        .options = options, .blocks = blocks, .leases = leases, .loads_max = loads_max};
    decode_lengths_init(&room->lengths);
    /* one more: the newcomer */
    room->loads = pd_calloc((size_t)loads_max + 1, sizeof *room->loads);
    return room->loads == NULL ? PD_E_NOMEM : PD_OK;
}

void decode_room_fini(decode_room *room)
{
    pd_free(room->loads);
    *room = (decode_room){0};
}

uint64_t decode_room_order(decode_room *room)
{
    return room->order_next++;
}

static uint32_t block_tokens_of(const decode_room *room)
{
    return room->options->layout.block_tokens;
}

static uint32_t predicted_of(const decode_room *room, const decode_sequence *s)
{
    if (!s->started)
        return decode_lengths_predict(&room->lengths, 0, s->answer_max);
    uint32_t answered = s->tokens_count - s->answer_from;
    return decode_lengths_predict(&room->lengths, answered, s->max_tokens) - answered;
}

static decode_load load_of(decode_sequence *s)
{
    uint32_t blocks = s->lease->blocks_count + s->lease->promised;
    uint32_t tokens = s->started ? s->tokens_count : s->prompt_tokens;

    return (decode_load){
        .who = s,
        .priority = s->priority,
        .order = s->order,
        .tokens = tokens,
        .blocks = blocks,
        .own = blocks - s->lease->held,
        .possible = s->capacity > tokens ? s->capacity - tokens : 0,
        .standing = s->standing,
    };
}

/* The loads of all that hold blocks or are promised some, with their predicted ends. */
static uint32_t collect_all(decode_room *room, const decode_sequence *all)
{
    uint32_t count = 0;

    for (const decode_sequence *s = all; s != NULL; s = s->next) {
        if (s->given_up || s->ending)
            continue;
        pd_assert(count < room->loads_max);
        decode_load *load = &room->loads[count++];
        *load = load_of((decode_sequence *)s);
        load->predicted = predicted_of(room, s);
        if (load->predicted > load->possible)
            load->predicted = load->possible;
    }
    return count;
}

/* The loads of those that run or stand. One that has no place in the batch yet takes nothing now,
 * and can give way all the same. */
static uint32_t collect_running(decode_room *room, const decode_batch *batch,
                                const decode_sequence *all)
{
    uint32_t count = 0, place = 0;

    for (decode_sequence *s = batch->head; s != NULL; s = s->batch_next, place++) {
        pd_assert(count < room->loads_max);
        room->loads[count] = load_of(s);
        if (place >= batch->running_max)
            room->loads[count].possible = 0;
        count++;
    }
    for (const decode_sequence *s = all; room->standing > 0 && s != NULL; s = s->next) {
        if (!s->standing)
            continue;
        pd_assert(count < room->loads_max);
        room->loads[count++] = load_of((decode_sequence *)s);
    }
    return count;
}

/* Whether the predicted peak fits. Those that rank behind the newcomer do not grow in this view:
 * they would give way to it. */
static bool peak_fits(decode_room *room, uint32_t count, const decode_load *newcomer,
                      uint32_t claimed, uint32_t limit)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < count; i++) {
        if (room->loads[i].priority >= newcomer->priority)
            room->loads[kept++] = room->loads[i];
    }
    room->loads[kept++] = *newcomer;
    return decode_pressure_peak(room->loads, kept, claimed + newcomer->blocks,
                                block_tokens_of(room)) <= limit;
}

pd_status decode_room_admit(decode_room *room, const decode_sequence *all,
                            const decode_newcomer *asked, double step_ms, uint32_t *wait_steps_out,
                            const char **reason_out)
{
    uint32_t block_tokens = block_tokens_of(room);
    pd_ledger ledger = pd_blocks_ledger(room->blocks);
    uint32_t limit = ledger.total - ledger.quarantined;
    uint32_t room_now = pd_lease_room(room->leases);
    uint32_t claimed = limit > room_now ? limit - room_now : 0;
    uint32_t horizon = decode_pressure_horizon(step_ms, block_tokens);
    uint32_t count = collect_all(room, all);
    uint64_t next = 0;
    bool one_stands = false;
    decode_load newcomer = {
        .priority = asked->priority,
        .order = UINT64_MAX,
        .tokens = asked->tokens,
        .blocks = asked->blocks,
        .own = asked->blocks,
        .predicted = decode_lengths_predict(&room->lengths, 0, asked->answer_max),
    };

    for (uint32_t i = 0; i < count; i++) {
        const decode_load *load = &room->loads[i];
        if (load->priority < asked->priority)
            continue;
        one_stands = one_stands || load->standing;
        if (!load->standing)
            next += decode_pressure_need(load, horizon, block_tokens);
    }
    if (one_stands)
        *reason_out = "sequences stand still for want of KV blocks";
    else if (asked->blocks + next > room_now)
        *reason_out = "no room for the KV blocks";
    else if (count > 0 && !peak_fits(room, count, &newcomer, claimed, limit))
        *reason_out = "no room for the KV blocks that answers are predicted to need";
    else
        return PD_OK;
    count = collect_all(room, all);
    room->loads[count++] = newcomer;
    *wait_steps_out =
        decode_pressure_wait(room->loads, count, claimed + newcomer.blocks, limit, block_tokens);
    return PD_E_OVERLOAD;
}

static void stand(decode_room *room, decode_batch *batch, decode_sequence *s, uint64_t now_ns)
{
    decode_batch_remove(batch, s);
    s->standing = true;
    s->stalled = false;
    s->stood_ns = now_ns;
    room->standing++;
    pd_log_req_debug(s->id, "msg=\"stands still for want of KV blocks\" blocks=%u room=%u",
                     s->lease->blocks_count, pd_lease_room(room->leases));
}

static void go_on(decode_room *room, decode_batch *batch, decode_sequence *s)
{
    s->standing = false;
    room->standing--;
    decode_batch_add(batch, s);
}

void decode_room_leave(decode_room *room, decode_sequence *sequence)
{
    if (!sequence->standing)
        return;
    sequence->standing = false;
    sequence->told = false;
    room->standing--;
}

/* The first in rank of those that stand untold, when there is room for it; also when nobody runs:
 * whoever is alone gets on. */
static void let_go_on(decode_room *room, decode_batch *batch, uint32_t count, uint32_t horizon)
{
    uint32_t running_count = 0;

    for (uint32_t i = 0; i < count; i++)
        running_count += !room->loads[i].standing;
    for (uint32_t i = 0; i < count; i++) {
        decode_load *load = &room->loads[i];
        decode_sequence *s = load->who;
        if (!load->standing || s->told)
            continue;
        if (running_count > 0 &&
            !decode_pressure_may_go_on(room->loads, count, load, pd_lease_room(room->leases),
                                       horizon, block_tokens_of(room)))
            return;
        load->standing = false;
        running_count++;
        go_on(room, batch, s);
    }
}

static void grow(decode_room *room, decode_sequence *s, uint32_t spare)
{
    uint32_t block_tokens = block_tokens_of(room);
    uint32_t blocks = (s->tokens_count + block_tokens - 1) / block_tokens;
    uint32_t most = (s->capacity + block_tokens - 1) / block_tokens;

    if (blocks <= s->lease->blocks_count)
        return;
    uint32_t need = blocks - s->lease->blocks_count;
    if (need > pd_lease_room(room->leases)) {
        s->stalled = true;
        room->stalled++;
        return;
    }
    if (spare > need + GROW_RUN && blocks + GROW_RUN - 1 <= most)
        need += GROW_RUN - 1;
    pd_status status = pd_lease_grow(room->leases, s->lease, need);
    pd_assert(status == PD_OK);
}

void decode_room_prepare(decode_room *room, decode_batch *batch, const decode_sequence *all,
                         double step_ms, uint64_t now_ns)
{
    uint32_t block_tokens = block_tokens_of(room);
    uint32_t horizon = decode_pressure_horizon(step_ms, block_tokens);
    uint32_t room_now = pd_lease_room(room->leases);
    uint32_t count = collect_running(room, batch, all);

    decode_pressure_rank(room->loads, count);
    if (room->standing > 0)
        let_go_on(room, batch, count, horizon);
    uint32_t need = decode_pressure_relieve(room->loads, count, room_now, horizon, block_tokens);
    for (uint32_t i = 0; i < count; i++) {
        if (room->loads[i].gives_way)
            stand(room, batch, room->loads[i].who, now_ns);
    }
    uint32_t place = 0;
    for (decode_sequence *s = batch->head; s != NULL; s = s->batch_next)
        s->stalled = place++ >= batch->running_max; /* until it has its blocks */
    for (uint32_t i = 0; i < count; i++) {
        decode_sequence *s = room->loads[i].who;
        uint32_t left = pd_lease_room(room->leases);
        if (!s->standing && !s->stalled)
            grow(room, s, left / 2 > need ? left / 2 - need : 0);
    }
}

decode_sequence *decode_room_next_told(decode_sequence *all, uint64_t now_ns)
{
    for (decode_sequence *s = all; s != NULL; s = s->next) {
        if (!s->standing || s->told || s->given_up || s->ending ||
            now_ns < s->stood_ns + patience_ns)
            continue;
        s->told = true;
        s->stood_ns = now_ns;
        return s;
    }
    return NULL;
}

decode_sequence *decode_room_next_overdue(decode_sequence *all, uint64_t now_ns)
{
    for (decode_sequence *s = all; s != NULL; s = s->next) {
        if (s->told && !s->moving && !s->given_up && now_ns >= s->stood_ns + overdue_ns)
            return s;
    }
    return NULL;
}
