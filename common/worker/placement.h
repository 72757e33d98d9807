#pragma once

/* common/worker/placement.h - where in the machine a worker runs: beside its GPU, or, on the host's
 * cores, on the NUMA node that its deployment has left the most of; and the network device nearest
 * to that.
 *
 * A worker that is placed runs on that node's CPUs, as far as it may use them, unless these are
 * fewer than its threads, and takes host memory there first. On a machine with one node, or none
 * that is known, nothing is changed. All workers of a deployment come to their places by
 * themselves, from the same file, and so do a worker's ranks: nobody is asked. One thread. */

#include "common/base/device_place.h"
#include "common/worker/machine.h"
#include "common/worker/pinning.h"

#define PD_PLACEMENT_CPUS_BYTES  96
#define PD_PLACEMENT_NIC_BYTES   72
#define PD_PLACEMENT_WORKERS_MAX (2 * PD_DEPLOYMENT_WORKERS_MAX)

typedef struct pd_placement_options {
    const char *sysfs;             /* "/sys" */
    const pd_device_place *device; /* NULL: the host's cores compute */
    cpu_set_t usable;              /* what this process may run on */
    uint32_t threads;              /* that compute, of all ranks that are placed alike */
    /* Threads of the deployment's workers on the host's cores that come before this one. */
    const uint32_t *before; /* [before_count] */
    uint32_t before_count;
    /* What only pinning asks. Likewise of those that come after it. */
    const uint32_t *after; /* [after_count] */
    uint32_t after_count;
    uint32_t rank, ranks; /* threads are of so many ranks, and this is which; ranks 0 is 1 */
    bool quota;           /* a cgroup limits the CPU time: others have the rest of these CPUs */
    pd_pin_threads pin_threads;
    /* True: that network device may carry (it has an address). NULL: each may. */
    bool (*carries)(const char *net);
} pd_placement_options;

typedef struct pd_placement {
    char bus[32];     /* of the GPU; "": the host's cores compute */
    int numa_node;    /* -1: not known, or there is no choice */
    cpu_set_t cpus;   /* to run on; what is usable, where not bound */
    bool bound;       /* to cpus, which are some of the usable ones */
    uint32_t threads; /* that compute there, of this rank; 0: a GPU does */
    bool pinned;      /* each to one of pins, in turn */
    cpu_set_t pins;
    bool near_memory;       /* host memory comes from numa_node first */
    char rdma[32], net[32]; /* the nearest network device; "": none. One that is up, if any is */
    bool nic_up, net_carries;
    pd_pci_distance nic_distance;
} pd_placement;

/* What is not known leaves its part as it is: this cannot fail. */
void pd_placement_choose(const pd_placement_options *options, pd_placement *placement_out);
/* For the calling thread and those that it will start. What the system refuses is logged, and
 * taken out of the placement: the worker runs without. */
void pd_placement_apply(pd_placement *placement);

void pd_placement_cpus(const pd_placement *placement, char out[PD_PLACEMENT_CPUS_BYTES]);
/* "" where nothing is pinned. */
void pd_placement_pins(const pd_placement *placement, char out[PD_PLACEMENT_CPUS_BYTES]);
/* "mlx5_0 (eth2)", "eth0", "unknown". */
void pd_placement_nic(const pd_placement *placement, char out[PD_PLACEMENT_NIC_BYTES]);
/* A network device that is up and has an address, as the kernel says. */
bool pd_net_has_address(const char *net);
