#pragma once

/* common/transfer/nccl_life.h - how a link of the NCCL carrier begins and ends. Inside
 * common/transfer only, for nccl*.c. Engine's thread.
 *
 * Two things are kept apart. A link is *broken* when this end has given it up: its communicator is
 * aborted, and nothing that it had here goes on. It is *gone* when nothing of it can be written at
 * the receiver any more: the receiver said so, or its process is dead, or nothing was announced
 * that has not landed. Only a link that is gone is reported closed.
 *
 * Nothing relies on one word: the sender says its hello until it is welcomed, and BYE until it is
 * answered, over a new connection of the base where the old one broke; a receiver that gives up
 * says FAIL until BYE comes. Whoever has forgotten the link answers BYE as well. All of it ends
 * after the stall time. */

#include "common/transfer/nccl_link.h"

/* This process, as other ends see it. */
process_mark pd_nccl_process(void);
/* That process is seen from here, alive: then its end can be seen too. */
bool pd_nccl_is_seen(const pd_carrier *carrier, const process_mark *mark);

/* Ends the work of the link on this device, if there is any. */
void pd_nccl_link_stop(pd_carrier *carrier, nccl_link *link);
/* The link carries nothing more: an incoming one tells its sender, an outgoing one its engine. */
void pd_nccl_link_fail(pd_carrier *carrier, nccl_link *link);
/* Stops it and says so until the other end knows. */
void pd_nccl_link_part(pd_carrier *carrier, nccl_link *link);
/* Stops it and closes its connection. */
void pd_nccl_link_end(pd_carrier *carrier, nccl_link *link);
/* Opens the link's connection at the base. */
pd_status pd_nccl_link_open(pd_carrier *carrier, nccl_link *link);

/* NULL: of a link that has ended, or that was never heard of. */
nccl_link *pd_nccl_link_find(pd_carrier *carrier, uint64_t id, bool in);

/* Words that came; from within the base: they change states and call nothing of it. */
void pd_nccl_take_hello(pd_carrier *carrier, const void *bytes, size_t len);
void pd_nccl_take_bye(pd_carrier *carrier, const void *bytes, size_t len);
void pd_nccl_take_fail(nccl_link *link);
void pd_nccl_take_bye_ok(nccl_link *link);

/* What a link in that state has to do; true if something was done. */
bool pd_nccl_greet(pd_carrier *carrier, nccl_link *link);
bool pd_nccl_part_progress(pd_carrier *carrier, nccl_link *link);
