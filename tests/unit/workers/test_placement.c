/* Where a worker is put, on machines that are made here: trees of files and links as sysfs has
 * them, in a folder of their own. */

#include "common/worker/placement.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit/kv/cmocka_all.h"

static char root[256]; /* the machine's sysfs */

/* ---- making a machine ---- */

static void make_folders(const char *path)
{
    char part[PATH_MAX];

    snprintf(part, sizeof part, "%s/%s", root, path);
    for (char *at = part + strlen(root) + 1;; at++) {
        char was = *at;
        if (was != '/' && was != '\0')
            continue;
        *at = '\0';
        assert_true(mkdir(part, 0777) == 0 || errno == EEXIST);
        *at = was;
        if (was == '\0')
            return;
    }
}

static void make_file(const char *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void make_file(const char *text, const char *format, ...)
{
    char name[PATH_MAX - 512], path[PATH_MAX];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    snprintf(path, sizeof path, "%s/%s", root, name);
    char *slash = strrchr(name, '/');
    *slash = '\0';
    make_folders(name);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* root/from is a link to root/to. */
static void make_link(const char *to, const char *from)
{
    char target[PATH_MAX], path[PATH_MAX], folder[PATH_MAX - 512];

    snprintf(folder, sizeof folder, "%s", from);
    *strrchr(folder, '/') = '\0';
    make_folders(folder);
    snprintf(target, sizeof target, "%s/%s", root, to);
    snprintf(path, sizeof path, "%s/%s", root, from);
    assert_int_equal(symlink(target, path), 0);
}

/* path: below devices/, its last part the bus id. */
static void make_pci(const char *path, int numa_node, const char *class, const char *vendor)
{
    char text[32], from[PATH_MAX - 512], to[PATH_MAX - 512];

    snprintf(text, sizeof text, "%d\n", numa_node);
    make_file(text, "devices/%s/numa_node", path);
    make_file(class, "devices/%s/class", path);
    make_file(vendor, "devices/%s/vendor", path);
    snprintf(to, sizeof to, "devices/%s", path);
    snprintf(from, sizeof from, "bus/pci/devices/%s", strrchr(path, '/') + 1);
    make_link(to, from);
}

static void make_gpu(const char *path, int numa_node)
{
    make_pci(path, numa_node, "0x030200\n", "0x10de\n");
}

static void make_net(const char *name, const char *pci, int numa_node, const char *operstate)
{
    char to[PATH_MAX - 512], from[PATH_MAX - 512];

    make_pci(pci, numa_node, "0x020000\n", "0x15b3\n");
    snprintf(to, sizeof to, "devices/%s/net/%s", pci, name);
    make_folders(to);
    make_file(operstate, "%s/operstate", to);
    snprintf(from, sizeof from, "class/net/%s", name);
    make_link(to, from);
    snprintf(to, sizeof to, "devices/%s", pci);
    snprintf(from, sizeof from, "devices/%s/net/%s/device", pci, name);
    make_link(to, from);
}

/* An RDMA device on a function that make_net or make_pci has made. */
static void make_rdma(const char *name, const char *pci, const char *state)
{
    char to[PATH_MAX - 512], from[PATH_MAX - 512];

    snprintf(to, sizeof to, "devices/%s/infiniband/%s", pci, name);
    make_file(state, "%s/ports/1/state", to);
    snprintf(from, sizeof from, "class/infiniband/%s", name);
    make_link(to, from);
    snprintf(to, sizeof to, "devices/%s", pci);
    snprintf(from, sizeof from, "devices/%s/infiniband/%s/device", pci, name);
    make_link(to, from);
}

static void make_node(int number, const char *cpus)
{
    make_file(cpus, "devices/system/node/node%d/cpulist", number);
}

/* A loopback device, which has no place on PCI, as every machine has. */
static void make_loopback(void)
{
    make_file("unknown\n", "devices/virtual/net/lo/operstate");
    make_link("devices/virtual/net/lo", "class/net/lo");
}

static int setup(void **state)
{
    const char *folder = getenv("TMPDIR");

    (void)state;
    snprintf(root, sizeof root, "%s/kvferry-sysfs-XXXXXX", folder != NULL ? folder : "/tmp");
    assert_non_null(mkdtemp(root));
    make_loopback();
    return 0;
}

static int teardown(void **state)
{
    char command[320];

    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command); // NOLINT: a folder that setup has made
}

/* Two sockets of 48 cores, two threads each; on each two host bridges with two switches; behind
 * each switch a GPU and a network device. The last two on socket 1 are not up. */
static void make_big_machine(void)
{
    make_node(0, "0-47,96-143\n");
    make_node(1, "48-95,144-191\n");
    for (int i = 0; i < 8; i++) {
        char path[160], name[16];
        int bridge = i / 2, slot = i % 2;
        const char *state = i < 6 ? "4: ACTIVE\n" : "1: DOWN\n";
        snprintf(path, sizeof path,
                 "pci0000:%d0/0000:%d0:0%d.0/0000:%d%d:00.0/0000:%d%d:00.0/0000:%d%d:00.0",
                 bridge + 1, bridge + 1, slot + 1, bridge + 1, 4 * slot + 1, bridge + 1,
                 4 * slot + 2, bridge + 1, 4 * slot + 3);
        make_gpu(path, i / 4);
        *strrchr(path, '/') = '\0';
        *strrchr(path, '/') = '\0';
        snprintf(path + strlen(path), sizeof path - strlen(path), "/0000:%d%d:01.0/0000:%d%d:00.0",
                 bridge + 1, 4 * slot + 2, bridge + 1, 4 * slot + 4);
        snprintf(name, sizeof name, "eth%d", i);
        make_net(name, path, i / 4, i < 6 ? "up\n" : "down\n");
        snprintf(name, sizeof name, "mlx5_%d", i);
        make_rdma(name, path, state);
    }
}

static cpu_set_t cpus_of(const char *list)
{
    cpu_set_t cpus;

    assert_true(pd_cpu_list_parse(list, &cpus));
    return cpus;
}

static pd_placement choose_gpu(const char *bus, const char *usable, uint32_t threads)
{
    pd_device_place device = {.numa_node = -1};
    pd_placement placement;
    pd_placement_options options = {
        .sysfs = root, .device = &device, .usable = cpus_of(usable), .threads = threads};

    snprintf(device.bus, sizeof device.bus, "%s", bus);
    pd_placement_choose(&options, &placement);
    return placement;
}

static pd_placement choose_cores(const char *usable, uint32_t threads, const uint32_t *before,
                                 uint32_t before_count)
{
    pd_placement placement;
    pd_placement_options options = {.sysfs = root,
                                    .usable = cpus_of(usable),
                                    .threads = threads,
                                    .before = before,
                                    .before_count = before_count};

    pd_placement_choose(&options, &placement);
    return placement;
}

static void assert_cpus(const pd_placement *placement, const char *list)
{
    char text[PD_PLACEMENT_CPUS_BYTES];

    pd_placement_cpus(placement, text);
    assert_string_equal(text, list);
}

static void assert_nic(const pd_placement *placement, const char *name)
{
    char text[PD_PLACEMENT_NIC_BYTES];

    pd_placement_nic(placement, text);
    assert_string_equal(text, name);
}

/* ---- GPUs ---- */

static void each_gpu_gets_its_own_node_and_the_device_behind_its_switch(void **state)
{
    static const char *const gpus[] = {"0000:13:00.0", "0000:17:00.0", "0000:23:00.0",
                                       "0000:27:00.0", "0000:33:00.0", "0000:37:00.0"};

    (void)state;
    make_big_machine();
    for (int i = 0; i < 6; i++) {
        char nic[32];
        pd_placement placement = choose_gpu(gpus[i], "0-191", 8);
        assert_string_equal(placement.bus, gpus[i]);
        assert_int_equal(placement.numa_node, i / 4);
        assert_cpus(&placement, i < 4 ? "0-47,96-143" : "48-95,144-191");
        assert_true(placement.bound && placement.near_memory);
        snprintf(nic, sizeof nic, "mlx5_%d (eth%d)", i, i);
        assert_nic(&placement, nic);
        assert_int_equal(placement.nic_distance, PD_PCI_BRIDGE);
        assert_true(placement.nic_up && placement.net_carries);
    }
}

static void a_device_that_is_down_is_passed_over_for_the_nearest_that_is_up(void **state)
{
    (void)state;
    make_big_machine();
    /* behind the last bridge both are down: the next are at another bridge of the same node, two of
     * them, and two GPUs want them */
    pd_placement first = choose_gpu("0000:43:00.0", "0-191", 8);
    pd_placement second = choose_gpu("0000:47:00.0", "0-191", 8);
    assert_int_equal(first.nic_distance, PD_PCI_NODE);
    assert_nic(&first, "mlx5_4 (eth4)");
    assert_nic(&second, "mlx5_5 (eth5)");
}

static void the_distance_is_what_lies_between(void **state)
{
    const pd_pci_place gpu = {"pci0000:10/0000:10:01.0/0000:11:00.0", 0};
    const pd_pci_place root_port = {"pci0000:10/0000:10:02.0/0000:12:00.0", 0};
    const pd_pci_place same_bridge = {"pci0000:10/0000:10:01.0/0000:11:00.1", 0};
    const pd_pci_place other_bridge = {"pci0000:20/0000:20:01.0/0000:21:00.0", 0};
    const pd_pci_place other_node = {"pci0000:80/0000:80:01.0/0000:81:00.0", 1};
    const pd_pci_place like_a_prefix = {"pci0000:1/0000:10:01.0/0000:11:00.0", -1};
    uint32_t hops;

    (void)state;
    assert_int_equal(pd_pci_distance_of(&gpu, &same_bridge, &hops), PD_PCI_BRIDGE);
    assert_int_equal(hops, 2);
    assert_int_equal(pd_pci_distance_of(&gpu, &root_port, &hops), PD_PCI_ROOT);
    assert_int_equal(hops, 4);
    assert_int_equal(pd_pci_distance_of(&gpu, &other_bridge, &hops), PD_PCI_NODE);
    assert_int_equal(pd_pci_distance_of(&gpu, &other_node, &hops), PD_PCI_FAR);
    assert_int_equal(pd_pci_distance_of(&gpu, &like_a_prefix, &hops), PD_PCI_FAR);
    assert_int_equal(pd_pci_distance_of(&like_a_prefix, &other_node, &hops), PD_PCI_FAR);
}

static void what_may_be_used_is_kept_to_and_threads_are_not_crowded(void **state)
{
    (void)state;
    make_big_machine();
    pd_placement placement = choose_gpu("0000:13:00.0", "40-60", 8);
    assert_cpus(&placement, "40-47");
    assert_true(placement.bound);
    placement = choose_gpu("0000:13:00.0", "40-60", 9); /* eight there */
    assert_cpus(&placement, "40-60");
    assert_false(placement.bound);
    assert_true(placement.near_memory); /* what the GPU reads may lie beside it all the same */
    placement = choose_gpu("0000:13:00.0", "60-70", 1); /* none there */
    assert_cpus(&placement, "60-70");
    assert_false(placement.bound);
    placement = choose_gpu("0000:13:00.0", "0-7", 8); /* these are all it has anyway */
    assert_cpus(&placement, "0-7");
    assert_false(placement.bound);
}

static void a_gpu_of_no_known_node_is_left_where_it_is(void **state)
{
    (void)state;
    make_node(0, "0-7\n");
    make_node(1, "8-15\n");
    make_gpu("pci0000:00/0000:00:05.0", -1);
    make_net("eth0", "pci0000:00/0000:00:06.0", -1, "up\n");
    pd_placement placement = choose_gpu("0000:00:05.0", "0-15", 2);
    assert_int_equal(placement.numa_node, -1);
    assert_cpus(&placement, "0-15");
    assert_false(placement.bound || placement.near_memory);
    assert_nic(&placement, "eth0");
    assert_int_equal(placement.nic_distance, PD_PCI_ROOT);
    placement = choose_gpu("0000:99:00.0", "0-15", 2); /* there is no such device */
    assert_int_equal(placement.numa_node, -1);
    assert_false(placement.bound || placement.near_memory);
    assert_int_equal(placement.nic_distance, PD_PCI_FAR);
}

static void the_drivers_word_counts_where_sysfs_has_none(void **state)
{
    pd_device_place device = {.bus = "0000:01:00.0", .numa_node = 1};
    pd_placement placement;
    pd_placement_options options = {
        .sysfs = root, .device = &device, .usable = cpus_of("0-15"), .threads = 2};

    (void)state;
    make_node(0, "0-7\n");
    make_node(1, "8-15\n");
    pd_placement_choose(&options, &placement);
    assert_int_equal(placement.numa_node, 1);
    assert_cpus(&placement, "8-15");
}

/* ---- the host's cores ---- */

static void workers_on_cores_share_out_the_nodes(void **state)
{
    static const uint32_t before[] = {4, 4, 4, 4, 4};
    static const int nodes[] = {0, 1, 0, 1, 0, 1};

    (void)state;
    make_node(0, "0-7\n");
    make_node(1, "8-15\n");
    for (uint32_t i = 0; i < 6; i++) {
        pd_placement placement = choose_cores("0-15", 4, before, i);
        assert_int_equal(placement.numa_node, nodes[i]);
        assert_cpus(&placement, nodes[i] == 0 ? "0-7" : "8-15");
        assert_true(placement.bound && placement.near_memory);
    }
}

static void the_node_with_most_left_is_taken(void **state)
{
    static const uint32_t wide[] = {6};
    static const uint32_t too_wide[] = {40};

    (void)state;
    make_node(0, "0-3\n");
    make_node(1, "4-15\n");
    make_node(2, "\n"); /* memory alone */
    pd_placement placement = choose_cores("0-15", 2, NULL, 0);
    assert_int_equal(placement.numa_node, 1);
    placement = choose_cores("0-15", 2, wide, 1); /* 4 and 6 are left */
    assert_int_equal(placement.numa_node, 1);
    placement = choose_cores("0-9", 2, wide, 1); /* 4 and 0 */
    assert_int_equal(placement.numa_node, 0);
    placement = choose_cores("0-15", 2, too_wide, 1); /* which is nowhere in particular */
    assert_int_equal(placement.numa_node, 1);
    placement = choose_cores("0-15", 13, NULL, 0);
    assert_int_equal(placement.numa_node, -1);
    assert_cpus(&placement, "0-15");
    assert_false(placement.bound || placement.near_memory);
}

static void one_node_changes_nothing(void **state)
{
    (void)state;
    make_node(0, "0-7\n");
    make_net("eth0", "pci0000:00/0000:00:03.0", -1, "up\n");
    pd_placement placement = choose_cores("2-5", 2, NULL, 0);
    assert_int_equal(placement.numa_node, 0);
    assert_cpus(&placement, "2-5");
    assert_false(placement.bound || placement.near_memory);
    assert_nic(&placement, "eth0");
}

static void no_sysfs_changes_nothing(void **state)
{
    pd_placement placement;
    pd_placement_options options = {
        .sysfs = "/nowhere/at/all", .usable = cpus_of("0-3"), .threads = 2};

    (void)state;
    pd_placement_choose(&options, &placement);
    assert_int_equal(placement.numa_node, -1);
    assert_cpus(&placement, "0-3");
    assert_false(placement.bound || placement.near_memory);
    assert_nic(&placement, "unknown");
}

/* ---- network devices ---- */

static bool only_eth1(const char *net)
{
    return strcmp(net, "eth1") == 0;
}

static void of_equals_the_one_with_an_address_is_taken(void **state)
{
    pd_placement placement;
    pd_placement_options options = {
        .sysfs = root, .usable = cpus_of("0-3"), .threads = 1, .carries = only_eth1};

    (void)state;
    make_node(0, "0-3\n");
    make_net("eth0", "pci0000:00/0000:00:03.0", 0, "up\n");
    make_net("eth1", "pci0000:00/0000:00:04.0", 0, "up\n");
    make_net("eth10", "pci0000:00/0000:00:05.0", 0, "up\n");
    pd_placement_choose(&options, &placement);
    assert_nic(&placement, "eth1");
    assert_true(placement.net_carries);
}

static void what_is_not_up_is_shown_and_carries_nothing(void **state)
{
    (void)state;
    make_node(0, "0-3\n");
    make_net("eth0", "pci0000:00/0000:00:03.0", 0, "down\n");
    pd_placement placement = choose_cores("0-3", 1, NULL, 0);
    assert_nic(&placement, "eth0");
    assert_false(placement.nic_up || placement.net_carries);
}

static void a_device_below_a_pci_function_is_at_that_function(void **state)
{
    (void)state;
    make_node(0, "0-3\n");
    make_pci("pci0000:00/0000:00:03.0", 1, "0x020000\n", "0x1af4\n");
    make_file("unknown\n", "devices/pci0000:00/0000:00:03.0/virtio2/net/eth0/operstate");
    make_file("1\n", "devices/pci0000:00/0000:00:03.0/virtio2/net/eth0/carrier");
    make_link("devices/pci0000:00/0000:00:03.0/virtio2/net/eth0", "class/net/eth0");
    make_link("devices/pci0000:00/0000:00:03.0/virtio2",
              "devices/pci0000:00/0000:00:03.0/virtio2/net/eth0/device");
    pd_machine machine;
    pd_machine_read(root, &machine);
    assert_int_equal(machine.nics_count, 1); /* lo is on no PCI */
    assert_string_equal(machine.nics[0].at.path, "pci0000:00/0000:00:03.0");
    assert_int_equal(machine.nics[0].at.numa_node, 1);
    assert_true(machine.nics[0].up); /* it does not tell, and has a carrier */
}

static void an_rdma_device_alone_is_a_network_device(void **state)
{
    (void)state;
    make_node(0, "0-3\n");
    make_pci("pci0000:00/0000:00:03.0", 0, "0x020700\n", "0x15b3\n");
    make_rdma("mlx5_0", "pci0000:00/0000:00:03.0", "4: ACTIVE\n");
    pd_placement placement = choose_cores("0-3", 1, NULL, 0);
    assert_nic(&placement, "mlx5_0");
    assert_true(placement.nic_up);
    assert_false(placement.net_carries); /* tcp has nothing to go over */
}

/* ---- what is broken ---- */

static void broken_files_are_left_out(void **state)
{
    (void)state;
    make_node(0, "0-3,\n");
    make_node(1, "7-4\n");
    make_node(2, "x\n");
    make_node(3, "0-99999999999999999999\n");
    make_node(4, "4-7\n");
    make_file("0-3\n", "devices/system/node/node5x/cpulist");
    make_file("0-3\n", "devices/system/node/nodule/cpulist");
    make_folders("devices/system/node/node6"); /* no list at all */
    make_gpu("pci0000:00/0000:00:05.0", 4);
    make_file("four\n", "devices/pci0000:00/0000:00:05.0/numa_node");
    make_link("devices/pci0000:00/gone", "class/net/eth7"); /* leads nowhere */
    make_folders("class/infiniband/mlx5_0");                /* no device */
    pd_machine machine;
    pd_machine_read(root, &machine);
    assert_int_equal(machine.nodes_count, 1);
    assert_int_equal(machine.nodes[0].number, 4);
    assert_int_equal(machine.nics_count, 0);
    assert_int_equal(pd_machine_find(root, "0000:00:05.0").numa_node, -1);
    assert_string_equal(pd_machine_find(root, "0000:00:05.0").path, "pci0000:00/0000:00:05.0");
    assert_string_equal(pd_machine_find(root, "../../etc").path, "");
    assert_string_equal(pd_machine_find(root, "").path, "");
}

static void a_link_out_of_the_tree_is_no_place(void **state)
{
    char path[PATH_MAX];

    (void)state;
    make_folders("class/net/eth0");
    snprintf(path, sizeof path, "%s/class/net/eth0/device", root);
    assert_int_equal(symlink("/tmp", path), 0);
    pd_machine machine;
    pd_machine_read(root, &machine);
    assert_int_equal(machine.nics_count, 0);
}

static void more_devices_than_fit_are_left_out(void **state)
{
    (void)state;
    for (int i = 0; i < PD_MACHINE_NICS_MAX + 3; i++) {
        char name[16], path[64];
        snprintf(name, sizeof name, "eth%d", i);
        snprintf(path, sizeof path, "pci0000:00/0000:%02x:00.0", i);
        make_net(name, path, 0, "up\n");
    }
    for (int i = 0; i < PD_MACHINE_NODES_MAX + 3; i++)
        make_node(i, "0-3\n");
    pd_machine machine;
    pd_machine_read(root, &machine);
    assert_int_equal(machine.nics_count, PD_MACHINE_NICS_MAX);
    assert_int_equal(machine.nodes_count, PD_MACHINE_NODES_MAX);
}

/* ---- CPUs of its own ---- */

/* Hardware threads of one core, such as "0,4". */
static void make_core(const char *list)
{
    cpu_set_t cpus = cpus_of(list);

    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &cpus))
            make_file(list, "devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    }
}

/* Where worker `own` of these has its threads; "": anywhere. */
static void assert_pins(pd_placement_options options, const uint32_t *workers, uint32_t count,
                        uint32_t own, const char *expected)
{
    char text[PD_PLACEMENT_CPUS_BYTES];
    pd_placement placement;

    options.sysfs = root;
    options.threads = workers[own];
    options.before = workers;
    options.before_count = own;
    options.after = &workers[own + 1];
    options.after_count = count - own - 1;
    pd_placement_choose(&options, &placement);
    pd_placement_pins(&placement, text);
    assert_string_equal(text, expected);
    assert_int_equal(placement.pinned, expected[0] != '\0');
    uint32_t ranks = options.ranks > 0 ? options.ranks : 1;
    assert_int_equal(placement.threads, options.device == NULL ? options.threads / ranks : 0);
}

static void each_worker_gets_cores_of_its_own_or_none_does(void **state)
{
    static const struct {
        uint32_t workers[3], count;
        const char *automatic[3], *always[3];
    } cases[] = {
        {{1, 1}, 2, {"0", "1"}, {"0", "1"}},
        {{2, 2}, 2, {"0-1", "2-3"}, {"0-1", "2-3"}}, /* a core a thread */
        {{1, 2, 1}, 3, {"0", "1-2", "3"}, {"0", "1-2", "3"}},
        {{4, 4}, 2, {"0-1,4-5", "2-3,6-7"}, {"0-1,4-5", "2-3,6-7"}}, /* whole cores */
        {{2, 4, 2}, 3, {"0,4", "1-2,5-6", "3,7"}, {"0,4", "1-2,5-6", "3,7"}},
        {{8}, 1, {"0-7"}, {"0-7"}},
        {{3, 3}, 2, {"", ""}, {"0-1,4", "2,5-6"}}, /* would meet on a core */
        {{5, 5}, 2, {"", ""}, {"0-2,4-5", "0,3-4,6-7"}},
        {{9}, 1, {""}, {"0-7"}},
    };

    (void)state;
    make_node(0, "0-7\n");
    for (int core = 0; core < 4; core++) {
        char list[32];
        snprintf(list, sizeof list, "%d,%d", core, core + 4);
        make_core(list);
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (uint32_t own = 0; own < cases[i].count; own++) {
            pd_placement_options options = {.usable = cpus_of("0-7")};
            assert_pins(options, cases[i].workers, cases[i].count, own, ""); /* by default */
            options.pin_threads = PD_PIN_AUTO;
            assert_pins(options, cases[i].workers, cases[i].count, own, cases[i].automatic[own]);
            options.quota = true; /* others have what it leaves */
            assert_pins(options, cases[i].workers, cases[i].count, own, "");
            options.pin_threads = PD_PIN_ALWAYS;
            assert_pins(options, cases[i].workers, cases[i].count, own, cases[i].always[own]);
        }
    }
}

static void pins_keep_to_the_mask(void **state)
{
    static const uint32_t two[] = {2, 2}, more[] = {2, 3};
    pd_device_place gpu = {.numa_node = -1};
    pd_placement_options options = {.usable = cpus_of("2-5"), .pin_threads = PD_PIN_AUTO};

    (void)state; /* nothing is known of cores: each CPU is one */
    assert_pins(options, two, 2, 0, "2-3");
    assert_pins(options, two, 2, 1, "4-5");
    assert_pins(options, more, 2, 0, "");
    options.usable = cpus_of("1,3,900-901");
    assert_pins(options, two, 2, 0, "1,3");
    assert_pins(options, two, 2, 1, "900-901");
    make_core("1,2"); /* of which one may be used */
    make_core("3,4");
    assert_pins(options, two, 2, 0, "1,3");
    options.device = &gpu; /* which computes by itself */
    assert_pins(options, two, 2, 0, "");
    options.pin_threads = PD_PIN_ALWAYS;
    assert_pins(options, two, 2, 0, "");
}

static void ranks_share_out_their_workers_cpus(void **state)
{
    static const uint32_t workers[] = {4, 2};
    static const char *const expected[] = {"0-1", "2-3"};
    pd_placement_options options = {
        .usable = cpus_of("0-7"), .ranks = 2, .pin_threads = PD_PIN_AUTO};

    (void)state;
    for (options.rank = 0; options.rank < 2; options.rank++)
        assert_pins(options, workers, 2, 0, expected[options.rank]);
    options.ranks = 1;
    options.rank = 0;
    assert_pins(options, workers, 2, 1, "4-5");
}

static void pins_are_on_the_workers_node(void **state)
{
    static const uint32_t four[] = {4, 4, 4, 4, 4}, wide[] = {4, 10};
    static const char *const expected[] = {"0-3", "8-11", "4-7", "12-15"};
    pd_placement_options options = {.usable = cpus_of("0-15"), .pin_threads = PD_PIN_AUTO};

    (void)state;
    make_node(0, "0-7\n");
    make_node(1, "8-15\n");
    for (uint32_t own = 0; own < 4; own++) {
        assert_pins(options, four, 4, own, expected[own]);
        assert_pins(options, four, 5, own, ""); /* more threads than CPUs, together */
    }
    assert_pins(options, wide, 2, 0, ""); /* the other is on no node: it may run here, too */
    assert_pins(options, wide, 2, 1, "");
    options.pin_threads = PD_PIN_ALWAYS;
    assert_pins(options, four, 5, 4, "0-3");
    assert_pins(options, wide, 2, 1, "4-13");
}

/* ---- sets of CPUs ---- */

static void cpu_lists_are_read_and_written_as_the_kernel_does(void **state)
{
    static const char *const good[] = {"", "0", "0-3", "0-3,8,10-11", "1023"};
    static const char *const bad[] = {",", "0,", "3-1", "-1", "0-", "0-3x", " 0", "1024", "0,,1"};
    cpu_set_t cpus;
    char text[64];

    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_true(pd_cpu_list_parse(good[i], &cpus));
        pd_cpu_list_write(&cpus, text, sizeof text);
        assert_string_equal(text, good[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(pd_cpu_list_parse(bad[i], &cpus));
    cpus = cpus_of("0-3,8,10-11,20,30,40");
    pd_cpu_list_write(&cpus, text, 16);
    assert_string_equal(text, "0-3,8,10-11...");
}

/* ---- taking the place ---- */

static void a_worker_that_is_bound_runs_there(void **state)
{
    cpu_set_t before, now;
    pd_placement placement = {.numa_node = 0, .bound = true, .near_memory = true};
    int mode = -1;
    unsigned long nodes[16] = {0};

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&placement.cpus);
    for (int cpu = CPU_SETSIZE - 1; CPU_COUNT(&placement.cpus) == 0; cpu--) {
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &placement.cpus);
    }
    pd_placement_apply(&placement);
    assert_true(placement.bound);
    assert_int_equal(sched_getaffinity(0, sizeof now, &now), 0);
    assert_true(CPU_EQUAL(&now, &placement.cpus));
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    if (!placement.near_memory)
        return; /* this system does not let it, and that is said */
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, nodes, sizeof nodes * 8, NULL, 0), 0);
    assert_int_equal(mode, 1); /* MPOL_PREFERRED */
    assert_int_equal(nodes[0], 1);
    assert_int_equal(syscall(SYS_set_mempolicy, 0, NULL, 0), 0);
}

static void what_the_system_refuses_is_done_without(void **state)
{
    pd_placement placement = {.numa_node = 5000, .bound = true, .near_memory = true};
    cpu_set_t before, now;

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&placement.cpus); /* no CPU */
    pd_placement_apply(&placement);
    assert_false(placement.bound || placement.near_memory);
    assert_int_equal(sched_getaffinity(0, sizeof now, &now), 0);
    assert_true(CPU_EQUAL(&now, &before));
}

static void this_machine_is_read_without_harm(void **state)
{
    pd_machine machine;

    (void)state;
    pd_machine_read("/sys", &machine);
    for (uint32_t i = 0; i < machine.nodes_count; i++)
        assert_true(CPU_COUNT(&machine.nodes[i].cpus) > 0);
    assert_true(pd_net_has_address("lo") || access("/sys/class/net/lo", F_OK) != 0);
    assert_false(pd_net_has_address("no-such-device"));
}

#define ON_A_MACHINE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_A_MACHINE(each_gpu_gets_its_own_node_and_the_device_behind_its_switch),
        ON_A_MACHINE(a_device_that_is_down_is_passed_over_for_the_nearest_that_is_up),
        cmocka_unit_test(the_distance_is_what_lies_between),
        ON_A_MACHINE(what_may_be_used_is_kept_to_and_threads_are_not_crowded),
        ON_A_MACHINE(a_gpu_of_no_known_node_is_left_where_it_is),
        ON_A_MACHINE(the_drivers_word_counts_where_sysfs_has_none),
        ON_A_MACHINE(workers_on_cores_share_out_the_nodes),
        ON_A_MACHINE(the_node_with_most_left_is_taken),
        ON_A_MACHINE(one_node_changes_nothing),
        cmocka_unit_test(no_sysfs_changes_nothing),
        ON_A_MACHINE(each_worker_gets_cores_of_its_own_or_none_does),
        ON_A_MACHINE(pins_keep_to_the_mask),
        ON_A_MACHINE(ranks_share_out_their_workers_cpus),
        ON_A_MACHINE(pins_are_on_the_workers_node),
        ON_A_MACHINE(of_equals_the_one_with_an_address_is_taken),
        ON_A_MACHINE(what_is_not_up_is_shown_and_carries_nothing),
        ON_A_MACHINE(a_device_below_a_pci_function_is_at_that_function),
        ON_A_MACHINE(an_rdma_device_alone_is_a_network_device),
        ON_A_MACHINE(broken_files_are_left_out),
        ON_A_MACHINE(a_link_out_of_the_tree_is_no_place),
        ON_A_MACHINE(more_devices_than_fit_are_left_out),
        cmocka_unit_test(cpu_lists_are_read_and_written_as_the_kernel_does),
        cmocka_unit_test(a_worker_that_is_bound_runs_there),
        cmocka_unit_test(what_the_system_refuses_is_done_without),
        cmocka_unit_test(this_machine_is_read_without_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
