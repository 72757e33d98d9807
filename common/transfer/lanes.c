#include "common/transfer/lanes.h"

#include <stdio.h>
#include <string.h>

bool pd_lanes_have(const char *lane, const char *name)
{
    size_t len = strlen(name);

    for (const char *at = lane; at != NULL && *at != '\0'; at = strchr(at, '+')) {
        at += *at == '+';
        if (strncmp(at, name, len) == 0 && (at[len] == '+' || at[len] == '\0'))
            return true;
    }
    return false;
}

static void lane_add(char *lane, size_t size, const char *name, size_t name_len)
{
    size_t len = strlen(lane);
    char plain[16];
    snprintf(plain, sizeof plain, "%.*s", (int)name_len, name);
    if (pd_lanes_have(lane, plain) || len + strlen(plain) + 2 > size)
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

bool pd_lanes_have_rdma(const char *lane)
{
    static const char *const names[] = {"rc_mlx5", "rc_verbs", "dc_mlx5", "gga_mlx5", "srd"};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (pd_lanes_have(lane, names[i]))
            return true;
    }
    return false;
}

bool pd_lanes_fit(const char *lane, const char *transport)
{
    bool tcp = pd_lanes_have(lane, "tcp"), rdma = pd_lanes_have_rdma(lane);

    if (strcmp(transport, "shm") == 0)
        return !tcp && !rdma;
    if (strcmp(transport, "tcp") == 0)
        return strcmp(lane, "tcp") == 0;
    if (strcmp(transport, "rdma") == 0)
        return !tcp;
    return true;
}

pd_lanes_way pd_lanes_gpu_way(const char *lane, bool nics)
{
    if (pd_lanes_have(lane, "cuda_ipc"))
        return PD_LANES_CUDA_IPC;
    return nics && pd_lanes_have_rdma(lane) ? PD_LANES_RDMA : PD_LANES_STAGED;
}

const char *pd_lanes_way_name(pd_lanes_way way)
{
    return way == PD_LANES_CUDA_IPC ? "cuda_ipc" : way == PD_LANES_RDMA ? "rdma" : "staged";
}
