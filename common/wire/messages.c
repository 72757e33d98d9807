#include "common/wire/messages.h"
#include "common/base/buf.h"
#include "common/base/mem.h"

#include "messages.pb-c.h"

#include <math.h>
#include <string.h>

/* Of a hold: protobuf-c's structs and our arrays are a few times the bytes that came. */
enum { HOLD_BYTES_EXTRA = 1 << 16, HOLD_GROWTH = 16, HASH_BYTES = 16 };

struct pd_message_hold {
    pd_arena *arena;
};

const char *pd_role_name(pd_role role)
{
    return role == PD_ROLE_PREFILL ? "prefill" : role == PD_ROLE_DECODE ? "decode" : "unknown";
}

const char *pd_message_name(pd_message_kind kind)
{
    static const char *const names[PD_MESSAGE_KINDS] = {
        [PD_MSG_NONE] = "none",
        [PD_MSG_HELLO] = "hello",
        [PD_MSG_HEARTBEAT] = "heartbeat",
        [PD_MSG_LINK] = "link",
        [PD_MSG_LEASE_REPLY] = "lease_reply",
        [PD_MSG_PREFILL_DONE] = "prefill_done",
        [PD_MSG_DECODE_FAILED] = "decode_failed",
        [PD_MSG_BYE] = "bye",
        [PD_MSG_STEP_TOKENS] = "step_tokens",
        [PD_MSG_KV_EVENTS] = "kv_events",
        [PD_MSG_WELCOME] = "welcome",
        [PD_MSG_REFUSED] = "refused",
        [PD_MSG_ROUTER_HEARTBEAT] = "router_heartbeat",
        [PD_MSG_PEER_UP] = "peer_up",
        [PD_MSG_PEER_GONE] = "peer_gone",
        [PD_MSG_LEASE_REQUEST] = "lease_request",
        [PD_MSG_PREFILL_REQUEST] = "prefill_request",
        [PD_MSG_DECODE_START] = "decode_start",
        [PD_MSG_CANCEL] = "cancel",
        [PD_MSG_SNAPSHOT_REQUEST] = "snapshot_request",
    };
    return (unsigned)kind < PD_MESSAGE_KINDS ? names[kind] : "unknown";
}

/* ---- packing: our struct to protobuf-c's, which borrows ---- */

/* What a packed message points to; lives on the packer's stack and in one scratch allocation. */
typedef struct packing {
    Kvw__Envelope envelope;
    Kvw__Key key;
    Kvw__Sampling sampling;
    Kvw__Ledger ledger;
    uint8_t fingerprint[HASH_BYTES];
    void *scratch; /* freed after packing */
    union {
        Kvw__Hello hello;
        Kvw__Heartbeat heartbeat;
        Kvw__Link link;
        Kvw__LeaseReply lease_reply;
        Kvw__PrefillDone prefill_done;
        Kvw__DecodeFailed decode_failed;
        Kvw__Bye bye;
        Kvw__StepTokens step_tokens;
        Kvw__KvEvents kv_events;
        Kvw__Welcome welcome;
        Kvw__Refused refused;
        Kvw__RouterHeartbeat router_heartbeat;
        Kvw__PeerUp peer_up;
        Kvw__PeerGone peer_gone;
        Kvw__LeaseRequest lease_request;
        Kvw__PrefillRequest prefill_request;
        Kvw__DecodeStart decode_start;
        Kvw__Cancel cancel;
        Kvw__SnapshotRequest snapshot_request;
    } body;
} packing;

static void put_u64(uint8_t *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_u64(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

static void put_hash(uint8_t *bytes, pd_hash128 hash)
{
    put_u64(bytes, hash.lo);
    put_u64(bytes + 8, hash.hi);
}

static pd_hash128 get_hash(const uint8_t *bytes)
{
    return (pd_hash128){.lo = get_u64(bytes), .hi = get_u64(bytes + 8)};
}

static Kvw__Key *pack_key(Kvw__Key *out, const pd_request_key *key)
{
    kvw__key__init(out);
    out->router = key->router;
    out->number = key->number;
    out->epoch = key->epoch;
    return out;
}

static Kvw__Sampling *pack_sampling(packing *pack, const pd_sampling *sampling)
{
    kvw__sampling__init(&pack->sampling);
    pack->sampling.temperature = sampling->temperature;
    pack->sampling.top_p = sampling->top_p;
    pack->sampling.top_k = sampling->top_k;
    pack->sampling.seed = sampling->seed;
    pack->sampling.choice = sampling->choice;
    return &pack->sampling;
}

static ProtobufCBinaryData borrow(const void *bytes, size_t len)
{
    return (ProtobufCBinaryData){.len = len, .data = (uint8_t *)(uintptr_t)bytes};
}

static pd_status pack_hashes(packing *pack, const pd_hash128 *hashes, uint32_t count,
                             ProtobufCBinaryData *out)
{
    pack->scratch = pd_malloc((size_t)count * HASH_BYTES);
    if (pack->scratch == NULL)
        return PD_E_NOMEM;
    for (uint32_t i = 0; i < count; i++)
        put_hash((uint8_t *)pack->scratch + (size_t)i * HASH_BYTES, hashes[i]);
    *out = borrow(pack->scratch, (size_t)count * HASH_BYTES);
    return PD_OK;
}

static char *text(const char *bytes)
{
    return (char *)(uintptr_t)bytes; /* protobuf-c's structs are not const; packing only reads */
}

static pd_status pack_hello(packing *pack, const pd_msg_hello *in)
{
    Kvw__Hello *out = &pack->body.hello;
    kvw__hello__init(out);
    out->wire_version = in->wire_version;
    out->name = text(in->name);
    out->role = in->role;
    out->role_epoch = in->role_epoch;
    out->incarnation = in->incarnation;
    out->model = text(in->model);
    put_hash(pack->fingerprint, in->model_fingerprint);
    out->model_fingerprint = borrow(pack->fingerprint, HASH_BYTES);
    out->layout_fingerprint = in->layout_fingerprint;
    out->layout = text(in->layout);
    out->block_tokens = in->block_tokens;
    out->dp_rank = in->dp_rank;
    out->context_max = in->context_max;
    out->max_batch = in->max_batch;
    out->queue_max = in->queue_max;
    out->blocks = in->blocks;
    out->backend = text(in->backend);
    out->transfer = text(in->transfer);
    out->transfer_address = borrow(in->transfer_address, in->transfer_address_len);
    out->pid = in->pid;
    out->host = in->host;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_HELLO;
    pack->envelope.hello = out;
    return PD_OK;
}

static pd_status pack_heartbeat(packing *pack, const pd_msg_heartbeat *in)
{
    Kvw__Heartbeat *out = &pack->body.heartbeat;
    kvw__heartbeat__init(out);
    kvw__ledger__init(&pack->ledger);
    pack->ledger.total = in->ledger.total;
    pack->ledger.free = in->ledger.free;
    pack->ledger.cached = in->ledger.cached;
    pack->ledger.leased = in->ledger.leased;
    pack->ledger.running = in->ledger.running;
    pack->ledger.quarantined = in->ledger.quarantined;
    out->ledger = &pack->ledger;
    out->incarnation = in->incarnation;
    out->role_epoch = in->role_epoch;
    out->step = in->step;
    out->busy = in->busy;
    out->queue_ms = in->queue_ms;
    out->running = in->running;
    out->waiting = in->waiting;
    out->events_sequence = in->events_sequence;
    out->warm = in->warm;
    out->draining = in->draining;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_HEARTBEAT;
    pack->envelope.heartbeat = out;
    return PD_OK;
}

static pd_status pack_link(packing *pack, const pd_msg_link *in)
{
    Kvw__Link *out = &pack->body.link;
    kvw__link__init(out);
    out->peer = text(in->peer);
    out->peer_incarnation = in->peer_incarnation;
    out->up = in->up;
    out->lane = text(in->lane);
    out->reason = text(in->reason);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_LINK;
    pack->envelope.link = out;
    return PD_OK;
}

static pd_status pack_lease_reply(packing *pack, const pd_msg_lease_reply *in)
{
    Kvw__LeaseReply *out = &pack->body.lease_reply;
    kvw__lease_reply__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->status = in->status;
    out->held_blocks = in->held_blocks;
    out->blocks = (uint32_t *)(uintptr_t)in->blocks;
    out->n_blocks = in->blocks_count;
    out->retry_after_ms = in->retry_after_ms;
    out->reason = text(in->reason);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_LEASE_REPLY;
    pack->envelope.lease_reply = out;
    return PD_OK;
}

static pd_status pack_prefill_done(packing *pack, const pd_msg_prefill_done *in)
{
    Kvw__PrefillDone *out = &pack->body.prefill_done;
    kvw__prefill_done__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->status = in->status;
    out->cached_tokens = in->cached_tokens;
    out->computed_tokens = in->computed_tokens;
    out->queue_ms = in->queue_ms;
    out->compute_ms = in->compute_ms;
    out->ship_ms = in->ship_ms;
    out->ship_bytes = in->ship_bytes;
    out->reason = text(in->reason);
    out->may_land = in->may_land;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_PREFILL_DONE;
    pack->envelope.prefill_done = out;
    return PD_OK;
}

static pd_status pack_decode_failed(packing *pack, const pd_msg_decode_failed *in)
{
    Kvw__DecodeFailed *out = &pack->body.decode_failed;
    kvw__decode_failed__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->status = in->status;
    out->reason = text(in->reason);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_DECODE_FAILED;
    pack->envelope.decode_failed = out;
    return PD_OK;
}

static pd_status pack_step_tokens(packing *pack, const pd_msg_step_tokens *in)
{
    typedef struct item {
        Kvw__StepToken token;
        Kvw__Key key;
    } item;
    Kvw__StepTokens *out = &pack->body.step_tokens;
    size_t count = in->tokens_count;

    kvw__step_tokens__init(out);
    pack->scratch = pd_calloc(count, sizeof(item) + sizeof(Kvw__StepToken *));
    if (pack->scratch == NULL)
        return PD_E_NOMEM;
    item *items = pack->scratch;
    Kvw__StepToken **pointers = (Kvw__StepToken **)(items + count);
    for (size_t i = 0; i < count; i++) {
        kvw__step_token__init(&items[i].token);
        items[i].token.key = pack_key(&items[i].key, &in->tokens[i].key);
        items[i].token.index = in->tokens[i].index;
        items[i].token.token = in->tokens[i].token;
        items[i].token.finish = in->tokens[i].finish;
        pointers[i] = &items[i].token;
    }
    out->name = text(in->name);
    out->incarnation = in->incarnation;
    out->step = in->step;
    out->queue_ms = in->queue_ms;
    out->step_ms = in->step_ms;
    out->tokens = pointers;
    out->n_tokens = count;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_STEP_TOKENS;
    pack->envelope.step_tokens = out;
    return PD_OK;
}

static pd_status pack_kv_events(packing *pack, const pd_msg_kv_events *in)
{
    Kvw__KvEvents *out = &pack->body.kv_events;
    size_t count = in->events_count;

    kvw__kv_events__init(out);
    pack->scratch = pd_malloc(count * (1 + HASH_BYTES));
    if (pack->scratch == NULL)
        return PD_E_NOMEM;
    uint8_t *kinds = pack->scratch, *hashes = kinds + count;
    for (size_t i = 0; i < count; i++) {
        kinds[i] = (uint8_t)in->events[i].kind;
        put_hash(hashes + i * HASH_BYTES, in->events[i].hash);
    }
    out->name = text(in->name);
    out->incarnation = in->incarnation;
    out->first_sequence = in->first_sequence;
    out->kinds = borrow(kinds, count);
    out->hashes = borrow(hashes, count * HASH_BYTES);
    out->snapshot_first = in->snapshot_first;
    out->snapshot = in->snapshot;
    out->snapshot_last = in->snapshot_last;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_KV_EVENTS;
    pack->envelope.kv_events = out;
    return PD_OK;
}

static pd_status pack_peer_up(packing *pack, const pd_msg_peer_up *in)
{
    Kvw__PeerUp *out = &pack->body.peer_up;
    kvw__peer_up__init(out);
    out->name = text(in->name);
    out->role = in->role;
    out->incarnation = in->incarnation;
    out->transfer_address = borrow(in->transfer_address, in->transfer_address_len);
    out->pid = in->pid;
    out->host = in->host;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_PEER_UP;
    pack->envelope.peer_up = out;
    return PD_OK;
}

static pd_status pack_lease_request(packing *pack, const pd_msg_lease_request *in)
{
    Kvw__LeaseRequest *out = &pack->body.lease_request;
    kvw__lease_request__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->id = text(in->id);
    out->prefill = text(in->prefill);
    out->prefill_incarnation = in->prefill_incarnation;
    out->prompt_tokens = in->prompt_tokens;
    out->max_tokens = in->max_tokens;
    out->ttl_ms = in->ttl_ms;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_LEASE_REQUEST;
    pack->envelope.lease_request = out;
    return pack_hashes(pack, in->hashes, in->hashes_count, &out->hashes);
}

static pd_status pack_prefill_request(packing *pack, const pd_msg_prefill_request *in)
{
    Kvw__PrefillRequest *out = &pack->body.prefill_request;
    kvw__prefill_request__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->id = text(in->id);
    out->tokens = (uint32_t *)(uintptr_t)in->tokens;
    out->n_tokens = in->tokens_count;
    out->sampling = pack_sampling(pack, &in->sampling);
    out->end_tokens = (uint32_t *)(uintptr_t)in->end_tokens;
    out->n_end_tokens = in->end_tokens_count;
    out->max_tokens = in->max_tokens;
    out->ship = in->ship;
    out->decode = text(in->decode);
    out->decode_incarnation = in->decode_incarnation;
    out->held_blocks = in->held_blocks;
    out->blocks = (uint32_t *)(uintptr_t)in->blocks;
    out->n_blocks = in->blocks_count;
    out->deadline_ms = in->deadline_ms;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_PREFILL_REQUEST;
    pack->envelope.prefill_request = out;
    return pack_hashes(pack, in->hashes, in->hashes_count, &out->hashes);
}

static pd_status pack_decode_start(packing *pack, const pd_msg_decode_start *in)
{
    Kvw__DecodeStart *out = &pack->body.decode_start;
    kvw__decode_start__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->id = text(in->id);
    out->tokens = (uint32_t *)(uintptr_t)in->tokens;
    out->n_tokens = in->tokens_count;
    out->prompt_tokens = in->prompt_tokens;
    out->sampling = pack_sampling(pack, &in->sampling);
    out->end_tokens = (uint32_t *)(uintptr_t)in->end_tokens;
    out->n_end_tokens = in->end_tokens_count;
    out->max_tokens = in->max_tokens;
    out->landing_ms = in->landing_ms;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_DECODE_START;
    pack->envelope.decode_start = out;
    return PD_OK;
}

/* The messages of one or two plain fields. */
static pd_status pack_small(packing *pack, const pd_message *in)
{
    Kvw__Envelope *envelope = &pack->envelope;
    switch (in->kind) {
    case PD_MSG_BYE:
        kvw__bye__init(&pack->body.bye);
        pack->body.bye.incarnation = in->bye.incarnation;
        envelope->body_case = KVW__ENVELOPE__BODY_BYE;
        envelope->bye = &pack->body.bye;
        return PD_OK;
    case PD_MSG_WELCOME:
        kvw__welcome__init(&pack->body.welcome);
        pack->body.welcome.router = in->welcome.router;
        pack->body.welcome.heartbeat_ms = in->welcome.heartbeat_ms;
        pack->body.welcome.lost_after_ms = in->welcome.lost_after_ms;
        envelope->body_case = KVW__ENVELOPE__BODY_WELCOME;
        envelope->welcome = &pack->body.welcome;
        return PD_OK;
    case PD_MSG_REFUSED:
        kvw__refused__init(&pack->body.refused);
        pack->body.refused.reason = text(in->refused.reason);
        pack->body.refused.anew = in->refused.anew;
        envelope->body_case = KVW__ENVELOPE__BODY_REFUSED;
        envelope->refused = &pack->body.refused;
        return PD_OK;
    case PD_MSG_ROUTER_HEARTBEAT:
        kvw__router_heartbeat__init(&pack->body.router_heartbeat);
        pack->body.router_heartbeat.router = in->router_heartbeat.router;
        envelope->body_case = KVW__ENVELOPE__BODY_ROUTER_HEARTBEAT;
        envelope->router_heartbeat = &pack->body.router_heartbeat;
        return PD_OK;
    case PD_MSG_PEER_GONE:
        kvw__peer_gone__init(&pack->body.peer_gone);
        pack->body.peer_gone.name = text(in->peer_gone.name);
        pack->body.peer_gone.incarnation = in->peer_gone.incarnation;
        envelope->body_case = KVW__ENVELOPE__BODY_PEER_GONE;
        envelope->peer_gone = &pack->body.peer_gone;
        return PD_OK;
    case PD_MSG_CANCEL:
        kvw__cancel__init(&pack->body.cancel);
        pack->body.cancel.key = pack_key(&pack->key, &in->cancel.key);
        pack->body.cancel.unwritten = in->cancel.unwritten;
        envelope->body_case = KVW__ENVELOPE__BODY_CANCEL;
        envelope->cancel = &pack->body.cancel;
        return PD_OK;
    case PD_MSG_SNAPSHOT_REQUEST:
        kvw__snapshot_request__init(&pack->body.snapshot_request);
        pack->body.snapshot_request.router = in->snapshot_request.router;
        envelope->body_case = KVW__ENVELOPE__BODY_SNAPSHOT_REQUEST;
        envelope->snapshot_request = &pack->body.snapshot_request;
        return PD_OK;
    default: return PD_E_INTERNAL;
    }
}

static pd_status pack_body(packing *pack, const pd_message *in)
{
    switch (in->kind) {
    case PD_MSG_HELLO: return pack_hello(pack, &in->hello);
    case PD_MSG_HEARTBEAT: return pack_heartbeat(pack, &in->heartbeat);
    case PD_MSG_LINK: return pack_link(pack, &in->link);
    case PD_MSG_LEASE_REPLY: return pack_lease_reply(pack, &in->lease_reply);
    case PD_MSG_PREFILL_DONE: return pack_prefill_done(pack, &in->prefill_done);
    case PD_MSG_DECODE_FAILED: return pack_decode_failed(pack, &in->decode_failed);
    case PD_MSG_STEP_TOKENS: return pack_step_tokens(pack, &in->step_tokens);
    case PD_MSG_KV_EVENTS: return pack_kv_events(pack, &in->kv_events);
    case PD_MSG_PEER_UP: return pack_peer_up(pack, &in->peer_up);
    case PD_MSG_LEASE_REQUEST: return pack_lease_request(pack, &in->lease_request);
    case PD_MSG_PREFILL_REQUEST: return pack_prefill_request(pack, &in->prefill_request);
    case PD_MSG_DECODE_START: return pack_decode_start(pack, &in->decode_start);
    default: return pack_small(pack, in);
    }
}

typedef struct buf_sink {
    ProtobufCBuffer base;
    pd_buf *buf;
} buf_sink;

static void append_packed(ProtobufCBuffer *base, size_t len, const uint8_t *bytes)
{
    pd_buf_append(((buf_sink *)base)->buf, bytes, len);
}

pd_status pd_message_pack(const pd_message *message, pd_buf *buf)
{
    packing pack = {0};

    pd_buf_clear(buf);
    kvw__envelope__init(&pack.envelope);
    pack.envelope.version = PD_WIRE_VERSION;
    pd_status status = pack_body(&pack, message);
    if (status == PD_OK) {
        buf_sink sink = {.base = {.append = append_packed}, .buf = buf};
        kvw__envelope__pack_to_buffer(&pack.envelope, &sink.base);
        status = pd_buf_status(buf);
    }
    pd_free(pack.scratch);
    return status;
}

/* ---- unpacking: outside bytes to a checked struct ---- */

typedef struct unpacking {
    pd_arena *arena;
    const char *reason; /* a literal: the first thing found wrong */
    pd_status status;
} unpacking;

static void refuse(unpacking *un, const char *reason)
{
    if (un->status == PD_OK) {
        un->status = PD_E_INVALID;
        un->reason = reason;
    }
}

static void take_key(unpacking *un, const Kvw__Key *in, pd_request_key *out)
{
    if (in == NULL || in->router == 0) {
        refuse(un, "key is missing");
        return;
    }
    *out = (pd_request_key){.router = in->router, .number = in->number, .epoch = in->epoch};
}

/* A printable text of at most size - 1 bytes. */
static void take_text(unpacking *un, const char *in, char *out, size_t size, bool may_be_empty,
                      const char *reason)
{
    size_t len = strlen(in);
    bool sound = len < size && (len != 0 || may_be_empty);
    for (size_t i = 0; sound && i < len; i++)
        sound = (unsigned char)in[i] >= 0x20 && in[i] != 0x7f;
    if (!sound)
        refuse(un, reason);
    else
        memcpy(out, in, len + 1);
}

static void take_float(unpacking *un, float in, float *out, const char *reason)
{
    if (!isfinite(in) || in < 0)
        refuse(un, reason);
    else
        *out = in;
}

static void take_status(unpacking *un, int32_t in, pd_status *out)
{
    if (in > 0 || strcmp(pd_status_name((pd_status)in), "unknown") == 0)
        refuse(un, "status is unknown");
    else
        *out = (pd_status)in;
}

static void take_sampling(unpacking *un, const Kvw__Sampling *in, pd_sampling *out)
{
    if (in == NULL) {
        refuse(un, "sampling is missing");
        return;
    }
    take_float(un, in->temperature, &out->temperature, "temperature is out of range");
    take_float(un, in->top_p, &out->top_p, "top_p is out of range");
    if (out->top_p > 1)
        refuse(un, "top_p is out of range");
    out->top_k = in->top_k;
    out->seed = in->seed;
    out->choice = in->choice;
}

static void take_role(unpacking *un, uint32_t in, pd_role *out)
{
    if (in != PD_ROLE_PREFILL && in != PD_ROLE_DECODE)
        refuse(un, "role is unknown");
    else
        *out = (pd_role)in;
}

static void take_hashes(unpacking *un, ProtobufCBinaryData in, const pd_hash128 **out,
                        uint32_t *count_out)
{
    if (in.len % HASH_BYTES != 0) {
        refuse(un, "hashes are cut off");
        return;
    }
    size_t count = in.len / HASH_BYTES;
    pd_hash128 *hashes = pd_arena_alloc(un->arena, count * sizeof *hashes);
    if (hashes == NULL) {
        un->status = PD_E_NOMEM;
        return;
    }
    for (size_t i = 0; i < count; i++)
        hashes[i] = get_hash(in.data + i * HASH_BYTES);
    *out = hashes;
    *count_out = (uint32_t)count;
}

static void take_hello(unpacking *un, const Kvw__Hello *in, pd_msg_hello *out)
{
    out->wire_version = in->wire_version;
    take_text(un, in->name, out->name, sizeof out->name, false, "name is empty or too long");
    take_role(un, in->role, &out->role);
    out->role_epoch = in->role_epoch;
    out->incarnation = in->incarnation;
    if (in->incarnation == 0)
        refuse(un, "incarnation is missing");
    take_text(un, in->model, out->model, sizeof out->model, false, "model is empty or too long");
    if (in->model_fingerprint.len != HASH_BYTES)
        refuse(un, "model_fingerprint has the wrong length");
    else
        out->model_fingerprint = get_hash(in->model_fingerprint.data);
    out->layout_fingerprint = in->layout_fingerprint;
    take_text(un, in->layout, out->layout, sizeof out->layout, true, "layout is too long");
    out->block_tokens = in->block_tokens;
    out->dp_rank = in->dp_rank;
    out->context_max = in->context_max;
    out->max_batch = in->max_batch;
    out->queue_max = in->queue_max;
    out->blocks = in->blocks;
    if (in->block_tokens == 0 || in->context_max == 0 || in->blocks == 0)
        refuse(un, "block_tokens, context_max or blocks is 0");
    take_text(un, in->backend, out->backend, sizeof out->backend, true, "backend is too long");
    take_text(un, in->transfer, out->transfer, sizeof out->transfer, true, "transfer is too long");
    out->transfer_address = in->transfer_address.data;
    out->transfer_address_len = in->transfer_address.len;
    out->pid = in->pid;
    out->host = in->host;
}

static void take_heartbeat(unpacking *un, const Kvw__Heartbeat *in, pd_msg_heartbeat *out)
{
    out->incarnation = in->incarnation;
    out->role_epoch = in->role_epoch;
    out->step = in->step;
    out->busy = in->busy;
    take_float(un, in->queue_ms, &out->queue_ms, "queue_ms is out of range");
    out->running = in->running;
    out->waiting = in->waiting;
    if (in->ledger == NULL) {
        refuse(un, "ledger is missing");
        return;
    }
    out->ledger = (pd_ledger){.total = in->ledger->total,
                              .free = in->ledger->free,
                              .cached = in->ledger->cached,
                              .leased = in->ledger->leased,
                              .running = in->ledger->running,
                              .quarantined = in->ledger->quarantined};
    out->events_sequence = in->events_sequence;
    out->warm = in->warm;
    out->draining = in->draining;
}

static void take_link(unpacking *un, const Kvw__Link *in, pd_msg_link *out)
{
    take_text(un, in->peer, out->peer, sizeof out->peer, false, "peer is empty or too long");
    out->peer_incarnation = in->peer_incarnation;
    out->up = in->up;
    take_text(un, in->lane, out->lane, sizeof out->lane, true, "lane is too long");
    take_text(un, in->reason, out->reason, sizeof out->reason, true, "reason is too long");
}

static void take_lease_reply(unpacking *un, const Kvw__LeaseReply *in, pd_msg_lease_reply *out)
{
    take_key(un, in->key, &out->key);
    take_status(un, in->status, &out->status);
    out->held_blocks = in->held_blocks;
    out->blocks = in->blocks;
    out->blocks_count = (uint32_t)in->n_blocks;
    out->retry_after_ms = in->retry_after_ms;
    take_text(un, in->reason, out->reason, sizeof out->reason, true, "reason is too long");
}

static void take_prefill_done(unpacking *un, const Kvw__PrefillDone *in, pd_msg_prefill_done *out)
{
    take_key(un, in->key, &out->key);
    take_status(un, in->status, &out->status);
    out->cached_tokens = in->cached_tokens;
    out->computed_tokens = in->computed_tokens;
    take_float(un, in->queue_ms, &out->queue_ms, "queue_ms is out of range");
    take_float(un, in->compute_ms, &out->compute_ms, "compute_ms is out of range");
    take_float(un, in->ship_ms, &out->ship_ms, "ship_ms is out of range");
    out->ship_bytes = in->ship_bytes;
    take_text(un, in->reason, out->reason, sizeof out->reason, true, "reason is too long");
    out->may_land = in->may_land;
}

static void take_step_tokens(unpacking *un, const Kvw__StepTokens *in, pd_msg_step_tokens *out)
{
    pd_step_token *tokens = pd_arena_alloc(un->arena, in->n_tokens * sizeof *tokens);
    if (tokens == NULL) {
        un->status = PD_E_NOMEM;
        return;
    }
    for (size_t i = 0; i < in->n_tokens; i++) {
        const Kvw__StepToken *token = in->tokens[i];
        take_key(un, token->key, &tokens[i].key);
        tokens[i].index = token->index;
        tokens[i].token = token->token;
        if (token->finish > PD_FINISH_LENGTH)
            refuse(un, "finish is unknown");
        tokens[i].finish = (pd_finish)token->finish;
    }
    take_text(un, in->name, out->name, sizeof out->name, false, "name is empty or too long");
    out->incarnation = in->incarnation;
    out->step = in->step;
    take_float(un, in->queue_ms, &out->queue_ms, "queue_ms is out of range");
    take_float(un, in->step_ms, &out->step_ms, "step_ms is out of range");
    out->tokens = tokens;
    out->tokens_count = (uint32_t)in->n_tokens;
}

static void take_kv_events(unpacking *un, const Kvw__KvEvents *in, pd_msg_kv_events *out)
{
    size_t count = in->kinds.len;
    if (in->hashes.len != count * HASH_BYTES) {
        refuse(un, "kinds and hashes differ in number");
        return;
    }
    pd_kv_event *events = pd_arena_alloc(un->arena, count * sizeof *events);
    if (events == NULL) {
        un->status = PD_E_NOMEM;
        return;
    }
    for (size_t i = 0; i < count; i++) {
        if (in->kinds.data[i] < PD_KV_STORED || in->kinds.data[i] > PD_KV_CLEARED)
            refuse(un, "event kind is unknown");
        events[i].kind = (pd_kv_event_kind)in->kinds.data[i];
        events[i].hash = get_hash(in->hashes.data + i * HASH_BYTES);
    }
    take_text(un, in->name, out->name, sizeof out->name, false, "name is empty or too long");
    out->incarnation = in->incarnation;
    out->first_sequence = in->first_sequence;
    out->events = events;
    out->events_count = (uint32_t)count;
    out->snapshot_first = in->snapshot_first;
    out->snapshot = in->snapshot;
    out->snapshot_last = in->snapshot_last;
}

static void take_peer_up(unpacking *un, const Kvw__PeerUp *in, pd_msg_peer_up *out)
{
    take_text(un, in->name, out->name, sizeof out->name, false, "name is empty or too long");
    take_role(un, in->role, &out->role);
    out->incarnation = in->incarnation;
    out->transfer_address = in->transfer_address.data;
    out->transfer_address_len = in->transfer_address.len;
    out->pid = in->pid;
    out->host = in->host;
}

static void take_lease_request(unpacking *un, const Kvw__LeaseRequest *in,
                               pd_msg_lease_request *out)
{
    take_key(un, in->key, &out->key);
    take_text(un, in->id, out->id, sizeof out->id, false, "id is empty or too long");
    take_text(un, in->prefill, out->prefill, sizeof out->prefill, true, "prefill is too long");
    out->prefill_incarnation = in->prefill_incarnation;
    out->prompt_tokens = in->prompt_tokens;
    out->max_tokens = in->max_tokens;
    out->ttl_ms = in->ttl_ms;
    take_hashes(un, in->hashes, &out->hashes, &out->hashes_count);
    if (in->prompt_tokens == 0)
        refuse(un, "prompt_tokens is 0");
}

static void take_prefill_request(unpacking *un, const Kvw__PrefillRequest *in,
                                 pd_msg_prefill_request *out)
{
    take_key(un, in->key, &out->key);
    take_text(un, in->id, out->id, sizeof out->id, false, "id is empty or too long");
    out->tokens = in->tokens;
    out->tokens_count = (uint32_t)in->n_tokens;
    take_hashes(un, in->hashes, &out->hashes, &out->hashes_count);
    take_sampling(un, in->sampling, &out->sampling);
    out->end_tokens = in->end_tokens;
    out->end_tokens_count = (uint32_t)in->n_end_tokens;
    out->max_tokens = in->max_tokens;
    out->ship = in->ship;
    take_text(un, in->decode, out->decode, sizeof out->decode, !in->ship,
              "decode is empty or too long");
    out->decode_incarnation = in->decode_incarnation;
    out->held_blocks = in->held_blocks;
    out->blocks = in->blocks;
    out->blocks_count = (uint32_t)in->n_blocks;
    out->deadline_ms = in->deadline_ms;
    if (in->n_tokens == 0 || in->max_tokens == 0)
        refuse(un, "tokens are missing or max_tokens is 0");
}

static void take_decode_start(unpacking *un, const Kvw__DecodeStart *in, pd_msg_decode_start *out)
{
    take_key(un, in->key, &out->key);
    take_text(un, in->id, out->id, sizeof out->id, false, "id is empty or too long");
    out->tokens = in->tokens;
    out->tokens_count = (uint32_t)in->n_tokens;
    out->prompt_tokens = in->prompt_tokens;
    take_sampling(un, in->sampling, &out->sampling);
    out->end_tokens = in->end_tokens;
    out->end_tokens_count = (uint32_t)in->n_end_tokens;
    out->max_tokens = in->max_tokens;
    out->landing_ms = in->landing_ms;
    if (in->prompt_tokens == 0 || in->n_tokens <= in->prompt_tokens)
        refuse(un, "no prompt or no first token");
}

static void take_body(unpacking *un, const Kvw__Envelope *in, pd_message *out)
{
    switch (in->body_case) {
    case KVW__ENVELOPE__BODY_HELLO:
        out->kind = PD_MSG_HELLO;
        take_hello(un, in->hello, &out->hello);
        return;
    case KVW__ENVELOPE__BODY_HEARTBEAT:
        out->kind = PD_MSG_HEARTBEAT;
        take_heartbeat(un, in->heartbeat, &out->heartbeat);
        return;
    case KVW__ENVELOPE__BODY_LINK:
        out->kind = PD_MSG_LINK;
        take_link(un, in->link, &out->link);
        return;
    case KVW__ENVELOPE__BODY_LEASE_REPLY:
        out->kind = PD_MSG_LEASE_REPLY;
        take_lease_reply(un, in->lease_reply, &out->lease_reply);
        return;
    case KVW__ENVELOPE__BODY_PREFILL_DONE:
        out->kind = PD_MSG_PREFILL_DONE;
        take_prefill_done(un, in->prefill_done, &out->prefill_done);
        return;
    case KVW__ENVELOPE__BODY_DECODE_FAILED:
        out->kind = PD_MSG_DECODE_FAILED;
        take_key(un, in->decode_failed->key, &out->decode_failed.key);
        take_status(un, in->decode_failed->status, &out->decode_failed.status);
        take_text(un, in->decode_failed->reason, out->decode_failed.reason, PD_REASON_BYTES, true,
                  "reason is too long");
        return;
    case KVW__ENVELOPE__BODY_BYE:
        out->kind = PD_MSG_BYE;
        out->bye.incarnation = in->bye->incarnation;
        return;
    case KVW__ENVELOPE__BODY_STEP_TOKENS:
        out->kind = PD_MSG_STEP_TOKENS;
        take_step_tokens(un, in->step_tokens, &out->step_tokens);
        return;
    case KVW__ENVELOPE__BODY_KV_EVENTS:
        out->kind = PD_MSG_KV_EVENTS;
        take_kv_events(un, in->kv_events, &out->kv_events);
        return;
    case KVW__ENVELOPE__BODY_WELCOME:
        out->kind = PD_MSG_WELCOME;
        out->welcome = (pd_msg_welcome){.router = in->welcome->router,
                                        .heartbeat_ms = in->welcome->heartbeat_ms,
                                        .lost_after_ms = in->welcome->lost_after_ms};
        if (in->welcome->router == 0 || in->welcome->heartbeat_ms == 0)
            refuse(un, "router or heartbeat_ms is 0");
        return;
    case KVW__ENVELOPE__BODY_REFUSED:
        out->kind = PD_MSG_REFUSED;
        take_text(un, in->refused->reason, out->refused.reason, PD_REASON_BYTES, true,
                  "reason is too long");
        out->refused.anew = in->refused->anew;
        return;
    case KVW__ENVELOPE__BODY_ROUTER_HEARTBEAT:
        out->kind = PD_MSG_ROUTER_HEARTBEAT;
        out->router_heartbeat.router = in->router_heartbeat->router;
        return;
    case KVW__ENVELOPE__BODY_PEER_UP:
        out->kind = PD_MSG_PEER_UP;
        take_peer_up(un, in->peer_up, &out->peer_up);
        return;
    case KVW__ENVELOPE__BODY_PEER_GONE:
        out->kind = PD_MSG_PEER_GONE;
        take_text(un, in->peer_gone->name, out->peer_gone.name, PD_NAME_BYTES, false,
                  "name is empty or too long");
        out->peer_gone.incarnation = in->peer_gone->incarnation;
        return;
    case KVW__ENVELOPE__BODY_LEASE_REQUEST:
        out->kind = PD_MSG_LEASE_REQUEST;
        take_lease_request(un, in->lease_request, &out->lease_request);
        return;
    case KVW__ENVELOPE__BODY_PREFILL_REQUEST:
        out->kind = PD_MSG_PREFILL_REQUEST;
        take_prefill_request(un, in->prefill_request, &out->prefill_request);
        return;
    case KVW__ENVELOPE__BODY_DECODE_START:
        out->kind = PD_MSG_DECODE_START;
        take_decode_start(un, in->decode_start, &out->decode_start);
        return;
    case KVW__ENVELOPE__BODY_CANCEL:
        out->kind = PD_MSG_CANCEL;
        take_key(un, in->cancel->key, &out->cancel.key);
        out->cancel.unwritten = in->cancel->unwritten;
        return;
    case KVW__ENVELOPE__BODY_SNAPSHOT_REQUEST:
        out->kind = PD_MSG_SNAPSHOT_REQUEST;
        out->snapshot_request.router = in->snapshot_request->router;
        return;
    default: refuse(un, "no known message");
    }
}

static void *arena_alloc(void *ctx, size_t bytes)
{
    return pd_arena_alloc(ctx, bytes);
}

static void arena_free(void *ctx, void *memory)
{
    (void)ctx;
    (void)memory; /* the arena ends as a whole */
}

/* A hello of another wire version is still a hello: its sender must be told. */
static bool version_fits(const Kvw__Envelope *envelope)
{
    return envelope->version == PD_WIRE_VERSION ||
           envelope->body_case == KVW__ENVELOPE__BODY_HELLO ||
           envelope->body_case == KVW__ENVELOPE__BODY_REFUSED;
}

pd_status pd_message_unpack(const void *bytes, size_t len, pd_message *message_out,
                            pd_message_hold **hold_out, const char **reason_out)
{
    pd_arena *arena = NULL;
    pd_message message = {0};

    *reason_out = "over the size limit";
    if (len > PD_MESSAGE_BYTES_MAX)
        return PD_E_INVALID;
    *reason_out = "no memory";
    pd_status status = pd_arena_create(len * HOLD_GROWTH + HOLD_BYTES_EXTRA, &arena);
    if (status != PD_OK)
        return status;
    unpacking un = {.arena = arena, .status = PD_OK};
    pd_message_hold *hold = pd_arena_alloc(arena, sizeof *hold);
    if (hold == NULL) {
        pd_arena_destroy(arena);
        return PD_E_NOMEM;
    }
    hold->arena = arena;
    ProtobufCAllocator allocator = {
        .alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    Kvw__Envelope *envelope = kvw__envelope__unpack(&allocator, len, bytes);
    if (envelope == NULL)
        refuse(&un, "not a message");
    else if (!version_fits(envelope))
        refuse(&un, "another wire version");
    else
        take_body(&un, envelope, &message);
    if (un.status != PD_OK) {
        if (un.reason != NULL)
            *reason_out = un.reason;
        pd_arena_destroy(arena);
        return un.status;
    }
    *message_out = message;
    *hold_out = hold;
    return PD_OK;
}

void pd_message_hold_free(pd_message_hold *hold)
{
    if (hold != NULL)
        pd_arena_destroy(hold->arena);
}
