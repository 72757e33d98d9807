#include "common/text/jinja_strings.h"
#include "common/base/utf8.h"

#include <string.h>

static pd_value undefined(void)
{
    return pd_value_undefined(NULL);
}

static uint32_t char_at(const pd_string *s, size_t at, size_t *len)
{
    return pd_utf8_decode(s->bytes + at, s->len - at, len);
}

static size_t char_before(const pd_string *s, size_t end)
{
    do {
        end--;
    } while (end > 0 && ((unsigned char)s->bytes[end] & 0xc0) == 0x80);
    return end;
}

static bool strippable(const pd_string *chars, uint32_t c)
{
    size_t len;

    if (chars == NULL)
        return pd_value_is_space(c);
    for (size_t at = 0; at < chars->len; at += len) {
        if (char_at(chars, at, &len) == c)
            return true;
    }
    return false;
}

pd_value pd_jinja_strip(pd_jinja_run *run, const pd_string *s, const pd_string *chars, int sides)
{
    size_t start = 0, end = s->len, len;

    while ((sides & 1) != 0 && start < end && strippable(chars, char_at(s, start, &len)))
        start += len;
    while ((sides & 2) != 0 && end > start) {
        size_t last = char_before(s, end);
        if (!strippable(chars, char_at(s, last, &len)))
            break;
        end = last;
    }
    return pd_value_substring(&run->values, s, start, end);
}

size_t pd_jinja_find(const pd_string *s, const pd_string *part, size_t start, bool last)
{
    size_t found = SIZE_MAX;

    if (start > s->len)
        return SIZE_MAX;
    if (part->len == 0)
        return last ? s->len : start;
    while (start < s->len) {
        const char *hit = memmem(s->bytes + start, s->len - start, part->bytes, part->len);
        if (hit == NULL)
            break;
        found = (size_t)(hit - s->bytes);
        if (!last)
            break;
        start = found + 1;
    }
    return found;
}

/* A list that grows; the arena takes what is outgrown. */
typedef struct pieces {
    pd_value *items;
    size_t count, size;
} pieces;

static void add_piece(pd_jinja_run *run, pieces *all, const pd_string *s, size_t start, size_t end)
{
    if (!pd_value_work(&run->values, 1))
        return;
    if (all->count == all->size) {
        size_t size = all->size * 2 + 8;
        pd_value *items = pd_value_alloc(&run->values, size, sizeof *items);
        if (items == NULL)
            return;
        if (all->count != 0)
            memcpy(items, all->items, all->count * sizeof *items);
        all->items = items;
        all->size = size;
    }
    all->items[all->count++] = pd_value_substring(&run->values, s, start, end);
}

static pd_value finish(pd_jinja_run *run, pieces *all)
{
    pd_list *list = pd_value_new_list(&run->values, 0, false);

    if (list == NULL)
        return undefined();
    list->items = all->items;
    list->count = all->count;
    return pd_value_of_list(list);
}

static pd_value split_space(pd_jinja_run *run, const pd_string *s, int64_t limit)
{
    pieces all = {0};
    size_t at = 0, len;

    while (run->values.status == PD_OK) {
        while (at < s->len && pd_value_is_space(char_at(s, at, &len)))
            at += len;
        if (at == s->len)
            break;
        size_t start = at;
        if (limit >= 0 && (int64_t)all.count == limit) { /* the rest as it is */
            add_piece(run, &all, s, start, s->len);
            break;
        }
        while (at < s->len && !pd_value_is_space(char_at(s, at, &len)))
            at += len;
        add_piece(run, &all, s, start, at);
    }
    return finish(run, &all);
}

pd_value pd_jinja_split(pd_jinja_run *run, const pd_string *s, const pd_string *separator,
                        int64_t limit)
{
    pieces all = {0};
    size_t at = 0;

    if (separator == NULL)
        return split_space(run, s, limit);
    if (separator->len == 0) {
        pd_value_fail(&run->values, PD_E_INVALID, "a string cannot be split at nothing");
        return undefined();
    }
    while (run->values.status == PD_OK) {
        bool more = limit < 0 || (int64_t)all.count < limit;
        size_t hit = more ? pd_jinja_find(s, separator, at, false) : SIZE_MAX;
        if (hit == SIZE_MAX)
            break;
        add_piece(run, &all, s, at, hit);
        at = hit + separator->len;
    }
    add_piece(run, &all, s, at, s->len);
    return finish(run, &all);
}

pd_value pd_jinja_rsplit(pd_jinja_run *run, const pd_string *s, const pd_string *separator,
                         int64_t limit)
{
    pieces all = {0};
    size_t end = s->len;

    if (limit < 0)
        return pd_jinja_split(run, s, separator, -1);
    if (separator == NULL || separator->len == 0) {
        pd_value_fail(&run->values, PD_E_INVALID, "rsplit needs a separator here");
        return undefined();
    }
    while (run->values.status == PD_OK && (int64_t)all.count < limit) {
        pd_string left = {.bytes = s->bytes, .len = end};
        size_t hit = pd_jinja_find(&left, separator, 0, true);
        if (hit == SIZE_MAX)
            break;
        add_piece(run, &all, s, hit + separator->len, end);
        end = hit;
    }
    add_piece(run, &all, s, 0, end);
    for (size_t i = 0; run->values.status == PD_OK && i < all.count / 2; i++) {
        pd_value first = all.items[i];
        all.items[i] = all.items[all.count - 1 - i];
        all.items[all.count - 1 - i] = first;
    }
    return finish(run, &all);
}

static bool is_line_end(uint32_t c)
{
    return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
           c == 0x2029;
}

pd_value pd_jinja_splitlines(pd_jinja_run *run, const pd_string *s)
{
    pieces all = {0};
    size_t start = 0, len;

    for (size_t at = 0; at < s->len && run->values.status == PD_OK; at += len) {
        uint32_t c = char_at(s, at, &len);
        if (!is_line_end(c))
            continue;
        add_piece(run, &all, s, start, at);
        if (c == '\r' && at + 1 < s->len && s->bytes[at + 1] == '\n')
            len = 2;
        start = at + len;
    }
    if (start < s->len)
        add_piece(run, &all, s, start, s->len);
    return finish(run, &all);
}

static pd_value join_pieces(pd_jinja_run *run, const pieces *all)
{
    const pd_string **parts = pd_value_alloc(&run->values, all->count, sizeof *parts);

    if (parts == NULL)
        return undefined();
    for (size_t i = 0; i < all->count; i++)
        parts[i] = all->items[i].as.string;
    return pd_value_joined(&run->values, parts, all->count);
}

pd_value pd_jinja_replace(pd_jinja_run *run, const pd_string *s, const pd_string *from,
                          const pd_string *to, int64_t limit)
{
    pieces all = {0};
    size_t at = 0, len;

    for (int64_t done = 0; run->values.status == PD_OK && (limit < 0 || done < limit); done++) {
        if (from->len == 0) { /* before each character and at the end */
            add_piece(run, &all, to, 0, to->len);
            if (at == s->len)
                break;
            char_at(s, at, &len);
            add_piece(run, &all, s, at, at + len);
            at += len;
            continue;
        }
        size_t hit = pd_jinja_find(s, from, at, false);
        if (hit == SIZE_MAX)
            break;
        add_piece(run, &all, s, at, hit);
        add_piece(run, &all, to, 0, to->len);
        at = hit + from->len;
    }
    add_piece(run, &all, s, at, s->len);
    return run->values.status == PD_OK ? join_pieces(run, &all) : undefined();
}

static uint32_t upper(uint32_t c)
{
    if ((c >= 'a' && c <= 'z') || (c >= 0xe0 && c <= 0xfe && c != 0xf7) ||
        (c >= 0x3b1 && c <= 0x3c9 && c != 0x3c2) || (c >= 0x430 && c <= 0x44f))
        return c - 0x20;
    return c >= 0x450 && c <= 0x45f ? c - 0x50 : c == 0xff ? 0x178 : c == 0x3c2 ? 0x3a3 : c;
}

static uint32_t lower(uint32_t c)
{
    if ((c >= 'A' && c <= 'Z') || (c >= 0xc0 && c <= 0xde && c != 0xd7) ||
        (c >= 0x391 && c <= 0x3a9 && c != 0x3a2) || (c >= 0x410 && c <= 0x42f))
        return c + 0x20;
    return c >= 0x400 && c <= 0x40f ? c + 0x50 : c == 0x178 ? 0xff : c;
}

/* Whether c parts words for title: as Jinja's filter has it, or anything but a letter. */
static bool parts_words(uint32_t c, bool filter)
{
    if (filter)
        return pd_value_is_space(c) || (c < 0x80 && strchr("-({[<", (int)c) != NULL && c != 0);
    return upper(c) == lower(c) && c < 0x80;
}

pd_value pd_jinja_change_case(pd_jinja_run *run, const pd_string *s, pd_jinja_case to, bool filter)
{
    char *bytes = pd_value_alloc(&run->values, s->len, 1);
    pd_string *result = pd_value_alloc(&run->values, 1, sizeof *result);
    bool word_begins = true;
    size_t len;

    if (result == NULL)
        return undefined();
    for (size_t at = 0; at < s->len; at += len) {
        char changed[4];
        uint32_t c = char_at(s, at, &len);
        bool up = to == PD_JINJA_UPPER || (word_begins && to != PD_JINJA_LOWER);
        word_begins = to == PD_JINJA_TITLE && parts_words(c, filter);
        /* all of our letters keep their length in UTF-8, so marks stay where they are */
        size_t changed_len = pd_utf8_encode(up ? upper(c) : lower(c), changed);
        if (changed_len == len)
            memcpy(bytes + at, changed, len);
        else
            memcpy(bytes + at, s->bytes + at, len);
    }
    *result = *s;
    result->bytes = bytes;
    return (pd_value){.kind = PD_VALUE_STRING, .as.string = result};
}

pd_value pd_jinja_join(pd_jinja_run *run, const pd_list *list, const pd_string *separator,
                       const char *attribute)
{
    size_t count = list->count != 0 ? list->count * 2 - 1 : 0;
    const pd_string **parts = pd_value_alloc(&run->values, count, sizeof *parts);

    if (parts == NULL)
        return undefined();
    for (size_t i = 0; i < list->count; i++) {
        pd_value item = list->items[i];
        if (attribute != NULL)
            item = pd_jinja_attr(run, &item, attribute);
        pd_value text = pd_value_to_string(&run->values, &item);
        if (text.kind != PD_VALUE_STRING || run->values.status != PD_OK)
            return undefined();
        if (i != 0)
            parts[2 * i - 1] = separator;
        parts[2 * i] = text.as.string;
    }
    return pd_value_joined(&run->values, parts, count);
}

pd_value pd_jinja_indent(pd_jinja_run *run, const pd_string *s, const pd_string *by, bool first,
                         bool blank)
{
    static const pd_string newline = {.bytes = "\n", .len = 1};
    const pd_string *with_end[] = {s, &newline};
    pd_value text = pd_value_joined(&run->values, with_end, 2);
    pieces all = {0};

    if (text.kind != PD_VALUE_STRING)
        return undefined();
    pd_value lines = pd_jinja_splitlines(run, text.as.string);
    if (lines.kind != PD_VALUE_LIST || run->values.status != PD_OK)
        return undefined();
    for (size_t i = 0; i < lines.as.list->count; i++) {
        const pd_string *line = lines.as.list->items[i].as.string;
        if (i != 0)
            add_piece(run, &all, &newline, 0, 1);
        if (i == 0 ? first : (line->len != 0 || blank))
            add_piece(run, &all, by, 0, by->len);
        add_piece(run, &all, line, 0, line->len);
    }
    return run->values.status == PD_OK ? join_pieces(run, &all) : undefined();
}

pd_value pd_jinja_escape(pd_jinja_run *run, const pd_string *s)
{
    static const char from[] = "&<>\"'";
    static const pd_string to[] = {{.bytes = "&amp;", .len = 5},
                                   {.bytes = "&lt;", .len = 4},
                                   {.bytes = "&gt;", .len = 4},
                                   {.bytes = "&#34;", .len = 5},
                                   {.bytes = "&#39;", .len = 5}};
    pieces all = {0};
    size_t start = 0;

    for (size_t at = 0; at < s->len && run->values.status == PD_OK; at++) {
        const char *hit = s->bytes[at] != '\0' ? strchr(from, s->bytes[at]) : NULL;
        if (hit == NULL)
            continue;
        add_piece(run, &all, s, start, at);
        add_piece(run, &all, &to[hit - from], 0, to[hit - from].len);
        start = at + 1;
    }
    add_piece(run, &all, s, start, s->len);
    return run->values.status == PD_OK ? join_pieces(run, &all) : undefined();
}
