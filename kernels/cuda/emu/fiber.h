#pragma once

/* kernels/cuda/emu/fiber.h - a stack of its own for each thread of a CUDA block.
 *
 * Two bodies, chosen by Meson: fiber_x86_64.cpp (a dozen instructions a switch) and
 * fiber_ucontext.cpp (anywhere; system calls in each switch, about six times slower). One OS thread
 * runs all fibers. */

#include <stddef.h>

struct emu_context { /* where a stack stands while another runs */
    void *sp;
};

/* Makes to a stack on which run(argument) begins at the first switch; run never returns. */
void emu_context_make(emu_context *to, void *stack, size_t bytes, void (*run)(void *argument),
                      void *argument);
void emu_context_switch(emu_context *from, emu_context *to);
/* What emu_context_make took for this context; fine for one that was never made. */
void emu_context_end(emu_context *context);
