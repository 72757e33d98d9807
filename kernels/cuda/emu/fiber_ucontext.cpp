#include "kernels/cuda/emu/fiber.h"

#include "common/base/mem.h"
#include "common/base/status.h"

#include <stdint.h>
#include <ucontext.h>

struct entry { /* where sp points to; the first switch away from a native stack makes one too */
    ucontext_t context;
    void (*run)(void *argument);
    void *argument;
};

static entry *entry_of(emu_context *context)
{
    if (context->sp == NULL) {
        context->sp = pd_calloc(1, sizeof(entry));
        pd_assert(context->sp != NULL);
    }
    return (entry *)context->sp;
}

/* makecontext passes ints only. */
static void enter(unsigned low, unsigned high)
{
    entry *e = (entry *)((uintptr_t)low | (uintptr_t)high << 32);
    e->run(e->argument);
}

void emu_context_make(emu_context *to, void *stack, size_t bytes, void (*run)(void *argument),
                      void *argument)
{
    entry *e = entry_of(to);
    uint64_t at = (uintptr_t)e;

    pd_assert(getcontext(&e->context) == 0);
    e->context.uc_stack.ss_sp = stack;
    e->context.uc_stack.ss_size = bytes;
    e->context.uc_link = NULL;
    e->run = run;
    e->argument = argument;
    makecontext(&e->context, (void (*)(void))enter, 2, (unsigned)at, (unsigned)(at >> 32));
}

void emu_context_switch(emu_context *from, emu_context *to)
{
    pd_assert(swapcontext(&entry_of(from)->context, &entry_of(to)->context) == 0);
}

void emu_context_end(emu_context *context)
{
    pd_free(context->sp);
    context->sp = NULL;
}
