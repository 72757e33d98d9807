/* The UCX carrier: one-sided puts into memory that UCX itself allocated or was given, a flush, and
 * a notice through a socket of our own (notice_socket.h). Where UCX has mapped the peer's pool a
 * put is a copy into it, made here (copy.h), and there is nothing to flush; over tcp, where UCX has
 * no one-sided put, blocks and notices are its eager active messages. Between pools in GPUs' memory
 * puts go by cuda_ipc or not at all. Everything runs on the engine's thread.
 *
 * Notices within a host do not go through UCX: all senders of a receiver share one queue of its
 * there, and a sender killed between taking an entry and filling it leaves that queue stuck for
 * everybody, for ever. Only when the socket cannot be reached (two network namespaces) do they. */

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/carrier.h"
#include "common/transfer/copy.h"
#include "common/transfer/lanes.h"
#include "common/transfer/notice_socket.h"
#include "common/transfer/senders.h"
#include "common/transfer/shared_file.h"
#include "common/transfer/ucx_context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { NOTICE_AM_ID = 1, DATA_AM_ID = 2, PAGE = PD_CARRIER_PAGE };

/* Before the bytes of a put that goes as a message. */
typedef struct data_head {
    pd_link_head from;
    uint64_t offset; /* in the receiver's pool */
} data_head;
_Static_assert(sizeof(data_head) == 24, "goes over the wire");

/* In an address, before UCX's own bytes. */
typedef struct ucx_address {
    uint32_t worker_bytes;
    uint32_t rkey_bytes;
    uint32_t kind; /* pd_memory_kind of the pool */
    uint32_t pad;  /* 0 */
    uint64_t base; /* of the pool, in the peer's address space */
    unsigned char socket[PD_NOTICE_SOCKET_NAME_BYTES]; /* all 0: none, over tcp only */
    pd_shared_file file; /* by which a given pool can be mapped; inode 0: it cannot */
} ucx_address;
_Static_assert(sizeof(ucx_address) == 96, "goes over the wire");

typedef struct ucx_peer {
    pd_carrier *carrier; /* for UCX's callbacks */
    pd_peer index;
    ucp_ep_h ep; /* NULL: not open */
    ucp_rkey_h rkey;
    uint64_t base;
    unsigned char *mapped; /* the peer's pool in our address space, as long as rkey; or NULL */
    uint64_t mapped_bytes; /* not 0: mapped by us, through its file */
    pd_link_head head;     /* of this link */
    bool by_message;       /* over tcp: see put_by_message */
    bool failed;           /* UCX reported an error: no further calls but closing */
    bool probing;          /* open until the first put and its flush are done */
    bool probe_put_ok;     /* its put */
    void *probe_put, *probe_flush; /* requests, or NULL */
    void *closing;                 /* request, or NULL */
} ucx_peer;

struct pd_carrier {
    const pd_carrier_events *events;
    void *engine;
    uint32_t peers_max;
    char transport[8];
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory;
    unsigned char *pool; /* [pool_bytes rounded up to a page] then a page for probes */
    uint64_t pool_bytes;
    bool given; /* the pool: by the owner */
    pd_memory_kind pool_kind;
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

static uint64_t probe_offset(uint64_t pool_bytes)
{
    return (pool_bytes + PAGE - 1) / PAGE * PAGE;
}

static void unmap_pool(ucx_peer *peer)
{
    if (peer->mapped_bytes != 0)
        munmap(peer->mapped, peer->mapped_bytes);
    peer->mapped = NULL;
    peer->mapped_bytes = 0;
}

/* ---- create ---- */

/* head: its first head_len bytes; data: what follows. NULL: not all of it is here. */
static void take_notice(pd_carrier *carrier, const void *head_bytes, size_t head_len,
                        const void *data, size_t len)
{
    pd_link_head head = {0};
    if (head_len == sizeof head)
        memcpy(&head, head_bytes, sizeof head);
    if (pd_senders_is_old(&carrier->senders, &head)) {
        pd_senders_dropped(&carrier->senders, &head, len);
        return;
    }
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
        len > carrier->pool_bytes || head.offset > carrier->pool_bytes - len) {
        pd_log_warn("msg=\"transfer: dropped bytes that are not for this pool\" bytes=%zu", len);
        return UCS_OK;
    }
    if (pd_senders_is_fenced(&carrier->senders, head.from.sender) ||
        pd_senders_is_old(&carrier->senders, &head.from)) {
        pd_senders_dropped(&carrier->senders, &head.from, len);
        return UCS_OK;
    }
    memcpy(carrier->pool + head.offset, data, len);
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

/* UCX takes ordinary memory when it gets none that can be shared, and says nothing. */
static bool is_shared_memory(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    if (maps == NULL)
        return false;
    char line[512];
    bool shared = false;
    while (!shared && fgets(line, sizeof line, maps) != NULL) {
        unsigned long long start, end;
        char mode[5];
        if (sscanf(line, "%llx-%llx %4s", &start, &end, mode) == 3 && (uintptr_t)address >= start &&
            (uintptr_t)address < end)
            shared = mode[3] == 's';
    }
    fclose(maps);
    return shared;
}

static ucs_memory_type_t memory_type(const pd_carrier *carrier)
{
    return carrier->pool_kind == PD_MEMORY_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

/* A pool from outside that is shared memory: peers map it by its file. */
static pd_shared_file file_of_pool(const pd_carrier *carrier)
{
    pd_shared_file file = {0};
    bool host = carrier->given && carrier->pool_kind == PD_MEMORY_HOST;

    if (host && strcmp(carrier->transport, "tcp") != 0 &&
        pd_shared_file_of(carrier->pool, carrier->pool_bytes, &file) != PD_OK)
        pd_log_warn("msg=\"transfer: the KV pool is no shared memory that peers could map: "
                    "transfers within this host are slow\" pool_bytes=%llu",
                    (unsigned long long)carrier->pool_bytes);
    return file;
}

static pd_status register_pool(pd_carrier *carrier, const pd_transfer_options *options)
{
    carrier->given = true;
    carrier->pool = options->piece_memory[0];
    carrier->pool_bytes = options->pool_bytes;
    carrier->pool_kind = options->pool_kind;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = carrier->pool,
        .length = pd_transfer_pool_room(options->pool_bytes),
        .memory_type = memory_type(carrier),
    };
    ucs_status_t ucs = ucp_mem_map(carrier->context, &params, &carrier->memory);
    if (ucs == UCS_OK)
        return PD_OK;
    carrier->memory = NULL;
    pd_log_error("msg=\"transfer: the KV pool cannot be registered with UCX: %s\" kind=%s "
                 "pool_bytes=%llu",
                 ucs_status_string(ucs), pd_memory_kind_name(options->pool_kind),
                 (unsigned long long)options->pool_bytes);
    return PD_E_UNSUPPORTED;
}

static pd_status allocate_pool(pd_carrier *carrier, uint64_t pool_bytes)
{
    uint64_t bytes = pd_transfer_pool_room(pool_bytes);
    uint64_t machine_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    ucs_status_t ucs = UCS_ERR_NO_MEMORY;
    /* the kernel would promise more than there is, and end the process when it is used */
    if (pool_bytes <= machine_bytes) {
        ucp_mem_map_params_t params = {
            .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
            .length = bytes,
            .flags = UCP_MEM_MAP_ALLOCATE,
        };
        ucs = ucp_mem_map(carrier->context, &params, &carrier->memory);
    }
    if (ucs != UCS_OK) {
        carrier->memory = NULL;
        pd_log_error("msg=\"transfer: no memory for the KV pool: %s\" pool_bytes=%llu "
                     "machine_bytes=%llu",
                     ucs_status_string(ucs), (unsigned long long)pool_bytes,
                     (unsigned long long)machine_bytes);
        return PD_E_NOMEM;
    }
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};
    ucs = ucp_mem_query(carrier->memory, &attr);
    if (ucs != UCS_OK || attr.length < bytes || (uintptr_t)attr.address % PAGE != 0) {
        pd_log_error("msg=\"ucx: the pool it made is not as asked for: %s\" length=%zu",
                     ucs_status_string(ucs), attr.length);
        return PD_E_INTERNAL;
    }
    carrier->pool = attr.address;
    carrier->pool_bytes = pool_bytes;
    bool shared = is_shared_memory(carrier->pool);
    if (!shared) /* new pages of a shared segment are zero; UCX's heap may hand out used ones */
        memset(carrier->pool, 0, bytes);
    if (!shared && strcmp(carrier->transport, "tcp") != 0)
        pd_log_warn("msg=\"transfer: the KV pool is not in shared memory, transfers within this "
                    "host will be slower: raise kernel.shmmax or /dev/shm\" pool_bytes=%llu",
                    (unsigned long long)pool_bytes);
    return PD_OK;
}

static pd_status init_address(pd_carrier *carrier)
{
    ucp_address_t *worker = NULL;
    void *rkey = NULL;
    size_t worker_bytes = 0, rkey_bytes = 0;
    ucs_status_t ucs = ucp_worker_get_address(carrier->worker, &worker, &worker_bytes);
    if (ucs == UCS_OK)
        ucs = ucp_rkey_pack(carrier->context, carrier->memory, &rkey, &rkey_bytes);
    size_t room = sizeof carrier->address - sizeof(ucx_address);
    pd_status status = PD_OK;
    if (ucs != UCS_OK || worker_bytes > room || rkey_bytes > room - worker_bytes) {
        pd_log_error("msg=\"ucx: no address: %s\" worker_bytes=%zu rkey_bytes=%zu",
                     ucs_status_string(ucs), worker_bytes, rkey_bytes);
        status = PD_E_UNSUPPORTED;
    } else {
        ucx_address head = {
            .worker_bytes = (uint32_t)worker_bytes,
            .rkey_bytes = (uint32_t)rkey_bytes,
            .kind = (uint32_t)carrier->pool_kind,
            .base = (uintptr_t)carrier->pool,
            .file = file_of_pool(carrier),
        };
        if (carrier->socket != NULL)
            memcpy(head.socket, pd_notice_socket_name(carrier->socket), sizeof head.socket);
        memcpy(carrier->address, &head, sizeof head);
        memcpy(carrier->address + sizeof head, worker, worker_bytes);
        memcpy(carrier->address + sizeof head + worker_bytes, rkey, rkey_bytes);
        carrier->address_bytes = sizeof head + worker_bytes + rkey_bytes;
    }
    if (rkey != NULL)
        ucp_rkey_buffer_release(rkey);
    if (worker != NULL)
        ucp_worker_release_address(carrier->worker, worker);
    return status;
}

static void destroy(pd_carrier *carrier)
{
    if (carrier == NULL)
        return;
    for (pd_peer i = 0; carrier->peers != NULL && i < carrier->peers_max; i++) {
        if (carrier->peers[i].rkey != NULL && carrier->peers[i].ep == NULL)
            ucp_rkey_destroy(carrier->peers[i].rkey);
        unmap_pool(&carrier->peers[i]);
    }
    pd_notice_socket_destroy(carrier->socket);
    if (carrier->epoll_fd >= 0)
        close(carrier->epoll_fd);
    if (carrier->worker != NULL)
        ucp_worker_destroy(carrier->worker);
    if (carrier->memory != NULL)
        ucp_mem_unmap(carrier->context, carrier->memory);
    if (carrier->context != NULL)
        ucp_cleanup(carrier->context);
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

static pd_status create(const pd_transfer_options *options, const pd_carrier_events *events,
                        void *engine, pd_carrier **carrier_out)
{
    if (options->pieces > 1) {
        pd_log_error("msg=\"transfer: ucx carries a pool in one piece only\" pieces=%u",
                     options->pieces);
        return PD_E_UNSUPPORTED;
    }
    pd_carrier *carrier = pd_calloc(1, sizeof *carrier);
    if (carrier == NULL)
        return PD_E_NOMEM;
    carrier->events = events;
    carrier->engine = engine;
    carrier->peers_max = options->peers_max;
    carrier->incarnation = options->incarnation;
    carrier->epoll_fd = -1;
    strncpy(carrier->transport, options->transport, sizeof carrier->transport - 1);
    carrier->peers = pd_calloc(options->peers_max, sizeof *carrier->peers);
    pd_status status = carrier->peers == NULL ? PD_E_NOMEM : PD_OK;
    if (status == PD_OK)
        status = pd_ucx_context_create(options, &carrier->context);
    if (status == PD_OK)
        status = init_worker(carrier);
    if (status == PD_OK && strcmp(carrier->transport, "tcp") != 0)
        status = init_socket(carrier);
    if (status == PD_OK)
        status = options->piece_memory != NULL ? register_pool(carrier, options)
                                               : allocate_pool(carrier, options->pool_bytes);
    if (status == PD_OK)
        status = init_address(carrier);
    if (status != PD_OK) {
        destroy(carrier);
        return status;
    }
    pd_log_debug("msg=\"ucx ready\" version=%s transport=%s pool_bytes=%llu",
                 ucp_get_version_string(), carrier->transport,
                 (unsigned long long)options->pool_bytes);
    *carrier_out = carrier;
    return PD_OK;
}

static void *pool(const pd_carrier *carrier)
{
    return carrier->pool;
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

/* Is the connection made of what was asked for? */
static pd_status check_lanes(pd_carrier *carrier, ucx_peer *peer, char *lane, size_t size)
{
    pd_status status = read_lanes(peer->ep, lane, size);
    if (status != PD_OK) {
        pd_log_error("msg=\"ucx: cannot tell what carries a connection\" peer=%u", peer->index);
        return status;
    }
    bool has_tcp = strstr(lane, "tcp") != NULL;
    bool want_shm = strcmp(carrier->transport, "shm") == 0;
    bool want_tcp = strcmp(carrier->transport, "tcp") == 0;
    if ((want_shm && has_tcp) || (want_tcp && strcmp(lane, "tcp") != 0)) {
        pd_log_error("msg=\"transfer: the connection uses other lanes than configured\" peer=%u "
                     "transport=%s lanes=%s",
                     peer->index, carrier->transport, lane);
        return PD_E_MISMATCH;
    }
    void *mapped = NULL;
    if (carrier->pool_kind == PD_MEMORY_CUDA) {
        if (strstr(lane, "cuda_ipc") != NULL)
            return PD_OK;
        pd_log_error("msg=\"transfer: no cuda_ipc between this GPU's memory and the peer's\" "
                     "peer=%u lanes=%s",
                     peer->index, lane);
        return PD_E_UNSUPPORTED;
    }
    if (has_tcp || peer->mapped != NULL)
        return PD_OK;
    if (ucp_rkey_ptr(peer->rkey, peer->base, &mapped) == UCS_OK)
        peer->mapped = mapped;
    else
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

static pd_status read_address(const void *bytes, size_t len, ucx_address *head_out)
{
    if (len < sizeof *head_out)
        return PD_E_INVALID;
    memcpy(head_out, bytes, sizeof *head_out);
    size_t rest = len - sizeof *head_out;
    if (head_out->worker_bytes == 0 || head_out->worker_bytes > rest ||
        head_out->rkey_bytes != rest - head_out->worker_bytes)
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

/* Over tcp no put of UCX's own is used, and the key must not even be unpacked: there that asks the
 * peer for its endpoint's number, and UCX 1.13 aborts a peer that owes this answer to a process
 * that has died (ucp_request.c:684, "got REP message"). Without it nobody answers anything. */
static pd_status unpack_key(ucx_peer *peer, const void *bytes, const ucx_address *head)
{
    const unsigned char *worker = (const unsigned char *)bytes + sizeof *head;
    ucs_status_t ucs = ucp_ep_rkey_unpack(peer->ep, worker + head->worker_bytes, &peer->rkey);
    if (ucs == UCS_OK)
        return PD_OK;
    peer->rkey = NULL;
    pd_log_error("msg=\"transfer: a peer's key to its pool cannot be used: %s\" peer=%u",
                 ucs_status_string(ucs), peer->index);
    return PD_E_PEER;
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

/* A connection counts as made when a first put was written over there: creating an endpoint alone
 * says nothing. Its place is the page behind the peer's pool. A pool that was mapped by its file
 * was found at the peer's process, and the peer's socket answered. */
static pd_status start_probe(pd_carrier *carrier, ucx_peer *peer, uint64_t peer_pool_bytes)
{
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .memh = carrier->memory,
        .memory_type = memory_type(carrier),
    };
    void *put = NULL; /* over tcp a flush alone waits until the socket is connected */
    if (!peer->by_message && peer->mapped == NULL)
        put = ucp_put_nbx(peer->ep, carrier->pool + probe_offset(carrier->pool_bytes), 8,
                          peer->base + probe_offset(peer_pool_bytes), peer->rkey, &param);
    if (UCS_PTR_IS_ERR(put))
        return PD_E_PEER;
    peer->probe_put = put;
    peer->probe_put_ok = put == NULL;
    param.op_attr_mask = 0;
    void *flush = ucp_ep_flush_nbx(peer->ep, &param);
    if (UCS_PTR_IS_ERR(flush))
        return PD_E_PEER;
    peer->probe_flush = flush;
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
    if (peer->probe_put != NULL) {
        ucs_status_t ucs = request_take(&peer->probe_put);
        if (ucs == UCS_OK)
            peer->probe_put_ok = true;
        else if (ucs != UCS_INPROGRESS)
            peer->failed = true;
    }
    if (peer->probe_flush != NULL) {
        ucs_status_t ucs = request_take(&peer->probe_flush);
        if (ucs != UCS_OK && ucs != UCS_INPROGRESS)
            peer->failed = true;
    }
    if (peer->failed)
        probe_end(carrier, peer, PD_E_PEER);
    else if (peer->probe_put_ok && peer->probe_flush == NULL)
        probe_end(carrier, peer, PD_OK);
}

static pd_status open_socket(pd_carrier *carrier, const ucx_peer *peer, const ucx_address *head)
{
    static const unsigned char none[PD_NOTICE_SOCKET_NAME_BYTES];
    if (carrier->socket == NULL || memcmp(head->socket, none, sizeof none) == 0)
        return PD_OK;
    pd_status status = pd_notice_socket_open(carrier->socket, peer->index, head->socket);
    if (status == PD_E_PEER)
        pd_log_warn("msg=\"transfer: the peer's socket for notices cannot be reached from here; "
                    "they go through UCX\" peer=%u",
                    peer->index);
    return status == PD_E_PEER ? PD_OK : status;
}

static bool map_pool(ucx_peer *peer, const ucx_address *head, uint64_t peer_pool_bytes)
{
    void *memory;
    if (head->file.inode == 0 || head->kind != PD_MEMORY_HOST ||
        pd_shared_file_map(&head->file, peer_pool_bytes, &memory) != PD_OK)
        return false;
    peer->mapped = memory;
    peer->mapped_bytes = peer_pool_bytes;
    return true;
}

static pd_status open_peer(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                           pd_carrier_pool peer_pool)
{
    ucx_peer *peer = &carrier->peers[index];
    ucx_address head;
    *peer = (ucx_peer){.carrier = carrier,
                       .index = index,
                       .head = {.sender = carrier->incarnation, .link = ++carrier->links_opened}};
    if (read_address(bytes, len, &head) != PD_OK) {
        pd_log_error("msg=\"ucx: a peer's address is malformed\" bytes=%zu", len);
        return PD_E_INVALID;
    }
    if (head.kind != (uint32_t)carrier->pool_kind) {
        pd_log_error("msg=\"transfer: a peer's pool lies in another kind of memory\" peer=%u "
                     "ours=%s",
                     index, pd_memory_kind_name(carrier->pool_kind));
        return PD_E_MISMATCH;
    }
    peer->base = head.base;
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
    peer->by_message = strstr(lane, "tcp") != NULL;
    if (!peer->by_message && !map_pool(peer, &head, peer_pool.bytes))
        status = unpack_key(peer, bytes, &head);
    if (status == PD_OK && !peer->by_message)
        status = open_socket(carrier, peer, &head);
    if (status != PD_OK)
        return status;
    return start_probe(carrier, peer, peer_pool.bytes);
}

static void drop_request(void **request)
{
    if (*request != NULL)
        ucp_request_free(*request);
    *request = NULL;
}

static void close_end(pd_carrier *carrier, ucx_peer *peer)
{
    if (peer->rkey != NULL)
        ucp_rkey_destroy(peer->rkey);
    peer->rkey = NULL;
    unmap_pool(peer);
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
    drop_request(&peer->probe_put);
    drop_request(&peer->probe_flush);
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
 * unpack_key). Later ones are asynchronous: they send nothing longer at once, and can copy the
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
    return send_message(peer, DATA_AM_ID, &head, sizeof head, carrier->pool + source_offset, bytes,
                        on_put, token);
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
    if (peer->mapped != NULL) { /* UCX would do the same, with the bytes through the caches */
        pd_copy_out(peer->mapped + target_offset, carrier->pool + source_offset, bytes);
        return PD_OK;
    }
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .memh = carrier->memory,
        .memory_type = memory_type(carrier),
        .cb.send = on_put,
        .user_data = (void *)(uintptr_t)token,
    };
    return started(ucp_put_nbx(peer->ep, carrier->pool + source_offset, bytes,
                               peer->base + target_offset, peer->rkey, &param));
}

static pd_status flush(pd_carrier *carrier, pd_peer index, uint64_t token)
{
    ucx_peer *peer = &carrier->peers[index];
    if (peer->failed)
        return PD_E_PEER;
    if (peer->by_message && SENDS_AT_ONCE) /* the notice follows the bytes in the same stream */
        return PD_OK;
    if (peer->mapped != NULL) /* each put was done when it returned */
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
};
