#include "deploy/http_get.h"

#include "common/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RESPONSE_MAX (4u << 20)

static pd_status resolve(const char *host, uint16_t port, int flags, struct addrinfo **found_out,
                         char why[128])
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    char service[8];

    snprintf(service, sizeof service, "%u", port);
    int rc = getaddrinfo(host, service, &hints, found_out);
    if (rc == 0)
        return PD_OK;
    snprintf(why, 128, "%s", rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
    return PD_E_NOT_FOUND;
}

/* Waits until fd is ready or due_ns; PD_E_TIMEOUT after it. */
static pd_status wait_fd(int fd, short events, uint64_t due_ns)
{
    for (;;) {
        uint64_t now = pd_clock_now_ns();
        if (now >= due_ns)
            return PD_E_TIMEOUT;
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, (int)((due_ns - now) / PD_NS_PER_MS) + 1);
        if (n > 0)
            return PD_OK;
        if (n < 0 && errno != EINTR)
            return PD_E_PEER;
    }
}

static pd_status connect_one(const struct addrinfo *to, uint64_t due_ns, int *fd_out)
{
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int error = 0;
    socklen_t error_len = sizeof error;
    pd_status status = PD_E_PEER;

    if (fd < 0)
        return PD_E_PEER;
    if (connect(fd, to->ai_addr, to->ai_addrlen) == 0)
        status = PD_OK;
    else if (errno == EINPROGRESS)
        status = wait_fd(fd, POLLOUT, due_ns);
    if (status == PD_OK &&
        (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_len) != 0 || error != 0))
        status = PD_E_PEER;
    if (status != PD_OK) {
        close(fd);
        return status;
    }
    *fd_out = fd;
    return PD_OK;
}

static pd_status exchange(int fd, const char *request, uint64_t due_ns, pd_buf *response)
{
    size_t sent = 0, len = strlen(request);
    char part[4096];

    while (sent < len) {
        ssize_t n = send(fd, request + sent, len - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return PD_E_PEER;
        sent += n > 0 ? (size_t)n : 0;
        if (n < 0) {
            pd_status status = wait_fd(fd, POLLOUT, due_ns);
            if (status != PD_OK)
                return status;
        }
    }
    for (;;) {
        ssize_t n = recv(fd, part, sizeof part, 0);
        if (n == 0)
            return pd_buf_status(response);
        if (n > 0) {
            pd_buf_append(response, part, (size_t)n);
            if (pd_buf_status(response) != PD_OK)
                return pd_buf_status(response);
            continue;
        }
        if (errno != EAGAIN && errno != EINTR)
            return PD_E_PEER;
        pd_status status = wait_fd(fd, POLLIN, due_ns);
        if (status != PD_OK)
            return status;
    }
}

/* The answer to an HTTP/1.0 request: status line, header, then the body up to the end. */
static pd_status read_response(const pd_buf *response, int *code_out, pd_buf *body)
{
    const char *text = pd_buf_text(response);
    const char *header_end = strstr(text, "\r\n\r\n");
    int minor, code;

    if (header_end == NULL || sscanf(text, "HTTP/1.%d %3d", &minor, &code) != 2 || code < 100)
        return PD_E_PEER;
    size_t skip = (size_t)(header_end + 4 - text);
    pd_buf_append(body, text + skip, response->len - skip);
    if (pd_buf_status(body) != PD_OK)
        return pd_buf_status(body);
    *code_out = code;
    return PD_OK;
}

pd_status http_get(const pd_listen *listen, const char *path, int timeout_ms, int *code_out,
                   pd_buf *body)
{
    uint64_t due_ns = pd_clock_now_ns() + (uint64_t)timeout_ms * PD_NS_PER_MS;
    const char *host = listen->host;
    struct addrinfo *found = NULL;
    pd_buf response;
    int fd = -1;
    char request[512], why[128];

    if (strcmp(host, "0.0.0.0") == 0)
        host = "127.0.0.1";
    else if (strcmp(host, "::") == 0)
        host = "::1";
    pd_buf_init(&response, RESPONSE_MAX);
    pd_status status = resolve(host, listen->port, 0, &found, why);
    if (status != PD_OK)
        goto out;
    status = PD_E_PEER;
    for (const struct addrinfo *to = found; to != NULL && status != PD_OK; to = to->ai_next)
        status = connect_one(to, due_ns, &fd);
    if (status != PD_OK)
        goto out;
    snprintf(request, sizeof request,
             "GET %s HTTP/1.0\r\nHost: %s\r\nAccept: */*\r\nConnection: close\r\n\r\n", path,
             listen->text);
    status = exchange(fd, request, due_ns, &response);
    if (status == PD_OK)
        status = read_response(&response, code_out, body);
out:
    if (fd >= 0)
        close(fd);
    if (found != NULL)
        freeaddrinfo(found);
    pd_buf_fini(&response);
    return status;
}

pd_status http_probe_listen(const char *host, uint16_t port, uint16_t *port_out, char why[128])
{
    struct addrinfo *found = NULL;
    struct sockaddr_storage bound;
    socklen_t bound_len = sizeof bound;
    int on = 1, fd = -1;
    pd_status status = resolve(host, port, AI_PASSIVE, &found, why);

    if (status != PD_OK)
        return status;
    status = PD_E_IO;
    fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)&bound, &bound_len) != 0) {
        snprintf(why, 128, "%s", strerror(errno));
        goto out;
    }
    *port_out = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((struct sockaddr_in *)&bound)->sin_port);
    status = PD_OK;
out:
    if (fd >= 0)
        close(fd);
    freeaddrinfo(found);
    return status;
}
