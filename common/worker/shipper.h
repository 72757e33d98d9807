#pragma once

/* common/worker/shipper.h - what carries out the ship plans of steps, as the runtime sees it.
 * common/worker/ship fills it. */

#include "common/kv/layout.h"
#include "common/transfer/transfer.h"
#include "common/worker/engine.h"

typedef struct pd_shipper pd_shipper;

typedef struct pd_shipper_options {
    pd_transfer *transfer; /* borrowed, as is layout */
    const pd_kv_layout *layout;
    uint64_t incarnation;
    uint32_t peers_max;
    bool seals;
} pd_shipper_options;

typedef struct pd_shipper_ops {
    pd_status (*create)(const pd_shipper_options *options, pd_shipper **shipper_out);
    void (*destroy)(pd_shipper *shipper);
    /* Loop thread: a peer's pool has so many blocks. Before anything is shipped to it. */
    void (*set_peer)(pd_shipper *shipper, pd_peer peer, uint32_t blocks);
    /* Loop thread: posts a notice without blocks, ticket 0. */
    pd_status (*notify)(pd_shipper *shipper, pd_peer peer, const pd_notice *notice);
    /* Compute thread: a pd_step_group_fn. */
    pd_step_group_fn *on_group;
} pd_shipper_ops;
