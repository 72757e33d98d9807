#include "deploy/ask_router.h"

#include "common/config/value.h"
#include "deploy/http_get.h"

#include <stdio.h>
#include <string.h>

#define ASK_TIMEOUT_MS 2000
#define ANSWER_MAX     (4u << 20)

static pd_status get(const state *s, const char *path, int *code_out, pd_buf *body)
{
    char host[256];
    pd_listen listen = {.text = s->listen, .host = host};
    pd_scalar_why why;
    pd_status status = pd_scalar_listen(s->listen, host, &listen.port, &listen.ipv6, &why);

    return status != PD_OK ? status : http_get(&listen, path, ASK_TIMEOUT_MS, code_out, body);
}

bool ask_router_is_ok(const state *s, const char *path)
{
    int code = 0;
    pd_buf body;

    pd_buf_init(&body, ANSWER_MAX);
    pd_status status = get(s, path, &code, &body);
    pd_buf_fini(&body);
    return status == PD_OK && code == 200;
}

/* What its supervisor knows of the router's process. */
static void describe_process(const state *s, char *out, size_t size)
{
    snprintf(out, size, "its supervisor has no process of it");
    for (uint32_t i = 0; i < s->services_count; i++) {
        const state_service *service = &s->services[i];
        if (strcmp(service->role, "router") != 0)
            continue;
        if (service->process.pid == 0)
            snprintf(out, size, "it has no process: %s", service->phase);
        else
            snprintf(out, size, "process %d is %s", (int)service->process.pid,
                     state_process_alive(&service->process) ? "there" : "dead");
    }
}

static void tell_why(const state *s, const char *path, const char *what, char *why)
{
    char process[128];

    describe_process(s, process, sizeof process);
    snprintf(why, ASK_ROUTER_WHY_BYTES, "the router does not answer GET %s at http://%s: %s (%s)",
             path, s->listen, what, process);
}

static const char *silence_of(pd_status status)
{
    switch (status) {
    case PD_E_TIMEOUT: return "silent for 2 s";
    case PD_E_TOO_LARGE: return "its answer is over 4 MiB";
    case PD_E_NOMEM: return "no memory for its answer";
    case PD_E_NOT_FOUND: return "its host has no address";
    case PD_E_PEER: return "nobody is there, or no HTTP server";
    default: return "state.json does not say where it is";
    }
}

router_page ask_router(const state *s, const char *path, const char *member,
                       char why[ASK_ROUTER_WHY_BYTES])
{
    router_page page = {0};
    pd_json_error error;
    char status_text[32];
    int code = 0;
    pd_buf body;

    pd_buf_init(&body, ANSWER_MAX);
    pd_status status = get(s, path, &code, &body);
    why[0] = '\0';
    if (status == PD_OK && code == 200 &&
        pd_json_parse(pd_buf_text(&body), body.len, &page.answer, &error) == PD_OK) {
        const pd_json *list = pd_json_get(page.answer, member);
        page.list = list != NULL && pd_json_type_of(list) == PD_JSON_ARRAY ? list : NULL;
    }
    snprintf(status_text, sizeof status_text, "HTTP status %d", code);
    if (page.list == NULL)
        tell_why(s, path,
                 status != PD_OK ? silence_of(status)
                 : code != 200   ? status_text
                                 : "its answer cannot be read",
                 why);
    pd_buf_fini(&body);
    return page;
}

void router_page_drop(router_page *page)
{
    pd_json_free(page->answer);
    *page = (router_page){0};
}
