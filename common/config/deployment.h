#pragma once

/* common/config/deployment.h - the whole deployment YAML, checked, in one struct.
 *
 * Every key is described once, in the schema table of deployment.c: its path, type, range,
 * default and help. Reading is driven by that table, so a key that is read is also checked,
 * printed and suggested. All faults of a file are reported, not just the first, each as
 *
 *   FILE:LINE:COLUMN: KEY.PATH: what is wrong, what was expected
 *
 * Scalars are read by the type that the schema wants, never by how they look: strings stay as
 * written (`no`, `22:22`, `1.10`), integers are plain decimal, booleans are true or false,
 * durations and sizes carry units (`200ms`, `2s`, `1m`, `64MiB`, `2GiB`).
 *
 * Relative paths (model.path, model.cache_dir, state_dir) start at the working directory of
 * `kvferry up`; every service runs in that directory.
 *
 * Durations are nanoseconds (_ns), memory is bytes. A filled struct is read-only; any thread. */

#include "common/base/buf.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/spec_method.h"
#include "common/base/status.h"

#include <stdint.h>

#define PD_DEPLOYMENT_ALIASES_MAX 8
#define PD_DEPLOYMENT_SETS_MAX    128  /* --set options */
#define PD_DEPLOYMENT_WORKERS_MAX 256  /* of a role, on one host */
#define PD_DEPLOYMENT_THREADS_MAX 1024 /* of a rank */
#define PD_DEPLOYMENT_NAME_BYTES  64   /* of a service's name with its NUL */

typedef enum pd_router_policy {
    PD_POLICY_KV_AWARE,
    PD_POLICY_LEAST_LOADED,
    PD_POLICY_ROUND_ROBIN,
    PD_POLICY_RANDOM,
} pd_router_policy;

typedef enum pd_router_bus {
    PD_BUS_IPC,
    PD_BUS_TCP,
} pd_router_bus;

typedef enum pd_pin_threads {
    PD_PIN_NEVER,
    PD_PIN_AUTO, /* where every worker of the deployment gets CPUs of its own */
    PD_PIN_ALWAYS,
} pd_pin_threads;

typedef struct pd_listen {
    const char *text; /* as written: "127.0.0.1:8080", "[::1]:0", "localhost:8080" */
    const char *host; /* without brackets */
    uint16_t port;    /* 0: a free one is picked by `kvferry up` */
    bool ipv6;        /* host was written in brackets */
} pd_listen;

/* A pool of workers with one role. */
typedef struct pd_deployment_pool {
    uint32_t workers;         /* how many of this role; from workers and ratio, or pool.workers */
    const char *device;       /* "cpu" (its best instructions), "cpu-ref", "cuda:1", "auto", ... */
    uint32_t tensor_parallel; /* ranks of one worker, a process each */
    uint32_t threads;         /* of one rank; 0: pd_deployment_threads tells */
    uint32_t max_batch;       /* sequences in one step */
    uint32_t queue_max;       /* requests that may wait in one worker */
    uint32_t chunk_tokens;    /* rows of one prefill step (decode workers prefill short prompts) */
} pd_deployment_pool;

typedef struct pd_deployment {
    const char *cluster;        /* [a-z0-9-]{1,63} */
    const char *state_dir;      /* default ".kvferry/CLUSTER" */
    pd_log_level log_level;     /* of every service */
    pd_pin_threads pin_threads; /* compute threads on the host's cores, each to a CPU */

    struct {
        const char *name; /* default: the model file's name without its extension */
        const char *path;
        uint32_t context;      /* tokens; 0: the model's own, at most 8192 */
        const char *cache_dir; /* of packed weights; "auto", "none" */
        uint64_t cache_max_bytes;
        const char *aliases[PD_DEPLOYMENT_ALIASES_MAX]; /* other names clients may use */
        uint32_t aliases_count;
    } model;

    uint32_t workers; /* prefill.workers + decode.workers */

    struct {
        pd_listen listen;  /* HTTP */
        uint32_t replicas; /* 1 */
        pd_router_bus bus;
        /* ZeroMQ endpoints; the router binds all three, workers connect. "tcp://127.0.0.1:0" means
         * that `kvferry up` picks a free port and hands it to every service by --set. */
        const char *control;
        const char *tokens;
        const char *events;
        pd_router_policy policy;
        struct {
            uint64_t ttft_ns;
            uint64_t tpot_ns;
        } slo;
        struct {
            uint32_t connections;         /* open HTTP connections */
            uint32_t requests;            /* in flight */
            uint32_t queue;               /* waiting for a worker */
            uint64_t body_bytes;          /* of one HTTP request */
            uint64_t header_bytes;        /* of one HTTP request */
            uint32_t max_tokens_default;  /* where a completion request names none */
            uint32_t chat_tokens_default; /* where a chat request names none */
            uint32_t stops;               /* stop strings of a request */
        } limits;
        struct {
            uint64_t queue_ns;       /* waiting for room in the router */
            uint64_t lease_ns;       /* decode worker's answer to a lease */
            uint64_t prefill_ns;     /* prefill sent to first token */
            uint64_t transfer_ns;    /* first token to the first one from decode */
            uint64_t decode_idle_ns; /* between two tokens */
            uint64_t total_ns;       /* a request as a whole */
        } deadlines;
    } router;

    pd_deployment_pool prefill;
    pd_deployment_pool decode;

    struct { /* decode.speculative */
        pd_spec_method method;
        uint32_t draft_tokens; /* of a sequence in a step, at most */
        bool adaptive;         /* only as many as pay for themselves */
        uint32_t ngram_min, ngram_max;
        uint32_t window;             /* lookahead's */
        const char *draft_model;     /* a GGUF file; NULL: none */
        uint64_t draft_memory_bytes; /* of its KV */
    } speculative;

    struct {
        uint32_t block_tokens; /* multiple of 16, at most 256 */
        const char *dtype;     /* "f16", "int8", "fp8_e4m3" */
        uint64_t memory_bytes; /* pool of one worker */
        uint32_t group_layers; /* 0: chosen from the block size */
        bool prefix_cache;     /* finished blocks stay for reuse */
    } kv;

    struct {
        const char *backend;   /* "ucx", "nccl" */
        const char *transport; /* "auto", "shm", "tcp", "rdma" */
        const char *device;    /* network device for tcp, NIC for rdma; "auto" */
        const char *memory;    /* a GPU's pool: "auto", "plain", "fabric" */
        bool seals;            /* checked on arrival */
        bool overlap;          /* blocks leave while later ones are computed */
    } transfer;

    struct {
        uint64_t interval_ns;
        uint64_t lost_after_ns; /* silence that means dead */
        uint64_t hung_after_ns; /* from then until it is killed; 0: never */
    } heartbeat;

    pd_arena *arena; /* holds the strings */
} pd_deployment;

/* Reads path, then applies sets ("router.listen=127.0.0.1:0"), in order, over it. What a --set
 * gives is checked as if the file had it; its faults are named "--set N" (N from 1).
 * On PD_OK the caller owns *deployment_out: pd_deployment_fini. Otherwise it is untouched and
 * errors holds every fault, a line each, in the order of the file.
 * Errors: PD_E_INVALID (the file or a --set is wrong), PD_E_IO (cannot be read), PD_E_NOMEM. */
PD_CHECKED pd_status pd_deployment_load(const char *path, const char *const *sets,
                                        size_t sets_count, pd_deployment *deployment_out,
                                        pd_buf *errors);
/* The same from memory; name is what errors call the text. */
PD_CHECKED pd_status pd_deployment_parse(const char *name, const char *text, size_t len,
                                         const char *const *sets, size_t sets_count,
                                         pd_deployment *deployment_out, pd_buf *errors);
void pd_deployment_fini(pd_deployment *deployment);

/* Appends the values in effect as YAML that pd_deployment_parse reads back to the same struct. */
void pd_deployment_dump(const pd_deployment *deployment, pd_buf *buf);
/* Appends every key with its type, range, default and meaning: the reference for people. */
void pd_deployment_help(pd_buf *buf);

const char *pd_router_policy_name(pd_router_policy policy); /* as in YAML: "kv-aware" */

/* Processes that compute: every rank of every worker. At least 1. */
uint32_t pd_deployment_processes(const pd_deployment *deployment);

/* Compute threads of one rank of that pool, where all workers share so many CPUs: what the file
 * says, or with auto an equal part of what the pools whose threads it gives leave; at least 1. */
uint32_t pd_deployment_threads(const pd_deployment *deployment, const pd_deployment_pool *pool,
                               uint32_t cpus);

/* True when name is prefill-I or decode-I with I below the pool's workers. */
bool pd_deployment_has_service(const pd_deployment *deployment, const char *name);
