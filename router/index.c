#include "router/index.h"
#include "common/base/mem.h"

#include <string.h>

enum { CELLS_MIN = 64 };

typedef struct set {
    bool open;
    bool synced;   /* entries are what the worker holds */
    bool snapshot; /* one is coming in */
    uint64_t incarnation;
    uint64_t next;      /* number of the next event */
    uint64_t behind_at; /* next when a check last found us behind; UINT64_MAX: it did not */
    uint64_t asked_ns;  /* 0: not asked yet */
    uint32_t blocks_max;
    uint32_t count;
    uint32_t cells_count; /* a power of two, at most half full */
    pd_hash128 *cells;    /* all zero: empty */
} set;

struct router_index {
    uint32_t slots_max;
    router_index_counters counters;
    set sets[];
};

pd_status router_index_create(uint32_t slots_max, router_index **index_out)
{
    router_index *index = pd_calloc(1, sizeof *index + slots_max * sizeof(set));
    if (index == NULL)
        return PD_E_NOMEM;
    index->slots_max = slots_max;
    *index_out = index;
    return PD_OK;
}

static void clear(set *s)
{
    pd_free(s->cells);
    s->cells = NULL;
    s->cells_count = s->count = 0;
}

void router_index_destroy(router_index *index)
{
    if (index == NULL)
        return;
    for (uint32_t i = 0; i < index->slots_max; i++)
        clear(&index->sets[i]);
    pd_free(index);
}

void router_index_open(router_index *index, uint32_t slot, uint64_t incarnation,
                       uint32_t blocks_max)
{
    pd_assert(slot < index->slots_max);
    set *s = &index->sets[slot];
    clear(s);
    *s = (set){.open = true,
               .incarnation = incarnation,
               .blocks_max = blocks_max,
               .behind_at = UINT64_MAX};
}

void router_index_close(router_index *index, uint32_t slot)
{
    pd_assert(slot < index->slots_max);
    clear(&index->sets[slot]);
    index->sets[slot] = (set){0};
}

static bool is_empty(pd_hash128 hash)
{
    return hash.lo == 0 && hash.hi == 0;
}

static bool same(pd_hash128 a, pd_hash128 b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

/* Hashes come over the wire, so they are mixed again: no sender can fill one chain. */
static uint32_t home(const set *s, pd_hash128 hash)
{
    return (uint32_t)pd_mix64(hash.lo ^ (hash.hi * 3)) & (s->cells_count - 1);
}

static bool contains(const set *s, pd_hash128 hash)
{
    if (s->count == 0)
        return false;
    for (uint32_t i = home(s, hash); !is_empty(s->cells[i]); i = (i + 1) & (s->cells_count - 1)) {
        if (same(s->cells[i], hash))
            return true;
    }
    return false;
}

static void put(set *s, pd_hash128 hash)
{
    uint32_t i = home(s, hash);
    while (!is_empty(s->cells[i]) && !same(s->cells[i], hash))
        i = (i + 1) & (s->cells_count - 1);
    if (is_empty(s->cells[i]))
        s->count++;
    s->cells[i] = hash;
}

static bool grow(set *s)
{
    uint32_t cells_count = s->cells_count == 0 ? CELLS_MIN : s->cells_count * 2;
    pd_hash128 *cells = pd_calloc(cells_count, sizeof *cells);
    if (cells == NULL)
        return false;
    set bigger = *s;
    bigger.cells = cells;
    bigger.cells_count = cells_count;
    bigger.count = 0;
    for (uint32_t i = 0; i < s->cells_count; i++) {
        if (!is_empty(s->cells[i]))
            put(&bigger, s->cells[i]);
    }
    pd_free(s->cells);
    *s = bigger;
    return true;
}

/* False: the heap is exhausted. */
static bool insert(router_index *index, set *s, pd_hash128 hash)
{
    if (is_empty(hash) || contains(s, hash))
        return true;
    if (s->count >= s->blocks_max) {
        index->counters.dropped++;
        return true;
    }
    if ((s->count + 1) * 2 > s->cells_count && !grow(s))
        return false;
    put(s, hash);
    return true;
}

/* Removal closes the hole, so that no tombstones pile up. */
static void erase(set *s, pd_hash128 hash)
{
    if (!contains(s, hash))
        return;
    uint32_t mask = s->cells_count - 1;
    uint32_t hole = home(s, hash);
    while (!same(s->cells[hole], hash))
        hole = (hole + 1) & mask;
    for (uint32_t i = (hole + 1) & mask; !is_empty(s->cells[i]); i = (i + 1) & mask) {
        uint32_t from_home = (i - home(s, s->cells[i])) & mask;
        if (from_home >= ((i - hole) & mask)) {
            s->cells[hole] = s->cells[i];
            hole = i;
        }
    }
    s->cells[hole] = (pd_hash128){0, 0};
    s->count--;
}

static void mark_stale(router_index *index, set *s)
{
    if (s->synced || s->snapshot)
        index->counters.gaps++;
    s->synced = s->snapshot = false;
    s->asked_ns = 0;
    s->behind_at = UINT64_MAX;
    clear(s);
}

static void apply_snapshot(router_index *index, set *s, const pd_msg_kv_events *events)
{
    if (events->snapshot_first) {
        clear(s);
        s->snapshot = true;
        s->synced = false;
    }
    if (!s->snapshot)
        return; /* its first part was lost: the next one will tell */
    for (uint32_t i = 0; i < events->events_count; i++) {
        if (events->events[i].kind == PD_KV_STORED && !insert(index, s, events->events[i].hash)) {
            mark_stale(index, s);
            return;
        }
    }
    if (events->snapshot_last) {
        s->snapshot = false;
        s->synced = true;
        s->next = events->first_sequence + 1;
        s->behind_at = UINT64_MAX;
        index->counters.snapshots++;
    }
}

void router_index_apply(router_index *index, uint32_t slot, const pd_msg_kv_events *events)
{
    pd_assert(slot < index->slots_max);
    set *s = &index->sets[slot];
    if (!s->open || s->incarnation != events->incarnation)
        return;
    if (events->snapshot) {
        apply_snapshot(index, s, events);
        return;
    }
    if (!s->synced)
        return; /* a snapshot is on its way and covers these */
    if (events->first_sequence > s->next) {
        mark_stale(index, s);
        return;
    }
    for (uint32_t i = 0; i < events->events_count; i++) {
        if (events->first_sequence + i < s->next)
            continue; /* known already */
        const pd_kv_event *event = &events->events[i];
        index->counters.events++;
        if (event->kind == PD_KV_STORED && !insert(index, s, event->hash)) {
            mark_stale(index, s);
            return;
        }
        if (event->kind == PD_KV_REMOVED)
            erase(s, event->hash);
        if (event->kind == PD_KV_CLEARED)
            clear(s);
        s->next++;
    }
}

void router_index_check(router_index *index, uint32_t slot, uint64_t last_sequence)
{
    pd_assert(slot < index->slots_max);
    set *s = &index->sets[slot];
    if (!s->open || !s->synced)
        return;
    if (last_sequence < s->next) {
        s->behind_at = UINT64_MAX;
    } else if (s->behind_at == s->next) {
        mark_stale(index, s); /* the same place as at the last check: they will not come */
    } else {
        s->behind_at = s->next;
    }
}

bool router_index_wants_snapshot(router_index *index, uint32_t slot, uint64_t now_ns,
                                 uint64_t again_ns)
{
    pd_assert(slot < index->slots_max);
    set *s = &index->sets[slot];
    if (!s->open || s->synced)
        return false;
    if (s->asked_ns != 0 && now_ns - s->asked_ns < again_ns)
        return false;
    s->asked_ns = now_ns == 0 ? 1 : now_ns;
    return true;
}

uint32_t router_index_prefix(const router_index *index, uint32_t slot, const pd_hash128 *hashes,
                             uint32_t count)
{
    pd_assert(slot < index->slots_max);
    const set *s = &index->sets[slot];
    if (!s->synced || count == 0 || !contains(s, hashes[0]))
        return 0;
    uint32_t held = 1, bound = count; /* blocks before held are there, block `bound` is not */
    while (held < bound) {
        uint32_t middle = held + (bound - held) / 2;
        if (contains(s, hashes[middle]))
            held = middle + 1;
        else
            bound = middle;
    }
    return held;
}

uint32_t router_index_blocks(const router_index *index, uint32_t slot)
{
    pd_assert(slot < index->slots_max);
    return index->sets[slot].count;
}

bool router_index_synced(const router_index *index, uint32_t slot)
{
    pd_assert(slot < index->slots_max);
    return index->sets[slot].synced;
}

router_index_counters router_index_counters_of(const router_index *index)
{
    return index->counters;
}
