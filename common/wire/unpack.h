#pragma once

/* common/wire/unpack.h - outside bytes to a checked message (common/wire/messages.h). Any thread.
 */

#include "common/wire/messages.h"

/* Unpacks and checks outside bytes: version, kinds, lengths, enums, names (printable, not empty),
 * finite numbers. On PD_OK *message_out points into *hold_out, freed by pd_message_hold_free.
 * Errors: PD_E_INVALID (reason in *reason_out, a literal), PD_E_NOMEM. */
typedef struct pd_message_hold pd_message_hold;
PD_CHECKED pd_status pd_message_unpack(const void *bytes, size_t len, pd_message *message_out,
                                       pd_message_hold **hold_out, const char **reason_out);
void pd_message_hold_free(pd_message_hold *hold);
