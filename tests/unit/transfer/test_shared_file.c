/* Memory of one process is mapped by another through its file, and never another file's. */

#include "common/transfer/shared_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, BYTES = 5 * PAGE };

static int file_make(void)
{
    int fd = memfd_create("test", MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    return fd;
}

static unsigned char *map(int fd, int flags, off_t offset)
{
    void *memory = mmap(NULL, (size_t)(BYTES - offset), PROT_READ | PROT_WRITE, flags, fd, offset);

    assert_true(memory != MAP_FAILED);
    return memory;
}

/* In another process: what that file says is mapped and changed. */
static int change_in_child(const pd_shared_file *file, uint64_t bytes)
{
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        void *memory;
        if (pd_shared_file_map(file, bytes, &memory) != PD_OK)
            _exit(1);
        memset(memory, 7, bytes);
        _exit(munmap(memory, bytes) == 0 ? 0 : 2);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WEXITSTATUS(status);
}

static void another_process_writes_the_very_memory(void **state)
{
    pd_shared_file file;
    int fd = file_make();
    unsigned char *whole = map(fd, MAP_SHARED, 0);

    (void)state;
    /* a part of the mapping, from its second page on */
    assert_int_equal(pd_shared_file_of(whole + PAGE, 2 * PAGE, &file), PD_OK);
    assert_int_equal(file.offset, PAGE);
    assert_int_equal(change_in_child(&file, 2 * PAGE), 0);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(whole[i], i >= PAGE && i < 3 * PAGE ? 7 : 0);
    /* and where the mapping itself does not begin with the file */
    munmap(whole, BYTES);
    unsigned char *later = map(fd, MAP_SHARED, 3 * PAGE);
    assert_int_equal(pd_shared_file_of(later, 2 * PAGE, &file), PD_OK);
    assert_int_equal(file.offset, 3 * PAGE);
    assert_int_equal(change_in_child(&file, 2 * PAGE), 0);
    assert_int_equal(later[2 * PAGE - 1], 7);
    munmap(later, 2 * PAGE);
    close(fd);
}

static void what_cannot_be_shared_is_told(void **state)
{
    pd_shared_file file;
    int fd = file_make();
    unsigned char *own = map(fd, MAP_PRIVATE, 0), *shared = map(fd, MAP_SHARED, 0);
    unsigned char *nameless = map(-1, MAP_PRIVATE | MAP_ANONYMOUS, 0);

    (void)state;
    assert_int_equal(pd_shared_file_of(own, BYTES, &file), PD_E_NOT_FOUND);
    assert_int_equal(pd_shared_file_of(nameless, BYTES, &file), PD_E_NOT_FOUND);
    assert_int_equal(pd_shared_file_of(shared, BYTES + PAGE, &file), PD_E_NOT_FOUND);
    assert_int_equal(pd_shared_file_of(shared, BYTES, &file), PD_OK);
    close(fd); /* mapped still, but nobody can be led to it */
    assert_int_equal(pd_shared_file_of(shared, BYTES, &file), PD_E_NOT_FOUND);
    munmap(own, BYTES);
    munmap(shared, BYTES);
    munmap(nameless, BYTES);
}

static void another_file_is_never_mapped(void **state)
{
    pd_shared_file file;
    void *memory = NULL;
    int fd = file_make();
    unsigned char *shared = map(fd, MAP_SHARED, 0);

    (void)state;
    assert_int_equal(pd_shared_file_of(shared, BYTES, &file), PD_OK);
    assert_int_equal(pd_shared_file_map(&file, BYTES + 1, &memory), PD_E_NOT_FOUND);
    assert_int_equal(pd_shared_file_map(&file, 0, &memory), PD_E_NOT_FOUND);
    pd_shared_file bad = file;
    bad.inode++;
    assert_int_equal(pd_shared_file_map(&bad, BYTES, &memory), PD_E_NOT_FOUND);
    bad = file;
    bad.device++;
    assert_int_equal(pd_shared_file_map(&bad, BYTES, &memory), PD_E_NOT_FOUND);
    bad = file;
    bad.pid = UINT32_MAX;
    assert_int_equal(pd_shared_file_map(&bad, BYTES, &memory), PD_E_NOT_FOUND);
    bad = file;
    bad.offset = UINT64_MAX - BYTES + 1;
    assert_int_equal(pd_shared_file_map(&bad, BYTES, &memory), PD_E_NOT_FOUND);
    bad = file;
    bad.offset = 1; /* no page */
    assert_int_equal(pd_shared_file_map(&bad, BYTES - PAGE, &memory), PD_E_NOT_FOUND);
    /* the descriptor's number is another file's by now */
    int other = file_make();
    assert_int_equal(dup2(other, fd), fd);
    assert_int_equal(pd_shared_file_map(&file, BYTES, &memory), PD_E_NOT_FOUND);
    assert_null(memory);
    close(other);
    close(fd);
    munmap(shared, BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_process_writes_the_very_memory),
        cmocka_unit_test(what_cannot_be_shared_is_told),
        cmocka_unit_test(another_file_is_never_mapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
