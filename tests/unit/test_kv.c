/* The block manager: what it gives, what it takes back, and that no block is ever in two places. */
#include "engine/kv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static int32_t block_at(const struct kv *kv, size_t slot, size_t i) {
    return kv->table[slot * kv->blocks_per_slot + i];
}

static void test_reserve_rounds_up_to_blocks(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 8, 2, 8, NULL), 0);
    const struct {
        size_t tokens, blocks;
    } cases[] = {{0, 0}, {1, 1}, {16, 1}, {17, 2}, {5, 2}, {64, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_true(kv_reserve(&kv, 0, cases[i].tokens));
        assert_int_equal(kv.held[0], cases[i].blocks);
        assert_int_equal(kv_blocks_used(&kv), cases[i].blocks);
    }
    kv_destroy(&kv);
}

static void test_reserve_is_all_or_nothing(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 4, 2, 4, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 32));
    assert_false(kv_reserve(&kv, 1, 48));
    assert_int_equal(kv.held[1], 0);
    assert_int_equal(kv_blocks_used(&kv), 2);
    assert_true(kv_reserve(&kv, 1, 32));
    assert_false(kv_reserve(&kv, 1, 33));
    assert_int_equal(kv.held[1], 2);
    kv_release(&kv, 0);
    assert_true(kv_reserve(&kv, 1, 64));
    kv_destroy(&kv);
}

static void test_growth_keeps_the_blocks_held(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 6, 2, 6, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 20));
    int32_t first = block_at(&kv, 0, 0), second = block_at(&kv, 0, 1);
    assert_true(kv_reserve(&kv, 1, 1));
    assert_true(kv_reserve(&kv, 0, 40));
    assert_int_equal(block_at(&kv, 0, 0), first);
    assert_int_equal(block_at(&kv, 0, 1), second);
    kv_destroy(&kv);
}

static void test_released_blocks_are_used_first(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 6, 2, 6, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 16));
    assert_true(kv_reserve(&kv, 1, 16));
    int32_t released = block_at(&kv, 0, 0);
    kv_release(&kv, 0);
    assert_true(kv_reserve(&kv, 0, 16));
    assert_int_equal(block_at(&kv, 0, 0), released);
    kv_destroy(&kv);
}

static void test_shared_blocks_outlive_the_first_holder(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 8, 3, 8, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 40)); /* two full blocks and a half one */
    assert_int_equal(kv_share_prefix(&kv, 0, 1, 40), 32);
    assert_int_equal(kv_share_prefix(&kv, 0, 2, 15), 0);
    assert_int_equal(kv_blocks_used(&kv), 3);
    assert_int_equal(block_at(&kv, 1, 1), block_at(&kv, 0, 1));
    assert_true(kv_reserve(&kv, 1, 48)); /* its own third block */
    assert_int_not_equal(block_at(&kv, 1, 2), block_at(&kv, 0, 2));
    kv_release(&kv, 0);
    assert_int_equal(kv_blocks_used(&kv), 3);
    kv_release(&kv, 1);
    assert_int_equal(kv_blocks_used(&kv), 0);
    kv_destroy(&kv);
}

static void test_impossible_sizes_are_refused(void **state) {
    (void)state;
    struct kv kv;
    struct error error = {0};
    assert_int_equal(kv_create(&kv, 0, 1, 1, &error), FATHOM_INVALID);
    assert_int_equal(kv_create(&kv, (size_t)INT32_MAX + 1, 1, 1, &error), FATHOM_INVALID);
    assert_int_equal(kv_create(&kv, 1, SIZE_MAX, 2, &error), FATHOM_INVALID);
    kv_destroy(&kv);
}

/* References recounted from the tables must be those kept, and free blocks those without any. */
static void check_everything(const struct kv *kv) {
    uint32_t counted[32] = {0};
    assert_true(kv->blocks <= 32);
    for (size_t slot = 0; slot < kv->slots; slot++) {
        for (size_t i = 0; i < kv->held[slot]; i++) {
            int32_t block = block_at(kv, slot, i);
            assert_in_range(block, 0, kv->blocks - 1);
            counted[block]++;
            for (size_t j = 0; j < i; j++) assert_int_not_equal(block_at(kv, slot, j), block);
        }
    }
    size_t used = 0;
    for (size_t i = 0; i < kv->blocks; i++) {
        assert_int_equal(counted[i], kv->references[i]);
        used += counted[i] > 0;
    }
    assert_int_equal(used, kv_blocks_used(kv));
    for (size_t i = 0; i < kv->free_count; i++) {
        assert_int_equal(counted[kv->free_blocks[i]], 0);
        counted[kv->free_blocks[i]] = 1; /* a second time on the stack would be found */
    }
}

static void test_random_use_conserves_blocks(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 32, 6, 12, NULL), 0);
    srand(7);
    for (size_t event = 0; event < 100000; event++) {
        size_t slot = (size_t)rand() % 6, other = (size_t)rand() % 6;
        size_t tokens = (size_t)rand() % (12 * KV_BLOCK_TOKENS + 1);
        switch (rand() % 4) {
        case 0: kv_release(&kv, slot); break;
        case 1:
            if (slot != other && kv.held[other] == 0) kv_share_prefix(&kv, slot, other, tokens);
            break;
        default: kv_reserve(&kv, slot, tokens);
        }
        check_everything(&kv);
    }
    for (size_t slot = 0; slot < 6; slot++) kv_release(&kv, slot);
    assert_int_equal(kv_blocks_used(&kv), 0);
    kv_destroy(&kv);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reserve_rounds_up_to_blocks),
        cmocka_unit_test(test_reserve_is_all_or_nothing),
        cmocka_unit_test(test_growth_keeps_the_blocks_held),
        cmocka_unit_test(test_released_blocks_are_used_first),
        cmocka_unit_test(test_shared_blocks_outlive_the_first_holder),
        cmocka_unit_test(test_impossible_sizes_are_refused),
        cmocka_unit_test(test_random_use_conserves_blocks),
    };
    return cmocka_run_group_tests_name("kv", tests, NULL, NULL);
}
