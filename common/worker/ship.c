#include "common/worker/ship.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#include <string.h>

enum {
    SHIPMENTS_DEFAULT = 4096,
    BLOCKS_WAITING_MAX = 1 << 20, /* named by all shipments together: 8 bytes each */
    PARTS_MAX = 2048,             /* posted and not landed, all peers together */
    OPS_MAX = 6000,      /* puts and notices of those: fewer than the transfer's queue has */
    NOTIFIES_MAX = 1024, /* that wait */
};
#define CREDIT_DEFAULT        (8u << 20)
#define QUANTUM_DEFAULT       (1u << 20)
#define QUANTUM_ALONE_DEFAULT (4u << 20)
/* What is posted and has not landed is in nobody's hands any more: on a slow link it is no more
 * than the link carries in that time, so that who comes next does not wait longer for its turn. */
#define CREDIT_NS          (50 * PD_NS_PER_MS)
#define CREDIT_BYTES_LEAST (128u << 10)
#define RATE_KEPT          0.9 /* of what was measured before, with each part that lands */
/* In one call of pump: what is posted is also sealed there, and the loop must not stand still. */
#define TURN_BYTES (8u << 20)

typedef struct shipment {
    struct shipment *next;
    pd_shipment what; /* its lists lie behind */
    uint64_t serial;
    uint32_t group, block; /* the next part begins there, relative to what */
    uint32_t parts_out;
    bool handed_over; /* all of it, or it ends early */
    pd_status status;
    uint64_t tag, bytes, wire_ns, post_ns;
    uint64_t landed_ns; /* when the last part did */
    pd_block lists[];
} shipment;

/* The shipments of one ticket to one peer, in order. */
typedef struct flow {
    struct flow *next;
    uint64_t ticket;
    shipment *head, *tail;
} flow;

typedef struct notify {
    struct notify *next;
    pd_notice notice;
    uint64_t serial;
    pd_peer peer;
    uint64_t tag;
    pd_status status; /* once it will not be posted */
} notify;

typedef struct part {
    shipment *of; /* NULL: none */
    pd_ship_puts put;
    uint32_t slot;
    uint64_t bytes, post_ns;
} part;

typedef struct peer_queue {
    bool open;
    pd_kv_layout layout; /* its pool's */
    uint32_t slices;     /* that the KV heads are cut into between its pool and ours */
    uint64_t tag;
    flow *head, *tail; /* the head's turn is next */
    notify *notifies, *notifies_tail;
    part current; /* begun, and its notice is not posted yet */
    uint64_t in_flight_bytes;
    uint64_t landed_ns;             /* when the last part did */
    double recent_bytes, recent_ns; /* landed, and the link's time for it; older ones fade */
} peer_queue;

typedef struct part_out {
    shipment *of; /* NULL: free */
    pd_peer peer;
    uint32_t ops;
    uint64_t bytes, post_ns;
    uint32_t next_free;
} part_out;

struct pd_shipper {
    pd_shipper_options options;
    uint64_t layout_fingerprint;
    peer_queue *peers; /* [peers_max] */
    part_out *parts;   /* [PARTS_MAX] */
    uint32_t parts_free;
    uint32_t ops_out;
    uint32_t shipments, blocks_waiting;
    uint32_t work; /* flows, current parts and notifies: nothing to pump when 0 */
    uint32_t notifies;
    pd_peer turn; /* which peer is first in the next call of pump */
    uint64_t serial;
    shipment *done_head, *done_tail;
    notify *failed_head, *failed_tail; /* their events are owed */
    pd_ship_stats stats;
    pd_seal_item seal_items[PD_NOTICE_SEALS_MAX]; /* of the part being sealed */
};

#define NO_SLOT UINT32_MAX

/* ---- life ---- */

pd_status pd_ship_create(const pd_shipper_options *options, pd_shipper **shipper_out)
{
    pd_shipper *shipper = pd_calloc(1, sizeof *shipper);

    if (shipper == NULL)
        return PD_E_NOMEM;
    shipper->options = *options;
    pd_shipper_options *o = &shipper->options;
    if (o->shipments_max == 0)
        o->shipments_max = SHIPMENTS_DEFAULT;
    if (o->credit_bytes == 0)
        o->credit_bytes = CREDIT_DEFAULT;
    if (o->quantum_bytes_alone == 0)
        o->quantum_bytes_alone = o->quantum_bytes == 0 ? QUANTUM_ALONE_DEFAULT : o->quantum_bytes;
    if (o->quantum_bytes == 0)
        o->quantum_bytes = QUANTUM_DEFAULT;
    shipper->layout_fingerprint = pd_kv_layout_fingerprint(o->layout);
    shipper->peers = pd_calloc(o->peers_max, sizeof *shipper->peers);
    shipper->parts = pd_calloc(PARTS_MAX, sizeof *shipper->parts);
    if (shipper->peers == NULL || shipper->parts == NULL) {
        pd_ship_destroy(shipper);
        return PD_E_NOMEM;
    }
    for (uint32_t i = 0; i < PARTS_MAX; i++)
        shipper->parts[i].next_free = i + 1 < PARTS_MAX ? i + 1 : NO_SLOT;
    *shipper_out = shipper;
    return PD_OK;
}

static void free_list(shipment *head)
{
    while (head != NULL) {
        shipment *next = head->next;
        pd_free(head);
        head = next;
    }
}

void pd_ship_destroy(pd_shipper *shipper)
{
    if (shipper == NULL)
        return;
    for (pd_peer i = 0; shipper->peers != NULL && i < shipper->options.peers_max; i++)
        pd_ship_close(shipper, i);
    /* Those that only parts under way name are freed with the last of them. */
    for (uint32_t i = 0; shipper->parts != NULL && i < PARTS_MAX; i++) {
        shipment *s = shipper->parts[i].of;
        if (s != NULL && --s->parts_out == 0)
            pd_free(s);
    }
    free_list(shipper->done_head);
    while (shipper->failed_head != NULL) {
        notify *n = shipper->failed_head;
        shipper->failed_head = n->next;
        pd_free(n);
    }
    pd_free(shipper->peers);
    pd_free(shipper->parts);
    pd_free(shipper);
}

pd_ship_stats pd_ship_read_stats(const pd_shipper *shipper)
{
    return shipper->stats;
}

/* ---- ends ---- */

static void end_if_through(pd_shipper *shipper, shipment *s)
{
    if (!s->handed_over || s->parts_out != 0)
        return;
    s->next = NULL;
    if (shipper->done_tail != NULL)
        shipper->done_tail->next = s;
    else
        shipper->done_head = s;
    shipper->done_tail = s;
}

static flow *flow_of(peer_queue *peer, uint64_t ticket)
{
    flow *f = peer->head;

    while (f != NULL && f->ticket != ticket)
        f = f->next;
    return f;
}

static void flow_unlink(pd_shipper *shipper, peer_queue *peer, flow *f)
{
    flow *before = NULL;

    for (flow *at = peer->head; at != f; at = at->next)
        before = at;
    if (before == NULL)
        peer->head = f->next;
    else
        before->next = f->next;
    if (peer->tail == f)
        peer->tail = before;
    shipper->work--;
    pd_free(f);
}

/* All that waits of that flow ends in status. A part that was begun is finished by pump: what was
 * put of it must be named by a notice, else nobody would say when it has landed. */
static void flow_end(pd_shipper *shipper, peer_queue *peer, flow *f, pd_status status)
{
    shipment *s = f->head;

    flow_unlink(shipper, peer, f);
    while (s != NULL) {
        shipment *next = s->next;
        if (s->status == PD_OK)
            s->status = status;
        s->handed_over = true;
        if (peer->current.of != s)
            end_if_through(shipper, s);
        s = next;
    }
}

/* A shipment of which a part failed: what is left of it is not posted. */
static void shipment_fail(pd_shipper *shipper, peer_queue *peer, shipment *s, pd_status status)
{
    flow *f = s->handed_over ? NULL : flow_of(peer, s->what.ticket);

    if (s->status == PD_OK)
        s->status = status;
    if (f == NULL)
        return;
    shipment *before = NULL;
    for (shipment *at = f->head; at != s; at = at->next)
        before = at;
    if (before == NULL)
        f->head = s->next;
    else
        before->next = s->next;
    if (f->tail == s)
        f->tail = before;
    s->handed_over = true;
    if (f->head == NULL)
        flow_unlink(shipper, peer, f);
}

/* The first one that waits is through: posted, and its event comes from the transfer, or not. */
static void notify_end_first(pd_shipper *shipper, peer_queue *peer, pd_status status)
{
    notify *n = peer->notifies;

    peer->notifies = n->next;
    if (n->next == NULL)
        peer->notifies_tail = NULL;
    shipper->work--;
    if (status == PD_OK) {
        shipper->notifies--;
        pd_free(n);
        return;
    }
    n->status = status;
    n->next = NULL;
    if (shipper->failed_tail != NULL)
        shipper->failed_tail->next = n;
    else
        shipper->failed_head = n;
    shipper->failed_tail = n;
}

void pd_ship_open(pd_shipper *shipper, pd_peer peer, const pd_kv_layout *layout, uint64_t tag)
{
    pd_assert(peer < shipper->options.peers_max);
    peer_queue *queue = &shipper->peers[peer];
    uint32_t slices = pd_ship_slices(shipper->options.layout, layout);
    pd_assert(!queue->open && queue->head == NULL && queue->current.of == NULL);
    pd_assert(slices > 0);
    *queue = (peer_queue){.open = true, .layout = *layout, .slices = slices, .tag = tag};
}

/* Puts without a notice: no event will come for them. */
static void current_end(pd_shipper *shipper, peer_queue *peer, pd_status status)
{
    shipment *s = peer->current.of;

    shipper->ops_out -= peer->current.put.puts;
    peer->in_flight_bytes -= peer->current.bytes;
    peer->current.of = NULL;
    shipper->work--;
    shipment_fail(shipper, peer, s, status);
    end_if_through(shipper, s);
}

void pd_ship_close(pd_shipper *shipper, pd_peer peer)
{
    pd_assert(peer < shipper->options.peers_max);
    peer_queue *queue = &shipper->peers[peer];

    if (!queue->open)
        return;
    queue->open = false;
    if (queue->current.of != NULL)
        current_end(shipper, queue, PD_E_CANCELLED);
    while (queue->head != NULL)
        flow_end(shipper, queue, queue->head, PD_E_CANCELLED);
    while (queue->notifies != NULL)
        notify_end_first(shipper, queue, PD_E_CANCELLED);
}

/* ---- what is asked for ---- */

static bool targets_fit(const peer_queue *peer, const pd_shipment *what)
{
    for (uint32_t i = 0; i < what->count; i++) {
        if (what->targets[i] >= peer->layout.blocks)
            return false;
    }
    return true;
}

static shipment *shipment_make(const pd_shipment *what)
{
    size_t list_bytes = what->count * sizeof(pd_block);
    shipment *s = pd_calloc(1, sizeof *s + 2 * list_bytes);

    if (s == NULL)
        return NULL;
    s->what = *what;
    s->what.sources = s->lists;
    s->what.targets = s->lists + what->count;
    memcpy(s->lists, what->sources, list_bytes);
    memcpy(s->lists + what->count, what->targets, list_bytes);
    return s;
}

static flow *flow_make(pd_shipper *shipper, peer_queue *peer, uint64_t ticket)
{
    flow *f = pd_calloc(1, sizeof *f);

    if (f == NULL)
        return NULL;
    f->ticket = ticket;
    if (peer->tail != NULL)
        peer->tail->next = f;
    else
        peer->head = f;
    peer->tail = f;
    shipper->work++;
    return f;
}

pd_status pd_ship_post(pd_shipper *shipper, const pd_shipment *what)
{
    pd_assert(what->peer < shipper->options.peers_max && what->count > 0 && what->groups > 0);
    pd_assert(what->group_first + what->groups <= shipper->options.layout->groups);
    peer_queue *peer = &shipper->peers[what->peer];

    for (uint32_t i = 0; i < what->count; i++)
        pd_assert(what->sources[i] < shipper->options.layout->blocks);
    if (!peer->open)
        return PD_E_PEER;
    if (!targets_fit(peer, what)) {
        pd_log_error("msg=\"a shipment to blocks that its receiver does not have\" ticket=%llu "
                     "count=%u peer_blocks=%u",
                     (unsigned long long)what->ticket, what->count, peer->layout.blocks);
        return PD_E_INVALID;
    }
    if (shipper->shipments == shipper->options.shipments_max ||
        (shipper->shipments > 0 && shipper->blocks_waiting + what->count > BLOCKS_WAITING_MAX))
        return PD_E_OVERLOAD;
    shipment *s = shipment_make(what);
    flow *f = s == NULL ? NULL : flow_of(peer, what->ticket);
    if (s != NULL && f == NULL)
        f = flow_make(shipper, peer, what->ticket);
    if (f == NULL) {
        pd_free(s);
        return PD_E_NOMEM;
    }
    s->serial = ++shipper->serial;
    s->tag = peer->tag;
    if (f->tail != NULL)
        f->tail->next = s;
    else
        f->head = s;
    f->tail = s;
    shipper->shipments++;
    shipper->blocks_waiting += what->count;
    return PD_OK;
}

void pd_ship_drop(pd_shipper *shipper, uint64_t ticket)
{
    for (pd_peer i = 0; i < shipper->options.peers_max; i++) {
        flow *f = flow_of(&shipper->peers[i], ticket);
        if (f != NULL)
            flow_end(shipper, &shipper->peers[i], f, PD_E_CANCELLED);
    }
}

static pd_status notice_post(pd_shipper *shipper, pd_peer peer, uint64_t ticket,
                             const pd_notice *notice)
{
    unsigned char bytes[PD_TRANSFER_NOTICE_BYTES_MAX];
    size_t len = pd_notice_pack(notice, bytes);

    return pd_transfer_notice(shipper->options.transfer, peer, ticket, bytes, len);
}

static bool speaks_of(const pd_notice *notice, const shipment *s)
{
    const pd_request_key *key = &s->what.key;

    return key->router == notice->key.router &&
           (notice->key.number == 0 || key->number == notice->key.number);
}

/* Is all that the notice comes after handed over? */
static bool may_go(const peer_queue *peer, const notify *n)
{
    if (peer->current.of != NULL && speaks_of(&n->notice, peer->current.of))
        return false;
    for (const flow *f = peer->head; f != NULL; f = f->next) {
        for (const shipment *s = f->head; s != NULL; s = s->next) {
            if (s->serial < n->serial && speaks_of(&n->notice, s))
                return false;
        }
    }
    return true;
}

pd_status pd_ship_notify(pd_shipper *shipper, pd_peer peer, const pd_notice *notice)
{
    pd_assert(peer < shipper->options.peers_max && notice->seals == NULL);
    peer_queue *queue = &shipper->peers[peer];
    notify now = {.notice = *notice, .serial = ++shipper->serial, .peer = peer, .tag = queue->tag};

    if (!queue->open)
        return PD_E_PEER;
    if (queue->notifies == NULL && may_go(queue, &now)) {
        pd_status status = notice_post(shipper, peer, 0, notice);
        if (status != PD_E_OVERLOAD)
            return status;
    }
    if (shipper->notifies == NOTIFIES_MAX)
        return PD_E_OVERLOAD;
    notify *n = pd_calloc(1, sizeof *n);
    if (n == NULL)
        return PD_E_NOMEM;
    *n = now;
    if (queue->notifies_tail != NULL)
        queue->notifies_tail->next = n;
    else
        queue->notifies = n;
    queue->notifies_tail = n;
    shipper->work++;
    shipper->notifies++;
    return PD_OK;
}

/* ---- parts ---- */

static uint64_t credit_of(const pd_shipper *shipper, const peer_queue *peer)
{
    uint64_t most = shipper->options.credit_bytes;

    if (peer->recent_ns <= 0 || most < CREDIT_BYTES_LEAST)
        return most;
    double bytes = peer->recent_bytes / peer->recent_ns * CREDIT_NS;
    if (bytes >= (double)most)
        return most;
    return bytes <= CREDIT_BYTES_LEAST ? CREDIT_BYTES_LEAST : (uint64_t)bytes;
}

static uint32_t blocks_of_quantum(const pd_shipper *shipper, const peer_queue *peer,
                                  const shipment *s, bool alone)
{
    const pd_shipper_options *o = &shipper->options;
    uint64_t block_bytes = pd_kv_layout_block_bytes(o->layout, s->what.group_first + s->group);
    uint64_t bytes = alone ? o->quantum_bytes_alone : o->quantum_bytes;
    uint64_t half = credit_of(shipper, peer) / 2; /* one lands while the next is posted */
    uint64_t blocks = (bytes < half ? bytes : half) / block_bytes;

    if (blocks == 0)
        return 1;
    uint64_t most = PD_NOTICE_SEALS_MAX / peer->slices;
    return (uint32_t)(blocks < most ? blocks : most);
}

/* The next part of a shipment: some blocks of one group, or all blocks of several. */
static part part_next(const pd_shipper *shipper, const peer_queue *peer, shipment *s, bool alone)
{
    const pd_kv_layout *layout = shipper->options.layout;
    uint32_t most = blocks_of_quantum(shipper, peer, s, alone);
    uint32_t left = s->what.count - s->block, groups = 1;

    if (s->block == 0 && left <= most) {
        groups = most / left;
        if (groups > s->what.groups - s->group)
            groups = s->what.groups - s->group;
    }
    part p = {
        .of = s,
        .put = {.what = &s->what,
                .group = s->group,
                .groups = groups,
                .block = s->block,
                .blocks = left < most ? left : most},
        .slot = NO_SLOT,
    };
    for (uint32_t g = 0; g < groups; g++)
        p.bytes +=
            p.put.blocks * pd_kv_layout_block_bytes(layout, s->what.group_first + p.put.group + g);
    return p;
}

/* ---- faults on purpose ---- */

static void part_choose_fault(pd_shipper *shipper, const peer_queue *peer, part *p)
{
    pd_ship_faults *faults = &shipper->options.faults;
    const pd_shipment *what = &p->of->what;
    pd_ship_puts *put = &p->put;

    put->fault = pd_ship_faults_next(faults);
    if (put->fault == PD_SHIP_FAULT_NONE)
        return;
    uint64_t luck = pd_mix64(faults->parts);
    put->fault_group = (uint32_t)(luck % put->groups);
    put->fault_block = (uint32_t)((luck >> 32) % put->blocks);
    put->fault_slice = (uint32_t)(pd_mix64(luck) % peer->slices);
    pd_log_warn("msg=\"fault\" kind=%s router=%016llx request=%llu epoch=%u group=%u block=%u "
                "slice=%u",
                pd_ship_fault_name(put->fault), (unsigned long long)what->key.router,
                (unsigned long long)what->key.number, what->key.epoch,
                what->group_first + put->group + put->fault_group,
                what->first + put->block + put->fault_block, put->fault_slice);
}

/* ---- posting ---- */

/* Posts the part's puts from where it stopped. */
static pd_status part_put(pd_shipper *shipper, pd_peer peer, part *p)
{
    const peer_queue *queue = &shipper->peers[peer];
    pd_ship_pools pools = {.transfer = shipper->options.transfer,
                           .ours = shipper->options.layout,
                           .theirs = &queue->layout,
                           .slices = queue->slices};
    uint32_t before = p->put.puts;
    pd_status status = pd_ship_puts_post(&p->put, &pools, peer, p->slot + 1);

    shipper->ops_out += p->put.puts - before;
    return status;
}

/* The one place where seals of blocks that leave are made. seals: [groups][blocks][slices] of the
 * part. */
static pd_status part_seal(pd_shipper *shipper, const pd_ship_puts *p, uint32_t slices,
                           uint32_t last_valid, uint64_t *seals)
{
    const pd_kv_layout *layout = shipper->options.layout;
    const pd_sealer *sealer = &shipper->options.sealer;
    const pd_request_key *key = &p->what->key;
    uint64_t start_ns = pd_clock_now_ns();
    pd_seal_place place = {.request = pd_ship_seal_request(key),
                           .layout_fingerprint = shipper->layout_fingerprint};
    uint32_t heads = layout->kv_heads / slices, n = 0;

    for (uint32_t g = 0; g < p->groups; g++) {
        for (uint32_t i = 0; i < p->blocks; i++) {
            bool wrong =
                p->fault == PD_SHIP_FAULT_EPOCH && g == p->fault_group && i == p->fault_block;
            place.group = p->what->group_first + p->group + g;
            place.block_index = p->what->first + p->block + i;
            place.valid_tokens = i + 1 == p->blocks ? last_valid : layout->block_tokens;
            for (uint32_t slice = 0; slice < slices; slice++) {
                place.epoch = key->epoch - (wrong && slice == p->fault_slice);
                shipper->seal_items[n++] = (pd_seal_item){.block = p->what->sources[p->block + i],
                                                          .head_from = slice * heads,
                                                          .head_to = (slice + 1) * heads,
                                                          .place = place};
            }
        }
    }
    pd_status status = sealer->seal(sealer->ctx, shipper->seal_items, n, seals);
    shipper->stats.seal_ns += pd_clock_now_ns() - start_ns;
    shipper->stats.seal_status = status;
    shipper->stats.seals_failed = status == PD_OK ? 0 : shipper->stats.seals_failed + 1;
    return status;
}

static pd_status part_notice(pd_shipper *shipper, pd_peer peer, part *p)
{
    uint64_t seals[PD_NOTICE_SEALS_MAX];
    const pd_shipment *what = &p->of->what;
    uint32_t slices = shipper->peers[peer].slices;
    bool last = p->put.block + p->put.blocks == what->count;
    pd_notice notice = {
        .kind = PD_NOTICE_BLOCKS,
        .key = what->key,
        .sender = shipper->options.incarnation,
        .receiver = what->receiver,
        .group = what->group_first + p->put.group,
        .groups = p->put.groups,
        .again = what->again,
        .slices = slices,
        .first_block = what->first + p->put.block,
        .count = p->put.blocks,
        .valid_tokens = last ? what->valid_tokens : shipper->options.layout->block_tokens,
        .seals = shipper->options.sealer.seal != NULL ? seals : NULL,
    };

    if (notice.seals != NULL) {
        pd_status status = part_seal(shipper, &p->put, slices, notice.valid_tokens, seals);
        if (status != PD_OK)
            return status;
    }
    if (p->put.fault == PD_SHIP_FAULT_COUNT)
        notice.valid_tokens = notice.valid_tokens > 1 ? notice.valid_tokens - 1 : 2;
    if (p->put.fault == PD_SHIP_FAULT_NOTICE)
        return pd_transfer_notice(shipper->options.transfer, peer, p->slot + 1, NULL, 0);
    return notice_post(shipper, peer, p->slot + 1, &notice);
}

/* The part's event will come: it is under way. */
static void part_is_out(pd_shipper *shipper, pd_peer peer, const part *p)
{
    part_out *out = &shipper->parts[p->slot];

    shipper->parts_free = out->next_free;
    *out = (part_out){.of = p->of,
                      .peer = peer,
                      .ops = p->put.puts + 1,
                      .bytes = p->bytes,
                      .post_ns = p->post_ns};
    shipper->ops_out++;
    shipper->stats.puts += p->put.puts;
    p->of->parts_out++;
}

/* False: the transfer takes no more now. */
static bool current_post(pd_shipper *shipper, pd_peer peer)
{
    peer_queue *queue = &shipper->peers[peer];
    part *p = &queue->current;
    uint64_t start_ns = pd_clock_now_ns(), sealing_ns = shipper->stats.seal_ns;
    pd_status status = part_put(shipper, peer, p);

    if (status == PD_OK)
        status = part_notice(shipper, peer, p);
    sealing_ns = shipper->stats.seal_ns - sealing_ns;
    p->post_ns += pd_clock_now_ns() - start_ns - sealing_ns;
    if (status == PD_E_OVERLOAD || status == PD_E_NOMEM)
        return false;
    if (status != PD_OK) {
        pd_log_warn("msg=\"blocks cannot be shipped\" status=%s router=%016llx request=%llu",
                    pd_status_name(status), (unsigned long long)p->of->what.key.router,
                    (unsigned long long)p->of->what.key.number);
        current_end(shipper, queue, status);
        return true;
    }
    part_is_out(shipper, peer, p);
    p->of = NULL;
    shipper->work--;
    return true;
}

/* Begins the next part of the flow whose turn it is. The flow goes to the end of the line. */
static void current_begin(pd_shipper *shipper, peer_queue *peer, const part *p)
{
    flow *f = peer->head;
    shipment *s = f->head;

    peer->current = *p;
    peer->current.slot = shipper->parts_free;
    part_choose_fault(shipper, peer, &peer->current);
    peer->in_flight_bytes += p->bytes;
    shipper->work++;
    s->block += p->put.blocks;
    if (s->block == s->what.count) {
        s->block = 0;
        s->group += p->put.groups;
    }
    if (s->group == s->what.groups) {
        s->handed_over = true;
        f->head = s->next;
        if (f->head == NULL) {
            flow_unlink(shipper, peer, f);
            return;
        }
    }
    if (peer->tail != f) {
        peer->head = f->next;
        peer->tail->next = f;
        peer->tail = f;
        f->next = NULL;
    }
}

static bool pump_notifies(pd_shipper *shipper, pd_peer peer)
{
    peer_queue *queue = &shipper->peers[peer];
    bool any = false;

    while (queue->notifies != NULL && may_go(queue, queue->notifies)) {
        pd_status status = notice_post(shipper, peer, 0, &queue->notifies->notice);
        if (status == PD_E_OVERLOAD || status == PD_E_NOMEM)
            break;
        notify_end_first(shipper, queue, status);
        any = true;
    }
    return any;
}

/* One part of one peer, if there is one that may go; its bytes, or 0. */
static uint64_t pump_peer(pd_shipper *shipper, pd_peer peer)
{
    peer_queue *queue = &shipper->peers[peer];

    if (queue->current.of == NULL) {
        if (queue->head == NULL || shipper->parts_free == NO_SLOT)
            return 0;
        part p = part_next(shipper, queue, queue->head->head, queue->head == queue->tail);
        if ((queue->in_flight_bytes > 0 &&
             queue->in_flight_bytes + p.bytes > credit_of(shipper, queue)) ||
            shipper->ops_out + p.put.groups * p.put.blocks * queue->slices + 1 > OPS_MAX)
            return 0;
        current_begin(shipper, queue, &p);
    }
    uint64_t bytes = queue->current.bytes;
    return current_post(shipper, peer) ? bytes : 0;
}

bool pd_ship_pump(pd_shipper *shipper)
{
    uint32_t peers_max = shipper->options.peers_max;
    uint64_t posted = 0;
    bool any = true;

    while (any && posted < TURN_BYTES && shipper->work > 0) {
        any = false;
        for (uint32_t i = 0; i < peers_max; i++) {
            pd_peer peer = (shipper->turn + i) % peers_max;
            const peer_queue *queue = &shipper->peers[peer];
            if (queue->head == NULL && queue->notifies == NULL && queue->current.of == NULL)
                continue;
            uint64_t bytes = pump_peer(shipper, peer);
            any |= bytes > 0;
            any |= pump_notifies(shipper, peer);
            posted += bytes;
        }
        shipper->turn = (shipper->turn + 1) % peers_max;
    }
    return any && shipper->work > 0;
}

/* ---- events ---- */

/* What two of them were on the wire together counts once: they land in order. */
static uint64_t on_the_wire(const pd_transfer_event *event, uint64_t *landed_ns)
{
    uint64_t began_ns = event->landed_ns - event->wire_ns;
    uint64_t from_ns = began_ns > *landed_ns ? began_ns : *landed_ns;

    *landed_ns = event->landed_ns;
    return event->landed_ns - from_ns;
}

bool pd_ship_sent(pd_shipper *shipper, const pd_transfer_event *event)
{
    pd_assert(event->kind == PD_TRANSFER_SENT);
    if (event->ticket == 0)
        return false;
    pd_assert(event->ticket <= PARTS_MAX);
    uint32_t slot = (uint32_t)event->ticket - 1;
    part_out *out = &shipper->parts[slot];
    shipment *s = out->of;
    pd_assert(s != NULL);
    peer_queue *peer = &shipper->peers[out->peer];
    pd_ship_stats *stats = &shipper->stats;

    /* A closed peer's place is given away only after its last event. */
    peer->in_flight_bytes -= out->bytes;
    shipper->ops_out -= out->ops;
    if (event->status == PD_OK) {
        uint64_t wire_ns = on_the_wire(event, &peer->landed_ns);
        s->landed_ns = event->landed_ns;
        peer->recent_bytes = RATE_KEPT * peer->recent_bytes + (double)event->bytes;
        peer->recent_ns = RATE_KEPT * peer->recent_ns + (double)wire_ns;
        s->wire_ns += wire_ns;
        s->bytes += event->bytes;
        s->post_ns += event->post_ns + out->post_ns;
        stats->parts++;
        stats->bytes += event->bytes;
        stats->wire_ns += wire_ns;
        stats->post_ns += event->post_ns + out->post_ns;
    }
    out->of = NULL;
    out->next_free = shipper->parts_free;
    shipper->parts_free = slot;
    s->parts_out--;
    if (event->status != PD_OK)
        shipment_fail(shipper, peer, s, event->status);
    if (peer->current.of != s)
        end_if_through(shipper, s);
    return true;
}

static void poll_notify(pd_shipper *shipper, pd_transfer_event *event_out)
{
    notify *n = shipper->failed_head;

    shipper->failed_head = n->next;
    if (n->next == NULL)
        shipper->failed_tail = NULL;
    shipper->notifies--;
    event_out->kind = PD_TRANSFER_SENT;
    event_out->status = n->status;
    event_out->peer = n->peer;
    event_out->tag = n->tag;
    event_out->ticket = event_out->bytes = event_out->wire_ns = event_out->post_ns = 0;
    event_out->landed_ns = 0;
    event_out->notice_len = 0;
    pd_free(n);
}

pd_status pd_ship_poll(pd_shipper *shipper, pd_transfer_event *event_out)
{
    shipment *s = shipper->done_head;

    if (s == NULL && shipper->failed_head == NULL)
        return PD_E_AGAIN;
    if (s == NULL) {
        poll_notify(shipper, event_out);
        return PD_OK;
    }
    shipper->done_head = s->next;
    if (s->next == NULL)
        shipper->done_tail = NULL;
    event_out->kind = PD_TRANSFER_SENT;
    event_out->status = s->status;
    event_out->peer = s->what.peer;
    event_out->tag = s->tag;
    event_out->ticket = s->what.ticket;
    event_out->bytes = s->bytes;
    event_out->wire_ns = s->wire_ns;
    event_out->post_ns = s->post_ns;
    event_out->landed_ns = s->landed_ns;
    event_out->notice_len = 0;
    shipper->shipments--;
    shipper->blocks_waiting -= s->what.count;
    shipper->stats.shipments += s->status == PD_OK;
    pd_free(s);
    return PD_OK;
}
