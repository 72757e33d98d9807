#include "tests/gpu-emu/device.h"

uint32_t device_random(uint64_t *state)
{
    /* xorshift64* (Vigna 2016); 0 is no state */
    uint64_t x = *state != 0 ? *state : 0x9e3779b97f4a7c15;

    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return (uint32_t)((x * 0x2545f4914f6cdd1d) >> 32);
}

float device_float(uint64_t *state)
{
    float value = (float)(int32_t)device_random(state) * 0x1p-31f;

    return device_random(state) % 61 == 0 ? value * 100 : value;
}
