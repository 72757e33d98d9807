/* router/main.c - wiring: configuration, model file, control plane and HTTP service, and how the
 * process starts and ends. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/loop.h"
#include "common/base/mem.h"
#include "common/base/peer_watch.h"
#include "common/base/process.h"
#include "common/config/deployment.h"
#include "common/kv/layout.h"
#include "common/kv/prefix_hash.h"
#include "common/model_file/model_file.h"
#include "common/text/template.h"
#include "common/text/tokenizer.h"
#include "common/wire/bus.h"
#include "router/service.h"

#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    EXIT_CONFIG = 2,
    CONTEXT_DEFAULT_MAX = 8192,
    GRACE_S = 8, /* for answers in flight at SIGTERM; a supervisor waits 10 seconds in all */
    IDLE_TIMEOUT_S = 75,
    RECEIVE_TIMEOUT_S = 60, /* for the body of a request */
    TEXT_QUEUE_MAX = 256,
    RENDERED_TIMES = 4, /* a rendered conversation may be this much longer than its body */
};

static const char USAGE[] =
    "usage: router -f FILE [--set KEY=VALUE]...\n"
    "  The HTTP front of a cluster: OpenAI's API in, tokens of the workers out.\n"
    "  -f FILE          the deployment (YAML)\n"
    "  --set KEY=VALUE  overrides one key, such as router.listen=127.0.0.1:8081\n"
    "exit status: 0 stopped by a signal, 1 could not run, 2 wrong configuration or usage\n";

typedef struct router {
    pd_deployment deployment;
    bool loaded;
    pd_loop *loop;
    pd_model_file *model;
    pd_tokenizer *tokenizer;
    pd_template *chat;
    pd_bus *bus;
    pd_peer_watch *peers; /* workers of this host */
    uint64_t host;
    service *service;
    uint32_t context;
    pd_kv_layout layout;
    char layout_text[128];
    bool stopping;
} router;

/* ---- configuration ---- */

/* 0: go on; else the exit status is *exit_out. */
static bool read_arguments(int argc, char **argv, const char **file_out, const char **sets,
                           size_t *sets_count_out, int *exit_out)
{
    static const struct option OPTIONS[] = {{"set", required_argument, NULL, 's'},
                                            {"file", required_argument, NULL, 'f'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    int option;
    *file_out = NULL;
    *sets_count_out = 0;
    *exit_out = EXIT_CONFIG;
    while ((option = getopt_long(argc, argv, "f:h", OPTIONS, NULL)) != -1) {
        if (option == 'h') {
            fputs(USAGE, stdout);
            *exit_out = 0;
            return false;
        }
        if (option == 'f') {
            *file_out = optarg;
        } else if (option == 's' && *sets_count_out < PD_DEPLOYMENT_SETS_MAX) {
            sets[(*sets_count_out)++] = optarg;
        } else if (option == 's') {
            fprintf(stderr, "router: at most %d --set\n", PD_DEPLOYMENT_SETS_MAX);
            return false;
        } else {
            return false; /* getopt has named it */
        }
    }
    if (*file_out == NULL || optind != argc) {
        fputs(USAGE, stderr);
        return false;
    }
    return true;
}

static bool load(router *r, int argc, char **argv, int *exit_out)
{
    const char *file;
    const char *sets[PD_DEPLOYMENT_SETS_MAX];
    size_t sets_count;
    pd_buf errors;

    if (!read_arguments(argc, argv, &file, sets, &sets_count, exit_out))
        return false;
    pd_buf_init(&errors, 1 << 20);
    pd_status status = pd_deployment_load(file, sets, sets_count, &r->deployment, &errors);
    if (status != PD_OK)
        fprintf(stderr, "%s", pd_buf_text(&errors));
    pd_buf_fini(&errors);
    r->loaded = status == PD_OK;
    *exit_out = status == PD_E_INVALID ? EXIT_CONFIG : 1;
    return r->loaded;
}

/* ---- the model ---- */

static const char *token_text(const pd_text_tables *tables, int64_t id)
{
    return id >= 0 && id < tables->tokens_count ? tables->tokens[id] : "";
}

static pd_status compile_chat(router *r, const pd_text_tables *tables)
{
    pd_template_error error = {0};
    if (tables->chat_template == NULL) {
        pd_log_warn("msg=\"the model has no chat template: /v1/chat/completions is refused\"");
        return PD_OK;
    }
    pd_status status = pd_template_compile(tables->chat_template, tables->chat_template_len,
                                           token_text(tables, tables->bos_id),
                                           token_text(tables, tables->eos_id), &r->chat, &error);
    if (status != PD_OK)
        pd_log_error("msg=\"chat template: %s\" line=%u model=%s", error.message, error.line,
                     r->deployment.model.path);
    return status;
}

static pd_status open_model(router *r)
{
    const pd_deployment *d = &r->deployment;
    pd_status status = pd_model_file_open(d->model.path, &r->model);
    if (status != PD_OK)
        return status;
    const pd_model_shape *shape = pd_model_file_shape(r->model);
    uint32_t own = shape->context < CONTEXT_DEFAULT_MAX ? shape->context : CONTEXT_DEFAULT_MAX;
    r->context = d->model.context != 0 ? d->model.context : own;
    if (r->context > shape->context) {
        pd_log_error("msg=\"model.context: %u is over the model's own %u\" model=%s", r->context,
                     shape->context, d->model.path);
        return PD_E_INVALID;
    }
    pd_kv_layout_options options = {.block_tokens = d->kv.block_tokens,
                                    .group_layers = d->kv.group_layers,
                                    .memory_bytes = d->kv.memory_bytes};
    /* the schema allows no other */
    pd_assert(pd_kv_dtype_of(d->kv.dtype, &options.dtype));
    status = pd_kv_layout_make(shape, &options, &r->layout);
    if (status != PD_OK) {
        pd_log_error("msg=\"kv: the pool cannot be laid out: %s\" memory=%" PRIu64,
                     pd_status_name(status), d->kv.memory_bytes);
        return status;
    }
    pd_kv_layout_describe(&r->layout, r->layout_text, sizeof r->layout_text);
    status = pd_tokenizer_create(pd_model_file_text(r->model), &r->tokenizer);
    return status != PD_OK ? status : compile_chat(r, pd_model_file_text(r->model));
}

/* ---- wiring ---- */

static bool send(void *ctx, const char *to, const pd_message *message)
{
    router *r = ctx;
    return r->bus != NULL && pd_bus_send(r->bus, to, message) == PD_OK;
}

static void on_message(void *ctx, const char *from, const pd_message *message)
{
    router *r = ctx;
    if (r->service == NULL)
        return;
    service_on_message(r->service, from, message);
    if (message->kind == PD_MSG_HELLO && message->hello.host == r->host && r->host != 0 &&
        service_has_worker(r->service, message->hello.incarnation))
        pd_peer_watch_add(r->peers, message->hello.incarnation, message->hello.pid,
                          message->hello.started);
}

static void on_cut(void *ctx, const char *identity)
{
    router *r = ctx;
    if (r->service != NULL)
        service_on_worker_cut(r->service, identity);
}

static void on_dead(void *ctx, uint64_t incarnation)
{
    router *r = ctx;
    service_on_worker_dead(r->service, incarnation);
}

static pd_bus_counters bus_counters(void *ctx)
{
    const router *r = ctx;
    return r->bus != NULL ? pd_bus_counters_of(r->bus) : (pd_bus_counters){0};
}

static pd_status start_service(router *r, uint64_t incarnation)
{
    const pd_deployment *d = &r->deployment;
    const char *name = d->model.name;
    service_options options = {.incarnation = incarnation,
                               .seed = pd_random_id(),
                               .text_threads = sysconf(_SC_NPROCESSORS_ONLN) > 4 ? 2 : 1,
                               .text_queue_max = TEXT_QUEUE_MAX,
                               .send = send,
                               .bus_counters = bus_counters,
                               .bus_ctx = r};
    pd_hash128 fingerprint = pd_model_file_fingerprint(r->model);
    router_core_config_of(d, &options.core);
    options.core.model = name;
    options.core.model_fingerprint = fingerprint;
    options.core.layout_fingerprint = pd_kv_layout_fingerprint(&r->layout);
    options.core.layout = r->layout_text;
    options.core.block_bytes = r->layout.block_bytes_all;
    options.core.context_max = r->context;
    options.core.vocab = pd_tokenizer_vocab(r->tokenizer);
    options.text = (text_context){
        .tokenizer = r->tokenizer,
        .chat = r->chat,
        .limits = {.model = name,
                   .aliases = d->model.aliases,
                   .aliases_count = d->model.aliases_count,
                   .vocab = options.core.vocab,
                   .context_max = r->context,
                   .stops_max = d->router.limits.stops},
        .hash_root = pd_prefix_hash_root(fingerprint, d->kv.block_tokens, NULL, 0),
        .block_tokens = d->kv.block_tokens,
        .max_tokens_default = d->router.limits.max_tokens_default,
        .chat_tokens_default = d->router.limits.chat_tokens_default,
        .rendered_bytes_max = d->router.limits.body_bytes * RENDERED_TIMES,
    };
    options.http = (http_options){.host = d->router.listen.host,
                                  .port = d->router.listen.port,
                                  .connections_max = d->router.limits.connections,
                                  .body_bytes_max = d->router.limits.body_bytes,
                                  .header_bytes_max = d->router.limits.header_bytes,
                                  .idle_timeout_s = IDLE_TIMEOUT_S,
                                  .receive_timeout_s = RECEIVE_TIMEOUT_S};
    return service_create(r->loop, &options, &r->service);
}

static void on_stopped(void *ctx)
{
    router *r = ctx;
    pd_loop_stop(r->loop);
}

static void on_signal(void *ctx)
{
    router *r = ctx;
    if (r->stopping) { /* asked twice: at once */
        pd_loop_stop(r->loop);
        return;
    }
    r->stopping = true;
    pd_log_info("msg=\"stopping: answers in flight have %d s\"", GRACE_S);
    service_stop(r->service, GRACE_S * PD_NS_PER_S, on_stopped, r);
}

static pd_status start(router *r)
{
    const pd_deployment *d = &r->deployment;
    uint64_t incarnation = pd_random_id();
    pd_bus_options bus = {.endpoints = {d->router.control, d->router.tokens, d->router.events},
                          .on_message = on_message,
                          .on_cut = on_cut,
                          .ctx = r};
    pd_status status = pd_loop_create(&r->loop);
    if (status == PD_OK) /* before threads are started: they inherit what is blocked */
        status = pd_loop_add_signal(r->loop, SIGTERM, on_signal, r);
    if (status == PD_OK)
        status = pd_loop_add_signal(r->loop, SIGINT, on_signal, r);
    if (status == PD_OK)
        status = open_model(r);
    if (status == PD_OK)
        status = start_service(r, incarnation);
    r->host = pd_process_host();
    if (status == PD_OK)
        status = pd_peer_watch_create(r->loop, on_dead, r, &r->peers);
    if (status == PD_OK)
        status = pd_bus_create_router(r->loop, &bus, &r->bus);
    if (status == PD_OK)
        pd_log_info(
            "msg=\"router listens\" host=%s port=%u model=%s context=%u incarnation=%016" PRIx64
            " policy=%s",
            d->router.listen.host, service_port(r->service), d->model.name, r->context, incarnation,
            pd_router_policy_name(d->router.policy));
    return status;
}

static void finish(router *r)
{
    pd_peer_watch_destroy(r->peers);
    /* The service says its last words over the bus. */
    service_destroy(r->service);
    pd_bus_destroy(r->bus);
    pd_template_destroy(r->chat);
    pd_tokenizer_destroy(r->tokenizer);
    pd_model_file_close(r->model);
    pd_loop_destroy(r->loop);
    if (r->loaded)
        pd_deployment_fini(&r->deployment);
}

int main(int argc, char **argv)
{
    static router r;
    int status = 1;

    pd_log_init("router", PD_LOG_INFO);
    signal(SIGPIPE, SIG_IGN);
    if (!load(&r, argc, argv, &status))
        return status;
    pd_log_init("router", r.deployment.log_level);
    status = 1;
    if (start(&r) == PD_OK && pd_loop_run(r.loop) == PD_OK)
        status = 0;
    finish(&r);
    return status;
}
