/* The NCCL carrier: bytes go between GPUs' pools by ncclSend and ncclRecv of a communicator of two
 * ranks a link; words about them, and notices, go by a carrier of messages below (UCX).
 *
 * How links begin and end stands in nccl_life.h, what a batch is and in which order they run in
 * nccl_batch.h, communicators are nccl_comm.h's and words nccl_words.h's. Here: what the base
 * tells, progress, and what the engine asks for.
 *
 * Everything runs on the engine's thread, calls into NCCL included. docs/decisions/nccl.md. */

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/transfer/nccl_batch.h"
#include "common/transfer/nccl_life.h"
#include "common/transfer/nccl_words.h"

#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define STALL_MS_DEFAULT 5000
#define DESTROY_NS       (500 * PD_NS_PER_MS)
/* A turn that took this long means that we were not running, and the other end may be innocent. */
#define OWN_STALL_NS (500 * PD_NS_PER_MS)

/* ---- what comes ---- */

static void take_notice(pd_carrier *carrier, const word_head *head, const void *bytes, size_t len)
{
    if (pd_nccl_link_find(carrier, head->link, true) == NULL) {
        pd_link_head from = {.link = head->link};
        pd_senders_dropped(&carrier->senders, &from, len);
        return;
    }
    carrier->events->received(carrier->engine, (const unsigned char *)bytes + sizeof *head,
                              len - sizeof *head);
}

/* Of a link that is up, or was. */
static void take_word(pd_carrier *carrier, const word_head *head, const void *bytes, size_t len,
                      bool to_receiver)
{
    nccl_link *link = pd_nccl_link_find(carrier, head->link, to_receiver);
    bool of_batch = head->kind == WORD_GO || head->kind == WORD_LANDED ||
                    head->kind == WORD_LAUNCH || head->kind == WORD_WAITS;
    if (link == NULL || (of_batch && head->batch != link->batch))
        return; /* of what has ended */
    switch ((word_kind)head->kind) {
    case WORD_WELCOME:
        if (link->state == LINK_GREETING) {
            link->state = LINK_UP;
            carrier->events->opened(carrier->engine, pd_nccl_index(carrier, link), PD_OK, "nccl");
        }
        break;
    case WORD_ANNOUNCE: pd_nccl_take_announce(carrier, link, bytes, len); break;
    case WORD_GO: pd_nccl_take_go(carrier, link, bytes, len); break;
    case WORD_LAUNCH: pd_nccl_take_launch(link); break;
    case WORD_WAITS: pd_nccl_take_waits(link); break;
    case WORD_LANDED: pd_nccl_take_landed(carrier, link); break;
    case WORD_FAIL: pd_nccl_take_fail(link); break;
    case WORD_BYE_OK: pd_nccl_take_bye_ok(link); break;
    case WORD_HELLO:
    case WORD_BYE:
    case WORD_NOTICE: break;
    }
}

/* From within the base: changes states, calls nothing of the base. */
static void on_received(void *ctx, const void *bytes, size_t len)
{
    pd_carrier *carrier = ctx;
    word_head head;
    if (len < sizeof head)
        return;
    memcpy(&head, bytes, sizeof head);
    switch ((word_kind)head.kind) {
    case WORD_NOTICE: take_notice(carrier, &head, bytes, len); break;
    case WORD_HELLO: pd_nccl_take_hello(carrier, bytes, len); break;
    case WORD_BYE: pd_nccl_take_bye(carrier, bytes, len); break;
    case WORD_ANNOUNCE:
    case WORD_LAUNCH: take_word(carrier, &head, bytes, len, true); break;
    case WORD_WAITS: /* goes both ways; a link has one direction, and its id is its own */
        take_word(carrier, &head, bytes, len, true);
        take_word(carrier, &head, bytes, len, false);
        break;
    case WORD_WELCOME:
    case WORD_GO:
    case WORD_LANDED:
    case WORD_FAIL:
    case WORD_BYE_OK: take_word(carrier, &head, bytes, len, false); break;
    }
}

static void on_opened(void *ctx, pd_peer index, pd_status status, const char *lane)
{
    pd_carrier *carrier = ctx;
    nccl_link *link = &carrier->links[index];
    (void)lane;
    if (link->base != BASE_OPENING)
        return;
    link->base = status == PD_OK ? BASE_OPEN : BASE_BROKEN;
    if (link->state != LINK_OPENING)
        return; /* opened again, to end it */
    if (status == PD_OK) {
        link->state = link->in ? LINK_UP : LINK_GREETING;
        if (link->in && !link->bye)
            pd_nccl_say_kind(link, WORD_WELCOME);
    } else if (!link->in) {
        link->broken = link->told = true;
        carrier->events->opened(carrier->engine, index, status, "");
    }
}

static void on_broken(void *ctx, pd_peer index)
{
    pd_carrier *carrier = ctx;
    nccl_link *link = &carrier->links[index];
    if (link->base == BASE_OPENING || link->base == BASE_OPEN)
        link->base = BASE_BROKEN;
}

static void on_closed(void *ctx, pd_peer index)
{
    pd_carrier *carrier = ctx;
    carrier->links[index].base = BASE_CLOSED;
}

static void on_send_done(void *ctx, uint64_t token, pd_status status)
{
    pd_carrier *carrier = ctx;
    word *w = (word *)(uintptr_t)token;
    if (w->notice)
        carrier->events->send_done(carrier->engine, w->token, status);
    pd_nccl_posted_remove(carrier, w);
}

static void on_nothing(void *ctx, uint64_t token, pd_status status)
{
    (void)ctx, (void)token, (void)status;
    pd_assert(false); /* the base is asked for no put and no flush */
}

static const pd_carrier_events base_events = {
    .put_done = on_nothing,
    .flush_done = on_nothing,
    .send_done = on_send_done,
    .opened = on_opened,
    .broken = on_broken,
    .closed = on_closed,
    .received = on_received,
};

/* ---- progress ---- */

static bool open_wanted(pd_carrier *carrier, nccl_link *link)
{
    if (link->broken) { /* fenced off meanwhile */
        link->state = LINK_FREE;
        return true;
    }
    link->state = LINK_OPENING;
    pd_nccl_link_open(carrier, link); /* where it fails, the next progress sees it */
    return true;
}

static bool link_closed(pd_carrier *carrier, nccl_link *link)
{
    if (link->base != BASE_CLOSED)
        return false;
    link->state = LINK_FREE;
    if (!link->in && !link->silent)
        carrier->events->closed(carrier->engine, pd_nccl_index(carrier, link));
    return true;
}

static bool link_progress(pd_carrier *carrier, nccl_link *link)
{
    switch (link->state) {
    case LINK_FREE: return false;
    case LINK_WANTED: return open_wanted(carrier, link);
    case LINK_ENDING: return link_closed(carrier, link);
    case LINK_PARTING: return pd_nccl_part_progress(carrier, link);
    case LINK_OPENING:
    case LINK_GREETING:
    case LINK_UP: break;
    }
    if (link->base == BASE_BROKEN)
        link->broken = true;
    if (link->broken) {
        if (!link->in && link->told)
            return false; /* it is closed from above */
        pd_nccl_link_fail(carrier, link);
        return true;
    }
    bool any = false;
    if (link->state == LINK_GREETING)
        any = pd_nccl_greet(carrier, link);
    if (link->state == LINK_UP && link->in && link->bye) {
        pd_nccl_link_part(carrier, link);
        return true;
    }
    if (link->state == LINK_UP)
        any = pd_nccl_batch_progress(carrier, link);
    return pd_nccl_words_post(carrier, link) || any;
}

/* While this process stood still nobody was late. */
static void take_time(pd_carrier *carrier)
{
    uint64_t now_ns = pd_clock_now_ns(), gap_ns = now_ns - carrier->progress_ns;
    if (carrier->progress_ns != 0 && gap_ns > OWN_STALL_NS && carrier->active != NULL)
        carrier->active->since_ns += gap_ns;
    carrier->progress_ns = now_ns;
}

static bool progress(pd_carrier *carrier)
{
    uint64_t expired;
    if (carrier->timer_set && read(carrier->timer_fd, &expired, sizeof expired) > 0)
        carrier->timer_set = false;
    take_time(carrier);
    bool any = pd_carrier_ucx.progress(carrier->base);
    any |= pd_nccl_active_progress(carrier);
    for (uint32_t i = 0; i < carrier->links_max; i++)
        any |= link_progress(carrier, &carrier->links[i]);
    return any;
}

static bool arm(pd_carrier *carrier)
{
    if (!pd_carrier_ucx.arm(carrier->base))
        return false;
    const nccl_link *link = carrier->active;
    bool polled = link != NULL && link->batch_state >= BATCH_INIT;
    if (polled && !carrier->timer_set) {
        struct itimerspec once = {.it_value.tv_nsec = POLL_NS};
        carrier->timer_set = timerfd_settime(carrier->timer_fd, 0, &once, NULL) == 0;
    }
    return true;
}

/* ---- operations ---- */

static pd_status open_peer(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                           pd_carrier_pool peer_pool)
{
    nccl_link *link = &carrier->links[index];
    nccl_address head;
    (void)peer_pool;
    if (len < sizeof head) {
        pd_log_error("msg=\"transfer: a peer's address is malformed\" bytes=%zu", len);
        return PD_E_INVALID;
    }
    memcpy(&head, bytes, sizeof head);
    if (head.base_bytes != len - sizeof head || head.base_bytes > BASE_ADDRESS_MAX ||
        head.id == carrier->id) {
        pd_log_error("msg=\"transfer: a peer's address is malformed, or our own\" bytes=%zu", len);
        return PD_E_INVALID;
    }
    if (head.version != (uint32_t)carrier->library->version) {
        pd_log_error("msg=\"transfer: a peer has another version of NCCL\" ours=%d theirs=%u",
                     carrier->library->version, head.version);
        return PD_E_MISMATCH;
    }
    if (link->state == LINK_PARTING) { /* the engine has given up waiting for its end */
        link->silent = true;
        pd_nccl_link_end(carrier, link);
    }
    if (link->state == LINK_ENDING && link->base == BASE_CLOSED)
        link->state = LINK_FREE;
    if (link->state != LINK_FREE) {
        pd_log_warn("msg=\"transfer: the last connection of this place does not end\" peer=%u",
                    index);
        return PD_E_OVERLOAD;
    }
    uint64_t incarnation = link->incarnation; /* our own */
    *link = (nccl_link){
        .state = LINK_OPENING,
        .id = pd_random_id(),
        .peer_id = head.id,
        .process = head.process,
        .seen = pd_nccl_is_seen(carrier, &head.process),
        .incarnation = incarnation,
        .address_bytes = head.base_bytes,
    };
    memcpy(link->address, (const unsigned char *)bytes + sizeof head, head.base_bytes);
    pd_status status = pd_nccl_link_open(carrier, link);
    link->told = link->broken = status != PD_OK; /* told by our return */
    return status;
}

/* `closed` waits for the receiver's word that it holds no receive of this link, or for the end of
 * its process; for ever, if neither comes, and the engine gives it up. */
static void close_peer(pd_carrier *carrier, pd_peer index)
{
    nccl_link *link = &carrier->links[index];
    if (link->state == LINK_FREE || link->state == LINK_ENDING) { /* it was not opened */
        link->silent = link->state == LINK_ENDING;
        carrier->events->closed(carrier->engine, index);
        return;
    }
    link->gone |= !link->exposed;
    if (link->greeted)
        pd_nccl_link_part(carrier, link);
    else
        pd_nccl_link_end(carrier, link);
}

static pd_status put(pd_carrier *carrier, pd_peer index, uint64_t source_offset,
                     uint64_t target_offset, uint64_t bytes, uint64_t token)
{
    nccl_link *link = &carrier->links[index];
    if (link->broken || link->state != LINK_UP)
        return PD_E_PEER;
    if (link->next_count == RUNS_MAX)
        return PD_E_OVERLOAD;
    uint32_t at = link->next_count++;
    link->next_runs[at] = (run){.offset = target_offset, .bytes = bytes};
    link->next_from[at] = source_offset;
    link->next_tokens[at] = token;
    return PD_E_AGAIN;
}

/* A put is done when it has landed, so there is nothing to flush. */
static pd_status flush(pd_carrier *carrier, pd_peer index, uint64_t token)
{
    (void)token;
    return carrier->links[index].broken ? PD_E_PEER : PD_OK;
}

static pd_status send_notice(pd_carrier *carrier, pd_peer index, const void *bytes, size_t len,
                             uint64_t token)
{
    nccl_link *link = &carrier->links[index];
    word_head head = {.kind = WORD_NOTICE, .link = link->id};
    word *w;
    if (link->broken || link->state != LINK_UP)
        return PD_E_PEER;
    if (link->words_count >= WORDS_MAX)
        return PD_E_OVERLOAD;
    pd_status status = pd_nccl_say_bytes(link, &head, sizeof head, bytes, len, &w);
    if (status != PD_OK)
        return status;
    w->notice = true;
    w->token = token;
    return PD_E_AGAIN;
}

static void fence(pd_carrier *carrier, uint64_t incarnation)
{
    pd_senders_fence(&carrier->senders, incarnation);
    for (uint32_t i = carrier->peers_max; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->incarnation != incarnation || link->state == LINK_FREE ||
            link->state == LINK_ENDING)
            continue;
        pd_nccl_link_stop(carrier, link);
        link->broken |= !link->bye; /* one that says goodbye is answered all the same */
    }
    pd_carrier_ucx.fence(carrier->base, incarnation);
}

/* ---- create ---- */

static pd_status init_device(pd_carrier *carrier)
{
    const pd_nccl_library *l = carrier->library;
    int result = l->cuda_init(0);
    const char *what = "cuInit";
    if (result == PD_CU_SUCCESS) {
        what = "the pool's device";
        result = l->cuda_pointer_attribute(&carrier->device, PD_CU_POINTER_DEVICE_ORDINAL,
                                           (uintptr_t)carrier->pool);
    }
    if (result == PD_CU_SUCCESS) {
        what = "its context";
        result = l->cuda_context_retain(&carrier->context, carrier->device);
        if (result != PD_CU_SUCCESS)
            carrier->context = NULL;
    }
    if (result == PD_CU_SUCCESS)
        result = l->cuda_context_set(carrier->context);
    if (result == PD_CU_SUCCESS) {
        what = "a stream";
        result = l->cuda_stream_create(&carrier->stream, PD_CU_STREAM_NON_BLOCKING);
    }
    if (result == PD_CU_SUCCESS)
        return PD_OK;
    pd_log_error("msg=\"transfer: nccl cannot use this device: no %s\" cuda_error=%d", what,
                 result);
    return PD_E_UNSUPPORTED;
}

static pd_status init_base(pd_carrier *carrier, const pd_transfer_options *options)
{
    pd_transfer_options base = *options;
    base.piece_memory = NULL;
    base.pool_kind = PD_MEMORY_HOST;
    base.pool_bytes = PD_CARRIER_PAGE;
    base.peers_max = carrier->links_max;
    /* Between two processes there may be a link and the way back of another one, side by side; the
     * base would believe the newer alone, and what came late is told apart here by its link. */
    base.incarnation = 0;
    pd_status status = pd_carrier_ucx.create(&base, &base_events, carrier, &carrier->base);
    if (status != PD_OK)
        return status;
    size_t bytes;
    const void *base_address = pd_carrier_ucx.address(carrier->base, &bytes);
    if (bytes > BASE_ADDRESS_MAX) {
        pd_log_error("msg=\"transfer: the address for messages is too long\" bytes=%zu", bytes);
        return PD_E_UNSUPPORTED;
    }
    nccl_address head = {.id = carrier->id,
                         .process = carrier->process,
                         .version = (uint32_t)carrier->library->version,
                         .base_bytes = (uint32_t)bytes};
    memcpy(carrier->address, &head, sizeof head);
    memcpy(carrier->address + sizeof head, base_address, bytes);
    carrier->address_bytes = sizeof head + bytes;
    return PD_OK;
}

static pd_status init_wait(pd_carrier *carrier)
{
    struct epoll_event event = {.events = EPOLLIN};
    carrier->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    carrier->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (carrier->epoll_fd >= 0 && carrier->timer_fd >= 0 &&
        epoll_ctl(carrier->epoll_fd, EPOLL_CTL_ADD, carrier->timer_fd, &event) == 0 &&
        epoll_ctl(carrier->epoll_fd, EPOLL_CTL_ADD, pd_carrier_ucx.fd(carrier->base), &event) == 0)
        return PD_OK;
    pd_log_error("msg=\"transfer: epoll failed: %m\"");
    return PD_E_IO;
}

/* Closes what the engine does not know of: links that others opened. What the base does not close
 * in time it frees as it can. */
static void links_end(pd_carrier *carrier)
{
    uint64_t end_ns = pd_clock_now_ns() + DESTROY_NS;
    for (uint32_t i = 0; i < carrier->links_max; i++) {
        nccl_link *link = &carrier->links[i];
        if (link->state == LINK_FREE || link->state == LINK_WANTED)
            continue;
        if (link->in && link->state == LINK_UP) { /* once, and then our end tells it */
            pd_nccl_link_part(carrier, link);
            pd_nccl_part_progress(carrier, link);
        }
        if (link->state != LINK_ENDING)
            pd_nccl_link_end(carrier, link);
    }
    for (uint32_t i = 0; i < carrier->links_max && pd_clock_now_ns() < end_ns;) {
        if (carrier->links[i].base != BASE_CLOSING)
            i++;
        else if (!pd_carrier_ucx.progress(carrier->base))
            usleep(200);
    }
}

static void destroy(pd_carrier *carrier)
{
    if (carrier == NULL)
        return;
    if (carrier->base != NULL) {
        links_end(carrier);
        pd_carrier_ucx.destroy(carrier->base);
    }
    while (carrier->posted != NULL) {
        word *next = carrier->posted->next;
        pd_free(carrier->posted);
        carrier->posted = next;
    }
    if (carrier->stream != NULL)
        carrier->library->cuda_stream_destroy(carrier->stream);
    if (carrier->context != NULL) {
        carrier->library->cuda_context_set(NULL);
        carrier->library->cuda_context_release(carrier->device);
    }
    if (carrier->epoll_fd >= 0)
        close(carrier->epoll_fd);
    if (carrier->timer_fd >= 0)
        close(carrier->timer_fd);
    pd_free(carrier->links);
    pd_free(carrier);
}

static pd_status create(const pd_transfer_options *options, const pd_carrier_events *events,
                        void *engine, pd_carrier **carrier_out)
{
    const pd_nccl_library *library;
    if (options->pool_kind != PD_MEMORY_CUDA) {
        pd_log_error("msg=\"transfer: the KV pool lies in host memory, and nccl carries GPUs' "
                     "memory only\" backend=nccl");
        return PD_E_UNSUPPORTED;
    }
    if (options->pieces > 1) {
        pd_log_error("msg=\"transfer: the KV pool lies in several GPUs' memory, and nccl carries "
                     "that of one\" backend=nccl pieces=%u",
                     options->pieces);
        return PD_E_UNSUPPORTED;
    }
    pd_status status = pd_nccl_library_load(&library);
    if (status != PD_OK)
        return status;
    pd_carrier *carrier = pd_calloc(1, sizeof *carrier);
    if (carrier == NULL)
        return PD_E_NOMEM;
    carrier->events = events;
    carrier->engine = engine;
    carrier->library = library;
    carrier->peers_max = options->peers_max;
    carrier->links_max = 2 * options->peers_max + SENDERS_MORE;
    carrier->pool = options->piece_memory[0];
    carrier->pool_bytes = options->pool_bytes;
    carrier->id = pd_random_id();
    carrier->process = pd_nccl_process();
    carrier->comms_max = options->comms_max != 0 ? options->comms_max : COMMS_DEFAULT;
    carrier->stall_ns =
        (options->stall_ms != 0 ? options->stall_ms : STALL_MS_DEFAULT) * PD_NS_PER_MS;
    carrier->epoll_fd = carrier->timer_fd = -1;
    carrier->links = pd_calloc(carrier->links_max, sizeof *carrier->links);
    status = carrier->links == NULL ? PD_E_NOMEM : init_device(carrier);
    for (uint32_t i = 0; status == PD_OK && i < options->peers_max; i++)
        carrier->links[i].incarnation = options->incarnation;
    if (status == PD_OK)
        status = init_base(carrier, options);
    if (status == PD_OK)
        status = init_wait(carrier);
    if (status != PD_OK) {
        destroy(carrier);
        return status;
    }
    pd_log_debug("msg=\"nccl ready\" version=%d device=%d comms_max=%u", library->version,
                 carrier->device, carrier->comms_max);
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
    return carrier->epoll_fd;
}

const pd_carrier_ops pd_carrier_nccl = {
    .name = "nccl",
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
