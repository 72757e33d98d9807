#include "common/worker/verifier.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

typedef struct slot {
    pd_check check; /* blocks and seals point into this slot */
    pd_block blocks[PD_NOTICE_BLOCKS_MAX];
    uint64_t seals[PD_NOTICE_SEALS_MAX];
} slot;

struct pd_verifier {
    pd_kv_layout layout;
    pd_sealer sealer;
    uint64_t layout_fingerprint;
    pd_seal_item items[PD_NOTICE_SEALS_MAX]; /* of the check being looked at */
    slot *slots; /* [PD_VERIFIER_CHECKS_MAX], used in turn: checks keep their order */
    uint32_t submitted, polled;   /* loop thread */
    pd_queue *waiting, *finished; /* uint32_t slot; pd_checked */
    atomic_bool stop;
    pthread_t thread;
    bool thread_started;
};

enum { NO_SLOT = UINT32_MAX }; /* in the queue: the thread ends */

/* ---- the verifier's thread ---- */

/* One item a seal, in the seals' order. */
static uint32_t itemize(pd_verifier *v, const pd_check *check)
{
    uint64_t heads = v->layout.kv_heads;
    uint32_t n = 0;

    for (uint32_t g = 0; g < check->groups; g++) {
        for (uint32_t i = 0; i < check->count; i++) {
            pd_seal_place place = {
                .request = pd_ship_seal_request(&check->key),
                .epoch = check->key.epoch,
                .group = check->group_first + g,
                .block_index = check->first + i,
                .valid_tokens =
                    i + 1 == check->count ? check->valid_tokens : v->layout.block_tokens,
                .layout_fingerprint = v->layout_fingerprint,
            };
            for (uint32_t s = 0; s < check->slices; s++)
                v->items[n++] = (pd_seal_item){
                    .block = check->blocks[i],
                    .head_from = (uint32_t)(s * heads / check->slices),
                    .head_to = (uint32_t)((s + 1) * heads / check->slices),
                    .place = place,
                };
        }
    }
    return n;
}

static pd_checked look_at(pd_verifier *v, const pd_check *check)
{
    uint32_t bad = 0, count = itemize(v, check);
    pd_status status = v->sealer.check(v->sealer.ctx, v->items, count, check->seals, &bad);

    pd_checked checked = {
        .ticket = check->ticket,
        .request = pd_ship_seal_request(&check->key),
        .good = status == PD_OK,
    };

    if (status == PD_E_MISMATCH) {
        checked.bad_group = v->items[bad].place.group;
        checked.bad_block = v->items[bad].place.block_index;
        checked.bad_slice = bad % check->slices;
    } else {
        checked.unchecked = status;
    }
    return checked;
}

static void *verifier_main(void *arg)
{
    pd_verifier *v = arg;

    for (;;) {
        uint32_t at;
        pd_queue_drain_fd(v->waiting);
        while (pd_queue_pop(v->waiting, &at) == PD_OK) {
            if (at == NO_SLOT || atomic_load_explicit(&v->stop, memory_order_relaxed))
                return NULL;
            pd_checked checked = look_at(v, &v->slots[at].check);
            pd_status status = pd_queue_push(v->finished, &checked);
            pd_assert(status == PD_OK); /* it holds as many as there are slots */
        }
        pd_queue_wait(v->waiting, -1);
    }
}

/* ---- the loop's side ---- */

static pd_status start(pd_verifier *v)
{
    pd_status status = pd_queue_create(sizeof(uint32_t), PD_VERIFIER_CHECKS_MAX + 1, &v->waiting);

    v->slots = pd_calloc(PD_VERIFIER_CHECKS_MAX, sizeof *v->slots);
    if (status == PD_OK && v->slots == NULL)
        status = PD_E_NOMEM;
    if (status == PD_OK)
        status = pd_queue_create(sizeof(pd_checked), PD_VERIFIER_CHECKS_MAX, &v->finished);
    if (status != PD_OK) {
        pd_log_error("msg=\"verifier: cannot be made\" status=%s", pd_status_name(status));
        return status;
    }
    int error = pthread_create(&v->thread, NULL, verifier_main, v);
    if (error != 0) {
        errno = error;
        pd_log_error("msg=\"verifier: cannot start its thread: %m\"");
        return PD_E_IO;
    }
    v->thread_started = true;
    return PD_OK;
}

pd_status pd_verifier_create(const pd_verifier_options *options, pd_verifier **verifier_out)
{
    pd_verifier *v = pd_calloc(1, sizeof *v);

    if (v == NULL)
        return PD_E_NOMEM;
    v->layout = *options->layout;
    v->sealer = options->sealer;
    v->layout_fingerprint = pd_kv_layout_fingerprint(&v->layout);
    pd_status status = start(v);
    if (status != PD_OK) {
        pd_verifier_destroy(v);
        return status;
    }
    *verifier_out = v;
    return PD_OK;
}

void pd_verifier_destroy(pd_verifier *v)
{
    uint32_t last = NO_SLOT;

    if (v == NULL)
        return;
    if (v->thread_started) {
        atomic_store(&v->stop, true);
        pd_status status = pd_queue_push(v->waiting, &last);
        pd_assert(status == PD_OK); /* the queue has room for one more than there are slots */
        pthread_join(v->thread, NULL);
    }
    pd_queue_destroy(v->waiting);
    pd_queue_destroy(v->finished);
    pd_free(v->slots);
    pd_free(v);
}

static void assert_sound(const pd_verifier *v, const pd_check *check)
{
    const pd_kv_layout *layout = &v->layout;

    pd_assert(check->groups > 0 && check->group_first < layout->groups &&
              check->groups <= layout->groups - check->group_first);
    pd_assert(check->count > 0 && check->count <= PD_NOTICE_BLOCKS_MAX && check->slices > 0);
    pd_assert(check->valid_tokens > 0 && check->valid_tokens <= layout->block_tokens);
    pd_assert((uint64_t)check->groups * check->count * check->slices <= PD_NOTICE_SEALS_MAX);
    for (uint32_t i = 0; i < check->count; i++)
        pd_assert(check->blocks[i] < layout->blocks);
}

pd_status pd_verifier_submit(pd_verifier *v, const pd_check *check)
{
    uint32_t at = v->submitted % PD_VERIFIER_CHECKS_MAX;
    slot *free_slot = &v->slots[at];
    size_t seals = (size_t)check->groups * check->count * check->slices;

    assert_sound(v, check);
    if (v->submitted - v->polled == PD_VERIFIER_CHECKS_MAX)
        return PD_E_OVERLOAD;
    free_slot->check = *check;
    memcpy(free_slot->blocks, check->blocks, check->count * sizeof *check->blocks);
    memcpy(free_slot->seals, check->seals, seals * sizeof *check->seals);
    free_slot->check.blocks = free_slot->blocks;
    free_slot->check.seals = free_slot->seals;
    pd_status status = pd_queue_push(v->waiting, &at);
    pd_assert(status == PD_OK);
    v->submitted++;
    return PD_OK;
}

int pd_verifier_fd(const pd_verifier *v)
{
    return pd_queue_fd(v->finished);
}

pd_status pd_verifier_poll(pd_verifier *v, pd_checked *checked_out)
{
    pd_status status = pd_queue_pop(v->finished, checked_out);

    if (status != PD_OK) {
        /* Empty: quiet the descriptor, then look again, for one may have come in between. */
        pd_queue_drain_fd(v->finished);
        status = pd_queue_pop(v->finished, checked_out);
    }
    if (status == PD_OK)
        v->polled++;
    return status;
}
