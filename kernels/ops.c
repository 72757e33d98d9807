#include "kernels/ops.h"

#include "common/base/log.h"
#include "kernels/ops_list.h"

#include <string.h>

const kern_ops *kern_ops_at(uint32_t index)
{
    const kern_ops *found = kern_ops_list[0];

    for (uint32_t i = 0; i < index && found != NULL; i++)
        found = kern_ops_list[i + 1];
    return found;
}

static const kern_ops *choose_best(void)
{
    const kern_ops *best = NULL;
    char reason[128];
    int best_score = 0;

    for (uint32_t i = 0; kern_ops_list[i] != NULL; i++) {
        int score = kern_ops_list[i]->probe(reason, sizeof reason);
        if (score > best_score) {
            best = kern_ops_list[i];
            best_score = score;
        }
    }
    return best;
}

pd_status kern_ops_choose(const char *device, const kern_ops **ops_out)
{
    const kern_ops *ops = strcmp(device, "cpu") == 0 ? choose_best() : NULL;
    char reason[128] = "no such instruction set in this build";

    for (uint32_t i = 0; ops == NULL && kern_ops_list[i] != NULL; i++)
        if (strcmp(kern_ops_list[i]->name, device) == 0)
            ops = kern_ops_list[i];
    if (ops == NULL || ops->probe(reason, sizeof reason) == 0) {
        pd_log_error("msg=\"kernels: device not usable here\" device=%s reason=\"%s\"", device,
                     reason);
        return PD_E_UNSUPPORTED;
    }
    *ops_out = ops;
    return PD_OK;
}
