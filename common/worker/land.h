#pragma once

/* common/worker/land.h - what arrives: is it ours, does it fit, is it whole, and what is missing?
 *
 * A landing is the blocks of one request that one sender writes into this worker's pool. A notice
 * is believed when its request, epoch, sender and receiver are the landing's, its groups and blocks
 * are among those to be written, and its valid tokens are what the last block holds. What does not
 * fit changes nothing. Then the bytes are compared with their seals (pd_role_sink.verify, on
 * another thread). A block that does not match, or that is lost, is asked for once more:
 * PD_MSG_REFETCH to the request's router. A block asked for again has come only with a notice that
 * says so (pd_notice.again), so that the first writing of it, late, is never taken for the last.
 *
 * Lost, or only late? What has not come a moment after its sender's PD_NOTICE_WRITTEN is lost,
 * since that word goes behind the blocks. Without it, while anything comes from the sender, whoever
 * it is for, the link carries what it can and the landing waits for its turn; it is late when its
 * sender has been silent for as long as the owner's patience, or when none of its own blocks came
 * for PD_LAND_TURNS times as long. Halfway to the first of these it is asked for once: the word may
 * be what was lost.
 *
 * Who gives a landing up keeps it until it is over: all has come (again, where it was asked for
 * again) or the sender said its last word, and no check reads its blocks any more.
 *
 * Pure; one thread. A landing must not move in memory. */

#include "common/worker/role.h"

enum { PD_LAND_TURNS = 32, PD_LAND_SENDERS_MAX = 256 };

typedef struct pd_landing {
    pd_request_key key;
    char id[PD_REQUEST_ID_BYTES];
    uint64_t sender;         /* incarnation */
    uint32_t sender_session; /* for which it was leased */
    char sender_name[PD_NAME_BYTES];
    uint32_t first, count;  /* blocks of the request; none before it has begun */
    uint32_t tokens;        /* positions of the request up to the end of those blocks */
    const pd_block *blocks; /* [count] in the own pool; the owner's */
    uint32_t groups, count_max;
    uint64_t *came, *good, *again;            /* bits [groups][count] */
    uint32_t to_land, came_count, good_count; /* (group, block) pairs */
    uint32_t checks;                          /* under way: the blocks are being read */
    bool asked_bad, asked_missing;            /* each is asked for once */
    uint32_t asked_count;                     /* PD_MSG_REFETCH that were sent */
    uint64_t patience_ns;                     /* 0: nobody waits with a deadline */
    uint64_t awaited_ns;                      /* since when */
    uint64_t heard_ns;                        /* when a block of its own came last */
    uint64_t written_ns;                      /* PD_NOTICE_WRITTEN, to be acted upon; 0: none */
    uint32_t written_again;                   /* as that says it */
    bool given_up;                            /* counted still, checked no more */
    bool closed;                              /* the sender's last word */
} pd_landing;

typedef struct pd_land_check pd_land_check;

/* A worker's checks, under way and waiting for the verifier. */
typedef struct pd_lander {
    const pd_role_options *options;
    const pd_role_sink *sink;
    pd_land_check *head, *tail; /* oldest first */
    uint64_t ticket_next;
    struct {
        uint64_t sender; /* incarnation; 0: unused */
        uint64_t ns;     /* when blocks came from it last */
    } heard[PD_LAND_SENDERS_MAX];
} pd_lander;

typedef enum pd_land_result {
    PD_LAND_IGNORED, /* late, duplicate or ill-fitting */
    PD_LAND_PART,    /* something has changed */
    PD_LAND_DONE,    /* with this, everything is there and good */
    PD_LAND_BROKEN, /* bytes that are not the request's, or lost ones, and they were asked for again
                       already, or it is more than can be asked for */
    PD_LAND_LATE,   /* see above; of pd_land_tick alone */
    PD_LAND_UNCHECKED, /* whether its bytes match cannot be told here: this worker's trouble, so
                          nothing is asked for again; of pd_land_on_checked alone */
} pd_land_result;

/* options and sink are borrowed. */
void pd_lander_init(pd_lander *lander, const pd_role_options *options, const pd_role_sink *sink);
/* Before its landings; the verifier has ended. */
void pd_lander_fini(pd_lander *lander);

/* Room for count_max blocks; key, id and sender are copied. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status pd_landing_init(pd_landing *landing, const pd_lander *lander,
                                     const pd_request_key *key, const char *id,
                                     const pd_msg_peer *sender, uint32_t count_max);
void pd_landing_fini(pd_landing *landing);
/* Blocks first .. first + count - 1 are awaited from now on; the request has tokens positions up to
 * there. blocks must stay readable until it is landed or given up. */
void pd_landing_begin(pd_landing *landing, uint32_t first, uint32_t count, uint32_t tokens,
                      const pd_block *blocks);

/* Somebody waits from now on, with so much patience. */
void pd_land_await(pd_landing *landing, uint64_t patience_ns, uint64_t now_ns);

/* A PD_NOTICE_BLOCKS came from that sender, whoever it is for. The PD_LAND_SENDERS_MAX senders
 * that were heard last are remembered. */
void pd_land_heard(pd_lander *lander, uint64_t sender, uint64_t now_ns);
/* A PD_NOTICE_BLOCKS for a landing that was found by its key. */
pd_land_result pd_land_on_notice(pd_lander *lander, pd_landing *landing, const pd_notice *notice,
                                 uint64_t now_ns);
/* A PD_NOTICE_WRITTEN; false: it is not for this landing. */
bool pd_land_on_written(const pd_lander *lander, pd_landing *landing, const pd_notice *notice,
                        uint64_t now_ns);
/* What time makes of a landing that is waited for: PD_LAND_PART, PD_LAND_BROKEN, PD_LAND_LATE. At
 * each tick. */
pd_land_result pd_land_tick(pd_lander *lander, pd_landing *landing, uint64_t now_ns);
/* A PD_NOTICE_ABORT speaks of it: its sender writes it no more. */
bool pd_landing_is_aborted(const pd_landing *landing, const pd_role_options *options,
                           const pd_notice *abort);
/* How long none of its own blocks has come. */
uint64_t pd_landing_silence_ns(const pd_landing *landing, uint64_t now_ns);
/* Whose check it was is written to *landing_out; NULL (and ignored): nobody's any more. A landing
 * that was given up: PD_LAND_PART, and it may be over now. */
pd_land_result pd_land_on_checked(pd_lander *lander, const pd_checked *checked,
                                  pd_landing **landing_out);
/* Checks that the verifier had no room for. At each tick. */
void pd_land_retry(pd_lander *lander);
/* Asks again for what has not come, the first time that it is called. False: that is more than
 * PD_REFETCHES_MAX runs, and nothing was asked for. */
bool pd_land_ask_missing(pd_lander *lander, pd_landing *landing);
/* Nobody waits for it any more. */
void pd_land_give_up(pd_lander *lander, pd_landing *landing);

/* Everything is there and good, and no check (of a block that came twice) reads it any more. */
bool pd_landing_landed(const pd_landing *landing);
/* Nobody writes any more: all has come, or the sender has closed. */
bool pd_landing_written(const pd_landing *landing);
/* The same, and nobody reads: a given-up landing's blocks may go. */
bool pd_landing_over(const pd_landing *landing);
