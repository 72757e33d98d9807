#include "router/lifecycle.h"
#include "common/base/status.h"

#include <stddef.h>

#define STATE(name) ROUTER_REQUEST_##name
#define EVENT(name) ROUTER_EVENT_##name

/* clang-format off */
static const router_transition TABLE[] = {
    {STATE(NONE), EVENT(ARRIVED), STATE(QUEUED), "a place in the queue, by priority, then arrival", "queue"},
    {STATE(QUEUED), EVENT(PLACED), STATE(LEASING), "LeaseRequest", "lease"},
    {STATE(QUEUED), EVENT(PLACED_ALONE), STATE(PREFILLING), "PrefillRequest that ships nothing", "prefill"},
    {STATE(QUEUED), EVENT(FAILED), STATE(NONE), "error to the client", "-"},
    {STATE(QUEUED), EVENT(CANCELLED), STATE(NONE), "nothing", "-"},
    {STATE(LEASING), EVENT(PROMISED), STATE(PREFILLING), "PrefillRequest", "prefill"},
    {STATE(LEASING), EVENT(REFUSED), STATE(QUEUED), "that worker is left alone for a moment", "queue"},
    {STATE(LEASING), EVENT(RETRIED), STATE(QUEUED), "Cancel; epoch + 1", "queue"},
    {STATE(LEASING), EVENT(FAILED), STATE(NONE), "Cancel; error to the client", "-"},
    {STATE(LEASING), EVENT(CANCELLED), STATE(NONE), "Cancel", "-"},
    {STATE(PREFILLING), EVENT(FIRST_TOKEN), STATE(LANDING), "DecodeStart", "landing"},
    {STATE(PREFILLING), EVENT(LAST_TOKEN), STATE(CLOSING), "Cancel where nothing is to land any more", "closing"},
    {STATE(PREFILLING), EVENT(REFUSED), STATE(QUEUED), "Cancel; that worker is left alone for a moment", "queue"},
    {STATE(PREFILLING), EVENT(RETRIED), STATE(QUEUED), "Cancel; epoch + 1", "queue"},
    {STATE(PREFILLING), EVENT(FAILED), STATE(NONE), "Cancel; error to the client", "-"},
    {STATE(PREFILLING), EVENT(CANCELLED), STATE(NONE), "Cancel", "-"},
    {STATE(LANDING), EVENT(LANDED), STATE(DECODING), "Release", "idle"},
    {STATE(LANDING), EVENT(RETRIED), STATE(QUEUED), "Cancel; epoch + 1", "queue"},
    {STATE(LANDING), EVENT(FAILED), STATE(NONE), "Cancel; error to the client", "-"},
    {STATE(LANDING), EVENT(CANCELLED), STATE(NONE), "Cancel", "-"},
    {STATE(DECODING), EVENT(LAST_TOKEN), STATE(CLOSING), "nothing", "closing"},
    {STATE(DECODING), EVENT(SUSPENDED), STATE(SUSPENDED), "all its tokens are awaited, then the cheapest way out is taken", "suspended"},
    {STATE(DECODING), EVENT(RETRIED), STATE(QUEUED), "Cancel; epoch + 1", "queue"},
    {STATE(DECODING), EVENT(FAILED), STATE(NONE), "Cancel; error to the client", "-"},
    {STATE(DECODING), EVENT(CANCELLED), STATE(NONE), "Cancel", "-"},
    {STATE(SUSPENDED), EVENT(MOVES), STATE(MOVING), "LeaseRequest with bind, then ShipRequest", "lease, then landing"},
    {STATE(SUSPENDED), EVENT(GIVES_WAY), STATE(QUEUED), "Cancel with keep; epoch + 1", "queue"},
    {STATE(SUSPENDED), EVENT(RETRIED), STATE(QUEUED), "Cancel; epoch + 1", "queue"},
    {STATE(SUSPENDED), EVENT(FAILED), STATE(NONE), "Cancel; error to the client", "-"},
    {STATE(SUSPENDED), EVENT(CANCELLED), STATE(NONE), "Cancel", "-"},
    {STATE(MOVING), EVENT(MOVED), STATE(DECODING), "DecodeStart; Release and Cancel with keep where it was", "idle"},
    {STATE(MOVING), EVENT(MOVE_FAILED), STATE(SUSPENDED), "Cancel of the new key", "suspended"},
    {STATE(MOVING), EVENT(RETRIED), STATE(QUEUED), "Cancel of both keys; epoch + 1", "queue"},
    {STATE(MOVING), EVENT(FAILED), STATE(NONE), "Cancel of both keys; error to the client", "-"},
    {STATE(MOVING), EVENT(CANCELLED), STATE(NONE), "Cancel of both keys", "-"},
    {STATE(CLOSING), EVENT(FINISHED), STATE(NONE), "end to the client", "-"},
    {STATE(CLOSING), EVENT(CANCELLED), STATE(NONE), "nothing", "-"},
};
/* clang-format on */

enum { ROWS = sizeof TABLE / sizeof TABLE[0] };
_Static_assert(ROWS <= ROUTER_TRANSITIONS_MAX, "counts have a place for each row");

const char *router_request_state_name(router_request_state state)
{
    static const char *const names[ROUTER_REQUEST_STATES] = {
        [ROUTER_REQUEST_NONE] = "none",           [ROUTER_REQUEST_QUEUED] = "queued",
        [ROUTER_REQUEST_LEASING] = "leasing",     [ROUTER_REQUEST_PREFILLING] = "prefilling",
        [ROUTER_REQUEST_LANDING] = "landing",     [ROUTER_REQUEST_DECODING] = "decoding",
        [ROUTER_REQUEST_SUSPENDED] = "suspended", [ROUTER_REQUEST_MOVING] = "moving",
        [ROUTER_REQUEST_CLOSING] = "closing"};
    return state < ROUTER_REQUEST_STATES ? names[state] : "?";
}

const char *router_event_name(router_event event)
{
    static const char *const names[ROUTER_EVENTS] = {
        [ROUTER_EVENT_ARRIVED] = "arrived",
        [ROUTER_EVENT_PLACED] = "placed",
        [ROUTER_EVENT_PLACED_ALONE] = "placed alone",
        [ROUTER_EVENT_PROMISED] = "promised",
        [ROUTER_EVENT_REFUSED] = "refused",
        [ROUTER_EVENT_FIRST_TOKEN] = "first token",
        [ROUTER_EVENT_LANDED] = "landed",
        [ROUTER_EVENT_SUSPENDED] = "suspended",
        [ROUTER_EVENT_MOVES] = "moves",
        [ROUTER_EVENT_MOVE_FAILED] = "move failed",
        [ROUTER_EVENT_MOVED] = "moved",
        [ROUTER_EVENT_GIVES_WAY] = "gives way",
        [ROUTER_EVENT_LAST_TOKEN] = "last token",
        [ROUTER_EVENT_RETRIED] = "retried",
        [ROUTER_EVENT_FINISHED] = "finished",
        [ROUTER_EVENT_FAILED] = "failed",
        [ROUTER_EVENT_CANCELLED] = "cancelled",
    };
    return event < ROUTER_EVENTS ? names[event] : "?";
}

const router_transition *router_lifecycle_table(uint32_t *count_out)
{
    *count_out = ROWS;
    return TABLE;
}

router_request_state router_lifecycle_next(uint64_t *counts, router_request_state state,
                                           router_event event)
{
    uint32_t row = 0;
    while (row < ROWS && (TABLE[row].from != state || TABLE[row].event != event))
        row++;
    pd_assert(row < ROWS); /* the table says what can happen */
    counts[row]++;
    return TABLE[row].to;
}
