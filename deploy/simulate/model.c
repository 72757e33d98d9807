#include "deploy/simulate/model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

pd_status sim_kv_init(sim_kv *kv, const pd_kv_layout *layout, uint64_t noise)
{
    size_t count = (size_t)layout->groups * layout->blocks * layout->block_tokens;
    uint64_t *values = pd_malloc(count * sizeof(*values));
    if (values == NULL)
        return PD_E_NOMEM;
    for (size_t i = 0; i < count; i++)
        values[i] = pd_random_next(&noise);
    *kv = (sim_kv){.groups = layout->groups,
                   .blocks = layout->blocks,
                   .block_tokens = layout->block_tokens,
                   .values = values};
    return PD_OK;
}

void sim_kv_fini(sim_kv *kv)
{
    pd_free(kv->values);
    *kv = (sim_kv){0};
}

uint64_t *sim_kv_block(const sim_kv *kv, uint32_t group, pd_block block)
{
    pd_assert(group < kv->groups && block < kv->blocks);
    return kv->values + ((size_t)group * kv->blocks + block) * kv->block_tokens;
}

/* KV of a token in a group; previous is group 0's of the position before. */
static uint64_t kv_of(uint32_t group, uint32_t token, uint32_t position, uint64_t previous)
{
    return pd_mix64(previous + pd_mix64(((uint64_t)token << 32 | position) + 1) + group);
}

static uint64_t fold(uint64_t sum, uint64_t value)
{
    return pd_mix64(sum * 3 + value);
}

static uint32_t token_of(uint64_t sum, const pd_sampling *sampling)
{
    uint64_t drawn = sum;
    if (sampling->temperature > 0)
        drawn = pd_mix64(sum ^ pd_mix64(sampling->seed + sampling->choice));
    if ((drawn >> 40) % 40 == 0)
        return SIM_END_TOKEN;
    return 1 + (uint32_t)(drawn % (SIM_VOCAB - 1));
}

static uint64_t *at(const sim_kv *kv, uint32_t group, const pd_step_slice *slice, uint32_t position)
{
    pd_block block = slice->blocks[position / kv->block_tokens];
    return sim_kv_block(kv, group, block) + position % kv->block_tokens;
}

void sim_model_write(const sim_kv *kv, uint32_t group, const pd_step_slice *slice)
{
    for (uint32_t i = 0; i < slice->count; i++) {
        uint32_t position = slice->position + i;
        uint64_t previous = position == 0 ? 0 : *at(kv, 0, slice, position - 1);
        *at(kv, group, slice, position) = kv_of(group, slice->tokens[i], position, previous);
    }
}

uint32_t sim_model_token(const sim_kv *kv, const pd_step_slice *slice)
{
    uint64_t sum = 0;
    for (uint32_t position = 0; position < slice->position + slice->count; position++)
        for (uint32_t group = 0; group < kv->groups; group++)
            sum = fold(sum, *at(kv, group, slice, position));
    return token_of(sum, &slice->sampling);
}

uint64_t sim_model_seal(const sim_kv *kv, const pd_request_key *key, uint32_t group, uint32_t index,
                        pd_block block, uint32_t valid_tokens)
{
    pd_assert(valid_tokens >= 1 && valid_tokens <= kv->block_tokens);
    uint64_t place[] = {key->router, key->number, key->epoch, group, index, valid_tokens};
    uint64_t seed = pd_hash64(place, sizeof(place), 0);
    return pd_hash64(sim_kv_block(kv, group, block), valid_tokens * sizeof(uint64_t), seed);
}

uint32_t sim_model_answer(uint32_t groups, const uint32_t *prompt, uint32_t prompt_count,
                          const pd_sampling *sampling, bool ignore_end, uint32_t count,
                          uint32_t *tokens_out)
{
    uint64_t sum = 0, previous = 0;
    uint32_t made = 0;

    for (uint32_t position = 0; made < count; position++) {
        uint32_t token =
            position < prompt_count ? prompt[position] : tokens_out[position - prompt_count];
        uint64_t before = previous;
        for (uint32_t group = 0; group < groups; group++) {
            uint64_t value = kv_of(group, token, position, before);
            sum = fold(sum, value);
            if (group == 0)
                previous = value;
        }
        if (position + 1 < prompt_count)
            continue;
        tokens_out[made] = token_of(sum, sampling);
        if (tokens_out[made++] == SIM_END_TOKEN && !ignore_end)
            break;
    }
    return made;
}
