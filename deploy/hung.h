#pragma once

/* deploy/hung.h - which workers stand still, by what the router says of them.
 *
 * A worker that was registered and has not been heard of by a router that answers is hung: stopped,
 * or its loop stuck. One that was never registered is loading its model and is not judged; nor is
 * anybody while the router says nothing, has just been started anew, or while whoever asks stood
 * still. Pure: answers and the time come in. One thread. */

#include "common/base/json.h"
#include "deploy/state.h"

typedef struct hung_worker {
    pid_t pid;
    uint64_t heard_ns; /* by the router; 0: this process was never registered */
} hung_worker;

typedef struct hung {
    uint64_t after_ns;
    uint64_t told_ns; /* the last answer, or its lack */
    pid_t router;
    hung_worker workers[STATE_SERVICES_MAX]; /* as state.services */
} hung;

/* after_ns: patience; 0: nobody is ever hung. */
void hung_init(hung *h, uint64_t after_ns);
/* What GET /workers said (the list inside; NULL: nothing). Ask about every second. */
void hung_on_answer(hung *h, const state *s, const pd_json *workers, uint64_t now_ns);
/* Whether services[index], a worker, stands still. */
bool hung_is(const hung *h, uint32_t index, uint64_t now_ns);
