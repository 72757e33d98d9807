#pragma once

/* decode-worker/room.h - the sequences' blocks: admission, growth, and who gives way.
 *
 * Carries out what pressure.h decides, on the sequences and leases of one worker: see there for the
 * rules. A lease promises, and then binds, the blocks of what lands; all that comes after is taken
 * as the answer grows, from free blocks and from cached ones that nobody holds. Pure. One thread.
 */

#include "common/worker/blocks.h"
#include "decode-worker/batch.h"
#include "decode-worker/lengths.h"
#include "decode-worker/pressure.h"

typedef struct decode_room {
    const pd_role_options *options;
    const pd_blocks *blocks;
    pd_lease_table *leases;
    decode_lengths lengths;
    decode_load *loads; /* [loads_max], scratch */
    uint32_t loads_max;
    uint64_t order_next;
    uint32_t standing; /* sequences that gave way */
    uint64_t stalled;  /* counts who found no block for its next token, each time */
} decode_room;

/* loads_max: of the leases that are not quarantined. Errors: PD_E_NOMEM. */
PD_CHECKED pd_status decode_room_init(decode_room *room, const pd_role_options *options,
                                      const pd_blocks *blocks, pd_lease_table *leases,
                                      uint32_t loads_max);
void decode_room_fini(decode_room *room);

typedef struct decode_newcomer {
    int32_t priority;
    uint32_t tokens;     /* that land */
    uint32_t blocks;     /* for them */
    uint32_t answer_max; /* tokens that may come after */
} decode_newcomer;

/* May it have its blocks promised, all: the live sequences? PD_E_OVERLOAD, with *reason_out and
 * after how many steps it may be worth asking again (0: unknown): the predicted peak does not fit;
 * what the running ones need next would not be left; or one that gave way, of the same or a higher
 * priority, stands. */
PD_CHECKED pd_status decode_room_admit(decode_room *room, const decode_sequence *all,
                                       const decode_newcomer *asked, double step_ms,
                                       uint32_t *wait_steps_out, const char **reason_out);
/* The next place in the order of admission. */
uint64_t decode_room_order(decode_room *room);

/* Before a step, none being under way: lets some stand and others go on, and gives those that are
 * about to step the blocks for it; stalled is set on those in the batch that do not step: there is
 * no block, or no place. */
void decode_room_prepare(decode_room *room, decode_batch *batch, const decode_sequence *all,
                         double step_ms, uint64_t now_ns);
/* It is given up, whether it stands or not. */
void decode_room_leave(decode_room *room, decode_sequence *sequence);

/* One that has stood for longer than its patience and is not told yet; marked as told. NULL: none.
 */
decode_sequence *decode_room_next_told(decode_sequence *all, uint64_t now_ns);
/* One that was told, is not moving, and whose router has not decided in time. NULL: none. */
decode_sequence *decode_room_next_overdue(decode_sequence *all, uint64_t now_ns);
