#include "common/model_file/gguf.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/utf8.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF is read in place");

enum {
    HEADER_BYTES = 24,
    KEY_BYTES_MIN = 8 + 4 + 1,
    TENSOR_BYTES_MIN = 8 + 4 + 8 + 4 + 8,
    KEYS_MAX = 1 << 16,
    TENSORS_MAX = 1 << 17,
    NAME_BYTES_MAX = 1024,
    DIMS_MAX = 4,
    NEST_MAX = 4, /* arrays in arrays */
    ALIGN_DEFAULT = 32,
    ALIGN_MIN = 8,
    ALIGN_MAX = 1 << 16,
};

static const char *const type_names[PD_GGUF_TYPES] = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
static const unsigned char type_bytes[PD_GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* GGUF's numbers of the formats we know by size, then the names of those we only refuse. */
static const struct {
    uint32_t number;
    int dtype; /* -1: not ours */
    const char *name;
} formats[] = {
    {0, PD_F32, "F32"},    {1, PD_F16, "F16"}, {2, PD_Q4_0, "Q4_0"},  {3, PD_Q4_1, "Q4_1"},
    {6, -1, "Q5_0"},       {7, -1, "Q5_1"},    {8, PD_Q8_0, "Q8_0"},  {9, -1, "Q8_1"},
    {10, -1, "Q2_K"},      {11, -1, "Q3_K"},   {12, PD_Q4_K, "Q4_K"}, {13, -1, "Q5_K"},
    {14, PD_Q6_K, "Q6_K"}, {15, -1, "Q8_K"},   {16, -1, "IQ2_XXS"},   {17, -1, "IQ2_XS"},
    {18, -1, "IQ3_XXS"},   {19, -1, "IQ1_S"},  {20, -1, "IQ4_NL"},    {21, -1, "IQ3_S"},
    {22, -1, "IQ2_S"},     {23, -1, "IQ4_XS"}, {24, -1, "I8"},        {25, -1, "I16"},
    {26, -1, "I32"},       {27, -1, "I64"},    {28, -1, "F64"},       {29, -1, "IQ1_M"},
    {30, PD_BF16, "BF16"},
};

/* Where the reader stands, and what it is reading, for messages. */
typedef struct reader {
    const char *path;
    const unsigned char *bytes;
    uint64_t size, at;
    char what[128];
} reader;

const char *pd_gguf_type_name(pd_gguf_type type)
{
    return type_names[type];
}

static uint64_t left(const reader *r)
{
    return r->size - r->at;
}

/* False, logged, when fewer than bytes are left. */
static bool need(const reader *r, uint64_t bytes)
{
    if (bytes <= left(r))
        return true;
    /* a length field of nonsense would make a needed size of nonsense */
    if (bytes > UINT64_MAX - r->at)
        pd_log_error("msg=\"model file: %s claims %" PRIu64
                     " bytes, more than any file has\" file=%s size=%" PRIu64,
                     r->what, bytes, r->path, r->size);
    else
        pd_log_error("msg=\"model file: cut off inside %s\" file=%s size=%" PRIu64
                     " needed_at_least=%" PRIu64,
                     r->what, r->path, r->size, r->at + bytes);
    return false;
}

static uint32_t get_u32(reader *r)
{
    uint32_t value;
    memcpy(&value, r->bytes + r->at, sizeof value);
    r->at += sizeof value;
    return value;
}

static uint64_t get_u64(reader *r)
{
    uint64_t value;
    memcpy(&value, r->bytes + r->at, sizeof value);
    r->at += sizeof value;
    return value;
}

static bool get_string(reader *r, const unsigned char **bytes_out, uint64_t *len_out)
{
    if (!need(r, 8))
        return false;
    uint64_t len = get_u64(r);
    if (!need(r, len))
        return false;
    *bytes_out = r->bytes + r->at;
    *len_out = len;
    r->at += len;
    return true;
}

static bool get_name(reader *r, const char *kind, uint64_t number, char **names, char **name_out)
{
    const unsigned char *bytes;
    uint64_t len;

    snprintf(r->what, sizeof r->what, "the name of %s %" PRIu64, kind, number);
    if (!get_string(r, &bytes, &len))
        return false;
    if (len == 0 || len > NAME_BYTES_MAX || memchr(bytes, '\0', len) != NULL ||
        !pd_utf8_valid((const char *)bytes, len)) {
        pd_log_error("msg=\"model file: %s is no name (empty, longer than %d bytes, or no text)\" "
                     "file=%s",
                     r->what, NAME_BYTES_MAX, r->path);
        return false;
    }
    memcpy(*names, bytes, len); /* the block has room: it is as large as the header allows */
    (*names)[len] = '\0';
    *name_out = *names;
    *names += len + 1;
    snprintf(r->what, sizeof r->what, "%s %s", kind, *name_out);
    return true;
}

/* Steps over count items of an array. */
static bool skip_items(reader *r, uint32_t item_type, uint64_t count, int depth)
{
    const unsigned char *bytes;
    uint64_t len;

    if (item_type >= PD_GGUF_TYPES || (item_type == PD_GGUF_ARRAY && depth >= NEST_MAX)) {
        pd_log_error("msg=\"model file: %s has items of an unknown type or nested too deep\" "
                     "file=%s item_type=%" PRIu32,
                     r->what, r->path, item_type);
        return false;
    }
    uint64_t item_bytes = type_bytes[item_type];
    if (item_bytes == 0)
        item_bytes = item_type == PD_GGUF_STRING ? 8 : 12; /* the least one takes */
    if (count > UINT64_MAX / item_bytes) {
        pd_log_error("msg=\"model file: %s claims %" PRIu64 " items, more than any file has\" "
                     "file=%s size=%" PRIu64,
                     r->what, count, r->path, r->size);
        return false;
    }
    if (!need(r, count * item_bytes))
        return false;
    if (type_bytes[item_type] != 0) {
        r->at += count * item_bytes;
        return true;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (item_type == PD_GGUF_STRING) {
            if (!get_string(r, &bytes, &len))
                return false;
            continue;
        }
        if (!need(r, 12))
            return false;
        uint32_t inner = get_u32(r);
        if (!skip_items(r, inner, get_u64(r), depth + 1))
            return false;
    }
    return true;
}

static bool get_value(reader *r, pd_gguf_key *key)
{
    if (!need(r, 4))
        return false;
    uint32_t type = get_u32(r);
    if (type >= PD_GGUF_TYPES) {
        pd_log_error("msg=\"model file: key has an unknown type\" file=%s key=%s type=%" PRIu32,
                     r->path, key->name, type);
        return false;
    }
    key->type = type;
    key->count = 1;
    if (type == PD_GGUF_STRING)
        return get_string(r, &key->value, &key->value_bytes);
    uint32_t item_type = type;
    if (type == PD_GGUF_ARRAY) {
        if (!need(r, 12))
            return false;
        item_type = get_u32(r);
        key->count = get_u64(r);
    }
    uint64_t start = r->at;
    if (!skip_items(r, item_type, key->count, 0))
        return false;
    key->item_type = item_type;
    key->value = r->bytes + start;
    key->value_bytes = r->at - start;
    if (type == PD_GGUF_BOOL && *key->value > 1) {
        pd_log_error("msg=\"model file: key is a bool but neither 0 nor 1\" file=%s key=%s",
                     r->path, key->name);
        return false;
    }
    return true;
}

static bool multiply(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static pd_status get_format(const reader *r, uint32_t number, pd_tensor *tensor)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        if (formats[i].number != number)
            continue;
        if (formats[i].dtype >= 0) {
            tensor->dtype = (pd_dtype)formats[i].dtype;
            return PD_OK;
        }
        pd_log_error("msg=\"model file: tensor's number format is not one we have\" file=%s "
                     "tensor=%s format=%s",
                     r->path, tensor->name, formats[i].name);
        return PD_E_UNSUPPORTED;
    }
    pd_log_error("msg=\"model file: tensor's number format is unknown\" file=%s tensor=%s "
                 "format=%" PRIu32,
                 r->path, tensor->name, number);
    return PD_E_INVALID;
}

/* One record of the tensor list; *offset_out is into the data. */
static pd_status get_tensor(reader *r, pd_tensor *tensor, uint64_t *offset_out)
{
    uint64_t weights = 1;

    if (!need(r, 4))
        return PD_E_INVALID;
    tensor->dims_count = get_u32(r);
    if (tensor->dims_count == 0 || tensor->dims_count > DIMS_MAX) {
        pd_log_error("msg=\"model file: tensor has %" PRIu32 " dimensions, 1 to %d are possible\" "
                     "file=%s tensor=%s",
                     tensor->dims_count, DIMS_MAX, r->path, tensor->name);
        return PD_E_INVALID;
    }
    if (!need(r, tensor->dims_count * 8 + 12))
        return PD_E_INVALID;
    bool fits = true;
    for (uint32_t i = 0; i < DIMS_MAX; i++) {
        tensor->dims[i] = i < tensor->dims_count ? get_u64(r) : 1;
        fits = fits && tensor->dims[i] != 0 && multiply(weights, tensor->dims[i], &weights);
    }
    pd_status status = get_format(r, get_u32(r), tensor);
    if (status != PD_OK)
        return status;
    *offset_out = get_u64(r);
    const pd_dtype_info *info = pd_dtype_info_of(tensor->dtype);
    if (!fits || !multiply(weights / info->block_weights, info->block_bytes, &tensor->bytes) ||
        tensor->dims[0] % info->block_weights != 0) {
        pd_log_error("msg=\"model file: tensor's dimensions are 0, too large, or no multiple of "
                     "%" PRIu32 " columns\" file=%s tensor=%s dims=%" PRIu64 "x%" PRIu64 "x%" PRIu64
                     "x%" PRIu64,
                     info->block_weights, r->path, tensor->name, tensor->dims[0], tensor->dims[1],
                     tensor->dims[2], tensor->dims[3]);
        return PD_E_INVALID;
    }
    return PD_OK;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const pd_gguf_key *)a)->name, ((const pd_gguf_key *)b)->name);
}

static int by_tensor(const void *a, const void *b)
{
    return strcmp(((const pd_tensor *)a)->name, ((const pd_tensor *)b)->name);
}

static pd_status get_keys(reader *r, pd_gguf *gguf, char **names)
{
    for (uint32_t i = 0; i < gguf->keys_count; i++) {
        pd_gguf_key *key = &gguf->keys[i];
        char *name;
        if (!get_name(r, "key", i, names, &name))
            return PD_E_INVALID;
        key->name = name;
        if (!get_value(r, key))
            return PD_E_INVALID;
    }
    qsort(gguf->keys, gguf->keys_count, sizeof gguf->keys[0], by_key);
    for (uint32_t i = 1; i < gguf->keys_count; i++) {
        if (by_key(&gguf->keys[i - 1], &gguf->keys[i]) == 0) {
            pd_log_error("msg=\"model file: key stands twice\" file=%s key=%s", r->path,
                         gguf->keys[i].name);
            return PD_E_INVALID;
        }
    }
    return PD_OK;
}

static pd_status get_alignment(const pd_gguf *gguf, uint64_t *align_out)
{
    const pd_gguf_key *key = pd_gguf_find(gguf, "general.alignment");
    uint32_t align = ALIGN_DEFAULT;

    if (key != NULL) {
        if (key->type != PD_GGUF_U32) {
            pd_log_error("msg=\"model file: key has to be u32\" file=%s key=%s type=%s", gguf->path,
                         key->name, type_names[key->type]);
            return PD_E_INVALID;
        }
        memcpy(&align, key->value, sizeof align);
    }
    if (align < ALIGN_MIN || align > ALIGN_MAX || (align & (align - 1)) != 0) {
        pd_log_error("msg=\"model file: alignment has to be a power of two from %d to %d\" "
                     "file=%s key=general.alignment value=%" PRIu32,
                     ALIGN_MIN, ALIGN_MAX, gguf->path, align);
        return PD_E_INVALID;
    }
    *align_out = align;
    return PD_OK;
}

/* Turns offsets into pointers, once it is known that all the data is there. */
static pd_status place_tensors(reader *r, pd_gguf *gguf, const uint64_t *offsets)
{
    uint64_t align = 0, needed = 0, end;
    uint32_t last = 0;

    pd_status status = get_alignment(gguf, &align);
    if (status != PD_OK)
        return status;
    uint64_t start = (r->at + align - 1) & ~(align - 1);
    for (uint32_t i = 0; i < gguf->tensors_count; i++) {
        const pd_tensor *tensor = &gguf->tensors[i];
        if (offsets[i] % align != 0) {
            pd_log_error("msg=\"model file: tensor's offset is no multiple of the alignment\" "
                         "file=%s tensor=%s offset=%" PRIu64 " alignment=%" PRIu64,
                         r->path, tensor->name, offsets[i], align);
            return PD_E_INVALID;
        }
        if (__builtin_add_overflow(start, offsets[i], &end) ||
            __builtin_add_overflow(end, tensor->bytes, &end)) {
            pd_log_error("msg=\"model file: tensor lies beyond any file\" file=%s tensor=%s "
                         "offset=%" PRIu64 " bytes=%" PRIu64,
                         r->path, tensor->name, offsets[i], tensor->bytes);
            return PD_E_INVALID;
        }
        if (end > needed) {
            needed = end;
            last = i;
        }
    }
    if (needed > r->size) {
        pd_log_error("msg=\"model file: cut off: the tensors end beyond the file\" file=%s "
                     "tensor=%s size=%" PRIu64 " needed=%" PRIu64,
                     r->path, gguf->tensors[last].name, r->size, needed);
        return PD_E_INVALID;
    }
    for (uint32_t i = 0; i < gguf->tensors_count; i++)
        gguf->tensors[i].data = r->bytes + start + offsets[i];
    return PD_OK;
}

static pd_status get_tensors(reader *r, pd_gguf *gguf, char **names)
{
    uint64_t *offsets = pd_calloc(gguf->tensors_count, sizeof *offsets);
    pd_status status = PD_OK;

    if (offsets == NULL)
        return PD_E_NOMEM;
    for (uint32_t i = 0; i < gguf->tensors_count && status == PD_OK; i++) {
        pd_tensor *tensor = &gguf->tensors[i];
        char *name;
        if (get_name(r, "tensor", i, names, &name)) {
            tensor->name = name;
            status = get_tensor(r, tensor, &offsets[i]);
        } else {
            status = PD_E_INVALID;
        }
    }
    gguf->header_bytes = r->at;
    if (status == PD_OK)
        status = place_tensors(r, gguf, offsets);
    pd_free(offsets);
    if (status != PD_OK)
        return status;
    qsort(gguf->tensors, gguf->tensors_count, sizeof gguf->tensors[0], by_tensor);
    for (uint32_t i = 1; i < gguf->tensors_count; i++) {
        if (by_tensor(&gguf->tensors[i - 1], &gguf->tensors[i]) == 0) {
            pd_log_error("msg=\"model file: tensor stands twice\" file=%s tensor=%s", r->path,
                         gguf->tensors[i].name);
            return PD_E_INVALID;
        }
    }
    return PD_OK;
}

static pd_status get_counts(reader *r, pd_gguf *gguf)
{
    snprintf(r->what, sizeof r->what, "the header");
    if (!need(r, HEADER_BYTES))
        return PD_E_INVALID;
    if (memcmp(r->bytes, "GGUF", 4) != 0) {
        pd_log_error("msg=\"model file: not a GGUF file\" file=%s", r->path);
        return PD_E_INVALID;
    }
    r->at = 4;
    uint32_t version = get_u32(r);
    if (version != 2 && version != 3) {
        pd_log_error("msg=\"model file: GGUF versions 2 and 3, little-endian, can be read\" "
                     "file=%s version=%" PRIu32,
                     r->path, version);
        return PD_E_UNSUPPORTED;
    }
    uint64_t tensors_count = get_u64(r), keys_count = get_u64(r);
    if (tensors_count > TENSORS_MAX || tensors_count > left(r) / TENSOR_BYTES_MIN) {
        pd_log_error("msg=\"model file: tensor count cannot fit the file\" file=%s "
                     "tensor_count=%" PRIu64 " size=%" PRIu64,
                     r->path, tensors_count, r->size);
        return PD_E_INVALID;
    }
    if (keys_count > KEYS_MAX || keys_count > left(r) / KEY_BYTES_MIN) {
        pd_log_error("msg=\"model file: key count cannot fit the file\" file=%s "
                     "key_count=%" PRIu64 " size=%" PRIu64,
                     r->path, keys_count, r->size);
        return PD_E_INVALID;
    }
    gguf->tensors_count = (uint32_t)tensors_count;
    gguf->keys_count = (uint32_t)keys_count;
    return PD_OK;
}

pd_status pd_gguf_parse(const char *path, const void *bytes, uint64_t size, pd_gguf *gguf_out)
{
    reader r = {.path = path, .bytes = bytes, .size = size};
    pd_gguf gguf = {.path = path, .bytes = bytes, .size = size};

    pd_status status = get_counts(&r, &gguf);
    if (status != PD_OK)
        return status;
    /* a name takes at most its bytes and a NUL, and each has a length field of 8 in the file */
    uint64_t names_max = (uint64_t)(gguf.keys_count + gguf.tensors_count) * (NAME_BYTES_MAX + 1);
    gguf.names = pd_malloc(names_max < size ? names_max : size);
    gguf.keys = pd_calloc(gguf.keys_count, sizeof gguf.keys[0]);
    gguf.tensors = pd_calloc(gguf.tensors_count, sizeof gguf.tensors[0]);
    if (gguf.names == NULL || gguf.keys == NULL || gguf.tensors == NULL) {
        status = PD_E_NOMEM;
    } else {
        char *names = gguf.names;
        status = get_keys(&r, &gguf, &names);
        if (status == PD_OK)
            status = get_tensors(&r, &gguf, &names);
    }
    if (status == PD_E_NOMEM)
        pd_log_error("msg=\"model file: out of memory\" file=%s", path);
    if (status != PD_OK)
        pd_gguf_fini(&gguf);
    else
        *gguf_out = gguf;
    return status;
}

void pd_gguf_fini(pd_gguf *gguf)
{
    pd_free(gguf->names);
    pd_free(gguf->keys);
    pd_free(gguf->tensors);
    *gguf = (pd_gguf){0};
}

const pd_gguf_key *pd_gguf_find(const pd_gguf *gguf, const char *name)
{
    pd_gguf_key key = {.name = name};
    return bsearch(&key, gguf->keys, gguf->keys_count, sizeof key, by_key);
}

const pd_tensor *pd_gguf_tensor(const pd_gguf *gguf, const char *name)
{
    pd_tensor tensor = {.name = name};
    return bsearch(&tensor, gguf->tensors, gguf->tensors_count, sizeof tensor, by_tensor);
}

const char *pd_gguf_next_string(const unsigned char **at, uint64_t *len_out)
{
    uint64_t len;
    memcpy(&len, *at, sizeof len);
    const char *text = (const char *)*at + sizeof len;
    *at += sizeof len + len;
    *len_out = len;
    return text;
}
