#include "deploy/simulate/command.h"

#include "common/base/log.h"
#include "deploy/simulate/plan.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { JOBS_MAX = 64, FAILURES_SHOWN = 50 };

static const char usage[] =
    "usage: simulate [--seed N] [--runs N] [--jobs N] [--twice] [--each] [--faults LIST]\n"
    "                [--links KIND] [--whole] [--fail-fast] [--log LEVEL]\n"
    "Runs simulated clusters of seeds N, N+1, ... and checks that every request ends once, with\n"
    "the right tokens or a clear error, and that every KV block comes back.\n"
    "  --seed N       the first seed (default 1)\n"
    "  --runs N       how many seeds (default 1)\n"
    "  --jobs N       processes (default 1)\n"
    "  --twice        run each seed twice: the journals must be equal\n"
    "  --each         two lines a seed; without it those that fail, and a summary\n"
    "  --faults LIST  all (default: a standard run), none, or some of crash, freeze, pool, cut,\n"
    "                 partition, router-crash, router-freeze, router-leave, hang-up, slow,\n"
    "                 corrupt, short, poison, lose, duplicate, reorder, slow-link\n"
    "  --links KIND   of data links: seed (default), memory (what is sent has landed) or messages\n"
    "                 (it is in a socket, as over tcp)\n"
    "  --whole        fail when something that must happen has not happened in any run\n"
    "  --fail-fast    stop at the first seed that fails\n"
    "  --log LEVEL    the log of the deciding parts on stderr: error, warn, info, debug, trace;\n"
    "                 without it nothing, since what is an error to a cluster is a fault drawn "
    "here\n";

typedef struct sim_options {
    uint64_t seed, runs, jobs;
    uint32_t allowed;
    const char *faults_text;
    const char *links_text; /* NULL: by seed */
    sim_links links;
    bool twice, each, whole, fail_fast, quiet;
    pd_log_level level;
} sim_options;

/* What the processes share. A job's seed stays where it was when it died. */
typedef struct sim_job {
    _Atomic uint64_t seed; /* + 1; 0: none */
    uint64_t passed, failed;
    uint64_t finished, cancelled, failed_requests, cut, events;
    sim_coverage coverage;
} sim_job;

typedef struct sim_shared {
    _Atomic uint64_t next; /* of [0, runs) */
    _Atomic bool stop;
    _Atomic uint32_t shown;
    sim_job jobs[JOBS_MAX];
} sim_shared;

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

static bool read_faults(const char *text, uint32_t *allowed)
{
    *allowed = SIM_ALLOW_ALL;
    if (strcmp(text, "all") == 0)
        return true;
    *allowed = 0;
    if (strcmp(text, "none") == 0)
        return true;
    while (*text != '\0') {
        size_t len = strcspn(text, ",");
        uint32_t fault = 0;
        while (fault < SIM_FAULTS && (strlen(sim_fault_name((sim_fault)fault)) != len ||
                                      memcmp(sim_fault_name((sim_fault)fault), text, len) != 0))
            fault++;
        if (fault == SIM_FAULTS)
            return false;
        *allowed |= 1u << fault;
        text += len + (text[len] == ',');
    }
    return true;
}

static bool read_links(const char *text, sim_options *o)
{
    bool memory = strcmp(text, "memory") == 0, messages = strcmp(text, "messages") == 0;

    o->links = memory ? SIM_LINKS_MEMORY : SIM_LINKS_MESSAGES;
    o->links_text = memory || messages ? text : NULL;
    return memory || messages || strcmp(text, "seed") == 0;
}

static void add(sim_job *job, const sim_result *result)
{
    job->finished += result->finished;
    job->cancelled += result->cancelled;
    job->failed_requests += result->failed;
    job->cut += result->cut;
    job->events += result->events;
    sim_coverage_add(&job->coverage, &result->coverage);
}

static void print_each(uint64_t seed, const sim_result *result)
{
    printf("seed %" PRIu64 ": finished %u cancelled %u failed %u cut %u;", seed, result->finished,
           result->cancelled, result->failed, result->cut);
    for (uint32_t i = 0; i < SIM_FAULTS; i++)
        if (result->coverage.faults[i] > 0)
            printf(" %s %" PRIu64, sim_fault_name((sim_fault)i), result->coverage.faults[i]);
    printf("; %" PRIu64 " events in %.1f virtual s; journal %016" PRIx64 "\n", result->events,
           result->virtual_s, result->journal);
}

/* result: NULL when the run did not get to its end. */
static bool print_failure(sim_shared *shared, const sim_options *options, uint64_t seed,
                          const char *why, const sim_result *result)
{
    char journal[40] = "";

    if (options->fail_fast)
        atomic_store(&shared->stop, true);
    if (result != NULL) /* by it a repetition is known to be one */
        snprintf(journal, sizeof journal, "; journal %016" PRIx64, result->journal);
    if (atomic_fetch_add(&shared->shown, 1) < FAILURES_SHOWN)
        printf("seed %" PRIu64 ": FAILED: %s%s\nto repeat it: simulate --seed %" PRIu64
               " --faults %s --links %s --log debug\n",
               seed, why, journal, seed, options->faults_text,
               options->links_text == NULL ? "seed" : options->links_text);
    fflush(stdout);
    return false;
}

/* True when the seed's run, and its repetition, kept every promise. */
static bool run_seed(sim_shared *shared, const sim_options *options, uint64_t seed, sim_job *job)
{
    sim_plan plan;
    sim_result result = {0}, again = {0};
    char text[600];

    sim_plan_draw(seed, options->allowed, &plan);
    if (options->links_text != NULL)
        plan.links = options->links;
    if (options->each) {
        sim_plan_describe(&plan, text, sizeof(text));
        printf("seed %" PRIu64 ": %s\n", seed, text);
        fflush(stdout);
    }
    pd_status status = sim_world_run(&plan, &result);
    if (status == PD_OK && options->twice)
        status = sim_world_run(&plan, &again);
    if (status != PD_OK)
        return print_failure(shared, options, seed, pd_status_name(status), NULL);
    add(job, &result);
    if (options->each)
        print_each(seed, &result);
    if (options->each && options->twice)
        print_each(seed, &again);
    if (!result.good)
        return print_failure(shared, options, seed, result.fault, &result);
    if (options->twice && again.journal != result.journal)
        return print_failure(shared, options, seed, "the two journals differ", NULL);
    return true;
}

static void work(sim_shared *shared, const sim_options *options, sim_job *job)
{
    for (;;) {
        uint64_t at = atomic_fetch_add(&shared->next, 1);
        if (at >= options->runs || atomic_load(&shared->stop))
            break;
        atomic_store(&job->seed, options->seed + at + 1);
        if (run_seed(shared, options, options->seed + at, job))
            job->passed++;
        else
            job->failed++;
    }
    atomic_store(&job->seed, 0);
}

static pid_t start_job(sim_shared *shared, const sim_options *options, sim_job *job)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        work(shared, options, job);
        fflush(stdout);
        _exit(0);
    }
    if (pid < 0)
        printf("a process cannot be started: %s\n", strerror(errno));
    return pid;
}

/* Runs all seeds in options->jobs processes; one that dies of a seed is started again. */
static bool run_jobs(sim_shared *shared, const sim_options *options)
{
    pid_t pids[JOBS_MAX] = {0};
    char why[100];
    uint64_t running = 0;
    bool good = true;

    for (uint64_t i = 0; i < options->jobs; i++) {
        pids[i] = start_job(shared, options, &shared->jobs[i]);
        good = good && pids[i] > 0;
        running += pids[i] > 0;
    }
    while (running > 0) {
        int status = 0;
        pid_t pid = wait(&status);
        uint64_t at = 0;
        while (at < options->jobs && pids[at] != pid)
            at++;
        if (pid < 0 || at == options->jobs)
            return false;
        running--;
        sim_job *job = &shared->jobs[at];
        uint64_t seed = atomic_exchange(&job->seed, 0);
        if (seed == 0)
            continue;
        snprintf(why, sizeof(why), "the process died (%s %d): a broken assertion, or worse",
                 WIFSIGNALED(status) ? "signal" : "status",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        print_failure(shared, options, seed - 1, why, NULL);
        job->failed++;
        pids[at] = start_job(shared, options, job);
        good = good && pids[at] > 0;
        running += pids[at] > 0;
    }
    return good;
}

static bool parse(int argc, char **argv, sim_options *o)
{
    static const struct option names[] = {
        {"seed", required_argument, NULL, 's'},  {"runs", required_argument, NULL, 'n'},
        {"jobs", required_argument, NULL, 'j'},  {"twice", no_argument, NULL, 't'},
        {"each", no_argument, NULL, 'e'},        {"whole", no_argument, NULL, 'w'},
        {"fail-fast", no_argument, NULL, 'x'},   {"faults", required_argument, NULL, 'f'},
        {"links", required_argument, NULL, 'k'}, {"log", required_argument, NULL, 'l'},
        {"help", no_argument, NULL, 'h'},        {0}};
    bool good = true;

    for (int option; (option = getopt_long(argc, argv, "h", names, NULL)) != -1;) {
        switch (option) {
        case 's': good = good && read_number(optarg, &o->seed); break;
        case 'n': good = good && read_number(optarg, &o->runs) && o->runs > 0; break;
        case 'j':
            good = good && read_number(optarg, &o->jobs) && o->jobs > 0 && o->jobs <= JOBS_MAX;
            break;
        case 't': o->twice = true; break;
        case 'e': o->each = true; break;
        case 'w': o->whole = true; break;
        case 'x': o->fail_fast = true; break;
        case 'f':
            o->faults_text = optarg;
            good = good && read_faults(optarg, &o->allowed);
            break;
        case 'k': good = good && read_links(optarg, o); break;
        case 'l':
            o->quiet = false;
            good = good && pd_log_level_parse(optarg, &o->level) == PD_OK;
            break;
        case 'h': fputs(usage, stdout); exit(0);
        default: good = false;
        }
    }
    return good && optind == argc;
}

/* The exit status. */
static int summarize(const sim_shared *shared, const sim_options *options, double took_s, bool good)
{
    sim_job sum = {0};

    for (uint64_t i = 0; i < options->jobs; i++) {
        const sim_job *job = &shared->jobs[i];
        sum.passed += job->passed;
        sum.failed += job->failed;
        sum.finished += job->finished;
        sum.cancelled += job->cancelled;
        sum.failed_requests += job->failed_requests;
        sum.cut += job->cut;
        sum.events += job->events;
        sim_coverage_add(&sum.coverage, &job->coverage);
    }
    printf("requests: finished %" PRIu64 " cancelled %" PRIu64 " refused or failed %" PRIu64
           " cut with their router %" PRIu64 "\n",
           sum.finished, sum.cancelled, sum.failed_requests, sum.cut);
    sim_coverage_print(&sum.coverage, stdout);
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                   (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("%" PRIu64 " events in %.1f s, %.2f ms of processor time a run\n", sum.events, took_s,
           cpu_s * 1e3 / (double)options->runs);
    uint32_t holes = options->whole ? sim_coverage_holes(&sum.coverage, stdout) : 0;
    printf("%" PRIu64 " passed, %" PRIu64 " failed, 0 skipped\n", sum.passed, sum.failed);
    return sum.failed == 0 && good && holes == 0 ? 0 : 1;
}

int sim_command(int argc, char **argv)
{
    sim_options options = {.seed = 1,
                           .runs = 1,
                           .jobs = 1,
                           .allowed = SIM_ALLOW_ALL,
                           .faults_text = "all",
                           .quiet = true,
                           .level = PD_LOG_ERROR};
    struct timespec from, to;

    if (!parse(argc, argv, &options)) {
        fputs(usage, stderr);
        return 2;
    }
    pd_log_init("simulate", options.level);
    if (options.quiet && freopen("/dev/null", "w", stderr) == NULL) {
        printf("/dev/null cannot be opened: %s\n", strerror(errno));
        return 1;
    }
    sim_shared *shared =
        mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        printf("no memory to share between the processes: %s\n", strerror(errno));
        return 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &from);
    bool good = run_jobs(shared, &options);
    clock_gettime(CLOCK_MONOTONIC, &to);
    double took_s = (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) / 1e9;
    return summarize(shared, &options, took_s, good);
}
