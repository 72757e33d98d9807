#include "common/worker/trouble.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <string.h>

pd_status pd_trouble_init(pd_trouble *t, uint32_t requests_max)
{
    pd_assert(requests_max > 0);
    *t = (pd_trouble){.suspects_max = requests_max};
    t->suspects = pd_calloc(requests_max, sizeof *t->suspects);
    return t->suspects == NULL ? PD_E_NOMEM : PD_OK;
}

void pd_trouble_fini(pd_trouble *t)
{
    pd_free(t->suspects);
    *t = (pd_trouble){0};
}

/* Requests by number or by id: one way to look at both. */
typedef struct named {
    const uint64_t *numbers; /* NULL: by the slices' ids */
    const pd_step_slice *slices;
    uint32_t count;
} named;

static uint64_t name_of(const named *requests, uint32_t i)
{
    if (requests->numbers != NULL)
        return requests->numbers[i];
    return pd_hash64(requests->slices[i].id, strlen(requests->slices[i].id), 0);
}

static bool is_among(const named *requests, uint64_t suspect)
{
    for (uint32_t i = 0; i < requests->count; i++) {
        if (name_of(requests, i) == suspect)
            return true;
    }
    return false;
}

/* Those that were in all failed steps, with this one; none: this one's are the next. */
static void blame(pd_trouble *t, const named *requests)
{
    uint32_t left = 0;

    for (uint32_t i = 0; i < t->suspects_count; i++) {
        if (is_among(requests, t->suspects[i]))
            t->suspects[left++] = t->suspects[i];
    }
    t->suspects_count = left;
    if (left > 0)
        return;
    t->culprits++;
    pd_assert(requests->count <= t->suspects_max);
    for (uint32_t i = 0; i < requests->count; i++)
        t->suspects[i] = name_of(requests, i);
    t->suspects_count = requests->count;
}

static bool take(pd_trouble *t, pd_status status, const named *requests)
{
    if (status == PD_OK) {
        t->suspects_count = t->culprits = t->failed = 0;
        return false;
    }
    if (status > PD_E_IO) /* a request's, or a peer's */
        return false;
    t->failed++;
    if (status == PD_E_NOMEM)
        return true;
    blame(t, requests);
    return t->culprits >= PD_TROUBLE_CULPRITS;
}

bool pd_trouble_take(pd_trouble *t, pd_status status, const uint64_t *requests, uint32_t count)
{
    return take(t, status, &(named){.numbers = requests, .count = count});
}

bool pd_trouble_take_step(pd_trouble *t, const pd_step *step)
{
    return take(t, step->status, &(named){.slices = step->slices, .count = step->slices_count});
}
