#pragma once

/* common/config/yaml.h - the door to libyaml: text to a tree of nodes with their places.
 *
 * Only what a configuration needs: one document of maps, lists and scalars. A scalar keeps the
 * text as written; what it means is decided by whoever reads it. An alias (`*name`) is a copy of
 * what its anchor holds. Refused, with line and column: a key that comes twice in a map, merge
 * keys (`<<`), tags, keys that are no scalars, several documents, NUL, and whatever is over the
 * limits below, so that no text can make it use much memory or time. Any thread. */

#include "common/base/mem.h"
#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

#define PD_YAML_BYTES_MAX    (1u << 20)
#define PD_YAML_DEPTH_MAX    16
#define PD_YAML_NODES_MAX    8192 /* copies of anchors counted */
#define PD_YAML_CHILDREN_MAX 1024 /* of a map or list */

typedef enum pd_yaml_kind {
    PD_YAML_NULL, /* nothing, ~ or null, unquoted */
    PD_YAML_SCALAR,
    PD_YAML_LIST,
    PD_YAML_MAP,
} pd_yaml_kind;

typedef struct pd_yaml_node {
    pd_yaml_kind kind;
    uint32_t line, column;             /* from 1; 0: not from the text */
    uint32_t set;                      /* for the user of the tree: 0 as parsed */
    const char *text;                  /* scalar, null: as written, without quotes */
    struct pd_yaml_node *first, *last; /* children of a map or list, in order */
    uint32_t count;
    /* as a child */
    struct pd_yaml_node *next;
    const char *key; /* of a map's child, else NULL */
    uint32_t key_line, key_column;
} pd_yaml_node;

/* Told of every fault; message is one line without a place. */
typedef void pd_yaml_error_fn(void *ctx, uint32_t line, uint32_t column, const char *message);

/* The tree lives in arena. *root_out is NULL for a text without a document. Goes on after a fault
 * that leaves the structure clear (a repeated key: the first one stays), so that more can be
 * told. Errors: PD_E_INVALID (at least one fault was told; *root_out may still hold a tree, or be
 * NULL), PD_E_NOMEM. */
PD_CHECKED pd_status pd_yaml_parse(const char *text, size_t len, pd_arena *arena,
                                   pd_yaml_error_fn *on_error, void *ctx, pd_yaml_node **root_out);

/* The child with this key, or NULL; map may be NULL or of another kind. */
pd_yaml_node *pd_yaml_get(const pd_yaml_node *map, const char *key);
/* Appends a child to a map or list. */
void pd_yaml_append(pd_yaml_node *parent, pd_yaml_node *child);
/* Unlinks a child. */
void pd_yaml_remove(pd_yaml_node *parent, pd_yaml_node *child);
/* "a map", "a list", "a value", "nothing". */
const char *pd_yaml_kind_name(pd_yaml_kind kind);
/* Copies text for showing in a message: at most 60 bytes, never a control character. */
void pd_yaml_show(const char *text, char out[72]);
