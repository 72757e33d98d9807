#include "common/kv/seal.h"
#include "tests/unit/kv/cmocka_all.h"

#include "common/base/mem.h"

static pd_kv_layout layout;
static unsigned char *pool;

static int setup(void **state)
{
    (void)state;
    pd_model_shape shape = {.layers = 5, .kv_heads = 4, .head_dim = 40};
    pd_kv_layout_options options = {.dtype = PD_F16,
                                    .block_tokens = 16,
                                    .group_layers = 2,
                                    .memory_bytes = 1 << 20,
                                    .blocks_max = 6};
    assert_int_equal(pd_kv_layout_make(&shape, &options, &layout), PD_OK);
    pool = pd_malloc(layout.pool_bytes);
    assert_non_null(pool);
    uint64_t random = 5;
    for (uint64_t i = 0; i < layout.pool_bytes; i++)
        pool[i] = (unsigned char)pd_random_next(&random);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    pd_free(pool);
    return 0;
}

static pd_seal_place place(void)
{
    return (pd_seal_place){.request = 11,
                           .epoch = 2,
                           .group = 1,
                           .block_index = 3,
                           .valid_tokens = 16,
                           .layout_fingerprint = pd_kv_layout_fingerprint(&layout)};
}

static void a_copy_in_another_block_has_the_same_seal(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t seal = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    memcpy(pool + pd_kv_layout_block_offset(&layout, 1, 4),
           pool + pd_kv_layout_block_offset(&layout, 1, 1), pd_kv_layout_block_bytes(&layout, 1));
    assert_int_equal(pd_seal_verify(&layout, pool, 4, &p, 0, 4, seal), PD_OK);
    assert_int_equal(pd_seal_verify(&layout, pool, 2, &p, 0, 4, seal), PD_E_MISMATCH);
}

static void every_field_of_the_place_counts(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t seal = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    pd_seal_place wrong[7];
    for (int i = 0; i < 7; i++)
        wrong[i] = p;
    wrong[0].request++;
    wrong[1].epoch++;
    wrong[2].block_index++;
    wrong[3].valid_tokens--;
    wrong[4].layout_fingerprint++;
    wrong[5].head_first++;
    wrong[6].group = 0;
    for (int i = 0; i < 7; i++)
        assert_int_equal(pd_seal_verify(&layout, pool, 1, &wrong[i], 0, 4, seal), PD_E_MISMATCH);
    assert_int_equal(pd_seal_verify(&layout, pool, 1, &p, 0, 4, seal), PD_OK);
}

static void every_valid_byte_counts_and_no_other(void **state)
{
    (void)state;
    pd_seal_place p = place();
    p.valid_tokens = 5;
    uint64_t seal = pd_seal_compute(&layout, pool, 2, &p, 0, 4);
    uint64_t start = pd_kv_layout_block_offset(&layout, 1, 2);
    uint64_t bytes = pd_kv_layout_block_bytes(&layout, 1);
    for (uint64_t i = 0; i < bytes; i++) {
        bool valid = i % layout.half_bytes < 5 * layout.token_bytes;
        pool[start + i] ^= 1;
        assert_int_equal(pd_seal_verify(&layout, pool, 2, &p, 0, 4, seal),
                         valid ? PD_E_MISMATCH : PD_OK);
        pool[start + i] ^= 1;
    }
}

static void equal_halves_may_not_change_places(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t seal = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    unsigned char saved[16 * 40 * 2];
    assert_int_equal(sizeof saved, layout.half_bytes);
    unsigned char *k = pool + pd_kv_layout_k_offset(&layout, 2, 1, 0);
    memcpy(saved, k, sizeof saved);
    memcpy(k, k + layout.half_bytes, sizeof saved);
    memcpy(k + layout.half_bytes, saved, sizeof saved);
    assert_int_equal(pd_seal_verify(&layout, pool, 1, &p, 0, 4, seal), PD_E_MISMATCH);
    memcpy(k + layout.half_bytes, k, sizeof saved);
    memcpy(k, saved, sizeof saved);
    assert_int_equal(pd_seal_verify(&layout, pool, 1, &p, 0, 4, seal), PD_OK);
}

static void slices_of_heads_add_up_and_match_a_workers_own_numbering(void **state)
{
    (void)state;
    pd_seal_place p = place();
    uint64_t all = pd_seal_compute(&layout, pool, 1, &p, 0, 4);
    uint64_t low = pd_seal_compute(&layout, pool, 1, &p, 0, 1);
    uint64_t high = pd_seal_compute(&layout, pool, 1, &p, 1, 4);
    assert_true(all == low + high);
    /* a worker that holds heads 2 and 3 only, as its 0 and 1 */
    pd_kv_layout half = layout;
    half.kv_heads = 2;
    half.block_bytes_all /= 2;
    half.pool_bytes /= 2;
    unsigned char *half_pool = pd_calloc(1, half.pool_bytes);
    assert_non_null(half_pool);
    for (uint32_t layer = 2; layer < 4; layer++) {
        for (uint32_t head = 0; head < 2; head++)
            memcpy(half_pool + pd_kv_layout_k_offset(&half, layer, 0, head),
                   pool + pd_kv_layout_k_offset(&layout, layer, 1, head + 2), half.layer_bytes);
    }
    pd_seal_place shifted = p;
    shifted.head_first = 2;
    uint64_t slice = pd_seal_compute(&layout, pool, 1, &p, 2, 4);
    assert_int_equal(pd_seal_verify(&half, half_pool, 0, &shifted, 0, 2, slice), PD_OK);
    pd_free(half_pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_in_another_block_has_the_same_seal),
        cmocka_unit_test(every_field_of_the_place_counts),
        cmocka_unit_test(every_valid_byte_counts_and_no_other),
        cmocka_unit_test(equal_halves_may_not_change_places),
        cmocka_unit_test(slices_of_heads_add_up_and_match_a_workers_own_numbering),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
