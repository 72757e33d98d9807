#include "common/transfer/nccl_comm.h"

#include "common/base/clock.h"
#include "common/base/log.h"

#include <unistd.h>

/* The engine's thread waits: it is not meant to come to this. */
enum { CALL_POLL_US = 20, CALLS_NS = 200000000 };

void pd_nccl_comm_end(pd_carrier *carrier, nccl_link *link)
{
    if (link->comm == NULL)
        return;
    uint64_t start_ns = pd_clock_now_ns();
    bool told = false;
    carrier->library->nccl_comm_abort(link->comm);
    while (carrier->active == link &&
           carrier->library->cuda_stream_query(carrier->stream) == PD_CU_NOT_READY) {
        if (!told && pd_clock_now_ns() - start_ns > PD_NS_PER_S) {
            pd_log_error("msg=\"transfer: nccl's work goes on after its abort; nothing else can be "
                         "done until it ends\" link=%016llx",
                         (unsigned long long)link->id);
            told = true;
        }
        usleep(200);
    }
    link->comm = NULL;
    link->epoch = 0;
    carrier->comms--;
}

/* A receiver that has not said GO yet has promised nothing, but would have to make another one. */
static bool is_asked_for(const nccl_link *link)
{
    return link->in && link->batch_state == BATCH_WAITING && link->go.epoch == link->epoch;
}

/* Makes room for one more: the one that was used longest ago goes. Only the active link has work on
 * the device, and pinned ones are less than may be made (batch_announce), so there is one to go. */
static void comms_evict(pd_carrier *carrier)
{
    while (carrier->comms >= carrier->comms_max) {
        nccl_link *oldest = NULL;
        for (uint32_t i = 0; i < carrier->links_max; i++) {
            nccl_link *link = &carrier->links[i];
            if (link->comm == NULL || link == carrier->active || link->pinned)
                continue;
            bool asked = is_asked_for(link), asked_oldest = oldest != NULL && is_asked_for(oldest);
            if (oldest == NULL ||
                (asked == asked_oldest ? link->used_ns < oldest->used_ns : asked_oldest))
                oldest = link;
        }
        pd_assert(oldest != NULL);
        pd_nccl_comm_end(carrier, oldest);
    }
}

/* False, logged: NCCL says that something is wrong. *done_out: nothing is under way. */
bool pd_nccl_comm_look(pd_carrier *carrier, const nccl_link *link, bool *done_out)
{
    int error = PD_NCCL_SUCCESS;
    int result = carrier->library->nccl_comm_error(link->comm, &error);
    if (result == PD_NCCL_SUCCESS)
        result = error;
    *done_out = result == PD_NCCL_SUCCESS;
    if (result == PD_NCCL_SUCCESS || result == PD_NCCL_IN_PROGRESS)
        return true;
    pd_log_warn("msg=\"transfer: nccl: %s\" what=%s link=%016llx",
                carrier->library->nccl_error_text(result), pd_nccl_what(link),
                (unsigned long long)link->id);
    return false;
}

bool pd_nccl_comm_make(pd_carrier *carrier, nccl_link *link, pd_nccl_id id, uint64_t epoch)
{
    pd_nccl_config config = pd_nccl_config_non_blocking();

    pd_nccl_comm_end(carrier, link);
    comms_evict(carrier);
    int result = carrier->library->nccl_comm_init(&link->comm, 2, id,
                                                  link->in ? RECEIVER_RANK : SENDER_RANK, &config);
    if (link->comm != NULL) {
        carrier->comms++;
        link->epoch = epoch;
    }
    if (link->comm != NULL && (result == PD_NCCL_SUCCESS || result == PD_NCCL_IN_PROGRESS))
        return true;
    pd_log_warn("msg=\"transfer: nccl makes no communicator: %s\" what=%s",
                carrier->library->nccl_error_text(result), pd_nccl_what(link));
    return false;
}

/* A call on a communicator that does not block may be under way when it returns; until NCCL says
 * that it is through, the next call on that communicator is an error. PD_NCCL_IN_PROGRESS: it was
 * not, in time. */
static int call_end(const pd_carrier *carrier, const nccl_link *link, int result, uint64_t by_ns)
{
    while (result == PD_NCCL_IN_PROGRESS && pd_clock_now_ns() < by_ns) {
        usleep(CALL_POLL_US);
        int asked = carrier->library->nccl_comm_error(link->comm, &result);
        if (asked != PD_NCCL_SUCCESS)
            result = asked;
    }
    return result;
}

static int post_runs(pd_carrier *carrier, nccl_link *link, uint64_t by_ns)
{
    const pd_nccl_library *l = carrier->library;
    int result = PD_NCCL_SUCCESS;
    for (uint32_t i = 0; result == PD_NCCL_SUCCESS && i < link->count; i++) {
        const run *r = &link->runs[i];
        if (link->in)
            result = l->nccl_recv(carrier->pool + r->offset, r->bytes, PD_NCCL_INT8, SENDER_RANK,
                                  link->comm, carrier->stream);
        else
            result = l->nccl_send(carrier->pool + link->from[i], r->bytes, PD_NCCL_INT8,
                                  RECEIVER_RANK, link->comm, carrier->stream);
        result = call_end(carrier, link, result, by_ns);
    }
    return result;
}

bool pd_nccl_comm_launch(pd_carrier *carrier, nccl_link *link)
{
    const pd_nccl_library *l = carrier->library;
    uint64_t by_ns = pd_clock_now_ns() + CALLS_NS;
    link->batch_state = BATCH_LAUNCHING;
    int result = l->nccl_group_start();
    if (result == PD_NCCL_SUCCESS) {
        result = post_runs(carrier, link, by_ns);
        int end = l->nccl_group_end(); /* whatever became of the runs: no group stays open */
        if (result == PD_NCCL_SUCCESS && end != PD_NCCL_IN_PROGRESS) /* that is looked at later */
            result = end;
    }
    if (result == PD_NCCL_SUCCESS)
        return true;
    pd_log_warn("msg=\"transfer: nccl: %s\" what=%s link=%016llx",
                result == PD_NCCL_IN_PROGRESS ? "a call does not end" : l->nccl_error_text(result),
                pd_nccl_what(link), (unsigned long long)link->id);
    return false;
}
