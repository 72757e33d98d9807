#include "common/base/mem.h"
#include "common/worker/key_table.h"
#include "common/worker/routers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void holds_what_a_plain_list_holds(void **state)
{
    (void)state;
    enum { KEYS = 200, MAX = 60 };
    for (uint64_t seed = 1; seed <= 30; seed++) {
        pd_key_table *table = NULL;
        pd_request_key keys[KEYS];
        bool there[KEYS] = {false};
        uint64_t random = seed;
        uint32_t count = 0;

        assert_int_equal(pd_key_table_create(MAX, &table), PD_OK);
        for (uint32_t i = 0; i < KEYS; i++)
            keys[i] = (pd_request_key){i % 3, i / 6, i % 2};
        for (uint32_t i = 0; i < 5000; i++) {
            uint32_t k = (uint32_t)(pd_random_next(&random) % KEYS);
            if (there[k]) {
                assert_ptr_equal(pd_key_table_get(table, &keys[k]), &there[k]);
                pd_key_table_remove(table, &keys[k]);
                there[k] = false;
                count--;
            } else {
                assert_null(pd_key_table_get(table, &keys[k]));
                pd_status status = pd_key_table_put(table, &keys[k], &there[k]);
                assert_int_equal(status, count < MAX ? PD_OK : PD_E_OVERLOAD);
                there[k] = status == PD_OK;
                count += status == PD_OK;
            }
            assert_int_equal(pd_key_table_count(table), count);
        }
        for (uint32_t k = 0; k < KEYS; k++)
            assert_ptr_equal(pd_key_table_get(table, &keys[k]), there[k] ? &there[k] : NULL);
        pd_key_table_destroy(table);
    }
}

static void creation_survives_every_failed_allocation(void **state)
{
    (void)state;
    pd_key_table *table = NULL;

    for (long n = 0; table == NULL; n++) {
        pd_mem_fail_at(n);
        pd_status status = pd_key_table_create(10, &table);
        pd_mem_fail_at(-1);
        assert_int_equal(status, table == NULL ? PD_E_NOMEM : PD_OK);
        assert_true(n < 10);
    }
    pd_key_table_destroy(table);
}

static void silence_loses_a_router_once(void **state)
{
    (void)state;
    pd_routers routers;
    pd_message beat = {.kind = PD_MSG_ROUTER_HEARTBEAT}, welcome = {.kind = PD_MSG_WELCOME};

    pd_routers_init(&routers, 100);
    assert_true(pd_routers_on_message(&routers, 7, &beat, 1000));
    assert_true(pd_routers_on_message(&routers, 8, &beat, 1050));
    assert_int_equal(pd_routers_next_lost(&routers, 1100), 0);
    assert_int_equal(pd_routers_next_lost(&routers, 1101), 7);
    assert_int_equal(pd_routers_next_lost(&routers, 1101), 0);
    assert_false(pd_routers_live(&routers, 7));
    assert_true(pd_routers_live(&routers, 8));
    assert_false(pd_routers_on_message(&routers, 7, &beat, 1102));
    assert_false(pd_routers_on_message(&routers, 7, &welcome, 1102)); /* a late one */
    welcome.welcome.session = 1;
    assert_true(pd_routers_on_message(&routers, 7, &welcome, 1103));
    assert_true(pd_routers_live(&routers, 7));
    assert_false(pd_routers_on_message(&routers, 0, &beat, 1103));
}

static void dead_routers_make_place_for_new_ones(void **state)
{
    (void)state;
    pd_routers routers;
    pd_message beat = {.kind = PD_MSG_ROUTER_HEARTBEAT};

    pd_routers_init(&routers, 100);
    for (uint64_t i = 1; i <= PD_ROUTERS_MAX; i++)
        assert_true(pd_routers_on_message(&routers, i, &beat, 1000 + i));
    assert_false(pd_routers_on_message(&routers, 1000, &beat, 1100));
    assert_int_equal(pd_routers_next_lost(&routers, 1102), 1);
    assert_true(pd_routers_on_message(&routers, 1000, &beat, 1102));
    assert_false(pd_routers_live(&routers, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds_what_a_plain_list_holds),
        cmocka_unit_test(creation_survives_every_failed_allocation),
        cmocka_unit_test(silence_loses_a_router_once),
        cmocka_unit_test(dead_routers_make_place_for_new_ones),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
