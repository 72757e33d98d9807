#include "kernels/cuda/emu/fiber.h"

#include <stdint.h>

/* The callee-saved registers of the System V ABI go onto the stack that is left; the rounding mode
 * and the x87 control word are the same for all. */
asm(R"(
.text
.p2align 4
.globl emu_switch_stacks
.hidden emu_switch_stacks
.type emu_switch_stacks, @function
emu_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch_stacks, .-emu_switch_stacks
.globl emu_enter_stack
.hidden emu_enter_stack
.type emu_enter_stack, @function
emu_enter_stack:
    movq %r13, %rdi
    call *%r12
    ud2
.size emu_enter_stack, .-emu_enter_stack
)");

extern "C" {
void emu_switch_stacks(void **from, void *to);
void emu_enter_stack(void);
}

void emu_context_make(emu_context *to, void *stack, size_t bytes, void (*run)(void *argument),
                      void *argument)
{
    uintptr_t top = ((uintptr_t)stack + bytes) & ~(uintptr_t)15;
    void **at = (void **)top - 9; /* emu_enter_stack finds sp a multiple of 16 */

    at[0] = NULL; /* r15 */
    at[1] = NULL; /* r14 */
    at[2] = argument;
    at[3] = (void *)run; /* r12 */
    at[4] = NULL;        /* rbx */
    at[5] = NULL;        /* rbp: the end of a backtrace */
    at[6] = (void *)emu_enter_stack;
    at[7] = NULL;
    to->sp = at;
}

void emu_context_switch(emu_context *from, emu_context *to)
{
    emu_switch_stacks(&from->sp, to->sp);
}

void emu_context_end(emu_context *context)
{
    context->sp = NULL;
}
