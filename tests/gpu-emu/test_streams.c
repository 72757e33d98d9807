/* gpu.h on the emulated device: streams, events, graphs, calls, and memory that two processes map.
 */
#include "kernels/cuda/emu/emu.h"
#include "tests/gpu-emu/device.h"
#include "tests/gpu-emu/planted.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define COUNT 256u

static void late(uint64_t seed)
{
    emu_options options = {
        .order = EMU_RANDOM, .seed = seed, .late_copies = true, .late_streams = true};

    emu_configure(&options);
}

struct pipe { /* two streams: the first sums, the second copies the sum away */
    gpu_stream *other;
    gpu_event *summed;
    uint32_t *in, *total, *kept;
};

static void pipe_open(device *d, struct pipe *p)
{
    uint32_t in[COUNT], nothing = 0;

    for (uint32_t i = 0; i < COUNT; i++)
        in[i] = i;
    assert_int_equal(gpu_stream_create(d->gpu, &p->other), PD_OK);
    assert_int_equal(gpu_event_create(d->gpu, &p->summed), PD_OK);
    p->in = device_upload(d, in, sizeof in);
    p->total = device_upload(d, &nothing, sizeof nothing);
    p->kept = device_upload(d, &nothing, sizeof nothing);
}

static void pipe_close(device *d, struct pipe *p)
{
    gpu_stream_destroy(p->other);
    gpu_event_destroy(p->summed);
    device_clear(d);
}

static uint32_t pipe_run(device *d, struct pipe *p, bool waits)
{
    uint32_t kept = 0;

    assert_int_equal(planted_total(d->stream, 0, COUNT, p->in, p->total), PD_OK);
    assert_int_equal(gpu_event_record(p->summed, d->stream), PD_OK);
    if (waits)
        assert_int_equal(gpu_stream_wait_event(p->other, p->summed), PD_OK);
    assert_int_equal(gpu_copy(p->other, p->kept, p->total, sizeof kept), PD_OK);
    assert_int_equal(gpu_copy_out(p->other, &kept, p->kept, sizeof kept), PD_OK);
    assert_int_equal(gpu_stream_wait(p->other), PD_OK);
    return kept;
}

static void a_stream_waits_for_another_s_event(void **state)
{
    for (uint64_t seed = 0; seed < 16; seed++) {
        struct pipe p;
        late(seed);
        pipe_open(*state, &p);
        assert_int_equal(pipe_run(*state, &p, true), COUNT * (COUNT - 1) / 2);
        pipe_close(*state, &p);
    }
}

static void a_missing_event_wait_is_found(void **state)
{
    unsigned wrong = 0;

    for (uint64_t seed = 0; seed < 16; seed++) {
        struct pipe p;
        late(seed);
        pipe_open(*state, &p);
        wrong += pipe_run(*state, &p, false) != COUNT * (COUNT - 1) / 2;
        pipe_close(*state, &p);
    }
    assert_true(wrong >= 4);
}

static void who_only_polls_gets_there(void **state)
{
    device *d = *state;
    struct pipe p;
    pd_status status = PD_E_AGAIN;
    unsigned polls = 0;

    late(3);
    pipe_open(d, &p);
    assert_int_equal(planted_total(d->stream, 0, COUNT, p.in, p.total), PD_OK);
    assert_int_equal(gpu_event_record(p.summed, d->stream), PD_OK);
    for (; polls < 100000 && status == PD_E_AGAIN; polls++) {
        status = gpu_event_poll(p.summed);
        usleep(10);
    }
    assert_int_equal(status, PD_OK);
    pipe_close(d, &p);
}

static void host_memory_may_be_used_again_at_once_unless_it_is_pinned(void **state)
{
    device *d = *state;
    uint32_t value = 5, back = 0, *pinned;

    late(1);
    uint32_t *memory = device_space(d, sizeof value);
    assert_int_equal(gpu_copy_in(d->stream, memory, &value, sizeof value), PD_OK);
    value = 6;
    device_download(d, &back, memory, sizeof back);
    assert_int_equal(back, 5);
    /* what a GPU may do with pinned memory, this one does */
    assert_int_equal(gpu_host_alloc(d->gpu, sizeof *pinned, (void **)&pinned), PD_OK);
    *pinned = 7;
    assert_int_equal(gpu_copy_in(d->stream, memory, pinned, sizeof *pinned), PD_OK);
    *pinned = 8;
    device_download(d, &back, memory, sizeof back);
    assert_int_equal(back, 8);
    gpu_host_free(d->gpu, pinned);
    device_clear(d);
}

/* Nobody may rely on a copy to memory that is not pinned to have arrived: sometimes it has not. */
static void host_memory_has_arrived_when_its_stream_was_awaited(void **state)
{
    device *d = *state;
    uint32_t value = 5, back = 0;

    late(1);
    uint32_t *memory = device_upload(d, &value, sizeof value);
    assert_int_equal(gpu_copy_out(d->stream, &back, memory, sizeof back), PD_OK);
    assert_int_equal(back, 0);
    assert_int_equal(gpu_stream_wait(d->stream), PD_OK);
    assert_int_equal(back, 5);
    device_clear(d);
}

/* It is not waited for, so that what it was told may come after what others do. */
static void a_stream_that_is_destroyed_does_what_it_was_told(void **state)
{
    device *d = *state;
    unsigned before = 0, after = 0;

    for (uint64_t seed = 0; seed < 16; seed++) {
        gpu_stream *other = NULL;
        uint32_t value = 5, back = 0;
        late(seed);
        uint32_t *memory = device_upload(d, &value, sizeof value);
        assert_int_equal(gpu_stream_create(d->gpu, &other), PD_OK);
        assert_int_equal(gpu_fill(other, memory, 0, sizeof value), PD_OK);
        gpu_stream_destroy(other);
        device_download(d, &back, memory, sizeof back);
        assert_true(back == 5 || back == 0);
        before += back == 0;
        after += back == 5;
        void *freed = NULL; /* freeing waits for all */
        assert_int_equal(gpu_alloc(d->gpu, 4, &freed), PD_OK);
        gpu_free(d->gpu, freed);
        device_download(d, &back, memory, sizeof back);
        assert_int_equal(back, 0);
        device_clear(d);
    }
    assert_true(before >= 2 && after >= 2);
}

static void count(void *ctx)
{
    ++*(unsigned *)ctx;
}

static void a_graph_does_again_what_was_recorded(void **state)
{
    device *d = *state;
    struct pipe p;
    gpu_graph *graph = NULL;
    uint32_t total = 0;
    unsigned calls = 0;

    late(5);
    pipe_open(d, &p);
    assert_int_equal(gpu_graph_begin(d->stream), PD_OK);
    assert_int_equal(gpu_fill(d->stream, p.total, 0, sizeof total), PD_OK);
    assert_int_equal(planted_total(d->stream, 0, COUNT, p.in, p.total), PD_OK);
    assert_int_equal(gpu_call(d->stream, count, &calls), PD_OK);
    assert_int_equal(gpu_graph_end(d->stream, &graph), PD_OK);
    device_finish(d);
    assert_int_equal(calls, 0);
    for (unsigned i = 1; i <= 3; i++) {
        assert_int_equal(gpu_graph_launch(graph, d->stream), PD_OK);
        device_download(d, &total, p.total, sizeof total);
        assert_int_equal(total, COUNT * (COUNT - 1) / 2);
        assert_int_equal(calls, i);
    }
    gpu_graph_destroy(graph);
    pipe_close(d, &p);
}

static void a_broken_device_says_so_to_everyone(void **state)
{
    device *d = *state;
    struct pipe p;
    uint32_t word = 0;

    late(2);
    pipe_open(d, &p);
    /* writes in front of its memory */
    assert_int_equal(planted_total(d->stream, 4, COUNT, p.in, p.total), PD_OK);
    assert_int_equal(gpu_stream_wait(d->stream), PD_E_INTERNAL);
    assert_non_null(gpu_broken(d->gpu));
    assert_int_equal(gpu_copy_out(p.other, &word, p.kept, sizeof word), PD_E_INTERNAL);
    assert_int_equal(gpu_event_wait(p.summed), PD_E_INTERNAL);
    emu_forget();
    pipe_close(d, &p);
}

static void copies_stay_within_their_memory(void **state)
{
    device *d = *state;
    uint32_t words[3] = {0};

    late(2);
    uint32_t *memory = device_space(d, 8);
    assert_int_equal(gpu_copy_in(d->stream, memory, words, 12), PD_OK);
    assert_int_equal(gpu_stream_wait(d->stream), PD_E_INTERNAL);
    assert_non_null(strstr(emu_found(), "not device memory"));
    emu_forget();
    device_clear(d);
}

/* The other process: adds 1 to what it imports. */
static int other_process(const char *hex)
{
    unsigned char handle[GPU_HANDLE_BYTES];
    gpu *g = NULL;
    gpu_stream *stream = NULL;
    void *memory = NULL;
    uint32_t word = 0;
    int bad = 1;

    for (size_t i = 0; i < sizeof handle; i++) {
        unsigned byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1)
            return 1;
        handle[i] = (unsigned char)byte;
    }
    if (gpu_open(1, &g) != PD_OK || gpu_stream_create(g, &stream) != PD_OK)
        return 1;
    if (gpu_import(g, handle, 1 << 20, &memory) == PD_OK) /* more than there is */
        return 1;
    if (gpu_import(g, handle, 4096, &memory) == PD_OK &&
        gpu_copy_out(stream, &word, memory, sizeof word) == PD_OK &&
        gpu_stream_wait(stream) == PD_OK && word == 41) {
        word++;
        if (gpu_copy_in(stream, memory, &word, sizeof word) == PD_OK &&
            gpu_stream_wait(stream) == PD_OK)
            bad = 0;
        gpu_unimport(g, memory);
    }
    gpu_stream_destroy(stream);
    gpu_close(g);
    return bad;
}

static void memory_is_shared_by_its_handle(void **state)
{
    device *d = *state;
    unsigned char handle[GPU_HANDLE_BYTES];
    char hex[2 * GPU_HANDLE_BYTES + 1];
    uint32_t word = 41;
    void *memory, *again = NULL;
    int status = 1;

    late(1);
    memory = device_space(d, 4096);
    assert_int_equal(gpu_copy_in(d->stream, memory, &word, sizeof word), PD_OK);
    device_finish(d);
    assert_int_equal(gpu_export(d->gpu, memory, handle), PD_OK);
    assert_int_not_equal(gpu_import(d->gpu, handle, 4096, &again), PD_OK); /* its own */
    for (size_t i = 0; i < sizeof handle; i++)
        snprintf(hex + 2 * i, 3, "%02x", handle[i]);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_gpu_streams", hex, (char *)NULL);
        _exit(2);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    device_download(d, &word, memory, sizeof word);
    assert_int_equal(word, 42);
    device_clear(d);
}

static void a_pool_s_memory_reaches_what_was_asked_for_or_is_refused(void **state)
{
    device *d = *state;
    pd_memory_reach reach = PD_REACH_AUTO;
    void *memory = NULL;

    late(1);
    assert_int_equal(gpu_alloc_pool(d->gpu, 8192, PD_REACH_FABRIC, &memory, &reach),
                     PD_E_UNSUPPORTED);
    assert_int_equal(gpu_alloc_pool(d->gpu, 8192, PD_REACH_AUTO, &memory, &reach), PD_OK);
    assert_int_equal(reach, PD_REACH_HOST);
    gpu_free(d->gpu, memory);
    assert_int_equal(gpu_alloc_pool(d->gpu, 8192, PD_REACH_HOST, &memory, &reach), PD_OK);
    assert_int_equal(reach, PD_REACH_HOST);
    gpu_free(d->gpu, memory);
    device_clear(d);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_waits_for_another_s_event),
        cmocka_unit_test(a_missing_event_wait_is_found),
        cmocka_unit_test(who_only_polls_gets_there),
        cmocka_unit_test(host_memory_may_be_used_again_at_once_unless_it_is_pinned),
        cmocka_unit_test(host_memory_has_arrived_when_its_stream_was_awaited),
        cmocka_unit_test(a_stream_that_is_destroyed_does_what_it_was_told),
        cmocka_unit_test(a_graph_does_again_what_was_recorded),
        cmocka_unit_test(a_broken_device_says_so_to_everyone),
        cmocka_unit_test(copies_stay_within_their_memory),
        cmocka_unit_test(memory_is_shared_by_its_handle),
        cmocka_unit_test(a_pool_s_memory_reaches_what_was_asked_for_or_is_refused),
    };

    if (argc == 2 && strlen(argv[1]) == 2 * GPU_HANDLE_BYTES)
        return other_process(argv[1]);
    return cmocka_run_group_tests_name("gpu-emu-streams", tests, device_setup, device_teardown);
}
