#pragma once

/* common/worker/ship_puts.h - the puts that bring blocks from one pool into another, whatever the
 * two pools' tensor-parallel splits.
 *
 * A block of a layer group lies in a pool as one run a rank. Where both pools have the same split,
 * runs of neighbouring blocks go as one put a rank. Else the heads are cut wherever either split
 * is, and each such run of heads goes as one put a block. Seals are per slice: with as many slices
 * as the least common multiple of the two splits, no slice is on two ranks of either pool.
 *
 * One thread, the transfer's producer. */

#include "common/worker/ship_faults.h"
#include "common/worker/step.h"

#define PD_SHIP_SLICES_MAX 64

/* Slices of the KV heads for pools with so many ranks; 0: more than PD_SHIP_SLICES_MAX, or not all
 * of them whole heads. */
uint32_t pd_ship_slices(const pd_kv_layout *ours, const pd_kv_layout *theirs);

/* Blocks [block, block + blocks) of each of groups [group, group + groups) of a shipment, relative
 * to its first ones, and where posting goes on. */
typedef struct pd_ship_puts {
    const pd_shipment *what;
    uint32_t group, groups, block, blocks;
    uint32_t at_group, at_head, at_block; /* relative to the part, but for at_head */
    uint32_t puts;                        /* that were posted */
    pd_ship_fault fault; /* what goes wrong on purpose, and with which slice of which block */
    uint32_t fault_group, fault_block, fault_slice;
} pd_ship_puts;

typedef struct pd_ship_pools {
    pd_transfer *transfer;
    const pd_kv_layout *ours, *theirs;
    uint32_t slices;
} pd_ship_pools;

/* Posts what is left. Errors: the transfer's; after PD_E_OVERLOAD and PD_E_NOMEM it goes on from
 * there. */
PD_CHECKED pd_status pd_ship_puts_post(pd_ship_puts *puts, const pd_ship_pools *pools, pd_peer peer,
                                       uint64_t ticket);
