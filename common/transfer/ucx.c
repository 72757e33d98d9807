/* The UCX carrier: one-sided puts into memory that UCX itself allocated or was given, a flush, and
 * a notice through a socket of our own (notice_socket.h). Where UCX has mapped the peer's pool a
 * put is a copy into it, made here (copy.h), and there is nothing to flush; over tcp, where UCX has
 * no one-sided put, blocks and notices are its eager active messages. Between pools in GPUs' memory
 * puts are cuda_ipc's or a NIC's; over tcp the bytes are copied out of one GPU, sent, and copied
 * into the other, here (gpus.h, ucx_stage.h). Everything runs on the engine's thread, with the
 * context of the GPU current that the next call is about.
 *
 * Notices within a host do not go through UCX: all senders of a receiver share one queue of its
 * there, and a sender killed between taking an entry and filling it leaves that queue stuck for
 * everybody, for ever. Only when the socket cannot be reached (two network namespaces) do they. */

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/carrier.h"
#include "common/transfer/copy.h"
#include "common/transfer/gpus.h"
#include "common/transfer/lanes.h"
#include "common/transfer/notice_socket.h"
#include "common/transfer/senders.h"
#include "common/transfer/ucx_context.h"
#include "common/transfer/ucx_pool.h"
#include "common/transfer/ucx_stage.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { NOTICE_AM_ID = 1, DATA_AM_ID = 2 };

/* Before the bytes of a put that goes as a message. */
typedef struct data_head {
    pd_link_head from;
    uint64_t offset; /* in the receiver's pool */
} data_head;
_Static_assert(sizeof(data_head) == 24, "goes over the wire");

/* In an address, before UCX's own bytes of the worker; after them the pool (ucx_pool.h). */
typedef struct ucx_address {
    uint32_t worker_bytes;
    uint32_t kind;                                     /* pd_memory_kind of the pool */
    unsigned char socket[PD_NOTICE_SOCKET_NAME_BYTES]; /* all 0: none, over tcp only */
} ucx_address;
_Static_assert(sizeof(ucx_address) == 48, "goes over the wire");

typedef struct ucx_peer {
    pd_carrier *carrier; /* for UCX's callbacks */
    pd_peer index;
    ucp_ep_h ep; /* NULL: not open */
    pd_ucx_target target;
    pd_link_head head; /* of this link */
    bool by_message;   /* over tcp: see put_by_message */
    bool failed;       /* UCX reported an error: no further calls but closing */
    bool probing;      /* open until the first puts and their flush are done */
    uint32_t probes;   /* puts begun */
    void *probe;       /* request of the latest of these, or of the flush; or NULL */
    bool probe_flushing;
    void *closing; /* request, or NULL */
} ucx_peer;

struct pd_carrier {
    const pd_carrier_events *events;
    void *engine;
    uint32_t peers_max;
    char transport[8];
    pd_gpus gpus;    /* that the pool lies on */
    bool nics_reach; /* NICs read and write their memory */
    bool gpu_lost; /* bytes that came could not be written into it: nothing is announced any more */
    pd_ucx_stages stages;
    ucp_context_h context;
    ucp_worker_h worker;
    pd_ucx_pool pool;
    int fd;                   /* what is waited for: UCX's own, or it and the socket's together */
    pd_notice_socket *socket; /* NULL with tcp alone */
    int epoll_fd;             /* with a socket */
    uint32_t watched;         /* peers that probe or close: progress looks after them */
    ucx_peer *peers;          /* [peers_max] */
    uint64_t incarnation;     /* ours; 0: none */
    pd_senders senders;       /* to us */
    uint64_t links_opened;    /* ever, by us */
    size_t address_bytes;
    unsigned char address[PD_TRANSFER_ADDRESS_BYTES_MAX];
};

/* ---- create ---- */

/* head: its first head_len bytes; data: what follows. NULL: not all of it is here. */
static void take_notice(pd_carrier *carrier, const void *head_bytes, size_t head_len,
                        const void *data, size_t len)
{
    pd_link_head head = {0};
    if (head_len == sizeof head)
        memcpy(&head, head_bytes, sizeof head);
    if (pd_senders_is_fenced(&carrier->senders, head.sender) ||
        pd_senders_is_old(&carrier->senders, &head)) {
        pd_senders_dropped(&carrier->senders, &head, len);
        return;
    }
    if (carrier->nics_reach && pd_gpus_see_writes(&carrier->gpus) != PD_OK)
        carrier->gpu_lost = true;
    if (carrier->gpu_lost) /* the worker ends of it; that its blocks are there nobody may believe */
        return;
    /* Length 0 is malformed, as the engine will say. */
    bool here = data != NULL && head_len == sizeof head;
    carrier->events->received(carrier->engine, data, here ? len : 0);
}

static ucs_status_t on_notice(void *arg, const void *header, size_t header_len, void *data,
                              size_t len, const ucp_am_recv_param_t *param)
{
    /* Notices are sent eagerly; a rendezvous would need a receive, and nobody of ours asks for it.
     */
    bool here = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
    take_notice(arg, header, header_len, here ? data : NULL, len);
    return UCS_OK;
}

static void on_socket_message(void *ctx, const void *bytes, size_t len)
{
    size_t head_len = len < sizeof(pd_link_head) ? len : sizeof(pd_link_head);
    take_notice(ctx, bytes, head_len, (const unsigned char *)bytes + head_len, len - head_len);
}

static void on_socket_broken(void *ctx, pd_peer index)
{
    pd_carrier *carrier = ctx;
    pd_log_debug("msg=\"transfer: a peer's process has ended\" peer=%u", index);
    carrier->peers[index].failed = true;
    carrier->events->broken(carrier->engine, index);
}

static void fence(pd_carrier *carrier, uint64_t incarnation)
{
    enum { TURNS_MAX = 1000 };
    /* what it has said before its end is heard before; a dead one's socket runs dry */
    for (int i = 0; carrier->socket != NULL && i < TURNS_MAX; i++) {
        if (!pd_notice_socket_progress(carrier->socket))
            break;
    }
    pd_senders_fence(&carrier->senders, incarnation);
}

/* The sender checked the range, but it is another process. UCX has all of a message when it calls
 * this, so that one is written in full before a fence or not at all. */
static ucs_status_t on_data(void *arg, const void *header, size_t header_len, void *data,
                            size_t len, const ucp_am_recv_param_t *param)
{
    pd_carrier *carrier = arg;
    data_head head;
    if (header_len == sizeof head)
        memcpy(&head, header, sizeof head);
    if (header_len != sizeof head || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 ||
        !pd_ucx_pool_holds(&carrier->pool, head.offset, len)) {
        pd_log_warn("msg=\"transfer: dropped bytes that are not for this pool\" bytes=%zu", len);
        return UCS_OK;
    }
    if (pd_senders_is_fenced(&carrier->senders, head.from.sender) ||
        pd_senders_is_old(&carrier->senders, &head.from)) {
        pd_senders_dropped(&carrier->senders, &head.from, len);
        return UCS_OK;
    }
    uint32_t piece;
    unsigned char *to = pd_ucx_pool_at(&carrier->pool, head.offset, &piece);
    if (carrier->pool.kind == PD_MEMORY_HOST)
        memcpy(to, data, len);
    else if (!carrier->gpu_lost && pd_gpus_copy_in(&carrier->gpus, piece, to, data, len) != PD_OK)
        carrier->gpu_lost = true;
    return UCS_OK;
}

static pd_status init_worker(pd_carrier *carrier)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucs_status_t ucs = ucp_worker_create(carrier->context, &params, &carrier->worker);
    if (ucs != UCS_OK) {
        carrier->worker = NULL;
        pd_log_error("msg=\"ucx: no worker: %s\"", ucs_status_string(ucs));
        return PD_E_IO;
    }
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = NOTICE_AM_ID,
        .cb = on_notice,
        .arg = carrier,
    };
    ucs = ucp_worker_set_am_recv_handler(carrier->worker, &handler);
    handler.id = DATA_AM_ID;
    handler.cb = on_data;
    if (ucs == UCS_OK)
        ucs = ucp_worker_set_am_recv_handler(carrier->worker, &handler);
    if (ucs == UCS_OK)
        ucs = ucp_worker_get_efd(carrier->worker, &carrier->fd);
    if (ucs != UCS_OK) {
        pd_log_error("msg=\"ucx: no wake-up or handler: %s\"", ucs_status_string(ucs));
        return PD_E_IO;
    }
    return PD_OK;
}

static pd_status init_address(pd_carrier *carrier)
{
    ucp_address_t *worker = NULL;
    size_t worker_bytes = 0, pool_bytes = 0;
    ucs_status_t ucs = ucp_worker_get_address(carrier->worker, &worker, &worker_bytes);
    ucx_address head = {.worker_bytes = (uint32_t)worker_bytes,
                        .kind = (uint32_t)carrier->pool.kind};
    size_t room = sizeof carrier->address - sizeof head;
    if (ucs != UCS_OK || worker_bytes > room) {
        pd_log_error("msg=\"ucx: no address: %s\" worker_bytes=%zu", ucs_status_string(ucs),
                     worker_bytes);
        if (ucs == UCS_OK)
            ucp_worker_release_address(carrier->worker, worker);
        return PD_E_UNSUPPORTED;
    }
    if (carrier->socket != NULL)
        memcpy(head.socket, pd_notice_socket_name(carrier->socket), sizeof head.socket);
    memcpy(carrier->address, &head, sizeof head);
    memcpy(carrier->address + sizeof head, worker, worker_bytes);
    ucp_worker_release_address(carrier->worker, worker);
    pd_status status =
        pd_ucx_pool_pack(&carrier->pool, carrier->address + sizeof head + worker_bytes,
                         room - worker_bytes, &pool_bytes);
    carrier->address_bytes = sizeof head + worker_bytes + pool_bytes;
    return status;
}

static void destroy(pd_carrier *carrier)
{
    if (carrier == NULL)
        return;
    for (pd_peer i = 0; carrier->peers != NULL && i < carrier->peers_max; i++) {
        ucx_peer *peer = &carrier->peers[i];
        if (peer->ep == NULL)
            pd_ucx_target_end(&peer->target);
        else /* UCX did not end the connection, and may still need its keys */
            pd_ucx_target_unmap(&peer->target);
    }
    pd_notice_socket_destroy(carrier->socket);
    if (carrier->epoll_fd >= 0)
        close(carrier->epoll_fd);
    if (carrier->worker != NULL)
        ucp_worker_destroy(carrier->worker);
    pd_ucx_pool_end(&carrier->pool);
    if (carrier->context != NULL)
        ucp_cleanup(carrier->context);
    pd_ucx_stages_end(&carrier->stages);
    pd_gpus_close(&carrier->gpus);
    pd_free(carrier->peers);
    pd_free(carrier);
}

static const pd_notice_socket_events socket_events = {
    .received = on_socket_message,
    .broken = on_socket_broken,
};

/* One descriptor to wait for: UCX's and the socket's behind an epoll of ours. */
static pd_status init_socket(pd_carrier *carrier)
{
    struct epoll_event ucx = {.events = EPOLLIN}, own = {.events = EPOLLIN};
    pd_status status =
        pd_notice_socket_create(carrier->peers_max, &socket_events, carrier, &carrier->socket);
    if (status != PD_OK)
        return status;
    carrier->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (carrier->epoll_fd < 0 ||
        epoll_ctl(carrier->epoll_fd, EPOLL_CTL_ADD, carrier->fd, &ucx) != 0 ||
        epoll_ctl(carrier->epoll_fd, EPOLL_CTL_ADD, pd_notice_socket_fd(carrier->socket), &own) !=
            0) {
        pd_log_error("msg=\"transfer: epoll failed: %m\"");
        return PD_E_IO;
    }
    carrier->fd = carrier->epoll_fd;
    return PD_OK;
}

static bool by_messages_alone(const pd_carrier *carrier)
{
    return strcmp(carrier->transport, "tcp") == 0;
}

/* UCX and what it needs around it. */
static pd_status init_ucx(pd_carrier *carrier, const pd_transfer_options *options)
{
    pd_transfer_options chosen = *options;
    /* before UCX, whose modules look for a GPU's context when they are made ready */
    pd_status status = pd_gpus_open(&carrier->gpus, options);
    if (status == PD_OK)
        status = pd_ucx_context_create(&chosen, &carrier->context);
    strncpy(carrier->transport, chosen.transport, sizeof carrier->transport - 1);
    if (status == PD_OK)
        status = init_worker(carrier);
    if (status == PD_OK && !by_messages_alone(carrier))
        status = init_socket(carrier);
    if (status == PD_OK)
        status = pd_ucx_pool_make(carrier->context, options, &carrier->gpus,
                                  by_messages_alone(carrier), &carrier->pool);
    if (status == PD_OK)
        status = init_address(carrier);
    if (status != PD_OK || options->pool_kind == PD_MEMORY_HOST)
        return status;
    carrier->nics_reach =
        strcmp(carrier->transport, "rdma") == 0 && pd_gpus_rdma(&carrier->gpus, "");
    if (strcmp(options->transport, "tcp") == 0)
        pd_log_warn(
            "msg=\"transfer: the KV pool lies in a GPU's memory, and tcp carries it through "
            "host memory, which is slow\" transport=tcp pieces=%u",
            options->pieces);
    return PD_OK;
}

static pd_status create(const pd_transfer_options *options, const pd_carrier_events *events,
                        void *engine, pd_carrier **carrier_out)
{
    pd_carrier *carrier = pd_calloc(1, sizeof *carrier);
    if (carrier == NULL)
        return PD_E_NOMEM;
    carrier->events = events;
    carrier->engine = engine;
    carrier->peers_max = options->peers_max;
    carrier->incarnation = options->incarnation;
    carrier->epoll_fd = -1;
    carrier->peers = pd_calloc(options->peers_max, sizeof *carrier->peers);
    pd_status status = carrier->peers == NULL ? PD_E_NOMEM : PD_OK;
    if (status == PD_OK)
        status = init_ucx(carrier, options);
    if (status != PD_OK) {
        destroy(carrier);
        return status;
    }
    pd_log_debug("msg=\"ucx ready\" version=%s transport=%s pool_bytes=%llu pieces=%u",
                 ucp_get_version_string(), carrier->transport,
                 (unsigned long long)options->pool_bytes, options->pieces);
    *carrier_out = carrier;
    return PD_OK;
}

static void *pool(const pd_carrier *carrier)
{
    return carrier->pool.piece[0].memory;
}

static const void *address(const pd_carrier *carrier, size_t *bytes_out)
{
    *bytes_out = carrier->address_bytes;
    return carrier->address;
}

static int fd(const pd_carrier *carrier)
{
    return carrier->fd;
}

/* ---- lanes ---- */

/* UCX 1.13 tells only as text which transports a connection uses. */
static pd_status read_lanes(ucp_ep_h ep, char *lane, size_t size)
{
    char *text = NULL;
    size_t text_len = 0;
    FILE *stream = open_memstream(&text, &text_len);
    if (stream == NULL)
        return PD_E_NOMEM;
    ucp_ep_print_info(ep, stream);
    fclose(stream);
    pd_status status = pd_lanes_read(text == NULL ? "" : text, lane, size);
    free(text); /* the C library's, not ours */
    return status;
}

/* From every piece here to every piece over there. */
static bool is_cuda_ipc_everywhere(pd_carrier *carrier, const ucx_peer *peer)
{
    for (uint32_t i = 0; i < carrier->pool.pieces; i++) {
        if (pd_gpus_use(&carrier->gpus, i) != PD_OK || !pd_ucx_target_by_cuda_ipc(&peer->target))
            return false;
    }
    return true;
}

/* Do the GPUs' bytes go straight from one to the other? By host memory only where nothing else was
 * asked for, and never without a word. */
static pd_status check_gpu_lanes(pd_carrier *carrier, const ucx_peer *peer, const char *lane)
{
    pd_lanes_way way = pd_lanes_gpu_way(lane, carrier->nics_reach);
    const char *why = "no lane reaches GPU memory: containers without a common IPC namespace, GPUs "
                      "or hosts that no NVLink joins, or other transports than are there";
    if (by_messages_alone(carrier)) /* it was told when this was chosen */
        return PD_OK;
    if (way == PD_LANES_CUDA_IPC && !is_cuda_ipc_everywhere(carrier, peer)) {
        way = PD_LANES_STAGED;
        why = "cuda_ipc does not reach the peer's memory from each GPU here";
    } else if (way == PD_LANES_STAGED && pd_lanes_have_rdma(lane))
        why = "NICs cannot read and write GPU memory here: neither nvidia_peermem nor dma-buf";
    if (way != PD_LANES_STAGED) {
        pd_log_debug("msg=\"transfer: GPU memory is reached\" by=%s peer=%u lanes=%s",
                     pd_lanes_way_name(way), peer->index, lane);
        return PD_OK;
    }
    if (strcmp(carrier->transport, "auto") != 0) {
        pd_log_error("msg=\"transfer: blocks would go through host memory: %s\" peer=%u "
                     "transport=%s lanes=%s",
                     why, peer->index, carrier->transport, lane);
        return PD_E_UNSUPPORTED;
    }
    pd_log_warn(
        "msg=\"transfer: blocks go through host memory, which is slow: %s\" peer=%u lanes=%s", why,
        peer->index, lane);
    return PD_OK;
}

/* Is the connection made of what was asked for? */
static pd_status check_lanes(pd_carrier *carrier, ucx_peer *peer, char *lane, size_t size)
{
    pd_status status = read_lanes(peer->ep, lane, size);
    if (status != PD_OK) {
        pd_log_error("msg=\"ucx: cannot tell what carries a connection\" peer=%u", peer->index);
        return status;
    }
    if (!pd_lanes_fit(lane, carrier->transport)) {
        pd_log_error("msg=\"transfer: the connection uses other lanes than configured\" peer=%u "
                     "transport=%s lanes=%s",
                     peer->index, carrier->transport, lane);
        return PD_E_MISMATCH;
    }
    if (carrier->pool.kind == PD_MEMORY_CUDA)
        return check_gpu_lanes(carrier, peer, lane);
    if (peer->by_message || peer->target.mapped || pd_lanes_have_rdma(lane))
        return PD_OK;
    pd_ucx_target_find(&peer->target);
    if (!peer->target.mapped)
        pd_log_warn("msg=\"transfer: the peer's pool cannot be mapped, each put is a copy by "
                    "messages\" peer=%u lanes=%s",
                    peer->index, lane);
    return PD_OK;
}

/* ---- connections ---- */

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    ucx_peer *peer = arg;
    /* runs inside progress: marks, nothing else */
    pd_log_debug("msg=\"ucx: connection failed: %s\" peer=%u", ucs_status_string(status),
                 peer->index);
    peer->failed = true;
    peer->carrier->events->broken(peer->carrier->engine, peer->index);
}

/* Where the pool's part of an address begins. */
static const unsigned char *pool_part(const void *bytes, const ucx_address *head)
{
    return (const unsigned char *)bytes + sizeof *head + head->worker_bytes;
}

static pd_status read_address(const void *bytes, size_t len, pd_carrier_pool peer_pool,
                              ucx_address *head_out)
{
    if (len < sizeof *head_out)
        return PD_E_INVALID;
    memcpy(head_out, bytes, sizeof *head_out);
    size_t rest = len - sizeof *head_out;
    if (head_out->worker_bytes == 0 || head_out->worker_bytes > rest ||
        !pd_ucx_target_fits(pool_part(bytes, head_out), rest - head_out->worker_bytes, peer_pool))
        return PD_E_INVALID;
    return PD_OK;
}

static ucs_status_t make_endpoint(pd_carrier *carrier, ucx_peer *peer, const void *bytes,
                                  const ucx_address *head)
{
    const unsigned char *worker = (const unsigned char *)bytes + sizeof *head;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)worker,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = peer},
    };
    ucs_status_t ucs = ucp_ep_create(carrier->worker, &params, &peer->ep);
    if (ucs != UCS_OK)
        peer->ep = NULL;
    return ucs;
}

/* A request that UCX made: its state, and its end. */
static ucs_status_t request_take(void **request)
{
    ucs_status_t ucs = ucp_request_check_status(*request);
    if (ucs != UCS_INPROGRESS) {
        ucp_request_free(*request);
        *request = NULL;
    }
    return ucs;
}

/* A connection counts as made when first puts were written over there: creating an endpoint alone
 * says nothing. One from each piece here to each over there, since each may lie on a device of its
 * own, in the page behind the peer's piece. A pool that was mapped by its file was found at the
 * peer's process, and the peer's socket answered. */
static uint32_t probes_wanted(const pd_carrier *carrier, const ucx_peer *peer)
{
    bool none = peer->by_message || peer->target.mapped;
    return none ? 0 : carrier->pool.pieces * peer->target.pieces;
}

/* The next put, or the flush after all: over tcp that alone waits until the socket is connected. */
static pd_status probe_next(pd_carrier *carrier, ucx_peer *peer)
{
    ucp_request_param_t param = {0};
    pd_status status = PD_OK;
    if (peer->probes == probes_wanted(carrier, peer)) {
        peer->probe_flushing = true;
        peer->probe = ucp_ep_flush_nbx(peer->ep, &param);
    } else {
        uint32_t piece = peer->probes / peer->target.pieces;
        const pd_ucx_piece *from = &carrier->pool.piece[piece];
        const pd_ucx_target_piece *to = &peer->target.piece[peer->probes % peer->target.pieces];
        param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param.memh = from->handle;
        param.memory_type = pd_ucx_pool_type(&carrier->pool);
        peer->probes++;
        status = pd_gpus_use(&carrier->gpus, piece);
        if (status != PD_OK)
            return status;
        peer->probe =
            ucp_put_nbx(peer->ep, from->memory + pd_ucx_probe_offset(carrier->pool.piece_bytes), 8,
                        to->base + pd_ucx_probe_offset(peer->target.piece_bytes), to->key, &param);
    }
    if (!UCS_PTR_IS_ERR(peer->probe))
        return PD_OK;
    peer->probe = NULL;
    return PD_E_PEER;
}

static pd_status start_probe(pd_carrier *carrier, ucx_peer *peer)
{
    pd_status status = probe_next(carrier, peer);
    if (status != PD_OK)
        return status;
    peer->probing = true;
    carrier->watched++;
    return PD_OK;
}

static void probe_end(pd_carrier *carrier, ucx_peer *peer, pd_status status)
{
    char lane[64] = "";
    peer->probing = false;
    carrier->watched--;
    if (status == PD_OK)
        status = check_lanes(carrier, peer, lane, sizeof lane);
    carrier->events->opened(carrier->engine, peer->index, status, lane);
}

static void probe_progress(pd_carrier *carrier, ucx_peer *peer)
{
    while (!peer->failed) {
        ucs_status_t ucs = peer->probe == NULL ? UCS_OK : request_take(&peer->probe);
        if (ucs == UCS_INPROGRESS)
            return;
        if (ucs == UCS_OK && peer->probe_flushing) {
            probe_end(carrier, peer, PD_OK);
            return;
        }
        if (ucs != UCS_OK || probe_next(carrier, peer) != PD_OK)
            peer->failed = true;
    }
    probe_end(carrier, peer, PD_E_PEER);
}

/* far: the peer may well be on another host. */
static pd_status open_socket(pd_carrier *carrier, const ucx_peer *peer, const ucx_address *head,
                             bool far)
{
    static const unsigned char none[PD_NOTICE_SOCKET_NAME_BYTES];
    if (carrier->socket == NULL || memcmp(head->socket, none, sizeof none) == 0)
        return PD_OK;
    pd_status status = pd_notice_socket_open(carrier->socket, peer->index, head->socket);
    if (status == PD_E_PEER && !far)
        pd_log_warn("msg=\"transfer: the peer's socket for notices cannot be reached from here; "
                    "they go through UCX\" peer=%u",
                    peer->index);
    return status == PD_E_PEER ? PD_OK : status;
}

static pd_status open_peer(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                           pd_carrier_pool peer_pool)
{
    ucx_peer *peer = &carrier->peers[index];
    ucx_address head;
    *peer = (ucx_peer){.carrier = carrier,
                       .index = index,
                       .head = {.sender = carrier->incarnation, .link = ++carrier->links_opened}};
    if (read_address(bytes, len, peer_pool, &head) != PD_OK) {
        pd_log_error("msg=\"ucx: a peer's address is malformed\" bytes=%zu", len);
        return PD_E_INVALID;
    }
    if (head.kind != (uint32_t)carrier->pool.kind) {
        pd_log_error("msg=\"transfer: a peer's pool lies in another kind of memory\" peer=%u "
                     "ours=%s",
                     index, pd_memory_kind_name(carrier->pool.kind));
        return PD_E_MISMATCH;
    }
    const unsigned char *pool_bytes = pool_part(bytes, &head);
    pd_ucx_target_init(&peer->target, pool_bytes, peer_pool);
    ucs_status_t ucs = make_endpoint(carrier, peer, bytes, &head);
    if (ucs != UCS_OK) {
        pd_log_error("msg=\"transfer: a peer cannot be reached by the configured transport: %s\" "
                     "peer=%u transport=%s",
                     ucs_status_string(ucs), index, carrier->transport);
        return ucs == UCS_ERR_UNREACHABLE ? PD_E_MISMATCH : PD_E_PEER;
    }
    char lane[64];
    pd_status status = read_lanes(peer->ep, lane, sizeof lane);
    if (status != PD_OK)
        return status;
    /* a GPU's bytes may have a lane of their own beside tcp */
    peer->by_message = pd_lanes_have(lane, "tcp") &&
                       (carrier->pool.kind == PD_MEMORY_HOST || !pd_lanes_have(lane, "cuda_ipc"));
    /* Over tcp no put of UCX's own is used, and the keys must not even be unpacked: there that asks
     * the peer for its endpoint's number, and UCX 1.13 aborts a peer that owes this answer to a
     * process that has died (ucp_request.c:684, "got REP message"). Without it nobody answers
     * anything. */
    status = pd_gpus_use(&carrier->gpus, 0);
    bool mapped = carrier->pool.kind == PD_MEMORY_HOST && !peer->by_message &&
                  pd_ucx_target_map(&peer->target, pool_bytes);
    if (status == PD_OK && !peer->by_message && !mapped)
        status = pd_ucx_target_unpack(&peer->target, peer->ep, pool_bytes);
    if (status == PD_OK && !peer->by_message)
        status = open_socket(carrier, peer, &head,
                             pd_lanes_have_rdma(lane) || pd_lanes_have(lane, "tcp"));
    if (status != PD_OK)
        return status;
    return start_probe(carrier, peer);
}

static void drop_request(void **request)
{
    if (*request != NULL)
        ucp_request_free(*request);
    *request = NULL;
}

static void close_end(pd_carrier *carrier, ucx_peer *peer)
{
    pd_ucx_target_end(&peer->target);
    pd_ucx_stages_abandon(&carrier->stages, peer->index);
    peer->ep = NULL;
    carrier->events->closed(carrier->engine, peer->index);
}

static void close_peer(pd_carrier *carrier, pd_peer index)
{
    ucx_peer *peer = &carrier->peers[index];
    if (peer->probing) {
        peer->probing = false;
        carrier->watched--;
    }
    drop_request(&peer->probe);
    if (carrier->socket != NULL)
        pd_notice_socket_close(carrier->socket, index);
    if (peer->ep == NULL) {
        close_end(carrier, peer);
        return;
    }
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
    };
    void *request = ucp_ep_close_nbx(peer->ep, &param);
    peer->failed = true;
    if (!UCS_PTR_IS_PTR(request)) {
        close_end(carrier, peer);
        return;
    }
    peer->closing = request;
    carrier->watched++;
}

static void close_progress(pd_carrier *carrier, ucx_peer *peer)
{
    if (request_take(&peer->closing) == UCS_INPROGRESS)
        return;
    carrier->watched--;
    close_end(carrier, peer);
}

/* ---- progress ---- */

static bool progress(pd_carrier *carrier)
{
    bool any = ucp_worker_progress(carrier->worker) != 0;
    if (carrier->socket != NULL)
        any |= pd_notice_socket_progress(carrier->socket);
    for (pd_peer i = 0; carrier->watched != 0 && i < carrier->peers_max; i++) {
        ucx_peer *peer = &carrier->peers[i];
        uint32_t before = carrier->watched;
        if (peer->probing)
            probe_progress(carrier, peer);
        else if (peer->closing != NULL)
            close_progress(carrier, peer);
        any |= carrier->watched != before;
    }
    return any;
}

static bool arm(pd_carrier *carrier)
{
    ucs_status_t ucs = ucp_worker_arm(carrier->worker);
    /* another error than "busy" would come again at once: sleep, the engine's cap ends it */
    return ucs != UCS_ERR_BUSY;
}

/* ---- operations ---- */

static pd_status status_of(ucs_status_t ucs)
{
    /* timeout, reset, cancelled: all mean that the peer is gone, and which it is depends on luck */
    return ucs == UCS_OK ? PD_OK : PD_E_PEER;
}

static pd_status started(ucs_status_ptr_t result)
{
    if (result == NULL)
        return PD_OK; /* done, and the callback is not called */
    return UCS_PTR_IS_ERR(result) ? PD_E_PEER : PD_E_AGAIN;
}

/* UCX hands a callback one pointer: the token itself travels in it. Which carrier it was is the
 * thread's, since a carrier has a thread of its own. */
static _Thread_local pd_carrier *thread_carrier;
_Static_assert(sizeof(void *) == sizeof(uint64_t), "a token travels in a pointer");

static void on_put(void *request, ucs_status_t status, void *token)
{
    ucp_request_free(request);
    thread_carrier->events->put_done(thread_carrier->engine, (uintptr_t)token, status_of(status));
}

static void on_staged(void *request, ucs_status_t status, void *context)
{
    pd_ucx_stage *stage = context;
    uint64_t token = stage->token;
    pd_ucx_stage_give(stage);
    on_put(request, status, (void *)(uintptr_t)token);
}

static void on_flush(void *request, ucs_status_t status, void *token)
{
    ucp_request_free(request);
    thread_carrier->events->flush_done(thread_carrier->engine, (uintptr_t)token, status_of(status));
}

static void on_send(void *request, ucs_status_t status, void *token)
{
    ucp_request_free(request);
    thread_carrier->events->send_done(thread_carrier->engine, (uintptr_t)token, status_of(status));
}

/* With 1.13 a message is with the kernel, or in UCX's own buffer, when this returns, or not sent at
 * all: only such a one goes without UCX asking the peer for its endpoint's number first (see
 * open_peer). Later ones are asynchronous: they send nothing longer at once, and can copy the
 * head. */
static pd_status send_message(ucx_peer *peer, unsigned id, const void *head, size_t head_len,
                              const void *bytes, size_t len, ucp_send_nbx_callback_t done,
                              uint64_t token)
{
    enum { COPY_HEADER = 1 << 3 }; /* UCP_AM_SEND_FLAG_COPY_HEADER, where there is one */
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL,
        .flags = UCP_AM_SEND_FLAG_EAGER,
    };
    if (!SENDS_AT_ONCE) {
        param.op_attr_mask =
            UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        param.flags |= COPY_HEADER;
        param.cb.send = done;
        param.user_data = (void *)(uintptr_t)token;
    }
    thread_carrier = peer->carrier;
    ucs_status_ptr_t result = ucp_am_send_nbx(peer->ep, id, head, head_len, bytes, len, &param);
    if (UCS_PTR_IS_ERR(result) && UCS_PTR_STATUS(result) == UCS_ERR_NO_RESOURCE)
        return PD_E_OVERLOAD;
    return started(result);
}

/* UCX has no one-sided put over tcp: it sends a message and has the target answer it, and in 1.13
 * the target's process is ended ("Fatal: unexpected error") when it has to answer a sender that has
 * died. So the bytes go as messages of our own, which nobody answers. They and the notice after
 * them stay in order, since a connection has one tcp lane. */
static pd_status put_by_message(pd_carrier *carrier, ucx_peer *peer, uint64_t source_offset,
                                uint64_t target_offset, uint64_t bytes, uint64_t token)
{
    data_head head = {.from = peer->head, .offset = target_offset};
    uint32_t piece;
    const unsigned char *from = pd_ucx_pool_at(&carrier->pool, source_offset, &piece);
    if (carrier->pool.kind == PD_MEMORY_HOST)
        return send_message(peer, DATA_AM_ID, &head, sizeof head, from, bytes, on_put, token);
    pd_ucx_stage *stage = pd_ucx_stage_take(&carrier->stages, peer->index);
    if (stage == NULL)
        return PD_E_OVERLOAD;
    stage->token = token;
    pd_status status = pd_gpus_copy_out(&carrier->gpus, piece, stage->bytes, from, bytes);
    if (status == PD_OK)
        status = send_message(peer, DATA_AM_ID, &head, sizeof head, stage->bytes, bytes, on_staged,
                              (uintptr_t)stage);
    if (status != PD_E_AGAIN) /* UCX has its own copy, or will not read it */
        pd_ucx_stage_give(stage);
    return status;
}

static pd_status put(pd_carrier *carrier, pd_peer index, uint64_t source_offset,
                     uint64_t target_offset, uint64_t bytes, uint64_t token)
{
    ucx_peer *peer = &carrier->peers[index];
    if (peer->failed)
        return PD_E_PEER;
    thread_carrier = carrier;
    if (peer->by_message)
        return put_by_message(carrier, peer, source_offset, target_offset, bytes, token);
    uint32_t piece;
    const unsigned char *from = pd_ucx_pool_at(&carrier->pool, source_offset, &piece);
    const pd_ucx_target_piece *to = &peer->target.piece[target_offset / peer->target.piece_bytes];
    uint64_t at = target_offset % peer->target.piece_bytes;
    if (to->mapped != NULL) { /* UCX would do the same, with the bytes through the caches */
        pd_copy_out(to->mapped + at, from, bytes);
        return PD_OK;
    }
    pd_status status = pd_gpus_use(&carrier->gpus, piece);
    if (status != PD_OK)
        return status;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .memh = carrier->pool.piece[piece].handle,
        .memory_type = pd_ucx_pool_type(&carrier->pool),
        .cb.send = on_put,
        .user_data = (void *)(uintptr_t)token,
    };
    return started(ucp_put_nbx(peer->ep, from, bytes, to->base + at, to->key, &param));
}

static pd_status flush(pd_carrier *carrier, pd_peer index, uint64_t token)
{
    ucx_peer *peer = &carrier->peers[index];
    if (peer->failed)
        return PD_E_PEER;
    if (peer->by_message && SENDS_AT_ONCE) /* the notice follows the bytes in the same stream */
        return PD_OK;
    if (peer->target.mapped) /* each put was done when it returned */
        return PD_OK;
    thread_carrier = carrier;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_flush,
        .user_data = (void *)(uintptr_t)token,
    };
    return started(ucp_ep_flush_nbx(peer->ep, &param));
}

static pd_status send_by_ucx(ucx_peer *peer, const void *bytes, size_t len, uint64_t token)
{
    thread_carrier = peer->carrier;
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_send,
        .user_data = (void *)(uintptr_t)token,
    };
    return started(ucp_am_send_nbx(peer->ep, NOTICE_AM_ID, &peer->head, sizeof peer->head, bytes,
                                   len, &param));
}

static pd_status send_notice(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                             uint64_t token)
{
    ucx_peer *peer = &carrier->peers[index];
    if (peer->failed)
        return PD_E_PEER;
    if (peer->by_message)
        return send_message(peer, NOTICE_AM_ID, &peer->head, sizeof peer->head, bytes, len, on_send,
                            token);
    if (carrier->socket != NULL && pd_notice_socket_is_open(carrier->socket, index))
        return pd_notice_socket_send(carrier->socket, index, &peer->head, sizeof peer->head, bytes,
                                     len);
    return send_by_ucx(peer, bytes, len, token);
}

static bool written_from_afar(const pd_carrier *carrier)
{
    return strcmp(carrier->transport, "rdma") == 0 ||
           (carrier->gpus.fabric && !by_messages_alone(carrier));
}

const pd_carrier_ops pd_carrier_ucx = {
    .name = "ucx",
    .create = create,
    .destroy = destroy,
    .pool = pool,
    .address = address,
    .fd = fd,
    .progress = progress,
    .arm = arm,
    .open = open_peer,
    .close = close_peer,
    .put = put,
    .flush = flush,
    .send = send_notice,
    .fence = fence,
    .written_from_afar = written_from_afar,
};
