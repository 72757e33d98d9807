#include "kernels/ops_list.h"

#include "kernels/cpu/ops_list.h"
#include "kernels/ref/ops.h"

#include <cpuid.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

const kern_ops *const kern_ops_list[] = {&kern_ops_ref,       &kern_ops_avx2, &kern_ops_avx512,
                                         &kern_ops_amx_plain, &kern_ops_amx,  NULL};

/* Of Linux's arch_prctl (Documentation/arch/x86/xstate.rst): a process has no room for the tiles'
 * registers before it has asked. */
enum { ARCH_REQUEST_STATE = 0x1023, STATE_TILE_DATA = 18 };
#define STATE_TILES ((uint64_t)3 << 17) /* XCR0: configuration and data */
#define LEAF7_BF16  (1u << 22)          /* edx */
#define LEAF7_TILE  (1u << 24)
#define LEAF7_INT8  (1u << 25)

typedef struct cpu_bits {
    uint32_t ecx1;             /* leaf 1 */
    uint32_t ebx7, ecx7, edx7; /* leaf 7 */
    uint64_t saved;            /* XCR0: register state the system saves */
} cpu_bits;

static cpu_bits read_cpu(void)
{
    cpu_bits bits = {0};
    uint32_t eax, ebx, ecx, edx, low, high;

    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0)
        return bits;
    bits.ecx1 = ecx;
    if ((ecx & bit_OSXSAVE) != 0) {
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        bits.saved = (uint64_t)high << 32 | low;
    }
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
        bits.ebx7 = ebx;
        bits.ecx7 = ecx;
        bits.edx7 = edx;
    }
    return bits;
}

static int judge(bool instructions, bool state, int score, const char *name, char *reason,
                 size_t reason_size)
{
    snprintf(reason, reason_size, "%s%s", name,
             !instructions ? ": the processor does not have it"
             : !state      ? ": the operating system does not save its registers"
                           : "");
    return instructions && state ? score : 0;
}

int kern_probe_avx2(char *reason, size_t reason_size)
{
    const uint32_t leaf1 = bit_FMA | bit_F16C | bit_AVX;
    cpu_bits bits = read_cpu();

    return judge((bits.ecx1 & leaf1) == leaf1 && (bits.ebx7 & bit_AVX2) != 0,
                 (bits.saved & 0x6) == 0x6, 20, "AVX2, FMA, F16C", reason, reason_size);
}

int kern_probe_avx512(char *reason, size_t reason_size)
{
    const uint32_t leaf7 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    cpu_bits bits = read_cpu();
    bool instructions = kern_probe_avx2(reason, reason_size) != 0 && (bits.ebx7 & leaf7) == leaf7 &&
                        (bits.ecx7 & bit_AVX512VNNI) != 0;

    return judge(instructions, (bits.saved & 0xe6) == 0xe6, 30, "AVX-512 F, BW, DQ, VL, VNNI",
                 reason, reason_size);
}

int kern_probe_amx(char *reason, size_t reason_size)
{
    const uint32_t leaf7 = LEAF7_BF16 | LEAF7_TILE | LEAF7_INT8;
    cpu_bits bits = read_cpu();
    bool instructions = kern_probe_avx512(reason, reason_size) != 0 && (bits.edx7 & leaf7) == leaf7;
    bool state = instructions && (bits.saved & STATE_TILES) == STATE_TILES &&
                 syscall(SYS_arch_prctl, ARCH_REQUEST_STATE, STATE_TILE_DATA) == 0;

    return judge(instructions, state, 40, "AMX tiles of int8 and bf16, AVX-512 F, BW, DQ, VL, VNNI",
                 reason, reason_size);
}

int kern_probe_amx_plain(char *reason, size_t reason_size)
{
    int fast = kern_probe_avx512(reason, reason_size);

    if (fast != 0)
        snprintf(reason, reason_size, "AMX's tiles in plain C: slow, for tests");
    return fast != 0 ? 2 : 0;
}
