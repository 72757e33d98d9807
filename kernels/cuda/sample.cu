#include "kernels/cuda/words.h"

#include "kernels/cuda/launch.h"
#include "kernels/sampling.h"

/* Sampling as kernels/sampling.h defines it, for a batch of rows, in three kernels:
 *
 *   sample_best    the largest key of each row (and whether all logits are finite)
 *   sample_weigh   how many candidates lie in each bin, and their weight
 *   sample_pick    a block a row: the bin that a search ends in, its keys gathered in shared
 *                  memory, then eight bits of the key after the other until one candidate is left
 *
 * The first two read all logits once, with as many blocks as the vocabulary needs; the third reads
 * them once more for each of its (at most three) searches. Sums are of integers, so that whichever
 * thread adds first does not matter. Rows that take the largest logit are done after the first. */

#define SPREAD_THREADS 256
#define SPREAD_SPAN    4096 /* logits of one row that a block looks at */
#define READ_AHEAD     4    /* logits that a thread asks for before it looks at the first */
#define PICK_THREADS   KERN_SAMPLE_BINS
#define PICK_KEYS      2048 /* gathered; where a bin holds more, the logits are read again each time */
#define PICK_DIGITS    256

typedef struct sample_row { /* of the scratch; zeros before the first kernel */
    uint64_t best;          /* key */
    uint64_t weights[KERN_SAMPLE_BINS];
    uint32_t counts[KERN_SAMPLE_BINS];
} sample_row;

CU_DEVICE bool takes_the_largest(const cu_sampling *s)
{
    return !(s->temperature > 0) || !(s->top_p > 0) || s->top_k == 1;
}

/* Logits id, id + step, ...; what lies from `to` on is -infinity, which no candidate is. */
CU_DEVICE void read_ahead(const float *row, uint32_t id, uint32_t step, uint32_t to,
                          float logits[READ_AHEAD])
{
#pragma unroll
    for (uint32_t i = 0; i < READ_AHEAD; i++)
        logits[i] = id + i * step < to ? row[id + i * step] : -INFINITY;
}

CU_KERNEL(SPREAD_THREADS, 4)
sample_best(uint32_t vocab, const float *logits, sample_row *rows, uint32_t *broken)
{
    const float *row = logits + (uint64_t)blockIdx.y * vocab;
    uint32_t from = blockIdx.x * SPREAD_SPAN;
    uint32_t to = vocab - from < SPREAD_SPAN ? vocab : from + SPREAD_SPAN;
    uint64_t best = 0;
    bool bad = false;

    for (uint32_t id = from + threadIdx.x; id < to; id += READ_AHEAD * SPREAD_THREADS) {
        float ahead[READ_AHEAD];
        read_ahead(row, id, SPREAD_THREADS, to, ahead);
#pragma unroll
        for (uint32_t i = 0; i < READ_AHEAD; i++) {
            if (id + i * SPREAD_THREADS >= to)
                break;
            uint64_t key = kern_sample_key(ahead[i], id + i * SPREAD_THREADS);
            bad |= (cu_bits(ahead[i]) & 0x7f800000) == 0x7f800000;
            best = key > best ? key : best;
        }
    }
    for (uint32_t by = 16; by > 0; by /= 2) {
        uint64_t other = cu_shuffle_xor(CU_ALL, best, by);
        best = other > best ? other : best;
    }
    if (threadIdx.x % 32 == 0)
        cu_atomic_max(&rows[blockIdx.y].best, best);
    if (bad)
        cu_atomic_exchange(broken, 1u);
}

CU_KERNEL(SPREAD_THREADS, 4)
sample_weigh(uint32_t vocab, const float *logits, const cu_sampling *sampling, sample_row *rows)
{
    CU_SHARED uint64_t weights[KERN_SAMPLE_BINS];
    CU_SHARED uint32_t counts[KERN_SAMPLE_BINS];
    const float *row = logits + (uint64_t)blockIdx.y * vocab;
    sample_row *sums = &rows[blockIdx.y];
    uint32_t from = blockIdx.x * SPREAD_SPAN;
    uint32_t to = vocab - from < SPREAD_SPAN ? vocab : from + SPREAD_SPAN;

    if (takes_the_largest(&sampling[blockIdx.y]))
        return;
    float temperature = sampling[blockIdx.y].temperature;
    float largest = kern_sample_logit((uint32_t)(sums->best >> 32));
    for (uint32_t bin = threadIdx.x; bin < KERN_SAMPLE_BINS; bin += SPREAD_THREADS) {
        weights[bin] = 0;
        counts[bin] = 0;
    }
    cu_sync();
    for (uint32_t id = from + threadIdx.x; id < to; id += READ_AHEAD * SPREAD_THREADS) {
        float ahead[READ_AHEAD];
        read_ahead(row, id, SPREAD_THREADS, to, ahead);
#pragma unroll
        for (uint32_t i = 0; i < READ_AHEAD; i++) {
            float x = kern_sample_x(ahead[i], largest, temperature);
            uint32_t bin = kern_sample_bin(x);
            if (bin >= KERN_SAMPLE_BINS)
                continue;
            cu_atomic_add(&counts[bin], 1u);
            cu_atomic_add(&weights[bin], kern_sample_weight(cu_exp(x)));
        }
    }
    cu_sync();
    for (uint32_t bin = threadIdx.x; bin < KERN_SAMPLE_BINS; bin += SPREAD_THREADS) {
        if (counts[bin] == 0)
            continue;
        cu_atomic_add(&sums->counts[bin], counts[bin]);
        cu_atomic_add(&sums->weights[bin], weights[bin]);
    }
}

/* What a block knows of its row. */
typedef struct pick_row {
    const float *logits;
    uint32_t vocab;
    float largest, temperature;
} pick_row;

/* A search under way: its part of the order (a bin, then digits of keys) and what lies before it.
 * count and weight are the part's own. */
typedef struct pick_part {
    uint32_t index, count;
    uint64_t passed, weight_before, weight;
} pick_part;

typedef struct pick_space { /* shared memory */
    uint64_t keys[PICK_KEYS];
    uint64_t digit_weights[PICK_DIGITS];
    uint32_t digit_counts[PICK_DIGITS];
    uint64_t warp_sums[PICK_THREADS / 32], warp_weights[PICK_THREADS / 32];
    uint64_t from, to; /* keys of the bin: from <= key < to */
    uint64_t found_key, found_weight;
    uint32_t gathered;
    pick_part part;
} pick_space;

/* Thread i has part i of what is searched: the one in which the sum (of candidates, or of weights)
 * passes t is left in s->part. At least one does. */
CU_DEVICE void pass(pick_space *s, bool by_count, uint64_t t, uint32_t count, uint64_t weight)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t own = by_count ? count : weight, sum = own, weights = weight;
    pick_part part = s->part;

    for (uint32_t by = 1; by < 32; by *= 2) {
        uint64_t more = cu_shuffle_up(CU_ALL, sum, by);
        uint64_t more_weight = cu_shuffle_up(CU_ALL, weights, by);
        sum += lane >= by ? more : 0;
        weights += lane >= by ? more_weight : 0;
    }
    if (lane == 31) {
        s->warp_sums[warp] = sum;
        s->warp_weights[warp] = weights;
    }
    cu_sync();
    sum += part.passed;
    weights += part.weight_before;
    for (uint32_t w = 0; w < warp; w++) {
        sum += s->warp_sums[w];
        weights += s->warp_weights[w];
    }
    if (sum - own <= t && sum > t)
        s->part = {threadIdx.x, count, sum - own, weights - weight, weight};
    cu_sync();
}

CU_DEVICE uint64_t weight_of(const pick_row *row, uint64_t key)
{
    float x =
        kern_sample_x(kern_sample_logit((uint32_t)(key >> 32)), row->largest, row->temperature);

    return kern_sample_weight(cu_exp(x));
}

/* The bin's keys, one after the other as `at` grows by the block's threads: from shared memory, or,
 * where they are too many, from the logits. Those that are not the bin's are 0, which is no key. */
CU_DEVICE uint32_t keys_end(const pick_space *s, const pick_row *row)
{
    return s->gathered <= PICK_KEYS ? s->gathered : row->vocab;
}

CU_DEVICE uint64_t key_at(const pick_space *s, const pick_row *row, uint32_t at)
{
    if (s->gathered <= PICK_KEYS)
        return s->keys[at];
    uint64_t key = kern_sample_key(row->logits[at], at);
    return key >= s->from && key < s->to ? key : 0;
}

CU_DEVICE void gather(pick_space *s, const pick_row *row, uint32_t bin)
{
    if (threadIdx.x == 0) {
        s->from = (uint64_t)kern_sample_bin_from(bin, row->largest, row->temperature) << 32;
        s->gathered = 0;
    }
    if (threadIdx.x == 32) { /* another warp, at the same time */
        uint64_t end = kern_sample_ascending(row->largest) + (uint64_t)1;
        if (bin > 0)
            end = kern_sample_bin_from(bin - 1, row->largest, row->temperature);
        s->to = end << 32;
    }
    cu_sync();
    uint64_t from = s->from, to = s->to;
    for (uint32_t id = threadIdx.x; id < row->vocab; id += READ_AHEAD * PICK_THREADS) {
        float ahead[READ_AHEAD];
        read_ahead(row->logits, id, PICK_THREADS, row->vocab, ahead);
#pragma unroll
        for (uint32_t i = 0; i < READ_AHEAD; i++) {
            uint64_t key = kern_sample_key(ahead[i], id + i * PICK_THREADS);
            if (key < from || key >= to)
                continue;
            uint32_t at = cu_atomic_add(&s->gathered, 1u);
            if (at < PICK_KEYS)
                s->keys[at] = key;
        }
    }
    cu_sync();
}

/* Adds the keys that begin as `prefix` does to the sums of their next digit, the byte at shift. */
CU_DEVICE void add_digits(pick_space *s, const pick_row *row, uint64_t prefix, uint32_t shift)
{
    uint32_t end = keys_end(s, row);

    if (threadIdx.x < PICK_DIGITS) {
        s->digit_counts[threadIdx.x] = 0;
        s->digit_weights[threadIdx.x] = 0;
    }
    cu_sync();
    for (uint32_t at = threadIdx.x; at < end; at += PICK_THREADS) {
        uint64_t key = key_at(s, row, at);
        if (key == 0 || (key ^ prefix) >> shift >> 8 != 0)
            continue;
        uint32_t digit = PICK_DIGITS - 1 - (uint32_t)(key >> shift) % PICK_DIGITS;
        cu_atomic_add(&s->digit_counts[digit], 1u);
        cu_atomic_add(&s->digit_weights[digit], weight_of(row, key));
    }
    cu_sync();
}

/* F(t) of kernels/sampling.h, by weight; by_count: the candidate before which there are t others.
 * Thread i brings bin i. Leaves the key and the weight of all up to it in s->found_*. */
CU_DEVICE void find(pick_space *s, const pick_row *row, bool by_count, uint64_t t, uint32_t count,
                    uint64_t weight)
{
    uint64_t prefix = 0;
    uint32_t shift = 64;

    if (threadIdx.x == 0)
        s->part = {0, 0, 0, 0, 0};
    cu_sync();
    pass(s, by_count, t, count, weight);
    gather(s, row, s->part.index);
    while (shift > 0 && s->part.count > 1) {
        shift -= 8;
        if (shift < 32 && (row->vocab - 1) >> shift == 0) { /* no id reaches this byte */
            prefix |= (uint64_t)(PICK_DIGITS - 1) << shift;
            continue;
        }
        add_digits(s, row, prefix, shift);
        bool mine = threadIdx.x < PICK_DIGITS;
        pass(s, by_count, t, mine ? s->digit_counts[threadIdx.x % PICK_DIGITS] : 0,
             mine ? s->digit_weights[threadIdx.x % PICK_DIGITS] : 0);
        prefix |= (uint64_t)(PICK_DIGITS - 1 - s->part.index) << shift;
    }
    /* one is left: it begins as prefix does, down to shift */
    uint32_t end = keys_end(s, row);
    for (uint32_t at = threadIdx.x; at < end; at += PICK_THREADS) {
        uint64_t key = key_at(s, row, at);
        if (key != 0 && (shift == 64 || (key ^ prefix) >> shift == 0)) {
            s->found_key = key;
            s->found_weight = s->part.weight_before + s->part.weight;
        }
    }
    cu_sync();
}

CU_KERNEL(PICK_THREADS, 1)
sample_pick(uint32_t vocab, const float *logits, const cu_sampling *sampling,
            const sample_row *rows, uint32_t *tokens)
{
    CU_SHARED pick_space space[1];
    const sample_row *sums = &rows[blockIdx.x];
    const cu_sampling *of = &sampling[blockIdx.x];
    uint64_t best = sums->best;
    pick_row row = {logits + (uint64_t)blockIdx.x * vocab, vocab,
                    kern_sample_logit((uint32_t)(best >> 32)), of->temperature};

    /* the likeliest candidate has weight, unless it is no number: then any token will do, for the
     * row is broken */
    if (takes_the_largest(of) || sums->weights[0] == 0) {
        if (threadIdx.x == 0)
            tokens[blockIdx.x] = kern_sample_id(best);
        return;
    }
    uint32_t count = sums->counts[threadIdx.x];
    uint64_t weight = sums->weights[threadIdx.x];
    uint64_t candidates = count, total = weight;
    for (uint32_t by = 16; by > 0; by /= 2) {
        candidates += cu_shuffle_xor(CU_ALL, candidates, by);
        total += cu_shuffle_xor(CU_ALL, total, by);
    }
    if (threadIdx.x % 32 == 0) {
        space->warp_sums[threadIdx.x / 32] = candidates;
        space->warp_weights[threadIdx.x / 32] = total;
    }
    cu_sync();
    candidates = total = 0;
    for (uint32_t warp = 0; warp < PICK_THREADS / 32; warp++) {
        candidates += space->warp_sums[warp];
        total += space->warp_weights[warp];
    }
    if (of->top_k > 0 && of->top_k < candidates) {
        find(space, &row, true, of->top_k - 1, count, weight);
        total = space->found_weight; /* the next search begins with a barrier */
    }
    if (of->top_p < 1) {
        find(space, &row, false, kern_sample_top_p_target(total, of->top_p), count, weight);
        total = space->found_weight;
    }
    uint64_t random = kern_sample_bits(of->seed, of->choice, of->position);
    find(space, &row, false, kern_mul_high(random, total), count, weight);
    if (threadIdx.x == 0)
        tokens[blockIdx.x] = kern_sample_id(space->found_key);
}

uint64_t cu_sample_scratch_bytes(uint32_t count, uint32_t vocab)
{
    (void)vocab;
    return count * (uint64_t)sizeof(sample_row);
}

pd_status cu_sample(gpu_stream *stream, uint32_t count, uint32_t vocab, const float *logits,
                    const cu_sampling *sampling, uint32_t *token, uint32_t *broken, void *scratch)
{
    sample_row *rows = (sample_row *)scratch;
    dim3 spread((vocab + SPREAD_SPAN - 1) / SPREAD_SPAN, count), threads(SPREAD_THREADS);

    pd_assert(vocab > 0 && vocab <= KERN_SAMPLE_VOCAB_MAX);
    if (count == 0)
        return PD_OK;
    pd_status status = gpu_fill(stream, scratch, 0, cu_sample_scratch_bytes(count, vocab));
    if (status == PD_OK)
        status = CU_LAUNCH(sample_best, spread, threads, 0, stream, vocab, logits, rows, broken);
    if (status == PD_OK)
        status = CU_LAUNCH(sample_weigh, spread, threads, 0, stream, vocab, logits, sampling, rows);
    if (status == PD_OK)
        status = CU_LAUNCH(sample_pick, dim3(count), dim3(PICK_THREADS), 0, stream, vocab, logits,
                           sampling, rows, token);
    return status;
}
