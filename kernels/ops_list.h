#pragma once

/* kernels/ops_list.h - which tables of operations this build holds: the list is another file a
 * platform, chosen by meson (kernels/cpu/ops_list.c on x86-64, kernels/ref/ops_list.c elsewhere).
 */

#include "kernels/ops.h"

extern const kern_ops *const kern_ops_list[]; /* reference first, NULL last */
