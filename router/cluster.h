#pragma once

/* router/cluster.h - the workers as this router sees them.
 *
 * A worker registers with a hello, is checked against what this cluster runs, lives as long as it
 * sends heartbeats, and ends by bye, by its process' death, or by silence: a short one when its
 * connection has ended. An incarnation that ended is never believed again.
 * Pure: messages go out through the send function, time comes in. One thread. */

#include "router/core.h"

#define ROUTER_NO_WORKER      UINT32_MAX
#define ROUTER_IDENTITY_BYTES (PD_NAME_BYTES + 17) /* a name, "/", 16 hex digits, NUL */

#define ROUTER_DEAD_MAX 1024

typedef struct router_link {
    bool up;
    bool told; /* the decode worker was sent word of the prefill worker */
    uint64_t peer_incarnation;
    uint64_t offer_ns; /* when both hear of each other again, unless up and told; 0: not set yet */
    char lane[64];
} router_link;

typedef struct router_worker {
    bool used;
    char identity[ROUTER_IDENTITY_BYTES];
    pd_msg_hello hello; /* transfer_address and rank_placements point to what is below */
    unsigned char *address;
    /* [rank_pids_count]; NULL: not told */
    pd_msg_placement *rank_placements;
    uint64_t heard_ns;  /* any message */
    uint64_t report_ns; /* last heartbeat; 0 none yet */
    uint64_t dead_ns;   /* its process has ended: given up then; 0: not that this router knows */
    bool counts_known;  /* a heartbeat of this incarnation has come, in whatever session */
    uint64_t cut_ns;    /* its connection ended then: a hint until the next heartbeat; 0: none */
    pd_msg_heartbeat report;
    /* what this router sent and has not seen the end of */
    uint32_t inflight_prefill, inflight_decode;
    double inflight_prefill_ms; /* predicted, of those in flight */
    double sent_ms;             /* predicted, of those sent since the report */
    uint64_t inflight_context;  /* tokens of sequences leased or decoding here */
    uint64_t blocked_ns;        /* refused for overload: not asked again before */
    /* This router's clock less the worker's, by the message that took the least time; 0: none has
     * told its clock. */
    uint64_t clock_offset_ns, clock_read_ns;
    router_link *links;  /* prefill: [ROUTER_WORKERS_MAX], by the decode worker's slot */
    pd_msg_cancel *owed; /* cancels that the bus did not take yet */
    uint32_t owed_count, owed_size;
} router_worker;

typedef struct router_ended {
    uint64_t incarnation;
    char name[PD_NAME_BYTES];
    bool certain;      /* its process had ended, too */
    uint64_t clock_ns; /* what its own clock showed when it was given up; 0: unknown */
} router_ended;

typedef struct router_cluster {
    const router_core_config *config;
    uint64_t router;
    const router_sink *sink;
    uint64_t layout_fingerprint; /* expected; 0: not set yet */
    char layout[128];
    uint32_t count;
    uint32_t slots_used; /* slots at and beyond were never used */
    uint64_t beat_ns;    /* next heartbeat to the workers */
    uint64_t absent_ns;  /* until then a cut connection may be this router's own doing */
    uint64_t registered, refused, lost;
    uint64_t shipped_bytes; /* by all workers that are or were registered, since they were */
    router_ended ended[ROUTER_DEAD_MAX]; /* a ring */
    uint32_t ended_next;
    router_worker workers[ROUTER_WORKERS_MAX];
} router_cluster;

PD_CHECKED pd_status router_cluster_create(const router_core_config *config, uint64_t router,
                                           const router_sink *sink, uint64_t now_ns,
                                           router_cluster **cluster_out);
void router_cluster_destroy(router_cluster *cluster);

/* Checks and registers. On PD_OK *slot_out is the worker's and everyone was told of everyone.
 * *replaced_out: the slot of an older incarnation of the same name, which the caller removes
 * first (then calls again); ROUTER_NO_WORKER otherwise. PD_E_MISMATCH: it was sent a refusal.
 * PD_E_AGAIN: an older incarnation has to go first. */
PD_CHECKED pd_status router_cluster_hello(router_cluster *cluster, const char *from,
                                          const pd_msg_hello *hello, uint64_t now_ns,
                                          uint32_t *slot_out, uint32_t *replaced_out);
/* Ends a worker: its incarnation is dead, all others are told. The slot is free afterwards. */
void router_cluster_remove(router_cluster *cluster, uint32_t slot, uint64_t now_ns);

/* True when that incarnation ended here (one of the last ROUTER_DEAD_MAX). */
bool router_cluster_gave_up(const router_cluster *cluster, uint64_t incarnation);
/* It says, at that time of its own clock, that it lives: true when that was after it was given up.
 * What was on its way when it was given up proves nothing, as a cut connection delivers the words
 * of the dead late; and no word does where its process is known to have ended. */
bool router_cluster_outlived(const router_cluster *cluster, uint64_t incarnation,
                             uint64_t clock_ns);
/* It said that before it was given up, and whether it lives is not known. Not answered: a refusal
 * would end one that lives before it has said a word that proves it, which comes within a heartbeat
 * (or, where its clock stood still with it, within lost_after). */
bool router_cluster_is_late(const router_cluster *cluster, uint64_t incarnation, uint64_t clock_ns);

/* The name of an incarnation: of one that is registered (*registered_out), or of one of the last
 * ROUTER_DEAD_MAX that ended. NULL: never heard of. Borrowed from the cluster. */
const char *router_cluster_name_of(const router_cluster *cluster, uint64_t incarnation,
                                   bool *registered_out);

/* Tells a worker once more of an incarnation that was given up. */
void router_cluster_tell_gone(router_cluster *cluster, uint32_t slot, uint64_t incarnation);

uint32_t router_cluster_by_identity(const router_cluster *cluster, const char *identity);
uint32_t router_cluster_by_incarnation(const router_cluster *cluster, uint64_t incarnation);
uint32_t router_cluster_by_name(const router_cluster *cluster, const char *name,
                                uint64_t incarnation);

/* A heartbeat came; the caller has found the slot. */
void router_cluster_report(router_cluster *cluster, uint32_t slot,
                           const pd_msg_heartbeat *heartbeat, uint64_t now_ns);
/* What that worker has shipped in all, as it says itself: no message about a request is needed to
 * count what left for it, and none that is lost, late or of an attempt that is over is missed. */
void router_cluster_shipped(router_cluster *cluster, uint32_t slot, uint64_t bytes);
/* From a prefill worker: its link. From a decode worker: a peer that it has fenced off, which is
 * told to come anew. */
void router_cluster_on_link(router_cluster *cluster, uint32_t slot, const pd_msg_link *link,
                            uint64_t now_ns);
/* That prefill worker says that it has no link there: offered again, used when it says so. */
void router_cluster_doubt_link(router_cluster *cluster, uint32_t prefill, uint32_t decode,
                               uint64_t now_ns);
/* Heartbeats out, owed cancels, links offered again. */
void router_cluster_on_tick(router_cluster *cluster, uint64_t now_ns);
/* Before anybody is judged by what was heard: a tick that comes later than it was due by more than
 * a heartbeat finds messages that wait, not workers that are silent. What is unheard of since then
 * is this router's own absence, and does not count. */
void router_cluster_take_time(router_cluster *cluster, uint64_t now_ns);
/* The process of that incarnation has ended, for certain. What it said last is heard first. */
void router_cluster_on_dead(router_cluster *cluster, uint64_t incarnation, uint64_t now_ns);
/* The connection of that identity has ended. It may be back in no time. */
void router_cluster_on_cut(router_cluster *cluster, const char *identity, uint64_t now_ns);
/* A slot that is dead, or silent for too long; why_out says which. ROUTER_NO_WORKER: none. */
#define ROUTER_WHY_BYTES 96
uint32_t router_cluster_lost(const router_cluster *cluster, uint64_t now_ns,
                             char why_out[ROUTER_WHY_BYTES]);
uint64_t router_cluster_next_due(const router_cluster *cluster);

/* Sends a cancel, and again later if it was not taken: a lost one would hold blocks. */
void router_cluster_cancel(router_cluster *cluster, uint32_t slot, const pd_msg_cancel *cancel);

const char *router_role_name(pd_role role);
bool router_worker_ready(const router_worker *worker); /* warm, not draining */
/* The worker as a peer of another one. address: with where it is to be written to, borrowed from
 * the worker. */
void router_worker_peer(const router_worker *worker, bool address, pd_msg_peer *peer_out);
bool router_cluster_linked(const router_cluster *cluster, uint32_t prefill, uint32_t decode);
