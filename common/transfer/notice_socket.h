#pragma once

/* common/transfer/notice_socket.h - notices between processes of one host. Inside common/transfer
 * only, for carriers whose own messages cannot be trusted with a sender's sudden death.
 *
 * Each process listens on a Unix seqpacket socket with an abstract name (nothing is left in the
 * file system, whatever kills it), and connects to the name of each peer that it writes to.
 * Messages keep their limits and their order within a link; nothing goes back. Both sides look at
 * each other's user: only the same one (or root) is let in. The end of the peer's process ends the
 * socket at once, so a link is broken when its socket is.
 *
 * Bounded: what is not read stays in the kernel's buffer of its sender, and a full buffer is
 * PD_E_OVERLOAD there. Engine thread only; events come from within progress. */

#include "common/transfer/transfer.h"

#define PD_NOTICE_SOCKET_NAME_BYTES 40
/* Of one message, both parts together. */
#define PD_NOTICE_SOCKET_BYTES_MAX (PD_TRANSFER_NOTICE_BYTES_MAX + 64)

typedef struct pd_notice_socket pd_notice_socket;

typedef struct pd_notice_socket_events {
    /* bytes end with the call. Longer ones than the most are not sent by us: they come cut off. */
    void (*received)(void *ctx, const void *bytes, size_t len);
    /* The link that this process opened to peer is at its end. Only marks. */
    void (*broken)(void *ctx, pd_peer peer);
} pd_notice_socket_events;

/* Errors: PD_E_NOMEM, PD_E_IO (logged). */
PD_CHECKED pd_status pd_notice_socket_create(uint32_t peers_max,
                                             const pd_notice_socket_events *events, void *ctx,
                                             pd_notice_socket **socket_out);
void pd_notice_socket_destroy(pd_notice_socket *socket);

/* What peers connect to: PD_NOTICE_SOCKET_NAME_BYTES bytes. */
const unsigned char *pd_notice_socket_name(const pd_notice_socket *socket);
/* Readable when progress has something to do. */
int pd_notice_socket_fd(const pd_notice_socket *socket);
/* Takes in what has come, some messages at most; true if there was something. */
bool pd_notice_socket_progress(pd_notice_socket *socket);

/* Opens the link to peer, below peers_max and not open. PD_E_PEER: nobody of that name here (not
 * logged: it may be in another network namespace), or not the same user (logged); PD_E_IO. */
PD_CHECKED pd_status pd_notice_socket_open(pd_notice_socket *socket, pd_peer peer,
                                           const unsigned char *name);
void pd_notice_socket_close(pd_notice_socket *socket, pd_peer peer); /* nothing if not open */
bool pd_notice_socket_is_open(const pd_notice_socket *socket, pd_peer peer);
/* Sends head and bytes as one message, or nothing. PD_E_OVERLOAD: no room, fd will be readable when
 * there is; PD_E_PEER: the link is at its end. */
PD_CHECKED pd_status pd_notice_socket_send(pd_notice_socket *socket, pd_peer peer, const void *head,
                                           size_t head_len, const void *bytes, size_t len);
