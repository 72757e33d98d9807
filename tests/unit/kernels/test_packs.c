/* Packed weights are made once, shared by whoever comes, and never taken when they are not just
 * what was made. */

#include "kernels/pack_file.h"
#include "kernels/packs.h"
#include "kernels/packs_prune.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/hash.h"
#include "common/base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define BYTES ((size_t)(3 << 20) + 4096 + 192) /* neither whole chunks nor whole pages */

static pd_model_file *file;
static char folder[PATH_MAX];
static uint32_t fills;

/* ---- a folder ---- */

static void command(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void command(const char *format, ...)
{
    char text[2 * PATH_MAX];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    assert_int_equal(system(text), 0);
}

static int fresh_folder(void **state)
{
    (void)state;
    /* packs are written through to the disk: in memory a hundred of them take no time */
    const char *tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";

    snprintf(folder, sizeof folder, "%s/test-packs-XXXXXX", tmp);
    assert_non_null(mkdtemp(folder));
    fills = 0;
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    command("chmod -R u+w '%s' && rm -r '%s'", folder, folder);
    return 0;
}

/* How many files have a name that ends so; the last one's path. */
static uint32_t count_of(const char *ending, char path_out[PATH_MAX])
{
    char text[2 * PATH_MAX];
    uint32_t count = 0;

    snprintf(text, sizeof text, "ls '%s'", folder);
    FILE *list = popen(text, "r");
    assert_non_null(list);
    while (fgets(text, sizeof text, list) != NULL) {
        text[strcspn(text, "\n")] = '\0';
        size_t len = strlen(text), end = strlen(ending);
        if (len < end || strcmp(text + len - end, ending) != 0)
            continue;
        snprintf(path_out, PATH_MAX, "%.2000s/%.2000s", folder, text);
        count++;
    }
    assert_int_equal(pclose(list), 0);
    return count;
}

/* ---- weights ---- */

static uint64_t word_at(size_t i)
{
    return pd_mix64(i + 1);
}

static pd_status fill(void *ctx, kern_memory *memory)
{
    uint64_t *words = kern_memory_take(memory, BYTES);

    (void)ctx;
    fills++;
    for (size_t i = 0; i < BYTES / sizeof *words; i++)
        words[i] = word_at(i);
    return PD_OK;
}

static kern_packs_want want_of(const char *place)
{
    return (kern_packs_want){.place = {.folder = place}, .file = file, .layout = 7, .bytes = BYTES};
}

static bool is_right(const kern_memory *memory)
{
    const uint64_t *words = (const uint64_t *)memory->base;

    for (size_t i = 0; i < BYTES / sizeof *words; i++)
        if (words[i] != word_at(i))
            return false;
    return memory->used == 0 && memory->bytes >= BYTES;
}

static void get_with(const kern_packs_want *want, uint32_t fills_after)
{
    kern_memory memory;

    assert_int_equal(kern_packs_get(want, fill, NULL, &memory), PD_OK);
    assert_true(is_right(&memory));
    assert_int_equal(fills, fills_after);
    kern_memory_unmap(&memory);
}

static void get(uint32_t fills_after)
{
    kern_packs_want want = want_of(folder);

    get_with(&want, fills_after);
}

/* ---- one copy ---- */

static void what_was_packed_is_mapped_by_the_next_and_not_packed_again(void **state)
{
    (void)state;
    char path[PATH_MAX];
    struct stat info;
    kern_packs_want want = want_of(folder);
    kern_memory one, two;

    get(1);
    assert_int_equal(count_of(".pack", path), 1);
    assert_int_equal(count_of(".tmp", path), 0);
    count_of(".pack", path);
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0400);
    assert_int_equal(info.st_size, kern_pack_file_bytes(BYTES));
    assert_int_equal(kern_packs_get(&want, fill, NULL, &one), PD_OK);
    assert_int_equal(kern_packs_get(&want, fill, NULL, &two), PD_OK);
    assert_int_equal(fills, 1);
    /* the same pages: what root writes into the file shows in both */
    int fd = open(path, O_RDWR);
    if (fd >= 0) {
        assert_int_equal(pwrite(fd, "x", 1, 100), 1);
        assert_int_equal(one.base[100], 'x');
        assert_int_equal(two.base[100], 'x');
        close(fd);
    }
    kern_memory_unmap(&one);
    kern_memory_unmap(&two);
}

static void another_layout_is_another_pack(void **state)
{
    (void)state;
    char path[PATH_MAX];
    kern_packs_want other = want_of(folder);

    other.layout = 8;
    get(1);
    get_with(&other, 2);
    get(2);
    assert_int_equal(count_of(".pack", path), 2);
}

/* ---- damage ---- */

static void damaged(const char *shell)
{
    char path[PATH_MAX];

    fills = 0;
    get(1);
    assert_int_equal(count_of(".pack", path), 1);
    command("cd '%s' && chmod u+w '%s' && f='%s' && %s", folder, path, path, shell);
    get(2);
    get(2); /* what was made anew is sound */
    assert_int_equal(count_of(".pack", path), 1);
    assert_int_equal(count_of(".tmp", path), 0);
    command("rm -rf '%s'/*", folder);
}

static void a_damaged_pack_is_made_anew(void **state)
{
    (void)state;
    damaged("truncate -s 0 $f");
    damaged("truncate -s -1 $f");
    damaged("truncate -s 1M $f");
    damaged("truncate -s +1 $f");
    damaged("truncate -s +1M $f");
    damaged("printf x | dd of=$f conv=notrunc bs=1 seek=0 status=none");
    damaged("printf x | dd of=$f conv=notrunc bs=1 seek=2000000 status=none");
    damaged("printf x | dd of=$f conv=notrunc bs=1 seek=3149800 status=none"); /* the last bytes */
    damaged("dd if=/dev/zero of=$f conv=notrunc bs=1M seek=1 count=1 status=none"); /* lost pages */
    damaged("printf x | dd of=$f conv=notrunc bs=1 seek=3153920 status=none");      /* the magic */
    damaged("printf x | dd of=$f conv=notrunc bs=1 seek=3153945 status=none"); /* the description */
    damaged("s=$(stat -c %s $f) && truncate -s 0 $f && truncate -s $s $f");    /* never written */
}

static void what_is_no_file_of_ours_is_not_believed(void **state)
{
    (void)state;
    damaged("mv $f own && ln -s own $f");
    damaged("chmod 660 $f");
    damaged("rm $f && mkfifo $f");
    if (geteuid() == 0)
        damaged("chown 12345 $f");
}

static void a_pack_of_another_layout_or_model_under_this_name_is_not_taken(void **state)
{
    (void)state;
    char path[PATH_MAX], other[PATH_MAX];
    kern_packs_want want = want_of(folder);

    get(1);
    count_of(".pack", path);
    snprintf(other, sizeof other, "%s", path);
    memcpy(other + strlen(other) - strlen("7.pack"), "8", 1);
    command("mv '%s' '%s'", path, other);
    want.layout = 8;
    get_with(&want, 2);
    get_with(&want, 2);
}

static void what_was_left_half_written_is_written_anew(void **state)
{
    (void)state;
    char path[PATH_MAX], tmp[PATH_MAX];

    get(1);
    count_of(".pack", path);
    snprintf(tmp, sizeof tmp, "%.*s.tmp", (int)(strlen(path) - strlen(".pack")), path);
    command("mv '%s' '%s' && chmod 600 '%s' && truncate -s 1M '%s'", path, tmp, tmp, tmp);
    get(2);
    get(2);
    assert_int_equal(count_of(".tmp", path), 0);
}

/* ---- processes ---- */

static pd_status slow_fill(void *ctx, kern_memory *memory)
{
    struct timespec pause = {.tv_nsec = 60 * 1000000};
    int *counter = ctx;

    assert_int_equal(write(*counter, "x", 1), 1);
    nanosleep(&pause, NULL);
    return fill(NULL, memory);
}

static void processes_that_start_together_pack_once(void **state)
{
    (void)state;
    enum { PROCESSES = 5 };
    char path[PATH_MAX];
    struct stat info;
    pid_t pids[PROCESSES];
    kern_packs_want want = want_of(folder);

    snprintf(path, sizeof path, "%.2000s/counter", folder);
    int counter = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    assert_true(counter >= 0);
    for (int i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            kern_memory memory;
            _exit(kern_packs_get(&want, slow_fill, &counter, &memory) != PD_OK ||
                  !is_right(&memory));
        }
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = -1;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(fstat(counter, &info), 0);
    assert_int_equal(info.st_size, 1);
    close(counter);
    assert_int_equal(count_of(".tmp", path), 0);
}

static pd_status last_fill(void *ctx, kern_memory *memory)
{
    (void)ctx;
    (void)memory;
    _exit(3);
}

static void a_process_that_dies_while_it_packs_holds_up_nobody(void **state)
{
    (void)state;
    kern_packs_want want = want_of(folder);
    kern_memory memory;
    int status = 0;
    pid_t pid = fork();

    if (pid == 0)
        _exit(kern_packs_get(&want, last_fill, NULL, &memory) == PD_OK);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 3);
    get(1);
    get(1);
}

/* ---- no place ---- */

static void without_a_place_memory_is_private(void **state)
{
    (void)state;
    char path[PATH_MAX], below[PATH_MAX];
    kern_packs_want nowhere = want_of(NULL), below_a_file, in_proc = want_of("/proc/packs/none"),
                    small = want_of(folder), open_to_all = want_of(folder);

    get_with(&nowhere, 1);
    get_with(&in_proc, 2);
    command("touch '%s/file'", folder);
    snprintf(below, sizeof below, "%.2000s/file/weights", folder);
    below_a_file = want_of(below);
    get_with(&below_a_file, 3);
    small.place.bytes_max = BYTES;
    get_with(&small, 4);
    assert_int_equal(count_of(".pack", path) + count_of(".tmp", path), 0);
    command("chmod 770 '%s'", folder);
    get_with(&open_to_all, 5);
    assert_int_equal(count_of(".pack", path) + count_of(".tmp", path), 0);
}

static void a_folder_that_is_missing_is_made(void **state)
{
    (void)state;
    char deep[PATH_MAX];
    struct stat info;

    snprintf(deep, sizeof deep, "%.2000s/a/b", folder);
    kern_packs_want want = want_of(deep);
    get_with(&want, 1);
    get_with(&want, 1);
    assert_int_equal(stat(deep, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0700);
}

static void where_files_may_not_be_so_large_memory_is_private(void **state)
{
    (void)state;
    struct rlimit limit = {BYTES - 1, BYTES - 1};
    char path[PATH_MAX];
    int status = 0;
    pid_t pid = fork();

    if (pid == 0) {
        kern_packs_want want = want_of(folder);
        kern_memory memory;
        _exit(setrlimit(RLIMIT_FSIZE, &limit) != 0 ||
              kern_packs_get(&want, fill, NULL, &memory) != PD_OK || !is_right(&memory));
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(count_of(".pack", path) + count_of(".tmp", path), 0);
}

static void a_full_disk_is_told(void **state)
{
    (void)state;
    kern_pack_what what = {.layout = 1, .bytes = BYTES};
    uint8_t *bytes = pd_calloc(1, BYTES);
    int fd = open("/dev/full", O_RDWR);

    assert_true(fd >= 0);
    assert_int_equal(kern_pack_file_write(fd, &what, bytes), PD_E_IO);
    assert_int_equal(errno, ENOSPC);
    close(fd);
    pd_free(bytes);
}

/* ---- the model file ---- */

/* A change that no sample of the fingerprint sees, in a file that looks as old as before. */
static void another_byte_in_the_model_file_is_another_model(void **state)
{
    (void)state;
    char path[PATH_MAX], found[PATH_MAX];
    kern_packs_want want = want_of(folder);
    pd_model_file *first, *second;
    struct stat info;

    snprintf(path, sizeof path, "%.2000s/model.gguf", folder);
    tiny_write(&tiny_every_format, path);
    assert_int_equal(pd_model_file_open(path, &first), PD_OK);
    const pd_tensor *tensor = pd_model_file_tensor(first, "token_embd.weight");
    assert_non_null(tensor);
    assert_true(tensor->bytes > 4 * 256);
    const uint8_t *target = (const uint8_t *)tensor->data + 600;
    want.file = first;
    get_with(&want, 1);
    get_with(&want, 1);
    assert_int_equal(stat(path, &info), 0);

    /* find the byte's place in the file by its neighbourhood */
    size_t size = (size_t)info.st_size;
    uint8_t *bytes = pd_malloc(size);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, bytes, size, 0), size);
    uint8_t *at = memmem(bytes, size, target, 64);
    assert_non_null(at);
    uint8_t other = *at ^ 1;
    assert_int_equal(pwrite(fd, &other, 1, at - bytes), 1);
    struct timespec times[2] = {info.st_atim, info.st_mtim};
    assert_int_equal(futimens(fd, times), 0);
    close(fd);
    pd_free(bytes);

    assert_int_equal(pd_model_file_open(path, &second), PD_OK);
    pd_hash128 a = pd_model_file_fingerprint(first), b = pd_model_file_fingerprint(second);
    assert_memory_equal(&a, &b, sizeof a);
    want.file = second;
    get_with(&want, 2);
    assert_int_equal(count_of(".pack", found), 2);
    pd_model_file_close(first);
    pd_model_file_close(second);
}

static void a_model_file_that_changes_while_it_is_packed_is_not_kept(void **state)
{
    (void)state;
    char path[PATH_MAX], found[PATH_MAX];
    kern_packs_want want = want_of(folder);
    pd_model_file *changing;

    snprintf(path, sizeof path, "%.2000s/model.gguf", folder);
    tiny_write(&tiny_every_format, path);
    assert_int_equal(pd_model_file_open(path, &changing), PD_OK);
    command("printf x >> '%s'", path);
    want.file = changing;
    get_with(&want, 1);
    assert_int_equal(count_of(".pack", found), 0);
    pd_model_file_close(changing);
}

/* The hash of a file that was changed just now is not remembered; of an older one it is, and a
 * damaged memory of it is none. */
static void a_known_model_file_is_not_read_again(void **state)
{
    (void)state;
    struct timespec grain = {.tv_sec = 2, .tv_nsec = 100 * 1000000};
    char path[PATH_MAX], seen[PATH_MAX];
    kern_packs_want want = want_of(folder);
    pd_model_file *young;

    snprintf(path, sizeof path, "%.2000s/model.gguf", folder);
    tiny_write(&tiny_every_format, path);
    assert_int_equal(pd_model_file_open(path, &young), PD_OK);
    want.file = young;
    get_with(&want, 1);
    assert_int_equal(count_of(".seen", seen), 0);
    nanosleep(&grain, NULL);
    get_with(&want, 1);
    assert_int_equal(count_of(".seen", seen), 1);
    get_with(&want, 1);
    command("printf x | dd of='%s' conv=notrunc bs=1 seek=70 status=none", seen); /* the hash */
    get_with(&want, 1);
    command("truncate -s 40 '%s'", seen);
    get_with(&want, 1);
    pd_model_file_close(young);
}

/* ---- what goes ---- */

#define MODEL_A "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define MODEL_B "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

static bool is_there(const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%.2000s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static void old_files_go_when_a_pack_is_made(void **state)
{
    (void)state;
    int fd = open(folder, O_RDONLY | O_DIRECTORY);

    assert_true(fd >= 0);
    command("cd '%s' && for n in " MODEL_A "-1.pack " MODEL_A "-2.pack " MODEL_A "-3.pack " MODEL_B
            "-1.pack " MODEL_B "-2.pack x.seen y.seen old.tmp new.tmp notes.txt; do "
            "truncate -s 1M $n; done && touch -d '8 days ago' " MODEL_A "-2.pack " MODEL_B
            "-1.pack && touch -d '6 days ago' " MODEL_A "-3.pack && touch -d '31 days ago' " MODEL_B
            "-2.pack x.seen notes.txt && touch -d '2 days ago' old.tmp y.seen",
            folder);
    kern_packs_prune(fd, MODEL_A "-1.pack", 100 << 20);
    assert_true(is_there(MODEL_A "-1.pack"));
    assert_false(is_there(MODEL_A "-2.pack"));
    assert_true(is_there(MODEL_A "-3.pack"));
    assert_true(is_there(MODEL_B "-1.pack"));
    assert_false(is_there(MODEL_B "-2.pack"));
    assert_false(is_there("x.seen"));
    assert_true(is_there("y.seen"));
    assert_false(is_there("old.tmp"));
    assert_true(is_there("new.tmp"));
    assert_true(is_there("notes.txt"));
    kern_packs_prune(fd, MODEL_A "-1.pack", 2 << 20); /* three are too many: the oldest goes */
    assert_true(is_there(MODEL_A "-1.pack"));
    assert_true(is_there(MODEL_A "-3.pack"));
    assert_false(is_there(MODEL_B "-1.pack"));
    close(fd);
}

static int open_file(void **state)
{
    (void)state;
    file = tiny_open();
    return 0;
}

static int close_file(void **state)
{
    (void)state;
    pd_model_file_close(file);
    return 0;
}

#define IN_A_FOLDER(test) cmocka_unit_test_setup_teardown(test, fresh_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(what_was_packed_is_mapped_by_the_next_and_not_packed_again),
        IN_A_FOLDER(another_layout_is_another_pack),
        IN_A_FOLDER(a_damaged_pack_is_made_anew),
        IN_A_FOLDER(what_is_no_file_of_ours_is_not_believed),
        IN_A_FOLDER(a_pack_of_another_layout_or_model_under_this_name_is_not_taken),
        IN_A_FOLDER(what_was_left_half_written_is_written_anew),
        IN_A_FOLDER(processes_that_start_together_pack_once),
        IN_A_FOLDER(a_process_that_dies_while_it_packs_holds_up_nobody),
        IN_A_FOLDER(without_a_place_memory_is_private),
        IN_A_FOLDER(a_folder_that_is_missing_is_made),
        IN_A_FOLDER(where_files_may_not_be_so_large_memory_is_private),
        IN_A_FOLDER(a_full_disk_is_told),
        IN_A_FOLDER(another_byte_in_the_model_file_is_another_model),
        IN_A_FOLDER(a_model_file_that_changes_while_it_is_packed_is_not_kept),
        IN_A_FOLDER(a_known_model_file_is_not_read_again),
        IN_A_FOLDER(old_files_go_when_a_pack_is_made),
    };
    return cmocka_run_group_tests(tests, open_file, close_file);
}
