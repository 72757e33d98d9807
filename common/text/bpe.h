#pragma once

/* common/text/bpe.h - byte-pair merging: a run of symbols becomes as few tokens as the merges
 * allow, always by the merge of lowest rank, the leftmost first.
 *
 * The table is immutable once filled: any thread may merge, each with its own scratch. */

#include "common/base/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct pd_bpe_merge {
    uint64_t pair; /* left id << 32 | right id; PD_BPE_NO_PAIR: empty slot */
    uint32_t rank;
    uint32_t result;
} pd_bpe_merge;
#define PD_BPE_NO_PAIR UINT64_MAX

typedef struct pd_bpe {
    pd_bpe_merge *slots; /* [mask + 1], open addressing, at most half full */
    uint32_t mask;
} pd_bpe;

/* merges_max bounds what is added. */
PD_CHECKED pd_status pd_bpe_init(pd_bpe *bpe, uint32_t merges_max);
void pd_bpe_fini(pd_bpe *bpe);
/* False when the pair is there already: the first stands. */
bool pd_bpe_add(pd_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t result);

typedef struct pd_bpe_scratch {
    struct pd_bpe_symbol *symbols; /* [size] */
    struct pd_bpe_candidate *heap; /* [3 * size] */
    size_t size;
} pd_bpe_scratch; /* zero-initialised; pd_bpe_scratch_fini */
void pd_bpe_scratch_fini(pd_bpe_scratch *scratch);

/* Merges ids[0 .. count) in place; *count_out how many are left. PD_E_NOMEM leaves ids as they
 * were. */
PD_CHECKED pd_status pd_bpe_merge_ids(const pd_bpe *bpe, pd_bpe_scratch *scratch, uint32_t *ids,
                                      size_t count, size_t *count_out);
