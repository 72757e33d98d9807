#include "common/worker/setup.h"

#include "common/base/cpus.h"
#include "common/base/log.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ERRORS_BYTES = 1 << 16, CONTEXT_DEFAULT_MAX = 8192 };

static bool has_port(const char *endpoint)
{
    size_t len = strlen(endpoint);

    return strncmp(endpoint, "tcp:", 4) != 0 || len < 2 || strcmp(endpoint + len - 2, ":0") != 0;
}

static pd_status check_name(const pd_worker_setup *setup)
{
    const char *role = pd_role_name(setup->options->role->role), *name = setup->options->name;
    size_t len = strlen(role);

    if (strncmp(name, role, len) != 0 || name[len] != '-' ||
        !pd_deployment_has_service(&setup->deployment, name)) {
        pd_log_error("msg=\"the deployment has no such worker\" name=%s file=%s workers=%s-0..%u",
                     name, setup->options->file, role, setup->pool->workers - 1);
        return PD_E_INVALID;
    }
    if (!has_port(setup->deployment.router.control) || !has_port(setup->deployment.router.tokens) ||
        !has_port(setup->deployment.router.events)) {
        pd_log_error("msg=\"the router's endpoints have port 0: give the ports that it bound by "
                     "--set router.control=..., as kvferry up does\"");
        return PD_E_INVALID;
    }
    return PD_OK;
}

pd_status pd_worker_setup_read(const pd_worker_options *options, pd_worker_setup *setup)
{
    pd_buf errors;

    *setup = (pd_worker_setup){.options = options};
    pd_log_init(options->name, PD_LOG_INFO);
    pd_buf_init(&errors, ERRORS_BYTES);
    pd_status status = pd_deployment_load(options->file, options->sets, options->sets_count,
                                          &setup->deployment, &errors);
    if (status != PD_OK) {
        fputs(pd_buf_text(&errors), stderr);
        pd_log_error("msg=\"the deployment cannot be used\" file=%s status=%s", options->file,
                     pd_status_name(status));
        pd_buf_fini(&errors);
        return status;
    }
    pd_buf_fini(&errors);
    setup->deployed = true;
    setup->pool = options->role->role == PD_ROLE_PREFILL ? &setup->deployment.prefill
                                                         : &setup->deployment.decode;
    pd_log_init(options->name, setup->deployment.log_level);
    return check_name(setup);
}

/* A file that is cut off while it is mapped kills whoever reads on: say so, and end. */
static char bus_error_line[512 + 2 * PD_WEIGHTS_FOLDER_BYTES];

static void on_bus_error(int signal)
{
    ssize_t written = write(2, bus_error_line, strlen(bus_error_line));

    (void)signal;
    (void)written;
    _exit(1);
}

static void catch_bus_errors(const pd_worker_setup *setup)
{
    struct sigaction action = {.sa_handler = on_bus_error};

    snprintf(
        bus_error_line, sizeof bus_error_line,
        "level=error svc=%s msg=\"the model file, or the file of its packed weights, was cut off "
        "or became unreadable while in use\" path=%s folder=%s\n",
        setup->options->name, setup->deployment.model.path, setup->weights_folder);
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

static pd_status open_model(pd_worker_setup *setup)
{
    const char *cache_dir = setup->deployment.model.cache_dir;

    pd_weights_folder_choose(cache_dir, getenv("XDG_CACHE_HOME"), getenv("HOME"),
                             setup->weights_folder);
    catch_bus_errors(setup);
    pd_status status = pd_model_file_open(setup->deployment.model.path, &setup->model);
    if (status != PD_OK)
        return status;
    const pd_model_shape *shape = pd_model_file_shape(setup->model);
    setup->context = setup->deployment.model.context;
    if (setup->context == 0)
        setup->context =
            shape->context < CONTEXT_DEFAULT_MAX ? shape->context : CONTEXT_DEFAULT_MAX;
    if (setup->context > shape->context) {
        pd_log_error("msg=\"model.context is more than the model was made for\" context=%u "
                     "model=%u path=%s",
                     setup->context, shape->context, setup->deployment.model.path);
        return PD_E_INVALID;
    }
    return PD_OK;
}

static pd_status make_layout(pd_worker_setup *setup)
{
    const pd_model_shape *shape = pd_model_file_shape(setup->model);
    pd_kv_layout_options options = {
        .block_tokens = setup->deployment.kv.block_tokens,
        .group_layers = setup->deployment.kv.group_layers,
        .memory_bytes = setup->deployment.kv.memory_bytes,
        .ranks = setup->pool->tensor_parallel,
    };
    /* the schema allows no other */
    pd_assert(pd_kv_dtype_of(setup->deployment.kv.dtype, &options.dtype));
    pd_status status = pd_kv_layout_make(shape, &options, &setup->layout);

    if (status != PD_OK)
        pd_log_error("msg=\"no KV layout for this model and kv.*\" status=%s memory_bytes=%llu "
                     "block_tokens=%u",
                     pd_status_name(status), (unsigned long long)options.memory_bytes,
                     options.block_tokens);
    return status;
}

/* ---- the place in the machine ---- */

/* What this process may run on; a set that cannot be told (more CPUs than cpu_set_t holds) is one
 * CPU, and nothing is bound. */
static cpu_set_t usable_cpus(void)
{
    cpu_set_t cpus;

    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) {
        pd_log_warn("msg=\"which CPUs may be used cannot be told: %m\"");
        CPU_ZERO(&cpus);
        CPU_SET(0, &cpus);
    }
    return cpus;
}

static bool on_cores(const pd_deployment_pool *pool)
{
    return strncmp(pool->device, "cpu", 3) == 0;
}

/* Threads of each worker on the host's cores: prefill-0, prefill-1, ..., decode-0, ... Returns how
 * many they are; *own_out is this one's place. */
static uint32_t workers_on_cores(const pd_worker_setup *setup, uint32_t cpus,
                                 uint32_t threads_out[PD_PLACEMENT_WORKERS_MAX], uint32_t *own_out)
{
    const pd_deployment *d = &setup->deployment;
    const pd_deployment_pool *const pools[] = {&d->prefill, &d->decode};
    uint64_t own = strtoull(strrchr(setup->options->name, '-') + 1, NULL, 10);
    uint32_t count = 0;

    for (int i = 0; i < 2; i++) {
        bool ours = pools[i] == setup->pool;
        for (uint32_t n = 0; n < pools[i]->workers && (on_cores(pools[i]) || ours); n++) {
            if (ours && n == own)
                *own_out = count;
            threads_out[count++] =
                pd_deployment_threads(d, pools[i], cpus) * pools[i]->tensor_parallel;
        }
    }
    return count;
}

/* Ranks start before rank 0 takes its place, so that each finds its own in the whole machine. */
static pd_status take_place(pd_worker_setup *setup)
{
    uint32_t workers[PD_PLACEMENT_WORKERS_MAX], own = 0;
    pd_worker_engine_options engine = {.device = setup->pool->device,
                                       .ranks = setup->pool->tensor_parallel};
    pd_placement_options options = {.sysfs = "/sys",
                                    .usable = usable_cpus(),
                                    .quota = pd_cpus_quota("") > 0,
                                    .pin_threads = setup->deployment.pin_threads,
                                    .carries = pd_net_has_address};
    char pins[PD_PLACEMENT_CPUS_BYTES];
    char cpus[PD_PLACEMENT_CPUS_BYTES], nic[PD_PLACEMENT_NIC_BYTES], node[16] = "unknown";
    uint32_t cpus_usable = pd_cpus_usable();
    pd_device_place device;

    if (setup->place.ranks > 1)
        engine.place = &setup->place;
    setup->threads = pd_deployment_threads(&setup->deployment, setup->pool, cpus_usable);
    options.threads = setup->threads;
    pd_status status = setup->options->engine->locate(&engine, &device);
    if (status == PD_OK && device.bus[0] != '\0') {
        options.device = &device;
    } else if (status == PD_OK || status == PD_E_NOT_FOUND) { /* an emulated one is on the cores */
        uint32_t count = workers_on_cores(setup, cpus_usable, workers, &own);
        options.before = workers;
        options.before_count = own;
        options.after = &workers[own + 1];
        options.after_count = count - own - 1;
        options.rank = setup->place.rank;
        options.ranks = setup->pool->tensor_parallel;
        options.threads *= options.ranks;
    } else {
        return status;
    }
    pd_placement *placement = &setup->placement;
    pd_placement_choose(&options, placement);
    pd_placement_apply(placement);
    pd_placement_cpus(placement, cpus);
    pd_placement_nic(placement, nic);
    pd_placement_pins(placement, pins);
    if (placement->numa_node >= 0)
        snprintf(node, sizeof node, "%d", placement->numa_node);
    pd_log_info("msg=\"placed\" gpu=%s numa_node=%s nic=\"%s\" nic_is=\"%s\" cpus=%s bound=%d "
                "near_memory=%d threads=%u cpus_usable=%u pinned=%s",
                options.device == NULL ? "none" : placement->bus, node, nic,
                pd_pci_distance_name(placement->nic_distance), cpus, placement->bound,
                placement->near_memory, placement->threads, cpus_usable,
                pins[0] != '\0' ? pins : "none");
    return PD_OK;
}

/* With rdma, auto is the NIC nearest to the one GPU (or the cores); where there are several, UCX
 * has to take one for each, which is what "lo" says there. */
static const char *rdma_device(pd_worker_setup *setup)
{
    const pd_placement *placement = &setup->placement;

    if (placement->rdma[0] == '\0' || !placement->nic_up || setup->pool->tensor_parallel > 1)
        return "lo";
    snprintf(setup->nic_port, sizeof setup->nic_port, "%s:1", placement->rdma);
    return setup->nic_port;
}

/* With tcp, auto is the nearest network device where workers are on several hosts, that is, where
 * the router is not reached by loopback; else nobody listens on a network. */
static const char *network_device(pd_worker_setup *setup)
{
    static const char *const local[] = {"tcp://127.", "tcp://localhost", "tcp://[::1]"};
    const char *device = setup->deployment.transfer.device;
    const char *control = setup->deployment.router.control;
    bool far = strncmp(control, "tcp://", 6) == 0;

    if (strcmp(device, "auto") != 0)
        return device;
    if (strcmp(setup->deployment.transfer.transport, "rdma") == 0)
        return rdma_device(setup);
    for (size_t i = 0; i < sizeof local / sizeof *local; i++)
        far = far && strncmp(control, local[i], strlen(local[i])) != 0;
    if (!far || strcmp(setup->deployment.transfer.transport, "shm") == 0)
        return "lo";
    if (setup->placement.net_carries)
        return setup->placement.net;
    pd_log_warn(
        "msg=\"no network device near this worker is up and has an address: KV goes over lo, "
        "which other hosts do not reach; transfer.device names one\"");
    return "lo";
}

static pd_status open_transfer(pd_worker_setup *setup)
{
    pd_worker_pool *pool = &setup->pool_memory;
    pd_status status = setup->options->engine->pool(
        setup->engine, pd_transfer_pool_room(setup->layout.rank_bytes), pool);

    if (status != PD_OK)
        return status;
    if (pool->kind == PD_MEMORY_HOST && setup->pool_reach == PD_REACH_FABRIC) {
        pd_log_error("msg=\"transfer.memory: fabric is for a KV pool in a GPU's memory\" device=%s",
                     setup->pool->device);
        return PD_E_UNSUPPORTED;
    }
    pd_transfer_options options = {
        .backend = setup->deployment.transfer.backend,
        .transport = setup->deployment.transfer.transport,
        .device = network_device(setup),
        .pool_bytes = setup->layout.pool_bytes,
        .pool = setup->ranks != NULL ? pd_ranks_pool(setup->ranks) : NULL,
        .pieces = pool->pieces,
        .piece_memory = pool->memory,
        .pool_kind = pool->kind,
        .peers_max = PD_WORKER_PEERS_MAX,
        .incarnation = setup->incarnation,
    };
    status = pd_transfer_create(&options, &setup->transfer);

    if (status != PD_OK) {
        if (status == PD_E_NOMEM)
            pd_log_error("msg=\"no memory for the transfer\" pool_bytes=%llu",
                         (unsigned long long)options.pool_bytes);
        return status;
    }
    catch_bus_errors(setup); /* a carrier may have taken the signal */
    return PD_OK;
}

/* With hung_after: 0s nobody is killed for standing still. */
static uint64_t rank_still_ns(const pd_worker_setup *setup)
{
    enum { LOST_TIMES = 2 }; /* a whole worker is given up after one */

    if (setup->deployment.heartbeat.hung_after_ns == 0)
        return 0;
    return LOST_TIMES * setup->deployment.heartbeat.lost_after_ns;
}

static bool speculates(const pd_worker_setup *setup)
{
    return setup->options->role->role == PD_ROLE_DECODE &&
           setup->deployment.speculative.method != PD_SPEC_OFF;
}

/* Rows that are sampled: with drafts, each of a sequence's. */
static uint32_t sampled_rows(const pd_worker_setup *setup, uint32_t rows_max)
{
    uint32_t each = 1 + (speculates(setup) ? setup->deployment.speculative.draft_tokens : 0);
    uint32_t rows = setup->pool->max_batch * each;

    return rows < rows_max ? rows : rows_max;
}

static pd_worker_engine_options engine_options(const pd_worker_setup *setup)
{
    const pd_deployment_pool *pool = setup->pool;
    uint32_t rows = pool->chunk_tokens > pool->max_batch ? pool->chunk_tokens : pool->max_batch;

    return (pd_worker_engine_options){
        .device = pool->device,
        .threads = setup->threads,
        .pins = setup->placement.pinned ? &setup->placement.pins : NULL,
        .context_max = setup->context,
        .rows_max = rows,
        .slices_max = pool->max_batch,
        .sampled_rows_max = sampled_rows(setup, rows),
        .ranks = pool->tensor_parallel,
        .pool_reach = setup->pool_reach,
        .rank_still_ns = rank_still_ns(setup),
        .weights_folder = setup->weights_folder[0] != '\0' ? setup->weights_folder : NULL,
        .weights_bytes_max = setup->deployment.model.cache_max_bytes,
    };
}

/* ---- ranks ---- */

/* What the ranks share; shared_bytes is 0 where there cannot be any (logged). */
static pd_ranks_memory ranks_memory(const pd_worker_setup *setup)
{
    pd_worker_engine_options options = engine_options(setup);
    bool seals = setup->deployment.transfer.seals, pool_own = false;
    uint64_t shared_bytes = setup->options->engine->shared_bytes(setup->model, &options,
                                                                 &setup->layout, seals, &pool_own);
    pd_hash128 model = pd_model_file_fingerprint(setup->model);
    const uint64_t agreed[] = {model.lo,
                               model.hi,
                               pd_kv_layout_fingerprint(&setup->layout),
                               setup->layout.blocks,
                               options.context_max,
                               options.rows_max,
                               options.slices_max,
                               options.sampled_rows_max,
                               seals};

    return (pd_ranks_memory){
        .ranks = options.ranks,
        .shared_bytes = shared_bytes,
        .pool_bytes = pool_own ? 0 : pd_transfer_pool_room(setup->layout.pool_bytes),
        .agreement = pd_hash64(agreed, sizeof agreed, 0),
    };
}

static pd_status start_ranks(pd_worker_setup *setup)
{
    enum { FIXED = 7 };
    const pd_worker_options *o = setup->options;
    const char *arguments[FIXED + 2 * PD_DEPLOYMENT_SETS_MAX] = {
        o->self, "-f", o->file, "--name", o->name, "--role", pd_role_name(o->role->role)};
    size_t count = FIXED;

    if (setup->pool->tensor_parallel == 1)
        return PD_OK;
    pd_ranks_memory memory = ranks_memory(setup);
    if (memory.shared_bytes == 0)
        return PD_E_UNSUPPORTED;
    for (size_t i = 0; i < o->sets_count; i++) {
        arguments[count++] = "--set";
        arguments[count++] = o->sets[i];
    }
    pd_status status = pd_ranks_create(&memory, arguments, count, &setup->ranks);
    if (status == PD_OK)
        setup->place = pd_ranks_place(setup->ranks);
    return status;
}

static pd_status await_ranks(pd_worker_setup *setup)
{
    if (setup->ranks == NULL)
        return PD_OK;
    pd_status status = pd_ranks_wait(setup->ranks);
    for (uint32_t rank = 1; status == PD_OK && rank < pd_ranks_count(setup->ranks); rank++)
        pd_log_info("msg=\"rank ready\" rank=%u pid=%lld", rank,
                    (long long)pd_ranks_pid(setup->ranks, rank));
    return status;
}

/* ---- the engine ---- */

static pd_status choose_reach(pd_worker_setup *setup)
{
    const char *memory = setup->deployment.transfer.memory;
    pd_memory_reach wanted = strcmp(memory, "fabric") == 0  ? PD_REACH_FABRIC
                             : strcmp(memory, "plain") == 0 ? PD_REACH_HOST
                                                            : PD_REACH_AUTO;

    return pd_transfer_reach(setup->deployment.transfer.backend,
                             setup->deployment.transfer.transport, wanted, &setup->pool_reach);
}

static pd_status create_engine(pd_worker_setup *setup)
{
    pd_worker_engine_options options = engine_options(setup);

    if (options.ranks > 1)
        options.place = &setup->place;
    pd_status status = setup->options->engine->create(setup->model, &options, &setup->engine);

    /* any other cause was told where it was seen, and is the last line that tells why we end */
    if (status == PD_E_NOMEM)
        pd_log_error("msg=\"no memory for the engine\" device=%s", options.device);
    return status;
}

static pd_status open_draft(pd_worker_setup *setup)
{
    pd_worker_engine_options options = engine_options(setup);

    if (!speculates(setup) || setup->deployment.speculative.method != PD_SPEC_DRAFT_MODEL)
        return PD_OK;
    return pd_draft_open(&setup->deployment, setup->model, setup->options->engine, &options,
                         &setup->draft);
}

static pd_status bind_engine(pd_worker_setup *setup, void *pool)
{
    pd_status status = setup->options->engine->bind(setup->engine, &setup->layout, pool,
                                                    setup->deployment.transfer.seals);

    if (status == PD_OK && setup->deployment.transfer.seals)
        setup->sealer = setup->options->engine->sealer(setup->engine);
    return status;
}

/* For tests alone, so two variables have to say so. */
static pd_status read_faults(pd_ship_faults *faults_out)
{
    const char *text = getenv("KVFERRY_FAULTS"), *allowed = getenv("KVFERRY_ALLOW_FAULTS");

    if (text != NULL && *text != '\0') {
        if (allowed == NULL || strcmp(allowed, "1") != 0) {
            pd_log_error("msg=\"KVFERRY_FAULTS makes shipped blocks wrong: without "
                         "KVFERRY_ALLOW_FAULTS=1 that is a mistake\" faults=%s",
                         text);
            return PD_E_INVALID;
        }
        pd_log_warn("msg=\"shipped blocks are made wrong on purpose\" faults=%s", text);
    }
    return pd_ship_faults_parse(text, faults_out);
}

static pd_status create_shipper(pd_worker_setup *setup)
{
    pd_shipper_options options = {
        .transfer = setup->transfer,
        .layout = &setup->layout,
        .incarnation = setup->incarnation,
        .peers_max = PD_WORKER_PEERS_MAX,
        .sealer = setup->sealer,
    };
    bool readable = setup->pool_memory.kind == PD_MEMORY_HOST && setup->pool_memory.pieces <= 1;
    pd_status status = read_faults(&options.faults);

    if (status != PD_OK)
        return status;
    if (!readable && (options.faults.every[PD_SHIP_FAULT_BIT] != 0 ||
                      options.faults.every[PD_SHIP_FAULT_OTHER] != 0)) {
        pd_log_error("msg=\"KVFERRY_FAULTS bit and other look at the KV pool's bytes, which lie in "
                     "GPUs' memory\"");
        return PD_E_UNSUPPORTED;
    }
    status = pd_ship_create(&options, &setup->shipper);
    if (status != PD_OK)
        pd_log_error("msg=\"no memory to ship with\"");
    return status;
}

pd_status pd_worker_setup_open(pd_worker_setup *setup)
{
    const pd_worker_engine_ops *engine = setup->options->engine;
    pd_status status = open_model(setup);

    setup->incarnation = pd_random_id();
    if (status == PD_OK)
        status = make_layout(setup);
    if (status == PD_OK)
        status = choose_reach(setup);
    if (status == PD_OK)
        status = start_ranks(setup); /* they load while this one does */
    if (status == PD_OK)
        status = take_place(setup);
    if (status == PD_OK)
        status = create_engine(setup);
    if (status == PD_OK)
        status = open_draft(setup);
    if (status == PD_OK)
        status = open_transfer(setup);
    if (status == PD_OK)
        status =
            bind_engine(setup, setup->pool_memory.pieces > 0 ? setup->pool_memory.memory[0]
                                                             : pd_transfer_pool(setup->transfer));
    if (status == PD_OK)
        status = await_ranks(setup);
    else if (setup->ranks != NULL)
        (void)pd_ranks_ended(setup->ranks); /* which may be why, and tells of it */
    if (status == PD_OK)
        status = create_shipper(setup);
    if (status != PD_OK)
        return status;
    pd_log_info("msg=\"loaded\" model=%s backend=\"%s\" ranks=%u threads=%u context=%u blocks=%u "
                "pool_bytes=%llu shared_bytes=%llu engine_bytes=%llu",
                setup->deployment.model.name, engine->backend(setup->engine), setup->layout.ranks,
                setup->threads, setup->context, setup->layout.blocks,
                (unsigned long long)setup->layout.pool_bytes,
                (unsigned long long)setup->place.shared_bytes,
                (unsigned long long)engine->bytes(setup->engine));
    return PD_OK;
}

pd_status pd_worker_setup_open_rank(pd_worker_setup *setup, const pd_rank_start *start)
{
    const pd_worker_engine_ops *engine = setup->options->engine;
    void *pool = NULL;
    pd_status status = open_model(setup);

    if (status == PD_OK)
        status = make_layout(setup);
    if (status == PD_OK && start->ranks != setup->layout.ranks) {
        pd_log_error("msg=\"the deployment has another number of ranks\" ranks=%u given=%u",
                     setup->layout.ranks, start->ranks);
        status = PD_E_MISMATCH;
    }
    if (status != PD_OK)
        return status;
    pd_ranks_memory memory = ranks_memory(setup);
    status = memory.shared_bytes == 0 ? PD_E_UNSUPPORTED
                                      : pd_rank_attach(start, &memory, &setup->place, &pool);
    if (status == PD_OK)
        status = take_place(setup);
    if (status == PD_OK)
        status = create_engine(setup);
    if (status == PD_OK)
        status = bind_engine(setup, pool);
    if (status != PD_OK)
        return status;
    pd_log_info("msg=\"loaded\" rank=%u of=%u backend=\"%s\" threads=%u pool_bytes=%llu "
                "engine_bytes=%llu",
                start->rank, start->ranks, engine->backend(setup->engine), setup->threads,
                (unsigned long long)setup->layout.rank_bytes,
                (unsigned long long)engine->bytes(setup->engine));
    return PD_OK;
}

void pd_worker_setup_close(pd_worker_setup *setup)
{
    /* The engine's thread first, for it writes the pool; the pool, which may be the engine's, goes
     * when nobody else has it any more. */
    if (setup->engine != NULL)
        setup->options->engine->stop(setup->engine);
    pd_draft_close(&setup->draft);
    pd_ship_destroy(setup->shipper);
    if (setup->transfer != NULL)
        pd_transfer_destroy(setup->transfer);
    pd_ranks_end(setup->ranks); /* they have parts of the pool, too */
    if (setup->engine != NULL)
        setup->options->engine->destroy(setup->engine);
    pd_ranks_destroy(setup->ranks);
    if (setup->model != NULL)
        pd_model_file_close(setup->model);
    if (setup->deployed)
        pd_deployment_fini(&setup->deployment);
    *setup = (pd_worker_setup){0};
}
