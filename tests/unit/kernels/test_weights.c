/* Weights from a pack of the host are the weights that this process would have packed. */

#include "kernels/model/weights.h"
#include "tests/unit/kernels/tiny_model.h"

#include "common/base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Its arena is large enough to be shared, and every kind of format is in it. */
static const tiny_shape shape = {
    .hidden = 256,
    .heads = 4,
    .kv_heads = 2,
    .head_dim = 64,
    .ffn = 512,
    .layers = 2,
    .vocab = 20000,
    .context = 256,
    .tied = true,
    .embedding = PD_Q8_0,
    .query = PD_Q4_1,
    .key = PD_Q8_0,
    .value = PD_F16,
    .output = PD_Q4_0,
    .gate = PD_Q4_1,
    .up = PD_F32,
    .down = PD_Q4_1,
    .head = PD_Q8_0,
};

static pd_model_file *file;
static char folder[256];

static bool from_pack(const kern_weights *weights)
{
    char line[512];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");

    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long first;
        if (sscanf(line, "%lx-", &first) == 1 && first == (unsigned long)weights->memory.base)
            found = strstr(line, "r--s") != NULL && strstr(line, ".pack") != NULL;
    }
    fclose(maps);
    return found;
}

static void same_matrix(const kern_ops *ops, const kern_matrix *a, const kern_matrix *b)
{
    size_t bytes = ops->pack_bytes(a->dtype, a->rows, a->cols);

    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->rows, b->rows);
    assert_int_equal(a->cols, b->cols);
    assert_int_equal(a->segments, b->segments);
    if (bytes > 0)
        assert_memory_equal(a->data, b->data, bytes);
}

static void same_weights(const kern_ops *ops, const kern_weights *a, const kern_weights *b)
{
    for (uint32_t i = 0; i < shape.layers; i++) {
        const kern_layer_weights *x = &a->layers[i], *y = &b->layers[i];
        assert_memory_equal(x->attention_norm, y->attention_norm, shape.hidden * sizeof(float));
        assert_memory_equal(x->ffn_norm, y->ffn_norm, shape.hidden * sizeof(float));
        const kern_matrix *left[] = {&x->query, &x->key, &x->value, &x->output,
                                     &x->gate,  &x->up,  &x->down};
        const kern_matrix *right[] = {&y->query, &y->key, &y->value, &y->output,
                                      &y->gate,  &y->up,  &y->down};
        for (size_t m = 0; m < sizeof left / sizeof left[0]; m++)
            same_matrix(ops, left[m], right[m]);
    }
    assert_memory_equal(a->output_norm, b->output_norm, shape.hidden * sizeof(float));
    same_matrix(ops, &a->head, &b->head);
    assert_int_equal(a->memory.used, b->memory.used);
}

static void init(const kern_ops *ops, uint32_t rank, uint32_t ranks, const kern_packs_place *place,
                 kern_weights *weights)
{
    kern_split split;
    char why[256];

    assert_true(kern_split_of(pd_model_file_shape(file), rank, ranks, &split, why, sizeof why));
    assert_int_equal(kern_weights_init(file, ops, &split, place, weights), PD_OK);
}

static void kept_weights_are_those_that_are_packed_here(void **state)
{
    (void)state;
    const kern_packs_place place = {.folder = folder};
    uint32_t from_packs = 0;

    for (uint32_t i = 0; kern_ops_at(i) != NULL; i++) {
        const kern_ops *ops = kern_ops_at(i);
        for (uint32_t ranks = 1; ranks <= 2; ranks++) {
            for (uint32_t rank = 0; rank < ranks; rank++) {
                kern_weights own, made, kept;
                init(ops, rank, ranks, NULL, &own);
                init(ops, rank, ranks, &place, &made);
                init(ops, rank, ranks, &place, &kept);
                assert_false(from_pack(&own));
                from_packs += from_pack(&made) && from_pack(&kept);
                same_weights(ops, &own, &made);
                same_weights(ops, &own, &kept);
                kern_weights_fini(&own);
                kern_weights_fini(&made);
                kern_weights_fini(&kept);
            }
        }
    }
    /* the reference packs nothing, and what it has of its own is too little */
    assert_true(kern_ops_at(1) == NULL || from_packs >= 1);
}

static void (*real_pack)(pd_dtype, uint32_t, uint32_t, const void *, void *);

static void pack_otherwise(pd_dtype dtype, uint32_t rows, uint32_t cols, const void *file_rows,
                           void *out)
{
    real_pack(dtype, rows, cols, file_rows, out);
    ((uint8_t *)out)[5] ^= dtype == PD_Q4_1;
}

static void a_table_that_packs_otherwise_has_weights_of_its_own(void **state)
{
    (void)state;
    const kern_packs_place place = {.folder = folder};
    kern_weights as_before, own, shared;

    if (kern_ops_at(1) == NULL)
        skip(); /* the reference alone packs nothing */
    kern_ops other = *kern_ops_at(1);
    real_pack = other.pack;
    other.pack = pack_otherwise;
    init(kern_ops_at(1), 0, 1, &place, &as_before);
    init(&other, 0, 1, NULL, &own);
    init(&other, 0, 1, &place, &shared);
    assert_true(from_pack(&as_before));
    assert_true(from_pack(&shared));
    same_weights(&other, &own, &shared);
    size_t bytes = other.pack_bytes(PD_Q4_1, as_before.layers[0].query.rows, shape.hidden);
    assert_memory_not_equal(as_before.layers[0].query.data, shared.layers[0].query.data, bytes);
    kern_weights_fini(&as_before);
    kern_weights_fini(&own);
    kern_weights_fini(&shared);
}

static int set_up(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "%.200s/test-weights-XXXXXX",
             getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    assert_non_null(mkdtemp(folder));
    file = tiny_open_shape(&shape);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    char text[512];

    pd_model_file_close(file);
    snprintf(text, sizeof text, "rm -r '%s'", folder);
    return system(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_weights_are_those_that_are_packed_here),
        cmocka_unit_test(a_table_that_packs_otherwise_has_weights_of_its_own),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
