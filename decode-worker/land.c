#include "decode-worker/land.h"

static bool fits(const decode_sequence *sequence, const pd_notice *notice,
                 const pd_role_options *options)
{
    uint32_t block_tokens = options->layout.block_tokens;
    uint64_t end = (uint64_t)notice->first_block + notice->count;

    if (notice->sender != sequence->lease->prefill || notice->receiver != options->incarnation ||
        notice->group >= options->layout.groups)
        return false;
    if (notice->count == 0 || notice->first_block < sequence->held || end > sequence->prompt_blocks)
        return false;
    uint32_t valid = block_tokens;
    if (end == sequence->prompt_blocks)
        valid = sequence->prompt_tokens - (uint32_t)(end - 1) * block_tokens;
    return notice->valid_tokens == valid && (notice->seals != NULL) == options->seals;
}

static bool seals_match(const decode_sequence *sequence, const pd_notice *notice,
                        const pd_role_options *options, const pd_role_sink *sink)
{
    for (uint32_t i = 0; i < notice->count; i++) {
        uint32_t index = notice->first_block + i;
        uint32_t valid =
            i + 1 == notice->count ? notice->valid_tokens : options->layout.block_tokens;
        if (sink->seal(sink->ctx, &sequence->key, notice->group, index,
                       sequence->lease->blocks[index], valid) != notice->seals[i])
            return false;
    }
    return true;
}

decode_landing decode_land_on_blocks(decode_sequence *sequence, const pd_notice *notice,
                                     const pd_role_options *options, const pd_role_sink *sink)
{
    uint32_t blocks = sequence->prompt_blocks - sequence->held;
    uint32_t fresh = 0;

    if (sequence->landed || !fits(sequence, notice, options))
        return DECODE_LAND_IGNORED;
    for (uint32_t i = 0; i < notice->count; i++) {
        uint64_t bit =
            (uint64_t)notice->group * blocks + (notice->first_block + i - sequence->held);
        fresh += (sequence->landed_bits[bit / 64] >> (bit % 64) & 1) == 0;
    }
    if (fresh == 0)
        return DECODE_LAND_IGNORED;
    if (options->seals && !sequence->given_up && !seals_match(sequence, notice, options, sink))
        return DECODE_LAND_BROKEN;
    for (uint32_t i = 0; i < notice->count; i++) {
        uint64_t bit =
            (uint64_t)notice->group * blocks + (notice->first_block + i - sequence->held);
        sequence->landed_bits[bit / 64] |= (uint64_t)1 << (bit % 64);
    }
    sequence->landed_count += fresh;
    pd_assert(sequence->landed_count <= sequence->to_land);
    if (sequence->landed_count < sequence->to_land)
        return DECODE_LAND_PART;
    sequence->landed = true;
    return DECODE_LAND_DONE;
}
