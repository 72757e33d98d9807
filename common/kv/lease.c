#include "common/kv/lease.h"
#include "common/base/mem.h"

#define NO_SLOT UINT32_MAX

typedef struct slot {
    pd_lease lease; /* first: a lease's pointer is its slot's */
    bool used;
    uint32_t next; /* in its bucket, or in the free list */
} slot;

struct pd_lease_table {
    pd_prefix_cache *cache;
    uint32_t leases_max, blocks_max;
    uint64_t promised; /* blocks, of all granted leases */
    uint32_t free_head;
    uint32_t buckets_mask;
    uint32_t *buckets; /* [buckets_mask + 1] first slot or NO_SLOT */
    slot *slots;       /* [leases_max] */
    pd_block *blocks;  /* [leases_max][blocks_max] */
};

pd_status pd_lease_table_create(pd_prefix_cache *cache, uint32_t leases_max, uint32_t blocks_max,
                                pd_lease_table **table_out)
{
    if (leases_max == 0 || leases_max > UINT32_MAX / 4 || blocks_max == 0)
        return PD_E_INVALID;
    pd_lease_table *table = pd_calloc(1, sizeof *table);
    if (table == NULL)
        return PD_E_NOMEM;
    uint32_t buckets = 1;
    while (buckets < leases_max)
        buckets *= 2;
    table->cache = cache;
    table->leases_max = leases_max;
    table->blocks_max = blocks_max;
    table->buckets_mask = buckets - 1;
    table->buckets = pd_calloc(buckets, sizeof *table->buckets);
    table->slots = pd_calloc(leases_max, sizeof *table->slots);
    table->blocks = pd_calloc(leases_max, blocks_max * sizeof *table->blocks);
    if (table->buckets == NULL || table->slots == NULL || table->blocks == NULL) {
        pd_lease_table_destroy(table);
        return PD_E_NOMEM;
    }
    for (uint32_t i = 0; i < buckets; i++)
        table->buckets[i] = NO_SLOT;
    for (uint32_t i = 0; i < leases_max; i++)
        table->slots[i].next = i + 1 < leases_max ? i + 1 : NO_SLOT;
    *table_out = table;
    return PD_OK;
}

void pd_lease_table_destroy(pd_lease_table *table)
{
    if (table == NULL)
        return;
    pd_free(table->buckets);
    pd_free(table->slots);
    pd_free(table->blocks);
    pd_free(table);
}

uint32_t pd_lease_room(const pd_lease_table *table)
{
    uint32_t room = pd_prefix_cache_room(table->cache);
    return table->promised >= room ? 0 : room - (uint32_t)table->promised;
}

static uint32_t *bucket_of(const pd_lease_table *table, uint64_t request, uint32_t epoch)
{
    uint64_t hash = pd_mix64(request ^ pd_mix64(epoch));
    return &table->buckets[(uint32_t)hash & table->buckets_mask];
}

pd_lease *pd_lease_find(const pd_lease_table *table, uint64_t request, uint32_t epoch)
{
    uint32_t index = *bucket_of(table, request, epoch);
    while (index != NO_SLOT) {
        pd_lease *lease = &table->slots[index].lease;
        if (lease->request == request && lease->epoch == epoch)
            return lease;
        index = table->slots[index].next;
    }
    return NULL;
}

pd_status pd_lease_grant(pd_lease_table *table, const pd_lease_grant_args *args,
                         pd_lease **lease_out)
{
    if (args->blocks == 0 || pd_lease_find(table, args->request, args->epoch) != NULL)
        return PD_E_INVALID;
    if (args->blocks > table->blocks_max)
        return PD_E_TOO_LARGE;
    if (table->free_head == NO_SLOT || args->blocks > pd_lease_room(table))
        return PD_E_OVERLOAD;
    uint32_t index = table->free_head;
    slot *s = &table->slots[index];
    table->free_head = s->next;
    s->used = true;
    s->lease = (pd_lease){
        .request = args->request,
        .epoch = args->epoch,
        .state = PD_LEASE_GRANTED,
        .owner = args->owner,
        .prefill = args->prefill,
        .expiry_ns = args->expiry_ns,
        .promised = args->blocks,
        .blocks = table->blocks + (size_t)index * table->blocks_max,
    };
    uint32_t *bucket = bucket_of(table, args->request, args->epoch);
    s->next = *bucket;
    *bucket = index;
    table->promised += args->blocks;
    *lease_out = &s->lease;
    return PD_OK;
}

static void end(pd_lease_table *table, pd_lease *lease)
{
    uint32_t index = (uint32_t)((slot *)lease - table->slots);
    uint32_t *link = bucket_of(table, lease->request, lease->epoch);
    while (*link != index) {
        pd_assert(*link != NO_SLOT);
        link = &table->slots[*link].next;
    }
    slot *s = &table->slots[index];
    *link = s->next;
    s->next = table->free_head;
    s->used = false;
    table->free_head = index;
}

pd_status pd_lease_bind(pd_lease_table *table, pd_lease *lease, const pd_hash128 *hashes,
                        uint32_t hashes_count)
{
    pd_assert(lease->state == PD_LEASE_GRANTED);
    pd_status status = pd_prefix_cache_acquire(table->cache, hashes, hashes_count, lease->promised,
                                               PD_CLAIM_LEASED, lease->blocks, &lease->held);
    if (status != PD_OK)
        return status;
    lease->blocks_count = lease->promised;
    table->promised -= lease->promised;
    lease->promised = 0;
    lease->state = lease->prefill == 0 ? PD_LEASE_LANDED : PD_LEASE_LANDING;
    return PD_OK;
}

void pd_lease_landed(pd_lease_table *table, pd_lease *lease)
{
    (void)table;
    pd_assert(lease->state == PD_LEASE_LANDING);
    lease->state = PD_LEASE_LANDED;
}

void pd_lease_run(pd_lease_table *table, pd_lease *lease)
{
    pd_assert(lease->state == PD_LEASE_LANDED);
    pd_prefix_cache_move(table->cache, lease->blocks, lease->blocks_count, PD_CLAIM_LEASED,
                         PD_CLAIM_RUNNING);
    lease->state = PD_LEASE_RUNNING;
}

pd_status pd_lease_grow(pd_lease_table *table, pd_lease *lease, uint32_t count)
{
    pd_assert(lease->state == PD_LEASE_RUNNING);
    if (count > table->blocks_max - lease->blocks_count)
        return PD_E_TOO_LARGE;
    if (count > pd_lease_room(table))
        return PD_E_OVERLOAD;
    pd_block near = lease->blocks[lease->blocks_count - 1];
    pd_status status = pd_prefix_cache_alloc(table->cache, count, PD_CLAIM_RUNNING, near,
                                             lease->blocks + lease->blocks_count);
    if (status == PD_OK)
        lease->blocks_count += count;
    return status;
}

/* The held blocks go back at once: only the landing ones may still be written. */
static void quarantine(pd_lease_table *table, pd_lease *lease)
{
    pd_prefix_cache_drop(table->cache, lease->blocks, lease->held, PD_CLAIM_LEASED);
    uint32_t landing = lease->blocks_count - lease->held;
    for (uint32_t i = 0; i < landing; i++)
        lease->blocks[i] = lease->blocks[lease->held + i];
    lease->blocks_count = landing;
    lease->held = 0;
    pd_prefix_cache_move(table->cache, lease->blocks, landing, PD_CLAIM_LEASED,
                         PD_CLAIM_QUARANTINED);
    lease->state = PD_LEASE_QUARANTINED;
}

bool pd_lease_release(pd_lease_table *table, pd_lease *lease)
{
    switch (lease->state) {
    case PD_LEASE_GRANTED: table->promised -= lease->promised; break;
    case PD_LEASE_LANDING:
        if (lease->held < lease->blocks_count) {
            quarantine(table, lease);
            return true;
        }
        pd_prefix_cache_drop(table->cache, lease->blocks, lease->blocks_count, PD_CLAIM_LEASED);
        break;
    case PD_LEASE_LANDED:
        pd_prefix_cache_drop(table->cache, lease->blocks, lease->blocks_count, PD_CLAIM_LEASED);
        break;
    case PD_LEASE_RUNNING:
        pd_prefix_cache_drop(table->cache, lease->blocks, lease->blocks_count, PD_CLAIM_RUNNING);
        break;
    case PD_LEASE_QUARANTINED: return true;
    }
    end(table, lease);
    return false;
}

static void quarantine_end(pd_lease_table *table, pd_lease *lease)
{
    pd_prefix_cache_drop(table->cache, lease->blocks, lease->blocks_count, PD_CLAIM_QUARANTINED);
    end(table, lease);
}

bool pd_lease_sender_acked(pd_lease_table *table, uint64_t request, uint32_t epoch)
{
    pd_lease *lease = pd_lease_find(table, request, epoch);
    if (lease == NULL || lease->state != PD_LEASE_QUARANTINED)
        return false;
    quarantine_end(table, lease);
    return true;
}

void pd_lease_renew(pd_lease *lease, uint64_t expiry_ns)
{
    if (expiry_ns > lease->expiry_ns)
        lease->expiry_ns = expiry_ns;
}

pd_lease *pd_lease_next(const pd_lease_table *table, uint32_t *cursor)
{
    while (*cursor < table->leases_max) {
        slot *s = &table->slots[(*cursor)++];
        if (s->used)
            return &s->lease;
    }
    return NULL;
}
