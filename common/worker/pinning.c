#include "common/worker/pinning.h"

#include "common/base/log.h"
#include "common/worker/machine.h"

typedef struct dealing {
    uint32_t count;
    uint32_t cores;             /* that there are */
    uint16_t cpu[CPU_SETSIZE];  /* [count] in the order in which they are dealt out */
    uint16_t core[CPU_SETSIZE]; /* [count] of each: its first CPU */
} dealing;

/* CPUs of that one's core. */
static cpu_set_t core_of(const pd_pinning_options *options, int cpu)
{
    cpu_set_t core;

    if (!pd_machine_siblings(options->sysfs, cpu, &core)) {
        CPU_ZERO(&core);
        CPU_SET(cpu, &core);
    }
    return core;
}

/* each: CPUs that are taken of a core, at most. */
static void deal(const pd_pinning_options *options, uint32_t each, dealing *dealt)
{
    cpu_set_t left = options->cpus;

    dealt->count = 0;
    dealt->cores = 0;
    for (int first = 0; first < CPU_SETSIZE; first++) {
        if (!CPU_ISSET(first, &left))
            continue;
        cpu_set_t core = core_of(options, first);
        uint32_t taken = 0;
        dealt->cores++;
        for (int cpu = first; cpu < CPU_SETSIZE; cpu++) {
            if (!CPU_ISSET(cpu, &core) || !CPU_ISSET(cpu, &left))
                continue;
            CPU_CLR(cpu, &left);
            if (taken++ >= each)
                continue;
            dealt->cpu[dealt->count] = (uint16_t)cpu;
            dealt->core[dealt->count++] = (uint16_t)first;
        }
    }
}

/* Nobody shares a CPU, and no two teams a core. */
static bool apart(const pd_pinning_options *options, const dealing *dealt)
{
    uint64_t end = 0;

    for (uint32_t team = 0; team < options->teams_count; team++) {
        if (end > 0 && end < dealt->count && options->teams[team] > 0 &&
            dealt->core[end - 1] == dealt->core[end])
            return false;
        end += options->teams[team];
        if (end > dealt->count)
            return false;
    }
    return true;
}

bool pd_pinning_choose(const pd_pinning_options *options, cpu_set_t *pins_out)
{
    dealing dealt;
    uint64_t all = 0, first = 0;

    pd_assert(options->own < options->teams_count && options->part < options->parts);
    uint32_t own = options->teams[options->own] / options->parts;
    if (options->wish == PD_PIN_NEVER || own == 0)
        return false;
    for (uint32_t team = 0; team < options->teams_count; team++) {
        first += team < options->own ? options->teams[team] : 0;
        all += options->teams[team];
    }
    deal(options, 1, &dealt);
    if (all > dealt.cores)
        deal(options, CPU_SETSIZE, &dealt);
    if (dealt.count == 0 || (options->wish == PD_PIN_AUTO && !apart(options, &dealt)))
        return false;
    first += (uint64_t)options->part * own;
    CPU_ZERO(pins_out);
    for (uint32_t i = 0; i < own; i++)
        CPU_SET(dealt.cpu[(first + i) % dealt.count], pins_out);
    return true;
}
