#include "common/transfer/lanes.h"

#include <stdio.h>
#include <string.h>

static void lane_add(char *lane, size_t size, const char *name, size_t name_len)
{
    size_t len = strlen(lane);
    char plain[16];
    snprintf(plain, sizeof plain, "%.*s", (int)name_len, name);
    if (strstr(lane, plain) != NULL || len + strlen(plain) + 2 > size)
        return;
    snprintf(lane + len, size - len, "%s%s", len == 0 ? "" : "+", plain);
}

pd_status pd_lanes_read(const char *text, char *lane, size_t size)
{
    lane[0] = '\0';
    for (const char *at = text; (at = strstr(at, "lane[")) != NULL; at++) {
        const char *name = strstr(at, "]:");
        name = name == NULL ? NULL : strchr(name + 2, ':');
        const char *end = name == NULL ? NULL : strchr(name, '/');
        if (end != NULL && end - name < 16)
            lane_add(lane, size, name + 1, (size_t)(end - name - 1));
    }
    return lane[0] == '\0' ? PD_E_INTERNAL : PD_OK;
}
