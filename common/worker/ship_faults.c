#include "common/worker/ship_faults.h"

#include "common/base/log.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[PD_SHIP_FAULTS] = {"none",    "bit",   "other", "epoch",
                                                  "missing", "count", "notice"};

const char *pd_ship_fault_name(pd_ship_fault fault)
{
    pd_assert(fault < PD_SHIP_FAULTS);
    return names[fault];
}

static pd_ship_fault fault_named(const char *name, size_t len)
{
    for (uint32_t i = 1; i < PD_SHIP_FAULTS; i++) {
        if (strlen(names[i]) == len && memcmp(names[i], name, len) == 0)
            return (pd_ship_fault)i;
    }
    return PD_SHIP_FAULT_NONE;
}

pd_status pd_ship_faults_parse(const char *text, pd_ship_faults *faults_out)
{
    pd_ship_faults faults = {0};

    for (const char *at = text; at != NULL && *at != '\0';) {
        size_t len = strcspn(at, ":,");
        pd_ship_fault fault = fault_named(at, len);
        char *end = NULL;
        unsigned long every = at[len] == ':' ? strtoul(at + len + 1, &end, 10) : 0;
        if (fault == PD_SHIP_FAULT_NONE || every == 0 || every > UINT32_MAX ||
            (*end != '\0' && *end != ',')) {
            pd_log_error("msg=\"KVFERRY_FAULTS is KIND:EVERY[,...], as bit:7; the kinds are bit, "
                         "other, epoch, missing, count, notice\" at=\"%.40s\"",
                         at);
            return PD_E_INVALID;
        }
        faults.every[fault] = (uint32_t)every;
        at = *end == ',' ? end + 1 : end;
    }
    *faults_out = faults;
    return PD_OK;
}

pd_ship_fault pd_ship_faults_next(pd_ship_faults *faults)
{
    faults->parts++;
    for (uint32_t i = 1; i < PD_SHIP_FAULTS; i++) {
        if (faults->every[i] != 0 && faults->parts % faults->every[i] == 0)
            return (pd_ship_fault)i;
    }
    return PD_SHIP_FAULT_NONE;
}
