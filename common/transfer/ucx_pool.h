#pragma once

/* common/transfer/ucx_pool.h - pools as UCX knows them: our own, registered piece by piece, and
 * what is needed to write into a peer's. Inside common/transfer only, for ucx.c.
 *
 * In an address a pool is its pieces' heads (pd_ucx_piece_address), then their packed keys in the
 * same order. What comes of a peer is checked here against what its address says elsewhere: number
 * and lengths; the keys themselves are UCX's, and only the address' check sum guards them.
 *
 * Transfer thread only. */

#include "common/transfer/carrier.h"
#include "common/transfer/gpus.h"
#include "common/transfer/shared_file.h"

#include <ucp/api/ucp.h>

/* ---- our own ---- */

typedef struct pd_ucx_piece {
    unsigned char *memory; /* [piece_bytes rounded up to a page] then a page for probes */
    ucp_mem_h handle;      /* NULL: UCX does not know the pool */
} pd_ucx_piece;

typedef struct pd_ucx_pool {
    ucp_context_h context;
    pd_gpus *gpus; /* that its pieces lie on */
    uint64_t bytes, piece_bytes;
    uint32_t pieces;
    pd_memory_kind kind;
    bool given;    /* by the owner */
    bool messages; /* see pd_ucx_pool_make */
    pd_ucx_piece piece[PD_TRANSFER_PIECES_MAX];
} pd_ucx_pool;

/* Allocates the pool, or registers what options give; over messages alone a GPU's memory is not
 * registered, for which UCX would need modules. gpus are opened for the same options, and outlive
 * the pool. messages: nothing but messages carries bytes; else peers that could map the pool are of
 * interest, and it is told when they cannot. Errors, logged: PD_E_NOMEM, PD_E_UNSUPPORTED (the
 * memory cannot be registered), PD_E_INTERNAL. End it in any case. */
PD_CHECKED pd_status pd_ucx_pool_make(ucp_context_h context, const pd_transfer_options *options,
                                      pd_gpus *gpus, bool messages, pd_ucx_pool *pool);
void pd_ucx_pool_end(pd_ucx_pool *pool);
/* Where an offset lies, and the piece that it lies in. */
unsigned char *pd_ucx_pool_at(const pd_ucx_pool *pool, uint64_t offset, uint32_t *piece_out);
/* Is a range inside one piece? For what other processes say. */
bool pd_ucx_pool_holds(const pd_ucx_pool *pool, uint64_t offset, uint64_t bytes);
/* Writes the pool's part of an address. PD_E_UNSUPPORTED: there is no key, or it is longer than
 * room (logged). */
PD_CHECKED pd_status pd_ucx_pool_pack(const pd_ucx_pool *pool, unsigned char *to, size_t room,
                                      size_t *bytes_out);
ucs_memory_type_t pd_ucx_pool_type(const pd_ucx_pool *pool);
/* Of a piece's memory, the page that a peer's probe may write; piece_bytes are a peer's, too. */
uint64_t pd_ucx_probe_offset(uint64_t piece_bytes);

/* ---- a peer's ---- */

typedef struct pd_ucx_piece_address {
    uint64_t base;       /* in the peer's address space */
    uint32_t key_bytes;  /* 0: it is written by messages alone */
    uint32_t pad;        /* 0 */
    pd_shared_file file; /* by which a given piece can be mapped; inode 0: it cannot */
} pd_ucx_piece_address;
_Static_assert(sizeof(pd_ucx_piece_address) == 48, "goes over the wire");

typedef struct pd_ucx_target_piece {
    uint64_t base;
    ucp_rkey_h key;        /* or NULL */
    unsigned char *mapped; /* the piece in our address space, or NULL */
    bool mapped_by_file;   /* by us; else as long as key lives */
} pd_ucx_target_piece;

typedef struct pd_ucx_target {
    uint64_t piece_bytes;
    uint32_t pieces; /* 0: nothing was made of it yet */
    bool mapped;     /* every piece is */
    pd_ucx_target_piece piece[PD_TRANSFER_PIECES_MAX];
} pd_ucx_target;

/* Is this the pool's part of an address, of a pool of that shape? */
bool pd_ucx_target_fits(const unsigned char *bytes, size_t len, pd_carrier_pool shape);
/* What fits; no memory is touched and no key unpacked yet. */
void pd_ucx_target_init(pd_ucx_target *target, const unsigned char *bytes, pd_carrier_pool shape);
/* Maps every piece by its file. False, and nothing is mapped: not all of them can be. */
bool pd_ucx_target_map(pd_ucx_target *target, const unsigned char *bytes);
/* Makes UCX's keys of it. PD_E_PEER: one is missing or cannot be used (logged). */
PD_CHECKED pd_status pd_ucx_target_unpack(pd_ucx_target *target, ucp_ep_h ep,
                                          const unsigned char *bytes);
/* Finds the pieces in our address space where UCX has mapped them; sets mapped. */
void pd_ucx_target_find(pd_ucx_target *target);
/* Can cuda_ipc reach every piece from the GPU whose context is current? Where this UCX does not say
 * so of a key, true: the lanes are all there is to go by. */
bool pd_ucx_target_by_cuda_ipc(const pd_ucx_target *target);
/* Ends what was mapped here; the keys stay. */
void pd_ucx_target_unmap(pd_ucx_target *target);
/* Of the peer's connection, when that is closed. */
void pd_ucx_target_end(pd_ucx_target *target);
