#include "tests/unit/kernels/tiny_model.h"

#include "common/base/buf.h"
#include "common/base/mem.h"
#include "kernels/k_blocks.h"
#include "kernels/number.h"
#include "tests/unit/kernels/quantise.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const tiny_shape tiny_every_format = {
    .hidden = 96,
    .heads = 6,
    .kv_heads = 2,
    .head_dim = 32,
    .ffn = 192,
    .layers = 3,
    .vocab = TINY_VOCAB,
    .context = 1024,
    .embedding = PD_Q8_0,
    .query = PD_Q4_1,
    .key = PD_Q8_0,
    .value = PD_F16,
    .output = PD_Q4_0,
    .gate = PD_Q4_1,
    .up = PD_BF16,
    .down = PD_Q8_0,
    .head = PD_F32,
};

typedef struct tensor {
    char name[48];
    pd_dtype dtype;
    uint32_t cols, rows;
    uint64_t offset;
} tensor;

typedef struct writer {
    pd_buf head, data;
    tensor tensors[64];
    uint32_t tensors_count;
    uint64_t keys;
    bool from_floats;
} writer;

static const uint32_t gguf_types[] = {[PD_F32] = 0,  [PD_F16] = 1,  [PD_BF16] = 30, [PD_Q4_0] = 2,
                                      [PD_Q4_1] = 3, [PD_Q8_0] = 8, [PD_Q4_K] = 12, [PD_Q6_K] = 14};

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
    } else if (dtype == PD_Q4_K) { /* scales and minima of 6 bits: 31 on average */
        half = kern_f32_to_f16(value * 0.0016f);
        least = kern_f32_to_f16(value * 0.012f);
        memcpy(block, &half, 2);
        memcpy(block + 2, &least, 2);
    } else if (dtype == PD_Q6_K) {
        half = kern_f32_to_f16(value * 0.0003f);
        memcpy(block + KERN_Q6K_D_AT, &half, 2);
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

/* Evenly around 0, of a size that outputs are about as large as inputs. No outliers: a 4-bit block
 * with one has little else left. */
static void fill_from_floats(pd_dtype dtype, uint64_t seed, uint32_t rows, uint32_t cols, void *out)
{
    size_t count = (size_t)rows * cols;
    float *values = malloc(count * sizeof *values);

    for (size_t i = 0; i < count; i++)
        values[i] = ((float)(pd_random_next(&seed) >> 40) * 0x1p-23f - 1) / sqrtf((float)cols / 3);
    test_quantise(dtype, values, count, out);
    free(values);
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
    size_t bytes = (size_t)cols * rows / info->block_weights * info->block_bytes;
    void *memory = malloc(bytes);
    tensor *added = &w->tensors[w->tensors_count++];

    *added = (tensor){.dtype = dtype, .cols = cols, .rows = rows, .offset = w->data.len};
    snprintf(added->name, sizeof added->name, "%s", name);
    if (w->from_floats && rows > 1)
        fill_from_floats(dtype, w->tensors_count, rows, cols, memory);
    else
        tiny_fill(dtype, w->tensors_count, rows, cols, memory);
    pd_buf_append(&w->data, memory, bytes);
    while (w->data.len % 32 != 0)
        pd_buf_append(&w->data, "", 1);
    free(memory);
}

static void add_layer(writer *w, const tiny_shape *shape, uint32_t layer)
{
    uint32_t q = shape->heads * shape->head_dim, kv = shape->kv_heads * shape->head_dim;
    const struct {
        const char *name;
        pd_dtype dtype;
        uint32_t cols, rows;
    } parts[] = {
        {"attn_norm", PD_F32, shape->hidden, 1},
        {"attn_q", shape->query, shape->hidden, q},
        {"attn_k", shape->key, shape->hidden, kv},
        {"attn_v", shape->value, shape->hidden, kv},
        {"attn_output", shape->output, q, shape->hidden},
        {"ffn_norm", PD_F32, shape->hidden, 1},
        {"ffn_gate", shape->gate, shape->hidden, shape->ffn},
        {"ffn_up", shape->up, shape->hidden, shape->ffn},
        {"ffn_down", shape->down, shape->ffn, shape->hidden},
    };
    char name[48];

    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, parts[i].name);
        add_tensor(w, name, parts[i].dtype, parts[i].cols, parts[i].rows);
    }
}

static void add_keys(writer *w, const tiny_shape *shape)
{
    char token[12];

    key_text(w, "general.architecture", "llama");
    key_u32(w, "llama.block_count", shape->layers);
    key_u32(w, "llama.context_length", shape->context);
    key_u32(w, "llama.embedding_length", shape->hidden);
    key_u32(w, "llama.feed_forward_length", shape->ffn);
    key_u32(w, "llama.attention.head_count", shape->heads);
    key_u32(w, "llama.attention.head_count_kv", shape->kv_heads);
    key_u32(w, "llama.attention.key_length", shape->head_dim);
    key_u32(w, "llama.attention.value_length", shape->head_dim);
    key_u32(w, "llama.rope.dimension_count", shape->head_dim);
    key_f32(w, "llama.rope.freq_base", 10000);
    key_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    key_text(w, "tokenizer.ggml.model", "gpt2");
    put_text(&w->head, "tokenizer.ggml.tokens");
    put_u32(&w->head, 9);
    put_u32(&w->head, 8);
    put_u64(&w->head, shape->vocab);
    for (uint32_t i = 0; i < shape->vocab; i++) {
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

pd_model_file *tiny_open(void)
{
    return tiny_open_shape(&tiny_every_format);
}

void tiny_write(const tiny_shape *shape, const char *path)
{
    writer *w = calloc(1, sizeof *w);
    FILE *file = fopen(path, "wb");

    if (w == NULL || file == NULL)
        abort();
    w->from_floats = shape->from_floats;
    pd_buf_init(&w->head, 1 << 20);
    pd_buf_init(&w->data, 1 << 23);
    add_keys(w, shape);
    add_tensor(w, "token_embd.weight", shape->embedding, shape->hidden, shape->vocab);
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        add_layer(w, shape, layer);
    add_tensor(w, "output_norm.weight", PD_F32, shape->hidden, 1);
    if (!shape->tied)
        add_tensor(w, "output.weight", shape->head, shape->hidden, shape->vocab);
    write_file(w, file);
    if (fclose(file) != 0)
        abort();
    pd_buf_fini(&w->head);
    pd_buf_fini(&w->data);
    free(w);
}

pd_model_file *tiny_open_shape(const tiny_shape *shape)
{
    char path[] = "/tmp/kvferry-tiny-XXXXXX";
    pd_model_file *opened = NULL;
    int fd = mkstemp(path);

    if (fd < 0)
        abort();
    close(fd);
    tiny_write(shape, path);
    if (pd_model_file_open(path, &opened) != PD_OK)
        abort();
    unlink(path);
    return opened;
}

tiny_shape tiny_of_format(pd_dtype format)
{
    return (tiny_shape){.hidden = 256,
                        .heads = 8,
                        .kv_heads = 2,
                        .head_dim = 32,
                        .ffn = 256,
                        .layers = 2,
                        .vocab = TINY_VOCAB,
                        .context = 1024,
                        .from_floats = true,
                        .embedding = format,
                        .query = format,
                        .key = format,
                        .value = format,
                        .output = format,
                        .gate = format,
                        .up = format,
                        .down = format,
                        .head = format};
}

pd_model_file *tiny_open_for_ranks(uint32_t kv_heads)
{
    tiny_shape shape = tiny_every_format;

    shape.heads = 2 * kv_heads;
    shape.kv_heads = kv_heads;
    shape.ffn = 64 * kv_heads;
    shape.vocab = 24 * kv_heads;
    return tiny_open_shape(&shape);
}

pd_kv_layout tiny_layout(const pd_model_file *file, uint32_t blocks)
{
    return tiny_layout_of(file, blocks, PD_F16);
}

pd_kv_layout tiny_layout_of(const pd_model_file *file, uint32_t blocks, pd_dtype dtype)
{
    pd_kv_layout layout;
    pd_kv_layout_options options = {.dtype = dtype,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = (uint64_t)1 << 30,
                                    .blocks_max = blocks};

    if (pd_kv_layout_make(pd_model_file_shape(file), &options, &layout) != PD_OK)
        abort();
    return layout;
}

double tiny_kv_value(const pd_kv_layout *layout, const uint8_t *half, uint32_t token, uint32_t d)
{
    const uint8_t *row = half + token * layout->token_bytes;
    uint16_t f16;
    float scale;

    if (layout->dtype == PD_F16) {
        memcpy(&f16, row + 2 * (size_t)d, sizeof f16);
        return (double)kern_f16_to_f32(f16);
    }
    memcpy(&scale, half + layout->scales_at + token * sizeof scale, sizeof scale);
    if (layout->dtype == PD_INT8)
        return (double)scale * (int8_t)row[d];
    int exponent = row[d] >> 3 & 15, fraction = row[d] & 7;
    double magnitude = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);
    return (row[d] & 0x80 ? -1 : 1) * magnitude / 256 * (double)scale;
}
