#pragma once

/* router/service.h - the router's HTTP service: requests in, answers out, around the core.
 *
 * Owns the core, the text pool, the metrics and every session (one HTTP request that asks for an
 * answer, with one core request a choice). Knows neither ZeroMQ nor files: messages leave through
 * send and come in by service_on_message. Loop thread only. */

#include "common/base/loop.h"
#include "common/metrics/metrics.h"
#include "common/wire/bus.h"
#include "router/core.h"
#include "router/http.h"
#include "router/text_pool.h"

typedef struct service service;

typedef struct service_options {
    router_core_config core;
    text_context text;
    http_options http; /* without the handler */
    uint64_t incarnation, seed;
    uint32_t text_threads, text_queue_max;
    bool (*send)(void *ctx, const char *to, const pd_message *message);
    /* What the metrics say of the bus; NULL: nothing. */
    pd_bus_counters (*bus_counters)(void *ctx);
    void *bus_ctx; /* of both */
} service_options;

/* Listens. Errors: PD_E_IO (the port: logged), PD_E_NOMEM, PD_E_INVALID. */
PD_CHECKED pd_status service_create(pd_loop *loop, const service_options *options,
                                    service **service_out);
void service_destroy(service *service);

void service_on_message(service *service, const char *from, const pd_message *message);
/* As router_core_on_worker_dead, router_core_on_worker_cut, router_core_has_worker. */
void service_on_worker_dead(service *service, uint64_t incarnation);
void service_on_worker_cut(service *service, const char *from);
bool service_has_worker(const service *service, uint64_t incarnation);

/* Shuts down: no new connections, /ready says 503, new requests are refused; done is called on the
 * loop when the last answer has been sent or grace_ns have passed. */
void service_stop(service *service, uint64_t grace_ns, pd_loop_fn *done, void *ctx);

uint16_t service_port(const service *service);
