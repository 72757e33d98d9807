#pragma once

/* common/worker/ship_faults.h - shipping that goes wrong on purpose, for tests of those who must
 * notice.
 *
 * KVFERRY_FAULTS="bit:7,notice:50": each seventh part of a shipment (its blocks under one notice,
 * see common/worker/ship.h) has one bit of one block flipped, each fiftieth loses its notice. A
 * worker refuses to start with it unless KVFERRY_ALLOW_FAULTS=1 is set too, warns when it does, and
 * logs each fault: msg="fault" kind= router= request= epoch= group= block= (block as in the
 * request). Counted from the worker's start; a part has one fault at most.
 *
 *   bit      one bit of a block, within its valid tokens, is another one than was sealed
 *   other    another block of the same pool is sent in a block's place (other bytes, if there are)
 *   epoch    a block comes as the request's epoch before would have sealed it
 *   missing  a block is not written at all, and its notice says it was
 *   count    the notice is wrong about the valid tokens of its last block
 *   notice   the blocks are written, and no word of it comes (the peer gets an empty notice)
 *
 * Pure; one thread. */

#include "common/base/status.h"

#include <stdint.h>

typedef enum pd_ship_fault {
    PD_SHIP_FAULT_NONE,
    PD_SHIP_FAULT_BIT,
    PD_SHIP_FAULT_OTHER,
    PD_SHIP_FAULT_EPOCH,
    PD_SHIP_FAULT_MISSING,
    PD_SHIP_FAULT_COUNT,
    PD_SHIP_FAULT_NOTICE,
    PD_SHIP_FAULTS,
} pd_ship_fault;
const char *pd_ship_fault_name(pd_ship_fault fault);

typedef struct pd_ship_faults {
    uint32_t every[PD_SHIP_FAULTS]; /* 0: never */
    uint64_t parts;                 /* so far */
} pd_ship_faults;

/* text: as KVFERRY_FAULTS; NULL or "": no faults. PD_E_INVALID: not such a text (logged). */
PD_CHECKED pd_status pd_ship_faults_parse(const char *text, pd_ship_faults *faults_out);
/* What is to befall the next part. */
pd_ship_fault pd_ship_faults_next(pd_ship_faults *faults);
