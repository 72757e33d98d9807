#include "common/wire/unpack.h"
#include "common/base/mem.h"

#include "messages.pb-c.h"

#include <math.h>
#include <string.h>

/* Of a hold: protobuf-c's structs and our arrays are a few times the bytes that came. */
enum { HOLD_BYTES_EXTRA = 1 << 16, HOLD_GROWTH = 16, HASH_BYTES = 16 };

struct pd_message_hold {
    pd_arena *arena;
};

static uint64_t get_u64(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

static pd_hash128 get_hash(const uint8_t *bytes)
{
    return (pd_hash128){.lo = get_u64(bytes), .hi = get_u64(bytes + 8)};
}

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

static void take_placement(unpacking *un, const Kvw__Placement *in, pd_msg_placement *out)
{
    if (in == NULL) {
        out->numa_node = -1;
        return;
    }
    take_text(un, in->bus, out->bus, sizeof out->bus, true, "placement.bus is too long");
    out->numa_node = in->numa_node < 0 ? -1 : in->numa_node;
    take_text(un, in->nic, out->nic, sizeof out->nic, true, "placement.nic is too long");
    take_text(un, in->nic_distance, out->nic_distance, sizeof out->nic_distance, true,
              "placement.nic_distance is too long");
    take_text(un, in->cpus, out->cpus, sizeof out->cpus, true, "placement.cpus is too long");
    out->bound = in->bound;
    out->threads = in->threads;
    take_text(un, in->pinned, out->pinned, sizeof out->pinned, true,
              "placement.pinned is too long");
}

/* Behind the pids, which they go with. */
static void take_rank_placements(unpacking *un, const Kvw__Hello *in, pd_msg_hello *out)
{
    if (in->n_rank_placements == 0)
        return;
    if (in->n_rank_placements != out->rank_pids_count) {
        refuse(un, "rank_placements and rank_pids differ in number");
        return;
    }
    pd_msg_placement *all = pd_arena_alloc(un->arena, out->rank_pids_count * sizeof *all);
    if (all == NULL) {
        un->status = PD_E_NOMEM;
        return;
    }
    memset(all, 0, out->rank_pids_count * sizeof *all);
    for (uint32_t i = 0; i < out->rank_pids_count; i++)
        take_placement(un, in->rank_placements[i], &all[i]);
    out->rank_placements = all;
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
    out->started = in->started;
    out->session = in->session;
    out->clock_ns = in->clock_ns;
    take_placement(un, in->placement, &out->placement);
    if (in->n_rank_pids > PD_MSG_RANKS_MAX) {
        refuse(un, "too many ranks");
        return;
    }
    out->rank_pids_count = (uint32_t)in->n_rank_pids;
    for (uint32_t i = 0; i < out->rank_pids_count; i++)
        out->rank_pids[i] = in->rank_pids[i];
    take_rank_placements(un, in, out);
}

static void take_ledger(unpacking *un, const Kvw__Ledger *in, pd_ledger *out)
{
    if (in == NULL) {
        refuse(un, "ledger is missing");
        return;
    }
    *out = (pd_ledger){.total = in->total,
                       .free = in->free,
                       .cached = in->cached,
                       .leased = in->leased,
                       .running = in->running,
                       .quarantined = in->quarantined};
}

/* None is an empty name. */
static void take_peer(unpacking *un, const Kvw__Peer *in, pd_msg_peer *out)
{
    if (in == NULL)
        return;
    take_text(un, in->name, out->name, sizeof out->name, false,
              "a peer's name is empty or too long");
    if (in->incarnation == 0)
        refuse(un, "a peer's incarnation is missing");
    out->incarnation = in->incarnation;
    out->pid = in->pid;
    out->host = in->host;
    out->started = in->started;
    out->session = in->session;
    out->transfer_address = in->transfer_address.data;
    out->transfer_address_len = in->transfer_address.len;
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
    take_ledger(un, in->ledger, &out->ledger);
    out->events_sequence = in->events_sequence;
    out->warm = in->warm;
    out->draining = in->draining;
    out->clock_ns = in->clock_ns;
    out->counts = (pd_worker_counts){.shipped_bytes = in->shipped_bytes,
                                     .suspended = in->suspended,
                                     .moved = in->moved,
                                     .stalled = in->stalled,
                                     .spec_steps = in->spec_steps,
                                     .spec_drafted = in->spec_drafted,
                                     .spec_accepted = in->spec_accepted,
                                     .spec_method = in->spec_method};
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
    out->bound = in->bound;
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
    out->again = in->again;
    out->shipped_bytes = in->shipped_bytes;
}

static void take_prefill_started(unpacking *un, const Kvw__PrefillStarted *in,
                                 pd_msg_prefill_started *out)
{
    take_key(un, in->key, &out->key);
    out->pull_first = in->pull_first;
    out->pull_blocks = in->pull_blocks;
    out->pull_blocks_count = (uint32_t)in->n_pull_blocks;
}

static void take_refetch(unpacking *un, const Kvw__Refetch *in, pd_msg_refetch *out)
{
    take_key(un, in->key, &out->key);
    out->group = in->group;
    out->first_block = in->first_block;
    out->count = in->count;
    if (in->count == 0)
        refuse(un, "no blocks");
    take_text(un, in->reason, out->reason, sizeof out->reason, true, "reason is too long");
}

static void take_suspended(unpacking *un, const Kvw__Suspended *in, pd_msg_suspended *out)
{
    take_key(un, in->key, &out->key);
    out->answered = in->answered;
    out->kv_tokens = in->kv_tokens;
    out->blocks = in->blocks;
}

static void take_ship_done(unpacking *un, const Kvw__ShipDone *in, pd_msg_ship_done *out)
{
    take_key(un, in->key, &out->key);
    take_status(un, in->status, &out->status);
    take_float(un, in->ship_ms, &out->ship_ms, "ship_ms is out of range");
    out->ship_bytes = in->ship_bytes;
    take_text(un, in->reason, out->reason, sizeof out->reason, true, "reason is too long");
    out->may_land = in->may_land;
    out->again = in->again;
    out->shipped_bytes = in->shipped_bytes;
    out->receiver = in->receiver;
}

static void take_audit_reply(unpacking *un, const Kvw__AuditReply *in, pd_msg_audit_reply *out)
{
    size_t waits = in->waits_for.len / 8;
    pd_audit_entry *entries = pd_arena_alloc(un->arena, in->n_entries * sizeof *entries);
    uint64_t *waits_for = pd_arena_alloc(un->arena, waits * sizeof *waits_for);

    if (entries == NULL || waits_for == NULL) {
        un->status = PD_E_NOMEM;
        return;
    }
    for (size_t i = 0; i < in->n_entries; i++) {
        take_key(un, in->entries[i]->key, &entries[i].key);
        if (in->entries[i]->state < PD_AUDIT_WAITING || in->entries[i]->state > PD_AUDIT_STALLED)
            refuse(un, "audit state is unknown");
        entries[i].state = (pd_audit_state)in->entries[i]->state;
        entries[i].blocks = in->entries[i]->blocks;
    }
    if (in->waits_for.len % 8 != 0)
        refuse(un, "waits_for is cut off");
    for (size_t i = 0; i < waits; i++)
        waits_for[i] = get_u64(in->waits_for.data + 8 * i);
    out->incarnation = in->incarnation;
    out->serial = in->serial;
    take_ledger(un, in->ledger, &out->ledger);
    out->entries = entries;
    out->entries_count = (uint32_t)in->n_entries;
    out->waits_for = waits_for;
    out->waits_for_count = (uint32_t)waits;
}

static void take_targets(unpacking *un, const Kvw__Targets *in, pd_msg_targets *out)
{
    take_key(un, in->key, &out->key);
    out->held_blocks = in->held_blocks;
    out->blocks = in->blocks;
    out->blocks_count = (uint32_t)in->n_blocks;
}

static void take_ship_again(unpacking *un, const Kvw__ShipAgain *in, pd_msg_ship_again *out)
{
    take_key(un, in->key, &out->key);
    out->group = in->group;
    out->first_block = in->first_block;
    out->count = in->count;
    out->receiver = in->receiver;
    if (in->count == 0)
        refuse(un, "no blocks");
}

static void take_ship_request(unpacking *un, const Kvw__ShipRequest *in, pd_msg_ship_request *out)
{
    take_key(un, in->key, &out->key);
    take_text(un, in->id, out->id, sizeof out->id, false, "id is empty or too long");
    out->source_epoch = in->source_epoch;
    if (in->receiver == NULL)
        refuse(un, "receiver is missing");
    take_peer(un, in->receiver, &out->receiver);
    out->first_block = in->first_block;
    out->blocks = in->blocks;
    out->blocks_count = (uint32_t)in->n_blocks;
    take_hashes(un, in->hashes, &out->hashes, &out->hashes_count);
    out->kv_tokens = in->kv_tokens;
    out->deadline_ms = in->deadline_ms;
    if (in->n_blocks == 0)
        refuse(un, "no blocks");
}

static void take_pull_end(unpacking *un, const Kvw__PullEnd *in, pd_msg_pull_end *out)
{
    take_key(un, in->key, &out->key);
    out->may_land = in->may_land;
    take_text(un, in->reason, out->reason, sizeof out->reason, true, "reason is too long");
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
    out->started = in->started;
}

static void take_lease_request(unpacking *un, const Kvw__LeaseRequest *in,
                               pd_msg_lease_request *out)
{
    take_key(un, in->key, &out->key);
    take_text(un, in->id, out->id, sizeof out->id, false, "id is empty or too long");
    out->prompt_tokens = in->prompt_tokens;
    out->max_tokens = in->max_tokens;
    out->ttl_ms = in->ttl_ms;
    take_peer(un, in->sender, &out->sender);
    out->bind = in->bind;
    out->priority = in->priority;
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
    out->deadline_ms = in->deadline_ms;
    out->prompt_tokens = in->prompt_tokens;
    out->priority = in->priority;
    take_peer(un, in->pull, &out->pull);
    out->pull_blocks = in->pull_blocks;
    out->pull_ms = in->pull_ms;
    out->hold_ms = in->hold_ms;
    if (in->prompt_tokens > in->n_tokens)
        refuse(un, "the prompt is longer than its tokens");
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

/* The messages of leases, landings and moves. */
static void take_more(unpacking *un, const Kvw__Envelope *in, pd_message *out)
{
    switch (in->body_case) {
    case KVW__ENVELOPE__BODY_PREFILL_STARTED:
        out->kind = PD_MSG_PREFILL_STARTED;
        take_prefill_started(un, in->prefill_started, &out->prefill_started);
        return;
    case KVW__ENVELOPE__BODY_LANDED:
        out->kind = PD_MSG_LANDED;
        take_key(un, in->landed->key, &out->landed.key);
        out->landed.started = in->landed->started;
        return;
    case KVW__ENVELOPE__BODY_REFETCH:
        out->kind = PD_MSG_REFETCH;
        take_refetch(un, in->refetch, &out->refetch);
        return;
    case KVW__ENVELOPE__BODY_SUSPENDED:
        out->kind = PD_MSG_SUSPENDED;
        take_suspended(un, in->suspended, &out->suspended);
        return;
    case KVW__ENVELOPE__BODY_SHIP_DONE:
        out->kind = PD_MSG_SHIP_DONE;
        take_ship_done(un, in->ship_done, &out->ship_done);
        return;
    case KVW__ENVELOPE__BODY_AUDIT_REPLY:
        out->kind = PD_MSG_AUDIT_REPLY;
        take_audit_reply(un, in->audit_reply, &out->audit_reply);
        return;
    case KVW__ENVELOPE__BODY_BIND:
        out->kind = PD_MSG_BIND;
        take_key(un, in->bind->key, &out->bind.key);
        return;
    case KVW__ENVELOPE__BODY_TARGETS:
        out->kind = PD_MSG_TARGETS;
        take_targets(un, in->targets, &out->targets);
        return;
    case KVW__ENVELOPE__BODY_RELEASE:
        out->kind = PD_MSG_RELEASE;
        take_key(un, in->release->key, &out->release.key);
        return;
    case KVW__ENVELOPE__BODY_SHIP_AGAIN:
        out->kind = PD_MSG_SHIP_AGAIN;
        take_ship_again(un, in->ship_again, &out->ship_again);
        return;
    case KVW__ENVELOPE__BODY_SHIP_REQUEST:
        out->kind = PD_MSG_SHIP_REQUEST;
        take_ship_request(un, in->ship_request, &out->ship_request);
        return;
    case KVW__ENVELOPE__BODY_PULL_END:
        out->kind = PD_MSG_PULL_END;
        take_pull_end(un, in->pull_end, &out->pull_end);
        return;
    case KVW__ENVELOPE__BODY_AUDIT:
        out->kind = PD_MSG_AUDIT;
        out->audit.serial = in->audit->serial;
        return;
    default: refuse(un, "no known message");
    }
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
                                        .lost_after_ms = in->welcome->lost_after_ms,
                                        .session = in->welcome->session};
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
        out->cancel.keep = in->cancel->keep;
        out->cancel.source = in->cancel->source;
        return;
    case KVW__ENVELOPE__BODY_SNAPSHOT_REQUEST:
        out->kind = PD_MSG_SNAPSHOT_REQUEST;
        out->snapshot_request.router = in->snapshot_request->router;
        return;
    default: take_more(un, in, out);
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
