#include "common/worker/placement.h"

#include "common/base/log.h"

#include <ifaddrs.h>
#include <linux/mempolicy.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- the node ---- */

static cpu_set_t usable_of(const pd_numa_node *node, const pd_placement_options *options)
{
    cpu_set_t both;

    CPU_AND(&both, &node->cpus, &options->usable);
    return both;
}

/* The node with the most CPUs left among those that hold the threads; NULL: none does. */
static const pd_numa_node *roomiest(const pd_machine *machine, const pd_placement_options *options,
                                    const int64_t *left, uint32_t threads)
{
    const pd_numa_node *best = NULL;
    int64_t most = 0;

    for (uint32_t i = 0; i < machine->nodes_count; i++) {
        cpu_set_t cpus = usable_of(&machine->nodes[i], options);
        if (CPU_COUNT(&cpus) == 0 || (uint32_t)CPU_COUNT(&cpus) < threads)
            continue;
        if (best == NULL || left[i] > most) {
            best = &machine->nodes[i];
            most = left[i];
        }
    }
    return best;
}

/* Every worker does the same sum, in the same order, up to itself. */
typedef struct sharing_out {
    int64_t left[PD_MACHINE_NODES_MAX]; /* CPUs of each node */
} sharing_out;

static void begin_sharing(const pd_machine *machine, const pd_placement_options *options,
                          sharing_out *sharing)
{
    for (uint32_t i = 0; i < machine->nodes_count; i++) {
        cpu_set_t cpus = usable_of(&machine->nodes[i], options);
        sharing->left[i] = CPU_COUNT(&cpus);
    }
}

/* The next worker's node; NULL: none holds it. */
static const pd_numa_node *take_node(const pd_machine *machine, const pd_placement_options *options,
                                     sharing_out *sharing, uint32_t threads)
{
    const pd_numa_node *node = roomiest(machine, options, sharing->left, threads);

    if (node != NULL)
        sharing->left[node - machine->nodes] -= threads;
    return node;
}

static const pd_numa_node *node_for_cores(const pd_machine *machine,
                                          const pd_placement_options *options)
{
    sharing_out sharing;

    begin_sharing(machine, options, &sharing);
    for (uint32_t i = 0; i < options->before_count; i++)
        (void)take_node(machine, options, &sharing, options->before[i]);
    return take_node(machine, options, &sharing, options->threads);
}

static const pd_numa_node *node_of(const pd_machine *machine, int number)
{
    for (uint32_t i = 0; i < machine->nodes_count; i++) {
        if (machine->nodes[i].number == number)
            return &machine->nodes[i];
    }
    return NULL;
}

static void choose_node(const pd_machine *machine, const pd_placement_options *options,
                        const pd_pci_place *at, pd_placement *placement)
{
    const pd_numa_node *node = NULL;

    if (options->device != NULL) {
        placement->numa_node = at->numa_node >= 0 ? at->numa_node : options->device->numa_node;
        node = node_of(machine, placement->numa_node);
    } else if (machine->nodes_count == 1) {
        placement->numa_node = machine->nodes[0].number;
    } else {
        node = node_for_cores(machine, options);
        placement->numa_node = node != NULL ? node->number : -1;
    }
    if (placement->numa_node < 0)
        placement->numa_node = -1;
    if (node == NULL || machine->nodes_count < 2)
        return;
    placement->near_memory = true;
    cpu_set_t cpus = usable_of(node, options);
    if (CPU_COUNT(&cpus) == 0 || (uint32_t)CPU_COUNT(&cpus) < options->threads)
        return;
    placement->cpus = cpus;
    placement->bound = !CPU_EQUAL(&cpus, &options->usable);
}

/* ---- CPUs of its own ---- */

static uint32_t workers_of(const pd_placement_options *options)
{
    return options->before_count + 1 + options->after_count;
}

static uint32_t threads_at(const pd_placement_options *options, uint32_t worker)
{
    return worker < options->before_count    ? options->before[worker]
           : worker == options->before_count ? options->threads
                                             : options->after[worker - options->before_count - 1];
}

/* Those that share CPUs with this worker: on its node, or, where there is no choice of nodes, all.
 * False: some worker is on no node in particular, and may run on anybody's CPUs. */
static bool teams_here(const pd_machine *machine, const pd_placement_options *options,
                       pd_pinning_options *pinning, uint32_t *teams)
{
    const pd_numa_node *own = machine->nodes_count > 1 ? node_for_cores(machine, options) : NULL;
    bool all_placed = true;
    sharing_out sharing;

    begin_sharing(machine, options, &sharing);
    for (uint32_t i = 0; i < workers_of(options); i++) {
        uint32_t threads = threads_at(options, i);
        const pd_numa_node *node =
            machine->nodes_count > 1 ? take_node(machine, options, &sharing, threads) : NULL;
        all_placed = all_placed && (node != NULL || machine->nodes_count < 2);
        if (i == options->before_count)
            pinning->own = pinning->teams_count;
        if (own == NULL || node == own)
            teams[pinning->teams_count++] = threads;
    }
    pinning->cpus = own != NULL ? usable_of(own, options) : options->usable;
    return all_placed;
}

static void choose_pins(const pd_machine *machine, const pd_placement_options *options,
                        pd_placement *placement)
{
    uint32_t teams[PD_PLACEMENT_WORKERS_MAX];
    pd_pinning_options pinning = {.sysfs = options->sysfs,
                                  .teams = teams,
                                  .part = options->rank,
                                  .parts = options->ranks > 0 ? options->ranks : 1,
                                  .wish = options->pin_threads};

    pd_assert(workers_of(options) <= PD_PLACEMENT_WORKERS_MAX);
    if (options->device != NULL || options->pin_threads == PD_PIN_NEVER)
        return;
    uint64_t all = 0;
    for (uint32_t i = 0; i < workers_of(options); i++)
        all += threads_at(options, i);
    bool all_placed = teams_here(machine, options, &pinning, teams);
    if (options->pin_threads == PD_PIN_AUTO &&
        (!all_placed || options->quota || all > (uint64_t)CPU_COUNT(&options->usable)))
        return;
    placement->pinned = pd_pinning_choose(&pinning, &placement->pins);
}

/* ---- the network device ---- */

typedef struct nic_rank {
    bool carries, up;
    pd_pci_distance distance;
    uint32_t hops;
} nic_rank;

static nic_rank rank_of(const pd_nic *nic, const pd_placement_options *options,
                        const pd_pci_place *at)
{
    nic_rank rank = {.up = nic->up};

    rank.carries =
        nic->up && nic->net[0] != '\0' && (options->carries == NULL || options->carries(nic->net));
    rank.distance = pd_pci_distance_of(at, &nic->at, &rank.hops);
    return rank;
}

/* Below 0: a comes before b. One that is up before one that is not, then the nearest, then one that
 * has an address. */
static int compare(const nic_rank *a, const nic_rank *b)
{
    if (a->up != b->up)
        return a->up ? -1 : 1;
    if (a->distance != b->distance)
        return a->distance < b->distance ? -1 : 1;
    if (a->hops != b->hops)
        return a->hops < b->hops ? -1 : 1;
    return a->carries == b->carries ? 0 : a->carries ? -1 : 1;
}

static void choose_nic(const pd_machine *machine, const pd_placement_options *options,
                       const pd_pci_place *at, pd_placement *placement)
{
    nic_rank ranks[PD_MACHINE_NICS_MAX];
    uint32_t best = 0, ties = 0, ordinal = 0;

    if (machine->nics_count == 0)
        return;
    for (uint32_t i = 0; i < machine->nics_count; i++) {
        ranks[i] = rank_of(&machine->nics[i], options, at);
        if (compare(&ranks[i], &ranks[best]) < 0)
            best = i;
    }
    for (uint32_t i = 0; i < machine->nics_count; i++)
        ties += compare(&ranks[i], &ranks[best]) == 0;
    /* GPUs that have the same devices beside them take one each, in turn */
    if (options->device != NULL && ties > 1)
        ordinal = pd_machine_ordinal(options->sysfs, options->device->bus) % ties;
    for (uint32_t i = best; i < machine->nics_count; i++) {
        if (compare(&ranks[i], &ranks[best]) != 0 || ordinal-- > 0)
            continue;
        best = i;
        break;
    }
    const pd_nic *nic = &machine->nics[best];
    snprintf(placement->rdma, sizeof placement->rdma, "%s", nic->rdma);
    snprintf(placement->net, sizeof placement->net, "%s", nic->net);
    placement->nic_up = nic->up;
    placement->net_carries = ranks[best].carries;
    placement->nic_distance = ranks[best].distance;
}

void pd_placement_choose(const pd_placement_options *options, pd_placement *placement_out)
{
    pd_pci_place at = {.numa_node = -1};
    uint32_t ranks = options->ranks > 0 ? options->ranks : 1;
    pd_placement placement = {.numa_node = -1,
                              .cpus = options->usable,
                              .threads = options->device == NULL ? options->threads / ranks : 0,
                              .nic_distance = PD_PCI_FAR};
    pd_machine machine;

    pd_machine_read(options->sysfs, &machine);
    if (options->device != NULL) {
        snprintf(placement.bus, sizeof placement.bus, "%s", options->device->bus);
        at = pd_machine_find(options->sysfs, options->device->bus);
    }
    choose_node(&machine, options, &at, &placement);
    choose_pins(&machine, options, &placement);
    at.numa_node = placement.numa_node;
    choose_nic(&machine, options, &at, &placement);
    *placement_out = placement;
}

/* ---- taking the place ---- */

void pd_placement_apply(pd_placement *placement)
{
    enum { WORD_BITS = 8 * sizeof(unsigned long), WORDS = 1024 / WORD_BITS };
    unsigned long nodes[WORDS] = {0};
    int node = placement->numa_node;

    if (placement->bound && sched_setaffinity(0, sizeof placement->cpus, &placement->cpus) != 0) {
        pd_log_warn("msg=\"placement: not bound to its CPUs: %m\" numa_node=%d", node);
        placement->bound = false;
    }
    if (!placement->near_memory)
        return;
    if (node < 0 || node >= WORDS * WORD_BITS) {
        placement->near_memory = false;
        return;
    }
    nodes[node / WORD_BITS] = 1ul << (node % WORD_BITS);
    /* "the kernel reads one bit less than it is told" (set_mempolicy(2), BUGS) */
    if (syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes, (unsigned long)WORDS * WORD_BITS + 1) !=
        0) {
        /* containers often forbid it */
        pd_log_info("msg=\"placement: memory comes from any node: %m\" numa_node=%d", node);
        placement->near_memory = false;
    }
}

/* ---- words ---- */

void pd_placement_cpus(const pd_placement *placement, char out[PD_PLACEMENT_CPUS_BYTES])
{
    pd_cpu_list_write(&placement->cpus, out, PD_PLACEMENT_CPUS_BYTES);
}

void pd_placement_pins(const pd_placement *placement, char out[PD_PLACEMENT_CPUS_BYTES])
{
    cpu_set_t none;

    CPU_ZERO(&none);
    pd_cpu_list_write(placement->pinned ? &placement->pins : &none, out, PD_PLACEMENT_CPUS_BYTES);
}

void pd_placement_nic(const pd_placement *placement, char out[PD_PLACEMENT_NIC_BYTES])
{
    const char *rdma = placement->rdma, *net = placement->net;

    if (rdma[0] != '\0' && net[0] != '\0')
        snprintf(out, PD_PLACEMENT_NIC_BYTES, "%s (%s)", rdma, net);
    else
        snprintf(out, PD_PLACEMENT_NIC_BYTES, "%s",
                 rdma[0] != '\0'  ? rdma
                 : net[0] != '\0' ? net
                                  : "unknown");
}

bool pd_net_has_address(const char *net)
{
    struct ifaddrs *all = NULL;
    bool found = false;

    if (getifaddrs(&all) != 0)
        return false;
    for (const struct ifaddrs *at = all; at != NULL && !found; at = at->ifa_next) {
        if (strcmp(at->ifa_name, net) != 0 || at->ifa_addr == NULL || (at->ifa_flags & IFF_UP) == 0)
            continue;
        if (at->ifa_addr->sa_family == AF_INET)
            found = true;
        else if (at->ifa_addr->sa_family == AF_INET6)
            found = !IN6_IS_ADDR_LINKLOCAL(
                &((const struct sockaddr_in6 *)(const void *)at->ifa_addr)->sin6_addr);
    }
    freeifaddrs(all);
    return found;
}
