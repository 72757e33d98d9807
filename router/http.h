#pragma once

/* router/http.h - the door to libmicrohttpd: an HTTP/1.1 server inside our event loop.
 *
 * An exchange is one request and its response. The handler's on_request gets it with its whole
 * body; the handler answers at once or later, whole (http_respond) or as a stream, which the
 * server pulls: a client that reads slowly is asked for less, and nothing grows behind it. A
 * client that hangs up is noticed at any time, also while nothing is being sent (a half-closed
 * connection counts as gone). Bodies over the limit get 413, headers over it 431, a request whose
 * length can be read in two ways 400; idle connections are closed, and so are those that take
 * longer than receive_timeout_s to send a request, however steadily. Loop thread only. */

#include "common/base/buf.h"
#include "common/base/loop.h"

#include <stddef.h>
#include <stdint.h>

typedef struct http_server http_server;
typedef struct http_exchange http_exchange;

typedef enum http_pull {
    HTTP_PULL_MORE, /* bytes were appended */
    HTTP_PULL_WAIT, /* nothing now: http_wake tells when */
    HTTP_PULL_END,  /* the last bytes, if any, were appended; the exchange is over */
} http_pull;

typedef struct http_handler {
    void *ctx;
    /* A request with its whole body. The handler must end it: http_respond, or a stream. */
    void (*on_request)(void *ctx, http_exchange *exchange);
    /* A stream's client can take bytes: append some (up to about 64 KiB) to out. */
    http_pull (*on_pull)(void *ctx, http_exchange *exchange, pd_buf *out);
    /* The client is gone before its answer was complete. The exchange is invalid afterwards. */
    void (*on_gone)(void *ctx, http_exchange *exchange);
    /* What the server did by itself (400, 413; 408: cut off for slowness): for metrics. May be
     * NULL. */
    void (*on_refused)(void *ctx, int status);
} http_handler;

typedef struct http_options {
    const char *host; /* a name or an address, without brackets */
    uint16_t port;    /* 0: a free one */
    uint32_t connections_max;
    size_t body_bytes_max, header_bytes_max;
    uint32_t idle_timeout_s; /* of a connection on which nothing moves; 0: none */
    /* For a request's body, from its last header to its last byte; for its headers, the same beside
     * idle_timeout_s since the connection was last at rest. 0: none. */
    uint32_t receive_timeout_s;
    http_handler handler;
} http_options;

/* Listens. Errors: PD_E_IO (the port is in use, no such host; logged with the address), PD_E_NOMEM.
 */
PD_CHECKED pd_status http_server_create(pd_loop *loop, const http_options *options,
                                        http_server **server_out);
/* Exchanges that are not over: their clients are cut off, on_gone is called for each. */
void http_server_destroy(http_server *server);
/* No new connections; those there are go on. */
void http_server_stop_accepting(http_server *server);
uint16_t http_server_port(const http_server *server);
/* A request is being read, answered, or its answer is not sent in full. */
bool http_server_busy(const http_server *server);
uint32_t http_server_connections(const http_server *server);

void http_set_user(http_exchange *exchange, void *user);
void *http_user(const http_exchange *exchange);
const char *http_method(const http_exchange *exchange);
/* Without the query; escapes undone, but %00 stays as it is written. */
const char *http_path(const http_exchange *exchange);
/* NULL when absent. name is matched without case. Borrowed. */
const char *http_header(const http_exchange *exchange, const char *name);
const char *http_body(const http_exchange *exchange, size_t *len_out);
/* Frees the body's memory early. */
void http_drop_body(http_exchange *exchange);

#define HTTP_HEADERS_MAX 6
typedef struct http_headers {
    const char *name[HTTP_HEADERS_MAX], *value[HTTP_HEADERS_MAX];
    uint32_t count;
} http_headers;

/* The whole answer; body is copied. The exchange is over for the handler. */
void http_respond(http_exchange *exchange, int status, const http_headers *headers,
                  const void *body, size_t len);
/* Begins a stream: from now on on_pull is called. */
void http_stream_begin(http_exchange *exchange, int status, const http_headers *headers);
/* There is something to pull. */
void http_wake(http_exchange *exchange);
