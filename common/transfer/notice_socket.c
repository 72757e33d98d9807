#include "common/transfer/notice_socket.h"

#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    SENDERS_MAX = 1024, /* links that others opened to us */
    BACKLOG = 256,
    MESSAGES_A_TURN = 32, /* of one link: others have their turn too */
    READY_MAX = 16,
    SEND_BUFFER_BYTES = 1 << 20, /* the kernel may grant less */
};

/* What an epoll event is about: a kind, and which. */
typedef enum watch_kind { WATCH_LISTENER, WATCH_SENDER, WATCH_PEER } watch_kind;

struct pd_notice_socket {
    const pd_notice_socket_events *events;
    void *ctx;
    uint32_t peers_max;
    int epoll_fd, listener;
    int *peers;    /* [peers_max] links of ours; -1: none */
    bool *blocked; /* [peers_max] waits for room */
    int senders[SENDERS_MAX];
    uint32_t senders_count;
    uint64_t refused;
    unsigned char name[PD_NOTICE_SOCKET_NAME_BYTES];
    unsigned char message[PD_NOTICE_SOCKET_BYTES_MAX];
};

static uint64_t watch_of(watch_kind kind, uint32_t index)
{
    return (uint64_t)kind << 32 | index;
}

static bool watch(const pd_notice_socket *s, int op, int fd, uint32_t events, uint64_t data)
{
    struct epoll_event event = {.events = events, .data.u64 = data};

    return epoll_ctl(s->epoll_fd, op, fd, &event) == 0;
}

static socklen_t address_of(const unsigned char *name, struct sockaddr_un *address_out)
{
    *address_out = (struct sockaddr_un){.sun_family = AF_UNIX};
    /* a NUL in front makes it abstract */
    memcpy(address_out->sun_path + 1, name, PD_NOTICE_SOCKET_NAME_BYTES);
    return offsetof(struct sockaddr_un, sun_path) + 1 + PD_NOTICE_SOCKET_NAME_BYTES;
}

/* Is the process on the other side ours, or root's? */
static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t len = sizeof peer;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0)
        return false;
    return peer.uid == geteuid() || peer.uid == 0;
}

/* ---- life ---- */

static pd_status listen_on_name(pd_notice_socket *s)
{
    char name[PD_NOTICE_SOCKET_NAME_BYTES + 1];
    struct sockaddr_un address;

    snprintf(name, sizeof name, "kvferry-%016llx%016llx", (unsigned long long)pd_random_id(),
             (unsigned long long)pd_random_id());
    memcpy(s->name, name, sizeof s->name);
    socklen_t len = address_of(s->name, &address);
    s->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (s->listener < 0 || s->epoll_fd < 0 ||
        bind(s->listener, (struct sockaddr *)&address, len) != 0 ||
        listen(s->listener, BACKLOG) != 0 ||
        !watch(s, EPOLL_CTL_ADD, s->listener, EPOLLIN, watch_of(WATCH_LISTENER, 0))) {
        pd_log_error("msg=\"transfer: no socket for notices: %m\"");
        return PD_E_IO;
    }
    return PD_OK;
}

pd_status pd_notice_socket_create(uint32_t peers_max, const pd_notice_socket_events *events,
                                  void *ctx, pd_notice_socket **socket_out)
{
    pd_notice_socket *s = pd_calloc(1, sizeof *s);

    if (s == NULL)
        return PD_E_NOMEM;
    s->events = events;
    s->ctx = ctx;
    s->peers_max = peers_max;
    s->listener = s->epoll_fd = -1;
    for (uint32_t i = 0; i < SENDERS_MAX; i++)
        s->senders[i] = -1;
    s->peers = pd_calloc(peers_max, sizeof *s->peers);
    s->blocked = pd_calloc(peers_max, sizeof *s->blocked);
    for (pd_peer i = 0; s->peers != NULL && i < peers_max; i++)
        s->peers[i] = -1;
    pd_status status = s->peers == NULL || s->blocked == NULL ? PD_E_NOMEM : listen_on_name(s);
    if (status != PD_OK) {
        pd_notice_socket_destroy(s);
        return status;
    }
    *socket_out = s;
    return PD_OK;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void pd_notice_socket_destroy(pd_notice_socket *s)
{
    if (s == NULL)
        return;
    for (pd_peer i = 0; s->peers != NULL && i < s->peers_max; i++)
        close_fd(&s->peers[i]);
    for (uint32_t i = 0; i < SENDERS_MAX; i++)
        close_fd(&s->senders[i]);
    close_fd(&s->listener);
    close_fd(&s->epoll_fd);
    pd_free(s->peers);
    pd_free(s->blocked);
    pd_free(s);
}

const unsigned char *pd_notice_socket_name(const pd_notice_socket *s)
{
    return s->name;
}

int pd_notice_socket_fd(const pd_notice_socket *s)
{
    return s->epoll_fd;
}

/* ---- what comes in ---- */

static void refuse(pd_notice_socket *s, int fd, const char *why)
{
    s->refused++; /* the first, then ever fewer are told of */
    if ((s->refused & (s->refused - 1)) == 0)
        pd_log_warn("msg=\"transfer: a sender of notices is refused: %s\" refused=%llu", why,
                    (unsigned long long)s->refused);
    close(fd);
}

static void take_sender(pd_notice_socket *s, int fd)
{
    uint32_t place = 0;

    if (!same_user(fd)) {
        refuse(s, fd, "another user's process");
        return;
    }
    while (place < SENDERS_MAX && s->senders[place] >= 0)
        place++;
    if (place == SENDERS_MAX) {
        refuse(s, fd, "too many");
        return;
    }
    if (!watch(s, EPOLL_CTL_ADD, fd, EPOLLIN, watch_of(WATCH_SENDER, place))) {
        refuse(s, fd, "it cannot be watched");
        return;
    }
    s->senders[place] = fd;
    s->senders_count++;
}

static void take_senders(pd_notice_socket *s)
{
    for (;;) {
        int fd = accept4(s->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0)
            take_sender(s, fd);
        else if (errno != EINTR && errno != ECONNABORTED)
            return; /* none left; or no descriptors, and the next turn tries again */
    }
}

static void read_sender(pd_notice_socket *s, uint32_t place)
{
    for (int i = 0; i < MESSAGES_A_TURN; i++) {
        ssize_t len = recv(s->senders[place], s->message, sizeof s->message, 0);
        if (len > 0) {
            s->events->received(s->ctx, s->message, (size_t)len);
            continue;
        }
        if (len < 0 && errno == EINTR)
            continue;
        if (len < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        close_fd(&s->senders[place]); /* its end; nobody of ours sends empty messages */
        s->senders_count--;
        return;
    }
}

static void look_at_peer(pd_notice_socket *s, pd_peer peer, uint32_t events)
{
    if (s->peers[peer] < 0)
        return;
    if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
        /* It stays open until it is closed; it must not be told of again and again. */
        watch(s, EPOLL_CTL_DEL, s->peers[peer], 0, 0);
        s->events->broken(s->ctx, peer);
        return;
    }
    if (s->blocked[peer]) {
        s->blocked[peer] = false;
        watch(s, EPOLL_CTL_MOD, s->peers[peer], EPOLLRDHUP, watch_of(WATCH_PEER, peer));
    }
}

bool pd_notice_socket_progress(pd_notice_socket *s)
{
    struct epoll_event ready[READY_MAX];
    int count = epoll_wait(s->epoll_fd, ready, READY_MAX, 0);

    for (int i = 0; i < count; i++) {
        uint32_t index = (uint32_t)ready[i].data.u64;
        switch ((watch_kind)(ready[i].data.u64 >> 32)) {
        case WATCH_LISTENER: take_senders(s); break;
        case WATCH_SENDER:
            if (s->senders[index] >= 0)
                read_sender(s, index);
            break;
        case WATCH_PEER: look_at_peer(s, index, ready[i].events); break;
        }
    }
    return count > 0;
}

/* ---- links of ours ---- */

static pd_status connect_to(int fd, const unsigned char *name)
{
    struct sockaddr_un address;
    socklen_t len = address_of(name, &address);
    int bytes = SEND_BUFFER_BYTES;

    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes); /* less is fine too */
    if (connect(fd, (struct sockaddr *)&address, len) != 0) {
        if (errno == ECONNREFUSED || errno == ENOENT)
            return PD_E_PEER;
        pd_log_warn("msg=\"transfer: the socket for notices cannot be connected: %m\"");
        return PD_E_IO;
    }
    if (!same_user(fd)) {
        pd_log_error("msg=\"transfer: another user's process listens in a peer's name\"");
        return PD_E_PEER;
    }
    return PD_OK;
}

pd_status pd_notice_socket_open(pd_notice_socket *s, pd_peer peer, const unsigned char *name)
{
    pd_assert(peer < s->peers_max && s->peers[peer] < 0);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    if (fd < 0) {
        pd_log_error("msg=\"transfer: no socket: %m\"");
        return PD_E_IO;
    }
    pd_status status = connect_to(fd, name);
    if (status == PD_OK && !watch(s, EPOLL_CTL_ADD, fd, EPOLLRDHUP, watch_of(WATCH_PEER, peer))) {
        pd_log_error("msg=\"transfer: a socket cannot be watched: %m\"");
        status = PD_E_IO;
    }
    if (status != PD_OK) {
        close(fd);
        return status;
    }
    s->peers[peer] = fd;
    s->blocked[peer] = false;
    return PD_OK;
}

void pd_notice_socket_close(pd_notice_socket *s, pd_peer peer)
{
    pd_assert(peer < s->peers_max);
    close_fd(&s->peers[peer]);
}

bool pd_notice_socket_is_open(const pd_notice_socket *s, pd_peer peer)
{
    return s->peers[peer] >= 0;
}

pd_status pd_notice_socket_send(pd_notice_socket *s, pd_peer peer, const void *head,
                                size_t head_len, const void *bytes, size_t len)
{
    struct iovec parts[2] = {
        {.iov_base = (void *)head, .iov_len = head_len},
        {.iov_base = (void *)bytes, .iov_len = len},
    };
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};

    pd_assert(head_len + len > 0 && head_len + len <= PD_NOTICE_SOCKET_BYTES_MAX);
    while (sendmsg(s->peers[peer], &message, MSG_NOSIGNAL) < 0) {
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS)
            return PD_E_PEER;
        if (!s->blocked[peer])
            watch(s, EPOLL_CTL_MOD, s->peers[peer], EPOLLRDHUP | EPOLLOUT,
                  watch_of(WATCH_PEER, peer));
        s->blocked[peer] = true;
        return PD_E_OVERLOAD;
    }
    return PD_OK;
}
