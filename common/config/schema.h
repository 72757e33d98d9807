#pragma once

/* common/config/schema.h - every key of the deployment YAML, once: path, type, range, default,
 * meaning; and what can be asked about keys. For deployment.c alone. Constant; any thread. */

#include "common/config/deployment.h"

#include <stddef.h>

typedef enum pd_key_type {
    PD_KEY_STRING,   /* const char *; max bytes */
    PD_KEY_LABEL,    /* const char * */
    PD_KEY_ENDPOINT, /* const char * */
    PD_KEY_CHOICE,   /* const char *, one of choices */
    PD_KEY_ENUM,     /* int, the place in choices */
    PD_KEY_INTEGER,  /* uint32_t */
    PD_KEY_AUTO,     /* uint32_t; auto is 0 */
    PD_KEY_BOOL,     /* bool */
    PD_KEY_DURATION, /* uint64_t, ns */
    PD_KEY_SIZE,     /* uint64_t, bytes */
    PD_KEY_RATIO,    /* two uint32_t */
    PD_KEY_LISTEN,   /* pd_listen */
    PD_KEY_ALIASES,  /* model.aliases and its count */
} pd_key_type;

/* What is read into: the deployment, and what is only needed to compute it. */
typedef struct pd_values {
    pd_deployment d;
    uint32_t ratio[2];
} pd_values;

typedef struct pd_key {
    const char *path;
    pd_key_type type;
    size_t offset; /* into pd_values */
    uint64_t min, max;
    const char *fallback; /* the default, as text; NULL: none, or derived from others */
    const char *choices;
    const char *help;
} pd_key;

#define PD_KEYS_MAX       96
#define PD_KEY_PATH_MAX   160
#define PD_KEY_NAME_MAX   64
#define PD_MODEL_PATH_MAX 1024
#define PD_STRING_MAX     255

extern const pd_key pd_schema[];
extern const size_t pd_schema_count; /* at most PD_KEYS_MAX */

/* The key with this path; -1: none. */
int pd_schema_find(const char *path);
/* True when keys lie below path ("router"). */
bool pd_schema_is_section(const char *path);
/* What another system's name at this path is called here; NULL: not known. */
const char *pd_schema_other_name(const char *path);
/* The name that is spelled most like this one, below prefix ("" or "router."). */
bool pd_schema_nearest(const char *prefix, const char *name, char out[PD_KEY_NAME_MAX]);
/* Appends, once each, the paths that end with this name ("'router.listen', ..."). */
void pd_schema_elsewhere(const char *name, pd_buf *out);
/* Appends the names below prefix ("name, path"). */
void pd_schema_list(const char *prefix, pd_buf *out);
