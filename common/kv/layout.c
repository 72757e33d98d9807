#include "common/kv/layout.h"
#include "common/base/log.h"

#include <stdio.h>
#include <string.h>

/* A put of about this size keeps shared memory and tcp at full rate without making a layer wait
 * long for its neighbours. */
#define GROUP_BLOCK_BYTES_AIM 65536
/* The last group cannot hide behind computing: of a prompt that is one step, and ships as long as
 * it computes, that is one part in so many. Runs of neighbouring blocks are one put, so that
 * smaller blocks cost little; how many groups leave together is the cost model's. */
#define GROUPS_AIM 12

#define BLOCK_TOKENS_MAX 256

typedef struct number_format {
    pd_dtype dtype;
    const char *name;
    uint32_t element_bytes, scale_bytes;
} number_format;

static const number_format formats[] = {
    {PD_F16, "f16", 2, 0},
    {PD_INT8, "int8", 1, sizeof(float)},
    {PD_FP8_E4M3, "fp8_e4m3", 1, sizeof(float)},
};
#define FORMATS (sizeof formats / sizeof *formats)

static const number_format *format_of(pd_dtype dtype)
{
    for (size_t i = 0; i < FORMATS; i++)
        if (formats[i].dtype == dtype)
            return &formats[i];
    return NULL;
}

bool pd_kv_dtype_of(const char *name, pd_dtype *dtype_out)
{
    for (size_t i = 0; i < FORMATS; i++)
        if (strcmp(formats[i].name, name) == 0) {
            *dtype_out = formats[i].dtype;
            return true;
        }
    return false;
}

const char *pd_kv_dtype_name(pd_dtype dtype)
{
    pd_assert(format_of(dtype) != NULL);
    return format_of(dtype)->name;
}

static uint32_t choose_group_layers(uint32_t layers, uint64_t block_layer_bytes)
{
    uint64_t chosen = (GROUP_BLOCK_BYTES_AIM + block_layer_bytes / 2) / block_layer_bytes;
    uint32_t most = layers / GROUPS_AIM;
    if (chosen > most)
        chosen = most;
    return chosen == 0 ? 1 : (uint32_t)chosen;
}

static pd_status check(const pd_model_shape *shape, const pd_kv_layout_options *options)
{
    if (format_of(options->dtype) == NULL) {
        pd_log_error("msg=\"kv layout: blocks are f16, int8 or fp8_e4m3\" dtype=%d",
                     (int)options->dtype);
        return PD_E_UNSUPPORTED;
    }
    if (options->block_tokens == 0 || options->block_tokens > BLOCK_TOKENS_MAX ||
        options->block_tokens % PD_KV_TILE_TOKENS != 0) {
        pd_log_error("msg=\"kv layout: block_tokens must be a multiple of %d, at most %d\" "
                     "block_tokens=%u",
                     PD_KV_TILE_TOKENS, BLOCK_TOKENS_MAX, options->block_tokens);
        return PD_E_INVALID;
    }
    /* far above any model; keeps every product below in 64 bits */
    if (shape->layers == 0 || shape->layers > 65536 || shape->kv_heads == 0 ||
        shape->kv_heads > 65536 || shape->head_dim == 0 || shape->head_dim > 65536) {
        pd_log_error("msg=\"kv layout: the model's shape is out of range\" layers=%u kv_heads=%u "
                     "head_dim=%u",
                     shape->layers, shape->kv_heads, shape->head_dim);
        return PD_E_INVALID;
    }
    if (options->ranks != 0 && shape->kv_heads % options->ranks != 0) {
        pd_log_error("msg=\"kv layout: the KV heads do not divide among the ranks\" kv_heads=%u "
                     "ranks=%u",
                     shape->kv_heads, options->ranks);
        return PD_E_INVALID;
    }
    return PD_OK;
}

pd_status pd_kv_layout_make(const pd_model_shape *shape, const pd_kv_layout_options *options,
                            pd_kv_layout *layout_out)
{
    pd_status status = check(shape, options);
    if (status != PD_OK)
        return status;
    const number_format *format = format_of(options->dtype);
    pd_kv_layout layout = {
        .dtype = options->dtype,
        .layers = shape->layers,
        .kv_heads = shape->kv_heads,
        .head_dim = shape->head_dim,
        .ranks = options->ranks != 0 ? options->ranks : 1,
        .block_tokens = options->block_tokens,
        .element_bytes = format->element_bytes,
        .scale_bytes = format->scale_bytes,
    };
    layout.rank_heads = layout.kv_heads / layout.ranks;
    layout.token_bytes = (uint64_t)layout.head_dim * layout.element_bytes;
    layout.scales_at = layout.block_tokens * layout.token_bytes;
    layout.half_bytes = layout.scales_at + (uint64_t)layout.block_tokens * layout.scale_bytes;
    layout.layer_bytes = 2 * layout.half_bytes;
    uint64_t block_layer_bytes = layout.kv_heads * layout.layer_bytes;
    layout.group_layers = options->group_layers != 0
                              ? options->group_layers
                              : choose_group_layers(layout.layers, block_layer_bytes);
    if (layout.group_layers > layout.layers)
        layout.group_layers = layout.layers;
    layout.groups = (layout.layers + layout.group_layers - 1) / layout.group_layers;
    layout.block_bytes_all = layout.layers * block_layer_bytes;
    uint64_t blocks = options->memory_bytes / layout.block_bytes_all;
    if (options->blocks_max != 0 && blocks > options->blocks_max)
        blocks = options->blocks_max;
    if (blocks > PD_BLOCK_NONE - 1)
        blocks = PD_BLOCK_NONE - 1;
    if (blocks == 0) {
        pd_log_error("msg=\"kv layout: the memory does not hold one block\" memory_bytes=%llu "
                     "block_bytes=%llu",
                     (unsigned long long)options->memory_bytes,
                     (unsigned long long)layout.block_bytes_all);
        return PD_E_TOO_LARGE;
    }
    layout.blocks = (uint32_t)blocks;
    layout.pool_bytes = blocks * layout.block_bytes_all;
    layout.rank_bytes = layout.pool_bytes / layout.ranks;
    *layout_out = layout;
    return PD_OK;
}

uint32_t pd_kv_layout_group_layers(const pd_kv_layout *layout, uint32_t group)
{
    pd_assert(group < layout->groups);
    uint32_t before = group * layout->group_layers;
    uint32_t left = layout->layers - before;
    return left < layout->group_layers ? left : layout->group_layers;
}

uint64_t pd_kv_layout_block_bytes(const pd_kv_layout *layout, uint32_t group)
{
    return layout->kv_heads * pd_kv_layout_head_bytes(layout, group);
}

uint64_t pd_kv_layout_head_bytes(const pd_kv_layout *layout, uint32_t group)
{
    return pd_kv_layout_group_layers(layout, group) * layout->layer_bytes;
}

uint64_t pd_kv_layout_head_offset(const pd_kv_layout *layout, uint32_t group, pd_block block,
                                  uint32_t kv_head)
{
    pd_assert(block < layout->blocks && kv_head < layout->kv_heads);
    uint32_t rank = kv_head / layout->rank_heads, head = kv_head % layout->rank_heads;
    /* every group before this one is a full one */
    uint64_t group_start = (uint64_t)group * layout->group_layers * layout->rank_heads *
                           layout->layer_bytes * layout->blocks;

    return rank * layout->rank_bytes + group_start +
           ((uint64_t)block * layout->rank_heads + head) * pd_kv_layout_head_bytes(layout, group);
}

uint64_t pd_kv_layout_block_offset(const pd_kv_layout *layout, uint32_t group, pd_block block)
{
    pd_assert(layout->ranks == 1);
    return pd_kv_layout_head_offset(layout, group, block, 0);
}

uint64_t pd_kv_layout_k_offset(const pd_kv_layout *layout, uint32_t layer, pd_block block,
                               uint32_t kv_head)
{
    pd_assert(layer < layout->layers);
    uint32_t group = pd_kv_layout_group_of(layout, layer);
    uint64_t in_group = layer - group * layout->group_layers;
    return pd_kv_layout_head_offset(layout, group, block, kv_head) + in_group * layout->layer_bytes;
}

uint64_t pd_kv_layout_fingerprint(const pd_kv_layout *layout)
{
    /* fields one by one: padding and the pool's size must not take part */
    const uint32_t fields[] = {
        1, /* order of the dimensions: this file's version of it */
        layout->dtype,
        layout->layers,
        layout->kv_heads,
        layout->head_dim,
        layout->block_tokens,
        layout->group_layers,
    };
    return pd_hash64(fields, sizeof fields, 0);
}

pd_kv_layout pd_kv_layout_of_peer(const pd_kv_layout *layout, uint32_t blocks, uint32_t ranks)
{
    pd_kv_layout peer = *layout;

    pd_assert(blocks > 0 && ranks > 0 && layout->kv_heads % ranks == 0);
    peer.blocks = blocks;
    peer.ranks = ranks;
    peer.rank_heads = layout->kv_heads / ranks;
    peer.pool_bytes = blocks * layout->block_bytes_all;
    peer.rank_bytes = peer.pool_bytes / ranks;
    return peer;
}

void pd_kv_layout_describe(const pd_kv_layout *layout, char *text, size_t size)
{
    snprintf(text, size, "%s %ux%ux%u blocks of %u tokens, groups of %u layers",
             pd_kv_dtype_name(layout->dtype), layout->layers, layout->kv_heads, layout->head_dim,
             layout->block_tokens, layout->group_layers);
}
