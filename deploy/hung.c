#include "deploy/hung.h"

#include "common/base/clock.h"

#include <string.h>

/* Asked every second; a longer gap is our own absence. */
#define OWN_PAUSE_NS (4 * PD_NS_PER_S)

void hung_init(hung *h, uint64_t after_ns)
{
    *h = (hung){.after_ns = after_ns};
}

/* When the router last heard of that process: *heard_out. False: it does not know it. */
static bool heard_of(const pd_json *workers, const state_service *service, uint64_t now_ns,
                     uint64_t *heard_out)
{
    for (size_t i = 0; i < pd_json_count(workers); i++) {
        const pd_json *worker = pd_json_at(workers, i);
        const pd_json *name = pd_json_get(worker, "name"), *pid = pd_json_get(worker, "pid");
        const pd_json *age = pd_json_get(worker, "heartbeat_age_ms");
        size_t len;
        const char *text = name != NULL ? pd_json_string(name, &len) : NULL;
        if (text == NULL || pid == NULL || age == NULL || strcmp(text, service->name) != 0 ||
            pd_json_integer(pid) != service->process.pid)
            continue;
        int64_t age_ms = pd_json_integer(age);
        uint64_t age_ns = age_ms < 0 ? 0 : (uint64_t)age_ms * PD_NS_PER_MS;
        *heard_out = age_ns < now_ns ? now_ns - age_ns : 1;
        return true;
    }
    return false;
}

void hung_on_answer(hung *h, const state *s, const pd_json *workers, uint64_t now_ns)
{
    bool fresh = workers == NULL || now_ns > h->told_ns + OWN_PAUSE_NS;

    for (uint32_t i = 0; i < s->services_count; i++) {
        const state_service *service = &s->services[i];
        if (strcmp(service->role, "router") == 0) {
            fresh |= service->process.pid != h->router;
            h->router = service->process.pid;
        }
    }
    for (uint32_t i = 0; i < s->services_count; i++) {
        hung_worker *at = &h->workers[i];
        uint64_t heard_ns;
        if (at->pid != s->services[i].process.pid)
            *at = (hung_worker){.pid = s->services[i].process.pid};
        if (workers != NULL && at->pid != 0 &&
            heard_of(workers, &s->services[i], now_ns, &heard_ns) && heard_ns > at->heard_ns)
            at->heard_ns = heard_ns;
        if (fresh && at->heard_ns != 0)
            at->heard_ns = now_ns;
    }
    h->told_ns = now_ns;
}

bool hung_is(const hung *h, uint32_t index, uint64_t now_ns)
{
    const hung_worker *at = &h->workers[index];

    return h->after_ns != 0 && at->pid != 0 && at->heard_ns != 0 &&
           now_ns > at->heard_ns + h->after_ns;
}
