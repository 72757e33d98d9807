#pragma once

/* tests/unit/router/client.h - a blocking HTTP client over a plain socket, for a test's second
 * thread. No assertions here: cmocka's belong to the main thread. */

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static inline int client_connect(uint16_t port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval limit = {.tv_sec = 10};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        return -1;
    return fd;
}

static inline bool client_write(int fd, const void *bytes, size_t len)
{
    const char *at = bytes;
    while (len > 0) {
        ssize_t n = send(fd, at, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        at += n;
        len -= (size_t)n;
    }
    return true;
}

static inline bool client_post(int fd, const char *path, const char *body, size_t len)
{
    char head[512];
    int n = snprintf(head, sizeof head,
                     "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     "Content-Length: %zu\r\n\r\n",
                     path, len);
    return client_write(fd, head, (size_t)n) && client_write(fd, body, len);
}

static inline bool client_get(int fd, const char *path)
{
    char head[512];
    int n = snprintf(head, sizeof head, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path);
    return client_write(fd, head, (size_t)n);
}

/* Reads until text has come, the connection ends, or size is full; always terminated. */
static inline size_t client_read_until(int fd, const char *text, char *out, size_t size)
{
    size_t len = 0;
    out[0] = '\0';
    while (len + 1 < size && strstr(out, text) == NULL) {
        ssize_t n = recv(fd, out + len, size - 1 - len, 0);
        if (n <= 0)
            break;
        len += (size_t)n;
        out[len] = '\0';
    }
    return len;
}

static inline int client_status(const char *response)
{
    int status = 0;
    return sscanf(response, "HTTP/1.1 %d", &status) == 1 ? status : 0;
}
