#pragma once

/* prefill-worker/steps.h - which prompts run next, what came of it, and what leaves. One thread. */

#include "prefill-worker/core.h"

/* Starts a step if none is under way and somebody waits. */
void prefill_run_step(pd_role_core *core, uint64_t now_ns);
/* As pd_role_ops says. */
void prefill_on_group(pd_role_core *core, pd_step *step, uint32_t group, uint64_t now_ns);
void prefill_on_step_done(pd_role_core *core, pd_step *step, uint64_t now_ns);
/* Posts what can leave. False: the request has failed and may be gone. */
bool prefill_ship_ready(pd_role_core *core, prefill_request *request, uint64_t now_ns);
/* What the carrier had no room for. */
void prefill_ship_what_waited(pd_role_core *core, uint64_t now_ns);
/* PD_MSG_PREFILL_STARTED. */
void prefill_say_started(pd_role_core *core, prefill_request *request, uint64_t now_ns);
