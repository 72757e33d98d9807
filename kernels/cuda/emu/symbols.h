#pragma once

/* kernels/cuda/emu/symbols.h - what the emulator must know of the program it is linked into: where
 * static shared memory lies, and where in the source an address of code is.
 *
 * CU_SHARED makes a function's static variable, and such are what C++ names _ZZ...; g++ ignores a
 * section attribute on them in templates, so they are found in the module's symbol table. A module
 * without one (stripped) runs, its static shared memory is not poisoned or watched. So nothing of
 * the emulator, and no launcher, has static variables in a function that are not constants. */

#include <stddef.h>
#include <stdint.h>

struct emu_variable {
    unsigned char *at;
    uint32_t bytes;
    uint32_t offset; /* of all static shared memory, one after the other */
    char name[44];
};

/* Reads the symbols at the first call; later ones are free. */
void emu_symbols_load(void);
extern emu_variable *emu_variables; /* by address */
extern unsigned emu_variable_count;
extern uint32_t emu_variable_bytes; /* of all */
/* NULL: no shared variable lies there. */
const emu_variable *emu_variable_at(const void *at);
/* Whether it is code or data of the module itself. */
bool emu_in_module(const void *at);

/* "rows.cu:41", by addr2line where there is one; else the offset in the module. */
void emu_source_of(const void *code, char *text, size_t size);
