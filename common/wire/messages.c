#include "common/wire/messages.h"
#include "common/base/buf.h"
#include "common/base/mem.h"

#include "messages.pb-c.h"

#include <string.h>

enum { HASH_BYTES = 16 };

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
        [PD_MSG_PREFILL_STARTED] = "prefill_started",
        [PD_MSG_LANDED] = "landed",
        [PD_MSG_REFETCH] = "refetch",
        [PD_MSG_SUSPENDED] = "suspended",
        [PD_MSG_SHIP_DONE] = "ship_done",
        [PD_MSG_AUDIT_REPLY] = "audit_reply",
        [PD_MSG_BIND] = "bind",
        [PD_MSG_TARGETS] = "targets",
        [PD_MSG_RELEASE] = "release",
        [PD_MSG_SHIP_AGAIN] = "ship_again",
        [PD_MSG_SHIP_REQUEST] = "ship_request",
        [PD_MSG_PULL_END] = "pull_end",
        [PD_MSG_AUDIT] = "audit",
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
    Kvw__Placement placement;
    Kvw__Peer peer;
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
        Kvw__PrefillStarted prefill_started;
        Kvw__Landed landed;
        Kvw__Refetch refetch;
        Kvw__Suspended suspended;
        Kvw__ShipDone ship_done;
        Kvw__AuditReply audit_reply;
        Kvw__Bind bind;
        Kvw__Targets targets;
        Kvw__Release release;
        Kvw__ShipAgain ship_again;
        Kvw__ShipRequest ship_request;
        Kvw__PullEnd pull_end;
        Kvw__Audit audit;
    } body;
} packing;

static void put_u64(uint8_t *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static void put_hash(uint8_t *bytes, pd_hash128 hash)
{
    put_u64(bytes, hash.lo);
    put_u64(bytes + 8, hash.hi);
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

static Kvw__Placement *pack_placement(Kvw__Placement *out, const pd_msg_placement *in)
{
    kvw__placement__init(out);
    out->bus = text(in->bus);
    out->numa_node = in->numa_node;
    out->nic = text(in->nic);
    out->nic_distance = text(in->nic_distance);
    out->cpus = text(in->cpus);
    out->bound = in->bound;
    out->threads = in->threads;
    out->pinned = text(in->pinned);
    return out;
}

static pd_status pack_rank_placements(packing *pack, const pd_msg_hello *in, Kvw__Hello *out)
{
    size_t count = in->rank_placements == NULL ? 0 : in->rank_pids_count;

    if (count == 0)
        return PD_OK;
    pack->scratch = pd_calloc(count, sizeof(Kvw__Placement) + sizeof(Kvw__Placement *));
    if (pack->scratch == NULL)
        return PD_E_NOMEM;
    Kvw__Placement *items = pack->scratch;
    out->rank_placements = (Kvw__Placement **)(items + count);
    out->n_rank_placements = count;
    for (size_t i = 0; i < count; i++)
        out->rank_placements[i] = pack_placement(&items[i], &in->rank_placements[i]);
    return PD_OK;
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
    out->started = in->started;
    out->session = in->session;
    out->clock_ns = in->clock_ns;
    pd_assert(in->rank_pids_count <= PD_MSG_RANKS_MAX);
    out->n_rank_pids = in->rank_pids_count;
    out->rank_pids = (int64_t *)in->rank_pids; /* packing reads it */
    out->placement = pack_placement(&pack->placement, &in->placement);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_HELLO;
    pack->envelope.hello = out;
    return pack_rank_placements(pack, in, out);
}

static Kvw__Ledger *pack_ledger(packing *pack, const pd_ledger *in)
{
    kvw__ledger__init(&pack->ledger);
    pack->ledger.total = in->total;
    pack->ledger.free = in->free;
    pack->ledger.cached = in->cached;
    pack->ledger.leased = in->leased;
    pack->ledger.running = in->running;
    pack->ledger.quarantined = in->quarantined;
    return &pack->ledger;
}

/* NULL when there is none. */
static Kvw__Peer *pack_peer(packing *pack, const pd_msg_peer *in)
{
    if (in->name[0] == '\0')
        return NULL;
    kvw__peer__init(&pack->peer);
    pack->peer.name = text(in->name);
    pack->peer.incarnation = in->incarnation;
    pack->peer.pid = in->pid;
    pack->peer.host = in->host;
    pack->peer.started = in->started;
    pack->peer.session = in->session;
    pack->peer.transfer_address = borrow(in->transfer_address, in->transfer_address_len);
    return &pack->peer;
}

static pd_status pack_heartbeat(packing *pack, const pd_msg_heartbeat *in)
{
    Kvw__Heartbeat *out = &pack->body.heartbeat;
    kvw__heartbeat__init(out);
    out->ledger = pack_ledger(pack, &in->ledger);
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
    out->clock_ns = in->clock_ns;
    out->shipped_bytes = in->counts.shipped_bytes;
    out->suspended = in->counts.suspended;
    out->moved = in->counts.moved;
    out->stalled = in->counts.stalled;
    out->spec_steps = in->counts.spec_steps;
    out->spec_drafted = in->counts.spec_drafted;
    out->spec_accepted = in->counts.spec_accepted;
    out->spec_method = in->counts.spec_method;
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
    out->bound = in->bound;
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
    out->again = in->again;
    out->shipped_bytes = in->shipped_bytes;
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
    out->started = in->started;
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
    out->prompt_tokens = in->prompt_tokens;
    out->max_tokens = in->max_tokens;
    out->ttl_ms = in->ttl_ms;
    out->sender = pack_peer(pack, &in->sender);
    out->bind = in->bind;
    out->priority = in->priority;
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
    out->deadline_ms = in->deadline_ms;
    out->prompt_tokens = in->prompt_tokens;
    out->priority = in->priority;
    out->pull = pack_peer(pack, &in->pull);
    out->pull_blocks = in->pull_blocks;
    out->pull_ms = in->pull_ms;
    out->hold_ms = in->hold_ms;
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

static pd_status pack_prefill_started(packing *pack, const pd_msg_prefill_started *in)
{
    Kvw__PrefillStarted *out = &pack->body.prefill_started;
    kvw__prefill_started__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->pull_first = in->pull_first;
    out->pull_blocks = (uint32_t *)(uintptr_t)in->pull_blocks;
    out->n_pull_blocks = in->pull_blocks_count;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_PREFILL_STARTED;
    pack->envelope.prefill_started = out;
    return PD_OK;
}

static pd_status pack_refetch(packing *pack, const pd_msg_refetch *in)
{
    Kvw__Refetch *out = &pack->body.refetch;
    kvw__refetch__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->group = in->group;
    out->first_block = in->first_block;
    out->count = in->count;
    out->reason = text(in->reason);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_REFETCH;
    pack->envelope.refetch = out;
    return PD_OK;
}

static pd_status pack_suspended(packing *pack, const pd_msg_suspended *in)
{
    Kvw__Suspended *out = &pack->body.suspended;
    kvw__suspended__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->answered = in->answered;
    out->kv_tokens = in->kv_tokens;
    out->blocks = in->blocks;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_SUSPENDED;
    pack->envelope.suspended = out;
    return PD_OK;
}

static pd_status pack_ship_done(packing *pack, const pd_msg_ship_done *in)
{
    Kvw__ShipDone *out = &pack->body.ship_done;
    kvw__ship_done__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->status = in->status;
    out->ship_ms = in->ship_ms;
    out->ship_bytes = in->ship_bytes;
    out->reason = text(in->reason);
    out->may_land = in->may_land;
    out->again = in->again;
    out->shipped_bytes = in->shipped_bytes;
    out->receiver = in->receiver;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_SHIP_DONE;
    pack->envelope.ship_done = out;
    return PD_OK;
}

static pd_status pack_audit_reply(packing *pack, const pd_msg_audit_reply *in)
{
    typedef struct item {
        Kvw__AuditEntry entry;
        Kvw__Key key;
    } item;
    Kvw__AuditReply *out = &pack->body.audit_reply;
    size_t count = in->entries_count, waits = in->waits_for_count;

    kvw__audit_reply__init(out);
    pack->scratch = pd_calloc(1, count * (sizeof(item) + sizeof(void *)) + waits * 8 + 1);
    if (pack->scratch == NULL)
        return PD_E_NOMEM;
    item *items = pack->scratch;
    Kvw__AuditEntry **pointers = (Kvw__AuditEntry **)(items + count);
    uint8_t *bytes = (uint8_t *)(pointers + count);
    for (size_t i = 0; i < count; i++) {
        kvw__audit_entry__init(&items[i].entry);
        items[i].entry.key = pack_key(&items[i].key, &in->entries[i].key);
        items[i].entry.state = in->entries[i].state;
        items[i].entry.blocks = in->entries[i].blocks;
        pointers[i] = &items[i].entry;
    }
    for (size_t i = 0; i < waits; i++)
        put_u64(bytes + 8 * i, in->waits_for[i]);
    out->incarnation = in->incarnation;
    out->serial = in->serial;
    out->ledger = pack_ledger(pack, &in->ledger);
    out->entries = pointers;
    out->n_entries = count;
    out->waits_for = borrow(bytes, waits * 8);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_AUDIT_REPLY;
    pack->envelope.audit_reply = out;
    return PD_OK;
}

static pd_status pack_targets(packing *pack, const pd_msg_targets *in)
{
    Kvw__Targets *out = &pack->body.targets;
    kvw__targets__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->held_blocks = in->held_blocks;
    out->blocks = (uint32_t *)(uintptr_t)in->blocks;
    out->n_blocks = in->blocks_count;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_TARGETS;
    pack->envelope.targets = out;
    return PD_OK;
}

static pd_status pack_ship_again(packing *pack, const pd_msg_ship_again *in)
{
    Kvw__ShipAgain *out = &pack->body.ship_again;
    kvw__ship_again__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->group = in->group;
    out->first_block = in->first_block;
    out->count = in->count;
    out->receiver = in->receiver;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_SHIP_AGAIN;
    pack->envelope.ship_again = out;
    return PD_OK;
}

static pd_status pack_ship_request(packing *pack, const pd_msg_ship_request *in)
{
    Kvw__ShipRequest *out = &pack->body.ship_request;
    kvw__ship_request__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->id = text(in->id);
    out->source_epoch = in->source_epoch;
    out->receiver = pack_peer(pack, &in->receiver);
    out->first_block = in->first_block;
    out->blocks = (uint32_t *)(uintptr_t)in->blocks;
    out->n_blocks = in->blocks_count;
    out->kv_tokens = in->kv_tokens;
    out->deadline_ms = in->deadline_ms;
    pack->envelope.body_case = KVW__ENVELOPE__BODY_SHIP_REQUEST;
    pack->envelope.ship_request = out;
    return pack_hashes(pack, in->hashes, in->hashes_count, &out->hashes);
}

static pd_status pack_pull_end(packing *pack, const pd_msg_pull_end *in)
{
    Kvw__PullEnd *out = &pack->body.pull_end;
    kvw__pull_end__init(out);
    out->key = pack_key(&pack->key, &in->key);
    out->may_land = in->may_land;
    out->reason = text(in->reason);
    pack->envelope.body_case = KVW__ENVELOPE__BODY_PULL_END;
    pack->envelope.pull_end = out;
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
        pack->body.welcome.session = in->welcome.session;
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
        pack->body.cancel.keep = in->cancel.keep;
        pack->body.cancel.source = in->cancel.source;
        envelope->body_case = KVW__ENVELOPE__BODY_CANCEL;
        envelope->cancel = &pack->body.cancel;
        return PD_OK;
    case PD_MSG_SNAPSHOT_REQUEST:
        kvw__snapshot_request__init(&pack->body.snapshot_request);
        pack->body.snapshot_request.router = in->snapshot_request.router;
        envelope->body_case = KVW__ENVELOPE__BODY_SNAPSHOT_REQUEST;
        envelope->snapshot_request = &pack->body.snapshot_request;
        return PD_OK;
    case PD_MSG_LANDED:
        kvw__landed__init(&pack->body.landed);
        pack->body.landed.key = pack_key(&pack->key, &in->landed.key);
        pack->body.landed.started = in->landed.started;
        envelope->body_case = KVW__ENVELOPE__BODY_LANDED;
        envelope->landed = &pack->body.landed;
        return PD_OK;
    case PD_MSG_BIND:
        kvw__bind__init(&pack->body.bind);
        pack->body.bind.key = pack_key(&pack->key, &in->bind.key);
        envelope->body_case = KVW__ENVELOPE__BODY_BIND;
        envelope->bind = &pack->body.bind;
        return PD_OK;
    case PD_MSG_RELEASE:
        kvw__release__init(&pack->body.release);
        pack->body.release.key = pack_key(&pack->key, &in->release.key);
        envelope->body_case = KVW__ENVELOPE__BODY_RELEASE;
        envelope->release = &pack->body.release;
        return PD_OK;
    case PD_MSG_AUDIT:
        kvw__audit__init(&pack->body.audit);
        pack->body.audit.serial = in->audit.serial;
        envelope->body_case = KVW__ENVELOPE__BODY_AUDIT;
        envelope->audit = &pack->body.audit;
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
    case PD_MSG_PREFILL_STARTED: return pack_prefill_started(pack, &in->prefill_started);
    case PD_MSG_REFETCH: return pack_refetch(pack, &in->refetch);
    case PD_MSG_SUSPENDED: return pack_suspended(pack, &in->suspended);
    case PD_MSG_SHIP_DONE: return pack_ship_done(pack, &in->ship_done);
    case PD_MSG_AUDIT_REPLY: return pack_audit_reply(pack, &in->audit_reply);
    case PD_MSG_TARGETS: return pack_targets(pack, &in->targets);
    case PD_MSG_SHIP_AGAIN: return pack_ship_again(pack, &in->ship_again);
    case PD_MSG_SHIP_REQUEST: return pack_ship_request(pack, &in->ship_request);
    case PD_MSG_PULL_END: return pack_pull_end(pack, &in->pull_end);
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
