/* The arithmetic of predictions by hand, and that what is measured on a real device makes sense. */
#include "engine/cost.h"

#include "golden.h"

#include <math.h>

static const struct cost_model simple = {
    .blocks = 10,
    .count = 3,
    .points = {{1, 100, 10, 20, 5}, {4, 110, 16, 26, 8}, {16, 200, 40, 74, 20}},
    .attended_ns = 0.5,
    .gather_factor = 1.2,
};

static void check_near(double value, double expected) {
    if (fabs(value - expected) > 1e-9 * fabs(expected)) fail_msg("%g, not %g", value, expected);
}

static void test_parts_add_up(void **state) {
    (void)state;
    struct cost_load load = {0};
    check_near(cost_predict(&simple, &load), 0);
    load.rows = 1;
    check_near(cost_predict(&simple, &load), 100);
    load.attn_rows = 0.5; /* half a chance that it runs */
    check_near(cost_predict(&simple, &load), 100 + 10 * 5);
    load = (struct cost_load){.rows = 10, .attn_rows = 4, .mlp_rows = 16, .attended = 100};
    check_near(cost_predict(&simple, &load), 155 + 10 * 16 + 10 * 74 + 10 * 50);
    load = (struct cost_load){.rows = 4, .logit_rows = 2.5};
    check_near(cost_predict(&simple, &load), 110 + 6.5);
    load = (struct cost_load){.rows = 28, .mlp_rows = 28}; /* the last slope goes on */
    check_near(cost_predict(&simple, &load), 290 + 10 * 122);
}

static void test_more_work_never_takes_less(void **state) {
    (void)state;
    double last = 0;
    for (double rows = 0; rows < 60; rows += 0.25) {
        struct cost_load load = {rows, rows, rows, rows * rows, rows};
        double now = cost_predict(&simple, &load);
        assert_true(now >= last);
        last = now;
    }
}

static void test_bodies_follow_the_times(void **state) {
    (void)state;
    assert_true(cost_prefers_gather(&simple, 1, 4, 16));   /* 31.2 against 74 */
    assert_false(cost_prefers_gather(&simple, 1, 15, 16)); /* 84 against 74 */
    assert_false(cost_prefers_gather(&simple, 0, 16, 16)); /* nobody skips */
    assert_true(cost_prefers_gather(NULL, 0, 15, 16));
    struct cost_model nothing = {0};
    assert_true(cost_prefers_gather(&nothing, 0, 15, 16));
}

static void test_ridge(void **state) {
    (void)state;
    assert_int_equal(cost_find_ridge(&simple), 7); /* 42 at four rows, 60 at seven */
    struct cost_model flat = simple;
    flat.count = 2;
    assert_int_equal(cost_find_ridge(&flat), 0);
}

static void test_measured(void **state) {
    (void)state;
    static const char *const names[] = {"gqa-relu2", "mqa-gelu-omit"};
    for (size_t i = 0; i < 2; i++) {
        char folder[512];
        snprintf(folder, sizeof folder, "%s%s", GOLDEN_FOLDER, names[i]);
        struct model_options options = {.device = "cpu", .threads = 1, .max_step_rows = 64};
        struct model *model = golden_model(folder, &options);
        struct error error = {0};
        assert_int_equal(model_get_cost(model)->count, 0);
        must(model_measure_cost(model, &error), &error);
        const struct cost_model *cost = model_get_cost(model);
        assert_in_range(cost->count, 3, COST_POINTS_MAX);
        assert_int_equal(cost->blocks, model_get_info(model)->blocks);
        for (size_t j = 0; j < cost->count; j++) {
            const struct cost_point *point = &cost->points[j];
            assert_true(point->step_ns > 0 && point->attn_ns > 0 && point->mlp_ns > 0);
            assert_true(point->head_ns >= 0);
            if (j > 0) assert_true(point->rows > point[-1].rows);
            if (j > 0) assert_true(point->step_ns >= point[-1].step_ns);
        }
        assert_true(cost->attended_ns >= 0);
        assert_true(cost->gather_factor >= 1 && cost->gather_factor <= 2);
        model_destroy(model);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_add_up),
        cmocka_unit_test(test_more_work_never_takes_less),
        cmocka_unit_test(test_bodies_follow_the_times),
        cmocka_unit_test(test_ridge),
        cmocka_unit_test(test_measured),
    };
    return cmocka_run_group_tests_name("cost", tests, NULL, NULL);
}
