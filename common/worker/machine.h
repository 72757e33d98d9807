#pragma once

/* common/worker/machine.h - where this machine's processors, PCI devices and network devices lie,
 * as sysfs tells it (Linux, Documentation/ABI: sysfs-devices-system-node, sysfs-bus-pci,
 * sysfs-class-net, sysfs-class-infiniband).
 *
 * Nothing here fails: what cannot be read, or is not what it should be, is not known, and left out.
 * `sysfs` is "/sys", or a tree of the same shape. Any thread. */

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PD_MACHINE_NODES_MAX 64
#define PD_MACHINE_NICS_MAX  64
#define PD_PCI_PATH_BYTES    256

typedef struct pd_numa_node {
    int number;
    cpu_set_t cpus; /* that are online; at least one */
} pd_numa_node;

/* A device's way through the PCI tree, from its host bridge to its function:
 * "pci0000:15/0000:15:01.0/0000:16:00.0". */
typedef struct pd_pci_place {
    char path[PD_PCI_PATH_BYTES]; /* "": it is not on PCI, or not known */
    int numa_node;                /* -1: not known */
} pd_pci_place;

typedef struct pd_nic {
    char rdma[32]; /* "mlx5_0"; "": none */
    char net[32];  /* "eth2"; "": none */
    pd_pci_place at;
    bool up; /* the network device's, or where there is none a port of the other */
} pd_nic;

typedef struct pd_machine {
    pd_numa_node nodes[PD_MACHINE_NODES_MAX]; /* by number; none: no NUMA, or not known */
    uint32_t nodes_count;
    pd_nic nics[PD_MACHINE_NICS_MAX]; /* that are on PCI, by name */
    uint32_t nics_count;
} pd_machine;

void pd_machine_read(const char *sysfs, pd_machine *machine_out);
/* The device with that bus id ("0000:1b:00.0"). path is "" when there is none. */
pd_pci_place pd_machine_find(const char *sysfs, const char *bus);
/* How many devices of the same class and maker on the same node have a lower bus id: neighbours
 * that are alike get numbers of their own, from 0. */
uint32_t pd_machine_ordinal(const char *sysfs, const char *bus);

/* What lies between two devices, the nearest first. */
typedef enum pd_pci_distance {
    PD_PCI_BRIDGE, /* a bridge or switch that both are behind */
    PD_PCI_ROOT,   /* their host bridge */
    PD_PCI_NODE,   /* nothing of PCI, the same NUMA node */
    PD_PCI_FAR,    /* two NUMA nodes, or not known */
} pd_pci_distance;
/* *hops_out: bridges and functions on the way; 0 where it does not lead through PCI alone. */
pd_pci_distance pd_pci_distance_of(const pd_pci_place *a, const pd_pci_place *b,
                                   uint32_t *hops_out);
const char *pd_pci_distance_name(pd_pci_distance distance); /* "behind one bridge" */

/* CPUs of the same core (hardware threads), the given one among them. False: not known. */
bool pd_machine_siblings(const char *sysfs, int cpu, cpu_set_t *cpus_out);

/* "0-3,8": as the kernel writes sets of CPUs. False: not such a text, or a number that cpu_set_t
 * does not hold. */
bool pd_cpu_list_parse(const char *text, cpu_set_t *cpus_out);
/* Cut off with "..." where size is too small (at least 8). */
void pd_cpu_list_write(const cpu_set_t *cpus, char *out, size_t size);
