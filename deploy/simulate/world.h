#pragma once

/* deploy/simulate/world.h - a whole cluster in one process, driven by a virtual clock.
 *
 * The deciding parts are the ones that ship: the router's core and the roles' cores. Around them
 * everything is made up and drawn from one seed: clients, the network (delays; order kept a link;
 * loss only with a worker's death), compute (time from common/cost, tokens from model.h), transfers
 * (bytes over bandwidth, notices after puts), and faults. Same seed, same journal. One thread. */

#include "common/cost/cost.h"
#include "common/wire/bus.h"
#include "common/wire/messages.h"
#include "common/worker/role.h"
#include "deploy/simulate/events.h"
#include "deploy/simulate/model.h"
#include "router/core.h"

#define SIM_WORKERS_MAX  8
#define SIM_LINKS_MAX    32
#define SIM_REQUESTS_MAX 256
#define SIM_PROMPT_MAX   512
#define SIM_ANSWER_MAX   64

/* Which faults the seed may draw. */
typedef struct sim_faults {
    bool crash, hang_up, slow, freeze, corrupt;
} sim_faults;

/* What a run is made of; all of it follows from the seed. */
typedef struct sim_plan {
    uint64_t seed;
    uint32_t prefill, decode, requests;
    pd_kv_layout layout;
    uint32_t chunk_tokens, max_batch, queue_max, context_max;
    bool prefix_cache, seals;
    double gap_ms; /* mean time between arrivals */
    double late;   /* share of messages that are much later than others */
    pd_router_policy policy;
    sim_faults faults;
} sim_plan;

typedef struct sim_world sim_world;

/* A link of the data plane, at its sending end. */
typedef struct sim_link {
    bool used, up, told_down;
    uint32_t target; /* worker */
    uint64_t target_incarnation;
    uint64_t tag, generation;
    uint64_t free_at_ns; /* when what was posted so far has landed */
} sim_link;

typedef struct sim_worker {
    sim_world *world;
    uint32_t index;
    char name[PD_NAME_BYTES];
    char identity[PD_IDENTITY_BYTES];
    const pd_role_ops *ops;
    uint64_t incarnation;
    pd_role_core *core; /* NULL: dead */
    sim_kv kv;
    pd_step *step; /* under way; NULL: idle */
    uint64_t frozen_until_ns;
    bool welcome;
    uint64_t heard_ns; /* the router, last */
    sim_link links[SIM_LINKS_MAX];
    uint64_t link_generation;
    uint64_t sent_ns[PD_CHANNELS], received_ns; /* arrival of the last message each way */
    uint32_t ticks;
} sim_worker;

typedef struct sim_request {
    router_handle handle;
    uint32_t prompt[SIM_PROMPT_MAX], prompt_count;
    uint32_t max_tokens;
    bool ignore_end;
    pd_sampling sampling;
    uint32_t answer[SIM_ANSWER_MAX], answer_count; /* the right one */
    uint32_t got;
    uint32_t ends; /* how often it ended: 1 in the end */
    bool finished, cancelled, failed;
    int http_status;
} sim_request;

struct sim_world {
    sim_plan plan;
    uint64_t now_ns;
    uint64_t random; /* state of the run's own numbers */
    sim_events events;
    router_core *router;
    uint64_t router_incarnation;
    uint64_t router_tick_ns; /* due of the earliest tick under way */
    sim_worker workers[SIM_WORKERS_MAX];
    uint32_t workers_count;
    sim_request *requests; /* [plan.requests] */
    pd_cost cost;
    uint64_t journal; /* hash of all that happened */
    uint64_t events_done, crashes, freezes, corrupted;
    bool quiet;       /* no more faults: the run is to come to its end */
    pd_status status; /* of the world itself: out of memory */
    char fault[512];  /* the first broken promise; "" while all is well */
};

typedef struct sim_result {
    bool good;
    uint64_t journal, events;
    uint32_t finished, cancelled, failed;
    uint64_t crashes, freezes, corrupted;
    double virtual_s;
    char fault[512]; /* why it is not good */
} sim_result;

/* Runs it to its end. Errors: PD_E_NOMEM, PD_E_INVALID. A broken promise is no error but a result
 * that is not good. */
PD_CHECKED pd_status sim_world_run(const sim_plan *plan, sim_result *result_out);

/* ---- for the files of the simulator ---- */

uint64_t sim_random(sim_world *world, uint64_t below); /* 0 .. below - 1 */
bool sim_chance(sim_world *world, double probability);
/* Schedules event at at_ns (moved to now when earlier). */
void sim_schedule(sim_world *world, uint64_t at_ns, sim_event event);
/* The first one is kept. */
void sim_broken(sim_world *world, const char *format, ...) __attribute__((format(printf, 2, 3)));
sim_worker *sim_world_worker(sim_world *world, const char *identity); /* NULL: none lives */
/* A copy of size bytes for an event; NULL when memory is out, which ends the run. */
void *sim_copy(sim_world *world, const void *bytes, size_t size);
/* Packs message and schedules its arrival, after all that was sent on the same link before. */
void sim_send_to_router(sim_worker *worker, const pd_message *message);
bool sim_send_to_worker(sim_worker *worker, const pd_message *message);
