#include "common/worker/key_table.h"

#include "common/base/mem.h"

typedef struct entry {
    pd_request_key key;
    void *value; /* NULL: empty */
} entry;

struct pd_key_table {
    uint32_t count, entries_max;
    uint32_t mask;
    entry *entries; /* [mask + 1], at most half full */
};

pd_status pd_key_table_create(uint32_t entries_max, pd_key_table **table_out)
{
    if (entries_max == 0 || entries_max > 1u << 28)
        return PD_E_INVALID;
    uint32_t size = 2;
    while (size < entries_max * 2)
        size *= 2;

    pd_key_table *table = pd_calloc(1, sizeof *table);
    if (table == NULL)
        return PD_E_NOMEM;
    table->entries = pd_calloc(size, sizeof *table->entries);
    if (table->entries == NULL) {
        pd_free(table);
        return PD_E_NOMEM;
    }
    table->entries_max = entries_max;
    table->mask = size - 1;
    *table_out = table;
    return PD_OK;
}

void pd_key_table_destroy(pd_key_table *table)
{
    if (table == NULL)
        return;
    pd_free(table->entries);
    pd_free(table);
}

bool pd_request_key_equal(const pd_request_key *a, const pd_request_key *b)
{
    return a->number == b->number && a->router == b->router && a->epoch == b->epoch;
}

static uint32_t home_of(const pd_key_table *table, const pd_request_key *key)
{
    return (uint32_t)pd_mix64(key->router ^ pd_mix64(key->number ^ pd_mix64(key->epoch))) &
           table->mask;
}

/* Where the key is, or the empty place where it would go. */
static uint32_t place_of(const pd_key_table *table, const pd_request_key *key)
{
    uint32_t at = home_of(table, key);

    while (table->entries[at].value != NULL && !pd_request_key_equal(&table->entries[at].key, key))
        at = (at + 1) & table->mask;
    return at;
}

void *pd_key_table_get(const pd_key_table *table, const pd_request_key *key)
{
    return table->entries[place_of(table, key)].value;
}

pd_status pd_key_table_put(pd_key_table *table, const pd_request_key *key, void *value)
{
    uint32_t at = place_of(table, key);

    pd_assert(value != NULL && table->entries[at].value == NULL);
    if (table->count >= table->entries_max)
        return PD_E_OVERLOAD;
    table->entries[at] = (entry){.key = *key, .value = value};
    table->count++;
    return PD_OK;
}

void pd_key_table_remove(pd_key_table *table, const pd_request_key *key)
{
    uint32_t hole = place_of(table, key);

    pd_assert(table->entries[hole].value != NULL);
    table->entries[hole].value = NULL;
    table->count--;
    /* Close the gap: whoever probed past the hole moves into it, so that no marker is needed. */
    for (uint32_t at = (hole + 1) & table->mask; table->entries[at].value != NULL;
         at = (at + 1) & table->mask) {
        uint32_t home = home_of(table, &table->entries[at].key);
        if (((at - home) & table->mask) >= ((at - hole) & table->mask)) {
            table->entries[hole] = table->entries[at];
            table->entries[at].value = NULL;
            hole = at;
        }
    }
}

uint32_t pd_key_table_count(const pd_key_table *table)
{
    return table->count;
}
