#include "common/text/bpe.h"
#include "common/base/hash.h"
#include "common/base/mem.h"

#define NONE UINT32_MAX

typedef struct pd_bpe_symbol {
    uint32_t id; /* NONE: merged into its left neighbour */
    uint32_t previous, next;
} symbol;

/* A merge that was possible when it was noted: left and right tell whether it still is. */
typedef struct pd_bpe_candidate {
    uint32_t rank, at;
    uint32_t left, right; /* ids then */
} candidate;

pd_status pd_bpe_init(pd_bpe *bpe, uint32_t merges_max)
{
    size_t size = 16;

    pd_assert(merges_max <= UINT32_MAX / 8);
    while (size < (size_t)merges_max * 2)
        size *= 2;
    bpe->slots = pd_malloc(size * sizeof bpe->slots[0]);
    if (bpe->slots == NULL)
        return PD_E_NOMEM;
    for (size_t i = 0; i < size; i++)
        bpe->slots[i].pair = PD_BPE_NO_PAIR;
    bpe->mask = (uint32_t)(size - 1);
    return PD_OK;
}

void pd_bpe_fini(pd_bpe *bpe)
{
    pd_free(bpe->slots);
    bpe->slots = NULL;
}

/* The slot that holds the pair, or the empty one where it would stand. */
static pd_bpe_merge *slot_of(const pd_bpe *bpe, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    uint32_t at = (uint32_t)pd_mix64(pair) & bpe->mask;

    while (bpe->slots[at].pair != PD_BPE_NO_PAIR && bpe->slots[at].pair != pair)
        at = (at + 1) & bpe->mask;
    return &bpe->slots[at];
}

bool pd_bpe_add(pd_bpe *bpe, uint32_t left, uint32_t right, uint32_t rank, uint32_t result)
{
    pd_bpe_merge *slot = slot_of(bpe, left, right);

    if (slot->pair != PD_BPE_NO_PAIR)
        return false;
    *slot = (pd_bpe_merge){(uint64_t)left << 32 | right, rank, result};
    return true;
}

void pd_bpe_scratch_fini(pd_bpe_scratch *scratch)
{
    pd_free(scratch->symbols);
    pd_free(scratch->heap);
    *scratch = (pd_bpe_scratch){0};
}

static pd_status reserve(pd_bpe_scratch *scratch, size_t count)
{
    size_t size = scratch->size != 0 ? scratch->size : 64;

    if (count <= scratch->size)
        return PD_OK;
    while (size < count)
        size *= 2;
    pd_bpe_scratch_fini(scratch);
    scratch->symbols = pd_malloc(size * sizeof(symbol));
    /* count - 1 pairs to begin with, and each of count - 1 merges makes at most two more */
    scratch->heap = pd_malloc(3 * size * sizeof(candidate));
    if (scratch->symbols == NULL || scratch->heap == NULL) {
        pd_bpe_scratch_fini(scratch);
        return PD_E_NOMEM;
    }
    scratch->size = size;
    return PD_OK;
}

static bool before(const candidate *a, const candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void heap_push(candidate *heap, size_t *count, candidate item)
{
    size_t at = (*count)++;

    while (at > 0 && before(&item, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = item;
}

static candidate heap_pop(candidate *heap, size_t *count)
{
    candidate top = heap[0], last = heap[--*count];
    size_t at = 0;

    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= *count)
            break;
        if (child + 1 < *count && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &last))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

/* Notes the merge of the symbol at and its right neighbour, if there is one. */
static void consider(const pd_bpe *bpe, const symbol *symbols, uint32_t at, candidate *heap,
                     size_t *heap_count)
{
    uint32_t next = symbols[at].next;

    if (next == NONE)
        return;
    const pd_bpe_merge *merge = slot_of(bpe, symbols[at].id, symbols[next].id);
    if (merge->pair != PD_BPE_NO_PAIR)
        heap_push(heap, heap_count, (candidate){merge->rank, at, symbols[at].id, symbols[next].id});
}

pd_status pd_bpe_merge_ids(const pd_bpe *bpe, pd_bpe_scratch *scratch, uint32_t *ids, size_t count,
                           size_t *count_out)
{
    size_t heap_count = 0, out = 0;

    pd_assert(count < NONE / 4);
    pd_status status = reserve(scratch, count);
    if (status != PD_OK)
        return status;
    symbol *symbols = scratch->symbols;
    candidate *heap = scratch->heap;
    for (uint32_t i = 0; i < count; i++)
        symbols[i] = (symbol){ids[i], i == 0 ? NONE : i - 1, i + 1 == count ? NONE : i + 1};
    for (uint32_t i = 0; i < count; i++)
        consider(bpe, symbols, i, heap, &heap_count);
    while (heap_count != 0) {
        candidate best = heap_pop(heap, &heap_count);
        symbol *left = &symbols[best.at];
        if (left->id != best.left || left->next == NONE || symbols[left->next].id != best.right)
            continue; /* one of the two was merged away since */
        symbol *right = &symbols[left->next];
        left->id = slot_of(bpe, best.left, best.right)->result;
        right->id = NONE;
        left->next = right->next;
        if (left->next != NONE)
            symbols[left->next].previous = best.at;
        consider(bpe, symbols, best.at, heap, &heap_count);
        if (left->previous != NONE)
            consider(bpe, symbols, left->previous, heap, &heap_count);
        pd_assert(heap_count <= 3 * scratch->size);
    }
    for (uint32_t i = 0; i != NONE && count != 0; i = symbols[i].next)
        ids[out++] = symbols[i].id;
    *count_out = out;
    return PD_OK;
}
