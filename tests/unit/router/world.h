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
