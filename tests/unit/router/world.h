#pragma once

/* tests/unit/router/world.h - requests to a router core with fake workers, and what became of them.
 * Every token is checked as it comes: right, once, in order, nothing after the last. */

#include "tests/unit/router/fake.h"

enum { WORLD_REQUESTS_MAX = 2000 };

typedef struct answer {
    router_handle handle;
    uint32_t first, max, next;
    bool end_first;
    uint32_t cancel_at; /* cancel when this token comes; UINT32_MAX: never */
    int ends;           /* how often it ended */
    bool cancelled;
    int status; /* of its error */
    uint32_t retry_after;
    char code[40], message[ROUTER_MESSAGE_BYTES];
    router_finish finish;
    pd_finish last;
} answer;

typedef struct world {
    fake fake;
    answer answers[WORLD_REQUESTS_MAX];
    uint32_t count;
} world;

world *world_new(uint64_t seed);
/* With another configuration than fake_config's. */
world *world_with(uint64_t seed, void (*change)(router_core_config *config));
void world_free(world *w);
/* A prefill and a decode worker of 512 blocks, warm. */
world *one_to_one(uint64_t seed);
answer *ask(world *w, uint32_t prompt, uint32_t max);
answer *ask_with(world *w, uint32_t prompt, uint32_t max, int32_t priority);
void wait_ms(world *w, uint64_t ms);
void wait_for_token(world *w, const answer *a, uint32_t index);
/* The worker holds so many leading blocks of the prompt of request number `first`. */
void store_prompt(world *w, uint32_t worker, uint32_t first, uint32_t blocks);
/* Every request has ended once, and no worker holds anything. */
void assert_nothing_left(const world *w);
/* It has ended well, with every token, and nothing is left. */
void assert_whole(const world *w, const answer *a);
router_core_counters counters_of(const world *w);

/* Of that request. */
bool has_lease(const fake_worker *worker, const answer *a);
/* The decode worker that has a lease of it; UINT32_MAX: none has. */
uint32_t place_of(const world *w, const answer *a);
/* Until it has more tokens than before, from its decode worker too: it is being computed there, and
 * not for long. */
void begin_to_run(world *w, const answer *a);
/* It dies, and the router knows. */
void bring_down(world *w, uint32_t worker);
/* Its process is seen to end: the router knows soon, well before lost_after. */
void end_process(world *w, uint32_t worker);
/* They have leases there, and make no tokens any more. */
void stall(world *w, uint32_t worker, bool stalled);
/* A world with an idle prefill worker, so many decode workers, and one request. */
world *world_of_one(uint64_t seed, uint32_t prefill, uint32_t decode, answer **a);
/* A world with one decode worker that dies with both. */
world *world_of_two_with(uint64_t seed, uint32_t prompt, answer **a, answer **b);
world *world_of_two_suspects(uint64_t seed, answer **a, answer **b);
