#pragma once

/* deploy/ask_router.h - what a cluster's router says on its JSON pages, for reports. Its silence is
 * a finding with a reason, not a failure. One thread; blocks for up to 2 s a question. */

#include "common/base/json.h"
#include "deploy/state.h"

#define ASK_ROUTER_WHY_BYTES 600

/* A page that holds a list. */
typedef struct router_page {
    pd_json *answer;     /* NULL: there is none */
    const pd_json *list; /* inside; NULL when there is no answer, or none that can be read */
} router_page;

/* GET path, of which the list is called member. Without a list, why is one line that names the
 * router, where it was asked, and what came of it; otherwise "". */
router_page ask_router(const state *s, const char *path, const char *member,
                       char why[ASK_ROUTER_WHY_BYTES]);
void router_page_drop(router_page *page);

/* True when GET path is answered with 200. */
bool ask_router_is_ok(const state *s, const char *path);
