/* What a model on a GPU refuses, before it has taken anything: sizes, weights and KV in formats
 * that no kernel reads; and creation when memory fails. */

#include "kernels/cuda/model.h"
#include "tests/gpu-emu/device.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#define BLOCKS 96
#define VOCAB  151

static const tiny_shape quantised = {.hidden = 64,
                                     .heads = 2,
                                     .kv_heads = 1,
                                     .head_dim = 64,
                                     .ffn = 128,
                                     .layers = 2,
                                     .vocab = VOCAB,
                                     .context = 512,
                                     .tied = true,
                                     .embedding = PD_Q8_0,
                                     .query = PD_Q4_1,
                                     .key = PD_Q4_1,
                                     .value = PD_Q4_1,
                                     .output = PD_Q4_1,
                                     .gate = PD_Q4_1,
                                     .up = PD_Q4_1,
                                     .down = PD_Q4_1};
static const tiny_shape floats = {.hidden = 256,
                                  .heads = 2,
                                  .kv_heads = 2,
                                  .head_dim = 32,
                                  .ffn = 512,
                                  .layers = 2,
                                  .vocab = VOCAB,
                                  .context = 512,
                                  .embedding = PD_F32,
                                  .query = PD_F32,
                                  .key = PD_F32,
                                  .value = PD_F32,
                                  .output = PD_F32,
                                  .gate = PD_F32,
                                  .up = PD_F32,
                                  .down = PD_F32,
                                  .head = PD_F32};
static const cu_model_settings settings = {.backend = "test"};

static kern_backend_options options_of(uint32_t rows_max)
{
    return (kern_backend_options){.context_max = 512,
                                  .rows_max = rows_max,
                                  .slices_max = 8,
                                  .sampled_rows_max = 16,
                                  .logits_rows_max = rows_max};
}

static void what_does_not_fit_is_refused_before_it_is_tried(void **state)
{
    pd_model_file *file = tiny_open_shape(&quantised);
    const device *d = *state;
    kern_backend_options options = options_of(16);
    kern_loaded *model = NULL;

    /* logits alone are more than there is */
    options.logits_rows_max = (uint32_t)(gpu_info_of(d->gpu)->memory_free_bytes / VOCAB / 4);
    assert_int_equal(cu_model_create(file, &options, &settings, &model), PD_E_NOMEM);
    assert_null(model);
    pd_model_file_close(file);
}

static void formats_without_kernels_are_refused(void **state)
{
    const kern_backend_options options = options_of(16);
    tiny_shape shape = floats;
    kern_loaded *model = NULL;

    (void)state;
    for (int i = 0; i < 3; i++) { /* looked up, multiplied by rows, by columns */
        shape.embedding = i == 0 ? PD_Q6_K : PD_F32;
        shape.gate = i == 1 ? PD_Q4_K : PD_F32;
        shape.down = i == 2 ? PD_Q4_K : PD_F32;
        pd_model_file *file = tiny_open_shape(&shape);
        assert_int_equal(cu_model_create(file, &options, &settings, &model), PD_E_UNSUPPORTED);
        assert_null(model);
        pd_model_file_close(file);
    }
}

static void kv_that_kernels_do_not_read_is_refused(void **state)
{
    static const char *const names[] = {"int8", "fp8_e4m3"};
    const kern_backend_options options = options_of(16);
    pd_model_file *file = tiny_open_shape(&quantised);

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        kern_loaded *model = NULL;
        void *pool = NULL;
        pd_dtype dtype;
        assert_true(pd_kv_dtype_of(names[i], &dtype));
        pd_kv_layout layout = tiny_layout_of(file, BLOCKS, dtype);
        assert_int_equal(cu_model_create(file, &options, &settings, &model), PD_OK);
        assert_int_equal(cu_model_pool_alloc(model, layout.pool_bytes, &pool), PD_OK);
        assert_int_equal(cu_model_bind(model, &layout, pool, true), PD_E_UNSUPPORTED);
        cu_model_pool_free(model);
        cu_model_destroy(model);
    }
    pd_model_file_close(file);
}

/* More than the device has, by the hashes alone: nothing is taken, and a smaller pool fits. */
static void a_pool_without_room_for_its_hashes_is_refused_before_it_is_made(void **state)
{
    pd_model_file *file = tiny_open_shape(&quantised);
    const kern_backend_options options = options_of(16);
    kern_loaded *model = NULL;
    pd_kv_layout layout = tiny_layout(file, BLOCKS);
    uint64_t before = 0, after = 0;
    void *pool = NULL;

    (void)state;
    assert_int_equal(cu_model_create(file, &options, &settings, &model), PD_OK);
    assert_int_equal(gpu_memory_free(cu_model_gpu(model), &before), PD_OK);
    assert_int_equal(cu_model_pool_alloc(model, before - before / 200, &pool), PD_E_NOMEM);
    assert_null(pool);
    assert_int_equal(gpu_memory_free(cu_model_gpu(model), &after), PD_OK);
    assert_int_equal(after, before);
    assert_int_equal(cu_model_pool_alloc(model, layout.pool_bytes, &pool), PD_OK);
    assert_int_equal(cu_model_bind(model, &layout, pool, true), PD_OK);
    cu_model_pool_free(model);
    cu_model_destroy(model);
    pd_model_file_close(file);
}

/* As if others had that much of the device (the linker's --wrap). */
static uint64_t others_bytes;

pd_status __real_gpu_memory_free(gpu *g, uint64_t *bytes_out);
pd_status __wrap_gpu_memory_free(gpu *g, uint64_t *bytes_out);

pd_status __wrap_gpu_memory_free(gpu *g, uint64_t *bytes_out)
{
    pd_status status = __real_gpu_memory_free(g, bytes_out);

    if (status == PD_OK)
        *bytes_out -= *bytes_out < others_bytes ? *bytes_out : others_bytes;
    return status;
}

/* What it leaves free at each step of its making. */
typedef struct left {
    uint64_t before, created, bound;
} left;

static pd_status make(const pd_model_file *file, left *left_out)
{
    const kern_backend_options options = options_of(16);
    pd_kv_layout layout = tiny_layout(file, BLOCKS);
    kern_loaded *model = NULL;
    void *pool = NULL;

    pd_status status = cu_model_create(file, &options, &settings, &model);
    if (status == PD_OK)
        status = gpu_memory_free(cu_model_gpu(model), &left_out->created);
    if (status == PD_OK)
        status = cu_model_pool_alloc(model, layout.pool_bytes, &pool);
    if (status == PD_OK)
        status = cu_model_bind(model, &layout, pool, true);
    if (status == PD_OK)
        status = gpu_memory_free(cu_model_gpu(model), &left_out->bound);
    if (model != NULL)
        cu_model_pool_free(model);
    cu_model_destroy(model);
    return status;
}

/* What the model has taken itself is not asked for again when its pool is. */
static void what_just_fits_is_taken(void **state)
{
    pd_model_file *file = tiny_open_shape(&quantised);
    const device *d = *state;
    left all, some;

    if (!gpu_info_of(d->gpu)->emulated)
        skip(); /* hands out memory by megabytes */
    assert_int_equal(gpu_memory_free(d->gpu, &all.before), PD_OK);
    assert_int_equal(make(file, &all), PD_OK);
    uint64_t held = all.before - all.created;
    assert_true(held > 65536);
    others_bytes = all.bound - held / 2;
    assert_int_equal(make(file, &some), PD_OK);
    others_bytes = all.bound + held / 2;
    assert_int_equal(make(file, &some), PD_E_NOMEM);
    others_bytes = 0;
    pd_model_file_close(file);
}

static void creation_survives_every_failed_allocation(void **state)
{
    pd_model_file *file = tiny_open_shape(&quantised);
    const kern_backend_options options = options_of(4);
    pd_kv_layout layout = tiny_layout(file, BLOCKS);
    pd_status status = PD_E_NOMEM;

    (void)state;
    for (long n = 0; status != PD_OK; n++) {
        kern_loaded *model = NULL;
        void *pool = NULL;
        pd_mem_fail_at(n);
        status = cu_model_create(file, &options, &settings, &model);
        if (status == PD_OK)
            status = cu_model_pool_alloc(model, layout.pool_bytes, &pool);
        if (status == PD_OK)
            status = cu_model_bind(model, &layout, pool, true);
        pd_mem_fail_at(-1);
        assert_true(status == PD_OK || status == PD_E_NOMEM);
        if (model != NULL)
            cu_model_pool_free(model);
        cu_model_destroy(model);
        assert_true(n < 400);
    }
    pd_model_file_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_does_not_fit_is_refused_before_it_is_tried),
        cmocka_unit_test(formats_without_kernels_are_refused),
        cmocka_unit_test(kv_that_kernels_do_not_read_is_refused),
        cmocka_unit_test(a_pool_without_room_for_its_hashes_is_refused_before_it_is_made),
        cmocka_unit_test(what_just_fits_is_taken),
        cmocka_unit_test(creation_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, device_setup, device_teardown);
}
