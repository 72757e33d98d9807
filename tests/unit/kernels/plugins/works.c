/* A backend that works as a GPU's does, seen from outside: its own copies of common's modules, a
 * pool that only it can allocate, two devices. It computes with the host's. */

#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/model/host.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int probe(uint32_t device, char *reason, size_t reason_size)
{
    snprintf(reason, reason_size, "device %u of 2", device);
    return device < 2 ? 100 : 0;
}

static char worker[64]; /* its name */

static void attach(const char *service, pd_log_level level)
{
    snprintf(worker, sizeof worker, "%s", service);
    pd_log_init(service, level);
    pd_log_info("msg=\"attached\"");
}

/* On a bus that no machine has, and the node that all have. */
static pd_status locate(const kern_backend_options *options, pd_device_place *place_out)
{
    *place_out = (pd_device_place){.numa_node = 0};
    snprintf(place_out->bus, sizeof place_out->bus, "ffff:1d:00.%u",
             options->device + options->rank);
    return PD_OK;
}

static pd_status create(const pd_model_file *file, const kern_backend_options *options,
                        kern_loaded **model_out)
{
    kern_backend_options host = *options;

    host.device = 0;
    return kern_backend_host.create(file, &host, model_out);
}

static const char *describe(const kern_loaded *model)
{
    (void)model;
    return "cuda the host in disguise";
}

static void destroy(kern_loaded *model)
{
    kern_backend_host.destroy(model);
}

static uint64_t bytes(const kern_loaded *model)
{
    return kern_backend_host.bytes(model);
}

/* The device fails for good at the next step once there is a file KVFERRY_TEST_BREAK. */
static atomic_bool is_broken;

static const char *broken(const kern_loaded *model)
{
    (void)model;
    return atomic_load(&is_broken) ? "an illegal memory access was encountered" : NULL;
}

/* Shared memory, so that other workers can map it. Its size and file lie in a page before it. */
enum { PAGE = 4096 };
typedef struct pool_head {
    uint64_t bytes;
    int fd;
} pool_head;

static void *pool_memory;

static pd_status pool_alloc(kern_loaded *model, uint64_t pool_bytes, void **pieces_out)
{
    pool_head head = {.bytes = pool_bytes + PAGE, .fd = memfd_create("pool", MFD_CLOEXEC)};
    char *memory = MAP_FAILED;

    (void)model;
    if (head.fd >= 0 && ftruncate(head.fd, (off_t)head.bytes) == 0)
        memory = mmap(NULL, head.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, head.fd, 0);
    if (memory == MAP_FAILED) {
        close(head.fd);
        return PD_E_NOMEM;
    }
    memcpy(memory, &head, sizeof head);
    *pieces_out = pool_memory = memory + PAGE;
    return PD_OK;
}

static void pool_free(kern_loaded *model)
{
    pool_head head;

    (void)model;
    memcpy(&head, (char *)pool_memory - PAGE, sizeof head);
    munmap((char *)pool_memory - PAGE, head.bytes);
    close(head.fd);
}

static pd_status bind(kern_loaded *model, const pd_kv_layout *layout, void *pool, bool seals)
{
    return kern_backend_host.bind(model, layout, pool, seals);
}

/* Fails as long as there is a file KVFERRY_TEST_FAIL.WORKER, and is not lost: "nomem" and
 * "internal" every step, "token N" those with that token, "check" the checks of what has landed,
 * "seal" the seals of what leaves. */
static bool fails(const char *word, char *rest, size_t rest_size)
{
    const char *where = getenv("KVFERRY_TEST_FAIL");
    char path[512], text[64] = "";

    snprintf(path, sizeof path, "%s.%s", where == NULL ? "" : where, worker);
    FILE *file = where == NULL ? NULL : fopen(path, "r");

    if (file == NULL)
        return false;
    if (fgets(text, sizeof text, file) == NULL)
        text[0] = '\0';
    fclose(file);
    if (strncmp(text, word, strlen(word)) != 0)
        return false;
    snprintf(rest, rest_size, "%s", text + strlen(word));
    return true;
}

static bool has_token(const kern_backend_step *what, uint32_t token)
{
    for (uint32_t i = 0; i < what->slices_count; i++) {
        for (uint32_t j = 0; j < what->slices[i].slice.count; j++) {
            if (what->slices[i].slice.tokens[j] == token)
                return true;
        }
    }
    return false;
}

static void last_error(const kern_loaded *model, char *text, size_t text_size)
{
    char rest[64];

    (void)model;
    bool failed = fails("nomem", rest, sizeof rest) || fails("internal", rest, sizeof rest) ||
                  fails("check", rest, sizeof rest) || fails("seal", rest, sizeof rest);
    snprintf(text, text_size, "%s", failed ? "a copy failed, as the test has it" : "");
}

static pd_status step(kern_loaded *model, const kern_backend_step *what)
{
    char rest[64];

    const char *path = getenv("KVFERRY_TEST_BREAK");

    if (path != NULL && unlink(path) == 0)
        atomic_store(&is_broken, true);
    if (fails("nomem", rest, sizeof rest))
        return PD_E_NOMEM;
    if (fails("internal", rest, sizeof rest))
        return PD_E_INTERNAL;
    if (fails("token", rest, sizeof rest) && has_token(what, (uint32_t)strtoul(rest, NULL, 10)))
        return PD_E_INTERNAL;
    return atomic_load(&is_broken) ? PD_E_INTERNAL : kern_backend_host.step(model, what);
}

static pd_status seal(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                      uint64_t *seals_out)
{
    char rest[64];

    if (fails("seal", rest, sizeof rest))
        return PD_E_INTERNAL;
    return kern_backend_host.seal(model, items, count, seals_out);
}

static pd_status check(kern_loaded *model, const pd_seal_item *items, uint32_t count,
                       const uint64_t *seals, uint32_t *bad_out)
{
    char rest[64];

    if (fails("check", rest, sizeof rest))
        return PD_E_INTERNAL;
    return kern_backend_host.check(model, items, count, seals, bad_out);
}

static uint64_t shared_bytes(const pd_model_shape *shape, const kern_backend_options *options,
                             const pd_kv_layout *layout, bool seals)
{
    (void)shape, (void)options, (void)layout, (void)seals;
    return 0; /* its pool is this process' alone */
}

const kern_backend kern_backend_plugin = {
    .abi = KERN_BACKEND_ABI,
    .struct_bytes = sizeof(kern_backend),
    .name = "cuda",
    .pool_kind = PD_MEMORY_HOST,
    .pool_own = true,
    .probe = probe,
    .shared_bytes = shared_bytes,
    .attach = attach,
    .locate = locate,
    .create = create,
    .destroy = destroy,
    .describe = describe,
    .bytes = bytes,
    .broken = broken,
    .last_error = last_error,
    .pool_alloc = pool_alloc,
    .pool_free = pool_free,
    .bind = bind,
    .step = step,
    .seal = seal,
    .check = check,
};
