#include "common/kv/prefix_cache.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"

#define NOT_IN_HEAP UINT32_MAX

enum { SPARE_PART = 16 }; /* of the pool is evicted beyond what is needed */

/* What is known about a block: a node of the tree while the pool says that it is cached. */
typedef struct node {
    pd_hash128 hash;
    pd_hash128 parent_hash;
    pd_block parent; /* PD_BLOCK_NONE at position 0 */
    uint32_t position;
    uint32_t children;
    uint32_t busy_children; /* of these, claimed or with busy children of their own */
    uint32_t heap_index;    /* NOT_IN_HEAP unless evictable */
    uint64_t used;          /* value of cache->clock when last claimed or let go */
} node;

struct pd_prefix_cache {
    pd_kv_pool *pool;
    uint32_t blocks;
    uint64_t clock; /* counts uses; not a time */
    node *nodes;    /* [blocks] */

    /* hash to block: open addressing, linear probing, at most half full */
    uint32_t slots_mask;
    pd_block *slots; /* [slots_mask + 1] */

    /* evictable leaves, a binary heap, least recently used on top */
    uint32_t heap_len;
    pd_block *heap; /* [blocks] */

    uint32_t cached_count; /* nodes in the tree */
    uint32_t busy_count;   /* of these, claimed or with a claimed descendant */

    uint64_t seq;
    uint32_t events_max, events_len, events_head;
    pd_cache_event *events; /* ring [events_max] */
};

pd_status pd_prefix_cache_create(pd_kv_pool *pool, uint32_t events_max, pd_prefix_cache **cache_out)
{
    uint32_t blocks = pd_kv_pool_blocks(pool);
    if (events_max == 0 || blocks > UINT32_MAX / 4)
        return PD_E_INVALID;
    pd_prefix_cache *cache = pd_calloc(1, sizeof *cache);
    if (cache == NULL)
        return PD_E_NOMEM;
    uint32_t slots = 2;
    while (slots < 2 * blocks)
        slots *= 2;
    cache->pool = pool;
    cache->blocks = blocks;
    cache->slots_mask = slots - 1;
    cache->events_max = events_max;
    cache->nodes = pd_calloc(blocks, sizeof *cache->nodes);
    cache->slots = pd_calloc(slots, sizeof *cache->slots);
    cache->heap = pd_calloc(blocks, sizeof *cache->heap);
    cache->events = pd_calloc(events_max, sizeof *cache->events);
    if (cache->nodes == NULL || cache->slots == NULL || cache->heap == NULL ||
        cache->events == NULL) {
        pd_prefix_cache_destroy(cache);
        return PD_E_NOMEM;
    }
    for (uint32_t i = 0; i < slots; i++)
        cache->slots[i] = PD_BLOCK_NONE;
    for (uint32_t i = 0; i < blocks; i++)
        cache->nodes[i].heap_index = NOT_IN_HEAP;
    *cache_out = cache;
    return PD_OK;
}

void pd_prefix_cache_destroy(pd_prefix_cache *cache)
{
    if (cache == NULL)
        return;
    pd_free(cache->nodes);
    pd_free(cache->slots);
    pd_free(cache->heap);
    pd_free(cache->events);
    pd_free(cache);
}

/* ---- events ---- */

static void event_add(pd_prefix_cache *cache, pd_cache_event event)
{
    event.seq = ++cache->seq;
    /* Once one is left out all after it are, until a drain has made room: a reader must not take
     * a later event for the next one. The number is used up in any case. */
    if (cache->events_len == cache->events_max)
        return;
    cache->events[(cache->events_head + cache->events_len) % cache->events_max] = event;
    cache->events_len++;
}

uint32_t pd_prefix_cache_drain(pd_prefix_cache *cache, pd_cache_event *events_out, uint32_t count)
{
    uint32_t taken = count < cache->events_len ? count : cache->events_len;
    for (uint32_t i = 0; i < taken; i++)
        events_out[i] = cache->events[(cache->events_head + i) % cache->events_max];
    cache->events_head = (cache->events_head + taken) % cache->events_max;
    cache->events_len -= taken;
    return taken;
}

uint64_t pd_prefix_cache_seq(const pd_prefix_cache *cache)
{
    return cache->seq;
}

/* ---- hash to block ---- */

static uint32_t home_slot(const pd_prefix_cache *cache, pd_hash128 hash)
{
    return (uint32_t)hash.lo & cache->slots_mask;
}

static pd_block find(const pd_prefix_cache *cache, pd_hash128 hash)
{
    uint32_t slot = home_slot(cache, hash);
    while (cache->slots[slot] != PD_BLOCK_NONE) {
        if (pd_hash128_equal(cache->nodes[cache->slots[slot]].hash, hash))
            return cache->slots[slot];
        slot = (slot + 1) & cache->slots_mask;
    }
    return PD_BLOCK_NONE;
}

static void slot_add(pd_prefix_cache *cache, pd_block block)
{
    uint32_t slot = home_slot(cache, cache->nodes[block].hash);
    while (cache->slots[slot] != PD_BLOCK_NONE)
        slot = (slot + 1) & cache->slots_mask;
    cache->slots[slot] = block;
}

static void slot_remove(pd_prefix_cache *cache, pd_block block)
{
    uint32_t slot = home_slot(cache, cache->nodes[block].hash);
    while (cache->slots[slot] != block)
        slot = (slot + 1) & cache->slots_mask;
    /* close the gap: move back every later entry that may not lie behind it */
    uint32_t gap = slot;
    for (;;) {
        slot = (slot + 1) & cache->slots_mask;
        if (cache->slots[slot] == PD_BLOCK_NONE)
            break;
        uint32_t home = home_slot(cache, cache->nodes[cache->slots[slot]].hash);
        if (((slot - home) & cache->slots_mask) >= ((slot - gap) & cache->slots_mask)) {
            cache->slots[gap] = cache->slots[slot];
            gap = slot;
        }
    }
    cache->slots[gap] = PD_BLOCK_NONE;
}

/* ---- evictable leaves ---- */

static bool heap_before(const pd_prefix_cache *cache, uint32_t a, uint32_t b)
{
    return cache->nodes[cache->heap[a]].used < cache->nodes[cache->heap[b]].used;
}

static void heap_swap(pd_prefix_cache *cache, uint32_t a, uint32_t b)
{
    pd_block block = cache->heap[a];
    cache->heap[a] = cache->heap[b];
    cache->heap[b] = block;
    cache->nodes[cache->heap[a]].heap_index = a;
    cache->nodes[cache->heap[b]].heap_index = b;
}

static void heap_settle(pd_prefix_cache *cache, uint32_t index)
{
    while (index > 0 && heap_before(cache, index, (index - 1) / 2)) {
        heap_swap(cache, index, (index - 1) / 2);
        index = (index - 1) / 2;
    }
    for (;;) {
        uint32_t least = index;
        for (uint32_t child = 2 * index + 1; child <= 2 * index + 2; child++) {
            if (child < cache->heap_len && heap_before(cache, child, least))
                least = child;
        }
        if (least == index)
            return;
        heap_swap(cache, index, least);
        index = least;
    }
}

static bool is_busy(const pd_prefix_cache *cache, pd_block block)
{
    return cache->nodes[block].busy_children != 0 || pd_kv_pool_claims(cache->pool, block) != 0;
}

/* Puts the cached block into the heap or takes it out, as its state asks. */
static void heap_update(pd_prefix_cache *cache, pd_block block)
{
    node *n = &cache->nodes[block];
    bool evictable = n->children == 0 && !is_busy(cache, block);
    if (evictable && n->heap_index == NOT_IN_HEAP) {
        n->heap_index = cache->heap_len;
        cache->heap[cache->heap_len++] = block;
        heap_settle(cache, n->heap_index);
    } else if (!evictable && n->heap_index != NOT_IN_HEAP) {
        uint32_t index = n->heap_index;
        heap_swap(cache, index, cache->heap_len - 1);
        cache->heap_len--;
        n->heap_index = NOT_IN_HEAP;
        if (index < cache->heap_len)
            heap_settle(cache, index);
    }
}

/* ---- the tree ---- */

/* After block became busy or stopped being so: tells its ancestors as far up as that matters. */
static void busy_changed(pd_prefix_cache *cache, pd_block block, bool busy)
{
    for (;;) {
        cache->busy_count += busy ? 1 : -1u;
        heap_update(cache, block);
        pd_block parent = cache->nodes[block].parent;
        if (parent == PD_BLOCK_NONE)
            return;
        bool parent_was_busy = is_busy(cache, parent);
        cache->nodes[parent].busy_children += busy ? 1 : -1u;
        if (is_busy(cache, parent) == parent_was_busy)
            return;
        block = parent;
    }
}

/* All claims on known blocks go through these two, so that the tree learns of the first and of the
 * last. */
static void claim_block(pd_prefix_cache *cache, pd_block block, pd_claim claim)
{
    bool was_busy = is_busy(cache, block);
    pd_kv_pool_claim(cache->pool, block, claim);
    cache->nodes[block].used = ++cache->clock;
    if (!was_busy)
        busy_changed(cache, block, true);
}

static void unclaim_block(pd_prefix_cache *cache, pd_block block, pd_claim claim)
{
    bool cached = pd_kv_pool_is_cached(cache->pool, block);
    pd_kv_pool_unclaim(cache->pool, block, claim);
    if (!cached)
        return;
    cache->nodes[block].used = ++cache->clock;
    if (!is_busy(cache, block))
        busy_changed(cache, block, false);
}

static void node_add(pd_prefix_cache *cache, pd_block block, pd_hash128 hash,
                     pd_hash128 parent_hash, pd_block parent, uint32_t position)
{
    pd_kv_pool_set_cached(cache->pool, block, true);
    cache->nodes[block] = (node){
        .hash = hash,
        .parent_hash = parent_hash,
        .parent = parent,
        .position = position,
        .heap_index = NOT_IN_HEAP,
        .used = ++cache->clock,
    };
    slot_add(cache, block);
    cache->cached_count++;
    if (parent != PD_BLOCK_NONE)
        cache->nodes[parent].children++;
    busy_changed(cache, block, true); /* it is claimed by who inserts it */
    event_add(cache, (pd_cache_event){.kind = PD_CACHE_STORED,
                                      .hash = hash,
                                      .parent = parent_hash,
                                      .position = position});
}

static void evict_one(pd_prefix_cache *cache)
{
    pd_assert(cache->heap_len > 0);
    pd_block block = cache->heap[0];
    node *n = &cache->nodes[block];
    heap_swap(cache, 0, cache->heap_len - 1);
    cache->heap_len--;
    n->heap_index = NOT_IN_HEAP;
    if (cache->heap_len > 0)
        heap_settle(cache, 0);
    slot_remove(cache, block);
    cache->cached_count--;
    pd_kv_pool_set_cached(cache->pool, block, false);
    if (n->parent != PD_BLOCK_NONE) {
        cache->nodes[n->parent].children--;
        heap_update(cache, n->parent);
    }
    event_add(cache, (pd_cache_event){.kind = PD_CACHE_REMOVED,
                                      .hash = n->hash,
                                      .parent = n->parent_hash,
                                      .position = n->position});
}

/* ---- for the users ---- */

uint32_t pd_prefix_cache_peek(const pd_prefix_cache *cache, const pd_hash128 *hashes,
                              uint32_t count)
{
    uint32_t held = 0;
    while (held < count && find(cache, hashes[held]) != PD_BLOCK_NONE)
        held++;
    return held;
}

uint32_t pd_prefix_cache_room(const pd_prefix_cache *cache)
{
    return pd_kv_pool_ledger(cache->pool).free + cache->cached_count - cache->busy_count;
}

uint32_t pd_prefix_cache_pin(pd_prefix_cache *cache, const pd_hash128 *hashes, uint32_t count,
                             pd_claim claim, pd_block *blocks_out)
{
    pd_assert(claim != PD_CLAIM_QUARANTINED);
    uint32_t held = 0;
    for (; held < count; held++) {
        pd_block block = find(cache, hashes[held]);
        if (block == PD_BLOCK_NONE)
            break;
        claim_block(cache, block, claim);
        blocks_out[held] = block;
    }
    return held;
}

pd_status pd_prefix_cache_alloc(pd_prefix_cache *cache, uint32_t count, pd_claim claim,
                                pd_block near, pd_block *blocks_out)
{
    if (count > pd_prefix_cache_room(cache))
        return PD_E_OVERLOAD;
    /* Some more than is needed: of exactly as many free blocks as are taken none lie side by side,
     * and so it stays for ever. With room to choose from, what is let go together stays together.
     */
    if (pd_kv_pool_ledger(cache->pool).free < count) {
        uint32_t wanted = count + cache->blocks / SPARE_PART;
        while (cache->heap_len > 0 && pd_kv_pool_ledger(cache->pool).free < wanted)
            evict_one(cache);
    }
    pd_status status = pd_kv_pool_take(cache->pool, count, claim, near, blocks_out);
    pd_assert(status == PD_OK);
    return PD_OK;
}

pd_status pd_prefix_cache_acquire(pd_prefix_cache *cache, const pd_hash128 *hashes,
                                  uint32_t hashes_count, uint32_t blocks_count, pd_claim claim,
                                  pd_block *blocks_out, uint32_t *held_out)
{
    pd_assert(hashes_count <= blocks_count);
    uint32_t held = pd_prefix_cache_pin(cache, hashes, hashes_count, claim, blocks_out);
    pd_block near = held > 0 ? blocks_out[held - 1] : PD_BLOCK_NONE;
    pd_status status =
        pd_prefix_cache_alloc(cache, blocks_count - held, claim, near, blocks_out + held);
    if (status != PD_OK) {
        pd_prefix_cache_drop(cache, blocks_out, held, claim);
        return status;
    }
    *held_out = held;
    return PD_OK;
}

void pd_prefix_cache_share(pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
                           pd_claim claim)
{
    pd_assert(claim != PD_CLAIM_QUARANTINED);
    for (uint32_t i = 0; i < count; i++)
        pd_kv_pool_claim(cache->pool, blocks[i], claim); /* claimed already: the tree knows */
}

void pd_prefix_cache_move(pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
                          pd_claim from, pd_claim to)
{
    for (uint32_t i = 0; i < count; i++) {
        /* the new claim first: the block is never unclaimed, so the tree need not know */
        pd_kv_pool_claim(cache->pool, blocks[i], to);
        pd_kv_pool_unclaim(cache->pool, blocks[i], from);
    }
}

void pd_prefix_cache_drop(pd_prefix_cache *cache, const pd_block *blocks, uint32_t count,
                          pd_claim claim)
{
    /* from the end, so that of blocks let go together the deepest is the oldest */
    for (uint32_t i = count; i-- > 0;)
        unclaim_block(cache, blocks[i], claim);
}

/* Would no more than spare blocks become busy, were block to have a busy child? */
static bool idle_within(const pd_prefix_cache *cache, pd_block block, uint32_t spare)
{
    uint32_t idle = 0;
    for (; block != PD_BLOCK_NONE && !is_busy(cache, block); block = cache->nodes[block].parent) {
        if (++idle > spare)
            return false;
    }
    return true;
}

void pd_prefix_cache_insert(pd_prefix_cache *cache, pd_hash128 root, const pd_hash128 *hashes,
                            const pd_block *blocks, uint32_t count, uint32_t spare)
{
    /* ancestors of a cached block are cached: look from the end for the first that is */
    uint32_t known = count;
    pd_block parent = PD_BLOCK_NONE;
    while (known > 0 && parent == PD_BLOCK_NONE) {
        parent = find(cache, hashes[known - 1]);
        if (parent == PD_BLOCK_NONE)
            known--;
    }
    if (known < count && !idle_within(cache, parent, spare))
        return;
    for (uint32_t i = known; i < count; i++) {
        node_add(cache, blocks[i], hashes[i], i == 0 ? root : hashes[i - 1], parent, i);
        parent = blocks[i];
    }
}

bool pd_prefix_cache_next(const pd_prefix_cache *cache, uint32_t *cursor, pd_cache_event *event_out)
{
    for (; *cursor < cache->blocks; (*cursor)++) {
        const node *n = &cache->nodes[*cursor];
        if (!pd_kv_pool_is_cached(cache->pool, *cursor))
            continue;
        *event_out = (pd_cache_event){
            .kind = PD_CACHE_STORED,
            .hash = n->hash,
            .parent = n->parent_hash,
            .position = n->position,
        };
        (*cursor)++;
        return true;
    }
    return false;
}

static bool node_sound(const pd_prefix_cache *cache, pd_block block)
{
    const node *n = &cache->nodes[block];
    if (find(cache, n->hash) != block)
        return false;
    if ((n->parent == PD_BLOCK_NONE) != (n->position == 0))
        return false;
    if (n->parent != PD_BLOCK_NONE) {
        const node *parent = &cache->nodes[n->parent];
        if (!pd_kv_pool_is_cached(cache->pool, n->parent) || parent->position + 1 != n->position ||
            !pd_hash128_equal(parent->hash, n->parent_hash))
            return false;
    }
    bool evictable = n->children == 0 && !is_busy(cache, block);
    if (evictable != (n->heap_index != NOT_IN_HEAP))
        return false;
    return !evictable || (n->heap_index < cache->heap_len && cache->heap[n->heap_index] == block);
}

pd_status pd_prefix_cache_check(const pd_prefix_cache *cache)
{
    uint32_t cached = 0, busy = 0;
    uint64_t children = 0, busy_children = 0, with_parent = 0, busy_with_parent = 0;
    for (pd_block block = 0; block < cache->blocks; block++) {
        if (!pd_kv_pool_is_cached(cache->pool, block))
            continue;
        if (!node_sound(cache, block)) {
            pd_log_error("msg=\"prefix cache: a block's place in the tree is wrong\" block=%u",
                         block);
            return PD_E_INTERNAL;
        }
        const node *n = &cache->nodes[block];
        cached++;
        busy += is_busy(cache, block);
        children += n->children;
        busy_children += n->busy_children;
        with_parent += n->parent != PD_BLOCK_NONE;
        busy_with_parent += n->parent != PD_BLOCK_NONE && is_busy(cache, block);
    }
    if (cached != cache->cached_count || busy != cache->busy_count || children != with_parent ||
        busy_children != busy_with_parent) {
        pd_log_error("msg=\"prefix cache: counts do not add up\" cached=%u/%u busy=%u/%u",
                     cache->cached_count, cached, cache->busy_count, busy);
        return PD_E_INTERNAL;
    }
    return pd_kv_pool_check(cache->pool);
}
