#include "kernels/model/sample.h"

#include "common/base/hash.h"
#include "kernels/number.h"

/* A candidate in one word, so that comparing words compares logits and, between equal ones, puts
 * the lower id first: the logit's bits made ascending, then the id's complement. */
static uint64_t key_of(float logit, uint32_t id)
{
    uint32_t bits = kern_bits_of(logit == 0 ? 0 : logit); /* -0 is 0 */
    uint32_t ascending = (bits & 0x80000000) != 0 ? ~bits : bits | 0x80000000;

    return (uint64_t)ascending << 32 | (uint32_t)~id;
}

static float logit_of(uint64_t key)
{
    uint32_t ascending = (uint32_t)(key >> 32);

    return kern_float_of((ascending & 0x80000000) != 0 ? ascending & 0x7fffffff : ~ascending);
}

static uint32_t id_of(uint64_t key)
{
    return ~(uint32_t)key;
}

static uint32_t largest(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;

    for (uint32_t id = 1; id < vocab; id++)
        if (logits[id] > logits[best])
            best = id;
    return best;
}

static void sift_down(uint64_t *heap, uint32_t count, uint32_t at)
{
    uint64_t moved = heap[at];

    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] > heap[child];
        if (heap[child] <= moved)
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Takes the largest of heap[count] and leaves it at heap[count - 1], outside the shrunk heap. */
static uint64_t pop(uint64_t *heap, uint32_t count)
{
    uint64_t top = heap[0];

    heap[0] = heap[count - 1];
    sift_down(heap, count - 1, 0);
    heap[count - 1] = top;
    return top;
}

/* Uniform in [0, 1), from (seed, choice, position) alone. */
static double draw(const kern_sampling *sampling, uint32_t position)
{
    uint64_t word = pd_mix64(sampling->seed + 0x632be59bd9b4e019);
    word = pd_mix64(word ^ ((uint64_t)sampling->choice << 32 | position));
    return (double)(pd_mix64(word + 0x9e3779b97f4a7c15) >> 11) * 0x1p-53;
}

static double weight_of(const kern_sampling *sampling, float logit, float top)
{
    float x = (logit - top) / sampling->temperature;
    return x < KERN_EXP_MIN ? 0 : (double)kern_exp(x);
}

uint32_t kern_sample(const kern_sampling *sampling, const float *logits, uint32_t vocab,
                     uint32_t position, uint64_t *scratch)
{
    uint32_t best = largest(logits, vocab);
    uint32_t kept_max = sampling->top_k == 0 || sampling->top_k > vocab ? vocab : sampling->top_k;
    double total = 0, sum = 0;

    if (!(sampling->temperature > 0) || kept_max == 1)
        return best;
    for (uint32_t id = 0; id < vocab; id++)
        scratch[id] = key_of(logits[id], id);
    for (uint32_t at = vocab / 2; at-- > 0;)
        sift_down(scratch, vocab, at);
    /* Popped keys gather at the end of scratch, largest last. With top_k off all of them count
     * towards the total, whether or not they will be looked at. */
    uint32_t popped = 0;
    if (kept_max < vocab) {
        for (; popped < kept_max; popped++)
            total += weight_of(sampling, logit_of(pop(scratch, vocab - popped)), logits[best]);
    } else {
        for (uint32_t id = 0; id < vocab; id++)
            total += weight_of(sampling, logits[id], logits[best]);
    }
    float top_p = sampling->top_p > 0 && sampling->top_p < 1 ? sampling->top_p : 1;
    if (sampling->top_p <= 0)
        return best;
    /* How much of the total is kept: whole candidates, until they reach top_p of it. */
    double goal = top_p < 1 ? 0 : total;
    uint32_t looked = 0;
    for (; top_p < 1 && looked < kept_max && goal < total * (double)top_p; looked++) {
        uint64_t key = looked < popped ? scratch[vocab - 1 - looked] : pop(scratch, vocab - looked);
        goal += weight_of(sampling, logit_of(key), logits[best]);
    }
    popped = looked > popped ? looked : popped;
    double target = draw(sampling, position) * goal;
    uint32_t chosen = best;
    for (uint32_t at = 0; at < kept_max; at++) {
        uint64_t key = at < popped ? scratch[vocab - 1 - at] : pop(scratch, vocab - at);
        double weight = weight_of(sampling, logit_of(key), logits[best]);
        if (weight == 0)
            break;
        chosen = id_of(key);
        sum += weight;
        if (sum > target)
            break;
    }
    return chosen;
}
