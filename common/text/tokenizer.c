#include "common/text/tokenizer.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/utf8.h"
#include "common/text/bpe.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <inttypes.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* White space as Unicode has it (White_Space); PCRE2's own \s adds U+180E. Inside a class. */
#define SPACE                                                                                      \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"    \
    "\\x{205f}\\x{3000}"

/* Letters; digits; other characters; white space, of which the last one before a word stays with
 * the word. */
#define GPT2                                                                                       \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE "\\p{L}\\p{N}]+|"                     \
    "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
/* The same after every digit was cut out by itself, so that white space before a digit is white
 * space at an end. */
#define GPT2_SINGLE_DIGITS                                                                         \
    "\\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?[^" SPACE "\\p{L}\\p{N}]+|"                        \
    "[" SPACE "]+(?![^" SPACE "\\p{N}])|[" SPACE "]+"
#define LLAMA3(DIGITS)                                                                             \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" DIGITS "| ?[^" SPACE             \
    "\\p{L}\\p{N}]+[\\r\\n]*|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

typedef struct pre_tokenizer {
    const char *name; /* tokenizer.ggml.pre */
    const char *pattern;
    bool whole_words; /* a pre-token that is a token by itself is taken without merging */
} pre_tokenizer;

static const pre_tokenizer pre_tokenizers[] = {
    {"smollm", GPT2_SINGLE_DIGITS, false},
    {"starcoder", GPT2_SINGLE_DIGITS, false},
    {"refact", GPT2_SINGLE_DIGITS, false},
    {"command-r", GPT2_SINGLE_DIGITS, false},
    {"gpt-2", GPT2, false},
    {"phi-2", GPT2, false},
    {"mpt", GPT2, false},
    {"olmo", GPT2, false},
    {"llama-bpe", LLAMA3("\\p{N}{1,3}"), true},
    {"llama3", LLAMA3("\\p{N}{1,3}"), true},
    {"llama-v3", LLAMA3("\\p{N}{1,3}"), true},
    {"qwen2", LLAMA3("\\p{N}"), false},
    {"deepseek-r1-qwen", LLAMA3("\\p{N}"), false},
    {"stablelm2", LLAMA3("\\p{N}"), false},
};

/* Control tokens that end a turn or a text, as model families write them. */
static const char *const end_texts[] = {
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>",    "<|eom_id|>",
    "<|end|>",       "<end_of_turn>",   "</s>",       "<|endofturn|>", "<|END_OF_TURN_TOKEN|>",
};

enum { TYPE_CONTROL = 3, TYPE_USER = 4, END_IDS_MAX = 16, ALPHABET_MAX = 0x144 };

typedef struct added_token {
    const char *text;
    uint32_t len;
    uint32_t id;
    bool control;
} added_token;

struct pd_tokenizer {
    const pd_text_tables *tables;
    const pre_tokenizer *pre;
    pcre2_general_context *heap;
    pcre2_code *pattern;
    bool jit;
    pd_bpe bpe;
    uint32_t *slots; /* [slots_mask + 1]: id + 1 by hash of the token's text, 0 empty */
    uint32_t slots_mask;
    uint32_t byte_ids[256]; /* the token of one byte; UINT32_MAX: none */
    char *bytes;            /* what the tokens stand for, one after the other */
    uint32_t *bytes_at;     /* [vocab + 1] */
    added_token *added;     /* sorted by bytes */
    uint32_t added_count;
    uint32_t token_bytes_max; /* no token stands for more */
    uint32_t end_ids[END_IDS_MAX];
    uint32_t end_count;
};

static void *pcre_malloc(PCRE2_SIZE bytes, void *ctx)
{
    (void)ctx;
    return pd_malloc(bytes);
}

static void pcre_free(void *memory, void *ctx)
{
    (void)ctx;
    pd_free(memory);
}

void pd_token_ids_fini(pd_token_ids *ids)
{
    pd_free(ids->ids);
    *ids = (pd_token_ids){0};
}

/* ---- the byte-level alphabet: each byte as a printable character ---- */

static bool stands_for_itself(unsigned byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/* code_points[byte], and bytes[code point] (-1: not of the alphabet). */
static void make_alphabet(uint32_t code_points[256], int16_t bytes[ALPHABET_MAX])
{
    uint32_t next = 0x100;

    for (int i = 0; i < ALPHABET_MAX; i++)
        bytes[i] = -1;
    for (unsigned byte = 0; byte < 256; byte++) {
        code_points[byte] = stands_for_itself(byte) ? byte : next++;
        bytes[code_points[byte]] = (int16_t)byte;
    }
    pd_assert(next == ALPHABET_MAX);
}

/* The bytes of a token's text; the text itself where it is not written in the alphabet (added
 * tokens hold plain text). Never longer than the text. */
static uint32_t token_bytes(const char *text, uint32_t len, const int16_t alphabet[ALPHABET_MAX],
                            char *out)
{
    uint32_t used = 0;

    for (size_t at = 0, step; at < len; at += step) {
        uint32_t c = pd_utf8_decode(text + at, len - at, &step);
        if (c >= ALPHABET_MAX || alphabet[c] < 0) {
            memcpy(out, text, len);
            return len;
        }
        out[used++] = (char)alphabet[c];
    }
    return used;
}

/* ---- the vocabulary ---- */

static uint32_t type_of(const pd_text_tables *tables, uint32_t id)
{
    return tables->types != NULL ? (uint32_t)tables->types[id] : 1;
}

static uint32_t *find_slot(const pd_tokenizer *t, const char *text, size_t len)
{
    uint32_t at = (uint32_t)pd_hash64(text, len, 0) & t->slots_mask;

    for (;; at = (at + 1) & t->slots_mask) {
        uint32_t id = t->slots[at];
        if (id == 0 || (t->tables->tokens_len[id - 1] == len &&
                        memcmp(t->tables->tokens[id - 1], text, len) == 0))
            return &t->slots[at];
    }
}

static bool find_id(const pd_tokenizer *t, const char *text, size_t len, uint32_t *id_out)
{
    uint32_t id = *find_slot(t, text, len);

    if (id != 0)
        *id_out = id - 1;
    return id != 0;
}

static pd_status index_tokens(pd_tokenizer *t)
{
    uint32_t count = t->tables->tokens_count, doubles = 0, example = 0, size = 16;

    while (size < count * 2)
        size *= 2;
    t->slots = pd_calloc(size, sizeof t->slots[0]);
    if (t->slots == NULL)
        return PD_E_NOMEM;
    t->slots_mask = size - 1;
    for (uint32_t id = 0; id < count; id++) {
        uint32_t *slot = find_slot(t, t->tables->tokens[id], t->tables->tokens_len[id]);
        if (*slot == 0) {
            *slot = id + 1;
        } else {
            doubles++;
            example = id;
        }
    }
    if (doubles != 0)
        pd_log_warn("msg=\"tokenizer: tokens with the same text: the first stands\" count=%" PRIu32
                    " example_id=%" PRIu32,
                    doubles, example);
    return PD_OK;
}

static pd_status index_bytes(pd_tokenizer *t)
{
    const pd_text_tables *tables = t->tables;
    uint32_t code_points[256];
    int16_t alphabet[ALPHABET_MAX];
    size_t total = 0;
    uint32_t at = 0;

    make_alphabet(code_points, alphabet);
    for (uint32_t id = 0; id < tables->tokens_count; id++)
        total += tables->tokens_len[id];
    if (total > UINT32_MAX)
        return PD_E_INVALID;
    t->bytes = pd_malloc(total);
    t->bytes_at = pd_calloc((size_t)tables->tokens_count + 1, sizeof t->bytes_at[0]);
    if (t->bytes == NULL || t->bytes_at == NULL)
        return PD_E_NOMEM;
    t->token_bytes_max = 1;
    for (uint32_t id = 0; id < tables->tokens_count; id++) {
        uint32_t type = type_of(tables, id), len = tables->tokens_len[id];
        t->bytes_at[id] = at;
        if (type == TYPE_CONTROL || type == TYPE_USER)
            memcpy(t->bytes + at, tables->tokens[id], len);
        else
            len = token_bytes(tables->tokens[id], len, alphabet, t->bytes + at);
        at += len;
        if (len > t->token_bytes_max)
            t->token_bytes_max = len;
    }
    t->bytes_at[tables->tokens_count] = at;
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[4];
        size_t len = pd_utf8_encode(code_points[byte], text);
        t->byte_ids[byte] = UINT32_MAX;
        find_id(t, text, len, &t->byte_ids[byte]);
    }
    return PD_OK;
}

static pd_status index_merges(pd_tokenizer *t)
{
    const pd_text_tables *tables = t->tables;
    uint32_t unknown = 0, doubles = 0, example = 0;
    char *joined = NULL;
    size_t joined_size = 0;

    pd_status status = pd_bpe_init(&t->bpe, tables->merges_count);
    for (uint32_t i = 0; i < tables->merges_count && status == PD_OK; i++) {
        const char *merge = tables->merges[i];
        size_t len = tables->merges_len[i];
        const char *space = len > 2 ? memchr(merge + 1, ' ', len - 2) : NULL;
        uint32_t left, right, result;
        if (len > joined_size) {
            pd_free(joined);
            joined_size = len * 2;
            joined = pd_malloc(joined_size);
            if (joined == NULL) {
                status = PD_E_NOMEM;
                break;
            }
        }
        size_t left_len = space != NULL ? (size_t)(space - merge) : 0;
        bool known = space != NULL;
        if (known) {
            memcpy(joined, merge, left_len);
            memcpy(joined + left_len, space + 1, len - left_len - 1);
        }
        known = known && find_id(t, merge, left_len, &left) &&
                find_id(t, space + 1, len - left_len - 1, &right) &&
                find_id(t, joined, len - 1, &result);
        if (!known)
            unknown++;
        else if (!pd_bpe_add(&t->bpe, left, right, i, result))
            doubles++;
        else
            continue;
        example = i;
    }
    pd_free(joined);
    if (status == PD_OK && unknown + doubles != 0)
        pd_log_warn("msg=\"tokenizer: merges of unknown pieces are left out, of repeated ones the "
                    "first stands\" unknown=%" PRIu32 " repeated=%" PRIu32
                    " example_index=%" PRIu32,
                    unknown, doubles, example);
    return status;
}

static int by_bytes(const void *a, const void *b)
{
    const added_token *x = a, *y = b;
    uint32_t common = x->len < y->len ? x->len : y->len;
    int order = memcmp(x->text, y->text, common);

    if (order != 0)
        return order;
    if (x->len != y->len)
        return x->len < y->len ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static pd_status index_added(pd_tokenizer *t)
{
    const pd_text_tables *tables = t->tables;
    uint32_t count = 0;

    for (uint32_t id = 0; id < tables->tokens_count; id++)
        count += type_of(tables, id) == TYPE_CONTROL || type_of(tables, id) == TYPE_USER;
    t->added = pd_calloc(count, sizeof t->added[0]);
    if (t->added == NULL)
        return PD_E_NOMEM;
    for (uint32_t id = 0; id < tables->tokens_count; id++) {
        uint32_t type = type_of(tables, id);
        if ((type != TYPE_CONTROL && type != TYPE_USER) || tables->tokens_len[id] == 0)
            continue;
        t->added[t->added_count++] =
            (added_token){tables->tokens[id], tables->tokens_len[id], id, type == TYPE_CONTROL};
    }
    qsort(t->added, t->added_count, sizeof t->added[0], by_bytes);
    return PD_OK;
}

static void add_end(pd_tokenizer *t, int64_t id)
{
    if (id < 0 || pd_tokenizer_is_end(t, (uint32_t)id))
        return;
    pd_assert(t->end_count < END_IDS_MAX);
    t->end_ids[t->end_count++] = (uint32_t)id;
}

static void index_ends(pd_tokenizer *t)
{
    uint32_t id;

    _Static_assert(sizeof end_texts / sizeof end_texts[0] + 2 <= END_IDS_MAX, "eos, eot, names");
    add_end(t, t->tables->eos_id);
    add_end(t, t->tables->eot_id);
    for (size_t i = 0; i < sizeof end_texts / sizeof end_texts[0]; i++) {
        if (find_id(t, end_texts[i], strlen(end_texts[i]), &id) && pd_tokenizer_is_control(t, id))
            add_end(t, id);
    }
}

static pd_status compile_pattern(pd_tokenizer *t)
{
    int error;
    PCRE2_SIZE offset;

    t->heap = pcre2_general_context_create(pcre_malloc, pcre_free, NULL);
    if (t->heap == NULL)
        return PD_E_NOMEM;
    pcre2_compile_context *context = pcre2_compile_context_create(t->heap);
    if (context == NULL)
        return PD_E_NOMEM;
    t->pattern = pcre2_compile((PCRE2_SPTR)t->pre->pattern, PCRE2_ZERO_TERMINATED,
                               PCRE2_UTF | PCRE2_UCP, &error, &offset, context);
    pcre2_compile_context_free(context);
    if (t->pattern == NULL) {
        if (error == PCRE2_ERROR_NOMEMORY || error == 121)
            return PD_E_NOMEM; /* 121: the heap gave nothing while compiling */
        pd_log_error("msg=\"tokenizer: PCRE2 cannot compile the pre-tokenizer\" pre=%s code=%d "
                     "offset=%zu",
                     t->pre->name, error, (size_t)offset);
        return PD_E_INTERNAL;
    }
    /* without it (no executable memory here) matching is slower and otherwise the same */
    t->jit = pcre2_jit_compile(t->pattern, PCRE2_JIT_COMPLETE) == 0;
    return PD_OK;
}

static pd_status choose_pre(pd_tokenizer *t)
{
    if (strcmp(t->tables->model, "gpt2") != 0) {
        pd_log_error("msg=\"tokenizer: only byte-level BPE (gpt2) is run\" "
                     "key=tokenizer.ggml.model value=%s",
                     t->tables->model);
        return PD_E_UNSUPPORTED;
    }
    for (size_t i = 0; i < sizeof pre_tokenizers / sizeof pre_tokenizers[0]; i++) {
        if (strcmp(pre_tokenizers[i].name, t->tables->pre) == 0) {
            t->pre = &pre_tokenizers[i];
            return PD_OK;
        }
    }
    pd_log_error(
        "msg=\"tokenizer: no such pre-tokenizer here\" key=tokenizer.ggml.pre value=\"%s\"",
        t->tables->pre);
    return PD_E_UNSUPPORTED;
}

pd_status pd_tokenizer_create(const pd_text_tables *tables, pd_tokenizer **tokenizer_out)
{
    pd_tokenizer *t = pd_calloc(1, sizeof *t);

    if (t == NULL)
        return PD_E_NOMEM;
    t->tables = tables;
    pd_status status = choose_pre(t);
    if (status == PD_OK)
        status = compile_pattern(t);
    if (status == PD_OK)
        status = index_tokens(t);
    if (status == PD_OK)
        status = index_bytes(t);
    if (status == PD_OK)
        status = index_merges(t);
    if (status == PD_OK)
        status = index_added(t);
    if (status != PD_OK) {
        pd_tokenizer_destroy(t);
        return status;
    }
    index_ends(t);
    *tokenizer_out = t;
    return PD_OK;
}

void pd_tokenizer_destroy(pd_tokenizer *t)
{
    if (t == NULL)
        return;
    pcre2_code_free(t->pattern);
    pcre2_general_context_free(t->heap);
    pd_bpe_fini(&t->bpe);
    pd_free(t->slots);
    pd_free(t->bytes);
    pd_free(t->bytes_at);
    pd_free(t->added);
    pd_free(t);
}

/* ---- encoding ---- */

typedef struct encoder {
    const pd_tokenizer *t;
    const char *text;
    size_t len;
    bool control;               /* control tokens are recognised ... */
    const pd_text_range *plain; /* ... but where they touch none of these */
    size_t plain_count, plain_at;
    size_t ids_max;
    pd_token_ids *ids;
    pcre2_match_data *match;
    pcre2_match_context *match_context;
    pcre2_jit_stack *jit_stack;
    pd_bpe_scratch scratch;
} encoder;

static pd_status reserve_ids(encoder *e, size_t more)
{
    pd_token_ids *ids = e->ids;
    size_t size = ids->size != 0 ? ids->size : 64;

    if (ids->count + more <= ids->size)
        return PD_OK;
    while (size < ids->count + more)
        size *= 2;
    uint32_t *grown = pd_realloc(ids->ids, size * sizeof *grown);
    if (grown == NULL)
        return PD_E_NOMEM;
    ids->ids = grown;
    ids->size = size;
    return PD_OK;
}

static pd_status add_id(encoder *e, uint32_t id)
{
    if (e->ids->count >= e->ids_max)
        return PD_E_TOO_LARGE;
    pd_status status = reserve_ids(e, 1);
    if (status == PD_OK)
        e->ids->ids[e->ids->count++] = id;
    return status;
}

/* Whether a pre-token is a token as it stands: its bytes in the alphabet, looked up. */
static bool whole_word(const pd_tokenizer *t, const char *text, size_t len, uint32_t *id_out)
{
    char spelled[256];
    size_t used = 0;

    if (len > sizeof spelled / 2)
        return false;
    for (size_t i = 0; i < len; i++) {
        uint32_t id = t->byte_ids[(unsigned char)text[i]];
        if (id == UINT32_MAX)
            return false;
        memcpy(spelled + used, t->tables->tokens[id], t->tables->tokens_len[id]);
        used += t->tables->tokens_len[id];
    }
    return find_id(t, spelled, used, id_out);
}

static pd_status encode_word(encoder *e, const char *text, size_t len)
{
    const pd_tokenizer *t = e->t;
    uint32_t id;

    if (t->pre->whole_words && whole_word(t, text, len, &id))
        return add_id(e, id);
    if (len / t->token_bytes_max > e->ids_max - e->ids->count)
        return PD_E_TOO_LARGE; /* before working on megabytes that cannot fit */
    pd_status status = reserve_ids(e, len);
    if (status != PD_OK)
        return status;
    uint32_t *ids = e->ids->ids + e->ids->count;
    size_t count = 0;
    for (size_t i = 0; i < len; i++) {
        ids[count] = t->byte_ids[(unsigned char)text[i]];
        count += ids[count] != UINT32_MAX; /* a byte without a token is left out, as by others */
    }
    status = pd_bpe_merge_ids(&t->bpe, &e->scratch, ids, count, &count);
    if (status != PD_OK)
        return status;
    if (count > e->ids_max - e->ids->count)
        return PD_E_TOO_LARGE;
    e->ids->count += count;
    return PD_OK;
}

static int match_at(encoder *e, const char *text, size_t len, size_t at)
{
    const pd_tokenizer *t = e->t;

    /* the text was checked once: checking it again at each match would be quadratic */
    if (t->jit)
        return pcre2_jit_match(t->pattern, (PCRE2_SPTR)text, len, at, 0, e->match,
                               e->match_context);
    return pcre2_match(t->pattern, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK, e->match,
                       e->match_context);
}

/* Text without added tokens: words, then merges. */
static pd_status encode_plain(encoder *e, const char *text, size_t len)
{
    size_t at = 0;
    pd_status status = PD_OK;

    while (at < len && status == PD_OK) {
        int found = match_at(e, text, len, at);
        if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
            pd_log_error("msg=\"tokenizer: PCRE2 failed\" code=%d bytes=%zu", found, len);
            return found == PCRE2_ERROR_NOMEMORY ? PD_E_NOMEM : PD_E_INTERNAL;
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(e->match);
        size_t start = found < 0 ? len : range[0], end = found < 0 ? len : range[1];
        pd_assert(start >= at && (end > start || found < 0));
        if (start > at) /* no pattern took it: a word of its own */
            status = encode_word(e, text + at, start - at);
        if (status == PD_OK && end > start)
            status = encode_word(e, text + start, end - start);
        at = end;
    }
    return status;
}

/* The longest added token that may stand at text[at]; NULL: none. The sorted tokens are narrowed
 * byte by byte to those that agree so far. */
static const added_token *added_at(const encoder *e, size_t at)
{
    const added_token *added = e->t->added, *best = NULL;
    uint32_t low = 0, high = e->t->added_count;
    const pd_text_range *plain =
        e->plain_at < e->plain_count ? &e->plain[e->plain_at] : NULL; /* first to end after at */

    for (uint32_t depth = 0; low < high; depth++) {
        if (added[low].len == depth) {
            bool allowed = !added[low].control ||
                           (e->control && (plain == NULL || plain->start >= at + depth));
            if (allowed && depth != 0)
                best = &added[low];
            while (low < high && added[low].len == depth)
                low++; /* the same text twice: the first stands */
        }
        if (low == high || at + depth >= e->len)
            break;
        unsigned char byte = (unsigned char)e->text[at + depth];
        uint32_t from = low, to = high;
        while (from < to) {
            uint32_t mid = (from + to) / 2;
            if ((unsigned char)added[mid].text[depth] < byte)
                from = mid + 1;
            else
                to = mid;
        }
        low = from;
        to = high;
        while (from < to) {
            uint32_t mid = (from + to) / 2;
            if ((unsigned char)added[mid].text[depth] <= byte)
                from = mid + 1;
            else
                to = mid;
        }
        high = from;
    }
    return best;
}

static pd_status encode_all(encoder *e)
{
    size_t start = 0, at = 0; /* text[start..at) holds no added token */
    pd_status status = PD_OK;

    while (at < e->len && status == PD_OK) {
        while (e->plain_at < e->plain_count && e->plain[e->plain_at].end <= at)
            e->plain_at++;
        const added_token *token = added_at(e, at);
        if (token == NULL) {
            at++;
            continue;
        }
        status = encode_plain(e, e->text + start, at - start);
        if (status == PD_OK)
            status = add_id(e, token->id);
        at += token->len;
        start = at;
    }
    return status == PD_OK ? encode_plain(e, e->text + start, e->len - start) : status;
}

static pd_status encode(encoder *e)
{
    const pd_tokenizer *t = e->t;
    size_t count = e->ids->count;
    pd_status status = PD_E_NOMEM;

    if (count > e->ids_max || (e->len / t->token_bytes_max > e->ids_max - count))
        return PD_E_TOO_LARGE;
    if (!pd_utf8_valid(e->text, e->len))
        return PD_E_INVALID;
    e->match = pcre2_match_data_create(1, t->heap);
    e->match_context = pcre2_match_context_create(t->heap);
    if (e->match == NULL || e->match_context == NULL)
        goto out;
    if (t->jit) {
        e->jit_stack = pcre2_jit_stack_create(32 * 1024, 1024 * 1024, t->heap);
        if (e->jit_stack == NULL)
            goto out;
        pcre2_jit_stack_assign(e->match_context, NULL, e->jit_stack);
    }
    status = encode_all(e);
out:
    if (status != PD_OK)
        e->ids->count = count;
    pd_bpe_scratch_fini(&e->scratch);
    pcre2_jit_stack_free(e->jit_stack);
    pcre2_match_context_free(e->match_context);
    pcre2_match_data_free(e->match);
    return status;
}

pd_status pd_tokenizer_encode(const pd_tokenizer *t, const char *text, size_t len, bool special,
                              size_t ids_max, pd_token_ids *ids)
{
    encoder e = {
        .t = t, .text = text, .len = len, .control = special, .ids_max = ids_max, .ids = ids};
    return encode(&e);
}

pd_status pd_tokenizer_encode_ranges(const pd_tokenizer *t, const char *text, size_t len,
                                     const pd_text_range *plain, size_t plain_count, size_t ids_max,
                                     pd_token_ids *ids)
{
    encoder e = {.t = t,
                 .text = text,
                 .len = len,
                 .control = true,
                 .plain = plain,
                 .plain_count = plain_count,
                 .ids_max = ids_max,
                 .ids = ids};
    return encode(&e);
}

/* ---- looking up ---- */

const char *pd_tokenizer_bytes(const pd_tokenizer *t, uint32_t id, bool special, size_t *len_out)
{
    pd_assert(id < t->tables->tokens_count);
    bool shown = special || !pd_tokenizer_is_control(t, id);
    *len_out = shown ? t->bytes_at[id + 1] - t->bytes_at[id] : 0;
    return t->bytes + t->bytes_at[id];
}

bool pd_tokenizer_is_control(const pd_tokenizer *t, uint32_t id)
{
    pd_assert(id < t->tables->tokens_count);
    return type_of(t->tables, id) == TYPE_CONTROL;
}

uint32_t pd_tokenizer_vocab(const pd_tokenizer *t)
{
    return t->tables->tokens_count;
}

pd_status pd_tokenizer_find(const pd_tokenizer *t, const char *text, size_t len, uint32_t *id_out)
{
    return find_id(t, text, len, id_out) ? PD_OK : PD_E_NOT_FOUND;
}

const uint32_t *pd_tokenizer_end_ids(const pd_tokenizer *t, size_t *count_out)
{
    *count_out = t->end_count;
    return t->end_ids;
}

bool pd_tokenizer_is_end(const pd_tokenizer *t, uint32_t id)
{
    for (uint32_t i = 0; i < t->end_count; i++) {
        if (t->end_ids[i] == id)
            return true;
    }
    return false;
}

int64_t pd_tokenizer_added_bos(const pd_tokenizer *t)
{
    return t->tables->add_bos ? t->tables->bos_id : -1;
}
