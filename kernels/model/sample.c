#include "kernels/model/sample.h"

#include "kernels/number.h"
#include "kernels/sampling.h"

/* The candidates that have weight, and what lies in each bin of theirs. */
typedef struct survey {
    float largest, temperature;
    uint64_t *keys; /* [count], in no order */
    uint32_t count;
    uint32_t counts[KERN_SAMPLE_BINS];
    uint64_t weights[KERN_SAMPLE_BINS];
} survey;

/* Where a search ended: a candidate, and the weight of all up to it, its own included. */
typedef struct found {
    uint64_t key, weight;
} found;

/* The first of the largest. Lanes, so that the compiler uses vectors: no logit is NaN here. */
static uint32_t largest(const float *logits, uint32_t vocab)
{
    float lanes[16], most = logits[0];
    uint32_t id = 0;

    for (int lane = 0; lane < 16; lane++)
        lanes[lane] = most;
    for (; id + 16 <= vocab; id += 16)
        for (uint32_t lane = 0; lane < 16; lane++)
            lanes[lane] = logits[id + lane] > lanes[lane] ? logits[id + lane] : lanes[lane];
    for (; id < vocab; id++)
        most = logits[id] > most ? logits[id] : most;
    for (int lane = 0; lane < 16; lane++)
        most = lanes[lane] > most ? lanes[lane] : most;
    for (id = 0; logits[id] != most;)
        id++;
    return id;
}

static void count(survey *s, const float *logits, uint32_t vocab)
{
    memset(s->counts, 0, sizeof s->counts);
    for (uint32_t id = 0; id < vocab; id++) {
        uint32_t bin = kern_sample_bin(kern_sample_x(logits[id], s->largest, s->temperature));
        if (bin >= KERN_SAMPLE_BINS)
            continue;
        s->keys[s->count++] = kern_sample_key(logits[id], id);
        s->counts[bin]++;
    }
}

/* Drops what lies in later bins than the k-th candidate: it needs no weights. */
static void drop_all_after(survey *s, uint32_t k)
{
    uint32_t bin = 0, kept = 0;

    for (uint32_t passed = 0; (passed += s->counts[bin]) < k;)
        bin++;
    uint64_t from = (uint64_t)kern_sample_bin_from(bin, s->largest, s->temperature) << 32;
    for (uint32_t at = 0; at < s->count; at++) {
        uint64_t key = s->keys[at];
        s->keys[kept] = key;
        kept += key >= from;
    }
    s->count = kept;
}

static uint64_t weigh(survey *s)
{
    uint64_t total = 0;

    memset(s->weights, 0, sizeof s->weights);
    for (uint32_t at = 0; at < s->count; at++) {
        float logit = kern_sample_logit((uint32_t)(s->keys[at] >> 32));
        float x = kern_sample_x(logit, s->largest, s->temperature);
        uint64_t weight = kern_sample_weight(kern_exp(x));
        s->weights[kern_sample_bin(x)] += weight;
        total += weight;
    }
    return total;
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

/* Brings the keys of a bin to the front of s->keys, as a heap. */
static uint32_t heap_of_bin(survey *s, uint32_t bin)
{
    uint64_t *keys = s->keys;
    uint64_t from = (uint64_t)kern_sample_bin_from(bin, s->largest, s->temperature) << 32;
    uint64_t to = bin == 0
                      ? UINT64_MAX
                      : (uint64_t)kern_sample_bin_from(bin - 1, s->largest, s->temperature) << 32;
    uint32_t in = 0;

    for (uint32_t at = 0; at < s->count; at++) {
        uint64_t key = keys[at];
        if (key < from || key >= to)
            continue;
        keys[at] = keys[in];
        keys[in++] = key;
    }
    pd_assert(in == s->counts[bin]);
    for (uint32_t at = in / 2; at-- > 0;)
        sift_down(keys, in, at);
    return in;
}

/* The first candidate up to which there are more than t: of candidates, or of their weight. There
 * must be more than t in all. */
static found find(survey *s, bool by_count, uint64_t t)
{
    found f = {0};
    uint64_t passed = 0;
    uint32_t bin = 0;

    for (;; bin++) {
        pd_assert(bin < KERN_SAMPLE_BINS);
        uint64_t more = by_count ? s->counts[bin] : s->weights[bin];
        if (passed + more > t)
            break;
        passed += more;
        f.weight += s->weights[bin];
    }
    for (uint32_t left = heap_of_bin(s, bin); passed <= t; left--) {
        pd_assert(left > 0);
        f.key = s->keys[0];
        float logit = kern_sample_logit((uint32_t)(f.key >> 32));
        uint64_t weight =
            kern_sample_weight(kern_exp(kern_sample_x(logit, s->largest, s->temperature)));
        f.weight += weight;
        passed += by_count ? 1 : weight;
        s->keys[0] = s->keys[left - 1];
        s->keys[left - 1] = f.key; /* stays among the keys, for the next search */
        sift_down(s->keys, left - 1, 0);
    }
    return f;
}

uint32_t kern_sample(const kern_sampling *sampling, const float *logits, uint32_t vocab,
                     uint32_t position, uint64_t *scratch)
{
    uint32_t best = largest(logits, vocab);

    if (!(sampling->temperature > 0) || !(sampling->top_p > 0) || sampling->top_k == 1)
        return best;
    pd_assert(vocab <= KERN_SAMPLE_VOCAB_MAX);
    survey s = {.largest = logits[best], .temperature = sampling->temperature, .keys = scratch};
    count(&s, logits, vocab);
    bool some = sampling->top_k > 0 && sampling->top_k < s.count;
    if (some)
        drop_all_after(&s, sampling->top_k);
    uint64_t total = weigh(&s);
    if (some)
        total = find(&s, true, sampling->top_k - 1).weight;
    if (sampling->top_p < 1)
        total = find(&s, false, kern_sample_top_p_target(total, sampling->top_p)).weight;
    uint64_t random = kern_sample_bits(sampling->seed, sampling->choice, position);
    return kern_sample_id(find(&s, false, kern_mul_high(random, total)).key);
}
