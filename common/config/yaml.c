#include "common/config/yaml.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <yaml.h>

#define ANCHORS_MAX 64

typedef struct anchor {
    const char *name;
    pd_yaml_node *node; /* NULL while it is being read: an alias inside would be endless */
} anchor;

typedef struct reader {
    yaml_parser_t parser;
    pd_arena *arena;
    pd_yaml_error_fn *on_error;
    void *ctx;
    pd_status status; /* PD_E_INVALID once a fault was told */
    uint32_t nodes;
    anchor anchors[ANCHORS_MAX];
    uint32_t anchors_count;
} reader;

static void fault(reader *r, uint32_t line, uint32_t column, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void fault(reader *r, uint32_t line, uint32_t column, const char *format, ...)
{
    char message[512];
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (r->status == PD_OK)
        r->status = PD_E_INVALID;
    r->on_error(r->ctx, line, column, message);
}

void pd_yaml_show(const char *text, char out[72])
{
    size_t n = 0;

    for (; text[n] != '\0' && n < 60; n++) {
        unsigned char c = (unsigned char)text[n];
        out[n] = c < 0x20 || c == 0x7f ? '?' : (char)c;
    }
    if (text[n] != '\0') {
        while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
            n--; /* not in the middle of a character */
        memcpy(out + n, "...", 4);
    } else {
        out[n] = '\0';
    }
}

const char *pd_yaml_kind_name(pd_yaml_kind kind)
{
    static const char *const names[] = {"nothing", "a value", "a list", "a map"};
    return names[kind];
}

pd_yaml_node *pd_yaml_get(const pd_yaml_node *map, const char *key)
{
    if (map == NULL || map->kind != PD_YAML_MAP)
        return NULL;
    for (pd_yaml_node *child = map->first; child != NULL; child = child->next) {
        if (strcmp(child->key, key) == 0)
            return child;
    }
    return NULL;
}

void pd_yaml_append(pd_yaml_node *parent, pd_yaml_node *child)
{
    pd_assert(parent->kind == PD_YAML_MAP ? child->key != NULL : parent->kind == PD_YAML_LIST);
    child->next = NULL;
    if (parent->last != NULL)
        parent->last->next = child;
    else
        parent->first = child;
    parent->last = child;
    parent->count++;
}

void pd_yaml_remove(pd_yaml_node *parent, pd_yaml_node *child)
{
    pd_yaml_node *before = NULL;

    for (pd_yaml_node *at = parent->first; at != child; at = at->next) {
        pd_assert(at != NULL);
        before = at;
    }
    if (before != NULL)
        before->next = child->next;
    else
        parent->first = child->next;
    if (parent->last == child)
        parent->last = before;
    child->next = NULL;
    parent->count--;
}

static uint32_t line_of(yaml_mark_t mark)
{
    return (uint32_t)mark.line + 1;
}

static uint32_t column_of(yaml_mark_t mark)
{
    return (uint32_t)mark.column + 1;
}

static pd_yaml_node *new_node(reader *r, pd_yaml_kind kind, uint32_t line, uint32_t column)
{
    if (r->nodes == PD_YAML_NODES_MAX) {
        fault(r, line, column, "more than %d values", PD_YAML_NODES_MAX);
        return NULL;
    }
    pd_yaml_node *node = pd_arena_alloc(r->arena, sizeof *node);
    if (node == NULL) {
        r->status = PD_E_NOMEM;
        return NULL;
    }
    r->nodes++;
    *node = (pd_yaml_node){.kind = kind, .line = line, .column = column};
    return node;
}

/* The next event; false at the end of what can be read, told. */
static bool next_event(reader *r, yaml_event_t *event)
{
    if (yaml_parser_parse(&r->parser, event))
        return true;
    const yaml_parser_t *p = &r->parser;
    switch (p->error) {
    case YAML_MEMORY_ERROR: r->status = PD_E_NOMEM; break;
    case YAML_READER_ERROR:
        fault(r, line_of(p->mark), column_of(p->mark), "not readable as YAML text: %s (byte %zu)",
              p->problem != NULL ? p->problem : "bad encoding", p->problem_offset);
        break;
    default:
        fault(r, line_of(p->problem_mark), column_of(p->problem_mark), "not valid YAML: %s%s%s",
              p->problem != NULL ? p->problem : "syntax error", p->context != NULL ? ", " : "",
              p->context != NULL ? p->context : "");
    }
    return false;
}

static bool is_null_text(const char *text)
{
    return text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0 ||
           strcmp(text, "Null") == 0 || strcmp(text, "NULL") == 0;
}

/* Anchors are remembered by place in the table, for the node may not exist yet. Returns the
 * place, or -1 without an anchor (or a told fault). */
static int note_anchor(reader *r, const yaml_char_t *name, yaml_mark_t mark)
{
    if (name == NULL)
        return -1;
    if (r->anchors_count == ANCHORS_MAX) {
        fault(r, line_of(mark), column_of(mark), "more than %d anchors", ANCHORS_MAX);
        return -1;
    }
    char *copy = pd_arena_strndup(r->arena, (const char *)name, strlen((const char *)name));
    if (copy == NULL) {
        r->status = PD_E_NOMEM;
        return -1;
    }
    r->anchors[r->anchors_count] = (anchor){.name = copy};
    return (int)r->anchors_count++;
}

static void refuse_tag(reader *r, const yaml_char_t *tag, yaml_mark_t mark)
{
    char shown[72];

    if (tag == NULL)
        return;
    pd_yaml_show((const char *)tag, shown);
    fault(r, line_of(mark), column_of(mark),
          "the tag '%s' is not supported: write the value alone, each key knows its type", shown);
}

static pd_yaml_node *copy_node(reader *r, const pd_yaml_node *from)
{
    pd_yaml_node *copy = new_node(r, from->kind, from->line, from->column);

    if (copy == NULL)
        return NULL;
    copy->text = from->text;
    for (const pd_yaml_node *child = from->first; child != NULL; child = child->next) {
        pd_yaml_node *child_copy = copy_node(r, child);
        if (child_copy == NULL)
            return NULL;
        child_copy->key = child->key;
        child_copy->key_line = child->key_line;
        child_copy->key_column = child->key_column;
        pd_yaml_append(copy, child_copy);
    }
    return copy;
}

static uint32_t depth_of(const pd_yaml_node *node)
{
    uint32_t deepest = 0;

    for (const pd_yaml_node *child = node->first; child != NULL; child = child->next) {
        uint32_t depth = depth_of(child);
        deepest = depth > deepest ? depth : deepest;
    }
    return deepest + 1;
}

static pd_yaml_node *read_alias(reader *r, const yaml_event_t *event, uint32_t depth)
{
    const char *name = (const char *)event->data.alias.anchor;
    uint32_t line = line_of(event->start_mark), column = column_of(event->start_mark);
    char shown[72];

    pd_yaml_show(name, shown);
    for (uint32_t i = r->anchors_count; i-- > 0;) { /* the latest of a name counts */
        if (strcmp(r->anchors[i].name, name) != 0)
            continue;
        if (r->anchors[i].node == NULL) {
            fault(r, line, column, "the alias '*%s' lies inside its own anchor", shown);
            return NULL;
        }
        if (depth + depth_of(r->anchors[i].node) > PD_YAML_DEPTH_MAX) {
            fault(r, line, column, "nested deeper than %d levels", PD_YAML_DEPTH_MAX);
            return NULL;
        }
        return copy_node(r, r->anchors[i].node);
    }
    fault(r, line, column, "the alias '*%s' has no anchor '&%s' before it", shown, shown);
    return NULL;
}

static pd_yaml_node *read_scalar(reader *r, const yaml_event_t *event)
{
    const char *text = (const char *)event->data.scalar.value;
    size_t len = event->data.scalar.length;
    uint32_t line = line_of(event->start_mark), column = column_of(event->start_mark);
    bool plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;

    refuse_tag(r, event->data.scalar.tag, event->start_mark);
    if (memchr(text, '\0', len) != NULL) {
        fault(r, line, column, "a NUL character in a value");
        return NULL;
    }
    int anchored = note_anchor(r, event->data.scalar.anchor, event->start_mark);
    pd_yaml_node *node =
        new_node(r, plain && is_null_text(text) ? PD_YAML_NULL : PD_YAML_SCALAR, line, column);
    if (node == NULL)
        return NULL;
    node->text = pd_arena_strndup(r->arena, text, len);
    if (node->text == NULL) {
        r->status = PD_E_NOMEM;
        return NULL;
    }
    if (anchored >= 0)
        r->anchors[anchored].node = node;
    return node;
}

static pd_yaml_node *read_node(reader *r, yaml_event_t *event, uint32_t depth);

static pd_yaml_node *read_list(reader *r, const yaml_event_t *start, uint32_t depth)
{
    uint32_t line = line_of(start->start_mark), column = column_of(start->start_mark);
    pd_yaml_node *list = new_node(r, PD_YAML_LIST, line, column);

    refuse_tag(r, start->data.sequence_start.tag, start->start_mark);
    int anchored = note_anchor(r, start->data.sequence_start.anchor, start->start_mark);
    while (list != NULL) {
        yaml_event_t event;
        if (!next_event(r, &event))
            return NULL;
        if (event.type == YAML_SEQUENCE_END_EVENT) {
            yaml_event_delete(&event);
            break;
        }
        pd_yaml_node *item = read_node(r, &event, depth + 1);
        yaml_event_delete(&event);
        if (item == NULL)
            return NULL;
        if (list->count == PD_YAML_CHILDREN_MAX) {
            fault(r, item->line, item->column, "more than %d items in a list",
                  PD_YAML_CHILDREN_MAX);
            return NULL;
        }
        pd_yaml_append(list, item);
    }
    if (anchored >= 0)
        r->anchors[anchored].node = list;
    return list;
}

/* A key's text, or NULL with the fault told. */
static const char *read_key(reader *r, const yaml_event_t *event)
{
    uint32_t line = line_of(event->start_mark), column = column_of(event->start_mark);

    if (event->type != YAML_SCALAR_EVENT || event->data.scalar.anchor != NULL) {
        fault(r, line, column, "a key must be a plain word");
        return NULL;
    }
    const char *text = (const char *)event->data.scalar.value;
    size_t len = event->data.scalar.length;
    refuse_tag(r, event->data.scalar.tag, event->start_mark);
    if (memchr(text, '\0', len) != NULL) {
        fault(r, line, column, "a NUL character in a key");
        return NULL;
    }
    const char *key = pd_arena_strndup(r->arena, text, len);
    if (key == NULL)
        r->status = PD_E_NOMEM;
    return key;
}

/* Links the child into the map, or tells why not. False: give up. */
static bool add_to_map(reader *r, pd_yaml_node *map, pd_yaml_node *child)
{
    const pd_yaml_node *first = pd_yaml_get(map, child->key);
    char shown[72];

    if (strcmp(child->key, "<<") == 0) {
        fault(r, child->key_line, child->key_column,
              "the merge key '<<' is not supported: write the keys out");
        return true;
    }
    if (first != NULL) {
        pd_yaml_show(child->key, shown);
        fault(r, child->key_line, child->key_column, "the key '%s' comes twice: lines %u and %u",
              shown, first->key_line, child->key_line);
        return true;
    }
    if (map->count == PD_YAML_CHILDREN_MAX) {
        fault(r, child->key_line, child->key_column, "more than %d keys in a map",
              PD_YAML_CHILDREN_MAX);
        return false;
    }
    pd_yaml_append(map, child);
    return true;
}

static pd_yaml_node *read_map(reader *r, const yaml_event_t *start, uint32_t depth)
{
    uint32_t line = line_of(start->start_mark), column = column_of(start->start_mark);
    pd_yaml_node *map = new_node(r, PD_YAML_MAP, line, column);

    refuse_tag(r, start->data.mapping_start.tag, start->start_mark);
    int anchored = note_anchor(r, start->data.mapping_start.anchor, start->start_mark);
    while (map != NULL) {
        yaml_event_t event;
        if (!next_event(r, &event))
            return NULL;
        if (event.type == YAML_MAPPING_END_EVENT) {
            yaml_event_delete(&event);
            break;
        }
        const char *key = read_key(r, &event);
        uint32_t key_line = line_of(event.start_mark), key_column = column_of(event.start_mark);
        yaml_event_delete(&event);
        if (key == NULL || !next_event(r, &event))
            return NULL;
        pd_yaml_node *child = read_node(r, &event, depth + 1);
        yaml_event_delete(&event);
        if (child == NULL)
            return NULL;
        child->key = key;
        child->key_line = key_line;
        child->key_column = key_column;
        if (!add_to_map(r, map, child))
            return NULL;
    }
    if (anchored >= 0)
        r->anchors[anchored].node = map;
    return map;
}

/* NULL: cannot go on; told (or no memory). */
static pd_yaml_node *read_node(reader *r, yaml_event_t *event, uint32_t depth)
{
    if (depth > PD_YAML_DEPTH_MAX) {
        fault(r, line_of(event->start_mark), column_of(event->start_mark),
              "nested deeper than %d levels", PD_YAML_DEPTH_MAX);
        return NULL;
    }
    switch (event->type) {
    case YAML_ALIAS_EVENT: return read_alias(r, event, depth);
    case YAML_SCALAR_EVENT: return read_scalar(r, event);
    case YAML_SEQUENCE_START_EVENT: return read_list(r, event, depth);
    case YAML_MAPPING_START_EVENT: return read_map(r, event, depth);
    default:
        fault(r, line_of(event->start_mark), column_of(event->start_mark), "a value is missing");
        return NULL;
    }
}

static pd_yaml_node *read_stream(reader *r)
{
    pd_yaml_node *root = NULL;
    bool in_document = false, had_document = false;

    for (;;) {
        yaml_event_t event;
        if (!next_event(r, &event))
            return NULL;
        yaml_event_type_t type = event.type;
        if (type == YAML_DOCUMENT_START_EVENT && had_document)
            fault(r, line_of(event.start_mark), column_of(event.start_mark),
                  "a second document begins: one file describes one cluster");
        else if (in_document && type != YAML_DOCUMENT_END_EVENT)
            root = read_node(r, &event, 1);
        bool stop = type == YAML_STREAM_END_EVENT ||
                    (type == YAML_DOCUMENT_START_EVENT && had_document) ||
                    (in_document && type != YAML_DOCUMENT_END_EVENT && root == NULL);
        in_document = type == YAML_DOCUMENT_START_EVENT;
        had_document |= in_document;
        yaml_event_delete(&event);
        if (stop)
            return root;
    }
}

pd_status pd_yaml_parse(const char *text, size_t len, pd_arena *arena, pd_yaml_error_fn *on_error,
                        void *ctx, pd_yaml_node **root_out)
{
    reader r = {.arena = arena, .on_error = on_error, .ctx = ctx};

    *root_out = NULL;
    if (len > PD_YAML_BYTES_MAX) {
        fault(&r, 1, 1, "%zu bytes; at most %u are read", len, PD_YAML_BYTES_MAX);
        return r.status;
    }
    if (!yaml_parser_initialize(&r.parser))
        return PD_E_NOMEM;
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, len);
    *root_out = read_stream(&r);
    yaml_parser_delete(&r.parser);
    return r.status;
}
