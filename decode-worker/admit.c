#include "decode-worker/admit.h"

#include "common/base/clock.h"
#include "common/base/mem.h"

#include <string.h>

bool decode_admit_need(const pd_role_options *options, uint32_t prompt_tokens, uint32_t max_tokens,
                       uint32_t *blocks_out, uint32_t *capacity_out, const char **reason_out)
{
    uint32_t block_tokens = options->layout.block_tokens;
    /* The last token of an answer is never read back in. */
    uint64_t capacity = (uint64_t)prompt_tokens + max_tokens - 1;

    if (prompt_tokens > options->context_max) {
        *reason_out = "the prompt is longer than the context";
        return false;
    }
    if (capacity > options->context_max)
        capacity = options->context_max;
    uint64_t blocks = (capacity + block_tokens - 1) / block_tokens;
    if (blocks > options->layout.blocks) {
        *reason_out = "prompt and answer need more KV blocks than there are";
        return false;
    }
    *blocks_out = (uint32_t)blocks;
    *capacity_out = (uint32_t)capacity;
    return true;
}

static decode_sequence *sequence_new(const decode_admit *admit, const pd_msg_lease_request *asked,
                                     uint32_t capacity)
{
    uint32_t block_tokens = admit->options->layout.block_tokens;
    uint32_t prompt_blocks = (asked->prompt_tokens + block_tokens - 1) / block_tokens;
    decode_sequence *sequence = pd_calloc(1, sizeof *sequence);

    if (sequence == NULL)
        return NULL;
    sequence->hashes = pd_calloc(capacity / block_tokens + 1, sizeof *sequence->hashes);
    if (sequence->hashes == NULL ||
        pd_landing_init(&sequence->landing, admit->lander, &asked->key, asked->id, &asked->sender,
                        prompt_blocks) != PD_OK) {
        pd_free(sequence->hashes);
        pd_free(sequence);
        return NULL;
    }
    if (asked->hashes_count > 0)
        memcpy(sequence->hashes, asked->hashes, asked->hashes_count * sizeof *asked->hashes);
    sequence->hashes_count = asked->hashes_count;
    sequence->key = asked->key;
    memcpy(sequence->id, asked->id, sizeof sequence->id);
    sequence->prompt_tokens = asked->prompt_tokens;
    sequence->prompt_blocks = prompt_blocks;
    sequence->capacity = capacity;
    return sequence;
}

static pd_status check(const pd_role_options *options, const pd_msg_lease_request *asked,
                       const char **reason_out)
{
    if (asked->prompt_tokens == 0) {
        *reason_out = "the prompt is empty";
        return PD_E_INVALID;
    }
    if (asked->max_tokens == 0) {
        *reason_out = "max_tokens is 0";
        return PD_E_INVALID;
    }
    if (asked->hashes_count > asked->prompt_tokens / options->layout.block_tokens) {
        *reason_out = "more hashes than full blocks";
        return PD_E_INVALID;
    }
    if (asked->sender.incarnation == 0) {
        *reason_out = "no sender is named";
        return PD_E_INVALID;
    }
    return PD_OK;
}

/* The predicted peak first, so that nothing is made for a request that has to wait. */
static pd_status find_room(const decode_admit *admit, const pd_msg_lease_request *asked,
                           const decode_sequence *all, double step_ms, uint32_t capacity,
                           decode_newcomer *newcomer_out, decode_refusal *refusal_out)
{
    uint32_t block_tokens = admit->options->layout.block_tokens;

    *newcomer_out = (decode_newcomer){
        .priority = asked->priority,
        .tokens = asked->prompt_tokens,
        .blocks = (asked->prompt_tokens + block_tokens - 1) / block_tokens,
        .answer_max = capacity - asked->prompt_tokens,
    };
    return decode_room_admit(admit->room, all, newcomer_out, step_ms, &refusal_out->wait_steps,
                             &refusal_out->reason);
}

pd_status decode_admit_promise(decode_admit *admit, const pd_msg_lease_request *asked,
                               const decode_sequence *all, double step_ms, uint64_t now_ns,
                               decode_sequence **sequence_out, decode_refusal *refusal_out)
{
    uint32_t blocks, capacity;
    decode_newcomer newcomer;
    pd_lease *lease;

    *refusal_out = (decode_refusal){.reason = ""};
    pd_status status = check(admit->options, asked, &refusal_out->reason);
    if (status != PD_OK)
        return status;
    if (!decode_admit_need(admit->options, asked->prompt_tokens, asked->max_tokens, &blocks,
                           &capacity, &refusal_out->reason))
        return PD_E_TOO_LARGE;
    status = find_room(admit, asked, all, step_ms, capacity, &newcomer, refusal_out);
    if (status != PD_OK)
        return status;
    decode_sequence *sequence = sequence_new(admit, asked, capacity);
    if (sequence == NULL) {
        refusal_out->reason = "no memory for the lease";
        return PD_E_NOMEM;
    }
    sequence->priority = asked->priority;
    sequence->answer_max = newcomer.answer_max;
    sequence->granted_ns = now_ns;
    sequence->ttl_ns = asked->ttl_ms * PD_NS_PER_MS;
    pd_lease_grant_args args = {
        .request = pd_ship_seal_request(&asked->key),
        .epoch = asked->key.epoch,
        .owner = asked->key.router,
        .prefill = asked->sender.incarnation,
        .blocks = newcomer.blocks,
        .expiry_ns = now_ns + sequence->ttl_ns,
    };
    status = pd_lease_grant(admit->leases, &args, &lease);
    if (status != PD_OK) {
        refusal_out->reason = "no place for the lease";
        decode_admit_free(sequence);
        return status;
    }
    sequence->order = decode_room_order(admit->room);
    lease->user = sequence;
    sequence->lease = lease;
    *sequence_out = sequence;
    return PD_OK;
}

pd_status decode_admit_bind(decode_admit *admit, decode_sequence *sequence, const char **reason_out)
{
    pd_lease *lease = sequence->lease;
    uint32_t usable = admit->options->prefix_cache ? sequence->hashes_count : 0;
    pd_status status = pd_lease_bind(admit->leases, lease, sequence->hashes, usable);

    if (status != PD_OK) {
        *reason_out = DECODE_ROOM_GONE;
        return status;
    }
    sequence->bound = true;
    sequence->held = lease->held;
    pd_landing_begin(&sequence->landing, lease->held, sequence->prompt_blocks - lease->held,
                     sequence->prompt_tokens, lease->blocks + lease->held);
    return PD_OK;
}

void decode_admit_free(decode_sequence *sequence)
{
    if (sequence == NULL)
        return;
    pd_landing_fini(&sequence->landing);
    pd_free(sequence->hashes);
    pd_free(sequence->answer_memory);
    pd_free(sequence);
}
