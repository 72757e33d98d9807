#include "common/worker/source.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/worker/key_table.h"

#include <stdio.h>
#include <string.h>

static const uint64_t idle_link_ns = 60 * PD_NS_PER_S;
static const uint64_t deadline_default_ns = 120 * PD_NS_PER_S;

struct pd_source_ship {
    struct pd_source_ship *prev, *next;
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    uint32_t source_epoch;
    uint64_t receiver;
    uint64_t link_tag, ticket;
    uint32_t first, count;
    uint32_t valid_tokens; /* of the last block */
    void *memory;          /* of the arrays below */
    pd_block *blocks;      /* [count] */
    pd_block *targets;     /* [count] */
    uint64_t *asked;       /* bits [groups][count]: shipped again, once */
    uint64_t *want;        /* of these, not posted yet */
    uint64_t deadline_ns;
    /* how it stands */
    pd_status status;   /* not PD_OK: it is ending */
    const char *reason; /* a literal */
    bool begun;         /* the whole of it was posted once */
    bool word_owed, released, may_land, unclosed;
    uint32_t posted, sent, again;
    uint64_t wire_ns, bytes, ended_ns;
    uint64_t asked_by; /* of a question alone: who waits */
};

void pd_source_init(pd_source *source, const pd_source_options *options)
{
    *source = (pd_source){.o = *options, .ticket_next = PD_SOURCE_TICKET | 1};
}

static void ship_free(pd_source_ship *ship)
{
    pd_free(ship->memory);
    pd_free(ship);
}

void pd_source_fini(pd_source *source)
{
    while (source->head != NULL) {
        pd_source_ship *ship = source->head;
        source->head = ship->next;
        ship_free(ship);
    }
    *source = (pd_source){0};
}

bool pd_source_idle(const pd_source *source)
{
    return source->head == NULL;
}

bool pd_source_serves(const pd_source *source, uint64_t router)
{
    for (const pd_source_ship *ship = source->head; ship != NULL; ship = ship->next) {
        if (ship->key.router == router)
            return true;
    }
    return false;
}

static pd_source_ship *find(const pd_source *source, const pd_request_key *key)
{
    pd_source_ship *ship = source->head;

    while (ship != NULL && !pd_request_key_equal(&ship->key, key))
        ship = ship->next;
    return ship;
}

bool pd_source_moves(const pd_source *source, const pd_request_key *key)
{
    for (const pd_source_ship *ship = source->head; ship != NULL; ship = ship->next) {
        if (ship->source_epoch != 0 && ship->source_epoch == key->epoch &&
            ship->key.router == key->router && ship->key.number == key->number)
            return true;
    }
    return false;
}

/* ---- the end of a shipment ---- */

static void say_done(pd_source *source, const pd_source_ship *ship)
{
    pd_message message = {.kind = PD_MSG_SHIP_DONE};
    pd_msg_ship_done *done = &message.ship_done;

    done->key = ship->key;
    done->status = ship->status;
    done->ship_ms = (float)((double)ship->wire_ns / 1e6);
    done->ship_bytes = ship->bytes;
    /* what is sent may be on its way still: over tcp the kernel has it, and then a slow link */
    done->may_land = ship->may_land || ship->posted > 0;
    done->again = ship->again;
    done->shipped_bytes = source->o.counters->bytes_shipped;
    done->receiver = ship->asked_by;
    snprintf(done->reason, sizeof done->reason, "%s", ship->reason);
    source->o.sink->send(source->o.sink->ctx, ship->key.router, &message);
}

void pd_source_refuse(pd_source *source, const pd_msg_ship_request *asked, pd_status status,
                      const char *reason)
{
    pd_source_ship ship = {
        .key = asked->key,
        .status = status,
        .reason = reason,
        .may_land = pd_last_words_owes(source->o.words, &asked->key, asked->receiver.incarnation)};
    const pd_link *link = pd_links_by_incarnation(source->o.links, asked->receiver.incarnation);

    source->o.counters->refused++;
    pd_last_words_end(source->o.words, &asked->key);
    pd_log_req_warn(asked->id, "msg=\"shipping refused: %s\" status=%s receiver=%s", reason,
                    pd_status_name(status), asked->receiver.name);
    if (link != NULL && link->state == PD_LINK_UP)
        pd_last_words_abort(source->o.words, link, &asked->key);
    say_done(source, &ship);
}

void pd_source_unknown(pd_source *source, const pd_msg_ship_again *asked)
{
    pd_source_ship ship = {.key = asked->key,
                           .status = PD_E_NOT_FOUND,
                           .reason = "nothing is held for it",
                           .again = 1,
                           .asked_by = asked->receiver};

    ship.may_land = pd_last_words_say_again(source->o.words, &asked->key, asked->receiver);
    pd_last_words_end(source->o.words, &asked->key);
    say_done(source, &ship);
}

static bool puts_outstanding(const pd_source *source, const pd_source_ship *ship)
{
    /* A closed link has nothing under way, whatever was reported; and until it is closed, a put
     * that was reported as failed may still be written. */
    const pd_link *link = pd_links_by_tag(source->o.links, ship->link_tag);

    if (link == NULL || ship->posted == 0)
        return false;
    return ship->sent < ship->posted || ship->status == PD_E_PEER || link->state == PD_LINK_CLOSING;
}

static void say_last_word(pd_source *source, pd_source_ship *ship)
{
    const pd_link *link = pd_links_by_tag(source->o.links, ship->link_tag);

    if (link != NULL && link->state == PD_LINK_UP) {
        pd_last_words_abort(source->o.words, link, &ship->key);
        return;
    }
    /* What was on its way may land until the next link's word, and where this one could not be
     * closed, even after. */
    ship->may_land = ship->posted > 0;
    if (ship->unclosed)
        pd_last_words_never(source->o.words, ship->receiver, &ship->key);
    else
        pd_last_words_owe(source->o.words, ship->receiver, &ship->key, ship->posted == 0);
}

static void finish(pd_source *source, pd_source_ship *ship)
{
    if (ship->status != PD_OK)
        say_last_word(source, ship);
    pd_last_words_end(source->o.words, &ship->key);
    pd_prefix_cache_drop(source->o.blocks->cache, ship->blocks, ship->count, PD_CLAIM_RUNNING);
    pd_log_req_debug(ship->id, "msg=\"shipping ends\" status=%s reason=\"%s\" blocks=%u",
                     pd_status_name(ship->status), ship->reason, ship->count);
    if (ship->word_owed)
        say_done(source, ship);
    if (ship->prev != NULL)
        ship->prev->next = ship->next;
    else
        source->head = ship->next;
    if (ship->next != NULL)
        ship->next->prev = ship->prev;
    source->count--;
    ship_free(ship);
}

static bool want_any(const pd_source *source, const pd_source_ship *ship)
{
    uint32_t bits = source->o.role->layout.groups * ship->count;

    for (uint32_t i = 0; i < (bits + 63) / 64; i++) {
        if (ship->want[i] != 0)
            return true;
    }
    return false;
}

/* Goes on with one that nothing is under way for; it may be gone afterwards. */
static void settle(pd_source *source, pd_source_ship *ship)
{
    if (puts_outstanding(source, ship))
        return;
    if (ship->status != PD_OK) {
        finish(source, ship);
        return;
    }
    if (!ship->begun || want_any(source, ship))
        return;
    if (ship->word_owed) {
        pd_last_words_written(source->o.words, ship->link_tag, &ship->key, ship->again);
        say_done(source, ship);
    }
    ship->word_owed = false;
    if (ship->released)
        finish(source, ship);
}

/* The first reason stands. ship may be gone afterwards. */
static void end_early(pd_source *source, pd_source_ship *ship, pd_status status, const char *reason,
                      uint64_t now_ns)
{
    if (ship->status == PD_OK) {
        ship->status = status;
        ship->reason = reason;
        ship->ended_ns = now_ns;
        if (ship->sent < ship->posted)
            source->o.sink->unship(source->o.sink->ctx, ship->ticket);
        if (status != PD_E_CANCELLED && ship->word_owed)
            pd_log_req_warn(ship->id, "msg=\"shipping fails: %s\" status=%s", reason,
                            pd_status_name(status));
    }
    settle(source, ship);
}

/* ---- shipping ---- */

static bool bit_of(const uint64_t *bits, uint32_t bit)
{
    return (bits[bit / 64] >> (bit % 64) & 1) != 0;
}

/* The next run of blocks of one group that is wanted again. */
static bool next_wanted(const pd_source *source, const pd_source_ship *ship, uint32_t *group_out,
                        uint32_t *from_out, uint32_t *count_out)
{
    for (uint32_t group = 0; group < source->o.role->layout.groups; group++) {
        for (uint32_t i = 0; i < ship->count; i++) {
            uint32_t end = i;
            while (end < ship->count && bit_of(ship->want, group * ship->count + end))
                end++;
            if (end == i)
                continue;
            *group_out = group;
            *from_out = i;
            *count_out = end - i;
            return true;
        }
    }
    return false;
}

/* again: of what was asked for again, for its notice; what leaves for the first time says 0,
 * however many words have come, so that it is never taken for the last writing. */
static pd_status post(pd_source *source, pd_source_ship *ship, const pd_link *link, uint32_t group,
                      uint32_t groups, uint32_t from, uint32_t count, uint32_t again)
{
    bool last = from + count == ship->count;
    pd_shipment shipment = {
        .peer = link->peer,
        .ticket = ship->ticket,
        .key = ship->key,
        .receiver = ship->receiver,
        .group_first = group,
        .groups = groups,
        .first = ship->first + from,
        .count = count,
        .sources = ship->blocks + from,
        .targets = ship->targets + from,
        .valid_tokens = last ? ship->valid_tokens : source->o.role->layout.block_tokens,
        .again = again,
    };
    pd_status status = source->o.sink->ship(source->o.sink->ctx, &shipment);

    if (status == PD_OK) {
        ship->posted++;
        if (group + groups == source->o.role->layout.groups)
            source->o.counters->blocks_shipped += count;
    }
    return status;
}

/* All that can be posted now. */
static pd_status post_ready(pd_source *source, pd_source_ship *ship, const pd_link *link)
{
    uint32_t groups = source->o.role->layout.groups, group, from, count;

    if (!ship->begun) {
        pd_status status = post(source, ship, link, 0, groups, 0, ship->count, 0);
        if (status != PD_OK)
            return status;
        ship->begun = true;
    }
    while (next_wanted(source, ship, &group, &from, &count)) {
        pd_status status = post(source, ship, link, group, 1, from, count, ship->again);
        if (status != PD_OK)
            return status;
        for (uint32_t i = from; i < from + count; i++) {
            uint32_t bit = group * ship->count + i;
            ship->want[bit / 64] &= ~(UINT64_C(1) << (bit % 64));
        }
    }
    return PD_OK;
}

/* ship may be gone afterwards. */
static void go_on(pd_source *source, pd_source_ship *ship, uint64_t now_ns)
{
    pd_link *link = pd_links_by_tag(source->o.links, ship->link_tag);
    pd_status status = PD_OK;

    if (ship->status != PD_OK)
        return;
    if (link == NULL || link->state == PD_LINK_CLOSING) {
        end_early(source, ship, PD_E_PEER, "the link to the receiver is gone", now_ns);
        return;
    }
    if (link->state != PD_LINK_UP)
        return;
    link->used_ns = now_ns;
    status = post_ready(source, ship, link);
    if (status == PD_E_OVERLOAD)
        source->ship_waits = true;
    else if (status != PD_OK)
        end_early(source, ship, PD_E_PEER, "the link to the receiver failed", now_ns);
}

static void go_on_all(pd_source *source, uint64_t now_ns)
{
    source->ship_waits = false;
    for (pd_source_ship *ship = source->head, *next; ship != NULL; ship = next) {
        next = ship->next;
        go_on(source, ship, now_ns);
    }
}

/* ---- links ---- */

static bool in_use(const pd_source *source, uint64_t tag)
{
    for (const pd_source_ship *ship = source->head; ship != NULL; ship = ship->next) {
        if (ship->link_tag == tag)
            return true;
    }
    return false;
}

static void drop_link(pd_source *source, pd_link *link, const char *reason, uint64_t now_ns)
{
    uint64_t tag = link->tag;

    if (source->o.drop_link != NULL) {
        source->o.drop_link(source->o.ctx, link, reason, now_ns);
        return;
    }
    pd_log_info("msg=\"link closed: %s\" peer=%s", reason, link->name);
    pd_links_close(source->o.links, link);
    pd_source_link_down(source, tag, reason, now_ns);
}

/* The link that is on demand, not in use, and was used the longest ago; NULL: none. */
static pd_link *idlest(const pd_source *source)
{
    pd_link *found = NULL;

    for (uint32_t i = 0; i < source->o.links->count; i++) {
        pd_link *link = &source->o.links->links[i];
        if (!link->on_demand || link->state == PD_LINK_NONE || link->state == PD_LINK_CLOSING ||
            in_use(source, link->tag))
            continue;
        if (found == NULL || link->used_ns < found->used_ns)
            found = link;
    }
    return found;
}

static pd_link *link_to(pd_source *source, const pd_msg_peer *receiver, uint64_t now_ns)
{
    pd_links *links = source->o.links;
    pd_link *link = pd_links_by_incarnation(links, receiver->incarnation);
    pd_msg_peer_up peer = {.incarnation = receiver->incarnation,
                           .transfer_address = receiver->transfer_address,
                           .transfer_address_len = receiver->transfer_address_len};

    if (link != NULL)
        return link;
    pd_link *older = pd_links_by_name(links, receiver->name);
    if (older != NULL && older->on_demand)
        drop_link(source, older, "the worker was restarted", now_ns);
    memcpy(peer.name, receiver->name, sizeof peer.name);
    link = pd_links_add(links, &peer);
    if (link == NULL) {
        /* A place comes free when that one is closed: the next request has it. */
        pd_link *idle = idlest(source);
        if (idle != NULL)
            drop_link(source, idle, "its place is needed", now_ns);
        if (idle != NULL)
            link = pd_links_add(links, &peer);
        if (link == NULL)
            return NULL;
    }
    link->on_demand = true;
    link->used_ns = now_ns;
    uint64_t tag = link->tag;
    pd_status status = pd_links_connect(links, link);
    return status == PD_OK || status == PD_E_OVERLOAD ? pd_links_by_tag(links, tag) : NULL;
}

void pd_source_link_up(pd_source *source, uint64_t now_ns)
{
    go_on_all(source, now_ns);
}

void pd_source_link_down(pd_source *source, uint64_t tag, const char *reason, uint64_t now_ns)
{
    for (pd_source_ship *ship = source->head, *next; ship != NULL; ship = next) {
        next = ship->next;
        if (ship->link_tag == tag)
            end_early(source, ship, PD_E_PEER, reason, now_ns);
    }
}

void pd_source_link_closed(pd_source *source, uint64_t tag, pd_status status)
{
    for (pd_source_ship *ship = source->head, *next; ship != NULL; ship = next) {
        next = ship->next;
        if (ship->link_tag != tag)
            continue;
        ship->unclosed = status != PD_OK && ship->posted > 0;
        settle(source, ship);
    }
}

void pd_source_on_link(pd_source *source, const pd_transfer_event *event, uint64_t now_ns)
{
    pd_link *link = pd_links_by_tag(source->o.links, event->tag);

    if (link == NULL)
        return;
    if (event->kind == PD_TRANSFER_CONNECTED && link->state == PD_LINK_CONNECTING) {
        link->state = PD_LINK_UP;
        snprintf(link->lane, sizeof link->lane, "%s", event->lane);
        pd_log_info("msg=\"link up\" peer=%s lane=%s", link->name, link->lane);
        pd_last_words_pay(source->o.words, link);
        pd_source_link_up(source, now_ns);
    } else if (event->kind == PD_TRANSFER_PEER_DOWN && link->state != PD_LINK_CLOSING) {
        drop_link(source, link, "the connection failed", now_ns);
    } else if (event->kind == PD_TRANSFER_CLOSED) {
        pd_links_closed(link);
        pd_source_link_closed(source, event->tag, event->status);
    }
}

void pd_source_peer_gone(pd_source *source, uint64_t incarnation, uint64_t now_ns)
{
    pd_link *link = pd_links_by_incarnation(source->o.links, incarnation);

    if (link != NULL)
        drop_link(source, link, "the worker is gone", now_ns);
}

/* ---- receivers, for words that are owed ---- */

static struct pd_source_receiver *receiver_of(pd_source *source, uint64_t incarnation)
{
    for (uint32_t i = 0; i < PD_SOURCE_RECEIVERS_MAX; i++) {
        if (incarnation != 0 && source->receivers[i].peer.incarnation == incarnation)
            return &source->receivers[i];
    }
    return NULL;
}

static void remember_receiver(pd_source *source, const pd_msg_peer *peer)
{
    if (receiver_of(source, peer->incarnation) != NULL ||
        peer->transfer_address_len > PD_WORKER_ADDRESS_BYTES_MAX)
        return;
    struct pd_source_receiver *receiver = &source->receivers[source->receivers_next];
    source->receivers_next = (source->receivers_next + 1) % PD_SOURCE_RECEIVERS_MAX;
    receiver->peer = *peer;
    receiver->tried_ns = 0;
    memcpy(receiver->address, peer->transfer_address, peer->transfer_address_len);
    receiver->peer.transfer_address = receiver->address;
}

/* A word waits for a link that nobody else may ask for. */
static void connect_owed(pd_source *source, uint64_t now_ns)
{
    for (uint32_t i = 0; i < PD_SOURCE_RECEIVERS_MAX; i++) {
        struct pd_source_receiver *receiver = &source->receivers[i];
        uint64_t incarnation = receiver->peer.incarnation;
        if (incarnation == 0 || now_ns < receiver->tried_ns + source->o.role->lost_after_ns ||
            pd_links_by_incarnation(source->o.links, incarnation) != NULL ||
            !pd_last_words_owes_to(source->o.words, incarnation))
            continue;
        receiver->tried_ns = now_ns;
        if (link_to(source, &receiver->peer, now_ns) == NULL)
            pd_log_debug("msg=\"no link yet for a last word\" receiver=%s", receiver->peer.name);
    }
}

/* ---- requests ---- */

/* NULL, or what is wrong with it. */
static const char *check(const pd_source *source, const pd_msg_ship_request *asked,
                         const pd_source_sequence *sequence, pd_status *status_out)
{
    uint64_t block_tokens = source->o.role->layout.block_tokens;
    uint64_t end = (uint64_t)asked->first_block + asked->blocks_count;

    *status_out = PD_E_INVALID;
    if (asked->blocks_count == 0)
        return "no blocks are asked for";
    if (asked->receiver.incarnation == 0 || asked->receiver.transfer_address_len == 0)
        return "the receiver has no address";
    if (asked->receiver.incarnation == source->o.role->incarnation)
        return "the receiver is this worker";
    if (asked->blocks_count > source->o.role->layout.blocks)
        return "more blocks than there are";
    if (sequence == NULL && asked->hashes_count != end)
        return "not a hash for every block";
    if (sequence != NULL && asked->kv_tokens <= (end - 1) * block_tokens)
        return "more blocks than positions";
    if (sequence != NULL && asked->kv_tokens > sequence->kv_tokens)
        return "more positions than the sequence has";
    *status_out = PD_E_OVERLOAD;
    if (source->count >= source->o.ships_max)
        return "too many shipments are under way";
    *status_out = PD_OK;
    return NULL;
}

/* Of the last block: the cache has full ones only. */
static uint32_t valid_tokens(const pd_source *source, const pd_msg_ship_request *asked,
                             const pd_source_sequence *sequence)
{
    uint32_t block_tokens = source->o.role->layout.block_tokens;
    uint32_t last = asked->first_block + asked->blocks_count - 1;

    if (sequence == NULL || asked->kv_tokens - last * block_tokens > block_tokens)
        return block_tokens;
    return asked->kv_tokens - last * block_tokens;
}

static pd_source_ship *ship_new(const pd_source *source, const pd_msg_ship_request *asked)
{
    uint32_t count = asked->blocks_count;
    size_t words = ((size_t)source->o.role->layout.groups * count + 63) / 64;
    pd_source_ship *ship = pd_calloc(1, sizeof *ship);

    if (ship == NULL)
        return NULL;
    ship->memory = pd_calloc(2 * words + count, sizeof(uint64_t)); /* two blocks are a word */
    if (ship->memory == NULL) {
        pd_free(ship);
        return NULL;
    }
    ship->asked = ship->memory;
    ship->want = ship->asked + words;
    ship->blocks = (pd_block *)(ship->want + words);
    ship->targets = ship->blocks + count;
    memcpy(ship->targets, asked->blocks, count * sizeof *ship->targets);
    ship->key = asked->key;
    memcpy(ship->id, asked->id, sizeof ship->id);
    ship->source_epoch = asked->source_epoch;
    ship->receiver = asked->receiver.incarnation;
    ship->first = asked->first_block;
    ship->count = count;
    ship->reason = "";
    ship->word_owed = true;
    return ship;
}

/* Claims the blocks: true when all are there. */
static bool claim(pd_source *source, pd_source_ship *ship, const pd_msg_ship_request *asked,
                  const pd_source_sequence *sequence)
{
    pd_prefix_cache *cache = source->o.blocks->cache;

    if (sequence != NULL) {
        memcpy(ship->blocks, sequence->blocks + ship->first, ship->count * sizeof *ship->blocks);
        pd_prefix_cache_share(cache, ship->blocks, ship->count, PD_CLAIM_RUNNING);
        return true;
    }
    uint32_t held = pd_prefix_cache_pin(cache, asked->hashes + ship->first, ship->count,
                                        PD_CLAIM_RUNNING, ship->blocks);
    if (held == ship->count)
        return true;
    pd_prefix_cache_drop(cache, ship->blocks, held, PD_CLAIM_RUNNING);
    return false;
}

void pd_source_request(pd_source *source, const pd_msg_ship_request *asked,
                       const pd_source_sequence *sequence, uint64_t now_ns)
{
    pd_status status;

    if (find(source, &asked->key) != NULL) {
        pd_log_req_warn(asked->id, "msg=\"a ship request came twice; the second is ignored\"");
        return;
    }
    const char *wrong = check(source, asked, sequence, &status);
    if (pd_last_words_ended(source->o.words, &asked->key)) {
        wrong = "its receiver waits no more";
        status = PD_E_CANCELLED;
    }
    if (wrong != NULL) {
        pd_source_refuse(source, asked, status, wrong);
        return;
    }
    pd_source_ship *ship = ship_new(source, asked);
    if (ship == NULL) {
        pd_source_refuse(source, asked, PD_E_NOMEM, "no memory for the shipment");
        return;
    }
    if (!claim(source, ship, asked, sequence)) {
        ship_free(ship);
        pd_source_refuse(source, asked, PD_E_NOT_FOUND, "blocks are not in the cache any more");
        return;
    }
    pd_link *link = link_to(source, &asked->receiver, now_ns);
    if (link == NULL) {
        pd_prefix_cache_drop(source->o.blocks->cache, ship->blocks, ship->count, PD_CLAIM_RUNNING);
        ship_free(ship);
        pd_source_refuse(source, asked, PD_E_PEER, "no link to the receiver can be made");
        return;
    }
    remember_receiver(source, &asked->receiver);
    ship->valid_tokens = valid_tokens(source, asked, sequence);
    ship->link_tag = link->tag;
    ship->ticket = source->ticket_next++;
    ship->deadline_ns = now_ns + (asked->deadline_ms == 0 ? deadline_default_ns
                                                          : asked->deadline_ms * PD_NS_PER_MS);
    ship->next = source->head;
    if (ship->next != NULL)
        ship->next->prev = ship;
    source->head = ship;
    source->count++;
    pd_log_req_debug(ship->id, "msg=\"ships blocks it holds\" receiver=%s blocks=%u moves=%d",
                     asked->receiver.name, ship->count, ship->source_epoch != 0);
    go_on(source, ship, now_ns);
}

bool pd_source_again(pd_source *source, const pd_msg_ship_again *asked, uint64_t now_ns)
{
    pd_source_ship *ship = find(source, &asked->key);
    bool fresh = false;

    if (ship == NULL)
        return false;
    ship->word_owed = true;
    if (ship->status != PD_OK) {
        ship->again++;
        return true; /* its last word is to come */
    }
    uint64_t end = (uint64_t)asked->first_block + asked->count;
    if (asked->group >= source->o.role->layout.groups || asked->count == 0 ||
        asked->first_block < ship->first || end > ship->first + ship->count) {
        ship->again++;
        end_early(source, ship, PD_E_INVALID, "blocks were asked for again that were not shipped",
                  now_ns);
        return true;
    }
    for (uint64_t i = asked->first_block; i < end; i++) {
        uint32_t bit = asked->group * ship->count + (uint32_t)(i - ship->first);
        uint64_t mask = UINT64_C(1) << (bit % 64);
        if ((ship->asked[bit / 64] & mask) != 0)
            continue;
        fresh = true;
        ship->asked[bit / 64] |= mask;
        ship->want[bit / 64] |= mask;
    }
    /* The same word twice on the way is one. */
    ship->again += fresh;
    if (fresh)
        go_on(source, ship, now_ns);
    else
        settle(source, ship);
    return true;
}

bool pd_source_release(pd_source *source, const pd_request_key *key, uint32_t *source_epoch_out)
{
    pd_source_ship *ship = find(source, key);

    if (ship == NULL)
        return false;
    *source_epoch_out = ship->source_epoch;
    ship->released = true;
    settle(source, ship);
    return true;
}

bool pd_source_cancel(pd_source *source, const pd_request_key *key, uint64_t now_ns)
{
    pd_source_ship *ship = find(source, key);

    if (ship == NULL)
        return false;
    end_early(source, ship, PD_E_CANCELLED, "cancelled", now_ns);
    return true;
}

void pd_source_end_all(pd_source *source, uint64_t router, const char *reason, uint64_t now_ns)
{
    for (pd_source_ship *ship = source->head, *next; ship != NULL; ship = next) {
        next = ship->next;
        if (router == 0 || ship->key.router == router)
            end_early(source, ship, PD_E_CANCELLED, reason, now_ns);
    }
}

/* ---- the data plane, and time ---- */

bool pd_source_on_sent(pd_source *source, const pd_transfer_event *event, uint64_t now_ns)
{
    if ((event->ticket & PD_SOURCE_TICKET) == 0)
        return false;
    source->o.counters->bytes_shipped += event->bytes; /* what left, of one that failed too */
    pd_source_ship *ship = source->head;
    while (ship != NULL && ship->ticket != event->ticket)
        ship = ship->next;
    if (ship == NULL)
        return true;
    ship->sent++;
    if (event->status != PD_OK) {
        pd_link *link = pd_links_by_tag(source->o.links, ship->link_tag);
        if (ship->status == PD_OK && link != NULL && link->state == PD_LINK_UP)
            drop_link(source, link, "a write failed", now_ns); /* ship with it */
        else
            end_early(source, ship, PD_E_PEER, "blocks could not be written", now_ns);
        return true;
    }
    ship->bytes += event->bytes;
    ship->wire_ns += event->wire_ns;
    pd_cost_observe_ship(source->o.cost, event->bytes, (double)event->wire_ns / 1e6);
    settle(source, ship);
    if (source->ship_waits)
        go_on_all(source, now_ns);
    return true;
}

/* An ending shipment whose puts do not come back holds its blocks: the link is stuck. True when one
 * was closed: the list has changed. */
static bool close_stuck_link(pd_source *source, uint64_t now_ns)
{
    for (pd_source_ship *ship = source->head; ship != NULL; ship = ship->next) {
        if (ship->status == PD_OK || now_ns < ship->ended_ns + source->o.role->lost_after_ns)
            continue;
        pd_link *link = pd_links_by_tag(source->o.links, ship->link_tag);
        if (link == NULL || link->state == PD_LINK_CLOSING)
            continue;
        drop_link(source, link, "writes do not complete", now_ns);
        return true;
    }
    return false;
}

static void tend_link(pd_source *source, pd_link *link, uint64_t now_ns)
{
    if (link->state == PD_LINK_WAITING) {
        uint64_t tag = link->tag;
        pd_status status = pd_links_connect(source->o.links, link);
        if (status != PD_OK && status != PD_E_OVERLOAD)
            pd_source_link_down(source, tag, "no link to the receiver can be made", now_ns);
    } else if (link->state == PD_LINK_UP && now_ns >= link->used_ns + idle_link_ns &&
               !in_use(source, link->tag)) {
        drop_link(source, link, "it was idle", now_ns);
    }
}

void pd_source_tick(pd_source *source, uint64_t now_ns)
{
    for (pd_source_ship *ship = source->head, *next; ship != NULL; ship = next) {
        next = ship->next;
        if (ship->status == PD_OK && now_ns >= ship->deadline_ns)
            end_early(source, ship, PD_E_TIMEOUT, "the shipment's deadline has passed", now_ns);
    }
    while (close_stuck_link(source, now_ns))
        ;
    for (uint32_t i = 0; i < source->o.links->count; i++) {
        if (source->o.links->links[i].on_demand)
            tend_link(source, &source->o.links->links[i], now_ns);
    }
    go_on_all(source, now_ns);
    pd_last_words_retry(source->o.words);
    connect_owed(source, now_ns);
}

void pd_source_asked(pd_source *source, const pd_request_key *key, uint64_t receiver,
                     const pd_routers *routers, uint64_t now_ns)
{
    pd_source_ship *ship = find(source, key);

    if (ship != NULL) { /* its end is a last word */
        end_early(source, ship, PD_E_CANCELLED, "its receiver waits no more", now_ns);
        return;
    }
    if (pd_last_words_say_again(source->o.words, key, receiver))
        return; /* it is on its way */
    pd_last_words_end(source->o.words, key);
    /* By any router: the request's own may be lost. */
    pd_message message = {
        .kind = PD_MSG_SHIP_DONE,
        .ship_done = {.key = *key, .status = PD_E_NOT_FOUND, .again = 1, .receiver = receiver}};
    snprintf(message.ship_done.reason, sizeof message.ship_done.reason, "nothing is held for it");
    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        const pd_router_seen *router = &routers->entries[i];
        if (router->router != 0 && !router->lost)
            source->o.sink->send(source->o.sink->ctx, router->router, &message);
    }
}

void pd_source_tell_lost(pd_source *source, pd_routers *routers,
                         bool (*busy)(const void *ctx, uint64_t router), const void *ctx,
                         uint64_t now_ns)
{
    enum { TIMES = 10 };

    for (uint32_t i = 0; i < PD_ROUTERS_MAX; i++) {
        pd_router_seen *router = &routers->entries[i];
        if (router->router == 0 || !router->lost || router->said_count >= TIMES ||
            (router->said_count > 0 && now_ns < router->said_ns + source->o.role->lost_after_ns) ||
            pd_source_serves(source, router->router) || (busy != NULL && busy(ctx, router->router)))
            continue;
        router->said_count++;
        router->said_ns = now_ns;
        pd_last_words_everywhere(
            source->o.words, &(pd_request_key){.router = router->router, .epoch = router->session});
    }
}

void pd_source_audit(const pd_source *source, pd_audit *audit)
{
    for (const pd_source_ship *ship = source->head; ship != NULL; ship = ship->next)
        pd_audit_add(audit, &ship->key, PD_AUDIT_HOLDING, ship->count);
}
