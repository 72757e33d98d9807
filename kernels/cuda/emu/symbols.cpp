#include "kernels/cuda/emu/symbols.h"

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/status.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define VARIABLES_MAX 1024u
#define CODES_MAX     1024u

emu_variable *emu_variables;
unsigned emu_variable_count;
uint32_t emu_variable_bytes;
static const emu_variable *last; /* that was asked for */

static struct {
    bool loaded;
    char path[512];
    uintptr_t base, from, to;
} module;

static int find_module(struct dl_phdr_info *info, size_t size, void *unused)
{
    uintptr_t here = (uintptr_t)&module, from = UINTPTR_MAX, to = 0;

    (void)size, (void)unused;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        uintptr_t at = info->dlpi_addr + header->p_vaddr;
        if (header->p_type != PT_LOAD)
            continue;
        from = at < from ? at : from;
        to = at + header->p_memsz > to ? at + header->p_memsz : to;
    }
    if (here < from || here >= to)
        return 0;
    module.base = info->dlpi_addr;
    module.from = from;
    module.to = to;
    snprintf(module.path, sizeof module.path, "%s",
             info->dlpi_name[0] != '\0' ? info->dlpi_name : "/proc/self/exe");
    if (info->dlpi_name[0] == '\0') { /* under its own name: others read it, too (addr2line) */
        char path[sizeof module.path];
        ssize_t length = readlink(module.path, path, sizeof path - 1);
        if (length > 0) {
            path[length] = '\0';
            snprintf(module.path, sizeof module.path, "%s", path);
        }
    }
    return 1;
}

/* _ZZ4kernILi3EEvPfE4tile: the last length and identifier. */
static void variable_name(const char *mangled, char *out, size_t size)
{
    const char *end = mangled + strlen(mangled), *best = mangled;

    for (const char *at = mangled; *at != '\0'; at++) {
        char *after;
        if (*at != 'E' || at[1] < '1' || at[1] > '9')
            continue;
        unsigned long length = strtoul(at + 1, &after, 10);
        if (after + length <= end && (after[length] == '\0' || after[length] == '_')) {
            best = after;
            end = after + length;
            break;
        }
    }
    snprintf(out, size, "%.*s", (int)(end - best), best);
}

static int by_address(const void *left, const void *right)
{
    const emu_variable *a = static_cast<const emu_variable *>(left);
    const emu_variable *b = static_cast<const emu_variable *>(right);

    return a->at < b->at ? -1 : a->at > b->at;
}

static void read_symbols(const unsigned char *file, size_t bytes)
{
    ElfW(Ehdr) head;
    const ElfW(Shdr) * sections;

    if (bytes < sizeof head)
        return;
    memcpy(&head, file, sizeof head);
    if (memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_shentsize != sizeof *sections ||
        head.e_shoff + (uint64_t)head.e_shnum * sizeof *sections > bytes)
        return;
    sections = (const ElfW(Shdr) *)(file + head.e_shoff);
    for (unsigned s = 0; s < head.e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB || sections[s].sh_link >= head.e_shnum)
            continue;
        const ElfW(Shdr) *names = &sections[sections[s].sh_link];
        if (sections[s].sh_offset + sections[s].sh_size > bytes ||
            names->sh_offset + names->sh_size > bytes)
            continue;
        const ElfW(Sym) *symbols = (const ElfW(Sym) *)(file + sections[s].sh_offset);
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            const ElfW(Sym) *symbol = &symbols[i];
            if ((symbol->st_info & 0xf) != STT_OBJECT || symbol->st_size == 0 ||
                symbol->st_shndx == SHN_UNDEF || symbol->st_name >= names->sh_size ||
                symbol->st_shndx >= head.e_shnum ||
                sections[symbol->st_shndx].sh_type != SHT_NOBITS) /* .bss */
                continue;
            const char *name = (const char *)file + names->sh_offset + symbol->st_name;
            if (strncmp(name, "_ZZ", 3) != 0)
                continue;
            pd_assert(emu_variable_count < VARIABLES_MAX);
            emu_variable *v = &emu_variables[emu_variable_count++];
            v->at = (unsigned char *)(module.base + symbol->st_value);
            v->bytes = (uint32_t)symbol->st_size;
            variable_name(name, v->name, sizeof v->name);
        }
    }
}

void emu_symbols_load(void)
{
    struct stat info;
    int fd;

    if (module.loaded)
        return;
    module.loaded = true;
    dl_iterate_phdr(find_module, NULL);
    emu_variables = static_cast<emu_variable *>(mmap(NULL, VARIABLES_MAX * sizeof *emu_variables,
                                                     PROT_READ | PROT_WRITE,
                                                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    pd_assert(emu_variables != MAP_FAILED);
    fd = open(module.path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) {
        pd_log_warn("msg=\"emulated gpu: no symbols: %m\" path=%s", module.path);
        if (fd >= 0)
            close(fd);
        return;
    }
    void *file = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED)
        return;
    read_symbols(static_cast<const unsigned char *>(file), (size_t)info.st_size);
    munmap(file, (size_t)info.st_size);
    qsort(emu_variables, emu_variable_count, sizeof *emu_variables, by_address);
    for (unsigned i = 0; i < emu_variable_count; i++) {
        emu_variables[i].offset = emu_variable_bytes;
        emu_variable_bytes += emu_variables[i].bytes;
    }
}

const emu_variable *emu_variable_at(const void *at)
{
    const unsigned char *p = static_cast<const unsigned char *>(at);
    unsigned lo = 0, hi = emu_variable_count;

    if (last != NULL && p >= last->at && p < last->at + last->bytes)
        return last;
    if (hi == 0 || p < emu_variables[0].at ||
        p >= emu_variables[hi - 1].at + emu_variables[hi - 1].bytes)
        return NULL;
    while (lo + 1 < hi) {
        unsigned middle = (lo + hi) / 2;
        if (emu_variables[middle].at <= p)
            lo = middle;
        else
            hi = middle;
    }
    if (p >= emu_variables[lo].at + emu_variables[lo].bytes)
        return NULL;
    last = &emu_variables[lo];
    return last;
}

bool emu_in_module(const void *at)
{
    return (uintptr_t)at >= module.from && (uintptr_t)at < module.to;
}

void emu_source_of(const void *code, char *text, size_t size)
{
    char command[700], line[400] = "";
    const char *name;
    FILE *pipe;

    snprintf(text, size, "code at +0x%llx", (unsigned long long)((uintptr_t)code - module.base));
    /* the call before the address that it returns to */
    snprintf(command, sizeof command, "addr2line -e '%s' 0x%llx 2>/dev/null", module.path,
             (unsigned long long)((uintptr_t)code - module.base - 1));
    pipe = popen(command, "re");
    if (pipe == NULL)
        return;
    if (fgets(line, sizeof line, pipe) != NULL && line[0] != '?') {
        line[strcspn(line, " \n")] = '\0';
        name = strstr(line, "/kernels/");
        name = name != NULL                      ? name + 1
               : strstr(line, "/tests/") != NULL ? strstr(line, "/tests/") + 1
                                                 : line;
        snprintf(text, size, "%s", name);
    }
    pclose(pipe);
}
