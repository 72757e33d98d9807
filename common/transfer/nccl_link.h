#pragma once

/* common/transfer/nccl_link.h - what the parts of the NCCL carrier share. Inside common/transfer
 * only, for nccl*.c.
 *
 * A link goes one way: out, opened by our engine, or in, opened by somebody else's. Both have one
 * number at the carrier of messages below. Everything is the engine's thread's. Structures named
 * word_* go over the wire as they are. */

#include "common/transfer/carrier.h"
#include "common/transfer/nccl_library.h"
#include "common/transfer/senders.h"

enum {
    RUNS_MAX = 128,    /* of a batch; also what waits for the next one */
    WORDS_MAX = 64,    /* of a link, that wait: notices beyond these are refused for now */
    SENDERS_MORE = 64, /* links to us beyond as many as ours to others */
    COMMS_DEFAULT = 16,
    BASE_ADDRESS_MAX = 2048,
    POLL_NS = 200000,      /* a stream tells nobody that it has ended */
    REPEAT_NS = 100000000, /* until it is answered: a hello, a goodbye, a failure */
    LINGER_NS = 200000000, /* a link that has ended still answers */
    LOOK_NS = 5000000,     /* at whether the other end's process lives */
    SENDER_RANK = 0,
    RECEIVER_RANK = 1,
};

typedef enum word_kind {
    WORD_HELLO = 1, /* sender: who I am, and where to answer */
    WORD_WELCOME,
    WORD_ANNOUNCE, /* sender: a batch's runs */
    WORD_GO,       /* receiver: its receives are posted */
    WORD_LAUNCH,   /* sender: it is taken too, its sends are about to be posted */
    WORD_WAITS,    /* either: the batch waits here for its turn; not forgotten */
    WORD_LANDED,
    WORD_FAIL,   /* receiver: the link has ended, nothing of it is written any more */
    WORD_BYE,    /* sender: end the link; a word_hello, so that whoever forgot it can answer */
    WORD_BYE_OK, /* receiver: there is none, nothing of it is written any more */
    WORD_NOTICE,
} word_kind;

typedef struct word_head {
    uint32_t kind;
    uint32_t batch;
    uint64_t link; /* the sender's number for the link, by chance: unique everywhere */
} word_head;
_Static_assert(sizeof(word_head) == 16, "goes over the wire");

typedef struct run {
    uint64_t offset, bytes; /* in the receiver's pool */
} run;

/* Which process; its end is the end of all that it may write. */
typedef struct process_mark {
    uint64_t host; /* pd_process_host; 0: it cannot be told */
    int64_t pid;
    uint64_t started; /* pd_process_started */
} process_mark;

typedef struct word_hello {
    word_head head;
    uint64_t incarnation;
    process_mark process;
    uint32_t address_bytes, pad;
    unsigned char address[BASE_ADDRESS_MAX]; /* as far as address_bytes */
} word_hello;

typedef struct word_announce {
    word_head head;
    uint64_t epoch; /* of the communicator that the sender has; 0: none */
    uint32_t count, pad;
    run runs[RUNS_MAX]; /* as far as count */
} word_announce;

typedef struct word_go {
    word_head head;
    uint64_t epoch; /* of the communicator to use */
    uint32_t fresh, pad;
    pd_nccl_id id; /* fresh: of the one to be made */
} word_go;

typedef struct nccl_address {
    uint64_t id; /* of the process' carrier, by which processes are ordered */
    process_mark process;
    uint32_t version; /* of NCCL */
    uint32_t base_bytes;
} nccl_address;
_Static_assert(sizeof(nccl_address) == 40, "goes over the wire");

/* A message on its way; in the list until the base has ended with it. */
typedef struct word {
    struct word *next;
    uint64_t token; /* the engine's, of a notice */
    bool notice;
    size_t len;
    unsigned char bytes[];
} word;

typedef enum link_state {
    LINK_FREE,
    LINK_WANTED, /* in: a sender spoke, the way back is to be opened */
    LINK_OPENING,
    LINK_GREETING, /* out: waits for the welcome */
    LINK_UP,
    LINK_PARTING, /* has no work any more; until the other end knows, or is dead, or time is up */
    LINK_ENDING,  /* the base closes it */
} link_state;

/* The link's connection at the carrier of messages. */
typedef enum base_state {
    BASE_CLOSED,
    BASE_OPENING,
    BASE_OPEN,
    BASE_BROKEN, /* to be closed */
    BASE_CLOSING,
} base_state;

typedef enum batch_state {
    BATCH_NONE,
    BATCH_WAITING,   /* for this process */
    BATCH_ANNOUNCED, /* out: for the receiver's GO */
    BATCH_GO,        /* out: has GO, waits for this process */
    BATCH_INIT,      /* the communicator is being made */
    BATCH_LAUNCHING,
    BATCH_RUNNING,
    BATCH_SENT, /* out: waits for LANDED */
} batch_state;

typedef struct nccl_link {
    link_state state;
    base_state base;
    bool in;
    bool broken;   /* given up at this end; acted upon in progress. Says nothing of the other end */
    bool exposed;  /* out: announced and not landed: the receiver may write */
    bool gone;     /* out: proved: nothing of the link can be written at the receiver any more */
    bool greeted;  /* out: the receiver may know the link */
    bool bye;      /* in: the sender wants it ended. out: the receiver has said that it is */
    bool landed;   /* out: all of the batch is there */
    bool told;     /* out: broken, and the engine knows */
    bool silent;   /* out: its end is nobody's business any more */
    bool pinned;   /* out: the communicator is promised to the receiver, and not in use yet */
    bool launched; /* in: the sender is taken for the batch too */
    bool seen;     /* the other end's process was seen alive from here */
    process_mark process;
    uint64_t id, peer_id, incarnation, used_ns;
    word *words, *words_tail; /* to be posted, in order */
    uint32_t words_count;

    pd_nccl_comm comm; /* or NULL */
    uint64_t epoch;

    batch_state batch_state;
    uint32_t batch;                            /* its number */
    uint64_t ticket;                           /* when it began to wait for this process */
    uint64_t since_ns;                         /* when that began which has a deadline */
    word_go go;                                /* out */
    uint32_t count;                            /* runs of the batch */
    run runs[RUNS_MAX];                        /* in: here; out: over there */
    uint64_t from[RUNS_MAX], tokens[RUNS_MAX]; /* out: [count] */
    uint32_t next_count;                       /* out: runs that wait for the next batch */
    run next_runs[RUNS_MAX];
    uint64_t next_from[RUNS_MAX], next_tokens[RUNS_MAX];

    uint64_t said_ns;    /* when a word that is repeated was said last; 0: not yet */
    uint64_t parting_ns; /* PARTING: since when */
    uint64_t opened_ns, looked_ns;
    uint32_t opened_again;  /* at the base, to end the link */
    uint32_t address_bytes; /* of the other end, at the base */
    unsigned char address[BASE_ADDRESS_MAX];
} nccl_link;

/* Of this carrier: others have structures of their own by this name. */
struct pd_carrier {
    const pd_carrier_events *events;
    void *engine;
    const pd_nccl_library *library;
    pd_carrier *base; /* of messages */
    uint32_t peers_max;
    uint32_t links_max;
    nccl_link *links; /* [links_max]: peers_max out, then in; the same numbers at the base */
    unsigned char *pool;
    uint64_t pool_bytes;
    uint64_t id, tickets, epochs;
    uint64_t stall_ns, progress_ns;
    process_mark process; /* this one */
    uint32_t comms, comms_max;
    nccl_link *active; /* whose batch this process is taken for; or NULL */
    word *posted;      /* the base may still read them */
    pd_senders senders;
    int device;
    pd_cu_context context;
    pd_cu_stream stream;
    int epoll_fd, timer_fd;
    bool timer_set;
    size_t address_bytes;
    unsigned char address[sizeof(nccl_address) + BASE_ADDRESS_MAX];
};

static inline uint32_t pd_nccl_index(const pd_carrier *carrier, const nccl_link *link)
{
    return (uint32_t)(link - carrier->links);
}

/* For logs. */
static inline const char *pd_nccl_what(const nccl_link *link)
{
    return link->in ? "receive" : "send";
}
