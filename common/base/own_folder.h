#pragma once

/* common/base/own_folder.h - a folder of files that nobody but this user can have written.
 *
 * What lies there is believed as far as its owner is: no other user (but root) can put a file
 * there, change one or cut one short while it is mapped. Any thread. */

#include "common/base/status.h"

#include <sys/stat.h>

/* Opens it, and makes it and what leads to it (mode 0700) where they are missing. On PD_OK the
 * caller closes *folder_out. Errors, logged as a warning: PD_E_IO (cannot be made or opened),
 * PD_E_INVALID (not a folder; another user's; others may write to it). */
PD_CHECKED pd_status pd_own_folder_open(const char *path, int *folder_out);

/* Opens a file of it for reading; name is one component. On PD_OK the caller closes *fd_out.
 * PD_E_NOT_FOUND: there is none (not logged). Logged as a warning: PD_E_INVALID (no regular file, a
 * link, another user's, others may write to it), PD_E_IO. */
PD_CHECKED pd_status pd_own_folder_open_file(int folder, const char *name, int *fd_out,
                                             struct stat *info_out);
