#include "common/worker/land.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <stdio.h>
#include <string.h>

/* From PD_NOTICE_WRITTEN on: what was written before it has come by then. */
#define WRITTEN_GRACE_NS (50 * PD_NS_PER_MS)

struct pd_land_check {
    pd_land_check *next;
    pd_landing *landing;
    bool under_way;
    pd_check check; /* its blocks are taken from the landing when it is posted */
    uint64_t seals[];
};

/* ---- bits ---- */

static uint64_t bit_of(const pd_landing *landing, uint32_t group, uint32_t block)
{
    return (uint64_t)group * landing->count + (block - landing->first);
}

static bool is_set(const uint64_t *bits, uint64_t bit)
{
    return (bits[bit / 64] >> (bit % 64) & 1) != 0;
}

/* True when it was not set before. */
static bool set(uint64_t *bits, uint64_t bit)
{
    bool fresh = !is_set(bits, bit);

    bits[bit / 64] |= (uint64_t)1 << (bit % 64);
    return fresh;
}

static bool clear(uint64_t *bits, uint64_t bit)
{
    bool was = is_set(bits, bit);

    bits[bit / 64] &= ~((uint64_t)1 << (bit % 64));
    return was;
}

/* ---- making and ending ---- */

void pd_lander_init(pd_lander *lander, const pd_role_options *options, const pd_role_sink *sink)
{
    *lander = (pd_lander){.options = options, .sink = sink, .ticket_next = 1};
}

void pd_lander_fini(pd_lander *lander)
{
    while (lander->head != NULL) {
        pd_land_check *check = lander->head;
        lander->head = check->next;
        check->landing->checks--;
        pd_free(check);
    }
    lander->tail = NULL;
}

pd_status pd_landing_init(pd_landing *landing, const pd_lander *lander, const pd_request_key *key,
                          const char *id, const pd_msg_peer *sender, uint32_t count_max)
{
    uint32_t groups = lander->options->layout.groups;
    size_t words = ((size_t)groups * count_max + 63) / 64;

    *landing = (pd_landing){.key = *key,
                            .sender = sender->incarnation,
                            .sender_session = sender->session,
                            .groups = groups,
                            .count_max = count_max};
    snprintf(landing->id, sizeof landing->id, "%s", id);
    memcpy(landing->sender_name, sender->name, sizeof landing->sender_name);
    landing->came = pd_calloc(words * 3, sizeof *landing->came);
    if (landing->came == NULL)
        return PD_E_NOMEM;
    landing->good = landing->came + words;
    landing->again = landing->good + words;
    return PD_OK;
}

void pd_landing_fini(pd_landing *landing)
{
    pd_assert(landing->checks == 0);
    pd_free(landing->came);
    landing->came = NULL;
}

void pd_landing_begin(pd_landing *landing, uint32_t first, uint32_t count, uint32_t tokens,
                      const pd_block *blocks)
{
    pd_assert(landing->to_land == 0 && count <= landing->count_max);
    landing->first = first;
    landing->count = count;
    landing->tokens = tokens;
    landing->blocks = blocks;
    landing->to_land = count * landing->groups;
}

bool pd_landing_landed(const pd_landing *landing)
{
    return landing->good_count == landing->to_land && landing->checks == 0;
}

bool pd_landing_written(const pd_landing *landing)
{
    return landing->closed || landing->came_count == landing->to_land;
}

bool pd_landing_is_aborted(const pd_landing *landing, const pd_role_options *options,
                           const pd_notice *abort)
{
    if (abort->sender != landing->sender || abort->receiver != options->incarnation ||
        abort->key.router != landing->key.router)
        return false;
    /* The word on a lost router may come late, when that is back and has leased anew. */
    if (abort->key.number == 0)
        return landing->sender_session < abort->key.epoch;
    return abort->key.number == landing->key.number && abort->key.epoch == landing->key.epoch;
}

bool pd_landing_over(const pd_landing *landing)
{
    return pd_landing_written(landing) && landing->checks == 0;
}

/* ---- checks ---- */

static void append(pd_lander *lander, pd_land_check *check)
{
    check->next = NULL;
    if (lander->tail != NULL)
        lander->tail->next = check;
    else
        lander->head = check;
    lander->tail = check;
}

static void take_out(pd_lander *lander, pd_land_check *before, pd_land_check *check)
{
    if (before != NULL)
        before->next = check->next;
    else
        lander->head = check->next;
    if (lander->tail == check)
        lander->tail = before;
}

static void post(pd_lander *lander)
{
    for (pd_land_check *c = lander->head; c != NULL; c = c->next) {
        if (c->under_way)
            continue;
        c->check.blocks = c->landing->blocks + (c->check.first - c->landing->first);
        if (lander->sink->verify(lander->sink->ctx, &c->check) != PD_OK)
            return; /* no room: in order, later */
        c->under_way = true;
    }
}

void pd_land_retry(pd_lander *lander)
{
    post(lander);
}

/* Appends a check of the range; PD_E_NOMEM. */
static pd_status add_check(pd_lander *lander, pd_landing *landing, const pd_check *range)
{
    size_t seals = (size_t)range->groups * range->count * range->slices;
    pd_land_check *c = pd_malloc(sizeof *c + seals * sizeof *c->seals);

    if (c == NULL)
        return PD_E_NOMEM;
    memcpy(c->seals, range->seals, seals * sizeof *c->seals);
    c->landing = landing;
    c->under_way = false;
    c->check = *range;
    c->check.ticket = lander->ticket_next++;
    c->check.key = landing->key;
    c->check.seals = c->seals;
    landing->checks++;
    append(lander, c);
    return PD_OK;
}

void pd_land_give_up(pd_lander *lander, pd_landing *landing)
{
    landing->given_up = true;
    for (pd_land_check *c = lander->head, *before = NULL, *next; c != NULL; c = next) {
        next = c->next;
        if (c->landing != landing || c->under_way) {
            before = c;
            continue;
        }
        take_out(lander, before, c);
        landing->checks--;
        pd_free(c);
    }
}

/* ---- notices ---- */

static bool fits(const pd_landing *landing, const pd_notice *notice, const pd_role_options *options)
{
    uint32_t block_tokens = options->layout.block_tokens;
    uint64_t end = (uint64_t)notice->first_block + notice->count;
    uint32_t landing_end = landing->first + landing->count;

    if (notice->sender != landing->sender || notice->receiver != options->incarnation)
        return false;
    if (notice->groups == 0 || (uint64_t)notice->group + notice->groups > landing->groups)
        return false;
    if (notice->count == 0 || notice->first_block < landing->first || end > landing_end)
        return false;
    /* whole heads, none of them on two of our ranks */
    if (notice->slices == 0 || options->layout.kv_heads % notice->slices != 0 ||
        notice->slices % options->layout.ranks != 0)
        return false;
    uint32_t valid = block_tokens;
    if (end == landing_end)
        valid = landing->tokens - (uint32_t)(end - 1) * block_tokens;
    return notice->valid_tokens == valid && (notice->seals != NULL) == options->seals;
}

/* How many of its blocks have not come before; 0 also when one of them is awaited again and this is
 * the first writing of it, late. */
static uint32_t count_fresh(const pd_landing *landing, const pd_notice *notice)
{
    uint32_t fresh = 0;

    for (uint32_t g = notice->group; g < notice->group + notice->groups; g++) {
        for (uint32_t i = 0; i < notice->count; i++) {
            uint64_t bit = bit_of(landing, g, notice->first_block + i);
            if (is_set(landing->came, bit))
                continue;
            if (notice->again == 0 && is_set(landing->again, bit))
                return 0;
            fresh++;
        }
    }
    return fresh;
}

static void mark(pd_landing *landing, uint64_t *bits, uint32_t *count, const pd_check *range)
{
    for (uint32_t g = range->group_first; g < range->group_first + range->groups; g++) {
        for (uint32_t i = 0; i < range->count; i++)
            *count += set(bits, bit_of(landing, g, range->first + i));
    }
}

void pd_land_heard(pd_lander *lander, uint64_t sender, uint64_t now_ns)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < PD_LAND_SENDERS_MAX; i++) {
        if (lander->heard[i].sender == sender) {
            at = i;
            break;
        }
        if (lander->heard[i].ns < lander->heard[at].ns) /* 0 where there is none */
            at = i;
    }
    lander->heard[at].sender = sender;
    lander->heard[at].ns = now_ns;
}

static uint64_t heard_ns(const pd_lander *lander, uint64_t sender)
{
    for (uint32_t i = 0; i < PD_LAND_SENDERS_MAX; i++) {
        if (lander->heard[i].sender == sender)
            return lander->heard[i].ns;
    }
    return 0;
}

pd_land_result pd_land_on_notice(pd_lander *lander, pd_landing *landing, const pd_notice *notice,
                                 uint64_t now_ns)
{
    pd_check range = {
        .group_first = notice->group,
        .groups = notice->groups,
        .first = notice->first_block,
        .count = notice->count,
        .valid_tokens = notice->valid_tokens,
        .slices = notice->slices,
        .seals = notice->seals,
    };

    if (pd_landing_landed(landing) || landing->closed || !fits(landing, notice, lander->options) ||
        count_fresh(landing, notice) == 0)
        return PD_LAND_IGNORED;
    bool check = lander->options->seals && !landing->given_up;
    if (check && add_check(lander, landing, &range) != PD_OK) {
        pd_log_req_warn(landing->id, "msg=\"no memory to check blocks: as if they had not come\"");
        return PD_LAND_IGNORED;
    }
    mark(landing, landing->came, &landing->came_count, &range);
    landing->heard_ns = now_ns;
    if (check)
        post(lander);
    else if (!landing->given_up)
        mark(landing, landing->good, &landing->good_count, &range);
    return pd_landing_landed(landing) ? PD_LAND_DONE : PD_LAND_PART;
}

/* ---- what is missing ---- */

static void say_refetch(const pd_lander *lander, pd_landing *landing, uint32_t group,
                        uint32_t first, uint32_t count, const char *what)
{
    pd_message message = {.kind = PD_MSG_REFETCH};
    pd_msg_refetch *refetch = &message.refetch;

    refetch->key = landing->key;
    refetch->group = group;
    refetch->first_block = first;
    refetch->count = count;
    snprintf(refetch->reason, sizeof refetch->reason,
             "%s: blocks %u to %u of layer group %u, %s to %s", what, first, first + count - 1,
             group, landing->sender_name, lander->options->name);
    for (uint32_t i = 0; i < count; i++)
        set(landing->again, bit_of(landing, group, first + i));
    landing->asked_count++;
    pd_log_req_warn(
        landing->id,
        "msg=\"fetched again: %s\" sender=%016llx receiver=%016llx request=%llu epoch=%u",
        refetch->reason, (unsigned long long)landing->sender,
        (unsigned long long)lander->options->incarnation, (unsigned long long)landing->key.number,
        landing->key.epoch);
    lander->sink->send(lander->sink->ctx, landing->key.router, &message);
}

/* How many runs of blocks have not come; with ask they are asked for. */
static uint32_t missing_runs(const pd_lander *lander, pd_landing *landing, bool ask)
{
    uint32_t runs = 0;

    for (uint32_t g = 0; g < landing->groups; g++) {
        for (uint32_t i = 0, run; i < landing->count; i += run + 1) {
            for (run = 0; i + run < landing->count; run++) {
                uint64_t bit = bit_of(landing, g, landing->first + i + run);
                if (is_set(landing->came, bit) || is_set(landing->again, bit))
                    break;
            }
            runs += run > 0;
            if (run > 0 && ask)
                say_refetch(lander, landing, g, landing->first + i, run, "missing");
        }
    }
    return runs;
}

bool pd_land_ask_missing(pd_lander *lander, pd_landing *landing)
{
    if (landing->asked_missing || pd_landing_written(landing))
        return true;
    landing->asked_missing = true;
    uint32_t runs = missing_runs(lander, landing, false);
    if (runs + landing->asked_bad <= PD_REFETCHES_MAX) {
        missing_runs(lander, landing, true);
        return true;
    }
    /* What is asked for comes by its second writing alone; the rest may come yet, by its first. */
    pd_log_req_warn(landing->id,
                    "msg=\"too much is missing to be asked for\" runs=%u sender=%s receiver=%s "
                    "request=%llu epoch=%u",
                    runs, landing->sender_name, lander->options->name,
                    (unsigned long long)landing->key.number, landing->key.epoch);
    return false;
}

/* ---- time ---- */

void pd_land_await(pd_landing *landing, uint64_t patience_ns, uint64_t now_ns)
{
    landing->patience_ns = patience_ns;
    landing->awaited_ns = now_ns;
}

bool pd_land_on_written(const pd_lander *lander, pd_landing *landing, const pd_notice *notice,
                        uint64_t now_ns)
{
    if (notice->sender != landing->sender || notice->receiver != lander->options->incarnation)
        return false;
    landing->written_ns = now_ns == 0 ? 1 : now_ns;
    if (notice->again > landing->written_again)
        landing->written_again = notice->again;
    return true;
}

/* Something that was asked for again has not come. */
static bool lacks_again(const pd_landing *landing)
{
    uint64_t bits = (uint64_t)landing->groups * landing->count;

    for (uint64_t i = 0; i < (bits + 63) / 64; i++) {
        if ((landing->again[i] & ~landing->came[i]) != 0)
            return true;
    }
    return false;
}

static pd_land_result take_written(pd_lander *lander, pd_landing *landing)
{
    landing->written_ns = 0;
    if (landing->written_again < landing->asked_count)
        return PD_LAND_PART; /* said before it heard what else is to be written */
    if (!lacks_again(landing) && pd_land_ask_missing(lander, landing))
        return PD_LAND_PART;
    pd_log_req_warn(landing->id,
                    "msg=\"blocks that were written did not come\" sender=%s "
                    "receiver=%s asked_again=%u request=%llu epoch=%u",
                    landing->sender_name, lander->options->name, landing->asked_count,
                    (unsigned long long)landing->key.number, landing->key.epoch);
    return PD_LAND_BROKEN;
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

uint64_t pd_landing_silence_ns(const pd_landing *landing, uint64_t now_ns)
{
    return now_ns - later(landing->awaited_ns, landing->heard_ns);
}

pd_land_result pd_land_tick(pd_lander *lander, pd_landing *landing, uint64_t now_ns)
{
    bool begun = landing->to_land > 0;

    if (landing->given_up || landing->closed || (begun && pd_landing_written(landing)))
        return PD_LAND_PART;
    if (begun && landing->written_ns != 0 && now_ns >= landing->written_ns + WRITTEN_GRACE_NS) {
        pd_land_result result = take_written(lander, landing);
        if (result != PD_LAND_PART)
            return result;
    }
    if (landing->patience_ns == 0)
        return PD_LAND_PART;
    /* What comes from the sender says nothing of blocks that it has not been told of. */
    uint64_t sender_ns = begun ? later(heard_ns(lander, landing->sender), landing->heard_ns) : 0;
    uint64_t silent_ns = now_ns - later(landing->awaited_ns, sender_ns);
    if (silent_ns >= landing->patience_ns ||
        pd_landing_silence_ns(landing, now_ns) >= PD_LAND_TURNS * landing->patience_ns)
        return PD_LAND_LATE;
    if (begun && silent_ns >= landing->patience_ns / 2)
        pd_land_ask_missing(lander, landing);
    return PD_LAND_PART;
}

/* ---- what is wrong ---- */

/* The verifier stops at the first bad block: what comes behind it in the range is checked anew. */
static pd_status check_rest(pd_lander *lander, pd_landing *landing, const pd_check *range,
                            uint32_t bad_group, uint32_t bad_block)
{
    uint32_t behind = range->first + range->count - bad_block - 1;
    uint32_t groups_behind = range->group_first + range->groups - bad_group - 1;
    uint64_t at = (uint64_t)(bad_group - range->group_first) * range->count;
    pd_check rest = *range;
    pd_status status = PD_OK;

    rest.group_first = bad_group;
    rest.groups = 1;
    rest.first = bad_block + 1;
    rest.count = behind;
    rest.seals = range->seals + (at + (bad_block - range->first) + 1) * range->slices;
    if (behind > 0)
        status = add_check(lander, landing, &rest);
    rest = *range;
    rest.group_first = bad_group + 1;
    rest.groups = groups_behind;
    rest.seals = range->seals + (at + range->count) * range->slices;
    if (status == PD_OK && groups_behind > 0)
        status = add_check(lander, landing, &rest);
    return status;
}

/* What lies before the bad block in the range has matched. */
static void mark_before(pd_landing *landing, const pd_check *range, uint32_t bad_group,
                        uint32_t bad_block)
{
    pd_check before = *range;

    before.groups = bad_group - range->group_first;
    mark(landing, landing->good, &landing->good_count, &before);
    before.group_first = bad_group;
    before.groups = 1;
    before.count = bad_block - range->first;
    mark(landing, landing->good, &landing->good_count, &before);
}

/* "..., KV heads 2 to 3 (slice 1 of 4, rank 0 here)" */
static void say_slice(const pd_lander *lander, const pd_check *range, uint32_t slice, char *text,
                      size_t size)
{
    const pd_kv_layout *layout = &lander->options->layout;
    uint32_t heads = layout->kv_heads / range->slices, first = slice * heads;

    pd_assert(slice < range->slices);
    snprintf(text, size,
             "a seal does not match its bytes, KV heads %u to %u (slice %u of %u, "
             "rank %u here)",
             first, first + heads - 1, slice, range->slices, first / layout->rank_heads);
}

static pd_land_result on_bad(pd_lander *lander, pd_landing *landing, const pd_check *range,
                             const pd_checked *checked)
{
    uint32_t group = checked->bad_group, block = checked->bad_block;
    char what[96] = "a seal does not match its bytes";

    pd_assert(group >= range->group_first && group - range->group_first < range->groups);
    pd_assert(block >= range->first && block - range->first < range->count);
    if (range->slices > 1)
        say_slice(lander, range, checked->bad_slice, what, sizeof what);
    uint64_t bit = bit_of(landing, group, block);
    if (landing->asked_bad || landing->closed || is_set(landing->again, bit)) {
        pd_log_req_warn(landing->id,
                        "msg=\"a block's seal does not match: %s\" group=%u block=%u sender=%s "
                        "receiver=%s request=%llu epoch=%u",
                        what, group, block, landing->sender_name, lander->options->name,
                        (unsigned long long)landing->key.number, landing->key.epoch);
        return PD_LAND_BROKEN;
    }
    mark_before(landing, range, group, block);
    landing->asked_bad = true;
    landing->came_count -= clear(landing->came, bit);
    landing->good_count -= clear(landing->good, bit);
    say_refetch(lander, landing, group, block, 1, what);
    return check_rest(lander, landing, range, group, block) == PD_OK ? PD_LAND_PART
                                                                     : PD_LAND_BROKEN;
}

pd_land_result pd_land_on_checked(pd_lander *lander, const pd_checked *checked,
                                  pd_landing **landing_out)
{
    pd_land_check *before = NULL, *c = lander->head;
    pd_land_result result = PD_LAND_PART;

    while (c != NULL && c->check.ticket != checked->ticket) {
        before = c;
        c = c->next;
    }
    *landing_out = NULL;
    if (c == NULL || !c->under_way)
        return PD_LAND_IGNORED;
    take_out(lander, before, c);
    pd_landing *landing = c->landing;
    landing->checks--;
    if (!landing->given_up && checked->good) {
        mark(landing, landing->good, &landing->good_count, &c->check);
        result = pd_landing_landed(landing) ? PD_LAND_DONE : PD_LAND_PART;
    } else if (!landing->given_up && checked->unchecked != PD_OK) {
        pd_log_req_error(landing->id,
                         "msg=\"landed blocks cannot be compared with their seals here\" status=%s "
                         "group=%u first=%u blocks=%u sender=%s receiver=%s",
                         pd_status_name(checked->unchecked), c->check.group_first, c->check.first,
                         c->check.count, landing->sender_name, lander->options->name);
        result = PD_LAND_UNCHECKED;
    } else if (!landing->given_up) {
        result = on_bad(lander, landing, &c->check, checked);
    }
    pd_free(c);
    post(lander);
    *landing_out = landing;
    return result;
}
