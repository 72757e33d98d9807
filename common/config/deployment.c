#include "common/config/deployment.h"

#include "common/base/json.h"
#include "common/config/schema.h"
#include "common/config/value.h"
#include "common/config/yaml.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAULTS_MAX   100
#define TREE_BYTES   (16u << 20)
#define STRING_BYTES (256u << 10)

/* Keys that may stand in an item of models, beside those of the section model. */
static const char *const per_model[] = {"workers", "ratio", "prefill", "decode", "kv"};

typedef struct fault {
    uint32_t set, line, column;
    const char *text;
} fault;

typedef struct faults {
    pd_arena *arena;
    fault list[FAULTS_MAX];
    uint32_t count, more; /* more: told after the list was full */
    bool no_memory;
} faults;

typedef enum key_state {
    UNSET,
    GOOD,
    BAD,
} key_state;

typedef struct reading {
    pd_values v;
    key_state states[PD_KEYS_MAX];
    const pd_yaml_node *nodes[PD_KEYS_MAX]; /* where a GOOD or BAD value stood */
    const pd_yaml_node *root;
    pd_arena *strings; /* of the deployment */
    pd_arena *tree;
    faults *faults;
} reading;

static void tell(faults *f, uint32_t set, uint32_t line, uint32_t column, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

static void tell(faults *f, uint32_t set, uint32_t line, uint32_t column, const char *format, ...)
{
    char text[1024];
    va_list args;

    if (f->count == FAULTS_MAX) {
        f->more++;
        return;
    }
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    char *copy = pd_arena_strndup(
        f->arena, text, n < 0 ? 0 : ((size_t)n < sizeof text ? (size_t)n : sizeof text - 1));
    if (copy == NULL)
        f->no_memory = true;
    else
        f->list[f->count++] = (fault){set, line, column, copy};
}

#define TELL_AT(f, node, ...) tell((f), (node)->set, (node)->line, (node)->column, __VA_ARGS__)

static void on_yaml_error(void *ctx, uint32_t line, uint32_t column, const char *message)
{
    tell(ctx, 0, line, column, "%s", message);
}

static int by_place(const void *a, const void *b)
{
    const fault *x = a, *y = b;

    if (x->set != y->set)
        return x->set < y->set ? -1 : 1;
    if (x->line != y->line)
        return x->line < y->line ? -1 : 1;
    if (x->column != y->column)
        return x->column < y->column ? -1 : 1;
    return strcmp(x->text, y->text);
}

static void write_faults(faults *f, const char *name, pd_buf *errors)
{
    qsort(f->list, f->count, sizeof f->list[0], by_place);
    for (uint32_t i = 0; i < f->count; i++) {
        const fault *at = &f->list[i];
        if (i > 0 && by_place(at, at - 1) == 0)
            continue; /* told twice: an anchor's content read at two places */
        if (at->set != 0)
            pd_buf_printf(errors, "--set %u: %s\n", at->set, at->text);
        else if (at->line != 0)
            pd_buf_printf(errors, "%s:%u:%u: %s\n", name, at->line, at->column, at->text);
        else
            pd_buf_printf(errors, "%s: %s\n", name, at->text);
    }
    if (f->more != 0)
        pd_buf_printf(errors, "%s: and %u more\n", name, f->more);
}

static int key_must(const char *path)
{
    int index = pd_schema_find(path);
    pd_assert(index >= 0);
    return index;
}

static void tell_unknown(reading *r, const char *prefix, const pd_yaml_node *node)
{
    char shown[72], path[PD_KEY_PATH_MAX + 72], nearest[PD_KEY_NAME_MAX];
    uint32_t line = node->key_line, column = node->key_column;
    pd_buf list;

    pd_yaml_show(node->key, shown);
    snprintf(path, sizeof path, "%s%s", prefix, shown);
    pd_buf_init(&list, 1024);
    const char *here = pd_schema_other_name(path);
    if (here == NULL && !pd_schema_nearest(prefix, node->key, nearest)) {
        pd_schema_elsewhere(node->key, &list);
        bool elsewhere = list.len != 0;
        if (!elsewhere)
            pd_schema_list(prefix, &list);
        tell(r->faults, node->set, line, column, "%s: unknown key%s %s", path,
             elsewhere ? " at this level; there is" : "; known here:", pd_buf_text(&list));
    } else if (here != NULL) {
        tell(r->faults, node->set, line, column, "%s: unknown key; it is called '%s' here", path,
             here);
    } else {
        tell(r->faults, node->set, line, column, "%s: unknown key, did you mean '%s%s'?", path,
             prefix, nearest);
    }
    pd_buf_fini(&list);
}

/* --- values --- */

static const char *keep(reading *r, const char *text)
{
    const char *copy = pd_arena_strndup(r->strings, text, strlen(text));

    if (copy == NULL)
        r->faults->no_memory = true;
    return copy;
}

static pd_status read_text(reading *r, const pd_key *k, const char *text, void *target,
                           pd_scalar_why *why)
{
    uint32_t index = 0;
    pd_status status;

    switch (k->type) {
    case PD_KEY_LABEL: status = pd_scalar_label(text, why); break;
    case PD_KEY_ENDPOINT: status = pd_scalar_endpoint(text, why); break;
    case PD_KEY_CHOICE: status = pd_scalar_choice(text, k->choices, &index, why); break;
    default: status = pd_scalar_string(text, k->max, why); break;
    }
    if (status == PD_OK)
        *(const char **)target = keep(r, text);
    return status;
}

static pd_status read_listen(reading *r, const char *text, pd_listen *target, pd_scalar_why *why)
{
    char host[256];
    pd_listen listen;
    pd_status status = pd_scalar_listen(text, host, &listen.port, &listen.ipv6, why);

    if (status != PD_OK)
        return status;
    listen.text = keep(r, text);
    listen.host = keep(r, host);
    *target = listen;
    return PD_OK;
}

/* What is wrong with a number where the word would do as well. */
static void or_auto(pd_scalar_why *why)
{
    size_t len = strlen(why->text);

    snprintf(why->text + len, sizeof why->text - len, " (or auto)");
}

/* One scalar into the struct. */
static pd_status read_scalar(reading *r, const pd_key *k, const char *text, pd_scalar_why *why)
{
    void *target = (char *)&r->v + k->offset;
    uint64_t number = 0;
    uint32_t index = 0;
    pd_status status;

    switch (k->type) {
    case PD_KEY_ENUM:
        status = pd_scalar_choice(text, k->choices, &index, why);
        if (status == PD_OK)
            *(int *)target = (int)index;
        return status;
    case PD_KEY_AUTO:
        if (strcmp(text, "auto") == 0 || strcmp(text, "0") == 0) {
            *(uint32_t *)target = 0;
            return PD_OK;
        } /* fall through */
    case PD_KEY_INTEGER:
        status = pd_scalar_integer(text, k->min, k->max, &number, why);
        if (status == PD_OK)
            *(uint32_t *)target = (uint32_t)number;
        else if (k->type == PD_KEY_AUTO)
            or_auto(why);
        return status;
    case PD_KEY_BOOL: return pd_scalar_bool(text, target, why);
    case PD_KEY_DURATION: return pd_scalar_duration(text, k->min, k->max, target, why);
    case PD_KEY_SIZE: return pd_scalar_size(text, k->min, k->max, target, why);
    case PD_KEY_RATIO:
        return pd_scalar_ratio(text, (uint32_t)k->max, &r->v.ratio[0], &r->v.ratio[1], why);
    case PD_KEY_LISTEN: return read_listen(r, text, target, why);
    default: return read_text(r, k, text, target, why);
    }
}

static bool add_alias(reading *r, const pd_yaml_node *node, const char *path, const char *text)
{
    pd_scalar_why why;

    if (r->v.d.model.aliases_count == PD_DEPLOYMENT_ALIASES_MAX) {
        TELL_AT(r->faults, node, "%s: at most %d names", path, PD_DEPLOYMENT_ALIASES_MAX);
        return false;
    }
    if (pd_scalar_string(text, PD_STRING_MAX, &why) != PD_OK) {
        TELL_AT(r->faults, node, "%s: %s", path, why.text);
        return false;
    }
    r->v.d.model.aliases[r->v.d.model.aliases_count++] = keep(r, text);
    return true;
}

/* A list of names, or one name. */
static bool read_aliases(reading *r, const pd_yaml_node *node, const char *path)
{
    if (node->kind == PD_YAML_SCALAR)
        return add_alias(r, node, path, node->text);
    if (node->kind != PD_YAML_LIST) {
        TELL_AT(r->faults, node, "%s: must be a list of names, not %s", path,
                pd_yaml_kind_name(node->kind));
        return false;
    }
    bool good = true;
    for (const pd_yaml_node *item = node->first; item != NULL; item = item->next) {
        if (item->kind != PD_YAML_SCALAR) {
            TELL_AT(r->faults, item, "%s: a name is expected, not %s", path,
                    pd_yaml_kind_name(item->kind));
            good = false;
        } else {
            good &= add_alias(r, item, path, item->text);
        }
    }
    return good;
}

static void read_key(reading *r, size_t index, const pd_yaml_node *node)
{
    const pd_key *k = &pd_schema[index];
    pd_scalar_why why;

    r->nodes[index] = node;
    r->states[index] = BAD;
    if (k->type == PD_KEY_ALIASES) {
        r->states[index] = read_aliases(r, node, k->path) ? GOOD : BAD;
    } else if (node->kind == PD_YAML_NULL) {
        TELL_AT(r->faults, node, "%s: has no value (null)%s", k->path,
                node->text != NULL && node->text[0] != '\0' ? "; quote it if a text is meant" : "");
    } else if (node->kind != PD_YAML_SCALAR) {
        TELL_AT(r->faults, node, "%s: must be one value, not %s", k->path,
                pd_yaml_kind_name(node->kind));
    } else if (read_scalar(r, k, node->text, &why) != PD_OK) {
        TELL_AT(r->faults, node, "%s: %s", k->path, why.text);
    } else {
        r->states[index] = GOOD;
    }
}

/* Reads a map whose keys lie below prefix ("" or "router."). */
static void read_section(reading *r, const char *prefix, const pd_yaml_node *map)
{
    for (const pd_yaml_node *node = map->first; node != NULL; node = node->next) {
        char path[PD_KEY_PATH_MAX];
        int n = snprintf(path, sizeof path, "%s%s", prefix, node->key);
        int index = n > 0 && (size_t)n < sizeof path ? pd_schema_find(path) : -1;
        if (index >= 0) {
            read_key(r, (size_t)index, node);
        } else if ((size_t)n >= sizeof path - 1 || !pd_schema_is_section(path)) {
            tell_unknown(r, prefix, node);
        } else if (node->kind == PD_YAML_MAP) {
            path[n] = '.';
            path[n + 1] = '\0';
            read_section(r, path, node);
        } else if (node->kind != PD_YAML_NULL) { /* an empty section is fine */
            TELL_AT(r->faults, node, "%s: must be a map of keys, not %s", path,
                    pd_yaml_kind_name(node->kind));
        }
    }
}

static void read_defaults(reading *r)
{
    for (size_t i = 0; i < pd_schema_count; i++) {
        pd_scalar_why why;
        if (r->states[i] != GOOD && pd_schema[i].fallback != NULL) {
            pd_status status = read_scalar(r, &pd_schema[i], pd_schema[i].fallback, &why);
            pd_assert(status == PD_OK); /* a default outside its own range */
        }
    }
}

/* --- models and --set --- */

static pd_yaml_node *new_map(reading *r, const char *name, const pd_yaml_node *place)
{
    pd_yaml_node *map = pd_arena_alloc(r->tree, sizeof *map);

    if (map == NULL) {
        r->faults->no_memory = true;
        return NULL;
    }
    *map = (pd_yaml_node){.kind = PD_YAML_MAP, .key = name};
    if (place != NULL) {
        map->line = map->key_line = place->line;
        map->column = map->key_column = place->column;
        map->set = place->set;
    }
    return map;
}

/* Moves an item of models to where the keys of a single model stand. */
static void move_model(reading *r, pd_yaml_node *root, pd_yaml_node *item)
{
    pd_yaml_node *model = new_map(r, "model", item);

    if (model == NULL)
        return;
    for (pd_yaml_node *child = item->first, *next; child != NULL; child = next) {
        bool pool = false;
        next = child->next;
        for (size_t i = 0; i < sizeof per_model / sizeof per_model[0]; i++)
            pool |= strcmp(child->key, per_model[i]) == 0;
        const pd_yaml_node *other = pool ? pd_yaml_get(root, child->key) : NULL;
        if (other != NULL) {
            tell(r->faults, child->set, child->key_line, child->key_column,
                 "models: '%s' stands here and at the top level (line %u)", child->key,
                 other->key_line);
            continue;
        }
        pd_yaml_append(pool ? root : model, child);
    }
    pd_yaml_append(root, model);
}

static void check_further_model(reading *r, pd_yaml_node *item)
{
    reading *further = pd_calloc(1, sizeof *further);
    pd_yaml_node *root = new_map(r, NULL, item);

    if (further == NULL || root == NULL) {
        r->faults->no_memory = true;
        pd_free(further);
        return;
    }
    further->strings = r->tree;
    further->tree = r->tree;
    further->faults = r->faults;
    move_model(further, root, item);
    read_section(further, "", root);
    pd_free(further);
}

/* models: a list, each with its pools. One for now: it is moved to the single model's place. */
static void take_models(reading *r, pd_yaml_node *root)
{
    pd_yaml_node *models = pd_yaml_get(root, "models");
    const pd_yaml_node *model = pd_yaml_get(root, "model");

    if (models == NULL)
        return;
    pd_yaml_remove(root, models);
    if (models->kind != PD_YAML_LIST || models->count == 0) {
        TELL_AT(r->faults, models, "models: must be a list of at least one model, not %s",
                models->kind == PD_YAML_LIST ? "an empty one" : pd_yaml_kind_name(models->kind));
        return;
    }
    if (model != NULL)
        tell(r->faults, 0, models->key_line, models->key_column,
             "models: stands beside 'model' (line %u): keep one of them", model->key_line);
    if (models->count > 1)
        TELL_AT(r->faults, models->first->next,
                "models: %u models; one cluster serves one model for now", models->count);
    uint32_t number = 0;
    for (pd_yaml_node *item = models->first, *next; item != NULL; item = next, number++) {
        next = item->next;
        if (item->kind != PD_YAML_MAP)
            TELL_AT(r->faults, item, "models[%u]: must be a map of keys, not %s", number,
                    pd_yaml_kind_name(item->kind));
        else if (number == 0 && model == NULL)
            move_model(r, root, item);
        else
            check_further_model(r, item);
    }
}

/* The map below parent with this name, made when absent; NULL: told. */
static pd_yaml_node *section_for_set(reading *r, pd_yaml_node *parent, const char *name,
                                     uint32_t set, const char *text)
{
    pd_yaml_node *child = pd_yaml_get(parent, name);
    char shown[72];

    if (child != NULL && child->kind == PD_YAML_MAP)
        return child;
    if (child != NULL && child->kind != PD_YAML_NULL) {
        pd_yaml_show(text, shown);
        if (child->set != 0)
            tell(r->faults, set, 0, 0, "%s: --set %u gives '%s' a value", shown, child->set, name);
        else
            tell(r->faults, set, 0, 0, "%s: '%s' is %s in the file (line %u)", shown, name,
                 pd_yaml_kind_name(child->kind), child->line);
        return NULL;
    }
    if (child != NULL)
        pd_yaml_remove(parent, child);
    pd_yaml_node *map = new_map(r, name, NULL);
    if (map != NULL) {
        map->set = set;
        pd_yaml_append(parent, map);
    }
    return map;
}

/* The ways to count workers: a --set of one replaces the file's other. */
static void forget_other_counts(pd_yaml_node *root, const char *path)
{
    static const char *const pools[] = {"prefill", "decode"};
    bool total = strcmp(path, "workers") == 0 || strcmp(path, "ratio") == 0;
    bool pool = strcmp(path, "prefill.workers") == 0 || strcmp(path, "decode.workers") == 0;

    for (int i = 0; i < 2; i++) {
        pd_yaml_node *section = total ? pd_yaml_get(root, pools[i]) : root;
        const char *name = total ? "workers" : (i == 0 ? "workers" : "ratio");
        pd_yaml_node *count = pd_yaml_get(section, name);
        if ((total || pool) && count != NULL && count->set == 0)
            pd_yaml_remove(section, count);
    }
}

static void apply_set(reading *r, pd_yaml_node *root, const char *text, uint32_t set)
{
    char shown[72];
    const char *equals = strchr(text, '=');
    pd_yaml_node *parent = root;

    pd_yaml_show(text, shown);
    if (equals == NULL || equals == text || equals - text >= PD_KEY_PATH_MAX) {
        tell(r->faults, set, 0, 0, "'%s' must be KEY=VALUE, such as router.listen=127.0.0.1:8080",
             shown);
        return;
    }
    char *path = pd_arena_strndup(r->tree, text, (size_t)(equals - text));
    char *name = path != NULL ? pd_arena_strndup(r->tree, path, strlen(path)) : NULL;
    char *value = pd_arena_strndup(r->tree, equals + 1, strlen(equals + 1));
    pd_yaml_node *node = pd_arena_alloc(r->tree, sizeof *node);
    if (name == NULL || value == NULL || node == NULL) {
        r->faults->no_memory = true;
        return;
    }
    for (char *dot; (dot = strchr(name, '.')) != NULL; name = dot + 1) {
        *dot = '\0';
        parent = section_for_set(r, parent, name, set, text);
        if (parent == NULL)
            return;
    }
    *node = (pd_yaml_node){.kind = PD_YAML_SCALAR, .text = value, .key = name, .set = set};
    pd_yaml_node *old = pd_yaml_get(parent, name);
    if (old != NULL)
        pd_yaml_remove(parent, old);
    pd_yaml_append(parent, node);
    forget_other_counts(root, path);
}

/* --- what depends on several keys --- */

/* Tells a fault at a key, wherever its value came from. */
#define TELL_KEY(r, path, ...)                                                                     \
    do {                                                                                           \
        const pd_yaml_node *at_ = (r)->nodes[key_must(path)];                                      \
        at_ = at_ != NULL ? at_ : (r)->root;                                                       \
        TELL_AT((r)->faults, at_, path ": " __VA_ARGS__);                                          \
    } while (0)

static key_state state_of(const reading *r, const char *path)
{
    return r->states[key_must(path)];
}

static void tell_totals(reading *r, uint32_t total, uint32_t left, uint32_t right)
{
    uint32_t sum = left + right, below = total / sum * sum, above = below + sum;
    char totals[48];

    if (below == 0)
        snprintf(totals, sizeof totals, "%u would", above);
    else
        snprintf(totals, sizeof totals, "%u or %u would", below, above);
    TELL_KEY(r, "workers", "%u workers do not divide by the ratio %u:%u; %s", total, left, right,
             totals);
}

/* workers and ratio, or counts of pools, to the count of each role. */
static void count_workers(reading *r)
{
    key_state total = state_of(r, "workers"), ratio = state_of(r, "ratio");
    key_state prefill = state_of(r, "prefill.workers"), decode = state_of(r, "decode.workers");
    pd_deployment *d = &r->v.d;

    if (total == BAD || ratio == BAD || prefill == BAD || decode == BAD)
        return;
    uint32_t left = ratio == GOOD ? r->v.ratio[0] : 1, right = ratio == GOOD ? r->v.ratio[1] : 1;
    if (prefill == UNSET && decode == UNSET) {
        uint32_t workers = total == GOOD ? d->workers : left + right;
        if (workers % (left + right) != 0) {
            tell_totals(r, workers, left, right);
            return;
        }
        d->prefill.workers = workers / (left + right) * left;
        d->decode.workers = workers / (left + right) * right;
    } else if (total == GOOD && (prefill == UNSET || decode == UNSET)) {
        uint32_t given = prefill == GOOD ? d->prefill.workers : d->decode.workers;
        if (given >= d->workers) {
            TELL_KEY(r, "workers", "%u leave no %s worker beside %u", d->workers,
                     prefill == GOOD ? "decode" : "prefill", given);
            return;
        }
        *(prefill == GOOD ? &d->decode.workers : &d->prefill.workers) = d->workers - given;
    } else if (prefill == UNSET || decode == UNSET) {
        *(prefill == UNSET ? &d->prefill.workers : &d->decode.workers) = 1;
    }
    if (total == GOOD && d->workers != d->prefill.workers + d->decode.workers)
        TELL_KEY(r, "workers", "%u, but prefill.workers and decode.workers make %u", d->workers,
                 d->prefill.workers + d->decode.workers);
    if (ratio == GOOD && (uint64_t)d->prefill.workers * right != (uint64_t)d->decode.workers * left)
        TELL_KEY(r, "ratio", "%u:%u, but there are %u prefill and %u decode workers", left, right,
                 d->prefill.workers, d->decode.workers);
    if (d->prefill.workers > PD_DEPLOYMENT_WORKERS_MAX ||
        d->decode.workers > PD_DEPLOYMENT_WORKERS_MAX)
        TELL_KEY(r, "workers", "at most %d of a role", PD_DEPLOYMENT_WORKERS_MAX);
    d->workers = d->prefill.workers + d->decode.workers;
}

static void finish_model(reading *r)
{
    pd_deployment *d = &r->v.d;

    if (state_of(r, "model.path") == UNSET) {
        const pd_yaml_node *model = pd_yaml_get(r->root, "model");
        TELL_AT(r->faults, model != NULL ? model : r->root,
                "model.path: is required: the model's GGUF file");
    }
    if (state_of(r, "model.path") != GOOD || state_of(r, "model.name") != UNSET)
        return;
    if (d->model.path == NULL)
        return; /* no memory; told */
    const char *base = strrchr(d->model.path, '/');
    base = base != NULL ? base + 1 : d->model.path;
    const char *dot = strrchr(base, '.');
    size_t len = dot != NULL && dot != base ? (size_t)(dot - base) : strlen(base);
    if (len == 0 || len > PD_STRING_MAX) {
        TELL_KEY(r, "model.path", "names no file");
        return;
    }
    d->model.name = pd_arena_strndup(r->strings, base, len);
    if (d->model.name == NULL)
        r->faults->no_memory = true;
}

static void finish_endpoint(reading *r, const char *path, const char *file, const char **target)
{
    char text[PD_MODEL_PATH_MAX + 64];
    pd_scalar_why why;

    if (state_of(r, path) != UNSET)
        return;
    snprintf(text, sizeof text, "ipc://%s/%s", r->v.d.state_dir, file);
    if (r->v.d.router.bus == PD_BUS_TCP || pd_scalar_endpoint(text, &why) != PD_OK)
        snprintf(text, sizeof text, "tcp://127.0.0.1:0"); /* a socket's path has to be short */
    *target = keep(r, text);
}

static bool same_endpoint(const char *a, const char *b)
{
    size_t len = a != NULL ? strlen(a) : 0;

    if (a == NULL || b == NULL || strcmp(a, b) != 0)
        return false;
    return strncmp(a, "tcp://", 6) != 0 || strcmp(a + len - 2, ":0") != 0; /* picked: differ */
}

static void finish_router(reading *r)
{
    pd_deployment *d = &r->v.d;

    if (state_of(r, "state_dir") != GOOD) {
        char text[80];
        snprintf(text, sizeof text, ".kvferry/%s", d->cluster != NULL ? d->cluster : "");
        d->state_dir = keep(r, text);
    }
    if (d->state_dir == NULL)
        return; /* no memory; told */
    finish_endpoint(r, "router.control", "control.sock", &d->router.control);
    finish_endpoint(r, "router.tokens", "tokens.sock", &d->router.tokens);
    finish_endpoint(r, "router.events", "events.sock", &d->router.events);
    if (same_endpoint(d->router.control, d->router.tokens) ||
        same_endpoint(d->router.control, d->router.events))
        TELL_KEY(r, "router.control", "three different endpoints are needed, '%s' comes twice",
                 d->router.control);
    else if (same_endpoint(d->router.tokens, d->router.events))
        TELL_KEY(r, "router.tokens", "three different endpoints are needed, '%s' comes twice",
                 d->router.tokens);
    if (state_of(r, "router.replicas") == GOOD && d->router.replicas != 1)
        TELL_KEY(r, "router.replicas", "%u routers; one is supported for now", d->router.replicas);
}

static void finish_speculative(reading *r)
{
    const pd_deployment *d = &r->v.d;
    bool model = d->speculative.method == PD_SPEC_DRAFT_MODEL;

    if (state_of(r, "decode.speculative.method") == BAD)
        return;
    if (model && state_of(r, "decode.speculative.draft_model") == UNSET)
        TELL_KEY(r, "decode.speculative.method",
                 "draft_model needs decode.speculative.draft_model: a GGUF file with the model's "
                 "vocabulary");
    if (!model && state_of(r, "decode.speculative.draft_model") == GOOD)
        TELL_KEY(r, "decode.speculative.draft_model",
                 "is for method: draft_model, and the method is %s",
                 pd_spec_method_name(d->speculative.method));
    if (d->speculative.ngram_min > d->speculative.ngram_max)
        TELL_KEY(r, "decode.speculative.ngram_min", "must not be above ngram_max (%u), and is %u",
                 d->speculative.ngram_max, d->speculative.ngram_min);
    if (d->speculative.method == PD_SPEC_LOOKAHEAD &&
        d->speculative.window >= d->speculative.draft_tokens)
        TELL_KEY(r, "decode.speculative.window",
                 "must be below draft_tokens (%u), which it is a part of, and is %u",
                 d->speculative.draft_tokens, d->speculative.window);
}

/* Which formats a GPU's kernels read (kernels/cuda). */
static void check_kv_dtype(reading *r, const char *role, const pd_deployment_pool *pool)
{
    const pd_deployment *d = &r->v.d;

    if (d->kv.dtype == NULL || pool->device == NULL || strcmp(d->kv.dtype, "f16") == 0 ||
        strncmp(pool->device, "cuda", 4) != 0)
        return;
    TELL_KEY(r, "kv.dtype",
             "%s is computed by CPUs alone so far, and %s.device is %s; f16 would do", d->kv.dtype,
             role, pool->device);
}

static void finish_rest(reading *r)
{
    pd_deployment *d = &r->v.d;

    if (state_of(r, "kv.block_tokens") == GOOD && d->kv.block_tokens % 16 != 0)
        TELL_KEY(r, "kv.block_tokens", "must be a multiple of 16, not %u; %u or %u would do",
                 d->kv.block_tokens, d->kv.block_tokens / 16 * 16,
                 (d->kv.block_tokens / 16 + 1) * 16);
    check_kv_dtype(r, "prefill", &d->prefill);
    check_kv_dtype(r, "decode", &d->decode);
    if (state_of(r, "heartbeat.interval") != BAD && state_of(r, "heartbeat.lost_after") != BAD &&
        d->heartbeat.lost_after_ns < 2 * d->heartbeat.interval_ns) {
        const pd_yaml_node *at = r->nodes[key_must("heartbeat.lost_after")];
        char least[32];
        at = at != NULL ? at : r->nodes[key_must("heartbeat.interval")];
        pd_scalar_write_duration(2 * d->heartbeat.interval_ns, least);
        TELL_AT(r->faults, at, "heartbeat.lost_after: must be at least two intervals (%s)", least);
    }
}

/* --- the whole --- */

static void read_tree(reading *r, pd_yaml_node *root, const char *const *sets, size_t sets_count)
{
    r->root = root;
    take_models(r, root);
    for (size_t i = 0; i < sets_count; i++)
        apply_set(r, root, sets[i], (uint32_t)i + 1);
    read_section(r, "", root);
    if (r->faults->no_memory)
        return;
    read_defaults(r);
    count_workers(r);
    finish_model(r);
    finish_router(r);
    finish_speculative(r);
    finish_rest(r);
}

static pd_status parse_into(reading *r, const char *text, size_t len, const char *const *sets,
                            size_t sets_count)
{
    pd_yaml_node *root = NULL;
    pd_status status = pd_yaml_parse(text, len, r->tree, on_yaml_error, r->faults, &root);

    if (status != PD_OK && status != PD_E_INVALID)
        return status;
    if (sets_count > PD_DEPLOYMENT_SETS_MAX)
        tell(r->faults, 0, 0, 0, "%zu --set options; at most %d", sets_count,
             PD_DEPLOYMENT_SETS_MAX);
    if (root != NULL && root->kind != PD_YAML_MAP && root->kind != PD_YAML_NULL)
        TELL_AT(r->faults, root, "the file must be a map of keys, not %s",
                pd_yaml_kind_name(root->kind));
    if (status == PD_OK && r->faults->count == 0 && (root == NULL || root->kind != PD_YAML_MAP)) {
        root = new_map(r, NULL, NULL); /* an empty file: every key has its default */
        if (root != NULL)
            root->line = root->column = 1;
    }
    if (root != NULL && root->kind == PD_YAML_MAP && sets_count <= PD_DEPLOYMENT_SETS_MAX)
        read_tree(r, root, sets, sets_count);
    if (r->faults->no_memory)
        return PD_E_NOMEM;
    return r->faults->count != 0 ? PD_E_INVALID : PD_OK;
}

pd_status pd_deployment_parse(const char *name, const char *text, size_t len,
                              const char *const *sets, size_t sets_count,
                              pd_deployment *deployment_out, pd_buf *errors)
{
    pd_arena *tree = NULL, *strings = NULL;
    reading *r = pd_calloc(1, sizeof *r);
    faults *f = pd_calloc(1, sizeof *f);
    pd_status status = PD_E_NOMEM;

    if (r == NULL || f == NULL || pd_arena_create(TREE_BYTES, &tree) != PD_OK ||
        pd_arena_create(STRING_BYTES, &strings) != PD_OK)
        goto out;
    *f = (faults){.arena = tree};
    r->faults = f;
    r->tree = tree;
    r->strings = strings;
    status = parse_into(r, text, len, sets, sets_count);
    if (status == PD_OK) {
        *deployment_out = r->v.d;
        deployment_out->arena = strings;
        strings = NULL;
    } else {
        write_faults(f, name, errors);
    }
out:
    if (status == PD_E_NOMEM)
        pd_buf_printf(errors, "%s: no memory to read it\n", name);
    pd_arena_destroy(strings);
    pd_arena_destroy(tree);
    pd_free(f);
    pd_free(r);
    return status;
}

pd_status pd_deployment_load(const char *path, const char *const *sets, size_t sets_count,
                             pd_deployment *deployment_out, pd_buf *errors)
{
    pd_status status = PD_E_IO;
    char *text = pd_malloc(PD_YAML_BYTES_MAX + 1);
    FILE *file = NULL;

    if (text == NULL) {
        pd_buf_printf(errors, "%s: no memory to read it\n", path);
        return PD_E_NOMEM;
    }
    file = fopen(path, "rbe");
    if (file == NULL) {
        pd_buf_printf(errors, "%s: cannot be opened: %s\n", path, strerror(errno));
        goto out;
    }
    size_t len = fread(text, 1, PD_YAML_BYTES_MAX + 1, file);
    if (ferror(file)) {
        pd_buf_printf(errors, "%s: cannot be read: %s\n", path, strerror(errno));
        goto out;
    }
    status = pd_deployment_parse(path, text, len, sets, sets_count, deployment_out, errors);
out:
    if (file != NULL)
        fclose(file);
    pd_free(text);
    return status;
}

void pd_deployment_fini(pd_deployment *deployment)
{
    pd_arena_destroy(deployment->arena);
    *deployment = (pd_deployment){0};
}

/* --- for people --- */

/* The name at place index in "a|b|c". */
static void choice_at(const char *choices, int index, char out[32])
{
    while (index-- > 0)
        choices = strchr(choices, '|') + 1;
    size_t len = strcspn(choices, "|");
    pd_assert(len < 32);
    memcpy(out, choices, len);
    out[len] = '\0';
}

static void dump_value(const pd_key *k, const pd_values *v, pd_buf *buf)
{
    const void *at = (const char *)v + k->offset;
    const char *text = NULL;
    char small[32];

    switch (k->type) {
    case PD_KEY_STRING:
    case PD_KEY_LABEL:
    case PD_KEY_ENDPOINT:
    case PD_KEY_CHOICE: text = *(const char *const *)at; break;
    case PD_KEY_LISTEN: text = ((const pd_listen *)at)->text; break;
    case PD_KEY_ENUM: choice_at(k->choices, *(const int *)at, small); break;
    case PD_KEY_AUTO:
    case PD_KEY_INTEGER:
        if (k->type == PD_KEY_AUTO && *(const uint32_t *)at == 0)
            snprintf(small, sizeof small, "auto");
        else
            snprintf(small, sizeof small, "%u", *(const uint32_t *)at);
        break;
    case PD_KEY_BOOL:
        snprintf(small, sizeof small, "%s", *(const bool *)at ? "true" : "false");
        break;
    case PD_KEY_DURATION: pd_scalar_write_duration(*(const uint64_t *)at, small); break;
    case PD_KEY_SIZE: pd_scalar_write_size(*(const uint64_t *)at, small); break;
    case PD_KEY_ALIASES:
        for (uint32_t i = 0; i < v->d.model.aliases_count; i++) {
            pd_buf_puts(buf, i == 0 ? "[" : ", ");
            pd_json_write_string(buf, v->d.model.aliases[i], strlen(v->d.model.aliases[i]));
        }
        pd_buf_puts(buf, v->d.model.aliases_count != 0 ? "]" : "[]");
        return;
    case PD_KEY_RATIO: return; /* not dumped */
    }
    if (text != NULL)
        pd_json_write_string(buf, text, strlen(text));
    else
        pd_buf_puts(buf, small);
}

void pd_deployment_dump(const pd_deployment *deployment, pd_buf *buf)
{
    pd_values v = {.d = *deployment};
    char open[2][64] = {"", ""}; /* the sections that the line before stood in */

    for (size_t i = 0; i < pd_schema_count; i++) {
        const char *at = pd_schema[i].path;
        int depth = 0;
        if (pd_schema[i].type == PD_KEY_RATIO)
            continue; /* the counts of the pools say it */
        if (pd_schema[i].type == PD_KEY_STRING &&
            *(const char *const *)((const char *)&v + pd_schema[i].offset) == NULL)
            continue; /* a file that is not named */
        for (const char *dot; (dot = strchr(at, '.')) != NULL; at = dot + 1, depth++) {
            size_t len = (size_t)(dot - at);
            pd_assert(depth < 2 && len < sizeof open[0]);
            if (strncmp(open[depth], at, len) == 0 && open[depth][len] == '\0')
                continue;
            pd_buf_printf(buf, "%*s%.*s:\n", 2 * depth, "", (int)len, at);
            memcpy(open[depth], at, len);
            open[depth][len] = '\0';
            if (depth == 0)
                open[1][0] = '\0';
        }
        for (int d = depth; d < 2; d++)
            open[d][0] = '\0';
        pd_buf_printf(buf, "%*s%s: ", 2 * depth, "", at);
        dump_value(&pd_schema[i], &v, buf);
        pd_buf_puts(buf, "\n");
    }
}

static void write_type(const pd_key *k, pd_buf *buf)
{
    char min[32], max[32];

    switch (k->type) {
    case PD_KEY_CHOICE:
    case PD_KEY_ENUM: pd_buf_printf(buf, "%s", k->choices); break;
    case PD_KEY_INTEGER:
    case PD_KEY_AUTO:
        pd_buf_printf(buf, "%s%llu to %llu", k->type == PD_KEY_AUTO ? "auto or " : "",
                      (unsigned long long)k->min, (unsigned long long)k->max);
        break;
    case PD_KEY_BOOL: pd_buf_puts(buf, "true|false"); break;
    case PD_KEY_DURATION:
        pd_scalar_write_duration(k->min, min);
        pd_scalar_write_duration(k->max, max);
        pd_buf_printf(buf, "%s to %s", min, max);
        break;
    case PD_KEY_SIZE:
        pd_scalar_write_size(k->min, min);
        pd_scalar_write_size(k->max, max);
        pd_buf_printf(buf, "%s to %s", min, max);
        break;
    case PD_KEY_RATIO: pd_buf_puts(buf, "PREFILL:DECODE"); break;
    case PD_KEY_LISTEN: pd_buf_puts(buf, "HOST:PORT"); break;
    case PD_KEY_ENDPOINT: pd_buf_puts(buf, "tcp://HOST:PORT or ipc://PATH"); break;
    case PD_KEY_ALIASES: pd_buf_puts(buf, "list of texts"); break;
    case PD_KEY_LABEL: pd_buf_puts(buf, "a-z, 0-9, -"); break;
    case PD_KEY_STRING: pd_buf_puts(buf, "text"); break;
    }
}

void pd_deployment_help(pd_buf *buf)
{
    for (size_t i = 0; i < pd_schema_count; i++) {
        pd_buf_printf(buf, "%s\n    %s [", pd_schema[i].path, pd_schema[i].help);
        write_type(&pd_schema[i], buf);
        pd_buf_puts(buf, "]");
        if (pd_schema[i].fallback != NULL)
            pd_buf_printf(buf, ", default %s", pd_schema[i].fallback);
        pd_buf_puts(buf, "\n");
    }
}

const char *pd_router_policy_name(pd_router_policy policy)
{
    static const char *const names[] = {"kv-aware", "least-loaded", "round-robin", "random"};
    return names[policy];
}

uint32_t pd_deployment_processes(const pd_deployment *deployment)
{
    uint32_t processes = deployment->prefill.workers * deployment->prefill.tensor_parallel +
                         deployment->decode.workers * deployment->decode.tensor_parallel;

    return processes > 0 ? processes : 1;
}

uint32_t pd_deployment_threads(const pd_deployment *deployment, const pd_deployment_pool *pool,
                               uint32_t cpus)
{
    const pd_deployment_pool *const pools[] = {&deployment->prefill, &deployment->decode};
    uint64_t given = 0, sharing = 0;

    if (pool->threads != 0)
        return pool->threads;
    for (int i = 0; i < 2; i++) {
        uint64_t processes = (uint64_t)pools[i]->workers * pools[i]->tensor_parallel;
        given += processes * pools[i]->threads;
        sharing += pools[i]->threads == 0 ? processes : 0;
    }
    pd_assert(sharing > 0);
    uint64_t each = cpus > given ? (cpus - given) / sharing : 0;
    return each == 0                          ? 1
           : each > PD_DEPLOYMENT_THREADS_MAX ? PD_DEPLOYMENT_THREADS_MAX
                                              : (uint32_t)each;
}

bool pd_deployment_has_service(const pd_deployment *deployment, const char *name)
{
    static const char *const roles[] = {"prefill-", "decode-"};
    const uint32_t counts[] = {deployment->prefill.workers, deployment->decode.workers};
    uint64_t index;
    pd_scalar_why why;

    for (int i = 0; i < 2; i++) {
        size_t len = strlen(roles[i]);
        if (strncmp(name, roles[i], len) == 0)
            return pd_scalar_integer(name + len, 0, counts[i] - 1, &index, &why) == PD_OK;
    }
    return false;
}
