#pragma once

/* common/base/cpus.h - how many CPUs this process may compute on at once.
 *
 * Two limits hold: the set of CPUs that it may run on (affinity, which a cgroup's cpuset is part
 * of), and the CPU time that its cgroups give it (cpu.max of version 2, cpu.cfs_quota_us of version
 * 1), its own and every one above. Whoever computes with more threads than that is stopped for
 * some tens of milliseconds whenever the time is used up. Any thread. */

#include <stdbool.h>
#include <stdint.h>

/* CPUs of the affinity mask, as many as the quota gives in whole; at least 1. */
uint32_t pd_cpus_usable(void);
/* The same of given limits. quota: thousandths of a CPU; 0: none. */
uint32_t pd_cpus_within(uint32_t cpus, uint64_t quota);
/* The smallest quota of this process' cgroups, in thousandths of a CPU; 0: none, or none that can
 * be read. root: "" (the system's), or a folder with proc/self/cgroup, proc/self/mountinfo and what
 * that one names. */
uint64_t pd_cpus_quota(const char *root);
