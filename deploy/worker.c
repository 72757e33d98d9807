/* deploy/worker.c - the one executable of both kinds of worker: `prefill-worker` and
 * `decode-worker`. The role is the name it is started under, or --role. */

#include "common/worker/rank.h"
#include "common/worker/runtime.h"
#include "decode-worker/decode.h"
#include "deploy/step_faults.h"
#include "kernels/model/runner.h"
#include "prefill-worker/prefill.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

static void usage(FILE *out, const char *self)
{
    fprintf(out,
            "Usage: %s -f FILE --name NAME [--set KEY=VALUE]...\n"
            "\n"
            "One worker of the deployment in FILE. `kvferry up` starts all of them.\n"
            "\n"
            "  -f, --file FILE       the deployment\n"
            "      --name NAME       which worker: prefill-0, decode-1, ...\n"
            "      --set KEY=VALUE   in place of what FILE says\n"
            "      --role ROLE       prefill or decode; else as the program's name says\n"
            "  -h, --help            this text\n"
            "      --version         the version\n",
            self);
}

static bool role_of(const char *text, pd_role *role_out)
{
    if (strcmp(text, "prefill") == 0 || strcmp(text, "prefill-worker") == 0)
        *role_out = PD_ROLE_PREFILL;
    else if (strcmp(text, "decode") == 0 || strcmp(text, "decode-worker") == 0)
        *role_out = PD_ROLE_DECODE;
    else
        return false;
    return true;
}

int main(int argc, char **argv)
{
    /* rank and leader are how a worker starts its other ranks, and nobody else's business */
    enum { OPT_NAME = 256, OPT_SET, OPT_ROLE, OPT_VERSION, OPT_RANK, OPT_LEADER };
    static const struct option long_options[] = {
        {"file", required_argument, NULL, 'f'},
        {"name", required_argument, NULL, OPT_NAME},
        {"set", required_argument, NULL, OPT_SET},
        {"role", required_argument, NULL, OPT_ROLE},
        {"rank", required_argument, NULL, OPT_RANK},
        {"leader", required_argument, NULL, OPT_LEADER},
        {"version", no_argument, NULL, OPT_VERSION},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    const char *self = strrchr(argv[0], '/') != NULL ? strrchr(argv[0], '/') + 1 : argv[0];
    const char *sets[PD_DEPLOYMENT_SETS_MAX];
    const char *rank = NULL, *leader = NULL;
    pd_worker_options options = {.sets = sets, .self = argv[0]};
    pd_role role = PD_ROLE_PREFILL;
    bool has_role = role_of(self, &role);
    int option;

    while ((option = getopt_long(argc, argv, "f:h", long_options, NULL)) != -1) {
        switch (option) {
        case 'f': options.file = optarg; break;
        case OPT_NAME: options.name = optarg; break;
        case OPT_SET:
            if (options.sets_count == PD_DEPLOYMENT_SETS_MAX) {
                fprintf(stderr, "%s: more than %d --set options\n", self, PD_DEPLOYMENT_SETS_MAX);
                return 2;
            }
            sets[options.sets_count++] = optarg;
            break;
        case OPT_ROLE:
            has_role = role_of(optarg, &role);
            if (!has_role) {
                fprintf(stderr, "%s: --role is prefill or decode, not '%s'\n", self, optarg);
                return 2;
            }
            break;
        case OPT_RANK: rank = optarg; break;
        case OPT_LEADER: leader = optarg; break;
        case OPT_VERSION: printf("%s %s\n", self, PD_VERSION); return 0;
        case 'h': usage(stdout, self); return 0;
        default: return 2; /* getopt has said why */
        }
    }
    if (optind < argc) {
        fprintf(stderr, "%s: '%s' is not an option; see --help\n", self, argv[optind]);
        return 2;
    }
    if (options.file == NULL || options.name == NULL || !has_role) {
        fprintf(stderr, "%s: %s is missing; see --help\n", self,
                options.file == NULL   ? "-f FILE"
                : options.name == NULL ? "--name NAME"
                                       : "--role ROLE");
        return 2;
    }
    if (step_faults_engine(&kern_runner, &options.engine) != PD_OK)
        return 2;
    options.role = role == PD_ROLE_PREFILL ? &prefill_role : &decode_role;
    if (rank != NULL || leader != NULL) {
        pd_rank_start start;
        if (pd_rank_start_parse(rank, leader, &start) != PD_OK) {
            fprintf(stderr, "%s: --rank and --leader are a worker's own; see --help\n", self);
            return 2;
        }
        return pd_worker_rank_run(&options, &start);
    }
    return pd_worker_run(&options);
}
