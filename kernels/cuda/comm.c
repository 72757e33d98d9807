#include "kernels/cuda/comm.h"

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "kernels/cuda/nccl.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PART_BYTES (4u << 20)
#define AREAS      2 /* they take turns */
/* Both are a matter of a second at most, but for drivers that wake up. */
#define WAIT_MS 60000
#define LOOK_US 20
/* A look at a stream that came later than this was no wait: this rank stood still itself. */
#define LOOK_NS_MAX (100 * PD_NS_PER_MS)
/* Gathers on the stream that are told apart: two a layer, and models have up to 128 layers. */
#define MARKS 256

enum { UNBROKEN, BREAKING, BROKEN };

typedef struct common {
    atomic_uint state; /* of why */
    char why[256];
    unsigned char nccl_id[CU_NCCL_ID_BYTES];
    atomic_uint agreed;   /* ranks that can go on with NCCL, in this round and those before */
    atomic_uint given_up; /* a rank makes no communicator, so that none of them will */
    atomic_uint begun[KERN_RANKS_MAX]; /* gathers by NCCL, as each rank queues them */
} common;

/* Reached when the stream comes to a gather. */
typedef struct mark {
    gpu_event *event;
    uint32_t gather;
} mark;

struct cu_comm {
    cu_comm_options options;
    cu_nccl *nccl; /* NULL: through shared memory */
    uint32_t area; /* the next one */
    /* by NCCL: gathers are counted from 1; a ring of those that the stream has not come to */
    mark marks[MARKS];
    uint32_t marks_first, marks_count;
    uint32_t begun, reached;         /* by this thread; by the stream */
    uint64_t looked_ns, together_ns; /* together: all have come, and nothing moves */
    /* shared */
    common *common;
    cu_comm_piece *pieces; /* [ranks] */
    unsigned char *areas;  /* [AREAS][ranks][part_bytes] */
};

static uint64_t part_of(uint64_t part_bytes)
{
    return part_bytes == 0 ? PART_BYTES : part_bytes;
}

uint64_t cu_comm_bytes(uint32_t ranks, uint64_t part_bytes)
{
    return kern_comm_round(sizeof(common)) + kern_comm_round(ranks * sizeof(cu_comm_piece)) +
           kern_comm_round(AREAS * ranks * part_of(part_bytes));
}

pd_status cu_comm_create(const cu_comm_options *options, cu_comm **comm_out)
{
    cu_comm *comm = pd_calloc(1, sizeof *comm);

    if (comm == NULL)
        return PD_E_NOMEM;
    pd_assert(options->ranks >= 2 && options->rank < options->ranks);
    pd_assert(options->part_bytes % KERN_COMM_ALIGNMENT == 0);
    comm->options = *options;
    comm->options.part_bytes = part_of(options->part_bytes);
    comm->options.wait_ms = options->wait_ms == 0 ? WAIT_MS : options->wait_ms;
    comm->common = options->calls->take(options->comm, sizeof *comm->common);
    comm->pieces = options->calls->take(options->comm, options->ranks * sizeof *comm->pieces);
    comm->areas =
        options->calls->take(options->comm, AREAS * options->ranks * comm->options.part_bytes);
    *comm_out = comm;
    return PD_OK;
}

void cu_comm_destroy(cu_comm *comm)
{
    if (comm == NULL)
        return;
    cu_nccl_destroy(comm->nccl);
    for (uint32_t i = 0; i < MARKS; i++)
        if (comm->marks[i].event != NULL)
            gpu_event_destroy(comm->marks[i].event);
    pd_free(comm);
}

uint32_t cu_comm_rank(const cu_comm *comm)
{
    return comm->options.rank;
}

uint32_t cu_comm_ranks(const cu_comm *comm)
{
    return comm->options.ranks;
}

cu_comm_piece *cu_comm_piece_of(cu_comm *comm, uint32_t rank)
{
    pd_assert(rank < comm->options.ranks);
    return &comm->pieces[rank];
}

pd_status cu_comm_meet(cu_comm *comm)
{
    return comm->options.calls->barrier(comm->options.comm) ? PD_OK : PD_E_INTERNAL;
}

static bool has_ended(cu_comm *comm)
{
    return comm->options.calls->ended(comm->options.comm);
}

/* ---- what fails ---- */

void cu_comm_fail(cu_comm *comm, const char *why)
{
    unsigned unbroken = UNBROKEN;

    /* after another's end it fails for that alone, and that one speaks for itself */
    if (!has_ended(comm) &&
        atomic_compare_exchange_strong(&comm->common->state, &unbroken, BREAKING)) {
        snprintf(comm->common->why, sizeof comm->common->why, "rank %u: %s", comm->options.rank,
                 why);
        atomic_store(&comm->common->state, BROKEN);
    }
    comm->options.calls->end(comm->options.comm);
    cu_nccl_destroy(comm->nccl); /* so that the device runs dry */
    comm->nccl = NULL;
}

const char *cu_comm_broken(const cu_comm *comm)
{
    return atomic_load(&comm->common->state) == BROKEN ? comm->common->why : NULL;
}

/* ---- connecting ---- */

/* All ranks say whether they can go on; PD_OK: all can. PD_E_UNSUPPORTED: not all. */
static pd_status agree(cu_comm *comm, bool can, uint32_t round)
{
    if (can)
        atomic_fetch_add(&comm->common->agreed, 1);
    pd_status status = cu_comm_meet(comm);
    if (status != PD_OK)
        return status;
    /* nobody adds to the next round's before all have read this one's */
    bool all = atomic_load(&comm->common->agreed) == round * comm->options.ranks;
    status = cu_comm_meet(comm);
    return status != PD_OK ? status : all ? PD_OK : PD_E_UNSUPPORTED;
}

/* "1, 3": who has not begun the gather that this rank has. */
static void name_missing(const cu_comm *comm, char *out, size_t size)
{
    size_t len = 0;

    snprintf(out, size, "none");
    for (uint32_t rank = 0; rank < comm->options.ranks && len + 1 < size; rank++)
        if ((int)(atomic_load(&comm->common->begun[rank]) - comm->begun) < 0)
            len += (size_t)snprintf(out + len, size - len, "%s%u", len > 0 ? ", " : "", rank);
}

/* Until what was begun is made or queued. PD_E_TIMEOUT, PD_E_INTERNAL: it will not be. */
static pd_status settle(cu_comm *comm, cu_nccl *nccl, pd_status status)
{
    uint64_t start_ns = pd_clock_now_ns();

    while (status == PD_E_AGAIN) {
        if (has_ended(comm) || atomic_load(&comm->common->given_up) != 0)
            return PD_E_INTERNAL;
        if (pd_clock_now_ns() - start_ns > comm->options.wait_ms * (PD_NS_PER_S / 1000)) {
            char missing[64];
            name_missing(comm, missing, sizeof missing);
            pd_log_error("msg=\"%s: nccl does not come to an end\" rank=%u waited_ms=%u gather=%u "
                         "ranks_behind=\"%s\"",
                         comm->options.backend, comm->options.rank, comm->options.wait_ms,
                         comm->begun, missing);
            return PD_E_TIMEOUT;
        }
        usleep(LOOK_US);
        status = cu_nccl_look(nccl);
    }
    return status;
}

static pd_status make_communicator(cu_comm *comm, cu_nccl **nccl_out)
{
    pd_status status =
        cu_nccl_create(comm->common->nccl_id, comm->options.rank, comm->options.ranks, nccl_out);

    if (status == PD_OK)
        status = settle(comm, *nccl_out, cu_nccl_look(*nccl_out));
    if (status != PD_OK)
        atomic_store(&comm->common->given_up, 1);
    return status;
}

/* PD_OK: comm->nccl is there, at every rank; PD_E_UNSUPPORTED: at none, with a reason where this
 * rank has one to tell. Other errors: a rank is gone. */
static pd_status connect_nccl(cu_comm *comm, char *reason, size_t reason_size)
{
    cu_nccl *nccl = NULL;
    bool first = comm->options.rank == 0; /* tells for all */

    snprintf(reason, reason_size, "%s", first ? "another rank cannot use it, and says why" : "");
    pd_status can = cu_nccl_load(reason, reason_size);
    if (can == PD_OK && first)
        can = cu_nccl_id(comm->common->nccl_id);
    pd_status status = agree(comm, can == PD_OK, 1);
    if (status != PD_OK)
        return status;
    snprintf(reason, reason_size, "%s", first ? "no communicator could be made" : "");
    pd_status made = make_communicator(comm, &nccl);
    status = agree(comm, made == PD_OK, 2);
    if (status != PD_OK) {
        cu_nccl_destroy(nccl);
        return status;
    }
    comm->nccl = nccl;
    return PD_OK;
}

static pd_status make_marks(cu_comm *comm, gpu *g)
{
    pd_status status = PD_OK;

    for (uint32_t i = 0; status == PD_OK && i < MARKS; i++)
        status = gpu_event_create(g, &comm->marks[i].event);
    return status;
}

pd_status cu_comm_connect(cu_comm *comm, gpu *g)
{
    char reason[256];

    if (gpu_info_of(g)->emulated)
        return PD_OK;
    pd_status status = connect_nccl(comm, reason, sizeof reason);
    if (status == PD_E_UNSUPPORTED) {
        if (reason[0] != '\0')
            pd_log_warn("msg=\"%s: ranks exchange their products through the host's memory, which "
                        "is slower than nccl: %s\" rank=%u ranks=%u",
                        comm->options.backend, reason, comm->options.rank, comm->options.ranks);
        return PD_OK;
    }
    if (status == PD_OK && comm->options.rank == 0)
        pd_log_info("msg=\"%s: ranks exchange their products by nccl\" ranks=%u",
                    comm->options.backend, comm->options.ranks);
    return status == PD_OK ? make_marks(comm, g) : status;
}

/* ---- gathering ---- */

static unsigned char *area_of(const cu_comm *comm, uint32_t rank)
{
    return comm->areas +
           ((uint64_t)comm->area * comm->options.ranks + rank) * comm->options.part_bytes;
}

/* bytes at `at` of everybody's. The wait is also for what the last part queued: when all have met,
 * nobody reads the area of the part before any more, which is the next one's. */
static pd_status gather_part(cu_comm *comm, gpu_stream *stream, const unsigned char *own,
                             unsigned char *all, uint64_t all_stride, uint64_t bytes)
{
    const cu_comm_options *o = &comm->options;
    pd_status status = gpu_copy_out(stream, area_of(comm, o->rank), own, bytes);

    if (status == PD_OK)
        status = gpu_stream_wait(stream);
    if (status == PD_OK)
        status = cu_comm_meet(comm);
    for (uint32_t r = 0; status == PD_OK && r < o->ranks; r++)
        if (r != o->rank)
            status = gpu_copy_in(stream, all + r * all_stride, area_of(comm, r), bytes);
    comm->area = (comm->area + 1) % AREAS;
    return status;
}

/* How far the stream has come. */
static pd_status follow(cu_comm *comm)
{
    while (comm->marks_count > 0) {
        const mark *next = &comm->marks[comm->marks_first];
        pd_status status = gpu_event_poll(next->event);
        if (status != PD_OK)
            return status == PD_E_AGAIN ? PD_OK : status;
        comm->reached = next->gather;
        comm->together_ns = 0;
        comm->marks_first = (comm->marks_first + 1) % MARKS;
        comm->marks_count--;
    }
    return PD_OK;
}

/* Of more than there are marks for, the last ones are not told apart. */
static pd_status mark_gather(cu_comm *comm, gpu_stream *stream)
{
    if (comm->marks_count == MARKS)
        return PD_OK;
    mark *m = &comm->marks[(comm->marks_first + comm->marks_count) % MARKS];
    m->gather = comm->begun;
    comm->marks_count++;
    return gpu_event_record(m->event, stream);
}

static pd_status gather_by_nccl(cu_comm *comm, gpu_stream *stream, const void *own, void *all,
                                uint64_t bytes)
{
    atomic_store(&comm->common->begun[comm->options.rank], ++comm->begun);
    pd_status status = follow(comm);
    if (status == PD_OK)
        status = mark_gather(comm, stream);
    if (status != PD_OK)
        return status;
    status = cu_nccl_gather(comm->nccl, gpu_stream_native(stream), own, all, bytes);
    return settle(comm, comm->nccl, status);
}

pd_status cu_comm_gather(cu_comm *comm, gpu_stream *stream, const void *own, void *all,
                         uint64_t bytes)
{
    uint64_t part = comm->options.part_bytes;
    pd_status status = PD_OK;

    pd_assert((const unsigned char *)own == (unsigned char *)all + comm->options.rank * bytes);
    if (comm->nccl != NULL)
        return gather_by_nccl(comm, stream, own, all, bytes);
    for (uint64_t at = 0; status == PD_OK && at < bytes; at += part)
        status =
            gather_part(comm, stream, (const unsigned char *)own + at, (unsigned char *)all + at,
                        bytes, bytes - at < part ? bytes - at : part);
    return status;
}

bool cu_comm_is_queued(const cu_comm *comm)
{
    return comm->nccl != NULL;
}

/* Where this rank's stream is, to the others; where all are, the gather has to end. What follows a
 * step's last one is short. */
static pd_status judge(cu_comm *comm)
{
    uint64_t now_ns = pd_clock_now_ns(), look_ns = now_ns - comm->looked_ns;

    comm->looked_ns = now_ns;
    if (!comm->options.calls->come(comm->options.comm, comm->reached)) {
        comm->together_ns = 0;
        return PD_OK;
    }
    comm->together_ns += look_ns < LOOK_NS_MAX ? look_ns : 0;
    if (comm->together_ns <= comm->options.wait_ms * (PD_NS_PER_S / 1000))
        return PD_OK;
    pd_log_error("msg=\"%s: all ranks have come to a gather, and it does not end\" rank=%u "
                 "waited_ms=%u gather=%u",
                 comm->options.backend, comm->options.rank, comm->options.wait_ms, comm->reached);
    return PD_E_TIMEOUT;
}

pd_status cu_comm_look(cu_comm *comm)
{
    if (has_ended(comm))
        return PD_E_INTERNAL;
    if (comm->nccl == NULL)
        return PD_OK;
    pd_status status = cu_nccl_look(comm->nccl);
    if (status == PD_OK || status == PD_E_AGAIN)
        status = follow(comm);
    return status == PD_OK ? judge(comm) : status;
}
