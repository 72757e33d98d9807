#include "common/transfer/ucx_context.h"

#include "common/base/log.h"

#include <net/if.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

/* ---- UCX's own log ---- */

/* What UCX prints when a peer dies is no news to an operator, so its errors are our warnings. */
static ucs_log_func_rc_t log_line(const char *file, unsigned line, const char *function,
                                  ucs_log_level_t level,
                                  const ucs_log_component_config_t *component, const char *format,
                                  va_list args)
{
    (void)function;
    (void)component;
    if (level == UCS_LOG_LEVEL_FATAL || level > UCS_LOG_LEVEL_WARN)
        return UCS_LOG_FUNC_RC_CONTINUE;
    char text[256];
    vsnprintf(text, sizeof text, format, args);
    for (char *at = text; *at != '\0'; at++) {
        if (*at == '"')
            *at = '\'';
    }
    const char *name = strrchr(file, '/');
    pd_log_warn("msg=\"ucx: %s\" at=%s:%u", text, name == NULL ? file : name + 1, line);
    return UCS_LOG_FUNC_RC_STOP;
}

static ucs_log_func_rc_t log_nothing(const char *file, unsigned line, const char *function,
                                     ucs_log_level_t level,
                                     const ucs_log_component_config_t *component,
                                     const char *format, va_list args)
{
    (void)file, (void)line, (void)function, (void)level, (void)component, (void)format, (void)args;
    return UCS_LOG_FUNC_RC_STOP;
}

static pthread_once_t prepare_once = PTHREAD_ONCE_INIT;

/* Once in a process. UCX may have taken SEGV and others for itself when it was loaded, as its build
 * and environment say; they are ours. It grumbles about those it had not taken. */
static void prepare_library(void)
{
    static const int taken[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    ucs_log_push_handler(log_nothing);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        ucs_debug_disable_signal(taken[i]);
    ucs_log_pop_handler();
    ucs_log_push_handler(log_line);
}

/* ---- configuration ---- */

typedef struct setting {
    const char *key, *value;
} setting;

static pd_status configure(ucp_config_t *config, const setting *settings, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        ucs_status_t status = ucp_config_modify(config, settings[i].key, settings[i].value);
        if (status != UCS_OK) {
            pd_log_error("msg=\"ucx: setting refused: %s\" key=%s value=%s",
                         ucs_status_string(status), settings[i].key, settings[i].value);
            return PD_E_UNSUPPORTED;
        }
    }
    return PD_OK;
}

/* A program built for one UCX and started with another one's libraries: their structures differ. */
static pd_status check_version(void)
{
    unsigned major = 0, minor = 0, release = 0;
    ucp_get_version(&major, &minor, &release);
    if (major == UCP_API_MAJOR && minor == UCP_API_MINOR)
        return PD_OK;
    pd_log_error("msg=\"ucx: built for another version than the one that was loaded\" "
                 "built=%u.%u loaded=%u.%u.%u",
                 UCP_API_MAJOR, UCP_API_MINOR, major, minor, release);
    return PD_E_MISMATCH;
}

/* 1.13 knows the settings of its tcp transport by their short names here, later ones by the
 * variable's. */
#define TCP_KEY(name) (UCP_API_MINOR < 14 ? (name) : "TCP_" name)
#define COUNT(array)  (sizeof(array) / sizeof *(array))

/* The transports that may be used, as UCX's setting TLS. Names that this UCX has not are passed
 * over. */
static const char *lanes_for(const char *transport, bool gpu)
{
    static const struct {
        const char *transport, *host, *gpu;
    } lanes[] = {
        /* a GPU's memory within a host: cuda_ipc carries, the others connect */
        {"shm", "posix,sysv,cma,self", "cuda_ipc,cuda_copy,posix,sysv,cma,self"},
        /* without "self", so that a device that is down fails here and not at the first
         * connection; a GPU's bytes are messages of ours, and UCX never sees where they lie */
        {"tcp", "tcp", "tcp"},
        {"rdma", "posix,sysv,cma,self,rc,dc",
         "cuda_ipc,cuda_copy,gdr_copy,posix,sysv,cma,self,rc,dc"},
        {"auto", "posix,sysv,cma,self,tcp", "cuda_ipc,cuda_copy,posix,sysv,cma,self,tcp"},
    };
    size_t i = 0;
    while (strcmp(lanes[i].transport, transport) != 0) {
        i++;
        pd_assert(i < COUNT(lanes)); /* it was checked */
    }
    return gpu ? lanes[i].gpu : lanes[i].host;
}

static pd_status configure_transport(ucp_config_t *config, const pd_transfer_options *options)
{
    /* Shared memory takes part in connections that report failures only when told to; a dead peer
     * is noticed there by keepalive alone. */
    static const setting memory[] = {
        {"MM_ERROR_HANDLING", "y"},
        {"KEEPALIVE_INTERVAL", "1s"},
        /* memory that peers can map: their puts are plain copies */
        {"ALLOC_PRIO", "md:sysv,md:posix,thp,mmap,heap"},
    };
    /* On tcp short keepalives of UCX's own keep the kernel from seeing a cut link: leave them. */
    static const setting network[] = {
        {TCP_KEY("TX_SEG_SIZE"), "1m"},
        {TCP_KEY("RX_SEG_SIZE"), "1m"},
        /* What the kernel holds counts as sent, and nobody can overtake it: the kernel's own
         * choice is twice that and more, which a slow link carries for long. */
        {TCP_KEY("SNDBUF"), "1m"},
        /* no rendezvous: 1.22 prefers it early, and it is slower here (1.13 does not care) */
        {"RNDV_THRESH", "inf"},
    };
    bool gpu = options->pool_kind == PD_MEMORY_CUDA;
    bool tcp = strcmp(options->transport, "tcp") == 0;
    bool may_tcp = tcp || strcmp(options->transport, "auto") == 0;
    bool rdma = strcmp(options->transport, "rdma") == 0;
    const setting lanes = {"TLS", lanes_for(options->transport, gpu)};
    const char *device = options->device == NULL ? "lo" : options->device;
    const setting devices = {"NET_DEVICES", device};
    if (may_tcp && if_nametoindex(device) == 0) {
        pd_log_error("msg=\"transfer: no such network device: %m\" device=%s", device);
        return PD_E_UNSUPPORTED;
    }
    pd_status status = configure(config, &lanes, 1);
    if (status == PD_OK && !tcp)
        status = configure(config, memory, COUNT(memory));
    if (status == PD_OK && may_tcp)
        status = configure(config, network, COUNT(network));
    /* lo is no NIC, and nobody's choice: UCX takes those nearest to the memory */
    if (status == PD_OK && (may_tcp || (rdma && strcmp(device, "lo") != 0)))
        status = configure(config, &devices, 1);
    return status;
}

/* Debian's UCX, for one, knows host memory only. */
static bool knows_gpus(ucp_context_h context)
{
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    ucs_status_t ucs = ucp_context_query(context, &attr);

    return ucs == UCS_OK && (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

bool pd_ucx_knows_fabric(void)
{
    enum { FIRST_MINOR = 18 };
    return UCP_API_MINOR >= FIRST_MINOR;
}

static pd_status init(const pd_transfer_options *options, ucp_context_h *context_out)
{
    ucp_config_t *config;
    ucs_status_t ucs = ucp_config_read(NULL, NULL, &config);
    if (ucs != UCS_OK) {
        pd_log_error("msg=\"ucx: cannot read its configuration: %s\"", ucs_status_string(ucs));
        return PD_E_UNSUPPORTED;
    }
    pd_status status = configure_transport(config, options);
    if (status == PD_OK) {
        ucp_params_t params = {
            .field_mask = UCP_PARAM_FIELD_FEATURES,
            .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        };
        ucs = ucp_init(&params, config, context_out);
        if (ucs != UCS_OK) {
            *context_out = NULL;
            pd_log_error("msg=\"ucx: no such transport or device here: %s\" transport=%s device=%s",
                         ucs_status_string(ucs), options->transport,
                         options->device == NULL ? "(default)" : options->device);
            status = PD_E_UNSUPPORTED;
        }
    }
    ucp_config_release(config);
    return status;
}

pd_status pd_ucx_context_create(pd_transfer_options *options, ucp_context_h *context_out)
{
    bool by_ucx = options->pool_kind == PD_MEMORY_CUDA && strcmp(options->transport, "tcp") != 0;
    pd_status status = check_version();
    if (status != PD_OK)
        return status;
    pthread_once(&prepare_once, prepare_library);
    status = init(options, context_out);
    if (status != PD_OK || !by_ucx || knows_gpus(*context_out))
        return status;
    ucp_cleanup(*context_out);
    *context_out = NULL;
    if (strcmp(options->transport, "auto") != 0) {
        pd_log_error(
            "msg=\"ucx: this UCX has no support for GPU memory, where the KV pool lies: it "
            "needs the modules cuda_ipc and cuda_copy\" version=%s transport=%s",
            ucp_get_version_string(), options->transport);
        return PD_E_UNSUPPORTED;
    }
    pd_log_warn("msg=\"ucx: this UCX has no support for GPU memory, where the KV pool lies: its "
                "blocks go through host memory and tcp, which is slow\" version=%s",
                ucp_get_version_string());
    options->transport = "tcp";
    return init(options, context_out);
}
