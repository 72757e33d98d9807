#include "common/worker/role.h"

void pd_role_heartbeat(const pd_role_ops *ops, const pd_role_core *core,
                       pd_msg_heartbeat *heartbeat)
{
    pd_role_counters counters = ops->counters(core);

    ops->heartbeat(core, heartbeat);
    heartbeat->counts = (pd_worker_counts){.shipped_bytes = counters.bytes_shipped,
                                           .suspended = counters.suspended,
                                           .moved = counters.moved,
                                           .stalled = counters.stalled,
                                           .spec_steps = counters.spec_steps,
                                           .spec_drafted = counters.spec_drafted,
                                           .spec_accepted = counters.spec_accepted};
    if (ops->speculation != NULL)
        heartbeat->counts.spec_method = ops->speculation(core);
}
