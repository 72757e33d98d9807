#pragma once

/* common/base/device_place.h - where a device that computes sits in the machine. */

typedef struct pd_device_place {
    char bus[32];  /* PCI, "0000:1b:00.0", as sysfs spells it; "": none, the
                      host's cores emulate it */
    int numa_node; /* by the driver's word; -1: unknown */
} pd_device_place;
