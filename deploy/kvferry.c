/* deploy/kvferry.c - the command: reads its arguments and calls what does the work. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/config/deployment.h"
#include "common/config/value.h"
#include "deploy/check_devices.h"
#include "deploy/check_split.h"
#include "deploy/report.h"
#include "deploy/report_kv.h"
#include "deploy/supervise.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ERRORS_MAX    (256u << 10)
#define EXIT_USAGE    2
#define READY_TIMEOUT (180 * PD_NS_PER_S)

typedef struct arguments {
    const char *file;
    const char *sets[PD_DEPLOYMENT_SETS_MAX];
    size_t sets_count;
    bool detach, json, kv, effective, keys, help;
    uint64_t ready_timeout_ns;
} arguments;

typedef struct command {
    const char *name;
    int (*run)(const arguments *args);
    const char *options; /* the long ones it takes, beside --help */
    const char *summary;
    const char *help;
} command;

static int run_up(const arguments *args);
static int run_down(const arguments *args);
static int run_status(const arguments *args);
static int run_check(const arguments *args);

#define SET_HELP                                                                                   \
    "  -f, --file FILE       the deployment (YAML)\n"                                              \
    "  --set KEY=VALUE       overrides a key of the file, such as router.listen=127.0.0.1:0;\n"    \
    "                        may be given several times\n"

static const command commands[] = {
    {"up", run_up, "--file --set --detach --timeout", "start a cluster and wait until it is ready",
     SET_HELP
     "  --detach              return when the cluster is ready and leave it running\n"
     "  --timeout DURATION    how long it may take to get ready (default 180s)\n"
     "\n"
     "Without --detach the cluster runs in the foreground until Ctrl-C. State and logs lie in\n"
     "state_dir (default .kvferry/CLUSTER). Relative paths start at the working directory.\n"},
    {"down", run_down, "--file --set", "end a cluster: exactly the processes that up started",
     SET_HELP},
    {"status", run_status, "--file --set --json --kv", "show a cluster's processes and workers",
     SET_HELP
     "  --kv                  who holds which KV blocks, and whether it adds up\n"
     "  --json                one JSON object instead of a table\n"
     "\nExit status 0 when the cluster runs and its router answers; with --kv, when all that\n"
     "could be read adds up, too. 1 when it does not run (or the file is wrong), or, with --kv,\n"
     "when a ledger does not add up or the router's view and a worker's differ for more than\n"
     "a few seconds. 2 when the arguments are wrong. 3 when it runs and its router does not\n"
     "answer (or, with --kv, has no worker): how the workers are is not known then.\n"},
    {"check", run_check, "--file --set --effective --keys", "check a deployment, start nothing",
     SET_HELP "  --effective           print every value in effect, as YAML\n"
              "  --keys                print every key with its type, range, default and meaning\n"
              "\nPrints all errors of the file, one a line.\n"},
};

#define COMMANDS_COUNT (sizeof commands / sizeof commands[0])

static void print_usage(FILE *to)
{
    fputs("usage: kvferry COMMAND [options]\n\n", to);
    for (size_t i = 0; i < COMMANDS_COUNT; i++)
        fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fputs("\nkvferry COMMAND --help tells more.\n", to);
}

static int usage_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

static int usage_error(const char *format, ...)
{
    va_list args;

    fputs("kvferry: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputs("\n", stderr);
    return EXIT_USAGE;
}

/* Reads the deployment or tells every fault. */
static int load(const arguments *args, pd_deployment *deployment_out)
{
    pd_buf errors;

    if (args->file == NULL)
        return usage_error("which deployment? give -f FILE, such as -f deploy/local.yaml");
    pd_buf_init(&errors, ERRORS_MAX);
    pd_status status =
        pd_deployment_load(args->file, args->sets, args->sets_count, deployment_out, &errors);
    fputs(pd_buf_text(&errors), stderr);
    pd_buf_fini(&errors);
    return status == PD_OK ? 0 : 1;
}

static int run_up(const arguments *args)
{
    pd_deployment deployment;
    int rc = load(args, &deployment);

    if (rc != 0)
        return rc;
    pd_log_init("kvferry", deployment.log_level);
    supervise_options options = {.deployment = &deployment,
                                 .file = args->file,
                                 .sets = args->sets,
                                 .sets_count = args->sets_count,
                                 .detach = args->detach,
                                 .ready_timeout_ns = args->ready_timeout_ns};
    pd_status status = supervise_up(&options);
    pd_deployment_fini(&deployment);
    return status == PD_OK ? 0 : 1;
}

static int run_down(const arguments *args)
{
    pd_deployment deployment;
    bool was_running = false;
    int rc = load(args, &deployment);

    if (rc != 0)
        return rc;
    pd_status status = supervise_down(deployment.cluster, deployment.state_dir, &was_running);
    if (status == PD_OK && was_running)
        printf("cluster %s has ended\n", deployment.cluster);
    else if (status == PD_OK)
        printf("cluster %s was not running (state_dir %s)\n", deployment.cluster,
               deployment.state_dir);
    pd_deployment_fini(&deployment);
    return status == PD_OK ? 0 : 1;
}

static int run_status(const arguments *args)
{
    pd_deployment deployment;
    report_verdict verdict = REPORT_BAD;
    int rc = load(args, &deployment);

    if (rc != 0)
        return rc;
    pd_status status = args->kv ? report_kv(&deployment, args->json, &verdict)
                                : report_status(&deployment, args->json, &verdict);
    pd_deployment_fini(&deployment);
    return status == PD_OK ? (int)verdict : 1;
}

static int run_check(const arguments *args)
{
    pd_deployment deployment;
    pd_buf text;
    int rc = 0;

    pd_buf_init(&text, ERRORS_MAX);
    if (args->keys) {
        pd_deployment_help(&text);
    } else if ((rc = load(args, &deployment)) == 0) {
        char why[512];
        if (check_devices(&deployment, why, sizeof why) != PD_OK ||
            check_split(&deployment, why, sizeof why) != PD_OK) {
            fprintf(stderr, "%s: %s\n", args->file, why);
            rc = 1;
        } else if (args->effective) {
            pd_deployment_dump(&deployment, &text);
        } else {
            pd_buf_printf(&text, "%s: ok: cluster %s, 1 router, %u prefill, %u decode", args->file,
                          deployment.cluster, deployment.prefill.workers,
                          deployment.decode.workers);
            if (pd_deployment_processes(&deployment) != deployment.workers)
                pd_buf_printf(&text, " (tensor_parallel %u and %u: %u processes that compute)",
                              deployment.prefill.tensor_parallel, deployment.decode.tensor_parallel,
                              pd_deployment_processes(&deployment));
            pd_buf_puts(&text, "\n");
        }
        pd_deployment_fini(&deployment);
    }
    if (pd_buf_status(&text) != PD_OK)
        rc = usage_error("no memory");
    else
        fputs(pd_buf_text(&text), stdout);
    pd_buf_fini(&text);
    return rc;
}

/* --- arguments --- */

/* True when the command takes this long option. */
static bool takes(const command *c, const char *option, size_t len)
{
    for (const char *at = c->options; at[0] != '\0'; at += strspn(at, " ")) {
        size_t name_len = strcspn(at, " ");
        if (name_len == len && strncmp(at, option, len) == 0)
            return true;
        at += name_len;
    }
    return false;
}

static int read_timeout(const char *text, arguments *args)
{
    pd_scalar_why why;

    if (pd_scalar_duration(text, PD_NS_PER_S, 24 * 3600 * PD_NS_PER_S, &args->ready_timeout_ns,
                           &why) != PD_OK)
        return usage_error("--timeout: %s", why.text);
    return 0;
}

static int take_value(const char *option, const char *value, arguments *args)
{
    if (strcmp(option, "--timeout") == 0)
        return read_timeout(value, args);
    if (strcmp(option, "--set") == 0) {
        if (args->sets_count == PD_DEPLOYMENT_SETS_MAX)
            return usage_error("more than %d --set options", PD_DEPLOYMENT_SETS_MAX);
        args->sets[args->sets_count++] = value;
        return 0;
    }
    if (args->file != NULL)
        return usage_error("-f is given twice: %s and %s", args->file, value);
    args->file = value;
    return 0;
}

static bool *flag_of(const char *option, arguments *args)
{
    if (strcmp(option, "--detach") == 0)
        return &args->detach;
    if (strcmp(option, "--json") == 0)
        return &args->json;
    if (strcmp(option, "--kv") == 0)
        return &args->kv;
    if (strcmp(option, "--effective") == 0)
        return &args->effective;
    if (strcmp(option, "--keys") == 0)
        return &args->keys;
    return strcmp(option, "--help") == 0 ? &args->help : NULL;
}

static int read_arguments(const command *c, int argc, char **argv, arguments *args)
{
    for (int i = 0; i < argc; i++) {
        const char *given = argv[i], *value = strchr(given, '=');
        char option[32];
        size_t len = value != NULL ? (size_t)(value - given) : strlen(given);
        if (strcmp(given, "-f") == 0)
            snprintf(option, sizeof option, "--file");
        else if (strcmp(given, "-h") == 0)
            snprintf(option, sizeof option, "--help");
        else
            snprintf(option, sizeof option, "%.*s", len < 31 ? (int)len : 31, given);
        if (strcmp(option, "--help") != 0 && !takes(c, option, strlen(option)))
            return usage_error("%s: unknown %s '%s'; kvferry %s --help lists what there is",
                               c->name, given[0] == '-' ? "option" : "argument", given, c->name);
        bool *flag = flag_of(option, args);
        if (flag != NULL && value != NULL && given[1] == '-')
            return usage_error("%s: %s takes no value", c->name, option);
        if (flag != NULL) {
            *flag = true;
            continue;
        }
        value = value != NULL && given[1] == '-' ? value + 1 : (++i < argc ? argv[i] : NULL);
        if (value == NULL)
            return usage_error("%s: %s needs a value", c->name, given);
        int rc = take_value(option, value, args);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static const command *find_command(const char *name)
{
    const command *nearest = NULL;
    uint32_t best = 3;

    for (size_t i = 0; i < COMMANDS_COUNT; i++) {
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
        uint32_t distance = pd_scalar_distance(commands[i].name, name);
        if (distance < best) {
            best = distance;
            nearest = &commands[i];
        }
    }
    if (nearest != NULL)
        usage_error("unknown command '%s', did you mean '%s'?", name, nearest->name);
    else
        usage_error("unknown command '%s'; kvferry --help lists what there is", name);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("kvferry %s\n", PD_VERSION);
        return 0;
    }
    const command *c = find_command(argv[1]);
    if (c == NULL)
        return EXIT_USAGE;
    arguments *args = pd_calloc(1, sizeof *args);
    if (args == NULL)
        return usage_error("no memory");
    args->ready_timeout_ns = READY_TIMEOUT;
    int rc = read_arguments(c, argc - 2, argv + 2, args);
    if (rc == 0 && args->help)
        printf("usage: kvferry %s -f FILE [options]: %s\n\n%s", c->name, c->summary, c->help);
    else if (rc == 0)
        rc = c->run(args);
    pd_free(args);
    return rc;
}
