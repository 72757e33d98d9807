#include "common/model_file/model_file.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/utf8.h"
#include "common/model_file/gguf.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LAYERS_MAX = 1024,
    HIDDEN_MAX = 1 << 17,
    HEADS_MAX = 1024,
    HEAD_DIM_MAX = 1024,
    FFN_MAX = 1 << 20,
    VOCAB_MAX = 1 << 22,
    CONTEXT_MAX = 1 << 26,
    SAMPLE_BYTES = 256, /* of a tensor, at its start, middle and end, in the fingerprint */
};

struct pd_model_file {
    char *path;
    char *name;
    void *map;
    size_t map_bytes;
    pd_gguf gguf;
    pd_model_shape shape;
    pd_text_tables text;
    char *text_bytes; /* copies of tokens, merges and other strings */
    pd_hash128 fingerprint;
    pd_file_identity identity;
};

static const pd_dtype_info dtypes[PD_DTYPES] = {
    [PD_F32] = {"F32", 1, 4},
    [PD_F16] = {"F16", 1, 2},
    [PD_BF16] = {"BF16", 1, 2},
    [PD_Q4_0] = {"Q4_0", 32, 18},
    [PD_Q4_1] = {"Q4_1", 32, 20},
    [PD_Q8_0] = {"Q8_0", 32, 34},
    [PD_Q4_K] = {"Q4_K", 256, 144},
    [PD_Q6_K] = {"Q6_K", 256, 210},
    /* of KV alone */
    [PD_INT8] = {"INT8", 1, 1},
    [PD_FP8_E4M3] = {"FP8_E4M3", 1, 1},
};

const pd_dtype_info *pd_dtype_info_of(pd_dtype dtype)
{
    pd_assert(dtype >= 0 && dtype < PD_DTYPES);
    return &dtypes[dtype];
}

/* ---- keys ---- */

static pd_status wrong_key(const pd_model_file *file, const char *key, const char *reason)
{
    pd_log_error("msg=\"model file: %s\" file=%s key=%s", reason, file->path, key);
    return PD_E_INVALID;
}

/* An integer key from 0 up, of any width; found_out is false when it is absent. */
static pd_status read_uint(const pd_model_file *file, const char *name, bool *found_out,
                           uint64_t *value_out)
{
    const pd_gguf_key *key = pd_gguf_find(&file->gguf, name);
    int64_t number = 0;

    *found_out = key != NULL;
    if (key == NULL)
        return PD_OK;
    switch (key->type) {
    case PD_GGUF_U8: number = *key->value; break;
    case PD_GGUF_I8: number = (int8_t)*key->value; break;
    case PD_GGUF_U16: {
        uint16_t v;
        memcpy(&v, key->value, sizeof v);
        number = v;
        break;
    }
    case PD_GGUF_I16: {
        int16_t v;
        memcpy(&v, key->value, sizeof v);
        number = v;
        break;
    }
    case PD_GGUF_U32: {
        uint32_t v;
        memcpy(&v, key->value, sizeof v);
        number = v;
        break;
    }
    case PD_GGUF_I32: {
        int32_t v;
        memcpy(&v, key->value, sizeof v);
        number = v;
        break;
    }
    case PD_GGUF_U64: /* one beyond int64 shows as negative */
    case PD_GGUF_I64: memcpy(&number, key->value, sizeof number); break;
    default: return wrong_key(file, name, "key has to be an integer");
    }
    if (number < 0)
        return wrong_key(file, name, "key is negative or too large");
    *value_out = (uint64_t)number;
    return PD_OK;
}

/* A size of the model: 1 to max. fallback 0: the key has to be there. */
static pd_status read_size(const pd_model_file *file, const char *suffix, uint32_t fallback,
                           uint32_t max, uint32_t *out)
{
    char name[96];
    bool found;
    uint64_t value = 0;

    snprintf(name, sizeof name, "%s.%s", file->shape.architecture, suffix);
    pd_status status = read_uint(file, name, &found, &value);
    if (status != PD_OK)
        return status;
    if (!found && fallback == 0)
        return wrong_key(file, name, "no whole model: key is missing");
    if (!found)
        value = fallback;
    if (value == 0 || value > max) {
        pd_log_error("msg=\"model file: key has to be 1 to %" PRIu32 "\" file=%s key=%s "
                     "value=%" PRIu64,
                     max, file->path, name, value);
        return PD_E_INVALID;
    }
    *out = (uint32_t)value;
    return PD_OK;
}

static pd_status read_real(const pd_model_file *file, const char *suffix, double fallback,
                           double *out)
{
    char name[96];

    snprintf(name, sizeof name, "%s.%s", file->shape.architecture, suffix);
    const pd_gguf_key *key = pd_gguf_find(&file->gguf, name);
    double value = fallback;
    if (key == NULL && isnan(fallback))
        return wrong_key(file, name, "no whole model: key is missing");
    if (key != NULL && key->type == PD_GGUF_F32) {
        float v;
        memcpy(&v, key->value, sizeof v);
        value = v;
    } else if (key != NULL && key->type == PD_GGUF_F64) {
        memcpy(&value, key->value, sizeof value);
    } else if (key != NULL) {
        return wrong_key(file, name, "key has to be a real number");
    }
    if (!isfinite(value) || value <= 0)
        return wrong_key(file, name, "key has to be a number above 0");
    *out = value;
    return PD_OK;
}

/* The bytes of a string key; NULL when it is absent. Text without NUL. */
static pd_status read_string(const pd_model_file *file, const char *name, const char **text_out,
                             size_t *len_out)
{
    const pd_gguf_key *key = pd_gguf_find(&file->gguf, name);

    *text_out = NULL;
    *len_out = 0;
    if (key == NULL)
        return PD_OK;
    if (key->type != PD_GGUF_STRING)
        return wrong_key(file, name, "key has to be a string");
    if (memchr(key->value, '\0', key->value_bytes) != NULL ||
        !pd_utf8_valid((const char *)key->value, key->value_bytes))
        return wrong_key(file, name, "key holds no text");
    *text_out = (const char *)key->value;
    *len_out = key->value_bytes;
    return PD_OK;
}

static pd_status read_bool(const pd_model_file *file, const char *name, bool *out)
{
    const pd_gguf_key *key = pd_gguf_find(&file->gguf, name);

    if (key != NULL && key->type != PD_GGUF_BOOL)
        return wrong_key(file, name, "key has to be a bool");
    *out = key != NULL && *key->value == 1;
    return PD_OK;
}

/* ---- text tables ---- */

/* An array key of the item type wanted; NULL when it is absent. want_count 0: any. */
static pd_status read_array(const pd_model_file *file, const char *name, pd_gguf_type item_type,
                            uint64_t want_count, const pd_gguf_key **key_out)
{
    const pd_gguf_key *key = pd_gguf_find(&file->gguf, name);

    *key_out = key;
    if (key == NULL)
        return PD_OK;
    if (key->type != PD_GGUF_ARRAY || key->item_type != item_type) {
        pd_log_error("msg=\"model file: key has to be an array of %s\" file=%s key=%s type=%s",
                     pd_gguf_type_name(item_type), file->path, name,
                     pd_gguf_type_name(key->type == PD_GGUF_ARRAY ? key->item_type : key->type));
        return PD_E_INVALID;
    }
    if (want_count != 0 && key->count != want_count) {
        pd_log_error("msg=\"model file: array does not fit the tokens\" file=%s key=%s "
                     "count=%" PRIu64 " tokens=%" PRIu64,
                     file->path, name, key->count, want_count);
        return PD_E_INVALID;
    }
    return PD_OK;
}

/* Copies an array of strings, NUL-terminated, to *bytes (which has room) and moves it on. */
static pd_status copy_strings(const pd_model_file *file, const pd_gguf_key *key, char **bytes,
                              const char **texts, uint32_t *lens)
{
    const unsigned char *at = key->value;

    for (uint64_t i = 0; i < key->count; i++) {
        uint64_t len;
        const char *text = pd_gguf_next_string(&at, &len);
        if (len > UINT32_MAX || !pd_utf8_valid(text, len)) {
            pd_log_error("msg=\"model file: item %" PRIu64 " is no UTF-8 text\" file=%s key=%s", i,
                         file->path, key->name);
            return PD_E_INVALID;
        }
        memcpy(*bytes, text, len);
        (*bytes)[len] = '\0';
        texts[i] = *bytes;
        lens[i] = (uint32_t)len;
        *bytes += len + 1;
    }
    return PD_OK;
}

static pd_status check_merges(const pd_model_file *file, const char *name)
{
    const pd_text_tables *text = &file->text;

    for (uint32_t i = 0; i < text->merges_count; i++) {
        uint32_t len = text->merges_len[i];
        const char *space = len > 2 ? memchr(text->merges[i] + 1, ' ', len - 2) : NULL;
        if (space == NULL) {
            pd_log_error("msg=\"model file: merge %" PRIu32 " is not two pieces with a space "
                         "between\" file=%s key=%s",
                         i, file->path, name);
            return PD_E_INVALID;
        }
    }
    return PD_OK;
}

static pd_status copy_tables(pd_model_file *file, const pd_gguf_key *tokens,
                             const pd_gguf_key *merges, const char *model, size_t model_len,
                             const char *pre, size_t pre_len)
{
    pd_text_tables *text = &file->text;
    uint64_t merges_count = merges != NULL ? merges->count : 0;

    /* in the file a string has a length field of 8 bytes; here a NUL */
    file->text_bytes = pd_malloc(tokens->value_bytes + (merges != NULL ? merges->value_bytes : 0) +
                                 model_len + pre_len + 2);
    text->tokens = pd_calloc(tokens->count, sizeof text->tokens[0]);
    uint32_t *tokens_len = pd_calloc(tokens->count, sizeof *tokens_len);
    text->tokens_len = tokens_len;
    text->merges = pd_calloc(merges_count, sizeof text->merges[0]);
    uint32_t *merges_len = pd_calloc(merges_count, sizeof *merges_len);
    text->merges_len = merges_len;
    if (file->text_bytes == NULL || text->tokens == NULL || tokens_len == NULL ||
        text->merges == NULL || merges_len == NULL) {
        pd_log_error("msg=\"model file: out of memory for the tokens\" file=%s", file->path);
        return PD_E_NOMEM;
    }
    char *bytes = file->text_bytes;
    memcpy(bytes, model, model_len);
    bytes[model_len] = '\0';
    text->model = bytes;
    bytes += model_len + 1;
    if (pre_len != 0)
        memcpy(bytes, pre, pre_len);
    bytes[pre_len] = '\0';
    text->pre = bytes;
    bytes += pre_len + 1;
    pd_status status = copy_strings(file, tokens, &bytes, text->tokens, tokens_len);
    if (status == PD_OK && merges != NULL)
        status = copy_strings(file, merges, &bytes, text->merges, merges_len);
    if (status != PD_OK)
        return status;
    text->tokens_count = (uint32_t)tokens->count;
    text->merges_count = (uint32_t)merges_count;
    return merges != NULL ? check_merges(file, merges->name) : PD_OK;
}

static pd_status read_types(pd_model_file *file)
{
    static const char name[] = "tokenizer.ggml.token_type";
    const pd_gguf_key *types = NULL;
    uint32_t count = file->text.tokens_count;

    pd_status status = read_array(file, name, PD_GGUF_I32, count, &types);
    if (status != PD_OK || types == NULL)
        return status;
    int32_t *copy = pd_calloc(count, sizeof *copy); /* in the file they may lie unaligned */
    if (copy == NULL) {
        pd_log_error("msg=\"model file: out of memory for the tokens\" file=%s", file->path);
        return PD_E_NOMEM;
    }
    file->text.types = copy;
    memcpy(copy, types->value, (size_t)count * sizeof *copy);
    for (uint32_t i = 0; i < count; i++) {
        if (copy[i] < 1 || copy[i] > 6)
            return wrong_key(file, name, "a token's type is not 1 to 6");
    }
    return PD_OK;
}

static pd_status read_id(const pd_model_file *file, const char *name, int64_t *id_out)
{
    bool found;
    uint64_t id = 0;

    pd_status status = read_uint(file, name, &found, &id);
    if (status != PD_OK)
        return status;
    if (found && id >= file->text.tokens_count) {
        pd_log_error("msg=\"model file: id is not of the vocabulary\" file=%s key=%s "
                     "value=%" PRIu64 " tokens=%" PRIu32,
                     file->path, name, id, file->text.tokens_count);
        return PD_E_INVALID;
    }
    *id_out = found ? (int64_t)id : -1;
    return PD_OK;
}

static pd_status read_ids(pd_model_file *file)
{
    pd_text_tables *text = &file->text;
    const struct {
        const char *name;
        int64_t *id;
    } ids[] = {
        {"tokenizer.ggml.bos_token_id", &text->bos_id},
        {"tokenizer.ggml.eos_token_id", &text->eos_id},
        {"tokenizer.ggml.eot_token_id", &text->eot_id},
        {"tokenizer.ggml.unknown_token_id", &text->unk_id},
        {"tokenizer.ggml.padding_token_id", &text->pad_id},
    };
    pd_status status = PD_OK;

    for (size_t i = 0; i < sizeof ids / sizeof ids[0] && status == PD_OK; i++)
        status = read_id(file, ids[i].name, ids[i].id);
    if (status == PD_OK)
        status = read_bool(file, "tokenizer.ggml.add_bos_token", &text->add_bos);
    if (status == PD_OK)
        status = read_bool(file, "tokenizer.ggml.add_eos_token", &text->add_eos);
    if (status != PD_OK)
        return status;
    if (text->add_bos && text->bos_id < 0)
        return wrong_key(file, "tokenizer.ggml.add_bos_token",
                         "a first token is to be added but tokenizer.ggml.bos_token_id is missing");
    if (text->add_eos && text->eos_id < 0)
        return wrong_key(file, "tokenizer.ggml.add_eos_token",
                         "a last token is to be added but tokenizer.ggml.eos_token_id is missing");
    return PD_OK;
}

static pd_status read_text(pd_model_file *file)
{
    const pd_gguf_key *tokens = NULL, *merges = NULL, *scores = NULL;
    const char *model = NULL, *pre = NULL;
    size_t model_len = 0, pre_len = 0;

    pd_status status = read_string(file, "tokenizer.ggml.model", &model, &model_len);
    if (status == PD_OK)
        status = read_string(file, "tokenizer.ggml.pre", &pre, &pre_len);
    if (status == PD_OK)
        status = read_array(file, "tokenizer.ggml.tokens", PD_GGUF_STRING, 0, &tokens);
    if (status == PD_OK)
        status = read_array(file, "tokenizer.ggml.merges", PD_GGUF_STRING, 0, &merges);
    if (status == PD_OK)
        status = read_string(file, "tokenizer.chat_template", &file->text.chat_template,
                             &file->text.chat_template_len);
    if (status != PD_OK)
        return status;
    if (model == NULL)
        return wrong_key(file, "tokenizer.ggml.model", "no whole model: key is missing");
    if (tokens == NULL)
        return wrong_key(file, "tokenizer.ggml.tokens", "no whole model: key is missing");
    if (tokens->count == 0 || tokens->count > VOCAB_MAX)
        return wrong_key(file, "tokenizer.ggml.tokens", "no tokens, or too many");
    if (merges != NULL && merges->count > VOCAB_MAX)
        return wrong_key(file, "tokenizer.ggml.merges", "too many merges");
    status = copy_tables(file, tokens, merges, model, model_len, pre, pre_len);
    if (status == PD_OK) /* not used, but a table that does not fit tells of a broken file */
        status = read_array(file, "tokenizer.ggml.scores", PD_GGUF_F32, tokens->count, &scores);
    if (status == PD_OK)
        status = read_types(file);
    return status == PD_OK ? read_ids(file) : status;
}

/* ---- shape ---- */

static pd_status read_architecture(pd_model_file *file)
{
    const char *text = NULL;
    size_t len = 0;

    pd_status status = read_string(file, "general.architecture", &text, &len);
    if (status != PD_OK)
        return status;
    if (text == NULL)
        return wrong_key(file, "general.architecture", "no whole model: key is missing");
    if (len != 5 || memcmp(text, "llama", 5) != 0) {
        pd_log_error("msg=\"model file: only the llama architecture is run\" file=%s "
                     "key=general.architecture value=%.*s",
                     file->path, (int)(len < 64 ? len : 64), text);
        return PD_E_UNSUPPORTED;
    }
    memcpy(file->shape.architecture, text, len);
    file->shape.architecture[len] = '\0';
    return PD_OK;
}

/* Keys that would change what the layers compute, in ways we do not. */
static pd_status refuse_variants(const pd_model_file *file)
{
    const char *scaling = NULL;
    size_t len = 0;
    bool found;
    uint64_t experts = 0;

    pd_status status = read_string(file, "llama.rope.scaling.type", &scaling, &len);
    if (status == PD_OK)
        status = read_uint(file, "llama.expert_count", &found, &experts);
    if (status != PD_OK)
        return status;
    bool scaled = scaling != NULL && !(len == 4 && memcmp(scaling, "none", 4) == 0);
    if (scaled || pd_gguf_find(&file->gguf, "llama.rope.scale_linear") != NULL) {
        pd_log_error("msg=\"model file: scaled rotary positions are not run\" file=%s key=%s",
                     file->path, scaled ? "llama.rope.scaling.type" : "llama.rope.scale_linear");
        return PD_E_UNSUPPORTED;
    }
    if (experts != 0) {
        pd_log_error("msg=\"model file: mixtures of experts are not run\" file=%s "
                     "key=llama.expert_count value=%" PRIu64,
                     file->path, experts);
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

static pd_status read_heads(pd_model_file *file)
{
    pd_model_shape *shape = &file->shape;
    uint32_t value_dim = 0;

    pd_status status = read_size(file, "attention.head_count", 0, HEADS_MAX, &shape->heads);
    if (status == PD_OK)
        status =
            read_size(file, "attention.head_count_kv", shape->heads, HEADS_MAX, &shape->kv_heads);
    if (status != PD_OK)
        return status;
    if (shape->heads % shape->kv_heads != 0)
        return wrong_key(file, "llama.attention.head_count_kv",
                         "does not divide llama.attention.head_count");
    uint32_t head_dim = shape->hidden / shape->heads;
    if (pd_gguf_find(&file->gguf, "llama.attention.key_length") == NULL &&
        shape->hidden % shape->heads != 0)
        return wrong_key(file, "llama.attention.head_count",
                         "does not divide llama.embedding_length");
    status = read_size(file, "attention.key_length", head_dim, HEAD_DIM_MAX, &shape->head_dim);
    if (status == PD_OK)
        status =
            read_size(file, "attention.value_length", shape->head_dim, HEAD_DIM_MAX, &value_dim);
    if (status == PD_OK)
        status = read_size(file, "rope.dimension_count", shape->head_dim, shape->head_dim,
                           &shape->rope_dims);
    if (status != PD_OK)
        return status;
    if (value_dim != shape->head_dim)
        return wrong_key(file, "llama.attention.value_length",
                         "heads whose keys and values differ in length are not run");
    if (shape->rope_dims % 2 != 0)
        return wrong_key(file, "llama.rope.dimension_count", "has to be even");
    return PD_OK;
}

static pd_status read_shape(pd_model_file *file)
{
    pd_model_shape *shape = &file->shape;
    double eps = 0;

    pd_status status = read_architecture(file);
    if (status == PD_OK)
        status = refuse_variants(file);
    if (status == PD_OK)
        status = read_size(file, "block_count", 0, LAYERS_MAX, &shape->layers);
    if (status == PD_OK)
        status = read_size(file, "embedding_length", 0, HIDDEN_MAX, &shape->hidden);
    if (status == PD_OK)
        status = read_size(file, "feed_forward_length", 0, FFN_MAX, &shape->ffn);
    if (status == PD_OK)
        status = read_size(file, "context_length", 0, CONTEXT_MAX, &shape->context);
    if (status == PD_OK)
        status = read_heads(file);
    if (status == PD_OK)
        status = read_real(file, "rope.freq_base", 10000.0, &shape->rope_base);
    if (status == PD_OK)
        status = read_real(file, "attention.layer_norm_rms_epsilon", NAN, &eps);
    if (status == PD_OK)
        status = read_size(file, "vocab_size", file->text.tokens_count, VOCAB_MAX, &shape->vocab);
    if (status != PD_OK)
        return status;
    shape->rms_eps = (float)eps;
    if (shape->vocab != file->text.tokens_count)
        return wrong_key(file, "llama.vocab_size",
                         "differs from the number of tokenizer.ggml.tokens");
    return PD_OK;
}

/* ---- tensors ---- */

/* A matrix [rows][columns], or a norm's vector when rows is 0, which has to be F32. */
static pd_status check_tensor(const pd_model_file *file, const char *name, uint64_t columns,
                              uint64_t rows)
{
    const pd_tensor *tensor = pd_gguf_tensor(&file->gguf, name);
    uint64_t want[4] = {columns, rows != 0 ? rows : 1, 1, 1};

    if (tensor == NULL) {
        pd_log_error("msg=\"model file: no whole model: tensor is missing\" file=%s tensor=%s",
                     file->path, name);
        return PD_E_INVALID;
    }
    if (memcmp(tensor->dims, want, sizeof want) != 0) {
        pd_log_error("msg=\"model file: tensor's dimensions do not fit the model's shape\" "
                     "file=%s tensor=%s dims=%" PRIu64 "x%" PRIu64 "x%" PRIu64 "x%" PRIu64
                     " wanted=%" PRIu64 "x%" PRIu64,
                     file->path, name, tensor->dims[0], tensor->dims[1], tensor->dims[2],
                     tensor->dims[3], want[0], want[1]);
        return PD_E_INVALID;
    }
    if (rows == 0 && tensor->dtype != PD_F32) {
        pd_log_error("msg=\"model file: tensor's number format is not run here\" file=%s "
                     "tensor=%s format=%s",
                     file->path, name, dtypes[tensor->dtype].name);
        return PD_E_UNSUPPORTED;
    }
    return PD_OK;
}

static pd_status check_layer(const pd_model_file *file, uint32_t layer)
{
    const pd_model_shape *s = &file->shape;
    uint64_t q_rows = (uint64_t)s->heads * s->head_dim,
             kv_rows = (uint64_t)s->kv_heads * s->head_dim;
    const struct {
        const char *name;
        uint64_t columns, rows;
    } want[] = {
        {"attn_norm", s->hidden, 0},        {"attn_q", s->hidden, q_rows},
        {"attn_k", s->hidden, kv_rows},     {"attn_v", s->hidden, kv_rows},
        {"attn_output", q_rows, s->hidden}, {"ffn_norm", s->hidden, 0},
        {"ffn_gate", s->hidden, s->ffn},    {"ffn_up", s->hidden, s->ffn},
        {"ffn_down", s->ffn, s->hidden},
    };
    char name[64];

    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        snprintf(name, sizeof name, "blk.%" PRIu32 ".%s.weight", layer, want[i].name);
        pd_status status = check_tensor(file, name, want[i].columns, want[i].rows);
        if (status != PD_OK)
            return status;
    }
    return PD_OK;
}

/* A tensor that no layer reads would mean a model that is more than we compute: biases, scaled
 * rotary frequencies, experts. */
static pd_status refuse_others(const pd_model_file *file)
{
    static const char *const parts[] = {"attn_norm", "attn_q",   "attn_k", "attn_v",  "attn_output",
                                        "ffn_norm",  "ffn_gate", "ffn_up", "ffn_down"};

    for (uint32_t i = 0; i < file->gguf.tensors_count; i++) {
        const char *name = file->gguf.tensors[i].name;
        bool known = strcmp(name, "token_embd.weight") == 0 ||
                     strcmp(name, "output_norm.weight") == 0 || strcmp(name, "output.weight") == 0;
        char again[64];
        unsigned layer = 0;
        if (!known && sscanf(name, "blk.%u.", &layer) == 1 && layer < file->shape.layers) {
            for (size_t p = 0; p < sizeof parts / sizeof parts[0] && !known; p++) {
                snprintf(again, sizeof again, "blk.%u.%s.weight", layer, parts[p]);
                known = strcmp(name, again) == 0;
            }
        }
        if (!known) {
            pd_log_error("msg=\"model file: tensor is no part of the llama models that are run\" "
                         "file=%s tensor=%s",
                         file->path, name);
            return PD_E_UNSUPPORTED;
        }
    }
    return PD_OK;
}

static pd_status check_tensors(pd_model_file *file)
{
    pd_model_shape *shape = &file->shape;

    pd_status status = check_tensor(file, "token_embd.weight", shape->hidden, shape->vocab);
    if (status == PD_OK)
        status = check_tensor(file, "output_norm.weight", shape->hidden, 0);
    shape->tied_embeddings = pd_gguf_tensor(&file->gguf, "output.weight") == NULL;
    if (status == PD_OK && !shape->tied_embeddings)
        status = check_tensor(file, "output.weight", shape->hidden, shape->vocab);
    for (uint32_t i = 0; i < shape->layers && status == PD_OK; i++)
        status = check_layer(file, i);
    return status == PD_OK ? refuse_others(file) : status;
}

/* ---- opening ---- */

static uint64_t sample_hash(const pd_tensor *tensor)
{
    const unsigned char *data = tensor->data;
    uint64_t bytes = tensor->bytes;

    if (bytes <= 3 * SAMPLE_BYTES)
        return pd_hash64(data, bytes, 0);
    uint64_t hash = pd_hash64(data, SAMPLE_BYTES, bytes);
    hash = pd_hash64(data + bytes / 2, SAMPLE_BYTES, hash);
    return pd_hash64(data + bytes - SAMPLE_BYTES, SAMPLE_BYTES, hash);
}

static pd_status take_fingerprint(pd_model_file *file)
{
    const pd_gguf *gguf = &file->gguf;
    uint64_t *parts = pd_calloc((size_t)gguf->tensors_count + 2, sizeof *parts);

    if (parts == NULL)
        return PD_E_NOMEM;
    parts[0] = gguf->size;
    parts[1] = pd_hash64(gguf->bytes, gguf->header_bytes, 0);
    for (uint32_t i = 0; i < gguf->tensors_count; i++)
        parts[i + 2] = sample_hash(&gguf->tensors[i]);
    file->fingerprint = pd_hash128_of(parts, ((size_t)gguf->tensors_count + 2) * sizeof *parts, 0);
    pd_free(parts);
    return PD_OK;
}

/* "general.name", or the file's name without folder and ending. */
static pd_status take_name(pd_model_file *file)
{
    const char *text = NULL;
    size_t len = 0;

    pd_status status = read_string(file, "general.name", &text, &len);
    if (status != PD_OK)
        return status;
    if (text == NULL || len == 0) {
        const char *slash = strrchr(file->path, '/');
        text = slash != NULL ? slash + 1 : file->path;
        const char *dot = strrchr(text, '.');
        len = dot != NULL && dot != text ? (size_t)(dot - text) : strlen(text);
    }
    file->name = pd_strndup(text, len);
    return file->name != NULL ? PD_OK : PD_E_NOMEM;
}

static int64_t ns_of(const struct timespec *time)
{
    return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
}

static pd_file_identity identity_of(const struct stat *info)
{
    return (pd_file_identity){.device = info->st_dev,
                              .inode = info->st_ino,
                              .bytes = (uint64_t)info->st_size,
                              .modified_ns = ns_of(&info->st_mtim),
                              .changed_ns = ns_of(&info->st_ctim)};
}

static pd_status map_file(pd_model_file *file)
{
    struct stat info;
    pd_status status = PD_E_IO;

    /* not blocking: a path that is a FIFO would wait for a writer */
    int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        pd_log_error("msg=\"model file: cannot be opened: %m\" file=%s", file->path);
        return PD_E_IO;
    }
    if (fstat(fd, &info) != 0) {
        pd_log_error("msg=\"model file: cannot be read: %m\" file=%s", file->path);
    } else if (!S_ISREG(info.st_mode)) {
        pd_log_error("msg=\"model file: not a regular file\" file=%s", file->path);
    } else if (info.st_size == 0) {
        pd_log_error("msg=\"model file: cut off: it is empty\" file=%s size=0 needed_at_least=24",
                     file->path);
        status = PD_E_INVALID;
    } else {
        file->identity = identity_of(&info);
        file->map_bytes = (size_t)info.st_size;
        file->map = mmap(NULL, file->map_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (file->map == MAP_FAILED) {
            file->map = NULL;
            pd_log_error("msg=\"model file: cannot be mapped: %m\" file=%s", file->path);
        } else {
            status = PD_OK;
        }
    }
    close(fd);
    return status;
}

static pd_status open_container(const char *path, pd_model_file **file_out)
{
    pd_model_file *file = pd_calloc(1, sizeof *file);

    if (file == NULL)
        return PD_E_NOMEM;
    file->path = pd_strdup(path);
    pd_status status = file->path != NULL ? map_file(file) : PD_E_NOMEM;
    if (status == PD_OK)
        status = pd_gguf_parse(file->path, file->map, file->map_bytes, &file->gguf);
    if (status == PD_OK)
        status = take_name(file);
    if (status == PD_OK)
        status = take_fingerprint(file);
    if (status != PD_OK)
        pd_model_file_close(file);
    else
        *file_out = file;
    return status;
}

pd_status pd_model_file_open_container(const char *path, pd_model_file **file_out)
{
    return open_container(path, file_out);
}

pd_status pd_model_file_open(const char *path, pd_model_file **file_out)
{
    pd_model_file *file = NULL;

    pd_status status = open_container(path, &file);
    if (status != PD_OK)
        return status;
    status = read_text(file); /* first: the vocabulary's size is part of the shape */
    if (status == PD_OK)
        status = read_shape(file);
    if (status == PD_OK)
        status = check_tensors(file);
    if (status != PD_OK)
        pd_model_file_close(file);
    else
        *file_out = file;
    return status;
}

void pd_model_file_close(pd_model_file *file)
{
    if (file == NULL)
        return;
    pd_gguf_fini(&file->gguf);
    pd_free(file->text.tokens);
    pd_free((void *)file->text.tokens_len);
    pd_free((void *)file->text.types);
    pd_free(file->text.merges);
    pd_free((void *)file->text.merges_len);
    pd_free(file->text_bytes);
    if (file->map != NULL)
        munmap(file->map, file->map_bytes);
    pd_free(file->name);
    pd_free(file->path);
    pd_free(file);
}

const char *pd_model_file_path(const pd_model_file *file)
{
    return file->path;
}

const pd_model_shape *pd_model_file_shape(const pd_model_file *file)
{
    return &file->shape;
}

const pd_text_tables *pd_model_file_text(const pd_model_file *file)
{
    return &file->text;
}

const char *pd_model_file_name(const pd_model_file *file)
{
    return file->name;
}

const pd_tensor *pd_model_file_tensor(const pd_model_file *file, const char *name)
{
    return pd_gguf_tensor(&file->gguf, name);
}

pd_hash128 pd_model_file_fingerprint(const pd_model_file *file)
{
    return file->fingerprint;
}

pd_file_identity pd_model_file_identity(const pd_model_file *file)
{
    return file->identity;
}

bool pd_model_file_is_unchanged(const pd_model_file *file)
{
    struct stat info;

    /* what is at the path now may be another file: the mapped one is what it was */
    if (stat(file->path, &info) != 0)
        return true;
    pd_file_identity now = identity_of(&info);
    return now.device != file->identity.device || now.inode != file->identity.inode ||
           memcmp(&now, &file->identity, sizeof now) == 0;
}

pd_hash128 pd_model_file_hash(const pd_model_file *file)
{
    return pd_hash128_of(file->map, file->map_bytes, 0);
}
