#include "router/http.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    STREAM_BLOCK_BYTES = 32 << 10, /* what the library asks for at most */
    STREAM_OUT_MAX = 4 << 20,      /* of one pull */
    MEMORY_BESIDE_HEADERS = 24 << 10,
    HANGUPS_PER_TURN = 64,
    SWEEP_SOON_MS = 20,
    RUNS_PER_TURN = 16, /* of the library, before other work gets its turn */
};

/* A connection, watched for its client's hang-up. */
typedef struct connection {
    struct connection *prev, *next; /* all of a server */
    int fd;
    bool watched;
    bool ended;             /* the client sends nothing more */
    bool spaced;            /* the target of the request being read has a space in it */
    uint64_t due_ns;        /* its next request must be here then; UINT64_MAX: none is awaited */
    http_exchange *current; /* NULL between requests */
} connection;

struct http_exchange {
    http_server *server;
    struct MHD_Connection *mhd;
    connection *peer;
    http_exchange *prev, *next; /* all of a server */
    void *user;
    char *method, *path;
    pd_buf body;
    bool too_large, no_memory, told; /* told: of the limit, past the library */
    size_t over_bytes;               /* of a body over the limit, thrown away */
    bool handed;                     /* the handler has it, and hears of its client */
    bool over;                       /* for the handler */
    bool suspended;
    bool gone;                   /* the client: cut it off when the library asks next */
    struct MHD_Response *answer; /* waits to be queued */
    int answer_status;
    bool streaming, ended;
    pd_buf out;
    size_t out_at; /* bytes of out taken already */
};

struct http_server {
    pd_loop *loop;
    http_options options;
    struct MHD_Daemon *daemon;
    pd_loop_timer *timer, *sweep_timer;
    int listen_fd, mhd_fd, hangup_fd;
    uint16_t port;
    bool dirty; /* the library has something to do */
    bool running;
    bool stopped;
    bool sweep_soon; /* somebody has left whom the library may not have missed */
    uint32_t connections;
    http_exchange *exchanges;
    connection *peers;
};

/* ---- the handler's side ---- */

void http_set_user(http_exchange *exchange, void *user)
{
    exchange->user = user;
}

void *http_user(const http_exchange *exchange)
{
    return exchange->user;
}

const char *http_method(const http_exchange *exchange)
{
    return exchange->method;
}

const char *http_path(const http_exchange *exchange)
{
    return exchange->path;
}

const char *http_header(const http_exchange *exchange, const char *name)
{
    return MHD_lookup_connection_value(exchange->mhd, MHD_HEADER_KIND, name);
}

const char *http_body(const http_exchange *exchange, size_t *len_out)
{
    *len_out = exchange->body.len;
    return pd_buf_text(&exchange->body);
}

void http_drop_body(http_exchange *exchange)
{
    pd_buf_fini(&exchange->body);
    pd_buf_init(&exchange->body, exchange->server->options.body_bytes_max);
}

static void resume(http_exchange *exchange)
{
    if (!exchange->suspended)
        return;
    exchange->suspended = false;
    exchange->server->dirty = true;
    MHD_resume_connection(exchange->mhd);
}

static void add_headers(struct MHD_Response *response, const http_headers *headers)
{
    for (uint32_t i = 0; headers != NULL && i < headers->count; i++) {
        if (MHD_add_response_header(response, headers->name[i], headers->value[i]) != MHD_YES)
            pd_log_error("msg=\"http: a header was not taken\" name=%s", headers->name[i]);
    }
}

static void give(http_exchange *exchange, int status, struct MHD_Response *response,
                 const http_headers *headers)
{
    pd_assert(exchange->answer == NULL && exchange->handed && !exchange->over);
    if (response == NULL) {
        pd_log_error("msg=\"http: out of memory for a response\"");
        exchange->gone = true; /* the handler of a stream hears of it when the library ends it */
    } else {
        add_headers(response, headers);
        exchange->answer = response;
        exchange->answer_status = status;
    }
    resume(exchange);
}

void http_respond(http_exchange *exchange, int status, const http_headers *headers,
                  const void *body, size_t len)
{
    void *bytes = (void *)(uintptr_t)body; /* the library copies it */
    struct MHD_Response *response =
        MHD_create_response_from_buffer(len, bytes, MHD_RESPMEM_MUST_COPY);
    give(exchange, status, response, headers);
    exchange->over = true;
}

static ssize_t on_read(void *ctx, uint64_t pos, char *bytes, size_t size)
{
    http_exchange *exchange = ctx;
    const http_handler *handler = &exchange->server->options.handler;
    (void)pos;
    if (exchange->gone)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (exchange->out_at == exchange->out.len) {
        pd_buf_clear(&exchange->out);
        exchange->out_at = 0;
        if (exchange->ended)
            return MHD_CONTENT_READER_END_OF_STREAM;
        http_pull pulled = handler->on_pull(handler->ctx, exchange, &exchange->out);
        if (pulled == HTTP_PULL_END)
            exchange->ended = exchange->over = true;
        if (pd_buf_status(&exchange->out) != PD_OK) {
            pd_log_error("msg=\"http: a stream was cut: %s\"",
                         pd_status_name(exchange->out.status));
            return MHD_CONTENT_READER_END_WITH_ERROR;
        }
        if (exchange->out.len == 0) {
            if (exchange->ended)
                return MHD_CONTENT_READER_END_OF_STREAM;
            exchange->suspended = true;
            MHD_suspend_connection(exchange->mhd);
            return 0;
        }
    }
    size_t left = exchange->out.len - exchange->out_at;
    size_t taken = left < size ? left : size;
    memcpy(bytes, exchange->out.bytes + exchange->out_at, taken);
    exchange->out_at += taken;
    return (ssize_t)taken;
}

void http_stream_begin(http_exchange *exchange, int status, const http_headers *headers)
{
    exchange->streaming = true;
    give(exchange, status,
         MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, on_read, exchange,
                                           NULL),
         headers);
}

void http_wake(http_exchange *exchange)
{
    if (exchange->streaming && exchange->answer == NULL)
        resume(exchange);
}

/* ---- the library's side ---- */

static void tell_gone(http_exchange *exchange)
{
    const http_handler *handler = &exchange->server->options.handler;
    if (!exchange->handed || exchange->over)
        return;
    exchange->over = true;
    handler->on_gone(handler->ctx, exchange);
}

/* From now on the client has seconds more to send its next request to the end. */
static void await_request(http_server *server, connection *peer, uint64_t seconds)
{
    if (peer != NULL && server->options.receive_timeout_s > 0)
        peer->due_ns = pd_clock_now_ns() + seconds * PD_NS_PER_S;
}

static void await_next(http_server *server, connection *peer)
{
    await_request(server, peer,
                  (uint64_t)server->options.idle_timeout_s + server->options.receive_timeout_s);
}

static void exchange_free(http_exchange *exchange)
{
    http_server *server = exchange->server;
    if (exchange->prev != NULL)
        exchange->prev->next = exchange->next;
    else
        server->exchanges = exchange->next;
    if (exchange->next != NULL)
        exchange->next->prev = exchange->prev;
    if (exchange->peer != NULL && exchange->peer->current == exchange)
        exchange->peer->current = NULL;
    if (exchange->answer != NULL)
        MHD_destroy_response(exchange->answer);
    pd_buf_fini(&exchange->body);
    pd_buf_fini(&exchange->out);
    pd_free(exchange->method);
    pd_free(exchange->path);
    pd_free(exchange);
}

static http_exchange *exchange_new(http_server *server, struct MHD_Connection *mhd, const char *url,
                                   const char *method)
{
    http_exchange *exchange = pd_calloc(1, sizeof *exchange);
    if (exchange == NULL)
        return NULL;
    exchange->server = server;
    exchange->mhd = mhd;
    exchange->method = pd_strdup(method);
    exchange->path = pd_strdup(url);
    pd_buf_init(&exchange->body, server->options.body_bytes_max);
    pd_buf_init(&exchange->out, STREAM_OUT_MAX);
    exchange->next = server->exchanges;
    if (exchange->next != NULL)
        exchange->next->prev = exchange;
    server->exchanges = exchange;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    exchange->peer = info == NULL ? NULL : info->socket_context;
    if (exchange->peer != NULL)
        exchange->peer->current = exchange;
    await_request(server, exchange->peer, server->options.receive_timeout_s);
    if (exchange->method == NULL || exchange->path == NULL) {
        exchange_free(exchange);
        return NULL;
    }
    return exchange;
}

static enum MHD_Result queue_answer(http_exchange *exchange)
{
    struct MHD_Response *response = exchange->answer;
    exchange->answer = NULL;
    enum MHD_Result result =
        MHD_queue_response(exchange->mhd, (unsigned)exchange->answer_status, response);
    MHD_destroy_response(response);
    return result;
}

static void write_refusal(int status, const char *code, const char *text, char *body, size_t size)
{
    snprintf(body, size,
             "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}",
             text, status < 500 ? "invalid_request_error" : "server_error", code);
}

/* An answer of our own, before the handler has seen the request. */
static enum MHD_Result refuse(http_exchange *exchange, int status, const char *code,
                              const char *text)
{
    const http_handler *handler = &exchange->server->options.handler;
    char body[256];
    write_refusal(status, code, text, body, sizeof body);
    struct MHD_Response *response =
        MHD_create_response_from_buffer(strlen(body), body, MHD_RESPMEM_MUST_COPY);
    if (response == NULL)
        return MHD_NO;
    if (handler->on_refused != NULL)
        handler->on_refused(handler->ctx, status);
    MHD_add_response_header(response, "Content-Type", "application/json");
    MHD_add_response_header(response, "Connection", "close");
    enum MHD_Result result = MHD_queue_response(exchange->mhd, (unsigned)status, response);
    MHD_destroy_response(response);
    return result;
}

static const char TOO_LARGE[] = "body_too_large";

static void write_too_large(const http_exchange *exchange, char *text, size_t size)
{
    snprintf(text, size, "the body is over the limit of %zu bytes",
             exchange->server->options.body_bytes_max);
}

static enum MHD_Result refuse_too_large(http_exchange *exchange)
{
    char text[96];
    write_too_large(exchange, text, sizeof text);
    return refuse(exchange, MHD_HTTP_CONTENT_TOO_LARGE, TOO_LARGE, text);
}

/* The library answers only after the whole body, which here may have no end. Nothing else has been
 * written to this connection, so the answer goes past the library, and nothing follows it. */
static void tell_too_large(http_exchange *exchange)
{
    const http_handler *handler = &exchange->server->options.handler;
    char text[96], body[256], answer[512];
    if (exchange->peer == NULL || exchange->told)
        return;
    write_too_large(exchange, text, sizeof text);
    write_refusal(MHD_HTTP_CONTENT_TOO_LARGE, TOO_LARGE, text, body, sizeof body);
    int len = snprintf(answer, sizeof answer,
                       "HTTP/1.1 413 Content Too Large\r\nContent-Type: application/json\r\n"
                       "Connection: close\r\nContent-Length: %zu\r\n\r\n%s",
                       strlen(body), body);
    pd_assert(len > 0 && (size_t)len < sizeof answer);
    exchange->told = true;
    if (send(exchange->peer->fd, answer, (size_t)len, MSG_DONTWAIT | MSG_NOSIGNAL) != len)
        pd_log_debug("msg=\"http: a 413 did not leave\"");
    shutdown(exchange->peer->fd, SHUT_WR);
    if (handler->on_refused != NULL)
        handler->on_refused(handler->ctx, MHD_HTTP_CONTENT_TOO_LARGE);
}

typedef struct framing {
    const char *length;
    bool chunked, unclear;
    uint32_t hosts;
} framing;

static enum MHD_Result read_framing(void *ctx, enum MHD_ValueKind kind, const char *name,
                                    const char *value)
{
    framing *found = ctx;
    (void)kind;
    found->unclear |= name[strcspn(name, " \t")] != '\0'; /* no name: some read it as one */
    if (strcasecmp(name, "Content-Length") == 0) {
        found->unclear |= found->length != NULL && strcmp(found->length, value) != 0;
        found->length = value;
    } else if (strcasecmp(name, "Transfer-Encoding") == 0) {
        found->unclear |= found->chunked || strcasecmp(value, "chunked") != 0;
        found->chunked = true;
    } else if (strcasecmp(name, "Host") == 0) {
        found->hosts++;
    }
    return MHD_YES;
}

/* A length that is over the limit is refused before a byte of the body is read. */
static bool announces_too_much(const http_exchange *exchange)
{
    const char *text = http_header(exchange, "Content-Length");
    unsigned long long len = 0;
    if (text == NULL || sscanf(text, "%llu", &len) != 1)
        return false; /* the library has checked the form */
    return len > exchange->server->options.body_bytes_max;
}

/* The header is here. Where a body ends must not be a matter of opinion: a proxy before us that
 * takes the other header for true would hand us one client's bytes as another's request. Host and
 * target are checked here and not by the library, whose own refusals are HTML (and the one for a
 * missing host says its header twice). */
static enum MHD_Result begin(http_exchange *exchange, const char *version)
{
    framing found = {0};
    bool needs_host = strcmp(version, MHD_HTTP_VERSION_1_0) != 0;
    MHD_get_connection_values(exchange->mhd, MHD_HEADER_KIND, read_framing, &found);
    if (found.unclear || (found.chunked && found.length != NULL))
        return refuse(exchange, MHD_HTTP_BAD_REQUEST, "unclear_length",
                      "Content-Length and Transfer-Encoding contradict each other");
    if (found.hosts > 1 || (needs_host && found.hosts == 0))
        return refuse(exchange, MHD_HTTP_BAD_REQUEST, "unclear_host",
                      found.hosts > 1 ? "more than one Host header" : "no Host header");
    if (exchange->peer != NULL && exchange->peer->spaced)
        return refuse(exchange, MHD_HTTP_BAD_REQUEST, "bad_target",
                      "a space in the request's target: write %20");
    return announces_too_much(exchange) ? refuse_too_large(exchange) : MHD_YES;
}

static void take_body(http_exchange *exchange, const char *bytes, size_t len)
{
    if (!exchange->too_large && !exchange->no_memory) {
        pd_buf_append(&exchange->body, bytes, len);
        pd_status status = pd_buf_status(&exchange->body);
        exchange->too_large = status == PD_E_TOO_LARGE;
        exchange->no_memory = status == PD_E_NOMEM;
    }
    if (exchange->too_large || exchange->no_memory) {
        pd_buf_fini(&exchange->body);
        pd_buf_init(&exchange->body, exchange->server->options.body_bytes_max);
        exchange->over_bytes += len;
        if (exchange->too_large)
            tell_too_large(exchange);
    }
}

static enum MHD_Result hand_over(http_exchange *exchange)
{
    const http_handler *handler = &exchange->server->options.handler;
    exchange->handed = true;
    if (exchange->peer != NULL)
        exchange->peer->due_ns = UINT64_MAX;
    handler->on_request(handler->ctx, exchange);
    if (exchange->gone)
        return MHD_NO;
    if (exchange->answer != NULL)
        return queue_answer(exchange);
    if (exchange->peer != NULL && exchange->peer->ended) {
        /* It left before its request was handed over: nobody would tell any more. */
        exchange->gone = true;
        tell_gone(exchange);
        return MHD_NO;
    }
    exchange->suspended = true;
    MHD_suspend_connection(exchange->mhd);
    return MHD_YES;
}

static enum MHD_Result on_access(void *ctx, struct MHD_Connection *mhd, const char *url,
                                 const char *method, const char *version, const char *upload,
                                 size_t *upload_len, void **slot)
{
    http_server *server = ctx;
    http_exchange *exchange = *slot;
    if (exchange == NULL) {
        exchange = exchange_new(server, mhd, url, method);
        if (exchange == NULL)
            return MHD_NO;
        *slot = exchange;
        return begin(exchange, version);
    }
    if (exchange->gone)
        return MHD_NO;
    if (*upload_len > 0) {
        take_body(exchange, upload, *upload_len);
        *upload_len = 0;
        /* It knows; what is on its way is read, so that no reset overtakes the answer. */
        return exchange->over_bytes > server->options.body_bytes_max + (1u << 20) ? MHD_NO
                                                                                  : MHD_YES;
    }
    if (exchange->answer != NULL)
        return queue_answer(exchange);
    if (exchange->too_large)
        return exchange->told ? MHD_NO : refuse_too_large(exchange);
    if (exchange->no_memory)
        return refuse(exchange, 503, "out_of_memory", "the router is out of memory");
    if (exchange->handed) { /* woken for nothing */
        exchange->suspended = true;
        MHD_suspend_connection(exchange->mhd);
        return MHD_YES;
    }
    return hand_over(exchange);
}

/* The library waits for an edge of its own epoll, and the one that told of the client's end may
 * have come with its last request: it would sit on the connection until it is idle for too long.
 * Closing the end that is closed already makes another edge; what is still unread stays readable.
 */
static void show_end(connection *peer)
{
    if (peer != NULL && peer->ended)
        shutdown(peer->fd, SHUT_RD);
}

static void on_completed(void *ctx, struct MHD_Connection *mhd, void **slot,
                         enum MHD_RequestTerminationCode why)
{
    http_exchange *exchange = *slot;
    (void)mhd;
    if (exchange == NULL)
        return;
    *slot = NULL;
    await_next(ctx, exchange->peer);
    if (why == MHD_REQUEST_TERMINATED_COMPLETED_OK)
        show_end(exchange->peer);
    tell_gone(exchange); /* of a complete answer the handler has taken leave already */
    exchange_free(exchange);
}

static void unwatch(http_server *server, connection *peer)
{
    if (!peer->watched)
        return;
    epoll_ctl(server->hangup_fd, EPOLL_CTL_DEL, peer->fd, NULL);
    peer->watched = false;
}

static void forget_peer(http_server *server, connection *peer)
{
    unwatch(server, peer);
    if (peer->prev != NULL)
        peer->prev->next = peer->next;
    else
        server->peers = peer->next;
    if (peer->next != NULL)
        peer->next->prev = peer->prev;
    pd_free(peer);
}

static void on_connection(void *ctx, struct MHD_Connection *mhd, void **slot,
                          enum MHD_ConnectionNotificationCode code)
{
    http_server *server = ctx;
    connection *peer = *slot;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        server->connections--;
        if (peer != NULL)
            forget_peer(server, peer);
        *slot = NULL;
        return;
    }
    server->connections++;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
    peer = info == NULL ? NULL : pd_calloc(1, sizeof *peer);
    if (peer == NULL)
        return; /* works, but its hang-up shows only when something is sent */
    peer->fd = info->connect_fd;
    peer->due_ns = UINT64_MAX;
    peer->next = server->peers;
    if (peer->next != NULL)
        peer->next->prev = peer;
    server->peers = peer;
    await_next(server, peer);
    struct epoll_event event = {.events = EPOLLRDHUP, .data.ptr = peer};
    peer->watched = epoll_ctl(server->hangup_fd, EPOLL_CTL_ADD, peer->fd, &event) == 0;
    if (!peer->watched)
        pd_log_warn("msg=\"http: a connection cannot be watched: %m\"");
    *slot = peer;
}

static void sweep_soon(http_server *server)
{
    if (!server->sweep_soon && !server->stopped)
        pd_loop_timer_arm(server->sweep_timer, pd_clock_now_ns() + SWEEP_SOON_MS * PD_NS_PER_MS);
    server->sweep_soon = true;
}

/* The library does not look at a suspended connection, so a client that leaves while it waits for
 * its first token would not be missed: this second epoll looks. */
static void on_hangup(void *ctx, uint32_t epoll_events)
{
    http_server *server = ctx;
    struct epoll_event events[HANGUPS_PER_TURN];
    (void)epoll_events;
    int count = epoll_wait(server->hangup_fd, events, HANGUPS_PER_TURN, 0);
    for (int i = 0; i < count; i++) {
        connection *peer = events[i].data.ptr;
        http_exchange *exchange = peer->current;
        unwatch(server, peer);
        peer->ended = true;
        show_end(peer);
        sweep_soon(server);
        if (exchange == NULL || !exchange->handed || exchange->gone)
            continue; /* the library reads the end itself */
        if (exchange->over)
            continue; /* an answer on its way to a half-closed client may still arrive */
        exchange->gone = true;
        tell_gone(exchange);
        resume(exchange);
    }
    server->dirty = true;
}

/* ---- inside the loop ---- */

static void arm(http_server *server)
{
    MHD_UNSIGNED_LONG_LONG ms;
    if (MHD_get_timeout(server->daemon, &ms) != MHD_YES)
        pd_loop_timer_arm(server->timer, UINT64_MAX);
    else if (ms == 0)
        server->dirty = true;
    else
        pd_loop_timer_arm(server->timer, pd_clock_now_ns() + ms * PD_NS_PER_MS);
}

static void run(http_server *server)
{
    if (server->running)
        return;
    server->running = true;
    for (int i = 0; i < RUNS_PER_TURN; i++) {
        server->dirty = false;
        MHD_run(server->daemon);
        arm(server);
        if (!server->dirty)
            break;
    }
    server->running = false;
}

static void on_ready(void *ctx, uint32_t epoll_events)
{
    (void)epoll_events;
    run(ctx);
}

static void on_timer(void *ctx)
{
    run(ctx);
}

static bool on_prepare(void *ctx)
{
    http_server *server = ctx;
    if (server->stopped || !server->dirty)
        return false;
    run(server);
    return server->dirty;
}

/* The library's own limit begins anew with every byte; this one does not. And whoever has left in
 * the middle of a request is shown again: an edge that joins the one of the last bytes tells
 * nothing. */
static void on_sweep(void *ctx)
{
    http_server *server = ctx;
    const http_handler *handler = &server->options.handler;
    uint64_t now_ns = pd_clock_now_ns();
    bool soon = false;
    for (connection *peer = server->peers; peer != NULL; peer = peer->next) {
        if (peer->ended && (peer->current == NULL || !peer->current->handed)) {
            show_end(peer);
            soon = true;
        }
        if (peer->due_ns > now_ns)
            continue;
        peer->due_ns = UINT64_MAX;
        pd_log_debug("msg=\"http: a client took too long to send a request\"");
        if (handler->on_refused != NULL)
            handler->on_refused(handler->ctx, MHD_HTTP_REQUEST_TIMEOUT);
        shutdown(peer->fd, SHUT_RDWR); /* the library reads the end */
        server->dirty = true;
    }
    server->sweep_soon = soon;
    pd_loop_timer_arm(server->sweep_timer,
                      now_ns + (soon ? SWEEP_SOON_MS * PD_NS_PER_MS : PD_NS_PER_S));
}

/* ---- start and stop ---- */

static int listen_on(const http_options *options)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *list = NULL;
    char port[16];
    int fd = -1, one = 1;

    snprintf(port, sizeof port, "%u", options->port);
    int rc = getaddrinfo(options->host, port, &hints, &list);
    if (rc != 0) {
        pd_log_error("msg=\"http: no such address: %s\" host=%s port=%s", gai_strerror(rc),
                     options->host, port);
        return -1;
    }
    for (struct addrinfo *a = list; a != NULL && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a->ai_protocol);
        if (fd < 0)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, 511) != 0) {
            int cause = errno;
            close(fd);
            fd = -1;
            errno = cause;
        }
    }
    if (fd < 0)
        pd_log_error("msg=\"http: cannot listen: %m\" host=%s port=%s", options->host, port);
    freeaddrinfo(list);
    return fd;
}

static uint16_t port_of(int fd)
{
    struct sockaddr_storage address;
    socklen_t len = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &len) != 0)
        return 0;
    return ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                               : ((struct sockaddr_in *)&address)->sin_port);
}

__attribute__((format(printf, 2, 0))) static void on_log(void *ctx, const char *format,
                                                         va_list arguments)
{
    char text[256];
    (void)ctx;
    vsnprintf(text, sizeof text, format, arguments);
    text[strcspn(text, "\n")] = '\0';
    pd_log_debug("msg=\"http: %s\"", text);
}

/* The target as it came. What is returned becomes the exchange's slot, which is empty yet. */
static void *on_target(void *ctx, const char *target, struct MHD_Connection *mhd)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    connection *peer = info == NULL ? NULL : info->socket_context;
    (void)ctx;
    if (peer != NULL)
        peer->spaced = strchr(target, ' ') != NULL;
    return NULL;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Undoes %XX in place. A %00 stays: as a byte it would end the path for whoever compares it. */
static size_t on_unescape(void *ctx, struct MHD_Connection *mhd, char *text)
{
    char *out = text;
    (void)ctx;
    (void)mhd;
    for (const char *in = text; *in != '\0'; in++) {
        int high = *in == '%' ? hex_digit(in[1]) : -1;
        int low = high >= 0 ? hex_digit(in[2]) : -1;
        if (low >= 0 && (high | low) != 0) {
            *out++ = (char)(high << 4 | low);
            in += 2;
        } else {
            *out++ = *in;
        }
    }
    *out = '\0';
    return (size_t)(out - text);
}

static pd_status start_daemon(http_server *server)
{
    const http_options *options = &server->options;
    server->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL, on_access,
        server, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET,
        server->listen_fd, MHD_OPTION_CONNECTION_LIMIT, options->connections_max,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, options->header_bytes_max + MEMORY_BESIDE_HEADERS,
        MHD_OPTION_CONNECTION_TIMEOUT, options->idle_timeout_s, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, server, MHD_OPTION_NOTIFY_CONNECTION, on_connection, server,
        MHD_OPTION_STRICT_FOR_CLIENT, 0, MHD_OPTION_URI_LOG_CALLBACK, on_target, NULL,
        MHD_OPTION_UNESCAPE_CALLBACK, on_unescape, NULL, MHD_OPTION_END);
    if (server->daemon == NULL) {
        pd_log_error("msg=\"http: the server does not start: %m\"");
        return PD_E_IO;
    }
    server->mhd_fd = MHD_get_daemon_info(server->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    return PD_OK;
}

pd_status http_server_create(pd_loop *loop, const http_options *options, http_server **server_out)
{
    http_server *server = pd_calloc(1, sizeof *server);
    if (server == NULL)
        return PD_E_NOMEM;
    server->loop = loop;
    server->options = *options;
    server->mhd_fd = -1;
    server->hangup_fd = epoll_create1(EPOLL_CLOEXEC);
    server->listen_fd = listen_on(options);
    pd_status status = PD_E_IO;
    if (server->listen_fd < 0 || server->hangup_fd < 0)
        goto failed;
    server->port = port_of(server->listen_fd);
    status = start_daemon(server);
    if (status == PD_OK)
        status = pd_loop_add_fd(loop, server->mhd_fd, EPOLLIN, on_ready, server);
    if (status == PD_OK)
        status = pd_loop_add_fd(loop, server->hangup_fd, EPOLLIN, on_hangup, server);
    if (status == PD_OK)
        status = pd_loop_timer_create(loop, on_timer, server, &server->timer);
    if (status == PD_OK)
        status = pd_loop_timer_create(loop, on_sweep, server, &server->sweep_timer);
    if (status == PD_OK)
        status = pd_loop_add_prepare(loop, on_prepare, server);
    if (status != PD_OK)
        goto failed;
    pd_loop_timer_arm(server->sweep_timer, pd_clock_now_ns() + PD_NS_PER_S);
    *server_out = server;
    return PD_OK;
failed:
    http_server_destroy(server);
    return status;
}

void http_server_stop_accepting(http_server *server)
{
    if (server->listen_fd < 0)
        return;
    MHD_quiesce_daemon(server->daemon);
    close(server->listen_fd);
    server->listen_fd = -1;
}

void http_server_destroy(http_server *server)
{
    if (server == NULL)
        return;
    server->stopped = true;
    if (server->daemon != NULL) {
        http_server_stop_accepting(server);
        /* The library must not be stopped over suspended connections. */
        for (http_exchange *x = server->exchanges; x != NULL; x = x->next) {
            x->gone = true;
            tell_gone(x);
            resume(x);
        }
        MHD_run(server->daemon);
        pd_loop_remove_fd(server->loop, server->mhd_fd);
        pd_loop_remove_fd(server->loop, server->hangup_fd);
        pd_loop_remove_prepare(server->loop, on_prepare, server);
        if (server->timer != NULL)
            pd_loop_timer_arm(server->timer, UINT64_MAX);
        if (server->sweep_timer != NULL)
            pd_loop_timer_arm(server->sweep_timer, UINT64_MAX);
        MHD_stop_daemon(server->daemon);
    }
    if (server->listen_fd >= 0)
        close(server->listen_fd);
    if (server->hangup_fd >= 0)
        close(server->hangup_fd);
    pd_free(server);
}

uint16_t http_server_port(const http_server *server)
{
    return server->port;
}

bool http_server_busy(const http_server *server)
{
    return server->exchanges != NULL;
}

uint32_t http_server_connections(const http_server *server)
{
    return server->connections;
}
