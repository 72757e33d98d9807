/* Quotas of CPU time, in trees of files that look as the kernel's do. */

#include "common/base/cpus.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/kv/cmocka_all.h"

static char root[256]; /* "/proc" and "/sys" are below it */

static void put(const char *path, const char *text)
{
    char full[PATH_MAX];

    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        assert_true(mkdir(full, 0777) == 0 || errno == EEXIST);
        *at = '/';
    }
    FILE *file = fopen(full, "we");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state)
{
    const char *tmp = getenv("TMPDIR");

    (void)state;
    snprintf(root, sizeof root, "%.200s/kvferry-cpus-XXXXXX", tmp != NULL ? tmp : "/tmp");
    return mkdtemp(root) == NULL;
}

static int teardown(void **state)
{
    char command[320];

    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command); // NOLINT: a folder that setup has made
}

#define DISK  "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
#define TWO   "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
#define CPU_1 "33 22 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
#define SET_1 "34 22 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"

static void whoever_is_in_no_group_has_no_quota(void **state)
{
    (void)state;
    assert_int_equal(pd_cpus_quota(root), 0);
    put("/proc/self/mountinfo", DISK TWO);
    assert_int_equal(pd_cpus_quota(root), 0);
    put("/proc/self/cgroup", "0::/\n");
    assert_int_equal(pd_cpus_quota(root), 0); /* the topmost group has no cpu.max */
    put("/proc/self/mountinfo", DISK);
    put("/sys/fs/cgroup/cpu.max", "100000 100000\n");
    assert_int_equal(pd_cpus_quota(root), 0); /* mounted nowhere */
}

static void the_smallest_on_the_way_up_counts(void **state)
{
    (void)state;
    put("/proc/self/mountinfo", DISK TWO);
    put("/proc/self/cgroup", "0::/user.slice/a.service\n");
    put("/sys/fs/cgroup/user.slice/a.service/cpu.max", "max 100000\n");
    assert_int_equal(pd_cpus_quota(root), 0);
    put("/sys/fs/cgroup/user.slice/a.service/cpu.max", "350000 100000\n");
    assert_int_equal(pd_cpus_quota(root), 3500);
    put("/sys/fs/cgroup/user.slice/cpu.max", "600000 100000\n");
    assert_int_equal(pd_cpus_quota(root), 3500);
    put("/sys/fs/cgroup/user.slice/cpu.max", "100000 50000\n");
    assert_int_equal(pd_cpus_quota(root), 2000);
    put("/sys/fs/cgroup/cpu.max", "150000 100000\n"); /* a container sees its own at the top */
    assert_int_equal(pd_cpus_quota(root), 1500);
    put("/sys/fs/cgroup/other.slice/cpu.max", "1000 100000\n");
    assert_int_equal(pd_cpus_quota(root), 1500);
}

static void version_1_has_the_quota_in_two_files(void **state)
{
    (void)state;
    put("/proc/self/mountinfo", DISK SET_1 CPU_1);
    put("/proc/self/cgroup", "5:cpuset:/c\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/s\n");
    put("/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
    assert_int_equal(pd_cpus_quota(root), 0);
    put("/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "250000\n");
    assert_int_equal(pd_cpus_quota(root), 2500);
    put("/sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "1000\n"); /* cpuset's group */
    put("/sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us", "100000\n");
    assert_int_equal(pd_cpus_quota(root), 2500);
    put("/proc/self/mountinfo", DISK SET_1 TWO CPU_1); /* both are mounted */
    put("/proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n0::/v2\n");
    put("/sys/fs/cgroup/v2/cpu.max", "200000 100000\n");
    assert_int_equal(pd_cpus_quota(root), 2000);
}

static void what_is_mounted_may_be_a_part(void **state)
{
    (void)state;
    /* a container that sees the host's names: its own group is at the mount point */
    put("/proc/self/mountinfo",
        "33 22 0:30 /docker/x /sys/fs/my\\040groups rw - cgroup cgroup rw,cpu\n");
    put("/proc/self/cgroup", "4:cpu:/docker/x\n");
    put("/sys/fs/my groups/cpu.cfs_quota_us", "400000\n");
    put("/sys/fs/my groups/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/my groups/docker/x/cpu.cfs_quota_us", "100000\n");
    put("/sys/fs/my groups/docker/x/cpu.cfs_period_us", "100000\n");
    assert_int_equal(pd_cpus_quota(root), 4000);
    put("/sys/fs/my groups/part/cpu.cfs_quota_us", "300000\n");
    put("/sys/fs/my groups/part/cpu.cfs_period_us", "100000\n");
    put("/proc/self/cgroup", "4:cpu:/docker/x/part\n");
    assert_int_equal(pd_cpus_quota(root), 3000);
    put("/proc/self/cgroup", "4:cpu:/docker/xy\n"); /* another group, not below it */
    assert_int_equal(pd_cpus_quota(root), 4000);
    put("/proc/self/mountinfo", TWO);
    put("/proc/self/cgroup", "0::/../beside\n"); /* outside of its namespace: nobody can tell */
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    put("/sys/fs/beside/cpu.max", "100000 100000\n");
    assert_int_equal(pd_cpus_quota(root), 0);
}

static void what_is_no_quota_is_none(void **state)
{
    static const char *const texts[] = {"",       "\n",         "max",
                                        "100000", "-5 100000",  "100000 0",
                                        "x 1",    "100000 max", "99999999999999999999999 100000"};

    (void)state;
    put("/proc/self/mountinfo", "\n - \n33 cgroup2\n - cgroup2 a b\n" TWO);
    put("/proc/self/cgroup", "\n:\n::\n4\n4:cpu\n0::/\n");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        put("/sys/fs/cgroup/cpu.max", texts[i]);
        assert_int_equal(pd_cpus_quota(root), 0);
    }
    put("/sys/fs/cgroup/cpu.max", "1 1000000"); /* however little: it is one */
    assert_int_equal(pd_cpus_quota(root), 1);
    put("/sys/fs/cgroup/cpu.max", "100000 100000");
    assert_int_equal(pd_cpus_quota(root), 1000);
}

static void whole_cpus_are_counted_and_one_at_least(void **state)
{
    cpu_set_t cpus;

    (void)state;
    assert_int_equal(pd_cpus_within(8, 0), 8);
    assert_int_equal(pd_cpus_within(8, 8000), 8);
    assert_int_equal(pd_cpus_within(8, 64000), 8);
    assert_int_equal(pd_cpus_within(8, 7999), 7);
    assert_int_equal(pd_cpus_within(8, 1500), 1);
    assert_int_equal(pd_cpus_within(8, 1), 1);
    assert_int_equal(pd_cpus_within(0, 0), 1);
    assert_int_equal(sched_getaffinity(0, sizeof cpus, &cpus), 0);
    assert_int_equal(pd_cpus_usable(),
                     pd_cpus_within((uint32_t)CPU_COUNT(&cpus), pd_cpus_quota("")));
}

static void the_mask_is_kept_to(void **state)
{
    cpu_set_t before, one;

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &one);
    }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(pd_cpus_usable(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

#define IN_A_FOLDER(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(whoever_is_in_no_group_has_no_quota),
        IN_A_FOLDER(the_smallest_on_the_way_up_counts),
        IN_A_FOLDER(version_1_has_the_quota_in_two_files),
        IN_A_FOLDER(what_is_mounted_may_be_a_part),
        IN_A_FOLDER(what_is_no_quota_is_none),
        cmocka_unit_test(whole_cpus_are_counted_and_one_at_least),
        cmocka_unit_test(the_mask_is_kept_to),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
