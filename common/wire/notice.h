#pragma once

/* common/wire/notice.h - the word that travels with KV blocks, on the data plane.
 *
 * A prefill worker sends one after each run of blocks of one layer group has landed (the transfer
 * delivers it only then), and always a last one for a transfer: the final blocks, or
 * PD_NOTICE_ABORT, after which it never writes those blocks again. Little-endian, fixed layout. */

#include "common/wire/messages.h"

typedef enum pd_notice_kind {
    PD_NOTICE_BLOCKS = 1,
    PD_NOTICE_ABORT = 2, /* key.number 0 (a router's numbers begin at 1): of every request of
                            key.router that is not complete and was leased for a session of the
                            sender (pd_msg_hello) before key.epoch */
    PD_NOTICE_ASK =
        3, /* the other way round: is this key still written here? Whoever ships ends it,
              and answers by PD_NOTICE_ABORT or, to every router, PD_MSG_SHIP_DONE */
    PD_NOTICE_WRITTEN = 4, /* all that leaves for this key is written, with what was asked for by
                              the first again PD_MSG_SHIP_AGAIN: what has not come is lost. It goes
                              behind the blocks' own notices. No last word: more may be asked for */
} pd_notice_kind;

typedef struct pd_notice {
    pd_notice_kind kind;
    pd_request_key key;
    uint64_t sender, receiver; /* incarnations */
    uint32_t group;            /* the first of groups */
    uint32_t groups;      /* layer groups that this notice speaks of, each with all its blocks */
    uint32_t first_block; /* index in the request's prompt */
    uint32_t count;
    uint32_t valid_tokens; /* of the last block of the run: fewer than a block's when partial */
    uint32_t slices;       /* seals of a block of a group: one for each slice of its KV heads */
    uint32_t
        again; /* PD_NOTICE_BLOCKS: 0: its blocks are written for the first time; else again, and
                  all of them because PD_MSG_SHIP_AGAIN named them: so many of the key have come.
                  Each block is written again once at most, so this is its last writing */
    const uint64_t *seals; /* [groups][count][slices] common/kv/seal; NULL: not sealed */
} pd_notice;

/* Seals a notice can carry: groups * count * slices of a PD_NOTICE_BLOCKS is not more, sealed or
 * not. */
#define PD_NOTICE_SEALS_MAX  512
#define PD_NOTICE_BLOCKS_MAX PD_NOTICE_SEALS_MAX

/* Writes at most PD_TRANSFER_NOTICE_BYTES_MAX bytes; returns how many. */
size_t pd_notice_pack(const pd_notice *notice, unsigned char *bytes);
/* seals: [PD_NOTICE_SEALS_MAX], filled and pointed to. PD_E_INVALID: not a notice. */
PD_CHECKED pd_status pd_notice_unpack(const unsigned char *bytes, size_t len, uint64_t *seals,
                                      pd_notice *notice_out);
