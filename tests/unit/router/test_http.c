/* The HTTP server with real sockets: limits, hang-ups, slow readers, stopping. */

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "router/http.h"
#include "tests/unit/router/client.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { BODY_MAX = 1 << 16 };

typedef struct site {
    pd_loop *loop;
    http_server *server;
    uint16_t port;
    uint64_t pulled, gone_ns;
    uint32_t requests, gone, refused;
    http_exchange *held;
    uint32_t receive_timeout_s; /* 0: none */
    void (*client)(struct site *site);
    /* what the client saw */
    int status;
    uint64_t mark_ns;
    char text[65536];
    bool ok, done;
} site;

/* The library's call goes through here: it fails when it is told to, as without memory. Its types
 * are router/http.c's alone. */
static bool no_memory;
void *__real_MHD_create_response_from_callback(uint64_t size, size_t block_size, void *reader,
                                               void *ctx, void *free_ctx);
void *__wrap_MHD_create_response_from_callback(uint64_t size, size_t block_size, void *reader,
                                               void *ctx, void *free_ctx);
void *__wrap_MHD_create_response_from_callback(uint64_t size, size_t block_size, void *reader,
                                               void *ctx, void *free_ctx)
{
    if (no_memory)
        return NULL;
    return __real_MHD_create_response_from_callback(size, block_size, reader, ctx, free_ctx);
}

static void on_request(void *ctx, http_exchange *x)
{
    site *s = ctx;
    size_t len;
    const char *body = http_body(x, &len);
    const http_headers headers = {.name = {"X-Test"}, .value = {"1"}, .count = 1};
    s->requests++;
    if (strcmp(http_path(x), "/echo") == 0)
        http_respond(x, 200, &headers, body, len);
    else if (strncmp(http_path(x), "/echo", 5) == 0)
        http_respond(x, 418, &headers, body, len);
    else if (strcmp(http_path(x), "/hold") == 0)
        s->held = x;
    else
        http_stream_begin(x, 200, &headers);
}

static http_pull on_pull(void *ctx, http_exchange *x, pd_buf *out)
{
    char piece[1000];
    site *s = ctx;
    memset(piece, 'x', sizeof piece);
    if (strcmp(http_path(x), "/wait") == 0)
        return HTTP_PULL_WAIT;
    pd_buf_append(out, piece, sizeof piece);
    __atomic_fetch_add(&s->pulled, sizeof piece, __ATOMIC_RELAXED);
    return strcmp(http_path(x), "/short") == 0 ? HTTP_PULL_END : HTTP_PULL_MORE;
}

static void on_gone(void *ctx, http_exchange *x)
{
    site *s = ctx;
    s->gone++;
    s->gone_ns = pd_clock_now_ns();
    if (s->held == x)
        s->held = NULL;
}

static void on_refused(void *ctx, int status)
{
    site *s = ctx;
    (void)status;
    s->refused++;
}

static void *run_client(void *ctx)
{
    site *s = ctx;
    s->client(s);
    usleep(50000); /* what the server has to notice yet */
    __atomic_store_n(&s->done, true, __ATOMIC_RELEASE);
    pd_loop_wake(s->loop);
    return NULL;
}

static bool stop_when_done(void *ctx)
{
    site *s = ctx;
    if (__atomic_load_n(&s->done, __ATOMIC_ACQUIRE))
        pd_loop_stop(s->loop);
    return false;
}

static void with_slow_site(site *s, void (*client)(site *site), uint32_t receive_timeout_s)
{
    pthread_t thread;
    *s = (site){.client = client, .receive_timeout_s = receive_timeout_s};
    assert_int_equal(pd_loop_create(&s->loop), PD_OK);
    assert_int_equal(pd_loop_add_prepare(s->loop, stop_when_done, s), PD_OK);
    const http_options options = {.host = "127.0.0.1",
                                  .connections_max = 32,
                                  .body_bytes_max = BODY_MAX,
                                  .header_bytes_max = 8192,
                                  .idle_timeout_s = receive_timeout_s > 0 ? 1 : 30,
                                  .receive_timeout_s = receive_timeout_s,
                                  .handler = {s, on_request, on_pull, on_gone, on_refused}};
    assert_int_equal(http_server_create(s->loop, &options, &s->server), PD_OK);
    s->port = http_server_port(s->server);
    assert_int_equal(pthread_create(&thread, NULL, run_client, s), 0);
    assert_int_equal(pd_loop_run(s->loop), PD_OK);
    pthread_join(thread, NULL);
    http_server_destroy(s->server);
    pd_loop_destroy(s->loop);
}

static void with_site(site *s, void (*client)(site *site))
{
    with_slow_site(s, client, 0);
}

static void keepalive_client(site *s)
{
    int fd = client_connect(s->port);
    s->ok = true;
    for (int i = 0; i < 20; i++) {
        client_post(fd, "/echo", "hello", 5);
        client_read_until(fd, "hello", s->text, sizeof s->text);
        s->ok = s->ok && client_status(s->text) == 200 && strstr(s->text, "X-Test: 1") != NULL;
    }
    client_post(fd, "/short", "", 0);
    client_read_until(fd, "\r\n0\r\n\r\n", s->text, sizeof s->text);
    s->ok = s->ok && strstr(s->text, "chunked") != NULL;
    client_post(fd, "/echo", "after", 5); /* a stream ends, the connection does not */
    client_read_until(fd, "after", s->text, sizeof s->text);
    s->ok = s->ok && client_status(s->text) == 200;
    close(fd);
}

static void a_connection_serves_many_requests(void **state)
{
    (void)state;
    site s;
    with_site(&s, keepalive_client);
    assert_true(s.ok);
    assert_int_equal(s.requests, 22);
    assert_int_equal(s.gone, 0);
}

static void big_client(site *s)
{
    static const char chunked[] =
        "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    static char body[BODY_MAX + 1];
    char small[4096];
    int fd = client_connect(s->port);
    client_post(fd, "/echo", body, sizeof body); /* its length says it */
    client_read_until(fd, "}}", s->text, sizeof s->text);
    close(fd);
    fd = client_connect(s->port); /* a chunked one does not */
    client_write(fd, chunked, strlen(chunked));
    for (int i = 0; i < BODY_MAX / 1000 + 10; i++) {
        client_write(fd, "3e8\r\n", 5);
        client_write(fd, body, 1000);
        client_write(fd, "\r\n", 2);
    }
    client_write(fd, "0\r\n\r\n", 5);
    client_read_until(fd, "}}", small, sizeof small);
    s->ok = client_status(small) == 413 && strstr(small, "body_too_large") != NULL;
    close(fd);
    fd = client_connect(s->port); /* the limit itself passes */
    client_post(fd, "/echo", body, BODY_MAX);
    client_read_until(fd, "\r\n\r\n", small, sizeof small);
    s->ok = s->ok && client_status(small) == 200;
    close(fd);
}

static void a_body_over_the_limit_is_413_with_json(void **state)
{
    (void)state;
    site s;
    with_site(&s, big_client);
    assert_int_equal(client_status(s.text), 413);
    assert_non_null(strstr(s.text, "\"code\":\"body_too_large\""));
    assert_true(s.ok);
    assert_int_equal(s.refused, 2);
    assert_int_equal(s.requests, 1);
}

static void endless_client(site *s)
{
    static const char chunked[] =
        "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    static const char piece[65536];
    int fd = client_connect(s->port);
    client_write(fd, chunked, strlen(chunked));
    for (int i = 0; i < 1024 && !s->ok; i++) /* 64 MiB, if nobody stops it */
        s->ok = !client_write(fd, "10000\r\n", 7) || !client_write(fd, piece, sizeof piece) ||
                !client_write(fd, "\r\n", 2);
    s->text[0] = '\0'; /* it has been told, however little it listens */
    client_read_until(fd, "}}", s->text, sizeof s->text);
    close(fd);
}

static void a_body_without_end_is_cut_off(void **state)
{
    (void)state;
    site s;
    with_site(&s, endless_client);
    assert_true(s.ok);
    assert_int_equal(client_status(s.text), 413);
    assert_int_equal(s.refused, 1);
    assert_int_equal(s.requests, 0);
}

static int status_of_raw(site *s, const char *request)
{
    char text[4096];
    int fd = client_connect(s->port);
    client_write(fd, request, strlen(request));
    shutdown(fd, SHUT_WR);
    client_read_until(fd, "never", text, sizeof text);
    close(fd);
    return client_status(text);
}

static void unclear_client(site *s)
{
    static const char *const unclear[] = {
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 5\r\nContent-Length: 3\r\n\r\nhello",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: gzip\r\n\r\nhello",
        "Content-Length : 5\r\n\r\nhello",
    };
    s->ok = true;
    for (size_t i = 0; i < sizeof unclear / sizeof unclear[0]; i++) {
        char request[256];
        snprintf(request, sizeof request, "POST /echo HTTP/1.1\r\nHost: x\r\n%s", unclear[i]);
        s->ok = s->ok && status_of_raw(s, request) == 400;
    }
    s->mark_ns = s->requests;
    s->ok = s->ok && status_of_raw(s, "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
                                      "Content-Length: 5\r\n\r\nhello") == 200;
}

/* Refused with that code, once, in JSON: what the library says by itself is HTML. */
static bool refused_in_json(site *s, const char *request, const char *code)
{
    char text[4096], expected[80];
    int fd = client_connect(s->port);
    client_write(fd, request, strlen(request));
    shutdown(fd, SHUT_WR);
    client_read_until(fd, "never", text, sizeof text);
    close(fd);
    const char *body = strstr(text, "\r\n\r\n");
    snprintf(expected, sizeof expected, "\"param\":null,\"code\":\"%s\"}}", code);
    return client_status(text) == 400 && strstr(text, "application/json") != NULL && body != NULL &&
           strncmp(body + 4, "{\"error\":{\"message\":\"", 21) == 0 &&
           strstr(body, expected) != NULL;
}

static void hostless_client(site *s)
{
    s->ok =
        refused_in_json(s, "GET /echo HTTP/1.1\r\n\r\n", "unclear_host") &&
        refused_in_json(s, "GET /echo HTTP/1.2\r\nX: y\r\n\r\n", "unclear_host") &&
        refused_in_json(s, "GET /echo HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", "unclear_host") &&
        refused_in_json(s, "GET /echo x HTTP/1.1\r\nHost: x\r\n\r\n", "bad_target") &&
        refused_in_json(s, "GET /echo?a= b HTTP/1.1\r\nHost: x\r\n\r\n", "bad_target") &&
        s->requests == 0 && status_of_raw(s, "GET /echo HTTP/1.0\r\n\r\n") == 200 &&
        status_of_raw(s, "GET /echo?a=%20b HTTP/1.1\r\nHost: x\r\n\r\n") == 200;
}

static void a_request_without_a_clear_host_or_target_is_refused_in_json(void **state)
{
    (void)state;
    site s;
    with_site(&s, hostless_client);
    assert_true(s.ok);
    assert_int_equal(s.refused, 5);
}

static void a_length_that_can_be_read_in_two_ways_is_refused(void **state)
{
    (void)state;
    site s;
    with_site(&s, unclear_client);
    assert_true(s.ok);
    assert_int_equal(s.mark_ns, 0);
    assert_int_equal(s.requests, 1);
}

static void nul_path_client(site *s)
{
    s->ok = status_of_raw(s, "GET /echo%00x HTTP/1.1\r\nHost: x\r\n\r\n") == 418 &&
            status_of_raw(s, "GET /ec%68%6f HTTP/1.1\r\nHost: x\r\n\r\n") == 200 &&
            status_of_raw(s, "GET /echo%0 HTTP/1.1\r\nHost: x\r\n\r\n") == 418 &&
            status_of_raw(s, "GET /echo% HTTP/1.1\r\nHost: x\r\n\r\n") == 418;
}

static void an_escaped_nul_does_not_end_a_path(void **state)
{
    (void)state;
    site s;
    with_site(&s, nul_path_client);
    assert_true(s.ok);
    assert_int_equal(s.requests, 4);
}

/* One byte after another, none of them late: only the whole takes too long. */
static bool is_cut_off(site *s, const char *head, const char *drip)
{
    int fd = client_connect(s->port);
    bool cut = false;
    client_write(fd, head, strlen(head));
    for (int i = 0; i < 100 && !cut; i++) {
        char byte;
        usleep(100000);
        cut = !client_write(fd, drip, strlen(drip)) || (recv(fd, &byte, 1, MSG_DONTWAIT) == 0);
    }
    close(fd);
    return cut;
}

static void dripping_client(site *s)
{
    s->ok = is_cut_off(s, "GET /echo HTTP/1.1\r\nHost: x\r\n", "X: a\r\n") &&
            is_cut_off(s, "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", "x");
    int fd = client_connect(s->port); /* who waits for an answer is not in question */
    client_get(fd, "/hold");
    usleep(3500000);
    s->ok = s->ok && s->held != NULL && s->gone == 0;
    close(fd);
}

static void a_request_that_drips_in_is_cut_off(void **state)
{
    (void)state;
    site s;
    with_slow_site(&s, dripping_client, 1);
    assert_true(s.ok);
    assert_int_equal(s.refused, 2);
    assert_int_equal(s.requests, 1);
}

static void hasty_client(site *s)
{
    for (int i = 0; i < 100; i++) { /* sends, and leaves before anybody has read it */
        int fd = client_connect(s->port);
        client_get(fd, "/hold");
        close(fd);
    }
    usleep(300000);
}

static void a_client_that_leaves_at_once_is_noticed(void **state)
{
    (void)state;
    site s;
    with_site(&s, hasty_client);
    assert_int_equal(s.gone, s.requests);
    assert_null(s.held);
}

static void parting_client(site *s)
{
    for (int i = 0; i < 50; i++) /* each waits for the server to close, ten seconds at most */
        s->ok =
            status_of_raw(s, "GET /echo HTTP/1.1\r\nHost: x\r\n\r\n") == 200 && (i == 0 || s->ok);
    for (int i = 0; i < 50; i++) {
        int fd = client_connect(s->port);
        client_get(fd, "/echo");
        close(fd);
    }
    for (int i = 0; i < 400; i++) { /* in the middle of a request, in pieces of all sizes */
        static const char part[] =
            "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhell";
        int fd = client_connect(s->port);
        client_write(fd, part, 1 + (size_t)i % (sizeof part - 1));
        close(fd);
    }
    usleep(1500000);
    s->mark_ns = http_server_connections(s->server);
}

static void a_client_that_has_left_holds_no_connection(void **state)
{
    (void)state;
    site s;
    uint64_t start_ns = pd_clock_now_ns();
    with_site(&s, parting_client);
    assert_true(s.ok);
    assert_int_equal(s.mark_ns, 0);
    assert_true(pd_clock_now_ns() - start_ns < 10 * PD_NS_PER_S);
}

static void header_client(site *s)
{
    static char head[70000], value[60001];
    memset(value, 'a', sizeof value - 1);
    snprintf(head, sizeof head, "GET /echo HTTP/1.1\r\nHost: x\r\nX-Big: %s\r\n\r\n", value);
    int fd = client_connect(s->port);
    client_write(fd, head, strlen(head));
    client_read_until(fd, "\r\n\r\n", s->text, sizeof s->text);
    close(fd);
}

static void headers_over_the_limit_are_refused(void **state)
{
    (void)state;
    site s;
    with_site(&s, header_client);
    int status = client_status(s.text);
    assert_true(status == 431 || status == 413 || status == 414 || status == 0);
    assert_int_equal(s.requests, 0);
}

static void hangup(site *s, const char *path)
{
    int fd = client_connect(s->port);
    client_post(fd, path, "{}", 2);
    usleep(100000);
    s->mark_ns = pd_clock_now_ns();
    close(fd);
    usleep(100000);
}

static void hangup_client(site *s)
{
    hangup(s, "/hold");
}

static void hangup_waiting_client(site *s)
{
    hangup(s, "/wait");
}

static void a_client_that_leaves_is_noticed_before_the_first_byte(void **state)
{
    (void)state;
    site s;
    with_site(&s, hangup_client);
    assert_int_equal(s.gone, 1);
    assert_true(s.gone_ns - s.mark_ns < 80 * PD_NS_PER_MS);
    with_site(&s, hangup_waiting_client);
    assert_int_equal(s.gone, 1);
    assert_true(s.gone_ns - s.mark_ns < 80 * PD_NS_PER_MS);
}

/* The handler keeps what belongs to the stream until it hears of the end. */
static void a_stream_that_cannot_begin_is_told_as_gone(void **state)
{
    (void)state;
    site s;
    no_memory = true;
    with_site(&s, hangup_waiting_client);
    no_memory = false;
    assert_int_equal(s.requests, 1);
    assert_int_equal(s.gone, 1);
}

static void lazy_client(site *s)
{
    int fd = client_connect(s->port);
    client_post(fd, "/endless", "{}", 2);
    usleep(300000);
    uint64_t first = __atomic_load_n(&s->pulled, __ATOMIC_RELAXED);
    usleep(300000);
    s->ok = first == __atomic_load_n(&s->pulled, __ATOMIC_RELAXED); /* the server waits */
    int other = client_connect(s->port);                            /* and serves others */
    client_post(other, "/echo", "hello", 5);
    client_read_until(other, "hello", s->text, sizeof s->text);
    close(other);
    close(fd);
}

static void a_slow_reader_costs_nothing_but_the_socket(void **state)
{
    (void)state;
    site s;
    with_site(&s, lazy_client);
    assert_true(s.ok);
    assert_int_equal(client_status(s.text), 200);
    assert_true(s.pulled > 0 && s.pulled < 16u << 20); /* what the kernel's buffers take */
    assert_int_equal(s.gone, 1);
}

static void held_client(site *s)
{
    s->status = client_connect(s->port);
    client_post(s->status, "/hold", "{}", 2);
    usleep(50000);
}

static void stopping_over_open_exchanges_tells_each(void **state)
{
    (void)state;
    site s;
    with_site(&s, held_client);
    assert_int_equal(s.gone, 1);
    close(s.status);
}

static void a_port_in_use_is_an_error(void **state)
{
    (void)state;
    pd_loop *loop;
    http_server *first, *second = NULL;
    http_options options = {.host = "127.0.0.1",
                            .connections_max = 4,
                            .body_bytes_max = 1024,
                            .header_bytes_max = 1024,
                            .handler = {NULL, on_request, on_pull, on_gone, NULL}};
    assert_int_equal(pd_loop_create(&loop), PD_OK);
    assert_int_equal(http_server_create(loop, &options, &first), PD_OK);
    options.port = http_server_port(first);
    assert_int_equal(http_server_create(loop, &options, &second), PD_E_IO);
    assert_null(second);
    options.host = "no.such.host.invalid";
    assert_int_equal(http_server_create(loop, &options, &second), PD_E_IO);
    http_server_destroy(first);
    pd_loop_destroy(loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_connection_serves_many_requests),
        cmocka_unit_test(a_body_over_the_limit_is_413_with_json),
        cmocka_unit_test(a_body_without_end_is_cut_off),
        cmocka_unit_test(a_length_that_can_be_read_in_two_ways_is_refused),
        cmocka_unit_test(a_request_without_a_clear_host_or_target_is_refused_in_json),
        cmocka_unit_test(an_escaped_nul_does_not_end_a_path),
        cmocka_unit_test(a_request_that_drips_in_is_cut_off),
        cmocka_unit_test(a_client_that_leaves_at_once_is_noticed),
        cmocka_unit_test(a_client_that_has_left_holds_no_connection),
        cmocka_unit_test(headers_over_the_limit_are_refused),
        cmocka_unit_test(a_client_that_leaves_is_noticed_before_the_first_byte),
        cmocka_unit_test(a_stream_that_cannot_begin_is_told_as_gone),
        cmocka_unit_test(a_slow_reader_costs_nothing_but_the_socket),
        cmocka_unit_test(stopping_over_open_exchanges_tells_each),
        cmocka_unit_test(a_port_in_use_is_an_error),
    };
    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
