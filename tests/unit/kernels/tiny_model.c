#include "tests/unit/kernels/tiny_model.h"

#include "common/base/buf.h"
#include "common/base/mem.h"
#include "kernels/number.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { HIDDEN = 96, HEAD_DIM = 32, LAYERS = 3, CONTEXT = 1024 };

typedef struct sizes {
    uint32_t heads, kv_heads, ffn, vocab;
} sizes;

typedef struct tensor {
    char name[48];
    pd_dtype dtype;
    uint32_t cols, rows;
    uint64_t offset;
} tensor;

typedef struct writer {
    pd_buf head, data;
    const sizes *of;
    tensor tensors[64];
    uint32_t tensors_count;
    uint64_t keys;
} writer;

static const uint32_t gguf_types[] = {
    [PD_F32] = 0, [PD_F16] = 1, [PD_BF16] = 30, [PD_Q4_0] = 2, [PD_Q4_1] = 3, [PD_Q8_0] = 8};

float tiny_random(uint64_t *state)
{
    float value = (float)(pd_random_next(state) >> 40) * 0x1p-23f - 1;
    return pd_random_next(state) % 50 == 0 ? value * 40 : value;
}

static void fill_block(pd_dtype dtype, uint64_t *state, uint8_t *block)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    float value = tiny_random(state) * 0.2f;
    uint16_t half = kern_f32_to_f16(value * 0.05f), least = kern_f32_to_f16(value * -0.4f);

    for (uint32_t i = 0; i < info->block_bytes; i++)
        block[i] = (uint8_t)pd_random_next(state);
    if (dtype == PD_F32) {
        memcpy(block, &value, 4);
    } else if (dtype == PD_F16 || dtype == PD_BF16) {
        half = dtype == PD_F16 ? kern_f32_to_f16(value) : (uint16_t)(kern_bits_of(value) >> 16);
        memcpy(block, &half, 2);
    } else {
        half = dtype == PD_Q8_0 ? kern_f32_to_f16(value * 0.01f) : half;
        memcpy(block, &half, 2);
        if (dtype == PD_Q4_1)
            memcpy(block + 2, &least, 2);
    }
}

void tiny_fill(pd_dtype dtype, uint64_t seed, uint32_t rows, uint32_t cols, void *out)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    uint64_t blocks = (uint64_t)rows * cols / info->block_weights;

    for (uint64_t i = 0; i < blocks; i++)
        fill_block(dtype, &seed, (uint8_t *)out + i * info->block_bytes);
}

static void put_u32(pd_buf *buf, uint32_t value)
{
    pd_buf_append(buf, &value, sizeof value);
}

static void put_u64(pd_buf *buf, uint64_t value)
{
    pd_buf_append(buf, &value, sizeof value);
}

static void put_text(pd_buf *buf, const char *text)
{
    put_u64(buf, strlen(text));
    pd_buf_puts(buf, text);
}

static void key_u32(writer *w, const char *key, uint32_t value)
{
    put_text(&w->head, key);
    put_u32(&w->head, 4);
    put_u32(&w->head, value);
    w->keys++;
}

static void key_f32(writer *w, const char *key, float value)
{
    put_text(&w->head, key);
    put_u32(&w->head, 6);
    pd_buf_append(&w->head, &value, sizeof value);
    w->keys++;
}

static void key_text(writer *w, const char *key, const char *value)
{
    put_text(&w->head, key);
    put_u32(&w->head, 8);
    put_text(&w->head, value);
    w->keys++;
}

static void add_tensor(writer *w, const char *name, pd_dtype dtype, uint32_t cols, uint32_t rows)
{
    const pd_dtype_info *info = pd_dtype_info_of(dtype);
    size_t bytes = (size_t)cols / info->block_weights * info->block_bytes * rows;
    void *memory = malloc(bytes);
    tensor *added = &w->tensors[w->tensors_count++];

    *added = (tensor){.dtype = dtype, .cols = cols, .rows = rows, .offset = w->data.len};
    snprintf(added->name, sizeof added->name, "%s", name);
    tiny_fill(dtype, w->tensors_count, rows, cols, memory);
    pd_buf_append(&w->data, memory, bytes);
    while (w->data.len % 32 != 0)
        pd_buf_append(&w->data, "", 1);
    free(memory);
}

static void add_layer(writer *w, uint32_t layer)
{
    const uint32_t q = w->of->heads * HEAD_DIM, kv = w->of->kv_heads * HEAD_DIM, ffn = w->of->ffn;
    const struct {
        const char *name;
        pd_dtype dtype;
        uint32_t cols, rows;
    } parts[] = {
        {"attn_norm", PD_F32, HIDDEN, 1},    {"attn_q", PD_Q4_1, HIDDEN, q},
        {"attn_k", PD_Q8_0, HIDDEN, kv},     {"attn_v", PD_F16, HIDDEN, kv},
        {"attn_output", PD_Q4_0, q, HIDDEN}, {"ffn_norm", PD_F32, HIDDEN, 1},
        {"ffn_gate", PD_Q4_1, HIDDEN, ffn},  {"ffn_up", PD_BF16, HIDDEN, ffn},
        {"ffn_down", PD_Q8_0, ffn, HIDDEN},
    };
    char name[48];

    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, parts[i].name);
        add_tensor(w, name, parts[i].dtype, parts[i].cols, parts[i].rows);
    }
}

static void add_keys(writer *w)
{
    char token[16];

    key_text(w, "general.architecture", "llama");
    key_u32(w, "llama.block_count", LAYERS);
    key_u32(w, "llama.context_length", CONTEXT);
    key_u32(w, "llama.embedding_length", HIDDEN);
    key_u32(w, "llama.feed_forward_length", w->of->ffn);
    key_u32(w, "llama.attention.head_count", w->of->heads);
    key_u32(w, "llama.attention.head_count_kv", w->of->kv_heads);
    key_u32(w, "llama.attention.key_length", HEAD_DIM);
    key_u32(w, "llama.attention.value_length", HEAD_DIM);
    key_u32(w, "llama.rope.dimension_count", HEAD_DIM);
    key_f32(w, "llama.rope.freq_base", 10000);
    key_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    key_text(w, "tokenizer.ggml.model", "gpt2");
    put_text(&w->head, "tokenizer.ggml.tokens");
    put_u32(&w->head, 9);
    put_u32(&w->head, 8);
    put_u64(&w->head, w->of->vocab);
    for (uint32_t i = 0; i < w->of->vocab; i++) {
        snprintf(token, sizeof token, "t%u", i);
        put_text(&w->head, token);
    }
    w->keys++;
    put_text(&w->head, "tokenizer.ggml.merges");
    put_u32(&w->head, 9);
    put_u32(&w->head, 8);
    put_u64(&w->head, 1);
    put_text(&w->head, "t 1");
    w->keys++;
}

static void write_file(writer *w, FILE *file)
{
    pd_buf out;

    pd_buf_init(&out, 1 << 24);
    pd_buf_append(&out, "GGUF", 4);
    put_u32(&out, 3);
    put_u64(&out, w->tensors_count);
    put_u64(&out, w->keys);
    pd_buf_append(&out, w->head.bytes, w->head.len);
    for (uint32_t i = 0; i < w->tensors_count; i++) {
        const tensor *t = &w->tensors[i];
        put_text(&out, t->name);
        put_u32(&out, t->rows == 1 ? 1 : 2);
        put_u64(&out, t->cols);
        if (t->rows > 1)
            put_u64(&out, t->rows);
        put_u32(&out, gguf_types[t->dtype]);
        put_u64(&out, t->offset);
    }
    while (out.len % 32 != 0)
        pd_buf_append(&out, "", 1);
    pd_buf_append(&out, w->data.bytes, w->data.len);
    if (pd_buf_status(&out) != PD_OK || fwrite(out.bytes, 1, out.len, file) != out.len)
        abort();
    pd_buf_fini(&out);
}

static pd_model_file *open_sizes(const sizes *of)
{
    char path[] = "/tmp/kvferry-tiny-XXXXXX";
    writer *w = calloc(1, sizeof *w);
    pd_model_file *opened = NULL;

    w->of = of;
    pd_buf_init(&w->head, 1 << 20);
    pd_buf_init(&w->data, 1 << 23);
    add_keys(w);
    add_tensor(w, "token_embd.weight", PD_Q8_0, HIDDEN, of->vocab);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        add_layer(w, layer);
    add_tensor(w, "output_norm.weight", PD_F32, HIDDEN, 1);
    add_tensor(w, "output.weight", PD_F32, HIDDEN, of->vocab);
    int fd = mkstemp(path);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "wb");
    if (file == NULL)
        abort();
    write_file(w, file);
    if (fclose(file) != 0 || pd_model_file_open(path, &opened) != PD_OK)
        abort();
    unlink(path);
    pd_buf_fini(&w->head);
    pd_buf_fini(&w->data);
    free(w);
    return opened;
}

pd_model_file *tiny_open(void)
{
    return open_sizes(&(sizes){.heads = 6, .kv_heads = 2, .ffn = 192, .vocab = TINY_VOCAB});
}

pd_model_file *tiny_open_for_ranks(uint32_t kv_heads)
{
    return open_sizes(&(sizes){
        .heads = 2 * kv_heads, .kv_heads = kv_heads, .ffn = 64 * kv_heads, .vocab = 24 * kv_heads});
}

pd_kv_layout tiny_layout(const pd_model_file *file, uint32_t blocks)
{
    pd_kv_layout layout;
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = (uint64_t)1 << 30,
                                    .blocks_max = blocks};

    if (pd_kv_layout_make(pd_model_file_shape(file), &options, &layout) != PD_OK)
        abort();
    return layout;
}
