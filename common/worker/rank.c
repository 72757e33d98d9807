#include "common/worker/rank.h"

#include "common/base/log.h"

#include <signal.h>
#include <stdio.h>

static void ignore_signals(void)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGPIPE};
    struct sigaction action = {.sa_handler = SIG_IGN};

    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &action, NULL);
}

int pd_worker_rank_run(const pd_worker_options *options, const pd_rank_start *start)
{
    pd_worker_setup setup;
    char name[PD_DEPLOYMENT_NAME_BYTES + 16];
    int exit_status = 1;

    ignore_signals();
    pd_log_init(options->name, PD_LOG_INFO);
    if (pd_rank_bind_life(start) != PD_OK)
        return 1;
    if (pd_worker_setup_read(options, &setup) != PD_OK) {
        pd_worker_setup_close(&setup);
        return 2;
    }
    snprintf(name, sizeof name, "%s/%u", options->name, start->rank);
    pd_log_init(name, setup.deployment.log_level);
    if (pd_worker_setup_open_rank(&setup, start) == PD_OK &&
        pd_rank_say_ready(&setup.placement) == PD_OK) {
        options->engine->serve(setup.engine);
        exit_status = options->engine->broken(setup.engine) == NULL ? 0 : 1;
    }
    pd_worker_setup_close(&setup);
    return exit_status;
}
