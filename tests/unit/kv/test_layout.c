#include "common/kv/layout.h"
#include "tests/unit/kv/cmocka_all.h"

#include "common/base/log.h"
#include "common/base/mem.h"

#include <stdio.h>

static pd_model_shape shape_of(uint32_t layers, uint32_t kv_heads, uint32_t head_dim)
{
    return (pd_model_shape){.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim};
}

static pd_kv_layout make(pd_model_shape shape, pd_kv_layout_options options)
{
    pd_kv_layout layout;
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    return layout;
}

/* Every K and V run of every layer, block and head: none may overlap, none may be left over. */
static void every_byte_of_the_pool_belongs_to_one_place(void **state)
{
    (void)state;
    static const uint32_t layers[] = {1, 5, 7, 5, 7}, ranks[] = {0, 1, 1, 2, 6};
    for (size_t s = 0; s < 5; s++) {
        for (uint32_t group_layers = 0; group_layers <= layers[s] + 1; group_layers++) {
            pd_kv_layout layout =
                make(shape_of(layers[s], 6, 8), (pd_kv_layout_options){.dtype = PD_F16,
                                                                       .block_tokens = 16,
                                                                       .group_layers = group_layers,
                                                                       .memory_bytes = 1 << 20,
                                                                       .blocks_max = 5,
                                                                       .ranks = ranks[s]});
            assert_int_equal(layout.blocks, 5);
            unsigned char *seen = pd_calloc(1, layout.pool_bytes);
            assert_non_null(seen);
            for (uint32_t layer = 0; layer < layout.layers; layer++) {
                for (pd_block block = 0; block < layout.blocks; block++) {
                    for (uint32_t head = 0; head < layout.kv_heads; head++) {
                        uint64_t k = pd_kv_layout_k_offset(&layout, layer, block, head);
                        for (uint64_t i = 0; i < 2 * layout.half_bytes; i++) {
                            assert_true(k + i < layout.pool_bytes);
                            seen[k + i]++;
                        }
                    }
                }
            }
            for (uint64_t i = 0; i < layout.pool_bytes; i++)
                assert_int_equal(seen[i], 1);
            pd_free(seen);
        }
    }
}

static void a_block_and_a_heads_slice_are_contiguous_in_a_group(void **state)
{
    (void)state;
    pd_kv_layout layout =
        make(shape_of(30, 3, 64),
             (pd_kv_layout_options){.dtype = PD_F16, .block_tokens = 16, .memory_bytes = 64 << 20});
    assert_int_equal(layout.group_layers, 2); /* 30 layers: 12 groups at least */
    layout =
        make(shape_of(120, 3, 64),
             (pd_kv_layout_options){.dtype = PD_F16, .block_tokens = 16, .memory_bytes = 64 << 20});
    assert_int_equal(layout.group_layers, 5); /* 12 KiB a layer: 60 KiB is nearest to 64 */
    layout =
        make(shape_of(6, 3, 64),
             (pd_kv_layout_options){.dtype = PD_F16, .block_tokens = 16, .memory_bytes = 64 << 20});
    assert_int_equal(layout.group_layers, 1);
    layout =
        make(shape_of(30, 3, 64),
             (pd_kv_layout_options){.dtype = PD_F16, .block_tokens = 16, .memory_bytes = 64 << 20});
    assert_int_equal(layout.groups, 15);
    assert_int_equal(layout.blocks, (64u << 20) / layout.block_bytes_all);
    for (uint32_t group = 0; group < layout.groups; group++) {
        uint64_t bytes = pd_kv_layout_block_bytes(&layout, group);
        uint64_t slice = bytes / layout.kv_heads;
        for (pd_block block = 0; block + 1 < layout.blocks; block++) {
            uint64_t start = pd_kv_layout_block_offset(&layout, group, block);
            assert_int_equal(start + bytes, pd_kv_layout_block_offset(&layout, group, block + 1));
            for (uint32_t head = 0; head < layout.kv_heads; head++) {
                for (uint32_t l = 0; l < layout.group_layers; l++) {
                    uint64_t k = pd_kv_layout_k_offset(&layout, group * layout.group_layers + l,
                                                       block, head);
                    assert_int_equal(k, start + head * slice + l * layout.layer_bytes);
                }
            }
        }
    }
}

/* What shipping rests on: a rank's part is a run, in it a group's blocks follow one another, in a
 * block the heads. */
static void a_ranks_part_is_a_run_of_runs(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 8; ranks *= 2) {
        pd_kv_layout layout =
            make(shape_of(5, 8, 16), (pd_kv_layout_options){.dtype = PD_F16,
                                                            .block_tokens = 16,
                                                            .group_layers = 2,
                                                            .memory_bytes = 8 << 20,
                                                            .blocks_max = 9,
                                                            .ranks = ranks});
        assert_int_equal(layout.rank_heads * ranks, 8);
        assert_int_equal(layout.rank_bytes * ranks, layout.pool_bytes);
        uint64_t at = 0;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            assert_int_equal(at, rank * layout.rank_bytes);
            for (uint32_t group = 0; group < layout.groups; group++) {
                for (pd_block block = 0; block < layout.blocks; block++) {
                    for (uint32_t head = 0; head < layout.rank_heads; head++) {
                        uint32_t number = rank * layout.rank_heads + head;
                        assert_int_equal(at,
                                         pd_kv_layout_head_offset(&layout, group, block, number));
                        assert_int_equal(at,
                                         pd_kv_layout_k_offset(&layout, 2 * group, block, number));
                        at += pd_kv_layout_head_bytes(&layout, group);
                    }
                }
            }
        }
        assert_int_equal(at, layout.pool_bytes);
    }
}

/* A half is its codes, then its scales; nothing else changes with the format. */
static void a_half_has_its_scales_at_its_end(void **state)
{
    static const pd_dtype dtypes[] = {PD_INT8, PD_FP8_E4M3};

    (void)state;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        pd_kv_layout_options options = {
            .dtype = dtypes[i], .block_tokens = 32, .group_layers = 2, .memory_bytes = 64 << 20};
        pd_kv_layout layout = make(shape_of(5, 3, 64), options);
        assert_int_equal(layout.token_bytes, 64);
        assert_int_equal(layout.scale_bytes, 4);
        assert_int_equal(layout.scales_at, 32 * 64);
        assert_int_equal(layout.half_bytes, 32 * (64 + 4));
        assert_int_equal(layout.layer_bytes, 2 * layout.half_bytes);
        assert_int_equal(layout.block_bytes_all, 5 * 3 * layout.layer_bytes);
        assert_int_equal(layout.scales_at % 64, 0);
        assert_int_equal(layout.half_bytes % 64, 0);
        options.dtype = PD_F16;
        pd_kv_layout f16 = make(shape_of(5, 3, 64), options);
        assert_int_equal(f16.scale_bytes, 0);
        assert_int_equal(f16.half_bytes, f16.scales_at);
        /* 128 bytes against 68 */
        assert_true(layout.blocks * 100ull > f16.blocks * 187ull);
        assert_true(pd_kv_layout_fingerprint(&layout) != pd_kv_layout_fingerprint(&f16));
    }
}

static void formats_have_the_names_of_the_deployment(void **state)
{
    static const char *const names[] = {"f16", "int8", "fp8_e4m3"};
    pd_kv_layout_options options = {.block_tokens = 16, .memory_bytes = 64 << 20};
    char text[100], want[100];
    pd_dtype dtype;

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        assert_true(pd_kv_dtype_of(names[i], &options.dtype));
        assert_string_equal(pd_kv_dtype_name(options.dtype), names[i]);
        pd_kv_layout layout = make(shape_of(30, 3, 64), options);
        pd_kv_layout_describe(&layout, text, sizeof text);
        snprintf(want, sizeof want, "%s 30x3x64 blocks of 16 tokens, groups of 2 layers", names[i]);
        assert_string_equal(text, want);
    }
    assert_false(pd_kv_dtype_of("q8_0", &dtype));
    assert_false(pd_kv_dtype_of("", &dtype));
}

static void ranks_are_no_matter_of_agreement(void **state)
{
    (void)state;
    pd_kv_layout_options options = {.dtype = PD_F16, .block_tokens = 16, .memory_bytes = 64 << 20};
    pd_kv_layout one = make(shape_of(30, 8, 64), options);
    options.ranks = 4;
    pd_kv_layout four = make(shape_of(30, 8, 64), options);
    assert_int_equal(pd_kv_layout_fingerprint(&one), pd_kv_layout_fingerprint(&four));
    assert_int_equal(one.blocks, four.blocks);
    assert_int_equal(one.group_layers, four.group_layers);
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    pd_model_shape shape = shape_of(30, 3, 64);
    pd_kv_layout layout;
    static const uint32_t bad_tokens[] = {0, 1, 15, 17, 272, 4096, UINT32_MAX};
    for (size_t i = 0; i < sizeof bad_tokens / sizeof *bad_tokens; i++) {
        pd_kv_layout_options options = {
            .dtype = PD_F16, .block_tokens = bad_tokens[i], .memory_bytes = 1 << 30};
        assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_E_INVALID);
    }
    pd_kv_layout_options options = {.dtype = PD_Q8_0, .block_tokens = 16, .memory_bytes = 1 << 30};
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_E_UNSUPPORTED);
    options = (pd_kv_layout_options){
        .dtype = PD_F16, .block_tokens = 16, .memory_bytes = 30 * 3 * 2 * 16 * 64 * 2 - 1};
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_E_TOO_LARGE);
    options.memory_bytes++;
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    assert_int_equal(layout.blocks, 1);
    options.memory_bytes = UINT64_MAX;
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    assert_true(layout.pool_bytes / layout.block_bytes_all == layout.blocks);
    shape.layers = 0;
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_E_INVALID);
    options = (pd_kv_layout_options){
        .dtype = PD_F16, .block_tokens = 16, .memory_bytes = 1 << 20, .ranks = 2};
    shape = shape_of(2, 3, 8);
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_E_INVALID);
}

static void the_fingerprint_is_the_layouts_and_not_the_pools(void **state)
{
    (void)state;
    pd_kv_layout_options options = {
        .dtype = PD_F16, .block_tokens = 16, .group_layers = 5, .memory_bytes = 8 << 20};
    pd_kv_layout a = make(shape_of(30, 3, 64), options);
    options.memory_bytes *= 3;
    pd_kv_layout more_blocks = make(shape_of(30, 3, 64), options);
    assert_true(pd_kv_layout_fingerprint(&a) == pd_kv_layout_fingerprint(&more_blocks));
    options.group_layers = 6;
    pd_kv_layout other_groups = make(shape_of(30, 3, 64), options);
    assert_true(pd_kv_layout_fingerprint(&a) != pd_kv_layout_fingerprint(&other_groups));
    options.group_layers = 5;
    options.block_tokens = 32;
    pd_kv_layout other_tokens = make(shape_of(30, 3, 64), options);
    assert_true(pd_kv_layout_fingerprint(&a) != pd_kv_layout_fingerprint(&other_tokens));
    options.block_tokens = 16;
    pd_kv_layout other_shape = make(shape_of(30, 64, 3), options);
    assert_true(pd_kv_layout_fingerprint(&a) != pd_kv_layout_fingerprint(&other_shape));
    char text[128];
    pd_kv_layout_describe(&a, text, sizeof text);
    assert_string_equal(text, "f16 30x3x64 blocks of 16 tokens, groups of 5 layers");
}

int main(void)
{
    pd_log_init("test", PD_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_of_the_pool_belongs_to_one_place),
        cmocka_unit_test(a_block_and_a_heads_slice_are_contiguous_in_a_group),
        cmocka_unit_test(a_ranks_part_is_a_run_of_runs),
        cmocka_unit_test(a_half_has_its_scales_at_its_end),
        cmocka_unit_test(formats_have_the_names_of_the_deployment),
        cmocka_unit_test(ranks_are_no_matter_of_agreement),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(the_fingerprint_is_the_layouts_and_not_the_pools),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
