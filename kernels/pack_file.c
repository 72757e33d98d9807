#include "kernels/pack_file.h"

#include "common/base/mem.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

enum { PAGE_BYTES = 4096, THREADS_MAX = 8, CHUNKS_A_THREAD = 32 };
#define CHUNK_BYTES ((uint64_t)1 << 20)
/* One write is whole huge pages: file systems with large folios take as large ones. */
#define WRITE_BYTES ((uint64_t)16 << 20)
#define MAGIC       0x314b43415046564bull /* "KVFPACK1" */

typedef struct trailer {
    uint64_t magic;
    uint64_t bytes;
    uint64_t layout;
    pd_hash128 model;
    uint64_t chunk_bytes;
    uint64_t bytes_hash;
    uint64_t own_hash; /* of all above */
} trailer;

_Static_assert(sizeof(trailer) == 64, "no padding that a hash would read");

static uint64_t round_page(uint64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

uint64_t kern_pack_file_bytes(uint64_t bytes)
{
    return round_page(bytes) + PAGE_BYTES;
}

/* ---- hashing ---- */

typedef struct hashing {
    const uint8_t *bytes;
    uint64_t len, chunks;
    bool mapped;      /* of a file: pages that cannot be read must not kill us */
    uint64_t *hashes; /* [chunks] */
    atomic_uint_fast64_t next;
    atomic_bool unreadable;
} hashing;

static void *hash_chunks(void *ctx)
{
    hashing *h = ctx;

    for (;;) {
        uint64_t chunk = atomic_fetch_add(&h->next, 1);
        if (chunk >= h->chunks || atomic_load(&h->unreadable))
            return NULL;
        const uint8_t *at = h->bytes + chunk * CHUNK_BYTES;
        uint64_t len = h->len - chunk * CHUNK_BYTES;
        if (len > CHUNK_BYTES)
            len = CHUNK_BYTES;
        /* EFAULT, EHWPOISON: reading it would be a SIGBUS. EINVAL: an older kernel, which cannot be
         * asked. */
        if (h->mapped && madvise((void *)at, round_page(len), MADV_POPULATE_READ) != 0 &&
            errno != EINVAL && errno != EAGAIN && errno != EINTR) {
            atomic_store(&h->unreadable, true);
            return NULL;
        }
        h->hashes[chunk] = pd_hash64(at, len, chunk);
    }
}

static uint32_t threads_for(uint64_t chunks)
{
    cpu_set_t cpus;
    uint64_t threads = chunks / CHUNKS_A_THREAD + 1;

    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0)
        return 1;
    if (threads > (uint64_t)CPU_COUNT(&cpus))
        threads = (uint64_t)CPU_COUNT(&cpus);
    return threads > THREADS_MAX ? THREADS_MAX : (uint32_t)threads;
}

/* The same however many threads there are: the caller's is enough. */
static pd_status hash_of(const void *bytes, uint64_t len, bool mapped, uint64_t *hash_out)
{
    hashing h = {.bytes = bytes,
                 .len = len,
                 .chunks = (len + CHUNK_BYTES - 1) / CHUNK_BYTES,
                 .mapped = mapped};
    pthread_t threads[THREADS_MAX];
    uint32_t started = 0, wanted = threads_for(h.chunks) - 1;

    h.hashes = pd_calloc(h.chunks, sizeof *h.hashes);
    if (h.hashes == NULL)
        return PD_E_NOMEM;
    while (started < wanted && pthread_create(&threads[started], NULL, hash_chunks, &h) == 0)
        started++;
    hash_chunks(&h);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    *hash_out = pd_hash64(h.hashes, h.chunks * sizeof *h.hashes, len);
    pd_free(h.hashes);
    return atomic_load(&h.unreadable) ? PD_E_IO : PD_OK;
}

/* ---- writing ---- */

static pd_status write_all(int fd, const void *bytes, uint64_t len, uint64_t at)
{
    while (len > 0) {
        ssize_t n = pwrite(fd, bytes, len < WRITE_BYTES ? len : WRITE_BYTES, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return PD_E_IO;
        }
        bytes = (const uint8_t *)bytes + n;
        at += (uint64_t)n;
        len -= (uint64_t)n;
    }
    return PD_OK;
}

pd_status kern_pack_file_write(int fd, const kern_pack_what *what, const void *bytes)
{
    uint8_t page[PAGE_BYTES] = {0};
    trailer end = {.magic = MAGIC,
                   .bytes = what->bytes,
                   .layout = what->layout,
                   .model = what->model,
                   .chunk_bytes = CHUNK_BYTES};
    pd_status status = hash_of(bytes, what->bytes, false, &end.bytes_hash);

    if (status != PD_OK)
        return status;
    end.own_hash = pd_hash64(&end, offsetof(trailer, own_hash), 0);
    memcpy(page, &end, sizeof end);
    status = write_all(fd, bytes, what->bytes, 0);
    if (status == PD_OK)
        status = write_all(fd, page, sizeof page, round_page(what->bytes));
    return status == PD_OK && fdatasync(fd) != 0 ? PD_E_IO : status;
}

/* ---- mapping ---- */

static pd_status check_trailer(int fd, const kern_pack_what *what, trailer *end_out,
                               const char **why_out)
{
    ssize_t n = pread(fd, end_out, sizeof *end_out, (off_t)round_page(what->bytes));

    if (n < 0) {
        *why_out = "it cannot be read";
        return PD_E_IO;
    }
    *why_out = "it is not whole";
    if (n != (ssize_t)sizeof *end_out)
        return PD_E_INVALID;
    *why_out = "it is no file of this version";
    if (end_out->magic != MAGIC || end_out->chunk_bytes != CHUNK_BYTES)
        return PD_E_MISMATCH;
    *why_out = "its description is damaged";
    if (end_out->own_hash != pd_hash64(end_out, offsetof(trailer, own_hash), 0))
        return PD_E_INVALID;
    *why_out = "it is of another model or layout";
    if (end_out->bytes != what->bytes || end_out->layout != what->layout ||
        memcmp(&end_out->model, &what->model, sizeof what->model) != 0)
        return PD_E_MISMATCH;
    return PD_OK;
}

pd_status kern_pack_file_map(int fd, uint64_t file_bytes, const kern_pack_what *what,
                             kern_memory *memory_out, const char **why_out)
{
    kern_memory memory;
    trailer end;
    uint64_t hash = 0;

    *why_out = "it is too short or too long";
    if (file_bytes != kern_pack_file_bytes(what->bytes))
        return PD_E_INVALID;
    pd_status status = check_trailer(fd, what, &end, why_out);
    if (status != PD_OK)
        return status;
    *why_out = "there is no memory to map it";
    status = kern_memory_map_file(fd, what->bytes, &memory);
    if (status != PD_OK)
        return status;
    status = hash_of(memory.base, what->bytes, true, &hash);
    if (status == PD_E_IO) {
        *why_out = "it cannot be read";
    } else if (status == PD_OK && hash != end.bytes_hash) {
        *why_out = "its bytes are damaged";
        status = PD_E_INVALID;
    }
    if (status != PD_OK) {
        kern_memory_unmap(&memory);
        return status;
    }
    *memory_out = memory;
    return PD_OK;
}
