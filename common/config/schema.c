#include "common/config/schema.h"

#include "common/base/clock.h"
#include "common/config/value.h"

#include <stdio.h>
#include <string.h>

#define AT(field) offsetof(pd_values, d.field)
#define MS        PD_NS_PER_MS
#define S         PD_NS_PER_S
#define KIB       (1ull << 10)
#define MIB       (1ull << 20)
#define TIB       (1ull << 40)
#define DEVICES   "cpu|cpu-ref|cpu-avx2|cpu-avx512|cpu-amx|cuda|cuda:N|cuda-emu|cuda-emu:N|auto"
#define DAY       (24 * 3600 * S)

/* The schema and the defaults: the one place. Keys of a section stand together. */
const pd_key pd_schema[] = {
    {"cluster", PD_KEY_LABEL, AT(cluster), 0, 0, "local", NULL, "name of the cluster"},
    {"state_dir", PD_KEY_STRING, AT(state_dir), 1, PD_MODEL_PATH_MAX, NULL, NULL,
     "state, sockets and logs; default .kvferry/CLUSTER"},
    {"log_level", PD_KEY_ENUM, AT(log_level), 0, 0, "info", "error|warn|info|debug|trace",
     "how much every service logs"},
    {"pin_threads", PD_KEY_ENUM, AT(pin_threads), 0, 0, "never", "never|auto|always",
     "a CPU for each compute thread; auto: where each worker gets cores of its own, and no cgroup "
     "limits CPU time"},
    {"model.name", PD_KEY_STRING, AT(model.name), 1, PD_STRING_MAX, NULL, NULL,
     "what clients call the model; default: the file's name"},
    {"model.path", PD_KEY_STRING, AT(model.path), 1, PD_MODEL_PATH_MAX, NULL, NULL,
     "the GGUF file; from the working directory"},
    {"model.context", PD_KEY_AUTO, AT(model.context), 16, 1u << 20, "auto", NULL,
     "tokens of prompt and answer; auto: the model's, at most 8192"},
    {"model.cache_dir", PD_KEY_STRING, AT(model.cache_dir), 1, PD_MODEL_PATH_MAX, "auto", NULL,
     "folder of the weights as CPU workers have packed them, one copy for all; none: each packs "
     "its "
     "own; auto: kvferry/weights in XDG_CACHE_HOME, else in HOME/.cache"},
    {"model.cache_max", PD_KEY_SIZE, AT(model.cache_max_bytes), MIB, 64 * TIB, "16GiB", NULL,
     "what all models' weights may have there; the least recently used go first"},
    {"model.aliases", PD_KEY_ALIASES, AT(model.aliases), 0, 0, NULL, NULL,
     "other names clients may use"},
    {"workers", PD_KEY_INTEGER, AT(workers), 2, 2 * PD_DEPLOYMENT_WORKERS_MAX, NULL, NULL,
     "prefill and decode workers together, shared out by ratio"},
    {"ratio", PD_KEY_RATIO, offsetof(pd_values, ratio), 1, PD_DEPLOYMENT_WORKERS_MAX, NULL, NULL,
     "prefill:decode, such as \"2:1\"; default 1:1"},
    {"router.listen", PD_KEY_LISTEN, AT(router.listen), 0, 0, "127.0.0.1:8080", NULL,
     "HTTP address; port 0 picks a free one"},
    {"router.replicas", PD_KEY_INTEGER, AT(router.replicas), 1, 64, "1", NULL,
     "routers; 1 for now"},
    {"router.bus", PD_KEY_ENUM, AT(router.bus), 0, 0, "ipc", "ipc|tcp",
     "default kind of the three endpoints below"},
    {"router.control", PD_KEY_ENDPOINT, AT(router.control), 0, 0, NULL, NULL,
     "endpoint for registration, leases, work; port 0 picks a free one"},
    {"router.tokens", PD_KEY_ENDPOINT, AT(router.tokens), 0, 0, NULL, NULL, "endpoint for tokens"},
    {"router.events", PD_KEY_ENDPOINT, AT(router.events), 0, 0, NULL, NULL,
     "endpoint for KV events"},
    {"router.policy", PD_KEY_ENUM, AT(router.policy), 0, 0, "kv-aware",
     "kv-aware|least-loaded|round-robin|random", "how workers are chosen"},
    {"router.slo.ttft", PD_KEY_DURATION, AT(router.slo.ttft_ns), MS, 3600 * S, "200ms", NULL,
     "time to first token aimed at"},
    {"router.slo.tpot", PD_KEY_DURATION, AT(router.slo.tpot_ns), MS, 3600 * S, "100ms", NULL,
     "time per output token aimed at"},
    {"router.limits.connections", PD_KEY_INTEGER, AT(router.limits.connections), 1, 65536, "1024",
     NULL, "open HTTP connections"},
    {"router.limits.requests", PD_KEY_INTEGER, AT(router.limits.requests), 1, 65536, "1024", NULL,
     "requests in flight"},
    {"router.limits.queue", PD_KEY_INTEGER, AT(router.limits.queue), 1, 65536, "512", NULL,
     "requests waiting for a worker"},
    {"router.limits.body_bytes", PD_KEY_SIZE, AT(router.limits.body_bytes), KIB, 1024 * MIB, "8MiB",
     NULL, "largest HTTP body"},
    {"router.limits.header_bytes", PD_KEY_SIZE, AT(router.limits.header_bytes), KIB, MIB, "32KiB",
     NULL, "largest HTTP header"},
    {"router.limits.max_tokens_default", PD_KEY_INTEGER, AT(router.limits.max_tokens_default), 1,
     1u << 20, "256", NULL, "tokens of a completion where the request names none"},
    {"router.limits.chat_tokens_default", PD_KEY_INTEGER, AT(router.limits.chat_tokens_default), 1,
     1u << 20, "2048", NULL,
     "most tokens of a chat answer where the request names none; KV blocks are set aside for them"},
    {"router.limits.stops", PD_KEY_INTEGER, AT(router.limits.stops), 1, 64, "16", NULL,
     "stop strings of a request"},
    {"router.deadlines.queue", PD_KEY_DURATION, AT(router.deadlines.queue_ns), MS, DAY, "30s", NULL,
     "waiting for room in the router"},
    {"router.deadlines.lease", PD_KEY_DURATION, AT(router.deadlines.lease_ns), MS, DAY, "5s", NULL,
     "a decode worker's answer to a lease"},
    {"router.deadlines.prefill", PD_KEY_DURATION, AT(router.deadlines.prefill_ns), MS, DAY, "120s",
     NULL, "prefill, to the first token"},
    {"router.deadlines.transfer", PD_KEY_DURATION, AT(router.deadlines.transfer_ns), MS, DAY, "30s",
     NULL, "first token to the first one from decode"},
    {"router.deadlines.decode_idle", PD_KEY_DURATION, AT(router.deadlines.decode_idle_ns), MS, DAY,
     "30s", NULL, "between two tokens"},
    {"router.deadlines.total", PD_KEY_DURATION, AT(router.deadlines.total_ns), MS, DAY, "600s",
     NULL, "a request as a whole"},
    {"prefill.workers", PD_KEY_INTEGER, AT(prefill.workers), 1, PD_DEPLOYMENT_WORKERS_MAX, NULL,
     NULL, "how many; instead of workers and ratio"},
    {"prefill.device", PD_KEY_CHOICE, AT(prefill.device), 0, 0, "cpu", DEVICES,
     "what computes; cpu: its best instructions; auto: a GPU where there is one"},
    {"prefill.tensor_parallel", PD_KEY_INTEGER, AT(prefill.tensor_parallel), 1, 64, "1", NULL,
     "ranks that the model is split among, a process each; divides its heads"},
    {"prefill.threads", PD_KEY_AUTO, AT(prefill.threads), 1, PD_DEPLOYMENT_THREADS_MAX, "auto",
     NULL,
     "compute threads of one rank of a worker; auto: the CPUs that may be used (affinity, cgroup "
     "quota), shared out among "
     "all workers"},
    {"prefill.max_batch", PD_KEY_INTEGER, AT(prefill.max_batch), 1, 1024, "8", NULL,
     "sequences in one step"},
    {"prefill.queue_max", PD_KEY_INTEGER, AT(prefill.queue_max), 1, 65536, "256", NULL,
     "requests that may wait in one worker"},
    {"prefill.chunk_tokens", PD_KEY_INTEGER, AT(prefill.chunk_tokens), 16, 8192, "512", NULL,
     "prompt tokens of one step"},
    {"decode.workers", PD_KEY_INTEGER, AT(decode.workers), 1, PD_DEPLOYMENT_WORKERS_MAX, NULL, NULL,
     "how many; instead of workers and ratio"},
    {"decode.device", PD_KEY_CHOICE, AT(decode.device), 0, 0, "cpu", DEVICES,
     "what computes; cpu: its best instructions; auto: a GPU where there is one"},
    {"decode.tensor_parallel", PD_KEY_INTEGER, AT(decode.tensor_parallel), 1, 64, "1", NULL,
     "ranks that the model is split among, a process each; divides its heads"},
    {"decode.threads", PD_KEY_AUTO, AT(decode.threads), 1, PD_DEPLOYMENT_THREADS_MAX, "auto", NULL,
     "compute threads of one rank of a worker; auto: the CPUs that may be used (affinity, cgroup "
     "quota), shared out among "
     "all workers"},
    {"decode.max_batch", PD_KEY_INTEGER, AT(decode.max_batch), 1, 1024, "64", NULL,
     "sequences in one step"},
    {"decode.queue_max", PD_KEY_INTEGER, AT(decode.queue_max), 1, 65536, "256", NULL,
     "requests that may wait in one worker"},
    {"decode.chunk_tokens", PD_KEY_INTEGER, AT(decode.chunk_tokens), 16, 8192, "128", NULL,
     "prompt tokens of one step"},
    {"decode.speculative.method", PD_KEY_ENUM, AT(speculative.method), 0, 0, "off",
     "off|prompt_lookup|draft_model|lookahead",
     "speculative decoding: who guesses the tokens that a step verifies; answers stay the same"},
    {"decode.speculative.draft_tokens", PD_KEY_INTEGER, AT(speculative.draft_tokens), 1, 15, "8",
     NULL, "draft tokens of a sequence in one step, at most"},
    {"decode.speculative.adaptive", PD_KEY_BOOL, AT(speculative.adaptive), 0, 0, "true", NULL,
     "only as many drafts as pay for themselves, by what is measured; false: always all"},
    {"decode.speculative.ngram_min", PD_KEY_INTEGER, AT(speculative.ngram_min), 2, 8, "3", NULL,
     "prompt_lookup: tokens that have to be the same before a draft"},
    {"decode.speculative.ngram_max", PD_KEY_INTEGER, AT(speculative.ngram_max), 2, 8, "5", NULL,
     "prompt_lookup: tokens that are compared; lookahead: of an n-gram in its pool"},
    {"decode.speculative.window", PD_KEY_INTEGER, AT(speculative.window), 1, 14, "4", NULL,
     "lookahead: places beside the text that are guessed at; rows of each step"},
    {"decode.speculative.draft_model", PD_KEY_STRING, AT(speculative.draft_model), 1,
     PD_MODEL_PATH_MAX, NULL, NULL, "draft_model: a GGUF file with the model's vocabulary"},
    {"decode.speculative.draft_memory", PD_KEY_SIZE, AT(speculative.draft_memory_bytes), MIB,
     64 * TIB, "64MiB", NULL, "draft_model: its own KV in one worker"},
    {"kv.block_tokens", PD_KEY_INTEGER, AT(kv.block_tokens), 16, 256, "16", NULL,
     "tokens of a KV block; a multiple of 16"},
    {"kv.dtype", PD_KEY_CHOICE, AT(kv.dtype), 0, 0, "f16", "f16|int8|fp8_e4m3",
     "number format of the KV cache, and of KV on the wire; int8 and fp8_e4m3: nearly twice the "
     "tokens"},
    {"kv.memory", PD_KEY_SIZE, AT(kv.memory_bytes), MIB, 64 * TIB, "1GiB", NULL,
     "KV memory of one worker"},
    {"kv.group_layers", PD_KEY_AUTO, AT(kv.group_layers), 1, 1024, "auto", NULL,
     "layers shipped together; auto: from the block size"},
    {"kv.prefix_cache", PD_KEY_BOOL, AT(kv.prefix_cache), 0, 0, "true", NULL,
     "finished blocks stay for reuse"},
    {"transfer.backend", PD_KEY_CHOICE, AT(transfer.backend), 0, 0, "ucx", "ucx|nccl",
     "who carries KV blocks; nccl: between GPUs alone"},
    {"transfer.transport", PD_KEY_CHOICE, AT(transfer.transport), 0, 0, "auto", "auto|shm|tcp|rdma",
     "auto: shared memory (GPUs: cuda_ipc) within a host, else tcp; rdma: between hosts NICs; with "
     "nccl: of messages alone"},
    {"transfer.device", PD_KEY_STRING, AT(transfer.device), 1, 63, "auto", NULL,
     "network device for tcp, or NIC for rdma; auto: the nearest, and for tcp on one host lo"},
    {"transfer.memory", PD_KEY_CHOICE, AT(transfer.memory), 0, 0, "auto", "auto|plain|fabric",
     "a GPU's pool; fabric: other hosts' GPUs reach it over NVLink; auto: so where it can be had"},
    {"transfer.seals", PD_KEY_BOOL, AT(transfer.seals), 0, 0, "true", NULL,
     "check what arrives against its seal"},
    {"transfer.overlap", PD_KEY_BOOL, AT(transfer.overlap), 0, 0, "true", NULL,
     "blocks leave while later ones are computed; false: a prompt's leave together"},
    {"heartbeat.interval", PD_KEY_DURATION, AT(heartbeat.interval_ns), 10 * MS, 60 * S, "200ms",
     NULL, "between two heartbeats"},
    {"heartbeat.lost_after", PD_KEY_DURATION, AT(heartbeat.lost_after_ns), 20 * MS, 3600 * S, "2s",
     NULL, "silence that means dead"},
    {"heartbeat.hung_after", PD_KEY_DURATION, AT(heartbeat.hung_after_ns), 0, 3600 * S, "10s", NULL,
     "a worker that stays silent so much longer is killed and started anew; 0s: never"},
};

const size_t pd_schema_count = sizeof pd_schema / sizeof pd_schema[0];
_Static_assert(sizeof pd_schema / sizeof pd_schema[0] <= PD_KEYS_MAX, "PD_KEYS_MAX");

/* Names that other systems use for what is here called otherwise. */
static const struct {
    const char *name, *path;
} other_names[] = {
    {"router.port", "router.listen"},
    {"router.host", "router.listen"},
    {"port", "router.listen"},
    {"listen", "router.listen"},
    {"prefill.replicas", "prefill.workers"},
    {"decode.replicas", "decode.workers"},
    {"prefill.block_size", "kv.block_tokens"},
    {"decode.block_size", "kv.block_tokens"},
    {"kv.block_size", "kv.block_tokens"},
    {"block_size", "kv.block_tokens"},
    {"name", "cluster"},
    {"model.file", "model.path"},
    {"model.alias", "model.aliases"},
    {"model.context_length", "model.context"},
    {"model.max_model_len", "model.context"},
    {"prefill.pin_threads", "pin_threads"},
    {"decode.pin_threads", "pin_threads"},
    {"prefill.tp", "prefill.tensor_parallel"},
    {"decode.tp", "decode.tensor_parallel"},
    {"prefill.tensor_parallel_size", "prefill.tensor_parallel"},
    {"decode.tensor_parallel_size", "decode.tensor_parallel"},
    {"prefill.chunk_size", "prefill.chunk_tokens"},
    {"speculative", "decode.speculative"},
    {"decode.speculative.tokens", "decode.speculative.draft_tokens"},
    {"decode.speculative.num_speculative_tokens", "decode.speculative.draft_tokens"},
    {"decode.speculative.prompt_lookup_min", "decode.speculative.ngram_min"},
    {"decode.speculative.prompt_lookup_max", "decode.speculative.ngram_max"},
    {"decode.speculative.model", "decode.speculative.draft_model"},
};

int pd_schema_find(const char *path)
{
    for (size_t i = 0; i < pd_schema_count; i++) {
        if (strcmp(pd_schema[i].path, path) == 0)
            return (int)i;
    }
    return -1;
}

bool pd_schema_is_section(const char *path)
{
    size_t len = strlen(path);

    for (size_t i = 0; i < pd_schema_count; i++) {
        if (strncmp(pd_schema[i].path, path, len) == 0 && pd_schema[i].path[len] == '.')
            return true;
    }
    return false;
}

/* The name one level below prefix ("" or "router.") in a key's path; false when it is elsewhere. */
static bool child_name(const char *path, const char *prefix, char out[PD_KEY_NAME_MAX])
{
    size_t prefix_len = strlen(prefix);

    if (strncmp(path, prefix, prefix_len) != 0)
        return false;
    size_t len = strcspn(path + prefix_len, ".");
    pd_assert(len < PD_KEY_NAME_MAX);
    memcpy(out, path + prefix_len, len);
    out[len] = '\0';
    return true;
}

bool pd_schema_nearest(const char *prefix, const char *name, char out[PD_KEY_NAME_MAX])
{
    uint32_t best = strlen(name) <= 3 ? 2 : 3; /* fewer edits than this */
    bool found = false;

    for (size_t i = 0; i < pd_schema_count; i++) {
        char child[PD_KEY_NAME_MAX];
        if (!child_name(pd_schema[i].path, prefix, child))
            continue;
        uint32_t distance = pd_scalar_distance(child, name);
        if (distance < best) {
            best = distance;
            memcpy(out, child, sizeof child);
            found = true;
        }
    }
    return found;
}

void pd_schema_elsewhere(const char *name, pd_buf *out)
{
    for (size_t i = 0; i < pd_schema_count; i++) {
        const char *path = pd_schema[i].path;
        for (const char *at = path;; at++) {
            size_t len = strcspn(at, ".");
            char whole[PD_KEY_PATH_MAX + 2];
            snprintf(whole, sizeof whole, "'%.*s'", (int)(at + len - path), path);
            if (len == strlen(name) && strncmp(at, name, len) == 0 &&
                strstr(pd_buf_text(out), whole) == NULL)
                pd_buf_printf(out, "%s%s", out->len != 0 ? ", " : "", whole);
            at += len;
            if (at[0] == '\0')
                break;
        }
    }
}

void pd_schema_list(const char *prefix, pd_buf *out)
{
    char before[PD_KEY_NAME_MAX] = "";

    for (size_t i = 0; i < pd_schema_count; i++) {
        char child[PD_KEY_NAME_MAX];
        if (!child_name(pd_schema[i].path, prefix, child) || strcmp(child, before) == 0)
            continue;
        pd_buf_printf(out, "%s%s", out->len != 0 ? ", " : "", child);
        memcpy(before, child, sizeof before);
    }
}

const char *pd_schema_other_name(const char *path)
{
    uint32_t best = strlen(path) > 8 ? 3 : 1; /* fewer edits than this: a typo in it is known too */
    const char *here = NULL;

    for (size_t i = 0; i < sizeof other_names / sizeof other_names[0]; i++) {
        uint32_t distance = pd_scalar_distance(other_names[i].name, path);
        if (distance < best) {
            best = distance;
            here = other_names[i].path;
        }
    }
    return here;
}
