#pragma once

/* deploy/simulate/world.h - a whole cluster in one process, driven by a virtual clock.
 *
 * The deciding parts are the ones that ship: the routers' core and the roles' cores. Around them
 * everything is made up and drawn from one seed: clients (clients.h), the control plane (net.h),
 * processes and compute (worker.h: time from common/cost, tokens from model.h), the data plane
 * (plane.h) and what goes wrong (faults.h). Same seed, same journal. One thread. */

#include "common/cost/cost.h"
#include "common/wire/bus.h"
#include "common/wire/messages.h"
#include "common/worker/role.h"
#include "deploy/simulate/coverage.h"
#include "deploy/simulate/events.h"
#include "deploy/simulate/model.h"
#include "router/core.h"

#define SIM_WORKERS_MAX   8
#define SIM_ROUTERS_MAX   3
#define SIM_LINKS_MAX     32
#define SIM_SHIPMENTS_MAX 64 /* waiting or under way, a worker */
#define SIM_CHECKS_MAX    16 /* under way, a worker */
#define SIM_FENCES_MAX    64
#define SIM_REQUESTS_MAX  256
#define SIM_PROMPT_MAX    512
#define SIM_ANSWER_MAX    192
#define SIM_GIVEN_MAX     32 /* processes that a request was given to, of late */

/* How data links carry (docs/transfer.md). */
typedef enum sim_links {
    SIM_LINKS_MEMORY,   /* sent is landed: shared memory */
    SIM_LINKS_MIXED,    /* by messages between hosts */
    SIM_LINKS_MESSAGES, /* sent is in a socket, and lands later, in order: tcp */
} sim_links;

/* What a run is made of; all of it follows from the seed. */
typedef struct sim_plan {
    uint64_t seed;
    uint32_t routers, prefill, decode;
    uint32_t requests; /* asked by clients; one more a router is asked when all is at rest */
    pd_kv_layout layout;
    uint32_t chunk_tokens, max_batch, queue_max, context_max;
    bool prefix_cache, seals;
    bool speculates; /* decode workers take drafts along; most are wrong, for tokens are random */
    double gap_ms;   /* mean time between arrivals */
    double late;     /* share of messages that are much later than others */
    uint64_t tokens_late_ns;         /* their socket is behind the others, at most */
    double lose, duplicate, reorder; /* shares of messages on the control plane */
    pd_router_policy policy;
    uint32_t allowed;  /* bits of sim_fault */
    uint32_t faults;   /* single faults drawn */
    uint64_t total_ns; /* a request's deadline */
    bool two_hosts;    /* a peer's death is not seen from the other host */
    /* Data links carry so many times less: all of them, or those between hosts; from then on (after
     * the first request), for so long. 0: none do. */
    uint32_t slow_factor;
    bool slow_between_hosts;
    uint64_t slow_from_ns, slow_for_ns;
    sim_links links;
    uint64_t socket_bytes; /* what one takes, and the last piece beyond */
} sim_plan;

typedef struct sim_world sim_world;

/* Blocks being put into another pool, all of one pd_shipment, in pieces; or a word without blocks,
 * which goes after all that was asked for before it for the same request. */
typedef struct sim_shipment {
    bool used;
    uint64_t serial;
    pd_shipment asked; /* its arrays are memory; count 0: a word */
    pd_notice word;
    void *memory;
    uint64_t generation;  /* of the link */
    uint64_t served;      /* the link's turn when a piece left last */
    uint32_t group, done; /* the next piece: group, counted from group_first; blocks of it gone */
    uint32_t pieces;      /* posted, not landed yet */
    bool dropped;         /* nothing more is posted */
    pd_status status;
    uint64_t bytes, wire_ns; /* landed, and the link's time for it */
} sim_shipment;

/* A link of the data plane, at its sending end. */
typedef struct sim_link {
    bool used, up, told_down;
    uint32_t target; /* worker */
    uint64_t target_incarnation;
    uint64_t tag, generation;
    uint64_t free_at_ns;     /* when what was posted so far has landed */
    bool busy;               /* a piece of a shipment is on the wire */
    bool messages;           /* it goes into a socket, and more while there is room */
    uint64_t posted, landed; /* parcels */
    uint64_t socket_bytes;   /* of those in between; messages alone */
    uint64_t turns;
} sim_link;

/* A router as a worker's process knows it. */
typedef struct sim_view {
    uint64_t welcomed; /* incarnation; 0: not registered there */
    uint64_t heard_ns;
    uint32_t session;                           /* how often what it had here was dropped */
    uint64_t sent_ns[PD_CHANNELS], received_ns; /* arrival of the last message each way */
} sim_view;

typedef struct sim_worker {
    sim_world *world;
    uint32_t index, host;
    char name[PD_NAME_BYTES];
    char identity[PD_IDENTITY_BYTES];
    const pd_role_ops *ops;
    uint64_t incarnation;
    pd_role_core *core; /* NULL: dead */
    sim_kv kv;
    pd_step *step; /* under way; NULL: idle */
    uint64_t frozen_until_ns, down_until_ns;
    sim_view views[SIM_ROUTERS_MAX];
    sim_link links[SIM_LINKS_MAX];
    uint64_t link_generation, shipment_serial;
    sim_shipment shipments[SIM_SHIPMENTS_MAX];
    struct sim_check *checks[SIM_CHECKS_MAX]; /* under way */
    uint64_t fences[SIM_FENCES_MAX];          /* incarnations whose bytes land here no more */
    uint32_t fences_next;
    struct {
        uint64_t sender, generation;
    } newest[SIM_FENCES_MAX]; /* the latest link by which each sent a message here */
    uint32_t newest_next;
    uint64_t watched[SIM_FENCES_MAX]; /* peers on this host, told of their death */
    uint32_t watched_next;
    uint64_t ticked_ns; /* for pd_own_pause_ns */
    uint32_t ticks;
    uint32_t deaths; /* of all its processes */
    uint32_t killer; /* the request + 1 whose step ends it now */
    bool slow;       /* the next step is */
    bool corrupt;    /* the next blocks that leave arrive wrong */
} sim_worker;

typedef struct sim_router {
    sim_world *world;
    uint32_t index, host;
    uint64_t incarnation;
    router_core *core; /* NULL: dead */
    uint64_t tick_ns;  /* due of the earliest tick under way */
    uint64_t frozen_until_ns;
    uint64_t started_ns;
    bool leaving;
    uint64_t queue_ns, total_ns; /* its deadlines */
    uint32_t queue_max;
    uint64_t placed_at; /* events_done when it placed a request last */
    int32_t placed_priority;
    uint64_t cut_until_ns[SIM_WORKERS_MAX]; /* the network between it and a worker is broken */
    bool cut_drops[SIM_WORKERS_MAX];        /* what is said meanwhile is lost, not late */
} sim_router;

/* A worker process that was asked to do something for a request. */
typedef struct sim_given {
    uint64_t incarnation; /* 0: none */
    uint32_t worker, epoch;
    bool heard; /* the router heard from there that it is computed, and knew the worker still */
    bool left;  /* the router has given the attempt up there */
    bool rival; /* it died, and it may have been of another one */
    uint32_t killer; /* it died: of that request + 1, or of SIM_KILLED_ELSE */
} sim_given;
#define SIM_KILLED_ELSE UINT32_MAX

typedef enum sim_poison {
    SIM_POISON_NONE,
    SIM_POISON_PREFILL, /* of the step that works through its prompt */
    SIM_POISON_DECODE,  /* of a later step: see poison_step */
} sim_poison;

typedef struct sim_request {
    uint32_t router;
    uint64_t router_incarnation;
    router_handle handle;
    uint64_t asked_ns;
    uint32_t prompt[SIM_PROMPT_MAX], prompt_count;
    uint32_t max_tokens;
    int32_t priority;
    bool ignore_end;
    sim_poison poison;           /* whoever computes it dies */
    uint32_t poison_step, steps; /* of the decode steps at one worker: which; how many so far */
    uint64_t steps_at;           /* that worker's incarnation */
    bool placed;                 /* at least once */
    pd_sampling sampling;
    uint32_t answer[SIM_ANSWER_MAX], answer_count; /* the right one */
    uint32_t got;
    uint32_t ends; /* how often it ended: 1 in the end */
    bool finished, cancelled, failed, cut;
    uint32_t attempts, attempts_in_row; /* prefill requests sent for it */
    uint64_t attempt_seen;              /* the highest epoch + 1 of them */
    uint32_t killed;                    /* workers that it brought down */
    sim_given given[SIM_GIVEN_MAX];     /* a ring */
    uint32_t given_count;               /* ever */
    int http_status;
} sim_request;

struct sim_world {
    sim_plan plan;
    uint64_t now_ns;
    uint64_t random; /* state of the run's own numbers */
    sim_events events;
    sim_router routers[SIM_ROUTERS_MAX];
    sim_worker workers[SIM_WORKERS_MAX];
    uint32_t workers_count;
    sim_request *requests; /* [requests_count] */
    uint32_t requests_count;
    pd_cost cost;
    uint64_t journal; /* hash of all that happened */
    uint64_t events_done;
    sim_kind event_kind;                /* what happens now */
    uint64_t first_ask_ns, asked_by_ns; /* the first arrival, and the last */
    uint32_t faults_left;               /* scheduled, not happened yet */
    bool quiet;                         /* no more faults: the run is to come to its end */
    sim_coverage coverage;
    pd_status status; /* of the world itself: out of memory */
    char fault[512];  /* the first broken promise; "" while all is well */
};

typedef struct sim_result {
    bool good;
    uint64_t journal, events;
    uint32_t finished, cancelled, failed, cut;
    double virtual_s;
    sim_coverage coverage;
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
void sim_journal(sim_world *world, const void *bytes, size_t len);
/* A copy of size bytes for an event; NULL when memory is out, which ends the run. */
void *sim_copy(sim_world *world, const void *bytes, size_t size);
