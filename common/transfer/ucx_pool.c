#include "common/transfer/ucx_pool.h"

#include "common/base/log.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = PD_CARRIER_PAGE };

uint64_t pd_ucx_probe_offset(uint64_t piece_bytes)
{
    return (piece_bytes + PAGE - 1) / PAGE * PAGE;
}

ucs_memory_type_t pd_ucx_pool_type(const pd_ucx_pool *pool)
{
    return pool->kind == PD_MEMORY_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

unsigned char *pd_ucx_pool_at(const pd_ucx_pool *pool, uint64_t offset, uint32_t *piece_out)
{
    uint32_t piece = (uint32_t)(offset / pool->piece_bytes);
    pd_assert(piece < pool->pieces);
    *piece_out = piece;
    return pool->piece[piece].memory + offset % pool->piece_bytes;
}

bool pd_ucx_pool_holds(const pd_ucx_pool *pool, uint64_t offset, uint64_t bytes)
{
    return offset < pool->bytes && bytes <= pool->piece_bytes - offset % pool->piece_bytes;
}

/* ---- make ---- */

/* UCX takes ordinary memory when it gets none that can be shared, and says nothing. */
static bool is_shared_memory(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    if (maps == NULL)
        return false;
    char line[512];
    bool shared = false;
    while (!shared && fgets(line, sizeof line, maps) != NULL) {
        unsigned long long start, end;
        char mode[5];
        if (sscanf(line, "%llx-%llx %4s", &start, &end, mode) == 3 && (uintptr_t)address >= start &&
            (uintptr_t)address < end)
            shared = mode[3] == 's';
    }
    fclose(maps);
    return shared;
}

static pd_status register_piece(pd_ucx_pool *pool, uint32_t piece)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = pool->piece[piece].memory,
        .length = pd_transfer_pool_room(pool->piece_bytes),
        .memory_type = pd_ucx_pool_type(pool),
    };
    pd_status status = pd_gpus_use(pool->gpus, piece);
    if (status != PD_OK)
        return status;
    ucs_status_t ucs = ucp_mem_map(pool->context, &params, &pool->piece[piece].handle);
    if (ucs == UCS_OK)
        return PD_OK;
    pool->piece[piece].handle = NULL;
    pd_log_error("msg=\"transfer: the KV pool cannot be registered with UCX: %s\" kind=%s "
                 "piece=%u piece_bytes=%llu",
                 ucs_status_string(ucs), pd_memory_kind_name(pool->kind), piece,
                 (unsigned long long)pool->piece_bytes);
    return PD_E_UNSUPPORTED;
}

static pd_status allocate_pool(pd_ucx_pool *pool)
{
    pd_ucx_piece *piece = &pool->piece[0];
    uint64_t bytes = pd_transfer_pool_room(pool->bytes);
    uint64_t machine_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    ucs_status_t ucs = UCS_ERR_NO_MEMORY;
    /* the kernel would promise more than there is, and end the process when it is used */
    if (pool->bytes <= machine_bytes) {
        ucp_mem_map_params_t params = {
            .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
            .length = bytes,
            .flags = UCP_MEM_MAP_ALLOCATE,
        };
        ucs = ucp_mem_map(pool->context, &params, &piece->handle);
    }
    if (ucs != UCS_OK) {
        piece->handle = NULL;
        pd_log_error("msg=\"transfer: no memory for the KV pool: %s\" pool_bytes=%llu "
                     "machine_bytes=%llu",
                     ucs_status_string(ucs), (unsigned long long)pool->bytes,
                     (unsigned long long)machine_bytes);
        return PD_E_NOMEM;
    }
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};
    ucs = ucp_mem_query(piece->handle, &attr);
    if (ucs != UCS_OK || attr.length < bytes || (uintptr_t)attr.address % PAGE != 0) {
        pd_log_error("msg=\"ucx: the pool it made is not as asked for: %s\" length=%zu",
                     ucs_status_string(ucs), attr.length);
        return PD_E_INTERNAL;
    }
    piece->memory = attr.address;
    bool shared = is_shared_memory(piece->memory);
    if (!shared) /* new pages of a shared segment are zero; UCX's heap may hand out used ones */
        memset(piece->memory, 0, bytes);
    if (!shared && !pool->messages)
        pd_log_warn("msg=\"transfer: the KV pool is not in shared memory, transfers within this "
                    "host will be slower: raise kernel.shmmax or /dev/shm\" pool_bytes=%llu",
                    (unsigned long long)pool->bytes);
    return PD_OK;
}

pd_status pd_ucx_pool_make(ucp_context_h context, const pd_transfer_options *options, pd_gpus *gpus,
                           bool messages, pd_ucx_pool *pool)
{
    *pool = (pd_ucx_pool){
        .context = context,
        .gpus = gpus,
        .bytes = options->pool_bytes,
        .piece_bytes = options->pool_bytes / options->pieces,
        .pieces = options->pieces,
        .kind = options->pool_kind,
        .given = options->piece_memory != NULL,
        .messages = messages,
    };
    if (!pool->given)
        return allocate_pool(pool);
    pd_status status = PD_OK;
    for (uint32_t i = 0; i < pool->pieces; i++)
        pool->piece[i].memory = options->piece_memory[i];
    bool registered = pool->kind == PD_MEMORY_HOST || !messages;
    for (uint32_t i = 0; registered && status == PD_OK && i < pool->pieces; i++)
        status = register_piece(pool, i);
    return status;
}

void pd_ucx_pool_end(pd_ucx_pool *pool)
{
    for (uint32_t i = 0; i < pool->pieces; i++) {
        if (pool->piece[i].handle != NULL)
            ucp_mem_unmap(pool->context, pool->piece[i].handle);
    }
    pool->pieces = 0;
}

/* ---- the address ---- */

/* A piece from outside that is shared memory: peers map it by its file. */
static pd_shared_file file_of_piece(const pd_ucx_pool *pool, uint32_t piece)
{
    pd_shared_file file = {0};

    if (pool->given && pool->kind == PD_MEMORY_HOST && !pool->messages &&
        pd_shared_file_of(pool->piece[piece].memory, pool->piece_bytes, &file) != PD_OK)
        pd_log_warn("msg=\"transfer: the KV pool is no shared memory that peers could map: "
                    "transfers within this host are slow\" piece=%u piece_bytes=%llu",
                    piece, (unsigned long long)pool->piece_bytes);
    return file;
}

/* *key_out is NULL for a piece that UCX does not know. */
static pd_status pack_key(const pd_ucx_pool *pool, uint32_t piece, void **key_out,
                          size_t *bytes_out)
{
    *key_out = NULL;
    *bytes_out = 0;
    if (pool->piece[piece].handle == NULL)
        return PD_OK;
    pd_status status = pd_gpus_use(pool->gpus, piece);
    if (status != PD_OK)
        return status;
    ucs_status_t ucs = ucp_rkey_pack(pool->context, pool->piece[piece].handle, key_out, bytes_out);
    if (ucs == UCS_OK)
        return PD_OK;
    pd_log_error("msg=\"ucx: no key of the pool: %s\" piece=%u", ucs_status_string(ucs), piece);
    return PD_E_UNSUPPORTED;
}

pd_status pd_ucx_pool_pack(const pd_ucx_pool *pool, unsigned char *to, size_t room,
                           size_t *bytes_out)
{
    size_t used = pool->pieces * sizeof(pd_ucx_piece_address);
    if (used > room) {
        pd_log_error("msg=\"ucx: no room for the pool in an address\" pieces=%u", pool->pieces);
        return PD_E_UNSUPPORTED;
    }
    for (uint32_t i = 0; i < pool->pieces; i++) {
        void *key;
        size_t key_bytes;
        pd_status status = pack_key(pool, i, &key, &key_bytes);
        if (status != PD_OK)
            return status;
        bool fits = key_bytes <= room - used;
        if (fits) {
            pd_ucx_piece_address head = {
                .base = (uintptr_t)pool->piece[i].memory,
                .key_bytes = (uint32_t)key_bytes,
                .file = file_of_piece(pool, i),
            };
            memcpy(to + i * sizeof head, &head, sizeof head);
            if (key != NULL)
                memcpy(to + used, key, key_bytes);
            used += key_bytes;
        } else
            pd_log_error("msg=\"ucx: the pool's keys are too long for an address\" piece=%u "
                         "key_bytes=%zu",
                         i, key_bytes);
        if (key != NULL)
            ucp_rkey_buffer_release(key);
        if (!fits)
            return PD_E_UNSUPPORTED;
    }
    *bytes_out = used;
    return PD_OK;
}

/* ---- a peer's ---- */

static pd_ucx_piece_address head_of(const unsigned char *bytes, uint32_t piece)
{
    pd_ucx_piece_address head;
    memcpy(&head, bytes + piece * sizeof head, sizeof head);
    return head;
}

bool pd_ucx_target_fits(const unsigned char *bytes, size_t len, pd_carrier_pool shape)
{
    size_t heads = shape.pieces * sizeof(pd_ucx_piece_address);
    if (len < heads)
        return false;
    size_t rest = len - heads;
    for (uint32_t i = 0; i < shape.pieces; i++) {
        pd_ucx_piece_address head = head_of(bytes, i);
        if (head.key_bytes > rest || head.base == 0)
            return false;
        rest -= head.key_bytes;
    }
    return rest == 0;
}

void pd_ucx_target_init(pd_ucx_target *target, const unsigned char *bytes, pd_carrier_pool shape)
{
    *target = (pd_ucx_target){.piece_bytes = shape.bytes / shape.pieces, .pieces = shape.pieces};
    for (uint32_t i = 0; i < shape.pieces; i++)
        target->piece[i].base = head_of(bytes, i).base;
}

void pd_ucx_target_unmap(pd_ucx_target *target)
{
    for (uint32_t i = 0; i < target->pieces; i++) {
        pd_ucx_target_piece *piece = &target->piece[i];
        if (piece->mapped_by_file)
            munmap(piece->mapped, target->piece_bytes);
        piece->mapped = NULL;
        piece->mapped_by_file = false;
    }
    target->mapped = false;
}

bool pd_ucx_target_map(pd_ucx_target *target, const unsigned char *bytes)
{
    for (uint32_t i = 0; i < target->pieces; i++) {
        pd_ucx_piece_address head = head_of(bytes, i);
        void *memory;
        if (head.file.inode == 0 ||
            pd_shared_file_map(&head.file, target->piece_bytes, &memory) != PD_OK) {
            pd_ucx_target_unmap(target);
            return false;
        }
        target->piece[i].mapped = memory;
        target->piece[i].mapped_by_file = true;
    }
    target->mapped = true;
    return true;
}

pd_status pd_ucx_target_unpack(pd_ucx_target *target, ucp_ep_h ep, const unsigned char *bytes)
{
    const unsigned char *key = bytes + target->pieces * sizeof(pd_ucx_piece_address);
    for (uint32_t i = 0; i < target->pieces; i++) {
        uint32_t key_bytes = head_of(bytes, i).key_bytes;
        ucs_status_t ucs = key_bytes == 0 ? UCS_ERR_INVALID_PARAM
                                          : ucp_ep_rkey_unpack(ep, key, &target->piece[i].key);
        if (ucs != UCS_OK) {
            target->piece[i].key = NULL;
            pd_log_error("msg=\"transfer: a peer's key to its pool cannot be used: %s\" piece=%u",
                         ucs_status_string(ucs), i);
            return PD_E_PEER;
        }
        key += key_bytes;
    }
    return PD_OK;
}

void pd_ucx_target_find(pd_ucx_target *target)
{
    target->mapped = true;
    for (uint32_t i = 0; i < target->pieces; i++) {
        void *mapped = NULL;
        if (ucp_rkey_ptr(target->piece[i].key, target->piece[i].base, &mapped) == UCS_OK)
            target->piece[i].mapped = mapped;
        else
            target->mapped = false;
    }
}

bool pd_ucx_target_by_cuda_ipc(const pd_ucx_target *target)
{
    enum { SAYS_SO = 21 }; /* the minor version whose cuda_ipc first maps a key on request */
    void *mapped;
    for (uint32_t i = 0; UCP_API_MINOR >= SAYS_SO && i < target->pieces; i++) {
        if (ucp_rkey_ptr(target->piece[i].key, target->piece[i].base, &mapped) != UCS_OK)
            return false;
    }
    return true;
}

void pd_ucx_target_end(pd_ucx_target *target)
{
    for (uint32_t i = 0; i < target->pieces; i++) {
        if (target->piece[i].key != NULL)
            ucp_rkey_destroy(target->piece[i].key);
        target->piece[i].key = NULL;
    }
    pd_ucx_target_unmap(target);
    target->pieces = 0;
}
