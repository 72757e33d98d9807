#include "kernels/ops_list.h"

#include "kernels/ref/ops.h"

const kern_ops *const kern_ops_list[] = {&kern_ops_ref, NULL};
