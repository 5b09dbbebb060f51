/* The block manager: what it gives, what it takes back, and that no block is ever in two places. */
#include "engine/kv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static void test_reserve_rounds_up_to_blocks(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 8, 1, 2, 8, NULL), 0);
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
    assert_int_equal(kv_create(&kv, 4, 1, 2, 4, NULL), 0);
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
    assert_int_equal(kv_create(&kv, 6, 1, 2, 6, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 20));
    int32_t first = kv_block_at(&kv, 0, 0), second = kv_block_at(&kv, 0, 1);
    assert_true(kv_reserve(&kv, 1, 1));
    assert_true(kv_reserve(&kv, 0, 40));
    assert_int_equal(kv_block_at(&kv, 0, 0), first);
    assert_int_equal(kv_block_at(&kv, 0, 1), second);
    kv_destroy(&kv);
}

static void test_released_blocks_are_used_first(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 6, 1, 2, 6, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 16));
    assert_true(kv_reserve(&kv, 1, 16));
    int32_t released = kv_block_at(&kv, 0, 0);
    kv_release(&kv, 0);
    assert_true(kv_reserve(&kv, 0, 16));
    assert_int_equal(kv_block_at(&kv, 0, 0), released);
    kv_destroy(&kv);
}

/* Any tokens do: a key is what the caller says. */
static const int32_t *some_tokens(int32_t first) {
    static int32_t tokens[KV_BLOCK_TOKENS];
    for (int32_t i = 0; i < KV_BLOCK_TOKENS; i++) tokens[i] = first + i;
    return tokens;
}

/* Publishes the slot's first `count` blocks as one chain; returns the last one's serial. */
static uint64_t publish_chain(struct kv *kv, size_t slot, size_t count, uint64_t root) {
    for (size_t i = 0; i < count; i++) {
        kv_publish(kv, slot, i, root, some_tokens((int32_t)i));
        root = kv_serial(kv, kv_block_at(kv, slot, i));
    }
    return root;
}

static void test_published_blocks_outlive_their_holder(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 8, 1, 3, 8, NULL), 0);
    assert_true(kv_reserve(&kv, 0, 40)); /* two full blocks and a half one */
    publish_chain(&kv, 0, 2, 99);
    int32_t first = kv_block_at(&kv, 0, 0), second = kv_block_at(&kv, 0, 1);
    assert_int_equal(prefix_index_find(&kv.index, 99, some_tokens(0)), first);
    assert_int_equal(prefix_index_find(&kv.index, 98, some_tokens(0)), -1); /* other tenant */
    assert_int_equal(prefix_index_find(&kv.index, 99, some_tokens(1)), -1);
    kv_adopt(&kv, 1, 0, first);
    assert_int_equal(kv_blocks_used(&kv), 3);
    kv_release(&kv, 0);
    assert_int_equal(kv_blocks_used(&kv), 1);
    assert_int_equal(kv.idle_count, 1);
    assert_int_equal(kv_blocks_available(&kv), 7);
    kv_adopt(&kv, 1, 1, second); /* idle, and still there */
    assert_true(kv_reserve(&kv, 1, 48)); /* its own third block */
    assert_int_equal(kv_blocks_used(&kv), 3);
    kv_release(&kv, 1);
    assert_int_equal(kv_blocks_used(&kv), 0);
    assert_int_equal(kv.idle_count, 2);
    kv_destroy(&kv);
}

static void test_the_end_of_the_oldest_chain_goes_first(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 4, 1, 3, 4, NULL), 0);
    for (size_t slot = 0; slot < 2; slot++) {
        assert_true(kv_reserve(&kv, slot, 32));
        publish_chain(&kv, slot, 2, 70 + slot);
    }
    int32_t old = kv_block_at(&kv, 1, 0), oldest = kv_block_at(&kv, 1, 1);
    uint64_t serial = kv_serial(&kv, old);
    kv_release(&kv, 1);
    kv_release(&kv, 0);
    assert_true(kv_reserve(&kv, 2, 16));
    assert_int_equal(kv_block_at(&kv, 2, 0), oldest);
    assert_int_equal(prefix_index_find(&kv.index, serial, some_tokens(1)), -1);
    assert_int_equal(prefix_index_find(&kv.index, 71, some_tokens(0)), old);
    assert_true(kv_reserve(&kv, 2, 32));
    assert_int_equal(kv_block_at(&kv, 2, 1), old);
    assert_int_equal(prefix_index_find(&kv.index, 71, some_tokens(0)), -1);
    assert_true(prefix_index_find(&kv.index, 70, some_tokens(0)) >= 0);
    assert_false(kv_reserve(&kv, 1, 48));
    assert_true(kv_reserve(&kv, 1, 32));
    assert_int_equal(kv.idle_count, 0);
    kv_destroy(&kv);
}

static void test_adopting_gives_back_the_own_copy(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 4, 1, 2, 4, NULL), 0);
    for (size_t slot = 0; slot < 2; slot++) assert_true(kv_reserve(&kv, slot, 16));
    publish_chain(&kv, 0, 1, 5);
    int32_t copy = kv_block_at(&kv, 1, 0);
    kv_adopt(&kv, 1, 0, kv_block_at(&kv, 0, 0));
    assert_int_equal(kv_blocks_used(&kv), 1);
    assert_int_equal(kv.free_blocks[kv.free_count - 1], copy);
    kv_destroy(&kv);
}

static void test_roots_tell_tiers_and_tenants_apart(void **state) {
    (void)state;
    uint64_t plain = prefix_root(7, 0, NULL, 0);
    assert_true(plain == prefix_root(7, 0, NULL, 0));
    assert_true(plain >> 63 && prefix_root(7, 0, "a", 1) >> 63);
    assert_true(plain != prefix_root(7, 1, NULL, 0));
    assert_true(plain != prefix_root(7, 0, "a", 1));
    assert_true(plain != prefix_root(8, 0, NULL, 0));
    assert_true(prefix_root(7, 0, "a", 1) != prefix_root(7, 0, "b", 1));
}

static void test_impossible_sizes_are_refused(void **state) {
    (void)state;
    struct kv kv;
    struct error error = {0};
    assert_int_equal(kv_create(&kv, 0, 1, 1, 1, &error), FATHOM_INVALID);
    assert_int_equal(kv_create(&kv, (size_t)INT32_MAX + 1, 1, 1, 1, &error), FATHOM_INVALID);
    assert_int_equal(kv_create(&kv, 1, 2, SIZE_MAX, 1, &error), FATHOM_INVALID);
    kv_destroy(&kv);
}

/* References recounted from the tables must be those kept; a block without any is either free, and
 * then not published, or idle, and then published. */
static void check_everything(const struct kv *kv) {
    uint32_t counted[32] = {0};
    assert_true(kv->blocks <= 32);
    for (size_t slot = 0; slot < kv->slots; slot++) {
        for (size_t i = 0; i < kv->held[slot]; i++) {
            int32_t block = kv_block_at(kv, slot, i);
            assert_in_range(block, 0, kv->blocks - 1);
            counted[block]++;
        }
    }
    size_t used = 0, idle = 0;
    for (size_t i = 0; i < kv->blocks; i++) {
        assert_int_equal(counted[i], kv->block[i].references);
        used += counted[i] > 0;
    }
    assert_int_equal(used, kv_blocks_used(kv));
    for (size_t i = 0; i < kv->free_count; i++) {
        assert_int_equal(counted[kv->free_blocks[i]], 0);
        assert_int_equal(kv_serial(kv, kv->free_blocks[i]), 0);
        counted[kv->free_blocks[i]] = 1; /* a second time on the stack would be found */
    }
    for (int32_t block = kv->oldest; block >= 0; block = kv->block[block].newer, idle++) {
        assert_int_equal(counted[block], 0);
        assert_int_not_equal(kv_serial(kv, block), 0);
        counted[block] = 1;
    }
    assert_int_equal(idle, kv->idle_count);
    for (size_t i = 0; i < kv->blocks; i++) assert_true(counted[i] > 0);
}

/* Publishes or adopts a random entry of the slot, as its holders would. */
static void use_randomly(struct kv *kv, size_t slot) {
    size_t i = (size_t)rand() % (kv->held[slot] + 1);
    uint64_t parent = (uint64_t)(rand() % 8);
    const int32_t *tokens = some_tokens(rand() % 8);
    int32_t found = prefix_index_find(&kv->index, parent, tokens);
    if (found >= 0 && i < kv->blocks_per_slot) {
        kv_adopt(kv, slot, i, found);
        assert_int_equal(kv_block_at(kv, slot, i), found);
    } else if (i < kv->held[slot] && kv_serial(kv, kv_block_at(kv, slot, i)) == 0) {
        kv_publish(kv, slot, i, parent, tokens);
    }
}

static void test_random_use_conserves_blocks(void **state) {
    (void)state;
    struct kv kv;
    assert_int_equal(kv_create(&kv, 32, 1, 6, 12, NULL), 0);
    srand(7);
    for (size_t event = 0; event < 100000; event++) {
        size_t slot = (size_t)rand() % 6;
        size_t tokens = (size_t)rand() % (12 * KV_BLOCK_TOKENS + 1);
        switch (rand() % 4) {
        case 0: kv_release(&kv, slot); break;
        case 1: use_randomly(&kv, slot); break;
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
        cmocka_unit_test(test_published_blocks_outlive_their_holder),
        cmocka_unit_test(test_the_end_of_the_oldest_chain_goes_first),
        cmocka_unit_test(test_adopting_gives_back_the_own_copy),
        cmocka_unit_test(test_roots_tell_tiers_and_tenants_apart),
        cmocka_unit_test(test_impossible_sizes_are_refused),
        cmocka_unit_test(test_random_use_conserves_blocks),
    };
    return cmocka_run_group_tests_name("kv", tests, NULL, NULL);
}
