#include "common/base/utf8.h"
#include "common/text/jinja.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct lexer {
    pd_arena *arena;
    const char *source; /* newlines are \n, the last one dropped */
    size_t len, at;
    uint32_t line;
    bool line_starting; /* the last tag ended with a newline, or nothing came before */
    pd_jinja_token *tokens;
    size_t count, size;
    pd_status status;
    pd_template_error *error;
} lexer;

static void fail(lexer *x, pd_status status, const char *message)
{
    if (x->status != PD_OK)
        return;
    x->status = status;
    x->error->line = x->line;
    snprintf(x->error->message, sizeof x->error->message, "%s", message);
}

static pd_jinja_token *add(lexer *x, pd_jinja_token_kind kind, const char *text, size_t len)
{
    if (x->count == x->size) {
        size_t size = x->size * 2 + 64;
        pd_jinja_token *tokens = pd_arena_alloc(x->arena, size * sizeof *tokens);
        if (tokens == NULL) {
            fail(x, PD_E_NOMEM, "out of memory");
            return NULL;
        }
        if (x->count != 0)
            memcpy(tokens, x->tokens, x->count * sizeof *tokens);
        x->tokens = tokens;
        x->size = size;
    }
    char *copy = pd_arena_strndup(x->arena, text, len);
    if (copy == NULL) {
        fail(x, PD_E_NOMEM, "out of memory");
        return NULL;
    }
    pd_jinja_token *token = &x->tokens[x->count++];
    *token = (pd_jinja_token){.kind = kind, .line = x->line, .text = copy, .len = len};
    return token;
}

static void count_lines(lexer *x, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        x->line += x->source[i] == '\n';
}

static bool at(const lexer *x, size_t where, const char *text)
{
    size_t len = strlen(text);
    return where <= x->len && x->len - where >= len && memcmp(x->source + where, text, len) == 0;
}

/* The bytes of the space at text[at], 0: none. */
static size_t space_len(const lexer *x, size_t where)
{
    size_t n;
    if (where >= x->len)
        return 0;
    return pd_value_is_space(pd_utf8_decode(x->source + where, x->len - where, &n)) ? n : 0;
}

static size_t skip_space(const lexer *x, size_t where)
{
    size_t n;
    while ((n = space_len(x, where)) != 0)
        where += n;
    return where;
}

/* The end of source[from .. to) without the white space at it. */
static size_t strip_end(const lexer *x, size_t from, size_t to)
{
    while (to > from) {
        size_t start = to - 1;
        while (start > from && ((unsigned char)x->source[start] & 0xc0) == 0x80)
            start--;
        if (space_len(x, start) == 0)
            break;
        to = start;
    }
    return to;
}

/* Template text before a tag that begins at tag and has sign ('-', '+' or 0) behind its "{%". */
static void add_data(lexer *x, size_t start, size_t tag, char sign, bool variable)
{
    size_t end = tag;

    if (sign == '-') {
        end = strip_end(x, start, tag);
    } else if (sign != '+' && !variable) { /* lstrip_blocks */
        size_t line = tag;
        while (line > start && x->source[line - 1] != '\n')
            line--;
        if ((line > start || x->line_starting) && strip_end(x, line, tag) == line)
            end = line;
    }
    if (end > start)
        add(x, PD_JINJA_DATA, x->source + start, end - start);
    count_lines(x, start, tag);
}

/* Behind a tag's "%}": with trim_blocks the newline there belongs to it. */
static void end_tag(lexer *x, char sign, bool block)
{
    size_t from = x->at, to = from;

    if (sign == '-')
        to = skip_space(x, from);
    else if (sign != '+' && block && from < x->len && x->source[from] == '\n')
        to = from + 1;
    count_lines(x, from, to);
    x->line_starting = to > from && x->source[to - 1] == '\n';
    x->at = to;
}

static void read_comment(lexer *x, size_t body)
{
    size_t end = body;

    while (end < x->len && !at(x, end, "#}"))
        end++;
    if (end >= x->len) {
        fail(x, PD_E_INVALID, "a comment does not end");
        return;
    }
    char sign = end > body && (x->source[end - 1] == '-' || x->source[end - 1] == '+')
                    ? x->source[end - 1]
                    : '\0';
    count_lines(x, x->at, end);
    x->at = end + 2;
    end_tag(x, sign, true);
}

/* At "{%[sign] raw": copies up to "endraw". False: not a raw block. */
static bool read_raw(lexer *x, size_t body)
{
    size_t where = skip_space(x, body);

    if (!at(x, where, "raw"))
        return false;
    where = skip_space(x, where + 3);
    char sign = at(x, where, "-%}") ? '-' : '\0';
    if (sign == '\0' && !at(x, where, "%}"))
        return false;
    count_lines(x, x->at, where);
    x->at = where + (sign == '-' ? 3 : 2);
    end_tag(x, sign, false);
    size_t start = x->at;
    for (size_t tag = start; tag < x->len; tag++) {
        if (!at(x, tag, "{%"))
            continue;
        char before = x->source[tag + 2 < x->len ? tag + 2 : tag];
        bool signed_ = before == '-' || before == '+';
        size_t name = skip_space(x, tag + 2 + signed_);
        size_t close = at(x, name, "endraw") ? skip_space(x, name + 6) : x->len;
        char after = at(x, close, "-%}") ? '-' : at(x, close, "+%}") ? '+' : '\0';
        if (close >= x->len || !at(x, close + (after != '\0'), "%}"))
            continue;
        add_data(x, start, tag, signed_ ? before : '\0', false);
        x->at = close + 2 + (after != '\0');
        end_tag(x, after, true);
        return true;
    }
    fail(x, PD_E_INVALID, "a raw block does not end");
    return true;
}

static int hex_digits(const char *text, size_t left, int want, uint32_t *out)
{
    uint32_t value = 0;

    if (left < (size_t)want)
        return 0;
    for (int i = 0; i < want; i++) {
        char c = text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return 0;
        value = value * 16 + (uint32_t)digit;
    }
    *out = value;
    return want;
}

/* One escape behind a backslash, as Python reads it; returns the bytes taken from text. */
static size_t unescape(lexer *x, const char *text, size_t left, char **out)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *simple = text[0] != '\0' ? strchr(from, text[0]) : NULL;
    uint32_t c = 0;
    size_t used = 1;

    if (simple != NULL) {
        *(*out)++ = to[simple - from];
        return 1;
    }
    if (text[0] == '\n')
        return 1;
    if (text[0] >= '0' && text[0] <= '7') {
        for (used = 0; used < 3 && used < left && text[used] >= '0' && text[used] <= '7'; used++)
            c = c * 8 + (uint32_t)(text[used] - '0');
    } else if (text[0] == 'x' || text[0] == 'u' || text[0] == 'U') {
        int want = text[0] == 'x' ? 2 : text[0] == 'u' ? 4 : 8;
        if (hex_digits(text + 1, left - 1, want, &c) == 0 || c > 0x10ffff ||
            (c >= 0xd800 && c <= 0xdfff)) {
            fail(x, PD_E_INVALID, "a string has an escape that is no character");
            return 1;
        }
        used = (size_t)want + 1;
    } else { /* not an escape: the backslash stays */
        *(*out)++ = '\\';
        return 0;
    }
    char bytes[4];
    size_t n = pd_utf8_encode(c, bytes);
    memcpy(*out, bytes, n);
    *out += n;
    return used;
}

static void read_string(lexer *x)
{
    char quote = x->source[x->at];
    size_t start = x->at + 1, end = start;

    while (end < x->len && x->source[end] != quote)
        end += x->source[end] == '\\' ? 2 : 1;
    if (end >= x->len) {
        fail(x, PD_E_INVALID, "a string does not end");
        return;
    }
    /* an escape never takes fewer bytes than what it stands for, plus one for a kept backslash */
    char *text = pd_arena_alloc(x->arena, end - start + 1), *out = text;
    if (text == NULL) {
        fail(x, PD_E_NOMEM, "out of memory");
        return;
    }
    for (size_t i = start; i < end;) {
        if (x->source[i] == '\\')
            i += 1 + unescape(x, x->source + i + 1, end - i - 1, &out);
        else
            *out++ = x->source[i++];
    }
    pd_jinja_token *token = add(x, PD_JINJA_STRING, "", 0);
    if (token != NULL) {
        token->text = text;
        token->len = (size_t)(out - text);
    }
    count_lines(x, start, end);
    x->at = end + 1;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static void read_number(lexer *x)
{
    char digits[64];
    size_t used = 0, i = x->at;
    bool real = false;

    for (; i < x->len; i++) {
        char c = x->source[i];
        bool exponent =
            (c == 'e' || c == 'E') && i + 1 < x->len &&
            (is_digit(x->source[i + 1]) || ((x->source[i + 1] == '-' || x->source[i + 1] == '+') &&
                                            i + 2 < x->len && is_digit(x->source[i + 2])));
        bool point = c == '.' && !real && i + 1 < x->len && is_digit(x->source[i + 1]);
        if (c == '_' && i + 1 < x->len && is_digit(x->source[i + 1]))
            continue;
        if (!is_digit(c) && !point && !exponent)
            break;
        real = real || point || exponent;
        if (used + 2 >= sizeof digits) {
            fail(x, PD_E_UNSUPPORTED, "a number is too long");
            return;
        }
        digits[used++] = c;
        if (exponent)
            digits[used++] = x->source[++i];
    }
    digits[used] = '\0';
    if (i < x->len && (x->source[i] == '_' || (x->source[i] | 0x20) == 'x')) {
        fail(x, PD_E_UNSUPPORTED, "only decimal numbers can be written");
        return;
    }
    pd_jinja_token *token = add(x, real ? PD_JINJA_REAL : PD_JINJA_INTEGER, digits, used);
    if (token == NULL)
        return;
    errno = 0;
    if (real)
        token->real = strtod(digits, NULL);
    else
        token->integer = strtoll(digits, NULL, 10);
    if (errno == ERANGE)
        fail(x, PD_E_UNSUPPORTED, "a number is too large");
    x->at = i;
}

static bool is_name(char c)
{
    return c == '_' || is_digit(c) || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
}

/* One token inside a tag. */
static void read_token(lexer *x)
{
    static const char *const operators[] = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "*",
                                            "/",  "%",  "~",  ">",  "<",  "=",  "(", ")", "[",
                                            "]",  "{",  "}",  ".",  ":",  "|",  ",", ";"};
    char c = x->source[x->at];

    if (c == '\'' || c == '"') {
        read_string(x);
    } else if (is_digit(c)) {
        read_number(x);
    } else if (is_name(c)) {
        size_t end = x->at;
        while (end < x->len && is_name(x->source[end]))
            end++;
        add(x, PD_JINJA_NAME, x->source + x->at, end - x->at);
        x->at = end;
    } else {
        for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
            if (!at(x, x->at, operators[i]))
                continue;
            add(x, PD_JINJA_OPERATOR, operators[i], strlen(operators[i]));
            x->at += strlen(operators[i]);
            return;
        }
        if ((unsigned char)c >= 0x80)
            fail(x, PD_E_UNSUPPORTED, "names of other than ASCII letters are not supported");
        else
            fail(x, PD_E_INVALID, "a character that means nothing inside a tag");
    }
}

/* The inside of {{ }} or {% %}, from behind its begin. Brackets are counted, so that a dict's "}}"
 * is not the end. */
static void read_tag(lexer *x, bool variable)
{
    const char *close = variable ? "}}" : "%}";
    char signed_close[4] = {'-', close[0], close[1], '\0'};
    int open = 0;

    add(x, variable ? PD_JINJA_VARIABLE_BEGIN : PD_JINJA_BLOCK_BEGIN, "", 0);
    while (x->status == PD_OK) {
        size_t next = skip_space(x, x->at);
        count_lines(x, x->at, next);
        x->at = next;
        if (next >= x->len) {
            fail(x, PD_E_INVALID, "a tag does not end");
            return;
        }
        char sign = '\0';
        if (at(x, next, signed_close))
            sign = '-';
        else if (!variable && at(x, next, "+%}"))
            sign = '+';
        if (open == 0 && at(x, next + (sign != '\0'), close)) {
            add(x, variable ? PD_JINJA_VARIABLE_END : PD_JINJA_BLOCK_END, "", 0);
            x->at = next + 2 + (sign != '\0');
            end_tag(x, sign, !variable);
            return;
        }
        char c = x->source[next];
        open += (c == '(' || c == '[' || c == '{') - (c == ')' || c == ']' || c == '}');
        if (open < 0)
            fail(x, PD_E_INVALID, "a bracket closes that was not opened");
        else
            read_token(x);
    }
}

static void lex(lexer *x)
{
    while (x->at < x->len && x->status == PD_OK) {
        size_t tag = x->at;
        while (tag < x->len && !(x->source[tag] == '{' && tag + 1 < x->len &&
                                 (x->source[tag + 1] == '{' || x->source[tag + 1] == '%' ||
                                  x->source[tag + 1] == '#')))
            tag++;
        if (tag >= x->len) {
            add(x, PD_JINJA_DATA, x->source + x->at, x->len - x->at);
            break;
        }
        char kind = x->source[tag + 1], sign = tag + 2 < x->len ? x->source[tag + 2] : '\0';
        if (sign != '-' && sign != '+')
            sign = '\0';
        add_data(x, x->at, tag, sign, kind == '{');
        x->at = tag;
        size_t body = tag + 2 + (sign != '\0');
        if (kind == '#') {
            read_comment(x, body);
        } else if (kind == '{' || !read_raw(x, body)) {
            x->at = body;
            read_tag(x, kind == '{');
        }
    }
    add(x, PD_JINJA_END, "", 0);
}

/* One kind of newline, and none at the end. */
static char *normalize(pd_arena *arena, const char *source, size_t *len)
{
    char *copy = pd_arena_alloc(arena, *len + 1);
    size_t used = 0;

    if (copy == NULL)
        return NULL;
    for (size_t i = 0; i < *len; i++) {
        if (source[i] == '\r' && i + 1 < *len && source[i + 1] == '\n')
            continue;
        copy[used++] = source[i] == '\r' ? '\n' : source[i];
    }
    if (used > 0 && copy[used - 1] == '\n')
        used--;
    *len = used;
    return copy;
}

pd_status pd_jinja_lex(pd_arena *arena, const char *source, size_t len, pd_jinja_token **tokens_out,
                       pd_template_error *error)
{
    lexer x = {.arena = arena, .line = 1, .line_starting = true, .error = error};

    if (!pd_utf8_valid(source, len)) {
        fail(&x, PD_E_INVALID, "the template is no UTF-8 text");
        return x.status;
    }
    x.len = len;
    x.source = normalize(arena, source, &x.len);
    if (x.source == NULL)
        fail(&x, PD_E_NOMEM, "out of memory");
    else
        lex(&x);
    if (x.status == PD_OK)
        *tokens_out = x.tokens;
    return x.status;
}
