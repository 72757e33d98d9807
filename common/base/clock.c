#include "common/base/clock.h"

#include <time.h>

uint64_t pd_clock_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * PD_NS_PER_S + (uint64_t)now.tv_nsec;
}

int64_t pd_clock_unix_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
