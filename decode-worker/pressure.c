#include "decode-worker/pressure.h"

/* From the word to the router until the blocks are back: its decision, a lease elsewhere, and the
 * blocks on the wire. */
static const double horizon_ms = 750;

bool decode_ranks_before(const decode_load *a, const decode_load *b)
{
    return a->priority != b->priority ? a->priority > b->priority : a->order < b->order;
}

static bool ends_later(const decode_load *a, const decode_load *b)
{
    return a->predicted > b->predicted;
}

typedef bool before_fn(const decode_load *a, const decode_load *b);

static void sink_down(decode_load *loads, uint32_t at, uint32_t count, before_fn *before)
{
    for (;;) {
        uint32_t last = at, left = 2 * at + 1;
        for (uint32_t child = left; child < count && child < left + 2; child++) {
            if (before(&loads[last], &loads[child]))
                last = child;
        }
        if (last == at)
            return;
        decode_load held = loads[at];
        loads[at] = loads[last];
        loads[last] = held;
        at = last;
    }
}

/* A heap sort: no memory, and no worst case that a load of requests could be made for. */
static void sort(decode_load *loads, uint32_t count, before_fn *before)
{
    for (uint32_t i = count / 2; i-- > 0;)
        sink_down(loads, i, count, before);
    for (uint32_t end = count; end-- > 1;) {
        decode_load held = loads[0];
        loads[0] = loads[end];
        loads[end] = held;
        sink_down(loads, 0, end, before);
    }
}

void decode_pressure_rank(decode_load *loads, uint32_t count)
{
    sort(loads, count, decode_ranks_before);
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t decode_pressure_need(const decode_load *load, uint32_t steps, uint32_t block_tokens)
{
    uint64_t blocks =
        ((uint64_t)load->tokens + least(steps, load->possible) + block_tokens - 1) / block_tokens;

    return blocks <= load->blocks ? 0 : (uint32_t)(blocks - load->blocks);
}

static uint32_t growth(const decode_load *load, uint32_t steps, uint32_t block_tokens)
{
    uint64_t blocks = ((uint64_t)load->tokens + steps + block_tokens - 1) / block_tokens;

    return load->standing || blocks <= load->blocks ? 0 : (uint32_t)(blocks - load->blocks);
}

/* Of loads sorted by ends_later: at most what is claimed while loads[from .. to - 1] end, which is
 * when those before them have grown as long as the latest of them and those behind are gone. */
static uint64_t claimed_at(const decode_load *loads, uint32_t count, uint32_t from, uint32_t to,
                           uint64_t claimed, uint32_t block_tokens)
{
    uint64_t sum = claimed, back = 0;

    for (uint32_t k = 0; k < count; k++) {
        if (k < to || loads[k].predicted == loads[to - 1].predicted)
            sum +=
                growth(&loads[k], least(loads[k].predicted, loads[from].predicted), block_tokens);
        else if (!loads[k].standing)
            back += loads[k].own;
    }
    return sum > back ? sum - back : 0;
}

uint64_t decode_pressure_peak(decode_load *loads, uint32_t count, uint32_t claimed,
                              uint32_t block_tokens)
{
    enum { SPANS = 32 }; /* a thousand loads are not compared with a thousand */
    uint64_t peak = claimed;
    uint32_t span = (count + SPANS - 1) / SPANS;

    sort(loads, count, ends_later);
    for (uint32_t from = 0; from < count; from += span) {
        uint32_t to = least(from + span, count);
        uint64_t then = claimed_at(loads, count, from, to, claimed, block_tokens);
        peak = then > peak ? then : peak;
    }
    return peak;
}

uint32_t decode_pressure_wait(decode_load *loads, uint32_t count, uint32_t claimed, uint32_t limit,
                              uint32_t block_tokens)
{
    pd_assert(count > 0);
    decode_load newcomer = loads[count - 1];
    uint64_t with = decode_pressure_peak(loads, count, claimed, block_tokens);
    uint64_t gone = 0;

    if (with <= limit)
        return 0;
    /* Soonest ends first; each takes what it has and would have grown to with it. */
    for (uint32_t i = count; i-- > 0;) {
        if (loads[i].order == newcomer.order || loads[i].standing)
            continue;
        gone += loads[i].own + growth(&loads[i], loads[i].predicted, block_tokens);
        if (gone >= with - limit)
            return loads[i].predicted > 0 ? loads[i].predicted : 1;
    }
    return 0;
}

uint32_t decode_pressure_horizon(double step_ms, uint32_t block_tokens)
{
    double tokens = step_ms > 0 ? horizon_ms / step_ms : 0;
    uint32_t most = 4 * block_tokens;

    if (tokens <= block_tokens)
        return block_tokens;
    return tokens >= most ? most : (uint32_t)tokens;
}

uint32_t decode_pressure_relieve(decode_load *loads, uint32_t count, uint32_t room, uint32_t steps,
                                 uint32_t block_tokens)
{
    uint64_t need = 0, there = room;
    uint32_t running = 0;

    for (uint32_t i = 0; i < count; i++) {
        loads[i].gives_way = false;
        if (loads[i].standing) {
            there += loads[i].own;
            continue;
        }
        need += decode_pressure_need(&loads[i], steps, block_tokens);
        running++;
    }
    for (uint32_t i = count; i-- > 0 && running > 1 && need > there;) {
        if (loads[i].standing)
            continue;
        loads[i].gives_way = true;
        need -= decode_pressure_need(&loads[i], steps, block_tokens);
        there += loads[i].own;
        running--;
    }
    return need > UINT32_MAX ? UINT32_MAX : (uint32_t)need;
}

bool decode_pressure_may_go_on(const decode_load *loads, uint32_t count, const decode_load *load,
                               uint32_t room, uint32_t steps, uint32_t block_tokens)
{
    uint64_t need = decode_pressure_need(load, 2 * steps, block_tokens);

    for (uint32_t i = 0; i < count; i++) {
        if (!loads[i].standing)
            need += decode_pressure_need(&loads[i], 2 * steps, block_tokens);
    }
    return need <= room;
}
