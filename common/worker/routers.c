#include "common/worker/routers.h"

#include "common/base/clock.h"

#include <stddef.h>

/* Ticks come every 100 ms at least. */
#define OWN_PAUSE_NS (500 * PD_NS_PER_MS)

void pd_routers_init(pd_routers *routers, uint64_t lost_after_ns)
{
    *routers = (pd_routers){.lost_after_ns = lost_after_ns};
}

static pd_router_seen *find(pd_routers *routers, uint64_t router)
{
    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        if (routers->entries[i].router == router)
            return &routers->entries[i];
    }
    return NULL;
}

/* A free place, else the one of the router lost longest ago. */
static pd_router_seen *make_place(pd_routers *routers)
{
    pd_router_seen *place = find(routers, 0);

    if (place != NULL)
        return place;
    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        pd_router_seen *entry = &routers->entries[i];
        if (entry->lost && (place == NULL || entry->seen_ns < place->seen_ns))
            place = entry;
    }
    return place;
}

bool pd_routers_on_message(pd_routers *routers, uint64_t router, const pd_message *message,
                           uint64_t now_ns)
{
    pd_router_seen *entry = router == 0 ? NULL : find(routers, router);
    bool welcome = message->kind == PD_MSG_WELCOME;

    if (router == 0)
        return false;
    if (entry == NULL) {
        entry = make_place(routers);
        if (entry == NULL)
            return false;
        *entry = (pd_router_seen){.router = router, .lost_after_ns = routers->lost_after_ns};
    }
    if (entry->lost && (!welcome || message->welcome.session < entry->session))
        return false;
    if (welcome && message->welcome.session > entry->session)
        entry->session = message->welcome.session;
    entry->lost = false;
    entry->said_count = 0;
    if (now_ns > entry->seen_ns)
        entry->seen_ns = now_ns;
    if (welcome && message->welcome.lost_after_ms > 0)
        entry->lost_after_ns = message->welcome.lost_after_ms * PD_NS_PER_MS;
    return true;
}

uint64_t pd_own_pause_ns(uint64_t *ticked_ns, uint64_t now_ns)
{
    uint64_t gap_ns = *ticked_ns == 0 || now_ns < *ticked_ns ? 0 : now_ns - *ticked_ns;

    *ticked_ns = now_ns;
    return gap_ns > OWN_PAUSE_NS ? gap_ns : 0;
}

uint64_t pd_routers_take_time(pd_routers *routers, uint64_t now_ns)
{
    uint64_t pause_ns = pd_own_pause_ns(&routers->ticked_ns, now_ns);

    for (uint32_t i = 0; pause_ns > 0 && i < PD_ROUTERS_MAX; i++) {
        pd_router_seen *entry = &routers->entries[i];
        uint64_t seen_ns = entry->seen_ns + pause_ns;
        entry->seen_ns = seen_ns < now_ns ? seen_ns : now_ns;
    }
    return pause_ns;
}

uint64_t pd_routers_next_lost(pd_routers *routers, uint64_t now_ns)
{
    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        pd_router_seen *entry = &routers->entries[i];
        if (entry->router != 0 && !entry->lost && now_ns > entry->seen_ns + entry->lost_after_ns) {
            entry->lost = true;
            entry->session++;
            return entry->router;
        }
    }
    return 0;
}

bool pd_routers_live(const pd_routers *routers, uint64_t router)
{
    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        if (routers->entries[i].router == router)
            return router != 0 && !routers->entries[i].lost;
    }
    return false;
}
