#include "common/worker/faults.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/wire/notice.h"

#include <stdlib.h>
#include <string.h>

enum { EVERY_MAX = 1000000 };

typedef enum fault_kind {
    FLIP,
    FOREIGN,
    EPOCH,
    HOLE,
    COUNT,
    LOST,
    STEP,
    KINDS,
} fault_kind;

static const char *const kind_names[KINDS] = {"flip",  "foreign", "epoch", "hole",
                                              "count", "lost",    "step"};

struct pd_faults {
    const pd_kv_layout *layout;
    unsigned char *pool;
    uint32_t every[KINDS]; /* 0: never */
    uint64_t chances[KINDS], done[KINDS];
    uint64_t seals[PD_NOTICE_SEALS_MAX];
};

/* One "kind:n". */
static bool read_one(pd_faults *faults, const char *text, size_t len)
{
    const char *colon = memchr(text, ':', len);
    uint64_t every = 0;

    if (colon == NULL || colon + 1 == text + len)
        return false;
    for (const char *at = colon + 1; at < text + len; at++) {
        if (*at < '0' || *at > '9' || every > EVERY_MAX)
            return false;
        every = 10 * every + (uint64_t)(*at - '0');
    }
    if (every == 0 || every > EVERY_MAX)
        return false;
    for (size_t kind = 0; kind < KINDS; kind++) {
        if (strlen(kind_names[kind]) == (size_t)(colon - text) &&
            memcmp(kind_names[kind], text, (size_t)(colon - text)) == 0) {
            faults->every[kind] = (uint32_t)every;
            return true;
        }
    }
    return false;
}

static bool read_list(pd_faults *faults, const char *spec)
{
    for (const char *at = spec;; at++) {
        size_t len = strcspn(at, ",");
        if (!read_one(faults, at, len))
            return false;
        at += len;
        if (*at == '\0')
            return true;
    }
}

pd_status pd_faults_create(const char *spec, const pd_kv_layout *layout, void *pool,
                           pd_faults **faults_out)
{
    pd_faults *faults = pd_calloc(1, sizeof *faults);

    if (faults == NULL)
        return PD_E_NOMEM;
    faults->layout = layout;
    faults->pool = pool;
    if (!read_list(faults, spec)) {
        pd_log_error("msg=\"KVFERRY_FAULTS is no list of KIND:N\" given=\"%.80s\"", spec);
        pd_free(faults);
        return PD_E_INVALID;
    }
    pd_log_warn("msg=\"this worker damages what lands, on purpose\" KVFERRY_FAULTS=%.80s", spec);
    *faults_out = faults;
    return PD_OK;
}

void pd_faults_destroy(pd_faults *faults)
{
    pd_free(faults);
}

static bool is_turn(pd_faults *faults, fault_kind kind)
{
    if (faults->every[kind] == 0 || ++faults->chances[kind] % faults->every[kind] != 0)
        return false;
    faults->done[kind]++;
    return true;
}

static unsigned char *block_at(const pd_faults *faults, uint32_t group, pd_block block)
{
    return faults->pool + pd_kv_layout_block_offset(faults->layout, group, block);
}

static bool is_in(const pd_check *check, pd_block block)
{
    for (uint32_t i = 0; i < check->count; i++) {
        if (check->blocks[i] == block)
            return true;
    }
    return false;
}

/* The first token's K of the first head: valid in every block. */
static unsigned char *first_row(const pd_faults *faults, uint32_t group, pd_block block)
{
    uint32_t layer = group * faults->layout->group_layers;

    return faults->pool + pd_kv_layout_k_offset(faults->layout, layer, block, 0);
}

/* A block that is not among those that landed and holds something else; false: there is none. */
static bool find_other(const pd_faults *faults, const pd_check *check, uint32_t group,
                       pd_block block, pd_block *other_out)
{
    const unsigned char *row = first_row(faults, group, block);

    for (uint32_t i = 1; i < faults->layout->blocks; i++) {
        pd_block other = (block + i) % faults->layout->blocks;
        if (!is_in(check, other) &&
            memcmp(first_row(faults, group, other), row, faults->layout->token_bytes) != 0) {
            *other_out = other;
            return true;
        }
    }
    return false;
}

void pd_faults_on_check(pd_faults *faults, pd_check *check)
{
    if (faults == NULL)
        return;
    uint64_t turn = 0;
    for (size_t kind = 0; kind < KINDS; kind++)
        turn += faults->done[kind];
    uint32_t group = check->group_first + (uint32_t)(turn % check->groups);
    pd_block block = check->blocks[turn % check->count], other;
    const char *what = NULL;

    if (is_turn(faults, FLIP)) {
        unsigned char *row = first_row(faults, group, block);
        row[turn % faults->layout->token_bytes] ^= (unsigned char)(1u << turn % 8);
        what = kind_names[FLIP];
    } else if (is_turn(faults, FOREIGN)) {
        if (!find_other(faults, check, group, block, &other))
            return;
        memcpy(block_at(faults, group, block), block_at(faults, group, other),
               pd_kv_layout_block_bytes(faults->layout, group));
        what = kind_names[FOREIGN];
    } else if (is_turn(faults, EPOCH)) {
        check->key.epoch--;
        what = kind_names[EPOCH];
    } else if (is_turn(faults, HOLE)) {
        memset(block_at(faults, group, block), 0, pd_kv_layout_block_bytes(faults->layout, group));
        what = kind_names[HOLE];
    } else if (is_turn(faults, COUNT)) {
        check->valid_tokens += check->valid_tokens < faults->layout->block_tokens ? 1 : -1u;
        what = kind_names[COUNT];
    }
    if (what != NULL)
        pd_log_warn("msg=\"damaged on purpose\" kind=%s number=%llu epoch=%u group=%u block=%u",
                    what, (unsigned long long)check->key.number, check->key.epoch, group, block);
}

bool pd_faults_on_notice(pd_faults *faults, const unsigned char *bytes, size_t len)
{
    pd_notice notice;

    if (faults == NULL || pd_notice_unpack(bytes, len, faults->seals, &notice) != PD_OK ||
        notice.kind != PD_NOTICE_BLOCKS || !is_turn(faults, LOST))
        return false;
    pd_log_warn("msg=\"damaged on purpose\" kind=lost number=%llu epoch=%u group=%u",
                (unsigned long long)notice.key.number, notice.key.epoch, notice.group);
    return true;
}

void pd_faults_on_step(pd_faults *faults, pd_step *step)
{
    bool later = false;

    if (faults == NULL)
        return;
    for (uint32_t i = 0; i < step->slices_count; i++)
        later |= step->slices[i].count > 1 && step->slices[i].position > 0;
    if (!later || step->status != PD_OK || !is_turn(faults, STEP))
        return;
    pd_log_warn("msg=\"damaged on purpose\" kind=step step=%llu", (unsigned long long)step->number);
    step->status = PD_E_INTERNAL;
}
