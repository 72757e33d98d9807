/* simulate - runs whole clusters in one process, each from a seed, and says which went wrong. */

#include "common/base/log.h"
#include "deploy/simulate/plan.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: simulate [--seed N] [--runs N] [--twice] [--faults LIST] [--log LEVEL]\n"
    "Runs simulated clusters of seeds N, N+1, ... and checks that every request ends once, with\n"
    "the right tokens or a clear error, and that every KV block comes back.\n"
    "  --seed N       the first seed (default 1)\n"
    "  --runs N       how many seeds (default 1)\n"
    "  --twice        run each seed twice: the journals must be equal\n"
    "  --faults LIST  all (default), none, or some of crash,hang-up,slow,freeze,corrupt\n"
    "  --log LEVEL    the log of the deciding parts on stderr: error, warn, info, debug, trace;\n"
    "                 without it nothing, since what is an error to a cluster is a fault drawn "
    "here\n";

static bool read_number(const char *text, uint64_t *value_out)
{
    char *end = NULL;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-')
        return false;
    *value_out = value;
    return true;
}

static bool read_faults(const char *text, sim_faults *faults)
{
    if (strcmp(text, "all") == 0)
        return true;
    *faults = (sim_faults){0};
    if (strcmp(text, "none") == 0)
        return true;
    while (*text != '\0') {
        size_t len = strcspn(text, ",");
        if (len == 5 && memcmp(text, "crash", len) == 0)
            faults->crash = true;
        else if (len == 7 && memcmp(text, "hang-up", len) == 0)
            faults->hang_up = true;
        else if (len == 4 && memcmp(text, "slow", len) == 0)
            faults->slow = true;
        else if (len == 6 && memcmp(text, "freeze", len) == 0)
            faults->freeze = true;
        else if (len == 7 && memcmp(text, "corrupt", len) == 0)
            faults->corrupt = true;
        else
            return false;
        text += len + (text[len] == ',');
    }
    return true;
}

/* True when the seed's run, and its repetition, kept every promise. */
static bool run_seed(uint64_t seed, const sim_faults *faults, bool twice)
{
    sim_plan plan;
    sim_result result = {0}, again = {0};
    char text[300];

    sim_plan_draw(seed, faults, &plan);
    sim_plan_describe(&plan, text, sizeof(text));
    printf("seed %" PRIu64 ": %s\n", seed, text);
    fflush(stdout); /* a broken assertion ends the process: the seed is known then */
    pd_status status = sim_world_run(&plan, &result);
    if (status == PD_OK && twice)
        status = sim_world_run(&plan, &again);
    if (status != PD_OK) {
        printf("seed %" PRIu64 ": FAILED: %s\n", seed, pd_status_name(status));
        return false;
    }
    printf("seed %" PRIu64 ": finished %u cancelled %u failed %u; crashes %" PRIu64
           " freezes %" PRIu64 " corrupted %" PRIu64 "; %" PRIu64
           " events in %.1f virtual s; journal %016" PRIx64 "\n",
           seed, result.finished, result.cancelled, result.failed, result.crashes, result.freezes,
           result.corrupted, result.events, result.virtual_s, result.journal);
    if (twice)
        printf("seed %" PRIu64 ": again %*s journal %016" PRIx64 "\n", seed, 1, "", again.journal);
    if (!result.good)
        printf("seed %" PRIu64 ": FAILED: %s\n", seed, result.fault);
    if (twice && again.journal != result.journal)
        printf("seed %" PRIu64 ": FAILED: the two journals differ\n", seed);
    fflush(stdout);
    return result.good && (!twice || again.journal == result.journal);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"seed", required_argument, NULL, 's'},
                                            {"runs", required_argument, NULL, 'n'},
                                            {"twice", no_argument, NULL, 't'},
                                            {"faults", required_argument, NULL, 'f'},
                                            {"log", required_argument, NULL, 'l'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    sim_faults faults = {
        .crash = true, .hang_up = true, .slow = true, .freeze = true, .corrupt = true};
    uint64_t seed = 1, runs = 1, failed = 0;
    pd_log_level level = PD_LOG_ERROR;
    const char *faults_text = "all";
    bool twice = false, good = true, quiet = true;

    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (option) {
        case 's': good = good && read_number(optarg, &seed); break;
        case 'n': good = good && read_number(optarg, &runs) && runs > 0; break;
        case 't': twice = true; break;
        case 'f':
            faults_text = optarg;
            good = good && read_faults(optarg, &faults);
            break;
        case 'l':
            quiet = false;
            good = good && pd_log_level_parse(optarg, &level) == PD_OK;
            break;
        case 'h': fputs(usage, stdout); return 0;
        default: good = false;
        }
    }
    if (!good || optind != argc) {
        fputs(usage, stderr);
        return 2;
    }
    pd_log_init("simulate", level);
    if (quiet && freopen("/dev/null", "w", stderr) == NULL) {
        printf("/dev/null cannot be opened: %s\n", strerror(errno));
        return 1;
    }
    for (uint64_t i = 0; i < runs; i++) {
        if (!run_seed(seed + i, &faults, twice)) {
            failed++;
            printf("to repeat it: simulate --seed %" PRIu64 " --faults %s --log debug\n", seed + i,
                   faults_text);
        }
    }
    printf("%" PRIu64 " passed, %" PRIu64 " failed, 0 skipped\n", runs - failed, failed);
    return failed == 0 ? 0 : 1;
}
