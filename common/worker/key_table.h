#pragma once

/* common/worker/key_table.h - request keys to the caller's objects, with a fixed maximum.
 *
 * Open addressing; all memory is taken at creation. Pure. One thread. */

#include "common/wire/messages.h"

typedef struct pd_key_table pd_key_table;

/* Errors: PD_E_INVALID (entries_max is 0 or over 2^28), PD_E_NOMEM. */
PD_CHECKED pd_status pd_key_table_create(uint32_t entries_max, pd_key_table **table_out);
void pd_key_table_destroy(pd_key_table *table);

bool pd_request_key_equal(const pd_request_key *a, const pd_request_key *b);

/* NULL when the key is not there. */
void *pd_key_table_get(const pd_key_table *table, const pd_request_key *key);
/* The key must not be there; value is not NULL. PD_E_OVERLOAD: entries_max are. */
PD_CHECKED pd_status pd_key_table_put(pd_key_table *table, const pd_request_key *key, void *value);
/* The key must be there. */
void pd_key_table_remove(pd_key_table *table, const pd_request_key *key);
uint32_t pd_key_table_count(const pd_key_table *table);
