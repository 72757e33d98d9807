/* Decode workers with too little memory, a router that moves or requeues whom they suspend, and the
 * data plane between them: every answer is right to its last token, whatever becomes of it.
 *
 * A pool holds the token whose KV would lie there, as in world.h; prompts are written by the test,
 * in the place of a prefill worker. */
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/kv/prefix_hash.h"
#include "common/worker/address.h"
#include "decode-worker/decode.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum {
    WORKERS = 2,
    BLOCK_TOKENS = 16,
    GROUPS = 2,
    VOCAB = 1000,
    TOKENS_MAX = 320,
    JOBS_MAX = 100,
    LETTERS_MAX = 256,
    PARCELS_MAX = 64,
    END_EVERY = 20, /* tokens that end an answer are its multiples */
    BLOCKS_MAX = 64,
};

#define ROUTER    UINT64_C(5)
#define PREFILLER UINT64_C(50) /* the test's own incarnation, as a sender */

typedef struct letter {
    pd_message message;
    uint32_t from;
    union {
        pd_block blocks[BLOCKS_MAX];
        pd_step_token tokens[BLOCKS_MAX];
        pd_audit_entry entries[128];
    };
} letter;

/* A shipment, an abort or a link's word under way. */
typedef struct parcel {
    pd_transfer_event_kind kind; /* SENT: a shipment or an abort; else a link's event */
    uint32_t from, to;
    uint64_t tag;
    pd_notice notice;
    uint64_t ticket;
    bool dropped;
    pd_block sources[BLOCKS_MAX], targets[BLOCKS_MAX];
} parcel;

typedef struct worker {
    pd_role_core *core;
    pd_role_options options;
    pd_step *running;
    uint32_t *pool; /* [groups][blocks][block_tokens] token + 1 */
    struct cluster *c;
    struct {
        uint64_t tag;
        uint32_t to;
        bool up;
    } links[16]; /* by peer */
    uint32_t links_count;
    uint64_t suspended, moved;
} worker;

typedef enum phase { ASKS, LEASED, RUNS, MOVES, OVER } phase;

typedef struct job {
    phase phase;
    pd_request_key key; /* of the attempt */
    uint32_t tokens[TOKENS_MAX + 1];
    uint32_t prompt, count, answer_max; /* count: prompt and answer so far */
    int32_t priority;
    uint32_t at, source; /* workers */
    uint32_t kv_tokens;  /* that move */
    uint32_t attempts;
    bool stops; /* an end token ends its answer */
    bool cancelled;
    uint64_t due_ns;
} job;

typedef struct cluster {
    uint64_t seed, now_ns;
    worker workers[WORKERS];
    letter letters[LETTERS_MAX];
    uint32_t letters_count;
    parcel parcels[PARCELS_MAX];
    uint32_t parcels_count;
    job jobs[JOBS_MAX];
    uint32_t jobs_count;
    uint32_t moves_begun, moves_done, kept, failures, links_cut;
    bool cut_links, only_keep;
    pd_msg_audit_reply audit; /* the last one */
    uint64_t audit_blocks;
} cluster;

static uint32_t below(cluster *c, uint32_t limit)
{
    return (uint32_t)(pd_random_next(&c->seed) % limit);
}

static uint32_t *slot(const worker *w, uint32_t group, pd_block block, uint32_t at)
{
    assert_true(block < w->options.layout.blocks);
    return w->pool + ((size_t)group * w->options.layout.blocks + block) * BLOCK_TOKENS + at;
}

static bool over(const job *j)
{
    return j->count - j->prompt == j->answer_max ||
           (j->stops && j->count > j->prompt && j->tokens[j->count - 1] % END_EVERY == 0);
}

static uint32_t next_token(const uint32_t *tokens, uint32_t count)
{
    return (uint32_t)(pd_hash64(tokens, count * sizeof *tokens, 7) % VOCAB);
}

/* ---- what a core asks for ---- */

static void on_send(void *ctx, uint64_t router, const pd_message *message)
{
    worker *w = ctx;
    cluster *c = w->c;

    assert_true(router == ROUTER);
    if (message->kind == PD_MSG_KV_EVENTS)
        return;
    assert_true(c->letters_count < LETTERS_MAX);
    letter *l = &c->letters[c->letters_count++];
    l->message = *message;
    l->from = (uint32_t)(w - c->workers);
    if (message->kind == PD_MSG_LEASE_REPLY && message->lease_reply.blocks_count > 0)
        memcpy(l->blocks, message->lease_reply.blocks,
               message->lease_reply.blocks_count * sizeof *l->blocks);
    else if (message->kind == PD_MSG_STEP_TOKENS)
        memcpy(l->tokens, message->step_tokens.tokens,
               message->step_tokens.tokens_count * sizeof *l->tokens);
    else if (message->kind == PD_MSG_AUDIT_REPLY)
        memcpy(l->entries, message->audit_reply.entries,
               message->audit_reply.entries_count * sizeof *l->entries);
}

static void on_run(void *ctx, pd_step *step)
{
    worker *w = ctx;

    assert_null(w->running);
    w->running = step;
    step->started_ns = w->c->now_ns;
}

static parcel *post(cluster *c)
{
    assert_true(c->parcels_count < PARCELS_MAX);
    parcel *p = &c->parcels[c->parcels_count++];
    memset(p, 0, sizeof *p);
    return p;
}

static pd_status on_connect(void *ctx, const void *address, size_t bytes, uint64_t tag,
                            pd_peer *peer_out)
{
    worker *w = ctx;
    pd_worker_address parsed;

    assert_int_equal(pd_worker_address_unpack(address, bytes, &parsed), PD_OK);
    assert_true(w->links_count < 16);
    *peer_out = w->links_count;
    w->links[w->links_count].tag = tag;
    memcpy(&w->links[w->links_count++].to, parsed.transfer, 4);
    *post(w->c) =
        (parcel){.kind = PD_TRANSFER_CONNECTED, .from = (uint32_t)(w - w->c->workers), .tag = tag};
    return PD_OK;
}

/* What is under way by that link does not land. */
static void on_close(void *ctx, pd_peer peer)
{
    worker *w = ctx;
    uint32_t from = (uint32_t)(w - w->c->workers);

    w->links[peer].up = false;
    for (uint32_t i = 0; i < w->c->parcels_count; i++) {
        parcel *p = &w->c->parcels[i];
        if (p->from == from && p->tag == w->links[peer].tag && p->kind == PD_TRANSFER_SENT)
            p->dropped = true;
    }
    *post(w->c) = (parcel){.kind = PD_TRANSFER_CLOSED, .from = from, .tag = w->links[peer].tag};
}

static pd_status on_notify(void *ctx, pd_peer peer, const pd_notice *notice)
{
    worker *w = ctx;

    assert_true(w->links[peer].up);
    *post(w->c) = (parcel){.kind = PD_TRANSFER_SENT,
                           .from = (uint32_t)(w - w->c->workers),
                           .to = w->links[peer].to,
                           .tag = w->links[peer].tag,
                           .notice = *notice};
    return PD_OK;
}

static pd_status on_ship(void *ctx, const pd_shipment *s)
{
    worker *w = ctx;

    assert_true(w->links[s->peer].up);
    if (below(w->c, 8) == 0)
        return PD_E_OVERLOAD;
    parcel *p = post(w->c);
    p->kind = PD_TRANSFER_SENT;
    p->from = (uint32_t)(w - w->c->workers);
    p->to = w->links[s->peer].to;
    p->tag = w->links[s->peer].tag;
    p->ticket = s->ticket;
    p->notice = (pd_notice){.kind = PD_NOTICE_BLOCKS,
                            .key = s->key,
                            .sender = w->options.incarnation,
                            .receiver = s->receiver,
                            .group = s->group_first,
                            .groups = s->groups,
                            .first_block = s->first,
                            .count = s->count,
                            .valid_tokens = s->valid_tokens,
                            .slices = 1,
                            .again = s->again};
    memcpy(p->sources, s->sources, s->count * sizeof *s->sources);
    memcpy(p->targets, s->targets, s->count * sizeof *s->targets);
    return PD_OK;
}

static void on_unship(void *ctx, uint64_t ticket)
{
    worker *w = ctx;

    for (uint32_t i = 0; i < w->c->parcels_count; i++) {
        if (w->c->parcels[i].ticket == ticket && below(w->c, 2) == 0)
            w->c->parcels[i].dropped = true;
    }
}

/* ---- the data plane ---- */

static void notify(worker *w, const pd_notice *notice)
{
    static pd_transfer_event event;

    event = (pd_transfer_event){.kind = PD_TRANSFER_NOTICE};
    event.notice_len = pd_notice_pack(notice, event.notice);
    decode_role.on_transfer(w->core, &event, w->c->now_ns);
}

static bool deliver(cluster *c)
{
    static pd_transfer_event event;

    if (c->parcels_count == 0)
        return false;
    parcel p = c->parcels[0];
    memmove(c->parcels, c->parcels + 1, --c->parcels_count * sizeof *c->parcels);
    worker *from = &c->workers[p.from], *to = &c->workers[p.to];
    event = (pd_transfer_event){.kind = p.kind, .tag = p.tag, .ticket = p.ticket};
    if (p.kind == PD_TRANSFER_CONNECTED) {
        for (uint32_t i = 0; i < from->links_count; i++)
            from->links[i].up = from->links[i].up || from->links[i].tag == p.tag;
    } else if (p.kind == PD_TRANSFER_SENT && p.dropped) {
        event.status = PD_E_CANCELLED;
    } else if (p.kind == PD_TRANSFER_SENT) {
        event.bytes = p.ticket != 0 ? 1000 : 0;
        event.wire_ns = 1000;
        for (uint32_t g = 0; g < p.notice.groups; g++) {
            for (uint32_t i = 0; i < p.notice.count; i++)
                memcpy(slot(to, p.notice.group + g, p.targets[i], 0),
                       slot(from, p.notice.group + g, p.sources[i], 0),
                       BLOCK_TOKENS * sizeof(uint32_t));
        }
        notify(to, &p.notice);
        event.kind = PD_TRANSFER_SENT;
    }
    decode_role.on_transfer(from->core, &event, c->now_ns);
    return true;
}

static void cut_a_link(cluster *c)
{
    worker *w = &c->workers[below(c, WORKERS)];
    pd_transfer_event event = {.kind = PD_TRANSFER_PEER_DOWN, .status = PD_E_PEER};

    for (uint32_t i = 0; i < w->links_count; i++) {
        if (!w->links[i].up || below(c, 2) == 0)
            continue;
        event.tag = w->links[i].tag;
        c->links_cut++;
        decode_role.on_transfer(w->core, &event, c->now_ns);
        return;
    }
}

/* ---- steps ---- */

static bool end_step(worker *w)
{
    pd_step *step = w->running;
    uint32_t tokens[TOKENS_MAX + 1];

    if (step == NULL)
        return false;
    for (uint32_t i = 0; i < step->slices_count; i++) {
        pd_step_slice *s = &step->slices[i];
        for (uint32_t at = 0; at < s->position; at++) {
            for (uint32_t g = 0; g < GROUPS; g++) {
                uint32_t value = *slot(w, g, s->blocks[at / BLOCK_TOKENS], at % BLOCK_TOKENS);
                assert_int_not_equal(value, 0);
                tokens[at] = g == 0 ? value - 1 : tokens[at];
                assert_int_equal(tokens[at], value - 1);
            }
        }
        memcpy(tokens + s->position, s->tokens, s->count * sizeof *tokens);
        for (uint32_t t = 0; t < s->count; t++) {
            uint32_t at = s->position + t;
            for (uint32_t g = 0; g < GROUPS; g++)
                *slot(w, g, s->blocks[at / BLOCK_TOKENS], at % BLOCK_TOKENS) = s->tokens[t] + 1;
        }
        if (s->want_token)
            s->token_out = next_token(tokens, s->position + s->count);
    }
    w->running = NULL;
    step->finished_ns = w->c->now_ns;
    decode_role.on_step_done(w->core, step, w->c->now_ns);
    return true;
}

/* ---- the router ---- */

static void to(cluster *c, uint32_t at, const pd_message *message)
{
    decode_role.on_message(c->workers[at].core, ROUTER, message, c->now_ns);
}

static void cancel(cluster *c, uint32_t at, pd_request_key key, bool unwritten, bool keep)
{
    pd_message message = {.kind = PD_MSG_CANCEL};

    message.cancel = (pd_msg_cancel){.key = key, .unwritten = unwritten, .keep = keep};
    to(c, at, &message);
}

static uint32_t hash(const job *j, uint32_t tokens, pd_hash128 *hashes)
{
    return pd_prefix_hash_fill((pd_hash128){1, 2}, BLOCK_TOKENS, j->tokens, tokens, hashes,
                               BLOCKS_MAX);
}

/* tokens land there. source: WORKERS when the test itself writes. */
static void ask_lease(cluster *c, job *j, uint32_t at, uint32_t tokens, uint32_t source)
{
    pd_message message = {.kind = PD_MSG_LEASE_REQUEST};
    pd_hash128 hashes[BLOCKS_MAX];

    j->at = at;
    j->source = source;
    j->key.epoch++;
    j->attempts++;
    message.lease_request = (pd_msg_lease_request){
        .key = j->key,
        .bind = true,
        .priority = j->priority,
        .prompt_tokens = tokens,
        .max_tokens = j->answer_max - (tokens - j->prompt),
        .hashes = hashes,
        .hashes_count = hash(j, tokens, hashes),
        .ttl_ms = 1000,
    };
    message.lease_request.sender.incarnation =
        source == WORKERS ? PREFILLER : c->workers[source].options.incarnation;
    to(c, at, &message);
}

static void begin(cluster *c, job *j)
{
    j->phase = LEASED;
    /* mostly to the first, which is the smaller one: the other can take what it cannot hold */
    ask_lease(c, j, below(c, 5) == 0 ? 1 : 0, j->count, WORKERS);
}

static void start(cluster *c, const job *j)
{
    pd_message message = {.kind = PD_MSG_DECODE_START};
    uint32_t ends[VOCAB / END_EVERY];

    for (uint32_t i = 0; i < VOCAB / END_EVERY; i++)
        ends[i] = i * END_EVERY;

    message.decode_start =
        (pd_msg_decode_start){.key = j->key,
                              .tokens = j->tokens,
                              .tokens_count = j->count,
                              .prompt_tokens = j->prompt,
                              .max_tokens = j->answer_max,
                              .end_tokens = ends,
                              .end_tokens_count = j->stops ? VOCAB / END_EVERY : 0,
                              .landing_ms = 3000};
    to(c, j->at, &message);
}

/* The test computes the prompt, writes it, and draws the next token. */
static void write_prompt(cluster *c, job *j, const pd_msg_lease_reply *reply)
{
    worker *w = &c->workers[j->at];
    uint32_t tokens = j->count;
    pd_request_key key = j->key;

    for (uint32_t at = reply->held_blocks * BLOCK_TOKENS; at < tokens; at++) {
        pd_block block = reply->blocks[at / BLOCK_TOKENS - reply->held_blocks];
        for (uint32_t g = 0; g < GROUPS; g++)
            *slot(w, g, block, at % BLOCK_TOKENS) = j->tokens[at] + 1;
    }
    j->tokens[j->count] = next_token(j->tokens, j->count);
    j->count++;
    if (over(j)) {
        j->phase = OVER;
        cancel(c, j->at, key, true, false);
        return;
    }
    j->phase = RUNS;
    start(c, j);
    if (reply->blocks_count > 0)
        notify(w, &(pd_notice){.kind = PD_NOTICE_BLOCKS,
                               .key = key,
                               .sender = PREFILLER,
                               .receiver = w->options.incarnation,
                               .groups = GROUPS,
                               .first_block = reply->held_blocks,
                               .count = reply->blocks_count,
                               .valid_tokens = (tokens - 1) % BLOCK_TOKENS + 1,
                               .slices = 1});
}

static void ask_shipment(cluster *c, job *j, const pd_msg_lease_reply *reply)
{
    pd_message message = {.kind = PD_MSG_SHIP_REQUEST};
    pd_msg_ship_request *asked = &message.ship_request;
    unsigned char bytes[PD_WORKER_ADDRESS_BYTES_MAX];
    pd_worker_address address = {.blocks = 1, .ranks = 1, .transfer = &j->at, .transfer_len = 4};

    asked->key = j->key;
    asked->source_epoch = j->key.epoch - 1;
    snprintf(asked->receiver.name, sizeof asked->receiver.name, "decode-%u", j->at);
    asked->receiver.incarnation = c->workers[j->at].options.incarnation;
    asked->receiver.transfer_address = bytes;
    asked->receiver.transfer_address_len = pd_worker_address_pack(&address, bytes);
    asked->first_block = reply->held_blocks;
    asked->blocks = reply->blocks;
    asked->blocks_count = reply->blocks_count;
    asked->kv_tokens = j->kv_tokens;
    asked->deadline_ms = 3000;
    c->moves_begun++;
    if (reply->blocks_count > 0)
        to(c, j->source, &message);
    start(c, j);
}

/* What it has stays as cache; it begins again from its tokens. */
static void requeue(cluster *c, job *j)
{
    if (j->source < WORKERS) {
        pd_request_key old = j->key;
        cancel(c, j->source, old, false, false); /* the shipment */
        old.epoch--;
        cancel(c, j->source, old, true, true); /* the sequence */
    }
    cancel(c, j->at, j->key, j->source == WORKERS, true);
    j->source = WORKERS;
    j->phase = ASKS;
    j->due_ns = c->now_ns + below(c, 300) * PD_NS_PER_MS;
}

static void on_lease_reply(cluster *c, job *j, const pd_msg_lease_reply *reply)
{
    if (reply->status != PD_OK) {
        assert_int_equal(reply->status, PD_E_OVERLOAD);
        assert_true(reply->retry_after_ms > 0);
        requeue(c, j);
    } else if (j->phase == LEASED) {
        write_prompt(c, j, reply);
    } else {
        ask_shipment(c, j, reply);
    }
}

static void on_suspended(cluster *c, job *j, const pd_msg_suspended *said)
{
    assert_int_equal(said->answered, j->count - j->prompt);
    assert_int_equal(said->kv_tokens, j->count - 1);
    if (c->only_keep || below(c, 3) == 0) {
        c->kept++;
        requeue(c, j);
        return;
    }
    j->phase = MOVES;
    j->kv_tokens = said->kv_tokens;
    uint32_t source = j->at;
    ask_lease(c, j, (source + 1) % WORKERS, j->kv_tokens, source);
}

static void on_landed(cluster *c, job *j)
{
    pd_message message = {.kind = PD_MSG_RELEASE};

    if (j->phase != MOVES)
        return;
    c->moves_done++;
    message.release.key = j->key;
    to(c, j->source, &message);
    pd_request_key old = j->key;
    old.epoch--;
    cancel(c, j->source, old, true,
           true); /* no harm when it is gone; all was held when it is not */
    j->source = WORKERS;
    j->phase = RUNS;
}

static void on_token(cluster *c, const pd_step_token *token)
{
    job *j = &c->jobs[token->key.number - 1];

    if (j->phase == OVER || token->key.epoch != j->key.epoch)
        return;
    assert_int_equal(token->index, j->count - j->prompt);
    assert_int_equal(token->token, next_token(j->tokens, j->count));
    j->tokens[j->count++] = token->token;
    if (token->finish != PD_FINISH_NONE) {
        assert_true(over(j));
        j->phase = OVER;
    }
}

static bool read_letter(cluster *c)
{
    static letter l;

    if (c->letters_count == 0)
        return false;
    l = c->letters[0];
    memmove(c->letters, c->letters + 1, --c->letters_count * sizeof *c->letters);
    pd_message *m = &l.message;
    if (m->kind == PD_MSG_STEP_TOKENS) {
        for (uint32_t i = 0; i < m->step_tokens.tokens_count; i++)
            on_token(c, &l.tokens[i]);
        return true;
    }
    if (m->kind == PD_MSG_AUDIT_REPLY) {
        c->audit = m->audit_reply;
        c->audit_blocks = 0;
        for (uint32_t i = 0; i < m->audit_reply.entries_count; i++)
            c->audit_blocks += l.entries[i].blocks;
        return true;
    }
    const pd_request_key *key = m->kind == PD_MSG_LEASE_REPLY ? &m->lease_reply.key
                                : m->kind == PD_MSG_SUSPENDED ? &m->suspended.key
                                : m->kind == PD_MSG_LANDED    ? &m->landed.key
                                : m->kind == PD_MSG_SHIP_DONE ? &m->ship_done.key
                                                              : &m->decode_failed.key;
    job *j = &c->jobs[key->number - 1];
    bool current = j->phase != OVER && j->phase != ASKS && key->epoch == j->key.epoch;
    switch (m->kind) {
    case PD_MSG_LEASE_REPLY:
        m->lease_reply.blocks = l.blocks;
        if (current)
            on_lease_reply(c, j, &m->lease_reply);
        break;
    case PD_MSG_SUSPENDED:
        if (current && j->phase == RUNS)
            on_suspended(c, j, &m->suspended);
        break;
    case PD_MSG_LANDED:
        if (current)
            on_landed(c, j);
        break;
    case PD_MSG_SHIP_DONE:
        if (current && j->phase == MOVES && m->ship_done.status != PD_OK)
            requeue(c, j);
        /* The last word: who waited for it hears it. */
        if (m->ship_done.status != PD_OK && !m->ship_done.may_land)
            cancel(c, (l.from + 1) % WORKERS, *key, true, false);
        break;
    case PD_MSG_DECODE_FAILED:
        c->failures++;
        if (current)
            requeue(c, j);
        break;
    default: fail_msg("a core sent %s", pd_message_name(m->kind));
    }
    return true;
}

/* ---- the whole ---- */

static void make_worker(cluster *c, uint32_t at, uint32_t blocks, uint32_t batch)
{
    static const char *const names[WORKERS] = {"decode-0", "decode-1"};
    worker *w = &c->workers[at];
    pd_role_sink sink = {.ctx = w,
                         .send = on_send,
                         .run = on_run,
                         .connect = on_connect,
                         .close = on_close,
                         .notify = on_notify,
                         .ship = on_ship,
                         .unship = on_unship};

    w->c = c;
    w->options = (pd_role_options){.name = names[at],
                                   .incarnation = 100 + at,
                                   .vocab = VOCAB,
                                   .context_max = TOKENS_MAX,
                                   .max_batch = batch,
                                   .queue_max = 32,
                                   .chunk_tokens = 32,
                                   .peers_max = 4,
                                   .prefix_cache = true,
                                   .lost_after_ns = PD_NS_PER_S};
    w->options.layout = (pd_kv_layout){.layers = GROUPS,
                                       .kv_heads = 1,
                                       .ranks = 1,
                                       .rank_heads = 1,
                                       .head_dim = 1,
                                       .block_tokens = BLOCK_TOKENS,
                                       .group_layers = 1,
                                       .groups = GROUPS,
                                       .blocks = blocks};
    w->pool = pd_calloc((size_t)GROUPS * blocks, BLOCK_TOKENS * sizeof(uint32_t));
    assert_non_null(w->pool);
    assert_int_equal(decode_role.create(&w->options, &sink, &w->core), PD_OK);
    pd_message message = {.kind = PD_MSG_WELCOME};
    message.welcome =
        (pd_msg_welcome){.router = ROUTER, .heartbeat_ms = 100, .lost_after_ms = 1000};
    to(c, at, &message);
}

static cluster *cluster_create(uint64_t seed)
{
    cluster *c = pd_calloc(1, sizeof *c);

    assert_non_null(c);
    c->seed = seed;
    c->now_ns = PD_NS_PER_S;
    c->cut_links = seed % 3 == 0;
    c->only_keep = seed % 7 == 0;
    uint32_t batch = 2 + below(c, 8);
    for (uint32_t at = 0; at < WORKERS; at++)
        make_worker(c, at, 20 + below(c, at == 0 ? 40 : 100), batch);
    c->jobs_count = JOBS_MAX / 2 + below(c, JOBS_MAX / 2);
    for (uint32_t i = 0; i < c->jobs_count; i++) {
        job *j = &c->jobs[i];
        j->key = (pd_request_key){.router = ROUTER, .number = i + 1};
        j->source = WORKERS;
        j->prompt = j->count = 1 + below(c, 120);
        j->answer_max = 2 + below(c, 190);
        j->stops = i < c->jobs_count / 2 || below(c, 3) == 0; /* answers become longer than known */
        j->priority = (int32_t)below(c, 3) - 1;
        uint64_t kind = below(c, 2) == 0 ? below(c, 2) : 10 + i;
        for (uint32_t t = 0; t < j->prompt; t++)
            j->tokens[t] = (uint32_t)(pd_mix64(kind * 1000 + t) % VOCAB);
        j->due_ns = c->now_ns + (i * 25 + below(c, 200)) * PD_NS_PER_MS;
    }
    return c;
}

static void cluster_destroy(cluster *c)
{
    for (uint32_t at = 0; at < WORKERS; at++) {
        decode_role.destroy(c->workers[at].core);
        pd_free(c->workers[at].pool);
    }
    pd_free(c);
}

/* Every key that a worker has is one of its ledger's blocks' claims. */
static void audit(cluster *c, uint32_t at)
{
    pd_message message = {.kind = PD_MSG_AUDIT};
    pd_ledger ledger = decode_role.ledger(c->workers[at].core);

    message.audit.serial = 9;
    to(c, at, &message);
    while (read_letter(c)) {
    }
    assert_int_equal(c->audit.serial, 9);
    assert_true(c->audit.incarnation == 100 + at);
    assert_true(c->audit_blocks >= ledger.leased + ledger.running + ledger.quarantined);
}

static void tick(cluster *c)
{
    pd_message message = {.kind = PD_MSG_ROUTER_HEARTBEAT};

    c->now_ns += 20 * PD_NS_PER_MS;
    for (uint32_t at = 0; at < WORKERS; at++) {
        to(c, at, &message);
        decode_role.on_tick(c->workers[at].core, c->now_ns);
    }
    for (uint32_t i = 0; i < c->jobs_count; i++) {
        job *j = &c->jobs[i];
        if (j->phase == ASKS && c->now_ns >= j->due_ns)
            begin(c, j);
        else if (j->phase != OVER && below(c, 4000) == 0) { /* its client leaves */
            j->cancelled = true;
            requeue(c, j);
            j->phase = OVER;
        }
    }
    if (c->cut_links && below(c, 4) == 0)
        cut_a_link(c);
}

static bool run(cluster *c)
{
    for (uint32_t turn = 0; turn < 60000; turn++) {
        bool left = c->parcels_count > 0 || c->letters_count > 0;
        for (uint32_t i = 0; i < c->jobs_count; i++)
            left = left || c->jobs[i].phase != OVER;
        for (uint32_t at = 0; at < WORKERS; at++)
            left = left || !decode_role.idle(c->workers[at].core);
        if (!left)
            return true;
        for (uint32_t n = 1 + below(c, 12); n > 0; n--) {
            switch (below(c, 4)) {
            case 0: end_step(&c->workers[0]); break;
            case 1: end_step(&c->workers[1]); break;
            case 2: deliver(c); break;
            default: read_letter(c);
            }
        }
        tick(c);
        if (turn % 50 == 0)
            audit(c, turn / 50 % WORKERS);
    }
    return false;
}

static void every_answer_is_right_whatever_is_moved(void **state)
{
    (void)state;
    uint64_t begun = 0, done = 0, kept = 0, failures = 0, cut = 0, suspended = 0, moved = 0,
             jobs = 0;

    for (uint64_t seed = 1; seed <= 150; seed++) {
        cluster *c = cluster_create(seed);
        if (!run(c))
            fail_msg("seed %llu: not over", (unsigned long long)seed);
        for (uint32_t i = 0; i < c->jobs_count; i++)
            assert_true(c->jobs[i].cancelled || over(&c->jobs[i]));
        for (uint32_t at = 0; at < WORKERS; at++) {
            pd_ledger ledger = decode_role.ledger(c->workers[at].core);
            pd_role_counters counters = decode_role.counters(c->workers[at].core);
            assert_int_equal(ledger.free + ledger.cached + ledger.quarantined, ledger.total);
            if (!c->cut_links) /* else a last word may wait for the next link */
                assert_int_equal(ledger.quarantined, 0);
            suspended += counters.suspended;
            moved += counters.moved;
        }
        begun += c->moves_begun;
        done += c->moves_done;
        kept += c->kept;
        failures += c->failures;
        cut += c->links_cut;
        jobs += c->jobs_count;
        cluster_destroy(c);
    }
    print_message("# %llu requests: %llu suspended, %llu moves begun, %llu landed, %llu released, "
                  "%llu kept as cache, %llu failures, %llu links cut\n",
                  (unsigned long long)jobs, (unsigned long long)suspended,
                  (unsigned long long)begun, (unsigned long long)done, (unsigned long long)moved,
                  (unsigned long long)kept, (unsigned long long)failures, (unsigned long long)cut);
    assert_true(done > 50 && kept > 20 && cut > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_answer_is_right_whatever_is_moved),
    };

    pd_log_init("test", PD_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
