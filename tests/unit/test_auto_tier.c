/* The tier that the server chooses: the best one at rest, worse ones under load, the floor at last,
 * and no flapping. */
#include "engine/auto_tier.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define MS 1e6

/* 1 ms a row of a prompt, 10 ms and 1 ms a row for a step. */
static const struct cost_model cost = {
    .blocks = 1,
    .count = 2,
    .points = {{1, 1 * MS, 0.5 * MS, 0.5 * MS, 0}, {1001, 1 * MS, 500.5 * MS, 500.5 * MS, 0}},
    .gather_factor = 1,
};

/* Not in order: the skip says which is better. */
static const struct model_info info = {
    .tier_count = 4,
    .tiers = {{.name = "balanced", .target_skip = 0.25},
              {.name = "full"},
              {.name = "fast", .target_skip = 0.4},
              {.name = "high", .target_skip = 0.1}},
};
enum { BALANCED, FULL, FAST, HIGH };

static double slowness = 1, step_target = 0, prefill_share = 0, arrivals = 0;

static struct auto_choice choose(size_t unfinished, size_t pending, size_t previous, size_t floor) {
    struct auto_load load = {
        .unfinished = unfinished,
        .max_sequences = 100,
        .max_step_rows = 256,
        .step_target = step_target,
        .prefill_share = prefill_share,
        .pending_tokens = pending,
        .prompt_tokens = 10,
        .seconds_per_end = 0.01,
        .tokens_per_end = 10,
        .arrivals_per_second = arrivals,
        .mean_work = 1,
        .slowness = slowness,
    };
    struct auto_options options = {1, 0.05, floor, previous};
    struct auto_choice choice;
    auto_tier_choose(&cost, &info, &load, &options, &choice);
    return choice;
}

static void test_at_rest_it_is_the_best(void **state) {
    (void)state;
    for (size_t previous = 0; previous < 4; previous++) {
        struct auto_choice choice = choose(0, 0, previous, FAST);
        assert_int_equal(choice.tier, FULL);
        assert_int_equal(choice.reason, AUTO_WITHIN);
    }
    assert_int_equal(choose(5, 100, FULL, FAST).tier, FULL);
}

static void test_load_takes_it_down_step_by_step(void **state) {
    (void)state;
    static const size_t order[] = {FULL, HIGH, BALANCED, FAST};
    size_t last = 0, seen = 0;
    for (size_t pending = 0; pending < 3000; pending += 10) {
        struct auto_choice choice = choose(10, pending, order[last], FAST);
        size_t now = last;
        while (order[now] != choice.tier) assert_true(++now < 4); /* never up */
        seen += now != last;
        last = now;
        if (choice.tier != FULL) assert_int_equal(choice.reason, AUTO_FIRST_TOKEN);
    }
    assert_int_equal(last, 3);
    assert_int_equal(seen, 3);
    struct auto_choice choice = choose(60, 0, FULL, FAST);
    assert_int_equal(choice.reason, AUTO_PER_TOKEN);
    assert_true(choice.tier != FULL && choice.per_token < 0.06);
}

static void test_the_floor_holds(void **state) {
    (void)state;
    assert_int_equal(choose(1000, 100000, FULL, HIGH).tier, HIGH);
    assert_int_equal(choose(1000, 100000, FULL, FULL).tier, FULL);
    assert_int_equal(choose(1000, 100000, FULL, FAST).tier, FAST);
}

/* Near the objective: down at once, up only with room. */
static void test_it_does_not_flap(void **state) {
    (void)state;
    size_t pending = 0;
    while (choose(10, pending, FULL, FAST).tier == FULL) pending += 10;
    assert_int_equal(choose(10, pending - 10, FULL, FAST).tier, FULL);
    assert_int_equal(choose(10, pending - 10, HIGH, FAST).tier, HIGH);
    assert_int_equal(choose(10, pending * 6 / 10, HIGH, FAST).tier, FULL);
}

static void test_those_beyond_the_slots_count(void **state) {
    (void)state;
    struct auto_choice few = choose(99, 0, FULL, FULL), many = choose(199, 0, FULL, FULL);
    assert_true(many.first_token > few.first_token + 0.9);
    assert_true(many.per_token == few.per_token);
}

/* The same load on a machine that turns out to be slower goes lower, never higher. */
static void test_a_slow_machine_goes_lower(void **state) {
    (void)state;
    size_t lower = 0;
    for (size_t rows = 1; rows < 90; rows += 4) {
        struct auto_choice quick = choose(rows, 0, FULL, FAST);
        slowness = 3;
        struct auto_choice slow = choose(rows, 0, FULL, FAST);
        slowness = 1;
        double quick_skip = info.tiers[quick.tier].target_skip;
        double slow_skip = info.tiers[slow.tier].target_skip;
        assert_true(slow_skip >= quick_skip);
        lower += slow_skip > quick_skip;
    }
    assert_true(lower > 0);
}

/* The less room prompts have beside those who decode, the longer they take. */
static void test_a_step_target_makes_first_tokens_wait(void **state) {
    (void)state;
    double before = 0;
    static const double targets[] = {0, 0.05, 0.02, 0.01};
    for (size_t i = 0; i < 4; i++) {
        step_target = targets[i];
        struct auto_choice choice = choose(40, 2000, FULL, FULL);
        step_target = 0;
        assert_true(choice.first_token >= before);
        before = choice.first_token;
    }
    step_target = 0.01;
    struct auto_choice tight = choose(40, 2000, FULL, FULL);
    prefill_share = 0.5;
    struct auto_choice shared = choose(40, 2000, FULL, FULL);
    step_target = prefill_share = 0;
    assert_true(tight.first_token > choose(40, 2000, FULL, FULL).first_token);
    assert_true(tight.first_token > shared.first_token);
}

/* A row takes 1 ms at full depth, a request 10 rows: a hundred per second are all that can be done. */
static void test_more_than_can_be_done_goes_lower_before_there_is_a_queue(void **state) {
    (void)state;
    arrivals = 90;
    assert_int_equal(choose(15, 0, FULL, FAST).tier, FULL);
    arrivals = 500;
    struct auto_choice choice = choose(15, 0, FULL, FAST);
    arrivals = 0;
    assert_true(choice.tier != FULL);
    assert_int_equal(choice.reason, AUTO_FIRST_TOKEN);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_at_rest_it_is_the_best),
        cmocka_unit_test(test_a_slow_machine_goes_lower),
        cmocka_unit_test(test_a_step_target_makes_first_tokens_wait),
        cmocka_unit_test(test_more_than_can_be_done_goes_lower_before_there_is_a_queue),
        cmocka_unit_test(test_load_takes_it_down_step_by_step),
        cmocka_unit_test(test_the_floor_holds),
        cmocka_unit_test(test_it_does_not_flap),
        cmocka_unit_test(test_those_beyond_the_slots_count),
    };
    return cmocka_run_group_tests_name("auto tier", tests, NULL, NULL);
}
