#include "common/worker/machine.h"

#include <ctype.h>
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_BYTES = 4096 }; /* a sysfs file is at most a page */

/* ---- files ---- */

/* The first line of sysfs/a/b/c, without its end. False: there is none. */
static bool read_line(const char *folder, const char *file, char out[TEXT_BYTES])
{
    char path[PATH_MAX];

    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, file) >= sizeof path)
        return false;
    FILE *from = fopen(path, "re");
    if (from == NULL)
        return false;
    bool read = fgets(out, TEXT_BYTES, from) != NULL;
    fclose(from);
    if (read)
        out[strcspn(out, "\n")] = '\0';
    return read;
}

/* A whole number and nothing else. */
static bool read_number(const char *folder, const char *file, long *number_out)
{
    char text[TEXT_BYTES], *end = NULL;

    if (!read_line(folder, file, text))
        return false;
    long number = strtol(text, &end, 0);
    if (end == text || *end != '\0')
        return false;
    *number_out = number;
    return true;
}

/* ---- CPUs ---- */

bool pd_cpu_list_parse(const char *text, cpu_set_t *cpus_out)
{
    cpu_set_t cpus;

    CPU_ZERO(&cpus);
    while (*text != '\0') {
        char *end = NULL;
        if (!isdigit((unsigned char)*text))
            return false;
        unsigned long first = strtoul(text, &end, 10), last = first;
        if (*end == '-') {
            text = end + 1;
            if (!isdigit((unsigned char)*text))
                return false;
            last = strtoul(text, &end, 10);
        }
        if (first > last || last >= CPU_SETSIZE || (*end != '\0' && *end != ','))
            return false;
        for (unsigned long cpu = first; cpu <= last; cpu++)
            CPU_SET(cpu, &cpus);
        text = *end == ',' ? end + 1 : end;
        if (*end == ',' && *text == '\0')
            return false;
    }
    *cpus_out = cpus;
    return true;
}

void pd_cpu_list_write(const cpu_set_t *cpus, char *out, size_t size)
{
    size_t len = 0;

    out[0] = '\0';
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char part[32];
        int first = cpu;
        if (!CPU_ISSET(cpu, cpus))
            continue;
        while (cpu + 1 < CPU_SETSIZE && CPU_ISSET(cpu + 1, cpus))
            cpu++;
        int n = first == cpu
                    ? snprintf(part, sizeof part, "%s%d", len > 0 ? "," : "", first)
                    : snprintf(part, sizeof part, "%s%d-%d", len > 0 ? "," : "", first, cpu);
        if (len + (size_t)n + 4 >= size) { /* "..." has its place after every part but the last */
            snprintf(out + len, size - len, "...");
            return;
        }
        memcpy(out + len, part, (size_t)n + 1);
        len += (size_t)n;
    }
}

bool pd_machine_siblings(const char *sysfs, int cpu, cpu_set_t *cpus_out)
{
    char folder[PATH_MAX], text[TEXT_BYTES];
    cpu_set_t cpus;

    if ((size_t)snprintf(folder, sizeof folder, "%s/devices/system/cpu/cpu%d/topology", sysfs,
                         cpu) >= sizeof folder ||
        !read_line(folder, "thread_siblings_list", text) || !pd_cpu_list_parse(text, &cpus) ||
        !CPU_ISSET(cpu, &cpus))
        return false;
    *cpus_out = cpus;
    return true;
}

static int by_number(const void *a, const void *b)
{
    const pd_numa_node *left = a, *right = b;

    return left->number - right->number;
}

static void read_nodes(const char *sysfs, pd_machine *machine)
{
    char folder[PATH_MAX - 300], path[PATH_MAX], text[TEXT_BYTES];

    if ((size_t)snprintf(folder, sizeof folder, "%s/devices/system/node", sysfs) >= sizeof folder)
        return;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        pd_numa_node node;
        int end = 0;
        if (sscanf(entry->d_name, "node%d%n", &node.number, &end) != 1 ||
            entry->d_name[end] != '\0' || node.number < 0 ||
            machine->nodes_count == PD_MACHINE_NODES_MAX)
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (read_line(path, "cpulist", text) && pd_cpu_list_parse(text, &node.cpus) &&
            CPU_COUNT(&node.cpus) > 0) /* a node may be memory alone */
            machine->nodes[machine->nodes_count++] = node;
    }
    if (dir != NULL)
        closedir(dir);
    qsort(machine->nodes, machine->nodes_count, sizeof machine->nodes[0], by_number);
}

/* ---- PCI ---- */

/* "0000:1b:00.0": domain, bus, slot, function. */
static bool is_bus_id(const char *text, size_t len)
{
    static const char shape[] = ":hh:hh.d";
    size_t tail = sizeof shape - 1;

    if (len < 4 + tail || len > 8 + tail)
        return false;
    for (size_t i = 0; i < len; i++) {
        char want = i < len - tail ? 'h' : shape[i - (len - tail)];
        bool fits = want == 'h'   ? isxdigit((unsigned char)text[i]) != 0
                    : want == 'd' ? isdigit((unsigned char)text[i]) != 0
                                  : text[i] == want;
        if (!fits)
            return false;
    }
    return true;
}

/* path: any link into sysfs/devices. What is below a PCI function (a virtio device, say) is at that
 * function. */
static pd_pci_place place_of(const char *sysfs, const char *path)
{
    static const char devices[] = "/devices/";
    char root[PATH_MAX], real[PATH_MAX];
    pd_pci_place place = {.numa_node = -1};
    long node;

    if (realpath(sysfs, root) == NULL || realpath(path, real) == NULL)
        return place;
    size_t len = strlen(root);
    if (strncmp(real, root, len) != 0 || strncmp(real + len, devices, sizeof devices - 1) != 0)
        return place;
    char *from = real + len + sizeof devices - 1, *end = NULL;
    if (strncmp(from, "pci", 3) != 0)
        return place;
    for (char *at = from; *at != '\0';) {
        size_t part = strcspn(at, "/");
        if (is_bus_id(at, part))
            end = at + part;
        at += part + (at[part] == '/');
    }
    if (end == NULL || (size_t)(end - from) >= sizeof place.path)
        return place;
    *end = '\0';
    memcpy(place.path, from, (size_t)(end - from) + 1);
    if (read_number(real, "numa_node", &node) && node >= 0 && node < INT_MAX)
        place.numa_node = (int)node;
    return place;
}

pd_pci_place pd_machine_find(const char *sysfs, const char *bus)
{
    char path[PATH_MAX];

    if (!is_bus_id(bus, strlen(bus)) ||
        (size_t)snprintf(path, sizeof path, "%s/bus/pci/devices/%s", sysfs, bus) >= sizeof path)
        return (pd_pci_place){.numa_node = -1};
    return place_of(sysfs, path);
}

typedef struct device_kind {
    long class, vendor;
    int numa_node;
} device_kind;

static bool kind_of(const char *sysfs, const char *bus, device_kind *kind_out)
{
    char path[PATH_MAX];

    if ((size_t)snprintf(path, sizeof path, "%s/bus/pci/devices/%s", sysfs, bus) >= sizeof path)
        return false;
    kind_out->numa_node = place_of(sysfs, path).numa_node;
    return read_number(path, "class", &kind_out->class) &&
           read_number(path, "vendor", &kind_out->vendor);
}

uint32_t pd_machine_ordinal(const char *sysfs, const char *bus)
{
    char path[PATH_MAX];
    device_kind ours, other;
    uint32_t lower = 0;

    if (!kind_of(sysfs, bus, &ours) ||
        (size_t)snprintf(path, sizeof path, "%s/bus/pci/devices", sysfs) >= sizeof path)
        return 0;
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        if (!is_bus_id(entry->d_name, strlen(entry->d_name)) || strcmp(entry->d_name, bus) >= 0)
            continue;
        lower += kind_of(sysfs, entry->d_name, &other) && other.class == ours.class &&
                 other.vendor == ours.vendor && other.numa_node == ours.numa_node;
    }
    if (dir != NULL)
        closedir(dir);
    return lower;
}

static uint32_t parts_of(const char *path)
{
    uint32_t parts = path[0] != '\0';

    for (; *path != '\0'; path++)
        parts += *path == '/';
    return parts;
}

static uint32_t common_parts(const char *a, const char *b)
{
    uint32_t common = 0;

    while (*a != '\0' && *b != '\0') {
        size_t la = strcspn(a, "/"), lb = strcspn(b, "/");
        if (la != lb || memcmp(a, b, la) != 0)
            break;
        common++;
        a += la + (a[la] == '/');
        b += lb + (b[lb] == '/');
    }
    return common;
}

pd_pci_distance pd_pci_distance_of(const pd_pci_place *a, const pd_pci_place *b, uint32_t *hops_out)
{
    uint32_t common = common_parts(a->path, b->path);

    *hops_out = 0;
    if (common > 0) {
        *hops_out = parts_of(a->path) + parts_of(b->path) - 2 * common;
        return common > 1 ? PD_PCI_BRIDGE : PD_PCI_ROOT;
    }
    return a->numa_node >= 0 && a->numa_node == b->numa_node ? PD_PCI_NODE : PD_PCI_FAR;
}

const char *pd_pci_distance_name(pd_pci_distance distance)
{
    static const char *const names[] = {"behind one bridge", "at one host bridge",
                                        "on one NUMA node", "far or unknown"};

    return names[distance];
}

/* ---- network devices ---- */

static bool net_is_up(const char *folder)
{
    char text[TEXT_BYTES];
    long carrier = 0;

    if (!read_line(folder, "operstate", text))
        return false;
    /* drivers that do not tell have "unknown", and a carrier */
    return strcmp(text, "up") == 0 || (strcmp(text, "unknown") == 0 &&
                                       read_number(folder, "carrier", &carrier) && carrier == 1);
}

static bool rdma_is_up(const char *folder)
{
    static const char *const ports[] = {"ports/1/state", "ports/2/state"};
    char text[TEXT_BYTES];

    for (size_t i = 0; i < sizeof ports / sizeof *ports; i++) {
        if (read_line(folder, ports[i], text) && strstr(text, "ACTIVE") != NULL)
            return true;
    }
    return false;
}

static pd_nic *add_nic(pd_machine *machine, const pd_pci_place *at, bool up)
{
    if (machine->nics_count == PD_MACHINE_NICS_MAX)
        return NULL;
    machine->nics[machine->nics_count] = (pd_nic){.at = *at, .up = up};
    return &machine->nics[machine->nics_count++];
}

static void add_net(pd_machine *machine, const char *name, const pd_pci_place *at, bool up)
{
    pd_nic *nic = add_nic(machine, at, up);

    if (nic != NULL)
        snprintf(nic->net, sizeof nic->net, "%.31s", name);
}

/* A network device of the same PCI function gets the other one's name. */
static void add_rdma(pd_machine *machine, const char *name, const pd_pci_place *at, bool up)
{
    bool known = false;

    for (uint32_t i = 0; i < machine->nics_count; i++) {
        pd_nic *nic = &machine->nics[i];
        if (strcmp(nic->at.path, at->path) != 0)
            continue;
        known = true;
        if (nic->rdma[0] == '\0' || strverscmp(name, nic->rdma) < 0)
            snprintf(nic->rdma, sizeof nic->rdma, "%.31s", name);
    }
    pd_nic *nic = known ? NULL : add_nic(machine, at, up);
    if (nic != NULL)
        snprintf(nic->rdma, sizeof nic->rdma, "%.31s", name);
}

static void read_class(const char *sysfs, const char *class, pd_machine *machine)
{
    char folder[PATH_MAX - 300], path[PATH_MAX], device[PATH_MAX];
    bool net = strcmp(class, "net") == 0;

    if ((size_t)snprintf(folder, sizeof folder, "%s/class/%s", sysfs, class) >= sizeof folder)
        return;
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir != NULL && (entry = readdir(dir)) != NULL;) {
        const char *name = entry->d_name;
        snprintf(path, sizeof path, "%s/%s", folder, name);
        if (name[0] == '.' ||
            strlen(name) >= sizeof machine->nics[0].net || /* the kernel's limit */
            (size_t)snprintf(device, sizeof device, "%s/device", path) >= sizeof device)
            continue;
        pd_pci_place at = place_of(sysfs, device);
        if (at.path[0] != '\0' && net)
            add_net(machine, name, &at, net_is_up(path));
        else if (at.path[0] != '\0')
            add_rdma(machine, name, &at, rdma_is_up(path));
    }
    if (dir != NULL)
        closedir(dir);
}

static int by_name(const void *a, const void *b)
{
    const pd_nic *left = a, *right = b;

    return strverscmp(left->net[0] != '\0' ? left->net : left->rdma,
                      right->net[0] != '\0' ? right->net : right->rdma);
}

void pd_machine_read(const char *sysfs, pd_machine *machine_out)
{
    *machine_out = (pd_machine){0};
    read_nodes(sysfs, machine_out);
    read_class(sysfs, "net", machine_out); /* first: the others are looked for among these */
    read_class(sysfs, "infiniband", machine_out);
    qsort(machine_out->nics, machine_out->nics_count, sizeof machine_out->nics[0], by_name);
}
