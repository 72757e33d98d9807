#include "deploy/step_faults.h"

#include "common/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define EVERY_MAX 1000000

static struct {
    const pd_worker_engine_ops *real;
    pd_worker_engine_ops ops;
    unsigned long every, chances;
} faulty; /* one engine a process */

static bool has_later_chunk(const pd_step *step)
{
    for (uint32_t i = 0; i < step->slices_count; i++) {
        if (step->slices[i].count > 1 && step->slices[i].position > 0)
            return true;
    }
    return false;
}

static pd_status poll_and_fail(pd_worker_engine *engine, pd_step **step_out)
{
    pd_status status = faulty.real->poll(engine, step_out);

    if (status != PD_OK || (*step_out)->status != PD_OK || !has_later_chunk(*step_out) ||
        ++faulty.chances % faulty.every != 0)
        return status;
    pd_log_warn("msg=\"fault\" kind=step step=%llu", (unsigned long long)(*step_out)->number);
    (*step_out)->status = PD_E_INTERNAL;
    return PD_OK;
}

pd_status step_faults_engine(const pd_worker_engine_ops *real,
                             const pd_worker_engine_ops **engine_out)
{
    const char *text = getenv("KVFERRY_STEP_FAULTS"), *allowed = getenv("KVFERRY_ALLOW_FAULTS");
    char *end = NULL;

    *engine_out = real;
    if (text == NULL || text[0] == '\0')
        return PD_OK;
    if (allowed == NULL || strcmp(allowed, "1") != 0) {
        pd_log_error("msg=\"KVFERRY_STEP_FAULTS makes steps fail on purpose: it needs "
                     "KVFERRY_ALLOW_FAULTS=1 beside it\"");
        return PD_E_INVALID;
    }
    errno = 0;
    faulty.every = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || faulty.every == 0 ||
        faulty.every > EVERY_MAX) {
        pd_log_error("msg=\"KVFERRY_STEP_FAULTS is no number from 1 to %d\" given=\"%.80s\"",
                     EVERY_MAX, text);
        return PD_E_INVALID;
    }
    pd_log_warn("msg=\"steps fail on purpose\" every=%lu", faulty.every);
    faulty.real = real;
    faulty.ops = *real;
    faulty.ops.poll = poll_and_fail;
    *engine_out = &faulty.ops;
    return PD_OK;
}
