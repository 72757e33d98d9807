#pragma once

/* common/worker/setup.h - the parts a worker is made of, opened in order, each failure one line.
 *
 * Memory is taken here: weights by the engine, the KV pool by the engine where it wants one of its
 * own, else by the transfer; what was taken is logged with a line's figures. One thread. */

#include "common/config/deployment.h"
#include "common/model_file/model_file.h"
#include "common/transfer/transfer.h"
#include "common/worker/draft.h"
#include "common/worker/engine.h"
#include "common/worker/placement.h"
#include "common/worker/role.h"
#include "common/worker/ship.h"
#include "common/worker/weights_folder.h"

typedef struct pd_worker_options {
    const char *file; /* the deployment */
    const char *const *sets;
    size_t sets_count;
    const char *name; /* "prefill-0" */
    const char *self; /* the program's own name, for its ranks */
    const pd_role_ops *role;
    const pd_worker_engine_ops *engine;
} pd_worker_options;

typedef struct pd_worker_setup {
    const pd_worker_options *options;
    pd_deployment deployment;
    bool deployed;
    const pd_deployment_pool *pool; /* of the role, in deployment */
    uint32_t context;
    uint32_t threads; /* that compute, of one rank */
    pd_placement placement;
    char nic_port[40]; /* "mlx5_0:1", where the placement chose it for the transfer */
    uint64_t incarnation;
    char weights_folder[PD_WEIGHTS_FOLDER_BYTES]; /* "": none */
    pd_model_file *model;
    pd_kv_layout layout;
    pd_transfer *transfer;
    pd_ranks *ranks; /* NULL: there is one */
    pd_rank_place place;
    pd_worker_engine *engine;
    pd_draft draft;             /* of a decode worker with a draft model; else all 0 */
    pd_worker_pool pool_memory; /* the engine's, if it must be */
    pd_memory_reach pool_reach; /* as it is asked of the engine */
    pd_sealer sealer;           /* all NULL: seals are off */
    pd_shipper *shipper;
} pd_worker_setup;

/* Links at a time: every worker of the other role on a host, and those that are being replaced. */
#define PD_WORKER_PEERS_MAX 256

/* Reads the deployment and starts the log. PD_E_INVALID: the file, a --set or the name is wrong;
 * all that is wrong is on stderr, a line each. options must outlive the setup. */
PD_CHECKED pd_status pd_worker_setup_read(const pd_worker_options *options, pd_worker_setup *setup);
/* Opens the rest. Errors are logged. */
PD_CHECKED pd_status pd_worker_setup_open(pd_worker_setup *setup);
/* The same for a rank above 0: what it computes with, and nothing else. */
PD_CHECKED pd_status pd_worker_setup_open_rank(pd_worker_setup *setup, const pd_rank_start *start);
void pd_worker_setup_close(pd_worker_setup *setup); /* whatever is open */
